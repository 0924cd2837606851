//! The guest kernel: Debian's source with the patches in `kernel-config`, and configured from nothing but the fragments
//! there.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::cache::{Cache, Key};
use crate::debian::MIRROR;
use crate::kernel_modules;
use crate::progress::{Bar, counted_step, run_counted, run_logged, step};
use crate::tools::Tools;

const CONFIG_DIR: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../kernel-config");

/// What every run of make is told. Time, user and host are part of `uname -v`: fixed, so that the same inputs make
/// the same kernel.
const MAKE_ARGS: &[&str] = &[
    "-C",
    "source",
    "O=/work/build",
    "ARCH=x86_64",
    "KCONFIG_ALLCONFIG=/work/fragments.config",
    "KBUILD_BUILD_TIMESTAMP=1970-01-01",
    "KBUILD_BUILD_USER=bulkhead",
    "KBUILD_BUILD_HOST=bulkhead",
];

/// The symbol table is not loaded into the guest, and reading it would cost the VMM time. System.map keeps it.
const STRIP_ARGS: &[&str] = &["--strip-all", "-o", "vmlinux", "build/vmlinux"];

/// Further arguments of `make`, to sign and compress the modules. They keep the symbols that the kernel links by.
const INSTALL_ARGS: &[&str] =
    &["modules_install", "INSTALL_MOD_PATH=/work/installed", "INSTALL_MOD_STRIP=--strip-unneeded"];

/// What was compiled of a kernel whose modules are still to be built: a directory of the cache.
const TREE: &str = "kernel-tree";
/// The digest of what that kernel is built from: a file there.
const TREE_KEY: &str = "key";
/// The unpacked source and what is compiled from it: directories there, and where a kernel is built.
const SOURCE_TREE: &str = "source";
const BUILD_TREE: &str = "build";

/// How a kernel is configured, and what of it is built.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Base {
    /// The guests' kernel: from nothing but the fragments, with modules.
    Nothing,
    /// The same kernel, whose modules are not built yet.
    WithoutModules,
    /// The kernel that the benchmark compares it with: Linux's own default for a guest, without what is in
    /// `kernel-config/ordinary`, and with the fragments, without modules.
    Ordinary,
}

/// A built kernel.
#[derive(Debug)]
pub(crate) struct Kernel {
    /// An uncompressed ELF `vmlinux`; `config` and `System.map` are beside it.
    pub(crate) path: PathBuf,
    /// An archive of its modules, to be added to an initramfs. The ordinary kernel has none, and those of a guest
    /// kernel may not be built yet.
    pub(crate) modules: Option<PathBuf>,
    /// Options that are `y` or `m`.
    pub(crate) options: usize,
    /// What it was built from.
    pub(crate) source: Source,
}

/// Which source is built. `kernel-config/source.toml` says which one was reviewed and tested.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Source {
    /// Debian's package.
    pub(crate) package: String,
    /// The version of the package.
    pub(crate) version: String,
    /// The package's tar archive, relative to the tool root; its only top directory is `package`.
    archive: PathBuf,
    /// SHA-256 of that version's archive, lower-case hexadecimal.
    sha256: String,
}

/// The name of the file in `kernel-config`.
const SOURCE: &str = "source.toml";

/// The options that the fragments ask for: name, and value as it stands in a `.config`.
#[derive(Debug, Default, PartialEq, Eq)]
struct Options(BTreeMap<String, String>);

/// `kernel-config/patches`: changes of the source, in the order of their names.
#[derive(Debug, Default)]
struct Patches(Vec<(PathBuf, String)>);

/// Builds the guest kernel if it is not in the cache: about twelve minutes on two processors.
pub(crate) fn build(cache: &Cache, tools: &Tools) -> Result<Kernel> {
    Base::Nothing.build(cache, tools)
}

/// Builds the guest kernel without its modules if it is not in the cache: about a minute less. [`build`] goes on from
/// there.
pub(crate) fn build_without_modules(cache: &Cache, tools: &Tools) -> Result<Kernel> {
    Base::WithoutModules.build(cache, tools)
}

/// Builds the kernel that the benchmark compares it with if it is not in the cache: about ten minutes.
pub(crate) fn build_ordinary(cache: &Cache, tools: &Tools) -> Result<Kernel> {
    Base::Ordinary.build(cache, tools)
}

