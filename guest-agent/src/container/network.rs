//! The network of a container: the guest's network cards, the parameters of its interfaces, connections from the host
//! to its loopback interface, and docker's name server.

use std::{
    mem,
    os::fd::AsFd,
    sync::{Arc, PoisonError},
};

use bulkhead_agent_api::agent::ChangeRoutingRequest;

use super::{create::Environment, error::ContainerError, instance::Container};
use crate::network::{
    self, Change, Interface, NetworkError,
    loopback::{self, Port, Sockets},
    name_server, parameters, routing,
};

impl Container {
    /// Moves the card into the container's network namespace and sets it up.
    pub async fn configure_network(self: Arc<Self>, mut interface: Interface) -> Result<(), ContainerError> {
        interface.leave_parameters(&self.sysctls);
        on_own_thread(move || {
            // Also if this fails: the card may be there then.
            let card = interface.card();
            let mut cards = self.cards.lock().unwrap_or_else(PoisonError::into_inner);
            cards.retain(|other| *other != card);
            cards.push(card);
            drop(cards);
            network::configure(self.init_pidfd.as_fd(), &interface)
        })
        .await
    }

    /// Has its network cards use the processors that are online now.
    pub async fn spread_network(self: Arc<Self>) -> Result<(), ContainerError> {
        let cards = self.cards.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if cards.is_empty() {
            return Ok(());
        }
        on_own_thread(move || network::spread(self.init_pidfd.as_fd(), &cards)).await
    }

    /// Changes an interface in the container's network namespace.
    pub async fn change_network(self: Arc<Self>, change: Change) -> Result<(), ContainerError> {
        on_own_thread(move || network::change(self.init_pidfd.as_fd(), &change)).await
    }

    /// Takes the card out of the container's network namespace.
    pub async fn remove_network(self: Arc<Self>, card: Vec<u8>) -> Result<(), ContainerError> {
        on_own_thread(move || {
            network::remove(self.init_pidfd.as_fd(), &card)?;
            let mut cards = self.cards.lock().unwrap_or_else(PoisonError::into_inner);
            cards.retain(|other| *other != *card);
            Ok(())
        })
        .await
    }

    /// Changes the rules of policy routing in the container's network namespace, and sets its kernel parameters.
    pub async fn change_routing(
        self: Arc<Self>,
        mut request: ChangeRoutingRequest,
    ) -> Result<(), ContainerError> {
        let parameters = parameters::all(mem::take(&mut request.parameters));
        let mut parameters = parameters.map_err(NetworkError::from)?;
        parameters::leave_out(&mut parameters, &self.sysctls);
        on_own_thread(move || {
            parameters::set(self.init_pidfd.as_fd(), &parameters).map_err(NetworkError::Namespace)?;
            routing::change(self.init_pidfd.as_fd(), &request)
        })
        .await
    }

    /// Sets the parameters of the interfaces in the container's network namespace: all of them are there now.
    pub(super) async fn set_interface_sysctls(self: Arc<Self>) -> Result<(), ContainerError> {
        if self.interface_sysctls.is_empty() {
            return Ok(());
        }
        on_own_thread(move || network::set_sysctls(self.init_pidfd.as_fd(), &self.interface_sysctls)).await
    }
}

impl Container {
    /// Connects the stream with a port of the loopback interface in the container's network namespace.
    pub async fn connect_loopback(
        self: Arc<Self>,
        environment: &Environment,
        port: Port,
        stream: u32,
    ) -> Result<(), ContainerError> {
        let stream = environment.streams.take(stream).await?;
        let permit = loopback::permit().await?;
        let sockets = on_own_thread(move || Sockets::inside(self.init_pidfd.as_fd())).await?;
        let connected = sockets.connect(port).await?;
        tokio::spawn(async move {
            // If one side breaks, the other one sees the end of its connection. Nobody else needs to know.
            _ = loopback::forward(stream, connected, permit).await;
        });
        Ok(())
    }
}

impl Container {
    /// Serves docker's name server in the container's network namespace, until the stream ends.
    pub async fn serve_name_server(
        self: Arc<Self>,
        environment: &Environment,
        stream: u32,
    ) -> Result<(), ContainerError> {
        let stream = environment.streams.take(stream).await?;
        let sockets = on_own_thread(move || name_server::Sockets::inside(self.init_pidfd.as_fd())).await?;
        tokio::spawn(async move {
            if let Err(error) = name_server::serve(stream, sockets).await {
                eprintln!("bulkhead-agent: docker's name server is not served any more: {error}");
            }
        });
        Ok(())
    }
}

/// A thread of its own, since it stays in the container's network namespace.
async fn on_own_thread<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, NetworkError> + Send + 'static,
) -> Result<T, ContainerError> {
    let (result, done) = tokio::sync::oneshot::channel();
    let run = move || {
        // Nobody waits for it any more: there is nobody to tell.
        let _ = result.send(work());
    };
    std::thread::Builder::new().spawn(run).map_err(NetworkError::Namespace)?;
    Ok(done.await.map_err(|_| NetworkError::Abandoned)??)
}
