//! `cargo xtask bench counts`: counts what units of work cost, and writes docs/counts.md.

#[path = "../../../e2e/src/counts/cost.rs"]
mod cost;

use cost::{Cost, Costs};

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::cache::Cache;
use crate::dist::{self, Profile, source_dir};
use crate::e2e::E2E;
use crate::progress::step;
use crate::rig::{Accelerator, Io, Limit, Payload, Rig};
use crate::tools::Tools;

/// The numbers of the last run, with which the end-to-end tests compare.
const COMMITTED: &str = "tests/e2e/src/counts/committed.json";
/// The numbers with which the page compares them.
const BEFORE: &str = "tests/e2e/src/counts/before.json";
const PAGE: &str = "docs/counts.md";

/// Where the numbers are in the inner host.
const NUMBERS: &str = "/run/counts.json";
/// How often each row is counted. Each column shows its smallest number. There are not more files to be read for the
/// first time.
const ROUNDS: &str = "7";
const LIMIT: Duration = Duration::from_secs(30 * 60);

const INTRODUCTION: &str = "\
# What a unit of work costs

Written by `cargo xtask bench counts`, not by hand. These are counts, not times. A number belongs to one unit of work
in a container that runs already. Each row does its work several times, in several rounds. Each column shows the
smallest number of all rounds, so the columns of a row may come from different rounds. The cost of doing nothing, which
is measured in the same way, is subtracted.

The container's root is a snapshot of an image, as containerd and Kubernetes give it. One row is about a bind mount. Two
are about a root that is a directory of the host, as docker gives it, with and without `exclusive_roots`
([operations](operations.md#roots-that-are-directories)). Without it, the guest looks names up again after 10 or 60
seconds, which adds requests where Python starts slowly. The numbers *before* are of 2026-11-22. The root was a
directory of the host then, and IOCTL was counted as OTHER.

- *Requests* are FUSE requests of the guest to the file server.
- *Exits* are all exits of the vCPU; *MMIO* are those of them in which the VMM emulates an access to memory.
  *Interrupts* are those that KVM has injected.
- *Copied* are the KiB that the VMM has read and written by system calls.
- *Packets* left the container, or reached it.

Exits (those by MMIO too), interrupts and packets depend on the time that the work takes: timers expire meanwhile, and
TCP makes packets of the size that is due. So they are larger on a host that is slow.

The case `counts/no_row_costs_a_fifth_more_than_before` compares a new count with the second number of each pair
(`tests/e2e/src/counts/committed.json`). It compares requests and copied bytes only, and leaves out the two rows about
directories.
";

/// Counts, and writes the page and the numbers. With `as_before` the page compares later runs with these numbers.
pub(super) fn run(cache: &Cache, tools: &Tools, as_before: bool) -> Result<()> {
    let dist = dist::build(cache, tools, Profile::Quick)?;
    let payload = Payload::new(cache, &[dist.put()])?;
    let rig = Rig::ensure(cache, tools)?;
    let mut session = step("starting the host", || rig.start(&payload))?;
    let count = [E2E, "counts", "--rounds", ROUNDS, "--output", NUMBERS].map(str::to_owned);
    let status = session.run(&count, Io::Shown(&mut Vec::new()), Limit::Whole(LIMIT))?;
    ensure!(status == 0, "bulkhead-e2e counts exits with status {status}");
    let mut numbers = Vec::new();
    session.run(&["cat", NUMBERS].map(str::to_owned), Io::Captured(&mut numbers), Limit::Whole(LIMIT))?;
    session.finish();
    let now: Costs = serde_json::from_slice(&numbers).context("the numbers of bulkhead-e2e counts")?;
    write_numbers(&at(COMMITTED), &now)?;
    if as_before {
        write_numbers(&at(BEFORE), &now)?;
    }
    let text = fs::read(at(BEFORE)).with_context(|| format!("cannot read {BEFORE}"))?;
    let before: Costs =
        serde_json::from_slice(&text).with_context(|| format!("cannot understand {BEFORE}"))?;
    let page = page(&before, &now)?;
    println!("{page}");
    fs::write(at(PAGE), &page).with_context(|| format!("cannot write {PAGE}"))
}

fn at(path: &str) -> PathBuf {
    source_dir().join(path)
}

fn write_numbers(path: &Path, costs: &Costs) -> Result<()> {
    let text = serde_json::to_string_pretty(costs)? + "\n";
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// The whole page.
fn page(before: &Costs, now: &Costs) -> Result<String> {
    let mut page = String::from(INTRODUCTION);
    writeln!(page, "\nThe host was {}.\n", Accelerator::describe())?;
    page.push_str(
        "Each pair is the number before (`tests/e2e/src/counts/before.json`) and now. A dash: the row was not counted \
         before.\n\n",
    );
    page.push_str("| one of | requests | exits | MMIO | interrupts | copied | packets out | packets in |\n");
    page.push_str("|---|---|---|---|---|---|---|---|\n");
    for (name, cost) in now {
        let old = before.get(name);
        let pair = |of: fn(&Cost) -> f64| pair(old.map(of), of(cost));
        let columns = [
            pair(Cost::all_requests),
            pair(|cost| cost.exits),
            pair(|cost| cost.mmio_exits),
            pair(|cost| cost.interrupts),
            pair(|cost| cost.copied_bytes / 1024.0),
            pair(|cost| cost.packets_out),
            pair(|cost| cost.packets_in),
        ];
        writeln!(page, "| {name} | {} |", columns.join(" | "))?;
    }
    page.push_str("\n## Requests\n\nBy opcode, before and now.\n\n");
    page.push_str("| one of | requests |\n|---|---|\n");
    for (name, cost) in now {
        let old = before.get(name);
        let opcodes: BTreeSet<_> =
            old.into_iter().chain([cost]).flat_map(|cost| cost.requests.keys()).collect();
        let pair = |opcode: &String| {
            let count = |cost: &Cost| cost.requests.get(opcode).copied().unwrap_or_default();
            pair(old.map(count), count(cost))
        };
        let counts: Vec<_> = opcodes.into_iter().map(|opcode| format!("{opcode} {}", pair(opcode))).collect();
        writeln!(page, "| {name} | {} |", counts.join(", "))?;
    }
    Ok(page)
}

/// A number of a row before and now. A dash: the row was not counted before.
fn pair(before: Option<f64>, now: f64) -> String {
    format!("{} → {}", before.map_or("-".into(), shown), shown(now))
}

/// A number with as many places as mean something.
fn shown(number: f64) -> String {
    let places = usize::from(number < 100.0 && number.fract() >= 0.05);
    format!("{number:.places$}")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn costs(opens: f64) -> Costs {
        let requests = BTreeMap::from([("OPEN".to_owned(), opens)]);
        BTreeMap::from([("a row".to_owned(), Cost { requests, exits: 470.2, ..Cost::default() })])
    }

    #[test]
    fn the_page_has_both_numbers_of_each_row() {
        let page = page(&costs(4.5), &costs(2.0)).unwrap();
        assert!(page.contains("| a row | 4.5 → 2 | 470 → 470 | 0 → 0 |"), "{page}");
        assert!(page.contains("| a row | OPEN 4.5 → 2 |"), "{page}");
        let new = super::page(&Costs::new(), &costs(2.0)).unwrap();
        assert!(new.contains("| a row | - → 2 |"), "{new}");
        assert!(new.contains("| a row | OPEN - → 2 |"), "{new}");
    }
}
