//! Why a command has failed.

use std::{
    io,
    path::{Path, PathBuf},
};

use bulkhead_host_shim::operator::{BuildError, CONFIG_PATH, ConfigError, chain};

/// What to do if there is no configuration where --config says.
const ANOTHER: &str = "name another one with --config, or none for";

/// Why a command of this program has failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CommandError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("{path}: there is no such file; {ANOTHER} {CONFIG_PATH}")]
    NoConfig { path: PathBuf },
    /// Nobody reads our output any more, or it cannot be written.
    #[error("cannot write the output")]
    Output(#[source] io::Error),
    #[error("{path}: cannot list what is there")]
    List { path: PathBuf, source: io::Error },
    #[error("{path}: cannot take the lock of installations and removals")]
    Lock { path: PathBuf, source: io::Error },
    #[error(
        "{holder} installs or removes Bulkhead on this host, and has not ended within {seconds} s; wait for its end, \
         or end it, and run this again (its lock is in {path})"
    )]
    Locked { path: PathBuf, holder: String, seconds: u64 },
    #[error("{path}: cannot read it")]
    Read { path: PathBuf, source: io::Error },
    #[error("{path}: it exists already; remove it, or name another file")]
    Exists { path: PathBuf },
    #[error("{path}: cannot write it")]
    Write { path: PathBuf, source: io::Error },
    #[error("{path}: cannot remove it")]
    Remove { path: PathBuf, source: io::Error },
    #[error("there is no complete template with the name {name}; `bulkhead template ls` lists them")]
    NoTemplate { name: String },
    #[error(transparent)]
    Build(BuildError),
    #[error("cannot serve metrics at {endpoint}")]
    Listen { endpoint: String, source: io::Error },
    #[error("cannot read {log}")]
    Log { log: String, source: io::Error },
    #[error(
        "{log} has no line of a pod {pod}; its lines may be older, or in the log of another containerd, whose unit \
         --unit names, for example docker"
    )]
    NoLines { pod: String, log: String },
    #[error("there is no pod with the id {pod}; `bulkhead ps` lists the pods")]
    NoPod { pod: String },
    #[error("there are several pods with the id {pod}: {places}; name one with --namespace")]
    SeveralPods { pod: String, places: String },
    #[error(
        "the pod {pod} has no record of its start: it has not started yet, or an earlier version has started it{reason}"
    )]
    NotStarted { pod: String, reason: String },
    #[error("cannot read how the containers of the pod {pod} started: {reason}")]
    ContainerStarts { pod: String, reason: String },
    #[error("the trace of the pod {pod} is not complete: {missing}")]
    Incomplete { pod: String, missing: String },
    #[error("{path}: cannot wait for changes")]
    Wait { path: PathBuf, source: io::Error },
    #[error(
        "the pod {pod} has no console: set `console = true` in {CONFIG_PATH}, or in the file that the options of its \
         runtime name, and create the pod again; a pod that is being made has none yet"
    )]
    NoConsole { pod: String },
    #[error(
        "{path}: it is longer than the 4 MiB that a VMM writes: the guest may have taken over its VMM; see \
         \"What is not walled off yet\" in security.md, which is in /usr/share/doc/bulkhead or below /usr/local"
    )]
    LongConsole { path: PathBuf },
    #[error("{path}: it is not valid TOML: {reason}")]
    Toml { path: PathBuf, reason: String },
    #[error(
        "{path}: it has no version = 2 or version = 3; containerd's older formats are not supported; move the file \
         away, run `containerd config default > {path}`, put your changes into it again, and remove `cri` from \
         `disabled_plugins`"
    )]
    ConfigVersion { path: PathBuf },
    #[error(
        "{path}: it disables the CRI plugin of containerd, which only Kubernetes needs; ctr and docker use Bulkhead \
         without `bulkhead install`; for Kubernetes, remove `{name}` from `disabled_plugins` there, and run this again"
    )]
    CriDisabled { path: PathBuf, name: String },
    #[error(
        "{path}: it has no version = 2 or version = 3, and {generator} generates it; put the version at the beginning \
         of your template beside it, if you have one, or update {generator}, and start it again"
    )]
    GeneratedVersion { path: PathBuf, generator: &'static str },
    #[error(
        "there is no {path}, which {generator} generates when it starts; start {generator} first, and run this again"
    )]
    NotGenerated { path: PathBuf, generator: &'static str },
    #[error(
        "{path}: `bulkhead install` has put the handlers there, and it configures one containerd of a host only; run \
         `bulkhead uninstall` first"
    )]
    OtherContainerd { path: PathBuf },
    #[error(
        "the Debian package has installed {package}, and the archive {list}, and both have files in /usr/lib/bulkhead; \
         to keep the archive, run `dpkg --remove bulkhead`, and unpack it again; to keep the package, remove the files \
         of the archive, and install the package again; then run this again"
    )]
    TwoInstallations { package: PathBuf, list: PathBuf },
    #[error("{path}: the handler {handler} is there already, but for the runtime {runtime}; remove it first")]
    OtherHandler { path: PathBuf, handler: String, runtime: String },
    #[error(
        "{path}: `bulkhead install` has not written this file, and would put the handlers there; move it to another \
         name in this directory, and run this again"
    )]
    OtherFile { path: PathBuf },
    #[error(
        "{path}: the line `{line}` is there without its counterpart; remove the lines of Bulkhead by hand"
    )]
    HalfBlock { path: PathBuf, line: &'static str },
    #[error(
        "{path}: handlers of Bulkhead are left, which `bulkhead install` has not written or another tool has rewritten; \
         delete the tables {tables} and those below them, and run this again"
    )]
    HandlersLeft { path: PathBuf, tables: String },
    #[error(
        "containerd is not found: {reason}; install it, or name its configuration with --containerd-config"
    )]
    NoContainerd { reason: String },
    #[error("there is no program containerd in PATH ({path}); install it, or add its directory to PATH")]
    NotInPath { path: String },
    #[error(
        "{path}: there is no such file, so no containerd reads it; correct --containerd-config, or create it with \
         `containerd config default`"
    )]
    NoContainerdConfig { path: PathBuf },
    #[error(
        "{path}: containerd cannot read this configuration, or a file that it imports; \
         `containerd --config {path} config dump` says why"
    )]
    Asked { path: PathBuf, source: io::Error },
    #[error("{path} was not changed, because somebody else has changed it at the same time; run this again")]
    ChangedMeanwhile { path: PathBuf },
    #[error(
        "there is no {path}, and by {record} the handlers are there; mount its file system and run this again, or, if \
         it is gone for good, remove {record}"
    )]
    NotThere { path: PathBuf, record: PathBuf },
    #[error("{path} was not changed, because {reason}")]
    Refused { path: PathBuf, reason: String },
    #[error(
        "{path} leads out of the root directory {root}: replace the symbolic link in it by a file or a directory"
    )]
    OutsideRoot { path: PathBuf, root: PathBuf },
    #[error(
        "cannot restart containerd; restart it by other means, because it reads its configuration only when it starts"
    )]
    Restart(#[source] io::Error),
    /// Of steps that were all taken.
    #[error("{} steps have failed, and the others were taken: {}", .0.len(), all(.0))]
    Several(Vec<CommandError>),
}

/// The errors with their causes.
fn all(errors: &[CommandError]) -> String {
    errors.iter().map(|error| chain(error)).collect::<Vec<_>>().join("; and ")
}

impl CommandError {
    /// What to do about an error of the configuration, if that is known. The message ends with `; ` and this.
    pub(crate) fn remedy(&self) -> Option<String> {
        match self {
            Self::Config(error) => error.remedy(),
            Self::NoConfig { .. } => Some(format!("{ANOTHER} {CONFIG_PATH}")),
            _ => None,
        }
    }

    /// Why a file that must not exist yet cannot be written.
    pub(crate) fn not_written(path: &Path, source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::AlreadyExists => Self::Exists { path: path.into() },
            _ => Self::Write { path: path.into(), source },
        }
    }
}
