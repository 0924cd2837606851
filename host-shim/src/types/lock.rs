//! Locks that nobody holds while he waits.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex. A thread that has panicked with it leaves no half-made change that would matter.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
