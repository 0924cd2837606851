//! How cases ended that were run by their names, kept in the cache for docs/conformance.md: a whole run leaves out the
//! cases that take minutes, and most groups under other versions of containerd.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::SystemTime;

use anyhow::Result;
use serde::{Deserialize, Serialize};

use crate::cache::Cache;
use crate::case_sources;
use crate::conformance;
use crate::dist::source_dir;
use crate::e2e::Run;
use crate::outcomes::{lock_records, read, replace};
use crate::page::day;

/// A case of the tests' program.
#[derive(Debug, PartialEq)]
pub(crate) struct Known {
    /// `group/case`.
    pub(crate) name: String,
    /// Whether it runs on runc too.
    pub(crate) on_runc: bool,
    /// Whether it runs by its whole name only.
    pub(crate) is_long: bool,
}

impl Known {
    pub(crate) fn group(&self) -> &str {
        self.name.split('/').next().unwrap_or_default()
    }
}

/// The cases in what `bulkhead-e2e list` prints.
pub(crate) fn known(list: &str) -> Vec<Known> {
    let case = |line: &str| {
        let mut words = line.split_whitespace();
        let name = words.next()?.to_owned();
        let is_long = line.ends_with("only by its whole name");
        Some(Known { name, on_runc: words.next() == Some("runc"), is_long })
    };
    list.lines().filter_map(case).collect()
}

/// The source tree before a run.
pub(crate) struct Tree {
    commit: String,
    /// The digest of the sources of each group of cases, by its name.
    groups: BTreeMap<String, String>,
}

impl Tree {
    pub(crate) fn now() -> Result<Tree> {
        Ok(Tree { commit: conformance::commit()?, groups: case_sources::of_groups(source_dir())? })
    }
}

/// How a case ended.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Ended {
    pub(crate) passed: bool,
    /// What was tested.
    pub(crate) commit: String,
    /// The day, `2026-11-26`.
    pub(crate) date: String,
    /// Of the host's containerd, runc and kernel, a line each.
    pub(crate) versions: String,
    /// The digest of the sources of the case's group.
    sources: String,
}

/// The last outcomes of cases, by the name of the job and the case.
pub(crate) struct Named {
    groups: BTreeMap<String, String>,
    jobs: BTreeMap<String, BTreeMap<String, Ended>>,
}

impl Named {
    /// Opens the outcomes for a tree.
    pub(crate) fn open(cache: &Cache, tree: &Tree) -> Named {
        // Without them, or with a file that is damaged, the page says that there is no result.
        let jobs = read(&path(cache)).unwrap_or_default();
        Named { groups: tree.groups.clone(), jobs }
    }

    /// How a case ended in a job, if the case has been the same since.
    pub(crate) fn get(&self, job: &str, case: &str) -> Option<&Ended> {
        let ended = self.jobs.get(job)?.get(case)?;
        (self.groups.get(case.split('/').next()?) == Some(&ended.sources)).then_some(ended)
    }

    /// Records the outcomes of a job. A case that ran several times has passed if it passed each time.
    fn add(&mut self, job: &str, run: &Run, tree: &Tree, now: SystemTime) {
        let date = day(now);
        let mut ran = BTreeMap::<&str, bool>::new();
        for outcome in &run.outcomes {
            *ran.entry(&outcome.case).or_insert(true) &= outcome.failure.is_none();
        }
        for (case, passed) in ran {
            let sources = case.split('/').next().and_then(|group| tree.groups.get(group)).cloned();
            let ended = Ended {
                passed,
                commit: tree.commit.clone(),
                date: date.clone(),
                versions: run.versions.clone(),
                sources: sources.unwrap_or_default(),
            };
            self.jobs.entry(job.to_owned()).or_default().insert(case.to_owned(), ended);
        }
    }
}

/// The file with the outcomes.
fn path(cache: &Cache) -> PathBuf {
    cache.dir().join("named.json")
}

/// Records the outcomes of jobs, each with its name. What another run has added meanwhile stays.
pub(crate) fn record(cache: &Cache, tree: &Tree, jobs: &[(String, &Run)]) -> Result<()> {
    let path = path(cache);
    let _lock = lock_records(&path)?;
    let mut named = Named::open(cache, tree);
    jobs.iter().for_each(|(job, run)| named.add(job, run, tree, SystemTime::now()));
    replace(&path, &named.jobs)
}

/// For tests: a run in which these cases passed, or not.
#[cfg(test)]
pub(crate) fn run(cases: &[(&str, bool)]) -> Run {
    use crate::outcomes::Outcome;
    let outcome = |(case, passed): &(&str, bool)| Outcome {
        failure: (!passed).then(|| "why".to_owned()),
        ..Outcome::failed(case, "")
    };
    let versions = "containerd 1.7\nrunc version 1.1\nLinux 6.12".to_owned();
    Run { outcomes: cases.iter().map(outcome).collect(), versions, ..Run::default() }
}

/// For tests of the page: what is recorded of jobs, of commit 0123456789. `groups` have the same sources as now.
#[cfg(test)]
pub(crate) fn example(jobs: &[(&str, &Run)], groups: &[&str]) -> Named {
    let groups: BTreeMap<_, _> = groups.iter().map(|group| ((*group).to_owned(), "1".to_owned())).collect();
    let tree = Tree { commit: "0123456789".to_owned(), groups };
    let mut named = Named { groups: tree.groups.clone(), jobs: BTreeMap::new() };
    jobs.iter().for_each(|(job, run)| named.add(job, run, &tree, SystemTime::UNIX_EPOCH));
    named
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn cases_are_read_from_the_list() {
        let list = "\
exec/one                         runc bulkhead  since containerd 1.6
jail/two                         bulkhead       since containerd 2.0, only by its whole name
";
        let case = |name: &str, on_runc, is_long| Known { name: name.to_owned(), on_runc, is_long };
        assert_eq!(known(list), [case("exec/one", true, false), case("jail/two", false, true)]);
        assert_eq!(known(list)[1].group(), "jail");
    }

    #[test]
    fn the_last_outcome_of_a_case_counts_while_the_case_is_the_same() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path()).unwrap();
        let tree = |commit: &str, digest: &str| Tree {
            commit: commit.to_owned(),
            groups: [("exec".to_owned(), digest.to_owned())].into(),
        };
        let add = |tree: &Tree, job: &str, cases| {
            record(&cache, tree, &[(job.to_owned(), &run(cases))]).unwrap();
        };
        add(&tree("c1", "1"), "a", &[("exec/one", true), ("exec/two", true), ("exec/two", false)]);
        add(&tree("c2", "1"), "b", &[("exec/one", false)]);
        let ended = |tree: &Tree, job: &str, case: &str| {
            let ended = Named::open(&cache, tree).get(job, case).cloned();
            ended.map(|ended| (ended.passed, ended.commit))
        };
        let now = tree("c3", "1");
        assert_eq!(ended(&now, "a", "exec/one"), Some((true, "c1".to_owned())));
        assert_eq!(ended(&now, "a", "exec/two"), Some((false, "c1".to_owned())));
        assert_eq!(ended(&now, "b", "exec/one"), Some((false, "c2".to_owned())));
        assert_eq!(ended(&now, "b", "exec/two"), None);
        add(&now, "b", &[("exec/one", true)]);
        assert_eq!(ended(&now, "b", "exec/one"), Some((true, "c3".to_owned())));
        // The sources of the case have changed.
        assert_eq!(ended(&tree("c3", "2"), "a", "exec/one"), None);
        fs::write(path(&cache), "{").unwrap();
        assert_eq!(ended(&now, "a", "exec/one"), None);
    }
}
