//! What `cargo xtask demo density` shows: how many pods a host has room for.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::command::Cmd;
use crate::ctr::{Host, Task};

/// It ends when there are so many pods, or so much time has passed, or so little memory is left.
const MOST: usize = 24;
const WITHIN: Duration = Duration::from_secs(100);
const LEAST_KIB: u64 = 600 << 10;

/// Starts pods until one of the bounds, shows what they use, and removes them.
pub(crate) fn tell(host: &Host) -> Result<()> {
    // The first pod of a host makes the template, which the others share.
    host.run(&["true"])?.succeeds()?;
    let before = available()?;
    println!("{} MiB of memory are available. Each pod runs `sleep 1000`.", before >> 10);
    let begun = Instant::now();
    let mut pods: Vec<Task<'_>> = Vec::new();
    let why = loop {
        match () {
            () if pods.len() >= MOST => break format!("there are {MOST}"),
            () if begun.elapsed() > WITHIN => break format!("{} s have passed", WITHIN.as_secs()),
            () if available()? < LEAST_KIB => break format!("{} MiB of memory are left", LEAST_KIB >> 10),
            () => {}
        }
        let started = Instant::now();
        pods.push(host.container().detach(&["sleep", "1000"])?);
        println!("pod {:3}  up after {:.2} s", pods.len(), started.elapsed().as_secs_f64());
    };
    println!("No more are started, because {why}.");
    let used = before.saturating_sub(available()?);
    show(&pods, used)?;
    for pod in pods {
        pod.dies()?;
    }
    println!("All of them are removed. {} MiB of memory are available.", available()? >> 10);
    Ok(())
}

/// Shows `bulkhead ps`, and what a pod takes. `used_kib` is what all of them have taken of the host's memory.
fn show(pods: &[Task<'_>], used_kib: u64) -> Result<()> {
    println!("\n$ bulkhead ps");
    print!("{}", Cmd::new("bulkhead").args(["ps"]).run()?.succeeds()?.text());
    let listed = Cmd::new("bulkhead").args(["ps", "--json"]).run()?.succeeds()?.text();
    let listed: Vec<Value> = serde_json::from_str(&listed).context("`bulkhead ps --json` is not a list")?;
    let of_pod = |pod: &Task<'_>| listed.iter().find(|listed| listed["id"] == pod.id());
    let clones = pods.iter().filter(|pod| of_pod(pod).is_some_and(|pod| !pod["template"].is_null())).count();
    ensure!(clones == pods.len(), "only {clones} of {} pods are clones of a template", pods.len());
    let bytes: Option<u64> = pods.iter().map(|pod| of_pod(pod)?["memory_bytes"].as_u64()).sum();
    let bytes = bytes.context("`bulkhead ps` does not say what memory each pod uses")?;
    let count = pods.len() as u64;
    let tenths = |bytes: u64| format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20));
    println!("\n{count} pods, all of them clones.");
    println!("VMM and guest, by `bulkhead ps`:       {} each", tenths(bytes / count));
    // The template was there before the first of them, and each of them is charged with its share of it by `ps`.
    println!("less memory available on the host:     {} each, with shims", tenths((used_kib << 10) / count));
    let more = available()?.saturating_sub(LEAST_KIB) / (used_kib / count).max(1);
    println!("Memory is there for about {more} more that do as little.\n");
    Ok(())
}

/// What the host's kernel can give to programs, in KiB (proc_meminfo(5)).
fn available() -> Result<u64> {
    let text = fs::read_to_string("/proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let number = line.and_then(|line| line.trim().strip_suffix("kB")).context("no MemAvailable")?;
    Ok(number.trim().parse()?)
}
