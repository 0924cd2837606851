//! Listings as tables for people and as JSON for programs.

use std::{
    io::{self, Write},
    os::fd::AsFd,
};

use comfy_table::{Table, presets};
use rustix::event::PollFlags;
use serde::Serialize;

use crate::process::streams::wait_for;

/// What an absent value is shown as.
pub(crate) const NONE: &str = "-";

/// Standard output. That nobody reads it is no reason for a command to stop half-way, and changes nothing about its
/// exit status. Only an endless command ends then.
#[derive(Debug)]
pub(crate) struct Shown<W> {
    out: W,
    is_endless: bool,
    failed: Option<io::Error>,
}

impl<W: Write + AsFd> Shown<W> {
    pub(crate) fn new(out: W, is_endless: bool) -> Self {
        Self { out, is_endless, failed: None }
    }

    /// The first error after which the command went on, unless its reader has seen enough.
    pub(crate) fn written(self) -> io::Result<()> {
        match self.failed {
            Some(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error),
            _ => Ok(()),
        }
    }

    /// After the first error, what the command has to say is dropped.
    fn tried<T>(&mut self, dropped: T, mut write: impl FnMut(&mut W) -> io::Result<T>) -> io::Result<T> {
        if self.failed.is_some() {
            return Ok(dropped);
        }
        loop {
            match write(&mut self.out) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    wait_for(&self.out, PollFlags::OUT)?
                }
                Err(error) if !self.is_endless && error.kind() != io::ErrorKind::Interrupted => {
                    self.failed = Some(error);
                    return Ok(dropped);
                }
                other => return other,
            }
        }
    }
}

impl<W: Write + AsFd> Write for Shown<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.tried(bytes.len(), |out| out.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.tried((), W::flush)
    }
}

/// Prints `rows` as JSON, or as a table with a line for each.
pub(crate) fn listing<T: Serialize, const N: usize>(
    out: &mut impl Write,
    is_json: bool,
    rows: &[T],
    header: [&str; N],
    cells: impl Fn(&T) -> [String; N],
) -> io::Result<()> {
    if is_json {
        return json(out, &rows);
    }
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(header);
    for row in rows {
        table.add_row(cells(row));
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    for line in table.to_string().lines() {
        writeln!(out, "{}", line.trim_end())?;
    }
    Ok(())
}

/// Prints a value as JSON.
pub(crate) fn json(out: &mut impl Write, value: &impl Serialize) -> io::Result<()> {
    serde_json::to_writer_pretty(&mut *out, value)?;
    writeln!(out)
}

/// A value, or the sign for none.
pub(crate) fn or_none<T: ToString>(value: Option<T>) -> String {
    value.map_or_else(|| NONE.into(), |value| value.to_string())
}

/// Bytes in MiB, rounded to a tenth.
pub(crate) fn mib(bytes: u64) -> String {
    let tenths = (u128::from(bytes) * 10 + (1 << 19)) >> 20;
    format!("{}.{} MiB", tenths / 10, tenths % 10)
}

/// Microseconds since 1970 as a date and a time of UTC (RFC 3339), to the millisecond.
pub(crate) fn time(unix_us: u64) -> String {
    let (seconds, millis) = (unix_us / 1_000_000, unix_us / 1000 % 1000);
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    // Years that begin in March have the leap day at their end. Day 0 is the first of March of the year 0. An era has
    // 400 years, after which the calendar repeats itself.
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let from_march = (5 * day + 2) / 153;
    let day = day - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    let year = year + 400 * era + u64::from(month <= 2);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{millis:03}Z")
}

/// Seconds in their largest two units.
pub(crate) fn age(seconds: u64) -> String {
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    match () {
        () if days > 0 => format!("{days}d{}h", hours % 24),
        () if hours > 0 => format!("{hours}h{}m", minutes % 60),
        () if minutes > 0 => format!("{minutes}m{}s", seconds % 60),
        () => format!("{seconds}s"),
    }
}

/// What a command shows.
#[cfg(test)]
pub(crate) fn shown(show: impl FnOnce(&mut Vec<u8>) -> Result<(), crate::error::CommandError>) -> String {
    let mut out = Vec::new();
    show(&mut out).unwrap();
    String::from_utf8(out).unwrap()
}

#[cfg(test)]
mod tests {
    use std::{io::Read, thread};

    use rustix::fs::{OFlags, fcntl_setfl};

    use super::*;

    #[test]
    fn a_table_has_aligned_columns_and_json_has_the_values() {
        let (mut table, mut values) = (Vec::new(), Vec::new());
        let rows = [("a", 1), ("long", 22)];
        let cells = |(name, number): &(&str, i32)| [(*name).to_owned(), number.to_string()];
        listing(&mut table, false, &rows, ["NAME", "NUMBER"], cells).unwrap();
        assert_eq!(String::from_utf8(table).unwrap(), "NAME  NUMBER\na     1\nlong  22\n");
        listing(&mut values, true, &rows, ["NAME", "NUMBER"], cells).unwrap();
        let values: serde_json::Value = serde_json::from_slice(&values).unwrap();
        assert_eq!(values, serde_json::json!([["a", 1], ["long", 22]]));
    }

    #[test]
    fn a_time_is_that_of_the_calendar() {
        let at = |seconds: u64| time(seconds * 1_000_000 + 7000);
        assert_eq!(at(0), "1970-01-01T00:00:00.007Z");
        assert_eq!(at(951_782_400), "2000-02-29T00:00:00.007Z");
        assert_eq!(at(1_709_251_199), "2024-02-29T23:59:59.007Z");
        assert_eq!(at(4_107_542_400), "2100-03-01T00:00:00.007Z");
        assert!(time(u64::MAX).starts_with("586"));
    }

    #[test]
    fn sizes_and_ages_are_short() {
        assert_eq!(
            [0, 1 << 20, (1 << 20) + (1 << 19), u64::MAX].map(mib),
            ["0.0 MiB", "1.0 MiB", "1.5 MiB", "17592186044416.0 MiB"]
        );
        assert_eq!([59, 61, 3_661, 90_000].map(age), ["59s", "1m1s", "1h1m", "1d1h"]);
    }

    #[test]
    fn a_stream_that_does_not_block_gets_everything() {
        let (mut reader, writer) = io::pipe().unwrap();
        fcntl_setfl(&writer, OFlags::NONBLOCK).unwrap();
        // More than a pipe has room for.
        let text = "x".repeat(300_000);
        let reads = thread::spawn(move || {
            let mut read = String::new();
            reader.read_to_string(&mut read).map(|_| read).unwrap()
        });
        let mut out = Shown::new(writer, false);
        write!(out, "{text}").and_then(|()| out.flush()).unwrap();
        out.written().unwrap();
        assert!(reads.join().unwrap() == text);
    }

    #[test]
    fn only_an_endless_command_ends_when_nobody_reads_it() {
        let closed = || {
            let (reader, writer) = io::pipe().unwrap();
            drop(reader);
            writer
        };
        let mut endless = Shown::new(closed(), true);
        assert_eq!(writeln!(endless, "a").unwrap_err().kind(), io::ErrorKind::BrokenPipe);
        let mut other = Shown::new(closed(), false);
        writeln!(other, "a").and_then(|()| writeln!(other, "b")).and_then(|()| other.flush()).unwrap();
        other.written().unwrap();
        // A full disk is an error, but not before everything is done.
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let mut other = Shown::new(full, false);
        writeln!(other, "a").and_then(|()| other.flush()).unwrap();
        assert_eq!(other.written().unwrap_err().kind(), io::ErrorKind::StorageFull);
    }
}
