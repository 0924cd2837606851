//! The OCI runtime spec of a container: every field is honoured, or refused by its name.
//!
//! Unknown properties are ignored, as the runtime-spec demands ("Extensibility").

mod capabilities;
mod config_json;
mod devices;
mod error;
mod id_mappings;
mod mounts;
mod resources;
mod scheduler;
mod seccomp;
mod sysctl;
mod unsupported;
mod update;

use std::{
    mem,
    path::{Path, PathBuf},
};

use oci_spec::runtime::{
    IOPriorityClass, Linux, LinuxNamespaceType, LinuxPersonality, LinuxPersonalityDomain, PosixRlimit,
};

use self::config_json::{Process, Spec};
pub use self::{
    error::SpecError,
    update::{Present, Update, resolve_update},
};
use crate::{
    cgroup::Setting,
    device_filter,
    stage_config::{CommonConfig, InitConfig, PAUSE, ProcessConfig, RootfsConfig, WindowSize},
    syscall::BpfInstruction,
};

/// A checked spec.
#[derive(Debug)]
pub struct Resolved {
    /// The configuration of the container's init.
    pub init: InitConfig,
    /// The settings of the container's cgroup. They are written in this order.
    pub settings: Vec<Setting>,
    /// The huge pages that are to be set aside for the container.
    pub huge_pages: u64,
    /// Which devices the container's cgroup may use.
    pub device_program: Vec<BpfInstruction>,
    /// Whether the container has a pid namespace of its own, whose processes end with its init.
    pub own_pid_namespace: bool,
    /// Parameters of the interfaces in the container's own network namespace, which come there after its creation:
    /// files below /proc/sys, and what to write in them.
    pub interface_sysctls: Vec<(PathBuf, String)>,
}

/// What a container shares with its pod.
#[derive(Debug, Default, Clone)]
pub struct PodSharing {
    /// Namespaces of other containers that it lives in, as `CLONE_NEW*` bits.
    pub joined: u64,
    /// Whether it is the sandbox container, which has no files and no program of its own.
    pub is_pause: bool,
    /// Name of the session keyring of its processes.
    pub session_keyring: Option<String>,
}

/// Checks and resolves a config.json for a container whose cgroup is `cgroup_dir`.
pub fn resolve(json: &[u8], cgroup_dir: &Path, place: PodSharing) -> Result<Resolved, SpecError> {
    let spec: Spec = serde_json::from_slice(json)?;
    if !spec.oci_version.starts_with("1.") {
        let reason = format!("version {:?} is none of 1.x", spec.oci_version);
        return Err(SpecError::invalid("ociVersion", reason));
    }
    let Some(process) = &spec.process else {
        return Err(SpecError::invalid("process", "must be set".into()));
    };
    let Some(linux) = &spec.linux else {
        return Err(SpecError::invalid("linux", "must be set".into()));
    };
    unsupported::check(&spec, process, linux)?;

    let namespaces = namespaces(linux)?;
    if namespaces.bits & place.joined != 0 {
        let reason = "a namespace is both new and that of another container".into();
        return Err(SpecError::invalid("linux.namespaces", reason));
    }
    // The guest's own stay as they are.
    let of_pod = namespaces.bits | place.joined;
    let sysctls = match linux.sysctl() {
        Some(sysctls) => sysctl::resolve(sysctls, of_pod)?,
        None => Vec::new(),
    };
    let interfaces_are_there = namespaces.bits & libc::CLONE_NEWNET as u64 == 0;
    let (interface_sysctls, sysctls) =
        sysctls.into_iter().partition(|(path, _)| !interfaces_are_there && sysctl::is_of_interfaces(path));
    for (field, name) in [("hostname", &spec.hostname), ("domainname", &spec.domainname)] {
        if filled(name).is_some() && of_pod & libc::CLONE_NEWUTS as u64 == 0 {
            return Err(SpecError::invalid(field, "needs a uts namespace of the container's own".into()));
        }
    }
    let common = CommonConfig {
        seccomp: linux.seccomp().as_ref().map(seccomp::resolve).transpose()?,
        personality: linux.personality().as_ref().map(personality).transpose()?,
        session_keyring: place.session_keyring,
        ids: id_mappings::resolve(linux, of_pod & libc::CLONE_NEWUSER as u64 != 0)?,
        apparmor_profile: filled(&process.apparmor_profile).filter(is_profile),
    };
    let (rootfs, process) = if place.is_pause {
        (None, pause(process, common)?)
    } else {
        (Some(rootfs(&spec, linux)?), process_config(process, common)?)
    };
    let init = InitConfig {
        cgroup_dir: cgroup_dir.to_owned(),
        joined: Vec::new(),
        pid_namespace: None,
        namespaces: namespaces.bits,
        cgroup_namespace: namespaces.cgroup,
        time_offsets: time_offsets(linux, namespaces.time)?,
        hostname: filled(&spec.hostname),
        domainname: filled(&spec.domainname),
        sysctls,
        rootfs,
        process,
    };
    let resources = linux.resources().clone().unwrap_or_default();
    Ok(Resolved {
        init,
        settings: resources::settings(&resources)?,
        huge_pages: resources::huge_pages(&resources).unwrap_or(0),
        device_program: device_filter::generate(
            resources.devices().as_deref().unwrap_or_default(),
            device_filter::disks(),
        )?,
        own_pid_namespace: namespaces.bits & libc::CLONE_NEWPID as u64 != 0,
        interface_sysctls,
    })
}

