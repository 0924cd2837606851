//! Reaches the files of nodes. All system calls are made without the lock on the tables, because they may block.

use std::{ffi::CStr, io::IoSliceMut, os::fd::OwnedFd, sync::Arc};

use rustix::{
    fs::{CWD, FileType, Mode, OFlags, fstatfs, openat},
    io::{Errno, preadv},
};

use super::{
    abi::Result,
    file_server::{Server, Shared},
    file_stat::{FileStat, path_of, stat_at},
    file_system_kind::{FileSystemKind, PROC_SUPER_MAGIC},
    identity::{device_of, kind_of},
    nodes::{Held, MOST_ANCESTORS, MOST_DEVICES, Place},
};
use crate::lock;

/// Flags for a descriptor that refers to a file but does not open it. A symbolic link is not followed.
const PATH_FLAGS: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Files of procfs with the memory of a process, or with addresses in it. The kernel protects those of other
/// processes (ptrace(2), "Ptrace access mode checking"), but lets a process open its own. So a guest that has the
/// host's /proc as a volume could read and write the memory of the VMM.
const OWN_MEMORY: [&CStr; 12] = [
    c"mem",
    c"maps",
    c"map_files",
    c"smaps",
    c"smaps_rollup",
    c"numa_maps",
    c"pagemap",
    c"clear_refs",
    c"environ",
    c"auxv",
    c"stack",
    c"syscall",
];

impl Server {
    /// Looks a name up, and counts a lookup of the file.
    pub(super) fn find(&mut self, parent: u64, name: &CStr) -> Result<(u64, FileStat)> {
        let dir = self.path(parent)?;
        let mut stat = stat_at(&*dir, name)?;
        let found = self.tables().nodes.found(parent, name, &stat, false);
        let number = match found {
            Err(Errno::AGAIN) => {
                stat = stat_at(&*dir, name)?;
                self.tables().nodes.found(parent, name, &stat, true)?
            }
            other => other?,
        };
        self.tables().nodes.found_by(number, self.thread);
        Ok((number, stat))
    }

    /// An O_PATH descriptor of a node.
    pub(super) fn path(&mut self, number: u64) -> Result<Arc<OwnedFd>> {
        match self.path_by_place(number) {
            Err(Errno::STALE) => self.path_by_handle(number),
            other => other,
        }
    }

    fn path_by_place(&mut self, number: u64) -> Result<Arc<OwnedFd>> {
        let mut below = Vec::new();
        let mut at = number;
        let mut fd = loop {
            let mut tables = self.tables();
            if let Some(fd) = tables.nodes.kept(at)? {
                break fd;
            }
            if below.len() >= MOST_ANCESTORS {
                return Err(Errno::LOOP);
            }
            let place = tables.nodes.place(at)?;
            let parent = place.parent;
            below.push((at, place.name));
            at = parent;
        };
        for (number, name) in below.into_iter().rev() {
            fd = Arc::new(self.path_at(number, &fd, &name)?);
            self.tables().nodes.keep(number, fd.clone())?;
        }
        Ok(fd)
    }

    /// An O_PATH descriptor of a node that should be at `place`, which is not kept.
    fn path_at_place(&mut self, number: u64, place: &Place) -> Result<Arc<OwnedFd>> {
        let found = match self.path(place.parent) {
            Ok(dir) => self.path_at(number, &dir, &place.name).map(Arc::new),
            Err(error) => Err(error),
        };
        match found {
            Err(Errno::STALE) => self.path_by_handle(number),
            other => other,
        }
    }

