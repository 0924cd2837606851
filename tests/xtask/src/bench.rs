//! `cargo xtask bench`: measures in the rig, and writes docs/benchmarks.md.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use serde::Deserialize;

use crate::cache::Cache;
use crate::dist::{self, Profile, source_dir};
use crate::e2e::E2E;
use crate::kernel;
use crate::progress::step;
use crate::rig::{Accelerator, Io, Payload, Put, Rig, Session};
use crate::tools::Tools;

/// Where the kernel that ours is compared with is in the inner host.
const ORDINARY_KERNEL: &str = "/usr/lib/bulkhead/tests/vmlinux-ordinary";

/// Where the numbers are in the inner host.
const NUMBERS: &str = "/run/bench.json";

/// How long the measurements may take.
const LIMIT: Duration = Duration::from_secs(60 * 60);

#[derive(Args)]
pub(crate) struct BenchArguments {
    /// Measure this alone, and do not write the page.
    #[arg(value_enum)]
    only: Option<Part>,
    /// Samples of each.
    #[arg(long, default_value_t = 10)]
    rounds: u32,
}

/// What can be measured alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    /// All but what memory costs where there are many containers.
    Start,
}

/// What `bulkhead-e2e bench` measured.
#[derive(Debug, Deserialize)]
struct Report {
    facts: BTreeMap<String, String>,
    /// Samples by what they are of: ms if the name ends so, else MiB.
    series: BTreeMap<String, Vec<f64>>,
}

/// Something compared with something else, as a row of the table.
struct Comparison {
    what: &'static str,
    /// Series whose medians are added up.
    ours: &'static [&'static str],
    other: &'static str,
    theirs: &'static [&'static str],
    /// Ours must be less than this many times theirs.
    target: Option<f64>,
}

const COMPARISONS: &[Comparison] = &[
    Comparison {
        what: "cold boot: spawn of the VMM to the word of the agent",
        ours: &["boot bulkhead ms"],
        other: "QEMU microvm",
        theirs: &["boot qemu ms"],
        target: Some(0.95),
    },
    Comparison {
        what: "the same boot",
        ours: &["boot bulkhead ms"],
        other: "an ordinary kernel on our VMM",
        theirs: &["boot ordinary ms"],
        target: None,
    },
    Comparison {
        what: "of that, what the kernel takes for itself: to be loaded, and to come to where it executes its init",
        ours: &["kernel bulkhead ms"],
        other: "the ordinary kernel",
        theirs: &["kernel ordinary ms"],
        target: Some(0.5),
    },
    Comparison {
        what: "clone of a template: spawn of the VMM to an answer of the agent",
        ours: &["clone bulkhead ms"],
        other: "cold boot",
        theirs: &["boot bulkhead ms"],
        target: Some(0.15),
    },
    Comparison {
        what: "`ctr run --rm busybox echo`, to its first word",
        ours: &["begin bulkhead ms"],
        other: "runc",
        theirs: &["begin runc ms"],
        target: Some(1.0),
    },
    Comparison {
        what: "the same, to its end",
        ours: &["run bulkhead ms"],
        other: "runc",
        theirs: &["run runc ms"],
        target: Some(1.0),
    },
    Comparison {
        what: "the same with `templates = false`, to its first word",
        ours: &["begin bulkhead cold ms"],
        other: "runc",
        theirs: &["begin runc ms"],
        target: None,
    },
    Comparison {
        what: "the same with `templates = false`, to its end",
        ours: &["run bulkhead cold ms"],
        other: "runc",
        theirs: &["run runc ms"],
        target: Some(3.0),
    },
    Comparison {
        what: "`ctr run --rm busybox echo`: processor time of the whole host",
        ours: &["cpu bulkhead ms"],
        other: "runc",
        theirs: &["cpu runc ms"],
        target: None,
    },
    Comparison {
        what: "RunPodSandbox, but for what CNI takes",
        ours: &["pod bulkhead ms"],
        other: "runc",
        theirs: &["pod runc ms"],
        target: Some(0.7),
    },
    Comparison {
        what: "20 pods at once, all of it",
        ours: &["pods at once bulkhead ms"],
        other: "runc",
        theirs: &["pods at once runc ms"],
        target: None,
    },
    Comparison {
        what: "`ctr task exec` of `true`",
        ours: &["exec bulkhead ms"],
        other: "runc",
        theirs: &["exec runc ms"],
        target: Some(0.5),
    },
    Comparison {
        what: "private memory of the VMM, VM booted and idle",
        ours: &["vm bulkhead vmm"],
        other: "QEMU microvm",
        theirs: &["vm qemu vmm"],
        target: None,
    },
    Comparison {
        what: "guest memory touched, VM booted and idle",
        ours: &["vm bulkhead guest"],
        other: "QEMU microvm",
        theirs: &["vm qemu guest"],
        target: None,
    },
    Comparison {
        what: "private memory of shim and VMM, idle container",
        ours: &["pod bulkhead shim", "pod bulkhead vmm"],
        other: "runc's shim",
        theirs: &["pod runc shim"],
        target: None,
    },
    Comparison {
        what: "one more idle container where there are 30: its share of all memory, its guest's too",
        ours: &["pod of many bulkhead"],
        other: "runc's shim",
        theirs: &["pod of many runc"],
        target: None,
    },
];

