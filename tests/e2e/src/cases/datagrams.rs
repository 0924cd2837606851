//! UDP datagrams that a program sends at once (UDP_SEGMENT) and receives at once (UDP_GRO), as QUIC servers do.

use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::Case;
use super::programs::HostCopy;
use crate::bench::memory::{find_shim, find_vmm};
use crate::command::{Cmd, Finished};
use crate::counts::{kvm_counter, kvm_directory};
use crate::ctr::{Host, Runtime, Task};
use crate::network::{Bridge, GATEWAY, GATEWAY6, Namespace, address, address_in, address6, gateway};

pub(super) const CASES: &[Case] = &[
    Case::both("what_is_sent_at_once_arrives_at_once", at_once),
    Case::bulkhead("a_mib_passes_the_tap_in_few_packets", few_packets),
];

const PROGRAM: &str = include_str!("datagrams/bursts.py");
const PLACE: &str = "srv/bursts.py";
/// How long a program may take on an ordinary machine.
const LIMIT: Duration = Duration::from_secs(60);
/// Bytes of a burst, and of its datagrams.
const BURST: usize = 60_000;
const DATAGRAM: usize = 1200;
/// The number of the second network.
const SECOND: u8 = 21;

/// Each program has a port of its own.
static PORT: AtomicU16 = AtomicU16::new(7100);

/// Who sends.
#[derive(Debug, Clone, Copy)]
enum Sender {
    Host,
    Container,
}

/// A container, and the same program on the host.
struct Ends<'h> {
    task: Task<'h>,
    copy: HostCopy,
    limit: Duration,
}

impl<'h> Ends<'h> {
    fn start(host: &'h Host, namespace: &Namespace) -> Result<Self> {
        let copy = HostCopy::mount()?;
        copy.write(PLACE, PROGRAM)?;
        let task = copy.as_root_of(namespace.container(host)).detach(&["sleep", "1000"])?;
        Ok(Self { task, copy, limit: host.patience(LIMIT) })
    }

    /// Has `sender` send so many bursts to the other end. Compares the bytes. Returns the sizes that were received at
    /// once.
    fn send(&self, sender: Sender, of_host: &str, of_container: &str, bursts: usize) -> Result<String> {
        let port = PORT.fetch_add(1, Ordering::Relaxed).to_string();
        let (count, on_host) = (bursts.to_string(), self.copy.root().join(PLACE).display().to_string());
        let in_container = format!("/{PLACE}");
        let arguments = |verb, address| [verb, address, port.as_str(), count.as_str()];
        let (here, there) = match sender {
            Sender::Host => (arguments("send", of_container), arguments("receive", of_container)),
            Sender::Container => (arguments("receive", of_host), arguments("send", of_host)),
        };
        let mut here = Cmd::new("python3").args([on_host.as_str()]).args(here).limit(self.limit).start()?;
        let command: Vec<&str> = ["python3", in_container.as_str()].into_iter().chain(there).collect();
        let there = self.task.exec(&command)?;
        there.succeeds()?;
        let here = here.finish()?;
        here.succeeds()?;
        let (sent, received) = match sender {
            Sender::Host => (here, there),
            Sender::Container => (there, here),
        };
        sizes(&sent, &received)
    }
}

/// Compares the digests. Returns the sizes that were received at once.
fn sizes(sent: &Finished, received: &Finished) -> Result<String> {
    let text = received.text();
    let (digest, sizes) = text.trim().split_once(' ').context("no sizes of what was received")?;
    received.check("the bytes that were sent", digest == sent.text().trim())?;
    Ok(sizes.to_owned())
}

