//! `bulkhead top` on a small terminal.

#![allow(clippy::unwrap_used)]

use std::{
    fs::File,
    io::Read,
    process::{Command, Stdio},
};

use nix::pty::{Winsize, openpty};

#[test]
fn no_line_is_longer_than_the_terminal() {
    const COLUMNS: u16 = 30;
    let size = Winsize { ws_row: 5, ws_col: COLUMNS, ws_xpixel: 0, ws_ypixel: 0 };
    let terminal = openpty(Some(&size), None).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_bulkhead"));
    let mut top = command
        .args(["top", "--every", "1"])
        .stdin(Stdio::null())
        .stdout(terminal.slave)
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    // It has the terminal alone, so its end would be the end of what can be read.
    drop(command);
    let mut master = File::from(terminal.master);
    let mut shown = Vec::new();
    let has_two = |shown: &[u8]| shown.windows(4).filter(|it| it == b"\x1b[2J").count() > 1;
    while !has_two(&shown) {
        let mut chunk = [0; 1024];
        let read = master.read(&mut chunk).unwrap();
        shown.extend_from_slice(&chunk[..read]);
    }
    top.kill().unwrap();
    top.wait().unwrap();
    let shown = String::from_utf8_lossy(&shown).into_owned();
    let first = shown.split("\x1b[H\x1b[2J").nth(1).unwrap();
    assert!(first.starts_with("NAMESPACE  ID"), "{shown:?}");
    assert!(first.lines().count() < 5, "{shown:?}");
    assert!(first.lines().all(|line| line.chars().count() <= COLUMNS.into()), "{shown:?}");
}
