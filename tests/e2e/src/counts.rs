//! Counts what a unit of work costs: requests for files, exits of the VM, interrupts, and bytes that the VMM copies.
//!
//! A number belongs to one unit: a row does its work several times, and what it costs to do it zero times is
//! subtracted.

mod cost;

pub(crate) use cost::{Cost, Costs};

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bulkhead_vmm_api::{ControlReply, ControlRequest, DeviceCounts};
use tempfile::TempDir;

use crate::bench::memory::{find_shim, find_vmm};
use crate::cases::programs::{PATH, on_disk};
use crate::cases::templates::state_dir;
use crate::ctr::{Host, NAMESPACE, Runtime, Task};
use crate::fixtures::{CONFIGURATION, Replaced};
use crate::image_root::ImageRoot;
use crate::network::{Bridge, GATEWAY, Namespace, address};

const WORKER: &str = include_str!("counts/worker.py");
const MIB: usize = 1 << 20;
/// The page that the worker serves, in bytes.
const PAGE: usize = 1000;
/// So many files of 1 MiB can be read for the first time.
const COLD: usize = 32;
/// The container's address on its bridge ends with this number.
const NUMBER: u8 = 2;
/// How long a row may take on an ordinary machine.
const LIMIT: Duration = Duration::from_secs(30);

/// The numbers that a run is compared with. `cargo xtask bench counts` writes them.
const COMMITTED: &str = include_str!("counts/committed.json");

