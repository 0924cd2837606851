//! The commands that list pods and settings.

use std::{io::Write, path::Path};

use bulkhead_host_shim::operator::{Pod, PodState, pods};

use crate::{
    config_file::ConfigFile,
    error::CommandError,
    output::{age, listing, mib, or_none},
};

/// `bulkhead ps`.
pub(crate) fn ps(
    out: &mut impl Write,
    errors: &mut impl Write,
    root: &Path,
    is_json: bool,
) -> Result<(), CommandError> {
    let pods = pods(root).map_err(|source| CommandError::List { path: root.into(), source })?;
    let header =
        ["NAMESPACE", "ID", "STATE", "CONTAINERS", "SHIM", "VMM", "MEMORY", "VCPUS", "AGE", "CONTAINERD"];
    let cells = |pod: &Pod| {
        [
            pod.namespace.clone(),
            pod.id.clone(),
            state_name(pod.state).into(),
            pod.containers.len().to_string(),
            or_none(pod.shim_pid),
            or_none(pod.vmm_pid),
            or_none(pod.memory_bytes.map(mib)),
            or_none(pod.vcpus),
            or_none(pod.age_seconds.map(age)),
            pod.containerd.clone(),
        ]
    };
    listing(out, is_json, &pods, header, cells).map_err(CommandError::Output)?;
    // In JSON, each pod has its problems.
    if !is_json {
        for problem in pods.iter().flat_map(|pod| &pod.problems) {
            writeln!(errors, "warning: {problem}").map_err(CommandError::Output)?;
        }
    }
    Ok(())
}

fn state_name(state: PodState) -> &'static str {
    match state {
        PodState::Running => "running",
        PodState::Crashed => "crashed",
        PodState::Leftover => "leftover",
        PodState::Unknown => "unknown",
    }
}

/// `bulkhead config show`.
pub(crate) fn config_show(
    out: &mut impl Write,
    config: &ConfigFile,
    is_json: bool,
) -> Result<(), CommandError> {
    let settings = config.load()?.settings();
    listing(out, is_json, &settings, ["KEY", "VALUE", "ORIGIN"], |setting| {
        let origin =
            setting.origin.as_ref().map_or_else(|| "default".into(), |path| path.display().to_string());
        [setting.key.into(), or_none(setting.value.as_ref()), origin]
    })
    .map_err(CommandError::Output)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::output::shown;

    #[test]
    fn pods_that_cannot_be_read_are_listed_with_the_reason() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("run-containerd-containerd.sock/k8s.io/demo")).unwrap();
        let mut errors = Vec::new();
        let table = shown(|out| ps(out, &mut errors, dir.path(), false));
        let row: Vec<_> = table.lines().nth(1).unwrap().split_whitespace().collect();
        let expected =
            ["k8s.io", "demo", "unknown", "0", "-", "-", "-", "-", "-", "run-containerd-containerd.sock"];
        assert_eq!(row, expected);
        let errors = String::from_utf8(errors).unwrap();
        assert!(errors.starts_with("warning: ") && errors.contains("cannot read the journal"), "{errors}");
        let json = shown(|out| ps(out, &mut Vec::new(), dir.path(), true));
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!(json[0]["state"], "unknown");
        assert_eq!(json[0]["problems"].as_array().unwrap().len(), 1);
    }

    #[test]
    fn a_pod_that_containerd_has_forgotten_is_named_as_on_the_troubleshooting_page() {
        let dir = tempfile::tempdir().unwrap();
        let pod = dir.path().join("run-containerd-containerd.sock/k8s.io/demo");
        fs::create_dir_all(&pod).unwrap();
        let bundle = dir.path().join("bundle");
        let journal = format!(
            "{{\"effect\":\"shim\",\"pid\":4194304,\"start_time\":1}}\n\
             {{\"effect\":\"bundle\",\"path\":\"{}\"}}\n",
            bundle.display()
        );
        fs::write(pod.join("journal"), journal).unwrap();
        let state = || {
            let json = shown(|out| ps(out, &mut Vec::new(), dir.path(), true));
            let json: serde_json::Value = serde_json::from_str(&json).unwrap();
            json[0]["state"].as_str().unwrap().to_owned()
        };
        let left = state();
        assert!(
            include_str!("../../docs/troubleshooting.md").contains(&format!("Its state is `{left}`")),
            "{left}"
        );
        fs::create_dir(bundle).unwrap();
        assert_eq!(state(), "crashed");
    }

    #[test]
    fn each_setting_has_its_origin() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.toml");
        let config = ConfigFile { config: Some(path.clone()) };
        let missing = config_show(&mut Vec::new(), &config, false).unwrap_err().to_string();
        assert!(missing.contains("config.toml: there is no such file; name another one"), "{missing}");
        fs::write(&path, "memory_mib = 512\n").unwrap();
        let table = shown(|out| config_show(out, &config, false));
        let line = |key: &str| {
            let line = table.lines().find(|line| line.starts_with(key)).unwrap();
            line.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(line("memory_mib"), ["memory_mib", "512", path.to_str().unwrap()]);
        assert_eq!(line("vcpus"), ["vcpus", "-", "default"]);
        fs::write(&path, "memroy_mib = 512\n").unwrap();
        let error = config_show(&mut Vec::new(), &config, false).unwrap_err().to_string();
        assert!(error.ends_with("there is no key `memroy_mib`; did you mean `memory_mib`?"), "{error}");
    }
}
