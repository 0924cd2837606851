//! Volumes that are in memory, which the guest has instead of the host.
//!
//! `emptyDir` with the medium `Memory`: kubelet mounts a tmpfs for each.
//!
//! What a container writes to a tmpfs of the host is charged to the VMM, in addition to the guest's memory. Then the
//! host would kill the VMM of a pod that fills such a volume. So the guest has a tmpfs of its own instead, whose pages
//! are charged to the container that writes them. The one of the host stays empty. Nobody but the pod needs it: kubelet
//! looks only at how much of it is used, and removes it with the pod.
//!
//! A hugetlbfs of the host, such as /dev/hugepages or an `emptyDir` with the medium `HugePages`: the guest has one of
//! its own, since its huge pages are not the host's.

use std::{
    ffi::OsStr,
    fs, io,
    os::{fd::OwnedFd, unix::fs::MetadataExt},
    path::{Component, Path, PathBuf},
};

use bulkhead_agent_api::HUGE_PAGE;
use rustix::fs::{FileType, Mode, OFlags, Stat, fstat, fstatfs, major, minor, open, statvfs};

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
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

/// A volume of which a container gets the whole or a part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MemoryVolume {
    /// Its name among the volumes of the guest: the number of the host's file system.
    pub(crate) name: String,
    /// Whether its files are huge pages.
    pub(crate) huge_pages: bool,
    /// The most that fits in. 0 for huge pages: as much as there are pages.
    pub(crate) bytes: u64,
    /// Of its topmost directory, as the host has them.
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
    if !is_of_kubelet(source) {
        return Ok(None);
    }
    let opened = open(source, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    let stat = fstat(&opened)?;
    if fstatfs(&opened)?.f_type as u64 != TMPFS_MAGIC {
        return Ok(None);
    }
    let size = |place: &Path| {
        let size = statvfs(place)?;
        Ok(size.f_blocks.saturating_mul(size.f_frsize))
    };
    in_volume(&opened, &stat, |mount| is_volume(mount, pod_uid), size)
}

fn is_of_kubelet(source: &Path) -> bool {
    source.components().any(|part| [VOLUMES, PARTS].map(OsStr::new).contains(&part.as_os_str()))
}

/// The table of mounts, for [`find_huge_pages`].
pub(crate) fn mounts() -> io::Result<Vec<u8>> {
    mountinfo::read()
}

/// The hugetlbfs that this source of a bind mount is in. None: it is not in one, or cannot be looked at, which is for
/// the mount to say. The source is opened only if the table says that it is in one, if it is kubelet's, or if it has a
/// `..`, since the table does not say where that leads. Opening others may hang. The guest has one of its own for each
/// of the host's, with the same files for all containers of the pod.
pub(crate) fn find_huge_pages(source: &Path, table: &[u8]) -> io::Result<Option<MemoryVolume>> {
    let around = mountinfo::mounts(table).filter(|mount| source.starts_with(&mount.place));
    let around = around.max_by_key(|mount| mount.place.as_os_str().len());
    let is_plain = !source.components().any(|part| part == Component::ParentDir);
    if is_plain && !is_of_kubelet(source) && around.is_none_or(|mount| mount.file_system != b"hugetlbfs") {
        return Ok(None);
    }
    let Ok(opened) = open(source, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()) else { return Ok(None) };
    let Ok(file_system) = fstatfs(&opened) else { return Ok(None) };
    if file_system.f_type as u64 != HUGETLBFS_MAGIC {
        return Ok(None);
    }
    let page = u64::try_from(file_system.f_bsize).unwrap_or(0);
    if page != HUGE_PAGE {
        let reason =
            format!("it is a hugetlbfs with pages of {page} bytes, and the guest has pages of {HUGE_PAGE}");
        return Err(io::Error::new(io::ErrorKind::Unsupported, reason));
    }
    // Without a limit the kernel says 0 or -1 (fs/hugetlbfs/inode.c, hugetlbfs_statfs).
    let pages = if file_system.f_blocks == u64::MAX { 0 } else { file_system.f_blocks };
    let is_whole = |mount: &Mount<'_>| mount.root == Path::new("/");
    let found = in_volume(&opened, &fstat(&opened)?, is_whole, |_| Ok(pages.saturating_mul(page)))?;
    let found =
        found.ok_or_else(|| io::Error::other("the topmost directory of its hugetlbfs is not mounted"))?;
    Ok(Some(MemoryVolume { huge_pages: true, ..found }))
}

