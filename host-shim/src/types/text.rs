//! Texts of others, made fit for a log or a terminal.

/// Bytes kept of one line.
pub(crate) const LINE: usize = 4096;

/// A text of somebody else as one line of a log, or of a terminal that shows an error: cut to [`LINE`] bytes, and
/// without characters that would do something there.
pub fn one_line(text: &str) -> String {
    let cut = text.get(..text.floor_char_boundary(LINE)).unwrap_or_default();
    cut.chars().map(|c| if c.is_control() || is_unseen(c) { ' ' } else { c }).collect()
}

/// Whether a character changes how others are shown, and is not seen itself: of no width, for the direction of
/// writing, or the end of a line by another name.
fn is_unseen(c: char) -> bool {
    matches!(
        c,
        '\u{ad}' | '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}'
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_does_nothing_to_a_terminal() {
        assert_eq!(one_line("a\u{1b}[2J\r\nb\u{9b}c"), "a [2J  b c");
        assert_eq!(one_line("gpj.\u{202e}exe\u{2028}\u{200b}é"), "gpj. exe  é");
        assert_eq!(one_line("a\u{ad}b\u{61c}c\u{206a}d\u{206f}e"), "a b c d e");
        assert_eq!(one_line(&"\u{20ac}".repeat(LINE)).len(), LINE / 3 * 3);
    }
}
