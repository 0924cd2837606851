//! `/run/bulkhead/<containerd>/<namespace>/<id>`: everything a pod keeps on its host while it lives. `<containerd>` is
//! the address of the containerd that the pod belongs to: two of them may have pods of the same name.

use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Write},
    os::{
        fd::AsRawFd,
        unix::fs::{DirBuilderExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
    time::Duration,
};

use sha2::{Digest, Sha256};

use crate::{
    host::{
        directory_lock::{DirectoryLock, is_still_at},
        event_log::EVENTS,
        hooks::SavedHooks,
        journal::{Effect, Journal, UndoError},
        no_symlinks::gone,
        pod_cgroups,
        process_id::ProcessId,
        share, shim_socket,
        start_log::CONTAINER_STARTS,
        undo::{UNDO, remove_all_but, unmount_tree},
        vmm_ends::VmmEnds,
    },
    types::{error::chain, timeline::StartRecord},
};

/// Where the state directories of all pods are.
pub const STATE_ROOT: &str = "/run/bulkhead";

/// The pod's journal, in its state directory.
pub(crate) const JOURNAL: &str = "journal";

/// The directory of the containers' journals, each named by its container's id.
pub(crate) const CONTAINERS: &str = "containers";
/// The journals of the volumes that its containers have in common.
const VOLUMES: &str = "volumes";

/// The `poststop` hooks of its containers, each named by its container's id. One without hooks has no file.
const POSTSTOP: &str = "poststop";

/// The same of a pod whose shim has died, while it is undone. They are in no journal.
const KEPT: &str = "poststop-kept";

/// The directory that the guest sees.
pub(crate) const SHARE: &str = "share";

/// The configuration of the pod's VMM.
pub(crate) const VMM_CONFIG: &str = "vmm.json";
/// The guest's console, and its directory.
pub const CONSOLE: &str = "console/console.log";
pub(crate) const CONSOLE_DIRECTORY: &str = "console";

/// How the pod's first container started: a line of JSON ([`StartRecord`]) for each of the requests Create and Start.
/// The last one counts.
pub(crate) const START_RECORD: &str = "start.json";

/// The configuration of a VMM whose VM becomes a template.
pub(crate) const TEMPLATE_CONFIG: &str = "template.json";

/// Directories above a pod's that are removed with the last pod: of its namespace, of its containerd, and of all.
const PARENTS: usize = 3;

/// The longest name of a containerd's directory. The digest of a longer address is used.
const LONGEST_NAME: usize = 200;

/// How long a shim that is killed may take to end.
const SHIM_KILL: Duration = Duration::from_secs(2);

/// How long a cleanup of a pod waits for another process that cleans up the same pod. The other half of the time is for
/// its own work: the one who asked for it must not give up before it has begun or failed.
const CLAIM: Duration = Duration::from_millis(UNDO.as_millis() as u64 / 2);

/// How often another pod may remove the empty parent between the two calls of mkdir.
const CREATE_TRIES: u32 = 16;

/// The open state directory of a living pod.
#[derive(Debug)]
pub(crate) struct StateDir {
    path: PathBuf,
    dir: File,
}

/// Why a pod has no state directory.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StateDirError {
    #[error("{path}: cannot make the state directory")]
    Create { path: PathBuf, source: io::Error },
    #[error("{path}: cannot write the journal")]
    Record { path: PathBuf, source: io::Error },
    #[error("an earlier pod of the same name cannot be cleaned up")]
    Earlier(#[source] UndoError),
    #[error(transparent)]
    Journal(#[from] UndoError),
}

impl StateDir {
    /// Makes the directory and its journal. What an earlier pod of the same name left is undone first. `owners` are
    /// entries of the journal that name the pod's bundle and the shim's socket.
    pub(crate) fn create(path: &Path, owners: &[Effect]) -> Result<(Self, Journal), StateDirError> {
        clean(path).and_then(Cleaned::complete).map_err(StateDirError::Earlier)?;
        let create = |source| StateDirError::Create { path: path.into(), source };
        let record = |source| StateDirError::Record { path: path.into(), source };
        let making = make_claimed(path)?;
        let dir = File::open(path).map_err(create)?;
        let mut journal = journal_of(path)?;
        ProcessId::of(std::process::id())
            .and_then(|shim| journal.record(Effect::Shim(shim)))
            .map_err(record)?;
        drop(making);
        owners
            .iter()
            .try_for_each(|owner| journal.record(owner.clone()))
            .and_then(|()| journal.make_dir(&path.join(CONTAINERS)))
            .and_then(|()| journal.make_dir(&path.join(VOLUMES)))
            .and_then(|()| journal.make_dir(&path.join(POSTSTOP)))
            .and_then(|()| journal.record(Effect::File { path: path.join(START_RECORD) }))
            .and_then(|()| journal.record(Effect::File { path: path.join(CONTAINER_STARTS) }))
            .and_then(|()| journal.record(Effect::File { path: path.join(EVENTS) }))
            .map_err(record)?;
        Ok((Self { path: path.into(), dir }, journal))
    }

    /// Ends the VMM, and leaves nothing of the pod on the host. Takes the [`claim`] for that. Who holds it can rely on
    /// the directory: no other pod's takes its place.
    pub(crate) fn remove(&self, journal: Journal) -> Result<(), UndoError> {
        let mut ends = VmmEnds::begin();
        let Some(directory) = open(&self.path)? else { return Ok(()) };
        let Some(claimed) = claim(&self.path, directory, CLAIM)? else { return Ok(()) };
        let is_own = is_still_at(&self.path, &self.dir)
            .map_err(|source| UndoError::Read { path: self.path.clone(), source })?;
        // If it is not, the pod was removed already, and this directory belongs to a new pod of the same name. The shim
        // runs the hooks itself.
        let removed = if is_own { remove_claimed(&self.path, journal, &mut ends, &|| ()) } else { Ok(()) };
        drop(claimed);
        removed
    }

    /// The directory.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// A path for the socket `name` of the directory that always fits the 108 bytes of sun_path (unix(7)).
    pub(crate) fn socket(&self, name: impl AsRef<Path>) -> PathBuf {
        Path::new("/proc/self/fd").join(self.dir.as_raw_fd().to_string()).join(name)
    }

    /// The directory of all state directories (see [`path_of`]).
    pub(crate) fn root(&self) -> &Path {
        self.path.ancestors().nth(PARENTS).unwrap_or(&self.path)
    }
}

/// Makes the file with how the pod at `path` starts. The journal of the pod names it already.
pub(crate) fn make_start_record(path: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).create(true).mode(0o600).open(path.join(START_RECORD))
}

/// Adds a line to the file. It may be deleted meanwhile. Whoever reads it finds whole lines, and perhaps a part of this
/// one.
pub(crate) fn add_to_start_record(mut file: &File, record: &StartRecord) -> io::Result<()> {
    let mut line = serde_json::to_vec(record)?;
    line.push(b'\n');
    file.write_all(&line)
}

/// The directory of the host that the guest sees, in the state directory of a pod.
pub(crate) fn share_path(state: &Path) -> PathBuf {
    state.join(SHARE)
}

/// The state directory of a pod below `root`. `containerd` is the address of the containerd that the pod belongs to.
pub(crate) fn path_of(root: &Path, containerd: &str, namespace: &str, id: &str) -> PathBuf {
    root.join(name_of(containerd)).join(namespace).join(id)
}

/// The address as the name of a directory: `/run/containerd/containerd.sock` is `run-containerd-containerd.sock`.
fn name_of(containerd: &str) -> String {
    let mut name = String::new();
    for c in containerd.trim_start_matches("unix://").trim_start_matches('/').chars() {
        match c {
            '/' => name.push('-'),
            // So that no two addresses have the same name, and none begins with a dot.
            '-' => name.push_str("%2D"),
            '%' => name.push_str("%25"),
            '.' if name.is_empty() => name.push_str("%2E"),
            c => name.push(c),
        }
    }
    match name.len() {
        0 => "unknown".into(),
        1..=LONGEST_NAME => name,
        _ => format!("{:x}", Sha256::digest(name)),
    }
}

/// The journal of a container of the pod at `path`. It is undone while the pod goes on.
pub(crate) fn container_journal(path: &Path, id: &str) -> Result<Journal, UndoError> {
    Journal::open(&path.join(CONTAINERS).join(id))
}

/// The file with the `poststop` hooks of a container of the pod at `path`. It is in the container's journal.
pub(crate) fn poststop_path(path: &Path, id: &str) -> PathBuf {
    path.join(POSTSTOP).join(id)
}

/// The journal of a volume of the pod at `path`, which has this name in the share. It is undone while the pod goes on.
pub(crate) fn volume_journal(path: &Path, name: &str) -> Result<Journal, UndoError> {
    Journal::open(&path.join(VOLUMES).join(name))
}

/// Undoes what a container of the pod at `path` has on the host, if anything is left.
pub(crate) fn undo_container(path: &Path, id: &str) -> Result<(), UndoError> {
    undo_part(path, CONTAINERS, id)
}

/// The same of a volume.
pub(crate) fn undo_volume(path: &Path, name: &str) -> Result<(), UndoError> {
    undo_part(path, VOLUMES, name)
}

fn undo_part(path: &Path, journals: &str, id: &str) -> Result<(), UndoError> {
    let journal = path.join(journals).join(id);
    if !journal.exists() {
        return Ok(());
    }
    undo_part_journal(Journal::open(&journal)?, path, id)
}

/// `id` is the name in the share.
fn undo_part_journal(journal: Journal, path: &Path, id: &str) -> Result<(), UndoError> {
    if journal.is_damaged() {
        // What its damaged lines named would keep the rest busy.
        for place in share::places_of(&path.join(SHARE), id) {
            unmount_tree(&place).map_err(|source| UndoError::Unmount { path: place.clone(), source })?;
        }
    }
    journal.undo()
}

/// The journal of the pod at `path`.
fn journal_of(path: &Path) -> Result<Journal, UndoError> {
    Journal::open(&path.join(JOURNAL))
}

/// What a pod had that was cleaned up.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Cleaned {
    /// The pid that its VMM had.
    pub(crate) vmm: Option<u32>,
    /// What is left until the VMMs end that hang in the host's kernel: their processes, their cgroup, and the journal.
    left: Option<Left>,
}

