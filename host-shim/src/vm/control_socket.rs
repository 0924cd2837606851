//! The VMM's control socket.

use std::{
    fs::File,
    io::{self, IoSlice},
    ops::RangeInclusive,
    os::fd::{AsRawFd, RawFd},
    path::PathBuf,
    time::Duration,
};

use bulkhead_vmm_api::{ControlReply, ControlRequest};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, Interest},
    net::UnixStream,
    time::{Instant, timeout},
};

/// How long a guest may take until its memory has another size. It plugs a GiB in a few milliseconds, and puts one into
/// its balloon in a fraction of a second. On an emulated host both take seconds.
const RESIZE: Duration = Duration::from_secs(60);

/// How long a VMM may take to be told that directories were unmounted.
const CLOSE: Duration = Duration::from_secs(2);

/// How long a VMM may take to add a device. KVM waits for the host's other processors.
const ATTACH: Duration = Duration::from_secs(10);

/// How long a VMM may take to take a device away. It waits for a request that is under way, up to a time of its own.
const DETACH: Duration = Duration::from_secs(20);

/// The longest line that is read of a VMM, which its guest may have taken over.
const MAX_LINE: u64 = 4096;

/// Why the memory of a VM has not the size that was requested.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ResizeError {
    #[error("cannot send the request to the VMM")]
    Io(#[from] io::Error),
    #[error("the VMM refuses: {0}")]
    Refused(String),
    #[error("the VMM did not answer within {} s", RESIZE.as_secs())]
    Silent,
    #[error("the guest reached only {reached_mib} MiB within {} s", RESIZE.as_secs())]
    Late { reached_mib: u32 },
}

/// Why a VM has no further network device or block device, or still has one.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AttachError {
    #[error("cannot connect to the VMM")]
    Connect(#[source] io::Error),
    #[error("cannot ask the VMM about a device")]
    Io(#[from] io::Error),
    #[error("the VMM refuses: {0}")]
    Refused(String),
    #[error("the VMM did not answer in time")]
    Silent,
}

/// Where requests are sent. Clones are the same.
#[derive(Debug, Clone)]
pub(crate) struct Control {
    path: PathBuf,
}

impl Control {
    /// `path` is that of [`bulkhead_vmm_api::VmConfig::control`].
    pub(crate) fn new(path: PathBuf) -> Self {
        Self { path }
    }

    /// Asks for the VM to be saved.
    pub(crate) async fn save(&self) -> io::Result<ControlReply> {
        self.ask(&ControlRequest::Save).await?.next().await
    }

    /// Has the VMM close files of directories that were unmounted on the host.
    pub(crate) async fn close_unmounted(&self) -> io::Result<()> {
        let asked = async { self.ask(&ControlRequest::CloseUnmounted).await?.next().await };
        match timeout(CLOSE, asked).await {
            Ok(Ok(ControlReply::Ok)) => Ok(()),
            Ok(Ok(_)) => Err(io::ErrorKind::InvalidData.into()),
            Ok(Err(error)) => Err(error),
            Err(_) => Err(io::ErrorKind::TimedOut.into()),
        }
    }

    /// Requests that the guest has `memory_mib`, and returns when the VMM has taken that on. From then on a later
    /// request replaces this one.
    pub(crate) async fn resize(&self, memory_mib: u32) -> Result<Resizing, ResizeError> {
        let begun = Instant::now();
        let taken = async {
            let mut replies = self.ask(&ControlRequest::Resize { memory_mib }).await?;
            // The VMM sends the first reply at once.
            let reply = replies.next().await?;
            Ok(Resizing { replies, begun, reached: Reached::of(reply, memory_mib)? })
        };
        timeout(RESIZE, taken).await.unwrap_or(Err(ResizeError::Silent))
    }

    /// Adds a network device with this address on a tap device, of which `tap` has the queues.
    pub(crate) async fn attach_nic(&self, mac: String, tap: &[File]) -> Result<(), AttachError> {
        let queues: Vec<_> = tap.iter().map(AsRawFd::as_raw_fd).collect();
        self.attach(&ControlRequest::AttachNic { mac }, &queues).await
    }

    /// Adds a block device on the host's device `file`. The guest finds it by `serial`.
    pub(crate) async fn attach_block(
        &self,
        serial: String,
        read_only: bool,
        discards: bool,
        file: &impl AsRawFd,
    ) -> Result<(), AttachError> {
        self.attach(&ControlRequest::AttachBlock { serial, read_only, discards }, &[file.as_raw_fd()]).await
    }

    /// Takes the block device with this serial number away.
    pub(crate) async fn detach_block(&self, serial: String) -> Result<(), AttachError> {
        let detached = async {
            match self.ask(&ControlRequest::DetachBlock { serial }).await?.next().await? {
                ControlReply::Ok => Ok(()),
                ControlReply::Error { message } => Err(AttachError::Refused(message)),
                _ => Err(io::Error::from(io::ErrorKind::InvalidData).into()),
            }
        };
        timeout(DETACH, detached).await.unwrap_or(Err(AttachError::Silent))
    }

    async fn attach(&self, request: &ControlRequest, files: &[RawFd]) -> Result<(), AttachError> {
        let attached = async {
            let stream = UnixStream::connect(&self.path).await.map_err(AttachError::Connect)?;
            let line = line(request)?;
            let send = || {
                let (bytes, files) = ([IoSlice::new(&line)], [ControlMessage::ScmRights(files)]);
                Ok(sendmsg::<()>(stream.as_raw_fd(), &bytes, &files, MsgFlags::MSG_NOSIGNAL, None)?)
            };
            stream.writable().await?;
            // The buffer of a new socket has room for all of it.
            if stream.try_io(Interest::WRITABLE, send)? < line.len() {
                return Err(io::Error::from(io::ErrorKind::WriteZero).into());
            }
            match Replies(BufReader::new(stream)).next().await? {
                ControlReply::Ok => Ok(()),
                ControlReply::Error { message } => Err(AttachError::Refused(message)),
                _ => Err(io::Error::from(io::ErrorKind::InvalidData).into()),
            }
        };
        timeout(ATTACH, attached).await.unwrap_or(Err(AttachError::Silent))
    }

    async fn ask(&self, request: &ControlRequest) -> io::Result<Replies> {
        let mut stream = UnixStream::connect(&self.path).await?;
        stream.write_all(&line(request)?).await?;
        Ok(Replies(BufReader::new(stream)))
    }
}

fn line(request: &ControlRequest) -> io::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(request)?;
    line.push(b'\n');
    Ok(line)
}

