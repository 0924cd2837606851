//! The processes of a pod, for a caller that kills them but leaves the cleanup to another process.

use std::{io, path::Path};

use crate::host::{
    journal::{Effect, Journal, UndoError},
    process_id::ProcessId,
    state_dir::JOURNAL,
};

/// The processes of a pod at one moment, by its journal. No lock is necessary to kill them: they are known by pid and
/// start time, so none of a new pod of the same name is hit.
#[derive(Debug, Default)]
pub(crate) struct PodProcesses {
    shim: Option<ProcessId>,
    vmm: Option<ProcessId>,
}

impl PodProcesses {
    /// Those of the pod with the state directory `path`: none if it has no journal.
    pub(crate) fn of(path: &Path) -> Result<Self, UndoError> {
        Ok(look(path)?.map(|journal| Self { shim: journal.shim(), vmm: journal.vmm() }).unwrap_or_default())
    }

    /// The pid of the VMM that was started last.
    pub(crate) fn vmm(&self) -> Option<u32> {
        self.vmm.map(|process| process.pid)
    }

    /// Whether there is a shim, and it is dead.
    pub(crate) fn have_lost_their_shim(&self) -> bool {
        self.shim.is_some_and(|shim| !shim.may_live())
    }

    /// Sends SIGKILL to the shim and the VMMs of the pod, which has the state directory `path`. Waits for nothing.
    pub(crate) fn kill(&self, path: &Path) -> Result<(), UndoError> {
        if let Some(shim) = self.shim {
            // First, so that it starts no other VMM.
            shim.send_kill().map_err(|source| UndoError::Effect { effect: Effect::Shim(shim), source })?;
        }
        // Whoever cleans up may be done with it. By now this may be the journal of a new pod of the same name.
        let Some(journal) = look(path)?.filter(|journal| journal.shim() == self.shim) else { return Ok(()) };
        journal.send_kills()?;
        // A line that cannot be read may have named a VMM.
        if journal.is_damaged() { Err(UndoError::Damaged { path: path.join(JOURNAL) }) } else { Ok(()) }
    }
}

/// The journal of the pod. None: there is none, or none any more.
fn look(path: &Path) -> Result<Option<Journal>, UndoError> {
    match Journal::look(&path.join(JOURNAL)) {
        Err(UndoError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(None),
        journal => journal.map(Some),
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        process::{Child, Command},
    };

    use super::*;

    fn process() -> (Child, ProcessId) {
        let child = Command::new("sleep").arg("60").spawn().unwrap();
        let id = ProcessId::of(child.id()).unwrap();
        (child, id)
    }

    fn journal(path: &Path, shim: ProcessId, vmm: ProcessId) -> Journal {
        let mut journal = Journal::open(&path.join(JOURNAL)).unwrap();
        journal.record(Effect::Shim(shim)).unwrap();
        journal.record(Effect::Vmm(vmm)).unwrap();
        journal
    }

    #[test]
    fn the_processes_of_a_pod_are_killed_and_not_those_of_a_new_one_of_its_name() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(PodProcesses::of(dir.path()).unwrap().vmm(), None);
        let ((mut shim, shim_id), (mut vmm, vmm_id)) = (process(), process());
        journal(dir.path(), shim_id, vmm_id);
        let processes = PodProcesses::of(dir.path()).unwrap();
        assert_eq!((processes.vmm(), processes.have_lost_their_shim()), (Some(vmm.id()), false));
        let ((mut new, new_id), (mut other, other_id)) = (process(), process());
        fs::rename(dir.path().join(JOURNAL), dir.path().join("old")).unwrap();
        journal(dir.path(), new_id, other_id);
        processes.kill(dir.path()).unwrap();
        assert!(!shim.wait().unwrap().success());
        assert!(new.try_wait().unwrap().is_none() && other.try_wait().unwrap().is_none());
        fs::rename(dir.path().join("old"), dir.path().join(JOURNAL)).unwrap();
        assert!(processes.have_lost_their_shim());
        processes.kill(dir.path()).unwrap();
        assert!(!vmm.wait().unwrap().success());
        for mut left in [new, other] {
            left.kill().unwrap();
            left.wait().unwrap();
        }
    }

    #[test]
    fn it_is_an_error_if_a_vmm_may_be_left() {
        let dir = tempfile::tempdir().unwrap();
        let ((mut shim, shim_id), (mut vmm, vmm_id)) = (process(), process());
        journal(dir.path(), shim_id, vmm_id);
        let path = dir.path().join(JOURNAL);
        let text = fs::read_to_string(&path).unwrap();
        for (word, cut) in [("\"vmm\"", "\"v"), ("\"shim\"", "\"s")] {
            fs::write(&path, text.replace(word, cut)).unwrap();
            let processes = PodProcesses::of(dir.path()).unwrap();
            assert!(matches!(processes.kill(dir.path()), Err(UndoError::Damaged { .. })));
        }
        assert!(!shim.wait().unwrap().success() && !vmm.wait().unwrap().success());
    }
}
