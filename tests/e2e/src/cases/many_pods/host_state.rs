//! What pods may leave on a host beside what `snapshot.rs` looks at, and what lives longer than they do.

use std::collections::BTreeSet;
use std::fmt::{self, Write as _};
use std::fs;
use std::process;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::command::{Cmd, wait_until};
use crate::containerd::PREFIX;
use crate::ctr::{Host, Runtime};
use crate::pods::{Pod, Pods};
use crate::snapshot::{pids, the_process_of};

/// containerd removes snapshots, and the kernel what belonged to a network namespace, in the background.
const SETTLES: Duration = Duration::from_secs(15);

/// Loop devices, rules of iptables, and what containerd knows of containers.
#[derive(PartialEq)]
pub(super) struct HostState(BTreeSet<String>);

impl HostState {
    pub(super) fn take(pods: &Pods) -> Result<Self> {
        let mut found = BTreeSet::new();
        let mut add =
            |kind: &str, text: String| found.extend(text.lines().map(|line| format!("{kind} {line}")));
        let of = |program: &str| Ok::<_, anyhow::Error>(Cmd::new(program).run()?.succeeds()?.text());
        let loops =
            Cmd::new("losetup").args(["--list", "--noheadings", "--output", "NAME,BACK-FILE"]).run()?;
        add("loop device", loops.succeeds()?.text());
        for program in ["iptables-save", "ip6tables-save"] {
            // Comments have the time.
            let rules = of(program)?;
            add(program, rules.lines().filter(|line| line.starts_with('-')).fold(String::new(), in_lines));
        }
        for list in [
            &["containers", "ls", "-q"][..],
            &["tasks", "ls", "-q"],
            &["snapshots", "ls"],
            &["leases", "ls", "-q"],
        ] {
            add(list[0], pods.ctr().args(list).run()?.succeeds()?.text());
        }
        Ok(Self(found))
    }

    /// Expects that the host comes to look like this again.
    pub(super) fn expect_same(&self, host: &Host, pods: &Pods) -> Result<()> {
        let mut after = Self(BTreeSet::new());
        let same = wait_until("the host as before", host.patience(SETTLES), || {
            after = Self::take(pods)?;
            Ok(after == *self)
        });
        let left: String = after.0.difference(&self.0).map(String::as_str).fold(String::new(), in_lines);
        let lost: String = self.0.difference(&after.0).map(String::as_str).fold(String::new(), in_lines);
        same.with_context(|| format!("left behind:\n{left}lost:\n{lost}"))
    }
}

fn in_lines(mut text: String, line: &str) -> String {
    text.push_str(line);
    text.push('\n');
    text
}

/// The pods' containerd, and the shim and the VMM of a pod that lives all the while.
pub(super) struct Survivors(Vec<(&'static str, u32)>);

/// What a process uses.
#[derive(Debug)]
pub(super) struct Usage {
    pub(super) name: &'static str,
    pub(super) descriptors: u64,
    pub(super) threads: u64,
    /// Anonymous memory: a VMM's with that of its guest.
    pub(super) memory_kib: u64,
}

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, descriptors, threads, memory_kib } = self;
        write!(f, "{name} {descriptors} descriptors {threads} threads {memory_kib} KiB")
    }
}

impl Survivors {
    pub(super) fn find(host: &Host, neighbour: &Pod<'_>) -> Result<Self> {
        let shim = the_process_of(host.runtime().shim(), neighbour.id())?;
        let mut found = vec![("containerd", containerd()?), ("shim", shim)];
        if host.runtime() == Runtime::Bulkhead {
            found.push(("VMM", the_process_of("bulkhead-vmm", neighbour.id())?));
        }
        Ok(Self(found))
    }

    pub(super) fn usage(&self) -> Result<Vec<Usage>> {
        self.0.iter().map(|(name, pid)| Usage::of(name, *pid)).collect()
    }
}

impl Usage {
    fn of(name: &'static str, pid: u32) -> Result<Self> {
        let context = || format!("{name}, process {pid}, has ended");
        let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).with_context(context)?.count() as u64;
        let status = fs::read_to_string(format!("/proc/{pid}/status")).with_context(context)?;
        let number = |key: &str| -> Result<u64> {
            let value = status.lines().find_map(|line| line.strip_prefix(key));
            let value = value.and_then(|line| line.split_whitespace().next()).with_context(context)?;
            Ok(value.parse()?)
        };
        Ok(Self { name, descriptors, threads: number("Threads:")?, memory_kib: number("RssAnon:")? })
    }
}

/// The containerd of the pods, which this process has started as a unit of systemd's.
fn containerd() -> Result<u32> {
    let unit = format!("/{PREFIX}{}-", process::id());
    let is_it = |pid: &u32| {
        let file = |name: &str| fs::read_to_string(format!("/proc/{pid}/{name}")).unwrap_or_default();
        file("comm").trim() == "containerd" && file("cgroup").contains(&unit)
    };
    pids()?.into_iter().find(is_it).context("the containerd of the pods does not run")
}

/// What the kernel keeps, for who reads the output: cgroups that are gone and not yet freed, and memory of the kernel.
pub(super) fn of_the_kernel() -> String {
    let mut text = String::new();
    for (file, keys) in [
        ("/sys/fs/cgroup/cgroup.stat", &["nr_dying_descendants"][..]),
        ("/proc/meminfo", &["SUnreclaim:", "Percpu:", "MemAvailable:"]),
    ] {
        let found = fs::read_to_string(file).unwrap_or_default();
        let lines = found.lines().filter(|line| keys.iter().any(|key| line.starts_with(key)));
        for line in lines {
            let words: Vec<_> = line.split_whitespace().take(2).collect();
            // Writing to a string cannot fail.
            _ = write!(text, " | {}", words.join(" "));
        }
    }
    text
}