/// Checks and resolves the `process` object of a process that joins a running container, whose processes have this in
/// common.
pub fn resolve_exec(json: &[u8], common: CommonConfig) -> Result<ProcessConfig, SpecError> {
    let process: Process = serde_json::from_slice(json)?;
    unsupported::check_exec(&process)?;
    let apparmor_profile = match filled(&process.apparmor_profile) {
        Some(profile) => Some(profile).filter(is_profile),
        None => common.apparmor_profile,
    };
    process_config(&process, CommonConfig { apparmor_profile, ..common })
}

/// Whether it is the name of a profile, and not the word for none.
fn is_profile(name: &String) -> bool {
    name != "unconfined"
}

/// The process of a container that holds the pod: what the spec says of its user and limits stays.
fn pause(process: &Process, common: CommonConfig) -> Result<ProcessConfig, SpecError> {
    // A profile takes effect when a program is executed, and pause executes none. containerd asks for no profile here.
    if common.apparmor_profile.is_some() {
        return Err(SpecError::unimplemented("process.apparmorProfile of a pod's sandbox container"));
    }
    let args = Some(vec![PAUSE.into()]);
    process_config(&Process { args, env: None, cwd: "/".into(), terminal: None, ..process.clone() }, common)
}

/// The bit of a namespace that containers can share, by its name in the spec.
pub fn shared_namespace(kind: &str) -> Result<u64, SpecError> {
    match kind {
        "pid" => Ok(libc::CLONE_NEWPID as u64),
        "network" => Ok(libc::CLONE_NEWNET as u64),
        "ipc" => Ok(libc::CLONE_NEWIPC as u64),
        "uts" => Ok(libc::CLONE_NEWUTS as u64),
        "user" => Ok(libc::CLONE_NEWUSER as u64),
        other => Err(SpecError::unimplemented(format!("joining a namespace of kind {other:?}"))),
    }
}

/// A name that is there and not empty: Go writes an empty string for one that was not given.
fn filled(name: &Option<String>) -> Option<String> {
    name.clone().filter(|name| !name.is_empty())
}

struct Namespaces {
    bits: u64,
    cgroup: bool,
    time: bool,
}

