//! Sockets of the host's services that a container mounts, such as docker's: the container connects to the service.

use std::fs::{self, Permissions};
use std::io::{IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::cmsg_space;
use rustix::net::sockopt::{set_socket_passcred, socket_peercred};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use tempfile::TempDir;

use super::Case;
use super::programs::HostCopy;
use crate::command::Finished;
use crate::ctr::{Host, Task};
use crate::docker::Client;
use crate::fixtures::{CONFIGURATION, Replaced, scratch};
use crate::pods::{Container, Pod};

pub(super) const CASES: &[Case] = &[
    Case::both("a_service_of_the_host_is_used_through_its_socket", service),
    Case::both("a_container_in_a_user_namespace_has_the_socket", user_namespace),
    Case::both("the_socket_of_a_service_that_has_ended_leads_nowhere", ended),
    Case::both("docker_is_used_from_a_container_through_its_socket", docker),
    Case::both("a_service_is_used_through_its_directory", directory),
    Case::both("a_service_that_restarts_is_found_again", restart),
    Case::both("containers_of_a_pod_find_a_service_until_the_last_ends", pod),
    Case::bulkhead("services_are_not_reached_through_directories_if_the_configuration_says_so", turned_off),
    Case::both("the_log_of_the_host_is_written_by_datagrams", datagrams),
];

/// What clients are told of the socket in the container.
const SOCKET: &str = "/srv/service.sock";

/// Sends more than any buffer holds on each of eight connections that exist at the same time, ends what it sends, and
/// prints the answers. The answers come only then.
const EIGHT_CLIENTS: &str = "
import os, socket, sys, threading
def connect():
    client = socket.socket(socket.AF_UNIX)
    client.connect('/srv/service.sock')
    return client
def ask(client, answers, index):
    client.sendall(bytes([index]) * 300000)
    client.shutdown(socket.SHUT_WR)
    answer = b''
    while part := client.recv(4096):
        answer += part
    answers[index] = answer.decode()
status = os.stat('/srv/service.sock')
print('socket=%o %d:%d' % (status.st_mode, status.st_uid, status.st_gid))
clients = [connect() for _ in range(8)]
answers = [''] * 8
asking = [threading.Thread(target=ask, args=(client, answers, index)) for index, client in enumerate(clients)]
[thread.start() for thread in asking]
[thread.join() for thread in asking]
print('answers=' + ' '.join(answers))
";

/// Connects and waits for the end, and prints what came.
const ONE_CLIENT: &str = "
import socket
client = socket.socket(socket.AF_UNIX)
client.settimeout(60)
try:
    client.connect('/srv/service.sock')
    client.sendall(b'question')
    client.shutdown(socket.SHUT_WR)
    answer = client.recv(100)
except (ConnectionRefusedError, ConnectionResetError, BrokenPipeError):
    answer = b''
print('answer=' + (answer.decode() or 'none'))
";

/// Connects again until there is an answer, and prints it.
const PATIENT_CLIENT: &str = "
import socket, time
deadline, answer = time.monotonic() + 60, b''
while not answer and time.monotonic() < deadline:
    client = socket.socket(socket.AF_UNIX)
    try:
        client.connect('/srv/service.sock')
        client.sendall(b'question')
        client.shutdown(socket.SHUT_WR)
        answer = client.recv(100)
    except (FileNotFoundError, ConnectionRefusedError, ConnectionResetError, BrokenPipeError):
        pass
    client.close()
    time.sleep(0.05)
print('answer=' + answer.decode())
";

/// A service of the host.
struct Service {
    directory: TempDir,
}

impl Service {
    fn new() -> Result<Self> {
        Ok(Self { directory: scratch()? })
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("service.sock")
    }

    /// Serves this many clients, at the same time, and ends.
    fn serve(&self, clients: usize) -> Result<()> {
        let path = self.path();
        let listener = UnixListener::bind(&path).context("cannot make a socket")?;
        fs::set_permissions(&path, Permissions::from_mode(0o620))?;
        chown(&path, Some(1234), Some(5678))?;
        thread::spawn(move || {
            for client in listener.incoming().take(clients).flatten() {
                thread::spawn(move || answer(client));
            }
        });
        Ok(())
    }
}

/// Reads all that a client sends, and says how much that was and who the client is.
fn answer(mut client: UnixStream) -> Result<()> {
    let mut bytes = Vec::new();
    client.read_to_end(&mut bytes)?;
    let is_one_client = bytes.iter().all(|byte| Some(byte) == bytes.first());
    let who = socket_peercred(&client)?;
    let (uid, gid) = (who.uid.as_raw(), who.gid.as_raw());
    // At once: a client may read only once.
    client.write_all(format!("{}:{is_one_client}:{uid}:{gid}", bytes.len()).as_bytes())?;
    Ok(())
}

/// A copy of the host's root with a place for the socket.
fn root() -> Result<HostCopy> {
    let copy = HostCopy::mount()?;
    copy.write("srv/service.sock", "")?;
    Ok(copy)
}

/// A container that has the socket.
fn start<'h>(host: &'h Host, copy: &HostCopy, service: &Service) -> Result<Task<'h>> {
    let container = copy.as_root_of(host.container()).bind(&service.path(), SOCKET, "rbind:ro");
    container.detach(&["sleep", "1000"])
}

