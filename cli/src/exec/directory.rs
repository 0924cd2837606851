//! `/run/bulkhead-exec/SHIM-ID`: the FIFOs of one `bulkhead exec`, locked while it lives. Whoever finds one that nobody
//! has locked ends the process that it belongs to, and removes it.

use std::{
    fs::{self, File},
    io::{self, Read},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::{
    exec::error::ExecError,
    process::{
        ProcessError,
        client::Process,
        locked_directory::{self, LockedDirectory},
    },
};

/// Where the directories of all execs are.
const ROOT: &str = "/run/bulkhead-exec";

/// What the process is that a directory belongs to.
const RECORD: &str = "process.json";

/// The most that is read of it.
const LONGEST_RECORD: u64 = 64 << 10;

/// What the id of a process begins with. No id of a container does, nor is it a part of one: containerd's CRI plugin
/// takes the end of a process whose id is the beginning of a container's id for the end of that container.
const PREFIX: &str = "bulkhead-exec-";

/// The most processes of one pod. A shim has 64 connections at most, and containerd must be able to connect again.
const MOST: usize = 32;

/// The directory of this command.
#[derive(Debug)]
pub(super) struct ExecDirectory(LockedDirectory);

/// The process that a directory belongs to.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    /// The shim's.
    socket: PathBuf,
    container: String,
}

impl ExecDirectory {
    pub(super) fn create(shim_pid: u32) -> Result<Self, ExecError> {
        Self::create_in(Path::new(ROOT), shim_pid)
    }

    pub(super) fn create_in(root: &Path, shim_pid: u32) -> Result<Self, ExecError> {
        let prefix = format!("{shim_pid}-");
        let directory = LockedDirectory::create_in(root, &prefix)
            .map(Self)
            .map_err(|source| ExecError::Prepare { path: root.into(), source })?;
        // It counts itself. So of those that begin at the same time, not more than these go on.
        if locked_directory::count_living(root, &prefix) > MOST {
            directory.remove()?;
            return Err(ExecError::TooMany { most: MOST });
        }
        Ok(directory)
    }

    pub(super) fn path(&self) -> &Path {
        self.0.path()
    }

    /// Records the process before it is added, and connects to its shim.
    pub(super) async fn connect(&self, socket: &Path, container: &str) -> Result<Process, ExecError> {
        let path = self.path().join(RECORD);
        let record = Record { socket: socket.into(), container: container.into() };
        serde_json::to_vec(&record)
            .map_err(io::Error::from)
            .and_then(|text| fs::write(&path, text))
            .map_err(|source| ExecError::Prepare { path, source })?;
        Ok(record.connect(self.0.name()).await?)
    }

    pub(super) fn remove(&self) -> Result<(), ExecError> {
        remove(self.path())
    }
}

impl Record {
    async fn connect(&self, name: &str) -> Result<Process, ProcessError> {
        let address = format!("unix://{}", self.socket.display());
        Process::connect(&address, &self.container, &format!("{PREFIX}{name}")).await
    }
}

fn remove(path: &Path) -> Result<(), ExecError> {
    locked_directory::remove(path).map_err(|source| ExecError::Remove { path: path.into(), source })
}

/// The directories of execs that were killed.
pub(crate) fn leftovers() -> Vec<PathBuf> {
    locked_directory::leftovers(Path::new(ROOT)).map(|(path, _)| path).collect()
}

/// Removes what execs have left that were killed: their processes, which may still run, and their directories. Returns
/// the directories, and why one is still there.
pub(super) async fn remove_leftovers() -> Vec<(PathBuf, Result<(), ExecError>)> {
    let mut removed = Vec::new();
    // All of them are locked first, so no other command has to wait for the next one.
    for (path, _lock) in locked_directory::leftovers(Path::new(ROOT)).collect::<Vec<_>>() {
        // One that is empty may be that of an exec that begins, which then makes another.
        if fs::remove_dir(&path).is_err() {
            let result = end_process(&path).await.and_then(|()| remove(&path));
            removed.push((path, result));
        }
    }
    removed
}

/// Ends the process that a directory belongs to, if its shim still has it.
async fn end_process(path: &Path) -> Result<(), ExecError> {
    let Some(record) = read_record(path)? else { return Ok(()) };
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    match record.connect(&name).await {
        // The pod has ended. Another of the same name does not have this process.
        Err(_) if std::os::unix::net::UnixStream::connect(&record.socket).is_err() => Ok(()),
        process => Ok(process?.remove().await?),
    }
}

/// None: the exec was killed before it has asked for a process.
fn read_record(path: &Path) -> Result<Option<Record>, ExecError> {
    let path = path.join(RECORD);
    let mut text = Vec::new();
    match File::open(&path).and_then(|file| file.take(LONGEST_RECORD).read_to_end(&mut text)) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(ExecError::Prepare { path, source }),
        // A part of it was written before anything was asked for.
        Ok(_) => Ok(serde_json::from_slice(&text).ok()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_pod_has_a_limit_of_them() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("execs");
        let others = [7, 77].map(|pid| ExecDirectory::create_in(&root, pid).unwrap());
        let all: Vec<_> = (0..MOST).map(|_| ExecDirectory::create_in(&root, 777).unwrap()).collect();
        let error = ExecDirectory::create_in(&root, 777).unwrap_err().to_string();
        assert!(error.contains("32 programs of `bulkhead exec` run in this pod"), "{error}");
        all[0].remove().unwrap();
        drop(all);
        ExecDirectory::create_in(&root, 777).unwrap().remove().unwrap();
        drop(others);
    }

    #[tokio::test]
    async fn a_process_is_recorded_before_it_is_asked_for() {
        let dir = tempfile::tempdir().unwrap();
        let directory = ExecDirectory::create_in(&dir.path().join("execs"), 7).unwrap();
        assert_eq!(read_record(directory.path()).unwrap(), None);
        let socket = dir.path().join("no-socket");
        assert!(directory.connect(&socket, "web").await.is_err());
        let record = Record { socket, container: "web".into() };
        assert_eq!(read_record(directory.path()).unwrap(), Some(record));
        // Its shim is gone, and so is the process.
        end_process(directory.path()).await.unwrap();
        fs::write(directory.path().join(RECORD), "{\"socket\":\"/r").unwrap();
        end_process(directory.path()).await.unwrap();
        directory.remove().unwrap();
    }
}
