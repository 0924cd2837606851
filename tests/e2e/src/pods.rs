//! Pods and their containers, as kubelet makes them by containerd's CRI service.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use tempfile::TempDir;
use tonic::Code;

use crate::command::{Cmd, Finished, contains, wait_until};
use crate::containerd::Containerd;
use crate::cri::Client;
use crate::cri::messages::*;
use crate::cri::stream::{Forwarded, Stream};
use crate::ctr::{Host, IMAGE, Runtime, SETTLES};
use crate::fixtures::{Root, scratch};
use crate::snapshot::Snapshot;

/// Archive of the pause image, beside that of the containers' image.
const PAUSE_ARCHIVE: &str = "pause-oci.tar";
/// The image of pause, as the configuration of the tests' containerd names it.
const PAUSE: &str = "registry.k8s.io/pause:3.10";
/// The handler of pods whose sandbox is the shim's to make (contrib/containerd/config-3.toml).
const SANDBOX_HANDLER: &str = "bulkhead-sandbox";
/// The handlers of pods whose containers have their roots on disks, by the blockfile snapshotter.
const DISK_HANDLERS: [(Runtime, &str); 2] =
    [(Runtime::Runc, "runc-disks"), (Runtime::Bulkhead, "bulkhead-disks")];
/// MiB of such a root.
const DISK_MIB: u32 = 24;
/// Deadline of one call, and of the streams of an exec.
const CALL: Duration = Duration::from_secs(60);
/// Parent of the pods' cgroups, which are kubelet's to make and remove: here the tests'.
const CGROUPS: &str = "bulkhead-e2e-pods";

/// containerd's CRI service with its images.
pub(crate) struct Pods {
    client: Client,
    containerd: Containerd,
    /// How long its CRI service may take to serve.
    starts_in: Duration,
    /// The handler of new pods, if it is not that of their runtime.
    handler: Mutex<Option<&'static str>>,
    /// Whether containerd has the blockfile snapshotter.
    has_disks: AtomicBool,
    /// The handlers of the pods that there were, once their first is gone.
    warm: Mutex<BTreeSet<&'static str>>,
}

impl Pods {
    /// Starts a containerd for them, with the images.
    pub(crate) fn prepare(host: &Host) -> Result<Self> {
        let containerd = Containerd::start(host.version())?;
        containerd.import(host.archive())?;
        let client = Client::connect(&containerd.socket(), host.patience(CALL))?;
        let starts_in = host.patience(SETTLES);
        client.wait_until_served(starts_in)?;
        let (handler, has_disks, warm) = (Mutex::default(), AtomicBool::new(false), Mutex::default());
        let pods = Self { client, containerd, starts_in, handler, has_disks, warm };
        pods.import_pause(host)?;
        Ok(pods)
    }

    fn import_pause(&self, host: &Host) -> Result<()> {
        self.containerd.import(&host.archive().with_file_name(PAUSE_ARCHIVE))
    }

    /// Does something with pods whose sandboxes are the shim's to make.
    pub(crate) fn with_sandboxes_of_the_shim(&self, act: impl FnOnce() -> Result<()>) -> Result<()> {
        self.with_handler(SANDBOX_HANDLER, act)
    }

    /// Does something with pods whose containers have their roots on disks.
    pub(crate) fn with_disks(&self, host: &Host, act: impl FnOnce() -> Result<()>) -> Result<()> {
        if !self.has_disks.load(Ordering::Relaxed) {
            self.add_disks(host)?;
            self.has_disks.store(true, Ordering::Relaxed);
        }
        let handler = DISK_HANDLERS.iter().find(|(runtime, _)| *runtime == host.runtime());
        self.with_handler(handler.context("no handler with disks")?.1, act)
    }

    /// Gives containerd the blockfile snapshotter, with an empty file system from which it makes all others.
    fn add_disks(&self, host: &Host) -> Result<()> {
        let disk = self.containerd.root().join("empty-disk");
        let file = fs::File::create(&disk).context("cannot make a disk")?;
        file.set_len(u64::from(DISK_MIB) << 20).context("cannot make a disk")?;
        let root = Root::mount(host)?;
        // The driver of ext4 mounts it too.
        Cmd::new(&root.path().join("bin/busybox").display().to_string())
            .args(["mke2fs", "-F"])
            .args([&disk])
            .args([&(DISK_MIB * 1024).to_string()])
            .run()?
            .succeeds()?;
        let mut added = format!(
            "\n[plugins.\"io.containerd.snapshotter.v1.blockfile\"]\n  scratch_file = \"{}\"\n  fs_type = \"ext4\"\n",
            disk.display()
        );
        for (runtime, handler) in DISK_HANDLERS {
            let shim = runtime.in_containerd();
            added += &format!(
                "[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.{handler}]\n  runtime_type = \"{shim}\"\n  \
                 snapshotter = \"blockfile\"\n"
            );
        }
        self.while_containerd_is_down(|| self.containerd.configure(&added))
    }

