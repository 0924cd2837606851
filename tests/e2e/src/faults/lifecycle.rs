//! The life of a container, request by request, as a client of containerd sees it while something goes wrong.

use std::fmt;
use std::thread;
use std::time::Duration;

use anyhow::{Result, bail, ensure};

use crate::api::messages::*;
use crate::api::{Api, ContainerSource, kill_request, process, shown};
use crate::command::wait_until;
use crate::cri::messages::Request;
use crate::ctr::Host;

/// How long a request may take whatever has failed, on an ordinary machine. Longer than the shim's deadlines (60 s).
pub(super) const BOUND: Duration = Duration::from_secs(90);
/// How long Create may take on any machine: the shim waits 180 s for a VM that starts.
const CREATE: Duration = Duration::from_secs(200);
/// How often a client tries to remove a container, and how long it waits before it tries again.
const REMOVALS: u32 = 5;
const PAUSE: Duration = Duration::from_millis(500);

/// What the container's first process runs. It ends by a signal only.
pub(super) const COMMAND: &[&str] = &["sleep", "infinity"];
/// What an exec in it runs, and its exit status.
const EXEC: &[&str] = &["sh", "-c", "exit 3"];
const EXEC_STATUS: u32 = 3;
const EXEC_ID: &str = "exec";

/// The exit status of a process that SIGKILL has ended.
const KILLED: u32 = 137;

/// A request in the life of a container, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Create,
    Start,
    Exec,
    StartExec,
    WaitExec,
    DeleteExec,
    Kill,
    Wait,
    Delete,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?}")
    }
}

/// Something that goes wrong in the life of a container.
pub(crate) trait FaultInjector {
    /// Called just before each request about the container `id`.
    fn before(&mut self, id: &str, step: Step) -> Result<()>;

    /// Called when the life is over, before the client removes what is left.
    fn end(&mut self) -> Result<()> {
        Ok(())
    }

    /// How long the client waits for the answer to a request that can hang as long as something else does, whatever the
    /// runtime. Then it gives up and removes the container.
    fn gives_up(&self, _: Step) -> Option<Duration> {
        None
    }

    /// Called when the container is removed, before the host is looked at.
    fn removed(&mut self) {}

    /// What the guest's agent plays, if it is none of ours: a part of the container's id. No exec ends in such a guest.
    fn role(&self) -> Option<&str> {
        None
    }

    /// Whether anything went wrong at all. Called last.
    fn was_injected(&self) -> Result<bool>;
}

/// Nothing goes wrong.
pub(crate) struct NoFault;

impl FaultInjector for NoFault {
    fn before(&mut self, _: &str, _: Step) -> Result<()> {
        Ok(())
    }

    fn was_injected(&self) -> Result<bool> {
        Ok(false)
    }
}

/// One container.
pub(crate) struct Lifecycle<'a> {
    host: &'a Host,
    api: &'a Api,
    source: &'a ContainerSource,
    id: String,
    /// The requests that were refused, each with containerd's reason.
    messages: Vec<String>,
}

impl<'a> Lifecycle<'a> {
    /// A container that is not yet created.
    pub(crate) fn new(host: &'a Host, api: &'a Api, source: &'a ContainerSource) -> Self {
        Self { host, api, source, id: host.new_id(), messages: Vec::new() }
    }

    /// Creates, starts, joins by an exec, kills, deletes and removes the container. Returns the requests that were
    /// refused. An error if a request hangs, if it fails without a reason, if a process has a wrong status, or if the
    /// container cannot be removed.
    pub(crate) fn run(mut self, injector: &mut dyn FaultInjector) -> Result<Vec<String>> {
        if let Some(role) = injector.role() {
            self.id = format!("{}-{role}", self.id);
        }
        let lived = self.live(injector);
        let ended = injector.end();
        let removed = self.remove();
        injector.removed();
        lived.and(ended).and(removed)?;
        Ok(self.messages)
    }

    fn live(&mut self, injector: &mut dyn FaultInjector) -> Result<()> {
        let rootfs = self.api.create(self.source, &self.id)?;
        let create = CreateTask { container_id: self.id.clone(), rootfs };
        if self.ask(injector, Step::Create, create)?.is_none() {
            return Ok(());
        }
        let start = StartProcess { container_id: self.id.clone(), exec_id: String::new() };
        if self.ask(injector, Step::Start, start)?.is_none() {
            return Ok(());
        }
        self.exec(injector)?;
        let kill = kill_request(&self.id);
        if self.ask(injector, Step::Kill, kill)?.is_none() {
            return Ok(());
        }
        let wait = WaitProcess { container_id: self.id.clone(), exec_id: String::new() };
        if let Some(exit) = self.ask(injector, Step::Wait, wait)? {
            self.expect_status("Wait", exit.exit_status, KILLED)?;
        }
        let delete = DeleteTask { container_id: self.id.clone() };
        if let Some(deleted) = self.ask(injector, Step::Delete, delete)? {
            self.expect_status("Delete", deleted.exit_status, KILLED)?;
        }
        Ok(())
    }

