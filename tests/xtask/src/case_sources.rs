//! What the end-to-end cases of each group are made of: as long as that is the same, they would pass on runc again.
//!
//! A group is made of its file in `tests/e2e/src/cases`, of the modules that this file names, of those that they name,
//! and so on. What runs the cases belongs to each group. A file that is included in a source belongs to that source,
//! and a package of this project belongs to the sources that name it. Of all other packages, the versions and features
//! count. `cases/mod.rs` does not count, since it only lists the groups.
//!
//! A module is named by a path that begins with `crate`, `super`, `self` or a module of the same file. A method needs
//! no such path, so a source that implements something for a type of another file belongs to each group.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::cache::Key;

/// The package of the tests' program.
const E2E: &str = "tests/e2e";
/// Its name.
const E2E_NAME: &str = "bulkhead-e2e";
/// Its modules that are used by commands other than `test`. Groups name those that they need.
const OF_OTHER_COMMANDS: [&str; 9] =
    ["bench", "clock_comparison", "counts", "cpuid", "faults", "hostile_agent", "io", "soak", "story"];

/// The digest of each group's sources, by its name, in the project at `root`.
pub(crate) fn of_groups(root: &Path) -> Result<BTreeMap<String, String>> {
    // As the paths of included files are.
    let root = &without_dots(root);
    let sources = Sources::read(root)?;
    let list = sources.dir.join("cases/mod.rs");
    let groups = groups(&sources.text(&list)?.code)?;
    let conditions = conditions(root)?;

    let mut digests = BTreeMap::new();
    for (name, file) in groups {
        let (mut files, packages) = sources.closure(&sources.dir.join("cases").join(file))?;
        for package in packages {
            files.extend(files_below(&root.join(package))?);
        }
        digests.insert(name, digest(root, &files)?.key(&conditions).hex());
    }
    Ok(digests)
}

/// The group's files, from lines such as `Group::new("pod_life", pod::life::CASES),`.
fn groups(list: &str) -> Result<BTreeMap<String, PathBuf>> {
    let mut groups = BTreeMap::new();
    for line in list.lines() {
        let Some((_, declared)) = line.split_once("Group::").filter(|_| line.contains("::CASES")) else {
            continue;
        };
        let name = declared.split('"').nth(1).with_context(|| format!("a group without a name: {line}"))?;
        let module = declared.split(", ").nth(1).and_then(|rest| rest.split_once("::CASES"));
        let (module, _) = module.with_context(|| format!("a group without a module: {line}"))?;
        groups.insert(name.to_owned(), PathBuf::from(format!("{}.rs", module.replace("::", "/"))));
    }
    ensure!(!groups.is_empty(), "no groups in {E2E}/src/cases/mod.rs");
    Ok(groups)
}

/// The sources of the tests' program.
struct Sources {
    /// Their directory.
    dir: PathBuf,
    texts: BTreeMap<PathBuf, Source>,
    /// The files of the modules in a module, by its file.
    children: BTreeMap<PathBuf, Vec<PathBuf>>,
    /// The packages of this project that some source could name, by the names of their libraries.
    packages: BTreeMap<String, PathBuf>,
    root: PathBuf,
}

/// A source.
struct Source {
    /// Without comments.
    code: String,
    /// The words of each path in it, and of each `use` statement, which may hold several paths. In order.
    paths: Vec<Vec<String>>,
    /// Files that are compiled into it.
    included: Vec<PathBuf>,
}

impl Sources {
    fn read(root: &Path) -> Result<Sources> {
        let dir = root.join(E2E).join("src");
        let mut texts = BTreeMap::new();
        for file in
            files_below(&dir)?.into_iter().filter(|file| file.extension().is_some_and(|it| it == "rs"))
        {
            texts.insert(file.clone(), Source::of(&file, &read(&file)?));
        }
        let packages =
            packages(root)?.into_iter().map(|(name, path)| (name.replace('-', "_"), path)).collect();
        let mut sources = Sources { dir, texts, children: BTreeMap::new(), packages, root: root.to_owned() };
        let mut children: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for file in sources.texts.keys().filter(|file| **file != sources.main()) {
            children.entry(sources.parent(file)).or_default().push(file.clone());
        }
        sources.children = children;
        Ok(sources)
    }

