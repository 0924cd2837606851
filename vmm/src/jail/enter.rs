//! Entering the jail: first the process, then each of its threads.

use std::{
    io::{self, Write},
    path::Path,
};

use nix::sched::{CloneFlags, unshare};

use super::{
    ThreadRole, capabilities, credentials,
    error::JailError,
    landlock,
    root::{self, Root},
    seccomp,
};

/// Confines the process to the directories `shares` and to the host's sockets that belong to `vsock`.
///
/// Call this after everything that the VM needs from its host is open, and before any thread is started.
pub fn enter(shares: &[&Path], vsock: &Path) -> Result<Root, JailError> {
    let root = Root::enter(shares, vsock)?;
    capabilities::keep_those_for_files()?;
    if let Some(missing) = landlock::restrict_process(&root.shares)? {
        // If stderr is closed, nobody reads this warning.
        let _ = writeln!(io::stderr(), "{missing}");
    }
    Ok(root)
}

/// Confines the calling thread to what its role needs. This cannot be undone.
pub fn enter_thread(role: ThreadRole) -> Result<(), JailError> {
    if role.serves_files() {
        // The file server sets the umask of the caller for each file that it creates. Threads share the
        // umask until they unshare it.
        unshare(CloneFlags::CLONE_FS)
            .map_err(|error| JailError::Set { what: "a separate umask", source: error.into() })?;
    }
    if role.connects_to_sockets() {
        root::leave_all_but_sockets()
            .map_err(|source| JailError::Root { what: "the thread that connects to sockets", source })?;
    }
    credentials::leave_root(role)?;
    capabilities::keep_those_for(role)?;
    landlock::restrict_thread(role)?;
    seccomp::install_filter(role).map_err(|source| JailError::Filter { thread: role.name(), source })
}
