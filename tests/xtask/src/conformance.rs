//! `docs/conformance.md`: what the end-to-end tests found on runc and on Bulkhead, written by a whole run.

use std::collections::BTreeMap;
use std::fmt::Write;

/// What a user of runc may miss, and why it is so. All of it is refused by an error that names it.
const DIFFERENCES: [(&str, &str); 10] = [
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
    ("output to `binary://` loggers", "not built yet"),
    ("the systemd cgroup driver (`SystemdCgroup = true`)", "not built yet"),
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

/// The page. `versions` is what the host runs, a line each.
pub(crate) fn page(versions: &str, runc: &Outcomes, bulkhead: &Outcomes) -> String {
    let mut page = String::from(
        "# Conformance\n\nWritten by `cargo xtask test`, when all of it was run in the rig.\n\n",
    );
    for line in versions.lines() {
        let _ = writeln!(page, "- {line}");
    }
    page.push_str("\n## What differs from runc\n\nEach is refused by an error that names it.\n\n| what | why |\n|---|---|\n");
    for (what, why) in DIFFERENCES {
        let _ = writeln!(page, "| {what} | {why} |");
    }
    let passed = |outcomes: &Outcomes| outcomes.values().filter(|passed| **passed).count();
    let _ = write!(
        page,
        "\n## Cases\n\nrunc passes {} of {}, Bulkhead {} of {}. A dash: the case is about what only Bulkhead has.\n\n\
         | case | runc | Bulkhead |\n|---|---|---|\n",
        passed(runc),
        runc.len(),
        passed(bulkhead),
        bulkhead.len()
    );
    for case in bulkhead.keys().chain(runc.keys().filter(|case| !bulkhead.contains_key(*case))) {
        let _ = writeln!(page, "| {case} | {} | {} |", shown(runc.get(case)), shown(bulkhead.get(case)));
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

    const OUTPUT: &str = "exec/one [runc] ... ok (1.2 s)\nexec/two [runc] ... FAILED (0.1 s)\n    expected [x] ... ok\n\n1 passed, 1 failed\n";

    #[test]
    fn the_cases_of_a_run_are_found() {
        assert_eq!(outcomes(OUTPUT), Outcomes::from([("exec/one".into(), true), ("exec/two".into(), false)]));
    }

    #[test]
    fn the_page_sets_the_runtimes_side_by_side() {
        let bulkhead = Outcomes::from([("exec/one".into(), true), ("wall/three".into(), true)]);
        let page = page("containerd 1.7\nrunc 1.1", &outcomes(OUTPUT), &bulkhead);
        assert!(page.contains("- containerd 1.7\n- runc 1.1\n"), "{page}");
        assert!(page.contains("runc passes 1 of 2, Bulkhead 2 of 2."), "{page}");
        for row in
            ["| exec/one | passed | passed |", "| exec/two | **failed** | - |", "| wall/three | - | passed |"]
        {
            assert!(page.contains(row), "{page}");
        }
    }
}
