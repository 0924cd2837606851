//! Selects the cases, runs them one after the other and reports.

use std::iter;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Result, ensure};

use crate::cases::{self, Case, Group};
use crate::command::Cmd;
use crate::containerd::{self, Version};
use crate::ctr::{Host, Runtime};
use crate::docker;

/// How much of containerd's journal a failure shows.
const JOURNAL_LINES: &str = "30";

/// A case and the group it belongs to.
pub(crate) struct Selected {
    name: String,
    case: &'static Case,
    /// Told under every version of containerd.
    brief: bool,
}

/// Prints every case, whom it is for and since when.
pub(crate) fn list() {
    for Selected { name, case, .. } in every_case() {
        let alone = if case.by_whole_name_only { ", only by its whole name" } else { "" };
        println!("{name:<60} {:<14} since containerd {}{alone}", case.runtimes.shown(), case.since);
    }
}

/// The cases of this runtime and containerd whose name contains the filter, or, where they say so, is the filter: perhaps
/// none, when it names only cases of others. Only those that tell versions of containerd apart, if `brief`. An error if the filter names no case at all.
pub(crate) fn select(
    runtime: Runtime,
    version: Version,
    brief: bool,
    filter: Option<&str>,
) -> Result<Vec<Selected>> {
    let is_named = |Selected { name, case, .. }: &Selected| match filter {
        _ if case.by_whole_name_only => filter == Some(name),
        Some(part) => name.contains(part),
        None => true,
    };
    let mut named: Vec<_> = every_case().filter(is_named).collect();
    ensure!(
        !named.is_empty(),
        "no case is called {:?}; `bulkhead-e2e list` shows them all",
        filter.unwrap_or_default()
    );
    named.retain(|Selected { case, brief: in_brief, .. }| {
        case.runtimes.include(runtime) && version >= case.since && (*in_brief || !brief)
    });
    Ok(named)
}

fn every_case() -> impl Iterator<Item = Selected> {
    let of_group = |group: &'static Group| {
        let name = |case: &Case| format!("{}/{}", group.name, case.name);
        group.cases.iter().map(move |case| Selected { name: name(case), case, brief: group.brief })
    };
    cases::GROUPS.iter().flat_map(of_group)
}

/// Runs the cases in order, all of them this many times. True if all passed.
pub(crate) fn run(host: &Host, selected: &[Selected], times: usize) -> bool {
    let mut failed = Vec::new();
    let teller = format!("{} on containerd {}", host.runtime().name(), host.version());
    for Selected { name, case, .. } in iter::repeat_n(selected, times).flatten() {
        let since = SystemTime::now();
        let started = Instant::now();
        let outcome = (case.story)(host);
        let took = started.elapsed().as_secs_f64();
        match outcome {
            Ok(()) => println!("{name} [{teller}] ... ok ({took:.1} s)"),
            Err(error) => {
                println!("{name} [{teller}] ... FAILED ({took:.1} s)");
                let error = format!("{error:#}");
                print_indented(&error);
                print_indented(&journal(since));
                failed.push((name, error));
            }
        }
    }
    if !failed.is_empty() {
        println!("\nfailed, {teller}:");
        // Once more, without the journals: `cargo xtask test` repeats this at its own end.
        for (name, error) in &failed {
            println!("{name}");
            print_indented(error);
        }
    }
    println!("{} passed, {} failed", selected.len() * times - failed.len(), failed.len());
    failed.is_empty()
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

    #[test]
    fn a_case_is_not_told_under_a_containerd_that_is_too_old() {
        let counts = [Version::OLDEST, NEWEST].map(|version| select(Runtime::Runc, version, false, None));
        let [old, new] = counts.map(|cases| cases.unwrap().len());
        assert!(0 < old && old < new);
    }

    #[test]
    fn a_filter_that_names_nothing_is_an_error() {
        assert!(select(Runtime::Runc, NEWEST, false, Some("no such case")).is_err());
    }

    #[test]
    fn a_filter_may_name_only_cases_of_bulkhead() {
        assert!(select(Runtime::Runc, NEWEST, false, Some("bad_input/kvm_is_missing")).unwrap().is_empty());
        assert_eq!(
            select(Runtime::Bulkhead, NEWEST, false, Some("bad_input/kvm_is_missing")).unwrap().len(),
            1
        );
    }

    #[test]
    fn a_long_case_is_run_by_its_whole_name_only() {
        let long: Vec<_> = every_case().filter(|Selected { case, .. }| case.by_whole_name_only).collect();
        // On which every case is told.
        let select = |filter| select(Runtime::Bulkhead, NEWEST, false, filter);
        assert!(!long.is_empty());
        assert!(select(None).unwrap().iter().all(|Selected { case, .. }| !case.by_whole_name_only));
        for Selected { name, .. } in &long {
            assert_eq!(select(Some(name)).unwrap().len(), 1);
            assert!(select(name.get(1..)).is_err());
        }
    }

    #[test]
    fn a_brief_run_is_shorter() {
        let (brief, whole) =
            (select(Runtime::Runc, NEWEST, true, None), select(Runtime::Runc, NEWEST, false, None));
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
