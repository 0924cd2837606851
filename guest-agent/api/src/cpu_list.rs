//! Lists of processors, in the kernel's form: `0-3,8` (cpuset(7), "List format").

use std::collections::BTreeSet;

/// Processors by their numbers.
pub type CpuNumbers = BTreeSet<u32>;

/// The greatest number that is read. The kernel for x86_64 supports 8192 processors.
const GREATEST: u32 = 8191;

/// Parses a list. None: it has another form, or too great a number.
pub fn parse(list: &str) -> Option<CpuNumbers> {
    let mut numbers = CpuNumbers::new();
    for range in list.trim().split(',').filter(|range| !range.is_empty()) {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let last = last.trim().parse().ok().filter(|last| *last <= GREATEST)?;
        numbers.extend(first.trim().parse::<u32>().ok()?..=last);
    }
    Some(numbers)
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
        for wrong in ["a", "0-", "1-x", "0-8192", "-1", "4294967296"] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_list_is_as_short_as_the_kernels() {
        assert_eq!(format(&[0, 1, 2, 5, 7, 8].into()), "0-2,5,7-8");
        assert_eq!(format(&CpuNumbers::new()), "");
    }
}
