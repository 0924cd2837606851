//! What the host looks like: everything that a container may leave behind.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::containerd::{PREFIX, ROOTS};
use crate::ctr::Host;

/// How long the host may take to become as it was: containerd removes some things in the background.
const SETTLES: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(200);
/// Two equal looks this far apart: nothing of an earlier case is still being removed.
const QUIET: Duration = Duration::from_millis(500);

/// Directories below /run that belong to the host's own services, which come and go as they please.
const SERVICES: &[&str] = &["systemd", "udev", "log", "user", "credentials", "dbus", "initctl", "lock"];

/// Where Bulkhead keeps the VMs that it makes others of.
pub(crate) const TEMPLATES: &str = "/run/bulkhead/.templates";

/// Where Bulkhead counts failures, in /run.
const FAILURES: &str = "bulkhead-failures.json";

/// Where containerd has the persistent directories of tasks, of sandboxes, and of the CRI plugin's pods and containers.
const BUNDLES: [&str; 3] = [
    "io.containerd.runtime.v2.task",
    "io.containerd.sandbox.controller.v1.shim",
    "io.containerd.grpc.v1.cri",
];

/// The things seen, by kind.
#[derive(PartialEq, Eq)]
pub(crate) struct Snapshot {
    things: BTreeMap<&'static str, BTreeSet<String>>,
}

impl Snapshot {
    /// Looks until two looks in a row agree, so that the end of an earlier case is not taken for the start.
    pub(crate) fn settled(host: &Host) -> Result<Self> {
        let deadline = Instant::now() + host.patience(SETTLES);
        let mut last = Self::take()?;
        loop {
            thread::sleep(QUIET);
            let now = Self::take()?;
            // Both ways: the kernel's table of sockets, read while one closes, can lack another (proc(5) is no atomic
            // look).
            let differences = last.differences(&now) + &now.differences(&last);
            if differences.is_empty() {
                return Ok(now);
            }
            if Instant::now() >= deadline {
                bail!("the host does not come to rest before the case begins:\n{differences}");
            }
            last = now;
        }
    }

    /// Expects that the host comes to look like this again.
    pub(crate) fn expect_same(&self, host: &Host) -> Result<()> {
        let limit = host.patience(SETTLES);
        let deadline = Instant::now() + limit;
        loop {
            let differences = self.differences(&Self::take()?);
            if differences.is_empty() {
                return Ok(());
            }
            if Instant::now() >= deadline {
                bail!(
                    "expected  the host as it was before, within {} s\ncame      differences (+ left behind, - lost):\n{differences}",
                    limit.as_secs()
                );
            }
            thread::sleep(PAUSE);
        }
    }

    fn take() -> Result<Self> {
        let mut things = BTreeMap::new();
        things.insert("process", processes()?);
        things.insert("mount", mounts()?);
        things.insert("link", names_in(Path::new("/sys/class/net"))?);
        things.insert("cgroup", cgroups()?);
        things.insert("socket", sockets()?);
        things.insert("file", files_of_run()?);
        things.insert("temporary file", temporary_files()?);
        things.insert("bundle", bundles()?);
        things.insert("network", networks()?);
        Ok(Self { things })
    }

    /// One line for each thing that came or went; empty: none did.
    fn differences(&self, after: &Self) -> String {
        let mut text = String::new();
        let none = BTreeSet::new();
        for (kind, now) in &after.things {
            let before = self.things.get(kind).unwrap_or(&none);
            for left in now.difference(before) {
                let _ = writeln!(text, "+ {kind} {left}");
            }
            // Processes, sockets and files of others end as they please; what is mounted or configured does not.
            if matches!(*kind, "mount" | "link" | "cgroup") {
                for lost in before.difference(now) {
                    let _ = writeln!(text, "- {kind} {lost}");
                }
            }
        }
        text
    }
}

/// Processes other than the kernel's, this one's own and those of the host's own services and logins.
fn processes() -> Result<BTreeSet<String>> {
    let mut found = BTreeSet::new();
    for pid in pids()? {
        let directory = PathBuf::from(format!("/proc/{pid}"));
        // A process may end while it is looked at: then it is not there.
        let Ok(stat) = fs::read_to_string(directory.join("stat")) else { continue };
        let Ok(command) = fs::read(directory.join("cmdline")) else { continue };
        let cgroup = fs::read_to_string(directory.join("cgroup")).unwrap_or_default();
        let Some((comm, parent, started)) = parse_stat(&stat) else { continue };
        let kernel = pid == 2 || parent == 2;
        if kernel || parent == std::process::id() || pid == std::process::id() || is_the_hosts_own(&cgroup) {
            continue;
        }
        let command = String::from_utf8_lossy(&command).replace('\0', " ");
        // One that was restarted is the same thing.
        if comm == "containerd" {
            found.insert(command);
            continue;
        }
        found.insert(format!("{pid} {comm} (started at {started}) {}", command.trim_end()));
    }
    Ok(found)
}