/// Runs a script of Python in it as this user and group.
fn python(task: &Task<'_>, user: &str, script: &str) -> Result<Finished> {
    task.exec_flags(&["--user", user], &["python3", "-c", script])
}

fn service(host: &Host) -> Result<()> {
    let (service, copy) = (Service::new()?, root()?);
    service.serve(8)?;
    let task = start(host, &copy, &service)?;
    // Neither the owner of the socket nor of its group.
    python(&task, "99:99", ONE_CLIENT)?.fails_with("PermissionError")?;
    // The owner, with another group. The service is told who it is.
    let finished = python(&task, "1234:77", EIGHT_CLIENTS)?;
    let answers = ["300000:true:1234:77"; 8].join(" ");
    finished.succeeds()?.says("socket", "140620 1234:5678")?.says("answers", &answers)?;
    Ok(())
}

fn user_namespace(host: &Host) -> Result<()> {
    let service = Service::new()?;
    fs::set_permissions(service.directory.path(), Permissions::from_mode(0o755))?;
    service.serve(1)?;
    let ids = "0:100000:65536";
    let container = host.container().flags(["--uidmap", ids, "--gidmap", ids]);
    let container = container.bind(&service.path(), "/service.sock", "rbind:rw");
    container.run(&["test", "-S", "/service.sock"])?.succeeds()?;
    Ok(())
}

fn ended(host: &Host) -> Result<()> {
    let (service, copy) = (Service::new()?, root()?);
    service.serve(1)?;
    let task = start(host, &copy, &service)?;
    python(&task, "0:0", ONE_CLIENT)?.succeeds()?.says("answer", "8:false:0:0")?;
    // It has ended. A new one makes another socket of the same name, which is not the one that was mounted.
    fs::remove_file(service.path())?;
    service.serve(1)?;
    python(&task, "0:0", ONE_CLIENT)?.succeeds()?.says("answer", "none")?;
    UnixStream::connect(service.path()).context("the new service does not serve")?;
    Ok(())
}

/// A container that has the directory of the socket.
fn start_with_directory<'h>(host: &'h Host, copy: &HostCopy, service: &Service) -> Result<Task<'h>> {
    fs::set_permissions(service.directory.path(), Permissions::from_mode(0o755))?;
    let container = copy.as_root_of(host.container()).bind(service.directory.path(), "/srv", "rbind:ro");
    container.detach(&["sleep", "1000"])
}

fn directory(host: &Host) -> Result<()> {
    let (service, copy) = (Service::new()?, root()?);
    service.serve(8)?;
    let task = start_with_directory(host, &copy, &service)?;
    python(&task, "99:99", ONE_CLIENT)?.fails_with("PermissionError")?;
    let finished = python(&task, "1234:77", EIGHT_CLIENTS)?;
    let answers = ["300000:true:1234:77"; 8].join(" ");
    finished.succeeds()?.says("socket", "140620 1234:5678")?.says("answers", &answers)?;
    Ok(())
}

fn restart(host: &Host) -> Result<()> {
    let (service, copy) = (Service::new()?, root()?);
    let task = start_with_directory(host, &copy, &service)?;
    // It begins after the container, and then it begins anew.
    for user in ["0:0", "1234:77"] {
        service.serve(1)?;
        python(&task, user, PATIENT_CLIENT)?.succeeds()?.says("answer", &format!("8:false:{user}"))?;
        fs::remove_file(service.path())?;
    }
    Ok(())
}

fn pod(host: &Host) -> Result<()> {
    let service = Service::new()?;
    fs::set_permissions(service.directory.path(), Permissions::from_mode(0o755))?;
    service.serve(2)?;
    let pod = Pod::start(host)?;
    let start = |name: &str| {
        let mut container = pod.container().named(name, 0).mount_read_only(service.directory.path(), "/srv");
        for (source, destination) in [("/usr", "/usr"), ("/usr/lib", "/lib"), ("/usr/lib64", "/lib64")] {
            container = container.mount_read_only(Path::new(source), destination);
        }
        container.start(&["sleep", "1000"])
    };
    let ask = |container: &Container<'_>, script: &str| {
        container.exec(&["/usr/bin/python3", "-c", script])?.succeeds()?.says("answer", "8:false:0:0")?;
        anyhow::Ok(())
    };
    let (first, second) = (start("first")?, start("second")?);
    ask(&first, ONE_CLIENT)?;
    first.stop(0)?;
    first.remove()?;
    ask(&second, ONE_CLIENT)?;
    fs::remove_file(service.path())?;
    service.serve(1)?;
    ask(&second, PATIENT_CLIENT)?;
    pod.remove()
}

