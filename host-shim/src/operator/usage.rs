//! What a pod uses of its host, by the host's own files. The names of a VMM's threads, and its answer, are all that a
//! guest that has taken over its VMM could change. They are sorted into fixed kinds, and numbers.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, BufRead, BufReader, Read, Write},
    os::{fd::AsRawFd, unix::net::UnixStream},
    path::{Path, PathBuf},
};

use bulkhead_vmm_api::{ControlReply, ControlRequest, DeviceCounts};
use rustix::{
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with},
    param::clock_ticks_per_second,
};
use serde::{Deserialize, Serialize};

use crate::{
    host::{
        network::{FORMER_TAP, TAP},
        process_id::ProcessId,
    },
    operator::pods::{Share, VmmConfig},
};

/// The most bytes of a file that are read.
const MOST_BYTES: u64 = 64 << 10;

/// The most threads and descriptors that are counted. A VMM has some dozens, and its limit of open files is lower.
const MOST_THREADS: usize = 512;
const MOST_DESCRIPTORS: usize = 1 << 20;

/// What a pod uses. None: the host does not say.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Usage {
    /// The processor time of the VMM's threads.
    pub cpu: Option<CpuUsage>,
    /// The threads of the VMM.
    pub threads: Option<usize>,
    /// The open files of the VMM.
    pub open_files: Option<usize>,
    /// How often the guest has left for KVM. None: the host has no debugfs.
    pub kvm_exits: Option<u64>,
    /// What the guest has sent and received.
    pub network: Option<NetworkUsage>,
    /// The requests of the guest for files, of each virtio-fs device: `exclusive`, by which the guest reaches what only
    /// it changes, and `shared`. Empty: the VMM has not answered.
    pub file_requests: Vec<(&'static str, u64)>,
    /// What the devices of the VM have done. Nothing is known if the VMM has not answered, or is of an older version.
    pub devices: DeviceCounts,
    /// The pod's cgroup.
    pub cgroup: CgroupUsage,
}

/// Processor time, in seconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct CpuUsage {
    /// Of the vCPUs.
    pub vcpu: f64,
    /// Of the threads that serve files.
    pub fs: f64,
    /// Of the other devices and the main thread.
    pub other: f64,
}

impl CpuUsage {
    /// All of it.
    pub fn total(&self) -> f64 {
        self.vcpu + self.fs + self.other
    }
}

/// What has passed the network card of the guest.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct NetworkUsage {
    /// Bytes that the guest has received.
    pub received_bytes: u64,
    /// Packets that the guest has received.
    pub received_packets: u64,
    /// Bytes that the guest has sent.
    pub sent_bytes: u64,
    /// Packets that the guest has sent.
    pub sent_packets: u64,
}

/// What is charged to the pod's cgroup on the host.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct CgroupUsage {
    /// Processor time, in seconds.
    pub cpu_seconds: Option<f64>,
    /// Memory.
    pub memory_bytes: Option<u64>,
    /// The limit of the memory. None: there is none.
    pub memory_limit_bytes: Option<u64>,
    /// How often the host's kernel has killed a process of the cgroup, because its memory was short.
    pub oom_kills: Option<u64>,
    /// How long it has lacked processors.
    pub cpu_pressure: Pressure,
    /// How long it has lacked memory.
    pub memory_pressure: Pressure,
    /// How long it has waited for storage.
    pub io_pressure: Pressure,
}

/// How long threads of a cgroup have waited because a resource was short (pressure stall information,
/// Documentation/accounting/psi.rst). None: the host's kernel does not say.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Pressure {
    /// How long at least one thread has waited, in seconds.
    pub waiting_seconds: Option<f64>,
    /// How long all threads that had something to do have waited at the same time, in seconds.
    pub stalled_seconds: Option<f64>,
}

/// Where KVM keeps its counters of VMs: PID-DESCRIPTOR.
const KVM: &str = "/sys/kernel/debug/kvm";

