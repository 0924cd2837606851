//! Operations on the host that have not ended, by the container that they are for. A request can give one up when the
//! storage hangs, but its thread goes on later. Then it must not find another container of the same id.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// The operations of a pod's containers. Clones are the same table.
#[derive(Debug, Clone, Default)]
pub(crate) struct PendingOperations(Arc<Mutex<HashMap<String, usize>>>);

/// An operation, which ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Operation {
    table: PendingOperations,
    id: String,
}

impl PendingOperations {
    /// Begins an operation for the container `id`.
    pub(crate) fn begin(&self, id: &str) -> Operation {
        *self.lock().entry(id.to_owned()).or_default() += 1;
        Operation { table: self.clone(), id: id.to_owned() }
    }

    /// Whether an operation for the container `id` has not ended.
    pub(crate) fn contains(&self, id: &str) -> bool {
        self.lock().contains_key(id)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        let mut operations = self.table.lock();
        if let Some(number) = operations.get_mut(&self.id) {
            *number -= 1;
            if *number == 0 {
                operations.remove(&self.id);
            }
        }
    }
}

#[cfg(test)]
mod tests {
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
}
