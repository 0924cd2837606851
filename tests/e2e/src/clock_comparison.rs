//! The clocks of a machine's processors, compared from within. This very program does so, in a container that is given
//! it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

/// So often each processor looks at what another one read last.
const LOOKS: u32 = 100;
/// How long that may take. Where the host has one processor, each of the guest's has its turn for some milliseconds.
const LIMIT: Duration = Duration::from_secs(40);
/// In what is shared, the time is counted in so many: the number of the processor that read it is added.
const PROCESSORS: u64 = 1 << 10;

/// Has all processors read the time at once until each has seen often enough what another one read just before, and
/// returns how many there are. An error: time went back from one to another, or one of them does nothing.
pub(crate) fn compare() -> Result<usize> {
    let allowed = sched_getaffinity(Pid::from_raw(0)).context("no processors")?;
    let processors: Vec<_> = (0..CpuSet::count()).filter(|id| allowed.is_set(*id) == Ok(true)).collect();
    let begun = Instant::now();
    let latest = AtomicU64::new(0);
    // Those that have looked often enough go on until the last one has.
    let left = AtomicU64::new(processors.len() as u64);
    thread::scope(|scope| {
        let (latest, left) = (&latest, &left);
        let threads: Vec<_> =
            processors.iter().map(|id| scope.spawn(move || look(*id, begun, latest, left))).collect();
        let looked =
            threads.into_iter().map(|thread| thread.join().map_err(|_| anyhow!("a thread panicked"))?);
        looked.collect::<Result<()>>()
    })?;
    Ok(processors.len())
}

/// What the processor `id` does.
fn look(id: usize, begun: Instant, latest: &AtomicU64, left: &AtomicU64) -> Result<()> {
    let mut own = CpuSet::new();
    own.set(id)?;
    sched_setaffinity(Pid::from_raw(0), &own).with_context(|| format!("processor {id} cannot be used"))?;
    let mut looks = 0;
    while left.load(Ordering::Relaxed) > 0 {
        let seen = latest.load(Ordering::Acquire);
        // 0 if it is before `begun`, which is before all that was seen.
        let now = begun.elapsed();
        let (read, by) = (Duration::from_nanos(seen / PROCESSORS), seen % PROCESSORS);
        ensure!(now >= read, "time goes back by {:?} from processor {by} to {id}", read - now);
        ensure!(now < LIMIT, "processor {id} saw the others read the time {looks} times in {LIMIT:?}");
        latest.fetch_max(now.as_nanos() as u64 * PROCESSORS + id as u64, Ordering::AcqRel);
        if seen > 0 && by != id as u64 && looks < LOOKS {
            looks += 1;
            if looks == LOOKS {
                left.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }
    Ok(())
}
