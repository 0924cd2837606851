//! `bulkhead top`: what the pods use, again and again.

use std::{
    collections::HashMap,
    io::{self, IsTerminal, Write},
    path::{Path, PathBuf},
    thread::sleep,
    time::{Duration, Instant},
};

use bulkhead_host_shim::operator::{Node, Sample, Sampler};
use rustix::termios::tcgetwinsize;
use serde::Serialize;

use crate::{
    error::CommandError,
    output::{NONE, age, json, listing, mib, or_none},
};

/// So much of an id is shown if the lines are too long otherwise, as crictl does.
const SHORT_ID: usize = 13;

/// Moves to the first line of a terminal, and clears it.
const CLEAR: &str = "\x1b[H\x1b[2J";

/// How `bulkhead top` shows the pods.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TopOptions {
    /// The time between two listings.
    pub(crate) every: Duration,
    pub(crate) once: bool,
    pub(crate) json: bool,
}

/// A pod, and what it has used since it was looked at before.
#[derive(Debug, Serialize)]
struct Row<'n> {
    #[serde(flatten)]
    sample: &'n Sample,
    rates: Option<Rates>,
}

/// In one second.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
struct Rates {
    /// Seconds of processor time.
    cpu: f64,
    kvm_exits: Option<f64>,
    received_bytes: Option<f64>,
    sent_bytes: Option<f64>,
    file_requests: Option<f64>,
}

/// Shows the pods until this command is ended, or once.
pub(crate) fn top(out: &mut impl Write, root: &Path, options: TopOptions) -> Result<(), CommandError> {
    let sampler = Sampler::default();
    let look = || match sampler.sample(root) {
        Ok(node) => Ok((node, Instant::now())),
        Err(source) => Err(CommandError::List { path: root.into(), source }),
    };
    let is_terminal = io::stdout().is_terminal();
    let mut before = look()?;
    loop {
        sleep(options.every);
        let now = look()?;
        let seconds = now.1.duration_since(before.1).as_secs_f64();
        if is_terminal && !options.json && !options.once {
            out.write_all(CLEAR.as_bytes()).map_err(CommandError::Output)?;
        }
        let rows = rows(&before.0, &now.0, seconds);
        let screen = is_terminal.then(Screen::of_stdout).flatten().filter(|_| !options.once);
        print(out, &rows, now.0.left_out, screen, options.json).map_err(CommandError::Output)?;
        if options.once {
            return Ok(());
        }
        if !is_terminal && !options.json {
            writeln!(out).map_err(CommandError::Output)?;
        }
        out.flush().map_err(CommandError::Output)?;
        before = now;
    }
}

fn rows<'n>(before: &Node, now: &'n Node, seconds: f64) -> Vec<Row<'n>> {
    let before: HashMap<&PathBuf, &Sample> =
        before.pods.iter().map(|sample| (&sample.pod.path, sample)).collect();
    let mut rows: Vec<_> = now
        .pods
        .iter()
        .map(|sample| {
            let before = before.get(&sample.pod.path).copied();
            Row { sample, rates: before.and_then(|before| rates(before, sample, seconds)) }
        })
        .collect();
    let cpu = |row: &Row<'_>| row.rates.map_or(0.0, |rates| rates.cpu);
    // What needs somebody must not be out of sight: what is down, and then what may be.
    let up = |row: &Row<'_>| row.sample.is_up.map_or(1, |is_up| if is_up { 2 } else { 0 });
    rows.sort_by(|one, other| up(one).cmp(&up(other)).then(cpu(other).total_cmp(&cpu(one))));
    rows
}

/// None: it is another VMM, or one of the two does not answer.
fn rates(before: &Sample, now: &Sample, seconds: f64) -> Option<Rates> {
    if before.pod.vmm_pid? != now.pod.vmm_pid? || seconds <= 0.0 {
        return None;
    }
    let per_second = |before: u64, now: u64| now.saturating_sub(before) as f64 / seconds;
    let both = |number: fn(&Sample) -> Option<u64>| Some(per_second(number(before)?, number(now)?));
    Some(Rates {
        cpu: (now.usage.cpu?.total() - before.usage.cpu?.total()).max(0.0) / seconds,
        kvm_exits: both(|sample| sample.usage.kvm_exits),
        received_bytes: both(|sample| sample.usage.network.map(|network| network.received_bytes)),
        sent_bytes: both(|sample| sample.usage.network.map(|network| network.sent_bytes)),
        file_requests: both(file_requests),
    })
}

