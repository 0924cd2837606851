//! Volumes of kubelet that are in memory: `emptyDir` with the medium `Memory`. kubelet mounts a tmpfs for each.
//!
//! What a container writes to a tmpfs of the host is charged to the VMM, in addition to the guest's memory. Then the
//! host would kill the VMM of a pod that fills such a volume. So the guest has a tmpfs of its own instead, whose pages
//! are charged to the container that writes them. The one of the host stays empty. Nobody but the pod needs it: kubelet
//! looks only at how much of it is used, and removes it with the pod.

use std::{
    ffi::OsStr,
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Component, Path, PathBuf},
};

use rustix::fs::{FileType, Mode, OFlags, fstat, fstatfs, major, minor, open, statvfs};

use crate::host::{
    mountinfo::{self, Mount},
    no_symlinks,
};

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

/// The volume in memory that this source of a bind mount is, or is a part of. None: it is something else, which the
/// container gets from the host. `pod_uid` is kubelet's name for the pod. A volume of another pod, such as one that a
/// `hostPath` leads to, is something else: that pod has its own files in it. Without a name each one is taken for the
/// pod's own: an old containerd does not tell it.
pub(crate) fn find(source: &Path, pod_uid: Option<&str>) -> io::Result<Option<MemoryVolume>> {
    if !source.components().any(|part| [VOLUMES, PARTS].map(OsStr::new).contains(&part.as_os_str())) {
        return Ok(None);
    }
    let opened = open(source, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    let stat = fstat(&opened)?;
    if fstatfs(&opened)?.f_type as u64 != TMPFS_MAGIC {
        return Ok(None);
    }
    let device = (major(stat.st_dev), minor(stat.st_dev));
    let path = fs::read_link(no_symlinks::proc_path(&opened))?;
    let table = mountinfo::read()?;
    let mounts: Vec<_> = mountinfo::mounts(&table).filter(|mount| mount.device == device).collect();
    let Some(volume) = mounts.iter().find(|mount| is_volume(mount, pod_uid)) else { return Ok(None) };
    let part = part_of(&mounts, &path)
        .ok_or_else(|| io::Error::other("its place in the volume is not known, because its mount is gone"))?;
    // The spec for the guest has no path that is not UTF-8.
    if part.to_str().is_none() {
        return Err(io::Error::other("its path in the volume is not UTF-8"));
    }
    // The files of the volume are the guest's, so this one was made by somebody on the host.
    if !FileType::from_raw_mode(stat.st_mode).is_dir() {
        return Err(io::Error::other(
            "it is a file of a volume in memory, of which a container gets directories",
        ));
    }
    let topmost = fs::metadata(&volume.place)?;
    if topmost.dev() != stat.st_dev {
        return Err(io::Error::other(format!("something else is mounted over {}", volume.place.display())));
    }
    let size = statvfs(&volume.place)?;
    Ok(Some(MemoryVolume {
        name: format!("{}-{}", device.0, device.1),
        bytes: size.f_blocks.saturating_mul(size.f_frsize),
        mode: topmost.mode() & 0o7777,
        uid: topmost.uid(),
        gid: topmost.gid(),
        part,
    }))
}

/// Whether this is where kubelet has mounted a whole volume of the pod:
/// `pods/UID/volumes/kubernetes.io~empty-dir/NAME`.
fn is_volume(mount: &Mount<'_>, pod_uid: Option<&str>) -> bool {
    let name_of = |nth: usize| mount.place.ancestors().nth(nth).and_then(Path::file_name);
    let is_own = pod_uid.is_none_or(|uid| name_of(3) == Some(OsStr::new(uid)));
    mount.root == Path::new("/") && name_of(1) == Some(OsStr::new(VOLUMES)) && is_own
}

/// Which part of a volume with these mounts is at `path`.
fn part_of(mounts: &[Mount<'_>], path: &Path) -> Option<PathBuf> {
    let around = mounts.iter().filter(|mount| !mount.is_removed() && path.starts_with(&mount.place));
    let around = around.max_by_key(|mount| mount.place.as_os_str().len())?;
    let part = around.root.join(path.strip_prefix(&around.place).ok()?);
    Some(part.components().filter(|part| matches!(part, Component::Normal(_))).collect())
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
        let found = find(&volume, None).unwrap().unwrap();
        assert_eq!((found.bytes, found.mode, found.uid, found.gid), (64 << 20, 0o2770, 3, 4));
        assert_eq!(found.part, Path::new(""));

        // kubelet makes the directory of a subPath, and binds it elsewhere.
        fs::create_dir_all(volume.join("one/part")).unwrap();
        let part = kubelet.path().join("pods/uid/volume-subpaths/a cache/container/0");
        fs::create_dir_all(&part).unwrap();
        mount(Some(&volume.join("one/part")), &part, None::<&str>, MsFlags::MS_BIND, None::<&str>).unwrap();
        assert_eq!(
            find(&part, None).unwrap(),
            Some(MemoryVolume { part: "one/part".into(), ..found.clone() })
        );
        assert_eq!(
            find(&volume.join("one"), None).unwrap(),
            Some(MemoryVolume { part: "one".into(), ..found })
        );

        // The volume of this pod, and of another one.
        assert!(find(&volume, Some("uid")).unwrap().is_some() && find(&part, Some("uid")).unwrap().is_some());
        assert_eq!(
            (find(&volume, Some("other")).unwrap(), find(&part, Some("other")).unwrap()),
            (None, None)
        );

        // A volume on a disk, a secret, which is in memory too, and a file.
        let disk = volumes.join(VOLUMES).join("disk");
        fs::create_dir(&disk).unwrap();
        let is_memory = find(&disk, None).unwrap().is_some();
        assert!(!is_memory);
        let secret = volumes.join("kubernetes.io~secret/token");
        tmpfs(&secret, "size=64m");
        assert_eq!(find(&secret, None).unwrap(), None);
        fs::write(volume.join("file"), "").unwrap();
        let error = |name: &str| find(&volume.join(name), None).unwrap_err().to_string();
        assert!(error("file").starts_with("it is a file of a volume in memory"));
        assert!(error("missing").starts_with("No such file"));
        assert_eq!(find(Path::new("/dev/shm"), None).unwrap(), None);
    }
}