/// A kind of work.
struct Row {
    name: &'static str,
    /// How often it is done. Once before that, so that the caches are filled.
    times: usize,
    work: fn(&Counter<'_>, usize) -> Result<()>,
    /// What is done before each time that the row is measured.
    prepare: fn(&Counter<'_>, usize) -> Result<()>,
}

const ROWS: &[Row] = &[
    Row { name: "`ctr task exec` of `true`", times: 4, work: exec, prepare: nothing },
    start_of_python("start of Python with five imports, repeated"),
    Row {
        name: "fork and exec of `/bin/true`, repeated",
        times: 30,
        work: |counter, times| counter.order("execute_true", times),
        prepare: nothing,
    },
    Row {
        name: "`gcc hello.c`, repeated",
        times: 2,
        work: |counter, times| counter.order("compile_program", times),
        prepare: nothing,
    },
    Row {
        name: "new 4 KiB file",
        times: 30,
        work: |counter, times| counter.order("new_file", times),
        prepare: nothing,
    },
    Row {
        name: "appended line (one write())",
        times: 50,
        work: |counter, times| counter.order("append_line", times),
        prepare: nothing,
    },
    Row {
        name: "file of 2 KiB unpacked by tar on a bind mount",
        times: 30,
        work: |counter, times| counter.order("unpack", times),
        prepare: |counter, times| counter.order("prepare_unpack", times),
    },
    Row {
        name: "1 MiB read for the first time",
        times: 4,
        work: |counter, times| counter.order("read_cold", times),
        prepare: nothing,
    },
    Row {
        name: "1 MiB read again",
        times: 4,
        work: |counter, times| counter.order("read_warm", times),
        prepare: |counter, times| counter.order("prepare_read_warm", times),
    },
    Row { name: "1 MiB of TCP out of the container", times: 4, work: receive, prepare: nothing },
    Row { name: "1 MiB of TCP into the container", times: 4, work: send, prepare: nothing },
    Row { name: "HTTP request", times: 10, work: http, prepare: nothing },
];

/// Rows whose container has a directory of the host as its root, as docker gives it, and whether the configuration says
/// that nobody else writes there. They are not compared with those of a later run: how many names the guest looks up
/// again depends on the time.
const ROWS_OF_DIRECTORIES: &[(bool, Row)] = &[
    (false, start_of_python("start of Python with five imports, repeated, from a directory (docker)")),
    (
        true,
        start_of_python(
            "start of Python with five imports, repeated, from a directory with `exclusive_roots`",
        ),
    ),
];

const fn start_of_python(name: &'static str) -> Row {
    Row { name, times: 2, work: |counter, times| counter.order("start_python", times), prepare: nothing }
}

/// What the root of the container is.
#[derive(Clone, Copy)]
enum RootOf<'r> {
    /// A snapshot, which the shim mounts.
    Snapshot,
    /// A directory of the host.
    Directory { path: &'r str, is_exclusive: bool },
}

/// A running container whose costs are counted. Fields are dropped in this order.
struct Counter<'h> {
    orders: BufReader<TcpStream>,
    task: Task<'h>,
    listener: TcpListener,
    limit: Duration,
    vmm: u32,
    control: PathBuf,
    kvm: PathBuf,
}

/// What a container runs on.
struct Place {
    image: ImageRoot,
    data: TempDir,
    _bridge: Bridge,
    namespace: Namespace,
}

/// Counts every row so often, and takes the smallest of each number: whatever else happens in the guest adds to it.
pub(crate) fn count(host: &Host, rounds: u32) -> Result<Costs> {
    let place = Place::make()?;
    let mut costs = Costs::new();
    let counter = Counter::start(host, &place, RootOf::Snapshot)?;
    for row in ROWS {
        costs.insert(row.name.to_owned(), counter.least(row, rounds)?);
    }
    drop(counter);
    let path = place.image.mount()?.display().to_string();
    for (is_exclusive, row) in ROWS_OF_DIRECTORIES {
        let root = RootOf::Directory { path: &path, is_exclusive: *is_exclusive };
        costs.insert(row.name.to_owned(), Counter::start(host, &place, root)?.least(row, rounds)?);
    }
    Ok(costs)
}

/// Fails if a number of a row has grown by a fifth against the committed numbers. What has grown is counted anew, in
/// more rounds, before it counts.
pub(crate) fn compare(host: &Host) -> Result<()> {
    let committed: Costs = serde_json::from_str(COMMITTED).context("the committed numbers")?;
    let place = Place::make()?;
    let counter = Counter::start(host, &place, RootOf::Snapshot)?;
    let mut worse = Vec::new();
    for row in ROWS {
        let before = committed.get(row.name).with_context(|| format!("no numbers of {:?}", row.name))?;
        let mut now = counter.least(row, 1)?;
        if !now.growth(before).is_empty() {
            now = counter.least(row, 3)?;
        }
        worse.extend(now.growth(before).into_iter().map(|grown| format!("{}: {grown}", row.name)));
    }
    ensure!(
        worse.is_empty(),
        "expected  no more than was committed\ncame      {}",
        worse.join("\n          ")
    );
    Ok(())
}

impl Cost {
    /// The smaller one of each number.
    fn least(self, other: Self) -> Self {
        let requests =
            if self.all_requests() <= other.all_requests() { self.requests } else { other.requests };
        Self {
            requests,
            exits: self.exits.min(other.exits),
            mmio_exits: self.mmio_exits.min(other.mmio_exits),
            interrupts: self.interrupts.min(other.interrupts),
            copied_bytes: self.copied_bytes.min(other.copied_bytes),
            packets_out: self.packets_out.min(other.packets_out),
            packets_in: self.packets_in.min(other.packets_in),
        }
    }

