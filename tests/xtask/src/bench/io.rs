//! `cargo xtask bench io`: compares files and network of a container with runc's and with those of a guest of QEMU.
//! Writes docs/io.md and its picture.

mod picture;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;

use crate::cache::Cache;
use crate::debian;
use crate::dist::{self, Profile, source_dir};
use crate::e2e::E2E;
use crate::progress::step;
use crate::rig::{Accelerator, Io, Limit, Payload, Put, Rig};
use crate::tools::Tools;

use super::interval::{ENOUGH, Interval, median};
use super::run_rounds;
use picture::Bars;

const PAGE: &str = "docs/io.md";
const PICTURE: &str = "docs/pictures/io.svg";
/// The picture of a run that is too short to be written to [`PICTURE`], below the directory for what is built.
const TRIAL_PICTURE: &str = "target/io.svg";
/// Where the numbers are in the inner host.
const NUMBERS: &str = "/run/io.json";
/// How long a round may take. On a quiet machine an emulated host takes a bit more than a minute.
const ROUND_LIMIT: Duration = Duration::from_secs(6 * 60);
/// How long the start may take.
const START_LIMIT: Duration = Duration::from_secs(8 * 60);

// What follows is not in the inner host: no test needs it, and another package there would make each machine build all
// of it again.

/// The package with the server of virtio-fs, its program, and where tests/e2e/src/io/guest.rs looks for it.
const VIRTIOFSD: (&str, &str, &str) =
    ("virtiofsd", "usr/libexec/virtiofsd", "/usr/lib/bulkhead/tests/virtiofsd");
/// The package with Java, and what `java -version` reads of it. Its path is known to tests/e2e/src/io/worker.py.
const JAVA: (&str, [&str; 2]) =
    ("openjdk-21-jre-headless", ["usr/lib/jvm/java-21-openjdk-amd64", "etc/java-21-openjdk"]);

const INTRODUCTION: &str = "\
# Files and network, compared with runc and QEMU

Written by `cargo xtask bench io`, not by hand. One run on one host.

Three run all the time: a container of runc, a container of Bulkhead, and a guest of Debian's QEMU without containerd.
QEMU's guest has the kernel of Bulkhead's guests, as many vCPUs as the host has processors, and the memory of Bulkhead's
pod. Its machine is microvm, whose devices are on virtio-mmio, and not on a PCI bus as Bulkhead's. Debian's virtiofsd
serves its root and its volume, in its default cache mode, *auto*. Its network card is virtio-net without vhost, and its
block volume is virtio-blk, both with QEMU's defaults. All three have the network of a pod, as a CNI plugin makes it: a
network namespace with an interface (veth) on a bridge. QEMU's tap is connected with this interface as Bulkhead's is,
and as Kata Containers does it: by redirects of tc(8).

The root of each is a snapshot of an image, whose written files are in memory. The volume is a directory of the host's
disk. The block volume is a loop device of the host, whose file is in memory; O_DIRECT keeps the cache of the container
or guest out, and not the host's. *In* and *out* are seen from the container or guest.

In each round, all three do each piece of work, one after the other. Their order rotates from round to round. The side
that does the work measures the time. The time of a server (connections, HTTP, Redis) is measured by its client, on the
host. Rows about attributes have 5,000 files, because 20,000 would make a round of an emulated host a minute longer.

The *speed* of QEMU or Bulkhead is the time of runc divided by its time: 1 is as fast as runc, and 0.5 takes twice as
long. It is the median of the speeds of all rounds. The interval is a 95 % confidence interval of that median. In at
least 95 % of runs it contains the true median, if the rounds are independent of one another. It does not depend on how
the speeds are distributed. There is no interval of fewer than 6 rounds.
";

const AGAINST_QEMU: &str = "
## Bulkhead and QEMU

The speed here is the time of QEMU divided by the time of Bulkhead: more than 1 is faster than QEMU. Bulkhead is *ahead*
if the whole interval is above 1, and **behind** if the whole interval is below 1. Otherwise the run does not decide it.
No row is judged on fewer than 15 rounds.

Exits are those of the vCPUs while the work was done: medians of KVM's counters. Where the host is emulated, most of the
time goes there. [Counts](counts.md) has the exits and the requests of Bulkhead for one unit of several kinds of work,
and the requests by their opcodes. virtiofsd and QEMU's devices are other threads than the vCPU, and their system calls
are not counted here.
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
    runc: Samples,
    qemu: Samples,
    bulkhead: Samples,
}

#[derive(Debug, Deserialize)]
struct Samples {
    ms: Vec<f64>,
    /// Exits of the vCPUs. Empty if there is no VM.
    exits: Vec<f64>,
}

/// How often one side could do the work while another one does it once.
#[derive(Debug, Clone, Copy)]
struct Speed {
    median: f64,
    interval: Option<Interval>,
    pairs: usize,
}

