//! Listings as tables for people and as JSON for programs.

use std::io::{self, Write};

use comfy_table::{Table, presets};
use serde::Serialize;

/// What an absent value is shown as.
pub(crate) const NONE: &str = "-";

/// Prints `rows` as JSON, or as a table with a line for each.
pub(crate) fn listing<T: Serialize, const N: usize>(
    out: &mut impl Write,
    is_json: bool,
    rows: &[T],
    header: [&str; N],
    cells: impl Fn(&T) -> [String; N],
) -> io::Result<()> {
    if is_json {
        return json(out, &rows);
    }
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(header);
    for row in rows {
        table.add_row(cells(row));
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    for line in table.to_string().lines() {
        writeln!(out, "{}", line.trim_end())?;
    }
    Ok(())
}

/// Prints a value as JSON.
pub(crate) fn json(out: &mut impl Write, value: &impl Serialize) -> io::Result<()> {
    serde_json::to_writer_pretty(&mut *out, value)?;
    writeln!(out)
}

/// A value, or the sign for none.
pub(crate) fn or_none<T: ToString>(value: Option<T>) -> String {
    value.map_or_else(|| NONE.into(), |value| value.to_string())
}

/// Bytes in MiB, rounded to a tenth.
pub(crate) fn mib(bytes: u64) -> String {
    let tenths = (u128::from(bytes) * 10 + (1 << 19)) >> 20;
    format!("{}.{} MiB", tenths / 10, tenths % 10)
}

/// Seconds in their largest two units.
pub(crate) fn age(seconds: u64) -> String {
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    match () {
        () if days > 0 => format!("{days}d{}h", hours % 24),
        () if hours > 0 => format!("{hours}h{}m", minutes % 60),
        () if minutes > 0 => format!("{minutes}m{}s", seconds % 60),
        () => format!("{seconds}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_aligned_columns_and_json_has_the_values() {
        let (mut table, mut values) = (Vec::new(), Vec::new());
        let rows = [("a", 1), ("long", 22)];
        let cells = |(name, number): &(&str, i32)| [(*name).to_owned(), number.to_string()];
        listing(&mut table, false, &rows, ["NAME", "NUMBER"], cells).unwrap();
        assert_eq!(String::from_utf8(table).unwrap(), "NAME  NUMBER\na     1\nlong  22\n");
        listing(&mut values, true, &rows, ["NAME", "NUMBER"], cells).unwrap();
        let values: serde_json::Value = serde_json::from_slice(&values).unwrap();
        assert_eq!(values, serde_json::json!([["a", 1], ["long", 22]]));
    }

    #[test]
    fn sizes_and_ages_are_short() {
        assert_eq!(
            [0, 1 << 20, (1 << 20) + (1 << 19), u64::MAX].map(mib),
            ["0.0 MiB", "1.0 MiB", "1.5 MiB", "17592186044416.0 MiB"]
        );
        assert_eq!([59, 61, 3_661, 90_000].map(age), ["59s", "1m1s", "1h1m", "1d1h"]);
    }
}
