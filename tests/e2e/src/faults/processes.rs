//! The shim or the VMM is killed, or stopped.

use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::lifecycle::{FaultInjector, Step};
use super::{Fault, TestBed};
use crate::command::wait_until;
use crate::snapshot::processes_of;

/// The VMM's program.
pub(crate) const VMM: &str = "bulkhead-vmm";

/// The requests at which a process can be killed or stopped.
pub(crate) const MOMENTS: [Step; 6] =
    [Step::Create, Step::Start, Step::Exec, Step::StartExec, Step::Kill, Step::Delete];

/// How long a process may take to appear.
pub(super) const APPEARS: Duration = Duration::from_secs(60);
/// How long the shim is stopped. Nobody can hurry a client of a shim that is stopped, whatever the runtime.
const STOPPED_SHIM: Duration = Duration::from_secs(3);

pub(super) fn try_all(bed: &mut TestBed<'_>) -> Result<()> {
    for (what, signal, goes_on) in kinds(bed.host().runtime().shim()) {
        for moment in MOMENTS {
            let fault = Fault::new(what, signal.as_str(), moment);
            bed.try_fault(&fault, &mut SignalInjector::new(what, signal, goes_on, moment))?;
        }
    }
    Ok(())
}

/// Which program gets which signal, and after how long it goes on.
pub(crate) fn kinds(shim: &'static str) -> [(&'static str, Signal, Option<Duration>); 4] {
    [
        (VMM, Signal::SIGKILL, None),
        // The guest is frozen for good.
        (VMM, Signal::SIGSTOP, None),
        (shim, Signal::SIGKILL, None),
        (shim, Signal::SIGSTOP, Some(STOPPED_SHIM)),
    ]
}

/// A signal to a process of the container, at a request.
pub(crate) struct SignalInjector {
    program: &'static str,
    signal: Signal,
    goes_on: Option<Duration>,
    moment: Step,
    stopped: Arc<Mutex<Vec<Pid>>>,
    thread: Option<JoinHandle<Result<()>>>,
}

impl SignalInjector {
    pub(crate) fn new(
        program: &'static str,
        signal: Signal,
        goes_on: Option<Duration>,
        moment: Step,
    ) -> Self {
        Self { program, signal, goes_on, moment, stopped: Arc::default(), thread: None }
    }

    /// Sends the signal when the process is there.
    fn send(&self, id: &str) -> Result<()> {
        let pid = Pid::from_raw(i32::try_from(appeared(self.program, id)?).context("a pid")?);
        kill(pid, self.signal).with_context(|| format!("cannot send {} {}", self.program, self.signal))?;
        self.stopped.lock().unwrap_or_else(PoisonError::into_inner).push(pid);
        if let Some(pause) = self.goes_on {
            thread::sleep(pause);
            self.go_on();
        }
        Ok(())
    }

    fn go_on(&self) {
        for pid in &*self.stopped.lock().unwrap_or_else(PoisonError::into_inner) {
            // It may have been killed.
            let _ = kill(*pid, Signal::SIGCONT);
        }
    }
}

/// The process of this program and container, when it is there. Of a shim it is the server, when it is ready to serve:
/// the process that starts it ends at once, and a limit of descriptors is raised while the server begins.
pub(super) fn appeared(program: &'static str, id: &str) -> Result<u32> {
    let mut found = None;
    wait_until(program, APPEARS, || {
        found = processes_of(program, id)?.into_iter().find(|pid| program == VMM || serves(*pid));
        Ok(found.is_some())
    })?;
    found.context("no process")
}

/// Whether this process of a shim is the server, and waits for events.
fn serves(pid: u32) -> bool {
    let words = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let files = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let mut targets = files.filter_map(|file| fs::read_link(file.path()).ok());
    words.split('\0').any(|word| word == "serve")
        && targets.any(|target| target == Path::new("anon_inode:[eventpoll]"))
}

impl FaultInjector for SignalInjector {
    fn before(&mut self, id: &str, step: Step) -> Result<()> {
        if step != self.moment {
            return Ok(());
        }
        // It appears while the request goes on, or does so while nobody is to wait for it.
        if step == Step::Create || self.goes_on.is_some() {
            let injector = Self { stopped: Arc::clone(&self.stopped), thread: None, ..*self };
            let id = id.to_owned();
            self.thread = Some(thread::spawn(move || injector.send(&id)));
            return Ok(());
        }
        self.send(id)
    }

    fn end(&mut self) -> Result<()> {
        match self.thread.take().map(JoinHandle::join) {
            Some(Err(_)) => Err(anyhow!("the thread that sends a signal panicked")),
            Some(Ok(sent)) => sent,
            None => Ok(()),
        }
    }

    fn was_injected(&self) -> Result<bool> {
        Ok(!self.stopped.lock().unwrap_or_else(PoisonError::into_inner).is_empty())
    }
}
