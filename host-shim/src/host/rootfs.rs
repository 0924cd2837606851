//! The file systems that the guest sees through the share: the container's root, and the sources of its bind mounts.

use std::{
    fs::{self, File},
    io,
    os::{
        fd::OwnedFd,
        unix::fs::{MetadataExt, lchown},
    },
    path::{Path, PathBuf},
    thread,
};

use bulkhead_agent_api::{
    MAX_HOST_SOCKETS,
    devices::{DEVICES, Device, Kind},
};
use nix::{
    errno::Errno,
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
    unistd::chdir,
};
use rustix::fs::{Mode, OFlags, open, statfs};

use crate::host::{
    device_node::DeviceNode,
    host_socket::{self, HostSocket, Source},
    no_symlinks, remount,
};

/// mount(2) takes one page of options, of which the last byte is NUL.
const MAX_OPTIONS: usize = 4095;

/// The type of a tmpfs (linux/magic.h).
const TMPFS_MAGIC: i64 = 0x0102_1994;

/// Where a container's root file system comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Rootfs {
    /// Mounts that containerd's snapshotter asks for, one over the other.
    Mounts(Vec<Mount>),
    /// A directory of the host.
    Directory(PathBuf),
    /// A file system that the guest mounts from a block device.
    Disk(DiskRoot),
}

/// A root in a file system on a block device of the host, or in an image of one in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DiskRoot {
    pub(crate) source: PathBuf,
    pub(crate) fs_type: String,
    /// Attributes of the mount.
    pub(crate) flags: MsFlags,
    /// The file system's own options, separated by commas.
    pub(crate) options: String,
}

impl DiskRoot {
    /// The types of file systems that the guest mounts itself. So the host's kernel does not read what was written
    /// there, and the guest needs no request to the host for a file that it has in its memory.
    const TYPES: [&str; 2] = ["ext4", "xfs"];

    /// What a snapshotter asks for, if it is one mount of such a file system.
    /// The error is the option that is not implemented.
    pub(crate) fn of(mounts: &[Mount]) -> Result<Option<Self>, String> {
        let [mount] = mounts else { return Ok(None) };
        let Mount { kind, source, options } = mount;
        if !Self::TYPES.contains(&kind.as_str()) {
            return Ok(None);
        }
        // The VMM opens an image without a loop device.
        let options: Vec<_> = options.iter().filter(|option| *option != "loop").cloned().collect();
        let Options { flags, mut data, .. } = Options::parse(&options).map_err(|error| match error {
            RootfsError::Option { option } => option,
            other => other.to_string(),
        })?;
        if flags.contains(MsFlags::MS_BIND) {
            return Ok(None);
        }
        // Snapshots are copies of one another, with one UUID, and several may be mounted in the guest.
        if kind == "xfs" && !data.split(',').any(|option| option == "nouuid") {
            data = format!("{data}{}nouuid", if data.is_empty() { "" } else { "," });
        }
        Ok(Some(Self { source: source.into(), fs_type: kind.clone(), flags, options: data }))
    }
}

impl Rootfs {
    /// Whether it can be known that nobody but the container changes the files. A snapshotter makes a snapshot for one
    /// container. A directory belongs to whoever named it, such as docker, which writes into it (`docker cp`), and so
    /// does one that is bound (BuildKit).
    pub(crate) fn is_exclusive(&self) -> bool {
        match self {
            Self::Mounts(mounts) => !mounts.iter().any(|mount| matches!(&*mount.kind, "bind" | "rbind")),
            Self::Directory(_) | Self::Disk(_) => false,
        }
    }

