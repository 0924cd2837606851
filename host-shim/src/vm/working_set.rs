//! Records which pages of its template the first clone has touched when its first container is made.
//!
//! No program of a container has run by then. But the container's spec decides in part what the kernel and the agent
//! touch, such as the number of its mounts.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::{FileExt, MetadataExt},
    path::Path,
};

use bulkhead_vmm_api::{LONGEST_WORKING_SET, MEMORY_FILE, Run, WORKING_SET_FILE, WorkingSet};

/// Bytes of a page.
const PAGE: u64 = 4096;
/// The most pages that later clones copy before they run, 16 MiB. In the rig a clone has written 800.
const MOST_WRITTEN: u32 = 4096;
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

/// Whether there is a record for the template in `dir`.
pub(super) fn is_recorded(dir: &Path) -> bool {
    dir.join(WORKING_SET_FILE).exists()
}

/// What the VMM with this pid, whose VM is a clone of the template in `dir`, has touched, as [`write`] takes it.
pub(super) fn read(vmm: u32, dir: &Path) -> io::Result<Vec<u8>> {
    let memory = fs::metadata(dir.join(MEMORY_FILE))?;
    let maps = fs::read_to_string(format!("/proc/{vmm}/maps"))?;
    let pagemap = File::open(format!("/proc/{vmm}/pagemap"))?;
    let mappings = mappings(&maps, &memory);
    if mappings.iter().map(|mapping| mapping.end.saturating_sub(mapping.start)).sum::<u64>() > memory.len() {
        return Err(io::Error::other("the VMM has mapped more than its template"));
    }
    let set = touched(&pagemap, &mappings)?;
    if set == WorkingSet::default() {
        return Err(io::Error::other("the VMM has touched no page of its template"));
    }
    let written: u32 = set.written.iter().map(|(_, count)| count).sum();
    if written > MOST_WRITTEN {
        return Err(io::Error::other(format!("the clone has written {written} pages of its template")));
    }
    let json = serde_json::to_vec(&set)?;
    if json.len() as u64 > LONGEST_WORKING_SET {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    Ok(json)
}

/// Records that for the template in `dir`.
pub(super) fn write(dir: &Path, json: &[u8]) -> io::Result<()> {
    // Clones that start meanwhile find a whole file or none. Another shim may do the same.
    let unfinished = dir.join(format!(".{WORKING_SET_FILE}-{}", std::process::id()));
    let finished =
        fs::write(&unfinished, json).and_then(|()| fs::rename(&unfinished, dir.join(WORKING_SET_FILE)));
    if finished.is_err() {
        let _ = fs::remove_file(unfinished);
    }
    finished
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
    fn only_a_process_with_the_template_has_a_record_and_it_is_seen() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(MEMORY_FILE), "").unwrap();
        let own = std::process::id();
        let none = "the VMM has touched no page of its template";
        assert_eq!(read(own, dir.path()).unwrap_err().to_string(), none);
        assert_eq!(read(u32::MAX, dir.path()).unwrap_err().kind(), io::ErrorKind::NotFound);
        assert!(!is_recorded(dir.path()));
        write(dir.path(), b"recorded").unwrap();
        assert!(is_recorded(dir.path()));
        assert_eq!(fs::read(dir.path().join(WORKING_SET_FILE)).unwrap(), b"recorded");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    }

    #[test]
    fn what_cannot_be_recorded_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join(WORKING_SET_FILE)).unwrap();
        assert!(write(dir.path(), b"recorded").is_err());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
