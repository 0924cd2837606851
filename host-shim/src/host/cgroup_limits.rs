//! Limits of a pod's cgroup on the host: what the pod's VMM may take of the host at most.
//!
//! The guest has the limits of its containers, and reaches them first. These are a little larger, and hold for a VMM
//! that its guest has taken over, too.

use std::{
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

use bulkhead_agent_api::{cpu_list, cpu_weight::weight_of_shares};

use crate::{
    host::{
        cgroup::{Cgroup, CgroupError, Directory},
        memory::limit_of,
    },
    types::spec::{Cpu, PERIOD},
};

/// Memory of the VMM beside the guest's own, bytes: its program and the buffers of its devices.
const VMM_MEMORY: u64 = 128 << 20;

/// Page tables and KVM's tables take at most the guest's memory divided by this number. They have 24 bytes for each
/// page of 4096, which is 1/171; the rest is for the upper levels of the tables.
pub(crate) const PAGE_TABLES: u64 = 128;

/// How often a controller is enabled for one setting, and the pause in between.
const ENABLE_ATTEMPTS: u32 = 5;
const ENABLE_PAUSE: Duration = Duration::from_millis(if cfg!(test) { 100 } else { 10 });

/// The threads of the VMM's devices may take the time of one processor divided by this number, beside the guest's
/// processors.
const DEVICES_SHARE: i64 = 10;

/// One setting in the form of both versions of cgroups.
struct Setting {
    controller: &'static str,
    v1: &'static str,
    v2: &'static str,
    v1_value: String,
    v2_value: String,
}

impl Setting {
    fn same(controller: &'static str, file: &'static str, value: &str) -> Self {
        Self { controller, v1: file, v2: file, v1_value: value.into(), v2_value: value.into() }
    }
}

/// Limits the memory to that of a VM with `vm_mib` MiB, of its VMM, and of `files` bytes of files in the host's memory.
pub(crate) fn limit_memory(cgroup: &Cgroup, vm_mib: u32, files: u64) -> Result<(), CgroupError> {
    let guest = u64::from(vm_mib) << 20;
    let bytes = (guest + guest / PAGE_TABLES + VMM_MEMORY).saturating_add(files).to_string();
    let setting = Setting {
        controller: "memory",
        v1: "memory.limit_in_bytes",
        v2: "memory.max",
        v1_value: bytes.clone(),
        v2_value: bytes,
    };
    apply(cgroup, &[setting])
}

/// The processors and NUMA nodes of the host that a pod may use, as lists. None: all that its parent may.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Cpuset {
    pub(crate) cpus: Option<String>,
    pub(crate) mems: Option<String>,
}

/// The fewest processes and threads that a cgroup above this one allows: kubelet's `podPidsLimit` is such a limit.
/// None: there is no limit, or the controller is missing.
pub(crate) fn tasks_above(cgroup: &Cgroup) -> Result<Option<u64>, CgroupError> {
    let Some(directory) = cgroup.with_controller("pids") else { return Ok(None) };
    let mut fewest = None;
    for path in directory.above() {
        fewest = fewest.into_iter().chain(limit_of(&path.join("pids.max"))?).min();
    }
    Ok(fewest)
}

/// The file with the processors that the cgroup above this one may use and that are online: of the nearest one with the
/// cpuset controller. None: there is no such file.
pub(crate) fn cpuset_above(cgroup: &Cgroup) -> Option<PathBuf> {
    let directory = cgroup.with_controller("cpuset")?;
    let file = if directory.is_unified { "cpuset.cpus.effective" } else { "cpuset.effective_cpus" };
    directory.above().map(|path| path.join(file)).find(|file| file.exists())
}

