//! What happens to the pods of this host: what their shims record, and what is seen of their state directories.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, Read},
    os::unix::fs::{FileExt, MetadataExt},
    path::{Path, PathBuf},
    time::{Duration, Instant, SystemTime},
};

use serde::{Deserialize, Serialize};

use crate::{
    host::{
        event_log::{EVENTS, MOST_BYTES},
        journal::Journal,
        process_id::ProcessId,
        state_dir::{JOURNAL, START_RECORD},
    },
    operator::pods,
    types::{
        event::{EventRecord, PodEvent},
        text::one_line,
    },
};

/// The most pods that are followed. Each takes a descriptor. kubelet runs 110 at most unless it is told otherwise.
const MOST_PODS: usize = 500;

/// How often it is looked whether the shims live.
const SHIMS: Duration = Duration::from_secs(1);

/// How long a shim may take from making the state directory to recording the first event.
const BEGINS: Duration = Duration::from_secs(5);

/// The name of a pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PodName {
    /// The address of its containerd, as the name of a directory.
    pub containerd: String,
    /// Its namespace in this containerd.
    pub namespace: String,
    /// Its id.
    pub id: String,
}

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Event {
    /// When it happened, or was seen: microseconds since 1970.
    pub at_unix_us: u64,
    /// To which pod. None: to more than one.
    #[serde(flatten)]
    pub pod: Option<PodName>,
    /// What it was.
    #[serde(flatten)]
    pub what: EventKind,
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum EventKind {
    /// The shim has recorded it.
    Recorded(PodEvent),
    /// It was seen.
    Observed(Observed),
}

/// What nobody records, because nobody is left who could.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Observed {
    /// The state directory of the pod is gone: the pod has ended.
    PodRemoved,
    /// The shim of the pod has died, and has not removed the pod.
    ShimDied,
    /// Events are missing here.
    Lost {
        /// How many. None: it is not known.
        events: Option<u64>,
        /// Why.
        reason: &'static str,
    },
}

/// What the records of all versions have.
#[derive(Deserialize)]
struct Numbered {
    number: u64,
}

/// Follows the pods of a host.
#[derive(Debug)]
pub struct Follower {
    root: PathBuf,
    pods: BTreeMap<PathBuf, Followed>,
    /// Whether there was a look.
    has_looked: bool,
    /// Whether the first look tells of what was recorded before.
    tells_all: bool,
    left_out: bool,
    shims_looked_at: Option<Instant>,
}

/// A pod.
#[derive(Debug)]
struct Followed {
    name: PodName,
    found: Instant,
    /// Its record. None: there is none yet.
    record: Option<File>,
    /// The length and the time of the last change, when it was read last.
    read: Option<(u64, i64, i64)>,
    /// The number of the next event.
    next: u64,
    /// Its shim, once the journal has named it.
    shim: Option<ProcessId>,
    /// Nothing is to be said any more of the shim, or of a record that is missing.
    is_shim_dead: bool,
    is_unrecorded: bool,
}

impl Event {
    /// Events of any pod are missing here.
    pub fn lost(reason: &'static str) -> Self {
        now(None, Observed::Lost { events: None, reason })
    }
}

impl Follower {
    /// Follows the pods below `root`. `tells_all`: the first look also tells of what was recorded before it.
    pub fn new(root: &Path, tells_all: bool) -> Self {
        let root = root.to_owned();
        Self {
            root,
            pods: BTreeMap::new(),
            has_looked: false,
            tells_all,
            left_out: false,
            shims_looked_at: None,
        }
    }

    /// Tells what has happened since the last look, pod by pod.
    pub fn look(&mut self, tell: &mut impl FnMut(Event)) -> io::Result<()> {
        let mut paths = pods::paths(&self.root)?;
        self.leave_out(&mut paths, tell);
        let is_due = self.shims_looked_at.is_none_or(|at| at.elapsed() >= SHIMS);
        if is_due {
            self.shims_looked_at = Some(Instant::now());
        }
        let is_first = !self.has_looked;
        self.has_looked = true;
        for path in &paths {
            let is_other = self.pods.get(path).is_some_and(|pod| pod.is_another_at(path));
            if is_other && let Some(pod) = self.pods.remove(path) {
                pod.removed(tell);
            }
            let pod = self.pods.entry(path.clone()).or_insert_with(|| Followed::new(path));
            pod.open(path);
            if is_first && !self.tells_all {
                pod.skip();
                pod.look_at_shim(path, &mut |_| {});
            }
            pod.read(tell);
            if is_due {
                pod.look_at_shim(path, tell);
                pod.look_for_record(path, tell);
            }
        }
        let gone: Vec<_> =
            self.pods.keys().filter(|path| paths.binary_search(path).is_err()).cloned().collect();
        for path in gone {
            if let Some(pod) = self.pods.remove(&path) {
                pod.removed(tell);
            }
        }
        Ok(())
    }

