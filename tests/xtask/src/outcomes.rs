//! How cases ended: read from what `bulkhead-e2e` prints, and kept between runs.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::cache::{Cache, Key, lock};

/// How `bulkhead-e2e` indents what belongs to the line before.
const INDENT: &str = "    ";

/// The first line of a failure that is not about the case itself.
const JOURNAL: &str = "containerd's journal";

/// How a case ended.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Outcome {
    /// `group/case`.
    pub(crate) case: String,
    /// How long it took.
    pub(crate) seconds: f64,
    /// Why it failed, in one line or several. None: it passed.
    pub(crate) failure: Option<String>,
}

impl Outcome {
    /// A case that failed without a word of its own.
    pub(crate) fn failed(case: &str, why: &str) -> Outcome {
        Outcome { case: case.to_owned(), seconds: 0.0, failure: Some(why.to_owned()) }
    }
}

/// The outcomes of these cases in the output of a run, which has them in this order: perhaps only those of the first.
pub(crate) fn of_cases(output: &str, cases: &[String]) -> Vec<Outcome> {
    let in_order = outcomes(output).into_iter().zip(cases);
    in_order.take_while(|(outcome, case)| outcome.case == **case).map(|(outcome, _)| outcome).collect()
}

/// Reads the lines `group/case [runtime] ... ok (1.2 s)` of a run, in their order, and the indented lines that say why
/// a case failed.
fn outcomes(output: &str) -> Vec<Outcome> {
    let mut outcomes: Vec<Outcome> = Vec::new();
    let mut why: Option<Vec<&str>> = None;
    for line in output.lines() {
        if let (Some(why), Some(reason)) = (&mut why, line.strip_prefix(INDENT)) {
            why.push(reason);
            continue;
        }
        finish(&mut outcomes, why.take());
        let Some(outcome) = outcome(line) else { continue };
        why = outcome.failure.is_some().then(Vec::new);
        outcomes.push(outcome);
    }
    finish(&mut outcomes, why.take());
    outcomes
}

fn outcome(line: &str) -> Option<Outcome> {
    let (case, rest) = line.split_once(" [")?;
    let (_, verdict) = rest.split_once("] ... ")?;
    if !case.contains('/') || case.contains(' ') {
        return None;
    }
    let seconds = verdict.split_once('(').and_then(|(_, rest)| rest.strip_suffix(" s)")?.parse().ok());
    let failure = (!verdict.starts_with("ok")).then(String::new);
    Some(Outcome { case: case.to_owned(), seconds: seconds.unwrap_or_default(), failure })
}

/// Adds the reason, without the host's journal, to the failure that was read last.
fn finish(outcomes: &mut [Outcome], why: Option<Vec<&str>>) {
    if let (Some(last), Some(why)) = (outcomes.last_mut(), why) {
        let own: Vec<_> = why.into_iter().take_while(|line| !line.starts_with(JOURNAL)).collect();
        last.failure = Some(own.join("\n"));
    }
}

/// The cases that passed on runc under exactly the same conditions: same cases, images, containerd and host. They do
/// not depend on what this project builds, so they need not run again.
#[derive(Debug)]
pub(crate) struct Passed {
    path: PathBuf,
    /// The digest of each group's sources, by its name.
    sources: BTreeMap<String, String>,
    content: PassedContent,
}

/// What is in the file.
#[derive(Debug, Default, Serialize, Deserialize)]
struct PassedContent {
    /// Of the host's containerd, runc and kernel, a line each.
    versions: String,
    /// The digest of what a case was made of when it passed, by the case.
    cases: BTreeMap<String, String>,
}

impl Passed {
    /// Opens the record `name` of the runs under the conditions of `key`, of groups that are made of `sources`.
    pub(crate) fn open(
        cache: &Cache,
        name: &str,
        key: &Key,
        sources: BTreeMap<String, String>,
    ) -> Result<Passed> {
        let path = cache.entry(name, key, |path| replace(path, &PassedContent::default()))?;
        // A record that is damaged has no case, so all of them run.
        let content = read(&path).unwrap_or_default();
        Ok(Passed { path, sources, content })
    }

