//! The time of day in a container is the host's, also after the host's clock was set. Each case that sets it puts it
//! right again.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use nix::sys::time::TimeSpec;
use nix::time::{ClockId, clock_settime};
use tempfile::TempDir;

use super::Case;
use super::nested::PROGRAMS;
use super::templates::template_of;
use crate::command::{Cmd, wait_until};
use crate::ctr::{Host, Task};
use crate::fixtures::scratch;
use crate::stuck::Frozen;

pub(super) const CASES: &[Case] = &[
    Case::both("a_step_of_the_hosts_clock_arrives_within_a_second", step_arrives),
    Case::both("a_task_that_was_paused_while_the_clock_was_set_has_the_hosts_time", paused),
    Case::both("a_container_that_starts_after_the_clock_was_set_has_the_hosts_time", started_later),
    Case::bulkhead("a_clone_of_an_older_template_has_the_hosts_time", clone),
    Case::bulkhead("a_guest_that_stood_still_while_the_clock_was_set_has_the_hosts_time", resumed),
    Case::both("a_container_is_told_whether_the_hosts_clock_is_synchronized", quality),
    // On runc a container that may set the clock sets the host's.
    Case::bulkhead("a_clock_that_a_container_sets_is_the_hosts_again", set_by_a_container),
];

const HOUR: i64 = 3600;
/// How soon a container has the time that was set.
const ARRIVES: Duration = Duration::from_secs(1);
/// How soon a container has written what it has seen.
const NOTED: Duration = Duration::from_secs(10);
/// How long a guest stands still. The shim, if it runs, notices meanwhile that the host's clock was set, and asks a
/// guest that does not answer. Nothing outside of it tells when it has.
const STANDS_STILL: Duration = Duration::from_secs(3);
/// How far two readings of one clock in seconds may be apart, with a moment between them.
const SAME: u64 = 2;
/// How soon a container learns whether the host's clock is synchronized. The shim looks every 4 seconds.
const TOLD: Duration = Duration::from_secs(10);
/// STA_UNSYNC in the status of adjtimex(2).
const UNSYNC: u32 = 0x40;
/// Microseconds by which a clock that nobody keeps right may be wrong, as Linux says it.
const UNKNOWN: u32 = 16_000_000;

/// The host's clock, which was set. It is put right when this is dropped.
struct Moved {
    before: SystemTime,
    since: Instant,
}

impl Moved {
    /// Sets the clock forward, or back.
    fn by(seconds: i64) -> Result<Self> {
        let moved = Self { before: SystemTime::now(), since: Instant::now() };
        moved.set(seconds)?;
        Ok(moved)
    }

    /// Sets the clock to the right time and these seconds.
    fn set(&self, seconds: i64) -> Result<()> {
        let right = (self.before + self.since.elapsed()).duration_since(UNIX_EPOCH)?;
        let time = TimeSpec::from_duration(right);
        let time = TimeSpec::new(time.tv_sec() + seconds, time.tv_nsec());
        clock_settime(ClockId::CLOCK_REALTIME, time).context("cannot set the clock")
    }
}

impl Drop for Moved {
    fn drop(&mut self) {
        if let Err(error) = self.set(0) {
            eprintln!("the host's clock stays wrong: {error:#}");
        }
    }
}

fn hosts() -> Result<u64> {
    Ok(SystemTime::now().duration_since(UNIX_EPOCH).context("the clock is before 1970")?.as_secs())
}

/// A container that writes the time to a file of the host, again and again.
struct Clock<'h> {
    host: &'h Host,
    task: Task<'h>,
    _directory: TempDir,
    file: PathBuf,
}

impl<'h> Clock<'h> {
    fn start(host: &'h Host) -> Result<Self> {
        let directory = scratch()?;
        let script = "while :; do date +%s > /data/next; mv /data/next /data/now; sleep 0.1; done";
        let container = host.container().flags(["--cap-add", "CAP_SYS_TIME"]);
        let task = container.bind(directory.path(), "/data", "rbind:rw").detach(&["sh", "-c", script])?;
        let clock = Self { host, task, file: directory.path().join("now"), _directory: directory };
        clock.is_right("when it starts", Duration::from_secs(10))?;
        Ok(clock)
    }

