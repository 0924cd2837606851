//! System calls of the shim fail, or the shim dies in them. Each command ends in time and says what went wrong, and nothing is
//! left on the host.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};

use super::Case;
use crate::ctr::Host;
use crate::faults::{Fault, FaultyShim, KINDS, Seen};
use crate::snapshot::Snapshot;

pub(super) const CASES: &[Case] = &[
    Case::bulkhead("one_of_each_kind_leaves_nothing", one_of_each_kind),
    Case::bulkhead("each_call_of_each_kind_leaves_nothing", each_call).by_whole_name_only(),
];

/// Fewer injected faults in all would mean that strace does not reach the shim.
const AT_LEAST: usize = 150;

/// The host after a first container, whose template and directories stay.
fn before(host: &Host) -> Result<Snapshot> {
    host.run(&["true"])?.succeeds()?;
    Snapshot::settled(host)
}

fn one_of_each_kind(host: &Host) -> Result<()> {
    let before = before(host)?;
    let shim = FaultyShim::install(host)?;
    for (call, effect) in KINDS.iter().step_by(3) {
        // The second one, since the first is often made in the same step as that of another kind.
        let fault = Fault { call, effect, number: 2 };
        if let Some(seen) = shim.run(fault, &before)? {
            show(&seen);
        }
    }
    Ok(())
}

fn each_call(host: &Host) -> Result<()> {
    let before = before(host)?;
    let shim = FaultyShim::install(host)?;
    let (mut faults, mut failures) = (0, BTreeMap::new());
    for (call, effect) in KINDS {
        match shim.run_all(call, effect, &before) {
            Ok(all) => {
                all.iter().for_each(show);
                faults += all.len();
            }
            Err(error) => {
                println!("fault | {call} | {effect} | FAILED | {error:#}");
                failures.insert((call, effect), format!("{error:#}"));
            }
        }
    }
    println!("{faults} faults");
    ensure!(failures.is_empty(), "expected  no kind of fault that leaves something\ncame      {failures:#?}");
    ensure!(faults >= AT_LEAST, "expected  {AT_LEAST} faults or more\ncame      {faults}");
    Ok(())
}

/// Prints a line of the table in docs/reliability.md.
fn show(Seen { fault: Fault { call, effect, number }, messages }: &Seen) {
    let said = if messages.is_empty() { "-".to_owned() } else { messages.join("; ") };
    println!("fault | {call} | {effect} | {number} | {said}");
}
