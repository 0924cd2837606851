//! The host lacks something: room in /run, descriptors for the shim, memory or processes for the pod's cgroup, an
//! answer of a file system.

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use nix::sys::statvfs::statvfs;

use super::lifecycle::{FaultInjector, Step};
use super::processes::{APPEARS, MOMENTS, VMM, appeared};
use super::{Fault, TestBed};
use crate::command::{Cmd, wait_until};
use crate::ctr::NAMESPACE;
use crate::fixtures::scratch;
use crate::stuck::Hung;

const RUN: &str = "/run";
/// How long a client waits for a container with a volume that hangs.
const GIVES_UP: Duration = Duration::from_secs(15);

/// What a full /run still has room for, KiB.
const ROOM: [u64; 3] = [0, 16, 128];
/// How many more descriptors a shim may open that is short of them.
pub(crate) const MORE: [u64; 3] = [0, 1, 3];

pub(super) fn try_all(bed: &mut TestBed<'_>) -> Result<()> {
    let shim = bed.host().runtime().shim();
    for moment in MOMENTS {
        for room_kib in ROOM {
            let fault = Fault::new("/run", &format!("ENOSPC, {room_kib} KiB left"), moment);
            bed.try_fault(&fault, &mut Shortage::of(Lack::Room { room_kib }, moment))?;
        }
        for more in MORE {
            let fault = Fault::new(shim, &format!("EMFILE, {more} more descriptors"), moment);
            bed.try_fault(&fault, &mut Shortage::of(Lack::Descriptors { shim, more }, moment))?;
        }
        for (file, value) in [("memory.max", "1M"), ("pids.max", "1")] {
            let fault = Fault::new("cgroup of the pod", &format!("{file} = {value}"), moment);
            bed.try_fault(&fault, &mut Shortage::of(Lack::OfCgroup { file, value }, moment))?;
        }
    }
    hung_volume(bed)
}

/// A volume of the container is on a file system that does not answer.
fn hung_volume(bed: &mut TestBed<'_>) -> Result<()> {
    let directory = scratch()?;
    let source = bed.source()?.with_bind(directory.path(), "/volume")?;
    let fault = Fault::new("file system of a volume", "no answer", Step::Create);
    let mut injector = HungVolume { place: directory.path().to_owned(), hung: None, injected: false };
    bed.try_fault_with(&source, &fault, &mut injector)?;
    Ok(())
}

struct HungVolume {
    place: PathBuf,
    hung: Option<Hung>,
    injected: bool,
}

impl FaultInjector for HungVolume {
    fn before(&mut self, _: &str, step: Step) -> Result<()> {
        if step == Step::Create {
            self.hung = Some(Hung::mount(&self.place)?);
            self.injected = true;
        }
        Ok(())
    }

    fn gives_up(&self, step: Step) -> Option<Duration> {
        (step == Step::Create).then_some(GIVES_UP)
    }

    /// It still hangs when the container is removed, and is gone when the host is looked at.
    fn removed(&mut self) {
        self.hung = None;
    }

    fn was_injected(&self) -> Result<bool> {
        Ok(self.injected)
    }
}