    /// Keeps as many paths as can be followed: first those that are.
    fn leave_out(&mut self, paths: &mut Vec<PathBuf>, tell: &mut impl FnMut(Event)) {
        let most =
            MOST_PODS.saturating_sub(paths.iter().filter(|path| self.pods.contains_key(*path)).count());
        let mut added = 0;
        let before = paths.len();
        paths.retain(|path| {
            let is_new = !self.pods.contains_key(path);
            added += usize::from(is_new);
            !is_new || added <= most
        });
        let left_out = paths.len() < before;
        if left_out && !self.left_out {
            let reason = "there are more pods than are followed at a time";
            tell(Event::lost(reason));
        }
        self.left_out = left_out;
    }
}

/// How many processes of its containers the guest's kernel of a pod has killed, because memory was short. None: the pod
/// has recorded nothing, or its shim has an older version. `state` is its state directory.
pub(super) fn oom_kills(state: &Path) -> Option<u64> {
    let mut text = Vec::new();
    File::open(state.join(EVENTS)).ok()?.take(MOST_BYTES).read_to_end(&mut text).ok()?;
    // What follows the last end of a line is being written.
    let end = text.iter().rposition(|byte| *byte == b'\n')?;
    let line = text.get(..end)?.rsplit(|byte| *byte == b'\n').next()?;
    serde_json::from_slice::<Counted>(line).ok()?.oom_kills
}

/// The sum that each event of this version has.
#[derive(Deserialize)]
struct Counted {
    oom_kills: Option<u64>,
}

impl Followed {
    fn new(path: &Path) -> Self {
        let pods::Pod { containerd, namespace, id, .. } = pods::named(path);
        Self {
            name: PodName { containerd, namespace, id },
            found: Instant::now(),
            record: None,
            read: None,
            next: 0,
            shim: None,
            is_shim_dead: false,
            is_unrecorded: false,
        }
    }

    /// Whether another pod of the same name is at the path by now.
    fn is_another_at(&self, path: &Path) -> bool {
        let (Some(record), Ok(there)) = (&self.record, fs::symlink_metadata(path.join(EVENTS))) else {
            return false;
        };
        // The number of an inode is not used again while the file is open.
        record.metadata().is_ok_and(|own| (own.dev(), own.ino()) != (there.dev(), there.ino()))
    }

    fn open(&mut self, path: &Path) {
        if self.record.is_none() {
            // It does not exist yet, or it is of a shim that makes none.
            self.record = File::open(path.join(EVENTS)).ok();
        }
    }

    /// Tells what was recorded since the last time.
    fn read(&mut self, tell: &mut impl FnMut(Event)) {
        for line in self.lines() {
            let Ok(Numbered { number }) = serde_json::from_slice(&line) else { continue };
            if number < self.next {
                continue;
            }
            self.lost(number - self.next, "its record was full, or could not be written", tell);
            self.next = number.saturating_add(1);
            match serde_json::from_slice::<EventRecord>(&line) {
                Ok(EventRecord { at_unix_us, happening, .. }) => {
                    let (pod, what) = (Some(self.name.clone()), EventKind::Recorded(cleaned(happening)));
                    tell(Event { at_unix_us, pod, what });
                }
                Err(_) => self.lost(1, "its shim has another version than this command", tell),
            }
        }
    }

    fn lost(&self, events: u64, reason: &'static str, tell: &mut impl FnMut(Event)) {
        if events > 0 {
            tell(now(Some(self.name.clone()), Observed::Lost { events: Some(events), reason }));
        }
    }

    /// Passes over what is recorded.
    fn skip(&mut self) {
        self.read(&mut |_| {});
    }

    /// The whole lines of the record, if it has changed. The record is small, and may have begun anew since the last
    /// time.
    fn lines(&mut self) -> Vec<Vec<u8>> {
        let Some(record) = &self.record else { return Vec::new() };
        let Ok(metadata) = record.metadata() else { return Vec::new() };
        let is = (metadata.len(), metadata.mtime(), metadata.mtime_nsec());
        if self.read.replace(is) == Some(is) {
            return Vec::new();
        }
        let length = metadata.len().min(MOST_BYTES);
        let mut text = vec![0; usize::try_from(length).unwrap_or(0)];
        let Ok(read) = record.read_at(&mut text, 0) else { return Vec::new() };
        text.truncate(read);
        let end = text.iter().rposition(|byte| *byte == b'\n').unwrap_or(0);
        let lines = text.get(..end).unwrap_or_default().split(|byte| *byte == b'\n');
        lines.map(<[u8]>::to_vec).collect()
    }

