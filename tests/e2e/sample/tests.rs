//! The tests of a project, as `cargo test` builds them. The group `run/` runs this program on the host and in a VM, and
//! compares what it prints. It is no part of a crate: `cargo xtask` builds it with rustc.

use std::{env, fs, process::Command, thread, time::Duration};

#[test]
fn a_child_process_runs() {
    let output = Command::new("sh").args(["-c", "echo hello"]).output().unwrap();
    assert_eq!(output.stdout, b"hello\n");
}

#[test]
fn a_file_is_written_and_read() {
    let file = env::temp_dir().join("bulkhead-sample");
    fs::write(&file, "content").unwrap();
    assert_eq!(fs::read_to_string(&file).unwrap(), "content");
}

#[test]
fn a_thread_ends() {
    assert_eq!(thread::spawn(|| 6 * 7).join().unwrap(), 42);
}

#[test]
#[should_panic(expected = "as it must")]
fn panics() {
    panic!("as it must");
}

#[test]
#[ignore = "nobody asks for it"]
fn is_ignored() {}

#[test]
fn may_fail() {
    assert!(env::var_os("SAMPLE_FAILS").is_none(), "it was told to fail");
}

#[test]
fn may_hang() {
    if env::var_os("SAMPLE_HANGS").is_some() {
        thread::sleep(Duration::from_secs(1000));
    }
}

#[test]
fn prints_where_it_is() {
    println!("manifest in {:?}", env::var_os("CARGO_MANIFEST_DIR"));
    println!("working in {}", env::current_dir().unwrap().display());
}
