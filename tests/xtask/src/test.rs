//! `cargo xtask test`: the unit tests, and the end-to-end tests in the rig or on this machine.

use std::fs;
use std::io::{BufRead, BufReader};
use std::ops::AddAssign;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};

use crate::cache::Cache;
use crate::conformance;
use crate::containerd::Containerd;
use crate::dist::{cargo, source_dir};
use crate::e2e::{E2e, Job, Place, Run, Runtime};

#[derive(Args)]
pub(crate) struct TestArguments {
    /// Runs only the tests whose name contains this.
    filter: Option<String>,
    /// Where the end-to-end tests run.
    #[arg(long, value_enum, default_value_t = Place::Rig)]
    on: Place,
    /// Runs the end-to-end tests of this runtime only. runc shows that the tests are right.
    #[arg(long, value_enum)]
    runtime: Option<Runtime>,
    /// Runs all end-to-end tests under this version of containerd; may be repeated. Without it, they run under 1.7,
    /// and those that tell versions apart under each other one too, if no part of the names is given.
    #[arg(long, value_enum)]
    containerd: Vec<Containerd>,
    /// Runs only the tests of this kind.
    #[arg(long, value_enum)]
    only: Option<Kind>,
    /// Runs the end-to-end tests this many times: for a case that fails only now and then.
    #[arg(long, default_value_t = 1)]
    times: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Kind {
    Unit,
    E2e,
}

impl TestArguments {
    /// The runs of the end-to-end tests that are asked for, the longest first.
    fn jobs(&self) -> Vec<Job> {
        let own = Containerd::V1_7;
        let mut versions = self.containerd.clone();
        if versions.is_empty() {
            versions.push(own);
            if self.filter.is_none() && self.on == Place::Rig {
                versions.extend(Containerd::value_variants().iter().filter(|version| **version != own));
            }
        }
        let job = |containerd, runtime| Job {
            runtime,
            containerd,
            brief: self.containerd.is_empty() && containerd != own,
            filter: self.filter.clone(),
            times: self.times,
        };
        let runtimes = [Runtime::Bulkhead, Runtime::Runc];
        let chosen = || runtimes.into_iter().filter(|it| self.runtime.is_none_or(|only| only == *it));
        versions.iter().flat_map(|version| chosen().map(|runtime| job(*version, runtime))).collect()
    }

    /// Whether all there is to show is asked for.
    fn is_whole(&self) -> bool {
        self.filter.is_none()
            && self.runtime.is_none()
            && self.on == Place::Rig
            && (self.containerd.is_empty() || self.containerd.len() == Containerd::value_variants().len())
    }
}

/// How many tests passed and failed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) passed: u32,
    pub(crate) failed: u32,
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Tally) {
        self.passed += other.passed;
        self.failed += other.failed;
    }
}

impl Tally {
    /// Counts the run itself as one failed test if it failed without saying which.
    pub(crate) fn checked(mut self, what: &str, succeeded: bool) -> Tally {
        if !succeeded && self.failed == 0 {
            println!("{what} failed, and did not say in which test: counted as one");
            self.failed = 1;
        }
        self
    }
}

/// Runs the tests. The last line says how many passed and failed; the exit status is 0 if none failed.
pub(crate) fn run(cache: &Cache, arguments: &TestArguments) -> Result<u8> {
    let mut total = Tally::default();
    let mut count = |what: &str, result: Result<Tally>| {
        let tally = result.unwrap_or_else(|error| {
            println!("{what}: {error:#}");
            Tally { passed: 0, failed: 1 }
        });
        println!("{what}: {} passed, {} failed\n", tally.passed, tally.failed);
        total += tally;
    };
    if arguments.only != Some(Kind::E2e) {
        count("unit tests", unit_tests(arguments.filter.as_deref()));
    }
    if arguments.only != Some(Kind::Unit) {
        let jobs = arguments.jobs();
        match E2e::prepare(cache, arguments.on, &jobs) {
            Ok(e2e) => {
                let runs = e2e.run_all(&jobs);
                if arguments.is_whole() {
                    report(&jobs, &runs)?;
                }
                // Beside each count: of a long run, whoever reads this may have kept only the end.
                for (job, run) in jobs.iter().zip(runs) {
                    if let Ok(Run { failures, .. }) = &run
                        && !failures.is_empty()
                    {
                        println!("{failures}");
                    }
                    count(&format!("end-to-end, {}", job.name()), run.map(|run| run.tally));
                }
            }
            Err(error) => count("end-to-end", Err(error)),
        }
    }
    if total == Tally::default() {
        println!("no test has such a name");
        total.failed = 1;
    }
    println!("{} passed, {} failed", total.passed, total.failed);
    Ok(u8::from(total.failed > 0))
}

/// Writes docs/conformance.md, if every run came to its end.
fn report(jobs: &[Job], runs: &[Result<Run>]) -> Result<()> {
    let columns = jobs.iter().zip(runs).map(|(job, run)| run.as_ref().ok().map(|run| (job.name(), run)));
    let Some(columns) = columns.collect::<Option<Vec<_>>>() else { return Ok(()) };
    let path = source_dir().join("docs/conformance.md");
    fs::write(&path, conformance::page(&columns)).with_context(|| format!("cannot write {}", path.display()))
}

fn unit_tests(filter: Option<&str>) -> Result<Tally> {
    let mut cargo = cargo();
    cargo.args(["test", "--workspace", "--no-fail-fast"]).args(filter);
    let (output, succeeded) = shown_output(&mut cargo)?;
    Ok(cargo_tally(&output).checked("cargo test", succeeded))
}

/// Adds up the lines `test result: ok. 3 passed; 0 failed; ...`.
fn cargo_tally(output: &str) -> Tally {
    let mut total = Tally::default();
    for line in output.lines().filter_map(|line| line.strip_prefix("test result: ")) {
        let counts = line.split_once(". ").map_or("", |(_, counts)| counts);
        let count =
            |name: &str| counts.split("; ").find_map(|part| part.strip_suffix(name)?.trim().parse().ok());
        total += Tally { passed: count("passed").unwrap_or(0), failed: count("failed").unwrap_or(0) };
    }
    total
}

/// Runs a command with its standard output both shown and returned; true if it succeeded.
pub(crate) fn shown_output(command: &mut Command) -> Result<(String, bool)> {
    let name = Path::new(command.get_program()).display().to_string();
    let context = || format!("cannot run {name}");
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().with_context(context)?;
    let mut output = String::new();
    if let Some(stdout) = child.stdout.take() {
        for line in BufReader::new(stdout).lines() {
            let line = line.with_context(|| format!("cannot read what {name} prints"))?;
            println!("{line}");
            output.push_str(&line);
            output.push('\n');
        }
    }
    let status = child.wait().with_context(|| format!("cannot wait for {name}"))?;
    Ok((output, status.success()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cargos_results_are_added_up() {
        let output = "\
test a ... ok
test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s
test result: FAILED. 2 passed; 3 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s
";
        assert_eq!(cargo_tally(output), Tally { passed: 14, failed: 3 });
    }

    #[test]
    fn a_run_that_fails_without_a_failed_test_is_a_failure() {
        let passed = Tally { passed: 5, failed: 0 };
        assert_eq!(passed.checked("x", true), passed);
        assert_eq!(passed.checked("x", false).failed, 1);
        assert_eq!(Tally { passed: 5, failed: 2 }.checked("x", false).failed, 2);
    }
}
