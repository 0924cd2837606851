//! What a person sees of a long step, on a terminal and without one. The step is the first one of a new machine, which
//! makes the tool root, and another program is in the place of mmdebstrap.

#![allow(clippy::unwrap_used)]

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use nix::pty::openpty;
use tempfile::TempDir;

/// What a terminal is told to remove a line, and the file that keeps the step from ending.
const REMOVE: &str = "\x1b[2K";
const WAIT: &str = "wait";

/// The step, whose program fails as soon as there is no file [`WAIT`].
fn step(dir: &Path, terminal: &str) -> Command {
    let program = dir.join("mmdebstrap");
    let script = format!(
        "#!/bin/sh\n[ \"$1\" = --version ] && exit\necho why\nwhile [ -e {}/{WAIT} ]; do sleep 0.1; done\nexit 3\n",
        dir.display()
    );
    fs::write(&program, script).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
    let path = format!("{}:{}", dir.display(), std::env::var("PATH").unwrap());
    command.arg("tools").env("PATH", path).env("TERM", terminal).env("BULKHEAD_CACHE", dir.join("cache"));
    command.stdin(Stdio::null()).stdout(Stdio::null());
    command
}

/// All that the step prints on a terminal. It ends when `is_shown`, or at once.
fn on_a_terminal(terminal: &str, is_shown: Option<&str>) -> String {
    let dir = TempDir::new().unwrap();
    let wait = dir.path().join(WAIT);
    if is_shown.is_some() {
        fs::write(&wait, "").unwrap();
    }
    let pty = openpty(None, None).unwrap();
    let mut child = step(dir.path(), terminal).stderr(pty.slave).spawn().unwrap();
    let (sender, receiver) = mpsc::channel();
    let mut master = File::from(pty.master);
    thread::spawn(move || {
        let mut buffer = [0; 4096];
        // EIO: nobody has the other side any more.
        while let Ok(length @ 1..) = master.read(&mut buffer) {
            if sender.send(buffer[..length].to_vec()).is_err() {
                return;
            }
        }
    });
    let mut text = Vec::new();
    loop {
        match receiver.recv_timeout(Duration::from_secs(120)) {
            Ok(more) => text.extend(more),
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
            Err(mpsc::RecvTimeoutError::Timeout) => panic!("{:?}", String::from_utf8_lossy(&text)),
        }
        if is_shown.is_some_and(|shown| String::from_utf8_lossy(&text).contains(shown)) && wait.exists() {
            fs::remove_file(&wait).unwrap();
        }
    }
    assert!(!child.wait().unwrap().success());
    String::from_utf8(text).unwrap()
}

/// The lines of today: the step, how it ended, and the end of its log.
fn assert_lines(text: &str) {
    let lines: Vec<_> = text.lines().collect();
    let [first, end, error, log] = lines.as_slice() else { panic!("{text:?}") };
    assert_eq!(*first, "==> making the tool root: QEMU, kernel source, compiler");
    assert!(end.starts_with("    making the tool root: QEMU, kernel source, compiler: failed, "), "{text:?}");
    assert!(error.starts_with("xtask: ") && error.ends_with("/log/mmdebstrap-tools.log:"), "{text:?}");
    assert_eq!(*log, "why");
}

#[test]
fn a_terminal_shows_a_bar_that_is_gone_when_the_step_has_ended() {
    let text = on_a_terminal("xterm", Some("00:00:0"));
    let (before, after) = text.rsplit_once(REMOVE).unwrap();
    let (first, _) = before.split_once("\r\n").unwrap();
    assert!(before.contains("00:00:0") && !after.contains("00:00:0"), "{text:?}");
    assert_lines(&format!("{first}\n{after}"));
}

#[test]
fn without_a_terminal_that_can_move_its_cursor_there_are_only_lines() {
    let text = on_a_terminal("dumb", None);
    assert_lines(&text);
    assert!(!text.contains('\x1b'), "{text:?}");
    let dir = TempDir::new().unwrap();
    let output = step(dir.path(), "xterm").output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_lines(&text);
    assert!(!text.contains(['\r', '\x1b']), "{text:?}");
}
