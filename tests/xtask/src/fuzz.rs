//! `cargo xtask fuzz`: builds all fuzz targets with libFuzzer and AddressSanitizer, and has each search for some
//! seconds.
//!
//! It uses the pinned toolchain. cargo runs `tests/fuzz/rustc` instead of rustc for the packages of this workspace, and
//! that adds the compiler options. Dependencies are built without them; most are the ones that `cargo test` builds.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread;

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::cache::{self, Cache};
use crate::debian;
use crate::dist::{cargo, source_dir, target_dir};
use crate::progress::{Bar, apart, run_said, step};
use crate::test::Tally;

/// Where targets are, and the packages that they are in.
const PACKAGES: [(&str, &str); 3] = [
    ("vmm/fuzz", "bulkhead-vmm-fuzz"),
    ("host-shim/fuzz", "bulkhead-host-shim-fuzz"),
    ("guest-agent/fuzz", "bulkhead-agent-fuzz"),
];

/// An execution that takes so long has hung.
const HUNG_SECONDS: u32 = 60;
/// What a target may take besides the time that it searches, for what is saved.
const GRACE_SECONDS: u32 = 120;

/// For all targets. The first search of one and the same build always begins with the same random numbers.
const FLAGS: [&str; 4] = ["-seed=1", "-max_len=1024", "-rss_limit_mb=2048", "-print_final_stats=1"];

#[derive(Args)]
pub(crate) struct FuzzArguments {
    /// Runs these targets only.
    targets: Vec<String>,
    /// Seconds for which each target searches.
    #[arg(long, default_value_t = 5)]
    seconds: u32,
}

/// A target that can be built.
struct Target {
    name: String,
    /// The directory of its package.
    dir: PathBuf,
}

/// Builds all targets and runs those that are asked for, as many at once as there are processors. The exit status is 0
/// if none found anything.
pub(crate) fn run(cache: &Cache, arguments: &FuzzArguments) -> Result<u8> {
    let all = targets()?;
    if let Some(unknown) = arguments.targets.iter().find(|name| all.iter().all(|one| one.name != **name)) {
        bail!("there is no fuzz target {unknown}");
    }
    debian::require(cache, "c++", "g++")?;
    let _lock = cache::lock(&cache.dir().join("fuzz.lock"), "same search")?;
    step(&format!("building {} fuzz targets, 2 to 5 minutes", all.len()), || build(&all))?;
    let is_wanted = |one: &Target| arguments.targets.is_empty() || arguments.targets.contains(&one.name);
    let wanted: Vec<_> = all.into_iter().filter(is_wanted).collect();
    let (bar, number) = (Bar::new("fuzz targets"), wanted.len() as u64);
    let queue = Mutex::new(wanted.into_iter());
    let tally = Mutex::new(Tally::default());
    let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).next();
    let worker = || {
        while let Some(target) = next() {
            let searched = search(cache, &target, arguments.seconds);
            let mut tally = tally.lock().unwrap_or_else(PoisonError::into_inner);
            match searched {
                Ok(executions) => {
                    apart(|| println!("{:>10} executions of {}", executions, target.name));
                    tally.passed += 1;
                }
                Err(error) => {
                    apart(|| println!("{} failed: {error:#}", target.name));
                    tally.failed += 1;
                }
            }
            bar.show((tally.passed + tally.failed).into(), Some(number), format!("{} failed", tally.failed));
        }
    };
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(worker);
        }
    });
    drop(bar);
    let Tally { passed, failed } = tally.into_inner().unwrap_or_else(PoisonError::into_inner);
    println!("fuzzing: {passed} passed, {failed} failed");
    Ok(u8::from(failed > 0))
}

/// All targets, by the files that they begin with.
fn targets() -> Result<Vec<Target>> {
    let mut targets = Vec::new();
    for (dir, _) in PACKAGES {
        let dir = source_dir().join(dir);
        let files = dir.join("fuzz_targets");
        for file in fs::read_dir(&files).with_context(|| format!("cannot list {}", files.display()))? {
            let path = file.context("cannot list the fuzz targets")?.path();
            let name = path.file_stem().and_then(|name| name.to_str()).context("a target without a name")?;
            targets.push(Target { name: name.to_owned(), dir: dir.clone() });
        }
    }
    targets.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(targets)
}

