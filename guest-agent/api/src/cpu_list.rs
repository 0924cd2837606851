//! Lists of processors, in the kernel's form: `0-3,8` (cpuset(7), "List format").

use std::collections::BTreeSet;

/// Processors by their numbers.
pub type CpuNumbers = BTreeSet<u32>;

/// The greatest number that is read. The kernel for x86_64 supports 8192 processors.
const GREATEST: usize = 8191;

/// The greatest length of a list that is read, bytes. The kernel itself writes lists of less than a page.
const LONGEST: usize = 4096;

/// Parses a list. None: it has another form, or is too long, or has too great a number.
pub fn parse(list: &str) -> Option<CpuNumbers> {
    if list.len() > LONGEST {
        return None;
    }
    // Many ranges may name the same numbers. A set would take each of them again.
    let mut named = vec![false; GREATEST + 1];
    for range in list.trim().split(',').filter(|range| !range.is_empty()) {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last) = (first.trim().parse::<usize>().ok()?, last.trim().parse::<usize>().ok()?);
        named.get_mut(first..=last)?.fill(true);
    }
    Some((0..).zip(named).filter(|(_, is_named)| *is_named).map(|(number, _)| number).collect())
}

/// Writes a list, with ranges where numbers follow one another.
pub fn format(numbers: &CpuNumbers) -> String {
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    for &number in numbers {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == number => *last = number,
            _ => ranges.push((number, number)),
        }
    }
    let texts = ranges.iter().map(|(first, last)| match first == last {
        true => first.to_string(),
        false => format!("{first}-{last}"),
    });
    texts.collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn a_list_has_numbers_and_ranges() {
        assert_eq!(parse("0-2,8\n"), Some([0, 1, 2, 8].into()));
        assert_eq!(parse(""), Some(CpuNumbers::new()));
        for wrong in ["a", "0-", "1-x", "0-8192", "-1", "4294967296", "3-1"] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_long_list_takes_no_time() {
        let begun = Instant::now();
        assert_eq!(parse(&"0-8191,".repeat(200_000)), None);
        assert_eq!(parse(&"0-8191,".repeat(585)).map(|numbers| numbers.len()), Some(8192));
        assert!(begun.elapsed() < Duration::from_millis(100), "{:?}", begun.elapsed());
    }

    #[test]
    fn a_list_is_as_short_as_the_kernels() {
        assert_eq!(format(&[0, 1, 2, 5, 7, 8].into()), "0-2,5,7-8");
        assert_eq!(format(&CpuNumbers::new()), "");
    }
}
