//! The directories of this machine that the compiler may write into a program: the text of a panic names a source file.
//! A program that ships names other ones instead, so that its bytes do not depend on where it was built.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::dist::{TARGET, source_dir, target_dir};

/// A directory of this machine.
#[derive(Debug)]
struct Place {
    path: PathBuf,
    /// What a program that ships says in its place.
    name: String,
    /// What is below it while something is built. The path alone may be in a program by chance, such as `/bulkhead`.
    parts: Vec<String>,
}

/// Flags of rustc by which programs do not name the places of this machine.
pub(crate) fn renaming() -> Result<Vec<OsString>> {
    // rustc takes the last prefix that fits. So places come before those that may be in them.
    let flags = places()?.into_iter().map(|place| {
        let mut flag = OsString::from("--remap-path-prefix=");
        flag.push(place.path);
        flag.push(format!("={}", place.name));
        flag
    });
    Ok(flags.collect())
}

/// Fails if a program names a place of this machine.
pub(crate) fn check(program: &Path) -> Result<()> {
    let data = fs::read(program).with_context(|| format!("cannot read {}", program.display()))?;
    match named_in(&data, &places()?) {
        None => Ok(()),
        Some(path) => bail!(
            "{} would not be the same if it were built elsewhere: it has the text {path}",
            program.display()
        ),
    }
}

/// The beginning of a path of one of the places, all of which are absolute, that the data have.
fn named_in(data: &[u8], places: &[Place]) -> Option<String> {
    let path = |place: &Place, part: &String| format!("{}/{part}/", place.path.display());
    let paths = places.iter().flat_map(|place| place.parts.iter().map(move |part| path(place, part)));
    let paths: Vec<_> = paths.collect();
    let roots = data.iter().enumerate().filter(|(_, byte)| **byte == b'/');
    let mut rest = roots.filter_map(|(at, _)| data.get(at..));
    rest.find_map(|rest| paths.iter().find(|path| rest.starts_with(path.as_bytes())).cloned())
}

impl Place {
    fn new(path: PathBuf, name: &str, parts: &[&str]) -> Place {
        Place { path, name: name.into(), parts: parts.iter().map(|part| (*part).to_owned()).collect() }
    }
}

/// The places of this machine, each as it is given and without symbolic links.
fn places() -> Result<Vec<Place>> {
    let crates = ["cli", "guest-agent", "host-shim", "vmm", "tests"];
    let sysroot = PathBuf::from(rustc(&["--print", "sysroot"])?.trim());
    let version = rustc(&["-vV"])?;
    let commit = version.lines().find_map(|line| line.strip_prefix("commit-hash: "));
    let commit = commit.context("`rustc -vV` names no commit-hash")?;
    let mut places = Vec::new();
    for (path, name, parts) in [
        (source_dir().to_owned(), "/bulkhead".to_owned(), &crates[..]),
        (target_dir(), "/target".into(), &[TARGET, "release"]),
        (cargo_home()?, "/cargo".into(), &["registry", "git"]),
        // If the source of the standard library is installed, rustc names the files there. Otherwise it says this.
        (sysroot.join("lib/rustlib/src/rust"), format!("/rustc/{commit}"), &["library"]),
    ] {
        let path = std::path::absolute(path).context("there is no current directory")?;
        // What does not exist is not named either.
        let whole = path.canonicalize().unwrap_or_else(|_| path.clone());
        for path in [&whole, &path] {
            ensure!(path.to_str().is_some(), "the path {} is not UTF-8, which cargo needs", path.display());
        }
        if whole != path {
            places.push(Place::new(path, &name, parts));
        }
        places.push(Place::new(whole, &name, parts));
    }
    Ok(places)
}

/// Where cargo has the sources of dependencies.
fn cargo_home() -> Result<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let home = set("CARGO_HOME").or_else(|| Some(set("HOME")?.join(".cargo")));
    home.context("no directory of cargo: set CARGO_HOME or HOME")
}

fn rustc(arguments: &[&str]) -> Result<String> {
    let mut rustc = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
    let output = rustc.current_dir(source_dir()).args(arguments).output().context("cannot run rustc")?;
    ensure!(output.status.success(), "{rustc:?} failed: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).context("rustc did not print text")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Compiles a program that can panic, from a directory named `place`, with flags for that.
    fn compiled(root: &Path, place: &str, is_renamed: bool) -> (Place, Vec<u8>) {
        let place = Place::new(root.join(place), "/bulkhead", &["vmm"]);
        let source = place.path.join("vmm/main.rs");
        fs::create_dir_all(source.parent().unwrap()).unwrap();
        fs::write(&source, "fn main() { panic!(\"{}\", std::env::args().count()) }\n").unwrap();
        let program = root.join("program");
        let mut rustc = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
        rustc.arg(&source).args(["--edition", "2024", "-C", "strip=debuginfo", "-o"]).arg(&program);
        if is_renamed {
            rustc.arg(format!("--remap-path-prefix={}={}", place.path.display(), place.name));
        }
        assert!(rustc.status().unwrap().success());
        (place, fs::read(program).unwrap())
    }

    #[test]
    fn a_program_with_a_path_of_this_machine_is_found_and_renaming_avoids_it() {
        let dir = tempfile::tempdir().unwrap();
        let (place, plain) = compiled(dir.path(), "here", false);
        let places = [place];
        assert_eq!(named_in(&plain, &places), Some(format!("{}/vmm/", places[0].path.display())));
        let (_, here) = compiled(dir.path(), "here", true);
        let (_, there) = compiled(dir.path(), "over there", true);
        assert_eq!(named_in(&here, &places), None);
        assert!(here == there, "the place of the source changes the program");
    }

    #[test]
    fn the_name_of_a_place_is_no_place() {
        let place = Place::new("/bulkhead".into(), "/bulkhead", &["vmm"]);
        assert_eq!(named_in(b"/usr/lib/bulkhead/vmlinux", &[place]), None);
    }

    #[test]
    fn the_places_are_those_of_this_build() {
        let places = places().unwrap();
        let has = |path: &Path| places.iter().any(|place| path.starts_with(&place.path));
        assert!(has(&source_dir().canonicalize().unwrap()) && has(&cargo_home().unwrap()), "{places:?}");
        assert!(places.iter().all(|place| place.path.is_absolute()), "{places:?}");
    }
}
