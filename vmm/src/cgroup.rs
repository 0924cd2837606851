//! The VMM moves itself into the pod's cgroups.

use std::{fs, io, path::PathBuf};

/// A file `cgroup.procs` or `tasks` does not take this process.
#[derive(Debug, thiserror::Error)]
#[error("cgroup_procs: cannot join {path}")]
pub struct JoinError {
    path: PathBuf,
    source: io::Error,
}

/// Moves this process into the cgroups with these `cgroup.procs` files. Call this before the guest's memory is
/// allocated, because memory stays charged to the cgroup in which it was allocated.
pub fn join(cgroup_procs: &[PathBuf]) -> Result<(), JoinError> {
    const THIS_PROCESS: &str = "0";
    for path in cgroup_procs {
        fs::write(path, THIS_PROCESS).map_err(|source| JoinError { path: path.clone(), source })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_process_is_moved_by_writing_0() {
        let procs = tempfile::NamedTempFile::new().unwrap();
        join(&[procs.path().to_owned()]).unwrap();
        assert_eq!(fs::read_to_string(procs.path()).unwrap(), "0");
        let error = join(&["/nowhere/cgroup.procs".into()]).unwrap_err();
        assert_eq!(error.to_string(), "cgroup_procs: cannot join /nowhere/cgroup.procs");
    }
}
