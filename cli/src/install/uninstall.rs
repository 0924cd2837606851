//! `bulkhead uninstall`.

use std::{fs, io::Write, path::Path, time::Duration};

use bulkhead_host_shim::operator::{STATE_ROOT, forget_failures, remove_all_templates};

use crate::{
    containerd::{CONFIG, Containerd, RECORD, recorded},
    error::CommandError,
    exec,
    install::{
        archive_files, block,
        files::{self, Removal},
        lock::{Lock, OF_UNINSTALL},
        metrics,
        options::{ARCHIVE_RECORD, OWN_DIRECTORY, OWN_FILES, Options},
        restart::{Restart, finish},
        steps::{AS_IT_WAS, REMOVED_BESIDE, Steps, kept, read, remove, say, say_lost, write_over},
    },
    run,
};

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
    let mut changed = Vec::new();
    for containerd in options.containerds(record.as_deref()) {
        let is_changed = remove_handlers(&mut steps, options, &containerd);
        if !is_changed && record.as_ref() == Some(&containerd.config) {
            steps.take(|_| check_there(options, &containerd));
        }
        changed.push((containerd, is_changed));
    }
    let is_removed = steps.errors.is_empty();
    for (name, text) in OWN_FILES {
        steps.take(|out| remove_own(out, &options.at(name), text));
    }
    steps.take(|out| archive_files::forget(out, options));
    for name in OWN_FILES.map(|(name, _)| name).into_iter().chain([RECORD, ARCHIVE_RECORD]) {
        steps.take(|_| remove_unfinished(&options.at(name)));
    }
    // Another try must find the handlers that are still there.
    if is_removed && record.is_some_and(|record| changed.iter().any(|(it, _)| it.config == record)) {
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
    if !changed.iter().any(|(_, is_changed)| *is_changed) {
        steps.take(|out| say(out, AS_IT_WAS));
    }
    for (containerd, is_changed) in changed {
        let restart = Restart { is_changed, also_if_down: false };
        steps.take(|out| finish(out, options, &containerd, &restart));
    }
    steps.end()?;
    say(
        out,
        "Running pods are not affected. Remove the package, or the files of the archive, when none is left.",
    )
}

/// Fails if the configuration that was recorded is not there, such as on a disk that is not mounted: nobody knows
/// whether the handlers are in it. The default one may be removed with containerd, and is found without a record.
fn check_there(options: &Options, containerd: &Containerd) -> Result<(), CommandError> {
    let path = options.at(&containerd.config);
    let is_there = match containerd.generator() {
        None => path.exists() || containerd.config == Path::new(CONFIG),
        // The templates are beside it, and it is generated anew.
        Some(_) => path.parent().is_some_and(Path::exists),
    };
    match is_there {
        true => Ok(()),
        false => Err(CommandError::NotThere { path, record: options.at(RECORD) }),
    }
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

/// Removes what an installation that was killed has left beside a file.
fn remove_unfinished(path: &Path) -> Result<(), CommandError> {
    files::remove_unfinished(path).map_err(|source| CommandError::Remove { path: path.into(), source })
}

/// Removes a file that `bulkhead install` has written with this text.
fn remove_own(out: &mut impl Write, path: &Path, text: &str) -> Result<(), CommandError> {
    let removed = files::remove(path, text);
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
