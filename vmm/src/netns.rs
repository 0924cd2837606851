//! The network namespace of the VMM: that of its pod, or a new one.

use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
};

use nix::sched::{CloneFlags, setns, unshare};

/// Why the VMM could not change its network namespace.
#[derive(Debug, thiserror::Error)]
pub enum NetnsError {
    #[error("netns: cannot join {path}")]
    Join { path: PathBuf, source: io::Error },
    #[error("cannot make a network namespace")]
    Create(#[source] io::Error),
}

/// Moves this thread into the network namespace at `path`, or into a new one. Threads that are started later inherit
/// it.
pub fn enter(path: Option<&Path>) -> Result<(), NetnsError> {
    let Some(path) = path else {
        return unshare(CloneFlags::CLONE_NEWNET).map_err(|error| NetnsError::Create(error.into()));
    };
    File::open(path)
        .and_then(|netns| Ok(setns(netns, CloneFlags::CLONE_NEWNET)?))
        .map_err(|source| NetnsError::Join { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use std::{fs, thread};

    use super::*;

    /// The network namespace of this thread.
    fn own() -> PathBuf {
        fs::read_link("/proc/thread-self/ns/net").unwrap()
    }

    /// Runs `work` in a new thread, because a thread stays in the namespace that it enters.
    fn elsewhere<T: Send>(work: impl FnOnce() -> T + Send) -> T {
        thread::scope(|scope| scope.spawn(work).join().unwrap())
    }

    #[test]
    fn a_new_one_is_nobody_elses() {
        let before = own();
        let (first, second) = elsewhere(|| {
            enter(None).unwrap();
            let first = own();
            enter(None).unwrap();
            (first, own())
        });
        assert!(first != before && second != before && first != second);
    }

    #[test]
    fn a_given_one_is_joined() {
        let given = format!("/proc/{}/ns/net", std::process::id());
        let joined = elsewhere(|| {
            enter(None).unwrap();
            enter(Some(Path::new(&given))).unwrap();
            own()
        });
        assert_eq!(joined, fs::read_link(given).unwrap());
    }

    #[test]
    fn what_is_none_is_named() {
        for path in ["/no/such/netns", "/etc/passwd"] {
            let error = elsewhere(|| enter(Some(Path::new(path)))).unwrap_err();
            assert_eq!(error.to_string(), format!("netns: cannot join {path}"));
        }
    }
}
