//! Lists of processors, in the kernel's form: `0-3,8` (cpuset(7), "List format").

use std::{collections::BTreeSet, ops::RangeInclusive};

/// Processors by their numbers.
pub type CpuNumbers = BTreeSet<u32>;

/// The greatest number that is read. The kernel for x86_64 supports 8192 processors.
const GREATEST: u32 = 8191;

/// The greatest length of a list that is read, bytes. The kernel itself writes lists of less than a page.
const LONGEST: usize = 4096;

/// Parses a list. None: it has another form, or is too long, or has too great a number.
pub fn parse(list: &str) -> Option<CpuNumbers> {
    if list.len() > LONGEST {
        return None;
    }
    Some(disjoint(ranges(list)?).into_iter().flatten().collect())
}

/// The ranges of a list, as they are written.
fn ranges(list: &str) -> Option<Vec<RangeInclusive<u32>>> {
    let parse = |range: &str| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        (first <= last && last <= GREATEST).then_some(first..=last)
    };
    list.trim().split(',').filter(|range| !range.is_empty()).map(parse).collect()
}

/// The same numbers in ranges of which no two have a number in common. Many ranges may name the same numbers, and to
/// take each of them again would take long.
fn disjoint(mut ranges: Vec<RangeInclusive<u32>>) -> Vec<RangeInclusive<u32>> {
    ranges.sort_unstable_by_key(|range| *range.start());
    let mut disjoint: Vec<RangeInclusive<u32>> = Vec::new();
    for range in ranges {
        match disjoint.last_mut() {
            Some(last) if range.start() <= last.end() => *last = *last.start()..=*range.end().max(last.end()),
            _ => disjoint.push(range),
        }
    }
    disjoint
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
    fn no_number_of_a_long_list_is_taken_twice() {
        assert_eq!(parse(&"0-8191,".repeat(200_000)), None, "it is too long");
        let long = format!("{}0-1,4-9,8-8191", "0-8191,".repeat(580));
        assert_eq!(disjoint(ranges(&long).unwrap()), [0..=8191]);
        assert_eq!(parse(&long).map(|numbers| numbers.len()), Some(8192));
        assert_eq!(disjoint(ranges("8-9,0-1,4-6,5,1-2").unwrap()), [0..=2, 4..=6, 8..=9]);
        let most: String = (0..1024).map(|number| format!("{},", number * 2 % 10)).collect();
        assert_eq!(disjoint(ranges(&most).unwrap()).len(), 5);
    }

    #[test]
    fn a_list_is_as_short_as_the_kernels() {
        assert_eq!(format(&[0, 1, 2, 5, 7, 8].into()), "0-2,5,7-8");
        assert_eq!(format(&CpuNumbers::new()), "");
    }
}
