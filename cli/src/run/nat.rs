//! `--network nat`: pasta(1), a program of the host, adds an interface to the network namespace of the VMM, and reads
//! what the guest sends there. For each connection of the program it makes one of its own on the host. So the network
//! of the host is not configured, and nothing but the process of pasta and its cgroup has to be removed. Their names
//! have the id of the run that they belong to.

mod cgroup;

use std::{
    fs::{self, File},
    io::{self, Read},
    os::{
        fd::OwnedFd,
        unix::{fs::MetadataExt, process::CommandExt},
    },
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};

use crate::{command_output, run::error::RunError};

const PROGRAM: &str = "pasta";

/// An option that pasta has since 2025. An older pasta forwards what a guest sends to 127.0.0.1 to the host's own
/// services there: that of March 2023 does, and that of May 2025 does not.
const SINCE_2025: &str = "--fqdn";

/// The network of the program. The addresses are those that users of QEMU and slirp4netns know.
const INTERFACE: &str = "eth0";
const ADDRESS: &str = "10.0.2.100";
const PREFIX: &str = "24";
const GATEWAY: &str = "10.0.2.2";
const RESOLVER: &str = "10.0.2.3";
const MTU: &str = "1500";

/// Files in the directory of a run. If the second one exists, pasta may run.
const RESOLV_CONF: &str = "resolv.conf";
const MESSAGES: &str = "pasta-stderr";

/// How long pasta may take to be ready, and to end after it was killed.
const READY: Duration = Duration::from_secs(20);
const END: Duration = Duration::from_secs(5);

/// How long it may take to find a pasta among the processes of the host.
const FIND: Duration = Duration::from_secs(10);

/// What the name of the process begins with: that of pasta's file, which may be a link to passt.
const NAMES: [&str; 2] = ["pasta", "passt"];

/// How much of a command line is read.
const ARGUMENTS: u64 = 4096;

/// Whether this host has a pasta that can be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pasta {
    Missing,
    Old,
    Fit,
}

/// Looks for pasta in PATH.
pub(crate) fn pasta() -> io::Result<Pasta> {
    pasta_at(PROGRAM)
}

fn pasta_at(program: &str) -> io::Result<Pasta> {
    match command_output::output(program, &["--help"]) {
        Ok(help) if help.contains(SINCE_2025) => Ok(Pasta::Fit),
        Ok(_) => Ok(Pasta::Old),
        // An old one prints its help to standard error, and its exit status is 1.
        Err(error) if error.kind() == io::ErrorKind::Other => Ok(Pasta::Old),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Pasta::Missing),
        Err(error) => Err(error),
    }
}

/// Fails if there is no pasta that can be used.
pub(super) fn check() -> Result<(), RunError> {
    match pasta().map_err(|error| failed(error.to_string()))? {
        Pasta::Fit => Ok(()),
        Pasta::Missing => Err(RunError::NoPasta),
        Pasta::Old => Err(RunError::OldPasta),
    }
}

/// Writes the resolv.conf(5) of the program, and returns its path. It names [`RESOLVER`]. pasta forwards what is sent
/// there to the host's first resolver, which may listen on the host's loopback interface only.
pub(super) fn write_resolv_conf(directory: &Path) -> Result<PathBuf, RunError> {
    let path = directory.join(RESOLV_CONF);
    // A host without this file cannot resolve names, and neither can the program.
    let hosts = fs::read_to_string("/etc/resolv.conf").unwrap_or_default();
    fs::write(&path, resolv_conf(&hosts))
        .map_err(|source| RunError::Prepare { path: path.clone(), source })?;
    Ok(path)
}

/// The host's resolv.conf with another resolver.
fn resolv_conf(hosts: &str) -> String {
    let is_kept = |line: &&str| {
        let word = line.split_whitespace().next();
        word.is_some_and(|word| ["search", "domain", "options"].contains(&word))
    };
    let kept = hosts.lines().filter(is_kept).map(|line| format!("{line}\n"));
    std::iter::once(format!("nameserver {RESOLVER}\n")).chain(kept).collect()
}

/// Opens the network namespace of the VMM, whose process is `vmm`. That of this process is refused: pasta would
/// configure it.
pub(super) fn netns_of(vmm: u32) -> Result<File, RunError> {
    let path = PathBuf::from(format!("/proc/{vmm}/ns/net"));
    let opened = || -> io::Result<_> {
        let netns = File::open(&path)?;
        let (found, own) = (netns.metadata()?, fs::metadata("/proc/self/ns/net")?);
        let is_own = (found.dev(), found.ino()) == (own.dev(), own.ino());
        Ok((netns, is_own))
    };
    match opened().map_err(|source| RunError::Prepare { path: path.clone(), source })? {
        (netns, false) => Ok(netns),
        (_, true) => Err(failed(format!("process {vmm} is in the network namespace of this command"))),
    }
}