    fn with_handler(&self, handler: &'static str, act: impl FnOnce() -> Result<()>) -> Result<()> {
        let set = |handler| *self.handler.lock().unwrap_or_else(PoisonError::into_inner) = handler;
        set(Some(handler));
        let result = act();
        set(None);
        result
    }

    /// The handler of new pods.
    pub(crate) fn handler(&self, runtime: Runtime) -> &'static str {
        self.handler.lock().unwrap_or_else(PoisonError::into_inner).unwrap_or(runtime.name())
    }

    /// Does something while the image of pause is not there. It must not come back.
    pub(crate) fn without_pause_image(&self, host: &Host, act: impl FnOnce() -> Result<()>) -> Result<()> {
        self.ctr().args(["images", "rm", "--sync", PAUSE]).run()?.succeeds()?;
        let result = act();
        let images = self.ctr().args(["images", "ls", "--quiet"]).run()?;
        self.import_pause(host)?;
        images.check("no image of pause", !images.succeeds()?.text().contains(PAUSE))?;
        result
    }

    /// How long CNI has taken in all to set up pods.
    pub(crate) fn time_for_networks(&self) -> Result<Duration> {
        self.containerd.time_for_networks()
    }

    /// The client, for what the rest of this module has no words for.
    pub(crate) fn client(&self) -> &Client {
        &self.client
    }

    /// Ends containerd, does something and starts it again; the pods go on.
    pub(crate) fn while_containerd_is_down(&self, act: impl FnOnce() -> Result<()>) -> Result<()> {
        let result = self.containerd.while_down(act);
        self.client.wait_until_served(self.starts_in)?;
        result
    }

    /// `ctr` with these pods' containerd, in the CRI's namespace.
    pub(crate) fn ctr(&self) -> Cmd {
        self.containerd.ctr()
    }

    /// Expects that the host looks the same after `act` as before it.
    pub(crate) fn leave_nothing(&self, host: &Host, act: impl FnOnce() -> Result<()>) -> Result<()> {
        // The first pod of a handler makes things that stay, such as CNI's bridge.
        let handler = self.handler(host.runtime());
        let mut warm = self.warm.lock().unwrap_or_else(PoisonError::into_inner);
        if !warm.contains(handler) {
            let pod = Pod::start(host)?;
            pod.container().run(&["true"])?.succeeds()?;
            pod.remove().context("the pod before the first look at the host")?;
            warm.insert(handler);
        }
        drop(warm);
        let before = Snapshot::settled(host)?;
        act()?;
        before.expect_same(host)
    }
}

/// A pod that is not yet run.
pub(crate) struct NewPod<'h> {
    host: &'h Host,
    config: PodSandboxConfig,
    limits: Vec<(&'static str, String)>,
    span: Option<&'static str>,
}

impl<'h> NewPod<'h> {
    /// Gives its containers this host name.
    pub(crate) fn hostname(mut self, name: &str) -> Self {
        self.config.hostname = name.to_owned();
        self
    }

    /// Sets a sysctl of its namespaces.
    pub(crate) fn sysctl(mut self, key: &str, value: &str) -> Self {
        self.linux().sysctls.insert(key.to_owned(), value.to_owned());
        self
    }

    /// Has its containers share one pid namespace, that of pause (`shareProcessNamespace`).
    pub(crate) fn share_processes(mut self) -> Self {
        let options = NamespaceOption { pid: NamespaceMode::Pod.into(), ..Default::default() };
        self.linux().security_context.get_or_insert_default().namespace_options = Some(options);
        self
    }

