//! containerd as its user sees it: the `ctr` command, in a namespace of the tests' own. What prepares or ends a case,
//! and what waits for a state, asks containerd itself: a start of `ctr` takes longer than most of what it does.

use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use clap::ValueEnum;

use crate::api::messages::Status;
use crate::api::{Api, kill_request, shown};
use crate::command::{Cmd, Finished, Running, Size, wait_until};
use crate::containerd::Version;
use crate::docker::Docker;
use crate::pods::Pods;
use crate::snapshot::Snapshot;

/// containerd's namespace of the tests.
pub(crate) const NAMESPACE: &str = "bulkhead-e2e";
/// Debian's busybox, with a shell and the usual tools.
pub(crate) const IMAGE: &str = "docker.io/library/busybox:latest";

/// How much slower than an ordinary machine an emulated one may be.
const EMULATION: u32 = 4;
/// Deadline of one command of a client.
pub(crate) const COMMAND: Duration = Duration::from_secs(60);
/// How long a task may take to come to a state after it was asked to.
pub(crate) const SETTLES: Duration = Duration::from_secs(20);
/// How soon an error must come.
const ERROR: Duration = Duration::from_secs(5);

/// Whose containers the stories are told of.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Runtime {
    /// containerd's default: it shows that a story is true.
    Runc,
    /// This project.
    Bulkhead,
}

impl Runtime {
    /// What a person calls it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Runc => "runc",
            Self::Bulkhead => "bulkhead",
        }
    }

    /// What `ctr run --runtime` and `docker run --runtime` call it.
    pub(crate) fn in_containerd(self) -> &'static str {
        match self {
            Self::Runc => "io.containerd.runc.v2",
            Self::Bulkhead => "io.containerd.bulkhead.v2",
        }
    }

    /// File name of its shim.
    pub(crate) fn shim(self) -> &'static str {
        match self {
            Self::Runc => "containerd-shim-runc-v2",
            Self::Bulkhead => "containerd-shim-bulkhead-v2",
        }
    }
}

/// The host of the containers.
pub(crate) struct Host {
    runtime: Runtime,
    archive: PathBuf,
    version: Version,
    next: Arc<AtomicU32>,
    emulated: bool,
    warm: OnceLock<()>,
    /// Id of the container of [`Host::idle`].
    idle: OnceLock<String>,
    pods: Arc<OnceLock<Pods>>,
    docker: OnceLock<Docker>,
    api: OnceLock<Api>,
}

impl Host {
    /// Looks for containerd, and imports the image if it is missing.
    pub(crate) fn prepare(runtime: Runtime, version: Version, archive: &Path) -> Result<Self> {
        // "qemu" stands for its emulation; hardware under QEMU would answer "kvm".
        let emulated = Cmd::new("systemd-detect-virt").run().is_ok_and(|it| it.text().trim() == "qemu");
        let host = Self {
            runtime,
            archive: archive.to_owned(),
            version,
            next: Arc::new(AtomicU32::new(1)),
            emulated,
            warm: OnceLock::new(),
            idle: OnceLock::new(),
            pods: Arc::default(),
            docker: OnceLock::new(),
            api: OnceLock::new(),
        };
        let answer = host.ctr(["version"]).run()?;
        answer.succeeds().context("containerd does not answer")?;
        if !host.ctr(["images", "ls", "-q"]).run()?.text().lines().any(|name| name == IMAGE) {
            let archive = &host.archive;
            ensure!(
                archive.exists(),
                "containerd lacks {IMAGE}, and there is no {} to import",
                archive.display()
            );
            host.ctr(["images", "import"])
                .args([archive])
                .run()?
                .succeeds()
                .context("cannot import the image")?;
        }
        Ok(host)
    }

