//! The pod's cgroup on the host. The shim creates it at the spec's `linux.cgroupsPath` in every mounted hierarchy, and
//! the VMM joins it. For a path of the systemd cgroup driver, the shim uses the directory that systemd would use for
//! the scope. It does not ask systemd.

use std::{
    ffi::OsString,
    fs, io,
    os::unix::ffi::OsStringExt,
    path::{Component, Path, PathBuf},
    time::Duration,
};

use rustix::fs::{XattrFlags, getxattr, setxattr};

use crate::host::{
    blocking::BlockingError,
    directory_lock::DirectoryLock,
    journal::{Effect, Journal},
    mountinfo,
    processors::ProcessorError,
};

/// An extended attribute that marks the cgroups that the shim made. A parent that several pods share is removed with
/// the last of them, and a cgroup that someone else made is never removed. The value of a cgroup that only one pod uses
/// is that pod's state directory.
const MARK: &str = "trusted.bulkhead";
/// The value of all other cgroups.
const SHARED: &[u8] = b"1";

/// The longest path (PATH_MAX).
const LONGEST_PATH: usize = 4096;

/// How long a shim waits for others that make a cgroup. The kernel may be slow to make one.
const TURN: Duration = Duration::from_secs(10);

/// How often another pod may remove a shared parent while its child is made.
const TRIES: u32 = 16;

