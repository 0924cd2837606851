//! The terminal of this command, which the program's terminal is shown in.

use std::{io, os::fd::AsFd};

use rustix::termios::{OptionalActions, Termios, isatty, tcgetattr, tcgetwinsize, tcsetattr};

use crate::run::error::RunError;

/// The terminal in raw mode: each key goes to the program. Dropping it sets the modes as they were.
#[derive(Debug)]
pub(super) struct RawTerminal {
    before: Termios,
}

/// The size of a window in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Size {
    pub(super) width: u16,
    pub(super) height: u16,
}

impl RawTerminal {
    pub(super) fn enter() -> Result<Self, RunError> {
        let failed = |errno: rustix::io::Errno| RunError::Terminal(errno.into());
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
pub(super) fn check() -> Result<(), RunError> {
    if isatty(io::stdin().as_fd()) { Ok(()) } else { Err(RunError::NoTerminal) }
}

/// The size of the window. None: it has none.
pub(super) fn size() -> Option<Size> {
    let size = tcgetwinsize(io::stdin()).ok()?;
    (size.ws_col > 0 && size.ws_row > 0).then_some(Size { width: size.ws_col, height: size.ws_row })
}
