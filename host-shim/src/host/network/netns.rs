//! Work in another network namespace.

use std::{fs::File, io, os::unix::fs::MetadataExt, panic, path::Path, thread};

use nix::sched::{CloneFlags, setns};
use rtnetlink::Handle;

use super::{NetworkError, failed};

/// Opens the network namespace at `path`. Never the host's own: in that one we would take the host's interface away
/// from it.
pub(super) fn open(path: &Path) -> Result<File, NetworkError> {
    let failed = |source| NetworkError::Namespace { path: path.into(), source };
    let identity = |file: &File| file.metadata().map(|it| (it.dev(), it.ino()));
    let own = File::open("/proc/self/ns/net").and_then(|own| identity(&own)).map_err(failed)?;
    let netns = File::open(path).map_err(failed)?;
    if identity(&netns).map_err(failed)? == own {
        return Err(NetworkError::HostNamespace { path: path.into() });
    }
    Ok(netns)
}

/// Opens the network namespace of a process.
pub(super) fn of_process(pid: u32) -> Result<File, NetworkError> {
    open(Path::new(&format!("/proc/{pid}/ns/net")))
}

/// Does the work in a network namespace, with an rtnetlink socket in it. Blocks.
pub(super) fn inside<T: Send>(
    netns: &File,
    work: impl AsyncFnOnce(Handle) -> Result<T, NetworkError> + Send,
) -> Result<T, NetworkError> {
    visit(netns, move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build();
        runtime.map_err(failed("starting a runtime"))?.block_on(async {
            let (connection, handle, _) =
                rtnetlink::new_connection().map_err(failed("opening a netlink socket"))?;
            tokio::spawn(connection);
            work(handle).await
        })
    })
}

/// Does the work in a network namespace. Blocks.
///
/// In a thread of its own: none that comes back to other work may have been elsewhere.
pub(super) fn visit<T: Send>(
    netns: &File,
    work: impl FnOnce() -> Result<T, NetworkError> + Send,
) -> Result<T, NetworkError> {
    let visit = move || {
        enter(netns)?;
        work()
    };
    thread::scope(|scope| {
        let visiting = thread::Builder::new().spawn_scoped(scope, visit);
        match visiting.map_err(failed("starting a thread"))?.join() {
            Ok(result) => result,
            Err(panic) => panic::resume_unwind(panic),
        }
    })
}

/// Moves this thread into a network namespace.
pub(super) fn enter(netns: &File) -> Result<(), NetworkError> {
    setns(netns, CloneFlags::CLONE_NEWNET).map_err(io::Error::from).map_err(failed("entering it"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{testing::no_more_threads, types::error::chain};

    #[test]
    fn a_host_without_threads_is_an_error() {
        let netns = File::open("/proc/self/ns/net").unwrap();
        visit(&netns, || Ok(())).unwrap();
        no_more_threads();
        let error = visit(&netns, || Ok(())).unwrap_err();
        assert_eq!(chain(&error), "the pod's network namespace: starting a thread: try again");
    }
}
