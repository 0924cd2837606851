//! The stage and the container's process that it makes.

use std::{
    convert::Infallible,
    env,
    ffi::CString,
    fs::{self, File},
    io::{self, BufRead, BufReader, IsTerminal, Write},
    os::fd::{AsFd, OwnedFd, RawFd},
    path::{Path, PathBuf},
    process::ExitCode,
};

use nix::{
    sched::{CloneFlags, unshare},
    sys::{
        prctl,
        resource::{Resource, setrlimit},
        stat::{Mode, SFlag, fstat, umask},
    },
    unistd::{Gid, Uid, chdir, fchown, setgid, setgroups, sethostname, setsid, setuid},
};
use oci_spec::runtime::PosixRlimitType;
use rustix::net::{Shutdown, shutdown};

use super::{
    Order, Report, SOCKET_VARIABLE, SetupError, Step, console::Console, errno_text, pause::Pause, program,
    rootfs, socket,
};
use crate::{
    cgroup,
    config::{
        CapabilityMasks, ExecConfig, InitConfig, ProcessConfig, SeccompFilter, StageConfig, WindowSize,
    },
    syscall::{self, CapabilitySets, Cloned},
};

/// Exit status of a process that could not get ready for its program, or not execute it.
const FAILED: u8 = 127;

/// What a process that joins a container enters at once; the pid namespace comes before. Of those that the container
/// shares with the guest it is a member already.
const JOINED: u64 = (libc::CLONE_NEWNS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWCGROUP) as u64;

/// The stage: standard input, output and error are those of the container, and [`super::SOCKET_VARIABLE`] is set.
pub fn main() -> ExitCode {
    let Some(socket) = env::var(SOCKET_VARIABLE).ok().and_then(|fd| fd.parse().ok()) else {
        return ExitCode::from(FAILED);
    };
    let Ok(socket) = syscall::inherited_socket(socket) else { return ExitCode::from(FAILED) };
    let mut agent = Agent { socket: BufReader::new(fs::File::from(OwnedFd::from(socket))) };
    match stage(&mut agent) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Without the agent there is nobody left to tell.
            let _ = agent.report(&Report::Failed(error));
            ExitCode::from(FAILED)
        }
    }
}

/// The other end of the socket. A file, which is read by read(2) rather than recvfrom(2): a container's filter, which
/// may be in force already, is likelier to allow that.
struct Agent {
    socket: BufReader<fs::File>,
}

impl Agent {
    fn receive<T: serde::de::DeserializeOwned>(&mut self) -> io::Result<T> {
        let mut line = String::new();
        if self.socket.read_line(&mut line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(serde_json::from_str(&line)?)
    }

    fn report(&mut self, report: &Report) -> io::Result<()> {
        let mut line = serde_json::to_vec(report)?;
        line.push(b'\n');
        self.socket.get_mut().write_all(&line)
    }

    /// Reports that the process is ready, and hands over the master of the terminal that it has.
    fn report_ready(&mut self, master: Option<OwnedFd>) -> io::Result<()> {
        let Some(master) = master else { return self.report(&Report::Ready) };
        let mut line = serde_json::to_vec(&Report::Ready)?;
        line.push(b'\n');
        socket::send_with(self.socket.get_ref(), &line, master.as_fd())
    }
}

fn stage(agent: &mut Agent) -> Result<(), SetupError> {
    // From its clone on a process that joins a container is seen in there, while it is still root with every
    // capability and in the guest's mount namespace: whoever traced it would have these, and its /proc/<pid> leads
    // to the agent's program and its socket. What is not dumpable is neither traced nor looked into by others of the
    // same user (only with CAP_SYS_PTRACE). The clone inherits this, and execve(2) makes the program dumpable again.
    // The same goes for an init: others can join its container before it is started.
    prctl::set_dumpable(false).step(|| "hiding from the containers".into())?;
    let config = agent.receive().step(|| "receiving the configuration".into())?;
    match config {
        StageConfig::Init(config) => {
            for joined in &config.joined {
                syscall::setns(joined.init_pidfd, joined.namespaces)
                    .step(|| "entering the namespaces of another container".into())?;
            }
            let cloned = clone_into(&config.cgroup_dir, config.namespaces);
            go_on(agent, cloned.step(|| CLONING.into())?, |agent| init(&config, agent))
        }
        StageConfig::Exec(config) => {
            // Before the clone: it is the children of the caller that it applies to.
            syscall::setns(config.init_pidfd, libc::CLONE_NEWPID as u64)
                .step(|| "entering the container's pid namespace".into())?;
            let cloned = match clone_into(&config.cgroup_dir, 0) {
                // A cgroup whose controllers are for those below it takes no process (the kernel's cgroup-v2, "No
                // Internal Process Constraint"). The container has divided it: as with runc the init's takes this one.
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                    let cgroup_dir = cgroup_of(config.init_pidfd)
                        .step(|| "finding the cgroup of the container's init".into())?;
                    clone_into(&cgroup_dir, 0)
                }
                other => other,
            };
            go_on(agent, cloned.step(|| CLONING.into())?, |agent| join(&config, agent))
        }
    }
}

