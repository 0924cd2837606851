//! `bulkhead logs`: what the shim, the VMM and the guest of a pod have said.

use std::{
    fs::File,
    io::{self, Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};

use bulkhead_host_shim::operator::{CONSOLE, one_line, pod_paths};

use crate::{
    containerd_log::{Log, ShimLine, shim_line},
    error::CommandError,
};

/// The most lines of containerd's log that are looked through.
const MOST_LINES: u32 = 50_000;

/// How much of the end of a console is read, in bytes.
const CONSOLE_END: u64 = 256 << 10;

/// Which lines are shown.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LogOptions<'a> {
    pub(crate) pod: &'a str,
    pub(crate) namespace: Option<&'a str>,
    /// The log that has the lines of the shim.
    pub(crate) log: &'a Log,
    /// The most lines of each source.
    pub(crate) lines: usize,
}

/// Prints the last lines of the pod, which may have ended.
pub(crate) fn logs(out: &mut impl Write, root: &Path, options: LogOptions<'_>) -> Result<(), CommandError> {
    let log = options.log;
    let lines = log.last_lines(MOST_LINES, options.lines, of_pod(options));
    let lines = lines.map_err(|source| CommandError::Log { log: log.to_string(), source })?;
    let found = print(out, &lines, &consoles(root, options)?, options.lines).map_err(CommandError::Output)?;
    match found {
        true => Ok(()),
        false => Err(CommandError::NoLines { pod: options.pod.into(), log: log.looked_at(MOST_LINES) }),
    }
}

/// The files with the console of a pod of this name.
fn consoles(root: &Path, options: LogOptions<'_>) -> Result<Vec<PathBuf>, CommandError> {
    let paths = pod_paths(root).map_err(|source| CommandError::List { path: root.into(), source })?;
    let is_named = |path: &Path, name: &str| path.file_name().is_some_and(|found| found == name);
    let is_wanted = |path: &PathBuf| {
        let in_namespace = |name: &str| path.parent().is_some_and(|parent| is_named(parent, name));
        is_named(path, options.pod) && options.namespace.is_none_or(in_namespace)
    };
    let consoles = paths.into_iter().filter(is_wanted).map(|path| path.join(CONSOLE));
    Ok(consoles.filter(|path| path.exists()).collect())
}

/// Whether a line of the log is of the shim of this pod.
fn of_pod(options: LogOptions<'_>) -> impl Fn(&str) -> bool + use<> {
    let (pod, namespace) = (options.pod.to_owned(), options.namespace.map(str::to_owned));
    let id = format!("{pod:?}}}");
    let quoted = namespace.as_ref().map(|namespace| format!("{namespace:?} "));
    move |line| match shim_line(line) {
        Some(ShimLine::Text(names)) => {
            let Some((found, rest)) = names.split_once("id=") else { return false };
            quoted.as_ref().is_none_or(|namespace| found == namespace) && rest.starts_with(&id)
        }
        Some(ShimLine::Json(named)) => {
            named.id == pod && namespace.as_ref().is_none_or(|namespace| named.namespace == *namespace)
        }
        None => false,
    }
}

/// Returns whether there was a line.
fn print(out: &mut impl Write, log: &[String], consoles: &[PathBuf], most: usize) -> io::Result<bool> {
    let mut found = !log.is_empty();
    last(out, log.iter().map(String::as_str), most)?;
    for path in consoles {
        let text = match end_of(path) {
            Ok(text) => text,
            // The pod may end meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error),
        };
        found |= !text.is_empty();
        writeln!(out, "==> {} <==", one_line(&path.display().to_string()))?;
        last(out, text.lines(), most)?;
    }
    Ok(found)
}

/// A guest chooses what is on its console.
fn last<'t>(
    out: &mut impl Write,
    lines: impl Iterator<Item = &'t str> + Clone,
    most: usize,
) -> io::Result<()> {
    let first = lines.clone().count().saturating_sub(most);
    lines.skip(first).try_for_each(|line| writeln!(out, "{}", one_line(line)))
}

