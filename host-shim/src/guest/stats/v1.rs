//! `io.containerd.cgroups.v1.Metrics`: the guest's cgroup v2 numbers under the names and in the units of v1.

use bulkhead_agent_api::agent;
use containerd_shim_protos::cgroups::metrics::{
    BlkIOEntry, BlkIOStat, CPUStat, CPUUsage, HugetlbStat, MemoryEntry, MemoryOomControl, MemoryStat,
    Metrics, PidsStat, Throttle,
};

use super::MemoryNumbers;

/// v1 counts nanoseconds.
const NANOS: u64 = 1000;

pub(super) fn metrics(stats: &agent::StatsResponse) -> Metrics {
    let mut metrics = Metrics::new();
    let pids = metrics.pids.mut_or_insert_default();
    *pids = PidsStat { current: stats.pids.current, limit: stats.pids.max, ..Default::default() };
    *metrics.cpu.mut_or_insert_default() = cpu(&stats.cpu);
    *metrics.memory.mut_or_insert_default() = memory(&stats.memory);
    *metrics.memory_oom_control.mut_or_insert_default() =
        MemoryOomControl { oom_kill: stats.memory.events.oom_kill, ..Default::default() };
    *metrics.blkio.mut_or_insert_default() = block_io(stats);
    metrics.hugetlb = super::hugepages(stats).map(hugepages).collect();
    metrics
}

fn cpu(cpu: &agent::CpuStats) -> CPUStat {
    let mut stat = CPUStat::new();
    *stat.usage.mut_or_insert_default() = CPUUsage {
        total: cpu.usage_usec.saturating_mul(NANOS),
        kernel: cpu.system_usec.saturating_mul(NANOS),
        user: cpu.user_usec.saturating_mul(NANOS),
        ..Default::default()
    };
    *stat.throttling.mut_or_insert_default() = Throttle {
        periods: cpu.nr_periods,
        throttled_periods: cpu.nr_throttled,
        throttled_time: cpu.throttled_usec.saturating_mul(NANOS),
        ..Default::default()
    };
    stat
}

fn memory(memory: &agent::MemoryStats) -> MemoryStat {
    let stat = MemoryNumbers(&memory.stat);
    // v2's numbers count what is below, too: each is its own total.
    let mut all = MemoryStat {
        cache: stat.get("file"),
        total_cache: stat.get("file"),
        rss: stat.get("anon"),
        total_rss: stat.get("anon"),
        rss_huge: stat.get("anon_thp"),
        total_rss_huge: stat.get("anon_thp"),
        mapped_file: stat.get("file_mapped"),
        total_mapped_file: stat.get("file_mapped"),
        dirty: stat.get("file_dirty"),
        total_dirty: stat.get("file_dirty"),
        writeback: stat.get("file_writeback"),
        total_writeback: stat.get("file_writeback"),
        pg_fault: stat.get("pgfault"),
        total_pg_fault: stat.get("pgfault"),
        pg_maj_fault: stat.get("pgmajfault"),
        total_pg_maj_fault: stat.get("pgmajfault"),
        inactive_anon: stat.get("inactive_anon"),
        total_inactive_anon: stat.get("inactive_anon"),
        active_anon: stat.get("active_anon"),
        total_active_anon: stat.get("active_anon"),
        inactive_file: stat.get("inactive_file"),
        total_inactive_file: stat.get("inactive_file"),
        active_file: stat.get("active_file"),
        total_active_file: stat.get("active_file"),
        unevictable: stat.get("unevictable"),
        total_unevictable: stat.get("unevictable"),
        hierarchical_memory_limit: memory.max,
        hierarchical_swap_limit: memory.max.saturating_add(memory.swap_max),
        ..Default::default()
    };
    *all.usage.mut_or_insert_default() = MemoryEntry {
        limit: memory.max,
        usage: memory.current,
        max: memory.peak,
        failcnt: memory.events.max,
        ..Default::default()
    };
    // Memory and swap together.
    *all.swap.mut_or_insert_default() = MemoryEntry {
        limit: memory.max.saturating_add(memory.swap_max),
        usage: memory.current.saturating_add(memory.swap_current),
        max: memory.peak.saturating_add(memory.swap_peak),
        ..Default::default()
    };
    all.kernel.mut_or_insert_default().usage = stat.get("kernel");
    all.kernel_tcp.mut_or_insert_default().usage = stat.get("sock");
    all
}

fn block_io(stats: &agent::StatsResponse) -> BlkIOStat {
    let mut all = BlkIOStat::new();
    for io in super::io(stats) {
        let entry = |op: &str, value| BlkIOEntry {
            op: op.into(),
            major: io.major,
            minor: io.minor,
            value,
            ..Default::default()
        };
        all.io_service_bytes_recursive.extend([entry("Read", io.read_bytes), entry("Write", io.write_bytes)]);
        all.io_serviced_recursive.extend([entry("Read", io.reads), entry("Write", io.writes)]);
    }
    all
}

fn hugepages(pages: &agent::HugepagesStats) -> HugetlbStat {
    HugetlbStat {
        usage: pages.current,
        max: pages.max,
        failcnt: pages.failures,
        pagesize: pages.page_size.clone(),
        ..Default::default()
    }
}
