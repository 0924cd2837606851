//! What the shim reads of config.json (OCI runtime-spec). The rest is the agent's, and goes to it as it is.
//!
//! oci-spec has types for the whole; its `Process` brings a regular expression engine along, which would be a quarter
//! of the shim.

use std::{
    borrow::Cow,
    collections::{BTreeMap, HashMap},
    path::PathBuf,
};

use bulkhead_agent_api::{HUGE_PAGE, HUGE_PAGE_SIZE};
use oci_spec::runtime::{Hooks, LinuxNamespace, Mount, Root};
use serde::{Deserialize, de::IgnoredAny};
use serde_json::Value;

use crate::types::{
    block_io::BlockIo,
    id_mappings::{IdMappings, IdRange, root_of},
};

/// Changes a JSON document, of which the types here have only a part of the fields.
pub(crate) fn edit_json(
    json: &[u8],
    change: impl FnOnce(&mut Value),
) -> Result<Cow<'static, [u8]>, serde_json::Error> {
    let mut document = serde_json::from_slice(json)?;
    change(&mut document);
    Ok(serde_json::to_vec(&document)?.into())
}

/// Whether a mount of this type is a bind mount. `has` says which options it has.
pub(crate) fn is_bind(kind: Option<&str>, has: impl Fn(&str) -> bool) -> bool {
    kind == Some("bind") || has("bind") || has("rbind")
}

#[derive(Debug, Deserialize)]
pub(crate) struct Spec {
    #[serde(default, rename = "ociVersion")]
    pub(crate) oci_version: String,
    pub(crate) process: Option<Process>,
    pub(crate) root: Option<Root>,
    pub(crate) hostname: Option<String>,
    #[serde(default)]
    pub(crate) mounts: Vec<Mount>,
    pub(crate) hooks: Option<Hooks>,
    #[serde(default)]
    pub(crate) annotations: HashMap<String, String>,
    pub(crate) linux: Option<Linux>,
    pub(crate) vm: Option<IgnoredAny>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Process {
    #[serde(default)]
    pub(crate) terminal: bool,
    pub(crate) oom_score_adj: Option<i32>,
    pub(crate) apparmor_profile: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Linux {
    #[serde(default)]
    pub(crate) namespaces: Vec<LinuxNamespace>,
    uid_mappings: Option<Vec<IdRange>>,
    gid_mappings: Option<Vec<IdRange>>,
    #[serde(default)]
    pub(crate) cgroups_path: PathBuf,
    #[serde(default)]
    pub(crate) resources: Resources,
    pub(crate) devices: Option<Vec<Device>>,
}

impl Linux {
    /// The ids of the container's user namespace, if it has one.
    pub(crate) fn ids(&self) -> Option<IdMappings> {
        let ids = |ranges: &Option<Vec<IdRange>>| ranges.clone().unwrap_or_default();
        let (users, groups) = (ids(&self.uid_mappings), ids(&self.gid_mappings));
        (!users.is_empty()).then_some(IdMappings { users, groups })
    }

    /// The user and the group that root is on the host, if its namespace says so.
    pub(crate) fn root(&self) -> (Option<u32>, Option<u32>) {
        let root = |ranges: &Option<Vec<IdRange>>| root_of(ranges.as_deref()?);
        (root(&self.uid_mappings), root(&self.gid_mappings))
    }
}

/// A device node.
#[derive(Debug, Deserialize)]
pub(crate) struct Device {
    pub(crate) path: PathBuf,
    #[serde(rename = "type")]
    pub(crate) kind: String,
    #[serde(default)]
    major: i64,
    #[serde(default)]
    minor: i64,
}

impl Device {
    /// Major and minor.
    pub(crate) fn numbers(&self) -> (i64, i64) {
        (self.major, self.minor)
    }
}

/// Which devices the cgroup of a container may use.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct DeviceRule {
    #[serde(default)]
    pub(crate) allow: bool,
    #[serde(rename = "type")]
    pub(crate) kind: Option<String>,
    pub(crate) major: Option<i64>,
    pub(crate) minor: Option<i64>,
    pub(crate) access: Option<String>,
}

#[derive(Debug, Clone, Default, Deserialize)]
pub(crate) struct Resources {
    pub(crate) devices: Option<Vec<DeviceRule>>,
    #[serde(default)]
    pub(crate) memory: Memory,
    #[serde(default)]
    pub(crate) cpu: Cpu,
    #[serde(rename = "hugepageLimits")]
    pub(crate) huge_pages: Option<Vec<HugePageLimit>>,
    #[serde(rename = "blockIO")]
    pub(crate) block_io: Option<BlockIo>,
    /// Files of cgroup v2 by their names, and what is written to them.
    pub(crate) unified: Option<BTreeMap<String, String>>,
}

/// How much of the huge pages of a size a container may use.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct HugePageLimit {
    #[serde(default, rename = "pageSize")]
    page_size: String,
    /// Bytes; negative: no limit.
    #[serde(default)]
    limit: i64,
}

