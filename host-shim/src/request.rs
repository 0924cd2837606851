//! A create request: what containerd and the bundle's config.json ask for, checked whole before anything is done.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use bulkhead_agent_api::SHARE_DIR;
use containerd_shim_protos::api;
use oci_spec::runtime::{LinuxNamespace, LinuxNamespaceType};
use serde_json::Value;

use crate::{
    rootfs::{BindMount, Mount, Rootfs},
    spec::{Linux, Spec},
    stdio::{Endpoint, EndpointError},
};

/// Memory that the guest's kernel and agent need beside the container's own limit.
const GUEST_OVERHEAD_MIB: u64 = 64;

const MIB: u64 = 1 << 20;

/// A create request that can be carried out.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) id: String,
    pub(crate) bundle: PathBuf,
    pub(crate) stdio: StdioPlan,
    pub(crate) rootfs: Rootfs,
    pub(crate) binds: Vec<BindMount>,
    /// The network namespace that the spec gives. None: a new one.
    pub(crate) netns: Option<PathBuf>,
    /// `linux.cgroupsPath`, or one of ours.
    pub(crate) cgroup: PathBuf,
    /// The spec's, or the host's as a new uts namespace would have it.
    pub(crate) hostname: String,
    /// The spec as the agent gets it.
    pub(crate) spec_json: Vec<u8>,
    /// Of the container, bytes.
    pub(crate) memory_limit: Option<u64>,
}

/// An exec request that can be carried out.
#[derive(Debug)]
pub(crate) struct ExecPlan {
    pub(crate) stdio: StdioPlan,
    /// `process` of the OCI runtime-spec, as the agent gets it.
    pub(crate) process_json: Vec<u8>,
}

/// Where the streams of a process go.
#[derive(Debug, Clone, Default)]
pub(crate) struct StdioPlan {
    pub(crate) stdin: Endpoint,
    pub(crate) stdout: Endpoint,
    pub(crate) stderr: Endpoint,
}

