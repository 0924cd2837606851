//! A hook for the fuzz targets, which changes guest memory while a device works. Only `vmm/fuzz` uses it.
//!
//! A guest can write to its memory at any time. What matters is only between which two accesses of a device it does
//! so. The hook runs there, so a fuzz target makes the same change in every run.

use std::sync::Mutex;

use vm_memory::GuestAddress;

use crate::lock;

/// Called before each access to guest memory, with the address if it is resolved now. It is not called for accesses
/// that it makes itself.
pub type Hook = Box<dyn FnMut(Option<GuestAddress>) + Send>;

static HOOK: Mutex<Option<Hook>> = Mutex::new(None);

/// Replaces the hook.
pub fn set(hook: Option<Hook>) {
    *lock(&HOOK) = hook;
}

/// Calls the hook. It is removed meanwhile, so that it is not called for its own accesses.
pub(crate) fn call(address: Option<GuestAddress>) {
    let Some(mut hook) = lock(&HOOK).take() else { return };
    hook(address);
    lock(&HOOK).get_or_insert(hook);
}
