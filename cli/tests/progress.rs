//! What is shown of a command that takes a while, on a terminal and without one. The command is `check`, with another
//! program in the place of containerd.

#![allow(clippy::unwrap_used)]

use std::{
    fs::{self, File},
    io::Read,
    os::unix::fs::PermissionsExt,
    path::Path,
    process::{Command, Stdio},
};

use nix::pty::openpty;
use tempfile::TempDir;

/// What a terminal is told to remove a line.
const REMOVE: &str = "\x1b[2K";

/// The name of what the command does, and the file that keeps it from ending, for 20 s at most.
const SHOWN: &str = "checking this host";
const WAIT: &str = "wait";

fn check(dir: &Path, arguments: &[&str]) -> Command {
    let program = dir.join("containerd");
    // Also without the file, it takes longer than what is not worth a bar.
    let wait = format!("while [ -e {}/{WAIT} ]; do sleep 0.1; done", dir.display());
    fs::write(&program, format!("#!/bin/sh\nsleep 1.2\n{wait}\necho containerd containerd.io 1.7.24\n"))
        .unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_bulkhead"));
    let path = format!("{}:{}", dir.display(), std::env::var("PATH").unwrap());
    command.arg("check").args(arguments).env("PATH", path).env("TERM", "xterm").stdin(Stdio::null());
    command
}

/// Runs the command with a terminal as stderr. Returns what it prints there and on stdout. If something is to be shown,
/// the command ends when it is.
fn on_a_terminal(arguments: &[&str], is_shown: bool) -> (String, String) {
    let dir = TempDir::new().unwrap();
    let wait = dir.path().join(WAIT);
    if is_shown {
        fs::write(&wait, "").unwrap();
    }
    let pty = openpty(None, None).unwrap();
    let stdout = dir.path().join("stdout");
    let mut command = check(dir.path(), arguments);
    let mut child = command.stdout(File::create(&stdout).unwrap()).stderr(pty.slave).spawn().unwrap();
    // It has the other side of the terminal, which must be closed when the child has ended.
    drop(command);
    let (mut master, mut text, mut buffer) = (File::from(pty.master), Vec::new(), [0; 4096]);
    // EIO: nobody has the other side any more.
    while let Ok(length @ 1..) = master.read(&mut buffer) {
        text.extend_from_slice(&buffer[..length]);
        if wait.exists() && String::from_utf8_lossy(&text).contains(SHOWN) {
            fs::remove_file(&wait).unwrap();
        }
    }
    // Its status is that of the host, which may lack something.
    child.wait().unwrap();
    (String::from_utf8(text).unwrap(), fs::read_to_string(&stdout).unwrap())
}

#[test]
fn a_terminal_shows_that_a_command_works_and_nothing_is_left_of_it() {
    let (text, stdout) = on_a_terminal(&[], true);
    let (before, after) = text.rsplit_once(REMOVE).unwrap();
    assert!(before.contains(SHOWN) && !after.contains(SHOWN) && after.trim().is_empty(), "{text:?}");
    assert!(stdout.contains("containerd: version 1.7.24") && !stdout.contains('\x1b'), "{stdout}");
}

#[test]
fn programs_see_nothing_of_it() {
    let (text, stdout) = on_a_terminal(&["--json"], false);
    assert_eq!(text, "");
    serde_json::from_str::<serde_json::Value>(&stdout).unwrap();
    let dir = TempDir::new().unwrap();
    let output = check(dir.path(), &[]).output().unwrap();
    assert_eq!(String::from_utf8(output.stderr).unwrap(), "");
    assert!(!output.stdout.contains(&0x1b));
}
