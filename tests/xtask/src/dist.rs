//! What is shipped: the static binaries, the guest kernel and its initramfs, and what the tests need beside them.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::cache::{self, Cache, Key};
use crate::commit;
use crate::kernel::{self, Kernel};
use crate::places;
use crate::rig::Put;
use crate::tools::Tools;
use crate::{initramfs, oci, progress};

pub(crate) const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Where the parts are installed, relative to the root of the host.
pub(crate) const LIB: &str = "usr/lib/bulkhead";
pub(crate) const TESTS: &str = "usr/lib/bulkhead/tests";
pub(crate) const BIN: &str = "usr/local/bin";

/// The packages whose programs are shipped.
pub(crate) const SHIPPED: [&str; 4] =
    ["bulkhead-vmm", "bulkhead-agent", "bulkhead-host-shim", "bulkhead-cli"];

/// The programs that are shipped.
const PROGRAMS: [&str; 4] = ["bulkhead-vmm", "bulkhead-agent", "containerd-shim-bulkhead-v2", "bulkhead"];

/// The package and program that stands in for kubectl.
const KUBECTL: &str = "bulkhead-kubectl";

/// The tests that `bulkhead run` runs as cargo's test runner.
const SAMPLE: &str = "tests/e2e/sample/tests.rs";

/// How the parts are built.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Profile {
    /// As they ship: small and fast, and slow to build.
    Shipped,
    /// Builds faster, to try a change.
    Quick,
}

impl Profile {
    /// As Cargo.toml calls it, and the directory that cargo puts it in.
    fn name(self) -> &'static str {
        match self {
            Profile::Shipped => "release",
            Profile::Quick => "quick",
        }
    }
}

/// All parts, laid out below a directory as they are installed below `/`.
#[derive(Debug)]
pub(crate) struct Dist {
    root: PathBuf,
    kernel: Kernel,
    /// Keeps other runs in the same target directory from changing the parts.
    _lock: File,
}

impl Dist {
    /// The directory.
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// The guest's.
    pub(crate) fn kernel(&self) -> &Kernel {
        &self.kernel
    }

    /// What puts all parts where they belong in the rig.
    pub(crate) fn put(&self) -> Put {
        Put { local: self.root.clone(), remote: "/".into() }
    }

    /// The digest of the images that the cases run.
    pub(crate) fn images_key(&self) -> Result<Key> {
        let tests = self.root.join(TESTS);
        ["busybox-oci.tar", "pause-oci.tar"]
            .iter()
            .try_fold(Key::new(), |key, name| key.file(&tests.join(name)))
    }

    /// Copies all parts to where they belong on this machine.
    pub(crate) fn install_on_host(&self) -> Result<()> {
        eprintln!("==> installing in /{LIB} and /{BIN} of this machine");
        let mut copy = Command::new("cp");
        let status = copy.args(["-a", "--remove-destination"]).arg(self.root.join(".")).arg("/").status();
        if !status.context("cannot run cp")?.success() {
            bail!("cannot install {} on this machine", self.root.display());
        }
        Ok(())
    }
}

/// Builds all parts.
pub(crate) fn build(cache: &Cache, tools: &Tools, profile: Profile) -> Result<Dist> {
    build_around(kernel::build(cache, tools)?, tools, profile)
}

/// Builds all other parts.
pub(crate) fn build_around(kernel: Kernel, tools: &Tools, profile: Profile) -> Result<Dist> {
    let packages = [&SHIPPED[..], &["bulkhead-e2e"]].concat();
    let root = target_dir().join("dist");
    fs::create_dir_all(target_dir()).context("cannot make the target directory")?;
    let lock = cache::lock(&target_dir().join("dist.lock"), "dist")?;
    // What ships has the same bytes wherever it is built. A trial keeps the paths by which an editor finds a file.
    let flags = if profile == Profile::Shipped { places::renaming()? } else { Vec::new() };
    let built = cargo_build(&packages, profile, flags)?;
    if profile == Profile::Shipped {
        let programs = PROGRAMS.map(|program| built.join(program));
        programs.iter().try_for_each(|program| places::check(program))?;
    }
    cache::remove(&root)?;
    let install = |from: &Path, to: &str, mode: u32| install(from, &root.join(to), mode);
    for program in ["containerd-shim-bulkhead-v2", "bulkhead"] {
        install(&built.join(program), &format!("{BIN}/{program}"), 0o755)?;
    }
    install(&built.join("bulkhead-vmm"), &format!("{LIB}/bulkhead-vmm"), 0o755)?;
    install(&kernel.path, &format!("{LIB}/vmlinux"), 0o644)?;
    install(&built.join("bulkhead-e2e"), &format!("{TESTS}/bulkhead-e2e"), 0o755)?;
    build_sample(&root.join(TESTS).join("sample-test"))?;
    let read = |path: &Path| fs::read(path).with_context(|| format!("cannot read {}", path.display()));
    let agent = initramfs::archive(&read(&built.join("bulkhead-agent"))?)?;
    let modules = kernel.modules.as_deref().map_or_else(|| Ok(Vec::new()), read)?;
    write(&root.join(LIB).join("initramfs.cpio"), &[agent, modules].concat())?;
    // The tests' own program plays the agent of a hostile guest.
    let hostile = initramfs::archive(&read(&built.join("bulkhead-e2e"))?)?;
    write(&root.join(TESTS).join("hostile-agent.cpio"), &hostile)?;
    let busybox = tools.path().join("bin/busybox");
    let image = oci::busybox_image(&busybox).context("cannot make the busybox image")?;
    write(&root.join(TESTS).join("busybox-oci.tar"), &image)?;
    let image = oci::pause_image(&busybox).context("cannot make the pause image")?;
    write(&root.join(TESTS).join("pause-oci.tar"), &image)?;
    Ok(Dist { root, kernel, _lock: lock })
}