    /// Gives it a user namespace, whose ids begin with this one of the host.
    pub(crate) fn users_from(mut self, host_id: u32) -> Self {
        let ids = vec![IdMapping { host_id, container_id: 0, length: 1 << 16 }];
        let users = UserNamespace { mode: NamespaceMode::Pod.into(), uids: ids.clone(), gids: ids };
        let context = self.linux().security_context.get_or_insert_default();
        context.namespace_options.get_or_insert_default().userns_options = Some(users);
        self
    }

    /// Lets it have privileged containers.
    pub(crate) fn privileged(mut self) -> Self {
        self.linux().security_context.get_or_insert_default().privileged = true;
        self
    }

    /// Puts it in the network of the host.
    pub(crate) fn host_network(mut self) -> Self {
        let context = self.linux().security_context.get_or_insert_default();
        context.namespace_options.get_or_insert_default().network = NamespaceMode::Node.into();
        self
    }

    /// Sets the resolver's configuration.
    pub(crate) fn dns(mut self, servers: &[&str], searches: &[&str], options: &[&str]) -> Self {
        let (servers, searches, options) = (words(servers), words(searches), words(options));
        self.config.dns_config = Some(DnsConfig { servers, searches, options });
        self
    }

    /// Makes a TCP port of its containers a port of the host.
    pub(crate) fn host_port(mut self, host_port: i32, container_port: i32) -> Self {
        let protocol = Protocol::Tcp.into();
        let host_ip = String::new();
        self.config.port_mappings.push(PortMapping { protocol, container_port, host_port, host_ip });
        self
    }

    /// Changes what the other methods have no words for.
    pub(crate) fn config(mut self, change: impl FnOnce(&mut PodSandboxConfig)) -> Self {
        change(&mut self.config);
        self
    }

    /// Limits the memory of its cgroup on the host, as kubelet does if each container has a limit.
    pub(crate) fn memory_max(mut self, bytes: u64) -> Self {
        self.limits.push(("memory.max", bytes.to_string()));
        self
    }

    /// Limits the processor time of its cgroup on the host, as kubelet does if each container has a limit.
    pub(crate) fn cpu_max(mut self, thousandths: u64) -> Self {
        self.limits.push(("cpu.max", format!("{} 100000", thousandths * 100)));
        self
    }

    /// Limits the huge pages of its cgroup on the host, as kubelet does to what its containers request.
    pub(crate) fn huge_pages(mut self, pages: u64) -> Self {
        let bytes = (pages * (2 << 20)).to_string();
        self.limits.extend([("hugetlb.2MB.max", bytes.clone()), ("hugetlb.2MB.rsvd.max", bytes)]);
        self
    }

    /// Adds a label.
    pub(crate) fn label(mut self, key: &str, value: &str) -> Self {
        self.config.labels.insert(key.to_owned(), value.to_owned());
        self
    }

    /// Runs it as a part of a span of the client: `traceparent` of W3C Trace Context.
    pub(crate) fn span(mut self, traceparent: &'static str) -> Self {
        self.span = Some(traceparent);
        self
    }

    fn linux(&mut self) -> &mut LinuxPodSandboxConfig {
        self.config.linux.get_or_insert_default()
    }

    fn request(&self, pods: &Pods) -> RunPodSandboxRequest {
        let runtime_handler = pods.handler(self.host.runtime()).to_owned();
        RunPodSandboxRequest { config: Some(self.config.clone()), runtime_handler }
    }

    /// Expects that RunPodSandbox is refused with this code. The message.
    pub(crate) fn refused(self, code: Code) -> Result<String> {
        let pods = self.host.pods()?;
        make_cgroup(&self.config, &self.limits)?;
        let message = pods.client.refused(self.request(pods), code);
        remove_cgroup(&self.config);
        message
    }

    /// Runs it: RunPodSandbox.
    pub(crate) fn start(mut self) -> Result<Pod<'h>> {
        let pods = self.host.pods()?;
        let logs = scratch()?;
        self.config.log_directory = logs.path().display().to_string();
        make_cgroup(&self.config, &self.limits)?;
        let id = pods.client.call_in(self.span, self.request(pods))?.pod_sandbox_id;
        Ok(Pod { host: self.host, pods, config: self.config, id, logs, removed: false })
    }
}

/// A pod. Dropping it stops and removes it with its containers, whatever their state.
pub(crate) struct Pod<'h> {
    host: &'h Host,
    pods: &'h Pods,
    config: PodSandboxConfig,
    id: String,
    logs: TempDir,
    removed: bool,
}

