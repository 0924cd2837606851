//! How cases ended: read from what `bulkhead-e2e` prints, and kept between runs.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::cache::{Cache, lock};

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
