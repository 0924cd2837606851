//! What paired samples say about a ratio: its median, a confidence interval of it, and whether a target is met.

use std::fmt;

use anyhow::{Result, bail};

/// A target is judged on this number of pairs at least.
pub(super) const ENOUGH: usize = 15;

/// The interval contains the true median in this share of all runs at least.
const CONFIDENCE: f64 = 0.95;

/// A confidence interval of a median.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Interval {
    pub(super) low: f64,
    pub(super) high: f64,
    /// The share of runs whose interval contains the true median, for values that are independent of one another.
    pub(super) coverage: f64,
}

impl Interval {
    /// The interval between the k-th smallest and the k-th largest of n values, with the largest k that covers 95 %.
    /// There is none for fewer than six values.
    ///
    /// It assumes nothing about the distribution of the values. The true median is outside of it if fewer than k
    /// values are on one side of the median. Each value is on either side with probability 1/2, as in the sign test.
    /// The coverage is thus 1 - 2 P(B < k), where B is binomial (n, 1/2): 96.5 % for n = 15 and k = 4. Equal values
    /// can only make it larger. Source: H. A. David, H. N. Nagaraja, Order Statistics, 3rd edition, section 7.1.
    pub(super) fn of_median(values: &[f64]) -> Option<Interval> {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let count = sorted.len();
        // P(B = k - 1) and P(B < k), from k = 1 on.
        let mut point = 0.5_f64.powi(i32::try_from(count).ok()?);
        let mut tail = point;
        let mut widest = None;
        for k in 1..=count / 2 {
            let coverage = 1.0 - 2.0 * tail;
            if coverage < CONFIDENCE {
                break;
            }
            widest = Some(Interval { low: sorted[k - 1], high: sorted[count - k], coverage });
            point *= (count - k + 1) as f64 / k as f64;
            tail += point;
        }
        widest
    }
}

impl fmt::Display for Interval {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:.3} to {:.3} ({:.1} %)", self.low, self.high, self.coverage * 100.0)
    }
}

/// Whether ratios are below a target.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Verdict {
    /// The whole interval is below the target.
    Met,
    /// The whole interval is at the target or above it.
    Missed,
    /// The target is inside the interval.
    Undecided,
    /// There are only so many pairs.
    NotJudged(usize),
}

impl Verdict {
    /// Judges the ratios of some pairs.
    pub(super) fn of(ratios: &[f64], target: f64) -> Verdict {
        match Interval::of_median(ratios) {
            Some(interval) if ratios.len() >= ENOUGH => match interval {
                Interval { high, .. } if high < target => Verdict::Met,
                Interval { low, .. } if low >= target => Verdict::Missed,
                _ => Verdict::Undecided,
            },
            _ => Verdict::NotJudged(ratios.len()),
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Verdict::Met => formatter.write_str("met"),
            Verdict::Missed => formatter.write_str("**missed**"),
            Verdict::Undecided => formatter.write_str("**undecided**: needs more rounds"),
            Verdict::NotJudged(pairs) => write!(formatter, "not judged: {pairs} pairs of {ENOUGH}"),
        }
    }
}

/// The middle value, or the mean of the two in the middle. None: there is no value.
pub(super) fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    let upper = *sorted.get(middle)?;
    Some(if sorted.len() % 2 == 1 { upper } else { (sorted[middle - 1] + upper) / 2.0 })
}

/// The median, and in parentheses the smallest and the largest.
pub(super) fn spread(values: impl Iterator<Item = f64>, digits: usize) -> Result<String> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let (Some(middle), Some(low), Some(high)) = (median(&values), values.first(), values.last()) else {
        bail!("no samples");
    };
    Ok(format!("{middle:.digits$} ({low:.digits$} to {high:.digits$})"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// The values 1 to `count`, in no order, so that a value is its own rank.
    fn ranks(count: usize) -> Vec<f64> {
        let (odd, even): (Vec<_>, Vec<_>) = (1..=count).partition(|rank| rank % 2 == 1);
        even.into_iter().chain(odd.into_iter().rev()).map(|rank| rank as f64).collect()
    }

    #[test]
    fn the_ranks_and_the_coverage_are_those_of_the_tables() {
        let table = [
            (6, 1.0, 6.0, 0.96875),
            (8, 1.0, 8.0, 0.99219),
            (9, 2.0, 8.0, 0.96094),
            (10, 2.0, 9.0, 0.97852),
            (15, 4.0, 12.0, 0.96484),
            (16, 4.0, 13.0, 0.97873),
            (20, 6.0, 15.0, 0.95861),
            (30, 10.0, 21.0, 0.95723),
            (100, 40.0, 61.0, 0.96480),
        ];
        for (count, low, high, coverage) in table {
            let interval = Interval::of_median(&ranks(count)).unwrap();
            assert_eq!((interval.low, interval.high), (low, high), "of {count}");
            assert!((interval.coverage - coverage).abs() < 1e-5, "of {count}: {}", interval.coverage);
        }
    }

    #[test]
    fn five_values_are_too_few_for_an_interval() {
        assert_eq!(Interval::of_median(&ranks(5)), None);
        assert_eq!(Interval::of_median(&[]), None);
    }

    #[test]
    fn the_interval_of_many_values_is_narrow() {
        let Interval { low, high, coverage } = Interval::of_median(&ranks(1000)).unwrap();
        assert!(low > 460.0 && high < 540.0 && (0.95..0.96).contains(&coverage), "{low} {high} {coverage}");
    }

    #[test]
    fn a_target_is_met_or_missed_only_by_the_whole_interval() {
        // From 4 to 12.
        let ratios = ranks(15);
        for (target, verdict) in [
            (12.1, Verdict::Met),
            (12.0, Verdict::Undecided),
            (8.0, Verdict::Undecided),
            (4.1, Verdict::Undecided),
            (4.0, Verdict::Missed),
        ] {
            assert_eq!(Verdict::of(&ratios, target), verdict, "{target}");
        }
    }

    #[test]
    fn nothing_is_judged_on_fewer_than_15_pairs() {
        assert_eq!(Verdict::of(&ranks(14), 100.0), Verdict::NotJudged(14));
        assert_eq!(Verdict::of(&ranks(2), 100.0).to_string(), "not judged: 2 pairs of 15");
        assert_eq!(Verdict::of(&ranks(15), 100.0), Verdict::Met);
    }

    #[test]
    fn a_median_of_an_even_number_is_between_two() {
        assert_eq!(median(&[4.0, 1.0, 2.0, 8.0]), Some(3.0));
        assert_eq!(median(&[9.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[]), None);
    }
}
