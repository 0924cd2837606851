//! The server: one process for one pod, from containerd's `start` to its Shutdown.

use std::{
    env,
    ffi::CStr,
    fs, io,
    os::{fd::AsFd, unix::net::UnixListener},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use rustix::{
    process::{Resource, Rlimit, getrlimit, setrlimit},
    thread::set_name,
};
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::watch,
};
use ttrpc::r#async::{Server, transport::Listener};

use crate::{
    host::{
        blocking,
        state_dir::{self, STATE_ROOT},
    },
    io::events::Publisher,
    pod::{pod::Pod, pod_vm::Settings},
    service::{
        args::Args,
        bootstrap::{SELF, socket_path},
        connections::{Spare, connections},
        logging,
        sandbox::SandboxService,
        task::TaskService,
    },
    types::config::{CONFIG_PATH, Config},
};

/// How long the last events may take to reach containerd.
const LAST_EVENTS: Duration = Duration::from_secs(3);

/// How long the last answers may take to leave.
const LAST_ANSWERS: Duration = Duration::from_millis(50);

/// How long programs may take to end after SIGTERM. Then the guest may take a minute to write back its data. systemd
/// kills whatever is left 90 s after it has sent SIGTERM (`DefaultTimeoutStopSec`, systemd-system.conf(5)).
const PROGRAMS_END: Duration = Duration::from_secs(20);

/// How often a shim without containers looks whether its bundle still exists.
const LOOK: Duration = Duration::from_secs(10);

/// Files that may be open.
const OPEN_FILES: u64 = 1 << 16;

/// What the kernel keeps of the name of this program: 15 bytes (/proc/PID/comm, proc(5)).
const NAME: &CStr = c"containerd-shim";

