//! A system call of the shim fails, or the shim dies in it. Each command ends in time and says what went wrong, and nothing is
//! left on the host. `bulkhead-e2e faults` tries all calls of all kinds; see `crate::faults`.

use anyhow::{Result, ensure};

use super::Case;
use crate::ctr::Host;
use crate::faults::{Fault, FaultyShim, KINDS, host_before};

pub(super) const CASES: &[Case] =
    &[Case::bulkhead("one_call_of_every_third_kind_leaves_nothing", one_call_of_every_third_kind)];

/// Fewer injected faults would mean that strace does not reach the shim.
const AT_LEAST: usize = 5;

fn one_call_of_every_third_kind(host: &Host) -> Result<()> {
    let before = host_before(host)?;
    let shim = FaultyShim::install(host)?;
    let mut faults = 0;
    for (call, effect) in KINDS.iter().step_by(3) {
        // The second one, since the first is often made in the same step as that of another kind.
        let fault = Fault { call, effect, number: 2 };
        if let Some(seen) = shim.run(fault, &before)? {
            println!("{seen}");
            faults += 1;
        }
    }
    ensure!(faults >= AT_LEAST, "expected  {AT_LEAST} faults or more\ncame      {faults}");
    Ok(())
}
