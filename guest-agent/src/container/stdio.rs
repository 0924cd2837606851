//! A process's standard streams: pipes to it, and copies between them and the stream connections.

use std::{fs::OpenOptions, future::Future, io, os::fd::OwnedFd};

use tokio::{
    net::unix::pipe,
    task::{AbortHandle, JoinHandle},
};
use tokio_vsock::VsockStream;

use super::ContainerError;
use crate::{
    process::parent::ChildStdio,
    reaper::ExitReceiver,
    streams::{StreamTable, forward_input, forward_output},
};

/// Ids of standard streams; 0: /dev/null.
#[derive(Debug, Clone, Copy)]
pub struct StreamIds {
    /// Standard input.
    pub stdin: u64,
    /// Standard output.
    pub stdout: u64,
    /// Standard error.
    pub stderr: u64,
}

/// Both sides of the three streams.
pub(super) struct Stdio {
    /// For the process.
    pub child: ChildStdio,
    /// For the agent.
    pub agent: AgentStreams,
}

/// The agent's ends; None: /dev/null.
pub(super) struct AgentStreams {
    stdin: Option<Input>,
    stdout: Option<Output>,
    stderr: Option<Output>,
}

struct Input {
    connection: VsockStream,
    pipe: pipe::Sender,
}

struct Output {
    connection: VsockStream,
    pipe: pipe::Receiver,
}

/// Running copies.
pub(super) struct Copies {
    /// Of standard output and standard error.
    pub outputs: Vec<JoinHandle<()>>,
    stdin: Option<AbortHandle>,
}

/// Takes the named connections, and makes a pipe for each.
pub(super) async fn open(table: &StreamTable, ids: StreamIds) -> Result<Stdio, ContainerError> {
    let mut agent = AgentStreams { stdin: None, stdout: None, stderr: None };
    let stdin = if ids.stdin == 0 {
        null()?
    } else {
        let connection = table.take(ids.stdin).await?;
        let (reader, writer) = io::pipe().map_err(pipe_error)?;
        let pipe = pipe::Sender::from_owned_fd(writer.into()).map_err(pipe_error)?;
        agent.stdin = Some(Input { connection, pipe });
        reader.into()
    };
    let stdout = open_output(table, ids.stdout, &mut agent.stdout).await?;
    let stderr = open_output(table, ids.stderr, &mut agent.stderr).await?;
    Ok(Stdio { child: ChildStdio { stdin, stdout, stderr }, agent })
}

async fn open_output(
    table: &StreamTable,
    id: u64,
    ours: &mut Option<Output>,
) -> Result<OwnedFd, ContainerError> {
    if id == 0 {
        return null();
    }
    let connection = table.take(id).await?;
    let (reader, writer) = io::pipe().map_err(pipe_error)?;
    let pipe = pipe::Receiver::from_owned_fd(reader.into()).map_err(pipe_error)?;
    *ours = Some(Output { connection, pipe });
    Ok(writer.into())
}

fn null() -> Result<OwnedFd, ContainerError> {
    let file = OpenOptions::new().read(true).write(true).open("/dev/null");
    file.map(OwnedFd::from).map_err(|source| ContainerError::Io { action: "opening /dev/null", source })
}

fn pipe_error(source: io::Error) -> ContainerError {
    ContainerError::Io { action: "making a pipe", source }
}

impl AgentStreams {
    /// Copies until the streams end; output also ends when the process has, see [`forward_output`].
    pub(super) fn forward(self, label: &str, ended: &ExitReceiver) -> Copies {
        let outputs =
            [("stdout", self.stdout), ("stderr", self.stderr)].into_iter().filter_map(|(name, output)| {
                let Output { connection, pipe } = output?;
                Some(spawn(label, name, forward_output(pipe, connection, ended.clone())))
            });
        let outputs = outputs.collect();
        let stdin = self.stdin.map(|Input { connection, pipe }| {
            spawn(label, "stdin", forward_input(connection, pipe)).abort_handle()
        });
        Copies { outputs, stdin }
    }
}

impl Copies {
    /// Of all of them.
    pub(super) fn abort_handles(&self) -> Vec<AbortHandle> {
        self.outputs.iter().map(JoinHandle::abort_handle).chain(self.stdin.clone()).collect()
    }
}

fn spawn(
    label: &str,
    name: &'static str,
    copy: impl Future<Output = io::Result<()>> + Send + 'static,
) -> JoinHandle<()> {
    let label = label.to_owned();
    tokio::spawn(async move {
        if let Err(error) = copy.await {
            eprintln!("bulkhead-agent: container {label}: {name}: {error}");
        }
    })
}
