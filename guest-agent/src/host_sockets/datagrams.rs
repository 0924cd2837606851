//! Sockets of datagrams, such as /dev/log. What processes of containers send goes to the shim on one stream, with the
//! user and the group of the sender. If the service receives nothing, the stream is full, so this socket becomes full,
//! and senders wait, as they would on the host.

use std::{
    io::{self, IoSliceMut},
    mem::MaybeUninit,
    os::unix::net::UnixDatagram as StdUnixDatagram,
    path::Path,
};

use bulkhead_agent_api::datagrams::{Head, MAX_DATAGRAM};
use rustix::{
    cmsg_space,
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketAddrUnix, SocketFlags,
        SocketType, bind, recv, recvmsg, socket_with, sockopt::set_socket_passcred,
    },
};
use tokio::{
    io::{AsyncReadExt, AsyncWrite, Interest, split},
    net::UnixDatagram,
};

use crate::streams::Connection;

/// A socket that receives datagrams.
#[derive(Debug)]
pub struct Datagrams(UnixDatagram);

/// What was received.
enum Received {
    Datagram {
        from: (u32, u32),
        bytes: Vec<u8>,
    },
    /// It is longer than any that the host's sockets take by default, and was dropped.
    TooLong(usize),
}

impl Datagrams {
    /// Binds such a socket.
    pub fn bind(path: &Path) -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
        // First: the kernel notes who sends when it is sent.
        set_socket_passcred(&socket, true)?;
        bind(&socket, &SocketAddrUnix::new(path)?)?;
        Ok(Self(UnixDatagram::from_std(StdUnixDatagram::from(socket))?))
    }

    /// Sends what it receives on the stream, until the shim ends that. Then there is no such socket any more, and
    /// senders are refused.
    pub async fn forward(self, stream: Box<dyn Connection>) -> io::Result<()> {
        let (mut from_shim, mut to_shim) = split(stream);
        tokio::select! {
            forwarded = self.send_all(&mut to_shim) => forwarded,
            // The shim sends nothing. So this is the end.
            _ = from_shim.read_u8() => Ok(()),
        }
    }

    async fn send_all(&self, stream: &mut (impl AsyncWrite + Unpin)) -> io::Result<()> {
        let mut told = false;
        loop {
            match self.0.async_io(Interest::READABLE, || self.receive()).await? {
                Received::Datagram { from, bytes } => Head::write(stream, from, &bytes).await?,
                Received::TooLong(length) if !told => {
                    told = true;
                    eprintln!(
                        "bulkhead-agent: a datagram of {length} bytes for a service of the host is lost"
                    );
                }
                Received::TooLong(_) => {}
            }
        }
    }

    /// Receives one. Descriptors that come with it are closed by the kernel, since there is no room for them.
    fn receive(&self) -> io::Result<Received> {
        let (_, length) = recv(&self.0, &mut [0_u8; 0][..], RecvFlags::PEEK | RecvFlags::TRUNC)?;
        let is_too_long = length > MAX_DATAGRAM;
        let mut bytes = vec![0; if is_too_long { 0 } else { length }];
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmCredentials(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        recvmsg(&self.0, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
        let from = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmCredentials(who) => Some((who.uid.as_raw(), who.gid.as_raw())),
            _ => None,
        });
        match from {
            _ if is_too_long => Ok(Received::TooLong(length)),
            Some(from) => Ok(Received::Datagram { from, bytes }),
            None => Err(io::Error::other("the kernel does not say who has sent a datagram")),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    use tokio::io::duplex;

    use super::*;

    #[tokio::test]
    async fn datagrams_go_to_the_shim_with_their_sender_until_it_ends_the_stream() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log");
        let datagrams = Datagrams::bind(&path).unwrap();
        let sender = StdUnixDatagram::unbound().unwrap();
        sender.connect(&path).unwrap();
        let (mut shim, agent) = duplex(64);
        let forwarded = tokio::spawn(datagrams.forward(Box::new(agent)));

        nix::sys::socket::setsockopt(&sender, nix::sys::socket::sockopt::SndBufForce, &(1 << 20)).unwrap();
        let longest = vec![7; MAX_DATAGRAM];
        sender.send(b"text").unwrap();
        sender.send(b"").unwrap();
        sender.send(&vec![8; MAX_DATAGRAM + 1]).unwrap();
        // A descriptor does not pass. The bytes do.
        let (read_end, write_end) = std::io::pipe().unwrap();
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let descriptors = [write_end.as_fd()];
        assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
        sendmsg(&sender, &[io::IoSlice::new(b"with")], &mut control, SendFlags::empty()).unwrap();
        sender.send(&longest).unwrap();
        for expected in [&b"text"[..], b"", b"with", &longest] {
            let head = Head::read(&mut shim).await.unwrap();
            assert_eq!(head, Head { uid: 0, gid: 0, length: expected.len() });
            let mut bytes = vec![0; head.length];
            shim.read_exact(&mut bytes).await.unwrap();
            assert!(bytes == expected);
        }
        drop(write_end);
        // Nobody has a writing end any more.
        assert_eq!(io::Read::read(&mut &read_end, &mut [0]).unwrap(), 0);

        drop(shim);
        forwarded.await.unwrap().unwrap();
        assert_eq!(sender.send(b"text").unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
    }

    #[tokio::test]
    async fn a_sender_waits_while_the_shim_receives_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log");
        let forwarding = Datagrams::bind(&path).unwrap();
        let sender = UnixDatagram::unbound().unwrap();
        sender.connect(&path).unwrap();
        let (mut shim, agent) = duplex(64);
        let forwarded = tokio::spawn(forwarding.forward(Box::new(agent)));
        let mut sent = 0;
        let full = loop {
            match sender.try_send(&[sent as u8; 64]) {
                Ok(_) => sent += 1,
                Err(error) => break error,
            }
            tokio::task::yield_now().await;
            assert!(sent < 10_000, "the queue has no limit");
        };
        assert_eq!(full.kind(), io::ErrorKind::WouldBlock);
        for number in 0..sent {
            assert_eq!(Head::read(&mut shim).await.unwrap().length, 64);
            let mut bytes = [0; 64];
            shim.read_exact(&mut bytes).await.unwrap();
            assert_eq!(bytes, [number as u8; 64]);
        }
        forwarded.abort();
    }
}
