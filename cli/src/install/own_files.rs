//! The digests of the files that the last installation has written, so that the next one knows which nobody has edited.

use bulkhead_host_shim::operator::one_line;
use sha2::{Digest, Sha256};

use crate::{
    error::CommandError,
    install::{
        options::{OWN_RECORD, Options},
        steps::{read, remove, write},
    },
};

/// The record: a line for each file, in the form of sha256sum(1).
#[derive(Debug, Default)]
pub(super) struct Record(String);

impl Record {
    pub(super) fn read(options: &Options) -> Result<Self, CommandError> {
        Ok(Self(read(&options.at(OWN_RECORD))?.unwrap_or_default()))
    }

    /// Whether an installation has written this text to the file.
    pub(super) fn has(&self, name: &str, text: &str) -> bool {
        self.0.lines().any(|known| known == line(name, text))
    }

    /// Records the texts that are written now. What an edited file was before it was edited stays known.
    pub(super) fn update(&self, options: &Options, own: &[(&str, &str)]) -> Result<(), CommandError> {
        let is_own = |known: &&str| own.iter().any(|(name, _)| known.ends_with(&format!("  {name}")));
        let kept =
            self.0.lines().filter(|known| !is_own(known)).map(|known| format!("{}\n", one_line(known)));
        let new = own.iter().map(|(name, text)| line(name, text) + "\n");
        let text: String = kept.chain(new).collect();
        if text == self.0 { Ok(()) } else { write(&options.at(OWN_RECORD), &text) }
    }
}

/// Removes the record.
pub(super) fn forget(options: &Options) -> Result<(), CommandError> {
    let path = options.at(OWN_RECORD);
    if read(&path)?.is_some() { remove(&path) } else { Ok(()) }
}

fn line(name: &str, text: &str) -> String {
    format!("{:x}  {name}", Sha256::digest(text))
}
