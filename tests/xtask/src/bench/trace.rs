//! `cargo xtask bench trace`: draws the start of a pod, which containerd's CRI service has asked for, and shows the
//! picture in docs/benchmarks.md.

use std::fs;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use crate::cache::Cache;
use crate::dist::{self, Profile, source_dir};
use crate::e2e::E2E;
use crate::progress::step;
use crate::rig::{Accelerator, Io, Limit, Payload, Rig, Session};
use crate::svg::{self, Svg};
use crate::tools::Tools;

const PAGE: &str = "docs/benchmarks.md";
const PICTURE: &str = "docs/pictures/pod-start.svg";
const HEADING: &str = "\n## The start of a pod\n";
/// What follows it on the page.
pub(super) const SAMPLES: &str = "\n## All samples\n";
const LIMIT: Duration = Duration::from_secs(10 * 60);

/// What `bulkhead trace --json` prints.
#[derive(Debug, Deserialize)]
struct Trace {
    vm: String,
    phases: Vec<Phase>,
}

#[derive(Debug, Deserialize)]
struct Phase {
    step: String,
    place: String,
    begin_us: u64,
    duration_us: u64,
}

impl Phase {
    fn end(&self) -> u64 {
        self.begin_us.saturating_add(self.duration_us)
    }

    /// Whether it is the whole of a request. The other phases are parts of one.
    fn is_request(&self) -> bool {
        matches!(self.step.as_str(), "create" | "start")
    }
}

pub(super) fn run(cache: &Cache, tools: &Tools) -> Result<()> {
    let dist = dist::build(cache, tools, Profile::Quick)?;
    let payload = Payload::new(cache, &[dist.put()])?;
    drop(dist);
    let rig = Rig::ensure(cache, tools)?;
    let mut session = step("starting the host", || rig.start(&payload))?;
    let trace = traced(&mut session)?;
    session.finish();
    let today = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
    let today = today.split('T').next().unwrap_or_default();
    let path = source_dir().join(PICTURE);
    fs::write(&path, draw(&trace, &caption(&trace, &Accelerator::describe(), today))?)
        .with_context(|| format!("cannot write {PICTURE}"))?;
    let path = source_dir().join(PAGE);
    let page = fs::read_to_string(&path).with_context(|| format!("cannot read {PAGE}"))?;
    fs::write(&path, with_section(&page, &section()?)).with_context(|| format!("cannot write {PAGE}"))
}

/// Runs a pod, and asks how it started.
fn traced(session: &mut Session) -> Result<Trace> {
    let mut output = Vec::new();
    let argv = [E2E, "trace"].map(str::to_owned);
    let status = session.run(&argv, Io::Captured(&mut output), Limit::Whole(LIMIT))?;
    let text = String::from_utf8_lossy(&output);
    ensure!(status == 0, "bulkhead-e2e trace exits with status {status}:\n{text}");
    let json = text.find('{').map_or(&*text, |at| &text[at..]);
    serde_json::from_str(json).with_context(|| format!("cannot understand bulkhead trace: {text}"))
}

/// The sentence below the picture.
fn caption(trace: &Trace, host: &str, date: &str) -> String {
    let whole = trace.phases.iter().map(Phase::end).max().unwrap_or(0) as f64 / 1000.0;
    format!(
        "One start of a sandbox by the CRI, whose VM is a {}: {whole:.0} ms. The host was {host}. The run was of \
         {date}, with the profile that tests use.",
        trace.vm
    )
}

/// The section of the page, from the picture that is there.
pub(super) fn section() -> Result<String> {
    let picture =
        fs::read_to_string(source_dir().join(PICTURE)).with_context(|| format!("cannot read {PICTURE}"))?;
    // The picture is the only source of the sentence about its run.
    let caption = svg::description(&picture).with_context(|| format!("{PICTURE} says nothing of its run"))?;
    Ok(format!(
        "{HEADING}\nDrawn by `cargo xtask bench trace`. Where the host is emulated, compare the lengths and forget the \
         times.\n[Operations](operations.md#the-phases-of-a-start) says what each phase is.\n\n![the phases of the start of a pod](pictures/pod-start.svg)\n\n{}\n",
        caption
    ))
}

/// The page with this section in the place of the one that it has, or before the samples.
fn with_section(page: &str, section: &str) -> String {
    let Some((before, rest)) = page.split_once(HEADING) else {
        let (before, samples) = page.split_at(page.find(SAMPLES).unwrap_or(page.len()));
        return format!("{before}{section}{samples}");
    };
    let after = rest.find("\n## ").map_or("", |at| &rest[at..]);
    format!("{before}{section}{after}")
}

const FONT: &str = "font-family=\"sans-serif\" font-size=\"12\"";
const WIDTH: f64 = 760.0;
const ROW: f64 = 20.0;
/// Above the first row, and below the last.
const TOP: f64 = 56.0;
const BOTTOM: f64 = 16.0;
/// Where the bars begin and end. Names are at their left, and durations at their right.
const LEFT: f64 = 150.0;
const RIGHT: f64 = 660.0;
/// The places where a phase happens, and their colours. The text beside a bar does not depend on colours.
const PLACES: [(&str, &str); 3] = [("shim", "#1f6fb2"), ("vmm", "#c8641e"), ("agent", "#2e8b57")];

