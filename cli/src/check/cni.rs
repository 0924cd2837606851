//! Whether containerd finds what makes the network of pods: the CNI plugins, and a configuration of them.

use std::{
    fs::{self, File},
    io::{self, Read},
    path::{Path, PathBuf},
};

use bulkhead_host_shim::operator::{chain, one_line};
use toml::Table;

use crate::{
    check::{distribution::Family, finding::Finding},
    containerd::{self, Key, RUNTIME, at_root, handlers},
};

const CHECK: &str = "CNI";

/// Where distributions have the CNI plugins: upstream, kubeadm and RKE2; Debian; Fedora; k3s, and k3s before October
/// 2024.
const USUAL: [&str; 5] = [
    "/opt/cni/bin",
    "/usr/lib/cni",
    "/usr/libexec/cni",
    "/var/lib/rancher/k3s/data/cni",
    "/var/lib/rancher/k3s/data/current/bin",
];

/// The extensions of the files that containerd reads. It uses the first file by name.
const EXTENSIONS: [&str; 3] = ["conf", "conflist", "json"];

/// The longest configuration that is read.
const LONGEST: u64 = 1 << 20;

/// What `bulkhead check` says: without a handler for Bulkhead, nothing is missing. `root` is `/`, but in tests.
/// `generator`: k3s or RKE2 generates the configuration.
pub(super) fn cni(root: &Path, configuration: &Table, generator: Option<&str>) -> Finding {
    match handlers(configuration).values().any(|runtime| runtime == RUNTIME) {
        true => network(root, configuration, generator),
        false => Finding::ok(CHECK, "only pods of Kubernetes need it, and they have no handler"),
    }
}

/// Compares what containerd's configuration says with what is there.
pub(super) fn network(root: &Path, configuration: &Table, generator: Option<&str>) -> Finding {
    if let Some(finding) = disabled(configuration) {
        return finding;
    }
    let Some(paths) = containerd::cni(configuration) else {
        return Finding::warn(
            CHECK,
            "containerd has no CRI plugin",
            "remove `cri` from `disabled_plugins` in its configuration; only Kubernetes needs it",
        );
    };
    let shown = paths.configuration.display();
    let first = match first_configuration(&at_root(root, &paths.configuration)) {
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
            return Finding::warn(CHECK, found, "fix it; its format is that of the CNI specification");
        }
    };
    let is_in = |directory: &Path, plugin: &str| at_root(root, directory).join(plugin).is_file();
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
    // One directory must have all of them, since it takes the place of the one that is looked into now.
    let sought = if generator.is_none() && paths.key == Key::One { &plugins } else { &missing };
    let is_there = |directory: &&str| sought.iter().all(|plugin| is_in(Path::new(directory), plugin));
    let remedy = match (USUAL.into_iter().find(is_there), generator, paths.key) {
        (None, _, _) => format!(
            "install the CNI plugins in {directories}; or install them by {}, and check again",
            Family::of(root).install_cni_plugins()
        ),
        (Some(directory), Some(generator), _) => {
            format!("copy them from {directory}: {generator} generates containerd's configuration")
        }
        (Some(directory), None, Key::One) => {
            format!("set `bin_dir` in `cni` of containerd's CRI plugin to {directory}, where they are")
        }
        (Some(directory), None, Key::List) => {
            format!("add {directory}, where they are, to `bin_dirs` in `cni` of containerd's CRI plugin")
        }
    };
    let found = format!("{name} in {shown} needs {}, which {directories} does not have", missing.join(", "));
    Finding::warn(CHECK, found, remedy)
}

