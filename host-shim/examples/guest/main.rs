//! A guest without a VM, for the unit tests of the shim: the agent's own service in new namespaces, instead of a VM.
//!
//! The shim starts it as if it were the VMM. It is process 1 of a pid namespace, as the agent is in a guest. It makes
//! real containers from the files of the share. It serves the VMM's vsock socket itself, so its end closes all
//! connections, as the end of a VMM does. Five things differ from a guest: the share is a bind mount, the clock of the
//! machine is compared instead of set, its processors stay online, policy of AppArmor is not loaded, and the memory and
//! tasks of all containers together have no limit. What cannot be real at all is in `filter.rs`.
//!
//! It is an example because only examples and tests may use what is a dependency of the tests. The handle of the tests
//! is `host-shim/src/testing/guest.rs`.

#![deny(unsafe_code)]

mod filter;
mod share;

use std::{
    env,
    error::Error,
    fs,
    io::{self, Write},
    os::unix::{fs::MetadataExt, net::UnixListener as StdUnixListener},
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
    time::{Duration, SystemTime},
};

use bulkhead_agent::{
    cgroup,
    clock::Correction,
    container::Environment,
    disks::FileSystem,
    machine::Machine,
    reaper::Reaper,
    sandbox::Sandbox,
    server::Service,
    stage::{
        launcher::{DEADLINE, Launcher},
        stage_process,
    },
    stage_config::{PAUSE, STAGE},
    streams::StreamTable,
};
use bulkhead_agent_api::{API_VERSION, READY_PORT, RPC_PORT, STREAM_PORT, agent_ttrpc::create_agent};
use bulkhead_vmm_api::{ShareConfig, SharedSocket, VmConfig};
use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
    sys::stat::{Mode, major, minor, umask},
};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    net::{UnixListener, UnixStream},
    sync::mpsc::{UnboundedSender, unbounded_channel},
};
use ttrpc::r#async::{Server, transport::Listener};

use self::filter::Filter;

type Outcome<T> = Result<T, Box<dyn Error>>;

fn main() -> ExitCode {
    if let Some(STAGE | PAUSE) = env::args().next().as_deref() {
        return stage_process::main();
    }
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("guest: {error}");
            ExitCode::FAILURE
        }
    }
}

/// The arguments: a cgroup v2 directory, a file with rules (see [`filter`]), and the VMM's own.
fn run() -> Outcome<()> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [cgroup, rules, _, config] = &arguments[..] else {
        return Err("usage: guest CGROUP RULES --config FILE".into());
    };
    let config: VmConfig = serde_json::from_slice(&fs::read(config)?)?;
    if std::process::id() != 1 {
        return Err("it must be process 1, because it kills all other processes when it ends".into());
    }
    set_up(Path::new(cgroup))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(serve(&config, rules.into()))
}

/// Does for the namespaces of this process what the agent's init does for a guest.
fn set_up(own: &Path) -> Outcome<()> {
    umask(Mode::from_bits_truncate(0o022));
    // The cgroup becomes the root of the hierarchy. No process may be in it, because it divides what it has.
    fs::write(own.join("cgroup.procs"), "0")?;
    unshare(CloneFlags::CLONE_NEWCGROUP)?;
    fs::create_dir(own.join("agent"))?;
    fs::write(own.join("agent/cgroup.procs"), "0")?;
    mount(Some(own), cgroup::ROOT, None::<&str>, MsFlags::MS_BIND, None::<&str>)?;
    mount(Some("proc"), "/proc", Some("proc"), MsFlags::empty(), None::<&str>)?;
    mount(Some("tmpfs"), "/run", Some("tmpfs"), MsFlags::empty(), Some("mode=0755"))?;
    Ok(cgroup::containers::prepare()?)
}

async fn serve(config: &VmConfig, rules: PathBuf) -> Outcome<()> {
    let reaper = Arc::new(Reaper::default());
    let streams = Arc::new(StreamTable::default());
    let launcher =
        Launcher { program: "/proc/self/exe".into(), reaper: Arc::clone(&reaper), deadline: DEADLINE };
    let environment = Environment { launcher, streams: Arc::clone(&streams), reserve: Arc::default() };
    let mut shares = config.shares.clone();
    for share in &mut shares {
        share.dir = fs::canonicalize(&share.dir)?;
    }
    let machine = TestMachine {
        shares,
        processors: rules.with_file_name("processors"),
        policy: rules.with_file_name("policy"),
    };
    let (rpc, mut connections) = unbounded_channel();
    let connections = futures::stream::poll_fn(move |context| connections.poll_recv(context));
    let mut server = Server::new()
        .add_listener(Listener::new(connections))
        .register_service(create_agent(Arc::new(Service::new(Sandbox::new(environment, machine)))));
    server.start().await?;
    let vsock = StdUnixListener::bind(&config.vsock)?;
    vsock.set_nonblocking(true)?;
    let vsock = Vsock { listener: UnixListener::from_std(vsock)?, rpc, streams, rules };
    let mut ready = UnixStream::connect(format!("{}_{READY_PORT}", config.vsock.display())).await?;
    ready.write_u32_le(API_VERSION).await?;
    drop(ready);
    tokio::select! {
        served = vsock.serve() => Ok(served?),
        Err(error) = reaper.run() => Err(error.into()),
    }
}

