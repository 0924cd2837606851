//! The size of a VM's memory. It follows from the limits of its containers, and from what containers without a limit
//! use. It is between two configured sizes; without the second it may be as large as the host's memory. A cgroup of the
//! host that allows less makes it smaller.

use bulkhead_agent_api::PROGRAMS;
use bulkhead_vmm_api::BLOCK_MIB;

use crate::{
    host::{cgroup_limits::PAGE_TABLES, memory},
    types::config::Config,
};

/// Memory that the guest's kernel and agent need beside what the containers may use, MiB.
const GUEST_MIB: u64 = 64;
/// Memory for the pages of programs, MiB. A pod with more of them reads some again when its containers use all that
/// they may.
const PROGRAMS_MIB: u64 = PROGRAMS / MIB;
/// The part of it that containers cannot use in a guest that has no more than it needs, MiB.
const LEAST_GUEST_MIB: u64 = 48;
/// Memory of the host that a VM takes beside the guest's own and the page tables for it, MiB: the VMM with its
/// buffers and stacks, the tables of its file server, and what the host's kernel keeps for it.
const VMM_MIB: u64 = 40;
/// Memory of a clone that is charged to nobody, MiB: pages of the template to which the guest's kernel does not write.
const TEMPLATE_MIB: u64 = 24;
/// The smallest VM in which a container can run. A cgroup that allows less does not make it smaller.
const SMALLEST_MIB: u32 = 96;
/// The guest's kernel uses this fraction of the memory to describe it: 64 bytes for each page of 4096.
const DESCRIBED: u64 = 64;
/// What a clone begins with that may have containers without a limit: this much, or this part of what the VM may grow
/// to if that is less. Programs derive sizes of heaps and buffers from it.
const UNLIMITED_MIB: u32 = 2048;
const UNLIMITED_PART: u64 = 4;
/// A VM that grows on demand has twice as much memory then, but no more than this is added at once, MiB.
const MOST_AT_ONCE_MIB: u32 = 4096;
/// The largest VM: a TiB, which is the VMM's limit.
const MOST_MIB: u64 = 1 << 20;

const MIB: u64 = 1 << 20;

/// How the memory of a VM is charged to its pod's cgroup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Charged {
    /// All of it: the VM booted.
    Whole,
    /// Without the pages of its template that it only reads.
    Clone,
}

impl Charged {
    /// The largest VM that `allowed` bytes of the host hold, with its VMM and page tables. MiB.
    fn largest(self, allowed: u64) -> u32 {
        let beside = match self {
            Self::Whole => VMM_MIB,
            Self::Clone => VMM_MIB - TEMPLATE_MIB,
        };
        let rest = (allowed / MIB).saturating_sub(beside);
        u32::try_from(rest - rest / (PAGE_TABLES + 1)).unwrap_or(u32::MAX)
    }

    /// What containers can use together in a VM that a cgroup with `allowed` bytes holds, bytes.
    pub(crate) fn usable(self, allowed: u64) -> u64 {
        let rest = u64::from(self.largest(allowed)).saturating_sub(LEAST_GUEST_MIB);
        (rest - rest / (DESCRIBED + 1)) * MIB
    }
}

/// What the containers of a VM may use together, bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Needs {
    /// The memory limits.
    pub(crate) limits: u64,
    /// Huge pages, which do not count for these limits.
    pub(crate) huge_pages: u64,
}

impl Needs {
    /// What a VM has more for huge pages, MiB. It grows in blocks.
    pub(crate) fn huge_pages_mib(self) -> u32 {
        let pages = self.huge_pages.div_ceil(MIB);
        let blocks = pages.saturating_add(pages / DESCRIBED).div_ceil(BLOCK_MIB.into());
        u32::try_from(blocks.saturating_mul(BLOCK_MIB.into())).unwrap_or(u32::MAX)
    }
}

/// MiB that a VM has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Present {
    pub(crate) mib: u32,
    /// The part of it that was added for huge pages.
    pub(crate) huge_pages_mib: u32,
}

/// MiB that a VM can have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MemoryRange {
    /// What it begins with.
    pub(crate) least: u32,
    /// What it can grow to.
    pub(crate) most: u32,
}

