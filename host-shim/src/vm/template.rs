//! Templates: saved VMs whose agents were ready and had no pod yet. A pod's VM is a clone of a template.
//!
//! There is one template for each shape of a VM. The first pod that needs it makes it, in `/run/bulkhead/.templates`.
//! It gets its name when it is complete. If a template cannot be made or used, the VM boots.

use std::{
    fs::{self, DirBuilder, File},
    io::{self, Read},
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    time::{Duration, Instant, SystemTime},
};

use bulkhead_vmm_api::{
    API_VERSION, ControlReply, MEMORY_FILE, Part, PartError, STATE_FILE, Shape, ShareConfig, VmConfig,
};
use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, utimensat};
use sha2::{Digest, Sha256};
use tokio::time::timeout;

use crate::{
    host::{
        bare::is_bare,
        blocking::{self, BlockingError},
        journal::Effect,
        no_symlinks::gone,
        state_dir::TEMPLATE_CONFIG,
    },
    types::error::chain,
    vm::vmm::{Launcher, ReadyListener, Vm, VmError, record_files},
};

/// The directory of templates. No directory of a containerd begins with a dot.
pub(crate) const DIR: &str = ".templates";

/// The files of the VM that becomes a template, in the state directory of the pod that makes it.
const CONFIG: &str = TEMPLATE_CONFIG;
const CONTROL: &str = "template-control.sock";
const VSOCK: &str = "template-vsock.sock";
const SHARE: &str = "template-share";

/// The first character of the name of a template that is being made. The pid of its shim follows.
const UNFINISHED: char = '.';

/// The list of the files that the template was made from, in the template's directory.
pub(crate) const PARTS: &str = "parts.json";
/// The longest list that is read. A list of three parts with the longest paths has a fifth of it.
const LONGEST_PARTS: u64 = 1 << 16;
/// The present time for a file, and none (utimensat(2)).
const NOW: Timespec = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
const OMIT: Timespec = Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT };
/// The files that the VMM writes there.
const SAVED: [&str; 2] = [MEMORY_FILE, STATE_FILE];

/// How many complete templates there are at most. One configuration has up to four shapes. Others come with the
/// configurations and annotations of pods, and whenever the host's memory or processors change.
const MOST_TEMPLATES: usize = 8;

