//! File descriptors that the VMM was started with.

use std::{
    io,
    os::fd::{BorrowedFd, OwnedFd},
};

/// Takes over a copy of the inherited descriptor `fd`; close-on-exec. EBADF if nothing was inherited there.
///
/// A copy, because that can be made of any number whoever owns it: taking `fd` itself would trust that no
/// configuration names a descriptor twice, or one that this process has opened itself.
#[allow(unsafe_code)]
pub fn duplicate(fd: i32) -> io::Result<OwnedFd> {
    const FIRST_INHERITED: i32 = 3;
    if fd < FIRST_INHERITED {
        return Err(io::Error::from_raw_os_error(libc::EBADF));
    }
    // SAFETY: the number is not -1, and is only used to ask the kernel for a copy of what it names, which
    // fails with EBADF if it names nothing. There is no safe way from a number to a descriptor.
    unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned()
}

#[cfg(test)]
mod tests {
    use std::{
        fs::File,
        io::{Read, Write},
        os::fd::AsRawFd,
    };

    use super::*;

    #[test]
    fn the_copy_is_of_the_same_file() {
        let (mut reader, writer) = io::pipe().unwrap();
        let copy = duplicate(writer.as_raw_fd()).unwrap();
        drop(writer);
        File::from(copy).write_all(b"x").unwrap();
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        assert_eq!(text, "x");
    }

    #[test]
    fn what_was_not_inherited_is_an_error() {
        for fd in [-1, 0, 2, 9999] {
            assert_eq!(duplicate(fd).unwrap_err().raw_os_error(), Some(libc::EBADF), "{fd}");
        }
    }
}
