//! Makes the templates of this host before its first pod, so that this pod need not wait for the boot of a VM.

use std::{
    error::Error,
    ffi::OsString,
    fs, io,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use tokio::runtime::Builder;

use crate::{
    host::{
        blocking,
        journal::{Effect, Journal},
        processors,
        state_dir::{self, StateDir},
    },
    types::{
        config::{Config, ConfigError},
        timeline::Timeline,
    },
    vm::{
        memory::MemoryRange,
        start::{self, VmRequest},
        template::DIR,
    },
};

/// The names in the path of the state directory of a build, in place of a containerd's and a namespace's. It is listed
/// as a pod while the template is made.
const BUILDER: &str = "bulkhead";
const NAMESPACE: &str = "template-build";

/// Why a template is not made.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum BuildError {
    #[error("VMs with this configuration have no template, because it has `{setting}`")]
    NoTemplates { setting: &'static str },
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("cannot begin to make templates")]
    Begin(#[from] io::Error),
    #[error("cannot make a template of a VM of {memory_mib} MiB")]
    Make { memory_mib: u32, source: Box<dyn Error + Send + Sync> },
    #[error("{path}: something of the VM that was made a template is left; `bulkhead gc` removes it")]
    Left { path: PathBuf, source: Box<dyn Error + Send + Sync> },
    #[error("cannot tell of a template")]
    Tell(#[source] io::Error),
}

/// A template that is there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Built {
    /// Its directory.
    pub path: PathBuf,
    /// What its VMs begin with, MiB.
    pub memory_mib: u32,
    /// How many vCPUs of how many are online in its VMs.
    pub vcpus: (u8, u8),
    /// How long it took. None: it was there before.
    pub took: Option<Duration>,
}

/// What makes VMs need templates of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct VmShape {
    memory: MemoryRange,
    one_online: bool,
}

/// Makes each template that a pod with this configuration may need on this host, unless it is there, and tells of it.
/// `root` is the directory of all state directories.
pub fn build_templates(
    root: &Path,
    config: &Config,
    mut tell: impl FnMut(Built) -> io::Result<()>,
) -> Result<(), BuildError> {
    let excluded = [
        (!config.templates, "templates = false"),
        (config.console, "console = true"),
        (config.hugepages, "hugepages = true"),
    ];
    if let Some((_, setting)) = excluded.into_iter().find(|(is_set, _)| *is_set) {
        return Err(BuildError::NoTemplates { setting });
    }
    config.check_files()?;
    let vcpus = config.vcpus_on(processors::online().map_err(io::Error::other)?.len());
    // A build that was killed may have left what takes room.
    state_dir::sweep(root);
    let runtime = Builder::new_current_thread().enable_all().build()?;
    for (number, shape) in shapes(config, vcpus).into_iter().enumerate() {
        let id = format!("{}-{number}", std::process::id());
        let path = state_dir::path_of(root, BUILDER, NAMESPACE, &id);
        tell(runtime.block_on(build(&path, config, vcpus, shape))?).map_err(BuildError::Tell)?;
    }
    Ok(())
}

/// The shapes of the VMs of all pods: with and without a memory limit, with all vCPUs and with one.
fn shapes(config: &Config, vcpus: u8) -> Vec<VmShape> {
    let mut shapes = Vec::new();
    for is_limited in [false, true] {
        for one_online in [false, true] {
            let shape = VmShape { memory: MemoryRange::of_vm(config, is_limited, None), one_online };
            if !shapes.contains(&shape) && (vcpus > 1 || !one_online) {
                shapes.push(shape);
            }
        }
    }
    shapes
}

/// Makes one template. `path` is the state directory of the VM that becomes one.
async fn build(path: &Path, config: &Config, vcpus: u8, shape: VmShape) -> Result<Built, BuildError> {
    let memory_mib = shape.memory.least;
    let failed = |source: Box<dyn Error + Send + Sync>| BuildError::Make { memory_mib, source };
    let begun = Instant::now();
    // If this process is killed, the directory is abandoned, as one of a shim whose bundle is gone.
    let owner = Effect::Bundle { path: path.join("bundle") };
    let (state, mut journal) = StateDir::create(path, &[owner]).map_err(|error| {
        // It may be there in part, without a journal by which others could remove it. The error says what is wrong.
        drop(state_dir::clean_own(path));
        failed(error.into())
    })?;
    let before = names(state.root());
    let request = VmRequest {
        netns: None,
        cgroup_procs: Vec::new(),
        vcpus,
        memory: shape.memory,
        one_online: shape.one_online,
        timeline: Timeline::default(),
    };
    let made = start::make_template(&mut journal, &state, config, request).await;
    let removed = remove(state, journal).await;
    let template = made.map_err(|error| failed(error.into()))?;
    removed.map_err(|source| BuildError::Left { path: path.into(), source })?;
    let is_new = !template.file_name().is_some_and(|name| before.iter().any(|other| other == name));
    let online = if shape.one_online { 1 } else { vcpus };
    Ok(Built { path: template, memory_mib, vcpus: (online, vcpus), took: is_new.then(|| begun.elapsed()) })
}

