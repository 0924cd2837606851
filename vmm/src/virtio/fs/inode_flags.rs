//! Inode flags of files, which lsattr(1) shows and chattr(1) changes.
//!
//! Linux sends the ioctls for them with a structure of a known size ("restricted" ioctls, fs/fuse/ioctl.c). The server
//! answers five of them, and ENOTTY to all others. No bytes of the guest are passed to the host's kernel unread.
//!
//! The guest's kernel checks that the caller owns the file. The host's kernel checks that the mount can be written to,
//! and that the file system has the flags. But it cannot check everything. overlayfs repeats a change in its upper
//! layer with the credentials of the mounter, who has all capabilities. And a process outside of user namespaces may
//! move its files to another project, and so out of its quota. So the server itself refuses the flags that need a
//! capability that it lacks, and all that is about projects. What is left are hints, and flags that can be had by
//! open(2) too.
//!
//! There is no ioctl that changes a single flag. If the host changes flags at the same moment, its change may be lost,
//! as if two processes of the host did that. The kernel does not let the server remove FS_IMMUTABLE_FL and
//! FS_APPEND_FL even so.

use std::os::fd::OwnedFd;

use rustix::{
    fs::{AtFlags, CWD, FileType, Mode, OFlags, Statx, chmodat, fstatfs},
    io::Errno,
};

use super::{
    abi::{Args, Body, Result},
    file_server::{Answer, Request, Server},
    file_stat::path_of,
    identity::kind_of,
    inode_ioctls::{
        FS_IOC_FSGETXATTR, FS_IOC_FSSETXATTR, FS_IOC_GETFLAGS, FS_IOC_GETVERSION, FS_IOC_SETFLAGS, FSXATTR,
        Fsxattr, flags, fsxattr, generation, set_flags, set_fsxattr,
    },
    paths::open_to_write,
    read_write::OVERLAYFS,
};

/// Bytes of the flags.
const FLAGS: usize = 4;
/// Bytes of `fuse_ioctl_out`.
const IOCTL_OUT: usize = 16;

/// How a guest may change the bits of a word of flags. Any other change is EOPNOTSUPP, as for a flag that the file
/// system does not have.
struct Rules {
    /// The host's kernel decides.
    changeable: u32,
    /// EPERM.
    privileged: u32,
    /// How the file system stores the file. Whoever sets flags without reading them first leaves these out, and they
    /// stay. Nobody can set them.
    stored: u32,
}

/// `FS_*_FL` (linux/fs.h).
mod flag {
    pub(super) const SECRM: u32 = 1 << 0;
    pub(super) const UNRM: u32 = 1 << 1;
    pub(super) const COMPR: u32 = 1 << 2;
    pub(super) const SYNC: u32 = 1 << 3;
    pub(super) const IMMUTABLE: u32 = 1 << 4;
    pub(super) const APPEND: u32 = 1 << 5;
    pub(super) const NODUMP: u32 = 1 << 6;
    pub(super) const NOATIME: u32 = 1 << 7;
    pub(super) const DIRTY: u32 = 1 << 8;
    pub(super) const COMPRBLK: u32 = 1 << 9;
    pub(super) const NOCOMP: u32 = 1 << 10;
    pub(super) const ENCRYPT: u32 = 1 << 11;
    pub(super) const INDEX: u32 = 1 << 12;
    pub(super) const IMAGIC: u32 = 1 << 13;
    pub(super) const JOURNAL_DATA: u32 = 1 << 14;
    pub(super) const NOTAIL: u32 = 1 << 15;
    pub(super) const DIRSYNC: u32 = 1 << 16;
    pub(super) const TOPDIR: u32 = 1 << 17;
    pub(super) const HUGE_FILE: u32 = 1 << 18;
    pub(super) const EXTENT: u32 = 1 << 19;
    pub(super) const VERITY: u32 = 1 << 20;
    pub(super) const EA_INODE: u32 = 1 << 21;
    pub(super) const EOFBLOCKS: u32 = 1 << 22;
    pub(super) const NOCOW: u32 = 1 << 23;
    pub(super) const INLINE_DATA: u32 = 1 << 28;
    pub(super) const PROJINHERIT: u32 = 1 << 29;
}

/// `FS_XFLAG_*` (linux/fs.h).
mod xflag {
    pub(super) const PREALLOC: u32 = 1 << 1;
    pub(super) const IMMUTABLE: u32 = 1 << 3;
    pub(super) const APPEND: u32 = 1 << 4;
    pub(super) const SYNC: u32 = 1 << 5;
    pub(super) const NOATIME: u32 = 1 << 6;
    pub(super) const NODUMP: u32 = 1 << 7;
    pub(super) const PROJINHERIT: u32 = 1 << 9;
    pub(super) const HASATTR: u32 = 1 << 31;
}

