//! A container's processes: how they are made.
//!
//! [`launcher`] runs in the agent, and re-executes the agent's own binary as a process of one thread, the stage.
//! [`stage_process`] is that stage: it clones the next process as a child of the agent, and ends. The next process is
//! one of two:
//!
//! - An init ([`container_init`]) builds the container around itself, waits to be started, and executes the container's
//!   program. If it joins a pid namespace, a helper builds the root file system and then clones the init.
//! - A helper ([`exec`]) enters a container that exists, and clones the process that joins it. This process executes
//!   its program at once.
//!
//! Agent and stage speak over a socket, one line of JSON for each message. The socket is close-on-exec: if it closes
//! after [`Report::Executing`], execve(2) has succeeded, or the process was killed just before.

mod agent_socket;
mod clone_process;
mod console;
mod container_init;
mod exec;
mod execute_program;
mod find_program;
pub mod launcher;
mod paths;
mod pause_process;
mod process_attributes;
mod rootfs;
pub mod stage_process;
mod stage_socket;
mod user_namespace;

use std::{fmt::Display, io};

use serde::{Deserialize, Serialize};

/// Environment variable with the number of the stage's socket.
const SOCKET_VARIABLE: &str = "BULKHEAD_SOCKET";

/// From the stage, and then from the container's process, to the agent.
#[derive(Debug, Serialize, Deserialize)]
enum Report {
    /// A helper was cloned and has this process id in the guest's root pid namespace. It will clone the container's
    /// process, and end.
    Helper(i32),
    /// The container's process was cloned and has this process id in the guest's root pid namespace.
    Cloned(i32),
    /// The container has a pid namespace of its own. A detached mount of a proc file system that shows it comes along.
    Proc,
    /// The process is in its container, as its user. An init waits for [`Order::Start`] now. The master of the
    /// process's terminal, if it has one, comes along.
    Ready,
    /// execve(2) is next. Without this, the socket's end would not tell a program that was executed from a process
    /// that was killed.
    Executing,
    /// It cannot be done. The sender ends.
    Failed(SetupError),
}

/// From the agent to the container's init.
#[derive(Debug, Serialize, Deserialize)]
enum Order {
    /// Execute the container's program.
    Start,
}

/// Which step in making a container or a process failed, and why.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[error("{step}: {cause}")]
pub struct SetupError {
    /// What was tried, with the mount, path or field that it was about.
    pub step: String,
    /// The kernel's answer, mostly.
    pub cause: String,
}

/// Names the step that an error belongs to.
trait Step<T> {
    fn step(self, step: impl FnOnce() -> String) -> Result<T, SetupError>;
}

impl<T, E: Display> Step<T> for Result<T, E> {
    fn step(self, step: impl FnOnce() -> String) -> Result<T, SetupError> {
        self.map_err(|cause| SetupError { step: step(), cause: cause.to_string() })
    }
}

/// The kernel's word for an error number, as Go programs print it: without a capital, without the number.
fn errno_text(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(number) => nix::errno::Errno::from_raw(number).desc().to_lowercase(),
        None => error.to_string(),
    }
}