/// The phases as bars, one below the other.
fn draw(trace: &Trace, caption: &str) -> Result<String> {
    let whole = trace.phases.iter().map(Phase::end).max().filter(|end| *end > 0).context("no phases")?;
    let height = TOP + ROW * trace.phases.len() as f64 + BOTTOM;
    let x = |micros: u64| LEFT + (RIGHT - LEFT) * micros as f64 / whole as f64;
    let mut svg = Svg::new(WIDTH, height, FONT, &svg::head("The phases of the start of a pod", caption));
    for (index, (place, colour)) in PLACES.iter().enumerate() {
        let at = LEFT + 90.0 * index as f64;
        svg.rect([at, 10.0], [12.0, 12.0], colour);
        svg.text([at + 18.0, 21.0], place, "");
    }
    for quarter in 0..=4 {
        let micros = whole * quarter / 4;
        let (at, millis) = (x(micros), micros as f64 / 1000.0);
        svg.line([at, TOP], [at, height - BOTTOM], "#ccc");
        svg.text([at, TOP - 8.0], &format!("{millis:.0} ms"), "text-anchor=\"middle\"");
    }
    for (index, phase) in trace.phases.iter().enumerate() {
        let place = PLACES.iter().find(|(place, _)| *place == phase.place);
        let (_, colour) = place.with_context(|| format!("{} is in {}", phase.step, phase.place))?;
        let top = TOP + ROW * index as f64;
        let (begin, end) = (x(phase.begin_us), x(phase.end()));
        let (indent, style) = if phase.is_request() { (8.0, "font-weight=\"bold\"") } else { (20.0, "") };
        svg.text([indent, top + 14.0], &phase.step, style);
        svg.rect([begin, top + 4.0], [(end - begin).max(1.0), ROW - 8.0], colour);
        let millis = format!("{:.1} ms", phase.duration_us as f64 / 1000.0);
        svg.text([WIDTH - 8.0, top + 14.0], &millis, "text-anchor=\"end\"");
    }
    Ok(svg.finish())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn trace() -> Trace {
        let text = r#"{"id": "x", "vm": "clone", "phases": [
            {"step": "create", "place": "shim", "begin_us": 0, "duration_us": 300000},
            {"step": "restore_vm", "place": "vmm", "begin_us": 100000, "duration_us": 100000},
            {"step": "start", "place": "shim", "begin_us": 350000, "duration_us": 50000}]}"#;
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn a_phase_is_a_bar_where_it_was_with_its_name_and_its_duration() {
        let svg = draw(&trace(), "One start.").unwrap();
        let row = "<text x=\"20.0\" y=\"90.0\">restore_vm</text>\n\
                   <rect x=\"277.5\" y=\"80.0\" width=\"127.5\" height=\"12.0\" fill=\"#c8641e\"/>\n\
                   <text x=\"752.0\" y=\"90.0\" text-anchor=\"end\">100.0 ms</text>\n";
        assert!(svg.contains(row), "{svg}");
        assert!(svg.contains(">400 ms</text>") && svg.ends_with("</svg>\n"), "{svg}");
        let long = svg.lines().filter(|line| line.len() > 120).collect::<Vec<_>>();
        assert!(long.is_empty(), "{long:#?}");
    }

    #[test]
    fn a_phase_of_another_place_is_not_drawn() {
        let mut trace = trace();
        trace.phases[1].place = "moon".into();
        assert!(draw(&trace, "").unwrap_err().to_string().contains("restore_vm is in moon"));
    }

    #[test]
    fn the_caption_names_the_host_and_the_date() {
        let caption = caption(&trace(), "emulated", "2026-11-25");
        assert!(caption.contains("400 ms. The host was emulated. The run was of 2026-11-25,"), "{caption}");
    }

    #[test]
    fn the_page_shows_the_picture_with_its_sentence() {
        let page = fs::read_to_string(source_dir().join(PAGE)).unwrap();
        let section = section().unwrap();
        assert!(page.contains(&section), "`cargo xtask bench trace` writes {section}");
        assert_eq!(with_section(&page, &section), page);
    }

    #[test]
    fn a_section_takes_the_place_of_the_old_one() {
        let new = format!("{HEADING}\nnew\n");
        let page = format!("# A\n{HEADING}\nold\n\n## Next\n");
        assert_eq!(with_section(&page, &new), format!("# A\n{new}\n## Next\n"));
        assert_eq!(with_section("# A\n", &new), format!("# A\n{new}"));
        let page = format!("# A\n{SAMPLES}\n1 2\n");
        assert_eq!(with_section(&page, &new), format!("# A\n{new}{SAMPLES}\n1 2\n"));
    }
}
