//! `linux.resources` to cgroup v2 files (runtime-spec, "Control groups"; kernel, admin-guide/cgroup-v2.rst).

use bulkhead_agent_api::{HUGE_PAGE, HUGE_PAGE_SIZE, cpu_weight::weight_of_shares};
use oci_spec::runtime::{
    LinuxBlockIo, LinuxCpu, LinuxHugepageLimit, LinuxMemory, LinuxResources, LinuxThrottleDevice,
};

use super::error::SpecError;
use crate::cgroup::Setting;

/// Files of the cpu controller whose order counts.
const CPU_MAX: &str = "cpu.max";
const CPU_BURST: &str = "cpu.max.burst";

/// Files that have fields of their own, by which the shim chooses the vCPUs and the memory of the VM and limits the
/// pod's cgroup. Their processors are those of the host, of which the guest has other numbers.
const OF_THE_HOST_TOO: [(&str, &str); 8] = [
    ("memory.max", "memory.limit"),
    (CPU_MAX, "cpu.quota and cpu.period"),
    (CPU_BURST, "cpu.burst"),
    ("cpu.weight", "cpu.shares"),
    ("cpu.weight.nice", "cpu.shares"),
    ("cpu.idle", "cpu.idle"),
    ("cpuset.cpus", "cpu.cpus"),
    ("cpuset.mems", "cpu.mems"),
];

/// Files of the memory controller that a kernel without swap lacks. Then the limit holds anyway, as nothing is swapped.
/// kubelet sets the first for each container if its host has it (configureContainerSwapResources).
const SWAP_LIMITS: [&str; 4] =
    ["memory.swap.max", "memory.swap.high", "memory.zswap.max", "memory.zswap.writeback"];

/// Why the io controller limits nothing here: what containers read and write is the VMM's to do, on the host. The shim
/// sets such limits there, if a container has a VM of its own, and does not pass them on.
const NO_BLOCK_LIMITS: &str = "the VM reads and writes for all containers of its pod";

/// The settings in the order in which they are to be made.
#[derive(Default)]
struct Settings(Vec<Setting>);

impl Settings {
    fn add(&mut self, field: &str, file: impl Into<String>, value: impl ToString) {
        let (field, file, value) = (format!("linux.resources.{field}"), file.into(), value.to_string());
        self.0.push(Setting { field, file, value, optional: false });
    }

    fn add_optional(&mut self, field: &str, file: &str, value: impl ToString) {
        self.add(field, file, value);
        if let Some(last) = self.0.last_mut() {
            last.optional = true;
        }
    }
}

/// All but `devices`, which become a program ([`crate::device_filter`]).
pub(super) fn settings(resources: &LinuxResources) -> Result<Vec<Setting>, SpecError> {
    let mut settings = Settings::default();
    if let Some(memory) = resources.memory() {
        add_memory(&mut settings, memory)?;
    }
    if let Some(cpu) = resources.cpu() {
        add_cpu(&mut settings, cpu)?;
    }
    // 0 is how Go writes a limit that was not given.
    match resources.pids().map_or(0, |pids| pids.limit()) {
        0 => {}
        limit => settings.add("pids.limit", "pids.max", limit_or_max(limit)),
    }
    if let Some(block_io) = resources.block_io() {
        refuse_block_io(block_io)?;
    }
    for limit in resources.hugepage_limits().iter().flatten() {
        add_hugepages(&mut settings, limit)?;
    }
    if resources.rdma().as_ref().is_some_and(|devices| !devices.is_empty()) {
        return Err(SpecError::unimplemented("linux.resources.rdma (the guest has no RDMA devices)"));
    }
    if let Some(network) = resources.network()
        && (network.class_id().is_some_and(|id| id != 0)
            || network.priorities().as_ref().is_some_and(|p| !p.is_empty()))
    {
        return Err(SpecError::unimplemented("linux.resources.network (cgroup v1 only)"));
    }
    let mut unified: Vec<_> = resources.unified().iter().flatten().collect();
    unified.sort();
    for (file, value) in unified {
        // runtime-spec: "unified" names files of the cgroup's own directory, `controller.parameter`.
        if file.contains('/') || !file.contains('.') || file.starts_with('.') {
            let field = format!("linux.resources.unified[{file}]");
            return Err(SpecError::invalid(&field, "is not the name of a cgroup file".into()));
        }
        if file.starts_with("io.") {
            let field = format!("linux.resources.unified[{file}] ({NO_BLOCK_LIMITS})");
            return Err(SpecError::unimplemented(field));
        }
        let field = format!("unified[{file}]");
        if let Some((_, typed)) = OF_THE_HOST_TOO.iter().find(|(name, _)| name == file) {
            let why = "the host has this limit too, and reads it there";
            return Err(SpecError::unimplemented(format!("linux.resources.{field} (use {typed}: {why})")));
        }
        match file.strip_prefix("hugetlb.").map(|rest| rest.split_once('.').map_or(rest, |(size, _)| size)) {
            None if SWAP_LIMITS.contains(&file.as_str()) => settings.add_optional(&field, file, value),
            None => settings.add(&field, file, value),
            Some(size) if !matches!(value.as_str(), "0" | "max") => {
                let reason = match size {
                    HUGE_PAGE_SIZE => "hugepageLimits sets the pages aside too".to_owned(),
                    _ => no_pages(size),
                };
                return Err(SpecError::unimplemented(format!("linux.resources.{field} ({reason})")));
            }
            Some(HUGE_PAGE_SIZE) => settings.add(&field, file, value),
            // Nobody can use a size that the guest lacks.
            Some(_) => settings.add_optional(&field, file, value),
        }
    }
    Ok(settings.0)
}

