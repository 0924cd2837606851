//! Bulkhead's guest agent: PID 1 of a pod's virtual machine.
//!
//! A request goes through `server`, `sandbox` and `container`. A new process is made by `stage`.
//! The shim's `pod/pod.rs` has the order of the requests that make and start a container.

#![deny(unsafe_code)]
#![warn(missing_docs)]

pub mod apparmor;
mod attached_devices;
pub mod cgroup;
pub mod clock;
pub mod container;
pub mod device_filter;
pub mod disks;
pub mod guest_reserve;
pub mod guest_setup;
pub mod host_sockets;
pub mod kernel_modules;
pub mod machine;
mod mount_places;
pub mod network;
pub mod processors;
pub mod reaper;
pub mod sandbox;
pub mod seccomp_filter;
pub mod server;
pub mod shutdown;
pub mod spec;
pub mod stage;
pub mod stage_config;
pub mod streams;
pub mod syscall;
pub mod terminal;
pub mod vsock;

use std::{convert::Infallible, io, sync::Arc};

use bulkhead_agent_api::{API_VERSION, READY_PORT, RPC_PORT, STREAM_PORT, agent_ttrpc::create_agent};
use tokio::io::AsyncWriteExt;
use tokio_vsock::{VMADDR_CID_ANY, VMADDR_CID_HOST, VsockAddr, VsockListener, VsockStream};

use self::{
    container::Environment,
    guest_reserve::Reserve,
    machine::GuestMachine,
    reaper::Reaper,
    sandbox::Sandbox,
    server::Service,
    stage::launcher::{DEADLINE, Launcher},
    streams::StreamTable,
};

/// The agent's own binary.
const PROGRAM: &str = "/proc/self/exe";

/// Threads for what may take the kernel long. They count among the tasks that are reserved for the agent.
const BLOCKING_THREADS: usize = 64;

/// Why the agent gives up, and the guest with it.
#[derive(Debug, thiserror::Error)]
pub enum FatalError {
    /// The guest could not be set up.
    #[error(transparent)]
    Setup(#[from] guest_setup::GuestSetupError),
    /// Something that must work did not.
    #[error("{action}: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The RPC server did not start.
    #[error("starting the RPC server: {0}")]
    Server(#[from] ttrpc::Error),
}

/// Sets the guest up and serves it for ever.
pub fn run() -> Result<Infallible, FatalError> {
    guest_setup::set_up()?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(BLOCKING_THREADS)
        .build();
    let runtime = runtime.map_err(|source| FatalError::Io { action: "starting the runtime", source })?;
    runtime.block_on(serve())
}

async fn serve() -> Result<Infallible, FatalError> {
    let reaper = Arc::new(Reaper::default());
    let streams = Arc::new(StreamTable::default());
    let rpc_listener = bind(RPC_PORT)?;
    let stream_listener = bind(STREAM_PORT)?;
    tokio::spawn(accept_streams(Arc::clone(&streams), stream_listener));

    let reserve = Reserve::at_boot()
        .map_err(|source| FatalError::Io { action: "reserving memory and tasks", source })?;
    let launcher = Launcher { program: PROGRAM.into(), reaper: Arc::clone(&reaper), deadline: DEADLINE };
    let environment = Environment { launcher, streams, reserve: Arc::new(reserve) };
    let sandbox = Sandbox::new(environment, GuestMachine::default());
    let mut server = ttrpc::r#async::Server::new()
        .add_listener(vsock::listen(rpc_listener))
        .register_service(create_agent(Arc::new(Service::new(sandbox))));
    server.start().await?;
    tokio::spawn(tell_ready());
    reaper.run().await.map_err(|source| FatalError::Io { action: "reaping processes", source })
}

async fn accept_streams(table: Arc<StreamTable>, listener: VsockListener) -> Infallible {
    loop {
        let (connection, peer) = vsock::accept_from_host(&listener).await;
        table.add(peer.port(), connection);
    }
}

fn bind(port: u32) -> Result<VsockListener, FatalError> {
    VsockListener::bind(VsockAddr::new(VMADDR_CID_ANY, port))
        .map_err(|source| FatalError::Io { action: "listening on vsock", source })
}

/// Tells the host that all listeners are there. Without anybody to tell, the guest can still be used.
async fn tell_ready() {
    let told = async {
        let mut host = VsockStream::connect(VsockAddr::new(VMADDR_CID_HOST, READY_PORT)).await?;
        host.write_all(&API_VERSION.to_le_bytes()).await?;
        host.shutdown(std::net::Shutdown::Both)
    };
    if let Err(error) = told.await {
        eprintln!(
            "bulkhead-agent: telling the host on vsock port {READY_PORT} that the guest is ready: {error}"
        );
    }
}
