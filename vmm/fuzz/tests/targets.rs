//! The targets as plain tests: on the programs that were saved, and on many that are made up. That of the network card
//! needs root, for a network namespace and a tap in it; none needs KVM.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use bulkhead_vmm_fuzz::{TARGETS, check};

/// Programs made up for each target.
const MADE_UP: u64 = 100;
/// Their longest.
const LONGEST: u64 = 400;

/// Held by the one that runs: a target knows its device's thread by its name.
static ALONE: Mutex<()> = Mutex::new(());

/// Runs the saved programs of a target, and some that are made up.
fn run(name: &str) -> io::Result<()> {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some((_, target)) = TARGETS.iter().find(|(target, _)| *target == name) else {
        panic!("no target {name}")
    };
    for path in saved(name)? {
        check(*target, &fs::read(path)?);
    }
    for seed in 1..=MADE_UP {
        check(*target, &made_up(seed));
    }
    Ok(())
}

/// The saved programs, always in the same order.
fn saved(name: &str) -> io::Result<Vec<PathBuf>> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("saved").join(name);
    let mut programs = fs::read_dir(&dir)?.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<_>>>()?;
    assert!(!programs.is_empty(), "nothing is saved in {}", dir.display());
    programs.sort();
    Ok(programs)
}

fn made_up(seed: u64) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(seed);
    let len = random(&mut state) % LONGEST;
    (0..len).map(|_| random(&mut state) as u8).collect()
}

/// Xorshift: the same numbers in every run.
fn random(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

#[test]
fn queue() -> io::Result<()> {
    run("queue")
}

#[test]
fn registers() -> io::Result<()> {
    run("registers")
}

#[test]
fn vsock() -> io::Result<()> {
    run("vsock")
}

#[test]
fn file_server() -> io::Result<()> {
    run("fs")
}

#[test]
fn net() -> io::Result<()> {
    run("net")
}

#[test]
fn control() -> io::Result<()> {
    run("control")
}

#[test]
fn balloon() -> io::Result<()> {
    run("balloon")
}
