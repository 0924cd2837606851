//! The stories, by theme. Each runs on runc first: a case that runc fails is a wrong case.

mod bad_input;
mod crash;
mod exec;
mod isolation;
mod leaks;
mod lifecycle;
mod limits;
mod mounts;
mod network;
mod stdio;

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
    Group { name: "isolation", cases: isolation::CASES },
    Group { name: "mounts", cases: mounts::CASES },
    Group { name: "network", cases: network::CASES },
    Group { name: "limits", cases: limits::CASES },
    Group { name: "leaks", cases: leaks::CASES },
    Group { name: "crash", cases: crash::CASES },
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
