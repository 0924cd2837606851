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
/// The most that a kernel sends at once of a list (NLMSG_GOODSIZE is less).
const DUMP_LEN: usize = 32 << 10;
/// Bytes of a `struct ifinfomsg`.
const LINK_LEN: usize = 16;
/// Of linux/if_link.h, since Linux 5.6.
const IFLA_PERM_ADDRESS: u16 = 54;

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
    /// the same destination. That the same one is there is no error: the kernel may have added it by itself.
    pub(super) fn add_route(&self, body: &[u8], index: u32) -> io::Result<()> {
        let mut body = body.to_vec();
        put_attribute(&mut body, libc::RTA_OIF, &index.to_ne_bytes());
        unless_there(self.request(libc::RTM_NEWROUTE, libc::NLM_F_CREATE | libc::NLM_F_APPEND, &body))
    }

    /// `body` begins with a `struct ndmsg`.
    pub(super) fn add_neighbour(&self, body: &[u8]) -> io::Result<()> {
        self.request(libc::RTM_NEWNEIGH, libc::NLM_F_CREATE | libc::NLM_F_REPLACE, body)
    }

    /// Removes one that is as in [`Socket::add_address`].
    pub(super) fn remove_address(&self, body: &[u8]) -> io::Result<()> {
        unless_gone(self.request(libc::RTM_DELADDR, 0, body))
    }

    /// Removes one that is as in [`Socket::add_route`].
    pub(super) fn remove_route(&self, body: &[u8], index: u32) -> io::Result<()> {
        let mut body = body.to_vec();
        put_attribute(&mut body, libc::RTA_OIF, &index.to_ne_bytes());
        unless_gone(self.request(libc::RTM_DELROUTE, 0, &body))
    }

    /// Removes one that is as in [`Socket::add_neighbour`].
    pub(super) fn remove_neighbour(&self, body: &[u8]) -> io::Result<()> {
        unless_gone(self.request(libc::RTM_DELNEIGH, 0, body))
    }

    /// Adds a rule of policy routing, unless it is there. `body` begins with a `struct fib_rule_hdr`.
    pub(super) fn add_rule(&self, body: &[u8]) -> io::Result<()> {
        unless_there(self.request(libc::RTM_NEWRULE, libc::NLM_F_CREATE | libc::NLM_F_EXCL, body))
    }

    /// Removes one that is as in [`Socket::add_rule`].
    pub(super) fn remove_rule(&self, body: &[u8]) -> io::Result<()> {
        unless_gone(self.request(libc::RTM_DELRULE, 0, body))
    }

    /// Adds a route that goes through no interface, or through the one that it names. It replaces one to the same
    /// destination with the same metric and table, which the host has no more. Otherwise what is to be dropped would go
    /// through an interface until that route is removed, and then by another table. `body` begins with a `struct
    /// rtmsg`.
    pub(super) fn add_other_route(&self, body: &[u8]) -> io::Result<()> {
        self.request(libc::RTM_NEWROUTE, libc::NLM_F_CREATE | libc::NLM_F_REPLACE, body)
    }

    /// Removes one that is as in [`Socket::add_other_route`].
    pub(super) fn remove_other_route(&self, body: &[u8]) -> io::Result<()> {
        unless_gone(self.request(libc::RTM_DELROUTE, 0, body))
    }

    /// The interface of a device that has this permanent address. A name can be changed in a container, this cannot.
    pub(super) fn find(&self, card: &[u8; 6]) -> io::Result<Option<u32>> {
        self.send(libc::RTM_GETLINK, libc::NLM_F_DUMP, &LinkMessage::new(0).0)?;
        let mut found = None;
        let mut answer = vec![0; DUMP_LEN];
        loop {
            let len = recv(self.0.as_raw_fd(), &mut answer, MsgFlags::empty())?;
            let mut rest = answer.get(..len).unwrap_or_default();
            while let Some((kind, body, next)) = split_message(rest) {
                match i32::from(kind) {
                    libc::NLMSG_DONE => return Ok(found),
                    libc::NLMSG_ERROR => error_of(rest)?,
                    _ if attribute(body.get(LINK_LEN..).unwrap_or_default(), IFLA_PERM_ADDRESS)
                        == Some(card) =>
                    {
                        found =
                            body.get(4..8).and_then(|index| index.try_into().ok()).map(u32::from_ne_bytes);
                    }
                    _ => {}
                }
                rest = next;
            }
        }
    }

    /// Sends a request and waits for the kernel's answer, which is in the socket before send(2) returns.
    fn request(&self, kind: u16, flags: i32, body: &[u8]) -> io::Result<()> {
        self.send(kind, flags | libc::NLM_F_ACK, body)?;
        let mut answer = [0; ANSWER_LEN];
        let len = recv(self.0.as_raw_fd(), &mut answer, MsgFlags::empty())?;
        error_of(answer.get(..len).unwrap_or_default())
    }

    fn send(&self, kind: u16, flags: i32, body: &[u8]) -> io::Result<()> {
        let len = NLMSGHDR_LEN + body.len();
        let flags = (flags | libc::NLM_F_REQUEST) as u16;
        let mut message = Vec::with_capacity(len);
        message.extend((len as u32).to_ne_bytes());
        message.extend(kind.to_ne_bytes());
        message.extend(flags.to_ne_bytes());
        // Sequence number and port: there is one request at a time, and the kernel knows its sender.
        message.extend([0; 8]);
        message.extend(body);
        send(self.0.as_raw_fd(), &message, MsgFlags::empty())?;
        Ok(())
    }
}

