//! What containerd says of itself: its version, and its configuration with all that it imports.

use std::{
    collections::BTreeMap,
    fs, io,
    os::unix::fs::MetadataExt,
    path::{self, Path, PathBuf},
    time::{Duration, SystemTime},
};

use clap::Args;
use toml::Table;

use crate::{command_output, containerd_log::Log};

/// The configuration that containerd reads if it is not told another one.
pub(crate) const CONFIG: &str = "/etc/containerd/config.toml";

/// The directory of containerd 2 for files that are imported, and that of k3s and RKE2, beside the configuration that
/// they generate.
pub(crate) const IMPORTED: &str = "/etc/containerd/conf.d";
const IMPORTED_BY_GENERATED: &str = "config-v3.toml.d";

/// The templates of which k3s and RKE2 generate configurations of the second and of the third version. They are beside
/// what is generated.
pub(crate) const TEMPLATE_V2: &str = "config.toml.tmpl";
pub(crate) const TEMPLATE_V3: &str = "config-v3.toml.tmpl";

/// Where `bulkhead install` records which configuration it was told, in one line. Removing the package tells none.
pub(crate) const RECORD: &str = "/etc/bulkhead/containerd-config";

/// Where k3s and RKE2 keep their data, if they are not told another directory.
const DATA_OF_K3S: &str = "/var/lib/rancher/k3s";
const DATA_OF_RKE2: &str = "/var/lib/rancher/rke2";

/// The configuration of containerd in such a directory, which k3s or RKE2 generates each time it starts.
const GENERATED: &str = "agent/etc/containerd/config.toml";

/// The log of containerd in such a directory. k3s and RKE2 write it there, and not to the journal.
const LOG: &str = "agent/containerd/containerd.log";

/// The runtime that a handler of Bulkhead names.
pub(crate) const RUNTIME: &str = "io.containerd.bulkhead.v2";

/// The CRI plugin with the handlers, in the second and in the third version of containerd's configuration.
pub(crate) const CRI_V2: &str = "io.containerd.grpc.v1.cri";
pub(crate) const CRI_V3: &str = "io.containerd.cri.v1.runtime";

/// Which containerd a command is about.
#[derive(Debug, Clone, PartialEq, Eq, Args)]
pub(crate) struct ContainerdConfig {
    /// containerd's configuration. Without this option, it is the one that `bulkhead install` was told last. If it was
    /// told none, it is that of k3s or RKE2 if there is one, or /etc/containerd/config.toml.
    #[arg(long, value_name = "FILE", value_parser = one_absolute_line)]
    pub(crate) containerd_config: Option<PathBuf>,
}

impl ContainerdConfig {
    /// The containerd of the host whose root directory is `root`.
    pub(crate) fn containerd(&self, root: &Path) -> Containerd {
        self.containerd_config.clone().map_or_else(|| Containerd::find(root), Containerd::of)
    }
}

/// A path that can be recorded.
fn one_absolute_line(text: &str) -> Result<PathBuf, String> {
    if text.contains('\n') {
        return Err("a line break in it cannot be recorded".into());
    }
    path::absolute(text).map_err(|error| error.to_string())
}

