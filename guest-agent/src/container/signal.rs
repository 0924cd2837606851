//! Signals to a container, and the list of its processes.

use super::{error::ContainerError, instance::Container, process::Process};
use crate::{cgroup::CgroupError, syscall};

/// The last signal of Linux, SIGRTMAX.
const LAST_SIGNAL: u32 = 64;

impl Container {
    /// Sends a signal to the process of this id ([`Container::process`]), or to all processes of the container.
    pub fn signal(&self, exec_id: &str, signal: u32, all: bool) -> Result<(), ContainerError> {
        if signal > LAST_SIGNAL {
            return Err(ContainerError::Signal(signal));
        }
        if all { self.signal_all(signal) } else { self.process(exec_id)?.signal(signal) }
    }

    fn signal_all(&self, signal: u32) -> Result<(), ContainerError> {
        if signal == libc::SIGKILL as u32 {
            // In one step, so that nothing escapes by forking.
            return Ok(self.cgroup.kill()?);
        }
        for pid in self.cgroup.pids()? {
            match send(pid as i32, signal) {
                Err(ContainerError::Finished) => {}
                other => other?,
            }
        }
        Ok(())
    }

    /// Its processes, in the agent's pid namespace.
    pub fn pids(&self) -> Result<Vec<u32>, CgroupError> {
        self.cgroup.pids()
    }
}

impl Process {
    fn signal(&self, signal: u32) -> Result<(), ContainerError> {
        // Until the reaper has reported the end, no other process can have this id: nobody else waits for the process.
        if self.has_ended() {
            return Err(ContainerError::Finished);
        }
        send(self.pid(), signal)
    }
}

fn send(pid: i32, signal: u32) -> Result<(), ContainerError> {
    syscall::kill(pid, signal).map_err(|source| match source.raw_os_error() {
        Some(libc::ESRCH) => ContainerError::Finished,
        _ => ContainerError::Io { action: "sending a signal", source },
    })
}