/// Connects the network namespace of a VMM to the host's network. Calls `started` with the pid of the pasta that does
/// it. Blocks.
pub(super) fn connect(
    directory: &Path,
    id: &str,
    netns: File,
    started: impl FnOnce(u32) + Send + 'static,
) -> Result<(), RunError> {
    let messages = directory.join(MESSAGES);
    let stderr =
        File::create(&messages).map_err(|source| RunError::Prepare { path: messages.clone(), source })?;
    let mut command = pasta_command(id);
    command.stderr(stderr);
    // The command ends when the interface is there: pasta goes on in the background.
    command_output::answer_on(command, netns, READY, started).map(drop).map_err(|error| {
        let said = fs::read_to_string(&messages).unwrap_or_default();
        failed(if said.trim().is_empty() { error.to_string() } else { said.trim().replace('\n', "; ") })
    })?;
    // The program, whose connections make pasta work, has not begun.
    let own = id.to_owned();
    let limited = in_time(move || {
        processes(&name(&own)).and_then(|pids| cgroup::limit(Path::new(cgroup::ROOT), &own, &pids))
    });
    if let Err(error) = limited {
        tracing::warn!(%error, "the memory that pasta takes for the connections of the program is not limited");
    }
    Ok(())
}

fn pasta_command(id: &str) -> Command {
    let mut command = Command::new(PROGRAM);
    // pasta is not permitted to open /proc/PID of the VMM, and its AppArmor profile keeps it from opening files in the
    // directory of the run. So it gets the namespace as its standard input.
    command.arg0(name(id)).args(["--netns", "/proc/self/fd/0", "--no-netns-quit"]);
    // As another user it could not enter the namespace. It gives up all capabilities but CAP_SYS_ADMIN and
    // CAP_NET_BIND_SERVICE, and enters an empty root.
    command.args(["--runas", "0", "--config-net", "--ns-ifname", INTERFACE, "--mtu", MTU, "--quiet"]);
    // By default pasta takes the addresses and routes of the host's interface, but a pod cannot have all kinds of
    // these.
    command.args(["--ipv4-only", "--address", ADDRESS, "--netmask", PREFIX, "--gateway", GATEWAY]);
    command.args(["--dns-forward", RESOLVER]);
    // No address that the program can use stands for the host's loopback interface, and no port is forwarded in either
    // direction.
    command.args(["--map-host-loopback", "none", "--map-guest-addr", "none"]);
    command.args(["--tcp-ports", "none", "--udp-ports", "none", "--tcp-ns", "none", "--udp-ns", "none"]);
    command.args(["--no-dhcp", "--no-dhcpv6", "--no-ndp", "--no-ra"]);
    command
}

/// The first argument of the pasta of a run. A name with `pasta` in it makes the program pasta, and not passt.
fn name(id: &str) -> String {
    format!("{PROGRAM}-bulkhead-run-{id}")
}

/// Ends the pasta of a run, if there is one. Blocks.
pub(super) fn disconnect(directory: &Path, id: &str) -> Result<(), RunError> {
    if !directory.join(MESSAGES).exists() {
        return Ok(());
    }
    let own = id.to_owned();
    in_time(move || end_all(&name(&own)).and_then(|()| cgroup::remove(Path::new(cgroup::ROOT), &own)))
        .map_err(|source| RunError::Remove { path: directory.into(), source })
}

/// Fails if it takes too long: a process of the host that hangs in the kernel keeps whoever looks at it.
fn in_time(work: impl FnOnce() -> io::Result<()> + Send + 'static) -> io::Result<()> {
    let late = || io::Error::new(io::ErrorKind::TimedOut, format!("pasta was not found within {FIND:?}"));
    command_output::within(FIND, work)?.unwrap_or_else(|| Err(late()))
}

/// Kills the processes whose first argument is this, and waits for their end.
fn end_all(name: &str) -> io::Result<()> {
    for pid in processes(name)? {
        let Ok(process) = pidfd_open(pid, PidfdFlags::empty()) else { continue };
        // The pid may have become another process's before it was opened. Now it cannot any more.
        if is_named(&proc_of(pid), name) {
            end(&process)?;
        }
    }
    Ok(())
}

/// The processes whose first argument is this.
fn processes(name: &str) -> io::Result<Vec<Pid>> {
    let entries = fs::read_dir("/proc")?.flatten();
    let pids = entries.filter_map(|entry| Pid::from_raw(entry.file_name().to_str()?.parse().ok()?));
    Ok(pids.filter(|pid| is_named(&proc_of(*pid), name)).collect())
}

fn proc_of(pid: Pid) -> PathBuf {
    PathBuf::from(format!("/proc/{}", pid.as_raw_nonzero()))
}

fn is_named(process: &Path, name: &str) -> bool {
    // Unlike the arguments, this can be read of a process that hangs.
    let own = fs::read(process.join("comm")).unwrap_or_default();
    if !NAMES.iter().any(|name| own.starts_with(name.as_bytes())) {
        return false;
    }
    let mut arguments = Vec::new();
    let file = File::open(process.join("cmdline"));
    let read = file.and_then(|file| file.take(ARGUMENTS).read_to_end(&mut arguments));
    read.is_ok() && arguments.split(|byte| *byte == 0).next() == Some(name.as_bytes())
}

