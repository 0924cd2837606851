//! What each operation on files does, in the manner of pjdfstest: a program makes hundreds of them in a directory, and
//! prints what each returns and leaves. On runc this is what the host's file system does.

use std::collections::BTreeMap;
use std::fmt::Write;

use anyhow::{Context, Result, ensure};

use super::super::programs::{HostCopy, on_disk};
use super::Case;
use crate::ctr::{Host, Runtime, Task};
use crate::image_root::ImageRoot;

pub(super) const IN_A_SNAPSHOT: Case =
    Case::both("operations_on_files_of_a_snapshot_do_what_they_do_on_the_host", in_a_snapshot);
pub(super) const IN_A_DIRECTORY: Case =
    Case::both("operations_on_files_of_a_root_directory_do_what_they_do_on_the_host", in_a_directory)
        .by_whole_name_only();
pub(super) const IN_A_VOLUME: Case =
    Case::both("operations_on_files_of_a_volume_do_what_they_do_on_the_host", in_a_volume);

/// The program. Its argument is the directory.
const PROGRAM: &str = concat!(
    include_str!("operations/base.py"),
    include_str!("operations/names.py"),
    include_str!("operations/contents.py"),
    include_str!("operations/attributes.py"),
);

/// What it prints in a volume on ext4, where the other file systems of the container are in memory.
const ON_EXT4: &str = include_str!("operations/ext4.txt");
/// The lines that differ on an overlay whose upper layer is a tmpfs.
const ON_OVERLAY: &str = include_str!("operations/overlay.txt");

/// The lines that differ on Bulkhead in each place. docs/conformance.md has the reasons.
const ANYWHERE: &[&str] = &[
    // The file server has no CAP_SYS_ADMIN on the host.
    "attribute: security, set = EPERM",
    "attribute: security, get = ENODATA",
    "attribute: security, as a user = ENODATA, EPERM",
    "attribute: security, list = []",
    "attribute: security, remove = EPERM",
    "attribute: security, remove nothing = EPERM",
    "attribute: security, of d = EPERM; ENODATA",
    "attribute: security, of l = EPERM; ENODATA",
    "attribute: security, of p = EPERM; ENODATA",
    "attribute: trusted, of l = EPERM; ENODATA",
    "attribute: trusted, of p = EPERM; ENODATA",
    "attribute: trusted name of 255 = ERANGE",
    // And no CAP_LINUX_IMMUTABLE.
    "ioctl: FS_IOC_SETFLAGS, immutable = EPERM; opened; ok; 0x0",
    // FUSE in Linux.
    "ioctl: epoll = ok",
    "time: inode flags = ok, big -",
    // FUSE_HANDLE_KILLPRIV_V2 does not say who writes.
    "mode: set-group-id without execution, write as a user = 1; 2666",
    "mode: chgrp, group may not execute = ok; f file 2644 1000:1000 1 5",
    "mode: set-id and capability, write as root = 1; 777; no capability",
    "mode: capability, store in a page as root = ok; no capability",
    "mode: capability, store in a page as a user = ok; no capability",
];
/// Those in a volume on ext4.
const IN_VOLUME: &[&str] = &[
    // Others than the guest can open the file.
    "lock: lease to read = EINVAL; 2",
    "lock: lease, broken = opened",
    "write: RWF_NOWAIT, cached = ENOTSUP",
    "write: O_DIRECT, offset not aligned = 4096",
    "write: O_DIRECT, length not aligned = 100",
    "size: collapse = ENOTSUP; file 644 0:0 1 16384",
    "size: insert = ENOTSUP; file 644 0:0 1 16384",
    "ioctl: FS_IOC_FIEMAP = ENOTSUP",
    // Access times: what the guest has cached, and a symbolic link that the server has read.
    "time: copy a range = 10, big -, to mc",
    "time: exchange = ok, l c, g ac, . mc",
    "time: exchange back = ok, l ac, g c, . mc",
    "time: follow a link = ENOENT, l -",
];
/// Those in a root of a container. FUSE has file handles and RWF_NOAPPEND, and overlayfs has not.
const IN_ROOT: &[&str] = &[
    "write: RWF_NOAPPEND = 3; b'one two end.'; 12",
    "write: RWF_NOAPPEND, read again = b'one two end.'",
    "identity: name_to_handle_at = ok",
    "identity: open_by_handle_at = b'text\\n'",
    "ioctl: FIGETBSZ = 0; 4096",
    // The server reads a symbolic link, and the guest caches its target.
    "time: exchange = ok, l c, g ac, . mc",
    "time: exchange back = ok, l ac, g c, . mc",
    "time: follow a link = ENOENT, l -",
];
/// Those in a root that somebody else has mounted. The host's directory does not say on which file system of the
/// overlay a file is. The shim mounts a snapshot so that it does.
const IN_DIRECTORY: &[&str] = &[
    "list: inodes of files are those of stat = False",
    "lock: lease to read = EINVAL; 2",
    "lock: lease, broken = opened",
];
/// Those in a snapshot. All its files have one device number. The other lines are access times that do not change,
/// because the guest answers from its caches.
const IN_SNAPSHOT: &[&str] = &[
    "identity: one device = 1",
    "map: times of a stored page = ok, g mc",
    "time: read = b'text\\n', f -",
    "time: run = , run -",
    "time: sendfile = 10, big -, to mc",
    "time: map and read = 48, big -",
    "time: read again = b'text\\n', f -",
];

