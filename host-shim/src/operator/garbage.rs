//! What nobody uses any more: state directories of crashed shims, and templates that no pod will use.

use std::{io, path::Path, path::PathBuf};

use serde::Serialize;

use crate::{
    host::{bare, state_dir},
    operator::templates::{TemplateState, templates_of},
    types::error::chain,
    vm::template::{self, DIR},
};

/// What can be removed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Garbage {
    /// The state directory of a pod, or the directory of a template.
    pub path: PathBuf,
    /// Why nobody needs it.
    pub reason: &'static str,
}

/// What became of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Removed {
    /// What it was.
    #[serde(flatten)]
    pub garbage: Garbage,
    /// Why it is still there, if it is.
    pub error: Option<String>,
}

const CRASHED: &str = "its shim has died";
const OUTDATED: &str = "the kernel, the agent or the VMM of this template was replaced";
const UNFINISHED: &str = "this template was not completed, or was about to be removed";

const BARE: &str = "it has nothing: whoever made it was killed before it was complete";

/// What can be removed below `root`. A template that is not complete may be in the making; then it is not removed.
pub fn garbage(root: &Path) -> io::Result<Vec<Garbage>> {
    let crashed = state_dir::pods(root).filter(|pod| state_dir::has_crashed(pod));
    let mut garbage: Vec<_> = crashed.map(|path| Garbage { path, reason: CRASHED }).collect();
    garbage.extend(bare::directories(root).map(|path| Garbage { path, reason: BARE }));
    garbage.sort_by(|one, other| one.path.cmp(&other.path));
    for template in templates_of(root, &[])? {
        match template.state {
            TemplateState::Complete if bare::is_bare(&template.path) => {
                garbage.push(Garbage { path: template.path, reason: BARE });
            }
            TemplateState::Complete => {}
            TemplateState::Outdated => garbage.push(Garbage { path: template.path, reason: OUTDATED }),
            TemplateState::Unfinished => garbage.push(Garbage { path: template.path, reason: UNFINISHED }),
        }
    }
    Ok(garbage)
}

/// Removes it, in the same way as each shim does when it starts. A pod whose shim lives is left alone. Blocks.
pub fn remove_garbage(root: &Path, mut tell: impl FnMut(usize, usize)) -> Vec<Removed> {
    let mut removed = Vec::new();
    let pods: Vec<_> = state_dir::pods(root).collect();
    let all = pods.len();
    for (done, path) in pods.into_iter().enumerate() {
        tell(done, all);
        if let Some(result) = state_dir::remove_crashed(&path) {
            let garbage = Garbage { path, reason: CRASHED };
            removed.push(Removed { garbage, error: result.err().map(|error| chain(&error)) });
        }
    }
    let mut bare: Vec<_> = bare::directories(root).collect();
    bare.sort();
    for path in bare {
        if let Some(result) = bare::remove(root, &path) {
            let error = result.err().map(|error| chain(&error));
            removed.push(Removed { garbage: Garbage { path, reason: BARE }, error });
        }
    }
    match template::remove_unused(&root.join(DIR)) {
        Ok(templates) => {
            for (path, was_bare) in templates.unwrap_or_default() {
                let reason = match () {
                    () if template::is_unfinished(&path) => UNFINISHED,
                    () if was_bare => BARE,
                    () => OUTDATED,
                };
                removed.push(Removed { garbage: Garbage { path, reason }, error: None });
            }
        }
        // What was removed before is told all the same.
        Err(error) => {
            let garbage = Garbage { path: root.join(DIR), reason: OUTDATED };
            removed.push(Removed { garbage, error: Some(chain(&error)) });
        }
    }
    removed
}

#[cfg(test)]
mod tests {
    use std::{
        fs::{self, File},
        process::Command,
        time::SystemTime,
    };

    use super::*;
    use crate::host::{
        bare::MAKING,
        journal::{Effect, Journal},
        process_id::ProcessId,
        state_dir::{JOURNAL, StateDir},
    };

    /// A pod whose shim is `shim`, and whose bundle does not exist.
    fn pod(root: &Path, id: &str, shim: ProcessId) -> PathBuf {
        let path = root.join("c/ns").join(id);
        fs::create_dir_all(&path).unwrap();
        let mut journal = Journal::open(&path.join(JOURNAL)).unwrap();
        journal.record(Effect::Shim(shim)).unwrap();
        journal.record(Effect::Bundle { path: root.join("no-bundle") }).unwrap();
        path
    }

