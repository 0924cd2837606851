//! A create request: what containerd and the bundle's config.json ask for, checked whole before anything is done.

use std::{
    collections::{BTreeMap, HashMap},
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};

use bulkhead_agent_api::{ROOTS_DIR, SHARE_DIR, SHM_DIR, VOLUMES_DIR};
use bulkhead_vmm_api::ROOTFS;
use containerd_shim_protos::{api, sandbox_api::CreateSandboxRequest};
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::Value;

use crate::{
    host::{
        apparmor::Policy,
        cgroup_io::IoLimit,
        device_node::{DeviceNode, NODES},
        hooks::Hooks,
        kubelet_volumes::{self, Budget, KubeletVolume, VolumeError},
        memory,
        memory_volumes::{self, MemoryVolume},
        rootfs::{BindMount, DiskRoot, Mount, Propagation, ReadOnly, Rootfs},
        sandbox_files,
    },
    pod::{
        block_io,
        container_role::{self, Joined, Role, is_dockers},
        cri::SandboxConfig,
        device_mounts,
        devices::{self, Disk, ThisHost},
        huge_pages::{self, HugePagesMount},
        tmpfs_sizes,
    },
    types::{
        annotations,
        error::chain,
        id_mappings::IdMappings,
        options::Options,
        request_error::{RequestError, invalid, unimplemented},
        spec::{Linux, Resources, Spec, edit_json, is_bind},
        stdio_endpoint::StdioPlan,
        terminal,
    },
};

/// A create request that can be carried out.
#[derive(Debug)]
pub(crate) struct CreatePlan {
    pub(crate) id: String,
    pub(crate) hooks: Arc<Hooks>,
    pub(crate) role: Role,
    /// Namespaces of other containers that it lives in.
    pub(crate) joined: Vec<Joined>,
    pub(crate) stdio: StdioPlan,
    /// None for a sandbox container, which needs no files.
    pub(crate) rootfs: Option<Rootfs>,
    /// The ids of the root that are others in the container. The agent maps them.
    pub(crate) root_ids: Option<IdMappings>,
    /// The ids of its user namespace, if it has one.
    pub(crate) own_ids: Option<IdMappings>,
    pub(crate) binds: Vec<BindMount>,
    /// Volumes in memory, of which it gets the whole or a part.
    pub(crate) volumes: Vec<MemoryVolume>,
    /// A mount of huge pages, if the container's own limits say nothing of huge pages. The limit of the pod must.
    pub(crate) hugetlbfs: Option<HugePagesMount>,
    /// Block devices of the host that it gets.
    pub(crate) disks: Vec<Disk>,
    /// Volumes that kubelet keeps up to date, of which the guest has copies.
    pub(crate) copied: Vec<Arc<KubeletVolume>>,
    /// The network namespace that the spec gives. None: a new one.
    pub(crate) netns: Option<PathBuf>,
    /// `linux.cgroupsPath`, or a path below /bulkhead.
    pub(crate) cgroup: PathBuf,
    /// The spec's hostname, or the host's.
    pub(crate) hostname: String,
    /// The spec as the agent gets it.
    pub(crate) spec_json: Vec<u8>,
    /// The memory limit of the container, or for a sandbox that of all containers of the pod, bytes.
    pub(crate) memory_limit: Option<u64>,
    /// For a sandbox, the limit of the processor time of all containers of the pod, in millionths of a processor.
    pub(crate) pod_cpu_limit: Option<u64>,
    /// The container's own limits.
    pub(crate) resources: Resources,
    /// The limits of the pod's cgroup on block devices of the host.
    pub(crate) io_limits: Vec<IoLimit>,
    /// `process.oomScoreAdj`, by which the kernel compares processes when memory is short.
    pub(crate) oom_score_adj: i32,
    /// Its processes get no session keyring of their own.
    pub(crate) no_new_keyring: bool,
    /// The annotations by which the pod chooses values of the configuration, by their keys. They count in its first
    /// container.
    pub(crate) annotations: BTreeMap<String, String>,
    /// The policy of the AppArmor profile that confines it.
    pub(crate) apparmor: Option<Policy>,
}

/// The spec of a bundle.
struct Document {
    path: PathBuf,
    bytes: Vec<u8>,
}

/// What is to be created.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum CreateRequest {
    /// A container, as the Task service is asked.
    Task(api::CreateTaskRequest),
    /// The sandbox container of a pod, as the Sandbox service is asked. Its bundle has no spec.
    Sandbox { id: String, bundle: PathBuf, config: SandboxConfig },
}

impl CreateRequest {
    /// What a request to the Sandbox service asks for.
    pub(crate) fn sandbox(request: &CreateSandboxRequest) -> Result<Self, RequestError> {
        let config = SandboxConfig::read(request)?;
        Ok(Self::Sandbox {
            id: request.sandbox_id.clone(),
            bundle: request.bundle_path.clone().into(),
            config,
        })
    }

    pub(crate) fn id(&self) -> &str {
        match self {
            Self::Task(request) => &request.id,
            Self::Sandbox { id, .. } => id,
        }
    }

    pub(crate) fn bundle(&self) -> &Path {
        match self {
            Self::Task(request) => Path::new(&request.bundle),
            Self::Sandbox { bundle, .. } => bundle,
        }
    }

