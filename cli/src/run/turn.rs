//! Starts wait for one another: as many VMs start at the same time as the host has processors. More would only make
//! each of them slow, and the shim gives up a guest that is too slow.

use std::{
    io,
    num::NonZero,
    os::{
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixListener},
    },
    thread,
    time::{Duration, Instant},
};

use tokio::time::sleep;

/// How often a turn is tried.
const PAUSE: Duration = Duration::from_millis(20);

/// How long a start waits at most. Any program of the host can take the names, so they only delay it.
const LONGEST: Duration = Duration::from_secs(300);

/// One of the starts that happen now, until it is dropped: a name of an abstract socket (unix(7)). The kernel frees it
/// when this command ends, however it ends, and no file is left.
#[derive(Debug)]
pub(super) struct Turn {
    _name: Option<UnixListener>,
}

impl Turn {
    /// Waits for a turn.
    pub(super) async fn take() -> Self {
        let most = thread::available_parallelism().map_or(1, NonZero::get);
        Self::take_of("bulkhead-run-start", most, LONGEST).await
    }

    async fn take_of(name: &str, most: usize, longest: Duration) -> Self {
        let begun = Instant::now();
        loop {
            for number in 0..most {
                match bind(&format!("{name}-{number}")) {
                    Err(e) if e.kind() == io::ErrorKind::AddrInUse => {}
                    // An error: without names, nothing has to wait.
                    bound => return Self { _name: bound.ok() },
                }
            }
            if begun.elapsed() > longest {
                return Self { _name: None };
            }
            sleep(PAUSE).await;
        }
    }
}

fn bind(name: &str) -> io::Result<UnixListener> {
    UnixListener::bind_addr(&SocketAddr::from_abstract_name(name)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_start_waits_until_another_has_ended() {
        let name = format!("bulkhead-test-{}", std::process::id());
        let take = async |longest| Turn::take_of(&name, 2, Duration::from_millis(longest)).await;
        let (one, other) = (take(0).await, take(0).await);
        assert!(one._name.is_some() && other._name.is_some());
        // It does not wait for ever.
        assert!(take(1).await._name.is_none());
        let freed = async {
            sleep(Duration::from_millis(30)).await;
            drop(one);
        };
        let (third, ()) = tokio::join!(take(10_000), freed);
        assert!(third._name.is_some());
    }
}
