//! The control socket. Each request and each reply is a line of JSON (see [`bulkhead_vmm_api`]).
//!
//! The main thread serves the socket and waits for the end of the VM, so nothing here may block. All sockets are
//! non-blocking. The connection of a client is closed if the client sends too long a line, or does not read its
//! replies.

use std::{
    collections::VecDeque,
    fs::File,
    io::{self, IoSliceMut, Write},
    mem::{self, MaybeUninit},
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use bulkhead_vmm_api::{ControlReply, ControlRequest, DeviceCounts, MAX_SERIAL, MOST_QUEUES, ShareCounts};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, recvmsg};
use vmm_sys_util::poll::PollContext;

use crate::config;

/// The most bytes of requests that a client may have sent and that were not handled yet. The longest request has
/// under 200.
const MAX_LINE: usize = 4096;
/// If one more client connects, the oldest connection is closed. So idle clients cannot keep others out.
const MAX_CLIENTS: usize = 8;

/// The pause after a client could not be accepted because the process has no free file descriptors. The socket stays
/// readable meanwhile. Without the pause this thread would spin as long as the guest keeps all descriptors in use.
const PAUSE: Duration = Duration::from_millis(100);

/// Why the control socket could not be created.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    #[error("control: cannot listen at {path} (its directory must exist, the socket must not)")]
    Bind { path: PathBuf, source: io::Error },
    #[error("control: cannot wait for clients")]
    Poll(#[source] vmm_sys_util::errno::Error),
}

/// A request that the VM has to carry out.
#[derive(Debug, PartialEq, Eq)]
pub enum Command {
    /// End the VM.
    Stop,
    /// Save the VM and end it.
    Save,
    /// Close what the host has unmounted.
    CloseUnmounted,
    /// Change the guest's memory to `memory_mib`. The client with this token waits for it. It gets replies by
    /// [`ControlServer::memory_is`] or by [`ControlServer::refuse`].
    Resize { client: u32, memory_mib: u32 },
    /// Count the requests of the guest. The client with this token gets [`ControlServer::counts`].
    Counts { client: u32 },
    /// Say what the devices have done. The client with this token gets [`ControlServer::device_counts`].
    DeviceCounts { client: u32 },
    /// Add a network device with this address. The client with this token has sent the queues of its tap device, which
    /// [`ControlServer::take_files`] returns. It gets [`ControlServer::done`] or [`ControlServer::refuse`].
    AttachNic { client: u32, mac: [u8; 6] },
    /// Add a block device, in the same way.
    AttachBlock { client: u32, disk: DiskRequest },
    /// Take the block device with this serial number away. The client gets the same answers.
    DetachBlock { client: u32, serial: String },
}

/// What a client asks for a block device, whose file it has sent.
#[derive(Debug, PartialEq, Eq)]
pub struct DiskRequest {
    /// At most [`MAX_SERIAL`] bytes.
    pub serial: String,
    /// The guest cannot write.
    pub read_only: bool,
    /// The host's device has a discard command.
    pub discards: bool,
}

/// What the VM supports.
#[derive(Debug, Clone, Copy)]
pub struct Abilities {
    /// The VM can be saved. Then its memory keeps its size, and it gets no more devices, because neither is saved.
    pub can_save: bool,
    /// The most memory that the guest may have.
    pub max_memory_mib: u32,
}

/// The control socket and its clients.
pub struct ControlServer {
    listener: UnixListener,
    abilities: Abilities,
    clients: VecDeque<Client>,
    /// The token of the next client.
    next: u32,
}

struct Client {
    token: u32,
    stream: UnixStream,
    /// Received bytes that were not handled yet: requests that wait for earlier ones, and a part of a request.
    pending: Vec<u8>,
    /// The file descriptors that came with them in one message, for the next request that needs some.
    files: Vec<File>,
    /// Set while the client waits for memory: how far from the requested size the last one was that was reported to it,
    /// in MiB.
    missing_mib: Option<u32>,
}

