//! `bulkhead gc`: removes what nobody uses any more.

use std::{
    error::Error,
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
};

use bulkhead_host_shim::operator::{Garbage, Removed, chain, garbage, is_bare, one_line, remove_garbage};

use crate::{
    error::CommandError, exec, install::lock as install, output::listing, progress::during,
    run::directory as run,
};

/// Why a command has left something.
const RUN_KILLED: &str = "its `bulkhead run` was killed";
const EXEC_KILLED: &str = "its `bulkhead exec` was killed";
const INSTALL_KILLED: &str = "its `bulkhead install` or `bulkhead uninstall` was killed";

/// `bulkhead gc`. Returns whether everything was removed.
pub(crate) fn gc(
    out: &mut impl Write,
    root: &Path,
    dry_run: bool,
    is_json: bool,
) -> Result<bool, CommandError> {
    // Below, what cannot be listed is taken for empty.
    [root, Path::new(run::ROOT), Path::new(exec::ROOT)].into_iter().try_for_each(can_be_listed)?;
    let list = |source| CommandError::List { path: root.into(), source };
    let path = |garbage: &Garbage| one_line(&garbage.path.display().to_string());
    if dry_run {
        let mut found = garbage(root).map_err(list)?;
        found.extend(of_killed());
        found.extend(install::leftover(Path::new("/")).map(|path| Garbage { path, reason: INSTALL_KILLED }));
        let cells = |garbage: &Garbage| [path(garbage), garbage.reason.to_owned()];
        listing(out, is_json, &found, ["WOULD BE REMOVED", "WHY"], cells).map_err(CommandError::Output)?;
        return Ok(true);
    }
    // Those that have nothing are removed on the way.
    let bare: Vec<_> = of_killed().filter(|it| is_bare(&it.path)).collect();
    // First those of killed commands, because their shims still live.
    let removed: Vec<_> = during("removing what nobody uses", is_json, |count| {
        let execs = of_commands(exec::remove_leftovers(), EXEC_KILLED);
        let runs = of_commands(run::remove_leftovers(), RUN_KILLED);
        let installs = of_commands(install::remove_leftover(Path::new("/")), INSTALL_KILLED);
        let garbage = remove_garbage(root, |done, pods| count.set(done as u64, pods as u64));
        let bare = bare.into_iter().filter(|bare| !bare.path.exists());
        let bare = bare.map(|garbage| Removed { garbage, error: None });
        execs.chain(runs).chain(installs).chain(garbage).chain(bare).collect()
    });
    let cells = |removed: &Removed| {
        let result =
            removed.error.as_ref().map_or_else(|| "removed".into(), |error| format!("failed: {error}"));
        [path(&removed.garbage), result, removed.garbage.reason.to_owned()]
    };
    listing(out, is_json, &removed, ["PATH", "RESULT", "WHY"], cells).map_err(CommandError::Output)?;
    Ok(removed.iter().all(|removed| removed.error.is_none()))
}

/// Fails if a directory is there and cannot be listed, such as by another user than root.
fn can_be_listed(path: &Path) -> Result<(), CommandError> {
    match fs::read_dir(path) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            Err(CommandError::List { path: path.into(), source })
        }
        _ => Ok(()),
    }
}

/// The directories of runs and execs that were killed.
fn of_killed() -> impl Iterator<Item = Garbage> {
    let of = |reason| move |path| Garbage { path, reason };
    let (runs, execs) = (run::leftovers(), exec::leftovers());
    let all = runs.into_iter().map(of(RUN_KILLED)).chain(execs.into_iter().map(of(EXEC_KILLED)));
    all.filter(|it| is_left(&it.path))
}

/// Whether a directory that nobody has locked is a killed command's. One that has just been made may be that of a
/// command which locks it next.
fn is_left(path: &Path) -> bool {
    is_bare(path) || fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_some())
}

/// What killed commands have left, with the error of each that stays.
fn of_commands<E: Error + 'static>(
    left: impl IntoIterator<Item = (PathBuf, Result<(), E>)>,
    reason: &'static str,
) -> impl Iterator<Item = Removed> {
    left.into_iter().map(move |(path, removed)| Removed {
        garbage: Garbage { path, reason },
        error: removed.err().map(|error| chain(&error)),
    })
}

#[cfg(test)]
mod tests {
    use std::{
        fs::File,
        os::unix::fs::PermissionsExt,
        thread,
        time::{Duration, SystemTime},
    };

    use nix::unistd::{Uid, setfsuid};

    use super::*;
    use crate::output::shown;

    #[test]
    fn a_directory_that_has_just_been_made_is_not_taken_for_a_killed_commands() {
        let dir = tempfile::tempdir().unwrap();
        assert!(!is_left(dir.path()));
        fs::write(dir.path().join("file"), "").unwrap();
        assert!(is_left(dir.path()));
        fs::remove_file(dir.path().join("file")).unwrap();
        let old = SystemTime::now() - Duration::from_secs(120);
        File::open(dir.path()).unwrap().set_modified(old).unwrap();
        assert!(is_left(dir.path()));
    }

    #[test]
    fn what_may_not_be_listed_is_not_taken_for_nothing() {
        let dir = tempfile::tempdir().unwrap();
        // As it is in /run: others than root can open what they know the name of.
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o311)).unwrap();
        for dry_run in [true, false] {
            let error = thread::scope(|scope| {
                // Each thread has its own user.
                let gc = || {
                    setfsuid(Uid::from_raw(65_534));
                    gc(&mut Vec::new(), dir.path(), dry_run, false)
                };
                scope.spawn(gc).join().unwrap().unwrap_err()
            });
            let CommandError::List { path, source } = error else { panic!("{error}") };
            assert_eq!((&*path, source.kind()), (dir.path(), io::ErrorKind::PermissionDenied));
        }
    }

    #[test]
    fn what_nobody_uses_is_listed_or_removed() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join(".templates/.77")).unwrap();
        let dry = shown(|out| gc(out, dir.path(), true, false).map(drop));
        assert!(dry.contains(".templates/.77"), "{dry}");
        let mut out = Vec::new();
        assert!(gc(&mut out, dir.path(), false, false).unwrap());
        assert_eq!(shown(|out| gc(out, dir.path(), true, true).map(drop)), "[]\n");
    }
}