/// Why there is no template.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TemplateError {
    #[error("cannot use {path}")]
    Io { path: PathBuf, source: io::Error },
    #[error("{path} has room for {room_mib} MiB, and a template may take {needed_mib}")]
    Room { path: PathBuf, room_mib: u64, needed_mib: u64 },
    #[error("{path}: another pod has been making a template for {} s", LOCK.as_secs())]
    Locked { path: PathBuf },
    #[error(transparent)]
    Blocking(#[from] BlockingError),
    #[error("the VMM did not confirm the request to save the VM")]
    Control(#[source] io::Error),
    #[error("the VM cannot be saved: {0}")]
    Save(String),
    #[error("the VM is not saved within {} s", SAVE.as_secs())]
    Late,
    #[error(transparent)]
    Vm(#[from] VmError),
}

/// A template that is complete.
#[derive(Debug)]
pub(crate) struct Template {
    path: PathBuf,
}

impl Template {
    /// Finds the template for VMs like `vm` in the directory `templates`, or makes it. None: there cannot be one; the
    /// log says why. An error: a VM of this shape does not boot.
    pub(crate) async fn ensure(
        launcher: &mut Launcher<'_>,
        vm: &VmConfig,
        templates: &Path,
    ) -> Result<Option<Self>, VmError> {
        match Self::find_or_make(launcher, vm, templates).await {
            Ok(template) => Ok(Some(template)),
            Err(TemplateError::Vm(e)) => Err(e),
            Err(e) => {
                tracing::warn!(error = chain(&e), "there is no template, so the VM boots");
                Ok(None)
            }
        }
    }

    /// The value for [`VmConfig::restore_from`].
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether it exists. If so, it counts as used now, because a pod is about to start as its clone.
    fn find_and_mark(&self) -> bool {
        let is_found = self.path.exists();
        if is_found {
            // If this fails, the template may be removed too early, and the next pod makes another.
            let now = Timestamps { last_access: OMIT, last_modification: NOW };
            let _ = utimensat(CWD, self.path.join(PARTS), &now, AtFlags::empty());
        }
        is_found
    }

    /// Removes the template, so that the next pod makes another. Its clones keep their mappings.
    pub(crate) fn discard(self) {
        // A shim may be adding a file to it.
        if let Err(e) = remove(&self.path) {
            tracing::warn!(path = %self.path.display(), error = chain(&e), "cannot remove the template");
        }
    }

    /// Finds the template for VMs like `vm` in the directory `templates`, or makes it.
    pub(crate) async fn find_or_make(
        launcher: &mut Launcher<'_>,
        vm: &VmConfig,
        templates: &Path,
    ) -> Result<Self, TemplateError> {
        // The VMM, the kernel and the initramfs may be on storage that hangs.
        let (config, vmm) = (vm.clone(), launcher.vmm.clone());
        let shape = blocking::run(move || Shape::of(&config, &vmm), drop)
            .await?
            .map_err(|PartError { path, source }| TemplateError::Io { path, source })?;
        let template = Self { path: templates.join(name(&shape).map_err(|e| io_error(templates, e))?) };
        if template.find_and_mark() {
            return Ok(template);
        }
        let _lock = lock(templates.to_owned()).await?;
        // Another pod may have made it meanwhile.
        if template.find_and_mark() {
            return Ok(template);
        }
        remove_unfinished(templates);
        check_room(templates, most_mib(vm.memory_mib))?;
        let begun = Instant::now();
        let unfinished = templates.join(format!("{UNFINISHED}{}", std::process::id()));
        let made = make(launcher, vm, &unfinished).await.and_then(|()| {
            let finish = |source| io_error(&unfinished, source);
            let json = serde_json::to_vec(&shape.parts).map_err(io::Error::from).map_err(finish)?;
            fs::write(unfinished.join(PARTS), json).map_err(finish)?;
            fs::rename(&unfinished, &template.path).map_err(finish)
        });
        if let Err(e) = made {
            // Otherwise these files would stay until the pod ends.
            let _ = fs::remove_dir_all(&unfinished);
            return Err(e);
        }
        let took_ms = begun.elapsed().as_millis();
        tracing::info!(path = %template.path.display(), took_ms, "the template is made");
        let (templates, made) = (templates.to_owned(), template.path.clone());
        let remove = move || {
            remove_outdated(&templates);
            remove_least_used(&templates, &made);
        };
        blocking::run(remove, drop).await?;
        Ok(template)
    }
}

fn io_error(path: &Path, source: io::Error) -> TemplateError {
    TemplateError::Io { path: path.to_owned(), source }
}

/// The name of a template: a digest of its shape.
fn name(shape: &Shape) -> io::Result<String> {
    let digest = Sha256::digest(serde_json::to_vec(&(API_VERSION, shape))?);
    Ok(digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect())
}

/// How long a pod waits for another that makes a template. Then its VM boots.
const LOCK: Duration = if cfg!(test) { Duration::from_millis(300) } else { Duration::from_secs(30) };

/// How long a VM may take to be saved: its memory is written to a file in memory. Other pods wait for less.
const SAVE: Duration = Duration::from_secs(if cfg!(test) { 3 } else { 60 });

/// Keeps all other pods from making a template until the file is dropped.
async fn lock(templates: PathBuf) -> Result<File, TemplateError> {
    let path = templates.clone();
    let lock = move || -> io::Result<File> {
        DirBuilder::new().recursive(true).mode(0o700).create(&path)?;
        let dir = File::open(&path)?;
        dir.lock()?;
        Ok(dir)
    };
    match timeout(LOCK, blocking::run(lock, drop)).await {
        Ok(Ok(locked)) => locked.map_err(|source| io_error(&templates, source)),
        Ok(Err(error)) => Err(error.into()),
        Err(_) => Err(TemplateError::Locked { path: templates }),
    }
}

/// The most that a template of a VM with this memory takes, MiB: what a guest uses that has just booted, and its
/// descriptions of the memory.
pub(crate) fn most_mib(memory_mib: u32) -> u32 {
    const BOOTED_MIB: u32 = 128;
    memory_mib.min(BOOTED_MIB + memory_mib / 64)
}

/// Refuses to make a template that could fill the host's tmpfs.
fn check_room(templates: &Path, needed_mib: u32) -> Result<(), TemplateError> {
    let room = rustix::fs::statvfs(templates).map_err(|e| io_error(templates, e.into()))?;
    let room_mib = room.f_bavail.saturating_mul(room.f_frsize) >> 20;
    let needed_mib = needed_mib.into();
    if room_mib < needed_mib {
        return Err(TemplateError::Room { path: templates.to_owned(), room_mib, needed_mib });
    }
    Ok(())
}

/// Boots a VM like `vm` without a pod, and saves it to `unfinished`.
async fn make(launcher: &mut Launcher<'_>, vm: &VmConfig, unfinished: &Path) -> Result<(), TemplateError> {
    let Launcher { journal, state, .. } = launcher;
    let share = state.path().join(SHARE);
    for dir in [unfinished, &share] {
        journal.make_dir(dir).map_err(|source| io_error(dir, source))?;
    }
    for file in SAVED.into_iter().chain([PARTS]) {
        let path = unfinished.join(file);
        journal.record(Effect::File { path: path.clone() }).map_err(|source| io_error(&path, source))?;
    }
    record_files(journal, state, &[CONFIG, CONTROL, VSOCK])?;
    let listener = ReadyListener::bind(journal, state, VSOCK)?;
    let config = VmConfig {
        control: CONTROL.into(),
        vsock: VSOCK.into(),
        shares: vm.shares.iter().map(|share| ShareConfig { dir: SHARE.into(), ..share.clone() }).collect(),
        netns: None,
        // The pages of a template belong to all pods, so they are charged to the cgroup of none.
        cgroup_procs: Vec::new(),
        save_to: Some(unfinished.to_owned()),
        ..vm.clone()
    };
    let vm = launcher.boot(CONFIG, &config, listener).await?;
    let saved = timeout(SAVE, save(&vm)).await.unwrap_or(Err(TemplateError::Late));
    if saved.is_err() {
        vm.kill().await;
    }
    saved
}

/// Saves the VM. The VMM ends with that.
async fn save(vm: &Vm) -> Result<(), TemplateError> {
    match vm.control().save().await.map_err(TemplateError::Control)? {
        ControlReply::Ok => {}
        ControlReply::Memory { .. } | ControlReply::Counts { .. } | ControlReply::Devices(_) => {
            return Err(TemplateError::Control(io::ErrorKind::InvalidData.into()));
        }
        ControlReply::Error { message } => return Err(TemplateError::Save(message)),
    }
    let exit = vm.exited().await;
    if exit.is_success() { Ok(()) } else { Err(TemplateError::Save(exit.to_string())) }
}

/// Whether this is the directory of a template that is being made, or was never completed.
pub(crate) fn is_unfinished(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(UNFINISHED))
}

/// Removes the template at `path`. A pod that starts meanwhile finds a whole template or none.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    let mut hidden = std::ffi::OsString::from(format!("{UNFINISHED}{}-", std::process::id()));
    hidden.push(path.file_name().unwrap_or_default());
    let hidden = path.with_file_name(hidden);
    fs::rename(path, &hidden)?;
    // Whoever removes what was not completed may have removed this.
    match hidden.symlink_metadata() {
        // No version makes a file there, but one that somebody has put there would stay for good.
        Ok(metadata) if !metadata.is_dir() => gone(fs::remove_file(hidden)),
        _ => gone(fs::remove_dir_all(hidden)),
    }
}

