//! Tests of an installation and of its removal, below a root directory of their own.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt, symlink},
    path::{Path, PathBuf},
    thread,
};

use super::{
    options::{DROP_IN, OWN_RECORD},
    steps::write_over,
    uninstall::uninstall_within,
    *,
};
use crate::containerd::{CRI_V2, CRI_V3, ContainerdConfig, IMPORTED, RECORD, recorded};

/// How long a test waits for a lock that nobody gives back.
const SHORT: Duration = Duration::from_millis(100);

/// All files below a directory.
fn tree(root: &Path) -> BTreeMap<PathBuf, String> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(root).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(tree(&path));
        } else {
            files.insert(path.clone(), fs::read_to_string(&path).unwrap());
        }
    }
    files
}

fn options(root: &Path) -> Options {
    named(None, root)
}

fn named(containerd_config: Option<&str>, root: &Path) -> Options {
    let containerd = ContainerdConfig { containerd_config: containerd_config.map(PathBuf::from) };
    Options { containerd, restart: false, root: Some(root.into()) }
}

fn said(act: impl FnOnce(&mut Vec<u8>) -> Result<(), CommandError>) -> String {
    let mut out = Vec::new();
    act(&mut out).unwrap();
    String::from_utf8(out).unwrap()
}

/// The root of a host that has containerd.
fn host() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir_all(dir.path().join("etc/containerd")).unwrap();
    fs::write(dir.path().join("etc/containerd/config.toml"), "version = 2\n").unwrap();
    dir
}

#[test]
fn what_is_installed_is_uninstalled_without_a_trace() {
    for configuration in [
        "version = 2\n",
        "version = 3\nimports = ['/etc/containerd/conf.d/*.toml']\n",
        // Without a version.
        "# root = '/var/lib/containerd'",
    ] {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        fs::create_dir_all(root.join("etc/containerd/conf.d")).unwrap();
        fs::write(root.join("etc/containerd/config.toml"), configuration).unwrap();
        let before = tree(root);
        // Of a package that was removed.
        fs::create_dir_all(root.join("var/lib/bulkhead-uninstall")).unwrap();
        fs::write(root.join("var/lib/bulkhead-uninstall/bulkhead"), "").unwrap();
        let first = said(|out| install(out, &options(root)));
        assert!(!root.join("var/lib/bulkhead-uninstall").exists());
        assert!(first.contains("wrote") && first.contains("systemctl restart containerd"), "{first}");
        let installed = tree(root);
        assert!(installed.contains_key(&root.join("etc/bulkhead/runtimeclass.yaml")));
        let ours = installed.values().filter(|text| text.contains(RUNTIME)).count();
        assert_eq!(ours, 1, "{installed:?}");
        let second = said(|out| install(out, &options(root)));
        assert!(second.contains("as it was") && !second.contains("wrote"), "{second}");
        assert_eq!(tree(root), installed);
        let removed = said(|out| uninstall(out, &options(root)));
        assert!(removed.contains("systemctl restart containerd"), "{removed}");
        assert_eq!(tree(root), before);
        assert!(!root.join("etc/bulkhead").exists());
        let again = said(|out| uninstall(out, &options(root)));
        assert!(again.starts_with("containerd's configuration is as it was"), "{again}");
    }
}

#[test]
fn what_was_installed_elsewhere_is_found_without_its_name() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    let at = |path: &str| root.join(path.trim_start_matches('/'));
    for directory in ["etc/containerd", "elsewhere"] {
        fs::create_dir_all(at(directory)).unwrap();
        fs::write(at(directory).join("config.toml"), "version = 2\n").unwrap();
    }
    let before = tree(root);
    let elsewhere = "/elsewhere/config.toml";
    let first = said(|out| install(out, &named(Some(elsewhere), root)));
    assert!(first.contains(&format!("wrote {}\n", at(RECORD).display())), "{first}");
    let installed = tree(root);
    assert!(installed[&at(elsewhere)].contains(RUNTIME) && !installed[&at(CONFIG)].contains(RUNTIME));
    // With the name and without it.
    for again in [named(Some(elsewhere), root), options(root)] {
        let said = said(|out| install(out, &again));
        assert!(said.contains("as it was") && !said.contains("wrote"), "{said}");
        assert_eq!(tree(root), installed);
    }
    let refused = install(&mut Vec::new(), &named(Some(CONFIG), root)).unwrap_err().to_string();
    assert!(refused.starts_with(&format!("{}: ", at(elsewhere).display())), "{refused}");
    assert!(refused.ends_with("run `bulkhead uninstall` first"), "{refused}");
    assert_eq!(tree(root), installed);
    let removed = said(|out| uninstall(out, &options(root)));
    assert!(removed.contains(&format!("removed {}\n", at(RECORD).display())), "{removed}");
    assert_eq!(tree(root), before);
    // The other way round, and for a file of its own that is imported.
    fs::write(at(CONFIG), "version = 3\nimports = ['/etc/containerd/conf.d/*.toml']\n").unwrap();
    install(&mut Vec::new(), &options(root)).unwrap();
    let refused = install(&mut Vec::new(), &named(Some(elsewhere), root)).unwrap_err().to_string();
    assert!(refused.starts_with(&format!("{}: ", at(IMPORTED).join(DROP_IN).display())), "{refused}");
    // What was removed by hand refuses nothing.
    fs::remove_file(at(IMPORTED).join(DROP_IN)).unwrap();
    install(&mut Vec::new(), &named(Some(elsewhere), root)).unwrap();
    // Another configuration than the recorded one leaves the record.
    uninstall(&mut Vec::new(), &named(Some(CONFIG), root)).unwrap();
    assert_eq!(recorded(root).unwrap().as_deref(), Some(Path::new(elsewhere)));
}

