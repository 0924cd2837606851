//! A bus maps addresses to devices, for memory-mapped registers or for I/O ports.

use std::{collections::BTreeMap, sync::Arc};

/// A device on a bus. Several vCPUs may call it at the same time.
pub trait BusDevice: Send + Sync {
    /// Reads `data.len()` bytes at `offset` from the start of the device: at most 8, or any number for string I/O at
    /// a port. `data` is filled with ones, which is the value of a register that does not exist.
    fn read(&self, offset: u64, data: &mut [u8]);

    /// Writes `data` at `offset`: at most 8 bytes, or any number for string I/O at a port.
    fn write(&self, offset: u64, data: &[u8]);
}

/// A bus. It does not change after the first vCPU has started.
#[derive(Default)]
pub struct Bus {
    devices: BTreeMap<u64, Range>,
}

struct Range {
    length: u64,
    device: Arc<dyn BusDevice>,
}

impl Bus {
    /// Adds `device` at the addresses `start..start + length`. They must not overlap those of another device.
    pub fn insert(&mut self, start: u64, length: u64, device: Arc<dyn BusDevice>) {
        self.devices.insert(start, Range { length, device });
    }

    /// Reads from the device at `address`. Reads all ones if there is none, as on real hardware.
    pub fn read(&self, address: u64, data: &mut [u8]) {
        data.fill(0xff);
        if let Some((offset, device)) = self.find(address) {
            device.read(offset, data);
        }
    }

    /// Writes to the device at `address`. Ignores the write if there is none, and does not log it, because a guest
    /// could cause a million lines a second.
    pub fn write(&self, address: u64, data: &[u8]) {
        if let Some((offset, device)) = self.find(address) {
            device.write(offset, data);
        }
    }

    fn find(&self, address: u64) -> Option<(u64, &dyn BusDevice)> {
        let (start, range) = self.devices.range(..=address).next_back()?;
        let offset = address - start;
        (offset < range.length).then_some((offset, range.device.as_ref()))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[derive(Default)]
    struct Recorder(Mutex<Vec<(u64, Vec<u8>)>>);

    impl BusDevice for Recorder {
        fn read(&self, offset: u64, data: &mut [u8]) {
            data.fill(offset as u8);
        }
        fn write(&self, offset: u64, data: &[u8]) {
            self.0.lock().unwrap().push((offset, data.to_vec()));
        }
    }

    #[test]
    fn the_device_at_an_address_answers_and_nobody_else() {
        let device = Arc::new(Recorder::default());
        let mut bus = Bus::default();
        bus.insert(0x1000, 0x10, device.clone());
        let read = |address| {
            let mut data = [0];
            bus.read(address, &mut data);
            data[0]
        };
        assert_eq!([read(0xfff), read(0x1000), read(0x100f), read(0x1010)], [0xff, 0, 0xf, 0xff]);
        bus.write(0x1004, &[1, 2]);
        bus.write(0x2000, &[3]);
        assert_eq!(*device.0.lock().unwrap(), [(4, vec![1, 2])]);
    }
}
