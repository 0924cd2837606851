//! Volumes of kubelet that are in memory: `emptyDir` with the medium `Memory`. kubelet mounts a tmpfs for each.
//!
//! What a container writes to a tmpfs of the host is charged to the VMM, in addition to the guest's memory. Then the
//! host would kill the VMM of a pod that fills such a volume. So the guest has a tmpfs of its own instead, whose pages
//! are charged to the container that writes them. The one of the host stays empty. Nobody but the pod needs it: kubelet
//! looks only at how much of it is used, and removes it with the pod.

use std::{
    ffi::OsStr,
    fs, io,
    os::unix::{ffi::OsStrExt, fs::MetadataExt},
    path::{Component, Path, PathBuf},
};

use rustix::fs::{Mode, OFlags, fstat, fstatfs, major, minor, open, statvfs};

use crate::host::{mountinfo::unescape, no_symlinks};

/// The directory of a pod's `emptyDir` volumes, and that of parts of volumes (`subPath`), in kubelet's directory of the
/// pod.
const VOLUMES: &str = "kubernetes.io~empty-dir";
const PARTS: &str = "volume-subpaths";
/// statfs(2).
const TMPFS_MAGIC: u64 = 0x0102_1994;

/// A volume of which a container gets the whole or a part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MemoryVolume {
    /// Its name among the volumes of the guest: the number of the host's tmpfs.
    pub(crate) name: String,
    pub(crate) bytes: u64,
    /// Of its topmost directory, as kubelet has set them.
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// The part that the container gets, relative to the topmost directory. Empty: the whole.
    pub(crate) part: PathBuf,
}

/// A mount, as proc_pid_mountinfo(5) describes it.
struct Mounted {
    device: (u32, u32),
    /// The directory of the file system that is mounted.
    root: PathBuf,
    at: PathBuf,
}

/// The volume in memory that this source of a bind mount is, or is a part of.
pub(crate) fn find(source: &Path) -> io::Result<Option<MemoryVolume>> {
    if !source.components().any(|part| [VOLUMES, PARTS].map(OsStr::new).contains(&part.as_os_str())) {
        return Ok(None);
    }
    let opened = open(source, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    let stat = fstat(&opened)?;
    let is_directory = rustix::fs::FileType::from_raw_mode(stat.st_mode).is_dir();
    if fstatfs(&opened)?.f_type as u64 != TMPFS_MAGIC || !is_directory {
        return Ok(None);
    }
    let device = (major(stat.st_dev), minor(stat.st_dev));
    let path = fs::read_link(no_symlinks::proc_path(&opened))?;
    // Each thread has a mount namespace.
    let table = fs::read("/proc/thread-self/mountinfo")?;
    let Some((volume, part)) = volume_of(&table, device, &path) else { return Ok(None) };
    let topmost = fs::metadata(&volume)?;
    // The spec for the guest has no path that is not UTF-8.
    if topmost.dev() != stat.st_dev || part.to_str().is_none() {
        return Ok(None);
    }
    let size = statvfs(&volume)?;
    Ok(Some(MemoryVolume {
        name: format!("{}-{}", device.0, device.1),
        bytes: size.f_blocks.saturating_mul(size.f_frsize),
        mode: topmost.mode() & 0o7777,
        uid: topmost.uid(),
        gid: topmost.gid(),
        part,
    }))
}

/// Where the volume on this device is mounted, and which part of it is at `path`.
fn volume_of(table: &[u8], device: (u32, u32), path: &Path) -> Option<(PathBuf, PathBuf)> {
    let mounts = table.split(|byte| *byte == b'\n').filter_map(parse).filter(|mount| mount.device == device);
    let mounts: Vec<_> = mounts.collect();
    let is_volume = |mount: &&Mounted| {
        let directory = mount.at.parent().and_then(Path::file_name);
        mount.root == Path::new("/") && directory == Some(OsStr::new(VOLUMES))
    };
    let volume = mounts.iter().find(is_volume)?.at.clone();
    let around = mounts.iter().filter(|mount| path.starts_with(&mount.at));
    let around = around.max_by_key(|mount| mount.at.as_os_str().len())?;
    let part = around.root.join(path.strip_prefix(&around.at).ok()?);
    let part: PathBuf = part.components().filter(|part| matches!(part, Component::Normal(_))).collect();
    Some((volume, part))
}

fn parse(line: &[u8]) -> Option<Mounted> {
    let mut fields = line.split(|byte| *byte == b' ').skip(2);
    let device = std::str::from_utf8(fields.next()?).ok()?;
    let (major, minor) = device.split_once(':')?;
    let device = (major.parse().ok()?, minor.parse().ok()?);
    let (root, at) = (unescape(fields.next()?), unescape(fields.next()?));
    // A directory that was removed since.
    let is_removed = root.as_os_str().as_bytes().ends_with(b"//deleted");
    (!is_removed).then_some(Mounted { device, root, at })
}

#[cfg(test)]
mod tests {
    use nix::mount::{MsFlags, mount};

    use super::*;
    use crate::testing::private_mounts;

    #[test]
    fn only_kubelets_volumes_in_memory_are_found() {
        private_mounts();
        let kubelet = tempfile::tempdir().unwrap();
        let tmpfs = |path: &Path, options: &str| {
            fs::create_dir_all(path).unwrap();
            mount(Some("tmpfs"), path, Some("tmpfs"), MsFlags::empty(), Some(options)).unwrap();
        };
        let volumes = kubelet.path().join("pods/uid/volumes");
        let volume = volumes.join(VOLUMES).join("a cache");
        tmpfs(&volume, "size=64m,mode=2770,uid=3,gid=4");
        let found = find(&volume).unwrap().unwrap();
        assert_eq!((found.bytes, found.mode, found.uid, found.gid), (64 << 20, 0o2770, 3, 4));
        assert_eq!(found.part, Path::new(""));

        // kubelet makes the directory of a subPath, and binds it elsewhere.
        fs::create_dir_all(volume.join("one/part")).unwrap();
        let part = kubelet.path().join("pods/uid/volume-subpaths/a cache/container/0");
        fs::create_dir_all(&part).unwrap();
        mount(Some(&volume.join("one/part")), &part, None::<&str>, MsFlags::MS_BIND, None::<&str>).unwrap();
        assert_eq!(find(&part).unwrap(), Some(MemoryVolume { part: "one/part".into(), ..found.clone() }));
        assert_eq!(find(&volume.join("one")).unwrap(), Some(MemoryVolume { part: "one".into(), ..found }));

        // A volume on a disk, a secret, which is in memory too, and a file.
        let disk = volumes.join(VOLUMES).join("disk");
        fs::create_dir(&disk).unwrap();
        let is_memory = find(&disk).unwrap().is_some();
        assert!(!is_memory);
        let secret = volumes.join("kubernetes.io~secret/token");
        tmpfs(&secret, "size=64m");
        assert_eq!(find(&secret).unwrap(), None);
        fs::write(volume.join("file"), "").unwrap();
        assert_eq!(find(&volume.join("file")).unwrap(), None);
        assert!(find(&volume.join("missing")).is_err());
        assert_eq!(find(Path::new("/dev/shm")).unwrap(), None);
    }
}