/// A state directory, and the VMMs that hang.
#[derive(Debug, PartialEq, Eq)]
struct Left {
    path: PathBuf,
    pids: Vec<u32>,
}

impl Cleaned {
    /// Fails if something is left.
    pub(crate) fn complete(self) -> Result<Self, UndoError> {
        match self.left {
            Some(Left { path, pids }) => Err(UndoError::VmmHangs { path, pids }),
            None => Ok(self),
        }
    }
}

/// Ends what runs for the pod at `path`, removes what it left, and runs the `poststop` hooks of its containers. It is
/// no error if there is nothing. A VMM that does not end is left, since nothing of the pod runs in it any more:
/// [`sweep`] finds it later. Blocks.
pub(crate) fn clean(path: &Path) -> Result<Cleaned, UndoError> {
    match open(path)? {
        Some(directory) => clean_opened(path, directory),
        None => Ok(Cleaned::default()),
    }
}

/// [`clean`] for the pod whose state directory was opened at `path`. A new pod of the same name, which has another
/// directory there by now, is left alone.
pub(crate) fn clean_opened(path: &Path, directory: File) -> Result<Cleaned, UndoError> {
    let ends = VmmEnds::begin();
    match claim(path, directory, CLAIM)? {
        Some(_claim) => clean_claimed(path, ends),
        None => Ok(Cleaned::default()),
    }
}

