//! `cargo xtask`: builds everything, and runs it in the rig.

use std::ffi::OsString;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

mod cache;
mod enclosed;
mod kernel;
mod progress;
mod tools;

use cache::Cache;
use enclosed::Enclosure;
use tools::Tools;

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Builds Bulkhead, and tests and shows it in the rig")]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Builds the guest kernel and prints its path.
    Kernel,
    /// Makes the tool root and prints its path.
    Tools,
    /// Becomes a command in mounts of its own (the other tasks use this).
    #[command(hide = true)]
    Enclosed {
        #[command(flatten)]
        enclosure: Enclosure,
        #[arg(last = true, required = true)]
        argv: Vec<OsString>,
    },
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
    match task {
        Task::Kernel => {
            let cache = Cache::open()?;
            println!("{}", kernel::build(&cache, &Tools::ensure(&cache)?)?.display());
        }
        Task::Tools => println!("{}", Tools::ensure(&Cache::open()?)?.path().display()),
        Task::Enclosed { enclosure, argv } => enclosure.become_command(&argv)?,
    }
    Ok(0)
}