/// What is tried in [`clone_into`].
const CLONING: &str = "cloning the container's process into its namespaces and its cgroup";

/// Clones the container's process into new `namespaces` and a cgroup.
fn clone_into(cgroup_dir: &Path, namespaces: u64) -> io::Result<Cloned> {
    let cgroup = File::open(cgroup_dir)?;
    syscall::clone_sibling(namespaces, cgroup.as_fd())
}

/// The directory of the cgroup that a process is in.
fn cgroup_of(pidfd: RawFd) -> io::Result<PathBuf> {
    let value = |file: String, key: &str| -> io::Result<String> {
        let text = fs::read_to_string(&file)?;
        let value = text.lines().find_map(|line| line.strip_prefix(key));
        value.map(str::to_owned).ok_or_else(|| io::Error::other(format!("{file} does not have {key:?}")))
    };
    // -1 of a process that has ended, which leads nowhere.
    let pid = value(format!("/proc/self/fdinfo/{pidfd}"), "Pid:\t")?;
    let path = value(format!("/proc/{pid}/cgroup"), "0::/")?;
    Ok(Path::new(cgroup::ROOT).join(path))
}

/// The one half of the stage reports the process; the other, which is the process, goes on with `child`.
fn go_on(
    agent: &mut Agent,
    cloned: Cloned,
    child: impl FnOnce(&mut Agent) -> Result<Infallible, SetupError>,
) -> Result<(), SetupError> {
    match cloned {
        Cloned::Parent(pid) => {
            agent.report(&Report::Cloned(pid)).step(|| "reporting the container's process id".into())
        }
        Cloned::Child => match child(agent)? {},
    }
}

/// The container's init, from its first instruction to the container's program.
fn init(config: &InitConfig, agent: &mut Agent) -> Result<Infallible, SetupError> {
    begin(&config.process)?;
    set_up_namespaces(config)?;
    let terminal = match &config.rootfs {
        Some(rootfs) => rootfs::enter(rootfs, &config.process)?,
        None => rootfs::enter_empty().map(|()| None)?,
    };
    let program = prepare(&config.process, config.rootfs.is_none())?;

    agent.report_ready(terminal).step(|| "reporting that the container is ready".into())?;
    let Order::Start = agent.receive().step(|| "waiting for the start".into())?;
    program.execute(agent)
}

/// A process that joins a container, from its first instruction to its program. Whatever it meets in the container's
/// namespaces may be hostile.
fn join(config: &ExecConfig, agent: &mut Agent) -> Result<Infallible, SetupError> {
    begin(&config.process)?;
    enter_namespaces(config.init_pidfd)?;
    let terminal = config.process.terminal.map(open_terminal).transpose()?;
    let program = prepare(&config.process, false)?;

    agent.report_ready(terminal).step(|| "reporting that the process is ready".into())?;
    program.execute(agent)
}

/// The first steps of both kinds of process, while the guest's file systems are still there.
fn begin(process: &ProcessConfig) -> Result<(), SetupError> {
    setsid().step(|| "making a session".into())?;
    // Files, directories and nodes get the modes that they are given.
    umask(Mode::empty());
    // Through the guest's /proc: that of the container may be anything.
    write("/proc/self/oom_score_adj", &process.oom_score_adj.to_string())
        .step(|| "process.oomScoreAdj".into())?;
    // While the caller is root, whose keyring it is: by its name, those who join the container find that of its init.
    match &process.common.session_keyring {
        Some(name) => join_keyring(name).step(|| format!("session keyring {name}")),
        None => Ok(()),
    }
}

fn join_keyring(name: &str) -> io::Result<()> {
    match CString::new(name).map_err(io::Error::from).and_then(|name| syscall::join_session_keyring(&name)) {
        // A kernel without keyrings.
        Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => Ok(()),
        other => other,
    }
}

/// All at once, so that there is no moment in some of the container's namespaces only.
fn enter_namespaces(init_pidfd: RawFd) -> Result<(), SetupError> {
    syscall::setns(init_pidfd, JOINED).step(|| "entering the container's namespaces".into())?;
    // setns(2) has changed the root and the working directory to the container's root already. Said again, since all
    // that follows relies on it.
    chdir("/").step(|| "changing to the container's root".into())
}

