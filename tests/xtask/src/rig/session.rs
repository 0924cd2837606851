//! Commands in a running inner host.

use std::io::{self, IsTerminal, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, anyhow, bail};
use rig_runner::{CHUNK, Frame, Order, Report, Size, Stream};
use rustix::event::PollFlags;
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};

use super::qemu::Machine;
use super::{Failure, is_ready};
use crate::progress::Lines;

/// Pause between two looks at the size of the terminal.
const RESIZE_TICK: Duration = Duration::from_millis(300);

/// Words of a command that an error shows.
const SHOWN_WORDS: usize = 8;

/// Pause between two beats.
const BEAT: Duration = Duration::from_millis(500);

/// Where a command's streams go.
pub(crate) enum Io<'a> {
    /// This process's own streams.
    Inherited,
    /// A terminal in the inner host, shown on the one of this process.
    Terminal,
    /// No input; what it writes to either stream is appended.
    Captured(&'a mut Vec<u8>),
    /// No input; what it writes to either stream is appended, and shown.
    Shown(&'a mut Vec<u8>),
    /// The same. All lines that it has written are looked at whenever there are more.
    Watched(&'a mut Vec<u8>, &'a dyn Fn(&[u8])),
    /// No input; what it writes to either stream is passed on when it comes.
    Followed(&'a mut dyn FnMut(&[u8])),
}

/// How long a command may take.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Limit {
    /// From its start to its end.
    Whole(Duration),
    /// Without a word from it.
    Silence(Duration),
}

impl Limit {
    /// The deadline of a command that was started, or has printed something, just now.
    fn renewed(self, deadline: Option<Instant>) -> Instant {
        match (self, deadline) {
            (Limit::Whole(_), Some(deadline)) => deadline,
            (Limit::Whole(limit) | Limit::Silence(limit), _) => Instant::now() + limit,
        }
    }
}

/// An inner host that takes commands, one after the other.
pub(crate) struct Session {
    machine: Machine,
    sender: Arc<Sender>,
}

/// The sending side of the channel, whose threads must not send into each other's frames.
type Sender = Mutex<UnixStream>;

impl Session {
    /// Waits until the inner host answers, and has it set its clock and unpack its payload.
    pub(super) fn begin(machine: Machine, payload_bytes: u64, limit: Duration) -> Result<Session, Failure> {
        let sender = machine.channel.try_clone().context("cannot clone the channel")?;
        let mut session = Session { machine, sender: Arc::new(Mutex::new(sender)) };
        let clock = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .context("this machine's clock is wrong")?;
        session.order(Order::Begin { clock, payload_bytes }).map_err(Failure::NotUp)?;
        let deadline = Instant::now() + limit;
        let answer = session.next(deadline).context("the inner host does not come up");
        match answer.map_err(Failure::NotUp)? {
            Frame::Report(Report::Ready) => Ok(session),
            Frame::Report(Report::Failed(message)) => {
                Err(anyhow!("the inner host cannot begin: {message}").into())
            }
            frame => Err(anyhow!("the inner host begins with {frame:?}").into()),
        }
    }

    /// Runs a command to its end and returns its exit status (128 + n: ended by signal n).
    pub(crate) fn run(&mut self, argv: &[String], mut io: Io<'_>, limit: Limit) -> Result<u8> {
        let deadline = limit.renewed(None);
        let waited = || {
            let shown: Vec<_> = argv.iter().map(String::as_str).take(SHOWN_WORDS).collect();
            format!("`{}` has not exited ({limit:?})", shown.join(" "))
        };
        let terminal = match io {
            Io::Terminal => Some(terminal_size()?),
            _ => None,
        };
        self.order(Order::Run { argv: argv.to_vec(), terminal })?;
        let _raw = match io {
            Io::Terminal => Some(RawTerminal::enter()?),
            _ => None,
        };
        match io {
            Io::Inherited | Io::Terminal => self.forward_input(terminal),
            Io::Captured(_) | Io::Shown(_) | Io::Watched(..) | Io::Followed(_) => {
                self.order(Order::EndOfInput)?
            }
        }
        let mut shown = Shown::default();
        let ended = self.follow(&mut io, &mut shown, limit, deadline, &waited);
        shown.finish().context("cannot write the output")?;
        ended
    }

    /// Takes what a command writes until it exits.
    fn follow(
        &mut self,
        io: &mut Io<'_>,
        shown: &mut Shown,
        limit: Limit,
        mut deadline: Instant,
        waited: &dyn Fn() -> String,
    ) -> Result<u8> {
        loop {
            let frame = self.next(deadline).with_context(waited)?;
            deadline = limit.renewed(Some(deadline));
            match frame {
                Frame::Data(stream, data) => {
                    deliver(io, shown, stream, &data).context("cannot write the output")?
                }
                Frame::Report(Report::Exited(status)) => return Ok(status),
                Frame::Report(Report::Failed(message)) => bail!("the inner host: {message}"),
                frame => bail!("the inner host sends {frame:?}"),
            }
        }
    }

    /// Saves the inner host's state and ends it.
    pub(super) fn save(self, memory: &Path) -> Result<()> {
        self.machine.discard_logs();
        self.machine.save(memory)
    }

    /// Ends an inner host in which all went well.
    pub(crate) fn finish(self) {
        self.machine.discard_logs();
    }

    fn order(&mut self, order: Order) -> Result<()> {
        let sent = send(&self.sender.lock().unwrap_or_else(PoisonError::into_inner), &Frame::Order(order));
        sent.map_err(|error| self.failure(&error))
    }

    /// The next frame. While none comes, the inner host gets a beat now and then.
    ///
    /// An emulated processor sometimes stopped for good, until the chipset's watchdog reset it. The cause is not
    /// proven. One explanation fits: QEMU 10.0 marks pending interrupts in one word. Its main thread changes this word,
    /// and so does the processor's thread at each entry into a guest and exit from it, without a lock. So the mark of
    /// the timer interrupt can be lost, and everything waits for that timer. The next interrupt restores lost marks. A
    /// beat causes one.
    fn next(&mut self, deadline: Instant) -> Result<Frame> {
        while Instant::now() < deadline && !is_ready(&self.machine.channel, PollFlags::IN, BEAT)? {
            self.beat()?;
        }
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        self.machine.channel.set_read_timeout(Some(left)).context("cannot set a time limit")?;
        Frame::read_from(&self.machine.channel).map_err(|error| self.failure(&error))
    }

    /// Sends a beat, unless it would have to wait. Another thread that is sending causes interrupts too. And a beat
    /// must not wait for an inner host that reads nothing.
    fn beat(&mut self) -> Result<()> {
        let can_send = is_ready(&self.machine.channel, PollFlags::OUT, Duration::ZERO)?;
        let sent = match self.sender.try_lock() {
            Ok(sender) if can_send => send(&sender, &Frame::Order(Order::Beat)),
            _ => Ok(()),
        };
        sent.map_err(|error| self.failure(&error))
    }

    fn failure(&mut self, error: &io::Error) -> anyhow::Error {
        let what = match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => "the time limit has passed".to_owned(),
            io::ErrorKind::UnexpectedEof | io::ErrorKind::BrokenPipe => "the inner host is gone".to_owned(),
            _ => format!("the inner host's channel fails: {error}"),
        };
        anyhow!("{what}; {}", self.machine.evidence())
    }

    /// Sends this process's input, and the size of its terminal, until the process ends: a read that waits for a
    /// person cannot be called off. Hence a session of this kind is the last thing a process does.
    fn forward_input(&self, terminal: Option<Size>) {
        let sender = Arc::clone(&self.sender);
        thread::spawn(move || send_input(&sender));
        if let Some(size) = terminal {
            let sender = Arc::clone(&self.sender);
            thread::spawn(move || send_sizes(&sender, size));
        }
    }
}