/// Of all shares. None: the VMM has not answered.
fn file_requests(sample: &Sample) -> Option<u64> {
    let counts = &sample.usage.file_requests;
    (!counts.is_empty()).then(|| counts.iter().fold(0u64, |sum, (_, count)| sum.saturating_add(*count)))
}

/// How many processes were killed because memory was short: in the guest, and by the host. None: neither is known.
fn oom_kills(sample: &Sample) -> Option<u64> {
    let known = [sample.container_oom_kills, sample.usage.cgroup.oom_kills];
    known.into_iter().flatten().reduce(u64::saturating_add)
}

/// The size of a terminal.
#[derive(Debug, Clone, Copy)]
struct Screen {
    columns: usize,
    lines: usize,
}

impl Screen {
    /// None: it is not known.
    fn of_stdout() -> Option<Self> {
        let size = tcgetwinsize(io::stdout()).ok().filter(|size| size.ws_row > 0 && size.ws_col > 0)?;
        Some(Self { columns: size.ws_col.into(), lines: size.ws_row.into() })
    }

    /// Prints what fits of the text: a line that is too long would be continued in the next one, and one line too many
    /// would move the first one out of sight.
    fn print(self, out: &mut impl Write, text: &str) -> io::Result<()> {
        // After the last line, the cursor is in one more.
        let most = self.lines.saturating_sub(1).max(1);
        let first = text.lines().count().saturating_sub(most);
        text.lines().skip(first).try_for_each(|line| writeln!(out, "{}", self.cut(line)))
    }

    fn fits(self, text: &[u8]) -> bool {
        String::from_utf8_lossy(text).lines().all(|line| self.cut(line).len() == line.len())
    }

    fn cut(self, line: &str) -> &str {
        // Other characters than those of ASCII may have the width of two.
        let width = |c: char| if c.is_ascii() { 1 } else { 2 };
        let ends = line.char_indices().scan(0, |columns, (at, c)| {
            *columns += width(c);
            Some((*columns, at + c.len_utf8()))
        });
        let end = ends.take_while(|(columns, _)| *columns <= self.columns).last();
        line.get(..end.map_or(0, |(_, end)| end)).unwrap_or_default()
    }

    /// How many of the rows there is room for, beside the header. If they are not all, a line says how many are left
    /// out.
    fn rows(self, rows: usize, left_out: usize) -> usize {
        let room = self.lines.saturating_sub(2);
        if rows <= room && left_out == 0 { rows } else { rows.min(room.saturating_sub(1)) }
    }
}

