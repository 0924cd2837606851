//! The VMM's control socket.

use std::{io, path::PathBuf, time::Duration};

use bulkhead_vmm_api::{ControlReply, ControlRequest};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::UnixStream,
};

/// How long a guest may take until its memory has another size. It plugs a GiB in a few milliseconds, and puts one into
/// its balloon in a fraction of a second. On an emulated host both take seconds.
const RESIZE: Duration = Duration::from_secs(60);

/// How long a VMM may take to be told that directories were unmounted.
const CLOSE: Duration = Duration::from_secs(2);

/// The longest line that is read of a VMM, which its guest may have taken over.
const MAX_LINE: u64 = 4096;

/// Why the memory of a VM has not the size that was requested.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ResizeError {
    #[error("cannot send the request to the VMM")]
    Io(#[from] io::Error),
    #[error("the VMM refuses: {0}")]
    Refused(String),
    #[error("the guest reached only {reached_mib} MiB within {} s", RESIZE.as_secs())]
    Late { reached_mib: u32 },
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
        match tokio::time::timeout(CLOSE, asked).await {
            Ok(Ok(ControlReply::Ok)) => Ok(()),
            Ok(Ok(_)) => Err(io::ErrorKind::InvalidData.into()),
            Ok(Err(error)) => Err(error),
            Err(_) => Err(io::ErrorKind::TimedOut.into()),
        }
    }

    /// Changes the memory of the VM from `present_mib` to `memory_mib`, and returns when the guest has that.
    pub(crate) async fn resize(&self, memory_mib: u32, present_mib: u32) -> Result<(), ResizeError> {
        let mut reached_mib = present_mib;
        match tokio::time::timeout(RESIZE, self.resize_in_time(memory_mib, &mut reached_mib)).await {
            Ok(resized) => resized,
            Err(_) => Err(ResizeError::Late { reached_mib }),
        }
    }

    async fn resize_in_time(&self, memory_mib: u32, reached_mib: &mut u32) -> Result<(), ResizeError> {
        let mut replies = self.ask(&ControlRequest::Resize { memory_mib }).await?;
        loop {
            match replies.next().await? {
                ControlReply::Ok => return Ok(()),
                ControlReply::Memory { memory_mib } => *reached_mib = memory_mib,
                ControlReply::Error { message } => return Err(ResizeError::Refused(message)),
                ControlReply::Counts { .. } => return Err(io::Error::from(io::ErrorKind::InvalidData).into()),
            }
        }
    }

    async fn ask(&self, request: &ControlRequest) -> io::Result<Replies> {
        let mut stream = UnixStream::connect(&self.path).await?;
        let mut line = serde_json::to_vec(request)?;
        line.push(b'\n');
        stream.write_all(&line).await?;
        Ok(Replies(BufReader::new(stream)))
    }
}

/// What comes back.
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

    /// What becomes of a wish for 512 MiB where the VMM answers this, and then stays connected or not.
    async fn resized(answer: &str, stays: bool) -> Result<(), ResizeError> {
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
        let (resized, _stream) = tokio::join!(control.resize(512, 256), vmm);
        resized
    }

    #[tokio::test]
    async fn memory_is_there_when_the_vmm_says_so() {
        let answers = "{\"result\":\"memory\",\"memory_mib\":384}\n{\"result\":\"ok\"}\n";
        resized(answers, true).await.unwrap();
        let refused = resized("{\"result\":\"error\",\"message\":\"no room\"}\n", true).await.unwrap_err();
        assert_eq!(refused.to_string(), "the VMM refuses: no room");
        assert!(matches!(resized("{\"result\":\"memory\"", false).await, Err(ResizeError::Io(_))));
        assert!(matches!(resized("", false).await, Err(ResizeError::Io(_))));
        assert!(matches!(resized(&"x".repeat(5000), true).await, Err(ResizeError::Io(_))));
    }

    #[tokio::test(start_paused = true)]
    async fn a_guest_that_takes_none_is_not_waited_for_without_end() {
        let late = resized("{\"result\":\"memory\",\"memory_mib\":384}\n", true).await.unwrap_err();
        assert_eq!(late.to_string(), "the guest reached only 384 MiB within 60 s");
    }
}
