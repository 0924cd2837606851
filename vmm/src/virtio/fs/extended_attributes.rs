//! Extended attributes of files.
//!
//! Linux lets a process read and set `trusted.*` if it has CAP_SYS_ADMIN. In the guest its kernel checks that. The
//! threads of the file server do not have this capability on the host, because it would allow much more. So the guest's
//! `trusted.NAME` is `user.bulkhead.trusted.NAME` on the host, where every process that may write a file may set it. In
//! the guest nobody reaches it by that name: a process that lacks the capability cannot set a trusted attribute.
//! overlayfs keeps such attributes in its upper layer, and container engines in a privileged container use overlayfs.
//!
//! The host's own `trusted.*`, such as those of the overlay that is a container's root, stay hidden from the guest.

use std::{
    borrow::Cow,
    ffi::{CStr, CString},
};

use rustix::{
    fs::{
        AtFlags, CWD, Mode, XattrFlags, chmodat, getxattr, getxattr_query, listxattr, removexattr, setxattr,
    },
    io::Errno,
};

use super::{
    abi::{Body, Result, SETXATTR_ACL_KILL_SGID},
    file_server::{Answer, Request, Server, done},
    file_stat::{path_of, stat_at},
};

/// The largest value of an extended attribute, and the longest list of their names (XATTR_SIZE_MAX, XATTR_LIST_MAX).
const LARGEST: u32 = 0x1_0000;
/// The longest name of an extended attribute (XATTR_NAME_MAX).
const LONGEST_NAME: usize = 255;
/// The extended attributes that contain access control lists (acl(5)).
const ACLS: [&CStr; 2] = [c"system.posix_acl_access", c"system.posix_acl_default"];
/// How the names begin that only CAP_SYS_ADMIN gives access to.
const TRUSTED: &[u8] = b"trusted.";
/// What is there instead of [`TRUSTED`] on the host.
const TRUSTED_ON_HOST: &[u8] = b"user.bulkhead.trusted.";

impl Server {
    /// `fuse_setxattr_in` (FUSE_SETXATTR_EXT), the name and the value.
    pub(super) fn set_xattr(&mut self, mut request: Request) -> Result<Answer> {
        let args = &mut request.args;
        let (size, flags, more_flags) = (args.u32()?, args.u32()?, args.u32()?);
        args.skip(4)?;
        let name = args.text()?;
        let value = args.bytes(size as usize)?;
        let flags = XattrFlags::from_bits(flags).ok_or(Errno::INVAL)?;
        let name = name_on_host(name)?.ok_or(Errno::PERM)?;
        let fd = self.path(request.header.node)?;
        self.check_name_before_change(request.header.node, &fd)?;
        setxattr(&*path_of(&fd), &*name, value, flags)?;
        self.follow_copy(request.header.node, &fd)?;
        if more_flags & SETXATTR_ACL_KILL_SGID != 0 {
            let mode = Mode::from_raw_mode(stat_at(&*fd, c"")?.stx_mode.into());
            if mode.contains(Mode::SGID) {
                chmodat(CWD, &*path_of(&fd), mode - Mode::SGID, AtFlags::empty())?;
            }
        }
        Ok(done())
    }

    /// `fuse_getxattr_in` and the name. Returns the value, or its length if `size` is 0.
    pub(super) fn get_xattr(&mut self, mut request: Request) -> Result<Answer> {
        let size = request.args.u32()?;
        request.args.skip(4)?;
        let name = name_on_host(request.args.text()?)?.ok_or(Errno::NODATA)?;
        let fd = self.path(request.header.node)?;
        let path = path_of(&fd);
        let found = match size {
            0 => getxattr_query(&*path, &*name).map(size_out),
            _ => {
                let mut value = vec![0; size.min(LARGEST) as usize];
                getxattr(&*path, &*name, &mut value[..])
                    .map(|len| Body::default().bytes(&value[..len]).into())
            }
        };
        match found {
            // A file system without access control lists has no list for the file. With any other error the guest's
            // kernel would deny access to the file.
            Err(Errno::OPNOTSUPP) if ACLS.contains(&&*name) => Err(Errno::NODATA),
            found => found,
        }
    }