    /// The request for a task, if containerd has one for the container.
    pub(crate) fn task(&self) -> Option<&api::CreateTaskRequest> {
        match self {
            Self::Task(request) => Some(request),
            Self::Sandbox { .. } => None,
        }
    }
}

impl Document {
    fn read(bundle: &Path) -> Result<Self, RequestError> {
        let path = bundle.join("config.json");
        match fs::read(&path) {
            Ok(bytes) => Ok(Self { path, bytes }),
            Err(source) => Err(RequestError::Read { path, source }),
        }
    }

    fn parse<T: DeserializeOwned>(&self) -> Result<T, RequestError> {
        serde_json::from_slice(&self.bytes).map_err(|source| self.damaged(source))
    }

    fn mount_sandbox_files(&mut self, state: &Path) -> Result<(), RequestError> {
        let mut document: Value = self.parse()?;
        sandbox_files::mount_in(&mut document, state);
        self.bytes = serde_json::to_vec(&document).map_err(|source| self.damaged(source))?;
        Ok(())
    }

    fn damaged(&self, source: serde_json::Error) -> RequestError {
        RequestError::Parse { path: self.path.clone(), source }
    }
}

/// What the container of a bundle in this namespace of containerd is in its pod.
pub(crate) fn role(namespace: &str, bundle: &Path) -> Result<Role, RequestError> {
    /// Only the annotations are read here. Other errors in the spec are reported by Create, for which a shim must
    /// run.
    #[derive(Deserialize)]
    struct Annotated {
        #[serde(default)]
        annotations: HashMap<String, String>,
    }
    match Document::read(bundle) {
        Ok(document) => Role::of(namespace, &document.parse::<Annotated>()?.annotations),
        // A bundle of the Sandbox service has no spec.
        Err(RequestError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            Ok(Role::Sandbox)
        }
        Err(e) => Err(e),
    }
}

impl CreatePlan {
    /// Reads the bundle's config.json and checks it together with the request, which is made in this namespace of
    /// containerd. The container gets the pod's files that are in the pod's directory, if one is given. Copies of
    /// volumes take their part of the pod's budget.
    pub(crate) fn read(
        namespace: &str,
        creation: &CreateRequest,
        sandbox_files: Option<&Path>,
        budget: &Budget,
    ) -> Result<Self, RequestError> {
        let bundle = creation.bundle();
        let mut file = match creation {
            CreateRequest::Task(_) => Document::read(bundle)?,
            CreateRequest::Sandbox { config, .. } => {
                Document { path: bundle.to_owned(), bytes: config.spec.clone() }
            }
        };
        if let Some(state) = sandbox_files {
            file.mount_sandbox_files(state)?;
        }
        let mut spec: Spec = file.parse()?;
        let mut document: Value = file.parse()?;

        let role = match creation {
            CreateRequest::Task(_) => Role::of(namespace, &spec.annotations)?,
            CreateRequest::Sandbox { .. } => Role::Sandbox,
        };
        let mut guest_nodes = Vec::new();
        if role != Role::Sandbox
            && let Some(nodes) = device_mounts::replace(&mut document, bundle)?
        {
            guest_nodes = nodes;
            spec = Spec::deserialize(&document).map_err(|source| file.damaged(source))?;
        }
        tmpfs_sizes::write(&mut document, memory::total());
        let linux = spec.linux.as_ref().ok_or_else(|| invalid("linux", "is missing"))?;
        let stdio = match creation {
            CreateRequest::Task(request) => {
                refuse(request, &spec)?;
                StdioPlan::parse(request.terminal, &request.stdin, &request.stdout, &request.stderr)?
            }
            CreateRequest::Sandbox { .. } => StdioPlan::default(),
        };
        let (pod_memory_limit, pod_cpu_limit) = match role {
            Role::Sandbox => (
                container_role::memory_limit(&spec.annotations),
                container_role::cpu_limit(&spec.annotations),
            ),
            Role::Single | Role::Member { .. } => (None, None),
        };
        let options = options(creation)?;
        check_io_owner(options.io_owner, linux)?;
        let joined = container_role::joined(&role, creation.id(), &linux.namespaces)?;
        let (root, binds) = match (&role, creation) {
            (Role::Sandbox, _) | (_, CreateRequest::Sandbox { .. }) => (Root::default(), Binds::default()),
            (Role::Single | Role::Member { .. }, CreateRequest::Task(request)) => {
                (root(request, &spec, bundle, namespace)?, binds(&spec, bundle, &role, budget)?)
            }
        };
        let mut resources = linux.resources.clone();
        let hugetlbfs = huge_pages::ask(&mut document, &mut resources, &role, &binds.huge_pages)?;
        let io_limits = match role {
            Role::Single => block_io::take(&mut document["linux"]["resources"], &resources)?,
            Role::Sandbox | Role::Member { .. } => Vec::new(),
        };
        let disks = devices::fit(&mut document, linux, &ThisHost)?;
        device_mounts::add_missing(&mut document, guest_nodes);
        adapt(&mut document, creation.id(), &root, &binds, &joined);
        if !disks.is_empty() {
            open_no_nodes(&mut document, &binds.host);
        }
        Ok(Self {
            id: creation.id().into(),
            hooks: Arc::new(Hooks::read(&spec, creation.id(), bundle)?),
            netns: container_role::netns(&role, &linux.namespaces),
            role,
            joined,
            stdio,
            disks,
            rootfs: root.files,
            root_ids: root.ids,
            own_ids: linux.ids(),
            binds: binds.host,
            volumes: binds.volumes.into_iter().map(|(_, volume)| volume).collect(),
            copied: binds.copied.into_iter().map(|(_, volume)| Arc::new(volume)).collect(),
            cgroup: cgroup(linux, creation.id()),
            hostname: spec.hostname.clone().unwrap_or_else(host_name),
            memory_limit: linux.resources.memory.bytes().or(pod_memory_limit),
            pod_cpu_limit,
            resources,
            io_limits,
            hugetlbfs,
            oom_score_adj: spec.process.as_ref().and_then(|process| process.oom_score_adj).unwrap_or(0),
            no_new_keyring: options.no_new_keyring,
            annotations: annotations::of_config(&spec.annotations),
            apparmor: Policy::of_host(
                spec.process.as_ref().and_then(|process| process.apparmor_profile.as_deref()),
            )?,
            spec_json: serde_json::to_vec(&document).map_err(|source| file.damaged(source))?,
        })
    }

