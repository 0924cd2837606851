//! Programs of one system call each, made byte by byte: what no tool of the image does, in both of the machine's
//! instruction sets.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::{Context, Result};

/// Which set of system calls a program uses.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Bits {
    /// x86_64.
    B64,
    /// i386.
    B32,
}

/// Where it is loaded.
const ADDRESS: u32 = 0x0040_0000;

/// Writes a program that makes this call and exits with its error number, or with 0.
pub(crate) fn write(file: &Path, bits: Bits, number: u32, arguments: [u32; 3]) -> Result<()> {
    write_program(file, &elf(bits, &code(bits, number, arguments)))
}

/// The memory that a program maps.
#[derive(Clone, Copy)]
pub(crate) enum Mapped {
    /// Huge pages of its own.
    HugePages,
    /// The file that it has as descriptor 3.
    File,
}

/// Writes a program that maps so many times 2 MiB and writes to each. It exits with the error number of mmap(2), or
/// with 0.
pub(crate) fn write_mapper(file: &Path, mapped: Mapped, pages: u32) -> Result<()> {
    // MAP_PRIVATE, MAP_ANONYMOUS and MAP_HUGETLB; or MAP_SHARED.
    let (flags, descriptor): (u32, u32) = match mapped {
        Mapped::HugePages => (0x4_0022, u32::MAX),
        Mapped::File => (0x1, 3),
    };
    const PAGE: u32 = 2 << 20;
    let mut code = Vec::new();
    // xor edi, edi; mov esi, LENGTH; mov edx, PROT_READ | PROT_WRITE; mov r10d, FLAGS; mov r8d, FD; xor r9d, r9d.
    code.extend([0x31, 0xff, 0xbe]);
    code.extend((pages * PAGE).to_le_bytes());
    code.extend([0xba, 3, 0, 0, 0, 0x41, 0xba]);
    code.extend(flags.to_le_bytes());
    code.extend([0x41, 0xb8]);
    code.extend(descriptor.to_le_bytes());
    // mov eax, 9; syscall; xor edi, edi; test rax, rax; js FAILED, over the next two lines.
    code.extend([0x45, 0x31, 0xc9, 0xb8, 9, 0, 0, 0, 0x0f, 0x05, 0x31, 0xff, 0x48, 0x85, 0xc0, 0x78, 20]);
    // mov ecx, PAGES; each: mov byte [rax], 1; add rax, PAGE; dec ecx; jnz each; xor eax, eax.
    code.push(0xb9);
    code.extend(pages.to_le_bytes());
    code.extend([0xc6, 0x00, 0x01, 0x48, 0x05]);
    code.extend(PAGE.to_le_bytes());
    code.extend([0xff, 0xc9, 0x75, 0xf3, 0x31, 0xc0]);
    // FAILED: sub edi, eax; mov eax, 60; syscall.
    code.extend([0x29, 0xc7, 0xb8, 60, 0, 0, 0, 0x0f, 0x05]);
    write_program(file, &elf(Bits::B64, &code))
}

fn write_program(file: &Path, content: &[u8]) -> Result<()> {
    fs::write(file, content)
        .and_then(|()| fs::set_permissions(file, fs::Permissions::from_mode(0o755)))
        .with_context(|| format!("cannot write {}", file.display()))
}

/// The instructions.
fn code(bits: Bits, number: u32, arguments: [u32; 3]) -> Vec<u8> {
    // mov eax, NUMBER; then the registers of the arguments: rdi, rsi, rdx or ebx, ecx, edx.
    let (registers, call, exit): ([u8; 3], [u8; 2], u32) = match bits {
        Bits::B64 => ([0xbf, 0xbe, 0xba], [0x0f, 0x05], 60),
        Bits::B32 => ([0xbb, 0xb9, 0xba], [0xcd, 0x80], 1),
    };
    let mut code = Vec::new();
    let load = |code: &mut Vec<u8>, register: u8, value: u32| {
        code.push(register);
        code.extend(value.to_le_bytes());
    };
    load(&mut code, 0xb8, number);
    for (register, argument) in registers.into_iter().zip(arguments) {
        load(&mut code, register, argument);
    }
    code.extend(call);
    // xor ecx, ecx; test eax, eax; cmovns eax, ecx: what did not fail is 0. neg eax; mov edi or ebx, eax.
    code.extend([0x31, 0xc9, 0x85, 0xc0, 0x0f, 0x49, 0xc1, 0xf7, 0xd8, 0x89]);
    code.push(if bits == Bits::B64 { 0xc7 } else { 0xc3 });
    load(&mut code, 0xb8, exit);
    code.extend(call);
    code
}

