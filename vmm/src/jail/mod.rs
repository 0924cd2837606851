//! The jail: what is left to a VMM process that its guest has taken over.
//!
//! Its walls do not rely on one another. They are put up in this order, each as soon as what it forbids is no longer
//! needed, and all before the guest's first instruction:
//!
//! 1. [`harden`], first of all: the process gains nothing by executing a program, leaves no core, and has no descriptor
//!    that it was not given.
//! 2. [`enter`], when whatever the VM needs of the host is open: the process keeps no file of the host but those that it
//!    serves, by two walls that know nothing of each other, and no capability but those for serving them.
//! 3. [`enter_thread`], in each thread ([`spawn`]) before it looks at anything of the guest: it keeps the user, the
//!    capabilities, the files and the [system calls](syscalls) that its duty takes.

use std::{
    io::{self, Write},
    path::{Path, PathBuf},
};

use nix::sched::{CloneFlags, unshare};

pub(crate) mod capabilities;
pub(crate) mod landlock;
mod process;
mod root;
mod seccomp;
mod syscalls;
#[cfg(test)]
pub(crate) mod testing;
mod thread;
mod user;

pub use landlock::LandlockError;
pub use process::harden;
pub use root::Root;
pub use seccomp::FilterError;
pub use thread::{ThreadError, spawn};

/// Why a wall does not stand. There is no VM without it.
#[derive(Debug, thiserror::Error)]
pub enum JailError {
    #[error("cannot enter the jail: cannot close the descriptors that the VMM was started with")]
    Descriptors(#[source] io::Error),
    #[error("cannot enter the jail: cannot set {what}")]
    Set { what: &'static str, source: io::Error },
    #[error("cannot enter the jail: cannot take {path} along")]
    Source { path: PathBuf, source: io::Error },
    #[error("cannot enter the jail: cannot make {what}")]
    Root { what: &'static str, source: io::Error },
    #[error("cannot enter the jail: no rules for Landlock")]
    Landlock(#[from] LandlockError),
    #[error("cannot enter the jail: no filter of system calls for the thread {thread}")]
    Filter { thread: &'static str, source: FilterError },
}

/// What a thread is there for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Duty {
    /// Waits for the VM's end and serves the control socket: the process's first thread.
    Control,
    /// The same for a VM that is to be saved, which it does at the end.
    Saver,
    /// Runs a vCPU and answers its exits.
    Vcpu,
    /// Serves the entropy device.
    Rng,
    /// Serves the vsock device.
    Vsock,
    /// Serves a network card.
    Net,
    /// Serves files.
    Fs,
    /// Gives memory back.
    Balloon,
    /// Plugs memory, and gives back what is unplugged.
    Mem,
}

impl Duty {
    /// Of its thread.
    pub fn name(self) -> &'static str {
        match self {
            Self::Control => "control",
            Self::Saver => "saver",
            Self::Vcpu => "vcpu",
            Self::Rng => "rng",
            Self::Vsock => "vsock",
            Self::Net => "net",
            Self::Fs => "fs",
            Self::Balloon => "balloon",
            Self::Mem => "mem",
        }
    }

    /// Whether it takes files of the host.
    fn serves_files(self) -> bool {
        match self {
            Self::Fs => true,
            Self::Control
            | Self::Saver
            | Self::Vcpu
            | Self::Rng
            | Self::Vsock
            | Self::Net
            | Self::Balloon
            | Self::Mem => false,
        }
    }

    /// Whether it takes root's user: files are made for all users, and the sockets to which the guest connects are root's.
    fn is_roots(self) -> bool {
        self.serves_files() || self == Self::Vsock
    }
}

/// Closes the process in, with the directories `shares` and the sockets that belong to `vsock`: to be called when all is
/// open that the VM needs of its host, and before there is any thread.
pub fn enter(shares: &[&Path], vsock: &Path) -> Result<Root, JailError> {
    let root = Root::enter(shares, vsock)?;
    capabilities::keep_those_for_files()?;
    if let Some(missing) = landlock::keep_to(&root.shares)? {
        // Nobody is left to be told if stderr is closed.
        let _ = writeln!(io::stderr(), "{missing}");
    }
    Ok(root)
}

/// Closes the calling thread in, for ever.
pub fn enter_thread(duty: Duty) -> Result<(), JailError> {
    if duty.serves_files() {
        // Each file that is made has its caller's umask, and all threads of a process have one otherwise.
        unshare(CloneFlags::CLONE_FS)
            .map_err(|error| JailError::Set { what: "a umask of its own", source: error.into() })?;
    }
    user::leave_root(duty)?;
    capabilities::keep_those_for(duty)?;
    landlock::keep_for(duty)?;
    seccomp::confine(duty)
}
