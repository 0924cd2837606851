//! `cargo xtask bench processors`: what processors a container sees and uses under its limits, on runc and on Bulkhead,
//! and writes docs/processors.md.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use anyhow::{Context, Result, ensure};

use super::interval::spread;
use super::turns;
use crate::cache::Cache;
use crate::rig::Accelerator;
use crate::tools::Tools;

const PAGE: &str = "docs/processors.md";
/// The case that runs the processes and prints what they used.
const CASE: &str = "cpus/four_busy_processes_use_what_their_limit_allows";
/// How a line of it begins that has numbers.
const LINE: &str = "busy: limit ";
/// How often it runs on each runtime.
const ROUNDS: usize = 3;

const INTRODUCTION: &str = "\
# Processors under a limit

Written by `BULKHEAD_RIG_PROCESSORS=2 cargo xtask bench processors`, not by hand. Four busy processes, each with one
thread, run for 8 seconds in one container on a host with two processors. The runtimes take turns. *nproc* is the number
of processors that the container sees. *Time* is what the processes used, of what the limit allows. *Rounds/s* is how
often all four together went round a loop of the shell, for each second from the first one's start to the last one's
end. *Work* is the rounds compared with those on runc in the same turn. Each number is a median; in parentheses are the
smallest and the largest.
";

/// What one run says about one limit.
#[derive(Debug, PartialEq)]
struct Sample {
    nproc: String,
    /// Seconds that the processes used.
    used: f64,
    /// Seconds that the limit allows.
    allowed: f64,
    /// How often they went round, all together.
    rounds: f64,
    /// The same, for each second that they ran.
    rate: f64,
}

/// The samples of each runtime, by the limit, in the order of the case.
type Samples = Vec<(String, BTreeMap<&'static str, Vec<Sample>>)>;

pub(super) fn run(cache: &Cache, tools: &Tools) -> Result<()> {
    let mut samples = Samples::new();
    turns::run(cache, tools, CASE, ROUNDS, |runtime, output| {
        for (limit, sample) in output.lines().filter_map(parsed) {
            let at = samples.iter().position(|(known, _)| *known == limit).unwrap_or_else(|| {
                samples.push((limit, BTreeMap::new()));
                samples.len() - 1
            });
            samples[at].1.entry(runtime).or_default().push(sample);
        }
        Ok(())
    })?;
    turns::write(PAGE, &page(&samples)?)
}

/// The limit and the numbers of a line such as `busy: limit 1; nproc 2; used 8.0 s of 8.0 s; 12 rounds in 8.1 s`.
fn parsed(line: &str) -> Option<(String, Sample)> {
    let (_, line) = line.split_once(LINE)?;
    let mut parts = line.trim_end().split("; ");
    let limit = parts.next()?.to_owned();
    let nproc = parts.next()?.strip_prefix("nproc ")?.to_owned();
    let (used, allowed) = parts.next()?.strip_prefix("used ")?.strip_suffix(" s")?.split_once(" s of ")?;
    let (rounds, took) = parts.next()?.strip_suffix(" s")?.split_once(" rounds in ")?;
    let [used, allowed, rounds, took] =
        [used, allowed, rounds, took].map(|number| number.parse::<f64>().ok());
    let (rounds, took) = (rounds?, took.filter(|seconds| *seconds > 0.0)?);
    Some((limit, Sample { nproc, used: used?, allowed: allowed?, rounds, rate: rounds / took }))
}

fn page(samples: &Samples) -> Result<String> {
    ensure!(!samples.is_empty(), "{CASE} prints no numbers");
    let mut page = String::from(INTRODUCTION);
    writeln!(page, "\nThe host was {}.\n", Accelerator::describe())?;
    page.push_str(
        "| limit | nproc, runc | nproc, Bulkhead | allowed | time, runc | time, Bulkhead | rounds/s, runc \
         | rounds/s, Bulkhead | work |\n|---|---|---|---|---|---|---|---|---|\n",
    );
    for (limit, runtimes) in samples {
        let of = |runtime: &str| {
            runtimes
                .get(runtime)
                .filter(|samples| samples.len() == ROUNDS)
                .with_context(|| format!("{runtime} has not {ROUNDS} samples of the limit {limit}"))
        };
        let (runc, bulkhead) = (of("runc")?, of("bulkhead")?);
        let time =
            |samples: &[Sample]| spread(samples.iter().map(|sample| sample.used), 1).map(|text| text + " s");
        let rate = |samples: &[Sample]| spread(samples.iter().map(|sample| sample.rate), 0);
        let ratios = bulkhead.iter().zip(runc).map(|(ours, theirs)| ours.rounds / theirs.rounds);
        writeln!(
            page,
            "| {limit} | {} | {} | {:.1} s | {} | {} | {} | {} | {} |",
            seen(runc)?,
            seen(bulkhead)?,
            runc.first().map_or(0.0, |sample| sample.allowed),
            time(runc)?,
            time(bulkhead)?,
            rate(runc)?,
            rate(bulkhead)?,
            spread(ratios, 2)?
        )?;
    }
    Ok(page)
}

/// The number of processors that all samples saw.
fn seen(samples: &[Sample]) -> Result<&str> {
    let first = samples.first().context("no samples")?;
    ensure!(samples.iter().all(|sample| sample.nproc == first.nproc), "nproc differs from run to run");
    Ok(&first.nproc)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_row_sets_the_runtimes_side_by_side() {
        let mut samples = Samples::new();
        let mut runtimes = BTreeMap::new();
        for (runtime, nproc, rounds) in [("runc", 2, 8000), ("bulkhead", 1, 7200)] {
            let line = format!(
                "    busy: limit 0.5; nproc {nproc}; used 4.0 s of 4.0 s; {rounds} rounds in 8.0 s\r"
            );
            let of = (0..ROUNDS).map(|_| parsed(&line).unwrap().1).collect();
            runtimes.insert(runtime, of);
        }
        samples.push((
            parsed("busy: limit a b; nproc 1; used 1 s of 1 s; 1 rounds in 1 s").unwrap().0,
            runtimes,
        ));
        let row = "| a b | 2 | 1 | 4.0 s | 4.0 (4.0 to 4.0) s | 4.0 (4.0 to 4.0) s | 1000 (1000 to 1000) \
                   | 900 (900 to 900) | 0.90 (0.90 to 0.90) |\n";
        assert!(page(&samples).unwrap().ends_with(row), "{}", page(&samples).unwrap());
        assert_eq!(parsed("cpus/four_busy ... ok (40.0 s)"), None);
        assert_eq!(parsed("busy: limit 1; nproc 1; used 1 s of 1 s; 1 rounds in 0.0 s"), None);
        samples[0].1.remove("runc");
        assert!(page(&samples).is_err());
    }
}