impl<'h> Pod<'h> {
    /// A pod with a name of its own and what kubelet sets of each pod.
    pub(crate) fn plan(host: &'h Host) -> NewPod<'h> {
        let name = host.new_id();
        let metadata = PodSandboxMetadata {
            name: name.clone(),
            uid: format!("uid-of-{name}"),
            namespace: "e2e".to_owned(),
            attempt: 0,
        };
        let cgroup_parent = format!("/{CGROUPS}/{name}");
        let options = NamespaceOption { pid: NamespaceMode::Container.into(), ..Default::default() };
        let security_context =
            LinuxSandboxSecurityContext { namespace_options: Some(options), ..Default::default() };
        let linux = LinuxPodSandboxConfig {
            cgroup_parent,
            security_context: Some(security_context),
            ..Default::default()
        };
        let config = PodSandboxConfig {
            metadata: Some(metadata),
            hostname: name,
            linux: Some(linux),
            ..Default::default()
        };
        NewPod { host, config, limits: Vec::new(), span: None }
    }

    /// Runs an ordinary pod.
    pub(crate) fn start(host: &'h Host) -> Result<Pod<'h>> {
        Self::plan(host).start()
    }

    /// Its id.
    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    /// Its UID, by which kubelet names its directory of the pod.
    pub(crate) fn uid(&self) -> Result<&str> {
        Ok(&self.config.metadata.as_ref().context("a pod without metadata")?.uid)
    }

    /// Its cgroup on the host.
    pub(crate) fn cgroup(&self) -> Result<PathBuf> {
        cgroup_of(&self.config).context("a pod without a cgroup")
    }

    /// PodSandboxStatus.
    pub(crate) fn status(&self) -> Result<PodSandboxStatus> {
        let request = PodSandboxStatusRequest::from(self.id());
        self.pods.client.call(request)?.status.context("a pod without a status")
    }

    /// PortForward: sends `bytes` to a TCP port of the pod's loopback interface, and reads until the end.
    pub(crate) fn exchange_with_port(&self, port: u16, bytes: &[u8]) -> Result<Forwarded> {
        let request = PortForwardRequest { pod_sandbox_id: self.id.clone(), port: vec![port.into()] };
        let url = self.pods.client.call(request)?.url;
        Forwarded::exchange(&url, port, bytes, self.host.patience(CALL))
    }

    /// Its first IP address.
    pub(crate) fn ip(&self) -> Result<String> {
        Ok(self.status()?.network.context("a pod without a network")?.ip)
    }

    /// StopPodSandbox.
    pub(crate) fn stop(&self) -> Result<()> {
        self.pods.client.call(StopPodSandboxRequest::from(self.id()))?;
        Ok(())
    }

    /// Stops and removes it, with what it still has of containers.
    pub(crate) fn remove(mut self) -> Result<()> {
        self.stop()?;
        self.pods.client.call(RemovePodSandboxRequest::from(self.id()))?;
        self.removed = true;
        remove_cgroup(&self.config);
        Ok(())
    }

    /// A container that is not yet created.
    pub(crate) fn container(&self) -> NewContainer<'_> {
        let name = self.host.new_id();
        let options = NamespaceOption {
            pid: self.pid_mode(),
            userns_options: self.namespace_options().and_then(|options| options.userns_options.clone()),
            ..Default::default()
        };
        let security =
            LinuxContainerSecurityContext { namespace_options: Some(options), ..Default::default() };
        let linux = LinuxContainerConfig { resources: None, security_context: Some(security) };
        let config = ContainerConfig {
            log_path: format!("{name}.log"),
            metadata: Some(ContainerMetadata { name, attempt: 0 }),
            image: Some(ImageSpec { image: IMAGE.to_owned() }),
            linux: Some(linux),
            ..Default::default()
        };
        NewContainer { pod: self, config }
    }

    fn pid_mode(&self) -> i32 {
        self.namespace_options().map_or(NamespaceMode::Container.into(), |options| options.pid)
    }

    fn namespace_options(&self) -> Option<&NamespaceOption> {
        let context = self.config.linux.as_ref().and_then(|linux| linux.security_context.as_ref());
        context.and_then(|context| context.namespace_options.as_ref())
    }
}

impl Drop for Pod<'_> {
    fn drop(&mut self) {
        if self.removed {
            return;
        }
        // The case has failed, or ends with the pod alive: the next case is not to find it. What cannot be removed is
        // for the next look at the host to report.
        let _ = self.stop();
        let _ = self.pods.client.call(RemovePodSandboxRequest::from(self.id()));
        remove_cgroup(&self.config);
    }
}

