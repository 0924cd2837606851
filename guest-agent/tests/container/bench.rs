//! What the tests build containers with.

use std::{
    fs::{self, File},
    io::{ErrorKind, Read},
    os::fd::AsFd,
    path::{Path, PathBuf},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU32, Ordering},
    },
    thread,
};

use bulkhead_agent::{
    cgroup,
    reaper::Reaper,
    spec::{self, PodSharing},
    stage::launcher::{Child, ChildStdio, CreatedInit, DEADLINE, ExecTarget, Launcher, ProcessError},
    stage_config::CommonConfig,
};
use nix::{
    errno::Errno,
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
};
use serde_json::{Value, json};

/// The agent, to be executed as the stage.
pub(crate) const PROGRAM: &str = env!("CARGO_BIN_EXE_bulkhead-agent");

/// One reaper for all tests: it waits for any child of the process.
pub(crate) fn reaper() -> Arc<Reaper> {
    static REAPER: OnceLock<Arc<Reaper>> = OnceLock::new();
    let reaper = REAPER.get_or_init(|| {
        let reaper = Arc::new(Reaper::default());
        let running = Arc::clone(&reaper);
        thread::spawn(move || runtime().block_on(running.run()));
        reaper
    });
    Arc::clone(reaper)
}

pub(crate) fn launcher() -> Launcher {
    Launcher { program: PROGRAM.into(), reaper: reaper(), deadline: DEADLINE }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

/// A place for one container, on this machine's kernel.
pub(crate) struct Bench {
    pub(crate) directory: tempfile::TempDir,
    pub(crate) cgroup: PathBuf,
    pub(crate) runtime: tokio::runtime::Runtime,
}

pub(crate) struct Outcome {
    pub(crate) status: u32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// The test's ends of a process's output.
struct Output {
    stdout: std::io::PipeReader,
    stderr: std::io::PipeReader,
}

fn output() -> (ChildStdio, Output) {
    let (stdout, stdout_writer) = std::io::pipe().unwrap();
    let (stderr, stderr_writer) = std::io::pipe().unwrap();
    let stdin = File::open("/dev/null").unwrap().into();
    let stdio = ChildStdio { stdin, stdout: stdout_writer.into(), stderr: stderr_writer.into() };
    (stdio, Output { stdout, stderr })
}

impl Bench {
    /// The calling thread gets a mount namespace of its own.
    pub(crate) fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        unshare(CloneFlags::CLONE_NEWNS).expect("these tests need root");
        mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>).unwrap();
        let directory = tempfile::tempdir().unwrap();
        for name in ["root", "volume"] {
            fs::create_dir(directory.path().join(name)).unwrap();
        }
        // Where the agent has it in a guest.
        let hierarchy = Path::new(cgroup::ROOT);
        match mount(Some("cgroup2"), hierarchy, Some("cgroup2"), MsFlags::empty(), None::<&str>) {
            // It is there already.
            Err(Errno::EBUSY) => {}
            other => other.unwrap(),
        }
        match fs::create_dir(hierarchy.join("containers")) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            other => other.unwrap(),
        }
        let number = NUMBER.fetch_add(1, Ordering::SeqCst);
        let cgroup = hierarchy.join(format!("bulkhead-test-{}-{number}", std::process::id()));
        fs::create_dir(&cgroup).unwrap();
        Self { directory, cgroup, runtime: runtime() }
    }

    pub(crate) fn root(&self) -> PathBuf {
        self.directory.path().join("root")
    }

    pub(crate) fn volume(&self) -> PathBuf {
        self.directory.path().join("volume")
    }

    pub(crate) fn spec(&self, args: &[&str]) -> Value {
        let system = |name: &str| json!({"destination": name, "type": "bind", "source": name, "options": ["rbind", "ro"]});
        json!({
            "ociVersion": "1.1.0",
            "root": {"path": self.root()},
            "hostname": "inside",
            "process": {
                "user": {"uid": 0, "gid": 0},
                "args": args,
                "env": ["PATH=/usr/bin:/bin"],
                "cwd": "/",
            },
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc", "options": ["nosuid", "noexec", "nodev"]},
                {"destination": "/dev", "type": "tmpfs", "source": "tmpfs",
                    "options": ["nosuid", "strictatime", "mode=755", "size=65536k"]},
                {"destination": "/dev/pts", "type": "devpts", "source": "devpts",
                    "options": ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"]},
                {"destination": "/dev/mqueue", "type": "mqueue", "source": "mqueue", "options": ["nosuid"]},
                {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["nosuid", "ro"]},
                {"destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup", "options": ["ro"]},
                system("/usr"), system("/bin"), system("/lib"), system("/lib64"),
            ],
            "linux": {
                "namespaces": [
                    {"type": "pid"}, {"type": "mount"}, {"type": "uts"}, {"type": "ipc"}, {"type": "network"},
                    {"type": "cgroup"}
                ]
            }
        })
    }

    pub(crate) fn create(&self, spec: &Value, stdio: ChildStdio) -> Result<CreatedInit, ProcessError> {
        self.create_by(&launcher(), spec, stdio)
    }

    pub(crate) fn create_by(
        &self,
        launcher: &Launcher,
        spec: &Value,
        stdio: ChildStdio,
    ) -> Result<CreatedInit, ProcessError> {
        let resolved =
            spec::resolve(spec.to_string().as_bytes(), &self.cgroup, PodSharing::default()).unwrap();
        self.runtime.block_on(launcher.create(resolved.init, &[], stdio))
    }

    /// Runs a container to its end.
    pub(crate) fn run(&self, spec: &Value) -> Result<Outcome, ProcessError> {
        let (stdio, output) = output();
        let CreatedInit { child, control, .. } = self.create(spec, stdio)?;
        self.runtime.block_on(control.start())?;
        Ok(self.outcome(child, output))
    }

    /// Makes one more process in a container.
    pub(crate) fn exec(
        &self,
        init: impl AsFd,
        process: &Value,
        stdio: ChildStdio,
    ) -> Result<Child, ProcessError> {
        self.join(&launcher(), init, process, CommonConfig::default(), stdio)
    }

    pub(crate) fn join(
        &self,
        launcher: &Launcher,
        init: impl AsFd,
        process: &Value,
        common: CommonConfig,
        stdio: ChildStdio,
    ) -> Result<Child, ProcessError> {
        let process = spec::resolve_exec(process.to_string().as_bytes(), common).unwrap();
        let joining = ExecTarget { cgroup_dir: self.cgroup.clone(), init: init.as_fd(), process };
        self.runtime.block_on(launcher.exec(joining, stdio))
    }

    /// Runs one more process in a container to its end.
    pub(crate) fn exec_to_end(&self, init: impl AsFd, process: &Value) -> Result<Outcome, ProcessError> {
        let (stdio, output) = output();
        let child = self.exec(init, process, stdio)?;
        Ok(self.outcome(child, output))
    }

    /// The same in a container with this spec, whose system call filter is the process's too.
    pub(crate) fn exec_with(
        &self,
        init: impl AsFd,
        process: &Value,
        spec: &Value,
    ) -> Result<Outcome, ProcessError> {
        let resolved =
            spec::resolve(spec.to_string().as_bytes(), &self.cgroup, PodSharing::default()).unwrap();
        let (stdio, output) = output();
        let child = self.join(&launcher(), init, process, resolved.init.process.common, stdio)?;
        Ok(self.outcome(child, output))
    }

    fn outcome(&self, child: Child, mut output: Output) -> Outcome {
        let mut outcome = Outcome { status: 0, stdout: String::new(), stderr: String::new() };
        output.stdout.read_to_string(&mut outcome.stdout).unwrap();
        output.stderr.read_to_string(&mut outcome.stderr).unwrap();
        outcome.status = self.status(child);
        outcome
    }

    /// Waits for a process's end.
    pub(crate) fn status(&self, mut child: Child) -> u32 {
        let ended = self.runtime.block_on(child.exit.wait_for(Option::is_some)).map(|exit| *exit);
        ended.unwrap().unwrap().status
    }

    /// What a shell in a container with this spec prints.
    pub(crate) fn shell(&self, script: &str, change: impl FnOnce(&mut Value)) -> String {
        let mut spec = self.spec(&["sh", "-c", script]);
        change(&mut spec);
        let outcome = self.run(&spec).unwrap();
        assert_eq!(outcome.status, 0, "{}", outcome.stderr);
        outcome.stdout
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        // The init may still be on its way out of the cgroup.
        for _ in 0..500 {
            if fs::remove_dir(&self.cgroup).is_ok() {
                return;
            }
            thread::sleep(std::time::Duration::from_millis(10));
        }
    }
}

pub(crate) fn null() -> ChildStdio {
    let null = || File::options().read(true).write(true).open("/dev/null").unwrap().into();
    ChildStdio { stdin: null(), stdout: null(), stderr: null() }
}
