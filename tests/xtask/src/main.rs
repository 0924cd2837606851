//! `cargo xtask`: builds everything, and runs it in the rig.

use std::ffi::OsString;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::{Args, Parser, Subcommand};

mod bench;
mod cache;
mod case_sources;
mod chroot;
mod commit;
mod conformance;
mod containerd;
mod debian;
mod demo;
mod deny;
mod dist;
mod e2e;
mod faults;
mod fuzz;
mod initramfs;
mod kernel;
mod kernel_modules;
mod named;
mod oci;
mod outcomes;
mod package;
mod page;
mod passed_on_runc;
mod phases;
mod places;
mod progress;
mod recording;
mod rig;
mod scheduling;
mod svg;
mod test;
mod tools;

use bench::BenchArguments;
use cache::Cache;
use chroot::MountNamespace;
use demo::DemoArguments;
use dist::{Dist, Profile};
use faults::FaultArguments;
use fuzz::FuzzArguments;
use rig::{Io, Limit, Payload, Put, Rig};
use test::TestArguments;
use tools::Tools;

#[derive(Parser)]
#[command(
    name = "cargo xtask",
    bin_name = "cargo xtask",
    about = "Builds Bulkhead, and tests and shows it in the rig: a Debian host with KVM and containerd in one QEMU process"
)]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Sets up everything and shows a container in a microVM, run by containerd.
    ///
    /// With `pod`, shows a pod of several containers, as Kubernetes runs it. With `hostile`, a privileged container
    /// attacks its host. With `density`, as many pods as fit are started.
    Demo(DemoArguments),
    /// Runs the unit tests, and the end-to-end tests in the rig.
    Test(TestArguments),
    /// Measures start-up times and memory in the rig, and writes docs/benchmarks.md.
    Bench(BenchArguments),
    /// Lets things go wrong while containers run in the rig, runs very many of them, and writes docs/reliability.md.
    Faults(FaultArguments),
    /// Builds what is installed on a host. Prints the directory it is laid out in, an archive of it, a Debian package,
    /// and the file with their digests.
    Dist {
        /// Installs, uses and removes the archive and the package in the rig instead.
        #[arg(long = "try")]
        is_tried: bool,
        /// Builds faster, for a trial.
        #[arg(long)]
        quick: bool,
        /// Builds the guest kernel from the source that Debian has now, although another one is pinned and tested.
        #[arg(long)]
        unpinned: bool,
    },
    /// Builds the guest kernel and prints its path.
    Kernel {
        /// Instead builds the kernel that the benchmark compares it with.
        #[arg(long)]
        ordinary: bool,
    },
    /// Makes the tool root, a Debian system in the cache with QEMU and what builds the kernel, and prints its path.
    Tools,
    /// Lists the Debian packages that the tests run with, after digests of them by which two machines can be compared.
    /// They come from the mirror BULKHEAD_DEBIAN_MIRROR, such as a snapshot's URL.
    Packages {
        /// Installs the newest versions first.
        #[arg(long)]
        renew: bool,
    },
    /// Builds the fuzz targets and runs each for a few seconds.
    Fuzz(FuzzArguments),
    /// Checks licenses, sources and versions of the dependencies against deny.toml.
    Deny,
    /// Runs a command in the rig, a fresh host with KVM and containerd. `rig shell` opens a shell there.
    Rig(RigArguments),
    /// Executes a command in a new mount namespace, in another root if one is given (the other tasks use this).
    #[command(hide = true)]
    Chroot {
        #[command(flatten)]
        namespace: MountNamespace,
        #[arg(last = true, required = true)]
        argv: Vec<OsString>,
    },
}

#[derive(Args)]
struct RigArguments {
    /// Leaves out what is built from this source tree: a bare host.
    #[arg(long)]
    no_dist: bool,
    /// Puts a file or a directory of this machine there in the rig; may be repeated.
    #[arg(long, value_name = "LOCAL:REMOTE")]
    put: Vec<Put>,
    /// Seconds after which the command is given up.
    #[arg(long, default_value_t = 1800)]
    timeout: u64,
    /// Gives the command a terminal.
    #[arg(short, long)]
    tty: bool,
    /// The command and its arguments, after `--`.
    #[arg(trailing_var_arg = true, required = true)]
    argv: Vec<String>,
}

fn main() -> ExitCode {
    match run(Arguments::parse().task) {
        Ok(status) => ExitCode::from(status),
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs one task and returns the exit status.
fn run(task: Task) -> Result<u8> {
    if let Task::Chroot { namespace, argv } = &task {
        namespace.become_command(argv)?;
    }
    let cache = Cache::open()?;
    let tools = || Tools::ensure(&cache);
    match task {
        Task::Demo(arguments) => demo::run(&cache, &arguments)?,
        Task::Bench(arguments) => bench::run(&cache, &tools()?, &arguments)?,
        Task::Faults(arguments) => return faults::run(&cache, &tools()?, &arguments),
        Task::Test(arguments) => return test::run(&cache, &arguments),
        Task::Dist { is_tried, quick, unpinned } => {
            let profile = if quick { Profile::Quick } else { Profile::Shipped };
            let tools = tools()?;
            // What others install has what was tested. This is said before the build, which takes long.
            if profile == Profile::Shipped && !unpinned {
                kernel::must_be_pinned(&cache, &tools)?;
            }
            let dist = dist::build(&cache, &tools, profile)?;
            if is_tried {
                package::try_out(&cache, &tools, &dist)?;
                return Ok(0);
            }
            println!("{}", dist.root().display());
            package::build(&dist)?.iter().for_each(|path| println!("{}", path.display()));
        }
        Task::Kernel { ordinary } => {
            let build = if ordinary { kernel::build_ordinary } else { kernel::build };
            println!("{}", build(&cache, &tools()?)?.path.display());
        }
        Task::Tools => println!("{}", tools()?.path().display()),
        Task::Packages { renew } => debian::run(&cache, renew)?,
        Task::Fuzz(arguments) => return fuzz::run(&cache, &arguments),
        Task::Deny => deny::run(&cache)?,
        Task::Rig(arguments) => return run_in_rig(&cache, &tools()?, arguments),
        Task::Chroot { .. } => bail!("a command in a mount namespace returned"),
    }
    Ok(0)
}

fn run_in_rig(cache: &Cache, tools: &Tools, arguments: RigArguments) -> Result<u8> {
    // Kept until it is packed: another run may replace what is built as soon as this is dropped.
    let dist = (!arguments.no_dist).then(|| dist::build(cache, tools, Profile::Quick)).transpose()?;
    // Ours first, so that a file put by hand replaces one of them.
    let puts: Vec<_> = dist.iter().map(Dist::put).chain(arguments.put).collect();
    let is_shell = arguments.argv == ["shell"];
    let argv = if is_shell { vec!["bash".to_owned(), "--login".to_owned()] } else { arguments.argv };
    let io = if is_shell || arguments.tty { Io::Terminal } else { Io::Inherited };
    let payload = Payload::new(cache, &puts)?;
    drop(dist);
    let mut session = Rig::ensure(cache, tools)?.start(&payload)?;
    let status = session.run(&argv, io, Limit::Whole(Duration::from_secs(arguments.timeout)))?;
    session.finish();
    Ok(status)
}