fn build(targets: &[Target]) -> Result<()> {
    let mut cargo = cargo();
    // Of all packages, and with a test: so most packages of others have the features that `cargo test` gives them, and
    // need not be built once more.
    cargo.args(["build", "--locked", "--quiet", "--workspace", "--test", "targets"]);
    cargo.args(targets.iter().flat_map(|target| ["--bin", &target.name]));
    cargo.args(PACKAGES.map(|(_, package)| format!("--features={package}/libfuzzer")));
    cargo.env("RUSTC_WORKSPACE_WRAPPER", source_dir().canonicalize()?.join("tests/fuzz/rustc"));
    let status = run_said(&mut cargo).context("cannot run cargo")?;
    if !status.success() {
        bail!("cargo could not build the fuzz targets");
    }
    Ok(())
}

/// Has a target search, and returns how often it was executed. An error says what it found, and where that is kept.
fn search(cache: &Cache, target: &Target, seconds: u32) -> Result<u64> {
    let place = cache.dir().join("fuzz").join(&target.name);
    cache::remove(&place)?;
    let corpus = place.join("corpus");
    fs::create_dir_all(&corpus).with_context(|| format!("cannot make {}", corpus.display()))?;
    let log = place.join("log");
    let output = File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;
    let mut fuzzer = Command::new("timeout");
    fuzzer.arg("--kill-after=10").arg((seconds + GRACE_SECONDS).to_string());
    fuzzer.arg(target_dir().canonicalize()?.join("debug").join(&target.name));
    fuzzer.arg(&corpus).arg(target.dir.join("saved").join(&target.name)).args(FLAGS);
    fuzzer.args([format!("-max_total_time={seconds}"), format!("-timeout={HUNG_SECONDS}")]);
    // A directory, by its last character.
    fuzzer.arg(format!("-artifact_prefix={}/", place.display()));
    fuzzer.current_dir(&target.dir).stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
    let status = fuzzer.status().context("cannot run timeout")?;
    let text = String::from_utf8_lossy(&fs::read(&log).unwrap_or_default()).into_owned();
    match executions(&text) {
        Some(executions) if status.success() && executions > 0 => {
            cache::remove(&place)?;
            Ok(executions)
        }
        _ => bail!("{status}\n{}\nkept in {}{}", end_of(&text), place.display(), found(&place)?),
    }
}

/// How often libFuzzer says it executed its target.
fn executions(log: &str) -> Option<u64> {
    log.lines().find_map(|line| line.strip_prefix("stat::number_of_executed_units:"))?.trim().parse().ok()
}

/// The last lines of a log: what a sanitizer or a panic said, and libFuzzer's own words.
fn end_of(log: &str) -> String {
    const LINES: usize = 80;
    let lines: Vec<_> = log.lines().collect();
    lines[lines.len().saturating_sub(LINES)..].join("\n")
}

/// The inputs that were kept, each with its name and its bytes in hexadecimal.
fn found(place: &Path) -> Result<String> {
    let mut text = String::new();
    for entry in fs::read_dir(place).context("cannot list what was found")? {
        let path = entry.context("cannot list what was found")?.path();
        if path.is_file() && path != place.join("log") {
            let bytes = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
            let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            text.push_str(&format!("\n{}: {digits}", path.display()));
        }
    }
    Ok(text)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn every_target_has_a_name_of_its_own_and_something_saved() {
        let all = targets().unwrap();
        assert!(all.len() > 10, "{}", all.len());
        assert!(all.windows(2).all(|two| two[0].name != two[1].name));
        for target in &all {
            let saved = target.dir.join("saved").join(&target.name);
            assert!(
                fs::read_dir(&saved).is_ok_and(|mut files| files.next().is_some()),
                "{}",
                saved.display()
            );
        }
    }

    #[test]
    fn a_log_without_executions_is_none_of_a_search() {
        let log = "Done 41 runs in 6 second(s)\nstat::number_of_executed_units: 41\nstat::peak_rss_mb:  5\n";
        assert_eq!(executions(log), Some(41));
        assert_eq!(executions("==1== ERROR: AddressSanitizer: heap-use-after-free"), None);
    }

    #[test]
    fn what_was_found_is_shown_whole() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("log"), "not this").unwrap();
        fs::write(dir.path().join("crash-1"), [0, 0xab]).unwrap();
        assert_eq!(found(dir.path()).unwrap(), format!("\n{}/crash-1: 00ab", dir.path().display()));
    }
}
