//! The two devices at I/O ports: the keyboard controller, of which only the reset line exists, and a serial port. It is
//! the guest's console, or it takes the last words of a guest without one.

use std::{
    collections::VecDeque,
    fs::{File, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::Path,
    sync::{Arc, Mutex},
};

use vm_superio::{Serial, Trigger, serial::NoEvents};
use vmm_sys_util::eventfd::EventFd;

use crate::{
    bus::BusDevice,
    lock,
    vcpu::{ExitEvent, GuestExit},
};

/// First port of the keyboard controller.
pub const KEYBOARD_PORT: u64 = 0x60;
/// The number of its ports. 0x60 is the data port, 0x64 the command and status port.
pub const KEYBOARD_PORTS: u64 = 5;

/// A keyboard controller that can only reset the processor: with `reboot=k` Linux writes 0xfe to port 0x64. A reset
/// ends the VM.
pub struct ResetLine {
    exit: Arc<ExitEvent>,
}

impl ResetLine {
    /// A reset sets `exit`.
    pub fn new(exit: Arc<ExitEvent>) -> Self {
        Self { exit }
    }
}

impl BusDevice for ResetLine {
    /// Status 0 means that the controller is ready for a command and no key was pressed.
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        const COMMAND: u64 = 4;
        const PULSE_RESET: u8 = 0xfe;
        if offset == COMMAND && data.first() == Some(&PULSE_RESET) {
            self.exit.set(GuestExit::Reset);
        }
    }
}

/// The number of ports of a 16550A.
pub const SERIAL_PORTS: u64 = 8;

/// The largest size of the file. A guest writes less than a hundredth of this when it boots. More output is lost, so
/// that a guest cannot fill the disk of the host.
const MAX_CONSOLE: u64 = 4 << 20;
/// The last line of a file that has reached this size.
const CONSOLE_ENDS: &[u8] = b"\n(bulkhead: this file is full, the console goes on without it)\n";

/// A 16550A serial port whose output is written to `W`.
pub struct SerialPort<W: Write> {
    serial: Mutex<Serial<Line, NoEvents, W>>,
}

/// The console of a guest, which is written to a file.
pub type Console = SerialPort<Log>;

/// The port of a guest without a console. Its kernel writes emergencies and panics only (`earlyprintk`). To set it up
/// costs a boot nine exits, and a clone none. The end of the text is kept in memory.
pub type LastWords = SerialPort<Tail>;

/// The interrupt of the serial port. None: the driver polls.
struct Line(Option<EventFd>);

impl Trigger for Line {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.as_ref().map_or(Ok(()), |line| line.write(1))
    }
}

impl Console {
    /// The output goes to `log`. `line` is registered with KVM as an irqfd.
    pub fn new(log: Log, line: EventFd) -> Self {
        Self { serial: Mutex::new(Serial::new(Line(Some(line)), log)) }
    }
}

/// How much of the last words is kept, in bytes and in lines. A guest may write any amount. The text of a panic has
/// about 2 KiB, and about 40 lines.
const MOST_WORDS: usize = 4096;
const MOST_LINES: usize = 64;

/// The last [`MOST_WORDS`] bytes that were written.
#[derive(Default)]
pub struct Tail(VecDeque<u8>);

