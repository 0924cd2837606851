//! The stage's end of its socket to the agent. The processes that it clones use it too.

use std::{
    fs,
    io::{self, BufRead, BufReader, Write},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use super::{Report, agent_socket};

/// The connection to the agent. It is a file, so that it is read by read(2) and not by recvfrom(2). The container's
/// system call filter may be installed already, and is more likely to allow read(2).
pub(super) struct StageSocket {
    socket: BufReader<fs::File>,
}

impl StageSocket {
    pub(super) fn new(socket: OwnedFd) -> Self {
        Self { socket: BufReader::new(fs::File::from(socket)) }
    }

    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.get_ref().as_fd()
    }

    pub(super) fn receive<T: serde::de::DeserializeOwned>(&mut self) -> io::Result<T> {
        let mut line = String::new();
        if self.socket.read_line(&mut line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(serde_json::from_str(&line)?)
    }

    pub(super) fn report(&mut self, report: &Report) -> io::Result<()> {
        let mut line = serde_json::to_vec(report)?;
        line.push(b'\n');
        self.socket.get_mut().write_all(&line)
    }

    /// Reports that the process is ready, and hands over the master of the terminal that it has.
    pub(super) fn report_ready(&mut self, master: Option<OwnedFd>) -> io::Result<()> {
        match master {
            Some(master) => self.report_with(&Report::Ready, master.as_fd()),
            None => self.report(&Report::Ready),
        }
    }

    pub(super) fn report_with(&mut self, report: &Report, descriptor: BorrowedFd<'_>) -> io::Result<()> {
        let mut line = serde_json::to_vec(report)?;
        line.push(b'\n');
        agent_socket::send_with(self.socket.get_ref(), &line, descriptor)
    }
}