    /// Whether the case passed as it is.
    pub(crate) fn has(&self, case: &str) -> bool {
        self.content.cases.get(case).is_some_and(|then| self.sources_of(case) == Some(then))
    }

    fn sources_of(&self, case: &str) -> Option<&String> {
        self.sources.get(case.split('/').next()?)
    }

    /// Of the host's containerd, runc and kernel, a line each; empty if no case is recorded.
    pub(crate) fn versions(&self) -> &str {
        &self.content.versions
    }

    /// Adds the cases of a slice if all of them passed, and removes those that failed. What another run has added
    /// meanwhile stays.
    ///
    /// A slice with a failure is not added at all: the failure may be of the tests' program, and not of one case.
    pub(crate) fn add(&self, outcomes: &[Outcome], versions: &str) -> Result<()> {
        let _lock = lock_records(&self.path)?;
        let mut content: PassedContent = read(&self.path).unwrap_or_default();
        let failed: Vec<_> = outcomes.iter().filter(|outcome| outcome.failure.is_some()).collect();
        content.cases.retain(|case, _| failed.iter().all(|outcome| outcome.case != *case));
        if failed.is_empty() && !outcomes.is_empty() {
            versions.clone_into(&mut content.versions);
            let passed = outcomes
                .iter()
                .filter_map(|outcome| Some((outcome.case.clone(), self.sources_of(&outcome.case)?.clone())));
            content.cases.extend(passed);
        }
        replace(&self.path, &content)
    }
}

/// How long each case took last, by the name of its job: to share out the work of the next run.
pub(crate) type Durations = BTreeMap<String, BTreeMap<String, f64>>;

/// Reads the durations of earlier runs.
pub(crate) fn durations(cache: &Cache) -> Durations {
    // Without them, or with a file that is damaged, the work is shared out less evenly, and that is all.
    read(&durations_path(cache)).unwrap_or_default()
}

/// Records the durations of a job's cases.
pub(crate) fn record_durations(cache: &Cache, job: &str, outcomes: &[Outcome]) -> Result<()> {
    let path = durations_path(cache);
    let _lock = lock_records(&path)?;
    let mut all = durations(cache);
    let of_job = all.entry(job.to_owned()).or_default();
    of_job.extend(outcomes.iter().map(|outcome| (outcome.case.clone(), outcome.seconds)));
    replace(&path, &all)
}

fn durations_path(cache: &Cache) -> PathBuf {
    cache.dir().join("durations.json")
}

/// Keeps other runs from changing the records beside `path`, until the file is dropped.
pub(crate) fn lock_records(path: &Path) -> Result<File> {
    lock(&path.with_file_name("records.lock"), "records of test runs")
}

pub(crate) fn read<T: for<'de> Deserialize<'de>>(path: &Path) -> Result<T> {
    let text = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    serde_json::from_slice(&text).with_context(|| format!("{} is damaged: remove it", path.display()))
}