    fn text(&self, file: &Path) -> Result<&Source> {
        self.texts.get(file).with_context(|| format!("there is no {}", file.display()))
    }

    /// All files that belong to a group with this file, and the packages of this project that they name.
    fn closure(&self, file: &Path) -> Result<(BTreeSet<PathBuf>, BTreeSet<PathBuf>)> {
        // They only list modules and groups.
        let lists = [self.main(), self.dir.join("cases/mod.rs")];
        let (mut found, mut packages) = (BTreeSet::new(), BTreeSet::new());
        let mut left = vec![file.to_owned(), self.dir.join("cases/case.rs")];
        left.extend(self.with_foreign_methods());
        let of_other_commands = |file: &PathBuf| {
            self.parent(file) == self.main() && OF_OTHER_COMMANDS.contains(&module_name(file).as_str())
        };
        left.extend(self.taken(&self.main())?.into_iter().filter(|file| !of_other_commands(file)));
        while let Some(file) = left.pop() {
            if lists.contains(&file) || !found.insert(file.clone()) {
                continue;
            }
            left.extend(self.taken(&file)?);
            // Its file may use what it takes from there without a path.
            left.push(self.parent(&file));
            let words = self.text(&file)?.paths.iter().flatten();
            packages.extend(words.filter_map(|word| self.packages.get(word)).cloned());
        }
        found.insert(self.main());
        let included: Vec<_> = found.iter().filter_map(|file| self.texts.get(file)).collect();
        found.extend(included.into_iter().flat_map(|source| source.included.clone()));
        Ok((found, with_their_packages(&self.root, packages)?))
    }

    fn main(&self) -> PathBuf {
        self.dir.join("main.rs")
    }

    /// The files of the modules that a file names.
    fn taken(&self, file: &Path) -> Result<BTreeSet<PathBuf>> {
        let mut taken = BTreeSet::new();
        for path in &self.text(file)?.paths {
            let mut base = match path.first().map(String::as_str) {
                Some("crate") => self.main(),
                Some("super") => self.parent(file),
                // A module of this file, or no module of this program.
                _ => file.to_owned(),
            };
            for _ in path.iter().skip(1).take_while(|word| *word == "super") {
                base = self.parent(&base);
            }
            // In a module inside the file, `super` is the file itself.
            if path.first().is_some_and(|word| word == "super") {
                self.take_named(file, path, &mut taken);
            }
            self.take_named(&base, path, &mut taken);
        }
        Ok(taken)
    }

    /// Takes the modules in a module that have one of these names, those in them, and so on.
    fn take_named(&self, module: &Path, names: &[String], taken: &mut BTreeSet<PathBuf>) {
        for file in self.children.get(module).into_iter().flatten() {
            if names.contains(&module_name(file)) {
                taken.insert(file.clone());
                self.take_named(file, names, taken);
            }
        }
    }

    /// The file of the module that a file is in.
    fn parent(&self, file: &Path) -> PathBuf {
        let dir = file.parent().unwrap_or(file);
        let dir = if file.ends_with("mod.rs") { dir.parent().unwrap_or(dir) } else { dir };
        let files = [dir.join("mod.rs"), dir.with_extension("rs")];
        files.into_iter().find(|parent| self.texts.contains_key(parent)).unwrap_or_else(|| self.main())
    }

    /// The files that implement something for a type that neither they nor a module in them declares.
    fn with_foreign_methods(&self) -> Vec<PathBuf> {
        let is_foreign = |file: &Path, name: &str| {
            let own = |of: &Path| of == file || self.parent(of) == file;
            !self.texts.iter().any(|(of, source)| own(of) && source.declares(name))
        };
        self.texts
            .iter()
            .filter(|(file, source)| {
                source.code.lines().filter_map(implemented_for).any(|name| is_foreign(file, name))
            })
            .map(|(file, _)| file.clone())
            .collect()
    }
}

