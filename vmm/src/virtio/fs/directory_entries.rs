//! Creates, removes and renames files.

use std::{ffi::CStr, os::fd::OwnedFd, time::Duration};

use bulkhead_vmm_api::SharedSocket;
use rustix::{
    fs::{
        AtFlags, CWD, FileType, Mode, OFlags, RenameFlags, linkat, makedev, mkdirat, mknodat, openat,
        readlinkat, renameat_with, symlinkat, unlinkat,
    },
    io::Errno,
};

use super::{
    abi::{Body, OPEN_KEEP_CACHE, OPEN_KILL_SUIDGID, ROOT, Result, decode_dev},
    caller::Caller,
    file_server::{Answer, Request, Server, done},
    file_stat::{path_of, stat_at},
    handles,
    identity::{Id, kind_of},
    open_files::NO_HANDLE,
    read_write::flush_flags,
};

/// `fuse_create_in`, of CREATE and TMPFILE.
struct Create {
    flags: u32,
    mode: u32,
    mask: u32,
    open_flags: u32,
}

impl Create {
    fn parse(request: &mut Request, is_exclusive: bool) -> Result<Self> {
        let args = &mut request.args;
        let (mut flags, mode, mask, open_flags) = (args.u32()?, args.u32()?, args.u32()?, args.u32()?);
        if is_exclusive {
            // The file is opened for all processes that will open it.
            let of_one = OFlags::ACCMODE | OFlags::APPEND | OFlags::SYNC | OFlags::DSYNC | OFlags::NOATIME;
            flags = flags & !of_one.bits() | OFlags::RDWR.bits();
        }
        Ok(Self { flags, mode, mask, open_flags })
    }
}

impl Server {
    pub(super) fn read_link(&mut self, request: Request) -> Result<Answer> {
        let link = self.path(request.header.node)?;
        let target = readlinkat(&*link, c"", Vec::new())?;
        Ok(Body::default().bytes(target.to_bytes()).into())
    }

    pub(super) fn make_symlink(&mut self, mut request: Request) -> Result<Answer> {
        let (name, target) = (request.args.name()?, request.args.text()?);
        self.make(&request, name, 0, |dir| symlinkat(target, dir, name))
    }

    /// `fuse_mknod_in`. The server never opens a device node.
    pub(super) fn make_node(&mut self, mut request: Request) -> Result<Answer> {
        let args = &mut request.args;
        let (mode, dev, mask) = (args.u32()?, args.u32()?, args.u32()?);
        args.skip(4)?;
        let name = args.name()?;
        let kind = FileType::from_raw_mode(mode);
        if kind == FileType::Socket
            && request.header.node == ROOT
            && !self.shared.is_exclusive
            && let Some(socket) = SharedSocket::named(name.to_bytes())
        {
            return self.name_again(&socket);
        }
        let (major, minor) = decode_dev(dev);
        self.make(&request, name, mask, |dir| {
            mknodat(dir, name, kind, Mode::from_raw_mode(mode), makedev(major, minor))
        })
    }

    /// `fuse_entry_out` of a socket that the guest knows (see [`SharedSocket`]). The guest must not cache the name, so
    /// that it drops the name when the agent closes the socket.
    fn name_again(&mut self, socket: &SharedSocket) -> Result<Answer> {
        let node = self.tables().nodes.listened(socket)?;
        match self.stat_node(node) {
            Ok(stat) => Ok(self.entry_cached(node, &stat, Duration::ZERO).into()),
            Err(error) => {
                self.tables().nodes.forget(node, 1);
                // It was there when the guest looked it up.
                Err(if error == Errno::STALE { Errno::NOENT } else { error })
            }
        }
    }

    /// `fuse_mkdir_in`.
    pub(super) fn make_directory(&mut self, mut request: Request) -> Result<Answer> {
        let args = &mut request.args;
        let (mode, mask) = (args.u32()?, args.u32()?);
        let name = args.name()?;
        self.make(&request, name, mask, |dir| mkdirat(dir, name, Mode::from_raw_mode(mode)))
    }

