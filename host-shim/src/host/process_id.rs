//! Processes identified by pid and start time, because the kernel reuses pids.

use std::{
    fs, io,
    os::{fd::OwnedFd, unix::fs::MetadataExt},
    path::Path,
    time::{Duration, Instant},
};

use nix::sched::{CloneFlags, unshare};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    param::clock_ticks_per_second,
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};
use serde::{Deserialize, Serialize};
use tokio::process::{Child, Command};

use crate::host::{
    blocking,
    patience::{Patience, Progress},
};

/// The inode number of the kernel's first pid namespace (kernel, include/linux/proc_ns.h, PROC_PID_INIT_INO).
const FIRST_PID_NAMESPACE: u64 = 0xefff_fffc;

/// The option of the VMM that its configuration follows.
pub(crate) const VMM_OPTION: &str = "--config";

/// A process: its pid and its start time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ProcessId {
    /// In our pid namespace.
    pub(crate) pid: u32,
    /// Clock ticks after boot: field 22 of /proc/PID/stat (proc_pid_stat(5)).
    pub(crate) start_time: u64,
    /// The inode number of the pid namespace in which the pid counts. None: an earlier version has written this.
    #[serde(default)]
    pub(crate) pid_namespace: Option<u64>,
}

impl ProcessId {
    /// The process that has `pid` now.
    pub(crate) fn of(pid: u32) -> io::Result<Self> {
        let [start_time] = stat(pid, [START_TIME])?;
        Ok(Self { pid, start_time, pid_namespace: Some(own_pid_namespace()?) })
    }

    /// The time of processors that all threads of the process have used, in clock ticks.
    pub(crate) fn cpu_time(self) -> io::Result<u64> {
        let [start_time, user, system] = stat(self.pid, [START_TIME, 14, 15])?;
        if start_time != self.start_time {
            return Err(io::ErrorKind::NotFound.into());
        }
        Ok(user.saturating_add(system))
    }

    /// How long ago the process began.
    pub(crate) fn age(self) -> Option<Duration> {
        let uptime = fs::read_to_string("/proc/uptime").ok()?;
        let uptime: f64 = uptime.split_whitespace().next()?.parse().ok()?;
        let ticks = self.start_time as f64 / clock_ticks_per_second() as f64;
        Some(
            Duration::try_from_secs_f64(uptime)
                .ok()?
                .saturating_sub(Duration::try_from_secs_f64(ticks).ok()?),
        )
    }

    /// How far it is on its way to its end. None: it has ended, or this cannot be read.
    pub(crate) fn progress(self) -> Option<Progress> {
        let [start_time, user, system, resident] = stat(self.pid, [START_TIME, 14, 15, 24]).ok()?;
        (start_time == self.start_time).then(|| Progress { cpu_time: user.saturating_add(system), resident })
    }

    /// The private memory that the process has in pages of its own, bytes (proc_pid_status(5), RssAnon). None: it has
    /// ended.
    pub(crate) fn anonymous_memory(self) -> Option<u64> {
        let [start_time] = stat(self.pid, [START_TIME]).ok()?;
        if start_time != self.start_time {
            return None;
        }
        let text = fs::read_to_string(format!("/proc/{}/status", self.pid)).ok()?;
        let line = text.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
    }

    /// Whether the pid counts in another pid namespace, so that it cannot be found out what the process does.
    /// containerd may run in a container that has the host's /run.
    fn is_elsewhere(self) -> io::Result<bool> {
        let own = own_pid_namespace()?;
        Ok(self.pid_namespace.is_some_and(|namespace| namespace != own))
    }

    /// Whether these are the same process, in this pid namespace.
    pub(crate) fn is(self, other: Self) -> bool {
        (self.pid, self.start_time) == (other.pid, other.start_time)
    }

    /// Whether the process lives, or it cannot be found out.
    pub(crate) fn may_live(self) -> bool {
        if self.is_elsewhere().unwrap_or(true) {
            return !self.pid_namespace.is_some_and(|namespace| has_no_process(namespace).unwrap_or(false));
        }
        match Self::of(self.pid) {
            Ok(now) => now.is(self) && !is_zombie(self.pid),
            Err(e) => !is_gone(&e),
        }
    }

    /// [`Self::send_kill`], which also waits for the end of the process. Blocks.
    pub(crate) fn kill(self, within: Duration) -> io::Result<()> {
        self.kill_patiently(Patience::new(within, within))
    }