impl Source {
    fn of(file: &Path, text: &str) -> Source {
        let code: String = text
            .lines()
            .filter(|line| !line.trim_start().starts_with("//"))
            .flat_map(|line| [line, "\n"])
            .collect();
        let dir = file.parent().unwrap_or(file);
        let included = ["include_str!(\"", "include_bytes!(\"", "#[path = \""]
            .iter()
            .flat_map(|before| code.split(before).skip(1))
            .filter_map(|rest| rest.split('"').next())
            .map(|path| without_dots(&dir.join(path)))
            .collect();
        Source { paths: paths(&code), included, code }
    }

    /// Whether it has such a type or trait.
    fn declares(&self, name: &str) -> bool {
        self.code.lines().any(|line| {
            let mut words = line.split(|c| !is_of_a_word(c)).filter(|word| !word.is_empty());
            words.any(|word| ["struct", "enum", "trait", "union", "type"].contains(&word))
                && words.next() == Some(name)
        })
    }
}

/// The words of each `use` statement, and of each path outside of one.
fn paths(code: &str) -> Vec<Vec<String>> {
    let words = |text: &str| -> Vec<String> {
        text.split(|c| !is_of_a_word(c)).filter(|word| !word.is_empty()).map(str::to_owned).collect()
    };
    let statements = code.split("use ").skip(1).filter_map(|rest| rest.split(';').next()).map(words);
    let paths = code.split(|c| !is_of_a_word(c) && c != ':').filter(|part| part.contains("::")).map(words);
    statements.chain(paths).filter(|path| !path.is_empty()).collect()
}

/// The name of the type that a line such as `impl<'a> Trait for Type<'a> {` is for.
fn implemented_for(line: &str) -> Option<&str> {
    let rest = line.trim_start().strip_prefix("unsafe ").unwrap_or(line.trim_start()).strip_prefix("impl")?;
    if rest.starts_with(is_of_a_word) {
        return None;
    }
    let of = match rest.split_once(" for ") {
        Some((_, of)) => of,
        // Without the parameters of `impl<'a>`.
        None if rest.starts_with('<') => rest.split_once("> ").map_or(rest, |(_, of)| of),
        None => rest,
    };
    let of = of.trim_start_matches(|c: char| !is_of_a_word(c));
    Some(of.split(|c| !is_of_a_word(c)).next().unwrap_or(of))
}

/// What a module is called whose file this is.
fn module_name(file: &Path) -> String {
    let named = if file.ends_with("mod.rs") { file.parent().unwrap_or(file) } else { file };
    named.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default()
}

/// The path without `..`, which leads the same way where there are no symbolic links.
fn without_dots(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for part in path.components() {
        if part == Component::ParentDir {
            plain.pop();
        } else {
            plain.push(part);
        }
    }
    plain
}

fn is_of_a_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// What decides how the tests' program is compiled, beside its sources: the toolchain, the options of this workspace,
/// and the versions and features of the packages that it is built with.
fn conditions(root: &Path) -> Result<Key> {
    let lock = toml_of(&root.join("Cargo.lock"))?;
    let locked = locked(&lock, E2E_NAME);
    let mut workspace = toml_of(&root.join("Cargo.toml"))?;
    if let Some(table) = workspace.get_mut("workspace").and_then(toml::Value::as_table_mut) {
        table.remove("members");
        if let Some(dependencies) = table.get_mut("dependencies").and_then(toml::Value::as_table_mut) {
            dependencies.retain(|name, _| locked.contains_key(name));
        }
    }
    let mut manifest = toml_of(&root.join(E2E).join("Cargo.toml"))?;
    manifest.remove("dev-dependencies");
    let mut key = Key::new().file(&root.join("rust-toolchain.toml"))?;
    for part in locked.values().chain([&workspace.to_string(), &manifest.to_string()]) {
        key = key.bytes(part);
    }
    // Its build script, and files that a case reads from beside it.
    let src = root.join(E2E).join("src");
    let mut others = files_below(&root.join(E2E))?;
    others.retain(|file| !file.starts_with(&src) && !file.ends_with("Cargo.toml"));
    Ok(key.key(&digest(root, &others)?))
}