/// Sets the processors and NUMA nodes that the pod may use, where they differ from the `present` ones. None: those are
/// not known, and all are set. Also after an error `present` is what the cgroup has.
pub(crate) fn limit_cpuset(
    cgroup: &Cgroup,
    present: &mut Option<Cpuset>,
    wanted: &Cpuset,
) -> Result<(), CgroupError> {
    if present.as_ref().is_none_or(|present| present.cpus != wanted.cpus) {
        limit_set(cgroup, "cpuset.cpus", wanted.cpus.as_deref())?;
        if let Some(present) = present {
            present.cpus.clone_from(&wanted.cpus);
        }
    }
    if present.as_ref().is_none_or(|present| present.mems != wanted.mems) {
        limit_set(cgroup, "cpuset.mems", wanted.mems.as_deref())?;
    }
    *present = Some(wanted.clone());
    Ok(())
}

fn limit_set(cgroup: &Cgroup, file: &'static str, wanted: Option<&str>) -> Result<(), CgroupError> {
    // v1 takes no empty list, and none with a processor that is offline or that the parent lacks.
    let parents = inherited(cgroup, file)?;
    let v1_value = wanted.map(|list| usable(list, &parents)).filter(|list| !list.is_empty());
    let v1_value = v1_value.unwrap_or(parents);
    // v2 takes an empty line for the parent's.
    let v2_value = wanted.unwrap_or("\n").to_owned();
    apply(cgroup, &[Setting { controller: "cpuset", v1: file, v2: file, v1_value, v2_value }])
}

/// The part of a list that can be used, by the list of the parent.
fn usable(list: &str, parents: &str) -> String {
    match (cpu_list::parse(list), cpu_list::parse(parents)) {
        (Some(numbers), Some(parents)) => {
            cpu_list::format(&numbers.intersection(&parents).copied().collect())
        }
        _ => list.to_owned(),
    }
}

/// What the parent's file of v1's cpuset controller says. Empty without one.
fn inherited(cgroup: &Cgroup, file: &str) -> Result<String, CgroupError> {
    let v1 = cgroup.directories.iter().find(|directory| directory.has_v1("cpuset"));
    let Some(parent) = v1.and_then(|directory| directory.path.parent()) else { return Ok(String::new()) };
    let path = parent.join(file);
    fs::read_to_string(&path).map_err(|source| CgroupError::Limit { path, source })
}

/// Removes the memory limit.
pub(crate) fn unlimit_memory(cgroup: &Cgroup) -> Result<(), CgroupError> {
    apply(
        cgroup,
        &[Setting {
            controller: "memory",
            v1: "memory.limit_in_bytes",
            v2: "memory.max",
            v1_value: "-1".into(),
            v2_value: "max".into(),
        }],
    )
}

/// Sets the CPU limit, which would slow down the boot.
pub(crate) fn limit_cpu(cgroup: &Cgroup, cpu: &Cpu) -> Result<(), CgroupError> {
    apply(cgroup, &cpu_settings(cpu))
}

/// Whether these are limits of processor time.
pub(crate) fn limits_cpu(cpu: &Cpu) -> bool {
    !cpu_settings(cpu).is_empty()
}

