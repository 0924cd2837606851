//! Selects the cases, runs them one after the other and reports.

use std::iter;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Result, ensure};

use crate::cases::{self, Case, Group};
use crate::command::Cmd;
use crate::containerd;
use crate::ctr::{Host, Runtime};

/// How much of containerd's journal a failure shows.
const JOURNAL_LINES: &str = "30";

/// A case and the group it belongs to.
pub(crate) struct Selected {
    name: String,
    case: &'static Case,
}

/// Prints every case and whom it is for.
pub(crate) fn list() {
    for (name, case) in every_case() {
        println!("{name:<60} {}", case.runtimes.shown());
    }
}

/// The cases of this runtime whose name contains the filter: perhaps none, when it names only cases of Bulkhead's.
/// An error if it names no case at all.
pub(crate) fn select(runtime: Runtime, filter: Option<&str>) -> Result<Vec<Selected>> {
    let mut named: Vec<_> =
        every_case().filter(|(name, _)| filter.is_none_or(|part| name.contains(part))).collect();
    ensure!(
        !named.is_empty(),
        "no case is called {:?}; `bulkhead-e2e list` shows them all",
        filter.unwrap_or_default()
    );
    named.retain(|(_, case)| case.runtimes.include(runtime));
    Ok(named.into_iter().map(|(name, case)| Selected { name, case }).collect())
}

fn every_case() -> impl Iterator<Item = (String, &'static Case)> {
    let of_group = |group: &'static Group| {
        group.cases.iter().map(move |case| (format!("{}/{}", group.name, case.name), case))
    };
    cases::GROUPS.iter().flat_map(of_group)
}

/// Runs the cases in order, all of them this many times. True if all passed.
pub(crate) fn run(host: &Host, selected: &[Selected], times: usize) -> bool {
    let mut failed = Vec::new();
    for Selected { name, case } in iter::repeat_n(selected, times).flatten() {
        let since = SystemTime::now();
        let started = Instant::now();
        let outcome = (case.story)(host);
        let took = started.elapsed().as_secs_f64();
        match outcome {
            Ok(()) => println!("{name} [{}] ... ok ({took:.1} s)", host.runtime().name()),
            Err(error) => {
                println!("{name} [{}] ... FAILED ({took:.1} s)", host.runtime().name());
                let error = format!("{error:#}");
                print_indented(&error);
                print_indented(&journal(since));
                failed.push((name, error));
            }
        }
    }
    if !failed.is_empty() {
        println!("\nfailed on {}:", host.runtime().name());
        // Once more: of a long run, whoever reads this may have kept only the end.
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

/// The end of what containerd and its shims wrote since then.
fn journal(since: SystemTime) -> String {
    let since = since.duration_since(UNIX_EPOCH).map_or(0, |duration| duration.as_secs());
    let since = format!("--since=@{since}");
    let own = format!("--unit={}", containerd::units());
    let unit = "--unit=containerd";
    let args = [unit, &own, "--no-pager", "--output=short-monotonic", "--lines", JOURNAL_LINES, &since];
    match Cmd::new("journalctl").args(args).run() {
        Ok(finished) => format!("containerd's journal:\n{}", finished.text().trim_end()),
        Err(error) => format!("containerd's journal cannot be read: {error:#}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_that_names_nothing_is_an_error() {
        assert!(select(Runtime::Runc, Some("no such case")).is_err());
    }

    #[test]
    fn a_filter_may_name_only_cases_of_bulkhead() {
        assert!(select(Runtime::Runc, Some("bad_input/kvm_is_missing")).unwrap().is_empty());
        assert_eq!(select(Runtime::Bulkhead, Some("bad_input/kvm_is_missing")).unwrap().len(), 1);
    }

    #[test]
    fn names_are_unique() {
        let mut names: Vec<_> = every_case().map(|(name, _)| name).collect();
        let all = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), all);
    }
}