/// Why a request cannot be carried out.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RequestError {
    #[error("{what} is not implemented{hint}")]
    Unimplemented { what: String, hint: &'static str },
    #[error("{field}: {reason}")]
    Invalid { field: String, reason: String },
    #[error("cannot read {path}")]
    Read { path: PathBuf, source: io::Error },
    #[error("cannot parse {path}")]
    Parse { path: PathBuf, source: serde_json::Error },
    #[error(transparent)]
    Endpoint(#[from] EndpointError),
}

impl Plan {
    /// Reads the bundle's config.json and checks it together with the request.
    pub(crate) fn read(request: &api::CreateTaskRequest) -> Result<Self, RequestError> {
        let bundle = PathBuf::from(&request.bundle);
        let path = bundle.join("config.json");
        let bytes = fs::read(&path).map_err(|source| RequestError::Read { path: path.clone(), source })?;
        let parse = |source| RequestError::Parse { path: path.clone(), source };
        let spec: Spec = serde_json::from_slice(&bytes).map_err(parse)?;
        let mut document: Value = serde_json::from_slice(&bytes).map_err(parse)?;

        refuse(request, &spec)?;
        let rootfs = rootfs(request, &spec, &bundle)?;
        let binds = binds(&spec, &bundle)?;
        adapt(&mut document, &request.id, &binds);
        Ok(Self {
            id: request.id.clone(),
            bundle,
            stdio: StdioPlan::parse(&request.stdin, &request.stdout, &request.stderr)?,
            rootfs,
            binds,
            netns: given_netns(&spec),
            cgroup: cgroup(&spec, &request.id)?,
            hostname: spec.hostname.clone().unwrap_or_else(host_name),
            memory_limit: memory_limit(&spec),
            spec_json: serde_json::to_vec(&document).map_err(parse)?,
        })
    }

    /// MiB of the VM: the configured size, or more where the container's limit asks for it, as far as the host goes.
    pub(crate) fn memory_mib(&self, configured: u32, host_mib: u64) -> u32 {
        let wanted = self.memory_limit.map_or(0, |limit| limit.div_ceil(MIB) + GUEST_OVERHEAD_MIB);
        let possible = u32::try_from(wanted.min(host_mib)).unwrap_or(u32::MAX);
        possible.max(configured)
    }
}

impl ExecPlan {
    /// Checks what the shim sees to; what is in the process is for the agent to honour or to refuse.
    pub(crate) fn read(request: &api::ExecProcessRequest) -> Result<Self, RequestError> {
        if request.terminal {
            return Err(terminal());
        }
        Ok(Self {
            stdio: StdioPlan::parse(&request.stdin, &request.stdout, &request.stderr)?,
            process_json: request.spec.get_or_default().value.clone(),
        })
    }
}

impl StdioPlan {
    fn parse(stdin: &str, stdout: &str, stderr: &str) -> Result<Self, EndpointError> {
        Ok(Self {
            stdin: Endpoint::parse("stdin", stdin)?,
            stdout: Endpoint::parse("stdout", stdout)?,
            stderr: Endpoint::parse("stderr", stderr)?,
        })
    }
}

fn terminal() -> RequestError {
    unimplemented("process.terminal (a tty)", "; run without -t")
}

fn unimplemented(what: impl Into<String>, hint: &'static str) -> RequestError {
    RequestError::Unimplemented { what: what.into(), hint }
}

fn invalid(field: impl Into<String>, reason: impl Into<String>) -> RequestError {
    RequestError::Invalid { field: field.into(), reason: reason.into() }
}

/// Names what was asked for and cannot be done, so that nothing is dropped in silence.
fn refuse(request: &api::CreateTaskRequest, spec: &Spec) -> Result<(), RequestError> {
    let process = spec.process.as_ref().ok_or_else(|| invalid("process", "is missing"))?;
    if request.terminal || process.terminal {
        return Err(terminal());
    }
    if !request.checkpoint.is_empty() || !request.parent_checkpoint.is_empty() {
        return Err(unimplemented("restoring from a checkpoint", ""));
    }
    if let Some(kind) = spec.annotations.get("io.kubernetes.cri.container-type") {
        return Err(unimplemented(
            format!("pods (annotation io.kubernetes.cri.container-type = {kind})"),
            "; run single containers",
        ));
    }
    if spec.vm.is_some() {
        return Err(unimplemented("vm (of the spec)", "; set the kernel in the runtime's configuration"));
    }
    refuse_hooks(spec)?;
    refuse_namespaces(spec)
}

fn refuse_hooks(spec: &Spec) -> Result<(), RequestError> {
    let Some(hooks) = &spec.hooks else { return Ok(()) };
    #[allow(deprecated)]
    let kinds = [
        ("prestart", hooks.prestart()),
        ("createRuntime", hooks.create_runtime()),
        ("createContainer", hooks.create_container()),
        ("startContainer", hooks.start_container()),
        ("poststart", hooks.poststart()),
        ("poststop", hooks.poststop()),
    ];
    match kinds.iter().find(|(_, hooks)| hooks.as_ref().is_some_and(|hooks| !hooks.is_empty())) {
        Some((name, _)) => Err(unimplemented(format!("hooks.{name}"), "")),
        None => Ok(()),
    }
}

/// A VM shares no namespace with its host, nor with a container outside of it.
fn refuse_namespaces(spec: &Spec) -> Result<(), RequestError> {
    let Linux { namespaces, .. } = spec.linux.as_ref().ok_or_else(|| invalid("linux", "is missing"))?;
    let given = |namespace: &&LinuxNamespace| {
        namespace.path().is_some() && namespace.typ() != LinuxNamespaceType::Network
    };
    if let Some(namespace) = namespaces.iter().find(given) {
        let path = namespace.path().clone().unwrap_or_default();
        return Err(unimplemented(
            format!(
                "joining the {} namespace {} (linux.namespaces)",
                name_of(namespace.typ()),
                path.display()
            ),
            "",
        ));
    }
    for (kind, hint) in [
        (LinuxNamespaceType::Network, " in a microVM; run without --net-host"),
        (LinuxNamespaceType::Pid, " in a microVM; ask for a pid namespace"),
        (LinuxNamespaceType::Ipc, " in a microVM; ask for an ipc namespace"),
        (LinuxNamespaceType::Uts, " in a microVM; ask for a uts namespace"),
        (LinuxNamespaceType::Mount, " in a microVM; ask for a mount namespace"),
    ] {
        if !namespaces.iter().any(|namespace| namespace.typ() == kind) {
            return Err(unimplemented(
                format!("the host's {} namespace (linux.namespaces has none of its own)", name_of(kind)),
                hint,
            ));
        }
    }
    Ok(())
}

/// The VMM joins it; what is in it, the guest's own network namespace gets.
fn given_netns(spec: &Spec) -> Option<PathBuf> {
    let namespaces = spec.linux.as_ref().map(|linux| linux.namespaces.as_slice()).unwrap_or_default();
    let network = namespaces.iter().find(|namespace| namespace.typ() == LinuxNamespaceType::Network);
    network.and_then(|network| network.path().clone()).filter(|path| !path.as_os_str().is_empty())
}

/// As the spec writes it.
fn name_of(kind: LinuxNamespaceType) -> &'static str {
    match kind {
        LinuxNamespaceType::Mount => "mount",
        LinuxNamespaceType::Cgroup => "cgroup",
        LinuxNamespaceType::Uts => "uts",
        LinuxNamespaceType::Ipc => "ipc",
        LinuxNamespaceType::User => "user",
        LinuxNamespaceType::Pid => "pid",
        LinuxNamespaceType::Network => "network",
        LinuxNamespaceType::Time => "time",
    }
}

