//! Reads of the host that can hang with its storage or network.

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::{Mutex, OwnedMutexGuard},
    time::timeout,
};

use crate::process::error::TaskError;

/// Reads of one thing, of which at most one goes on.
#[derive(Debug, Default)]
pub(super) struct HostReads(Arc<Mutex<()>>);

impl HostReads {
    /// Waits for `read`, but not longer than this. `read` keeps its turn until nothing more is done, also after it was
    /// given up. Until then no other one begins: it would only hang too, in one more thread.
    pub(super) async fn read<T, E: Into<TaskError>>(
        &self,
        what: &'static str,
        longest: Duration,
        read: impl AsyncFnOnce(OwnedMutexGuard<()>) -> Result<T, E>,
    ) -> Result<T, TaskError> {
        let late = || TaskError::Timeout { what, seconds: longest.as_secs() };
        let turn = Arc::clone(&self.0).try_lock_owned().map_err(|_| late())?;
        timeout(longest, read(turn)).await.map_err(|_| late())?.map_err(Into::into)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::host::blocking;

    const LONGEST: Duration = Duration::from_secs(10);

    #[tokio::test(start_paused = true)]
    async fn a_read_that_hangs_is_given_up_and_no_other_one_begins_until_it_ends() {
        let reads = HostReads::default();
        let (go_on, waits) = mpsc::channel::<()>();
        let (ended, ends) = mpsc::channel();
        let hangs = async |turn| {
            let read = move || {
                _ = waits.recv();
                drop(turn);
                _ = ended.send(());
            };
            blocking::run(read, drop).await
        };
        let late = "the scan did not end within 10 s";
        assert_eq!(reads.read("scan", LONGEST, hangs).await.unwrap_err().to_string(), late);
        let other = reads.read("scan", LONGEST, async |_| -> Result<(), TaskError> { panic!("it begins") });
        assert_eq!(other.await.unwrap_err().to_string(), late);
        drop(go_on);
        ends.recv_timeout(Duration::from_secs(5)).unwrap();
        let next = reads.read("scan", LONGEST, async |_| Ok::<_, TaskError>(7));
        assert_eq!(next.await.unwrap(), 7);
    }
}
