//! The agent's side of a container's init.

use std::{
    io,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::net::UnixStream as StdUnixStream,
    },
    path::Path,
    process::{Command, Stdio},
    sync::Arc,
};

use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    net::UnixStream,
};

use super::{Order, Report, STAGE_ARGUMENT, SetupError};
use crate::{
    config::InitConfig,
    reaper::{ExitReceiver, Reaper},
};

/// Why there is no container's init, or why it does not run the container's program.
#[derive(Debug, thiserror::Error)]
pub enum InitError {
    /// A step of the setup failed.
    #[error(transparent)]
    Setup(#[from] SetupError),
    /// The init, or the stage before it, is gone without a word. Mostly it was killed: by the container's memory
    /// limit, or on demand.
    #[error("the container's init ended during {0}")]
    Ended(&'static str),
    /// The agent could not speak with it.
    #[error("speaking with the container's init: {0}")]
    Io(#[from] io::Error),
}

/// What the container's process gets as its standard streams.
pub struct ChildStdio {
    /// Descriptor 0.
    pub stdin: OwnedFd,
    /// Descriptor 1.
    pub stdout: OwnedFd,
    /// Descriptor 2.
    pub stderr: OwnedFd,
}

/// A container's init that waits to be started.
pub struct CreatedInit {
    /// In the agent's pid namespace.
    pub pid: i32,
    /// Its end.
    pub exit: ExitReceiver,
    /// For [`Control::start`].
    pub control: Control,
}

/// The agent's end of the socket.
pub struct Control {
    socket: BufReader<UnixStream>,
}

/// Makes a container's init by way of the stage, which is `program` executed as [`STAGE_ARGUMENT`] says.
pub async fn create(
    program: &Path,
    config: &InitConfig,
    stdio: ChildStdio,
    reaper: &Arc<Reaper>,
) -> Result<CreatedInit, InitError> {
    let expectation = reaper.expect();
    let mut control = spawn_stage(program, stdio)?;
    let mut line = serde_json::to_vec(config).map_err(io::Error::from)?;
    line.push(b'\n');
    control.socket.write_all(&line).await?;

    // The stage and the init do not wait for each other: either's report may be the first.
    let (mut pid, mut is_ready) = (None, false);
    loop {
        if let Some(pid) = pid.filter(|_| is_ready) {
            return Ok(CreatedInit { pid, exit: expectation.claim(pid), control });
        }
        match control.receive().await? {
            Some(Report::Cloned(cloned)) => pid = Some(cloned),
            Some(Report::Ready) => is_ready = true,
            Some(Report::Failed(error)) => return Err(error.into()),
            Some(Report::Executing) => return Err(unexpected()),
            None => return Err(InitError::Ended("the container's setup")),
        }
    }
}

/// Nothing is awaited here: the socket's other end is inheritable for a moment, and another child must not get it.
fn spawn_stage(program: &Path, stdio: ChildStdio) -> io::Result<Control> {
    let (ours, theirs) = StdUnixStream::pair()?;
    ours.set_nonblocking(true)?;
    fcntl(&theirs, FcntlArg::F_SETFD(FdFlag::empty()))?;
    // Neither fork nor a hook between fork and exec, so that std uses posix_spawn. The agent's reaper waits for it.
    Command::new(program)
        .arg(STAGE_ARGUMENT)
        .arg(theirs.as_raw_fd().to_string())
        .env_clear()
        .stdin(Stdio::from(stdio.stdin))
        .stdout(Stdio::from(stdio.stdout))
        .stderr(Stdio::from(stdio.stderr))
        .spawn()?;
    Ok(Control { socket: BufReader::new(UnixStream::from_std(ours)?) })
}

impl Control {
    /// Lets the container's program be executed. Returns when it was.
    pub async fn start(mut self) -> Result<(), InitError> {
        let mut line = serde_json::to_vec(&Order::Start).map_err(io::Error::from)?;
        line.push(b'\n');
        if let Err(error) = self.socket.write_all(&line).await {
            let is_gone = error.kind() == io::ErrorKind::BrokenPipe;
            return Err(if is_gone { InitError::Ended("its wait for the start") } else { error.into() });
        }
        match self.receive().await? {
            Some(Report::Executing) => {}
            Some(Report::Failed(error)) => return Err(error.into()),
            Some(Report::Cloned(_) | Report::Ready) => return Err(unexpected()),
            None => return Err(InitError::Ended("its wait for the start")),
        }
        match self.receive().await? {
            // The socket was closed by execve.
            None => Ok(()),
            Some(Report::Failed(error)) => Err(error.into()),
            Some(Report::Cloned(_) | Report::Ready | Report::Executing) => Err(unexpected()),
        }
    }

    async fn receive(&mut self) -> io::Result<Option<Report>> {
        let mut line = String::new();
        match self.socket.read_line(&mut line).await {
            Ok(0) => Ok(None),
            Ok(_) => Ok(Some(serde_json::from_str(&line)?)),
            // Closed with unread data in it: an init that was killed before it read its orders.
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Ok(None),
            Err(error) => Err(error),
        }
    }
}

fn unexpected() -> InitError {
    io::Error::other("an unexpected message").into()
}
