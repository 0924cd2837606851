//! The stories, by theme. Each runs on runc first: a case that runc fails is a wrong case.

mod bad_input;
mod crash;
mod exec;
mod frozen;
mod hooks;
mod isolation;
mod leaks;
mod lifecycle;
mod limits;
mod metrics;
mod mounts;
mod network;
mod oom;
mod pause;
mod pod;
mod protocol;
mod seccomp;
mod stdio;
mod terminal;
mod update;

use anyhow::Result;

use crate::ctr::{Host, Runtime};

/// Cases of one theme.
pub(crate) struct Group {
    /// First part of the names of its cases.
    pub(crate) name: &'static str,
    /// In the order in which they run.
    pub(crate) cases: &'static [Case],
}

/// All of them, in the order in which they run: what is basic comes first.
pub(crate) const GROUPS: &[Group] = &[
    Group { name: "lifecycle", cases: lifecycle::CASES },
    Group { name: "stdio", cases: stdio::CASES },
    Group { name: "exec", cases: exec::CASES },
    Group { name: "terminal", cases: terminal::CASES },
    Group { name: "isolation", cases: isolation::CASES },
    Group { name: "mounts", cases: mounts::CASES },
    Group { name: "network", cases: network::CASES },
    Group { name: "limits", cases: limits::CASES },
    Group { name: "pause", cases: pause::CASES },
    Group { name: "metrics", cases: metrics::CASES },
    Group { name: "update", cases: update::CASES },
    Group { name: "oom", cases: oom::CASES },
    Group { name: "protocol", cases: protocol::CASES },
    Group { name: "pod_life", cases: pod::life::CASES },
    Group { name: "pod_sharing", cases: pod::sharing::CASES },
    Group { name: "pod_settings", cases: pod::settings::CASES },
    Group { name: "pod_files", cases: pod::files::CASES },
    Group { name: "pod_network", cases: pod::network::CASES },
    Group { name: "pod_streams", cases: pod::streams::CASES },
    Group { name: "pod_bad_input", cases: pod::bad_input::CASES },
    Group { name: "seccomp", cases: seccomp::CASES },
    Group { name: "hooks", cases: hooks::CASES },
    Group { name: "leaks", cases: leaks::CASES },
    Group { name: "crash", cases: crash::CASES },
    Group { name: "frozen", cases: frozen::CASES },
    Group { name: "bad_input", cases: bad_input::CASES },
];

/// One story about a user.
pub(crate) struct Case {
    /// Second part of its name.
    pub(crate) name: &'static str,
    /// Whom it can be told of.
    pub(crate) runtimes: Runtimes,
    /// Tells it. An error says what was expected and what came.
    pub(crate) story: fn(&Host) -> Result<()>,
}

impl Case {
    /// A story that is the same on every runtime.
    pub(crate) const fn both(name: &'static str, story: fn(&Host) -> Result<()>) -> Self {
        Self { name, runtimes: Runtimes::Both, story }
    }

    /// A story about something that only Bulkhead has.
    pub(crate) const fn bulkhead(name: &'static str, story: fn(&Host) -> Result<()>) -> Self {
        Self { name, runtimes: Runtimes::Bulkhead, story }
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
