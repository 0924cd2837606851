//! Reads a volume that kubelet keeps up to date. A container may have the rights to write there (`hostPath`), so no
//! link is followed, and nothing is taken for more than its bounds. `..data` is the one link whose target counts.

use std::{
    ffi::{OsStr, OsString},
    fs::File,
    hash::{DefaultHasher, Hash, Hasher},
    io::Read,
    os::{fd::OwnedFd, unix::ffi::OsStringExt},
    path::{Component, Path, PathBuf},
};

use bulkhead_agent_api::VOLUME_DATA;
use rustix::{
    fs::{Dir, FileType, Mode, OFlags, ResolveFlags, Stat, flistxattr, fstat, open, openat2, readlinkat},
    io::Errno,
};

use super::{MOST_VOLUME_BYTES, VolumeError};
use crate::host::no_symlinks;

/// How deep directories may be nested. Each level takes a descriptor and room on the stack.
const DEEPEST: usize = 16;
/// What a file takes of a guest's memory in addition to its content.
const INODE: u64 = 1 << 10;
const PAGE: u64 = 4 << 10;
/// How often a volume is read that changes meanwhile.
const ATTEMPTS: usize = 5;
/// Bytes of a list of extended attributes at most (xattr(7)).
const LONGEST_LIST: usize = 64 << 10;

/// What is in a volume.
#[derive(Debug)]
pub(crate) struct Contents {
    /// Each directory comes before what is in it. The first is the volume itself.
    pub(crate) entries: Vec<Entry>,
    /// The memory that a copy takes, bytes.
    pub(crate) size: u64,
}

/// Something in a volume.
#[derive(Debug, Hash)]
pub(crate) struct Entry {
    /// Relative to the volume.
    pub(crate) path: String,
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// Nanoseconds since 1970. 0 for the volume itself and for links.
    pub(crate) modified_unix_ns: i64,
    pub(crate) kind: Kind,
}

/// What something in a volume is.
#[derive(Debug, Hash, PartialEq, Eq)]
pub(crate) enum Kind {
    Directory,
    File(Vec<u8>),
    Link(String),
}

impl Contents {
    /// By which contents are told apart.
    pub(crate) fn digest(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.entries.hash(&mut hasher);
        hasher.finish()
    }
}

/// Reads the volume in this directory. Blocks.
pub(super) fn read(volume: &OwnedFd) -> Result<Contents, VolumeError> {
    for _ in 0..ATTEMPTS {
        let target = target_of_data(volume)?;
        let read = Reading::default().read(volume, &target);
        // kubelet removes what nobody is led to any more.
        if target_of_data(volume)? == target {
            return read;
        }
    }
    Err(VolumeError::Unsteady)
}

/// The name of the directory to which `..data` leads.
fn target_of_data(volume: &OwnedFd) -> Result<OsString, VolumeError> {
    let target = match readlinkat(volume, VOLUME_DATA, Vec::new()) {
        Ok(target) => OsString::from_vec(target.into_bytes()),
        Err(Errno::NOENT | Errno::INVAL) => return Err(VolumeError::Layout),
        Err(errno) => return Err(failed(Path::new(VOLUME_DATA))(errno)),
    };
    let mut parts = Path::new(&target).components();
    match (parts.next(), parts.next()) {
        (Some(Component::Normal(name)), None) if name == target => Ok(target),
        _ => Err(VolumeError::Layout),
    }
}

#[derive(Default)]
struct Reading {
    entries: Vec<Entry>,
    size: u64,
}

impl Reading {
    fn read(mut self, volume: &OwnedFd, target: &OsStr) -> Result<Contents, VolumeError> {
        let top = open_beneath(volume, Path::new("."), OFlags::DIRECTORY).map_err(failed(Path::new("")))?;
        let stat = fstat(&top).map_err(failed(Path::new("")))?;
        self.check_attributes(&top, Path::new(""))?;
        self.add(Path::new(""), &stat, Kind::Directory)?;
        for name in names_in(&top, Path::new(""))? {
            let path = Path::new(&name);
            if name == VOLUME_DATA || !name.as_encoded_bytes().starts_with(b"..") {
                self.add_link(volume, path)?;
            }
        }
        self.add_tree(volume, Path::new(target), DEEPEST)?;
        Ok(Contents { entries: self.entries, size: self.size })
    }