    /// The plan whose root only the container changes, as the configuration says (`exclusive_roots`).
    pub(crate) fn with_exclusive_root(self, bundle: &Path) -> Result<Self, RequestError> {
        if self.rootfs.is_none() {
            return Ok(self);
        }
        let place = place_of_root(&self.id, true);
        let edited = edit_json(&self.spec_json, |document| document["root"]["path"] = place.into());
        let path = bundle.join("config.json");
        let spec_json = edited.map_err(|source| RequestError::Parse { path, source })?.into_owned();
        Ok(Self { spec_json, ..self })
    }
}

/// The options of the request. Those that concern the shim came to `start` too.
fn options(creation: &CreateRequest) -> Result<Options, RequestError> {
    match creation.task().and_then(|request| request.options.as_ref()) {
        Some(options) => Ok(Options::read(options)?),
        None => Ok(Options::default()),
    }
}

/// Refuses another owner of the container's streams than the root of its user namespace. The guest's streams belong to
/// the user of the process, as if that root had given them away.
fn check_io_owner((user, group): (u32, u32), linux: &Linux) -> Result<(), RequestError> {
    let (root_user, root_group) = linux.root();
    for (name, id, root) in [("IoUid", user, root_user), ("IoGid", group, root_group)] {
        if id != 0 && root != Some(id) {
            return Err(unimplemented(
                format!("the options of the runtime: {name} {id}"),
                ", which is not root in the container's user namespace",
            ));
        }
    }
    Ok(())
}

/// Refuses by name what is not implemented, so that nothing is accepted without effect.
fn refuse(request: &api::CreateTaskRequest, spec: &Spec) -> Result<(), RequestError> {
    let process = spec.process.as_ref().ok_or_else(|| invalid("process", "is missing"))?;
    terminal::check(process.terminal, request.terminal)?;
    if !request.checkpoint.is_empty() || !request.parent_checkpoint.is_empty() {
        return Err(unimplemented("restoring from a checkpoint", ""));
    }
    if let Some(annotation) = spec.annotations.keys().find(|key| asks_runc(key)) {
        return Err(unimplemented(format!("annotations[{annotation}]"), ": it is runc's"));
    }
    if spec.vm.is_some() {
        return Err(unimplemented("vm (of the spec)", "; set the kernel in the runtime's configuration"));
    }
    Ok(())
}

/// Whether runc would do something because of an annotation. The others are there to be read by hooks.
fn asks_runc(annotation: &str) -> bool {
    ["org.systemd.property.", "org.opencontainers.runc."].iter().any(|prefix| annotation.starts_with(prefix))
}

/// The root of a container.
#[derive(Debug, Default)]
struct Root {
    files: Option<Rootfs>,
    ids: Option<IdMappings>,
    /// Whether nobody but the container changes the files.
    is_exclusive: bool,
}

fn root(
    request: &api::CreateTaskRequest,
    spec: &Spec,
    bundle: &Path,
    namespace: &str,
) -> Result<Root, RequestError> {
    if request.rootfs.is_empty() {
        let root = spec.root.as_ref().ok_or_else(|| invalid("root", "is missing"))?;
        // docker copies nothing into a container whose root is read-only (`docker cp`).
        let is_exclusive = is_dockers(namespace) && root.readonly() == Some(true);
        let files = Rootfs::Directory(bundle.join(root.path()));
        return Ok(Root { files: Some(files), ids: None, is_exclusive });
    }
    let mut ids = None;
    let mut mounts = Vec::new();
    for (index, mount) in request.rootfs.iter().enumerate() {
        if !mount.target.is_empty() {
            return Err(unimplemented(format!("rootfs[{index}].target {:?}", mount.target), ""));
        }
        let mut options = mount.options.clone();
        ids = IdMappings::take(index, &mut options)?.or(ids);
        mounts.push(Mount { kind: mount.type_.clone(), source: mount.source.clone(), options });
    }
    let disk = DiskRoot::of(&mounts)
        .map_err(|option| unimplemented(format!("rootfs mount option {option:?}"), ""))?;
    if disk.is_some() && ids.is_some() {
        return Err(unimplemented("rootfs[0].options: other ids", " on a file system that the guest mounts"));
    }
    let files = disk.map_or(Rootfs::Mounts(mounts), Rootfs::Disk);
    Ok(Root { is_exclusive: files.is_exclusive(), files: Some(files), ids })
}