    /// Tells once that the shim has died.
    fn look_at_shim(&mut self, path: &Path, tell: &mut impl FnMut(Event)) {
        if self.shim.is_none() {
            self.shim = Journal::look(&path.join(JOURNAL)).ok().and_then(|journal| journal.shim());
        }
        let is_dead = self.shim.is_some_and(|shim| !shim.may_live());
        // A shim that has removed its pod ends too.
        if is_dead && !self.is_shim_dead && path.join(JOURNAL).exists() {
            self.is_shim_dead = true;
            tell(now(Some(self.name.clone()), Observed::ShimDied));
        }
    }

    /// Tells once that there is no record.
    fn look_for_record(&mut self, path: &Path, tell: &mut impl FnMut(Event)) {
        // The record of the start is made after that of the events.
        let has_begun = || self.found.elapsed() > BEGINS || path.join(START_RECORD).exists();
        if self.record.is_none() && !self.is_unrecorded && has_begun() {
            self.is_unrecorded = true;
            let reason = "its shim records no events: it has an older version, or could not make the record";
            tell(now(Some(self.name.clone()), Observed::Lost { events: None, reason }));
        }
    }

    /// The rest, and the end.
    fn removed(mut self, tell: &mut impl FnMut(Event)) {
        self.read(tell);
        tell(now(Some(self.name), Observed::PodRemoved));
    }
}

fn now(pod: Option<PodName>, what: Observed) -> Event {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    Event { at_unix_us: since.as_micros() as u64, pod, what: EventKind::Observed(what) }
}

