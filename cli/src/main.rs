//! `bulkhead`: the command for operators.

#![deny(unsafe_code)]

mod args;
mod check;
mod cleanup;
mod collect;
mod command_output;
mod config_file;
mod console;
mod containerd;
mod containerd_log;
mod containerd_process;
mod error;
mod events;
mod exec;
mod install;
mod listings;
mod logs;
mod metrics;
mod output;
mod pod;
mod process;
mod progress;
mod run;
mod templates;
mod top;
mod trace;
mod watch;

use std::{
    env,
    error::Error,
    fs,
    io::{self, IsTerminal, Write},
    path::Path,
    process::ExitCode,
    time::Duration,
};

use bulkhead_host_shim::operator::{STATE_ROOT, chain};
use clap::{CommandFactory, Parser};
use rustix::process::geteuid;

use crate::{
    args::{Arguments, Command, ConfigCommand, TemplateCommand},
    containerd::Containerd,
    containerd_log::Log,
    error::CommandError,
    events::EventOptions,
    logs::LogOptions,
    output::Shown,
    top::TopOptions,
    trace::TraceOptions,
};

fn main() -> ExitCode {
    // The library of the shim logs what it cannot undo.
    tracing_subscriber::fmt()
        .with_max_level(tracing::Level::WARN)
        .with_writer(|| progress::Stderr)
        .with_target(false)
        .without_time()
        .init();
    let command = match Arguments::try_parse() {
        Ok(arguments) => arguments.command,
        Err(error) => return wrong_line(&error),
    };
    let mut out = Shown::new(io::stdout().lock(), command.is_endless());
    let status = run(command, &mut out, &mut io::stderr());
    match status.and_then(|status| out.written().map(|()| status).map_err(CommandError::Output)) {
        Ok(status) => status,
        // The reader of a pipe has seen enough.
        Err(CommandError::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => {
            // If stderr is closed, nobody reads the error.
            let _ = writeln!(io::stderr(), "bulkhead: {}{}", chain(&error), remedy(&error));
            ExitCode::FAILURE
        }
    }
}

/// The remedy for most errors of a user who is not root.
fn remedy(error: &CommandError) -> &'static str {
    match wants_root(error) && !geteuid().is_root() {
        true => "; run it as root",
        false => "",
    }
}

/// Whether root may have succeeded. journalctl shows a user who is not root no lines of others, and does not fail.
fn wants_root(error: &CommandError) -> bool {
    matches!(error, CommandError::NoLines { .. }) || is_denied(error)
}

/// Whether the error or one of its causes says that a permission is missing.
fn is_denied(error: &(dyn Error + 'static)) -> bool {
    let is_permission_denied = |error: &io::Error| error.kind() == io::ErrorKind::PermissionDenied;
    error.downcast_ref().is_some_and(is_permission_denied) || error.source().is_some_and(is_denied)
}

/// Prints the error, or the help that was asked for.
fn wrong_line(error: &clap::Error) -> ExitCode {
    // If it cannot be printed, nobody reads it.
    _ = error.print();
    // Other numbers belong to the program.
    let is_run = env::args_os().nth(1).is_some_and(|command| command == "run" || command == "exec");
    match u8::try_from(error.exit_code()) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(_) if is_run => process::FAILED.into(),
        Ok(status) => status.into(),
        Err(_) => ExitCode::FAILURE,
    }
}