    /// An O_PATH descriptor of a file that is not at its place any more, but open. See `Nodes::moved_away`.
    fn path_by_handle(&mut self, number: u64) -> Result<Arc<OwnedFd>> {
        let open = self.kept_of_node(number)?;
        let fd = Arc::new(openat(CWD, &*path_of(&open), OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?);
        let mount = stat_at(&*fd, c"")?.stx_mnt_id;
        if self.tables().nodes.moved_away(number, &fd, mount)? { Ok(fd) } else { Err(Errno::STALE) }
    }

    /// The descriptor of a handle of this node. ESTALE: there is none.
    fn kept_of_node(&self, number: u64) -> Result<Arc<OwnedFd>> {
        let mut tables = self.tables();
        let is_known = tables.nodes.is_known_by_handles(number)?;
        tables.handles.kept_of_node(number).filter(|_| is_known).ok_or(Errno::STALE)
    }

    /// A descriptor of a node to ask for its attributes, which fits as that of [`Self::stat_node`] does.
    pub(super) fn descriptor_to_stat(&mut self, number: u64) -> Result<Arc<OwnedFd>> {
        match self.path_by_place(number) {
            Err(Errno::STALE) => self.kept_of_node(number),
            other => other,
        }
    }

    /// An O_PATH descriptor of a node that should be at `name` in `parent`.
    fn path_at(&mut self, number: u64, parent: &OwnedFd, name: &CStr) -> Result<OwnedFd> {
        let fd = openat(parent, name, PATH_FLAGS, Mode::empty()).map_err(stale)?;
        let stat = stat_at(&fd, c"")?;
        self.tables().nodes.check(number, &stat)?;
        Ok(fd)
    }

    /// The attributes of a node. If the file is not at its place any more, but open, they are those of the open file:
    /// see `Nodes::moved_away`.
    pub(super) fn stat_node(&mut self, number: u64) -> Result<FileStat> {
        match self.stat_by_place(number) {
            Err(Errno::STALE) => stat_at(&*self.kept_of_node(number)?, c""),
            other => other,
        }
    }

    fn stat_by_place(&mut self, number: u64) -> Result<FileStat> {
        let kept = self.tables().nodes.kept(number)?;
        if let Some(fd) = kept {
            return stat_at(&*fd, c"");
        }
        let place = self.tables().nodes.place(number)?;
        let dir = self.path(place.parent)?;
        let stat = stat_at(&*dir, &place.name).map_err(stale)?;
        self.tables().nodes.check(number, &stat)?;
        Ok(stat)
    }

    /// Opens a node, and returns its attributes. Only regular files and directories are opened. The guest's kernel
    /// handles files of other kinds itself.
    pub(super) fn open_node(&mut self, number: u64, flags: OFlags) -> Result<(OwnedFd, FileStat)> {
        let kind = self.tables().nodes.kind(number)?;
        match kind {
            FileType::RegularFile | FileType::Directory => {}
            FileType::Symlink => return Err(Errno::LOOP),
            _ => return Err(Errno::NXIO),
        }
        // An O_PATH descriptor does not open a device or a pipe that has replaced the file. The file is opened only
        // after the descriptor was checked.
        let kept = self.tables().nodes.kept(number)?;
        let place = self.tables().nodes.place(number);
        let fd = match (kept, &place) {
            (Some(fd), _) => fd,
            (None, Ok(place)) => self.path_at_place(number, place)?,
            (None, Err(error)) => return Err(*error),
        };
        let name = place.as_ref().map_or(c"", |place| &*place.name);
        // /proc/PID/net/stat is a directory.
        let is_stat = name == c"stat" && kind == FileType::RegularFile;
        let is_secret = OWN_MEMORY.contains(&name);
        let is_in_procfs = (is_secret || is_stat) && fstatfs(&*fd)?.f_type == PROC_SUPER_MAGIC;
        if is_secret && is_in_procfs {
            return Err(Errno::ACCESS);
        }
        let flags = flags | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let opened = openat(CWD, &*path_of(&fd), flags, Mode::empty())?;
        // Programs that read those of all processes, such as node_exporter, pass over a process that has just ended.
        // Any other error ends them.
        if is_stat && is_in_procfs && has_addresses(&opened)? {
            return Err(Errno::NOENT);
        }
        let stat = stat_at(&opened, c"")?;
        Ok((opened, stat))
    }

    /// Call this with the attributes of a node's file after it was opened for a change, and before the change. Returns
    /// ESTALE if that has made a copy for another name than the one that the guest may mean: Linux then looks its name
    /// up again. See `nodes/names.rs`.
    pub(super) fn check_name(&self, number: u64, stat: &FileStat) -> Result<()> {
        let mut tables = self.tables();
        if tables.nodes.has_other_name_for(number, self.thread)
            && let Err(error) = tables.nodes.check(number, stat)
        {
            tables.nodes.separate(number);
            return Err(error);
        }
        Ok(())
    }

    /// Checks what [`Self::check_name`] checks, before a change of a node's file for which it is not opened. `fd` is an
    /// O_PATH descriptor of the file.
    pub(super) fn check_name_before_change(&self, number: u64, fd: &OwnedFd) -> Result<()> {
        let stat = stat_at(fd, c"")?;
        let is_in_doubt = self.tables().nodes.has_other_name_for(number, self.thread);
        // Other kinds of files with several names are rare in an image. They are changed at the node's place.
        if !is_in_doubt || stat.stx_nlink < 2 || kind_of(&stat) != FileType::RegularFile {
            return Ok(());
        }
        self.check_name(number, &stat_at(&open_to_write(fd)?, c"")?)
    }

    /// Call this before the name of a file is removed. See [`super::nodes::Nodes::hold`].
    pub(super) fn hold(&mut self, parent: u64, name: &CStr) -> Result<Option<Held>> {
        let dir = self.path(parent)?;
        let fd = Arc::new(openat(&*dir, name, PATH_FLAGS, Mode::empty())?);
        let stat = stat_at(&*fd, c"")?;
        let device = device_of(&stat);
        let is_nfs = self.shared.kind_of_file_system(device, &fd) == FileSystemKind::Nfs;
        let held = self.tables().nodes.hold(parent, name, &fd, &stat, is_nfs)?;
        if is_nfs {
            // Those of handles that the guest has just closed.
            while let Some(unused) = self.shared.take_unused(|of| of == device) {
                drop(unused);
            }
        }
        Ok(held)
    }
}

impl Shared {
    /// The kind of the file system with this device number, on which `fd` is. It is asked once: each statfs(2) of NFS
    /// is a request to its server.
    pub(super) fn kind_of_file_system(&self, device: u64, fd: &OwnedFd) -> FileSystemKind {
        if let Some(known) = lock(&self.kinds).get(&device) {
            return *known;
        }
        let kind = fstatfs(fd).map_or(FileSystemKind::Other, |stat| FileSystemKind::of(stat.f_type));
        let mut kinds = lock(&self.kinds);
        if kinds.len() >= MOST_DEVICES {
            kinds.clear();
        }
        kinds.insert(device, kind);
        kind
    }

