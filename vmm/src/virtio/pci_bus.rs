//! The PCI bus, by configuration mechanism 1 (PCI Local Bus Specification 3.0, 3.2.2.3.2): the guest writes the address
//! of a register to one port, and accesses the register by another.

use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

use super::{
    pci::config_space::ConfigSpace,
    slot::{Slot, Transport},
};
use crate::bus::BusDevice;

/// The first port, and the number of ports.
pub const PORT: u64 = 0xcf8;
pub const PORTS: u64 = 8;

/// The offset of the data from [`PORT`].
const DATA: u64 = 4;
/// The highest byte of an address that makes the data port a register of a function.
const ENABLE: u8 = 1 << 7;

/// The bus.
pub struct PciBus {
    address: AtomicU32,
    bridge: ConfigSpace,
    /// Those after the bridge.
    slots: Vec<Arc<Slot>>,
}

/// The function that the address names.
enum Function<'b> {
    Bridge(&'b ConfigSpace),
    Device(Arc<dyn Transport>),
}

impl PciBus {
    /// A bus with these slots, from number 1 on. Those that are empty may get a device later.
    pub fn new(slots: Vec<Arc<Slot>>) -> Self {
        Self { address: AtomicU32::new(0), bridge: ConfigSpace::host_bridge(), slots }
    }

    /// The address that the guest has written last.
    pub fn address(&self) -> u32 {
        self.address.load(Ordering::SeqCst)
    }

    /// Sets that address.
    pub(crate) fn set_address(&self, address: u32) {
        self.address.store(address & !3, Ordering::SeqCst);
    }

    /// Finds the function for an access of `len` bytes at the port `offset`, and the place in its configuration space.
    /// None: there is no function, or the access is not legal.
    fn find(&self, offset: u64, len: usize) -> Option<(Function<'_>, usize)> {
        let address = self.address();
        let byte = offset.checked_sub(DATA)? as usize;
        let is_legal = matches!(len, 1 | 2 | 4) && byte + len <= 4 && byte.is_multiple_of(len);
        let [register, function, bus, extension] = address.to_le_bytes();
        // Some processors have further registers, by further bits of the address: no function has them. The three low
        // bits are the number of the function in its device, of which there is one.
        if !is_legal || extension != ENABLE || bus != 0 || function & 7 != 0 {
            return None;
        }
        let found = match usize::from(function >> 3).checked_sub(1) {
            None => Function::Bridge(&self.bridge),
            Some(slot) => Function::Device(self.slots.get(slot)?.device()?),
        };
        Some((found, usize::from(register) + byte))
    }
}

impl BusDevice for PciBus {
    /// What does not exist reads all ones.
    fn read(&self, offset: u64, data: &mut [u8]) {
        if offset == 0 {
            if let Ok(word) = <&mut [u8; 4]>::try_from(data) {
                *word = self.address().to_le_bytes();
            }
            return;
        }
        match self.find(offset, data.len()) {
            Some((Function::Bridge(bridge), at)) => bridge.read(at, data),
            Some((Function::Device(device), at)) => {
                if let Some(device) = device.pci() {
                    device.read_config_space(at, data);
                }
            }
            None => {}
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if offset == 0 {
            if let Ok(word) = <[u8; 4]>::try_from(data) {
                self.set_address(u32::from_le_bytes(word));
            }
            return;
        }
        if let Some((Function::Device(device), at)) = self.find(offset, data.len())
            && let Some(device) = device.pci()
        {
            device.write_config_space(at, data);
        }
    }
}