/// Of the lines above, those that differ only when the server has read the symbolic link before. They are as on runc
/// while the guest has its target cached, for a second at most, and for the last one when the server reads it later.
const UNLESS_CACHED: [&str; 3] = ["time: exchange", "time: exchange back", "time: follow a link"];

/// The results of the operations, by their names.
#[derive(Default)]
struct Results<'t>(BTreeMap<&'t str, &'t str>);

impl<'t> Results<'t> {
    fn parse(lines: impl IntoIterator<Item = &'t str>) -> Result<Self> {
        let split = |line: &'t str| line.split_once(" = ").with_context(|| format!("no result in {line:?}"));
        Ok(Self(lines.into_iter().map(split).collect::<Result<_>>()?))
    }

    /// Replaces some results, each by another one.
    fn replace(&mut self, lines: impl IntoIterator<Item = &'t str>) -> Result<()> {
        for (name, result) in Self::parse(lines)?.0 {
            let before = self.0.insert(name, result);
            ensure!(before.is_some_and(|before| before != result), "{name} = {result} is no difference");
        }
        Ok(())
    }

    /// The lines in which the other results differ.
    fn differences(&self, other: &Self) -> String {
        let mut differences = String::new();
        let names = self.0.keys().chain(other.0.keys().filter(|name| !self.0.contains_key(*name)));
        for name in names {
            let [expected, came] = [self, other].map(|results| results.0.get(name).copied().unwrap_or("-"));
            if expected != came {
                let _ = write!(differences, "\n{name}\n    expected  {expected}\n    came      {came}");
            }
        }
        differences
    }
}

/// Runs the program in a directory of a container, and compares what it prints.
fn expect(
    host: &Host,
    task: &Task<'_>,
    directory: &str,
    own: &[&str],
    of_bulkhead: &[&[&str]],
) -> Result<()> {
    let mut expected = Results::parse(ON_EXT4.lines())?;
    expected.replace(own.iter().copied())?;
    let when_cached = UNLESS_CACHED.map(|name| (name, expected.0.get(name).copied()));
    if host.runtime() == Runtime::Bulkhead {
        for lines in of_bulkhead {
            expected.replace(lines.iter().copied())?;
        }
    }
    let finished = task.exec_with_input(&["python3", "-", directory], PROGRAM.into())?;
    let text = finished.succeeds()?.text();
    let came = Results::parse(text.lines())?;
    for (name, as_on_runc) in when_cached {
        if let Some(result) = came.0.get(name).copied().filter(|came| Some(*came) == as_on_runc) {
            expected.0.insert(name, result);
        }
    }
    let differences = expected.differences(&came);
    ensure!(differences.is_empty(), "in {directory}, which took {:?}:{differences}", finished.took);
    Ok(())
}

fn in_a_snapshot(host: &Host) -> Result<()> {
    let image = ImageRoot::make()?;
    let container = host.container().flags(["--privileged"]);
    let task = image.detach(host, container, &["sleep", "1000"])?;
    let overlay: Vec<_> = ON_OVERLAY.lines().collect();
    expect(host, &task, "/srv/operations", &overlay, &[ANYWHERE, IN_ROOT, IN_SNAPSHOT])
}

fn in_a_directory(host: &Host) -> Result<()> {
    let copy = HostCopy::mount()?;
    let task = copy.as_root_of(host.container()).flags(["--privileged"]).detach(&["sleep", "1000"])?;
    let overlay: Vec<_> = ON_OVERLAY.lines().collect();
    expect(host, &task, "/srv/operations", &overlay, &[ANYWHERE, IN_ROOT, IN_DIRECTORY])
}

fn in_a_volume(host: &Host) -> Result<()> {
    let (copy, volume) = (HostCopy::mount()?, on_disk()?);
    let container = copy.as_root_of(host.container()).flags(["--privileged"]);
    let task = container.bind(volume.path(), "/volume", "rbind:rw").detach(&["sleep", "1000"])?;
    expect(host, &task, "/volume", &[], &[ANYWHERE, IN_VOLUME])
}