impl Write for Tail {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        for byte in bytes {
            if self.0.len() == MOST_WORDS {
                self.0.pop_front();
            }
            self.0.push_back(*byte);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl LastWords {
    /// A guest that has said nothing yet.
    pub fn new() -> Self {
        Self { serial: Mutex::new(Serial::new(Line(None), Tail::default())) }
    }

    /// The last lines, without control characters. The first one may lack its beginning.
    pub fn lines(&self) -> Vec<String> {
        let bytes: Vec<u8> = lock(&self.serial).writer().0.iter().copied().collect();
        let text = String::from_utf8_lossy(&bytes);
        let shown = |line: &str| line.trim().replace(char::is_control, " ");
        let lines: Vec<_> = text.split(['\n', '\r']).map(shown).filter(|line| !line.is_empty()).collect();
        let first = lines.len().saturating_sub(MOST_LINES);
        lines.into_iter().skip(first).collect()
    }
}

impl Default for LastWords {
    fn default() -> Self {
        Self::new()
    }
}

/// A file with a maximum size. Further output is dropped.
pub struct Log {
    file: File,
    room: u64,
}

impl Log {
    /// Opens the file at `path` to append to it. Only its owner may read it.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().append(true).create(true).mode(0o600).open(path)?;
        let room = MAX_CONSOLE.saturating_sub(file.metadata()?.len());
        Ok(Self { file, room })
    }
}

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.room == 0 {
            return Ok(bytes.len());
        }
        let fitting = usize::try_from(self.room).unwrap_or(usize::MAX).min(bytes.len());
        let written = self.file.write(&bytes[..fitting])?;
        self.room -= written as u64;
        if self.room == 0 {
            self.file.write_all(CONSOLE_ENDS)?;
        }
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl<W: Write + Send> BusDevice for SerialPort<W> {
    fn read(&self, offset: u64, data: &mut [u8]) {
        // The registers have one byte. String I/O reads the same register repeatedly.
        for byte in data {
            *byte = lock(&self.serial).read(offset as u8);
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let mut serial = lock(&self.serial);
        for byte in data {
            // If the disk is full, the output is lost. The guest continues.
            let _ = serial.write(offset as u8, *byte);
        }
    }
}

#[cfg(test)]
mod tests {
    use vmm_sys_util::eventfd::EFD_NONBLOCK;

    use super::*;

    #[test]
    fn only_the_reset_command_ends_the_guest() {
        let exit = Arc::new(ExitEvent::new().unwrap());
        let port = ResetLine::new(exit.clone());
        port.write(0, &[0xfe]);
        port.write(4, &[0xd1]);
        assert!(exit.take().is_none());
        port.write(4, &[0xfe]);
        assert!(matches!(exit.take(), Some(GuestExit::Reset)));
    }

    fn console(path: &Path) -> Console {
        Console::new(Log::open(path).unwrap(), EventFd::new(EFD_NONBLOCK).unwrap())
    }

    #[test]
    fn what_the_guest_says_is_appended_to_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("console.log");
        std::fs::write(&path, "before\n").unwrap();
        let console = console(&path);
        console.write(0, b"hello\n");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "before\nhello\n");
    }

    #[test]
    fn a_guest_that_never_stops_talking_does_not_fill_the_disk() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("console.log");
        File::create(&path).unwrap().set_len(MAX_CONSOLE - 3).unwrap();
        console(&path).write(0, &[b'x'; 1000]);
        let text = std::fs::read(&path).unwrap();
        assert_eq!(text[(MAX_CONSOLE - 3) as usize..], [b"xxx", CONSOLE_ENDS].concat());

        console(&path).write(0, b"still here");
        assert_eq!(std::fs::metadata(&path).unwrap().len(), text.len() as u64);
    }

    /// Writes as Linux does with `earlyprintk`: sets the line up, then waits for the port before each byte.
    fn kernel_writes(port: &LastWords, text: &[u8]) {
        const SET_UP: [(u64, u8); 7] = [(3, 3), (1, 0), (2, 0), (4, 3), (3, 0x83), (0, b'x'), (1, b'y')];
        for (register, value) in SET_UP {
            port.write(register, &[value]);
        }
        port.write(3, &[3]);
        for byte in text {
            let mut status = [0];
            port.read(5, &mut status);
            assert_ne!(status[0] & 0x20, 0, "the port is not ready");
            port.write(0, &[*byte]);
        }
    }

    #[test]
    fn the_last_words_of_a_guest_are_lines_without_control_characters() {
        let port = LastWords::new();
        assert!(port.lines().is_empty());
        kernel_writes(&port, b"Kernel panic - not syncing: x\x1b[2J\r\n\r\n  Call Trace:\r\n\xff");
        assert_eq!(port.lines(), ["Kernel panic - not syncing: x [2J", "Call Trace:", "\u{fffd}"]);
    }

    #[test]
    fn a_guest_that_floods_the_port_takes_no_more_than_its_end() {
        let port = LastWords::new();
        // With its interrupt, and received by itself (loopback).
        port.write(1, &[0xf]);
        port.write(0, &vec![b'x'; 1 << 20]);
        let [line] = port.lines().try_into().unwrap();
        assert_eq!(line.len(), MOST_WORDS);
        assert!(lock(&port.serial).writer().0.capacity() <= 2 * MOST_WORDS);
        port.write(0, &b"y\n".repeat(1 << 16));
        assert_eq!(port.lines(), vec!["y"; MOST_LINES]);
        port.write(4, &[0x10]);
        port.write(0, &[b'z'; 1 << 16]);
        assert_eq!(port.lines(), vec!["y"; MOST_LINES], "what the port receives itself is not written");
    }
}
