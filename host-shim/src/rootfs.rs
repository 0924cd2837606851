//! The file systems that the guest sees through the share: the container's root, and the sources of its bind mounts.

use std::{
    ffi::OsString,
    fs, io,
    os::unix::ffi::OsStringExt,
    path::{Path, PathBuf},
    thread,
};

use nix::{
    errno::Errno,
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
    unistd::chdir,
};

use crate::journal::{Effect, Journal};

/// mount(2) takes one page of options, of which the last byte is NUL.
const MAX_OPTIONS: usize = 4095;

/// Where a container's root file system comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Rootfs {
    /// Mounts that containerd's snapshotter asks for, one over the other.
    Mounts(Vec<Mount>),
    /// A directory of the host.
    Directory(PathBuf),
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
    /// Its place in the spec's `mounts`, which names it in the share.
    pub(crate) index: usize,
    pub(crate) source: PathBuf,
    pub(crate) recursive: bool,
    pub(crate) read_only: bool,
    pub(crate) later_mounts: LaterMounts,
}

/// What the host mounts below the source of a bind mount once it has been made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LaterMounts {
    /// The host's only: propagation `private`.
    Unseen,
    /// The container's too: propagation `slave`.
    Seen,
}

/// Why the container's files are not where the guest would look for them.
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
    #[error("cannot prepare {path}")]
    Share { path: PathBuf, source: io::Error },
}

/// Makes `share`, a mount of its own, of whose mounts only those mount namespaces hear that come after it: the VMM's. And
/// beside it, at [`workshop`], one of whose mounts nobody hears, where they are made.
pub(crate) fn make_share(journal: &mut Journal, share: &Path) -> Result<(), RootfsError> {
    make_own_mount(journal, share)?;
    make_own_mount(journal, &workshop(share))?;
    mount(None::<&str>, share, None::<&str>, MsFlags::MS_SHARED, None::<&str>)
        .map_err(|errno| RootfsError::Share { path: share.into(), source: errno.into() })
}

/// Makes the directory `path`, a mount of its own of whose mounts nobody hears.
fn make_own_mount(journal: &mut Journal, path: &Path) -> Result<(), RootfsError> {
    let failed = |source| RootfsError::Share { path: path.into(), source };
    journal.make_dir(path).map_err(failed)?;
    bind(journal, path, path, MsFlags::empty(), LaterMounts::Unseen).map_err(failed)
}

/// Where mounts are made that are then moved to `share`.
fn workshop(share: &Path) -> PathBuf {
    share.with_extension("workshop")
}

/// Makes the directory `name` in `share`, filled by `fill`. What `fill` mounts in the directory that it is given is
/// complete when it comes to be seen, and so it is in the VMM's jail: there it can be neither changed nor parted from its
/// source any more.
pub(crate) fn make_in_share(
    journal: &mut Journal,
    share: &Path,
    name: &str,
    fill: impl FnOnce(&mut Journal, &Path) -> Result<(), RootfsError>,
) -> Result<(), RootfsError> {
    let target = share.join(name);
    let made = workshop(share).join(name);
    let failed = |source| RootfsError::Share { path: target.clone(), source };
    make_own_mount(journal, &made)?;
    fill(journal, &made)?;
    make_harmless(&made).map_err(failed)?;
    journal.make_dir(&target).map_err(failed)?;
    journal.record(Effect::Moved { path: target.clone() }).map_err(failed)?;
    mount(Some(&made), &target, None::<&str>, MsFlags::MS_MOVE, None::<&str>)
        .map_err(|errno| failed(errno.into()))
}

/// Mounts the container's root at `target`, which is made.
pub(crate) fn mount_rootfs(journal: &mut Journal, rootfs: &Rootfs, target: &Path) -> Result<(), RootfsError> {
    journal.make_dir(target).map_err(|source| RootfsError::Share { path: target.into(), source })?;
    let from = match rootfs {
        Rootfs::Mounts(mounts) => {
            for mount in mounts {
                mount_one(journal, mount, target)?;
            }
            mounts.last().map(|mount| mount.source.clone()).unwrap_or_default()
        }
        Rootfs::Directory(path) => {
            let missing =
                |source| RootfsError::Missing { what: "root.path".into(), path: path.clone(), source };
            if !fs::metadata(path).map_err(missing)?.is_dir() {
                return Err(RootfsError::NotDirectory { path: path.clone() });
            }
            bind(journal, path, target, MsFlags::MS_REC, LaterMounts::Unseen).map_err(missing)?;
            path.display().to_string()
        }
    };
    // A damaged file system mounts well and fails here, rather than in the guest.
    fs::read_dir(target).map(drop).map_err(|source| RootfsError::Unreadable { from, source })
}