/// The configuration that `bulkhead install` was told last on the host whose root directory is `root`.
pub(crate) fn recorded(root: &Path) -> io::Result<Option<PathBuf>> {
    match fs::read_to_string(root.join(RECORD.trim_start_matches('/'))) {
        Ok(text) => Ok(text.lines().next().filter(|line| !line.is_empty()).map(PathBuf::from)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Who starts containerd.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owner {
    /// systemd, as the packages of containerd and the manual of kubeadm have it.
    Systemd,
    K3s,
    Rke2,
}

/// A containerd of this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Containerd {
    owner: Owner,
    /// The configuration that it reads, without what that imports.
    pub(crate) config: PathBuf,
}

impl Containerd {
    /// The containerd that runs the pods of Kubernetes: the one that `bulkhead install` was told, or that of k3s or
    /// RKE2 if there is one. `root` is `/`, but for an image and in tests.
    pub(crate) fn find(root: &Path) -> Self {
        match recorded(root) {
            Ok(Some(told)) => return Self::of(told),
            Ok(None) => {}
            Err(error) => {
                tracing::warn!(path = RECORD, %error, "the configuration that was told is not known");
            }
        }
        let generated = [DATA_OF_K3S, DATA_OF_RKE2].map(|data| Path::new(data).join(GENERATED));
        let is_there = |path: &PathBuf| at_root(root, path).is_file();
        Self::of(generated.into_iter().find(is_there).unwrap_or_else(|| CONFIG.into()))
    }

    /// All containerds of a host that may have a handler of Bulkhead: the one that was recorded, and those that
    /// [`Self::find`] knows. They need not be there any more.
    pub(crate) fn all(recorded: Option<&Path>) -> Vec<Self> {
        let known = [DATA_OF_K3S, DATA_OF_RKE2].map(|data| Path::new(data).join(GENERATED));
        let mut all = Vec::new();
        for config in recorded.into_iter().map(Path::to_owned).chain(known).chain([CONFIG.into()]) {
            let containerd = Self::of(config);
            if !all.contains(&containerd) {
                all.push(containerd);
            }
        }
        all
    }

    /// The containerd that reads this configuration.
    pub(crate) fn of(config: PathBuf) -> Self {
        let is_of_rke2 = config.components().any(|part| part.as_os_str() == "rke2");
        let owner = match (config.ends_with(GENERATED), is_of_rke2) {
            (false, _) => Owner::Systemd,
            (true, false) => Owner::K3s,
            (true, true) => Owner::Rke2,
        };
        Self { owner, config }
    }

    /// What generates the configuration, if it is not written by hand.
    pub(crate) fn generator(&self) -> Option<&'static str> {
        match self.owner {
            Owner::Systemd => None,
            Owner::K3s => Some("k3s"),
            Owner::Rke2 => Some("RKE2"),
        }
    }

    /// The directory of files that it imports.
    pub(crate) fn imported(&self) -> PathBuf {
        match self.generator() {
            None => IMPORTED.into(),
            Some(_) => self.config.with_file_name(IMPORTED_BY_GENERATED),
        }
    }

    /// The templates of what is generated, which need not be there.
    pub(crate) fn templates(&self) -> Vec<PathBuf> {
        let template = |name| self.config.with_file_name(name);
        self.generator().map_or_else(Vec::new, |_| [TEMPLATE_V2, TEMPLATE_V3].map(template).into())
    }

    /// The files of its configuration that are there: its own, those in the directory that it imports, and templates.
    pub(crate) fn files(&self, root: &Path) -> Vec<PathBuf> {
        let at = |path: &Path| at_root(root, path);
        let imported = fs::read_dir(at(&self.imported())).into_iter().flatten().flatten();
        let imported = imported.map(|entry| entry.path());
        let is_read = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "toml");
        let own = [self.config.clone()].into_iter().chain(self.templates()).map(|path| at(&path));
        own.filter(|path| path.is_file()).chain(imported.filter(is_read)).collect()
    }

    /// Its files, without the one that k3s or RKE2 generates before each start.
    pub(crate) fn kept_files(&self, root: &Path) -> impl Iterator<Item = PathBuf> {
        let generated = self.generator().map(|_| at_root(root, &self.config));
        self.files(root).into_iter().filter(move |path| Some(path) != generated.as_ref())
    }

    /// The directories in which a file of its configuration may have been that was removed.
    pub(crate) fn directories(&self, root: &Path) -> Vec<PathBuf> {
        let at = |path: &Path| at_root(root, path);
        // A template that was removed is missed only there.
        let may_lack = self.generator().is_some() || !at(&self.config).exists();
        let of_main = self.config.parent().filter(|_| may_lack);
        of_main.map(at).into_iter().chain([at(&self.imported())]).collect()
    }

    /// Its program.
    pub(crate) fn program(&self) -> PathBuf {
        match self.owner {
            Owner::Systemd => "containerd".into(),
            Owner::K3s => self.data().join("data/current/bin/containerd"),
            Owner::Rke2 => self.data().join("bin/containerd"),
        }
    }

    /// Where k3s or RKE2 keeps its data.
    fn data(&self) -> &Path {
        let data = self.config.ancestors().nth(Path::new(GENERATED).components().count());
        data.unwrap_or(Path::new("/"))
    }

    /// Its log. An older k3s that debugs has it in the journal, as others have.
    pub(crate) fn log(&self, root: &Path) -> Log {
        let file = self.data().join(LOG);
        let is_there = at_root(root, &file).is_file();
        match self.owner {
            Owner::K3s | Owner::Rke2 if is_there => Log::File(file),
            _ => Log::Journal(self.units().iter().map(|unit| (*unit).to_owned()).collect()),
        }
    }

    /// Its socket, if its configuration names no other.
    pub(crate) fn socket(&self) -> &'static str {
        match self.owner {
            Owner::Systemd => "/run/containerd/containerd.sock",
            Owner::K3s | Owner::Rke2 => "/run/k3s/containerd/containerd.sock",
        }
    }

    /// The units of systemd of which one starts it on this node.
    pub(crate) fn units(&self) -> &'static [&'static str] {
        match self.owner {
            Owner::Systemd => &["containerd"],
            Owner::K3s => &["k3s", "k3s-agent"],
            Owner::Rke2 => &["rke2-server", "rke2-agent"],
        }
    }

    /// Its version.
    pub(crate) fn version(&self) -> io::Result<String> {
        let text = self.output(&["--version"])?;
        version_in(&text)
            .ok_or_else(|| io::Error::other(format!("`containerd --version` says no version: {text}")))
    }

    /// The configuration that it uses when it starts next.
    pub(crate) fn configuration(&self) -> io::Result<Table> {
        let config = self.config.to_string_lossy();
        let text = match config == CONFIG {
            // This one may be missing, unless it is named.
            true => self.output(&["config", "dump"])?,
            false => self.output(&["--config", &config, "config", "dump"])?,
        };
        toml::from_str(&text).map_err(|error| io::Error::other(error.message().to_owned()))
    }

    fn output(&self, arguments: &[&str]) -> io::Result<String> {
        command_output::output(&self.program().to_string_lossy(), arguments)
    }
}