    /// What is a fifth more than it was. Differences of a few are not counted. Exits, interrupts and packets are not
    /// compared: on a host that is slow because it has other work, timers expire more often, and TCP makes smaller
    /// packets.
    fn growth(&self, before: &Self) -> Vec<String> {
        const GROWTH: f64 = 1.2;
        let numbers = [
            ("requests", self.all_requests(), before.all_requests(), 0.5),
            ("copied bytes", self.copied_bytes, before.copied_bytes, 4096.0),
        ];
        let grown = numbers.into_iter().filter(|(_, now, before, few)| *now > *before * GROWTH + few);
        grown.map(|(what, now, before, _)| format!("{now:.1} {what}, and {before:.1} before")).collect()
    }
}

impl Place {
    fn make() -> Result<Self> {
        let image = ImageRoot::make()?;
        image.write("srv/worker.py", WORKER.as_bytes())?;
        image.write("srv/hello.c", b"#include <stdio.h>\nint main(void) { puts(\"hello\"); }\n")?;
        image.write("srv/page", &[b'x'; PAGE])?;
        image.write("srv/warm", &vec![b'x'; MIB])?;
        (0..COLD).try_for_each(|index| image.write(&format!("srv/cold-{index}"), &vec![b'x'; MIB]))?;
        let bridge = Bridge::new()?;
        let namespace = bridge.namespace(NUMBER)?;
        Ok(Self { image, data: on_disk()?, _bridge: bridge, namespace })
    }
}

impl<'h> Counter<'h> {
    fn start(host: &'h Host, place: &'h Place, root: RootOf<'_>) -> Result<Self> {
        let listener = TcpListener::bind((GATEWAY, 0)).context("cannot listen on the bridge")?;
        let port = listener.local_addr()?.port().to_string();
        let container = place.namespace.container(host).bind(place.data.path(), "/data", "rbind:rw");
        let command = ["python3", "/srv/worker.py", GATEWAY, &port];
        let task = match root {
            RootOf::Snapshot => place.image.detach(host, container, &command)?,
            RootOf::Directory { path, is_exclusive } => {
                let text = format!("exclusive_roots = {is_exclusive}\n");
                let _configured = Replaced::file(Path::new(CONFIGURATION), &text)?;
                container.flags(["--env", PATH]).rootfs(path).detach(&command)?
            }
        };
        let limit = host.patience(LIMIT);
        let orders = BufReader::new(accept(&listener, limit)?);
        let vmm = find_vmm(find_shim(Runtime::Bulkhead, task.id())?)?;
        let control = state_dir(NAMESPACE, task.id())?.join("control.sock");
        Ok(Self { orders, listener, limit, vmm, control, kvm: kvm_directory(vmm)?, task })
    }

    /// What one unit of a row costs: the smallest numbers of so many rounds, less the smallest ones of doing nothing.
    /// The difference within one round would be too small where the guest was busy while it did nothing.
    fn least(&self, row: &Row, rounds: u32) -> Result<Cost> {
        self.cost(row, 1).with_context(|| format!("{} for the first time", row.name))?;
        let mut least: Option<[Cost; 2]> = None;
        for _ in 0..rounds {
            // The first one looks up again what the guest has cached for too long.
            self.cost(row, 0).context(row.name)?;
            let none = self.cost(row, 0).context(row.name)?;
            let all = self.cost(row, row.times).context(row.name)?;
            least = Some(match least {
                Some([least_none, least_all]) => [least_none.least(none), least_all.least(all)],
                None => [none, all],
            });
        }
        let [none, all] = least.context("no rounds")?;
        Ok(all.of_one(&none, row.times))
    }

    fn cost(&self, row: &Row, times: usize) -> Result<Cost> {
        (row.prepare)(self, times)?;
        let before = self.state()?;
        (row.work)(self, times)?;
        Ok(self.state()?.since(&before))
    }

    /// All numbers since the VM has started.
    fn state(&self) -> Result<Cost> {
        let kvm = |name: &str| kvm_counter(&self.kvm, name);
        let io = fs::read_to_string(format!("/proc/{}/io", self.vmm)).context("cannot read the VMM's I/O")?;
        let bytes = |name: &str| -> Result<f64> {
            let value = io.lines().find_map(|line| line.strip_prefix(name));
            Ok(value.with_context(|| format!("no {name} of the VMM"))?.trim().parse()?)
        };
        let [packets_out, packets_in] = packets(self.vmm)?;
        Ok(Cost {
            requests: requests(&self.control)?,
            exits: kvm("exits")?,
            mmio_exits: kvm("mmio_exits")?,
            interrupts: kvm("irq_injections")?,
            copied_bytes: bytes("rchar:")? + bytes("wchar:")?,
            packets_out,
            packets_in,
        })
    }