    /// Bytes of the host's memory that files of the container may take: the size of the tmpfs that has the upper layer
    /// of its overlay. The kernel charges them to the cgroup of the VMM, which writes them. Blocks.
    pub(crate) fn bytes_in_memory(&self) -> u64 {
        let Self::Mounts(mounts) = self else { return 0 };
        let options = mounts.iter().filter(|mount| mount.kind == "overlay").flat_map(|mount| &mount.options);
        let uppers = options.filter_map(|option| option.strip_prefix("upperdir="));
        // One that cannot be looked at cannot be mounted, and that is an error later.
        let sizes = uppers.filter_map(|upper| {
            let system = statfs(upper).ok().filter(|system| system.f_type == TMPFS_MAGIC)?;
            Some(system.f_blocks.saturating_mul(u64::try_from(system.f_bsize).unwrap_or(0)))
        });
        sizes.fold(0, u64::saturating_add)
    }
}

/// One mount, as the snapshotter describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mount {
    pub(crate) kind: String,
    pub(crate) source: String,
    pub(crate) options: Vec<String>,
}

/// A bind mount of the spec, whose source is on the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BindMount {
    /// Its index in the spec's `mounts`, which is its name in the share.
    pub(crate) index: usize,
    pub(crate) source: PathBuf,
    pub(crate) recursive: bool,
    pub(crate) read_only: ReadOnly,
    pub(crate) propagation: Propagation,
    /// Whether nobody but the pod has it.
    pub(crate) is_of_pod: bool,
}

impl BindMount {
    pub(crate) fn failed(&self, source: io::Error) -> RootfsError {
        RootfsError::BindSource { index: self.index, path: self.source.clone(), source }
    }
}

/// Which mounts of a bind mount are read-only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReadOnly {
    None,
    /// `ro`: the bind mount itself. Mounts below it stay as they are.
    Top,
    /// `rro`: the bind mount and all mounts below it.
    All,
}

/// Whether a bind mount receives what the host mounts below its source later (mount_namespaces(7)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Propagation {
    Private,
    Slave,
}

/// Why the container's files cannot be put into the share.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RootfsError {
    #[error("rootfs mount option {option:?} is not implemented")]
    Option { option: String },
    #[error("rootfs: {what}: {path}")]
    Missing { what: String, path: PathBuf, source: io::Error },
    #[error("rootfs: {path} is not a directory")]
    NotDirectory { path: PathBuf },
    #[error("rootfs: cannot mount {kind} from {from:?}")]
    Mount { kind: String, from: String, source: io::Error },
    #[error("rootfs: {kind} options of {length} bytes do not fit mount(2), even shortened to {shortened}")]
    TooLong { kind: String, length: usize, shortened: usize },
    #[error("rootfs: cannot read what was mounted from {from:?}")]
    Unreadable { from: String, source: io::Error },
    #[error("mounts[{index}]: source {path}")]
    BindSource { index: usize, path: PathBuf, source: io::Error },
    #[error(
        "mounts[{index}].source: {path} (character device {major}:{minor}) is not implemented: the guest's kernel does \
         not have this device (docs/resources.md lists those that it has); use runc for this container"
    )]
    Device { index: usize, path: PathBuf, major: u32, minor: u32 },
    #[error(
        "mounts[{index}].source: {path} became a block device after it was looked at; create the container again"
    )]
    BlockDevice { index: usize, path: PathBuf },
    #[error("mounts: {count} are sockets of the host, of which a container can have {MAX_HOST_SOCKETS}")]
    Sockets { count: usize },
    #[error("cannot prepare {path}")]
    Share { path: PathBuf, source: io::Error },
}

/// Makes the directory `target` and mounts the container's root there.
pub(crate) fn mount_rootfs(rootfs: &Rootfs, target: &Path) -> Result<(), RootfsError> {
    fs::create_dir(target).map_err(|source| RootfsError::Share { path: target.into(), source })?;
    let from = match rootfs {
        Rootfs::Mounts(mounts) => {
            for mount in mounts {
                mount_one(mount, target)?;
            }
            mounts.last().map(|mount| mount.source.clone()).unwrap_or_default()
        }
        Rootfs::Directory(path) => {
            let missing =
                |source| RootfsError::Missing { what: "root.path".into(), path: path.clone(), source };
            if !fs::metadata(path).map_err(missing)?.is_dir() {
                return Err(RootfsError::NotDirectory { path: path.clone() });
            }
            bind(path, target, MsFlags::MS_REC, Propagation::Private).map_err(missing)?;
            path.display().to_string()
        }
        // The guest mounts it elsewhere.
        Rootfs::Disk(_) => return Ok(()),
    };
    // A damaged file system that can be mounted fails here, not in the guest.
    fs::read_dir(target).map(drop).map_err(|source| RootfsError::Unreadable { from, source })
}

