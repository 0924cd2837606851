//! End-to-end tests of containerd runtimes. Runs as root on a host with containerd, and tells stories of its
//! users through the `ctr` command, docker and the CRI: on runc first, which shows that the stories are true, then on
//! Bulkhead.

mod agent;
mod api;
mod attacks;
mod bench;
mod cases;
mod clock_comparison;
mod command;
mod containerd;
mod counts;
mod cpuid;
mod cri;
mod ctr;
mod density;
mod docker;
mod events;
mod faults;
mod fields;
mod fixtures;
/// A file of the agent's interface, whose crate needs a code generator.
#[expect(unreachable_pub, reason = "public in its own crate")]
#[path = "../../../guest-agent/api/src/devices.rs"]
mod guest_devices;
mod hostile;
mod hostile_agent;
mod image_root;
mod io;
mod name_server;
mod network;
mod pods;
mod probe;
mod runner;
mod shim;
mod snapshot;
mod soak;
mod story;
mod stuck;
mod survivors;

use std::io::{ErrorKind, stdout};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::{Args, Parser, Subcommand};

use crate::containerd::Version;
use crate::ctr::{Host, Runtime};
use crate::runner::Wanted;

/// Image archive looked for beside this binary when containerd does not have the image.
const IMAGE_ARCHIVE: &str = "busybox-oci.tar";

#[derive(Parser)]
#[command(about = "End-to-end tests of Bulkhead, run as root on a host with containerd")]
struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand)]
enum Action {
    /// Runs the cases of a runtime; exits 1 if one fails.
    Test {
        /// Runtime to run the containers with.
        #[arg(long, value_enum)]
        runtime: Runtime,
        /// Image archive to import if containerd lacks the image [default: busybox-oci.tar beside this binary].
        #[arg(long)]
        image: Option<PathBuf>,
        #[command(flatten)]
        selection: Selection,
        /// Takes the names as whole names, and runs those cases in that order, whomever they are for.
        #[arg(long, conflicts_with = "brief")]
        exact: bool,
    },
    /// Measures start-up times and memory, and prints them as JSON.
    Bench {
        /// Samples of each.
        #[arg(long, default_value_t = 10)]
        rounds: u32,
        /// Leave out what memory costs where there are many containers.
        #[arg(long)]
        start_only: bool,
        /// File that the numbers are written to, instead of the standard output.
        #[arg(long)]
        output: Option<PathBuf>,
    },
    /// Counts what units of work cost, and prints the numbers as JSON.
    Counts {
        /// How often. The smallest number counts.
        #[arg(long, default_value_t = 3)]
        rounds: u32,
        /// File that the numbers are written to, instead of the standard output.
        #[arg(long)]
        output: Option<PathBuf>,
    },
    /// Compares the I/O of a container with runc's and with that of a guest of QEMU, and prints the numbers as JSON.
    Io {
        /// Samples of each.
        #[arg(long, default_value_t = 15)]
        rounds: u32,
        /// File that the numbers are written to, instead of the standard output.
        #[arg(long)]
        output: Option<PathBuf>,
    },
    /// Runs a pod of three containers and prints what it does.
    Pod {
        /// Runtime to run the pod with.
        #[arg(long, value_enum)]
        runtime: Runtime,
    },
    /// Runs two pods, one after the other, and prints how the second one started as JSON.
    Trace,
    /// Attacks the host from a privileged container, and prints what came of each attempt.
    Attacks,
    /// Starts as many pods as fit, within bounds, and prints what they use.
    Density,
    /// Lets something go wrong in the lives of containers, one fault after the other, and prints what came of each.
    Faults {
        /// Which faults.
        #[arg(value_enum)]
        part: faults::Part,
        /// Only these system calls.
        calls: Vec<String>,
    },
    /// Runs many containers two at a time, some with faults, and prints what the surviving processes use.
    Soak {
        /// How many.
        #[arg(long, default_value_t = 2000)]
        cycles: u32,
        /// Runs no more after so many minutes.
        #[arg(long, default_value_t = 120)]
        minutes: u64,
    },
    /// Expects that time does not go back from one processor of this machine to another.
    Clocks,
    /// Prints what CPUID answers on this machine.
    Cpuid,
    /// Lists the cases and the runtimes they are for; of one runtime and one containerd, the names that `test` would
    /// run.
    List {
        /// Lists the cases of this runtime.
        #[arg(long, value_enum, requires = "containerd")]
        runtime: Option<Runtime>,
        /// Lists the cases that suit this version of containerd.
        #[arg(long, requires = "runtime")]
        containerd: Option<Version>,
        #[command(flatten)]
        selection: Selection,
    },
}

