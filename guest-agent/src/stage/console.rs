//! The terminal of a container's process: a pseudoterminal of the container's own devpts, so that its name is correct
//! in the container.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
};

use nix::{
    fcntl::{OFlag, OpenHow, ResolveFlag, openat2},
    sys::statfs::{DEVPTS_SUPER_MAGIC, fstatfs},
    unistd::{dup2_stderr, dup2_stdin, dup2_stdout},
};
use rustix::{
    process::ioctl_tiocsctty,
    pty::{OpenptFlags, ioctl_tiocgptpeer, unlockpt},
};

use super::{SetupError, Step, errno_text, paths};
use crate::{stage_config::WindowSize, terminal::set_size};

/// A pair that nothing uses yet.
pub(super) struct Console {
    master: OwnedFd,
    slave: OwnedFd,
}

impl Console {
    /// Makes a pair in the devpts that is at /dev/pts in `root`.
    pub(super) fn open(root: impl AsFd, size: WindowSize) -> Result<Self, SetupError> {
        let master = open_master(root)
            .map_err(|error| errno_text(&error))
            .step(|| "process.terminal: /dev/pts/ptmx".into())?;
        let prepared = || -> io::Result<OwnedFd> {
            unlockpt(&master)?;
            set_size(&master, size)?;
            // The slave of this very master: its name could lead to anything.
            let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
            Ok(ioctl_tiocgptpeer(&master, flags)?)
        };
        let slave = prepared().step(|| "process.terminal".into())?;
        Ok(Self { master, slave })
    }

    pub(super) fn slave(&self) -> BorrowedFd<'_> {
        self.slave.as_fd()
    }

    /// Makes the slave the caller's standard streams and the terminal of its session, which it must lead. Returns
    /// the master.
    pub(super) fn take(self) -> Result<OwnedFd, SetupError> {
        let taken = || -> io::Result<()> {
            ioctl_tiocsctty(&self.slave)?;
            dup2_stdin(&self.slave)?;
            dup2_stdout(&self.slave)?;
            dup2_stderr(&self.slave)?;
            Ok(())
        };
        taken().step(|| "process.terminal".into())?;
        Ok(self.master)
    }
}

/// In a running container, anything can be at /dev/pts, to deceive this process. So only the ptmx of a devpts is
/// opened: nobody can create files in a devpts, and no link or mount in it is followed.
fn open_master(root: impl AsFd) -> io::Result<OwnedFd> {
    let directory = paths::open(root, Path::new("/dev/pts"))?;
    if fstatfs(&directory)?.filesystem_type() != DEVPTS_SUPER_MAGIC {
        return Err(io::Error::other("/dev/pts is not a devpts file system"));
    }
    let how = OpenHow::new().flags(OFlag::O_RDWR | OFlag::O_NOCTTY | OFlag::O_CLOEXEC).resolve(
        ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_XDEV | ResolveFlag::RESOLVE_NO_SYMLINKS,
    );
    Ok(openat2(&directory, "ptmx", how)?)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};

    use nix::{sys::stat::Mode, unistd::mkfifo};

    use super::*;

    #[test]
    fn what_is_no_devpts_is_not_opened() {
        let root = tempfile::tempdir().unwrap();
        let refusal = || {
            let error = Console::open(File::open(root.path()).unwrap(), WindowSize::default()).err();
            error.unwrap().to_string()
        };
        assert_eq!(refusal(), "process.terminal: /dev/pts/ptmx: no such file or directory");
        fs::create_dir_all(root.path().join("dev/pts")).unwrap();
        // An open of it would wait for its other end.
        mkfifo(&root.path().join("dev/pts/ptmx"), Mode::from_bits_truncate(0o666)).unwrap();
        assert_eq!(refusal(), "process.terminal: /dev/pts/ptmx: /dev/pts is not a devpts file system");
    }
}
