//! The agent in the guest: connections to it, and its service.

mod clock;
mod frames;
mod running_containers;
mod silence;
#[cfg(test)]
mod tests;

use std::{
    collections::HashMap,
    fs::File,
    io::{self, Read},
    net::SocketAddr,
    os::unix::ffi::OsStrExt,
    path::Path,
    sync::Arc,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use bulkhead_agent_api::{API_VERSION, MAX_PIDS, RPC_PORT, agent, agent_ttrpc::AgentClient};
use bulkhead_vmm_api::SharedSocket;
use tokio::io::{AsyncRead, AsyncWrite};
use ttrpc::{
    r#async::{Client, transport::Socket},
    context::{Context, with_duration},
};

use self::{frames::CheckedStream, silence::Silence};
use crate::{
    host::{
        host_socket::HostSocket,
        kubelet_volumes::{Entry, Kind},
        memory_volumes::MemoryVolume,
    },
    types::{exit::Exit, terminal::WindowSize, text::one_line},
    vm::{
        vmm::{ROOTS_TAG, SHARE_TAG},
        vsock::{Vsock, VsockError},
    },
};

/// The deadline of calls that set something up in the guest. Hosts that are emulated, or start all of their pods at
/// once, are slow.
const SETUP: Duration = Duration::from_secs(60);

/// The deadline of calls that only read or signal.
const QUICK: Duration = Duration::from_secs(if cfg!(test) { 2 } else { 10 });

/// The deadline of a list of processes. containerd waits for it for 5 s when it is restarted, and then ends the shim.
const LIST: Duration = Duration::from_secs(3);

/// The deadline of statistics. containerd asks all tasks of a node one after the other, and kubelet waits for it.
const STATS: Duration = Duration::from_secs(2);

/// How much later than the shim the agent gives up a call.
const AGENT_DEADLINE: Duration = Duration::from_secs(1);

/// Length of the seed of the guest's random number generator (agent.proto, StartSandboxRequest).
const ENTROPY: u64 = 64;

/// The largest exit status (agent.proto, WaitProcessResponse).
const LAST_STATUS: u32 = 255;

/// signal(7).
pub(crate) const SIGKILL: u32 = 9;
pub(crate) const SIGTERM: u32 = 15;

/// A call to the agent that failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AgentError {
    #[error("no connection to the guest's agent")]
    Connect(#[from] VsockError),
    /// The agent's answer, for the user.
    #[error("{message}")]
    Refused { code: ttrpc::Code, message: String },
    #[error("the guest's agent does not answer {call} in time")]
    Timeout { call: &'static str },
    #[error("the guest's agent has not answered for {seconds} s, so it is not asked: {call}")]
    Silent { call: &'static str, seconds: u64 },
    #[error("the guest's agent does not answer {call}: {reason}")]
    Disconnected { call: &'static str, reason: String },
    #[error("cannot read /dev/urandom")]
    Entropy(#[source] io::Error),
}

/// A container for the agent to make (agent.proto, CreateContainerRequest).
#[derive(Debug, Clone, Copy)]
pub(crate) struct NewContainer<'a> {
    pub(crate) id: &'a str,
    pub(crate) spec_json: &'a [u8],
    pub(crate) joined: &'a [agent::JoinedNamespace],
    pub(crate) pause: bool,
    pub(crate) no_new_keyring: bool,
    pub(crate) host_sockets: &'a [Arc<HostSocket>],
}

/// Who has connected to a socket of the host, as the guest says.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Peer {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

/// The exit of a process, and the out-of-memory kills in its container until then.
#[derive(Debug)]
pub(crate) struct End {
    pub(crate) exit: Exit,
    pub(crate) oom: agent::OomCounts,
}

/// What a guest has of its host, whatever the specs of its containers say.
#[derive(Debug, Default)]
pub(crate) struct HostSettings {
    /// By their names below /proc/sys.
    pub(crate) kernel_parameters: HashMap<String, String>,
    /// The processes and threads that all containers may have together. None: no limit.
    pub(crate) tasks: Option<u64>,
}

/// The agent's service. Clones share one connection.
#[derive(Clone)]
pub(crate) struct Agent {
    client: AgentClient,
    silence: Arc<Silence>,
}

impl std::fmt::Debug for Agent {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Agent")
    }
}

impl Agent {
    /// Connects to an agent that is ready.
    pub(crate) async fn connect(vsock: &Vsock) -> Result<Self, AgentError> {
        Ok(Self::over(vsock.connect(RPC_PORT).await?))
    }

    /// The agent at the other end of a connection.
    pub(crate) fn over(stream: impl AsyncRead + AsyncWrite + Send + Sync + Unpin + 'static) -> Self {
        let client = Client::new(Socket::new(CheckedStream::new(stream)));
        Self { client: AgentClient::new(client), silence: Arc::default() }
    }

    /// Gives the guest its identity. Returns the release of its kernel.
    pub(crate) async fn start_sandbox(
        &self,
        id: &str,
        hostname: &str,
        of_host: HostSettings,
    ) -> Result<String, AgentError> {
        let mut request = agent::StartSandboxRequest::new();
        request.api_version = API_VERSION;
        request.sandbox_id = id.into();
        request.hostname = hostname.into();
        request.entropy = entropy().map_err(AgentError::Entropy)?;
        (request.share_tag, request.roots_tag) = (SHARE_TAG.into(), ROOTS_TAG.into());
        request.kernel_parameters = of_host.kernel_parameters;
        request.tasks = of_host.tasks.map_or(0, |tasks| tasks.max(1));
        request.clock_unix_ns = unix_ns(SystemTime::now());
        let answer =
            self.call("StartSandbox", SETUP, |context| self.client.start_sandbox(context, &request)).await?;
        Ok(one_line(&answer.kernel_release))
    }

    /// Makes a volume in memory, unless there is one of this name.
    pub(crate) async fn make_volume(&self, volume: &MemoryVolume) -> Result<(), AgentError> {
        let mut request = agent::MakeVolumeRequest::new();
        request.name = volume.name.clone();
        (request.bytes, request.mode) = (volume.bytes, volume.mode);
        (request.uid, request.gid) = (volume.uid, volume.gid);
        request.huge_pages = volume.huge_pages;
        self.call("MakeVolume", SETUP, |context| self.client.make_volume(context, &request)).await.map(drop)
    }

    /// Brings the files of a volume in memory to these.
    pub(crate) async fn write_volume(&self, name: &str, entries: Vec<Entry>) -> Result<(), AgentError> {
        let mut request = agent::WriteVolumeRequest::new();
        request.name = name.into();
        request.entries = entries.into_iter().map(volume_entry).collect();
        self.call("WriteVolume", SETUP, |context| self.client.write_volume(context, &request)).await.map(drop)
    }

    /// Loads a binary policy of AppArmor, in which this profile is, however long that takes.
    pub(crate) async fn load_apparmor_policy(&self, profile: &str, policy: &[u8]) -> Result<(), AgentError> {
        let mut request = agent::LoadAppArmorPolicyRequest::new();
        (request.profile, request.policy) = (profile.into(), policy.into());
        let answer = self.client.load_app_armor_policy(Context::default(), &request).await;
        self.heard("LoadAppArmorPolicy", answer).map(drop)
    }

    /// Sets up a container up to its process's execve.
    pub(crate) async fn create_container(
        &self,
        container: NewContainer<'_>,
        stdio: agent::Stdio,
    ) -> Result<(), AgentError> {
        let mut request = agent::CreateContainerRequest::new();
        request.container_id = container.id.into();
        request.spec_json = container.spec_json.to_vec();
        request.stdio = Some(stdio).into();
        request.joined = container.joined.to_vec();
        request.pause = container.pause;
        request.no_new_keyring = container.no_new_keyring;
        request.host_sockets = container.host_sockets.iter().map(|socket| description(socket)).collect();
        self.call("CreateContainer", SETUP, |context| self.client.create_container(context, &request))
            .await
            .map(drop)
    }

    /// Moves a network card of the guest into the network namespace of a container, and sets it up as this interface.
    pub(crate) async fn configure_network(
        &self,
        id: &str,
        mut interface: agent::ConfigureNetworkRequest,
    ) -> Result<(), AgentError> {
        interface.container_id = id.into();
        self.call("ConfigureNetwork", SETUP, |context| self.client.configure_network(context, &interface))
            .await
            .map(drop)
    }

    /// Changes an interface in the network namespace of a container.
    pub(crate) async fn change_network(
        &self,
        id: &str,
        mut change: agent::ChangeNetworkRequest,
    ) -> Result<(), AgentError> {
        change.interface.mut_or_insert_default().container_id = id.into();
        self.call("ChangeNetwork", SETUP, |context| self.client.change_network(context, &change))
            .await
            .map(drop)
    }

    /// Changes the rules of policy routing in the network namespace of a container.
    pub(crate) async fn change_routing(
        &self,
        id: &str,
        mut change: agent::ChangeRoutingRequest,
    ) -> Result<(), AgentError> {
        change.container_id = id.into();
        self.call("ChangeRouting", SETUP, |context| self.client.change_routing(context, &change))
            .await
            .map(drop)
    }

    /// Takes a network card out of the network namespace of a container.
    pub(crate) async fn remove_network(&self, id: &str, card: [u8; 6]) -> Result<(), AgentError> {
        let mut request = agent::RemoveNetworkRequest::new();
        request.container_id = id.into();
        request.card = card.into();
        self.call("RemoveNetwork", SETUP, |context| self.client.remove_network(context, &request))
            .await
            .map(drop)
    }

    /// Connects a stream with a TCP port of the loopback interface in a container's network namespace.
    pub(crate) async fn connect_loopback(
        &self,
        id: &str,
        address: SocketAddr,
        stream: u32,
    ) -> Result<(), AgentError> {
        let mut request = agent::ConnectLoopbackRequest::new();
        request.container_id = id.into();
        request.port = address.port().into();
        request.ipv6 = address.is_ipv6();
        request.stream = stream;
        self.call("ConnectLoopback", QUICK, |context| self.client.connect_loopback(context, &request))
            .await
            .map(drop)
    }

    /// Serves docker's name server in a container's network namespace, by what the stream's other end answers.
    pub(crate) async fn serve_name_server(&self, id: &str, stream: u32) -> Result<(), AgentError> {
        let mut request = agent::ServeNameServerRequest::new();
        request.container_id = id.into();
        request.stream = stream;
        self.call("ServeNameServer", SETUP, |context| self.client.serve_name_server(context, &request))
            .await
            .map(drop)
    }

    /// Listens at a socket of the host that is at this place in the share.
    pub(crate) async fn listen_host_socket(
        &self,
        index: u32,
        place: &Path,
        socket: &SharedSocket,
        datagrams: bool,
    ) -> Result<(), AgentError> {
        let mut request = agent::ListenHostSocketRequest::new();
        (request.index, request.datagrams) = (index, datagrams);
        request.path = place.as_os_str().as_bytes().into();
        (request.major, request.minor, request.inode) = (socket.major, socket.minor, socket.inode);
        self.call("ListenHostSocket", QUICK, |context| self.client.listen_host_socket(context, &request))
            .await
            .map(drop)
    }

    /// Listens there no more.
    pub(crate) async fn close_host_socket(&self, index: u32) -> Result<(), AgentError> {
        let mut request = agent::CloseHostSocketRequest::new();
        request.index = index;
        self.call("CloseHostSocket", QUICK, |context| self.client.close_host_socket(context, &request))
            .await
            .map(drop)
    }

    /// Waits until a process of the container connects to the socket of the host that is mounted at this index, for as
    /// long as it takes. An empty id stands for the pod, and the index for that of [`Self::listen_host_socket`]. The
    /// agent forwards the connection on the stream. A socket of datagrams is given once, and at once.
    pub(crate) async fn accept_host_socket(
        &self,
        id: &str,
        index: usize,
        stream: u32,
    ) -> Result<Peer, AgentError> {
        let mut request = agent::AcceptHostSocketRequest::new();
        request.container_id = id.into();
        request.index = index as u32;
        request.stream = stream;
        let answer = self.client.accept_host_socket(Context::default(), &request).await;
        let answer = self.heard("AcceptHostSocket", answer)?;
        Ok(Peer { uid: answer.uid, gid: answer.gid })
    }

    /// Lets the container's init execute its program.
    pub(crate) async fn start_container(&self, id: &str) -> Result<(), AgentError> {
        let mut request = agent::StartContainerRequest::new();
        request.container_id = id.into();
        self.call("StartContainer", SETUP, |context| self.client.start_container(context, &request))
            .await
            .map(drop)
    }

    /// Runs one more process in a container; returns after its execve.
    pub(crate) async fn exec_process(
        &self,
        id: &str,
        exec_id: &str,
        process_json: Vec<u8>,
        stdio: agent::Stdio,
    ) -> Result<(), AgentError> {
        let mut request = agent::ExecProcessRequest::new();
        request.container_id = id.into();
        request.exec_id = exec_id.into();
        request.process_json = process_json;
        request.stdio = Some(stdio).into();
        self.call("ExecProcess", SETUP, |context| self.client.exec_process(context, &request)).await.map(drop)
    }

    /// Waits for the end of the container's init, for as long as it takes.
    pub(crate) async fn wait(&self, id: &str) -> Result<End, AgentError> {
        self.wait_exec(id, "").await
    }

    /// Waits for the end of a process that was added to the container; the agent forgets it then.
    pub(crate) async fn wait_exec(&self, id: &str, exec_id: &str) -> Result<End, AgentError> {
        let mut request = agent::WaitProcessRequest::new();
        request.container_id = id.into();
        request.exec_id = exec_id.into();
        let answer = self.client.wait_process(Context::default(), &request).await;
        let answer = self.heard("WaitProcess", answer)?;
        // The host's clock, not the guest's, which the guest can set.
        let exit = Exit { status: answer.exit_status.min(LAST_STATUS), at: SystemTime::now() };
        Ok(End { exit, oom: answer.oom.unwrap_or_default() })
    }

    /// Signals the container's init, or each of its processes.
    pub(crate) async fn signal(&self, id: &str, signal: u32, all: bool) -> Result<(), AgentError> {
        let mut request = agent::SignalProcessRequest::new();
        request.container_id = id.into();
        request.signal = signal;
        request.all = all;
        self.call("SignalProcess", QUICK, |context| self.client.signal_process(context, &request))
            .await
            .map(drop)
    }

    /// Signals a process that was added to the container.
    pub(crate) async fn signal_exec(&self, id: &str, exec_id: &str, signal: u32) -> Result<(), AgentError> {
        let mut request = agent::SignalProcessRequest::new();
        request.container_id = id.into();
        request.exec_id = exec_id.into();
        request.signal = signal;
        self.call("SignalProcess", QUICK, |context| self.client.signal_process(context, &request))
            .await
            .map(drop)
    }

    /// Sets the size of the terminal of the container's init, for which `exec_id` is empty, or of a process that was
    /// added to the container.
    pub(crate) async fn resize(&self, id: &str, exec_id: &str, size: WindowSize) -> Result<(), AgentError> {
        let mut request = agent::ResizeTerminalRequest::new();
        request.container_id = id.into();
        request.exec_id = exec_id.into();
        request.width = size.width.into();
        request.height = size.height.into();
        self.call("ResizeTerminal", QUICK, |context| self.client.resize_terminal(context, &request))
            .await
            .map(drop)
    }

    /// The container's processes, by their ids in the guest's root pid namespace.
    pub(crate) async fn list_pids(&self, id: &str) -> Result<Vec<u32>, AgentError> {
        let mut request = agent::ListPidsRequest::new();
        request.container_id = id.into();
        let ask = |client: AgentClient, context| async move { client.list_pids(context, &request).await };
        let answer = self.query("ListPids", LIST, ask).await?;
        let mut pids = answer.pids;
        pids.truncate(MAX_PIDS);
        Ok(pids)
    }

    /// Deletes a container in the guest. A container that was never started is killed first.
    pub(crate) async fn delete_container(&self, id: &str) -> Result<(), AgentError> {
        let mut request = agent::DeleteContainerRequest::new();
        request.container_id = id.into();
        self.call("DeleteContainer", QUICK, |context| self.client.delete_container(context, &request))
            .await
            .map(drop)
    }

    /// Ends all processes of the guest and writes back its dirty data.
    pub(crate) async fn shutdown(&self, within: Duration) -> Result<(), AgentError> {
        let nothing = agent::Empty::new();
        self.call("Shutdown", within, |context| self.client.shutdown(context, &nothing)).await.map(drop)
    }

    /// Returns an error unless the agent answers now. Asks in any case: if it does not, the VM may be killed.
    pub(crate) async fn ping(&self) -> Result<(), AgentError> {
        // No container has this id. A refusal is an answer.
        let request = agent::ListPidsRequest::new();
        match self.call("ListPids", LIST, |context| self.client.list_pids(context, &request)).await {
            Ok(_) | Err(AgentError::Refused { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Makes a call that has a deadline. The deadline is kept here; the context's is a little later, for the agent.
    async fn call<T, F: Future<Output = ttrpc::Result<T>>>(
        &self,
        name: &'static str,
        within: Duration,
        make: impl FnOnce(Context) -> F,
    ) -> Result<T, AgentError> {
        let asked = Instant::now();
        match tokio::time::timeout(within, make(with_duration(within + AGENT_DEADLINE))).await {
            // If this process stood still as well, both deadlines have passed. Then the client reports its own one, as
            // an error of the connection.
            Ok(Err(error)) if !matches!(error, ttrpc::Error::RpcStatus(_)) && asked.elapsed() >= within => {
                Err(AgentError::Timeout { call: name })
            }
            Ok(answer) => self.heard(name, answer),
            Err(_) => Err(AgentError::Timeout { call: name }),
        }
    }

    /// What the agent has answered. After it queries are made again.
    fn heard<T>(&self, call: &'static str, answer: ttrpc::Result<T>) -> Result<T, AgentError> {
        let heard = answer.map_err(|error| failed(call, error));
        if !matches!(heard, Err(AgentError::Timeout { .. })) {
            self.silence.end();
        }
        heard
    }
}

fn description(socket: &HostSocket) -> agent::HostSocket {
    let mut description = agent::HostSocket::new();
    // A spec has not as many mounts.
    description.index = socket.index as u32;
    (description.mode, description.uid, description.gid) = (socket.mode, socket.uid, socket.gid);
    description.datagrams = socket.datagrams;
    description
}

fn volume_entry(entry: Entry) -> agent::VolumeEntry {
    let mut message = agent::VolumeEntry::new();
    let Entry { path, mode, uid, gid, modified_unix_ns, kind } = entry;
    (message.path, message.mode, message.uid, message.gid) = (path, mode, uid, gid);
    message.modified_unix_ns = modified_unix_ns;
    match kind {
        Kind::Directory => message.set_directory(agent::Empty::new()),
        Kind::File(content) => message.set_file(content),
        Kind::Link(target) => message.set_link(target),
    }
    message
}

fn failed(call: &'static str, error: ttrpc::Error) -> AgentError {
    match error {
        // Both sides of the connection know the deadline, and either of them may report it.
        ttrpc::Error::RpcStatus(status) if status.code() == ttrpc::Code::DEADLINE_EXCEEDED => {
            AgentError::Timeout { call }
        }
        ttrpc::Error::RpcStatus(status) => {
            AgentError::Refused { code: status.code(), message: one_line(&status.message) }
        }
        other => AgentError::Disconnected { call, reason: other.to_string() },
    }
}

fn entropy() -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open("/dev/urandom")?.take(ENTROPY).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Nanoseconds since 1970.
fn unix_ns(time: SystemTime) -> i64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
}
