//! Makes the processes of containers, in the agent: starts the stage, and follows its reports.

use std::{
    io,
    os::{
        fd::{AsRawFd, BorrowedFd, OwnedFd},
        unix::{net::UnixStream as StdUnixStream, process::CommandExt},
    },
    path::PathBuf,
    process::{Command, Stdio},
    sync::Arc,
    time::Duration,
};

use super::{Order, Report, SOCKET_VARIABLE, SetupError, agent_socket::AgentSocket};
use crate::{
    reaper::{ExitReceiver, Expectation, Reaper},
    stage_config::{ExecConfig, InitConfig, PAUSE, ProcessConfig, STAGE, SharedNamespaces, StageConfig},
    syscall,
    terminal::Terminal,
};
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use serde::Serialize;
use tokio::time::timeout;

/// Why there is no process, or why it does not run its program.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    /// A step of the setup failed.
    #[error(transparent)]
    Setup(#[from] SetupError),
    /// The process, or the stage that was to make it, has ended without a report. Mostly it was killed: for the
    /// container's memory limit, or by SIGKILL.
    #[error("the container's process ended during {0}")]
    Ended(&'static str),
    /// It took too long, for example because a file system does not answer.
    #[error("the container's process did not complete {step} within {} s", limit.as_secs())]
    Deadline {
        /// What it was to do.
        step: &'static str,
        /// How long it could take.
        limit: Duration,
    },
    /// The agent could not make it or speak with it.
    #[error("making the container's process: {0}")]
    Io(#[from] io::Error),
}

/// How long the setup of a process may take, and then the start of its program. The shim waits for 60 s.
pub const DEADLINE: Duration = Duration::from_secs(50);

/// Makes the processes of containers.
pub struct Launcher {
    /// The agent's own binary, which is executed as the stage.
    pub program: PathBuf,
    /// Waits for the ends of the processes.
    pub reaper: Arc<Reaper>,
    /// Mostly [`DEADLINE`].
    pub deadline: Duration,
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

/// A child of the agent.
pub struct Child {
    /// In the agent's pid namespace.
    pub pid: i32,
    /// Its end.
    pub exit: ExitReceiver,
    /// What its standard streams are, if it has one.
    pub terminal: Option<Terminal>,
}

/// A container's init that waits to be started.
pub struct CreatedInit {
    /// The process.
    pub child: Child,
    /// Other processes enter the container by it. Unlike a pid, it never refers to another process.
    pub pidfd: OwnedFd,
    /// A detached mount of a proc file system that shows the container's own pid namespace, if it has one.
    pub proc: Option<OwnedFd>,
    /// For [`Control::start`].
    pub control: Control,
}

/// A process that is to join a container.
pub struct ExecTarget<'a> {
    /// The container's cgroup v2 directory.
    pub cgroup_dir: PathBuf,
    /// The pidfd of the container's init.
    pub init: BorrowedFd<'a>,
    /// The process.
    pub process: ProcessConfig,
}

/// The agent's end of the socket.
pub struct Control {
    socket: AgentSocket,
    deadline: Duration,
    /// The id of the child. The stage reports it, maybe after reports of the child itself.
    pid: Option<i32>,
    /// The stage and a helper, until the process is made.
    makers: Vec<i32>,
    /// See [`CreatedInit::proc`].
    proc: Option<OwnedFd>,
}

const NEW_PID: u64 = libc::CLONE_NEWPID as u64;
const NEW_USER: u64 = libc::CLONE_NEWUSER as u64;

/// For [`ProcessError::Ended`]: until the process is ready.
const SETUP: &str = "its setup";
/// For [`ProcessError::Ended`]: between then and its execve.
const START: &str = "its start";

/// Namespaces of another container that an init is to live in.
pub struct NamespaceOwner<'a> {
    /// The pidfd of that container's init.
    pub init: BorrowedFd<'a>,
    /// `CLONE_NEW*` bits.
    pub namespaces: u64,
}

impl Launcher {
    /// Makes a container's init. For this it executes the agent's own program as the stage, named [`STAGE`] or
    /// [`PAUSE`]. After an error, all processes that may still run are in the container's cgroup, where they can be
    /// killed.
    pub async fn create(
        &self,
        mut config: InitConfig,
        joined: &[NamespaceOwner<'_>],
        stdio: ChildStdio,
    ) -> Result<CreatedInit, ProcessError> {
        let expectation = self.reaper.expect();
        // Other processes run in a pid namespace that is joined. So the init enters it only after it has dropped its
        // rights, if a proc file system that shows the namespace exists already.
        let is_late = config.rootfs.as_ref().is_some_and(|rootfs| rootfs.proc.is_some());
        let mut lent = Vec::new();
        for NamespaceOwner { init, namespaces } in joined {
            let init = init.try_clone_to_owned()?;
            let mut namespaces = *namespaces;
            if is_late && namespaces & NEW_PID != 0 {
                config.pid_namespace = Some(init.as_raw_fd());
                namespaces &= !NEW_PID;
            }
            if namespaces != 0 {
                config.joined.push(SharedNamespaces { init_pidfd: init.as_raw_fd(), namespaces });
            }
            lent.push(init);
        }
        // Whoever is in a user namespace may not enter the others of a process that is not dumpable, as pause is not.
        config.joined.sort_by_key(|joined| joined.namespaces & NEW_USER != 0);
        let name = if config.rootfs.is_some() { STAGE } else { PAUSE };
        let mut control = self.spawn_stage(name, stdio, lent)?;
        let set_up = async {
            control.send(&StageConfig::Init(Box::new(config))).await?;
            let terminal = control.ready().await?;
            Ok((terminal, control.cloned().await?))
        };
        let set_up = within(self.deadline, SETUP, set_up).await;
        let (terminal, pid) = set_up.inspect_err(|_| control.kill(&expectation))?;
        let child = Child { pid, exit: expectation.claim(pid), terminal };
        let pidfd = syscall::pidfd_open(pid)?;
        // The id was the init's when the pidfd was opened, unless the init has been reaped before.
        if child.exit.borrow().is_some() {
            return Err(ProcessError::Ended(SETUP));
        }
        Ok(CreatedInit { child, pidfd, proc: control.proc.take(), control })
    }

    /// Makes one more process in a container, by way of the stage as [`Launcher::create`] does. Returns when its
    /// program was executed. After an error the process is killed.
    pub async fn exec(&self, target: ExecTarget<'_>, stdio: ChildStdio) -> Result<Child, ProcessError> {
        let expectation = self.reaper.expect();
        let lent = target.init.try_clone_to_owned()?;
        let config = ExecConfig {
            cgroup_dir: target.cgroup_dir,
            init_pidfd: lent.as_raw_fd(),
            process: target.process,
        };
        let mut control = self.spawn_stage(STAGE, stdio, vec![lent])?;
        let executed = async {
            control.send(&StageConfig::Exec(Box::new(config))).await?;
            let terminal = control.ready().await?;
            control.executed().await?;
            Ok((terminal, control.cloned().await?))
        };
        let executed = within(self.deadline, SETUP, executed).await;
        let (terminal, pid) = executed.inspect_err(|_| control.kill(&expectation))?;
        Ok(Child { pid, exit: expectation.claim(pid), terminal })
    }

    /// Executes the agent's program as the stage. `lent` are descriptors for it. This function must not await: the
    /// other end of the socket and `lent` are inheritable for a moment, and no other child may inherit them.
    fn spawn_stage(&self, name: &str, stdio: ChildStdio, lent: Vec<OwnedFd>) -> io::Result<Control> {
        let (ours, theirs) = StdUnixStream::pair()?;
        fcntl(&theirs, FcntlArg::F_SETFD(FdFlag::empty()))?;
        for lent in &lent {
            fcntl(lent, FcntlArg::F_SETFD(FdFlag::empty()))?;
        }
        // Neither fork nor a hook between fork and exec, so that std uses posix_spawn. The agent's reaper waits for it.
        let stage = Command::new(&self.program)
            .arg0(name)
            .env_clear()
            .env(SOCKET_VARIABLE, theirs.as_raw_fd().to_string())
            .stdin(Stdio::from(stdio.stdin))
            .stdout(Stdio::from(stdio.stdout))
            .stderr(Stdio::from(stdio.stderr))
            .spawn()?;
        let makers = vec![stage.id() as i32];
        Ok(Control {
            socket: AgentSocket::new(ours)?,
            deadline: self.deadline,
            pid: None,
            makers,
            proc: None,
        })
    }
}

async fn within<T>(
    limit: Duration,
    step: &'static str,
    work: impl Future<Output = Result<T, ProcessError>>,
) -> Result<T, ProcessError> {
    timeout(limit, work).await.unwrap_or(Err(ProcessError::Deadline { step, limit }))
}

impl Control {
    /// Lets the container's program be executed. Returns when it was.
    pub async fn start(mut self) -> Result<(), ProcessError> {
        let limit = self.deadline;
        let started = async {
            match self.send(&Order::Start).await {
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
                    Err(ProcessError::Ended("its wait for the start"))
                }
                Err(error) => Err(error.into()),
                Ok(()) => self.executed().await,
            }
        };
        within(limit, START, started).await
    }

    /// Kills what has been made so far.
    fn kill(&self, expectation: &Expectation) {
        for pid in self.makers.iter().copied().chain(self.pid) {
            expectation.kill(pid);
        }
    }

    /// Waits until the process is ready to execute its program. Returns its terminal, if it has one.
    async fn ready(&mut self) -> Result<Option<Terminal>, ProcessError> {
        match self.receive().await? {
            Some(Report::Ready) => Ok(self.socket.descriptor().map(Terminal::new).transpose()?),
            Some(_) => Err(unexpected()),
            None => Err(ProcessError::Ended(SETUP)),
        }
    }

    /// Waits until execve(2) has closed the other end of the socket.
    async fn executed(&mut self) -> Result<(), ProcessError> {
        match self.receive().await? {
            Some(Report::Executing) => {}
            Some(_) => return Err(unexpected()),
            None => return Err(ProcessError::Ended(START)),
        }
        match self.receive().await? {
            Some(_) => Err(unexpected()),
            None => Ok(()),
        }
    }

    /// The process id, which may have been reported already.
    async fn cloned(&mut self) -> Result<i32, ProcessError> {
        if let Some(pid) = self.pid {
            return Ok(pid);
        }
        loop {
            match self.next().await? {
                Some(Report::Cloned(pid)) => return Ok(pid),
                Some(Report::Helper(_)) => {}
                Some(_) => return Err(unexpected()),
                None => return Err(ProcessError::Ended(SETUP)),
            }
        }
    }

    async fn send(&mut self, message: &impl Serialize) -> io::Result<()> {
        let mut line = serde_json::to_vec(message)?;
        line.push(b'\n');
        self.socket.send(&line).await
    }

    /// The next report of the child. None: there are no more.
    async fn receive(&mut self) -> Result<Option<Report>, ProcessError> {
        loop {
            match self.next().await? {
                Some(Report::Helper(pid)) => self.makers.push(pid),
                Some(Report::Proc) => self.proc = self.socket.descriptor(),
                Some(Report::Cloned(pid)) => self.pid = Some(pid),
                other => return Ok(other),
            }
        }
    }

    /// The next report of the stage or its child; a failure is an error.
    async fn next(&mut self) -> Result<Option<Report>, ProcessError> {
        let line = match self.socket.line().await {
            Ok(Some(line)) => line,
            Ok(None) => return Ok(None),
            // Closed with unread data in it: an init that was killed before it read its orders.
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        match serde_json::from_slice(&line).map_err(io::Error::from)? {
            Report::Failed(error) => Err(error.into()),
            report => Ok(Some(report)),
        }
    }
}

fn unexpected() -> ProcessError {
    io::Error::other("an unexpected message").into()
}
