//! The PCI bus, a function on it, and its interrupt messages, by a driver that follows no order. The device is the
//! entropy device.

use std::{
    collections::BTreeMap,
    io,
    sync::{Arc, Mutex, PoisonError, atomic::AtomicBool},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use bulkhead_vmm::{
    GuestMemory,
    bus::Bus,
    layout::{LAST_GSI, PCI_SIZE, PCI_START, Resources},
    memory,
    virtio::{
        msix::{Message, Router},
        pci::{
            PciTransport,
            layout::{NOTIFY, TABLE},
        },
        pci_bus::{PORT, PORTS, PciBus},
        rng::Rng,
        slot::{Slot, Transport},
    },
};
use bulkhead_vmm_api::Transport as Kind;
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::EventFd;

use crate::{
    guest::{PIECES, behave_as_the_vmm},
    input::Input,
};

/// The first interrupt of the function.
const GSI: u32 = LAST_GSI + 1;
/// The slot of the function.
const SLOT: u32 = 2;
/// The rings and the buffer of a legal driver.
const RINGS: u32 = 0x1_0000;
const BUFFER: u64 = 0x2_0000;
/// A request that takes longer counts as a hang.
const PATIENCE: Duration = Duration::from_secs(20);

/// Registers of the configuration space that are accessed more often than others: the command, the control word of
/// MSI-X and the fields of the access capability.
const CONFIG: [u8; 8] = [0x04, 0x10, 0x42, 0xa4, 0xa8, 0xac, 0xb0, 0x00];
/// Places in the memory of the function: fields of the common configuration, and entries of the MSI-X table.
const PLACES: [u64; 16] = [
    0x00,
    0x08,
    0x0c,
    0x10,
    0x14,
    0x16,
    0x18,
    0x1a,
    0x1c,
    0x20,
    0x28,
    0x30,
    NOTIFY,
    TABLE,
    TABLE + 16,
    TABLE + 24,
];

/// What KVM was told.
#[derive(Default)]
struct Routes(Mutex<BTreeMap<u32, Message>>);

impl Router for Routes {
    fn route(&self, messages: &[(u32, Message)], _: &AtomicBool) -> io::Result<()> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend(messages.iter().copied());
        Ok(())
    }
}

/// A guest with the bus and the memory of the function.
pub(crate) struct Guest {
    bus: Bus,
    memory: GuestMemory,
    pub(crate) pci: Arc<PciBus>,
    pub(crate) device: Arc<dyn Transport>,
    lines: Vec<EventFd>,
    routes: Arc<Routes>,
}

/// Runs the program.
pub fn run(bytes: &[u8]) -> Result<()> {
    let mut input = Input::new(bytes);
    let mut guest = Guest::new(memory::lay_out(&PIECES, 0)?)?;
    while !input.is_over() {
        guest.misbehave(&mut input);
    }
    guest.check()?;
    guest.serves()
}

impl Guest {
    pub(crate) fn new(memory: GuestMemory) -> Result<Self> {
        behave_as_the_vmm();
        let routes = Arc::new(Routes::default());
        let resources = Resources { address: PCI_START, gsi: GSI };
        let function = PciTransport::new(Box::new(Rng::new()?), memory.clone(), resources, routes.clone())?;
        let lines = function.irqfds().into_iter().map(|(_, event)| event.try_clone());
        let lines = lines.collect::<io::Result<_>>()?;
        let device: Arc<dyn Transport> = Arc::new(function);
        let slots: Vec<_> = (0..3).map(|_| Arc::new(Slot::new(Kind::Pci, resources))).collect();
        let place = &slots[SLOT as usize - 1];
        place.set(Some(device.clone()));
        let mut bus = Bus::default();
        bus.insert(PCI_START, PCI_SIZE, place.clone());
        let pci = Arc::new(PciBus::new(slots));
        bus.insert(PORT, PORTS, pci.clone());
        Ok(Self { bus, memory, pci, device, lines, routes })
    }

    fn misbehave(&mut self, input: &mut Input) {
        match input.below(8) {
            0 => self.bus.write(PORT + u64::from(input.u8() % 8), input.bytes(8)),
            1 => self.bus.read(PORT + u64::from(input.u8() % 8), &mut vec![0; input.below(9)]),
            2 => {
                let len = [1, 2, 4][input.below(3)];
                let at = input.choose(&CONFIG);
                self.select(at);
                self.bus.write(PORT + 4 + u64::from(at % 4), input.bytes(len));
            }
            3 => {
                self.select(input.u8());
                self.bus.read(PORT + 4, &mut [0; 4]);
            }
            4 => {
                let (place, len) = (input.choose(&PLACES), input.below(9));
                self.bus.write(PCI_START + place + u64::from(input.u8() % 4), input.bytes(len));
            }
            5 => {
                let offset = u64::from(input.u16()) % PCI_SIZE;
                self.bus.read(PCI_START + offset, &mut vec![0; input.below(9)]);
            }
            6 => {
                let offset = u64::from(input.u16()) % PCI_SIZE;
                self.bus.write(PCI_START + offset, input.bytes(8));
            }
            _ => {
                let interrupt = self.device.core().interrupt();
                // The events are not full, so the only error is one of this program.
                let _ = if input.u8() & 1 == 0 {
                    interrupt.used(input.u8().into())
                } else {
                    interrupt.config_changed()
                };
            }
        }
    }

