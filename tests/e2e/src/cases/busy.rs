//! A program that computes until its own kernel says that it has used a known amount of processor time. What the
//! statistics of its container say is compared with that.

use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::command::wait_until;
use crate::ctr::{Host, SETTLES};

/// Waits for lines. Each says how many hundredths of a second of processor time to use. Then it prints how many it has
/// used between its first and its last look at `/proc/PID/stat`. It starts no other process, so its container uses
/// little more.
pub(super) const PROGRAM: &str =
    "look() { read -r all < /proc/$$/stat; set -- $all; ticks=$((${14} + ${15})); }
echo ready
while read -r more; do
    look; begin=$ticks
    while [ $ticks -lt $((begin + more)) ]; do
        i=0; while [ $i -lt 500 ]; do i=$((i + 1)); done; look
    done
    echo used $((ticks - begin))
done";

/// A line for the program, and what follows on a terminal.
pub(super) const TWO_SECONDS: &[u8] = b"200\n";
/// More than any case waits for.
pub(super) const FOR_EVER: &[u8] = b"9999999\n";

/// What statistics may have beside the work: what the program does before and after its looks. An emulated and busy
/// host needs a fifth of a second for that.
const REST: Duration = Duration::from_millis(1500);
/// What `/proc/PID/stat` counts in.
const TICK: Duration = Duration::from_millis(10);
/// How much that may be wrong: parts of a tick are cut off the time of the program and of that in the kernel, twice.
pub(super) const ROUNDING: Duration = Duration::from_millis(40);

/// How much the program has used for its line. `output` is what it has printed so far.
pub(super) fn used(host: &Host, output: impl Fn() -> Result<String>) -> Result<Duration> {
    let mut ticks = None;
    wait_until("the program to have used its time", host.patience(SETTLES), || {
        let text = output()?;
        ticks = text.lines().find_map(|line| line.trim_end().strip_prefix("used ")).map(str::to_owned);
        Ok(ticks.is_some())
    })?;
    let ticks: u32 = ticks.unwrap_or_default().parse().context("the program prints no number")?;
    Ok(TICK * ticks)
}

/// Expects that statistics have grown by what the program has used meanwhile, and by little more.
pub(super) fn agree(what: &str, grown: Duration, used: Duration) -> Result<()> {
    ensure!(
        grown + ROUNDING >= used && grown <= used + REST,
        "{what}\nexpected  to grow by {used:?}, and at most {REST:?} more\ncame      {grown:?}"
    );
    Ok(())
}
