//! The digests of the files that the last installation has written, so that the next one knows which nobody has edited.

use std::{fs, io, io::Write};

use bulkhead_host_shim::operator::{chain, one_line};
use sha2::{Digest, Sha256};

use crate::{
    error::CommandError,
    install::{
        options::{OWN_RECORD, Options},
        steps::{read, say, write},
    },
};

/// The record: a line for each file, in the form of sha256sum(1). While an installation writes a file, there is a line
/// for its old text and one for its new text: it may be killed before or after that.
#[derive(Debug, Default)]
pub(super) struct Record(String);

impl Record {
    /// A record that cannot be read is said to be so, and knows no file.
    pub(super) fn read(out: &mut impl Write, options: &Options) -> Result<Self, CommandError> {
        match read(&options.at(OWN_RECORD)) {
            Ok(text) => Ok(Self(text.unwrap_or_default())),
            Err(error) => {
                let so = "so the files of another version count as edited";
                say(out, &format!("{}; {so}", chain(&error))).map(|()| Self::default())
            }
        }
    }

    /// Whether an installation has written this text to the file.
    pub(super) fn has(&self, name: &str, text: &str) -> bool {
        self.0.lines().any(|known| known == line(name, text))
    }

    /// Records the texts that are to be written, beside those that are known.
    pub(super) fn begin(&self, options: &Options, new: &[(&str, &str)]) -> Result<(), CommandError> {
        let new = new.iter().filter(|(name, text)| !self.has(name, text));
        self.replace(options, self.lines(|_| true).chain(new.map(|(name, text)| line(name, text))))
    }

    /// Records the texts that the files have now, and no other of theirs. What an edited file was before it was edited
    /// stays known.
    pub(super) fn end(&self, options: &Options, own: &[(&str, &str)]) -> Result<(), CommandError> {
        let is_own = |known: &str| own.iter().any(|(name, _)| known.ends_with(&format!("  {name}")));
        let own = own.iter().map(|(name, text)| line(name, text));
        self.replace(options, self.lines(|known| !is_own(known)).chain(own))
    }

    fn lines(&self, is_kept: impl Fn(&str) -> bool) -> impl Iterator<Item = String> {
        self.0.lines().filter(move |known| is_kept(known)).map(one_line)
    }

    fn replace(&self, options: &Options, lines: impl Iterator<Item = String>) -> Result<(), CommandError> {
        let (path, text) = (options.at(OWN_RECORD), lines.map(|line| line + "\n").collect::<String>());
        // One that cannot be read is replaced.
        let present = read(&path).ok().flatten().unwrap_or_default();
        if present == text { Ok(()) } else { write(&path, &text) }
    }
}

/// Removes the record.
pub(super) fn forget(options: &Options) -> Result<(), CommandError> {
    let path = options.at(OWN_RECORD);
    match fs::remove_file(&path) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => Err(CommandError::Remove { path, source }),
        _ => Ok(()),
    }
}

fn line(name: &str, text: &str) -> String {
    format!("{:x}  {name}", Sha256::digest(text))
}
