//! Commands in the rig that a trial runs one after the other. One that fails ends the trial.

use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::rig::{Io, Limit, Session};

/// How long one command may take.
const LIMIT: Duration = Duration::from_secs(180);

/// Runs a command of the shell, shows it with its output, and returns that.
pub(super) fn show(session: &mut Session, command: &str) -> Result<String> {
    println!("\n$ {command}");
    let output = hidden(session, command)?;
    println!("{}", output.trim_end());
    Ok(output)
}

/// Runs a command of the shell, and returns its output.
pub(super) fn hidden(session: &mut Session, command: &str) -> Result<String> {
    run(session, &["sh", "-c", command].map(str::to_owned)).with_context(|| format!("`{command}` failed"))
}

/// Runs a program, and returns its output.
pub(super) fn run(session: &mut Session, argv: &[String]) -> Result<String> {
    let mut output = Vec::new();
    let status = session.run(argv, Io::Captured(&mut output), Limit::Whole(LIMIT))?;
    let output = String::from_utf8_lossy(&output).into_owned();
    ensure!(status == 0, "it exits with status {status}:\n{output}");
    Ok(output)
}
