//! `/etc/bulkhead/config.toml` and the drop-ins in `/etc/bulkhead/config.d/`, all of which are optional: the paths of
//! the parts and the properties of VMs.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use bulkhead_vmm_api::Transport;
use serde::{Deserialize, Serialize};
use strsim::damerau_levenshtein;
use toml::{Table, de::DeTable};

use crate::types::{
    boot_files::{self, Flaw},
    text::one_line,
};

/// The default path of the configuration.
pub const CONFIG_PATH: &str = "/etc/bulkhead/config.toml";

/// The extension of the directory with the drop-ins, beside the configuration.
const DROP_INS: &str = "d";

/// The keys of the configuration, for a message about one that is not among them.
const KEYS: [&str; 17] = [
    "kernel",
    "initramfs",
    "vmm",
    "vcpus",
    "max_vcpus",
    "memory_mib",
    "unlimited_memory_mib",
    "max_memory_mib",
    "hugepages",
    "transport",
    "templates",
    "exclusive_roots",
    "directory_sockets",
    "console",
    "log_level",
    "log_format",
    "allowed_annotations",
];

/// The keys that an annotation of a pod may set. Not among them: what names a file of the host, which a pod must not
/// choose, and what is a choice for the host, as `transport`, because each value needs templates of its own.
pub(crate) const ANNOTATION_KEYS: [&str; 9] = [
    "vcpus",
    "max_vcpus",
    "memory_mib",
    "unlimited_memory_mib",
    "max_memory_mib",
    "templates",
    "exclusive_roots",
    "console",
    "log_level",
];

/// The most vCPUs that the VMM and the guest's kernel support.
const MOST_VCPUS: u8 = 32;

/// The configuration, with its defaults filled in.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Where it was read from.
    #[serde(skip)]
    pub path: PathBuf,
    /// The file of each key that is not left to its default.
    #[serde(skip)]
    pub origins: BTreeMap<String, PathBuf>,
    /// Uncompressed ELF kernel of the guest.
    pub kernel: PathBuf,
    /// cpio archive whose /init is the agent.
    pub initramfs: PathBuf,
    /// The VMM's binary.
    pub vmm: PathBuf,
    /// How many vCPUs a VM has, 1..=32. None: as many as the host has processors, and at most `max_vcpus`.
    pub vcpus: Option<u8>,
    /// 1..=32.
    pub max_vcpus: u8,
    /// MiB, at least 64. A container's memory limit makes the VM larger, never smaller.
    pub memory_mib: u32,
    /// The same for a clone that may have containers without a memory limit. It costs such a VM little, because a
    /// template has the descriptions of the memory. None: 2 GiB, or a quarter of what the VM may grow to if that is
    /// less. A value above what the VM may grow to is not used: the VM begins with `memory_mib`.
    pub unlimited_memory_mib: Option<u32>,
    /// The most that a VM grows to, for memory limits or on demand, MiB. None: the host's memory.
    pub max_memory_mib: Option<u32>,
    /// Take the VMs' memory from the host's pool of 2 MiB pages. A template's pages are private mappings of a file,
    /// which these cannot be, so such VMs boot, whatever `templates` says.
    pub hugepages: bool,
    /// How the drivers of the guest reach the virtio devices.
    pub transport: Transport,
    /// Start VMs as clones of one that was saved when it had booted, where nothing speaks against it.
    pub templates: bool,
    /// Nobody but the guest changes the files of roots that are directories of the host. So the guest may cache them
    /// without limit, as it does those of snapshots.
    pub exclusive_roots: bool,
    /// Containers reach services of the host whose sockets are in directories that they mount.
    pub directory_sockets: bool,
    /// Keep the guest's serial console in the pod's `console/console.log`. It slows the boot. Without it only the last
    /// words of the guest's kernel are logged.
    pub console: bool,
    /// The least severe level that is logged.
    pub log_level: LogLevel,
    /// How the lines of the log are written.
    pub log_format: LogFormat,
    /// The keys that a pod may set with an annotation.
    pub allowed_annotations: Vec<String>,
}