    /// This host with another runtime, also for its pods.
    pub(crate) fn with(&self, runtime: Runtime) -> Host {
        Host {
            runtime,
            archive: self.archive.clone(),
            version: self.version,
            next: Arc::clone(&self.next),
            emulated: self.emulated,
            warm: OnceLock::new(),
            idle: OnceLock::new(),
            pods: Arc::clone(&self.pods),
            docker: OnceLock::new(),
            api: OnceLock::new(),
        }
    }

    /// Whose containers these are.
    pub(crate) fn runtime(&self) -> Runtime {
        self.runtime
    }

    /// Its containerd's version.
    pub(crate) fn version(&self) -> Version {
        self.version
    }

    /// This long on an ordinary machine; longer on an emulated one.
    pub(crate) fn patience(&self, ordinary: Duration) -> Duration {
        if self.emulated { ordinary * EMULATION } else { ordinary }
    }

    /// How soon an error must come.
    pub(crate) fn error_limit(&self) -> Duration {
        self.patience(ERROR)
    }

    /// `ctr` in the tests' namespace.
    pub(crate) fn ctr<'a>(&self, args: impl IntoIterator<Item = &'a str>) -> Cmd {
        Cmd::new("ctr").limit(self.patience(COMMAND)).args(["--namespace", NAMESPACE]).args(args)
    }

    /// A container with an id of its own, not yet created.
    pub(crate) fn container(&self) -> Container<'_> {
        Container { host: self, id: self.new_id(), flags: Vec::new(), origin: Origin::Image }
    }

    /// A container that does nothing, for cases that add processes to it or look at it, and leave it as it was. They
    /// share it; it is made when the first asks for it, and again after a case that broke it.
    pub(crate) fn idle(&self) -> Result<Task<'_>> {
        let id = self.idle.get_or_init(|| self.new_id());
        let task = Task { host: self, id: id.clone(), gone: false };
        if self.task_state(id)?.as_deref() != Some("RUNNING") {
            drop(task);
            let container = Container { id: id.clone(), ..self.container() };
            return Ok(container.detach(&["sleep", "infinity"])?.shared());
        }
        Ok(task.shared())
    }

    /// A connection to containerd itself.
    fn api(&self) -> Result<&Api> {
        if self.api.get().is_none() {
            let api = Api::connect(self.patience(COMMAND))?;
            return Ok(self.api.get_or_init(|| api));
        }
        self.api.get().context("the connection is gone")
    }

    /// Where pods are run: made when the first case asks for it.
    pub(crate) fn pods(&self) -> Result<&Pods> {
        if self.pods.get().is_none() {
            let pods = Pods::prepare(self)?;
            return Ok(self.pods.get_or_init(|| pods));
        }
        self.pods.get().context("the pods are gone")
    }

    /// The dockerd of the tests: started when the first case asks for it.
    pub(crate) fn docker(&self) -> Result<&Docker> {
        if self.docker.get().is_none() {
            let docker = Docker::start(self)?;
            return Ok(self.docker.get_or_init(|| docker));
        }
        self.docker.get().context("dockerd is gone")
    }

    /// The archive of the image.
    pub(crate) fn archive(&self) -> &Path {
        &self.archive
    }

    /// An id that nothing else has.
    pub(crate) fn new_id(&self) -> String {
        format!("e2e-{}-{}", process::id(), self.next.fetch_add(1, Ordering::Relaxed))
    }

    /// `ctr run --rm` of the image with this command, to its end.
    pub(crate) fn run(&self, command: &[&str]) -> Result<Finished> {
        self.container().run(command)
    }

    /// Like [`Host::run`], of a shell script.
    pub(crate) fn sh(&self, script: &str) -> Result<Finished> {
        self.container().run(&["sh", "-c", script])
    }

    /// Expects that the host looks the same after `act` as before it.
    pub(crate) fn leaves_nothing(&self, act: impl FnOnce() -> Result<()>) -> Result<()> {
        // Any runtime's first container makes directories for the namespace that stay.
        if self.warm.get().is_none() {
            self.run(&["true"])?.succeeds().context("the container before the first look at the host")?;
            self.warm.get_or_init(|| ());
        }
        let before = Snapshot::settled(self)?;
        act()?;
        before.expect_same(self)
    }

    /// The state of a task, as `ctr tasks ls` writes it; None: there is no such task. Waits for a containerd that has
    /// just been restarted.
    pub(crate) fn task_state(&self, id: &str) -> Result<Option<String>> {
        let mut answer = self.api()?.state(id)?;
        if answer.is_err() {
            self.api()?.wait_until_served(self.patience(COMMAND))?;
            answer = self.api()?.state(id)?;
        }
        let process = answer.map_err(|refusal| anyhow!("no state of task {id}: {}", shown(&refusal)))?;
        Ok(process.map(|process| {
            let status = Status::try_from(process.status).unwrap_or(Status::Unknown);
            format!("{status:?}").to_uppercase()
        }))
    }

    /// Waits until a task is in this state.
    pub(crate) fn wait_for_state(&self, id: &str, state: &str) -> Result<()> {
        let what = format!("task {id} to be {state}");
        wait_until(&what, self.patience(SETTLES), || Ok(self.task_state(id)?.as_deref() == Some(state)))
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if let Some(id) = self.idle.get() {
            drop(Task { host: self, id: id.clone(), gone: false });
        }
    }
}