/// Fails if the source that would be built is not the pinned one. It builds nothing.
pub(crate) fn must_be_pinned(cache: &Cache, tools: &Tools) -> Result<()> {
    let pinned = Source::read(Path::new(CONFIG_DIR))?;
    pinned.must_be(&pinned.installed_version(cache, tools)?)
}

impl Base {
    /// Name of the kernel's directory in the cache.
    fn entry(self) -> &'static str {
        match self {
            Base::Nothing => "kernel",
            Base::WithoutModules => "kernel-without-modules",
            Base::Ordinary => "ordinary-kernel",
        }
    }

    fn options(self) -> Result<Options> {
        let directory = Path::new(CONFIG_DIR);
        let mut options = Options::default();
        if self != Base::Ordinary {
            options.read(&directory.join("fragments"))?;
            options.read(&directory.join("modules"))?;
            return Ok(options);
        }
        options.read(&directory.join("ordinary"))?;
        let mut fragments = Options::default();
        fragments.read(&directory.join("fragments"))?;
        for (name, value) in fragments.0 {
            options.0.entry(name).or_insert(value);
        }
        Ok(options)
    }

    /// The kernel that ours is compared with is as Linux has it.
    fn patches(self) -> Result<Patches> {
        match self {
            Base::Nothing | Base::WithoutModules => Patches::read(&Path::new(CONFIG_DIR).join("patches")),
            Base::Ordinary => Ok(Patches::default()),
        }
    }

    fn build(self, cache: &Cache, tools: &Tools) -> Result<Kernel> {
        let source = Source::read(Path::new(CONFIG_DIR))?;
        let (options, patches) = (self.options()?, self.patches()?);
        let version = source.installed_version(cache, tools)?;
        let pinned = version == source.version;
        let built_from = if pinned { source.clone() } else { source.of_version(&version, cache, tools)? };
        if !pinned {
            // Debian's archive keeps only its newest version, whose signature apt has checked. A machine that is set up
            // after a security update must still get a kernel, and whoever reads the log must see which.
            eprintln!(
                "Debian's {} is now {version}: building that, although kernel-config/source.toml pins {}",
                source.package, source.version
            );
        }
        let key = Key::new()
            .bytes(if pinned { &source.sha256 } else { &version })
            .bytes(options.to_config())
            .bytes(patches.0.iter().flat_map(|(_, text)| diffs(text)).collect::<String>())
            .bytes(MAKE_ARGS.join(" "))
            .bytes(STRIP_ARGS.join(" "))
            .bytes(INSTALL_ARGS.join(" "))
            // Debian's version of each is in what it says. Other tools of the root decide nothing in the kernel, and a
            // new version of one is not worth a build.
            .bytes(output(tools.command(cache.dir(), "gcc").arg("--version"))?)
            .bytes(output(tools.command(cache.dir(), "ld").arg("--version"))?);
        if self == Base::WithoutModules
            && let Some(whole) = cache.existing(Base::Nothing.entry(), &key)?
        {
            return Kernel::in_cache(&whole, built_from);
        }
        let name = self.entry();
        let dir = cache.entry(name, &key, |work| {
            fs::create_dir_all(work).with_context(|| format!("cannot make {}", work.display()))?;
            let goes_on = self == Base::Nothing && take_tree(cache, &key, work)?;
            if !goes_on {
                fs::create_dir(work.join("build")).context("cannot make the kernel's build directory")?;
                step(&format!("unpacking the {name}'s source"), || {
                    if pinned {
                        source.check(tools, work)?;
                    }
                    source.unpack(cache, tools, work)?;
                    patches.apply(&work.join("source"))
                })?;
            }
            let about = if goes_on { "5 to 10 minutes" } else { "10 to 20 minutes" };
            counted_step(&format!("building the {name}, {about}"), |bar| {
                self.compile(cache, tools, work, &options, bar)
            })?;
            if self == Base::WithoutModules {
                keep_tree(cache, &key, work)?;
            }
            // What is left of 2 GB are four files. The key that has signed the modules is not among them.
            [SOURCE_TREE, BUILD_TREE, "installed", "fragments.config"]
                .iter()
                .try_for_each(|name| crate::cache::remove(&work.join(name)))
        })?;
        Kernel::in_cache(&dir, built_from)
    }

    /// Configures and compiles the tree in `work`. Only modules may be missing.
    fn compile(self, cache: &Cache, tools: &Tools, work: &Path, options: &Options, bar: &Bar) -> Result<()> {
        let make = |target: &[&str], log: &str| {
            let mut command = tools.command(work, "make");
            // Each kernel has logs of its own, since the bar compares a log with the one before.
            let name = format!("{}-{log}", self.entry());
            // Not beside the log, which is removed after some days.
            let record = cache.dir().join(format!("lines-of-{name}"));
            run_counted(command.args(MAKE_ARGS).args(target), &cache.log(&name), &record, bar)
        };
        let (config, goes_on) = (work.join("build/.config"), work.join("build/vmlinux").exists());
        fs::write(work.join("fragments.config"), options.to_config()).context("cannot write the options")?;
        match self {
            // It writes the same file again, so nothing is compiled twice.
            Base::Nothing | Base::WithoutModules => make(&["allnoconfig"], "config")?,
            Base::Ordinary => {
                make(&["x86_64_defconfig", "kvm_guest.config"], "defconfig")?;
                let mut file = File::options().append(true).open(&config).context("there is no .config")?;
                file.write_all(options.to_config().as_bytes()).context("cannot write the .config")?;
                make(&["olddefconfig"], "config")?;
            }
        }
        options
            .check(&fs::read_to_string(&config).context("cannot read the kernel's .config")?)
            .context("the kernel's configuration is not what the fragments ask for")?;
        let jobs = std::thread::available_parallelism().map_or(1, usize::from);
        let jobs = format!("-j{jobs}");
        // The bar compares a log with the one before, so the rest of a build has its own.
        let log = if goes_on { "rest" } else { "build" };
        match self {
            Base::Nothing => {
                make(&[&jobs, "vmlinux", "modules"], log)?;
                make(&[&[jobs.as_str()], INSTALL_ARGS].concat(), "modules")?;
                let archive = kernel_modules::archive(&work.join("installed"))?;
                fs::write(work.join("modules.cpio"), archive).context("cannot write the modules")?;
            }
            Base::WithoutModules | Base::Ordinary => make(&[&jobs, "vmlinux"], "build")?,
        }
        run_logged(tools.command(work, "strip").args(STRIP_ARGS), &cache.log("kernel-strip"))?;
        for (from, to) in [("build/.config", "config"), ("build/System.map", "System.map")] {
            fs::copy(work.join(from), work.join(to))
                .with_context(|| format!("cannot keep the kernel's {to}"))?;
        }
        Ok(())
    }
}

