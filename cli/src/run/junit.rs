//! The result as JUnit's XML, which CI systems show.

use std::{
    fmt::Write as _,
    fs::File,
    io::{self, Write},
    path::{Path, PathBuf},
    time::Duration,
};

use crate::run::{end::End, error::RunError};

/// A file that gets the result. It is opened before the program runs, so that a wrong name is reported at once.
#[derive(Debug)]
pub(super) struct Report {
    path: PathBuf,
    file: File,
}

impl Report {
    pub(super) fn create(path: &Path) -> Result<Self, RunError> {
        match File::create(path) {
            Ok(file) => Ok(Self { path: path.into(), file }),
            Err(source) => Err(RunError::Junit { path: path.into(), source }),
        }
    }

    /// Writes one test suite with one test case, whose name is the command.
    pub(super) fn write(mut self, case: &Case<'_>) -> Result<(), RunError> {
        let written = self.file.write_all(case.xml().as_bytes());
        written.map_err(|source: io::Error| RunError::Junit { path: self.path.clone(), source })
    }
}

/// One run, as a test case.
#[derive(Debug)]
pub(super) struct Case<'a> {
    pub(super) command: &'a [String],
    pub(super) took: Duration,
    /// How the program ended, or why it did not run.
    pub(super) result: Result<End, String>,
    /// Its last output.
    pub(super) output: &'a str,
}

impl Case<'_> {
    fn xml(&self) -> String {
        let time = format!("{:.3}", self.took.as_secs_f64());
        let program = self.command.first().map_or("", String::as_str);
        let class = escaped(Path::new(program).file_name().unwrap_or_default().to_string_lossy().as_ref());
        let name = escaped(&self.command.join(" "));
        let (mut failures, mut errors, mut inner) = (0, 0, String::new());
        match &self.result {
            Ok(end) if end.status() == 0 => {}
            Ok(end) => {
                failures = 1;
                let (message, output) = (escaped(&end.message()), escaped(self.output));
                _ = writeln!(inner, "      <failure message=\"{message}\">{output}</failure>");
            }
            Err(message) => {
                errors = 1;
                _ = writeln!(inner, "      <error message=\"{}\"/>", escaped(message));
            }
        }
        format!(
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n\
             <testsuites tests=\"1\" failures=\"{failures}\" errors=\"{errors}\" time=\"{time}\">\n  \
             <testsuite name=\"bulkhead run\" tests=\"1\" failures=\"{failures}\" errors=\"{errors}\" skipped=\"0\" \
             time=\"{time}\">\n    \
             <testcase name=\"{name}\" classname=\"{class}\" time=\"{time}\">\n{inner}    \
             </testcase>\n  </testsuite>\n</testsuites>\n"
        )
    }
}

/// Text for an element or an attribute. XML has no place for most control characters (XML 1.0, 2.2).
fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\n' | '\t' => escaped.push(c),
            '\u{0}'..='\u{1f}' | '\u{7f}'..='\u{9f}' | '\u{fffe}' | '\u{ffff}' => escaped.push('\u{fffd}'),
            c => escaped.push(c),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    fn xml(result: Result<End, String>) -> String {
        let command = ["/t/deps/demo-1f".to_owned(), "--exact".into(), "a<b".into()];
        Case { command: &command, took: Duration::from_millis(1234), result, output: "one\u{1b}[0m & two\n" }
            .xml()
    }

    #[test]
    fn a_program_that_succeeds_is_a_case_without_a_failure() {
        let xml = xml(Ok(End::Exited { status: 0, is_oom: false }));
        let case = "<testcase name=\"/t/deps/demo-1f --exact a&lt;b\" classname=\"demo-1f\" time=\"1.234\">";
        assert!(xml.contains(case) && xml.contains("tests=\"1\" failures=\"0\" errors=\"0\""), "{xml}");
        assert!(!xml.contains("<failure") && !xml.contains("<error"), "{xml}");
    }

    #[test]
    fn a_failure_has_the_last_output_and_an_error_the_reason() {
        let failed = xml(Ok(End::Exited { status: 3, is_oom: false }));
        assert!(
            failed.contains("<failure message=\"exit status 3\">one\u{fffd}[0m &amp; two\n</failure>"),
            "{failed}"
        );
        assert!(failed.contains("failures=\"1\" errors=\"0\""), "{failed}");
        let late = xml(Ok(End::TimedOut { after: Duration::from_secs(2) }));
        assert!(late.contains("<failure message=\"it was killed after 2s (--timeout)\">"), "{late}");
        let error = xml(Err("no \"KVM\"".into()));
        assert!(error.contains("<error message=\"no &quot;KVM&quot;\"/>"), "{error}");
        assert!(error.contains("failures=\"0\" errors=\"1\""), "{error}");
    }
}