/// Where the guest has a root that the host mounts.
fn place_of_root(id: &str, is_exclusive: bool) -> String {
    let device = if is_exclusive { ROOTS_DIR } else { SHARE_DIR };
    format!("{device}/{id}/{ROOTFS}")
}

/// The bind mounts of a spec, by their indexes in its `mounts`.
#[derive(Debug, Default)]
struct Binds {
    host: Vec<BindMount>,
    /// The pod's /dev/shm, which is the guest's own.
    pod_shm: Vec<usize>,
    /// Volumes of kubelet in memory, which are the guest's own too.
    volumes: Vec<(usize, MemoryVolume)>,
    /// And those that it keeps up to date.
    copied: Vec<(usize, KubeletVolume)>,
    /// Mounts of huge pages: parts of volumes of the host, and those that the guest mounts itself by their type.
    huge_pages: Vec<HugePagesMount>,
}

fn binds(spec: &Spec, bundle: &Path, role: &Role, budget: &Budget) -> Result<Binds, RequestError> {
    let pod_uid = container_role::pod_uid(&spec.annotations);
    let mut binds = Binds::default();
    let mounts = memory_volumes::mounts()
        .map_err(|source| RequestError::Read { path: "/proc/self/mountinfo".into(), source })?;
    for (index, mount) in spec.mounts.iter().enumerate() {
        let options = mount.options().as_deref().unwrap_or_default();
        let has = |name: &str| options.iter().any(|option| option == name);
        if !is_bind(mount.typ().as_deref(), has) {
            if mount.typ().as_deref() == Some("hugetlbfs") {
                binds.huge_pages.push(HugePagesMount::of_type(index, options)?);
            }
            continue;
        }
        let source = mount
            .source()
            .as_ref()
            .ok_or_else(|| invalid(format!("mounts[{index}].source"), "is missing for a bind mount"))?;
        if role.is_pod_shm(mount.destination(), source) {
            binds.pod_shm.push(index);
            continue;
        }
        let propagation = propagation(options).map_err(|option| {
            let what = format!("mounts[{index}]: option {option:?}");
            unimplemented(what, ": what a container mounts stays in its VM")
        })?;
        let source = bundle.join(source);
        // Nothing else stands in for a volume in memory: the pod's containers share it.
        if let Some(volume) = volume_in_memory(&source, role, pod_uid, &mounts)
            .map_err(|cause| RequestError::Volume { index, path: source.clone(), source: cause })?
        {
            binds.volumes.push((index, volume));
            continue;
        }
        let (recursive, read_only) = (has("rbind"), read_only(options));
        // What a container writes reaches the host.
        if matches!(role, Role::Member { .. })
            && read_only != ReadOnly::None
            && let Some(volume) = copied(index, &source, pod_uid, budget)
        {
            binds.copied.push((index, volume));
            continue;
        }
        let is_of_pod = memory_volumes::is_own_empty_dir(&source, pod_uid);
        binds.host.push(BindMount { index, source, recursive, read_only, propagation, is_of_pod });
    }
    binds.huge_pages.extend(HugePagesMount::of_volumes(&binds.volumes));
    Ok(binds)
}

fn volume_in_memory(
    source: &Path,
    role: &Role,
    pod_uid: Option<&str>,
    mounts: &[u8],
) -> io::Result<Option<MemoryVolume>> {
    let of_kubelet = match role {
        Role::Member { .. } => memory_volumes::find(source, pod_uid)?,
        Role::Single | Role::Sandbox => None,
    };
    of_kubelet.map_or_else(|| memory_volumes::find_huge_pages(source, mounts), |volume| Ok(Some(volume)))
}

/// The volume of kubelet that this source is. None: the container gets it from the host, as it gets everything else.
fn copied(index: usize, source: &Path, pod_uid: Option<&str>, budget: &Budget) -> Option<KubeletVolume> {
    let found = kubelet_volumes::find(source, pod_uid).and_then(|found| match found {
        Some((volume, size)) => budget.take(&volume.name, size).map(|()| Some(volume)),
        None => Ok(None),
    });
    found.unwrap_or_else(|error: VolumeError| {
        tracing::info!(
            mount = index,
            path = %source.display(),
            reason = chain(&error),
            "a volume is not copied into the guest: its changes raise no inotify events"
        );
        None
    })
}

/// Reads from the options which mounts are read-only. Of `ro` and `rw` the last counts, and of `rro` and `rrw`.
fn read_only(options: &[String]) -> ReadOnly {
    let last = |on: &str, off: &str| {
        options.iter().rev().find(|option| *option == on || *option == off).is_some_and(|option| option == on)
    };
    match (last("rro", "rrw"), last("ro", "rw")) {
        (true, _) => ReadOnly::All,
        (false, true) => ReadOnly::Top,
        (false, false) => ReadOnly::None,
    }
}

