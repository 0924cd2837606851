//! Shares out the cases of all jobs over rigs that run side by side.

use std::collections::BTreeMap;

/// The estimated time of a case that no earlier run has measured, in seconds.
const UNKNOWN: f64 = 5.0;

/// A slice below this is not worth a rig of its own, in seconds. A rig starts within seconds, but then it is slow for a
/// minute: the emulator translates each program and kernel when it first runs.
const LEAST: f64 = 240.0;

/// Slices for each worker, if they are long enough: the more there are, the sooner all workers end together.
const PER_WORKER: f64 = 3.0;

/// Cases of one job, in their order, that run in one rig.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Slice {
    /// Index of the job.
    pub(crate) job: usize,
    /// Names of the cases.
    pub(crate) cases: Vec<String>,
    /// The estimated time of each, in seconds.
    estimates: Vec<f64>,
}

impl Slice {
    /// The estimated time of all of it, in seconds.
    fn estimate(&self) -> f64 {
        self.estimates.iter().sum()
    }
}

/// The estimated time of a case of a job, in seconds: what it took last.
pub(crate) fn estimate(durations: Option<&BTreeMap<String, f64>>, case: &str) -> f64 {
    durations.and_then(|durations| durations.get(case)).copied().unwrap_or(UNKNOWN)
}

/// Cuts the jobs' cases into slices for so many workers, the longest first. Each job is a list of names and estimates.
///
/// Neighbours stay together, since those of a group share what is prepared for them, such as a dockerd.
pub(crate) fn slices(jobs: &[Vec<(String, f64)>], workers: usize) -> Vec<Slice> {
    let total: f64 = jobs.iter().flatten().map(|(_, seconds)| seconds).sum();
    let most = (total / (workers as f64 * PER_WORKER)).max(LEAST);
    let mut slices: Vec<Slice> = Vec::new();
    for (job, cases) in jobs.iter().enumerate() {
        let of_job: f64 = cases.iter().map(|(_, seconds)| seconds).sum();
        // As many as it takes, all of about the same length.
        let length = of_job / (of_job / most).ceil().max(1.0);
        let (mut before, mut last) = (0.0, None);
        for (case, seconds) in cases {
            // A case is in the slice in which it is half over.
            let number = ((before + seconds / 2.0) / length) as usize;
            if last != Some(number) {
                slices.push(Slice { job, cases: Vec::new(), estimates: Vec::new() });
                last = Some(number);
            }
            if let Some(slice) = slices.last_mut() {
                slice.cases.push(case.clone());
                slice.estimates.push(*seconds);
            }
            before += seconds;
        }
    }
    slices.sort_by(|one, other| other.estimate().total_cmp(&one.estimate()));
    slices
}

/// How far the slices of a run are.
pub(crate) struct Course {
    workers: usize,
    parts: Vec<Part>,
}

/// How far a slice is.
struct Part {
    /// The estimated time of each case, in seconds.
    estimates: Vec<f64>,
    done: usize,
    failed: usize,
}

impl Part {
    /// The estimated time of the cases that are not done.
    fn left(&self) -> f64 {
        self.estimates.iter().skip(self.done).sum()
    }
}

impl Course {
    pub(crate) fn new(slices: &[Slice], workers: usize) -> Course {
        let part = |slice: &Slice| Part { estimates: slice.estimates.clone(), done: 0, failed: 0 };
        Course { workers, parts: slices.iter().map(part).collect() }
    }

    /// So many cases of this slice are done now, and so many of these have failed.
    pub(crate) fn tell(&mut self, slice: usize, done: usize, failed: usize) {
        if let Some(part) = self.parts.get_mut(slice) {
            // A slice whose program contradicts itself has one failure more than cases.
            part.done = done.min(part.estimates.len());
            part.failed = failed;
        }
    }

    /// How many cases are done.
    pub(crate) fn done(&self) -> u64 {
        self.parts.iter().map(|part| part.done as u64).sum()
    }