impl ControlServer {
    /// Listens at `path`.
    pub fn bind(path: &Path, abilities: Abilities) -> Result<Self, ControlError> {
        let error = |source| ControlError::Bind { path: path.to_owned(), source };
        let listener = UnixListener::bind(path).map_err(error)?;
        let server = Self { listener, abilities, clients: VecDeque::new(), next: 0 };
        server.listener.set_nonblocking(true).map_err(error)?;
        Ok(server)
    }

    /// Adds the socket to `poll` with `token`. Its clients will have greater tokens.
    pub fn register(&mut self, poll: &PollContext<u32>, token: u32) -> Result<(), ControlError> {
        self.next = token.saturating_add(1);
        poll.add(&self.listener, token).map_err(ControlError::Poll)
    }

    /// Accepts a client, and adds it to `poll`.
    pub fn accept(&mut self, poll: &PollContext<u32>) {
        let stream = match self.listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) if is_exhausted(&error) => return thread::sleep(PAUSE),
            // The client has closed its end already.
            Err(_) => return,
        };
        let token = self.take_token();
        if stream.set_nonblocking(true).is_err() || poll.add(&stream, token).is_err() {
            return;
        }
        if self.clients.len() == MAX_CLIENTS {
            self.clients.pop_front();
        }
        let (pending, files, missing_mib) = (Vec::new(), Vec::new(), None);
        self.clients.push_back(Client { token, stream, pending, files, missing_mib });
    }

    /// Reads from the client with this token. Closing its socket removes it from `poll`.
    pub fn receive(&mut self, token: u32) {
        self.clients.retain_mut(|client| client.token != token || client.receive().is_ok());
    }

    /// Handles the requests of each client in order, up to one that the VM has to carry out, which is returned. Call
    /// this until it returns None, whenever requests may have arrived or a request may have been carried out.
    pub fn next_command(&mut self) -> Option<Command> {
        let mut index = 0;
        while let Some(client) = self.clients.get_mut(index) {
            match client.next_command(self.abilities) {
                Ok(None) => index += 1,
                Ok(command) => return command,
                Err(_) => drop(self.clients.remove(index)),
            }
        }
        None
    }

    /// The files that the client has sent for its request. None: it is gone, or they were taken.
    pub fn take_files(&mut self, client: u32) -> Option<Vec<File>> {
        let client = self.clients.iter_mut().find(|one| one.token == client)?;
        Some(mem::take(&mut client.files)).filter(|files| !files.is_empty())
    }

    /// Tells a client that its request was carried out.
    pub fn done(&mut self, client: u32) {
        self.reply(client, &ControlReply::Ok);
    }

    /// Tells a client that its request cannot be carried out.
    pub fn refuse(&mut self, client: u32, message: String) {
        self.reply(client, &ControlReply::Error { message });
    }

    /// Tells a client what the guest has requested of the shares.
    pub fn counts(&mut self, client: u32, shares: Vec<ShareCounts>) {
        self.reply(client, &ControlReply::Counts { shares });
    }

    /// Tells a client what the devices have done.
    pub fn device_counts(&mut self, client: u32, counts: DeviceCounts) {
        self.reply(client, &ControlReply::Devices(counts));
    }

    /// Sends a client the last reply to its request.
    fn reply(&mut self, client: u32, reply: &ControlReply) {
        let Some(index) = self.clients.iter().position(|one| one.token == client) else { return };
        let waiting = &mut self.clients[index];
        waiting.missing_mib = None;
        if waiting.reply(reply).is_err() {
            self.clients.remove(index);
        }
    }

    /// Tells the clients that wait for memory how much the guest has now, and how much it was last requested to have.
    pub fn memory_is(&mut self, memory_mib: u32, requested_mib: u32) {
        self.clients.retain_mut(|client| client.memory_is(memory_mib, requested_mib).is_ok());
    }

    fn take_token(&mut self) -> u32 {
        let token = self.next;
        // The tokens end after four thousand million clients.
        self.next = self.next.saturating_add(1);
        token
    }
}

