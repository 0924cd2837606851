//! Loads the kernel, the initramfs and the zero page to guest memory (Linux, Documentation/arch/x86/boot.rst, "64-bit
//! boot protocol").

use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
};

use linux_loader::{
    bootparam::{boot_e820_entry, boot_params},
    cmdline::Cmdline,
    loader::{self, Elf, KernelLoader},
};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend as _, GuestMemoryError, GuestMemoryRegion};

use crate::GuestMemory;
use crate::layout;

/// Why the kernel or the initramfs could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum BootError {
    #[error("{what}: cannot open {path}")]
    Open { what: &'static str, path: PathBuf, source: io::Error },
    #[error("kernel: {path} is not an uncompressed ELF vmlinux")]
    NotVmlinux { path: PathBuf, source: loader::elf::Error },
    #[error("kernel: {path} is truncated, or does not fit into memory_mib: {memory_mib} MiB")]
    Kernel { path: PathBuf, memory_mib: u64, source: loader::Error },
    #[error("initramfs: {path} is empty or not a regular file")]
    EmptyInitramfs { path: PathBuf },
    #[error(
        "memory_mib: the kernel and the initramfs {path} ({size} bytes) do not fit into {memory_mib} MiB"
    )]
    NoRoom { path: PathBuf, size: u64, memory_mib: u64 },
    #[error("initramfs: cannot read {path}")]
    Initramfs { path: PathBuf, source: GuestMemoryError },
    #[error("cannot write the command line to the guest's memory")]
    Cmdline(#[source] loader::Error),
    #[error("cannot write the boot parameters to the guest's memory")]
    ZeroPage(#[source] GuestMemoryError),
}

/// The initramfs in guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Initramfs {
    address: u64,
    size: u64,
}

/// The files from which the guest boots. They are open.
pub struct Images {
    kernel: Image,
    initramfs: Image,
}

struct Image {
    path: PathBuf,
    file: File,
}

impl Images {
    /// Opens the files.
    pub fn open(kernel: &Path, initramfs: &Path) -> Result<Self, BootError> {
        Ok(Self { kernel: open("kernel", kernel)?, initramfs: open("initramfs", initramfs)? })
    }
}

/// Loads everything that the kernel needs at its start. Returns the address of its entry point.
pub fn load(memory: &GuestMemory, images: Images, cmdline: &Cmdline) -> Result<GuestAddress, BootError> {
    let loaded = load_kernel(memory, images.kernel)?;
    let initramfs = load_initramfs(memory, images.initramfs, loaded.kernel_end)?;
    loader::load_cmdline(memory, GuestAddress(layout::CMDLINE_START), cmdline).map_err(BootError::Cmdline)?;
    memory
        .write_obj(zero_page(memory, initramfs), GuestAddress(layout::ZERO_PAGE_START))
        .map_err(BootError::ZeroPage)?;
    Ok(loaded.kernel_load)
}

fn load_kernel(memory: &GuestMemory, image: Image) -> Result<loader::KernelLoaderResult, BootError> {
    let Image { path, mut file } = image;
    Elf::load(memory, None, &mut file, Some(GuestAddress(layout::HIGH_RAM_START))).map_err(
        |error| match error {
            loader::Error::Elf(source) if source != loader::elf::Error::ReadKernelImage => {
                BootError::NotVmlinux { path, source }
            }
            source => BootError::Kernel { path, memory_mib: mib(memory), source },
        },
    )
}

/// Loads the initramfs to the end of the memory below the hole for devices.
fn load_initramfs(memory: &GuestMemory, image: Image, kernel_end: u64) -> Result<Initramfs, BootError> {
    const PAGE: u64 = 0x1000;
    let Image { path, mut file } = image;
    let size = match file.metadata() {
        Ok(metadata) if metadata.is_file() && metadata.len() > 0 => metadata.len(),
        Ok(_) => return Err(BootError::EmptyInitramfs { path }),
        Err(source) => return Err(BootError::Open { what: "initramfs", path, source }),
    };
    let address = low_ram_end(memory)
        .checked_sub(size)
        .map(|address| address & !(PAGE - 1))
        .filter(|address| *address >= kernel_end)
        .ok_or_else(|| BootError::NoRoom { path: path.clone(), size, memory_mib: mib(memory) })?;
    memory
        .read_exact_volatile_from(GuestAddress(address), &mut file, size as usize)
        .map_err(|source| BootError::Initramfs { path, source })?;
    Ok(Initramfs { address, size })
}

fn open(what: &'static str, path: &Path) -> Result<Image, BootError> {
    let path = path.to_owned();
    match File::open(&path) {
        Ok(file) => Ok(Image { path, file }),
        Err(source) => Err(BootError::Open { what, path, source }),
    }
}

