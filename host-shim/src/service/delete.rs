//! `delete`: cleans up after a shim that is dead, or that containerd has lost.
//!
//! containerd 1.6, 1.7 and 2.1 kill `delete` 5 seconds after they have started it
//! (`io.containerd.timeout.shim.cleanup`): only this process, not its process group. What it has to undo may take
//! longer. So another process undoes it (`undo.rs`), and this one waits for a part of that time.
//!
//! What containerd does with the answer is in `cleanupAfterDeadShim` and `binary.Delete` of its runtime/v2:
//!
//! | `delete` | the task has exited with | the bundle | a new task of the same id |
//! |---|---|---|---|
//! | succeeds | what the answer says | is removed | can be created |
//! | fails, or is killed | 255 | stays | is refused until containerd restarts: the bundle exists |
//!
//! In both cases the task is over for containerd and its clients, and `delete` is not run again until containerd
//! restarts. So `delete` succeeds as soon as it has killed the programs of the pod. That something is left on the host
//! is no reason to fail. Whoever starts a new pod of the same id waits for it.

use std::{
    env,
    fs::File,
    io::{self, Read, Write},
    net::Shutdown,
    os::{
        fd::OwnedFd,
        unix::{
            net::UnixStream,
            process::{CommandExt, ExitStatusExt},
        },
    },
    path::{Path, PathBuf},
    process::{self, Command, ExitStatus, Stdio},
    time::{Duration, Instant, SystemTime},
};

use containerd_shim_protos::{
    api,
    shim_async::{Client, TaskClient},
};
use tokio::time::timeout;
use ttrpc::{Code, asynchronous::transport::Socket, context::with_duration};

use crate::{
    guest::agent::SIGKILL,
    host::{
        journal::UndoError,
        placeholder_process::PROGRAM,
        pod_processes::PodProcesses,
        process_id::ProcessId,
        shim_socket,
        state_dir::{self, STATE_ROOT},
    },
    pod::{container_role::Role, create_request},
    service::{
        args::Args,
        bootstrap::{SELF, socket_of, socket_path},
        undo,
    },
    types::{
        error::chain,
        exit::{Exit, timestamp},
    },
};

/// How long after the start of this process the undo is waited for. On a busy host it starts slowly, and containerd's
/// time has begun by then.
const WITHIN: Duration = Duration::from_millis(3500);

/// The same if nobody kills this process.
const WITHIN_IF_PATIENT: Duration = Duration::from_secs(50);

/// Why `delete` has failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DeleteError {
    #[error("it is not known whether the programs of the pod have ended")]
    Programs(#[from] UndoError),
    #[error("{}: something of the pod is left", path.display())]
    Left { path: PathBuf },
}

/// What became of the undo.
#[derive(Debug)]
enum Outcome {
    Undone,
    Failed(String),
    /// This process still undoes it.
    GoesOn(u32),
}

/// Removes everything of the task from the host, or has begun to. It is no error if nothing is left. Returns what
/// containerd reports as the end of the task.
pub(crate) fn delete(args: &Args) -> Result<api::DeleteResponse, DeleteError> {
    let mut response = api::DeleteResponse::new();
    // Before it is known whether the bundle was replaced: a new pod of the same id is never taken for this one.
    let directory = state_dir::open(&path_of(args, &args.id))?;
    if is_late(args) {
        tracing::warn!("the bundle was replaced, and with it most likely the task: nothing is deleted");
    } else {
        match directory {
            Some(directory) => response.pid = clean_up(args, directory)?.unwrap_or_default(),
            None => end_member(args)?,
        }
        // The shim that would have removed it is dead by now.
        drop(shim_socket::remove_dead(&socket_path(args)));
    }
    response.exit_status = Exit::killed().status;
    response.exited_at = Some(timestamp(SystemTime::now())).into();
    Ok(response)
}

/// Whether the bundle is that of a new task of the same id. containerd runs `delete` in the bundle, and may remove it
/// meanwhile for another request.
fn is_late(args: &Args) -> bool {
    let is_removed = env::current_dir().is_err_and(|error| error.kind() == io::ErrorKind::NotFound);
    is_removed && args.bundle.as_ref().is_some_and(|bundle| bundle.exists())
}

/// Undoes the pod with this open state directory. Returns the pid that the VMM had.
fn clean_up(args: &Args, directory: File) -> Result<Option<u32>, DeleteError> {
    let path = path_of(args, &args.id);
    let processes = PodProcesses::of(&path);
    // First, so that the programs end even if this process is killed before another one runs.
    let killed = processes.as_ref().map(|processes| processes.kill(&path));
    let within = if args.patient { WITHIN_IF_PATIENT } else { WITHIN };
    let deadline = Instant::now() + within.saturating_sub(age());
    let ran = directory.try_clone().and_then(|its| run_undo(args, its, deadline));
    let outcome = ran.unwrap_or_else(|error| {
        tracing::warn!(error = chain(&error), "no process undoes what the shim has left: this one does");
        match undo::undo(args, directory) {
            Ok(()) => Outcome::Undone,
            Err(error) => Outcome::Failed(chain(&error)),
        }
    });
    if let Outcome::Undone = outcome {
        return Ok(processes.ok().and_then(|processes| processes.vmm()));
    }
    if args.patient {
        return Err(DeleteError::Left { path });
    }
    // Why it is not known whether the programs have ended, if it is not.
    killed.ok().transpose()?;
    let processes = processes?;
    match outcome {
        Outcome::GoesOn(pid) => {
            tracing::warn!(pid, "the pod is not undone yet; a process of its own goes on")
        }
        Outcome::Failed(why) => tracing::warn!(why, "something of the pod is left; it is tried again"),
        Outcome::Undone => {}
    }
    Ok(processes.vmm())
}

