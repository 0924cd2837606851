//! Measurements: how fast a VM and a container start, and what they cost in memory while they idle.
//!
//! What is compared takes turns, and every other round goes backwards (A B, B A, ...), so that what disturbs the host
//! for a while disturbs both. A number may be as bad as it likes: only what does not work is an error.

pub(crate) mod boot;
pub(crate) mod memory;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;

use crate::command::Cmd;
use crate::containerd::Version;
use crate::ctr::{Host, Runtime, Task};
use crate::fixtures::{CONFIGURATION, Replaced, in_threads};
use crate::pods::Pod;

use boot::{MEMORY_MIB, Saved, VCPUS, Vm};
use memory::{Footprint, find_shim, find_vmm};

/// After this time without anything to do a VM or a container counts as idle.
const IDLES: Duration = Duration::from_secs(2);

/// How often a round does what is over soon, so that its median says more than what disturbs the host for a moment.
const REPEATED: usize = 5;
/// So many idle containers show what one more costs.
const MANY: usize = 30;
/// As many are started at the same time.
const THREADS: usize = 5;
/// Pods that are all wanted at the same moment.
const PODS: usize = 20;
/// How often each side does what takes minutes: of so many pairs there is an interval.
const LONG_ROUNDS: usize = 6;

/// What was measured. `cargo xtask bench` reads it.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    /// Facts about the host and the programs compared.
    facts: BTreeMap<&'static str, String>,
    /// Samples by what they are of, in the order they were taken: ms if the name ends so, else MiB.
    series: BTreeMap<&'static str, Vec<f64>>,
}