    /// `fuse_getxattr_in`. Returns the names, or their length if `size` is 0.
    pub(super) fn list_xattrs(&mut self, mut request: Request) -> Result<Answer> {
        let size = request.args.u32()? as usize;
        let mut names = vec![0; LARGEST as usize];
        let len = listxattr(&*path_of(&*self.path(request.header.node)?), &mut names[..])?;
        let names = names_in_guest(&names[..len]);
        match size {
            0 => Ok(size_out(names.len())),
            _ if names.len() > size => Err(Errno::RANGE),
            _ => Ok(Body::default().bytes(&names).into()),
        }
    }

    pub(super) fn remove_xattr(&mut self, mut request: Request) -> Result<Answer> {
        let name = name_on_host(request.args.text()?)?.ok_or(Errno::PERM)?;
        let fd = self.path(request.header.node)?;
        self.check_name_before_change(request.header.node, &fd)?;
        removexattr(&*path_of(&fd), &*name)?;
        self.follow_copy(request.header.node, &fd)?;
        Ok(done())
    }
}

/// `fuse_getxattr_out`.
fn size_out(size: usize) -> Answer {
    Body::default().u32(size as u32).zeros(4).into()
}

/// The name on the host of an attribute that has this name in the guest. None: the guest has no attribute of this name,
/// because it means another one on the host. ERANGE: the name on the host would be too long.
fn name_on_host(name: &CStr) -> Result<Option<Cow<'_, CStr>>> {
    let bytes = name.to_bytes();
    let Some(rest) = bytes.strip_prefix(TRUSTED) else {
        return Ok((!bytes.starts_with(TRUSTED_ON_HOST)).then_some(Cow::Borrowed(name)));
    };
    if rest.is_empty() {
        // As Linux answers where it knows the prefix.
        return Err(Errno::INVAL);
    }
    if TRUSTED_ON_HOST.len() + rest.len() > LONGEST_NAME {
        return Err(Errno::RANGE);
    }
    let on_host = CString::new([TRUSTED_ON_HOST, rest].concat()).map_err(|_| Errno::INVAL)?;
    Ok(Some(Cow::Owned(on_host)))
}

/// The list for the guest of the names that the host has listed, each with its NUL.
fn names_in_guest(names: &[u8]) -> Vec<u8> {
    let mut list = Vec::with_capacity(names.len());
    for name in names.split_inclusive(|byte| *byte == 0) {
        match name.strip_prefix(TRUSTED_ON_HOST) {
            // Somebody on the host has set an attribute whose name ends there.
            Some(b"\0") => {}
            Some(rest) => list.extend(TRUSTED.iter().chain(rest)),
            // Most file systems do not list the host's own ones to a process without CAP_SYS_ADMIN.
            None if name.starts_with(TRUSTED) => {}
            None => list.extend(name),
        }
    }
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trusted_name_is_another_one_on_the_host_which_the_guest_cannot_name() {
        let name = |name: &CStr| name_on_host(name).map(|it| it.map(Cow::into_owned));
        assert_eq!(name(c"user.x"), Ok(Some(c"user.x".into())));
        assert_eq!(name(c"user.bulkhead.trustedx"), Ok(Some(c"user.bulkhead.trustedx".into())));
        assert_eq!(name(c"trusted.x"), Ok(Some(c"user.bulkhead.trusted.x".into())));
        assert_eq!(name(c"user.bulkhead.trusted.x"), Ok(None));
        assert_eq!(name(c"user.bulkhead.trusted."), Ok(None));
        assert_eq!(
            name(c"trusted.user.bulkhead.trusted.x"),
            Ok(Some(c"user.bulkhead.trusted.user.bulkhead.trusted.x".into()))
        );
        assert_eq!(name(c"trusted."), Err(Errno::INVAL));
        let of_length = |len: usize| CString::new([TRUSTED, &vec![b'x'; len - 8]].concat()).unwrap();
        assert_eq!(name(&of_length(241)).unwrap().unwrap().count_bytes(), LONGEST_NAME);
        assert_eq!(name(&of_length(242)), Err(Errno::RANGE));
    }

    #[test]
    fn a_list_has_the_guests_names_and_none_of_the_hosts_own_trusted_ones() {
        let host = b"user.x\0user.bulkhead.trusted.a\0trusted.overlay.opaque\0user.bulkhead.trusted.\0\
                     security.capability\0user.bulkhead.trusted.b";
        let guest = b"user.x\0trusted.a\0security.capability\0trusted.b";
        assert_eq!(names_in_guest(host), guest);
        assert_eq!(names_in_guest(b""), b"");
    }
}