/// [`clean`] for the shim of the pod, which may have ended the pod before. A new pod of the same name may be there.
pub(crate) fn clean_own(path: &Path) -> Result<Cleaned, UndoError> {
    let is_of_another = |journal: Journal| {
        journal.shim().is_some_and(|shim| shim.pid != std::process::id() && shim.may_live())
    };
    let Some(directory) = open(path)? else { return Ok(Cleaned::default()) };
    if Journal::look(&path.join(JOURNAL)).is_ok_and(is_of_another) {
        return Ok(Cleaned::default());
    }
    clean_opened(path, directory)
}

/// Opens the state directory at `path`. Whoever cleans up does this first, and by that says which pod is meant: as long
/// as the directory is open, no other one is taken for it. None: there is none.
pub(crate) fn open(path: &Path) -> Result<Option<File>, UndoError> {
    match File::open(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        opened => opened.map(Some).map_err(|source| UndoError::Lock { path: path.into(), source }),
    }
}

/// Locks the open state directory for cleaning it up, until the lock is dropped. Otherwise two processes undo the same
/// journal, and the slower of them undoes what a new pod of the same name has done since. A living pod does not hold
/// this lock, but takes it to end. None: it is not at `path` any more, so the previous holder of the lock has done it.
fn claim(path: &Path, directory: File, within: Duration) -> Result<Option<DirectoryLock>, UndoError> {
    let failed = |source| UndoError::Lock { path: path.into(), source };
    let lock = match DirectoryLock::take_opened(directory, within) {
        Err(e) if e.kind() == io::ErrorKind::TimedOut => {
            return Err(UndoError::Busy { path: path.into(), seconds: within.as_secs() });
        }
        other => other.map_err(failed)?,
    };
    Ok(lock.is_still_at(path).map_err(failed)?.then_some(lock))
}

/// [`clean`], for a caller that holds the [`claim`] on the directory.
fn clean_claimed(path: &Path, mut ends: VmmEnds) -> Result<Cleaned, UndoError> {
    let journal = journal_of(path)?;
    let vmm = journal.vmm().map(|process| process.pid);
    let mut cleaned = Cleaned { vmm, left: None };
    // A shim that still runs would work against the cleanup.
    let other = journal.shim().filter(|shim| shim.pid != std::process::id());
    if let Some(shim) = other {
        // First, so that the pod's programs end whatever becomes of the shim.
        journal.kill_vmms(&mut ends);
        match shim.kill(SHIM_KILL) {
            // One of its threads hangs in the kernel. It executes no code of the shim any more.
            Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                tracing::error!(error = chain(&error), "the pod is cleaned up nevertheless");
            }
            killed => killed.map_err(|source| UndoError::Effect { effect: Effect::Shim(shim), source })?,
        }
        if let Some(socket) = journal.shim_socket() {
            // Gone already if the shim ended by itself.
            drop(shim_socket::remove_dead(socket));
        }
    }
    // What the shim has done until its end is in it, too.
    let journal = if other.is_some() { journal_of(path)? } else { journal };
    let hooks = keep_hooks(path)?;
    match remove_claimed(path, journal, &mut ends, &|| SavedHooks::run_all(&hooks)) {
        Err(hangs @ UndoError::VmmHangs { .. }) => {
            tracing::error!("{hangs}");
            cleaned.left = Some(Left { path: path.into(), pids: ends.hung() });
        }
        removed => removed?,
    }
    Ok(cleaned)
}

/// Puts the `poststop` hooks of the pod at `path` where the undo of its journals leaves them. Returns the directory.
/// That makes no file: /run may have no room until the pod is undone.
fn keep_hooks(path: &Path) -> Result<PathBuf, UndoError> {
    let (from, to) = (path.join(POSTSTOP), path.join(KEPT));
    let kept = match fs::rename(&from, &to) {
        // Of a pod of an earlier version, or of one that is undone in part.
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        // An earlier version, which moved one file after the other, was killed.
        Err(e) if e.kind() == io::ErrorKind::DirectoryNotEmpty => move_all(&from, &to),
        renamed => renamed,
    };
    kept.map_err(|source| UndoError::Effect { effect: Effect::Directory { path: to.clone() }, source })?;
    Ok(to)
}

/// Moves what is in a directory to another one.
fn move_all(from: &Path, to: &Path) -> io::Result<()> {
    for entry in fs::read_dir(from)? {
        let name = entry?.file_name();
        fs::rename(from.join(&name), to.join(&name))?;
    }
    Ok(())
}

/// The state directories of all pods below `root`. What cannot be listed is left out.
pub(crate) fn pods(root: &Path) -> impl Iterator<Item = PathBuf> {
    containerds(root).flat_map(|path| entries(&path)).flat_map(|path| entries(&path))
}

/// The directories of all containerds below `root`.
pub(crate) fn containerds(root: &Path) -> impl Iterator<Item = PathBuf> {
    let is_containerd =
        |path: &PathBuf| path.file_name().is_some_and(|name| !name.as_encoded_bytes().starts_with(b"."));
    entries(root).filter(is_containerd)
}

/// What is in a directory.
pub(crate) fn entries(path: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path())
}

/// Removes what crashed shims left below `root`. Blocks.
pub(crate) fn sweep(root: &Path) {
    for pod in pods(root) {
        match remove_crashed(&pod) {
            None => {}
            Some(Ok(())) => tracing::warn!(path = %pod.display(), "removed what a crashed shim left"),
            Some(Err(error)) => {
                tracing::warn!(path = %pod.display(), error = chain(&error), "a crashed shim left this")
            }
        }
    }
}

