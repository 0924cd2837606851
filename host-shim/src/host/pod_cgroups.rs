//! Ends what runs in the cgroups of a pod whose journal is damaged.
//!
//! The cgroups are found by the extended attribute that the shim gave them. Neither a guest nor a VMM can give a cgroup
//! such an attribute or leave its cgroup: that takes a capability on the host. The command line of a VMM, by contrast,
//! is in its memory, so a guest that has taken over the VMM could change it.

use std::{
    fs, io,
    path::{Path, PathBuf},
    thread::sleep,
    time::Duration,
};

use crate::host::{
    cgroup, journal::UndoError, mountinfo, process_id::ProcessId, undo::remove_cgroup, vmm_ends::VmmEnds,
};

/// How often the shim checks whether all processes of the cgroups have ended, and the pause between two checks. They
/// have the time of VMMs besides.
const LOOKS: u32 = 500;
const PAUSE: Duration = Duration::from_millis(10);

/// How many directories of one hierarchy are looked at. No host has that many cgroups.
const MOST: usize = 1 << 17;

/// Kills all processes in the cgroups of the pod with the state directory `pod`, and removes those cgroups. Cgroups
/// that the shim did not make, or that another pod uses too, are left alone. A cgroup that fails does not stop the
/// rest; the first failure is the error. It is no failure if a cgroup stays because of processes that hang: they are in
/// `ends`. The shim puts nothing but VMMs there.
pub(crate) fn kill(pod: &Path, ends: &mut VmmEnds) -> Result<(), UndoError> {
    let roots =
        cgroup::roots().map_err(|source| UndoError::Read { path: mountinfo::TABLE.into(), source })?;
    let mut result = Ok(());
    let mut looks = LOOKS;
    for root in roots {
        for path in owned(&root, pod) {
            let removed = kill_members(&path, ends, &mut looks).and_then(|left| match left {
                Members::None => remove(&root, &path),
                Members::Hang => Ok(()),
            });
            result = result.and(removed.map_err(|source| UndoError::Kill { path, source }));
        }
    }
    result
}

/// The cgroups of the hierarchy at `root` that the pod owns.
fn owned(root: &Path, pod: &Path) -> Vec<PathBuf> {
    let mut owned = Vec::new();
    let (mut waiting, mut seen) = (vec![root.to_owned()], 0);
    while let Some(directory) = waiting.pop() {
        seen += 1;
        if seen > MOST {
            tracing::error!(root = %root.display(), "there are too many cgroups to look for those of the pod");
            break;
        }
        if cgroup::owner(&directory).is_some_and(|owner| owner == pod) {
            owned.push(directory.clone());
        }
        // A cgroup may be removed while we look.
        let entries = fs::read_dir(&directory).into_iter().flatten().flatten();
        let is_directory = |entry: &fs::DirEntry| entry.file_type().is_ok_and(|kind| kind.is_dir());
        waiting.extend(entries.filter(is_directory).map(|entry| entry.path()));
    }
    owned
}

/// What is left in a cgroup after its processes were killed.
enum Members {
    None,
    /// Those that do not end.
    Hang,
}

fn kill_members(cgroup: &Path, ends: &mut VmmEnds, looks: &mut u32) -> io::Result<Members> {
    loop {
        let pids = members(cgroup)?;
        if pids.is_empty() {
            return Ok(Members::None);
        }
        if pids.iter().all(|pid| ProcessId::of(*pid).is_ok_and(|process| ends.has(process))) {
            return Ok(Members::Hang);
        }
        for pid in pids {
            // An error: it has ended.
            let Ok(process) = ProcessId::of(pid) else { continue };
            // If its pid is still in the list, this is the process that is.
            if pid != std::process::id() && members(cgroup)?.contains(&pid) {
                ends.kill(process)?;
            }
        }
        let error = || io::Error::new(io::ErrorKind::TimedOut, "its processes do not end");
        *looks = looks.checked_sub(1).ok_or_else(error)?;
        sleep(PAUSE);
    }
}

/// The processes in a cgroup, none if there is no such cgroup. 0 stands for one that has no pid here.
fn members(cgroup: &Path) -> io::Result<Vec<u32>> {
    let text = match fs::read_to_string(cgroup.join("cgroup.procs")) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other?,
    };
    Ok(text.lines().filter_map(|pid| pid.parse().ok()).collect())
}

/// Removes a cgroup, and the parents that were made for it.
fn remove(root: &Path, cgroup: &Path) -> io::Result<()> {
    remove_cgroup(cgroup, false)?;
    let parents = cgroup.ancestors().skip(1).take_while(|parent| *parent != root);
    for parent in parents {
        // Another pod may use it.
        if !cgroup::is_marked(parent) || remove_cgroup(parent, true).is_err() {
            break;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use super::*;
    use crate::host::journal::Journal;

    /// A cgroup of the host that the test's pod `pod` creates or joins, and a process in it.
    fn with_process(dir: &Path, path: &str, pod: &str) -> (Journal, PathBuf, Child) {
        let mut journal = Journal::open(&dir.join(pod)).unwrap();
        let path = format!("/bulkhead-test-cgroups-{}/{path}", std::process::id());
        let cgroup = cgroup::create(
            &mut journal,
            Path::new(&path),
            cgroup::Owner { state: &dir.join(pod), root: dir },
        )
        .unwrap();
        let process = Command::new("sleep").arg("60").spawn().unwrap();
        for procs in cgroup.procs() {
            fs::write(procs, process.id().to_string()).unwrap();
        }
        (journal, cgroup.procs()[0].parent().unwrap().to_owned(), process)
    }

    fn lives(process: &mut Child) -> bool {
        process.try_wait().unwrap().is_none()
    }

    #[test]
    fn only_what_is_in_the_pods_own_cgroup_is_killed() {
        let dir = tempfile::tempdir().unwrap();
        let (_one, one, mut first) = with_process(dir.path(), "one", "one");
        let (two_journal, two, mut second) = with_process(dir.path(), "two", "two");
        kill(&dir.path().join("one"), &mut VmmEnds::begin()).unwrap();
        assert!(!first.wait().unwrap().success() && !one.exists());
        assert!(lives(&mut second) && two.exists());
        kill(&dir.path().join("nobody"), &mut VmmEnds::begin()).unwrap();
        assert!(lives(&mut second));
        kill(&dir.path().join("two"), &mut VmmEnds::begin()).unwrap();
        second.wait().unwrap();
        assert!(!two.parent().unwrap().exists(), "the parent goes with the last");
        two_journal.undo().unwrap();
    }

    #[test]
    fn what_two_pods_use_is_no_pods_own() {
        let dir = tempfile::tempdir().unwrap();
        let (one, _, mut first) = with_process(dir.path(), "shared", "three");
        let (two, _, mut second) = with_process(dir.path(), "shared", "four");
        for pod in ["three", "four"] {
            kill(&dir.path().join(pod), &mut VmmEnds::begin()).unwrap();
        }
        assert!(lives(&mut first) && lives(&mut second));
        for process in [&mut first, &mut second] {
            process.kill().unwrap();
            process.wait().unwrap();
        }
        two.undo().unwrap();
        one.undo().unwrap();
    }
}