/// Values of `log_level`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
pub enum LogLevel {
    Error,
    Warn,
    Info,
    Debug,
    Trace,
}

/// Values of `log_format`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
pub enum LogFormat {
    Text,
    Json,
}

impl From<LogLevel> for tracing::Level {
    fn from(level: LogLevel) -> Self {
        match level {
            LogLevel::Error => tracing::Level::ERROR,
            LogLevel::Warn => tracing::Level::WARN,
            LogLevel::Info => tracing::Level::INFO,
            LogLevel::Debug => tracing::Level::DEBUG,
            LogLevel::Trace => tracing::Level::TRACE,
        }
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            path: CONFIG_PATH.into(),
            origins: BTreeMap::new(),
            kernel: "/usr/lib/bulkhead/vmlinux".into(),
            initramfs: "/usr/lib/bulkhead/initramfs.cpio".into(),
            vmm: "/usr/lib/bulkhead/bulkhead-vmm".into(),
            vcpus: None,
            max_vcpus: MOST_VCPUS,
            memory_mib: 256,
            unlimited_memory_mib: None,
            max_memory_mib: None,
            hugepages: false,
            transport: Transport::default(),
            templates: true,
            exclusive_roots: false,
            directory_sockets: true,
            console: false,
            log_level: LogLevel::Info,
            log_format: LogFormat::Text,
            allowed_annotations: Vec::new(),
        }
    }
}

