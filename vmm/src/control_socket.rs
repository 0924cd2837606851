//! The control socket: a line of JSON for each request, a line for each reply (see [`bulkhead_vmm_api`]).
//!
//! Served by the thread that waits for the VM's end, so nothing here blocks: sockets are non-blocking, and a
//! client that sends too much without a line's end, or does not read its replies, is hung up on.

use std::{
    collections::VecDeque,
    io::{self, Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use bulkhead_vmm_api::{ControlReply, ControlRequest};
use vmm_sys_util::poll::PollContext;

/// The longest request is under 20 bytes; this is room for later ones.
const MAX_LINE: usize = 4096;
/// The oldest client is hung up on when one more comes: idle ones cannot keep others out.
const MAX_CLIENTS: usize = 8;

/// How long a client waits that cannot be accepted for want of descriptors. The socket stays readable meanwhile, and a
/// guest that has the file server hold all of them must not make this thread spin.
const PAUSE: Duration = Duration::from_millis(100);

/// Why there is no control socket.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    #[error("control: cannot listen at {path} (its directory must exist, the socket must not)")]
    Bind { path: PathBuf, source: io::Error },
    #[error("control: cannot wait for clients")]
    Poll(#[source] vmm_sys_util::errno::Error),
}

/// What a client asked of the VM, beyond what is answered here.
#[derive(Debug, PartialEq, Eq)]
pub enum Command {
    /// End the VM.
    Stop,
    /// Save the VM, and end it.
    Save,
    /// Have it have so much memory at least. The client with this token waits for it: [`ControlServer::memory_is`] tells it
    /// what there is by now, or [`ControlServer::refuse`] why there will not be more.
    Grow { client: u32, memory_mib: u32 },
}

/// What may be asked of a VM that not every VM can.
#[derive(Debug, Clone, Copy)]
pub struct Abilities {
    /// It has a place to be saved to. What it grows by is not saved, so it does not.
    pub can_save: bool,
    /// The most that its memory can be.
    pub max_memory_mib: u32,
}

/// The socket and its clients.
pub struct ControlServer {
    listener: UnixListener,
    abilities: Abilities,
    clients: VecDeque<Client>,
    /// Token of the next client.
    next: u32,
}

struct Client {
    token: u32,
    stream: UnixStream,
    /// Requests that wait for those before them, and the start of one whose end has not arrived.
    pending: Vec<u8>,
    /// MiB that it waits for the VM to have.
    awaited_mib: Option<u32>,
}

impl ControlServer {
    /// Listens at `path`, for a VM with these abilities.
    pub fn bind(path: &Path, abilities: Abilities) -> Result<Self, ControlError> {
        let error = |source| ControlError::Bind { path: path.to_owned(), source };
        let listener = UnixListener::bind(path).map_err(error)?;
        let server = Self { listener, abilities, clients: VecDeque::new(), next: 0 };
        server.listener.set_nonblocking(true).map_err(error)?;
        Ok(server)
    }

    /// Has `poll` wait for clients, with `token` for the socket and greater ones for the clients.
    pub fn register(&mut self, poll: &PollContext<u32>, token: u32) -> Result<(), ControlError> {
        self.next = token.saturating_add(1);
        poll.add(&self.listener, token).map_err(ControlError::Poll)
    }

    /// Something arrived at the socket itself: a client, which is registered with `poll`.
    pub fn accept(&mut self, poll: &PollContext<u32>) {
        let stream = match self.listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) if is_exhausted(&error) => return thread::sleep(PAUSE),
            // A client that has gone already is no client.
            Err(_) => return,
        };
        let token = self.take_token();
        if stream.set_nonblocking(true).is_err() || poll.add(&stream, token).is_err() {
            return;
        }
        if self.clients.len() == MAX_CLIENTS {
            self.clients.pop_front();
        }
        self.clients.push_back(Client { token, stream, pending: Vec::new(), awaited_mib: None });
    }

    /// Takes what arrived from the client with this token. Closing a client's socket ends its registration.
    pub fn receive(&mut self, token: u32) {
        self.clients.retain_mut(|client| client.token != token || client.receive().is_ok());
    }

    /// Answers the requests that have arrived, each client's in their order, up to one that is to be done by the VM. To be
    /// called until it returns None, whenever something may have arrived or a request may have been done.
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

    /// What a client asked for cannot be done.
    pub fn refuse(&mut self, client: u32, message: String) {
        let Some(index) = self.clients.iter().position(|one| one.token == client) else { return };
        let refused = &mut self.clients[index];
        refused.awaited_mib = None;
        if refused.reply(&ControlReply::Error { message }).is_err() {
            self.clients.remove(index);
        }
    }

    /// The VM's memory is another: whoever waits for more is told.
    pub fn memory_is(&mut self, memory_mib: u32) {
        self.clients.retain_mut(|client| client.memory_is(memory_mib).is_ok());
    }

    fn take_token(&mut self) -> u32 {
        let token = self.next;
        // A VM that had four thousand million clients may hang up on its listener.
        self.next = self.next.saturating_add(1);
        token
    }
}

impl Client {
    /// Reads on. An error hangs up.
    fn receive(&mut self) -> io::Result<()> {
        let mut chunk = [0; 512];
        let read = match self.stream.read(&mut chunk) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            Err(error) => return Err(error),
        };
        self.pending.extend_from_slice(&chunk[..read]);
        if self.pending.len() > MAX_LINE {
            let message = format!("at most {MAX_LINE} bytes can wait for an answer");
            self.reply(&ControlReply::Error { message })?;
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(())
    }