/// Removes the templates that no pod will use: those that were never completed, those that have nothing, and those
/// whose parts were replaced. Returns them, and whether each had nothing. None: a pod is making a template.
pub(crate) fn remove_unused(templates: &Path) -> io::Result<Option<Vec<(PathBuf, bool)>>> {
    let lock = match File::open(templates) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Some(Vec::new())),
        other => other?,
    };
    match lock.try_lock() {
        Ok(()) => {}
        Err(fs::TryLockError::WouldBlock) => return Ok(None),
        Err(fs::TryLockError::Error(error)) => return Err(error),
    }
    let mut removed = Vec::new();
    // The directory may be removed meanwhile, and then it has nothing.
    let entries = match fs::read_dir(templates) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Some(removed)),
        other => other?,
    };
    for entry in entries {
        let path = match entry {
            Err(e) if e.kind() == io::ErrorKind::NotFound => break,
            other => other?.path(),
        };
        let is_bare = is_bare(&path);
        if is_bare || is_unfinished(&path) || is_outdated(&path) {
            // Whoever removes one by its name does not have the lock.
            gone(remove(&path))?;
            removed.push((path, is_bare));
        }
    }
    Ok(Some(removed))
}

/// Removes templates that were never complete, because their shims were killed. The caller has the lock, so nobody else
/// makes one.
fn remove_unfinished(templates: &Path) {
    let entries = fs::read_dir(templates).into_iter().flatten().flatten().map(|entry| entry.path());
    for path in entries.filter(|path| is_unfinished(path)) {
        tracing::warn!(path = %path.display(), "the template is removed, because it was not completed");
        Template { path }.discard();
    }
}

