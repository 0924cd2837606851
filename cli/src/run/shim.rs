//! The shim, which is started and asked in the same way as containerd does it. There is no other way into it.

use std::{
    env,
    ffi::OsString,
    fs::{self, File},
    io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use containerd_shim_protos::{
    api,
    shim::events::ForwardRequest,
    shim_async::{Events, create_events},
    topics,
};
use protobuf::{CodedOutputStream, Message, well_known_types::any::Any, well_known_types::empty::Empty};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, PidfdFlags, pidfd_open},
};
use ttrpc::{
    r#async::{Server, TtrpcContext},
    context::with_duration,
};

use crate::{
    command_output,
    process::{
        ProcessError,
        client::{Process, START, lost, refused},
        streams::Fifos,
    },
    run::error::RunError,
};

const PROGRAM: &str = "containerd-shim-bulkhead-v2";

/// The namespace of the containers, and the name that stands for a containerd. No file has this path.
const NAMESPACE: &str = "bulkhead-run";
const ADDRESS: &str = "/bulkhead/run";

/// The socket in the directory of a run for the shim's events.
const EVENTS: &str = "events.sock";

/// What `start` and `delete` of the shim say if they fail.
const MESSAGES: &str = "shim-stderr";

/// How long `start` and `delete` may take. `delete` itself gives up sooner.
const COMMAND: Duration = Duration::from_secs(60);

/// How long the shim may take to end after it was told to.
const END: Duration = Duration::from_secs(10);

/// The number of the field `config_path` of runtimeoptions.v1.Options.
const CONFIG_PATH_FIELD: u32 = 2;

/// A shim that runs.
pub(super) struct Shim {
    process: Process,
    id: String,
    heard: Arc<Heard>,
    /// The VMM. None: it has ended, or there is none yet.
    vmm: OnceLock<Option<OwnedFd>>,
    /// Receives the events.
    _server: Server,
}

/// What the shim's events say.
#[derive(Debug, Default)]
struct Heard {
    is_oom: AtomicBool,
}

#[async_trait]
impl Events for Heard {
    async fn forward(&self, _: &TtrpcContext, request: ForwardRequest) -> ttrpc::Result<Empty> {
        if request.envelope.topic == topics::TASK_OOM_EVENT_TOPIC {
            self.is_oom.store(true, Ordering::Relaxed);
        }
        Ok(Empty::new())
    }
}

impl Shim {
    /// Starts the shim of a container, whose bundle is `bundle`, and connects to it. Calls `started` with the pid of
    /// the command when there is something to delete: not if there is no shim on this machine, which could not delete
    /// it either.
    pub(super) async fn start(
        id: &str,
        bundle: &Path,
        config: Option<&Path>,
        started: impl FnOnce(u32) + Send + 'static,
    ) -> Result<Self, RunError> {
        let events = bundle.join(EVENTS);
        let heard = Arc::new(Heard::default());
        let mut server = Server::new()
            .bind(&format!("unix://{}", events.display()))
            .map_err(lost)?
            .register_service(create_events(heard.clone()));
        server.start().await.map_err(lost)?;
        let mut command = command(id, bundle);
        command.env("TTRPC_ADDRESS", &events).arg("start");
        let input =
            config.map_or(Ok(Vec::new()), options).map_err(|e| RunError::Shim(io::Error::other(e)))?;
        let bundle = bundle.to_owned();
        // This thread handles signals and deadlines meanwhile.
        let asked = tokio::task::spawn_blocking(move || ask(command, &input, &bundle, started));
        let answer = asked.await.map_err(|error| ProcessError::Begin(io::Error::other(error)))??;
        let address = answer.trim();
        if !address.starts_with("unix://") {
            return Err(RunError::Address { answer });
        }
        Ok(Self {
            process: Process::connect(address, id, "").await?,
            id: id.into(),
            heard,
            vmm: OnceLock::new(),
            _server: server,
        })
    }

    /// Creates the container with this overlay as its root. Returns the pid of the VMM.
    pub(super) async fn create(
        &self,
        bundle: &Path,
        root: api::Mount,
        fifos: &Fifos,
    ) -> Result<u32, RunError> {
        let uri = |path: &Path| path.display().to_string();
        let mut request = api::CreateTaskRequest::new();
        request.id = self.id.clone();
        request.bundle = bundle.display().to_string();
        request.rootfs = vec![root];
        request.stdin = fifos.stdin.as_deref().map(uri).unwrap_or_default();
        request.stdout = uri(&fifos.stdout.path);
        match &fifos.stderr {
            Some(stderr) => request.stderr = uri(&stderr.path),
            None => request.terminal = true,
        }
        let created = self.process.client().create(with_duration(START), &request).await.map_err(refused)?;
        // The process of a task is the VMM of its pod.
        _ = self.vmm.set(process(created.pid));
        Ok(created.pid)
    }

    /// Whether the VM was created and has ended.
    pub(super) fn has_no_vm(&self) -> bool {
        match self.vmm.get() {
            None => false,
            Some(None) => true,
            Some(Some(vmm)) => has_ended(vmm, Duration::ZERO),
        }
    }

