//! The processes of a container that were made after its init.

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::timeout;

use super::{error::ContainerError, process::Process};

/// How long the end of a container's init waits for the ends of the container's other processes, which the kernel kills
/// with it. A process that waits for a device or a file system may end later.
const END_PATIENCE: Duration = Duration::from_secs(5);

/// The processes that joined a container, by their ids.
#[derive(Default)]
pub(super) struct ExecTable {
    slots: Mutex<HashMap<String, Slot>>,
}

pub(super) enum Slot {
    /// The process is being made. Its id is taken.
    Starting,
    Present(Arc<Process>),
}

impl ExecTable {
    pub(super) fn reserve(&self, id: &str) -> Result<(), ContainerError> {
        match self.lock().entry(id.to_owned()) {
            Entry::Vacant(slot) => drop(slot.insert(Slot::Starting)),
            Entry::Occupied(_) => return Err(ContainerError::ExecExists(id.to_owned())),
        }
        Ok(())
    }

    /// Waits until all processes have ended, for [`END_PATIENCE`] at most. The end of the container is reported after
    /// that.
    pub(super) async fn ended(&self) {
        let processes = self.processes();
        let all = async {
            for process in processes {
                // An error: the guest is about to end.
                let _ = process.wait().await;
            }
        };
        let _ = timeout(END_PATIENCE, all).await;
    }

    /// Forgets all processes.
    pub(super) fn clear(&self) {
        self.lock().clear();
    }

    fn processes(&self) -> Vec<Arc<Process>> {
        let present = |slot: &Slot| match slot {
            Slot::Present(process) => Some(Arc::clone(process)),
            Slot::Starting => None,
        };
        self.lock().values().filter_map(present).collect()
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, HashMap<String, Slot>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use tokio::{sync::watch, time::Instant};

    use std::future;

    use super::*;
    use crate::{
        container::stdio::{self, StreamIds},
        stage::launcher::Child,
        streams::StreamTable,
    };

    #[tokio::test(start_paused = true)]
    async fn a_process_that_does_not_end_delays_the_end_of_the_container_for_a_limited_time() {
        let null = StreamIds { stdin: 0, stdout: 0, stderr: 0 };
        let streams = stdio::open(&StreamTable::default(), null, false).await.unwrap().agent;
        let (_running, exit) = watch::channel(None);
        let child = Child { pid: 0, exit, terminal: None };
        let (_deletion, is_deleted) = watch::channel(false);
        let process = Process::watch(child, streams, "c: exec e", &is_deleted, future::ready(()));
        let execs = ExecTable::default();
        execs.lock().insert("e".into(), Slot::Present(Arc::new(process)));
        let begun = Instant::now();
        execs.ended().await;
        assert_eq!(begun.elapsed(), END_PATIENCE);
    }
}