fn cpu_settings(cpu: &Cpu) -> Vec<Setting> {
    let mut settings = Vec::new();
    if let Some(idle) = cpu.idle {
        settings.push(Setting::same("cpu", "cpu.idle", &idle.to_string()));
    }
    // A cgroup that is idle takes no weight.
    if let Some(shares) = cpu.shares.filter(|shares| *shares > 0 && cpu.idle.unwrap_or(0) == 0) {
        settings.push(Setting {
            controller: "cpu",
            v1: "cpu.shares",
            v2: "cpu.weight",
            v1_value: shares.to_string(),
            v2_value: weight_of_shares(shares).to_string(),
        });
    }
    let period = cpu.period.filter(|period| *period > 0).unwrap_or(PERIOD);
    let quota = match cpu.quota {
        None | Some(0) => return settings,
        Some(quota) if quota < 0 => None,
        Some(quota) => Some(quota.saturating_add(i64::try_from(period).unwrap_or(i64::MAX) / DEVICES_SHARE)),
    };
    let burst = |value: &str| Setting {
        controller: "cpu",
        v1: "cpu.cfs_burst_us",
        v2: "cpu.max.burst",
        v1_value: value.to_owned(),
        v2_value: value.to_owned(),
    };
    // The kernel refuses a quota below the burst. So there is no burst while the quota changes.
    if cpu.burst.is_some() {
        settings.push(burst("0"));
    }
    let value = |quota: Option<i64>, none: &str| quota.map_or(none.to_owned(), |quota| quota.to_string());
    // v1 has a file for each; the period comes first, since a quota is checked against it.
    settings.push(Setting {
        controller: "cpu",
        v1: "cpu.cfs_period_us",
        v2: "cpu.max",
        v1_value: period.to_string(),
        v2_value: format!("{} {period}", value(quota, "max")),
    });
    settings.push(Setting {
        controller: "cpu",
        v1: "cpu.cfs_quota_us",
        v2: "",
        v1_value: value(quota, "-1"),
        v2_value: String::new(),
    });
    if let Some(microseconds) = cpu.burst.filter(|burst| *burst > 0) {
        settings.push(burst(&microseconds.to_string()));
    }
    settings
}

/// Those of these controllers that the cgroup does not have any more. Another manager of cgroups can disable a
/// controller of v2 for a cgroup, and its limits are gone then.
pub(crate) fn lost(
    cgroup: &Cgroup,
    controllers: impl Iterator<Item = &'static str>,
) -> Result<Vec<&'static str>, CgroupError> {
    let of_v2 = |controller: &&str| cgroup.with_controller(controller).is_some_and(|it| it.is_unified);
    let mut lost: Vec<_> = controllers.filter(of_v2).collect();
    if let Some(unified) = cgroup.directories.iter().find(|directory| directory.is_unified)
        && !lost.is_empty()
    {
        let path = unified.path.join("cgroup.controllers");
        let present = fs::read_to_string(&path).map_err(|source| CgroupError::Read { path, source })?;
        lost.retain(|controller| !present.split_whitespace().any(|name| name == *controller));
    }
    Ok(lost)
}

fn apply(cgroup: &Cgroup, settings: &[Setting]) -> Result<(), CgroupError> {
    settings.iter().try_for_each(|setting| apply_one(cgroup, setting))
}

/// Writes the setting where its controller is: in one hierarchy of v1, or in that of v2.
fn apply_one(cgroup: &Cgroup, setting: &Setting) -> Result<(), CgroupError> {
    let controller = setting.controller;
    let directory = cgroup.with_controller(controller).ok_or(CgroupError::NoController { controller })?;
    if !directory.is_unified {
        return write(&directory.path.join(setting.v1), &setting.v1_value);
    }
    if setting.v2.is_empty() {
        return Ok(());
    }
    write_enabled(directory, controller, setting.v2, &setting.v2_value)
}

/// Writes to a file of a controller of v2, which is enabled before.
pub(super) fn write_enabled(
    directory: &Directory,
    controller: &'static str,
    file: &str,
    text: &str,
) -> Result<(), CgroupError> {
    // Between the two calls another manager of cgroups, such as systemd, can disable the controller further up.
    let mut attempts = 0;
    loop {
        enable(directory, controller)?;
        attempts += 1;
        match write(&directory.path.join(file), text) {
            Err(CgroupError::Limit { source, .. }) if attempts < ENABLE_ATTEMPTS && has_no_file(&source) => {
                std::thread::sleep(ENABLE_PAUSE);
            }
            result => return result,
        }
    }
}

/// Whether a write failed because the cgroup has no such file. cgroup2 refuses to create one.
fn has_no_file(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::NotFound)
}