    #[test]
    fn what_a_dead_shim_left_is_removed_and_a_living_one_keeps_its_pod() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("run");
        assert_eq!(garbage(&root).unwrap(), []);
        let mut sleep = Command::new("sleep").arg("60").spawn().unwrap();
        let living = pod(&root, "living", ProcessId::of(sleep.id()).unwrap());
        let mut child = Command::new("true").spawn().unwrap();
        let ended = ProcessId::of(child.id());
        child.wait().unwrap();
        let ended = ended.unwrap_or(ProcessId { pid: u32::MAX, start_time: 1, pid_namespace: None });
        let dead = pod(&root, "dead", ended);
        let expected = Garbage { path: dead.clone(), reason: CRASHED };
        assert_eq!(garbage(&root).unwrap(), std::slice::from_ref(&expected));
        assert!(dead.exists(), "nothing is removed yet");
        assert_eq!(remove_garbage(&root, |_, _| ()), [Removed { garbage: expected, error: None }]);
        assert!(!dead.exists() && living.exists());
        assert_eq!(garbage(&root).unwrap(), []);
        sleep.kill().unwrap();
        sleep.wait().unwrap();
        remove_garbage(&root, |_, _| ());
        assert!(!root.exists());
    }

    #[test]
    fn what_cannot_be_undone_is_said() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c/ns/pod");
        let (state, journal) = StateDir::create(&path, &[]).unwrap();
        drop((state, journal));
        fs::remove_file(path.join(JOURNAL)).unwrap();
        let gone = ProcessId { pid: u32::MAX, start_time: 1, pid_namespace: None };
        let mut journal = Journal::open(&path.join(JOURNAL)).unwrap();
        journal.record(Effect::Shim(gone)).unwrap();
        journal.record(Effect::Bundle { path: dir.path().join("no-bundle") }).unwrap();
        journal.record(Effect::Directory { path: path.clone() }).unwrap();
        fs::write(path.join("unknown"), "").unwrap();
        let removed = remove_garbage(dir.path(), |_, _| ());
        assert_eq!(removed.len(), 1);
        let error = removed[0].error.as_deref().unwrap();
        assert!(error.contains("directory not empty"), "{error}");
    }

    #[test]
    fn a_template_in_the_making_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let templates = dir.path().join(DIR);
        fs::create_dir_all(templates.join(".77")).unwrap();
        assert_eq!(garbage(dir.path()).unwrap().len(), 1);
        let lock = File::open(&templates).unwrap();
        lock.lock().unwrap();
        assert_eq!(remove_garbage(dir.path(), |_, _| ()), []);
        assert!(templates.join(".77").exists());
        drop(lock);
        assert_eq!(remove_garbage(dir.path(), |_, _| ()).len(), 1);
        assert!(!templates.join(".77").exists());
    }

    /// Makes a directory as old as one that nobody is making any more.
    fn age(path: &Path) {
        let time = SystemTime::now() - MAKING * 2;
        File::open(path).unwrap().set_modified(time).unwrap();
    }

    #[test]
    fn what_was_never_completed_is_removed_when_nobody_can_be_making_it() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("run");
        let at = |name: &str| root.join(name);
        for name in
            ["c/ns/empty", "c/ns/begun", "c/ns/used", "c/none", "d", ".templates/00ff", ".templates/11ee"]
        {
            fs::create_dir_all(at(name)).unwrap();
        }
        fs::write(at("c/ns/begun").join(JOURNAL), "{\"half").unwrap();
        fs::write(at("c/ns/used/file"), "").unwrap();
        fs::write(at(".templates/11ee/memory"), "").unwrap();
        assert_eq!(garbage(&root).unwrap(), [], "somebody may be making them");
        assert_eq!(remove_garbage(&root, |_, _| ()), []);
        let bare = ["c/none", "c/ns/begun", "c/ns/empty", "d", ".templates/00ff"].map(at);
        for path in bare.iter().chain(&[at("c/ns/used"), at(".templates/11ee")]) {
            age(path);
        }
        let expected = bare.map(|path| Garbage { path, reason: BARE });
        assert_eq!(garbage(&root).unwrap(), expected);
        let removed = expected.clone().map(|garbage| Removed { garbage, error: None });
        assert_eq!(remove_garbage(&root, |_, _| ()), removed);
        assert!(expected.iter().all(|it| !it.path.exists()));
        assert!(at("c/ns/used/file").exists() && at(".templates/11ee/memory").exists());
        // With the last of them, the directories above go too.
        fs::remove_dir_all(at("c/ns/used")).unwrap();
        fs::create_dir(at("c/ns/last")).unwrap();
        age(&at("c/ns/last"));
        assert_eq!(remove_garbage(&root, |_, _| ()).len(), 1);
        assert!(!at("c").exists());
    }

    #[test]
    fn a_bare_directory_that_somebody_cleans_up_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c/ns/empty");
        fs::create_dir_all(&path).unwrap();
        age(&path);
        let lock = File::open(&path).unwrap();
        lock.lock().unwrap();
        assert_eq!(remove_garbage(dir.path(), |_, _| ()), []);
        assert!(path.exists());
        drop(lock);
        assert_eq!(remove_garbage(dir.path(), |_, _| ()).len(), 1);
        assert!(!path.exists());
    }
}
