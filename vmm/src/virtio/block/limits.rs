//! Sizes and limits of requests.

/// Bytes of a sector in all requests, whatever the size of a block (virtio 1.3, 5.2.2).
pub(super) const SECTOR: u64 = 512;

/// The most segments of a request, so that its header and its status are in the queue too.
pub(super) const SEG_MAX: u32 = 254;
/// The most bytes of a segment.
pub(super) const SIZE_MAX: u32 = 0x1_0000;
/// The most bytes of a request, by which nobody waits for it too long.
pub(super) const MAX_DATA: u64 = SEG_MAX as u64 * SIZE_MAX as u64;
/// The most sectors that a request discards: a GiB.
pub(super) const MAX_DISCARD: u32 = 1 << 21;
/// The most sectors that a request zeroes. The host may have to write them all: 16 MiB.
pub(super) const MAX_WRITE_ZEROES: u32 = 1 << 15;
