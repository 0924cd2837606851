//! Sizes of pages on x86_64, and the access to guest memory.

/// Bytes of a huge page. Guest addresses and addresses of this process must be equal modulo this size. Otherwise KVM
/// maps a huge page as small pages.
pub(crate) const HUGE_PAGE: usize = 2 << 20;
/// Bytes of the smallest page. Memory is saved, mapped and released in this unit.
pub(crate) const PAGE: usize = 4096;
/// The access of this process to guest memory.
pub(crate) const ACCESS: libc::c_int = libc::PROT_READ | libc::PROT_WRITE;
