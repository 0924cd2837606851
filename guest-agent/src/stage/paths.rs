//! Paths in a container's root, resolved so that no link of a hostile image or volume leads out of it.

use std::{
    collections::VecDeque,
    ffi::OsString,
    io,
    os::fd::{AsFd, OwnedFd},
    path::{Component, Path, PathBuf},
};

use nix::{
    errno::Errno,
    fcntl::{OFlag, OpenHow, ResolveFlag, openat, openat2, readlinkat},
    sys::stat::{Mode, mkdirat},
};

/// As many links as the kernel follows in one path.
const MAX_LINKS: usize = 40;

/// How often a path is looked up. The kernel cannot tell whether a `..` leads out of the root if anything anywhere is
/// renamed or mounted at the same moment, and returns EAGAIN then (openat2(2)).
const MAX_ATTEMPTS: usize = 1000;

/// What is created where a path does not exist.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Missing {
    /// A directory.
    Directory,
    /// An empty file.
    File,
}

/// Opens `path` in `root` as a location (O_PATH), following links as if `root` were `/`.
pub(super) fn open(root: impl AsFd, path: &Path) -> nix::Result<OwnedFd> {
    let relative = path.strip_prefix("/").unwrap_or(path);
    let relative = if relative.as_os_str().is_empty() { Path::new(".") } else { relative };
    let how = OpenHow::new().flags(OFlag::O_PATH | OFlag::O_CLOEXEC).resolve(ResolveFlag::RESOLVE_IN_ROOT);
    let mut attempts = 1;
    loop {
        match openat2(&root, relative, how) {
            Err(Errno::EAGAIN) if attempts < MAX_ATTEMPTS => attempts += 1,
            opened => return opened,
        }
    }
}

/// As [`open`], and creates what is missing: directories on the way, mode 0755, and `missing` at the end.
pub(super) fn open_or_create(root: impl AsFd, path: &Path, missing: Missing) -> io::Result<OwnedFd> {
    match open(&root, path) {
        Err(Errno::ENOENT) => {}
        other => return Ok(other?),
    }
    let mut done = PathBuf::new();
    let mut todo: VecDeque<OsString> = names(path).collect();
    let mut links = 0;
    while let Some(name) = todo.pop_front() {
        if name == ".." {
            done.pop();
            continue;
        }
        let directory = open(&root, &done)?;
        match readlinkat(&directory, name.as_os_str()) {
            Ok(target) => {
                links += 1;
                if links > MAX_LINKS {
                    return Err(Errno::ELOOP.into());
                }
                let target = PathBuf::from(target);
                if target.is_absolute() {
                    done.clear();
                }
                for name in names(&target).collect::<Vec<_>>().into_iter().rev() {
                    todo.push_front(name);
                }
                continue;
            }
            // Exists, and is no link.
            Err(Errno::EINVAL) => {}
            Err(Errno::ENOENT) if todo.is_empty() && missing == Missing::File => {
                let flags = OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_WRONLY | OFlag::O_CLOEXEC;
                openat(&directory, name.as_os_str(), flags, Mode::from_bits_truncate(0o644))?;
            }
            Err(Errno::ENOENT) => mkdirat(&directory, name.as_os_str(), Mode::from_bits_truncate(0o755))?,
            Err(error) => return Err(error.into()),
        }
        done.push(name);
    }
    // Once more by the kernel: another container of the pod may have changed a shared volume meanwhile.
    Ok(open(&root, &done)?)
}

/// The names of a path, with `..`, without `/` and `.`.
fn names(path: &Path) -> impl Iterator<Item = OsString> + '_ {
    path.components().filter_map(|part| match part {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
    })
}

#[cfg(test)]
mod tests {
    use std::{
        fs::{self, File},
        os::unix::fs::{MetadataExt, symlink},
    };

    use super::*;

    struct Root {
        outer: tempfile::TempDir,
        root: OwnedFd,
    }

    /// A directory `outer` with the root `outer/root` in it.
    fn root() -> Root {
        let outer = tempfile::tempdir().unwrap();
        fs::create_dir(outer.path().join("root")).unwrap();
        let root = File::open(outer.path().join("root")).unwrap().into();
        Root { outer, root }
    }

    fn is_same(fd: &OwnedFd, path: &Path) -> bool {
        let meta = File::from(fd.try_clone().unwrap()).metadata().unwrap();
        let expected = fs::metadata(path).unwrap();
        (meta.dev(), meta.ino()) == (expected.dev(), expected.ino())
    }

    #[test]
    fn missing_directories_and_files_are_created() {
        let Root { outer, root } = root();
        let fd = open_or_create(&root, Path::new("/a/./b/c"), Missing::Directory).unwrap();
        assert!(is_same(&fd, &outer.path().join("root/a/b/c")));
        open_or_create(&root, Path::new("/a/f"), Missing::File).unwrap();
        assert!(fs::metadata(outer.path().join("root/a/f")).unwrap().is_file());
        let again = open_or_create(&root, Path::new("/a/b/c"), Missing::Directory).unwrap();
        assert!(is_same(&again, &outer.path().join("root/a/b/c")));
    }

    #[test]
    fn links_stay_in_the_root() {
        let Root { outer, root } = root();
        fs::create_dir(outer.path().join("secret")).unwrap();
        symlink("../../secret", outer.path().join("root/relative")).unwrap();
        symlink(outer.path().join("secret"), outer.path().join("root/absolute")).unwrap();
        for path in ["/relative/x", "/absolute/x", "/../../secret/x"] {
            open_or_create(&root, Path::new(path), Missing::File).unwrap();
        }
        assert_eq!(fs::read_dir(outer.path().join("secret")).unwrap().count(), 0);
        assert!(outer.path().join("root/secret/x").exists());
    }

    #[test]
    fn a_dangling_link_gets_its_target() {
        let Root { outer, root } = root();
        fs::create_dir(outer.path().join("root/var")).unwrap();
        symlink("/run/now", outer.path().join("root/var/run")).unwrap();
        let fd = open_or_create(&root, Path::new("/var/run/secrets"), Missing::Directory).unwrap();
        assert!(is_same(&fd, &outer.path().join("root/run/now/secrets")));
    }

    #[test]
    fn renames_elsewhere_do_not_disturb_it() {
        let Root { outer, root } = root();
        fs::create_dir(outer.path().join("root/a")).unwrap();
        let path = PathBuf::from("/a/../a");
        let renamed = outer.path().join("renamed");
        fs::write(&renamed, "").unwrap();
        let stop = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    fs::rename(&renamed, outer.path().join("again")).unwrap();
                    fs::rename(outer.path().join("again"), &renamed).unwrap();
                }
            });
            let opened: Vec<_> = (0..20_000).map(|_| open(&root, &path).map(drop)).collect();
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
            let failed = opened.iter().filter(|opened| opened.is_err()).count();
            assert_eq!(failed, 0, "{:?}", opened.iter().find(|opened| opened.is_err()));
        });
    }

    #[test]
    fn a_circle_of_links_ends() {
        let Root { outer, root } = root();
        symlink("b", outer.path().join("root/a")).unwrap();
        symlink("a", outer.path().join("root/b")).unwrap();
        let error = open_or_create(&root, Path::new("/a/x"), Missing::Directory).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ELOOP));
    }
}