    /// The same, but a process that makes progress is waited for longer than one that hangs. Blocks.
    pub(crate) fn kill_patiently(self, patience: Patience) -> io::Result<()> {
        match self.send_kill()? {
            Some(pidfd) if !ends(&pidfd, patience, || self.progress())? => Err(io::Error::new(
                io::ErrorKind::TimedOut,
                format!("process {} does not end although it was killed", self.pid),
            )),
            _ => Ok(()),
        }
    }

    /// Kills the process, and returns a pidfd that tells of its end. A process that has ended already, whose pid is
    /// another's by now, or that is in another pid namespace is left alone.
    pub(crate) fn send_kill(self) -> io::Result<Option<OwnedFd>> {
        if self.is_elsewhere()? {
            // Most likely a restart of containerd's container has ended it, with its pid namespace.
            tracing::warn!(
                pid = self.pid,
                "the process was in another pid namespace, and is taken for ended"
            );
            return Ok(None);
        }
        let Some(pid) = i32::try_from(self.pid).ok().and_then(Pid::from_raw) else {
            return Ok(None);
        };
        // The pidfd first: what it names cannot change any more, so the check below holds for the signal too.
        let pidfd = match pidfd_open(pid, PidfdFlags::empty()) {
            // EINVAL: it has ended, but its pid still names a session or a process group.
            Err(rustix::io::Errno::SRCH | rustix::io::Errno::INVAL) => return Ok(None),
            other => other?,
        };
        match Self::of(self.pid) {
            Ok(now) if now.is(self) => {}
            Ok(_) => return Ok(None),
            Err(e) if is_gone(&e) => return Ok(None),
            Err(e) => return Err(e),
        }
        match pidfd_send_signal(&pidfd, Signal::KILL) {
            Err(rustix::io::Errno::SRCH) => Ok(None),
            other => Ok(other.map(|()| Some(pidfd))?),
        }
    }
}

/// The field of /proc/PID/stat with the start time.
const START_TIME: usize = 22;

/// Fields of /proc/PID/stat, by their numbers in proc_pid_stat(5), from 3 on.
fn stat<const N: usize>(pid: u32, numbers: [usize; N]) -> io::Result<[u64; N]> {
    let stat = from_state_on(pid)?;
    let fields: Vec<_> = stat.split_whitespace().collect();
    let mut values = [0; N];
    for (value, number) in values.iter_mut().zip(numbers) {
        let field = fields.get(number.saturating_sub(3)).and_then(|field| field.parse().ok());
        *value = field.ok_or_else(|| io::Error::other(format!("/proc/{pid}/stat has no field {number}")))?;
    }
    Ok(values)
}

/// The line from field 3 on, the state. Field 2 is the program's name in parentheses, which may hold blanks and
/// parentheses itself.
fn from_state_on(pid: u32) -> io::Result<String> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    Ok(stat.rsplit_once(')').map_or("", |(_, rest)| rest).trim_start().to_owned())
}

/// Whether the process has ended, and its parent has not asked for its exit status yet. Nobody does in a container
/// whose process 1 is no init.
fn is_zombie(pid: u32) -> bool {
    from_state_on(pid).is_ok_and(|stat| stat.starts_with(['Z', 'X']))
}

/// Whether the processes of all pid namespaces are visible here, which is so in the kernel's first one only.
pub(crate) fn sees_all_processes() -> io::Result<bool> {
    Ok(own_pid_namespace()? == FIRST_PID_NAMESPACE)
}

/// Whether no process is left in a pid namespace that is not ours. False: it cannot be seen from here. A namespace has
/// a process 1 as long as there are processes in it or below it.
fn has_no_process(namespace: u64) -> io::Result<bool> {
    if !sees_all_processes()? {
        return Ok(false);
    }
    for entry in fs::read_dir("/proc")? {
        let entry = entry?;
        let name = entry.file_name();
        // Process 1 is in our own namespace, and nobody may look at it on some hosts.
        if name == "1" || !name.as_encoded_bytes().iter().all(u8::is_ascii_digit) {
            continue;
        }
        match fs::metadata(entry.path().join("ns/pid")) {
            Ok(found) if found.ino() == namespace => return Ok(false),
            Err(error) if !is_gone(&error) => return Err(error),
            // It is in another one, or ends meanwhile.
            Ok(_) | Err(_) => {}
        }
    }
    Ok(true)
}

