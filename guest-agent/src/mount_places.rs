//! Directories of the agent's, each of which has a place for a file system under each name that the shim gives.

use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

/// The place of this name in `directory`. The name consists of letters, digits and hyphens, so it leads nowhere else.
pub(crate) fn place_in(directory: &str, name: &str) -> io::Result<PathBuf> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    if name.is_empty() || !name.bytes().all(is_plain) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("{name:?} is no plain name")));
    }
    Ok(Path::new(directory).join(name))
}

/// Whether there is a file system at this place in `directory`.
pub(crate) fn is_mounted(directory: &str, place: &Path) -> io::Result<bool> {
    match fs::metadata(place) {
        Ok(found) => Ok(found.dev() != fs::metadata(directory)?.dev()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}
