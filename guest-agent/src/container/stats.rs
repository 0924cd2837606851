//! What a container uses: the numbers of its cgroup.

use bulkhead_agent_api::agent::{
    CpuStats, HugepagesStats, IoStats, MemoryEvents, MemoryStats, PidsStats, StatsResponse,
};

use super::instance::Container;
use crate::cgroup::{Cgroup, CgroupError, files::Numbers};

impl Container {
    /// As the agent's interface has them.
    pub fn stats(&self) -> Result<StatsResponse, CgroupError> {
        let cgroup = &*self.cgroup;
        let pids = PidsStats {
            current: cgroup.number("pids.current")?,
            max: cgroup.number("pids.max")?,
            ..Default::default()
        };
        Ok(StatsResponse {
            cpu: Some(cpu(&cgroup.numbers("cpu.stat")?)).into(),
            memory: Some(memory(cgroup)?).into(),
            pids: Some(pids).into(),
            io: cgroup.read("io.stat")?.iter().flat_map(|text| text.lines()).filter_map(io).collect(),
            hugepages: hugepages(cgroup)?,
            ..Default::default()
        })
    }
}

fn cpu(stat: &Numbers) -> CpuStats {
    let of = |key| stat.get(key).copied().unwrap_or(0);
    CpuStats {
        usage_usec: of("usage_usec"),
        user_usec: of("user_usec"),
        system_usec: of("system_usec"),
        nr_periods: of("nr_periods"),
        nr_throttled: of("nr_throttled"),
        throttled_usec: of("throttled_usec"),
        nr_bursts: of("nr_bursts"),
        burst_usec: of("burst_usec"),
        ..Default::default()
    }
}

fn memory(cgroup: &Cgroup) -> Result<MemoryStats, CgroupError> {
    let events = cgroup.numbers("memory.events")?;
    let of = |key| events.get(key).copied().unwrap_or(0);
    let events = MemoryEvents {
        low: of("low"),
        high: of("high"),
        max: of("max"),
        oom: of("oom"),
        oom_kill: of("oom_kill"),
        oom_group_kill: of("oom_group_kill"),
        ..Default::default()
    };
    Ok(MemoryStats {
        current: cgroup.number("memory.current")?,
        max: cgroup.number("memory.max")?,
        peak: cgroup.number("memory.peak")?,
        swap_current: cgroup.number("memory.swap.current")?,
        swap_max: cgroup.number("memory.swap.max")?,
        swap_peak: cgroup.number("memory.swap.peak")?,
        events: Some(events).into(),
        stat: cgroup.numbers("memory.stat")?,
        ..Default::default()
    })
}

/// `8:0 rbytes=1 wbytes=2 rios=3 wios=4 dbytes=5 dios=6`
fn io(line: &str) -> Option<IoStats> {
    let mut words = line.split(' ');
    let (major, minor) = words.next()?.split_once(':')?;
    let numbers: Numbers = words
        .filter_map(|word| word.split_once('='))
        .filter_map(|(key, value)| Some((key.to_owned(), value.parse().ok()?)))
        .collect();
    let of = |key| numbers.get(key).copied().unwrap_or(0);
    Some(IoStats {
        major: major.parse().ok()?,
        minor: minor.parse().ok()?,
        read_bytes: of("rbytes"),
        write_bytes: of("wbytes"),
        reads: of("rios"),
        writes: of("wios"),
        ..Default::default()
    })
}

/// Of each size that the kernel has: `hugetlb.<size>.current` and its neighbours.
fn hugepages(cgroup: &Cgroup) -> Result<Vec<HugepagesStats>, CgroupError> {
    let mut all = Vec::new();
    for size in cgroup.hugepage_sizes()? {
        let failures = cgroup.numbers(&format!("hugetlb.{size}.events"))?;
        all.push(HugepagesStats {
            current: cgroup.number(&format!("hugetlb.{size}.current"))?,
            max: cgroup.number(&format!("hugetlb.{size}.max"))?,
            failures: failures.get("max").copied().unwrap_or(0),
            page_size: size,
            ..Default::default()
        });
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_io_stat_is_read() {
        let stats = io("8:16 rbytes=1 wbytes=2 rios=3 wios=4 dbytes=5 dios=6").unwrap();
        assert_eq!((stats.major, stats.minor), (8, 16));
        assert_eq!((stats.read_bytes, stats.write_bytes, stats.reads, stats.writes), (1, 2, 3, 4));
        assert_eq!(io("(unknown) rbytes=1"), None);
    }
}