/// A change of the guest's memory that the VMM has taken on.
#[derive(Debug)]
pub(crate) struct Resizing {
    replies: Replies,
    begun: Instant,
    reached: Reached,
}

/// How much the guest has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Reached {
    memory_mib: u32,
    /// It is what was requested last, by whomever.
    is_last: bool,
}

impl Reached {
    fn of(reply: ControlReply, requested_mib: u32) -> Result<Self, ResizeError> {
        match reply {
            ControlReply::Ok => Ok(Self { memory_mib: requested_mib, is_last: true }),
            ControlReply::Memory { memory_mib } => Ok(Self { memory_mib, is_last: false }),
            ControlReply::Error { message } => Err(ResizeError::Refused(message)),
            ControlReply::Counts { .. } | ControlReply::Devices(_) => {
                Err(io::Error::from(io::ErrorKind::InvalidData).into())
            }
        }
    }
}

impl Resizing {
    /// Waits until the guest has a size within these, MiB, or the one that was requested last. Returns what it has.
    pub(crate) async fn reach(mut self, enough: RangeInclusive<u32>) -> Result<u32, ResizeError> {
        let reached = async {
            while !self.reached.is_last && !enough.contains(&self.reached.memory_mib) {
                self.reached = Reached::of(self.replies.next().await?, *enough.end())?;
            }
            Ok(self.reached.memory_mib)
        };
        match timeout(RESIZE.saturating_sub(self.begun.elapsed()), reached).await {
            Ok(done) => done,
            Err(_) => Err(ResizeError::Late { reached_mib: self.reached.memory_mib }),
        }
    }
}

/// What comes back.
#[derive(Debug)]
struct Replies(BufReader<UnixStream>);

impl Replies {
    async fn next(&mut self) -> io::Result<ControlReply> {
        let mut line = Vec::new();
        if (&mut self.0).take(MAX_LINE).read_until(b'\n', &mut line).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(serde_json::from_slice(&line)?)
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::UnixListener;

    use super::*;

    /// What becomes of a wish for 512 MiB, of which `least` are enough, where the VMM answers this, and then stays
    /// connected or not.
    async fn resized(answer: &str, least: u32, stays: bool) -> Result<u32, ResizeError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let vmm = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = String::new();
            BufReader::new(&mut stream).read_line(&mut request).await.unwrap();
            assert_eq!(request, "{\"op\":\"resize\",\"memory_mib\":512}\n");
            stream.write_all(answer.as_bytes()).await.unwrap();
            stays.then_some(stream)
        };
        let control = Control::new(path);
        let resized = async { control.resize(512).await?.reach(least..=512).await };
        let (resized, _stream) = tokio::join!(resized, vmm);
        resized
    }

    const A_PART: &str = "{\"result\":\"memory\",\"memory_mib\":384}\n";

    #[tokio::test]
    async fn memory_is_there_when_the_vmm_says_so() {
        let answers = format!("{A_PART}{{\"result\":\"ok\"}}\n");
        assert_eq!(resized(&answers, 512, true).await.unwrap(), 512);
        assert_eq!(resized(A_PART, 384, true).await.unwrap(), 384);
        // An earlier request was for more than this one, and the guest has not returned it yet.
        let more = A_PART.replace("384", "640");
        assert!(matches!(resized(&more, 384, false).await, Err(ResizeError::Io(_))));
        resized(&format!("{more}{A_PART}"), 384, true).await.unwrap();
        let refused = "{\"result\":\"error\",\"message\":\"no room\"}\n";
        assert_eq!(resized(refused, 512, true).await.unwrap_err().to_string(), "the VMM refuses: no room");
        for illegal in ["{\"result\":\"memory\"", "", "{\"result\":\"counts\",\"shares\":[]}\n"] {
            assert!(matches!(resized(illegal, 512, false).await, Err(ResizeError::Io(_))), "{illegal}");
        }
        assert!(matches!(resized(&"x".repeat(5000), 512, true).await, Err(ResizeError::Io(_))));
    }

    #[tokio::test(start_paused = true)]
    async fn a_guest_that_takes_none_is_not_waited_for_without_end() {
        let late = resized(A_PART, 512, true).await.unwrap_err();
        assert_eq!(late.to_string(), "the guest reached only 384 MiB within 60 s");
        let silent = resized("", 512, true).await.unwrap_err();
        assert_eq!(silent.to_string(), "the VMM did not answer within 60 s");
    }
}
