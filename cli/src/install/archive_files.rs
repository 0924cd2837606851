//! Files of the archive that only an older version has. dpkg removes those of a package, and tar removes none.
//!
//! The archive has a list of its files. An installation records it, so the next one finds what the new list lacks.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io::{self, Read, Write},
    path::{Component, Path},
};

use bulkhead_host_shim::operator::one_line;
use sha2::{Digest, Sha256};

use crate::{
    error::CommandError,
    install::{
        options::{ARCHIVE_FILES, ARCHIVE_RECORD, Options},
        steps::{remove, say, write},
    },
};

/// Where files of an archive are. Nothing else is removed, whatever a list says.
const PLACES: [&str; 2] = ["usr/lib/", "usr/local/"];

/// Directories of which nothing else has a part: they are removed when they are empty.
const OWN: [&str; 2] = ["usr/lib/bulkhead", "usr/local/share/doc/bulkhead"];

/// The longest list that is read.
const LONGEST: u64 = 1 << 20;

/// A line of a list, in the form of sha256sum(1).
#[derive(Debug)]
struct Entry<'a> {
    /// Relative to `/`.
    path: &'a str,
    digest: &'a str,
}

/// Removes the files that are in the recorded list, and not in that of the archive which is there now. Then records
/// that. Without a list, the files are those of a package.
pub(super) fn remove_older(out: &mut impl Write, options: &Options) -> Result<(), CommandError> {
    let Some(now) = read(options, ARCHIVE_FILES)? else { return Ok(()) };
    remove_others(out, options, &now)?;
    let record = options.at(ARCHIVE_RECORD);
    match read(options, ARCHIVE_RECORD)?.as_ref() == Some(&now) {
        true => Ok(()),
        false => write(&record, &now),
    }
}

/// The same, and removes the record.
pub(super) fn forget(out: &mut impl Write, options: &Options) -> Result<(), CommandError> {
    if let Some(now) = read(options, ARCHIVE_FILES)? {
        remove_others(out, options, &now)?;
    }
    match read(options, ARCHIVE_RECORD)? {
        Some(_) => remove(&options.at(ARCHIVE_RECORD)),
        None => Ok(()),
    }
}

fn remove_others(out: &mut impl Write, options: &Options, now: &str) -> Result<(), CommandError> {
    let Some(before) = read(options, ARCHIVE_RECORD)? else { return Ok(()) };
    let now: BTreeSet<_> = entries(now).map(|entry| entry.path).collect();
    for entry in entries(&before).filter(|entry| !now.contains(entry.path)) {
        let path = options.at(Path::new("/").join(entry.path));
        options.check_inside([path.clone()].into_iter())?;
        let failed = |source| CommandError::Remove { path: path.clone(), source };
        match digest(&path).map_err(failed)? {
            None => {}
            Some(digest) if digest == entry.digest => {
                remove(&path)?;
                say(out, &format!("removed {}: only an older version has it", path.display()))?;
                remove_empty(options, &path);
            }
            Some(_) => {
                let path = one_line(&path.display().to_string());
                say(out, &format!("kept {path}: only an older version has it, and it was changed"))?;
            }
        }
    }
    Ok(())
}

/// Removes the directories of the file that nothing else uses.
fn remove_empty(options: &Options, path: &Path) {
    let own = OWN.map(|own| options.at(Path::new("/").join(own)));
    let is_own = |directory: &&Path| own.iter().any(|own| directory.starts_with(own));
    // It fails if there is something.
    path.ancestors().skip(1).take_while(is_own).for_each(|directory| drop(fs::remove_dir(directory)));
}

/// The digest of a regular file. None: there is none.
fn digest(path: &Path) -> io::Result<Option<String>> {
    match path.symlink_metadata() {
        Ok(metadata) if metadata.is_file() => {}
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => return Ok(None),
    }
    let (mut file, mut digest, mut part) = (File::open(path)?, Sha256::new(), vec![0; 1 << 16]);
    loop {
        match file.read(&mut part)? {
            0 => break,
            read => digest.update(part.get(..read).unwrap_or_default()),
        }
    }
    Ok(Some(digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect()))
}

/// The entries of a list, as far as they can be of an archive.
fn entries(list: &str) -> impl Iterator<Item = Entry<'_>> {
    let lines = list.lines().filter_map(|line| line.split_once("  "));
    lines.map(|(digest, path)| Entry { path, digest }).filter(|entry| {
        let is_below = PLACES.iter().any(|place| entry.path.starts_with(place));
        is_below && Path::new(entry.path).components().all(|part| matches!(part, Component::Normal(_)))
    })
}

fn read(options: &Options, path: &str) -> Result<Option<String>, CommandError> {
    let path = options.at(path);
    let mut text = String::new();
    match File::open(&path).and_then(|file| file.take(LONGEST).read_to_string(&mut text)) {
        Ok(_) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(CommandError::Read { path, source }),
    }
}
