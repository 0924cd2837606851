//! The requests: their messages, the OCI spec in them, and what becomes of both.

use std::path::{Component, Path};

use anyhow::{Result, ensure};
use bulkhead_agent::{
    cgroup::Setting,
    network::Interface,
    spec::{self, PodSharing, Present, Resolved, SpecError},
    stage_config::{CommonConfig, MountKind, ProcessConfig, StageConfig},
};
use bulkhead_agent_api::agent::{
    ConfigureNetworkRequest, CreateContainerRequest, ExecProcessRequest, JoinedNamespace,
    UpdateContainerRequest,
};
use bulkhead_fuzz::input::Input;
use protobuf::Message;
use serde_json::Value;

use crate::document;

/// A spec in which every field is set that the agent reads.
const EVERYTHING: &str = include_str!("everything.json");

/// BPF_MAXINSNS of linux/bpf_common.h.
const LONGEST_FILTER: usize = 4096;

/// Reads a request as the service does.
pub fn run(bytes: &[u8]) -> Result<()> {
    let mut input = Input::new(bytes);
    match input.below(8) {
        0 => create(&parse(&mut input)),
        1 => exec(&parse::<ExecProcessRequest>(&mut input).process_json),
        2 => update(&parse::<UpdateContainerRequest>(&mut input).resources_json),
        3 => network(parse(&mut input)),
        4 => exec(&changed("/process", &mut input)?),
        5 => update(&changed("/linux/resources", &mut input)?),
        _ => {
            let mut request = CreateContainerRequest::new();
            request.pause = input.below(4) == 0;
            let kinds = ["pid", "network", "ipc", "uts", "mount", ""];
            for _ in 0..input.below(3) {
                let mut joined = JoinedNamespace::new();
                joined.kind = input.choose(&kinds).into();
                request.joined.push(joined);
            }
            request.spec_json = changed("", &mut input)?;
            create(&request)
        }
    }
}

/// A message of the rest of the bytes; of what is none, one without content.
fn parse<M: Message>(input: &mut Input) -> M {
    M::parse_from_bytes(input.bytes(usize::MAX)).unwrap_or_default()
}

/// This part of [`EVERYTHING`], changed.
fn changed(pointer: &str, input: &mut Input) -> Result<Vec<u8>> {
    let everything: Value = serde_json::from_str(EVERYTHING)?;
    let part = everything.pointer(pointer).cloned().unwrap_or_default();
    Ok(document::change(part, input).to_string().into_bytes())
}

fn create(request: &CreateContainerRequest) -> Result<()> {
    let mut sharing = PodSharing { is_pause: request.pause, ..PodSharing::default() };
    for joined in &request.joined {
        sharing.joined |= spec::shared_namespace(&joined.kind).unwrap_or(0);
    }
    match spec::resolve(&request.spec_json, Path::new("/sys/fs/cgroup/c"), sharing) {
        Ok(resolved) => check(resolved),
        Err(error) => refused(&error),
    }
}

fn exec(json: &[u8]) -> Result<()> {
    match spec::resolve_exec(json, CommonConfig::default()) {
        Ok(process) => check_process(&process),
        Err(error) => refused(&error),
    }
}

fn update(json: &[u8]) -> Result<()> {
    let present = Present { cpu_max: "50000 100000".into(), memory_max: 1 << 20, memory_current: 1 << 19 };
    match spec::resolve_update(json, &present) {
        Ok(update) => check_settings(&update.settings),
        Err(error) => refused(&error),
    }
}

fn network(request: ConfigureNetworkRequest) -> Result<()> {
    let name = request.name.clone();
    let is_file = matches!(Path::new(&name).components().collect::<Vec<_>>()[..], [Component::Normal(_)]);
    ensure!(Interface::try_from(request).is_err() || is_file, "an interface may be called {name:?}");
    Ok(())
}

/// A refusal says something.
fn refused(error: &SpecError) -> Result<()> {
    ensure!(!error.to_string().is_empty(), "a refusal without a reason");
    Ok(())
}

/// Whatever was asked for, the container's files and parameters are where they may be, and its init is told of them in
/// one line, without loss.
fn check(resolved: Resolved) -> Result<()> {
    check_settings(&resolved.settings)?;
    let parameters = resolved.interface_sysctls.iter().chain(&resolved.init.sysctls);
    for (path, _) in parameters {
        let is_below = path.components().all(|part| matches!(part, Component::Normal(_)));
        let is_known = ["net", "kernel", "fs/mqueue"].iter().any(|root| path.starts_with(root));
        ensure!(is_below && is_known, "a parameter {path:?}");
    }
    check_process(&resolved.init.process)?;
    if let Some(rootfs) = &resolved.init.rootfs {
        let paths = rootfs.masked_paths.iter().chain(&rootfs.readonly_paths).chain([&rootfs.path]);
        let devices = rootfs.devices.iter().map(|device| &device.path);
        let mounts = rootfs.mounts.iter().map(|mount| &mount.destination);
        for path in paths.chain(devices).chain(mounts) {
            ensure!(path.is_absolute(), "a path {path:?}");
        }
        for mount in &rootfs.mounts {
            if let MountKind::Bind { source, .. } = &mount.kind {
                ensure!(source.is_absolute(), "a source {source:?}");
            }
        }
    }
    let line = serde_json::to_string(&StageConfig::Init(Box::new(resolved.init)))?;
    ensure!(!line.contains('\n'), "the stage is told in several lines");
    let again = serde_json::to_string(&serde_json::from_str::<StageConfig>(&line)?)?;
    ensure!(line == again, "expected  {line}\ncame      {again}");
    Ok(())
}

fn check_process(process: &ProcessConfig) -> Result<()> {
    ensure!(process.args.first().is_some_and(|program| !program.is_empty()), "no program");
    ensure!(process.args.iter().chain(&process.env).all(|word| !word.contains('\0')), "a word with a NUL");
    ensure!(process.cwd.is_absolute(), "a working directory {:?}", process.cwd);
    if let Some(filter) = &process.common.seccomp {
        let length = filter.program.len();
        ensure!((1..=LONGEST_FILTER).contains(&length), "a filter of {length} instructions");
    }
    Ok(())
}

/// Each is a file of the container's own cgroup.
fn check_settings(settings: &[Setting]) -> Result<()> {
    for Setting { file, .. } in settings {
        let components: Vec<_> = Path::new(file).components().collect();
        ensure!(matches!(components[..], [Component::Normal(_)]), "a setting of the file {file:?}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_is_taken_as_it_is() {
        let sharing = PodSharing::default();
        let resolved = spec::resolve(EVERYTHING.as_bytes(), Path::new("/sys/fs/cgroup/c"), sharing);
        check(resolved.unwrap_or_else(|error| panic!("{error}"))).unwrap_or_else(|error| panic!("{error}"));
    }
}
