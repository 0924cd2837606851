//! A guest for the tests: the agent's own service without a VM (`host-shim/examples/guest`). The service kills all
//! processes that it sees, and waits for every child, so it is a process of its own.

use std::{
    env, fs,
    io::ErrorKind,
    os::{
        fd::OwnedFd,
        unix::fs::{PermissionsExt, symlink},
    },
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
    thread,
    time::Duration,
};

use rustix::process::{PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use nix::{
    mount::{MntFlags, MsFlags, mount, umount2},
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

use crate::{
    host::{journal::Journal, process_id::ProcessId},
    testing::Unending,
};

/// What the guest needs on the host, apart from what the shim makes.
#[derive(Debug)]
pub(crate) struct Guest {
    /// The state directory of the pod.
    pub(crate) state: PathBuf,
    /// A cgroup v2 hierarchy, which a host with cgroup v1 may not have mounted.
    hierarchy: tempfile::TempDir,
    /// The guest's root in it.
    cgroup: PathBuf,
    files: tempfile::TempDir,
}

impl Guest {
    /// For a pod with this state directory. The calling thread must have private mounts.
    pub(crate) fn new(state: PathBuf) -> Self {
        let files = tempfile::tempdir().unwrap();
        let hierarchy = tempfile::tempdir().unwrap();
        mount(Some("cgroup2"), hierarchy.path(), Some("cgroup2"), MsFlags::empty(), None::<&str>).unwrap();
        let name = files.path().file_name().unwrap().to_str().unwrap().trim_start_matches('.').to_owned();
        let cgroup = hierarchy.path().join(format!("bulkhead-guest-{name}"));
        fs::create_dir(&cgroup).unwrap();
        Self { state, hierarchy, cgroup, files }
    }

    /// Writes a program that is started like the VMM.
    pub(crate) fn write_vmm(&self, path: &Path) {
        let (cgroup, rules, log) = (self.cgroup.display(), self.rules(), self.log_file());
        let namespaces = "--pid --fork --kill-child --mount --propagation slave --uts --ipc --net";
        let script = format!(
            "#!/bin/sh\nexec unshare {namespaces} {} {cgroup} {} \"$@\" 2>>{}\n",
            program().display(),
            rules.display(),
            log.display()
        );
        fs::write(path, script).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// The process that the shim takes for the VMM. The guest ends with it.
    pub(crate) fn vmm(&self) -> ProcessId {
        Journal::open(&self.state.join("journal")).unwrap().vmm().unwrap()
    }

    /// From now on the connection to the agent follows this rule (`host-shim/examples/guest/filter.rs`).
    pub(crate) fn follow(&self, rule: &str) {
        fs::write(self.rules(), rule).unwrap();
    }

    /// Stops the agent where it is.
    pub(crate) fn stop(&self) {
        kill(self.agent(), Signal::SIGSTOP).unwrap();
    }

    /// Lets it go on.
    pub(crate) fn go_on(&self) {
        kill(self.agent(), Signal::SIGCONT).unwrap();
    }

    /// From now on its VMM does not end when it is killed, and the files of the VMM stay open.
    pub(crate) fn hang(&self) -> HungVmm {
        let agent = rustix::process::Pid::from_raw(self.agent().as_raw()).unwrap();
        let agent_fd = pidfd_open(agent, PidfdFlags::empty()).unwrap();
        let mut files = Vec::new();
        for entry in fs::read_dir(format!("/proc/{}/fd", agent.as_raw_nonzero())).unwrap() {
            let number = entry.unwrap().file_name().to_str().unwrap().parse().unwrap();
            files.push(pidfd_getfd(&agent_fd, number, PidfdGetfdFlags::empty()).unwrap());
        }
        HungVmm { unending: Unending::new(self.vmm().pid), files }
    }

    fn agent(&self) -> Pid {
        // Stages of containers are in this cgroup too. The agent is process 1 of its pid namespace.
        let members = fs::read_to_string(self.cgroup.join("agent/cgroup.procs")).unwrap();
        let is_first = |pid: &&str| {
            let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
            let ids = status.lines().find(|line| line.starts_with("NSpid:")).unwrap_or_default();
            ids.split_whitespace().next_back() == Some("1")
        };
        Pid::from_raw(members.lines().find(is_first).unwrap().parse().unwrap())
    }

    /// How many processors were to be online, at each request.
    pub(crate) fn online(&self) -> Vec<u32> {
        self.noted("processors").lines().map(|line| line.parse().unwrap()).collect()
    }

    /// How many requests about a container were lost, because of the rules `lose` and `lose-queries`.
    pub(crate) fn lost(&self, id: &str) -> usize {
        self.noted("lost").lines().filter(|line| *line == id).count()
    }

    /// What a file of a container's own cgroup says.
    pub(crate) fn cgroup_file(&self, id: &str, file: &str) -> String {
        let container = self.cgroup.join("containers").join(format!("ctr-{id}")).join("container");
        fs::read_to_string(container.join(file)).unwrap().trim_end().to_owned()
    }

    /// The limits that the agent was to apply, if the rule `accept-limits` holds.
    pub(crate) fn limits(&self) -> Vec<Value> {
        self.noted("limits").lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// Whether the guest could grow, each time when it was asked whether its containers need memory, if the rule
    /// `need-memory` holds.
    pub(crate) fn demands(&self) -> Vec<bool> {
        self.noted("demands").lines().map(|line| line.parse().unwrap()).collect()
    }

    /// How many requests to follow the memory have failed, because of the rule `fail-follow`.
    pub(crate) fn failed_to_follow(&self) -> usize {
        self.noted("followed").lines().count()
    }

    /// All policy of AppArmor that it was to load.
    pub(crate) fn policy(&self) -> String {
        self.noted("policy")
    }

    /// A file that the guest writes beside the rules. It exists from its first line on.
    fn noted(&self, file: &str) -> String {
        fs::read_to_string(self.rules().with_file_name(file)).unwrap_or_default()
    }

    /// What the agent has logged.
    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.log_file()).unwrap()
    }

    /// Whether there are containers, or have been any.
    pub(crate) fn has_had_containers(&self) -> bool {
        self.log().contains("bulkhead-agent: container ")
    }

    fn rules(&self) -> PathBuf {
        self.files.path().join("rules")
    }

    fn log_file(&self) -> PathBuf {
        self.files.path().join("log")
    }
}

/// A VMM that hangs.
pub(crate) struct HungVmm {
    unending: Unending,
    /// Files of the guest, which is a part of the VMM in these tests.
    files: Vec<OwnedFd>,
}

impl HungVmm {
    /// Lets it end.
    pub(crate) fn go_on(self) {
        drop((self.files, self.unending));
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("the guest's log:\n{}", fs::read_to_string(self.log_file()).unwrap_or_default());
        }
        // A guest that still runs ends with its pod's processes.
        _ = fs::write(self.cgroup.join("cgroup.kill"), "1");
        for _ in 0..500 {
            match remove(&self.cgroup) {
                Err(error) if error.kind() != ErrorKind::NotFound => thread::sleep(Duration::from_millis(5)),
                _ => break,
            }
        }
        _ = umount2(self.hierarchy.path(), MntFlags::MNT_DETACH);
    }
}

/// Makes the root of a container. It has the programs of this machine if it also has [`mounts`].
pub(crate) fn make_root(path: &Path) {
    fs::create_dir_all(path).unwrap();
    for name in ["bin", "lib", "lib64"] {
        // It may be there: a bundle can be used again.
        _ = symlink(Path::new("usr").join(name), path.join(name));
    }
}

/// The mounts of a container, as the OCI runtime-spec has them.
pub(crate) fn mounts() -> Value {
    json!([
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
        {"destination": "/dev/pts", "type": "devpts", "source": "devpts", "options": ["newinstance", "ptmxmode=0666"]},
        {"destination": "/usr", "type": "bind", "source": "/usr", "options": ["rbind", "ro"]},
    ])
}

/// A process of a container, as the OCI runtime-spec has it.
pub(crate) fn process(args: &[&str]) -> Value {
    json!({"user": {"uid": 0, "gid": 0}, "args": args, "env": ["PATH=/bin"], "cwd": "/"})
}

/// Removes a cgroup and all below it.
fn remove(cgroup: &Path) -> std::io::Result<()> {
    for entry in fs::read_dir(cgroup)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove(&entry.path())?;
        }
    }
    fs::remove_dir(cgroup)
}

/// The program, built now: `cargo test` builds no examples if it is told which tests to run.
fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        // The test is target/PROFILE/deps/NAME.
        let test = env::current_exe().unwrap();
        let profile = test.ancestors().nth(2).unwrap();
        let program = profile.join("examples/guest");
        let name = match profile.file_name().unwrap().to_str().unwrap() {
            "debug" => "dev",
            other => other,
        };
        let mut cargo = Command::new(env::var_os("CARGO").unwrap_or("cargo".into()));
        cargo.args(["build", "--locked", "--quiet", "--example", "guest", "--profile", name]);
        cargo.args(["--manifest-path", concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")]);
        cargo.arg("--target-dir").arg(profile.parent().unwrap());
        assert!(cargo.status().unwrap().success(), "the guest without a VM cannot be built: {cargo:?}");
        program
    })
}