/// What the VMM uses. `state` is the pod's state directory.
pub(super) fn of(vmm: ProcessId, config: &VmmConfig) -> Usage {
    let proc = PathBuf::from(format!("/proc/{}", vmm.pid));
    let (cpu, threads) = threads(&proc).unzip();
    Usage {
        cpu,
        threads,
        open_files: fs::read_dir(proc.join("fd")).ok().map(|entries| entries.take(MOST_DESCRIPTORS).count()),
        kvm_exits: kvm_exits(Path::new(KVM), vmm.pid),
        network: read(&proc.join("net/dev")).as_deref().and_then(network),
        file_requests: Vec::new(),
        devices: DeviceCounts::default(),
        cgroup: cgroup(&config.cgroup_procs),
    }
}

/// A small file of the host.
fn read(path: &Path) -> Option<String> {
    let mut text = String::new();
    File::open(path).ok()?.take(MOST_BYTES).read_to_string(&mut text).ok()?;
    Some(text)
}

fn number(path: &Path) -> Option<u64> {
    read(path)?.trim().parse().ok()
}

/// The value in the line that begins with this key.
fn value(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' ')?.trim().parse().ok())
}

fn threads(proc: &Path) -> Option<(CpuUsage, usize)> {
    let (mut cpu, mut count) = (CpuUsage::default(), 0);
    for entry in fs::read_dir(proc.join("task")).ok()?.flatten().take(MOST_THREADS) {
        count += 1;
        // A thread may end meanwhile.
        let Some((name, seconds)) = read(&entry.path().join("stat")).as_deref().and_then(thread) else {
            continue;
        };
        match name {
            Kind::Vcpu => cpu.vcpu += seconds,
            Kind::Fs => cpu.fs += seconds,
            Kind::Other => cpu.other += seconds,
        }
    }
    Some((cpu, count))
}

#[derive(Debug, PartialEq, Eq)]
enum Kind {
    Vcpu,
    Fs,
    Other,
}

/// The kind of a thread, and its processor time in seconds, by its line of proc_pid_stat(5).
fn thread(stat: &str) -> Option<(Kind, f64)> {
    let (before, after) = stat.rsplit_once(')')?;
    let (_, name) = before.split_once('(')?;
    let kind = match name {
        _ if name.starts_with("vcpu") => Kind::Vcpu,
        _ if name.starts_with("fs") => Kind::Fs,
        _ => Kind::Other,
    };
    // Fields 14 and 15. The first one here is field 3.
    let mut times = after.split_whitespace().skip(11).map(str::parse::<u64>);
    let (user, system) = (times.next()?.ok()?, times.next()?.ok()?);
    Some((kind, user.saturating_add(system) as f64 / clock_ticks_per_second() as f64))
}

fn kvm_exits(kvm: &Path, vmm: u32) -> Option<u64> {
    let prefix = format!("{vmm}-");
    let mut entries = fs::read_dir(kvm).ok()?.flatten();
    let of_vmm = entries.find(|entry| entry.file_name().to_string_lossy().starts_with(&prefix))?;
    number(&of_vmm.path().join("exits"))
}

/// The counters of the tap device (proc_pid_net(5)). What the host receives by it, the guest has sent.
fn network(text: &str) -> Option<NetworkUsage> {
    let of_tap =
        |line: &'_ str, name| Some(line.trim_start().strip_prefix(name)?.strip_prefix(':')?.to_owned());
    let line = text.lines().find_map(|line| of_tap(line, TAP).or_else(|| of_tap(line, FORMER_TAP)))?;
    let counters: Vec<u64> = line.split_whitespace().map_while(|counter| counter.parse().ok()).collect();
    // There are 16. The last of fewer may be a part of a number.
    counters.get(15)?;
    Some(NetworkUsage {
        sent_bytes: *counters.first()?,
        sent_packets: *counters.get(1)?,
        received_bytes: *counters.get(8)?,
        received_packets: *counters.get(9)?,
    })
}