/// The directory of a pod's cgroup, with cgroup v2.
fn cgroup_of(config: &PodSandboxConfig) -> Option<PathBuf> {
    let parent = &config.linux.as_ref()?.cgroup_parent;
    Some(Path::new("/sys/fs/cgroup").join(parent.trim_start_matches('/')))
}

/// What kubelet does before it runs a pod: makes the pod's cgroup, with every controller that the host has, and these
/// limits. (On a host with cgroup v1 there is nothing to switch on, and the runtime makes it.)
fn make_cgroup(config: &PodSandboxConfig, limits: &[(&str, String)]) -> Result<()> {
    let root = Path::new("/sys/fs/cgroup");
    let Ok(controllers) = fs::read_to_string(root.join("cgroup.controllers")) else { return Ok(()) };
    let Some(pod) = cgroup_of(config) else { return Ok(()) };
    fs::create_dir_all(&pod).with_context(|| format!("cannot make {}", pod.display()))?;
    let all: Vec<_> = controllers.split_whitespace().map(|name| format!("+{name}")).collect();
    for parent in [root, &root.join(CGROUPS)] {
        let file = parent.join("cgroup.subtree_control");
        fs::write(&file, all.join(" ")).with_context(|| format!("cannot write {}", file.display()))?;
    }
    for (name, limit) in limits {
        let file = pod.join(name);
        fs::write(&file, limit).with_context(|| format!("cannot write {}", file.display()))?;
    }
    Ok(())
}

/// What kubelet does when its pod is gone. A runtime that left something in the cgroup keeps it from going.
fn remove_cgroup(config: &PodSandboxConfig) {
    if let Some(cgroup) = cgroup_of(config) {
        let _ = fs::remove_dir(cgroup);
    }
}

/// A container of a pod that is not yet created.
pub(crate) struct NewContainer<'p> {
    pod: &'p Pod<'p>,
    config: ContainerConfig,
}

impl<'p> NewContainer<'p> {
    /// Names it, for another attempt of the same container.
    pub(crate) fn named(mut self, name: &str, attempt: u32) -> Self {
        self.config.metadata = Some(ContainerMetadata { name: name.to_owned(), attempt });
        self
    }

    /// Sets a variable of its environment.
    pub(crate) fn env(mut self, key: &str, value: &str) -> Self {
        self.config.envs.push(KeyValue { key: key.to_owned(), value: value.to_owned() });
        self
    }

    /// Sets its working directory.
    pub(crate) fn cwd(mut self, path: &str) -> Self {
        self.config.working_dir = path.to_owned();
        self
    }

    /// Mounts a path of the host.
    pub(crate) fn mount(mut self, source: &Path, destination: &str) -> Self {
        let (container_path, host_path) = (destination.to_owned(), source.display().to_string());
        self.config.mounts.push(Mount { container_path, host_path, readonly: false });
        self
    }

    /// Mounts a path of the host for reading only.
    pub(crate) fn mount_read_only(mut self, source: &Path, destination: &str) -> Self {
        self = self.mount(source, destination);
        self.config.mounts.iter_mut().rev().take(1).for_each(|mount| mount.readonly = true);
        self
    }

    /// Changes its security context.
    pub(crate) fn security(mut self, change: impl FnOnce(&mut LinuxContainerSecurityContext)) -> Self {
        let linux = self.config.linux.get_or_insert_default();
        change(linux.security_context.get_or_insert_default());
        self
    }

    /// Puts it in the pid namespace of another container, as an ephemeral container that debugs that one.
    pub(crate) fn into_processes_of(self, target: &Container<'_>) -> Self {
        let (pid, target_id) = (NamespaceMode::Target.into(), target.id.clone());
        let options = NamespaceOption { pid, target_id, ..Default::default() };
        self.security(|security| security.namespace_options = Some(options))
    }

    /// Limits its resources.
    pub(crate) fn resources(mut self, resources: LinuxContainerResources) -> Self {
        self.config.linux.get_or_insert_default().resources = Some(resources);
        self
    }

    /// Limits its memory, in MiB.
    pub(crate) fn memory_limit(self, mib: i64) -> Self {
        self.resources(LinuxContainerResources { memory_limit_in_bytes: mib << 20, ..Default::default() })
    }