/// Builds the program that replaces kubectl, in the profile of the package. It is built with the same packages as the
/// dist, so that cargo reuses their compiled libraries.
pub(crate) fn kubectl() -> Result<PathBuf> {
    let packages = [&SHIPPED[..], &["bulkhead-e2e", KUBECTL]].concat();
    Ok(cargo_build(&packages, Profile::Shipped, places::renaming()?)?.join(KUBECTL))
}

/// Builds the tests of a small project as `cargo test` builds them: with the libraries of the host.
fn build_sample(to: &Path) -> Result<()> {
    make_parent(to)?;
    let mut rustc = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
    rustc.current_dir(source_dir()).args(["--test", "--edition", "2024", "--target", TARGET, "-o"]).arg(to);
    let status = rustc.arg(SAMPLE).status().context("cannot run rustc")?;
    if !status.success() {
        bail!("rustc could not build {SAMPLE}");
    }
    Ok(())
}

/// Builds the runner of the inner host.
///
/// By itself: among other packages it would be built with the features that those need, and a change of those would
/// make the saved state of the inner host stale. It is not shipped, so it may name the places of this machine. Its
/// bytes are part of the conditions under which cases passed on runc.
pub(crate) fn rig_runner() -> Result<PathBuf> {
    Ok(cargo_build(&["rig-runner"], Profile::Shipped, Vec::new())?.join("rig-runner"))
}

/// The root of the source tree.
pub(crate) fn source_dir() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

/// A `cargo` that works on the source tree.
pub(crate) fn cargo() -> Command {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| OsString::from("cargo"));
    let mut command = Command::new(cargo);
    command.current_dir(source_dir());
    command
}

/// Where cargo puts what it builds of the source tree.
pub(crate) fn target_dir() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| source_dir().join("target"), PathBuf::from)
}

/// Builds static binaries of the packages with further flags of rustc, and returns the directory they are in.
fn cargo_build(packages: &[&str], profile: Profile, flags: Vec<OsString>) -> Result<PathBuf> {
    let target_dir = target_dir();
    let mut cargo = cargo();
    cargo.args(["build", "--locked", "--profile", profile.name(), "--target", TARGET]);
    cargo.arg("--target-dir").arg(&target_dir);
    cargo.args(packages.iter().flat_map(|package| ["--package", package]));
    // With an explicit target, these flags are not those of build scripts and macros, which must be dynamic.
    let flags = ["-C", "target-feature=+crt-static"].map(OsString::from).into_iter().chain(flags);
    // With this separator, a path in a flag may have a space.
    cargo.env("CARGO_ENCODED_RUSTFLAGS", flags.collect::<Vec<_>>().join(OsStr::new("\u{1f}")));
    // Cargo compiles again only what says it.
    cargo.env(commit::VARIABLE, commit::of_tree(source_dir()));
    // A bar may be shown meanwhile.
    let status = progress::run_said(&mut cargo).context("cannot run cargo")?;
    if !status.success() {
        bail!("cargo could not build {}", packages.join(", "));
    }
    Ok(target_dir.join(TARGET).join(profile.name()))
}

fn install(from: &Path, to: &Path, mode: u32) -> Result<()> {
    let context = || format!("cannot install {} as {}", from.display(), to.display());
    make_parent(to)?;
    fs::copy(from, to).with_context(context)?;
    fs::set_permissions(to, fs::Permissions::from_mode(mode)).with_context(context)
}

fn write(to: &Path, data: &[u8]) -> Result<()> {
    make_parent(to)?;
    fs::write(to, data).with_context(|| format!("cannot write {}", to.display()))
}

fn make_parent(path: &Path) -> Result<()> {
    let parent = path.parent().context("a path to install has no directory")?;
    fs::create_dir_all(parent).with_context(|| format!("cannot make {}", parent.display()))
}
