//! What several tests share.

pub(crate) mod guest;

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, BufRead, BufReader, Read, Write},
    os::{fd::AsRawFd, unix::fs::MetadataExt},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex},
};

use nix::{
    libc,
    mount::{MntFlags, MsFlags, mount, umount2},
    sched::{CloneFlags, unshare},
    sys::{
        signal::{Signal, kill},
        wait::{WaitPidFlag, waitpid},
    },
    unistd::Pid,
};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};
use tracing::subscriber::DefaultGuard;

use crate::host::process_id::VMM_OPTION;

/// Gives the test's thread, and the threads and processes that it starts, mounts of their own. Needs root, as the
/// shim does.
pub(crate) fn private_mounts() {
    unshare(CloneFlags::CLONE_NEWNS).unwrap();
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>).unwrap();
}

/// From now on this thread starts no other one, as on a host that has as many as it can have. Nor does it start a
/// program.
pub(crate) fn no_more_threads() {
    let refused = SeccompAction::Errno(libc::EAGAIN as u32);
    let calls = BTreeMap::from([(libc::SYS_clone3, Vec::new()), (libc::SYS_clone, Vec::new())]);
    let architecture = std::env::consts::ARCH.try_into().unwrap();
    let filter = SeccompFilter::new(calls, SeccompAction::Allow, refused, architecture).unwrap();
    seccompiler::apply_filter(&BpfProgram::try_from(filter).unwrap()).unwrap();
}

/// The lines that `work` logs in this thread, at level info and above.
pub(crate) fn logged(work: impl FnOnce()) -> Vec<String> {
    let log = Log::begin();
    work();
    log.lines()
}

/// What this thread logs from now on, at level info and above, until it is dropped.
pub(crate) struct Log {
    lines: Written,
    _here: DefaultGuard,
}

/// What is written to it.
#[derive(Clone, Default)]
pub(crate) struct Written(Arc<Mutex<Vec<u8>>>);

impl Write for Written {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Written {
    pub(crate) fn lines(&self) -> Vec<String> {
        let text = String::from_utf8(self.0.lock().unwrap().clone()).unwrap();
        text.lines().map(str::to_owned).collect()
    }
}

impl Log {
    pub(crate) fn begin() -> Self {
        let lines = Written::default();
        let writer = lines.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_writer(move || writer.clone())
            .with_ansi(false)
            .without_time()
            .finish();
        Self { lines, _here: tracing::subscriber::set_default(subscriber) }
    }

    pub(crate) fn lines(&self) -> Vec<String> {
        self.lines.lines()
    }
}

/// Whether the troubleshooting page quotes this text. A test that provokes a text calls it, and is named in the list of
/// `tests/e2e/src/cases/operator.rs`.
pub(crate) fn is_on_troubleshooting_page(text: &str) -> bool {
    let page = include_str!("../../docs/troubleshooting.md").replace('\n', " ");
    page.contains(&format!("`{text}`"))
}

/// A process that was executed with these last arguments, and waits. It has begun: until then its arguments cannot be
/// read.
pub(crate) fn executed(arguments: &[&Path]) -> Child {
    let mut command = Command::new("sh");
    command.args(["-c", "echo; read line", "sh"]).args(arguments);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
    child
}

/// A process that was executed as a VMM with this configuration, and waits.
pub(crate) fn vmm_with(config: &Path) -> Child {
    executed(&[VMM_OPTION.as_ref(), config])
}

/// A pid namespace with a process in it. It ends when this is dropped.
pub(crate) struct PidNamespace {
    /// The number of its inode.
    pub(crate) inode: u64,
    /// The pid that its first process has here.
    pub(crate) first: u32,
    process: Child,
}

impl PidNamespace {
    pub(crate) fn new() -> Self {
        Self::with(&[])
    }

    /// Its first process was executed with these last arguments.
    pub(crate) fn with(arguments: &[&Path]) -> Self {
        // /proc is that of the host.
        let script = "read pid rest </proc/self/stat; echo $pid; read line";
        let mut process = Command::new("unshare")
            .args(["--pid", "--fork", "--kill-child", "sh", "-c", script, "sh"])
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        // It is there when it writes a line.
        let mut line = String::new();
        BufReader::new(process.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let namespace = format!("/proc/{}/ns/pid_for_children", process.id());
        let inode = fs::metadata(namespace).unwrap().ino();
        Self { inode, first: line.trim().parse().unwrap(), process }
    }
}

impl Drop for PidNamespace {
    fn drop(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

/// Keeps process 1 of a pid namespace from ending, even after SIGKILL, until it is dropped. The kernel lets such a
/// process end only when the parents of all others in its namespace have waited for them. The parent of one is outside
/// of the namespace here, and is stopped.
pub(crate) struct Unending {
    parent: Child,
}

impl Unending {
    pub(crate) fn new(first: u32) -> Self {
        let mut parent = Command::new("nsenter")
            .args(["--pid", "--target", &first.to_string(), "sh", "-c", "echo; read line"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        BufReader::new(parent.stdout.as_mut().unwrap()).read_line(&mut String::new()).unwrap();
        let stopped = Pid::from_raw(parent.id() as i32);
        kill(stopped, Signal::SIGSTOP).unwrap();
        // Until then it could still wait for its child.
        waitpid(stopped, Some(WaitPidFlag::WUNTRACED)).unwrap();
        Self { parent }
    }
}

impl Drop for Unending {
    fn drop(&mut self) {
        kill(Pid::from_raw(self.parent.id() as i32), Signal::SIGCONT).unwrap();
        // This closes its standard input too.
        self.parent.wait().unwrap();
    }
}

/// A process that is in a system call which nothing interrupts, until this is dropped. Its file system takes a request
/// and does not answer. The thread needs [`private_mounts`].
pub(crate) struct InSystemCall {
    process: Child,
    place: PathBuf,
    /// Closed: the request fails.
    requests: Option<File>,
}

impl InSystemCall {
    /// `place` is an empty directory.
    pub(crate) fn new(place: &Path) -> Self {
        // FUSE_INIT of version 7.31 (linux/fuse.h): fuse_out_header and fuse_init_out.
        const LENGTH: usize = 16 + 64;
        let mut requests = File::options().read(true).write(true).open("/dev/fuse").unwrap();
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", requests.as_raw_fd());
        mount(Some("test"), place, Some("fuse"), MsFlags::empty(), Some(options.as_str())).unwrap();
        let mut request = vec![0; 1 << 20];
        assert!(requests.read(&mut request).unwrap() > 0);
        let mut answer = Vec::from((LENGTH as u32).to_ne_bytes());
        answer.extend([0; 4]);
        // The number of the request.
        answer.extend(&request[8..16]);
        answer.extend([7_u32.to_ne_bytes(), 31_u32.to_ne_bytes()].concat());
        answer.resize(LENGTH, 0);
        requests.write_all(&answer).unwrap();
        let process = Command::new("stat").arg(place.join("x")).stderr(Stdio::null()).spawn().unwrap();
        // What was taken is waited for also by a process that was killed.
        assert!(requests.read(&mut request).unwrap() > 0);
        Self { process, place: place.into(), requests: Some(requests) }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.id()
    }
}

impl Drop for InSystemCall {
    fn drop(&mut self) {
        drop(self.requests.take());
        // A process that was forked meanwhile may have the descriptor until its execve.
        umount2(&self.place, MntFlags::MNT_FORCE | MntFlags::MNT_DETACH).unwrap();
        self.process.wait().unwrap();
    }
}