/// `procs` are the files by which the VMM has joined the cgroup in each hierarchy.
fn cgroup(procs: &[PathBuf]) -> CgroupUsage {
    let mut usage = CgroupUsage::default();
    for directory in procs.iter().filter_map(|procs| procs.parent()) {
        let number = |name: &str| number(&directory.join(name));
        let in_file = |name: &str, key: &str| value(&read(&directory.join(name))?, key);
        let micros = |micros: u64| micros as f64 / 1e6;
        // Of version 2, or of one of the controllers of version 1.
        let cpu = in_file("cpu.stat", "usage_usec").map(micros);
        let cpu = cpu.or_else(|| Some(number("cpuacct.usage")? as f64 / 1e9));
        usage.cpu_seconds = usage.cpu_seconds.or(cpu);
        let memory = number("memory.current").or_else(|| number("memory.usage_in_bytes"));
        usage.memory_bytes = usage.memory_bytes.or(memory);
        // Version 1 has a huge number if there is no limit.
        let limit = number("memory.max").or_else(|| number("memory.limit_in_bytes"));
        usage.memory_limit_bytes = usage.memory_limit_bytes.or(limit.filter(|bytes| *bytes < 1 << 60));
        let kills = in_file("memory.events", "oom_kill");
        usage.oom_kills = usage.oom_kills.or(kills).or_else(|| in_file("memory.oom_control", "oom_kill"));
        for (pressure, name) in [
            (&mut usage.cpu_pressure, "cpu.pressure"),
            (&mut usage.memory_pressure, "memory.pressure"),
            (&mut usage.io_pressure, "io.pressure"),
        ] {
            // Only a hierarchy of version 2 has it. If the host has turned it off, the file may not be read.
            if let Some(text) = read(&directory.join(name)) {
                *pressure = self::pressure(&text);
            }
        }
    }
    usage
}

/// What a file such as `io.pressure` says. Before Linux 5.13 that of processors has no line `full`.
fn pressure(text: &str) -> Pressure {
    let seconds = |kind: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(kind)?.strip_prefix(' '))?;
        let micros = line.split(' ').find_map(|field| field.strip_prefix("total=")?.parse::<u64>().ok())?;
        Some(micros as f64 / 1e6)
    };
    Pressure { waiting_seconds: seconds("some"), stalled_seconds: seconds("full") }
}

/// What a VMM has answered.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Answer {
    /// As [`Usage::file_requests`].
    pub(super) file_requests: Vec<(&'static str, u64)>,
    /// As [`Usage::devices`].
    pub(super) devices: DeviceCounts,
}

/// Asks the VMM how many requests for files there were of each of its shares, and what its devices have done. Waits
/// until the VMM answers, or ends: if each look at a VMM that hangs made a connection and gave it up, they would all
/// wait for the VMM. An error: it cannot be asked, or its answer is of no use.
pub(super) fn ask(state: &Path, config: &VmmConfig) -> io::Result<Answer> {
    let directory = File::open(state)?;
    // A path that fits sun_path (unix(7)) always.
    let path = Path::new("/proc/self/fd").join(directory.as_raw_fd().to_string()).join(&config.control);
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // If too many clients wait already, it does not wait with them.
    connect(&socket, &SocketAddrUnix::new(&path)?)?;
    let mut stream = UnixStream::from(socket);
    // The lines are short, and the socket takes them at once.
    let [shares, devices] =
        [ControlRequest::Counts, ControlRequest::DeviceCounts].map(|request| serde_json::to_string(&request));
    stream.write_all(format!("{}\n{}\n", shares?, devices?).as_bytes())?;
    stream.set_nonblocking(false)?;
    let mut stream = BufReader::new(stream).take(MOST_BYTES);
    let mut line = Vec::new();
    if stream.read_until(b'\n', &mut line)? == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let file_requests = file_requests(&line, config)?;
    line.clear();
    // A VMM of an older version refuses the request: then what its devices have done is not known, which is no error.
    let devices =
        match stream.read_until(b'\n', &mut line).ok().and_then(|_| serde_json::from_slice(&line).ok()) {
            Some(ControlReply::Devices(devices)) => devices,
            _ => DeviceCounts::default(),
        };
    Ok(Answer { file_requests, devices })
}

/// What is of interest here of [`ControlReply::Counts`]. That of a later version may have more keys.
#[derive(Deserialize)]
struct Counts {
    shares: Vec<ShareCounts>,
}

#[derive(Deserialize)]
struct ShareCounts {
    tag: String,
    requests: BTreeMap<String, u64>,
}

