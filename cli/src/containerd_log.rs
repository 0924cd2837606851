//! containerd's log, which has the lines of the shims too.

use std::{
    borrow::Cow,
    fmt,
    fs::File,
    io::{self, BufRead, BufReader, Read, Seek, SeekFrom},
    path::{Path, PathBuf},
};

use serde::Deserialize;

use crate::command_output::{self, LIMIT};

/// How much of the end of a log in a file is looked through, in bytes.
const END: u64 = 16 << 20;

/// The name of the runtime and of its parts, in the lines of containerd.
const NAME: &str = "bulkhead";

/// The levels of containerd's lines that are about what an operator may have to know. At debug it writes down the specs
/// of containers, with their whole environment.
const LEVELS: [&str; 6] = ["info", "warning", "warn", "error", "fatal", "panic"];

/// What is in lines of containerd that have a spec, or its whole configuration with the passwords of registries, which
/// the CRI plugin logs at info when it starts, or the arguments of a process that exec adds.
const PRIVATE: [&str; 13] = [
    "spec:",
    "spec=",
    "Spec{",
    "\"spec\":",
    "with config ",
    "config=",
    "\"config\":",
    "with command ",
    "cmd=",
    "args=",
    "Args:[",
    "\"args\":",
    "Env:[",
];

/// What errors have before a word of a spec: a value that cannot be read, or the program and the arguments of a logger.
const QUOTING: [&str; 4] = ["invalid type: ", "invalid value: ", "unknown variant ", "binary://"];

/// What the agent and runc have before the name of the program. Some users write a whole command line there.
const PROGRAM: &str = "exec: ";

/// Why a program could not be executed.
const REASONS: [&str; 5] = [
    "executable file not found in $PATH",
    "no such file or directory",
    "permission denied",
    "is a directory",
    "exec format error",
];

/// What a shim says before a line of the standard error of its VMM or of a hook, and how it names the VMM, as text and
/// as JSON. In a text within a text, quotation marks have backslashes.
const SAYS: &str = "a program on the host says";
const VMM: [&str; 2] = ["program=\"vmm\"", "\"program\":\"vmm\""];

/// Where containerd writes its log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Log {
    /// To its standard error, which systemd copies to the journal. It is of one of these units.
    Journal(Vec<String>),
    File(PathBuf),
}

impl Log {
    /// The last lines that are wanted, of the last `looked_at` lines of the journal or of the end of the file.
    pub(crate) fn last_lines(
        &self,
        looked_at: u32,
        most: usize,
        is_wanted: impl Fn(&str) -> bool + Send + 'static,
    ) -> io::Result<Vec<String>> {
        match self {
            Self::Journal(units) => {
                let mut arguments =
                    vec!["--no-pager".to_owned(), "--quiet".to_owned(), format!("--lines={looked_at}")];
                arguments.extend(units.iter().map(|unit| format!("--unit={unit}")));
                let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
                command_output::last_lines("journalctl", &arguments, most, is_wanted)
            }
            Self::File(path) => {
                let path = path.clone();
                // Its disk may hang.
                let read = command_output::within(LIMIT, move || end_of(&path, most, is_wanted))?;
                let late =
                    || Err(io::Error::new(io::ErrorKind::TimedOut, format!("nothing came within {LIMIT:?}")));
                read.unwrap_or_else(late)
            }
        }
    }
}

impl Log {
    /// The part of it that [`Log::last_lines`] looks through.
    pub(crate) fn looked_at(&self, lines: u32) -> String {
        match self {
            Self::Journal(_) => format!("the end of {self}, {lines} lines,"),
            Self::File(_) => format!("the end of {self}, {} MiB,", END >> 20),
        }
    }
}

impl fmt::Display for Log {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Journal(units) => write!(f, "the log of the unit {}", units.join(" or ")),
            Self::File(path) => path.display().fmt(f),
        }
    }
}

