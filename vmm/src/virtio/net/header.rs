//! The header in front of each packet that the guest sends (virtio 1.3, 5.1.6).
//!
//! The kernel of the host acts on what it says. So the device copies it once, and gives the kernel a copy that has only
//! what the driver has negotiated and the packet can have.

use bulkhead_vmm_api::tap::HEADER_LEN;
use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CSUM, VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_HOST_TSO6, VIRTIO_NET_F_HOST_USO,
    VIRTIO_NET_HDR_F_NEEDS_CSUM, VIRTIO_NET_HDR_GSO_NONE, VIRTIO_NET_HDR_GSO_TCPV4, VIRTIO_NET_HDR_GSO_TCPV6,
    VIRTIO_NET_HDR_GSO_UDP_L4,
};

/// Bytes of an Ethernet header, and of the shortest headers above it.
const ETHERNET: usize = 14;
const IPV4: usize = 20;
const IPV6: usize = 40;
const TCP: usize = 20;
const UDP: usize = 8;
/// Bytes of a checksum, and its offsets in the headers of TCP and UDP.
const CHECKSUM: usize = 2;
const TCP_CHECKSUM: usize = 16;
const UDP_CHECKSUM: usize = 6;

/// The most datagrams that Linux lets a process send at once (UDP_MAX_SEGMENTS, since 6.10; 64 before). The host would
/// allocate a buffer for each, and the guest could ask for one for each byte.
const MAX_DATAGRAMS: usize = 128;

/// The most bytes of the headers of a packet that is split. Each segment gets a copy of them. Those of Linux take far
/// fewer.
const MAX_HEADERS: usize = 1024;

/// The least bytes of a segment of TCP, which Linux takes too (TCP_MIN_GSO_SIZE, since 6.12). Older kernels would make
/// a segment of each byte.
const MIN_TCP_SEGMENT: usize = 8;

/// `struct virtio_net_hdr`. Fields that the device ignores are left out.
struct Header {
    flags: u8,
    gso_type: u8,
    hdr_len: u16,
    gso_size: u16,
    csum_start: u16,
    csum_offset: u16,
}

/// What the segments of a packet are.
struct Segments {
    /// The feature by which the driver may leave them to the device.
    feature: u32,
    /// The least bytes in front of the transport header.
    before: usize,
    /// The least bytes of the transport header, and where its checksum is.
    transport: usize,
    checksum: usize,
    /// The least bytes of a segment, and the most segments of a packet.
    least: usize,
    most: usize,
}

/// Returns the header that the kernel gets with a frame of `frame_len` bytes, if the driver has negotiated `features`
/// and has written `header`. Returns None if the frame must be dropped.
pub(super) fn checked(header: [u8; HEADER_LEN], frame_len: usize, features: u64) -> Option<[u8; HEADER_LEN]> {
    let header = Header::of(header);
    let has = |feature: u32| features & 1 << feature != 0;
    let (start, offset) = (usize::from(header.csum_start), usize::from(header.csum_offset));
    let needs_checksum = header.flags & VIRTIO_NET_HDR_F_NEEDS_CSUM as u8 != 0;
    if needs_checksum && !(has(VIRTIO_NET_F_CSUM) && start + offset + CHECKSUM <= frame_len) {
        return None;
    }
    if u32::from(header.gso_type) != VIRTIO_NET_HDR_GSO_NONE {
        let segments = Segments::of(header.gso_type)?;
        let payload = frame_len.checked_sub(start + segments.transport)?;
        let size = usize::from(header.gso_size);
        let legal = has(segments.feature)
            && needs_checksum
            && offset == segments.checksum
            && start >= segments.before
            && start + segments.transport <= MAX_HEADERS
            && size >= segments.least
            && payload.div_ceil(size) <= segments.most;
        if !legal {
            return None;
        }
    }
    Some(header.reduced(needs_checksum, frame_len))
}

