//! Speeds as bars on a logarithmic axis, as an SVG picture.

use std::fmt::Write as _;

use anyhow::{Context, Result, ensure};

use super::Speed;

const WIDTH: f64 = 1000.0;
/// A kind of work has a bar for each side, and room to the next.
const BAR: f64 = 10.0;
const GAP: f64 = 8.0;
/// Above the first row, and below the last.
const TOP: f64 = 56.0;
const BOTTOM: f64 = 16.0;
/// Where the axis begins and ends. Names are at its left, and speeds at its right.
const LEFT: f64 = 470.0;
const RIGHT: f64 = 930.0;
/// Names of kinds of work, and speeds.
const TEXT: f64 = 11.0;

/// Who is compared with runc, in the order of the bars of a row, and the colours.
pub(super) const SIDES: [(&str, &str); 2] = [("QEMU", "#c8641e"), ("Bulkhead", "#1f6fb2")];

/// A kind of work, and the speed of each side.
pub(super) struct Bars<'r> {
    pub(super) what: &'r str,
    pub(super) speeds: [Speed; 2],
}

/// A bar begins at 1, the speed of runc. A line on it is the interval.
pub(super) fn draw(rows: &[Bars<'_>], caption: &str) -> Result<String> {
    let axis = Axis::of(rows)?;
    let row_height = 2.0 * BAR + GAP;
    let height = TOP + row_height * rows.len() as f64 + BOTTOM;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<title>Speeds of files and network, where runc is 1</title>\n<desc>{caption}</desc>\n\
         <rect width=\"{WIDTH}\" height=\"{height}\" fill=\"white\"/>\n"
    );
    for (index, (side, colour)) in SIDES.iter().enumerate() {
        let at = LEFT + 90.0 * index as f64;
        writeln!(svg, "<rect x=\"{at}\" y=\"10\" width=\"12\" height=\"12\" fill=\"{colour}\"/>")?;
        writeln!(svg, "<text x=\"{}\" y=\"21\" fill=\"black\">{side}</text>", at + 18.0)?;
    }
    for tick in axis.ticks() {
        let (x, low) = (axis.x(tick), height - BOTTOM);
        let colour = if tick == 1.0 { "#444" } else { "#ccc" };
        writeln!(svg, "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{TOP}\" y2=\"{low}\" stroke=\"{colour}\"/>")?;
        let anchor = "fill=\"black\" text-anchor=\"middle\"";
        writeln!(svg, "<text x=\"{x:.1}\" y=\"{}\" {anchor}>{tick}</text>", TOP - 8.0)?;
    }
    for (index, Bars { what, speeds }) in rows.iter().enumerate() {
        let top = TOP + row_height * index as f64 + GAP / 2.0;
        let what = what.replace('&', "&amp;").replace('<', "&lt;");
        let style = format!("font-size=\"{TEXT}\" fill=\"black\"");
        writeln!(svg, "<text x=\"8\" y=\"{}\" {style}>{what}</text>", top + BAR + 4.0)?;
        for (index, (speed, (_, colour))) in speeds.iter().zip(SIDES).enumerate() {
            bar(&mut svg, &axis, speed, top + BAR * index as f64, colour)?;
        }
    }
    svg.push_str("</svg>\n");
    Ok(svg)
}

fn bar(svg: &mut String, axis: &Axis, speed: &Speed, top: f64, colour: &str) -> Result<()> {
    let (one, end) = (axis.x(1.0), axis.x(speed.median));
    writeln!(
        svg,
        "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{}\" fill=\"{colour}\"/>",
        one.min(end),
        top + 1.0,
        (end - one).abs().max(1.0),
        BAR - 2.0
    )?;
    if let Some(interval) = speed.interval {
        let (low, high, middle) = (axis.x(interval.low), axis.x(interval.high), top + BAR / 2.0);
        writeln!(
            svg,
            "<line x1=\"{low:.1}\" x2=\"{high:.1}\" y1=\"{middle:.1}\" y2=\"{middle:.1}\" stroke=\"black\"/>"
        )?;
    }
    writeln!(
        svg,
        "<text x=\"{}\" y=\"{:.1}\" font-size=\"{}\" fill=\"black\" text-anchor=\"end\">{:.3}</text>",
        WIDTH - 8.0,
        top + BAR - 1.0,
        TEXT - 1.0,
        speed.median
    )?;
    Ok(())
}

