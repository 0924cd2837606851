//! The numbers of a whole pod: those of its containers, added up.

use bulkhead_agent_api::agent;

use super::{hugepages, io};

/// As many of memory.stat's numbers as a guest may fill; the kernel has about 70.
const MOST_NUMBERS: usize = 256;

/// Adds up the numbers. The pod has a limit if each of its containers has one. The peaks stay 0, because the
/// containers' peaks need not have been at the same time.
pub(crate) fn sum(containers: &[agent::StatsResponse]) -> agent::StatsResponse {
    let mut all = agent::StatsResponse::new();
    for stats in containers {
        add_cpu(all.cpu.mut_or_insert_default(), &stats.cpu);
        add_memory(all.memory.mut_or_insert_default(), &stats.memory);
        let pids = all.pids.mut_or_insert_default();
        add(&mut pids.current, stats.pids.current);
        add(&mut pids.max, stats.pids.max);
        io(stats).for_each(|device| add_io(&mut all.io, device));
        hugepages(stats).for_each(|pages| add_hugepages(&mut all.hugepages, pages));
    }
    all
}

/// "max" is the largest number, and stays it.
fn add(sum: &mut u64, value: u64) {
    *sum = sum.saturating_add(value);
}

fn add_cpu(sum: &mut agent::CpuStats, cpu: &agent::CpuStats) {
    add(&mut sum.usage_usec, cpu.usage_usec);
    add(&mut sum.user_usec, cpu.user_usec);
    add(&mut sum.system_usec, cpu.system_usec);
    add(&mut sum.nr_periods, cpu.nr_periods);
    add(&mut sum.nr_throttled, cpu.nr_throttled);
    add(&mut sum.throttled_usec, cpu.throttled_usec);
    add(&mut sum.nr_bursts, cpu.nr_bursts);
    add(&mut sum.burst_usec, cpu.burst_usec);
}

fn add_memory(sum: &mut agent::MemoryStats, memory: &agent::MemoryStats) {
    add(&mut sum.current, memory.current);
    add(&mut sum.max, memory.max);
    add(&mut sum.swap_current, memory.swap_current);
    add(&mut sum.swap_max, memory.swap_max);
    let events = sum.events.mut_or_insert_default();
    add(&mut events.low, memory.events.low);
    add(&mut events.high, memory.events.high);
    add(&mut events.max, memory.events.max);
    add(&mut events.oom, memory.events.oom);
    add(&mut events.oom_kill, memory.events.oom_kill);
    add(&mut events.oom_group_kill, memory.events.oom_group_kill);
    for (key, value) in memory.stat.iter().take(MOST_NUMBERS) {
        add(sum.stat.entry(key.clone()).or_default(), *value);
    }
}

fn add_io(sum: &mut Vec<agent::IoStats>, device: &agent::IoStats) {
    let is_same = |other: &&mut agent::IoStats| (other.major, other.minor) == (device.major, device.minor);
    match sum.iter_mut().find(is_same) {
        Some(sum) => {
            add(&mut sum.read_bytes, device.read_bytes);
            add(&mut sum.write_bytes, device.write_bytes);
            add(&mut sum.reads, device.reads);
            add(&mut sum.writes, device.writes);
        }
        None => sum.push(device.clone()),
    }
}

fn add_hugepages(sum: &mut Vec<agent::HugepagesStats>, pages: &agent::HugepagesStats) {
    match sum.iter_mut().find(|other| other.page_size == pages.page_size) {
        Some(sum) => {
            add(&mut sum.current, pages.current);
            add(&mut sum.max, pages.max);
            add(&mut sum.failures, pages.failures);
        }
        None => sum.push(pages.clone()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn container(usage: u64, limit: u64) -> agent::StatsResponse {
        let mut stats = agent::StatsResponse::new();
        stats.cpu.mut_or_insert_default().usage_usec = usage;
        let memory = stats.memory.mut_or_insert_default();
        (memory.current, memory.max, memory.peak) = (usage, limit, usage);
        memory.stat = [("inactive_file".to_owned(), usage)].into();
        memory.events.mut_or_insert_default().oom_kill = 1;
        stats.pids.mut_or_insert_default().current = 2;
        let disk = |major| agent::IoStats { major, read_bytes: usage, ..Default::default() };
        stats.io = vec![disk(8), disk(usage)];
        let page_size = "2MB".to_owned();
        stats.hugepages = vec![agent::HugepagesStats { page_size, current: usage, ..Default::default() }];
        stats
    }

    #[test]
    fn a_pod_uses_what_its_containers_use() {
        let all = sum(&[container(30, 100), container(40, 200)]);
        assert_eq!((all.cpu.usage_usec, all.memory.current, all.pids.current), (70, 70, 4));
        assert_eq!((all.memory.max, all.memory.peak), (300, 0));
        assert_eq!((all.memory.stat["inactive_file"], all.memory.events.oom_kill), (70, 2));
        let devices: Vec<_> = all.io.iter().map(|device| (device.major, device.read_bytes)).collect();
        assert_eq!(devices, [(8, 70), (30, 30), (40, 40)]);
        assert_eq!((all.hugepages.len(), all.hugepages[0].current), (1, 70));
    }

    #[test]
    fn one_container_without_a_limit_is_a_pod_without_one() {
        assert_eq!(sum(&[container(1, 100), container(1, u64::MAX)]).memory.max, u64::MAX);
    }

    #[test]
    fn a_guest_cannot_fill_the_sum() {
        let mut liar = container(1, 1);
        liar.memory.mut_or_insert_default().stat = (0..10_000).map(|key| (key.to_string(), 1)).collect();
        liar.io = (0..10_000).map(|major| agent::IoStats { major, ..Default::default() }).collect();
        let all = sum(&[liar]);
        assert_eq!((all.memory.stat.len(), all.io.len()), (MOST_NUMBERS, super::super::MOST));
    }
}
