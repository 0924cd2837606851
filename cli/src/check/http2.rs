//! Whether the program that listens at a socket speaks HTTP/2 (RFC 9113), and with it gRPC. The kernel accepts
//! connections also for a program that hangs.

use std::{
    io::{self, Read, Write},
    os::unix::net::UnixStream,
    path::Path,
    time::{Duration, Instant},
};

/// What a client says first (section 3.4), with an empty frame SETTINGS.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

/// The size of a frame's header, the kind of the frame SETTINGS, and the size of one setting (sections 4.1 and 6.5).
const HEADER: usize = 9;
const SETTINGS: u8 = 4;
const SETTING: u32 = 6;

/// The longest frame before a client has allowed longer ones.
const LONGEST: u32 = 1 << 14;

/// Whether the first frame that comes is the server's SETTINGS, as HTTP/2 demands it. An error of the kind `TimedOut`
/// or `WouldBlock`: nothing has come within the limit.
pub(super) fn greet(socket: &Path, limit: Duration) -> io::Result<bool> {
    let deadline = Instant::now() + limit;
    let mut stream = UnixStream::connect(socket)?;
    stream.set_write_timeout(Some(limit))?;
    match stream.write_all(PREFACE) {
        // It has closed the connection at once.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(false),
        written => written?,
    }
    let mut header = [0; HEADER];
    let mut length = 0;
    while let Some(rest) = header.get_mut(length..).filter(|rest| !rest.is_empty()) {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(rest) {
            Ok(0) => return Ok(false),
            Ok(read) => length += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(false),
            Err(error) => return Err(error),
        }
    }
    Ok(is_settings(header))
}

/// Whether this is the header of a frame with settings of the whole connection, and not of their acknowledgement.
fn is_settings([a, b, c, kind, flags, stream @ ..]: [u8; HEADER]) -> bool {
    let length = u32::from_be_bytes([0, a, b, c]);
    // The first bit of the stream is reserved.
    let stream = u32::from_be_bytes(stream) & !(1 << 31);
    length <= LONGEST && length.is_multiple_of(SETTING) && (kind, flags, stream) == (SETTINGS, 0, 0)
}
