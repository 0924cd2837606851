//! The two devices at I/O ports: the keyboard controller, of which only the reset line exists, and a serial port if
//! the guest has a console.

use std::{
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

/// A 16550A serial port whose output is written to a file.
pub struct Console {
    serial: Mutex<Serial<Line, NoEvents, Log>>,
}

/// The interrupt of the serial port.
struct Line(EventFd);

impl Trigger for Line {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

impl Console {
    /// The output goes to `log`. `line` is registered with KVM as an irqfd.
    pub fn new(log: Log, line: EventFd) -> Self {
        Self { serial: Mutex::new(Serial::new(Line(line), log)) }
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

impl BusDevice for Console {
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
}
