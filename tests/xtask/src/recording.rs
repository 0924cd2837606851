//! A recording of a terminal: what was written to it and when. It is kept as an asciicast, which players of asciinema
//! play, and as a picture that plays it.

use std::fmt::Write as _;
use std::time::Instant;

use serde_json::json;

use crate::svg::{self, Svg};

/// The columns of the terminal. Longer lines are broken.
const COLUMNS: usize = 100;

/// Columns of output stay where they are: all spaces are kept.
const FONT: &str = "font-family=\"monospace\" font-size=\"13\" xml:space=\"preserve\"";
const CHARACTER: f64 = 7.9;
const LINE: f64 = 18.0;
/// From the top of a line to the foot of its letters.
const BASE: f64 = 13.0;
const MARGIN: f64 = 14.0;
const GROUND: &str = "#1b1f24";
const OUTPUT: &str = "fill=\"#d6dce2\"";
const COMMAND: &str = "fill=\"#8fd18f\" font-weight=\"bold\"";
/// A line appears at its time. A viewer that shows no animations shows all lines at once.
const STYLE: &str = "\
<style>
text { animation: appear 1ms both }
@keyframes appear { from { opacity: 0 } to { opacity: 1 } }
@media (prefers-reduced-motion: reduce) { text { animation: none } }
</style>
";

/// What a command line begins with.
pub(crate) const PROMPT: &str = "$ ";

/// What was written since its start.
pub(crate) struct Recording {
    start: Instant,
    events: Vec<Event>,
}

/// Something that was written at once.
#[derive(Debug, Clone, PartialEq)]
struct Event {
    /// Since the start.
    seconds: f64,
    text: String,
}

/// A line of the screen.
#[derive(Debug, Clone, PartialEq)]
struct Line {
    /// When it was begun, in seconds since the start.
    seconds: f64,
    text: String,
    /// It belongs to a line before it, which was too long.
    is_continued: bool,
}

impl Recording {
    pub(crate) fn begin() -> Recording {
        Recording { start: Instant::now(), events: Vec::new() }
    }

    /// Something is written now.
    pub(crate) fn add(&mut self, text: &str) {
        self.events.push(Event { seconds: self.start.elapsed().as_secs_f64(), text: text.to_owned() });
    }

    /// The recording as an asciicast of version 2. `title` is shown by players.
    pub(crate) fn asciicast(&self, title: &str) -> String {
        let rows = self.lines().len() + 1;
        let mut cast = json!({"version": 2, "width": COLUMNS, "height": rows, "title": title}).to_string();
        cast.push('\n');
        for Event { seconds, text } in &self.events {
            let event = json!([(seconds * 1000.0).round() / 1000.0, "o", text.replace('\n', "\r\n")]);
            // Writing to a string does not fail.
            let _ = writeln!(cast, "{event}");
        }
        cast
    }

    /// The recording as a picture, which shows a line when it was begun.
    pub(crate) fn picture(&self, title: &str, description: &str) -> String {
        let lines = self.lines();
        let width = 2.0 * MARGIN + CHARACTER * COLUMNS as f64;
        let height = 2.0 * MARGIN + LINE * lines.len() as f64;
        let mut svg = Svg::new(width, height, FONT, &format!("{}{STYLE}", svg::head(title, description)));
        svg.rect([0.0, 0.0], [width, height], GROUND);
        let mut is_command = false;
        for (index, Line { seconds, text, is_continued }) in lines.iter().enumerate() {
            is_command = if *is_continued { is_command } else { text.starts_with(PROMPT) };
            let style = if is_command { COMMAND } else { OUTPUT };
            let at = [MARGIN, MARGIN + LINE * index as f64 + BASE];
            if !text.is_empty() {
                svg.text(at, text, &format!("{style} style=\"animation-delay: {seconds:.2}s\""));
            }
        }
        svg.finish()
    }

    /// The screen at the end, as if it had room for all lines.
    fn lines(&self) -> Vec<Line> {
        let line = |seconds, is_continued| Line { seconds, text: String::new(), is_continued };
        let (mut lines, mut last) = (Vec::new(), None);
        for Event { seconds, text } in &self.events {
            for character in text.chars() {
                let mut current = last.take().unwrap_or_else(|| line(*seconds, false));
                if character == '\n' {
                    lines.push(current);
                    continue;
                }
                if current.text.chars().count() == COLUMNS {
                    lines.push(current);
                    current = line(*seconds, true);
                }
                // What a terminal does with the others is not shown.
                if !character.is_control() {
                    current.text.push(character);
                }
                last = Some(current);
            }
        }
        lines.extend(last);
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recording(events: &[(f64, &str)]) -> Recording {
        let event = |(seconds, text): &(f64, &str)| Event { seconds: *seconds, text: (*text).to_owned() };
        Recording { start: Instant::now(), events: events.iter().map(event).collect() }
    }

    #[test]
    fn a_line_appears_when_it_was_begun() {
        let recording =
            recording(&[(0.5, "$ uname -r\n"), (1.25, "6.12"), (2.0, "-bulkhead\n"), (2.5, "\na < b")]);
        let picture = recording.picture("A demo", "One run.");
        for part in [
            "animation-delay: 0.50s\">$ uname -r</text>",
            "animation-delay: 1.25s\">6.12-bulkhead</text>",
            "animation-delay: 2.50s\">a &lt; b</text>",
            "<desc>\nOne run.\n</desc>",
        ] {
            assert!(picture.contains(part), "no {part} in {picture}");
        }
        assert_eq!(picture.matches("<text ").count(), 3, "an empty line is no text");
    }

    #[test]
    fn a_long_command_is_broken_and_stays_a_command() {
        let command = format!("$ {}", "x".repeat(COLUMNS));
        let recording = recording(&[(0.0, &command), (1.0, "\nout\n")]);
        let lines: Vec<_> =
            recording.lines().into_iter().map(|line| (line.text, line.is_continued)).collect();
        assert_eq!(lines[1..], [("xx".to_owned(), true), ("out".to_owned(), false)]);
        let picture = recording.picture("", "");
        assert_eq!((picture.matches(COMMAND).count(), picture.matches(OUTPUT).count()), (2, 1), "{picture}");
    }

    #[test]
    fn players_get_a_head_and_an_event_a_line() {
        let cast = recording(&[(0.0, "$ echo\n"), (1.23456, "\u{1b}[31m\"x\"\n")]).asciicast("A demo");
        let lines: Vec<serde_json::Value> =
            cast.lines().filter_map(|it| serde_json::from_str(it).ok()).collect();
        assert_eq!(lines[0], json!({"version": 2, "width": 100, "height": 3, "title": "A demo"}));
        assert_eq!(lines[1..], [json!([0.0, "o", "$ echo\r\n"]), json!([1.235, "o", "\u{1b}[31m\"x\"\r\n"])]);
    }
}
