//! Draws what was compared as bars, with all samples: docs/pictures/benchmarks.svg.

use anyhow::{Context, Result};

use super::interval::median;
use super::{COMPARISONS, Comparison, Report};
use crate::svg::{self, Svg};

pub(super) const PICTURE: &str = "docs/pictures/benchmarks.svg";

/// What the page says of the picture.
pub(super) const SECTION: &str = "\
![medians and samples of what was compared](pictures/benchmarks.svg)

A bar is a median, and a dot is a sample. The line goes from the smallest sample to the largest. Each comparison has a
scale of its own, which begins at 0.
";

const FONT: &str = "font-family=\"sans-serif\" font-size=\"12\"";
const WIDTH: f64 = 920.0;
/// A comparison has a title and two bars.
const TITLE: f64 = 22.0;
const BAR: f64 = 18.0;
const GAP: f64 = 14.0;
const MARGIN: f64 = 10.0;
/// Where the bars begin, and where the largest sample is. Names are at their left, and numbers at their right.
const LEFT: f64 = 210.0;
const RIGHT: f64 = 680.0;
const OURS: &str = "#1f6fb2";
const THEIRS: &str = "#9a9a9a";
const SAMPLE: &str = "#222";

/// The picture of a report. `host` is about the host of the run.
pub(super) fn draw(report: &Report, host: &str) -> Result<String> {
    let comparisons: Vec<_> = COMPARISONS.iter().filter(|it| it.was_measured(report)).collect();
    let row = TITLE + 2.0 * BAR + GAP;
    let height = 2.0 * MARGIN + row * comparisons.len() as f64 - GAP;
    let head = svg::head("What was compared: medians and samples", &format!("The host was {host}."));
    let mut svg = Svg::new(WIDTH, height, FONT, &head);
    for (index, comparison) in comparisons.into_iter().enumerate() {
        rows(&mut svg, comparison, report, MARGIN + row * index as f64)?;
    }
    Ok(svg.finish())
}

fn rows(svg: &mut Svg, comparison: &Comparison, report: &Report, top: f64) -> Result<()> {
    // The code style of the page.
    svg.text([MARGIN, top + 12.0], &comparison.what.replace('`', ""), "font-weight=\"bold\"");
    let sides = [
        ("Bulkhead", report.sums(comparison.ours)?, OURS),
        (comparison.other, report.sums(comparison.theirs)?, THEIRS),
    ];
    let most = sides.iter().flat_map(|(_, samples, _)| samples).copied().fold(0.0, f64::max);
    let x = |value: f64| if most > 0.0 { LEFT + (RIGHT - LEFT) * value / most } else { LEFT };
    for (index, (name, samples, colour)) in sides.into_iter().enumerate() {
        let top = top + TITLE + BAR * index as f64;
        let middle = top + (BAR - 4.0) / 2.0;
        let least = samples.iter().copied().fold(f64::INFINITY, f64::min);
        let largest = samples.iter().copied().fold(0.0, f64::max);
        let median = median(&samples).with_context(|| format!("no samples of {}", comparison.what))?;
        svg.text([LEFT - 8.0, top + 11.0], name, "text-anchor=\"end\"");
        svg.rect([LEFT, top], [x(median) - LEFT, BAR - 4.0], colour);
        svg.line([x(least), middle], [x(largest), middle], SAMPLE);
        for sample in samples {
            svg.circle([x(sample), middle], 2.0, SAMPLE);
        }
        let numbers = format!("{median:.1} {} ({least:.1} to {largest:.1})", comparison.unit());
        svg.text([RIGHT + 10.0, top + 11.0], &numbers, "");
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn report(ours: &[f64], theirs: &[f64]) -> Report {
        let series = [("exec bulkhead ms", ours), ("exec runc ms", theirs)];
        let series = series.map(|(name, samples)| (name.to_owned(), samples.to_vec()));
        Report { facts: BTreeMap::new(), series: series.into() }
    }

    #[test]
    fn a_bar_is_a_median_and_the_line_goes_over_all_samples() {
        let svg = draw(&report(&[100.0, 50.0, 60.0], &[150.0, 200.0, 100.0]), "emulated").unwrap();
        for part in [
            "<text x=\"10.0\" y=\"22.0\" font-weight=\"bold\">ctr task exec of true</text>",
            // 60 of the 200 that are the largest sample, and 150 of them.
            "<rect x=\"210.0\" y=\"32.0\" width=\"141.0\" height=\"14.0\" fill=\"#1f6fb2\"/>",
            "<rect x=\"210.0\" y=\"50.0\" width=\"352.5\" height=\"14.0\" fill=\"#9a9a9a\"/>",
            "<line x1=\"327.5\" y1=\"39.0\" x2=\"445.0\" y2=\"39.0\" stroke=\"#222\"/>",
            ">60.0 ms (50.0 to 100.0)</text>",
            ">150.0 ms (100.0 to 200.0)</text>",
            "The host was emulated.",
        ] {
            assert!(svg.contains(part), "no {part} in {svg}");
        }
        assert_eq!(svg.matches("<circle ").count(), 6);
        assert_eq!(svg.matches("font-weight").count(), 1, "what was not measured is not drawn");
    }

    #[test]
    fn samples_of_zero_have_bars_without_a_length() {
        let svg = draw(&report(&[0.0], &[0.0]), "emulated").unwrap();
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }
}
