//! What the VMM's process can do, should its guest take it over: seen from outside, while its guest is at work.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use nix::errno::Errno;
use nix::libc;
use nix::sys::ptrace;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use super::Case;
use super::cpus::vcpus;
use crate::ctr::{Host, Task};
use crate::fixtures::scratch;
use crate::pods::Pod;
use crate::snapshot::the_process_of;

pub(super) const CASES: &[Case] = &[
    Case::bulkhead("the_vmm_gains_nothing_and_leaves_no_core", gains_nothing),
    Case::bulkhead("only_the_thread_that_serves_files_has_capabilities", capabilities),
    Case::bulkhead("no_thread_is_roots_that_need_not_be", users),
    Case::bulkhead("each_thread_of_the_vmm_has_a_filter_of_system_calls", filters),
    Case::bulkhead("the_vmm_sees_no_file_of_the_host_but_what_it_serves", files),
    Case::bulkhead("the_thread_that_serves_files_opens_no_other", other_files),
    Case::bulkhead("a_container_that_is_deleted_leaves_the_jail_of_its_pod", pod_files),
];

/// CAP_CHOWN, DAC_OVERRIDE, FOWNER, FSETID, SETGID, SETUID, MKNOD and SETFCAP.
const FILE_SERVER: u64 = 0x880000db;

/// The threads of a VMM that serve files: those of the share, and those of the roots of containers.
const FILE_SERVER_THREADS: usize = 8 + 6;

/// Where the VMM has the share in its root directory, for each of the two devices.
const SHARES: [&str; 2] = ["/share0", "/share1"];

/// The process of a VMM.
pub(super) struct Vmm {
    pub(super) pid: u32,
}

/// A thread of it: its name, and fields of its `/proc/PID/task/TID/status`.
pub(super) struct Thread {
    id: i32,
    pub(super) name: String,
    status: String,
}

impl Vmm {
    pub(super) fn of(task: &Task<'_>) -> Result<Self> {
        Self::of_sandbox(task.id())
    }

    pub(super) fn of_sandbox(id: &str) -> Result<Self> {
        Ok(Self { pid: the_process_of("bulkhead-vmm", id)? })
    }

    /// A file of `/proc/PID`.
    pub(super) fn read(&self, file: &str) -> Result<String> {
        let path = format!("/proc/{}/{file}", self.pid);
        fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))
    }

    /// Whether all of its threads have ended: a process of which nobody has taken the status is still there with one.
    pub(super) fn has_ended(&self) -> bool {
        match fs::read_dir(format!("/proc/{}/task", self.pid)).map(Iterator::count) {
            Ok(1) => self.read("status").is_ok_and(|status| status.contains("\nState:\tZ")),
            Ok(_) => false,
            Err(_) => true,
        }
    }

    /// Its threads, but for those that KVM has in the process, which never leave the host's kernel.
    pub(super) fn threads(&self) -> Result<Vec<Thread>> {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.pid)).context("the VMM has no threads")?;
        let thread = |tid: String| -> Result<Thread> {
            let name = self.read(&format!("task/{tid}/comm"))?.trim().to_owned();
            Ok(Thread { id: tid.parse()?, name, status: self.read(&format!("task/{tid}/status"))? })
        };
        let threads = tasks.map(|task| thread(task?.file_name().to_string_lossy().into_owned()));
        threads.filter(|thread| !matches!(thread, Ok(thread) if thread.name.starts_with("kvm-"))).collect()
    }
}

impl Thread {
    /// Whether it waits in the kernel for what no signal but a fatal one ends.
    pub(super) fn is_stuck(&self) -> bool {
        self.value("State").is_ok_and(|state| state.starts_with('D'))
    }

    pub(super) fn value(&self, field: &str) -> Result<&str> {
        let line = self.status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
        Ok(line.with_context(|| format!("no {field} in the status of {}", self.name))?.trim())
    }

    /// Expects that a field has this value.
    fn has(&self, field: &str, expected: &str) -> Result<()> {
        let came = self.value(field)?;
        ensure!(came == expected, "expected  {field} {expected} of thread {}\ncame      {came}", self.name);
        Ok(())
    }
}

/// Asks a VMM, by its control socket, to end; it answers.
pub(super) fn stop_vmm(control: &Path) -> Result<()> {
    let mut socket = UnixStream::connect(control).context("no control socket")?;
    socket.write_all(b"{\"op\":\"stop\"}\n")?;
    let mut answer = String::new();
    socket.read_to_string(&mut answer)?;
    ensure!(answer.contains("\"ok\""), "expected  ok\ncame      {answer:?}");
    Ok(())
}

