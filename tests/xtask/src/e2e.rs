//! The end-to-end tests: on each runtime and each version of containerd, in rigs of their own side by side, or on
//! this machine.

use std::collections::BTreeMap;
use std::fs;
use std::iter::repeat_n;
use std::num::NonZero;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;

use crate::cache::{Cache, Key};
use crate::case_sources;
use crate::containerd::{self, Containerd};
use crate::dist::{self, Profile, source_dir};
use crate::named::{self, Known};
use crate::outcomes::{self, Outcome};
use crate::passed_on_runc::{self, Committed, GroupSources, Passed};
use crate::progress::Bar;
use crate::rig::{Accelerator, Io, Limit, Payload, Rig};
use crate::scheduling::{self, Course, Slice};
use crate::test::{Tally, shown_output};
use crate::tools::Tools;

/// The end-to-end tests' program on a host.
pub(crate) const E2E: &str = "/usr/lib/bulkhead/tests/bulkhead-e2e";

/// How long the tests may be silent. It must be longer than STALLED in tests/e2e/src/runner.rs, after which the tests'
/// program ends by itself.
const SILENCE: Duration = Duration::from_secs(18 * 60);

/// How many hosts a run may lose: those that end or fall silent, and those on which a case ends the tests' program.
/// Each can cost as long as [`SILENCE`], so the cases that are left when there is one more have failed.
const LOST_HOSTS: u32 = 5;

/// Memory of this machine that each rig needs. A rig has 8 GiB, but the inner host never uses all of it.
const RIG_MEMORY: u64 = 5 << 30;

/// Asks a host what it runs.
const VERSIONS: [&str; 3] =
    ["sh", "-c", "containerd --version | cut -d ' ' -f 1,3; runc --version | head -n 1; uname -sr"];
/// Runs the containerd that a payload has brought, in place of the one that was there.
pub(crate) const RESTART: [&str; 3] = ["systemctl", "restart", "containerd"];
const QUICK: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Place {
    /// The emulated host.
    Rig,
    /// This machine, which has KVM and containerd. What is tested is installed on it.
    Host,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Runtime {
    Runc,
    Bulkhead,
}

impl Runtime {
    /// As `bulkhead-e2e` calls it.
    fn name(self) -> &'static str {
        match self {
            Runtime::Runc => "runc",
            Runtime::Bulkhead => "bulkhead",
        }
    }
}

/// The end-to-end tests of one runtime under one containerd.
#[derive(Debug, Clone)]
pub(crate) struct Job {
    pub(crate) runtime: Runtime,
    /// The version in the rig. On this machine the installed version is used.
    pub(crate) containerd: Containerd,
    /// Only the cases that tell containerd's versions apart.
    pub(crate) brief: bool,
    pub(crate) filter: Option<String>,
    /// How many times all of it runs.
    pub(crate) times: usize,
    /// Whether cases need not run that passed on runc under the same conditions.
    pub(crate) may_remember: bool,
}

impl Job {
    /// Whether there is a record of its cases that passed. A run by name tests another build of the tests' program.
    fn is_recorded(&self) -> bool {
        self.runtime == Runtime::Runc && self.filter.is_none()
    }

    /// What a person calls it.
    pub(crate) fn name(&self) -> String {
        job_name(self.runtime, self.containerd)
    }
}

/// What a person calls the job of a runtime under a containerd.
pub(crate) fn job_name(runtime: Runtime, containerd: Containerd) -> String {
    format!("{} on containerd {}", runtime.name(), containerd.name())
}

/// What a job found.
#[derive(Debug, Default)]
pub(crate) struct Run {
    /// Of the cases that ran, in the order in which they ended.
    pub(crate) outcomes: Vec<Outcome>,
    /// The cases that did not run, since they had passed before under the same conditions.
    pub(crate) remembered: Vec<String>,
    /// What else a person should know, a line each.
    pub(crate) notes: Vec<String>,
    /// Of the host's containerd, runc and kernel, a line each.
    pub(crate) versions: String,
    /// Time that its rigs ran. With several at once, this is longer than the wait for them.
    pub(crate) took: Duration,
}