/// The numbers in the answer of a VMM.
fn file_requests(line: &[u8], config: &VmmConfig) -> io::Result<Vec<(&'static str, u64)>> {
    let Counts { shares } = serde_json::from_slice(line)?;
    let count = |tag: &str| {
        let of_tag = shares.iter().filter(|share| share.tag == tag);
        of_tag.flat_map(|share| share.requests.values()).fold(0, |sum: u64, n| sum.saturating_add(*n))
    };
    // The tags are those of the configuration, whatever the VMM says.
    let device = |share: &Share| -> &'static str { if share.exclusive { "exclusive" } else { "shared" } };
    Ok(config.shares.iter().map(|share| (device(share), count(&share.tag))).collect())
}

#[cfg(test)]
mod tests {
    use std::{os::unix::net::UnixListener, thread};

    use bulkhead_vmm_api::BlockCounts;
    use rustix::net::{bind, listen};

    use super::*;

    #[test]
    fn a_thread_is_of_a_kind_whatever_it_is_called() {
        let line = |name: &str| format!("12 ({name}) S 1 1 1 0 -1 4194368 1 0 0 0 250 50 0 0 20 0 1 0 5 0\n");
        let ticks = clock_ticks_per_second() as f64;
        assert_eq!(thread(&line("vcpu3")), Some((Kind::Vcpu, 300.0 / ticks)));
        assert_eq!(thread(&line("fs2")).unwrap().0, Kind::Fs);
        assert_eq!(thread(&line("x) R 1 (vcpu")).unwrap(), (Kind::Other, 300.0 / ticks));
        assert_eq!(thread("12 (vcpu0) S 1"), None);
        assert_eq!(thread(""), None);
    }

    #[test]
    fn what_the_host_receives_the_guest_has_sent() {
        let text = "Inter-|   Receive\n face |bytes packets\n  lo: 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0\n\
                    veth-bulkhead:   70 7 0 0 0 0 0 0   90 9 0 0 0 0 0 0\n";
        let expected =
            NetworkUsage { sent_bytes: 70, sent_packets: 7, received_bytes: 90, received_packets: 9 };
        assert_eq!(network(text), Some(expected));
        // Of a pod that an older version has started.
        assert_eq!(network(&text.replace("veth-", "tap-")), network(text));
        assert_eq!(network("veth-bulkhead-2: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16\n"), None);
        assert_eq!(network("veth-bulkhead: 1 2 3 4 5 6 7 8 9 10"), None);
    }

