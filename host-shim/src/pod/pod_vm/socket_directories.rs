//! Services of the host whose sockets are in directories that the containers of a pod mount. Each socket at which a
//! service listens has one in the guest, at which the agent listens (`guest-agent/src/host_sockets/in_directories.rs`).
//! A service that is started again has another socket, which is found when the directory changes.

use std::{
    collections::HashMap,
    convert::Infallible,
    error::Error,
    ffi::OsString,
    future::pending,
    io::{self, ErrorKind},
    mem,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use bulkhead_agent_api::MAX_DIRECTORY_SOCKETS;
use bulkhead_vmm_api::SharedSocket;
use rustix::time::{ClockId, clock_gettime};
use tokio::{
    runtime::Handle,
    sync::{Notify, OwnedSemaphorePermit, Semaphore, oneshot, watch},
    task::JoinSet,
    time::{sleep, timeout},
};

use super::host_sockets::{Clients, Connections, Service, new_log, unless};
use crate::{
    guest::agent::AgentError,
    host::{
        blocking,
        directory_watch::{Changes, Watch},
        host_socket::{Confinement, HostSocket},
        socket_directory::{Found, Known, Listing, SocketDirectory},
    },
    process::running_guest::Guest,
    types::{error::chain, lock::lock, log_limit::SharedLogLimit},
};

/// The time between two reads of one directory. Whoever can write to it has no more effect than this.
const PAUSE: Duration = if cfg!(test) { Duration::from_millis(100) } else { Duration::from_secs(1) };

/// When to look again, unless an event comes first: after something has failed, and while there are sockets that no
/// process has bound.
const AGAIN: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 30 });

/// How long the host may take to read a directory.
const READ: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 30 });

/// How many directories of a pod are read at the same time. A read that hangs keeps one of the shim's threads.
const MOST_READS: usize = 4;

/// For each second that a read has used of a processor, this many seconds follow without another one. With
/// [`MOST_READS`], all reads of a pod use at most an eighth of a processor, whatever the containers make in the
/// directories.
const REST: u32 = 32;

/// How long a container waits until its directories have been read.
const FIRST_LOOK: Duration = Duration::from_secs(10);

/// The most directories of a pod that are followed. Each takes one of the 128 inotify instances that the kernel allows
/// the shim's user by default. Volumes that kubelet keeps up to date take the others.
const MOST_DIRECTORIES: usize = 64;

/// Lines in a window of the log. Whoever can write to a directory brings them about.
const LOGGED: u32 = 5;
const LOG_WINDOW: Duration = Duration::from_secs(600);

/// The directories of a pod.
#[derive(Debug)]
pub(crate) struct SocketDirectories {
    /// The configuration says that none is followed (`directory_sockets`).
    is_off: AtomicBool,
    pod: Pod,
    /// Those that are followed, by their places in the share.
    followed: tokio::sync::Mutex<HashMap<PathBuf, Weak<Followed>>>,
}

/// What the directories of a pod share.
#[derive(Debug, Clone)]
struct Pod {
    connections: Connections,
    /// The reads that there may be at the same time.
    looks: Arc<Semaphore>,
    /// The sockets that there may be.
    room: Arc<Semaphore>,
    /// The number of the next socket. None is used twice.
    next: Arc<AtomicU32>,
    /// Lines about sockets that are served, about directories, and about connections.
    served: SharedLogLimit,
    directories: SharedLogLimit,
    connecting: SharedLogLimit,
}

/// Those of the containers that mount a directory. All of them reach a socket at which the agent listens in it, and a
/// connection does not tell which one has made it. So they must have the same AppArmor profile.
#[derive(Debug, Default)]
pub(super) struct Confinements(Mutex<Vec<Weak<Confinement>>>);

impl Confinements {
    /// That of one container, until what is returned is dropped.
    fn add(&self, confinement: &Confinement) -> Arc<Confinement> {
        let confinement = Arc::new(confinement.clone());
        let mut all = lock(&self.0);
        all.retain(|other| other.strong_count() > 0);
        all.push(Arc::downgrade(&confinement));
        confinement
    }