    /// `fuse_link_in`. The file may have no name yet (O_TMPFILE).
    pub(super) fn make_link(&mut self, mut request: Request) -> Result<Answer> {
        let file = request.args.u64()?;
        let name = request.args.name()?;
        let parent = request.header.node;
        self.tables().nodes.check_same_mount(file, parent)?;
        self.tables().nodes.make_room()?;
        let (number, dir) = (file, self.path(parent)?);
        let file = self.path(number)?;
        self.check_name_before_change(number, &file)?;
        linkat(CWD, &*path_of(&file), &*dir, name, AtFlags::SYMLINK_FOLLOW)?;
        self.follow_copy(number, &file)?;
        self.made(parent, name)
    }

    /// Creates `name` in the directory of the request. It belongs to the calling process.
    fn make(
        &mut self,
        request: &Request,
        name: &CStr,
        mask: u32,
        make: impl FnOnce(&OwnedFd) -> Result<()>,
    ) -> Result<Answer> {
        let parent = request.header.node;
        self.tables().nodes.make_room()?;
        let dir = self.path(parent)?;
        // Perhaps only the caller is allowed to look it up.
        Caller::of(&request.header)?.create_as(mask, || {
            make(&dir)?;
            self.made(parent, name)
        })
    }

    pub(super) fn remove_name(&mut self, mut request: Request, is_directory: bool) -> Result<Answer> {
        let (parent, name) = (request.header.node, request.args.name()?);
        let flags = if is_directory { AtFlags::REMOVEDIR } else { AtFlags::empty() };
        let dir = self.path(parent)?;
        let held = self.hold(parent, name)?;
        match unlinkat(&*dir, name, flags) {
            Ok(()) => self.tables().nodes.lost(held),
            Err(error) => {
                self.tables().nodes.stays(held);
                return Err(error);
            }
        }
        Ok(done())
    }

    /// `fuse_rename_in` or `fuse_rename2_in`, and the two names.
    pub(super) fn rename(&mut self, mut request: Request, has_flags: bool) -> Result<Answer> {
        let (parent, args) = (request.header.node, &mut request.args);
        let new_parent = args.u64()?;
        let flags = if has_flags { args.u32()? } else { 0 };
        if has_flags {
            args.skip(4)?;
        }
        let flags = RenameFlags::from_bits(flags).ok_or(Errno::INVAL)?;
        let (name, new_name) = (args.name()?, args.name()?);

        self.tables().nodes.check_same_mount(parent, new_parent)?;
        let (dir, new_dir) = (self.path(parent)?, self.path(new_parent)?);
        let stat = stat_at(&*dir, name)?;
        let other = match stat_at(&*new_dir, new_name) {
            Err(Errno::NOENT) => None,
            other => Some(other?),
        };
        let rename = || renameat_with(&*dir, name, &*new_dir, new_name, flags);
        // The whiteout is a new file. Other requests of this kind make none.
        let rename = || match flags.contains(RenameFlags::WHITEOUT) {
            true => Caller::of(&request.header)?.create_as(0, rename),
            false => rename(),
        };
        match other {
            // If both names are hard links to the same file, rename(2) does nothing.
            Some(other) if Id::of(&other) == Id::of(&stat) => rename()?,
            Some(other) if flags.contains(RenameFlags::EXCHANGE) => {
                rename()?;
                self.tables().nodes.renamed(&other, (new_parent, new_name), (parent, name));
                self.tables().nodes.renamed(&stat, (parent, name), (new_parent, new_name));
            }
            _ => {
                let replaced = if other.is_some() { self.hold(new_parent, new_name)? } else { None };
                if let Err(error) = rename() {
                    self.tables().nodes.stays(replaced);
                    return Err(error);
                }
                self.tables().nodes.lost(replaced);
                self.tables().nodes.renamed(&stat, (parent, name), (new_parent, new_name));
            }
        }
        self.tables().changed_names(new_parent, true);
        Ok(done())
    }