    /// The program of the container.
    pub(super) fn process(&self) -> &Process {
        &self.process
    }

    /// Whether the kernel has killed a process for want of memory.
    pub(super) fn is_oom(&self) -> bool {
        self.heard.is_oom.load(Ordering::Relaxed)
    }

    /// Removes the container, whose program has ended, and waits for the end of the shim.
    pub(super) async fn end(&self) -> Result<(), RunError> {
        let process = process(self.process.shim_pid().await?);
        self.process.delete().await?;
        self.shut_down().await?;
        // Without this descriptor it is gone already.
        let Some(process) = process else { return Ok(()) };
        // Its last events need this thread.
        let ended = tokio::task::spawn_blocking(move || has_ended(&process, END)).await;
        match ended {
            Ok(true) => Ok(()),
            _ => Err(ProcessError::Lost { reason: format!("it has not ended within {END:?}") }.into()),
        }
    }

    /// Tells the shim to end. It does that if it has no container.
    pub(super) async fn shut_down(&self) -> Result<(), ProcessError> {
        let mut request = api::ShutdownRequest::new();
        request.id = self.id.clone();
        self.process.client().shutdown(with_duration(END), &request).await.map(drop).map_err(refused)
    }
}

/// A descriptor of a process. None: it has ended.
fn process(pid: u32) -> Option<OwnedFd> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw)?;
    pidfd_open(pid, PidfdFlags::empty()).ok()
}

/// Whether the process ends within this time.
fn has_ended(process: &OwnedFd, within: Duration) -> bool {
    let limit = Timespec::try_from(within).unwrap_or_default();
    poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&limit)).is_ok_and(|ready| ready > 0)
}

/// Kills the shim of a container, if it lives, and undoes what it has done to the host.
pub(super) fn delete(id: &str, bundle: &Path) -> Result<(), RunError> {
    let mut command = command(id, bundle);
    command.arg("-bundle").arg(bundle).args(["-patient", "delete"]);
    ask(command, &[], bundle, |_| ()).map(drop)
}

/// The shim in its bundle, without the environment of this command.
fn command(id: &str, bundle: &Path) -> Command {
    let mut command = Command::new(program_path());
    command.current_dir(bundle).env_clear();
    if let Some(path) = env::var_os("PATH") {
        command.env("PATH", path);
    }
    command.args(["-namespace", NAMESPACE, "-id", id, "-address", ADDRESS, "-publish-binary", ""]);
    command
}

/// The shim beside this program, or else the one in PATH, where containerd finds it.
fn program_path() -> OsString {
    let beside = env::current_exe().ok().map(|own| own.with_file_name(PROGRAM));
    beside.filter(|path| path.exists()).map_or_else(|| PROGRAM.into(), PathBuf::into_os_string)
}

/// Runs a command of the shim.
fn ask(
    mut command: Command,
    input: &[u8],
    bundle: &Path,
    started: impl FnOnce(u32) + Send + 'static,
) -> Result<String, RunError> {
    let messages = bundle.join(MESSAGES);
    let failed = |source| RunError::Prepare { path: messages.clone(), source };
    command.stderr(File::create(&messages).map_err(failed)?);
    match command_output::answer_and_tell(command, input, COMMAND, started) {
        Ok(answer) => Ok(answer),
        Err(error) => match fs::read_to_string(&messages) {
            Ok(text) if !text.trim().is_empty() => Err(ProcessError::Refused(text.trim().into()).into()),
            _ if error.kind() == io::ErrorKind::NotFound => Err(RunError::NoShim(error)),
            _ => Err(RunError::Shim(error)),
        },
    }
}

/// The options of a runtime with another configuration, as containerd writes them to `start`.
fn options(config: &Path) -> protobuf::Result<Vec<u8>> {
    let mut any = Any::new();
    any.type_url = "runtimeoptions.v1.Options".into();
    let mut writer = CodedOutputStream::vec(&mut any.value);
    writer.write_string(CONFIG_PATH_FIELD, &config.display().to_string())?;
    writer.flush()?;
    drop(writer);
    any.write_to_bytes()
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn there_is_something_to_delete_from_the_start_of_a_shim_on() {
        let bundle = tempfile::tempdir().unwrap();
        let ask = |program: &str| {
            let (sender, started) = mpsc::channel();
            let error = ask(Command::new(program), &[], bundle.path(), move |pid| sender.send(pid).unwrap())
                .unwrap_err();
            (error, started.try_recv().is_ok())
        };
        assert!(matches!(ask("/nonexistent/shim"), (RunError::NoShim(_), false)));
        assert!(matches!(ask("false"), (RunError::Shim(_), true)));
    }

    #[test]
    fn another_configuration_is_an_option_of_the_runtime() {
        let bytes = options(Path::new("/run/c.toml")).unwrap();
        let any = Any::parse_from_bytes(&bytes).unwrap();
        assert_eq!(any.type_url, "runtimeoptions.v1.Options");
        assert_eq!(any.value, b"\x12\x0b/run/c.toml");
    }
}