/// Gives the topmost directory of an id-mapped root to root. The snapshotter has given it to `seen`, the user and group
/// that root is in the container. It expects that the ids of the layers below are mapped, and not those of the whole.
pub(crate) fn give_to_root(root: &Path, seen: (u32, u32)) -> Result<(), RootfsError> {
    let failed = |source| RootfsError::Share { path: root.into(), source };
    let metadata = fs::symlink_metadata(root).map_err(failed)?;
    if (metadata.uid(), metadata.gid()) == seen {
        lchown(root, Some(0), Some(0)).map_err(failed)
    } else {
        Ok(())
    }
}

/// What the source of a bind mount is, opened. It is opened once. So a change of its path cannot replace it between the
/// check and the mount.
pub(crate) enum Opened {
    /// The socket of a service: the guest has another one in its place.
    Socket(HostSocket),
    Directory(OwnedFd),
    File(OwnedFd),
}

/// Opens the source of a bind mount.
pub(crate) fn open_source(bind_mount: &BindMount) -> Result<Opened, RootfsError> {
    let (index, path) = (bind_mount.index, || bind_mount.source.clone());
    let failed = |source| bind_mount.failed(source);
    let opened = open(&bind_mount.source, OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
    let opened = opened.map_err(|errno| failed(errno.into()))?;
    let opened = match host_socket::look(index, &bind_mount.source, opened).map_err(failed)? {
        Source::Socket(socket) => return Ok(Opened::Socket(socket)),
        Source::Other(opened) => opened,
    };
    let found = fs::metadata(no_symlinks::proc_path(&opened)).map_err(failed)?;
    // A node that the guest has keeps its owner and mode. Its numbers mean the same device there.
    if let Some(DeviceNode { is_block, major, minor, .. }) = DeviceNode::of(&found) {
        let is_same = |it: &Device| it.kind == Kind::Char && (it.major, it.minor) == (major, minor);
        if is_block {
            return Err(RootfsError::BlockDevice { index, path: path() });
        } else if !DEVICES.iter().any(is_same) {
            return Err(RootfsError::Device { index, path: path(), major, minor });
        }
    }
    Ok(if found.is_dir() { Opened::Directory(opened) } else { Opened::File(opened) })
}

/// Binds an opened source at `target`, which becomes a directory or a file as the source is.
pub(crate) fn bind_opened(
    bind_mount: &BindMount,
    opened: &OwnedFd,
    target: &Path,
) -> Result<(), RootfsError> {
    let failed = |source| bind_mount.failed(source);
    let source = no_symlinks::proc_path(opened);
    let is_dir = fs::metadata(&source).map_err(failed)?.is_dir();
    if is_dir { fs::create_dir(target) } else { File::create(target).map(drop) }.map_err(failed)?;
    let recursive = if bind_mount.recursive { MsFlags::MS_REC } else { MsFlags::empty() };
    bind(&source, target, recursive, bind_mount.propagation).map_err(failed)?;
    // The guest mounts it read-only itself; this holds when the guest does not.
    match bind_mount.read_only {
        ReadOnly::None => {}
        ReadOnly::Top => remount_read_only(target).map_err(failed)?,
        ReadOnly::All => remount::add_flags(target, MsFlags::MS_RDONLY).map_err(failed)?,
    }
    Ok(())
}

/// Opens a source that is no socket, and binds it.
#[cfg(test)]
pub(crate) fn bind_source(bind_mount: &BindMount, target: &Path) -> Result<(), RootfsError> {
    match open_source(bind_mount)? {
        Opened::Socket(socket) => panic!("{socket:?}"),
        Opened::Directory(opened) | Opened::File(opened) => bind_opened(bind_mount, &opened, target),
    }
}

fn bind(source: &Path, target: &Path, recursive: MsFlags, propagation: Propagation) -> io::Result<()> {
    mount(Some(source), target, None::<&str>, MsFlags::MS_BIND | recursive, None::<&str>)?;
    // A bind mount of a shared mount joins its peer group.
    let propagation = match propagation {
        Propagation::Private => MsFlags::MS_PRIVATE,
        Propagation::Slave => MsFlags::MS_SLAVE,
    };
    mount(None::<&str>, target, None::<&str>, MsFlags::MS_REC | propagation, None::<&str>)?;
    Ok(())
}

fn remount_read_only(target: &Path) -> io::Result<()> {
    let flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
    Ok(mount(None::<&str>, target, None::<&str>, flags, None::<&str>)?)
}

fn mount_one(request: &Mount, target: &Path) -> Result<(), RootfsError> {
    let options = Options::parse(&request.options)?;
    let failed =
        |source| RootfsError::Mount { kind: request.kind.clone(), from: request.source.clone(), source };
    if request.kind == "bind" || options.flags.contains(MsFlags::MS_BIND) {
        let recursive = options.flags & MsFlags::MS_REC;
        let source = Path::new(&request.source);
        bind(source, target, recursive, Propagation::Private).map_err(failed)?;
        if options.flags.contains(MsFlags::MS_RDONLY) {
            remount_read_only(target).map_err(failed)?;
        }
        return Ok(());
    }
    let options = options.with_lasting_inodes(&request.kind).fit(&request.kind)?;
    match mount_with(request, &options, target) {
        Err(Errno::ENOENT) => Err(missing_layer(&options).unwrap_or_else(|| failed(Errno::ENOENT.into()))),
        other => other.map_err(|errno| failed(errno.into())),
    }
}

fn mount_with(request: &Mount, options: &Options, target: &Path) -> Result<(), Errno> {
    let mount_it = || {
        mount(
            Some(request.source.as_str()),
            target,
            Some(request.kind.as_str()),
            options.flags,
            Some(options.data.as_str()),
        )
    };
    let Some(base) = &options.base else { return mount_it() };
    // Relative layers need a working directory. A thread of its own has one (CLONE_FS).
    thread::scope(|scope| {
        let mounting = thread::Builder::new().spawn_scoped(scope, || {
            unshare(CloneFlags::CLONE_FS)?;
            chdir(base)?;
            mount_it()
        });
        match mounting {
            Ok(mounting) => mounting.join().unwrap_or(Err(Errno::EIO)),
            Err(error) => Err(Errno::try_from(error).unwrap_or(Errno::EAGAIN)),
        }
    })
}

/// Finds the overlay layer that does not exist. The kernel only answers ENOENT.
fn missing_layer(options: &Options) -> Option<RootfsError> {
    let base = options.base.as_deref().unwrap_or(Path::new("/"));
    options.data.split(',').filter_map(|option| option.split_once('=')).find_map(|(name, value)| {
        let paths = match name {
            "lowerdir" => value.split(':').collect(),
            "upperdir" | "workdir" => vec![value],
            _ => Vec::new(),
        };
        paths.into_iter().map(|path| base.join(path)).find_map(|path| match fs::metadata(&path) {
            Err(source) => Some(RootfsError::Missing { what: format!("overlay {name}"), path, source }),
            Ok(_) => None,
        })
    })
}

/// fstab-style options, taken apart.
#[derive(Debug, PartialEq, Eq)]
struct Options {
    flags: MsFlags,
    data: String,
    /// The directory to which the paths in `data` are relative, where they had to be shortened.
    base: Option<PathBuf>,
}

impl Options {
    fn parse(options: &[String]) -> Result<Self, RootfsError> {
        let mut flags = MsFlags::empty();
        let mut data = Vec::new();
        for option in options {
            let set = match option.as_str() {
                "defaults" | "rw" | "suid" | "dev" | "exec" | "async" | "atime" | "diratime" => {
                    MsFlags::empty()
                }
                "ro" => MsFlags::MS_RDONLY,
                "nosuid" => MsFlags::MS_NOSUID,
                "nodev" => MsFlags::MS_NODEV,
                "noexec" => MsFlags::MS_NOEXEC,
                "sync" => MsFlags::MS_SYNCHRONOUS,
                "dirsync" => MsFlags::MS_DIRSYNC,
                "noatime" => MsFlags::MS_NOATIME,
                "nodiratime" => MsFlags::MS_NODIRATIME,
                "relatime" => MsFlags::MS_RELATIME,
                "strictatime" => MsFlags::MS_STRICTATIME,
                "bind" => MsFlags::MS_BIND,
                "rbind" => MsFlags::MS_BIND | MsFlags::MS_REC,
                // A loop device, or something that only containerd itself knows how to do.
                "loop" => return Err(RootfsError::Option { option: option.clone() }),
                _ if option.starts_with("X-containerd.") => {
                    return Err(RootfsError::Option { option: option.clone() });
                }
                _ => {
                    data.push(option.as_str());
                    MsFlags::empty()
                }
            };
            flags |= set;
        }
        Ok(Self { flags, data: data.join(","), base: None })
    }

    /// Has the inode numbers of an overlay stay the same if its layers are on several file systems. Otherwise a
    /// directory that the host's kernel has forgotten gets another number, and the VMM takes it for another directory.
    fn with_lasting_inodes(mut self, kind: &str) -> Self {
        if kind == "overlay" && !self.data.split(',').any(|option| option.starts_with("xino=")) {
            self.data.push_str(",xino=on");
        }
        self
    }

    /// Shortens the layers of an overlay to paths relative to the directory they share, if they are too long.
    fn fit(self, kind: &str) -> Result<Self, RootfsError> {
        let length = self.data.len();
        if length <= MAX_OPTIONS {
            return Ok(self);
        }
        let shorter = if kind == "overlay" { self.relative() } else { self };
        match shorter.data.len() {
            shortened if shortened > MAX_OPTIONS => {
                Err(RootfsError::TooLong { kind: kind.into(), length, shortened })
            }
            _ => Ok(shorter),
        }
    }

    fn relative(self) -> Self {
        let lower =
            self.data.split(',').find_map(|option| option.strip_prefix("lowerdir=")).unwrap_or_default();
        let Some(base) = common_directory(lower.split(':')) else { return self };
        let shorten = |path: &str| -> String {
            path.strip_prefix(&base).and_then(|rest| rest.strip_prefix('/')).unwrap_or(path).to_owned()
        };
        let data: Vec<String> = self
            .data
            .split(',')
            .map(|option| match option.split_once('=') {
                Some(("lowerdir", value)) => {
                    let layers: Vec<String> = value.split(':').map(shorten).collect();
                    format!("lowerdir={}", layers.join(":"))
                }
                Some((name @ ("upperdir" | "workdir"), value)) => format!("{name}={}", shorten(value)),
                _ => option.to_owned(),
            })
            .collect();
        Self { flags: self.flags, data: data.join(","), base: Some(base.into()) }
    }
}

/// The deepest directory that is above each of these absolute paths, unless it is the root.
fn common_directory<'a>(mut paths: impl Iterator<Item = &'a str>) -> Option<String> {
    let first: Vec<&str> = paths.next()?.split('/').collect();
    let mut depth = first.len().saturating_sub(1);
    for path in paths {
        let same = first.iter().zip(path.split('/')).take_while(|(a, b)| **a == *b).count();
        depth = depth.min(same);
    }
    let directory = first.get(..depth)?.join("/");
    (directory.starts_with('/')).then_some(directory)
}

