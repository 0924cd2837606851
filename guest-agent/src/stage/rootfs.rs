//! Builds a container's file systems and makes them the caller's root.
//!
//! Runs in the container's init, or in the helper that clones it, in a new mount namespace. Until the last step the
//! guest's own root is still there, and every path of the container is resolved in the container's root ([`paths`]).
//! Mounts are made detached and then attached to open descriptors, so that no path is looked up twice.

use std::{
    collections::BTreeMap,
    ffi::CString,
    io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

use bulkhead_agent_api::VOLUMES_DIR;
use nix::{
    errno::Errno,
    fcntl::{AT_FDCWD, AtFlags, OFlag, open},
    mount::{MntFlags, MsFlags, mount, umount2},
    sys::stat::{FchmodatFlags, FileStat, Mode, SFlag, fchmodat, fstat, fstatat, makedev, mknodat},
    unistd::{Gid, Uid, UnlinkatFlags, chdir, fchdir, fchownat, pivot_root, symlinkat, unlinkat},
};

use super::{
    SetupError, Step,
    console::Console,
    paths::{self, Missing},
    user_namespace,
};
use crate::{
    stage_config::{
        DeviceNode, IdMappings, MountKind, MountPlan, NodeKind, ProcessConfig, RootfsConfig, WindowSize,
    },
    syscall::{self, MountAttr, attr},
};

/// Detached mounts whose ids are mapped. The container's root may not make them in a user namespace, so the stage does.
#[derive(Default)]
pub(super) struct IdMappedMounts {
    root: Option<OwnedFd>,
    /// By their indexes in the spec.
    mounts: BTreeMap<usize, OwnedFd>,
}

impl IdMappedMounts {
    /// Makes those of a container. `cgroup` is where a process is for a moment.
    pub(super) fn of(config: &RootfsConfig, cgroup: &Path) -> Result<Self, SetupError> {
        let mut made = Self::default();
        // Mostly they are all the same.
        let mut last: Option<(&IdMappings, OwnedFd)> = None;
        let mut map = |tree: OwnedFd, ids| {
            let namespace = match &last {
                Some((same, namespace)) if *same == ids => namespace,
                _ => &last.insert((ids, user_namespace::with_ids(ids, cgroup)?)).1,
            };
            let change = MountAttr::id_mapped(namespace.as_fd());
            syscall::mount_setattr(tree.as_fd(), true, &change).step(|| "mapping the ids".into())?;
            Ok::<_, SetupError>(tree)
        };
        if let Some(ids) = &config.ids {
            let path = || format!("root {}", config.path.display());
            made.root = Some(map(open_source(&config.path, true).step(path)?, ids)?);
        }
        for (index, plan) in config.mounts.iter().enumerate() {
            let MountKind::Bind { source, recursive, ids: Some(ids) } = &plan.kind else { continue };
            let place = || format!("mounts[{index}] ({})", plan.destination.display());
            made.mounts.insert(index, map(open_source(source, *recursive).step(place)?, ids).step(place)?);
        }
        Ok(made)
    }
}

/// Makes an empty file system that nobody can write to the caller's `/`.
pub(super) fn enter_empty() -> Result<(), SetupError> {
    make_private()?;
    let root = empty_file_system()?;
    let place =
        open("/tmp", OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty()).step(|| "opening /tmp".into())?;
    syscall::move_mount(root.as_fd(), place.as_fd()).step(|| "mounting an empty root".into())?;
    pivot(&root).step(|| "changing the root".into())
}

/// What is mounted in the caller's mount namespace must not appear in the guest's own.
fn make_private() -> Result<(), SetupError> {
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)
        .step(|| "making the mounts of the guest private".into())
}