/// What a container is made of.
enum Origin {
    /// The image.
    Image,
    /// A directory, by `--rootfs`.
    Directory(String),
    /// A whole OCI spec, which names its own root and command.
    Spec(String),
}

/// A container that is not yet created.
pub(crate) struct Container<'h> {
    host: &'h Host,
    id: String,
    flags: Vec<String>,
    origin: Origin,
}

impl<'h> Container<'h> {
    /// Its id.
    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    /// Adds a word to its id.
    pub(crate) fn named(mut self, word: &str) -> Self {
        self.id = format!("{}-{word}", self.id);
        self
    }

    /// Adds flags of `ctr run`.
    pub(crate) fn flags<'a>(mut self, flags: impl IntoIterator<Item = &'a str>) -> Self {
        self.flags.extend(flags.into_iter().map(str::to_owned));
        self
    }

    /// Bind-mounts a path of the host.
    pub(crate) fn bind(self, source: &Path, destination: &str, options: &str) -> Self {
        let mount = format!("type=bind,src={},dst={destination},options={options}", source.display());
        self.flags(["--mount", &mount])
    }

    /// Takes this directory as its root.
    pub(crate) fn rootfs(mut self, directory: &str) -> Self {
        self.origin = Origin::Directory(directory.to_owned());
        self
    }

    /// Takes everything from this spec file; flags and the command are then ctr's to ignore.
    pub(crate) fn spec(mut self, file: &Path) -> Self {
        self.origin = Origin::Spec(file.display().to_string());
        self
    }

    fn ctr_run(&self, mode: &str, command: &[&str]) -> Cmd {
        let cmd =
            self.host.ctr(["run", "--runtime", self.host.runtime.in_containerd(), mode]).args(&self.flags);
        match &self.origin {
            Origin::Image => cmd.args([IMAGE, &self.id]).args(command),
            Origin::Directory(path) => cmd.args(["--rootfs", path, &self.id]).args(command),
            Origin::Spec(file) => cmd.args(["--config", file, &self.id]),
        }
    }

    /// Runs it to its end, attached, with an empty input.
    pub(crate) fn run(self, command: &[&str]) -> Result<Finished> {
        self.run_cmd(command, |cmd| cmd)
    }

    /// Like [`Container::run`], with a deadline of its own.
    pub(crate) fn run_within(self, limit: Duration, command: &[&str]) -> Result<Finished> {
        self.run_cmd(command, |cmd| cmd.limit(limit))
    }

    /// Runs it to its end, attached, with this input.
    pub(crate) fn run_with_input(self, command: &[&str], input: Vec<u8>) -> Result<Finished> {
        self.run_cmd(command, |cmd| cmd.input(input))
    }

    fn run_cmd(self, command: &[&str], adjust: impl FnOnce(Cmd) -> Cmd) -> Result<Finished> {
        let cmd = adjust(self.ctr_run("--rm", command));
        let mut task = Task { host: self.host, id: self.id, gone: false };
        let finished = cmd.run()?;
        task.gone = true;
        Ok(finished)
    }

    /// Starts it attached: its input, output and status are this process's to handle.
    pub(crate) fn start(self, command: &[&str]) -> Result<Attached<'h>> {
        let running = self.ctr_run("--rm", command).start()?;
        Ok(Attached { running, task: Task { host: self.host, id: self.id, gone: false } })
    }

    /// Like [`Container::start`], in a terminal of this size.
    pub(crate) fn start_in_terminal(mut self, size: Size, command: &[&str]) -> Result<Attached<'h>> {
        self.flags.push("--tty".to_owned());
        let running = self.ctr_run("--rm", command).start_in_terminal(size)?;
        Ok(Attached { running, task: Task { host: self.host, id: self.id, gone: false } })
    }

    /// Starts it detached.
    pub(crate) fn detach(self, command: &[&str]) -> Result<Task<'h>> {
        let cmd = self.ctr_run("--detach", command);
        let task = Task { host: self.host, id: self.id, gone: false };
        cmd.run()?.succeeds()?;
        Ok(task)
    }

    /// Starts it detached, with a terminal that nobody looks at yet.
    pub(crate) fn detach_in_terminal(mut self, size: Size, command: &[&str]) -> Result<Task<'h>> {
        self.flags.push("--tty".to_owned());
        let cmd = self.ctr_run("--detach", command);
        let task = Task { host: self.host, id: self.id, gone: false };
        cmd.start_in_terminal(size)?.finish()?.succeeds()?;
        Ok(task)
    }

    /// Creates it without a task: `ctr containers create`.
    pub(crate) fn create(self, command: &[&str]) -> Result<Task<'h>> {
        let cmd = self.host.ctr(["containers", "create", "--runtime", self.host.runtime.in_containerd()]);
        let cmd = cmd.args(&self.flags).args([IMAGE, &self.id]).args(command);
        let task = Task { host: self.host, id: self.id, gone: false };
        cmd.run()?.succeeds()?;
        Ok(task)
    }
}