#[cfg(test)]
mod tests {
    use nix::{
        mount::{MntFlags, umount2},
        sys::stat::{Mode, SFlag, makedev, mknod},
    };

    use super::*;
    use crate::testing::{no_more_threads, private_mounts};

    fn request(source: &Path) -> BindMount {
        BindMount {
            index: 0,
            source: source.into(),
            recursive: false,
            read_only: ReadOnly::None,
            propagation: Propagation::Private,
            is_of_pod: false,
        }
    }

    fn options(list: &[&str]) -> Vec<String> {
        list.iter().map(|option| (*option).to_owned()).collect()
    }

    #[test]
    fn a_host_without_threads_mounts_no_overlay_of_relative_layers() {
        no_more_threads();
        let request = Mount { kind: "overlay".into(), source: "overlay".into(), options: Vec::new() };
        let options = Options { flags: MsFlags::empty(), data: String::new(), base: Some("/".into()) };
        assert_eq!(mount_with(&request, &options, Path::new("/nonexistent")), Err(Errno::EAGAIN));
    }

    #[test]
    fn parses_an_overlay_of_the_snapshotter() {
        let parsed =
            Options::parse(&options(&["index=off", "workdir=/w", "upperdir=/u", "lowerdir=/l", "ro"]))
                .unwrap();
        assert_eq!(parsed.flags, MsFlags::MS_RDONLY);
        assert_eq!(parsed.data, "index=off,workdir=/w,upperdir=/u,lowerdir=/l");
    }

