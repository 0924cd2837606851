//! The agent's end of the socket to the stage and the processes that it clones. Messages are lines. A descriptor may
//! come with a line.

use std::{
    io::{self, IoSlice, IoSliceMut},
    mem::{self, MaybeUninit},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream as StdUnixStream,
    },
};

use rustix::{
    cmsg_space,
    net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
        SendFlags, recvmsg, sendmsg,
    },
};
use tokio::{
    io::{AsyncWriteExt, Interest},
    net::UnixStream,
};

/// The longest line that is accepted. A container with CAP_SYS_PTRACE may have taken over the process that sends it.
const MAX_LINE: usize = 64 << 10;

/// Longer lines come in parts.
const CHUNK: usize = 1024;

/// Sends a line, and a descriptor with it.
pub(super) fn send_with(socket: impl AsFd, line: &[u8], descriptor: BorrowedFd<'_>) -> io::Result<()> {
    let descriptors = [descriptor];
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&descriptors));
    let sent = sendmsg(socket, &[IoSlice::new(line)], &mut control, SendFlags::NOSIGNAL)?;
    if sent == line.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

/// The agent's end.
pub(super) struct AgentSocket {
    socket: UnixStream,
    unread: Vec<u8>,
    descriptor: Option<OwnedFd>,
}

impl AgentSocket {
    pub(super) fn new(socket: StdUnixStream) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        Ok(Self { socket: UnixStream::from_std(socket)?, unread: Vec::new(), descriptor: None })
    }

    pub(super) async fn send(&mut self, line: &[u8]) -> io::Result<()> {
        self.socket.write_all(line).await
    }

    /// The next line. None: there are no more.
    pub(super) async fn line(&mut self) -> io::Result<Option<Vec<u8>>> {
        loop {
            if let Some(end) = self.unread.iter().position(|byte| *byte == b'\n') {
                let rest = self.unread.split_off(end + 1);
                return Ok(Some(mem::replace(&mut self.unread, rest)));
            }
            if self.unread.len() > MAX_LINE {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "a line is too long"));
            }
            if self.receive().await? == 0 {
                let is_cut = !self.unread.is_empty();
                return if is_cut { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(None) };
            }
        }
    }

    /// The descriptor that came with the lines so far.
    pub(super) fn descriptor(&mut self) -> Option<OwnedFd> {
        self.descriptor.take()
    }

    async fn receive(&mut self) -> io::Result<usize> {
        let Self { socket, unread, descriptor } = self;
        let once = || receive_once(socket, unread, descriptor);
        socket.async_io(Interest::READABLE, once).await
    }
}

/// read(2) would drop the descriptor.
fn receive_once(
    socket: &UnixStream,
    unread: &mut Vec<u8>,
    descriptor: &mut Option<OwnedFd>,
) -> io::Result<usize> {
    let mut chunk = [0; CHUNK];
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received =
        recvmsg(socket, &mut [IoSliceMut::new(&mut chunk)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            *descriptor = descriptors.last().or(descriptor.take());
        }
    }
    unread.extend_from_slice(&chunk[..received.bytes]);
    Ok(received.bytes)
}

#[cfg(test)]
mod tests {
    use std::{
        fs::File,
        io::{Read, Seek, Write},
        os::fd::AsFd,
    };

    use super::*;

    #[tokio::test]
    async fn lines_arrive_one_by_one_and_the_descriptor_with_them() {
        let (ours, mut theirs) = StdUnixStream::pair().unwrap();
        let mut socket = AgentSocket::new(ours).unwrap();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"content").unwrap();
        theirs.write_all(b"one\ntw").unwrap();
        send_with(&theirs, b"o\n", file.as_fd()).unwrap();
        let long = [vec![b'x'; 2 * CHUNK], vec![b'\n']].concat();
        theirs.write_all(&long).unwrap();
        drop(theirs);
        assert_eq!(socket.line().await.unwrap().as_deref(), Some(b"one\n".as_slice()));
        assert_eq!(socket.line().await.unwrap().as_deref(), Some(b"two\n".as_slice()));
        let mut received = File::from(socket.descriptor().unwrap());
        assert!(socket.descriptor().is_none());
        assert_eq!(socket.line().await.unwrap(), Some(long));
        assert_eq!(socket.line().await.unwrap(), None);
        let mut content = String::new();
        received.rewind().unwrap();
        received.read_to_string(&mut content).unwrap();
        assert_eq!(content, "content");
    }

    #[tokio::test]
    async fn a_line_without_an_end_is_refused() {
        let (ours, mut theirs) = StdUnixStream::pair().unwrap();
        let mut socket = AgentSocket::new(ours).unwrap();
        let endless = std::thread::spawn(move || theirs.write_all(&vec![b'x'; 100 * MAX_LINE]));
        assert_eq!(socket.line().await.unwrap_err().kind(), io::ErrorKind::InvalidData);
        drop(socket);
        assert!(endless.join().unwrap().is_err());
    }

    #[tokio::test]
    async fn a_line_that_is_cut_off_is_an_error() {
        let (ours, mut theirs) = StdUnixStream::pair().unwrap();
        let mut socket = AgentSocket::new(ours).unwrap();
        theirs.write_all(b"half").unwrap();
        drop(theirs);
        assert_eq!(socket.line().await.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }
}
