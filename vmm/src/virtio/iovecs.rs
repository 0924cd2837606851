//! Vectored reads and writes between a file descriptor of the host and guest memory, without a copy.
//!
//! This is unsafe because safe code cannot pass memory to the kernel that the guest may change at the same time.

use std::{
    io,
    os::fd::{AsFd, AsRawFd},
};

use vm_memory::VolatileSlice;

/// The iovecs of a call. Their allocation is used again by the next call.
#[derive(Default)]
pub(super) struct Iovecs(Vec<libc::iovec>);

impl Iovecs {
    /// readv(2) to `slices`. Returns the number of bytes read.
    pub(super) fn read<'a, 'm: 'a>(
        &mut self,
        fd: impl AsFd,
        slices: impl Iterator<Item = &'a VolatileSlice<'m>>,
    ) -> io::Result<usize> {
        let iovecs = self.fill(slices);
        // SAFETY: each iovec is a VolatileSlice, which is a checked range of guest memory that stays mapped until
        // this function returns. No Rust reference to guest memory exists, so the kernel may write to it.
        count(unsafe { libc::readv(fd.as_fd().as_raw_fd(), iovecs.as_ptr(), iovecs.len() as i32) })
    }

    /// writev(2) of `slices`. Returns the number of bytes written.
    pub(super) fn write<'a, 'm: 'a>(
        &mut self,
        fd: impl AsFd,
        slices: impl Iterator<Item = &'a VolatileSlice<'m>>,
    ) -> io::Result<usize> {
        let iovecs = self.fill(slices);
        // SAFETY: as in `read`. The kernel copies each byte once.
        count(unsafe { libc::writev(fd.as_fd().as_raw_fd(), iovecs.as_ptr(), iovecs.len() as i32) })
    }

    /// preadv(2) from the file offset `offset`.
    pub(super) fn read_at<'a, 'm: 'a>(
        &mut self,
        fd: impl AsFd,
        slices: impl Iterator<Item = &'a VolatileSlice<'m>>,
        offset: u64,
    ) -> io::Result<usize> {
        let iovecs = self.fill(slices);
        let (fd, count_of, offset) = (fd.as_fd().as_raw_fd(), iovecs.len() as i32, position(offset)?);
        // SAFETY: as in `read`.
        count(unsafe { libc::preadv(fd, iovecs.as_ptr(), count_of, offset) })
    }

    /// pwritev(2) to the file offset `offset`.
    pub(super) fn write_at<'a, 'm: 'a>(
        &mut self,
        fd: impl AsFd,
        slices: impl Iterator<Item = &'a VolatileSlice<'m>>,
        offset: u64,
    ) -> io::Result<usize> {
        let iovecs = self.fill(slices);
        let (fd, count_of, offset) = (fd.as_fd().as_raw_fd(), iovecs.len() as i32, position(offset)?);
        // SAFETY: as in `write`.
        count(unsafe { libc::pwritev(fd, iovecs.as_ptr(), count_of, offset) })
    }

    /// pwritev2(2) to the end of the file, whether or not the descriptor has O_APPEND.
    pub(super) fn append<'a, 'm: 'a>(
        &mut self,
        fd: impl AsFd,
        slices: impl Iterator<Item = &'a VolatileSlice<'m>>,
    ) -> io::Result<usize> {
        let iovecs = self.fill(slices);
        let (fd, count_of) = (fd.as_fd().as_raw_fd(), iovecs.len() as i32);
        // SAFETY: as in `write`.
        count(unsafe { libc::pwritev2(fd, iovecs.as_ptr(), count_of, 0, libc::RWF_APPEND) })
    }

    /// Makes iovecs of `slices`, up to the limit of the kernel (IOV_MAX).
    fn fill<'a, 'm: 'a>(&mut self, slices: impl Iterator<Item = &'a VolatileSlice<'m>>) -> &[libc::iovec] {
        self.0.clear();
        self.0.extend(slices.take(libc::UIO_MAXIOV as usize).map(|slice| libc::iovec {
            iov_base: slice.ptr_guard_mut().as_ptr().cast(),
            iov_len: slice.len(),
        }));
        &self.0
    }
}

fn position(offset: u64) -> io::Result<libc::off_t> {
    libc::off_t::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput.into())
}

fn count(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}
