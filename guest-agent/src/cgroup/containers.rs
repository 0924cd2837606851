//! The cgroup of all containers, and in it one around each container's own.
//!
//! ```text
//! /sys/fs/cgroup/containers                   what the guest can spare (see `guest_reserve`)
//! /sys/fs/cgroup/containers/ctr-ID            what a container leaves to the others of its pod
//! /sys/fs/cgroup/containers/ctr-ID/container  the limits of its spec; its processes
//! ```
//!
//! A container sees the last one only, if it has a cgroup namespace.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use bulkhead_agent_api::PROGRAMS;

use super::{
    Cgroup, CgroupError, ROOT,
    files::{self, parse_number},
    io_error, is_gone, remove_tree, write,
};

/// Most that a cgroup may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ceiling {
    /// Bytes of memory. [`u64::MAX`]: no limit.
    pub memory: u64,
    /// Processes and threads.
    pub tasks: u64,
}

/// The memory of all containers, bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// What is charged to them.
    pub charged: u64,
    /// The part of it that the kernel can drop easily: file pages that were used once, and caches of its own.
    pub droppable: u64,
}

const NO_LIMIT: &str = "max";
/// Of the names of directories around containers' own cgroups.
const PREFIX: &str = "ctr-";

/// The cgroup of all containers.
fn all() -> PathBuf {
    Path::new(ROOT).join("containers")
}

/// The directory around a container's own cgroup. The prefix keeps a container's id apart from the kernel's files.
fn around(container_id: &str) -> PathBuf {
    all().join(format!("{PREFIX}{container_id}"))
}

/// Makes the cgroup of all containers, to which every controller of the kernel applies. Called once, before there are
/// any.
pub fn prepare() -> Result<(), CgroupError> {
    enable_controllers(Path::new(ROOT))?;
    let path = all();
    fs::create_dir(&path).map_err(io_error("creating", &path))?;
    enable_controllers(&path)
}

/// Lets all controllers of a cgroup apply to those below it.
fn enable_controllers(cgroup: &Path) -> Result<(), CgroupError> {
    let available = cgroup.join("cgroup.controllers");
    let names = fs::read_to_string(&available).map_err(io_error("reading", &available))?;
    let enable: Vec<String> = names.split_whitespace().map(|name| format!("+{name}")).collect();
    let control = cgroup.join("cgroup.subtree_control");
    write(&control, &enable.join(" ")).map_err(io_error("writing", &control))
}

/// The sum of the memory limits that containers have by their own specs, and what the VM has for the pages of their
/// programs, bytes. 0: none has a limit.
pub fn promised_memory() -> io::Result<u64> {
    let mut sum = 0_u64;
    for around in each()? {
        match fs::read_to_string(own(&around).join("memory.max")) {
            // The container is deleted meanwhile.
            Err(error) if is_gone(&error) => {}
            limit => sum = sum.saturating_add(limit?.trim_end().parse().unwrap_or(0)),
        }
    }
    Ok(if sum == 0 { 0 } else { sum.saturating_add(PROGRAMS) })
}

/// How a limit of memory is set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// If it is more than before, so that the kernel never has to reclaim memory. No limit is more than any.
    OnlyMore,
    /// Also if it is less than before. The kernel reclaims memory that is used beyond it, and kills processes if that
    /// is not enough.
    Exactly,
}

/// Sets what all containers may use together, and what each container may that has a ceiling.
pub fn set_ceilings(of_all: Ceiling, of_member: Ceiling, change: Change) -> io::Result<()> {
    limit(&all(), of_all, change)?;
    for around in each()? {
        let set = has_ceiling(&around).and_then(|has_ceiling| match has_ceiling {
            true => set_ceiling(&around, of_member, change),
            false => Ok(()),
        });
        match set {
            // The container is deleted meanwhile.
            Err(error) if is_gone(&error) => {}
            set => set?,
        }
    }
    Ok(())
}

/// Sets the mark from which on the kernel reclaims memory of the containers, and slows down what takes more (kernel,
/// admin-guide/cgroup-v2.rst, memory.high). [`u64::MAX`]: no mark.
pub fn set_mark(mark: u64) -> io::Result<()> {
    write(&all().join("memory.high"), &text_of(mark))
}

/// What the containers use.
pub fn usage() -> io::Result<Usage> {
    let charged = parse_number(fs::read_to_string(all().join("memory.current"))?.trim_end());
    let stat = files::flat_keyed(&fs::read_to_string(all().join("memory.stat"))?);
    let number = |key| stat.get(key).copied().unwrap_or(0);
    Ok(Usage { charged, droppable: number("inactive_file") + number("slab_reclaimable") })
}

/// Waits until the containers have been above the mark more often than `seen` times. Returns how often.
pub async fn above_mark(seen: u64) -> io::Result<u64> {
    let more = |events: &files::Numbers| events.get("high").copied().filter(|times| *times > seen);
    files::watch(&all().join("memory.events"), more).await
}

fn limit(cgroup: &Path, Ceiling { memory, tasks }: Ceiling, change: Change) -> io::Result<()> {
    let file = cgroup.join("memory.max");
    match change {
        Change::OnlyMore => raise(&file, memory)?,
        Change::Exactly => write(&file, &text_of(memory))?,
    }
    write(&cgroup.join("pids.max"), &text_of(tasks))
}

/// Writes a limit, unless the present one is as high.
fn raise(file: &Path, limit: u64) -> io::Result<()> {
    let present = parse_number(fs::read_to_string(file)?.trim_end());
    if limit > present { write(file, &text_of(limit)) } else { Ok(()) }
}

