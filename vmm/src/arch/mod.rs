//! What is particular to x86_64: how a Linux kernel is put in memory, what it is told of its machine, and how
//! a vCPU is set to start it.

pub mod boot;
pub mod cmdline;
pub mod cpuid;
pub mod layout;
pub mod mptable;
pub mod registers;
