//! `cargo xtask test`: the unit tests, and the end-to-end tests in the rig or on this machine.

use std::fs;
use std::io::{BufRead, BufReader};
use std::ops::AddAssign;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::thread::{self, JoinHandle};
use std::time::SystemTime;

use anyhow::{Context, Result, anyhow, ensure};
use clap::{Args, ValueEnum};

use crate::cache::Cache;
use crate::conformance;
use crate::containerd::Containerd;
use crate::dist::{Profile, cargo, source_dir};
use crate::e2e::{E2e, Job, Place, Run, Runtime};
use crate::named::{self, Named, Tree};
use crate::outcomes::Outcome;
use crate::phases::Phases;
use crate::progress;
use crate::rig;

#[derive(Args)]
pub(crate) struct TestArguments {
    /// Runs only the tests whose name contains this. With a slash, as in `exec/twenty`, it names end-to-end tests.
    /// Several parts of their names are separated by commas: `limits/,update/`.
    filter: Option<String>,
    /// Where the end-to-end tests run.
    #[arg(long, value_enum, default_value_t = Place::Rig)]
    on: Place,
    /// Tests this runtime; may be repeated. runc shows that the tests are right. Default: both, or Bulkhead alone if a
    /// part of the names is given.
    #[arg(long, value_enum)]
    runtime: Vec<Runtime>,
    /// Runs all end-to-end tests under this version of containerd; may be repeated. Without it, they run under 1.7,
    /// and those that tell versions apart under each other one too, if no part of the names is given.
    #[arg(long, value_enum)]
    containerd: Vec<Containerd>,
    /// Runs only the tests of this kind.
    #[arg(long, value_enum)]
    only: Option<Kind>,
    /// Runs the end-to-end tests this many times: for a case that fails only now and then.
    #[arg(long, default_value_t = 1)]
    times: usize,
    /// Also runs the cases on runc that passed there before with the same tests: on this machine with the same images,
    /// containerd and host, or in the run that tests/passed-on-runc.json records.
    #[arg(long)]
    afresh: bool,
    /// Writes tests/passed-on-runc.json if no case failed on runc. Do so when the sources of tests have changed, so
    /// that other machines need not run them on runc.
    #[arg(long, conflicts_with_all = ["filter", "on", "times"])]
    write_passed_on_runc: bool,
    /// Writes docs/conformance.md, if all of the end-to-end tests ran. With names of tests it writes only the part of
    /// the page about those that were run by their names.
    #[arg(long, conflicts_with_all = ["on", "only", "times"])]
    write_conformance: bool,
}

/// The page that tells how the end-to-end tests ended.
const CONFORMANCE: &str = "docs/conformance.md";

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Kind {
    Unit,
    E2e,
}

impl TestArguments {
    /// The runs of the end-to-end tests that are asked for.
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
            may_remember: !self.is_special(),
        };
        let mut runtimes = self.runtime.clone();
        if runtimes.is_empty() {
            runtimes.push(Runtime::Bulkhead);
            runtimes.extend(self.filter.is_none().then_some(Runtime::Runc));
        }
        versions.iter().flat_map(|version| runtimes.iter().map(|runtime| job(*version, *runtime))).collect()
    }

    /// Whether the tests are wanted for a closer look: by their names, again and again, or afresh.
    fn is_special(&self) -> bool {
        self.filter.is_some() || self.times != 1 || self.afresh
    }

    /// Whether the outcomes are kept for docs/conformance.md, which tells of cases that were run by their names.
    fn is_recorded(&self) -> bool {
        self.filter.is_some() && self.on == Place::Rig && self.wants(Kind::E2e) && rig::has_usual_processors()
    }

    /// What is under test is what ships, unless somebody waits for a few tests.
    fn profile(&self) -> Profile {
        if self.filter.is_some() { Profile::Quick } else { Profile::Shipped }
    }

    fn wants(&self, kind: Kind) -> bool {
        let by_name = self.filter.as_ref().filter(|filter| filter.contains('/')).map(|_| Kind::E2e);
        self.only.or(by_name).is_none_or(|only| only == kind)
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
    // Before the tests: somebody may commit while they run.
    let commit = arguments.write_conformance.then(conformance::commit).transpose()?;
    // An hour later this would be too late.
    arguments.write_conformance.then(conformance::of_sources).transpose()?;
    let is_part = !arguments.runtime.is_empty() || !arguments.containerd.is_empty();
    ensure!(
        !arguments.write_conformance || arguments.filter.is_some() || !is_part,
        "--write-conformance needs all runtimes and versions of containerd, or names of tests"
    );
    // Reading the sources takes seconds, so the tests do not wait for it.
    let tree = arguments.is_recorded().then(|| thread::spawn(Tree::now));
    let mut total = Tally::default();
    let mut phases = Phases::default();
    let mut count = |what: &str, result: Result<Tally>| {
        let tally = result.unwrap_or_else(|error| {
            println!("{what}: {error:#}");
            Tally { passed: 0, failed: 1 }
        });
        println!("{what}: {} passed, {} failed\n", tally.passed, tally.failed);
        total += tally;
    };
    if arguments.wants(Kind::Unit) {
        count("unit tests", phases.time("unit tests", || unit_tests(arguments.filter.as_deref())));
    }
    if arguments.wants(Kind::E2e) {
        let jobs = arguments.jobs();
        let prepare = || E2e::prepare(cache, arguments.on, arguments.profile(), jobs.clone());
        let prepared = phases.time("building, and making what is missing of the rig", prepare);
        let run_all = |e2e: E2e| {
            let runs = phases.time("end-to-end tests", || e2e.run_all())?;
            Ok((e2e, runs))
        };
        match prepared.and_then(run_all) {
            Ok((e2e, runs)) => {
                for (job, run) in jobs.iter().zip(&runs) {
                    describe(job, run);
                    phases.add(&format!("    rigs of {}", job.name()), run.took);
                    count(&format!("end-to-end, {}", job.name()), Ok(run.tally()));
                }
                if let Some(tree) = tree
                    && let Err(error) = record(cache, tree, &columns(&jobs, &runs))
                {
                    println!("docs/conformance.md will not know of these cases: {error:#}");
                }
                if arguments.write_passed_on_runc
                    && let Err(error) = e2e.commit_passed_on_runc(&runs)
                {
                    count("the record of runc", Err(error));
                }
                let written = match &commit {
                    Some(_) if arguments.filter.is_some() => write_by_name(cache, &e2e),
                    Some(commit) => write_conformance(cache, &e2e, &columns(&jobs, &runs), commit),
                    None => Ok(()),
                };
                if let Err(error) = written {
                    count("docs/conformance.md", Err(error));
                }
            }
            Err(error) => count("end-to-end", Err(error)),
        }
    }
    if total == Tally::default() {
        println!("no test has such a name");
        total.failed = 1;
    }
    println!("{phases}");
    println!("{} passed, {} failed", total.passed, total.failed);
    Ok(u8::from(total.failed > 0))
}

