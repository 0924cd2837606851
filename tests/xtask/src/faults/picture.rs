//! Curves as an SVG picture.

use crate::svg::Svg;

const WIDTH: f64 = 720.0;
const PANEL: f64 = 120.0;
/// Around the curve of a panel: for its title, and for the numbers at its left.
const TOP: f64 = 28.0;
const LEFT: f64 = 80.0;
const RIGHT: f64 = 16.0;
/// Below the last panel.
const BOTTOM: f64 = 28.0;

/// A curve: its title and its values, at equal distances.
pub(super) struct Curve {
    pub(super) title: String,
    pub(super) values: Vec<f64>,
}

/// The curves, one below the other. Each has a scale of its own, which begins at 0. `below` names the right end.
pub(super) fn draw(curves: &[Curve], below: &str) -> String {
    let height = (TOP + PANEL) * curves.len() as f64 + BOTTOM;
    let mut svg = Svg::new(WIDTH, height, "font-family=\"sans-serif\" font-size=\"12\"", "");
    for (index, curve) in curves.iter().enumerate() {
        panel(&mut svg, curve, index as f64 * (TOP + PANEL));
    }
    svg.text([WIDTH - RIGHT, height - 8.0], below, "text-anchor=\"end\"");
    svg.finish()
}

fn panel(svg: &mut Svg, Curve { title, values }: &Curve, top: f64) {
    let most = values.iter().copied().fold(0.0, f64::max);
    let scale = if most > 0.0 { most * 1.15 } else { 1.0 };
    let (low, high) = (top + TOP + PANEL, top + TOP);
    let y = |value: f64| low - (low - high) * value / scale;
    let step = (WIDTH - LEFT - RIGHT) / (values.len().saturating_sub(1).max(1)) as f64;
    svg.text([LEFT, high - 8.0], title, "font-weight=\"bold\"");
    for (value, colour) in [(0.0, "#444"), (most, "#ccc")] {
        svg.line([LEFT, y(value)], [WIDTH - RIGHT, y(value)], colour);
        svg.text([LEFT - 6.0, y(value) + 4.0], &format!("{value:.0}"), "text-anchor=\"end\"");
    }
    let points: Vec<_> =
        values.iter().enumerate().map(|(index, value)| [LEFT + step * index as f64, y(*value)]).collect();
    svg.polyline(&points, "#1f6fb2");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_curve_begins_at_the_left_and_its_highest_value_is_named() {
        let curve = Curve { title: "mounts".into(), values: vec![0.0, 40.0, 20.0] };
        let svg = draw(&[curve], "after 6 containers");
        assert!(svg.contains("points=\"80.0,148.0 "), "{svg}");
        assert!(svg.contains(">40</text>") && svg.contains("after 6 containers"), "{svg}");
        assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
    }

    #[test]
    fn what_is_zero_all_the_time_can_be_drawn() {
        let svg = draw(&[Curve { title: "x".into(), values: vec![0.0] }], "containers");
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }
}
