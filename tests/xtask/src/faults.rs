//! `cargo xtask faults`: lets each system call of a shim fail in the rig, and writes docs/reliability.md.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::cache::Cache;
use crate::conformance;
use crate::dist::{self, Profile, source_dir};
use crate::e2e::E2E;
use crate::progress::step;
use crate::rig::{Io, Limit, Payload, Rig};
use crate::tools::Tools;

/// How long all faults may take. On an idle machine a fault takes a few seconds.
const LIMIT: Duration = Duration::from_secs(60 * 60);

const PAGE: &str = "docs/reliability.md";

/// What the page says before the table.
const HOW_TO_READ: &str = "\
strace attaches to the shim before containerd hears of it. In one of its system calls the shim gets an error that the
kernel could return, or SIGKILL. A container is created, started, joined by an exec, killed and deleted meanwhile. For
each fault the run expects that:

- each command ends within 30 seconds (four times as long where the host is emulated);
- a command that fails says why;
- the container can be removed when the fault is over;
- the host is as before: processes, mounts, links, cgroups, sockets, files of /run, bundles.

The columns on the right say how many of the faults the user did not notice, and what the others led to.
";

/// The faults of a kind, a line each.
#[derive(Debug, Default)]
struct Kind {
    unnoticed: usize,
    /// By the command that failed first.
    noticed: BTreeMap<String, usize>,
    failures: Vec<String>,
}

/// Runs all faults in a rig and writes the page. The exit status is 0 if each ended as expected.
pub(crate) fn run(cache: &Cache, tools: &Tools) -> Result<u8> {
    let commit = conformance::commit()?;
    let payload = Payload::new(cache, &[dist::build(cache, tools, Profile::Shipped)?.put()])?;
    let rig = Rig::ensure(cache, tools)?;
    let mut session = step("starting the host", || rig.start(&payload))?;
    let mut output = Vec::new();
    let argv = [E2E, "faults"].map(str::to_owned);
    let status = session.run(&argv, Io::Shown(&mut output), Limit::Whole(LIMIT))?;
    session.finish();
    let kinds = kinds(&String::from_utf8_lossy(&output));
    ensure!(!kinds.is_empty(), "no fault was injected");
    let path = source_dir().join(PAGE);
    fs::write(&path, page(&kinds, &commit)?).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(u8::from(status != 0))
}

/// Reads the lines `fault | CALL | EFFECT | NUMBER | MESSAGES` and `failure | ...`, by call and effect.
fn kinds(output: &str) -> BTreeMap<(String, String), Kind> {
    let mut kinds: BTreeMap<_, Kind> = BTreeMap::new();
    for line in output.lines() {
        let fields: Vec<_> = line.splitn(5, " | ").collect();
        let [outcome @ ("fault" | "failure"), call, effect, number, said] = fields[..] else { continue };
        let kind = kinds.entry((call.to_owned(), effect.to_owned())).or_default();
        match said.trim() {
            said if outcome == "failure" => kind.failures.push(format!("call {number}: {said}")),
            "" => kind.unnoticed += 1,
            said => {
                let command = said.split(':').next().unwrap_or_default();
                *kind.noticed.entry(command.to_owned()).or_default() += 1;
            }
        }
    }
    kinds
}

fn page(kinds: &BTreeMap<(String, String), Kind>, commit: &str) -> Result<String> {
    let of = |kind: &Kind| kind.unnoticed + kind.noticed.values().sum::<usize>();
    let faults: usize = kinds.values().map(of).sum();
    let failures: Vec<_> = kinds.values().flat_map(|kind| &kind.failures).collect();
    let mut page = String::from("# Reliability\n\nWritten by `cargo xtask faults`, not by hand.\n\n");
    page.push_str(HOW_TO_READ);
    write!(page, "\nCommit {commit}: {faults} faults as expected, {} not.\n\n", failures.len())?;
    page.push_str(
        "| system call | effect | faults | not noticed | commands that failed |\n|---|---|---|---|---|\n",
    );
    for ((call, effect), kind) in kinds {
        let noticed: Vec<_> =
            kind.noticed.iter().map(|(command, count)| format!("`{command}` {count}")).collect();
        let (effect, noticed) = (effect.replace('=', " "), noticed.join(", "));
        writeln!(page, "| `{call}` | {effect} | {} | {} | {noticed} |", of(kind), kind.unnoticed)?;
    }
    for failure in failures {
        write!(page, "\nNot as expected: {failure}\n")?;
    }
    Ok(page)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_counted_by_what_the_user_noticed() {
        let output = "building\nfault | mkdir | error=ENOSPC | 1 | run: ctr: no space\n\
                      fault | mkdir | error=ENOSPC | 2 | \nfault | mkdir | error=ENOSPC | 3 | run: a | b\n\
                      failure | mkdir | error=ENOSPC | 4 | expected  x came y\n";
        let page = page(&kinds(output), "abc").unwrap();
        assert!(page.contains("Commit abc: 3 faults as expected, 1 not."), "{page}");
        assert!(page.contains("| `mkdir` | error ENOSPC | 3 | 1 | `run` 2 |"), "{page}");
        assert!(page.contains("Not as expected: call 4: expected  x came y"), "{page}");
    }
}