/// The entries of Cargo.lock of the packages that a package is built with, by their names, as text.
fn locked(lock: &toml::Table, package: &str) -> BTreeMap<String, String> {
    let entries = lock.get("package").and_then(toml::Value::as_array).map(Vec::as_slice).unwrap_or_default();
    let name = |entry: &toml::Value| entry.get("name").and_then(toml::Value::as_str).map(str::to_owned);
    let (mut found, mut left) = (BTreeMap::<String, String>::new(), vec![package.to_owned()]);
    while let Some(package) = left.pop() {
        if found.contains_key(&package) {
            continue;
        }
        let mut text = String::new();
        // One name may have several versions. All of them are taken.
        for entry in entries.iter().filter(|entry| name(entry).as_ref() == Some(&package)) {
            text.push_str(&entry.to_string());
            let of = entry.get("dependencies").and_then(toml::Value::as_array).map(Vec::as_slice);
            let names = of.unwrap_or_default().iter().filter_map(toml::Value::as_str);
            left.extend(names.filter_map(|of| of.split(' ').next()).map(str::to_owned));
        }
        found.insert(package, text);
    }
    found
}

/// The packages of this project that another one can be built with: names and directories.
fn packages(root: &Path) -> Result<BTreeMap<String, PathBuf>> {
    let workspace = toml_of(&root.join("Cargo.toml"))?;
    let dependencies =
        workspace.get("workspace").and_then(|it| it.get("dependencies")).and_then(|it| it.as_table());
    let path = |value: &toml::Value| value.get("path").and_then(toml::Value::as_str).map(PathBuf::from);
    Ok(dependencies
        .into_iter()
        .flatten()
        .filter_map(|(name, value)| Some((name.clone(), path(value)?)))
        .collect())
}

/// The directories of packages of this project, and those of all others of it that they are built with.
fn with_their_packages(root: &Path, these: BTreeSet<PathBuf>) -> Result<BTreeSet<PathBuf>> {
    let ours = packages(root)?;
    let (mut found, mut left) = (these.clone(), Vec::from_iter(these));
    while let Some(package) = left.pop() {
        let manifest = toml_of(&root.join(&package).join("Cargo.toml"))?;
        for kind in ["dependencies", "build-dependencies"] {
            let names =
                manifest.get(kind).and_then(|table| table.as_table()).into_iter().flat_map(toml::Table::keys);
            left.extend(
                names.filter_map(|name| ours.get(name)).filter(|path| found.insert((*path).clone())).cloned(),
            );
        }
    }
    Ok(found)
}

fn toml_of(file: &Path) -> Result<toml::Table> {
    read(file)?.parse().with_context(|| format!("{} is no TOML", file.display()))
}

/// The file itself, or all files below a directory, in an order that is always the same.
fn files_below(place: &Path) -> Result<Vec<PathBuf>> {
    let context = || format!("cannot list {}", place.display());
    if !place.metadata().with_context(context)?.is_dir() {
        return Ok(vec![place.to_owned()]);
    }
    let mut entries = fs::read_dir(place)
        .with_context(context)?
        .map(|entry| Ok(entry?.path()))
        .collect::<Result<Vec<_>>>()?;
    entries.sort();
    let files = entries.iter().map(|entry| files_below(entry)).collect::<Result<Vec<_>>>()?;
    Ok(files.concat())
}