impl Run {
    pub(crate) fn tally(&self) -> Tally {
        let failed = failures(&self.outcomes);
        let passed = self.outcomes.len() - failed + self.remembered.len();
        Tally { passed: passed as u32, failed: failed as u32 }
    }

    fn add(&mut self, other: Run) {
        self.outcomes.extend(other.outcomes);
        self.notes.extend(other.notes);
        self.took += other.took;
        if !other.versions.is_empty() {
            self.versions = other.versions;
        }
    }
}

/// The end-to-end tests, ready to run.
pub(crate) struct E2e {
    cache: Cache,
    hosts: Hosts,
    jobs: Vec<Job>,
    /// The names of each job's cases, in their order.
    cases: Vec<Vec<String>>,
    /// All cases that there are.
    known: Vec<Known>,
    /// What the groups were made of when the tests' program was built, if a job is recorded.
    sources: GroupSources,
    committed: Committed,
}

/// Where the cases run.
enum Hosts {
    Rig {
        rig: Box<Rig>,
        /// What a host gets, by the name of its containerd.
        payloads: BTreeMap<&'static str, Payload>,
        /// The digest of the images.
        images: Key,
    },
    /// This machine.
    This,
}

impl Hosts {
    /// The version of the containerd under which the cases run.
    fn containerd_version(&self, cache: &Cache, containerd: Containerd) -> Result<String> {
        match self {
            Hosts::Rig { rig, .. } => containerd.version(cache, rig.packages()),
            Hosts::This => containerd::ask_version(&mut Command::new("containerd")),
        }
    }
}

/// How an attempt to run cases ended.
enum End {
    /// The tests' program ended, and says whether all cases passed.
    Exited { all_passed: bool },
    /// The rig ended, or printed nothing for too long.
    HostGone(String),
}

/// What one start of the tests' program found.
struct Attempt {
    outcomes: Vec<Outcome>,
    versions: String,
    end: End,
}

impl E2e {
    /// Builds what is tested, and what it is tested with, and lists the cases of the jobs.
    pub(crate) fn prepare(cache: &Cache, place: Place, profile: Profile, jobs: Vec<Job>) -> Result<E2e> {
        if place == Place::Host {
            require_host()?;
        }
        // Before the build: what somebody changes later is not recorded as passed. Reading them takes seconds.
        let is_recorded = jobs.iter().any(Job::is_recorded);
        let sources =
            if is_recorded { case_sources::of_groups(source_dir())? } else { GroupSources::default() };
        let tools = Tools::ensure(cache)?;
        // Another run may replace what is built as soon as this is dropped.
        let dist = dist::build(cache, &tools, profile)?;
        let hosts = match place {
            Place::Host => {
                dist.install_on_host()?;
                Hosts::This
            }
            Place::Rig => {
                let mut payloads = BTreeMap::new();
                for containerd in jobs.iter().map(|job| job.containerd) {
                    if !payloads.contains_key(containerd.name()) {
                        let puts: Vec<_> = [dist.put()].into_iter().chain(containerd.put(cache)?).collect();
                        payloads.insert(containerd.name(), Payload::new(cache, &puts)?);
                    }
                }
                let rig = Box::new(Rig::ensure(cache, &tools)?);
                Hosts::Rig { rig, payloads, images: dist.images_key()? }
            }
        };
        let program = dist.root().join(E2E.trim_start_matches('/'));
        let list = |job: &Job| list_cases(&program, job, &hosts.containerd_version(cache, job.containerd)?);
        let cases = jobs.iter().map(list).collect::<Result<_>>()?;
        let known = named::known(&output_of(Command::new(program).arg("list"))?);
        let committed = passed_on_runc::committed(source_dir())?;
        Ok(E2e { cache: cache.clone(), hosts, jobs, cases, known, sources, committed })
    }

    /// All cases of the tests' program, also those that the jobs leave out.
    pub(crate) fn known(&self) -> &[Known] {
        &self.known
    }

