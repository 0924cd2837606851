//! The report that `--junit` writes.

use anyhow::{Context, Result, ensure};

use super::comparable;

/// What a report of JUnit says: its only test case, and how it failed.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Report {
    counts: [String; 3],
    name: String,
    class: String,
    /// The message and the output.
    failure: Option<[String; 2]>,
}

impl Report {
    /// The report of tests that print this, as it is [`comparable`].
    pub(super) fn of_tests(command: &[&str], status: i32, printed: &str) -> Self {
        let failure = (status != 0).then(|| [format!("exit status {status}"), printed.to_owned()]);
        let failures = if failure.is_some() { "1" } else { "0" };
        let counts = ["1", failures, "0"].map(str::to_owned);
        let program = command.first().and_then(|program| program.rsplit('/').next()).unwrap_or_default();
        Self { counts, name: command.join(" "), class: program.to_owned(), failure }
    }
}

/// Reads the XML of a report, all of it: elements with attributes and text, in this order and no others.
pub(super) fn read(xml: &str) -> Result<Report> {
    let mut rest = xml;
    element(&mut rest, "<?xml", "?>", &["version", "encoding"])?;
    let [tests, failures, errors, _] = element(&mut rest, "<testsuites", ">", &COUNTS)?;
    let suite = ["name", "tests", "failures", "errors", "skipped", "time"];
    let [_, of_suite @ .., _, _] = element(&mut rest, "<testsuite", ">", &suite)?;
    let counts = [tests, failures, errors];
    ensure!(of_suite == counts, "the counts of the suite are not those of all: {xml}");
    let [name, class, time] = element(&mut rest, "<testcase", ">", &["name", "classname", "time"])?;
    let seconds = time.parse::<f64>().with_context(|| format!("no time: {time:?}"))?;
    ensure!(seconds > 0.0, "expected  a time\ncame      {seconds} s");
    let failure = match rest.trim_start().starts_with("<failure") {
        true => {
            let [message] = element(&mut rest, "<failure", ">", &["message"])?;
            let (text, after) = rest.split_once("</failure>").context("the failure has no end")?;
            rest = after;
            let text = ENTITIES.iter().fold(text.to_owned(), |text, (entity, is)| text.replace(entity, is));
            Some([message, comparable(&text)])
        }
        false => None,
    };
    for end in ["</testcase>", "</testsuite>", "</testsuites>"] {
        rest = rest.trim_start().strip_prefix(end).with_context(|| format!("no {end} before {rest:?}"))?;
    }
    ensure!(rest.trim().is_empty(), "more after the end: {rest:?}");
    Ok(Report { counts, name, class, failure })
}

/// The last one is that of the others' first character.
const ENTITIES: [(&str, &str); 5] =
    [("&lt;", "<"), ("&gt;", ">"), ("&quot;", "\""), ("&apos;", "'"), ("&amp;", "&")];

const COUNTS: [&str; 4] = ["tests", "failures", "errors", "time"];

/// Takes the beginning of an element, and returns the values of its attributes, which are these.
fn element<const N: usize>(
    rest: &mut &str,
    begin: &str,
    end: &str,
    names: &[&str; N],
) -> Result<[String; N]> {
    let no = || format!("no {begin} with {names:?} at {rest:?}");
    let mut left = rest.trim_start().strip_prefix(begin).with_context(no)?;
    let mut values = Vec::new();
    for name in names {
        left = left.strip_prefix(&format!(" {name}=\"")).with_context(no)?;
        let (value, after) = left.split_once('"').with_context(no)?;
        ensure!(!value.contains(['<', '>', '&']), "{name} has more than plain text: {value:?}");
        values.push(value.to_owned());
        left = after;
    }
    left = left.strip_prefix(end).with_context(no)?;
    *rest = left;
    values.try_into().map_err(|values| anyhow::anyhow!("expected {N} values, came {values:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_read_as_a_whole() {
        let good = "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n\
                    <testsuites tests=\"1\" failures=\"1\" errors=\"0\" time=\"0.100\">\n\
                    <testsuite name=\"bulkhead run\" tests=\"1\" failures=\"1\" errors=\"0\" \
                    skipped=\"0\" time=\"0.100\">\n\
                    <testcase name=\"/bin/sh -c x\" classname=\"sh\" time=\"0.100\">\n\
                    <failure message=\"exit status 3\">1 &lt; 3\n</failure>\n\
                    </testcase>\n</testsuite>\n</testsuites>\n";
        assert_eq!(read(good).unwrap(), Report::of_tests(&["/bin/sh", "-c", "x"], 3, "1 < 3\n"));
        for bad in [
            good.replace("</testsuite>", ""),
            good.replacen("failures=\"1\"", "failures=\"0\"", 1),
            good.replace("name=\"/bin/sh -c x\"", "name=\"/bin/sh -c x"),
            good.replace("0.100", "soon"),
            format!("{good}{good}"),
            good[..good.len() / 2].to_owned(),
        ] {
            assert!(read(&bad).is_err(), "{bad}");
        }
    }
}