/// The machine that runs the tests.
struct TestMachine {
    shares: Vec<ShareConfig>,
    /// A file that gets a line for each request for processors: how many are to be online.
    processors: PathBuf,
    /// A file that gets all policy of AppArmor, one after the other.
    policy: PathBuf,
}

impl Machine for TestMachine {
    fn set_clock(&self, since_1970: Duration) -> io::Result<()> {
        const SLOW: Duration = Duration::from_secs(60);
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_err(io::Error::other)?;
        if now.abs_diff(since_1970) < SLOW { Ok(()) } else { Err(io::Error::other("this is another time")) }
    }

    fn mount_share(&self, tag: &str, place: &Path) -> io::Result<()> {
        let share = self.shares.iter().find(|share| share.tag == tag);
        let share = share.ok_or_else(|| io::Error::other(format!("there is no share with the tag {tag}")))?;
        share::mount_from(&share.dir, place)
    }

    fn adjust_clock(&self, correction: Correction) -> io::Result<()> {
        // Both clocks are the same one, but a slow measurement is not exact.
        const INEXACT: u64 = 1_000_000_000;
        if correction.step_ns.unsigned_abs() < INEXACT {
            Ok(())
        } else {
            Err(io::Error::other("the clock is right"))
        }
    }

    fn set_processors(&self, count: u32) -> io::Result<u32> {
        let mut file = fs::File::options().create(true).append(true).open(&self.processors)?;
        writeln!(file, "{count}")?;
        Ok(count)
    }

    fn load_apparmor_policy(&self, policy: &[u8]) -> io::Result<()> {
        fs::File::options().create(true).append(true).open(&self.policy)?.write_all(policy)
    }

    /// No disk is attached to it.
    fn find_disk(&self, serial: &str) -> io::Result<(u32, u32)> {
        Err(io::Error::new(io::ErrorKind::NotFound, format!("no disk has the serial number {serial:?}")))
    }

    fn mount_disk(&self, wanted: &FileSystem) -> io::Result<()> {
        self.find_disk(&wanted.serial).map(drop)
    }

    fn unmount_disk(&self, _: &str) -> io::Result<()> {
        Ok(())
    }

    fn remove_disk(&self, _: &str) -> io::Result<()> {
        Ok(())
    }

    /// The kernel is the host's, whose own services listen at the sockets of the share. So this one is beside them, in
    /// the directory `guest`.
    fn name_to_bind(&self, path: &Path, socket: &SharedSocket) -> io::Result<PathBuf> {
        let found = fs::symlink_metadata(path)?;
        let numbers = (u64::from(socket.major), u64::from(socket.minor), socket.inode);
        let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        if (major(found.dev()), minor(found.dev()), found.ino()) != numbers {
            return Err(io::ErrorKind::NotFound.into());
        }
        let place = directory.join("guest").join(name);
        match fs::remove_file(&place) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        Ok(place)
    }

    /// The files of the share are the machine's own.
    fn write_back(&self) {}
}

/// The VMM's vsock socket.
struct Vsock {
    listener: UnixListener,
    /// For the service.
    rpc: UnboundedSender<io::Result<UnixStream>>,
    streams: Arc<StreamTable>,
    rules: PathBuf,
}

impl Vsock {
    async fn serve(self) -> io::Result<()> {
        loop {
            let (stream, _) = self.listener.accept().await?;
            // A buffer of one byte takes nothing of what follows the line.
            let mut reader = BufReader::with_capacity(1, stream);
            let mut line = String::new();
            reader.read_line(&mut line).await?;
            let mut stream = reader.into_inner();
            let words: Vec<&str> = line.split_whitespace().collect();
            let ports: Vec<u32> = words.iter().filter_map(|word| word.parse().ok()).collect();
            match ports[..] {
                [RPC_PORT] => {
                    stream.write_all(b"OK 7000\n").await?;
                    let (ours, theirs) = UnixStream::pair()?;
                    tokio::spawn(Filter::new(self.rules.clone()).connect(stream, ours));
                    drop(self.rpc.send(Ok(theirs)));
                }
                [STREAM_PORT, id] => {
                    stream.write_all(format!("OK {id}\n").as_bytes()).await?;
                    self.streams.add(id, stream);
                }
                _ => eprintln!("guest: nobody listens for {line:?}"),
            }
        }
    }
}