    fn exec(&mut self, injector: &mut dyn FaultInjector) -> Result<()> {
        let (container_id, exec_id) = (self.id.clone(), EXEC_ID.to_owned());
        let exec = ExecProcess { container_id, exec_id, spec: Some(process(EXEC)) };
        if self.ask(injector, Step::Exec, exec)?.is_none() {
            return Ok(());
        }
        let (container_id, exec_id) = (self.id.clone(), EXEC_ID.to_owned());
        let start = StartProcess { container_id, exec_id };
        let started = self.ask(injector, Step::StartExec, start)?.is_some();
        if injector.role().is_some() {
            return Ok(());
        }
        if started {
            let (container_id, exec_id) = (self.id.clone(), EXEC_ID.to_owned());
            let exit = self.ask(injector, Step::WaitExec, WaitProcess { container_id, exec_id })?;
            match exit.map(|exit| exit.exit_status) {
                None | Some(EXEC_STATUS) => {}
                // It has ended with the pod. Then the pod must have ended.
                Some(KILLED) => self.ends()?,
                Some(other) => self.expect_status("Wait of the exec", other, EXEC_STATUS)?,
            }
        }
        let (container_id, exec_id) = (self.id.clone(), EXEC_ID.to_owned());
        self.ask(injector, Step::DeleteExec, DeleteProcess { container_id, exec_id })?;
        Ok(())
    }

    /// Makes a request. None if it was refused, with a reason.
    fn ask<R: Request>(
        &mut self,
        injector: &mut dyn FaultInjector,
        step: Step,
        request: R,
    ) -> Result<Option<R::Answer>> {
        injector.before(&self.id, step)?;
        let limit = if step == Step::Create { CREATE } else { self.host.patience(BOUND) };
        let gives_up = injector.gives_up(step);
        match self.api.ask_within(gives_up.unwrap_or(limit), request) {
            Err(_) if gives_up.is_some() => {
                self.messages.push(format!("{step}: the client gives up"));
                Ok(None)
            }
            Err(error) => Err(error),
            Ok(Ok(answer)) => Ok(Some(answer)),
            Ok(Err(refusal)) => {
                ensure!(!refusal.message().is_empty(), "expected  a reason why {step} fails\ncame      none");
                self.messages.push(format!("{step}: {}", shown(&refusal).replace(&self.id, "ID")));
                // It may have been restarted.
                self.api.wait_until_served(self.host.patience(BOUND))?;
                Ok(None)
            }
        }
    }

    fn expect_status(&self, what: &str, came: u32, expected: u32) -> Result<()> {
        ensure!(
            came == expected,
            "expected  exit status {expected} from {what}\ncame      {came}, after {:?}",
            self.messages
        );
        Ok(())
    }

    /// Waits until the task has ended.
    fn ends(&self) -> Result<()> {
        wait_until("the end of a task", self.host.patience(BOUND), || Ok(!self.may_run()?))
    }

    fn may_run(&self) -> Result<bool> {
        Ok(match self.api.state(&self.id)? {
            Ok(process) => process.is_some_and(|process| process.status != i32::from(Status::Stopped)),
            Err(_) => true,
        })
    }

    /// Removes what is left of the container, as often as a patient client would.
    fn remove(&self) -> Result<()> {
        let mut said = Vec::new();
        for _ in 0..REMOVALS {
            let container_id = self.id.clone();
            if self.may_run()? {
                match self.api.ask(kill_request(&self.id))? {
                    Ok(_) => self.ends()?,
                    Err(refusal) => said.push(format!("Kill: {}", shown(&refusal))),
                }
            }
            match self.api.ask(DeleteTask { container_id })? {
                Err(refusal) if refusal.code() != tonic::Code::NotFound => {
                    said.push(format!("Delete: {}", shown(&refusal)));
                }
                _ => return self.api.remove(self.source, &self.id),
            }
            thread::sleep(PAUSE);
        }
        bail!("expected  the container removed after {REMOVALS} attempts\ncame      {said:?}")
    }
}