impl Kernel {
    /// The kernel in a directory of the cache.
    fn in_cache(dir: &Path, source: Source) -> Result<Kernel> {
        let config = fs::read_to_string(dir.join("config")).context("cannot read the kernel's config")?;
        let options = config.lines().filter(|line| line.ends_with("=y") || line.ends_with("=m")).count();
        let modules = Some(dir.join("modules.cpio")).filter(|path| path.exists());
        Ok(Kernel { path: dir.join("vmlinux"), modules, options, source })
    }
}

/// Keeps what was compiled of a kernel without modules, so that its modules need no second compilation of the rest. It
/// takes the place of another kernel's.
fn keep_tree(cache: &Cache, key: &Key, work: &Path) -> Result<()> {
    let (tree, partial) = (cache.dir().join(TREE), work.join(TREE));
    fs::create_dir(&partial).context("cannot make the directory of a kernel's tree")?;
    for name in [SOURCE_TREE, BUILD_TREE] {
        fs::rename(work.join(name), partial.join(name)).context("cannot keep a kernel's tree")?;
    }
    fs::write(partial.join(TREE_KEY), key.hex()).context("cannot say of which kernel the tree is")?;
    crate::cache::remove(&tree)?;
    fs::rename(&partial, &tree).with_context(|| format!("cannot make {}", tree.display()))
}

/// Moves the tree that was kept of this kernel to `work`. False: there is none.
fn take_tree(cache: &Cache, key: &Key, work: &Path) -> Result<bool> {
    let (tree, taken) = (cache.dir().join(TREE), work.join(TREE));
    if fs::read_to_string(tree.join(TREE_KEY)).ok() != Some(key.hex()) {
        return Ok(false);
    }
    fs::rename(&tree, &taken).with_context(|| format!("cannot take {}", tree.display()))?;
    for name in [SOURCE_TREE, BUILD_TREE] {
        fs::rename(taken.join(name), work.join(name)).context("a kernel's tree is not whole")?;
    }
    crate::cache::remove(&taken)?;
    Ok(true)
}