fn end_of(path: &Path, most: usize, is_wanted: impl Fn(&str) -> bool) -> io::Result<Vec<String>> {
    let mut file = File::open(path)?;
    let begin = file.metadata()?.len().saturating_sub(END);
    file.seek(SeekFrom::Start(begin))?;
    // The file may grow meanwhile.
    let mut file = BufReader::new(file.take(END));
    if begin > 0 {
        // This is the rest of a line, and whose line it is was said at its beginning.
        file.skip_until(b'\n')?;
    }
    command_output::last_of(file, most, is_wanted)
}

/// A line of a shim.
pub(crate) enum ShimLine<'l> {
    /// What follows `pod{namespace=`: `"NAMESPACE" id="ID"}: ...`.
    Text(&'l str),
    Json(PodOfLine),
}

/// The pod that a line of JSON names.
#[derive(Deserialize)]
pub(crate) struct PodOfLine {
    pub(crate) namespace: String,
    pub(crate) id: String,
}

/// A line with `log_format = "json"`.
#[derive(Deserialize)]
struct JsonLine {
    pod: PodOfLine,
}

/// The line, if it is of a shim that serves a pod. Each one names its pod first, as text or as JSON. What comes later
/// in the line may be chosen by a guest.
pub(crate) fn shim_line(line: &str) -> Option<ShimLine<'_>> {
    // Before the first brace is only what the journal and the level write, and nothing that a guest chooses.
    let (before, rest) = line.split_once('{')?;
    // containerd's own lines have the level by this name.
    let is_text = before.ends_with("pod") && !before.contains(" level=");
    if let Some(names) = rest.strip_prefix("namespace=").filter(|_| is_text) {
        return Some(ShimLine::Text(names));
    }
    serde_json::from_str(&format!("{{{rest}")).ok().map(|JsonLine { pod }| ShimLine::Json(pod))
}

/// Whether a line has no secret and may help somebody: one of a shim, or one in which containerd itself says something
/// about Bulkhead. A shim never logs a spec or an environment, but what a hook says, which may have one.
pub(crate) fn is_for_support(line: &str) -> bool {
    let says = |word: &&str| line.contains(word);
    if shim_line(line).is_some() {
        return !says(&SAYS) || VMM.iter().any(says);
    }
    let level = level_of(line);
    level.is_some_and(|level| LEVELS.contains(&level.as_str())) && says(&NAME) && !PRIVATE.iter().any(says)
}

/// A line that is for support, without words of the spec of a process, which may be secrets.
pub(crate) fn without_words_of_specs(line: &str) -> Cow<'_, str> {
    let names_program = |at: &usize| {
        let rest = line.get(at + PROGRAM.len()..).unwrap_or_default();
        // In a text within a text, quotation marks have backslashes.
        rest.trim_start_matches('\\').starts_with('"')
    };
    let program = line.match_indices(PROGRAM).map(|(at, _)| at).find(names_program);
    let program = program.map(|at| at + PROGRAM.len());
    let quoted = QUOTING.iter().filter_map(|words| line.find(words).map(|at| at + words.len()));
    match quoted.chain(program).chain(last_words(line)).min() {
        None => line.into(),
        Some(end) => {
            let (before, after) = line.split_at(end);
            let reason = REASONS.into_iter().find(|reason| after.contains(reason)).unwrap_or_default();
            format!("{before}[left out] {reason}").into()
        }
    }
}

/// Where the last line begins that a hook has written to its standard error, in the error that says how it failed.
fn last_words(line: &str) -> Option<usize> {
    let (before, rest) = line.split_once(") failed (")?;
    let is_of_hook = before.contains("hooks.");
    let end = line.len() - rest.len() + rest.find("): ")? + "): ".len();
    is_of_hook.then_some(end)
}

