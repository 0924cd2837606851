//! What `cargo xtask rig` and the runner in the inner host say to each other over a virtio-serial port.
//!
//! A frame is its kind (1 byte), the length of its payload (4 bytes, little-endian) and the payload: the bytes of a
//! stream, or one JSON [`Order`] or [`Report`].

use std::io::{self, Read, Write};
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Name of the virtio-serial port: `/dev/virtio-ports/<name>` in the inner host.
pub const PORT: &str = "bulkhead.rig";

/// Serial of the disk whose first bytes are the tar that [`Order::Begin`] unpacks.
pub const PAYLOAD_DISK: &str = "payload";

/// Bytes of a stream that are put in one frame.
pub const CHUNK: usize = 64 << 10;

/// Longest payload that is accepted.
const MAX_PAYLOAD: u32 = 1 << 20;

/// What the runner is to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Order {
    /// Sets the clock and unpacks the payload in `/`. Answered by [`Report::Ready`].
    Begin {
        /// Time since 1970.
        clock: Duration,
        /// Length of the tar on the payload disk; 0: there is none.
        payload_bytes: u64,
    },
    /// Runs a command. Its output comes as data; answered by [`Report::Exited`].
    Run {
        /// Program and arguments.
        argv: Vec<String>,
        /// Set: the command gets a terminal of this size.
        terminal: Option<Size>,
    },
    /// The command's standard input has ended.
    EndOfInput,
    /// The command's terminal has another size now.
    Resize(Size),
    /// Nothing: the inner host is to be interrupted, which is all.
    Beat,
}

/// What the runner has done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Report {
    /// [`Order::Begin`] is done.
    Ready,
    /// The command has exited with this status (128 + n for signal n).
    Exited(u8),
    /// The order could not be done; one line that says why.
    Failed(String),
}

/// A terminal's size in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Size {
    /// Lines.
    pub rows: u16,
    /// Characters in a line.
    pub columns: u16,
}

/// A stream of the command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stream {
    /// To the command.
    Stdin,
    /// From the command; of a command with a terminal, all its output.
    Stdout,
    /// From the command.
    Stderr,
}

/// One frame, either way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Frame {
    /// To the runner.
    Order(Order),
    /// From the runner.
    Report(Report),
    /// Bytes of a stream, at most [`CHUNK`].
    Data(Stream, Vec<u8>),
}

impl Frame {
    /// Writes the frame by one call, so that frames of several threads with one lock do not mix.
    pub fn write_to(&self, mut writer: impl Write) -> io::Result<()> {
        let json;
        let (kind, payload) = match self {
            Frame::Order(order) => {
                json = serde_json::to_vec(order)?;
                (0, &json)
            }
            Frame::Report(report) => {
                json = serde_json::to_vec(report)?;
                (1, &json)
            }
            Frame::Data(Stream::Stdin, data) => (2, data),
            Frame::Data(Stream::Stdout, data) => (3, data),
            Frame::Data(Stream::Stderr, data) => (4, data),
        };
        let length = u32::try_from(payload.len()).ok().filter(|length| *length <= MAX_PAYLOAD);
        let length =
            length.ok_or_else(|| invalid(format!("a frame of {} bytes is too long", payload.len())))?;
        let mut bytes = Vec::with_capacity(5 + payload.len());
        bytes.push(kind);
        bytes.extend_from_slice(&length.to_le_bytes());
        bytes.extend_from_slice(payload);
        writer.write_all(&bytes)
    }

    /// Reads one frame. The end of the channel is an error of kind `UnexpectedEof`.
    pub fn read_from(mut reader: impl Read) -> io::Result<Frame> {
        let mut head = [0; 5];
        reader.read_exact(&mut head)?;
        let [kind, length @ ..] = head;
        let length = u32::from_le_bytes(length);
        if length > MAX_PAYLOAD {
            return Err(invalid(format!("a frame of {length} bytes is too long")));
        }
        let mut payload = vec![0; length as usize];
        reader.read_exact(&mut payload)?;
        let garbled =
            |error: serde_json::Error| invalid(format!("a frame of kind {kind} is garbled: {error}"));
        Ok(match kind {
            0 => Frame::Order(serde_json::from_slice(&payload).map_err(garbled)?),
            1 => Frame::Report(serde_json::from_slice(&payload).map_err(garbled)?),
            2 => Frame::Data(Stream::Stdin, payload),
            3 => Frame::Data(Stream::Stdout, payload),
            4 => Frame::Data(Stream::Stderr, payload),
            _ => return Err(invalid(format!("there is no kind {kind} of frames"))),
        })
    }
}

fn invalid(message: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_come_out_as_they_went_in() {
        let size = Size { rows: 24, columns: 80 };
        let frames = [
            Frame::Order(Order::Begin { clock: Duration::new(7, 9), payload_bytes: 1 << 40 }),
            Frame::Order(Order::Run { argv: vec!["sh".into(), "-c".into()], terminal: Some(size) }),
            Frame::Order(Order::EndOfInput),
            Frame::Report(Report::Exited(255)),
            Frame::Data(Stream::Stdin, vec![]),
            Frame::Data(Stream::Stderr, vec![0; CHUNK]),
        ];
        let mut wire = Vec::new();
        for frame in &frames {
            frame.write_to(&mut wire).unwrap();
        }
        let mut wire = wire.as_slice();
        for frame in &frames {
            assert_eq!(&Frame::read_from(&mut wire).unwrap(), frame);
        }
        assert_eq!(Frame::read_from(&mut wire).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn noise_is_an_error() {
        for noise in [&b"\x09\0\0\0\0"[..], b"\x02\xff\xff\xff\xff", b"\0\x01\0\0\0{"] {
            assert_eq!(Frame::read_from(noise).unwrap_err().kind(), io::ErrorKind::InvalidData);
        }
    }
}