/// That containerd does not load its CRI plugin, if its configuration says so.
pub(crate) fn disabled(configuration: &Table) -> Option<Finding> {
    let name = one_line(containerd::disabled_cri(configuration)?);
    Some(Finding::warn(
        CHECK,
        "containerd's CRI plugin is disabled, so the runtime handlers have no effect",
        format!("remove `{name}` from `disabled_plugins` in its configuration; only Kubernetes needs it"),
    ))
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
        let none = cni(root, &cri, None);
        assert!(
            none.status == Status::Warn
                && none.found.starts_with("there is no configuration in /etc/cni/net.d")
        );
        write(root, "etc/cni/net.d/readme.txt", "");
        write(root, "etc/cni/net.d/20-later.conf", "nonsense");
        let list = r#"{"plugins": [{"type": "bridge"}, {"type": "portmap"}]}"#;
        write(root, "etc/cni/net.d/10-pods.conflist", list);
        let missing = cni(root, &cri, None);
        let expected =
            "10-pods.conflist in /etc/cni/net.d needs bridge, portmap, which /opt/cni/bin does not have";
        assert_eq!((missing.status, missing.found.as_str()), (Status::Warn, expected));
        write(root, "etc/os-release", "ID=fedora\n");
        let remedy = "install the CNI plugins in /opt/cni/bin; or install them by `dnf install \
                      containernetworking-plugins`, and check again";
        assert_eq!(cni(root, &cri, None).remedy.as_deref(), Some(remedy));
        for plugin in ["bridge", "portmap"] {
            write(root, &format!("usr/lib/cni/{plugin}"), "");
        }
        let remedy = cni(root, &cri, None).remedy.unwrap();
        assert!(remedy.contains("to /usr/lib/cni, where they are"), "{remedy}");
        let debian = configuration("[plugins.'io.containerd.grpc.v1.cri'.cni]\nbin_dir = '/usr/lib/cni'\n");
        let found = Finding::ok("CNI", "10-pods.conflist in /etc/cni/net.d, plugins in /usr/lib/cni");
        assert_eq!(cni(root, &debian, None), found);
        for broken in ["nonsense", "{}", r#"{"plugins": [{"type": "../sh"}]}"#] {
            write(root, "etc/cni/net.d/10-pods.conflist", broken);
            assert_eq!(
                cni(root, &debian, None).remedy.unwrap(),
                "fix it; its format is that of the CNI specification"
            );
        }
    }

    #[test]
    fn the_remedy_is_one_that_this_containerd_has() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let list = r#"{"plugins": [{"type": "bridge"}, {"type": "portmap"}]}"#;
        write(root, "etc/cni/net.d/10-pods.conflist", list);
        write(root, "opt/cni/bin/bridge", "");
        write(root, "var/lib/rancher/k3s/data/cni/portmap", "");
        let remedy = |added: &str, generator| {
            let added = added.replace("CRI", "plugins.'io.containerd.cri.v1.runtime'");
            cni(root, &configuration(&added), generator).remedy.unwrap()
        };
        let v3 = "[CRI.cni]\nbin_dir = ''\nbin_dirs = ['/opt/cni/bin']\n";
        let added = remedy(v3, None);
        assert!(
            added.starts_with("add /var/lib/rancher/k3s/data/cni, where they are, to `bin_dirs`"),
            "{added}"
        );
        let copied = remedy(v3, Some("k3s"));
        assert!(copied.starts_with("copy them from /var/lib/rancher/k3s/data/cni: k3s"), "{copied}");
        // With it in place of /opt/cni/bin, there would be no bridge.
        let one = "[CRI.cni]\nbin_dir = '/opt/cni/bin'\n";
        assert!(
            remedy(one, None).starts_with("install the CNI plugins in /opt/cni/bin; or install them by ")
        );
        write(root, "var/lib/rancher/k3s/data/cni/bridge", "");
        assert!(remedy(one, None).starts_with("set `bin_dir` "), "{}", remedy(one, None));
    }

    #[test]
    fn without_pods_of_kubernetes_nothing_is_missing() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(cni(dir.path(), &Table::new(), None).status, Status::Ok);
        assert!(cni(dir.path(), &configuration(""), None).found.contains("no CRI plugin"));
        let disabled = format!("disabled_plugins = ['io.containerd.grpc.v1.cri']\n{}", configuration(""));
        let finding = cni(dir.path(), &toml::from_str(&disabled).unwrap(), None);
        assert!(finding.found.contains("is disabled, so the runtime handlers have no effect"), "{finding:?}");
        assert!(finding.remedy.unwrap().starts_with("remove `io.containerd.grpc.v1.cri` from"));
    }
}