#[test]
fn what_the_operator_has_changed_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    fs::create_dir_all(root.join("etc/containerd")).unwrap();
    fs::write(root.join("etc/containerd/config.toml"), "version = 2\n").unwrap();
    install(&mut Vec::new(), &options(root)).unwrap();
    fs::write(root.join("etc/bulkhead/config.toml"), "memory_mib = 512\n").unwrap();
    let said = said(|out| uninstall(out, &options(root)));
    assert!(said.contains("etc/bulkhead/config.toml: it is not what this version writes"), "{said}");
    assert_eq!(tree(root).into_values().collect::<Vec<_>>(), ["memory_mib = 512\n", "version = 2\n"]);
}

#[test]
fn a_file_of_another_version_that_nobody_has_edited_is_replaced() {
    use sha2::{Digest, Sha256};
    let dir = host();
    let at = |path: &str| dir.path().join(path.trim_start_matches('/'));
    let before = tree(dir.path());
    install(&mut Vec::new(), &options(dir.path())).unwrap();
    let installed = tree(dir.path());
    let older = || {
        let lines = OWN_FILES.map(|(name, _)| format!("{:x}  {name}\n", Sha256::digest("# older\n")));
        fs::write(at("etc/bulkhead/installed-files"), lines.concat()).unwrap();
        OWN_FILES.iter().for_each(|(name, _)| fs::write(at(name), "# older\n").unwrap());
    };
    older();
    let upgraded = said(|out| install(out, &options(dir.path())));
    assert!(upgraded.contains("runtimeclass.yaml: it was that of another version"), "{upgraded}");
    assert!(!upgraded.contains("not the manifest of this version"), "{upgraded}");
    assert_eq!(tree(dir.path()), installed);
    // One that was edited stays, and is named.
    older();
    fs::write(at(MANIFEST), "# edited\n").unwrap();
    let again = said(|out| install(out, &options(dir.path())));
    assert!(again.contains("not the manifest of this version"), "{again}");
    assert_eq!(fs::read_to_string(at(MANIFEST)).unwrap(), "# edited\n");
    // Undone, it is known again. A removal knows it too.
    fs::write(at(MANIFEST), "# older\n").unwrap();
    install(&mut Vec::new(), &options(dir.path())).unwrap();
    assert_eq!(fs::read_to_string(at(MANIFEST)).unwrap(), installed[&at(MANIFEST)]);
    older();
    uninstall(&mut Vec::new(), &options(dir.path())).unwrap();
    assert_eq!(tree(dir.path()), before);
}

#[test]
fn a_record_of_digests_that_is_damaged_keeps_nothing_else() {
    let dir = host();
    let at = |path: &str| dir.path().join(path.trim_start_matches('/'));
    let before = tree(dir.path());
    install(&mut Vec::new(), &options(dir.path())).unwrap();
    let installed = tree(dir.path());
    fs::write(at(OWN_RECORD), b"\xff").unwrap();
    let again = said(|out| install(out, &options(dir.path())));
    assert!(again.contains("installed-files: cannot read it"), "{again}");
    assert_eq!(tree(dir.path()), installed);
    // One that cannot be written either fails, when all else is done.
    fs::remove_file(at(OWN_RECORD)).unwrap();
    fs::create_dir_all(at(OWN_RECORD).join("x")).unwrap();
    fs::create_dir_all(at(KEPT_PROGRAM)).unwrap();
    fs::remove_file(at(MANIFEST)).unwrap();
    fs::write(at("etc/containerd/config.toml"), "version = 2\n").unwrap();
    let mut out = Vec::new();
    let error = install(&mut out, &options(dir.path())).unwrap_err().to_string();
    assert!(error.ends_with("installed-files: cannot write it"), "{error}");
    let said_of_it = String::from_utf8(out).unwrap();
    assert!(said_of_it.contains("systemctl restart containerd"), "{said_of_it}");
    assert!(!at(KEPT_PROGRAM).exists() && at(MANIFEST).exists());
    // A removal needs nothing of it.
    fs::remove_dir_all(at(OWN_RECORD)).unwrap();
    fs::write(at(OWN_RECORD), b"\xff").unwrap();
    uninstall(&mut Vec::new(), &options(dir.path())).unwrap();
    assert_eq!(tree(dir.path()), before);
}

#[test]
fn what_an_installation_has_written_that_was_killed_is_known() {
    use sha2::{Digest, Sha256};
    let dir = host();
    let at = |path: &str| dir.path().join(path.trim_start_matches('/'));
    fs::create_dir_all(at("etc/bulkhead")).unwrap();
    let line = |name: &str, text: &str| format!("{:x}  {name}\n", Sha256::digest(text));
    let older = OWN_FILES.map(|(name, _)| line(name, "# older\n"));
    OWN_FILES.iter().for_each(|(name, _)| fs::write(at(name), "# older\n").unwrap());
    fs::write(at(OWN_RECORD), older.concat()).unwrap();
    // It ends at the last file, which cannot be written.
    let obstacle = at(&format!("{MANIFEST}.bulkhead-new"));
    fs::create_dir_all(&obstacle).unwrap();
    install(&mut Vec::new(), &options(dir.path())).unwrap_err();
    let record = fs::read_to_string(at(OWN_RECORD)).unwrap();
    for (name, text) in OWN_FILES {
        assert!(record.contains(&line(name, text)), "{record}");
        assert!(record.contains(&line(name, "# older\n")), "{record}");
    }
    fs::remove_dir(obstacle).unwrap();
    install(&mut Vec::new(), &options(dir.path())).unwrap();
    let record = fs::read_to_string(at(OWN_RECORD)).unwrap();
    assert_eq!(record, OWN_FILES.map(|(name, text)| line(name, text)).concat());
}

