//! The versions of containerd that the tests run under: Debian's, of three of its releases.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use clap::ValueEnum;

use crate::cache::{Cache, Key};
use crate::progress::step;
use crate::rig::Put;
use crate::tools::unpack;

/// Where Debian has them, relative to the root of the host.
const BIN: &str = "usr/bin";
/// What is of containerd's version: itself, its client, and runc's shim.
const PROGRAMS: [&str; 3] = ["containerd", "ctr", "containerd-shim-runc-v2"];

/// A version of containerd.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Containerd {
    /// Debian 12's.
    #[value(name = "1.6")]
    V1_6,
    /// Debian 13's, which the inner host has.
    #[value(name = "1.7")]
    V1_7,
    /// That of the Debian to come.
    #[value(name = "2")]
    V2,
}

impl Containerd {
    /// As the user says it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Containerd::V1_6 => "1.6",
            Containerd::V1_7 => "1.7",
            Containerd::V2 => "2",
        }
    }

    /// The release to take it from, if it is not the inner host's own.
    fn suite(self) -> Option<&'static str> {
        match self {
            Containerd::V1_6 => Some("bookworm"),
            Containerd::V1_7 => None,
            Containerd::V2 => Some("forky"),
        }
    }

    /// Whether it takes the place of the one that the inner host was started with.
    pub(crate) fn is_brought(self) -> bool {
        self.suite().is_some()
    }

    /// What puts it in the place of the inner host's own, which then has to be restarted; None: it is that one.
    pub(crate) fn put(self, cache: &Cache) -> Result<Option<Put>> {
        let Some(suite) = self.suite() else { return Ok(None) };
        let key = Key::new().bytes(suite).bytes(PROGRAMS.join(" "));
        let programs = cache.entry(&format!("containerd-{suite}"), &key, |dir| {
            step(&format!("fetching the containerd of Debian's {suite}"), || fetch(cache, suite, dir))
        })?;
        Ok(Some(Put { local: programs, remote: "/".into() }))
    }
}

fn fetch(cache: &Cache, suite: &str, dir: &Path) -> Result<()> {
    let root = dir.with_extension("root");
    unpack(cache, suite, "containerd", &root)?;
    let kept = dir.join(BIN);
    fs::create_dir_all(&kept).with_context(|| format!("cannot make {}", kept.display()))?;
    for program in PROGRAMS {
        fs::rename(root.join(BIN).join(program), kept.join(program))
            .with_context(|| format!("Debian's containerd of {suite} has no {program}"))?;
    }
    fs::remove_dir_all(&root).with_context(|| format!("cannot remove {}", root.display()))
}
