//! The stories, by theme. Each runs on runc first: a case that runc fails is a wrong case.

mod bad_input;
mod cpuid;
mod crash;
mod docker;
mod exec;
mod frozen;
mod hooks;
mod hostile;
mod isolation;
mod jail;
mod leaks;
mod lifecycle;
mod limits;
mod loggers;
mod memory;
mod metrics;
mod mounts;
mod network;
mod oom;
mod pause;
mod permissions;
mod pod;
mod protocol;
mod seccomp;
mod share;
mod stdio;
mod templates;
mod terminal;
mod update;

use anyhow::Result;

use crate::containerd::Version;
use crate::ctr::{Host, Runtime};

/// Cases of one theme.
pub(crate) struct Group {
    /// First part of the names of its cases.
    pub(crate) name: &'static str,
    /// In the order in which they run.
    pub(crate) cases: &'static [Case],
    /// Whether another version of containerd may change how they end.
    pub(crate) brief: bool,
}

impl Group {
    const fn new(name: &'static str, cases: &'static [Case]) -> Self {
        Self { name, cases, brief: false }
    }

    /// One that is told under every version of containerd.
    const fn brief(name: &'static str, cases: &'static [Case]) -> Self {
        Self { name, cases, brief: true }
    }
}

/// All of them, in the order in which they run: what is basic comes first.
pub(crate) const GROUPS: &[Group] = &[
    Group::brief("lifecycle", lifecycle::CASES),
    Group::new("stdio", stdio::CASES),
    Group::new("loggers", loggers::CASES),
    Group::new("exec", exec::CASES),
    Group::new("terminal", terminal::CASES),
    Group::new("isolation", isolation::CASES),
    Group::new("mounts", mounts::CASES),
    Group::new("permissions", permissions::CASES),
    Group::new("network", network::CASES),
    Group::new("limits", limits::CASES),
    Group::new("pause", pause::CASES),
    Group::brief("metrics", metrics::CASES),
    Group::new("update", update::CASES),
    Group::brief("oom", oom::CASES),
    Group::new("memory", memory::CASES),
    Group::new("protocol", protocol::CASES),
    Group::brief("pod_life", pod::life::CASES),
    Group::new("pod_sharing", pod::sharing::CASES),
    Group::new("pod_settings", pod::settings::CASES),
    Group::new("pod_files", pod::files::CASES),
    Group::brief("pod_network", pod::network::CASES),
    Group::brief("pod_streams", pod::streams::CASES),
    Group::new("pods_at_once", pod::at_once::CASES),
    Group::new("pod_bad_input", pod::bad_input::CASES),
    Group::brief("sandboxer", pod::sandboxer::CASES),
    Group::new("docker", docker::CASES),
    Group::new("seccomp", seccomp::CASES),
    Group::new("hooks", hooks::CASES),
    Group::new("cpuid", cpuid::CASES),
    Group::new("jail", jail::CASES),
    Group::new("share", share::CASES),
    Group::new("templates", templates::CASES),
    Group::new("hostile", hostile::CASES),
    Group::new("leaks", leaks::CASES),
    Group::brief("crash", crash::CASES),
    Group::new("frozen", frozen::CASES),
    Group::new("bad_input", bad_input::CASES),
];

/// One story about a user.
pub(crate) struct Case {
    /// Second part of its name.
    pub(crate) name: &'static str,
    /// Whom it can be told of.
    pub(crate) runtimes: Runtimes,
    /// The oldest containerd it can be told under.
    pub(crate) since: Version,
    /// Tells it. An error says what was expected and what came.
    pub(crate) story: fn(&Host) -> Result<()>,
    /// Whether it is run only when it is asked for by its whole name.
    pub(crate) by_whole_name_only: bool,
}

impl Case {
    /// A story that is the same on every runtime.
    pub(crate) const fn both(name: &'static str, story: fn(&Host) -> Result<()>) -> Self {
        Self { name, runtimes: Runtimes::Both, since: Version::OLDEST, story, by_whole_name_only: false }
    }

    /// A story about something that only Bulkhead has.
    pub(crate) const fn bulkhead(name: &'static str, story: fn(&Host) -> Result<()>) -> Self {
        Self { name, runtimes: Runtimes::Bulkhead, since: Version::OLDEST, story, by_whole_name_only: false }
    }

    /// Leaves it out of every run but that of this case alone, since it is long.
    pub(crate) const fn by_whole_name_only(self) -> Self {
        Self { by_whole_name_only: true, ..self }
    }

    /// A story that needs this containerd, or its client.
    pub(crate) const fn since(self, major: u32, minor: u32) -> Self {
        Self { since: Version::new(major, minor), ..self }
    }
}

/// The runtimes of which a case can be told.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Runtimes {
    /// runc and Bulkhead.
    Both,
    /// About a part that runc does not have.
    Bulkhead,
}

impl Runtimes {
    /// Whether this runtime is among them.
    pub(crate) fn include(self, runtime: Runtime) -> bool {
        self == Self::Both || runtime == Runtime::Bulkhead
    }

    /// For the list.
    pub(crate) fn shown(self) -> &'static str {
        match self {
            Self::Both => "runc bulkhead",
            Self::Bulkhead => "bulkhead",
        }
    }
}
