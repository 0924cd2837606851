//! `bulkhead-vmm --config FILE`: runs one VM until it ends.
//!
//! Exit status: 0 if the guest reset (even after a panic), was stopped, or was saved; [`EXIT_NOT_RESTORED`] if a saved
//! VM cannot be restored and the VM can boot instead; [`EXIT_NO_KVM`] if KVM cannot be used; 1 for any other error. A
//! line on stderr describes the error.

use std::{
    env,
    error::Error,
    ffi::OsString,
    io::{self, Write},
    path::PathBuf,
    process::ExitCode,
};

use bulkhead_vmm::{builder, cgroup, config, jail, netns, one_line};
use bulkhead_vmm_api::{EXIT_NO_KVM, EXIT_NOT_RESTORED};

const USAGE: &str = "usage: bulkhead-vmm --config FILE | --version | --help";

/// The commit that it was built from, by `BULKHEAD_COMMIT` at compile time, which `cargo xtask` sets.
const COMMIT: &str = match option_env!("BULKHEAD_COMMIT") {
    Some(commit) if !commit.is_empty() => commit,
    _ => "unknown",
};

/// What to do, as the arguments say.
enum Request {
    Run { config: PathBuf },
    Print(String),
}

/// The arguments are invalid.
#[derive(Debug, thiserror::Error)]
#[error("{USAGE}")]
struct UsageError;

fn main() -> ExitCode {
    let done = match request(env::args_os().skip(1).collect()) {
        Ok(Request::Run { config }) => run(&config),
        Ok(Request::Print(text)) => writeln!(io::stdout(), "{text}").map_err(Into::into),
        Err(error) => Err(error.into()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // If stderr is closed, nobody reads the error.
            let _ = writeln!(io::stderr(), "bulkhead-vmm: {}", one_line(error.as_ref()));
            match error.downcast_ref() {
                Some(builder::BuildError::Restore(_)) => ExitCode::from(EXIT_NOT_RESTORED),
                Some(builder::BuildError::Kvm(_)) => ExitCode::from(EXIT_NO_KVM),
                _ => ExitCode::FAILURE,
            }
        }
    }
}

fn run(config: &std::path::Path) -> Result<(), Box<dyn Error>> {
    jail::harden()?;
    let config = config::load(config)?;
    cgroup::join(&config.cgroup_procs)?;
    netns::enter(config.netns.as_deref())?;
    Ok(builder::build(&config)?.run()?)
}

fn request(arguments: Vec<OsString>) -> Result<Request, UsageError> {
    let words: Vec<_> = arguments.iter().map(|word| word.to_str()).collect();
    match (words.as_slice(), arguments.get(1)) {
        ([Some("--config"), _], Some(config)) => Ok(Request::Run { config: config.into() }),
        ([Some("--version")], None) => {
            // `bulkhead check` compares both.
            Ok(Request::Print(format!("bulkhead-vmm {} (commit {COMMIT})", env!("CARGO_PKG_VERSION"))))
        }
        ([Some("--help" | "-h")], None) => Ok(Request::Print(USAGE.to_owned())),
        _ => Err(UsageError),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(words: &[&str]) -> Result<Request, UsageError> {
        request(words.iter().map(OsString::from).collect())
    }

    #[test]
    fn only_what_is_known_is_taken() {
        assert!(
            matches!(ask(&["--config", "vmm.json"]), Ok(Request::Run { config }) if config == *"vmm.json")
        );
        let Ok(Request::Print(version)) = ask(&["--version"]) else { panic!() };
        assert_eq!(version, format!("bulkhead-vmm {} (commit {COMMIT})", env!("CARGO_PKG_VERSION")));
        assert!(matches!(ask(&["--help"]), Ok(Request::Print(text)) if text == USAGE));
        for wrong in [&[][..], &["--config"], &["--config", "a", "b"], &["--help", "x"], &["vmm.json"]] {
            assert!(ask(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn an_error_is_one_line_with_its_causes() {
        let error = config::load("/nowhere/vmm.json".as_ref()).unwrap_err();
        let line = one_line(&error);
        assert!(line.starts_with("cannot read the configuration /nowhere/vmm.json: No such file"), "{line}");
        assert!(!line.contains('\n'));
    }
}