/// The record may be damaged, and its texts are shown on a terminal.
fn cleaned(mut happening: PodEvent) -> PodEvent {
    match &mut happening {
        PodEvent::PodBegan | PodEvent::VmUp { .. } => {}
        PodEvent::VmEnded { reason: text }
        | PodEvent::VmKilled { reason: text }
        | PodEvent::ContainerCreated { container: text }
        | PodEvent::ContainerStarted { container: text }
        | PodEvent::ContainerFailed { container: text, .. }
        | PodEvent::ContainerPaused { container: text }
        | PodEvent::ContainerResumed { container: text }
        | PodEvent::OomKill { container: text, .. }
        | PodEvent::ContainerExited { container: text, .. } => *text = one_line(text),
    }
    happening
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::{event_log::EventLog, state_dir::StateDir};

    fn names(follower: &mut Follower) -> Vec<String> {
        let mut names = Vec::new();
        let tell = &mut |event: Event| {
            let value = serde_json::to_value(&event).unwrap();
            let pod = value["id"].as_str().unwrap_or("-");
            names.push(format!("{pod} {}", value["event"].as_str().unwrap()));
        };
        follower.look(tell).unwrap();
        names
    }

    fn oom() -> PodEvent {
        PodEvent::OomKill { container: "demo".into(), kills: 1 }
    }

    #[test]
    fn a_pod_is_followed_from_its_beginning_to_its_end() {
        let dir = tempfile::tempdir().unwrap();
        let mut follower = Follower::new(dir.path(), false);
        assert_eq!(names(&mut follower), [""; 0]);
        let (state, journal) = StateDir::create(&dir.path().join("c/ns/demo"), &[]).unwrap();
        assert_eq!(names(&mut follower), [""; 0]);
        let log = EventLog::default();
        log.begin(state.path());
        log.vm_ended("x");
        assert_eq!(names(&mut follower), ["demo pod_began", "demo vm_ended"]);
        assert_eq!(names(&mut follower), [""; 0]);
        log.record(oom());
        state.remove(journal).unwrap();
        log.record(oom());
        assert_eq!(names(&mut follower), ["demo oom_kill", "demo oom_kill", "demo pod_removed"]);
        assert_eq!(names(&mut follower), [""; 0]);
    }

    #[test]
    fn what_was_before_is_told_only_if_it_is_wanted() {
        let dir = tempfile::tempdir().unwrap();
        let (state, _journal) = StateDir::create(&dir.path().join("c/ns/demo"), &[]).unwrap();
        let log = EventLog::default();
        log.begin(state.path());
        assert_eq!(names(&mut Follower::new(dir.path(), true)), ["demo pod_began"]);
        let mut follower = Follower::new(dir.path(), false);
        assert_eq!(names(&mut follower), [""; 0]);
        log.record(oom());
        assert_eq!(names(&mut follower), ["demo oom_kill"]);
    }

    #[test]
    fn another_pod_of_the_same_name_is_another_pod() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c/ns/demo");
        let log = EventLog::default();
        let (state, journal) = StateDir::create(&path, &[]).unwrap();
        log.begin(&path);
        let mut follower = Follower::new(dir.path(), false);
        assert_eq!(names(&mut follower), [""; 0]);
        state.remove(journal).unwrap();
        let _again = StateDir::create(&path, &[]).unwrap();
        log.begin(&path);
        assert_eq!(names(&mut follower), ["demo pod_removed", "demo pod_began"]);
    }

    #[test]
    fn who_reads_too_late_is_told_how_many_events_are_lost() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c/ns/demo");
        let _state = StateDir::create(&path, &[]).unwrap();
        let log = EventLog::default();
        log.begin(&path);
        let mut follower = Follower::new(dir.path(), true);
        assert_eq!(names(&mut follower), ["demo pod_began"]);
        (0..1500).for_each(|_| log.record(oom()));
        let (mut lost, mut told) = (0, 0);
        let tell = &mut |event: Event| match event.what {
            EventKind::Observed(Observed::Lost { events, .. }) => lost += events.unwrap(),
            _ => told += 1,
        };
        follower.look(tell).unwrap();
        assert!(lost > 0 && told > 0 && lost + told == 1500, "{lost} {told}");
    }

    #[test]
    fn a_record_that_is_damaged_or_of_another_version_is_said_and_shown_safely() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c/ns/demo");
        fs::create_dir_all(&path).unwrap();
        let text = "\u{0}garbage\n{\"number\":0,\"at_unix_us\":1,\"event\":\"of_tomorrow\"}\n\
            {\"number\":1,\"at_unix_us\":1,\"event\":\"vm_ended\",\"reason\":\"\\u001b[2J\"}\n{\"number\":2,";
        fs::write(path.join(EVENTS), text).unwrap();
        let mut events = Vec::new();
        Follower::new(dir.path(), true).look(&mut |event| events.push(event.what)).unwrap();
        let reason = "its shim has another version than this command";
        let ended = PodEvent::VmEnded { reason: " [2J".into() };
        assert_eq!(
            events,
            [EventKind::Observed(Observed::Lost { events: Some(1), reason }), EventKind::Recorded(ended)]
        );
    }

    #[test]
    fn kills_are_counted_also_of_events_that_have_made_room() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(oom_kills(dir.path()), None);
        let log = EventLog::default();
        log.begin(dir.path());
        assert_eq!(oom_kills(dir.path()), Some(0));
        for _ in 0..1000 {
            log.record(PodEvent::OomKill { container: "demo".into(), kills: 2 });
        }
        assert_eq!(oom_kills(dir.path()), Some(2000));
        log.record(PodEvent::OomKill { container: "demo".into(), kills: u64::MAX });
        assert_eq!(oom_kills(dir.path()), Some(u64::MAX));
        // That of an older shim, and one whose last line is being written.
        for (text, kills) in [
            ("{\"number\":0,\"at_unix_us\":1,\"event\":\"pod_began\"}\n", None),
            ("{\"number\":0,\"oom_kills\":7}\n{\"number\":1,\"oom", Some(7)),
            ("garbage", None),
        ] {
            fs::write(dir.path().join(EVENTS), text).unwrap();
            assert_eq!(oom_kills(dir.path()), kills, "{text}");
        }
    }

    #[test]
    fn a_pod_whose_shim_records_nothing_is_said_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c/ns/demo");
        fs::create_dir_all(&path).unwrap();
        assert_eq!(names(&mut Follower::new(dir.path(), false)), [""; 0]);
        fs::write(path.join(START_RECORD), "{}\n").unwrap();
        for tells_all in [false, true] {
            let mut follower = Follower::new(dir.path(), tells_all);
            assert_eq!(names(&mut follower), ["demo lost"]);
            follower.shims_looked_at = None;
            assert_eq!(names(&mut follower), [""; 0]);
        }
    }

    #[test]
    fn a_shim_that_died_is_told_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c/ns/demo");
        fs::create_dir_all(&path).unwrap();
        let mut follower = Follower::new(dir.path(), false);
        assert_eq!(names(&mut follower), [""; 0]);
        let shim = r#"{"effect":"shim","pid":4294967295,"start_time":18446744073709551615}"#;
        fs::write(path.join(JOURNAL), format!("{shim}\n")).unwrap();
        follower.shims_looked_at = None;
        assert_eq!(names(&mut follower), ["demo shim_died"]);
        follower.shims_looked_at = None;
        assert_eq!(names(&mut follower), [""; 0]);
        fs::remove_dir_all(&path).unwrap();
        assert_eq!(names(&mut follower), ["demo pod_removed"]);
    }

    #[test]
    fn more_pods_than_can_be_followed_are_left_out_and_said() {
        let dir = tempfile::tempdir().unwrap();
        for pod in 0..MOST_PODS + 3 {
            fs::create_dir_all(dir.path().join(format!("c/ns/{pod}"))).unwrap();
        }
        let mut follower = Follower::new(dir.path(), true);
        assert_eq!(names(&mut follower), ["- lost"]);
        assert_eq!(names(&mut follower), [""; 0]);
        assert_eq!(follower.pods.len(), MOST_PODS);
    }
}