/// The rules of `FS_*_FL`. The other ones, such as DAX and CASEFOLD, change what the file server relies on.
const FLAGS_RULES: Rules = Rules {
    changeable: flag::SECRM
        | flag::UNRM
        | flag::COMPR
        | flag::SYNC
        | flag::NODUMP
        | flag::NOATIME
        | flag::NOCOMP
        | flag::NOTAIL
        | flag::DIRSYNC
        | flag::TOPDIR
        | flag::NOCOW,
    // The first two need CAP_LINUX_IMMUTABLE, and the third needs CAP_SYS_RESOURCE. The last one decides to which
    // project new files belong.
    privileged: flag::IMMUTABLE | flag::APPEND | flag::JOURNAL_DATA | flag::PROJINHERIT,
    // ext4 would store the whole file in another way if EXTENT was removed.
    stored: flag::DIRTY
        | flag::COMPRBLK
        | flag::ENCRYPT
        | flag::INDEX
        | flag::IMAGIC
        | flag::HUGE_FILE
        | flag::EXTENT
        | flag::VERITY
        | flag::EA_INODE
        | flag::EOFBLOCKS
        | flag::INLINE_DATA,
};

/// The rules of `FS_XFLAG_*`. The other ones are about where XFS allocates the blocks of a file, and about DAX.
const XFLAGS_RULES: Rules = Rules {
    changeable: xflag::SYNC | xflag::NOATIME | xflag::NODUMP,
    privileged: xflag::IMMUTABLE | xflag::APPEND | xflag::PROJINHERIT,
    stored: xflag::PREALLOC | xflag::HASATTR,
};

impl Rules {
    /// The flags that a file gets that has `old`, if the guest asks for `wanted`.
    fn apply(&self, old: u32, wanted: u32) -> Result<u32> {
        let kept = wanted | old & self.stored;
        let changed = old ^ kept;
        if changed & self.privileged != 0 {
            Err(Errno::PERM)
        } else if changed & !self.changeable != 0 {
            Err(Errno::OPNOTSUPP)
        } else {
            Ok(kept)
        }
    }
}

impl Server {
    /// `fuse_ioctl_in` and the argument of the ioctl. The handle is not looked at: what is changed is the node, however
    /// it was opened.
    pub(super) fn control_inode(&mut self, mut request: Request) -> Result<Answer> {
        let args = &mut request.args;
        args.skip(12)?;
        let command = args.u32()?;
        args.skip(8)?;
        let sizes = (args.u32()? as usize, args.u32()? as usize);
        let node = request.header.node;
        match command {
            FS_IOC_GETFLAGS => {
                check_sizes(sizes, 0, FLAGS)?;
                Ok(answer().u32(flags(&self.open_node(node, OFlags::RDONLY)?.0)?).into())
            }
            FS_IOC_GETVERSION => {
                check_sizes(sizes, 0, FLAGS)?;
                Ok(answer().u32(generation(&self.open_node(node, OFlags::RDONLY)?.0)?).into())
            }
            FS_IOC_FSGETXATTR => {
                check_sizes(sizes, 0, FSXATTR)?;
                let found = fsxattr(&self.open_node(node, OFlags::RDONLY)?.0)?;
                let body = answer().u32(found.xflags).u32(found.extent_size).u32(found.extents);
                let body = body.u32(found.project).u32(found.copied_extent_size);
                Ok(body.bytes(&found.padding).into())
            }
            FS_IOC_SETFLAGS => {
                check_sizes(sizes, FLAGS, 0)?;
                let wanted = args.u32()?;
                self.change_inode(node, |file| FLAGS_RULES.apply(flags(file)?, wanted), set_flags)
            }
            FS_IOC_FSSETXATTR => {
                check_sizes(sizes, FSXATTR, 0)?;
                let wanted = read_fsxattr(args)?;
                self.change_inode(node, |file| changed_fsxattr(&fsxattr(file)?, &wanted), set_fsxattr)
            }
            _ => Err(Errno::NOTTY),
        }
    }

    /// Sets what `judge` makes of what the file has and of what the guest asks for. It is asked before overlayfs copies
    /// the file, so that nothing is copied for what is refused, and about the copy.
    fn change_inode<T>(
        &mut self,
        node: u64,
        judge: impl Fn(&OwnedFd) -> Result<T>,
        set: impl Fn(&OwnedFd, T) -> Result<()>,
    ) -> Result<Answer> {
        let (file, stat) = self.open_node(node, OFlags::RDONLY)?;
        judge(&file)?;
        self.check_name_before_change(node, &file)?;
        copy_up(&file, &stat)?;
        set(&file, judge(&file)?)?;
        self.follow_copy(node, &file)?;
        Ok(answer().into())
    }
}