    /// Writes what passed on runc in these runs of the jobs to the source tree.
    pub(crate) fn commit_passed_on_runc(&self, runs: &[Run]) -> Result<()> {
        let runs: Vec<_> = self.jobs.iter().zip(runs).collect();
        passed_on_runc::commit(source_dir(), &runs, &self.sources)
    }

    /// Runs the jobs, in as many rigs side by side as there are processors. What each found, in their order.
    pub(crate) fn run_all(&self) -> Result<Vec<Run>> {
        let durations = outcomes::durations(&self.cache);
        let mut runs = Vec::new();
        let mut records = Vec::new();
        let mut left = Vec::new();
        for (job, cases) in self.jobs.iter().zip(&self.cases) {
            let record = self.record(job)?;
            let usable = record.as_ref().filter(|_| job.may_remember);
            let passed = |case: &&String| usable.is_some_and(|record| record.has(case));
            let (remembered, cases): (Vec<&String>, Vec<&String>) = cases.iter().partition(passed);
            let durations = durations.get(&job.name());
            let estimated = |case: &String| (case.clone(), scheduling::estimate(durations, case));
            left.push(repeat_n(cases, job.times).flatten().map(estimated).collect());
            let versions = record.as_ref().map(Passed::versions).unwrap_or_default();
            let remembered = remembered.into_iter().cloned().collect();
            runs.push(Mutex::new(Run { remembered, versions, ..Run::default() }));
            records.push(record);
        }
        let workers = match self.hosts {
            Hosts::Rig { .. } => rigs_at_once()?,
            Hosts::This => 1,
        };
        let lost_hosts = AtomicU32::new(0);
        let slices = scheduling::slices(&left, workers);
        let (bar, course) = (Bar::new("end-to-end cases"), Mutex::new(Course::new(&slices, workers)));
        let tell = |number: usize, done: usize, failed: usize| {
            let mut course = locked(&course);
            course.tell(number, done, failed);
            bar.show(course.done(), Some(course.all()), course.note());
        };
        let slices = Mutex::new(slices.into_iter().enumerate());
        // In a function of its own, so that the lock is held for a moment only.
        let take = || locked(&slices).next();
        thread::scope(|scope| {
            let work = || {
                while let Some((number, slice)) = take() {
                    let Some((job, record)) = self.jobs.get(slice.job).zip(records.get(slice.job)) else {
                        return;
                    };
                    let tell = |done, failed| tell(number, done, failed);
                    let run = self.run_slice(job, record.as_ref(), &slice, &lost_hosts, &tell);
                    if let Some(whole) = runs.get(slice.job) {
                        locked(whole).add(run);
                    }
                }
            };
            (0..workers).for_each(|_| drop(scope.spawn(work)));
        });
        Ok(runs.into_iter().map(|run| run.into_inner().unwrap_or_else(PoisonError::into_inner)).collect())
    }

    /// The record of the cases that passed under the job's conditions. None: there is none for such a job.
    fn record(&self, job: &Job) -> Result<Option<Passed>> {
        let Hosts::Rig { rig, images, .. } = &self.hosts else { return Ok(None) };
        if !job.is_recorded() {
            return Ok(None);
        }
        let key = rig.key().clone().key(images).key(&job.containerd.programs_key(&self.cache)?);
        let name = format!("passed-on-runc-{}", job.containerd.name());
        let committed = self.committed.get(job.containerd.name()).cloned().unwrap_or_default();
        Passed::open(&self.cache, &name, &key, self.sources.clone(), committed).map(Some)
    }

