//! Shows on the terminal how far a command is, and so that it does not hang. Nothing is shown where stderr is no
//! terminal, or one that cannot move its cursor.

use std::{
    io::{self, Read, Write},
    os::fd::{AsFd, BorrowedFd},
    sync::{
        Arc, LazyLock, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use bulkhead_host_shim::operator::one_line;
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// What is done before this time shows nothing.
const DELAY: Duration = Duration::from_millis(700);

/// Pause between two looks at how far it is.
const TICK: Duration = Duration::from_millis(100);

/// How long a reader of stderr may take until it takes a message.
const TAKEN: Duration = Duration::from_secs(5);

/// What is shown with and without a known end.
const BYTES: &str = "[{bar:20}] {bytes} of {total_bytes}  {elapsed_precise}  {wide_msg}";
const BYTES_WITHOUT_END: &str = "{spinner} {bytes}  {elapsed_precise}  {wide_msg}";
const ITEMS: &str = "[{bar:20}] {pos} of {len}  {elapsed_precise}  {wide_msg}";
const ITEMS_WITHOUT_END: &str = "{spinner} {elapsed_precise}  {wide_msg}";

/// All bars of this process. They are hidden unless stderr is a terminal, and if TERM is unset or `dumb`.
static BARS: LazyLock<MultiProgress> = LazyLock::new(MultiProgress::new);

/// What is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unit {
    Bytes,
    Items,
}

/// How far something is. Whoever does it writes here, and need not wait for the terminal.
#[derive(Debug, Clone, Default)]
pub(crate) struct Count(Arc<Counted>);

#[derive(Debug, Default)]
struct Counted {
    done: AtomicU64,
    /// 0: it is not known.
    all: AtomicU64,
    /// What is done now.
    detail: Mutex<String>,
}

impl Count {
    pub(crate) fn add(&self, more: u64) {
        self.0.done.fetch_add(more, Ordering::Relaxed);
    }

    pub(crate) fn set(&self, done: u64, all: u64) {
        self.0.done.store(done, Ordering::Relaxed);
        self.0.all.store(all, Ordering::Relaxed);
    }

    pub(crate) fn set_detail(&self, detail: &str) {
        *self.0.detail.lock().unwrap_or_else(PoisonError::into_inner) = one_line(detail);
    }

    /// What is done, and of how much. What turns out to be more than was expected has no known end.
    fn amounts(&self) -> (u64, Option<u64>) {
        let (done, all) = (self.0.done.load(Ordering::Relaxed), self.0.all.load(Ordering::Relaxed));
        (done, Some(all).filter(|all| *all > 0 && done <= *all))
    }

    fn show(&self, bar: &ProgressBar, what: &str, unit: Unit) {
        let (done, all) = self.amounts();
        bar.set_style(style(match (unit, all) {
            (Unit::Bytes, Some(_)) => BYTES,
            (Unit::Bytes, None) => BYTES_WITHOUT_END,
            (Unit::Items, Some(_)) => ITEMS,
            (Unit::Items, None) => ITEMS_WITHOUT_END,
        }));
        if bar.length() != all {
            all.map_or_else(|| bar.unset_length(), |all| bar.set_length(all));
        }
        let detail = self.0.detail.lock().unwrap_or_else(PoisonError::into_inner).clone();
        bar.set_message(if detail.is_empty() { what.to_owned() } else { format!("{what}: {detail}") });
        bar.set_position(done);
        bar.tick();
    }
}

fn style(template: &str) -> ProgressStyle {
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_spinner());
    style.progress_chars("=> ").tick_chars("|/-\\ ")
}

/// Something that takes a while. When this is dropped, nothing of it is on the terminal any more.
#[derive(Debug)]
pub(crate) struct Progress {
    count: Count,
    /// None: there is no terminal.
    shown: Option<(Sender<()>, JoinHandle<()>)>,
}

impl Progress {
    pub(crate) fn begin(what: &str, unit: Unit) -> Self {
        let count = Count::default();
        if BARS.is_hidden() {
            return Self { count, shown: None };
        }
        let (sender, is_over) = channel();
        let (what, shown) = (one_line(what), count.clone());
        let thread = thread::spawn(move || show(&what, unit, &shown, &is_over));
        Self { count, shown: Some((sender, thread)) }
    }

