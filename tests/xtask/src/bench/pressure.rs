//! `cargo xtask bench pressure`: what becomes of a pod when memory is short, on runc and on Bulkhead, and writes
//! docs/memory-pressure.md.

#[path = "../../../e2e/src/cases/pod/memory/numbers.rs"]
mod numbers;

use std::collections::BTreeMap;
use std::fmt::{Display, Write as _};

use anyhow::{Context, Result, ensure};

use super::interval::spread;
use super::turns::{self, RUNTIMES};
use crate::cache::Cache;
use crate::page::filled;
use crate::rig::Accelerator;
use crate::tools::Tools;
use numbers::{LINE, Leak, Numbers, PageCache, Resized};

const PAGE: &str = "docs/memory-pressure.md";
/// The case that makes the pods and prints what became of them.
const CASE: &str = "pod_memory/a_pod_under_pressure_in_numbers";
/// How often it runs on each runtime.
const ROUNDS: usize = 5;

const INTRODUCTION: &str = "\
# A pod whose memory is short

Written by `cargo xtask bench pressure`, not by hand. The pods are made as kubelet makes them: `memory.max` of a pod's
cgroup on the host is the sum of the limits of its containers, and on Bulkhead also the overhead of the RuntimeClass
([resources](resources.md#the-overhead-of-a-pod)). So a pod of Bulkhead has more in its cgroup than one of runc: the
guest's kernel, the agent and the VMM are in it too. The runtimes take turns. Each number is a median; in parentheses
are the smallest and the largest. One number alone was the same in all rounds. Sizes are in MiB.
";

const LEAKS: &str = "
## A container that leaks memory, beside a sidecar

The sidecar has a limit of 64 MiB. One of its processes holds 32 MiB, and another serves a page. The leak is a program
of one page that takes 1 MiB after the other and writes to it, until it is killed. The *killed process* is what the log
of the kernel that the containers see names: on runc the host's, on Bulkhead the guest's. *Written* is how much the leak
had taken by then. *Sidecar* says how often it answered a request for its page by the network while the leak ran and
after its end; it was *whole* if none of its processes was missing afterwards. *Kills by the host* is `oom_kill` of the
pod's cgroup on the host. On runc it is the host that kills the leak, and Linux counts this process twice, because it
kills all processes of the container (`memory.oom.group`, as kubelet sets it).

";

const PAGE_CACHE: &str = "
## A container that fills its page cache

It writes a file that is twice as large as its limit, and reads it twice. *Time* is compared with runc's in the same
round.

";

const RESIZED: &str = "
## A limit that is lowered and raised again

One container has these limits one after the other, by UpdateContainerResources. Before the first row it has done
nothing. With each limit, a process within it and then one beyond it take their memory at once, and end. With the first
limit the container then writes and reads a file of 300 MiB, which fills its page cache. *Begins* is `memory.current` of
the pod's cgroup as soon as the limit is in force, and *ends* after all that was done with this limit.

";

/// What the runs say, by the runtime, in the order of the rounds.
type Runs = BTreeMap<&'static str, Vec<Numbers>>;

pub(super) fn run(cache: &Cache, tools: &Tools) -> Result<()> {
    let mut runs = Runs::new();
    turns::run(cache, tools, CASE, ROUNDS, |runtime, output| {
        runs.entry(runtime).or_default().push(parsed(output)?);
        Ok(())
    })?;
    turns::write(PAGE, &page(&runs, &Accelerator::describe())?)
}

/// The numbers in the output of the case.
fn parsed(output: &str) -> Result<Numbers> {
    let json = output.lines().find_map(|line| Some(line.split_once(LINE)?.1));
    serde_json::from_str(json.context("no numbers in the output")?.trim()).context("cannot read the numbers")
}

/// The whole page.
fn page(runs: &Runs, host: &str) -> Result<String> {
    let [runc, bulkhead] = RUNTIMES.map(|runtime| {
        let rounds = runs.get(runtime).filter(|rounds| rounds.len() == ROUNDS);
        rounds.with_context(|| format!("{runtime} has not {ROUNDS} rounds"))
    });
    let sides = [runc?.as_slice(), bulkhead?.as_slice()];
    let mut page = String::from(INTRODUCTION);
    let processors = same(sides.concat().iter().map(|numbers| numbers.processors))?;
    let plural = if processors == 1 { "processor" } else { "processors" };
    writeln!(page, "\nThe host had {processors} {plural}, and was {host}. There were {ROUNDS} rounds.")?;
    page.push_str(LEAKS);
    leaks(&mut page, sides)?;
    page.push_str(PAGE_CACHE);
    page_cache(&mut page, sides)?;
    page.push_str(RESIZED);
    resized(&mut page, sides)?;
    samples(&mut page, sides)?;
    Ok(filled(&page))
}

/// The rounds of runc, and those of Bulkhead.
type Sides<'a> = [&'a [Numbers]; 2];

/// Writes a row with a cell for each side, after its first cells.
fn row<'a, T: 'a>(
    page: &mut String,
    first: &str,
    sides: [&[&'a T]; 2],
    cell: impl Fn(&[&'a T]) -> Result<String>,
) -> Result<()> {
    let [runc, bulkhead] = sides.map(cell);
    writeln!(page, "| {first} | {} | {} |", runc?, bulkhead?)?;
    Ok(())
}

fn leaks(page: &mut String, sides: Sides<'_>) -> Result<()> {
    page.push_str("| limit of the leak | | runc | Bulkhead |\n|---|---|---|---|\n");
    for (at, limit) in limits(sides, |numbers| &numbers.leaks, |leak| leak.limit_mib)?.into_iter().enumerate()
    {
        let [runc, bulkhead] =
            sides.map(|rounds| rounds.iter().filter_map(|round| round.leaks.get(at)).collect::<Vec<_>>());
        let mut row = |what: &str, cell: fn(&[&Leak]) -> Result<String>| {
            row(page, &format!("{limit} | {what}"), [&runc, &bulkhead], cell)
        };
        row("killed process", |leaks| Ok(tally(leaks.iter().map(|leak| leak.killed.join(" and ")))))?;
        row("its exit status", |leaks| Ok(tally(leaks.iter().map(|leak| leak.exit_status))))?;
        row("reason in the CRI", |leaks| Ok(tally(leaks.iter().map(|leak| &leak.reason))))?;
        row("written when it was killed", |leaks| middle(leaks.iter().map(|leak| leak.written_mib)))?;
        row("sidecar", |leaks| Ok(sidecar(leaks)))?;
        row("pod", |leaks| {
            Ok(tally(leaks.iter().map(|leak| if leak.pod_ready { "ready" } else { "not ready" })))
        })?;
        row("`memory.max` of the pod's cgroup", |leaks| {
            Ok(tally(leaks.iter().map(|leak| leak.host.max_mib)))
        })?;
        row("`memory.peak`", |leaks| middle(leaks.iter().map(|leak| leak.host.peak_mib)))?;
        row("kills by the host", |leaks| Ok(tally(leaks.iter().map(|leak| leak.host.kills))))?;
    }
    Ok(())
}

fn sidecar(leaks: &[&Leak]) -> String {
    let sum = |of: fn(&Leak) -> u32| leaks.iter().map(|leak| of(leak)).sum::<u32>();
    let (answered, asked) = (sum(|leak| leak.answered), sum(|leak| leak.asked));
    let whole = leaks.iter().filter(|leak| leak.sidecar_whole).count();
    format!("answered {answered} of {asked}; whole in {whole} of {} rounds", leaks.len())
}

fn page_cache(page: &mut String, sides: Sides<'_>) -> Result<()> {
    let [runc, bulkhead] =
        sides.map(|rounds| rounds.iter().map(|round| &round.cache).collect::<Vec<&PageCache>>());
    let both = || runc.iter().chain(&bulkhead);
    let (limit, file) =
        (same(both().map(|cache| cache.limit_mib))?, same(both().map(|cache| cache.file_mib))?);
    writeln!(page, "| limit {limit}, file {file} | runc | Bulkhead |\n|---|---|---|")?;
    let mut row =
        |what: &str, cell: fn(&[&PageCache]) -> Result<String>| row(page, what, [&runc, &bulkhead], cell);
    row("exit status", |caches| Ok(tally(caches.iter().map(|cache| cache.exit_status))))?;
    row("`memory.max` of the pod's cgroup", |caches| {
        Ok(tally(caches.iter().map(|cache| cache.host.max_mib)))
    })?;
    row("`memory.peak`", |caches| middle(caches.iter().map(|cache| cache.host.peak_mib)))?;
    row("kills by the host", |caches| Ok(tally(caches.iter().map(|cache| cache.host.kills))))?;
    let ratios = bulkhead.iter().zip(&runc).map(|(ours, theirs)| ours.seconds / theirs.seconds);
    writeln!(page, "| time, where runc is 1 | 1 | {} |", spread(ratios, 2)?)?;
    Ok(())
}

fn resized(page: &mut String, sides: Sides<'_>) -> Result<()> {
    page.push_str("| limit | | runc | Bulkhead |\n|---|---|---|---|\n");
    let limits = limits(sides, |numbers| &numbers.resized, |resized| resized.limit_mib)?;
    for (at, limit) in limits.into_iter().enumerate() {
        let [runc, bulkhead] =
            sides.map(|rounds| rounds.iter().filter_map(|round| round.resized.get(at)).collect::<Vec<_>>());
        let mut row = |what: &str, cell: fn(&[&Resized]) -> Result<String>| {
            row(page, &format!("{limit} | {what}"), [&runc, &bulkhead], cell)
        };
        row("`memory.max` of the pod's cgroup", |all| Ok(tally(all.iter().map(|it| it.max_mib))))?;
        row("begins", |all| middle(all.iter().map(|it| it.begins_with_mib)))?;
        row("a process within the limit", |all| {
            Ok(tally(all.iter().map(|it| ended(it.within_mib, it.within_status))))
        })?;
        row("a process beyond the limit", |all| {
            Ok(tally(all.iter().map(|it| ended(it.beyond_mib, it.beyond_status))))
        })?;
        row("ends", |all| middle(all.iter().map(|it| it.ends_with_mib)))?;
        row("kills by the host until then", |all| Ok(tally(all.iter().map(|it| it.kills))))?;
    }
    Ok(())
}

fn ended(mib: u64, status: i32) -> String {
    format!("{mib} MiB: exit status {status}")
}

/// Writes the numbers of all rounds.
fn samples(page: &mut String, sides: Sides<'_>) -> Result<()> {
    page.push_str("\n## All samples\n\nIn the order of the rounds. Sizes in MiB, times in seconds.\n\n");
    page.push_str("| | runc | Bulkhead |\n|---|---|---|\n");
    let mut line = |what: &str, of: &dyn Fn(&Numbers) -> Option<String>| {
        let [runc, bulkhead] = sides.map(|rounds| rounds.iter().filter_map(of).collect::<Vec<_>>().join(" "));
        writeln!(page, "| {what} | {runc} | {bulkhead} |")
    };
    for (at, limit) in limits(sides, |numbers| &numbers.leaks, |leak| leak.limit_mib)?.into_iter().enumerate()
    {
        let mut of = |what: &str, of: fn(&Leak) -> String| {
            line(&format!("leak, limit {limit}: {what}"), &|numbers| numbers.leaks.get(at).map(of))
        };
        of("reason", |leak| leak.reason.clone())?;
        of("written", |leak| leak.written_mib.to_string())?;
        of("answers of the sidecar", |leak| format!("{}/{}", leak.answered, leak.asked))?;
        of("`memory.peak`", |leak| leak.host.peak_mib.to_string())?;
    }
    line("page cache: time", &|numbers| Some(format!("{:.1}", numbers.cache.seconds)))?;
    line("page cache: `memory.peak`", &|numbers| Some(numbers.cache.host.peak_mib.to_string()))?;
    let limits = limits(sides, |numbers| &numbers.resized, |resized| resized.limit_mib)?;
    for (at, limit) in limits.into_iter().enumerate() {
        let nth = at + 1;
        let mut of = |what: &str, of: fn(&Resized) -> u64| {
            line(&format!("limit {nth}, {limit}: {what}"), &|numbers| {
                numbers.resized.get(at).map(|resized| of(resized).to_string())
            })
        };
        of("begins", |resized| resized.begins_with_mib)?;
        of("ends", |resized| resized.ends_with_mib)?;
    }
    Ok(())
}

/// The limits of one part of the case, which are the same in all rounds of both runtimes.
fn limits<T>(sides: Sides<'_>, part: fn(&Numbers) -> &Vec<T>, limit: fn(&T) -> u64) -> Result<Vec<u64>> {
    let rounds = sides.iter().flat_map(|rounds| rounds.iter());
    same(rounds.map(|round| part(round).iter().map(limit).collect::<Vec<_>>()))
}

/// The value that all have.
fn same<T: PartialEq>(mut values: impl Iterator<Item = T>) -> Result<T> {
    let first = values.next().context("no samples")?;
    ensure!(values.all(|value| value == first), "the runs are not of the same kind");
    Ok(first)
}

/// The value that all have, or each value and in how many rounds it came.
fn tally(values: impl Iterator<Item = impl Display>) -> String {
    let mut counts = BTreeMap::<String, usize>::new();
    values.for_each(|value| *counts.entry(value.to_string()).or_default() += 1);
    let all: usize = counts.values().sum();
    let shown = counts.into_iter().map(|(value, count)| {
        let value = if value.is_empty() { "none" } else { &value };
        if count == all { value.to_owned() } else { format!("{value} in {count} of {all}") }
    });
    shown.collect::<Vec<_>>().join(", ")
}

/// The median and the range of sizes, or the one that all have.
fn middle(values: impl Iterator<Item = u64>) -> Result<String> {
    let values: Vec<_> = values.collect();
    match same(values.iter()) {
        Ok(value) => Ok(value.to_string()),
        Err(_) => spread(values.iter().map(|value| *value as f64), 0),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::numbers::HostCgroup;
    use super::*;

    fn numbers(overhead: u64, kills: u64, seconds: f64) -> Numbers {
        let host = |limits: u64| HostCgroup { max_mib: limits + overhead, peak_mib: limits, kills };
        let leak = |limit_mib| Leak {
            limit_mib,
            killed: vec!["leak".into()],
            exit_status: 137,
            reason: "OOMKilled".into(),
            written_mib: limit_mib - 2,
            asked: 5,
            answered: 5,
            sidecar_whole: true,
            pod_ready: true,
            host: host(limit_mib + 64),
        };
        let resized = |limit_mib| Resized {
            limit_mib,
            max_mib: limit_mib + overhead,
            begins_with_mib: 10,
            ends_with_mib: 20,
            within_mib: limit_mib - 28,
            within_status: 0,
            beyond_mib: limit_mib + 72,
            beyond_status: 137,
            kills,
        };
        Numbers {
            processors: 2,
            leaks: vec![leak(64), leak(128)],
            cache: PageCache { limit_mib: 128, file_mib: 256, exit_status: 0, seconds, host: host(128) },
            resized: vec![resized(512), resized(128)],
        }
    }

    fn runs() -> Runs {
        Runs::from([
            ("runc", vec![numbers(0, 1, 2.0); ROUNDS]),
            ("bulkhead", vec![numbers(128, 0, 3.0); ROUNDS]),
        ])
    }

    #[test]
    fn the_page_sets_the_runtimes_side_by_side() {
        let page = page(&runs(), "a machine").unwrap();
        for part in [
            "\nThe host had 2 processors, and was a machine. There were 5 rounds.\n",
            "| 128 | killed process | leak | leak |\n| 128 | its exit status | 137 | 137 |\n",
            "| 64 | written when it was killed | 62 | 62 |\n",
            "| 64 | sidecar | answered 25 of 25; whole in 5 of 5 rounds | answered 25 of 25; whole in 5 of 5 rounds |\n",
            "| 64 | `memory.max` of the pod's cgroup | 128 | 256 |\n",
            "| 64 | kills by the host | 1 | 0 |\n",
            "| limit 128, file 256 | runc | Bulkhead |\n",
            "| time, where runc is 1 | 1 | 1.50 (1.50 to 1.50) |\n",
            "| 128 | a process beyond the limit | 200 MiB: exit status 137 | 200 MiB: exit status 137 |\n",
            "| page cache: time | 2.0 2.0 2.0 2.0 2.0 | 3.0 3.0 3.0 3.0 3.0 |\n",
            "| limit 2, 128: ends | 20 20 20 20 20 | 20 20 20 20 20 |\n",
        ] {
            assert!(page.contains(part), "no {part:?} in {page}");
        }
    }

    #[test]
    fn what_differs_from_round_to_round_is_shown() {
        let mut runs = runs();
        let rounds = runs.get_mut("runc").unwrap();
        rounds[1].leaks[0].reason = "Error".into();
        rounds[1].leaks[0].written_mib = 50;
        rounds[2].leaks[0].killed.clear();
        rounds[3].leaks[0].answered = 4;
        rounds[3].leaks[0].sidecar_whole = false;
        let page = page(&runs, "a machine").unwrap();
        for part in [
            "| 64 | killed process | none in 1 of 5, leak in 4 of 5 | leak |\n",
            "| 64 | reason in the CRI | Error in 1 of 5, OOMKilled in 4 of 5 | OOMKilled |\n",
            "| 64 | written when it was killed | 62 (50 to 62) | 62 |\n",
            "| 64 | sidecar | answered 24 of 25; whole in 4 of 5 rounds |",
            "| leak, limit 64: reason | OOMKilled Error OOMKilled OOMKilled OOMKilled |",
            "| leak, limit 64: answers of the sidecar | 5/5 5/5 5/5 4/5 5/5 |",
        ] {
            assert!(page.contains(part), "no {part:?} in {page}");
        }
    }

    #[test]
    fn rounds_that_are_missing_or_of_another_kind_are_an_error() {
        let mut few = runs();
        few.get_mut("bulkhead").unwrap().pop();
        let error = page(&few, "").unwrap_err().to_string();
        assert!(error.contains("bulkhead has not 5 rounds"), "{error}");
        let mut other = runs();
        other.get_mut("runc").unwrap()[0].leaks.pop();
        assert!(page(&other, "").is_err());
    }

    #[test]
    fn the_numbers_are_found_in_the_output_of_the_case() {
        let printed = numbers(128, 0, 1.5);
        let json = serde_json::to_string(&printed).unwrap();
        let output = format!("a line\n    {LINE}{json}\r\npod_memory/a ... ok (40.0 s)\n");
        assert_eq!(parsed(&output).unwrap(), printed);
        assert!(parsed("pod_memory/a ... ok (40.0 s)\n").is_err());
        assert!(parsed(&format!("{LINE}{{\n")).is_err());
    }
}