/// How long ago this process began.
fn age() -> Duration {
    ProcessId::of(process::id()).ok().and_then(ProcessId::age).unwrap_or_default()
}

fn path_of(args: &Args, id: &str) -> PathBuf {
    state_dir::path_of(Path::new(STATE_ROOT), &args.address, &args.namespace, id)
}

/// Ends a container that shares the shim of its pod. If that shim is dead, containerd may ask for this container before
/// it asks for the pod. If it lives, containerd has lost the container alone.
fn end_member(args: &Args) -> Result<(), DeleteError> {
    // If the spec cannot be read, this was no container of a pod.
    let Ok(Role::Member { sandbox_id }) = create_request::role(&args.namespace, Path::new(".")) else {
        return Ok(());
    };
    let path = path_of(args, &sandbox_id);
    let processes = PodProcesses::of(&path)?;
    if processes.have_lost_their_shim() {
        processes.kill(&path)?;
    } else if let Err(error) = delete_by_shim(&socket_of(args, &sandbox_id), &args.id) {
        tracing::warn!(sandbox_id, error = chain(&error), "the pod's shim has not deleted the container");
    }
    Ok(())
}

/// Has the living shim of a pod delete a container that containerd has lost: it was restarted while the shim created
/// the container. What the shim has begun goes on if it is not done in time.
fn delete_by_shim(socket: &Path, id: &str) -> io::Result<()> {
    let within = WITHIN.saturating_sub(age());
    let deleted = async {
        let stream = match tokio::net::UnixStream::connect(socket).await {
            // The pod was deleted meanwhile.
            Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => {
                return Ok(());
            }
            connected => connected?,
        };
        let client = TaskClient::new(Client::new(Socket::new(stream)));
        let delete = api::DeleteRequest { id: id.into(), ..Default::default() };
        match client.delete(with_duration(within), &delete).await {
            // It runs.
            Err(ttrpc::Error::RpcStatus(status)) if status.code() == Code::FAILED_PRECONDITION => {}
            answer => return unless_gone(answer),
        }
        let kill = api::KillRequest { id: id.into(), signal: SIGKILL, all: true, ..Default::default() };
        unless_gone(client.kill(with_duration(within), &kill).await)?;
        let wait = api::WaitRequest { id: id.into(), ..Default::default() };
        unless_gone(client.wait(with_duration(within), &wait).await)?;
        unless_gone(client.delete(with_duration(within), &delete).await)
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async { timeout(within, deleted).await? })
}

/// It is no error if the container is gone.
fn unless_gone<T>(answer: ttrpc::Result<T>) -> io::Result<()> {
    match answer {
        Ok(_) => Ok(()),
        Err(ttrpc::Error::RpcStatus(status)) if status.code() == Code::NOT_FOUND => Ok(()),
        Err(error) => Err(io::Error::other(error)),
    }
}

/// Runs the process that undoes the pod, and passes on what it logs. It has neither stream of this process: containerd
/// waits until nobody has them.
fn run_undo(args: &Args, directory: File, deadline: Instant) -> io::Result<Outcome> {
    let (log, its_log) = UnixStream::pair()?;
    let mut child = Command::new(SELF)
        .arg0(PROGRAM)
        .args(["-namespace", &args.namespace, "-id", &args.id, "-address", &args.address, "undo"])
        .current_dir("/")
        .stdin(directory)
        .stdout(Stdio::null())
        .stderr(OwnedFd::from(its_log))
        .spawn()?;
    if !pass_on(&log, deadline)? {
        // From now on it logs elsewhere. What it has said before is passed on.
        log.shutdown(Shutdown::Read)?;
        pass_on(&log, Instant::now() + WITHIN)?;
        return Ok(Outcome::GoesOn(child.id()));
    }
    // It has closed its streams, so it ends.
    let status = child.wait()?;
    Ok(if status.success() { Outcome::Undone } else { Outcome::Failed(failure(status)) })
}

fn failure(status: ExitStatus) -> String {
    match status.signal() {
        Some(signal) => format!("signal {signal} has ended the process that undoes it"),
        None => "a step has failed".into(),
    }
}

/// Copies what a process logs to our own log, until its end. False: it has not ended in time.
fn pass_on(mut log: &UnixStream, deadline: Instant) -> io::Result<bool> {
    let mut buffer = [0; 4096];
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(false);
        }
        log.set_read_timeout(Some(left))?;
        match log.read(&mut buffer) {
            Ok(0) => return Ok(true),
            // If containerd does not read it, nobody does.
            Ok(length) => drop(io::stderr().write_all(buffer.get(..length).unwrap_or_default())),
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            Err(e) => return Err(e),
        }
    }
}