    #[test]
    fn a_file_system_on_a_disk_is_the_guests() {
        let mount = |kind: &str, list: &[&str]| Mount {
            kind: kind.into(),
            source: "/snapshots/1".into(),
            options: options(list),
        };
        let expected = DiskRoot {
            source: "/snapshots/1".into(),
            fs_type: "xfs".into(),
            flags: MsFlags::MS_RDONLY,
            options: "nouuid".into(),
        };
        let xfs = mount("xfs", &["loop", "ro"]);
        assert_eq!(DiskRoot::of(std::slice::from_ref(&xfs)).unwrap(), Some(expected));
        for others in [
            vec![mount("overlay", &["ro"])],
            vec![mount("ext4", &["rbind"])],
            vec![mount("erofs", &["loop"])],
            vec![xfs.clone(), xfs],
        ] {
            assert_eq!(DiskRoot::of(&others).unwrap(), None, "{others:?}");
        }
        let option = "X-containerd.mkfs.fs=ext4";
        assert_eq!(DiskRoot::of(&[mount("ext4", &[option])]).unwrap_err(), option);
    }

    #[test]
    fn refuses_what_only_containerd_can_do() {
        for option in ["loop", "X-containerd.mkdir.path=/x:0700"] {
            let error = Options::parse(&options(&[option])).unwrap_err().to_string();
            assert_eq!(error, format!("rootfs mount option {option:?} is not implemented"));
        }
    }

