//! `bulkhead run`: a program in a microVM without containerd. It is a client of the shim, as containerd is one: it
//! makes a bundle, starts the shim, and asks it to create the container and to start the program.
//!
//! Everything of a run is in its [directory]. However the run ends, nothing is left: what it does not remove
//! itself, because it was killed, the next run or `bulkhead gc` removes.

mod bundle;
pub(crate) mod directory;
mod end;
mod error;
mod image;
mod junit;
pub(crate) mod nat;
mod options;
mod root;
mod shim;
mod turn;
mod unpack;

use std::{
    env, fs,
    io::{self, Write},
    path::{Path, PathBuf},
    process::ExitCode,
    time::{Duration, Instant},
};

use bulkhead_host_shim::operator::{CONFIG_PATH, Config, chain};
use tokio::time::sleep_until;

use self::{
    bundle::Program,
    directory::RunDirectory,
    end::End,
    error::RunError,
    junit::Report,
    options::Network,
    root::{Root, Source},
    shim::Shim,
    turn::Turn,
};
use crate::process::{
    FAILED, ProcessError,
    attached::{self, Ended, Ending},
    runtime,
    signals::{KILLED, Signals, interrupted},
    streams::{Fifos, Tail},
    terminal,
    user::User,
};
use crate::progress::{Progress, Unit};

pub(crate) use self::options::Options;

/// How long a run waits at its end until leftovers of other runs are removed.
const LEFTOVERS: Duration = Duration::from_secs(5);

/// Runs the program and returns its exit status, or 124 to 127.
pub(crate) fn main(options: &Options) -> ExitCode {
    let begun = Instant::now();
    let tail = Tail::default();
    let report = options.junit.as_deref().map(Report::create).transpose();
    let (report, result) = match report {
        Ok(report) => (report, execute(options, &tail)),
        Err(error) => (None, Err(error)),
    };
    match &result {
        Ok(End::Exited { status: 0, .. } | End::Exited { is_oom: false, .. }) => {}
        Ok(end) => say(&end.message()),
        Err(error) => say(&chain(error)),
    }
    let status = result.as_ref().map_or_else(RunError::status, |end| end.status());
    let Some(report) = report else { return status.into() };
    let (output, result) = (tail.text(), result.map_err(|error| chain(&error)));
    let image = options.image.as_ref().map(|image| image.display().to_string());
    let command = if options.command.is_empty() { image.as_slice() } else { &options.command };
    let case = junit::Case { command, took: begun.elapsed(), result, output: &output };
    match report.write(&case) {
        Ok(()) => status.into(),
        Err(error) => {
            say(&chain(&error));
            FAILED.into()
        }
    }
}

fn say(text: &str) {
    // If stderr is closed, nobody reads it.
    _ = writeln!(io::stderr(), "bulkhead: {text}");
}

fn execute(options: &Options, tail: &Tail) -> Result<End, RunError> {
    if options.tty {
        terminal::check()?;
    }
    if options.network == Network::Nat {
        nat::check()?;
    }
    let source = Source::find(options)?;
    let runtime = runtime()?;
    let ended = runtime.block_on(async {
        // What hangs there does not hold this run up.
        let leftovers = tokio::task::spawn_blocking(remove_leftovers);
        // From now on, none of these signals ends this command before the directory is removed.
        let mut signals = Signals::catch()?;
        let directory = RunDirectory::create()?;
        let ended = run_in(&directory, options, source, tail, &mut signals).await;
        let removed = directory.remove();
        // The program has its result all the same.
        removed.unwrap_or_else(|error| say(&chain(&error)));
        _ = tokio::time::timeout(LEFTOVERS, leftovers).await;
        ended
    });
    // Threads that read the terminal or an archive, or remove leftovers, are not waited for.
    runtime.shutdown_background();
    ended
}

fn remove_leftovers() {
    for (path, removed) in directory::remove_leftovers() {
        match removed {
            Ok(()) => tracing::warn!(path = %path.display(), "removed what a run has left that was killed"),
            Err(error) => {
                tracing::warn!(path = %path.display(), error = chain(&error), "a run has left this")
            }
        }
    }
}

async fn run_in(
    directory: &RunDirectory,
    options: &Options,
    source: Source,
    tail: &Tail,
    signals: &mut Signals,
) -> Result<End, RunError> {
    let config =
        options.kernel.as_deref().map(|kernel| configuration(directory.path(), kernel)).transpose()?;
    let layer = directory.mount_layer(options.scratch)?;
    let bytes = options.scratch;
    let deadline =
        options.timeout.map(|after| (tokio::time::Instant::now() + after, End::TimedOut { after }));
    // An archive may be long, and come from a pipe.
    let unpacking = Progress::begin(&source.work(), Unit::Bytes);
    let count = unpacking.count().clone();
    let prepared = tokio::task::spawn_blocking(move || source.prepare(&layer, bytes, &count));
    let root = tokio::select! {
        biased;
        signal = signals.next() => return Err(interrupted(signal).into()),
        end = late(deadline) => return Ok(end),
        root = prepared => root.map_err(|error| ProcessError::Begin(io::Error::other(error)))??,
    };
    drop(unpacking);
    bundle::write(directory.path(), options, &program(directory, options, &root)?)?;
    let fifos = Fifos::make(directory.path(), true, options.tty)
        .map_err(|source| RunError::Prepare { path: directory.path().into(), source })?;
    let starting = Progress::begin("starting the microVM", Unit::Items);
    let started = || directory.has_shim.set(true);
    let shim = Shim::start(directory.id(), directory.path(), config.as_deref(), started).await?;
    let ended = async {
        let turn = tokio::select! {
            biased;
            signal = signals.next() => return Err(interrupted(signal).into()),
            turn = Turn::take(directory.path()) => turn,
        };
        let vmm = tokio::select! {
            biased;
            signal = signals.next() => return Err(interrupted(signal).into()),
            created = shim.create(directory.path(), root.mount, &fifos) => created?,
        };
        drop(turn);
        if options.network == Network::Nat {
            connect(directory, &shim, vmm).await?;
        }
        // From here on, the terminal belongs to the program.
        drop(starting);
        follow(&shim, options, fifos, tail, signals).await
    };
    let mut end = match ended.await {
        Ok(end) => end,
        Err(error) => {
            // It may have no container, and then `delete` does not know it. An error: it has ended.
            _ = shim.shut_down().await;
            return Err(error);
        }
    };
    match shim.end().await {
        Ok(()) => directory.has_shim.set(false),
        Err(error) => tracing::warn!(error = chain(&error), "the shim is killed"),
    }
    // Its last events have come.
    if let End::Exited { is_oom, .. } = &mut end {
        *is_oom = shim.is_oom();
    }
    Ok(end)
}

