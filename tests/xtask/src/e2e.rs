//! The end-to-end tests: on each runtime and each version of containerd, in rigs of their own side by side, or on
//! this machine.

use std::collections::BTreeMap;
use std::num::NonZero;
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;

use crate::cache::Cache;
use crate::conformance::{self, Outcomes};
use crate::containerd::Containerd;
use crate::dist;
use crate::rig::{Accelerator, Io, Payload, Rig};
use crate::test::{Tally, shown_output};
use crate::tools::Tools;

/// The end-to-end tests' program on a host.
pub(crate) const E2E: &str = "/usr/lib/bulkhead/tests/bulkhead-e2e";

/// How long the end-to-end tests of one runtime may take.
const LIMIT: Duration = Duration::from_secs(60 * 60);

/// Asks a host what it runs.
const VERSIONS: [&str; 3] =
    ["sh", "-c", "containerd --version | cut -d ' ' -f 1,3; runc --version | head -n 1; uname -sr"];
const RESTART: [&str; 3] = ["systemctl", "restart", "containerd"];
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

/// One run of `bulkhead-e2e test`.
#[derive(Debug, Clone)]
pub(crate) struct Job {
    pub(crate) runtime: Runtime,
    /// In the rig; this machine has what it has.
    pub(crate) containerd: Containerd,
    /// Only the cases that tell containerd's versions apart.
    pub(crate) brief: bool,
    pub(crate) filter: Option<String>,
    /// Of all of it.
    pub(crate) times: u32,
}

impl Job {
    fn argv(&self) -> Vec<String> {
        let times = self.times.to_string();
        let flags = [E2E, "test", "--runtime", self.runtime.name(), "--times", &times];
        let brief = self.brief.then_some("--brief");
        flags.into_iter().chain(brief).chain(self.filter.as_deref()).map(str::to_owned).collect()
    }

    /// What a person calls it.
    pub(crate) fn name(&self) -> String {
        format!("{} on containerd {}", self.runtime.name(), self.containerd.name())
    }
}

/// What a job found.
pub(crate) struct Run {
    pub(crate) tally: Tally,
    pub(crate) outcomes: Outcomes,
    /// The failed tests and why, as `bulkhead-e2e` says it.
    pub(crate) failures: String,
    /// Of the host's containerd, runc and kernel, a line each.
    pub(crate) versions: String,
}

/// The end-to-end tests, ready to run.
pub(crate) enum E2e {
    Rig {
        rig: Box<Rig>,
        /// What a host gets, by the name of its containerd.
        payloads: BTreeMap<&'static str, Payload>,
    },
    Host,
}

impl E2e {
    /// Builds what is tested, and what it is tested with.
    pub(crate) fn prepare(cache: &Cache, place: Place, jobs: &[Job]) -> Result<E2e> {
        if place == Place::Host {
            require_host()?;
        }
        let tools = Tools::ensure(cache)?;
        let dist = dist::build(cache, &tools)?;
        if place == Place::Host {
            dist.install_on_host()?;
            return Ok(E2e::Host);
        }
        let mut payloads = BTreeMap::new();
        for containerd in jobs.iter().map(|job| job.containerd) {
            if !payloads.contains_key(containerd.name()) {
                let puts: Vec<_> = [dist.put()].into_iter().chain(containerd.put(cache)?).collect();
                payloads.insert(containerd.name(), Payload::new(cache, &puts)?);
            }
        }
        Ok(E2e::Rig { rig: Box::new(Rig::ensure(cache, &tools)?), payloads })
    }

    /// Does the jobs, as many side by side as there are processors if each has a host of its own. What each found, in
    /// their order.
    pub(crate) fn run_all(&self, jobs: &[Job]) -> Vec<Result<Run>> {
        let processors = thread::available_parallelism().map_or(1, NonZero::get);
        let workers = if matches!(self, E2e::Host) { 1 } else { processors };
        let next = Mutex::new(jobs.iter().enumerate());
        let take = || next.lock().unwrap_or_else(PoisonError::into_inner).next();
        let mut runs: Vec<_> = thread::scope(|scope| {
            let work = || {
                let mut done = Vec::new();
                while let Some((index, job)) = take() {
                    done.push((index, self.run(job)));
                }
                done
            };
            let workers: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
            let done = workers.into_iter().map(|worker| worker.join());
            done.flat_map(|done| done.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
        });
        runs.sort_by_key(|(index, _)| *index);
        runs.into_iter().map(|(_, run)| run).collect()
    }

    /// Does a job, in a fresh rig.
    fn run(&self, job: &Job) -> Result<Run> {
        let argv = job.argv();
        let mut versions = Vec::new();
        let (output, succeeded) = match self {
            E2e::Host => shown_output(Command::new(E2E).args(&argv[1..]))?,
            E2e::Rig { rig, payloads } => {
                let payload = payloads.get(job.containerd.name()).context("a job without a payload")?;
                let mut session = rig.start(payload)?;
                if job.containerd.is_brought() {
                    // It still runs the one that was there before the payload came.
                    let restarted = session.run(&RESTART.map(str::to_owned), Io::Inherited, QUICK)?;
                    let name = job.containerd.name();
                    ensure!(restarted == 0, "containerd {name} does not start in the inner host");
                }
                session.run(&VERSIONS.map(str::to_owned), Io::Captured(&mut versions), QUICK)?;
                let mut output = Vec::new();
                let status = session.run(&argv, Io::Shown(&mut output), LIMIT)?;
                session.finish();
                (String::from_utf8_lossy(&output).into_owned(), status == 0)
            }
        };
        let tally = tally(&output).context("the tests ended without a count")?;
        Ok(Run {
            tally: tally.checked("bulkhead-e2e", succeeded),
            outcomes: conformance::outcomes(&output),
            failures: failures(&output).to_owned(),
            versions: String::from_utf8_lossy(&versions).into_owned(),
        })
    }
}

/// Reads the last line, `3 passed, 0 failed`.
fn tally(output: &str) -> Option<Tally> {
    let (passed, failed) = output.trim_end().lines().last()?.split_once(", ")?;
    let passed = passed.strip_suffix(" passed")?.parse().ok()?;
    let failed = failed.strip_suffix(" failed")?.parse().ok()?;
    Some(Tally { passed, failed })
}

/// What is said of the failed tests once more at the end.
fn failures(output: &str) -> &str {
    let from = output.rfind("\nfailed, ").map_or(output.len(), |newline| newline + 1);
    let end = output.trim_end().rfind('\n').unwrap_or(0);
    output.get(from..end).unwrap_or_default()
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

    #[test]
    fn only_the_last_line_counts() {
        assert_eq!(tally("1 passed, 1 failed\n20 passed, 0 failed\n"), Some(Tally { passed: 20, failed: 0 }));
        assert_eq!(tally("20 passed, 0 failed\nKilled\n"), None);
        assert_eq!(tally(""), None);
    }

    #[test]
    fn the_failures_are_what_stands_at_the_end() {
        let output = "a ... FAILED\n    why\nb ... ok\n\nfailed, runc:\na\n    why\n1 passed, 1 failed\n";
        assert_eq!(failures(output), "failed, runc:\na\n    why");
        assert_eq!(failures("b ... ok\n1 passed, 0 failed\n"), "");
        assert_eq!(failures(""), "");
    }
}
