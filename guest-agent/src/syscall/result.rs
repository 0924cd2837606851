//! What system calls return.

use std::{
    io,
    os::fd::{FromRawFd, OwnedFd, RawFd},
};

pub(super) fn check(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

pub(super) fn owned(result: libc::c_long) -> io::Result<OwnedFd> {
    let fd = check(result)?;
    // SAFETY: a system call that returns a descriptor has just returned this one, and nothing else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}
