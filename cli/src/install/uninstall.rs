//! `bulkhead uninstall`.

use std::{collections::BTreeSet, fs, io::Write, iter, path::Path, time::Duration};

use bulkhead_host_shim::operator::{STATE_ROOT, forget_failures, one_line, remove_all_templates};

use crate::{
    containerd::{Containerd, RECORD, recorded, tables_of_bulkhead},
    error::CommandError,
    exec,
    install::{
        archive_files, block,
        files::{self, Removal},
        lock::{Lock, OF_UNINSTALL},
        metrics,
        options::{ARCHIVE_RECORD, OWN_DIRECTORY, OWN_FILES, OWN_RECORD, Options},
        own_files::{self, Record},
        restart::{Restart, finish},
        steps::{AS_IT_WAS, REMOVED_BESIDE, Steps, kept, read, remove, say, say_lost, write_over},
    },
    run,
};

/// A containerd after the steps that take the handlers out of its configuration.
struct Cleaned {
    containerd: Containerd,
    /// It is the one that this host uses.
    is_found: bool,
    /// The handlers were there.
    is_changed: bool,
    /// No step has failed.
    is_clean: bool,
}

impl Cleaned {
    /// Whether it must read its configuration. Others may have one that they are not to read yet, or be stopped.
    fn is_to_finish(&self) -> bool {
        self.is_changed || (self.is_found && self.is_clean)
    }
}

/// `bulkhead uninstall`.
pub(crate) fn uninstall(out: &mut impl Write, options: &Options) -> Result<(), CommandError> {
    uninstall_within(out, options, OF_UNINSTALL)
}

pub(super) fn uninstall_within(
    out: &mut impl Write,
    options: &Options,
    within: Duration,
) -> Result<(), CommandError> {
    options.check_own()?;
    let _lock = Lock::take(options.root(), within)?;
    // If one step fails, the others are taken all the same: the programs may be removed right after.
    let mut steps = Steps { out, errors: Vec::new() };
    let record = steps.take(|_| {
        recorded(options.root()).map_err(|source| CommandError::Read { path: options.at(RECORD), source })
    });
    // It may have been cleaned before, by a removal whose restart has failed.
    let found = options.containerd();
    let mut cleaned = Vec::new();
    for containerd in options.containerds(record.as_deref()) {
        let errors = steps.errors.len();
        let is_changed = remove_handlers(&mut steps, options, &containerd);
        if !is_changed && record.as_ref() == Some(&containerd.config) {
            steps.take(|_| options.check_there(&containerd));
        }
        let is_clean = steps.errors.len() == errors;
        cleaned.push(Cleaned { is_found: containerd == found, containerd, is_changed, is_clean });
    }
    // The same file may be that of two.
    let clean = cleaned.iter().filter(|it| it.is_clean);
    let files: BTreeSet<_> = clean.flat_map(|it| it.containerd.kept_files(options.root())).collect();
    for path in files {
        steps.take(|_| check_without_handlers(options, &path));
    }
    let is_removed = steps.errors.is_empty();
    let of_files = steps.take(|out| Record::read(out, options));
    let errors = steps.errors.len();
    for (name, text) in OWN_FILES {
        let is_own = |found: &str| found == text || of_files.has(name, found);
        steps.take(|out| remove_own(out, &options.at(name), is_own));
    }
    // Another try must know the files that are still there.
    if steps.errors.len() == errors {
        steps.take(|_| own_files::forget(options));
    }
    steps.take(|out| archive_files::forget(out, options));
    for name in OWN_FILES.map(|(name, _)| name).into_iter().chain([RECORD, ARCHIVE_RECORD, OWN_RECORD]) {
        steps.take(|_| remove_unfinished(&options.at(name)));
    }
    // Another try must find the handlers that are still there.
    if is_removed && record.is_some_and(|record| cleaned.iter().any(|it| it.containerd.config == record)) {
        let path = options.at(RECORD);
        steps.take(|out| {
            remove(&path)?;
            say(out, &format!("removed {}", path.display()))
        });
    }
    // Fails if the operator has files of his own there.
    let own = options.at(OWN_DIRECTORY);
    if fs::remove_dir(&own).is_ok() {
        steps.take(|out| say(out, &format!("removed {}", own.display())));
    }
    steps.take(|out| metrics::end(out, options.root.as_deref()));
    if options.root.is_none() {
        steps.take(remove_state);
    }
    if !cleaned.iter().any(|it| it.is_changed) {
        steps.take(|out| say(out, AS_IT_WAS));
    }
    for it in cleaned.iter().filter(|it| it.is_to_finish()) {
        let restart = Restart { is_changed: it.is_changed, also_if_down: false };
        steps.take(|out| finish(out, options, &it.containerd, &restart));
    }
    steps.end()?;
    say(
        out,
        "Running pods are not affected. Remove the package, or the files of the archive, when none is left.",
    )
}