    /// Whether it is known to be of this kind. Does not wait for the file system.
    pub(super) fn is_known_as(&self, device: u64, kind: FileSystemKind) -> bool {
        lock(&self.kinds).get(&device) == Some(&kind)
    }
}

/// Opens a regular file anew to be written, for which overlayfs copies one of a lower layer.
pub(super) fn open_to_write(fd: &OwnedFd) -> Result<OwnedFd> {
    let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    openat(CWD, &*path_of(fd), flags, Mode::empty())
}

/// Whether this is a /proc/PID/stat with the address of the program (field 26, proc_pid_stat(5)), and with it others.
/// It has those of a process that the VMM may trace, such as itself. Of others it says 0 or 1. /proc/stat has none.
fn has_addresses(stat: &OwnedFd) -> Result<bool> {
    let mut text = [0; 4096];
    let length = preadv(stat, &mut [IoSliceMut::new(&mut text)], 0)?;
    Ok(shows_addresses(&text[..length]))
}

fn shows_addresses(stat: &[u8]) -> bool {
    // Field 2 is a name in parentheses, which may contain anything. No other file of this name has parentheses.
    let Some(end) = stat.iter().rposition(|byte| *byte == b')') else { return false };
    let address = stat[end..].split(|byte| *byte == b' ').nth(26 - 2);
    address.is_some_and(|address| !matches!(address, b"0" | b"1"))
}

/// The error if the place of a node does not exist any more.
fn stale(error: Errno) -> Errno {
    match error {
        Errno::NOENT | Errno::NOTDIR | Errno::LOOP => Errno::STALE,
        other => other,
    }
}
