//! Loggers: programs of the host that take the output of a process (containerd's runtime v2, "Logging": `binary://`).
//!
//! A logger reads standard output and error on its descriptors 3 and 4, and says on descriptor 5 that it is ready: by a
//! byte, or by closing it. Its environment says whose output it is, and has nothing else. It ends with the output.

use std::{io, os::fd::OwnedFd, path::PathBuf, process::Stdio, time::Duration};

use command_fds::{CommandFdExt, FdMapping};
use rustix::process::{Pid, Signal, kill_process};
use tokio::{
    io::AsyncReadExt,
    net::unix::pipe,
    process::{Child, Command},
    time::timeout,
};

use crate::{
    host::blocking,
    types::{error::chain, stdio_endpoint::LoggerPlan},
};

/// How long a logger may take to be ready.
const READY: Duration = Duration::from_secs(30);

/// How long a logger may take to end after its input has ended, and then after SIGTERM.
const ENDS: Duration = Duration::from_secs(1);
const TERMINATES: Duration = Duration::from_secs(9);

/// Whose output it is.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Source<'a> {
    pub(crate) namespace: &'a str,
    /// The id of the container or of the exec.
    pub(crate) id: &'a str,
}

/// Why there is no logger.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LoggerError {
    #[error("cannot start the logger {program}")]
    Start { program: PathBuf, source: io::Error },
    #[error("the logger {program} was not ready within {} s", READY.as_secs())]
    NotReady { program: PathBuf },
}

/// A logger that runs. It is killed with the value, unless [`Logger::end`] is awaited.
#[derive(Debug)]
pub(crate) struct Logger {
    program: PathBuf,
    child: Child,
}

/// A logger that is ready, and the pipes to it.
#[derive(Debug)]
pub(crate) struct Ready {
    pub(crate) logger: Logger,
    pub(crate) stdout: pipe::Sender,
    pub(crate) stderr: pipe::Sender,
}

impl LoggerPlan {
    /// Starts the logger and waits until it is ready. A logger that ends at once counts as ready, as with runc; the
    /// process then gets EPIPE.
    pub(crate) async fn start(&self, source: Source<'_>) -> Result<Ready, LoggerError> {
        let failed = |source| LoggerError::Start { program: self.program.clone(), source };
        let (take_stdout, stdout) = io::pipe().map_err(failed)?;
        let (take_stderr, stderr) = io::pipe().map_err(failed)?;
        let (ready, tell_ready) = io::pipe().map_err(failed)?;
        let child = self
            .spawn(source, [take_stdout.into(), take_stderr.into(), tell_ready.into()])
            .await
            .map_err(failed)?;
        let logger = Logger { program: self.program.clone(), child };
        let mut ready = pipe::Receiver::from_owned_fd(ready.into()).map_err(failed)?;
        match timeout(READY, ready.read(&mut [0])).await {
            Ok(read) => drop(read.map_err(failed)?),
            Err(_) => return Err(LoggerError::NotReady { program: self.program.clone() }),
        }
        let stdout = pipe::Sender::from_owned_fd(stdout.into()).map_err(failed)?;
        let stderr = pipe::Sender::from_owned_fd(stderr.into()).map_err(failed)?;
        Ok(Ready { logger, stdout, stderr })
    }

    async fn spawn(&self, Source { namespace, id }: Source<'_>, lent: [OwnedFd; 3]) -> io::Result<Child> {
        let mappings =
            (3..).zip(lent).map(|(child_fd, parent_fd)| FdMapping { parent_fd, child_fd }).collect();
        let mut command = Command::new(&self.program);
        command
            .args(&self.args)
            .env_clear()
            .env("CONTAINER_ID", id)
            .env("CONTAINER_NAMESPACE", namespace)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .fd_mappings(mappings)
            .map_err(io::Error::other)?;
        // The shim's copies of the descriptors are closed with the command.
        blocking::spawn(command).await
    }
}