/// Why there is no configuration to work with.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ConfigError {
    #[error("{path}: cannot read it")]
    Read { path: PathBuf, source: io::Error },
    #[error("{path}: line {line} ({text}): {reason}")]
    Parse { path: PathBuf, line: usize, text: String, reason: String },
    #[error("{path}: line {line}: there is no key `{key}`; {advice}")]
    UnknownKey { path: PathBuf, line: usize, key: String, advice: String },
    #[error("{path} and its drop-ins: {reason}")]
    Merge { path: PathBuf, reason: String },
    #[error("{path}: allowed_annotations: there is no annotation for {key:?}; {advice}")]
    Annotation { path: PathBuf, key: String, advice: String },
    #[error("{path}: {field} = {value:?}: an absolute path is needed")]
    Relative { path: PathBuf, field: &'static str, value: PathBuf },
    #[error("{path}: {field} = {value}: {allowed}")]
    Range { path: PathBuf, field: &'static str, value: u32, allowed: &'static str },
    #[error("{field} {path}: {reason}; {}", install(field, config))]
    Missing { field: &'static str, path: PathBuf, reason: String, config: PathBuf },
    #[error("{field} {path}: {reason}; {}", replace(field, config))]
    Damaged { field: &'static str, path: PathBuf, reason: String, config: PathBuf },
    #[error("{field} {path}: cannot look at it")]
    Part { field: &'static str, path: PathBuf, source: io::Error },
}

impl ConfigError {
    /// What to do about it, if that is known. The message ends with `; ` and this.
    pub fn remedy(&self) -> Option<String> {
        match self {
            Self::UnknownKey { advice, .. } | Self::Annotation { advice, .. } => Some(advice.clone()),
            Self::Missing { field, config, .. } => Some(install(field, config)),
            Self::Damaged { field, config, .. } => Some(replace(field, config)),
            Self::Read { .. }
            | Self::Parse { .. }
            | Self::Merge { .. }
            | Self::Relative { .. }
            | Self::Range { .. }
            | Self::Part { .. } => None,
        }
    }
}

fn install(field: &str, config: &Path) -> String {
    format!("install it or set `{field}` in {}", config.display())
}

fn replace(field: &str, config: &Path) -> String {
    format!("install Bulkhead again, or set `{field}` in {} to a whole file", config.display())
}

/// A key of the configuration as it is in force.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Setting {
    /// The key.
    pub key: &'static str,
    /// As TOML writes it. None: there is no value.
    pub value: Option<String>,
    /// The file that says so. None: it is the default.
    pub origin: Option<PathBuf>,
}

impl Config {
    /// Reads the file at `path` and its drop-ins: all `*.toml` in the directory of the same name with the extension
    /// `d`, in the order of their names. A later file overrides an earlier one, key by key. Files that do not exist
    /// mean defaults.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let (mut merged, mut origins) = (Table::new(), BTreeMap::new());
        for file in files(path)? {
            for (key, value) in read(&file)? {
                origins.insert(key.clone(), file.clone());
                merged.insert(key, value);
            }
        }
        let merged = merged
            .try_into::<Self>()
            .map_err(|e| ConfigError::Merge { path: path.into(), reason: one_line(e.message()) })?;
        let config = Self { path: path.into(), origins, ..merged };
        config.check_paths()?;
        config.check_ranges()?;
        config.check_annotations()?;
        Ok(config)
    }

    /// A relative path would be one in the working directory of containerd, or of whoever starts a command.
    fn check_paths(&self) -> Result<(), ConfigError> {
        for (field, value) in self.parts() {
            if !value.is_absolute() {
                let path = self.origins.get(field).unwrap_or(&self.path).clone();
                return Err(ConfigError::Relative { path, field, value: value.clone() });
            }
        }
        Ok(())
    }

    fn parts(&self) -> [(&'static str, &PathBuf); 3] {
        [("kernel", &self.kernel), ("initramfs", &self.initramfs), ("vmm", &self.vmm)]
    }

    fn check_annotations(&self) -> Result<(), ConfigError> {
        let unknown = self.allowed_annotations.iter().find(|key| !ANNOTATION_KEYS.contains(&key.as_str()));
        let Some(key) = unknown else { return Ok(()) };
        let path = self.origins.get("allowed_annotations").unwrap_or(&self.path).clone();
        let key = one_line(key);
        let advice = advice(&key, &ANNOTATION_KEYS);
        Err(ConfigError::Annotation { path, key, advice })
    }

    pub(crate) fn check_ranges(&self) -> Result<(), ConfigError> {
        let range = |field: &'static str, value, allowed| {
            let path = self.origins.get(field).unwrap_or(&self.path).clone();
            Err(ConfigError::Range { path, field, value, allowed })
        };
        for (field, vcpus) in [("vcpus", self.vcpus), ("max_vcpus", Some(self.max_vcpus))] {
            if let Some(vcpus) = vcpus.filter(|vcpus| !(1..=MOST_VCPUS).contains(vcpus)) {
                return range(field, vcpus.into(), "it must be 1 to 32");
            }
        }
        if self.memory_mib < 64 {
            return range("memory_mib", self.memory_mib, "at least 64 are needed");
        }
        if let Some(found) = self.unlimited_memory_mib.filter(|found| *found < self.memory_mib) {
            return range("unlimited_memory_mib", found, "it must not be less than memory_mib");
        }
        if let Some(most) = self.max_memory_mib.filter(|most| *most < self.memory_mib) {
            return range("max_memory_mib", most, "it must not be less than memory_mib");
        }
        if self.hugepages && !self.memory_mib.is_multiple_of(2) {
            return range("memory_mib", self.memory_mib, "with hugepages it is a multiple of 2");
        }
        Ok(())
    }

    /// Each key, its value, and the file that it comes from.
    pub fn settings(&self) -> Vec<Setting> {
        // What cannot be written as TOML has no value; all types of this structure can.
        let values = Table::try_from(self).unwrap_or_default();
        let setting = |key: &'static str| Setting {
            key,
            value: values.get(key).map(ToString::to_string),
            origin: self.origins.get(key).cloned(),
        };
        KEYS.map(setting).into()
    }

    /// Whether VMs are clones of templates. A console shows how the guest boots, and a template has no huge pages.
    pub(crate) fn has_templates(&self) -> bool {
        self.templates && !self.console && !self.hugepages
    }

    /// The number of vCPUs of a VM on a host with this number of processors.
    pub(crate) fn vcpus_on(&self, processors: usize) -> u8 {
        let of_host = u8::try_from(processors).unwrap_or(u8::MAX).clamp(1, self.max_vcpus);
        self.vcpus.unwrap_or(of_host)
    }

    /// Checks that what a VM is made of is there, before anything is done for it.
    pub fn check_files(&self) -> Result<(), ConfigError> {
        for (field, path) in self.parts() {
            let missing = |reason| ConfigError::Missing {
                field,
                path: path.clone(),
                reason,
                config: self.path.clone(),
            };
            let metadata = match fs::metadata(path) {
                Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                    return Err(missing(e.to_string()));
                }
                // It may be there: its storage may have failed.
                other => other.map_err(|source| ConfigError::Part { field, path: path.clone(), source })?,
            };
            if !metadata.is_file() {
                return Err(missing("is not a file".into()));
            }
        }
        Ok(())
    }

    /// Checks that what a VM boots from is whole, as far as that is cheap. Returns the doubts that are left.
    pub fn check_boot_files(&self) -> Result<Vec<String>, ConfigError> {
        let failed = |field, path: &PathBuf, flaw| match flaw {
            Flaw::Unreadable(source) => ConfigError::Part { field, path: path.clone(), source },
            Flaw::Damaged(reason) => {
                ConfigError::Damaged { field, path: path.clone(), reason, config: self.path.clone() }
            }
        };
        let (kernel, initramfs) = (&self.kernel, &self.initramfs);
        let of_kernel = boot_files::kernel(kernel).map_err(|flaw| failed("kernel", kernel, flaw))?;
        let of_initramfs = boot_files::initramfs(initramfs);
        let of_initramfs = of_initramfs.map_err(|flaw| failed("initramfs", initramfs, flaw))?;
        let doubt = |field, path: &PathBuf, doubt| format!("{field} {}: {doubt}", path.display());
        let of_kernel = of_kernel.map(|reason| doubt("kernel", kernel, reason));
        let of_initramfs = of_initramfs.map(|reason| doubt("initramfs", initramfs, reason));
        Ok(of_kernel.into_iter().chain(of_initramfs).collect())
    }
}