fn end(process: &OwnedFd) -> io::Result<()> {
    match pidfd_send_signal(process, Signal::KILL) {
        Ok(()) => {}
        Err(Errno::SRCH) => return Ok(()),
        Err(errno) => return Err(errno.into()),
    }
    let limit = Timespec::try_from(END).unwrap_or_default();
    match poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&limit)) {
        Ok(0) => Err(io::Error::new(io::ErrorKind::TimedOut, "pasta does not end")),
        // A signal has ended the wait. The process was killed nevertheless.
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

fn failed(reason: String) -> RunError {
    RunError::Nat { reason }
}

#[cfg(test)]
mod tests {
    use std::{os::unix::fs::PermissionsExt, process::Stdio};

    use super::*;

    #[test]
    fn a_pasta_before_2025_is_told_by_its_help() {
        let dir = tempfile::tempdir().unwrap();
        let with = |script: &str| {
            let path = dir.path().join("pasta");
            // A new file, because Linux refuses to execute one that somebody has open for writing.
            fs::write(dir.path().join("new"), format!("#!/bin/sh\n{script}\n")).unwrap();
            fs::set_permissions(dir.path().join("new"), fs::Permissions::from_mode(0o755)).unwrap();
            fs::rename(dir.path().join("new"), &path).unwrap();
            pasta_at(path.to_str().unwrap()).unwrap()
        };
        assert_eq!(with("echo '  --fqdn FQDN'"), Pasta::Fit);
        assert_eq!(with("echo '  --netns PATH'"), Pasta::Old);
        assert_eq!(with("echo '  --netns PATH' >&2; exit 1"), Pasta::Old);
        assert_eq!(pasta_at("/nonexistent/pasta").unwrap(), Pasta::Missing);
    }

    #[test]
    fn the_network_of_this_command_is_nobody_elses() {
        let error = netns_of(std::process::id()).unwrap_err().to_string();
        assert!(error.contains("is in the network namespace of this command"), "{error}");
        assert!(matches!(netns_of(u32::MAX), Err(RunError::Prepare { .. })));
    }

    #[test]
    fn the_resolver_is_pastas_and_the_rest_is_the_hosts() {
        let hosts =
            "# by systemd\nnameserver 127.0.0.53\nnameserver 192.0.2.1\noptions edns0\nsearch a.example b\n";
        assert_eq!(resolv_conf(hosts), "nameserver 10.0.2.3\noptions edns0\nsearch a.example b\n");
        assert_eq!(resolv_conf(""), "nameserver 10.0.2.3\n");
    }

    #[test]
    fn nothing_of_the_hosts_loopback_is_forwarded() {
        let command = pasta_command("0123");
        let words: Vec<_> = command.get_args().map(|word| word.to_string_lossy().into_owned()).collect();
        for [option, value] in [
            ["--map-host-loopback", "none"],
            ["--map-guest-addr", "none"],
            ["--tcp-ports", "none"],
            ["--udp-ports", "none"],
            ["--tcp-ns", "none"],
            ["--udp-ns", "none"],
            ["--netns", "/proc/self/fd/0"],
        ] {
            assert!(words.windows(2).any(|pair| pair == [option, value]), "{option}: {words:?}");
        }
    }

    #[test]
    fn only_the_pasta_of_the_run_is_ended() {
        let dir = tempfile::tempdir().unwrap();
        let id = dir.path().file_name().unwrap().to_str().unwrap().trim_start_matches('.').to_owned();
        let pasta = dir.path().join("passt.avx2");
        std::os::unix::fs::symlink("/bin/sleep", &pasta).unwrap();
        let start =
            |name: String| Command::new(&pasta).arg0(name).arg("1000").stdout(Stdio::null()).spawn().unwrap();
        let (mut own, mut other) = (start(name(&id)), start(name(&format!("{id}x"))));
        // Without its messages there was no pasta.
        disconnect(dir.path(), &id).unwrap();
        assert_eq!(own.try_wait().unwrap(), None);
        fs::write(dir.path().join(MESSAGES), "").unwrap();
        disconnect(dir.path(), &id).unwrap();
        assert!(!own.wait().unwrap().success());
        assert_eq!(other.try_wait().unwrap(), None);
        other.kill().unwrap();
        other.wait().unwrap();
    }

    /// The arguments of a process that hangs in the kernel cannot be read.
    #[test]
    fn only_the_arguments_of_pasta_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let with = |comm: &str| {
            fs::write(dir.path().join("comm"), comm).unwrap();
            is_named(dir.path(), "a")
        };
        fs::write(dir.path().join("cmdline"), "a\0b\0").unwrap();
        assert!(with("pasta\n") && with("passt.avx2\n"));
        assert!(!with("sleep\n"));
    }
}
