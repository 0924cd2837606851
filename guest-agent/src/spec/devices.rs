//! Device nodes: the default ones of the runtime-spec ("Default Devices") and those of `linux.devices`.

use bulkhead_agent_api::devices::{DEVICES, Device};
use oci_spec::runtime::{LinuxDevice, LinuxDeviceType};

use super::error::SpecError;
use crate::stage_config::{DeviceNode, NodeKind};

/// Devices that every container has.
const DEFAULT: [&str; 6] = ["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty"];

/// What every container finds in its /dev. /dev/console comes with a terminal, /dev/ptmx is a link into /dev/pts.
pub(super) fn default_nodes() -> Vec<DeviceNode> {
    let node = |device: &Device| DeviceNode {
        path: device.path.into(),
        kind: NodeKind::Char,
        major: device.major.into(),
        minor: device.minor.into(),
        mode: 0o666,
        uid: 0,
        gid: 0,
    };
    DEVICES.iter().filter(|device| DEFAULT.contains(&device.path)).map(node).collect()
}

/// The nodes of `linux.devices`.
pub(super) fn resolve(devices: &[LinuxDevice]) -> Result<Vec<DeviceNode>, SpecError> {
    devices.iter().map(resolve_one).collect()
}

fn resolve_one(device: &LinuxDevice) -> Result<DeviceNode, SpecError> {
    let field = format!("linux.devices[{}]", device.path().display());
    if !device.path().is_absolute() {
        return Err(SpecError::invalid(&field, "is not an absolute path".into()));
    }
    let kind = match device.typ() {
        LinuxDeviceType::C | LinuxDeviceType::U => NodeKind::Char,
        LinuxDeviceType::B => NodeKind::Block,
        LinuxDeviceType::P => NodeKind::Fifo,
        LinuxDeviceType::A => {
            return Err(SpecError::invalid(&field, "type \"a\" is no type of a node".into()));
        }
    };
    let number = |name: &str, value: i64, bits: u32| {
        u64::try_from(value)
            .ok()
            .filter(|n| n >> bits == 0)
            .ok_or_else(|| SpecError::invalid(&field, format!("{name} {value} is not within {bits} bits")))
    };
    Ok(DeviceNode {
        path: device.path().clone(),
        kind,
        major: number("major", device.major(), 12)?,
        minor: number("minor", device.minor(), 20)?,
        // Some callers pass the type bits of a mode as well.
        mode: device.file_mode().unwrap_or(0o666) & 0o7777,
        uid: device.uid().unwrap_or(0),
        gid: device.gid().unwrap_or(0),
    })
}
