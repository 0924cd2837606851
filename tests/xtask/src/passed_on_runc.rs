//! The cases that passed on runc and need not run there again: they do not depend on what this project builds.
//!
//! The cache records those that passed on this machine with the same tests, images, containerd and host. A file of the
//! source tree records those of a run that somebody has committed, so that a new machine need not run them: there only
//! the tests' sources must be the same, and the versions that the file names were those of that run.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

use crate::cache::{Cache, Key};
use crate::e2e::{Job, Run, Runtime};
use crate::outcomes::{Outcome, lock_records, read, replace};

/// The committed record, in the source tree.
pub(crate) const COMMITTED: &str = "tests/passed-on-runc.json";

/// The digest of each group's sources, by its name.
pub(crate) type GroupSources = BTreeMap<String, String>;

/// What a job of runc need not run.
#[derive(Debug)]
pub(crate) struct Passed {
    path: PathBuf,
    sources: GroupSources,
    /// What passed on this machine.
    here: Content,
    /// What passed in the committed run.
    committed: CommittedJob,
}

/// What is in a file of the cache.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Content {
    /// Of the host's containerd, runc and kernel, a line each.
    versions: String,
    /// The digest of what a case was made of when it passed, by the case.
    cases: BTreeMap<String, String>,
    /// The same of cases that failed. They count as such although they passed in the committed run.
    #[serde(default)]
    failed: BTreeMap<String, String>,
}