/// Has overlayfs copy a file of a lower layer, as the change of its flags would. The copy is in the project of the
/// upper layer, and has flags for the way in which it is stored. What the guest asks for has to be judged by these.
fn copy_up(file: &OwnedFd, stat: &Statx) -> Result<()> {
    if fstatfs(file)?.f_type != OVERLAYFS {
        return Ok(());
    }
    if kind_of(stat) == FileType::RegularFile {
        open_to_write(file)?;
    } else {
        // A directory cannot be opened to be written. It gets the mode that it has.
        let mode = Mode::from_raw_mode(u32::from(stat.stx_mode) & 0o7777);
        chmodat(CWD, &*path_of(file), mode, AtFlags::empty())?;
    }
    Ok(())
}

/// `fuse_ioctl_out` of an ioctl that has succeeded. What it returns follows.
fn answer() -> Body {
    Body::default().zeros(IOCTL_OUT)
}

/// EINVAL: a client that knows the ioctl has other sizes for its argument and for what it returns.
fn check_sizes((argument, returned): (usize, usize), of_argument: usize, of_returned: usize) -> Result<()> {
    if argument == of_argument && returned >= of_returned { Ok(()) } else { Err(Errno::INVAL) }
}

fn read_fsxattr(args: &mut Args) -> Result<Fsxattr> {
    Ok(Fsxattr {
        xflags: args.u32()?,
        extent_size: args.u32()?,
        extents: args.u32()?,
        project: args.u32()?,
        copied_extent_size: args.u32()?,
        padding: [0; 8],
    })
}

/// What a file gets that has `old`, if the guest asks for `wanted`. EPERM: it would belong to another project.
/// EOPNOTSUPP: it would get other hints for its allocation, which would take more space of the disk than was written.
fn changed_fsxattr(old: &Fsxattr, wanted: &Fsxattr) -> Result<Fsxattr> {
    if wanted.project != old.project {
        return Err(Errno::PERM);
    }
    let xflags = XFLAGS_RULES.apply(old.xflags, wanted.xflags)?;
    if (wanted.extent_size, wanted.copied_extent_size) != (old.extent_size, old.copied_extent_size) {
        return Err(Errno::OPNOTSUPP);
    }
    Ok(Fsxattr { xflags, ..*old })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_changes_hints_and_no_flag_that_gives_it_more() {
        for bit in (0..32).map(|bit| 1 << bit) {
            for rules in [&FLAGS_RULES, &XFLAGS_RULES] {
                let (set, cleared) = (rules.apply(0, bit), rules.apply(bit, 0));
                let sorts = [rules.changeable, rules.privileged, rules.stored].map(|sort| sort & bit != 0);
                let expected = match sorts {
                    [true, false, false] => (Ok(bit), Ok(0)),
                    [false, true, false] => (Err(Errno::PERM), Err(Errno::PERM)),
                    [false, false, true] => (Err(Errno::OPNOTSUPP), Ok(bit)),
                    [false, false, false] => (Err(Errno::OPNOTSUPP), Err(Errno::OPNOTSUPP)),
                    _ => panic!("{bit:#x} has several rules"),
                };
                assert_eq!((set, cleared), expected, "{bit:#x}");
                // What the file has already can stay.
                assert_eq!(rules.apply(bit, bit), Ok(bit), "{bit:#x}");
            }
        }
    }

    #[test]
    fn a_file_stays_in_its_project() {
        let old = Fsxattr {
            xflags: xflag::PROJINHERIT,
            extent_size: 4096,
            project: 7,
            extents: 3,
            ..Fsxattr::default()
        };
        let change = |change: fn(&mut Fsxattr)| {
            let mut wanted = old;
            change(&mut wanted);
            changed_fsxattr(&old, &wanted)
        };
        assert_eq!(change(|wanted| wanted.project = 0), Err(Errno::PERM));
        assert_eq!(change(|wanted| wanted.xflags = 0), Err(Errno::PERM));
        assert_eq!(change(|wanted| wanted.extent_size = 1 << 30), Err(Errno::OPNOTSUPP));
        assert_eq!(change(|wanted| wanted.copied_extent_size = 4096), Err(Errno::OPNOTSUPP));
        // The number of its extents is not for anybody to set.
        assert_eq!(change(|wanted| wanted.extents = 0), Ok(old));
        assert_eq!(
            change(|wanted| wanted.xflags |= xflag::NOATIME).unwrap().xflags,
            old.xflags | xflag::NOATIME
        );
    }
}