    /// The one of a container in which a process may have this user and this group, if there is one.
    pub(super) fn of(&self, uid: u32, gid: u32) -> io::Result<Arc<Confinement>> {
        let all: Vec<_> = lock(&self.0).iter().filter_map(Weak::upgrade).collect();
        if all.iter().any(|other| other.profile != all[0].profile) {
            let reason =
                "the containers of the pod that mount its directory have different AppArmor profiles";
            return Err(io::Error::new(ErrorKind::Unsupported, reason));
        }
        let able = all.iter().find(|confinement| confinement.allows(uid, gid)).or(all.first());
        able.cloned().ok_or_else(|| ErrorKind::NotConnected.into())
    }
}

/// The directories of a container, which are followed until this is dropped.
#[derive(Debug)]
pub(crate) struct Mounted {
    _directories: Vec<MountedOne>,
}

#[derive(Debug)]
struct MountedOne {
    followed: Arc<Followed>,
    /// That of the container.
    _confinement: Arc<Confinement>,
}

/// A directory that is followed until all of its containers have dropped this.
#[derive(Debug)]
struct Followed {
    confinements: Arc<Confinements>,
    /// Dropped with this, which ends the task.
    _stop: oneshot::Sender<Infallible>,
    has_looked: watch::Receiver<bool>,
}

impl SocketDirectories {
    /// `connections` are those of the pod.
    pub(crate) fn new(connections: &Connections) -> Self {
        let pod = Pod {
            connections: connections.clone(),
            looks: Arc::new(Semaphore::new(MOST_READS)),
            room: Arc::new(Semaphore::new(MAX_DIRECTORY_SOCKETS)),
            next: Arc::default(),
            served: SharedLogLimit::new(MAX_DIRECTORY_SOCKETS as u32, LOG_WINDOW),
            directories: SharedLogLimit::new(LOGGED, LOG_WINDOW),
            connecting: new_log(),
        };
        Self { is_off: AtomicBool::new(false), pod, followed: Default::default() }
    }

    /// No directory is followed from now on.
    pub(crate) fn turn_off(&self) {
        self.is_off.store(true, Ordering::Relaxed);
    }

    /// Follows these directories for a container. Returns when it finds the services that are there now. None: it
    /// mounts no directories, or none is followed.
    pub(crate) async fn follow(
        &self,
        guest: &Guest,
        directories: &[Arc<SocketDirectory>],
        confinement: &Confinement,
    ) -> Option<Mounted> {
        if directories.is_empty() || self.is_off.load(Ordering::Relaxed) {
            return None;
        }
        let mut mounted = Vec::new();
        for directory in directories {
            mounted.extend(self.follow_one(guest, directory, confinement).await);
        }
        let looked = async {
            for one in &mounted {
                // An error: the VM has ended.
                _ = one.followed.has_looked.clone().wait_for(|has_looked| *has_looked).await;
            }
        };
        // The container does without those that are found later.
        _ = timeout(FIRST_LOOK, looked).await;
        Some(Mounted { _directories: mounted })
    }

    /// None: there are too many.
    async fn follow_one(
        &self,
        guest: &Guest,
        directory: &Arc<SocketDirectory>,
        confinement: &Confinement,
    ) -> Option<MountedOne> {
        let mut all = self.followed.lock().await;
        let known = all.get(&directory.place).and_then(Weak::upgrade);
        let followed = match known {
            Some(followed) => followed,
            None => {
                all.retain(|_, followed| followed.strong_count() > 0);
                if all.len() >= MOST_DIRECTORIES {
                    self.pod.note(directory, &ServeError::TooManyDirectories);
                    return None;
                }
                let followed = Arc::new(Follower::start(guest.clone(), directory, &self.pod));
                all.insert(directory.place.clone(), Arc::downgrade(&followed));
                followed
            }
        };
        let confinement = followed.confinements.add(confinement);
        Some(MountedOne { followed, _confinement: confinement })
    }
}

