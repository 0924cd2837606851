//! Opens, unmounts and removes paths of the host. No component of a path may be a symbolic link: the shim is root, and
//! somebody who can put a link there could lead it to any other place.

use std::{
    ffi::OsStr,
    io,
    os::fd::{AsRawFd, OwnedFd},
    path::{Path, PathBuf},
};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, mkdirat, openat2, unlinkat};

/// Opens what is at `path`, as a place only (O_PATH). ELOOP: a component is a symbolic link.
pub(crate) fn open(path: &Path) -> io::Result<OwnedFd> {
    Ok(openat2(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty(), ResolveFlags::NO_SYMLINKS)?)
}

/// Makes a directory with mode 0755, unless it is there already.
pub(crate) fn make_dir(path: &Path) -> io::Result<()> {
    let (parent, name) = open_parent(path)?;
    match mkdirat(&parent, name, Mode::from_raw_mode(0o755)) {
        Err(rustix::io::Errno::EXIST) => {
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
    use std::{fs, os::unix::fs::symlink};

    use super::*;

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