/// Where a path of the host is, whose root directory is at `root`.
pub(crate) fn at_root(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

/// When a file, or the list of files in a directory, was changed. Its date may be older: whoever copies a file can give
/// it any.
pub(crate) fn changed(path: &Path) -> Option<SystemTime> {
    let metadata = path.metadata().ok()?;
    let seconds = Duration::from_secs(metadata.ctime().try_into().ok()?);
    let nanoseconds = Duration::from_nanos(metadata.ctime_nsec().try_into().ok()?);
    SystemTime::UNIX_EPOCH.checked_add(seconds)?.checked_add(nanoseconds)
}

/// The first word that looks like 1.7.24 or v2.1.9.
fn version_in(text: &str) -> Option<String> {
    let words = text.split_whitespace().map(|word| word.trim_start_matches('v'));
    let is_version = |word: &&str| word.starts_with(|c: char| c.is_ascii_digit()) && word.contains('.');
    words.filter(is_version).map(str::to_owned).next()
}

/// The first two numbers of a version.
pub(crate) fn major_and_minor(version: &str) -> Option<(u32, u32)> {
    let mut numbers = version.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// The runtime of each handler in a configuration.
pub(crate) fn handlers(configuration: &Table) -> BTreeMap<String, String> {
    let of = |plugin| handlers_of(configuration, plugin);
    [CRI_V2, CRI_V3].into_iter().flat_map(of).map(|(name, runtime)| (name.into(), runtime.into())).collect()
}

/// The tables of a configuration that are handlers of Bulkhead, as TOML names them.
pub(crate) fn tables_of_bulkhead(configuration: &Table) -> Vec<String> {
    let of = |plugin: &'static str| {
        let ours = handlers_of(configuration, plugin).filter(|(_, runtime)| *runtime == RUNTIME);
        ours.map(move |(name, _)| format!("[plugins.\"{plugin}\".containerd.runtimes.{name}]"))
    };
    [CRI_V2, CRI_V3].into_iter().flat_map(of).collect()
}

/// The handlers of a plugin, and the runtime of each.
fn handlers_of<'a>(
    configuration: &'a Table,
    plugin: &str,
) -> impl Iterator<Item = (&'a str, &'a str)> + use<'a> {
    let plugin = configuration.get("plugins").and_then(|plugins| plugins.get(plugin));
    let runtimes = plugin.and_then(|plugin| plugin.get("containerd")?.get("runtimes")?.as_table());
    runtimes.into_iter().flatten().map(|(name, handler)| {
        let runtime = handler.get("runtime_type").and_then(toml::Value::as_str);
        (name.as_str(), runtime.unwrap_or_default())
    })
}

/// Whether the CRI plugin gives containers labels of SELinux, if the host's kernel has SELinux.
pub(crate) fn labels(configuration: &Table) -> bool {
    let label = |plugin| configuration.get("plugins")?.get(plugin)?.get("enable_selinux")?.as_bool();
    [CRI_V2, CRI_V3].into_iter().any(|plugin| label(plugin) == Some(true))
}

/// The name by which the configuration disables the CRI plugin, if it does: the whole one, or `cri`, which containerd's
/// package of docker writes.
pub(crate) fn disabled_cri(configuration: &Table) -> Option<&str> {
    let disabled = configuration.get("disabled_plugins")?.as_array()?;
    disabled.iter().filter_map(toml::Value::as_str).find(|name| ["cri", CRI_V2, CRI_V3].contains(name))
}