fn gains_nothing(host: &Host) -> Result<()> {
    let task = host.idle()?;
    let vmm = Vmm::of(&task)?;
    for thread in vmm.threads()? {
        thread.has("NoNewPrivs", "1")?;
    }
    let limits = vmm.read("limits")?;
    let core = limits.lines().find_map(|line| line.strip_prefix("Max core file size"));
    let core: Vec<_> = core.context("no limit of core files")?.split_whitespace().collect();
    // With this limit, and with no other, the kernel does not start the program of core_pattern either.
    ensure!(core == ["1", "1", "bytes"], "expected  no core\ncame      {core:?}");
    Ok(())
}

fn capabilities(host: &Host) -> Result<()> {
    let task = host.idle()?;
    let threads = Vmm::of(&task)?.threads()?;
    let vcpus: Vec<_> = (0..vcpus()?).map(|vcpu| format!("vcpu{vcpu}")).collect();
    let vcpus: Vec<_> = vcpus.iter().map(String::as_str).collect();
    let mut names: Vec<_> = threads.iter().map(|thread| thread.name.as_str()).collect();
    names.sort_unstable();
    // The first thread has the name of the program. Several threads serve files.
    let mut expected = [
        &["balloon", "block", "bulkhead-vmm"][..],
        &["fs"; FILE_SERVER_THREADS],
        &["mem", "net", "rng"],
        &vcpus,
        &["vsock"],
    ]
    .concat();
    expected.sort_unstable();
    ensure!(names == expected, "expected  threads {expected:?}\ncame      {names:?}");
    for thread in &threads {
        let kept = if thread.name == "fs" { FILE_SERVER } else { 0 };
        for set in ["CapPrm", "CapEff"] {
            thread.has(set, &format!("{kept:016x}"))?;
        }
        for set in ["CapInh", "CapBnd", "CapAmb"] {
            thread.has(set, &format!("{:016x}", 0))?;
        }
    }
    Ok(())
}

fn users(host: &Host) -> Result<()> {
    let task = host.idle()?;
    for thread in Vmm::of(&task)?.threads()? {
        let user: u32 = thread.value("Uid")?.split_whitespace().next().context("no user")?.parse()?;
        let is_roots = ["fs", "vsock"].contains(&thread.name.as_str());
        ensure!((user == 0) == is_roots, "expected  another user of {}\ncame      {user}", thread.name);
    }
    Ok(())
}

fn filters(host: &Host) -> Result<()> {
    const FILTERED: &str = "2";
    let task = host.idle()?;
    for thread in Vmm::of(&task)?.threads()? {
        thread.has("Seccomp", FILTERED)?;
    }
    Ok(())
}

fn files(host: &Host) -> Result<()> {
    let task = host.idle()?;
    let vmm = Vmm::of(&task)?;
    for kind in ["mnt", "ipc", "pid"] {
        let of = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/{kind}"));
        let (own, hosts) = (of(&vmm.pid.to_string())?, of("1")?);
        ensure!(own != hosts, "expected  another {kind} namespace than the host's\ncame      {own:?}");
    }
    let root = fs::read_dir(format!("/proc/{}/root", vmm.pid))?;
    let mut seen = root.map(|entry| Ok(entry?.file_name())).collect::<Result<Vec<_>>>()?;
    seen.sort();
    // The same directory twice: for each of the two devices.
    let expected = ["proc", "share0", "share1", "vsock"];
    ensure!(seen == expected, "expected  {expected:?}\ncame      {seen:?}");
    let mounts = vmm.read("mountinfo")?;
    // Fields 5 and 6 of proc_pid_mountinfo(5): where a mount is, and its options.
    for share in SHARES {
        let is_read_only = |mount: &str| {
            let mut fields = mount.split(' ').skip(4);
            fields.next() == Some(share) && fields.next().is_some_and(|options| options.starts_with("ro,"))
        };
        ensure!(mounts.lines().any(is_read_only), "expected  a read-only {share}\ncame      {mounts}");
    }
    for entry in fs::read_dir(format!("/proc/{}/fd", vmm.pid))? {
        let entry = entry?.path();
        // One that was closed meanwhile is none.
        let (Ok(open), Ok(to)) = (fs::metadata(&entry), fs::read_link(&entry)) else { continue };
        let is_served = SHARES.iter().any(|share| to.starts_with(share)) || to == Path::new("/proc/self/fd");
        ensure!(
            !open.is_dir() || is_served,
            "expected  no directory open but in the share\ncame      {to:?}"
        );
    }
    Ok(())
}

