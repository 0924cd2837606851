//! A process of a container that the agent has made: its init, or one that joined it.

use std::{fs, future::Future, path::PathBuf};

use tokio::sync::watch;

use super::{error::ContainerError, stdio::AgentStreams};
use crate::{
    reaper::{Exit, ExitReceiver},
    stage::launcher::Child,
    stage_config::WindowSize,
    terminal::Terminal,
};

/// A process that exists or has existed. Dropping this does not stop the copying of its output.
pub struct Process {
    pid: i32,
    /// The end of the process, as the reaper reports it.
    exit: ExitReceiver,
    /// The exit, set once all processes that die with this one have exited.
    finished: ExitReceiver,
    terminal: Option<Terminal>,
}

impl Process {
    /// Starts to copy the streams, and to wait for the end. `epilogue` runs after the end, and [`Process::wait`]
    /// returns after it. `label` names the process in the log. The copies stop when `deletion` reports the container's.
    pub(super) fn watch(
        child: Child,
        streams: AgentStreams,
        label: &str,
        deletion: &watch::Receiver<bool>,
        epilogue: impl Future<Output = ()> + Send + 'static,
    ) -> Self {
        let (finished_sender, finished) = watch::channel(None);
        streams.forward(label, &child, deletion);
        tokio::spawn(supervise(child.exit.clone(), epilogue, finished_sender));
        let Child { pid, exit, terminal } = child;
        Self { pid, exit, finished, terminal }
    }

    /// In the agent's pid namespace.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Waits for the end of the process, and returns it. Output that was not read yet is still being copied then: a
    /// client that reads slowly, or not at all, must not delay the news.
    pub async fn wait(&self) -> Result<Exit, ContainerError> {
        let mut finished = self.finished.clone();
        let ended = finished.wait_for(Option::is_some).await;
        // The sender is dropped without a value only when the guest ends.
        ended.ok().and_then(|exit| *exit).ok_or(ContainerError::Finished)
    }

    /// Sets the size of its terminal.
    pub fn resize(&self, size: WindowSize) -> Result<(), ContainerError> {
        let terminal = self.terminal.as_ref().ok_or(ContainerError::NoTerminal)?;
        let failed = |source| ContainerError::Io { action: "setting the size of a terminal", source };
        terminal.resize(size).map_err(failed)
    }

    pub(super) fn has_ended(&self) -> bool {
        self.exit.borrow().is_some()
    }

    /// Whether it has ended or is ending. A process that ends leaves its namespaces before it can be reaped, and nobody
    /// can enter them by its pidfd from then on.
    pub(super) fn is_leaving(&self) -> bool {
        // In this order: until the reaper has reported the end, no other process can have this id.
        self.has_ended() || fs::read_link(PathBuf::from(format!("/proc/{}/ns/mnt", self.pid))).is_err()
    }
}

/// Waits for the end of a process and runs the epilogue; then `finished` has the end.
async fn supervise(
    mut exit: ExitReceiver,
    epilogue: impl Future<Output = ()>,
    finished: watch::Sender<Option<Exit>>,
) {
    let Ok(ended) = exit.wait_for(Option::is_some).await.map(|exit| *exit) else { return };
    epilogue.await;
    finished.send_replace(ended);
}