/// Removes what a crashed shim left of `pod`, and runs the `poststop` hooks. None: the pod is somebody's. Blocks.
///
/// This may be before or while containerd runs `... delete` for the pod, which then finds less to do. It must not wait
/// for containerd: a `... delete` that was killed is not run again until containerd restarts.
pub(crate) fn remove_crashed(pod: &Path) -> Option<Result<(), UndoError>> {
    if !has_crashed(pod) {
        return None;
    }
    // Somebody else cleans it up already, or has.
    let directory = open(pod).ok().flatten()?;
    let Ok(Some(_claim)) = claim(pod, directory, Duration::ZERO) else { return None };
    // By now it may be that of a new pod of the same name.
    has_crashed(pod).then(|| clean_claimed(pod, VmmEnds::begin()).and_then(Cleaned::complete).map(drop))
}

/// Whether the shim of the pod is dead.
pub(crate) fn has_crashed(pod: &Path) -> bool {
    journal_of_crashed(pod).is_some()
}

/// Whether the shim of the pod is dead, and containerd has removed the bundle.
pub(crate) fn is_abandoned(pod: &Path) -> bool {
    let is_gone = |bundle: &Path| bundle.try_exists().is_ok_and(|exists| !exists);
    journal_of_crashed(pod).is_some_and(|journal| journal.bundle().is_some_and(is_gone))
}

/// None: the shim lives, or has not written its journal yet, or removes it.
fn journal_of_crashed(pod: &Path) -> Option<Journal> {
    let journal = Journal::look(&pod.join(JOURNAL)).ok()?;
    journal.shim().is_some_and(|shim| !shim.may_live()).then_some(journal)
}

/// Ends the VMMs, undoes the journals of the containers and of the pod, and removes the directory and its empty
/// parents. A step that fails does not stop the rest. The first failure is the error, and the journals that could not
/// be undone stay for another try. If the pod's journal is damaged, everything in the directory is removed.
///
/// `undone` is called when nothing is left but the directory and the pod's journal, and VMMs that hang. If this process
/// is killed in it, another try calls it again.
fn remove_claimed(
    path: &Path,
    journal: Journal,
    ends: &mut VmmEnds,
    undone: &dyn Fn(),
) -> Result<(), UndoError> {
    ends.forget_ended();
    journal.kill_vmms(ends);
    if journal.is_damaged() {
        remove_damaged(path, &journal, ends, undone)?;
    } else {
        let parts = undo_parts(path);
        let removed = parts.and(journal.undo_effects(ends));
        if is_all_but_hung(&removed) {
            undone();
            gone(fs::remove_dir(path.join(KEPT))).map_err(|source| not_removed(path, source))?;
        }
        removed?;
    }
    gone(fs::remove_file(path.join(JOURNAL))).map_err(|source| not_removed(path, source))?;
    gone(fs::remove_dir(path)).map_err(|source| not_removed(path, source))?;
    remove_empty_parents(path);
    Ok(())
}

/// Whether everything is undone, except for VMMs that hang.
fn is_all_but_hung(undone: &Result<(), UndoError>) -> bool {
    matches!(undone, Ok(()) | Err(UndoError::VmmHangs { .. }))
}

/// Removes all but the journal that is in the directory of a pod whose journal is damaged.
fn remove_damaged(
    path: &Path,
    journal: &Journal,
    ends: &mut VmmEnds,
    undone: &dyn Fn(),
) -> Result<(), UndoError> {
    // The VMM may not be among those that the journal still names.
    let killed = pod_cgroups::kill(path, ends);
    for config in [VMM_CONFIG, TEMPLATE_CONFIG].map(|name| path.join(name)) {
        if let Err(error) = ends.kill_running_with(&config) {
            let config = config.display();
            tracing::error!(%config, error = chain(&error), "cannot end the VMM with this configuration");
        }
    }
    let parts = undo_parts(path);
    let unmounted = unmount_tree(path).map_err(|source| UndoError::Unmount { path: path.into(), source });
    // The journal stays until the last step, so that another try finds it damaged and takes these steps again.
    let pod = journal.undo_effects(ends);
    let removed = killed.and(parts).and(unmounted).and(pod);
    if is_all_but_hung(&removed) {
        undone();
        remove_all_but(path, JOURNAL).map_err(|source| not_removed(path, source))?;
    }
    removed
}

fn not_removed(path: &Path, source: io::Error) -> UndoError {
    UndoError::Effect { effect: Effect::Directory { path: path.into() }, source }
}

fn remove_empty_parents(path: &Path) {
    for parent in path.ancestors().skip(1).take(PARENTS) {
        // Fails if other pods use it, or if it was never made.
        drop(fs::remove_dir(parent));
    }
}

/// Undoes the journals of the containers and of their volumes.
fn undo_parts(path: &Path) -> Result<(), UndoError> {
    undo_all(path, CONTAINERS).and(undo_all(path, VOLUMES))
}

fn undo_all(path: &Path, journals: &str) -> Result<(), UndoError> {
    let journals = path.join(journals);
    let list = |source| UndoError::List { path: journals.clone(), source };
    let entries = match fs::read_dir(&journals) {
        // The pod has none.
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other.map_err(list)?,
    };
    let mut result = Ok(());
    for entry in entries {
        let undone = match entry {
            Ok(entry) => Journal::open(&entry.path())
                .and_then(|journal| undo_part_journal(journal, path, &entry.file_name().to_string_lossy())),
            Err(source) => Err(list(source)),
        };
        result = result.and(undone);
    }
    result
}

/// Makes the directory and its parents, and takes the [`claim`]. While it is held, `bulkhead gc` does not take the
/// directory for one whose maker was killed, however long its maker stands still.
fn make_claimed(path: &Path) -> Result<DirectoryLock, StateDirError> {
    for _ in 0..CREATE_TRIES {
        make(path).map_err(|source| StateDirError::Create { path: path.into(), source })?;
        // None: it was removed in between.
        if let Some(directory) = open(path)?
            && let Some(claimed) = claim(path, directory, CLAIM)?
        {
            return Ok(claimed);
        }
    }
    Err(StateDirError::Create { path: path.into(), source: io::ErrorKind::NotFound.into() })
}

