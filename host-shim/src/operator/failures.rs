//! How often pods and containers of this host could not be created or started.

use std::{fs, io, path::Path};

use crate::{host::failure_counts, types::failure::Cause};

/// How often that has happened, by cause. `root` is the directory of all state directories. Blocks for a second at
/// most.
pub fn failures(root: &Path) -> io::Result<Vec<(Cause, u64)>> {
    failure_counts::counts(root)
}

/// Forgets the numbers. The next failure counts as the first one.
pub fn forget_failures(root: &Path) -> io::Result<()> {
    match fs::remove_file(failure_counts::path(root)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