impl Pod {
    fn note(&self, directory: &SocketDirectory, error: &(dyn Error + 'static)) {
        if self.directories.allows() {
            tracing::warn!(
                path = %directory.path.display(),
                error = chain(error),
                "containers do not reach services of the host in a directory"
            );
        }
    }
}

/// What becomes of the sockets of a directory in the guest.
trait Listeners: Clone + Send + Sync + 'static {
    /// Has the agent listen at the socket that is at this place in the share.
    fn listen(
        &self,
        index: u32,
        place: &Path,
        socket: &SharedSocket,
        datagrams: bool,
    ) -> impl Future<Output = Result<(), AgentError>> + Send;

    /// Has the agent listen there no more, even if it was only asked to.
    fn close(&self, index: u32) -> impl Future<Output = Result<(), AgentError>> + Send;

    /// Connects those who come with the service. Accepts nothing more after `closed`.
    fn serve(
        &self,
        socket: Arc<HostSocket>,
        pod: &Pod,
        clients: Clients,
        closed: impl Future<Output = ()> + Send + 'static,
    ) -> impl Future<Output = ()> + Send + 'static;

    /// Waits for the end of the VM.
    fn ended(&self) -> impl Future<Output = ()> + Send;
}

impl Listeners for Guest {
    async fn listen(
        &self,
        index: u32,
        place: &Path,
        socket: &SharedSocket,
        datagrams: bool,
    ) -> Result<(), AgentError> {
        self.agent.listen_host_socket(index, place, socket, datagrams).await
    }

    async fn close(&self, index: u32) -> Result<(), AgentError> {
        self.agent.close_host_socket(index).await
    }

    fn serve(
        &self,
        socket: Arc<HostSocket>,
        pod: &Pod,
        clients: Clients,
        closed: impl Future<Output = ()> + Send + 'static,
    ) -> impl Future<Output = ()> + Send + 'static {
        let service = Service {
            guest: self.clone(),
            clients,
            socket,
            connections: pod.connections.clone(),
            log: pod.connecting.clone(),
        };
        async move { service.run(closed).await }
    }

    async fn ended(&self) {
        self.vm.exited().await;
    }
}

/// How long this thread has used a processor.
fn thread_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

/// Follows one directory.
struct Follower<G> {
    guest: G,
    directory: Arc<SocketDirectory>,
    pod: Pod,
    confinements: Arc<Confinements>,
    /// Locked while the host is asked, however long that takes.
    looking: Arc<tokio::sync::Mutex<()>>,
    /// None: it is not watched yet, or no more after an error.
    changes: Option<(Arc<Watch>, Changes)>,
    /// The sockets at which the agent listens.
    served: HashMap<SharedSocket, Served>,
    /// What the agent may know, and shall not. It is asked until it has answered.
    closing: Vec<Number>,
    /// Also those of sockets that are gone, until their connections have ended.
    services: JoinSet<()>,
    /// The sockets of the services. The last reference to one is dropped elsewhere: to close one without a name may
    /// take long.
    sockets: Vec<Arc<HostSocket>>,
    /// Hears of connections that have failed, perhaps because nobody listens any more.
    failed: Arc<Notify>,
}

/// A socket at which the agent listens.
struct Served {
    name: OsString,
    number: Number,
    /// Dropped with this, which tells the service to accept nothing more.
    _open: oneshot::Sender<Infallible>,
}

/// The number by which the agent knows a socket, and the right to have one.
#[derive(Clone)]
struct Number {
    index: u32,
    _room: Arc<OwnedSemaphorePermit>,
}

/// Why a socket is not served.
#[derive(Debug, thiserror::Error)]
enum ServeError {
    #[error("the pod has {MAX_DIRECTORY_SOCKETS} other sockets of the host in its directories")]
    TooMany,
    #[error("the pod mounts {MOST_DIRECTORIES} other directories of the host")]
    TooManyDirectories,
    #[error(transparent)]
    Agent(#[from] AgentError),
}

impl<G: Listeners> Follower<G> {
    /// Follows the directory until that is dropped.
    fn start(guest: G, directory: &Arc<SocketDirectory>, pod: &Pod) -> Followed {
        let (stop, stopped) = oneshot::channel();
        let (looked, has_looked) = watch::channel(false);
        let confinements = Arc::<Confinements>::default();
        let follower = Self {
            guest,
            directory: Arc::clone(directory),
            pod: pod.clone(),
            confinements: Arc::clone(&confinements),
            looking: Arc::default(),
            changes: None,
            served: HashMap::new(),
            closing: Vec::new(),
            services: JoinSet::new(),
            sockets: Vec::new(),
            failed: Arc::default(),
        };
        tokio::spawn(follower.run(stopped, looked));
        Followed { confinements, _stop: stop, has_looked }
    }

