//! Waits for changes of files and directories (inotify(7)). A watch only says when to look again: what has changed is
//! found by the look. If the host has no watch left, there is a look each second.

use std::{
    collections::HashSet,
    io,
    mem::MaybeUninit,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    thread::sleep,
    time::Duration,
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags},
    io::Errno,
};

/// The longest time between two looks.
const LONGEST: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// The shortest. A guest that writes without end causes no more looks than this allows.
const SHORTEST: Duration = Duration::from_millis(20);

/// What is watched.
#[derive(Debug)]
pub(crate) struct Watch {
    /// None: the host allows no more.
    inotify: Option<OwnedFd>,
    paths: HashSet<PathBuf>,
}

impl Watch {
    /// Watches nothing yet.
    pub(crate) fn new() -> Self {
        let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).ok();
        Self { inotify, paths: HashSet::new() }
    }

    /// Watches these files and directories, and no others. Returns whether one was not watched before.
    pub(crate) fn set(&mut self, paths: Vec<PathBuf>) -> bool {
        let Some(inotify) = &self.inotify else { return false };
        let what = WatchFlags::CREATE
            | WatchFlags::DELETE
            | WatchFlags::MODIFY
            | WatchFlags::MOVE
            // The last link of a file is gone, although the file is open.
            | WatchFlags::ATTRIB
            | WatchFlags::DONT_FOLLOW;
        let watched: HashSet<_> =
            paths.into_iter().filter(|path| inotify::add_watch(inotify, path, what).is_ok()).collect();
        let is_new = watched.iter().any(|path| !self.paths.contains(path));
        // The kernel forgets those that are removed.
        self.paths = watched;
        is_new
    }

    /// Waits for a change, at most a second. Returns whether the kernel has dropped changes.
    pub(crate) fn wait(&self) -> io::Result<bool> {
        sleep(SHORTEST);
        let Some(inotify) = &self.inotify else {
            let mut none: [PollFd<'_>; 0] = [];
            return quiet(poll(&mut none, Some(&LONGEST))).map(|()| false);
        };
        quiet(poll(&mut [PollFd::new(inotify, PollFlags::IN)], Some(&LONGEST)))?;
        let mut buffer = [MaybeUninit::uninit(); 16 << 10];
        let mut reader = Reader::new(inotify, &mut buffer);
        let mut has_dropped = false;
        loop {
            match reader.next() {
                Ok(event) => has_dropped |= event.events().contains(ReadFlags::QUEUE_OVERFLOW),
                Err(Errno::AGAIN) => return Ok(has_dropped),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// A signal that is ignored ends a wait too.
fn quiet(polled: Result<usize, Errno>) -> io::Result<()> {
    match polled {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// The directories in which something happens when pods come, go and write: `root`, and three levels below it. What
/// begins with a dot is no pod's.
pub(crate) fn of_pods(root: &Path, pods: &[PathBuf]) -> Vec<PathBuf> {
    let mut paths: HashSet<PathBuf> = HashSet::from([root.to_owned()]);
    for pod in pods {
        paths.extend(pod.ancestors().take_while(|path| *path != root).map(Path::to_owned));
    }
    // Those of a containerd or a namespace whose first pod is to come.
    let below = |path: &Path| {
        let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
        let is_directory = |entry: &std::fs::DirEntry| entry.file_type().is_ok_and(|kind| kind.is_dir());
        let is_hidden = |entry: &std::fs::DirEntry| entry.file_name().as_encoded_bytes().starts_with(b".");
        entries.filter(move |entry| is_directory(entry) && !is_hidden(entry)).map(|entry| entry.path())
    };
    for containerd in below(root) {
        paths.extend(below(&containerd));
        paths.insert(containerd);
    }
    paths.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use std::{fs, time::Instant};

    use super::*;

    #[test]
    fn a_change_ends_the_wait() {
        let dir = tempfile::tempdir().unwrap();
        let pod = dir.path().join("c/ns/pod");
        fs::create_dir_all(&pod).unwrap();
        fs::create_dir_all(dir.path().join("c/empty")).unwrap();
        fs::create_dir_all(dir.path().join(".templates/x")).unwrap();
        let mut watch = Watch::new();
        let paths = of_pods(dir.path(), std::slice::from_ref(&pod));
        assert_eq!(paths.len(), 5, "{paths:?}");
        assert!(watch.set(paths.clone()) && !watch.set(paths));
        assert!(!watch.wait().unwrap());
        fs::write(pod.join("events.json"), "x").unwrap();
        let begun = Instant::now();
        assert!(!watch.wait().unwrap());
        assert!(begun.elapsed() < Duration::from_millis(900), "{:?}", begun.elapsed());
    }
}
