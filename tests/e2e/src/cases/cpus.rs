//! The processors that a container sees, and those that it may use.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::json;
use tempfile::TempDir;

use super::Case;
use super::jail::Vmm;
use super::limits::{CGROUP_MOUNT, in_cgroup};
use super::templates::template_of;
use crate::command::wait_until;
use crate::cri::messages::LinuxContainerResources;
use crate::ctr::{Container, Host, Runtime, Task};
use crate::fixtures::{CONFIGURATION, Replaced, Spec, scratch};
use crate::pods::Pod;
use crate::shim::{Shim, granted};

pub(super) const CASES: &[Case] = &[
    Case::both("a_container_sees_as_many_processors_as_its_host_has", as_host),
    Case::both("a_set_of_processors_is_shown_by_its_numbers", set_shown),
    Case::bulkhead("processors_come_and_go_with_the_limit_of_a_container", follow_limit),
    Case::bulkhead("processors_come_and_go_with_the_limits_of_a_pods_containers", follow_pod),
    Case::bulkhead("programs_run_on_two_processors_at_once", two_at_once),
    Case::bulkhead("the_threads_of_processors_in_a_set_run_on_it", pinned),
    // It needs two processors, and other cases need both of them.
    Case::bulkhead("a_processor_of_a_set_that_comes_back_is_used_again", comes_back).by_whole_name_only(),
    Case::bulkhead("burst_idle_and_weight_change_in_any_order", any_order),
    // Seconds of load, which says something only where nothing else runs.
    Case::both("four_busy_processes_use_what_their_limit_allows", busy).by_whole_name_only(),
];

/// How soon the shim sees that a processor of the host is offline or online.
const LOOKS: Duration = Duration::from_secs(20);

const SLEEP: [&str; 2] = ["sleep", "1000"];

/// The number of the host's processors.
fn processors() -> Result<usize> {
    let text = fs::read_to_string("/sys/devices/system/cpu/online").context("no list of processors")?;
    let numbers = text.trim().split(',').map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        Ok(last.parse::<usize>()? - first.parse::<usize>()? + 1)
    });
    numbers.sum()
}

/// The number of vCPUs of a VM by default.
pub(super) fn vcpus() -> Result<usize> {
    Ok(processors()?.min(32))
}

/// Containers whose VMs have two vCPUs, whatever the host has.
struct TwoVcpus<'h> {
    host: &'h Host,
    directory: TempDir,
}

impl<'h> TwoVcpus<'h> {
    fn on(host: &'h Host) -> Result<Self> {
        let directory = scratch()?;
        fs::write(directory.path().join("two.toml"), "vcpus = 2\n")
            .context("cannot write a configuration")?;
        Ok(Self { host, directory })
    }

    fn container(&self) -> Container<'h> {
        let file = self.directory.path().join("two.toml").display().to_string();
        self.host.container().flags(["--runtime-config-path", &file]).flags(CGROUP_MOUNT)
    }
}

fn as_host(host: &Host) -> Result<()> {
    let expected = match host.runtime() {
        Runtime::Runc => processors()?,
        Runtime::Bulkhead => vcpus()?,
    };
    host.run(&["nproc"])?.succeeds()?.prints(&format!("{expected}\n"))?;
    Ok(())
}

/// The last processor of the host, as a set.
fn last() -> Result<String> {
    Ok((vcpus()? - 1).to_string())
}

/// Prints what a container sees of its cpuset.
fn shows_set() -> String {
    let effective = in_cgroup("cpuset.cpus.effective");
    format!("nproc; grep Cpus_allowed_list: /proc/self/status | cut -f2; {effective}")
}

fn set_shown(host: &Host) -> Result<()> {
    let set = last()?;
    let mount =
        json!({ "destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup", "options": ["ro"] });
    let spec = Spec::of(host, &["sh", "-c", &shows_set()])?
        .with("/linux/resources", "cpu", json!({"cpus": set, "mems": "0"}))?
        .with_mount(mount)?;
    spec.run(host.container())?.succeeds()?.prints(&format!("1\n{set}\n{set}\n"))?;
    Ok(())
}

/// Expects this number of processors, by each way to ask for it.
fn sees(task: &Task<'_>, expected: &str) -> Result<()> {
    let script = "nproc; grep -c ^processor /proc/cpuinfo; grep -c '^cpu[0-9]' /proc/stat";
    task.exec(&["sh", "-c", script])?.succeeds()?.prints(&format!("{expected}\n").repeat(3))?;
    Ok(())
}