    /// Runs the cases of a slice, and records how they ended. `tell` gets how many are done, and how many of these
    /// have failed.
    fn run_slice(
        &self,
        job: &Job,
        record: Option<&Passed>,
        slice: &Slice,
        lost_hosts: &AtomicU32,
        tell: &dyn Fn(usize, usize),
    ) -> Run {
        let mut run = run_cases(&slice.cases, lost_hosts, |before, cases| {
            let tell_all = |outcomes: &[Outcome]| {
                tell(before.len() + outcomes.len(), failures(before) + failures(outcomes));
            };
            tell_all(&[]);
            self.attempt(job, cases, &tell_all).unwrap_or_else(|error| Attempt {
                outcomes: Vec::new(),
                versions: String::new(),
                end: End::HostGone(format!("{error:#}")),
            })
        });
        tell(run.outcomes.len(), failures(&run.outcomes));
        let recorded = outcomes::record_durations(&self.cache, &job.name(), &run.outcomes)
            .and_then(|()| record.map_or(Ok(()), |record| record.add(&run.outcomes, &run.versions)));
        if let Err(error) = recorded {
            run.notes.push(format!("later runs will not know of some cases: {error:#}"));
        }
        run
    }

    /// Runs the cases in a fresh rig, or on this machine. An error if no host comes up for them. `tell` gets the
    /// outcomes of those that are done.
    fn attempt(&self, job: &Job, cases: &[String], tell: &dyn Fn(&[Outcome])) -> Result<Attempt> {
        let argv = [E2E, "test", "--runtime", job.runtime.name(), "--exact"];
        let argv: Vec<_> = argv.into_iter().map(str::to_owned).chain(cases.iter().cloned()).collect();
        let Hosts::Rig { rig, payloads, .. } = &self.hosts else {
            let watch = |output: &str| tell(&outcomes::of_cases(output, cases));
            let (output, status) = shown_output(Command::new(E2E).args(argv.iter().skip(1)), watch)?;
            let outcomes = outcomes::of_cases(&output, cases);
            let end = End::Exited { all_passed: status.success() };
            return Ok(Attempt { outcomes, versions: String::new(), end });
        };
        let mut session =
            rig.start(payloads.get(job.containerd.name()).context("a job without a payload")?)?;
        if job.containerd.is_brought() {
            // It still runs the one that was there before the payload came.
            let restarted =
                session.run(&RESTART.map(str::to_owned), Io::Shown(&mut Vec::new()), Limit::Whole(QUICK))?;
            ensure!(restarted == 0, "containerd {} does not start in the inner host", job.containerd.name());
        }
        let (mut versions, mut output) = (Vec::new(), Vec::new());
        session.run(&VERSIONS.map(str::to_owned), Io::Captured(&mut versions), Limit::Whole(QUICK))?;
        let watch = |output: &[u8]| tell(&outcomes::of_cases(&String::from_utf8_lossy(output), cases));
        let end = match session.run(&argv, Io::Watched(&mut output, &watch), Limit::Silence(SILENCE)) {
            Ok(status) => {
                session.finish();
                End::Exited { all_passed: status == 0 }
            }
            Err(error) => End::HostGone(format!("{:#}", error.context("the tests broke off"))),
        };
        let [output, versions] = [output, versions].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        Ok(Attempt { outcomes: outcomes::of_cases(&output, cases), versions, end })
    }
}

/// Asks the tests' program for the names of a job's cases under this version of containerd. Those of each part of the
/// job's filter are in their order.
fn list_cases(program: &Path, job: &Job, version: &str) -> Result<Vec<String>> {
    let Some(filter) = &job.filter else { return list_part(program, job, version, None) };
    let mut names: Vec<String> = Vec::new();
    for part in filter.split(',') {
        let found = list_part(program, job, version, Some(part))?;
        names.extend(found.into_iter().filter(|name| !names.contains(name)).collect::<Vec<_>>());
    }
    Ok(names)
}

fn list_part(program: &Path, job: &Job, version: &str, part: Option<&str>) -> Result<Vec<String>> {
    let mut list = Command::new(program);
    list.args(["list", "--runtime", job.runtime.name(), "--containerd", version]);
    list.args(job.brief.then_some("--brief")).args(part);
    Ok(output_of(&mut list)?.lines().map(str::to_owned).collect())
}

