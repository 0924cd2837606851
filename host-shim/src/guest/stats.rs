//! Statistics: the numbers of a container's cgroup in the guest, in the form that containerd's clients expect on this
//! host.
//!
//! Clients assume that a container has the cgroup version of its host. So a host with cgroup v2 gets
//! `io.containerd.cgroups.v2.Metrics`, and any other host `io.containerd.cgroups.v1.Metrics`.

mod sum;
mod v1;
mod v2;

use std::collections::HashMap;

use bulkhead_agent_api::agent;
use nix::sys::statfs::{CGROUP2_SUPER_MAGIC, statfs};
use protobuf::{Message, well_known_types::any::Any};

pub(crate) use self::sum::sum;

/// The most devices or page sizes that are taken from a guest.
const MOST: usize = 64;

/// Where the hierarchy, or those of v1, are mounted.
const CGROUPS: &str = "/sys/fs/cgroup";

/// The answer to containerd.
pub(crate) fn metrics(stats: &agent::StatsResponse) -> Result<Any, protobuf::Error> {
    encode(stats, statfs(CGROUPS).is_ok_and(|found| found.filesystem_type() == CGROUP2_SUPER_MAGIC))
}

/// The same for a host whose hierarchy is unified, or not.
pub(crate) fn encode(stats: &agent::StatsResponse, is_unified: bool) -> Result<Any, protobuf::Error> {
    if is_unified {
        pack("io.containerd.cgroups.v2.Metrics", &v2::metrics(stats))
    } else {
        pack("io.containerd.cgroups.v1.Metrics", &v1::metrics(stats))
    }
}

fn pack(type_url: &str, message: &impl Message) -> Result<Any, protobuf::Error> {
    let mut any = Any::new();
    any.type_url = type_url.into();
    any.value = message.write_to_bytes()?;
    Ok(any)
}

/// memory.stat by the kernel's names; what a kernel does not have is 0.
struct MemoryNumbers<'a>(&'a HashMap<String, u64>);

impl MemoryNumbers<'_> {
    fn get(&self, key: &str) -> u64 {
        self.0.get(key).copied().unwrap_or(0)
    }
}

/// The devices in the guest's answer.
fn io(stats: &agent::StatsResponse) -> impl Iterator<Item = &agent::IoStats> {
    stats.io.iter().take(MOST)
}

/// The page sizes in the guest's answer, in the kernel's form: `2MB`.
fn hugepages(stats: &agent::StatsResponse) -> impl Iterator<Item = &agent::HugepagesStats> {
    let is_size = |name: &str| name.len() <= 8 && name.bytes().all(|byte| byte.is_ascii_alphanumeric());
    stats.hugepages.iter().filter(move |pages| is_size(&pages.page_size)).take(MOST)
}

#[cfg(test)]
mod tests {
    use containerd_shim_protos::{cgroups, cgroups_v2};
    use protobuf::{
        MessageDyn, MessageFull,
        reflect::{ReflectFieldRef, ReflectValueRef},
    };

    use super::*;

    fn stats() -> agent::StatsResponse {
        let mut stats = agent::StatsResponse::new();
        let cpu = stats.cpu.mut_or_insert_default();
        (cpu.usage_usec, cpu.user_usec, cpu.system_usec) = (30, 20, 10);
        (cpu.nr_periods, cpu.nr_throttled, cpu.throttled_usec) = (5, 4, 3);
        let memory = stats.memory.mut_or_insert_default();
        (memory.current, memory.max, memory.peak) = (1000, u64::MAX, 1200);
        (memory.swap_current, memory.swap_max) = (100, 500);
        memory.stat = [("anon", 400), ("file", 300), ("inactive_file", 200), ("workingset_refault_file", 2)]
            .map(|(key, value)| (key.to_owned(), value))
            .into();
        let events = memory.events.mut_or_insert_default();
        (events.max, events.oom, events.oom_kill) = (9, 8, 7);
        let pids = stats.pids.mut_or_insert_default();
        (pids.current, pids.max) = (3, 10);
        let io = agent::IoStats { major: 8, read_bytes: 4096, writes: 2, ..Default::default() };
        stats.io = vec![io; MOST + 1];
        let pages =
            |size: &str| agent::HugepagesStats { page_size: size.into(), max: 2, ..Default::default() };
        stats.hugepages = vec![pages("2MB"), pages(&"x".repeat(1 << 20)), pages("../1GB")];
        stats
    }

