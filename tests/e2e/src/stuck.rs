//! What does not go on for a while: a process that is stopped, a file system that does not answer.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::command::Cmd;
use crate::ctr::Task;
use crate::snapshot::processes_of;

/// A process that is stopped. It goes on when this is dropped.
pub(crate) struct Frozen {
    process: Pid,
}

impl Frozen {
    /// The VMM of a task.
    pub(crate) fn vm_of(task: &Task<'_>) -> Result<Self> {
        Self::of("bulkhead-vmm", task)
    }

    /// The one process of this program and task.
    pub(crate) fn of(program: &str, task: &Task<'_>) -> Result<Self> {
        let found = processes_of(program, task.id())?;
        let [pid] = found.as_slice() else {
            bail!("expected  one {program} of {}\ncame      {found:?}", task.id());
        };
        let process = Pid::from_raw(i32::try_from(*pid).context("a pid")?);
        kill(process, Signal::SIGSTOP).with_context(|| format!("cannot stop {program}"))?;
        Ok(Self { process })
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        // It may have been killed.
        let _ = kill(self.process, Signal::SIGCONT);
    }
}

/// A file system that answers nothing: a FUSE mount of which nobody reads the requests. It goes when this is dropped.
pub(crate) struct Hung {
    place: PathBuf,
    _requests: File,
}

impl Hung {
    /// Mounts it.
    pub(crate) fn mount(place: &Path) -> Result<Self> {
        Cmd::new("modprobe").args(["fuse"]).run()?.succeeds()?;
        let requests = File::options().read(true).write(true).open("/dev/fuse").context("no FUSE")?;
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0,allow_other", requests.as_raw_fd());
        mount(Some("hung"), place, Some("fuse"), MsFlags::empty(), Some(options.as_str()))
            .context("cannot mount FUSE")?;
        Ok(Self { place: place.into(), _requests: requests })
    }
}

impl Drop for Hung {
    fn drop(&mut self) {
        // What is left of it goes with the descriptor.
        let _ = umount2(&self.place, MntFlags::MNT_DETACH);
    }
}
