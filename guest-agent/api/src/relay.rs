//! A connection that the shim and the agent forward together. Each of them copies between its two sides.

use std::{io, time::Duration};

use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, split},
    sync::watch,
    time::sleep,
};

/// How long one side may send nothing after the other side has sent its last byte. Otherwise a side that never ends
/// could keep its connections for ever. It is the time for which Linux keeps a half-closed connection that no process
/// uses any more (tcp(7), tcp_fin_timeout).
pub const HALF_OPEN: Duration = Duration::from_secs(60);

/// The buffer for each direction, bytes.
pub const BUFFER: usize = 8 << 10;

/// Copies both ways until both have ended, one has failed, or only one has ended and the other is silent. The last is
/// an error of the kind `TimedOut`.
pub async fn relay(
    one: impl AsyncRead + AsyncWrite + Unpin,
    other: impl AsyncRead + AsyncWrite + Unpin,
) -> io::Result<()> {
    let (mut one, mut other) = (split(one), split(other));
    let (to_other, to_one) = (watch::Sender::new(false), watch::Sender::new(false));
    tokio::try_join!(
        copy(&mut one.0, &mut other.1, &to_other, to_one.subscribe()),
        copy(&mut other.0, &mut one.1, &to_one, to_other.subscribe()),
    )?;
    Ok(())
}

/// Copies one way, and says at the `end` that it has ended. `reverse` says that of the other way.
async fn copy(
    from: &mut (impl AsyncRead + Unpin),
    to: &mut (impl AsyncWrite + Unpin),
    end: &watch::Sender<bool>,
    mut reverse: watch::Receiver<bool>,
) -> io::Result<()> {
    let mut buffer = Vec::with_capacity(BUFFER);
    loop {
        buffer.clear();
        let is_half_open = *reverse.borrow_and_update();
        let read = tokio::select! {
            read = from.read_buf(&mut buffer) => read?,
            Ok(()) = reverse.changed(), if !is_half_open => continue,
            () = sleep(HALF_OPEN), if is_half_open => return Err(io::ErrorKind::TimedOut.into()),
        };
        if read == 0 {
            end.send_replace(true);
            return to.shutdown().await;
        }
        to.write_all(&buffer).await?;
    }
}
