//! Debian's packages: where they come from, and which versions of them were installed.
//!
//! A Debian mirror has only the newest version of each package. The key of a cache entry that is made of packages
//! contains the names of the packages and the mirror. Their versions are known only after the installation, so the
//! entry lists them. Everything that is built or tested with the entry has this list in its own key.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::SystemTime;

use anyhow::{Context, Result, bail};

use crate::cache::{self, Cache, Key};
use crate::chroot::MountNamespace;
use crate::containerd::Containerd;
use crate::progress::{run_logged, step};
use crate::rig::Rig;
use crate::tools::Tools;

/// Debian's release of the tool root and of the inner host.
pub(crate) const SUITE: &str = "trixie";

/// The variable that names the mirror, a URL. One of snapshot.debian.org gives each machine the same versions.
/// Without it, mmdebstrap's default mirrors are used.
pub(crate) const MIRROR: &str = "BULKHEAD_DEBIAN_MIRROR";

/// The key of what is asked for: packages of a release, from the mirror that is set, since the last renewal.
pub(crate) fn request(cache: &Cache, suite: &str, packages: &[&str]) -> Result<Key> {
    let renewed = match fs::read_to_string(renewal(cache)) {
        Ok(time) => Some(time),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(error).context("cannot read when the packages were renewed"),
    };
    Ok(request_key(suite, packages, mirror().as_deref(), renewed.as_deref()))
}

fn request_key(suite: &str, packages: &[&str], mirror: Option<&str>, renewed: Option<&str>) -> Key {
    let mut key = Key::new().bytes(suite).bytes(packages.join(" "));
    for (name, value) in [("mirror", mirror), ("renewed", renewed)] {
        if let Some(value) = value {
            key = key.bytes(name).bytes(value);
        }
    }
    key
}

fn mirror() -> Option<String> {
    std::env::var(MIRROR).ok().filter(|mirror| !mirror.is_empty())
}

/// The file that says when a person last asked for the newest versions.
fn renewal(cache: &Cache) -> PathBuf {
    cache.dir().join("packages-renewed")
}

/// Makes the next run build everything that is made of packages again, from the newest versions.
fn renew(cache: &Cache) -> Result<()> {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).context("the clock is wrong")?;
    fs::write(renewal(cache), now.as_nanos().to_string()).context("cannot note that packages are renewed")
}

/// Prints the Debian packages that the tests run with, after digests by which two machines can be compared.
pub(crate) fn run(cache: &Cache, renewed: bool) -> Result<()> {
    if renewed {
        renew(cache)?;
    }
    let tools = Tools::ensure(cache)?;
    let rig = Rig::ensure(cache, &tools)?;
    println!("rig: {}", rig.key().hex());
    for containerd in [Containerd::V1_6, Containerd::V2] {
        println!("programs of containerd {}: {}", containerd.name(), containerd.programs_key(cache)?.hex());
    }
    println!("\ninner host:\n{}\ntool root:\n{}", rig.packages(), tools.packages()?);
    Ok(())
}

/// Lists the packages that are installed in `root`: a line `NAME VERSION` for each, sorted.
pub(crate) fn installed(root: &Path) -> Result<String> {
    let path = root.join("var/lib/dpkg/status");
    let status = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    list_installed(&status).with_context(|| format!("cannot understand {}", path.display()))
}

/// dpkg's database consists of paragraphs as deb822(5) describes them.
fn list_installed(status: &str) -> Result<String> {
    let mut lines = Vec::new();
    for paragraph in status.split("\n\n").filter(|paragraph| !paragraph.trim().is_empty()) {
        let field = |name: &str| {
            let value = paragraph.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
            value.with_context(|| format!("a package without {name}: {paragraph}"))
        };
        if field("Status")?.ends_with(" installed") {
            lines.push(format!("{} {}\n", field("Package")?, field("Version")?));
        }
    }
    if lines.is_empty() {
        bail!("no package is installed");
    }
    lines.sort();
    Ok(lines.concat())
}

/// Installs Debian's minimal system and `packages` at `root`.
pub(crate) fn debootstrap(cache: &Cache, name: &str, packages: &[&str], root: &Path) -> Result<()> {
    let flags = ["--variant=minbase", &format!("--include={}", packages.join(","))];
    mmdebstrap(cache, name, &flags, SUITE, root)
}

