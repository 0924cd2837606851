//! `cargo xtask deny`: checks licenses, sources and versions of the dependencies against `deny.toml`.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::cache::{self, Cache, Key};
use crate::dist::{cargo, source_dir};
use crate::progress::{run_logged, step};

/// The version of cargo-deny on crates.io.
const VERSION: &str = "0.20.2";

/// cargo-deny checks our 250 packages in about a second, optimized or not. Its build takes half the time without.
const BUILD: [(&str, &str); 3] = [
    ("CARGO_PROFILE_RELEASE_OPT_LEVEL", "0"),
    ("CARGO_PROFILE_RELEASE_LTO", "off"),
    ("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16"),
];

/// What is checked. The advisories are left out: their database is a git repository, which many build machines cannot
/// reach. None of these needs a network, unless a package of Cargo.lock is still to be downloaded.
const CHECKS: [&str; 3] = ["bans", "licenses", "sources"];

/// Checks the dependencies. Fails if there is anything that `deny.toml` does not allow.
pub(crate) fn run(cache: &Cache) -> Result<()> {
    let program = install(cache)?;
    let mut deny = Command::new(&program);
    deny.current_dir(source_dir()).args(["--locked", "check", "--hide-inclusion-graph"]).args(CHECKS);
    let status = deny.status().with_context(|| format!("cannot run {}", program.display()))?;
    if !status.success() {
        bail!("cargo-deny: {status}");
    }
    Ok(())
}

/// Builds cargo-deny if it is not in the cache: about three minutes. Returns the program.
fn install(cache: &Cache) -> Result<PathBuf> {
    let key = Key::new()
        .bytes(VERSION)
        .bytes(BUILD.map(|(_, value)| value).join(" "))
        .file(&source_dir().join("rust-toolchain.toml"))?;
    let root = cache.entry("cargo-deny", &key, |root| {
        step(&format!("building cargo-deny {VERSION}, 2 to 5 minutes"), || build(cache, root))
    })?;
    Ok(root.join("bin/cargo-deny"))
}

fn build(cache: &Cache, root: &Path) -> Result<()> {
    let target = root.join("target");
    let mut install = cargo();
    install.args(["install", "--locked", "--version", VERSION, "cargo-deny"]);
    install.arg("--root").arg(root).arg("--target-dir").arg(&target).envs(BUILD);
    run_logged(&mut install, &cache.log("cargo-deny"))?;
    cache::remove(&target)
}
