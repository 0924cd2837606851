//! What a case is, and a group of them.

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
    pub(super) const fn new(name: &'static str, cases: &'static [Case]) -> Self {
        Self { name, cases, brief: false }
    }

    /// One that is told under every version of containerd.
    pub(super) const fn brief(name: &'static str, cases: &'static [Case]) -> Self {
        Self { name, cases, brief: true }
    }
}

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