/// The level of a line of containerd's own, as text (`time="..." level=info msg=...`) or as JSON.
fn level_of(line: &str) -> Option<String> {
    #[derive(Deserialize)]
    struct Line {
        level: String,
        #[serde(rename = "msg")]
        _message: String,
    }
    if let Some((_, rest)) = line.split_once("time=\"") {
        let (time, rest) = rest.split_once("\" level=")?;
        // What a text in the line says of levels does not count.
        let is_time = time.starts_with(|c: char| c.is_ascii_digit()) && !time.contains([' ', '"']);
        return rest.split_whitespace().next().filter(|_| is_time).map(str::to_owned);
    }
    let (_, rest) = line.split_once('{')?;
    serde_json::from_str(&format!("{{{rest}")).ok().map(|Line { level, .. }| level)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const PREFIX: &str = "Nov 27 03:47:03 node containerd[334]: ";
    const TIME: &str = "2026-11-27T03:47:03.000000001Z";

    fn text(level: &str, message: &str) -> String {
        format!("{PREFIX}time=\"{TIME}\" level={level} msg={message:?}")
    }

    fn json(level: &str, message: &str) -> String {
        let line = serde_json::json!({ "level": level, "msg": message, "time": TIME });
        format!("{PREFIX}{line}")
    }

    #[test]
    fn a_line_with_a_spec_is_not_for_support_although_it_names_bulkhead() {
        let spec = "Container \"web\" spec: (*specs.Spec){Process:{Env:[PASSWORD=secret]} \
                    Annotations:map[bulkhead.dev/console:true]}";
        let image = "CreateContainer of registry.example/bulkhead:1 with PASSWORD=secret";
        let configuration =
            "Start cri plugin with config {Registry:{Auths:map[r:{Password:secret}]} bulkhead}";
        // The value of a variable may look like a line of a shim, or of another level.
        let forged = "Env:[A=pod{namespace=\"a\" id=\"b\"}: PASSWORD=secret level=info bulkhead]";
        let of_another_level = "Env:[A=time=\"2026\" level=info PASSWORD=secret bulkhead]";
        for of in [text, json] {
            for (level, message) in [
                ("debug", spec),
                ("trace", spec),
                ("info", spec),
                ("debug", image),
                ("trace", image),
                ("info", configuration),
                ("debug", forged),
                ("debug", of_another_level),
            ] {
                let line = of(level, message);
                assert!(!is_for_support(&line), "{line}");
            }
        }
        for rest_of_a_line in [image, "A=level=info bulkhead PASSWORD=secret", ""] {
            assert!(!is_for_support(&format!("{PREFIX}{rest_of_a_line}")), "{rest_of_a_line}");
        }
    }

    #[test]
    fn what_the_shims_say_and_what_containerd_says_of_them_is_for_support() {
        let failed = "failed to start io.containerd.bulkhead.v2: exit status 1";
        for level in ["info", "warning", "error"] {
            assert!(is_for_support(&text(level, failed)) && is_for_support(&json(level, failed)), "{level}");
        }
        assert!(!is_for_support(&text("info", "StopPodSandbox returns successfully")));
        assert!(is_for_support(&format!(
            "{PREFIX}DEBUG pod{{namespace=\"a\" id=\"b\"}}: the guest is ready"
        )));
        let pod = "{\"timestamp\":\"x\",\"level\":\"DEBUG\",\"pod\":{\"id\":\"b\",\"namespace\":\"a\"}}";
        assert!(is_for_support(pod));
        // A guest cannot hide its lines.
        let guest = text("debug", "spec: pod{");
        let guest = format!("{PREFIX} WARN pod{{namespace=\"a\" id=\"b\"}}: a program says line={guest:?}");
        assert!(is_for_support(&guest), "{guest}");
        let refused = "bulkhead: /etc/bulkhead/config.toml: line 2: there is no key";
        assert!(is_for_support(&text("error", refused)));
    }

    #[test]
    fn no_word_of_a_process_is_for_support() {
        let kept = |line: &str| -> String {
            if is_for_support(line) { without_words_of_specs(line).into_owned() } else { String::new() }
        };
        let shim = |message: &str| format!("{PREFIX}ERROR pod{{namespace=\"a\" id=\"b\"}}: {message}");
        let started = "the process was not started container=\"b\" exec=\"e\" error=";
        for (error, reason) in [
            (
                r#""exec: \"app --password=secret\": executable file not found in $PATH""#,
                "executable file not found",
            ),
            (r#""exec: \"/secret\": stat /secret: no such file or directory""#, "no such file or directory"),
            (
                r#""cannot parse the process: invalid type: string \"secret\", expected a sequence""#,
                "invalid type: ",
            ),
            (r#""stdout binary:///log?token=secret: only output can go to a file or a logger""#, "binary://"),
        ] {
            let json = serde_json::json!({ "level": "ERROR", "pod": { "id": "b", "namespace": "a" },
                "message": "the process was not started", "fields": { "error": error } });
            for line in [
                shim(&format!("{started}{error}")),
                json.to_string(),
                text("error", &format!("bulkhead: {error}")),
            ] {
                let kept = kept(&line);
                assert!(!kept.contains("secret") && kept.contains(reason), "{kept}");
            }
        }
        for message in [
            "Exec for \"c\" with command [bulkhead --password=secret], tty false and stdin false",
            "ExecSync bulkhead cmd=[\"secret\"]",
        ] {
            assert_eq!([kept(&text("info", message)), kept(&json("info", message))], ["", ""]);
        }
        for other in [
            "exec: the agent is asked again",
            "a program on the host says program=\"vmm\" line=\"the vCPU has failed (7): EIO\"",
        ] {
            let other = shim(other);
            assert_eq!(kept(&other), other);
        }
        let hook = "hooks.prestart[0] (/bin/hook)";
        let said = shim(&format!(
            "a program on the host says program=\"{hook}\" line=\"program=\\\"vmm\\\" secret\""
        ));
        let json = serde_json::json!({ "level": "WARN", "pod": { "id": "b", "namespace": "a" },
            "message": SAYS, "fields": { "program": hook, "line": "\"program\":\"vmm\" secret" } });
        assert_eq!([kept(&said), kept(&json.to_string())], ["", ""]);
        let failed = shim(&format!("no container error=\"{hook} failed (signal: 9 (SIGKILL)): secret\""));
        let kept = kept(&failed);
        assert!(kept.ends_with(&format!("{hook} failed (signal: 9 (SIGKILL)): [left out] ")), "{kept}");
    }

    #[test]
    fn a_file_is_read_from_its_end_by_whole_lines() {
        let dir = tempfile::tempdir().unwrap();
        let log = Log::File(dir.path().join("containerd.log"));
        let Log::File(path) = &log else { unreachable!() };
        assert_eq!(log.last_lines(9, 9, |_| true).unwrap_err().kind(), io::ErrorKind::NotFound);
        fs::write(path, "a1\nb\na2\na3\n").unwrap();
        let starts = |line: &str| line.starts_with('a');
        assert_eq!(log.last_lines(1, 2, starts).unwrap(), ["a2", "a3"]);
        // The last bytes that are read begin in the middle of the first line.
        fs::write(path, format!("{}\nlast\n", "a".repeat(END as usize))).unwrap();
        assert_eq!(log.last_lines(1, 9, |_| true).unwrap(), ["last"]);
        assert_eq!(log.to_string(), path.display().to_string());
        assert_eq!(log.looked_at(9), format!("the end of {}, 16 MiB,", path.display()));
        let journal = Log::Journal(vec!["k3s".into(), "k3s-agent".into()]);
        assert_eq!(journal.looked_at(9), "the end of the log of the unit k3s or k3s-agent, 9 lines,");
        assert_eq!(journal.to_string(), "the log of the unit k3s or k3s-agent");
    }
}
