//! `containerd-shim-bulkhead-v2`: containerd's runtime shim of Bulkhead, one process for each pod.
//!
//! The modules are layers. Each uses only those below it, which a test checks (`tests/module-graph`):
//!
//! | layer | what it is |
//! |---|---|
//! | [`service`] | containerd's commands, and its Task and Sandbox services |
//! | [`operator`] | what the command `bulkhead` shows and removes |
//! | [`pod`] | a pod: its VM, its containers, and what they have on the host |
//! | [`process`] | the processes of a container |
//! | [`io`] | streams, loggers and events |
//! | [`guest`] | the client of the agent in the guest |
//! | [`vm`] | the client of the VMM |
//! | [`host`] | mounts, cgroups, the network, hooks, and the journal of all that was done to the host |
//! | [`types`] | configuration, requests as they are read, errors |

#![deny(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

#[cfg(feature = "fuzz")]
pub mod fuzz;
mod guest;
mod host;
mod io;
pub mod operator;
mod pod;
mod process;
mod service;
#[cfg(test)]
mod testing;
mod types;
mod vm;

use std::{env, error::Error, io::Write, process::ExitCode};

use protobuf::Message;

use crate::{
    host::placeholder_process,
    service::{
        args::{Action, Args},
        bootstrap, delete, info, logging, server, undo,
    },
    types::{build, error::chain},
};

/// The program: does what its arguments ask for.
pub fn main() -> ExitCode {
    match run() {
        Ok(code) => code,
        Err(e) => {
            // Whoever would read this may be gone.
            drop(writeln!(std::io::stderr(), "containerd-shim-bulkhead-v2: {}", chain(e.as_ref())));
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<ExitCode, Box<dyn Error>> {
    let args = Args::parse(env::args_os().skip(1))?;
    match args.action {
        Action::Start => print(&bootstrap::start(&args)?)?,
        Action::Serve => server::serve(&args)?,
        Action::Delete => {
            logging::to_stderr();
            print(&delete::delete(&args)?.write_to_bytes()?)?;
        }
        Action::Undo => {
            logging::to_stderr_or_syslog();
            return Ok(undo::run(&args));
        }
        Action::PlaceholderProcess => placeholder_process::run()?,
        Action::Version => {
            print(format!("containerd-shim-bulkhead-v2 {}\n", build::version_and_commit()).as_bytes())?;
        }
        Action::Info => print(&info::info().write_to_bytes()?)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn print(bytes: &[u8]) -> std::io::Result<()> {
    let mut stdout = std::io::stdout();
    stdout.write_all(bytes)?;
    stdout.flush()
}