/// Enables a controller of v2 for the children of each cgroup above this one.
pub(super) fn enable(directory: &Directory, controller: &'static str) -> Result<(), CgroupError> {
    let above = directory.path.ancestors().skip(1).take_while(|path| path.starts_with(&directory.root));
    let mut above: Vec<&Path> = above.collect();
    above.reverse();
    for path in above {
        let file = path.join("cgroup.subtree_control");
        let enabled =
            fs::read_to_string(&file).map_err(|source| CgroupError::Limit { path: file.clone(), source })?;
        if enabled.split_whitespace().any(|name| name == controller) {
            continue;
        }
        fs::write(&file, format!("+{controller}")).map_err(|source| CgroupError::Controller {
            path: path.to_owned(),
            controller,
            source,
        })?;
    }
    Ok(())
}

fn write(path: &Path, value: &str) -> Result<(), CgroupError> {
    fs::write(path, value)
        .map_err(|source: io::Error| CgroupError::Limit { path: PathBuf::from(path), source })
}

#[cfg(test)]
mod tests {
    use std::{os::unix::fs::symlink, thread, time::Instant};

    use super::*;
    use crate::{
        host::{cgroup, journal::Journal},
        types::spec::Resources,
    };

    fn resources() -> Resources {
        let cpu = Cpu { shares: Some(1024), quota: Some(50_000), period: Some(100_000), ..Cpu::default() };
        Resources { cpu, ..Resources::default() }
    }

    /// A hierarchy of v2, by files that take whatever is written.
    fn unified(root: &Path) -> Cgroup {
        let path = root.join("a/b");
        fs::create_dir_all(&path).unwrap();
        fs::write(root.join("cgroup.subtree_control"), "cpuset cpu memory pids\n").unwrap();
        fs::write(root.join("a/cgroup.subtree_control"), "\n").unwrap();
        let directory = Directory { root: root.into(), path, is_unified: true, controllers: Vec::new() };
        Cgroup { directories: vec![directory] }
    }

    #[test]
    fn v2_gets_its_files_and_controllers_along_the_path() {
        let root = tempfile::tempdir().unwrap();
        let cgroup = unified(root.path());
        limit_memory(&cgroup, 256, 0).unwrap();
        limit_cpu(&cgroup, &resources().cpu).unwrap();
        let read = |name: &str| fs::read_to_string(root.path().join(name)).unwrap();
        assert_eq!(read("a/b/memory.max"), ((256 + 2 + 128) << 20).to_string());
        assert_eq!((read("a/b/cpu.max").as_str(), read("a/b/cpu.weight").as_str()), ("60000 100000", "100"));
        assert_eq!(read("cgroup.subtree_control"), "cpuset cpu memory pids\n", "what is enabled stays");
        assert_eq!(read("a/cgroup.subtree_control"), "+cpu");
        unlimit_memory(&cgroup).unwrap();
        assert_eq!(read("a/b/memory.max"), "max");
    }

    #[test]
    fn the_fewest_tasks_of_the_cgroups_above_are_the_pods() {
        for is_unified in [true, false] {
            let root = tempfile::tempdir().unwrap();
            let mut cgroup = unified(root.path());
            if !is_unified {
                cgroup.directories[0].is_unified = false;
                cgroup.directories[0].controllers = vec!["pids".into()];
            }
            let write = |name: &str, text: &str| fs::write(root.path().join(name), text).unwrap();
            assert_eq!(tasks_above(&cgroup).unwrap(), None);
            write("a/b/pids.max", "7\n");
            write("a/pids.max", "max\n");
            assert_eq!(tasks_above(&cgroup).unwrap(), None, "its own is not above it");
            write("pids.max", "5000\n");
            assert_eq!(tasks_above(&cgroup).unwrap(), Some(5000));
            write("a/pids.max", "1024\n");
            assert_eq!(tasks_above(&cgroup).unwrap(), Some(1024));
        }
        assert_eq!(tasks_above(&Cgroup { directories: Vec::new() }).unwrap(), None);
    }