/// A container of which `ctr run` still runs.
pub(crate) struct Attached<'h> {
    /// `ctr run` itself.
    pub(crate) running: Running,
    /// The container. Dropped after `running`.
    pub(crate) task: Task<'h>,
}

impl Attached<'_> {
    /// Waits for `ctr run` to end, which removes the container.
    pub(crate) fn finish(mut self) -> Result<Finished> {
        let finished = self.running.finish()?;
        self.task.gone = true;
        Ok(finished)
    }
}

/// A container in containerd. Dropping it removes it, whatever its state.
pub(crate) struct Task<'h> {
    host: &'h Host,
    id: String,
    gone: bool,
}

impl Task<'_> {
    /// The container's id.
    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    /// Leaves it to the host to remove.
    fn shared(mut self) -> Self {
        self.gone = true;
        self
    }

    /// Sends a signal to its init process.
    pub(crate) fn kill(&self, signal: &str) -> Result<()> {
        self.host.ctr(["tasks", "kill", "--signal", signal, &self.id]).run()?.succeeds()?;
        Ok(())
    }

    /// Sends a signal to all of its processes.
    pub(crate) fn kill_all(&self, signal: &str) -> Result<()> {
        self.host.ctr(["tasks", "kill", "--all", "--signal", signal, &self.id]).run()?.succeeds()?;
        Ok(())
    }

    /// Runs one more process in it to its end, attached, with an empty input.
    pub(crate) fn exec(&self, command: &[&str]) -> Result<Finished> {
        self.exec_flags(&[], command)
    }

    /// Like [`Task::exec`], with flags of `ctr tasks exec`.
    pub(crate) fn exec_flags(&self, flags: &[&str], command: &[&str]) -> Result<Finished> {
        self.ctr_exec(&self.host.new_id(), flags, command).run()
    }

    /// Like [`Task::exec`], with this input.
    pub(crate) fn exec_with_input(&self, command: &[&str], input: Vec<u8>) -> Result<Finished> {
        self.ctr_exec(&self.host.new_id(), &[], command).input(input).run()
    }

    /// Starts one more process in it, attached: its input, output and status are the caller's to handle.
    pub(crate) fn start_exec(&self, exec_id: &str, command: &[&str]) -> Result<Running> {
        self.ctr_exec(exec_id, &[], command).start()
    }

    /// Starts one more process in it, attached, in a terminal of this size.
    pub(crate) fn exec_in_terminal(&self, flags: &[&str], size: Size, command: &[&str]) -> Result<Running> {
        let flags = [&["--tty"], flags].concat();
        self.ctr_exec(&self.host.new_id(), &flags, command).start_in_terminal(size)
    }

    /// Attaches to it in a terminal of this size.
    pub(crate) fn attach_in_terminal(&self, size: Size) -> Result<Running> {
        self.host.ctr(["tasks", "attach", &self.id]).start_in_terminal(size)
    }

    fn ctr_exec(&self, exec_id: &str, flags: &[&str], command: &[&str]) -> Cmd {
        let cmd = self.host.ctr(["tasks", "exec", "--exec-id", exec_id]).args(flags);
        cmd.args([&self.id]).args(command)
    }

    /// Waits until it is in this state.
    pub(crate) fn wait_for_state(&self, state: &str) -> Result<()> {
        self.host.wait_for_state(&self.id, state)
    }

    /// Deletes it when it has ended, with this status.
    pub(crate) fn ends(mut self, expected: i32) -> Result<()> {
        self.wait_for_state("STOPPED")?;
        let status = self.host.api()?.delete(&self.id)?;
        self.gone = true;
        ensure!(
            i64::from(status) == i64::from(expected),
            "expected  exit status {expected} of the deleted task\ncame      {status}"
        );
        Ok(())
    }

    /// Kills it, and deletes it.
    pub(crate) fn dies(self) -> Result<()> {
        self.host.api()?.call(kill_request(&self.id))?;
        self.ends(137)
    }

    /// Deletes the task, which must have stopped, and the container. The exit status, as ctr tells it.
    pub(crate) fn delete(mut self) -> Result<i32> {
        let deleted = self.host.ctr(["tasks", "delete", &self.id]).run()?;
        let message = String::from_utf8_lossy(&deleted.succeeds()?.stderr).into_owned();
        self.host.ctr(["containers", "rm", &self.id]).run()?.succeeds()?;
        self.gone = true;
        // ctr says nothing of a zero status, and warns of any other.
        let Some((_, status)) = message.split_once("non-zero exit code ") else { return Ok(0) };
        let digits: String = status.chars().take_while(char::is_ascii_digit).collect();
        digits.parse().map_err(|_| anyhow!("no exit status in {message:?}"))
    }

    /// Removes the container of which containerd has forgotten the task.
    pub(crate) fn remove_container(mut self) -> Result<()> {
        self.host.ctr(["containers", "rm", &self.id]).run()?.succeeds()?;
        self.gone = true;
        Ok(())
    }
}

impl Drop for Task<'_> {
    fn drop(&mut self) {
        if self.gone {
            return;
        }
        // The case has failed, or ends with the container alive: the next case is not to find it. What cannot be
        // removed is for the next look at the host to report.
        let _ = self.host.api().and_then(|api| api.discard(&self.id));
    }
}
