//! The VMM's process: its configuration, its start, its growth, its end.

mod resize;

use resize::Requested;
pub(crate) use resize::Room;

use std::{
    fs::{self, File},
    io::{self, Read, Seek, SeekFrom},
    os::unix::process::ExitStatusExt,
    path::{Path, PathBuf},
    process::{ExitStatus, Stdio},
    sync::Arc,
    time::Duration,
};

use bulkhead_agent_api::{API_VERSION as AGENT_API_VERSION, READY_PORT};
use bulkhead_vmm_api::{EXIT_NO_KVM, EXIT_NOT_RESTORED, GUEST_SAYS, RUNNING, VmConfig};
use rustix::process::Signal;
use tokio::{
    io::{AsyncRead, AsyncReadExt},
    net::UnixListener,
    process::{Child, ChildStdout, Command},
    sync::watch,
    time::{Instant, sleep, timeout},
};

use crate::{
    host::{
        blocking,
        child_log::read_own_lines,
        journal::{Effect, Journal},
        patience::{Patience, Progress},
        process_id::{ProcessId, VMM_OPTION, spawn_alone},
        state_dir::{StateDir, VMM_CONFIG},
    },
    types::{error::chain, text::one_line},
    vm::{
        control_socket::{Control, ResizeError},
        memory::{Charged, MemoryRange},
        vsock::Vsock,
        working_set,
    },
};

pub(super) const CONFIG: &str = VMM_CONFIG;
pub(super) const CONTROL: &str = "control.sock";
pub(super) const VSOCK: &str = "vsock.sock";

/// How long a VM may take until its agent is ready. A guest that fails ends its VMM long before. On a host that
/// starts all of its pods at once each VM has a share of a processor. The kubelet waits 4 minutes for a pod.
const READY: Duration = Duration::from_secs(180);

/// How long a shim may take to record which pages its VM has touched. It reads a few files of /proc.
const RECORD: Duration = Duration::from_secs(2);

/// How long a VMM may go without processor time meanwhile, and how often this is checked. One that starts a VM is
/// busy. One that is not has been stopped, or hangs in the host's kernel.
const STALLED: Duration = Duration::from_secs(30);
const LOOK: Duration = Duration::from_secs(5);

/// What it means if a VMM exits with status 0.
const GUEST_ENDED: &str =
    "the guest powered off or reset, as it does after a panic, or the VMM was told to stop";
/// What is to be done to hear of a guest's failure.
const NO_CONSOLE: &str = "set `console = true` in /etc/bulkhead/config.toml, or in the file that the options of the \
                          runtime name, to see what it says";
/// How much of a console is read, bytes.
const CONSOLE_END: u64 = 64 << 10;
/// How the kernel and the agent begin the line that says why the guest ends. A call trace may follow.
const REASONS: [&str; 2] = ["Kernel panic - not syncing", "bulkhead-agent: fatal"];

/// How long after the VMM's end its last line may take to be read.
const STDERR_LIMIT: Duration = Duration::from_secs(1);

/// How long a VMM that was killed may take to end if it makes no progress, and its last line to be read. Then how long
/// it may take in all: it has the memory of its guest to give back.
const KILLED: Duration = Duration::from_secs(2);
const KILLED_AT_MOST: Duration = Duration::from_secs(20);

/// A VM, from the spawn of its VMM on. The VMM outlives the value. Undoing the journal ends it.
#[derive(Debug, Clone)]
pub(crate) struct Vm {
    process: ProcessId,
    end: watch::Sender<Option<VmExit>>,
    vsock: Vsock,
    control: Control,
    memory: MemoryRange,
    charged: Charged,
    /// Huge pages come from a pool that the operator has made as large as the VMs are to be.
    grows_on_demand: bool,
    /// The directory of the template that the VM is a clone of.
    template: Option<PathBuf>,
    /// Locked until the VMM has taken a request on, so that they come in this order.
    requested: Arc<tokio::sync::Mutex<Requested>>,
}

/// The share's tag on virtio-fs.
pub(crate) const SHARE_TAG: &str = "share";
/// The tag of the same share, for what only the guest changes.
pub(crate) const ROOTS_TAG: &str = "roots";

