//! The socket of a shim. The shims of two pods of the same id, one after the other, have the same path.

use std::{fs, io, os::fd::AsRawFd, path::Path};

use nix::{
    errno::Errno,
    sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket},
};

/// Removes the socket of a shim that has died, unless a new shim listens there. It is no error if there is none.
pub(crate) fn remove_dead(path: &Path) -> io::Result<()> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let client = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    match connect(client.as_raw_fd(), &UnixAddr::new(path)?) {
        Err(Errno::ECONNREFUSED) => Ok(fs::remove_file(path)?),
        // EAGAIN: somebody listens, and many want to connect.
        Ok(()) | Err(Errno::ENOENT | Errno::EAGAIN) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    #[test]
    fn only_a_socket_that_nobody_listens_on_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        remove_dead(&path).unwrap();
        let listener = UnixListener::bind(&path).unwrap();
        remove_dead(&path).unwrap();
        UnixStream::connect(&path).unwrap();
        drop(listener);
        remove_dead(&path).unwrap();
        assert!(!path.exists());
    }
}
