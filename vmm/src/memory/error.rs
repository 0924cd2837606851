//! Why guest memory could not be allocated or extended.

use std::io;

/// What the host lacks to give the guest its memory.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    #[error("memory_mib, max_memory_mib: cannot map {mib} MiB for the guest")]
    Map { mib: u64, source: io::Error },
    #[error("hugepages: the host's kernel has no pool of huge pages of 2 MiB")]
    NoPool(#[source] io::Error),
    #[error(
        "hugepages: the host's pool of huge pages lacks {} MiB; raise vm.nr_hugepages by {pages}, or end other VMs",
        pages * 2
    )]
    Pool { pages: u64 },
    #[error(
        "hugepages: the host does not give the VM {mib} MiB of its huge pages; check hugetlb.2MB.max of the \
         pod's cgroup"
    )]
    PoolRefused { mib: u64, source: io::Error },
    #[error("cannot extend the guest's memory to {mib} MiB above its initial memory")]
    Grow { mib: u64, source: io::Error },
    #[error("KVM rejects the guest's memory at {start:#x} ({size:#x} bytes)")]
    Slot { start: u64, size: u64, source: kvm_ioctls::Error },
}
