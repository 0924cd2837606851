//! `io.containerd.cgroups.v2.Metrics`: field by field what the guest's kernel says.

use bulkhead_agent_api::agent;
use containerd_shim_protos::cgroups_v2::metrics::{
    CPUStat, HugeTlbStat, IOEntry, IOStat, MemoryEvents, MemoryStat, Metrics, PidsStat,
};

use super::MemoryNumbers;

pub(super) fn metrics(stats: &agent::StatsResponse) -> Metrics {
    let mut metrics = Metrics::new();
    let pids = metrics.pids.mut_or_insert_default();
    *pids = PidsStat { current: stats.pids.current, limit: stats.pids.max, ..Default::default() };
    *metrics.cpu.mut_or_insert_default() = cpu(&stats.cpu);
    *metrics.memory.mut_or_insert_default() = memory(&stats.memory);
    *metrics.memory_events.mut_or_insert_default() = events(&stats.memory.events);
    let usage = super::io(stats).map(io).collect();
    *metrics.io.mut_or_insert_default() = IOStat { usage, ..Default::default() };
    metrics.hugetlb = super::hugepages(stats).map(hugepages).collect();
    // The guest has no such device. runc's shim says the same where the host has none.
    metrics.rdma.mut_or_insert_default();
    metrics
}

fn cpu(cpu: &agent::CpuStats) -> CPUStat {
    CPUStat {
        usage_usec: cpu.usage_usec,
        user_usec: cpu.user_usec,
        system_usec: cpu.system_usec,
        nr_periods: cpu.nr_periods,
        nr_throttled: cpu.nr_throttled,
        throttled_usec: cpu.throttled_usec,
        nr_bursts: cpu.nr_bursts,
        burst_usec: cpu.burst_usec,
        ..Default::default()
    }
}

fn memory(memory: &agent::MemoryStats) -> MemoryStat {
    let stat = MemoryNumbers(&memory.stat);
    MemoryStat {
        usage: memory.current,
        usage_limit: memory.max,
        max_usage: memory.peak,
        swap_usage: memory.swap_current,
        swap_limit: memory.swap_max,
        swap_max_usage: memory.swap_peak,
        anon: stat.get("anon"),
        file: stat.get("file"),
        kernel_stack: stat.get("kernel_stack"),
        slab: stat.get("slab"),
        sock: stat.get("sock"),
        shmem: stat.get("shmem"),
        file_mapped: stat.get("file_mapped"),
        file_dirty: stat.get("file_dirty"),
        file_writeback: stat.get("file_writeback"),
        anon_thp: stat.get("anon_thp"),
        inactive_anon: stat.get("inactive_anon"),
        active_anon: stat.get("active_anon"),
        inactive_file: stat.get("inactive_file"),
        active_file: stat.get("active_file"),
        unevictable: stat.get("unevictable"),
        slab_reclaimable: stat.get("slab_reclaimable"),
        slab_unreclaimable: stat.get("slab_unreclaimable"),
        pgfault: stat.get("pgfault"),
        pgmajfault: stat.get("pgmajfault"),
        // Since Linux 5.9 the kernel counts these two for each kind of page.
        workingset_refault: of_both_kinds(&stat, "workingset_refault"),
        workingset_activate: of_both_kinds(&stat, "workingset_activate"),
        workingset_nodereclaim: stat.get("workingset_nodereclaim"),
        pgrefill: stat.get("pgrefill"),
        pgscan: stat.get("pgscan"),
        pgsteal: stat.get("pgsteal"),
        pgactivate: stat.get("pgactivate"),
        pgdeactivate: stat.get("pgdeactivate"),
        pglazyfree: stat.get("pglazyfree"),
        pglazyfreed: stat.get("pglazyfreed"),
        thp_fault_alloc: stat.get("thp_fault_alloc"),
        thp_collapse_alloc: stat.get("thp_collapse_alloc"),
        ..Default::default()
    }
}

fn of_both_kinds(stat: &MemoryNumbers<'_>, key: &str) -> u64 {
    stat.get(&format!("{key}_anon")).saturating_add(stat.get(&format!("{key}_file")))
}

fn events(events: &agent::MemoryEvents) -> MemoryEvents {
    MemoryEvents {
        low: events.low,
        high: events.high,
        max: events.max,
        oom: events.oom,
        oom_kill: events.oom_kill,
        oom_group_kill: events.oom_group_kill,
        ..Default::default()
    }
}

fn io(io: &agent::IoStats) -> IOEntry {
    IOEntry {
        major: io.major,
        minor: io.minor,
        rbytes: io.read_bytes,
        wbytes: io.write_bytes,
        rios: io.reads,
        wios: io.writes,
        ..Default::default()
    }
}

fn hugepages(pages: &agent::HugepagesStats) -> HugeTlbStat {
    HugeTlbStat {
        current: pages.current,
        max: pages.max,
        pagesize: pages.page_size.clone(),
        failcnt: pages.failures,
        ..Default::default()
    }
}