#[test]
fn digests_are_forgotten_with_the_last_of_their_files() {
    let dir = host();
    let at = |path: &str| dir.path().join(path.trim_start_matches('/'));
    install(&mut Vec::new(), &options(dir.path())).unwrap();
    fs::remove_file(at(MANIFEST)).unwrap();
    fs::create_dir_all(at(MANIFEST)).unwrap();
    uninstall(&mut Vec::new(), &options(dir.path())).unwrap_err();
    assert!(at(OWN_RECORD).exists());
    fs::remove_dir(at(MANIFEST)).unwrap();
    uninstall(&mut Vec::new(), &options(dir.path())).unwrap();
    assert!(!at("etc/bulkhead").exists());
}

#[test]
fn a_configuration_that_is_named_must_exist() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("new/config.toml");
    let options = Options { root: None, ..named(path.to_str(), Path::new("/")) };
    let error = configure(&mut Vec::new(), &options, &options.containerd()).unwrap_err().to_string();
    assert!(error.starts_with(&format!("{}: there is no such file, so", path.display())), "{error}");
    assert!(!dir.path().join("new").exists());
}

#[test]
fn a_disabled_plugin_is_said_to_ignore_the_handlers() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir_all(dir.path().join("etc/containerd")).unwrap();
    let text = "version = 2\ndisabled_plugins = ['io.containerd.grpc.v1.cri']\n";
    fs::write(dir.path().join("etc/containerd/config.toml"), text).unwrap();
    let said = said(|out| install(out, &options(dir.path())));
    assert!(said.contains("the runtime handlers have no effect\n      -> remove `io.containerd."), "{said}");
}

#[test]
fn a_line_that_the_operator_has_added_is_kept_or_named() {
    let cgroups = "  cgroup_writable = true\n";
    for (configuration, written) in [
        ("version = 2\n", "config.toml"),
        ("version = 3\nimports = ['/etc/containerd/conf.d/*.toml']\n", "conf.d/bulkhead.toml"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let at = |path: &str| dir.path().join("etc/containerd").join(path);
        fs::create_dir_all(at("conf.d")).unwrap();
        fs::write(at("config.toml"), configuration).unwrap();
        install(&mut Vec::new(), &options(dir.path())).unwrap();
        let ours = fs::read_to_string(at(written)).unwrap();
        let line = format!("runtime_type = \"{RUNTIME}\"\n");
        let edited = ours.replacen(&line, &format!("{line}{cgroups}"), 1);
        fs::write(at(written), &edited).unwrap();
        let again = said(|out| install(out, &options(dir.path())));
        assert!(again.contains("and cgroup_writable = true") && !again.contains("wrote"), "{again}");
        assert_eq!(fs::read_to_string(at(written)).unwrap(), edited);
        // What another version has written is replaced.
        fs::write(at(written), edited.replacen(&line, "runtime_type = \"old\"\n", 1)).unwrap();
        let upgraded = said(|out| install(out, &options(dir.path())));
        let gone = "are gone: runtime_type = \"old\"; cgroup_writable = true\n      -> if";
        assert!(upgraded.contains(gone), "{upgraded}");
        assert_eq!(fs::read_to_string(at(written)).unwrap(), ours);
    }
}

#[test]
fn the_link_of_a_server_of_metrics_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    let wants = dir.path().join("etc/systemd/system/multi-user.target.wants");
    fs::create_dir_all(&wants).unwrap();
    let link = wants.join("bulkhead-metrics.service");
    symlink("/usr/local/lib/systemd/system/bulkhead-metrics.service", &link).unwrap();
    let removed = said(|out| uninstall(out, &options(dir.path())));
    assert!(removed.contains(&format!("removed {}\n", link.display())), "{removed}");
    assert!(link.symlink_metadata().is_err());
    assert!(!said(|out| uninstall(out, &options(dir.path()))).contains("metrics"));
}

#[test]
fn a_file_that_cannot_be_read_keeps_nothing_else() {
    let dir = host();
    let at = |path: &str| dir.path().join(path);
    install(&mut Vec::new(), &options(dir.path())).unwrap();
    fs::write(at("etc/containerd/config.toml"), b"\xff").unwrap();
    fs::write(at("etc/bulkhead/runtimeclass.yaml"), b"\xff").unwrap();
    let mut out = Vec::new();
    let error = uninstall(&mut out, &options(dir.path())).unwrap_err().to_string();
    let said = String::from_utf8(out).unwrap();
    assert!(error.contains("etc/containerd/config.toml"), "{error}");
    assert!(said.contains("removed") && !at("etc/bulkhead/config.toml").exists(), "{said}");
    assert!(!said.contains("Running pods"), "{said}");
}

#[test]
fn a_configuration_that_is_not_cleaned_stays_recorded() {
    let dir = tempfile::tempdir().unwrap();
    let at = |path: &str| dir.path().join(path.trim_start_matches('/'));
    let elsewhere = "/elsewhere/config.toml";
    for directory in ["etc/containerd", "elsewhere"] {
        fs::create_dir_all(at(directory)).unwrap();
        fs::write(at(directory).join("config.toml"), "version = 2\n").unwrap();
    }
    let before = tree(dir.path());
    install(&mut Vec::new(), &named(Some(elsewhere), dir.path())).unwrap();
    let installed = fs::read(at(elsewhere)).unwrap();
    fs::write(at(elsewhere), b"\xff").unwrap();
    let error = uninstall(&mut Vec::new(), &options(dir.path())).unwrap_err().to_string();
    assert!(error.contains(elsewhere), "{error}");
    fs::write(at(elsewhere), installed).unwrap();
    let removed = said(|out| uninstall(out, &options(dir.path())));
    assert!(removed.contains(&format!("removed {}\n", at(RECORD).display())), "{removed}");
    assert_eq!(tree(dir.path()), before);
}

