//! The initial state of a vCPU.

use kvm_bindings::{Msrs, kvm_msr_entry, kvm_regs, kvm_segment, kvm_sregs};
use kvm_ioctls::VcpuFd;
use vm_memory::{Bytes, GuestAddress, GuestMemoryError};

use crate::GuestMemory;
use crate::layout;

/// Why a vCPU could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum RegisterError {
    #[error("cannot write the first page tables to the guest's memory")]
    Tables(#[source] GuestMemoryError),
    #[error("KVM rejects the {what} of a vCPU")]
    Set { what: &'static str, source: kvm_ioctls::Error },
    #[error("KVM rejects the value of a vCPU's MSR {index:#x}")]
    Msr { index: u32 },
}

fn refused(what: &'static str) -> impl Fn(kvm_ioctls::Error) -> RegisterError {
    move |source| RegisterError::Set { what, source }
}

/// Sets the state that Linux expects of every processor. All other state is that after a reset. All processors but
/// the first wait for a start-up interrupt in this state.
pub fn set_common(vcpu: &VcpuFd) -> Result<(), RegisterError> {
    set_msrs(vcpu)?;
    set_local_interrupts(vcpu)
}

/// Sets the boot processor to the entry point of the kernel (Linux, Documentation/arch/x86/boot.rst, "64-bit boot
/// protocol": long mode, identity-mapped memory, flat segments, and the address of the zero page in rsi).
pub fn set_boot(vcpu: &VcpuFd, memory: &GuestMemory, entry: GuestAddress) -> Result<(), RegisterError> {
    const RFLAGS_ALWAYS_ONE: u64 = 2;
    write_tables(memory).map_err(RegisterError::Tables)?;
    let mut sregs = vcpu.get_sregs().map_err(refused("segments"))?;
    enter_long_mode(&mut sregs);
    vcpu.set_sregs(&sregs).map_err(refused("segments"))?;
    let regs = kvm_regs {
        rip: entry.0,
        rsi: layout::ZERO_PAGE_START,
        rflags: RFLAGS_ALWAYS_ONE,
        ..Default::default()
    };
    vcpu.set_regs(&regs).map_err(refused("registers"))
}

/// A flat segment: its base is 0 and its limit is 4 GiB.
#[derive(Clone, Copy)]
struct Segment {
    /// The index in the global descriptor table.
    index: u16,
    /// The type (Intel SDM, volume 3A, 3.4.5.1).
    kind: u8,
    /// Whether it is a 64-bit code segment.
    long: bool,
}

/// The boot protocol's __BOOT_CS (0x10) and __BOOT_DS (0x18).
const CODE: Segment = Segment { index: 2, kind: 0xb, long: true };
const DATA: Segment = Segment { index: 3, kind: 0x3, long: false };

impl Segment {
    fn descriptor(self) -> u64 {
        let limit = 0xffff | (0xf << 48);
        let code_or_data_present = 0b1001 << 44;
        let size = if self.long { 1 << 53 } else { 1 << 54 };
        let granularity = 1 << 55;
        limit | (u64::from(self.kind) << 40) | code_or_data_present | size | granularity
    }

    fn register(self) -> kvm_segment {
        kvm_segment {
            base: 0,
            limit: 0xffff_ffff,
            selector: self.index * 8,
            type_: self.kind,
            present: 1,
            dpl: 0,
            db: u8::from(!self.long),
            s: 1,
            l: u8::from(self.long),
            g: 1,
            ..Default::default()
        }
    }
}

fn enter_long_mode(sregs: &mut kvm_sregs) {
    const CR0_PROTECTED: u64 = 1;
    const CR0_PAGING: u64 = 1 << 31;
    const CR4_PAE: u64 = 1 << 5;
    const EFER_LONG_MODE: u64 = (1 << 8) | (1 << 10);
    sregs.gdt.base = layout::GDT_START;
    sregs.gdt.limit = (gdt().len() * 8 - 1) as u16;
    sregs.idt.base = layout::IDT_START;
    sregs.idt.limit = 7;
    sregs.cs = CODE.register();
    let data = DATA.register();
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    sregs.cr3 = layout::PAGE_TABLES_START;
    sregs.cr4 |= CR4_PAE;
    sregs.cr0 |= CR0_PROTECTED | CR0_PAGING;
    sregs.efer |= EFER_LONG_MODE;
}

fn gdt() -> [u64; 4] {
    [0, 0, CODE.descriptor(), DATA.descriptor()]
}

/// Writes the GDT, an empty IDT, and page tables that map the first GiB by pages of 2 MiB.
fn write_tables(memory: &GuestMemory) -> Result<(), GuestMemoryError> {
    const PRESENT_WRITABLE: u64 = 3;
    const LARGE: u64 = 1 << 7;
    const PAGE: u64 = 0x1000;
    write_words(memory, layout::GDT_START, gdt())?;
    write_words(memory, layout::IDT_START, [0])?;
    let (pml4, pdpt, pd) =
        (layout::PAGE_TABLES_START, layout::PAGE_TABLES_START + PAGE, layout::PAGE_TABLES_START + 2 * PAGE);
    write_words(memory, pml4, [pdpt | PRESENT_WRITABLE])?;
    write_words(memory, pdpt, [pd | PRESENT_WRITABLE])?;
    write_words(memory, pd, (0..512).map(|index| (index << 21) | LARGE | PRESENT_WRITABLE))
}

fn write_words(
    memory: &GuestMemory,
    start: u64,
    words: impl IntoIterator<Item = u64>,
) -> Result<(), GuestMemoryError> {
    let bytes: Vec<u8> = words.into_iter().flat_map(u64::to_le_bytes).collect();
    memory.write_slice(&bytes, GuestAddress(start))
}

fn set_msrs(vcpu: &VcpuFd) -> Result<(), RegisterError> {
    const MISC_ENABLE: u32 = 0x1a0;
    // Fast string operations are enabled. Without them Linux copies memory byte by byte on Intel processors. Branch
    // trace storage and precise event sampling are unavailable.
    const FAST_STRING_NO_BTS_NO_PEBS: u64 = 1 | (1 << 11) | (1 << 12);
    const MTRR_DEF_TYPE: u32 = 0x2ff;
    // After a reset all memory is uncached. A firmware would set it to write-back.
    const MTRR_ENABLED_WRITE_BACK: u64 = (1 << 11) | 6;
    let entries = [(MISC_ENABLE, FAST_STRING_NO_BTS_NO_PEBS), (MTRR_DEF_TYPE, MTRR_ENABLED_WRITE_BACK)]
        .map(|(index, data)| kvm_msr_entry { index, data, ..Default::default() });
    // This fails only if there are more entries than KVM takes.
    let msrs = Msrs::from_entries(&entries).map_err(|_| RegisterError::Msr { index: MISC_ENABLE })?;
    let set = vcpu.set_msrs(&msrs).map_err(refused("MSRs"))?;
    match entries.get(set) {
        Some(entry) => Err(RegisterError::Msr { index: entry.index }),
        None => Ok(()),
    }
}

/// Connects LINT0 to the 8259 and LINT1 to non-maskable interrupts, as the MP table says.
fn set_local_interrupts(vcpu: &VcpuFd) -> Result<(), RegisterError> {
    const LVT_LINT0: usize = 0x350;
    const LVT_LINT1: usize = 0x360;
    const EXT_INT: i8 = 7;
    const NMI: i8 = 4;
    let mut lapic = vcpu.get_lapic().map_err(refused("local APIC"))?;
    // Bits 10:8 of the register are the delivery mode, which are the low bits of its second byte.
    for (register, mode) in [(LVT_LINT0, EXT_INT), (LVT_LINT1, NMI)] {
        let byte = &mut lapic.regs[register + 1];
        *byte = (*byte & !7) | mode;
    }
    vcpu.set_lapic(&lapic).map_err(refused("local APIC"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_are_those_of_the_boot_protocol() {
        assert_eq!(gdt(), [0, 0, 0x00af_9b00_0000_ffff, 0x00cf_9300_0000_ffff]);
        assert_eq!((CODE.register().selector, DATA.register().selector), (0x10, 0x18));
    }

    #[test]
    fn the_first_gib_is_mapped_one_to_one() {
        let memory = crate::memory::allocate(crate::memory::Size::new(64, None), None).unwrap();
        write_tables(&memory).unwrap();
        let word = |address| memory.read_obj::<u64>(GuestAddress(address)).unwrap();
        assert_eq!(word(0x9000), 0xa003);
        assert_eq!(word(0xa000), 0xb003);
        assert_eq!(word(0xb000), 0x83);
        assert_eq!(word(0xbff8), (511 << 21) | 0x83);
    }
}
