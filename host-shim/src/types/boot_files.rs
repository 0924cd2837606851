//! Whether the files that a VM boots from are whole, as far as that is cheap. A copy that was cut off, and a disk that
//! was full or has lost its last writes, leave a file that is there but has no end, or an end of zeros. A VM that boots
//! from it does not start, or its guest panics, and neither says that the file is damaged.

use std::{fs::File, io, os::unix::fs::FileExt, path::Path};

/// What is wrong with a file.
#[derive(Debug)]
pub(crate) enum Flaw {
    Unreadable(io::Error),
    Damaged(String),
}

impl From<io::Error> for Flaw {
    fn from(error: io::Error) -> Self {
        Self::Unreadable(error)
    }
}

fn damaged<T>(reason: impl Into<String>) -> Result<T, Flaw> {
    Err(Flaw::Damaged(reason.into()))
}

/// A file of a known length.
struct Bytes {
    file: File,
    len: u64,
}

impl Bytes {
    fn open(path: &Path) -> Result<Self, Flaw> {
        let file = File::open(path)?;
        let len = file.metadata()?.len();
        if len == 0 {
            return damaged("it is empty");
        }
        Ok(Self { file, len })
    }

    /// The bytes from `at` on. None: the file ends before.
    fn get<const N: usize>(&self, at: u64) -> io::Result<Option<[u8; N]>> {
        let mut bytes = [0; N];
        Ok(self.fill(at, &mut bytes)?.then_some(bytes))
    }

    /// Returns whether the file has so many bytes there.
    fn fill(&self, at: u64, bytes: &mut [u8]) -> io::Result<bool> {
        if !self.has(at, bytes.len() as u64) {
            return Ok(false);
        }
        self.file.read_exact_at(bytes, at).map(|()| true)
    }

    fn has(&self, at: u64, length: u64) -> bool {
        at.checked_add(length).is_some_and(|end| end <= self.len)
    }

    /// Where the first byte is from `at` on and before `end` that is not 0, or `end`.
    fn after_zeros(&self, mut at: u64, end: u64) -> io::Result<u64> {
        const CHUNK: u64 = 64 << 10;
        // Between the entries of an archive are few zeros.
        if at < end && self.get::<1>(at)? != Some([0]) {
            return Ok(at);
        }
        let mut chunk = vec![0; CHUNK as usize];
        while at < end {
            let length = CHUNK.min(end - at);
            let part = chunk.get_mut(..length as usize).unwrap_or_default();
            self.file.read_exact_at(part, at)?;
            if let Some(place) = part.iter().position(|byte| *byte != 0) {
                return Ok(at + place as u64);
            }
            at += length;
        }
        Ok(end)
    }
}

/// The sizes of the header of an ELF file of 64 bits, of a program header, and of a section header (elf(5)).
const ELF_HEADER: usize = 64;
const PROGRAM_HEADER: usize = 56;
const SECTION_HEADER: usize = 64;

const PT_LOAD: u32 = 1;
const SHT_NULL: u32 = 0;
const SHT_NOBITS: u32 = 8;

/// So many zeros at the end of what is loaded are most likely no data of a kernel.
const MOST_ZEROS: u64 = 64 << 10;

/// Checks the guest's kernel, an ELF file: its segments and its sections are in the file. Returns a doubt, if there is
/// one.
pub(crate) fn kernel(path: &Path) -> Result<Option<String>, Flaw> {
    let bytes = Bytes::open(path)?;
    let header = bytes.get::<ELF_HEADER>(0)?.filter(is_vmlinux);
    let Some(header) = header else { return damaged("is not an uncompressed ELF vmlinux") };
    let Some(segments) = table(&bytes, number(&header, 32), short(&header, 56), PROGRAM_HEADER)? else {
        return damaged("its program headers are not in the file: it was cut off");
    };
    let mut end_of_data = None;
    for segment in segments.chunks_exact(PROGRAM_HEADER).filter(|segment| word(segment, 0) == PT_LOAD) {
        let (offset, size) = (number(segment, 8), number(segment, 32));
        if !bytes.has(offset, size) {
            return damaged(format!(
                "a segment of {size} bytes is not in the file, which has {}: it was cut off",
                bytes.len
            ));
        }
        end_of_data = end_of_data.max(Some((offset + size, size)));
    }
    let Some((end, size)) = end_of_data else { return damaged("it has no segment that is loaded") };
    // With a table of sections at its end, the file has its end. The data of a kernel with CONFIG_AMD_MEM_ENCRYPT end
    // with zeros.
    let begin = end - size.min(MOST_ZEROS);
    let is_in_doubt =
        !has_sections(&bytes, &header)? && size >= MOST_ZEROS && bytes.after_zeros(begin, end)? == end;
    Ok(is_in_doubt.then(|| {
        format!(
            "it has no sections, and the {MOST_ZEROS} bytes before byte {end} are zeros: its end may be lost"
        )
    }))
}