/// How the VM ended.
#[derive(Debug, Clone)]
pub(crate) enum VmExit {
    /// With its VMM.
    Ended {
        status: ExitStatus,
        /// The last line of its own that the VMM wrote to its standard error: the reason, if there is one.
        last_line: String,
        /// What is known of the guest's end, if the guest has said something, or has ended the VM.
        guest: Option<String>,
    },
    /// The VMM was killed, and a thread of it hangs in the host's kernel. No other thread of it runs, and so no vCPU.
    /// The system call that hangs may complete later: then data that it was writing reaches the disk, perhaps after
    /// Delete. Until the process has ended it has the pod's disks open, so the host's claim on them stays.
    Hangs { pid: u32 },
}

/// Why there is no VM.
#[derive(Debug, thiserror::Error)]
pub(crate) enum VmError {
    #[error("cannot prepare {path}")]
    Prepare { path: PathBuf, source: io::Error },
    #[error("cannot start {path}")]
    Spawn { path: PathBuf, source: io::Error },
    #[error("the VM ended: {0}")]
    Ended(String),
    #[error("the VM ended: {0}")]
    NoKvm(String),
    /// It can boot instead.
    #[error("cannot restore the VM from its template: {0}")]
    NotRestored(String),
    #[error("cannot grow the VM to the {wanted_mib} MiB that the limits of its containers require")]
    Grow { wanted_mib: u32, source: ResizeError },
    #[error(
        "linux.resources.hugepageLimits[2MB]: huge pages of {wanted_mib} MiB do not fit into a VM, which can have \
         {most_mib} MiB; lower the limit, or raise max_memory_mib if it is set"
    )]
    HugePages { wanted_mib: u64, most_mib: u32 },
    #[error("cannot grow the VM to {wanted_mib} MiB for containers without a memory limit")]
    GrowOnDemand { wanted_mib: u32, source: ResizeError },
    #[error("cannot wait for the guest")]
    Wait(#[source] io::Error),
    #[error(
        "the agent in the initramfs speaks version {found} of its interface, this shim version {AGENT_API_VERSION}; install both from one release"
    )]
    Version { found: u32 },
    #[error("the guest was not ready within {} s; {advice}", READY.as_secs())]
    Timeout { advice: String },
    #[error(
        "the VMM did nothing for {} s while the guest was to start; it is stopped, or its host's storage hangs",
        STALLED.as_secs()
    )]
    Stalled,
}

impl From<VmExit> for VmError {
    fn from(exit: VmExit) -> Self {
        match exit.code() {
            Some(code) if code == i32::from(EXIT_NO_KVM) => Self::NoKvm(exit.to_string()),
            _ => Self::Ended(exit.to_string()),
        }
    }
}

impl VmExit {
    /// Whether it ended as it should.
    pub(crate) fn is_success(&self) -> bool {
        matches!(self, Self::Ended { status, .. } if status.success())
    }

    /// The exit code of the VMM.
    fn code(&self) -> Option<i32> {
        match self {
            Self::Ended { status, .. } => status.code(),
            Self::Hangs { .. } => None,
        }
    }
}

impl std::fmt::Display for VmExit {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Hangs { pid } => write!(
                formatter,
                "the VMM, process {pid}, was killed and does not end: most likely a disk or a file system of the host \
                 hangs; what it was writing may still reach the disk when that continues"
            ),
            Self::Ended { status, guest: Some(guest), .. } if status.success() => {
                write!(formatter, "{GUEST_ENDED}; {guest}")
            }
            // The last line of a VMM that was killed is not the reason of its end.
            Self::Ended { status, last_line, guest }
                if !last_line.is_empty() && status.signal() != Some(Signal::KILL.as_raw()) =>
            {
                formatter.write_str(last_line)?;
                guest.iter().try_for_each(|guest| write!(formatter, "; {guest}"))
            }
            Self::Ended { status, .. } => {
                write!(formatter, "the VMM ended and gave no reason ({status})")
            }
        }
    }
}

