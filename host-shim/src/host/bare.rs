//! Directories that were made and have got nothing: whoever made them was killed before the next step.

use std::{
    fs::{self, File},
    io::{self, Read},
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use crate::host::{
    directory_lock::DirectoryLock,
    no_symlinks::gone,
    state_dir::{self, JOURNAL},
};

/// How long somebody may be making a directory that is empty. It takes milliseconds.
pub(crate) const MAKING: Duration = Duration::from_secs(60);

/// More than the first line of a journal has, which names the shim.
const LONGEST_LINE: u64 = 4096;

/// Whether a directory is empty, and nobody can be making it any more. That of a pod may have a journal
/// without a line.
pub fn is_bare(path: &Path) -> bool {
    let is_old = path.symlink_metadata().is_ok_and(|metadata| {
        let age = metadata.modified().ok().and_then(|made| SystemTime::now().duration_since(made).ok());
        metadata.is_dir() && age.is_some_and(|age| age >= MAKING)
    });
    is_old && is_empty(path)
}

fn is_empty(path: &Path) -> bool {
    let is_begun = |entry: io::Result<fs::DirEntry>| {
        entry.is_ok_and(|entry| entry.file_name() == JOURNAL && has_no_line(&entry.path()))
    };
    fs::read_dir(path).is_ok_and(|mut entries| entries.all(is_begun))
}

/// Whether not even the first line of a journal was written. The first effect begins after that.
fn has_no_line(journal: &Path) -> bool {
    let mut text = Vec::new();
    let read = File::open(journal).and_then(|file| file.take(LONGEST_LINE).read_to_end(&mut text));
    read.is_ok() && (text.len() as u64) < LONGEST_LINE && !text.contains(&b'\n')
}

/// The bare directories of pods, of namespaces and of containerds below `root`.
pub(crate) fn directories(root: &Path) -> impl Iterator<Item = PathBuf> {
    let above = state_dir::containerds(root).flat_map(|containerd| {
        let namespaces: Vec<_> = state_dir::entries(&containerd).collect();
        namespaces.into_iter().chain([containerd])
    });
    state_dir::pods(root).chain(above).filter(|path| is_bare(path))
}

/// Removes a bare directory, and those above that have nothing else, up to `root`. None: somebody uses it, or has
/// removed it. Whoever makes a directory in it makes it again.
pub(crate) fn remove(root: &Path, path: &Path) -> Option<io::Result<()>> {
    let lock = DirectoryLock::take_opened(File::open(path).ok()?, Duration::ZERO).ok()?;
    if !lock.is_still_at(path).ok()? || !is_bare(path) {
        return None;
    }
    let removed = gone(fs::remove_file(path.join(JOURNAL))).and_then(|()| gone(fs::remove_dir(path)));
    if removed.is_ok() {
        // Fails if something else is there.
        let above = path.ancestors().skip(1).take_while(|above| above.starts_with(root));
        above.for_each(|above| drop(fs::remove_dir(above)));
    }
    Some(removed)
}
