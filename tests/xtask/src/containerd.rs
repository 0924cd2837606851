//! The versions of containerd that the tests run under: Debian's, of three of its releases.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use clap::ValueEnum;

use crate::cache::{self, Cache, Key};
use crate::debian::{self, unpack};
use crate::progress::step;
use crate::rig::Put;

const PACKAGE: &str = "containerd";
/// Where Debian has its programs, relative to the root of the host.
const BIN: &str = "usr/bin";
/// The programs that come with a version of containerd: itself, its client, and runc's shim.
const PROGRAMS: [&str; 3] = ["containerd", "ctr", "containerd-shim-runc-v2"];

/// Below this directory of a cache entry, the programs are laid out as on a host.
const ROOT: &str = "root";
/// The file of a cache entry with the digest of the programs.
const DIGEST: &str = "digest";

/// The file of a cache entry with the containerd's version.
const VERSION: &str = "version";

/// A version of containerd.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Containerd {
    /// Debian 12's.
    #[value(name = "1.6")]
    V1_6,
    /// Debian 13's, which the inner host has.
    #[value(name = "1.7")]
    V1_7,
    /// That of the next Debian release.
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
        let entry = self.ensure(cache)?;
        Ok(entry.map(|entry| Put { local: entry.join(ROOT), remote: "/".into() }))
    }

    /// The digest of the programs that it puts in the place of the inner host's own. The packages of the inner host say
    /// which those are.
    pub(crate) fn programs_key(self, cache: &Cache) -> Result<Key> {
        let key = Key::new();
        match self.ensure(cache)? {
            Some(entry) => key.file(&entry.join(DIGEST)),
            None => Ok(key),
        }
    }

    /// Its version, such as `1.6.20~ds1`; of the inner host's own, that of the package in the list `packages`.
    pub(crate) fn version(self, cache: &Cache, packages: &str) -> Result<String> {
        if let Some(entry) = self.ensure(cache)? {
            let path = entry.join(VERSION);
            return fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()));
        }
        let version = packages.lines().find_map(|line| line.strip_prefix(PACKAGE)?.strip_prefix(' '));
        version.map(str::to_owned).context("the inner host has no containerd")
    }

    /// Fetches the programs if they are not in the cache. Returns the cache's entry; None: there are none to fetch.
    fn ensure(self, cache: &Cache) -> Result<Option<PathBuf>> {
        let Some(suite) = self.suite() else { return Ok(None) };
        let key = debian::request(cache, suite, &[PACKAGE])?
            .bytes(PROGRAMS.join(" "))
            .bytes(ROOT)
            .bytes(DIGEST)
            .bytes(VERSION);
        let make = |dir: &Path| {
            step(&format!("fetching the containerd of Debian's {suite}"), || fetch(cache, suite, dir))
        };
        cache.entry(&format!("containerd-{suite}"), &key, make).map(Some)
    }
}

fn fetch(cache: &Cache, suite: &str, dir: &Path) -> Result<()> {
    let unpacked = dir.join("unpacked");
    let kept = dir.join(ROOT).join(BIN);
    fs::create_dir_all(&kept).with_context(|| format!("cannot make {}", kept.display()))?;
    unpack(cache, suite, PACKAGE, &unpacked)?;
    fs::write(dir.join(VERSION), ask_version(&mut below(&unpacked)?)?).context("cannot write the version")?;
    let mut digest = Key::new();
    for program in PROGRAMS {
        let to = kept.join(program);
        fs::rename(unpacked.join(BIN).join(program), &to)
            .with_context(|| format!("Debian's containerd of {suite} has no {program}"))?;
        digest = digest.file(&to)?;
    }
    fs::write(dir.join(DIGEST), digest.hex()).context("cannot write the programs' digest")?;
    cache::remove(&unpacked)
}

/// The containerd below `root`, run with the libraries there: those of this machine may be too old.
fn below(root: &Path) -> Result<Command> {
    // A release that has merged /usr has no /lib64 but for a symlink of base-files, which is not needed here.
    let loaders = ["usr/lib64", "lib64"].map(|lib| root.join(lib).join("ld-linux-x86-64.so.2"));
    let loader = loaders.iter().find(|loader| loader.exists()).context("it came without a dynamic loader")?;
    let mut containerd = Command::new(loader);
    containerd.arg("--library-path").arg(root.join("usr/lib/x86_64-linux-gnu"));
    containerd.arg(root.join(BIN).join(PACKAGE));
    Ok(containerd)
}

/// Asks a containerd for its version.
pub(crate) fn ask_version(containerd: &mut Command) -> Result<String> {
    let output = containerd.arg("--version").output().context("cannot run containerd")?;
    let text = String::from_utf8_lossy(&output.stdout);
    // `containerd github.com/containerd/containerd 1.7.24~ds1 1.7.24~ds1-6`
    let version = text.split_whitespace().nth(2);
    version.map(str::to_owned).with_context(|| {
        format!("no version of containerd in {text:?}; it said {}", String::from_utf8_lossy(&output.stderr))
    })
}
