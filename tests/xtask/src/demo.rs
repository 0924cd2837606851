//! `cargo xtask demo`: an image in containerd, run by runc and by Bulkhead, in the rig; or a pod, an attacker, or as
//! many pods as fit.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use clap::ValueEnum;

use crate::cache::Cache;
use crate::dist::{self, Profile};
use crate::oci::IMAGE;
use crate::progress::step;
use crate::rig::{Accelerator, Io, Limit, Payload, Rig, Session};
use crate::tools::Tools;

/// How long one command of the demo may take.
const LIMIT: Duration = Duration::from_secs(120);

/// How long an attack of all kinds may take, or the start and the end of many pods.
const LONG_LIMIT: Duration = Duration::from_secs(600);

const RUNC: &str = "io.containerd.runc.v2";
const BULKHEAD: &str = "io.containerd.bulkhead.v2";

/// These stories are told by the end-to-end tests' program.
const POD: &str = "/usr/lib/bulkhead/tests/bulkhead-e2e pod --runtime bulkhead";
const ATTACKS: &str = "/usr/lib/bulkhead/tests/bulkhead-e2e attacks";
const DENSITY: &str = "/usr/lib/bulkhead/tests/bulkhead-e2e density";

/// What the demo's container does with its standard output, its own system and its exit status.
const STORY: &str =
    "echo \"I am $(id -un), process $$, with $(nproc) CPU\"; df -h / | tail -n 1; ls /; exit 7";

/// What can be shown.
#[derive(Clone, Copy, Default, ValueEnum)]
pub(crate) enum Demo {
    /// A container, run by `ctr`.
    #[default]
    Container,
    /// A pod of several containers, run through the CRI.
    Pod,
    /// A privileged container that attacks its host, and what the host saw of each attempt.
    Hostile,
    /// As many clones as fit within some bounds, and the memory of each.
    Density,
}

/// Sets up everything and shows it. Fails if the result is not as expected.
pub(crate) fn run(cache: &Cache, tools: &Tools, what: Demo) -> Result<()> {
    let payload = Payload::new(cache, &[dist::build(cache, tools, Profile::Shipped)?.put()])?;
    let rig = Rig::ensure(cache, tools)?;
    println!("The host of this demo is {}.", Accelerator::describe());
    let mut session = step("starting the host", || rig.start(&payload))?;
    let host_kernel = show(&mut session, "uname -r", 0)?;
    match what {
        Demo::Container => show_container(&mut session, &host_kernel)?,
        Demo::Pod => drop(show(&mut session, POD, 0)?),
        Demo::Hostile => drop(show_within(&mut session, ATTACKS, 0, LONG_LIMIT)?),
        Demo::Density => drop(show_within(&mut session, DENSITY, 0, LONG_LIMIT)?),
    }
    session.finish();
    Ok(())
}

fn show_container(session: &mut Session, host_kernel: &str) -> Result<()> {
    show(session, "ctr image import /usr/lib/bulkhead/tests/busybox-oci.tar", 0)?;
    let shared_kernel = show(session, &ctr_run(RUNC, "uname -r"), 0)?;
    let guest_kernel = show(session, &ctr_run(BULKHEAD, "uname -r"), 0)?;
    show(session, &ctr_run(BULKHEAD, &format!("sh -c '{STORY}'")), 7)?;

    println!("\nhost's kernel:                    {host_kernel}");
    println!("kernel of the runc container:     {shared_kernel}");
    println!("kernel of the Bulkhead container: {guest_kernel}");
    ensure!(shared_kernel == host_kernel, "a runc container does not have the host's kernel");
    ensure!(
        guest_kernel != host_kernel,
        "the Bulkhead container has the host's kernel: it is not in a microVM"
    );
    Ok(())
}

fn ctr_run(runtime: &str, command: &str) -> String {
    format!("ctr run --rm --runtime {runtime} {IMAGE} demo {command}")
}

/// Runs a command, shows it with its output, exit status and time, and returns its output.
fn show(session: &mut Session, command: &str, expected: u8) -> Result<String> {
    show_within(session, command, expected, LIMIT)
}

fn show_within(session: &mut Session, command: &str, expected: u8, limit: Duration) -> Result<String> {
    println!("\n$ {command}");
    let start = Instant::now();
    let mut output = Vec::new();
    let argv = ["sh", "-c", command].map(str::to_owned);
    let status = session.run(&argv, Io::Shown(&mut output), Limit::Whole(limit))?;
    println!("(exit status {status}, {:.2} s)", start.elapsed().as_secs_f64());
    ensure!(status == expected, "`{command}` exits with status {status}, not {expected}");
    Ok(String::from_utf8_lossy(&output).trim().to_owned())
}