    async fn run(mut self, stopped: oneshot::Receiver<Infallible>, looked: watch::Sender<bool>) {
        let guest = self.guest.clone();
        tokio::select! {
            never = self.follow(&looked) => match never {},
            _ = stopped => {}
            () = guest.ended() => {}
        }
        // Nothing of the host stays open while the guest is asked.
        self.services.shutdown().await;
        drop(blocking::drop_elsewhere((mem::take(&mut self.sockets), self.changes.take())));
        self.closing.extend(self.served.drain().map(|(_, served)| served.number));
        let close = async {
            while self.close().await.is_err() {
                sleep(AGAIN).await;
            }
        };
        unless(guest.ended(), close).await;
    }

    async fn follow(&mut self, looked: &watch::Sender<bool>) -> Infallible {
        loop {
            let again = match self.look().await {
                Ok(again) => again,
                Err(error) => self.begin_anew(&error),
            };
            looked.send_replace(true);
            sleep(PAUSE).await;
            let changed = match again {
                true => timeout(AGAIN, self.changed()).await.unwrap_or(Ok(())),
                false => self.changed().await,
            };
            if let Err(error) = changed {
                self.begin_anew(&error);
                sleep(AGAIN).await;
            }
        }
    }

    /// Sockets that are served stay so. Returns whether to look again without an event.
    fn begin_anew(&mut self, error: &io::Error) -> bool {
        drop(blocking::drop_elsewhere(self.changes.take()));
        if error.kind() == io::ErrorKind::PermissionDenied {
            // Root may not read every file system: NFS and FUSE have some that only their users can read.
            let path = self.directory.path.display();
            tracing::debug!(%path, error = chain(error), "a directory cannot be searched for sockets");
            return false;
        }
        self.pod.note(&self.directory, error);
        true
    }

    async fn changed(&mut self) -> io::Result<()> {
        let changed = async {
            match &mut self.changes {
                Some((_, changes)) => changes.next().await,
                None => pending().await,
            }
        };
        tokio::select! {
            changed = changed => changed,
            () = self.failed.notified() => Ok(()),
        }
    }

    /// Brings the guest up to date. Returns whether to look again without an event.
    async fn look(&mut self) -> io::Result<bool> {
        let listing = self.list().await?;
        if listing.is_cut {
            // Most directories of this size have nothing to do with services.
            let path = self.directory.path.display();
            tracing::debug!(%path, "there are more names in a directory than are searched for sockets");
        }
        let mut again = listing.has_others;
        if listing.has_more {
            self.pod.note(&self.directory, &ServeError::TooMany);
            again = true;
        }
        if let Some(error) = &listing.failed {
            self.pod.note(&self.directory, error);
            again = true;
        }
        if let Err(error) = self.reconcile(listing).await {
            self.pod.note(&self.directory, &error);
            again = true;
        }
        Ok(again)
    }

    async fn list(&mut self) -> io::Result<Listing> {
        let Ok(alone) = Arc::clone(&self.looking).try_lock_owned() else {
            return Err(io::Error::other("the host has not answered yet what is in it"));
        };
        let watch = match &self.changes {
            Some((watch, _)) => Arc::clone(watch),
            None => {
                let watch = blocking::run(Watch::of_nothing, drop).await.map_err(io::Error::other)??;
                let changes = watch.changes()?;
                let watch = Arc::new(watch);
                self.changes = Some((Arc::clone(&watch), changes));
                watch
            }
        };
        let names = self.served.iter().map(|(id, served)| (*id, served.name.clone()));
        let known = Known { sockets: names.collect(), room: self.pod.room.available_permits() };
        let directory = Arc::clone(&self.directory);
        let turn = Arc::clone(&self.pod.looks).acquire_owned();
        let turn =
            timeout(READ, turn).await.map_err(|_| io::Error::other("the reads of other directories hang"))?;
        // It is never closed.
        let turn = turn.map_err(io::Error::other)?;
        let runtime = Handle::current();
        // It has a thread of its own.
        let look = move || {
            let _alone = alone;
            let listing = directory.look(&watch, &known);
            let used = thread_time();
            runtime.spawn(async move {
                sleep(used * REST).await;
                drop(turn);
            });
            listing
        };
        timeout(READ, blocking::run(look, drop)).await?.map_err(io::Error::other)?
    }