/// Records that files of these names may be made in the state directory.
pub(crate) fn record_files(journal: &mut Journal, state: &StateDir, names: &[&str]) -> Result<(), VmError> {
    names.iter().try_for_each(|name| {
        let path = state.path().join(name);
        journal
            .record(Effect::File { path: path.clone() })
            .map_err(|source| VmError::Prepare { path, source })
    })
}

/// The listener that an agent connects to when it is ready.
#[derive(Debug)]
pub(crate) struct ReadyListener(std::os::unix::net::UnixListener);

impl ReadyListener {
    /// For the agent behind the VMM's socket `vsock`. Blocks.
    pub(crate) fn bind(journal: &mut Journal, state: &StateDir, vsock: &str) -> Result<Self, VmError> {
        let name = format!("{vsock}_{READY_PORT}");
        record_files(journal, state, &[&name])?;
        let path = state.socket(&name);
        std::os::unix::net::UnixListener::bind(&path)
            .and_then(|listener| listener.set_nonblocking(true).map(|()| Self(listener)))
            .map_err(|source| VmError::Prepare { path, source })
    }

    /// Waits for the agent's only message: the version of its interface.
    async fn heard(self) -> Result<(), VmError> {
        let listener = UnixListener::from_std(self.0).map_err(VmError::Wait)?;
        let (stream, _) = listener.accept().await.map_err(VmError::Wait)?;
        ready_word(stream).await
    }
}

pub(crate) async fn ready_word(mut stream: impl AsyncRead + Unpin) -> Result<(), VmError> {
    match stream.read_u32_le().await.map_err(VmError::Wait)? {
        AGENT_API_VERSION => Ok(()),
        found => Err(VmError::Version { found }),
    }
}

/// A VMM that was just spawned.
struct Spawned {
    vm: Vm,
    stdout: Option<ChildStdout>,
}

/// Starts VMMs for a pod.
pub(crate) struct Launcher<'s> {
    pub(crate) journal: &'s mut Journal,
    pub(crate) state: &'s StateDir,
    /// The VMM's program.
    pub(crate) vmm: PathBuf,
}

impl Launcher<'_> {
    /// Boots a VM, whose configuration becomes the file `name`, and waits until its agent is ready or the VMM has
    /// ended.
    pub(crate) async fn boot(
        &mut self,
        name: &str,
        config: &VmConfig,
        listener: ReadyListener,
    ) -> Result<Vm, VmError> {
        let Spawned { vm, .. } = self.spawn(name, config).await?;
        tokio::select! {
            ready = listener.heard() => ready?,
            exit = vm.exited() => return Err(exit.into()),
            is_stalled = overdue(vm.process) => {
                if is_stalled {
                    return Err(VmError::Stalled);
                }
                let console = config.console.as_ref().map(|console| self.state.path().join(console));
                return Err(VmError::Timeout { advice: advice(console.as_deref()) });
            }
        }
        Ok(vm)
    }

    /// Starts a clone, whose agent was ready when it was saved, and waits until it runs or the VMM has ended.
    pub(super) async fn restore(&mut self, config: &VmConfig) -> Result<Vm, VmError> {
        let Spawned { vm, stdout } = self.spawn(CONFIG, config).await?;
        let ended = async { if says_it_runs(stdout).await { None } else { Some(vm.exited().await) } };
        tokio::select! {
            ended = ended => match ended {
                None => Ok(vm),
                Some(exit) if exit.code() == Some(EXIT_NOT_RESTORED.into()) => {
                    Err(VmError::NotRestored(exit.to_string()))
                }
                Some(exit) => Err(exit.into()),
            },
            is_stalled = overdue(vm.process) => match is_stalled {
                true => Err(VmError::Stalled),
                false => Err(VmError::Timeout { advice: advice(None) }),
            },
        }
    }

    /// Writes the VMM's configuration to the file `name` and spawns it.
    async fn spawn(&mut self, name: &str, config: &VmConfig) -> Result<Spawned, VmError> {
        let path = self.state.path().join(name);
        serde_json::to_vec_pretty(config)
            .map_err(io::Error::from)
            .and_then(|json| fs::write(&path, json))
            .map_err(|source| VmError::Prepare { path: path.clone(), source })?;
        let spawn = |source| VmError::Spawn { path: self.vmm.clone(), source };
        self.journal.record(Effect::VmmSpawn { config: path.clone() }).map_err(spawn)?;
        let mut command = Command::new(&self.vmm);
        command
            .arg(VMM_OPTION)
            .arg(&path)
            .current_dir(self.state.path())
            .env_clear()
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = spawn_alone(command).await.map_err(spawn)?;
        let pid = child.id().ok_or_else(|| spawn(io::Error::other("it has no pid")))?;
        let process = ProcessId::of(pid).map_err(spawn)?;
        self.journal.record(Effect::Vmm(process)).map_err(spawn)?;

        let stdout = child.stdout.take();
        let end = watch::Sender::new(None);
        let console = config.console.as_ref().map(|console| self.state.path().join(console));
        tokio::spawn(attend(child, end.clone(), console));
        let vsock = Vsock::new(self.state.socket(&config.vsock));
        let control = Control::new(self.state.socket(&config.control));
        let memory = MemoryRange {
            least: config.memory_mib,
            most: config.max_memory_mib.unwrap_or(config.memory_mib),
        };
        let charged = if config.restore_from.is_some() { Charged::Clone } else { Charged::Whole };
        let requested = Requested { mib: memory.least, reached_mib: memory.least, huge_pages_mib: 0 };
        let grows_on_demand = !config.hugepages;
        let vm = Vm {
            process,
            end,
            vsock,
            control,
            memory,
            charged,
            grows_on_demand,
            template: config.restore_from.clone(),
            requested: Arc::new(tokio::sync::Mutex::new(requested)),
        };
        Ok(Spawned { vm, stdout })
    }
}

