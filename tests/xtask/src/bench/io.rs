//! `cargo xtask bench io`: compares files and network of a container with runc's, and writes docs/io.md.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;

use crate::cache::Cache;
use crate::dist::{self, Profile, source_dir};
use crate::e2e::E2E;
use crate::progress::step;
use crate::rig::{Accelerator, Io, Limit, Payload, Rig};
use crate::tools::Tools;

use super::interval::{ENOUGH, Interval, median};

const PAGE: &str = "docs/io.md";
/// Where the numbers are in the inner host.
const NUMBERS: &str = "/run/io.json";
/// How long a round may take. On a quiet machine an emulated host takes about a minute.
const ROUND_LIMIT: Duration = Duration::from_secs(5 * 60);
/// How long the start may take.
const START_LIMIT: Duration = Duration::from_secs(5 * 60);

const INTRODUCTION: &str = "\
# Files and network, compared with runc

Written by `cargo xtask bench io`, not by hand. One run on one host.

Two containers run all the time, one of runc and one of Bulkhead. The root of each is a snapshot of an image, whose
written files are in memory. The volume is a directory of the host's disk, and the network is a bridge. A round has both
do each piece of work, one after the other, and every other round does so in the opposite order. A pair is what one
round has measured of both. The container measures the time.

The *speed* is the time of runc divided by the time of Bulkhead: 1 is as fast as runc, and 0.5 takes twice as long. It
is the median of the speeds of all pairs. The interval is a 95 % confidence interval of that median, whatever the
distribution of the speeds. In parentheses is how often such an interval contains the true median, if the rounds are
independent of one another. There is no interval of fewer than 6 pairs.
";

/// What `bulkhead-e2e io` measured.
#[derive(Debug, Deserialize)]
struct Report {
    facts: BTreeMap<String, String>,
    rows: Vec<Row>,
}

/// A kind of work. Samples with the same index were taken in the same round.
#[derive(Debug, Deserialize)]
struct Row {
    what: String,
    runc_ms: Vec<f64>,
    bulkhead_ms: Vec<f64>,
}

/// Measures, and prints the page. Writes it if there are enough pairs.
pub(super) fn run(cache: &Cache, tools: &Tools, rounds: u32) -> Result<()> {
    let is_enough = rounds as usize >= ENOUGH;
    // A trial needs no programs that ship.
    let profile = if is_enough { Profile::Shipped } else { Profile::Quick };
    let dist = dist::build(cache, tools, profile)?;
    let payload = Payload::new(cache, &[dist.put()])?;
    let rig = Rig::ensure(cache, tools)?;
    let mut session = step("starting the host", || rig.start(&payload))?;
    let argv = [E2E, "io", "--rounds", &rounds.to_string(), "--output", NUMBERS].map(str::to_owned);
    let limit = START_LIMIT + ROUND_LIMIT * rounds.saturating_add(1);
    let status = session.run(&argv, Io::Shown(&mut Vec::new()), Limit::Whole(limit))?;
    if status != 0 {
        bail!("bulkhead-e2e io exits with status {status}");
    }
    let mut numbers = Vec::new();
    session.run(
        &["cat", NUMBERS].map(str::to_owned),
        Io::Captured(&mut numbers),
        Limit::Whole(START_LIMIT),
    )?;
    session.finish();
    let report: Report = serde_json::from_slice(&numbers).context("the numbers of bulkhead-e2e io")?;
    let page = page(&report)?;
    println!("{page}");
    if !is_enough {
        println!("{PAGE} was not written: it needs {ENOUGH} rounds.");
        return Ok(());
    }
    fs::write(source_dir().join(PAGE), &page).with_context(|| format!("cannot write {PAGE}"))
}

/// The whole page.
fn page(report: &Report) -> Result<String> {
    let mut page = String::from(INTRODUCTION);
    writeln!(
        page,
        "\nThe host was {}.\nThere, a VM exit costs many times what it costs on hardware.\n",
        Accelerator::describe()
    )?;
    page.push_str("| fact | value |\n|---|---|\n");
    for (fact, value) in &report.facts {
        writeln!(page, "| {fact} | {value} |")?;
    }
    page.push_str("\n| work | runc | Bulkhead | speed | interval | pairs |\n|---|---|---|---|---|---|\n");
    for row in &report.rows {
        let speeds = row.speeds()?;
        let of = |samples: &[f64]| median(samples).context("no samples");
        let interval = Interval::of_median(&speeds).map_or("-".to_owned(), |interval| interval.to_string());
        writeln!(
            page,
            "| {} | {:.1} ms | {:.1} ms | {:.3} | {interval} | {} |",
            row.what,
            of(&row.runc_ms)?,
            of(&row.bulkhead_ms)?,
            of(&speeds)?,
            speeds.len()
        )?;
    }
    page.push_str("\n## All samples\n\nIn the order of the rounds, in ms.\n\n");
    page.push_str("| work | runc | Bulkhead |\n|---|---|---|\n");
    for row in &report.rows {
        let shown = |samples: &[f64]| {
            samples.iter().map(|sample| format!("{sample:.1}")).collect::<Vec<_>>().join(" ")
        };
        writeln!(page, "| {} | {} | {} |", row.what, shown(&row.runc_ms), shown(&row.bulkhead_ms))?;
    }
    Ok(page)
}

impl Row {
    /// The speed of each pair.
    fn speeds(&self) -> Result<Vec<f64>> {
        let Self { what, runc_ms, bulkhead_ms } = self;
        ensure!(runc_ms.len() == bulkhead_ms.len(), "the samples of `{what}` are no pairs");
        let speeds: Vec<f64> = runc_ms.iter().zip(bulkhead_ms).map(|(runc, ours)| runc / ours).collect();
        ensure!(speeds.iter().all(|speed| speed.is_normal()), "a sample of `{what}` is zero");
        Ok(speeds)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn report(bulkhead_ms: Vec<f64>) -> Report {
        let row = Row { what: "work".into(), runc_ms: vec![10.0; bulkhead_ms.len()], bulkhead_ms };
        Report { facts: BTreeMap::from([("containerd".into(), "1.7".into())]), rows: vec![row] }
    }

    #[test]
    fn the_page_has_speeds_and_their_intervals() {
        let page = page(&report([[20.0; 5], [40.0; 5], [5.0; 5]].concat())).unwrap();
        for row in
            ["| work | 10.0 ms | 20.0 ms | 0.500 | 0.250 to 2.000 (96.5 %) | 15 |", "| containerd | 1.7 |"]
        {
            assert!(page.contains(row), "{page}");
        }
    }

    #[test]
    fn samples_that_are_no_pairs_are_an_error() {
        let mut unpaired = report(vec![1.0, 2.0]);
        unpaired.rows[0].runc_ms.pop();
        assert!(page(&unpaired).is_err());
        assert!(page(&report(vec![0.0])).unwrap_err().to_string().contains("is zero"));
    }
}
