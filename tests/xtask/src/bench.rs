//! `cargo xtask bench`: measures in the rig, and writes docs/benchmarks.md and its picture.

mod bars;
mod counts;
mod interval;
mod io;
mod pressure;
mod processors;
mod trace;
mod turns;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, ValueEnum, value_parser};
use serde::Deserialize;

use crate::cache::Cache;
use crate::dist::{self, Profile, source_dir};
use crate::e2e::E2E;
use crate::kernel;
use crate::page::filled;
use crate::progress::{Bar, step};
use crate::rig::{Accelerator, Io, Limit, Payload, Put, Rig, Session};
use crate::tools::Tools;

use interval::{Interval, Verdict, median};

/// Where the kernel that ours is compared with is in the inner host.
const ORDINARY_KERNEL: &str = "/usr/lib/bulkhead/tests/vmlinux-ordinary";

/// Where the numbers are in the inner host.
const NUMBERS: &str = "/run/bench.json";

/// How long a round may take. On a quiet machine an emulated host takes about a minute.
const ROUND_LIMIT: Duration = Duration::from_secs(4 * 60);
/// How long all may take that is measured outside the rounds.
const REST_LIMIT: Duration = Duration::from_secs(100 * 60);

/// What the page says before the table.
const HOW_TO_READ: &str = "\
A round measures both sides of a comparison, and every other round does so in the opposite order (A B, B A, ...). A pair
is what one round has measured of both sides. The ratio is the median of the ratios of all pairs. The interval is a 95 %
confidence interval of that median: between the k-th smallest and the k-th largest ratio, whatever their distribution.
In parentheses is how often such an interval contains the true median, if the rounds are independent of one another.
There is no interval of fewer than 6 pairs.

A target is **met** if the whole interval is below it, and **missed** if the whole interval is at the target or above
it. Otherwise it is **undecided**: more rounds (`--rounds`) make the interval narrower. No target is judged on fewer
than 15 pairs.
";

#[derive(Args)]
pub(crate) struct BenchArguments {
    /// Measure this alone, and do not write docs/benchmarks.md.
    #[arg(value_enum)]
    only: Option<Part>,
    /// Rounds: one sample of each. Fewer than 15 do not judge a target.
    #[arg(long, default_value_t = 15, value_parser = value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// With `counts`: later runs are compared with the numbers of this one. The page's introduction says when the
    /// numbers before were counted, so change it too (tests/xtask/src/bench/counts.rs).
    #[arg(long)]
    as_before: bool,
}

/// What can be measured alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    /// All but what memory costs where there are many containers.
    Start,
    /// What units of work cost in requests, exits, interrupts and copied bytes: writes docs/counts.md.
    Counts,
    /// What processors a container sees and uses under its limits, on a host with two: writes docs/processors.md.
    Processors,
    /// What becomes of a pod when memory is short: writes docs/memory-pressure.md.
    Pressure,
    /// Files and network, compared with runc and QEMU: writes docs/io.md and its picture, if there are 15 rounds.
    Io,
    /// The phases of the start of a pod: draws docs/pictures/pod-start.svg, and shows it in docs/benchmarks.md.
    Trace,
}

/// What `bulkhead-e2e bench` measured.
#[derive(Debug, Deserialize)]
struct Report {
    facts: BTreeMap<String, String>,
    /// Samples by what they are of: ms if the name ends so, else MiB. Samples with the same index were taken in the
    /// same round.
    series: BTreeMap<String, Vec<f64>>,
}

/// Something compared with something else, as a row of the table.
struct Comparison {
    what: &'static str,
    /// Series whose medians are added up.
    ours: &'static [&'static str],
    other: &'static str,
    theirs: &'static [&'static str],
    /// The median ratio of ours to theirs must be below this.
    target: Option<f64>,
}