/// Why the server ended with an error.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ServeError {
    #[error("stdin is not the shim's socket; this command is for `start` only")]
    Listener(#[source] io::Error),
    #[error("cannot prepare the shim's server")]
    Begin(#[source] io::Error),
    #[error("cannot serve containerd's requests")]
    Serve(#[source] ttrpc::Error),
}

/// Serves until containerd says Shutdown, nobody needs the shim, or a signal comes: SIGINT ends the pod at once, and
/// SIGTERM gives its programs time to end.
pub(crate) fn serve(args: &Args) -> Result<(), ServeError> {
    raise_open_files();
    // The kernel has named it `exe`, after the path by which it was executed. Nothing depends on the name.
    _ = set_name(NAME);
    let spare = Spare::reserve().map_err(ServeError::Begin)?;
    // Away from containerd's own process group and terminal.
    nix::unistd::setsid().map_err(|e| ServeError::Begin(e.into()))?;
    let config = args.config.clone().unwrap_or_else(|| CONFIG_PATH.into());
    let config_of_log = Config::load(&config).unwrap_or_default();
    let level = if args.debug { tracing::Level::DEBUG } else { config_of_log.log_level.into() };
    logging::to_fifo(Path::new("log"), config_of_log.log_format, level, args.debug);
    // If the bundle is gone already, this is a path that does not exist.
    let bundle = env::current_dir().unwrap_or_default();
    // containerd removes the bundle, which must not be the working directory then.
    env::set_current_dir("/").map_err(ServeError::Begin)?;
    let listener = io::stdin().as_fd().try_clone_to_owned().map_err(ServeError::Listener)?;
    let listener = UnixListener::from(listener);
    listener.local_addr().map_err(ServeError::Listener)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(ServeError::Begin)?;
    // Every line of the log names the pod.
    let _span = tracing::error_span!("pod", namespace = args.namespace, id = args.id).entered();
    runtime.block_on(run(args, config, &bundle, listener, spare))
}

/// containerd starts programs with the limit that it has from systemd, mostly 1024. Each process of a container takes
/// up to ten descriptors.
fn raise_open_files() {
    // A refusal leaves what there is.
    _ = setrlimit(Resource::Nofile, raised(getrlimit(Resource::Nofile)));
}

/// Raises the soft limit of open files, but not beyond [`OPEN_FILES`]: a child that closes every possible descriptor
/// would take long.
fn raised(limit: Rlimit) -> Rlimit {
    let most = limit.maximum.unwrap_or(OPEN_FILES).min(OPEN_FILES);
    Rlimit { current: limit.current.map(|current| current.max(most)), ..limit }
}

async fn run(
    args: &Args,
    config: PathBuf,
    bundle: &Path,
    listener: UnixListener,
    spare: Spare,
) -> Result<(), ServeError> {
    let mut terminate = signal(SignalKind::terminate()).map_err(ServeError::Begin)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(ServeError::Begin)?;
    let events = Publisher::start(events_address(args).as_deref(), &args.namespace);
    let settings = Settings {
        containerd: args.address.clone(),
        namespace: args.namespace.clone(),
        id: args.id.clone(),
        state_root: STATE_ROOT.into(),
        config,
        shim: SELF.into(),
        socket: Some(socket_path(args)),
    };
    let pod = Pod::new(settings, events.clone());
    let (done, mut is_done) = watch::channel(false);
    listener.set_nonblocking(true).map_err(ServeError::Begin)?;
    let listener = Arc::new(tokio::net::UnixListener::from_std(listener).map_err(ServeError::Begin)?);
    let listener = Listener::new(connections(spare, move || {
        let listener = Arc::clone(&listener);
        async move { Ok(listener.accept().await?.0) }
    }));
    let mut server = Server::new()
        .add_listener(listener)
        .register_service(TaskService::new(pod.clone(), done.clone()).services())
        .register_service(SandboxService::new(pod.clone(), done).services());
    server.start().await.map_err(ServeError::Serve)?;
    tracing::debug!("serving");
    // The thread is not waited for.
    tokio::spawn(blocking::run(|| state_dir::sweep(Path::new(STATE_ROOT)), drop));

    let end = tokio::select! {
        _ = is_done.wait_for(|done| *done) => "Shutdown",
        () = terminated(&mut terminate, &pod) => "SIGTERM",
        _ = interrupt.recv() => "SIGINT",
        () = is_forgotten(bundle, LOOK, || pod.is_empty()) => "containerd has removed the bundle",
    };
    tracing::info!(reason = end, "the shim ends");
    drop(fs::remove_file(socket_path(args)));
    pod.stop().await;
    events.flush(LAST_EVENTS).await;
    // Pending answers are sent, such as those to clients that wait for the end of a process.
    drop(tokio::time::timeout(LAST_ANSWERS, server.disconnect()).await);
    Ok(())
}

/// Waits for SIGTERM, which a host that shuts down sends to every process, and then until the programs of the pod have
/// ended.
async fn terminated(terminate: &mut Signal, pod: &Pod) {
    terminate.recv().await;
    tracing::info!("SIGTERM: the programs of the pod have {} s to end", PROGRAMS_END.as_secs());
    pod.terminate(PROGRAMS_END).await;
}

/// Waits until containerd has forgotten this shim: it has removed the bundle, and there is no container. If containerd
/// is killed between `start` and Create, it removes the bundle when it starts again, and nobody says Shutdown.
async fn is_forgotten(bundle: &Path, pause: Duration, is_empty: impl Fn() -> bool) {
    loop {
        tokio::time::sleep(pause).await;
        if !is_empty() {
            continue;
        }
        let path = bundle.to_owned();
        // A bundle that cannot be looked at may still exist.
        let exists = blocking::run(move || path.try_exists().unwrap_or(true), drop).await;
        if !exists.unwrap_or(true) && is_empty() {
            return;
        }
    }
}

/// containerd's socket for events, by its environment or by its convention.
fn events_address(args: &Args) -> Option<String> {
    env::var("TTRPC_ADDRESS")
        .ok()
        .filter(|address| !address.is_empty())
        .or_else(|| (!args.address.is_empty()).then(|| format!("{}.ttrpc", args.address)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_shim_is_forgotten_when_its_bundle_is_gone_and_it_has_no_container() {
        let bundle = tempfile::tempdir().unwrap();
        let path = bundle.path().to_owned();
        let is_forgotten_when = async |is_empty: bool| {
            let forgotten = is_forgotten(&path, Duration::from_millis(1), || is_empty);
            tokio::time::timeout(Duration::from_millis(100), forgotten).await.is_ok()
        };
        assert!(!is_forgotten_when(true).await);
        drop(bundle);
        assert!(!is_forgotten_when(false).await);
        is_forgotten(&path, Duration::from_millis(1), || true).await;
    }

    #[test]
    fn the_limit_of_open_files_is_raised_and_never_lowered() {
        let raise = |current, maximum| raised(Rlimit { current, maximum }).current;
        assert_eq!(raise(Some(1024), Some(524_288)), Some(OPEN_FILES));
        assert_eq!(raise(Some(1024), None), Some(OPEN_FILES));
        assert_eq!(raise(Some(1024), Some(4096)), Some(4096));
        assert_eq!(raise(Some(1 << 20), Some(1 << 20)), Some(1 << 20));
        assert_eq!(raise(None, None), None);
    }
}
