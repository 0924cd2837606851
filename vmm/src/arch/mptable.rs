//! The MP table (Intel MultiProcessor specification 1.4), by which a kernel without ACPI finds its processors and the
//! IOAPIC pin of each interrupt.

use vm_memory::{Bytes, GuestAddress};

use crate::GuestMemory;
use crate::layout;

/// The revision of the specification, in the floating pointer and the header.
const SPEC_REVISION: u8 = 4;
/// The version of an integrated APIC.
const LAPIC_VERSION: u8 = 0x14;
/// The version of KVM's IOAPIC.
const IOAPIC_VERSION: u8 = 0x11;
const ISA_BUS: u8 = 0;

/// Interrupt types (specification 1.4, table 4-10).
const INT: u8 = 0;
const NMI: u8 = 1;
const EXT_INT: u8 = 3;

/// Writes the table for `vcpus` processors (1 to 32) to [`layout::MP_TABLE_START`].
pub fn write(memory: &GuestMemory, vcpus: u8) -> Result<(), vm_memory::GuestMemoryError> {
    memory.write_slice(&table(vcpus), GuestAddress(layout::MP_TABLE_START))
}

/// The floating pointer, the header and the entries.
fn table(vcpus: u8) -> Vec<u8> {
    const POINTER_SIZE: u64 = 16;
    let mut table = floating_pointer(layout::MP_TABLE_START + POINTER_SIZE);
    table.extend(configuration(vcpus));
    table
}

/// The floating pointer (specification 1.4, 4.1).
fn floating_pointer(table: u64) -> Vec<u8> {
    let mut bytes = b"_MP_".to_vec();
    // The table is below 4 GiB.
    bytes.extend((table as u32).to_le_bytes());
    let length_in_paragraphs = 1;
    bytes.extend([length_in_paragraphs, SPEC_REVISION, 0]);
    // The feature bytes: there is a configuration table, and there is no IMCR, so the interrupt mode is virtual wire
    // mode.
    bytes.extend([0; 5]);
    bytes[10] = checksum(&bytes);
    bytes
}

/// The header (specification 1.4, 4.2) and the entries (4.3).
fn configuration(vcpus: u8) -> Vec<u8> {
    // It must differ from the ids of the processors, which are 0..vcpus.
    let ioapic_id = vcpus;
    let mut entries = Vec::new();
    for id in 0..vcpus {
        entries.push(processor(id));
    }
    entries.push(vec![1, ISA_BUS, b'I', b'S', b'A', b' ', b' ', b' ']);
    let mut ioapic = vec![2, ioapic_id, IOAPIC_VERSION, 1];
    ioapic.extend(layout::IOAPIC_ADDRESS.to_le_bytes());
    entries.push(ioapic);
    // An ISA interrupt is edge-triggered and active high, like an irqfd without resampling.
    for pin in 0..=layout::LAST_GSI as u8 {
        entries.push(vec![3, INT, 0, 0, ISA_BUS, pin, ioapic_id, pin]);
    }
    const ALL_LAPICS: u8 = 0xff;
    entries.push(vec![4, EXT_INT, 0, 0, ISA_BUS, 0, 0, 0]);
    entries.push(vec![4, NMI, 0, 0, ISA_BUS, 0, ALL_LAPICS, 1]);

    const HEADER_SIZE: usize = 44;
    let length = HEADER_SIZE + entries.iter().map(Vec::len).sum::<usize>();
    let mut bytes = b"PCMP".to_vec();
    bytes.extend((length as u16).to_le_bytes());
    bytes.extend([SPEC_REVISION, 0]);
    bytes.extend(b"BULKHEADmicroVM     ");
    // There is no OEM table.
    bytes.extend([0; 6]);
    bytes.extend((entries.len() as u16).to_le_bytes());
    bytes.extend(layout::LAPIC_ADDRESS.to_le_bytes());
    // There is no extended table.
    bytes.extend([0; 4]);
    bytes.extend(entries.concat());
    bytes[7] = checksum(&bytes);
    bytes
}

fn processor(id: u8) -> Vec<u8> {
    const ENABLED: u8 = 1;
    const BOOT_PROCESSOR: u8 = 2;
    /// FPU and APIC. Linux reads the other features from CPUID.
    const FEATURES: u32 = 0x201;
    const SIGNATURE: u32 = 0x600;
    let flags = if id == 0 { ENABLED | BOOT_PROCESSOR } else { ENABLED };
    let mut entry = vec![0, id, LAPIC_VERSION, flags];
    entry.extend(SIGNATURE.to_le_bytes());
    entry.extend(FEATURES.to_le_bytes());
    entry.extend([0; 8]);
    entry
}

/// The byte with which the sum of all bytes is 0.
fn checksum(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0u8, |sum, byte| sum.wrapping_sub(*byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum(bytes: &[u8]) -> u8 {
        bytes.iter().fold(0, |sum, byte| sum.wrapping_add(*byte))
    }

    #[test]
    fn both_parts_add_up_to_zero_and_say_their_length() {
        for vcpus in [1, 2, 32] {
            let table = table(vcpus);
            assert_eq!(sum(&table[..16]), 0);
            assert_eq!(&table[..4], b"_MP_");
            assert_eq!(&table[4..8], &(layout::MP_TABLE_START as u32 + 16).to_le_bytes());
            let configuration = &table[16..];
            assert_eq!(&configuration[..4], b"PCMP");
            assert_eq!(sum(configuration), 0);
            let length = u16::from_le_bytes([configuration[4], configuration[5]]);
            assert_eq!(usize::from(length), configuration.len());
        }
    }

    #[test]
    fn the_largest_table_fits_in_its_place() {
        assert!(table(32).len() as u64 <= layout::MP_TABLE_SIZE);
    }

    #[test]
    fn every_entry_is_counted() {
        let table = table(2);
        let entries = &table[16 + 44..];
        let count = u16::from_le_bytes([table[16 + 34], table[16 + 35]]);
        let mut rest = entries;
        let mut seen = 0;
        while let Some(kind) = rest.first() {
            let size = if *kind == 0 { 20 } else { 8 };
            rest = &rest[size..];
            seen += 1;
        }
        assert_eq!(seen, count);
    }
}
