//! Services of the host whose sockets are in directories that the containers of a pod mount. Each socket at which a
//! service listens has one in the guest, at which the agent listens (`guest-agent/src/host_sockets/in_directories.rs`).
//! A service that is started again has another socket, which is found when the directory changes.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    convert::Infallible,
    error::Error,
    io::{self, ErrorKind},
    path::PathBuf,
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

use bulkhead_agent_api::MAX_DIRECTORY_SOCKETS;
use bulkhead_vmm_api::SharedSocket;
use tokio::{
    sync::{Notify, OwnedSemaphorePermit, Semaphore, oneshot, watch},
    task::{AbortHandle, JoinSet},
    time::{Instant, sleep, timeout},
};

use super::host_sockets::{Connections, InDirectory, Service};
use crate::{
    guest::agent::AgentError,
    host::{
        blocking,
        socket_directory::{Found, Listing, SocketDirectory},
    },
    process::running_guest::Guest,
    types::{
        error::chain,
        lock::lock,
        log_limit::{LogLimit, Logged},
    },
};

/// The time between two looks at one directory. Whoever can write to it has no more effect than this.
const PAUSE: Duration = Duration::from_secs(1);

/// When to look again, unless an event comes first: after something has failed, and while there are sockets at which
/// nobody listens. No event tells when somebody does.
const AFTER_FAILURE: Duration = Duration::from_secs(3);
const WITH_OTHERS: Duration = Duration::from_secs(30);

/// How long the host may take to read a directory.
const READ: Duration = Duration::from_secs(30);

/// How long a container waits until its directories have been looked at.
const FIRST_LOOK: Duration = Duration::from_secs(10);

/// How long the guest may take to end what it does for a directory that nobody mounts any more.
const CLOSE: Duration = Duration::from_secs(10);

/// Lines in a window of the log. Whoever can write to a directory brings them about.
const LOGGED: u32 = 5;
const LOG_WINDOW: Duration = Duration::from_secs(600);

/// The directories of a pod.
#[derive(Debug)]
pub(crate) struct SocketDirectories {
    pod: Pod,
    /// Those that are followed, by their places in the share.
    followed: tokio::sync::Mutex<HashMap<PathBuf, Weak<Followed>>>,
}

/// What the directories of a pod share.
#[derive(Debug, Clone)]
struct Pod {
    connections: Connections,
    profiles: Arc<Profiles>,
    /// The sockets that there may be.
    room: Arc<Semaphore>,
    /// The number of the next socket. None is used twice.
    next: Arc<AtomicU32>,
}

/// The AppArmor profiles of the containers that mount such directories. All of them reach a socket at which the agent
/// listens, and a connection does not tell which one has made it. So they must have the same profile.
#[derive(Debug, Default)]
pub(super) struct Profiles {
    next: AtomicU64,
    of_containers: Mutex<BTreeMap<u64, Option<String>>>,
}

impl Profiles {
    fn add(self: &Arc<Self>, profile: Option<String>) -> Profile {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        lock(&self.of_containers).insert(number, profile);
        Profile { number, all: Arc::clone(self) }
    }

    /// The profile of all containers.
    pub(super) fn common(&self) -> io::Result<Option<String>> {
        let profiles = lock(&self.of_containers);
        let mut profiles = profiles.values();
        let first = profiles.next().ok_or(ErrorKind::NotConnected)?;
        match profiles.all(|other| other == first) {
            true => Ok(first.clone()),
            false => {
                let reason = "the containers of the pod that mount directories of the host have different AppArmor \
                              profiles";
                Err(io::Error::new(ErrorKind::Unsupported, reason))
            }
        }
    }
}

/// That of one container, until this is dropped.
#[derive(Debug)]
struct Profile {
    number: u64,
    all: Arc<Profiles>,
}

impl Drop for Profile {
    fn drop(&mut self) {
        lock(&self.all.of_containers).remove(&self.number);
    }
}

/// The directories of a container, which are followed until this is dropped.
#[derive(Debug)]
pub(crate) struct Mounted {
    _profile: Profile,
    _followed: Vec<Arc<Followed>>,
}

