//! What commands do whose output nobody reads.

#![allow(clippy::unwrap_used)]

use std::{
    fs::{self, OpenOptions},
    io,
    process::{Command, ExitStatus, Stdio},
};

use tempfile::TempDir;

/// Runs `bulkhead` with this as its standard output.
fn bulkhead(words: &[&str], stdout: Stdio) -> ExitStatus {
    let mut command = Command::new(env!("CARGO_BIN_EXE_bulkhead"));
    command.args(words).stdin(Stdio::null()).stdout(stdout).stderr(Stdio::null()).status().unwrap()
}

fn closed() -> Stdio {
    let (reader, writer) = io::pipe().unwrap();
    drop(reader);
    writer.into()
}

/// The root directory of a host with containerd's configuration, and how `install` ends there.
fn installed(stdout: Stdio) -> (TempDir, ExitStatus) {
    let root = TempDir::new().unwrap();
    fs::create_dir_all(root.path().join("etc/containerd")).unwrap();
    fs::write(root.path().join("etc/containerd/config.toml"), "version = 2\n").unwrap();
    let status = bulkhead(&["install", "--root", root.path().to_str().unwrap()], stdout);
    (root, status)
}

/// The files below /etc, and whether the handlers are in containerd's configuration.
fn found(root: &TempDir) -> (usize, bool) {
    let files = |directory: &str| fs::read_dir(root.path().join(directory)).map_or(0, Iterator::count);
    let config = fs::read_to_string(root.path().join("etc/containerd/config.toml")).unwrap();
    (files("etc/bulkhead"), config.contains("bulkhead"))
}

#[test]
fn a_command_that_acts_does_everything_although_nobody_reads_it() {
    let (read, status) = installed(Stdio::null());
    assert!(status.success());
    let expected = found(&read);
    assert!(expected.0 > 0 && expected.1, "{expected:?}");
    let (unread, status) = installed(closed());
    assert_eq!((found(&unread), status.code()), (expected, Some(0)));
    // A full disk is an error, but not before everything is done.
    let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
    let (unwritten, status) = installed(full.into());
    assert_eq!((found(&unwritten), status.code()), (expected, Some(1)));
    let root = unread.path().to_str().unwrap();
    assert!(bulkhead(&["uninstall", "--root", root], closed()).success());
    assert!(!found(&unread).1);
}

#[test]
fn the_exit_status_is_that_of_the_checks_although_nobody_reads_them() {
    let words = ["check", "--config", "/no/such/file", "--json"];
    let status = bulkhead(&words, Stdio::null());
    assert_eq!(status.code(), Some(1));
    assert_eq!(bulkhead(&words, closed()), status);
}

#[test]
fn completions_that_nobody_reads_are_no_crash() {
    assert!(bulkhead(&["completions", "bash"], closed()).success());
}
