//! Reads the text files of a template.

use std::{
    fs::File,
    io::{self, Read},
    path::Path,
};

/// Reads a file of at most `longest` bytes.
pub(super) fn read_text(path: &Path, longest: u64) -> io::Result<String> {
    let file = File::open(path)?;
    if file.metadata()?.len() > longest {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    let mut text = String::new();
    file.take(longest).read_to_string(&mut text)?;
    Ok(text)
}
