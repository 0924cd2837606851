//! How a pod started, as its shim has recorded it.

use std::{
    fs::File,
    io::{self, Read},
    path::Path,
};

use serde::Deserialize;

use crate::{
    host::state_dir::START_RECORD,
    types::timeline::{OLDEST_VERSION, StartRecord, VERSION},
};

/// The longest record that is read. Those that are written have a tenth of it.
const LONGEST: u64 = 16 << 10;

/// What the records of all versions have.
#[derive(Deserialize)]
struct Versioned {
    version: u32,
}

/// The record of the pod with this state directory. None: the pod has not started yet, or an older version of the shim
/// has started it. An error: it cannot be read; the reason.
pub fn start_record(state: &Path) -> Result<Option<StartRecord>, String> {
    let path = state.join(START_RECORD);
    let read = || -> io::Result<Option<StartRecord>> {
        let file = match File::open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            other => other?,
        };
        let mut text = Vec::new();
        file.take(LONGEST).read_to_end(&mut text)?;
        // What follows the last end of a line is being written.
        let Some(end) = text.iter().rposition(|byte| *byte == b'\n') else { return Ok(None) };
        let line = text[..end].rsplit(|byte| *byte == b'\n').next().unwrap_or_default();
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