fn limit_or_max(limit: i64) -> String {
    if limit < 0 { "max".into() } else { limit.to_string() }
}

fn add_memory(settings: &mut Settings, memory: &LinuxMemory) -> Result<(), SpecError> {
    let v1_only = [
        ("kernel", memory.kernel().is_some_and(|limit| limit > 0)),
        ("kernelTCP", memory.kernel_tcp().is_some_and(|limit| limit > 0)),
        ("swappiness", memory.swappiness().is_some()),
        ("disableOOMKiller", memory.disable_oom_killer().unwrap_or(false)),
        // cgroup v2 always accounts for what is below a cgroup.
        ("useHierarchy false", memory.use_hierarchy() == Some(false)),
    ];
    if let Some((name, _)) = v1_only.iter().find(|(_, set)| *set) {
        return Err(SpecError::unimplemented(format!("linux.resources.memory.{name} (cgroup v1 only)")));
    }
    // `checkBeforeUpdate` is for updates (the neighbour `update`).
    let limit = memory.limit().unwrap_or(0);
    if let Some(swap) = memory.swap().filter(|swap| *swap != 0) {
        // The spec counts memory and swap together, cgroup v2 swap alone.
        let alone = match (swap, limit) {
            (..0, _) => "max".to_owned(),
            (_, 1..) if swap >= limit => (swap - limit).to_string(),
            _ => {
                let reason =
                    format!("{swap} (memory and swap) needs a memory limit not above it, not {limit}");
                return Err(SpecError::invalid("linux.resources.memory.swap", reason));
            }
        };
        // A kernel without swap has no such file, and nothing to limit.
        settings.add_optional("memory.swap", "memory.swap.max", alone);
    }
    if limit != 0 {
        settings.add("memory.limit", "memory.max", limit_or_max(limit));
    }
    if let Some(reservation) = memory.reservation().filter(|r| *r != 0) {
        settings.add("memory.reservation", "memory.low", limit_or_max(reservation));
    }
    Ok(())
}