impl Resources {
    /// The huge pages that the guest is to set aside, bytes. The agent counts in the same way. None: nothing is said of
    /// the guest's pages.
    pub(crate) fn huge_pages(&self) -> Option<u64> {
        let mut limits = self.huge_pages.iter().flatten();
        let limit = limits.rfind(|limit| limit.page_size == HUGE_PAGE_SIZE)?.limit;
        Some(u64::try_from(limit).unwrap_or(0) / HUGE_PAGE * HUGE_PAGE)
    }

    /// Asks for huge pages, bytes, where nothing is said of them.
    pub(crate) fn ask_for_huge_pages(&mut self, bytes: u64) {
        let limit = i64::try_from(bytes).unwrap_or(i64::MAX);
        self.huge_pages
            .get_or_insert_default()
            .push(HugePageLimit { page_size: HUGE_PAGE_SIZE.into(), limit });
    }
}

/// The value of [`Cpu::limit`] that is the whole time of one processor.
pub(crate) const MICRO_CPUS: u64 = 1_000_000;

/// The kernel's default period of a quota, microseconds.
pub(crate) const PERIOD: u64 = 100_000;

/// The kernel's default of [`Cpu::shares`].
const SHARES: u64 = 1024;

/// Limits of processor time, as cgroup v1 has them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub(crate) struct Cpu {
    pub(crate) shares: Option<u64>,
    /// Microseconds in each period; negative: no limit.
    pub(crate) quota: Option<i64>,
    pub(crate) period: Option<u64>,
    /// Microseconds that may be used in addition, if less was used before.
    pub(crate) burst: Option<u64>,
    /// 1: only what nobody else wants.
    pub(crate) idle: Option<i64>,
    /// Processors and NUMA nodes, as lists of ranges.
    pub(crate) cpus: Option<String>,
    pub(crate) mems: Option<String>,
}

#[derive(Debug, Clone, Default, Deserialize)]
pub(crate) struct Memory {
    /// Bytes; -1: none.
    pub(crate) limit: Option<i64>,
}

impl Memory {
    /// The limit, if there is one.
    pub(crate) fn bytes(&self) -> Option<u64> {
        u64::try_from(self.limit?).ok().filter(|limit| *limit > 0)
    }
}

impl Cpu {
    /// The quota in millionths of a processor's time. None: there is no limit.
    pub(crate) fn limit(&self) -> Option<u64> {
        let quota = u64::try_from(self.quota?).ok().filter(|quota| *quota > 0)?;
        let period = self.period.filter(|period| *period > 0).unwrap_or(PERIOD);
        Some(quota.saturating_mul(MICRO_CPUS).div_ceil(period))
    }

    /// These limits as an update of a cgroup that has the limits `other`: what only `other` sets gets the kernel's
    /// default.
    pub(crate) fn instead_of(&self, other: &Self) -> Self {
        Self {
            shares: self.shares.or(other.shares.and(Some(SHARES))),
            quota: self.quota.or(other.quota.and(Some(-1))),
            period: self.period.or(other.period.and(Some(PERIOD))),
            burst: self.burst.or(other.burst.and(Some(0))),
            idle: self.idle.or(other.idle.and(Some(0))),
            cpus: self.cpus.clone(),
            mems: self.mems.clone(),
        }
    }

    /// Whether it says on which processors or NUMA nodes something is to run.
    pub(crate) fn has_set(&self) -> bool {
        [&self.cpus, &self.mems].iter().any(|list| list.as_deref().is_some_and(|list| !list.is_empty()))
    }