    /// How many cases there are.
    pub(crate) fn all(&self) -> u64 {
        self.parts.iter().map(|part| part.estimates.len() as u64).sum()
    }

    /// How many have failed, and how long the others will take: the workers share them, but none is faster than its
    /// slice.
    pub(crate) fn note(&self) -> String {
        let failed: usize = self.parts.iter().map(|part| part.failed).sum();
        let all: f64 = self.parts.iter().map(Part::left).sum();
        let longest = self.parts.iter().map(Part::left).fold(0.0, f64::max);
        let minutes = (all / self.workers.max(1) as f64).max(longest) / 60.0;
        let left = match minutes {
            minutes if minutes < 1.0 => "less than a minute".to_owned(),
            minutes => format!("about {minutes:.0} min"),
        };
        format!("{failed} failed, {left} left")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(name: &str, seconds: &[f64]) -> Vec<(String, f64)> {
        seconds.iter().enumerate().map(|(index, seconds)| (format!("{name}/{index}"), *seconds)).collect()
    }

    #[test]
    fn each_case_is_in_one_slice_and_neighbours_stay_in_their_order() {
        let jobs = [job("a", &[10.0; 200]), job("b", &[1.0; 50]), job("c", &[])];
        let slices = slices(&jobs, 2);
        for (index, job) in jobs.iter().enumerate() {
            let mut of_job: Vec<_> = slices.iter().filter(|slice| slice.job == index).collect();
            of_job.sort_by_key(|slice| job.iter().position(|(case, _)| *case == slice.cases[0]));
            let cases: Vec<_> = of_job.iter().flat_map(|slice| slice.cases.clone()).collect();
            assert_eq!(cases, job.iter().map(|(case, _)| case.clone()).collect::<Vec<_>>());
        }
        assert_eq!(slices.iter().filter(|slice| slice.job == 0).count(), 6);
        assert_eq!(slices.iter().filter(|slice| slice.job == 1).count(), 1);
        assert!(slices.is_sorted_by(|one, next| one.estimate() >= next.estimate()));
    }

    #[test]
    fn a_short_run_is_not_cut() {
        assert_eq!(slices(&[job("a", &[5.0; 10])], 2).len(), 1);
    }

    #[test]
    fn a_case_that_is_longer_than_a_slice_has_one_for_itself() {
        let slices = slices(&[job("a", &[1.0, 1000.0, 1.0])], 2);
        assert!(slices.iter().any(|slice| slice.cases == ["a/1"]), "{slices:?}");
    }

    #[test]
    fn the_course_of_a_run_counts_cases_and_failures_and_what_is_left() {
        let slices = slices(&[job("a", &[300.0, 300.0]), job("b", &[180.0, 60.0])], 2);
        assert_eq!(slices.len(), 3);
        let mut course = Course::new(&slices, 2);
        assert_eq!((course.done(), course.all(), course.note()), (0, 4, "0 failed, about 7 min left".into()));
        course.tell(0, 1, 1);
        assert_eq!((course.done(), course.note()), (1, "1 failed, about 5 min left".into()));
        course.tell(1, 1, 0);
        course.tell(2, 1, 0);
        assert_eq!((course.done(), course.note()), (3, "1 failed, about 1 min left".into()));
        course.tell(2, 3, 2);
        assert_eq!((course.done(), course.note()), (4, "3 failed, less than a minute left".into()));
        course.tell(9, 1, 1);
        assert_eq!(course.done(), 4);
    }

    #[test]
    fn what_is_unknown_counts_as_something() {
        let known = BTreeMap::from([("x".to_owned(), 7.0)]);
        assert_eq!(
            [estimate(Some(&known), "x"), estimate(Some(&known), "y"), estimate(None, "x")],
            [7.0, UNKNOWN, UNKNOWN]
        );
    }
}
