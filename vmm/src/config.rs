//! Reads and checks the configuration. An error names the invalid field.

use std::{
    fs, io,
    ops::RangeInclusive,
    path::{Path, PathBuf},
};

use bulkhead_vmm_api::{API_VERSION, BLOCK_MIB, NicConfig, VmConfig};
use serde::Deserialize;

/// The MP table has space for this many.
const VCPUS: RangeInclusive<u8> = 1..=32;
/// The kernel, the unpacked initramfs and a container need at least this.
const MIN_MEMORY_MIB: u32 = 64;
/// One TiB. Each step of growth takes a memory slot of KVM, so this limits the number of slots too.
const MAX_GROWN_MIB: u32 = 1 << 20;
/// Bytes of a tag (virtio 1.3, 5.11.4).
const MAX_TAG: usize = 36;

/// Why a configuration is invalid.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("cannot read the configuration {path}")]
    Read { path: PathBuf, source: io::Error },
    #[error("the configuration {path} is not valid")]
    Parse { path: PathBuf, source: serde_json::Error },
    #[error(
        "api_version: the configuration has {found}, this VMM has {API_VERSION}; install the shim and the VMM together"
    )]
    Version { found: u32 },
    #[error("vcpus: {found} is not in {}..={}", VCPUS.start(), VCPUS.end())]
    Vcpus { found: u8 },
    #[error("memory_mib: {found} is less than {MIN_MEMORY_MIB}")]
    Memory { found: u32 },
    #[error(
        "max_memory_mib: {found} is not memory_mib, {memory_mib}, or more by a multiple of {BLOCK_MIB} up to \
         {MAX_GROWN_MIB}"
    )]
    MaxMemory { found: u32, memory_mib: u32 },
    #[error("hugepages: memory_mib, {found}, is not a multiple of 2, the size of a huge page in MiB")]
    HalfAPage { found: u32 },
    #[error("hugepages: a VM with huge pages cannot have save_to or restore_from")]
    HugeSaved,
    #[error(
        "shares[{index}].tag: {tag:?} is empty, longer than {MAX_TAG} bytes, or the tag of another share"
    )]
    Tag { index: usize, tag: String },
    #[error("nics[{index}].mac: {mac:?} is not a unicast MAC address such as 02:00:00:00:00:01")]
    Mac { index: usize, mac: String },
    #[error("nics[{index}].tap: {tap:?} is not a valid name of a network interface")]
    Tap { index: usize, tap: String },
}

/// The field of [`VmConfig`] that says whether the others can be read.
#[derive(Deserialize)]
struct Header {
    api_version: u32,
}

/// Reads and checks the file at `path`.
pub fn load(path: &Path) -> Result<VmConfig, ConfigError> {
    let text = fs::read(path).map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
    let invalid = |source| ConfigError::Parse { path: path.to_owned(), source };
    // A configuration of another version may have other fields.
    let Header { api_version: found } = serde_json::from_slice(&text).map_err(invalid)?;
    if found != API_VERSION {
        return Err(ConfigError::Version { found });
    }
    let config: VmConfig = serde_json::from_slice(&text).map_err(invalid)?;
    check(&config)?;
    Ok(config)
}

/// Parses a MAC address. A multicast address (bit 0 of the first byte is set) is rejected.
pub fn parse_mac(text: &str) -> Option<[u8; 6]> {
    let mut mac = [0; 6];
    let mut parts = text.split(':');
    for byte in &mut mac {
        // from_str_radix accepts a sign.
        let part =
            parts.next().filter(|part| part.len() == 2 && part.bytes().all(|b| b.is_ascii_hexdigit()))?;
        *byte = u8::from_str_radix(part, 16).ok()?;
    }
    (parts.next().is_none() && mac[0] & 1 == 0).then_some(mac)
}

fn check(config: &VmConfig) -> Result<(), ConfigError> {
    if !VCPUS.contains(&config.vcpus) {
        return Err(ConfigError::Vcpus { found: config.vcpus });
    }
    if config.memory_mib < MIN_MEMORY_MIB {
        return Err(ConfigError::Memory { found: config.memory_mib });
    }
    let found = config.max_memory_mib.unwrap_or(config.memory_mib);
    let growth = found.checked_sub(config.memory_mib);
    if growth.is_none_or(|growth| growth % BLOCK_MIB != 0 || growth > 0 && found > MAX_GROWN_MIB) {
        return Err(ConfigError::MaxMemory { found, memory_mib: config.memory_mib });
    }
    if config.hugepages && !config.memory_mib.is_multiple_of(2) {
        return Err(ConfigError::HalfAPage { found: config.memory_mib });
    }
    // A restored VM maps the pages of its memory from the file, and shares them with other VMs.
    if config.hugepages && (config.save_to.is_some() || config.restore_from.is_some()) {
        return Err(ConfigError::HugeSaved);
    }
    for (index, share) in config.shares.iter().enumerate() {
        let taken = config.shares[..index].iter().any(|other| other.tag == share.tag);
        if share.tag.is_empty() || share.tag.len() > MAX_TAG || taken {
            return Err(ConfigError::Tag { index, tag: share.tag.clone() });
        }
    }
    for (index, NicConfig { tap, mac }) in config.nics.iter().enumerate() {
        if !is_interface_name(tap) {
            return Err(ConfigError::Tap { index, tap: tap.clone() });
        }
        if parse_mac(mac).is_none() {
            return Err(ConfigError::Mac { index, mac: mac.clone() });
        }
    }
    Ok(())
}