/// Unpacks a package of another Debian release, and those that it needs, at `root`. Files are then taken from there.
pub(crate) fn unpack(cache: &Cache, suite: &str, package: &str, root: &Path) -> Result<()> {
    let flags = ["--variant=extract", &format!("--include={package}")];
    mmdebstrap(cache, suite, &flags, suite, root)
}

/// Some files and directories of a package of the inner host's release, for a run that brings them along: a directory
/// that has them at their paths in the package. The inner host must have the libraries that they need.
pub(crate) fn files(cache: &Cache, package: &str, paths: &[&str]) -> Result<PathBuf> {
    let key = request(cache, SUITE, &[package])?.bytes(paths.join("\n"));
    let fetch = |to: &Path| {
        let unpacked = to.with_extension("unpacked");
        cache::remove(&unpacked)?;
        let moved = unpack(cache, SUITE, package, &unpacked).and_then(|()| {
            for path in paths {
                let place = to.join(path);
                fs::create_dir_all(place.parent().unwrap_or(to))?;
                fs::rename(unpacked.join(path), place)
                    .with_context(|| format!("Debian's package {package} has no {path}"))?;
            }
            Ok(())
        });
        cache::remove(&unpacked)?;
        moved
    };
    cache.entry(package, &key, |to| step(&format!("fetching Debian's {package}"), || fetch(to)))
}

fn mmdebstrap(cache: &Cache, name: &str, flags: &[&str], suite: &str, root: &Path) -> Result<()> {
    require(cache, "mmdebstrap", "mmdebstrap")?;
    let mut command = MountNamespace::copy().command("mmdebstrap");
    command.args(["--mode=root", "--format=directory"]).args(flags);
    if suite != SUITE || mirror().is_some() {
        // The parts of a release that is still to come may be signed for a few days only and then not touched for
        // weeks. A snapshot is signed for the days after its date.
        command.arg("--aptopt=Acquire::Check-Valid-Until \"false\"");
    }
    command.arg(suite).arg(root).args(mirror());
    run_logged(&mut command, &cache.log(&format!("mmdebstrap-{name}")))
}

/// Installs `package`, which has `program`, on this machine if it lacks it and apt-get can.
pub(crate) fn require(cache: &Cache, program: &str, package: &str) -> Result<()> {
    if runs(program) {
        return Ok(());
    }
    if !runs("apt-get") {
        bail!("{program} is missing, and there is no apt-get to install it with: install {package}");
    }
    step(&format!("installing {package}, which is missing, by apt-get"), || {
        let log = cache.log("apt-get");
        run_logged(Command::new("apt-get").arg("update"), &log)?;
        let mut install = Command::new("apt-get");
        install.args(["install", "-y", "--no-install-recommends", package]);
        run_logged(install.env("DEBIAN_FRONTEND", "noninteractive"), &log)
    })
}

fn runs(program: &str) -> bool {
    let mut command = Command::new(program);
    command.arg("--version").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_is_of_installed_packages_with_their_versions() {
        let status = "Package: zlib1g\nStatus: install ok installed\nVersion: 1:1.3-1\nDescription: x\n .\n Version: 0\n\n\
                      Package: gone\nStatus: deinstall ok config-files\nVersion: 2\n\n\
                      Package: bash\nStatus: install ok installed\nVersion: 5.2\n\n";
        assert_eq!(list_installed(status).unwrap(), "bash 5.2\nzlib1g 1:1.3-1\n");
    }

    #[test]
    fn a_database_that_does_not_say_what_is_installed_is_refused() {
        for status in ["", "\n", "Package: a\nStatus: install ok installed\n", "Package: a\nVersion: 1\n"] {
            list_installed(status).unwrap_err();
        }
    }

    #[test]
    fn a_request_is_renewed_by_its_mirror_and_by_a_person() {
        let keys = [
            request_key("a", &["b"], None, None),
            request_key("a", &["b"], Some("1"), None),
            request_key("a", &["b"], None, Some("1")),
            request_key("a", &["b"], Some("2"), None),
            request_key("b", &["b"], None, None),
        ];
        let names: std::collections::BTreeSet<_> = keys.iter().map(Key::hex).collect();
        assert_eq!(names.len(), keys.len());
    }

    #[test]
    fn a_renewal_makes_another_request() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path()).unwrap();
        let key = || request(&cache, "a", &["b"]).unwrap().hex();
        let before = key();
        assert_eq!(before, key());
        renew(&cache).unwrap();
        assert_ne!(before, key());
    }
}