fn is_vmlinux(header: &[u8; ELF_HEADER]) -> bool {
    const EM_X86_64: u64 = 62;
    // 64 bits, little-endian.
    header.starts_with(b"\x7fELF\x02\x01") && short(header, 18) == EM_X86_64
}

/// Checks the table of sections, which linkers and strip(1) put at the end of the file, and that the contents of the
/// sections are in the file. Returns whether there is such a table: a kernel may have none.
fn has_sections(bytes: &Bytes, header: &[u8]) -> Result<bool, Flaw> {
    let (offset, count) = (number(header, 40), short(header, 60));
    if offset == 0 || count == 0 {
        return Ok(false);
    }
    let Some(sections) = table(bytes, offset, count, SECTION_HEADER)? else {
        return damaged("its table of sections is not in the file: it was cut off");
    };
    // The first one is always empty.
    for section in sections.chunks_exact(SECTION_HEADER).skip(1) {
        let (offset, size) = (number(section, 24), number(section, 32));
        match word(section, 4) {
            SHT_NULL => return damaged("its table of sections is damaged: its end may have been lost"),
            SHT_NOBITS => {}
            _ if !bytes.has(offset, size) => return damaged("a section is not in the file: it was cut off"),
            _ => {}
        }
    }
    Ok(true)
}

/// A table of entries of this size. None: it is not in the file.
fn table(bytes: &Bytes, at: u64, count: u64, size: usize) -> io::Result<Option<Vec<u8>>> {
    // The count has 16 bits, so this is 4 MiB at most.
    let mut table = vec![0; count as usize * size];
    Ok(bytes.fill(at, &mut table)?.then_some(table))
}