#[test]
fn a_configuration_is_recorded_before_it_is_changed() {
    let dir = tempfile::tempdir().unwrap();
    let at = |path: &str| dir.path().join(path.trim_start_matches('/'));
    fs::create_dir_all(at("elsewhere")).unwrap();
    fs::write(at("elsewhere/config.toml"), "version = 2\n").unwrap();
    // A directory in its place, so that it cannot be written.
    fs::create_dir_all(at(RECORD).join("x")).unwrap();
    install(&mut Vec::new(), &named(Some("/elsewhere/config.toml"), dir.path())).unwrap_err();
    assert_eq!(fs::read_to_string(at("elsewhere/config.toml")).unwrap(), "version = 2\n");
}

#[test]
fn what_another_version_has_installed_is_uninstalled() {
    let dir = tempfile::tempdir().unwrap();
    let at = |path: &str| dir.path().join(path);
    fs::create_dir_all(at("etc/containerd/conf.d")).unwrap();
    let configuration = "version = 3\nimports = ['/etc/containerd/conf.d/*.toml']\n";
    fs::write(at("etc/containerd/config.toml"), configuration).unwrap();
    install(&mut Vec::new(), &options(dir.path())).unwrap();
    let drop_in = at("etc/containerd/conf.d/bulkhead.toml");
    let other = fs::read_to_string(&drop_in).unwrap().replace("  sandboxer = \"shim\"\n", "");
    fs::write(&drop_in, &other).unwrap();
    let removed = said(|out| uninstall(out, &options(dir.path())));
    assert!(removed.contains("removed") && removed.contains("systemctl restart containerd"), "{removed}");
    assert!(!drop_in.exists(), "a handler would be left, and no shim");
    // One that the operator has written is his.
    fs::write(&drop_in, "version = 3\n").unwrap();
    let kept = said(|out| uninstall(out, &options(dir.path())));
    assert!(kept.contains("bulkhead.toml: it was not written by `bulkhead install`"), "{kept}");
    assert!(drop_in.exists());
}

#[test]
fn k3s_and_rke2_keep_what_they_generate() {
    for (data, unit) in [
        ("var/lib/rancher/k3s", "systemctl restart k3s or systemctl restart k3s-agent"),
        ("var/lib/rancher/rke2", "systemctl restart rke2-server or systemctl restart rke2-agent"),
    ] {
        let directory = format!("{data}/agent/etc/containerd");
        let imports = format!("version = 3\nimports = [\"/{directory}/config-v3.toml.d/*.toml\"]\n");
        for (generated, written) in [
            ("version = 2\n", "config.toml.tmpl"),
            ("version = 3\n", "config-v3.toml.tmpl"),
            (imports.as_str(), "config-v3.toml.d/bulkhead.toml"),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let at = |path: &str| dir.path().join(&directory).join(path);
            fs::create_dir_all(at("config-v3.toml.d")).unwrap();
            // Of a containerd for docker, beside the one for Kubernetes.
            fs::create_dir_all(dir.path().join("etc/containerd")).unwrap();
            fs::write(dir.path().join("etc/containerd/config.toml"), "version = 2\n").unwrap();
            fs::write(at("config.toml"), generated).unwrap();
            let before = tree(dir.path());
            let first = said(|out| install(out, &options(dir.path())));
            assert!(first.contains(unit), "{first}");
            assert!(fs::read_to_string(at(written)).unwrap().contains(RUNTIME), "{first}");
            let added = tree(dir.path()).len() - before.len();
            assert_eq!(added, 2 + OWN_FILES.len(), "{:?}", tree(dir.path()));
            let second = said(|out| install(out, &options(dir.path())));
            assert!(second.contains("as it was") && !second.contains("wrote"), "{second}");
            let removed = said(|out| uninstall(out, &options(dir.path())));
            assert!(!removed.contains("warn  "), "{removed}");
            assert_eq!(tree(dir.path()), before);
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let path = "/data/k3s/agent/etc/containerd/config.toml";
    let options = named(Some(path), dir.path());
    let error = install(&mut Vec::new(), &options).unwrap_err().to_string();
    let remedy = "which k3s generates when it starts; start k3s first";
    assert!(error.contains(remedy) && !error.contains("install"), "{error}");
    let generated = dir.path().join("data/k3s/agent/etc/containerd/config.toml");
    fs::create_dir_all(generated.parent().unwrap()).unwrap();
    fs::write(&generated, "[plugins.opt]\n").unwrap();
    let error = install(&mut Vec::new(), &options).unwrap_err().to_string();
    assert!(error.contains("k3s generates it; put the version at") && !error.contains("default"), "{error}");
    assert_eq!(fs::read_to_string(generated).unwrap(), "[plugins.opt]\n");
}

#[test]
fn a_link_to_a_file_outside_of_the_root_is_refused() {
    let (dir, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let root = dir.path();
    let hosts = outside.path().join("config.toml");
    fs::create_dir_all(root.join("etc/containerd")).unwrap();
    fs::write(&hosts, "version = 2\n").unwrap();
    symlink(&hosts, root.join("etc/containerd/config.toml")).unwrap();
    for refused in [install(&mut Vec::new(), &options(root)), uninstall(&mut Vec::new(), &options(root))] {
        let error = refused.unwrap_err().to_string();
        assert!(error.contains("etc/containerd/config.toml leads out of the root directory"), "{error}");
    }
    // A directory may be a link too, and the link may lead to another file of the root directory.
    fs::remove_file(root.join("etc/containerd/config.toml")).unwrap();
    fs::write(root.join("etc/containerd/own.toml"), "version = 2\n").unwrap();
    symlink("own.toml", root.join("etc/containerd/config.toml")).unwrap();
    symlink(outside.path(), root.join("etc/bulkhead")).unwrap();
    assert!(install(&mut Vec::new(), &options(root)).is_err());
    fs::remove_file(root.join("etc/bulkhead")).unwrap();
    install(&mut Vec::new(), &options(root)).unwrap();
    assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 1);
    assert_eq!(fs::read_to_string(&hosts).unwrap(), "version = 2\n");
}

#[test]
fn what_pods_lack_of_a_network_is_said_at_the_end() {
    let dir = tempfile::tempdir().unwrap();
    let network = |text: &str, generator| {
        said(|out| say_of_network(out, dir.path(), Ok(toml::from_str(text).unwrap()), generator))
    };
    // k3s has no handler before it has read its template, and gets it when it starts next.
    let v3 = "[plugins.'io.containerd.cri.v1.runtime'.cni]\nconf_dir = '/cni'\n";
    let none = network(v3, Some("k3s"));
    assert!(none.starts_with("warn  CNI: there is no configuration in /cni"), "{none}");
    assert!(none.lines().nth(1).is_some_and(|line| line.starts_with("      -> install")), "{none}");
    fs::create_dir_all(dir.path().join("cni")).unwrap();
    fs::create_dir_all(dir.path().join("opt/cni/bin")).unwrap();
    fs::write(dir.path().join("cni/10-pods.conf"), "{\"type\": \"bridge\"}").unwrap();
    fs::write(dir.path().join("opt/cni/bin/bridge"), "").unwrap();
    assert_eq!(network(v3, None), "");
    let unknown = said(|out| say_of_network(out, dir.path(), Err(io::ErrorKind::NotFound.into()), None));
    assert!(
        unknown.starts_with("fail  runtime handler: containerd's configuration is not known"),
        "{unknown}"
    );
}

#[test]
fn a_root_without_a_configuration_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let error = install(&mut Vec::new(), &options(dir.path())).unwrap_err().to_string();
    assert!(error.starts_with("containerd is not found: there is no "), "{error}");
    assert!(tree(dir.path()).is_empty());
}

#[test]
fn one_at_a_time_changes_a_host() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    fs::create_dir_all(root.join("etc/containerd")).unwrap();
    fs::write(root.join("etc/containerd/config.toml"), "version = 2\n").unwrap();
    let before = tree(root);
    let lock = Lock::take(root, SHORT).unwrap();
    for refused in [
        install_within(&mut Vec::new(), &options(root), SHORT),
        uninstall_within(&mut Vec::new(), &options(root), SHORT),
    ] {
        let error = refused.unwrap_err().to_string();
        assert!(error.contains(&format!("the process {} ", std::process::id())), "{error}");
    }
    assert_eq!(fs::read_to_string(root.join("etc/containerd/config.toml")).unwrap(), "version = 2\n");
    thread::scope(|scope| {
        let waits = scope.spawn(|| install(&mut Vec::new(), &options(root)));
        thread::sleep(SHORT);
        assert!(!waits.is_finished());
        drop(lock);
        waits.join().unwrap().unwrap();
    });
    uninstall(&mut Vec::new(), &options(root)).unwrap();
    assert_eq!(tree(root), before);
    assert!(!root.join("run").exists());
}

