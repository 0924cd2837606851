//! Opens, unmounts and removes paths of the host. No component of a path may be a symbolic link: the shim is root, and
//! somebody who can put a link there could lead it to any other place.

use std::{
    ffi::OsStr,
    io,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::{Path, PathBuf},
};

use rustix::{
    fs::{AtFlags, CWD, Dir, Mode, OFlags, ResolveFlags, mkdirat, openat2, unlinkat},
    io::Errno,
};

/// How deep directories may be nested that are removed together. Each level takes a descriptor and room on the stack.
const DEEPEST: usize = 64;

/// Opens what is at `path`, as a place only (O_PATH). ELOOP: a component is a symbolic link.
pub(crate) fn open(path: &Path) -> io::Result<OwnedFd> {
    Ok(openat2(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty(), ResolveFlags::NO_SYMLINKS)?)
}

/// Makes a directory with mode 0755, unless it is there already.
pub(crate) fn make_dir(path: &Path) -> io::Result<()> {
    let (parent, name) = open_parent(path)?;
    match mkdirat(&parent, name, Mode::from_raw_mode(0o755)) {
        Err(Errno::EXIST) => {
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
            openat2(&parent, name, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS)?;
            Ok(())
        }
        other => Ok(other?),
    }
}

/// Removes an empty directory, or fails with ENOENT if there is none.
pub(crate) fn remove_dir(path: &Path) -> io::Result<()> {
    let (parent, name) = open_parent(path)?;
    Ok(unlinkat(&parent, name, AtFlags::REMOVEDIR)?)
}

/// Removes what is no directory, or fails with ENOENT if there is nothing.
pub(crate) fn remove_file(path: &Path) -> io::Result<()> {
    let (parent, name) = open_parent(path)?;
    Ok(unlinkat(&parent, name, AtFlags::empty())?)
}

/// Removes what is at `path`, a directory with all that is in it. Does not go into another mount: what is mounted there
/// belongs to somebody else. ResourceBusy: something is mounted on it or below.
pub(crate) fn remove_tree(path: &Path) -> io::Result<()> {
    let (parent, name) = open_parent(path)?;
    remove_below(&parent, name, DEEPEST)
}

fn remove_below(parent: &OwnedFd, name: &OsStr, depth: usize) -> io::Result<()> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    let dir = match openat2(parent, name, flags, Mode::empty(), resolve) {
        Err(Errno::NOENT) => return Ok(()),
        // No directory, or a symbolic link.
        Err(Errno::NOTDIR | Errno::LOOP) => return gone(unlinkat(parent, name, AtFlags::empty())),
        Err(Errno::XDEV) => {
            let message = format!("something is mounted on {}", name.display());
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, message));
        }
        other => other?,
    };
    let Some(depth) = depth.checked_sub(1) else {
        let message = format!("it is nested deeper than {DEEPEST} directories");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
    };
    for entry in Dir::read_from(&dir)? {
        let entry = entry?;
        if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
            remove_below(&dir, OsStr::from_bytes(entry.file_name().to_bytes()), depth)?;
        }
    }
    gone(unlinkat(parent, name, AtFlags::REMOVEDIR))
}

/// Takes an object that does not exist for one that was removed.
pub(crate) fn gone<E: Into<io::Error>>(result: Result<(), E>) -> io::Result<()> {
    match result.map_err(Into::into) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// A name for what is open, for system calls that take no descriptor.
pub(crate) fn proc_path(fd: &OwnedFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", fd.as_raw_fd()))
}

fn open_parent(path: &Path) -> io::Result<(OwnedFd, &OsStr)> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    Ok((open(parent)?, name))
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink, thread};

    use nix::mount::{MntFlags, MsFlags, mount, umount2};

    use super::*;
    use crate::testing::private_mounts;

    #[test]
    fn a_tree_is_removed_without_what_is_mounted_in_it_or_linked_from_it() {
        private_mounts();
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir_all(at("tree/a/b")).unwrap();
        fs::create_dir(at("victim")).unwrap();
        fs::write(at("victim/file"), "kept").unwrap();
        symlink("../victim", at("tree/link")).unwrap();
        // Both are on the file system of the tree: only the mount differs.
        for (source, target) in [("victim", "tree/a/b"), ("victim/file", "tree/a/file")] {
            if !at(target).exists() {
                fs::write(at(target), "").unwrap();
            }
            let none = None::<&str>;
            mount(Some(&at(source)), &at(target), none, MsFlags::MS_BIND, none).unwrap();
            let error = remove_tree(&at("tree")).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::ResourceBusy, "{error}");
            assert_eq!(fs::read_to_string(at("victim/file")).unwrap(), "kept");
            umount2(&at(target), MntFlags::MNT_DETACH).unwrap();
        }
        remove_tree(&at("tree")).unwrap();
        remove_tree(&at("tree")).unwrap();
        assert!(!at("tree").exists());
        assert_eq!(fs::read_to_string(at("victim/file")).unwrap(), "kept");
    }

    #[test]
    fn a_tree_that_is_nested_too_deep_for_the_stack_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let tree = dir.path().join("tree");
        fs::create_dir_all(tree.join("d/".repeat(DEEPEST))).unwrap();
        // The stack of `blocking::run`.
        let small = thread::Builder::new().stack_size(256 << 10);
        let removal = small.spawn({
            let tree = tree.clone();
            move || remove_tree(&tree)
        });
        let error = removal.unwrap().join().unwrap().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
        fs::remove_dir(tree.join("d/".repeat(DEEPEST))).unwrap();
        remove_tree(&tree).unwrap();
        assert!(!tree.exists());
    }

    #[test]
    fn no_symbolic_link_is_followed() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir_all(at("victim/sub")).unwrap();
        fs::write(at("victim/file"), "kept").unwrap();
        symlink("victim", at("link")).unwrap();
        symlink("nowhere", at("dangling")).unwrap();
        for result in [
            open(&at("link")).map(drop),
            open(&at("link/sub")).map(drop),
            make_dir(&at("link")),
            make_dir(&at("dangling")),
            make_dir(&at("link/new")),
            remove_dir(&at("link/sub")),
            remove_file(&at("link/file")),
        ] {
            assert!(result.is_err());
        }
        assert_eq!(fs::read_to_string(at("victim/file")).unwrap(), "kept");
        assert!(at("victim/sub").is_dir() && !at("victim/new").exists());
        // A link itself is no more than a file.
        remove_file(&at("link")).unwrap();
        assert!(at("victim").is_dir());
    }
}