/// Waits until a VMM has taken too long to start its VM. Returns true if the reason is that it used no processor
/// time for [`STALLED`].
async fn overdue(vmm: ProcessId) -> bool {
    let begun = Instant::now();
    let (mut used, mut since) = (None, begun);
    while begun.elapsed() < READY {
        let now = vmm.cpu_time().ok();
        if now != used {
            (used, since) = (now, Instant::now());
        } else if since.elapsed() >= STALLED {
            return true;
        }
        sleep(LOOK).await;
    }
    false
}

async fn says_it_runs(stdout: Option<ChildStdout>) -> bool {
    let Some(mut stdout) = stdout else { return false };
    let mut word = [0; RUNNING.len()];
    stdout.read_exact(&mut word).await.is_ok_and(|_| word == *RUNNING.as_bytes())
}

impl Vm {
    /// The pid of the VMM.
    pub(crate) fn pid(&self) -> u32 {
        self.process.pid
    }

    /// The process of the VMM.
    pub(crate) fn process(&self) -> ProcessId {
        self.process
    }

    /// The guest's ports.
    pub(crate) fn vsock(&self) -> &Vsock {
        &self.vsock
    }

    /// Records what a clone has touched until its first container is made, so that the next clones begin with it. Call
    /// this before that container runs.
    pub(crate) async fn record_working_set(&self) {
        let Some(template) = &self.template else { return };
        // All clones but the first: they need no thread for it.
        if working_set::is_recorded(template) {
            return;
        }
        let (pid, dir, template) = (self.pid(), template.clone(), template.clone());
        // What comes late is not written: the container may have run by then.
        let recorded = async {
            let read = timeout(RECORD, blocking::run(move || working_set::read(pid, &dir), drop)).await?;
            let json = read.map_err(io::Error::other)??;
            let written = blocking::run(move || working_set::write(&template, &json), drop).await;
            written.map_err(io::Error::other)?
        };
        // Each later clone tries again.
        if let Err(error) = recorded.await {
            tracing::info!(error = chain(&error), "cannot record the template's working set");
        }
    }

    /// Requests to the VMM.
    pub(crate) fn control(&self) -> &Control {
        &self.control
    }

