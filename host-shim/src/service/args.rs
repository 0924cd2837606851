//! The command line, as containerd writes it: Go's flags, which take one dash or two, and `-flag value` or
//! `-flag=value` (containerd, runtime v2: shim authoring, commands).

use std::{ffi::OsString, path::PathBuf};

use crate::host::placeholder_process;

/// What the shim is asked to do, and for whom.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Args {
    /// containerd's namespace of the task.
    pub(crate) namespace: String,
    /// The task.
    pub(crate) id: String,
    /// containerd's main socket.
    pub(crate) address: String,
    /// The bundle directory; given to `delete` only, the other commands run in it.
    pub(crate) bundle: Option<PathBuf>,
    /// Log at level debug.
    pub(crate) debug: bool,
    /// The configuration, if it is not the default one. containerd does not know this flag; `start` gives it to
    /// `serve`.
    pub(crate) config: Option<PathBuf>,
    /// Whether `delete` may wait until everything is undone. containerd does not know this flag. `bulkhead run` uses
    /// it.
    pub(crate) patient: bool,
    /// The command.
    pub(crate) action: Action,
}

/// One run of the binary.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Action {
    /// Start the server of a task and print its address.
    #[default]
    Start,
    /// Undo what a dead server left behind.
    Delete,
    /// Undo it in a process of its own. Only `delete` uses this command.
    Undo,
    /// Run the server. Only `start` uses this command.
    Serve,
    /// Run a placeholder process. Only the server uses this command.
    PlaceholderProcess,
    /// Print the version.
    Version,
    /// Print containerd's RuntimeInfo message.
    Info,
}