fn own_pid_namespace() -> io::Result<u64> {
    Ok(fs::metadata("/proc/self/ns/pid")?.ino())
}

/// Waits for the end of a process. The end of another may interrupt that: SIGCHLD comes to any thread of the shim.
fn has_ended(pidfd: &OwnedFd, within: Duration) -> io::Result<bool> {
    let deadline = Instant::now() + within;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).map_err(io::Error::other)?;
        match poll(&mut [PollFd::new(pidfd, PollFlags::IN)], Some(&left)) {
            Err(rustix::io::Errno::INTR) => {}
            ended => return Ok(ended? > 0),
        }
    }
}

/// Waits for the end of a process, of which `progress` tells.
fn ends(pidfd: &OwnedFd, patience: Patience, progress: impl FnMut() -> Option<Progress>) -> io::Result<bool> {
    for within in patience.waits(progress) {
        if has_ended(pidfd, within)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The VMMs that were executed with this configuration: their last arguments are `--config CONFIG`. Another program may
/// have the file among its arguments too, such as an editor that shows it.
pub(crate) fn vmms_with(config: &Path) -> io::Result<Vec<ProcessId>> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let entry = entry?;
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        // A process may end while we look; then it is none of those we look for.
        let command = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let words: Vec<_> = command.split(|byte| *byte == 0).collect();
        // Each word ends with a null byte.
        let [_, .., option, path, b""] = words.as_slice() else { continue };
        if *option == VMM_OPTION.as_bytes()
            && *path == config.as_os_str().as_encoded_bytes()
            && let Ok(process) = ProcessId::of(pid)
        {
            found.push(process);
        }
    }
    Ok(found)
}

/// Spawns a process that cannot name any other: the first of a pid namespace of its own. Here it has a pid like all
/// others. If the caller gives up waiting, the process is killed as soon as it is there.
///
/// This takes a thread of its own: all later children of that thread would be in the namespace too, and could not be
/// made after the first one has ended.
pub(crate) async fn spawn_alone(command: Command) -> io::Result<Child> {
    blocking::spawn_after(|| Ok(unshare(CloneFlags::CLONE_NEWPID)?), command).await
}

