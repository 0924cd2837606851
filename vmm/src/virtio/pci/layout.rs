//! What is where in the memory of a function. Each part has a page, so that a guest can map it separately.

/// The common configuration (virtio 1.3, 4.1.4.3).
pub(super) const COMMON: u64 = 0;
/// Its bytes, without the fields for features that no device offers.
pub(super) const COMMON_LEN: u64 = 0x38;
/// The ISR status (virtio 1.3, 4.1.4.5).
pub(super) const ISR: u64 = 0x800;
/// The device configuration space (virtio 1.3, 4.1.4.6).
pub(super) const DEVICE: u64 = 0x1000;
pub(super) const DEVICE_LEN: u64 = 0x1000;
/// The notifications (virtio 1.3, 4.1.4.4). Queue N has the address N times [`NOTIFY_STEP`] from there, which no other
/// queue has, so that KVM need not look at the value.
pub const NOTIFY: u64 = 0x2000;
pub const NOTIFY_STEP: u64 = 4;
/// The MSI-X table, and the array of its pending bits.
pub const TABLE: u64 = 0x3000;
pub(super) const PENDING: u64 = 0x3800;
