//! How the containers of a pod started that came after its first one: a file in its state directory, for
//! `bulkhead trace`. Nothing depends on it.

use std::{
    fs::{File, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::Path,
};

use crate::types::timeline::ContainerStart;

/// The file: a line of JSON ([`ContainerStart`]) for each of the requests Create and Start of a container. The last one
/// of a container counts.
pub(crate) const CONTAINER_STARTS: &str = "container-starts.json";

/// The largest size of the file. All records that are kept have half of it at most.
pub(crate) const MOST_BYTES: u64 = 64 << 10;

/// The open file. It stays open, so that no later record makes one in a directory that is being removed.
#[derive(Debug)]
pub(crate) struct StartLog(File);

impl StartLog {
    /// Makes the file in the state directory `state`, whose journal names it already.
    pub(crate) fn begin(state: &Path) -> io::Result<Self> {
        let path = state.join(CONTAINER_STARTS);
        OpenOptions::new().append(true).create(true).mode(0o600).open(path).map(Self)
    }

    /// Adds a record. If there is no room for it, the file begins anew with `all`, of which it is one. Whoever reads at
    /// this moment may miss some.
    pub(crate) fn add(
        &self,
        record: &ContainerStart,
        all: impl FnOnce() -> Vec<ContainerStart>,
    ) -> io::Result<()> {
        let mut file = &self.0;
        let mut text = line(record)?;
        let mut length = file.metadata()?.len();
        if length + text.len() as u64 > MOST_BYTES {
            text = all().iter().map(line).collect::<io::Result<Vec<_>>>()?.concat();
            file.set_len(0)?;
            length = 0;
        }
        // A part of a line would spoil the next one.
        file.write_all(&text).inspect_err(|_| drop(file.set_len(length)))
    }
}

fn line(record: &ContainerStart) -> io::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(record)?;
    line.push(b'\n');
    Ok(line)
}
