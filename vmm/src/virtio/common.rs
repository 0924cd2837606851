//! What devices have in common.

use std::error::Error;

use super::Interrupt;
use crate::guest_log::GuestLog;

/// Reads device configuration space: copies what `config` has at `offset` to the front of `data`, and leaves the rest.
pub(super) fn read_config(config: &[u8], offset: u64, data: &mut [u8]) {
    let rest = usize::try_from(offset).ok().and_then(|offset| config.get(offset..)).unwrap_or(&[]);
    for (to, from) in data.iter_mut().zip(rest) {
        *to = *from;
    }
}

/// Ends a worker of `device`: where it failed, says why in one line and declares the device broken.
pub(super) fn conclude(
    device: &str,
    served: Result<(), impl Error + 'static>,
    interrupt: &Interrupt,
    log: &GuestLog,
) {
    let Err(error) = served else { return };
    log.say(&format!("{device}: stopped until its driver resets it: {}", crate::one_line(&error)));
    // The line is an eventfd that the VMM holds; without it there is no way left to reach the driver.
    let _ = interrupt.needs_reset();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configuration_space_can_be_read_at_any_place() {
        let config = [1, 2, 3, 4];
        let read = |offset, len| {
            let mut data = vec![0; len];
            read_config(&config, offset, &mut data);
            data
        };
        assert_eq!(read(0, 4), [1, 2, 3, 4]);
        assert_eq!(read(2, 4), [3, 4, 0, 0]);
        assert_eq!(read(4, 1), [0]);
        assert_eq!(read(u64::MAX, 8), [0; 8]);
    }
}
