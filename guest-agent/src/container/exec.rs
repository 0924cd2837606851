//! Runs further processes in a container, next to its init.

use std::{future, os::fd::AsFd, sync::Arc};

use super::{
    create::Environment,
    error::ContainerError,
    exec_table::Slot,
    id::check_id,
    instance::Container,
    process::Process,
    stdio::{self, StreamIds},
};
use crate::{spec, stage::launcher::ExecTarget, stage_config::ProcessConfig};

/// What is asked for.
pub struct ExecRequest {
    /// A plain name, among the container's processes.
    pub id: String,
    /// The `process` object of the OCI runtime spec.
    pub process_json: Vec<u8>,
    /// Its standard streams.
    pub stdio: StreamIds,
}

impl Container {
    /// Runs a process in the container. Returns its process id when its program was executed. If that fails, nothing is
    /// left of it.
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
        let target = ExecTarget {
            cgroup_dir: self.cgroup.path().to_owned(),
            init: self.init_pidfd.as_fd(),
            process: config,
        };
        match environment.launcher.exec(target, stdio.child).await {
            Ok(child) => {
                let label = format!("{}: exec {id}", self.id);
                Ok(Process::watch(child, stdio.agent, &label, &self.deletion.subscribe(), future::ready(())))
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
