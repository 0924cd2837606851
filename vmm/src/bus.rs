//! Who answers at which address, for memory-mapped registers and for I/O ports.

use std::{collections::BTreeMap, sync::Arc};

/// What answers. Several vCPUs may call at once.
pub trait BusDevice: Send + Sync {
    /// Reads `data.len()` bytes (at most 8) at `offset` from the device's start. `data` comes filled with
    /// ones, which is what is read where nothing is.
    fn read(&self, offset: u64, data: &mut [u8]);

    /// Writes `data` (at most 8 bytes, but any number for a string of one port) at `offset`.
    fn write(&self, offset: u64, data: &[u8]);
}

/// Addresses to devices. Complete before the first vCPU runs, and then never changed.
#[derive(Default)]
pub struct Bus {
    devices: BTreeMap<u64, Place>,
}

struct Place {
    length: u64,
    device: Arc<dyn BusDevice>,
}

impl Bus {
    /// Puts `device` at `start..start + length`. The caller keeps places apart; of two that overlap, the one
    /// that starts later answers.
    pub fn insert(&mut self, start: u64, length: u64, device: Arc<dyn BusDevice>) {
        self.devices.insert(start, Place { length, device });
    }

    /// Reads all ones where there is no device, as hardware does.
    pub fn read(&self, address: u64, data: &mut [u8]) {
        data.fill(0xff);
        if let Some((offset, device)) = self.find(address) {
            device.read(offset, data);
        }
    }

    /// Does nothing where there is no device. Said to nobody: a guest could say it a million times a second.
    pub fn write(&self, address: u64, data: &[u8]) {
        if let Some((offset, device)) = self.find(address) {
            device.write(offset, data);
        }
    }

    fn find(&self, address: u64) -> Option<(u64, &dyn BusDevice)> {
        let (start, place) = self.devices.range(..=address).next_back()?;
        let offset = address - start;
        (offset < place.length).then_some((offset, place.device.as_ref()))
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