    #[test]
    fn has_the_inode_numbers_of_an_overlay_last_unless_the_snapshotter_says_otherwise() {
        let data =
            |kind, list: &[&str]| Options::parse(&options(list)).unwrap().with_lasting_inodes(kind).data;
        assert_eq!(data("overlay", &["lowerdir=/a:/b", "ro"]), "lowerdir=/a:/b,xino=on");
        assert_eq!(data("overlay", &["lowerdir=/a", "xino=off"]), "lowerdir=/a,xino=off");
        assert_eq!(data("ext4", &["noload"]), "noload");
    }

    #[test]
    fn shortens_many_layers_to_one_page() {
        let prefix = "/var/lib/containerd/io.containerd.snapshotter.v1.overlayfs/snapshots";
        let layers: Vec<_> = (0..100).map(|layer| format!("{prefix}/{layer}/fs")).collect();
        let list = options(&[
            &format!("workdir={prefix}/200/work"),
            &format!("upperdir={prefix}/200/fs"),
            &format!("lowerdir={}", layers.join(":")),
        ]);
        let fitted = Options::parse(&list).unwrap().fit("overlay").unwrap();
        assert_eq!(fitted.base, Some(prefix.into()));
        assert!(fitted.data.starts_with("workdir=200/work,upperdir=200/fs,lowerdir=0/fs:1/fs:"));
        let error = Options::parse(&list).unwrap().fit("ext4").unwrap_err();
        assert!(matches!(error, RootfsError::TooLong { .. }), "{error}");
    }

