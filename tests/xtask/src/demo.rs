//! `cargo xtask demo`: an image in containerd, run by runc and by Bulkhead, in the rig; or a pod, an attacker, or as
//! many pods as fit.

use std::fs;
use std::io::{self, Write as _};
use std::panic::resume_unwind;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};

use crate::cache::Cache;
use crate::dist::{self, Profile, source_dir};
use crate::kernel;
use crate::oci::IMAGE;
use crate::page::day;
use crate::phases::{Phases, timed};
use crate::progress::step;
use crate::recording::{PROMPT, Recording};
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

/// Where a recording is kept, and its picture.
const CAST: &str = "docs/pictures/demo.cast";
const PICTURE: &str = "docs/pictures/demo.svg";
const TITLE: &str = "cargo xtask demo: a container on runc, and two on Bulkhead";

/// What can be shown.
#[derive(Clone, Copy, Default, ValueEnum)]
enum Demo {
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

#[derive(Args)]
pub(crate) struct DemoArguments {
    /// What is shown.
    #[arg(value_enum, default_value_t)]
    what: Demo,
    /// Writes what was shown to docs/pictures/demo.cast, which asciinema plays, and draws docs/pictures/demo.svg.
    #[arg(long)]
    record: bool,
}

/// Sets up everything and shows it, and says at the end where the time went. Fails if the result is not as expected.
pub(crate) fn run(cache: &Cache, arguments: &DemoArguments) -> Result<()> {
    let mut phases = Phases::default();
    let shown = show(cache, arguments, &mut phases);
    // On stderr, as the steps: it is about the setup, and not what the demo shows.
    eprint!("\n{phases}");
    shown
}

fn show(cache: &Cache, arguments: &DemoArguments, phases: &mut Phases) -> Result<()> {
    ensure!(
        !arguments.record || matches!(arguments.what, Demo::Container),
        "only the first demo is recorded"
    );
    // Programs that take long to build are smaller. Only one demo shows a size.
    let profile = if matches!(arguments.what, Demo::Density) { Profile::Shipped } else { Profile::Quick };
    let tools = &phases.time("the tool root: QEMU, kernel source, compiler", || Tools::ensure(cache))?;
    let build_kernel = || match arguments.what {
        // It is what people see first, and needs none of the modules, which take another minute.
        Demo::Container => kernel::build_without_modules(cache, tools),
        Demo::Pod | Demo::Hostile | Demo::Density => kernel::build(cache, tools),
    };
    let (kernel, (rig, host_took)) = thread::scope(|scope| {
        // Most of it is one thread of an emulator.
        let rig = scope.spawn(|| timed(|| Rig::ensure(cache, tools)));
        let kernel = phases.time("the guest kernel", build_kernel);
        (kernel, rig.join().unwrap_or_else(|panic| resume_unwind(panic)))
    });
    phases.add("meanwhile, the host: its disk and its first boot", host_took);
    let (kernel, rig) = (kernel?, rig?);
    let programs = || Payload::new(cache, &[dist::build_around(kernel, tools, profile)?.put()]);
    let payload = phases.time("the programs of Bulkhead and of the tests", programs)?;
    let session = phases.time("starting the host", || step("starting the host", || rig.start(&payload)))?;
    let mut stage = Stage { session, recording: Recording::begin() };
    stage.say(&format!("The host of this demo is {}.\n", Accelerator::describe()));
    let host_kernel = stage.show("uname -r", 0)?;
    let story = || match arguments.what {
        Demo::Container => show_container(&mut stage, &host_kernel),
        Demo::Pod => stage.show(POD, 0).map(drop),
        Demo::Hostile => stage.show_within(ATTACKS, 0, LONG_LIMIT).map(drop),
        Demo::Density => stage.show_within(DENSITY, 0, LONG_LIMIT).map(drop),
    };
    phases.time("what was shown", story)?;
    stage.session.finish();
    if arguments.record {
        record(&stage.recording)?;
    }
    Ok(())
}

/// Writes the recording and its picture.
fn record(recording: &Recording) -> Result<()> {
    let today = day(SystemTime::now());
    let description = format!(
        "`cargo xtask demo --record` wrote this on {today}, in real time. The host was {}.",
        Accelerator::describe()
    );
    let write = |path: &str, text: String| {
        fs::write(source_dir().join(path), text).with_context(|| format!("cannot write {path}"))
    };
    write(CAST, recording.asciicast(TITLE))?;
    write(PICTURE, recording.picture(TITLE, &description))
}

fn show_container(stage: &mut Stage, host_kernel: &str) -> Result<()> {
    stage.show("ctr image import /usr/lib/bulkhead/tests/busybox-oci.tar", 0)?;
    let shared_kernel = stage.show(&ctr_run(RUNC, "uname -r"), 0)?;
    let guest_kernel = stage.show(&ctr_run(BULKHEAD, "uname -r"), 0)?;
    stage.show(&ctr_run(BULKHEAD, &format!("sh -c '{STORY}'")), 7)?;

    stage.say(&format!("\nhost's kernel:                    {host_kernel}\n"));
    stage.say(&format!("kernel of the runc container:     {shared_kernel}\n"));
    stage.say(&format!("kernel of the Bulkhead container: {guest_kernel}\n"));
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

/// The host of a demo, and what was shown.
struct Stage {
    session: Session,
    recording: Recording,
}

impl Stage {
    fn say(&mut self, text: &str) {
        print!("{text}");
        self.recording.add(text);
    }

    /// Runs a command, shows it with its output, exit status and time, and returns its output.
    fn show(&mut self, command: &str, expected: u8) -> Result<String> {
        self.show_within(command, expected, LIMIT)
    }

    fn show_within(&mut self, command: &str, expected: u8, limit: Duration) -> Result<String> {
        self.say(&format!("\n{PROMPT}{command}\n"));
        let start = Instant::now();
        let mut output = Vec::new();
        let argv = ["sh", "-c", command].map(str::to_owned);
        let mut follow = |data: &[u8]| {
            output.extend_from_slice(data);
            let text = String::from_utf8_lossy(data);
            print!("{text}");
            // If this process's output is closed, the next `print!` says so.
            let _ = io::stdout().flush();
            self.recording.add(&text);
        };
        let status = self.session.run(&argv, Io::Followed(&mut follow), Limit::Whole(limit))?;
        self.say(&format!("(exit status {status}, {:.2} s)\n", start.elapsed().as_secs_f64()));
        ensure!(status == expected, "`{command}` exits with status {status}, not {expected}");
        Ok(String::from_utf8_lossy(&output).trim().to_owned())
    }
}