    #[test]
    fn a_parent_without_the_controller_is_named() {
        let root = tempfile::tempdir().unwrap();
        let cgroup = unified(root.path());
        // Root writes to any file, but to no directory.
        fs::remove_file(root.path().join("a/cgroup.subtree_control")).unwrap();
        let error = limit_memory(&cgroup, 1, 0).unwrap_err().to_string();
        assert!(error.contains("/a/cgroup.subtree_control"), "{error}");
        let nothing = Cgroup { directories: Vec::new() };
        let error = limit_cpu(&nothing, &resources().cpu).unwrap_err().to_string();
        assert_eq!(error, "this host has no cgroup controller \"cpu\"");
        limit_cpu(&nothing, &Cpu::default()).unwrap();
    }

    /// The file of a controller that is disabled: it cannot be written, and cannot be created, until `late` is made.
    fn without_file(root: &Path, cgroup: &Cgroup, file: &str) -> PathBuf {
        let late = root.join("late");
        symlink(late.join(file), cgroup.directories[0].path.join(file)).unwrap();
        late
    }

    #[test]
    fn a_controller_that_is_disabled_before_the_limit_is_written_is_enabled_again() {
        let root = tempfile::tempdir().unwrap();
        let cgroup = unified(root.path());
        let late = without_file(root.path(), &cgroup, "memory.max");
        let control = root.path().join("a/cgroup.subtree_control");
        let others = thread::spawn({
            let (control, late) = (control.clone(), late.clone());
            move || {
                // The shim has enabled it, and another manager of cgroups disables it.
                while fs::read_to_string(&control).unwrap() != "+memory" {
                    thread::sleep(Duration::from_millis(1));
                }
                fs::write(&control, "").unwrap();
                while fs::read_to_string(&control).unwrap() != "+memory" {
                    thread::sleep(Duration::from_millis(1));
                }
                fs::create_dir(late).unwrap();
            }
        });
        limit_memory(&cgroup, 256, 0).unwrap();
        others.join().unwrap();
        assert_eq!(fs::read_to_string(late.join("memory.max")).unwrap(), ((256 + 2 + 128) << 20).to_string());
    }

    #[test]
    fn a_controller_that_is_disabled_again_and_again_is_an_error_in_the_end() {
        let root = tempfile::tempdir().unwrap();
        let cgroup = unified(root.path());
        without_file(root.path(), &cgroup, "memory.max");
        let begun = Instant::now();
        let error = limit_memory(&cgroup, 256, 0).unwrap_err();
        assert!(matches!(&error, CgroupError::Limit { source, .. } if has_no_file(source)), "{error}");
        assert!(begun.elapsed() >= ENABLE_PAUSE * (ENABLE_ATTEMPTS - 1));
    }

    #[test]
    fn an_idle_pod_has_no_weight_and_a_burst_is_above_no_quota() {
        let root = tempfile::tempdir().unwrap();
        let cgroup = unified(root.path());
        let read = |name: &str| fs::read_to_string(root.path().join("a/b").join(name)).ok();
        let idle = Cpu { idle: Some(1), burst: Some(20_000), ..resources().cpu };
        limit_cpu(&cgroup, &idle).unwrap();
        assert_eq!((read("cpu.idle").as_deref(), read("cpu.weight")), (Some("1"), None));
        assert_eq!(read("cpu.max.burst").as_deref(), Some("20000"));
        limit_cpu(&cgroup, &Cpu { idle: Some(0), burst: Some(0), ..idle }).unwrap();
        assert_eq!((read("cpu.idle").as_deref(), read("cpu.weight").as_deref()), (Some("0"), Some("100")));
        assert_eq!(read("cpu.max.burst").as_deref(), Some("0"));
    }

