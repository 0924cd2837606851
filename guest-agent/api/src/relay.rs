//! A connection that the shim and the agent forward together. Each of them copies between its two sides.

use std::{io, os::fd::AsFd, time::Duration};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
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

/// What the shim sends first on the stream of a connection to a service of the host: the service has accepted it.
pub const CONNECTED: u8 = 1;

/// Copies both ways until both have ended, one has failed, or only one has ended and the other is silent. The last is
/// an error of the kind `TimedOut`.
pub async fn relay(
    one: impl AsyncRead + AsyncWrite + Unpin,
    other: impl AsyncRead + AsyncWrite + Unpin,
) -> io::Result<()> {
    relay_while(one, other, || false).await
}

/// The same, but after the client has sent its last byte the server may be silent for as long as both `are_there`. The
/// client of a Unix socket may ask in this way for something that takes hours (`docker run`).
pub async fn relay_while(
    client: impl AsyncRead + AsyncWrite + Unpin,
    server: impl AsyncRead + AsyncWrite + Unpin,
    are_there: impl Fn() -> bool,
) -> io::Result<()> {
    let (mut client, mut server) = (split(client), split(server));
    let (to_server, to_client) = (watch::Sender::new(false), watch::Sender::new(false));
    tokio::try_join!(
        copy(&mut client.0, &mut server.1, &to_server, to_client.subscribe(), || false),
        copy(&mut server.0, &mut client.1, &to_client, to_server.subscribe(), are_there),
    )?;
    Ok(())
}

/// Whether the process at the other end of a Unix socket has closed it, and not only one of both ways.
pub fn is_closed(socket: impl AsFd) -> bool {
    let mut sockets = [PollFd::new(socket.as_fd(), PollFlags::empty())];
    let polled = poll(&mut sockets, PollTimeout::ZERO);
    let ended = PollFlags::POLLHUP | PollFlags::POLLERR;
    polled.is_err() || sockets.iter().any(|it| it.revents().is_some_and(|came| came.intersects(ended)))
}

/// Copies one way, and says at the `end` that it has ended. `reverse` says that of the other way. If the other way has
/// ended and this one is silent, it is given up unless it `may_be_silent`.
async fn copy(
    from: &mut (impl AsyncRead + Unpin),
    to: &mut (impl AsyncWrite + Unpin),
    end: &watch::Sender<bool>,
    mut reverse: watch::Receiver<bool>,
    may_be_silent: impl Fn() -> bool,
) -> io::Result<()> {
    let mut buffer = Vec::with_capacity(BUFFER);
    loop {
        buffer.clear();
        let is_half_open = *reverse.borrow_and_update();
        let read = tokio::select! {
            read = from.read_buf(&mut buffer) => read?,
            Ok(()) = reverse.changed(), if !is_half_open => continue,
            () = sleep(HALF_OPEN), if is_half_open => match may_be_silent() {
                true => continue,
                false => return Err(io::ErrorKind::TimedOut.into()),
            },
        };
        if read == 0 {
            end.send_replace(true);
            return to.shutdown().await;
        }
        to.write_all(&buffer).await?;
    }
}