/// Binds a source of the host at `target`, which is made to be what the source is.
pub(crate) fn bind_source(
    journal: &mut Journal,
    bind_mount: &BindMount,
    target: &Path,
) -> Result<(), RootfsError> {
    let failed =
        |source| RootfsError::BindSource { index: bind_mount.index, path: bind_mount.source.clone(), source };
    let is_dir = fs::metadata(&bind_mount.source).map_err(failed)?.is_dir();
    if is_dir { journal.make_dir(target) } else { journal.make_file(target) }.map_err(failed)?;
    let recursive = if bind_mount.recursive { MsFlags::MS_REC } else { MsFlags::empty() };
    bind(journal, &bind_mount.source, target, recursive, bind_mount.later_mounts).map_err(failed)?;
    if bind_mount.read_only {
        // The guest mounts it read-only itself; this holds when the guest does not.
        remount_read_only(target).map_err(failed)?;
    }
    Ok(())
}

fn bind(
    journal: &mut Journal,
    source: &Path,
    target: &Path,
    recursive: MsFlags,
    later_mounts: LaterMounts,
) -> io::Result<()> {
    journal.record(Effect::Mount { path: target.into() })?;
    mount(Some(source), target, None::<&str>, MsFlags::MS_BIND | recursive, None::<&str>)?;
    // A bind joins the peers of its source, whatever it is mounted in; part from them, or only hear of theirs.
    let propagation = match later_mounts {
        LaterMounts::Unseen => MsFlags::MS_PRIVATE,
        LaterMounts::Seen => MsFlags::MS_SLAVE,
    };
    mount(None::<&str>, target, None::<&str>, MsFlags::MS_REC | propagation, None::<&str>)?;
    Ok(())
}

fn remount_read_only(target: &Path) -> io::Result<()> {
    let flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
    Ok(mount(None::<&str>, target, None::<&str>, flags, None::<&str>)?)
}

/// Sets for all mounts at `tree` and below that a device there cannot be opened and a program not executed: the VMM may make
/// any device, and uses none.
fn make_harmless(tree: &Path) -> io::Result<()> {
    let harmless = MsFlags::MS_NODEV | MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC;
    let table = fs::read("/proc/thread-self/mountinfo")?;
    for line in table.split(|byte| *byte == b'\n') {
        // Fields 5 and 6 of proc_pid_mountinfo(5).
        let mut fields = line.split(|byte| *byte == b' ').skip(4);
        let (Some(place), Some(options)) = (fields.next(), fields.next()) else { continue };
        let place = unescape(place);
        if place.starts_with(tree) {
            let is_read_only = options.split(|byte| *byte == b',').any(|option| option == b"ro");
            let kept = if is_read_only { MsFlags::MS_RDONLY } else { MsFlags::empty() };
            let flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | harmless | kept;
            mount(None::<&str>, &place, None::<&str>, flags, None::<&str>)?;
        }
    }
    Ok(())
}

/// A path of mountinfo, in which blanks, line ends and backslashes are three octal digits behind a backslash.
fn unescape(path: &[u8]) -> PathBuf {
    let mut plain = Vec::with_capacity(path.len());
    let mut rest = path;
    while let Some((byte, after)) = rest.split_first() {
        let digits = if *byte == b'\\' { after.get(..3) } else { None };
        let code = digits.and_then(|digits| std::str::from_utf8(digits).ok());
        match code.and_then(|code| u8::from_str_radix(code, 8).ok()) {
            Some(code) => {
                plain.push(code);
                rest = &after[3..];
            }
            None => {
                plain.push(*byte);
                rest = after;
            }
        }
    }
    OsString::from_vec(plain).into()
}