/// Takes the handlers out of the configuration of one containerd. Returns whether they were there.
fn remove_handlers<W: Write>(steps: &mut Steps<'_, W>, options: &Options, containerd: &Containerd) -> bool {
    if !steps.take(|_| options.check_containerd(containerd).map(|()| true)) {
        return false;
    }
    let mut is_changed = false;
    for path in options.with_block(containerd) {
        is_changed |= steps.take(|out| remove_block(out, &path));
    }
    is_changed | steps.take(|out| remove_drop_in(out, &options.drop_in(containerd).0))
}

/// Fails if a file still has handlers, such as those that another program has written anew without comments. They
/// would name a shim that is not there. What is not TOML is a template, or nothing that containerd takes.
fn check_without_handlers(options: &Options, path: &Path) -> Result<(), CommandError> {
    // What is outside of another host's root directory is not that host's.
    let is_there = path.is_file() && options.check_inside(iter::once(path.into())).is_ok();
    let text = if is_there { read(path)?.unwrap_or_default() } else { String::new() };
    let tables = toml::from_str(&text).map(|configuration| tables_of_bulkhead(&configuration));
    match tables.unwrap_or_default() {
        none if none.is_empty() => Ok(()),
        tables => Err(CommandError::HandlersLeft { path: path.into(), tables: one_line(&tables.join(", ")) }),
    }
}

/// Removes what an installation that was killed has left beside a file.
fn remove_unfinished(path: &Path) -> Result<(), CommandError> {
    files::remove_unfinished(path).map_err(|source| CommandError::Remove { path: path.into(), source })
}

/// Removes a file that `bulkhead install` has written, and nobody has edited.
fn remove_own(
    out: &mut impl Write,
    path: &Path,
    is_own: impl FnOnce(&str) -> bool,
) -> Result<(), CommandError> {
    let removed = files::remove(path, is_own);
    match removed.map_err(|source| CommandError::Remove { path: path.into(), source })? {
        Removal::Absent => Ok(()),
        Removal::Removed => say(out, &format!("removed {}", path.display())),
        Removal::Changed => say(out, &kept(path)),
    }
}

/// Removes what is in /run besides pods.
fn remove_state(out: &mut impl Write) -> Result<(), CommandError> {
    let root = Path::new(STATE_ROOT);
    let failed = |source| CommandError::Remove { path: root.into(), source };
    forget_failures(root).map_err(failed)?;
    let removed = remove_all_templates(root).map_err(failed)?;
    say(out, &format!("removed {removed} templates from {STATE_ROOT}"))?;
    let roots = [STATE_ROOT, run::directory::ROOT, exec::ROOT];
    roots.into_iter().for_each(|root| files::remove_empty(Path::new(root)));
    Ok(())
}

/// Removes the block with the handlers from a file, and the file if it has nothing else. Returns whether it was there.
fn remove_block(out: &mut impl Write, path: &Path) -> Result<bool, CommandError> {
    remove_unfinished(path)?;
    let Some(text) = read(path)? else { return Ok(false) };
    let old = block::remove(path, &text)?;
    if old == text {
        return Ok(false);
    }
    if old.is_empty() && !block::was_there(&text) {
        remove(path)?;
        say(out, &format!("removed {}", path.display()))?;
    } else {
        block::check_valid(path, &text, &old)?;
        write_over(path, Some(&text), &old)?;
        say(out, &format!("wrote {}, without the runtime handlers of Bulkhead", path.display()))?;
    }
    say_lost(out, path, &block::lost_by_removal(&text, &old), REMOVED_BESIDE)?;
    Ok(true)
}

/// Removes the file of its own with the handlers, which may be that of another version. Returns whether it was there.
fn remove_drop_in(out: &mut impl Write, path: &Path) -> Result<bool, CommandError> {
    remove_unfinished(path)?;
    match read(path)? {
        None => Ok(false),
        Some(text) if block::is_ours(&text) => {
            remove(path)?;
            say(out, &format!("removed {}", path.display()))?;
            say_lost(out, path, &block::lost_by_removal(&text, ""), REMOVED_BESIDE)?;
            Ok(true)
        }
        Some(_) => {
            let line = format!("kept {}: it was not written by `bulkhead install`", path.display());
            say(out, &line).map(|()| false)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_changed_or_is_used_reads_its_configuration() {
        let to_finish = |is_found, is_changed, is_clean| {
            let containerd = Containerd::of("/etc/containerd/config.toml".into());
            Cleaned { containerd, is_found, is_changed, is_clean }.is_to_finish()
        };
        assert!(!to_finish(false, false, true), "nothing was done to it");
        assert!(!to_finish(true, false, false), "nobody knows what it would read");
        // A restart may have failed before.
        assert!(to_finish(true, false, true) && to_finish(false, true, true) && to_finish(true, true, false));
    }
}