fn send(mut channel: &UnixStream, frame: &Frame) -> io::Result<()> {
    frame.write_to(&mut channel)
}

/// Sends a frame; false if the inner host is gone, which the reading side reports.
fn try_send(sender: &Sender, frame: &Frame) -> bool {
    send(&sender.lock().unwrap_or_else(PoisonError::into_inner), frame).is_ok()
}

fn send_input(sender: &Sender) {
    let mut buffer = vec![0; CHUNK];
    let mut input = io::stdin().lock();
    loop {
        let frame = match input.read(&mut buffer) {
            Ok(read) if read > 0 => Frame::Data(Stream::Stdin, buffer[..read].to_vec()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            _ => Frame::Order(Order::EndOfInput),
        };
        if !try_send(sender, &frame) || matches!(frame, Frame::Order(_)) {
            return;
        }
    }
}

fn send_sizes(sender: &Sender, mut last: Size) {
    loop {
        thread::sleep(RESIZE_TICK);
        if let Ok(size) = terminal_size()
            && size != last
        {
            if !try_send(sender, &Frame::Order(Order::Resize(size))) {
                return;
            }
            last = size;
        }
    }
}

/// The streams of a command that are shown.
#[derive(Default)]
struct Shown {
    stdout: Lines,
    stderr: Lines,
}

impl Shown {
    fn finish(self) -> io::Result<()> {
        self.stdout.finish(&mut io::stdout())?;
        self.stderr.finish(&mut io::stderr())
    }
}

fn deliver(io: &mut Io<'_>, shown: &mut Shown, stream: Stream, data: &[u8]) -> io::Result<()> {
    match io {
        Io::Captured(output) => {
            output.extend_from_slice(data);
            return Ok(());
        }
        Io::Followed(follow) => {
            follow(data);
            return Ok(());
        }
        Io::Shown(output) => output.extend_from_slice(data),
        Io::Watched(output, watch) => {
            output.extend_from_slice(data);
            let lines = output.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
            watch(&output[..lines]);
        }
        Io::Inherited | Io::Terminal => return pass_on(stream, data),
    }
    match stream {
        Stream::Stderr => shown.stderr.print(data, &mut io::stderr()),
        _ => shown.stdout.print(data, &mut io::stdout()),
    }
}

/// Writes to this process's own streams.
fn pass_on(stream: Stream, data: &[u8]) -> io::Result<()> {
    if stream == Stream::Stderr {
        io::stderr().write_all(data)
    } else {
        let mut stdout = io::stdout().lock();
        stdout.write_all(data)?;
        stdout.flush()
    }
}

fn terminal_size() -> Result<Size> {
    if !io::stdin().is_terminal() {
        bail!("the standard input is not a terminal");
    }
    let size = tcgetwinsize(io::stdin()).context("cannot ask for the terminal's size")?;
    Ok(Size { rows: size.ws_row, columns: size.ws_col })
}

/// This process's terminal, passing every key on, until it is dropped.
struct RawTerminal(Termios);

impl RawTerminal {
    fn enter() -> Result<RawTerminal> {
        let before = tcgetattr(io::stdin()).context("cannot ask for the terminal's mode")?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(io::stdin(), OptionalActions::Now, &raw).context("cannot set the terminal's mode")?;
        Ok(RawTerminal(before))
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        // Nobody is left to tell.
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &self.0);
    }
}