/// Why there is no cgroup.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CgroupError {
    #[error("cannot read {}", mountinfo::TABLE)]
    Mounts(#[source] io::Error),
    #[error("no cgroup file system is mounted on this host")]
    NoHierarchy,
    #[error("linux.cgroupsPath {path:?} leaves its hierarchy; use one without `..`")]
    Outside { path: PathBuf },
    #[error(
        "linux.cgroupsPath {path:?} has the form slice:prefix:name, but its parts are not valid names of systemd units"
    )]
    Units { path: PathBuf },
    #[error("cannot write {path}")]
    Join { path: PathBuf, source: io::Error },
    #[error("cannot set {path}")]
    Limit { path: PathBuf, source: io::Error },
    #[error("cannot read {path}")]
    Read { path: PathBuf, source: io::Error },
    #[error(
        "cgroup {path} cannot have the controller {controller} for its children, so the pod cannot be limited"
    )]
    Controller { path: PathBuf, controller: &'static str, source: io::Error },
    #[error("this host has no cgroup controller {controller:?}")]
    NoController { controller: &'static str },
    #[error("{field} cannot be set")]
    Field { field: String, source: Box<CgroupError> },
    #[error("{field} cannot be set: {path} does not exist, so the host's kernel has no such limit")]
    NoFile { field: String, path: PathBuf },
    #[error("{field}: cannot write {text:.256?} to {path}{hint}")]
    Line { field: String, text: String, path: PathBuf, hint: &'static str, source: io::Error },
    #[error(
        "{field} is of cgroup v2, and this host has the controller blkio of cgroup v1; use linux.resources.blockIO"
    )]
    OfV2 { field: String },
    #[error("cannot make cgroup {path}")]
    Create { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Processors(#[from] ProcessorError),
    #[error("the limits of the pod's cgroup on the host were not set within {seconds} s")]
    Late { seconds: u64 },
    #[error("cannot set the limits of the pod's cgroup on the host")]
    Blocking(#[from] BlockingError),
}

/// One mounted hierarchy.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Hierarchy {
    root: PathBuf,
    /// Of cgroup v2.
    is_unified: bool,
    /// The controllers of a hierarchy of v1.
    controllers: Vec<String>,
}

/// A cgroup, in each hierarchy.
#[derive(Debug, Clone)]
pub(crate) struct Cgroup {
    pub(crate) directories: Vec<Directory>,
}

/// A cgroup in one hierarchy.
#[derive(Debug, Clone)]
pub(crate) struct Directory {
    /// The mount point of the hierarchy.
    pub(crate) root: PathBuf,
    pub(crate) path: PathBuf,
    /// Of cgroup v2.
    pub(crate) is_unified: bool,
    /// The controllers of a hierarchy of v1.
    pub(crate) controllers: Vec<String>,
}

impl Cgroup {
    /// The files that a process writes itself into to be in the cgroup.
    pub(crate) fn procs(&self) -> Vec<PathBuf> {
        self.directories.iter().map(|directory| directory.path.join("cgroup.procs")).collect()
    }
}

impl Cgroup {
    /// Its directory in the hierarchy with this controller: in that of v1 if there is one, or else in the unified one,
    /// where the controller may be missing.
    pub(crate) fn with_controller(&self, controller: &str) -> Option<&Directory> {
        let v1 = self.directories.iter().find(|directory| directory.has_v1(controller));
        v1.or_else(|| self.directories.iter().find(|directory| directory.is_unified))
    }
}

impl Directory {
    /// Whether this is the directory of a controller of v1.
    pub(crate) fn has_v1(&self, controller: &str) -> bool {
        !self.is_unified && self.controllers.iter().any(|name| name == controller)
    }

    /// The cgroups above it, the nearest first.
    pub(crate) fn above(&self) -> impl Iterator<Item = &Path> {
        self.path.ancestors().skip(1).take_while(|path| path.starts_with(&self.root))
    }
}

impl Hierarchy {
    /// In v1's cpuset a new cgroup takes no process before its CPUs and NUMA nodes are set.
    fn is_cpuset_v1(&self) -> bool {
        !self.is_unified && self.controllers.iter().any(|name| name == "cpuset")
    }
}

/// The pod that a cgroup is for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Owner<'a> {
    /// Its state directory.
    pub(crate) state: &'a Path,
    /// The directory of all state directories, on which shims take turns. Only root can open it: every user of the host
    /// can open a cgroup's directory, and could lock that.
    pub(crate) root: &'a Path,
}

/// Makes the cgroup `path`: absolute or relative, below the root of each hierarchy.
pub(crate) fn create(journal: &mut Journal, path: &Path, pod: Owner) -> Result<Cgroup, CgroupError> {
    let hierarchies = mounted().map_err(CgroupError::Mounts)?;
    if hierarchies.is_empty() {
        return Err(CgroupError::NoHierarchy);
    }
    let names = names(path)?;
    let mut directories = Vec::new();
    for hierarchy in hierarchies {
        let path = create_in(journal, &hierarchy, &names, pod)?;
        let Hierarchy { root, is_unified, controllers } = hierarchy;
        directories.push(Directory { root, path, is_unified, controllers });
    }
    Ok(Cgroup { directories })
}

/// Moves a process into the cgroup `path`, which exists, of each hierarchy.
pub(crate) fn join(path: &Path, pid: u32) -> Result<(), CgroupError> {
    let names = names(path)?;
    for hierarchy in mounted().map_err(CgroupError::Mounts)? {
        let mut path = hierarchy.root.clone();
        path.extend(&names);
        let procs = path.join("cgroup.procs");
        fs::write(&procs, pid.to_string()).map_err(|source| CgroupError::Join { path: procs, source })?;
    }
    Ok(())
}

/// Where the hierarchies are mounted.
pub(crate) fn roots() -> io::Result<Vec<PathBuf>> {
    Ok(mounted()?.into_iter().map(|hierarchy| hierarchy.root).collect())
}

fn mounted() -> io::Result<Vec<Hierarchy>> {
    Ok(hierarchies(&mountinfo::read()?))
}

/// The names along the path, from the root of a hierarchy.
fn names(path: &Path) -> Result<Vec<PathBuf>, CgroupError> {
    let path = scope(path)?.unwrap_or_else(|| path.into());
    let mut names = Vec::new();
    for component in path.components() {
        match component {
            Component::Normal(name) => names.push(PathBuf::from(name)),
            Component::RootDir | Component::CurDir => {}
            Component::ParentDir | Component::Prefix(_) => {
                return Err(CgroupError::Outside { path });
            }
        }
    }
    Ok(names)
}

/// The directory of the scope that `slice:prefix:name` names, the form of the systemd cgroup driver. None: the path
/// does not have this form. An empty slice is system.slice, as with runc.
fn scope(path: &Path) -> Result<Option<PathBuf>, CgroupError> {
    let Some(text) = path.to_str() else { return Ok(None) };
    let parts: Vec<_> = text.split(':').collect();
    let &[slice, prefix, name] = parts.as_slice() else { return Ok(None) };
    let slice = if slice.is_empty() { "system.slice" } else { slice };
    let mut directory = match slice_directory(slice) {
        Some(directory) if !prefix.contains('/') && !name.contains('/') => directory,
        _ => return Err(CgroupError::Units { path: path.into() }),
    };
    directory.push(match (prefix, name) {
        (_, slice) if slice.ends_with(".slice") => slice.to_owned(),
        ("", name) => format!("{name}.scope"),
        (prefix, name) => format!("{prefix}-{name}.scope"),
    });
    Ok(Some(directory))
}

/// `a-b.slice` is in `a.slice`, and `-.slice` is the root (systemd.slice(5)).
fn slice_directory(slice: &str) -> Option<PathBuf> {
    let name = slice.strip_suffix(".slice").filter(|name| !name.contains('/'))?;
    let mut directory = PathBuf::new();
    if name == "-" {
        return Some(directory);
    }
    let mut so_far = String::new();
    for part in name.split('-') {
        if part.is_empty() {
            return None;
        }
        so_far = if so_far.is_empty() { part.to_owned() } else { format!("{so_far}-{part}") };
        directory.push(format!("{so_far}.slice"));
    }
    Some(directory)
}

fn create_in(
    journal: &mut Journal,
    hierarchy: &Hierarchy,
    names: &[PathBuf],
    pod: Owner,
) -> Result<PathBuf, CgroupError> {
    let mut tries = TRIES;
    loop {
        match create_along(journal, hierarchy, names, pod) {
            Err(CgroupError::Create { source, .. })
                if source.kind() == io::ErrorKind::NotFound && tries > 0 =>
            {
                tries -= 1;
            }
            other => return other,
        }
    }
}

fn create_along(
    journal: &mut Journal,
    hierarchy: &Hierarchy,
    names: &[PathBuf],
    pod: Owner,
) -> Result<PathBuf, CgroupError> {
    let mut path = hierarchy.root.clone();
    for (index, name) in names.iter().enumerate() {
        path.push(name);
        // A shim that finds the directory of another one finds its mark, too.
        let made = DirectoryLock::take(pod.root, TURN).and_then(|_turn| {
            // The parents are there for other pods too.
            create_one(journal, hierarchy, &path, (index + 1 == names.len()).then_some(pod.state))
        });
        made.map_err(|source| CgroupError::Create { path: path.clone(), source })?;
    }
    Ok(path)
}

fn create_one(
    journal: &mut Journal,
    hierarchy: &Hierarchy,
    path: &Path,
    pod: Option<&Path>,
) -> io::Result<()> {
    let shared = pod.is_none();
    if path.is_dir() {
        if is_marked(path) {
            journal.record(Effect::Cgroup { path: path.into(), shared })?;
            if owner(path).as_deref() != pod {
                setxattr(path, MARK, SHARED, XattrFlags::empty())?;
            }
        }
        return Ok(());
    }
    journal.record(Effect::Cgroup { path: path.into(), shared })?;
    match fs::create_dir(path) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => return Ok(()),
        other => other?,
    }
    let mark = pod.map_or(SHARED, |pod| pod.as_os_str().as_encoded_bytes());
    setxattr(path, MARK, mark, XattrFlags::empty())?;
    if hierarchy.is_cpuset_v1() {
        inherit_cpuset(path)?;
    }
    Ok(())
}

