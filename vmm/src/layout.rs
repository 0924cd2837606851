//! The layout of the guest's physical address space.
//!
//! The data that the kernel gets at its start is below 640 KiB. The kernel copies it early and then uses the pages
//! itself.

/// The global descriptor table for the first instructions.
pub const GDT_START: u64 = 0x500;
/// An empty interrupt descriptor table: the kernel loads its own before it enables interrupts.
pub const IDT_START: u64 = 0x520;
/// The zero page: `struct boot_params` (Linux, Documentation/arch/x86/zero-page.rst).
pub const ZERO_PAGE_START: u64 = 0x7000;
/// Page tables that identity-map the first GiB: PML4, PDPT and PD, a page each.
pub const PAGE_TABLES_START: u64 = 0x9000;
/// The kernel command line.
pub const CMDLINE_START: u64 = 0x2_0000;
/// The MP table. The kernel searches the last KiB of base memory for it, among other places (MP specification 1.4, 4).
pub const MP_TABLE_START: u64 = 0x9_fc00;
/// The space for the MP table, up to the end of base memory.
pub const MP_TABLE_SIZE: u64 = 0x400;
/// The start of memory above the hole in which a PC has its video memory and ROMs.
pub const HIGH_RAM_START: u64 = 0x10_0000;

/// The start of the hole for devices, which ends at 4 GiB.
pub const MMIO_HOLE_START: u64 = 0xc000_0000;
/// The start of memory above that hole.
pub const MMIO_HOLE_END: u64 = 0x1_0000_0000;

/// The address of the first virtio-mmio device. The others follow in steps of [`VIRTIO_MMIO_SIZE`].
pub const VIRTIO_MMIO_START: u64 = 0xd000_0000;
/// Each device has a page, so that a guest can map it separately.
pub const VIRTIO_MMIO_SIZE: u64 = 0x1000;
/// The address of the memory of the first PCI function. The others follow in steps of [`PCI_SIZE`].
pub const PCI_START: u64 = 0xd100_0000;
/// The bytes of the memory of a PCI function.
pub const PCI_SIZE: u64 = 0x4000;
/// The functions of the PCI bus: one in each slot after the bridge to the host.
pub const PCI_FUNCTIONS: u32 = 31;
/// The most interrupts of a PCI function.
pub const PCI_VECTORS: u32 = 16;
/// The first interrupt (GSI) of virtio devices. 0 to 4 are the timer, the keyboard, the cascade and the serial ports
/// of a PC.
pub const FIRST_VIRTIO_GSI: u32 = 5;
/// KVM's IOAPIC has 24 pins.
pub const LAST_GSI: u32 = 23;
/// The interrupt of a PC's real-time clock. No virtio device has it: KVM must know when each of these interrupts ends.
/// So the guest exits at its end, even where the processor or a paravirtual EOI makes that needless for others.
const RTC_GSI: u32 = 8;
/// The most virtio devices of a VM. Each has an interrupt of its own.
pub const VIRTIO_SLOTS: u32 = LAST_GSI - FIRST_VIRTIO_GSI;

/// The address of the IOAPIC that KVM emulates.
pub const IOAPIC_ADDRESS: u32 = 0xfec0_0000;
/// The address of the local APICs that KVM emulates.
pub const LAPIC_ADDRESS: u32 = 0xfee0_0000;

/// Three pages that KVM needs on Intel processors. They must be below 4 GiB and not in guest memory.
pub const KVM_TSS_ADDRESS: usize = 0xfffb_d000;

/// The first port of the first serial port, which has the ports 0x3f8 to 0x3ff.
pub const SERIAL_PORT: u64 = 0x3f8;
/// Its interrupt.
pub const SERIAL_GSI: u32 = 4;

/// What a virtio device has of the guest's address space and of its interrupts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resources {
    /// The address of its registers.
    pub address: u64,
    /// Its interrupt (GSI). Those of a PCI function are this and the next ones.
    pub gsi: u32,
}

/// The resources of the virtio-mmio device in a slot. None: there is no such slot.
pub fn mmio_slot(slot: u32) -> Option<Resources> {
    if slot >= VIRTIO_SLOTS {
        return None;
    }
    let gsi = FIRST_VIRTIO_GSI + slot;
    let gsi = if gsi < RTC_GSI { gsi } else { gsi + 1 };
    Some(Resources { address: VIRTIO_MMIO_START + u64::from(slot) * VIRTIO_MMIO_SIZE, gsi })
}

/// The resources of a PCI function. Its interrupts come after those of the IOAPIC. None: there is no such function.
pub fn pci_function(function: u32) -> Option<Resources> {
    if function >= PCI_FUNCTIONS {
        return None;
    }
    let gsi = LAST_GSI + 1 + function * PCI_VECTORS;
    Some(Resources { address: PCI_START + u64::from(function) * PCI_SIZE, gsi })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_pci_function_has_memory_and_interrupts_of_its_own() {
        let functions: Vec<_> = (0..).map_while(pci_function).collect();
        assert_eq!(functions.len(), 31);
        let (first, second) =
            (Resources { address: 0xd100_0000, gsi: 24 }, Resources { address: 0xd100_4000, gsi: 40 });
        assert_eq!((functions[0], functions[1]), (first, second));
        let Resources { address, gsi } = functions[30];
        assert!(address + PCI_SIZE <= IOAPIC_ADDRESS.into() && gsi + PCI_VECTORS <= 1024);
    }

    #[test]
    fn each_virtio_device_has_an_interrupt_and_none_that_of_the_clock() {
        let interrupts: Vec<u32> = (0..).map_while(mmio_slot).map(|slot| slot.gsi).collect();
        assert!(interrupts.is_sorted_by(|one, next| one < next), "{interrupts:?}");
        assert_eq!((interrupts[0], interrupts.last()), (FIRST_VIRTIO_GSI, Some(&LAST_GSI)));
        assert_eq!(interrupts.len(), VIRTIO_SLOTS as usize);
        assert!(!interrupts.contains(&RTC_GSI));
    }
}