    /// Expects the host's time within `limit`, from now on.
    fn is_right(&self, when: &str, limit: Duration) -> Result<()> {
        let what = format!("a container with the host's time {when}");
        wait_until(&what, self.host.patience(limit), || {
            // Removed first: what the container wrote before is nothing to go by.
            let _ = fs::remove_file(&self.file);
            let mut text = String::new();
            wait_until("the container to write its time", self.host.patience(limit), || {
                text = fs::read_to_string(&self.file).unwrap_or_default();
                Ok(!text.is_empty())
            })?;
            let seen: u64 = text.trim().parse().context("the container's time")?;
            Ok(hosts()?.abs_diff(seen) <= SAME)
        })
    }
}

/// A container that looks at its clock every millisecond, and writes to a file of the host what it says when it was
/// set.
struct Noted<'h> {
    host: &'h Host,
    _task: Task<'h>,
    _directory: TempDir,
    file: PathBuf,
}

impl<'h> Noted<'h> {
    fn start(host: &'h Host) -> Result<Self> {
        let directory = scratch()?;
        let container = host.container().bind(directory.path(), "/data", "rbind:rw");
        let container = PROGRAMS.iter().fold(container, |container, (source, place)| {
            container.bind(Path::new(source), place, "rbind:ro")
        });
        let script = include_str!("clock/steps.py");
        let task = container.detach(&["/usr/bin/python3", "-c", script, "/data/steps"])?;
        let noted = Self { host, _task: task, file: directory.path().join("steps"), _directory: directory };
        noted.line(0)?;
        Ok(noted)
    }

    /// Waits for this line: nanoseconds since 1970.
    fn line(&self, number: usize) -> Result<u128> {
        let mut line = None;
        wait_until("a container that notes the time", self.host.patience(NOTED), || {
            let text = fs::read_to_string(&self.file).unwrap_or_default();
            // A line that is being written has no end yet.
            line = text.split_inclusive('\n').nth(number).filter(|it| it.ends_with('\n')).map(str::to_owned);
            Ok(line.is_some())
        })?;
        line.context("no line")?.trim().parse().context("the container's time")
    }
}

fn step_arrives(host: &Host) -> Result<()> {
    let noted = Noted::start(host)?;
    let moved = Moved::by(0)?;
    let mut delays = Vec::new();
    for (number, seconds) in [HOUR, -HOUR, 24 * HOUR, 0, -HOUR, 0].into_iter().enumerate() {
        moved.set(seconds)?;
        let set = SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos();
        // In milliseconds. On a busy host some pass between the step and the look at the clock above.
        delays.push((noted.line(number + 1)? as f64 - set as f64) / 1e6);
    }
    println!("milliseconds until the time that was set has arrived: {delays:.1?}");
    let limit = host.patience(ARRIVES).as_millis() as f64;
    let in_time = delays.iter().all(|delay| (-250.0..limit).contains(delay));
    ensure!(in_time, "expected  each step within {limit} ms\ncame      {delays:.1?}");
    Ok(())
}

fn paused(host: &Host) -> Result<()> {
    let clock = Clock::start(host)?;
    host.ctr(["tasks", "pause", clock.task.id()]).run()?.succeeds()?;
    let _moved = Moved::by(HOUR)?;
    host.ctr(["tasks", "resume", clock.task.id()]).run()?.succeeds()?;
    clock.is_right("when it is resumed", ARRIVES)
}

/// What a new container says first.
fn first_word(host: &Host) -> Result<()> {
    let before = hosts()?;
    let said = host.run(&["date", "+%s"])?;
    let after = hosts()?;
    let during = said.succeeds()?.text().trim().parse().is_ok_and(|now| (before..=after).contains(&now));
    said.check(&format!("a time from {before} to {after}"), during)?;
    Ok(())
}

fn started_later(host: &Host) -> Result<()> {
    for seconds in [HOUR, -HOUR] {
        let _moved = Moved::by(seconds)?;
        first_word(host)?;
    }
    Ok(())
}

fn clone(host: &Host) -> Result<()> {
    let first = host.container().detach(&["sleep", "1000"])?;
    let template = template_of(&first)?;
    let _moved = Moved::by(HOUR)?;
    first_word(host)?;
    let second = host.container().detach(&["sleep", "1000"])?;
    let other = template_of(&second)?;
    ensure!(other == template, "expected  a clone of {template:?}\ncame      one of {other:?}");
    Ok(())
}

