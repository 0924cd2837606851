//! The kernel's table of mounts, proc_pid_mountinfo(5).

use std::{
    ffi::OsString,
    fs, io,
    os::unix::ffi::{OsStrExt, OsStringExt},
    path::PathBuf,
};

/// The table of the calling thread, which may have a mount namespace of its own.
pub(super) const TABLE: &str = "/proc/thread-self/mountinfo";

/// A mount: the fields of its line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Mount<'t> {
    pub(super) id: u64,
    /// The mount in which its place is.
    pub(super) parent: u64,
    /// The numbers of its device.
    pub(super) device: (u32, u32),
    /// The directory of the file system that is mounted.
    pub(super) root: PathBuf,
    pub(super) place: PathBuf,
    /// Those of the mount.
    pub(super) options: &'t [u8],
    pub(super) file_system: &'t [u8],
    /// Those of the file system.
    pub(super) super_options: &'t [u8],
}

/// Reads the table.
pub(super) fn read() -> io::Result<Vec<u8>> {
    fs::read(TABLE)
}

/// The mounts of a table. Of several at one place the last one covers the others.
pub(super) fn mounts(table: &[u8]) -> impl Iterator<Item = Mount<'_>> {
    table.split(|byte| *byte == b'\n').filter_map(Mount::parse)
}

impl<'t> Mount<'t> {
    fn parse(line: &'t [u8]) -> Option<Self> {
        let mut fields = line.split(|byte| *byte == b' ');
        let mut number = || std::str::from_utf8(fields.next()?).ok();
        let id = number()?.parse().ok()?;
        let parent = number()?.parse().ok()?;
        let (major, minor) = number()?.split_once(':')?;
        let device = (major.parse().ok()?, minor.parse().ok()?);
        let (root, place) = (unescape(fields.next()?), unescape(fields.next()?));
        let options = fields.next()?;
        // Any number of other fields come before this one.
        let mut fields = fields.skip_while(|field| *field != b"-").skip(1);
        let (file_system, _source, super_options) = (fields.next()?, fields.next()?, fields.next()?);
        Some(Self { id, parent, device, root, place, options, file_system, super_options })
    }

    /// Whether the directory that is mounted was removed since.
    pub(super) fn is_removed(&self) -> bool {
        self.root.as_os_str().as_bytes().ends_with(b"//deleted")
    }

    /// Whether the mount has this option.
    pub(super) fn has(&self, option: &[u8]) -> bool {
        self.options.split(|byte| *byte == b',').any(|one| one == option)
    }
}

/// A path of the table, in which blanks, line ends and backslashes are three octal digits after a backslash.
fn unescape(field: &[u8]) -> PathBuf {
    let mut path = Vec::new();
    let mut rest = field;
    while let [byte, after @ ..] = rest {
        let octal =
            after.get(..3).filter(|_| *byte == b'\\').and_then(|digits| std::str::from_utf8(digits).ok());
        match octal.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(escaped) => {
                path.push(escaped);
                rest = after.get(3..).unwrap_or_default();
            }
            None => {
                path.push(*byte);
                rest = after;
            }
        }
    }
    PathBuf::from(OsString::from_vec(path))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn a_line_is_a_mount() {
        let line =
            b"36 35 98:0 /a\\040b /mnt/c rw,noatime master:1 shared:2 - ext3 /dev/root rw,errors=continue";
        let mount = Mount::parse(line).unwrap();
        assert_eq!((mount.id, mount.parent, mount.device), (36, 35, (98, 0)));
        assert_eq!((mount.root.as_path(), mount.place.as_path()), (Path::new("/a b"), Path::new("/mnt/c")));
        assert_eq!((mount.file_system, mount.super_options), (&b"ext3"[..], &b"rw,errors=continue"[..]));
        assert!(mount.has(b"noatime") && !mount.has(b"atime") && !mount.is_removed());
        assert!(Mount::parse(b"36 35 0:1 /x//deleted /y rw - tmpfs t rw").unwrap().is_removed());
        for damaged in
            [&b""[..], b"36 35 98:0 / /mnt rw", b"x 35 98:0 / / rw - t t rw", b"36 35 98 / / rw - t t rw"]
        {
            assert_eq!(Mount::parse(damaged), None);
        }
        assert!(mounts(&read().unwrap()).any(|mount| mount.place == Path::new("/proc")));
    }

    #[test]
    fn a_path_is_that_of_the_mount() {
        assert_eq!(unescape(b"/a\\040b\\134c\\012"), Path::new("/a b\\c\n"));
        assert_eq!(unescape(b"/plain\\04"), Path::new("/plain\\04"));
    }
}