fn rootfs(request: &api::CreateTaskRequest, spec: &Spec, bundle: &Path) -> Result<Rootfs, RequestError> {
    if request.rootfs.is_empty() {
        let root = spec.root.as_ref().ok_or_else(|| invalid("root", "is missing"))?;
        return Ok(Rootfs::Directory(bundle.join(root.path())));
    }
    let mounts = request.rootfs.iter().enumerate().map(|(index, mount)| {
        if !mount.target.is_empty() {
            return Err(unimplemented(format!("rootfs[{index}].target {:?}", mount.target), ""));
        }
        Ok(Mount { kind: mount.type_.clone(), source: mount.source.clone(), options: mount.options.clone() })
    });
    Ok(Rootfs::Mounts(mounts.collect::<Result<_, _>>()?))
}

fn binds(spec: &Spec, bundle: &Path) -> Result<Vec<BindMount>, RequestError> {
    let mut binds = Vec::new();
    for (index, mount) in spec.mounts.iter().enumerate() {
        let options = mount.options().as_deref().unwrap_or_default();
        let has = |name: &str| options.iter().any(|option| option == name);
        if mount.typ().as_deref() != Some("bind") && !has("bind") && !has("rbind") {
            continue;
        }
        let source = mount
            .source()
            .as_ref()
            .ok_or_else(|| invalid(format!("mounts[{index}].source"), "is missing for a bind mount"))?;
        binds.push(BindMount {
            index,
            source: bundle.join(source),
            recursive: has("rbind"),
            read_only: has("ro"),
        });
    }
    Ok(binds)
}

fn cgroup(spec: &Spec, id: &str) -> Result<PathBuf, RequestError> {
    let path = spec.linux.as_ref().map(|linux| linux.cgroups_path.clone()).unwrap_or_default();
    if path.as_os_str().is_empty() {
        return Ok(Path::new("/bulkhead").join(id));
    }
    // The form of the systemd cgroup driver, slice:prefix:name.
    if path.to_string_lossy().matches(':').count() == 2 {
        return Err(unimplemented(
            format!("linux.cgroupsPath {path:?} of the systemd cgroup driver"),
            "; use the cgroupfs driver (SystemdCgroup = false)",
        ));
    }
    Ok(path)
}