async fn remove(state: StateDir, journal: Journal) -> Result<(), Box<dyn Error + Send + Sync>> {
    Ok(blocking::run(move || state.remove(journal), drop).await??)
}

/// The names of what is among the templates.
fn names(root: &Path) -> Vec<OsString> {
    let entries = fs::read_dir(root.join(DIR));
    entries.into_iter().flatten().flatten().map(|entry| entry.file_name()).collect()
}

#[cfg(test)]
mod tests {
    use nix::mount::{MsFlags, mount};

    use super::*;
    use crate::{host::state_dir::JOURNAL, testing::private_mounts, types::error::chain};

    fn refused(root: &Path, config: &Config) -> String {
        let error = build_templates(root, config, |_| Ok(())).unwrap_err();
        // The directory of templates may stay.
        assert_eq!(names(root), [""; 0]);
        assert!(fs::read_dir(root).unwrap().all(|entry| entry.unwrap().file_name() == DIR));
        chain(&error)
    }

    fn parts() -> Config {
        let parts =
            Config { kernel: "/bin/false".into(), initramfs: "/bin/false".into(), ..Config::default() };
        Config { vmm: "/bin/false".into(), ..parts }
    }

    #[test]
    fn a_build_without_any_room_leaves_nothing() {
        private_mounts();
        let dir = tempfile::tempdir().unwrap();
        // The directories fit, and no byte of the journal.
        mount(Some("full"), dir.path(), Some("tmpfs"), MsFlags::empty(), Some("size=4k")).unwrap();
        fs::write(dir.path().join("full"), "x").unwrap();
        let root = dir.path().join("run");
        let error = chain(&build_templates(&root, &parts(), |_| Ok(())).unwrap_err());
        assert!(error.contains("cannot write the journal") && error.contains("o space left"), "{error}");
        assert!(!root.exists(), "{:?}", state_dir::pods(&root).collect::<Vec<_>>());
    }

    #[test]
    fn what_a_killed_build_has_left_is_removed_by_the_next() {
        let dir = tempfile::tempdir().unwrap();
        let path = state_dir::path_of(dir.path(), BUILDER, NAMESPACE, "1-0");
        let owner = Effect::Bundle { path: path.join("bundle") };
        drop(StateDir::create(&path, &[owner]).unwrap());
        let journal = fs::read_to_string(path.join(JOURNAL)).unwrap();
        let own = format!("\"pid\":{}", std::process::id());
        assert!(journal.contains(&own), "{journal}");
        fs::write(path.join(JOURNAL), journal.replace(&own, "\"pid\":4294967295")).unwrap();
        assert!(state_dir::has_crashed(&path));
        refused(dir.path(), &parts());
        assert!(!path.exists());
    }

    #[test]
    fn each_shape_of_a_pod_has_a_template() {
        let config = Config { memory_mib: 256, unlimited_memory_mib: Some(512), ..Config::default() };
        let shapes_of = |config: &Config, vcpus| {
            let shapes = shapes(config, vcpus).into_iter();
            shapes.map(|shape| (shape.memory.least, shape.one_online)).collect::<Vec<_>>()
        };
        assert_eq!(shapes_of(&config, 4), [(512, false), (512, true), (256, false), (256, true)]);
        assert_eq!(shapes_of(&config, 1), [(512, false), (256, false)]);
        let same = Config { unlimited_memory_mib: Some(256), ..config };
        assert_eq!(shapes_of(&same, 4), [(256, false), (256, true)]);
    }

    #[test]
    fn what_keeps_a_template_from_being_made_is_said_and_nothing_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let refused = |config: &Config| refused(dir.path(), config);
        let parts = parts();
        assert!(refused(&Config { templates: false, ..parts.clone() }).ends_with("`templates = false`"));
        assert!(refused(&Config { console: true, ..parts.clone() }).ends_with("`console = true`"));
        assert!(refused(&Config { hugepages: true, ..parts.clone() }).ends_with("`hugepages = true`"));
        assert!(refused(&Config { kernel: "/nonexistent".into(), ..parts.clone() }).contains("install it"));
        let ended = refused(&parts);
        assert!(
            ended.starts_with("cannot make a template of a VM of ") && ended.contains("the VM ended"),
            "{ended}"
        );
    }
}
