//! Where things are in the guest's physical address space.
//!
//! Below 640 KiB lies what the kernel is handed at its start; it copies all of it early and takes the pages
//! back.

/// Global descriptor table for the first instructions.
pub const GDT_START: u64 = 0x500;
/// An empty interrupt descriptor table: the kernel loads its own before it enables interrupts.
pub const IDT_START: u64 = 0x520;
/// The zero page, `struct boot_params` (Linux, Documentation/arch/x86/zero-page.rst).
pub const ZERO_PAGE_START: u64 = 0x7000;
/// Page tables that map the first GiB one to one: PML4, PDPT and PD, a page each.
pub const PAGE_TABLES_START: u64 = 0x9000;
/// Command line.
pub const CMDLINE_START: u64 = 0x2_0000;
/// The MP floating pointer is sought in the last KiB of base memory, among other places (MP specification
/// 1.4, 4).
pub const MP_TABLE_START: u64 = 0x9_fc00;
/// Room for the MP table: up to the end of base memory.
pub const MP_TABLE_SIZE: u64 = 0x400;
/// Where memory goes on after the hole in which a PC has its video memory and ROMs.
pub const HIGH_RAM_START: u64 = 0x10_0000;

/// Devices live in the GiB below 4 GiB.
pub const MMIO_HOLE_START: u64 = 0xc000_0000;
/// Where memory goes on after that hole.
pub const MMIO_HOLE_END: u64 = 0x1_0000_0000;

/// First virtio-mmio device; the others follow, [`VIRTIO_MMIO_SIZE`] apart.
pub const VIRTIO_MMIO_START: u64 = 0xd000_0000;
/// A page each, so that a later wall between devices can be one of page tables.
pub const VIRTIO_MMIO_SIZE: u64 = 0x1000;
/// First interrupt (GSI) of virtio devices: 0-4 are a PC's timer, keyboard, cascade and serial ports.
pub const FIRST_VIRTIO_GSI: u32 = 5;
/// KVM's IOAPIC has 24 pins.
pub const LAST_GSI: u32 = 23;

/// Of the IOAPIC that KVM emulates.
pub const IOAPIC_ADDRESS: u32 = 0xfec0_0000;
/// Of the local APICs that KVM emulates.
pub const LAPIC_ADDRESS: u32 = 0xfee0_0000;

/// Three pages that KVM needs for itself on Intel's processors; anywhere below 4 GiB that is not memory.
pub const KVM_TSS_ADDRESS: usize = 0xfffb_d000;

/// First serial port: ports 0x3f8-0x3ff, GSI 4.
pub const SERIAL_PORT: u64 = 0x3f8;
/// Its interrupt.
pub const SERIAL_GSI: u32 = 4;
