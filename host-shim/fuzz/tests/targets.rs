//! The targets as plain tests: on the programs that were saved, and on many that are made up.

use std::io;

fn run(name: &str) -> io::Result<()> {
    bulkhead_fuzz::run_plain(env!("CARGO_MANIFEST_DIR"), bulkhead_host_shim_fuzz::TARGETS, name)
}

#[test]
fn answers() -> io::Result<()> {
    run("answers")
}

#[test]
fn words() -> io::Result<()> {
    run("words")
}

#[test]
fn template() -> io::Result<()> {
    run("template")
}
