//! Memory that VMs were given a short time ago, and may not have touched yet.
//!
//! What the host and its cgroups have left says nothing about it. Two VMs that grow at the same moment would both be
//! given all of that, and the host would kill one of them when it touches what it was given. So a shim that has its VM
//! grow writes that to a file of the pod, and the shims of other pods count it as taken. They take turns.

use std::{fs, io, path::Path, time::Duration};

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use crate::host::{directory_lock::DirectoryLock, process_id::ProcessId, state_dir};

/// The file, in the state directory of a pod. It keeps the name that it had at first: while an upgrade is going on,
/// shims of an older and of a newer version read the promises of each other.
pub(crate) const PROMISE: &str = "growth.json";

/// How long a promise counts. Containers that take memory as fast as they can touch some GiB within this time. Memory
/// that a VM does not need for longer is not kept from others.
const COUNTS: Duration = Duration::from_secs(10);

/// How long a shim waits for its turn. In a turn some small files are read.
const TURN: Duration = Duration::from_secs(2);

#[derive(Debug, Serialize, Deserialize)]
struct Promise {
    vmm: ProcessId,
    /// Bytes that the VMM may have of its own.
    up_to: u64,
    /// When it was made, on the clock that begins with the boot, seconds.
    at: u64,
}

/// The right to make a promise, until this is dropped.
#[derive(Debug)]
pub(crate) struct Turn(#[expect(dead_code, reason = "it is only held")] DirectoryLock);

/// Waits until no other shim is about to make a promise. `root` is the directory of all state directories. Blocks.
pub(crate) fn turn(root: &Path) -> io::Result<Turn> {
    DirectoryLock::take(root, TURN).map(Turn)
}

/// Records that the VMM of the pod with this state directory may have this many bytes of its own. Blocks.
pub(crate) fn make(state: &Path, vmm: ProcessId, up_to: u64) -> io::Result<()> {
    let promise = Promise { vmm, up_to, at: now() };
    // Another shim that reads a part of it counts nothing. It has no turn, and looks again in its turn.
    fs::write(state.join(PROMISE), serde_json::to_vec(&promise)?)
}

/// Bytes that other pods than that of the state directory `own` were promised and have not touched. Blocks.
pub(crate) fn to_others(root: &Path, own: &Path) -> u64 {
    let others = state_dir::pods(root).filter(|pod| pod != own);
    let promises =
        others.filter_map(|pod| serde_json::from_slice::<Promise>(&fs::read(pod.join(PROMISE)).ok()?).ok());
    let now = now();
    let counting = promises.filter(|promise| now.saturating_sub(promise.at) < COUNTS.as_secs());
    counting.fold(0, |sum, promise| sum.saturating_add(promise.untouched()))
}

impl Promise {
    fn untouched(&self) -> u64 {
        // None: the VMM has ended.
        self.vmm.anonymous_memory().map_or(0, |touched| self.up_to.saturating_sub(touched))
    }
}

fn now() -> u64 {
    u64::try_from(clock_gettime(ClockId::Boottime).tv_sec).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::{path::PathBuf, sync::mpsc, thread};

    use super::*;

    const GIB: u64 = 1 << 30;

    fn pods<const N: usize>(root: &Path, names: [&str; N]) -> [PathBuf; N] {
        names.map(|name| {
            let state = root.join("containerd/ns").join(name);
            fs::create_dir_all(&state).unwrap();
            state
        })
    }

    #[test]
    fn what_others_were_promised_and_have_not_touched_is_taken() {
        let root = tempfile::tempdir().unwrap();
        let [one, two, three] = pods(root.path(), ["one", "two", "three"]);
        let vmm = ProcessId::of(std::process::id()).unwrap();
        assert_eq!(to_others(root.path(), &one), 0);
        make(&one, vmm, GIB).unwrap();
        make(&two, vmm, 2 * GIB).unwrap();
        let touched = vmm.anonymous_memory().unwrap();
        let missing =
            |bytes: u64, times: u64| bytes.abs_diff(to_others(root.path(), &three) + times * touched);
        assert!(missing(3 * GIB, 2) < GIB / 8);
        assert!(to_others(root.path(), &one) > to_others(root.path(), &two));
        // It has touched more than that.
        make(&two, vmm, 1).unwrap();
        assert!(missing(GIB, 1) < GIB / 8);
    }

    #[test]
    fn an_old_or_damaged_promise_and_one_to_a_vm_that_ended_do_not_count() {
        let root = tempfile::tempdir().unwrap();
        let [one, two, three] = pods(root.path(), ["one", "two", "three"]);
        let vmm = ProcessId::of(std::process::id()).unwrap();
        let old = Promise { vmm, up_to: GIB, at: now() - COUNTS.as_secs() };
        fs::write(one.join(PROMISE), serde_json::to_vec(&old).unwrap()).unwrap();
        fs::write(two.join(PROMISE), "{").unwrap();
        assert_eq!(to_others(root.path(), &three), 0);
        make(&two, ProcessId { start_time: vmm.start_time + 1, ..vmm }, GIB).unwrap();
        assert_eq!(to_others(root.path(), &three), 0);
    }

    #[test]
    fn shims_take_turns() {
        let root = tempfile::tempdir().unwrap();
        let first = turn(root.path()).unwrap();
        let (sender, receiver) = mpsc::channel();
        let path = root.path().to_owned();
        let second = thread::spawn(move || {
            sender.send(()).unwrap();
            let _turn = turn(&path).unwrap();
            sender.send(()).unwrap();
        });
        receiver.recv().unwrap();
        assert!(receiver.recv_timeout(Duration::from_millis(100)).is_err());
        drop(first);
        receiver.recv_timeout(TURN).unwrap();
        second.join().unwrap();
    }
}
