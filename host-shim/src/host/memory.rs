//! The memory of the host.

use std::{fs, io};

/// A VM that grows on demand leaves this part of the host's memory to others. Otherwise the host's kernel would run out
/// of memory before the guest's does, and would kill a whole VM instead of a process in it.
const LEFT_TO_OTHERS: u64 = 16;

/// Bytes that VMs may take from the host now, without what they leave to others.
pub(crate) fn spare() -> io::Result<u64> {
    spare_of(&fs::read_to_string("/proc/meminfo")?)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "/proc/meminfo has no MemAvailable"))
}

fn spare_of(meminfo: &str) -> Option<u64> {
    let bytes = |name: &str| -> Option<u64> {
        let kib = meminfo.lines().find_map(|line| line.strip_prefix(name)?.trim().strip_suffix("kB"))?;
        kib.trim().parse::<u64>().ok()?.checked_mul(1024)
    };
    Some(bytes("MemAvailable:")?.saturating_sub(bytes("MemTotal:")? / LEFT_TO_OTHERS))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sixteenth_of_the_host_is_left() {
        let text =
            |available: u64| format!("MemTotal:  16384 kB\nMemFree:  1 kB\nMemAvailable:  {available} kB\n");
        assert_eq!(spare_of(&text(9000)), Some(7976 << 10));
        assert_eq!(spare_of(&text(1000)), Some(0));
        assert_eq!(spare_of("MemTotal:  16384 kB\n"), None);
        assert!(spare().unwrap() > 0);
    }
}