/// Nothing of the pod ran, as on a host that was suspended, or the VM alone did not.
fn resumed(host: &Host) -> Result<()> {
    let clock = Clock::start(host)?;
    for programs in [&["bulkhead-vmm", host.runtime().shim()][..], &["bulkhead-vmm"]] {
        let stopped = Frozen::all_of(programs, &clock.task)?;
        let _moved = Moved::by(HOUR)?;
        std::thread::sleep(STANDS_STILL);
        drop(stopped);
        clock.is_right("when it goes on", ARRIVES)?;
    }
    Ok(())
}

fn set_by_a_container(host: &Host) -> Result<()> {
    let clock = Clock::start(host)?;
    let before = hosts()?;
    clock.task.exec(&["date", "-s", "2001-02-03 04:05:06"])?.succeeds()?;
    let now = hosts()?;
    ensure!(now.abs_diff(before) < 600, "expected  the host's clock as before, {before}\ncame      {now}");
    // It is compared once a minute at least.
    clock.is_right("after the next comparison", Duration::from_secs(70))
}

/// What the host's kernel says of its clock. It says what it said before when this is dropped.
struct Quality {
    before: Vec<String>,
}

impl Quality {
    fn save() -> Result<Self> {
        let said = Self::run([])?;
        let before: Vec<_> = said.split_whitespace().map(str::to_owned).collect();
        ensure!(before.len() == 3, "expected  status, maxerror and esterror\ncame      {said:?}");
        Ok(Self { before })
    }

    /// Has the kernel say that its clock is right, as an NTP daemon does, or that nobody keeps it so.
    fn set(&self, is_synchronized: bool) -> Result<()> {
        let status: u32 = self.before[0].parse().context("the status of the host's clock")?;
        let (status, error) =
            if is_synchronized { (status & !UNSYNC, 1000) } else { (status | UNSYNC, UNKNOWN) };
        Self::run([status, error, error].map(|number| number.to_string()).each_ref().map(String::as_str))?;
        Ok(())
    }

    fn run<const N: usize>(numbers: [&str; N]) -> Result<String> {
        let script = include_str!("clock/quality.py");
        let finished = Cmd::new("python3").args(["-c", script]).args(numbers).run()?;
        Ok(finished.succeeds()?.text())
    }
}

impl Drop for Quality {
    fn drop(&mut self) {
        if let [status, maxerror, esterror] = self.before.as_slice()
            && let Err(error) = Self::run([status.as_str(), maxerror, esterror])
        {
            eprintln!("the host's kernel goes on saying another thing of its clock: {error:#}");
        }
    }
}

fn quality(host: &Host) -> Result<()> {
    let quality = Quality::save()?;
    quality.set(false)?;
    let task = host.container().detach(&["sleep", "1000"])?;
    for is_synchronized in [false, true, false] {
        quality.set(is_synchronized)?;
        let mut said = String::new();
        let told = || {
            let finished = task.exec(&["adjtimex"])?;
            let seen = finished.succeeds()?;
            said = format!("{} with an error of {}", seen.value("status")?, seen.value("maxerror")?);
            // "64 (UNSYNC)"
            let status: u32 = seen.value("status")?.split_whitespace().next().unwrap_or_default().parse()?;
            let error: u32 = seen.value("maxerror")?.parse()?;
            // A slow answer of the guest leaves a part of a second in doubt.
            Ok((status & UNSYNC == 0, error < UNKNOWN / 2) == (is_synchronized, is_synchronized))
        };
        let what = format!("a container that is told that its clock is synchronized: {is_synchronized}");
        wait_until(&what, host.patience(TOLD), told).with_context(|| format!("it says {said}"))?;
    }
    // One that starts later is told at once, or soon.
    quality.set(true)?;
    let later = host.container().detach(&["sleep", "1000"])?;
    wait_until("a new container that is told that its clock is synchronized", host.patience(TOLD), || {
        Ok(!later.exec(&["adjtimex"])?.succeeds()?.value("status")?.contains("UNSYNC"))
    })
}