/// A command line that makes no sense.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum ArgsError {
    #[error("argument {0:?} is not UTF-8")]
    NotUtf8(OsString),
    #[error("flag -{0} needs a value")]
    NoValue(String),
    #[error("unknown flag -{0}")]
    UnknownFlag(String),
    #[error("unknown command {0:?}: containerd says `start` or `delete`")]
    UnknownCommand(String),
    #[error("no command: containerd says `start` or `delete`")]
    NoCommand,
    #[error("flag -{0} is missing")]
    Missing(&'static str),
    #[error("flag -{flag}: {value:?} cannot name a directory of the runtime")]
    BadName { flag: &'static str, value: String },
}

impl Args {
    /// Reads the words after the program's name.
    pub(crate) fn parse(words: impl IntoIterator<Item = OsString>) -> Result<Self, ArgsError> {
        let mut args = Args::default();
        let mut command = None;
        let mut words = words.into_iter();
        while let Some(word) = words.next() {
            let word = utf8(word)?;
            let Some(flag) = word.strip_prefix('-') else {
                command = Some(word);
                // Go stops at the first word that is no flag; what follows is not ours to read.
                break;
            };
            let flag = flag.strip_prefix('-').unwrap_or(flag);
            let split = flag.split_once('=');
            let name = split.map_or(flag, |(name, _)| name);
            match name {
                "v" | "version" => command = Some("-v".into()),
                "info" => command = Some("-info".into()),
                "patient" => args.patient = true,
                "debug" => args.debug = split.is_none_or(|(_, value)| value == "true" || value == "1"),
                "namespace" | "id" | "address" | "publish-binary" | "bundle" | "config" => {
                    let value = match split {
                        Some((_, value)) => value.to_owned(),
                        None => utf8(words.next().ok_or_else(|| ArgsError::NoValue(name.into()))?)?,
                    };
                    args.set(name, value);
                }
                _ => return Err(ArgsError::UnknownFlag(name.into())),
            }
        }
        args.action = match command.as_deref() {
            Some("start") => Action::Start,
            Some("delete") => Action::Delete,
            Some("undo") => Action::Undo,
            Some("serve") => Action::Serve,
            Some(placeholder_process::COMMAND | placeholder_process::EARLIER_COMMAND) => {
                Action::PlaceholderProcess
            }
            Some("-v") => Action::Version,
            Some("-info") => Action::Info,
            Some(other) => return Err(ArgsError::UnknownCommand(other.into())),
            None => return Err(ArgsError::NoCommand),
        };
        args.check()
    }

    fn set(&mut self, name: &str, value: String) {
        match name {
            "namespace" => self.namespace = value,
            "id" => self.id = value,
            "address" => self.address = value,
            "bundle" => self.bundle = Some(value.into()),
            "config" => self.config = Some(value.into()),
            // publish-binary: events go to containerd's ttrpc socket, which needs no second process.
            _ => {}
        }
    }

    fn check(self) -> Result<Self, ArgsError> {
        if matches!(self.action, Action::PlaceholderProcess | Action::Version | Action::Info) {
            return Ok(self);
        }
        for (flag, value) in [("namespace", &self.namespace), ("id", &self.id)] {
            if value.is_empty() {
                return Err(ArgsError::Missing(flag));
            }
            // Both become the name of a directory below /run/bulkhead.
            if value.contains('/') || value == "." || value == ".." {
                return Err(ArgsError::BadName { flag, value: value.clone() });
            }
        }
        Ok(self)
    }
}

fn utf8(word: OsString) -> Result<String, ArgsError> {
    word.into_string().map_err(ArgsError::NotUtf8)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Args, ArgsError> {
        Args::parse(line.split_whitespace().map(OsString::from))
    }

    #[test]
    fn reads_what_containerd_says_to_start() {
        let args = parse(
            "-namespace default -address /run/containerd/containerd.sock -publish-binary /usr/bin/containerd -id demo start",
        )
        .unwrap();
        assert_eq!(args.namespace, "default");
        assert_eq!(args.address, "/run/containerd/containerd.sock");
        assert_eq!((args.id.as_str(), args.action, args.debug), ("demo", Action::Start, false));
    }

    #[test]
    fn reads_what_containerd_says_to_delete() {
        let args = parse("--namespace=k8s.io -debug -id=a -bundle /run/containerd/io/a delete").unwrap();
        assert_eq!(args.bundle, Some("/run/containerd/io/a".into()));
        assert_eq!((args.id.as_str(), args.action, args.debug), ("a", Action::Delete, true));
        assert!(!args.patient && parse("-namespace n -id a -patient delete").unwrap().patient);
    }

    #[test]
    fn the_server_may_have_a_configuration_of_its_own() {
        let args = parse("-namespace default -id a -config /etc/other.toml serve").unwrap();
        assert_eq!((args.action, args.config), (Action::Serve, Some("/etc/other.toml".into())));
    }

    #[test]
    fn version_and_info_need_nothing_else() {
        assert_eq!(parse("-v").unwrap().action, Action::Version);
        assert_eq!(parse("-info").unwrap().action, Action::Info);
    }

    #[test]
    fn a_placeholder_process_is_also_started_by_the_shim_of_an_earlier_version() {
        assert_eq!(parse("placeholder-process").unwrap().action, Action::PlaceholderProcess);
        assert_eq!(parse("stand-in").unwrap().action, Action::PlaceholderProcess);
    }

    #[test]
    fn names_what_is_wrong() {
        assert_eq!(parse("-namespace"), Err(ArgsError::NoValue("namespace".into())));
        assert_eq!(parse("-socket x start"), Err(ArgsError::UnknownFlag("socket".into())));
        assert_eq!(parse("-namespace n start"), Err(ArgsError::Missing("id")));
        assert_eq!(parse("-namespace n -id i stop"), Err(ArgsError::UnknownCommand("stop".into())));
        assert_eq!(parse("-namespace n -id i"), Err(ArgsError::NoCommand));
        assert!(matches!(parse("-namespace .. -id i start"), Err(ArgsError::BadName { .. })));
        assert!(matches!(parse("-namespace n -id ../../etc delete"), Err(ArgsError::BadName { .. })));
    }
}