/// A directory that is followed until all of its containers have dropped this.
#[derive(Debug)]
struct Followed {
    /// Dropped with this, which ends the task.
    _stop: oneshot::Sender<Infallible>,
    has_looked: watch::Receiver<bool>,
}

impl SocketDirectories {
    /// `connections` are those of the pod.
    pub(crate) fn new(connections: &Connections) -> Self {
        let pod = Pod {
            connections: connections.clone(),
            profiles: Arc::default(),
            room: Arc::new(Semaphore::new(MAX_DIRECTORY_SOCKETS)),
            next: Arc::default(),
        };
        Self { pod, followed: Default::default() }
    }

    /// Follows these directories for a container with this AppArmor profile. Returns when it finds the services that
    /// are there now. None: it mounts no directories.
    pub(crate) async fn follow(
        &self,
        guest: &Guest,
        directories: &[Arc<SocketDirectory>],
        profile: Option<&str>,
    ) -> Option<Mounted> {
        if directories.is_empty() {
            return None;
        }
        let profile = self.pod.profiles.add(profile.map(str::to_owned));
        let mut followed = Vec::new();
        for directory in directories {
            followed.push(self.follow_one(guest, directory).await);
        }
        let looked = async {
            for followed in &followed {
                // An error: it was given up.
                _ = followed.has_looked.clone().wait_for(|has_looked| *has_looked).await;
            }
        };
        // The container does without those that are found later.
        _ = timeout(FIRST_LOOK, looked).await;
        Some(Mounted { _profile: profile, _followed: followed })
    }

    async fn follow_one(&self, guest: &Guest, directory: &Arc<SocketDirectory>) -> Arc<Followed> {
        let mut all = self.followed.lock().await;
        if let Some(followed) = all.get(&directory.place).and_then(Weak::upgrade) {
            return followed;
        }
        let (stop, stopped) = oneshot::channel();
        let (looked, has_looked) = watch::channel(false);
        let follower = Follower {
            guest: guest.clone(),
            directory: Arc::clone(directory),
            pod: self.pod.clone(),
            served: HashMap::new(),
            services: JoinSet::new(),
            failed: Arc::default(),
            log: LogLimit::new(LOGGED, LOG_WINDOW),
        };
        tokio::spawn(follower.run(stopped, looked));
        let followed = Arc::new(Followed { _stop: stop, has_looked });
        all.retain(|_, followed| followed.strong_count() > 0);
        all.insert(directory.place.clone(), Arc::downgrade(&followed));
        followed
    }
}

/// Follows one directory.
struct Follower {
    guest: Guest,
    directory: Arc<SocketDirectory>,
    pod: Pod,
    served: HashMap<SharedSocket, Served>,
    /// Also those that are no longer there and still have connections.
    services: JoinSet<()>,
    /// Hears of connections that have failed, perhaps because nobody listens any more.
    failed: Arc<Notify>,
    log: LogLimit,
}

/// A socket at which the agent listens.
struct Served {
    index: u32,
    task: AbortHandle,
    _room: OwnedSemaphorePermit,
}

/// Why a socket is not served.
#[derive(Debug, thiserror::Error)]
enum ServeError {
    #[error("the pod has {MAX_DIRECTORY_SOCKETS} other sockets of the host in its directories")]
    TooMany,
    #[error(transparent)]
    Agent(#[from] AgentError),
}

impl Follower {
    async fn run(mut self, stopped: oneshot::Receiver<Infallible>, looked: watch::Sender<bool>) {
        let guest = self.guest.clone();
        let ended = tokio::select! {
            Err(error) = self.follow(&looked) => Some(error),
            _ = stopped => None,
            _ = guest.vm.exited() => return,
        };
        if let Some(error) = ended {
            self.note(&error);
        }
        // Nothing of the host stays open while the guest is asked.
        let Self { served, mut services, directory, .. } = self;
        services.shutdown().await;
        drop(directory);
        let close = async {
            for Served { index, .. } in served.into_values() {
                _ = guest.agent.close_host_socket(index).await;
            }
        };
        tokio::select! {
            _ = timeout(CLOSE, close) => {}
            _ = guest.vm.exited() => {}
        }
    }

