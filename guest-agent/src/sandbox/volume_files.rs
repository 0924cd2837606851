//! The files of a volume that kubelet keeps up to date on the host. virtio-fs has no inotify events for what the host
//! changes, so the containers mount a copy. It changes in the order in which kubelet's AtomicWriter changes the
//! original: whoever reads sees the old files or the new ones, and whoever watches sees the same events.
//!
//! Containers mount it read-only, but one that has the rights can undo that. So no link that a container may have made
//! leads out of the volume.

use std::{
    collections::BTreeSet,
    ffi::OsStr,
    fs::{self, File, Metadata, Permissions},
    io::{self, ErrorKind, Read, Write},
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::fs::{MetadataExt, PermissionsExt, fchown, lchown, symlink},
    },
    path::{Component, Path, PathBuf},
};

use bulkhead_agent_api::VOLUME_DATA;
use nix::{
    errno::Errno,
    fcntl::{OFlag, OpenHow, ResolveFlag, openat, openat2, renameat},
    sys::{
        stat::{Mode, futimens, mkdirat},
        time::TimeSpec,
    },
};

/// Names in the topmost directory before they have their place, as kubelet has the first one too. No name of a user
/// begins with two dots there.
const NEW_DATA: &str = "..data_tmp";
const NEW: &str = "..new";

/// Something in a volume.
#[derive(Debug, Clone)]
pub struct Entry {
    /// Relative to the topmost directory. Empty: that directory itself.
    pub path: PathBuf,
    /// Permissions.
    pub mode: u32,
    /// Its owner.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
    /// Nanoseconds since 1970.
    pub modified_unix_ns: i64,
    /// What it is.
    pub kind: Kind,
}

/// What something in a volume is.
#[derive(Debug, Clone)]
pub enum Kind {
    /// A directory.
    Directory,
    /// A file with this content.
    File(Vec<u8>),
    /// A symbolic link with this target.
    Link(PathBuf),
}

/// A volume as it is to be, in which everything has its place.
struct Wanted<'e> {
    top: &'e Entry,
    /// The link to the directory of the contents, and what is in that directory. A volume may have none yet.
    data: &'e Entry,
    target: &'e OsStr,
    contents: Vec<&'e Entry>,
    links: Vec<&'e Entry>,
}

/// Brings the files of the volume at `volume` to these.
pub(super) fn write(volume: &Path, entries: &[Entry]) -> io::Result<()> {
    let wanted = Wanted::of(entries)?;
    let top = open_directory(volume)?;
    // What failed attempts have left would take the room of the new version. Nobody reads it.
    let present = fs::read_link(in_directory(&top, VOLUME_DATA.as_ref())).unwrap_or_default();
    let is_ours = |name: &OsStr| name.as_encoded_bytes().starts_with(b"..");
    remove_others(&top, |name| name == VOLUME_DATA || name == present || !is_ours(name))?;
    for entry in &wanted.contents {
        write_entry(&top, entry)?;
    }
    let is_directory = |entry: &&&Entry| matches!(entry.kind, Kind::Directory);
    for directory in wanted.contents.iter().rev().filter(is_directory) {
        let opened = open_beneath(&top, &directory.path, OFlag::O_RDONLY | OFlag::O_DIRECTORY)?;
        let names = wanted.contents.iter().filter(|entry| entry.path.parent() == Some(&directory.path));
        let names: BTreeSet<_> = names.filter_map(|entry| entry.path.file_name()).collect();
        remove_others(&opened, |name| names.contains(name))?;
        // Its time changes with what is in it.
        set_attributes(&opened, directory)?;
    }
    make_link(&top, wanted.data, NEW_DATA)?;
    for link in &wanted.links {
        make_link(&top, link, NEW)?;
    }
    let links: BTreeSet<_> = wanted.links.iter().map(|link| link.path.as_os_str()).collect();
    remove_others(&top, |name| links.contains(name) || is_ours(name))?;
    remove_others(&top, |name| links.contains(name) || name == VOLUME_DATA || name == wanted.target)?;
    set_owner_and_mode(&File::from(top), wanted.top)
}

