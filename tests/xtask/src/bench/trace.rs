//! `cargo xtask bench trace`: draws the start of a pod, which containerd's CRI service has asked for, and shows the
//! picture in docs/benchmarks.md. containerd is version 2: no older one exports spans of a start.

use std::cmp::Reverse;
use std::fs;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use crate::cache::Cache;
use crate::containerd::Containerd;
use crate::dist::{self, Profile, source_dir};
use crate::e2e::{E2E, RESTART};
use crate::page::day;
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

/// What `bulkhead-e2e trace` prints: `bulkhead trace --json`, with spans of containerd among the phases.
#[derive(Debug, Deserialize)]
struct Trace {
    vm: String,
    phases: Vec<Phase>,
}

#[derive(Debug, Deserialize)]
struct Phase {
    step: String,
    place: String,
    /// Since the request Create. What was before it has a negative number.
    begin_us: i64,
    duration_us: i64,
}

impl Phase {
    fn end(&self) -> i64 {
        self.begin_us.saturating_add(self.duration_us)
    }

    fn is_of_containerd(&self) -> bool {
        self.place == CONTAINERD
    }

    /// Whether it is the whole of a request. The other phases are parts of one.
    fn is_request(&self) -> bool {
        matches!(self.step.as_str(), "create" | "start") || self.step.ends_with("/RunPodSandbox")
    }

    /// Its name. A method is without its package and without the service of the CRI, such as Task/Create for
    /// containerd.task.v2.Task/Create.
    fn label(&self) -> &str {
        match self.step.rsplit_once('.') {
            Some((_, method)) if method.contains('/') => {
                method.strip_prefix("RuntimeService/").unwrap_or(method)
            }
            _ => &self.step,
        }
    }
}

impl Trace {
    /// With the phases in the order of their beginnings, and what is around others before them.
    fn in_order(mut self) -> Self {
        self.phases.sort_by_key(|phase| (phase.begin_us, Reverse(phase.duration_us)));
        self
    }

    /// When the first phase begins, and how long all take.
    fn extent(&self) -> (i64, i64) {
        let begin = self.phases.iter().map(|phase| phase.begin_us).min().unwrap_or(0);
        let end = self.phases.iter().map(Phase::end).max().unwrap_or(0);
        (begin, end.saturating_sub(begin))
    }
}

pub(super) fn run(cache: &Cache, tools: &Tools) -> Result<()> {
    let dist = dist::build(cache, tools, Profile::Quick)?;
    let version = Containerd::V2.version(cache, "")?;
    // What the builder has added does not matter.
    let version = version.split(['+', '~']).next().unwrap_or_default();
    let puts: Vec<_> = [dist.put()].into_iter().chain(Containerd::V2.put(cache)?).collect();
    let payload = Payload::new(cache, &puts)?;
    drop(dist);
    let rig = Rig::ensure(cache, tools)?;
    let mut session = step("starting the host", || rig.start(&payload))?;
    let restarted = session.run(&RESTART.map(str::to_owned), Io::Inherited, Limit::Whole(LIMIT))?;
    ensure!(restarted == 0, "containerd {version} does not start in the inner host");
    let trace = traced(&mut session)?;
    session.finish();
    let today = day(SystemTime::now());
    let path = source_dir().join(PICTURE);
    fs::write(&path, draw(&trace, &caption(&trace, version, &Accelerator::describe(), &today))?)
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
    let trace: Trace =
        serde_json::from_str(json).with_context(|| format!("cannot understand bulkhead trace: {text}"))?;
    let has_containerd = trace.phases.iter().any(|phase| phase.is_of_containerd() && phase.is_request());
    ensure!(has_containerd, "no span of containerd around the phases: {text}");
    Ok(trace.in_order())
}