fn mount_one(journal: &mut Journal, request: &Mount, target: &Path) -> Result<(), RootfsError> {
    let options = Options::parse(&request.options)?;
    let failed =
        |source| RootfsError::Mount { kind: request.kind.clone(), from: request.source.clone(), source };
    if request.kind == "bind" || options.flags.contains(MsFlags::MS_BIND) {
        let recursive = options.flags & MsFlags::MS_REC;
        let source = Path::new(&request.source);
        bind(journal, source, target, recursive, LaterMounts::Unseen).map_err(failed)?;
        if options.flags.contains(MsFlags::MS_RDONLY) {
            remount_read_only(target).map_err(failed)?;
        }
        return Ok(());
    }
    let options = options.fit(&request.kind)?;
    journal.record(Effect::Mount { path: target.into() }).map_err(failed)?;
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
    // Relative layers need a working directory, which belongs to the whole process unless a thread leaves it.
    thread::scope(|scope| {
        let mounting = scope.spawn(|| {
            unshare(CloneFlags::CLONE_FS)?;
            chdir(base)?;
            mount_it()
        });
        mounting.join().unwrap_or(Err(Errno::EIO))
    })
}

/// The overlay layer that is not there: the kernel says only ENOENT.
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
    use std::sync::mpsc::channel;

    use super::*;
    use crate::testing::private_mounts;

    fn request(source: &Path) -> BindMount {
        BindMount {
            index: 0,
            source: source.into(),
            recursive: false,
            read_only: false,
            later_mounts: LaterMounts::Unseen,
        }
    }

    fn options(list: &[&str]) -> Vec<String> {
        list.iter().map(|option| (*option).to_owned()).collect()
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
    fn refuses_what_only_containerd_can_do() {
        for option in ["loop", "X-containerd.mkdir.path=/x:0700"] {
            let error = Options::parse(&options(&[option])).unwrap_err().to_string();
            assert_eq!(error, format!("rootfs mount option {option:?} is not implemented"));
        }
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
        let mut journal = Journal::open(&dir.path().join("journal")).unwrap();
        let target = dir.path().join("rootfs");
        mount_rootfs(&mut journal, &rootfs, &target).unwrap();
        assert!(target.join("file-0").exists() && target.join("file-59").exists());
        journal.undo().unwrap();
        assert!(!target.exists());
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
        let mut journal = Journal::open(&dir.path().join("journal")).unwrap();
        let error = mount_rootfs(&mut journal, &rootfs, &dir.path().join("rootfs")).unwrap_err();
        assert_eq!(error.to_string(), "rootfs: overlay lowerdir: /nonexistent/lower");
        journal.undo().unwrap();
    }

    #[test]
    fn names_a_root_that_is_not_there() {
        private_mounts();
        let dir = tempfile::tempdir().unwrap();
        let mut journal = Journal::open(&dir.path().join("journal")).unwrap();
        let missing = Rootfs::Directory("/nonexistent/root".into());
        let error = mount_rootfs(&mut journal, &missing, &dir.path().join("rootfs")).unwrap_err();
        assert_eq!(error.to_string(), "rootfs: root.path: /nonexistent/root");
        let file = Rootfs::Directory("/proc/version".into());
        let error = mount_rootfs(&mut journal, &file, &dir.path().join("rootfs")).unwrap_err();
        assert_eq!(error.to_string(), "rootfs: /proc/version is not a directory");
        journal.undo().unwrap();
    }

    #[test]
    fn a_read_only_bind_cannot_be_written_and_undo_spares_its_source() {
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

        let mut journal = Journal::open(&dir.path().join("journal")).unwrap();
        make_share(&mut journal, &dir.path().join("share")).unwrap();
        let target = dir.path().join("share/0");
        let request = BindMount { recursive: true, read_only: true, ..request(&source) };
        bind_source(&mut journal, &request, &target).unwrap();
        assert_eq!(fs::read_to_string(target.join("below/data")).unwrap(), "kept");
        assert!(fs::write(target.join("new"), "").is_err());
        journal.undo().unwrap();
        assert_eq!(fs::read_to_string(source.join("below/data")).unwrap(), "kept");
        assert!(!target.exists());
    }

    /// The mounts below `place` in the mount namespace of a thread.
    fn mounts_below(place: &Path) -> Vec<String> {
        let table = fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
        let place = place.display().to_string();
        table.lines().filter(|line| line.contains(&place)).map(str::to_owned).collect()
    }

    #[test]
    fn what_is_made_in_the_share_comes_to_the_jail_as_it_is_and_leaves_it() {
        private_mounts();
        let dir = tempfile::tempdir().unwrap();
        let source = dir.path().join("source");
        let below = source.join("a blank");
        fs::create_dir(&source).unwrap();
        mount(Some("t"), &source, Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
        mount(None::<&str>, &source, None::<&str>, MsFlags::MS_SHARED, None::<&str>).unwrap();
        fs::create_dir(&below).unwrap();
        mount(Some("t"), &below, Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
        fs::write(below.join("data"), "kept").unwrap();
        let share = dir.path().join("share");
        let mut sandbox = Journal::open(&dir.path().join("sandbox")).unwrap();
        make_share(&mut sandbox, &share).unwrap();

        let (ask, asked) = channel::<()>();
        let (say, said) = channel();
        let place = share.join("c");
        // As the VMM: in a mount namespace that is the slave of this one.
        let jail = thread::spawn(move || {
            unshare(CloneFlags::CLONE_NEWNS).unwrap();
            let slave = MsFlags::MS_REC | MsFlags::MS_SLAVE;
            mount(None::<&str>, "/", None::<&str>, slave, None::<&str>).unwrap();
            say.send(Vec::new()).unwrap();
            for () in asked {
                say.send(mounts_below(&place)).unwrap();
            }
        });
        said.recv().unwrap();
        let look = || {
            ask.send(()).unwrap();
            said.recv().unwrap()
        };

        let mut journal = Journal::open(&dir.path().join("container")).unwrap();
        make_in_share(&mut journal, &share, "c", |journal, own| {
            let bound = BindMount { recursive: true, read_only: true, ..request(&source) };
            bind_source(journal, &bound, &own.join("0"))
        })
        .unwrap();
        assert_eq!(fs::read_to_string(share.join("c/0/a blank/data")).unwrap(), "kept");
        let seen = look();
        assert_eq!(seen.len(), 3, "the directory, what is bound, and what is mounted in that: {seen:?}");
        assert!(seen.iter().all(|line| line.contains("nosuid,nodev,noexec")), "{seen:?}");
        assert!(seen.iter().any(|line| line.contains("/c/0 ro,")), "{seen:?}");

        fs::create_dir(source.join("later")).unwrap();
        mount(Some("t"), &source.join("later"), Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
        assert_eq!(look().len(), 3, "what is mounted in the source later stays on the host");
        journal.undo().unwrap();
        assert_eq!(look(), [""; 0]);
        drop(ask);
        jail.join().unwrap();
        sandbox.undo().unwrap();
        assert_eq!(fs::read_to_string(below.join("data")).unwrap(), "kept");
        assert!(!share.exists());
    }

    #[test]
    fn later_mounts_of_the_host_are_seen_when_asked_for() {
        private_mounts();
        let dir = tempfile::tempdir().unwrap();
        let source = dir.path().join("source");
        fs::create_dir(&source).unwrap();
        mount(Some("t"), &source, Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
        mount(None::<&str>, &source, None::<&str>, MsFlags::MS_SHARED, None::<&str>).unwrap();
        fs::create_dir(source.join("below")).unwrap();
        fs::create_dir(source.join("own")).unwrap();

        let mut journal = Journal::open(&dir.path().join("journal")).unwrap();
        let (hears, deaf) = (dir.path().join("0"), dir.path().join("1"));
        let seen = BindMount { later_mounts: LaterMounts::Seen, ..request(&source) };
        bind_source(&mut journal, &seen, &hears).unwrap();
        bind_source(&mut journal, &request(&source), &deaf).unwrap();
        mount(Some("t"), &source.join("below"), Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
        fs::write(source.join("below/data"), "kept").unwrap();
        assert!(hears.join("below/data").exists() && !deaf.join("below/data").exists());
        mount(Some("t"), &hears.join("own"), Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
        fs::write(hears.join("own/data"), "").unwrap();
        assert!(!source.join("own/data").exists());
        journal.undo().unwrap();
        assert_eq!(fs::read_to_string(source.join("below/data")).unwrap(), "kept");
        assert!(!hears.exists());
    }

    #[test]
    fn binds_a_file() {
        private_mounts();
        let dir = tempfile::tempdir().unwrap();
        let source = dir.path().join("resolv.conf");
        fs::write(&source, "nameserver 192.0.2.1").unwrap();
        let mut journal = Journal::open(&dir.path().join("journal")).unwrap();
        let target = dir.path().join("0");
        bind_source(&mut journal, &request(&source), &target).unwrap();
        assert_eq!(fs::read_to_string(&target).unwrap(), "nameserver 192.0.2.1");
        journal.undo().unwrap();
        assert!(source.exists() && !target.exists());
    }
}
