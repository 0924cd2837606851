//! One process of a container: its init, or a process that exec added. Both have the same states and streams.

use std::{fmt, sync::Mutex, time::Duration};

use tokio::sync::watch;

use crate::{
    io::{
        events::Publisher,
        streams::{OpenStdio, StdinGate, Streams},
    },
    process::{
        error::TaskError,
        running_guest::Guest,
        state::{Action, Refusal, State, Status, next},
    },
    types::{exit::Exit, lock::lock, terminal::WindowSize},
};

/// What identifies a process to containerd and to the agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ProcessKey {
    pub(crate) container_id: String,
    /// Empty for the container's init.
    pub(crate) exec_id: String,
}

/// A process. Its state is read without waiting, and only [`Process::advance`] changes it.
pub(crate) struct Process {
    pub(crate) key: ProcessKey,
    /// The pid that containerd gets: that of a process of the host.
    pub(crate) pid: u32,
    /// None for a process that containerd has no task for.
    events: Option<Publisher>,
    state: watch::Sender<State>,
    stdin: Mutex<Stdin>,
    /// Locked while the output drains. An abort of the streams does not wait for it.
    streams: tokio::sync::Mutex<Option<Streams>>,
    /// The last size that its terminal was given.
    window: Mutex<Option<WindowSize>>,
}

/// What CloseIO acts on.
#[derive(Default)]
struct Stdin {
    gate: Option<StdinGate>,
    /// Maybe before there is a gate: that of an exec comes with its start.
    is_closed: bool,
}

impl Process {
    /// A process that is created.
    pub(crate) fn new(key: ProcessKey, pid: u32, events: Option<Publisher>) -> Self {
        Self {
            key,
            pid,
            events,
            state: watch::Sender::new(State::Created),
            stdin: Mutex::default(),
            streams: tokio::sync::Mutex::default(),
            window: Mutex::default(),
        }
    }

    /// The state now.
    pub(crate) fn state(&self) -> State {
        *self.state.borrow()
    }

    /// The state without its data.
    pub(crate) fn status(&self) -> Status {
        self.state().status()
    }

    /// Changes the state, if `action` leads from the present one to `to`.
    pub(crate) fn advance(&self, action: Action, to: State) -> Result<(), Refusal> {
        self.advance_and(action, to, || {})
    }

    /// The same; `report` is called just before the change is visible.
    fn advance_and(&self, action: Action, to: State, report: impl FnOnce()) -> Result<(), Refusal> {
        let mut result = Ok(());
        self.state.send_if_modified(|state| {
            result = match next(state.status(), action) {
                Ok(status) if status == to.status() => Ok(()),
                Ok(status) => Err(Refusal::Precondition { action, status }),
                Err(refusal) => Err(refusal),
            };
            if result.is_ok() {
                report();
                *state = to;
            }
            result.is_ok()
        });
        result
    }

    /// The process runs.
    pub(crate) fn started(&self) -> Result<(), Refusal> {
        let ProcessKey { container_id, exec_id } = &self.key;
        self.advance_and(Action::Started, State::Running, || {
            let Some(events) = &self.events else { return };
            match exec_id.as_str() {
                "" => events.started(container_id, self.pid),
                exec_id => events.exec_started(container_id, exec_id, self.pid),
            }
        })
    }

    /// Records the end of the process. The event is published first, and then Wait and State show the end. Has no
    /// effect on a process that ended earlier or was deleted.
    pub(crate) fn exited(&self, exit: Exit) {
        let ProcessKey { container_id, exec_id } = &self.key;
        let id = if exec_id.is_empty() { container_id } else { exec_id };
        let changed = self.advance_and(Action::Exit, State::Stopped(exit), || {
            if let Some(events) = &self.events {
                events.exited(container_id, id, self.pid, exit);
            }
        });
        if changed.is_ok() {
            tracing::info!(
                container = container_id,
                exec = exec_id,
                status = exit.status,
                "the process exited"
            );
        }
    }

    /// Waits until the process has ended. None: it was deleted without having run.
    pub(crate) async fn wait(&self) -> Option<Exit> {
        let state = self.wait_for(|state| matches!(state, State::Stopped(_) | State::Deleted(_))).await;
        state.exit()
    }

    /// Waits until nothing of it runs, or is about to.
    pub(crate) async fn wait_idle(&self) {
        self.wait_for(|state| !matches!(state, State::Starting | State::Running | State::Paused)).await;
    }

    /// Waits until a start that is under way has succeeded or failed.
    pub(crate) async fn wait_started(&self) {
        self.wait_for(|state| *state != State::Starting).await;
    }

    async fn wait_for(&self, is_so: impl FnMut(&State) -> bool) -> State {
        // An error would mean that the sender is gone, which is this process's own.
        let state = self.state.subscribe().wait_for(is_so).await.map(|state| *state);
        state.unwrap_or(self.state())
    }

    /// Takes over the streams, which flow.
    pub(crate) async fn attach(&self, stdio: OpenStdio) {
        {
            let mut stdin = lock(&self.stdin);
            if stdin.is_closed {
                stdio.gate.close();
            }
            stdin.gate = Some(stdio.gate);
        }
        *self.streams.lock().await = Some(stdio.streams);
    }

    /// Lets standard input end with its other writers.
    pub(crate) fn close_stdin(&self) {
        let mut stdin = lock(&self.stdin);
        stdin.is_closed = true;
        if let Some(gate) = &stdin.gate {
            gate.close();
        }
    }

    /// Waits until all output has been written, at most `within`; what is left then is dropped.
    pub(crate) async fn drain(&self, within: Duration) {
        if let Some(mut streams) = self.streams.lock().await.take() {
            streams.drain(within).await;
        }
    }

    /// Sets the size of the terminal: at once, or as the one that the process begins with.
    pub(crate) async fn resize(&self, guest: &Guest, size: WindowSize) -> Result<(), TaskError> {
        // Before a look at the state: a start looks at the state first, and then at the size.
        lock(&self.window).replace(size);
        let ProcessKey { container_id, exec_id } = &self.key;
        match self.state() {
            State::Created | State::Starting if !exec_id.is_empty() => Ok(()),
            State::Stopped(_) | State::Deleted(_) => Err(TaskError::ResizeStopped),
            state => {
                state.allow(Action::Resize)?;
                Ok(guest.agent.resize(container_id, exec_id, size).await?)
            }
        }
    }

    /// The last size that the terminal was given.
    pub(crate) fn window(&self) -> Option<WindowSize> {
        *lock(&self.window)
    }
}

impl fmt::Debug for Process {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:?} {:?}", self.key, self.state())
    }
}

/// Runs `work` to its end, even if the caller is cancelled: what it has begun must be finished or undone.
pub(crate) async fn detached<T: Send + 'static>(
    work: impl Future<Output = Result<T, TaskError>> + Send + 'static,
) -> Result<T, TaskError> {
    tokio::spawn(work).await.map_err(|error| TaskError::Internal(error.to_string()))?
}