/// What was to be added is there already.
fn unless_there(added: io::Result<()>) -> io::Result<()> {
    match added {
        Err(error) if error.raw_os_error() == Some(libc::EEXIST) => Ok(()),
        other => other,
    }
}

/// What was to be removed is gone: it was not there, or went with the address or the interface that it belongs to, or
/// with all of IPv6 (ENXIO).
fn unless_gone(removed: io::Result<()>) -> io::Result<()> {
    match removed {
        Err(error)
            if matches!(
                error.raw_os_error(),
                Some(libc::ESRCH | libc::ENOENT | libc::EADDRNOTAVAIL | libc::ENXIO)
            ) =>
        {
            Ok(())
        }
        other => other,
    }
}

/// The first message: its kind, its body, and what follows it.
fn split_message(bytes: &[u8]) -> Option<(u16, &[u8], &[u8])> {
    let len = u32::from_ne_bytes(bytes.get(..4)?.try_into().ok()?) as usize;
    let kind = u16::from_ne_bytes(bytes.get(4..6)?.try_into().ok()?);
    let body = bytes.get(NLMSGHDR_LEN..len)?;
    Some((kind, body, bytes.get(len.next_multiple_of(4)..).unwrap_or_default()))
}

/// The value of the first attribute of this kind.
fn attribute(mut bytes: &[u8], wanted: u16) -> Option<&[u8]> {
    loop {
        let len = usize::from(u16::from_ne_bytes(bytes.get(..2)?.try_into().ok()?));
        let kind = u16::from_ne_bytes(bytes.get(2..4)?.try_into().ok()?);
        let value = bytes.get(RTATTR_LEN..len)?;
        if kind == wanted {
            return Some(value);
        }
        bytes = bytes.get(len.next_multiple_of(4)..)?;
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
        let mut body = vec![0; LINK_LEN];
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
    pub(super) fn up(self, up: bool) -> Self {
        self.flag(libc::IFF_UP as u32, up)
    }

    /// The same, of the flag that says that it needs no ARP.
    pub(super) fn noarp(self, noarp: bool) -> Self {
        self.flag(libc::IFF_NOARP as u32, noarp)
    }

    fn flag(mut self, flag: u32, is_set: bool) -> Self {
        let fields = [(8..12, if is_set { flag } else { 0 }), (12..16, flag)];
        for (field, bits) in fields {
            self.0[field].iter_mut().zip(bits.to_ne_bytes()).for_each(|(byte, bits)| *byte |= bits);
        }
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
    fn an_attribute_is_found_behind_others() {
        let mut body = Vec::new();
        put_attribute(&mut body, 3, b"abcde");
        put_attribute(&mut body, 4, b"x");
        assert_eq!(attribute(&body, 4), Some(&b"x"[..]));
        assert_eq!(
            (attribute(&body, 5), attribute(&[9, 0, 4, 0], 4), attribute(&[0; 8], 1)),
            (None, None, None)
        );
        assert!(split_message(&[40, 0, 0, 0, 2, 0]).is_none());
    }

    #[test]
    fn interfaces_without_a_device_are_no_cards() {
        assert_eq!(Socket::open().unwrap().find(&[2, 0, 0, 0, 0, 1]).unwrap(), None);
    }

    #[test]
    fn the_kernels_refusal_is_its_error() {
        let socket = Socket::open().unwrap();
        let error = socket.set_link(&LinkMessage::new(u32::MAX >> 1).mtu(1500)).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENODEV));
        assert!(error_of(&[]).is_err());
    }
}
