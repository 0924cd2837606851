//! Mutexes that are held for a moment only: nobody waits for anything else meanwhile.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex. If a thread has panicked while it held the mutex, the value is used nevertheless: no change of it is
/// half made in a way that matters.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
