//! The steps of an installation and of its removal: what they do to files, and what they say of it.

use std::{fs, io, io::Write, path::Path};

use bulkhead_host_shim::operator::one_line;

use crate::{
    check::Finding,
    error::CommandError,
    install::files::{self, WriteError},
};

/// What is said if nothing was changed.
pub(super) const AS_IT_WAS: &str = "containerd's configuration is as it was";

/// What is said of a file that was changed by the operator, or was written by another version.
pub(super) fn kept(path: &Path) -> String {
    format!("kept {}: it is not what this version writes", path.display())
}

/// What to do about lines that `bulkhead uninstall` has removed with those of Bulkhead.
pub(super) const REMOVED_BESIDE: &str =
    "they were beside those of Bulkhead; if they are yours, write them elsewhere";

pub(super) fn read(path: &Path) -> Result<Option<String>, CommandError> {
    files::read(path).map_err(|source| CommandError::Read { path: path.into(), source })
}

pub(super) fn write(path: &Path, text: &str) -> Result<(), CommandError> {
    let written = files::write(path, text, |_| Ok::<_, io::Error>(()));
    written.map_err(|source| CommandError::Write { path: path.into(), source })
}

/// Replaces a file that had the text `old` when it was read. Fails if somebody has changed it since then.
pub(super) fn write_over(path: &Path, old: Option<&str>, text: &str) -> Result<(), CommandError> {
    let written = files::write(path, text, |_| check_unchanged(path, old).map_err(WriteError::Command));
    written.map_err(|error| error.at(path))
}

pub(super) fn check_unchanged(path: &Path, old: Option<&str>) -> Result<(), CommandError> {
    match read(path)?.as_deref() == old {
        true => Ok(()),
        false => Err(CommandError::ChangedMeanwhile { path: path.into() }),
    }
}

pub(super) fn remove(path: &Path) -> Result<(), CommandError> {
    fs::remove_file(path).map_err(|source| CommandError::Remove { path: path.into(), source })
}

pub(super) fn say(out: &mut impl Write, line: &str) -> Result<(), CommandError> {
    writeln!(out, "{line}").map_err(CommandError::Output)
}

/// Says which lines are not in a file any more, if there are any.
pub(super) fn say_lost(
    out: &mut impl Write,
    path: &Path,
    lost: &[String],
    remedy: &str,
) -> Result<(), CommandError> {
    if lost.is_empty() {
        return Ok(());
    }
    let found = format!("lines that this version does not write are gone: {}", one_line(&lost.join("; ")));
    Finding::warn(&path.display().to_string(), found, remedy).print(out).map_err(CommandError::Output)
}

/// Steps that are all taken, also after one has failed.
pub(super) struct Steps<'a, W> {
    pub(super) out: &'a mut W,
    pub(super) errors: Vec<CommandError>,
}

impl<W: Write> Steps<'_, W> {
    /// Returns what the step returns, or what stands for nothing.
    pub(super) fn take<T: Default>(&mut self, step: impl FnOnce(&mut W) -> Result<T, CommandError>) -> T {
        step(self.out).unwrap_or_else(|error| {
            self.errors.push(error);
            T::default()
        })
    }

    /// Fails with all that has failed.
    pub(super) fn end(mut self) -> Result<(), CommandError> {
        match (self.errors.pop(), self.errors.is_empty()) {
            (None, _) => Ok(()),
            (Some(error), true) => Err(error),
            (Some(last), false) => {
                self.errors.push(last);
                Err(CommandError::Several(self.errors))
            }
        }
    }
}