impl<'e> Wanted<'e> {
    fn of(entries: &'e [Entry]) -> io::Result<Self> {
        let invalid = |entry: &Entry, reason: &str| {
            io::Error::new(ErrorKind::InvalidInput, format!("{:?} {reason}", entry.path.display()))
        };
        let [top, entries @ ..] = entries else { return Err(ErrorKind::InvalidInput.into()) };
        if top.path != Path::new("") || !matches!(top.kind, Kind::Directory) {
            return Err(invalid(top, "is not the topmost directory"));
        }
        let data = entries.iter().find(|entry| entry.path == Path::new(VOLUME_DATA));
        let data = data.ok_or_else(|| invalid(top, "has no ..data"))?;
        let target = match &data.kind {
            Kind::Link(target) => only_name(target),
            Kind::Directory | Kind::File(_) => None,
        };
        let target = target.ok_or_else(|| invalid(data, "does not lead to a directory of the volume"))?;
        let mut wanted = Self { top, data, target, contents: Vec::new(), links: Vec::new() };
        for entry in entries.iter().filter(|entry| entry.path != data.path) {
            let is_plain = entry.path.components().all(|part| matches!(part, Component::Normal(_)));
            let is_contents = entry.path.starts_with(target);
            match &entry.kind {
                _ if !is_plain => return Err(invalid(entry, "is not a plain path")),
                Kind::Link(_) if !is_contents && only_name(&entry.path).is_some() => wanted.links.push(entry),
                Kind::Directory | Kind::File(_) if is_contents => wanted.contents.push(entry),
                _ => return Err(invalid(entry, "has no place in a volume of kubelet")),
            }
        }
        if wanted.contents.first().is_none_or(|entry| entry.path != Path::new(target)) {
            return Err(invalid(data, "leads to nothing"));
        }
        Ok(wanted)
    }
}

/// The name that a path consists of, if it is one.
fn only_name(path: &Path) -> Option<&OsStr> {
    match (path.file_name(), path.components().count()) {
        (Some(name), 1) if path.as_os_str() == name => Some(name),
        _ => None,
    }
}

/// Makes a directory, or a file with its content, unless it is there. The attributes of directories are left.
fn write_entry(top: &OwnedFd, entry: &Entry) -> io::Result<()> {
    let (Some(parent), Some(name)) = (entry.path.parent(), entry.path.file_name()) else {
        return Err(ErrorKind::InvalidInput.into());
    };
    let parent = open_beneath(top, parent, OFlag::O_PATH | OFlag::O_DIRECTORY)?;
    let Kind::File(content) = &entry.kind else {
        return match mkdirat(&parent, name, Mode::S_IRWXU) {
            Err(Errno::EEXIST) => Ok(()),
            made => Ok(made?),
        };
    };
    match open_beneath(&parent, Path::new(name), OFlag::O_RDONLY | OFlag::O_NONBLOCK) {
        Err(error) if error.kind() == ErrorKind::NotFound => write_file(&parent, name, entry, content),
        Err(error) => Err(error),
        Ok(file) => {
            if has_content(&File::from(file.try_clone()?), content)? {
                return set_attributes(&file, entry);
            }
            remove(&in_directory(top, NEW.as_ref()))?;
            write_file(top, NEW.as_ref(), entry, content)?;
            Ok(renameat(top, NEW, &parent, name)?)
        }
    }
}

/// Makes a file with this content.
fn write_file(directory: &OwnedFd, name: &OsStr, entry: &Entry, content: &[u8]) -> io::Result<()> {
    let flags = OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_WRONLY | OFlag::O_CLOEXEC;
    let mut file = File::from(openat(directory, name, flags, Mode::S_IRUSR)?);
    file.write_all(content)?;
    set_attributes(&file.into(), entry)
}

fn has_content(mut file: &File, content: &[u8]) -> io::Result<bool> {
    let metadata = file.metadata()?;
    if !metadata.is_file() || metadata.len() != content.len() as u64 {
        return Ok(false);
    }
    let mut present = Vec::with_capacity(content.len());
    file.read_to_end(&mut present)?;
    Ok(present == content)
}