fn follow_limit(host: &Host) -> Result<()> {
    let two = TwoVcpus::on(host)?;
    let task = two.container().flags(["--cpus", "0.5"]).detach(&SLEEP)?;
    let shim = Shim::of(host, task.id())?;
    sees(&task, "1")?;
    granted(shim.update(&json!({"cpu": {"quota": 150_000}})))?;
    sees(&task, "2")?;
    // It is on the second processor when that goes offline.
    task.exec(&["sh", "-c", "taskset 2 sleep 1000 >/dev/null 2>&1 & taskset 2 echo on the second"])?
        .succeeds()?
        .prints("on the second\n")?;
    granted(shim.update(&json!({"cpu": {"quota": 100_000}})))?;
    sees(&task, "1")?;
    task.exec(&["sh", "-c", "pidof sleep | wc -w"])?.succeeds()?.prints("2\n")?;
    granted(shim.update(&json!({"cpu": {"quota": -1}})))?;
    sees(&task, "2")?;
    let template = template_of(&task)?;
    task.dies()?;
    // The next one is a clone of the same VM, with the second processor offline.
    let task = two.container().flags(["--cpus", "1"]).detach(&SLEEP)?;
    sees(&task, "1")?;
    let again = template_of(&task)?;
    ensure!(template == again, "expected  a clone of {template:?}\ncame      one of {again:?}");
    task.dies()?;
    let task = two.container().flags(["--cpus", "2"]).detach(&SLEEP)?;
    sees(&task, "2")?;
    task.dies()
}

fn follow_pod(host: &Host) -> Result<()> {
    let _configured = Replaced::file(Path::new(CONFIGURATION), "vcpus = 2\n")?;
    let pod = Pod::start(host)?;
    let quota = |cpu_quota: i64| LinuxContainerResources {
        cpu_period: 100_000,
        cpu_quota,
        ..LinuxContainerResources::default()
    };
    // Nothing is known of the pod's limits when it starts, so that it has all.
    let one = pod.container().named("one", 0).resources(quota(40_000)).start(&SLEEP)?;
    let other = pod.container().named("other", 0).resources(quota(40_000)).start(&SLEEP)?;
    one.exec(&["nproc"])?.succeeds()?.prints("2\n")?;
    one.update(quota(50_000))?;
    one.exec(&["nproc"])?.succeeds()?.prints("1\n")?;
    other.update(quota(60_000))?;
    for container in [&one, &other] {
        container.exec(&["nproc"])?.succeeds()?.prints("2\n")?;
    }
    Ok(())
}

fn two_at_once(host: &Host) -> Result<()> {
    let two = TwoVcpus::on(host)?;
    // Each ends when it has counted and the other has begun.
    let script = "cd /tmp; for c in 1 2; do taskset $c sh -c \"touch begun$c; \
                  until test -e begun1 -a -e begun2; do :; done; \
                  i=0; while [ \\$i -lt 3000 ]; do i=\\$((i+1)); done; echo counted\" & done; wait; nproc";
    two.container().run(&["sh", "-c", script])?.succeeds()?.prints("counted\ncounted\n2\n")?;
    Ok(())
}

/// On which processors of the host the threads of a VMM may run, by their names.
fn allowed(vmm: &Vmm) -> Result<Vec<(String, String)>> {
    let threads = vmm.threads()?;
    threads
        .iter()
        .map(|thread| Ok((thread.name.clone(), thread.value("Cpus_allowed_list")?.to_owned())))
        .collect()
}

fn pinned(host: &Host) -> Result<()> {
    let two = TwoVcpus::on(host)?;
    let task = two.container().detach(&SLEEP)?;
    let shim = Shim::of(host, task.id())?;
    let vmm = Vmm::of(&task)?;
    let set = last()?;
    granted(shim.update(&json!({"cpu": {"cpus": set}})))?;
    for (thread, cpus) in allowed(&vmm)? {
        ensure!(cpus == set, "expected  {thread} on processor {set}\ncame      {cpus}");
    }
    task.exec(&["nproc"])?.succeeds()?.prints("1\n")?;
    let all = match processors()? {
        1 => "0".to_owned(),
        count => format!("0-{}", count - 1),
    };
    granted(shim.update(&json!({"cpu": {"cpus": all}})))?;
    let expected = processors()?.min(2);
    task.exec(&["nproc"])?.succeeds()?.prints(&format!("{expected}\n"))?;
    for (thread, cpus) in allowed(&vmm)? {
        // With two processors, each vCPU is the one of its number.
        let own = match thread.as_str() {
            "vcpu0" if processors()? == 2 => "0",
            "vcpu1" if processors()? == 2 => "1",
            name if name.starts_with("vcpu") && processors()? > 2 => continue,
            _ => all.as_str(),
        };
        ensure!(cpus == own, "expected  {thread} on processors {own}\ncame      {cpus}");
    }
    task.dies()
}

/// Takes a processor of the host offline until it is dropped.
struct Offline(PathBuf);

