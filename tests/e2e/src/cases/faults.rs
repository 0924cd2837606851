//! Something goes wrong in the life of a container. Each request ends in time and says what went wrong, and nothing is
//! left on the host. `bulkhead-e2e faults` tries all faults, and `bulkhead-e2e soak` many cycles; see `crate::faults`.

use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::Case;
use crate::command::{Cmd, wait_until};
use crate::ctr::{Host, NAMESPACE};
use crate::faults::TestBed;
use crate::faults::calls::{CallFault, FaultyShim, KINDS};
use crate::faults::lifecycle::Step;
use crate::faults::resources::{Lack, MORE, Shortage};
use crate::fixtures::scratch;
use crate::snapshot::processes_of;
use crate::soak;

pub(super) const CASES: &[Case] = &[
    Case::bulkhead("one_call_of_every_third_kind_leaves_nothing", one_call_of_every_third_kind),
    Case::bulkhead("a_create_of_a_shim_without_descriptors_is_answered_and_leaves_nothing", no_descriptors),
    Case::bulkhead("a_shim_that_containerd_has_forgotten_ends", forgotten_shim),
    Case::bulkhead("forty_cycles_with_faults_keep_nothing", forty_cycles),
];

/// Fewer injected faults would mean that strace does not reach the shim.
const AT_LEAST: usize = 5;
const CYCLES: u32 = 40;
/// How long they may take. A little later the case would be reported as stalled.
const LIMIT: Duration = Duration::from_secs(12 * 60);

fn one_call_of_every_third_kind(host: &Host) -> Result<()> {
    let bed = TestBed::prepare(host)?;
    let shim = FaultyShim::install(host)?;
    let mut faults = 0;
    for (call, effect) in KINDS.iter().step_by(3) {
        // The second one, since the first is often made in the same step as that of another kind.
        let fault = CallFault { call, effect, number: 2 };
        if let Some(messages) = bed.try_or_fail(None, &mut shim.injector(fault))? {
            println!("{}: {messages:?}", fault.fault());
            faults += 1;
        }
    }
    ensure!(faults >= AT_LEAST, "expected  {AT_LEAST} faults or more\ncame      {faults}");
    Ok(())
}

/// The shim may open no more than a few descriptors in addition, from before Create on.
fn no_descriptors(host: &Host) -> Result<()> {
    let bed = TestBed::prepare(host)?;
    for more in MORE {
        let lack = Lack::Descriptors { shim: host.runtime().shim(), more };
        let messages = bed.try_or_fail(None, &mut Shortage::of(lack, Step::Create))?;
        println!("{more} more descriptors: {:?}", messages.context("no shim was struck")?);
    }
    Ok(())
}

/// containerd was killed between `start` and Create. When it starts again, it removes the bundle.
fn forgotten_shim(host: &Host) -> Result<()> {
    const STARTS: Duration = Duration::from_secs(5);
    /// It looks every 10 s.
    const ENDS: Duration = Duration::from_secs(15);
    host.leaves_nothing(|| {
        let (bundle, id, shim) = (scratch()?, host.new_id(), host.runtime().shim());
        let start =
            format!("cd {} && exec {shim} -namespace {NAMESPACE} -id {id} start", bundle.path().display());
        Cmd::new("sh").args(["-c", &start]).run()?.succeeds()?;
        // The kernel shows the arguments of a new program a little later than who started it goes on.
        wait_until("a shim", host.patience(STARTS), || Ok(!processes_of(shim, &id)?.is_empty()))?;
        drop(bundle);
        wait_until("the end of the shim", host.patience(ENDS), || Ok(processes_of(shim, &id)?.is_empty()))
    })
}

fn forty_cycles(host: &Host) -> Result<()> {
    let done = soak::run(host, CYCLES, LIMIT, &mut |line| {
        if line.contains("failure") {
            println!("{line}");
        }
    })?;
    ensure!(done == CYCLES, "expected  {CYCLES} containers within {LIMIT:?}\ncame      {done}");
    Ok(())
}
