//! A process's standard streams: pipes to it or its terminal, and copies between them and the stream connections.

use std::{fs::OpenOptions, future::Future, io, os::fd::OwnedFd};

use tokio::sync::watch;

use super::error::ContainerError;
use crate::{
    stage::launcher::{Child, ChildStdio},
    streams::{Connection, End, StreamTable, forward_input, forward_output},
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
    /// The process's ends.
    pub child: ChildStdio,
    /// The agent's ends.
    pub agent: AgentStreams,
}

/// The agent's ends.
pub(super) enum AgentStreams {
    /// None: /dev/null.
    Pipes { stdin: Option<Pipe>, stdout: Option<Pipe>, stderr: Option<Pipe> },
    /// The streams for the terminal that the process opens. None: there is no input, or no output.
    Terminal { stdin: Option<Box<dyn Connection>>, stdout: Option<Box<dyn Connection>> },
}

pub(super) struct Pipe {
    connection: Box<dyn Connection>,
    end: End,
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

async fn connection(table: &StreamTable, id: u32) -> Result<Option<Box<dyn Connection>>, ContainerError> {
    if id == 0 { Ok(None) } else { Ok(Some(table.take(id).await?)) }
}

fn input(connection: Option<Box<dyn Connection>>) -> Result<(OwnedFd, Option<Pipe>), ContainerError> {
    let Some(connection) = connection else { return Ok((null()?, None)) };
    let (reader, writer) = io::pipe().map_err(pipe_error)?;
    let end = End::new(writer.into()).map_err(pipe_error)?;
    Ok((reader.into(), Some(Pipe { connection, end })))
}

fn output(connection: Option<Box<dyn Connection>>) -> Result<(OwnedFd, Option<Pipe>), ContainerError> {
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
    /// Starts tasks that copy until the streams end, or until the container is deleted. Output also ends when the
    /// process has ended, see [`forward_output`].
    pub(super) fn forward(self, label: &str, child: &Child, deletion: &watch::Receiver<bool>) {
        let spawn = Spawn { label, deletion };
        match self {
            Self::Pipes { stdin, stdout, stderr } => {
                for (name, pipe) in [("stdout", stdout), ("stderr", stderr)] {
                    if let Some(Pipe { connection, end }) = pipe {
                        spawn.copy(name, forward_output(end, connection, child.exit.clone()));
                    }
                }
                if let Some(Pipe { connection, end }) = stdin {
                    spawn.copy("stdin", forward_input(connection, end));
                }
            }
            Self::Terminal { stdin, stdout } => {
                let Some(terminal) = &child.terminal else { return };
                let (master, ended) = (|| terminal.master().clone(), child.exit.clone());
                let nobody = tokio::io::join(tokio::io::empty(), tokio::io::sink());
                match stdout {
                    Some(connection) => spawn.copy("terminal", forward_output(master(), connection, ended)),
                    // A process that writes to a terminal nobody reads is stopped once the terminal is full.
                    None => spawn.copy("terminal", forward_output(master(), nobody, ended)),
                }
                if let Some(connection) = stdin {
                    spawn.copy("terminal", forward_input(connection, master()));
                }
            }
        }
    }
}

/// What all copies of a process have in common.
struct Spawn<'a> {
    label: &'a str,
    deletion: &'a watch::Receiver<bool>,
}

impl Spawn<'_> {
    fn copy(&self, name: &'static str, copy: impl Future<Output = io::Result<()>> + Send + 'static) {
        let (label, mut deletion) = (self.label.to_owned(), self.deletion.clone());
        tokio::spawn(async move {
            tokio::select! {
                copied = copy => if let Err(error) = copied {
                    eprintln!("bulkhead-agent: container {label}: {name}: {error}");
                },
                // An error means that the container is gone.
                _ = deletion.wait_for(|is_deleted| *is_deleted) => {}
            }
        });
    }
}