/// Makes the directory and its parents. If that fails, no empty parent is left: there is no journal yet.
fn make(path: &Path) -> io::Result<()> {
    make_all(path).inspect_err(|_| remove_empty_parents(path))
}

fn make_all(path: &Path) -> io::Result<()> {
    let mut builder = DirBuilder::new();
    builder.recursive(true).mode(0o711);
    let mut tries = CREATE_TRIES;
    loop {
        let parent = path.parent().map_or(Ok(()), |parent| builder.create(parent));
        match parent.and_then(|()| DirBuilder::new().mode(0o700).create(path)) {
            Err(e) if e.kind() == io::ErrorKind::NotFound && tries > 0 => tries -= 1,
            other => return other,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        os::unix::net::UnixListener,
        process::Command,
        sync::atomic::{AtomicBool, Ordering},
        thread,
    };

    use nix::mount::{MsFlags, mount};
    use serde_json::json;

    use super::*;
    use crate::{
        host::{cgroup, process_id::sees_all_processes},
        testing::{InSystemCall, PidNamespace, private_mounts, vmm_with},
    };

    /// Ends the other threads of a test even when an assertion fails.
    struct EndOnDrop<'a>(&'a AtomicBool);

    impl Drop for EndOnDrop<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    #[test]
    fn nothing_is_left_and_neighbours_stay() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("run");
        let (one, first) = StateDir::create(&path_of(&root, "/c", "default", "one"), &[]).unwrap();
        let (two, second) = StateDir::create(&path_of(&root, "/c", "default", "two"), &[]).unwrap();
        one.remove(first).unwrap();
        assert!(root.join("c/default/two").exists() && !root.join("c/default/one").exists());
        two.remove(second).unwrap();
        assert!(!root.exists());
    }

    #[test]
    fn a_directory_that_cannot_be_made_leaves_no_parents() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("run");
        for (namespace, id) in [("ns", "x".repeat(300)), (&*"x".repeat(300), "id".into())] {
            let error = StateDir::create(&path_of(&root, "/c", namespace, &id), &[]).unwrap_err();
            assert!(matches!(error, StateDirError::Create { .. }), "{error}");
            assert!(!root.exists());
        }
    }

    #[test]
    fn delete_ends_a_shim_that_still_lives_and_works_twice() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run/c/ns/demo");
        make(&path).unwrap();
        let mut shim = Command::new("sleep").arg("60").spawn().unwrap();
        let mut vmm = Command::new("sleep").arg("60").spawn().unwrap();
        let mut journal = journal_of(&path).unwrap();
        journal.record(Effect::Shim(ProcessId::of(shim.id()).unwrap())).unwrap();
        journal.record(Effect::ShimSocket { path: dir.path().join("socket") }).unwrap();
        journal.make_dir(&path.join(CONTAINERS)).unwrap();
        journal.record(Effect::Vmm(ProcessId::of(vmm.id()).unwrap())).unwrap();
        drop(journal);
        drop(UnixListener::bind(dir.path().join("socket")).unwrap());
        let cleaned = Cleaned { vmm: Some(vmm.id()), ..Cleaned::default() };
        assert_eq!(clean(&path).unwrap(), cleaned);
        assert!(!dir.path().join("socket").exists());
        assert!(!shim.wait().unwrap().success() && !vmm.wait().unwrap().success());
        assert_eq!(clean(&path).unwrap(), Cleaned::default());
        assert!(!dir.path().join("run").exists());
    }

    #[test]
    fn an_earlier_sandbox_of_the_same_name_is_cleaned_first() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run/c/ns/demo");
        make(&path).unwrap();
        journal_of(&path).unwrap().make_dir(&path.join("share")).unwrap();
        let (_state, journal) = StateDir::create(&path, &[]).unwrap();
        assert_eq!(journal.shim(), Some(ProcessId::of(std::process::id()).unwrap()));
        assert!(!path.join("share").exists());
    }

    #[test]
    fn what_cannot_be_undone_does_not_keep_the_rest_and_is_tried_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run/c/ns/demo");
        let (state, mut journal) = StateDir::create(&path, &[]).unwrap();
        journal.make_dir(&path.join("of-the-pod")).unwrap();
        // Directories are read in any order, so one failure is before one of the others.
        for id in ["a", "b", "c", "d"] {
            container_journal(&path, id).unwrap().make_dir(&path.join(id)).unwrap();
        }
        for id in ["a", "d"] {
            fs::write(path.join(id).join("busy"), "").unwrap();
        }
        let error = state.remove(journal).unwrap_err().to_string();
        assert!(error.starts_with("cannot undo the directory"), "{error}");
        assert!(!path.join("b").exists() && !path.join("c").exists() && !path.join("of-the-pod").exists());
        for id in ["a", "d"] {
            fs::remove_file(path.join(id).join("busy")).unwrap();
        }
        clean(&path).unwrap();
        assert!(!dir.path().join("run").exists());
    }

    /// Saves a hook of the container `id` that adds a line to the file `said`.
    fn save_hook(path: &Path, id: &str, said: &Path) {
        let script = format!("echo {id} >> {}", said.display());
        let hook = json!({"path": "/bin/sh", "args": ["sh", "-c", script]});
        let spec = json!({"ociVersion": "1.1.0", "hooks": {"poststop": [hook]}});
        let saved = json!({"id": id, "bundle": "/", "spec": spec});
        let file = poststop_path(path, id);
        container_journal(path, id).unwrap().record(Effect::File { path: file.clone() }).unwrap();
        fs::write(file, saved.to_string()).unwrap();
    }

    #[test]
    fn a_pod_with_hooks_is_cleaned_up_where_no_file_can_be_made() {
        private_mounts();
        let (full, said) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        mount(Some("t"), full.path(), Some("tmpfs"), MsFlags::empty(), Some("nr_inodes=40")).unwrap();
        let path = full.path().join("c/ns/demo");
        drop(StateDir::create(&path, &[]).unwrap());
        let said = said.path().join("said");
        save_hook(&path, "one", &said);
        let error = (0..40).find_map(|number| File::create(full.path().join(number.to_string())).err());
        assert_eq!(error.unwrap().kind(), io::ErrorKind::StorageFull);
        clean(&path).unwrap();
        assert!(!full.path().join("c").exists());
        assert_eq!(fs::read_to_string(&said).unwrap(), "one\n");
    }

    #[test]
    fn hooks_that_another_version_has_kept_run_with_those_that_it_has_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run/c/ns/demo");
        drop(StateDir::create(&path, &[]).unwrap());
        let said = dir.path().join("said");
        for id in ["one", "two"] {
            save_hook(&path, id, &said);
        }
        fs::create_dir(path.join(KEPT)).unwrap();
        fs::rename(poststop_path(&path, "one"), path.join(KEPT).join("one")).unwrap();
        clean(&path).unwrap();
        assert!(!dir.path().join("run").exists());
        let said = fs::read_to_string(&said).unwrap();
        assert!(["one\ntwo\n", "two\none\n"].contains(&said.as_str()), "{said}");
    }

    #[test]
    fn what_fails_is_not_taken_for_the_journal() {
        private_mounts();
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("file"), "").unwrap();
        let error = clean(&dir.path().join("file/demo")).unwrap_err().to_string();
        assert!(error.ends_with("cannot lock the state directory"), "{error}");
        let path = dir.path().join("run/c/ns/demo");
        let (_state, _journal) = StateDir::create(&path, &[]).unwrap();
        fs::remove_dir(path.join(CONTAINERS)).unwrap();
        fs::write(path.join(CONTAINERS), "").unwrap();
        let error = clean(&path).unwrap_err().to_string();
        assert!(error.ends_with("containers: cannot list the journals"), "{error}");
    }

    #[test]
    fn a_pod_that_two_remove_at_once_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run/c/ns/demo");
        let (state, journal) = StateDir::create(&path, &[]).unwrap();
        // A Delete that is tried again while the first one hangs.
        let again = journal_of(&path).unwrap();
        state.remove(journal).unwrap();
        state.remove(again).unwrap();
        assert!(!dir.path().join("run").exists());
    }

    #[test]
    fn a_pod_that_was_removed_already_does_not_remove_a_new_one_of_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run/c/ns/demo");
        let (old, journal) = StateDir::create(&path, &[]).unwrap();
        clean(&path).unwrap();
        let (new, other) = StateDir::create(&path, &[]).unwrap();
        old.remove(journal).unwrap();
        assert!(path.join(JOURNAL).exists() && path.join(CONTAINERS).exists());
        new.remove(other).unwrap();
        assert!(!dir.path().join("run").exists());
    }

    #[test]
    fn what_a_crashed_shim_left_is_removed_also_if_containerd_still_has_the_bundle() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("run");
        let dead = ProcessId { pid: std::process::id(), start_time: 1, pid_namespace: None };
        let living = ProcessId::of(std::process::id()).unwrap();
        // Of a containerd in a container, which has the same /run.
        let other = PidNamespace::new();
        let elsewhere = ProcessId { pid_namespace: Some(other.inode), ..dead };
        // That container has ended.
        let ended = ProcessId { pid_namespace: Some(1), ..dead };
        fs::create_dir(dir.path().join("bundle")).unwrap();
        for (id, shim, bundle) in [
            ("left", dead, "gone"),
            ("lives", living, "gone"),
            ("known", dead, "bundle"),
            ("elsewhere", elsewhere, "gone"),
            ("ended-elsewhere", ended, "gone"),
        ] {
            let path = path_of(&root, "/c", "ns", id);
            make(&path).unwrap();
            let mut journal = journal_of(&path).unwrap();
            journal.record(Effect::Shim(shim)).unwrap();
            journal.record(Effect::Bundle { path: dir.path().join(bundle) }).unwrap();
        }
        fs::create_dir_all(root.join(".templates/1/x")).unwrap();
        fs::create_dir(root.join("c/ns/begun")).unwrap();
        sweep(&root);
        let mut left: Vec<_> =
            fs::read_dir(root.join("c/ns")).unwrap().map(|e| e.unwrap().file_name()).collect();
        left.sort();
        left.retain(|id| sees_all_processes().unwrap() || id != "ended-elsewhere");
        assert_eq!(left, ["begun", "elsewhere", "lives"]);
        assert!(root.join(".templates/1/x").exists());
    }

    #[test]
    fn a_pod_is_not_removed_while_another_process_looks_at_its_directory() {
        let dir = tempfile::tempdir().unwrap();
        let path = path_of(&dir.path().join("run"), "/c", "ns", "claimed");
        let (state, journal) = StateDir::create(&path, &[]).unwrap();
        let claimed = claim(&path, open(&path).unwrap().unwrap(), Duration::ZERO).unwrap();
        thread::scope(|scope| {
            let removal = scope.spawn(|| state.remove(journal));
            thread::sleep(Duration::from_millis(50));
            assert!(path.join(JOURNAL).exists());
            drop(claimed);
            removal.join().unwrap().unwrap();
        });
        assert!(!path.exists());
    }

    #[test]
    fn a_new_pod_is_left_alone_by_who_removes_an_old_one_of_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("run");
        let path = path_of(&root, "/c", "ns", "again");
        let dead = ProcessId { pid: std::process::id(), start_time: 1, pid_namespace: None };
        let ends = AtomicBool::new(false);
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !ends.load(Ordering::Relaxed) {
                        sweep(&root);
                    }
                });
            }
            let ended = EndOnDrop(&ends);
            for _ in 0..300 {
                make(&path).unwrap();
                let mut journal = journal_of(&path).unwrap();
                journal.make_dir(&path.join("share")).unwrap();
                journal.record(Effect::Bundle { path: dir.path().join("gone") }).unwrap();
                // From here on it is abandoned.
                journal.record(Effect::Shim(dead)).unwrap();
                let (state, mut journal) = StateDir::create(&path, &[]).unwrap();
                journal.make_dir(&path.join("share")).unwrap();
                thread::sleep(Duration::from_micros(200));
                assert!(path.join(JOURNAL).exists() && path.join("share").exists());
                state.remove(journal).unwrap();
            }
            drop(ended);
        });
    }

    #[test]
    fn a_new_pod_is_left_alone_by_who_has_waited_to_clean_up_an_old_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = path_of(&dir.path().join("run"), "/c", "ns", "again");
        let dead = ProcessId { pid: std::process::id(), start_time: 1, pid_namespace: None };
        make(&path).unwrap();
        journal_of(&path).unwrap().record(Effect::Shim(dead)).unwrap();
        let [late, last, first] = [0; 3].map(|_| open(&path).unwrap().unwrap());
        let claimed = claim(&path, first, Duration::ZERO).unwrap();
        let mut shim = Command::new("sleep").arg("60").spawn().unwrap();
        thread::scope(|scope| {
            let waits = scope.spawn(|| clean_opened(&path, late));
            thread::sleep(Duration::from_millis(50));
            clean_claimed(&path, VmmEnds::begin()).unwrap();
            assert!(!path.exists());
            make(&path).unwrap();
            journal_of(&path).unwrap().record(Effect::Shim(ProcessId::of(shim.id()).unwrap())).unwrap();
            drop(claimed);
            assert_eq!(waits.join().unwrap().unwrap(), Cleaned::default());
        });
        assert_eq!(clean_opened(&path, last).unwrap(), Cleaned::default());
        // The shim of the old pod may be asked once more to end it.
        assert_eq!(clean_own(&path).unwrap(), Cleaned::default());
        assert!(path.join(JOURNAL).exists() && shim.try_wait().unwrap().is_none());
        shim.kill().unwrap();
        shim.wait().unwrap();
        clean_own(&path).unwrap();
        assert!(!path.exists());
    }

    #[test]
    fn what_another_process_cleans_up_is_waited_for_and_not_swept() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("run");
        let path = path_of(&root, "/c", "ns", "left");
        make(&path).unwrap();
        let mut journal = journal_of(&path).unwrap();
        journal
            .record(Effect::Shim(ProcessId { pid: std::process::id(), start_time: 1, pid_namespace: None }))
            .unwrap();
        journal.record(Effect::Bundle { path: dir.path().join("gone") }).unwrap();
        let claimed = claim(&path, open(&path).unwrap().unwrap(), Duration::ZERO).unwrap();
        assert!(claimed.is_some());
        sweep(&root);
        assert!(path.exists());
        let error = clean(&path).unwrap_err();
        assert!(matches!(error, UndoError::Busy { .. }), "{error}");
        drop(claimed);
        sweep(&root);
        assert!(!path.exists() && open(&path).unwrap().is_none());
    }

    fn damage(path: &Path, change: impl FnOnce(&str) -> String) {
        let text = fs::read_to_string(path).unwrap();
        fs::write(path, change(&text)).unwrap();
    }

    #[test]
    fn a_pod_whose_journal_is_damaged_is_removed_with_all_that_is_in_its_directory() {
        private_mounts();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run/c/ns/demo");
        let (_state, mut journal) = StateDir::create(&path, &[]).unwrap();
        let volume = dir.path().join("volume");
        fs::create_dir(&volume).unwrap();
        fs::write(volume.join("data"), "kept").unwrap();
        share::make_tmpfs(&mut journal, &path.join("etc"), "mode=0755", 8).unwrap();
        mount(Some(&volume), &path.join("etc"), None::<&str>, MsFlags::MS_BIND, None::<&str>).unwrap();
        fs::write(path.join("vmm.json"), "").unwrap();
        let mut vmm = vmm_with(&path.join("vmm.json"));
        drop(journal);
        // The mount is not known any more, so its directory cannot be removed; of the VMM nothing is known.
        damage(&path.join(JOURNAL), |text| text.replace("\"mount\"", "\"mou"));
        clean(&path).unwrap();
        assert!(!vmm.wait().unwrap().success());
        assert!(!dir.path().join("run").exists());
        assert_eq!(fs::read_to_string(volume.join("data")).unwrap(), "kept");
        assert_eq!(clean(&path).unwrap(), Cleaned::default());
    }

    #[test]
    fn a_vmm_that_hides_is_found_by_its_cgroup_when_the_journal_is_damaged() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run/c/ns/demo");
        let (_state, mut journal) = StateDir::create(&path, &[]).unwrap();
        let name = format!("/bulkhead-test-hides-{}/x", std::process::id());
        let owner = cgroup::Owner { state: &path, root: dir.path() };
        let cgroup = cgroup::create(&mut journal, Path::new(&name), owner).unwrap();
        // Its command line names no configuration. What names its pid, and its cgroup, cannot be read.
        let mut vmm = Command::new("sleep").arg("60").spawn().unwrap();
        for procs in cgroup.procs() {
            fs::write(procs, vmm.id().to_string()).unwrap();
        }
        journal.record(Effect::Vmm(ProcessId::of(vmm.id()).unwrap())).unwrap();
        drop(journal);
        damage(&path.join(JOURNAL), |text| text.replace("\"cgroup\"", "\"cg").replace("\"vmm\"", "\"v"));
        clean(&path).unwrap();
        assert!(!vmm.wait().unwrap().success());
        let parent = cgroup.directories[0].path.parent().unwrap();
        assert!(!parent.exists() && !dir.path().join("run").exists());
    }

    #[test]
    fn a_vmm_that_hangs_is_all_that_is_left_when_the_journal_is_damaged() {
        private_mounts();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run/c/ns/demo");
        let (_state, mut journal) = StateDir::create(&path, &[]).unwrap();
        let name = format!("/bulkhead-test-hangs-{}/x", std::process::id());
        let owner = cgroup::Owner { state: &path, root: dir.path() };
        let cgroup = cgroup::create(&mut journal, Path::new(&name), owner).unwrap();
        let place = dir.path().join("hangs");
        fs::create_dir(&place).unwrap();
        let vmm = InSystemCall::new(&place);
        for procs in cgroup.procs() {
            fs::write(procs, vmm.pid().to_string()).unwrap();
        }
        journal.record(Effect::Vmm(ProcessId::of(vmm.pid()).unwrap())).unwrap();
        fs::write(path.join("unknown"), "").unwrap();
        drop(journal);
        // First a line that does not matter, then those that name the VMM and its cgroup.
        for (word, cut) in [("\"shim\"", "\"sh\""), ("\"vmm\"", "\"v\""), ("\"cgroup\"", "\"cg\"")] {
            damage(&path.join(JOURNAL), |text| text.replace(word, cut));
            let left = Some(Left { path: path.clone(), pids: vec![vmm.pid()] });
            assert_eq!(clean(&path).unwrap().left, left);
            let names: Vec<_> =
                fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().file_name()).collect();
            assert_eq!(names, [JOURNAL]);
        }
        drop(vmm);
        clean(&path).unwrap().complete().unwrap();
        let parent = cgroup.directories[0].path.parent().unwrap();
        assert!(!parent.exists() && !dir.path().join("run").exists());
    }

    #[test]
    fn a_cgroup_that_stays_does_not_keep_the_rest_of_a_damaged_pod() {
        private_mounts();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run/c/ns/demo");
        let (_state, mut journal) = StateDir::create(&path, &[]).unwrap();
        let name = format!("/bulkhead-test-stays-{}/x", std::process::id());
        let owner = cgroup::Owner { state: &path, root: dir.path() };
        let cgroup = cgroup::create(&mut journal, Path::new(&name), owner).unwrap();
        share::make_tmpfs(&mut journal, &path.join("etc"), "mode=0755", 8).unwrap();
        drop(journal);
        damage(&path.join(JOURNAL), |text| text.replace("\"cgroup\"", "\"cg"));
        // A cgroup that the pod did not make keeps its parent from being removed.
        let others = cgroup.directories[0].path.join("others");
        fs::create_dir(&others).unwrap();
        let error = clean(&path).unwrap_err();
        assert!(matches!(error, UndoError::Kill { .. }), "{error}");
        assert!(!path.join("etc").exists());
        assert!(path.join(JOURNAL).exists());
        fs::remove_dir(others).unwrap();
        // Deeper than what is removed.
        let deep = path.join("deep");
        fs::create_dir_all(deep.join("d/".repeat(70))).unwrap();
        assert!(matches!(clean(&path), Err(UndoError::Effect { .. })));
        assert!(path.join(JOURNAL).exists());
        fs::remove_dir_all(deep).unwrap();
        clean(&path).unwrap();
        assert!(!dir.path().join("run").exists());
    }

    #[test]
    fn a_container_whose_journal_is_damaged_is_removed_and_its_pod_goes_on() {
        private_mounts();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run/c/ns/demo");
        let (state, mut pod) = StateDir::create(&path, &[]).unwrap();
        share::make(&mut pod, &path.join(SHARE)).unwrap();
        for id in ["one", "two"] {
            let mut journal = container_journal(&path, id).unwrap();
            share::add(&mut journal, &path.join(SHARE), id, 1, |_| Ok(())).unwrap();
        }
        damage(&path.join(CONTAINERS).join("one"), |text| text.replace("\"moved\"", "\"m"));
        undo_container(&path, "one").unwrap();
        assert!(!path.join("share/one").exists() && !path.join(CONTAINERS).join("one").exists());
        assert!(path.join("share/two").exists());
        state.remove(pod).unwrap();
        assert!(!dir.path().join("run").exists());
    }

    /// `bulkhead gc` takes the same lock to remove what seems to have been left by a maker.
    #[test]
    fn a_directory_is_locked_until_its_maker_is_recorded() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run/c/ns/demo");
        let claim = || claim(&path, open(&path).unwrap().unwrap(), Duration::ZERO);
        let making = make_claimed(&path).unwrap();
        assert!(matches!(claim(), Err(UndoError::Busy { .. })));
        drop(making);
        claim().unwrap().unwrap();
        fs::remove_dir(&path).unwrap();
        let _created = StateDir::create(&path, &[]).unwrap();
        claim().unwrap().unwrap();
    }

    #[test]
    fn pods_of_two_containerds_are_apart() {
        assert_eq!(name_of("/run/containerd/containerd.sock"), "run-containerd-containerd.sock");
        assert_eq!(name_of("/run/a-b/c"), "run-a%2Db-c");
        assert_ne!(name_of("/run/a/b"), name_of("/run/a-b"));
        assert_ne!(name_of("/a%2Db"), name_of("/a-b"));
        assert_eq!(name_of("unix:///.templates"), "%2Etemplates");
        assert_eq!((name_of("").as_str(), name_of(&"x".repeat(300)).len()), ("unknown", 64));
    }

    #[test]
    fn sockets_have_short_paths() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("n".repeat(76)).join("i".repeat(76));
        let (state, _journal) = StateDir::create(&path, &[]).unwrap();
        let listener = std::os::unix::net::UnixListener::bind(state.socket("vsock.sock_1026"));
        assert!(listener.is_ok());
        assert!(path.join("vsock.sock_1026").exists());
    }
}