fn namespaces(linux: &Linux) -> Result<Namespaces, SpecError> {
    let mut found = Namespaces { bits: 0, cgroup: false, time: false };
    for namespace in linux.namespaces().iter().flatten() {
        let kind = namespace.typ();
        let (name, bit) = match kind {
            LinuxNamespaceType::Mount => ("mount", libc::CLONE_NEWNS),
            LinuxNamespaceType::Uts => ("uts", libc::CLONE_NEWUTS),
            LinuxNamespaceType::Ipc => ("ipc", libc::CLONE_NEWIPC),
            LinuxNamespaceType::Pid => ("pid", libc::CLONE_NEWPID),
            LinuxNamespaceType::Network => ("network", libc::CLONE_NEWNET),
            LinuxNamespaceType::Cgroup => ("cgroup", 0),
            LinuxNamespaceType::User => ("user", libc::CLONE_NEWUSER),
            LinuxNamespaceType::Time => ("time", 0),
        };
        let (field, bit) = (format!("linux.namespaces[{name}]"), bit as u64);
        if namespace.path().as_ref().is_some_and(|path| !path.as_os_str().is_empty()) {
            return Err(SpecError::unimplemented(format!("{field}.path")));
        }
        let twice = match kind {
            LinuxNamespaceType::Cgroup => mem::replace(&mut found.cgroup, true),
            LinuxNamespaceType::Time => mem::replace(&mut found.time, true),
            _ => found.bits & bit != 0,
        };
        if twice {
            return Err(SpecError::invalid(&field, "is given twice".into()));
        }
        found.bits |= bit;
    }
    if found.bits & libc::CLONE_NEWNS as u64 == 0 {
        return Err(SpecError::unimplemented("linux.namespaces without a mount namespace"));
    }
    Ok(found)
}

/// The offsets of the clocks of a time namespace, in the order of their names.
fn time_offsets(linux: &Linux, is_own: bool) -> Result<Option<String>, SpecError> {
    const FIELD: &str = "linux.timeOffsets";
    let mut clocks: Vec<_> = linux.time_offsets().iter().flatten().collect();
    if !is_own {
        let reason = || SpecError::invalid(FIELD, "needs a time namespace of the container's own".into());
        return if clocks.is_empty() { Ok(None) } else { Err(reason()) };
    }
    clocks.sort_unstable_by_key(|(clock, _)| *clock);
    let mut lines = String::new();
    for (clock, offset) in clocks {
        if !["boottime", "monotonic"].contains(&clock.as_str()) {
            return Err(SpecError::invalid(FIELD, format!("{clock:?} is neither boottime nor monotonic")));
        }
        let (seconds, nanoseconds) = (offset.secs().unwrap_or(0), offset.nanosecs().unwrap_or(0));
        lines += &format!("{clock} {seconds} {nanoseconds}\n");
    }
    Ok(Some(lines))
}

fn rootfs(spec: &Spec, linux: &Linux) -> Result<RootfsConfig, SpecError> {
    let Some(root) = &spec.root else {
        return Err(SpecError::invalid("root", "must be set".into()));
    };
    if !root.path.is_absolute() {
        let reason = format!("must be an absolute path of the guest, not {:?}", root.path.display());
        return Err(SpecError::invalid("root.path", reason));
    }
    let propagation = match linux.rootfs_propagation().as_deref() {
        None | Some("") => None,
        Some(name) => Some(mounts::propagation(name).ok_or_else(|| {
            SpecError::invalid("linux.rootfsPropagation", format!("{name:?} is no propagation type"))
        })?),
    };
    let mounts = spec
        .mounts
        .iter()
        .flatten()
        .enumerate()
        .map(|(index, mount)| mounts::resolve(index, mount))
        .collect::<Result<Vec<_>, _>>()?;
    let dev_links = !mounts::is_dev_bound(&mounts);
    let mut devices = if dev_links { devices::default_nodes() } else { Vec::new() };
    devices.extend(devices::resolve(linux.devices().as_deref().unwrap_or_default())?);
    Ok(RootfsConfig {
        path: root.path.clone(),
        ids: id_mappings::of_mount("root.uidMappings", &root.uid_mappings, &root.gid_mappings)?,
        readonly: root.readonly,
        propagation,
        mounts,
        proc: None,
        devices,
        dev_links,
        masked_paths: absolute_paths("linux.maskedPaths", linux.masked_paths())?,
        readonly_paths: absolute_paths("linux.readonlyPaths", linux.readonly_paths())?,
    })
}

fn absolute_paths(field: &str, paths: &Option<Vec<String>>) -> Result<Vec<PathBuf>, SpecError> {
    paths
        .iter()
        .flatten()
        .map(|path| {
            let path = PathBuf::from(path);
            if path.is_absolute() {
                Ok(path)
            } else {
                Err(SpecError::invalid(field, format!("{:?} is not an absolute path", path.display())))
            }
        })
        .collect()
}

