//! A program that `bulkhead exec` adds to a run, which no client of containerd could do.

use anyhow::{Context, Result};

use super::{directory_of_the_run, start_in};
use crate::command::Cmd;
use crate::ctr::{COMMAND, Host};
use crate::fixtures::Root;

pub(super) fn added(host: &Host) -> Result<()> {
    let root = Root::mount(host)?;
    let script = "echo one > /made; echo ready; read x; cat /made";
    let mut running = start_in(host, &root, &["--env", "WHO=it", "sh", "-c", script]).start()?;
    running.wait_for("ready\n")?;
    let directory = directory_of_the_run()?;
    let id = directory.file_name().and_then(|name| name.to_str()).context("a run without a name")?;
    let added = "echo $WHO $(cat /made); echo two > /made; exit 5";
    let added =
        Cmd::new("bulkhead").args(["exec", id, "--", "sh", "-c", added]).limit(host.patience(COMMAND));
    added.run()?.exits(5)?.prints("it one\n")?;
    running.close_input();
    running.finish()?.succeeds()?.prints("ready\ntwo\n")?;
    Ok(())
}