/// Returns the exit status.
fn run(command: Command, out: &mut impl Write, errors: &mut impl Write) -> Result<ExitCode, CommandError> {
    let root = Path::new(STATE_ROOT);
    let status = |is_well: bool| if is_well { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    match command {
        Command::Check { format, config, containerd } => {
            let containerd = containerd.containerd(Path::new("/"));
            let checked = |_: &progress::Count| check::check(&config, &containerd);
            let findings = progress::during("checking this host", format.json, checked);
            check::print(out, &findings, format.json).map_err(CommandError::Output)?;
            return Ok(status(check::is_fit(&findings)));
        }
        Command::Gc { dry_run, format } => return Ok(status(cleanup::gc(out, root, dry_run, format.json)?)),
        Command::Run(options) => return Ok(run::main(*options)),
        Command::Exec(options) => return Ok(exec::main(&options, root)),
        Command::Ps { format } => listings::ps(out, errors, root, format.json)?,
        Command::Top { every, once, format } => {
            let every = Duration::from_secs(every.into());
            top::top(out, root, TopOptions { every, once, json: format.json })?;
        }
        Command::Logs { pod, namespace, unit, containerd, lines } => {
            let (namespace, lines) = (namespace.as_deref(), lines as usize);
            let log = log_of(unit, &containerd.containerd(Path::new("/")));
            logs::logs(out, root, LogOptions { pod: &pod, namespace, log: &log, lines })?;
        }
        Command::Events { pod, namespace, all, once, format } => {
            let (pod, namespace) = (pod.as_deref(), namespace.as_deref());
            let options = EventOptions { pod, namespace, all, once, json: format.json };
            // If stderr is closed, nobody reads it.
            _ = events::say_what_is_awaited(errors, root, options, io::stderr().is_terminal());
            events::events(out, root, options)?;
        }
        Command::Console { pod, namespace } => console::console(out, root, &pod, namespace.as_deref())?,
        Command::Metrics { listen: None } => metrics::print(out, root)?,
        Command::Metrics { listen: Some(endpoint) } => metrics::serve(out, &endpoint, root)?,
        Command::Trace { pod, namespace, otlp, format } => {
            let (namespace, otlp) = (namespace.as_deref(), otlp.as_deref());
            trace::trace(out, root, TraceOptions { pod: &pod, namespace, json: format.json, otlp })?;
        }
        Command::Template(TemplateCommand::Ls { format }) => templates::ls(out, root, format.json)?,
        Command::Template(TemplateCommand::Build { config }) => templates::build(out, root, &config)?,
        Command::Template(TemplateCommand::Rm { names, all }) => templates::rm(out, root, names, all)?,
        Command::Config(ConfigCommand::Show { config, format }) => {
            listings::config_show(out, &config, format.json)?;
        }
        Command::Collect { output, config, unit, containerd } => {
            let containerd = containerd.containerd(Path::new("/"));
            let log = log_of(unit, &containerd);
            collect::collect(out, &output, &config, (&containerd, &log))?;
        }
        Command::Install(options) => install::install(out, &options)?,
        Command::Uninstall(options) => install::uninstall(out, &options)?,
        Command::Completions { shell } => {
            clap_complete::generate(shell, &mut Arguments::command(), "bulkhead", out);
        }
        Command::ManPages { directory } => {
            man_pages(&directory).map_err(|source| CommandError::Write { path: directory.clone(), source })?
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The log that has the lines of the shims: of this unit, if one is named, or of containerd.
fn log_of(unit: Option<String>, containerd: &Containerd) -> Log {
    unit.map_or_else(|| containerd.log(Path::new("/")), |unit| Log::Journal(vec![unit]))
}

/// Writes bulkhead.1, and a page for each subcommand.
fn man_pages(directory: &Path) -> io::Result<()> {
    fs::create_dir_all(directory)?;
    let mut command = Arguments::command().disable_help_subcommand(true);
    // It gives each subcommand its whole name.
    command.build();
    clap_mangen::generate_to(with_usage(command), directory)
}

/// A command whose page has the usage that --help prints: that of the generator lacks the values of options.
fn with_usage(command: clap::Command) -> clap::Command {
    let usage = command.clone().render_usage().to_string();
    let usage = usage.strip_prefix("Usage: ").unwrap_or(&usage).to_owned();
    command.override_usage(usage).mut_subcommands(with_usage)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Arguments::command().debug_assert();
        assert!(Arguments::try_parse_from(["bulkhead", "template", "rm"]).is_err());
        assert!(Arguments::try_parse_from(["bulkhead", "template", "rm", "00ff"]).is_ok());
    }

    /// The pages whose commands of `bulkhead` between backticks are parsed.
    const PAGES: [&str; 8] = [
        include_str!("../../README.md"),
        include_str!("../../docs/host-hardening.md"),
        include_str!("../../docs/observability.md"),
        include_str!("../../docs/operations.md"),
        include_str!("../../docs/quickstart-kubernetes.md"),
        include_str!("../../docs/resources.md"),
        include_str!("../../docs/test-runners.md"),
        include_str!("../../docs/troubleshooting.md"),
    ];

    /// What stands for a value on a page, and a value.
    const VALUES: [(&str, &str); 3] = [("ENDPOINT", "127.0.0.1:9659"), ("SHELL", "bash"), ("NAME", "00ff")];

    #[test]
    fn the_commands_of_the_pages_exist() {
        let mut seen = 0;
        for page in PAGES {
            let page = page.replace('\n', " ");
            for text in page.split('`').skip(1).step_by(2).filter(|text| text.starts_with("bulkhead ")) {
                let command = text.split(['|', '>']).next().unwrap_or_default();
                let value =
                    |word: &str| VALUES.iter().find(|(name, _)| *name == word).map(|(_, value)| *value);
                let words: Vec<_> =
                    command.split_whitespace().map(|word| value(word).unwrap_or(word).to_owned()).collect();
                // A page may name a command without what it needs.
                let is_incomplete = |kind| {
                    use clap::error::ErrorKind;
                    matches!(
                        kind,
                        ErrorKind::MissingRequiredArgument
                            | ErrorKind::MissingSubcommand
                            | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
                            | ErrorKind::DisplayVersion
                    )
                };
                match Arguments::try_parse_from(&words) {
                    Err(error) if !is_incomplete(error.kind()) => panic!("`{text}`: {error}"),
                    _ => seen += 1,
                }
            }
        }
        assert!(seen > 50, "only {seen} commands are found");
    }

    #[test]
    fn a_missing_permission_is_found_among_the_causes() {
        let list = |kind: io::ErrorKind| CommandError::List { path: "/run".into(), source: kind.into() };
        assert!(is_denied(&list(io::ErrorKind::PermissionDenied)));
        assert!(!is_denied(&list(io::ErrorKind::NotADirectory)));
        assert!(wants_root(&list(io::ErrorKind::PermissionDenied)));
        assert!(wants_root(&CommandError::NoLines { pod: "demo".into(), log: "the log".into() }));
        assert!(!wants_root(&CommandError::NoPod { pod: "demo".into() }));
    }

    #[test]
    fn no_command_that_is_hidden_is_suggested() {
        let error = |name: &str| Arguments::try_parse_from(["bulkhead", name]).unwrap_err().to_string();
        let text = error("templates");
        assert!(text.contains("'template'") && !text.contains("roff"), "{text}");
        assert!(Arguments::try_parse_from(["bulkhead", "roff", "directory"]).is_ok());
        let help = Arguments::try_parse_from(["bulkhead", "help", "template", "rm"]).unwrap_err();
        assert_eq!(help.kind(), clap::error::ErrorKind::DisplayHelp);
    }

    #[test]
    fn each_command_has_a_man_page_and_a_completion() {
        let dir = tempfile::tempdir().unwrap();
        man_pages(dir.path()).unwrap();
        for name in [
            "bulkhead.1",
            "bulkhead-check.1",
            "bulkhead-console.1",
            "bulkhead-events.1",
            "bulkhead-template-rm.1",
            "bulkhead-install.1",
            "bulkhead-run.1",
        ] {
            let page = fs::read_to_string(dir.path().join(name)).unwrap();
            assert!(page.contains(".SH DESCRIPTION"), "{name}");
        }
        let of_run = fs::read_to_string(dir.path().join("bulkhead-run.1")).unwrap();
        assert!(of_run.contains("\n\\fBbulkhead run\\fR [OPTIONS] <\\-\\-rootfs <DIR>|"), "{of_run}");
        assert!(!dir.path().join("bulkhead-help.1").exists() && !dir.path().join("bulkhead-roff.1").exists());
        let mut out = Vec::new();
        let shell = clap_complete::Shell::Bash;
        run(Command::Completions { shell }, &mut out, &mut Vec::new()).unwrap();
        assert!(String::from_utf8(out).unwrap().contains("--dry-run"));
    }
}
