//! What a fuzz target does in the middle of a device's work: for `vmm/fuzz`, and nobody else.
//!
//! A guest can write to its memory at any time. Between two accesses of a device is the only time that matters, and there
//! a target can do the same in every run.

use std::sync::Mutex;

use vm_memory::GuestAddress;

use crate::lock;

/// Is told of each access to guest memory before it is made, with the address if that is looked up now. What it accesses
/// itself it is not told of.
pub type Hook = Box<dyn FnMut(Option<GuestAddress>) + Send>;

static HOOK: Mutex<Option<Hook>> = Mutex::new(None);

/// Takes the place of the hook that was there.
pub fn set(hook: Option<Hook>) {
    *lock(&HOOK) = hook;
}

/// Calls the hook. It is not in its place meanwhile.
pub(crate) fn call(address: Option<GuestAddress>) {
    let Some(mut hook) = lock(&HOOK).take() else { return };
    hook(address);
    lock(&HOOK).get_or_insert(hook);
}
