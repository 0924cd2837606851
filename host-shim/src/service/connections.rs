//! The connections to the shim's socket.

use std::{future::Future, io, time::Duration};

use futures::stream::{self, Stream};

/// How long after a failed accept(2) the next one follows.
const PAUSE: Duration = Duration::from_millis(100);

/// The connections that `accept` returns. While the process has all the descriptors that it may have, accept(2) fails
/// at once and the connection stays in the queue. ttrpc's server tries again without a pause, which takes a whole
/// processor.
pub(super) fn connections<S, A: Future<Output = io::Result<S>>>(
    accept: impl FnMut() -> A,
) -> impl Stream<Item = io::Result<S>> {
    stream::unfold((accept, false), |(mut accept, has_failed)| async move {
        if has_failed {
            tokio::time::sleep(PAUSE).await;
        }
        let accepted = accept().await;
        let has_failed = accepted.is_err();
        Some((accepted, (accept, has_failed)))
    })
}

#[cfg(test)]
mod tests {
    use futures::StreamExt;
    use rustix::io::Errno;
    use tokio::time::Instant;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_shim_without_descriptors_does_not_spin() {
        let begun = Instant::now();
        let mut calls = 0;
        let accepted = connections(|| {
            calls += 1;
            let result = if calls % 11 == 0 { Ok(()) } else { Err(io::Error::from(Errno::MFILE)) };
            std::future::ready(result)
        });
        let results: Vec<_> = accepted.take(12).collect().await;
        assert!(results.iter().filter(|result| result.is_ok()).count() == 1);
        // No pause after the one that succeeded.
        assert_eq!(begun.elapsed(), 10 * PAUSE);
    }
}
