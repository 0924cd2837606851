//! Operations on the host that have not ended, by the container that they are for. A request can give one up when the
//! storage hangs, but its thread goes on later. No new container may use the id until the thread is done.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard},
};

use tokio::sync::OwnedMutexGuard;

use crate::types::lock::lock;

/// The operations of a pod's containers. Clones are the same table.
#[derive(Debug, Clone, Default)]
pub(crate) struct PendingOperations(Arc<Mutex<HashMap<String, Pending>>>);

/// The operations for one container.
#[derive(Debug, Default)]
struct Pending {
    number: usize,
    /// Locked by the one of them that undoes something.
    undo: Arc<tokio::sync::Mutex<()>>,
}

/// An operation, which ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Operation {
    table: PendingOperations,
    id: String,
}

/// An operation that undoes something. No other one for the same container begins before this is dropped.
#[derive(Debug)]
pub(crate) struct Undo {
    // Dropped first: whoever waits for the lock counts as an operation of its own.
    _turn: OwnedMutexGuard<()>,
    _operation: Operation,
}

impl PendingOperations {
    /// Begins an operation for the container `id`.
    pub(crate) fn begin(&self, id: &str) -> Operation {
        self.lock().entry(id.to_owned()).or_default().number += 1;
        Operation { table: self.clone(), id: id.to_owned() }
    }

    /// Begins to undo something for the container `id`, after an earlier undo has ended. So a retry does not start a
    /// second thread that hangs where the first one does.
    pub(crate) async fn begin_undo(&self, id: &str) -> Undo {
        let operation = self.begin(id);
        let turn = Arc::clone(&self.lock().entry(id.to_owned()).or_default().undo);
        Undo { _turn: turn.lock_owned().await, _operation: operation }
    }

    /// Whether an operation for the container `id` has not ended.
    pub(crate) fn contains(&self, id: &str) -> bool {
        self.lock().contains_key(id)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Pending>> {
        lock(&self.0)
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        let mut operations = self.table.lock();
        if let Some(pending) = operations.get_mut(&self.id) {
            pending.number -= 1;
            if pending.number == 0 {
                operations.remove(&self.id);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    #[test]
    fn the_last_of_several_operations_frees_the_id() {
        let all = PendingOperations::default();
        let (one, two) = (all.begin("a"), all.begin("a"));
        drop(one);
        assert!(all.contains("a") && !all.contains("b"));
        drop(two);
        assert!(!all.contains("a"));
    }

    #[tokio::test]
    async fn one_undo_follows_the_other() {
        let all = PendingOperations::default();
        let first = all.begin_undo("a").await;
        let waits = |id| timeout(Duration::from_millis(10), all.begin_undo(id));
        assert!(waits("a").await.is_err() && waits("b").await.is_ok());
        drop(first);
        drop(waits("a").await.unwrap());
        assert!(!all.contains("a") && !all.contains("b"));
    }
}
