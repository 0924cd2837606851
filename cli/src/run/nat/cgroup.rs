//! The cgroup of pasta, with limits. A program makes as many connections as it likes, and pasta is not in the cgroup of
//! the pod: there it would take the memory that the VM was promised.

use std::{
    fs::{self, OpenOptions},
    io::{self, Write},
    path::{Path, PathBuf},
    thread::sleep,
    time::Duration,
};

use rustix::process::Pid;

/// Where cgroup v2 is mounted.
pub(super) const ROOT: &str = "/sys/fs/cgroup";

/// Not in the shim's /bulkhead: a shim removes that one with its last pod, which may be before pasta ends.
const PREFIX: &str = "bulkhead-nat-";

/// pasta has one thread, so it takes one processor at most. What it keeps for connections, and what the kernel keeps
/// for its sockets, is charged to it.
const LIMITS: [(&str, &str); 2] = [("memory.max", "268435456"), ("pids.max", "8")];
const CONTROLLERS: [&str; 2] = ["+memory", "+pids"];

/// How long the cgroup may stay busy after its processes have ended: the kernel empties it a moment later.
const TRIES: u32 = 100;
const PAUSE: Duration = Duration::from_millis(10);

fn path_of(root: &Path, id: &str) -> PathBuf {
    root.join(format!("{PREFIX}{id}"))
}

/// Moves these processes to the cgroup of a run, which it makes. An error says what is not limited.
pub(super) fn limit(root: &Path, id: &str, processes: &[Pid]) -> io::Result<()> {
    let named = |path: &Path, error: io::Error| {
        io::Error::new(error.kind(), format!("cannot write {}: {error}", path.display()))
    };
    let available = fs::read_to_string(root.join("cgroup.controllers"))
        .map_err(|_| io::Error::other(format!("cgroup v2 is not mounted at {}", root.display())))?;
    let path = path_of(root, id);
    fs::create_dir(&path).map_err(|error| named(&path, error))?;
    let control = root.join("cgroup.subtree_control");
    for (controller, (file, most)) in CONTROLLERS.into_iter().zip(LIMITS) {
        // Where its host has no such controller, the other limits hold.
        if !available.split_whitespace().any(|name| controller.ends_with(name)) {
            tracing::warn!(controller, "pasta is not limited: the host has no such cgroup controller");
            continue;
        }
        fs::write(&control, controller).map_err(|error| named(&control, error))?;
        fs::write(path.join(file), most).map_err(|error| named(&path.join(file), error))?;
    }
    let procs = path.join("cgroup.procs");
    let moved =
        |pid: &Pid| fs::write(&procs, pid.as_raw_nonzero().to_string()).map_err(|error| named(&procs, error));
    // One that has ended meanwhile keeps no other from its limits.
    processes.iter().map(moved).fold(Ok(()), io::Result::and)
}

/// Removes the cgroup of a run, whose pasta has ended, if there is one. It ends what else is in it.
pub(super) fn remove(root: &Path, id: &str) -> io::Result<()> {
    // Linux before 5.14 has no such file. Then the removal fails if there is a process.
    let _ = OpenOptions::new()
        .write(true)
        .open(path_of(root, id).join("cgroup.kill"))
        .and_then(|mut kill| kill.write_all(b"1"));
    let mut tries = TRIES;
    loop {
        match fs::remove_dir(path_of(root, id)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy && tries > 0 => {
                tries -= 1;
                sleep(PAUSE);
            }
            other => return other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_has_its_limits_before_its_processes() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let error = limit(root, "a", &[Pid::INIT]).unwrap_err().to_string();
        assert!(error.starts_with("cgroup v2 is not mounted at "), "{error}");
        assert_eq!(fs::read_dir(root).unwrap().count(), 0);
        // As of a kernel without the controller pids.
        fs::write(root.join("cgroup.controllers"), "cpu io memory\n").unwrap();
        limit(root, "a", &[Pid::INIT]).unwrap();
        let read = |name: &str| fs::read_to_string(root.join("bulkhead-nat-a").join(name)).ok();
        assert_eq!(read("memory.max").as_deref(), Some("268435456"));
        assert_eq!(read("pids.max"), None);
        assert_eq!(read("cgroup.procs").as_deref(), Some("1"));
        remove(root, "b").unwrap();
        let left = remove(root, "a").unwrap_err();
        assert_eq!(left.kind(), io::ErrorKind::DirectoryNotEmpty, "here it has files of its own");
    }
}
