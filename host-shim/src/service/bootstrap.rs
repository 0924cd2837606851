//! `start`: binds the shim's socket, starts the server on it, and tells containerd where it is. A container of a pod
//! has no shim of its own. The answer is the address of its pod's shim.
//!
//! The answer is the bare address, which every containerd up to 2.2 reads. From 2.3 on it says who it starts in a
//! BootstrapParams message on stdin, and reads a BootstrapResult (containerd, docs/runtime-v2.md, "Bootstrap
//! protocol"). Nothing else may be printed: containerd 1.6 to 2.0 read stdout and stderr as one.

use std::{
    fs,
    io::{self, Read},
    os::{
        fd::OwnedFd,
        unix::{
            fs::{DirBuilderExt, PermissionsExt},
            net::{UnixListener, UnixStream},
            process::CommandExt,
        },
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use containerd_shim_protos::bootstrap_api::{BootstrapParams, BootstrapResult, LogLevel};
use protobuf::{Message, well_known_types::any::Any};
use sha2::{Digest, Sha256};

use crate::{
    host::{
        cgroup::{self, CgroupError},
        placeholder_process::PROGRAM,
    },
    pod::{container_role::Role, create_request},
    service::args::Args,
    types::{
        options::{Options, OptionsError},
        request_error::RequestError,
    },
};

/// Where containerd keeps the sockets of shims.
const SOCKETS: &str = "/run/containerd/s";

/// This program. The name in the file system may be that of another version by now.
pub(super) const SELF: &str = "/proc/self/exe";

/// The file in the bundle by which containerd 1.6 finds the shim again after a restart.
const ADDRESS_FILE: &str = "address";

/// The longest input on stdin: containerd's message or the runtime's options.
const MOST_INPUT: u64 = 10 << 20;

/// The version of the Task service for containerd with BootstrapParams: `containerd.task.v3.Task`.
const TASK_VERSION: i32 = 3;

/// Why there is no shim.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StartError {
    #[error("cannot read what containerd says on stdin")]
    Input(#[source] io::Error),
    #[error(transparent)]
    Options(#[from] OptionsError),
    #[error("cannot encode the answer")]
    Answer(#[source] protobuf::Error),
    #[error("cannot make {path}")]
    Sockets { path: PathBuf, source: io::Error },
    #[error("cannot listen on {path}")]
    Bind { path: PathBuf, source: io::Error },
    #[error("cannot start the shim's server")]
    Spawn(#[source] io::Error),
    #[error("cannot move the shim into the cgroup {path} (ShimCgroup)")]
    Cgroup { path: PathBuf, source: CgroupError },
    #[error("cannot write {path}")]
    Address { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Request(#[from] RequestError),
    #[error("the sandbox {sandbox_id} of container {id} does not run")]
    NoSandbox { id: String, sandbox_id: String },
}

/// The socket of the shim of a pod: one name for each containerd, namespace and pod.
pub(crate) fn socket_path(args: &Args) -> PathBuf {
    socket_of(args, &args.id)
}

/// The socket of the shim of the pod `sandbox_id`.
pub(super) fn socket_of(args: &Args, sandbox_id: &str) -> PathBuf {
    let digest = Sha256::digest(format!("{}/{}/{}", args.address, args.namespace, sandbox_id));
    Path::new(SOCKETS).join(format!("{digest:x}"))
}

/// Starts the server of a pod, unless it runs already. Returns its address, in the form that this containerd reads.
pub(crate) fn start(args: &Args) -> Result<Vec<u8>, StartError> {
    let mut input = Vec::new();
    io::stdin().take(MOST_INPUT).read_to_end(&mut input).map_err(StartError::Input)?;
    let params = params(&input, args);
    let mut args = args.clone();
    let options = match &params {
        Some(params) => {
            let values =
                params.extensions.iter().map(|extension| extension.value.clone().unwrap_or_default());
            values.filter(Options::are_in).collect()
        }
        None => Any::parse_from_bytes(&input).into_iter().collect::<Vec<_>>(),
    };
    let mut shim_cgroup = None;
    for options in &options {
        let read = Options::read(options)?;
        args.config = read.config.or(args.config);
        shim_cgroup = read.shim_cgroup.or(shim_cgroup);
    }
    args.debug |=
        params.as_ref().is_some_and(|params| params.log_level.value() <= LogLevel::LOG_LEVEL_DEBUG as i32);
    answer(start_server(&args, shim_cgroup.as_deref())?, params.is_some())
}

/// Reads the message of containerd 2.3. The options that older versions write can be parsed as this message too, but
/// they do not name this shim.
fn params(input: &[u8], args: &Args) -> Option<BootstrapParams> {
    let params = BootstrapParams::parse_from_bytes(input).ok()?;
    (params.instance_id == args.id && params.namespace == args.namespace).then_some(params)
}

fn answer(address: String, has_params: bool) -> Result<Vec<u8>, StartError> {
    if !has_params {
        return Ok(address.into_bytes());
    }
    let mut result = BootstrapResult::new();
    result.version = TASK_VERSION;
    result.address = address;
    result.protocol = "ttrpc".into();
    result.write_to_bytes().map_err(StartError::Answer)
}

fn start_server(args: &Args, shim_cgroup: Option<&Path>) -> Result<String, StartError> {
    let role = create_request::role(&args.namespace, Path::new("."))?;
    if let Role::Member { sandbox_id } = role {
        return join(args, sandbox_id);
    }
    let socket = socket_path(args);
    let address = address_of(&socket);
    let Some(listener) = bind(&socket)? else { return Ok(address) };
    // The server starts last. If the address could not be written, nobody would end it.
    write_address(&address).and_then(|()| spawn_server(args, listener, shim_cgroup)).inspect_err(|_| {
        // Nobody serves the socket.
        drop(fs::remove_file(&socket));
    })?;
    Ok(address)
}

/// containerd before 1.7 asks for a shim for each container of a pod.
fn join(args: &Args, sandbox_id: String) -> Result<String, StartError> {
    let socket = socket_of(args, &sandbox_id);
    if UnixStream::connect(&socket).is_err() {
        return Err(StartError::NoSandbox { id: args.id.clone(), sandbox_id });
    }
    let address = address_of(&socket);
    write_address(&address)?;
    Ok(address)
}

fn address_of(socket: &Path) -> String {
    format!("unix://{}", socket.display())
}

/// Binds the socket. None: a living shim has it.
fn bind(path: &Path) -> Result<Option<UnixListener>, StartError> {
    let directory = path.parent().unwrap_or(Path::new("/"));
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o711)
        .create(directory)
        .map_err(|source| StartError::Sockets { path: directory.into(), source })?;
    let failed = |source| StartError::Bind { path: path.into(), source };
    let listener = match UnixListener::bind(path) {
        Err(e) if e.kind() == io::ErrorKind::AddrInUse => {
            if UnixStream::connect(path).is_ok() {
                return Ok(None);
            }
            // The shim that had it is dead.
            fs::remove_file(path).map_err(failed)?;
            UnixListener::bind(path).map_err(failed)?
        }
        other => other.map_err(failed)?,
    };
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).map_err(failed)?;
    Ok(Some(listener))
}

/// The server gets the listener as its stdin, so that containerd can connect before it runs.
fn spawn_server(args: &Args, listener: UnixListener, shim_cgroup: Option<&Path>) -> Result<(), StartError> {
    let mut command = Command::new(SELF);
    command.arg0(PROGRAM).args(["-namespace", &args.namespace, "-id", &args.id, "-address", &args.address]);
    if args.debug {
        command.arg("-debug");
    }
    if let Some(config) = &args.config {
        command.arg("-config").arg(config);
    }
    let mut server = command
        .arg("serve")
        .stdin(Stdio::from(OwnedFd::from(listener)))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .map_err(StartError::Spawn)?;
    let Some(path) = shim_cgroup else { return Ok(()) };
    cgroup::join(path, server.id()).map_err(|source| {
        // The shim must not run outside of the cgroup that the operator wants.
        drop(server.kill());
        StartError::Cgroup { path: path.into(), source }
    })
}

/// The file is renamed into place, because containerd may read it at any time.
fn write_address(address: &str) -> Result<(), StartError> {
    let temporary = format!(".{ADDRESS_FILE}");
    fs::write(&temporary, address)
        .and_then(|()| fs::rename(&temporary, ADDRESS_FILE))
        .map_err(|source| StartError::Address { path: ADDRESS_FILE.into(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(address: &str, namespace: &str, id: &str) -> Args {
        Args { address: address.into(), namespace: namespace.into(), id: id.into(), ..Args::default() }
    }

    #[test]
    fn who_asks_with_a_message_is_answered_with_one() {
        let args = args("/run/containerd/containerd.sock", "k8s.io", "demo");
        let mut asked = BootstrapParams::new();
        asked.instance_id = "demo".into();
        asked.namespace = "k8s.io".into();
        asked.log_level = protobuf::EnumOrUnknown::from_i32(-8);
        assert_eq!(params(&asked.write_to_bytes().unwrap(), &args), Some(asked));
        let bytes = answer("unix:///run/containerd/s/x".into(), true).unwrap();
        let result = BootstrapResult::parse_from_bytes(&bytes).unwrap();
        assert_eq!((result.version, result.protocol.as_str()), (3, "ttrpc"));
        assert_eq!(result.address, "unix:///run/containerd/s/x");
    }

    #[test]
    fn every_other_containerd_is_answered_with_the_bare_address() {
        let args = args("/run/containerd/containerd.sock", "k8s.io", "demo");
        // The options of a runtime have the same two fields.
        let mut options = protobuf::well_known_types::any::Any::new();
        options.type_url = "runtimeoptions.v1.Options".into();
        options.value = b"k8s.io".into();
        for input in [vec![], b"{}".to_vec(), options.write_to_bytes().unwrap()] {
            assert_eq!(params(&input, &args), None, "{input:?}");
        }
        assert_eq!(answer("unix:///run/x".into(), false).unwrap(), b"unix:///run/x");
    }

    #[test]
    fn each_sandbox_has_a_socket_of_its_own() {
        let path = socket_path(&args("/run/containerd/containerd.sock", "default", "demo"));
        assert_eq!(path.parent(), Some(Path::new(SOCKETS)));
        assert_eq!(path.file_name().unwrap().len(), 64);
        assert_ne!(path, socket_path(&args("/run/containerd/containerd.sock", "default", "demo2")));
        assert_ne!(path, socket_path(&args("/run/containerd/containerd.sock", "k8s.io", "demo")));
        assert_ne!(path, socket_path(&args("/run/other.sock", "default", "demo")));
    }

    #[test]
    fn a_living_shim_keeps_its_socket_and_a_dead_one_loses_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s/socket");
        let listener = bind(&path).unwrap();
        assert!(listener.is_some());
        assert!(bind(&path).unwrap().is_none());
        drop(listener);
        assert!(bind(&path).unwrap().is_some());
    }
}
