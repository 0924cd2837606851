//! Files in a tree of somebody else: the root of a program, or an image.

use std::{
    fs::File,
    io,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    path::Path,
};

use rustix::{
    fs::{FileType, Mode, OFlags, ResolveFlags, fstat, open, openat2},
    io::Errno,
};

/// How often a path is looked up. The kernel cannot tell whether a `..` leads out of the tree if anything anywhere is
/// renamed or mounted at the same moment, and returns EAGAIN then (openat2(2)).
const MAX_ATTEMPTS: usize = 1000;

/// Opens what is at `path` in a tree as a place only (O_PATH). `resolve` says where symbolic links may lead.
pub(crate) fn place_below(
    tree: impl AsFd,
    path: impl AsRef<Path>,
    flags: OFlags,
    resolve: ResolveFlags,
) -> Result<OwnedFd, Errno> {
    let (path, flags) = (path.as_ref(), flags | OFlags::PATH | OFlags::CLOEXEC);
    attempt(|| openat2(&tree, path, flags, Mode::empty(), resolve))
}

fn attempt<T>(mut open: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    let mut attempts = 1;
    loop {
        match open() {
            Err(Errno::AGAIN) if attempts < MAX_ATTEMPTS => attempts += 1,
            opened => return opened,
        }
    }
}

/// Opens a file of a tree to read it. `resolve` says where symbolic links may lead. InvalidInput: it is no regular
/// file. Such a one is not opened: to open a device node of the tree has effects on the host.
pub(crate) fn open_below(tree: impl AsFd, path: &str, resolve: ResolveFlags) -> io::Result<File> {
    let place = place_below(tree, path, OFlags::empty(), resolve)?;
    if FileType::from_raw_mode(fstat(&place)?.st_mode) != FileType::RegularFile {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file"));
    }
    let place = format!("/proc/self/fd/{}", place.as_raw_fd());
    Ok(open(place, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?.into())
}

#[cfg(test)]
mod tests {
    use std::{fs, io::Read, os::unix::net::UnixListener};

    use rustix::fs::{CWD, mknodat};

    use super::*;

    #[test]
    fn only_regular_files_are_opened() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::write(at("file"), "content").unwrap();
        std::os::unix::fs::symlink("file", at("link")).unwrap();
        fs::create_dir(at("directory")).unwrap();
        mknodat(CWD, at("pipe"), FileType::Fifo, Mode::RUSR, 0).unwrap();
        let _listener = UnixListener::bind(at("socket")).unwrap();
        let tree = File::open(dir.path()).unwrap();
        let opened = |name: &str| open_below(&tree, name, ResolveFlags::IN_ROOT);
        for name in ["file", "link"] {
            let mut text = String::new();
            opened(name).unwrap().read_to_string(&mut text).unwrap();
            assert_eq!(text, "content");
        }
        for name in ["directory", "pipe", "socket"] {
            assert_eq!(opened(name).unwrap_err().kind(), io::ErrorKind::InvalidInput, "{name}");
        }
        assert_eq!(opened("missing").unwrap_err().kind(), io::ErrorKind::NotFound);
        // A device, if this process may make one. Nothing answers for these numbers, so opening it would fail.
        if mknodat(CWD, at("device"), FileType::CharacterDevice, Mode::RUSR, rustix::fs::makedev(0, 0))
            .is_ok()
        {
            assert_eq!(opened("device").unwrap_err().kind(), io::ErrorKind::InvalidInput);
        }
    }

    #[test]
    fn a_lookup_is_repeated_but_not_for_ever() {
        let mut attempts = 0;
        let third = attempt(|| {
            attempts += 1;
            if attempts < 3 { Err(Errno::AGAIN) } else { Ok(attempts) }
        });
        assert_eq!(third, Ok(3));
        let never = |errno| {
            let mut attempts = 0;
            let failed = attempt(|| -> Result<(), Errno> {
                attempts += 1;
                Err(errno)
            });
            (failed, attempts)
        };
        assert_eq!(never(Errno::AGAIN), (Err(Errno::AGAIN), MAX_ATTEMPTS));
        assert_eq!(never(Errno::NOENT), (Err(Errno::NOENT), 1));
    }
}