    /// Changes what the other methods have no words for.
    pub(crate) fn config(mut self, change: impl FnOnce(&mut ContainerConfig)) -> Self {
        change(&mut self.config);
        self
    }

    /// The request that creates it.
    fn request(&self) -> CreateContainerRequest {
        CreateContainerRequest {
            pod_sandbox_id: self.pod.id.clone(),
            config: Some(self.config.clone()),
            sandbox_config: Some(self.pod.config.clone()),
        }
    }

    /// Creates it: CreateContainer.
    pub(crate) fn create(mut self, command: &[&str]) -> Result<Container<'p>> {
        self.config.command = words(command);
        let id = self.pod.pods.client.call(self.request())?.container_id;
        let shown = format!("container: {}", command.join(" "));
        Ok(Container { pod: self.pod, id, log_path: self.config.log_path, shown })
    }

    /// Creates and starts it.
    pub(crate) fn start(self, command: &[&str]) -> Result<Container<'p>> {
        let container = self.create(command)?;
        container.start()?;
        Ok(container)
    }

    /// Runs it to its end and removes it.
    pub(crate) fn run(self, command: &[&str]) -> Result<Finished> {
        let container = self.start(command)?;
        let finished = container.finish()?;
        container.remove()?;
        Ok(finished)
    }

    /// Like [`NewContainer::run`], of a shell script.
    pub(crate) fn sh(self, script: &str) -> Result<Finished> {
        self.run(&["sh", "-c", script])
    }
}

/// A container of a pod. It stays when this is dropped, and goes with its pod.
pub(crate) struct Container<'p> {
    pod: &'p Pod<'p>,
    id: String,
    log_path: String,
    shown: String,
}

impl Container<'_> {
    /// Its id.
    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    fn client(&self) -> &Client {
        &self.pod.pods.client
    }

    fn patience(&self, ordinary: Duration) -> Duration {
        self.pod.host.patience(ordinary)
    }

    /// StartContainer.
    pub(crate) fn start(&self) -> Result<()> {
        self.client().call(StartContainerRequest::from(self.id()))?;
        Ok(())
    }

    /// StopContainer: the stop signal, and a kill after so many seconds.
    pub(crate) fn stop(&self, timeout: i64) -> Result<()> {
        self.client().call(StopContainerRequest { container_id: self.id.clone(), timeout })?;
        Ok(())
    }

    /// RemoveContainer, which kills it if it still runs.
    pub(crate) fn remove(self) -> Result<()> {
        self.client().call(RemoveContainerRequest::from(self.id()))?;
        Ok(())
    }

    /// UpdateContainerResources.
    pub(crate) fn update(&self, resources: LinuxContainerResources) -> Result<()> {
        let (container_id, linux) = (self.id.clone(), Some(resources));
        self.client().call(UpdateContainerResourcesRequest { container_id, linux })?;
        Ok(())
    }

    /// ContainerStatus.
    pub(crate) fn status(&self) -> Result<ContainerStatus> {
        let answer = self.client().call(ContainerStatusRequest::from(self.id()))?;
        answer.status.context("a container without a status")
    }

    /// Expects that it is in this state.
    pub(crate) fn is(&self, expected: ContainerState) -> Result<()> {
        let came = self.status()?.state();
        ensure!(came == expected, "expected  {} to be {expected:?}\ncame      {came:?}", self.shown);
        Ok(())
    }

    /// Waits until it has exited, and returns its last status.
    pub(crate) fn wait(&self) -> Result<ContainerStatus> {
        let what = format!("the end of {}", self.shown);
        wait_until(&what, self.patience(SETTLES), || Ok(self.status()?.state() == ContainerState::Exited))?;
        self.status()
    }

    /// Waits until it has exited. What it wrote is what its log says.
    pub(crate) fn finish(&self) -> Result<Finished> {
        let started = Instant::now();
        let status = Some(self.wait()?.exit_code);
        let Log { stdout, stderr } = self.log()?;
        Ok(Finished { command: self.shown.clone(), status, stdout, stderr, took: started.elapsed() })
    }

    /// Where its log is.
    pub(crate) fn log_file(&self) -> PathBuf {
        self.pod.logs.path().join(&self.log_path)
    }

    /// What it has written so far, as kubelet's log file has it.
    pub(crate) fn log(&self) -> Result<Log> {
        let text =
            fs::read(self.log_file()).with_context(|| format!("cannot read the log of {}", self.shown))?;
        Log::parse(&text).with_context(|| format!("in the log of {}", self.shown))
    }

    /// Waits until its log has this text on standard output.
    pub(crate) fn wait_for(&self, text: &str) -> Result<()> {
        let what = format!("{text:?} in the log of {}", self.shown);
        wait_until(&what, self.patience(SETTLES), || Ok(contains(&self.log()?.stdout, text)))
    }

    /// ExecSync, without a time limit.
    pub(crate) fn exec(&self, command: &[&str]) -> Result<Finished> {
        let started = Instant::now();
        let answer = self.client().call(self.exec_request(command, 0))?;
        Ok(Finished {
            command: format!("exec: {}", command.join(" ")),
            status: Some(answer.exit_code),
            stdout: answer.stdout,
            stderr: answer.stderr,
            took: started.elapsed(),
        })
    }

    /// ExecSync of a shell script.
    pub(crate) fn sh(&self, script: &str) -> Result<Finished> {
        self.exec(&["sh", "-c", script])
    }

    /// The request that executes a command, for at most so many seconds if not 0.
    pub(crate) fn exec_request(&self, command: &[&str], timeout: i64) -> ExecSyncRequest {
        ExecSyncRequest { container_id: self.id.clone(), cmd: words(command), timeout }
    }

    /// Exec with streams: input, output, and errors or a terminal.
    pub(crate) fn exec_stream(&self, command: &[&str], tty: bool) -> Result<Stream> {
        let (container_id, cmd) = (self.id.clone(), words(command));
        let request = ExecRequest { container_id, cmd, tty, stdin: true, stdout: true, stderr: !tty };
        let url = self.client().call(request)?.url;
        Stream::open(&url, &format!("exec: {}", command.join(" ")), self.patience(CALL))
    }

    /// Attach with streams.
    pub(crate) fn attach(&self, tty: bool) -> Result<Stream> {
        let container_id = self.id.clone();
        let request = AttachRequest { container_id, stdin: true, tty, stdout: true, stderr: !tty };
        let url = self.client().call(request)?.url;
        Stream::open(&url, &format!("attached {}", self.shown), self.patience(CALL))
    }
}