    /// Ends only if the directory cannot be read.
    async fn follow(&mut self, looked: &watch::Sender<bool>) -> io::Result<Infallible> {
        let mut changes = self.directory.changes()?;
        loop {
            let again = self.look().await?;
            looked.send_replace(true);
            sleep(PAUSE).await;
            let changed = async {
                tokio::select! {
                    changed = changes.next() => changed,
                    () = self.failed.notified() => Ok(()),
                }
            };
            match again {
                None => changed.await?,
                Some(again) => timeout(again, changed).await.unwrap_or(Ok(()))?,
            }
        }
    }

    /// Brings the guest up to date. Returns when to look again without an event.
    async fn look(&mut self) -> io::Result<Option<Duration>> {
        let directory = Arc::clone(&self.directory);
        let listed = timeout(READ, blocking::run(move || directory.list(), drop)).await?;
        let Listing { sockets, has_others, is_cut } = listed.map_err(io::Error::other)??;
        let there: HashSet<_> = sockets.iter().map(|found| found.id).collect();
        for (_, served) in self.served.extract_if(|id, _| !there.contains(id)) {
            // Connections go on.
            if self.guest.agent.close_host_socket(served.index).await.is_err() {
                served.task.abort();
            }
        }
        while self.services.try_join_next().is_some() {}
        let mut has_failed = false;
        for found in sockets {
            if !self.served.contains_key(&found.id)
                && let Err(error) = self.serve(found).await
            {
                has_failed = true;
                self.note(&error);
            }
        }
        if is_cut {
            // Most directories of this size have nothing to do with services.
            let path = self.directory.path.display();
            tracing::debug!(%path, "there are more names in a directory than are searched for sockets");
        }
        Ok(has_failed.then_some(AFTER_FAILURE).or(has_others.then_some(WITH_OTHERS)))
    }

    async fn serve(&mut self, found: Found) -> Result<(), ServeError> {
        let room = Arc::clone(&self.pod.room).try_acquire_owned().map_err(|_| ServeError::TooMany)?;
        let (index, id) = (self.pod.next.fetch_add(1, Ordering::Relaxed), found.id);
        let place = self.directory.place.join(&found.name);
        if let Err(error) = self.guest.agent.listen_host_socket(index, &place, &id).await {
            // It may listen nevertheless, if its answer was late.
            _ = self.guest.agent.close_host_socket(index).await;
            return Err(error.into());
        }
        let service = Service {
            guest: self.guest.clone(),
            id: String::new(),
            socket: Arc::new(found.into_socket(index as usize, &self.directory.path)),
            connections: self.pod.connections.clone(),
            in_directory: Some(InDirectory {
                profiles: Arc::clone(&self.pod.profiles),
                failed: Arc::clone(&self.failed),
            }),
        };
        let task = self.services.spawn(async move { service.run().await });
        self.served.insert(id, Served { index, task, _room: room });
        Ok(())
    }

    fn note(&mut self, error: &(dyn Error + 'static)) {
        if self.log.count(Instant::now()) != Logged::No {
            tracing::warn!(
                path = %self.directory.path.display(),
                error = chain(error),
                "containers do not reach services of the host in a directory"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn containers_with_different_profiles_reach_nothing() {
        let profiles = Arc::new(Profiles::default());
        assert!(profiles.common().is_err());
        let first = profiles.add(Some("one".into()));
        let second = profiles.add(Some("one".into()));
        assert_eq!(profiles.common().unwrap(), Some("one".into()));
        let other = profiles.add(None);
        assert_eq!(profiles.common().unwrap_err().kind(), ErrorKind::Unsupported);
        drop((first, second));
        assert_eq!(profiles.common().unwrap(), None);
        drop(other);
        assert!(profiles.common().is_err());
    }
}