/// Where the CRI plugin looks for what makes the network of pods.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Cni {
    /// The directories of the plugins, which are programs.
    pub(crate) programs: Vec<PathBuf>,
    /// The key of the configuration with these directories.
    pub(crate) key: Key,
    /// The directory of the configuration.
    pub(crate) configuration: PathBuf,
}

/// The key with the directories of the plugins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Key {
    /// `bin_dir`, one directory. containerd before 2.1 has only this.
    One,
    /// `bin_dirs`, a list.
    List,
}

/// What a configuration of containerd says of CNI. None: it has no CRI plugin.
pub(crate) fn cni(configuration: &Table) -> Option<Cni> {
    let of = |plugin| configuration.get("plugins")?.get(plugin)?.get("cni")?.as_table();
    let (by_default, cni) = match (of(CRI_V3), of(CRI_V2)) {
        (Some(cni), _) => (Key::List, cni),
        (None, cni) => (Key::One, cni?),
    };
    // What containerd prints has all keys that it knows.
    let key = match (cni.contains_key("bin_dirs"), cni.contains_key("bin_dir")) {
        (true, _) => Key::List,
        (false, true) => Key::One,
        (false, false) => by_default,
    };
    let text = |value: &toml::Value| value.as_str().filter(|text| !text.is_empty()).map(PathBuf::from);
    let several = cni.get("bin_dirs").and_then(toml::Value::as_array).into_iter().flatten().filter_map(text);
    let mut programs: Vec<_> = several.collect();
    // From containerd 2.1 on, this is the deprecated name of the list.
    if programs.is_empty() {
        programs.extend(cni.get("bin_dir").and_then(text));
    }
    let configuration = cni.get("conf_dir").and_then(text).unwrap_or_else(|| "/etc/cni/net.d".into());
    if programs.is_empty() {
        programs.push("/opt/cni/bin".into());
    }
    Some(Cni { programs, key, configuration })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_that_install_was_told_is_found_before_others() {
        let dir = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = dir.path().join(path.trim_start_matches('/'));
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("/var/lib/rancher/k3s/agent/etc/containerd/config.toml", "version = 3\n");
        let none = ContainerdConfig { containerd_config: None };
        assert_eq!(none.containerd(dir.path()).generator(), Some("k3s"));
        write(RECORD, "/elsewhere/config.toml\n");
        assert_eq!(none.containerd(dir.path()).config, Path::new("/elsewhere/config.toml"));
        let named = ContainerdConfig { containerd_config: Some("/other.toml".into()) };
        assert_eq!(named.containerd(dir.path()).config, Path::new("/other.toml"));
        for damaged in ["", "\n/x\n"] {
            write(RECORD, damaged);
            assert_eq!(none.containerd(dir.path()).generator(), Some("k3s"));
        }
    }

    #[test]
    fn a_path_is_recorded_from_the_root_directory_on() {
        assert_eq!(one_absolute_line("/a/b.toml"), Ok("/a/b.toml".into()));
        assert!(one_absolute_line("b.toml").unwrap().is_absolute());
        assert!(one_absolute_line("/a\n/b").is_err() && one_absolute_line("").is_err());
    }

    #[test]
    fn a_version_is_found_in_what_each_containerd_prints() {
        let debian_12 = "containerd github.com/containerd/containerd 1.6.20~ds1 1.6.20~ds1-1+deb12u1\n";
        let upstream = "containerd github.com/containerd/containerd/v2 v2.1.9 0123abcd\n";
        assert_eq!(version_in(debian_12).as_deref(), Some("1.6.20~ds1"));
        assert_eq!(version_in(upstream).as_deref(), Some("2.1.9"));
        assert_eq!(version_in("containerd\n"), None);
        assert_eq!(
            ["1.6.20~ds1", "2.1.9", "x", "2"].map(major_and_minor),
            [Some((1, 6)), Some((2, 1)), None, None]
        );
    }

    #[test]
    fn handlers_are_found_in_both_versions_of_the_configuration() {
        let v2 = include_str!("../../contrib/containerd/config-2.toml");
        let v3 = include_str!("../../contrib/containerd/config-3.toml");
        let handlers = |text: &str| handlers(&toml::from_str(text).unwrap());
        assert_eq!(handlers(v2).get("bulkhead").map(String::as_str), Some(RUNTIME));
        assert_eq!(handlers(v3).get("bulkhead-sandbox").map(String::as_str), Some(RUNTIME));
        for other in ["", "plugins = 1", "[plugins.'io.containerd.grpc.v1.cri']\ncontainerd = []"] {
            assert!(handlers(other).is_empty());
        }
    }

    #[test]
    fn a_disabled_plugin_is_found_by_each_of_its_names() {
        let disabled = |text: &str| disabled_cri(&toml::from_str(text).unwrap()).map(str::to_owned);
        for name in ["cri", CRI_V2, CRI_V3] {
            let text = format!("disabled_plugins = ['io.containerd.snapshotter.v1.zfs', '{name}']");
            assert_eq!(disabled(&text).as_deref(), Some(name));
        }
        for other in
            ["", "disabled_plugins = []", "disabled_plugins = ['crio', 1]", "disabled_plugins = 'cri'"]
        {
            assert_eq!(disabled(other), None);
        }
    }

    #[test]
    fn labels_are_found_in_both_versions_of_the_configuration() {
        let labels = |text: &str| labels(&toml::from_str(text).unwrap());
        for plugin in [CRI_V2, CRI_V3] {
            assert!(labels(&format!("[plugins.'{plugin}']\nenable_selinux = true")));
            assert!(!labels(&format!("[plugins.'{plugin}']\nenable_selinux = false")));
        }
        assert!(!labels("") && !labels("plugins = 1"));
    }

    #[test]
    fn the_containerd_of_k3s_and_rke2_is_found_by_its_configuration() {
        let dir = tempfile::tempdir().unwrap();
        let found = || Containerd::find(dir.path());
        assert_eq!((found().config.to_str(), found().generator()), (Some(CONFIG), None));
        assert_eq!(found().program(), Path::new("containerd"));
        assert_eq!(found().log(dir.path()), Log::Journal(vec!["containerd".into()]));
        for (data, generator, program, unit) in [
            ("/var/lib/rancher/rke2", "RKE2", "bin/containerd", "rke2-server"),
            ("/var/lib/rancher/k3s", "k3s", "data/current/bin/containerd", "k3s"),
        ] {
            let config = dir.path().join(data.trim_start_matches('/')).join(GENERATED);
            fs::create_dir_all(config.parent().unwrap()).unwrap();
            assert_ne!(found().generator(), Some(generator), "it has not generated anything yet");
            fs::write(config, "version = 3\n").unwrap();
            assert_eq!(found().config, Path::new(data).join(GENERATED));
            assert_eq!((found().generator(), found().units()[0]), (Some(generator), unit));
            assert_eq!(found().program(), Path::new(data).join(program));
            let Log::Journal(units) = found().log(dir.path()) else { panic!("there is no file") };
            assert_eq!(units[0], unit);
            let log = Path::new(data).join(LOG);
            let there = dir.path().join(log.strip_prefix("/").unwrap());
            fs::create_dir_all(there.parent().unwrap()).unwrap();
            fs::write(there, "").unwrap();
            assert_eq!(found().log(dir.path()), Log::File(log));
        }
        let elsewhere = Containerd::of("/data/k3s/agent/etc/containerd/config.toml".into());
        assert_eq!(elsewhere.program(), Path::new("/data/k3s/data/current/bin/containerd"));
    }

    #[test]
    fn cni_is_where_each_version_of_the_configuration_says() {
        let cni = |text: &str| cni(&toml::from_str(text).unwrap());
        let paths = |programs: &[&str], key: Key, configuration: &str| {
            let programs = programs.iter().map(PathBuf::from).collect();
            Some(Cni { programs, key, configuration: configuration.into() })
        };
        let v2 = "[plugins.'io.containerd.grpc.v1.cri'.cni]\nbin_dir = '/usr/lib/cni'\nconf_dir = '/c'\n";
        assert_eq!(cni(v2), paths(&["/usr/lib/cni"], Key::One, "/c"));
        let v3 = "[plugins.'io.containerd.cri.v1.runtime'.cni]\nbin_dir = ''\nbin_dirs = ['/a', '/b']\n";
        assert_eq!(cni(v3), paths(&["/a", "/b"], Key::List, "/etc/cni/net.d"));
        let v3_of_2_0 = "[plugins.'io.containerd.cri.v1.runtime'.cni]\nbin_dir = '/a'\n";
        assert_eq!(cni(v3_of_2_0), paths(&["/a"], Key::One, "/etc/cni/net.d"));
        let by_hand = "[plugins.'io.containerd.cri.v1.runtime'.cni]\n";
        assert_eq!(cni(by_hand), paths(&["/opt/cni/bin"], Key::List, "/etc/cni/net.d"));
        let empty = "[plugins.'io.containerd.cri.v1.runtime'.cni]\nbin_dir = 1\nbin_dirs = 'x'\n";
        assert_eq!(cni(empty), paths(&["/opt/cni/bin"], Key::List, "/etc/cni/net.d"));
        assert_eq!(cni("plugins = 1"), None);
    }
}