    /// Ends the VMM at once, and waits for that. If it does not end in time, the VM counts as ended nevertheless: its
    /// vCPUs have, so nothing runs in it any more.
    pub(crate) async fn kill(&self) {
        let pid = self.process.pid;
        if self.has_exited() {
            return;
        }
        if let Err(error) = self.process.send_kill() {
            return tracing::error!(pid, error = chain(&error), "cannot kill the VMM");
        }
        let patience = Patience::new(KILLED, KILLED_AT_MOST);
        if self.exits_within(patience, || self.process.progress()).await {
            return;
        }
        let hangs = VmExit::Hangs { pid };
        tracing::error!(pid, "{hangs}");
        self.end.send_if_modified(|end| {
            let is_first = end.is_none();
            end.get_or_insert(hangs);
            is_first
        });
    }

    /// Waits for the end of the VMM, of which `progress` tells.
    async fn exits_within(&self, patience: Patience, progress: impl FnMut() -> Option<Progress>) -> bool {
        for within in patience.waits(progress) {
            if timeout(within, self.exited()).await.is_ok() {
                return true;
            }
        }
        false
    }

    /// Whether the VM has ended.
    pub(crate) fn has_exited(&self) -> bool {
        self.end.borrow().is_some()
    }

    /// Waits for the VM's end.
    pub(crate) async fn exited(&self) -> VmExit {
        let mut end = self.end.subscribe();
        match end.wait_for(Option::is_some).await.map(|exit| exit.clone()) {
            Ok(Some(exit)) => exit,
            // An error would mean that the sender is gone, which is this VM's own.
            Ok(None) | Err(_) => std::future::pending().await,
        }
    }
}

/// Waits for the VMM's end, and publishes it. `console` is the file with the guest's console, if there is one.
async fn attend(mut child: Child, end: watch::Sender<Option<VmExit>>, console: Option<PathBuf>) {
    let stderr = tokio::spawn(hear(child.stderr.take()));
    match child.wait().await {
        Ok(status) => {
            let Heard { last_line, guest } = match tokio::time::timeout(STDERR_LIMIT, stderr).await {
                Ok(Ok(heard)) => heard,
                Ok(Err(_)) | Err(_) => Heard::default(),
            };
            let guest = match guest {
                None if status.success() && last_line.is_empty() => Some(console_says(console).await),
                said => said,
            };
            tracing::info!(%status, "the VMM ended");
            end.send_replace(Some(VmExit::Ended { status, last_line, guest }));
        }
        Err(e) => tracing::error!(error = chain(&e), "cannot wait for the VMM"),
    }
}

/// What a VMM has written to its standard error.
#[derive(Debug, Default, PartialEq)]
struct Heard {
    /// The last line of its own.
    last_line: String,
    /// A clause about the line of its guest that has the reason of the end, or else about the last one, which may be
    /// much older than the end.
    guest: Option<String>,
}

/// Logs what the VMM says, and what its guest has said when it ended.
async fn hear(stderr: Option<impl AsyncRead + Unpin>) -> Heard {
    let (mut reason, mut last) = (None, None);
    let is_own = |line: &str| {
        let Some(line) = line.strip_prefix(GUEST_SAYS) else { return true };
        let place = if is_reason(&line) { &mut reason } else { &mut last };
        *place = Some(line.to_owned());
        false
    };
    let last_line = read_own_lines("vmm".into(), stderr, is_own).await;
    let reason = reason.map(|line| format!("its last words: {line}"));
    Heard { last_line, guest: reason.or(last.map(|line| format!("it once said: {line}"))) }
}

/// What the user can do about a guest that was not ready in time.
fn advice(console: Option<&Path>) -> String {
    let Some(console) = console else { return NO_CONSOLE.into() };
    let text = console_text(console);
    for line in text.lines().rev().take(20).collect::<Vec<_>>().into_iter().rev() {
        tracing::warn!(console = one_line(line), "the guest was not ready in time");
    }
    last_line(&text)
}

/// What a guest that has ended has said, or how to hear of it.
async fn console_says(console: Option<PathBuf>) -> String {
    let Some(console) = console else { return NO_CONSOLE.into() };
    let read = blocking::run(move || last_line(&console_text(&console)), drop);
    let line = timeout(STDERR_LIMIT, read).await.ok().and_then(Result::ok);
    line.unwrap_or_else(|| "its console cannot be read".into())
}