    fn select(&self, register: u8) {
        let address = 1 << 31 | SLOT << 11 | u32::from(register & 0xfc);
        self.bus.write(PORT, &address.to_le_bytes());
    }

    fn config(&self, register: u8) -> u32 {
        self.select(register);
        let mut data = [0; 4];
        self.bus.read(PORT + 4, &mut data);
        u32::from_le_bytes(data)
    }

    fn set_config(&self, register: u8, value: u32) {
        self.select(register);
        self.bus.write(PORT + 4, &value.to_le_bytes());
    }

    fn write(&self, offset: u64, data: &[u8]) {
        self.bus.write(PCI_START + offset, data);
    }

    fn read_byte(&self, offset: u64) -> u8 {
        let mut byte = [0xff];
        self.bus.read(PCI_START + offset, &mut byte);
        byte[0]
    }

    /// What no driver can change, and which messages go to KVM.
    fn check(&self) -> Result<()> {
        ensure!(self.config(0) == 0x1044_1af4, "the function is another one");
        ensure!((0x10..=0x24).step_by(4).all(|bar| self.config(bar) == 0), "a BAR is not zero");
        ensure!(u64::from(self.config(0x54)) == PCI_START, "the memory was moved");
        let routes = self.routes.0.lock().unwrap_or_else(PoisonError::into_inner);
        ensure!(routes.keys().all(|gsi| (GSI..GSI + 2).contains(gsi)), "a message of another function");
        // Not one of all processors by their physical IDs, and no vector below 16.
        let is_legal = |Message { address, data }: &Message| {
            let is_one_of_all = address & 0xf_f004 == 0xf_f000 && address & 8 | data & 0x100 != 0;
            address & 0xfff0_0ff0 == 0xfee0_0000 && data & !0x1ff == 0 && data & 0xf0 != 0 && !is_one_of_all
        };
        ensure!(routes.values().all(is_legal), "a message to no processor: {routes:?}");
        Ok(())
    }

    /// Whatever was done before, the device serves its next driver, and interrupts it.
    pub(crate) fn serves(&self) -> Result<()> {
        self.set_config(4, 6);
        self.write(0x14, &[0]);
        self.set_config(0x40, 0x8000_0000);
        for (entry, data) in [(0u64, 0x31u32), (1, 0x32)] {
            for (word, value) in [(12, 1), (0, 0xfee0_0000), (4, 0), (8, data), (12, 0)] {
                self.write(TABLE + 16 * entry + word, &u32::to_le_bytes(value));
            }
        }
        // What was pending has been sent now.
        self.lines.iter().for_each(|line| drop(line.read()));
        self.memory.write_slice(&[0; 0x4000], GuestAddress(RINGS.into()))?;
        self.write(0x14, &[1]);
        self.write(0x14, &[3]);
        for half in [0u32, 1] {
            self.write(0, &half.to_le_bytes());
            let mut offered = [0; 4];
            self.bus.read(PCI_START + 4, &mut offered);
            self.write(8, &half.to_le_bytes());
            self.write(0xc, &offered);
        }
        self.write(0x14, &[11]);
        self.write(0x16, &[0, 0]);
        self.write(0x1a, &[1, 0]);
        for (register, ring) in [(0x20, RINGS), (0x28, RINGS + 0x1000), (0x30, RINGS + 0x2000)] {
            self.write(register, &ring.to_le_bytes());
        }
        self.write(0x1c, &[1, 0]);
        self.write(0x14, &[15]);
        ensure!(self.read_byte(0x14) == 15, "a driver that keeps to the rules is taken for broken");
        let mut descriptor = BUFFER.to_le_bytes().to_vec();
        descriptor.extend([16, 0, 0, 0, 2, 0, 0, 0]);
        self.memory.write_slice(&descriptor, GuestAddress(RINGS.into()))?;
        self.memory.write_slice(&[0, 0, 1, 0, 0, 0], GuestAddress(u64::from(RINGS) + 0x1000))?;
        self.write(NOTIFY, &[0, 0]);
        let deadline = Instant::now() + PATIENCE;
        while self.lines[1].read().is_err() {
            ensure!(Instant::now() < deadline, "the device does not serve after its reset");
            thread::yield_now();
        }
        let used: u16 = self.memory.read_obj(GuestAddress(u64::from(RINGS) + 0x2002))?;
        ensure!(used == 1 && self.lines[0].read().is_err(), "the interrupt is another one");
        Ok(())
    }
}
