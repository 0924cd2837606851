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
mod limits;
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
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use bulkhead_host_shim::operator::{CONFIG_PATH, Config, chain};
use rustix::{fs::Mode, process::umask};
use tokio::task::spawn_blocking;

use self::{
    bundle::Program,
    directory::RunDirectory,
    end::End,
    error::RunError,
    junit::Report,
    limits::{Deadline, Helper, Limits},
    options::Network,
    root::{Root, Source},
    shim::Shim,
    turn::Turn,
};
use crate::process::{
    FAILED, ProcessError,
    attached::{self, Ended, Ending},
    inherited, runtime,
    signals::{KILLED, Signals},
    streams::{Fifos, Tail},
    terminal,
    user::User,
};
use crate::progress::{self, Progress, Unit};

pub(crate) use self::options::Options;

/// How long a run waits at its end until leftovers of other runs are removed.
const LEFTOVERS: Duration = Duration::from_secs(5);

/// The umask of a run, as of containerd.
const UMASK: Mode = Mode::from_raw_mode(0o022);

/// Runs the program and returns its exit status, or 124 to 127.
pub(crate) fn main(options: Options) -> ExitCode {
    let begun = Instant::now();
    // What is made for the program is for all of its users. Only the report belongs to the user of this command.
    let users = umask(UMASK);
    if let Err(error) = inherited::keep_to_oneself() {
        tracing::warn!(%error, "the shim keeps file descriptors open that this command inherited, such as a lock");
    }
    let options = Arc::new(options);
    let tail = Tail::default();
    let report = options.junit.as_deref().map(|path| Report::create(path, users)).transpose();
    let (report, result) = match report {
        Ok(report) => (report, execute(&options, begun, &tail)),
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
    _ = progress::Stderr.write_all(format!("bulkhead: {text}\n").as_bytes());
}

fn execute(options: &Arc<Options>, begun: Instant, tail: &Tail) -> Result<End, RunError> {
    if options.tty {
        terminal::check()?;
    }
    let runtime = runtime()?;
    let ended = runtime.block_on(async {
        // From now on, none of these signals ends this command before the directory is removed.
        let signals = Signals::catch()?;
        let deadline = options.timeout.and_then(|after| Deadline::new(begun, after));
        let mut limits = Limits { signals, deadline };
        let its = Arc::clone(options);
        let source = limits.wait(in_thread(move || find(&its))).await??;
        // What hangs there does not hold this run up.
        let leftovers = spawn_blocking(remove_leftovers);
        let directory = RunDirectory::create()?;
        let ended = run_in(&directory, options, source, tail, &mut limits).await;
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

/// Looks at what the options name. What is named may be a pipe that nobody writes to.
fn find(options: &Options) -> Result<Source, RunError> {
    if options.network == Network::Nat {
        nat::check()?;
    }
    Source::find(options)
}

/// Does what blocks, while this thread handles signals and deadlines.
async fn in_thread<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, RunError> + Send + 'static,
) -> Result<T, RunError> {
    // An error: it has panicked.
    spawn_blocking(work).await.map_err(|error| ProcessError::Begin(io::Error::other(error)))?
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
    limits: &mut Limits,
) -> Result<End, RunError> {
    let config =
        options.kernel.as_deref().map(|kernel| configuration(directory.path(), kernel)).transpose()?;
    let layer = directory.mount_layer(options.scratch)?;
    let bytes = options.scratch;
    // An archive may be long, and come from a pipe.
    let unpacking = Progress::begin(&source.work(), Unit::Bytes);
    let count = unpacking.count().clone();
    let hostname = directory.id().to_owned();
    let root = limits.wait(in_thread(move || source.prepare(&layer, &hostname, bytes, &count))).await??;
    drop(unpacking);
    bundle::write(directory.path(), options, &program(directory, options, &root)?)?;
    let fifos = Fifos::make(directory.path(), true, options.tty)
        .map_err(|source| RunError::Prepare { path: directory.path().into(), source })?;
    let starting = Progress::begin("starting the microVM", Unit::Items);
    let shim = start(directory, config.as_deref(), limits).await?;
    let mut is_sent = false;
    let ended = async {
        let turn = limits.wait(Turn::take(directory.path())).await?;
        let vmm = limits.wait(shim.create(directory.path(), root.mount, &fifos)).await??;
        drop(turn);
        if options.network == Network::Nat {
            connect(directory, &shim, vmm, limits).await?;
        }
        // From here on, the terminal belongs to the program.
        drop(starting);
        is_sent = true;
        limits.wait(shim.process().start()).await??;
        follow(&shim, fifos, tail, limits).await
    };
    let mut end = match ended.await {
        Ok(end) => end,
        Err(error) => {
            // It may have no container, and then `delete` does not know it. An error: it has ended.
            _ = shim.shut_down().await;
            let end = if is_sent { error.as_end() } else { None };
            return end.ok_or(error);
        }
    };
    match shim.end().await {
        Ok(()) => directory.has_shim.store(false, Ordering::Relaxed),
        Err(error) => tracing::warn!(error = chain(&error), "the shim is killed"),
    }
    // Its last events have come.
    if let End::Exited { is_oom, .. } = &mut end {
        *is_oom = shim.is_oom();
    }
    Ok(end)
}

async fn start(
    directory: &RunDirectory,
    config: Option<&Path>,
    limits: &mut Limits,
) -> Result<Shim, RunError> {
    let helper = Helper::default();
    let (its, has_shim) = (helper.clone(), Arc::clone(&directory.has_shim));
    let started = move |pid| {
        has_shim.store(true, Ordering::Relaxed);
        its.begin(pid);
    };
    match limits.wait_for(&helper, Shim::start(directory.id(), directory.path(), config, started)).await {
        Ok(shim) => shim,
        Err((error, shim)) => {
            if let Some(Ok(shim)) = shim {
                // It has no container, so `delete` does not know it.
                _ = shim.shut_down().await;
            }
            Err(error)
        }
    }
}

/// Connects the network namespace of a VMM. Whoever ends the run must find the pasta that this starts.
async fn connect(
    directory: &RunDirectory,
    shim: &Shim,
    vmm: u32,
    limits: &mut Limits,
) -> Result<(), RunError> {
    let netns = nat::netns_of(vmm)?;
    // Its pid was still its own when the namespace was opened.
    if shim.has_no_vm() {
        return Err(RunError::VmEnded);
    }
    let (path, id) = (directory.path().to_owned(), directory.id().to_owned());
    let helper = Helper::default();
    let its = helper.clone();
    let connected = in_thread(move || nat::connect(&path, &id, netns, move |pid| its.begin(pid)));
    limits.wait_for(&helper, connected).await.map_err(|(error, _)| error)??;
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
        None if root.is_hosts => text_of(env::current_dir())?,
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

/// The current directory, unless it was removed.
fn text_of(current: io::Result<PathBuf>) -> Result<String, ProcessError> {
    let failed = |reason| ProcessError::CurrentDirectory { reason };
    let path = current.map_err(|error| failed(error.to_string()))?.into_os_string();
    path.into_string().map_err(|path| failed(format!("{} is not UTF-8", path.display())))
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

/// Copies the streams of the program until it ends.
async fn follow(shim: &Shim, fifos: Fifos, tail: &Tail, limits: &mut Limits) -> Result<End, RunError> {
    let deadline = limits.deadline;
    let at = deadline.map(|deadline| deadline.at);
    let ended = attached::follow(shim.process(), fifos, tail, at, &mut limits.signals).await?;
    let Ended { status, ending } = ended;
    if status == Some(KILLED) && ending == Ending::Running && shim.has_no_vm() {
        return Err(RunError::VmEnded);
    }
    match (status, deadline.filter(|_| ending == Ending::TimedOut)) {
        (_, Some(Deadline { after, .. })) => Ok(End::TimedOut { after }),
        (Some(status), None) => Ok(End::Exited { status, is_oom: false }),
        (None, None) => Ok(End::Exited { status: KILLED, is_oom: false }),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStringExt;

    use super::*;

    #[test]
    fn a_current_directory_that_cannot_be_named_is_no_working_directory() {
        assert_eq!(text_of(Ok("/srv".into())).unwrap(), "/srv");
        let error = text_of(Err(io::ErrorKind::NotFound.into())).unwrap_err().to_string();
        assert!(error.contains("current directory") && error.contains("--workdir"), "{error}");
        let path = std::ffi::OsString::from_vec(b"/srv/\xff".to_vec()).into();
        let error = text_of(Ok(path)).unwrap_err().to_string();
        assert!(error.contains("/srv/\u{fffd} is not UTF-8"), "{error}");
    }
}
