//! How a pod and its containers started, as its shim has recorded it.

use std::{
    fs::File,
    io::{self, Read},
    path::Path,
};

use serde::Deserialize;

use crate::{
    host::{
        start_log::{CONTAINER_STARTS, MOST_BYTES},
        state_dir::START_RECORD,
    },
    types::timeline::{
        CONTAINER_VERSION, ContainerStart, MOST_CONTAINERS, OLDEST_VERSION, StartRecord, VERSION,
    },
};

/// The longest record that is read. Those that are written have a tenth of it.
const LONGEST: u64 = 16 << 10;

/// What the records of all versions have.
#[derive(Deserialize)]
struct Versioned {
    version: u32,
}

/// What has been written of a file, in whole lines: what follows the last end of a line is being written. None: there
/// is no file.
fn whole_lines(path: &Path, longest: u64) -> io::Result<Option<Vec<u8>>> {
    let file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other?,
    };
    let mut text = Vec::new();
    if file.take(longest + 1).read_to_end(&mut text)? as u64 > longest {
        return Err(io::Error::other(format!(
            "it has more than {longest} bytes, and no shim writes so many"
        )));
    }
    text.truncate(text.iter().rposition(|byte| *byte == b'\n').unwrap_or(0));
    Ok(Some(text))
}

/// The records of the last [`MOST_CONTAINERS`] containers of the pod with this state directory, without its first one,
/// in the order in which they began. Empty if an older version of the shim has started the pod. The error is the reason
/// why they cannot be read.
pub fn container_starts(state: &Path) -> Result<Vec<ContainerStart>, String> {
    let path = state.join(CONTAINER_STARTS);
    let read = || -> io::Result<Vec<ContainerStart>> {
        let text = whole_lines(&path, MOST_BYTES)?.unwrap_or_default();
        let mut starts: Vec<ContainerStart> = Vec::new();
        for line in text.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
            let Versioned { version } = serde_json::from_slice(line)?;
            if version != CONTAINER_VERSION {
                let reason =
                    format!("it has version {version}, but only version {CONTAINER_VERSION} can be read");
                return Err(io::Error::other(reason));
            }
            let start: ContainerStart = serde_json::from_slice(line)?;
            starts.retain(|other| other.container != start.container);
            starts.push(start);
        }
        starts.sort_by_key(|start| start.began_unix_us);
        Ok(starts.split_off(starts.len().saturating_sub(MOST_CONTAINERS)))
    };
    read().map_err(|error| format!("{}: {error}", path.display()))
}

/// The record of the pod with this state directory. None: the pod has not started yet, or an older version of the shim
/// has started it. An error: it cannot be read; the reason.
pub fn start_record(state: &Path) -> Result<Option<StartRecord>, String> {
    let path = state.join(START_RECORD);
    let read = || -> io::Result<Option<StartRecord>> {
        let Some(text) = whole_lines(&path, LONGEST)? else { return Ok(None) };
        let line = text.rsplit(|byte| *byte == b'\n').next().unwrap_or_default();
        if line.is_empty() {
            return Ok(None);
        }
        let Versioned { version } = serde_json::from_slice(line)?;
        if !(OLDEST_VERSION..=VERSION).contains(&version) {
            let reason = format!(
                "it has version {version}, but only versions {OLDEST_VERSION} to {VERSION} can be read"
            );
            return Err(io::Error::other(reason));
        }
        Ok(Some(serde_json::from_slice(line)?))
    };
    read().map_err(|error| format!("{}: {error}", path.display()))
}