/// What is in the committed file: each job, by its name.
pub(crate) type Committed = BTreeMap<String, CommittedJob>;

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct CommittedJob {
    groups: BTreeMap<String, CommittedGroup>,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
struct CommittedGroup {
    /// The digest of what the group was made of when its cases passed.
    sources: String,
    /// Of the host's containerd, runc and kernel at that time, in this order.
    versions: Vec<String>,
    /// Without the name of the group.
    passed: BTreeSet<String>,
}

impl Passed {
    /// Opens the record `name` of the runs under the conditions of `key`, of groups that are made of `sources`.
    pub(crate) fn open(
        cache: &Cache,
        name: &str,
        key: &Key,
        sources: GroupSources,
        committed: CommittedJob,
    ) -> Result<Passed> {
        let path = cache.entry(name, key, |path| replace(path, &Content::default()))?;
        // A record that is damaged has no case, so all of them run.
        let here = read(&path).unwrap_or_default();
        Ok(Passed { path, sources, here, committed })
    }

    /// Whether the case passed as it is.
    pub(crate) fn has(&self, case: &str) -> bool {
        let Some(((group, name), now)) = case.split_once('/').zip(self.sources_of(case)) else {
            return false;
        };
        let committed = self.committed.groups.get(group);
        let was_committed =
            || committed.is_some_and(|then| then.sources == *now && then.passed.contains(name));
        self.here.cases.get(case) == Some(now) || self.here.failed.get(case) != Some(now) && was_committed()
    }

    fn sources_of(&self, case: &str) -> Option<&String> {
        self.sources.get(case.split('/').next()?)
    }

    /// Of the host's containerd, runc and kernel, a line each; empty if no case is recorded. Those of the committed run
    /// if none has passed here.
    pub(crate) fn versions(&self) -> String {
        if !self.here.versions.is_empty() {
            return self.here.versions.clone();
        }
        self.committed.groups.values().map(|group| group.versions.join("\n")).next().unwrap_or_default()
    }

    /// Adds the cases of a slice if all of them passed, and removes those that failed. What another run has added
    /// meanwhile stays.
    ///
    /// A slice with a failure is not added at all: the failure may be of the tests' program, and not of one case.
    pub(crate) fn add(&self, outcomes: &[Outcome], versions: &str) -> Result<()> {
        let _lock = lock_records(&self.path)?;
        let mut content: Content = read(&self.path).unwrap_or_default();
        let failed: Vec<_> = outcomes.iter().filter(|outcome| outcome.failure.is_some()).collect();
        let with_sources =
            |outcome: &Outcome| Some((outcome.case.clone(), self.sources_of(&outcome.case)?.clone()));
        for (case, sources) in failed.iter().filter_map(|outcome| with_sources(outcome)) {
            content.cases.remove(&case);
            content.failed.insert(case, sources);
        }
        if failed.is_empty() && !outcomes.is_empty() {
            versions.clone_into(&mut content.versions);
            for (case, sources) in outcomes.iter().filter_map(with_sources) {
                content.failed.remove(&case);
                content.cases.insert(case, sources);
            }
        }
        replace(&self.path, &content)
    }
}

/// Reads the committed record of the source tree at `root`.
pub(crate) fn committed(root: &Path) -> Result<Committed> {
    let path = root.join(COMMITTED);
    if path.exists() { read(&path) } else { Ok(Committed::default()) }
}

/// Writes what these runs on runc found, and what they did not need to run, to the source tree at `root`. The sources
/// are those of the start of the runs. An error if a case failed there, or if no run is on runc.
pub(crate) fn commit(root: &Path, runs: &[(&Job, &Run)], sources: &GroupSources) -> Result<()> {
    let mut all = committed(root)?;
    let on_runc: Vec<_> = runs.iter().filter(|(job, _)| job.runtime == Runtime::Runc).collect();
    ensure!(!on_runc.is_empty(), "cannot write {COMMITTED}: no end-to-end test was selected on runc");
    for (job, run) in on_runc {
        let failed = run.outcomes.iter().find(|outcome| outcome.failure.is_some());
        ensure!(failed.is_none(), "{COMMITTED} stays as it was: a case failed on {}", job.name());
        let mut groups = BTreeMap::<String, CommittedGroup>::new();
        let before = all.remove(job.containerd.name()).unwrap_or_default();
        let passed = run.outcomes.iter().map(|outcome| (&outcome.case, true));
        for (case, ran) in passed.chain(run.remembered.iter().map(|case| (case, false))) {
            let Some((group, case)) = case.split_once('/') else { continue };
            let now = sources.get(group).with_context(|| format!("the group {group} has no sources"))?;
            let of_group = groups.entry(group.to_owned()).or_insert_with(|| {
                // It may have passed under other versions, and not have run since.
                let before = before.groups.get(group).filter(|before| !ran && before.sources == *now);
                let versions = before.map(|before| before.versions.clone());
                CommittedGroup {
                    sources: now.clone(),
                    versions: versions.unwrap_or_else(|| run.versions.lines().map(str::to_owned).collect()),
                    ..Default::default()
                }
            });
            of_group.passed.insert(case.to_owned());
        }
        all.insert(job.containerd.name().to_owned(), CommittedJob { groups });
    }
    let path = root.join(COMMITTED);
    let text = serde_json::to_string_pretty(&all).context("the record is no JSON")? + "\n";
    fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::containerd::Containerd;

    fn passed(case: &str) -> Outcome {
        Outcome { case: case.to_owned(), seconds: 1.0, failure: None }
    }

    fn sources(digests: [(&str, &str); 2]) -> GroupSources {
        digests.map(|(group, digest)| (group.to_owned(), digest.to_owned())).into()
    }

    #[test]
    fn only_what_passed_is_remembered_and_only_under_the_same_conditions() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path()).unwrap();
        let open_of = |conditions: &str, sources: [(&str, &str); 2]| {
            let key = Key::new().bytes(conditions);
            Passed::open(&cache, "passed", &key, self::sources(sources), CommittedJob::default()).unwrap()
        };
        let open = |conditions: &str| open_of(conditions, [("exec", "1"), ("stdio", "1")]);
        let first = [passed("exec/one"), passed("exec/two"), passed("stdio/one")];
        open("these").add(&first, "runc 1.1").unwrap();
        open("these").add(&[], "").unwrap();
        let names = ["exec/one", "exec/two", "exec/three", "stdio/one"];
        let known = |record: Passed| names.map(|name| record.has(name));
        assert_eq!(known(open("these")), [true, true, false, true]);
        // One group's file has changed, and then its cases pass again.
        let changed = || open_of("these", [("exec", "2"), ("stdio", "1")]);
        assert_eq!(known(changed()), [false, false, false, true]);
        changed().add(&[passed("exec/two")], "runc 1.1").unwrap();
        assert_eq!(known(changed()), [false, true, false, true]);
        // One that passed before has failed; and one passed beside it.
        let later = [passed("exec/three"), Outcome::failed("exec/two", "why")];
        changed().add(&later, "runc 1.1").unwrap();
        assert_eq!(known(changed()), [false, false, false, true]);
        assert_eq!(open("these").versions(), "runc 1.1");
        assert_eq!(known(open("others")), [false; 4]);
        fs::write(&open("these").path, "{").unwrap();
        assert_eq!(known(open("these")), [false; 4]);
    }

    #[test]
    fn what_a_committed_run_passed_need_not_run_elsewhere_while_its_sources_are_the_same() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("tests")).unwrap();
        let job = |runtime| Job {
            runtime,
            containerd: Containerd::V1_7,
            brief: false,
            filter: None,
            times: 1,
            may_remember: true,
        };
        let (runc, bulkhead) = (job(Runtime::Runc), job(Runtime::Bulkhead));
        let run = Run {
            outcomes: vec![passed("exec/one"), passed("stdio/one")],
            remembered: vec!["exec/two".to_owned()],
            versions: "containerd 1.7\nrunc 1.1\n".to_owned(),
            ..Run::default()
        };
        let now = sources([("exec", "1"), ("stdio", "1")]);
        assert!(commit(dir.path(), &[(&bulkhead, &run)], &now).is_err(), "no run on runc");
        commit(dir.path(), &[(&bulkhead, &Run::default()), (&runc, &run)], &now).unwrap();

        let cache_dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(cache_dir.path()).unwrap();
        let open = |of| {
            let committed = committed(dir.path()).unwrap().remove(runc.containerd.name()).unwrap();
            Passed::open(&cache, "passed", &Key::new(), sources(of), committed).unwrap()
        };
        let known = |record: &Passed| {
            ["exec/one", "exec/two", "exec/three", "stdio/one"].map(|name| record.has(name))
        };
        let record = open([("exec", "1"), ("stdio", "1")]);
        assert_eq!(known(&record), [true, true, false, true]);
        assert_eq!(record.versions(), "containerd 1.7\nrunc 1.1");
        let record = open([("exec", "1"), ("stdio", "2")]);
        assert_eq!(known(&record), [true, true, false, false]);
        // What passes here counts too.
        record.add(&[passed("stdio/one")], "runc 1.2").unwrap();
        let record = open([("exec", "2"), ("stdio", "2")]);
        assert_eq!(known(&record), [false, false, false, true]);
        assert_eq!(record.versions(), "runc 1.2");
        // What fails here does not count, until it passes.
        let same = || open([("exec", "1"), ("stdio", "1")]);
        same().add(&[Outcome::failed("exec/two", "why")], "runc 1.2").unwrap();
        assert_eq!(known(&same()), [true, false, false, true]);
        same().add(&[passed("exec/two")], "runc 1.2").unwrap();
        assert_eq!(known(&same()), [true, true, false, true]);

        // A group that did not run keeps the versions with which it did.
        let later = Run {
            outcomes: vec![passed("stdio/one")],
            remembered: vec!["exec/one".to_owned()],
            versions: "runc 1.2\n".to_owned(),
            ..Run::default()
        };
        commit(dir.path(), &[(&runc, &later)], &now).unwrap();
        let written = committed(dir.path()).unwrap().remove(runc.containerd.name()).unwrap();
        let versions =
            |group| written.groups.get(group).map(|group: &CommittedGroup| group.versions.join(", "));
        assert_eq!(versions("exec").unwrap(), "containerd 1.7, runc 1.1");
        assert_eq!(versions("stdio").unwrap(), "runc 1.2");

        let failed = Run { outcomes: vec![Outcome::failed("exec/one", "why")], ..Run::default() };
        assert!(commit(dir.path(), &[(&runc, &failed)], &now).is_err(), "a case failed");
    }
}