/// The volume that `opened` is in, by the mount of the whole volume, which `is_whole` finds. None: there is no such
/// mount. `size` says how much fits in.
fn in_volume(
    opened: &OwnedFd,
    stat: &Stat,
    is_whole: impl Fn(&Mount<'_>) -> bool,
    size: impl Fn(&Path) -> io::Result<u64>,
) -> io::Result<Option<MemoryVolume>> {
    let device = (major(stat.st_dev), minor(stat.st_dev));
    let path = fs::read_link(no_symlinks::proc_path(opened))?;
    let table = mountinfo::read()?;
    let mounts: Vec<_> = mountinfo::mounts(&table).filter(|mount| mount.device == device).collect();
    let Some(volume) = mounts.iter().find(|mount| is_whole(mount)) else { return Ok(None) };
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
    Ok(Some(MemoryVolume {
        name: format!("{}-{}", device.0, device.1),
        huge_pages: false,
        bytes: size(&volume.place)?,
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

/// Whether kubelet names a whole `emptyDir` volume of the pod `pod_uid` so, in memory or not. None: it is not known
/// which pod it is.
pub(crate) fn is_own_empty_dir(source: &Path, pod_uid: Option<&str>) -> bool {
    let name_of = |nth: usize| source.ancestors().nth(nth).and_then(Path::file_name);
    name_of(1) == Some(OsStr::new(VOLUMES)) && pod_uid.is_some_and(|uid| name_of(3) == Some(OsStr::new(uid)))
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
    fn an_empty_dir_is_the_pods_own_by_its_uid() {
        let source = Path::new("/var/lib/kubelet/pods/uid/volumes/kubernetes.io~empty-dir/cache");
        assert!(is_own_empty_dir(source, Some("uid")));
        assert!(!is_own_empty_dir(source, Some("another")) && !is_own_empty_dir(source, None));
        assert!(!is_own_empty_dir(&source.join("below"), Some("uid")));
    }

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

    #[test]
    fn a_hugetlbfs_is_found_wherever_it_is_mounted() {
        private_mounts();
        let host = tempfile::tempdir().unwrap();
        let hugetlbfs = |name: &str, options: &str| {
            let path = host.path().join(name);
            fs::create_dir(&path).unwrap();
            mount(Some("none"), &path, Some("hugetlbfs"), MsFlags::empty(), Some(options)).unwrap();
            path
        };
        let find_huge_pages = |source: &Path| find_huge_pages(source, &mounts().unwrap());
        let plain = hugetlbfs("pages", "pagesize=2M,mode=1770,gid=4");
        let found = find_huge_pages(&plain).unwrap().unwrap();
        assert_eq!((found.huge_pages, found.bytes, found.mode, found.gid), (true, 0, 0o1770, 4));
        fs::create_dir_all(plain.join("one/part")).unwrap();
        let part = find_huge_pages(&plain.join("one/part")).unwrap();
        assert_eq!(part, Some(MemoryVolume { part: "one/part".into(), ..found.clone() }));

        let roundabout = host.path().join("x/../pages/../pages/one/part");
        fs::create_dir(host.path().join("x")).unwrap();
        assert_eq!(find_huge_pages(&roundabout).unwrap(), part);

        // By a bind mount too, and another one has another name.
        let bound = host.path().join("bound");
        fs::create_dir(&bound).unwrap();
        mount(Some(&plain.join("one")), &bound, None::<&str>, MsFlags::MS_BIND, None::<&str>).unwrap();
        let part = find_huge_pages(&bound).unwrap();
        assert_eq!(part, Some(MemoryVolume { part: "one".into(), ..found.clone() }));
        let sized = find_huge_pages(&hugetlbfs("sized", "pagesize=2M,size=6M")).unwrap().unwrap();
        assert_eq!((sized.bytes, sized.name == found.name), (6 << 20, false));

        fs::write(plain.join("file"), "").unwrap();
        let error = find_huge_pages(&plain.join("file")).unwrap_err().to_string();
        assert!(error.starts_with("it is a file of a volume in memory"), "{error}");
        // Something else, and nothing at all.
        assert_eq!(find_huge_pages(host.path()).unwrap(), None);
        assert_eq!(find_huge_pages(&host.path().join("missing")).unwrap(), None);
    }
}