/// Makes the root of `config` the caller's `/`, with all that is mounted in it, and creates the process's working
/// directory if it is missing. Returns its terminal, if it has one.
pub(super) fn enter(
    config: &RootfsConfig,
    process: &ProcessConfig,
    id_mapped: &IdMappedMounts,
) -> Result<Option<Console>, SetupError> {
    make_private()?;
    let root = attach_root(&config.path, id_mapped).step(|| format!("root {}", config.path.display()))?;

    let mut readonly_later = Vec::new();
    for (index, plan) in config.mounts.iter().enumerate() {
        let attached = attach(&root, plan, config.proc.as_deref(), id_mapped.mounts.get(&index))
            .step(|| format!("mounts[{index}] ({})", plan.destination.display()))?;
        readonly_later.extend(attached);
    }
    for node in &config.devices {
        let made = match process.common.ids {
            // Nobody makes device nodes in a user namespace.
            Some(_) if node.kind != NodeKind::Fifo => bind_node(&root, node),
            _ => make_node(&root, node),
        };
        made.step(|| format!("device {}", node.path.display()))?;
    }
    if config.dev_links {
        make_dev_links(&root).step(|| "links in /dev".into())?;
    }
    // Both before the root may become read-only.
    let console = process.terminal.map(|size| attach_console(&root, size)).transpose()?;
    // As runc does.
    paths::open_or_create(&root, &process.cwd, Missing::Directory)
        .step(|| format!("process.cwd {}", process.cwd.display()))?;

    hide(&root, config)?;
    for path in &config.readonly_paths {
        make_readonly(&root, path).step(|| format!("linux.readonlyPaths {}", path.display()))?;
    }
    for mounted in &readonly_later {
        syscall::mount_setattr(mounted.as_fd(), false, &MountAttr::new(attr::RDONLY, 0))
            .step(|| "making a tmpfs read-only".into())?;
    }
    if config.readonly {
        syscall::mount_setattr(root.as_fd(), false, &MountAttr::new(attr::RDONLY, 0))
            .step(|| "root.readonly".into())?;
    }
    pivot(&root).step(|| "changing the root".into())?;
    if let Some(propagation) = config.propagation {
        let change = MountAttr::propagation(propagation.flag);
        open("/", OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty())
            .map_err(io::Error::from)
            .and_then(|root| syscall::mount_setattr(root.as_fd(), propagation.recursive, &change))
            .step(|| "linux.rootfsPropagation".into())?;
    }
    Ok(console)
}

/// Makes a terminal of the container's own, which is its /dev/console too (runtime-spec, config-linux.md, "Default
/// Devices").
fn attach_console(root: &OwnedFd, size: WindowSize) -> Result<Console, SetupError> {
    let console = Console::open(root, size)?;
    let attached = || -> io::Result<()> {
        let mounted = syscall::open_tree(console.slave(), c"", false)?;
        let target = paths::open_or_create(root, Path::new("/dev/console"), Missing::File)?;
        syscall::move_mount(mounted.as_fd(), target.as_fd())
    };
    attached().step(|| "process.terminal: /dev/console".into())?;
    Ok(console)
}

/// A detached mount of a proc file system, which shows the caller's pid namespace.
pub(super) fn new_proc() -> Result<OwnedFd, SetupError> {
    new_file_system(PROC, Some(PROC), &[])
}

const PROC: &str = "proc";

/// Mounts the root on itself, since only a mount can become a root (pivot_root(2)).
fn attach_root(path: &Path, id_mapped: &IdMappedMounts) -> io::Result<OwnedFd> {
    let target = open(path, OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty())?;
    let tree = match &id_mapped.root {
        Some(tree) => tree.try_clone()?,
        None => syscall::open_tree(target.as_fd(), c"", true)?,
    };
    syscall::mount_setattr(tree.as_fd(), true, &MountAttr::propagation(libc::MS_PRIVATE))?;
    syscall::move_mount(tree.as_fd(), target.as_fd())?;
    Ok(tree)
}

