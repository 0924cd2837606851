//! Bulkhead's VMM: one process, one VM.

pub mod virtio;

/// Guest memory, fixed when the VM is built. Cheap to clone.
pub type GuestMemory = vm_memory::GuestMemoryMmap<()>;