    #[test]
    fn a_unified_host_sees_the_kernels_numbers() {
        let bytes = v2::metrics(&stats()).write_to_bytes().unwrap();
        let metrics = cgroups_v2::metrics::Metrics::parse_from_bytes(&bytes).unwrap();
        assert_eq!((metrics.cpu.usage_usec, metrics.cpu.nr_throttled), (30, 4));
        assert_eq!((metrics.memory.usage, metrics.memory.usage_limit), (1000, u64::MAX));
        assert_eq!((metrics.memory.anon, metrics.memory.inactive_file), (400, 200));
        assert_eq!((metrics.memory.max_usage, metrics.memory.workingset_refault), (1200, 2));
        assert_eq!((metrics.memory_events.oom, metrics.memory_events.oom_kill), (8, 7));
        assert_eq!((metrics.pids.current, metrics.pids.limit), (3, 10));
        assert_eq!(metrics.io.usage[0].rbytes, 4096);
    }

    /// What runc's shim has no value for, or what the guest's agent does not tell yet.
    const LEFT_OUT: [&str; 4] = ["cpu.psi", "memory.psi", "io.psi", "network"];

    #[test]
    fn each_field_that_runcs_shim_fills_has_a_value() {
        let mut stats = stats();
        let cpu = stats.cpu.mut_or_insert_default();
        (cpu.nr_bursts, cpu.burst_usec) = (2, 1);
        let memory = stats.memory.mut_or_insert_default();
        memory.swap_peak = 400;
        let events = memory.events.mut_or_insert_default();
        (events.low, events.high, events.oom_group_kill) = (1, 2, 3);
        // Each number of memory.stat that the message has, by the kernel's name.
        let message = cgroups_v2::metrics::MemoryStat::descriptor();
        let of_message = message.fields().map(|field| field.name().to_owned());
        memory.stat = of_message.map(|name| (name, 7)).collect();
        for name in ["workingset_refault_anon", "workingset_activate_file"] {
            memory.stat.insert(name.into(), 7);
        }
        let io = &mut stats.io[0];
        (io.minor, io.write_bytes, io.reads) = (1, 512, 3);
        (stats.hugepages[0].current, stats.hugepages[0].failures) = (1, 1);
        let metrics = v2::metrics(&stats);
        let mut empty = Vec::new();
        empty_fields(&metrics, "", &mut empty);
        assert_eq!(empty, LEFT_OUT);
        empty_fields(&cgroups_v2::metrics::PidsStat::new(), "", &mut empty);
        assert_eq!(empty[LEFT_OUT.len()..], ["current", "limit"]);
    }

    /// The paths of fields without a value.
    fn empty_fields(message: &dyn MessageDyn, path: &str, empty: &mut Vec<String>) {
        for field in message.descriptor_dyn().fields() {
            let path = format!("{path}{}", field.name());
            // The lists of rdma are empty with runc too.
            let is_rdma = path == "rdma";
            match field.get_reflect(message) {
                ReflectFieldRef::Optional(found) => match found.value() {
                    None => empty.push(path),
                    Some(ReflectValueRef::Message(_)) if is_rdma => {}
                    Some(ReflectValueRef::Message(found)) => {
                        empty_fields(&*found, &format!("{path}."), empty)
                    }
                    // A number that is 0 has no value (proto3).
                    Some(_) => {}
                },
                ReflectFieldRef::Repeated(list) if list.is_empty() => empty.push(path),
                ReflectFieldRef::Repeated(list) => {
                    if let ReflectValueRef::Message(found) = list.get(0) {
                        empty_fields(&*found, &format!("{path}."), empty);
                    }
                }
                ReflectFieldRef::Map(_) => {}
            }
        }
    }

    #[test]
    fn a_host_of_v1_sees_its_own_units() {
        let bytes = v1::metrics(&stats()).write_to_bytes().unwrap();
        let metrics = cgroups::metrics::Metrics::parse_from_bytes(&bytes).unwrap();
        assert_eq!((metrics.cpu.usage.total, metrics.cpu.usage.kernel), (30_000, 10_000));
        assert_eq!(metrics.cpu.throttling.throttled_time, 3000);
        assert_eq!((metrics.memory.usage.usage, metrics.memory.usage.failcnt), (1000, 9));
        // Memory and swap together.
        assert_eq!((metrics.memory.swap.usage, metrics.memory.swap.limit), (1100, u64::MAX));
        assert_eq!((metrics.memory.rss, metrics.memory.total_inactive_file), (400, 200));
        assert_eq!(metrics.memory_oom_control.oom_kill, 7);
        let read = &metrics.blkio.io_service_bytes_recursive[0];
        assert_eq!((read.op.as_str(), read.major, read.value), ("Read", 8, 4096));
    }

    #[test]
    fn a_guest_cannot_fill_the_answer() {
        let (one, two) = (v1::metrics(&stats()), v2::metrics(&stats()));
        assert_eq!((two.io.usage.len(), one.blkio.io_serviced_recursive.len()), (MOST, 2 * MOST));
        assert_eq!((one.hugetlb.len(), two.hugetlb.len()), (1, 1));
    }
}