/// Attaches one mount. Gives it back if it is to become read-only when all is in place: mount points and device
/// nodes are still to be made in a new tmpfs.
fn attach(
    root: &OwnedFd,
    plan: &MountPlan,
    proc: Option<&Path>,
    id_mapped: Option<&OwnedFd>,
) -> Result<Option<OwnedFd>, SetupError> {
    let mut attributes = plan.attributes;
    let later = matches!(&plan.kind, MountKind::FileSystem { fs_type, .. } if fs_type == "tmpfs")
        && attributes.set & attr::RDONLY != 0;
    if later {
        attributes.set &= !attr::RDONLY;
    }
    let mounted = match &plan.kind {
        MountKind::Bind { source, recursive, .. } => {
            let opened = match id_mapped {
                Some(mounted) => mounted.try_clone(),
                None => open_source(source, *recursive),
            };
            opened.step(|| format!("source {}", source.display()))?
        }
        MountKind::FileSystem { fs_type, .. } if fs_type == PROC && proc.is_some() => {
            let path = proc.map(|path| path.as_os_str().as_bytes()).unwrap_or_default();
            let path = CString::new(path).step(|| "proc".into())?;
            syscall::open_tree(AT_FDCWD, &path, false)
                .step(|| "the proc file system of the pid namespace".into())?
        }
        MountKind::FileSystem { fs_type, source, parameters } => {
            let covered = if fs_type == "tmpfs" { mode_of(root, &plan.destination)? } else { None };
            // The last one counts, so the spec may name another mode.
            let parameters: Vec<_> = covered.into_iter().chain(parameters.iter().cloned()).collect();
            new_file_system(fs_type, source.as_deref(), &parameters)?
        }
    };
    let change = |recursive, change: MountAttr| {
        syscall::mount_setattr(mounted.as_fd(), recursive, &change).step(|| "options".into())
    };
    if !attributes.is_empty() {
        change(false, MountAttr::new(attributes.set, attributes.clear))?;
    }
    if !plan.recursive_attributes.is_empty() {
        change(true, MountAttr::new(plan.recursive_attributes.set, plan.recursive_attributes.clear))?;
    }
    for propagation in &plan.propagation {
        change(propagation.recursive, MountAttr::propagation(propagation.flag))?;
    }
    let missing =
        if is_directory(&mounted).step(|| "source".into())? { Missing::Directory } else { Missing::File };
    let target = paths::open_or_create(root, &plan.destination, missing).step(|| "mount point".into())?;
    syscall::move_mount(mounted.as_fd(), target.as_fd()).step(|| "mounting".into())?;
    Ok(later.then_some(mounted))
}

/// The mode of what is at this path, as a parameter of a tmpfs: runc gives a tmpfs the mode of the directory that it
/// covers.
fn mode_of(root: &OwnedFd, path: &Path) -> Result<Option<(String, Option<String>)>, SetupError> {
    let covered = match paths::open(root, path) {
        Err(Errno::ENOENT) => return Ok(None),
        opened => opened.step(|| "mount point".into())?,
    };
    let mode = fstat(&covered).step(|| "mount point".into())?.st_mode & 0o7777;
    Ok(Some(("mode".to_owned(), Some(format!("{mode:o}")))))
}

/// Takes a detached copy of the mount of a bind mount's source.
fn open_source(source: &Path, recursive: bool) -> io::Result<OwnedFd> {
    match source.strip_prefix(VOLUMES_DIR) {
        Ok(part) => open_volume(part).and_then(|fd| syscall::open_tree(fd.as_fd(), c"", recursive)),
        Err(_) => CString::new(source.as_os_str().as_bytes())
            .map_err(io::Error::from)
            .and_then(|path| syscall::open_tree(AT_FDCWD, &path, recursive)),
    }
}

/// Opens a volume in memory, or a directory in it. Containers can write to volumes, so no link leads out of it. A
/// directory that is missing is created with the mode of the topmost one, as kubelet does it on the host.
fn open_volume(path: &Path) -> io::Result<OwnedFd> {
    let mut parts = path.components();
    let name = parts.next().ok_or(Errno::EINVAL)?;
    let volume = Path::new(VOLUMES_DIR).join(name);
    let volume = open(&volume, OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty())?;
    match paths::open(&volume, parts.as_path()) {
        Err(Errno::ENOENT) => {}
        opened => return Ok(opened?),
    }
    let directory = paths::open_or_create(&volume, parts.as_path(), Missing::Directory)?;
    let mode = Mode::from_bits_truncate(fstat(&volume)?.st_mode);
    // Descriptors of locations cannot be changed by themselves.
    let path = format!("/proc/self/fd/{}", directory.as_raw_fd());
    fchmodat(AT_FDCWD, path.as_str(), mode, FchmodatFlags::FollowSymlink)?;
    Ok(directory)
}

