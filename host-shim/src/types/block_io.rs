//! Limits on block devices, as a spec has them (OCI runtime-spec, `linux.resources.blockIO`).

use serde::Deserialize;

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct BlockIo {
    pub(crate) weight: Option<u16>,
    pub(crate) leaf_weight: Option<u16>,
    pub(crate) weight_device: Option<Vec<DeviceWeight>>,
    pub(crate) throttle_read_bps_device: Option<Vec<DeviceRate>>,
    pub(crate) throttle_write_bps_device: Option<Vec<DeviceRate>>,
    #[serde(rename = "throttleReadIOPSDevice")]
    pub(crate) throttle_read_iops_device: Option<Vec<DeviceRate>>,
    #[serde(rename = "throttleWriteIOPSDevice")]
    pub(crate) throttle_write_iops_device: Option<Vec<DeviceRate>>,
}

/// The share of a device that a container gets while others use it too.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct DeviceWeight {
    #[serde(default)]
    pub(crate) major: i64,
    #[serde(default)]
    pub(crate) minor: i64,
    pub(crate) weight: Option<u16>,
    pub(crate) leaf_weight: Option<u16>,
}

/// The most that a container may do with a device in a second.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct DeviceRate {
    #[serde(default)]
    pub(crate) major: i64,
    #[serde(default)]
    pub(crate) minor: i64,
    /// Bytes, or requests.
    #[serde(default)]
    pub(crate) rate: u64,
}