impl MemoryRange {
    /// Of this host and a VM with this configuration, in a cgroup that allows `allowed` bytes.
    pub(crate) fn of_vm(config: &Config, is_limited: bool, allowed: Option<u64>) -> Self {
        Self::on_host(memory::total() / MIB, config, is_limited, allowed)
    }

    fn on_host(host: u64, config: &Config, is_limited: bool, allowed: Option<u64>) -> Self {
        let host = config.max_memory_mib.map_or(host, |most| host.min(most.into()));
        let part = u32::try_from(host / UNLIMITED_PART).unwrap_or(u32::MAX).min(UNLIMITED_MIB);
        let unlimited = config.unlimited_memory_mib.unwrap_or(part / BLOCK_MIB * BLOCK_MIB);
        let has_room = allowed.is_none_or(|allowed| Charged::Clone.largest(allowed) >= unlimited);
        let is_large = !is_limited && has_room && config.has_templates() && u64::from(unlimited) <= host;
        Self::new(if is_large { unlimited.max(config.memory_mib) } else { config.memory_mib }, host)
    }

    fn new(least: u32, host: u64) -> Self {
        let growth =
            host.min(MOST_MIB).saturating_sub(least.into()) / u64::from(BLOCK_MIB) * u64::from(BLOCK_MIB);
        let most = u64::from(least).saturating_add(growth);
        Self { least, most: u32::try_from(most).unwrap_or(least) }
    }

    /// The size of a VM whose containers may use `limits` bytes together. It grows in blocks.
    pub(crate) fn for_limits(self, limits: u64) -> u32 {
        let used = limits.div_ceil(MIB);
        let wanted = used.saturating_add(used / DESCRIBED).saturating_add(GUEST_MIB + PROGRAMS_MIB);
        let grown = wanted.saturating_sub(self.least.into()).div_ceil(BLOCK_MIB.into());
        let size = grown.saturating_mul(BLOCK_MIB.into()).saturating_add(self.least.into());
        u32::try_from(size).unwrap_or(u32::MAX).clamp(self.least, self.most)
    }

    /// The size of a VM whose containers may use this together.
    pub(crate) fn for_needs(self, needs: Needs) -> u32 {
        self.with_huge_pages(self.for_limits(needs.limits), needs.huge_pages_mib())
    }

    fn with_huge_pages(self, size: u32, huge_pages_mib: u32) -> u32 {
        size.saturating_add(huge_pages_mib).min(self.most)
    }

    /// Whether a VM can have these huge pages at all.
    pub(crate) fn holds_huge_pages(self, needs: Needs) -> bool {
        let beside = u64::from(SMALLEST_MIB.min(self.least));
        needs.huge_pages == 0 || needs.huge_pages.div_ceil(MIB).saturating_add(beside) <= u64::from(self.most)
    }

    /// The size to which a VM is changed that has `present`, and whose containers may use `limits` bytes together, in a
    /// cgroup that allows `allowed` bytes. A VM becomes smaller only if its cgroup allows less. Then the guest reaches
    /// the end of its memory, and kills one of its processes, before the host would kill the VMM. `huge_pages_mib` are
    /// added for huge pages.
    pub(crate) fn fit(
        self,
        present: Present,
        limits: u64,
        huge_pages_mib: u32,
        allowed: Option<u64>,
        charged: Charged,
    ) -> u32 {
        let without = present.mib.saturating_sub(present.huge_pages_mib);
        let size = self.with_huge_pages(self.for_limits(limits).max(without), huge_pages_mib);
        let smallest = SMALLEST_MIB.min(self.least);
        allowed.map_or(size, |allowed| size.min(charged.largest(allowed)).max(smallest))
    }

