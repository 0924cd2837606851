//! Descriptors that this command was started with, such as the lock of flock(1) or the pipe of a CI.

use std::{fs, io};

/// The first descriptor after the standard streams.
const FIRST: libc::c_int = libc::STDERR_FILENO + 1;

/// Keeps the inherited descriptors from the programs that this process starts: a shim that outlives this command would
/// keep a lock locked and a pipe open.
pub(crate) fn keep_to_oneself() -> io::Result<()> {
    // Linux before 5.11 does not know it, and the filter of an old container engine refuses it.
    mark_range().or_else(|_| mark_each())
}

#[allow(unsafe_code)]
fn mark_range() -> io::Result<()> {
    // SAFETY: only flags of descriptors change.
    let marked =
        unsafe { libc::syscall(libc::SYS_close_range, FIRST, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC) };
    if marked == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[allow(unsafe_code)]
fn mark_each() -> io::Result<()> {
    for entry in fs::read_dir("/proc/self/fd")? {
        let name = entry?.file_name();
        let number = name.to_str().and_then(|name| name.parse().ok());
        let Some(descriptor) = number.filter(|number: &libc::c_int| *number >= FIRST) else { continue };
        // SAFETY: only flags of a descriptor change. One that was closed meanwhile is an error, which is no matter.
        _ = unsafe { libc::fcntl(descriptor, libc::F_SETFD, libc::FD_CLOEXEC) };
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use rustix::io::{FdFlags, fcntl_getfd, fcntl_setfd};

    use super::*;

    #[test]
    fn no_program_inherits_what_is_open() {
        for mark in [keep_to_oneself, mark_range, mark_each] {
            let file = File::open("/dev/null").unwrap();
            fcntl_setfd(&file, FdFlags::empty()).unwrap();
            mark().unwrap();
            assert_eq!(fcntl_getfd(&file).unwrap(), FdFlags::CLOEXEC);
        }
    }
}