/// Owner and mode, and the time of the last change.
fn set_attributes(opened: &OwnedFd, entry: &Entry) -> io::Result<()> {
    let file = File::from(opened.try_clone()?);
    set_owner_and_mode(&file, entry)?;
    let (seconds, nanoseconds) =
        (entry.modified_unix_ns.div_euclid(1_000_000_000), entry.modified_unix_ns.rem_euclid(1_000_000_000));
    let metadata = file.metadata()?;
    if (metadata.mtime(), metadata.mtime_nsec()) != (seconds, nanoseconds) {
        futimens(&file, &TimeSpec::UTIME_OMIT, &TimeSpec::new(seconds, nanoseconds))?;
    }
    Ok(())
}

/// What is right stays as it is, so that nobody sees an event for it.
fn set_owner_and_mode(file: &File, entry: &Entry) -> io::Result<()> {
    let is_right = |metadata: &Metadata| (metadata.uid(), metadata.gid()) == (entry.uid, entry.gid);
    if !is_right(&file.metadata()?) {
        fchown(file, Some(entry.uid), Some(entry.gid))?;
    }
    // A change of the owner takes bits away.
    if file.metadata()?.mode() & 0o7777 != entry.mode & 0o7777 {
        file.set_permissions(Permissions::from_mode(entry.mode & 0o7777))?;
    }
    Ok(())
}

/// Makes a link in the topmost directory. One that others read already is replaced by another one, whose name is `new`
/// first.
fn make_link(top: &OwnedFd, entry: &Entry, new: &str) -> io::Result<()> {
    let Kind::Link(target) = &entry.kind else { return Err(ErrorKind::InvalidInput.into()) };
    let (place, new) = (in_directory(top, entry.path.as_os_str()), in_directory(top, new.as_ref()));
    match fs::read_link(&place) {
        Ok(present) if present == *target => return set_owner_of_link(&place, entry),
        Err(error) if error.kind() == ErrorKind::NotFound && entry.path != Path::new(VOLUME_DATA) => {
            symlink(target, &place)?;
            return set_owner_of_link(&place, entry);
        }
        _ => {}
    }
    remove(&new)?;
    symlink(target, &new)?;
    set_owner_of_link(&new, entry)?;
    fs::rename(&new, &place)
}

fn set_owner_of_link(place: &Path, entry: &Entry) -> io::Result<()> {
    let metadata = fs::symlink_metadata(place)?;
    if (metadata.uid(), metadata.gid()) == (entry.uid, entry.gid) {
        return Ok(());
    }
    lchown(place, Some(entry.uid), Some(entry.gid))
}

/// Removes what has other names in a directory.
fn remove_others(directory: &OwnedFd, is_wanted: impl Fn(&OsStr) -> bool) -> io::Result<()> {
    for entry in fs::read_dir(in_directory(directory, OsStr::new("")))? {
        let name = entry?.file_name();
        if !is_wanted(&name) {
            remove(&in_directory(directory, &name))?;
        }
    }
    Ok(())
}

