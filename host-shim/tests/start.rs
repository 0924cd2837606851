//! `start` as containerd runs it, while another version is installed.

#![allow(
    clippy::unwrap_used,
    reason = "clippy allows it in functions with #[test] only, and all of this is a test"
)]

use std::{
    fs,
    os::unix::net::UnixStream,
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
    sys::signal::{Signal, kill},
    unistd::Pid,
};

/// How long the server may take to begin.
const PATIENCE: Duration = Duration::from_secs(30);

const NAME: &str = "containerd-shim-bulkhead-v2";

/// The processes that have `id` as a word of their command line, with what the kernel calls them.
fn processes_of(id: &str) -> Vec<(i32, String)> {
    let pids = fs::read_dir("/proc").unwrap().filter_map(|it| it.unwrap().file_name().to_str()?.parse().ok());
    let has_id = |pid: &i32| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.split(|byte| *byte == 0).any(|word| word == id.as_bytes())
    };
    let named = |pid| (pid, fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default());
    pids.filter(has_id).map(named).collect()
}

#[test]
fn a_shim_whose_file_is_replaced_while_it_starts_starts() {
    // In a `/run` of the test's own.
    unshare(CloneFlags::CLONE_NEWNS).unwrap();
    let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    mount(None::<&str>, "/", None::<&str>, private, None::<&str>).unwrap();
    mount(Some("test"), "/run", Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let (bundle, program) = (dir.path().join("bundle"), dir.path().join(NAME));
    fs::create_dir(&bundle).unwrap();
    fs::write(bundle.join("config.json"), r#"{"ociVersion": "1.0.2"}"#).unwrap();
    fs::copy(env!("CARGO_BIN_EXE_containerd-shim-bulkhead-v2"), &program).unwrap();
    let id = format!("replaced-{}", std::process::id());
    let mut start = Command::new(&program)
        .args(["-namespace", "ns", "-address", "/c", "-id", &id, "start"])
        .current_dir(&bundle)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // It reads its input first, to the end.
    fs::write(dir.path().join("new"), "the next version").unwrap();
    fs::rename(dir.path().join("new"), &program).unwrap();
    drop(start.stdin.take());
    let answer = start.wait_with_output().unwrap();
    let (address, said) =
        (String::from_utf8(answer.stdout).unwrap(), String::from_utf8(answer.stderr).unwrap());
    assert!(answer.status.success(), "{said}");
    UnixStream::connect(Path::new(address.strip_prefix("unix://").unwrap())).unwrap();
    // Soon it has the name by which operators know it. While it is being executed, it has no command line.
    let begun = Instant::now();
    let is_named = |servers: &[(i32, String)]| matches!(servers, [(_, name)] if name == "containerd-shim\n");
    let servers = loop {
        let servers = processes_of(&id);
        if is_named(&servers) || begun.elapsed() > PATIENCE {
            break servers;
        }
        thread::sleep(Duration::from_millis(5));
    };
    servers.iter().for_each(|(pid, _)| kill(Pid::from_raw(*pid), Signal::SIGKILL).unwrap());
    assert!(is_named(&servers), "{servers:?}");
}