/// Connects the network namespace of a VMM. Signals are handled only afterwards: whoever ends the run must find the
/// pasta that this starts.
async fn connect(directory: &RunDirectory, shim: &Shim, vmm: u32) -> Result<(), RunError> {
    let netns = nat::netns_of(vmm)?;
    // Its pid was still its own when the namespace was opened.
    if shim.has_no_vm() {
        return Err(RunError::VmEnded);
    }
    let (path, id) = (directory.path().to_owned(), directory.id().to_owned());
    let connected = tokio::task::spawn_blocking(move || nat::connect(&path, &id, netns));
    connected.await.map_err(|error| ProcessError::Begin(io::Error::other(error)))??;
    if shim.has_no_vm() { Err(RunError::VmEnded) } else { Ok(()) }
}

/// What is run: as the options say, or else as the image says.
fn program(directory: &RunDirectory, options: &Options, root: &Root) -> Result<Program, RunError> {
    let image = &root.settings;
    let of_image = if options.command.is_empty() { image.cmd.as_ref() } else { None };
    let arguments: Vec<_> =
        image.entrypoint.iter().chain(of_image).flatten().chain(&options.command).cloned().collect();
    if arguments.is_empty() {
        return Err(RunError::NoCommand);
    }
    let workdir = match &options.workdir {
        Some(path) => path.clone(),
        None if root.is_hosts => env::current_dir().unwrap_or_default().display().to_string(),
        None if image.working_dir.is_empty() => "/".into(),
        None => image.working_dir.clone(),
    };
    if !workdir.starts_with('/') {
        return Err(ProcessError::Workdir { path: workdir }.into());
    }
    let of_image = Some(image.user.as_str()).filter(|user| !user.is_empty());
    let user = options.user.as_deref().or(of_image);
    Ok(Program {
        arguments,
        environment: bundle::environment(options, image.env.as_deref().unwrap_or_default())?,
        workdir,
        user: user.map_or(Ok(User::default()), |user| User::find(user, &root.directory))?,
        hostname: directory.id().into(),
    })
}

/// Writes the configuration that is in force, with another kernel, and returns its path.
fn configuration(bundle: &Path, kernel: &Path) -> Result<PathBuf, RunError> {
    let failed = |reason: String| RunError::Kernel { path: kernel.into(), reason };
    let found = fs::canonicalize(kernel).map_err(|error| failed(error.to_string()))?;
    let found = found.into_os_string().into_string().map_err(|_| failed("it is not UTF-8".into()))?;
    let mut text = String::new();
    for setting in Config::load(Path::new(CONFIG_PATH))?.settings() {
        let value = match setting.key {
            "kernel" => Some(toml::Value::from(found.as_str()).to_string()),
            _ => setting.value,
        };
        if let Some(value) = value {
            text.push_str(&format!("{} = {value}\n", setting.key));
        }
    }
    let path = bundle.join("config.toml");
    fs::write(&path, text).map_err(|source| RunError::Prepare { path: path.clone(), source })?;
    Ok(path)
}

/// Starts the program, and copies its streams until it ends.
async fn follow(
    shim: &Shim,
    options: &Options,
    fifos: Fifos,
    tail: &Tail,
    signals: &mut Signals,
) -> Result<End, RunError> {
    tokio::select! {
        biased;
        signal = signals.next() => return Err(interrupted(signal).into()),
        started = shim.process().start() => started?,
    }
    let deadline = options.timeout.map(|timeout| tokio::time::Instant::now() + timeout);
    let ended = attached::follow(shim.process(), fifos, tail, deadline, signals).await?;
    let Ended { status, ending } = ended;
    if status == Some(KILLED) && ending == Ending::Running && shim.has_no_vm() {
        return Err(RunError::VmEnded);
    }
    match (status, options.timeout.filter(|_| ending == Ending::TimedOut)) {
        (_, Some(after)) => Ok(End::TimedOut { after }),
        (Some(status), None) => Ok(End::Exited { status, is_oom: false }),
        (None, None) => Ok(End::Exited { status: KILLED, is_oom: false }),
    }
}

/// Returns how the run ends, when it is late.
async fn late(deadline: Option<(tokio::time::Instant, End)>) -> End {
    match deadline {
        Some((time, end)) => {
            sleep_until(time).await;
            end
        }
        None => std::future::pending().await,
    }
}
