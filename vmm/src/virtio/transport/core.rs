//! What all transports have in common: a device, its registers, and the events of its queues.

use std::{
    io,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{
    TransportError,
    lifecycle::{Lifecycle, QueuePosition},
    registers::{Effect, Registers, reg, status},
};
use crate::{
    GuestMemory, lock,
    virtio::{Interrupt, VirtioDevice},
};

/// A device and its registers. A transport gives them their addresses.
pub struct Core {
    interrupt: Arc<Interrupt>,
    kicks: Vec<EventFd>,
    /// It was taken away. A driver that uses it, or has begun to set it up, goes on: otherwise its probe would wait for
    /// ever for the answer to its first request.
    is_hidden: AtomicBool,
    /// What the driver has set, as the registers say. The main thread asks without the lock, which a vCPU may hold.
    status: AtomicU32,
    state: Mutex<State>,
}

struct State {
    lifecycle: Lifecycle,
    registers: Registers,
    /// It was taken away, and was reset since. No driver can use it any more.
    is_let_go: bool,
}

impl Core {
    /// Connects `device` to a guest with `memory`.
    pub(in crate::virtio) fn new(
        device: Box<dyn VirtioDevice>,
        memory: GuestMemory,
        interrupt: Arc<Interrupt>,
    ) -> Result<Self, TransportError> {
        let registers = Registers::new(device.queue_sizes().iter().copied());
        let kicks = registers.queue_sizes().map(|_| event()).collect::<Result<_, _>>()?;
        let lifecycle = Lifecycle::new(device, memory, interrupt.clone())?;
        let state = Mutex::new(State { lifecycle, registers, is_let_go: false });
        let (is_hidden, status) = (AtomicBool::new(false), AtomicU32::new(0));
        Ok(Self { interrupt, kicks, is_hidden, status, state })
    }

    /// The events by which the driver notifies the device. There is one for each queue.
    pub fn kicks(&self) -> &[EventFd] {
        &self.kicks
    }

    /// The device ID, and the features that the device offers.
    pub(crate) fn identity(&self) -> (u32, u64) {
        let state = lock(&self.state);
        (state.lifecycle.device.device_type(), state.lifecycle.features())
    }

    /// The maximum sizes of the queues.
    pub(crate) fn queue_sizes(&self) -> Vec<u16> {
        lock(&self.state).registers.queue_sizes().collect()
    }

    /// The interrupt of the device.
    pub fn interrupt(&self) -> &Interrupt {
        &self.interrupt
    }

    /// Stops the device, and returns its registers, and what [`VirtioDevice::driver_state`] says. The rest of its state
    /// is in the queues in guest memory. Connections and open files are lost. Returns an error if the device could not
    /// continue from there.
    pub(crate) fn stop(&self) -> io::Result<(Registers, u16)> {
        let mut state = lock(&self.state);
        state.lifecycle.stop()?;
        state.lifecycle.check_idle(&state.registers)?;
        Ok((state.registers.clone(), state.lifecycle.device.driver_state()))
    }

    /// Sets the registers of a new device. Activates the device if its driver had set DRIVER_OK. The device continues
    /// after the last chain that was used.
    pub(crate) fn resume(&self, registers: &Registers, driver_state: u16) -> io::Result<()> {
        let state = &mut *lock(&self.state);
        state.registers.clone_from(registers);
        self.status.store(registers.status(), Ordering::SeqCst);
        if registers.is_driver_ok() {
            state.lifecycle.device.set_driver_state(driver_state)?;
            state.lifecycle.activate(registers, &self.kicks, QueuePosition::AfterUsed)?;
        }
        Ok(())
    }

    /// Hides the device from drivers that look for one. A driver that has found it goes on until it resets the device,
    /// and cannot activate it again. Waits for nobody.
    pub(crate) fn hide(&self) {
        self.is_hidden.store(true, Ordering::SeqCst);
    }

    /// Whether a driver that looks for a device must not find this one.
    pub(in crate::virtio) fn is_hidden(&self) -> bool {
        self.is_hidden.load(Ordering::SeqCst)
    }

    /// Whether there is no driver: it has reset the device. Linux says afterwards that it sees the device
    /// (ACKNOWLEDGE). Waits for nobody.
    pub(crate) fn has_no_driver(&self) -> bool {
        self.status.load(Ordering::SeqCst) & status::DRIVER == 0
    }

    /// Whether a driver has begun to set the device up, and has given up (virtio 1.3, 2.1). Waits for nobody.
    pub(in crate::virtio) fn has_failed(&self) -> bool {
        self.status.load(Ordering::SeqCst) & (status::DRIVER_OK | status::FAILED) == status::FAILED
    }

    /// Looks at the registers.
    pub(in crate::virtio) fn registers<T>(&self, look: impl FnOnce(&Registers) -> T) -> T {
        look(&lock(&self.state).registers)
    }

    /// Reads from the device configuration space.
    pub(in crate::virtio) fn read_config(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        lock(&self.state).lifecycle.device.read_config(offset, data);
    }

    /// Reads a register. `offset` is that of the MMIO transport (virtio 1.3, 4.2.2).
    pub(in crate::virtio) fn read_register(&self, offset: u64) -> u32 {
        // The driver of a device with an interrupt line reads this register at every interrupt, so it does without the
        // lock.
        if offset == reg::INTERRUPT_STATUS {
            return self.interrupt.status();
        }
        let state = lock(&self.state);
        match offset {
            reg::DEVICE_ID if self.is_hidden() => 0,
            reg::DEVICE_ID => state.lifecycle.device.device_type(),
            reg::CONFIG_GENERATION => state.lifecycle.device.config_generation(),
            reg::STATUS if self.interrupt.is_reset_needed() => state.registers.status() | status::NEEDS_RESET,
            // A driver that does not find FEATURES_OK set ends its probe (virtio 1.3, 3.1.1).
            reg::STATUS if state.is_let_go => state.registers.status() & !status::FEATURES_OK,
            reg::STATUS => state.registers.status(),
            _ => state.registers.read(offset, state.lifecycle.features()),
        }
    }

    /// Writes a register. `offset` is that of the MMIO transport.
    pub(in crate::virtio) fn write_register(&self, offset: u64, value: u32) {
        match offset {
            // KVM handles the acknowledgement of used buffers by itself. Those of other changes arrive here.
            reg::INTERRUPT_ACK => self.interrupt.acknowledge(value),
            // KVM handles a legal notification by itself. A write with another width or value arrives here.
            reg::QUEUE_NOTIFY => self.kick(value as usize),
            _ => {
                let state = &mut *lock(&self.state);
                let (features, memory) = (state.lifecycle.features(), &state.lifecycle.memory);
                match state.registers.write(offset, value, features, memory) {
                    Effect::Nothing => {}
                    Effect::Reset => self.reset(state),
                    Effect::Activate => self.activate(state),
                    Effect::Illegal => self.declare_broken(state),
                }
                self.status.store(state.registers.status(), Ordering::SeqCst);
            }
        }
    }

    /// The driver must not do what it has done. The device answers with DEVICE_NEEDS_RESET.
    pub(in crate::virtio) fn refuse(&self) {
        self.declare_broken(&lock(&self.state));
    }

    /// Notifies the device of available buffers in a queue. Does nothing if there is no such queue.
    pub(in crate::virtio) fn kick(&self, queue: usize) {
        if let Some(kick) = self.kicks.get(queue) {
            // Fails only if the counter is full, and then the event is signalled already.
            let _ = kick.write(1);
        }
    }

    fn activate(&self, state: &mut State) {
        if state.is_let_go {
            return self.declare_broken(state);
        }
        let activated = state.lifecycle.activate(&state.registers, &self.kicks, QueuePosition::Start);
        state.registers.set_driver_ok();
        if activated.is_err() {
            self.declare_broken(state);
        }
    }

    fn reset(&self, state: &mut State) {
        // A device that does not stop cannot be activated again. Its driver sees DEVICE_NEEDS_RESET then.
        let _ = state.lifecycle.stop();
        self.interrupt.clear();
        state.registers.reset();
        state.is_let_go = self.is_hidden();
    }

    /// Sets DEVICE_NEEDS_RESET. Notifies the driver only if it has set DRIVER_OK (virtio 1.3, 2.1.2).
    fn declare_broken(&self, state: &State) {
        if state.registers.is_driver_ok() {
            // The eventfd belongs to the VMM. If the write fails, there is no other way to reach the driver.
            let _ = self.interrupt.needs_reset();
        } else {
            self.interrupt.set_needs_reset();
        }
    }
}

/// Makes an event.
pub(in crate::virtio) fn event() -> Result<EventFd, TransportError> {
    EventFd::new(EFD_NONBLOCK | libc::EFD_CLOEXEC).map_err(TransportError::Events)
}