    /// Has the agent listen where services listen, and nowhere else. What fails is done with the next read.
    async fn reconcile(&mut self, Listing { mut known, new, .. }: Listing) -> Result<(), ServeError> {
        self.sweep();
        let path = &self.directory.path;
        let number = |found: Found| {
            let (name, id) = (found.name.clone(), found.id);
            let index = self.pod.next.fetch_add(1, Ordering::Relaxed);
            (name, id, index, Arc::new(found.into_socket(index, path)))
        };
        let new: Vec<_> = new.into_iter().map(number).collect();
        self.sockets.extend(new.iter().map(|(.., socket)| Arc::clone(socket)));
        for (id, mut served) in mem::take(&mut self.served) {
            match known.remove(&id) {
                Some(name) => {
                    served.name = name;
                    self.served.insert(id, served);
                }
                // Its service accepts nothing more. Connections go on.
                None => self.closing.push(served.number),
            }
        }
        let mut result = self.close().await.map_err(ServeError::from);
        for (name, id, index, socket) in new {
            match self.serve(name, id, index, socket).await {
                // Others may be served.
                Err(error @ ServeError::Agent(AgentError::Refused { .. })) => result = Err(error),
                other => other?,
            }
        }
        self.close().await?;
        result
    }

    /// Asks the agent to forget what it may know and shall not.
    async fn close(&mut self) -> Result<(), AgentError> {
        while let Some(number) = self.closing.last() {
            self.guest.close(number.index).await?;
            self.closing.pop();
        }
        Ok(())
    }

    async fn serve(
        &mut self,
        name: OsString,
        id: SharedSocket,
        index: u32,
        socket: Arc<HostSocket>,
    ) -> Result<(), ServeError> {
        let room = Arc::clone(&self.pod.room).try_acquire_owned().map_err(|_| ServeError::TooMany)?;
        let number = Number { index, _room: Arc::new(room) };
        // If this fails or is given up, the agent may listen nevertheless.
        self.closing.push(number.clone());
        self.guest.listen(index, &self.directory.place.join(&name), &id, socket.datagrams).await?;
        self.closing.pop();
        if self.pod.served.allows() {
            tracing::info!(socket = %socket.path.display(), "containers reach a service of the host in a directory");
        }
        let (open, is_open) = oneshot::channel();
        let right = number.clone();
        let closed = async move {
            _ = is_open.await;
            // Another socket may come only when nothing more is accepted at this one.
            drop(right);
        };
        let (confinements, failed) = (Arc::clone(&self.confinements), Arc::clone(&self.failed));
        let clients = Clients::OfDirectory { confinements, failed };
        self.services.spawn(self.guest.serve(socket, &self.pod, clients, closed));
        self.served.insert(id, Served { name, number, _open: open });
        Ok(())
    }

