//! Lines of the pages that the tasks write: prose has at most 120 columns.

use std::time::SystemTime;

/// The most columns of a line of prose, in pages and in the descriptions of pictures.
const MOST_COLUMNS: usize = 120;

/// The day of a time, such as `2026-11-26`.
pub(crate) fn day(time: SystemTime) -> String {
    let mut day = humantime::format_rfc3339_seconds(time).to_string();
    day.truncate("2026-11-26".len());
    day
}

/// Breaks the lines of prose that are too long. Rows of tables, headings, pictures and code stay as they are.
pub(crate) fn filled(page: &str) -> String {
    let is_prose = |line: &str| !line.starts_with(['|', '#', '!']) && !line.starts_with("    ");
    let is_too_long = |line: &str| line.chars().count() > MOST_COLUMNS && is_prose(line);
    let line = |line: &str| if is_too_long(line) { wrapped(line) } else { line.to_owned() };
    page.lines().map(line).flat_map(|line| [line, "\n".to_owned()]).collect()
}

/// The words of a text in lines. A word that is longer than a line has a line of its own.
pub(crate) fn wrapped(text: &str) -> String {
    let mut lines = String::new();
    let mut columns = 0;
    for word in text.split_whitespace() {
        let length = word.chars().count();
        if columns > 0 && columns + 1 + length > MOST_COLUMNS {
            lines.push('\n');
            columns = 0;
        } else if columns > 0 {
            lines.push(' ');
            columns += 1;
        }
        lines.push_str(word);
        columns += length;
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prose_is_broken_and_tables_are_not() {
        let long = "word ".repeat(30);
        let row = format!("| {long}|");
        let page = format!("# Title\n\n{}\n\n{row}\nshort\n", long.trim_end());
        let filled = filled(&page);
        assert_eq!(
            filled.lines().filter(|line| line.chars().count() > MOST_COLUMNS).collect::<Vec<_>>(),
            [row]
        );
        assert_eq!(
            filled.split_whitespace().collect::<Vec<_>>(),
            page.split_whitespace().collect::<Vec<_>>()
        );
        assert!(filled.ends_with("|\nshort\n"), "{filled}");
    }

    #[test]
    fn a_line_of_120_columns_stays() {
        let line = format!("{} {}", "é".repeat(59), "x".repeat(60));
        assert_eq!(filled(&format!("{line}\n")), format!("{line}\n"));
        assert_eq!(wrapped(&format!("{line}x")), format!("{}\n{}", "é".repeat(59), "x".repeat(61)));
    }
}