fn text_of(limit: u64) -> String {
    if limit == u64::MAX { NO_LIMIT.to_owned() } else { limit.to_string() }
}

/// The cgroups around those of containers. Without one that is being removed, and is empty already.
fn each() -> io::Result<Vec<PathBuf>> {
    each_below(&all())
}

/// Leaves out a container that could be removed in part only, and what a container has made beside those: a privileged
/// one that sees all cgroups can. Otherwise no container could be created any more.
fn each_below(all: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(all)? {
        let entry = entry?;
        let is_container = entry.file_name().as_encoded_bytes().starts_with(PREFIX.as_bytes());
        if is_container && own(&entry.path()).join("memory.max").exists() {
            found.push(entry.path());
        }
    }
    Ok(found)
}

fn has_ceiling(around: &Path) -> io::Result<bool> {
    Ok(fs::read_to_string(around.join("pids.max"))?.trim_end() != NO_LIMIT)
}

/// A container with a memory limit of its own is held to that, and here to this much more for the pages of its programs
/// (`kernel-config/patches/fuse-program-pages.patch`): the guest has been given the memory for both.
fn ceiling_of(around: &Path, ceiling: Ceiling) -> io::Result<Ceiling> {
    let own_limit = fs::read_to_string(own(around).join("memory.max"))?;
    let memory = match own_limit.trim_end() {
        NO_LIMIT => ceiling.memory,
        limit => parse_number(limit).saturating_add(PROGRAMS),
    };
    Ok(Ceiling { memory, ..ceiling })
}

fn set_ceiling(around: &Path, ceiling: Ceiling, change: Change) -> io::Result<()> {
    limit(around, ceiling_of(around, ceiling)?, change)
}

/// A container's own cgroup, by the one around it.
fn own(around: &Path) -> PathBuf {
    around.join("container")
}

/// Whether a limit says how a cgroup shares with its neighbours, rather than how much it may use. A container's own
/// cgroup has no neighbours; the one around it has.
fn is_about_neighbours(file: &str) -> bool {
    const FILES: [&str; 5] = ["cpu.weight", "cpu.weight.nice", "cpu.idle", "memory.low", "memory.min"];
    FILES.contains(&file)
}

impl Cgroup {
    /// The directory of the cgroup of a container, whose id is a plain name.
    pub fn path_of(container_id: &str) -> PathBuf {
        own(&around(container_id))
    }

    /// Makes the cgroups of a container.
    pub fn for_container(container_id: &str) -> Result<Self, CgroupError> {
        let around = around(container_id);
        match fs::create_dir(&around) {
            // A container of this id could be removed in part only.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                remove_tree(&around).map_err(io_error("removing", &around))?;
                fs::create_dir(&around).map_err(io_error("creating", &around))?;
            }
            other => other.map_err(io_error("creating", &around))?,
        }
        let created = enable_controllers(&around).and_then(|()| Self::create(own(&around)));
        match created {
            Ok(cgroup) => Ok(Self { around: Some(around), ..cgroup }),
            Err(error) => {
                let _ = fs::remove_dir(&around);
                Err(error)
            }
        }
    }

    /// Holds a container of a pod to a ceiling. Again after its own limits have changed.
    pub fn hold(&self, ceiling: Ceiling) -> Result<(), CgroupError> {
        let Some(around) = &self.around else { return Ok(()) };
        set_ceiling(around, ceiling, Change::Exactly).map_err(io_error("limiting", around))
    }

    /// Takes the memory ceiling away until the next [`Self::hold`].
    pub fn lift_memory(&self) -> Result<(), CgroupError> {
        let Some(around) = &self.around else { return Ok(()) };
        write(&around.join("memory.max"), NO_LIMIT).map_err(io_error("limiting", around))
    }

    /// The topmost of the container's directories.
    pub(super) fn top(&self) -> &Path {
        self.around.as_deref().unwrap_or(self.path())
    }

    /// Writes to a file of the container's own cgroup, and to that of the one around it if it is about neighbours.
    pub(super) fn write(&self, file: &str, value: &str) -> io::Result<()> {
        write(&self.path().join(file), value)?;
        match &self.around {
            Some(around) if is_about_neighbours(file) => write(&around.join(file), value),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_raised_and_never_lowered() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("memory.max");
        // What is written: the kernel replaces a limit, and this file keeps the end of a longer line.
        let written = |limit| {
            fs::write(&file, "8192\n").unwrap();
            raise(&file, limit).unwrap();
            fs::read_to_string(&file).unwrap()
        };
        assert_eq!(written(8193), "8193\n");
        assert_eq!(written(8192), "8192\n");
        assert_eq!(written(1), "8192\n");
        assert!(written(u64::MAX).starts_with("max"));
        fs::write(&file, "max\n").unwrap();
        raise(&file, 9000).unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "max\n");
    }

    #[test]
    fn what_is_no_container_does_not_keep_the_limits_from_being_set() {
        let all = tempfile::tempdir().unwrap();
        for name in ["ctr-whole/container", "ctr-removed-in-part", "made-by-a-container/container"] {
            fs::create_dir_all(all.path().join(name)).unwrap();
        }
        for name in
            ["ctr-whole/container/memory.max", "made-by-a-container/container/memory.max", "memory.max"]
        {
            fs::write(all.path().join(name), "max\n").unwrap();
        }
        assert_eq!(each_below(all.path()).unwrap(), [all.path().join("ctr-whole")]);
    }
}