impl Client {
    /// Reads from the socket. After an error the connection is closed.
    fn receive(&mut self) -> io::Result<()> {
        let mut chunk = [0; 512];
        let (read, files) = match receive_with_files(&self.stream, &mut chunk) {
            Ok((0, _)) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(received) => received,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                self.reply(&ControlReply::Error { message: error.to_string() })?;
                return Err(error);
            }
            Err(error) => return Err(error),
        };
        if !files.is_empty() && !self.files.is_empty() {
            let message = "a file descriptor came before the request for an earlier one".to_owned();
            self.reply(&ControlReply::Error { message })?;
            return Err(io::ErrorKind::InvalidData.into());
        }
        self.files.extend(files);
        self.pending.extend_from_slice(&chunk[..read]);
        if self.pending.len() > MAX_LINE {
            let message = format!("more than {MAX_LINE} bytes of requests are waiting");
            self.reply(&ControlReply::Error { message })?;
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(())
    }

    /// Handles complete lines, up to a command. Handles none while the client waits for memory, so that replies have
    /// the order of the requests. After an error the connection is closed.
    fn next_command(&mut self, abilities: Abilities) -> io::Result<Option<Command>> {
        while self.missing_mib.is_none() {
            let Some(end) = self.pending.iter().position(|byte| *byte == b'\n') else { break };
            let line: Vec<u8> = self.pending.drain(..=end).collect();
            match self.answer(&line, abilities) {
                Answer::Reply(reply) => self.reply(&reply)?,
                Answer::Accept(command) => {
                    self.reply(&ControlReply::Ok)?;
                    return Ok(Some(command));
                }
                Answer::AttachNic { mac } => {
                    return Ok(Some(Command::AttachNic { client: self.token, mac }));
                }
                Answer::AttachBlock(disk) => {
                    return Ok(Some(Command::AttachBlock { client: self.token, disk }));
                }
                Answer::DetachBlock { serial } => {
                    return Ok(Some(Command::DetachBlock { client: self.token, serial }));
                }
                Answer::Counts => return Ok(Some(Command::Counts { client: self.token })),
                Answer::DeviceCounts => return Ok(Some(Command::DeviceCounts { client: self.token })),
                Answer::Resize { memory_mib } => {
                    self.missing_mib = Some(u32::MAX);
                    return Ok(Some(Command::Resize { client: self.token, memory_mib }));
                }
            }
        }
        Ok(None)
    }

    fn answer(&self, line: &[u8], abilities: Abilities) -> Answer {
        let error = |message: String| Answer::Reply(ControlReply::Error { message });
        match serde_json::from_slice(line) {
            Ok(ControlRequest::Status) => Answer::Reply(ControlReply::Ok),
            Ok(ControlRequest::Stop) => Answer::Accept(Command::Stop),
            Ok(ControlRequest::Save) if abilities.can_save => Answer::Accept(Command::Save),
            Ok(ControlRequest::Save) => error("this VM was started without save_to".to_owned()),
            Ok(ControlRequest::Resize { .. }) if abilities.can_save => {
                error("this VM will be saved, so its memory keeps its size".to_owned())
            }
            Ok(ControlRequest::Resize { memory_mib }) if memory_mib > abilities.max_memory_mib => {
                error(format!("memory_mib: this VM can have at most {}", abilities.max_memory_mib))
            }
            Ok(ControlRequest::Resize { memory_mib }) => Answer::Resize { memory_mib },
            Ok(ControlRequest::Counts) => Answer::Counts,
            Ok(ControlRequest::DeviceCounts) => Answer::DeviceCounts,
            Ok(ControlRequest::AttachNic { .. } | ControlRequest::AttachBlock { .. })
                if abilities.can_save =>
            {
                error("this VM will be saved, so it gets no more devices".to_owned())
            }
            Ok(ControlRequest::AttachNic { mac }) => match config::parse_mac(&mac) {
                None => error(format!("mac: {mac:?} is not a MAC address")),
                Some(_) if self.files.is_empty() => {
                    error("no file descriptor of a tap device came with the request".to_owned())
                }
                Some(mac) => Answer::AttachNic { mac },
            },
            Ok(ControlRequest::AttachBlock { serial, .. }) if serial.len() > MAX_SERIAL => {
                error(format!("serial: {serial:?} has more than {MAX_SERIAL} bytes"))
            }
            Ok(ControlRequest::AttachBlock { .. }) if self.files.len() != 1 => {
                error("no file descriptor of a block device came with the request, or several".to_owned())
            }
            Ok(ControlRequest::AttachBlock { serial, read_only, discards }) => {
                Answer::AttachBlock(DiskRequest { serial, read_only, discards })
            }
            Ok(ControlRequest::DetachBlock { serial }) => Answer::DetachBlock { serial },
            Ok(ControlRequest::CloseUnmounted) => Answer::Accept(Command::CloseUnmounted),
            Err(cause) => error(format!("not a request: {cause}")),
        }
    }

