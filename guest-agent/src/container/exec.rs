//! Runs further processes in a container, next to its init.

use std::{
    collections::{HashMap, hash_map::Entry},
    future,
    os::fd::AsFd,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::timeout;

use super::{Container, ContainerError, Environment, StreamIds, check_id, process::Process, stdio};
use crate::{
    config::ProcessConfig,
    process::parent::{self, Joining},
    spec,
};

/// How long the word of a container's end waits for those of its processes. Only a reader of their output that has
/// stopped to read makes this much of a difference.
const END_PATIENCE: Duration = Duration::from_secs(5);

/// What is asked for.
pub struct ExecRequest {
    /// A plain name, among the container's processes.
    pub id: String,
    /// The `process` object of the OCI runtime spec.
    pub process_json: Vec<u8>,
    /// Its standard streams.
    pub stdio: StreamIds,
}

/// The processes that joined a container, by their ids.
#[derive(Default)]
pub(super) struct Execs {
    slots: Mutex<HashMap<String, Slot>>,
}

enum Slot {
    /// The id is taken.
    Starting,
    Present(Arc<Process>),
}

impl Container {
    /// Runs a process in the container; answers its process id when its program was executed. If that fails,
    /// nothing is left of it.
    pub async fn exec(&self, environment: &Environment, request: ExecRequest) -> Result<i32, ContainerError> {
        let ExecRequest { id, process_json, stdio } = request;
        check_id(&id)?;
        let config = spec::resolve_exec(&process_json, self.common.clone())?;
        let is_paused = self.is_paused.read().await;
        if self.init.is_leaving() {
            return Err(ContainerError::Stopped);
        }
        if *is_paused {
            return Err(ContainerError::Paused);
        }
        self.execs.reserve(&id)?;
        match self.join(environment, &id, config, stdio).await {
            Ok(process) => {
                let pid = process.pid();
                eprintln!("bulkhead-agent: container {}: exec {id}, pid {pid}", self.id);
                self.execs.lock().insert(id, Slot::Present(Arc::new(process)));
                Ok(pid)
            }
            Err(error) => {
                self.execs.lock().remove(&id);
                Err(error)
            }
        }
    }

    async fn join(
        &self,
        environment: &Environment,
        id: &str,
        config: ProcessConfig,
        streams: StreamIds,
    ) -> Result<Process, ContainerError> {
        let stdio = stdio::open(&environment.streams, streams, config.terminal.is_some()).await?;
        let joining = Joining {
            cgroup_dir: self.cgroup.path().to_owned(),
            init: self.init_pidfd.as_fd(),
            process: config,
        };
        match parent::exec(&environment.program, joining, stdio.child, &environment.reaper).await {
            Ok(child) => {
                let label = format!("{}: exec {id}", self.id);
                Ok(Process::watch(child, stdio.agent, &label, future::ready(())))
            }
            // Whatever failed: with the container gone, that is why.
            Err(_) if self.init.is_leaving() => Err(ContainerError::Stopped),
            Err(error) => Err(error.into()),
        }
    }

    /// A process of the container: that of an [`ExecRequest`], or its init if the id is empty.
    pub fn process(&self, exec_id: &str) -> Result<Arc<Process>, ContainerError> {
        if exec_id.is_empty() {
            return Ok(Arc::clone(&self.init));
        }
        match self.execs.lock().get(exec_id) {
            Some(Slot::Present(process)) => Ok(Arc::clone(process)),
            // Nobody has been told that it exists.
            Some(Slot::Starting) | None => Err(ContainerError::NoExec(exec_id.to_owned())),
        }
    }

    /// Forgets a process that has ended, if this is the id of one that joined the container.
    pub fn forget_exec(&self, exec_id: &str) {
        self.execs.lock().remove(exec_id);
    }
}

impl Execs {
    fn reserve(&self, id: &str) -> Result<(), ContainerError> {
        match self.lock().entry(id.to_owned()) {
            Entry::Vacant(slot) => drop(slot.insert(Slot::Starting)),
            Entry::Occupied(_) => return Err(ContainerError::ExecExists(id.to_owned())),
        }
        Ok(())
    }

    /// Waits until the ends of all processes can be heard of, since they end with the container; not for long.
    pub(super) async fn finished(&self) {
        let processes = self.processes();
        let all = async {
            for process in processes {
                // An error: the guest is about to end.
                let _ = process.wait().await;
            }
        };
        // Too late: the container's end is not held up by a process's output.
        let _ = timeout(END_PATIENCE, all).await;
    }

    /// Drops what is left of the streams of all processes, and forgets them.
    pub(super) fn clear(&self) {
        for (_, slot) in self.lock().drain() {
            if let Slot::Present(process) = slot {
                process.abort_copies();
            }
        }
    }

    fn processes(&self) -> Vec<Arc<Process>> {
        let present = |slot: &Slot| match slot {
            Slot::Present(process) => Some(Arc::clone(process)),
            Slot::Starting => None,
        };
        self.lock().values().filter_map(present).collect()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Slot>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use tokio::{sync::watch, time::Instant};

    use super::*;
    use crate::{process::parent::Child, streams::StreamTable};

    #[tokio::test(start_paused = true)]
    async fn a_process_whose_end_is_never_told_holds_the_container_up_for_a_while_only() {
        let null = StreamIds { stdin: 0, stdout: 0, stderr: 0 };
        let streams = stdio::open(&StreamTable::default(), null, false).await.unwrap().agent;
        let (_running, exit) = watch::channel(None);
        let child = Child { pid: 0, exit, terminal: None };
        let process = Process::watch(child, streams, "c: exec e", future::ready(()));
        let execs = Execs::default();
        execs.lock().insert("e".into(), Slot::Present(Arc::new(process)));
        let begun = Instant::now();
        execs.finished().await;
        assert_eq!(begun.elapsed(), END_PATIENCE);
    }
}