/// Prints the rows: as a table those for which the screen has room. `left_out` more pods are not among the rows.
fn print(
    out: &mut impl Write,
    rows: &[Row<'_>],
    left_out: usize,
    screen: Option<Screen>,
    is_json: bool,
) -> io::Result<()> {
    if is_json {
        return json(out, &rows);
    }
    let most = screen.map_or(rows.len(), |screen| screen.rows(rows.len(), left_out));
    let left_out = left_out.saturating_add(rows.len() - most);
    let rows = rows.get(..most).unwrap_or_default();
    let mut text = Vec::new();
    table(&mut text, rows, usize::MAX)?;
    if screen.is_some_and(|screen| !screen.fits(&text)) {
        text.clear();
        table(&mut text, rows, SHORT_ID)?;
    }
    match left_out {
        0 => {}
        1 => writeln!(text, "and 1 more pod")?,
        more => writeln!(text, "and {more} more pods")?,
    }
    match screen {
        Some(screen) => screen.print(out, &String::from_utf8_lossy(&text)),
        None => out.write_all(&text),
    }
}

/// A table with so many characters of each id.
fn table(out: &mut impl Write, rows: &[Row<'_>], of_id: usize) -> io::Result<()> {
    let header = [
        "NAMESPACE",
        "ID",
        "UP",
        "CPU",
        "MEMORY",
        "OOM KILLS",
        "EXITS/s",
        "FILES/s",
        "RECEIVED/s",
        "SENT/s",
        "VM",
        "AGE",
    ];
    listing(out, false, rows, header, |Row { sample, rates }| {
        let pod = &sample.pod;
        let rate = |rate: Option<f64>| or_none(rate.map(|rate| format!("{rate:.0}")));
        let bytes = |rate: Option<f64>| or_none(rate.map(|rate| mib(rate as u64)));
        [
            pod.namespace.clone(),
            pod.id.chars().take(of_id).collect(),
            or_none(sample.is_up.map(|is_up| if is_up { "yes" } else { "no" })),
            rates.map_or(NONE.into(), |rates| format!("{:.1} %", rates.cpu * 100.0)),
            or_none(pod.memory_bytes.map(mib)),
            or_none(oom_kills(sample)),
            rate(rates.and_then(|rates| rates.kvm_exits)),
            rate(rates.and_then(|rates| rates.file_requests)),
            bytes(rates.and_then(|rates| rates.received_bytes)),
            bytes(rates.and_then(|rates| rates.sent_bytes)),
            or_none(sample.start.as_ref().map(|start| start.vm.name())),
            or_none(pod.age_seconds.map(age)),
        ]
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use bulkhead_host_shim::operator::CpuUsage;

    use super::*;

    #[test]
    fn what_was_used_between_two_looks_is_shown_most_first() {
        let dir = tempfile::tempdir().unwrap();
        for id in ["busy", "idle", "new"] {
            fs::create_dir_all(dir.path().join("c/ns").join(id)).unwrap();
        }
        let look = || Sampler::default().sample(dir.path()).unwrap();
        let (mut before, mut now) = (look(), look());
        for (node, factor) in [(&mut before, 1), (&mut now, 3)] {
            for (sample, vcpu) in node.pods.iter_mut().zip([2.0, 0.0, 0.0]) {
                sample.pod.vmm_pid = Some(7);
                sample.usage.cpu = Some(CpuUsage { vcpu: vcpu * f64::from(factor), ..CpuUsage::default() });
                sample.usage.kvm_exits = Some(100 * factor as u64);
            }
        }
        before.pods[2].pod.vmm_pid = Some(6);
        now.pods[0].container_oom_kills = Some(3);
        now.pods[1].container_oom_kills = Some(0);
        now.pods[1].usage.cgroup.oom_kills = Some(1);
        now.pods.swap(0, 1);
        let rows = rows(&before, &now, 2.0);
        let seen: Vec<_> = rows.iter().map(|row| (row.sample.pod.id.as_str(), row.rates)).collect();
        let rates = |cpu| Rates {
            cpu,
            kvm_exits: Some(100.0),
            received_bytes: None,
            sent_bytes: None,
            file_requests: None,
        };
        assert_eq!(seen, [("busy", Some(rates(2.0))), ("idle", Some(rates(0.0))), ("new", None)]);
        let mut text = Vec::new();
        print(&mut text, &rows, 0, None, false).unwrap();
        let text = String::from_utf8(text).unwrap();
        let line: Vec<_> = text.lines().nth(1).unwrap().split_whitespace().collect();
        assert_eq!(line[..8], ["ns", "busy", "-", "200.0", "%", "-", "3", "100"]);
        let column = |row: &Row<'_>| oom_kills(row.sample);
        assert_eq!(rows.iter().map(column).collect::<Vec<_>>(), [Some(3), Some(1), None]);
        let mut text = Vec::new();
        print(&mut text, &rows, 4, None, false).unwrap();
        let text = String::from_utf8(text).unwrap();
        assert!(text.lines().count() == 5 && text.ends_with("\nand 4 more pods\n"), "{text}");
        let on = |columns, lines, left_out| {
            let mut text = Vec::new();
            print(&mut text, &rows, left_out, Some(Screen { columns, lines }), false).unwrap();
            let text = String::from_utf8(text).unwrap();
            // The cursor is in the line after the last one.
            assert!(lines < 2 || text.lines().count() < lines, "{text}");
            assert!(text.lines().all(|line| line.chars().count() <= columns), "{text}");
            text
        };
        assert_eq!(on(9, 5, 0), "NAMESPACE\nns\nns\nns\n".replace("ns\n", "ns       \n"));
        assert_eq!(on(200, 5, 1).lines().last(), Some("and 2 more pods"));
        assert_eq!(on(200, 4, 0).lines().count(), 3);
        assert_eq!(on(200, 4, 0).lines().last(), Some("and 2 more pods"));
        assert_eq!(on(10, 3, 0), "NAMESPACE \nand 3 more\n");
        assert_eq!([on(200, 2, 0), on(200, 1, 0)], ["and 3 more pods\n", "and 3 more pods\n"]);
        let mut text = Vec::new();
        print(&mut text, &rows, 4, None, true).unwrap();
        let rows: serde_json::Value = serde_json::from_slice(&text).unwrap();
        assert_eq!((&rows[0]["id"], &rows[0]["rates"]["cpu"]), (&"busy".into(), &2.0.into()));
    }

    #[test]
    fn what_is_down_and_the_numbers_are_in_sight() {
        let dir = tempfile::tempdir().unwrap();
        let id = |first: &str| format!("{first}{}", "0".repeat(63));
        for first in ["a", "b", "c"] {
            fs::create_dir_all(dir.path().join("c/k8s.io").join(id(first))).unwrap();
        }
        let look = || Sampler::default().sample(dir.path()).unwrap();
        let (mut before, mut now) = (look(), look());
        for (node, factor) in [(&mut before, 1.0), (&mut now, 3.0)] {
            for (sample, is_up) in node.pods.iter_mut().zip([Some(true), None, Some(false)]) {
                let vcpu = if is_up == Some(true) { factor } else { 0.0 };
                sample.pod.vmm_pid = Some(7);
                sample.usage.cpu = Some(CpuUsage { vcpu, ..CpuUsage::default() });
                sample.is_up = is_up;
            }
        }
        let rows = rows(&before, &now, 2.0);
        let lines = |columns| -> Vec<String> {
            let mut text = Vec::new();
            print(&mut text, &rows, 0, Some(Screen { columns, lines: 24 }), false).unwrap();
            String::from_utf8(text).unwrap().lines().skip(1).map(str::to_owned).collect()
        };
        let begins = |lines: &[String], length| {
            for (line, (first, up)) in lines.iter().zip([("c", "no "), ("b", "-  "), ("a", "yes")]) {
                let begin = format!("k8s.io     {}  {up}  ", &id(first)[..length]);
                assert!(line.starts_with(&begin), "{line}");
            }
        };
        begins(&lines(200), 64);
        begins(&lines(80), 13);
        assert!(lines(80)[2].contains("100.0 %"), "{:?}", lines(80));
    }

    #[test]
    fn a_wide_character_does_not_make_a_line_too_long() {
        let cut = |columns, line| Screen { columns, lines: 9 }.cut(line);
        assert_eq!([cut(4, "abcdef"), cut(6, "abcdef"), cut(9, "abc")], ["abcd", "abcdef", "abc"]);
        assert_eq!([cut(4, "a\u{65e5}\u{672c}"), cut(1, "\u{65e5}"), cut(3, "")], ["a\u{65e5}", "", ""]);
    }

    #[test]
    fn a_host_without_pods_has_a_header() {
        let dir = tempfile::tempdir().unwrap();
        let mut text = Vec::new();
        let options = TopOptions { every: Duration::ZERO, once: true, json: false };
        top(&mut text, &dir.path().join("none"), options).unwrap();
        assert!(String::from_utf8(text).unwrap().starts_with("NAMESPACE  ID  UP  CPU"));
    }
}