    fn memory_is(&mut self, memory_mib: u32, requested_mib: u32) -> io::Result<()> {
        let Some(reported) = self.missing_mib else { return Ok(()) };
        let missing = memory_mib.abs_diff(requested_mib);
        if missing == 0 {
            self.missing_mib = None;
            return self.reply(&ControlReply::Ok);
        }
        // The guest decides how often its memory changes, and must not cause a reply each time.
        if missing >= reported {
            return Ok(());
        }
        self.missing_mib = Some(missing);
        self.reply(&ControlReply::Memory { memory_mib })
    }

    fn reply(&mut self, reply: &ControlReply) -> io::Result<()> {
        let mut line = serde_json::to_vec(reply)?;
        line.push(b'\n');
        self.stream.write_all(&line)
    }
}

/// Reads what a client has sent, at least a byte, and the file descriptors that came with the first byte.
fn receive_with_files(stream: &UnixStream, bytes: &mut [u8]) -> io::Result<(usize, Vec<File>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_QUEUES as usize))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = recvmsg(stream, &mut [IoSliceMut::new(bytes)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let mut files = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            files.extend(descriptors.map(File::from));
        }
    }
    // The room for them may have been rounded up.
    if received.flags.contains(ReturnFlags::CTRUNC) || files.len() > MOST_QUEUES.into() {
        let what =
            "more file descriptors came with a request than it can have, or than this process can have";
        return Err(io::Error::new(io::ErrorKind::InvalidData, what));
    }
    Ok((received.bytes, files))
}

/// Whether accept(2) failed because the process or the host lacks file descriptors or memory.
fn is_exhausted(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM))
}

