//! A second name for a socket in a share.
//!
//! A service of the host listens at a socket in a directory that a container mounts. The guest's kernel finds who
//! listens by the inode, and in the guest nobody does. So the agent makes a socket (bind(2)) of this name at the top of
//! the share. The file server makes no file, but answers with the socket that the guest knows already. Then the agent
//! listens at the inode by which the containers find it.

use std::str;

/// How the name begins. The other names at the top of a share are ids of containers and `_NUMBER`, without a colon.
const PREFIX: &str = "socket:";

/// A socket, by what the host's kernel knows it by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SharedSocket {
    /// The numbers of its file system.
    pub major: u32,
    pub minor: u32,
    pub inode: u64,
}

impl SharedSocket {
    /// Its name at the top of the share.
    pub fn name(&self) -> String {
        format!("{PREFIX}{}:{}:{}", self.major, self.minor, self.inode)
    }

    /// The socket of which this is the name.
    pub fn named(name: &[u8]) -> Option<Self> {
        let mut numbers = str::from_utf8(name).ok()?.strip_prefix(PREFIX)?.split(':');
        let socket = Self {
            major: numbers.next()?.parse().ok()?,
            minor: numbers.next()?.parse().ok()?,
            inode: numbers.next()?.parse().ok()?,
        };
        numbers.next().is_none().then_some(socket)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_that_of_one_socket() {
        let socket = SharedSocket { major: 8, minor: 1, inode: u64::MAX };
        assert_eq!(SharedSocket::named(socket.name().as_bytes()), Some(socket));
        for other in ["socket:8:1", "socket:8:1:2:3", "socket:8:1:-2", "socket:8:1:", "8:1:2", "\u{e9}"] {
            assert_eq!(SharedSocket::named(other.as_bytes()), None, "{other}");
        }
        assert_eq!(SharedSocket::named(b"socket:8:1:\xff"), None);
    }
}