/// What a container without a hostname of its own is called on runc.
fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Bytes; none where the spec says "unlimited" (OCI runtime-spec, memory: -1).
fn memory_limit(spec: &Spec) -> Option<u64> {
    let limit = spec.linux.as_ref()?.resources.memory.limit?;
    u64::try_from(limit).ok().filter(|limit| *limit > 0)
}

/// Rewrites what names the host. Works on the document, not on our types, which know few of its fields.
fn adapt(document: &mut Value, id: &str, binds: &[BindMount]) {
    let share = format!("{SHARE_DIR}/{id}");
    let read_only = document.pointer("/root/readonly").cloned().unwrap_or(Value::Bool(false));
    document["root"] = serde_json::json!({ "path": format!("{share}/rootfs"), "readonly": read_only });
    for bind in binds {
        document["mounts"][bind.index]["source"] = format!("{share}/mounts/{}", bind.index).into();
    }
    // It names a cgroup of the host; in the guest the agent chooses.
    if let Some(linux) = document.get_mut("linux").and_then(Value::as_object_mut) {
        linux.remove("cgroupsPath");
        // They name namespaces of the host.
        for namespace in linux.get_mut("namespaces").and_then(Value::as_array_mut).into_iter().flatten() {
            namespace.as_object_mut().and_then(|namespace| namespace.remove("path"));
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn spec() -> Value {
        json!({
            "ociVersion": "1.1.0",
            "process": {"user": {"uid": 0, "gid": 0}, "args": ["true"], "cwd": "/"},
            "root": {"path": "rootfs", "readonly": true},
            "hostname": "demo",
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                {"destination": "/data", "type": "bind", "source": "/srv/data", "options": ["rbind", "ro"]},
                {"destination": "/f", "type": "none", "source": "file", "options": ["bind"]},
            ],
            "linux": {
                "cgroupsPath": "/default/demo",
                "resources": {"memory": {"limit": 536870912}, "unified": {"memory.high": "1"}},
                "namespaces": [
                    {"type": "pid"}, {"type": "ipc"}, {"type": "uts"}, {"type": "mount"}, {"type": "network"}
                ],
                "futureField": 7,
            },
        })
    }

    fn read_with(
        spec: &Value,
        change: impl FnOnce(&mut api::CreateTaskRequest),
    ) -> Result<Plan, RequestError> {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("config.json"), spec.to_string()).unwrap();
        let mut request = api::CreateTaskRequest::new();
        request.id = "demo".into();
        request.bundle = dir.path().display().to_string();
        change(&mut request);
        Plan::read(&request)
    }

    fn error_of(path: &str, value: Value) -> String {
        let mut spec = spec();
        match path.rsplit_once('/') {
            Some((parent, key)) => spec.pointer_mut(parent).unwrap()[key] = value,
            None => spec[path] = value,
        }
        read_with(&spec, |_| {}).unwrap_err().to_string()
    }

    #[test]
    fn the_guest_gets_its_own_paths_and_everything_else() {
        let plan = read_with(&spec(), |_| {}).unwrap();
        let given: Value = serde_json::from_slice(&plan.spec_json).unwrap();
        assert_eq!(given["root"], json!({"path": "/run/bulkhead/share/demo/rootfs", "readonly": true}));
        assert_eq!(given["mounts"][0]["source"], "proc");
        assert_eq!(given["mounts"][1]["source"], "/run/bulkhead/share/demo/mounts/1");
        assert_eq!(given["mounts"][2]["source"], "/run/bulkhead/share/demo/mounts/2");
        assert_eq!(given["linux"].get("cgroupsPath"), None);
        assert_eq!(given["linux"]["futureField"], 7);
        assert_eq!(given["linux"]["resources"]["unified"]["memory.high"], "1");
        assert_eq!(plan.cgroup, Path::new("/default/demo"));
        assert_eq!(plan.hostname, "demo");
        assert_eq!(plan.rootfs, Rootfs::Directory(plan.bundle.join("rootfs")));
    }

    #[test]
    fn a_network_namespace_is_the_hosts_to_join() {
        let mut spec = spec();
        assert_eq!(read_with(&spec, |_| {}).unwrap().netns, None);
        spec["linux"]["namespaces"][4] = json!({"type": "network", "path": "/run/netns/x"});
        let plan = read_with(&spec, |_| {}).unwrap();
        assert_eq!(plan.netns, Some("/run/netns/x".into()));
        let given: Value = serde_json::from_slice(&plan.spec_json).unwrap();
        assert_eq!(given["linux"]["namespaces"][4], json!({"type": "network"}));
    }

    #[test]
    fn bind_mounts_come_from_the_host() {
        let plan = read_with(&spec(), |_| {}).unwrap();
        assert_eq!(
            plan.binds,
            [
                BindMount { index: 1, source: "/srv/data".into(), recursive: true, read_only: true },
                BindMount { index: 2, source: plan.bundle.join("file"), recursive: false, read_only: false },
            ]
        );
    }

    #[test]
    fn the_vm_grows_with_the_memory_limit() {
        let mut plan = read_with(&spec(), |_| {}).unwrap();
        assert_eq!(plan.memory_mib(256, 8192), 512 + 64);
        assert_eq!(plan.memory_mib(1024, 8192), 1024);
        assert_eq!(plan.memory_mib(256, 300), 300);
        plan.memory_limit = None;
        assert_eq!(plan.memory_mib(256, 8192), 256);
        plan.memory_limit = Some(u64::MAX);
        assert_eq!(plan.memory_mib(256, 8192), 8192);
    }

    #[test]
    fn what_is_not_implemented_is_refused_by_name() {
        let namespaces = |list: &[Value]| Value::Array(list.to_vec());
        let own: Vec<_> = ["pid", "ipc", "uts", "mount"].iter().map(|kind| json!({ "type": kind })).collect();
        let joined = [own.clone(), vec![json!({"type": "ipc", "path": "/run/ipcns/x"})]].concat();
        for (path, value, expected) in [
            ("/process/terminal", json!(true), "process.terminal (a tty) is not implemented"),
            ("hooks", json!({"poststop": [{"path": "/bin/true"}]}), "hooks.poststop is not implemented"),
            ("/linux/namespaces", namespaces(&own), "the host's network namespace"),
            ("/linux/namespaces", namespaces(&joined), "joining the ipc namespace /run/ipcns/x"),
            (
                "/linux/cgroupsPath",
                json!("system.slice:cri:demo"),
                "linux.cgroupsPath \"system.slice:cri:demo\"",
            ),
            ("annotations", json!({"io.kubernetes.cri.container-type": "sandbox"}), "pods (annotation"),
        ] {
            let error = error_of(path, value);
            assert!(error.starts_with(expected) && error.contains("is not implemented"), "{error}");
        }
        let error = read_with(&spec(), |request| request.checkpoint = "/c".into()).unwrap_err();
        assert_eq!(error.to_string(), "restoring from a checkpoint is not implemented");
        let error = read_with(&spec(), |request| request.stdout = "binary:///bin/logger".into()).unwrap_err();
        assert!(error.to_string().contains("binary:///bin/logger"), "{error}");
    }

    #[test]
    fn what_is_wrong_is_named() {
        assert_eq!(error_of("process", Value::Null), "process: is missing");
        let mut request = api::CreateTaskRequest::new();
        request.bundle = "/nonexistent/bundle".into();
        let error = Plan::read(&request).unwrap_err();
        assert_eq!(error.to_string(), "cannot read /nonexistent/bundle/config.json");
    }

    #[test]
    fn the_snapshotters_mounts_are_the_root() {
        let plan = read_with(&spec(), |request| {
            let mut mount = containerd_shim_protos::types::mount::Mount::new();
            mount.type_ = "bind".into();
            mount.source = "/snapshot/1/fs".into();
            mount.options = vec!["rw".into(), "rbind".into()];
            request.rootfs.push(mount);
        })
        .unwrap();
        let Rootfs::Mounts(mounts) = plan.rootfs else { panic!("not mounts") };
        assert_eq!((mounts[0].kind.as_str(), mounts[0].source.as_str()), ("bind", "/snapshot/1/fs"));
    }
}