/// A container's log, by stream.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Log {
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: Vec<u8>,
}

impl Log {
    /// Reads the lines `TIME STREAM TAG CONTENT`, where the tag P says that the line goes on in the next one
    /// (k8s.io/cri-client, logs).
    fn parse(text: &[u8]) -> Result<Self> {
        let mut log = Self::default();
        for line in text.split_inclusive(|&byte| byte == b'\n') {
            let fields: Vec<_> = line.splitn(4, |&byte| byte == b' ').collect();
            let &[_, stream, tag, content] = fields.as_slice() else {
                bail!("the line {:?} does not have four fields", String::from_utf8_lossy(line));
            };
            let stream = match stream {
                b"stdout" => &mut log.stdout,
                b"stderr" => &mut log.stderr,
                other => bail!("a line of the stream {:?}", String::from_utf8_lossy(other)),
            };
            match tag {
                b"F" => stream.extend_from_slice(content),
                b"P" => stream.extend_from_slice(content.strip_suffix(b"\n").unwrap_or(content)),
                other => bail!("a line with the tag {:?}", String::from_utf8_lossy(other)),
            }
        }
        Ok(log)
    }
}

/// Owned words of a command.
pub(crate) fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|&word| word.to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_is_read_by_stream_and_long_lines_are_joined() {
        let text = b"2026-11-21T10:00:00.1Z stdout F one two\n2026-11-21T10:00:00.2Z stderr F oops\n\
                     2026-11-21T10:00:00.3Z stdout P long \n2026-11-21T10:00:00.3Z stdout F line\n";
        let log = Log::parse(text).unwrap();
        assert_eq!(log, Log { stdout: b"one two\nlong line\n".into(), stderr: b"oops\n".into() });
    }

    #[test]
    fn a_line_that_is_none_is_an_error() {
        assert!(Log::parse(b"garbage\n").is_err());
        assert!(Log::parse(b"2026-11-21T10:00:00.1Z stdin F x\n").is_err());
        assert!(Log::parse(b"2026-11-21T10:00:00.1Z stdout Q x\n").is_err());
    }
}