    /// These limits after an update by `other`, in which what is left out or 0 stays. As one: a quota counts in a
    /// period.
    pub(crate) fn updated(&self, other: &Self) -> Self {
        Self {
            shares: other.shares.filter(|shares| *shares > 0).or(self.shares),
            quota: other.quota.filter(|quota| *quota != 0).or(self.quota),
            period: other.period.filter(|period| *period > 0).or(self.period),
            burst: other.burst.or(self.burst),
            idle: other.idle.or(self.idle),
            cpus: other.cpus.clone().filter(|cpus| !cpus.is_empty()).or(self.cpus.clone()),
            mems: other.mems.clone().filter(|mems| !mems.is_empty()).or(self.mems.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_limit_of_huge_pages_asks_for_whole_pages() {
        let of = |text: &str| serde_json::from_str::<Resources>(text).unwrap().huge_pages();
        assert_eq!(of(r#"{"hugepageLimits": [{"pageSize": "2MB", "limit": 5000000}]}"#), Some(4 << 20));
        let twice =
            r#"{"hugepageLimits": [{"pageSize": "2MB", "limit": 2097152}, {"pageSize": "2MB", "limit": 0}]}"#;
        assert_eq!((of(twice), of(&twice.replace(": 0}", ": -1}"))), (Some(0), Some(0)));
        for none in [
            r#"{}"#,
            r#"{"hugepageLimits": null}"#,
            r#"{"hugepageLimits": [{"pageSize": "1GB", "limit": 0}]}"#,
        ] {
            assert_eq!(of(none), None);
        }
        let mut resources = Resources::default();
        resources.ask_for_huge_pages(6 << 20);
        assert_eq!(resources.huge_pages(), Some(6 << 20));
    }

    #[test]
    fn what_an_update_leaves_out_stays() {
        let read = |text: &str| serde_json::from_str::<Cpu>(text).unwrap();
        let cpu = read(r#"{"shares": 512, "quota": 100000, "period": 50000, "cpus": "0"}"#);
        let updated = cpu.updated(&read(r#"{"quota": 150000, "period": 0, "cpus": ""}"#));
        assert_eq!((updated.quota, updated.period), (Some(150_000), Some(50_000)));
        assert_eq!((updated.shares, updated.cpus.as_deref(), updated.mems), (Some(512), Some("0"), None));
        let updated = cpu.updated(&read(r#"{"period": 25000, "quota": 0}"#));
        assert_eq!((updated.quota, updated.period), (Some(100_000), Some(25_000)));
        assert_eq!(cpu.updated(&read(r#"{"quota": -1}"#)).quota, Some(-1));
        let updated = read(r#"{"burst": 5, "idle": 1}"#).updated(&read(r#"{"idle": 0}"#));
        assert_eq!((updated.burst, updated.idle), (Some(5), Some(0)));
    }

    #[test]
    fn limits_that_are_put_back_take_the_place_of_all_that_came_after() {
        let read = |text: &str| serde_json::from_str::<Cpu>(text).unwrap();
        let all =
            read(r#"{"shares": 2, "quota": 5000, "period": 50000, "burst": 5, "idle": 1, "cpus": "0"}"#);
        let none = read(r#"{"shares": 1024, "quota": -1, "period": 100000, "burst": 0, "idle": 0}"#);
        assert_eq!(Cpu::default().instead_of(&all), none);
        assert_eq!(all.instead_of(&none), all);
        assert_eq!(Cpu::default().instead_of(&Cpu::default()), Cpu::default());
    }

    #[test]
    fn a_quota_is_a_limit_in_its_period() {
        let limit = |text: &str| serde_json::from_str::<Cpu>(text).unwrap().limit();
        assert_eq!(limit(r#"{"quota": 50000}"#), Some(500_000));
        assert_eq!(limit(r#"{"quota": 50000, "period": 25000}"#), Some(2_000_000));
        assert_eq!(limit(r#"{"quota": 1, "period": 3}"#), Some(333_334));
        assert_eq!(limit(r#"{"quota": 9223372036854775807, "period": 1}"#), Some(u64::MAX));
        for none in [r#"{}"#, r#"{"quota": -1}"#, r#"{"quota": 0, "period": 5}"#] {
            assert_eq!(limit(none), None);
        }
    }
}
