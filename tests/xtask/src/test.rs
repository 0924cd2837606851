//! `cargo xtask test`: the unit tests, and the end-to-end tests in the rig or on this machine.

use std::fs;
use std::io::{BufRead, BufReader};
use std::num::NonZero;
use std::ops::AddAssign;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use clap::{Args, ValueEnum};

use crate::cache::Cache;
use crate::conformance::{self, Outcomes};
use crate::dist::{self, cargo, source_dir};
use crate::rig::{Accelerator, Io, Payload, Rig};
use crate::tools::Tools;

const E2E: &str = "/usr/lib/bulkhead/tests/bulkhead-e2e";

/// How long the end-to-end tests of one runtime may take.
const E2E_LIMIT: Duration = Duration::from_secs(60 * 60);

/// Asks a host what it runs.
const VERSIONS: [&str; 3] =
    ["sh", "-c", "containerd --version | cut -d ' ' -f 1,3; runc --version | head -n 1; uname -sr"];
const VERSIONS_LIMIT: Duration = Duration::from_secs(60);

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
    /// Runs only the tests of this kind.
    #[arg(long, value_enum)]
    only: Option<Kind>,
    /// Runs the end-to-end tests this many times: for a case that fails only now and then.
    #[arg(long, default_value_t = 1)]
    times: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Place {
    /// The emulated host.
    Rig,
    /// This machine, which has KVM and containerd. What is tested is installed on it.
    Host,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Runtime {
    Runc,
    Bulkhead,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Kind {
    Unit,
    E2e,
}

/// How many tests passed and failed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Tally {
    passed: u32,
    failed: u32,
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Tally) {
        self.passed += other.passed;
        self.failed += other.failed;
    }
}

