//! A case that prints numbers, on runc and on Bulkhead. The runtimes take turns.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::cache::Cache;
use crate::dist::{self, Profile, source_dir};
use crate::e2e::E2E;
use crate::progress::step;
use crate::rig::{Io, Limit, Payload, Rig, Session};
use crate::tools::Tools;

pub(super) const RUNTIMES: [&str; 2] = ["runc", "bulkhead"];
const LIMIT: Duration = Duration::from_secs(10 * 60);

/// Runs the case so often on each runtime, in one rig. `take` gets the runtime and what the case has printed on it.
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
    let mut session = step("starting the host", || rig.start(&payload))?;
    for round in 0..rounds {
        let mut runtimes = RUNTIMES;
        runtimes.rotate_left(round % RUNTIMES.len());
        for runtime in runtimes {
            let output = printed(&mut session, case, runtime)?;
            take(runtime, &output).with_context(|| format!("{case} on {runtime}"))?;
        }
    }
    session.finish();
    Ok(())
}

/// What the case prints. It fails if a runtime does not do what the page is about: that is to be mended, not shown.
fn printed(session: &mut Session, case: &str, runtime: &str) -> Result<String> {
    let argv = [E2E, "test", "--runtime", runtime, "--exact", case].map(str::to_owned);
    let mut output = Vec::new();
    let status = session.run(&argv, Io::Shown(&mut output), Limit::Whole(LIMIT))?;
    ensure!(status == 0, "{case} fails on {runtime}");
    Ok(String::from_utf8_lossy(&output).into_owned())
}

/// Prints a page, and writes it to this file of the source tree.
pub(super) fn write(file: &str, page: &str) -> Result<()> {
    println!("{page}");
    fs::write(source_dir().join(file), page).with_context(|| format!("cannot write {file}"))
}