    /// Has the worker do something, and waits until it has done it.
    fn order(&self, name: &str, times: usize) -> Result<()> {
        self.begin(name, times)?;
        self.end(name)
    }

    fn begin(&self, name: &str, times: usize) -> Result<()> {
        let mut orders = self.orders.get_ref();
        Ok(orders.write_all(format!("{name} {times}\n").as_bytes())?)
    }

    fn end(&self, name: &str) -> Result<()> {
        let mut answer = [0; 5];
        self.orders
            .get_ref()
            .read_exact(&mut answer)
            .with_context(|| format!("the worker does not {name}"))?;
        ensure!(&answer == b"done\n", "expected  done\ncame      {answer:?}");
        Ok(())
    }
}

impl Cost {
    /// What was added since then.
    fn since(&self, before: &Self) -> Self {
        let added = |(name, count): (&String, &f64)| {
            (name.clone(), count - before.requests.get(name).copied().unwrap_or_default())
        };
        Self {
            requests: self.requests.iter().map(added).filter(|(_, count)| *count > 0.0).collect(),
            exits: self.exits - before.exits,
            mmio_exits: self.mmio_exits - before.mmio_exits,
            interrupts: self.interrupts - before.interrupts,
            copied_bytes: self.copied_bytes - before.copied_bytes,
            packets_out: self.packets_out - before.packets_out,
            packets_in: self.packets_in - before.packets_in,
        }
    }

    /// What one unit costs, if `times` of them cost this, and none of them costs `none`.
    fn of_one(&self, none: &Self, times: usize) -> Self {
        let one = |all: f64, none: f64| ((all - none) / times as f64).max(0.0);
        let of_one = |(name, count): (&String, &f64)| {
            (name.clone(), one(*count, none.requests.get(name).copied().unwrap_or_default()))
        };
        Self {
            requests: self.requests.iter().map(of_one).filter(|(_, count)| *count > 0.0).collect(),
            exits: one(self.exits, none.exits),
            mmio_exits: one(self.mmio_exits, none.mmio_exits),
            interrupts: one(self.interrupts, none.interrupts),
            copied_bytes: one(self.copied_bytes, none.copied_bytes),
            packets_out: one(self.packets_out, none.packets_out),
            packets_in: one(self.packets_in, none.packets_in),
        }
    }
}

fn nothing(_: &Counter<'_>, _: usize) -> Result<()> {
    Ok(())
}

fn exec(counter: &Counter<'_>, times: usize) -> Result<()> {
    (0..times).try_for_each(|_| counter.task.exec(&["true"])?.succeeds().map(drop))
}

/// Receives what the worker sends.
fn receive(counter: &Counter<'_>, times: usize) -> Result<()> {
    counter.begin("send", times)?;
    let mut stream = accept(&counter.listener, counter.limit)?;
    let mut data = Vec::new();
    stream.read_to_end(&mut data)?;
    ensure!(data.len() == times * MIB, "the worker has sent {} bytes", data.len());
    stream.write_all(b".")?;
    counter.end("send")
}

/// Sends to the worker.
fn send(counter: &Counter<'_>, times: usize) -> Result<()> {
    counter.begin("receive", times)?;
    let mut stream = accept(&counter.listener, counter.limit)?;
    stream.write_all(&vec![b'x'; times * MIB])?;
    drop(stream);
    counter.end("receive")
}

fn http(counter: &Counter<'_>, times: usize) -> Result<()> {
    counter.begin("answer_http", times)?;
    for _ in 0..times {
        let mut stream = TcpStream::connect((address(NUMBER).as_str(), 80))?;
        stream.set_read_timeout(Some(counter.limit))?;
        stream.write_all(b"GET /page HTTP/1.0\r\n\r\n")?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer)?;
        ensure!(answer.len() > PAGE && answer.starts_with(b"HTTP/1.0 200"), "no page: {answer:?}");
    }
    counter.end("answer_http")
}

