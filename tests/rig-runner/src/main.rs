//! The runner of the rig's inner host: takes orders from `cargo xtask rig` on a virtio-serial port, runs the
//! commands and sends back what they print and how they exit.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::pty::{Winsize, openpty};
use nix::sys::time::TimeSpec;
use nix::time::{ClockId, clock_settime};
use rig_runner::{CHUNK, Frame, Order, PAYLOAD_DISK, PORT, Report, Size, Stream};

/// How long the output may stay open after the command's exit: a process that the command left behind may hold it.
const DRAIN_TIME: Duration = Duration::from_secs(2);

fn main() -> ExitCode {
    match serve() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("rig-runner: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn serve() -> Result<()> {
    let path = format!("/dev/virtio-ports/{PORT}");
    let mut orders =
        File::options().read(true).write(true).open(&path).with_context(|| format!("cannot open {path}"))?;
    let reports = Reports(Arc::new(Mutex::new(orders.try_clone().context("cannot clone the port")?)));
    let mut input = None;
    loop {
        let done = match Frame::read_from(&mut orders).context("cannot read the port")? {
            Frame::Order(Order::Begin { clock, payload_bytes }) => {
                begin(clock, payload_bytes).map(|()| reports.send(&Frame::Report(Report::Ready)))
            }
            Frame::Order(Order::Run { argv, terminal }) => {
                run(&argv, terminal, &reports).map(|opened| input = Some(opened))
            }
            Frame::Order(Order::EndOfInput) => {
                input = None;
                Ok(())
            }
            Frame::Order(Order::Beat) => Ok(()),
            Frame::Order(Order::Resize(size)) => {
                if let Some(input) = &input {
                    // A command that has just exited has no terminal any more, and needs no size.
                    let _ = rustix::termios::tcsetwinsize(input, window(size));
                }
                Ok(())
            }
            Frame::Data(Stream::Stdin, data) => {
                // A command that no longer reads ends its input, and nothing else.
                if input.as_mut().is_some_and(|input: &mut File| input.write_all(&data).is_err()) {
                    input = None;
                }
                Ok(())
            }
            frame => bail!("this is not for the runner: {frame:?}"),
        };
        if let Err(error) = done {
            reports.send(&Frame::Report(Report::Failed(format!("{error:#}"))));
        }
    }
}

/// The sending side of the port.
#[derive(Clone)]
struct Reports(Arc<Mutex<File>>);

impl Reports {
    /// Sends a frame. The port fails only when the machine that hosts the rig is gone, and this one with it.
    fn send(&self, frame: &Frame) {
        let port = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = frame.write_to(&*port) {
            eprintln!("rig-runner: cannot write the port: {error}");
        }
    }
}

/// Sets the clock, which stood still in the saved state, and unpacks the payload.
fn begin(clock: Duration, payload_bytes: u64) -> Result<()> {
    clock_settime(ClockId::CLOCK_REALTIME, TimeSpec::from_duration(clock)).context("cannot set the clock")?;
    if payload_bytes == 0 {
        return Ok(());
    }
    let path = format!("/dev/disk/by-id/virtio-{PAYLOAD_DISK}");
    // O_DIRECT: what the kernel read of this disk before the state was saved is not what is on it now.
    let disk = File::options().read(true).custom_flags(nix::libc::O_DIRECT).open(&path);
    let disk = disk.with_context(|| format!("cannot open {path}"))?;
    let mut tar = Command::new("tar")
        .args(["--extract", "--file=-", "--directory=/"])
        .stdin(Stdio::piped())
        .spawn()
        .context("cannot run tar")?;
    let stdin = tar.stdin.take().context("tar has no input")?;
    copy_direct(disk, stdin, payload_bytes).context("cannot feed the payload to tar")?;
    let status = tar.wait().context("cannot wait for tar")?;
    if !status.success() {
        bail!("tar could not unpack the payload: {status}");
    }
    Ok(())
}

/// Copies `bytes` bytes of a file opened with O_DIRECT, whose reads must be aligned to its blocks.
fn copy_direct(mut from: File, mut to: impl Write, mut bytes: u64) -> io::Result<()> {
    const ALIGNMENT: usize = 4096;
    const LENGTH: usize = 1 << 20;
    let mut buffer = vec![0; LENGTH + ALIGNMENT];
    let start = buffer.as_ptr().align_offset(ALIGNMENT);
    let buffer = &mut buffer[start..start + LENGTH];
    while bytes > 0 {
        let read = from.read(buffer)?;
        if read == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let used = read.min(usize::try_from(bytes).unwrap_or(usize::MAX));
        to.write_all(&buffer[..used])?;
        bytes -= used as u64;
    }
    Ok(())
}

/// Starts a command and the threads that report on it. Returns what leads to its standard input.
fn run(argv: &[String], terminal: Option<Size>, reports: &Reports) -> Result<File> {
    let (program, args) = argv.split_first().context("no command is given")?;
    let mut command;
    if terminal.is_some() {
        // Makes the standard input the controlling terminal, then becomes the command.
        command = Command::new("setsid");
        command.arg("--ctty").arg(program);
    } else {
        command = Command::new(program);
    }
    command.args(args).current_dir("/root").env_clear();
    command.env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
    command.env("HOME", "/root").env("LANG", "C.UTF-8").env("TERM", "xterm-256color");
    let cannot_run = || format!("cannot run {program}");
    let (open, drained) = mpsc::channel();
    let (input, child) = if let Some(size) = terminal {
        let pty = openpty(
            Some(&Winsize { ws_row: size.rows, ws_col: size.columns, ws_xpixel: 0, ws_ypixel: 0 }),
            None,
        )
        .context("cannot open a terminal")?;
        let slave = || pty.slave.try_clone().context("cannot clone the terminal");
        command.stdin(slave()?).stdout(slave()?).stderr(slave()?);
        let child = command.spawn().with_context(cannot_run)?;
        let output = File::from(pty.master.try_clone().context("cannot clone the terminal")?);
        forward(output, Stream::Stdout, reports.clone(), open);
        (File::from(pty.master), child)
    } else {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(cannot_run)?;
        let (Some(stdin), Some(stdout), Some(stderr)) =
            (child.stdin.take(), child.stdout.take(), child.stderr.take())
        else {
            bail!("{program} has no streams");
        };
        forward(OwnedFd::from(stdout).into(), Stream::Stdout, reports.clone(), open.clone());
        forward(OwnedFd::from(stderr).into(), Stream::Stderr, reports.clone(), open);
        (OwnedFd::from(stdin).into(), child)
    };
    let reports = reports.clone();
    thread::spawn(move || report_exit(child, &drained, &reports));
    Ok(input)
}

/// Sends what comes from `from`. `_open` is dropped at its end.
fn forward(mut from: File, stream: Stream, reports: Reports, _open: Sender<()>) {
    thread::spawn(move || {
        let _open = _open;
        let mut buffer = vec![0; CHUNK];
        // A terminal whose last user is gone fails with EIO, which is its end too.
        while let Ok(read) = from.read(&mut buffer)
            && read > 0
        {
            reports.send(&Frame::Data(stream, buffer[..read].to_vec()));
        }
    });
}

fn report_exit(mut child: Child, drained: &mpsc::Receiver<()>, reports: &Reports) {
    let report = match child.wait() {
        Ok(status) => {
            let signalled = || status.signal().map(|signal| 128 + signal);
            let status = status.code().or_else(signalled).and_then(|status| u8::try_from(status).ok());
            Report::Exited(status.unwrap_or(u8::MAX))
        }
        Err(error) => Report::Failed(format!("cannot wait for the command: {error}")),
    };
    // Nothing is ever sent: this returns when all senders are dropped, or late.
    let _ = drained.recv_timeout(DRAIN_TIME);
    reports.send(&Frame::Report(report));
}

fn window(size: Size) -> rustix::termios::Winsize {
    rustix::termios::Winsize { ws_row: size.rows, ws_col: size.columns, ws_xpixel: 0, ws_ypixel: 0 }
}
