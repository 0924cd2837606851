//! Sockets of the host's services in directories that containers mount.

use std::{io, sync::Arc};

use super::{Sandbox, SandboxError};
use crate::{
    container::ContainerError,
    host_sockets::{Peer, in_directories::DirectorySocket},
};

fn failed(source: io::Error) -> SandboxError {
    SandboxError::Io { action: "listening at a socket of the host", source }
}

impl Sandbox {
    /// Takes the number of such a socket. [`Sandbox::listen_host_socket`] follows, or [`Sandbox::close_host_socket`].
    pub fn begin_host_socket(&self, index: u32) -> Result<(), SandboxError> {
        drop(self.started()?);
        self.directory_sockets.begin(index).map_err(failed)
    }

    /// Listens at such a socket.
    pub async fn listen_host_socket(&self, socket: DirectorySocket) -> Result<(), SandboxError> {
        let (machine, index) = (Arc::clone(&self.machine), socket.index);
        let listening = tokio::task::spawn_blocking(move || socket.listen(&*machine)).await;
        let added = listening
            .map_err(io::Error::other)
            .and_then(|listener| self.directory_sockets.add(index, listener?));
        added.map_err(|source| {
            self.directory_sockets.close(index);
            match source.kind() {
                io::ErrorKind::NotFound => SandboxError::NoHostSocket(index),
                _ => failed(source),
            }
        })
    }

    /// Listens there no more.
    pub fn close_host_socket(&self, index: u32) {
        self.directory_sockets.close(index);
    }

    /// Waits for a connection to such a socket, and has it forwarded on the stream. Returns who has connected.
    pub async fn accept_in_directory(&self, index: u32, stream: u32) -> Result<Peer, SandboxError> {
        let stream = self.environment.streams.take(stream).await.map_err(ContainerError::from)?;
        let accepted = self.directory_sockets.accept(index).await;
        let (client, peer) = accepted.ok_or(SandboxError::NoHostSocket(index))?;
        // An error is that of one side, which has ended. The other one sees the end of its connection.
        tokio::spawn(client.forward(stream));
        Ok(peer)
    }
}