impl Source {
    fn read(dir: &Path) -> Result<Source> {
        let path = dir.join(SOURCE);
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        toml::from_str(&text).with_context(|| format!("cannot understand {}", path.display()))
    }

    /// The version that is in the tool root.
    fn installed_version(&self, cache: &Cache, tools: &Tools) -> Result<String> {
        output(tools.command(cache.dir(), "dpkg-query").args(["-W", "-f=${Version}", &self.package]))
    }

    /// The same package in the version that is in the tool root.
    fn of_version(&self, version: &str, cache: &Cache, tools: &Tools) -> Result<Source> {
        Ok(Source { version: version.to_owned(), sha256: self.digest(tools, cache.dir())?, ..self.clone() })
    }

    fn must_be(&self, version: &str) -> Result<()> {
        if version != self.version {
            bail!(
                "the tool root has {package} {version}, but kernel-config/{SOURCE} pins {pinned}, which was tested: \
                 get {pinned} by `cargo xtask packages --renew` if Debian has it, or set {MIRROR} to a mirror that \
                 has it, such as a snapshot of Debian's archive, or build from {version} all the same, with --unpinned",
                package = self.package,
                pinned = self.version,
            );
        }
        Ok(())
    }

    /// The text of `source.toml` that says what the kernel was built from.
    pub(crate) fn described(&self) -> Result<Vec<u8>> {
        let path = Path::new(CONFIG_DIR).join(SOURCE);
        let pinned = Source::read(Path::new(CONFIG_DIR))?;
        if *self == pinned {
            return fs::read(&path).with_context(|| format!("cannot read {}", path.display()));
        }
        let Source { package, version, archive, sha256 } = self;
        let text = format!(
            "# The source of the guest kernel of this package: a package of Debian 13, whose archive Debian has signed.\n\
             # It is not the version that was reviewed and tested, which is {}.\n\
             package = {package:?}\nversion = {version:?}\narchive = {archive:?}\nsha256 = {sha256:?}\n",
            pinned.version
        );
        Ok(text.into_bytes())
    }

    /// The SHA-256 of the archive in the tool root.
    fn digest(&self, tools: &Tools, work: &Path) -> Result<String> {
        let archive = Path::new("/").join(&self.archive);
        let sum = output(tools.command(work, "sha256sum").arg(&archive))?;
        Ok(sum.split(' ').next().unwrap_or_default().to_owned())
    }

    /// Checks the archive of the pinned version.
    fn check(&self, tools: &Tools, work: &Path) -> Result<()> {
        let archive = Path::new("/").join(&self.archive);
        let found = self.digest(tools, work)?;
        if found != self.sha256 {
            bail!(
                "{} of {} {} has the SHA-256 {found}, but kernel-config/source.toml pins {}: it was changed",
                archive.display(),
                self.package,
                self.version,
                self.sha256,
            );
        }
        Ok(())
    }

    /// Unpacks the archive as `source` in `work`.
    fn unpack(&self, cache: &Cache, tools: &Tools, work: &Path) -> Result<()> {
        let archive = Path::new("/").join(&self.archive);
        run_logged(tools.command(work, "tar").arg("-xf").arg(&archive), &cache.log("kernel-unpack"))?;
        fs::rename(work.join(&self.package), work.join("source"))
            .with_context(|| format!("{} has no top directory {}", archive.display(), self.package))
    }
}

impl Patches {
    fn read(dir: &Path) -> Result<Patches> {
        let mut patches = Vec::new();
        for entry in fs::read_dir(dir).with_context(|| format!("cannot list {}", dir.display()))? {
            let path = entry.with_context(|| format!("cannot list {}", dir.display()))?.path();
            let text =
                fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
            patches.push((path, text));
        }
        patches.sort();
        Ok(Patches(patches))
    }

