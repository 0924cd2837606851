//! Questions for a name server and its answers, on one stream: the agent sends the questions that containers ask, and
//! the shim asks the name server on the host.
//!
//! A message of DNS has a header: the number of the question (4 bytes), the protocol (1 byte) and the length (2 bytes),
//! big-endian. An answer has the number and the protocol of its question. An empty one says that there is no answer.

use std::{
    io,
    net::{Ipv4Addr, SocketAddrV4},
};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use crate::nftables::Protocol;

/// Where containers in docker's networks find docker's name server.
pub const ADDRESS: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(127, 0, 0, 11), 53);

/// Questions without an answer at one time. With one more, the oldest gets none.
pub const MAX_QUESTIONS: usize = 256;

/// Bytes of a question at most. The largest that resolvers send have one name of 255 bytes and a few options.
pub const MAX_QUESTION: usize = 4096;

/// Bytes of an answer at most: DNS has no longer ones.
pub const MAX_ANSWER: usize = u16::MAX as usize;

const TCP: u8 = 1;
const UDP: u8 = 0;

/// A question or an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    pub number: u32,
    pub protocol: Protocol,
    /// As in RFC 1035, 4.1, without the length that TCP has.
    pub bytes: Vec<u8>,
}

impl Message {
    /// Reads the next one. One that is longer than `most` bytes, or breaks the rules in another way, is an error of the
    /// kind `InvalidData`.
    pub async fn read(stream: &mut (impl AsyncRead + Unpin), most: usize) -> io::Result<Self> {
        let number = stream.read_u32().await?;
        let protocol = match stream.read_u8().await? {
            TCP => Protocol::Tcp,
            UDP => Protocol::Udp,
            _ => return Err(io::ErrorKind::InvalidData.into()),
        };
        let bytes = read_bytes(stream, most).await?;
        Ok(Self { number, protocol, bytes })
    }

    /// Writes it. The bytes must be fewer than 65,536.
    pub async fn write(&self, stream: &mut (impl AsyncWrite + Unpin)) -> io::Result<()> {
        let protocol = match self.protocol {
            Protocol::Tcp => TCP,
            Protocol::Udp => UDP,
        };
        let head = [&self.number.to_be_bytes()[..], &[protocol]].concat();
        stream.write_all(&[head, with_length(&self.bytes)?].concat()).await
    }
}

/// Reads a message of DNS over TCP: its length (2 bytes), and the message (RFC 1035, 4.2.2).
pub async fn read_bytes(stream: &mut (impl AsyncRead + Unpin), most: usize) -> io::Result<Vec<u8>> {
    let length = usize::from(stream.read_u16().await?);
    if length > most {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut bytes = vec![0; length];
    stream.read_exact(&mut bytes).await?;
    Ok(bytes)
}

/// The message in the form that TCP has. Fails if it is too long for it.
pub fn with_length(bytes: &[u8]) -> io::Result<Vec<u8>> {
    let length = u16::try_from(bytes.len()).map_err(|_| io::ErrorKind::InvalidData)?;
    Ok([&length.to_be_bytes(), bytes].concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_arrive_as_they_were_sent_and_long_ones_do_not() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let message = |number, protocol, length| Message { number, protocol, bytes: vec![7; length] };
            let sent = [message(1, Protocol::Udp, 0), message(u32::MAX, Protocol::Tcp, MAX_ANSWER)];
            let mut stream = Vec::new();
            for message in &sent {
                message.write(&mut stream).await.unwrap();
            }
            let mut read = &stream[..];
            for message in &sent {
                assert_eq!(&Message::read(&mut read, MAX_ANSWER).await.unwrap(), message);
            }
            let end = Message::read(&mut read, MAX_ANSWER).await.unwrap_err();
            assert_eq!(end.kind(), io::ErrorKind::UnexpectedEof);
            let mut long = &stream[7..];
            let refused = Message::read(&mut long, MAX_QUESTION).await.unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::InvalidData);
            let mut other = &[0, 0, 0, 0, 2, 0, 0][..];
            let refused = Message::read(&mut other, MAX_QUESTION).await.unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::InvalidData);
        });
    }
}
