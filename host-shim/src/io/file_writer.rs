//! A file that a thread of its own writes. The thread is there from the beginning, so a host that has no threads left
//! later loses no output. tokio starts a thread for a file when it needs one. If there is none, it panics, and that
//! ends the shim.

use std::{
    fs::File,
    io::{self, Write},
    pin::Pin,
    sync::mpsc,
    task::{Context, Poll, ready},
    thread,
};

use tokio::{io::AsyncWrite, sync::mpsc as async_mpsc};

use crate::host::blocking::STACK;

/// Writes to a file, of which one write may be under way. An error of it is that of the next write or flush.
#[derive(Debug)]
pub(super) struct FileWriter {
    to_write: mpsc::SyncSender<Vec<u8>>,
    written: async_mpsc::Receiver<io::Result<()>>,
    is_writing: bool,
}

impl FileWriter {
    /// The thread ends when this is dropped and the last bytes are written.
    pub(super) fn start(mut file: File) -> io::Result<Self> {
        let (to_write, receiver) = mpsc::sync_channel::<Vec<u8>>(1);
        let (results, written) = async_mpsc::channel(1);
        let write = move || {
            for bytes in receiver {
                // An error: nobody waits for it any more.
                if results.blocking_send(file.write_all(&bytes)).is_err() {
                    return;
                }
            }
        };
        thread::Builder::new().stack_size(STACK).spawn(write)?;
        Ok(Self { to_write, written, is_writing: false })
    }
}

fn ended() -> io::Error {
    io::Error::new(io::ErrorKind::BrokenPipe, "the thread that writes the file has ended")
}

impl AsyncWrite for FileWriter {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        ready!(self.as_mut().poll_flush(context))?;
        // There is room: the last write is done.
        self.to_write.try_send(bytes.to_vec()).map_err(|_| ended())?;
        self.is_writing = true;
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.is_writing {
            return Poll::Ready(Ok(()));
        }
        let written = ready!(self.written.poll_recv(context)).unwrap_or_else(|| Err(ended()));
        self.is_writing = false;
        Poll::Ready(written)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_flush(context)
    }
}
