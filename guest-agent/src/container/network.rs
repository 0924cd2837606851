//! The network of a created container: the guest's network card, and the parameters of its interfaces.

use std::{os::fd::AsFd, sync::Arc};

use super::{error::ContainerError, instance::Container};
use crate::network::{self, Interface, NetworkError};

impl Container {
    /// Moves the card into the container's network namespace and sets it up. Before the container is started.
    pub async fn configure_network(self: Arc<Self>, interface: Interface) -> Result<(), ContainerError> {
        if self.control.lock().await.is_none() {
            return Err(ContainerError::AlreadyStarted(self.id.clone()));
        }
        on_own_thread(move || network::configure(self.init_pidfd.as_fd(), &interface)).await
    }

    /// Sets the parameters of the interfaces in the container's network namespace: all of them are there now.
    pub(super) async fn set_interface_sysctls(self: Arc<Self>) -> Result<(), ContainerError> {
        if self.interface_sysctls.is_empty() {
            return Ok(());
        }
        on_own_thread(move || network::set_sysctls(self.init_pidfd.as_fd(), &self.interface_sysctls)).await
    }
}

/// A thread of its own, since it stays in the container's network namespace.
async fn on_own_thread(
    work: impl FnOnce() -> Result<(), NetworkError> + Send + 'static,
) -> Result<(), ContainerError> {
    let (result, done) = tokio::sync::oneshot::channel();
    std::thread::spawn(move || {
        // Nobody waits for it any more: there is nobody to tell.
        let _ = result.send(work());
    });
    Ok(done.await.map_err(|_| NetworkError::Abandoned)??)
}
