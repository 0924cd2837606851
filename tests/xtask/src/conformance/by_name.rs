//! The tables of the page about cases that a whole run leaves out, and that were run by their names.

use std::collections::BTreeSet;
use std::fmt::Write;

use anyhow::{Result, ensure};

use crate::containerd::Containerd;
use crate::e2e::{Runtime, job_name};
use crate::named::{Ended, Known, Named};

/// The groups about the security context and the resources of containers. A whole run has them under 1.7 alone.
const UNDER_2: [&str; 9] =
    ["apparmor", "cpus", "isolation", "limits", "memory", "pod_memory", "pod_settings", "seccomp", "update"];

const RUNTIMES: [Runtime; 2] = [Runtime::Runc, Runtime::Bulkhead];
/// Of a case that has not run since its sources changed, or that has never run.
const NO_RESULT: &str = "no result";

/// The sections about the cases.
pub(super) fn sections(cases: &[Known], named: &Named) -> Result<String> {
    let long = long(cases, named);
    Ok(format!("{long}\n{}", groups(cases, named)?))
}

fn long(cases: &[Known], named: &Named) -> String {
    let mut section = format!(
        "## Long cases\n\nThey take minutes, and run only if the whole name is given: `cargo xtask test CASE`, and \
         `cargo xtask test --runtime runc CASE`. Each cell has the last result. If the sources of the tests have \
         changed since, there is no result to show, and the cell says \"{NO_RESULT}\". The commit is that of the \
         Bulkhead that was tested, whose programs were built without link-time optimization. A dash: the case is \
         about what only Bulkhead has.\n\n\
         | case | runc | Bulkhead | commit |\n|---|---|---|---|\n"
    );
    for case in cases.iter().filter(|case| case.is_long) {
        let [runc, bulkhead] =
            RUNTIMES.map(|runtime| named.get(&job_name(runtime, Containerd::V1_7), &case.name));
        let on_runc = if case.on_runc { on_runc(runc) } else { "-".to_owned() };
        let on_bulkhead = bulkhead.map_or_else(|| NO_RESULT.to_owned(), ended);
        let commit = bulkhead.map_or("-", |ended| &ended.commit);
        let _ = writeln!(section, "| {} | {on_runc} | {on_bulkhead} | {commit} |", case.name);
    }
    section
}

fn ended(ended: &Ended) -> String {
    let verdict = if ended.passed { "passed" } else { "**failed**" };
    format!("{verdict} on {}", ended.date)
}

fn on_runc(last: Option<&Ended>) -> String {
    let Some(last) = last else { return NO_RESULT.to_owned() };
    let runc = last.versions.lines().find(|line| line.starts_with("runc "));
    format!("{}, {}", ended(last), runc.unwrap_or("runc of an unknown version"))
}

fn groups(cases: &[Known], named: &Named) -> Result<String> {
    let mut section = format!(
        "## Groups run by name under containerd 2\n\nThe groups about the security context and the resources of \
         containers, which a whole run has under 1.7 alone: `cargo xtask test --containerd 2 GROUP/`, and the same \
         with `--runtime runc`. Each cell says how many cases passed, of all that there are. As above, \
         \"{NO_RESULT}\" means that the sources of the cases have changed since. The commits are those of the Bulkhead \
         that was tested.\n\n\
         | group | runc | Bulkhead | commit |\n|---|---|---|---|\n"
    );
    for group in UNDER_2 {
        let of_group = || cases.iter().filter(|case| case.group() == group && !case.is_long);
        ensure!(
            of_group().next().is_some(),
            "tests/xtask/src/conformance/by_name.rs: there is no group {group}"
        );
        let [(runc, _), (bulkhead, commits)] = RUNTIMES.map(|runtime| {
            let job = job_name(runtime, Containerd::V2);
            let cases = of_group().filter(|case| case.on_runc || runtime == Runtime::Bulkhead);
            counted(cases.map(|case| named.get(&job, &case.name)).collect())
        });
        let _ = writeln!(section, "| {group} | {runc} | {bulkhead} | {commits} |");
    }
    Ok(section)
}

/// How many cases passed, and of which commits they were.
fn counted(cases: Vec<Option<&Ended>>) -> (String, String) {
    let all = cases.len();
    let ran: Vec<_> = cases.into_iter().flatten().collect();
    if ran.is_empty() {
        return (NO_RESULT.to_owned(), "-".to_owned());
    }
    let passed = ran.iter().filter(|ended| ended.passed).count();
    let count = format!("{passed} of {all}");
    let mut cell = if passed == ran.len() { count } else { format!("**{count}**") };
    if ran.len() < all {
        let _ = write!(cell, ", {} without a result", all - ran.len());
    }
    let commits: BTreeSet<_> = ran.iter().map(|ended| ended.commit.as_str()).collect();
    (cell, commits.into_iter().collect::<Vec<_>>().join(", "))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::named::{self, run};

    #[test]
    fn cases_that_were_run_by_name_are_beside_those_that_were_not() {
        let known = |name: &str, on_runc, is_long| Known { name: name.to_owned(), on_runc, is_long };
        let mut cases: Vec<_> =
            UNDER_2.iter().map(|group| known(&format!("{group}/one"), true, false)).collect();
        cases.push(known("seccomp/two", true, false));
        cases.push(known("cpus/two", false, false));
        cases.extend(
            ["cpus/long", "seccomp/long", "update/long"].map(|name| known(name, name != "cpus/long", true)),
        );
        let named = named::example(
            &[
                ("runc on containerd 1.7", &run(&[("seccomp/long", true)])),
                ("bulkhead on containerd 1.7", &run(&[("seccomp/long", false), ("cpus/long", true)])),
                ("runc on containerd 2", &run(&[("cpus/one", true)])),
                ("bulkhead on containerd 2", &run(&[("cpus/one", true), ("cpus/two", true)])),
                ("bulkhead on containerd 2", &run(&[("seccomp/one", false), ("memory/one", true)])),
            ],
            // The sources of the group `memory` are others than before.
            &["cpus", "seccomp", "update"],
        );
        let page = sections(&cases, &named).unwrap();
        for row in [
            "| seccomp/long | passed on 1970-01-01, runc version 1.1 | **failed** on 1970-01-01 | 0123456789 |",
            "| cpus/long | - | passed on 1970-01-01 | 0123456789 |",
            "| update/long | no result | no result | - |",
            "| cpus | 1 of 1 | 2 of 2 | 0123456789 |",
            "| seccomp | no result | **0 of 2**, 1 without a result | 0123456789 |",
            "| memory | no result | no result | - |",
        ] {
            assert!(page.contains(&format!("{row}\n")), "no {row:?} in {page}");
        }
        cases.retain(|case| case.group() != "update");
        assert!(sections(&cases, &named).unwrap_err().to_string().contains("no group update"));
    }
}