    /// Counts what a copy takes, and records it.
    fn add(&mut self, path: &Path, stat: &Stat, kind: Kind) -> Result<(), VolumeError> {
        let path = utf8(path)?.to_owned();
        self.size += INODE + path.len() as u64;
        self.size += match &kind {
            Kind::Directory => 0,
            Kind::File(content) => (content.len() as u64).next_multiple_of(PAGE),
            Kind::Link(target) => target.len() as u64,
        };
        if self.size > MOST_VOLUME_BYTES {
            return Err(VolumeError::TooLarge);
        }
        let has_time = !path.is_empty() && !matches!(kind, Kind::Link(_));
        let nanoseconds =
            stat.st_mtime.saturating_mul(1_000_000_000).saturating_add(stat.st_mtime_nsec as i64);
        self.entries.push(Entry {
            path,
            mode: stat.st_mode & 0o7777,
            uid: stat.st_uid,
            gid: stat.st_gid,
            modified_unix_ns: if has_time { nanoseconds } else { 0 },
            kind,
        });
        Ok(())
    }

    /// A link in the volume, which leads a container to a file of the contents.
    fn add_link(&mut self, volume: &OwnedFd, name: &Path) -> Result<(), VolumeError> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW;
        let link = match open_beneath(volume, name, flags) {
            // kubelet has removed it: an event has come.
            Err(Errno::NOENT) => return Ok(()),
            opened => opened.map_err(failed(name))?,
        };
        let stat = fstat(&link).map_err(failed(name))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::Symlink {
            return Err(VolumeError::Foreign { name: name.into() });
        }
        let target = readlinkat(&link, "", Vec::new()).map_err(failed(name))?;
        let target = target.into_string().map_err(|_| VolumeError::Foreign { name: name.into() })?;
        self.add(name, &stat, Kind::Link(target))
    }

    /// A directory or a file of the contents, with all that is in it.
    fn add_tree(&mut self, volume: &OwnedFd, path: &Path, depth: usize) -> Result<(), VolumeError> {
        // It is opened as a place first: opening a device or a pipe has effects.
        let place = open_beneath(volume, path, OFlags::PATH | OFlags::NOFOLLOW).map_err(failed(path))?;
        let stat = fstat(&place).map_err(failed(path))?;
        let opened = match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory | FileType::RegularFile => {
                let flags = OFlags::RDONLY | OFlags::CLOEXEC;
                open(no_symlinks::proc_path(&place), flags, Mode::empty()).map_err(failed(path))?
            }
            _ => return Err(VolumeError::Foreign { name: path.into() }),
        };
        self.check_attributes(&opened, path)?;
        if FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile {
            let mut content = Vec::new();
            let read = File::from(opened).take(MOST_VOLUME_BYTES + 1).read_to_end(&mut content);
            read.map_err(|source| VolumeError::Read { name: path.into(), source })?;
            return self.add(path, &stat, Kind::File(content));
        }
        let depth = depth.checked_sub(1).ok_or_else(|| VolumeError::Foreign { name: path.into() })?;
        self.add(path, &stat, Kind::Directory)?;
        for name in names_in(&opened, path)? {
            self.add_tree(volume, &path.join(name), depth)?;
        }
        Ok(())
    }

    /// Refuses what a copy would lose. Labels of the host's security modules mean nothing in the guest.
    fn check_attributes(&self, opened: &OwnedFd, path: &Path) -> Result<(), VolumeError> {
        let mut names = vec![0; LONGEST_LIST];
        let length = match flistxattr(opened, &mut names[..]) {
            Err(Errno::OPNOTSUPP) => 0,
            length => length.map_err(failed(path))?,
        };
        let mut names = names[..length].split(|byte| *byte == 0).filter(|name| !name.is_empty());
        match names.find(|name| !name.starts_with(b"security.")) {
            Some(name) => {
                let attribute = String::from_utf8_lossy(name).into_owned();
                Err(VolumeError::Attribute { name: path.into(), attribute })
            }
            None => Ok(()),
        }
    }
}

fn utf8(path: &Path) -> Result<&str, VolumeError> {
    path.to_str().ok_or_else(|| VolumeError::Foreign { name: path.into() })
}

/// The names in the directory at `path`, in a fixed order.
fn names_in(directory: &OwnedFd, path: &Path) -> Result<Vec<OsString>, VolumeError> {
    let mut names = Vec::new();
    for entry in Dir::read_from(directory).map_err(failed(path))? {
        let name = entry.map_err(failed(path))?.file_name().to_bytes().to_vec();
        if !matches!(&name[..], b"." | b"..") {
            names.push(OsString::from_vec(name));
        }
        if names.len() as u64 > MOST_VOLUME_BYTES / INODE {
            return Err(VolumeError::TooLarge);
        }
    }
    names.sort();
    Ok(names)
}

fn open_beneath(volume: &OwnedFd, path: &Path, flags: OFlags) -> Result<OwnedFd, Errno> {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    openat2(volume, path, flags | OFlags::CLOEXEC, Mode::empty(), resolve)
}

fn failed(name: &Path) -> impl Fn(Errno) -> VolumeError {
    let name = PathBuf::from(name);
    move |errno| VolumeError::Read { name: name.clone(), source: errno.into() }
}