#[test]
fn the_handlers_are_removed_from_each_containerd() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    let at = |path: &str| root.join(path.trim_start_matches('/'));
    let k3s = "/var/lib/rancher/k3s/agent/etc/containerd/config.toml";
    let rke2 = "/var/lib/rancher/rke2/agent/etc/containerd/config.toml";
    for config in [CONFIG, k3s, rke2] {
        fs::create_dir_all(at(config).parent().unwrap()).unwrap();
        fs::write(at(config), "version = 2\n").unwrap();
    }
    let before = tree(root);
    // As k3s and RKE2 come to a host one after the other: each is the one that is found.
    let mut installed = BTreeMap::new();
    for config in [CONFIG, k3s, rke2] {
        install(&mut Vec::new(), &named(Some(config), root)).unwrap();
        fs::remove_file(at(RECORD)).unwrap();
        // That the first one has the handlers is not seen by the next.
        installed.extend(tree(root).into_iter().filter(|(path, text)| before.get(path) != Some(text)));
        for (path, text) in &before {
            fs::write(path, text).unwrap();
        }
        for template in [k3s, rke2].map(|config| at(config).with_file_name(TEMPLATE_V2)) {
            _ = fs::remove_file(template);
        }
    }
    let restore = || installed.iter().for_each(|(path, text)| fs::write(path, text).unwrap());
    restore();
    let removed = said(|out| uninstall(out, &options(root)));
    assert_eq!(tree(root), before, "{removed}");
    // One that fails keeps no other.
    fs::create_dir_all(at("etc/bulkhead")).unwrap();
    restore();
    let template = at(k3s).with_file_name(TEMPLATE_V2);
    fs::write(&template, b"\xff").unwrap();
    let (first, text) = (at(CONFIG), fs::read_to_string(at(CONFIG)).unwrap());
    fs::write(&first, text.replace("# End: added by `bulkhead install`.\n", "")).unwrap();
    let error = uninstall(&mut Vec::new(), &options(root)).unwrap_err().to_string();
    assert!(error.starts_with("2 steps have failed, and the others were taken: "), "{error}");
    for path in [&template, &first] {
        assert!(error.contains(&path.display().to_string()), "{error}");
    }
    assert!(!at(rke2).with_file_name(TEMPLATE_V2).exists());
    assert!(!at("etc/bulkhead").exists());
}

#[test]
fn a_record_that_cannot_be_read_is_not_taken_for_none() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir_all(dir.path().join("etc/bulkhead")).unwrap();
    fs::write(dir.path().join("etc/bulkhead/containerd-config"), b"/\xff\n").unwrap();
    let error = uninstall(&mut Vec::new(), &options(dir.path())).unwrap_err().to_string();
    assert!(error.contains("etc/bulkhead/containerd-config"), "{error}");
    assert!(dir.path().join("etc/bulkhead/containerd-config").exists());
}

