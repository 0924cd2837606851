//! The few rtnetlink(7) requests that the agent needs. The kernel acknowledges each of them. There is no crate for
//! this, because a crate contains all messages, and would take memory in every guest.

use std::{
    io,
    os::fd::{AsRawFd, OwnedFd, RawFd},
};

use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, socket};

const NLMSGHDR_LEN: usize = 16;
const RTATTR_LEN: usize = 4;
/// A kernel's answer is a nlmsghdr, an error number, and the nlmsghdr of the request.
const ANSWER_LEN: usize = 4096;

/// An rtnetlink socket in the network namespace of the thread that opened it.
#[derive(Debug)]
pub(super) struct Socket(OwnedFd);

impl Socket {
    pub(super) fn open() -> io::Result<Self> {
        let (family, protocol) = (AddressFamily::Netlink, SockProtocol::NetlinkRoute);
        Ok(Self(socket(family, SockType::Raw, SockFlag::SOCK_CLOEXEC, protocol)?))
    }

    /// Changes an interface.
    pub(super) fn set_link(&self, message: &LinkMessage) -> io::Result<()> {
        self.request(libc::RTM_NEWLINK, 0, &message.0)
    }

    /// `body` begins with a `struct ifaddrmsg`.
    pub(super) fn add_address(&self, body: &[u8]) -> io::Result<()> {
        self.request(libc::RTM_NEWADDR, libc::NLM_F_CREATE | libc::NLM_F_REPLACE, body)
    }

    /// `body` begins with a `struct rtmsg`; the route goes through the interface `index`. It may be one of several to
    /// the same destination.
    pub(super) fn add_route(&self, body: &[u8], index: u32) -> io::Result<()> {
        let mut body = body.to_vec();
        put_attribute(&mut body, libc::RTA_OIF, &index.to_ne_bytes());
        self.request(libc::RTM_NEWROUTE, libc::NLM_F_CREATE | libc::NLM_F_APPEND, &body)
    }

    /// `body` begins with a `struct ndmsg`.
    pub(super) fn add_neighbour(&self, body: &[u8]) -> io::Result<()> {
        self.request(libc::RTM_NEWNEIGH, libc::NLM_F_CREATE | libc::NLM_F_REPLACE, body)
    }

    /// Sends a request and waits for the kernel's answer, which is in the socket before send(2) returns.
    fn request(&self, kind: u16, flags: i32, body: &[u8]) -> io::Result<()> {
        let len = NLMSGHDR_LEN + body.len();
        let flags = (flags | libc::NLM_F_REQUEST | libc::NLM_F_ACK) as u16;
        let mut message = Vec::with_capacity(len);
        message.extend((len as u32).to_ne_bytes());
        message.extend(kind.to_ne_bytes());
        message.extend(flags.to_ne_bytes());
        // Sequence number and port: there is one request at a time, and the kernel knows its sender.
        message.extend([0; 8]);
        message.extend(body);
        send(self.0.as_raw_fd(), &message, MsgFlags::empty())?;
        let mut answer = [0; ANSWER_LEN];
        let len = recv(self.0.as_raw_fd(), &mut answer, MsgFlags::empty())?;
        error_of(answer.get(..len).unwrap_or_default())
    }
}

/// What a `struct nlmsgerr` says (netlink(7)).
fn error_of(answer: &[u8]) -> io::Result<()> {
    let kind = answer.get(4..6).and_then(|bytes| bytes.try_into().ok()).map(u16::from_ne_bytes);
    let error = answer.get(NLMSGHDR_LEN..NLMSGHDR_LEN + 4).and_then(|bytes| bytes.try_into().ok());
    match (kind.map(i32::from), error.map(i32::from_ne_bytes)) {
        (Some(libc::NLMSG_ERROR), Some(0)) => Ok(()),
        (Some(libc::NLMSG_ERROR), Some(error)) => Err(io::Error::from_raw_os_error(error.wrapping_neg())),
        _ => Err(io::Error::other("the kernel's answer is none")),
    }
}

/// What is to change of an interface: a `struct ifinfomsg` and attributes.
#[derive(Debug)]
pub(super) struct LinkMessage(Vec<u8>);

impl LinkMessage {
    pub(super) fn new(index: u32) -> Self {
        let mut body = vec![0; 16];
        body[4..8].copy_from_slice(&index.to_ne_bytes());
        Self(body)
    }

    pub(super) fn name(self, name: &str) -> Self {
        self.with(libc::IFLA_IFNAME, &[name.as_bytes(), b"\0"].concat())
    }

    pub(super) fn address(self, mac: &[u8; 6]) -> Self {
        self.with(libc::IFLA_ADDRESS, mac)
    }

    pub(super) fn mtu(self, mtu: u32) -> Self {
        self.with(libc::IFLA_MTU, &mtu.to_ne_bytes())
    }

    /// Moves it to this network namespace.
    pub(super) fn netns(self, fd: RawFd) -> Self {
        self.with(libc::IFLA_NET_NS_FD, &fd.to_ne_bytes())
    }

    /// `ifi_flags`, and in `ifi_change` which of them.
    pub(super) fn up(mut self) -> Self {
        let up = (libc::IFF_UP as u32).to_ne_bytes();
        self.0[8..12].copy_from_slice(&up);
        self.0[12..16].copy_from_slice(&up);
        self
    }

    fn with(mut self, kind: u16, value: &[u8]) -> Self {
        put_attribute(&mut self.0, kind, value);
        self
    }
}

/// Attributes begin at multiples of 4 (rtnetlink(7), RTA_ALIGN).
fn put_attribute(body: &mut Vec<u8>, kind: u16, value: &[u8]) {
    body.resize(body.len().next_multiple_of(4), 0);
    body.extend(((RTATTR_LEN + value.len()) as u16).to_ne_bytes());
    body.extend(kind.to_ne_bytes());
    body.extend(value);
}

#[cfg(test)]
mod tests {
    use super::*;

    const IFLA_INFO_KIND: u16 = 1;

    impl Socket {
        /// Makes a veth whose other end the kernel calls veth0.
        pub(in crate::network) fn add_veth(&self, name: &str) -> io::Result<()> {
            let mut info = Vec::new();
            put_attribute(&mut info, IFLA_INFO_KIND, b"veth");
            let message = LinkMessage::new(0).name(name).with(libc::IFLA_LINKINFO, &info);
            self.request(libc::RTM_NEWLINK, libc::NLM_F_CREATE | libc::NLM_F_EXCL, &message.0)
        }
    }

    #[test]
    fn attributes_are_aligned_and_their_lengths_are_not() {
        let mut body = vec![1; 4];
        put_attribute(&mut body, 3, b"abcde");
        put_attribute(&mut body, 4, b"x");
        let expected = [&[1, 1, 1, 1, 9, 0, 3, 0][..], b"abcde\0\0\0", &[5, 0, 4, 0], b"x"].concat();
        assert_eq!(body, expected);
    }

    #[test]
    fn the_kernels_refusal_is_its_error() {
        let socket = Socket::open().unwrap();
        let error = socket.set_link(&LinkMessage::new(u32::MAX >> 1).mtu(1500)).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENODEV));
        assert!(error_of(&[]).is_err());
    }
}
