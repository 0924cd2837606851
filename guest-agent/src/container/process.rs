//! A process of a container that the agent has made: its init, or one that joined it.

use std::{fs, future::Future, path::PathBuf, time::Duration};

use tokio::{
    sync::watch,
    task::{AbortHandle, JoinHandle},
    time::timeout,
};

use super::{error::ContainerError, stdio::AgentStreams};
use crate::{
    config::WindowSize,
    reaper::{Exit, ExitReceiver},
    stage::parent::Child,
    terminal::Terminal,
};

/// A process that exists or has existed. Its streams are copied until this is dropped, or until they end.
pub struct Process {
    pid: i32,
    /// Its end.
    exit: ExitReceiver,
    /// Its end, once its output was handed over.
    finished: ExitReceiver,
    /// The copies of its streams.
    copies: Vec<AbortHandle>,
    terminal: Option<Terminal>,
}

impl Process {
    /// Has the streams copied and the end watched for; `epilogue` begins with the end, and nobody who waits hears
    /// of the end before it is through. `label` says in the log which process it is.
    pub(super) fn watch(
        child: Child,
        streams: AgentStreams,
        label: &str,
        epilogue: impl Future<Output = ()> + Send + 'static,
    ) -> Self {
        let (finished_sender, finished) = watch::channel(None);
        let copies = streams.forward(label, &child);
        let aborts = copies.abort_handles();
        tokio::spawn(supervise(child.exit.clone(), copies.outputs, epilogue, finished_sender));
        let Child { pid, exit, terminal } = child;
        Self { pid, exit, finished, copies: aborts, terminal }
    }

    /// In the agent's pid namespace.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// How it ended, once it has, and its output was handed to the stream connections, if they take it soon.
    pub async fn wait(&self) -> Result<Exit, ContainerError> {
        let mut finished = self.finished.clone();
        let ended = finished.wait_for(Option::is_some).await;
        // The sender is gone without a value only if the guest is about to end.
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

    /// Whether it has ended, or is about to: a process gives up its namespaces, which nobody can enter by it any
    /// more, well before the reaper tells its end.
    pub(super) fn is_leaving(&self) -> bool {
        // In this order: the id is this process's until the reaper has told its end.
        self.has_ended() || fs::read_link(PathBuf::from(format!("/proc/{}/ns/mnt", self.pid))).is_err()
    }

    /// Drops what is left of its streams.
    pub(super) fn abort_copies(&self) {
        for copy in &self.copies {
            copy.abort();
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.abort_copies();
    }
}

/// How long the end of a process is held back for its output, so that who hears of the end has mostly read all. A reader
/// that is slower gets the rest afterwards.
const OUTPUT_PATIENCE: Duration = Duration::from_secs(1);

/// Waits for the end of a process, and tells `finished` when the copies of its output are through, too, or have had their
/// time.
async fn supervise(
    mut exit: ExitReceiver,
    outputs: Vec<JoinHandle<()>>,
    epilogue: impl Future<Output = ()>,
    finished: watch::Sender<Option<Exit>>,
) {
    let Ok(ended) = exit.wait_for(Option::is_some).await.map(|exit| *exit) else { return };
    epilogue.await;
    let all = async {
        for output in outputs {
            // An error: the copy was aborted, since the process is being deleted.
            let _ = output.await;
        }
    };
    // Too late: nobody reads it, and the process is no less dead for that.
    let _ = timeout(OUTPUT_PATIENCE, all).await;
    finished.send_replace(ended);
}

#[cfg(test)]
mod tests {
    use std::future;

    use tokio::time::Instant;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_end_is_told_though_nobody_reads_the_output() {
        let ended = Some(Exit { status: 137, at_unix_ns: 1 });
        let (_ended, exit) = watch::channel(ended);
        let (finished, told) = watch::channel(None);
        let begun = Instant::now();
        let blocked = tokio::spawn(future::pending());
        let goes_on = blocked.abort_handle();
        supervise(exit, vec![blocked], future::ready(()), finished).await;
        assert_eq!((*told.borrow(), begun.elapsed()), (ended, OUTPUT_PATIENCE));
        assert!(!goes_on.is_finished(), "a slow reader gets the rest");
    }
}
