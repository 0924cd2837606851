//! A process's standard streams: pipes to it or its terminal, and copies between them and the stream connections.

use std::{fs::OpenOptions, future::Future, io, os::fd::OwnedFd};

use tokio::task::{AbortHandle, JoinHandle};
use tokio_vsock::VsockStream;

use super::error::ContainerError;
use crate::{
    stage::parent::{Child, ChildStdio},
    streams::{End, StreamTable, forward_input, forward_output},
};

/// Ids of standard streams; 0: /dev/null.
#[derive(Debug, Clone, Copy)]
pub struct StreamIds {
    /// Standard input.
    pub stdin: u32,
    /// Standard output.
    pub stdout: u32,
    /// Standard error.
    pub stderr: u32,
}

/// Both sides of the three streams.
pub(super) struct Stdio {
    /// For the process.
    pub child: ChildStdio,
    /// For the agent.
    pub agent: AgentStreams,
}

/// The agent's ends.
pub(super) enum AgentStreams {
    /// None: /dev/null.
    Pipes { stdin: Option<Pipe>, stdout: Option<Pipe>, stderr: Option<Pipe> },
    /// Of the terminal that the process brings along. None: nobody types, or nobody looks.
    Terminal { stdin: Option<VsockStream>, stdout: Option<VsockStream> },
}

pub(super) struct Pipe {
    connection: VsockStream,
    end: End,
}

/// Running copies.
pub(super) struct Copies {
    /// Of standard output and standard error.
    pub outputs: Vec<JoinHandle<()>>,
    stdin: Option<AbortHandle>,
}

/// Takes the named connections, and makes a pipe for each unless the process has a terminal.
pub(super) async fn open(
    table: &StreamTable,
    ids: StreamIds,
    has_terminal: bool,
) -> Result<Stdio, ContainerError> {
    let stdin = connection(table, ids.stdin).await?;
    let stdout = connection(table, ids.stdout).await?;
    if has_terminal {
        let child = ChildStdio { stdin: null()?, stdout: null()?, stderr: null()? };
        return Ok(Stdio { child, agent: AgentStreams::Terminal { stdin, stdout } });
    }
    let stderr = connection(table, ids.stderr).await?;
    let (child_stdin, stdin) = input(stdin)?;
    let (child_stdout, stdout) = output(stdout)?;
    let (child_stderr, stderr) = output(stderr)?;
    let child = ChildStdio { stdin: child_stdin, stdout: child_stdout, stderr: child_stderr };
    Ok(Stdio { child, agent: AgentStreams::Pipes { stdin, stdout, stderr } })
}

async fn connection(table: &StreamTable, id: u32) -> Result<Option<VsockStream>, ContainerError> {
    if id == 0 { Ok(None) } else { Ok(Some(table.take(id).await?)) }
}

fn input(connection: Option<VsockStream>) -> Result<(OwnedFd, Option<Pipe>), ContainerError> {
    let Some(connection) = connection else { return Ok((null()?, None)) };
    let (reader, writer) = io::pipe().map_err(pipe_error)?;
    let end = End::new(writer.into()).map_err(pipe_error)?;
    Ok((reader.into(), Some(Pipe { connection, end })))
}

fn output(connection: Option<VsockStream>) -> Result<(OwnedFd, Option<Pipe>), ContainerError> {
    let Some(connection) = connection else { return Ok((null()?, None)) };
    let (reader, writer) = io::pipe().map_err(pipe_error)?;
    let end = End::new(reader.into()).map_err(pipe_error)?;
    Ok((writer.into(), Some(Pipe { connection, end })))
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
    pub(super) fn forward(self, label: &str, child: &Child) -> Copies {
        match self {
            Self::Pipes { stdin, stdout, stderr } => {
                let output = |name, pipe: Option<Pipe>| {
                    let Pipe { connection, end } = pipe?;
                    Some(spawn(label, name, forward_output(end, connection, child.exit.clone())))
                };
                let outputs = [output("stdout", stdout), output("stderr", stderr)];
                let stdin = stdin.map(|Pipe { connection, end }| {
                    spawn(label, "stdin", forward_input(connection, end)).abort_handle()
                });
                Copies { outputs: outputs.into_iter().flatten().collect(), stdin }
            }
            Self::Terminal { stdin, stdout } => {
                let Some(terminal) = &child.terminal else {
                    return Copies { outputs: Vec::new(), stdin: None };
                };
                let (master, ended) = (|| terminal.master().clone(), child.exit.clone());
                let output = match stdout {
                    Some(connection) => spawn(label, "terminal", forward_output(master(), connection, ended)),
                    // A terminal that nobody reads stops who writes to it.
                    None => spawn(label, "terminal", forward_output(master(), tokio::io::sink(), ended)),
                };
                let stdin = stdin.map(|connection| {
                    spawn(label, "terminal", forward_input(connection, master())).abort_handle()
                });
                Copies { outputs: vec![output], stdin }
            }
        }
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
