//! What the fuzz targets of all parts have in common: how their bytes are read ([`input`]), how they are judged
//! ([`check`]), and how they are run as plain tests ([`run_plain`]).

pub mod input;

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

/// A target: performs what the bytes say. An error is a broken promise.
pub type Target = fn(&[u8]) -> anyhow::Result<()>;

/// A target and its name for `cargo fuzz`.
pub type Named = (&'static str, Target);

/// Programs made up for each target.
const MADE_UP: u64 = 100;
/// Their longest.
const LONGEST: u64 = 400;

/// Held by the one that runs: a target may know a thread by its name.
static ALONE: Mutex<()> = Mutex::new(());

/// Panics if the promise is broken: that is what `cargo fuzz` and a test take for a find.
pub fn check(target: Target, bytes: &[u8]) {
    if let Err(error) = target(bytes) {
        panic!("{error:#}");
    }
}

/// Runs the programs of a target that are saved in its crate, and some that are made up.
pub fn run_plain(crate_dir: &str, targets: &[Named], name: &str) -> io::Result<()> {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some((_, target)) = targets.iter().find(|(target, _)| *target == name) else {
        panic!("no target {name}")
    };
    for path in saved(&Path::new(crate_dir).join("saved").join(name))? {
        check(*target, &fs::read(path)?);
    }
    for seed in 1..=MADE_UP {
        check(*target, &made_up(seed));
    }
    Ok(())
}

/// The saved programs, always in the same order.
fn saved(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let mut programs = fs::read_dir(dir)?.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<_>>>()?;
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
