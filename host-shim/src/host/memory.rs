//! The memory of the host, and what its cgroups allow a pod.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use crate::host::cgroup::{Cgroup, CgroupError, Directory};

/// A VM that grows on demand leaves this part of the host's memory to others. Otherwise the host's kernel would run out
/// of memory before the guest's does, and would kill a whole VM instead of a process in it.
const LEFT_TO_OTHERS: u64 = 16;

/// A limit of cgroup v1 of this many bytes or more means that there is none: the kernel shows the largest number of
/// whole pages then, and its largest pages have 1 GiB.
const NO_LIMIT_V1: u64 = (i64::MAX as u64) & !0x3fff_ffff;

/// What the cgroups above a pod's allow it. None: they have no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Above {
    /// The lowest limit, bytes: what the pod may have if nobody else is below the cgroup with this limit.
    pub(crate) limit: Option<u64>,
    /// The least that is left below a limit now, bytes: what a VM of the pod may take in addition to what it has. A
    /// part of it is left to others, and to the page tables for the rest.
    pub(crate) room: Option<u64>,
}

/// The files of a cgroup that say what it may have and has. Those of v2 are described in Linux,
/// admin-guide/cgroup-v2.rst, and those of v1 in admin-guide/cgroup-v1/memory.rst.
struct Files {
    limit: &'static str,
    /// Above this the kernel does not kill, but slows down whoever takes memory, and so the guest.
    high: Option<&'static str>,
    used: &'static str,
    /// In memory.stat: the page cache that the kernel drops first.
    inactive_file: &'static str,
}

const V1: Files = Files {
    limit: "memory.limit_in_bytes",
    high: None,
    used: "memory.usage_in_bytes",
    inactive_file: "total_inactive_file",
};
const V2: Files = Files {
    limit: "memory.max",
    high: Some("memory.high"),
    used: "memory.current",
    inactive_file: "inactive_file",
};

impl Above {
    /// What the cgroups above this one allow it now.
    pub(crate) fn of(cgroup: &Cgroup) -> Result<Self, CgroupError> {
        let Some(directory) = cgroup.with_controller("memory") else { return Ok(Self::default()) };
        let files = Files::of(directory);
        let mut all = Self::default();
        for path in directory.above() {
            let limit = files.limit(path, files.limit)?;
            let high = files.high.map_or(Ok(None), |file| files.limit(path, file))?;
            let lowest = limit.into_iter().chain(high).min();
            all.limit = all.limit.into_iter().chain(limit).min();
            if let Some(lowest) = lowest {
                let left = lowest.saturating_sub(files.kept(path)?);
                all.room = all.room.into_iter().chain([left - left / LEFT_TO_OTHERS]).min();
            }
        }
        Ok(all)
    }

    /// The most that a VM may have which does not run yet.
    pub(crate) fn for_new_vm(self) -> Option<u64> {
        self.limit.into_iter().chain(self.room).min()
    }
}

/// The lowest memory limit of the cgroups above this one, bytes. None: they have none.
pub(crate) fn limit_above(cgroup: &Cgroup) -> Result<Option<u64>, CgroupError> {
    let Some(directory) = cgroup.with_controller("memory") else { return Ok(None) };
    let files = Files::of(directory);
    let limits = directory.above().map(|path| files.limit(path, files.limit));
    Ok(limits.collect::<Result<Vec<_>, _>>()?.into_iter().flatten().min())
}

impl Files {
    fn of(directory: &Directory) -> &'static Self {
        if directory.is_unified { &V2 } else { &V1 }
    }

    fn limit(&self, cgroup: &Path, file: &str) -> Result<Option<u64>, CgroupError> {
        limit_of(&cgroup.join(file))
    }

    /// What the cgroup has and the kernel cannot drop easily: its working set, as kubelet computes it.
    fn kept(&self, cgroup: &Path) -> Result<u64, CgroupError> {
        let (used, stat) = (cgroup.join(self.used), cgroup.join("memory.stat"));
        let damaged = |path: &PathBuf| CgroupError::Read {
            path: path.clone(),
            source: io::ErrorKind::InvalidData.into(),
        };
        let bytes = read(&used)?
            .and_then(|text| text.trim_end().parse::<u64>().ok())
            .ok_or_else(|| damaged(&used))?;
        let text = read(&stat)?.ok_or_else(|| damaged(&stat))?;
        let inactive =
            text.lines().find_map(|line| line.strip_prefix(self.inactive_file)?.trim().parse::<u64>().ok());
        Ok(bytes.saturating_sub(inactive.ok_or_else(|| damaged(&stat))?))
    }
}

/// None: there is no such file, as in the root, and in a cgroup without the controller.
fn read(path: &Path) -> Result<Option<String>, CgroupError> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(CgroupError::Read { path: path.to_owned(), source }),
    }
}

/// The limit of huge pages of this size in the cgroup above this one, bytes. The cgroup above is that of a pod, and
/// kubelet sets its limit to what the containers of the pod request together. None: there is no limit, or the
/// controller is missing.
pub(crate) fn huge_pages_above(cgroup: &Cgroup, size: &str) -> Result<Option<u64>, CgroupError> {
    let Some(directory) = cgroup.with_controller("hugetlb") else { return Ok(None) };
    let file = if directory.is_unified { "max" } else { "limit_in_bytes" };
    match directory.above().next() {
        Some(parent) => limit_of(&parent.join(format!("hugetlb.{size}.{file}"))),
        None => Ok(None),
    }
}

