//! Gives a created container the guest's network card.

use std::{os::fd::AsFd, sync::Arc};

use super::{Container, ContainerError};
use crate::network::{self, Interface, NetworkError};

impl Container {
    /// Moves the card into the container's network namespace and sets it up. Before the container is started.
    pub async fn configure_network(self: Arc<Self>, interface: Interface) -> Result<(), ContainerError> {
        if self.control.lock().await.is_none() {
            return Err(ContainerError::AlreadyStarted(self.id.clone()));
        }
        let (result, configured) = tokio::sync::oneshot::channel();
        // A thread of its own, since it stays in the container's network namespace.
        std::thread::spawn(move || {
            // Nobody waits for it any more: there is nobody to tell.
            let _ = result.send(network::configure(self.init_pidfd.as_fd(), &interface));
        });
        Ok(configured.await.map_err(|_| NetworkError::Abandoned)??)
    }
}