/// What the tests' program prints that lists cases.
fn output_of(list: &mut Command) -> Result<String> {
    let output = list.stdin(Stdio::null()).output().context("cannot run bulkhead-e2e to list its cases")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}", said.trim().trim_start_matches("bulkhead-e2e: "));
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// How many rigs this machine can run side by side.
pub(crate) fn rigs_at_once() -> Result<usize> {
    let processors = thread::available_parallelism().map_or(1, NonZero::get);
    Ok(processors.min((available_memory()? / RIG_MEMORY) as usize).max(1))
}

/// Bytes of memory that new processes of this machine can use.
fn available_memory() -> Result<u64> {
    let info = fs::read_to_string("/proc/meminfo").context("cannot read /proc/meminfo")?;
    let kib = info.lines().find_map(|line| line.strip_prefix("MemAvailable:")?.trim().strip_suffix(" kB"));
    let kib: u64 =
        kib.context("no MemAvailable in /proc/meminfo")?.parse().context("MemAvailable is no number")?;
    Ok(kib << 10)
}

/// Runs the cases, each attempt on a new host. An attempt gets what was found before. `lost_hosts` counts the attempts
/// of a whole run that did not come to the end of their cases.
///
/// A case that ends the tests' program, or that stalls, has failed, and those after it run in the next attempt. The
/// case during which the host ended runs once more, since the emulator may be to blame.
fn run_cases(
    cases: &[String],
    lost_hosts: &AtomicU32,
    mut attempt: impl FnMut(&[Outcome], &[String]) -> Attempt,
) -> Run {
    let mut run = Run::default();
    let started = Instant::now();
    let mut repeated: Option<usize> = None;
    while let Some(left) = cases.get(run.outcomes.len()..).filter(|left| !left.is_empty()) {
        let attempt = attempt(&run.outcomes, left);
        let all_passed = attempt.outcomes.iter().all(|outcome| outcome.failure.is_none());
        let last_failed = attempt.outcomes.last().is_some_and(|outcome| outcome.failure.is_some());
        run.outcomes.extend(attempt.outcomes);
        if !attempt.versions.is_empty() {
            run.versions = attempt.versions;
        }
        match (attempt.end, cases.get(run.outcomes.len())) {
            (End::HostGone(why), Some(case)) if repeated != Some(run.outcomes.len()) => {
                repeated = Some(run.outcomes.len());
                run.notes.push(format!("{case} ran once more, in a new rig: {why}"));
            }
            (End::HostGone(why), Some(case)) => run.outcomes.push(Outcome::failed(case, &why)),
            (End::HostGone(why), None) => run.notes.push(format!("the rig ended after the last case: {why}")),
            // A case that stalls ends the program after its outcome: the next one has not begun.
            (End::Exited { .. }, Some(_)) if last_failed => {}
            (End::Exited { .. }, Some(case)) => {
                run.outcomes.push(Outcome::failed(case, "the tests' program ended in this case"));
            }
            (End::Exited { all_passed: said }, None) if said != all_passed => {
                let why = "the exit status of the tests' program contradicts the outcomes that it printed";
                run.outcomes.extend(cases.last().map(|case| Outcome::failed(case, why)));
            }
            (End::Exited { .. }, None) => {}
        }
        if run.outcomes.len() < cases.len() && lost_hosts.fetch_add(1, Ordering::Relaxed) >= LOST_HOSTS {
            let left = cases.iter().skip(run.outcomes.len());
            let why = format!("did not run: this run has lost more than {LOST_HOSTS} hosts");
            run.outcomes.extend(left.map(|case| Outcome::failed(case, &why)).collect::<Vec<_>>());
        }
    }
    run.took = started.elapsed();
    run
}