    /// The size to which a VM of `present` MiB grows whose containers need more. The host has memory for `available`
    /// bytes of it, and the VM's cgroup allows `allowed` bytes. The result is `present` if there is no room for a
    /// block.
    pub(crate) fn on_demand(
        self,
        present: u32,
        available: u64,
        allowed: Option<u64>,
        charged: Charged,
    ) -> u32 {
        let available = u32::try_from(available / MIB).unwrap_or(u32::MAX);
        let allowed = allowed.map_or(u32::MAX, |allowed| charged.largest(allowed));
        let most = self.most.min(allowed).min(available);
        let wanted = present.saturating_add(present.min(MOST_AT_ONCE_MIB)).min(most);
        let blocks = wanted.saturating_sub(self.least) / BLOCK_MIB;
        let size = self.least.saturating_add(blocks * BLOCK_MIB);
        // A VM that was made smaller than it began has no room.
        if size <= most { present.max(size) } else { present }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_is_as_large_as_its_limits_ask_for_and_the_host_allows() {
        let range = MemoryRange::new(256, 8000);
        assert_eq!((range.least, range.most), (256, 256 + 60 * BLOCK_MIB));
        assert_eq!(range.for_limits(0), 256);
        assert_eq!(range.for_limits(128 * MIB), 256);
        assert_eq!(range.for_limits(1024 * MIB), 256 + 7 * BLOCK_MIB, "1024 + 16 + 64 + 32, in blocks");
        assert_eq!(range.for_limits(u64::MAX), range.most);
    }

    #[test]
    fn a_clone_begins_with_more_if_its_containers_may_have_no_limit() {
        let config = Config::default();
        let begins = |host, config: &Config, is_limited, allowed_mib: Option<u64>| {
            MemoryRange::on_host(host, config, is_limited, allowed_mib.map(|mib| mib * MIB)).least
        };
        assert_eq!(begins(16_000, &config, true, None), 256);
        assert_eq!([16_000, 6_000, 800].map(|host| begins(host, &config, false, None)), [2048, 1408, 256]);
        // The cgroup has room for it, or has none.
        assert_eq!(begins(16_000, &config, false, Some(2100)), 2048);
        assert_eq!(begins(16_000, &config, false, Some(2050)), 256);
        let booted = Config { templates: false, ..config.clone() };
        assert_eq!(begins(16_000, &booted, false, None), 256);
        let small = Config { max_memory_mib: Some(512), ..config.clone() };
        assert_eq!(begins(16_000, &small, false, None), 256);
        let chosen = Config { unlimited_memory_mib: Some(4096), ..config };
        assert_eq!([16_000, 4_000].map(|host| begins(host, &chosen, false, None)), [4096, 256]);
    }

    #[test]
    fn a_vm_gets_smaller_only_if_its_cgroup_allows_less() {
        let range = MemoryRange::new(256, 8000);
        let fit = |present, limit_mib: u64, allowed_mib: Option<u64>| {
            let present = Present { mib: present, huge_pages_mib: 0 };
            range.fit(present, limit_mib * MIB, 0, allowed_mib.map(|mib| mib * MIB), Charged::Clone)
        };
        assert_eq!(fit(256, 0, None), 256);
        assert_eq!(fit(256, 1024, None), 1152);
        assert_eq!(fit(1152, 128, None), 1152);
        assert_eq!(fit(1152, 128, Some(4000)), 1152);
        // 240 MiB beside the VMM, of which a 129th is for page tables.
        assert_eq!(fit(256, 128, Some(256)), 239);
        assert_eq!(fit(239, 1024, Some(1152)), 1128);
        assert_eq!(fit(1128, 128, Some(256)), 239);
        assert_eq!(fit(256, 128, Some(64)), SMALLEST_MIB);
        assert_eq!(fit(256, u64::MAX / MIB, Some(u64::MAX / MIB)), range.most);
        // A VM that booted has pages of its own instead of its template's.
        let whole = |range: MemoryRange, mib, limit_mib: u64, allowed_mib: u64| {
            let (present, allowed) = (Present { mib, huge_pages_mib: 0 }, Some(allowed_mib * MIB));
            range.fit(present, limit_mib * MIB, 0, allowed, Charged::Whole)
        };
        assert_eq!(whole(range, 256, 128, 256), 215);
        assert_eq!(whole(MemoryRange::new(64, 8000), 64, 16, 0), 64);
    }

    #[test]
    fn huge_pages_are_added_to_what_the_limits_need() {
        let range = MemoryRange::new(256, 8000);
        let needs = |limits_mib: u64, huge_pages_mib: u64| Needs {
            limits: limits_mib * MIB,
            huge_pages: huge_pages_mib * MIB,
        };
        let added = [0, 2, 120, 127, 1024].map(|mib| needs(0, mib).huge_pages_mib());
        assert_eq!(added, [0, 128, 128, 128, 1152], "with their descriptions, in blocks");
        assert_eq!(range.for_needs(needs(128, 2)), 384);
        assert_eq!(range.for_needs(needs(1024, 120)), range.for_limits(1024 * MIB) + 128);
        assert_eq!(range.for_needs(needs(u64::MAX / MIB, u64::MAX / MIB)), range.most);
        let fit = |present: Present, needs: Needs, allowed: Option<u64>| {
            range.fit(present, needs.limits, needs.huge_pages_mib(), allowed, Charged::Clone)
        };
        let began = Present { mib: 256, huge_pages_mib: 0 };
        assert_eq!(fit(began, needs(0, 64), None), 384);
        // It has them already, even if it grew for another reason; or the cgroup allows less.
        assert_eq!(fit(Present { mib: 384, huge_pages_mib: 128 }, needs(0, 64), None), 384);
        assert_eq!(fit(Present { mib: 512, huge_pages_mib: 0 }, needs(0, 64), None), 640);
        assert_eq!(fit(began, needs(0, 64), Some(256 * MIB)), 239);

        let holds = |mib: u64| range.holds_huge_pages(needs(0, mib));
        let most = u64::from(range.most);
        assert!(holds(0) && holds(most - 96) && !holds(most - 95) && !holds(u64::MAX / MIB));
        assert!(MemoryRange::new(64, 64).holds_huge_pages(needs(0, 0)));
    }

    #[test]
    fn a_vm_that_needs_more_doubles_as_far_as_there_is_room() {
        let range = MemoryRange::new(256, 64 << 10);
        let grown = |present, available_mib: u64, allowed_mib: Option<u64>| {
            let allowed = allowed_mib.map(|mib| mib * MIB);
            range.on_demand(present, available_mib.saturating_mul(MIB), allowed, Charged::Clone)
        };
        assert_eq!([256, 512, 4096, 8192].map(|mib| grown(mib, u64::MAX, None)), [512, 1024, 8192, 12288]);
        assert_eq!(grown(range.most - 128, u64::MAX, None), range.most);
        assert_eq!(grown(range.most, u64::MAX, None), range.most);
        // The host has memory for one more block, for none, or for less than the VM has been given.
        assert_eq!((grown(256, 511, None), grown(256, 383, None), grown(256, 100, None)), (384, 256, 256));
        // So has the cgroup: 16 MiB are the VMM's, and a 129th of the rest is for page tables.
        assert_eq!((grown(256, 4096, Some(416)), grown(256, 4096, Some(400))), (384, 256));
        // A VM that became smaller because its cgroup allows no more.
        assert_eq!((grown(239, 4096, Some(256)), grown(239, 4096, None)), (239, 384));
        assert_eq!(MemoryRange::new(256, 256).on_demand(256, u64::MAX, None, Charged::Whole), 256);
    }

    /// What kubelet adds to the limits of the containers, as users get it from us.
    #[test]
    fn the_overhead_that_we_ship_is_enough_for_limits_of_2_gib() {
        let class = include_str!("../../../contrib/kubernetes/runtimeclass.yaml");
        let line = class.lines().find_map(|line| line.trim().strip_prefix("memory: ")).unwrap();
        let overhead: u64 = line.strip_suffix("Mi").unwrap().parse().unwrap();
        let usable = |mib: u64, charged: Charged| charged.usable(mib * MIB) / MIB;
        for limits in [16, 128, 1024, 2048] {
            let usable = usable(limits + overhead, Charged::Clone);
            assert!(usable >= limits, "{usable} of {limits} MiB");
        }
        // A VM that booted takes more, which is enough for 1 GiB.
        assert!(usable(1024 + overhead, Charged::Whole) >= 1024);
        // 24 MiB more for each further GiB.
        let limits = 10 * 1024;
        assert!(usable(limits + overhead + 8 * 24, Charged::Clone) >= limits);
        assert_eq!(usable(50, Charged::Clone), 0);
    }

    #[test]
    fn a_host_that_is_too_small_or_too_large_for_growth_has_none_or_a_tib() {
        assert_eq!(MemoryRange::new(256, 300), MemoryRange { least: 256, most: 256 });
        assert_eq!(MemoryRange::new(512, 100), MemoryRange { least: 512, most: 512 });
        assert_eq!(u64::from(MemoryRange::new(256, 1 << 40).most), MOST_MIB);
    }
}