    pub(crate) fn count(&self) -> &Count {
        &self.count
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some((sender, thread)) = self.shown.take() {
            drop(sender);
            // An error: it has panicked, and shows nothing more.
            _ = thread.join();
        }
    }
}

fn show(what: &str, unit: Unit, count: &Count, is_over: &Receiver<()>) {
    if is_over.recv_timeout(DELAY) != Err(RecvTimeoutError::Timeout) {
        return;
    }
    let bar = ProgressBar::hidden().with_elapsed(DELAY);
    // Before it is on the terminal, so that it is drawn as a whole.
    count.show(&bar, what, unit);
    let bar = BARS.add(bar);
    loop {
        count.show(&bar, what, unit);
        if is_over.recv_timeout(TICK) != Err(RecvTimeoutError::Timeout) {
            return bar.finish_and_clear();
        }
    }
}

/// Does something, and shows meanwhile that it goes on, unless the output is for a program.
pub(crate) fn during<T>(what: &str, is_json: bool, work: impl FnOnce(&Count) -> T) -> T {
    if is_json {
        return work(&Count::default());
    }
    let progress = Progress::begin(what, Unit::Items);
    work(progress.count())
}

/// Prints something while nothing else is on the terminal.
pub(crate) fn apart<T>(print: impl FnOnce() -> T) -> T {
    BARS.suspend(print)
}

/// stderr for messages that may come while something is shown. A message that nobody takes is dropped: it must not keep
/// a command that has a deadline.
pub(crate) struct Stderr;

impl Write for Stderr {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if !takes_more(io::stderr().as_fd(), TAKEN) {
            return Ok(bytes.len());
        }
        apart(|| io::stderr().write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

/// Whether a write does not block, or does not within this time. What cannot be waited for takes it.
fn takes_more(to: BorrowedFd<'_>, within: Duration) -> bool {
    let limit = Timespec::try_from(within).unwrap_or_default();
    poll(&mut [PollFd::from_borrowed_fd(to, PollFlags::OUT)], Some(&limit)) != Ok(0)
}

/// Counts what is read.
pub(crate) struct CountedReader<R> {
    pub(crate) inner: R,
    pub(crate) count: Count,
}

impl<R: Read> Read for CountedReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = self.inner.read(buffer)?;
        self.count.add(length as u64);
        Ok(length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_read_is_counted_and_more_than_expected_has_no_end() {
        let count = Count::default();
        let mut reader = CountedReader { inner: &[7; 10][..], count: count.clone() };
        assert_eq!(count.amounts(), (0, None));
        count.set(0, 8);
        reader.read_exact(&mut [0; 8]).unwrap();
        assert_eq!(count.amounts(), (8, Some(8)));
        reader.read_exact(&mut [0; 2]).unwrap();
        assert_eq!(count.amounts(), (10, None));
    }

    #[test]
    fn names_cannot_control_the_terminal() {
        let count = Count::default();
        count.set_detail("layer\u{1b}[2J\n1");
        let bar = ProgressBar::hidden();
        count.show(&bar, "unpacking", Unit::Bytes);
        assert_eq!(bar.message(), "unpacking: layer [2J 1");
    }

    #[test]
    fn each_amount_can_be_shown() {
        for template in [BYTES, BYTES_WITHOUT_END, ITEMS, ITEMS_WITHOUT_END] {
            assert!(ProgressStyle::with_template(template).is_ok(), "{template}");
        }
    }

    #[test]
    fn a_reader_that_takes_nothing_is_not_waited_for_for_ever() {
        let (reader, mut writer) = io::pipe().unwrap();
        let within = Duration::from_millis(10);
        assert!(takes_more(writer.as_fd(), within));
        writer.write_all(&vec![b'x'; 64 << 10]).unwrap();
        assert!(!takes_more(writer.as_fd(), within));
        // The write says that nobody reads it.
        drop(reader);
        assert!(takes_more(writer.as_fd(), within));
    }
}