/// Waits for a connection of the worker.
pub(crate) fn accept(listener: &TcpListener, limit: Duration) -> Result<TcpStream> {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let limit_of_poll = Timespec::try_from(limit)?;
    let ready = poll(&mut [PollFd::new(listener, PollFlags::IN)], Some(&limit_of_poll))?;
    ensure!(ready == 1, "the worker does not connect");
    let (stream, _) = listener.accept()?;
    stream.set_read_timeout(Some(limit))?;
    stream.set_write_timeout(Some(limit))?;
    Ok(stream)
}

/// Where KVM keeps its counters of the VM of this process: PID-FD.
pub(crate) fn kvm_directory(vmm: u32) -> Result<PathBuf> {
    const KVM: &str = "/sys/kernel/debug/kvm";
    let prefix = format!("{vmm}-");
    for entry in fs::read_dir(KVM).with_context(|| format!("cannot read {KVM}"))? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(&prefix) {
            return Ok(entry.path());
        }
    }
    anyhow::bail!("KVM has no counters of process {vmm}")
}

/// One of the counters in [`kvm_directory`].
pub(crate) fn kvm_counter(kvm: &Path, name: &str) -> Result<f64> {
    let path = kvm.join(name);
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    text.trim().parse().with_context(|| format!("{}: {text:?}", path.display()))
}

/// How many FUSE requests a VMM was sent.
pub(crate) fn requests(control: &Path) -> Result<BTreeMap<String, f64>> {
    let reply = ask(control, &ControlRequest::Counts)?;
    let ControlReply::Counts { shares } = reply else { anyhow::bail!("the VMM answers {reply:?}") };
    let mut sum = BTreeMap::new();
    for (name, count) in shares.into_iter().flat_map(|share| share.requests) {
        *sum.entry(name).or_default() += count as f64;
    }
    Ok(sum)
}

/// What the devices of a VM have done.
pub(crate) fn devices(control: &Path) -> Result<DeviceCounts> {
    match ask(control, &ControlRequest::DeviceCounts)? {
        ControlReply::Devices(counts) => Ok(counts),
        other => anyhow::bail!("the VMM answers {other:?}"),
    }
}

fn ask(control: &Path, request: &ControlRequest) -> Result<ControlReply> {
    // The path itself may be longer than an address may be: docker's ids have 64 letters.
    let (directory, name) =
        (control.parent().context("no directory")?, control.file_name().context("no name")?);
    let directory = fs::File::open(directory).context("no directory of a control socket")?;
    let address = Path::new("/proc/self/fd").join(directory.as_raw_fd().to_string()).join(name);
    let mut stream = std::os::unix::net::UnixStream::connect(address).context("no control socket")?;
    writeln!(stream, "{}", serde_json::to_string(request)?)?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line)?;
    serde_json::from_str(&line).with_context(|| format!("{line:?}"))
}

/// The packets that the guest has sent, and those that it was sent: the numbers of its tap device, in the network
/// namespace of the VMM.
fn packets(vmm: u32) -> Result<[f64; 2]> {
    let path = format!("/proc/{vmm}/net/dev");
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    for line in text.lines().skip(2) {
        let Some((name, numbers)) = line.split_once(':') else { continue };
        if matches!(name.trim(), "lo" | "eth0") {
            continue;
        }
        let numbers: Vec<f64> = numbers.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
        if let (Some(received), Some(sent)) = (numbers.get(1), numbers.get(9)) {
            return Ok([*received, *sent]);
        }
    }
    anyhow::bail!("the VMM has no tap device: {text}")
}
