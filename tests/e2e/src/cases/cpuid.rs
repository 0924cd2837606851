//! What a guest's processor is: the host's, without virtualization, without performance counters, and without whatever
//! docs/security.md does not list.

use std::collections::BTreeSet;
use std::env::current_exe;
use std::fs;

use anyhow::{Context, Result, ensure};

use super::Case;
use crate::cpuid::{self, Documented};
use crate::ctr::Host;
use crate::fixtures::scratch;

// A container of runc has the host's processor.
pub(super) const CASES: &[Case] = &[
    Case::bulkhead("a_guest_has_no_virtualization_and_no_counters", flags),
    Case::bulkhead("a_guest_sees_only_what_is_documented", leaves),
    Case::bulkhead("two_vcpus_are_two_cores_of_one_processor", topology),
];

/// Linux's names of what a guest does not have.
const HIDDEN: [&str; 15] = [
    "svm",
    "vmx",
    "npt",
    "ept",
    "arch_perfmon",
    "perfctr_core",
    "perfctr_nb",
    "perfctr_llc",
    "perfmon_v2",
    "pdcm",
    "ibs",
    "intel_pt",
    "sgx",
    "monitor",
    "aperfmperf",
];
/// What every host with KVM has, or KVM itself.
const NEEDED: [&str; 9] =
    ["sse4_2", "xsave", "rdtscp", "nx", "x2apic", "tsc_deadline_timer", "hypervisor", "arat", "lm"];

/// The values of a field in a `/proc/cpuinfo`, one for each processor.
fn values<'a>(cpuinfo: &'a str, field: &str) -> Vec<&'a str> {
    let value = |line: &'a str| {
        let (name, value) = line.split_once(':')?;
        (name.trim() == field).then(|| value.trim())
    };
    cpuinfo.lines().filter_map(value).collect()
}

fn features(cpuinfo: &str) -> Result<BTreeSet<&str>> {
    let flags = values(cpuinfo, "flags");
    Ok(flags.first().context("no flags in /proc/cpuinfo")?.split(' ').collect())
}

fn flags(host: &Host) -> Result<()> {
    let hosts = fs::read_to_string("/proc/cpuinfo")?;
    let hosts = features(&hosts)?;
    ensure!(hosts.contains("svm") || hosts.contains("vmx"), "expected  a host with KVM\ncame      {hosts:?}");
    let task = host.idle()?;
    let guests = task.exec(&["cat", "/proc/cpuinfo"])?.succeeds()?.text();
    let guests = features(&guests)?;
    let shown: Vec<_> = HIDDEN.iter().filter(|flag| guests.contains(*flag)).collect();
    ensure!(shown.is_empty(), "expected  none of {HIDDEN:?}\ncame      {shown:?}");
    let missing: Vec<_> = NEEDED.iter().filter(|flag| !guests.contains(*flag)).collect();
    ensure!(missing.is_empty(), "expected  all of {NEEDED:?}\ncame      none of {missing:?}");
    // Linux has found no counters, also none that are there without a bit of CPUID.
    let counters = task.exec(&["ls", "/sys/bus/event_source/devices"])?;
    let has_none = !counters.succeeds()?.text().split_whitespace().any(|device| device == "cpu");
    counters.check("no performance counters of the processor", has_none)?;
    Ok(())
}

fn leaves(host: &Host) -> Result<()> {
    let documented = Documented::load()?;
    let program = current_exe().context("cannot find this binary's own path")?;
    let container = host.container().bind(&program, "/cpuid", "rbind:ro");
    let read = cpuid::parse(&container.run(&["/cpuid", "cpuid"])?.succeeds()?.text())?;
    for ((leaf, subleaf), came) in &read {
        // A leaf without subleaves answers the same to every one.
        let place = (*leaf, *subleaf);
        let masks = documented.at(place);
        let is_hidden = came.iter().zip(masks).all(|(register, mask)| register & !mask == 0);
        ensure!(is_hidden, "expected  of {leaf:#x}.{subleaf} only {masks:x?}\ncame      {came:x?}");
    }
    let highest = |class: u32| read.get(&(class, 0)).map(|registers| registers[0]);
    ensure!(highest(0x4000_0000) == Some(0x4000_0001), "expected  KVM's two leaves\ncame      {read:x?}");
    for (leaf, _) in read.keys() {
        let exists = documented.is_leaf(*leaf);
        let is_highest = [0, 0x4000_0000, 0x8000_0000].iter().any(|class| highest(*class) == Some(*leaf));
        ensure!(exists || !is_highest, "expected  a highest leaf that is there\ncame      {leaf:#x}");
    }
    Ok(())
}

fn topology(host: &Host) -> Result<()> {
    let directory = scratch()?;
    let file = directory.path().join("two.toml");
    fs::write(&file, "vcpus = 2\n").context("cannot write a configuration")?;
    let container = host.container().flags(["--runtime-config-path", &file.display().to_string()]);
    let cpuinfo = container.run(&["cat", "/proc/cpuinfo"])?.succeeds()?.text();
    let expect = |field: &str, expected: &[&str]| {
        let came = values(&cpuinfo, field);
        ensure!(came == expected, "expected  {field} {expected:?}\ncame      {came:?}");
        Ok(())
    };
    expect("processor", &["0", "1"])?;
    expect("physical id", &["0", "0"])?;
    expect("core id", &["0", "1"])?;
    expect("apicid", &["0", "1"])?;
    expect("siblings", &["2", "2"])?;
    expect("cpu cores", &["2", "2"])?;
    let flags = values(&cpuinfo, "flags");
    ensure!(flags.len() == 2 && flags[0] == flags[1], "expected  the same features\ncame      {flags:?}");
    Ok(())
}