fn process_config(process: &Process, common: CommonConfig) -> Result<ProcessConfig, SpecError> {
    let args = process.args.clone().unwrap_or_default();
    if args.first().is_none_or(String::is_empty) {
        return Err(SpecError::invalid("process.args", "must name a program".into()));
    }
    if !process.cwd.is_absolute() {
        let reason = format!("must be an absolute path, not {:?}", process.cwd.display());
        return Err(SpecError::invalid("process.cwd", reason));
    }
    let env = process.env.clone().unwrap_or_default();
    if args.iter().chain(&env).any(|word| word.contains('\0')) {
        return Err(SpecError::invalid("process.args or process.env", "contains a NUL".into()));
    }
    let oom_score_adj = process.oom_score_adj.unwrap_or(0);
    if !(-1000..=1000).contains(&oom_score_adj) {
        let reason = format!("{oom_score_adj} is not within -1000..=1000");
        return Err(SpecError::invalid("process.oomScoreAdj", reason));
    }
    let user = &process.user;
    Ok(ProcessConfig {
        args,
        env,
        cwd: process.cwd.clone(),
        uid: user.uid(),
        gid: user.gid(),
        additional_gids: user.additional_gids().clone().unwrap_or_default(),
        umask: user.umask().unwrap_or(0o022),
        rlimits: rlimits(process)?,
        capabilities: capabilities::masks(process.capabilities.as_ref()),
        no_new_privileges: process.no_new_privileges.unwrap_or(false),
        oom_score_adj,
        io_priority: io_priority(process)?,
        terminal: terminal(process)?,
        scheduler: process.scheduler.as_ref().map(scheduler::resolve).transpose()?,
        common,
    })
}

fn personality(wanted: &LinuxPersonality) -> Result<u64, SpecError> {
    // From linux/personality.h.
    const PER_LINUX: u64 = 0;
    const PER_LINUX32: u64 = 8;
    // runtime-spec: no flag is defined.
    if wanted.flags().as_ref().is_some_and(|flags| !flags.is_empty()) {
        return Err(SpecError::unimplemented("linux.personality.flags"));
    }
    Ok(match wanted.domain() {
        LinuxPersonalityDomain::PerLinux => PER_LINUX,
        LinuxPersonalityDomain::PerLinux32 => PER_LINUX32,
    })
}

/// `consoleSize` means nothing without a terminal (runtime-spec, config.md, "Process").
fn terminal(process: &Process) -> Result<Option<WindowSize>, SpecError> {
    if !process.terminal.unwrap_or(false) {
        return Ok(None);
    }
    let Some(size) = process.console_size else { return Ok(Some(WindowSize::default())) };
    match (u16::try_from(size.width()), u16::try_from(size.height())) {
        (Ok(width), Ok(height)) => Ok(Some(WindowSize { width, height })),
        _ => {
            let reason = format!("{} x {} is more than a terminal can have", size.width(), size.height());
            Err(SpecError::invalid("process.consoleSize", reason))
        }
    }
}

fn rlimits(process: &Process) -> Result<Vec<PosixRlimit>, SpecError> {
    let mut limits: Vec<PosixRlimit> = Vec::new();
    for limit in process.rlimits.iter().flatten() {
        let field = format!("process.rlimits[{}]", limit.typ());
        if limits.iter().any(|seen| seen.typ() == limit.typ()) {
            return Err(SpecError::invalid(&field, "is given twice".into()));
        }
        if limit.soft() > limit.hard() {
            let reason = format!("soft limit {} is above hard limit {}", limit.soft(), limit.hard());
            return Err(SpecError::invalid(&field, reason));
        }
        limits.push(*limit);
    }
    Ok(limits)
}

fn io_priority(process: &Process) -> Result<Option<(u8, u8)>, SpecError> {
    let Some(wanted) = &process.io_priority else { return Ok(None) };
    let class = match wanted.class() {
        IOPriorityClass::IoprioClassRt => 1,
        IOPriorityClass::IoprioClassBe => 2,
        IOPriorityClass::IoprioClassIdle => 3,
    };
    match u8::try_from(wanted.priority()) {
        Ok(priority @ 0..=7) => Ok(Some((class, priority))),
        _ => {
            let reason = format!("priority {} is not within 0..=7", wanted.priority());
            Err(SpecError::invalid("process.ioPriority", reason))
        }
    }
}

#[cfg(test)]
mod tests;
