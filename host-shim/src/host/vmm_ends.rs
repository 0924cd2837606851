//! Ends the VMMs of a pod that is removed. One that hangs in the host's kernel does not keep the rest of the pod from
//! being removed, and is waited for only once.

use std::{io, path::Path, time::Duration};

use crate::host::{
    patience::Patience,
    process_id::{self, ProcessId},
};

/// How long a VMM that was killed may go without progress, and how long all VMMs of the pod may take to end. The rest
/// of the time for an undo is for what comes after that.
const IDLE: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 5 });
const MOST: Duration = Duration::from_millis(if cfg!(test) { 1500 } else { 20_000 });

/// What is left of that time, and the processes that did not end in it.
#[derive(Debug)]
pub(crate) struct VmmEnds {
    patience: Patience,
    hung: Vec<ProcessId>,
}

impl VmmEnds {
    /// The time begins now.
    pub(crate) fn begin() -> Self {
        Self { patience: Patience::new(IDLE, MOST), hung: Vec::new() }
    }

    /// Kills a VMM, and waits for its end. It is no error if it hangs: then it is among those that do. Blocks.
    pub(crate) fn kill(&mut self, process: ProcessId) -> io::Result<()> {
        if self.has(process) {
            return Ok(());
        }
        match process.kill_patiently(self.patience) {
            Err(error) if error.kind() == io::ErrorKind::TimedOut => self.hung.push(process),
            killed => killed?,
        }
        Ok(())
    }

    /// The same for the VMMs that were started with this configuration.
    pub(crate) fn kill_running_with(&mut self, config: &Path) -> io::Result<()> {
        process_id::vmms_with(config)?.into_iter().try_for_each(|process| self.kill(process))
    }

    /// Whether this one was killed and did not end.
    pub(crate) fn has(&self, process: ProcessId) -> bool {
        self.hung.iter().any(|hung| hung.is(process))
    }

    /// The pids of those that were killed and did not end.
    pub(crate) fn hung(&self) -> Vec<u32> {
        self.hung.iter().map(|process| process.pid).collect()
    }

    /// Forgets those that have ended after all. What they have kept must not have been given up yet.
    pub(crate) fn forget_ended(&mut self) {
        let at_once = Patience::new(Duration::ZERO, Duration::ZERO);
        self.hung.retain(|process| process.kill_patiently(at_once).is_err());
    }
}
