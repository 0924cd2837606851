//! Pause, the process of a pod's sandbox container. It only reaps the orphans of its pid namespace, until SIGTERM.

use std::{convert::Infallible, io, process};

use nix::sys::{
    prctl,
    signal::{SigSet, Signal},
};

use crate::syscall;

/// A process that is ready to hold its pod.
pub(super) struct Pause {
    awaited: SigSet,
}

impl Pause {
    /// Blocks the signals, so that they stay pending for [`Pause::run`]. The kernel drops signals to the first process
    /// of a pid namespace that it neither blocks nor handles.
    pub(super) fn new() -> io::Result<Self> {
        // The agent's binary has no name of its own for the stage.
        prctl::set_name(c"pause")?;
        let mut awaited = SigSet::empty();
        for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGCHLD] {
            awaited.add(signal);
        }
        awaited.thread_block()?;
        Ok(Self { awaited })
    }

    /// Ends with SIGTERM or SIGINT, and the pod with it.
    pub(super) fn run(self) -> Result<Infallible, super::SetupError> {
        loop {
            match self.awaited.wait() {
                Ok(Signal::SIGCHLD) => while let Ok(Some(_)) = syscall::reap_one() {},
                Ok(_) => process::exit(0),
                Err(error) => {
                    return Err(super::SetupError { step: "pause".into(), cause: error.to_string() });
                }
            }
        }
    }
}
