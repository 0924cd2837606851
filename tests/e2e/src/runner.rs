//! Selects the cases, runs them one after the other and reports.

use std::io::{self, Write};
use std::process;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};

use crate::cases::{self, Case, Group};
use crate::command::Cmd;
use crate::containerd::{self, Version};
use crate::ctr::{Host, Runtime};
use crate::docker;

/// How much of containerd's journal a failure shows.
const JOURNAL_LINES: &str = "30";

/// A case that takes longer has stalled: each command in it has a deadline of its own, which is far shorter.
const STALLED: Duration = Duration::from_secs(15 * 60);
/// A case that runs by its whole name only, since it is long, has stalled if it takes longer.
const LONG_STALLED: Duration = Duration::from_secs(2 * 3600);
/// How often a long case prints that it still runs.
const STILL_RUNS: Duration = Duration::from_secs(5 * 60);

/// A case and the group it belongs to.
pub(crate) struct Selected {
    name: String,
    case: &'static Case,
    /// Runs under every version of containerd.
    brief: bool,
}

/// Which cases are wanted.
pub(crate) enum Wanted {
    /// Those whose name contains the text. All, if there is none.
    Containing(Option<String>),
    /// Those with these names, in this order. One that is named twice runs twice.
    Named(Vec<String>),
}

/// Writes every case, whom it is for and since when.
pub(crate) fn list(out: &mut impl Write) -> io::Result<()> {
    for Selected { name, case, .. } in every_case() {
        let alone = if case.by_whole_name_only { ", only by its whole name" } else { "" };
        let runtimes = case.runtimes.shown();
        writeln!(out, "{name:<60} {runtimes:<14} since containerd {}{alone}", case.since)?;
    }
    Ok(())
}

/// Writes the names of the cases that a run would run, a line each.
pub(crate) fn list_selected(out: &mut impl Write, selected: &[Selected]) -> io::Result<()> {
    selected.iter().try_for_each(|selected| writeln!(out, "{}", selected.name))
}

/// The wanted cases of this runtime and this containerd: perhaps none, if the text is only in the names of other
/// cases. With `brief`, only those that tell versions of containerd apart. A case that runs by its whole name only
/// is wanted if the text is its whole name. An error if no case at all has such a name.
pub(crate) fn select(
    runtime: Runtime,
    version: Version,
    brief: bool,
    wanted: &Wanted,
) -> Result<Vec<Selected>> {
    let suits = |Selected { case, brief: in_brief, .. }: &Selected| {
        case.runtimes.include(runtime) && version >= case.since && (*in_brief || !brief)
    };
    match wanted {
        Wanted::Named(names) => names.iter().map(|name| named(name)).collect(),
        Wanted::Containing(part) => {
            let part = part.as_deref();
            let is_wanted = |selected: &Selected| match part {
                _ if selected.case.by_whole_name_only => part == Some(selected.name.as_str()),
                Some(part) => selected.name.contains(part),
                None => true,
            };
            let wanted: Vec<_> = every_case().filter(is_wanted).collect();
            ensure!(!wanted.is_empty(), "{}", unknown(part.unwrap_or_default()));
            Ok(wanted.into_iter().filter(suits).collect())
        }
    }
}

fn named(name: &str) -> Result<Selected> {
    every_case().find(|selected| selected.name == name).with_context(|| unknown(name))
}

fn unknown(name: &str) -> String {
    format!("no case is called {name:?}; `bulkhead-e2e list` shows them all")
}

fn every_case() -> impl Iterator<Item = Selected> {
    let of_group = |group: &'static Group| {
        let name = |case: &Case| format!("{}/{}", group.name, case.name);
        group.cases.iter().map(move |case| Selected { name: name(case), case, brief: group.brief })
    };
    cases::GROUPS.iter().flat_map(of_group)
}

/// Runs the cases in order. True if all passed.
///
/// A case that panics or stalls ends this process: what it has left behind would disturb the cases after it. Whoever
/// runs this program runs those on a fresh host (`tests/xtask/src/e2e.rs`).
pub(crate) fn run(host: &Host, selected: &[Selected]) -> bool {
    let mut failed = 0;
    let runtime = format!("{} on containerd {}", host.runtime().name(), host.version());
    for Selected { name, case, .. } in selected {
        let case_name = format!("{name} [{runtime}]");
        let since = SystemTime::now();
        let started = Instant::now();
        let limit = if case.by_whole_name_only { LONG_STALLED } else { STALLED };
        let outcome = guarded(&case_name, limit, since, || (case.story)(host));
        let took = started.elapsed().as_secs_f64();
        match outcome {
            Ok(()) => println!("{case_name} ... ok ({took:.1} s)"),
            Err(error) => {
                failed += 1;
                report_failure(&case_name, took, &format!("{error:#}"), since);
            }
        }
    }
    println!("{} passed, {failed} failed", selected.len() - failed);
    failed == 0
}