/// The sentence below the picture.
fn caption(trace: &Trace, containerd: &str, host: &str, date: &str) -> String {
    let (begin, duration) = trace.extent();
    let [before, whole] = [begin.saturating_neg(), duration].map(|micros| micros as f64 / 1000.0);
    format!(
        "One start of a sandbox by the CRI of containerd {containerd}, whose VM is a {}: {whole:.0} ms. The \
         shim's first request began after {before:.0} ms. Spans of containerd that took less than 2 % of RunPodSandbox \
         are left out. The host was {host}. The run was of {date}, with the profile that tests use.",
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
         times.\n[Observability](observability.md#the-phases-of-a-start) says what each phase is.\n\n![the phases of the start of a pod](pictures/pod-start.svg)\n\n{}\n",
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
const PLACES: [(&str, &str); 4] =
    [(CONTAINERD, "#7a4fa3"), ("shim", "#1f6fb2"), ("vmm", "#c8641e"), ("agent", "#2e8b57")];
/// The place of containerd's own spans.
const CONTAINERD: &str = "containerd";

/// The phases as bars, one below the other.
fn draw(trace: &Trace, caption: &str) -> Result<String> {
    let (first, whole) = trace.extent();
    ensure!(whole > 0, "no phases");
    let height = TOP + ROW * trace.phases.len() as f64 + BOTTOM;
    let x = |micros: i64| LEFT + (RIGHT - LEFT) * micros.saturating_sub(first) as f64 / whole as f64;
    let mut svg = Svg::new(WIDTH, height, FONT, &svg::head("The phases of the start of a pod", caption));
    for (index, (place, colour)) in PLACES.iter().enumerate() {
        let at = LEFT + 90.0 * index as f64;
        svg.rect([at, 10.0], [12.0, 12.0], colour);
        svg.text([at + 18.0, 21.0], place, "");
    }
    for quarter in 0..=4 {
        let micros = whole.saturating_mul(quarter) / 4;
        let (at, millis) = (x(first.saturating_add(micros)), micros as f64 / 1000.0);
        svg.line([at, TOP], [at, height - BOTTOM], "#ccc");
        svg.text([at, TOP - 8.0], &format!("{millis:.0} ms"), "text-anchor=\"middle\"");
    }
    for (index, phase) in trace.phases.iter().enumerate() {
        let place = PLACES.iter().find(|(place, _)| *place == phase.place);
        let (_, colour) = place.with_context(|| format!("{} is in {}", phase.step, phase.place))?;
        let top = TOP + ROW * index as f64;
        let (begin, end) = (x(phase.begin_us), x(phase.end()));
        let indent = if phase.is_request() || phase.is_of_containerd() { 8.0 } else { 20.0 };
        let style = if phase.is_request() { "font-weight=\"bold\"" } else { "" };
        svg.text([indent, top + 14.0], phase.label(), style);
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
    fn spans_of_containerd_are_around_the_phases() {
        let mut trace = trace();
        for (step, begin_us, duration_us) in [
            ("containerd.task.v2.Task/Create", 0, 310_000),
            ("container.NewTask", -20_000, 340_000),
            ("runtime.v1.RuntimeService/RunPodSandbox", -100_000, 600_000),
        ] {
            let (step, place) = (step.to_owned(), CONTAINERD.to_owned());
            trace.phases.push(Phase { step, place, begin_us, duration_us });
        }
        let trace = trace.in_order();
        let labels: Vec<_> = trace.phases.iter().map(Phase::label).collect();
        assert_eq!(
            labels,
            ["RunPodSandbox", "container.NewTask", "Task/Create", "create", "restore_vm", "start"]
        );
        let svg = draw(&trace, "One start.").unwrap();
        let around = "<text x=\"8.0\" y=\"70.0\" font-weight=\"bold\">RunPodSandbox</text>\n\
                      <rect x=\"150.0\" y=\"60.0\" width=\"510.0\" height=\"12.0\" fill=\"#7a4fa3\"/>\n";
        assert!(svg.contains(around), "{svg}");
        // The request Create began after a sixth of it.
        assert!(svg.contains("<rect x=\"235.0\" y=\"120.0\" width=\"255.0\""), "{svg}");
        assert!(
            svg.contains(">600 ms</text>") && svg.contains("<text x=\"8.0\" y=\"90.0\">container.NewTask<"),
            "{svg}"
        );
        let caption = caption(&trace, "2.1.9", "emulated", "2026-11-25");
        assert!(caption.contains("600 ms. The shim's first request began after 100 ms."), "{caption}");
    }

    #[test]
    fn a_phase_of_another_place_is_not_drawn() {
        let mut trace = trace();
        trace.phases[1].place = "moon".into();
        assert!(draw(&trace, "").unwrap_err().to_string().contains("restore_vm is in moon"));
    }

    #[test]
    fn the_caption_names_the_host_and_the_date() {
        let caption = caption(&trace(), "2.1.9", "emulated", "2026-11-25");
        assert!(caption.contains("containerd 2.1.9, whose VM is a clone: 400 ms."), "{caption}");
        assert!(caption.contains("The host was emulated. The run was of 2026-11-25,"), "{caption}");
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
