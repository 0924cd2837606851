//! Whether containerd finds what makes the network of pods: the CNI plugins, and a configuration of them.

use std::{
    fs::{self, File},
    io::{self, Read},
    path::{Path, PathBuf},
};

use bulkhead_host_shim::operator::{chain, one_line};
use toml::Table;

use crate::{
    check::finding::Finding,
    containerd::{self, RUNTIME, handlers},
};

const CHECK: &str = "CNI";

/// Where distributions have the CNI plugins: upstream and kubeadm, Debian, Fedora.
const USUAL: [&str; 3] = ["/opt/cni/bin", "/usr/lib/cni", "/usr/libexec/cni"];

/// The extensions of the files that containerd reads. It uses the first file by name.
const EXTENSIONS: [&str; 3] = ["conf", "conflist", "json"];

/// The longest configuration that is read.
const LONGEST: u64 = 1 << 20;

/// Compares what containerd's configuration says with what is there. `root` is `/`, but in tests.
pub(super) fn cni(root: &Path, configuration: &Table) -> Finding {
    if !handlers(configuration).values().any(|runtime| runtime == RUNTIME) {
        return Finding::ok(CHECK, "only pods of Kubernetes need it, and they have no handler");
    }
    let Some(paths) = containerd::cni(configuration) else {
        return Finding::warn(
            CHECK,
            "containerd has no CRI plugin",
            "remove `cri` from `disabled_plugins` in its configuration; only Kubernetes needs it",
        );
    };
    let shown = paths.configuration.display();
    let first = match first_configuration(&at(root, &paths.configuration)) {
        Ok(Some(path)) => path,
        Ok(None) => {
            return Finding::warn(
                CHECK,
                format!("there is no configuration in {shown}, so pods of Kubernetes get no network"),
                "install a network add-on of Kubernetes, which writes one",
            );
        }
        Err(error) => {
            let found = format!("{shown} cannot be read: {}", chain(&error));
            return Finding::warn(CHECK, found, "install a network add-on of Kubernetes");
        }
    };
    let name = one_line(&first.file_name().unwrap_or_default().to_string_lossy());
    let plugins = match plugins(&first) {
        Ok(plugins) => plugins,
        Err(error) => {
            let found = format!("{name} in {shown} cannot be read: {}", chain(&error));
            return Finding::warn(CHECK, found, "mend it; its format is that of the CNI specification");
        }
    };
    let is_in = |directory: &Path, plugin: &str| at(root, directory).join(plugin).is_file();
    let missing: Vec<_> = plugins
        .iter()
        .filter(|plugin| !paths.programs.iter().any(|directory| is_in(directory, plugin)))
        .map(|plugin| one_line(plugin))
        .collect();
    let directories: Vec<_> = paths.programs.iter().map(|path| one_line(&path.to_string_lossy())).collect();
    let directories = directories.join(", ");
    if missing.is_empty() {
        return Finding::ok(CHECK, format!("{name} in {shown}, plugins in {directories}"));
    }
    let is_there = |directory: &&str| missing.iter().all(|plugin| is_in(Path::new(directory), plugin));
    let remedy = match USUAL.into_iter().find(is_there) {
        Some(directory) => {
            format!("set `bin_dir` in `cni` of containerd's CRI plugin to {directory}, where they are")
        }
        None => format!("install the CNI plugins in {directories}"),
    };
    let found = format!("{name} in {shown} needs {}, which {directories} does not have", missing.join(", "));
    Finding::warn(CHECK, found, remedy)
}

/// Where a path of the host is.
fn at(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

/// The file that containerd uses.
fn first_configuration(directory: &Path) -> io::Result<Option<PathBuf>> {
    let entries = match fs::read_dir(directory) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other?,
    };
    let mut files: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    files.retain(|file| {
        let extension = file.extension().and_then(|extension| extension.to_str());
        extension.is_some_and(|extension| EXTENSIONS.contains(&extension))
    });
    Ok(files.into_iter().min())
}

/// The programs that a configuration names: `type` of one plugin, or of each in the list `plugins`.
fn plugins(path: &Path) -> io::Result<Vec<String>> {
    let mut text = String::new();
    File::open(path)?.take(LONGEST).read_to_string(&mut text)?;
    let value: serde_json::Value = serde_json::from_str(&text)?;
    let one = std::slice::from_ref(&value);
    let list = value.get("plugins").and_then(|plugins| plugins.as_array()).map_or(one, Vec::as_slice);
    let name = |plugin: &serde_json::Value| plugin.get("type")?.as_str().map(str::to_owned);
    let names: Option<Vec<_>> = list.iter().map(name).collect();
    // A name is not a path.
    names
        .filter(|names| names.iter().all(|name| !name.is_empty() && !name.contains('/')))
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "a plugin in it has no valid `type`"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::finding::Status;

    fn configuration(added: &str) -> Table {
        let handler = format!(
            "[plugins.'io.containerd.grpc.v1.cri'.containerd.runtimes.bulkhead]\nruntime_type = '{RUNTIME}'\n"
        );
        toml::from_str(&format!("{handler}{added}")).unwrap()
    }

    fn write(root: &Path, path: &str, text: &str) {
        fs::create_dir_all(root.join(path).parent().unwrap()).unwrap();
        fs::write(root.join(path), text).unwrap();
    }

    #[test]
    fn what_a_configuration_names_must_be_where_containerd_looks() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let cri = configuration("[plugins.'io.containerd.grpc.v1.cri'.cni]\nbin_dir = '/opt/cni/bin'\n");
        let none = cni(root, &cri);
        assert!(
            none.status == Status::Warn
                && none.found.starts_with("there is no configuration in /etc/cni/net.d")
        );
        write(root, "etc/cni/net.d/readme.txt", "");
        write(root, "etc/cni/net.d/20-later.conf", "nonsense");
        let list = r#"{"plugins": [{"type": "bridge"}, {"type": "portmap"}]}"#;
        write(root, "etc/cni/net.d/10-pods.conflist", list);
        let missing = cni(root, &cri);
        let expected =
            "10-pods.conflist in /etc/cni/net.d needs bridge, portmap, which /opt/cni/bin does not have";
        assert_eq!((missing.status, missing.found.as_str()), (Status::Warn, expected));
        assert_eq!(missing.remedy.as_deref(), Some("install the CNI plugins in /opt/cni/bin"));
        for plugin in ["bridge", "portmap"] {
            write(root, &format!("usr/lib/cni/{plugin}"), "");
        }
        let remedy = cni(root, &cri).remedy.unwrap();
        assert!(remedy.contains("to /usr/lib/cni, where they are"), "{remedy}");
        let debian = configuration("[plugins.'io.containerd.grpc.v1.cri'.cni]\nbin_dir = '/usr/lib/cni'\n");
        let found = Finding::ok("CNI", "10-pods.conflist in /etc/cni/net.d, plugins in /usr/lib/cni");
        assert_eq!(cni(root, &debian), found);
        for broken in ["nonsense", "{}", r#"{"plugins": [{"type": "../sh"}]}"#] {
            write(root, "etc/cni/net.d/10-pods.conflist", broken);
            assert_eq!(
                cni(root, &debian).remedy.unwrap(),
                "mend it; its format is that of the CNI specification"
            );
        }
    }

    #[test]
    fn without_pods_of_kubernetes_nothing_is_missing() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(cni(dir.path(), &Table::new()).status, Status::Ok);
        assert!(cni(dir.path(), &configuration("")).found.contains("no CRI plugin"));
    }
}