    /// Changes the tree in `source`. Each patch is a text and unified diffs, whose paths begin with `a/` and `b/`.
    fn apply(&self, source: &Path) -> Result<()> {
        let apply = |diff: &str| -> Result<()> {
            let patch = diffy::Patch::from_str(diff).context("it is no unified diff")?;
            let name = patch
                .modified()
                .and_then(|name| name.strip_prefix("b/"))
                .context("there is no `+++ b/PATH`")?;
            let path = source.join(name);
            let old = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
            let new = diffy::apply(&old, &patch).with_context(|| format!("{name} has other lines"))?;
            fs::write(&path, new).with_context(|| format!("cannot write {}", path.display()))
        };
        self.0.iter().try_for_each(|(path, text)| {
            diffs(text)
                .into_iter()
                .try_for_each(apply)
                .with_context(|| format!("cannot apply {} to the kernel's source", path.display()))
        })
    }
}

/// The diffs of a patch, each of one file. The text before the first one is left out, unless there is nothing else.
fn diffs(patch: &str) -> Vec<&str> {
    let begins: Vec<_> = patch.match_indices("\n--- a/").map(|(index, _)| index + 1).collect();
    let ends = begins.iter().skip(1).copied().chain([patch.len()]);
    let diffs: Vec<_> = begins.iter().copied().zip(ends).map(|(begin, end)| &patch[begin..end]).collect();
    if diffs.is_empty() { vec![patch] } else { diffs }
}

impl Options {
    /// Reads all `*.config` files of a directory. An option that is there twice is an error.
    fn read(&mut self, dir: &Path) -> Result<()> {
        for entry in fs::read_dir(dir).with_context(|| format!("cannot list {}", dir.display()))? {
            let path = entry.with_context(|| format!("cannot list {}", dir.display()))?.path();
            if path.extension().is_some_and(|extension| extension == "config") {
                let text =
                    fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
                self.parse(&text).with_context(|| format!("bad fragment {}", path.display()))?;
            }
        }
        Ok(())
    }

    /// Adds the options of one fragment. Each is a line `CONFIG_NAME=value # reason`.
    fn parse(&mut self, text: &str) -> Result<()> {
        for (index, line) in text.lines().enumerate() {
            if line.trim().is_empty() || line.starts_with('#') {
                continue;
            }
            let context = || format!("line {}: {line:?}", index + 1);
            let (setting, reason) = line
                .split_once(" # ")
                .context("an option needs its reason: ` # why`")
                .with_context(context)?;
            let (name, value) = setting.trim().split_once('=').context("no `=`").with_context(context)?;
            if !name.starts_with("CONFIG_") || value.is_empty() || reason.trim().is_empty() {
                return Err(anyhow::anyhow!("not `CONFIG_NAME=value # reason`")).with_context(context);
            }
            if self.0.insert(name.into(), value.into()).is_some() {
                return Err(anyhow::anyhow!("{name} is set a second time")).with_context(context);
            }
        }
        Ok(())
    }

    /// The options in the form that Kconfig reads.
    fn to_config(&self) -> String {
        self.0.iter().map(|(name, value)| format!("{name}={value}\n")).collect()
    }

    /// Checks that `config`, a finished `.config`, has every option. Kconfig drops in silence what does not exist or
    /// whose dependencies are not met.
    fn check(&self, config: &str) -> Result<()> {
        let got: BTreeMap<&str, &str> = config.lines().filter_map(|line| line.split_once('=')).collect();
        let mut lost = Vec::new();
        for (name, value) in &self.0 {
            match got.get(name.as_str()) {
                Some(have) if have == value => {}
                // An option that is off is not there.
                None if value == "n" => {}
                Some(have) => lost.push(format!("{name}={value} became {have}")),
                None => lost.push(format!("{name}={value} was dropped")),
            }
        }
        if !lost.is_empty() {
            bail!("a dependency is missing, or the option is gone: {}", lost.join(", "));
        }
        Ok(())
    }
}

