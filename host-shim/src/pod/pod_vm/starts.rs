//! How the containers of a pod started, for `bulkhead trace` and the metrics. Nothing depends on it.

use std::{
    collections::VecDeque,
    fs::File,
    io,
    path::Path,
    sync::{Mutex, MutexGuard},
};

use super::PodVm;
use crate::{
    host::{start_log::StartLog, state_dir},
    types::{
        error::chain,
        lock::lock,
        timeline::{ContainerStart, MOST_CONTAINERS, Ongoing, Step, Timeline},
    },
};

/// The starts of a pod's containers.
#[derive(Debug, Default)]
pub(super) struct Starts {
    /// That of the pod's first container.
    pub(super) first: Timeline,
    /// The file with it, from the end of Create on.
    first_file: Mutex<Option<File>>,
    others: Mutex<Others>,
}

/// The starts of the other containers.
#[derive(Debug, Default)]
struct Others {
    /// None: the pod's first container is not created yet, or the file cannot be made.
    log: Option<StartLog>,
    /// At most [`MOST_CONTAINERS`], in the order of their beginnings.
    begun: VecDeque<Begun>,
}

#[derive(Debug)]
struct Begun {
    id: String,
    timeline: Timeline,
    /// Whether the container was created, so that there is a record.
    is_created: bool,
}

impl Others {
    /// The containers that are called so, of which there is one at most.
    fn find(&mut self, id: &str) -> Option<&mut Begun> {
        self.begun.iter_mut().find(|begun| begun.id == id)
    }

    fn begin(&mut self, id: &str) {
        self.forget(id);
        if self.begun.len() >= MOST_CONTAINERS {
            self.begun.pop_front();
        }
        let timeline = Timeline::default();
        self.begun.push_back(Begun { id: id.to_owned(), timeline, is_created: false });
    }

    fn forget(&mut self, id: &str) {
        self.begun.retain(|begun| begun.id != id);
    }

    /// Adds what is known of the container now to the file.
    fn note(&mut self, id: &str) -> io::Result<()> {
        let Some(begun) = self.find(id) else { return Ok(()) };
        begun.is_created = true;
        let record = begun.record();
        let all = || self.begun.iter().filter(|begun| begun.is_created).map(Begun::record).collect();
        self.log.as_ref().map_or(Ok(()), |log| log.add(&record, all))
    }
}

impl Begun {
    fn record(&self) -> ContainerStart {
        self.timeline.record_of(&self.id)
    }
}

impl Starts {
    fn others(&self) -> MutexGuard<'_, Others> {
        lock(&self.others)
    }

    fn record_first(&self, file: File) -> io::Result<File> {
        state_dir::add_to_start_record(&file, &self.first.record()).map(|()| file)
    }

    fn first_is_created(&self, state: &Path) {
        let file = state_dir::make_start_record(state);
        *lock(&self.first_file) = file.and_then(|file| self.record_first(file)).inspect_err(warn).ok();
        self.others().log = StartLog::begin(state).inspect_err(warn).ok();
    }
}

impl PodVm {
    /// Notes that the start of the container begins, maybe after one that has failed.
    pub(crate) fn begin_start(&self, id: &str) {
        if self.is_first(id) {
            self.starts.first.restart();
        } else {
            self.starts.others().begin(id);
        }
    }

    /// Begins a step of the start of the container. None: too many have begun since.
    pub(crate) fn time(&self, id: &str, step: Step) -> Option<Ongoing> {
        if self.is_first(id) {
            return Some(self.starts.first.begin(step));
        }
        self.starts.others().find(id).map(|begun| begun.timeline.begin(step))
    }

    /// Records how the container was created.
    pub(crate) fn note_created(&self, id: &str) {
        if self.is_first(id) {
            self.starts.first_is_created(&self.settings.state_path());
        } else {
            _ = self.starts.others().note(id).inspect_err(warn);
        }
    }

    /// Forgets a container that was not created.
    pub(crate) fn note_not_created(&self, id: &str) {
        self.starts.others().forget(id);
    }

    /// Records how the container was started. The pod may have ended already. So this opens no file, which would make
    /// one in a state directory that is being removed.
    pub(crate) fn note_started(&self, id: &str) {
        if !self.is_first(id) {
            _ = self.starts.others().note(id).inspect_err(warn);
        } else if let Some(file) = lock(&self.starts.first_file).take() {
            _ = self.starts.record_first(file).inspect_err(warn);
        }
    }
}

fn warn(error: &io::Error) {
    tracing::warn!(error = chain(error), "cannot record how a container started");
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::{
        host::start_log::{CONTAINER_STARTS, MOST_BYTES},
        operator::container_starts,
    };

    fn ids(state: &Path) -> Vec<String> {
        container_starts(state).unwrap().into_iter().map(|start| start.container).collect()
    }

    #[test]
    fn the_containers_that_came_last_have_a_record_whatever_came_before() {
        let dir = tempfile::tempdir().unwrap();
        let others = &mut Others { log: StartLog::begin(dir.path()).ok(), ..Others::default() };
        let path = dir.path().join(CONTAINER_STARTS);
        for number in 0..300 {
            let id = format!("{number:0>64}");
            others.begin(&id);
            drop(others.find(&id).unwrap().timeline.begin(Step::Create));
            others.note(&id).unwrap();
            drop(others.find(&id).unwrap().timeline.begin(Step::Start));
            others.note(&id).unwrap();
            assert!(
                fs::metadata(&path).unwrap().len() <= MOST_BYTES && others.begun.len() <= MOST_CONTAINERS
            );
        }
        let last = |count: usize| (300 - count..300).map(|number| format!("{number:0>64}"));
        assert_eq!(ids(dir.path()), last(MOST_CONTAINERS).collect::<Vec<_>>());
        let starts = container_starts(dir.path()).unwrap();
        assert!(starts.iter().all(|start| start.phases.len() == 2), "{starts:?}");
    }

    #[test]
    fn a_container_that_was_not_created_has_no_record_and_takes_no_place() {
        let dir = tempfile::tempdir().unwrap();
        let others = &mut Others { log: StartLog::begin(dir.path()).ok(), ..Others::default() };
        for id in ["one", "failed", "two"] {
            others.begin(id);
            match id {
                "failed" => others.forget(id),
                _ => others.note(id).unwrap(),
            }
        }
        assert_eq!((ids(dir.path()), others.begun.len()), (vec!["one".to_owned(), "two".to_owned()], 2));
        // One that is called as an earlier one takes its place.
        others.begin("one");
        drop(others.find("one").unwrap().timeline.begin(Step::Create));
        others.note("one").unwrap();
        let starts = container_starts(dir.path()).unwrap();
        let phases: Vec<_> = starts.iter().map(|it| (it.container.as_str(), it.phases.len())).collect();
        assert_eq!(phases, [("two", 0), ("one", 1)]);
    }

    #[test]
    fn a_record_after_the_end_makes_no_file() {
        let dir = tempfile::tempdir().unwrap();
        let others = &mut Others { log: StartLog::begin(dir.path()).ok(), ..Others::default() };
        fs::remove_file(dir.path().join(CONTAINER_STARTS)).unwrap();
        others.begin("late");
        others.note("late").unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        assert_eq!(container_starts(dir.path()), Ok(Vec::new()));
    }
}
