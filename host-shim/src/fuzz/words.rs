//! What comes to the shim beside the agent's answers: the ready word, the VMM's answer to CONNECT, a VMM's lines and a
//! process's output.

use std::{fs, path::Path, time::Duration};

use anyhow::{Context, Result, ensure};
use bulkhead_agent_api::{API_VERSION, RPC_PORT, STREAM_PORT};
use bulkhead_fuzz::input::Input;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWriteExt, duplex},
    net::{UnixListener, UnixStream},
    time::timeout,
};

use super::check_text;
use crate::{
    host::child_log::read_lines,
    io::{logger::Source, streams},
    types::{error::chain, stdio_endpoint::Endpoint},
    vm::{vmm, vsock::Vsock},
};

/// What takes this long has hung: nothing here waits for anything but the other side, which ends.
const PATIENCE: Duration = Duration::from_secs(20);

/// What the guest, or a VMM that it has taken over, says at one place.
pub fn words(bytes: &[u8]) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut input = Input::new(bytes);
    runtime.block_on(async {
        let kind = input.below(4);
        let said = Said::read(&mut input);
        let said = async {
            match kind {
                0 => ready(said).await,
                1 => handshake(said).await,
                2 => lines(said).await,
                _ => output(said).await,
            }
        };
        timeout(PATIENCE, said).await.context("the shim waits for ever")?
    })
}

/// Bytes, in pieces.
struct Said(Vec<Vec<u8>>);

impl Said {
    fn read(input: &mut Input<'_>) -> Self {
        let mut pieces = Vec::new();
        while !input.is_over() {
            let count = usize::from(input.u8());
            let times = input.choose(&[1, 1, 1, 300]);
            pieces.push(input.bytes(count).repeat(times));
        }
        Self(pieces)
    }

    fn all(&self) -> Vec<u8> {
        self.0.concat()
    }

    /// Until the shim hears no more.
    async fn say(&self, to: &mut (impl tokio::io::AsyncWrite + Unpin)) {
        for piece in &self.0 {
            if to.write_all(piece).await.is_err() {
                return;
            }
            tokio::task::yield_now().await;
        }
    }
}

async fn ready(said: Said) -> Result<()> {
    let (mut guest, shim) = duplex(1 << 10);
    let speaking = async {
        said.say(&mut guest).await;
        drop(guest);
    };
    let (ready, ()) = tokio::join!(vmm::ready_word(shim), speaking);
    let is_version = said.all().starts_with(&API_VERSION.to_le_bytes());
    ensure!(ready.is_ok() == is_version, "expected  {is_version}\ncame      {ready:?}");
    Ok(())
}

/// A VMM that takes one connection, and answers this to CONNECT.
async fn answer(path: &Path, said: &Said) -> Result<UnixStream> {
    let listener = UnixListener::bind(path)?;
    let (mut stream, _) = listener.accept().await?;
    said.say(&mut stream).await;
    Ok(stream)
}

async fn handshake(said: Said) -> Result<()> {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("vsock");
    let vsock = Vsock::new(path.clone());
    let (answered, connected) = tokio::join!(async { answer(&path, &said).await.map(drop) }, async {
        // After the bind, which does not wait.
        tokio::task::yield_now().await;
        vsock.connect(RPC_PORT).await
    });
    answered?;
    if let Err(error) = &connected {
        check_text(&chain(error))?;
    }
    ensure!(connected.is_err() || said.all().starts_with(b"OK "), "connected by {:?}", said.all());
    Ok(())
}

async fn lines(said: Said) -> Result<()> {
    let (mut vmm, shim) = duplex(1 << 10);
    let speaking = async {
        said.say(&mut vmm).await;
        drop(vmm);
    };
    let (last, ()) = tokio::join!(last_line(shim), speaking);
    check_text(&last)
}

async fn last_line(stderr: impl AsyncRead + Unpin) -> String {
    read_lines("vmm".into(), Some(stderr)).await
}

/// What a process writes comes to the file, all of it.
async fn output(said: Said) -> Result<()> {
    let dir = tempfile::tempdir()?;
    let (path, file) = (dir.path().join("vsock"), dir.path().join("log"));
    let vsock = Vsock::new(path.clone());
    let (nowhere, stdout) = (Endpoint::Nowhere, Endpoint::File(file.clone()));
    let guest = async {
        let mut stream = answer(&path, &Said(vec![b"OK 1\n".to_vec()])).await?;
        // What it was asked: whoever ends before that has no output to lose, and the shim an error.
        stream.read_exact(&mut vec![0; format!("CONNECT {STREAM_PORT} 2\n").len()]).await?;
        said.say(&mut stream).await;
        anyhow::Ok(())
    };
    let shim = async {
        tokio::task::yield_now().await;
        let source = Source { namespace: "default", id: "demo" };
        let mut open =
            streams::open(&vsock, [&nowhere, &stdout, &nowhere], source).await?.connect(&vsock).await?;
        open.streams.drain(PATIENCE).await;
        anyhow::Ok(())
    };
    let (spoken, written) = tokio::join!(guest, shim);
    spoken?;
    written?;
    ensure!(fs::read(&file)? == said.all(), "the output is not what was written");
    Ok(())
}
