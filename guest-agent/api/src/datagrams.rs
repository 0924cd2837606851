//! Datagrams for a service of the host, on one stream: the agent sends what processes of containers have sent, and the
//! shim passes it on. The shim sends nothing. It ends the stream when nobody receives them any more.
//!
//! A datagram has a header: the user and the group of its sender, and its length, 4 bytes each, big-endian.

use std::io;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Bytes of a datagram at most: what a Unix socket with Linux's default send buffer can send (unix(7), SO_SNDBUF).
pub const MAX_DATAGRAM: usize = (208 << 10) - 32;

/// The header of a datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Head {
    /// The user of the sender, as the guest's kernel says (SCM_CREDENTIALS).
    pub uid: u32,
    pub gid: u32,
    /// The bytes that follow.
    pub length: usize,
}

impl Head {
    /// Reads the next one. A length of more than [`MAX_DATAGRAM`] is an error of the kind `InvalidData`.
    pub async fn read(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<Self> {
        let (uid, gid) = (stream.read_u32().await?, stream.read_u32().await?);
        let length = usize::try_from(stream.read_u32().await?).unwrap_or(usize::MAX);
        if length > MAX_DATAGRAM {
            let reason = format!("the guest sends a datagram of {length} bytes, of at most {MAX_DATAGRAM}");
            return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
        }
        Ok(Self { uid, gid, length })
    }

    /// Writes a datagram of this user and this group.
    pub async fn write(
        stream: &mut (impl AsyncWrite + Unpin),
        (uid, gid): (u32, u32),
        bytes: &[u8],
    ) -> io::Result<()> {
        let length = u32::try_from(bytes.len()).map_err(|_| io::ErrorKind::InvalidData)?;
        let head = [uid, gid, length].map(u32::to_be_bytes).concat();
        stream.write_all(&[&head, bytes].concat()).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_datagram_is_read_as_it_was_written_and_too_long_ones_are_refused() {
        let mut stream = Vec::new();
        Head::write(&mut stream, (1234, 77), b"text").await.unwrap();
        Head::write(&mut stream, (0, 0), &vec![7; MAX_DATAGRAM + 1]).await.unwrap();
        let mut stream = &stream[..];
        let head = Head::read(&mut stream).await.unwrap();
        assert_eq!(head, Head { uid: 1234, gid: 77, length: 4 });
        assert_eq!(stream.split_off(..4).unwrap(), b"text");
        assert_eq!(Head::read(&mut stream).await.unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}