/// Gives the caller a terminal of the container that it is in. Answers the master.
fn open_terminal(size: WindowSize) -> Result<OwnedFd, SetupError> {
    let root = File::open("/").step(|| "opening the container's root".into())?;
    Console::open(root, size)?.take()
}

/// A process that is through with its setup.
struct Program<'a> {
    next: Next<'a>,
    /// To be installed yet.
    filter: Option<&'a SeccompFilter>,
}

/// What it does then.
enum Next<'a> {
    /// Executes a program that is there, with all that execve(2) wants.
    Execute { path: PathBuf, args: &'a [String], env: Vec<String> },
    /// Stays as it is.
    Pause(Pause),
}

impl Program<'_> {
    fn execute(self, agent: &mut Agent) -> Result<Infallible, SetupError> {
        agent.report(&Report::Executing).step(|| "reporting the start".into())?;
        install(self.filter)?;
        match self.next {
            Next::Execute { path, args, env } => Err(program::execute(&path, args, &env)),
            Next::Pause(pause) => {
                // As execve(2) would: the end of the socket says that all went well.
                shutdown(agent.socket.get_ref(), Shutdown::Both).step(|| "parting from the agent".into())?;
                pause.run()
            }
        }
    }
}

/// The last steps of both kinds of process, in the container's root: becomes the user, and finds the program.
///
/// With noNewPrivileges the filter comes at the very end, so that it need not allow more than execve(2). Without, it
/// takes a capability that the process may be about to lose, and has to allow the steps that follow, as with runc.
fn prepare(process: &ProcessConfig, is_pause: bool) -> Result<Program<'_>, SetupError> {
    let env = program::with_home(&process.env, process.uid);
    syscall::default_signals().step(|| "resetting signals".into())?;
    syscall::close_on_exec_all().step(|| "closing the agent's descriptors".into())?;
    set_attributes(process)?;
    let (early, late) = match (process.no_new_privileges, &process.common.seccomp) {
        (false, filter) => (filter.as_ref(), None),
        (true, filter) => (None, filter.as_ref()),
    };
    install(early)?;
    become_user(process)?;
    let next = if is_pause {
        Next::Pause(Pause::new().step(|| "preparing pause".into())?)
    } else {
        Next::Execute { path: program::find_program(&process.args[0], &env)?, args: &process.args, env }
    };
    Ok(Program { next, filter: late })
}

fn install(filter: Option<&SeccompFilter>) -> Result<(), SetupError> {
    let Some(SeccompFilter { flags, program }) = filter else { return Ok(()) };
    syscall::install_filter(program, *flags).step(|| "linux.seccomp: installing the filter".into())
}

fn set_up_namespaces(config: &InitConfig) -> Result<(), SetupError> {
    if config.cgroup_namespace {
        unshare(CloneFlags::CLONE_NEWCGROUP).step(|| "linux.namespaces[cgroup]".into())?;
    }
    if config.namespaces & libc::CLONE_NEWNET as u64 != 0 {
        syscall::loopback_up().step(|| "loopback interface".into())?;
    }
    if let Some(hostname) = &config.hostname {
        sethostname(hostname).step(|| format!("hostname {hostname:?}"))?;
    }
    if let Some(domainname) = &config.domainname {
        write("/proc/sys/kernel/domainname", domainname).step(|| format!("domainname {domainname:?}"))?;
    }
    for (path, value) in &config.sysctls {
        write(PathBuf::from("/proc/sys").join(path), value)
            .step(|| format!("linux.sysctl {} = {value:?}", path.display()))?;
    }
    Ok(())
}

/// Into a file that exists.
fn write(path: impl AsRef<Path>, value: &str) -> io::Result<()> {
    fs::OpenOptions::new().write(true).open(path)?.write_all(value.as_bytes())
}

/// What takes a privileged process, and its working directory.
fn set_attributes(process: &ProcessConfig) -> Result<(), SetupError> {
    for limit in &process.rlimits {
        setrlimit(resource(limit.typ()), limit.soft(), limit.hard())
            .step(|| format!("process.rlimits[{}]", limit.typ()))?;
    }
    if let Some((class, priority)) = process.io_priority {
        syscall::set_io_priority(class, priority).step(|| "process.ioPriority".into())?;
    }
    if let Some(attributes) = process.scheduler {
        syscall::set_scheduler(attributes).step(|| "process.scheduler".into())?;
    }
    if let Some(domain) = process.common.personality {
        syscall::set_personality(domain).step(|| "linux.personality".into())?;
    }
    // As runc words it: containerd's clients know it so.
    chdir(&process.cwd)
        .map_err(|error| errno_text(&error.into()))
        .step(|| format!("chdir to cwd ({:?}) set in config.json failed", process.cwd))?;
    // Fails if the directory is not below the root.
    env::current_dir().step(|| format!("process.cwd {}", process.cwd.display()))?;
    umask(Mode::from_bits_truncate(process.umask));
    own_stdio(process.uid).step(|| "process.user: giving it the standard streams".into())
}