/// All that install and uninstall do to /etc/containerd: the bytes of its files, and its links.
fn bytes(root: &Path) -> BTreeMap<PathBuf, (Option<PathBuf>, Vec<u8>, u32)> {
    let mut all = BTreeMap::new();
    for entry in fs::read_dir(root.join("etc/containerd")).unwrap() {
        let path = entry.unwrap().path();
        let metadata = path.symlink_metadata().unwrap();
        if !metadata.is_dir() {
            let text = fs::read(&path).unwrap_or_default();
            all.insert(path.clone(), (fs::read_link(&path).ok(), text, metadata.mode()));
        }
    }
    all
}

#[test]
fn odd_configurations_get_the_handlers_and_are_restored_to_the_last_byte() {
    let by_hand = "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.bulkhead]\n  \
                   runtime_type = \"io.containerd.bulkhead.v2\"\n";
    for (what, text, mode) in [
        ("a byte order mark", "\u{feff}version = 2\n", 0o644),
        ("ends of lines of Windows", "version = 2\r\n[debug]\r\nlevel = 'info'\r\n", 0o644),
        ("these and an open line", "version = 3\r\nroot = '/x'", 0o644),
        ("nothing", "", 0o644),
        ("only a line break", "\n", 0o644),
        ("a file that nobody may write", "version = 2\n", 0o444),
        ("a secret", "version = 2\n", 0o600),
        ("an import of a missing file", "version = 2\nimports = ['/no/such.toml']\n", 0o644),
        ("the handler, by hand", by_hand, 0o644),
    ] {
        for is_link in [false, true] {
            let dir = tempfile::tempdir().unwrap();
            let at = |name: &str| dir.path().join("etc/containerd").join(name);
            fs::create_dir_all(at("")).unwrap();
            let file = at(if is_link { "real.toml" } else { "config.toml" });
            fs::write(&file, text).unwrap();
            fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
            if is_link {
                symlink("real.toml", at("config.toml")).unwrap();
            }
            let before = bytes(dir.path());
            install(&mut Vec::new(), &options(dir.path())).unwrap();
            let installed = fs::read_to_string(&file).unwrap();
            let table = toml::from_str(&installed).unwrap();
            assert_eq!(handlers(&table).get("bulkhead").map(String::as_str), Some(RUNTIME), "{what}");
            assert_eq!(installed == text, text == by_hand, "{what}");
            install(&mut Vec::new(), &options(dir.path())).unwrap();
            assert_eq!(fs::read_to_string(&file).unwrap(), installed, "{what}, a second time");
            let uninstalled = uninstall(&mut Vec::new(), &options(dir.path()));
            assert_eq!(uninstalled.is_err(), text == by_hand, "{what}");
            assert_eq!(bytes(dir.path()), before, "{what}");
        }
    }
}

#[test]
fn what_would_break_a_configuration_is_not_removed() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("etc/containerd/config.toml");
    fs::create_dir_all(config.parent().unwrap()).unwrap();
    fs::write(&config, "version = 2\n").unwrap();
    install(&mut Vec::new(), &options(dir.path())).unwrap();
    // What the operator has written in the block belongs to what comes after it.
    let end = "# End: added by `bulkhead install`.\n";
    let installed = fs::read_to_string(&config).unwrap();
    let edited = installed.replace(end, &format!("[debug]\nlevel = \"\"\"\n{end}\"\"\"\n"));
    fs::write(&config, &edited).unwrap();
    let error = uninstall(&mut Vec::new(), &options(dir.path())).unwrap_err().to_string();
    assert!(error.contains("config.toml was not changed, because it would not be valid TOML"), "{error}");
    assert_eq!(fs::read_to_string(&config).unwrap(), edited);
}

#[test]
fn handlers_that_a_tool_has_written_anew_are_no_success() {
    let imports = "version = 3\nimports = ['/etc/containerd/conf.d/*.toml']\n";
    for (configuration, plugin, count) in
        [("version = 2\n", CRI_V2, 1), ("version = 3\n", CRI_V3, 2), (imports, CRI_V3, 2)]
    {
        let dir = tempfile::tempdir().unwrap();
        let at = |path: &str| dir.path().join(path.trim_start_matches('/'));
        fs::create_dir_all(at("etc/containerd/conf.d")).unwrap();
        fs::write(at(CONFIG), configuration).unwrap();
        install(&mut Vec::new(), &named(Some(CONFIG), dir.path())).unwrap();
        // As `containerd config dump` prints it: without comments, and with what is imported.
        let mut dumped: toml::Table = toml::from_str(&fs::read_to_string(at(CONFIG)).unwrap()).unwrap();
        if let Ok(imported) = fs::read_to_string(at(IMPORTED).join(DROP_IN)) {
            let imported: toml::Table = toml::from_str(&imported).unwrap();
            dumped.insert("plugins".into(), imported["plugins"].clone());
        }
        let dumped = toml::to_string(&dumped).unwrap();
        fs::write(at(CONFIG), &dumped).unwrap();
        let mut out = Vec::new();
        let error = uninstall(&mut out, &options(dir.path())).unwrap_err().to_string();
        assert!(error.starts_with(&format!("{}: ", at(CONFIG).display())), "{error}");
        for handler in ["bulkhead", "bulkhead-sandbox"].iter().take(count) {
            let table = format!("[plugins.\"{plugin}\".containerd.runtimes.{handler}]");
            assert_eq!(error.matches(&table).count(), 1, "{error}");
        }
        assert!(!error.contains("runtimes.runc]"), "{error}");
        // The rest is undone, and the next try finds what is left.
        assert_eq!(fs::read_to_string(at(CONFIG)).unwrap(), dumped);
        assert!(!at(IMPORTED).join(DROP_IN).exists() && !at("etc/bulkhead/config.toml").exists());
        assert!(at(RECORD).exists() && !String::from_utf8(out).unwrap().contains("Running pods"));
        fs::write(at(CONFIG), configuration).unwrap();
        uninstall(&mut Vec::new(), &options(dir.path())).unwrap();
        assert!(!at(RECORD).exists());
    }
}

