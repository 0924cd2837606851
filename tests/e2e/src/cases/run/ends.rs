//! What ends a run from outside: `--timeout`, and the keys of a terminal.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};

use super::{run_in, write_program};
use crate::command::{Cmd, Size, wait_until};
use crate::ctr::{COMMAND, Host};
use crate::fixtures::{Root, at_once, installed, scratch};

/// The time that a run has, from its beginning. In it a VM starts, while another one does.
const TIMEOUT: Duration = Duration::from_secs(5);

pub(super) fn timeout(host: &Host) -> Result<()> {
    let root = Root::mount(host)?;
    // Its template is made by a run that has the time for it.
    run_in(host, &root, &["--timeout", "1h", "true"])?.succeeds()?;
    host.leaves_nothing(|| {
        let kinds: [fn(&Host, &Root<'_>) -> Result<()>; 2] = [killed, unread];
        at_once(kinds, |kind| kind(host, &root)).map(drop)
    })
}

fn killed(host: &Host, _: &Root<'_>) -> Result<()> {
    let sample = installed("sample-test")?.display().to_string();
    let directory = scratch()?;
    let file = directory.path().join("result.xml");
    let report = file.display().to_string();
    let time = format!("{:?}", host.patience(TIMEOUT));
    let words =
        ["run", "--rootfs", "/", "--env", "SAMPLE_HANGS=1", "--timeout", &time, "--junit", &report, &sample];
    let finished = Cmd::new("bulkhead").args(words).limit(host.patience(COMMAND)).run()?;
    let message = format!("it was killed after {time} (--timeout)");
    finished.exits(124)?.complains(&format!("bulkhead: {message}\n"))?;
    let (xml, expected) = (fs::read_to_string(&file)?, format!("<failure message=\"{message}\">"));
    ensure!(xml.contains(&expected), "expected  {expected}\ncame      {xml}");
    Ok(())
}

/// Whoever has its output does not read it. It is more than a pipe takes, and not more than is between that pipe and
/// the program.
fn unread(host: &Host, root: &Root<'_>) -> Result<()> {
    let directory = scratch()?;
    let line = format!(
        "cd {} && mkfifo output && exec 3<>output && \
         bulkhead run --rootfs {} --timeout {:?} head -c 100000 /dev/zero >output",
        directory.path().display(),
        root.path().display(),
        host.patience(TIMEOUT),
    );
    let finished = Cmd::new("bash").args(["-c", &line]).limit(host.patience(COMMAND)).run()?;
    // The program itself has ended well.
    finished.succeeds()?;
    let said = String::from_utf8_lossy(&finished.stderr);
    ensure!(said.contains("nobody reads it"), "expected  that output is lost\ncame      {said}");
    Ok(())
}

/// Stands in for a shim that does not start, and takes its time to be deleted. Its argument is a file for what it does.
const SHIM: &str = "#!/bin/sh
case \"$*\" in
*delete) echo deleting > FILE; sleep 2; echo deleted > FILE ;;
*) echo starting > FILE; exec sleep 1000 ;;
esac
";

pub(super) fn keys(host: &Host) -> Result<()> {
    let root = Root::mount(host)?;
    let directory = scratch()?;
    let path = |name: &str| directory.path().join(name);
    // It takes the shim beside it.
    fs::copy("/usr/local/bin/bulkhead", path("bulkhead"))?;
    write_program(
        &path("containerd-shim-bulkhead-v2"),
        &SHIM.replace("FILE", &path("state").display().to_string()),
    )?;
    host.leaves_nothing(|| {
        let program = path("bulkhead").display().to_string();
        let words = ["run", "--rootfs", &root.path().display().to_string(), "true"];
        let cmd = Cmd::new(&program).args(words).limit(host.patience(COMMAND));
        let mut running = cmd.start_in_terminal(Size { width: 80, height: 24 })?;
        for state in ["starting", "deleting"] {
            is_in(host, &path("state"), state)?;
            running.write(b"\x03")?;
        }
        running
            .finish()?
            .exits(130)?
            .fails_with("ended by a signal before the program ran")?
            .says_one_line()?;
        is_in(host, &path("state"), "deleted")?;
        let left = Path::new("/run/bulkhead-run").exists();
        ensure!(!left, "expected  no directory of a run\ncame      one");
        Ok(())
    })
}

/// What the command has inherited is not its shim's, which goes on after it was killed: a lock is free.
pub(super) fn lock(host: &Host) -> Result<()> {
    let root = Root::mount(host)?;
    let directory = scratch()?;
    let file = directory.path().join("lock");
    let line = "exec 9>\"$1\"; flock 9; exec bulkhead run --rootfs \"$2\" sh -c 'echo ready; sleep 1000'";
    let words = ["-c", line, "bash", &file.display().to_string(), &root.path().display().to_string()];
    host.leaves_nothing(|| {
        let running = Cmd::new("bash").args(words).limit(host.patience(COMMAND)).start()?;
        running.wait_for("ready\n")?;
        let is_locked = || Ok::<_, anyhow::Error>(fs::File::open(&file)?.try_lock().is_err());
        ensure!(is_locked()?, "expected  a lock\ncame      none");
        // Dropping it kills it.
        drop(running);
        let vms = fs::read_dir("/run/bulkhead-run")?.count();
        ensure!(vms == 1 && !is_locked()?, "expected  a VM and no lock\ncame      {vms} VMs, or a lock");
        Cmd::new("bulkhead").args(["gc"]).run()?.succeeds()?;
        Ok(())
    })
}

fn is_in(host: &Host, file: &Path, state: &str) -> Result<()> {
    let limit = host.patience(Duration::from_secs(20));
    wait_until(&format!("the shim is {state}"), limit, || {
        Ok(fs::read_to_string(file).is_ok_and(|text| text.trim() == state))
    })
}