    /// Answers whole lines, up to one that is a command, and none while it waits for memory: its answers come in the order
    /// of its requests. An error hangs up.
    fn next_command(&mut self, abilities: Abilities) -> io::Result<Option<Command>> {
        while self.awaited_mib.is_none() {
            let Some(end) = self.pending.iter().position(|byte| *byte == b'\n') else { break };
            let line: Vec<u8> = self.pending.drain(..=end).collect();
            match self.answer(&line, abilities) {
                Answer::Reply(reply) => self.reply(&reply)?,
                Answer::Accept(command) => {
                    self.reply(&ControlReply::Ok)?;
                    return Ok(Some(command));
                }
                Answer::Grow { memory_mib } => {
                    self.awaited_mib = Some(memory_mib);
                    return Ok(Some(Command::Grow { client: self.token, memory_mib }));
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
            Ok(ControlRequest::Grow { .. }) if abilities.can_save => {
                error("this VM is to be saved, and stays as it is".to_owned())
            }
            Ok(ControlRequest::Grow { memory_mib }) if memory_mib > abilities.max_memory_mib => {
                error(format!("memory_mib: this VM can have {} at most", abilities.max_memory_mib))
            }
            Ok(ControlRequest::Grow { memory_mib }) => Answer::Grow { memory_mib },
            Err(cause) => error(format!("not a request: {cause}")),
        }
    }

    fn memory_is(&mut self, memory_mib: u32) -> io::Result<()> {
        match self.awaited_mib {
            None => Ok(()),
            Some(awaited) if awaited > memory_mib => self.reply(&ControlReply::Memory { memory_mib }),
            Some(_) => {
                self.awaited_mib = None;
                self.reply(&ControlReply::Ok)
            }
        }
    }

    fn reply(&mut self, reply: &ControlReply) -> io::Result<()> {
        let mut line = serde_json::to_vec(reply)?;
        line.push(b'\n');
        self.stream.write_all(&line)
    }
}

/// Whether it is for want of something that the process, or the host, has too little of (accept(2)).
fn is_exhausted(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM))
}

/// What becomes of a request.
enum Answer {
    /// That is all.
    Reply(ControlReply),
    /// It is granted, and to be done.
    Accept(Command),
    /// It is to be done, and answered meanwhile.
    Grow { memory_mib: u32 },
}

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead, BufReader},
        os::fd::AsRawFd,
        time::Duration,
    };

    use nix::sys::{
        resource::{Resource, getrlimit, setrlimit},
        socket::{self, AddressFamily, SockFlag, SockType, UnixAddr},
    };

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

        /// Serves all that has arrived.
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

    fn grow(server: &mut Server, memory_mib: u32) -> (UnixStream, Option<Command>) {
        let mut client = server.connect();
        client.write_all(format!("{{\"op\":\"grow\",\"memory_mib\":{memory_mib}}}\n").as_bytes()).unwrap();
        let command = server.serve();
        (client, command)
    }

    #[test]
    fn who_waits_for_memory_hears_of_it_until_it_is_there() {
        let mut server = Server::new();
        let mut clients = Vec::new();
        for memory_mib in [512, 900] {
            let (stream, command) = grow(&mut server, memory_mib);
            let Some(Command::Grow { memory_mib: asked, .. }) = command else { panic!("{command:?}") };
            assert_eq!(asked, memory_mib);
            server.control.memory_is(256);
            clients.push(BufReader::new(stream));
        }
        server.control.memory_is(640);
        server.control.memory_is(1024);
        drop(server);
        let [first, second] = [0, 1].map(|index: usize| {
            let mut text = String::new();
            clients[index].read_to_string(&mut text).unwrap();
            text
        });
        let memory = |mib: u32| format!("{{\"result\":\"memory\",\"memory_mib\":{mib}}}\n");
        let ok = "{\"result\":\"ok\"}\n";
        assert_eq!(first, [&memory(256), &memory(256), ok].concat());
        assert_eq!(second, [&memory(256), &memory(640), ok].concat());
    }

    #[test]
    fn what_a_vm_cannot_have_is_refused() {
        let mut server = Server::new();
        let (client, command) = grow(&mut server, 1025);
        assert_eq!(command, None);
        assert!(line(&client).contains("memory_mib: this VM can have 1024 at most"));
        let (client, command) = grow(&mut server, 1024);
        let Some(Command::Grow { client: token, .. }) = command else { panic!("{command:?}") };
        server.control.refuse(token, "no room".into());
        assert_eq!(line(&client), "{\"result\":\"error\",\"message\":\"no room\"}\n");
        let mut template = Server::of_a_vm(true);
        let (client, command) = grow(&mut template, 512);
        assert_eq!(command, None);
        assert!(line(&client).contains("this VM is to be saved"));
    }

    #[test]
    fn requests_that_come_together_are_answered_in_order() {
        let mut server = Server::new();
        let mut client = server.connect();
        let status = "{\"op\":\"status\"}\n";
        let grow = "{\"op\":\"grow\",\"memory_mib\":512}\n";
        client
            .write_all([status, grow, status, grow, "fly\n", "{\"op\":\"stop\"}\n"].concat().as_bytes())
            .unwrap();
        let ok = "{\"result\":\"ok\"}\n";
        let mut replies = BufReader::new(client);
        let mut next = || {
            let mut line = String::new();
            replies.read_line(&mut line).unwrap();
            line
        };
        let Some(Command::Grow { .. }) = server.serve() else { panic!("the VM does not grow") };
        server.control.memory_is(256);
        // What comes after has its turn when all has been said of this one.
        assert_eq!(server.serve(), None);
        assert_eq!((next().as_str(), next().contains("256")), (ok, true));
        server.control.memory_is(512);
        let Some(Command::Grow { client, .. }) = server.serve() else { panic!("the VM does not grow again") };
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
        assert!(line(&client).contains("at most 4096 bytes"));
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
            // What is open stays open.
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