/// Runs a case. If it stalls, reports that and ends this process.
fn guarded(
    case_name: &str,
    limit: Duration,
    since: SystemTime,
    story: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let (ended, end) = mpsc::channel::<()>();
    let started = Instant::now();
    thread::scope(|scope| {
        scope.spawn(move || {
            while end.recv_timeout(STILL_RUNS) == Err(RecvTimeoutError::Timeout) {
                let seconds = started.elapsed().as_secs();
                println!("{case_name} still runs after {seconds} s");
                if started.elapsed() >= limit {
                    let limit = limit.as_secs_f64();
                    let error =
                        format!("expected  the case's end within {limit} s\ncame      it has stalled");
                    report_failure(case_name, limit, &error, since);
                    process::exit(1);
                }
            }
        });
        let outcome = story();
        drop(ended);
        outcome
    })
}

/// Prints the line of a case that failed, and why, indented.
fn report_failure(case_name: &str, took: f64, error: &str, since: SystemTime) {
    println!("{case_name} ... FAILED ({took:.1} s)");
    print_indented(error);
    print_indented(&journal(since));
}

fn print_indented(text: &str) {
    text.lines().for_each(|line| println!("    {line}"));
}

/// The end of what containerd, its shims and dockerd wrote since then.
fn journal(since: SystemTime) -> String {
    let since = since.duration_since(UNIX_EPOCH).map_or(0, |duration| duration.as_secs());
    let since = format!("--since=@{since}");
    let own = format!("--unit={}", containerd::units());
    let docker = format!("--unit={}", docker::unit());
    let unit = "--unit=containerd";
    let args =
        [unit, &own, &docker, "--no-pager", "--output=short-monotonic", "--lines", JOURNAL_LINES, &since];
    match Cmd::new("journalctl").args(args).run() {
        Ok(finished) => format!("containerd's journal:\n{}", finished.text().trim_end()),
        Err(error) => format!("containerd's journal cannot be read: {error:#}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEWEST: Version = Version::new(u32::MAX, 0);

    fn containing(part: &str) -> Wanted {
        Wanted::Containing(Some(part.to_owned()))
    }

    fn all() -> Wanted {
        Wanted::Containing(None)
    }

    #[test]
    fn a_case_does_not_run_under_a_containerd_that_is_too_old() {
        let counts = [Version::OLDEST, NEWEST].map(|version| select(Runtime::Runc, version, false, &all()));
        let [old, new] = counts.map(|cases| cases.unwrap().len());
        assert!(0 < old && old < new);
    }

    #[test]
    fn a_filter_that_names_nothing_is_an_error() {
        assert!(select(Runtime::Runc, NEWEST, false, &containing("no such case")).is_err());
    }

    #[test]
    fn a_filter_may_name_only_cases_of_bulkhead() {
        let wanted = containing("bad_input/kvm_is_missing");
        assert!(select(Runtime::Runc, NEWEST, false, &wanted).unwrap().is_empty());
        assert_eq!(select(Runtime::Bulkhead, NEWEST, false, &wanted).unwrap().len(), 1);
    }

    #[test]
    fn whole_names_select_those_cases_in_that_order() {
        let names = ["exec/its_input_arrives_whole", "exec/twenty_at_once", "exec/its_input_arrives_whole"];
        let wanted = Wanted::Named(names.map(str::to_owned).to_vec());
        let selected = select(Runtime::Bulkhead, NEWEST, false, &wanted).unwrap();
        assert_eq!(selected.iter().map(|selected| selected.name.as_str()).collect::<Vec<_>>(), names);
        let part_of_a_name = Wanted::Named(vec!["exec/twenty".to_owned()]);
        assert!(select(Runtime::Bulkhead, NEWEST, false, &part_of_a_name).is_err());
    }

    #[test]
    fn a_long_case_is_run_by_its_whole_name_only() {
        let long: Vec<_> = every_case().filter(|Selected { case, .. }| case.by_whole_name_only).collect();
        // Under which every case runs.
        let select = |wanted: &Wanted| select(Runtime::Bulkhead, NEWEST, false, wanted);
        assert!(!long.is_empty());
        assert!(select(&all()).unwrap().iter().all(|Selected { case, .. }| !case.by_whole_name_only));
        for Selected { name, .. } in &long {
            assert_eq!(select(&containing(name)).unwrap().len(), 1);
            assert!(select(&containing(&name[1..])).is_err());
        }
    }

    #[test]
    fn a_brief_run_is_shorter() {
        let [brief, whole] = [true, false].map(|brief| select(Runtime::Runc, NEWEST, brief, &all()));
        assert!((1..whole.unwrap().len()).contains(&brief.unwrap().len()));
    }

    #[test]
    fn names_are_unique() {
        let mut names: Vec<_> = every_case().map(|case| case.name).collect();
        let all = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), all);
    }
}
