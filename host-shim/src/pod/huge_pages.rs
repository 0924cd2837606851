//! How many huge pages the guest sets aside. A container of a pod may have a limit of them. So may the pod's cgroup on
//! the host, which is kubelet's to set: by default, containerd does not pass on the limits of containers
//! (`disable_hugetlb_controller` of its CRI plugin).

use std::borrow::Cow;

use bulkhead_agent_api::HUGE_PAGE_SIZE;
use serde_json::{Value, json};

use crate::{
    host::memory_volumes::MemoryVolume,
    pod::container_role::Role,
    types::{
        request_error::{RequestError, invalid},
        spec::{Resources, edit_json},
    },
};

/// Checks that the limits of a container say how many huge pages there are for its volumes, which are given by the
/// indexes of their mounts. If it is the only container of its VM, the size of the volumes says it as well: docker has
/// no flag for a limit. In a pod the limit of the pod may say it. Then the result is the index of a volume.
pub(super) fn ask(
    document: &mut Value,
    resources: &mut Resources,
    role: &Role,
    volumes: &[(usize, MemoryVolume)],
) -> Result<Option<usize>, RequestError> {
    let volumes = || volumes.iter().filter(|(_, volume)| volume.huge_pages);
    let Some((first, _)) = volumes().next().filter(|_| resources.huge_pages().is_none()) else {
        return Ok(None);
    };
    if matches!(role, Role::Member { .. }) {
        return Ok(Some(*first));
    }
    if let Some((index, _)) = volumes().find(|(_, volume)| volume.bytes == 0) {
        return Err(invalid(
            format!("mounts[{index}].source"),
            "is in a hugetlbfs without a size, and the guest has to know how many huge pages to set aside; set \
             linux.resources.hugepageLimits[2MB], or mount the hugetlbfs on the host with the option size",
        ));
    }
    let bytes = volumes().fold(0u64, |sum, (_, volume)| sum.saturating_add(volume.bytes));
    resources.ask_for_huge_pages(bytes);
    add_limit(document, bytes);
    Ok(None)
}

/// Why a volume of huge pages is refused in a pod that has none.
pub(super) fn none_in_pod(index: usize) -> RequestError {
    invalid(
        format!("mounts[{index}].source"),
        "is in a hugetlbfs, but neither the container (linux.resources.hugepageLimits[2MB]) nor the pod's cgroup on \
         the host (hugetlb.2MB.max) has a limit that says how many huge pages to set aside; request hugepages-2Mi",
    )
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
    use super::*;

    #[test]
    fn a_container_of_a_pod_without_a_limit_of_its_own_has_that_of_the_pod() {
        let volume = |huge_pages| MemoryVolume {
            name: "0-1".into(),
            huge_pages,
            bytes: 6 << 20,
            mode: 0o777,
            uid: 0,
            gid: 0,
            part: "".into(),
        };
        let role = Role::Member { sandbox_id: "pod".into() };
        let mut resources = Resources::default();
        let ask = |resources: &mut Resources, volumes: &[(usize, MemoryVolume)]| {
            let mut document = json!({});
            let asked = super::ask(&mut document, resources, &role, volumes).unwrap();
            assert_eq!(document, json!({}), "it gets no limit of its own");
            asked
        };
        assert_eq!(ask(&mut resources, &[(3, volume(false))]), None);
        assert_eq!(ask(&mut resources, &[(3, volume(false)), (5, volume(true))]), Some(5));
        resources.ask_for_huge_pages(0);
        assert_eq!(ask(&mut resources, &[(5, volume(true))]), None);
        assert!(none_in_pod(5).to_string().starts_with("mounts[5].source: is in a hugetlbfs"));

        let spec = with_pod_limit(br#"{"linux": {"resources": {"cpu": {}}}}"#.into(), 4 << 20).unwrap();
        let spec: Value = serde_json::from_slice(&spec).unwrap();
        let limits = json!([{ "pageSize": "2MB", "limit": 4 << 20 }]);
        assert_eq!(spec, json!({ "linux": { "resources": { "cpu": {}, "hugepageLimits": limits } } }));
    }
}
