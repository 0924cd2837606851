//! `bulkhead run --timeout` before there is a VM.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    process::{Command, Stdio},
};

use rustix::fs::{CWD, FileType, Mode, mknodat};
use tempfile::TempDir;

#[test]
fn a_root_that_does_not_come_in_time_is_an_error_of_its_own() {
    let dir = TempDir::new().unwrap();
    let (pipe, report) = (dir.path().join("root.tar"), dir.path().join("results.xml"));
    // Nobody writes to it.
    mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR, 0).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_bulkhead"));
    command
        .args(["run", "--timeout", "0.2s", "--archive"])
        .arg(&pipe)
        .arg("--junit")
        .arg(&report)
        .arg("true");
    let ended = command.stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8(ended.stderr).unwrap();
    assert_eq!(ended.status.code(), Some(124), "{said}");
    assert_eq!(said, "bulkhead: the program did not run: --timeout (200ms) was over before it could start\n");
    let report = fs::read_to_string(report).unwrap();
    assert!(
        report.contains("<error message=\"the program did not run: --timeout (200ms) was over"),
        "{report}"
    );
    assert!(report.contains("failures=\"0\" errors=\"1\""), "{report}");
}
