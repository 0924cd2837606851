//! `bulkhead collect` on a bad day: it is ended before its archive is complete, programs of the host hang, or logs have
//! secrets.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    os::unix::{fs::PermissionsExt, process::ExitStatusExt},
    process::{Command, Output},
    thread,
    time::{Duration, Instant},
};

use nix::libc::SIGINT;
use tempfile::TempDir;

/// Writes a program of the host.
fn program(dir: &TempDir, name: &str, script: &str) {
    let program = dir.path().join(name);
    fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
}

/// Runs `bulkhead collect` on a host that has these programs only.
fn collect(dir: &TempDir) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_bulkhead"));
    command.arg("collect").current_dir(dir).env("PATH", dir.path()).output().unwrap()
}

#[test]
fn an_archive_that_was_interrupted_is_not_in_the_way_of_the_next() {
    let dir = TempDir::new().unwrap();
    // While containerd is asked, the archive has begun. It does not answer before the signal has done its work.
    let collect = |containerd: &str| {
        program(&dir, "containerd", containerd);
        collect(&dir)
    };
    let archive = dir.path().join("bulkhead-support.tar");
    let interrupted = collect("kill -INT $PPID; exec /bin/sleep 10");
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

#[test]
fn what_programs_were_executed_with_is_in_no_file_of_the_archive() {
    let dir = TempDir::new().unwrap();
    program(&dir, "containerd", "exit 1");
    let refused = r#" ERROR pod{namespace="a" id="b"}: the process was not started exec="e" error="exec: \"app --password=S3CRET\": executable file not found in $PATH""#;
    let of_containerd =
        r#"time="2026-11-27T03:47:03Z" level=info msg="Exec for \"c\" with command [bulkhead S3CRET]""#;
    program(&dir, "journalctl", &format!("echo '{refused}'\necho '{of_containerd}'"));
    program(
        &dir,
        "dmesg",
        "echo '<6>kvm: here'; echo '<5>audit: type=1309 audit(1:2): a0=\"bulkhead\" a1=\"S3CRET\"'",
    );
    let collected = collect(&dir);
    assert!(collected.status.success(), "{collected:?}");
    let archive =
        String::from_utf8_lossy(&fs::read(dir.path().join("bulkhead-support.tar")).unwrap()).into_owned();
    for part in ["the process was not started", "executable file not found in $PATH", "kvm: here"] {
        assert!(archive.contains(part), "no {part}");
    }
    assert!(!archive.contains("S3CRET"), "{archive}");
    let said = String::from_utf8(collected.stdout).unwrap();
    assert!(said.starts_with("missing: containerd-handlers.json: containerd: exit status: 1\n"), "{said}");
    assert_eq!(said.lines().count(), 2, "{said}");
}

#[test]
fn a_journal_that_never_answers_or_never_ends_is_missing_and_nothing_else() {
    let collected = |script: &str| {
        let dir = TempDir::new().unwrap();
        program(&dir, "containerd", "exit 1");
        program(&dir, "dmesg", "echo 'kvm: here'");
        program(&dir, "journalctl", script);
        let begun = Instant::now();
        let collected = collect(&dir);
        assert!(begun.elapsed() < Duration::from_secs(120), "{:?}", begun.elapsed());
        let said = String::from_utf8(collected.stdout).unwrap();
        let missing =
            "missing: containerd.txt: cannot read the log of the unit containerd: journalctl has not ended";
        assert!(collected.status.success() && said.contains(missing), "{said}");
        let archive = fs::read(dir.path().join("bulkhead-support.tar")).unwrap();
        assert!(String::from_utf8_lossy(&archive).contains("journalctl has not ended within"));
    };
    thread::scope(|scope| {
        scope.spawn(|| collected("exec /bin/sleep 3600"));
        scope.spawn(|| collected("while :; do echo 'bulkhead pod{namespace='; done"));
    });
}
