//! The memory that processes have for themselves, by /proc/PID/smaps (proc_pid_smaps(5)).

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, anyhow};

use crate::ctr::Runtime;
use crate::snapshot::pids;

/// Writable mappings that follow one another and are at least this large together are a guest's memory, which a clone
/// has in many pieces: nothing else of a VMM or a shim comes near it.
const GUEST_KIB: u64 = 16 * 1024;

/// What one process costs.
#[derive(Debug, PartialEq)]
pub(super) struct Footprint {
    /// Resident pages that no other process has, apart from the guest's memory, MiB.
    pub(super) own_mib: f64,
    /// Resident pages of the guest's memory, MiB.
    pub(super) guest_mib: f64,
    /// All resident pages, each divided by the number of processes that have it, MiB.
    pub(super) share_mib: f64,
}

/// Mappings that follow one another, KiB.
#[derive(Default)]
struct Run {
    is_writable: bool,
    end: u64,
    size: u64,
    resident: u64,
    private: u64,
}

impl Footprint {
    /// Looks at a process.
    pub(super) fn of(pid: u32) -> Result<Footprint> {
        let path = format!("/proc/{pid}/smaps");
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
        Footprint::parse(&text).ok_or_else(|| anyhow!("cannot understand {path}"))
    }

    fn parse(smaps: &str) -> Option<Footprint> {
        let mut runs: Vec<Run> = vec![Run::default()];
        let mut share = 0;
        for line in smaps.lines() {
            let mut words = line.split_whitespace();
            let (first, second) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
            let run = runs.last_mut()?;
            match first {
                "Size:" => run.size += second.parse::<u64>().ok()?,
                "Rss:" => run.resident += second.parse::<u64>().ok()?,
                "Pss:" => share += second.parse::<u64>().ok()?,
                "Private_Clean:" | "Private_Dirty:" => run.private += second.parse::<u64>().ok()?,
                // The first line of a mapping: addresses and permissions.
                _ if !first.ends_with(':') => {
                    let (start, end) = first.split_once('-')?;
                    let address = |text| u64::from_str_radix(text, 16).ok();
                    let (start, end) = (address(start)?, address(end)?);
                    let is_writable = second.starts_with("rw");
                    if start == run.end && is_writable == run.is_writable {
                        run.end = end;
                    } else {
                        runs.push(Run { is_writable, end, ..Run::default() });
                    }
                }
                _ => {}
            }
        }
        let (guest, own): (Vec<_>, Vec<_>) =
            runs.iter().partition(|run| run.is_writable && run.size >= GUEST_KIB);
        let mib = |kib: u64| kib as f64 / 1024.0;
        Some(Footprint {
            own_mib: mib(own.iter().map(|run| run.private).sum()),
            guest_mib: mib(guest.iter().map(|run| run.resident).sum()),
            share_mib: mib(share),
        })
    }
}

/// The shim of a container.
pub(super) fn find_shim(runtime: Runtime, id: &str) -> Result<u32> {
    find(&format!("the shim of {id}"), |pid| {
        let command = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let mut words = command.split('\0');
        let is_shim = words.next().is_some_and(|program| program.ends_with(runtime.shim()));
        is_shim && words.any(|word| word == id)
    })
}

/// The VMM that a shim has spawned.
pub(super) fn find_vmm(shim: u32) -> Result<u32> {
    find(&format!("the VMM of the shim {shim}"), |pid| {
        let exe = fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let parent = status.lines().find_map(|line| line.strip_prefix("PPid:")?.trim().parse().ok());
        exe.file_name() == Path::new("bulkhead-vmm").file_name() && parent == Some(shim)
    })
}

fn find(what: &str, is_it: impl Fn(u32) -> bool) -> Result<u32> {
    pids()?.into_iter().find(|pid| is_it(*pid)).with_context(|| format!("cannot find {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
55d0c0000000-55d0c0010000 r-xp 00000000 08:01 1234   /usr/lib/a program
Size:                 64 kB
Rss:                  64 kB
Pss:                  32 kB
Private_Clean:         8 kB
Private_Dirty:         0 kB
VmFlags: rd ex mr mw me
7f0000000000-7f0000400000 rw-p 00000000 00:00 0
Size:               4096 kB
Rss:                2048 kB
Pss:                2048 kB
Private_Clean:         0 kB
Private_Dirty:      2048 kB
7f0000400000-7f0010000000 rw-p 00000000 00:1a 77 /run/bulkhead/.templates/1/memory
Size:             258048 kB
Rss:               38912 kB
Pss:                 960 kB
Private_Clean:         0 kB
Private_Dirty:         0 kB
7f0020000000-7f0024000000 ---p 00000000 00:00 0
Size:              65536 kB
Rss:                   0 kB
Private_Clean:         0 kB
Private_Dirty:         0 kB
7f0030000000-7f0030100000 rw-p 00000000 00:00 0
Size:               1024 kB
Rss:                1016 kB
Pss:                1016 kB
Private_Clean:         0 kB
Private_Dirty:      1016 kB
";

    #[test]
    fn the_guests_memory_is_told_from_the_vmms() {
        let expected = Footprint { own_mib: 1.0, guest_mib: 40.0, share_mib: 4056.0 / 1024.0 };
        assert_eq!(Footprint::parse(SMAPS), Some(expected));
        assert_eq!(Footprint::parse("Size: x kB\nRss:"), None);
    }

    #[test]
    fn this_process_has_memory_of_its_own() {
        let footprint = Footprint::of(std::process::id()).unwrap();
        assert!(footprint.own_mib > 0.1, "{footprint:?}");
    }
}
