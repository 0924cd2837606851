//! What happened to a pod: a file in its state directory, for `bulkhead events`. Nothing depends on it.

use std::{
    fs::{File, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::Path,
    sync::{Arc, Mutex},
    time::SystemTime,
};

use crate::types::{
    error::chain,
    event::{EventRecord, PodEvent},
    lock::lock,
    text::one_line,
};

/// The file in the state directory of the pod.
pub(crate) const EVENTS: &str = "events.json";

/// The largest size of the file. A container that is restarted again and again adds half a KiB each time. When the file
/// is full it begins anew. Whoever has not read it by then sees by the numbers what is missing.
pub(crate) const MOST_BYTES: u64 = 64 << 10;

/// The most characters of a text that somebody else has chosen.
const MOST_TEXT: usize = 1024;

/// Records events. Clones write to the same file.
#[derive(Debug, Clone, Default)]
pub(crate) struct EventLog(Arc<Mutex<Log>>);

#[derive(Debug, Default)]
struct Log {
    /// None: the pod has no state directory yet.
    file: Option<File>,
    /// The number of the next event.
    next: u64,
    /// How many processes of the containers the guest's kernel has killed. The events that say so may make room for
    /// newer ones, so each has the sum.
    oom_kills: u64,
}

impl EventLog {
    /// Makes the file in the state directory `state`, whose journal names it already. What happens before is not
    /// recorded. The file stays open, so that no later event makes one in a directory that is being removed.
    pub(crate) fn begin(&self, state: &Path) {
        let path = state.join(EVENTS);
        let file = OpenOptions::new().append(true).create(true).mode(0o600).open(&path);
        let file = file.inspect_err(|error| {
            tracing::warn!(path = %path.display(), error = chain(error), "events are not recorded");
        });
        *self.lock() = Log { file: file.ok(), ..Log::default() };
        self.record(PodEvent::PodBegan);
    }

    /// Records an event that happens now. One that cannot be written leaves a gap in the numbers.
    pub(crate) fn record(&self, happening: PodEvent) {
        let mut log = self.lock();
        let log = &mut *log;
        if let PodEvent::OomKill { kills, .. } = &happening {
            log.oom_kills = log.oom_kills.saturating_add(*kills);
        }
        let Some(file) = &log.file else { return };
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let (at_unix_us, oom_kills) = (since.as_micros() as u64, Some(log.oom_kills));
        let record = EventRecord { number: log.next, at_unix_us, oom_kills, happening };
        log.next += 1;
        if let Err(error) = write(file, &record) {
            tracing::debug!(error = chain(&error), "an event is not recorded");
        }
    }

    /// Records that the VM has ended.
    pub(crate) fn vm_ended(&self, reason: &str) {
        self.record(PodEvent::VmEnded { reason: short(reason) });
    }

    /// Records that the shim kills the VM.
    pub(crate) fn vm_killed(&self, reason: &str) {
        self.record(PodEvent::VmKilled { reason: short(reason) });
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Log> {
        lock(&self.0)
    }
}

fn short(text: &str) -> String {
    one_line(text.get(..text.floor_char_boundary(MOST_TEXT)).unwrap_or_default())
}

fn write(mut file: &File, record: &EventRecord) -> io::Result<()> {
    let mut line = serde_json::to_vec(record)?;
    line.push(b'\n');
    let mut length = file.metadata()?.len();
    if length + line.len() as u64 > MOST_BYTES {
        file.set_len(0)?;
        length = 0;
    }
    // A part of a line would spoil the next one.
    file.write_all(&line).inspect_err(|_| drop(file.set_len(length)))
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt};

    use super::*;

    fn records(directory: &Path) -> Vec<EventRecord> {
        let text = fs::read_to_string(directory.join(EVENTS)).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    #[test]
    fn events_are_numbered_from_the_beginning_of_the_pod() {
        let dir = tempfile::tempdir().unwrap();
        let log = EventLog::default();
        log.vm_ended("before there is a file");
        log.begin(dir.path());
        log.clone().vm_ended(&format!("\u{1b}[2Jpanic{}", "x".repeat(5000)));
        let records = records(dir.path());
        assert_eq!(records[0].happening, PodEvent::PodBegan);
        let PodEvent::VmEnded { reason } = &records[1].happening else { panic!("{records:?}") };
        assert!(reason.starts_with(" [2Jpanicx") && reason.len() == MOST_TEXT, "{reason}");
        assert_eq!(records.iter().map(|record| record.number).collect::<Vec<_>>(), [0, 1]);
        let mode = fs::metadata(dir.path().join(EVENTS)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn a_file_that_is_full_begins_anew() {
        let dir = tempfile::tempdir().unwrap();
        let log = EventLog::default();
        log.begin(dir.path());
        for _ in 0..2000 {
            log.record(PodEvent::OomKill { container: "demo".into(), kills: 1 });
            assert!(fs::metadata(dir.path().join(EVENTS)).unwrap().len() <= MOST_BYTES);
        }
        let records = records(dir.path());
        assert!(records[0].number > 1000 && records.last().unwrap().number == 2000, "{:?}", records[0]);
        assert_eq!(records.last().unwrap().oom_kills, Some(2000), "also those that made room");
    }

    #[test]
    fn an_event_after_the_end_makes_no_file() {
        let dir = tempfile::tempdir().unwrap();
        let log = EventLog::default();
        log.begin(dir.path());
        fs::remove_file(dir.path().join(EVENTS)).unwrap();
        log.record(PodEvent::OomKill { container: "demo".into(), kills: 1 });
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        log.begin(&dir.path().join("none"));
        log.record(PodEvent::PodBegan);
    }
}