/// Whether the shim has made this cgroup.
pub(crate) fn is_marked(path: &Path) -> bool {
    mark(path).is_some()
}

/// The state directory of the only pod that uses this cgroup.
pub(crate) fn owner(path: &Path) -> Option<PathBuf> {
    let owner = PathBuf::from(OsString::from_vec(mark(path)?));
    owner.is_absolute().then_some(owner)
}

fn mark(path: &Path) -> Option<Vec<u8>> {
    let mut value = vec![0; LONGEST_PATH];
    let length = getxattr(path, MARK, &mut value).ok()?;
    value.truncate(length);
    Some(value)
}

fn inherit_cpuset(path: &Path) -> io::Result<()> {
    let Some(parent) = path.parent() else { return Ok(()) };
    for file in ["cpuset.cpus", "cpuset.mems"] {
        fs::write(path.join(file), fs::read(parent.join(file))?)?;
    }
    Ok(())
}

/// The hierarchies of a table of mounts, each once. Named v1 hierarchies control nothing.
fn hierarchies(table: &[u8]) -> Vec<Hierarchy> {
    let mut devices = Vec::new();
    let mut found = Vec::new();
    for mount in mountinfo::mounts(table) {
        let options = String::from_utf8_lossy(mount.super_options);
        let (is_v1, is_unified) = (mount.file_system == b"cgroup", mount.file_system == b"cgroup2");
        let is_named = options.split(',').any(|option| option.starts_with("name="));
        if !(is_v1 || is_unified) || is_named || devices.contains(&mount.device) {
            continue;
        }
        devices.push(mount.device);
        let controllers = if is_v1 { options.split(',').map(str::to_owned).collect() } else { Vec::new() };
        found.push(Hierarchy { root: mount.place, is_unified, controllers });
    }
    found
}

