//! The guest's copies of volumes that kubelet keeps up to date. The containers of a pod that mount the same volume have
//! the same copy.

use std::{
    collections::HashMap,
    convert::Infallible,
    error::Error,
    io,
    sync::{Arc, Weak},
    time::Duration,
};

use tokio::{
    sync::Mutex,
    task::AbortHandle,
    time::{Instant, sleep, timeout},
};

use super::host_reads::HostReads;
use crate::{
    host::{
        blocking,
        kubelet_volumes::{Budget, KubeletVolume, MOST_VOLUME_BYTES},
        memory_volumes::MemoryVolume,
    },
    process::{error::TaskError, running_guest::Guest},
    types::{
        error::chain,
        log_limit::{LogLimit, Logged},
    },
};

/// The time between two copies of one volume. Whoever can write to it has no more effect than this.
const PAUSE: Duration = Duration::from_secs(1);

/// When a copy that has failed is tried again, unless an event comes first.
const AGAIN: Duration = Duration::from_secs(30);

/// Versions for which a copy has room: the new one, the one that it replaces, and two old ones of which processes have
/// files open.
const VERSIONS: u64 = 4;

/// How long the host may take to read a volume.
const READ: Duration = Duration::from_secs(30);

/// Lines in a window of the log.
const LOGGED: u32 = 5;
const LOG_WINDOW: Duration = Duration::from_secs(600);

/// The copies of a pod.
#[derive(Debug, Default)]
pub(crate) struct VolumeCopies {
    pub(crate) budget: Budget,
    /// Those that are kept up to date, by the names of the volumes.
    followed: Mutex<HashMap<String, Weak<Followed>>>,
}

/// A copy that is kept up to date until all of its containers have dropped this.
#[derive(Debug)]
pub(crate) struct Followed {
    copy: Arc<Copy>,
    task: AbortHandle,
}

#[derive(Debug)]
struct Copy {
    guest: Guest,
    budget: Budget,
    volume: Arc<KubeletVolume>,
    /// The digest of what the guest certainly has.
    sent: Mutex<Option<u64>>,
    reads: HostReads,
}

impl VolumeCopies {
    /// Has the guest make a copy of this volume, or tries to bring the one that it has up to date.
    pub(crate) async fn follow(
        &self,
        guest: &Guest,
        volume: &Arc<KubeletVolume>,
    ) -> Result<Arc<Followed>, TaskError> {
        let mut followed = self.followed.lock().await;
        if let Some(present) = followed.get(&volume.name).and_then(Weak::upgrade) {
            // Otherwise the container has what the others have, until the next attempt.
            if let Err(error) = present.copy.update().await {
                present.copy.log(&error);
            }
            return Ok(present);
        }
        let copy = Arc::new(Copy {
            guest: guest.clone(),
            budget: self.budget.clone(),
            volume: Arc::clone(volume),
            sent: Mutex::default(),
            reads: HostReads::default(),
        });
        copy.make().await?;
        copy.update().await?;
        let following = Arc::clone(&copy);
        let task = tokio::spawn(async move {
            tokio::select! {
                Err(error) = following.follow() => following.log(&error),
                _ = following.guest.vm.exited() => {}
            }
        });
        let made = Arc::new(Followed { copy, task: task.abort_handle() });
        followed.retain(|_, followed| followed.strong_count() > 0);
        followed.insert(volume.name.clone(), Arc::downgrade(&made));
        Ok(made)
    }
}

#[cfg(test)]
impl VolumeCopies {
    /// How many volumes are followed.
    pub(crate) async fn followed(&self) -> usize {
        self.followed.lock().await.values().filter(|followed| followed.strong_count() > 0).count()
    }
}

impl Drop for Followed {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Copy {
    /// Makes the copy without its files, unless the guest has one from an earlier container.
    async fn make(&self) -> Result<(), TaskError> {
        let empty = MemoryVolume {
            name: self.volume.name.clone(),
            huge_pages: false,
            bytes: VERSIONS * MOST_VOLUME_BYTES,
            mode: 0o755,
            uid: 0,
            gid: 0,
            part: Default::default(),
        };
        Ok(self.guest.agent.make_volume(&empty).await?)
    }

    /// Brings the copy to what the volume has now.
    async fn update(&self) -> Result<(), TaskError> {
        let mut sent = self.sent.lock().await;
        let volume = Arc::clone(&self.volume);
        let read = async |turn| blocking::run(move || (volume.read(), turn).0, drop).await;
        let read = self.reads.read("reading of a volume", READ, read).await?;
        let failed = |source| TaskError::Volume { path: self.volume.path.clone(), source };
        let contents = read.map_err(failed)?;
        let digest = contents.digest();
        if *sent == Some(digest) {
            return Ok(());
        }
        self.budget.take(&self.volume.name, contents.size).map_err(failed)?;
        *sent = None;
        self.guest.agent.write_volume(&self.volume.name, contents.entries).await?;
        *sent = Some(digest);
        Ok(())
    }

    /// Follows the volume. Ends only if its events cannot be read.
    async fn follow(&self) -> io::Result<Infallible> {
        let mut log = LogLimit::new(LOGGED, LOG_WINDOW);
        let mut changes = self.volume.changes()?;
        let mut is_copied = true;
        loop {
            match is_copied {
                true => changes.next().await?,
                false => timeout(AGAIN, changes.next()).await.unwrap_or(Ok(()))?,
            }
            let updated = self.update().await;
            is_copied = updated.is_ok();
            if let Err(error) = updated
                && log.count(Instant::now()) != Logged::No
            {
                self.log(&error);
            }
            sleep(PAUSE).await;
        }
    }

    fn log(&self, error: &(dyn Error + 'static)) {
        tracing::warn!(
            path = %self.volume.path.display(),
            error = chain(error),
            "containers keep the files that a volume had before"
        );
    }
}
