//! `bulkhead collect` that is ended before its archive is complete.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    os::unix::{fs::PermissionsExt, process::ExitStatusExt},
    process::{Command, Output},
};

use nix::libc::SIGINT;
use tempfile::TempDir;

#[test]
fn an_archive_that_was_interrupted_is_not_in_the_way_of_the_next() {
    let dir = TempDir::new().unwrap();
    // While containerd is asked, the archive has begun.
    let collect = |containerd: &str| -> Output {
        let program = dir.path().join("containerd");
        fs::write(&program, format!("#!/bin/sh\n{containerd}\n")).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_bulkhead"));
        command.arg("collect").current_dir(&dir).env("PATH", dir.path()).output().unwrap()
    };
    let archive = dir.path().join("bulkhead-support.tar");
    let interrupted = collect("kill -INT $PPID");
    assert_eq!(interrupted.status.signal(), Some(SIGINT), "{interrupted:?}");
    assert!(!archive.exists());
    let again = collect("exit 1");
    assert!(again.status.success(), "{again:?}");
    let (mode, text) = (archive.metadata().unwrap().permissions().mode(), fs::read(&archive).unwrap());
    assert_eq!(mode & 0o777, 0o600);
    assert!(text.len() > 1024 && text.ends_with(&[0; 1024]), "{} bytes", text.len());
    let third = collect("exit 1");
    let said = String::from_utf8(third.stderr).unwrap();
    assert!(!third.status.success() && said.contains("it exists already"), "{said}");
    assert!(fs::read(archive).unwrap() == text);
}