impl Tally {
    /// Counts the run itself as one failed test if it failed without saying which.
    fn checked(mut self, what: &str, succeeded: bool) -> Tally {
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
        match E2e::prepare(cache, arguments.on) {
            Ok(e2e) => {
                let chosen = |runtime: &&str| arguments.runtime.is_none_or(|only| only.name() == *runtime);
                let runtimes: Vec<&str> = ["runc", "bulkhead"].into_iter().filter(chosen).collect();
                let runs = e2e.run_all(&runtimes, arguments);
                if arguments.filter.is_none() && arguments.on == Place::Rig {
                    report(&runs)?;
                }
                for (runtime, run) in runtimes.iter().zip(runs) {
                    count(&format!("end-to-end on {runtime}"), run.map(|run| run.tally));
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

/// Writes docs/conformance.md, if there is a run of runc and one of Bulkhead.
fn report(runs: &[Result<Run>]) -> Result<()> {
    let [Ok(runc), Ok(bulkhead)] = runs else { return Ok(()) };
    let path = source_dir().join("docs/conformance.md");
    fs::write(&path, conformance::page(&runc.versions, &runc.outcomes, &bulkhead.outcomes))
        .with_context(|| format!("cannot write {}", path.display()))
}

impl Runtime {
    fn name(self) -> &'static str {
        match self {
            Runtime::Runc => "runc",
            Runtime::Bulkhead => "bulkhead",
        }
    }
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

/// Reads the last line, `3 passed, 0 failed`.
fn e2e_tally(output: &str) -> Option<Tally> {
    let (passed, failed) = output.trim_end().lines().last()?.split_once(", ")?;
    let passed = passed.strip_suffix(" passed")?.parse().ok()?;
    let failed = failed.strip_suffix(" failed")?.parse().ok()?;
    Some(Tally { passed, failed })
}

/// What the end-to-end tests found on one runtime.
struct Run {
    tally: Tally,
    outcomes: Outcomes,
    /// Of the host's containerd and kernel, a line each.
    versions: String,
}

/// The end-to-end tests, ready to run.
enum E2e {
    Rig(Box<Rig>, Payload),
    Host,
}

impl E2e {
    fn prepare(cache: &Cache, place: Place) -> Result<E2e> {
        if place == Place::Host {
            require_host()?;
        }
        let tools = Tools::ensure(cache)?;
        let dist = dist::build(cache, &tools)?;
        if place == Place::Host {
            dist.install_on_host()?;
            return Ok(E2e::Host);
        }
        let payload = Payload::new(cache, &[dist.put()])?;
        Ok(E2e::Rig(Box::new(Rig::ensure(cache, &tools)?), payload))
    }

    /// Runs the tests of each runtime: side by side where each has a host of its own and there is a processor for each.
    fn run_all(&self, runtimes: &[&str], arguments: &TestArguments) -> Vec<Result<Run>> {
        let processors = thread::available_parallelism().map_or(1, NonZero::get);
        if matches!(self, E2e::Host) || processors < runtimes.len() {
            return runtimes.iter().map(|runtime| self.run(runtime, arguments)).collect();
        }
        thread::scope(|scope| {
            let runs: Vec<_> =
                runtimes.iter().map(|runtime| scope.spawn(|| self.run(runtime, arguments))).collect();
            let crashed = |_| Err(anyhow!("the thread that runs the tests panicked"));
            runs.into_iter().map(|run| run.join().unwrap_or_else(crashed)).collect()
        })
    }

    /// Runs the tests of one runtime, in a fresh rig.
    fn run(&self, runtime: &str, arguments: &TestArguments) -> Result<Run> {
        let times = arguments.times.to_string();
        let flags = [E2E, "test", "--runtime", runtime, "--times", &times];
        let argv: Vec<String> =
            flags.into_iter().chain(arguments.filter.as_deref()).map(str::to_owned).collect();
        let mut versions = Vec::new();
        let (output, succeeded) = match self {
            E2e::Host => shown_output(Command::new(E2E).args(&argv[1..]))?,
            E2e::Rig(rig, payload) => {
                let mut session = rig.start(payload)?;
                let ask = VERSIONS.map(str::to_owned);
                session.run(&ask, Io::Captured(&mut versions), VERSIONS_LIMIT)?;
                let mut output = Vec::new();
                let status = session.run(&argv, Io::Shown(&mut output), E2E_LIMIT)?;
                session.finish();
                (String::from_utf8_lossy(&output).into_owned(), status == 0)
            }
        };
        let tally = e2e_tally(&output).context("the tests ended without a count")?;
        Ok(Run {
            tally: tally.checked("bulkhead-e2e", succeeded),
            outcomes: conformance::outcomes(&output),
            versions: String::from_utf8_lossy(&versions).into_owned(),
        })
    }
}

/// Says in one line what this machine lacks to be tested on.
fn require_host() -> Result<()> {
    Accelerator::detect_kvm().context("--on host needs KVM")?;
    if !Path::new("/run/containerd/containerd.sock").exists() {
        bail!("--on host needs a running containerd: there is no /run/containerd/containerd.sock");
    }
    Ok(())
}

/// Runs a command with its standard output both shown and returned; true if it succeeded.
fn shown_output(command: &mut Command) -> Result<(String, bool)> {
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
    fn only_the_last_line_counts_end_to_end() {
        assert_eq!(
            e2e_tally("1 passed, 1 failed\n20 passed, 0 failed\n"),
            Some(Tally { passed: 20, failed: 0 })
        );
        assert_eq!(e2e_tally("20 passed, 0 failed\nKilled\n"), None);
        assert_eq!(e2e_tally(""), None);
    }

    #[test]
    fn a_run_that_fails_without_a_failed_test_is_a_failure() {
        let passed = Tally { passed: 5, failed: 0 };
        assert_eq!(passed.checked("x", true), passed);
        assert_eq!(passed.checked("x", false).failed, 1);
        assert_eq!(Tally { passed: 5, failed: 2 }.checked("x", false).failed, 2);
    }
}
