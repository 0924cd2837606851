//! `/etc/bulkhead/config.toml`, which is optional: the paths of the parts and the properties of VMs.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use serde::Deserialize;

/// The default path of the configuration.
pub(crate) const CONFIG_PATH: &str = "/etc/bulkhead/config.toml";

/// The most vCPUs that the VMM and the guest's kernel support.
const MOST_VCPUS: u8 = 32;

/// The configuration, with its defaults filled in.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Config {
    /// Where it was read from.
    #[serde(skip)]
    pub(crate) path: PathBuf,
    /// Uncompressed ELF kernel of the guest.
    pub(crate) kernel: PathBuf,
    /// cpio archive whose /init is the agent.
    pub(crate) initramfs: PathBuf,
    /// The VMM's binary.
    pub(crate) vmm: PathBuf,
    /// How many vCPUs a VM has, 1..=32. None: as many as the host has processors, and at most `max_vcpus`.
    pub(crate) vcpus: Option<u8>,
    /// 1..=32.
    pub(crate) max_vcpus: u8,
    /// MiB, at least 64. A container's memory limit makes the VM larger, never smaller.
    pub(crate) memory_mib: u32,
    /// The same for a clone that may have containers without a memory limit. It costs such a VM little, because a
    /// template has the descriptions of the memory. None: 2 GiB, or a quarter of the host's memory if that is less.
    pub(crate) unlimited_memory_mib: Option<u32>,
    /// The most that a VM grows to, for memory limits or on demand, MiB. None: the host's memory.
    pub(crate) max_memory_mib: Option<u32>,
    /// Take the VMs' memory from the host's pool of 2 MiB pages. A template's pages are private mappings of a file,
    /// which these cannot be, so such VMs boot, whatever `templates` says.
    pub(crate) hugepages: bool,
    /// Start VMs as clones of one that was saved when it had booted, where nothing speaks against it.
    pub(crate) templates: bool,
    /// Keep the guest's serial console in the pod's `console.log`. It slows the boot.
    pub(crate) console: bool,
    /// The least severe level that is logged.
    pub(crate) log_level: LogLevel,
}

/// Values of `log_level`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
pub(crate) enum LogLevel {
    Error,
    Warn,
    Info,
    Debug,
    Trace,
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
            kernel: "/usr/lib/bulkhead/vmlinux".into(),
            initramfs: "/usr/lib/bulkhead/initramfs.cpio".into(),
            vmm: "/usr/lib/bulkhead/bulkhead-vmm".into(),
            vcpus: None,
            max_vcpus: MOST_VCPUS,
            memory_mib: 256,
            unlimited_memory_mib: None,
            max_memory_mib: None,
            hugepages: false,
            templates: true,
            console: false,
            log_level: LogLevel::Info,
        }
    }
}

/// Why there is no configuration to work with.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConfigError {
    #[error("{path}: cannot read it")]
    Read { path: PathBuf, source: io::Error },
    #[error("{path}: line {line} ({text}): {reason}")]
    Parse { path: PathBuf, line: usize, text: String, reason: String },
    #[error("{path}: {field} = {value}: {allowed}")]
    Range { path: PathBuf, field: &'static str, value: u32, allowed: &'static str },
    #[error("{field} {path}: {reason}; install it or set `{field}` in {config}")]
    Missing { field: &'static str, path: PathBuf, reason: String, config: PathBuf },
    #[error("{field} {path}: cannot look at it")]
    Part { field: &'static str, path: PathBuf, source: io::Error },
}

impl Config {
    /// Reads `path`; a file that does not exist means all defaults.
    pub(crate) fn load(path: &Path) -> Result<Self, ConfigError> {
        let text = match fs::read_to_string(path) {
            Ok(text) => text,
            Err(e) if e.kind() == io::ErrorKind::NotFound => String::new(),
            Err(source) => return Err(ConfigError::Read { path: path.into(), source }),
        };
        let mut config: Self = toml::from_str(&text).map_err(|e| parse_error(path, &text, &e))?;
        config.path = path.into();
        let range = |field, value, allowed| ConfigError::Range { path: path.into(), field, value, allowed };
        for (field, vcpus) in [("vcpus", config.vcpus), ("max_vcpus", Some(config.max_vcpus))] {
            if let Some(vcpus) = vcpus.filter(|vcpus| !(1..=MOST_VCPUS).contains(vcpus)) {
                return Err(range(field, vcpus.into(), "1 to 32 are possible"));
            }
        }
        if config.memory_mib < 64 {
            return Err(range("memory_mib", config.memory_mib, "at least 64 are needed"));
        }
        if let Some(found) = config.unlimited_memory_mib.filter(|found| *found < config.memory_mib) {
            return Err(range("unlimited_memory_mib", found, "it must not be less than memory_mib"));
        }
        if let Some(most) = config.max_memory_mib.filter(|most| *most < config.memory_mib) {
            return Err(range("max_memory_mib", most, "it must not be less than memory_mib"));
        }
        if config.hugepages && !config.memory_mib.is_multiple_of(2) {
            return Err(range("memory_mib", config.memory_mib, "with hugepages it is a multiple of 2"));
        }
        Ok(config)
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
    pub(crate) fn check_files(&self) -> Result<(), ConfigError> {
        for (field, path) in [("kernel", &self.kernel), ("initramfs", &self.initramfs), ("vmm", &self.vmm)] {
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
}

/// toml's own text has several lines with a drawing; ours is one line.
fn parse_error(path: &Path, text: &str, error: &toml::de::Error) -> ConfigError {
    let at = error.span().map_or(0, |span| span.start.min(text.len()));
    let before = text.get(..at).unwrap_or_default();
    let line = before.matches('\n').count();
    ConfigError::Parse {
        path: path.into(),
        line: line + 1,
        text: text.lines().nth(line).unwrap_or_default().trim().to_owned(),
        reason: error.message().replace('\n', " "),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::types::error::chain;

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
             max_memory_mib=1024\n\
             hugepages=true\ntemplates=false\nconsole=true\nlog_level='debug'\n",
        )
        .unwrap();
        assert_eq!(
            config,
            Config {
                path: config.path.clone(),
                kernel: "/k".into(),
                initramfs: "/i".into(),
                vmm: "/v".into(),
                vcpus: Some(2),
                max_vcpus: 4,
                memory_mib: 512,
                unlimited_memory_mib: Some(768),
                max_memory_mib: Some(1024),
                hugepages: true,
                templates: false,
                console: true,
                log_level: LogLevel::Debug,
            }
        );
    }

    #[test]
    fn errors_name_the_file_and_the_field() {
        for (text, field) in [
            ("vcpus = 2\nmemorymib = 3\n", "memorymib"),
            ("vcpus = \"two\"\n", "vcpus"),
            ("vcpus = 33\n", "vcpus"),
            ("max_vcpus = 0\n", "max_vcpus"),
            ("memory_mib = 8\n", "memory_mib"),
            ("unlimited_memory_mib = 255\n", "unlimited_memory_mib"),
            ("max_memory_mib = 255\n", "max_memory_mib"),
            ("hugepages = true\nmemory_mib = 255\n", "memory_mib"),
        ] {
            let error = load(text).unwrap_err();
            assert!(error.contains("config.toml") && error.contains(field), "{error}");
            assert!(!error.contains('\n'), "{error}");
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
