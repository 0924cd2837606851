//! A case that prints numbers, on runc and on Bulkhead. The runtimes take turns.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};

use crate::cache::Cache;
use crate::dist::{self, Profile, source_dir};
use crate::e2e::E2E;
use crate::progress::step;
use crate::rig::{Io, Limit, Payload, Rig, Session};
use crate::tools::Tools;

pub(super) const RUNTIMES: [&str; 2] = ["runc", "bulkhead"];
const LIMIT: Duration = Duration::from_secs(10 * 60);
/// So many hosts may end before they have run the case.
const MOST_ENDED: usize = 8;

/// Runs the case so often on each runtime, in one rig, as long as its host lives. `take` gets the runtime and what the
/// case has printed on it.
pub(super) fn run(
    cache: &Cache,
    tools: &Tools,
    case: &str,
    rounds: usize,
    mut take: impl FnMut(&'static str, &str) -> Result<()>,
) -> Result<()> {
    let dist = dist::build(cache, tools, Profile::Quick)?;
    let payload = Payload::new(cache, &[dist.put()])?;
    let rig = Rig::ensure(cache, tools)?;
    let start = || step("starting the host", || rig.start(&payload));
    let mut session = start()?;
    let mut ended = 0;
    for round in 0..rounds {
        let mut runtimes = RUNTIMES;
        runtimes.rotate_left(round % RUNTIMES.len());
        for runtime in runtimes {
            let output = loop {
                match printed(&mut session, case, runtime) {
                    Ok(output) => break output,
                    // An inner host with two emulated processors does that (`Accelerator::arguments`).
                    Err(NoNumbers::HostEnded(error)) if ended < MOST_ENDED => {
                        eprintln!("{case} on {runtime} again, on another host: {error:#}");
                        ended += 1;
                        session = start()?;
                    }
                    Err(NoNumbers::HostEnded(error) | NoNumbers::Failed(error)) => return Err(error),
                }
            };
            take(runtime, &output).with_context(|| format!("{case} on {runtime}"))?;
        }
    }
    session.finish();
    Ok(())
}

/// Why a case has printed no numbers.
enum NoNumbers {
    /// The host of the rig has ended.
    HostEnded(anyhow::Error),
    /// A runtime does not do what the page is about. That is to be mended, not shown.
    Failed(anyhow::Error),
}

/// What the case prints.
fn printed(session: &mut Session, case: &str, runtime: &str) -> Result<String, NoNumbers> {
    let argv = [E2E, "test", "--runtime", runtime, "--exact", case].map(str::to_owned);
    let mut output = Vec::new();
    let status =
        session.run(&argv, Io::Shown(&mut output), Limit::Whole(LIMIT)).map_err(NoNumbers::HostEnded)?;
    if status != 0 {
        return Err(NoNumbers::Failed(anyhow!("{case} fails on {runtime}")));
    }
    Ok(String::from_utf8_lossy(&output).into_owned())
}

/// Prints a page, and writes it to this file of the source tree.
pub(super) fn write(file: &str, page: &str) -> Result<()> {
    println!("{page}");
    fs::write(source_dir().join(file), page).with_context(|| format!("cannot write {file}"))
}
