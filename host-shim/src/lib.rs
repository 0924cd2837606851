//! `containerd-shim-bulkhead-v2`: containerd's runtime shim of Bulkhead, one process for each pod.
//!
//! containerd runs `start` in the bundle ([`bootstrap`]), which leaves the server ([`serve`]) behind. The server's
//! [`task`] service takes a create [`request`] to its [`sandbox`], where each container has an [`owner`]: it prepares the
//! [`rootfs`] and, for the first, the [`guest`] ([`cgroup`], [`vm`], [`network`]), talks to the [`agent`] in it, connects
//! [`stdio`], sends [`events`], and follows the [`container`] to its end. Everything that is done to the host is in a
//! [`journal`] of the sandbox's [`statedir`], by which [`delete`] cleans up after a server that died.

#![deny(unsafe_code)]

mod agent;
mod args;
mod bootstrap;
mod cgroup;
mod config;
mod container;
mod control;
mod cri;
mod delete;
mod error;
mod events;
mod execs;
#[cfg(feature = "fuzz")]
pub mod fuzz;
mod guest;
mod hooks;
mod host_path;
mod journal;
mod lines;
mod logger;
mod logging;
mod memory;
mod network;
mod oom;
mod owner;
mod pod;
mod podfiles;
mod process;
mod request;
mod rootfs;
mod sandbox;
mod sandboxer;
mod serve;
mod share;
mod spec;
mod standin;
mod statedir;
mod stats;
mod stdio;
mod task;
mod template;
mod terminal;
#[cfg(test)]
mod testing;
mod vm;

use std::{
    env,
    error::Error,
    io::{self, Write},
    process::ExitCode,
};

use containerd_shim_protos::types::introspection::{RuntimeInfo, RuntimeVersion};
use protobuf::Message;

use crate::args::{Action, Args};

const NAME: &str = "io.containerd.bulkhead.v2";

/// The program: does what its arguments ask for.
pub fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("containerd-shim-bulkhead-v2: {}", error::chain(e.as_ref()));
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let args = Args::parse(env::args_os().skip(1))?;
    match args.action {
        Action::Start => print(&bootstrap::start(&args)?)?,
        Action::Serve => serve::serve(&args)?,
        Action::Delete => {
            logging::to_stderr();
            print(&delete::delete(&args)?.write_to_bytes()?)?;
        }
        Action::StandIn => standin::run()?,
        Action::Version => {
            print(format!("containerd-shim-bulkhead-v2 {}\n", env!("CARGO_PKG_VERSION")).as_bytes())?;
        }
        Action::Info => print(&info().write_to_bytes()?)?,
    }
    Ok(())
}

fn print(bytes: &[u8]) -> io::Result<()> {
    let mut stdout = io::stdout();
    stdout.write_all(bytes)?;
    stdout.flush()
}

/// What `ctr` and containerd 2 show of the runtime.
fn info() -> RuntimeInfo {
    let mut version = RuntimeVersion::new();
    version.version = env!("CARGO_PKG_VERSION").into();
    let mut info = RuntimeInfo::new();
    info.name = NAME.into();
    info.version = Some(version).into();
    info
}