impl Logger {
    /// Waits for its end, now that its output has ended. A logger that does not end by itself gets SIGTERM, and then
    /// SIGKILL.
    pub(crate) async fn end(mut self) {
        if timeout(ENDS, self.child.wait()).await.is_ok() {
            return;
        }
        // None: it has ended after all.
        if let Some(pid) = self.child.id().and_then(|pid| Pid::from_raw(pid.try_into().ok()?))
            && let Err(e) = kill_process(pid, Signal::TERM)
        {
            let error = io::Error::from(e);
            tracing::warn!(program = %self.program.display(), error = chain(&error), "no SIGTERM for the logger");
        }
        if timeout(TERMINATES, self.child.wait()).await.is_err() {
            tracing::warn!(program = %self.program.display(), "the logger does not end, and is killed");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use tokio::io::AsyncWriteExt;

    use super::*;
    use crate::types::error::chain;

    const SOURCE: Source<'_> = Source { namespace: "default", id: "demo" };

    /// A shell script as a logger, which works in a directory of its own. Not a file: one that was just written
    /// cannot be executed while a child of another test still has it open (ETXTBSY).
    fn script(text: &str) -> (tempfile::TempDir, LoggerPlan) {
        let dir = tempfile::tempdir().unwrap();
        let args = ["-c", &format!("cd $1\n{text}"), "logger", &dir.path().display().to_string()];
        let plan = LoggerPlan { program: "/bin/sh".into(), args: args.map(str::to_owned).to_vec() };
        (dir, plan)
    }

    #[test]
    fn a_uri_names_the_program_and_its_arguments() {
        let plan = |program: &str, args: &[&str]| {
            Some(LoggerPlan { program: program.into(), args: args.iter().map(|&arg| arg.into()).collect() })
        };
        for (text, expected) in [
            ("/bin/logger", plan("/bin/logger", &[])),
            (
                "/a%20b?path=%2Fvar%2Flog&flag&w=x+y",
                plan("/a b", &["path", "/var/log", "flag", "", "w", "x y"]),
            ),
            ("logger", None),
            ("", None),
            ("/bin/%zz", None),
            ("/bin/%2", None),
            ("/bin/l?a=%ff", None),
        ] {
            assert_eq!(LoggerPlan::parse(text), expected, "{text}");
        }
    }

    #[tokio::test]
    async fn a_logger_gets_both_streams_and_is_told_whose_they_are() {
        let text = "env | grep CONTAINER | sort > env; echo >&5; cat <&3 >o; cat <&4 >e";
        let (dir, plan) = script(text);
        let Ready { logger, mut stdout, mut stderr } = plan.start(SOURCE).await.unwrap();
        stdout.write_all(b"out").await.unwrap();
        stderr.write_all(b"err").await.unwrap();
        drop((stdout, stderr));
        logger.end().await;
        let read = |name: &str| fs::read_to_string(dir.path().join(name)).unwrap();
        assert_eq!((read("o").as_str(), read("e").as_str()), ("out", "err"));
        assert_eq!(read("env"), "CONTAINER_ID=demo\nCONTAINER_NAMESPACE=default\n");
    }

    #[tokio::test]
    async fn a_logger_that_stays_is_told_to_end() {
        let (dir, plan) =
            script("trap 'echo told > told; exit' TERM; echo >&5; while :; do sleep 0.01; done");
        plan.start(SOURCE).await.unwrap().logger.end().await;
        assert_eq!(fs::read_to_string(dir.path().join("told")).unwrap(), "told\n");
    }

    #[tokio::test]
    async fn a_logger_that_closes_its_descriptor_is_ready() {
        let (dir, plan) = script("exec 5>&-; cat <&3 >o");
        // A logger is killed when its value is dropped.
        let Ready { logger, mut stdout, stderr } = plan.start(SOURCE).await.unwrap();
        stdout.write_all(b"out").await.unwrap();
        drop((stdout, stderr));
        logger.end().await;
        assert_eq!(fs::read_to_string(dir.path().join("o")).unwrap(), "out");
    }

    #[tokio::test]
    async fn a_logger_that_has_ended_takes_no_output() {
        let (_dir, plan) = script("exit 1");
        let Ready { mut stdout, .. } = plan.start(SOURCE).await.unwrap();
        // A child of another test may have the logger's descriptors for a moment, between its fork and its exec.
        let refused = async {
            loop {
                match stdout.write_all(b"out").await {
                    Ok(()) => tokio::time::sleep(Duration::from_millis(1)).await,
                    Err(e) => return e.kind(),
                }
            }
        };
        assert_eq!(timeout(READY, refused).await.unwrap(), io::ErrorKind::BrokenPipe);
    }

    #[tokio::test]
    async fn a_logger_that_is_missing_is_named() {
        let plan = LoggerPlan::parse("/no/such/logger").unwrap();
        let error = chain(&plan.start(SOURCE).await.unwrap_err());
        assert_eq!(error, "cannot start the logger /no/such/logger: no such file or directory");
    }
}
