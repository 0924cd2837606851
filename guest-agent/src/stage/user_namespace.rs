//! Containers in a user namespace. Their root is another user in the guest, and has its rights in the container's
//! namespaces only.
//!
//! The container's init is cloned into the new user namespace together with its other namespaces, which belong to the
//! user namespace then. The stage, which has the rights of the guest's root, maps the ids. It also does before what the
//! container's root may not.

use std::{
    fs::{self, File},
    io::{self, IsTerminal, PipeReader, PipeWriter, Read, Write},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    process,
};

use nix::{
    sys::{
        resource::{getrlimit, setrlimit},
        stat::{SFlag, fstat},
    },
    unistd::{Gid, Uid, fchown, setresgid, setresuid},
};
use rustix::io::Errno;

use super::{SetupError, Step, process_attributes};
use crate::{
    stage_config::{IdMappings, IdRange, ProcessConfig, outside},
    syscall::{self, Cloned},
};

/// What holds a process back until its ids are mapped.
pub(super) struct Gate {
    reader: PipeReader,
    writer: PipeWriter,
}

impl Gate {
    pub(super) fn new() -> io::Result<Self> {
        let (reader, writer) = io::pipe()?;
        Ok(Self { reader, writer })
    }

    pub(super) fn open(mut self) -> io::Result<()> {
        self.writer.write_all(&[0])
    }

    /// Waits until it is open. An error: the other process has ended before.
    pub(super) fn pass(self) -> io::Result<()> {
        let Self { mut reader, writer } = self;
        drop(writer);
        reader.read_exact(&mut [0])
    }
}

/// What only the guest's root can do for a process of the container: raise the limits that it may set itself, and give
/// it the standard streams.
pub(super) fn prepare(process: &ProcessConfig, ids: &IdMappings) -> Result<(), SetupError> {
    for limit in &process.rlimits {
        let resource = process_attributes::resource(limit.typ());
        let raised = getrlimit(resource).and_then(|(soft, hard)| match limit.hard() {
            wanted if wanted > hard => setrlimit(resource, soft, wanted),
            _ => Ok(()),
        });
        raised.step(|| format!("process.rlimits[{}]", limit.typ()))?;
    }
    let user = id("process.user.uid", &ids.users, process.uid)?;
    let group = id("process.user.gid", &ids.groups, process.gid)?;
    let (stdin, stdout, stderr) = (io::stdin(), io::stdout(), io::stderr());
    for stream in [stdin.as_fd(), stdout.as_fd(), stderr.as_fd()] {
        give(stream, user, group).step(|| "process.user: giving it the standard streams".into())?;
    }
    Ok(())
}

fn id(field: &str, ranges: &[IdRange], id: u32) -> Result<u32, SetupError> {
    outside(ranges, id)
        .ok_or(Errno::INVAL)
        .step(|| format!("{field} {id}: the user namespace does not have it"))
}

fn give(stream: BorrowedFd<'_>, user: u32, group: u32) -> nix::Result<()> {
    let is_fifo = SFlag::from_bits_truncate(fstat(stream)?.st_mode) & SFlag::S_IFMT == SFlag::S_IFIFO;
    // Not the guest's /dev/null.
    if is_fifo || stream.is_terminal() {
        fchown(stream, Some(Uid::from_raw(user)), Some(Gid::from_raw(group)))?;
    }
    Ok(())
}

/// Gives the container's root what it takes to divide the container's cgroup (the kernel's cgroup-v2, "Delegation").
pub(super) fn delegate(cgroup: &Path, ids: &IdMappings) -> Result<(), SetupError> {
    const FILES: &str = "/sys/kernel/cgroup/delegate";
    let delegated = || -> io::Result<()> {
        let (user, group) = (outside(&ids.users, 0), outside(&ids.groups, 0));
        std::os::unix::fs::chown(cgroup, user, group)?;
        for name in fs::read_to_string(FILES)?.lines() {
            match std::os::unix::fs::chown(cgroup.join(name), user, group) {
                // Of a controller that the cgroup does not have.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                other => other?,
            }
        }
        Ok(())
    };
    delegated().step(|| format!("giving {} to the container's root", cgroup.display()))
}

/// Maps the ids of the user namespace of a process.
pub(super) fn map(pid: i32, ids: &IdMappings) -> Result<(), SetupError> {
    for (file, field, ranges) in
        [("uid_map", "linux.uidMappings", &ids.users), ("gid_map", "linux.gidMappings", &ids.groups)]
    {
        let lines: String = ranges
            .iter()
            .map(|IdRange { inside, outside, length }| format!("{inside} {outside} {length}\n"))
            .collect();
        process_attributes::write(format!("/proc/{pid}/{file}"), &lines).step(|| field.into())?;
    }
    Ok(())
}

/// Makes a user namespace with these ids, in which no process stays. `cgroup` is where one is for a moment.
pub(super) fn with_ids(ids: &IdMappings, cgroup: &Path) -> Result<OwnedFd, SetupError> {
    let made = || "making a user namespace".to_owned();
    let gate = Gate::new().step(made)?;
    let cgroup = File::open(cgroup).step(made)?;
    match syscall::clone_sibling_into(libc::CLONE_NEWUSER as u64, cgroup.as_fd()).step(made)? {
        Cloned::Parent(pid) => {
            map(pid, ids)?;
            let namespace = File::open(format!("/proc/{pid}/ns/user")).step(made)?;
            // Without the gate the process ends.
            drop(gate);
            Ok(namespace.into())
        }
        Cloned::Child(_) => {
            let _ = gate.pass();
            process::exit(0)
        }
    }
}

/// Makes the caller, which is in the container's user namespace, its root.
pub(super) fn become_root() -> Result<(), SetupError> {
    let (user, group) = (Uid::from_raw(0), Gid::from_raw(0));
    setresgid(group, group, group).step(|| "becoming the root of the user namespace".into())?;
    setresuid(user, user, user).step(|| "becoming the root of the user namespace".into())
}
