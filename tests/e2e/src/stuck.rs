//! What does not go on for a while: a process that is stopped, a file system that does not answer.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::command::Cmd;
use crate::ctr::Task;
use crate::snapshot::the_process_of;

/// Processes that are stopped. They go on when this is dropped.
pub(crate) struct Frozen {
    processes: Vec<Pid>,
}

impl Frozen {
    /// The VMM of a task.
    pub(crate) fn vm_of(task: &Task<'_>) -> Result<Self> {
        Self::of("bulkhead-vmm", task)
    }

    /// The VMM of a pod.
    pub(crate) fn vm_of_pod(id: &str) -> Result<Self> {
        let mut frozen = Self { processes: Vec::new() };
        frozen.stop("bulkhead-vmm", id)?;
        Ok(frozen)
    }

    /// The one process of this program and task.
    pub(crate) fn of(program: &str, task: &Task<'_>) -> Result<Self> {
        Self::all_of(&[program], task)
    }

    /// The one process of each of these programs and this task, stopped in this order.
    pub(crate) fn all_of(programs: &[&str], task: &Task<'_>) -> Result<Self> {
        let mut frozen = Self { processes: Vec::new() };
        for program in programs {
            frozen.stop(program, task.id())?;
        }
        Ok(frozen)
    }

    fn stop(&mut self, program: &str, id: &str) -> Result<()> {
        let process = Pid::from_raw(i32::try_from(the_process_of(program, id)?).context("a pid")?);
        kill(process, Signal::SIGSTOP).with_context(|| format!("cannot stop {program}"))?;
        self.processes.push(process);
        Ok(())
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        for process in &self.processes {
            // It may have been killed.
            let _ = kill(*process, Signal::SIGCONT);
        }
    }
}

/// A file system that answers nothing: a FUSE mount of which nobody reads the requests. It goes when this is dropped,
/// and then what waits for it fails.
pub(crate) struct Hung {
    place: PathBuf,
    requests: File,
}

impl Hung {
    /// Mounts it.
    pub(crate) fn mount(place: &Path) -> Result<Self> {
        Cmd::new("modprobe").args(["fuse"]).run()?.succeeds()?;
        let requests = File::options().read(true).write(true).open("/dev/fuse").context("no FUSE")?;
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0,allow_other", requests.as_raw_fd());
        mount(Some("hung"), place, Some("fuse"), MsFlags::empty(), Some(options.as_str()))
            .context("cannot mount FUSE")?;
        Ok(Self { place: place.into(), requests })
    }

    /// Its requests, for a server that answers some of them. The file system goes when this is closed, too.
    pub(crate) fn requests(&self) -> Result<File> {
        self.requests.try_clone().context("cannot copy a descriptor of FUSE")
    }
}

impl Drop for Hung {
    fn drop(&mut self) {
        // What is left of it goes with the descriptor.
        let _ = umount2(&self.place, MntFlags::MNT_DETACH);
    }
}