impl Offline {
    fn take(processor: &str) -> Result<Self> {
        let file = Path::new("/sys/devices/system/cpu").join(format!("cpu{processor}/online"));
        fs::write(&file, "0").context("the host does not take its last processor offline")?;
        Ok(Self(file))
    }
}

impl Drop for Offline {
    fn drop(&mut self) {
        // What is offline is seen by all other cases.
        let _ = fs::write(&self.0, "1");
    }
}

fn comes_back(host: &Host) -> Result<()> {
    ensure!(processors()? > 1, "expected  a host with two processors\ncame      one");
    let two = TwoVcpus::on(host)?;
    let task = two.container().detach(&SLEEP)?;
    let (vmm, last) = (Vmm::of(&task)?, last()?);
    granted(Shim::of(host, task.id())?.update(&json!({"cpu": {"cpus": format!("0,{last}")}})))?;
    let on = |processor: &str| Ok(allowed(&vmm)?.contains(&("vcpu1".into(), processor.into())));
    ensure!(on(&last)?, "expected  the second vCPU on processor {last}\ncame      {:?}", allowed(&vmm)?);
    let offline = Offline::take(&last)?;
    wait_until("the second vCPU on another processor", host.patience(LOOKS), || on("0"))?;
    drop(offline);
    wait_until("the second vCPU on its processor", host.patience(LOOKS), || on(&last))?;
    task.dies()
}

fn any_order(host: &Host) -> Result<()> {
    let task = host.container().flags(["--cpus", "0.5"]).flags(CGROUP_MOUNT).detach(&SLEEP)?;
    let shim = Shim::of(host, task.id())?;
    let files = ["cpu.max", "cpu.max.burst", "cpu.idle", "cpu.weight"].map(in_cgroup).join("; ");
    for (update, expected) in [
        (json!({"quota": 40_000, "burst": 30_000}), "40000 100000\n30000\n0\n100\n"),
        (json!({"quota": 100_000, "burst": 80_000}), "100000 100000\n80000\n0\n100\n"),
        (json!({"quota": 20_000, "burst": 10_000}), "20000 100000\n10000\n0\n100\n"),
        (json!({"burst": 0, "shares": 512, "idle": 1}), "20000 100000\n0\n1\n1\n"),
        (json!({"shares": 2048, "idle": 0}), "20000 100000\n0\n0\n174\n"),
    ] {
        granted(shim.update(&json!({ "cpu": update })))?;
        task.exec(&["sh", "-c", &files])?.succeeds()?.prints(expected)?;
    }
    task.dies()
}

/// Runs four busy processes for some seconds, and compares the time of processors that they used with what the limit
/// allows. `cargo xtask bench processors` reads what it prints.
fn busy(host: &Host) -> Result<()> {
    const SECONDS: u64 = 8;
    let processors = vcpus()? as f64;
    // Each prints how often it went round.
    let one = "n=0; trap 'echo $n; exit' TERM; while :; do n=$((n+1)); done";
    let load = format!("for i in 1 2 3 4; do timeout {SECONDS} sh -c \"$0\" & done; wait");
    let usage = in_cgroup("cpu.stat") + " | sed -n 's/^usage_usec /usage=/p'";
    for (limit, flags, set, allowed) in [
        ("0.5", vec!["--cpus", "0.5"], None, 0.5),
        ("1", vec!["--cpus", "1"], None, 1.0),
        ("2", vec!["--cpus", "2"], None, 2.0),
        ("none", vec![], None, processors),
        ("a cpuset of one processor", vec![], Some(last()?), 1.0),
    ] {
        let task = host.container().flags(CGROUP_MOUNT).flags(flags).detach(&SLEEP)?;
        if let Some(set) = set {
            granted(Shim::of(host, task.id())?.update(&json!({ "cpu": { "cpus": set } })))?;
        }
        let begun = Instant::now();
        let rounds = task.exec(&["sh", "-c", &load, one])?.text();
        let took = begun.elapsed().min(Duration::from_secs(2 * SECONDS)).as_secs_f64();
        let rounds: u64 = rounds.lines().filter_map(|line| line.parse::<u64>().ok()).sum();
        let stat = task.exec(&["sh", "-c", &usage])?.succeeds()?.value("usage")?;
        let used = stat.parse::<f64>().context("no time of processors")? / 1e6;
        let allowed = allowed.min(processors) * SECONDS as f64;
        let seen = task.exec(&["nproc"])?.succeeds()?.text();
        eprintln!(
            "busy: limit {limit}; nproc {}; used {used:.1} s of {allowed:.1} s; {rounds} rounds in {took:.1} s",
            seen.trim()
        );
        ensure!(
            used > 0.7 * allowed && used < 1.2 * allowed + 1.0,
            "expected  with limit {limit} about {allowed:.1} s\ncame      {used:.1} s"
        );
        task.dies()?;
    }
    Ok(())
}