    #[test]
    fn a_cgroup_of_either_version_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
        let procs = [dir.path().join("cgroup.procs")];
        assert_eq!(cgroup(&procs), CgroupUsage::default());
        write("cpu.stat", "usage_usec 2500000\nuser_usec 1\n");
        write("memory.current", "4096\n");
        write("memory.max", "max\n");
        write("memory.events", "oom 3\noom_kill 2\noom_group_kill 0\n");
        let expected = CgroupUsage {
            cpu_seconds: Some(2.5),
            memory_bytes: Some(4096),
            memory_limit_bytes: None,
            oom_kills: Some(2),
            ..CgroupUsage::default()
        };
        assert_eq!(cgroup(&procs), expected);
        for name in ["cpu.stat", "memory.current", "memory.max", "memory.events"] {
            fs::remove_file(dir.path().join(name)).unwrap();
        }
        write("cpuacct.usage", "2500000000\n");
        write("memory.usage_in_bytes", "4096\n");
        write("memory.limit_in_bytes", "9223372036854771712\n");
        write("memory.oom_control", "oom_kill_disable 0\noom_kill 2\n");
        assert_eq!(cgroup(&procs), expected);
    }

    #[test]
    fn pressure_is_known_only_if_the_kernel_says_it() {
        let dir = tempfile::tempdir().unwrap();
        let procs = [dir.path().join("cgroup.procs")];
        let write = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
        let some = "some avg10=1.00 avg60=0.00 avg300=0.00 total=2500000\n";
        write("cpu.pressure", some);
        write("memory.pressure", &format!("{some}full avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"));
        let expected = CgroupUsage {
            cpu_pressure: Pressure { waiting_seconds: Some(2.5), stalled_seconds: None },
            memory_pressure: Pressure { waiting_seconds: Some(2.5), stalled_seconds: Some(0.0) },
            ..CgroupUsage::default()
        };
        assert_eq!(cgroup(&procs), expected);
        for unknown in ["", "some\n", "some avg10=0.00 total=\n", "something total=1\n", "full total=-1\n"] {
            assert_eq!(pressure(unknown), Pressure::default(), "{unknown}");
        }
    }

    #[test]
    fn exits_are_those_of_the_vmm() {
        let dir = tempfile::tempdir().unwrap();
        for (name, exits) in [("12-7", "5"), ("1-12", "6")] {
            fs::create_dir(dir.path().join(name)).unwrap();
            fs::write(dir.path().join(name).join("exits"), exits).unwrap();
        }
        assert_eq!((kvm_exits(dir.path(), 12), kvm_exits(dir.path(), 1)), (Some(5), Some(6)));
        assert_eq!(kvm_exits(dir.path(), 2), None);
    }

    fn config() -> VmmConfig {
        let text = serde_json::json!({"api_version": 9, "kernel": "k", "initramfs": "i", "vcpus": 1,
            "memory_mib": 256, "control": "control.sock", "vsock": "v",
            "shares": [{"tag": "share", "dir": "share"}]});
        serde_json::from_value(text).unwrap()
    }

    fn asked(answer: &'static str) -> io::Result<Answer> {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("control.sock")).unwrap();
        let vmm = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            // If the client has gone, there is nobody to tell.
            _ = stream.write_all(answer.as_bytes());
            let mut requests = BufReader::new(stream);
            for _ in 0..2 {
                _ = requests.read_line(&mut String::new());
            }
        });
        let answer = ask(dir.path(), &config());
        vmm.join().unwrap();
        answer
    }

    #[test]
    fn only_numbers_of_shares_that_exist_are_taken_of_the_vmm() {
        let answer = r#"{"result":"counts","shares":[{"tag":"share","requests":{"LOOKUP":2,"\"}":18446744073709551615}},
            {"tag":"evil\n","requests":{"x":1}}]}"#;
        let answer = answer.replace('\n', "");
        let answer = asked(Box::leak(format!("{answer}\n").into_boxed_str())).unwrap();
        assert_eq!(answer.file_requests, [("shared", u64::MAX)]);
        for wrong in ["{\"result\":\"ok\"}\n", "no JSON\n"] {
            assert_eq!(asked(wrong).unwrap_err().kind(), io::ErrorKind::InvalidData, "{wrong}");
        }
    }

    #[test]
    fn what_an_older_vmm_does_not_count_is_not_known() {
        let devices = |second: &str| {
            let answer = format!("{{\"result\":\"counts\",\"shares\":[]}}\n{second}");
            asked(Box::leak(answer.into_boxed_str())).unwrap().devices
        };
        let counted =
            r#"{"result":"devices","balloon_bytes":4096,"block":{"requests":2,"later":1},"later":[1]}"#;
        let block = BlockCounts { requests: 2, ..BlockCounts::default() };
        let expected =
            DeviceCounts { balloon_bytes: Some(4096), block: Some(block), ..DeviceCounts::default() };
        assert_eq!(devices(&format!("{counted}\n")), expected);
        for unknown in ["{\"result\":\"error\",\"message\":\"not a request\"}\n", "no JSON\n", "", "{"] {
            assert_eq!(devices(unknown), DeviceCounts::default(), "{unknown}");
        }
        let wrong = r#"{"result":"devices","balloon_bytes":-1}"#;
        assert_eq!(devices(&format!("{wrong}\n")), DeviceCounts::default());
    }

    #[test]
    fn an_answer_that_is_cut_or_does_not_end_is_none() {
        assert_eq!(asked("{").unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        assert!(asked(Box::leak("x".repeat(100_000).into_boxed_str())).is_err());
    }

    #[test]
    fn a_vmm_with_too_many_clients_is_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let socket =
            socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        let path = dir.path().join("control.sock");
        bind(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        listen(&socket, 0).unwrap();
        let _waiting = UnixStream::connect(&path).unwrap();
        assert_eq!(ask(dir.path(), &config()).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        fs::remove_file(&path).unwrap();
        assert_eq!(ask(dir.path(), &config()).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
