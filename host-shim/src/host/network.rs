//! The pod's network on the host: the network namespace of the VMM, with redirects between the pod's interface and
//! the VMM's tap.
//!
//! A CNI or docker sets the network up as for a container: before Create in a namespace that has a path, or before
//! Start in the namespace of the process that Create answered, which is the VMM. At Start the interface in it is
//! [scanned](scan) and connected with the tap ([`redirect`]). The guest's agent gives its network card the same name,
//! addresses, routes and neighbours. All of it is rtnetlink(7); no program is executed.

pub(crate) mod loopback;
pub(crate) mod name_server;
mod netns;
mod redirect;
mod replies;
mod scan;

use std::{
    io,
    path::{Path, PathBuf},
};

use bulkhead_agent_api::agent::ConfigureNetworkRequest;

pub(crate) use self::redirect::remove as remove_redirect;
use crate::{
    host::{
        blocking::{self, BlockingError},
        journal::{Effect, Journal},
    },
    types::error::chain,
};

/// The VMM's tap, in the network namespace that the VMM is in.
pub(crate) const TAP: &str = "tap-bulkhead";

/// The MAC address of the guest's network card until the agent sets the pod's.
pub(crate) const FIRST_MAC: &str = "02:00:00:00:00:01";

/// Why a pod has no network.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NetworkError {
    #[error(
        "{path} is the host's own network namespace, which is not implemented in a microVM; give another"
    )]
    HostNamespace { path: PathBuf },
    #[error("cannot open the network namespace {path}")]
    Namespace { path: PathBuf, source: io::Error },
    #[error("the pod's network namespace has the interfaces {names}; only one is supported")]
    Several { names: String },
    #[error("interface {name} is not an Ethernet interface; only Ethernet is supported")]
    NoEthernet { name: String },
    #[error("interface {interface}: route {route}: {what} is not implemented")]
    Route { interface: String, route: String, what: String },
    #[error("the pod's network namespace: {action}")]
    Kernel { action: String, source: io::Error },
}

/// The pod's interface, as it was found on the host.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Interface {
    /// The index of the interface on the host.
    index: u32,
    /// The request to the agent, without the container's id.
    pub(crate) description: ConfigureNetworkRequest,
    /// Whether docker's name server listens in the namespace.
    pub(crate) has_name_server: bool,
}

/// Refuses a network namespace that does not exist, or that is the host's own.
pub(crate) fn check(path: &Path) -> Result<(), NetworkError> {
    netns::open(path).map(drop)
}

/// Connects the interface in the network namespace of the process `vmm`, if there is one, with the VMM's tap, and
/// describes it. `netns` is the path of that namespace, if it has one and so outlives the VMM. If the caller gives up
/// waiting, the interface is disconnected again. `operation` is dropped when nothing more is done.
pub(crate) async fn connect(
    vmm: u32,
    netns: Option<&Path>,
    journal: &mut Journal,
    operation: impl Send + 'static,
) -> Result<Option<Interface>, NetworkError> {
    let scan = move || {
        let inside = netns::of_process(vmm)?;
        Ok((scan::scan(&inside)?, inside))
    };
    let (found, inside) = blocking::run(scan, drop).await.map_err(broken)??;
    let Some(interface) = found else { return Ok(None) };
    let name = interface.description.name.clone();
    if let Some(netns) = netns {
        let effect = Effect::Redirect { netns: netns.into(), interface: name.clone() };
        journal.record(effect).map_err(failed("writing the journal"))?;
    }
    let (index, netns) = (interface.index, netns.map(Path::to_owned));
    let passes_replies = interface.has_name_server;
    let tie = move || (redirect::install(&inside, index, passes_replies), operation);
    let abandoned = move |(_, operation)| {
        // The journal may have been undone before.
        if let Some(netns) = netns
            && let Err(error) = remove_redirect(&netns, &name)
        {
            tracing::error!(error = chain(&error), "the pod's interface stays connected");
        }
        drop(operation);
    };
    let (tied, _operation) = blocking::run(tie, abandoned).await.map_err(broken)?;
    tied.map(|()| Some(interface))
}

fn failed(action: impl Into<String>) -> impl FnOnce(io::Error) -> NetworkError {
    let action = action.into();
    move |source| NetworkError::Kernel { action, source }
}

fn broken(error: BlockingError) -> NetworkError {
    failed("working in it")(io::Error::other(error))
}

/// What the kernel said, or why it could not be asked.
fn refused(action: impl Into<String>) -> impl FnOnce(rtnetlink::Error) -> NetworkError {
    let failed = failed(action);
    move |error| match error {
        rtnetlink::Error::NetlinkError(message) => failed(message.to_io()),
        other => failed(io::Error::other(other)),
    }
}

#[cfg(test)]
mod tests;