/// The configuration at `path`, and its drop-ins in their order.
fn files(path: &Path) -> Result<Vec<PathBuf>, ConfigError> {
    let directory = path.with_extension(DROP_INS);
    let error = |source| ConfigError::Read { path: directory.clone(), source };
    let mut drop_ins = Vec::new();
    match fs::read_dir(&directory) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        entries => {
            for entry in entries.map_err(error)? {
                drop_ins.push(entry.map_err(error)?.path());
            }
        }
    }
    drop_ins.retain(|file| file.extension().is_some_and(|extension| extension == "toml"));
    drop_ins.sort();
    drop_ins.insert(0, path.to_owned());
    Ok(drop_ins)
}

/// The keys and values of one file, each of which is valid by itself.
fn read(path: &Path) -> Result<Table, ConfigError> {
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Table::new()),
        Err(source) => return Err(ConfigError::Read { path: path.into(), source }),
    };
    let parsed = DeTable::parse(&text).map_err(|e| parse_error(path, &text, &e))?;
    let unknown = parsed.get_ref().keys().find(|key| !KEYS.contains(&key.get_ref().as_ref()));
    if let Some(key) = unknown {
        let (line, name) = (line_of(&text, key.span().start), one_line(key.get_ref()));
        return Err(ConfigError::UnknownKey {
            path: path.into(),
            line,
            advice: advice(&name, &KEYS),
            key: name,
        });
    }
    toml::from_str::<Config>(&text).map_err(|e| parse_error(path, &text, &e))?;
    toml::from_str(&text).map_err(|e| parse_error(path, &text, &e))
}