/// Measures, and prints the page. Writes it if there are enough rounds.
pub(super) fn run(cache: &Cache, tools: &Tools, rounds: u32) -> Result<()> {
    let is_enough = rounds as usize >= ENOUGH;
    let report = measure(cache, tools, rounds, is_enough)?;
    let host = Accelerator::describe();
    let (page, svg) = (page(&report, &host)?, picture(&report, &host)?);
    println!("{page}");
    let path = if is_enough { PICTURE } else { TRIAL_PICTURE };
    write(path, &svg)?;
    if !is_enough {
        println!("{PAGE} was not written: it needs {ENOUGH} rounds. The picture is {path}.");
        return Ok(());
    }
    write(PAGE, &page)
}

fn write(path: &str, text: &str) -> Result<()> {
    fs::write(source_dir().join(path), text).with_context(|| format!("cannot write {path}"))
}

fn measure(cache: &Cache, tools: &Tools, rounds: u32, is_enough: bool) -> Result<Report> {
    // A trial needs no programs that ship.
    let profile = if is_enough { Profile::Shipped } else { Profile::Quick };
    let dist = dist::build(cache, tools, profile)?;
    let (package, program, remote) = VIRTIOFSD;
    let virtiofsd = debian::files(cache, package, &[program])?.join(program);
    let (package, paths) = JAVA;
    let java = debian::files(cache, package, &paths)?;
    let mut puts = vec![dist.put(), Put { local: virtiofsd, remote: remote.into() }];
    puts.extend(paths.map(|path| Put { local: java.join(path), remote: Path::new("/").join(path) }));
    let payload = Payload::new(cache, &puts)?;
    drop(dist);
    let rig = Rig::ensure(cache, tools)?;
    let mut session = step("starting the host", || rig.start(&payload))?;
    let argv = [E2E, "io", "--rounds", &rounds.to_string(), "--output", NUMBERS].map(str::to_owned);
    let limit = START_LIMIT + ROUND_LIMIT * rounds.saturating_add(1);
    let status = run_rounds(&mut session, &argv, Limit::Whole(limit))?;
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
    serde_json::from_slice(&numbers).context("the numbers of bulkhead-e2e io")
}

/// The whole page.
fn page(report: &Report, host: &str) -> Result<String> {
    let mut page = String::from(INTRODUCTION);
    writeln!(page, "\nThe host was {host}.\nThere, a VM exit costs many times what it costs on hardware.\n")?;
    page.push_str("| fact | value |\n|---|---|\n");
    for (fact, value) in &report.facts {
        writeln!(page, "| {fact} | {value} |")?;
    }
    page.push_str("\n## Speeds\n\n![speeds of QEMU and Bulkhead, where runc is 1](pictures/io.svg)\n\n");
    page.push_str(
        "| work | runc | QEMU | Bulkhead | speed of QEMU | interval | speed of Bulkhead | interval |\n",
    );
    page.push_str("|---|---|---|---|---|---|---|---|\n");
    for row in &report.rows {
        let [runc, theirs, ours] = [&row.runc, &row.qemu, &row.bulkhead].map(|side| middle(&side.ms));
        let [qemu, bulkhead] = row.speeds()?;
        writeln!(
            page,
            "| {} | {} ms | {} ms | {} ms | {} | {} |",
            row.what,
            runc?,
            theirs?,
            ours?,
            qemu.cells(),
            bulkhead.cells()
        )?;
    }
    page.push_str(AGAINST_QEMU);
    page.push_str("\n| work | speed | interval | Bulkhead is | exits, QEMU | exits, Bulkhead |\n");
    page.push_str("|---|---|---|---|---|---|\n");
    for row in &report.rows {
        let speed = row.speed(&row.qemu, &row.bulkhead)?;
        let [theirs, ours] = [&row.qemu, &row.bulkhead].map(|side| {
            ensure!(side.exits.len() == side.ms.len(), "not each sample of `{}` has its exits", row.what);
            median(&side.exits).with_context(|| format!("no exits of `{}`", row.what))
        });
        let (cells, verdict) = (speed.cells(), speed.verdict());
        writeln!(page, "| {} | {cells} | {verdict} | {:.0} | {:.0} |", row.what, theirs?, ours?)?;
    }
    page.push_str("\n## All samples\n\nIn the order of the rounds, in ms.\n\n");
    page.push_str("| work | runc | QEMU | Bulkhead |\n|---|---|---|---|\n");
    for row in &report.rows {
        let samples = [&row.runc, &row.qemu, &row.bulkhead]
            .map(|side| side.ms.iter().map(|sample| format!("{sample:.1}")).collect::<Vec<_>>().join(" "));
        writeln!(page, "| {} | {} |", row.what, samples.join(" | "))?;
    }
    Ok(page)
}

fn picture(report: &Report, host: &str) -> Result<String> {
    let bars = |row| -> Result<Bars<'_>> {
        let row: &Row = row;
        Ok(Bars { what: &row.what, speeds: row.speeds()? })
    };
    let rows: Vec<_> = report.rows.iter().map(bars).collect::<Result<_>>()?;
    let rounds = report.rows.first().map_or(0, |row| row.runc.ms.len());
    let caption =
        format!("Medians of {rounds} rounds, and their 95 % confidence intervals.\nThe host was {host}.");
    picture::draw(&rows, &caption)
}

