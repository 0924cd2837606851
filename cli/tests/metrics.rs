//! `bulkhead metrics --listen`: what it says of its address, and that it serves there.

#![allow(clippy::unwrap_used)]

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    os::unix::{fs::PermissionsExt, net::UnixStream},
    process::{Child, Command, Stdio},
    time::Duration,
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

/// A client waits no longer than this for an answer.
const PATIENCE: Duration = Duration::from_secs(60);

const REQUEST: &[u8] = b"GET /metrics HTTP/1.0\r\n\r\n";

/// A server that runs until this is dropped.
struct Server {
    child: Child,
    /// Where it says that it serves.
    address: String,
}

impl Server {
    fn start(endpoint: &str) -> Server {
        let mut command = Command::new(env!("CARGO_BIN_EXE_bulkhead"));
        command.args(["metrics", "--listen", endpoint]).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut server = Server { child: command.spawn().unwrap(), address: String::new() };
        let mut line = String::new();
        // A server that cannot serve ends, and so does this.
        BufReader::new(server.child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.strip_prefix("serving metrics at ").and_then(|rest| rest.strip_suffix('\n'));
        server.address = address.unwrap_or_else(|| panic!("it says {line:?}")).to_owned();
        server
    }

    /// Ends it as systemd does, and returns whether it says that all was well.
    fn end(mut self) -> bool {
        kill(Pid::from_raw(self.child.id().try_into().unwrap()), Signal::SIGTERM).unwrap();
        self.child.wait().unwrap().success()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It has ended, unless the test has failed.
        _ = self.child.kill();
        _ = self.child.wait();
    }
}

fn assert_serves(mut stream: impl Read + Write) {
    stream.write_all(REQUEST).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    assert!(answer.contains("\nbulkhead_build_info{version="), "{answer}");
}

#[test]
fn a_port_that_the_kernel_has_chosen_is_said() {
    let [first, second] = ["127.0.0.1:0", "localhost:0"].map(Server::start);
    assert_ne!(first.address, second.address);
    for server in [first, second] {
        let of_url = server.address.strip_prefix("http://").and_then(|rest| rest.strip_suffix("/metrics"));
        let address = of_url.unwrap_or_else(|| panic!("{} is no address", server.address));
        assert!(!address.ends_with(":0"), "{address}");
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        assert_serves(stream);
        assert!(server.end());
    }
}

#[test]
fn a_socket_is_said_and_is_gone_at_the_end() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("metrics.sock");
    let server = Server::start(&format!("unix:{}", path.display()));
    assert_eq!(server.address, format!("unix:{}", path.display()));
    // Only who runs the command may connect.
    assert_eq!(path.metadata().unwrap().permissions().mode() & 0o077, 0);
    let stream = UnixStream::connect(&path).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    assert_serves(stream);
    assert!(server.end());
    assert!(!path.exists());
}

#[test]
fn an_address_that_is_taken_is_an_error_that_names_it() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let output = Command::new(env!("CARGO_BIN_EXE_bulkhead"))
        .args(["metrics", "--listen", &address])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && output.stdout.is_empty() && said.contains(&address), "{said}");
}