/// A logarithmic axis, from one tick to another.
struct Axis {
    least: f64,
    most: f64,
}

/// The ticks of a power of ten.
const TICKS: [f64; 3] = [1.0, 2.0, 5.0];

impl Axis {
    /// It holds all speeds, their intervals, and 1.
    fn of(rows: &[Bars<'_>]) -> Result<Self> {
        let speeds = rows.iter().flat_map(|row| &row.speeds);
        let ends = speeds.flat_map(|speed| {
            let interval = speed.interval.map_or([speed.median; 2], |interval| [interval.low, interval.high]);
            [interval[0], interval[1], speed.median]
        });
        let (mut low, mut high) = (1.0_f64, 1.0_f64);
        for end in ends {
            ensure!(end.is_normal() && end > 0.0, "a speed of {end} is not on a logarithmic axis");
            (low, high) = (low.min(end), high.max(end));
        }
        let least =
            all_ticks().rev().find(|tick| *tick <= low).context("a speed is too small to be drawn")?;
        let most = all_ticks().find(|tick| *tick >= high).context("a speed is too large to be drawn")?;
        // An axis has a length.
        Ok(Self { least, most: if most > least { most } else { 2.0 * least } })
    }

    fn x(&self, speed: f64) -> f64 {
        LEFT + (RIGHT - LEFT) * (speed / self.least).ln() / (self.most / self.least).ln()
    }

    fn ticks(&self) -> impl Iterator<Item = f64> {
        let range = self.least..=self.most;
        all_ticks().filter(move |tick| range.contains(tick))
    }
}

/// From 0.0001 to 5000, each as precise as its text.
fn all_ticks() -> impl DoubleEndedIterator<Item = f64> {
    (-4..4).flat_map(|power: i32| {
        TICKS.map(|tick| {
            let ten = 10.0_f64.powi(power.abs());
            if power < 0 { tick / ten } else { tick * ten }
        })
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::Interval;
    use super::*;

    fn speed(median: f64) -> Speed {
        let interval = Interval { low: median / 2.0, high: median * 1.5, coverage: 0.96 };
        Speed { median, interval: Some(interval), pairs: 15 }
    }

    #[test]
    fn a_bar_goes_from_runc_to_the_speed_with_its_interval() {
        let rows = [Bars { what: "a < b", speeds: [speed(0.1), speed(0.4)] }];
        let svg = draw(&rows, "A run.").unwrap();
        // From 0.05 to 1: 0.1 is at ln 2 / ln 20 of the axis.
        for part in [
            "<rect x=\"576.4\" y=\"61.0\" width=\"353.6\" height=\"8\" fill=\"#c8641e\"/>\n\
             <line x1=\"470.0\" x2=\"638.7\" y1=\"65.0\" y2=\"65.0\" stroke=\"black\"/>",
            ">0.05</text>",
            ">0.2</text>",
            ">0.100</text>",
            ">a &lt; b</text>",
            "<desc>A run.</desc>",
        ] {
            assert!(svg.contains(part), "{part}\n{svg}");
        }
        assert!(!svg.contains(">0.02</text>") && !svg.contains(">2</text>"), "{svg}");
    }

    #[test]
    fn what_is_as_fast_as_runc_and_what_is_faster_is_drawn_too() {
        let same = Speed { median: 1.0, interval: None, pairs: 1 };
        for speeds in [[same, same], [same, speed(30.0)]] {
            let svg = draw(&[Bars { what: "work", speeds }], "").unwrap();
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        }
    }

    #[test]
    fn a_speed_without_a_place_on_the_axis_is_an_error() {
        for median in [0.0, f64::NAN, 1e-9, 1e9] {
            let speeds = [Speed { median, interval: None, pairs: 1 }; 2];
            assert!(draw(&[Bars { what: "work", speeds }], "").is_err(), "{median}");
        }
    }
}