/// Removes what there is. Follows no link.
fn remove(path: &Path) -> io::Result<()> {
    let removed = match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(error) => Err(error),
    };
    match removed {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// A path to a name in an open directory, wherever that is by now.
fn in_directory(directory: &OwnedFd, name: &OsStr) -> PathBuf {
    Path::new("/proc/self/fd").join(directory.as_raw_fd().to_string()).join(name)
}

const BENEATH: ResolveFlag =
    ResolveFlag::RESOLVE_BENEATH.union(ResolveFlag::RESOLVE_NO_SYMLINKS).union(ResolveFlag::RESOLVE_NO_XDEV);

fn open_beneath(directory: impl AsFd, path: &Path, flags: OFlag) -> io::Result<OwnedFd> {
    let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    let how = OpenHow::new().flags(flags | OFlag::O_CLOEXEC).resolve(BENEATH);
    Ok(openat2(directory, path, how)?)
}

fn open_directory(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    Ok(nix::fcntl::open(path, flags, Mode::empty())?)
}

#[cfg(test)]
mod tests {
    use nix::{
        mount::{MntFlags, MsFlags, mount, umount2},
        sched::{CloneFlags, unshare},
    };

    use super::*;

    fn entry(path: &str, mode: u32, kind: Kind) -> Entry {
        Entry { path: path.into(), mode, uid: 0, gid: 2000, modified_unix_ns: 1_500_000_000, kind }
    }

    fn link(path: &str, target: &str) -> Entry {
        entry(path, 0o777, Kind::Link(target.into()))
    }

    fn file(path: &str, content: &str) -> Entry {
        entry(path, 0o440, Kind::File(content.into()))
    }

    /// A volume with the file `a/key` in this version, and this other file.
    fn version(version: &str, content: &str, other: &str) -> Vec<Entry> {
        let at = |name: &str| format!("{version}/{name}");
        vec![
            entry("", 0o2777, Kind::Directory),
            link("..data", version),
            link("a", "..data/a"),
            link(other, &format!("..data/{other}")),
            entry(version, 0o2755, Kind::Directory),
            entry(&at("a"), 0o2755, Kind::Directory),
            file(&at("a/key"), content),
            file(&at(other), ""),
        ]
    }

    fn names(volume: &Path) -> Vec<String> {
        let names = fs::read_dir(volume).unwrap();
        let mut names: Vec<_> = names.map(|name| name.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_version_replaces_the_one_before() {
        let dir = tempfile::tempdir().unwrap();
        let (volume, at) = (dir.path(), |name: &str| dir.path().join(name));
        write(volume, &version("..1", "first", "old")).unwrap();
        assert_eq!(names(volume), ["..1", "..data", "a", "old"]);
        let opened = File::open(at("a/key")).unwrap();
        write(volume, &version("..2", "second", "new")).unwrap();
        assert_eq!(names(volume), ["..2", "..data", "a", "new"]);
        assert_eq!(io::read_to_string(opened).unwrap(), "first");
        assert_eq!(fs::read_to_string(at("a/key")).unwrap(), "second");
        for (path, mode) in [("", 0o2777), ("..data/", 0o2755), ("a", 0o2755), ("a/key", 0o440)] {
            let metadata = fs::metadata(at(path)).unwrap();
            let came = (metadata.mode() & 0o7777, metadata.uid(), metadata.gid());
            assert_eq!(came, (mode, 0, 2000), "{path}");
            assert!(
                path.is_empty() || (metadata.mtime(), metadata.mtime_nsec()) == (1, 500_000_000),
                "{path}"
            );
        }
        assert_eq!(fs::symlink_metadata(at("a")).unwrap().gid(), 2000);
    }

    #[test]
    fn what_is_right_stays_and_the_rest_is_corrected_in_its_place() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        write(dir.path(), &version("..1", "first", "old")).unwrap();
        let inode = |name: &str| fs::symlink_metadata(at(name)).unwrap().ino();
        let before = ["..data", "a", "..1/a/key"].map(inode);
        write(dir.path(), &version("..1", "first", "old")).unwrap();
        assert_eq!(["..data", "a", "..1/a/key"].map(inode), before);
        // As after an attempt that has failed half-way.
        fs::write(at("..1/a/key"), "half").unwrap();
        fs::write(at("..new"), "half").unwrap();
        fs::create_dir_all(at("..1/b/c")).unwrap();
        write(dir.path(), &version("..1", "changed", "old")).unwrap();
        assert_eq!(fs::read_to_string(at("a/key")).unwrap(), "changed");
        assert_eq!((names(dir.path()).len(), names(&at("..1")).len()), (4, 2));
    }

    #[test]
    fn what_failed_attempts_have_left_takes_no_room() {
        unshare(CloneFlags::CLONE_NEWNS).expect("this test mounts: run it as root");
        let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
        mount(None::<&str>, "/", None::<&str>, private, None::<&str>).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        mount(Some("t"), dir.path(), Some("tmpfs"), MsFlags::empty(), Some("size=64k")).unwrap();
        let large = |content: &str| content.repeat(24 << 10);
        write(dir.path(), &version("..1", &large("1"), "old")).unwrap();
        // Of another version, of the same one, and a file that had not its place yet.
        for left in ["..2/a/key", "..3/a/key", "..new"] {
            fs::create_dir_all(at(left).parent().unwrap()).unwrap();
            fs::write(at(left), large("x"))
                .unwrap_or_else(|error| assert_eq!(error.kind(), ErrorKind::StorageFull));
        }
        let opened = File::open(at("a/key")).unwrap();
        write(dir.path(), &version("..3", &large("3"), "old")).unwrap();
        assert_eq!(fs::read_to_string(at("a/key")).unwrap(), large("3"));
        // There is no room for a third version, and what containers have stays.
        let error = write(dir.path(), &version("..4", &large("4"), "old")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::StorageFull);
        assert_eq!(fs::read_to_string(at("a/key")).unwrap(), large("3"));
        drop(opened);
        write(dir.path(), &version("..4", &large("4"), "old")).unwrap();
        assert_eq!(fs::read_to_string(at("a/key")).unwrap(), large("4"));
        umount2(dir.path(), MntFlags::MNT_DETACH).unwrap();
    }

    #[test]
    fn what_has_no_place_in_a_volume_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let refused = |change: &dyn Fn(&mut Vec<Entry>)| {
            let mut entries = version("..1", "first", "old");
            change(&mut entries);
            let error = write(dir.path(), &entries).unwrap_err();
            assert_eq!((error.kind(), names(dir.path()).len()), (ErrorKind::InvalidInput, 0), "{error}");
        };
        refused(&|entries| entries.clear());
        refused(&|entries| drop(entries.remove(0)));
        refused(&|entries| drop(entries.remove(1)));
        refused(&|entries| drop(entries.remove(4)));
        for target in ["/etc", "..", ".", "", "..1/", "..1/a"] {
            refused(&|entries| entries[1] = link("..data", target));
        }
        for path in ["..1/../../etc", "/etc", "..1/./x/..", "..2/key", "key"] {
            refused(&|entries| entries.push(file(path, "")));
        }
        refused(&|entries| entries.push(link("..1/link", "/etc")));
        refused(&|entries| entries.push(link("../link", "/etc")));
    }

    /// Of a container that has the rights to make its mount writable.
    #[test]
    fn a_link_of_a_container_leads_nowhere() {
        let dir = tempfile::tempdir().unwrap();
        let (volume, victim) = (dir.path().join("volume"), dir.path().join("victim"));
        fs::create_dir(&volume).unwrap();
        fs::create_dir_all(victim.join("a")).unwrap();
        fs::write(victim.join("a/key"), "kept").unwrap();
        let is_kept =
            || fs::read_to_string(victim.join("a/key")).unwrap() == "kept" && names(&victim) == ["a"];
        symlink(&victim, volume.join("..1")).unwrap();
        write(&volume, &version("..1", "first", "old")).unwrap();
        assert!(is_kept() && !fs::symlink_metadata(volume.join("..1")).unwrap().is_symlink());
        fs::remove_dir_all(volume.join("..1")).unwrap();
        symlink(&victim, volume.join("..1")).unwrap();
        write(&volume, &version("..1", "first", "old")).unwrap_err();
        assert!(is_kept());
        write(&volume, &version("..2", "second", "old")).unwrap();
        assert_eq!(names(&volume), ["..2", "..data", "a", "old"]);
        fs::remove_dir_all(volume.join("..2/a")).unwrap();
        symlink(victim.join("a"), volume.join("..2/a")).unwrap();
        write(&volume, &version("..2", "second", "old")).unwrap_err();
        symlink(&victim, volume.join("..new")).unwrap();
        symlink(&victim, volume.join("..data_tmp")).unwrap();
        write(&volume, &version("..3", "third", "old")).unwrap();
        assert_eq!(names(&volume), ["..3", "..data", "a", "old"]);
        assert!(is_kept());
    }
}