/// Values of some series, taken together.
type Sample = Vec<(&'static str, f64)>;

/// The two hosts of containers, and a VM to clone.
struct Bench {
    runc: Host,
    bulkhead: Host,
    saved: Saved,
}

/// One round.
const STEPS: [fn(&Bench) -> Result<Sample>; 12] = [
    |_| boot(Vm::bulkhead()?, ["boot bulkhead ms", "vm bulkhead vmm", "vm bulkhead guest"]),
    |_| boot(Vm::qemu()?, ["boot qemu ms", "vm qemu vmm", "vm qemu guest"]),
    |_| Ok(vec![("boot ordinary ms", millis(Vm::of_ordinary_kernel()?.took()))]),
    |_| Ok(vec![("kernel bulkhead ms", millis(Vm::kernel_alone(boot::KERNEL)?))]),
    |_| Ok(vec![("kernel ordinary ms", millis(Vm::kernel_alone(boot::ORDINARY_KERNEL)?))]),
    |bench| {
        let clone = |_| Ok(millis(Vm::clone_of(&bench.saved)?.took()));
        Ok(vec![("clone bulkhead ms", median((0..REPEATED).map(clone).collect::<Result<_>>()?))])
    },
    |bench| container(&bench.runc, ["begin runc ms", "run runc ms", "cpu runc ms"]),
    |bench| container(&bench.bulkhead, ["begin bulkhead ms", "run bulkhead ms", "cpu bulkhead ms"]),
    |bench| {
        let _configured = Replaced::file(Path::new(CONFIGURATION), "templates = false\n")?;
        container(&bench.bulkhead, ["begin bulkhead cold ms", "run bulkhead cold ms", "cpu bulkhead cold ms"])
    },
    |bench| pod(&bench.runc, ["pod runc ms", "pod runc cni ms"]),
    |bench| pod(&bench.bulkhead, ["pod bulkhead ms", "pod bulkhead cni ms"]),
    idle,
];

/// Takes `rounds` samples of what is over soon, after a round that does not count: it fills the caches. What takes
/// minutes is measured [`LONG_ROUNDS`] times: many pods at once, and, if it is wanted, what memory costs where there
/// are many containers.
pub(crate) fn run(archive: &Path, rounds: u32, wants_memory: bool) -> Result<Report> {
    ensure!(rounds > 0, "no round, no numbers");
    let version = Version::of_containerd()?;
    let runc = Host::prepare(Runtime::Runc, version, archive)?;
    let bench = Bench { bulkhead: runc.with(Runtime::Bulkhead), runc, saved: Saved::make()? };
    let mut report = Report { facts: facts()?, series: BTreeMap::new() };
    for round in 0..=rounds {
        eprintln!("round {round} of {rounds}{}", if round == 0 { ", which does not count" } else { "" });
        let mut steps = STEPS;
        if round % 2 == 0 {
            steps.reverse();
        }
        for step in steps {
            let sample = step(&bench)?;
            if round > 0 {
                sample
                    .into_iter()
                    .for_each(|(name, value)| report.series.entry(name).or_default().push(value));
            }
        }
    }
    report.take_turns(
        &format!("{PODS} pods at once"),
        [
            ("pods at once runc ms", &|| pods_at_once(&bench.runc)),
            ("pods at once bulkhead ms", &|| pods_at_once(&bench.bulkhead)),
        ],
    )?;
    if wants_memory {
        report.take_turns(
            &format!("{MANY} idle containers"),
            [
                ("pod of many runc", &|| one_of_many(&bench.runc)),
                ("pod of many bulkhead", &|| one_of_many(&bench.bulkhead)),
            ],
        )?;
    }
    Ok(report)
}

/// What is measured, by the name of its series.
type Side<'a> = (&'static str, &'a dyn Fn() -> Result<f64>);

impl Report {
    /// Measures both sides as often as what takes long is measured, every other time in the opposite order.
    fn take_turns(&mut self, what: &str, mut sides: [Side<'_>; 2]) -> Result<()> {
        for round in 1..=LONG_ROUNDS {
            eprintln!("{what}, {round} of {LONG_ROUNDS}");
            for (name, measure) in &sides {
                self.series.entry(name).or_default().push(measure()?);
            }
            sides.reverse();
        }
        Ok(())
    }
}

/// How long many pods take that start at the same time.
fn pods_at_once(host: &Host) -> Result<f64> {
    let started = Instant::now();
    let pods = in_threads(PODS, 0..PODS, |_| Pod::start(host))?;
    let took = started.elapsed();
    in_threads(THREADS, pods, Pod::remove)?;
    Ok(millis(took))
}

/// What one more idle container costs a host that has many, MiB: all that belongs to it, its guest among that.
fn one_of_many(host: &Host) -> Result<f64> {
    let all = |tasks: &[Task<'_>]| {
        let shares = tasks.iter().map(|task| {
            let shim = find_shim(host.runtime(), task.id())?;
            let shim_share = Footprint::of(shim)?.share_mib;
            Ok(match host.runtime() {
                Runtime::Runc => shim_share,
                Runtime::Bulkhead => shim_share + Footprint::of(find_vmm(shim)?)?.share_mib,
            })
        });
        shares.sum::<Result<f64>>()
    };
    let start = |_| host.container().detach(&["sleep", "3600"]);
    let mut tasks = vec![start(0)?];
    thread::sleep(IDLES);
    let one = all(&tasks)?;
    tasks.extend(in_threads(THREADS, 1..MANY, start)?);
    thread::sleep(IDLES);
    Ok((all(&tasks)? - one) / (MANY - 1) as f64)
}

/// From the spawn of a VMM to the word of its guest's agent, then the memory of VMM and guest.
fn boot(vm: Vm, [took, vmm, guest]: [&'static str; 3]) -> Result<Sample> {
    thread::sleep(IDLES);
    let footprint = Footprint::of(vm.pid())?;
    ensure!(footprint.guest_mib > 0.0, "no mapping of the process {} is known as a guest's memory", vm.pid());
    Ok(vec![(took, millis(vm.took())), (vmm, footprint.own_mib), (guest, footprint.guest_mib)])
}

/// The sandbox of a pod, as the CRI makes it: all but its network, and that.
fn pod(host: &Host, [took, network]: [&'static str; 2]) -> Result<Sample> {
    let pods = host.pods()?;
    let before = pods.time_for_networks()?;
    let started = Instant::now();
    let pod = Pod::start(host)?;
    let all = started.elapsed();
    let cni = pods.time_for_networks()?.saturating_sub(before);
    pod.remove()?;
    ensure!(!cni.is_zero(), "containerd does not say how long CNI has taken");
    Ok(vec![(took, millis(all.saturating_sub(cni))), (network, millis(cni))])
}

/// A container from nothing to what its program does first, and to its end, and the processor time that it took of the
/// host.
fn container(host: &Host, [begins, ends, cpu]: [&'static str; 3]) -> Result<Sample> {
    let busy = busy_ms()?;
    let started = Instant::now();
    let attached = host.container().start(&["echo", "begun"])?;
    attached.running.wait_for("begun\n")?;
    let began = started.elapsed();
    let took = attached.finish()?.succeeds()?.took;
    Ok(vec![(begins, millis(began)), (ends, millis(took)), (cpu, busy_ms()? - busy)])
}

/// A container of each that idles: what it costs in memory, and how long one more process in it takes, to its end.
fn idle(bench: &Bench) -> Result<Sample> {
    const SLEEP: [&str; 2] = ["sleep", "3600"];
    let theirs = bench.runc.container().detach(&SLEEP)?;
    let ours = bench.bulkhead.container().detach(&SLEEP)?;
    thread::sleep(IDLES);
    let their_shim = Footprint::of(find_shim(Runtime::Runc, theirs.id())?)?;
    let our_shim = find_shim(Runtime::Bulkhead, ours.id())?;
    let vmm = Footprint::of(find_vmm(our_shim)?)?;
    let our_shim = Footprint::of(our_shim)?;
    let (mut runc, mut bulkhead) = (Vec::new(), Vec::new());
    for n in 0..REPEATED {
        let mut turns = [(&theirs, &mut runc), (&ours, &mut bulkhead)];
        if n % 2 == 1 {
            turns.reverse();
        }
        for (task, took) in turns {
            took.push(millis(task.exec(&["true"])?.succeeds()?.took));
        }
    }
    Ok(vec![
        ("exec runc ms", median(runc)),
        ("exec bulkhead ms", median(bulkhead)),
        ("pod runc shim", their_shim.own_mib),
        ("pod bulkhead shim", our_shim.own_mib),
        ("pod bulkhead vmm", vmm.own_mib),
        ("pod bulkhead guest", vmm.guest_mib),
    ])
}

/// Of values of which there is one at least, an odd number.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Processor time that the host has spent on anything since it booted: the first line of proc_stat(5), but for its idle
/// and iowait. What a guest takes is part of user.
fn busy_ms() -> Result<f64> {
    const MS_PER_TICK: f64 = 10.0;
    let stat = fs::read_to_string("/proc/stat").context("cannot read /proc/stat")?;
    let fields = stat.lines().next().unwrap_or_default().split_whitespace().skip(1).take(8);
    let ticks = fields.map(|field| field.parse::<u64>().context("cannot understand /proc/stat"));
    let ticks: Vec<_> = ticks.collect::<Result<_>>()?;
    let [user, nice, system, _idle, _iowait, irq, softirq, _steal] = ticks.as_slice() else {
        bail!("cannot understand /proc/stat")
    };
    Ok((user + nice + system + irq + softirq) as f64 * MS_PER_TICK)
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// What the numbers depend on.
pub(crate) fn facts() -> Result<BTreeMap<&'static str, String>> {
    let first_line = |program: &str, args: &[&str]| -> Result<String> {
        let text = Cmd::new(program).args(args).run()?.succeeds()?.text();
        Ok(text.lines().next().unwrap_or_default().trim().to_owned())
    };
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").context("cannot read /proc/cpuinfo")?;
    let cpu = cpuinfo.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let cpus = cpuinfo.lines().filter(|line| line.starts_with("processor")).count();
    Ok(BTreeMap::from([
        ("host's processor", format!("{cpus} x {}", cpu.map_or("unknown", |(_, name)| name))),
        ("host's kernel", first_line("uname", &["-r"])?),
        // Exits 1 where it answers "none".
        ("virtualization", Cmd::new("systemd-detect-virt").run()?.text().trim().to_owned()),
        ("containerd", first_line("containerd", &["--version"])?),
        ("runc", first_line("runc", &["--version"])?),
        ("QEMU", first_line(boot::QEMU, &["--version"])?),
        ("booted VMs", format!("{VCPUS} vCPU, {MEMORY_MIB} MiB")),
    ]))
}