    /// Forgets what has ended.
    fn sweep(&mut self) {
        while self.services.try_join_next().is_some() {}
        let unused: Vec<_> = self.sockets.extract_if(.., |socket| Arc::strong_count(socket) == 1).collect();
        if !unused.is_empty() {
            drop(blocking::drop_elsewhere(unused));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::net::UnixListener};

    use tempfile::TempDir;

    use super::*;
    use crate::types::id_mappings::IdMappings;

    /// A guest that does what a test says.
    #[derive(Clone, Default)]
    struct TestGuest {
        state: Arc<Mutex<State>>,
    }

    #[derive(Default)]
    struct State {
        listened: Vec<(u32, OsString)>,
        closed: Vec<u32>,
        /// Times that it was asked to close a socket without an answer.
        ignored: usize,
        answers_no_listen: bool,
        answers_no_close: bool,
        sockets: Vec<Weak<HostSocket>>,
    }

    impl Listeners for TestGuest {
        async fn listen(
            &self,
            index: u32,
            place: &Path,
            _: &SharedSocket,
            _: bool,
        ) -> Result<(), AgentError> {
            let name = place.file_name().unwrap().to_owned();
            lock(&self.state).listened.push((index, name));
            if lock(&self.state).answers_no_listen {
                pending::<()>().await;
            }
            Ok(())
        }

        async fn close(&self, index: u32) -> Result<(), AgentError> {
            let mut state = lock(&self.state);
            if state.answers_no_close {
                state.ignored += 1;
                return Err(AgentError::Timeout { call: "CloseHostSocket" });
            }
            state.closed.push(index);
            Ok(())
        }

        fn serve(
            &self,
            socket: Arc<HostSocket>,
            _: &Pod,
            _: Clients,
            closed: impl Future<Output = ()> + Send + 'static,
        ) -> impl Future<Output = ()> + Send + 'static {
            lock(&self.state).sockets.push(Arc::downgrade(&socket));
            async move {
                let _kept = socket;
                // It never answers the one that waits for a connection.
                unless(closed, pending()).await;
            }
        }

        async fn ended(&self) {
            pending().await
        }
    }

    struct Story {
        dir: TempDir,
        guest: TestGuest,
        pod: Pod,
        followed: Option<Followed>,
    }

    impl Story {
        fn begin(guest: TestGuest) -> Self {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("services");
            fs::create_dir(&path).unwrap();
            let directory = SocketDirectory { path, share: dir.path().into(), place: "services".into() };
            let pod = SocketDirectories::new(&Connections::default()).pod;
            let followed = Follower::start(guest.clone(), &Arc::new(directory), &pod);
            Self { dir, guest, pod, followed: Some(followed) }
        }

        fn bind(&self, name: &str) -> UnixListener {
            UnixListener::bind(self.dir.path().join("services").join(name)).unwrap()
        }

        /// Waits until this is so.
        async fn until(&self, is_so: impl Fn(&State) -> bool) {
            let wait = async {
                while !is_so(&lock(&self.guest.state)) {
                    sleep(PAUSE / 10).await;
                }
            };
            timeout(Duration::from_secs(15), wait).await.unwrap();
        }

        /// How many services accept.
        fn accepting(&self) -> usize {
            lock(&self.guest.state).sockets.iter().filter(|socket| socket.strong_count() > 0).count()
        }

        fn used_room(&self) -> usize {
            MAX_DIRECTORY_SOCKETS - self.pod.room.available_permits()
        }
    }

    #[tokio::test]
    async fn a_directory_that_could_not_be_read_once_is_still_followed() {
        let story = Story::begin(TestGuest::default());
        let _first = story.bind("first");
        story.until(|state| state.listened.len() == 1).await;
        // For a moment it is somewhere else.
        let (here, away) = (story.dir.path().join("services"), story.dir.path().join("away"));
        fs::rename(&here, &away).unwrap();
        let _other = UnixListener::bind(away.join("other")).unwrap();
        sleep(3 * PAUSE).await;
        fs::rename(&away, &here).unwrap();
        let _second = story.bind("second");
        story.until(|state| state.listened.len() == 3).await;
        assert_eq!((story.accepting(), lock(&story.guest.state).closed.len()), (3, 0));
    }

    #[tokio::test]
    async fn a_directory_waits_for_its_turn_and_its_services_go_on() {
        let story = Story::begin(TestGuest::default());
        let _first = story.bind("first");
        story.until(|state| state.listened.len() == 1).await;
        let hung = Arc::clone(&story.pod.looks).acquire_many_owned(MOST_READS as u32).await.unwrap();
        let _second = story.bind("second");
        sleep(READ + 2 * PAUSE).await;
        assert_eq!(lock(&story.guest.state).listened.len(), 1);
        assert_eq!(story.accepting(), 1);
        drop(hung);
        story.until(|state| state.listened.len() == 2).await;
    }

