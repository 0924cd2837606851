//! What VMs take of the host: memory, and room in /run.

use std::{fs, path::Path};

use bulkhead_host_shim::operator::{Config, largest_template_mib};

use crate::check::finding::Finding;

/// The files that some pods and templates take.
const FILES: u64 = 1000;

/// The size of a huge page of the host's pool.
const HUGE_PAGE_MIB: u64 = 2;

/// Whether there is memory for a VM.
pub(super) fn memory(root: &Path, config: &Config) -> Finding {
    let text = fs::read_to_string(root.join("proc/meminfo")).unwrap_or_default();
    let value = |name: &str| number(&text, name);
    let (Some(total), Some(available)) = (value("MemTotal:"), value("MemAvailable:")) else {
        return Finding::warn("memory", "/proc/meminfo cannot be read", "mount /proc");
    };
    let (total, available, needed) = (total >> 10, available >> 10, u64::from(config.memory_mib));
    if config.hugepages {
        let free = value("HugePages_Free:").unwrap_or(0) * HUGE_PAGE_MIB;
        return match free >= needed {
            true => {
                Finding::ok("memory", format!("{free} MiB of huge pages are free; a VM takes {needed} MiB"))
            }
            false => Finding::fail(
                "memory",
                format!("{free} MiB of huge pages are free, and a VM takes {needed} MiB (`hugepages` is on)"),
                "raise vm.nr_hugepages, or set `hugepages = false`",
            ),
        };
    }
    let found = format!("{available} of {total} MiB are available, and `memory_mib` is {needed}");
    match available >= needed {
        true => Finding::ok("memory", found),
        false => Finding::bad(total >= needed, "memory", found, "end something, or set a lower `memory_mib`"),
    }
}

fn number(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Whether there is room for the state of pods and for templates.
pub(super) fn run(directory: &Path, config: &Config) -> Finding {
    let shown = directory.display();
    let room = match rustix::fs::statvfs(directory) {
        Ok(room) => room,
        Err(error) => {
            return Finding::fail(
                "/run",
                format!("{shown}: {error}"),
                "mount a tmpfs there; systemd does so",
            );
        }
    };
    let free = room.f_bavail.saturating_mul(room.f_frsize) >> 20;
    let needed = u64::from(largest_template_mib(config));
    let found = format!("{free} MiB are free in {shown}");
    // Some file systems have no limit, and say 0.
    if room.f_files > 0 && room.f_favail < FILES {
        let found = format!("{} more files have room in {shown}", room.f_favail);
        return Finding::bad(
            room.f_favail > 0,
            "/run",
            found,
            "remove files there, or mount it with a larger nr_inodes",
        );
    }
    match (config.templates && !config.hugepages && !config.console, free >= needed) {
        (_, true) => Finding::ok("/run", found),
        (false, _) => {
            Finding::bad(free > 0, "/run", found, "make it larger: `mount -o remount,size=1G /run`")
        }
        (true, false) => Finding::warn(
            "/run",
            format!("{found}, and a template may take {needed} MiB, so each VM boots"),
            "make it larger: `mount -o remount,size=1G /run`",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::finding::Status;

    fn with(meminfo: &str, config: &Config) -> Finding {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("proc")).unwrap();
        fs::write(dir.path().join("proc/meminfo"), meminfo).unwrap();
        memory(dir.path(), config)
    }

    #[test]
    fn memory_is_compared_with_what_a_vm_takes() {
        let meminfo = |total: u64, available: u64| {
            format!(
                "MemTotal: {} kB\nMemFree: 1 kB\nMemAvailable: {} kB\nHugePages_Free: 4\n",
                total << 10,
                available << 10
            )
        };
        let mut config = Config::default();
        let statuses = [(4096, 2048), (4096, 100), (128, 100)]
            .map(|(total, available)| with(&meminfo(total, available), &config).status);
        assert_eq!(statuses, [Status::Ok, Status::Warn, Status::Fail]);
        config.hugepages = true;
        let finding = with(&meminfo(4096, 2048), &config);
        assert!(
            finding.status == Status::Fail && finding.found.starts_with("8 MiB of huge pages"),
            "{finding:?}"
        );
        assert_eq!(with("MemTotal: many\n", &config).status, Status::Warn);
    }

    #[test]
    fn a_directory_for_the_state_must_exist() {
        assert_eq!(run(Path::new("/nonexistent/run"), &Config::default()).status, Status::Fail);
        let config = Config { memory_mib: u32::MAX, ..Config::default() };
        assert_eq!(run(Path::new("/"), &config).status, Status::Warn);
        assert_eq!(run(Path::new("/"), &Config { memory_mib: 0, ..config }).status, Status::Ok);
    }
}
