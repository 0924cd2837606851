//! Output that goes where a URI says: to a program of the host, or to a file.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use tempfile::TempDir;

use super::Case;
use crate::command::wait_until;
use crate::ctr::{Container, Host, NAMESPACE};
use crate::fixtures::scratch;

pub(super) const CASES: &[Case] = &[
    Case::both("a_program_gets_both_streams", both_streams),
    Case::both("a_program_gets_what_an_exec_writes", of_exec),
    Case::both("a_program_that_ends_takes_no_more_output", program_ends),
    Case::both("a_program_that_is_missing_is_named", program_missing),
    Case::both("a_file_gets_both_streams", file),
];

/// How soon what a container wrote is where it belongs.
const SOON: Duration = Duration::from_secs(10);

/// Keeps both streams in files, and whose they are.
const KEEPS: &str = "echo $CONTAINER_NAMESPACE $CONTAINER_ID $* > called
cat <&3 > stdout 5>&- &
cat <&4 > stderr 5>&- &
echo >&5
wait";

/// A logger on the host, and the directory that it works in.
struct Logger(TempDir);

impl Logger {
    /// A shell script as one.
    fn new(script: &str) -> Result<Self> {
        let logger = Self(scratch()?);
        let text = format!("#!/bin/sh\ncd {}\n{script}\n", logger.0.path().display());
        fs::write(logger.program(), text).context("cannot write the logger")?;
        fs::set_permissions(logger.program(), fs::Permissions::from_mode(0o755))?;
        Ok(logger)
    }

    fn program(&self) -> PathBuf {
        self.0.path().join("logger")
    }

    /// Its URI with one argument, the words of which are encoded in two ways.
    fn uri(&self) -> String {
        format!("binary://{}?place=the+host%21", self.program().display())
    }

    /// Expects that a file that it writes comes to say this.
    fn kept(&self, host: &Host, name: &str, expected: &str) -> Result<()> {
        let file = self.0.path().join(name);
        wait_until(&format!("{expected:?} in the logger's {name}"), host.patience(SOON), || {
            Ok(fs::read_to_string(&file).is_ok_and(|text| text == expected))
        })
    }
}

fn logging<'h>(host: &'h Host, uri: &str) -> Container<'h> {
    host.container().flags(["--log-uri", uri])
}

fn both_streams(host: &Host) -> Result<()> {
    let logger = Logger::new(KEEPS)?;
    host.leaves_nothing(|| {
        let container = logging(host, &logger.uri());
        let called = format!("{NAMESPACE} {} place the host!\n", container.id());
        container.run(&["sh", "-c", "echo out; echo err >&2; exit 3"])?.exits(3)?.prints("")?;
        logger.kept(host, "called", &called)?;
        logger.kept(host, "stdout", "out\n")?;
        logger.kept(host, "stderr", "err\n")
    })
}

fn of_exec(host: &Host) -> Result<()> {
    let logger = Logger::new(KEEPS)?;
    let task = host.container().detach(&["sleep", "1000"])?;
    let exec = ["tasks", "exec", "--exec-id", "logged", "--log-uri", &logger.uri(), task.id(), "echo", "out"];
    host.ctr(exec).run()?.succeeds()?.prints("")?;
    logger.kept(host, "called", &format!("{NAMESPACE} logged place the host!\n"))?;
    logger.kept(host, "stdout", "out\n")
}

fn program_ends(host: &Host) -> Result<()> {
    // Its own signal of a broken pipe does not end the first process of a pid namespace.
    let script = "while echo more; do sleep 0.1; done; exit 4";
    let logger = Logger::new("echo >&5; read line <&3; echo $line > stdout; exit 1")?;
    logging(host, &logger.uri()).run(&["sh", "-c", script])?.exits(4)?;
    logger.kept(host, "stdout", "more\n")
}

fn program_missing(host: &Host) -> Result<()> {
    host.leaves_nothing(|| {
        let finished = logging(host, "binary:///no/such/logger").run(&["true"])?;
        finished
            .fails_with("/no/such/logger")?
            .fails_with("no such file or directory")?
            .within(host.error_limit())?;
        Ok(())
    })
}

fn file(host: &Host) -> Result<()> {
    let directory = scratch()?;
    let file = directory.path().join("made/on/demand");
    // Both stay open: runc's shim stops with either once one of them has ended.
    let script = "echo out; echo err >&2; exec sleep 1000";
    let _task = logging(host, &format!("file://{}", file.display())).detach(&["sh", "-c", script])?;
    let text = || fs::read_to_string(&file).unwrap_or_default();
    wait_until("both lines in the file", host.patience(SOON), || {
        Ok(text().contains("out\n") && text().contains("err\n"))
    })
}