    #[test]
    fn a_cpuset_changes_and_ends() {
        let root = tempfile::tempdir().unwrap();
        let cgroup = unified(root.path());
        let read = |name: &str| fs::read_to_string(root.path().join("a/b").join(name)).ok();
        let set = |cpus: &str| Cpuset { cpus: Some(cpus.into()), mems: None };
        let mut present = Some(Cpuset::default());
        limit_cpuset(&cgroup, &mut present, &set("2-3")).unwrap();
        assert_eq!((read("cpuset.cpus").as_deref(), read("cpuset.mems")), (Some("2-3"), None));
        limit_cpuset(&cgroup, &mut present, &Cpuset::default()).unwrap();
        assert_eq!((read("cpuset.cpus").as_deref(), &present), (Some("\n"), &Some(Cpuset::default())));
        // A change was given up, and nobody knows what it has written.
        present = None;
        limit_cpuset(&cgroup, &mut present, &set("1")).unwrap();
        assert_eq!((read("cpuset.cpus").as_deref(), read("cpuset.mems").as_deref()), (Some("1"), Some("\n")));
        assert_eq!(present, Some(set("1")));
    }

    #[test]
    fn the_processors_above_are_those_of_the_nearest_cgroup_with_the_controller() {
        let root = tempfile::tempdir().unwrap();
        let mut cgroup = unified(root.path());
        assert_eq!(cpuset_above(&cgroup), None);
        for (place, file) in [("", "cpuset.cpus.effective"), ("a", "cpuset.cpus.effective")] {
            // Its own, which may be set already, is not above it.
            fs::write(root.path().join("a/b").join(file), "1\n").unwrap();
            let above = root.path().join(place).join(file);
            fs::write(&above, "0-3\n").unwrap();
            assert_eq!(cpuset_above(&cgroup), Some(above));
        }
        (cgroup.directories[0].is_unified, cgroup.directories[0].controllers) =
            (false, vec!["cpuset".into()]);
        let above = root.path().join("a/cpuset.effective_cpus");
        fs::write(&above, "0-3\n").unwrap();
        assert_eq!(cpuset_above(&cgroup), Some(above));
    }

    #[test]
    fn a_cpuset_of_which_a_part_fails_can_be_put_back() {
        let root = tempfile::tempdir().unwrap();
        let cgroup = unified(root.path());
        fs::create_dir(root.path().join("a/b/cpuset.mems")).unwrap();
        let set = |cpus: &str, mems: &str| Cpuset { cpus: Some(cpus.into()), mems: Some(mems.into()) };
        let mut present = Some(set("0-3", "0"));
        limit_cpuset(&cgroup, &mut present, &set("2-3", "1")).unwrap_err();
        assert_eq!(present, Some(set("2-3", "0")));
        limit_cpuset(&cgroup, &mut present, &set("0-3", "0")).unwrap();
        assert_eq!(fs::read_to_string(root.path().join("a/b/cpuset.cpus")).unwrap(), "0-3");
    }

    #[test]
    fn v1_gets_only_what_can_be_used() {
        assert_eq!(usable("0-3,8", "0-1,3,5\n"), "0-1,3");
        assert_eq!(usable("2", "0-1\n"), "");
    }

    /// On this host's own cgroups, of whichever version.
    #[test]
    fn the_kernel_takes_the_limits() {
        let dir = tempfile::tempdir().unwrap();
        let mut journal = Journal::open(&dir.path().join("journal")).unwrap();
        let path = format!("/bulkhead-test-limits-{}/x", std::process::id());
        let owner = cgroup::Owner { state: dir.path(), root: dir.path() };
        let cgroup = cgroup::create(&mut journal, Path::new(&path), owner).unwrap();
        limit_memory(&cgroup, 256, 1 << 20).unwrap();
        limit_cpu(&cgroup, &resources().cpu).unwrap();
        let bytes = ((256_u64 + 2 + 128 + 1) << 20).to_string();
        let is_limited = |directory: &Directory| {
            ["memory.max", "memory.limit_in_bytes"].iter().any(|file| {
                fs::read_to_string(directory.path.join(file)).is_ok_and(|text| text.trim() == bytes)
            })
        };
        assert!(cgroup.directories.iter().any(is_limited));
        journal.undo().unwrap();
    }
}
