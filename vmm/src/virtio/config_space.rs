//! Device configuration space (virtio 1.3, 2.5).

/// Copies the bytes of `config` from `offset` on to `data`, and leaves the rest of `data` unchanged.
pub(super) fn read_config(config: &[u8], offset: u64, data: &mut [u8]) {
    let rest = usize::try_from(offset).ok().and_then(|offset| config.get(offset..)).unwrap_or(&[]);
    for (to, from) in data.iter_mut().zip(rest) {
        *to = *from;
    }
}