impl Segments {
    /// Those of this type. None if no feature that is offered has it: UFO, and TCP with ECN.
    fn of(gso_type: u8) -> Option<Self> {
        let tcp = |feature, ip| Self {
            feature,
            before: ETHERNET + ip,
            transport: TCP,
            checksum: TCP_CHECKSUM,
            least: MIN_TCP_SEGMENT,
            most: usize::MAX,
        };
        match u32::from(gso_type) {
            VIRTIO_NET_HDR_GSO_TCPV4 => Some(tcp(VIRTIO_NET_F_HOST_TSO4, IPV4)),
            VIRTIO_NET_HDR_GSO_TCPV6 => Some(tcp(VIRTIO_NET_F_HOST_TSO6, IPV6)),
            // Of IPv4 and IPv6.
            VIRTIO_NET_HDR_GSO_UDP_L4 => Some(Self {
                feature: VIRTIO_NET_F_HOST_USO,
                before: ETHERNET + IPV4,
                transport: UDP,
                checksum: UDP_CHECKSUM,
                least: 1,
                most: MAX_DATAGRAMS,
            }),
            _ => None,
        }
    }
}

impl Header {
    fn of(bytes: [u8; HEADER_LEN]) -> Self {
        let [flags, gso_type, h0, h1, g0, g1, s0, s1, o0, o1, _, _] = bytes;
        Self {
            flags,
            gso_type,
            hdr_len: u16::from_le_bytes([h0, h1]),
            gso_size: u16::from_le_bytes([g0, g1]),
            csum_start: u16::from_le_bytes([s0, s1]),
            csum_offset: u16::from_le_bytes([o0, o1]),
        }
    }

    /// Without what the device must ignore (virtio 1.3, 5.1.6.2.2): other flags, and the fields of what is not asked
    /// for. `hdr_len` is a hint that need not be right, but the kernel drops a packet that is shorter.
    fn reduced(self, needs_checksum: bool, frame_len: usize) -> [u8; HEADER_LEN] {
        let segmented = u32::from(self.gso_type) != VIRTIO_NET_HDR_GSO_NONE;
        let field = |used: bool, value: u16| if used { value.to_le_bytes() } else { [0; 2] };
        let hdr_len = self.hdr_len.min(u16::try_from(frame_len).unwrap_or(u16::MAX));
        let [h0, h1] = hdr_len.to_le_bytes();
        let [g0, g1] = field(segmented, self.gso_size);
        let [s0, s1] = field(needs_checksum, self.csum_start);
        let [o0, o1] = field(needs_checksum, self.csum_offset);
        let flags = self.flags & VIRTIO_NET_HDR_F_NEEDS_CSUM as u8;
        [flags, self.gso_type, h0, h1, g0, g1, s0, s1, o0, o1, 0, 0]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: u64 = 1 << VIRTIO_NET_F_CSUM
        | 1 << VIRTIO_NET_F_HOST_TSO4
        | 1 << VIRTIO_NET_F_HOST_TSO6
        | 1 << VIRTIO_NET_F_HOST_USO;

    /// A header with these fields: flags, gso_type, hdr_len, gso_size, csum_start, csum_offset.
    fn header(flags: u8, gso_type: u32, fields: [u16; 4]) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        bytes[0] = flags;
        bytes[1] = gso_type as u8;
        for (index, field) in fields.into_iter().enumerate() {
            bytes[2 + 2 * index..][..2].copy_from_slice(&field.to_le_bytes());
        }
        bytes
    }

    const TCP4: [u16; 4] = [54, 1000, 34, 16];
    const TCP6: [u16; 4] = [74, 1000, 54, 16];
    const UDP4: [u16; 4] = [42, 1000, 34, 6];
    const FRAME: usize = 5000;

    #[test]
    fn what_was_negotiated_is_left_to_the_kernel() {
        let legal = [
            header(0, VIRTIO_NET_HDR_GSO_NONE, [0; 4]),
            header(1, VIRTIO_NET_HDR_GSO_NONE, [0, 0, 34, 6]),
            header(1, VIRTIO_NET_HDR_GSO_TCPV4, TCP4),
            header(1, VIRTIO_NET_HDR_GSO_TCPV6, TCP6),
            header(1, VIRTIO_NET_HDR_GSO_UDP_L4, UDP4),
            header(1, VIRTIO_NET_HDR_GSO_UDP_L4, [62, 1000, 54, 6]),
        ];
        for header in legal {
            assert_eq!(checked(header, FRAME, ALL), Some(header), "{header:?}");
        }
    }