fn end_of(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(CONSOLE_END)))?;
    let mut bytes = Vec::new();
    file.take(CONSOLE_END).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const JOURNAL: &str = "\
        INFO pod{namespace=\"k8s.io\" id=\"demo\"}: one\n\
        INFO pod{namespace=\"k8s.io\" id=\"demo2\"}: two\n\
        INFO pod{namespace=\"default\" id=\"demo\"}: three\n\
        level=info msg=\"of containerd\" id=\"demo\"}\n\
        INFO pod{namespace=\"k8s.io\" id=\"evil\"}: pod{namespace=\"k8s.io\" id=\"demo\"}: forged\n\
        WARN pod{namespace=\"k8s.io\" id=\"demo\"}: four \u{1b}[2J\n";

    fn shown(namespace: Option<&str>, lines: usize, consoles: &[PathBuf]) -> (bool, String) {
        let mut out = Vec::new();
        let is_own = of_pod(LogOptions { pod: "demo", namespace, log: &Log::Journal(Vec::new()), lines });
        let journal: Vec<_> = JOURNAL.lines().filter(|line| is_own(line)).map(str::to_owned).collect();
        let found = print(&mut out, &journal, consoles, lines).unwrap();
        (found, String::from_utf8(out).unwrap())
    }

    #[test]
    fn only_the_last_lines_of_the_pod_are_shown() {
        let (found, text) = shown(Some("k8s.io"), 10, &[]);
        assert!(found && text.lines().count() == 2 && text.ends_with("four  [2J\n"), "{text}");
        let (_, text) = shown(None, 2, &[]);
        assert!(text.lines().count() == 2 && text.contains("three") && !text.contains("one"), "{text}");
        assert_eq!(shown(Some("other"), 10, &[]), (false, String::new()));
    }

    #[test]
    fn a_line_of_json_is_of_the_pod_that_it_names_and_of_no_other() {
        let is_own = of_pod(LogOptions {
            pod: "demo",
            namespace: Some("k8s.io"),
            log: &Log::Journal(Vec::new()),
            lines: 1,
        });
        let line = |namespace: &str, id: &str, message: &str| {
            let pod = serde_json::json!({ "namespace": namespace, "id": id });
            let line = serde_json::json!({ "level": "INFO", "pod": pod, "message": message });
            format!("Nov 25 10:57:10 node containerd[334]: {line}")
        };
        assert!(is_own(&line("k8s.io", "demo", "one")));
        assert!(!is_own(&line("k8s.io", "demo2", "two")) && !is_own(&line("default", "demo", "three")));
        for forged in [
            "pod{namespace=\"k8s.io\" id=\"demo\"}: x",
            "{\"pod\":{\"namespace\":\"k8s.io\",\"id\":\"demo\"}}",
        ] {
            assert!(!is_own(&line("k8s.io", "evil", forged)), "{forged}");
            assert!(!is_own(&format!(" INFO pod{{namespace=\"k8s.io\" id=\"evil\"}}: {forged}")), "{forged}");
        }
        assert!(!is_own("containerd[334]: {\"pod\":{\"id\":\"demo\""));
    }

    #[test]
    fn what_a_guest_writes_to_its_console_changes_no_terminal() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c/ns/demo");
        fs::create_dir_all(path.join("console")).unwrap();
        fs::create_dir_all(dir.path().join("c/other/demo")).unwrap();
        let options =
            LogOptions { pod: "demo", namespace: Some("ns"), log: &Log::Journal(Vec::new()), lines: 1 };
        assert_eq!(consoles(dir.path(), options).unwrap(), [""; 0].map(PathBuf::from));
        fs::write(path.join(CONSOLE), "first\nKernel panic\u{1b}]0;x\u{7}\n").unwrap();
        let consoles = consoles(dir.path(), options).unwrap();
        let (found, text) = shown(Some("other"), 1, &consoles);
        assert!(found && text.ends_with("console.log <==\nKernel panic ]0;x \n"), "{text:?}");
        fs::write(path.join(CONSOLE), "x".repeat(2 * CONSOLE_END as usize)).unwrap();
        assert!(end_of(&path.join(CONSOLE)).unwrap().len() == CONSOLE_END as usize);
    }
}