/// Removes templates whose parts were replaced. No pod will use them.
pub(crate) fn remove_outdated(templates: &Path) {
    let entries = fs::read_dir(templates).into_iter().flatten().flatten().map(|entry| entry.path());
    for path in entries.filter(|path| is_outdated(path)) {
        tracing::info!(path = %path.display(), "the template is removed, because its parts were replaced");
        Template { path }.discard();
    }
}

/// Removes what is more than [`MOST_TEMPLATES`]: those that no pod has used for longest, and never `made`. The caller
/// has the lock.
fn remove_least_used(templates: &Path, made: &Path) {
    let entries = fs::read_dir(templates).into_iter().flatten().flatten().map(|entry| entry.path());
    let others = entries.filter(|path| path != made && !is_unfinished(path));
    let mut others: Vec<_> = others.map(|path| (last_use(&path), path)).collect();
    others.sort_by(|one, other| other.cmp(one));
    for (_, path) in others.into_iter().skip(MOST_TEMPLATES - 1) {
        tracing::info!(path = %path.display(), "the template is removed, because {MOST_TEMPLATES} others were used since");
        Template { path }.discard();
    }
}

/// When a pod last started from the template. That is the time of its list of parts, which is never written again. The
/// time of the directory says when the template was made.
fn last_use(template: &Path) -> Option<SystemTime> {
    let metadata = fs::metadata(template.join(PARTS)).or_else(|_| fs::metadata(template));
    metadata.and_then(|metadata| metadata.modified()).ok()
}