/// The end of the memory below [`layout::MMIO_HOLE_START`].
fn low_ram_end(memory: &GuestMemory) -> u64 {
    memory
        .iter()
        .filter(|region| region.start_addr().0 < layout::MMIO_HOLE_START)
        .map(|region| region.start_addr().0 + region.len())
        .max()
        .unwrap_or(0)
}

fn mib(memory: &GuestMemory) -> u64 {
    memory.iter().map(|region| region.len() >> 20).sum()
}

fn zero_page(memory: &GuestMemory, initramfs: Initramfs) -> boot_params {
    /// Magic numbers of the setup header (Documentation/arch/x86/boot.rst).
    const BOOT_FLAG: u16 = 0xaa55;
    const HEADER_MAGIC: u32 = 0x5372_6448;
    const UNDEFINED_LOADER: u8 = 0xff;
    let mut params = boot_params::default();
    params.hdr.boot_flag = BOOT_FLAG;
    params.hdr.header = HEADER_MAGIC;
    params.hdr.type_of_loader = UNDEFINED_LOADER;
    params.hdr.cmd_line_ptr = layout::CMDLINE_START as u32;
    // The initramfs is below 4 GiB.
    params.hdr.ramdisk_image = initramfs.address as u32;
    params.hdr.ramdisk_size = initramfs.size as u32;
    let map = memory_map(memory);
    for (slot, entry) in params.e820_table.iter_mut().zip(&map) {
        *slot = *entry;
    }
    params.e820_entries = map.len() as u8;
    params
}

/// The e820 map: guest memory without the upper memory area of a PC. Addresses that are not in the map are not memory.
fn memory_map(memory: &GuestMemory) -> Vec<boot_e820_entry> {
    const RAM: u32 = 1;
    const RESERVED: u32 = 2;
    let mut map = vec![
        boot_e820_entry { addr: 0, size: layout::MP_TABLE_START, r#type: RAM },
        boot_e820_entry { addr: layout::MP_TABLE_START, size: layout::MP_TABLE_SIZE, r#type: RESERVED },
    ];
    for region in memory.iter() {
        let start = region.start_addr().0.max(layout::HIGH_RAM_START);
        let end = region.start_addr().0 + region.len();
        map.push(boot_e820_entry { addr: start, size: end - start, r#type: RAM });
    }
    map
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::memory::{self, Size};

    fn image(path: &Path) -> Image {
        open("file", path).unwrap()
    }

    fn ranges(map: &[boot_e820_entry]) -> Vec<(u64, u64, u32)> {
        map.iter().map(|entry| (entry.addr, entry.addr + entry.size, entry.r#type)).collect()
    }

    #[test]
    fn a_small_guest_has_one_piece_of_high_memory() {
        let memory = memory::allocate(Size::new(256, None), None).unwrap();
        assert_eq!(
            ranges(&memory_map(&memory)),
            [(0, 0x9fc00, 1), (0x9fc00, 0xa0000, 2), (0x10_0000, 256 << 20, 1)]
        );
    }

    #[test]
    fn a_large_guest_has_a_hole_below_4_gib() {
        let memory = memory::allocate(Size::new(5 * 1024, None), None).unwrap();
        assert_eq!(ranges(&memory_map(&memory))[2..], [(0x10_0000, 3 << 30, 1), (4 << 30, 6 << 30, 1)]);
        assert_eq!(low_ram_end(&memory), 3 << 30);
    }

    #[test]
    fn the_initramfs_lies_on_whole_pages_at_the_end() {
        let memory = memory::allocate(Size::new(64, None), None).unwrap();
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&[7; 5000]).unwrap();
        let initramfs = load_initramfs(&memory, image(file.path()), 0x20_0000).unwrap();
        assert_eq!(initramfs, Initramfs { address: (64 << 20) - 0x2000, size: 5000 });
        let last: u8 = memory.read_obj(GuestAddress(initramfs.address + 4999)).unwrap();
        assert_eq!(last, 7);
    }

    #[test]
    fn what_is_wrong_with_a_file_is_said_with_its_name() {
        let memory = memory::allocate(Size::new(64, None), None).unwrap();
        let missing = Images::open(Path::new("/nowhere/vmlinux"), Path::new("/nowhere/initramfs")).err();
        assert_eq!(missing.unwrap().to_string(), "kernel: cannot open /nowhere/vmlinux");
        let text = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(text.path(), "#!/bin/sh".repeat(100)).unwrap();
        let no_elf = load_kernel(&memory, image(text.path())).unwrap_err();
        assert!(no_elf.to_string().ends_with("is not an uncompressed ELF vmlinux"), "{no_elf}");
        let no_room = load_initramfs(&memory, image(text.path()), 64 << 20).unwrap_err();
        assert!(no_room.to_string().contains("do not fit into 64 MiB"), "{no_room}");
        let empty = tempfile::NamedTempFile::new().unwrap();
        let none = load_initramfs(&memory, image(empty.path()), 0);
        assert!(matches!(none, Err(BootError::EmptyInitramfs { .. })));
    }
}
