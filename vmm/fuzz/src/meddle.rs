//! A guest that changes its memory while a device is active. Each change comes between the same two accesses of the
//! device in every run.

use std::{
    cell::Cell,
    collections::VecDeque,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use bulkhead_vmm::{GuestMemory, memory::fuzz_hook};
use vm_memory::{Bytes, GuestAddress};

use crate::input::Input;

/// How many addresses are remembered. Most changes are at an address that the device has just read.
const REMEMBERED: usize = 8;
/// The most changes. A guest that never stops keeps its device busy for ever, which is no bug.
const MOST: usize = 32;
/// Values that are common in rings and requests, and values that are illegal there.
const NUMBERS: [u64; 10] = [0, 1, 2, 3, 16, 255, 256, 4096, 0x10_0000, u64::MAX];

/// A change of guest memory.
struct Change {
    /// The number of accesses of the device before it.
    wait: u8,
    /// Its address is that of the access so many accesses before.
    back: usize,
    /// The offset from that address.
    offset: u8,
    bytes: Vec<u8>,
}

/// The planned changes.
static PLAN: Mutex<Option<VecDeque<Change>>> = Mutex::new(None);
/// Whether there is a guest whose memory is changed.
static IS_ON: AtomicBool = AtomicBool::new(false);
/// Whether changes are suspended because the driver is legal now.
static PAUSED: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// Whether this thread acts for the guest. Its accesses are not those of a device.
    static IS_DRIVER: Cell<bool> = const { Cell::new(false) };
}

/// Reads the changes, which are made once there is a guest. From now on this thread acts for the guest.
pub fn plan(input: &mut Input) {
    let changes = (0..input.below(MOST)).map(|_| change(input)).collect();
    *lock() = Some(changes);
    PAUSED.store(false, Ordering::SeqCst);
    IS_DRIVER.set(true);
}

fn change(input: &mut Input) -> Change {
    let (wait, back, offset) = (input.u8(), input.below(REMEMBERED), input.u8() % 32);
    let width = 1 << input.below(4);
    let number = if input.u8() < 128 { input.choose(&NUMBERS) } else { input.u64() };
    Change { wait: wait % 64, back, offset, bytes: number.to_le_bytes()[..width].to_vec() }
}

/// Starts to make the planned changes in the memory of this guest.
pub fn begin(memory: &GuestMemory) {
    let Some(mut changes) = lock().take() else { return };
    let memory = memory.clone();
    IS_ON.store(true, Ordering::SeqCst);
    let mut recent = VecDeque::from([GuestAddress(0); REMEMBERED]);
    fuzz_hook::set(Some(Box::new(move |address| {
        if IS_DRIVER.get() || PAUSED.load(Ordering::SeqCst) {
            return;
        }
        if let Some(address) = address {
            recent.truncate(REMEMBERED - 1);
            recent.push_front(address);
        }
        match changes.front_mut() {
            Some(next) if next.wait > 0 => next.wait -= 1,
            _ => {
                if let Some(Change { back, offset, bytes, .. }) = changes.pop_front() {
                    let place = recent[back].0.wrapping_add(offset.into());
                    // An address that is not memory cannot be changed.
                    let _ = memory.write(&bytes, GuestAddress(place));
                }
            }
        }
    })));
}

/// Whether the memory may change while a device is active.
pub fn is_on() -> bool {
    IS_ON.load(Ordering::SeqCst)
}

/// Makes no changes during `act`.
pub fn not_during<T>(act: impl FnOnce() -> T) -> T {
    PAUSED.store(true, Ordering::SeqCst);
    let done = act();
    PAUSED.store(false, Ordering::SeqCst);
    done
}

/// Makes this thread act for the device during `act`.
pub fn as_device<T>(act: impl FnOnce() -> T) -> T {
    let was_driver = IS_DRIVER.replace(false);
    let done = act();
    IS_DRIVER.set(was_driver);
    done
}

/// Stops making changes. No device may be active.
pub fn end() {
    *lock() = None;
    fuzz_hook::set(None);
    IS_ON.store(false, Ordering::SeqCst);
}

fn lock() -> std::sync::MutexGuard<'static, Option<VecDeque<Change>>> {
    PLAN.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use bulkhead_vmm::memory::lay_out;

    use super::*;

    #[test]
    fn what_a_device_reads_twice_is_another_the_second_time() {
        let memory = lay_out(&[(0, 0x1000)], 0).unwrap();
        let field = GuestAddress(0x10);
        let read = || memory.read_obj::<u8>(field).unwrap();
        // One change: before the access after the next one, the last byte that was read becomes 255.
        plan(&mut Input::new(&[1, 1, 1, 0, 0, 0, 5]));
        begin(&memory);
        assert_eq!([read(), read()], [0, 0], "the driver's own accesses change nothing");
        assert_eq!(as_device(|| [read(), read(), read()]), [0, 255, 255]);
        end();
        assert!(!is_on());
    }
}