#[derive(Clone, Copy)]
pub(crate) enum Lack {
    /// /run is full, but for so much.
    Room { room_kib: u64 },
    /// The shim cannot open more than so many more descriptors.
    Descriptors { shim: &'static str, more: u64 },
    /// A limit of the pod's cgroup on the host.
    OfCgroup { file: &'static str, value: &'static str },
}

/// Something that the host lacks from a request on, until the life of the container is over.
pub(crate) struct Shortage {
    lack: Lack,
    moment: Step,
    thread: Option<JoinHandle<Result<Restore>>>,
    restore: Option<Restore>,
    injected: bool,
}

/// How a shortage ends.
enum Restore {
    Nothing,
    /// The size that /run had, bytes.
    Size(u64),
    /// The limit of descriptors that a shim had.
    Limit {
        pid: u32,
        limit: String,
    },
}

impl Shortage {
    pub(crate) fn of(lack: Lack, moment: Step) -> Self {
        Self { lack, moment, thread: None, restore: None, injected: false }
    }
}

impl Lack {
    fn begin(self, id: &str) -> Result<Restore> {
        match self {
            Self::Room { room_kib } => {
                let now = statvfs(RUN).context("cannot look at /run")?;
                let kib = |blocks: u64| blocks * now.fragment_size() / 1024;
                let used = kib(now.blocks() - now.blocks_free());
                resize(used + room_kib)?;
                Ok(Restore::Size(kib(now.blocks())))
            }
            Self::Descriptors { shim, more } => {
                let pid = appeared(shim, id)?;
                // Without a descriptor for its client's connection, it would never hear of the request.
                let is_gone = || !Path::new("/proc").join(pid.to_string()).exists();
                wait_until("a client of the shim", APPEARS, || Ok(has_client(pid) || is_gone()))?;
                match limit_descriptors(pid, more) {
                    // It has ended.
                    Err(_) if is_gone() => Ok(Restore::Nothing),
                    limited => limited,
                }
            }
            Self::OfCgroup { file, value } => {
                appeared(VMM, id)?;
                limit_cgroup(id, file, value)?;
                Ok(Restore::Nothing)
            }
        }
    }
}

/// Whether a process has accepted a connection to a Unix socket with a name (proc_pid_net(5), unix).
fn has_client(pid: u32) -> bool {
    let files = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let sockets: Vec<_> = files.filter_map(|file| fs::read_link(file.path()).ok()).collect();
    let table = fs::read_to_string("/proc/net/unix").unwrap_or_default();
    table.lines().any(|line| match line.split_whitespace().collect::<Vec<_>>().as_slice() {
        [_, _, _, flags, _, _, inode, _] => {
            let socket = format!("socket:[{inode}]");
            // Other flags are those of a socket that listens.
            *flags == "00000000" && sockets.iter().any(|own| *own == Path::new(&socket))
        }
        _ => false,
    })
}

/// Lets a process open so many more descriptors than it has.
fn limit_descriptors(pid: u32, more: u64) -> Result<Restore> {
    let limits = fs::read_to_string(format!("/proc/{pid}/limits"))?;
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"));
    let words = line.map(|line| line.split_whitespace().take(2).collect::<Vec<_>>().join(":"));
    let open = u64::try_from(fs::read_dir(format!("/proc/{pid}/fd"))?.count())?;
    limit(pid, &format!("{}:", open + more))?;
    Ok(Restore::Limit { pid, limit: words.context("no limit of open files")? })
}

/// Sets a limit of a pod's cgroup, whose parent has controllers only if a container has limits.
fn limit_cgroup(id: &str, file: &str, value: &str) -> Result<()> {
    let parent = Path::new("/sys/fs/cgroup").join(NAMESPACE);
    let write = |path: &Path, value: &str| match File::options().write(true).open(path) {
        Ok(mut file) => file.write_all(value.as_bytes()),
        Err(error) => Err(error),
    };
    for (path, value) in
        [(parent.join("cgroup.subtree_control"), "+memory +pids"), (parent.join(id).join(file), value)]
    {
        match write(&path, value) {
            // The pod has ended.
            Err(error) if error.kind() == ErrorKind::NotFound && !parent.join(id).exists() => return Ok(()),
            result => result.with_context(|| format!("cannot write {}", path.display()))?,
        }
    }
    Ok(())
}

impl Restore {
    fn end(self) -> Result<()> {
        match self {
            Self::Nothing => Ok(()),
            Self::Size(kib) => resize(kib),
            // The shim may have ended.
            Self::Limit { pid, limit: before } => {
                let _ = limit(pid, &before);
                Ok(())
            }
        }
    }
}

impl FaultInjector for Shortage {
    fn before(&mut self, id: &str, step: Step) -> Result<()> {
        if step != self.moment {
            return Ok(());
        }
        self.injected = true;
        let lack = self.lack;
        // What it is about appears while the request goes on.
        if step == Step::Create && !matches!(lack, Lack::Room { .. }) {
            let id = id.to_owned();
            self.thread = Some(thread::spawn(move || lack.begin(&id)));
            return Ok(());
        }
        self.restore = Some(lack.begin(id)?);
        Ok(())
    }

    fn end(&mut self) -> Result<()> {
        if let Some(thread) = self.thread.take() {
            let begun = thread.join().map_err(|_| anyhow!("the thread of a shortage panicked"))?;
            self.restore = Some(begun?);
        }
        self.restore.take().map_or(Ok(()), Restore::end)
    }

    fn was_injected(&self) -> Result<bool> {
        Ok(self.injected)
    }
}

fn resize(kib: u64) -> Result<()> {
    let options = format!("remount,size={kib}k");
    Cmd::new("mount").args(["-o", &options, RUN]).run()?.succeeds()?;
    Ok(())
}

fn limit(pid: u32, limit: &str) -> Result<()> {
    let (pid, limit) = (pid.to_string(), format!("--nofile={limit}"));
    Cmd::new("prlimit").args(["--pid", &pid, &limit]).run()?.succeeds()?;
    Ok(())
}