/// Whether `name` is a valid name of a network interface (netdevice(7)). The kernel would replace `%d` by a number.
fn is_interface_name(name: &str) -> bool {
    let graphic = name.bytes().all(|b| b.is_ascii_graphic() && !matches!(b, b'/' | b':' | b'%'));
    graphic && (1..libc::IFNAMSIZ).contains(&name.len()) && name != "." && name != ".."
}

#[cfg(test)]
mod tests {
    use std::error::Error;

    use super::*;

    const GOOD: &str = r#"{"api_version":15,"kernel":"k","initramfs":"i","vcpus":1,"memory_mib":256,
        "max_memory_mib":1024,
        "control":"c.sock","vsock":"v.sock",
        "shares":[{"tag":"share","dir":"share"}],
        "nics":[{"tap":"tap0","mac":"02:00:00:00:00:01"}]}"#;

    fn load_text(text: &str) -> Result<VmConfig, ConfigError> {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), text).unwrap();
        load(file.path())
    }

    /// The error for [`GOOD`] with one part replaced.
    fn error(from: &str, to: &str) -> String {
        assert!(GOOD.contains(from));
        let error = load_text(&GOOD.replace(from, to)).unwrap_err();
        match error.source() {
            Some(source) => format!("{error}: {source}"),
            None => error.to_string(),
        }
    }

    #[test]
    fn a_good_one_is_taken() {
        let config = load_text(GOOD).unwrap();
        assert_eq!((config.vcpus, config.memory_mib, config.console), (1, 256, None));
    }

    #[test]
    fn what_is_wrong_is_named() {
        let cases = [
            ("\"api_version\":15", "\"api_version\":1", "api_version: the configuration has 1"),
            (
                "\"api_version\":15",
                "\"api_version\":16,\"later\":true",
                "api_version: the configuration has 16, this VMM has 15; install the shim and the VMM together",
            ),
            ("\"api_version\":15,", "", "missing field `api_version`"),
            ("\"vcpus\":1", "\"vcpus\":0", "vcpus: 0 is not in 1..=32"),
            ("\"vcpus\":1", "\"vcpus\":33", "vcpus: 33"),
            ("256", "63", "memory_mib: 63"),
            ("1024", "128", "max_memory_mib: 128 is not memory_mib, 256, or more"),
            ("1024", "1023", "max_memory_mib: 1023"),
            ("1024", "1048704", "max_memory_mib: 1048704"),
            ("256,", "255,\"hugepages\":true,", "max_memory_mib: 1024 is not memory_mib, 255"),
            (
                "256,\n        \"max_memory_mib\":1024",
                "255,\"hugepages\":true",
                "hugepages: memory_mib, 255, is not",
            ),
            (
                "256,",
                "256,\"hugepages\":true,\"save_to\":\"d\",",
                "hugepages: a VM with huge pages cannot have save_to",
            ),
            (
                "256,",
                "256,\"hugepages\":true,\"restore_from\":\"d\",",
                "hugepages: a VM with huge pages cannot have",
            ),
            ("\"tag\":\"share\"", "\"tag\":\"\"", "shares[0].tag: \"\""),
            ("}],\n", "},{\"tag\":\"share\",\"dir\":\"d\"}],\n", "shares[1].tag: \"share\""),
            ("\"tap0\"", "\"\"", "nics[0].tap: \"\""),
            ("\"tap0\"", "\"tap%d\"", "nics[0].tap: \"tap%d\""),
            ("\"tap0\"", "\"sixteen-is-a-lot\"", "nics[0].tap"),
            ("02:00", "0200", "nics[0].mac"),
            ("02:00", "03:00", "nics[0].mac"),
            ("\"vcpus\"", "\"cpus\"", "unknown field `cpus`"),
            ("\"kernel\":\"k\",", "", "missing field `kernel`"),
        ];
        for (from, to, expected) in cases {
            let error = error(from, to);
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn a_missing_file_is_named() {
        let error = load(Path::new("/nowhere/vmm.json")).unwrap_err();
        assert_eq!(error.to_string(), "cannot read the configuration /nowhere/vmm.json");
    }

    #[test]
    fn addresses_are_six_bytes() {
        assert_eq!(parse_mac("02:00:00:00:ab:01"), Some([2, 0, 0, 0, 0xab, 1]));
        for wrong in ["", "02:00:00:00:ab", "02:00:00:00:ab:01:02", "2:0:0:0:0:1", "02:00:00:00:ab:+1"] {
            assert_eq!(parse_mac(wrong), None, "{wrong}");
        }
    }
}
