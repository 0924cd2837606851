//! The proc file system of a container's own pid namespace, for containers that join the namespace later.
//!
//! A proc file system shows the pid namespace of the process that mounts it. In a pid namespace that a container joins,
//! other processes may trace it. So the process that builds the container's root stays outside of this pid namespace,
//! and binds the proc file system that was made before.

use std::{
    fs, io,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use nix::{
    fcntl::{OFlag, open},
    mount::{MntFlags, umount2},
    sys::stat::Mode,
};

use crate::syscall;

/// Where such file systems are in the guest.
const DIRECTORY: &str = "/run/bulkhead/proc";

pub(super) struct ProcMount {
    place: PathBuf,
    state: Mutex<State>,
}

enum State {
    /// The container has no pid namespace of its own, or is deleted.
    None,
    /// No container has joined yet.
    Detached(OwnedFd),
    Attached,
}

impl ProcMount {
    pub(super) fn new(container_id: &str, proc: Option<OwnedFd>) -> Self {
        let place = Path::new(DIRECTORY).join(container_id);
        Self { place, state: Mutex::new(proc.map_or(State::None, State::Detached)) }
    }

    /// Where it is mounted in the guest, from the first call on.
    pub(super) fn place(&self) -> io::Result<Option<&Path>> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match &*state {
            State::None => return Ok(None),
            State::Detached(proc) => {
                fs::create_dir_all(&self.place)?;
                let place = open(&self.place, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty())?;
                syscall::move_mount(proc.as_fd(), place.as_fd())?;
                *state = State::Attached;
            }
            State::Attached => {}
        }
        Ok(Some(&self.place))
    }

    /// Leaves nothing of it. The container is deleted, and a later one may have its id, while somebody may still hold
    /// this one.
    pub(super) fn remove(&self) -> io::Result<()> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match std::mem::replace(&mut *state, State::None) {
            State::None | State::Detached(_) => Ok(()),
            State::Attached => {
                umount2(&self.place, MntFlags::MNT_DETACH)?;
                fs::remove_dir(&self.place)
            }
        }
    }
}

impl Drop for ProcMount {
    fn drop(&mut self) {
        if let Err(error) = self.remove() {
            eprintln!("bulkhead-agent: removing {}: {error}", self.place.display());
        }
    }
}
