//! `bulkhead run --network nat`.

use std::fs;
use std::io::Write;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use anyhow::{Context, Result};

use super::{run_in, start_in};
use crate::command::Cmd;
use crate::ctr::{COMMAND, Host};
use crate::fixtures::Root;
use crate::name_server::{KNOWN, NameServer, known_address};
use crate::network::{Bridge, GATEWAY};

/// Asks for a name, and connects to two services of the host: one at an address that others reach, and one at its
/// loopback interface, for which the program's gateway does not stand.
pub(super) fn nat(host: &Host) -> Result<()> {
    let root = Root::mount(host)?;
    // The host's resolver is at its loopback interface, as that of systemd is.
    let _names = NameServer::start("127.0.0.1")?;
    let _resolv_conf = ResolvConf::replace("nameserver 127.0.0.1\nsearch e2e.test\n")?;
    let _bridge = Bridge::new()?;
    let _profile = PastaProfile::load()?;
    let outside = Greeter::start(GATEWAY, "hello from outside\n")?;
    let inside = Greeter::start("127.0.0.1", "hello from the loopback interface\n")?;
    let script = format!(
        "grep search /etc/resolv.conf; nslookup {KNOWN} | grep -c {}; nc -w 9 {GATEWAY} {} < /dev/null; \
         nc -w 3 10.0.2.2 {} < /dev/null || echo nobody; ls /sys/class/net; id -u",
        known_address(),
        outside.address.port(),
        inside.address.port(),
    );
    // Its template is made by a run that is not checked for what it leaves.
    run_in(host, &root, &["true"])?.succeeds()?;
    host.leaves_nothing(|| {
        let finished = run_in(host, &root, &["--network", "nat", "--user", "7", "sh", "-c", &script])?;
        finished.succeeds()?.prints("search e2e.test\n1\nhello from outside\nnobody\neth0\nlo\n7\n")?;
        Ok(())
    })?;
    // A run that is killed leaves its pasta, and the next one removes it.
    host.leaves_nothing(|| {
        let running =
            start_in(host, &root, &["--network", "nat", "sh", "-c", "echo ready; sleep 1000"]).start()?;
        running.wait_for("ready\n")?;
        drop(running);
        run_in(host, &root, &["true"])?.succeeds()?;
        Ok(())
    })?;
    let root = root.path().display().to_string();
    let without =
        ["PATH=/nowhere", "/usr/local/bin/bulkhead", "run", "--network", "nat", "--rootfs", &root, "true"];
    let refused = Cmd::new("env").args(without).limit(host.patience(COMMAND)).run()?;
    refused.exits(125)?.fails_with("there is no pasta in PATH; install it")?.says_one_line()?;
    Ok(())
}

/// Debian's AppArmor profile of pasta. An ordinary Debian host has loaded it, and the rig loads no profiles.
struct PastaProfile {
    is_own: bool,
}

impl PastaProfile {
    const PATH: &str = "/etc/apparmor.d/usr.bin.pasta";

    fn load() -> Result<Self> {
        let loaded = fs::read_to_string("/sys/kernel/security/apparmor/profiles").context("no AppArmor")?;
        let is_own = !loaded.lines().any(|line| line.starts_with("pasta "));
        if is_own {
            Cmd::new("apparmor_parser").args(["--add", Self::PATH]).run()?.succeeds()?;
        }
        Ok(Self { is_own })
    }
}

impl Drop for PastaProfile {
    fn drop(&mut self) {
        if self.is_own {
            _ = Cmd::new("apparmor_parser").args(["--remove", Self::PATH]).run();
        }
    }
}

/// A resolv.conf(5) of the host, in place of its own.
struct ResolvConf(Option<String>);

impl ResolvConf {
    const PATH: &str = "/etc/resolv.conf";

    fn replace(text: &str) -> Result<Self> {
        let own = fs::read_to_string(Self::PATH).ok();
        fs::write(Self::PATH, text).context("cannot write resolv.conf")?;
        Ok(Self(own))
    }
}

impl Drop for ResolvConf {
    fn drop(&mut self) {
        _ = match &self.0 {
            Some(own) => fs::write(Self::PATH, own),
            None => fs::remove_file(Self::PATH),
        };
    }
}

/// A service that says the same to whoever connects, until it is dropped.
struct Greeter {
    address: SocketAddr,
    ended: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Greeter {
    fn start(address: &str, greeting: &'static str) -> Result<Self> {
        let listener = TcpListener::bind((address, 0)).context("cannot listen")?;
        let address = listener.local_addr()?;
        let ended = Arc::new(AtomicBool::new(false));
        let is_to_end = Arc::clone(&ended);
        let thread = thread::spawn(move || {
            for connection in listener.incoming() {
                if is_to_end.load(Ordering::Relaxed) {
                    break;
                }
                // An error is the client's, which says so.
                if let Ok(mut connection) = connection {
                    _ = connection.write_all(greeting.as_bytes());
                }
            }
        });
        Ok(Self { address, ended, thread: Some(thread) })
    }
}

impl Drop for Greeter {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        // It waits for a client.
        if TcpStream::connect(self.address).is_ok()
            && let Some(thread) = self.thread.take()
        {
            _ = thread.join();
        }
    }
}
