//! Connections from a container to services of the host.

use super::{create::Environment, error::ContainerError, instance::Container};
use crate::host_sockets::Peer;

impl Container {
    /// Waits for a connection to the socket of the host at this index, and has it forwarded on the stream. Returns who
    /// has connected.
    pub async fn accept_host_socket(
        &self,
        environment: &Environment,
        index: u32,
        stream: u32,
    ) -> Result<Peer, ContainerError> {
        let stream = environment.streams.take(stream).await?;
        let mut deletion = self.deletion.subscribe();
        let accepted = tokio::select! {
            accepted = self.host_sockets.accept(index) => accepted,
            _ = deletion.wait_for(|is_deleted| *is_deleted) => None,
        };
        let (client, peer) = accepted.ok_or_else(|| ContainerError::NoHostSocket(self.id.clone(), index))?;
        tokio::spawn(async move {
            tokio::select! {
                // An error is that of one side, which has ended. The other one sees the end of its connection.
                _ = client.forward(stream) => {}
                _ = deletion.wait_for(|is_deleted| *is_deleted) => {}
            }
        });
        Ok(peer)
    }
}