/// By both versions of IP, and by an interface that is attached to the VM after its start.
fn at_once(host: &Host) -> Result<()> {
    let bridge = Bridge::new()?;
    let namespace = bridge.namespace(2)?;
    namespace.add("net1", SECOND)?;
    let ends = Ends::start(host, &namespace)?;
    let ways = [
        (GATEWAY.to_owned(), address(2)),
        (GATEWAY6.to_owned(), address6(2)),
        (gateway(SECOND), address_in(SECOND)),
    ];
    for (of_host, of_container) in ways {
        for sender in [Sender::Container, Sender::Host] {
            let came = ends.send(sender, &of_host, &of_container, 8)?;
            let expected = format!("{BURST}/{DATAGRAM}");
            ensure!(
                came == expected,
                "expected  {expected} bytes at once from the {sender:?}, {of_host} and {of_container}\n\
                 came      {came}"
            );
        }
    }
    Ok(())
}

/// What a VM has done so far.
#[derive(Debug, Clone, Copy)]
struct Counts {
    exits: f64,
    mmio_exits: f64,
    interrupts: f64,
    packets: f64,
}

/// Where they are counted.
struct Counters {
    kvm: PathBuf,
    tap: PathBuf,
}

impl Counters {
    fn of(task: &Task<'_>) -> Result<Self> {
        let vmm = find_vmm(find_shim(Runtime::Bulkhead, task.id())?)?;
        Ok(Self { kvm: kvm_directory(vmm)?, tap: format!("/proc/{vmm}/net/dev").into() })
    }

    fn read(&self) -> Result<Counts> {
        let kvm = |name: &str| kvm_counter(&self.kvm, name);
        let taps = fs::read_to_string(&self.tap).context("no counters of interfaces")?;
        let line = taps.lines().find_map(|line| line.trim().strip_prefix("veth-bulkhead:"));
        let numbers: Vec<f64> = line
            .context("no counters of the tap")?
            .split_whitespace()
            .map(str::parse)
            .collect::<Result<_, _>>()?;
        let packets = numbers.get(1).zip(numbers.get(9)).map(|(received, sent)| received + sent);
        Ok(Counts {
            exits: kvm("exits")?,
            mmio_exits: kvm("mmio_exits")?,
            interrupts: kvm("irq_injections")?,
            packets: packets.context("no packets of the tap")?,
        })
    }
}

impl Counts {
    fn with(self, other: Self, of: impl Fn(f64, f64) -> f64) -> Self {
        Self {
            exits: of(self.exits, other.exits),
            mmio_exits: of(self.mmio_exits, other.mmio_exits),
            interrupts: of(self.interrupts, other.interrupts),
            packets: of(self.packets, other.packets),
        }
    }
}

/// What a MiB costs, without the start of the program that sends or receives it.
fn of_a_mib(ends: &Ends<'_>, counters: &Counters, sender: Sender) -> Result<Counts> {
    const BURSTS: usize = 70;
    let cost = |bursts| {
        let before = counters.read()?;
        ends.send(sender, GATEWAY, &address(2), bursts)?;
        Ok::<_, anyhow::Error>(counters.read()?.with(before, |now, before| now - before))
    };
    // The first one fills the caches.
    let [_, few, many] = [2, 2, 2 + BURSTS].map(cost);
    let mib = (BURSTS * BURST) as f64 / f64::from(1 << 20);
    Ok(many?.with(few?, |many, few| (many - few) / mib))
}

/// A MiB is 17.5 bursts of 50 datagrams. Each is answered by one packet.
fn few_packets(host: &Host) -> Result<()> {
    let bridge = Bridge::new()?;
    let namespace = bridge.namespace(2)?;
    let ends = Ends::start(host, &namespace)?;
    let counters = Counters::of(&ends.task)?;
    let [out, into] = [Sender::Container, Sender::Host].map(|sender| of_a_mib(&ends, &counters, sender));
    let (out, into) = (out?, into?);
    let came = format!("out of the container {out:.1?}, into it {into:.1?}");
    println!("{came}");
    ensure!(out.packets < 60.0 && into.packets < 60.0, "expected  fewer than 60 packets\ncame      {came}");
    Ok(())
}