/// Which cases are wanted.
#[derive(Args)]
struct Selection {
    /// Only the cases that tell versions of containerd apart.
    #[arg(long)]
    brief: bool,
    /// Part of the names of the cases, `group/case`.
    names: Vec<String>,
}

impl Selection {
    /// The cases whose name contains the one text that is given, or any.
    fn by_part(mut self) -> Result<Wanted> {
        ensure!(self.names.len() <= 1, "only with --exact can there be several names");
        Ok(Wanted::Containing(self.names.pop()))
    }
}

fn main() -> ExitCode {
    let is_init = std::env::args_os().next().is_some_and(|program| program == hostile_agent::INIT);
    let done = if is_init {
        hostile_agent::serve().map(|()| ExitCode::SUCCESS)
    } else {
        run(Arguments::parse().action)
    };
    match done {
        Ok(code) => code,
        Err(error) => {
            eprintln!("bulkhead-e2e: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(action: Action) -> Result<ExitCode> {
    match action {
        Action::List { runtime, containerd, selection } => {
            let mut out = stdout().lock();
            let listed = match runtime.zip(containerd) {
                Some((runtime, version)) => {
                    let brief = selection.brief;
                    let selected = runner::select(runtime, version, brief, &selection.by_part()?)?;
                    runner::list_selected(&mut out, &selected)
                }
                None => runner::list(&mut out),
            };
            match listed {
                // The reader has seen enough: `list | head`.
                Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(ExitCode::SUCCESS),
                listed => listed.map(|()| ExitCode::SUCCESS).context("cannot list the cases"),
            }
        }
        Action::Faults { part, calls } => {
            let host = host_of(Runtime::Bulkhead)?;
            Ok(if faults::try_all(&host, part, &calls)? { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        }
        Action::Soak { cycles, minutes } => {
            let host = host_of(Runtime::Bulkhead)?;
            let limit = Duration::from_secs(minutes * 60);
            soak::run(&host, cycles, limit, &mut |line| println!("{line}"))?;
            Ok(ExitCode::SUCCESS)
        }
        Action::Clocks => {
            println!("{} processors agree", clock_comparison::compare()?);
            Ok(ExitCode::SUCCESS)
        }
        Action::Cpuid => {
            print!("{}", cpuid::read());
            Ok(ExitCode::SUCCESS)
        }
        Action::Bench { rounds, start_only, output } => {
            require_root()?;
            let report = bench::run(&beside_this_binary()?, rounds, !start_only)?;
            print_json(&report, output)
        }
        Action::Counts { rounds, output } => {
            let host = host_of(Runtime::Bulkhead)?;
            print_json(&counts::count(&host, rounds)?, output)
        }
        Action::Io { rounds, output } => {
            require_root()?;
            print_json(&io::compare(&beside_this_binary()?, rounds)?, output)
        }
        Action::Pod { runtime } => {
            story::tell(&host_of(runtime)?)?;
            Ok(ExitCode::SUCCESS)
        }
        Action::Trace => {
            let host = host_of(Runtime::Bulkhead)?;
            println!("{}", story::trace(&host)?);
            Ok(ExitCode::SUCCESS)
        }
        Action::Attacks => {
            attacks::tell(&host_of(Runtime::Bulkhead)?)?;
            Ok(ExitCode::SUCCESS)
        }
        Action::Density => {
            density::tell(&host_of(Runtime::Bulkhead)?)?;
            Ok(ExitCode::SUCCESS)
        }
        Action::Test { runtime, image, selection, exact } => {
            require_root()?;
            let version = Version::of_containerd()?;
            let brief = selection.brief;
            let wanted = if exact { Wanted::Named(selection.names) } else { selection.by_part()? };
            let selected = runner::select(runtime, version, brief, &wanted)?;
            let host = Host::prepare(runtime, version, &image.map_or_else(beside_this_binary, Ok)?)?;
            let passed = runner::run(&host, &selected);
            Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        }
    }
}

/// The host for containers of this runtime, with the image that is installed beside this program.
fn host_of(runtime: Runtime) -> Result<Host> {
    require_root()?;
    Host::prepare(runtime, Version::of_containerd()?, &beside_this_binary()?)
}

/// Writes numbers to a file, or to the standard output.
fn print_json(numbers: &impl serde::Serialize, file: Option<PathBuf>) -> Result<ExitCode> {
    let text = serde_json::to_string(numbers)?;
    match file {
        Some(file) => {
            std::fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))?;
        }
        None => println!("{text}"),
    }
    Ok(ExitCode::SUCCESS)
}

fn require_root() -> Result<()> {
    ensure!(nix::unistd::geteuid().is_root(), "must run as root: it uses containerd and looks at the host");
    Ok(())
}

fn beside_this_binary() -> Result<PathBuf> {
    fixtures::installed(IMAGE_ARCHIVE)
}
