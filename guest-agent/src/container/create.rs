//! Creates a container, up to the point before its program is executed.

use std::{path::Path, sync::Arc};

use tokio::{
    sync::{Mutex, watch},
    task::JoinHandle,
};

use super::{
    Container, ContainerError,
    stdio::{self, AgentStreams, StreamIds},
};
use crate::{
    cgroup::Cgroup,
    process::parent::{self, ChildStdio},
    reaper::{Exit, ExitReceiver, Reaper},
    spec::{self, Resolved},
    streams::StreamTable,
};

/// The agent's own binary.
const PROGRAM: &str = "/proc/self/exe";

/// What the agent lends to its containers.
pub struct Environment {
    /// For their processes.
    pub reaper: Arc<Reaper>,
    /// For their streams.
    pub streams: Arc<StreamTable>,
}

/// What is asked for.
pub struct Request {
    /// A plain name.
    pub id: String,
    /// The OCI runtime spec.
    pub spec_json: Vec<u8>,
    /// Its standard streams.
    pub stdio: StreamIds,
}

impl Container {
    /// Creates a container. If that fails, nothing is left of it.
    pub async fn create(environment: &Environment, request: Request) -> Result<Self, ContainerError> {
        check_id(&request.id)?;
        let cgroup_dir = Cgroup::path_of(&request.id);
        let resolved = spec::resolve(&request.spec_json, &cgroup_dir)?;
        let stdio = stdio::open(&environment.streams, request.stdio).await?;

        let cgroup = Arc::new(Cgroup::create(cgroup_dir)?);
        match create_init(environment, &resolved, &cgroup, stdio.child).await {
            Ok(init) => Ok(assemble(request.id, init, cgroup, stdio.agent, resolved.own_pid_namespace)),
            Err(error) => {
                if let Err(left) = cgroup.remove().await {
                    eprintln!("bulkhead-agent: container {}: {left}", request.id);
                }
                Err(error)
            }
        }
    }
}

/// As containerd demands of ids, which also makes them names of files.
fn check_id(id: &str) -> Result<(), ContainerError> {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    let begins_well = id.starts_with(|c: char| c.is_ascii_alphanumeric());
    if begins_well && id.len() <= 200 && id.chars().all(is_allowed) {
        Ok(())
    } else {
        Err(ContainerError::Id(id.to_owned()))
    }
}

async fn create_init(
    environment: &Environment,
    resolved: &Resolved,
    cgroup: &Cgroup,
    stdio: ChildStdio,
) -> Result<parent::CreatedInit, ContainerError> {
    cgroup.configure(&resolved.settings, &resolved.device_program)?;
    Ok(parent::create(Path::new(PROGRAM), &resolved.init, stdio, &environment.reaper).await?)
}

fn assemble(
    id: String,
    init: parent::CreatedInit,
    cgroup: Arc<Cgroup>,
    streams: AgentStreams,
    own_pid_namespace: bool,
) -> Container {
    let (finished_sender, finished) = watch::channel(None);
    let copies = streams.forward(&id, &init.exit);
    let aborts = copies.abort_handles();
    // The processes of a pid namespace end with its init; those of a shared one have to be ended.
    let left_behind = (!own_pid_namespace).then(|| Arc::clone(&cgroup));
    tokio::spawn(supervise(init.exit.clone(), copies.outputs, left_behind, finished_sender));
    Container {
        id,
        pid: init.pid,
        cgroup,
        exit: init.exit,
        finished,
        control: Mutex::new(Some(init.control)),
        copies: aborts,
    }
}

/// Waits for the end of a container's init, and tells `finished` when the copies of its output are through, too.
async fn supervise(
    mut exit: ExitReceiver,
    outputs: Vec<JoinHandle<()>>,
    left_behind: Option<Arc<Cgroup>>,
    finished: watch::Sender<Option<Exit>>,
) {
    let Ok(ended) = exit.wait_for(Option::is_some).await.map(|exit| *exit) else { return };
    if let Some(Err(error)) = left_behind.map(|cgroup| cgroup.kill()) {
        eprintln!("bulkhead-agent: {error}");
    }
    for output in outputs {
        // An error: the copy was aborted, since the container is being deleted.
        let _ = output.await;
    }
    finished.send_replace(ended);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_plain_names() {
        for id in ["demo", "0a-b_c.d", "f00"] {
            check_id(id).unwrap();
        }
        for id in ["", ".", "..", "a/b", "-a", ".a", "a b", "\u{e4}", &"a".repeat(201)] {
            assert!(check_id(id).is_err(), "{id:?}");
        }
    }
}