fn failures(outcomes: &[Outcome]) -> usize {
    outcomes.iter().filter(|outcome| outcome.failure.is_some()).count()
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Says in one line what this machine lacks to be tested on.
fn require_host() -> Result<()> {
    Accelerator::detect_kvm().context("--on host needs KVM")?;
    if !Path::new("/run/containerd/containerd.sock").exists() {
        bail!("--on host needs a running containerd: there is no /run/containerd/containerd.sock");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs the cases `a` to `e` in attempts. In each, so many cases pass, and then it ends so.
    /// Returns the names of the cases that failed, and how many notes there are.
    fn run(attempts: Vec<(usize, End)>) -> (Vec<String>, usize) {
        run_with_failures(attempts.into_iter().map(|(passes, end)| (passes, 0, end)).collect())
    }

    /// Like [`run`]. After those that pass, so many cases fail.
    fn run_with_failures(attempts: Vec<(usize, usize, End)>) -> (Vec<String>, usize) {
        let cases = ["a", "b", "c", "d", "e"].map(str::to_owned);
        let mut attempts = attempts.into_iter();
        let run = run_cases(&cases, &AtomicU32::new(0), |before, left| {
            assert_eq!(before.len() + left.len(), cases.len());
            let (passes, failures, end) = attempts.next().unwrap();
            let mut outcomes: Vec<_> =
                left.iter().take(passes + failures).map(|case| Outcome::failed(case, "why")).collect();
            outcomes.iter_mut().take(passes).for_each(|outcome| outcome.failure = None);
            Attempt { outcomes, versions: String::new(), end }
        });
        assert!(attempts.next().is_none());
        let names: Vec<_> = run.outcomes.iter().map(|outcome| outcome.case.as_str()).collect();
        assert_eq!(names, cases);
        let failed = run.outcomes.into_iter().filter(|outcome| outcome.failure.is_some());
        (failed.map(|outcome| outcome.case).collect(), run.notes.len())
    }

    fn exits(all_passed: bool) -> End {
        End::Exited { all_passed }
    }

    fn ends() -> End {
        End::HostGone("why".to_owned())
    }

    #[test]
    fn cases_that_all_end_run_once() {
        assert_eq!(run(vec![(5, exits(true))]), (vec![], 0));
    }

    #[test]
    fn a_case_that_ends_the_program_loses_only_itself() {
        assert_eq!(run(vec![(2, exits(false)), (2, exits(true))]), (vec!["c".to_owned()], 0));
        assert_eq!(run(vec![(4, exits(false))]), (vec!["e".to_owned()], 0));
    }

    #[test]
    fn a_case_that_stalls_loses_only_itself() {
        let attempts = vec![(1, 1, exits(false)), (3, 0, exits(true))];
        assert_eq!(run_with_failures(attempts), (vec!["b".to_owned()], 0));
        // One that fails, and the next one panics.
        let attempts = vec![(1, 1, exits(false)), (0, 0, exits(false)), (2, 0, exits(true))];
        assert_eq!(run_with_failures(attempts), (vec!["b".to_owned(), "c".to_owned()], 0));
    }

    #[test]
    fn a_case_in_which_the_rig_ends_runs_once_more_and_that_is_noted() {
        assert_eq!(run(vec![(2, ends()), (3, exits(true))]), (vec![], 1));
        assert_eq!(run(vec![(2, ends()), (0, ends()), (2, exits(true))]), (vec!["c".to_owned()], 1));
    }

    #[test]
    fn a_run_that_loses_too_many_hosts_ends() {
        // Two for each of three cases.
        let (failed, _) = run((0..=LOST_HOSTS).map(|_| (0, ends())).collect());
        assert_eq!(failed, ["a", "b", "c", "d", "e"]);
        // They are counted over all slices.
        let lost_hosts = AtomicU32::new(LOST_HOSTS);
        let attempt =
            |_: &[Outcome], _: &[String]| Attempt { outcomes: vec![], versions: String::new(), end: ends() };
        let run = run_cases(&["a".to_owned()], &lost_hosts, attempt);
        assert_eq!(run.outcomes.len(), 1);
        assert!(run.outcomes[0].failure.as_ref().unwrap().contains("lost"), "{:?}", run.outcomes);
    }

    #[test]
    fn the_available_memory_is_a_plausible_number() {
        assert!((64 << 20..64 << 40).contains(&available_memory().unwrap()));
    }
}