fn digest<'a>(root: &Path, files: impl IntoIterator<Item = &'a PathBuf>) -> Result<Key> {
    files.into_iter().try_fold(Key::new(), |key, file| {
        let name = file.strip_prefix(root).unwrap_or(file);
        key.bytes(name.as_os_str().as_encoded_bytes()).file(file)
    })
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::dist::source_dir;

    /// A project with the groups `exec`, which takes something from `jail`, `jail`, and `pod_life`.
    fn project() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let list = "Group::new(\"exec\", exec::CASES),\n    Group::brief(\"jail\", jail::CASES),\n\
                    Group::new(\"pod_life\", pod::life::CASES),\n";
        let workspace = "[workspace]\nmembers = []\n[workspace.dependencies]\nours = { path = \"ours\" }\n\
                         more = { path = \"more\" }\nserde = \"1\"\ntoml = \"1\"\n";
        let lock = "[[package]]\nname = \"bulkhead-e2e\"\ndependencies = [\"ours\", \"serde 1.0\"]\n\
                    [[package]]\nname = \"serde\"\nversion = \"1.0\"\n[[package]]\nname = \"toml\"\nversion = \"1.0\"\n";
        for (file, text) in [
            ("Cargo.lock", lock),
            ("Cargo.toml", workspace),
            ("rust-toolchain.toml", ""),
            ("contrib/pod.yaml", ""),
            ("contrib/other.yaml", ""),
            ("ours/Cargo.toml", "[dependencies]\nmore.workspace = true\n"),
            ("ours/src/lib.rs", ""),
            ("more/Cargo.toml", ""),
            ("more/src/lib.rs", ""),
            ("other/src/lib.rs", ""),
            (
                "tests/e2e/Cargo.toml",
                "[dependencies]\nours.workspace = true\n[dev-dependencies]\nsyn = \"2\"\n",
            ),
            ("tests/e2e/files/network", ""),
            ("tests/e2e/src/main.rs", "mod bench;\nuse crate::runner::Wanted;\nfn main() { bench::run() }\n"),
            ("tests/e2e/src/runner.rs", "use crate::command::{self, Cmd};\n"),
            ("tests/e2e/src/command.rs", "struct Cmd;\nimpl Cmd {\n"),
            ("tests/e2e/src/foreign.rs", "impl<'a> Drop for Cmd<'a> {\n"),
            ("tests/e2e/src/bench.rs", ""),
            ("tests/e2e/src/agent.rs", ""),
            ("tests/e2e/src/faults/mod.rs", ""),
            ("tests/e2e/src/faults/calls.rs", "fn of(of: super::Fault) { ours::call() }\n"),
            ("tests/e2e/src/cases/mod.rs", list),
            ("tests/e2e/src/cases/case.rs", ""),
            (
                "tests/e2e/src/cases/exec.rs",
                "use super::{\n    Case,\n    other::{Some, more},\n    jail::Vmm,\n};\n",
            ),
            (
                "tests/e2e/src/cases/jail.rs",
                "use super::Case;\n// agent::is_not_used\nfn a() { crate::faults::calls::b() }\n",
            ),
            ("tests/e2e/src/cases/pod/mod.rs", ""),
            (
                "tests/e2e/src/cases/pod/life.rs",
                "use super::super::Case;\nconst POD: &str = include_str!(\"../../../../../contrib/pod.yaml\");\n",
            ),
        ] {
            let path = dir.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        dir
    }

    /// The groups whose digest changes when this is added to a file.
    fn changed_by(file: &str, more: &str) -> Vec<String> {
        let project = project();
        let before = of_groups(project.path()).unwrap();
        let path = project.path().join(file);
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, format!("{text}{more}\n")).unwrap();
        let after = of_groups(project.path()).unwrap();
        assert_eq!((before.len(), after.len()), (3, 3));
        before.into_iter().filter(|(name, digest)| after[name] != *digest).map(|(name, _)| name).collect()
    }

    #[test]
    fn a_group_changes_with_its_file_and_with_those_that_it_takes_from() {
        for (file, groups) in [
            ("tests/e2e/src/cases/exec.rs", vec!["exec"]),
            ("tests/e2e/src/cases/jail.rs", vec!["exec", "jail"]),
            ("tests/e2e/src/faults/calls.rs", vec!["exec", "jail"]),
            // What a file takes from the module that it is in.
            ("tests/e2e/src/faults/mod.rs", vec!["exec", "jail"]),
            ("tests/e2e/src/cases/pod/mod.rs", vec!["pod_life"]),
            // Packages and what they are built with.
            ("ours/src/lib.rs", vec!["exec", "jail"]),
            ("more/src/lib.rs", vec!["exec", "jail"]),
            ("tests/e2e/src/cases/pod/life.rs", vec!["pod_life"]),
            ("contrib/pod.yaml", vec!["pod_life"]),
        ] {
            assert_eq!(changed_by(file, "//"), groups, "{file}");
        }
    }

    #[test]
    fn all_groups_change_with_what_is_common_to_them() {
        for (file, more) in [
            ("Cargo.lock", "[[package]]\nname = \"serde\"\nversion = \"1.1\""),
            ("Cargo.toml", "[profile.dev]\nopt-level = 1"),
            ("rust-toolchain.toml", "#"),
            ("tests/e2e/Cargo.toml", "[features]"),
            ("tests/e2e/files/network", "#"),
            ("tests/e2e/src/main.rs", "//"),
            ("tests/e2e/src/runner.rs", "//"),
            ("tests/e2e/src/command.rs", "//"),
            ("tests/e2e/src/foreign.rs", "//"),
            ("tests/e2e/src/cases/case.rs", "//"),
        ] {
            assert_eq!(changed_by(file, more), ["exec", "jail", "pod_life"], "{file}");
        }
    }

    #[test]
    fn nothing_changes_with_what_no_group_takes() {
        for (file, more) in [
            ("Cargo.lock", "[[package]]\nname = \"toml\"\nversion = \"1.1\""),
            ("Cargo.toml", "flate2 = \"1\""),
            ("tests/e2e/Cargo.toml", "more = \"1\""),
            ("contrib/other.yaml", "#"),
            ("other/src/lib.rs", "//"),
            ("tests/e2e/src/agent.rs", "//"),
            ("tests/e2e/src/bench.rs", "//"),
            ("tests/e2e/src/cases/mod.rs", "//"),
        ] {
            assert_eq!(changed_by(file, more), [""; 0], "{file}");
        }
    }

    #[test]
    fn a_type_is_found_in_what_is_implemented_for_it() {
        for (line, of) in [
            ("impl Cmd {", Some("Cmd")),
            ("impl<'h> NewPod<'h> {", Some("NewPod")),
            ("    impl Drop for Task<'_> {", Some("Task")),
            ("unsafe impl<T: Into<u8>> Send for Task<T> {", Some("Task")),
            ("impl fmt::Display for Step {", Some("Step")),
            ("impl From<&str> for $name {", Some("name")),
            ("fn f() -> impl Drop {", None),
            ("implementation", None),
        ] {
            assert_eq!(implemented_for(line), of, "{line}");
        }
    }

    #[test]
    fn the_groups_of_this_project_are_found() {
        let digests = of_groups(source_dir()).unwrap();
        assert!(digests.len() > 30 && digests.contains_key("pods_at_once"), "{digests:?}");
        // One group takes little, and no method is where it cannot be found.
        let root = without_dots(source_dir());
        let sources = Sources::read(&root).unwrap();
        let (files, packages) = sources.closure(&sources.dir.join("cases/stdio.rs")).unwrap();
        assert!(files.contains(&sources.dir.join("command.rs")), "{files:?}");
        assert!(
            !files.contains(&sources.dir.join("agent.rs")) && packages.is_empty(),
            "{files:?} {packages:?}"
        );
        assert_eq!(sources.with_foreign_methods(), [""; 0].map(PathBuf::from));
    }
}
