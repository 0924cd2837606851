//! The terminal of this command, which the program's terminal is shown in.

use std::{io, os::fd::AsFd};

use rustix::termios::{OptionalActions, Termios, isatty, tcgetattr, tcgetwinsize, tcsetattr};

use crate::process::error::ProcessError;

/// The terminal in raw mode: each key goes to the program. Dropping it sets the modes as they were.
#[derive(Debug)]
pub(crate) struct RawTerminal {
    before: Termios,
}

/// The size of a window in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Size {
    pub(crate) width: u16,
    pub(crate) height: u16,
}

impl RawTerminal {
    pub(crate) fn enter() -> Result<Self, ProcessError> {
        let failed = |errno: rustix::io::Errno| ProcessError::Terminal(errno.into());
        let before = tcgetattr(io::stdin()).map_err(failed)?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(io::stdin(), OptionalActions::Now, &raw).map_err(failed)?;
        Ok(Self { before })
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        // A terminal that was closed has no modes.
        _ = tcsetattr(io::stdin(), OptionalActions::Now, &self.before);
    }
}

/// Refuses a standard input that is no terminal.
pub(crate) fn check() -> Result<(), ProcessError> {
    if isatty(io::stdin().as_fd()) { Ok(()) } else { Err(ProcessError::NoTerminal) }
}

/// The size of the window. None: it has none.
pub(crate) fn size() -> Option<Size> {
    let size = tcgetwinsize(io::stdin()).ok()?;
    (size.ws_col > 0 && size.ws_row > 0).then_some(Size { width: size.ws_col, height: size.ws_row })
}