/// Numbers of 8, 4 and 2 bytes, little-endian.
fn number(bytes: &[u8], at: usize) -> u64 {
    bytes.iter().skip(at).take(8).rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

fn word(bytes: &[u8], at: usize) -> u32 {
    (number(bytes, at) & 0xffff_ffff) as u32
}

fn short(bytes: &[u8], at: usize) -> u64 {
    number(bytes, at) & 0xffff
}

/// The longest initramfs that is checked, and the most entries. A guest could not hold more.
const LONGEST: u64 = 1 << 30;
const MOST_ENTRIES: usize = 1 << 20;

/// A header of an entry (Documentation/driver-api/early-userspace/buffer-format.rst), and the longest name.
const CPIO_HEADER: usize = 110;
const LONGEST_NAME: u64 = 4096;

/// The first bytes of what Linux decompresses (lib/decompress.c).
const COMPRESSED: [(&[u8], &str); 8] = [
    (b"\x1f\x8b", "gzip"),
    (b"\x1f\x9e", "gzip"),
    (b"BZh", "bzip2"),
    (b"\x5d\x00\x00", "lzma"),
    (b"\xfd7zXZ\x00", "xz"),
    (b"\x89LZO", "lzo"),
    (b"\x02\x21\x4c\x18", "lz4"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
];

/// Checks the initramfs as Linux reads it (init/initramfs.c): archives of cpio's format newc, one after another, with
/// zeros before, between and after them. One must have the agent. Returns a doubt, if there is one: Linux takes
/// compressed archives too, if it was built for that, and ones without an end.
pub(crate) fn initramfs(path: &Path) -> Result<Option<String>, Flaw> {
    let bytes = Bytes::open(path)?;
    if bytes.len > LONGEST {
        return Ok(Some(format!("it cannot be checked, because it has more than {LONGEST} bytes")));
    }
    let (mut at, mut has_end, mut has_agent) = (0, false, false);
    for entries in 0..MOST_ENTRIES {
        at = bytes.after_zeros(at, bytes.len)?;
        if at == bytes.len {
            return match (has_end, has_agent) {
                (_, false) => damaged("it has no /init, which is the agent"),
                (false, true) => {
                    Ok(Some("its last archive has no end (TRAILER!!!): its end may be lost".into()))
                }
                (true, true) => Ok(None),
            };
        }
        // After an entry, Linux takes nothing that begins elsewhere than at a multiple of 4.
        let may_be_compressed = entries == 0 || at.is_multiple_of(4);
        if let Some(by) = compressed_by(&bytes, at)?.filter(|_| may_be_compressed) {
            return Ok(Some(format!(
                "from byte {at} on it cannot be checked, because it is compressed by {by}"
            )));
        }
        let Some(entry) = entry(&bytes, at)? else {
            return damaged(format!(
                "at byte {at}, where an entry of an archive (cpio newc) begins, is something else"
            ));
        };
        if !bytes.has(at, entry.length) {
            return damaged(format!("the entry at byte {at} is not in the file as a whole: it was cut off"));
        }
        has_end = entry.name == b"TRAILER!!!";
        has_agent |= [&b"init"[..], b"/init", b"./init"].contains(&entry.name.as_slice());
        // The padding of the last one may be missing.
        at = (at + entry.length).next_multiple_of(4).min(bytes.len);
    }
    Ok(Some(format!("it cannot be checked, because it has more than {MOST_ENTRIES} entries")))
}

fn compressed_by(bytes: &Bytes, at: u64) -> io::Result<Option<&'static str>> {
    for (magic, by) in COMPRESSED {
        let mut begin = vec![0; magic.len()];
        if bytes.fill(at, &mut begin)? && begin == magic {
            return Ok(Some(by));
        }
    }
    Ok(None)
}

/// An entry of an archive.
struct Entry {
    name: Vec<u8>,
    /// From the header to the end of the contents.
    length: u64,
}

/// The entry that begins at `at`. None: there is none.
fn entry(bytes: &Bytes, at: u64) -> io::Result<Option<Entry>> {
    let Some(header) = bytes.get::<CPIO_HEADER>(at)? else { return Ok(None) };
    // With and without checksums. Linux takes no other formats, and only those that begin at a multiple of 4.
    let is_header = at.is_multiple_of(4) && (header.starts_with(b"070701") || header.starts_with(b"070702"));
    let (size, name_size) = (hex(&header, 6), hex(&header, 11));
    let (true, Some(size), Some(name_size)) = (is_header, size, name_size) else { return Ok(None) };
    // Linux skips entries without a name, and those with one that is too long.
    let mut name = vec![0; if name_size > LONGEST_NAME { 0 } else { name_size as usize }];
    if !bytes.fill(at + CPIO_HEADER as u64, &mut name)? {
        return Ok(None);
    }
    // It ends with a zero.
    name.pop();
    let contents = (CPIO_HEADER as u64 + name_size).next_multiple_of(4);
    Ok(Some(Entry { name, length: contents + size }))
}

/// A field of a header: eight digits each, after the magic number.
fn hex(header: &[u8], field: usize) -> Option<u64> {
    let digits = header.get(6 + field * 8..)?.get(..8)?;
    let is_digits = digits.iter().all(u8::is_ascii_hexdigit);
    u64::from_str_radix(std::str::from_utf8(digits).ok().filter(|_| is_digits)?, 16).ok()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// A kernel with a header, two segments, and a table with three sections.
    fn elf() -> Vec<u8> {
        let (text, data) = (vec![0x90; 100_000], vec![7; 70_000]);
        let begin = ELF_HEADER + 2 * PROGRAM_HEADER;
        let mut file = vec![0; begin];
        file[..6].copy_from_slice(b"\x7fELF\x02\x01");
        let mut put = |at: usize, value: u64, size: usize| {
            file[at..at + size].copy_from_slice(&value.to_le_bytes()[..size]);
        };
        put(18, 62, 2);
        put(32, ELF_HEADER as u64, 8);
        put(40, (begin + text.len() + data.len()) as u64, 8);
        put(56, 2, 2);
        put(60, 3, 2);
        for (number, (offset, size)) in
            [(begin, text.len()), (begin + text.len(), data.len())].into_iter().enumerate()
        {
            let at = ELF_HEADER + number * PROGRAM_HEADER;
            put(at, PT_LOAD.into(), 4);
            put(at + 8, offset as u64, 8);
            put(at + 32, size as u64, 8);
        }
        let section = |kind: u32, size: u64| {
            let mut section = vec![0; SECTION_HEADER];
            section[4..8].copy_from_slice(&kind.to_le_bytes());
            section[24..32].copy_from_slice(&(begin as u64).to_le_bytes());
            section[32..40].copy_from_slice(&size.to_le_bytes());
            section
        };
        let sections = [section(SHT_NULL, 0), section(1, 100_000), section(SHT_NOBITS, u64::MAX)].concat();
        [file, text, data, sections].concat()
    }

    fn checked<T>(bytes: &[u8], check: fn(&Path) -> Result<T, Flaw>) -> Result<T, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        fs::write(&path, bytes).unwrap();
        check(&path).map_err(|flaw| match flaw {
            Flaw::Damaged(reason) => reason,
            Flaw::Unreadable(error) => panic!("{error}"),
        })
    }

    #[test]
    fn a_kernel_that_was_cut_off_or_whose_end_was_lost_is_damaged() {
        let whole = elf();
        let check = |bytes: &[u8]| checked(bytes, kernel);
        assert_eq!(check(&whole), Ok(None));
        for (length, reason) in [
            (whole.len() - 1, "its table of sections is not in the file: it was cut off"),
            (whole.len() - 50_000, "a segment of 70000 bytes is not in the file"),
            (1000, "a segment of 100000 bytes is not in the file"),
            (150, "its program headers are not in the file"),
            (40, "is not an uncompressed ELF vmlinux"),
            (0, "it is empty"),
        ] {
            let error = check(&whole[..length]).unwrap_err();
            assert!(error.starts_with(reason), "{length}: {error}");
            // As a file system leaves it that has recorded the length but not the contents.
            let mut zeros = whole.clone();
            zeros[length..].fill(0);
            let is_lost = check(&zeros).is_err();
            assert!(is_lost || length == whole.len() - 1, "{length}");
        }
        assert_eq!(check(b"#!/bin/sh\n").unwrap_err(), "is not an uncompressed ELF vmlinux");
        let mut no_load = whole.clone();
        (no_load[ELF_HEADER], no_load[ELF_HEADER + PROGRAM_HEADER]) = (4, 4);
        assert_eq!(check(&no_load).unwrap_err(), "it has no segment that is loaded");
        let mut of_arm = whole;
        of_arm[18] = 183;
        assert!(check(&of_arm).is_err());
    }

    #[test]
    fn a_kernel_without_sections_is_judged_by_the_end_of_its_data() {
        let mut stripped = elf();
        stripped[40..48].fill(0);
        stripped.truncate(stripped.len() - 3 * SECTION_HEADER);
        assert_eq!(checked(&stripped, kernel), Ok(None));
        // Data may end with some zeros.
        let end = stripped.len();
        stripped[end - 40_000..].fill(0);
        assert_eq!(checked(&stripped, kernel), Ok(None));
        stripped[end - 69_000..].fill(0);
        let doubt = checked(&stripped, kernel).unwrap().unwrap();
        assert!(doubt.starts_with("it has no sections, and the 65536 bytes before byte "), "{doubt}");
    }

    /// As those of distributions do, which are built with CONFIG_AMD_MEM_ENCRYPT.
    #[test]
    fn the_data_of_a_kernel_with_sections_may_end_with_zeros() {
        let mut elf = elf();
        let end = elf.len() - 3 * SECTION_HEADER;
        elf[end - 69_000..end].fill(0);
        assert_eq!(checked(&elf, kernel), Ok(None));
    }

    #[test]
    fn numbers_of_a_damaged_header_are_no_reason_to_panic() {
        for at in [8, 32] {
            let mut elf = elf();
            elf[ELF_HEADER + at..][..8].fill(0xff);
            assert!(checked(&elf, kernel).is_err());
        }
        let mut elf = elf();
        elf[32..64].fill(0xff);
        assert!(checked(&elf, kernel).is_err());
    }

    fn cpio(entries: &[(&str, &[u8])]) -> Vec<u8> {
        let mut archive = Vec::new();
        for (name, contents) in entries.iter().chain([&("TRAILER!!!", &b""[..])]) {
            let fields = [0, 0o100755, 0, 0, 1, 0, contents.len(), 0, 0, 0, 0, name.len() + 1, 0];
            let fields: String = fields.iter().map(|field| format!("{field:08x}")).collect();
            archive.extend_from_slice(format!("070701{fields}{name}\0").as_bytes());
            archive.resize(archive.len().next_multiple_of(4), 0);
            archive.extend_from_slice(contents);
            archive.resize(archive.len().next_multiple_of(4), 0);
        }
        archive
    }

    #[test]
    fn what_linux_takes_as_an_initramfs_is_not_refused() {
        let agent = cpio(&[("init", b"the agent"), ("empty", b"")]);
        let modules = cpio(&[("lib/a.ko", &[7; 1001])]);
        let zeros = |count: usize| vec![0; count];
        let check = |parts: &[&[u8]]| checked(&parts.concat(), initramfs);
        assert_eq!(check(&[&agent]), Ok(None));
        assert_eq!(check(&[&agent, &modules]), Ok(None));
        assert_eq!(check(&[&modules, &zeros(512), &agent, &zeros(200_001)]), Ok(None));
        assert_eq!(check(&[&zeros(4), &agent]), Ok(None));
        for (magic, by) in
            [(&b"\x1f\x8b\x08"[..], "gzip"), (b"\x28\xb5\x2f\xfd", "zstd"), (b"\xfd7zXZ\x00", "xz")]
        {
            let whole = check(&[magic, b"anything"]).unwrap().unwrap();
            assert_eq!(
                whole,
                format!("from byte 0 on it cannot be checked, because it is compressed by {by}")
            );
            let part = check(&[&modules, &zeros(4), magic]).unwrap().unwrap();
            assert!(part.starts_with(&format!("from byte {} on", modules.len() + 4)), "{part}");
            assert!(check(&[&zeros(1), magic]).unwrap().unwrap().starts_with("from byte 1 on"));
            // "broken padding", says Linux.
            assert!(check(&[&modules, &zeros(1), magic]).unwrap_err().contains("is something else"));
        }
        let entry = |name: &str| cpio(&[(name, b"x")]);
        assert_eq!(check(&[&entry(&"long".repeat(1025)), &agent]), Ok(None));
        let mut nameless = entry("");
        // Not even the zero at its end: then the contents begin after two bytes of padding.
        nameless[6 + 11 * 8..][..8].fill(b'0');
        assert_eq!(check(&[&nameless, &agent]), Ok(None));
        let end = agent.len() - cpio(&[]).len();
        let without_end = check(&[&agent[..end]]).unwrap().unwrap();
        assert_eq!(without_end, "its last archive has no end (TRAILER!!!): its end may be lost");
    }

    #[test]
    fn an_initramfs_that_was_cut_off_or_whose_end_was_lost_is_damaged() {
        let whole = cpio(&[("init", &[1; 3000]), ("lib/a.ko", &[7; 1001])]);
        for length in 0..whole.len() {
            // The padding of the last entry may be missing.
            let is_whole = whole[length..].iter().all(|byte| *byte == 0) && length + 4 > whole.len();
            assert!(is_whole || checked(&whole[..length], initramfs) != Ok(None), "{length}");
            let mut zeros = whole.clone();
            zeros[length..].fill(0);
            assert!(is_whole || zeros == whole || checked(&zeros, initramfs) != Ok(None), "{length}");
        }
        let check = |bytes: &[u8]| checked(bytes, initramfs).unwrap_err();
        assert_eq!(check(b""), "it is empty");
        assert_eq!(check(&[0; 5000]), "it has no /init, which is the agent");
        assert!(check(&whole[..2000]).starts_with("the entry at byte 0 is not in the file as a whole"));
        assert_eq!(check(&cpio(&[("lib/a.ko", b"x")])), "it has no /init, which is the agent");
        let junk = [&whole[..], b"junk"].concat();
        assert!(check(&junk).starts_with(&format!("at byte {}, where an entry", whole.len())));
        // Linux takes no archive that begins elsewhere than at a multiple of 4.
        assert!(check(&[&whole[..], &[0; 2], &whole[..]].concat()).contains("is something else"));
        let mut no_number = whole.clone();
        no_number[6 + 6 * 8] = b'+';
        assert!(check(&no_number).starts_with("at byte 0, where an entry"));
    }
}
