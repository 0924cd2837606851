//! How many huge pages the guest sets aside. A container of a pod may have a limit of them. So may the pod's cgroup on
//! the host, which is kubelet's to set: by default, containerd does not pass on the limits of containers
//! (`disable_hugetlb_controller` of its CRI plugin).

use std::{borrow::Cow, collections::HashSet};

use bulkhead_agent_api::{HUGE_PAGE, HUGE_PAGE_SIZE};
use serde_json::{Value, json};

use crate::{
    host::memory_volumes::MemoryVolume,
    pod::container_role::Role,
    types::{
        request_error::{RequestError, invalid, unimplemented},
        spec::{Resources, edit_json},
    },
};

/// Another size of huge pages, which a host can have and the guest lacks.
pub(super) const OTHER_SIZE: &str = "1GB";

/// A mount of huge pages in a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HugePagesMount {
    /// Its index in the spec's `mounts`.
    index: usize,
    /// The volume of the host that it is a part of. None: the spec says the type hugetlbfs, and the mount is a file
    /// system of its own.
    volume: Option<String>,
    /// The most that its files can have, bytes. 0: as much as there are pages.
    bytes: u64,
}

impl HugePagesMount {
    /// The mounts whose volumes have huge pages.
    pub(super) fn of_volumes(volumes: &[(usize, MemoryVolume)]) -> impl Iterator<Item = Self> {
        let volumes = volumes.iter().filter(|(_, volume)| volume.huge_pages);
        volumes.map(|(index, volume)| Self {
            index: *index,
            volume: Some(volume.name.clone()),
            bytes: volume.bytes,
        })
    }

    /// A mount of the type hugetlbfs, with the options of its file system (mount(8)). Without the option `pagesize` it
    /// has pages of the only size in the guest.
    pub(super) fn of_type(index: usize, options: &[String]) -> Result<Self, RequestError> {
        let mut bytes = 0;
        for option in options {
            match option.split_once('=') {
                Some(("pagesize", size)) if parse(size) != Some(HUGE_PAGE) => {
                    return Err(unknown_size(format!("mounts[{index}].options: {option:?}")));
                }
                // A size in percent of the pool says nothing: the pool is still to be made.
                Some(("size", size)) => bytes = parse(size).unwrap_or(0) / HUGE_PAGE * HUGE_PAGE,
                _ => {}
            }
        }
        Ok(Self { index, volume: None, bytes })
    }

    fn field(&self) -> String {
        let part = if self.volume.is_some() { ".source" } else { "" };
        format!("mounts[{}]{part}", self.index)
    }

    /// What it is, for errors.
    fn what(&self) -> &'static str {
        if self.volume.is_some() { "is in a hugetlbfs" } else { "is a hugetlbfs" }
    }
}

