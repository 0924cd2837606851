//! `docs/conformance.md`: what the end-to-end tests found on runc and on Bulkhead, written by a whole run.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use crate::e2e::Run;

/// What a user of runc may miss, and why it is so. It is refused by an error that names it, unless it says otherwise.
const DIFFERENCES: &[(&str, &str)] = &[
    (
        "`hostNetwork`, `hostPID`, `hostIPC`, a namespace of the host by its path",
        "a microVM shares no namespace with its host",
    ),
    ("user and time namespaces in the spec", "not built yet"),
    ("checkpoint and restore", "not built yet"),
    (
        "several network interfaces in a pod, interfaces that are no Ethernet, routes of other tables than main",
        "not built yet",
    ),
    (
        "`createContainer` and `startContainer` hooks",
        "they are programs of the host for namespaces that are the guest's",
    ),
    (
        "SELinux labels, AppArmor profiles other than those of the container engines",
        "the guest's kernel has no such module",
    ),
    ("`SCMP_ACT_NOTIFY` and `listenerPath` of a system call filter", "the listener is a process of the host"),
    ("limits on block devices of the host", "the guest does not have them"),
    (
        "port-forward of the CRI",
        "not built yet: containerd looks for the port in the network namespace on the host",
    ),
    (
        "bind mounts with `shared` or `rshared` propagation (`Bidirectional` of Kubernetes)",
        "what a container mounts stays in its VM; `rslave` is honoured",
    ),
    ("`docker top`", "docker looks for the processes on its host, and they are the guest's"),
    (
        "docker's name server at 127.0.0.11, in networks of the user's own: not refused, but no name resolves there",
        "it listens on the host; the guest has a loopback of its own (docs/operations.md says what to do)",
    ),
];

/// What one runtime's run said, `group/case` by `group/case`: whether it passed.
pub(crate) type Outcomes = BTreeMap<String, bool>;

/// Reads the lines `group/case [runtime] ... ok (1.2 s)` of a run. A case that ran more than once passed if it always did.
pub(crate) fn outcomes(output: &str) -> Outcomes {
    let parse = |line: &str| {
        let (case, rest) = line.split_once(" [")?;
        let (_, verdict) = rest.split_once("] ... ")?;
        let is_name = case.contains('/') && !case.contains(' ');
        is_name.then(|| (case.to_owned(), verdict.starts_with("ok")))
    };
    let mut outcomes = Outcomes::new();
    for (case, passed) in output.lines().filter_map(parse) {
        *outcomes.entry(case).or_insert(true) &= passed;
    }
    outcomes
}

/// The page: a column for each run, named by it.
pub(crate) fn page(columns: &[(String, &Run)]) -> String {
    let mut page = String::from(
        "# Conformance\n\nWritten by `cargo xtask test`, when all of it was run in the rig.\n\n\
         ## What differs from runc\n\nEach is refused by an error that names it, unless it says otherwise.\n\n| what | why |\n|---|---|\n",
    );
    for (what, why) in DIFFERENCES {
        let _ = writeln!(page, "| {what} | {why} |");
    }
    page.push_str("\n## Runs\n\n| run | passed | of | host |\n|---|---|---|---|\n");
    for (name, Run { outcomes, versions, .. }) in columns {
        let passed = outcomes.values().filter(|passed| **passed).count();
        let host = versions.lines().collect::<Vec<_>>().join(", ");
        let _ = writeln!(page, "| {name} | {passed} | {} | {host} |", outcomes.len());
    }
    page.push_str(
        "\n## Cases\n\nA dash: not part of that run. Of runc's it is about what only Bulkhead has; the shorter runs are of \
         the cases that tell versions of containerd apart.\n\n| case |",
    );
    columns.iter().for_each(|(name, _)| page.push_str(&format!(" {name} |")));
    page.push_str(&format!("\n|---|{}\n", "---|".repeat(columns.len())));
    let cases: BTreeSet<&String> = columns.iter().flat_map(|(_, run)| run.outcomes.keys()).collect();
    for case in cases {
        let outcomes = columns.iter().map(|(_, run)| format!(" {} |", shown(run.outcomes.get(case))));
        let _ = writeln!(page, "| {case} |{}", outcomes.collect::<String>());
    }
    page
}

fn shown(outcome: Option<&bool>) -> &'static str {
    match outcome {
        Some(true) => "passed",
        Some(false) => "**failed**",
        None => "-",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test::Tally;

    const OUTPUT: &str = "exec/one [runc] ... ok (1.2 s)\nexec/two [runc] ... FAILED (0.1 s)\n    expected [x] ... ok\n\n1 passed, 1 failed\n";

    #[test]
    fn the_cases_of_a_run_are_found() {
        assert_eq!(outcomes(OUTPUT), Outcomes::from([("exec/one".into(), true), ("exec/two".into(), false)]));
    }

    #[test]
    fn a_case_that_failed_once_has_failed() {
        let twice = format!("{OUTPUT}exec/two [runc] ... ok (0.1 s)\n");
        assert_eq!(outcomes(&twice).get("exec/two"), Some(&false));
    }

    #[test]
    fn the_page_sets_the_runs_side_by_side() {
        let run = |outcomes| Run {
            tally: Tally::default(),
            outcomes,
            failures: String::new(),
            versions: "containerd 1.7\nrunc 1.1\n".to_owned(),
        };
        let runc = run(outcomes(OUTPUT));
        let bulkhead = run(Outcomes::from([("exec/one".into(), true), ("wall/three".into(), true)]));
        let page = page(&[("bulkhead on 1.7".to_owned(), &bulkhead), ("runc on 1.7".to_owned(), &runc)]);
        for row in [
            "| runc on 1.7 | 1 | 2 | containerd 1.7, runc 1.1 |",
            "| case | bulkhead on 1.7 | runc on 1.7 |\n|---|---|---|",
            "| exec/one | passed | passed |",
            "| exec/two | - | **failed** |",
            "| wall/three | passed | - |",
        ] {
            assert!(page.contains(row), "{page}");
        }
    }
}
