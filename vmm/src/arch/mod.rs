//! x86_64: loads a Linux kernel to guest memory, describes the machine to it, and sets the initial state of the vCPUs.

pub mod boot;
pub mod cmdline;
pub mod cpuid;
pub mod mptable;
pub mod registers;
