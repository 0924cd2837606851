//! Connections from the host.

use std::time::Duration;

use tokio_vsock::{VMADDR_CID_HOST, VsockAddr, VsockListener, VsockStream};
use ttrpc::r#async::transport::Listener;

/// How long nothing is accepted after an error, for example if there are no descriptors left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Accepts the next connection that comes from the host. Where the guest's kernel offers vsock to local peers, a
/// container could connect as well.
pub async fn accept_from_host(listener: &VsockListener) -> (VsockStream, VsockAddr) {
    loop {
        match listener.accept().await {
            Ok((connection, peer)) if peer.cid() == VMADDR_CID_HOST => return (connection, peer),
            Ok((_, peer)) => eprintln!("bulkhead-agent: a connection from CID {} was refused", peer.cid()),
            Err(error) => {
                eprintln!("bulkhead-agent: accepting a connection: {error}");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// The host's connections, for the ttrpc server.
pub fn listen(listener: VsockListener) -> Listener {
    Listener::new(futures::stream::unfold(listener, |listener| async {
        let (connection, _) = accept_from_host(&listener).await;
        Some((Ok(connection), listener))
    }))
}