    #[test]
    fn what_was_not_negotiated_is_dropped() {
        let of = [
            (VIRTIO_NET_F_CSUM, header(1, VIRTIO_NET_HDR_GSO_NONE, [0, 0, 34, 6])),
            (VIRTIO_NET_F_HOST_TSO4, header(1, VIRTIO_NET_HDR_GSO_TCPV4, TCP4)),
            (VIRTIO_NET_F_HOST_TSO6, header(1, VIRTIO_NET_HDR_GSO_TCPV6, TCP6)),
            (VIRTIO_NET_F_HOST_USO, header(1, VIRTIO_NET_HDR_GSO_UDP_L4, UDP4)),
            (VIRTIO_NET_F_CSUM, header(1, VIRTIO_NET_HDR_GSO_UDP_L4, UDP4)),
        ];
        for (feature, header) in of {
            assert_eq!(checked(header, FRAME, ALL & !(1 << feature)), None, "{feature} {header:?}");
        }
        // UFO, TCP with ECN, and types that do not exist.
        for gso_type in [2, 3, 0x81, 0x84, 0x85, 6, 0xff] {
            assert_eq!(checked(header(1, gso_type, TCP4), FRAME, ALL), None, "{gso_type}");
        }
    }

    #[test]
    fn fields_that_lie_are_dropped() {
        let udp = |fields| (1, VIRTIO_NET_HDR_GSO_UDP_L4, fields);
        let tcp = |fields| (1, VIRTIO_NET_HDR_GSO_TCPV4, fields);
        let lies = [
            // The checksum is not in the frame.
            (1, VIRTIO_NET_HDR_GSO_NONE, [0, 0, 4999, 0]),
            (1, VIRTIO_NET_HDR_GSO_NONE, [0, 0, 0xffff, 0xffff]),
            udp([42, 1000, 4995, 6]),
            // There is no checksum to be made.
            (0, VIRTIO_NET_HDR_GSO_UDP_L4, UDP4),
            (0, VIRTIO_NET_HDR_GSO_TCPV4, TCP4),
            (2, VIRTIO_NET_HDR_GSO_UDP_L4, UDP4),
            // It is elsewhere in the transport header.
            udp([42, 1000, 34, 16]),
            tcp([54, 1000, 34, 6]),
            // There is no room for an IP header.
            udp([42, 1000, 33, 6]),
            tcp([54, 1000, 33, 16]),
            (1, VIRTIO_NET_HDR_GSO_TCPV6, [74, 1000, 53, 16]),
            // Segments have no bytes, or there are too many.
            udp([42, 0, 34, 6]),
            tcp([54, 0, 34, 16]),
            udp([42, 1, 34, 6]),
            udp([42, 38, 34, 6]),
            tcp([54, 7, 34, 16]),
            // Each segment would get a copy of very long headers.
            udp([0, 1000, 1017, 6]),
            tcp([0, 1000, 1005, 16]),
        ];
        for (flags, gso_type, fields) in lies {
            assert_eq!(checked(header(flags, gso_type, fields), FRAME, ALL), None, "{gso_type} {fields:?}");
        }
        // As many as a process may send.
        let most = header(1, VIRTIO_NET_HDR_GSO_UDP_L4, [42, 39, 34, 6]);
        assert_eq!(checked(most, 42 + 39 * MAX_DATAGRAMS, ALL), Some(most));
        assert_eq!(checked(most, 42 + 39 * MAX_DATAGRAMS + 1, ALL), None);
        // The transport header is not in the frame as a whole.
        assert_eq!(checked(header(1, VIRTIO_NET_HDR_GSO_TCPV4, TCP4), 53, ALL), None);
        for len in 0..42 {
            assert_eq!(checked(header(1, VIRTIO_NET_HDR_GSO_UDP_L4, UDP4), len, ALL), None, "{len}");
        }
    }

    #[test]
    fn what_the_device_must_ignore_does_not_reach_the_kernel() {
        let ignored = header(0xfe, VIRTIO_NET_HDR_GSO_NONE, [100, 1000, 34, 6]);
        assert_eq!(checked(ignored, FRAME, ALL), Some(header(0, VIRTIO_NET_HDR_GSO_NONE, [100, 0, 0, 0])));
        let mut buffers = header(1, VIRTIO_NET_HDR_GSO_UDP_L4, UDP4);
        buffers[10..].copy_from_slice(&[1, 2]);
        assert_eq!(checked(buffers, FRAME, ALL), Some(header(1, VIRTIO_NET_HDR_GSO_UDP_L4, UDP4)));
        // The kernel drops a packet that is shorter than this hint.
        let hint = header(0, VIRTIO_NET_HDR_GSO_NONE, [u16::MAX, 0, 0, 0]);
        assert_eq!(checked(hint, 60, 0), Some(header(0, VIRTIO_NET_HDR_GSO_NONE, [60, 0, 0, 0])));
    }
}