/// User, groups and capabilities, in the order in which each is still permitted.
fn become_user(process: &ProcessConfig) -> Result<(), SetupError> {
    drop_bounding(process.capabilities.bounding)?;
    prctl::set_keepcaps(true).step(|| "keeping capabilities".into())?;
    let groups: Vec<Gid> = process.additional_gids.iter().copied().map(Gid::from_raw).collect();
    setgroups(&groups).step(|| "process.user.additionalGids".into())?;
    setgid(Gid::from_raw(process.gid)).step(|| format!("process.user.gid {}", process.gid))?;
    setuid(Uid::from_raw(process.uid)).step(|| format!("process.user.uid {}", process.uid))?;
    prctl::set_keepcaps(false).step(|| "keeping capabilities".into())?;
    set_capabilities(process.capabilities)?;
    if process.no_new_privileges {
        prctl::set_no_new_privs().step(|| "process.noNewPrivileges".into())?;
    }
    Ok(())
}

/// So that a program of this user can open /dev/stdout and its like again.
fn own_stdio(uid: u32) -> nix::Result<()> {
    let (stdin, stdout, stderr) = (io::stdin(), io::stdout(), io::stderr());
    for stream in [stdin.as_fd(), stdout.as_fd(), stderr.as_fd()] {
        let is_fifo = SFlag::from_bits_truncate(fstat(stream)?.st_mode) & SFlag::S_IFMT == SFlag::S_IFIFO;
        // Not the guest's /dev/null.
        if is_fifo || stream.is_terminal() {
            fchown(stream, Some(Uid::from_raw(uid)), None)?;
        }
    }
    Ok(())
}

fn drop_bounding(keep: u64) -> Result<(), SetupError> {
    for capability in (0..u64::BITS).filter(|n| keep & (1 << n) == 0) {
        match syscall::drop_bounding(capability) {
            // Beyond the last capability that the kernel knows.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => break,
            other => other.step(|| format!("process.capabilities.bounding: dropping number {capability}"))?,
        }
    }
    Ok(())
}

fn set_capabilities(masks: CapabilityMasks) -> Result<(), SetupError> {
    let CapabilityMasks { effective, permitted, inheritable, ambient, .. } = masks;
    syscall::capset(CapabilitySets { effective, permitted, inheritable })
        .step(|| "process.capabilities".into())?;
    syscall::clear_ambient().step(|| "process.capabilities.ambient".into())?;
    for capability in (0..u64::BITS).filter(|n| ambient & (1 << n) != 0) {
        syscall::raise_ambient(capability)
            .step(|| format!("process.capabilities.ambient: raising number {capability}"))?;
    }
    Ok(())
}

fn resource(kind: PosixRlimitType) -> Resource {
    match kind {
        PosixRlimitType::RlimitCpu => Resource::RLIMIT_CPU,
        PosixRlimitType::RlimitFsize => Resource::RLIMIT_FSIZE,
        PosixRlimitType::RlimitData => Resource::RLIMIT_DATA,
        PosixRlimitType::RlimitStack => Resource::RLIMIT_STACK,
        PosixRlimitType::RlimitCore => Resource::RLIMIT_CORE,
        PosixRlimitType::RlimitRss => Resource::RLIMIT_RSS,
        PosixRlimitType::RlimitNproc => Resource::RLIMIT_NPROC,
        PosixRlimitType::RlimitNofile => Resource::RLIMIT_NOFILE,
        PosixRlimitType::RlimitMemlock => Resource::RLIMIT_MEMLOCK,
        PosixRlimitType::RlimitAs => Resource::RLIMIT_AS,
        PosixRlimitType::RlimitLocks => Resource::RLIMIT_LOCKS,
        PosixRlimitType::RlimitSigpending => Resource::RLIMIT_SIGPENDING,
        PosixRlimitType::RlimitMsgqueue => Resource::RLIMIT_MSGQUEUE,
        PosixRlimitType::RlimitNice => Resource::RLIMIT_NICE,
        PosixRlimitType::RlimitRtprio => Resource::RLIMIT_RTPRIO,
        PosixRlimitType::RlimitRttime => Resource::RLIMIT_RTTIME,
    }
}