/// The rows of the table, in order.
///
/// A target is judged on the ratios of at least 15 pairs. A pair is what one round has measured of both sides. The
/// target is met if the whole 95 % confidence interval of the median ratio is below it. It is missed if the whole
/// interval is at the target or above it. Otherwise the run does not decide it, and more rounds are necessary. What is
/// measured too seldom for that has no target.
const COMPARISONS: &[Comparison] = &[
    Comparison {
        what: "cold boot: from the spawn of the VMM until the agent is ready",
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
        what: "of that, the time of the kernel itself: it is loaded, and boots until it executes its init",
        ours: &["kernel bulkhead ms"],
        other: "the ordinary kernel",
        theirs: &["kernel ordinary ms"],
        target: Some(0.5),
    },
    Comparison {
        what: "clone of a template: from the spawn of the VMM until the agent answers",
        ours: &["clone bulkhead ms"],
        other: "cold boot",
        theirs: &["boot bulkhead ms"],
        target: Some(0.15),
    },
    Comparison {
        what: "`ctr run --rm busybox echo`, until its first output",
        ours: &["begin bulkhead ms"],
        other: "runc",
        theirs: &["begin runc ms"],
        target: Some(1.0),
    },
    Comparison {
        what: "`ctr run --rm busybox echo`, until it ends",
        ours: &["run bulkhead ms"],
        other: "runc",
        theirs: &["run runc ms"],
        target: Some(1.0),
    },
    Comparison {
        what: "the same command with `templates = false`, until its first output",
        ours: &["begin bulkhead cold ms"],
        other: "runc",
        theirs: &["begin runc ms"],
        target: None,
    },
    Comparison {
        what: "the same command with `templates = false`, until it ends",
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
        what: "RunPodSandbox, without the time that CNI takes",
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
    if arguments.only == Some(Part::Counts) {
        return counts::run(cache, tools, arguments.as_before);
    }
    ensure!(!arguments.as_before, "--as-before is of `bench counts`");
    if arguments.only == Some(Part::Processors) {
        return processors::run(cache, tools);
    }
    if arguments.only == Some(Part::Pressure) {
        return pressure::run(cache, tools);
    }
    if arguments.only == Some(Part::Io) {
        return io::run(cache, tools, arguments.rounds);
    }
    if arguments.only == Some(Part::Trace) {
        return trace::run(cache, tools);
    }
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
        let picture = bars::draw(&report, &Accelerator::describe())?;
        fs::write(source_dir().join(bars::PICTURE), picture)
            .with_context(|| format!("cannot write {}", bars::PICTURE))?;
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
    let limit = REST_LIMIT + ROUND_LIMIT * arguments.rounds;
    let status = run_rounds(session, &argv, Limit::Whole(limit))?;
    if status != 0 {
        bail!("bulkhead-e2e bench exits with status {status}");
    }
    let mut numbers = Vec::new();
    session.run(
        &["cat", NUMBERS].map(str::to_owned),
        Io::Captured(&mut numbers),
        Limit::Whole(ROUND_LIMIT),
    )?;
    serde_json::from_slice(&numbers).context("cannot understand the numbers of bulkhead-e2e bench")
}

/// Runs a command that says which round begins, and returns its exit status.
fn run_rounds(session: &mut Session, argv: &[String], limit: Limit) -> Result<u8> {
    let bar = Bar::new("rounds");
    let watch = |output: &[u8]| {
        if let Some(Rounds { done, all, note }) = Rounds::read(&String::from_utf8_lossy(output)) {
            bar.show(done, Some(all), note);
        }
    };
    session.run(argv, Io::Watched(&mut Vec::new(), &watch), limit)
}

/// How far a command is.
#[derive(Debug, PartialEq, Eq)]
struct Rounds {
    done: u64,
    all: u64,
    /// What it does after the rounds, or what is special about this one.
    note: String,
}

impl Rounds {
    /// Reads the lines `round 1 of 15`, to which something may be added, and what stands at the beginning of a line
    /// after them. Round 0 does not count. None: no round has begun.
    fn read(output: &str) -> Option<Rounds> {
        let mut rounds: Option<Rounds> = None;
        for line in output.lines().filter(|line| !line.starts_with(' ')) {
            if let Some((number, rest)) = line.strip_prefix("round ").and_then(|line| line.split_once(" of "))
            {
                let (all, note) = rest.split_once(", ").unwrap_or((rest, ""));
                let (number, all): (u64, u64) = (number.parse().ok()?, all.parse().ok()?);
                rounds = Some(Rounds { done: number.saturating_sub(1), all, note: note.to_owned() });
            } else if let Some(rounds) = &mut rounds {
                (rounds.done, rounds.note) = (rounds.all, line.to_owned());
            }
        }
        rounds
    }
}

/// The whole page.
fn page(report: &Report) -> Result<String> {
    let mut page = String::from(
        "# Benchmarks\n\nWritten by `cargo xtask bench`, not by hand. One run on one host. Each time and each size is \
         a median; *All samples* shows of how many.\n",
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
    page.push_str(&comparisons(report)?);
    let guest = report.median("pod bulkhead guest")?;
    writeln!(page, "\nA guest with one idle container has touched {guest:.1} MiB of its memory.")?;
    write!(page, "\n{}", bars::SECTION)?;
    page.push_str(&trace::section()?);
    page.push_str(trace::SAMPLES);
    page.push_str("\nIn the order of the rounds. Memory in MiB.\n\n");
    page.push_str("| series | median | samples |\n|---|---|---|\n");
    for (name, values) in &report.series {
        let samples: Vec<String> = values.iter().map(|value| format!("{value:.1}")).collect();
        writeln!(page, "| {name} | {:.1} | {} |", report.median(name)?, samples.join(" "))?;
    }
    Ok(filled(&page))
}

/// The table of what was compared.
fn comparisons(report: &Report) -> Result<String> {
    let mut text = format!("\n## Comparisons\n\n{HOW_TO_READ}\n");
    text.push_str("| what | Bulkhead | compared with | | ratio | interval | pairs | target |\n");
    text.push_str("|---|---|---|---|---|---|---|---|\n");
    for comparison in COMPARISONS.iter().filter(|comparison| comparison.was_measured(report)) {
        text.push_str(&comparison.row(report)?);
    }
    Ok(text)
}

impl Comparison {
    /// Whether there is anything of it: a part alone leaves rows out.
    fn was_measured(&self, report: &Report) -> bool {
        self.ours.iter().chain(self.theirs).any(|name| report.series.contains_key(*name))
    }

    fn row(&self, report: &Report) -> Result<String> {
        let sum = |series: &[&str]| series.iter().map(|name| report.median(name)).sum::<Result<f64>>();
        let (ours, theirs) = (sum(self.ours)?, sum(self.theirs)?);
        let ratios = self.ratios(report)?;
        let ratio = median(&ratios).context("there is nothing to compare")?;
        let interval = Interval::of_median(&ratios).map_or("-".to_owned(), |interval| interval.to_string());
        let target = match self.target {
            Some(target) => format!("below {target}: {}", Verdict::of(&ratios, target)),
            None => "-".to_owned(),
        };
        let unit = self.unit();
        Ok(format!(
            "| {} | {ours:.1} {unit} | {} | {theirs:.1} {unit} | {ratio:.3} | {interval} | {} | {target} |\n",
            self.what,
            self.other,
            ratios.len()
        ))
    }

    /// The unit of both sides.
    fn unit(&self) -> &'static str {
        if self.ours.iter().all(|name| name.ends_with(" ms")) { "ms" } else { "MiB" }
    }

    /// The ratio of each pair.
    fn ratios(&self, report: &Report) -> Result<Vec<f64>> {
        let (ours, theirs) = (report.sums(self.ours)?, report.sums(self.theirs)?);
        ensure!(
            ours.len() == theirs.len(),
            "there are {} samples of `{}`, but {} of what it is compared with",
            ours.len(),
            self.what,
            theirs.len()
        );
        let ratios: Vec<_> = ours.iter().zip(theirs).map(|(ours, theirs)| ours / theirs).collect();
        ensure!(ratios.iter().all(|ratio| ratio.is_normal()), "a sample of `{}` is zero", self.what);
        Ok(ratios)
    }
}

impl Report {
    fn samples(&self, series: &str) -> Result<&[f64]> {
        let values = self.series.get(series).filter(|values| !values.is_empty());
        Ok(values.with_context(|| format!("there are no samples of `{series}`"))?)
    }

    fn median(&self, series: &str) -> Result<f64> {
        median(self.samples(series)?).context("no median")
    }

    /// Of each round, what some series come to together.
    fn sums(&self, series: &[&str]) -> Result<Vec<f64>> {
        let all: Vec<_> = series.iter().map(|name| self.samples(name)).collect::<Result<_>>()?;
        let rounds = all.first().map_or(0, |samples| samples.len());
        let are_pairs = all.iter().all(|samples| samples.len() == rounds);
        ensure!(are_pairs, "the series {series:?} do not have the same number of samples");
        Ok((0..rounds).map(|round| all.iter().map(|samples| samples[round]).sum()).collect())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// What every series has in a round, unless a test says otherwise.
    fn usual(round: usize) -> f64 {
        [10.0, 20.0, 30.0][round % 3]
    }

    /// Samples of all series in some rounds. Those of a cold start have these ratios to those of runc.
    fn report(cold: &[f64]) -> Report {
        let every = COMPARISONS.iter().flat_map(|comparison| comparison.ours.iter().chain(comparison.theirs));
        let samples: Vec<f64> = (0..cold.len()).map(usual).collect();
        let mut series: BTreeMap<String, _> = every.map(|name| ((*name).into(), samples.clone())).collect();
        let cold = cold.iter().enumerate().map(|(round, ratio)| ratio * usual(round));
        series.insert("run bulkhead cold ms".into(), cold.collect());
        series.insert("pod bulkhead guest".into(), vec![40.0]);
        Report { facts: BTreeMap::from([("QEMU".into(), "10".into())]), series }
    }

    /// Five rounds of each of these ratios: the 4th, the 8th and the 12th in order are these three.
    fn fifteen(ratios: [f64; 3]) -> Vec<f64> {
        ratios.iter().flat_map(|ratio| [*ratio; 5]).collect()
    }

    #[test]
    fn the_page_has_medians_ratios_intervals_and_targets() {
        let page = page(&report(&fifteen([1.0, 1.5, 2.0]))).unwrap();
        for row in [
            "| 30.0 ms | runc | 20.0 ms | 1.500 | 1.000 to 2.000 (96.5 %) | 15 | below 3: met |",
            "| QEMU microvm | 20.0 ms | 1.000 | 1.000 to 1.000 (96.5 %) | 15 | below 0.95: **missed** |",
            "| 40.0 MiB | runc's shim | 20.0 MiB | 2.000 | 2.000 to 2.000 (96.5 %) | 15 | - |",
            "| run bulkhead cold ms | 30.0 | 10.0 20.0 30.0 10.0 20.0 45.0 15.0 ",
            "| QEMU | 10 |",
        ] {
            assert!(page.contains(row), "{page}");
        }
    }

    #[test]
    fn rounds_are_counted_as_they_end() {
        let read = |output: &str| Rounds::read(output).map(|Rounds { done, all, note }| (done, all, note));
        assert_eq!(read("starting\n"), None);
        let first = "starting\nround 0 of 3, which does not count\n";
        assert_eq!(read(first), Some((0, 3, "which does not count".into())));
        let second = format!("{first}round 1 of 3\nround 2 of 3\n  read: 7 ms\n");
        assert_eq!(read(&second), Some((1, 3, String::new())));
        assert_eq!(read(&format!("{second}20 pods at once\n")), Some((3, 3, "20 pods at once".into())));
    }

    #[test]
    fn an_interval_with_the_target_in_it_decides_nothing() {
        let page = page(&report(&fifteen([1.0, 1.5, 3.5]))).unwrap();
        assert!(page.contains("| 1.500 | 1.000 to 3.500 (96.5 %) | 15 | below 3: **undecided**"), "{page}");
    }

    #[test]
    fn a_few_pairs_are_not_judged() {
        let few = page(&report(&[2.0, 2.0, 1.0])).unwrap();
        assert!(few.contains("| 2.000 | - | 3 | below 3: not judged: 3 pairs of 15 |"), "{few}");
        let more = page(&report(&[2.0; 14])).unwrap();
        assert!(
            more.contains("| 2.000 to 2.000 (98.7 %) | 14 | below 3: not judged: 14 pairs of 15 |"),
            "{more}"
        );
    }

    #[test]
    fn what_was_not_measured_has_no_row() {
        let mut report = report(&[1.0, 2.0, 3.0]);
        report.series.retain(|name, _| !name.starts_with("pod of many"));
        let page = page(&report).unwrap();
        assert!(page.contains("| 20 pods at once") && !page.contains("where there are 30"), "{page}");
    }

    #[test]
    fn a_series_that_is_missing_is_named() {
        let mut report = report(&[1.0, 2.0, 3.0]);
        report.series.remove("boot qemu ms");
        assert!(page(&report).unwrap_err().to_string().contains("`boot qemu ms`"));
    }

    #[test]
    fn samples_without_their_other_side_are_no_pairs() {
        for name in ["boot qemu ms", "pod bulkhead shim"] {
            let mut report = report(&[1.0, 2.0, 3.0]);
            report.series.get_mut(name).unwrap().pop();
            assert!(page(&report).is_err(), "{name}");
        }
    }

    #[test]
    fn a_sample_of_zero_has_no_ratio() {
        for name in ["kernel bulkhead ms", "kernel ordinary ms"] {
            let mut report = report(&[1.0, 2.0, 3.0]);
            report.series.insert(name.into(), vec![1.0, 0.0, 1.0]);
            assert!(page(&report).unwrap_err().to_string().contains("is zero"), "{name}");
        }
    }
}