/// Whether a part of the template was replaced, or its list of parts is damaged. A template without a list is being
/// made.
pub(crate) fn is_outdated(template: &Path) -> bool {
    let Ok(file) = File::open(template.join(PARTS)) else { return false };
    let mut text = Vec::new();
    if file.take(LONGEST_PARTS).read_to_end(&mut text).is_err() {
        return true;
    }
    let Ok(parts) = serde_json::from_slice::<Vec<Part>>(&text) else { return true };
    !parts.iter().all(Part::is_unchanged)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use bulkhead_agent_api::API_VERSION as AGENT_API_VERSION;
    use bulkhead_vmm_api::Transport;
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::{UnixListener, UnixStream},
    };

    use super::*;
    use crate::{
        host::state_dir::StateDir,
        testing::{Log, is_on_troubleshooting_page},
        types::config::Config,
        vm::start::{VmPlan, VmRequest, prepare},
    };

    /// A host whose VMM does as the test tells: it ends with the status that it finds in the file `NAME.end`, where
    /// NAME.json is its configuration; a clone runs at once, unless there is a reason why not.
    const VMM: &str = r#"#!/bin/sh
        state=$(dirname "$2")
        if grep -q '"restore_from": "' "$2"; then
            if test -e "$state/refuse"; then echo "it is damaged" >&2; exit 3; fi
            echo running
            exec sleep 60
        fi
        end="${2%json}end"
        until test -s "$end"; do sleep 0.01; done
        status=$(cat "$end")
        rm "$end"
        exit "$status"
    "#;

    #[test]
    fn vms_with_different_transports_have_different_templates() {
        let names = [Transport::Mmio, Transport::Pci].map(|transport| {
            let (parts, kernel_args) = (Vec::new(), Vec::new());
            let (vcpus, memory_mib, max_memory_mib) = (1, 64, None);
            name(&Shape { parts, kernel_args, vcpus, memory_mib, max_memory_mib, transport }).unwrap()
        });
        assert_ne!(names[0], names[1]);
    }

    struct Host {
        dir: tempfile::TempDir,
        state: StateDir,
        journal: crate::host::journal::Journal,
    }

    impl Host {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let vmm = dir.path().join("vmm");
            fs::write(&vmm, VMM).unwrap();
            fs::set_permissions(&vmm, fs::Permissions::from_mode(0o755)).unwrap();
            let (state, journal) = StateDir::create(&dir.path().join("run/c/ns/demo"), &[]).unwrap();
            Self { dir, state, journal }
        }

        fn at(&self, name: &str) -> PathBuf {
            self.state.path().join(name)
        }

        fn files(&mut self, console: bool) -> VmPlan {
            let vmm = self.dir.path().join("vmm");
            let (kernel, initramfs) = (vmm.clone(), vmm.clone());
            let config = Config { kernel, initramfs, vmm, console, ..Config::default() };
            let request = VmRequest::of_one_vcpu(&config);
            prepare(&mut self.journal, &self.state, &config, request).unwrap()
        }

        async fn start(&mut self) -> Result<Vm, VmError> {
            let files = self.files(false);
            Vm::start(&mut self.journal, &self.state, files).await
        }

        /// The names of what is there for good.
        fn templates(&self) -> Vec<String> {
            let entries = fs::read_dir(self.dir.path().join("run").join(DIR)).unwrap();
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
        }

        async fn end(self, vm: Vm) {
            vm.kill().await;
            self.state.remove(self.journal).unwrap();
            assert!(!self.dir.path().join("run/c").exists());
        }
    }

    /// The agent that says it is ready behind the socket `ready`.
    async fn agent(ready: &Path) {
        let mut stream = loop {
            match UnixStream::connect(ready).await {
                Ok(stream) => break stream,
                Err(_) => tokio::time::sleep(Duration::from_millis(1)).await,
            }
        };
        stream.write_u32_le(AGENT_API_VERSION).await.unwrap();
    }

    /// The VM that becomes a template: its agent, its control socket, and its end with this status.
    async fn play_template(state: PathBuf, status: u8) {
        let control = UnixListener::bind(state.join(CONTROL)).unwrap();
        agent(&state.join(format!("{VSOCK}_1026"))).await;
        let (mut stream, _) = control.accept().await.unwrap();
        let mut request = [0; 14];
        stream.read_exact(&mut request).await.unwrap();
        assert_eq!(&request, b"{\"op\":\"save\"}\n");
        let config: VmConfig = serde_json::from_slice(&fs::read(state.join(CONFIG)).unwrap()).unwrap();
        assert!(config.cgroup_procs.is_empty() && config.netns.is_none());
        assert_eq!(config.shares[0].dir, Path::new(SHARE));
        for file in SAVED {
            fs::write(config.save_to.as_ref().unwrap().join(file), "").unwrap();
        }
        stream.write_all(b"{\"result\":\"ok\"}\n").await.unwrap();
        fs::write(state.join("template.end"), status.to_string()).unwrap();
    }

    #[tokio::test]
    async fn one_is_made_and_the_next_sandbox_finds_it() {
        let mut host = Host::new();
        let state = host.state.path().to_owned();
        let (vm, ()) = tokio::join!(host.start(), play_template(state, 0));
        let vm = vm.unwrap();
        let made = host.templates();
        assert_eq!(made.len(), 1);
        let path = host.dir.path().join("run").join(DIR).join(&made[0]);
        assert_eq!(template_of(&host), path);
        vm.kill().await;
        // Nobody plays a VM that boots.
        fs::remove_file(host.at("vsock.sock_1026")).unwrap();
        let vm = host.start().await.unwrap();
        assert_eq!(host.templates(), made);
        host.end(vm).await;
    }

    /// Has a template be one that was used last so long ago.
    fn unused_for(template: &Path, time: Duration) {
        File::open(template.join(PARTS)).unwrap().set_modified(SystemTime::now() - time).unwrap();
    }

    #[tokio::test]
    async fn those_that_were_not_used_for_longest_make_room_for_a_new_one() {
        const HOUR: Duration = Duration::from_secs(3600);
        let mut host = Host::new();
        let templates = host.dir.path().join("run").join(DIR);
        let names: Vec<_> = (0..MOST_TEMPLATES + 3).map(|number| format!("{number:02x}")).collect();
        for (name, hours) in names.iter().zip(1..) {
            fs::create_dir_all(templates.join(name)).unwrap();
            fs::write(templates.join(name).join(PARTS), "[]").unwrap();
            unused_for(&templates.join(name), HOUR * hours);
        }
        // It has no list, and was made just now.
        fs::create_dir(templates.join("ff")).unwrap();
        let state = host.state.path().to_owned();
        let (vm, ()) = tokio::join!(host.start(), play_template(state, 0));
        vm.unwrap().kill().await;
        let made = template_of(&host);
        let mut expected: Vec<_> =
            names[..MOST_TEMPLATES - 2].iter().map(|name| templates.join(name)).collect();
        expected.extend([templates.join("ff"), made.clone()]);
        expected.sort();
        let mut left: Vec<_> = host.templates().iter().map(|name| templates.join(name)).collect();
        left.sort();
        assert_eq!(left, expected);

        // A clone that starts uses its template.
        unused_for(&made, HOUR);
        fs::remove_file(host.at("vsock.sock_1026")).unwrap();
        let vm = host.start().await.unwrap();
        assert_eq!(template_of(&host), made);
        let used = fs::metadata(made.join(PARTS)).unwrap().modified().unwrap();
        assert!(used.elapsed().unwrap() < HOUR / 2, "{used:?}");
        host.end(vm).await;
    }

    fn template_of(host: &Host) -> PathBuf {
        let config: VmConfig = serde_json::from_slice(&fs::read(host.at("vmm.json")).unwrap()).unwrap();
        config.restore_from.unwrap()
    }

    #[tokio::test]
    async fn what_a_killed_shim_has_begun_is_removed_and_not_completed() {
        let mut host = Host::new();
        let templates = host.dir.path().join("run").join(DIR);
        // One of the pids is ours by now.
        for pid in [1, std::process::id()] {
            let begun = templates.join(format!("{UNFINISHED}{pid}"));
            fs::create_dir_all(&begun).unwrap();
            fs::write(begun.join("left"), "").unwrap();
        }
        let state = host.state.path().to_owned();
        let (vm, ()) = tokio::join!(host.start(), play_template(state, 0));
        let made = host.templates();
        assert_eq!(made.len(), 1, "{made:?}");
        assert!(!templates.join(&made[0]).join("left").exists());
        host.end(vm.unwrap()).await;
    }

    #[tokio::test]
    async fn a_vm_that_cannot_be_saved_is_no_template_and_the_next_one_boots() {
        let mut host = Host::new();
        let state = host.state.path().to_owned();
        let ready = host.at("vsock.sock_1026");
        let log = Log::begin();
        let (vm, (), ()) = tokio::join!(host.start(), play_template(state, 1), agent(&ready));
        assert!(host.templates().is_empty());
        let (lines, text) = (log.lines(), "there is no template, so the VM boots");
        assert!(lines.iter().any(|line| line.contains(text)), "{lines:?}");
        assert!(is_on_troubleshooting_page(text));
        host.end(vm.unwrap()).await;
    }

    #[tokio::test]
    async fn a_template_that_is_refused_is_removed_and_the_vm_boots() {
        let mut host = Host::new();
        fs::write(host.at("refuse"), "").unwrap();
        let state = host.state.path().to_owned();
        let ready = host.at("vsock.sock_1026");
        let (vm, (), ()) = tokio::join!(host.start(), play_template(state, 0), agent(&ready));
        assert!(host.templates().is_empty());
        fs::remove_file(host.at("refuse")).unwrap();
        host.end(vm.unwrap()).await;
    }

    #[tokio::test]
    async fn a_vm_that_does_not_boot_is_told_as_such() {
        let mut host = Host::new();
        fs::write(host.at("template.end"), "4").unwrap();
        let error = host.start().await.unwrap_err();
        assert_eq!(error.to_string(), "the VM ended: the VMM ended and gave no reason (exit status: 4)");
    }

    #[tokio::test]
    async fn a_pod_that_makes_a_template_without_end_keeps_no_other_from_booting() {
        let mut host = Host::new();
        let templates = host.dir.path().join("run").join(DIR);
        fs::create_dir_all(&templates).unwrap();
        let maker = File::open(&templates).unwrap();
        maker.lock().unwrap();
        let ready = host.at("vsock.sock_1026");
        let (vm, ()) = timeout(Duration::from_secs(10), async { tokio::join!(host.start(), agent(&ready)) })
            .await
            .unwrap();
        assert!(host.templates().is_empty());
        host.end(vm.unwrap()).await;
    }

    #[tokio::test]
    async fn a_vm_that_is_saved_without_end_is_no_template_and_the_pod_boots() {
        let mut host = Host::new();
        // Whoever asks here is never answered.
        let _control = UnixListener::bind(host.at(CONTROL)).unwrap();
        let (template, ready) = (host.at(&format!("{VSOCK}_1026")), host.at("vsock.sock_1026"));
        let started = async { tokio::join!(host.start(), agent(&template), agent(&ready)) };
        let (vm, (), ()) = timeout(Duration::from_secs(10), started).await.unwrap();
        assert!(host.templates().is_empty());
        host.end(vm.unwrap()).await;
    }

    #[tokio::test]
    async fn a_vm_with_a_console_boots() {
        let mut host = Host::new();
        let ready = host.at("vsock.sock_1026");
        let files = host.files(true);
        let (vm, ()) = tokio::join!(Vm::start(&mut host.journal, &host.state, files), agent(&ready));
        assert!(!host.dir.path().join("run").join(DIR).exists());
        host.end(vm.unwrap()).await;
    }

    #[test]
    fn only_templates_of_parts_that_were_replaced_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let part = |name: &str| {
            fs::write(dir.path().join(name), "").unwrap();
            Part::of(&dir.path().join(name)).unwrap()
        };
        let templates = dir.path().join(DIR);
        for (name, parts) in [("whole", [part("a"), part("b")]), ("old", [part("a2"), part("c")])] {
            fs::create_dir_all(templates.join(name)).unwrap();
            fs::write(templates.join(name).join(PARTS), serde_json::to_vec(&parts).unwrap()).unwrap();
        }
        fs::create_dir(templates.join(".77")).unwrap();
        fs::write(dir.path().join("c"), "newer").unwrap();
        remove_outdated(&templates);
        assert!(templates.join("whole").exists() && templates.join(".77").exists());
        assert!(!templates.join("old").exists());
    }

    #[test]
    fn a_host_that_is_full_gets_no_template() {
        let dir = tempfile::tempdir().unwrap();
        check_room(dir.path(), 1).unwrap();
        let error = check_room(dir.path(), u32::MAX).unwrap_err().to_string();
        assert!(error.ends_with("and a template may take 4294967295"), "{error}");
    }
}
