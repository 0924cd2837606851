//! The agent's end of a process's terminal.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
};

use rustix::{
    pty::{OpenptFlags, ioctl_tiocgptpeer},
    termios::{Winsize, tcsetwinsize},
};

use crate::{stage_config::WindowSize, streams::End};

/// The master of a terminal, which hangs up when this is dropped.
pub struct Terminal {
    master: End,
    /// With a slave open the master can always be waited for: processes may close theirs and open them again.
    _slave: OwnedFd,
}

impl Terminal {
    /// Takes over the master.
    pub fn new(master: OwnedFd) -> io::Result<Self> {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let slave = ioctl_tiocgptpeer(&master, flags)?;
        Ok(Self { master: End::new(master)?, _slave: slave })
    }

    /// What is typed goes into it, and what is shown comes out of it.
    pub fn master(&self) -> &End {
        &self.master
    }

    /// Sets its size; the processes in its foreground get SIGWINCH.
    pub fn resize(&self, size: WindowSize) -> io::Result<()> {
        set_size(&self.master, size)
    }
}

/// Sets the size of a terminal by either of its ends.
pub(crate) fn set_size(terminal: impl AsFd, size: WindowSize) -> io::Result<()> {
    let WindowSize { width, height } = size;
    Ok(tcsetwinsize(terminal, Winsize { ws_row: height, ws_col: width, ws_xpixel: 0, ws_ypixel: 0 })?)
}
