//! The control socket, by a client that sends anything in parts of any size.

use std::{
    fs::File,
    io::{Read, Write},
    os::{fd::AsRawFd, unix::net::UnixStream},
};

use anyhow::{Context, Result};
use bulkhead_vmm::control_socket::{Abilities, Command, ControlServer};
use vmm_sys_util::{poll::PollContext, sock_ctrl_msg::ScmSocket};

use crate::input::Input;

/// The tokens of the socket and of its first client.
const SERVER: u32 = 1;
const MAX_MIB: u32 = 1024;

/// Runs the program.
pub fn run(bytes: &[u8]) -> Result<()> {
    let mut input = Input::new(bytes);
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("control.sock");
    // The memory of a VM that can be saved keeps its size.
    let abilities = Abilities { can_save: bytes.len().is_multiple_of(2), max_memory_mib: MAX_MIB };
    let mut server = ControlServer::bind(&path, abilities)?;
    let poll = PollContext::new().context("cannot poll")?;
    server.register(&poll, SERVER)?;
    let mut client = UnixStream::connect(&path)?;
    client.set_nonblocking(true)?;
    server.accept(&poll);
    let null = File::open("/dev/null")?;
    while !input.is_over() {
        let count = 1 + usize::from(input.u8());
        let bytes = input.bytes(count);
        // Sometimes a file descriptor comes with them.
        let sent = match count % 3 {
            0 => client.send_with_fd(bytes, null.as_raw_fd()).is_ok(),
            _ => client.write_all(bytes).is_ok(),
        };
        // The server has closed the connection.
        if !sent {
            break;
        }
        server.receive(SERVER + 1);
        while let Some(command) = server.next_command() {
            match command {
                Command::Resize { memory_mib, .. } => {
                    anyhow::ensure!(memory_mib <= MAX_MIB, "more memory is asked for than there can be");
                    server.memory_is(memory_mib / 2, memory_mib);
                }
                Command::DetachBlock { client, .. } => server.done(client),
                Command::AttachNic { client, .. } | Command::AttachBlock { client, .. } => {
                    server.take_files(client).context("a device without a file")?;
                    server.done(client);
                }
                _ => {}
            }
        }
        server.memory_is(MAX_MIB / count as u32, MAX_MIB / 2);
        // The client reads only sometimes. If it does not read, the server closes the connection.
        if count % 2 == 0 {
            let _ = client.read(&mut [0; 4096]);
        }
    }
    // The next client is served.
    let mut next = UnixStream::connect(&path)?;
    server.accept(&poll);
    next.write_all(b"{\"op\":\"status\"}\n")?;
    server.receive(SERVER + 2);
    server.next_command();
    anyhow::ensure!(next.read(&mut [0; 64])? > 0, "the next client gets no answer");
    Ok(())
}