/// An ELF file of one segment (System V ABI, chapter 4 and 5).
pub(crate) fn elf(bits: Bits, code: &[u8]) -> Vec<u8> {
    let (header, program_header) = if bits == Bits::B64 { (64_u32, 56_u32) } else { (52, 32) };
    let start = header + program_header;
    let size = start + code.len() as u32;
    let word = |value: u32| -> Vec<u8> {
        let width = if bits == Bits::B64 { 8 } else { 4 };
        u64::from(value).to_le_bytes()[..width].to_vec()
    };
    let mut file = b"\x7fELF".to_vec();
    // Class, little-endian, version 1; then padding.
    file.extend([if bits == Bits::B64 { 2 } else { 1 }, 1, 1]);
    file.resize(16, 0);
    let machine: u16 = if bits == Bits::B64 { 62 } else { 3 };
    // Executable, machine, version; entry; program headers, no section headers, no flags.
    file.extend(2_u16.to_le_bytes());
    file.extend(machine.to_le_bytes());
    file.extend(1_u32.to_le_bytes());
    file.extend(word(ADDRESS + start));
    file.extend(word(header));
    file.extend(word(0));
    file.extend(0_u32.to_le_bytes());
    for half in [header as u16, program_header as u16, 1, 0, 0, 0] {
        file.extend(half.to_le_bytes());
    }
    // Loadable; readable and executable, which the two classes have at different places.
    let (kind, flags) = (1_u32.to_le_bytes(), 5_u32.to_le_bytes());
    file.extend(kind);
    if bits == Bits::B64 {
        file.extend(flags);
    }
    for value in [0, ADDRESS, ADDRESS, size, size] {
        file.extend(word(value));
    }
    if bits == Bits::B32 {
        file.extend(flags);
    }
    file.extend(word(0x1000));
    file.extend(code);
    file
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::scratch;
    use std::process::Command;

    #[test]
    fn a_probe_exits_with_the_error_number() {
        let directory = scratch().unwrap();
        let probe = directory.path().join("probe");
        // close(-1) is EBADF, getpid() succeeds, 999 does not exist.
        for (number, argument, status) in [(3, u32::MAX, 9), (39, 0, 0), (999, 0, 38)] {
            write(&probe, Bits::B64, number, [argument, 0, 0]).unwrap();
            assert_eq!(Command::new(&probe).status().unwrap().code(), Some(status));
        }
    }

    #[test]
    fn a_mapper_writes_to_each_of_its_pages() {
        let directory = scratch().unwrap();
        let at = |name: &str| directory.path().join(name);
        write_mapper(&at("mapper"), Mapped::File, 2).unwrap();
        let run =
            |script: &str| Command::new("sh").current_dir(&directory).args(["-c", script]).status().unwrap();
        fs::File::create(at("file")).unwrap().set_len(4 << 20).unwrap();
        assert_eq!(run("./mapper 3<>file").code(), Some(0));
        let bytes = fs::read(at("file")).unwrap();
        assert_eq!((bytes[0], bytes[1], bytes[2 << 20]), (1, 0, 1));
        // EACCES: it cannot be written to. EBADF: there is none.
        assert_eq!(run("./mapper 3<file").code(), Some(13));
        assert_eq!(run("./mapper 3<&-").code(), Some(9));
    }
}