#[cfg(test)]
mod tests {
    use std::{sync::Barrier, thread};

    use super::*;

    #[test]
    fn finds_the_unified_hierarchy_once() {
        let table = b"\
29 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate
30 23 0:26 / /mnt/again rw shared:4 - cgroup2 cgroup2 rw
31 23 0:27 / /sys/fs/pstore rw shared:5 - pstore pstore rw";
        let unified = Hierarchy { root: "/sys/fs/cgroup".into(), is_unified: true, controllers: Vec::new() };
        assert_eq!(hierarchies(table), [unified]);
    }

    #[test]
    fn finds_the_controllers_of_v1() {
        let table = b"\
33 32 0:28 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
34 32 0:29 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset
35 32 0:30 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd
36 32 0:31 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw";
        let found = hierarchies(table);
        let roots: Vec<_> = found.iter().map(|h| h.root.to_str().unwrap()).collect();
        assert_eq!(roots, ["/sys/fs/cgroup/cpu,cpuacct", "/sys/fs/cgroup/cpuset", "/sys/fs/cgroup/unified"]);
        assert_eq!(found.iter().map(Hierarchy::is_cpuset_v1).collect::<Vec<_>>(), [false, true, false]);
    }

    #[test]
    fn a_path_cannot_leave_its_hierarchy() {
        assert!(matches!(names(Path::new("/a/../../b")), Err(CgroupError::Outside { .. })));
        assert_eq!(names(Path::new("/default/demo")).unwrap(), [Path::new("default"), Path::new("demo")]);
    }