/// What a command that must succeed says.
fn output(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("cannot run {command:?}"))?;
    if !output.status.success() {
        bail!("{command:?}: {}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    String::from_utf8(output.stdout).with_context(|| format!("{command:?} does not answer in UTF-8"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(text: &str) -> Result<Options> {
        let mut options = Options::default();
        options.parse(text)?;
        Ok(options)
    }

    #[test]
    fn a_fragment_is_settings_with_reasons() {
        let text = "# Title.\n\nCONFIG_A=y   # because\nCONFIG_B=\"-x\" # so there # is\n";
        assert_eq!(options(text).unwrap().to_config(), "CONFIG_A=y\nCONFIG_B=\"-x\"\n");
    }

    #[test]
    fn a_bad_line_is_named() {
        for (text, why) in [
            ("\nCONFIG_A=y\n", "reason"),
            ("\nCONFIG_A=y # \n", "reason"),
            ("\nCONFIG_A # a reason\n", "="),
            ("\nCONFIG_A= # a reason\n", "value"),
            ("\nA=y # a reason\n", "CONFIG_"),
            ("CONFIG_A=y # once\nCONFIG_A=m # twice\n", "CONFIG_A is set a second time"),
        ] {
            let error = format!("{:#}", options(text).unwrap_err());
            assert!(error.contains("line 2") && error.contains(why), "{text:?}: {error}");
        }
    }

    #[test]
    fn options_that_kconfig_lost_are_named() {
        let options = options("CONFIG_A=y # a\nCONFIG_N=32 # n\nCONFIG_GONE=y # g\n").unwrap();
        options.check("CONFIG_A=y\nCONFIG_GONE=y\nCONFIG_N=32\nCONFIG_MORE=y\n").unwrap();
        let error =
            options.check("CONFIG_A=y\n# CONFIG_GONE is not set\nCONFIG_N=8\n").unwrap_err().to_string();
        assert!(error.contains("CONFIG_GONE=y was dropped"), "{error}");
        assert!(error.contains("CONFIG_N=32 became 8"), "{error}");
        assert!(!error.contains("CONFIG_A"), "{error}");
    }

    #[test]
    fn another_source_than_the_pinned_one_is_refused_and_described() {
        let pinned = Source::read(Path::new(CONFIG_DIR)).unwrap();
        pinned.must_be(&pinned.version).unwrap();
        let error = pinned.must_be("6.12.999-1").unwrap_err().to_string();
        for word in ["6.12.999-1", &pinned.version, "BULKHEAD_DEBIAN_MIRROR", "--unpinned"] {
            assert!(error.contains(word), "{word}: {error}");
        }
        let text = fs::read(Path::new(CONFIG_DIR).join(SOURCE)).unwrap();
        assert_eq!(pinned.described().unwrap(), text);
        let other = Source { version: "6.12.999-1".into(), sha256: "00".repeat(32), ..pinned.clone() };
        let described = String::from_utf8(other.described().unwrap()).unwrap();
        assert_eq!(toml::from_str::<Source>(&described).unwrap(), other);
        assert!(described.contains(&format!("which is {}.", pinned.version)), "{described}");
    }

    #[test]
    fn a_patch_changes_the_lines_that_it_names_or_is_refused() {
        let source = tempfile::tempdir().unwrap();
        let file = source.path().join("file.c");
        let diff = "why\n\n--- a/file.c\n+++ b/file.c\n@@ -1,2 +1,3 @@\n one\n+and a half\n two\n";
        let patches = Patches(vec![("one.patch".into(), diff.into())]);
        fs::write(&file, "one\ntwo\n").unwrap();
        patches.apply(source.path()).unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "one\nand a half\ntwo\n");
        fs::write(&file, "three\n").unwrap();
        let error = format!("{:#}", patches.apply(source.path()).unwrap_err());
        assert!(error.contains("one.patch") && error.contains("file.c has other lines"), "{error}");
        // A patch may be of several files.
        let other = diff.replace("why\n\n", "").replace("file.c", "other.c");
        let both = Patches(vec![("both.patch".into(), format!("{diff}{other}"))]);
        ["file.c", "other.c"]
            .iter()
            .for_each(|name| fs::write(source.path().join(name), "one\ntwo\n").unwrap());
        both.apply(source.path()).unwrap();
        for name in ["file.c", "other.c"] {
            assert_eq!(fs::read_to_string(source.path().join(name)).unwrap(), "one\nand a half\ntwo\n");
        }
    }

    #[test]
    fn the_fragments_the_patches_and_the_source_are_well_formed() {
        let ours = Base::Nothing.options().unwrap();
        let ordinary = Base::Ordinary.options().unwrap();
        assert!(ours.0.values().any(|value| value == "m") && ordinary.0.values().all(|value| value != "m"));
        assert_eq!(Source::read(Path::new(CONFIG_DIR)).unwrap().sha256.len(), 64);
        for (path, text) in Base::Nothing.patches().unwrap().0 {
            for diff in diffs(&text) {
                assert!(
                    diffy::Patch::from_str(diff).is_ok_and(|patch| !patch.hunks().is_empty()),
                    "{}",
                    path.display()
                );
            }
        }
    }
}