#[test]
fn what_k3s_has_generated_is_no_handler_that_is_left() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("var/lib/rancher/k3s/agent/etc/containerd/config.toml");
    fs::create_dir_all(config.parent().unwrap()).unwrap();
    fs::write(&config, "version = 2\n").unwrap();
    install(&mut Vec::new(), &options(dir.path())).unwrap();
    // From the template, which it reads again when it starts next.
    fs::write(&config, format!("version = 2\n{}", block::Version::V2.handlers(false))).unwrap();
    uninstall(&mut Vec::new(), &options(dir.path())).unwrap();
    assert!(!config.with_file_name(TEMPLATE_V2).exists());
    // A template that was written by hand, and is complete, is read again too.
    fs::copy(&config, config.with_file_name(TEMPLATE_V2)).unwrap();
    let error = uninstall(&mut Vec::new(), &options(dir.path())).unwrap_err().to_string();
    assert!(error.contains("config.toml.tmpl: ") && error.contains("runtimes.bulkhead]"), "{error}");
}

#[test]
fn a_link_to_nothing_is_not_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("etc/containerd/config.toml");
    fs::create_dir_all(config.parent().unwrap()).unwrap();
    symlink("missing.toml", &config).unwrap();
    let named = named(Some("/etc/containerd/config.toml"), dir.path());
    let write = files::write(&config, "text", |_| Ok::<_, io::Error>(()));
    let error = write.unwrap_err().to_string();
    assert!(error.contains("symbolic link") && error.contains("missing.toml"), "{error}");
    install(&mut Vec::new(), &named).unwrap_err();
    assert!(config.symlink_metadata().unwrap().is_symlink());
}

#[test]
fn a_file_of_the_operator_in_the_place_of_ours_is_not_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let at = |path: &str| dir.path().join("etc/containerd").join(path);
    fs::create_dir_all(at("conf.d")).unwrap();
    fs::write(at("config.toml"), "version = 3\nimports = ['/etc/containerd/conf.d/*.toml']\n").unwrap();
    let own = "version = 3\n[plugins.'io.containerd.cri.v1.runtime']\nmax_container_log_line_size = 1\n";
    fs::write(at("conf.d/bulkhead.toml"), own).unwrap();
    let error = install(&mut Vec::new(), &options(dir.path())).unwrap_err().to_string();
    assert!(error.contains("conf.d/bulkhead.toml") && error.contains("move it"), "{error}");
    assert_eq!(fs::read_to_string(at("conf.d/bulkhead.toml")).unwrap(), own);
    uninstall(&mut Vec::new(), &options(dir.path())).unwrap();
    assert_eq!(fs::read_to_string(at("conf.d/bulkhead.toml")).unwrap(), own);
    // One that has all that is needed does as well.
    let all = block::Version::V3.file(true).replacen("# ", "# By hand. ", 1);
    fs::write(at("conf.d/bulkhead.toml"), &all).unwrap();
    install(&mut Vec::new(), &options(dir.path())).unwrap();
    let error = uninstall(&mut Vec::new(), &options(dir.path())).unwrap_err().to_string();
    assert!(error.contains("conf.d/bulkhead.toml: ") && error.contains("runtimes.bulkhead]"), "{error}");
    assert_eq!(fs::read_to_string(at("conf.d/bulkhead.toml")).unwrap(), all);
}

#[test]
fn files_that_only_an_older_archive_has_are_removed() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    let at = |path: &str| root.join(path.trim_start_matches('/'));
    let put = |path: &str, text: &str| {
        fs::create_dir_all(at(path).parent().unwrap()).unwrap();
        fs::write(at(path), text).unwrap();
    };
    put(CONFIG, "version = 2\n");
    let before = tree(root);
    // By sha256sum.
    let old = "8f434346648f6b96df89dda901c5176b10a6d83961dd3c1ac88b59b2dc327aa4";
    let line = |path: &str| format!("{old}  {path}\n");
    let gone = "usr/local/share/doc/bulkhead/old/page.md";
    let both = ["usr/local/bin/bulkhead", "usr/lib/bulkhead/vmlinux"];
    let (shared, changed) = ("usr/local/share/man/man1/bulkhead-old.1", "usr/lib/bulkhead/changed");
    let never = ["etc/hosts", "usr/local/../../etc/hosts", "/usr/local/x", "usr/localx"];
    let all = [gone, both[0], both[1], shared, changed].into_iter().chain(never);
    put(super::options::ARCHIVE_FILES, &all.map(line).collect::<String>());
    for path in [gone, both[0], both[1], shared, changed, "etc/hosts", "usr/local/x", "usr/localx"] {
        put(path, "hi");
    }
    let unpacked = tree(root);
    install(&mut Vec::new(), &options(root)).unwrap();
    assert!(unpacked.keys().all(|path| path.exists()), "one version removes nothing");
    put(changed, "by the operator");
    put(super::options::ARCHIVE_FILES, &both.map(line).concat());
    let said = said(|out| install(out, &options(root)));
    assert!(said.contains(&format!("removed {}: only an older", at(gone).display())), "{said}");
    assert!(said.contains(&format!("kept {}: only an older", at(changed).display())), "{said}");
    assert!(!at(gone).exists() && !at(shared).exists() && at("usr/local/share/man/man1").exists());
    assert!(!at("usr/local/share/doc/bulkhead").exists());
    for path in [both[0], both[1], changed, "etc/hosts", "usr/local/x", "usr/localx"] {
        assert!(at(path).exists(), "{path}");
    }
    // The removal does the same for a version that was not installed by the command.
    put(super::options::ARCHIVE_FILES, &line(both[0]));
    uninstall(&mut Vec::new(), &options(root)).unwrap();
    assert!(!at(both[1]).exists() && at(both[0]).exists());
    assert!(!at("etc/bulkhead").exists());
    assert!(before.keys().all(|path| path.exists()));
    // A package has no list.
    fs::remove_file(at(super::options::ARCHIVE_FILES)).unwrap();
    install(&mut Vec::new(), &options(root)).unwrap();
    assert!(!at(super::options::ARCHIVE_RECORD).exists());
}