/// What to write instead of a key that does not exist.
fn advice(unknown: &str, keys: &[&str]) -> String {
    match nearest(unknown, keys) {
        Some(key) => format!("did you mean `{key}`?"),
        None => format!("the keys are {}", keys.join(", ")),
    }
}

/// The key that was meant, if one is similar.
pub(crate) fn nearest<'k>(unknown: &str, keys: &[&'k str]) -> Option<&'k str> {
    // A third of the letters may be wrong. With more, it is more likely another word than a slip.
    let most = (unknown.chars().count() / 3).max(1);
    let nearest = keys.iter().map(|key| (damerau_levenshtein(unknown, key), *key)).min();
    nearest.filter(|(distance, _)| *distance <= most).map(|(_, key)| key)
}

/// toml's own text has several lines with a drawing; ours is one line.
fn parse_error(path: &Path, text: &str, error: &toml::de::Error) -> ConfigError {
    let line = line_of(text, error.span().map_or(0, |span| span.start));
    ConfigError::Parse {
        path: path.into(),
        line,
        text: text.lines().nth(line - 1).unwrap_or_default().trim().to_owned(),
        reason: one_line(error.message()),
    }
}

/// The number of the line with the byte `at`, from 1 on.
fn line_of(text: &str, at: usize) -> usize {
    text.bytes().take(at).filter(|byte| *byte == b'\n').count() + 1
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::{testing::is_on_troubleshooting_page, types::error::chain};

    fn load(text: &str) -> Result<Config, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.toml");
        fs::write(&path, text).unwrap();
        Config::load(&path).map_err(|e| e.to_string())
    }

    #[test]
    fn no_file_means_defaults() {
        let path = Path::new("/nonexistent/config.toml");
        assert_eq!(Config::load(path).unwrap(), Config { path: path.into(), ..Config::default() });
    }

    #[test]
    fn reads_every_key() {
        let config = load(
            "kernel='/k'\ninitramfs='/i'\nvmm='/v'\nvcpus=2\nmax_vcpus=4\nmemory_mib=512\nunlimited_memory_mib=768\n\
             max_memory_mib=1024\nhugepages=true\ntransport='mmio'\ntemplates=false\nexclusive_roots=true\n\
             directory_sockets=false\nconsole=true\nlog_level='debug'\n\
             log_format='json'\nallowed_annotations=['console','vcpus']\n",
        )
        .unwrap();
        assert_eq!(
            config,
            Config {
                path: config.path.clone(),
                origins: config.origins.clone(),
                kernel: "/k".into(),
                initramfs: "/i".into(),
                vmm: "/v".into(),
                vcpus: Some(2),
                max_vcpus: 4,
                memory_mib: 512,
                unlimited_memory_mib: Some(768),
                max_memory_mib: Some(1024),
                hugepages: true,
                transport: Transport::Mmio,
                templates: false,
                exclusive_roots: true,
                directory_sockets: false,
                console: true,
                log_level: LogLevel::Debug,
                log_format: LogFormat::Json,
                allowed_annotations: vec!["console".into(), "vcpus".into()],
            }
        );
    }

    #[test]
    fn errors_name_the_file_and_the_field() {
        for (text, field) in [
            ("vcpus = 2\nmemorymib = 3\n", "line 2: there is no key `memorymib`; did you mean `memory_mib`?"),
            (
                "[runtime]\nvcpus = 2\n",
                "there is no key `runtime`; the keys are kernel, initramfs, vmm, vcpus",
            ),
            ("vcpus = 1\nvcpus 2\n", "line 2 (vcpus 2)"),
            ("vcpus = \"two\"\n", "vcpus"),
            ("vcpus = 33\n", "vcpus"),
            ("kernel = 'vmlinux'\n", "config.toml: kernel = \"vmlinux\": an absolute path is needed"),
            ("vmm = ''\n", "vmm = \"\": an absolute path is needed"),
            (
                "log_format = 'xml'\n",
                "line 1 (log_format = 'xml'): unknown variant `xml`, expected `text` or `json`",
            ),
            ("max_vcpus = 0\n", "max_vcpus"),
            ("memory_mib = 8\n", "memory_mib"),
            ("unlimited_memory_mib = 255\n", "unlimited_memory_mib"),
            ("max_memory_mib = 255\n", "max_memory_mib"),
            ("hugepages = true\nmemory_mib = 255\n", "memory_mib"),
            ("allowed_annotations = ['consol']\n", "no annotation for \"consol\"; did you mean `console`?"),
            ("allowed_annotations = ['kernel']\n", "no annotation for \"kernel\"; the keys are vcpus, "),
            ("allowed_annotations = true\n", "allowed_annotations"),
        ] {
            let error = load(text).unwrap_err();
            assert!(error.contains("config.toml") && error.contains(field), "{error}");
            assert!(!error.contains('\n'), "{error}");
        }
    }

    #[test]
    fn the_keys_are_those_of_the_structure() {
        let config = serde_json::to_value(Config::default()).unwrap();
        let keys: Vec<_> = config.as_object().unwrap().keys().map(String::as_str).collect();
        let mut known = KEYS;
        known.sort_unstable();
        assert_eq!(keys, known);
    }

    #[test]
    fn a_drop_in_overrides_what_is_before_it_and_each_value_says_where_it_is_from() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir(at("config.d")).unwrap();
        fs::write(at("config.toml"), "memory_mib = 512\nvcpus = 2\n").unwrap();
        fs::write(at("config.d/20.toml"), "memory_mib = 2048\n").unwrap();
        fs::write(at("config.d/10.toml"), "memory_mib = 1024\nconsole = true\n").unwrap();
        fs::write(at("config.d/ignored.txt"), "nonsense").unwrap();
        let config = Config::load(&at("config.toml")).unwrap();
        assert_eq!((config.memory_mib, config.vcpus, config.console), (2048, Some(2), true));
        let settings = config.settings();
        let setting = |key: &str| settings.iter().find(|setting| setting.key == key).unwrap();
        assert_eq!(setting("memory_mib").value.as_deref(), Some("2048"));
        assert_eq!(setting("memory_mib").origin, Some(at("config.d/20.toml")));
        assert_eq!(setting("vcpus").origin, Some(at("config.toml")));
        let log_level = setting("log_level");
        assert_eq!((log_level.value.as_deref(), &log_level.origin), (Some("\"info\""), &None));
        assert_eq!(settings.len(), KEYS.len());
        // The file with the value is named, not the first one.
        fs::write(at("config.d/30.toml"), "memory_mib = 1\n").unwrap();
        let error = Config::load(&at("config.toml")).unwrap_err().to_string();
        assert!(error.starts_with(at("config.d/30.toml").to_str().unwrap()), "{error}");
        fs::remove_dir_all(at("config.d")).unwrap();
        fs::write(at("config.d"), "").unwrap();
        let error = chain(&Config::load(&at("config.toml")).unwrap_err());
        assert!(error.ends_with("config.d: cannot read it: not a directory"), "{error}");
    }

    #[test]
    fn the_example_has_every_key_with_its_default() {
        let example = include_str!("../../../contrib/bulkhead/config.toml");
        assert!(load(example).unwrap().origins.is_empty(), "the example as it is changes nothing");
        let lines = example.lines().filter_map(|line| line.strip_prefix('#'));
        let pairs = lines.filter_map(|line| line.split_once(" = ")).filter(|(key, _)| !key.starts_with(' '));
        let shown: BTreeMap<_, _> = pairs.collect();
        let settings = Config::default().settings();
        assert_eq!(shown.len(), settings.len(), "{shown:?}");
        for setting in settings {
            let value = shown.get(setting.key).copied().unwrap_or_else(|| panic!("no {}", setting.key));
            match setting.value {
                Some(default) => assert_eq!(value, default, "{}", setting.key),
                // There is no default, so the example has some value.
                None => {
                    let found = load(&format!("{} = {value}", setting.key)).unwrap().settings();
                    let found = found.into_iter().find(|found| found.key == setting.key).unwrap();
                    assert_eq!(found.value.as_deref(), Some(value));
                }
            }
        }
    }

    #[test]
    fn the_operators_page_has_every_key_with_its_default() {
        let page = include_str!("../../../docs/operations.md");
        let row =
            |key: &str| page.lines().find(|line| line.starts_with('|') && line.contains(&format!("`{key}`")));
        for setting in Config::default().settings() {
            let cells: Vec<_> =
                row(setting.key).unwrap_or_else(|| panic!("no {}", setting.key)).split(" | ").collect();
            let default = setting.value.unwrap_or_else(|| "none".into());
            let is_path = default.contains("/usr/lib/bulkhead") && cells[1] == "below `/usr/lib/bulkhead`";
            assert!(is_path || cells[1] == default, "{}: {default} is shown as {}", setting.key, cells[1]);
        }
    }

    #[test]
    fn a_vm_has_the_hosts_processors_up_to_a_maximum_or_what_is_configured() {
        let config = |text: &str| load(text).unwrap();
        assert_eq!([1, 2, 32, 64, 1000].map(|host| config("").vcpus_on(host)), [1, 2, 32, 32, 32]);
        assert_eq!([2, 8].map(|host| config("max_vcpus = 4").vcpus_on(host)), [2, 4]);
        assert_eq!([2, 8].map(|host| config("vcpus = 4").vcpus_on(host)), [4, 4]);
    }

    #[test]
    fn a_missing_part_is_named() {
        let config = Config { kernel: "/nonexistent/vmlinux".into(), ..Config::default() };
        let error = config.check_files().unwrap_err().to_string();
        assert!(error.starts_with("kernel /nonexistent/vmlinux: No such file"), "{error}");
        assert!(error.contains("install it"), "{error}");
    }

    #[test]
    fn each_missing_part_is_named_as_the_troubleshooting_page_says() {
        let dir = tempfile::tempdir().unwrap();
        let there = dir.path().join("there");
        fs::write(&there, "").unwrap();
        let all = Config { kernel: there.clone(), initramfs: there.clone(), vmm: there, ..Config::default() };
        let missing = || PathBuf::from("/no/such/part");
        for (name, config) in [
            ("kernel", Config { kernel: missing(), ..all.clone() }),
            ("initramfs", Config { initramfs: missing(), ..all.clone() }),
            ("vmm", Config { vmm: missing(), ..all.clone() }),
        ] {
            let text = format!("{name} ...: No such file or directory (os error 2); install it or set");
            let (begin, rest) = text.split_once("...").unwrap();
            let error = config.check_files().unwrap_err().to_string();
            assert!(error.starts_with(&format!("{begin}/no/such/part{rest}")), "{error}");
            assert!(is_on_troubleshooting_page(&text), "{text}");
        }
    }

    #[test]
    fn a_damaged_part_is_named_with_what_to_do() {
        let config = Config { kernel: "/proc/self/comm".into(), ..Config::default() };
        let error = config.check_boot_files().unwrap_err();
        let remedy = "install Bulkhead again, or set `kernel` in /etc/bulkhead/config.toml to a whole file";
        assert_eq!(error.remedy().as_deref(), Some(remedy));
        assert_eq!(error.to_string(), format!("kernel /proc/self/comm: it is empty; {remedy}"));
    }

    #[test]
    fn a_part_that_cannot_be_looked_at_is_not_said_to_be_missing() {
        let dir = tempfile::tempdir().unwrap();
        let kernel = dir.path().join("vmlinux");
        // Another failure than that there is none. Root is refused nothing.
        symlink(&kernel, &kernel).unwrap();
        let config = Config { kernel: kernel.clone(), ..Config::default() };
        let error = chain(&config.check_files().unwrap_err());
        assert!(error.starts_with(&format!("kernel {}: cannot look at it: ", kernel.display())), "{error}");
        assert!(!error.contains("install"), "{error}");
    }
}