    #[test]
    fn the_systemd_drivers_path_is_that_of_the_scope() {
        for (path, expected) in [
            ("system.slice:docker:ab12", "system.slice/docker-ab12.scope"),
            (":docker:ab12", "system.slice/docker-ab12.scope"),
            ("-.slice::demo", "demo.scope"),
            (
                "kubepods-burstable-pod1_2.slice:cri-containerd:ab12",
                "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1_2.slice/cri-containerd-ab12.scope",
            ),
            ("a.slice:x:a-b.slice", "a.slice/a-b.slice"),
        ] {
            let names: PathBuf = names(Path::new(path)).unwrap().iter().collect();
            assert_eq!(names, Path::new(expected), "{path}");
        }
        for path in [
            "service:cri:x",
            "a--b.slice:cri:x",
            "-a.slice:cri:x",
            "a/b.slice:cri:x",
            ".slice:cri:x",
            "a.slice:cri:../x",
        ] {
            assert!(matches!(names(Path::new(path)), Err(CgroupError::Units { .. })), "{path}");
        }
        assert_eq!(names(Path::new("/a:b/c")).unwrap(), [Path::new("a:b"), Path::new("c")]);
    }

    #[test]
    fn a_cgroup_that_two_pods_make_at_the_same_moment_is_marked_as_shared() {
        const ROUNDS: u32 = 40;
        let dir = tempfile::tempdir().unwrap();
        let name = format!("/bulkhead-test-moment-{}", std::process::id());
        for round in 0..ROUNDS {
            let path = format!("{name}/{round}");
            let both = Barrier::new(2);
            let make = |pod: &'static str| {
                let mut journal = Journal::open(&dir.path().join(format!("{pod}-{round}"))).unwrap();
                let state = Path::new("/run").join(pod);
                both.wait();
                let owner = Owner { state: &state, root: dir.path() };
                let cgroup = create(&mut journal, Path::new(&path), owner).unwrap();
                (journal, cgroup)
            };
            let [one, other] = thread::scope(|scope| {
                let make = &make;
                ["one", "other"].map(|pod| scope.spawn(move || make(pod))).map(|made| made.join().unwrap())
            });
            for directory in &one.1.directories {
                assert_eq!(mark(&directory.path).as_deref(), Some(SHARED), "{}", directory.path.display());
                assert!(directory.path.exists());
            }
            one.0.undo().unwrap();
            other.0.undo().unwrap();
            assert!(one.1.directories.iter().all(|directory| !directory.path.exists()));
        }
    }

    /// Every user of a host can lock the directory of a cgroup.
    #[test]
    fn a_lock_on_a_cgroup_keeps_no_pod_waiting() {
        let dir = tempfile::tempdir().unwrap();
        let mut journal = Journal::open(&dir.path().join("journal")).unwrap();
        let owner = Owner { state: Path::new("/run/pod"), root: dir.path() };
        let locks: Vec<_> =
            roots().unwrap().iter().map(|root| DirectoryLock::take(root, TURN).unwrap()).collect();
        let path = format!("/bulkhead-test-locked-{}", std::process::id());
        create(&mut journal, Path::new(&path), owner).unwrap();
        journal.undo().unwrap();
        drop(locks);
    }

    /// On this host's own cgroups: what two pods share goes with the second, what someone else made stays.
    #[test]
    fn shared_parents_go_with_the_last() {
        let dir = tempfile::tempdir().unwrap();
        let name = format!("bulkhead-test-{}", std::process::id());
        let [first, second] =
            ["first", "second"].map(|state| Journal::open(&dir.path().join(state)).unwrap());
        let (mut first, mut second) = (first, second);
        let owner = Owner { state: Path::new("/run/pod"), root: dir.path() };
        let procs = create(&mut first, Path::new(&format!("/{name}/one")), owner).unwrap().procs();
        create(&mut second, Path::new(&format!("/{name}/two")), owner).unwrap();
        let parent = procs[0].parent().and_then(Path::parent).unwrap().to_owned();
        assert!(procs.iter().all(|file| file.exists()));
        first.undo().unwrap();
        assert!(parent.join("two").exists() && !parent.join("one").exists());
        second.undo().unwrap();
        assert!(!parent.exists());
    }
}