/// A number as the kernel reads it (lib/cmdline.c, memparse), but not in octal or hexadecimal.
fn parse(size: &str) -> Option<u64> {
    let digits = size.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let shift = match size.strip_prefix(digits)? {
        "" => 0,
        "k" | "K" => 10,
        "m" | "M" => 20,
        "g" | "G" => 30,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

/// Refuses a size of pages that the guest lacks.
pub(super) fn unknown_size(what: impl Into<String>) -> RequestError {
    unimplemented(what, ": the guest has huge pages of 2 MiB only (hugepages-2Mi)")
}

/// Refuses a pod that requests pages of [`OTHER_SIZE`]. kubelet then sets this limit, bytes, of the pod's cgroup on the
/// host. Without such a request the limit is 0, or there is none.
pub(super) fn check_other_size(limit: Option<u64>) -> Result<(), RequestError> {
    match limit {
        Some(1..) => Err(unknown_size("hugepages-1Gi (hugetlb.1GB.max of the pod's cgroup on the host)")),
        Some(0) | None => Ok(()),
    }
}

/// Checks that the limits of a container say how many huge pages its mounts of huge pages need. If it is the only
/// container of its VM, the sizes of the file systems may say it: docker has no flag for a limit. In a pod the limit of
/// the pod may say it. Then one of the mounts is returned, for an error if the pod has no limit either.
pub(super) fn ask(
    document: &mut Value,
    resources: &mut Resources,
    role: &Role,
    mounts: &[HugePagesMount],
) -> Result<Option<HugePagesMount>, RequestError> {
    let Some(first) = mounts.first().filter(|_| resources.huge_pages().is_none()) else { return Ok(None) };
    if matches!(role, Role::Member { .. }) {
        return Ok(Some(first.clone()));
    }
    if let Some(mount) = mounts.iter().find(|mount| mount.bytes == 0) {
        let reason = format!(
            "{} without a size, and the guest has to know how many huge pages to set aside; set \
             linux.resources.hugepageLimits[2MB], or give the hugetlbfs the option size",
            mount.what()
        );
        return Err(invalid(mount.field(), reason));
    }
    // Several parts of a volume share its pages.
    let (mut counted, mut bytes) = (HashSet::new(), 0u64);
    for mount in mounts {
        if mount.volume.as_ref().is_none_or(|name| counted.insert(name)) {
            bytes = bytes.saturating_add(mount.bytes);
        }
    }
    resources.ask_for_huge_pages(bytes);
    add_limit(document, bytes);
    Ok(None)
}

/// Why a mount of huge pages is refused in a pod that has none.
pub(super) fn none_in_pod(mount: &HugePagesMount) -> RequestError {
    let reason = format!(
        "{}, but neither the container (linux.resources.hugepageLimits[2MB]) nor the pod's cgroup on \
         the host (hugetlb.2MB.max) has a limit that says how many huge pages to set aside; request hugepages-2Mi",
        mount.what()
    );
    invalid(mount.field(), reason)
}

/// The spec of a sandbox container for the guest, with the limit of the pod.
pub(super) fn with_pod_limit(
    spec_json: Cow<'_, [u8]>,
    bytes: u64,
) -> Result<Cow<'_, [u8]>, serde_json::Error> {
    edit_json(&spec_json, |document| add_limit(document, bytes))
}

fn add_limit(document: &mut Value, bytes: u64) {
    let limit = json!({ "pageSize": HUGE_PAGE_SIZE, "limit": bytes });
    match &mut document["linux"]["resources"]["hugepageLimits"] {
        Value::Array(limits) => limits.push(limit),
        other => *other = Value::Array(vec![limit]),
    }
}

#[cfg(test)]
mod tests {
    use std::slice;

    use super::*;

    fn of_volume(index: usize, name: &str, bytes: u64) -> HugePagesMount {
        let volume = |huge_pages| MemoryVolume {
            name: name.into(),
            huge_pages,
            bytes,
            mode: 0o777,
            uid: 0,
            gid: 0,
            part: "".into(),
        };
        let volumes = [(index + 1, volume(false)), (index, volume(true))];
        HugePagesMount::of_volumes(&volumes).next().unwrap()
    }

    fn of_type(options: &[&str]) -> Result<HugePagesMount, RequestError> {
        HugePagesMount::of_type(2, &options.iter().map(|&option| option.into()).collect::<Vec<_>>())
    }

    #[test]
    fn the_parts_of_a_volume_share_its_pages() {
        let ask = |mounts: &[HugePagesMount]| {
            let (mut document, mut resources) = (json!({}), Resources::default());
            let asked = super::ask(&mut document, &mut resources, &Role::Single, mounts)?;
            assert_eq!(asked, None);
            Ok::<_, RequestError>(resources.huge_pages())
        };
        let [one, part, other] =
            [of_volume(1, "0-1", 6 << 20), of_volume(2, "0-1", 6 << 20), of_volume(3, "0-2", 2 << 20)];
        assert_eq!(ask(&[one.clone(), part, other]).unwrap(), Some(8 << 20));
        // Two file systems of a spec's own share nothing.
        let own = of_type(&["size=4M"]).unwrap();
        assert_eq!(ask(&[one, own.clone(), own]).unwrap(), Some(14 << 20));
        assert_eq!(ask(&[]).unwrap(), None);
        let error = ask(&[of_type(&["mode=0700", "size=50%"]).unwrap()]).unwrap_err().to_string();
        assert!(error.starts_with("mounts[2]: is a hugetlbfs without a size"), "{error}");
    }

    #[test]
    fn a_mount_of_the_type_says_its_size() {
        let bytes = |options: &[&str]| of_type(options).unwrap().bytes;
        assert_eq!((bytes(&[]), bytes(&["pagesize=2M", "size=5M"])), (0, 4 << 20));
        assert_eq!(
            (bytes(&["pagesize=2048k", "size=8388608"]), bytes(&["size=1g", "nosuid"])),
            (8 << 20, 1 << 30)
        );
        for option in ["pagesize=1G", "pagesize=1073741824", "pagesize=x", "pagesize="] {
            let error = of_type(&[option]).unwrap_err().to_string();
            assert!(
                error.starts_with(&format!("mounts[2].options: {option:?} is not implemented")),
                "{error}"
            );
        }
    }

    #[test]
    fn pages_of_a_gib_for_a_pod_are_refused_by_name() {
        assert!(check_other_size(None).is_ok() && check_other_size(Some(0)).is_ok());
        let error = check_other_size(Some(1 << 30)).unwrap_err().to_string();
        assert!(
            error.starts_with("hugepages-1Gi (hugetlb.1GB.max of the pod's cgroup on the host) is not"),
            "{error}"
        );
    }

    #[test]
    fn a_container_of_a_pod_without_a_limit_of_its_own_has_that_of_the_pod() {
        let role = Role::Member { sandbox_id: "pod".into() };
        let mut resources = Resources::default();
        let ask = |resources: &mut Resources, mounts: &[HugePagesMount]| {
            let mut document = json!({});
            let asked = super::ask(&mut document, resources, &role, mounts).unwrap();
            assert_eq!(document, json!({}), "it gets no limit of its own");
            asked
        };
        let mount = of_volume(5, "0-1", 6 << 20);
        assert_eq!(ask(&mut resources, &[]), None);
        assert_eq!(ask(&mut resources, slice::from_ref(&mount)), Some(mount.clone()));
        resources.ask_for_huge_pages(0);
        assert_eq!(ask(&mut resources, slice::from_ref(&mount)), None);
        assert!(none_in_pod(&mount).to_string().starts_with("mounts[5].source: is in a hugetlbfs"));
        let own = of_type(&["size=4M"]).unwrap();
        assert!(none_in_pod(&own).to_string().starts_with("mounts[2]: is a hugetlbfs, but"));

        let spec = with_pod_limit(br#"{"linux": {"resources": {"cpu": {}}}}"#.into(), 4 << 20).unwrap();
        let spec: Value = serde_json::from_slice(&spec).unwrap();
        let limits = json!([{ "pageSize": "2MB", "limit": 4 << 20 }]);
        assert_eq!(spec, json!({ "linux": { "resources": { "cpu": {}, "hugepageLimits": limits } } }));
    }
}