    #[test]
    fn mounts_an_overlay_of_more_layers_than_fit() {
        private_mounts();
        let dir = tempfile::tempdir().unwrap();
        // An overlay's upper layer cannot be on an overlay, which a container's /tmp may be.
        mount(Some("t"), dir.path(), Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
        let long = dir.path().join("l".repeat(100));
        for name in (0..60).map(|layer| layer.to_string()).chain(["upper".into(), "work".into()]) {
            fs::create_dir_all(long.join(&name)).unwrap();
            fs::write(long.join(&name).join(format!("file-{name}")), "").unwrap();
        }
        fs::remove_file(long.join("work/file-work")).unwrap();
        let at = |name: &str| long.join(name).display().to_string();
        let layers: Vec<_> = (0..60).map(|layer| at(&layer.to_string())).collect();
        let rootfs = Rootfs::Mounts(vec![Mount {
            kind: "overlay".into(),
            source: "overlay".into(),
            options: vec![
                format!("workdir={}", at("work")),
                format!("upperdir={}", at("upper")),
                format!("lowerdir={}", layers.join(":")),
            ],
        }]);
        let target = dir.path().join("rootfs");
        mount_rootfs(&rootfs, &target).unwrap();
        assert!(target.join("file-0").exists() && target.join("file-59").exists());
        umount2(&target, MntFlags::MNT_DETACH).unwrap();
    }

    #[test]
    fn names_the_layer_that_is_missing() {
        private_mounts();
        let dir = tempfile::tempdir().unwrap();
        let rootfs = Rootfs::Mounts(vec![Mount {
            kind: "overlay".into(),
            source: "overlay".into(),
            options: options(&["lowerdir=/nonexistent/lower:/"]),
        }]);
        let error = mount_rootfs(&rootfs, &dir.path().join("rootfs")).unwrap_err();
        assert_eq!(error.to_string(), "rootfs: overlay lowerdir: /nonexistent/lower");
    }

    #[test]
    fn names_a_root_that_is_not_there() {
        private_mounts();
        let dir = tempfile::tempdir().unwrap();
        let missing = Rootfs::Directory("/nonexistent/root".into());
        let error = mount_rootfs(&missing, &dir.path().join("rootfs")).unwrap_err();
        assert_eq!(error.to_string(), "rootfs: root.path: /nonexistent/root");
        let file = Rootfs::Directory("/proc/version".into());
        let error = mount_rootfs(&file, &dir.path().join("other")).unwrap_err();
        assert_eq!(error.to_string(), "rootfs: /proc/version is not a directory");
    }

    #[test]
    fn a_read_only_bind_cannot_be_written() {
        private_mounts();
        let dir = tempfile::tempdir().unwrap();
        let source = dir.path().join("source");
        fs::create_dir(&source).unwrap();
        fs::write(source.join("data"), "kept").unwrap();
        // As on a systemd host: the source's mount is shared, and has a mount below it.
        mount(Some("t"), &source, Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
        mount(None::<&str>, &source, None::<&str>, MsFlags::MS_SHARED, None::<&str>).unwrap();
        fs::create_dir(source.join("below")).unwrap();
        mount(Some("t"), &source.join("below"), Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
        fs::write(source.join("below/data"), "kept").unwrap();

        let target = dir.path().join("0");
        let request = BindMount { recursive: true, read_only: ReadOnly::Top, ..request(&source) };
        bind_source(&request, &target).unwrap();
        fs::write(target.join("below/more"), "of a mount below").unwrap();
        assert_eq!(fs::read_to_string(target.join("below/data")).unwrap(), "kept");
        assert!(fs::write(target.join("new"), "").is_err());
        umount2(&target, MntFlags::MNT_DETACH).unwrap();
        assert_eq!(fs::read_to_string(source.join("below/data")).unwrap(), "kept");

        let all = dir.path().join("1");
        bind_source(&BindMount { read_only: ReadOnly::All, ..request }, &all).unwrap();
        assert!(fs::write(all.join("new"), "").is_err() && fs::write(all.join("below/new"), "").is_err());
        fs::write(source.join("below/new"), "the source is not changed").unwrap();
        umount2(&all, MntFlags::MNT_DETACH).unwrap();
    }

    #[test]
    fn later_mounts_of_the_host_propagate_when_asked_for() {
        private_mounts();
        let dir = tempfile::tempdir().unwrap();
        let source = dir.path().join("source");
        fs::create_dir(&source).unwrap();
        mount(Some("t"), &source, Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
        mount(None::<&str>, &source, None::<&str>, MsFlags::MS_SHARED, None::<&str>).unwrap();
        fs::create_dir(source.join("below")).unwrap();
        fs::create_dir(source.join("own")).unwrap();

        let (slave, private) = (dir.path().join("0"), dir.path().join("1"));
        let propagated = BindMount { propagation: Propagation::Slave, ..request(&source) };
        bind_source(&propagated, &slave).unwrap();
        bind_source(&request(&source), &private).unwrap();
        mount(Some("t"), &source.join("below"), Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
        fs::write(source.join("below/data"), "kept").unwrap();
        assert!(slave.join("below/data").exists() && !private.join("below/data").exists());
        mount(Some("t"), &slave.join("own"), Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
        fs::write(slave.join("own/data"), "").unwrap();
        assert!(!source.join("own/data").exists());
        for target in [&slave, &private] {
            umount2(target, MntFlags::MNT_DETACH).unwrap();
        }
        assert_eq!(fs::read_to_string(source.join("below/data")).unwrap(), "kept");
    }

    #[test]
    fn an_id_mapped_root_is_given_to_root_once() {
        let dir = tempfile::tempdir().unwrap();
        let owner = || {
            let metadata = fs::metadata(dir.path()).unwrap();
            (metadata.uid(), metadata.gid())
        };
        lchown(dir.path(), Some(100_000), Some(200_000)).unwrap();
        give_to_root(dir.path(), (100_000, 0)).unwrap();
        assert_eq!(owner(), (100_000, 200_000));
        give_to_root(dir.path(), (100_000, 200_000)).unwrap();
        assert_eq!(owner(), (0, 0));
    }

    #[test]
    fn the_node_of_a_device_that_the_guest_lacks_is_refused_by_name() {
        private_mounts();
        let dir = tempfile::tempdir().unwrap();
        let node = |name: &str, kind, major, minor| {
            let path = dir.path().join(name);
            mknod(&path, kind, Mode::from_bits_truncate(0o640), makedev(major, minor)).unwrap();
            path
        };
        let error = |path: &Path| bind_source(&request(path), &dir.path().join("0")).unwrap_err().to_string();
        let refused = error(&node("kvm", SFlag::S_IFCHR, 10, 232));
        assert!(refused.contains("kvm (character device 10:232) is not implemented"), "{refused}");
        assert!(error(&node("disk", SFlag::S_IFBLK, 1, 3)).contains("became a block device"));
        let target = dir.path().join("1");
        bind_source(&request(&node("null", SFlag::S_IFCHR, 1, 3)), &target).unwrap();
        assert_eq!(fs::metadata(&target).unwrap().mode(), 0o20640);
        umount2(&target, MntFlags::MNT_DETACH).unwrap();
    }

    #[test]
    fn binds_a_file() {
        private_mounts();
        let dir = tempfile::tempdir().unwrap();
        let source = dir.path().join("resolv.conf");
        fs::write(&source, "nameserver 192.0.2.1").unwrap();
        let target = dir.path().join("0");
        bind_source(&request(&source), &target).unwrap();
        assert_eq!(fs::read_to_string(&target).unwrap(), "nameserver 192.0.2.1");
        umount2(&target, MntFlags::MNT_DETACH).unwrap();
        assert!(source.exists());
    }
}