/// Reads the propagation from the options; the last one counts. `shared` is refused, because the container's mounts
/// would have to propagate to the host. The error is the option.
fn propagation(options: &[String]) -> Result<Propagation, &str> {
    let mut propagation = Propagation::Private;
    for option in options {
        match option.as_str() {
            "private" | "rprivate" | "unbindable" | "runbindable" => propagation = Propagation::Private,
            "slave" | "rslave" => propagation = Propagation::Slave,
            "shared" | "rshared" => return Err(option),
            _ => {}
        }
    }
    Ok(propagation)
}

fn cgroup(linux: &Linux, id: &str) -> PathBuf {
    let path = &linux.cgroups_path;
    if path.as_os_str().is_empty() { Path::new("/bulkhead").join(id) } else { path.clone() }
}

/// The hostname of a container without one of its own, as with runc.
fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Replaces paths of the host in the spec. It edits the JSON document, because the shim's types have few of its
/// fields.
fn adapt(document: &mut Value, id: &str, root: &Root, binds: &Binds, joined: &[Joined]) {
    let share = format!("{SHARE_DIR}/{id}");
    let read_only = document.pointer("/root/readonly").cloned().unwrap_or(Value::Bool(false));
    document["root"] =
        serde_json::json!({ "path": place_of_root(id, root.is_exclusive), "readonly": read_only });
    if let Some(ids) = &root.ids {
        document["root"]["uidMappings"] = serde_json::json!(ids.users);
        document["root"]["gidMappings"] = serde_json::json!(ids.groups);
    }
    for bind in &binds.host {
        document["mounts"][bind.index]["source"] = format!("{share}/mounts/{}", bind.index).into();
    }
    for index in &binds.pod_shm {
        document["mounts"][*index]["source"] = SHM_DIR.into();
    }
    for (index, volume) in &binds.volumes {
        let source = Path::new(VOLUMES_DIR).join(&volume.name).join(&volume.part);
        document["mounts"][*index]["source"] = source.to_string_lossy().into();
    }
    for (index, volume) in &binds.copied {
        document["mounts"][*index]["source"] = format!("{VOLUMES_DIR}/{}", volume.name).into();
    }
    // Hooks are programs of the host, which the shim runs.
    if let Some(document) = document.as_object_mut() {
        document.remove("hooks");
    }
    let Some(linux) = document.get_mut("linux").and_then(Value::as_object_mut) else { return };
    // The path is of a cgroup on the host. The agent chooses the cgroup in the guest.
    linux.remove("cgroupsPath");
    // The namespaces to be joined are a part of the request of their own. The other paths name namespaces of the host.
    if let Some(namespaces) = linux.get_mut("namespaces").and_then(Value::as_array_mut) {
        namespaces.retain_mut(|namespace| {
            let is_joined = joined.iter().any(|joined| namespace["type"] == joined.kind);
            if let Some(namespace) = namespace.as_object_mut() {
                namespace.remove("path");
            }
            !is_joined
        });
    }
}

/// Keeps the container from opening device nodes in directories of the host. The numbers of one may be those of a block
/// device that the guest has. Other block devices than its own it cannot open at all.
fn open_no_nodes(document: &mut Value, binds: &[BindMount]) {
    // Elsewhere is no node that the container gets, but storage that may hang.
    let is_node = |bind: &BindMount| {
        bind.source.starts_with(NODES)
            && fs::metadata(&bind.source).is_ok_and(|it| DeviceNode::of(&it).is_some())
    };
    for bind in binds.iter().filter(|bind| !is_node(bind)) {
        let mount = &mut document["mounts"][bind.index];
        if mount["options"].is_null() {
            mount["options"] = Vec::<Value>::new().into();
        }
        if let Some(options) = mount["options"].as_array_mut() {
            options.push(if bind.recursive { "rnodev" } else { "nodev" }.into());
        }
    }
}

#[cfg(test)]
mod tests {
    use nix::mount::MsFlags;
    use serde_json::json;

