//! Changes of a cgroup for which the kernel may have to reclaim memory. It does that in the call, and the call can take
//! long: it waits for file systems that pages are written back to. The agent has one thread for everything else, so
//! these calls are made in other threads.

use std::{io, sync::Arc, time::Duration};

use tokio::{task::spawn_blocking, time::timeout};

use super::{Cgroup, CgroupError, io_error};

/// How long a change may take. The shim gives UpdateContainer 10 s.
const PATIENCE: Duration = Duration::from_secs(8);

impl Cgroup {
    /// Calls `change` in a thread. Changes of one cgroup are made one after the other, in the order of these calls. If
    /// a change takes too long, that is an error: one that has begun goes on, and one that waits for an earlier one is
    /// not made.
    pub async fn change<T, E>(
        self: &Arc<Self>,
        change: impl FnOnce(&Self) -> Result<T, E> + Send + 'static,
    ) -> Result<T, E>
    where
        T: Send + 'static,
        E: From<CgroupError> + Send + 'static,
    {
        self.change_within(PATIENCE, change).await
    }

    async fn change_within<T, E>(
        self: &Arc<Self>,
        patience: Duration,
        change: impl FnOnce(&Self) -> Result<T, E> + Send + 'static,
    ) -> Result<T, E>
    where
        T: Send + 'static,
        E: From<CgroupError> + Send + 'static,
    {
        match timeout(patience, self.change_without_deadline(change)).await {
            Ok(changed) => changed,
            Err(_) => Err(CgroupError::Slow { seconds: patience.as_secs() }.into()),
        }
    }

    /// The same as [`Cgroup::change`], however long earlier changes and this one take.
    pub async fn change_without_deadline<T, E>(
        self: &Arc<Self>,
        change: impl FnOnce(&Self) -> Result<T, E> + Send + 'static,
    ) -> Result<T, E>
    where
        T: Send + 'static,
        E: From<CgroupError> + Send + 'static,
    {
        let cgroup = Arc::clone(self);
        self.in_turn(move || change(&cgroup)).await?
    }

    /// Calls `work` in a thread, after all earlier work of this kind on this cgroup. If the caller gives up waiting,
    /// work that has begun goes on, and keeps its turn until it is done.
    pub(super) async fn in_turn<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, CgroupError> {
        let turn = Arc::clone(&self.turn).lock_owned().await;
        let done = spawn_blocking(move || {
            let done = work();
            drop(turn);
            done
        });
        // An error: the work panicked.
        done.await.map_err(io::Error::other).map_err(io_error("changing", self.path()))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Mutex,
        mpsc::{Receiver, Sender, channel},
    };

    use tokio::{
        task::{JoinHandle, yield_now},
        time::sleep,
    };

    use super::*;

    const SHORT: Duration = Duration::from_millis(20);
    const LONG: Duration = Duration::from_secs(10);

    /// A directory that is not a cgroup. So nothing is in it, and it can be removed.
    fn cgroup() -> (tempfile::TempDir, Arc<Cgroup>) {
        let directory = tempfile::tempdir().unwrap();
        let cgroup = Cgroup::create(directory.path().join("cgroup")).unwrap();
        (directory, Arc::new(cgroup))
    }

    type Changing = JoinHandle<Result<(), CgroupError>>;

    /// Begins a change for which the kernel takes until the sender is dropped.
    async fn slow(cgroup: &Arc<Cgroup>, patience: Duration) -> (Sender<()>, Changing) {
        let (end, ended): (_, Receiver<()>) = channel();
        let (begin, begun) = channel();
        let cgroup = Arc::clone(cgroup);
        let work = move |_: &Cgroup| {
            begin.send(()).unwrap();
            _ = ended.recv();
            Ok(())
        };
        let changing = tokio::spawn(async move { cgroup.change_within(patience, work).await });
        while begun.try_recv().is_err() {
            yield_now().await;
        }
        (end, changing)
    }

    #[tokio::test]
    async fn changes_are_made_in_their_order_while_the_agent_does_other_things() {
        let (_directory, cgroup) = cgroup();
        // Only this test's thread could come here now.
        let (end, changing) = slow(&cgroup, LONG).await;
        let order = Arc::new(Mutex::new(Vec::new()));
        let later: Vec<Changing> = (0..3)
            .map(|number| {
                let (cgroup, order) = (Arc::clone(&cgroup), Arc::clone(&order));
                let work = move |_: &Cgroup| {
                    order.lock().unwrap().push(number);
                    Ok(())
                };
                tokio::spawn(async move { cgroup.change(work).await })
            })
            .collect();
        sleep(SHORT).await;
        assert!(order.lock().unwrap().is_empty() && !changing.is_finished());
        drop(end);
        for done in [changing].into_iter().chain(later) {
            done.await.unwrap().unwrap();
        }
        assert_eq!(*order.lock().unwrap(), [0, 1, 2]);
    }

    #[tokio::test]
    async fn a_change_that_takes_too_long_goes_on_and_one_that_waits_for_it_is_not_made() {
        let (_directory, cgroup) = cgroup();
        let (end, changing) = slow(&cgroup, SHORT).await;
        let is_slow = |changed: Result<(), CgroupError>| matches!(changed, Err(CgroupError::Slow { .. }));
        assert!(is_slow(changing.await.unwrap()));
        assert!(is_slow(cgroup.change_within(SHORT, |_| panic!("it is made")).await));
        drop(end);
        timeout(LONG, cgroup.change(|_| Ok::<_, CgroupError>(()))).await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn a_cgroup_is_removed_after_its_changes() {
        let (_directory, cgroup) = cgroup();
        let (end, changing) = slow(&cgroup, LONG).await;
        let removing = Arc::clone(&cgroup);
        let removing = tokio::spawn(async move { removing.remove().await });
        sleep(SHORT).await;
        assert!(cgroup.path().exists() && !removing.is_finished());
        drop(end);
        changing.await.unwrap().unwrap();
        timeout(LONG, removing).await.unwrap().unwrap().unwrap();
        assert!(!cgroup.path().exists());
    }
}
