//! What /proc says of a process of a pod.

use std::fs;

use crate::host::process_id::ProcessId;

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
    fn this_process_uses_memory() {
        let own = ProcessId::of(std::process::id()).unwrap();
        assert!(memory(own).unwrap() > 100_000);
        // What a damaged journal may say.
        let none = ProcessId { pid: u32::MAX, start_time: u64::MAX, pid_namespace: None };
        assert_eq!(memory(none), None);
    }

    #[test]
    fn the_line_is_found_by_its_whole_name() {
        let text = "Rss:  10 kB\nPss_Dirty: 3 kB\nPss:   7 kB\n";
        assert_eq!(kibibytes(text, "Pss:"), Some(7));
        assert_eq!(kibibytes("Pss: many kB\n", "Pss:"), None);
    }
}