/// The median, for a table.
fn middle(samples: &[f64]) -> Result<String> {
    Ok(format!("{:.1}", median(samples).context("no samples")?))
}

impl Row {
    /// Of QEMU and of Bulkhead, where runc is 1.
    fn speeds(&self) -> Result<[Speed; 2]> {
        Ok([self.speed(&self.runc, &self.qemu)?, self.speed(&self.runc, &self.bulkhead)?])
    }

    /// Of `side`, where that of `reference` is 1.
    fn speed(&self, reference: &Samples, side: &Samples) -> Result<Speed> {
        let what = &self.what;
        ensure!(reference.ms.len() == side.ms.len(), "the samples of `{what}` are no pairs");
        let speeds: Vec<f64> =
            reference.ms.iter().zip(&side.ms).map(|(theirs, ours)| theirs / ours).collect();
        ensure!(speeds.iter().all(|speed| speed.is_normal()), "a sample of `{what}` is zero");
        let median = median(&speeds).with_context(|| format!("no samples of `{what}`"))?;
        Ok(Speed { median, interval: Interval::of_median(&speeds), pairs: speeds.len() })
    }
}

impl Speed {
    /// The median and the interval, as cells of a table.
    fn cells(&self) -> String {
        let interval = self
            .interval
            .map_or("-".to_owned(), |interval| format!("{:.3} to {:.3}", interval.low, interval.high));
        format!("{:.3} | {interval}", self.median)
    }

    /// Whether the one is faster than the other.
    fn verdict(&self) -> String {
        match self.interval {
            Some(interval) if self.pairs >= ENOUGH => {
                let verdict = match interval {
                    Interval { low, .. } if low > 1.0 => "ahead",
                    Interval { high, .. } if high < 1.0 => "**behind**",
                    _ => "undecided",
                };
                verdict.to_owned()
            }
            _ => format!("not judged: {} of {ENOUGH} rounds", self.pairs),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn report(qemu_ms: Vec<f64>, bulkhead_ms: Vec<f64>) -> Report {
        let rounds = bulkhead_ms.len();
        let side = |ms: Vec<f64>, exits| Samples { ms, exits: vec![exits; rounds] };
        let row = Row {
            what: "work".into(),
            runc: Samples { ms: vec![10.0; rounds], exits: Vec::new() },
            qemu: side(qemu_ms, 500.0),
            bulkhead: side(bulkhead_ms, 300.0),
        };
        Report { facts: BTreeMap::from([("containerd".into(), "1.7".into())]), rows: vec![row] }
    }

    /// Five rounds of each: the 4th, the 8th and the 12th in order are these three.
    fn fifteen(ms: [f64; 3]) -> Vec<f64> {
        ms.iter().flat_map(|ms| [*ms; 5]).collect()
    }

    #[test]
    fn the_page_has_speeds_intervals_verdicts_and_exits() {
        let slower = report(fifteen([50.0; 3]), fifteen([20.0, 40.0, 5.0]));
        let page = page(&slower, "a machine").unwrap();
        for row in [
            "| work | 10.0 ms | 50.0 ms | 20.0 ms | 0.200 | 0.200 to 0.200 | 0.500 | 0.250 to 2.000 |",
            "| work | 2.500 | 1.250 to 10.000 | ahead | 500 | 300 |",
            "| containerd | 1.7 |",
            "The host was a machine.",
        ] {
            assert!(page.contains(row), "{row}\n{page}");
        }
    }

    #[test]
    fn a_row_is_behind_only_if_its_whole_interval_is() {
        for (bulkhead, verdict) in [
            ([60.0, 70.0, 80.0], "| **behind** |"),
            ([40.0, 50.0, 60.0], "| undecided |"),
            ([30.0, 40.0, 45.0], "| ahead |"),
        ] {
            let page = page(&report(fifteen([50.0; 3]), fifteen(bulkhead)), "").unwrap();
            assert!(page.contains(verdict), "{verdict}\n{page}");
        }
        let few = page(&report(vec![1.0; 2], vec![2.0; 2]), "").unwrap();
        assert!(few.contains("| 0.500 | - | not judged: 2 of 15 rounds |"), "{few}");
    }

    #[test]
    fn samples_that_are_no_pairs_are_an_error() {
        let usual = || report(vec![1.0, 2.0], vec![1.0, 2.0]);
        let mut unpaired = usual();
        unpaired.rows[0].runc.ms.pop();
        assert!(page(&unpaired, "").is_err());
        let mut uncounted = usual();
        uncounted.rows[0].bulkhead.exits.pop();
        assert!(page(&uncounted, "").unwrap_err().to_string().contains("has its exits"));
        assert!(page(&report(vec![1.0], vec![0.0]), "").unwrap_err().to_string().contains("is zero"));
    }

    #[test]
    fn the_picture_has_a_row_for_each_kind_of_work() {
        let svg = picture(&report(fifteen([50.0; 3]), fifteen([20.0; 3])), "a machine").unwrap();
        assert!(svg.contains(">work</text>") && svg.contains("Medians of 15 rounds"), "{svg}");
        assert!(svg.contains(">0.200</text>") && svg.contains(">0.500</text>"), "{svg}");
    }
}
