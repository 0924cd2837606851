//! A pod's cgroup, whose limits change while the pod runs.
//!
//! A write to a file of a cgroup can block for long: the kernel takes locks for it that another process may hold, and
//! may reclaim memory first. So each change has a thread of its own and a deadline.

use std::{sync::Arc, time::Duration};

use tokio::time::timeout;

use crate::host::{
    blocking,
    cgroup::{Cgroup, CgroupError},
    pending_operations::PendingOperations,
};

/// How long a change may take, together with an earlier one that has not ended.
const CHANGE: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 10 });

/// The cgroup.
#[derive(Debug)]
pub(crate) struct CgroupChanges {
    cgroup: Arc<Cgroup>,
    /// Locked by the thread that makes a change.
    turn: Arc<tokio::sync::Mutex<()>>,
    /// A change that goes on late must not find the cgroup of another pod of the same id.
    pending: PendingOperations,
    pod_id: String,
}

impl CgroupChanges {
    pub(crate) fn new(cgroup: Cgroup, pending: &PendingOperations, pod_id: &str) -> Self {
        let pending = pending.clone();
        Self { cgroup: Arc::new(cgroup), turn: Arc::default(), pending, pod_id: pod_id.to_owned() }
    }

    /// The cgroup. Only for reads that never block: of a limit, and of the list of controllers.
    pub(crate) fn as_read(&self) -> &Cgroup {
        &self.cgroup
    }

    /// Makes a change. If it fails, `put_back` is called. If it is late, the caller gets an error, and `put_back` is
    /// called when it has ended. Until then no other change begins.
    pub(crate) async fn change<T: Send + 'static>(
        &self,
        make: impl FnOnce(&Cgroup) -> Result<T, CgroupError> + Send + 'static,
        put_back: impl FnOnce(&Cgroup) + Send + 'static,
    ) -> Result<T, CgroupError> {
        let changed = async {
            let turn = Arc::clone(&self.turn).lock_owned().await;
            let (cgroup, operation) = (Arc::clone(&self.cgroup), self.pending.begin(&self.pod_id));
            let work = move || {
                // In this order, so that nobody who has the next turn finds an operation of this one.
                let until_done = (operation, turn);
                match make(&cgroup) {
                    Ok(made) => (Ok(made), Some(move || put_back(&cgroup)), until_done),
                    Err(error) => {
                        put_back(&cgroup);
                        (Err(error), None, until_done)
                    }
                }
            };
            let made = blocking::run(work, |(_, put_back, until_done)| {
                if let Some(put_back) = put_back {
                    put_back();
                }
                drop(until_done);
            });
            made.await?.0
        };
        timeout(CHANGE, changed).await.unwrap_or(Err(CgroupError::Late { seconds: CHANGE.as_secs() }))
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, thread};

    use super::*;

    fn cgroup() -> CgroupChanges {
        CgroupChanges::new(Cgroup { directories: Vec::new() }, &PendingOperations::default(), "demo")
    }

    #[tokio::test]
    async fn a_change_that_hangs_is_given_up_and_put_back_when_it_ends() {
        let cgroup = cgroup();
        let (go_on, waits) = mpsc::channel::<()>();
        let (log, logged) = mpsc::channel();
        let other = log.clone();
        let hangs = cgroup.change(
            move |_| {
                _ = waits.recv();
                Ok(())
            },
            move |_| log.send("put back").unwrap(),
        );
        assert!(matches!(hangs.await, Err(CgroupError::Late { .. })));
        // The next one does not overtake it, and takes no thread meanwhile.
        let next = cgroup.change(move |_| Ok(other.send("made")), |_| ());
        assert!(matches!(next.await, Err(CgroupError::Late { .. })));
        assert!(logged.try_recv().is_err() && cgroup.pending.contains("demo"));
        drop(go_on);
        assert_eq!(logged.recv_timeout(Duration::from_secs(5)), Ok("put back"));
        cgroup.change(|_| Ok(()), |_| ()).await.unwrap();
        assert!(!cgroup.pending.contains("demo"));
    }

    #[tokio::test]
    async fn a_change_that_fails_is_put_back_and_one_that_is_made_is_not() {
        let cgroup = cgroup();
        let (log, logged) = mpsc::channel();
        let own = thread::current().id();
        let failed = cgroup.change(
            |_| Err::<(), _>(CgroupError::NoHierarchy),
            move |_| log.send(thread::current().id()).unwrap(),
        );
        assert!(matches!(failed.await, Err(CgroupError::NoHierarchy)));
        assert_ne!(logged.try_recv().unwrap(), own);
        let made = cgroup.change(|_| Ok(7), |_| panic!("it is put back"));
        assert_eq!(made.await.unwrap(), 7);
    }
}