    #[tokio::test]
    async fn a_guest_that_never_accepts_keeps_nothing_of_sockets_that_are_gone() {
        let story = Story::begin(TestGuest::default());
        for round in 1..=3 {
            let listener = story.bind("service");
            story.until(|state| state.listened.len() == round).await;
            assert_eq!(story.used_room(), 1);
            fs::remove_file(story.dir.path().join("services/service")).unwrap();
            story.until(|state| state.closed.len() == round).await;
            drop(listener);
        }
        // The next read of the directory finds them.
        fs::write(story.dir.path().join("services/file"), "").unwrap();
        story.until(|state| state.sockets.iter().all(|socket| socket.strong_count() == 0)).await;
        assert_eq!(story.used_room(), 0);
    }

    #[tokio::test]
    async fn a_socket_that_the_guest_does_not_close_counts_until_it_does() {
        let story = Story::begin(TestGuest::default());
        let _first = story.bind("first");
        story.until(|state| state.listened.len() == 1).await;
        lock(&story.guest.state).answers_no_close = true;
        fs::remove_file(story.dir.path().join("services/first")).unwrap();
        story.until(|state| state.ignored >= 2).await;
        assert_eq!(story.used_room(), 1);
        lock(&story.guest.state).answers_no_close = false;
        story.until(|state| state.closed == [state.listened[0].0]).await;
        assert_eq!(story.used_room(), 0);
    }

    #[tokio::test]
    async fn a_guest_that_is_asked_to_listen_when_the_directory_is_not_wanted_any_more_is_told() {
        let mut story = Story::begin(TestGuest::default());
        lock(&story.guest.state).answers_no_listen = true;
        let _listener = story.bind("service");
        story.until(|state| state.listened.len() == 1).await;
        story.followed.take();
        story.until(|state| state.closed.len() == 1).await;
        assert_eq!(story.used_room(), 0);
    }

    #[tokio::test]
    async fn more_sockets_than_a_pod_may_have_are_served_when_others_have_gone() {
        let story = Story::begin(TestGuest::default());
        let rest =
            Arc::clone(&story.pod.room).try_acquire_many_owned(MAX_DIRECTORY_SOCKETS as u32 - 1).unwrap();
        let _both = ["one", "other"].map(|name| story.bind(name));
        story.until(|state| state.listened.len() == 1).await;
        sleep(3 * PAUSE).await;
        assert_eq!(lock(&story.guest.state).listened.len(), 1);
        drop(rest);
        story.until(|state| state.listened.len() == 2).await;
    }

    #[test]
    fn containers_with_different_profiles_reach_nothing() {
        let confinements = Confinements::default();
        let with = |profile: Option<&str>| Confinement { profile: profile.map(str::to_owned), ids: None };
        assert!(confinements.of(0, 0).is_err());
        let first = confinements.add(&with(Some("one")));
        let second = confinements.add(&with(Some("one")));
        assert_eq!(*confinements.of(0, 0).unwrap(), with(Some("one")));
        let other = confinements.add(&with(None));
        assert_eq!(confinements.of(0, 0).unwrap_err().kind(), ErrorKind::Unsupported);
        drop((first, second));
        assert_eq!(*confinements.of(0, 0).unwrap(), with(None));
        drop(other);
        assert!(confinements.of(0, 0).is_err());
    }

    #[test]
    fn a_user_is_of_the_container_that_may_have_it() {
        let confinements = Confinements::default();
        let mapped = |first: u32| {
            let options = ["uidmap", "gidmap"].map(|name| format!("{name}=0:{first}:10"));
            Confinement { profile: None, ids: IdMappings::take(0, &mut options.into()).unwrap() }
        };
        let _both = [1000, 2000].map(|first| confinements.add(&mapped(first)));
        assert_eq!(*confinements.of(2003, 2003).unwrap(), mapped(2000));
        // To none, so the connection is refused.
        assert!(!confinements.of(0, 0).unwrap().allows(0, 0));
        let _free = confinements.add(&Confinement::default());
        assert!(confinements.of(0, 0).unwrap().allows(0, 0));
    }
}