fn add_cpu(settings: &mut Settings, cpu: &LinuxCpu) -> Result<(), SpecError> {
    if cpu.realtime_runtime().is_some_and(|n| n != 0) || cpu.realtime_period().is_some_and(|n| n != 0) {
        return Err(SpecError::unimplemented(
            "linux.resources.cpu.realtimeRuntime and realtimePeriod (cgroup v1 only)",
        ));
    }
    if let Some(idle) = cpu.idle() {
        settings.add("cpu.idle", "cpu.idle", idle);
    }
    // The kernel refuses a weight while the cgroup is idle (kernel/sched/fair.c, sched_group_set_shares).
    let is_idle = cpu.idle().unwrap_or(0) != 0;
    if let Some(shares) = cpu.shares().filter(|shares| *shares != 0 && !is_idle) {
        settings.add("cpu.shares", "cpu.weight", weight_of_shares(shares));
    }
    let (quota, period) = (cpu.quota().unwrap_or(0), cpu.period().unwrap_or(0));
    if quota != 0 || period != 0 {
        // The kernel refuses a quota below the burst (kernel/sched/core.c, tg_set_cpu_bandwidth). So there is no burst
        // while the quota changes.
        if cpu.burst().is_some() {
            settings.add("cpu.burst", CPU_BURST, 0);
        }
        let quota = if quota > 0 { quota.to_string() } else { "max".into() };
        let period = if period == 0 { 100_000 } else { period };
        settings.add("cpu.quota", CPU_MAX, format!("{quota} {period}"));
    }
    if let Some(burst) = cpu.burst() {
        settings.add("cpu.burst", CPU_BURST, burst);
    }
    for (field, file, value) in
        [("cpu.cpus", "cpuset.cpus", cpu.cpus()), ("cpu.mems", "cpuset.mems", cpu.mems())]
    {
        if let Some(list) = value.as_ref().filter(|list| !list.is_empty()) {
            settings.add(field, file, list);
        }
    }
    Ok(())
}

fn refuse_block_io(block_io: &LinuxBlockIo) -> Result<(), SpecError> {
    let is_set = |weight: Option<u16>| weight.is_some_and(|weight| weight != 0);
    let fields = [
        ("weight", is_set(block_io.weight())),
        ("leafWeight", is_set(block_io.leaf_weight())),
        ("weightDevice", block_io.weight_device().as_ref().is_some_and(|list| !list.is_empty())),
        ("throttleReadBpsDevice", has_devices(block_io.throttle_read_bps_device())),
        ("throttleWriteBpsDevice", has_devices(block_io.throttle_write_bps_device())),
        ("throttleReadIOPSDevice", has_devices(block_io.throttle_read_iops_device())),
        ("throttleWriteIOPSDevice", has_devices(block_io.throttle_write_iops_device())),
    ];
    match fields.iter().find(|(_, set)| *set) {
        Some((name, _)) => {
            let field = format!("linux.resources.blockIO.{name} ({NO_BLOCK_LIMITS})");
            Err(SpecError::unimplemented(field))
        }
        None => Ok(()),
    }
}

fn has_devices(list: &Option<Vec<LinuxThrottleDevice>>) -> bool {
    list.as_ref().is_some_and(|list| !list.is_empty())
}

fn add_hugepages(settings: &mut Settings, limit: &LinuxHugepageLimit) -> Result<(), SpecError> {
    let size = limit.page_size();
    let is_size = size.ends_with("KB") || size.ends_with("MB") || size.ends_with("GB");
    if !is_size || !size[..size.len() - 2].bytes().all(|b| b.is_ascii_digit()) {
        let reason = format!("page size {size:?} is not of the form 2MB");
        return Err(SpecError::invalid("linux.resources.hugepageLimits", reason));
    }
    let field = format!("hugepageLimits[{size}]");
    let asks_for_pages = limit.limit() > 0;
    if asks_for_pages && size != HUGE_PAGE_SIZE {
        return Err(SpecError::unimplemented(format!("linux.resources.{field} ({})", no_pages(size))));
    }
    // Reservations are limited as well, or a process would be killed at its first touch rather than refused.
    for file in [format!("hugetlb.{size}.max"), format!("hugetlb.{size}.rsvd.max")] {
        let value = limit_or_max(limit.limit());
        match asks_for_pages {
            true => settings.add(&field, file, value),
            // kubelet forbids all sizes of pages that the host has. One that the guest lacks nobody can use.
            false => settings.add_optional(&field, &file, value),
        }
    }
    Ok(())
}

fn no_pages(size: &str) -> String {
    format!("the guest has no pages for hugetlb.{size}, only for hugetlb.{HUGE_PAGE_SIZE}")
}