/// Name, parent's pid and start time in clock ticks: fields 2, 4 and 22 of proc_pid_stat(5).
fn parse_stat(stat: &str) -> Option<(&str, u32, u64)> {
    let (_, rest) = stat.split_once('(')?;
    let (comm, rest) = rest.rsplit_once(") ")?;
    let fields: Vec<_> = rest.split_whitespace().collect();
    Some((comm, fields.get(1)?.parse().ok()?, fields.get(19)?.parse().ok()?))
}

/// Pids of all processes.
pub(crate) fn pids() -> Result<Vec<u32>> {
    Ok(names_in(Path::new("/proc"))?.iter().filter_map(|name| name.parse().ok()).collect())
}

/// Processes whose command line starts with this program and that belong to this container: its id is one of
/// their arguments, or in the path that one of them is.
pub(crate) fn processes_of(program: &str, id: &str) -> Result<Vec<u32>> {
    let belongs = |pid: &u32| {
        let command = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let mut words = command.split(|byte| *byte == 0);
        let name = words.next().unwrap_or_default();
        let name = Path::new(std::str::from_utf8(name).unwrap_or_default()).file_name();
        let has_id = |word: &[u8]| word.split(|byte| *byte == b'/').any(|part| part == id.as_bytes());
        name.is_some_and(|name| name == program) && words.any(has_id)
    };
    Ok(pids()?.into_iter().filter(belongs).collect())
}

/// The one of [`processes_of`].
pub(crate) fn the_process_of(program: &str, id: &str) -> Result<u32> {
    match processes_of(program, id)?.as_slice() {
        [pid] => Ok(*pid),
        found => bail!("expected  one {program} of {id}\ncame      {found:?}"),
    }
}

/// Whether a cgroup (its path, or a line of /proc/PID/cgroup of the v2 hierarchy) is of a login or a service
/// other than containerd, those of the tests' own, below which shims run, and docker's containers.
fn is_the_hosts_own(cgroup: &str) -> bool {
    let path = cgroup.lines().find_map(|line| line.strip_prefix("0::")).unwrap_or(cgroup);
    let mut parts = path.split('/').filter(|part| !part.is_empty());
    match parts.next() {
        Some("system.slice") => parts.next().is_some_and(|unit| {
            // docker's containers have scopes there.
            unit != "containerd.service" && !unit.starts_with(PREFIX) && !unit.starts_with("docker-")
        }),
        Some("user.slice" | "init.scope") => true,
        _ => false,
    }
}

/// Mounts of this mount namespace and of containerd's.
fn mounts() -> Result<BTreeSet<String>> {
    let mut found = BTreeSet::new();
    let mut tables = vec![PathBuf::from("/proc/self/mountinfo")];
    for pid in pids()? {
        if fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm.trim() == "containerd") {
            tables.push(PathBuf::from(format!("/proc/{pid}/mountinfo")));
        }
    }
    for table in tables {
        let text = fs::read_to_string(&table).with_context(|| format!("cannot read {}", table.display()))?;
        // Fields 1, 4 and 5 of proc_pid_mountinfo(5), and the type. The id makes mounts over each other differ.
        found.extend(text.lines().filter_map(|line| {
            let (place, kind) = line.split_once(" - ")?;
            let fields: Vec<_> = place.split(' ').collect();
            let (id, root, point) = (fields.first()?, fields.get(3)?, fields.get(4)?);
            // Mounted by systemd when somebody first looks.
            let own = point.starts_with("/proc/sys/fs/binfmt_misc") || point.starts_with("/run/user/");
            (!own).then(|| {
                format!("{point} (id {id}, of {root}, type {})", kind.split(' ').next().unwrap_or("?"))
            })
        }));
    }
    Ok(found)
}

/// Names in a directory; a missing directory has none.
fn names_in(directory: &Path) -> Result<BTreeSet<String>> {
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(BTreeSet::new()),
        Err(error) => return Err(error).with_context(|| format!("cannot read {}", directory.display())),
    };
    Ok(entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect())
}

fn cgroups() -> Result<BTreeSet<String>> {
    let root = Path::new("/sys/fs/cgroup");
    let mut found = BTreeSet::new();
    walk(root, &mut |path, is_directory| {
        let name = path.strip_prefix(root).unwrap_or(path).display().to_string();
        if !is_directory || is_the_hosts_own(&name) {
            return false;
        }
        found.insert(name);
        true
    });
    Ok(found)
}

/// Named Unix sockets, bound in any directory of the host.
fn sockets() -> Result<BTreeSet<String>> {
    let text = fs::read_to_string("/proc/net/unix").context("cannot read /proc/net/unix")?;
    let names = text.lines().skip(1).filter_map(|line| line.split_whitespace().nth(7));
    let own = |name: &&str| SERVICES.iter().any(|service| name.starts_with(&format!("/run/{service}/")));
    // On any runtime, dockerd can keep its end of an attached client's connection until its garbage is collected.
    let dockers = |name: &&str| name.ends_with("/docker.sock");
    Ok(names.filter(|name| !own(name) && !dockers(name)).map(str::to_owned).collect())
}

