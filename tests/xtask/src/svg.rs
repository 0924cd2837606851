//! The parts of a picture. All lengths are those of its view box.

use std::fmt::Write as _;

use crate::page::wrapped;

/// A picture that is being drawn, on a white ground.
pub(crate) struct Svg(String);

impl Svg {
    /// `head` is the title, the description and what else is to come before the drawing.
    pub(crate) fn new(width: f64, height: f64, font: &str, head: &str) -> Svg {
        let mut svg = Svg(format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" {font}>\n{head}"
        ));
        svg.rect([0.0, 0.0], [width, height], "white");
        svg
    }

    /// A rectangle, from its upper left corner.
    pub(crate) fn rect(&mut self, [x, y]: [f64; 2], [width, height]: [f64; 2], colour: &str) {
        self.add(format_args!(
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" fill=\"{colour}\"/>"
        ));
    }

    pub(crate) fn line(&mut self, [x1, y1]: [f64; 2], [x2, y2]: [f64; 2], colour: &str) {
        self.add(format_args!(
            "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"{colour}\"/>"
        ));
    }

    pub(crate) fn circle(&mut self, [x, y]: [f64; 2], radius: f64, colour: &str) {
        self.add(format_args!("<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{radius}\" fill=\"{colour}\"/>"));
    }

    pub(crate) fn polyline(&mut self, points: &[[f64; 2]], colour: &str) {
        let points: Vec<_> = points.iter().map(|[x, y]| format!("{x:.1},{y:.1}")).collect();
        self.add(format_args!(
            "<polyline fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.2\" points=\"{}\"/>",
            points.join(" ")
        ));
    }

    /// Text whose base line begins at a point, unless `attributes` say something else.
    pub(crate) fn text(&mut self, [x, y]: [f64; 2], text: &str, attributes: &str) {
        let space = if attributes.is_empty() { "" } else { " " };
        let text = escaped(text);
        self.add(format_args!("<text x=\"{x:.1}\" y=\"{y:.1}\"{space}{attributes}>{text}</text>"));
    }

    pub(crate) fn finish(mut self) -> String {
        self.0.push_str("</svg>\n");
        self.0
    }

    fn add(&mut self, element: std::fmt::Arguments<'_>) {
        // Writing to a string does not fail.
        let _ = writeln!(self.0, "{element}");
    }
}

/// Where a picture has the sentences about its run.
const BEFORE_DESCRIPTION: &str = "<desc>\n";
const AFTER_DESCRIPTION: &str = "\n</desc>\n";

/// The title of a picture, and sentences about it, for [`Svg::new`].
pub(crate) fn head(title: &str, description: &str) -> String {
    let description = wrapped(&escaped(description));
    format!("<title>{}</title>\n{BEFORE_DESCRIPTION}{description}{AFTER_DESCRIPTION}", escaped(title))
}

/// The sentences about a picture.
pub(crate) fn description(picture: &str) -> Option<&str> {
    let (_, rest) = picture.split_once(BEFORE_DESCRIPTION)?;
    Some(rest.split_once(AFTER_DESCRIPTION)?.0)
}

/// Text as XML has it.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_escaped_and_the_description_is_found() {
        let mut svg = Svg::new(10.0, 20.0, "font-size=\"12\"", &head("A & B", "One run."));
        svg.text([1.0, 2.0], "a < b", "");
        let svg = svg.finish();
        assert!(svg.contains("<title>A &amp; B</title>") && svg.contains(">a &lt; b</text>"), "{svg}");
        assert_eq!(description(&svg), Some("One run."));
        assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"), "{svg}");
    }
}