/// The end of a console. A VMM that its guest has taken over may have written any amount.
fn console_text(console: &Path) -> String {
    let read = || -> io::Result<Vec<u8>> {
        let mut file = File::open(console)?;
        file.seek(SeekFrom::Start(file.metadata()?.len().saturating_sub(CONSOLE_END)))?;
        let mut text = Vec::new();
        file.take(CONSOLE_END).read_to_end(&mut text)?;
        Ok(text)
    };
    String::from_utf8_lossy(&read().unwrap_or_default()).into_owned()
}

fn is_reason(line: &&str) -> bool {
    REASONS.iter().any(|reason| line.contains(reason))
}

/// The line of a console that has the reason of an end: the kernel's, the agent's, or else the last one.
fn last_line(text: &str) -> String {
    let line = text.lines().rfind(is_reason).or(text.lines().rfind(|line| !line.trim().is_empty()));
    match line {
        Some(line) => format!("its console ends with: {}", one_line(line.trim())),
        None => "its console is empty".into(),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use tokio::{io::AsyncWriteExt, net::UnixStream};

    use super::*;
    use crate::{
        host::state_dir::CONSOLE,
        testing::{Log, Unending, is_on_troubleshooting_page, private_mounts},
        types::config::Config,
        vm::{
            memory::Needs,
            start::{VmRequest, prepare},
        },
    };

    struct Host {
        dir: tempfile::TempDir,
        state: StateDir,
        journal: Journal,
        console: bool,
    }

    fn host() -> Host {
        let dir = tempfile::tempdir().unwrap();
        let (state, journal) = StateDir::create(&dir.path().join("run/c/ns/demo"), &[]).unwrap();
        Host { dir, state, journal, console: false }
    }

    impl Host {
        /// A VM whose VMM is a shell script.
        async fn boot(&mut self, script: &str) -> Result<Vm, VmError> {
            let vmm = self.dir.path().join("vmm");
            fs::write(&vmm, format!("#!/bin/sh\n{script}\n")).unwrap();
            fs::set_permissions(&vmm, fs::Permissions::from_mode(0o755)).unwrap();
            let config = Config { vmm, templates: false, console: self.console, ..Config::default() };
            let request = VmRequest::of_one_vcpu(&config);
            let files = prepare(&mut self.journal, &self.state, &config, request).unwrap();
            Vm::start(&mut self.journal, &self.state, files).await
        }

        fn remove(self) {
            self.state.remove(self.journal).unwrap();
            assert!(!self.dir.path().join("run").exists());
        }
    }

    #[tokio::test]
    async fn the_vmms_last_line_is_the_reason() {
        let mut host = host();
        let error = host.boot("echo first >&2; echo '/dev/kvm: No such file' >&2; exit 1").await.unwrap_err();
        assert_eq!(error.to_string(), "the VM ended: /dev/kvm: No such file");
        let error = host_without_words(&mut host).await;
        fs::remove_file(host.state.path().join("vsock.sock_1026")).unwrap();
        let no_kvm = host.boot("echo 'KVM is missing' >&2; exit 4").await.unwrap_err();
        assert!(matches!(&no_kvm, VmError::NoKvm(reason) if reason == "KVM is missing"), "{no_kvm:?}");
        assert_eq!(error, "the VM ended: the VMM ended and gave no reason (exit status: 3)");
        host.remove();
    }

    #[tokio::test]
    async fn a_guest_that_panics_is_reported_with_what_its_console_says() {
        private_mounts();
        let mut host = host();
        let error = host.boot("exit 0").await.unwrap_err().to_string();
        assert_eq!(error, format!("the VM ended: {GUEST_ENDED}; {NO_CONSOLE}"));
        fs::remove_file(host.state.path().join("vsock.sock_1026")).unwrap();
        host.console = true;
        let panic = "Kernel panic - not syncing: Attempted to kill init!";
        let script = format!("printf 'booting\\n{panic}\\nCall Trace:\\n' >{CONSOLE}; exit 0");
        let error = host.boot(&script).await.unwrap_err().to_string();
        assert_eq!(error, format!("the VM ended: {GUEST_ENDED}; its console ends with: {panic}"));
        host.remove();
    }

    #[tokio::test]
    async fn a_guest_without_a_console_that_panics_is_reported_with_its_last_words() {
        let mut host = host();
        let panic = "Kernel panic - not syncing: Attempted to kill init!";
        let script = format!("for it in one '{panic}' two; do echo guest: $it >&2; done");
        let error = host.boot(&script).await.unwrap_err().to_string();
        assert_eq!(error, format!("the VM ended: {GUEST_ENDED}; its last words: {panic}"));
        fs::remove_file(host.state.path().join("vsock.sock_1026")).unwrap();
        let script = "echo 'guest: BUG: oops' >&2; echo 'bulkhead-vmm: triple fault' >&2; exit 1";
        let error = host.boot(script).await.unwrap_err().to_string();
        assert_eq!(error, "the VM ended: bulkhead-vmm: triple fault; it once said: BUG: oops");
        host.remove();
    }

    #[tokio::test]
    async fn a_guest_chooses_neither_the_lines_of_its_vmm_nor_their_number() {
        let flood = "guest: x\u{1b}[2Jy bulkhead-vmm: forged\n".repeat(1000);
        let heard = hear(Some([flood.as_bytes(), &[b'z'; 1 << 16]].concat().as_slice())).await;
        let guest = Some("it once said: x [2Jy bulkhead-vmm: forged".to_owned());
        assert_eq!(heard, Heard { last_line: "z".repeat(4096), guest });
    }

    #[tokio::test]
    async fn a_vmm_that_its_guest_has_taken_over_fills_its_console_and_nothing_else() {
        private_mounts();
        let mut host = host();
        host.console = true;
        let flood = format!("head -c 9000000 /dev/zero >>{CONSOLE}; exit 3");
        let error = host.boot(&flood).await.unwrap_err().to_string();
        assert!(error.contains("No space left on device"), "{error}");
        assert_eq!(fs::metadata(host.state.path().join(CONSOLE)).unwrap().len(), 5 << 20);
        host.remove();
    }

    #[tokio::test]
    async fn a_vmm_that_does_nothing_is_not_waited_for_as_long_as_a_slow_one() {
        let mut host = host();
        tokio::time::pause();
        let begun = Instant::now();
        let error = host.boot("exec sleep 1000").await.unwrap_err();
        assert!(matches!(error, VmError::Stalled), "{error}");
        assert!(begun.elapsed() < 2 * STALLED);
        tokio::time::resume();
        host.remove();
    }

    #[tokio::test]
    async fn the_vmm_can_name_no_other_process() {
        let mut host = host();
        let error = host.boot("echo $$ >&2; exit 1").await.unwrap_err();
        assert_eq!(error.to_string(), "the VM ended: 1");
        host.remove();
    }

    async fn host_without_words(host: &mut Host) -> String {
        fs::remove_file(host.state.path().join("vsock.sock_1026")).unwrap();
        host.boot("exit 3").await.unwrap_err().to_string()
    }

    #[tokio::test]
    async fn a_vmm_that_cannot_be_run_is_named() {
        let mut host = host();
        let config = Config { vmm: "/nonexistent/vmm".into(), templates: false, ..Config::default() };
        let request = VmRequest::of_one_vcpu(&config);
        let files = prepare(&mut host.journal, &host.state, &config, request).unwrap();
        let error = Vm::start(&mut host.journal, &host.state, files).await.unwrap_err();
        assert_eq!(error.to_string(), "cannot start /nonexistent/vmm");
        host.remove();
    }

    /// What the agent does.
    async fn be_ready(socket: &Path) {
        let mut stream = loop {
            match UnixStream::connect(socket).await {
                Ok(stream) => break stream,
                Err(_) => tokio::time::sleep(Duration::from_millis(1)).await,
            }
        };
        stream.write_u32_le(AGENT_API_VERSION).await.unwrap();
    }

    #[tokio::test]
    async fn is_ready_when_the_agent_says_so_and_ends_with_its_vmm() {
        let mut host = host();
        let ready = host.state.socket("vsock.sock_1026");
        let (vm, ()) = tokio::join!(host.boot("echo odd >&2; exec sleep 60"), be_ready(&ready));
        let vm = vm.unwrap();
        let config: VmConfig =
            serde_json::from_slice(&fs::read(host.state.path().join(CONFIG)).unwrap()).unwrap();
        assert_eq!((config.memory_mib, config.shares[0].dir.as_path()), (256, Path::new("share")));
        vm.kill().await;
        let exit = tokio::time::timeout(Duration::from_secs(1), vm.exited()).await.unwrap();
        assert_eq!(exit.to_string(), "the VMM ended and gave no reason (signal: 9 (SIGKILL))");
        host.remove();
    }

    #[tokio::test]
    async fn a_cgroup_that_allows_less_than_the_limits_is_named() {
        let mut host = host();
        let ready = host.state.socket("vsock.sock_1026");
        let (vm, ()) = tokio::join!(host.boot("exec sleep 60"), be_ready(&ready));
        let vm = vm.unwrap();
        let text = "the pod's cgroup allows less than";
        for (allowed_mib, is_too_little) in [(256, false), (128, true)] {
            let log = Log::begin();
            let needs = Needs { limits: 100 << 20, huge_pages: 0 };
            // Whether the VM gets another size is another matter: nobody plays its control socket.
            _ = vm.fit_memory(needs, Some(allowed_mib << 20)).await;
            let lines = log.lines();
            assert_eq!(lines.iter().any(|line| line.contains(text)), is_too_little, "{lines:?}");
        }
        assert!(is_on_troubleshooting_page(text));
        vm.kill().await;
        host.remove();
    }

    #[tokio::test]
    async fn a_vm_has_ended_although_its_vmm_hangs_after_it_was_killed() {
        let mut host = host();
        let ready = host.state.socket("vsock.sock_1026");
        let (vm, ()) = tokio::join!(host.boot("exec sleep 60"), be_ready(&ready));
        let vm = vm.unwrap();
        let unending = Unending::new(vm.pid());
        vm.kill().await;
        assert!(vm.has_exited() && vm.process().may_live());
        let exit = vm.exited().await;
        assert!(!exit.is_success() && exit.to_string().contains(&format!("process {}", vm.pid())), "{exit}");
        drop(unending);
        // It ends, and that is heard of too.
        let ended = async {
            vm.end.subscribe().wait_for(|end| matches!(end, Some(VmExit::Ended { .. }))).await.map(drop)
        };
        timeout(Duration::from_secs(10), ended).await.unwrap().unwrap();
        host.remove();
    }

    #[tokio::test]
    async fn a_vmm_that_is_slow_to_end_does_not_hang() {
        let mut host = host();
        let ready = host.state.socket("vsock.sock_1026");
        let (vm, ()) = tokio::join!(host.boot("exec sleep 60"), be_ready(&ready));
        let vm = vm.unwrap();
        let mut unending = Some(Unending::new(vm.pid()));
        vm.process.send_kill().unwrap();
        let (idle, most) = (Duration::from_millis(50), Duration::from_secs(60));
        assert!(!vm.exits_within(Patience::new(idle, most), || vm.process.progress()).await);
        let mut looks = 0;
        let slow = || {
            looks += 1;
            drop(unending.take_if(|_| looks == 5));
            Some(Progress { cpu_time: looks, resident: 0 })
        };
        assert!(vm.exits_within(Patience::new(idle, most), slow).await);
        assert!(matches!(vm.exited().await, VmExit::Ended { .. }));
        host.remove();
    }

    #[test]
    fn advice_is_what_the_console_says() {
        let dir = tempfile::tempdir().unwrap();
        let console = dir.path().join("console.log");
        fs::write(&console, "booting\nKernel panic\n\n").unwrap();
        assert_eq!(advice(Some(&console)), "its console ends with: Kernel panic");
        assert!(advice(None).contains("console = true"));
        fs::write(&console, format!("Kernel panic - not syncing\n{}\nlast\n", "x".repeat(1 << 20))).unwrap();
        assert_eq!(advice(Some(&console)), "its console ends with: last");
    }
}