/// Replaces the file as a whole, so that a run that is ended leaves the old one or the new one.
pub(crate) fn replace(path: &Path, content: &impl Serialize) -> Result<()> {
    let context = || format!("cannot write {}", path.display());
    let directory = path.parent().with_context(context)?;
    let mut file = tempfile::NamedTempFile::new_in(directory).with_context(context)?;
    file.write_all(&serde_json::to_vec(content).with_context(context)?).with_context(context)?;
    file.persist(path).with_context(context)?;
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const OUTPUT: &str = "\
exec/one [runc on containerd 1.7] ... ok (1.2 s)
    not a reason
exec/two [runc on containerd 1.7] ... FAILED (0.1 s)
    expected  [x] ... ok
    came      nothing
    containerd's journal:
    a line of it
exec/three [runc on containerd 1.7] ... FAILED (2.0 s)
1 passed, 2 failed
";

    fn passed(case: &str, seconds: f64) -> Outcome {
        Outcome { case: case.to_owned(), seconds, failure: None }
    }

    #[test]
    fn the_outcomes_of_a_run_are_read_with_their_reasons() {
        let failed = |case: &str, seconds, why: &str| Outcome { seconds, ..Outcome::failed(case, why) };
        let expected = [
            passed("exec/one", 1.2),
            failed("exec/two", 0.1, "expected  [x] ... ok\ncame      nothing"),
            failed("exec/three", 2.0, ""),
        ];
        assert_eq!(outcomes(OUTPUT), expected);
        assert_eq!(outcomes(""), []);
    }

    #[test]
    fn outcomes_of_other_cases_do_not_count() {
        let count = |cases: &[&str]| {
            let cases: Vec<_> = cases.iter().map(|case| (*case).to_owned()).collect();
            of_cases(OUTPUT, &cases).len()
        };
        assert_eq!(count(&["exec/one", "exec/two", "exec/three", "exec/four"]), 3);
        assert_eq!(count(&["exec/one", "exec/three"]), 1);
    }

    #[test]
    fn a_run_that_breaks_off_has_the_outcomes_before() {
        let cut = OUTPUT.split_at(OUTPUT.find("    came").unwrap()).0;
        let last = outcomes(cut).pop().unwrap();
        assert_eq!(last.failure.as_deref(), Some("expected  [x] ... ok"));
    }

    #[test]
    fn only_what_passed_is_remembered_and_only_under_the_same_conditions() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path()).unwrap();
        let open_of = |conditions: &str, sources: [(&str, &str); 2]| {
            let sources = sources.map(|(group, digest)| (group.to_owned(), digest.to_owned())).into();
            Passed::open(&cache, "passed", &Key::new().bytes(conditions), sources).unwrap()
        };
        let open = |conditions: &str| open_of(conditions, [("exec", "1"), ("stdio", "1")]);
        let first = [passed("exec/one", 1.0), passed("exec/two", 1.0), passed("stdio/one", 1.0)];
        open("these").add(&first, "runc 1.1").unwrap();
        open("these").add(&[], "").unwrap();
        let names = ["exec/one", "exec/two", "exec/three", "stdio/one"];
        let known = |record: Passed| names.map(|name| record.has(name));
        assert_eq!(known(open("these")), [true, true, false, true]);
        // One group's file has changed, and then its cases pass again.
        let changed = || open_of("these", [("exec", "2"), ("stdio", "1")]);
        assert_eq!(known(changed()), [false, false, false, true]);
        changed().add(&[passed("exec/two", 1.0)], "runc 1.1").unwrap();
        assert_eq!(known(changed()), [false, true, false, true]);
        // One that passed before has failed; and one passed beside it.
        let later = [passed("exec/three", 1.0), Outcome::failed("exec/two", "why")];
        changed().add(&later, "runc 1.1").unwrap();
        assert_eq!(known(changed()), [false, false, false, true]);
        assert_eq!(open("these").versions(), "runc 1.1");
        assert_eq!(known(open("others")), [false; 4]);
        fs::write(&open("these").path, "{").unwrap();
        assert_eq!(known(open("these")), [false; 4]);
    }

    #[test]
    fn durations_are_those_of_the_last_run_of_each_case() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path()).unwrap();
        record_durations(&cache, "a job", &[passed("x/1", 1.0), passed("x/2", 2.0)]).unwrap();
        record_durations(&cache, "a job", &[passed("x/1", 3.0)]).unwrap();
        let all = durations(&cache);
        assert_eq!(all["a job"], BTreeMap::from([("x/1".to_owned(), 3.0), ("x/2".to_owned(), 2.0)]));
        fs::write(durations_path(&cache), "{").unwrap();
        assert!(durations(&cache).is_empty());
    }
}
