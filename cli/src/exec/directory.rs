//! `/run/bulkhead-exec/PID-ID` (PID: of the shim): the FIFOs of one `bulkhead exec`, locked while it lives. Whoever
//! finds one that nobody has locked ends the process that it belongs to, and removes it.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, Read},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use tokio::{net::UnixStream, task::JoinSet};

use crate::{
    exec::error::ExecError,
    process::{
        ProcessError,
        client::Process,
        locked_directory::{self, LockedDirectory},
    },
};

/// Where the directories of all execs are.
pub(crate) const ROOT: &str = "/run/bulkhead-exec";

/// What the process is that a directory belongs to.
const RECORD: &str = "process.json";

/// The most that is read of it.
const LONGEST_RECORD: u64 = 64 << 10;

/// What the id of a process begins with. containerd's CRI plugin takes the id of a process that has ended for the
/// beginning of a container's id. So no container's id may begin with it.
const PREFIX: &str = "bulkhead-exec-";

/// The most processes of one pod. A shim has 1,024 connections at most, of which containerd has one for each container.
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
        // The count includes this one, so at most `MOST` go on, also if several begin at once.
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

/// Ends the processes that killed execs have left, and removes their directories. Returns each directory, with the
/// error if it stays.
pub(super) async fn remove_leftovers() -> Vec<(PathBuf, Result<(), ExecError>)> {
    // By shim, so that one that does not answer delays no other.
    let mut of_shims: BTreeMap<_, Vec<_>> = BTreeMap::new();
    // All are locked before the first is ended. A command that begins after that waits for none of them.
    for (path, lock) in locked_directory::filled_leftovers(Path::new(ROOT)) {
        let record = read_record(&path);
        let socket = record.as_ref().ok().and_then(|it| it.as_ref()).map(|it| it.socket.clone());
        of_shims.entry(socket).or_default().push((path, record, lock));
    }
    let mut shims: JoinSet<_> = of_shims.into_values().map(remove_those_of_a_shim).collect();
    let mut removed = Vec::new();
    while let Some(those) = shims.join_next().await {
        // An error: the task has panicked.
        removed.extend(those.into_iter().flatten());
    }
    removed
}

type Leftover = (PathBuf, Result<Option<Record>, ExecError>, File);

async fn remove_those_of_a_shim(leftovers: Vec<Leftover>) -> Vec<(PathBuf, Result<(), ExecError>)> {
    let mut removed = Vec::new();
    let mut has_failed = false;
    for (path, record, _lock) in leftovers {
        let result = match record {
            Ok(Some(_)) if has_failed => Err(ExecError::Process(ProcessError::Lost {
                reason: "another process of its shim could not be ended".into(),
            })),
            Ok(record) => match end_process(&path, record).await {
                Ok(()) => remove(&path),
                Err(error) => {
                    has_failed = true;
                    Err(error)
                }
            },
            Err(error) => Err(error),
        };
        removed.push((path, result));
    }
    removed
}

/// Ends the process that a directory belongs to, if its shim still has it.
async fn end_process(path: &Path, record: Option<Record>) -> Result<(), ExecError> {
    let Some(record) = record else { return Ok(()) };
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    match record.connect(&name).await {
        // The pod has ended. Another of the same name does not have this process.
        Err(_) if is_gone(&record.socket).await => Ok(()),
        process => Ok(process?.remove().await?),
    }
}

/// Whether nobody takes connections at this socket.
async fn is_gone(socket: &Path) -> bool {
    let connected = UnixStream::connect(socket).await;
    connected.is_err_and(|error| {
        matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
    })
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
        let record = read_record(directory.path()).unwrap();
        end_process(directory.path(), record).await.unwrap();
        fs::write(directory.path().join(RECORD), "{\"socket\":\"/r").unwrap();
        let record = read_record(directory.path()).unwrap();
        end_process(directory.path(), record).await.unwrap();
        directory.remove().unwrap();
    }
}