#[test]
fn an_archive_over_a_package_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let at = |path: &str| dir.path().join(path.trim_start_matches('/'));
    let (list, package) = (super::options::ARCHIVE_FILES, super::options::PACKAGE_PROGRAM);
    for path in [CONFIG, list, package] {
        fs::create_dir_all(at(path).parent().unwrap()).unwrap();
        fs::write(at(path), "version = 2\n").unwrap();
    }
    let before = tree(dir.path());
    let error = install(&mut Vec::new(), &options(dir.path())).unwrap_err().to_string();
    for part in [&*at(list).to_string_lossy(), &at(package).to_string_lossy(), "`dpkg --remove bulkhead`"] {
        assert!(error.contains(part), "{error}");
    }
    assert_eq!(tree(dir.path()), before);
    // What is to be undone is undone all the same.
    uninstall(&mut Vec::new(), &options(dir.path())).unwrap();
    // The package alone, and the archive alone with a link that the operator has made.
    fs::remove_file(at(list)).unwrap();
    install(&mut Vec::new(), &options(dir.path())).unwrap();
    fs::write(at(list), "").unwrap();
    fs::remove_file(at(package)).unwrap();
    symlink("../local/bin/bulkhead", at(package)).unwrap();
    install(&mut Vec::new(), &options(dir.path())).unwrap();
}

#[test]
fn an_old_file_that_stays_keeps_containerd_from_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let at = |path: &str| dir.path().join(path.trim_start_matches('/'));
    for path in [CONFIG, super::options::ARCHIVE_FILES, super::options::ARCHIVE_RECORD] {
        fs::create_dir_all(at(path).parent().unwrap()).unwrap();
        fs::write(at(path), "version = 2\n").unwrap();
    }
    fs::write(at(super::options::ARCHIVE_RECORD), b"\xff").unwrap();
    let mut out = Vec::new();
    let error = install(&mut out, &options(dir.path())).unwrap_err().to_string();
    assert!(error.contains("archive-files"), "{error}");
    let said = String::from_utf8(out).unwrap();
    assert!(said.contains("systemctl restart containerd"), "{said}");
}

#[test]
fn a_change_of_somebody_else_is_not_lost() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("config.toml");
    fs::write(&config, "version = 2\n").unwrap();
    // As if somebody had written it between the two.
    for read_before in [None, Some("version = 3\n")] {
        let error = write_over(&config, read_before, "version = 2\nours\n").unwrap_err().to_string();
        assert!(error.contains("config.toml") && error.contains("run this again"), "{error}");
        let error = write_checked(&config, read_before, "ours", &config, false).unwrap_err().to_string();
        assert!(error.contains("run this again"), "{error}");
        assert_eq!(fs::read_to_string(&config).unwrap(), "version = 2\n");
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    write_over(&config, Some("version = 2\n"), "new").unwrap();
    write_over(&dir.path().join("other"), None, "new").unwrap();
    assert_eq!(fs::read_to_string(&config).unwrap(), "new");
}

#[test]
fn a_recorded_configuration_that_is_not_there_is_no_success() {
    let dir = tempfile::tempdir().unwrap();
    let at = |path: &str| dir.path().join(path.trim_start_matches('/'));
    let disk = ["/disk/containerd/config.toml", "/disk/k3s/agent/etc/containerd/config.toml"];
    for config in disk {
        fs::create_dir_all(at(config).parent().unwrap()).unwrap();
        fs::write(at(config), "version = 2\n").unwrap();
        let before = tree(dir.path());
        install(&mut Vec::new(), &named(Some(config), dir.path())).unwrap();
        fs::rename(at("disk"), at("not-mounted")).unwrap();
        let error = uninstall(&mut Vec::new(), &options(dir.path())).unwrap_err().to_string();
        assert!(error.contains(&format!("there is no {}", at(config).display())), "{error}");
        assert!(at(RECORD).exists());
        // An installation elsewhere would forget it.
        fs::create_dir_all(at("other")).unwrap();
        fs::write(at("other/config.toml"), "version = 2\n").unwrap();
        let other = named(Some("/other/config.toml"), dir.path());
        let error = install(&mut Vec::new(), &other).unwrap_err().to_string();
        assert!(error.contains(&format!("there is no {}", at(config).display())), "{error}");
        assert_eq!(recorded(dir.path()).unwrap().as_deref(), Some(Path::new(config)));
        fs::remove_dir_all(at("other")).unwrap();
        fs::rename(at("not-mounted"), at("disk")).unwrap();
        uninstall(&mut Vec::new(), &options(dir.path())).unwrap();
        assert_eq!(tree(dir.path()), before);
    }
}

#[test]
fn what_a_killed_installation_has_left_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    let at = |path: &str| dir.path().join(path.trim_start_matches('/'));
    fs::create_dir_all(at("etc/containerd/conf.d")).unwrap();
    fs::create_dir_all(at("etc/bulkhead")).unwrap();
    fs::write(at(CONFIG), "version = 2\n").unwrap();
    let before = tree(dir.path());
    let own = OWN_FILES.map(|(path, _)| path);
    let drop_in = "/etc/containerd/conf.d/bulkhead.toml";
    for path in own.into_iter().chain([RECORD, super::options::ARCHIVE_RECORD, CONFIG, drop_in]) {
        fs::write(at(&format!("{path}.bulkhead-new")), "a part").unwrap();
    }
    uninstall(&mut Vec::new(), &options(dir.path())).unwrap();
    assert_eq!(tree(dir.path()), before);
    assert!(!at("etc/bulkhead").exists());
}
