//! The result as JUnit's XML, which CI systems show.

use std::{
    ffi::OsString,
    fmt::Write as _,
    fs::{self, File},
    io::{self, Write},
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    time::Duration,
};

use rustix::{
    fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, openat, openat2, renameat, unlinkat},
    io::Errno,
};

use crate::run::{end::End, error::RunError};

/// A file that gets the result, in a directory that the program may be able to write to, as root. So the directory is
/// opened before the program runs, and what has the name of the file is never opened: the report takes its place.
#[derive(Debug)]
pub(super) struct Report {
    path: PathBuf,
    directory: OwnedFd,
    name: OsString,
    mode: Mode,
}

impl Report {
    /// Removes a report of an earlier run, and finds out whether there can be one of this run, for a user with this
    /// umask.
    pub(super) fn create(path: &Path, umask: Mode) -> Result<Self, RunError> {
        Self::begin(path, umask).map_err(|source| RunError::Junit { path: path.into(), source })
    }

    fn begin(path: &Path, umask: Mode) -> io::Result<Self> {
        let name = path.file_name().ok_or(io::ErrorKind::InvalidFilename)?.to_owned();
        let directory = path.parent().filter(|parent| *parent != Path::new("")).unwrap_or(Path::new("."));
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        // A link could have been made by what is tested, and lead anywhere.
        let directory = match openat2(CWD, directory, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS) {
            Err(Errno::LOOP) => {
                let reason =
                    "a directory in its path is a symbolic link; name the directory that the link leads to";
                return Err(io::Error::other(reason));
            }
            opened => opened?,
        };
        let report = Self { path: path.into(), directory, name, mode: Mode::from_raw_mode(0o644) - umask };
        let (_, temporary) = report.temporary()?;
        unlinkat(&report.directory, &temporary, AtFlags::empty())?;
        match unlinkat(&report.directory, &report.name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(report),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Writes one test suite with one test case, whose name is the command. The program must have ended.
    pub(super) fn write(self, case: &Case<'_>) -> Result<(), RunError> {
        let written = self.temporary().and_then(|(mut file, temporary)| {
            let written = file
                .write_all(case.xml().as_bytes())
                .and_then(|()| Ok(renameat(&self.directory, &temporary, &self.directory, &self.name)?));
            if written.is_err() {
                _ = unlinkat(&self.directory, &temporary, AtFlags::empty());
            }
            written
        });
        written.map_err(|source| RunError::Junit { path: self.path, source })
    }

    /// A new file in the directory, and its name.
    fn temporary(&self) -> io::Result<(File, String)> {
        let id = fs::read_to_string("/proc/sys/kernel/random/uuid")?;
        let name = format!(".bulkhead-{}", id.trim());
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = openat(&self.directory, &name, flags, self.mode)?;
        Ok((file.into(), name))
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

    fn case<'a>() -> Case<'a> {
        Case {
            command: &[],
            took: Duration::ZERO,
            result: Ok(End::Exited { status: 0, is_oom: false }),
            output: "",
        }
    }

    fn create(path: &Path) -> Result<Report, RunError> {
        Report::create(path, Mode::from_raw_mode(0o022))
    }

    #[test]
    fn the_report_has_the_umask_of_its_user() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("results.xml");
        for (umask, mode) in [(0o022, 0o100_644), (0o077, 0o100_600)] {
            Report::create(&path, Mode::from_raw_mode(umask)).unwrap().write(&case()).unwrap();
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode(), mode);
        }
    }

    /// What is tested may be root in the directory of the report.
    #[test]
    fn the_report_is_written_through_no_link_and_into_nothing_that_is_there() {
        use std::os::unix::fs::symlink;
        let dir = tempfile::tempdir().unwrap();
        let (victim, path) = (dir.path().join("victim"), dir.path().join("results.xml"));
        fs::write(&victim, "kept").unwrap();
        // Before the program, and while it runs.
        symlink(&victim, &path).unwrap();
        let report = create(&path).unwrap();
        assert!(!path.exists());
        symlink(&victim, &path).unwrap();
        report.write(&case()).unwrap();
        assert!(fs::symlink_metadata(&path).unwrap().is_file());
        assert!(fs::read_to_string(&path).unwrap().contains("tests=\"1\""));
        // A pipe would keep whoever opens it waiting.
        fs::remove_file(&path).unwrap();
        let report = create(&path).unwrap();
        make_pipe(&path);
        report.write(&case()).unwrap();
        assert!(fs::symlink_metadata(&path).unwrap().is_file());
        assert_eq!(fs::read_to_string(&victim).unwrap(), "kept");
        // Nor through a link above it.
        symlink(dir.path(), dir.path().join("link")).unwrap();
        let error = create(&dir.path().join("link/results.xml")).unwrap_err();
        assert!(bulkhead_host_shim::operator::chain(&error).contains("symbolic link"), "{error:?}");
        let left = fs::read_dir(dir.path()).unwrap().count();
        assert_eq!(left, 3, "victim, results.xml and link");
    }

    fn make_pipe(path: &Path) {
        rustix::fs::mknodat(CWD, path, rustix::fs::FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    }

    #[test]
    fn a_report_that_cannot_be_written_is_named_before_the_program_runs() {
        let dir = tempfile::tempdir().unwrap();
        for path in [dir.path().join("missing/results.xml"), dir.path().to_owned(), "/".into()] {
            assert!(matches!(create(&path), Err(RunError::Junit { .. })), "{}", path.display());
        }
    }

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
        let unknown = xml(Ok(End::Unknown { status: 124, after: Some(Duration::from_secs(2)) }));
        assert!(unknown.contains("<failure message=") && unknown.contains("it may have run"), "{unknown}");
        let error = xml(Err("no \"KVM\"".into()));
        assert!(error.contains("<error message=\"no &quot;KVM&quot;\"/>"), "{error}");
        assert!(error.contains("failures=\"0\" errors=\"1\""), "{error}");
    }
}