    /// `fuse_create_in`: creates and opens a file. If the host has created the file meanwhile, opens that.
    pub(super) fn create(&mut self, mut request: Request) -> Result<Answer> {
        let create = Create::parse(&mut request, self.shared.is_exclusive)?;
        let (parent, name) = (request.header.node, request.args.name()?);
        self.tables().nodes.make_room()?;
        let dir = self.path(parent)?;
        let room = self.tables().handles.make_room();
        if let Err(error) = room {
            // With O_EXCL the guest has not looked the name up.
            let is_taken = create.flags & OFlags::EXCL.bits() != 0 && stat_at(&*dir, name).is_ok();
            return Err(if is_taken { Errno::EXIST } else { error });
        }
        let kept = handles::kept(create.flags);
        let flags = kept | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mode = Mode::from_raw_mode(create.mode);
        match Caller::of(&request.header)?.create_as(create.mask, || openat(&*dir, name, flags, mode)) {
            Ok(file) => {
                let stat = stat_at(&file, c"")?;
                let node = self.tables().nodes.found(parent, name, &stat, true)?;
                self.created(node, kept, file)
            }
            Err(Errno::EXIST) if create.flags & OFlags::EXCL.bits() == 0 => {
                let (node, stat) = self.find(parent, name)?;
                if kind_of(&stat) != FileType::RegularFile {
                    self.tables().nodes.forget(node, 1);
                    return Err(Errno::EXIST);
                }
                let kills = create.open_flags & OPEN_KILL_SUIDGID != 0;
                match self.open_file(node, create.flags, kills) {
                    Ok((file, _)) => self.created(node, kept, file),
                    Err(error) => {
                        self.tables().nodes.forget(node, 1);
                        Err(error)
                    }
                }
            }
            Err(error) => Err(error),
        }
    }

    /// `fuse_create_in`: creates and opens a file without a name (O_TMPFILE).
    pub(super) fn make_nameless(&mut self, mut request: Request) -> Result<Answer> {
        let create = Create::parse(&mut request, self.shared.is_exclusive)?;
        self.tables().nodes.make_room()?;
        self.tables().handles.make_room()?;
        let dir = self.path(request.header.node)?;
        let kept = handles::kept(create.flags) - OFlags::DIRECTORY;
        // A file that is created with O_EXCL cannot be linked later.
        let flags =
            kept | OFlags::TMPFILE | OFlags::from_bits_retain(create.flags) & OFlags::EXCL | OFlags::CLOEXEC;
        let mode = Mode::from_raw_mode(create.mode);
        let file =
            Caller::of(&request.header)?.create_as(create.mask, || openat(&*dir, c".", flags, mode))?;
        let stat = stat_at(&file, c"")?;
        let anchor = openat(CWD, &*path_of(&file), OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        let node = self.tables().nodes.found_nameless(request.header.node, &stat, anchor)?;
        self.created(node, kept, file)
    }

    /// `fuse_entry_out` and `fuse_open_out` of a new node and its opened file.
    fn created(&mut self, node: u64, flags: OFlags, file: OwnedFd) -> Result<Answer> {
        let opened = stat_at(&file, c"").and_then(|stat| {
            if self.shared.is_exclusive {
                self.add_file(node, &stat, file)?;
                return Ok((NO_HANDLE, OPEN_KEEP_CACHE, stat));
            }
            let flush = flush_flags(flags.bits(), &file);
            Ok((self.add_handle(node, flags, file)?, flush, stat))
        });
        match opened {
            Ok((handle, flags, stat)) => Ok(self.entry(node, &stat).u64(handle).u32(flags).u32(0).into()),
            Err(error) => {
                self.tables().nodes.forget(node, 1);
                Err(error)
            }
        }
    }
}
