//! The header of a vsock packet (virtio 1.3, 5.10.6).

/// Bytes of a header.
pub(super) const HEADER_LEN: usize = 44;
/// VIRTIO_VSOCK_TYPE_STREAM, the only supported type.
pub(super) const TYPE_STREAM: u16 = 1;
/// The CID of the host.
pub(super) const HOST_CID: u64 = 2;

pub(super) const OP_REQUEST: u16 = 1;
pub(super) const OP_RESPONSE: u16 = 2;
pub(super) const OP_RST: u16 = 3;
pub(super) const OP_SHUTDOWN: u16 = 4;
pub(super) const OP_RW: u16 = 5;
pub(super) const OP_CREDIT_UPDATE: u16 = 6;
pub(super) const OP_CREDIT_REQUEST: u16 = 7;

/// The sender of OP_SHUTDOWN will receive no more.
pub(super) const SHUTDOWN_RECEIVE: u32 = 1;
/// The sender of OP_SHUTDOWN will send no more.
pub(super) const SHUTDOWN_SEND: u32 = 2;
pub(super) const SHUTDOWN_BOTH: u32 = SHUTDOWN_RECEIVE | SHUTDOWN_SEND;

/// `struct virtio_vsock_hdr`.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) src_cid: u64,
    pub(super) dst_cid: u64,
    pub(super) src_port: u32,
    pub(super) dst_port: u32,
    /// The number of bytes of payload.
    pub(super) len: u32,
    pub(super) kind: u16,
    pub(super) op: u16,
    pub(super) flags: u32,
    /// The size of the sender's receive buffer.
    pub(super) buf_alloc: u32,
    /// How many bytes have left the sender's receive buffer so far, modulo 2^32.
    pub(super) fwd_cnt: u32,
}

impl Header {
    pub(super) fn parse(bytes: &[u8; HEADER_LEN]) -> Self {
        Self {
            src_cid: u64::from_le_bytes(field(bytes, 0)),
            dst_cid: u64::from_le_bytes(field(bytes, 8)),
            src_port: u32::from_le_bytes(field(bytes, 16)),
            dst_port: u32::from_le_bytes(field(bytes, 20)),
            len: u32::from_le_bytes(field(bytes, 24)),
            kind: u16::from_le_bytes(field(bytes, 28)),
            op: u16::from_le_bytes(field(bytes, 30)),
            flags: u32::from_le_bytes(field(bytes, 32)),
            buf_alloc: u32::from_le_bytes(field(bytes, 36)),
            fwd_cnt: u32::from_le_bytes(field(bytes, 40)),
        }
    }

    pub(super) fn to_bytes(self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        bytes[0..8].copy_from_slice(&self.src_cid.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.dst_cid.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.src_port.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.dst_port.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.len.to_le_bytes());
        bytes[28..30].copy_from_slice(&self.kind.to_le_bytes());
        bytes[30..32].copy_from_slice(&self.op.to_le_bytes());
        bytes[32..36].copy_from_slice(&self.flags.to_le_bytes());
        bytes[36..40].copy_from_slice(&self.buf_alloc.to_le_bytes());
        bytes[40..44].copy_from_slice(&self.fwd_cnt.to_le_bytes());
        bytes
    }
}

/// The `N` bytes at `offset`, which are inside the header.
fn field<const N: usize>(bytes: &[u8; HEADER_LEN], offset: usize) -> [u8; N] {
    let mut field = [0; N];
    field.copy_from_slice(&bytes[offset..offset + N]);
    field
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_field_has_its_place() {
        let mut bytes = [0; HEADER_LEN];
        for (index, byte) in bytes.iter_mut().enumerate() {
            *byte = index as u8;
        }
        let header = Header::parse(&bytes);
        assert_eq!(header.src_cid, 0x0706_0504_0302_0100);
        assert_eq!(header.op, 0x1f1e);
        assert_eq!(header.fwd_cnt, 0x2b2a_2928);
        assert_eq!(header.to_bytes(), bytes);
    }
}