    use super::*;
    use crate::{
        pod::container_role::{CRI_NAMESPACE, Owner},
        testing::private_mounts,
        types::stdio_endpoint::Endpoint,
    };

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
    ) -> Result<CreatePlan, RequestError> {
        read_in(CRI_NAMESPACE, spec, change)
    }

    fn read_in(
        namespace: &str,
        spec: &Value,
        change: impl FnOnce(&mut api::CreateTaskRequest),
    ) -> Result<CreatePlan, RequestError> {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("config.json"), spec.to_string()).unwrap();
        let mut request = api::CreateTaskRequest::new();
        request.id = "demo".into();
        request.bundle = dir.path().display().to_string();
        change(&mut request);
        CreatePlan::read(namespace, &CreateRequest::Task(request), None, &Budget::default())
    }

    #[test]
    fn options_of_a_request_are_honoured_or_refused_by_name() {
        let read = |value: &[u8]| {
            read_with(&spec(), |request| {
                let options = request.options.mut_or_insert_default();
                options.type_url = "types.containerd.io/containerd.runc.v1.Options".into();
                options.value = value.into();
            })
        };
        assert!(!read(b"").unwrap().no_new_keyring);
        // NoNewKeyring and NoPivotRoot (runcoptions.proto).
        assert!(read(b"\x10\x01").unwrap().no_new_keyring);
        let error = read(b"\x08\x01").unwrap_err().to_string();
        assert!(error.contains("NoPivotRoot is runc's"), "{error}");
        // IoUid 1000.
        let error = read(b"\x20\xe8\x07").unwrap_err().to_string();
        assert!(error.contains("IoUid 1000"), "{error}");
        let mut mapped = json!({"uidMappings": [{"containerID": 0, "hostID": 1000, "size": 9}]});
        let check = |mapped: &Value| check_io_owner((1000, 0), &Linux::deserialize(mapped).unwrap());
        assert!(check(&mapped).is_ok());
        mapped["uidMappings"][0]["containerID"] = 1.into();
        assert!(check(&mapped).is_err());
        // As Go writes a list that is nil.
        assert!(check(&json!({"uidMappings": null})).is_err());
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
        let Some(Rootfs::Directory(rootfs)) = plan.rootfs else { panic!("{:?}", plan.rootfs) };
        assert!(rootfs.is_absolute() && rootfs.ends_with("rootfs"));
    }

    #[test]
    fn a_root_that_only_the_container_changes_is_on_the_device_for_these() {
        let place = |plan: &CreatePlan| {
            let given: Value = serde_json::from_slice(&plan.spec_json).unwrap();
            given["root"]["path"].as_str().unwrap().to_owned()
        };
        let mounted = |kind: &str| {
            let kind = kind.to_owned();
            let mount = api::Mount { type_: kind.clone(), source: kind, ..Default::default() };
            read_with(&spec(), |request| request.rootfs.push(mount)).unwrap()
        };
        let (exclusive, shared) = ("/run/bulkhead/roots/demo/rootfs", "/run/bulkhead/share/demo/rootfs");
        assert_eq!((place(&mounted("overlay")), place(&mounted("bind"))), (exclusive.into(), shared.into()));
        // `docker cp` refuses to write into a root that is read-only. Others may write into theirs.
        let mut spec = spec();
        let directory = |namespace: &str, spec: &Value| read_in(namespace, spec, |_| {}).unwrap();
        assert_eq!(place(&directory("moby", &spec)), exclusive);
        assert_eq!(place(&directory("default", &spec)), shared);
        spec["root"] = json!({"path": "rootfs"});
        let writable = directory("moby", &spec);
        assert_eq!(place(&writable), shared);
        // The configuration says so.
        for plan in [writable, mounted("bind")] {
            assert_eq!(place(&plan.with_exclusive_root(Path::new("/bundle")).unwrap()), exclusive);
        }
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
    fn the_last_option_says_what_is_read_only() {
        let of =
            |options: &[&str]| read_only(&options.iter().map(|&option| option.into()).collect::<Vec<_>>());
        assert_eq!(of(&["rbind"]), ReadOnly::None);
        assert_eq!((of(&["ro"]), of(&["ro", "rw"])), (ReadOnly::Top, ReadOnly::None));
        assert_eq!((of(&["rbind", "rro"]), of(&["rro", "ro", "rrw"])), (ReadOnly::All, ReadOnly::Top));
    }

    #[test]
    fn bind_mounts_come_from_the_host() {
        let plan = read_with(&spec(), |_| {}).unwrap();
        let (propagation, is_of_pod) = (Propagation::Private, false);
        let (data, file) = ("/srv/data".into(), plan.binds[1].source.clone());
        assert!(file.is_absolute() && file.ends_with("file"));
        assert_eq!(
            plan.binds,
            [
                BindMount {
                    index: 1,
                    source: data,
                    recursive: true,
                    read_only: ReadOnly::Top,
                    propagation,
                    is_of_pod
                },
                BindMount {
                    index: 2,
                    source: file,
                    recursive: false,
                    read_only: ReadOnly::None,
                    propagation,
                    is_of_pod
                },
            ]
        );
    }

    #[test]
    fn a_volume_that_cannot_be_looked_at_is_named() {
        let mut spec = spec();
        spec["mounts"][1]["source"] = json!("/nowhere/kubernetes.io~empty-dir/cache");
        assert_eq!(read_with(&spec, |_| {}).unwrap().binds.len(), 2, "only pods have volumes of kubelet");
        spec["annotations"] = json!({
            "io.kubernetes.cri.container-type": "container", "io.kubernetes.cri.sandbox-id": "s",
        });
        spec["linux"]["namespaces"][4]["path"] = json!("/proc/42/ns/net");
        let error = read_with(&spec, |_| {}).unwrap_err();
        assert_eq!(
            error.to_string(),
            "mounts[1].source: cannot look at /nowhere/kubernetes.io~empty-dir/cache"
        );
    }

    #[test]
    fn a_hugetlbfs_is_the_guests_for_a_container_that_says_how_many_pages() {
        private_mounts();
        let host = tempfile::tempdir().unwrap();
        let hugetlbfs = |name: &str, options: &str| {
            let path = host.path().join(name);
            fs::create_dir(&path).unwrap();
            nix::mount::mount(Some("none"), &path, Some("hugetlbfs"), MsFlags::empty(), Some(options))
                .unwrap();
            path
        };
        let with = |source: &Path, limits: Option<Value>| {
            let mut spec = spec();
            spec["mounts"][1]["source"] = json!(source);
            if let Some(limits) = limits {
                spec["linux"]["resources"]["hugepageLimits"] = limits;
            }
            let plan = read_with(&spec, |_| {})?;
            let document: Value = serde_json::from_slice(&plan.spec_json).unwrap();
            Ok::<_, RequestError>((plan, document))
        };
        let plain = hugetlbfs("plain", "pagesize=2M");
        let two = json!([{"pageSize": "2MB", "limit": 4 << 20}]);
        let (plan, document) = with(&plain, Some(two.clone())).unwrap();
        assert_eq!((plan.binds.len(), plan.volumes.len(), plan.volumes[0].huge_pages), (1, 1, true));
        let source = format!("{VOLUMES_DIR}/{}/", plan.volumes[0].name);
        assert_eq!(document["mounts"][1]["source"], source);
        assert_eq!(
            (plan.resources.huge_pages(), &document["linux"]["resources"]["hugepageLimits"]),
            (Some(4 << 20), &two)
        );
        // A container that may use none sees the files of others.
        assert!(with(&plain, Some(json!([{"pageSize": "2MB", "limit": 0}]))).is_ok());

        for limits in [None, Some(json!([{"pageSize": "1GB", "limit": 0}]))] {
            let error = with(&plain, limits).unwrap_err().to_string();
            assert!(error.starts_with("mounts[1].source: is in a hugetlbfs without a size"), "{error}");
        }
        // The size says how many.
        let (plan, document) = with(&hugetlbfs("sized", "pagesize=2M,size=6M"), None).unwrap();
        let three = json!([{"pageSize": "2MB", "limit": 6 << 20}]);
        assert_eq!(document["linux"]["resources"]["hugepageLimits"], three);
        assert_eq!(plan.resources.huge_pages(), Some(6 << 20));

        // The same of one that the guest mounts itself.
        let own = |options: Value| {
            let mut spec = spec();
            spec["mounts"][0] =
                json!({"destination": "/pages", "type": "hugetlbfs", "source": "none", "options": options});
            read_with(&spec, |_| {}).map(|plan| plan.resources.huge_pages())
        };
        assert_eq!(own(json!(["pagesize=2M", "size=4M"])).unwrap(), Some(4 << 20));
        let error = |options: Value| own(options).unwrap_err().to_string();
        assert!(error(json!([])).starts_with("mounts[0]: is a hugetlbfs without a size"));
        assert!(
            error(json!(["pagesize=1G"]))
                .starts_with("mounts[0].options: \"pagesize=1G\" is not implemented")
        );
    }

    #[test]
    fn mounts_go_from_the_host_to_the_container_only() {
        let with = |options: Value| {
            let mut spec = spec();
            spec["mounts"][1]["options"] = options;
            read_with(&spec, |_| {})
        };
        for (options, expected) in [
            (json!(["rbind", "rslave"]), Propagation::Slave),
            (json!(["rbind", "slave", "rprivate"]), Propagation::Private),
        ] {
            assert_eq!(with(options).unwrap().binds[0].propagation, expected);
        }
        let error = with(json!(["rbind", "rshared"])).unwrap_err().to_string();
        assert!(error.starts_with("mounts[1]: option \"rshared\" is not implemented"), "{error}");
    }

    #[test]
    fn a_memory_limit_that_is_none_is_told_from_one() {
        let limit = |value: Value| {
            let mut spec = spec();
            spec["linux"]["resources"]["memory"]["limit"] = value;
            read_with(&spec, |_| {}).unwrap().memory_limit
        };
        assert_eq!([limit(json!(1 << 29)), limit(json!(-1)), limit(json!(0))], [Some(1 << 29), None, None]);
    }

    #[test]
    fn what_is_not_implemented_is_refused_by_name() {
        let namespaces = |list: &[Value]| Value::Array(list.to_vec());
        let own: Vec<_> = ["pid", "ipc", "uts", "mount"].iter().map(|kind| json!({ "type": kind })).collect();
        let joined = [own.clone(), vec![json!({"type": "ipc", "path": "/run/ipcns/x"})]].concat();
        for (path, value, expected) in [
            ("hooks", json!({"startContainer": [{"path": "/bin/true"}]}), "hooks.startContainer is not"),
            ("/linux/namespaces", namespaces(&own), "the host's network namespace"),
            ("/linux/namespaces", namespaces(&joined), "joining the ipc namespace /run/ipcns/x"),
        ] {
            let error = error_of(path, value);
            assert!(error.starts_with(expected) && error.contains("is not implemented"), "{error}");
        }
        let error = read_with(&spec(), |request| request.checkpoint = "/c".into()).unwrap_err();
        assert_eq!(error.to_string(), "restoring from a checkpoint is not implemented");
        let error = read_with(&spec(), |request| request.stdout = "npipe:////./pipe".into()).unwrap_err();
        assert!(error.to_string().contains("npipe:////./pipe"), "{error}");
    }

    #[test]
    fn annotations_that_ask_runc_for_something_are_refused_by_name() {
        for name in ["org.systemd.property.TimeoutStopUSec", "org.opencontainers.runc.exec.x"] {
            let error = error_of("annotations", json!({ name: "x" }));
            assert_eq!(error, format!("annotations[{name}] is not implemented: it is runc's"));
        }
        let mut spec = spec();
        spec["annotations"] = json!({"org.opencontainers.image.title": "x", "mine": "y"});
        assert!(read_with(&spec, |_| {}).unwrap().annotations.is_empty());
    }

    #[test]
    fn annotations_that_ask_for_a_configuration_are_part_of_the_plan() {
        let mut spec = spec();
        spec["annotations"] = json!({"bulkhead.dev/console": "true", "bulkhead.dev/oops": "", "mine": "y"});
        let plan = read_with(&spec, |_| {}).unwrap();
        let found: Vec<_> =
            plan.annotations.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
        assert_eq!(found, [("console", "true"), ("oops", "")]);
    }

    #[test]
    fn a_terminal_has_no_standard_error() {
        let mut spec = spec();
        spec["process"]["terminal"] = json!(true);
        let change = |request: &mut api::CreateTaskRequest| {
            request.terminal = true;
            request.stdout = "/out".into();
            request.stderr = "/err".into();
        };
        let stdio = read_with(&spec, change).unwrap().stdio;
        assert_eq!((stdio.stdout, stdio.stderr), (Endpoint::Path("/out".into()), Endpoint::Nowhere));
    }

    #[test]
    fn a_logger_takes_both_streams() {
        let with = |stdout: &str, stderr: &str| {
            read_with(&spec(), |request| {
                (request.stdout, request.stderr) = (stdout.into(), stderr.into());
            })
        };
        let stdio = with("binary:///bin/logger", "binary:///bin/logger").unwrap().stdio;
        assert!(matches!(stdio.stdout, Endpoint::Logger(_)) && stdio.stdout == stdio.stderr);
        with("binary:///bin/logger", "").unwrap();
        for (stdout, stderr) in [
            ("binary:///bin/logger", "/fifo"),
            ("/fifo", "binary:///bin/logger"),
            ("binary:///bin/logger", "binary:///bin/another"),
        ] {
            assert!(with(stdout, stderr).unwrap_err().to_string().contains("both streams"));
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        assert_eq!(error_of("process", Value::Null), "process: is missing");
        let error = error_of("/process/terminal", json!(true));
        assert_eq!(error, "process.terminal is true, but the request says false");
        let mut request = api::CreateTaskRequest::new();
        request.bundle = "/nonexistent/bundle".into();
        let error =
            CreatePlan::read("default", &CreateRequest::Task(request), None, &Budget::default()).unwrap_err();
        assert_eq!(error.to_string(), "cannot read /nonexistent/bundle/config.json");
    }

    #[test]
    fn a_pods_sandbox_needs_no_files_and_a_member_joins_it() {
        let mut sandbox = spec();
        sandbox["annotations"] = json!({
            "io.kubernetes.cri.container-type": "sandbox", "io.kubernetes.cri.sandbox-memory": "1073741824",
        });
        sandbox["linux"]["resources"] = json!({});
        let plan = read_with(&sandbox, |_| {}).unwrap();
        assert_eq!((plan.role, plan.rootfs, plan.binds.len()), (Role::Sandbox, None, 0));
        assert_eq!(plan.memory_limit, Some(1 << 30));

        let mut member = spec();
        member["annotations"] = json!({
            "io.kubernetes.cri.container-type": "container", "io.kubernetes.cri.sandbox-id": "s",
        });
        member["linux"]["namespaces"][4]["path"] = json!("/proc/42/ns/net");
        member["mounts"][1]["destination"] = json!("/dev/shm");
        member["mounts"][1]["source"] = json!("/run/sandboxes/s/shm");
        let plan = read_with(&member, |_| {}).unwrap();
        let given: Value = serde_json::from_slice(&plan.spec_json).unwrap();
        assert_eq!(plan.joined, [Joined { kind: "network", of: Owner::Pid(42) }]);
        assert_eq!(given["linux"]["namespaces"].as_array().unwrap().len(), 4);
        assert_eq!(given["mounts"][1]["source"], SHM_DIR);
        assert_eq!(plan.binds.len(), 1);
    }

    #[test]
    fn the_ids_of_an_id_mapped_root_are_for_the_agent() {
        let plan = read_with(&spec(), |request| {
            let mut mount = containerd_shim_protos::types::mount::Mount::new();
            mount.type_ = "overlay".into();
            mount.options =
                ["uidmap=0:100000:65536", "gidmap=0:200000:65536", "lowerdir=/l"].map(Into::into).into();
            request.rootfs.push(mount);
        })
        .unwrap();
        let given: Value = serde_json::from_slice(&plan.spec_json).unwrap();
        let range = |id: u32| json!([{"containerID": 0, "hostID": id, "size": 65536}]);
        assert_eq!(given["root"]["uidMappings"], range(100_000));
        assert_eq!(given["root"]["gidMappings"], range(200_000));
        assert_eq!(plan.root_ids.unwrap().root(), Some((100_000, 200_000)));
        let Some(Rootfs::Mounts(mounts)) = plan.rootfs else { panic!("not mounts") };
        assert_eq!(mounts[0].options, ["lowerdir=/l"]);
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
        let Some(Rootfs::Mounts(mounts)) = plan.rootfs else { panic!("not mounts") };
        assert_eq!((mounts[0].kind.as_str(), mounts[0].source.as_str()), ("bind", "/snapshot/1/fs"));
    }
}
