//! `delete` as containerd runs it after a shim has died: it kills `delete` after five seconds, and only that process.
//! What the shim has left must be undone nevertheless.

#![allow(
    clippy::unwrap_used,
    reason = "clippy allows it in functions with #[test] only, and all of this is a test"
)]

use std::{
    fs::{self, File},
    io::{self, Read},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use bulkhead_host_shim::operator::remove_garbage;
use containerd_shim_protos::api::DeleteResponse;
use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
};
use protobuf::Message;
use rustix::{
    fs::{FlockOperation, flock},
    process::{Pid, Signal, kill_process},
};

const SHIM: &str = env!("CARGO_BIN_EXE_containerd-shim-bulkhead-v2");
const ROOT: &str = "/run/bulkhead";

/// containerd's limit (`io.containerd.timeout.shim.cleanup`).
const CLEANUP: Duration = Duration::from_secs(5);
/// How long what goes on alone may take here.
const ALONE: Duration = Duration::from_secs(30);

/// What a shim that was killed has left: a journal, and a process that stands for the VMM.
struct Left {
    /// The test's own bundles.
    bundles: tempfile::TempDir,
    state: PathBuf,
    vmm: Child,
}

impl Left {
    /// In a `/run` of the test's own.
    fn new() -> Self {
        unshare(CloneFlags::CLONE_NEWNS).unwrap();
        let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
        mount(None::<&str>, "/", None::<&str>, private, None::<&str>).unwrap();
        mount(Some("test"), "/run", Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
        let state = Path::new(ROOT).join("c/ns/demo");
        fs::create_dir_all(state.join("containers")).unwrap();
        let bundles = tempfile::tempdir().unwrap();
        let bundle = bundles.path().join("demo");
        fs::create_dir(&bundle).unwrap();
        let vmm = Command::new("sleep").arg("1000").spawn().unwrap();
        let stat = fs::read_to_string(format!("/proc/{}/stat", vmm.id())).unwrap();
        let start = stat.rsplit_once(')').unwrap().1.split_whitespace().nth(19).unwrap().to_owned();
        // No process has begun in the first clock tick.
        let journal = [
            format!(r#"{{"effect":"shim","pid":{},"start_time":0}}"#, std::process::id()),
            format!(r#"{{"effect":"bundle","path":"{}"}}"#, bundle.display()),
            format!(r#"{{"effect":"directory","path":"{}"}}"#, state.join("containers").display()),
            format!(r#"{{"effect":"directory","path":"{}"}}"#, state.join("made").display()),
            format!(r#"{{"effect":"vmm","pid":{},"start_time":{start}}}"#, vmm.id()),
        ];
        fs::create_dir(state.join("made")).unwrap();
        fs::write(state.join("journal"), journal.join("\n") + "\n").unwrap();
        Self { bundles, state, vmm }
    }

    fn bundle(&self) -> PathBuf {
        self.bundles.path().join("demo")
    }

    /// `delete`, as containerd starts it.
    fn delete(&self) -> Child {
        let bundle = self.bundle();
        Command::new(SHIM)
            .args(["-namespace", "ns", "-address", "/c", "-publish-binary", "/bin/true", "-id", "demo"])
            .arg("-bundle")
            .arg(&bundle)
            .arg("delete")
            .current_dir(&bundle)
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    }

    fn vmm_has_ended(&mut self) -> bool {
        self.vmm.try_wait().unwrap().is_some()
    }

    fn is_undone(&self) -> bool {
        !Path::new(ROOT).exists()
    }
}

impl Drop for Left {
    fn drop(&mut self) {
        drop(self.vmm.kill());
        drop(self.vmm.wait());
    }
}

/// What containerd gets. It waits for the end of both streams, like os/exec of Go.
struct Answer {
    status: ExitStatus,
    stdout: Vec<u8>,
    stderr: String,
}

/// Waits for `delete` as containerd does.
fn answer(mut delete: Child) -> Answer {
    let begun = Instant::now();
    let (mut stdout, mut stderr) = (delete.stdout.take().unwrap(), delete.stderr.take().unwrap());
    let warnings = thread::spawn(move || io::read_to_string(&mut stderr).unwrap());
    let output = thread::spawn(move || {
        let mut output = Vec::new();
        stdout.read_to_end(&mut output).unwrap();
        output
    });
    let mut is_killed = false;
    let status = loop {
        match delete.try_wait().unwrap() {
            Some(status) => break status,
            None if begun.elapsed() > CLEANUP && !is_killed => {
                delete.kill().unwrap();
                is_killed = true;
            }
            None => thread::sleep(Duration::from_millis(5)),
        }
    };
    let answer = Answer { status, stdout: output.join().unwrap(), stderr: warnings.join().unwrap() };
    assert!(begun.elapsed() < CLEANUP + Duration::from_secs(1), "somebody else has kept its output open");
    answer
}

fn wait_until(what: &str, condition: impl FnMut() -> bool) {
    wait_within(ALONE, what, condition);
}

fn wait_within(within: Duration, what: &str, mut condition: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < within, "{what} does not happen within {within:?}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Takes the lock of whoever cleans up the pod.
fn lock(state: &Path) -> File {
    let directory = File::open(state).unwrap();
    flock(&directory, FlockOperation::NonBlockingLockExclusive).unwrap();
    directory
}

/// The processes that undo the pod, but for `delete` itself.
fn undoing() -> Vec<Pid> {
    let is_it = |pid: &i32| {
        let file = |name: &str| fs::read(format!("/proc/{pid}/{name}")).unwrap_or_default();
        let own = fs::read_link("/proc/self/ns/mnt").unwrap();
        let (words, namespace) = (file("cmdline"), fs::read_link(format!("/proc/{pid}/ns/mnt")));
        words.ends_with(b"\0demo\0undo\0") && namespace.is_ok_and(|theirs| theirs == own)
    };
    let pids =
        fs::read_dir("/proc").unwrap().filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok());
    pids.filter(is_it).filter_map(Pid::from_raw).collect()
}

#[test]
fn a_pod_is_undone_before_the_answer_if_that_takes_no_time() {
    let mut left = Left::new();
    let Answer { status, stdout, stderr } = answer(left.delete());
    assert!(status.success() && stderr.is_empty(), "{status}: {stderr}");
    let response = DeleteResponse::parse_from_bytes(&stdout).unwrap();
    assert_eq!((response.pid, response.exit_status), (left.vmm.id(), 137));
    assert!(left.is_undone() && left.vmm_has_ended());
    // Once more, of a pod of which nothing is left.
    let again = answer(left.delete());
    assert!(again.status.success() && again.stderr.is_empty(), "{}", again.stderr);
}

#[test]
fn what_takes_longer_than_containerd_waits_is_undone_after_the_answer() {
    let mut left = Left::new();
    // Somebody else cleans up, and is slow.
    let locked = lock(&left.state);
    let Answer { status, stdout, stderr } = answer(left.delete());
    drop(locked);
    // containerd removes the bundle, and the pod's id is free again.
    let success = status.success();
    wait_until("the undo", || left.is_undone());
    assert!(left.vmm_has_ended());
    assert!(success, "{status}: {stderr}");
    assert_eq!(DeleteResponse::parse_from_bytes(&stdout).unwrap().exit_status, 137);
    assert!(stderr.contains("goes on"), "{stderr}");
}

#[test]
fn the_programs_of_the_pod_have_ended_when_delete_says_so() {
    let mut left = Left::new();
    let _locked = lock(&left.state);
    let Answer { status, stderr, .. } = answer(left.delete());
    assert!(status.success(), "{status}: {stderr}");
    wait_within(Duration::from_secs(1), "the end of the VMM", || left.vmm_has_ended());
    assert!(left.state.join("journal").exists());
    undoing().into_iter().for_each(|pid| _ = kill_process(pid, Signal::KILL));
}

#[test]
fn a_delete_that_is_late_leaves_a_new_task_of_the_id_alone() {
    let mut left = Left::new();
    let bundle = left.bundle();
    // containerd has removed the bundle for another request, and made that of the new task.
    let replaced = format!("rmdir {0} && mkdir {0} && exec \"$0\" \"$@\"", bundle.display());
    let mut command = Command::new("sh");
    command.args(["-c", &replaced, SHIM, "-namespace", "ns", "-address", "/c", "-id", "demo"]);
    let command = command.arg("-bundle").arg(&bundle).arg("delete").current_dir(&bundle);
    let late = answer(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap());
    assert!(late.status.success() && late.stderr.contains("nothing is deleted"), "{}", late.stderr);
    assert!(left.state.join("journal").exists() && !left.vmm_has_ended());
}

#[test]
fn delete_may_be_killed_at_any_time() {
    let mut alone = 0;
    for microseconds in (0..40_000).step_by(2_000) {
        let mut left = Left::new();
        let mut delete = left.delete();
        thread::sleep(Duration::from_micros(microseconds));
        delete.kill().unwrap();
        delete.wait().unwrap();
        // If it has started another process, that one is enough.
        wait_until("the end of the undo", || undoing().is_empty());
        alone += usize::from(left.is_undone());
        // That may also begin only now.
        wait_until("the rest of the undo", || {
            let removed = remove_garbage(Path::new(ROOT), |_, _| ());
            assert!(removed.iter().all(|removed| removed.error.is_none()), "{removed:?}");
            left.is_undone()
        });
        assert!(left.vmm_has_ended(), "after {microseconds} us");
    }
    assert!(alone > 0);
}

#[test]
fn the_undo_may_be_killed_and_the_next_delete_completes_it() {
    for microseconds in (0..20_000).step_by(2_000) {
        let mut left = Left::new();
        let delete = left.delete();
        wait_until("an undo", || !undoing().is_empty() || left.is_undone());
        thread::sleep(Duration::from_micros(microseconds));
        undoing().into_iter().for_each(|pid| _ = kill_process(pid, Signal::KILL));
        let first = answer(delete);
        assert!(first.status.success(), "{}", first.stderr);
        assert_eq!(DeleteResponse::parse_from_bytes(&first.stdout).unwrap().exit_status, 137);
        let second = answer(left.delete());
        assert!(second.status.success() && left.is_undone() && left.vmm_has_ended(), "{}", second.stderr);
    }
}

#[test]
fn many_that_clean_up_the_same_pod_at_once_all_succeed() {
    let mut left = Left::new();
    let deletes: Vec<_> = (0..4).map(|_| left.delete()).collect();
    remove_garbage(Path::new(ROOT), |_, _| ());
    for delete in deletes {
        let Answer { status, stderr, .. } = answer(delete);
        assert!(status.success(), "{status}: {stderr}");
    }
    assert!(left.is_undone() && left.vmm_has_ended());
}