fn new_file_system(
    fs_type: &str,
    source: Option<&str>,
    parameters: &[(String, Option<String>)],
) -> Result<OwnedFd, SetupError> {
    let word = |text: &str| CString::new(text).step(|| format!("{text:?}"));
    let context = syscall::fsopen(&word(fs_type)?).step(|| format!("type {fs_type:?}"))?;
    let explained = |result: io::Result<()>, step: &dyn Fn() -> String| {
        result.map_err(|error| explain(context.as_fd(), &error)).step(step)
    };
    if let Some(source) = source {
        let value = word(source)?;
        let result = syscall::fsconfig_set(context.as_fd(), c"source", Some(&value));
        explained(result, &|| format!("source {source:?}"))?;
    }
    for (key, value) in parameters {
        let text = value.as_deref().map(word).transpose()?;
        let result = syscall::fsconfig_set(context.as_fd(), &word(key)?, text.as_deref());
        explained(result, &|| format!("option {key:?}"))?;
    }
    explained(syscall::fsconfig_create(context.as_fd()), &|| format!("type {fs_type:?}"))?;
    syscall::fsmount(context.as_fd(), 0).step(|| format!("type {fs_type:?}"))
}

/// The kernel's own words about a failed configuration, which it keeps in the context, one message for each read.
fn explain(context: BorrowedFd<'_>, error: &io::Error) -> String {
    let mut text = error.to_string();
    let mut message = [0; 512];
    while let Ok(length @ 1..) = nix::unistd::read(context, &mut message) {
        // "e " for an error, "w " a warning, "i " information.
        let words = String::from_utf8_lossy(&message[..length]);
        if let Some(reason) = words.trim_end().strip_prefix("e ") {
            text = format!("{text}: {reason}");
        }
    }
    text
}

fn is_directory(fd: &OwnedFd) -> nix::Result<bool> {
    Ok(file_type(&fstat(fd)?) == SFlag::S_IFDIR)
}

fn file_type(stat: &FileStat) -> SFlag {
    SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT
}

fn make_node(root: &OwnedFd, node: &DeviceNode) -> io::Result<()> {
    let (Some(parent), Some(name)) = (node.path.parent(), node.path.file_name()) else {
        return Err(Errno::EINVAL.into());
    };
    let directory = paths::open_or_create(root, parent, Missing::Directory)?;
    let kind = match node.kind {
        NodeKind::Char => SFlag::S_IFCHR,
        NodeKind::Block => SFlag::S_IFBLK,
        NodeKind::Fifo => SFlag::S_IFIFO,
    };
    let device = if node.kind == NodeKind::Fifo { 0 } else { makedev(node.major, node.minor) };
    match fstatat(&directory, name, AtFlags::AT_SYMLINK_NOFOLLOW) {
        Ok(stat) if file_type(&stat) == kind && stat.st_rdev == device => return Ok(()),
        // Whatever the image has in its place.
        Ok(_) => unlinkat(&directory, name, UnlinkatFlags::NoRemoveDir)?,
        Err(Errno::ENOENT) => {}
        Err(error) => return Err(error.into()),
    }
    mknodat(&directory, name, kind, Mode::from_bits_truncate(node.mode), device)?;
    let (uid, gid) = (Uid::from_raw(node.uid), Gid::from_raw(node.gid));
    fchownat(&directory, name, Some(uid), Some(gid), AtFlags::AT_SYMLINK_NOFOLLOW)?;
    Ok(())
}

/// Binds the guest's own node of this device. It keeps its owner and mode.
fn bind_node(root: &OwnedFd, node: &DeviceNode) -> io::Result<()> {
    let own = open(&node.path, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty())?;
    let stat = fstat(&own)?;
    let kind = if node.kind == NodeKind::Block { SFlag::S_IFBLK } else { SFlag::S_IFCHR };
    if file_type(&stat) != kind || stat.st_rdev != makedev(node.major, node.minor) {
        return Err(Errno::ENODEV.into());
    }
    let mounted = syscall::open_tree(own.as_fd(), c"", false)?;
    let target = paths::open_or_create(root, &node.path, Missing::File)?;
    syscall::move_mount(mounted.as_fd(), target.as_fd())
}

