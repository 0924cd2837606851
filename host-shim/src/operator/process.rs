//! What /proc says of a process of a pod.

use std::{fs, time::Duration};

use rustix::param::clock_ticks_per_second;

use crate::host::process_id::ProcessId;

/// How long ago the process began.
pub(super) fn age(process: ProcessId) -> Option<Duration> {
    let uptime = fs::read_to_string("/proc/uptime").ok()?;
    let uptime: f64 = uptime.split_whitespace().next()?.parse().ok()?;
    let begun =
        Duration::try_from_secs_f64(process.start_time as f64 / clock_ticks_per_second() as f64).ok()?;
    Some(Duration::try_from_secs_f64(uptime).ok()?.saturating_sub(begun))
}

/// The memory that the process uses, in bytes. It is charged with its share of each page that others use too, such as
/// the pages of a template (proc_pid_smaps(5), Pss).
pub(super) fn memory(process: ProcessId) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{}/smaps_rollup", process.pid)).ok()?;
    kibibytes(&text, "Pss:")?.checked_mul(1024)
}

fn kibibytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().strip_suffix("kB")?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_is_young_and_uses_memory() {
        let own = ProcessId::of(std::process::id()).unwrap();
        assert!(age(own).unwrap() < Duration::from_secs(24 * 3600));
        assert!(memory(own).unwrap() > 100_000);
        // What a damaged journal may say.
        let none = ProcessId { pid: u32::MAX, start_time: u64::MAX, pid_namespace: None };
        assert_eq!((age(none), memory(none)), (Some(Duration::ZERO), None));
    }

    #[test]
    fn the_line_is_found_by_its_whole_name() {
        let text = "Rss:  10 kB\nPss_Dirty: 3 kB\nPss:   7 kB\n";
        assert_eq!(kibibytes(text, "Pss:"), Some(7));
        assert_eq!(kibibytes("Pss: many kB\n", "Pss:"), None);
    }
}