fn docker(host: &Host) -> Result<()> {
    let client = Client::of(host)?;
    let socket = format!("{}:/var/run/docker.sock", client.socket().display());
    let flags = ["-v", &socket, "-v", "/usr:/usr:ro", "-v", "/usr/lib:/lib:ro", "-v", "/usr/lib64:/lib64:ro"];
    let container = client.container().flags(flags);
    let name = container.name().to_owned();
    let docker = ["/usr/bin/docker", "--host", "unix:///var/run/docker.sock"];
    let finished = container.run(&[&docker[..], &["ps", "--format", "name={{.Names}}"]].concat())?;
    finished.succeeds()?.says("name", &name)?;
    Ok(())
}

fn turned_off(host: &Host) -> Result<()> {
    let (service, copy) = (Service::new()?, root()?);
    service.serve(1)?;
    let _configured = Replaced::file(Path::new(CONFIGURATION), "directory_sockets = false\n")?;
    let task = start_with_directory(host, &copy, &service)?;
    python(&task, "0:0", ONE_CLIENT)?.succeeds()?.says("answer", "none")?;
    UnixStream::connect(service.path()).context("the service does not serve")?;
    // A mount of the socket itself is still one.
    fs::remove_file(service.path())?;
    service.serve(1)?;
    let task = start(host, &copy, &service)?;
    python(&task, "0:0", ONE_CLIENT)?.succeeds()?.says("answer", "8:false:0:0")?;
    Ok(())
}

/// Sends two messages as syslog(3) does, and one that is as long as a socket can send. Then sends without waiting until
/// the queue is full.
const LOGGING: &str = "
import socket, syslog
syslog.openlog('demo')
syslog.syslog('first')
syslog.syslog('second')
log = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
log.connect('/dev/log')
log.send(b'7' * 212960)
try:
    log.send(b'8' * 212961)
except OSError as error:
    print('longer=%s' % error.strerror)
busy = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
busy.connect('/dev/log')
busy.setblocking(False)
try:
    for number in range(10000):
        busy.send(b'9' * 8192)
except BlockingIOError:
    print('full=yes')
";

/// Sends until nobody receives any more.
const LOGGING_ON: &str = "
import socket, time
log = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
try:
    log.connect('/dev/log')
    for number in range(6000):
        log.send(b'lost')
        time.sleep(0.01)
except ConnectionRefusedError:
    print('ended=yes')
";

fn datagrams(host: &Host) -> Result<()> {
    let (directory, copy) = (scratch()?, root()?);
    let path = directory.path().join("log.sock");
    let service = UnixDatagram::bind(&path)?;
    service.set_read_timeout(Some(host.patience(Duration::from_secs(20))))?;
    set_socket_passcred(&service, true)?;
    fs::set_permissions(&path, Permissions::from_mode(0o620))?;
    chown(&path, Some(1234), Some(5678))?;
    let task =
        copy.as_root_of(host.container()).bind(&path, "/dev/log", "rbind:ro").detach(&["sleep", "1000"])?;
    let finished = python(&task, "1234:77", LOGGING)?;
    finished.succeeds()?.says("longer", "Message too long")?.says("full", "yes")?;
    for text in ["demo: first", "demo: second", &"7".repeat(212_960), &"9".repeat(8192)] {
        let (came, uid, gid) = receive(&service)?;
        let is_same = came.ends_with(text) && (uid, gid) == (1234, 77);
        ensure!(is_same, "{} bytes of {uid}:{gid} came instead of {} bytes", came.len(), text.len());
    }
    drop(service);
    python(&task, "0:0", LOGGING_ON)?.succeeds()?.says("ended", "yes")?;
    Ok(())
}

/// A datagram, and the user and the group of its sender.
fn receive(service: &UnixDatagram) -> Result<(String, u32, u32)> {
    let mut bytes = vec![0; 300_000];
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmCredentials(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let parts = &mut [IoSliceMut::new(&mut bytes)];
    let received = recvmsg(service, parts, &mut control, RecvFlags::empty())?;
    let who = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmCredentials(who) => Some((who.uid.as_raw(), who.gid.as_raw())),
        _ => None,
    });
    let (uid, gid) = who.context("a datagram has no sender")?;
    Ok((String::from_utf8(bytes[..received.bytes].into())?, uid, gid))
}