/// runtime-spec, "Dev symbolic links" and /dev/ptmx of "Default Devices".
fn make_dev_links(root: &OwnedFd) -> io::Result<()> {
    const LINKS: [(&str, &str); 5] = [
        ("/proc/self/fd", "fd"),
        ("/proc/self/fd/0", "stdin"),
        ("/proc/self/fd/1", "stdout"),
        ("/proc/self/fd/2", "stderr"),
        ("pts/ptmx", "ptmx"),
    ];
    let dev = paths::open_or_create(root, Path::new("/dev"), Missing::Directory)?;
    for (target, name) in LINKS {
        match symlinkat(target, &dev, name) {
            // A node in the image would be of the guest's terminals rather than the container's.
            Err(Errno::EEXIST) if name == "ptmx" => {
                unlinkat(&dev, name, UnlinkatFlags::NoRemoveDir)?;
                symlinkat(target, &dev, name)?;
            }
            Err(Errno::EEXIST) | Ok(()) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// `linux.maskedPaths`: the guest's /dev/null over files, an empty directory over directories.
fn hide(root: &OwnedFd, config: &RootfsConfig) -> Result<(), SetupError> {
    let mut empty = None;
    for path in &config.masked_paths {
        hide_one(root, path, &mut empty).step(|| format!("linux.maskedPaths {}", path.display()))?;
    }
    Ok(())
}

fn hide_one(root: &OwnedFd, path: &Path, empty: &mut Option<OwnedFd>) -> Result<(), SetupError> {
    let Some(target) = open_if_there(root, path)? else { return Ok(()) };
    if !is_directory(&target).step(|| "type".into())? {
        let null = syscall::open_tree(AT_FDCWD, c"/dev/null", false).step(|| "/dev/null".into())?;
        return syscall::move_mount(null.as_fd(), target.as_fd()).step(|| "mounting".into());
    }
    let cover = match empty {
        // All of them share one file system: cheaper by most of a mount.
        Some(first) => syscall::open_tree(first.as_fd(), c"", false).step(|| "copying the mount".into())?,
        None => empty_file_system()?,
    };
    syscall::move_mount(cover.as_fd(), target.as_fd()).step(|| "mounting".into())?;
    empty.get_or_insert(cover);
    Ok(())
}

fn empty_file_system() -> Result<OwnedFd, SetupError> {
    let limit = |key: &str| (key.to_owned(), Some("1".to_owned()));
    let empty = new_file_system("tmpfs", Some("tmpfs"), &[limit("nr_blocks"), limit("nr_inodes")])?;
    syscall::mount_setattr(empty.as_fd(), false, &MountAttr::new(attr::RDONLY, 0))
        .step(|| "read-only".into())?;
    Ok(empty)
}

fn make_readonly(root: &OwnedFd, path: &Path) -> Result<(), SetupError> {
    let Some(target) = open_if_there(root, path)? else { return Ok(()) };
    let tree = syscall::open_tree(target.as_fd(), c"", true).step(|| "copying the mount".into())?;
    syscall::mount_setattr(tree.as_fd(), true, &MountAttr::new(attr::RDONLY, 0))
        .step(|| "read-only".into())?;
    syscall::move_mount(tree.as_fd(), target.as_fd()).step(|| "mounting".into())
}

/// Masked and read-only paths need not exist.
fn open_if_there(root: &OwnedFd, path: &Path) -> Result<Option<OwnedFd>, SetupError> {
    match paths::open(root, path) {
        Ok(fd) => Ok(Some(fd)),
        Err(Errno::ENOENT | Errno::ENOTDIR) => Ok(None),
        Err(error) => Err(error).step(|| "opening".into()),
    }
}

/// pivot_root(2), "pivot_root(".", ".")": the old root ends up on top of the new one, and is taken off.
fn pivot(root: &OwnedFd) -> nix::Result<()> {
    fchdir(root)?;
    pivot_root(".", ".")?;
    umount2(".", MntFlags::MNT_DETACH)?;
    chdir("/")
}