/// Prints a summary of a run at its end, because a reader may have kept only the end of a long output.
fn describe(job: &Job, run: &Run) {
    for Outcome { case, failure, .. } in &run.outcomes {
        if let Some(why) = failure {
            println!("{case} on {} failed:", job.name());
            why.lines().for_each(|line| println!("    {line}"));
        }
    }
    run.notes.iter().for_each(|note| println!("{}: {note}", job.name()));
    if !run.remembered.is_empty() {
        let (remembered, name) = (run.remembered.len(), job.name());
        println!("{name}: {remembered} cases did not run: they passed before with the same tests");
    }
}

/// The runs, each with the name of its job.
fn columns<'a>(jobs: &[Job], runs: &'a [Run]) -> Vec<(String, &'a Run)> {
    jobs.iter().map(Job::name).zip(runs).collect()
}

/// Records how the cases ended, for docs/conformance.md.
fn record(cache: &Cache, tree: JoinHandle<Result<Tree>>, columns: &[(String, &Run)]) -> Result<()> {
    let tree = tree.join().map_err(|_| anyhow!("the thread that reads the sources has panicked"))??;
    named::record(cache, &tree, columns)
}

fn write_conformance(cache: &Cache, e2e: &E2e, columns: &[(String, &Run)], commit: &str) -> Result<()> {
    let page = conformance::page(columns, commit, SystemTime::now(), &by_name(cache, e2e)?)?;
    write_page(&page)
}

/// Writes the part of the page about the cases that were run by their names.
fn write_by_name(cache: &Cache, e2e: &E2e) -> Result<()> {
    let path = source_dir().join(CONFORMANCE);
    let page = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    write_page(&conformance::with_by_name(&page, &by_name(cache, e2e)?)?)
}

fn by_name(cache: &Cache, e2e: &E2e) -> Result<String> {
    conformance::by_name(e2e.known(), &Named::open(cache, &Tree::now()?))
}

fn write_page(page: &str) -> Result<()> {
    let path = source_dir().join(CONFORMANCE);
    fs::write(&path, page).with_context(|| format!("cannot write {}", path.display()))
}

fn unit_tests(filter: Option<&str>) -> Result<Tally> {
    let mut cargo = cargo();
    cargo.args(["test", "--locked", "--workspace", "--no-fail-fast"]).args(filter);
    let (output, status) = shown_output(&mut cargo, |_| ())?;
    Ok(cargo_tally(&output).checked("cargo test", status.success()))
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

/// Runs a command with its standard output both shown and returned. `watch` gets what there is of it after each line.
pub(crate) fn shown_output(command: &mut Command, watch: impl Fn(&str)) -> Result<(String, ExitStatus)> {
    let name = Path::new(command.get_program()).display().to_string();
    let context = || format!("cannot run {name}");
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().with_context(context)?;
    let mut output = String::new();
    if let Some(stdout) = child.stdout.take() {
        for line in BufReader::new(stdout).lines() {
            let line = line.with_context(|| format!("cannot read what {name} prints"))?;
            progress::apart(|| println!("{line}"));
            output.push_str(&line);
            output.push('\n');
            watch(&output);
        }
    }
    let status = child.wait().with_context(|| format!("cannot wait for {name}"))?;
    Ok((output, status))
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
