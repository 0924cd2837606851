//! Notes which pages of its template the first clone touched until its first container was made.
//!
//! Until then, nothing but the kernel and the agent has run in the guest, so no container decides what is noted.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::{FileExt, MetadataExt},
    path::Path,
};

use bulkhead_vmm_api::{LONGEST_WORKING_SET, MEMORY_FILE, Run, WORKING_SET_FILE, WorkingSet};

/// Bytes of a page.
const PAGE: u64 = 4096;
/// Bytes of an entry of /proc/PID/pagemap (kernel, Documentation/admin-guide/mm/pagemap.rst).
const ENTRY: u64 = 8;
/// The page is in memory.
const PRESENT: u64 = 1 << 63;
/// It is a page of a file. A private mapping has other pages where it was written to.
const OF_FILE: u64 = 1 << 61;

/// A part of a file that a process has mapped.
#[derive(Debug, PartialEq)]
struct Mapping {
    start: u64,
    end: u64,
    offset: u64,
}

/// Notes what the VMM with this pid, whose VM is a clone of the template in `dir`, has touched. Does nothing if that
/// was noted before.
pub(super) fn note(vmm: u32, dir: &Path) -> io::Result<()> {
    let path = dir.join(WORKING_SET_FILE);
    if path.exists() {
        return Ok(());
    }
    let memory = fs::metadata(dir.join(MEMORY_FILE))?;
    let maps = fs::read_to_string(format!("/proc/{vmm}/maps"))?;
    let pagemap = File::open(format!("/proc/{vmm}/pagemap"))?;
    let set = touched(&pagemap, &mappings(&maps, &memory))?;
    if set == WorkingSet::default() {
        return Err(io::Error::other("the VMM has touched no page of its template"));
    }
    let json = serde_json::to_vec(&set)?;
    if json.len() as u64 > LONGEST_WORKING_SET {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    // Clones that start meanwhile find a whole file or none. Another shim may do the same.
    let unfinished = dir.join(format!(".{WORKING_SET_FILE}-{}", std::process::id()));
    fs::write(&unfinished, json)?;
    fs::rename(unfinished, path)
}

/// The mappings of `file` in the text of /proc/PID/maps (proc_pid_maps(5)).
fn mappings(maps: &str, file: &fs::Metadata) -> Vec<Mapping> {
    let (device, inode) = (file.dev(), file.ino().to_string());
    let device = format!("{:02x}:{:02x}", rustix::fs::major(device), rustix::fs::minor(device));
    let mapping = |line: &str| {
        let mut words = line.split_ascii_whitespace();
        let (start, end) = words.next()?.split_once('-')?;
        let (_access, offset) = (words.next()?, words.next()?);
        let hex = |text| u64::from_str_radix(text, 16).ok();
        (words.next()? == device && words.next()? == inode).then_some(())?;
        Some(Mapping { start: hex(start)?, end: hex(end)?, offset: hex(offset)? })
    };
    maps.lines().filter_map(mapping).collect()
}

/// Which pages of these mappings a process has.
fn touched(pagemap: &File, mappings: &[Mapping]) -> io::Result<WorkingSet> {
    let mut set = WorkingSet::default();
    let mut order: Vec<_> = mappings.iter().collect();
    order.sort_by_key(|mapping| mapping.offset);
    for Mapping { start, end, offset } in order {
        let mut entries = vec![0; (end.saturating_sub(*start) / PAGE * ENTRY) as usize];
        pagemap.read_exact_at(&mut entries, start / PAGE * ENTRY)?;
        let (entries, _) = entries.as_chunks();
        for (page, entry) in (offset / PAGE..).zip(entries) {
            let runs = match u64::from_ne_bytes(*entry) & (PRESENT | OF_FILE) {
                PRESENT => &mut set.written,
                entry if entry & PRESENT != 0 => &mut set.read,
                _ => continue,
            };
            add(runs, page as u32);
        }
    }
    Ok(set)
}

fn add(runs: &mut Vec<Run>, page: u32) {
    match runs.last_mut() {
        Some((first, count)) if *first + *count == page => *count += 1,
        _ => runs.push((page, 1)),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn the_pages_of_a_mapping_are_those_of_its_file() {
        let mut pagemap = tempfile::tempfile().unwrap();
        let entries = [0, OF_FILE, PRESENT, PRESENT, PRESENT | OF_FILE | 5, PRESENT | OF_FILE, PRESENT | 7];
        pagemap.write_all(&entries.map(u64::to_ne_bytes).concat()).unwrap();
        let mapping = |start: u64, end: u64, offset: u64| Mapping {
            start: start * PAGE,
            end: end * PAGE,
            offset: offset * PAGE,
        };
        let set = touched(&pagemap, &[mapping(4, 7, 40), mapping(0, 4, 8)]).unwrap();
        assert_eq!(set, WorkingSet { read: vec![(40, 2)], written: vec![(10, 2), (42, 1)] });
        assert!(touched(&pagemap, &[mapping(5, 8, 0)]).is_err());
    }

    #[test]
    fn only_mappings_of_this_file_are_found() {
        let file = tempfile::tempfile().unwrap().metadata().unwrap();
        let (dev, inode) = (file.dev(), file.ino());
        let (major, minor) = (rustix::fs::major(dev), rustix::fs::minor(dev));
        let text = format!(
            "7f00-8f00 rw-p 00014000 {major:02x}:{minor:02x} {inode}   /run/t/memory (deleted)\n\
             8f00-9f00 rw-p 00000000 00:00 0 \n\
             9f00-af00 rw-p 00000000 {major:02x}:{minor:02x} 1{inode} /run/t/memory\n\
             af00-bf00 rw-p 00000000 {major:02x}:ff {inode} /run/t/memory\n\
             nothing\n"
        );
        assert_eq!(mappings(&text, &file), [Mapping { start: 0x7f00, end: 0x8f00, offset: 0x14000 }]);
    }

    #[test]
    fn nothing_is_noted_twice_or_of_a_process_without_the_template() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(MEMORY_FILE), "").unwrap();
        let own = std::process::id();
        let none = "the VMM has touched no page of its template";
        assert_eq!(note(own, dir.path()).unwrap_err().to_string(), none);
        fs::write(dir.path().join(WORKING_SET_FILE), "noted").unwrap();
        note(own, dir.path()).unwrap();
        assert_eq!(fs::read_to_string(dir.path().join(WORKING_SET_FILE)).unwrap(), "noted");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    }

    #[test]
    fn a_process_that_has_ended_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(MEMORY_FILE), "").unwrap();
        assert_eq!(note(u32::MAX, dir.path()).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
