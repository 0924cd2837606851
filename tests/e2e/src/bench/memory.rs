//! The memory that processes have for themselves, by /proc/PID/smaps (proc_pid_smaps(5)).

use std::path::Path;
use std::{fs, mem};

use anyhow::{Context, Result, anyhow};

use crate::ctr::Runtime;
use crate::snapshot::pids;

/// The flags of mappings that are a guest's memory (proc_pid_smaps(5)): the VMM maps it, and nothing else, without
/// reserving swap space, or on huge pages.
const OF_A_GUEST: [&str; 2] = ["nr", "ht"];

/// What one process costs.
#[derive(Debug, PartialEq)]
pub(crate) struct Footprint {
    /// Resident pages that no other process has, apart from the guest's memory, MiB.
    pub(crate) own_mib: f64,
    /// Resident pages of the guest's memory, MiB.
    pub(super) guest_mib: f64,
    /// All resident pages, each divided by the number of processes that have it, MiB.
    pub(super) share_mib: f64,
}

/// The resident pages of one mapping, KiB.
#[derive(Default)]
struct Mapping {
    resident: u64,
    private: u64,
}

impl Footprint {
    /// Looks at a process.
    pub(crate) fn of(pid: u32) -> Result<Footprint> {
        let path = format!("/proc/{pid}/smaps");
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
        Footprint::parse(&text).ok_or_else(|| anyhow!("cannot understand {path}"))
    }

    fn parse(smaps: &str) -> Option<Footprint> {
        let (mut own, mut guest, mut share) = (0, 0, 0);
        let mut mapping = Mapping::default();
        for line in smaps.lines() {
            let Some((name, value)) = line.split_once(':') else { continue };
            let kib = || value.trim().strip_suffix(" kB")?.parse::<u64>().ok();
            match name {
                "Rss" => mapping.resident = kib()?,
                "Pss" => share += kib()?,
                "Private_Clean" | "Private_Dirty" => mapping.private += kib()?,
                // The last line of a mapping.
                "VmFlags" => {
                    let Mapping { resident, private } = mem::take(&mut mapping);
                    if value.split(' ').any(|flag| OF_A_GUEST.contains(&flag)) {
                        guest += resident;
                    } else {
                        own += private;
                    }
                }
                _ => {}
            }
        }
        let mib = |kib: u64| kib as f64 / 1024.0;
        Some(Footprint { own_mib: mib(own), guest_mib: mib(guest), share_mib: mib(share) })
    }
}

/// The shim of a container.
pub(crate) fn find_shim(runtime: Runtime, id: &str) -> Result<u32> {
    find(&format!("the shim of {id}"), |pid| {
        let command = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let mut words = command.split('\0');
        let is_shim = words.next().is_some_and(|program| program.ends_with(runtime.shim()));
        is_shim && words.any(|word| word == id)
    })
}

/// The VMM that a shim has spawned.
pub(crate) fn find_vmm(shim: u32) -> Result<u32> {
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
VmFlags: rd ex mr mw me sd
7f0000000000-7f0000400000 rw-p 00000000 00:00 0
Size:               4096 kB
Rss:                2048 kB
Pss:                2048 kB
Private_Clean:         0 kB
Private_Dirty:      2048 kB
VmFlags: rd wr mr mw me nr sd hg
7f0000400000-7f0010000000 rw-p 00000000 00:1a 77 /run/bulkhead/.templates/1/memory
Size:             258048 kB
Rss:               38912 kB
Pss:                 960 kB
Private_Clean:         0 kB
Private_Dirty:         0 kB
VmFlags: rd wr mr mw me nr sd
7f0030000000-7f0034000000 rw-p 00000000 00:00 0      [heap]
Size:              65536 kB
Rss:                1016 kB
Pss:                1016 kB
Private_Clean:         0 kB
Private_Dirty:      1016 kB
VmFlags: rd wr mr mw me ac sd
";

    #[test]
    fn the_guests_memory_is_told_from_the_vmms() {
        let expected = Footprint { own_mib: 1.0, guest_mib: 40.0, share_mib: 4056.0 / 1024.0 };
        assert_eq!(Footprint::parse(SMAPS), Some(expected));
        assert_eq!(Footprint::parse("Rss: x kB\n"), None);
    }

    #[test]
    fn this_process_has_memory_of_its_own() {
        let footprint = Footprint::of(std::process::id()).unwrap();
        assert!(footprint.own_mib > 0.1, "{footprint:?}");
    }
}
