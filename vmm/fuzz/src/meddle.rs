//! A guest that changes its memory while a device works on it: between any two of the device's accesses, and in the
//! same place in every run.

use std::{
    cell::Cell,
    collections::VecDeque,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use bulkhead_vmm::{GuestMemory, memory::hook};
use vm_memory::{Bytes, GuestAddress};

use crate::input::Input;

/// Addresses that are remembered: a change is most often one of what the device has just read.
const REMEMBERED: usize = 8;
/// So many changes at most: a guest that goes on for ever keeps its device busy for ever, which is no bug.
const MOST: usize = 32;
/// What rings and requests are full of, and what they should never hold.
const NUMBERS: [u64; 10] = [0, 1, 2, 3, 16, 255, 256, 4096, 0x10_0000, u64::MAX];

/// One change of memory.
struct Change {
    /// Accesses of the device before it.
    wait: u8,
    /// How many accesses back is the one that tells where.
    back: usize,
    /// Bytes from there.
    offset: u8,
    bytes: Vec<u8>,
}

/// What is to be changed.
static PLAN: Mutex<Option<VecDeque<Change>>> = Mutex::new(None);
/// There is a guest whose memory changes.
static IS_ON: AtomicBool = AtomicBool::new(false);
/// The driver keeps to the rules for a while.
static PAUSED: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// This thread acts for the guest. Its own accesses are not a device's.
    static IS_DRIVER: Cell<bool> = const { Cell::new(false) };
}

/// Reads changes, to be made once there is a guest. From now on this thread acts for that guest.
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

/// Begins with what was planned, if anything was, in this guest's memory.
pub fn begin(memory: &GuestMemory) {
    let Some(mut changes) = lock().take() else { return };
    let memory = memory.clone();
    IS_ON.store(true, Ordering::SeqCst);
    let mut recent = VecDeque::from([GuestAddress(0); REMEMBERED]);
    hook::set(Some(Box::new(move |address| {
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
                    // What is not memory cannot be changed.
                    let _ = memory.write(&bytes, GuestAddress(place));
                }
            }
        }
    })));
}

/// Whether a device may find what it has read to be another.
pub fn is_on() -> bool {
    IS_ON.load(Ordering::SeqCst)
}

/// Makes no change while it does `act`.
pub fn not_during<T>(act: impl FnOnce() -> T) -> T {
    PAUSED.store(true, Ordering::SeqCst);
    let done = act();
    PAUSED.store(false, Ordering::SeqCst);
    done
}

/// Lets this thread act for the device while it does `act`.
pub fn as_device<T>(act: impl FnOnce() -> T) -> T {
    let was_driver = IS_DRIVER.replace(false);
    let done = act();
    IS_DRIVER.set(was_driver);
    done
}

/// Makes no change any more. No device may be at work.
pub fn end() {
    *lock() = None;
    hook::set(None);
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
        // One change: before the access after the next one, of the byte that was read last, to 255.
        plan(&mut Input::new(&[1, 1, 1, 0, 0, 0, 5]));
        begin(&memory);
        assert_eq!([read(), read()], [0, 0], "the driver's own accesses change nothing");
        assert_eq!(as_device(|| [read(), read(), read()]), [0, 255, 255]);
        end();
        assert!(!is_on());
    }
}