/// v2 writes `max` for no limit, and v1 the largest number of whole pages.
pub(crate) fn limit_of(file: &Path) -> Result<Option<u64>, CgroupError> {
    let text = read(file)?;
    Ok(text.and_then(|text| text.trim_end().parse().ok()).filter(|bytes| *bytes < NO_LIMIT_V1))
}

/// The memory of the host, bytes.
pub(crate) fn total() -> u64 {
    let info = rustix::system::sysinfo();
    u64::from(info.mem_unit).saturating_mul(info.totalram)
}

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
    use crate::host::cgroup::Directory;

    #[test]
    fn a_sixteenth_of_the_host_is_left() {
        let text =
            |available: u64| format!("MemTotal:  16384 kB\nMemFree:  1 kB\nMemAvailable:  {available} kB\n");
        assert_eq!(spare_of(&text(9000)), Some(7976 << 10));
        assert_eq!(spare_of(&text(1000)), Some(0));
        assert_eq!(spare_of("MemTotal:  16384 kB\n"), None);
        assert!(spare().unwrap() > 0);
    }

    /// A hierarchy by files, with the cgroup /a/b.
    fn hierarchy(root: &Path, is_unified: bool) -> Cgroup {
        let path = root.join("a/b");
        fs::create_dir_all(&path).unwrap();
        let controllers = if is_unified { Vec::new() } else { vec!["memory".into()] };
        Cgroup { directories: vec![Directory { root: root.into(), path, is_unified, controllers }] }
    }

    #[test]
    fn the_lowest_limit_above_and_the_least_room_below_one_are_found() {
        let root = tempfile::tempdir().unwrap();
        let cgroup = hierarchy(root.path(), true);
        let write = |name: &str, text: &str| fs::write(root.path().join(name), text).unwrap();
        assert_eq!(Above::of(&cgroup).unwrap(), Above::default());
        write("a/memory.max", "max\n");
        write("a/b/memory.max", "4096\n");
        assert_eq!(Above::of(&cgroup).unwrap(), Above::default(), "its own is not above it");

        // A slice with many pods: its limit is the higher one, but little of it is left.
        write("a/memory.max", "1600\n");
        write("a/memory.current", "100\n");
        write("a/memory.stat", "anon 90\ninactive_file 20\nactive_file 3\n");
        write("memory.max", "16000\n");
        write("memory.current", "15000\n");
        write("memory.stat", "anon 90\ninactive_file 600\n");
        assert_eq!(Above::of(&cgroup).unwrap(), Above { limit: Some(1600), room: Some(1520 - 95) });
        write("memory.current", "15800\n");
        let full = Above::of(&cgroup).unwrap();
        assert_eq!(full, Above { limit: Some(1600), room: Some(800 - 50) });
        assert_eq!(full.for_new_vm(), Some(750));

        // From here on the kernel would slow the guest down, though it does not kill.
        write("a/memory.high", "240\n");
        assert_eq!(Above::of(&cgroup).unwrap(), Above { limit: Some(1600), room: Some(160 - 10) });
        write("a/memory.high", "16\n");
        assert_eq!(Above::of(&cgroup).unwrap().room, Some(0));
        write("a/memory.stat", "anon 90\n");
        assert!(Above::of(&cgroup).unwrap_err().to_string().ends_with("a/memory.stat"));
    }

    #[test]
    fn v1_has_other_files() {
        let root = tempfile::tempdir().unwrap();
        let cgroup = hierarchy(root.path(), false);
        let write = |name: &str, text: &str| fs::write(root.path().join(name), text).unwrap();
        write("memory.limit_in_bytes", "9223372036854771712\n");
        assert_eq!(Above::of(&cgroup).unwrap(), Above::default());
        write("a/memory.limit_in_bytes", "8192\n");
        write("a/memory.usage_in_bytes", "8000\n");
        write("a/memory.stat", "inactive_file 1\ntotal_inactive_file 608\n");
        assert_eq!(Above::of(&cgroup).unwrap(), Above { limit: Some(8192), room: Some(800 - 50) });
    }

    #[test]
    fn the_huge_pages_of_a_pod_are_those_of_the_cgroup_right_above_its_own() {
        let root = tempfile::tempdir().unwrap();
        let cgroup = hierarchy(root.path(), true);
        let above = |cgroup: &Cgroup| huge_pages_above(cgroup, "2MB").unwrap();
        let write = |name: &str, text: &str| fs::write(root.path().join(name), text).unwrap();
        assert_eq!(above(&cgroup), None);
        // The slice of all pods, and the cgroup itself.
        write("hugetlb.2MB.max", "1073741824\n");
        write("a/b/hugetlb.2MB.max", "2097152\n");
        write("a/hugetlb.2MB.max", "max\n");
        assert_eq!(above(&cgroup), None);
        write("a/hugetlb.2MB.max", "8388608\n");
        assert_eq!(above(&cgroup), Some(8 << 20));
        write("a/hugetlb.1GB.max", "1073741824\n");
        assert_eq!(huge_pages_above(&cgroup, "1GB").unwrap(), Some(1 << 30));
        let mut cgroup = hierarchy(root.path(), false);
        cgroup.directories[0].controllers = vec!["hugetlb".into()];
        write("a/hugetlb.2MB.limit_in_bytes", "9223372036852678656\n");
        assert_eq!(above(&cgroup), None);
        // As the kernel writes it for pages of 1 GiB.
        write("a/hugetlb.2MB.limit_in_bytes", "9223372035781033984\n");
        assert_eq!(huge_pages_above(&cgroup, "2MB").unwrap(), None);
        write("a/hugetlb.2MB.limit_in_bytes", "0\n");
        assert_eq!(above(&cgroup), Some(0));
    }
}