/// /proc answers ENOENT for a pid that is free, ESRCH when the process ends between open and read.
fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound
        || error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error())
}

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead, BufReader},
        process::{Command, Stdio},
        sync::mpsc,
        thread,
    };

    use nix::sys::{
        pthread::{pthread_kill, pthread_self},
        signal::Signal,
    };
    use tokio::signal::unix::{SignalKind, signal};

    use super::*;
    use crate::testing::{PidNamespace, Unending, executed, vmm_with};

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn kills_the_process_it_names() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let process = ProcessId::of(child.id()).unwrap();
        process.kill(SECOND).unwrap();
        assert!(!child.wait().unwrap().success());
        process.kill(SECOND).unwrap();
    }

    #[test]
    fn a_process_that_has_ended_does_not_live_before_its_parent_has_asked() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let process = ProcessId::of(child.id()).unwrap();
        assert!(process.may_live());
        process.kill(SECOND).unwrap();
        assert!(!process.may_live());
        child.wait().unwrap();
        assert!(!process.may_live());
    }

    #[test]
    fn this_process_is_young() {
        let own = ProcessId::of(std::process::id()).unwrap();
        assert!(own.age().unwrap() < Duration::from_secs(24 * 3600));
        // What a damaged journal may say.
        let none = ProcessId { pid: u32::MAX, start_time: u64::MAX, pid_namespace: None };
        assert_eq!(none.age(), Some(Duration::ZERO));
    }

    #[test]
    fn the_time_of_processors_is_that_of_all_threads() {
        let process = ProcessId::of(std::process::id()).unwrap();
        let before = process.cpu_time().unwrap();
        let work = || (0..20_000_000_u64).fold(1_u64, |sum, next| std::hint::black_box(sum ^ next));
        thread::spawn(work).join().unwrap();
        assert!(process.cpu_time().unwrap() > before);
        let another = ProcessId { start_time: process.start_time + 1, ..process };
        assert_eq!(another.cpu_time().unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn a_process_that_makes_progress_is_waited_for_after_it_was_killed() {
        let namespace = PidNamespace::new();
        let process = ProcessId::of(namespace.first).unwrap();
        let mut unending = Some(Unending::new(namespace.first));
        let pidfd = process.send_kill().unwrap().unwrap();

        let idle = Duration::from_millis(50);
        assert!(!ends(&pidfd, Patience::new(idle, 60 * SECOND), || process.progress()).unwrap());
        let mut looks = 0;
        let slow = || {
            looks += 1;
            drop(unending.take_if(|_| looks == 5));
            Some(Progress { cpu_time: looks, resident: 0 })
        };
        assert!(ends(&pidfd, Patience::new(idle, 60 * SECOND), slow).unwrap());
        assert!(looks >= 5);
        process.kill_patiently(Patience::new(SECOND, SECOND)).unwrap();
    }

    #[test]
    fn the_progress_of_a_process_is_that_of_this_one() {
        let process = ProcessId::of(std::process::id()).unwrap();
        let Progress { cpu_time, resident } = process.progress().unwrap();
        assert!(resident > 0 && cpu_time <= process.cpu_time().unwrap());
        assert_eq!(ProcessId { start_time: process.start_time + 1, ..process }.progress(), None);
    }

    #[tokio::test]
    async fn a_signal_to_the_thread_does_not_end_the_wait() {
        // From its end on it is handled: without a handler it would end the test.
        let _handled = signal(SignalKind::user_defined1()).unwrap();
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let pidfd = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).unwrap();
        let (thread, waiter) = mpsc::channel();
        let waiting = thread::spawn(move || {
            thread.send(pthread_self()).unwrap();
            has_ended(&pidfd, Duration::from_millis(300))
        });
        let waiter = waiter.recv().unwrap();
        for _ in 0..20 {
            thread::sleep(Duration::from_millis(5));
            pthread_kill(waiter, Signal::SIGUSR1).unwrap();
        }
        assert!(!waiting.join().unwrap().unwrap());
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn leaves_another_process_with_the_same_pid_alone() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let mut earlier = ProcessId::of(child.id()).unwrap();
        earlier.start_time -= 1;
        earlier.kill(SECOND).unwrap();
        assert!(child.try_wait().unwrap().is_none());
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn a_process_of_another_pid_namespace_may_live_and_is_not_killed() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let here = ProcessId::of(child.id()).unwrap();
        let other = PidNamespace::new();
        let elsewhere = ProcessId { pid_namespace: Some(other.inode), ..here };
        let unknown = ProcessId { pid: u32::MAX, ..elsewhere };
        for process in [elsewhere, unknown] {
            assert!(process.may_live());
            process.kill(SECOND).unwrap();
        }
        assert!(child.try_wait().unwrap().is_none());
        drop(other);
        // The first process of a namespace is seen there until it is reaped.
        let begun = Instant::now();
        while elsewhere.may_live() && sees_all_processes().unwrap() {
            assert!(begun.elapsed() < 10 * SECOND, "its pid namespace has ended");
            thread::sleep(Duration::from_millis(5));
        }
        elsewhere.kill(SECOND).unwrap();
        assert!(child.try_wait().unwrap().is_none());
        // What earlier versions have written.
        let earlier: ProcessId =
            serde_json::from_str(&format!(r#"{{"pid":{},"start_time":{}}}"#, here.pid, here.start_time))
                .unwrap();
        assert!(earlier.may_live());
        earlier.kill(SECOND).unwrap();
        assert!(!child.wait().unwrap().success());
    }

    #[test]
    fn a_dead_session_leader_is_dead() {
        let mut leader = Command::new("setsid")
            .args(["sh", "-c", "sleep 60 >/dev/null & echo $!; read line"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(leader.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let process = ProcessId::of(leader.id()).unwrap();
        drop(leader.stdin.take());
        leader.wait().unwrap();
        process.kill(SECOND).unwrap();
        ProcessId::of(line.trim().parse().unwrap()).unwrap().kill(SECOND).unwrap();
    }

    #[test]
    fn finds_the_vmm_with_a_configuration_and_nobody_else_who_has_it_as_an_argument() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(vmms_with(dir.path()).unwrap(), []);
        let mut vmm = vmm_with(dir.path());
        let mut editor = executed(&[dir.path()]);
        let mut search = executed(&["--config".as_ref(), dir.path(), "more".as_ref()]);
        assert_eq!(vmms_with(dir.path()).unwrap(), [ProcessId::of(vmm.id()).unwrap()]);
        for child in [&mut vmm, &mut editor, &mut search] {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }
}