/// Measures, and writes the page.
pub(crate) fn run(cache: &Cache, tools: &Tools, arguments: &BenchArguments) -> Result<()> {
    let (dist, ordinary) =
        (dist::build(cache, tools, Profile::Shipped)?, kernel::build_ordinary(cache, tools)?);
    let compared = Put { local: ordinary.path, remote: ORDINARY_KERNEL.into() };
    let payload = Payload::new(cache, &[dist.put(), compared])?;
    let rig = Rig::ensure(cache, tools)?;
    let mut session = step("starting the host", || rig.start(&payload))?;
    let mut report = measure(&mut session, arguments)?;
    session.finish();
    let kernels = format!("{} options; the ordinary one {}", dist.kernel().options, ordinary.options);
    report.facts.insert("guest's kernel".into(), kernels);
    let page = page(&report)?;
    println!("{page}");
    if arguments.only.is_none() {
        let path = source_dir().join("docs/benchmarks.md");
        fs::write(&path, &page).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

fn measure(session: &mut Session, arguments: &BenchArguments) -> Result<Report> {
    let rounds = arguments.rounds.to_string();
    let mut argv = vec![E2E, "bench", "--rounds", &rounds, "--output", NUMBERS];
    if arguments.only == Some(Part::Start) {
        argv.push("--start-only");
    }
    let argv: Vec<_> = argv.into_iter().map(str::to_owned).collect();
    let status = session.run(&argv, Io::Shown(&mut Vec::new()), LIMIT)?;
    if status != 0 {
        bail!("bulkhead-e2e bench exits with status {status}");
    }
    let mut numbers = Vec::new();
    session.run(&["cat", NUMBERS].map(str::to_owned), Io::Captured(&mut numbers), LIMIT)?;
    serde_json::from_slice(&numbers).context("cannot understand the numbers of bulkhead-e2e bench")
}

/// The whole page.
fn page(report: &Report) -> Result<String> {
    let mut page = String::from(
        "# Benchmarks\n\nWritten by `cargo xtask bench`, not by hand. One run on one host; what is compared takes \
         turns (A B, B A, ...). Each number is a median, and each ratio the median of those of the rounds.\n",
    );
    writeln!(
        page,
        "\nThe host was {}. Where it is emulated, compare the ratios and forget the times.\n",
        Accelerator::describe(),
    )?;
    page.push_str("| fact | value |\n|---|---|\n");
    for (fact, value) in &report.facts {
        writeln!(page, "| {fact} | {value} |")?;
    }
    page.push_str("\n## Comparisons\n\n| what | Bulkhead | compared with | | ratio | target |\n|---|---|---|---|---|---|\n");
    for comparison in COMPARISONS.iter().filter(|comparison| comparison.was_measured(report)) {
        page.push_str(&comparison.row(report)?);
    }
    let guest = report.median("pod bulkhead guest")?;
    writeln!(page, "\nA guest with one idle container has touched {guest:.1} MiB of its memory.")?;
    page.push_str("\n## All samples\n\nIn the order they were taken. Memory in MiB.\n\n| series | median | samples |\n|---|---|---|\n");
    for (name, values) in &report.series {
        let samples: Vec<String> = values.iter().map(|value| format!("{value:.1}")).collect();
        writeln!(page, "| {name} | {:.1} | {} |", report.median(name)?, samples.join(" "))?;
    }
    Ok(page)
}

impl Comparison {
    /// Whether there is anything of it: a part alone leaves rows out.
    fn was_measured(&self, report: &Report) -> bool {
        self.ours.iter().chain(self.theirs).any(|name| report.series.contains_key(*name))
    }

    fn row(&self, report: &Report) -> Result<String> {
        let sum = |series: &[&str]| series.iter().map(|name| report.median(name)).sum::<Result<f64>>();
        let (ours, theirs) = (sum(self.ours)?, sum(self.theirs)?);
        let ratio = median(self.ratios(report)?).context("there is nothing to compare")?;
        let target = match self.target {
            Some(target) if ratio < target => format!("below {target}: met"),
            Some(target) => format!("below {target}: **missed**"),
            None => "-".to_owned(),
        };
        let unit = if self.ours.iter().all(|name| name.ends_with(" ms")) { "ms" } else { "MiB" };
        Ok(format!(
            "| {} | {ours:.1} {unit} | {} | {theirs:.1} {unit} | {ratio:.2} | {target} |\n",
            self.what, self.other
        ))
    }

    /// That of each round: what was measured close together.
    fn ratios(&self, report: &Report) -> Result<Vec<f64>> {
        let (ours, theirs) = (report.sums(self.ours)?, report.sums(self.theirs)?);
        if ours.len() != theirs.len() {
            bail!(
                "there are {} samples of `{}`, but {} of what it is compared with",
                ours.len(),
                self.what,
                theirs.len()
            );
        }
        Ok(ours.iter().zip(theirs).map(|(ours, theirs)| ours / theirs).collect())
    }
}

impl Report {
    fn samples(&self, series: &str) -> Result<&[f64]> {
        let values = self.series.get(series).filter(|values| !values.is_empty());
        Ok(values.with_context(|| format!("there are no samples of `{series}`"))?)
    }

    fn median(&self, series: &str) -> Result<f64> {
        median(self.samples(series)?.to_vec()).context("no median")
    }

    /// Of each round, what some series come to together.
    fn sums(&self, series: &[&str]) -> Result<Vec<f64>> {
        let all: Vec<_> = series.iter().map(|name| self.samples(name)).collect::<Result<_>>()?;
        let rounds = all.iter().map(|samples| samples.len()).min().unwrap_or(0);
        Ok((0..rounds).map(|round| all.iter().map(|samples| samples[round]).sum()).collect())
    }
}

fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    let upper = *values.get(middle)?;
    Some(if values.len() % 2 == 1 { upper } else { (values[middle - 1] + upper) / 2.0 })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Samples of all series, of which that of a cold start alone are others.
    fn report(ours_ms: [f64; 3]) -> Report {
        let every = COMPARISONS.iter().flat_map(|comparison| comparison.ours.iter().chain(comparison.theirs));
        let mut series: BTreeMap<String, Vec<f64>> =
            every.map(|name| ((*name).to_owned(), vec![10.0, 30.0, 20.0])).collect();
        series.insert("run bulkhead cold ms".into(), ours_ms.to_vec());
        series.insert("pod bulkhead guest".into(), vec![40.0]);
        Report { facts: BTreeMap::from([("QEMU".into(), "10".into())]), series }
    }

    #[test]
    fn the_page_has_medians_ratios_and_targets() {
        let page = page(&report([70.0, 60.0, 20.0])).unwrap();
        // 7, 2 and 1 in the three rounds.
        assert!(page.contains("| 60.0 ms | runc | 20.0 ms | 2.00 | below 3: met |"), "{page}");
        assert!(
            page.contains("| 20.0 ms | QEMU microvm | 20.0 ms | 1.00 | below 0.95: **missed** |"),
            "{page}"
        );
        assert!(page.contains("| 40.0 MiB | runc's shim | 20.0 MiB | 2.00 | - |"), "{page}");
        assert!(page.contains("| run bulkhead cold ms | 60.0 | 70.0 60.0 20.0 |"), "{page}");
        assert!(page.contains("| QEMU | 10 |"), "{page}");
    }

    #[test]
    fn a_median_of_an_even_number_is_between_two() {
        assert_eq!(median(vec![4.0, 1.0, 2.0, 8.0]), Some(3.0));
        assert_eq!(median(Vec::new()), None);
    }

    #[test]
    fn what_was_not_measured_has_no_row() {
        let mut report = report([1.0, 2.0, 3.0]);
        report.series.retain(|name, _| !name.starts_with("pod of many"));
        let page = page(&report).unwrap();
        assert!(page.contains("| 20 pods at once") && !page.contains("where there are 30"), "{page}");
    }

    #[test]
    fn a_series_that_is_missing_is_named() {
        let mut report = report([1.0, 2.0, 3.0]);
        report.series.remove("boot qemu ms");
        assert!(page(&report).unwrap_err().to_string().contains("`boot qemu ms`"));
    }
}