/// How a request is handled.
enum Answer {
    /// The reply completes it.
    Reply(ControlReply),
    /// It is accepted. The VM carries it out after the reply.
    Accept(Command),
    /// The VM answers it at once.
    Counts,
    /// The VM answers it at once.
    DeviceCounts,
    /// The VM attaches a network device at once. The client has sent the file descriptor of a tap.
    AttachNic { mac: [u8; 6] },
    /// The VM attaches a block device at once. The client has sent a file descriptor of it.
    AttachBlock(DiskRequest),
    /// The VM takes a block device away at once.
    DetachBlock { serial: String },
    /// The VM carries it out, and the client waits for that.
    Resize { memory_mib: u32 },
}

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead, BufReader, Read},
        os::fd::AsRawFd,
        time::Duration,
    };

    use nix::sys::{
        resource::{Resource, getrlimit, setrlimit},
        socket::{self, AddressFamily, SockFlag, SockType, UnixAddr},
    };

    use vmm_sys_util::sock_ctrl_msg::ScmSocket;

    use super::*;
    use crate::jail::testing::{End, drill};

    const SOCKET: u32 = 10;

    struct Server {
        control: ControlServer,
        poll: PollContext<u32>,
        dir: tempfile::TempDir,
    }

    impl Server {
        fn new() -> Self {
            Self::of_a_vm(false)
        }

        fn of_a_vm(can_save: bool) -> Self {
            let dir = tempfile::tempdir().unwrap();
            let abilities = Abilities { can_save, max_memory_mib: 1024 };
            let mut control = ControlServer::bind(&dir.path().join("control.sock"), abilities).unwrap();
            let poll = PollContext::new().unwrap();
            control.register(&poll, SOCKET).unwrap();
            Self { control, poll, dir }
        }

        fn connect(&self) -> UnixStream {
            let stream = UnixStream::connect(self.dir.path().join("control.sock")).unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
            stream
        }

        /// Handles everything that has arrived.
        fn serve(&mut self) -> Option<Command> {
            loop {
                let events = self.poll.wait_timeout(Duration::from_millis(50)).unwrap();
                let token = events.iter().next().map(|event| event.token());
                drop(events);
                match token {
                    Some(SOCKET) => self.control.accept(&self.poll),
                    Some(client) => self.control.receive(client),
                    None => {}
                }
                if let Some(command) = self.control.next_command() {
                    return Some(command);
                }
                token?;
            }
        }
    }

    fn line(stream: &UnixStream) -> String {
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).unwrap();
        line
    }

    #[test]
    fn status_is_answered_and_stop_is_passed_on() {
        let mut server = Server::new();
        let mut client = server.connect();
        client.write_all(b"{\"op\":\"status\"}\n").unwrap();
        assert_eq!(server.serve(), None);
        assert_eq!(line(&client), "{\"result\":\"ok\"}\n");
        client.write_all(b"{\"op\":\"st").unwrap();
        assert_eq!(server.serve(), None);
        client.write_all(b"op\"}\n").unwrap();
        assert_eq!(server.serve(), Some(Command::Stop));
        assert_eq!(line(&client), "{\"result\":\"ok\"}\n");
    }

    #[test]
    fn only_a_vm_that_can_be_saved_is() {
        for (can_save, command, reply) in [
            (true, Some(Command::Save), "{\"result\":\"ok\"}\n"),
            (false, None, "{\"result\":\"error\",\"message\":\"this VM was started without save_to\"}\n"),
        ] {
            let mut server = Server::of_a_vm(can_save);
            let mut client = server.connect();
            client.write_all(b"{\"op\":\"save\"}\n").unwrap();
            assert_eq!((server.serve(), line(&client).as_str()), (command, reply));
        }
    }

    #[test]
    fn who_asks_for_counts_gets_them() {
        let mut server = Server::new();
        let mut client = server.connect();
        client.write_all(b"{\"op\":\"counts\"}\n{\"op\":\"status\"}\n").unwrap();
        let Some(Command::Counts { client: token }) = server.serve() else { panic!("no command") };
        server.control.counts(token, vec![ShareCounts { tag: "share".into(), requests: [].into() }]);
        assert_eq!(server.serve(), None);
        let mut replies = BufReader::new(client).lines().map(Result::unwrap);
        let counts = "{\"result\":\"counts\",\"shares\":[{\"tag\":\"share\",\"requests\":{}}]}";
        assert_eq!(replies.next().as_deref(), Some(counts));
        assert_eq!(replies.next().as_deref(), Some("{\"result\":\"ok\"}"));
    }

    #[test]
    fn who_asks_for_counts_of_devices_too_gets_them_after_the_first() {
        let mut server = Server::new();
        let mut client = server.connect();
        client.write_all(b"{\"op\":\"counts\"}\n{\"op\":\"device_counts\"}\n").unwrap();
        let Some(Command::Counts { client: token }) = server.serve() else { panic!("no command") };
        server.control.counts(token, Vec::new());
        let Some(Command::DeviceCounts { client: token }) = server.serve() else { panic!("no command") };
        server
            .control
            .device_counts(token, DeviceCounts { balloon_bytes: Some(0), ..DeviceCounts::default() });
        let mut lines = BufReader::new(&client).lines().map(Result::unwrap);
        assert_eq!(lines.next().unwrap(), r#"{"result":"counts","shares":[]}"#);
        let devices = lines.next().unwrap();
        assert!(
            devices.starts_with(r#"{"result":"devices","balloon_bytes":0,"reported_bytes":null,"#),
            "{devices}"
        );
    }

    fn resize(server: &mut Server, memory_mib: u32) -> (UnixStream, Option<Command>) {
        let mut client = server.connect();
        client.write_all(format!("{{\"op\":\"resize\",\"memory_mib\":{memory_mib}}}\n").as_bytes()).unwrap();
        let command = server.serve();
        (client, command)
    }

    #[test]
    fn who_waits_for_memory_hears_of_it_until_it_is_as_requested() {
        let mut server = Server::new();
        let mut clients = Vec::new();
        for memory_mib in [512, 900] {
            let (stream, command) = resize(&mut server, memory_mib);
            let Some(Command::Resize { memory_mib: asked, .. }) = command else { panic!("{command:?}") };
            assert_eq!(asked, memory_mib);
            server.control.memory_is(256, memory_mib);
            clients.push(BufReader::new(stream));
        }
        server.control.memory_is(640, 900);
        // A guest that plugs and unplugs all the time does not cause a line each time.
        for memory_mib in [638, 640, 256, 640, 1160] {
            server.control.memory_is(memory_mib, 900);
        }
        // Both wait for what was requested last.
        server.control.memory_is(900, 900);
        let (stream, _) = resize(&mut server, 128);
        server.control.memory_is(200, 128);
        server.control.memory_is(128, 128);
        clients.push(BufReader::new(stream));
        drop(server);
        let [first, second, third] = [0, 1, 2].map(|index: usize| {
            let mut text = String::new();
            clients[index].read_to_string(&mut text).unwrap();
            text
        });
        let memory = |mib: u32| format!("{{\"result\":\"memory\",\"memory_mib\":{mib}}}\n");
        let ok = "{\"result\":\"ok\"}\n";
        assert_eq!(first, [&memory(256), ok].concat(), "640 is not nearer to 900 than 256 to 512");
        assert_eq!(second, [&memory(256), &memory(640), ok].concat());
        assert_eq!(third, [&memory(200), ok].concat());
    }

    #[test]
    fn what_a_vm_cannot_have_is_refused() {
        let mut server = Server::new();
        let (client, command) = resize(&mut server, 1025);
        assert_eq!(command, None);
        assert!(line(&client).contains("memory_mib: this VM can have at most 1024"));
        let (client, command) = resize(&mut server, 1024);
        let Some(Command::Resize { client: token, .. }) = command else { panic!("{command:?}") };
        server.control.refuse(token, "no room".into());
        assert_eq!(line(&client), "{\"result\":\"error\",\"message\":\"no room\"}\n");
        let mut template = Server::of_a_vm(true);
        let (client, command) = resize(&mut template, 512);
        assert_eq!(command, None);
        assert!(line(&client).contains("this VM will be saved"));
    }

    #[test]
    fn a_network_device_needs_an_address_and_a_descriptor() {
        let attach = b"{\"op\":\"attach_nic\",\"mac\":\"02:00:00:00:00:02\"}\n";
        let null = || File::open("/dev/null").unwrap();
        let mut server = Server::new();
        let mut client = server.connect();
        client.write_all(attach).unwrap();
        assert_eq!(server.serve(), None);
        assert!(line(&client).contains("no file descriptor of a tap device"));
        client.send_with_fd(&attach[..], null().as_raw_fd()).unwrap();
        let Some(Command::AttachNic { client: token, mac }) = server.serve() else { panic!("no command") };
        assert_eq!(mac, [2, 0, 0, 0, 0, 2]);
        assert_eq!(server.control.take_files(token).map(|files| files.len()), Some(1));
        assert!(server.control.take_files(token).is_none());
        server.control.done(token);
        assert_eq!(line(&client), "{\"result\":\"ok\"}\n");
        // One for each queue of the tap.
        let several = [(); 4].map(|()| null());
        let send = |count: usize| {
            let files: Vec<_> = several.iter().cycle().take(count).map(AsRawFd::as_raw_fd).collect();
            client.send_with_fds(&[&attach[..]], &files).unwrap();
        };
        send(4);
        let Some(Command::AttachNic { client: token, .. }) = server.serve() else { panic!("no command") };
        assert_eq!(server.control.take_files(token).map(|files| files.len()), Some(4));
        server.control.refuse(token, "no place".into());
        assert!(line(&client).contains("no place"));
        let wrong = b"{\"op\":\"attach_nic\",\"mac\":\"02:00\"}\n";
        client.send_with_fd(&wrong[..], null().as_raw_fd()).unwrap();
        assert_eq!(server.serve(), None);
        assert!(line(&client).contains("mac: \\\"02:00\\\" is not a MAC address"));
        // That one waits for a request still.
        client.send_with_fd(&b"{"[..], null().as_raw_fd()).unwrap();
        assert_eq!(server.serve(), None);
        assert!(line(&client).contains("a file descriptor came before"));
        assert!(server.control.clients.is_empty());
        let client = server.connect();
        let files = [(); 5].map(|()| null());
        client.send_with_fds(&[&attach[..]], &files.each_ref().map(AsRawFd::as_raw_fd)).unwrap();
        assert_eq!(server.serve(), None);
        assert!(line(&client).contains("more file descriptors came"));
        assert!(server.control.clients.is_empty());
    }

    #[test]
    fn a_block_device_needs_a_serial_number_and_a_descriptor() {
        let attach = b"{\"op\":\"attach_block\",\"serial\":\"8:16\",\"read_only\":true}\n";
        let null = || File::open("/dev/null").unwrap();
        let mut server = Server::new();
        let mut client = server.connect();
        client.write_all(attach).unwrap();
        assert_eq!(server.serve(), None);
        assert!(line(&client).contains("no file descriptor of a block device"));
        client.send_with_fd(&attach[..], null().as_raw_fd()).unwrap();
        let Some(Command::AttachBlock { client: token, disk }) = server.serve() else { panic!("no command") };
        assert_eq!(disk, DiskRequest { serial: "8:16".into(), read_only: true, discards: false });
        assert_eq!(server.control.take_files(token).map(|files| files.len()), Some(1));
        server.control.refuse(token, "no place".into());
        assert!(line(&client).contains("no place"));
        let two = [(); 2].map(|()| null());
        client.send_with_fds(&[&attach[..]], &two.each_ref().map(AsRawFd::as_raw_fd)).unwrap();
        assert_eq!(server.serve(), None);
        assert!(line(&client).contains("or several"));
        client.write_all(b"{\"op\":\"attach_block\",\"serial\":\"21 bytes are too long\"}\n").unwrap();
        assert_eq!(server.serve(), None);
        assert!(line(&client).contains("has more than 20 bytes"));
        client.write_all(b"{\"op\":\"detach_block\",\"serial\":\"8:16\"}\n").unwrap();
        let Some(Command::DetachBlock { client: token, serial }) = server.serve() else {
            panic!("no command")
        };
        assert_eq!(serial, "8:16");
        server.control.done(token);
        assert_eq!(line(&client), "{\"result\":\"ok\"}\n");
    }

    #[test]
    fn a_vm_that_will_be_saved_gets_no_more_devices() {
        for attach in [
            "{\"op\":\"attach_nic\",\"mac\":\"02:00:00:00:00:02\"}\n",
            "{\"op\":\"attach_block\",\"serial\":\"8:16\"}\n",
        ] {
            let mut template = Server::of_a_vm(true);
            let client = template.connect();
            let null = File::open("/dev/null").unwrap();
            client.send_with_fd(attach.as_bytes(), null.as_raw_fd()).unwrap();
            assert_eq!(template.serve(), None);
            assert!(line(&client).contains("this VM will be saved"));
        }
    }

    #[test]
    fn requests_that_come_together_are_answered_in_order() {
        let mut server = Server::new();
        let mut client = server.connect();
        let status = "{\"op\":\"status\"}\n";
        let resize = "{\"op\":\"resize\",\"memory_mib\":512}\n";
        client
            .write_all([status, resize, status, resize, "fly\n", "{\"op\":\"stop\"}\n"].concat().as_bytes())
            .unwrap();
        let ok = "{\"result\":\"ok\"}\n";
        let mut replies = BufReader::new(client);
        let mut next = || {
            let mut line = String::new();
            replies.read_line(&mut line).unwrap();
            line
        };
        let Some(Command::Resize { .. }) = server.serve() else { panic!("no command") };
        server.control.memory_is(256, 512);
        // Later requests are handled after all replies to this one.
        assert_eq!(server.serve(), None);
        assert_eq!((next().as_str(), next().contains("256")), (ok, true));
        server.control.memory_is(512, 512);
        let Some(Command::Resize { client, .. }) = server.serve() else { panic!("no second command") };
        assert_eq!((next().as_str(), next().as_str()), (ok, ok));
        server.control.refuse(client, "no room".into());
        assert_eq!(server.serve(), Some(Command::Stop));
        assert!(next().contains("no room") && next().contains("not a request"));
        assert_eq!(next(), ok);
    }

    #[test]
    fn nonsense_is_answered_in_one_line() {
        let mut server = Server::new();
        let mut client = server.connect();
        for nonsense in [&b"\n"[..], b"{\"op\":\"fly\"}\n", b"\xff\xfe\n"] {
            client.write_all(nonsense).unwrap();
            assert_eq!(server.serve(), None);
            let reply: ControlReply = serde_json::from_str(&line(&client)).unwrap();
            assert!(matches!(reply, ControlReply::Error { .. }));
        }
    }

    #[test]
    fn a_line_without_an_end_is_hung_up_on() {
        let mut server = Server::new();
        let mut client = server.connect();
        client.write_all(&[b'x'; MAX_LINE + 512]).unwrap();
        assert_eq!(server.serve(), None);
        assert!(line(&client).contains("more than 4096 bytes"));
        assert!(server.control.clients.is_empty());
    }

    #[test]
    fn idle_clients_do_not_keep_others_out() {
        let mut server = Server::new();
        let idle: Vec<_> = (0..MAX_CLIENTS).map(|_| server.connect()).collect();
        server.serve();
        let mut client = server.connect();
        client.write_all(b"{\"op\":\"status\"}\n").unwrap();
        server.serve();
        assert_eq!(line(&client), "{\"result\":\"ok\"}\n");
        assert_eq!(line(&idle[0]), "", "the oldest was hung up on");
        assert_eq!(server.control.clients.len(), MAX_CLIENTS);
    }

    #[test]
    fn only_a_client_that_still_waits_is_waited_for() {
        assert!(is_exhausted(&io::Error::from_raw_os_error(libc::EMFILE)));
        assert!(!is_exhausted(&io::Error::from_raw_os_error(libc::EAGAIN)));
        assert!(!is_exhausted(&io::Error::from_raw_os_error(libc::ECONNABORTED)));
    }

    #[test]
    fn who_connects_while_there_are_no_descriptors_is_served_when_there_are() {
        let body = || {
            let mut server = Server::new();
            let (plenty, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
            let client =
                socket::socket(AddressFamily::Unix, SockType::Stream, SockFlag::empty(), None).unwrap();
            // Files that are open stay open.
            setrlimit(Resource::RLIMIT_NOFILE, 0, hard).unwrap();
            let path = server.dir.path().join("control.sock");
            socket::connect(client.as_raw_fd(), &UnixAddr::new(&path).unwrap()).unwrap();
            server.control.accept(&server.poll);
            assert!(server.control.clients.is_empty());
            setrlimit(Resource::RLIMIT_NOFILE, plenty, hard).unwrap();
            let mut client = UnixStream::from(client);
            client.write_all(b"{\"op\":\"status\"}\n").unwrap();
            assert_eq!(server.serve(), None);
            assert_eq!(line(&client), "{\"result\":\"ok\"}\n");
        };
        drill(body, End::succeeds);
    }

    #[test]
    fn a_path_that_is_taken_stays_as_it_is() {
        let server = Server::new();
        let path = server.dir.path().join("control.sock");
        let abilities = Abilities { can_save: false, max_memory_mib: 1024 };
        assert!(matches!(ControlServer::bind(&path, abilities), Err(ControlError::Bind { .. })));
        assert!(path.exists());
    }
}