/// Files and directories below /run, without what is mounted there.
fn files_of_run() -> Result<BTreeSet<String>> {
    let mut found = BTreeSet::new();
    for name in names_in(Path::new("/run"))? {
        if SERVICES.contains(&name.as_str()) || name == FAILURES {
            continue;
        }
        let top = Path::new("/run").join(name);
        found.insert(top.display().to_string());
        walk(&top, &mut |path, _| {
            if path == Path::new(TEMPLATES) {
                return true;
            }
            // What is made once and stays; one that is not complete has a dot before its name.
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if path.parent() == Some(Path::new(TEMPLATES)) && !name.starts_with('.') {
                return false;
            }
            // The inside of a container's root changes while it runs; that the mount is there says enough.
            let inside = path.ends_with("rootfs");
            found.insert(path.display().to_string());
            !inside
        });
    }
    Ok(found)
}

/// What is in /tmp, but for the tests' own and for what systemd makes there for its services.
fn temporary_files() -> Result<BTreeSet<String>> {
    let mut found = names_in(Path::new("/tmp"))?;
    found.retain(|name| !name.starts_with(PREFIX) && !name.starts_with("systemd-private-"));
    Ok(found)
}

/// Persistent directories of tasks and, in the CRI plugin's own directory, of pods and containers: of the host's
/// containerd and of the tests' own.
fn bundles() -> Result<BTreeSet<String>> {
    let mut found = BTreeSet::new();
    for name in names_in(Path::new(ROOTS))? {
        if name != "containerd" && !name.starts_with(PREFIX) {
            continue;
        }
        for kind in BUNDLES {
            let root = Path::new(ROOTS).join(&name).join(kind);
            for group in names_in(&root)? {
                found.extend(names_in(&root.join(&group))?.iter().map(|id| format!("{kind}/{group}/{id}")));
            }
        }
    }
    Ok(found)
}

/// What CNI keeps of networks that are in use: addresses that are taken, and its cached results.
fn networks() -> Result<BTreeSet<String>> {
    let mut found = BTreeSet::new();
    walk(Path::new("/var/lib/cni"), &mut |path, _| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        // host-local's own notes, of no pod.
        if name != "lock" && !name.starts_with("last_reserved_ip") {
            found.insert(path.display().to_string());
        }
        true
    });
    Ok(found)
}

/// Visits everything below a directory, and enters the directories for which `visit` says so. What vanishes
/// meanwhile is not there.
fn walk(directory: &Path, visit: &mut impl FnMut(&Path, bool) -> bool) {
    let Ok(entries) = fs::read_dir(directory) else { return };
    for entry in entries.flatten() {
        let is_directory = entry.file_type().is_ok_and(|kind| kind.is_dir());
        if visit(&entry.path(), is_directory) && is_directory {
            walk(&entry.path(), visit);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stat_is_read_past_a_name_with_parentheses() {
        let stat = "41 (a) (b) S 7 1 1 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 4711 0 0";
        assert_eq!(parse_stat(stat), Some(("a) (b", 7, 4711)));
    }

    #[test]
    fn containerds_own_children_count_and_other_services_do_not() {
        assert!(is_the_hosts_own("0::/system.slice/cron.service\n"));
        assert!(is_the_hosts_own("0::/user.slice/user-0.slice/session-1.scope\n"));
        assert!(!is_the_hosts_own("0::/system.slice/containerd.service\n"));
        assert!(!is_the_hosts_own("0::/system.slice/bulkhead-e2e-7-1.service\n"));
        assert!(!is_the_hosts_own("0::/system.slice/docker-e2e-1.scope\n"));
        assert!(is_the_hosts_own("0::/system.slice/docker.service\n"));
        assert!(!is_the_hosts_own("0::/bulkhead-e2e/e2e-1-1\n"));
        assert!(!is_the_hosts_own("bulkhead-e2e/e2e-1-1"));
    }

    fn with(kind: &'static str, names: &[&str]) -> Snapshot {
        Snapshot { things: BTreeMap::from([(kind, names.iter().map(|&name| name.to_owned()).collect())]) }
    }

    #[test]
    fn what_is_left_and_what_is_lost_are_told_apart() {
        let (before, after) = (with("mount", &["/a", "/b"]), with("mount", &["/b", "/c"]));
        assert_eq!(before.differences(&after), "+ mount /c\n- mount /a\n");
        assert_eq!(before.differences(&before), "");
    }

    #[test]
    fn a_process_that_ends_is_no_loss() {
        assert_eq!(with("process", &["7 cron"]).differences(&with("process", &[])), "");
    }
}