/// The huge pages that are to be set aside for a container: a limit asks for them, since kubelet sets it to what a
/// container has requested. As in the cgroup, a part of a page does not count, and the last limit does. None: there is
/// no limit.
pub(super) fn huge_pages(resources: &LinuxResources) -> Option<u64> {
    let mut limits = resources.hugepage_limits().iter().flatten();
    let limit = limits.rfind(|limit| limit.page_size() == HUGE_PAGE_SIZE)?;
    Some(u64::try_from(limit.limit()).unwrap_or(0) / HUGE_PAGE)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(json: serde_json::Value) -> Result<Vec<(String, String)>, SpecError> {
        let resources: LinuxResources = serde_json::from_value(json).unwrap();
        Ok(settings(&resources)?.into_iter().map(|s| (s.file, s.value)).collect())
    }

    fn pairs(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect()
    }

    #[test]
    fn limits_become_files() {
        let settings = of(serde_json::json!({
            "memory": {
                "limit": 1000, "swap": 1500, "reservation": 500, "checkBeforeUpdate": true, "useHierarchy": true,
                "kernel": -1,
            },
            "cpu": {"shares": 1024, "quota": 50000, "period": 100000, "cpus": "0-1"},
            "pids": {"limit": 7},
            "blockIO": {"weight": 0, "throttleReadBpsDevice": []},
            "hugepageLimits": [{"pageSize": "2MB", "limit": 0}],
            "unified": {"memory.high": "900"}
        }))
        .unwrap();
        let expected = pairs(&[
            ("memory.swap.max", "500"),
            ("memory.max", "1000"),
            ("memory.low", "500"),
            ("cpu.weight", "100"),
            ("cpu.max", "50000 100000"),
            ("cpuset.cpus", "0-1"),
            ("pids.max", "7"),
            ("hugetlb.2MB.max", "0"),
            ("hugetlb.2MB.rsvd.max", "0"),
            ("memory.high", "900"),
        ]);
        assert_eq!(settings, expected);
    }

    #[test]
    fn unlimited_is_max_and_zero_is_unset() {
        let json = serde_json::json!({
            "memory": {"limit": -1, "swap": -1, "disableOOMKiller": false},
            "cpu": {"shares": 0, "quota": -1, "realtimeRuntime": 0},
            "pids": {"limit": -1}
        });
        let expected = pairs(&[
            ("memory.swap.max", "max"),
            ("memory.max", "max"),
            ("cpu.max", "max 100000"),
            ("pids.max", "max"),
        ]);
        assert_eq!(of(json).unwrap(), expected);
        let nothing =
            serde_json::json!({"memory": {}, "cpu": {"shares": 0}, "pids": {"limit": 0}, "unified": {}});
        assert_eq!(of(nothing).unwrap(), []);
    }

    #[test]
    fn a_weight_is_written_while_the_cgroup_is_not_idle() {
        let of_idle = |idle: i64| of(serde_json::json!({"cpu": {"shares": 1024, "idle": idle}})).unwrap();
        assert_eq!(of_idle(1), pairs(&[("cpu.idle", "1")]));
        assert_eq!(of_idle(0), pairs(&[("cpu.idle", "0"), ("cpu.weight", "100")]));
    }

    #[test]
    fn there_is_no_burst_while_the_quota_changes() {
        let of_cpu = |cpu: serde_json::Value| of(serde_json::json!({"cpu": cpu})).unwrap();
        assert_eq!(
            of_cpu(serde_json::json!({"quota": 200_000, "burst": 100_000})),
            pairs(&[(CPU_BURST, "0"), (CPU_MAX, "200000 100000"), (CPU_BURST, "100000")])
        );
        assert_eq!(of_cpu(serde_json::json!({"burst": 100_000})), pairs(&[(CPU_BURST, "100000")]));
    }

    #[test]
    fn a_size_of_pages_that_the_guest_may_lack_is_only_forbidden() {
        let of = |limit: i64| {
            let json = serde_json::json!({"hugepageLimits": [{"pageSize": "1GB", "limit": limit}]});
            settings(&serde_json::from_value(json).unwrap())
        };
        assert!(of(0).unwrap().iter().all(|setting| setting.optional));
        assert_eq!(of(0).unwrap().len(), 2);
        let error = of(1 << 30).unwrap_err();
        assert!(
            matches!(&error, SpecError::Unimplemented { field, .. } if field.contains("hugetlb.1GB")),
            "{error}"
        );
        let unified = |file: &str, value: &str| {
            settings(&serde_json::from_value(serde_json::json!({"unified": {file: value}})).unwrap())
        };
        assert!(unified("hugetlb.1GB.max", "0").unwrap()[0].optional);
        assert!(!unified("hugetlb.2MB.max", "0").unwrap()[0].optional);
        for file in ["hugetlb.1GB.max", "hugetlb.1GB.rsvd.max"] {
            let error = unified(file, "1073741824").unwrap_err().to_string();
            let expected = format!("linux.resources.unified[{file}] (the guest has no pages for hugetlb.1GB");
            assert!(error.starts_with(&expected), "{error}");
        }
        let error = unified("hugetlb.2MB.max", "2097152").unwrap_err().to_string();
        assert!(error.contains("hugepageLimits sets the pages aside too"), "{error}");
    }

    #[test]
    fn a_file_whose_limit_the_host_has_too_is_refused_with_the_field_to_use() {
        for (file, field) in OF_THE_HOST_TOO {
            let error = of(serde_json::json!({"unified": {file: "1"}})).unwrap_err().to_string();
            let expected = format!("linux.resources.unified[{file}] (use {field}: ");
            assert!(error.starts_with(&expected) && error.contains("not implemented"), "{error}");
        }
    }

    #[test]
    fn a_limit_of_swap_holds_where_there_is_no_swap() {
        // As kubelet writes it, with the feature gate MemoryQoS.
        let kubelet = serde_json::json!({"unified": {
            "memory.swap.max": "0", "memory.oom.group": "1", "memory.min": "1048576", "memory.high": "4194304",
        }});
        let settings = settings(&serde_json::from_value(kubelet).unwrap()).unwrap();
        let optional: Vec<_> = settings.iter().filter(|it| it.optional).map(|it| it.file.as_str()).collect();
        assert_eq!((settings.len(), optional), (4, vec!["memory.swap.max"]));
    }

    #[test]
    fn a_limit_of_huge_pages_asks_for_them() {
        let of = |limits: serde_json::Value| {
            let resources = serde_json::from_value(serde_json::json!({ "hugepageLimits": limits })).unwrap();
            (huge_pages(&resources), settings(&resources).unwrap())
        };
        let (pages, files) = of(serde_json::json!([{"pageSize": "2MB", "limit": (9 << 20) + 1}]));
        assert_eq!((pages, files.len()), (Some(4), 2));
        assert!(files.iter().all(|setting| setting.value == "9437185" && !setting.optional));
        let last =
            serde_json::json!([{"pageSize": "2MB", "limit": 4 << 20}, {"pageSize": "2MB", "limit": 0}]);
        assert_eq!(of(last).0, Some(0));
        assert_eq!(of(serde_json::json!([{"pageSize": "2MB", "limit": -1}])).0, Some(0));
        assert_eq!(of(serde_json::json!([{"pageSize": "1GB", "limit": 0}])).0, None);
    }

    #[test]
    fn what_cgroup_v2_lacks_is_refused() {
        for json in [
            serde_json::json!({"memory": {"swappiness": 10}}),
            serde_json::json!({"memory": {"disableOOMKiller": true}}),
            serde_json::json!({"memory": {"kernel": 1_000_000}}),
            serde_json::json!({"memory": {"kernelTCP": 1_000_000}}),
            serde_json::json!({"memory": {"useHierarchy": false}}),
            serde_json::json!({"memory": {"swap": 1000}}),
            serde_json::json!({"memory": {"limit": 1001, "swap": 1000}}),
            serde_json::json!({"cpu": {"realtimePeriod": 1}}),
            serde_json::json!({"cpu": {"realtimeRuntime": 1}}),
            serde_json::json!({"network": {"classID": 1}}),
            serde_json::json!({"network": {"priorities": [{"name": "eth0", "priority": 1}]}}),
            serde_json::json!({"rdma": {"mlx5_1": {"hcaHandles": 3}}}),
            serde_json::json!({"unified": {"../memory.max": "1"}}),
            serde_json::json!({"unified": {"io.weight": "default 50"}}),
            serde_json::json!({"hugepageLimits": [{"pageSize": "../x.2MB", "limit": 0}]}),
            serde_json::json!({"blockIO": {"leafWeight": 10}}),
            serde_json::json!({"blockIO": {"weight": 505}}),
            serde_json::json!({"blockIO": {"weightDevice": [{"major": 8, "minor": 0, "weight": 10}]}}),
            serde_json::json!({"blockIO": {"throttleWriteIOPSDevice": [{"major": 8, "minor": 0, "rate": 9}]}}),
        ] {
            assert!(of(json.clone()).is_err(), "{json}");
        }
    }
}