/// Landlock lets nobody look from outside at what it keeps from whom, so the thread is made to try it.
fn other_files(host: &Host) -> Result<()> {
    let task = host.container().detach(&["sleep", "1000"])?;
    let threads = Vmm::of(&task)?.threads()?;
    let server = threads.iter().find(|thread| thread.name == "fs").context("no thread serves files")?;
    let taken_over = TakenOver::at_next_call(server)?;
    taken_over.opens(b"/share0\0")??;
    let sockets = taken_over.opens(b"/vsock\0\0")?;
    ensure!(sockets == Err(Errno::EACCES), "expected  EACCES for /vsock\ncame      {sockets:?}");
    drop(taken_over);
    task.exec(&["ls", "/etc/passwd"])?.succeeds()?;
    Ok(())
}

/// A thread that stands before a system call, which it makes when it has done what we want.
struct TakenOver {
    thread: Pid,
    before: libc::user_regs_struct,
}

impl TakenOver {
    fn at_next_call(thread: &Thread) -> Result<Self> {
        let thread = Pid::from_raw(thread.id);
        ptrace::attach(thread).context("cannot trace the thread")?;
        wait(thread)?;
        go_on(thread)?;
        Ok(Self { thread, before: ptrace::getregs(thread)? })
    }

    /// Has it open the directory, and leave it open. Eight bytes: what a single write puts into its memory.
    fn opens(&self, path: &[u8; 8]) -> Result<Result<u64, Errno>> {
        /// Below the stack, out of the way of the 128 bytes that a function may use there (System V ABI, AMD64, 3.2.2).
        const BELOW: u64 = 1024;
        /// Length of the instruction that makes a system call.
        const SYSCALL: u64 = 2;
        let place = self.before.rsp - BELOW;
        ptrace::write(self.thread, place as ptrace::AddressType, i64::from_ne_bytes(*path))?;
        let open = libc::user_regs_struct {
            orig_rax: libc::SYS_openat as u64,
            rdi: libc::AT_FDCWD as u64,
            rsi: place,
            rdx: (libc::O_DIRECTORY | libc::O_CLOEXEC) as u64,
            ..self.before
        };
        ptrace::setregs(self.thread, open)?;
        go_on(self.thread)?;
        let answer = ptrace::getregs(self.thread)?.rax;
        // Back to where it stood.
        let again = libc::user_regs_struct {
            rip: self.before.rip - SYSCALL,
            rax: self.before.orig_rax,
            orig_rax: u64::MAX,
            ..self.before
        };
        ptrace::setregs(self.thread, again)?;
        go_on(self.thread)?;
        let errno = i32::try_from(answer.wrapping_neg()).ok().filter(|errno| (1..4096).contains(errno));
        Ok(errno.map_or(Ok(answer), |errno| Err(Errno::from_raw(errno))))
    }
}

impl Drop for TakenOver {
    fn drop(&mut self) {
        // Should it fail, the case does too: its container has no files any more.
        let _ = ptrace::detach(self.thread, None);
    }
}

/// To the start or the end of its next system call.
fn go_on(thread: Pid) -> Result<()> {
    ptrace::syscall(thread, None)?;
    wait(thread)
}

fn wait(thread: Pid) -> Result<()> {
    let stopped = waitpid(thread, Some(WaitPidFlag::__WALL))?;
    ensure!(
        matches!(stopped, WaitStatus::Stopped(..)),
        "expected  a thread that stops\ncame      {stopped:?}"
    );
    Ok(())
}

fn pod_files(host: &Host) -> Result<()> {
    let volume = scratch()?;
    let pod = Pod::plan(host).start()?;
    let vmm = Vmm::of_sandbox(pod.id())?;
    let shown = |what: &str| -> Result<bool> {
        let is_below = |line: &str| SHARES.iter().any(|share| line.contains(&format!("{share}/")));
        Ok(vmm.read("mountinfo")?.lines().any(|line| is_below(line) && line.contains(what)))
    };
    let container =
        pod.container().named("guest", 0).mount(volume.path(), "/volume").start(&["sleep", "1000"])?;
    let places = ["/rootfs ", "/mounts/", "/volume "];
    let found = || places.iter().map(|place| shown(place)).collect::<Result<Vec<_>>>();
    ensure!(found()? == [true; 3], "expected  the container's files in the jail\ncame      {:?}", found()?);
    container.remove()?;
    ensure!(found()? == [false; 3], "expected  none of the container's files\ncame      {:?}", found()?);
    pod.remove()
}
