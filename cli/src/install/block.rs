//! What is added to containerd's configuration, and how it is taken out again.
//!
//! It is a block at the end of the file, between two comments. containerd 1.6 and 1.7 replace the whole section of a
//! plugin by that of an imported file, so a file of its own would undo what the operator has set for the CRI plugin.
//! containerd 2 merges them, so there it can be a file of its own, if the configuration imports the directory.

use std::path::{Path, PathBuf};

use toml::Table;

use crate::{
    containerd::{CRI_V2, CRI_V3, RUNTIME, disabled_cri, handlers},
    error::CommandError,
};

/// The runtime of the handler that containerd has by default.
const RUNC: &str = "io.containerd.runc.v2";

/// The annotations of a pod that the CRI plugin passes on. Bulkhead refuses those that its own configuration does not
/// allow. Without this it would not see them, and they would have no effect.
const ANNOTATIONS: &str = "  pod_annotations = [\"bulkhead.dev/*\"]\n";

/// What begins a template of k3s or RKE2 that is to have all that they write without one.
const BASE: &str = "{{ template \"base\" . }}\n";

const BEGIN: &str = "# Begin: added by `bulkhead install`; `bulkhead uninstall` removes it.";
/// The first line of the block after a last line that did not end.
const BEGIN_AFTER_OPEN_LINE: &str =
    "# Begin: added by `bulkhead install`; `bulkhead uninstall` removes it, and the line break before it.";
/// The first line of the block in a file that was there and had nothing.
const BEGIN_IN_EMPTY: &str = "# Begin: added by `bulkhead install` to an empty file; `bulkhead uninstall` removes it, and leaves that.";
/// The first line of a file of its own.
const FILE: &str = "# Written by `bulkhead install`; `bulkhead uninstall` removes it.\n";
const END: &str = "# End: added by `bulkhead install`.";

/// A version of the format of containerd's configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Version {
    V2,
    V3,
}

impl Version {
    /// What containerd of this major version has by default.
    pub(super) fn of_containerd(major: u32) -> Self {
        if major >= 2 { Self::V3 } else { Self::V2 }
    }

    /// The version of the configuration that was read from `path`.
    pub(super) fn of(path: &Path, configuration: &Table) -> Result<Self, CommandError> {
        match configuration.get("version").and_then(toml::Value::as_integer) {
            Some(2) => Ok(Self::V2),
            Some(3) => Ok(Self::V3),
            _ => Err(CommandError::ConfigVersion { path: path.into() }),
        }
    }

    fn number(self) -> u8 {
        match self {
            Self::V2 => 2,
            Self::V3 => 3,
        }
    }

    fn table(self, handler: &str, runtime: &str) -> String {
        let plugin = match self {
            Self::V2 => CRI_V2,
            Self::V3 => CRI_V3,
        };
        format!("[plugins.\"{plugin}\".containerd.runtimes.{handler}]\n  runtime_type = \"{runtime}\"\n")
    }

    /// The handlers, as complete TOML tables. A file that names handlers replaces those that containerd has
    /// by default. So `with_runc` adds that one for a configuration that names none.
    pub(super) fn handlers(self, with_runc: bool) -> String {
        let mut tables = if with_runc { self.table("runc", RUNC) } else { String::new() };
        tables += &self.table("bulkhead", RUNTIME);
        tables += ANNOTATIONS;
        if self == Self::V3 {
            // Without an image of pause. Its pods' annotations reach the shim in any case.
            tables += &self.table("bulkhead-sandbox", RUNTIME);
            tables += "  sandboxer = \"shim\"\n";
        }
        tables
    }

    /// What makes a configuration of nothing, or of what is the same in each version.
    fn whole(self) -> String {
        format!("version = {}\n{}", self.number(), self.handlers(true))
    }

    /// A file of its own.
    pub(super) fn file(self, with_runc: bool) -> String {
        format!("{FILE}version = {}\n{}", self.number(), self.handlers(with_runc))
    }
}

/// What is to be done with a configuration.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// The handlers are there.
    None,
    /// This is the new text.
    Text(String),
    /// This is the text of a file of their own, in the directory that is imported.
    DropIn(String),
}

/// How the handlers come into the configuration `text`, which is at `path`. `imported` is the directory of containerd 2
/// for files of their own, if the configuration imports it. `by_default` is the version for a configuration that has
/// none, and says nothing that depends on it.
pub(super) fn add(
    path: &Path,
    text: &str,
    imported: &Path,
    by_default: impl FnOnce() -> Result<Version, CommandError>,
) -> Result<Change, CommandError> {
    let without = remove(path, text)?;
    let configuration = parse(path, &without)?;
    let version = match Version::of(path, &configuration) {
        Ok(version) => version,
        Err(_) if text != without => return add_to_whole(path, text),
        Err(error) if !is_of_any_version(&configuration) => return Err(error),
        Err(_) => {
            if let Some(name) = disabled_cri(&configuration) {
                return Err(CommandError::CriDisabled { path: path.into(), name: name.into() });
            }
            return Ok(Change::Text(with_block(Some(text), text, &by_default()?.whole())));
        }
    };
    let with_runc = handlers(&configuration).is_empty();
    if let Some(runtime) = handlers(&configuration).get("bulkhead") {
        if runtime == RUNTIME {
            return Ok(Change::None);
        }
        let (handler, runtime) = ("bulkhead".into(), runtime.clone());
        return Err(CommandError::OtherHandler { path: path.into(), handler, runtime });
    }
    if version == Version::V3 && imports(&configuration, imported) {
        return Ok(Change::DropIn(version.file(with_runc)));
    }
    let new = with_block(Some(text), &without, &version.handlers(with_runc));
    // For example, `runtimes` may be an inline table, to which nothing can be added below.
    parse(path, &new)?;
    Ok(if new == text { Change::None } else { Change::Text(new) })
}

/// How the handlers come into a configuration whose version is in the block, because there was none.
fn add_to_whole(path: &Path, text: &str) -> Result<Change, CommandError> {
    let version = Version::of(path, &parse(path, text)?)?;
    let Some((begin, end)) = place(path, text)? else { return Ok(Change::None) };
    let (before, after) = (text.get(..begin).unwrap_or_default(), text.get(end..).unwrap_or_default());
    let new = format!("{}{after}", with_block(Some(text), before, &version.whole()));
    parse(path, &new)?;
    Ok(if new == text { Change::None } else { Change::Text(new) })
}

/// How the handlers come into what k3s or RKE2 generates: by a file of their own if `generated`, the configuration at
/// `path`, imports the directory, or by the template, of which this is the text if there is one.
pub(super) fn add_to_generated(
    path: &Path,
    generated: &str,
    imported: &Path,
    template: impl FnOnce(Version) -> Result<(PathBuf, Option<String>), CommandError>,
) -> Result<(Version, Change), CommandError> {
    let configuration = parse(path, generated)?;
    let version = Version::of(path, &configuration)?;
    if let Some(runtime) = handlers(&configuration).get("bulkhead").filter(|runtime| *runtime != RUNTIME) {
        let (handler, runtime) = ("bulkhead".into(), runtime.clone());
        return Err(CommandError::OtherHandler { path: path.into(), handler, runtime });
    }
    if version == Version::V3 && imports(&configuration, imported) {
        return Ok((version, Change::DropIn(version.file(false))));
    }
    let (path, template) = template(version)?;
    let Some(text) = template else {
        return Ok((
            version,
            Change::Text(with_block(None, "", &format!("{BASE}{}", version.handlers(false)))),
        ));
    };
    let without = remove(&path, &text)?;
    if ["runtimes.bulkhead]", "runtimes.'bulkhead']", "runtimes.\"bulkhead\"]"]
        .iter()
        .any(|table| without.contains(table))
    {
        return Ok((version, Change::None));
    }
    let base = if without.is_empty() { BASE } else { "" };
    let new = with_block(Some(&text), &without, &format!("{base}{}", version.handlers(false)));
    Ok((version, if new == text { Change::None } else { Change::Text(new) }))
}

/// A text with the block at its end. `old` is what the file has now, with an older block or without one. None: there is
/// no file.
fn with_block(old: Option<&str>, text: &str, added: &str) -> String {
    let (open, begin) = match text.is_empty() || text.ends_with('\n') {
        // A file that has begun with the block was made for it.
        true if text.is_empty() && old.is_some_and(|old| !old.starts_with(BEGIN)) => ("", BEGIN_IN_EMPTY),
        true => ("", BEGIN),
        false => ("\n", BEGIN_AFTER_OPEN_LINE),
    };
    format!("{text}{open}{begin}\n{added}{END}\n")
}

/// A configuration of nothing else, for a host where there is none.
pub(super) fn whole(version: Version) -> String {
    with_block(None, "", &version.whole())
}

/// Whether a configuration without a version means the same in each. containerd takes it for one of the first version,
/// whose tables of plugins have other names. What is added begins with the version, so it must not come after a table.
fn is_of_any_version(configuration: &Table) -> bool {
    // A plugin that is disabled has another name in the second version. `disabled_cri` finds what is disabled here.
    let is_known = |(key, value): (&String, &toml::Value)| match key.as_str() {
        "root" | "state" | "temp" | "oom_score" => !value.is_table(),
        "disabled_plugins" => {
            let mut names = value.as_array().into_iter().flatten().filter_map(toml::Value::as_str);
            names.all(|name| name == "cri" || name.starts_with("io.containerd."))
        }
        _ => false,
    };
    configuration.iter().all(is_known)
}

/// The configuration `text` without the block.
pub(super) fn remove(path: &Path, text: &str) -> Result<String, CommandError> {
    let Some((begin, end)) = place(path, text)? else { return Ok(text.to_owned()) };
    let [before, after] = [text.get(..begin), text.get(end..)].map(Option::unwrap_or_default);
    // What somebody has written after the block needs the line break that came with the block.
    let is_open = !(before.is_empty() || before.ends_with('\n') || after.is_empty());
    Ok([before, if is_open { "\n" } else { "" }, after].concat())
}

/// Whether a file that has nothing but the block was there before.
pub(super) fn was_there(text: &str) -> bool {
    text.starts_with(BEGIN_IN_EMPTY)
}

/// Where the block begins and ends.
fn place(path: &Path, text: &str) -> Result<Option<(usize, usize)>, CommandError> {
    let half = |line| CommandError::HalfBlock { path: path.into(), line };
    let line = |searched: &str| {
        let mut at = 0;
        text.split_inclusive('\n').find_map(|line| {
            let begin = at;
            at += line.len();
            (line.trim_end() == searched).then_some((begin, at))
        })
    };
    let begin = match (line(BEGIN).or_else(|| line(BEGIN_IN_EMPTY)), line(BEGIN_AFTER_OPEN_LINE)) {
        (Some((begin, _)), _) => Some(begin),
        (None, Some((begin, _))) => {
            let before = text.get(..begin).unwrap_or_default();
            let open = before.strip_suffix('\n').unwrap_or(before);
            // An editor may have converted all line breaks.
            Some(open.strip_suffix('\r').unwrap_or(open).len())
        }
        (None, None) => None,
    };
    match (begin, line(END)) {
        (None, None) => Ok(None),
        (Some(begin), Some((_, end))) if begin < end => Ok(Some((begin, end))),
        (Some(_), _) => Err(half(BEGIN)),
        (None, Some(_)) => Err(half(END)),
    }
}

/// The lines of a file that a new text for it does not have, but for those that `bulkhead install` writes or does not
/// write by what else is in the file.
pub(super) fn lost(old: &str, new: &str) -> Vec<String> {
    let ours = [BEGIN, BEGIN_AFTER_OPEN_LINE, BEGIN_IN_EMPTY, END].map(str::to_owned);
    let runc = [Version::V2, Version::V3].map(|version| version.table("runc", RUNC));
    let known = ours.iter().chain(&runc).flat_map(|text| text.lines()).chain(new.lines());
    let mut known: Vec<_> = known.map(str::trim).collect();
    let is_lost = |line: &&str| match known.iter().position(|known| known == line) {
        Some(at) => {
            // The same line may be in another table, too.
            known.swap_remove(at);
            false
        }
        None => !line.is_empty(),
    };
    old.lines().map(str::trim).filter(is_lost).map(str::to_owned).collect()
}

/// The lines that a file loses by the removal of what `bulkhead install` has added, but for those that it has written.
/// `left` is what the file then has.
pub(super) fn lost_by_removal(text: &str, left: &str) -> Vec<String> {
    let ours = [Version::V2, Version::V3].map(|version| version.file(false));
    lost(text, &[left, BASE, &ours.concat()].join("\n"))
}

/// Whether a file has all that a new text for it has, and says of each handler what that says.
pub(super) fn has_all_of(old: &str, new: &str) -> bool {
    let parsed = [old, new].map(toml::from_str::<Table>);
    let is_same = match &parsed {
        [Ok(old), Ok(new)] => {
            let old = handlers(old);
            handlers(new).iter().all(|(handler, runtime)| old.get(handler) == Some(runtime))
        }
        // A template of k3s or RKE2 is no TOML before they have filled it in.
        [Err(_), Err(_)] => true,
        _ => false,
    };
    is_same && lost(new, old).iter().all(|line| line.starts_with('#'))
}

/// Whether a file was written by `bulkhead install`, of this version or another one.
pub(super) fn is_ours(text: &str) -> bool {
    text.starts_with(FILE)
}

/// Whether the configuration imports all files of the directory.
fn imports(configuration: &Table, directory: &Path) -> bool {
    let files = configuration.get("imports").and_then(toml::Value::as_array).into_iter().flatten();
    let all = directory.join("*.toml");
    files.filter_map(toml::Value::as_str).any(|file| Path::new(file) == all)
}

/// Fails if the new text of a file is no TOML, although the old one is: containerd would not start with it. A template
/// of k3s or RKE2 need not be TOML.
pub(super) fn check_valid(path: &Path, old: &str, new: &str) -> Result<(), CommandError> {
    match (toml::from_str::<Table>(old), toml::from_str::<Table>(new)) {
        (Ok(_), Err(error)) => {
            let reason =
                format!("it would not be valid TOML any more: {}", error.message().replace('\n', " "));
            Err(CommandError::Refused { path: path.into(), reason })
        }
        _ => Ok(()),
    }
}

fn parse(path: &Path, text: &str) -> Result<Table, CommandError> {
    toml::from_str(text)
        .map_err(|e| CommandError::Toml { path: path.into(), reason: e.message().replace('\n', " ") })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATH: &str = "/etc/containerd/config.toml";
    const IMPORTED: &str = "/etc/containerd/conf.d";

    fn added(text: &str) -> Change {
        add(Path::new(PATH), text, Path::new(IMPORTED), || Ok(Version::V2)).unwrap()
    }

    fn refused(text: &str) -> String {
        add(Path::new(PATH), text, Path::new(IMPORTED), || Ok(Version::V2)).unwrap_err().to_string()
    }

    fn removed(text: &str) -> String {
        remove(Path::new(PATH), text).unwrap()
    }

    #[test]
    fn what_is_added_is_removed_to_the_last_byte() {
        let cni = "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".cni]\n  bin_dir = \"/usr/lib/cni\"\n";
        for old in
            [cni, "version = 2", "version = 2\n\n\n", "version = 3\n[debug]\nlevel = 'info'", "version=3\r\n"]
        {
            let Change::Text(new) = added(old) else { panic!("nothing is added to {old}") };
            let handlers = handlers(&toml::from_str(&new).unwrap());
            assert_eq!(handlers.get("bulkhead").map(String::as_str), Some(RUNTIME), "{new}");
            // Its default is lost when a file names another one.
            assert_eq!(handlers.get("runc").map(String::as_str), Some(RUNC), "{new}");
            assert_eq!(removed(&new), old);
            assert_eq!(added(&new), Change::None, "a second time");
        }
    }

    #[test]
    fn handlers_that_the_operator_has_chosen_get_no_other_beside_them() {
        let nvidia = "[plugins.'io.containerd.grpc.v1.cri'.containerd.runtimes.nvidia]\nruntime_type = 'n'\n";
        let Change::Text(new) = added(&format!("version = 2\n{nvidia}")) else { panic!("nothing is added") };
        let handlers = handlers(&toml::from_str(&new).unwrap());
        assert_eq!(handlers.into_keys().collect::<Vec<_>>(), ["bulkhead", "nvidia"]);
    }

    #[test]
    fn what_the_operator_has_written_after_the_block_stays() {
        let Change::Text(new) = added("version = 2\n") else { panic!("nothing is added") };
        assert_eq!(removed(&format!("{new}[debug]\n")), "version = 2\n[debug]\n");
        // The last line that was open has a line break then, in the form of any editor.
        let open = "version = 3\nroot = '/x'";
        let Change::Text(with_block) = added(open) else { panic!("nothing is added") };
        let debug = format!("{with_block}[debug]\n");
        assert_eq!(removed(&debug), format!("{open}\n[debug]\n"));
        let Change::Text(again) = added(&debug) else { panic!("the block does not move to the end") };
        assert_eq!(removed(&again), format!("{open}\n[debug]\n"));
        assert_eq!(removed(&with_block.replace('\n', "\r\n")), open.replace('\n', "\r\n"));
        let older = new.replace("runtime_type", "# older\n  runtime_type");
        assert_eq!(added(&older), Change::Text(new), "an upgrade writes the new block");
    }

    #[test]
    fn a_configuration_without_a_version_gets_one_if_that_changes_nothing() {
        for text in ["", "# all is a comment", "oom_score = -999\n", "root = '/r'\nstate = '/s'"] {
            for version in [Version::V2, Version::V3] {
                let add =
                    |text: &str| add(Path::new(PATH), text, Path::new(IMPORTED), || Ok(version)).unwrap();
                let Change::Text(new) = add(text) else { panic!("nothing is added to {text:?}") };
                let configuration: Table = toml::from_str(&new).unwrap();
                assert_eq!(Version::of(Path::new(PATH), &configuration).unwrap(), version, "{new}");
                assert_eq!(handlers(&configuration).get("bulkhead").map(String::as_str), Some(RUNTIME));
                assert_eq!(handlers(&configuration).get("runc").map(String::as_str), Some(RUNC));
                assert_eq!((add(&new), removed(&new).as_str()), (Change::None, text), "a second time");
                assert_eq!(add(&new.replace(RUNTIME, "old")), Change::Text(new.clone()), "an upgrade");
            }
        }
    }

    #[test]
    fn lines_that_are_lost_are_those_of_the_operator() {
        let Change::Text(new) = added("version = 2\n") else { panic!("nothing is added") };
        let cgroups = "  cgroup_writable = true\n";
        let edited = new.replace(END, &format!("{cgroups}{END}"));
        assert_eq!(lost(&edited, &new), [cgroups.trim()]);
        assert!(has_all_of(&edited, &new) && !has_all_of(&new, &edited));
        // The same line in another table, which stays, is another one.
        let other = format!("[x]\n{cgroups}");
        assert_eq!(lost(&format!("{other}{edited}"), &format!("{other}{new}")), [cgroups.trim()]);
        // It belongs to another handler now.
        let moved =
            new.replace("  runtime_type = \"io.containerd.b", "[y]\n  runtime_type = \"io.containerd.b");
        assert!(!has_all_of(&moved, &new), "{moved}");
        // The handler runc is there only if there is no other one.
        let nvidia = "[plugins.'io.containerd.grpc.v1.cri'.containerd.runtimes.nvidia]\nruntime_type = 'n'\n";
        let Change::Text(without_runc) = added(&format!("{new}{nvidia}")) else { panic!("nothing changes") };
        assert!(!without_runc.contains(RUNC));
        assert_eq!(lost(&format!("{new}{nvidia}"), &without_runc), [""; 0]);
        assert_eq!(lost(&new.replace(RUNTIME, "old"), &new), ["runtime_type = \"old\""]);
        let template = format!("{BASE}{new}");
        assert!(has_all_of(&template.replace(END, &format!("{cgroups}{END}")), &template));
    }

    #[test]
    fn a_removal_loses_only_what_was_added_by_others() {
        let cgroups = "  cgroup_writable = true\n";
        for old in ["version = 2\n", "version = 3\n[debug]\nlevel = 'info'"] {
            let Change::Text(new) = added(old) else { panic!("nothing is added") };
            assert_eq!(lost_by_removal(&new, old), [""; 0], "{new}");
            let edited = new.replace(END, &format!("{cgroups}{END}"));
            assert_eq!(lost_by_removal(&edited, old), [cgroups.trim()]);
        }
        for version in [Version::V2, Version::V3] {
            for file in [true, false].map(|with_runc| version.file(with_runc)) {
                assert_eq!(lost_by_removal(&file, ""), [""; 0], "{file}");
                assert_eq!(lost_by_removal(&format!("{file}{cgroups}"), ""), [cgroups.trim()]);
            }
        }
    }

    #[test]
    fn containerd_2_takes_a_file_of_its_own_if_it_is_imported() {
        let imports = "imports = ['/etc/containerd/conf.d/*.toml']\n";
        let Change::DropIn(file) = added(&format!("version = 3\n{imports}")) else { panic!("no file") };
        let file: Table = toml::from_str(&file).unwrap();
        assert_eq!(file["version"].as_integer(), Some(3));
        assert_eq!(handlers(&file).into_keys().collect::<Vec<_>>(), ["bulkhead", "bulkhead-sandbox", "runc"]);
        // There it would replace the section.
        assert!(matches!(added(&format!("version = 2\n{imports}")), Change::Text(_)));
    }

    #[test]
    fn where_there_is_no_configuration_nothing_is_left_either() {
        for version in [Version::V2, Version::V3] {
            assert_eq!(removed(&whole(version)), "");
            assert_eq!(added(&whole(version)), Change::None, "a second time");
            let after = format!("{}[debug]\n", whole(version));
            assert_eq!(added(&after), Change::None);
            assert_eq!(added(&after.replace(RUNTIME, "old")), Change::Text(after), "an upgrade");
            let whole: Table = toml::from_str(&whole(version)).unwrap();
            assert_eq!(Version::of(Path::new(PATH), &whole).unwrap(), version);
        }
        assert_eq!([1, 2, 3].map(Version::of_containerd), [Version::V2, Version::V3, Version::V3]);
    }

    #[test]
    fn what_cannot_be_configured_is_refused() {
        let of_docker = "# of docker's package\ndisabled_plugins = [\"cri\"]\n# root = '/'\n";
        let error = refused(of_docker);
        assert!(error.contains("ctr and docker use Bulkhead without `bulkhead install`"), "{error}");
        assert!(error.contains("for Kubernetes, remove `cri` from `disabled_plugins`"), "{error}");
        // containerd takes these for the first version. Another version would change what they say.
        for text in [
            "version = 1\n",
            "[plugins.cri]\n",
            "[debug]\nlevel = 'info'\n",
            "imports = ['/etc/x.toml']\n",
            "disabled_plugins = ['btrfs']\n",
            "required_plugins = ['cri']\n",
        ] {
            let (problem, remedy) = (
                "it has no version = 2 or version = 3",
                "`containerd config default > /etc/containerd/config.toml`",
            );
            assert!(refused(text).contains(problem) && refused(text).contains(remedy), "{}", refused(text));
        }
        assert!(refused("{{ template }}\n").contains("not valid TOML"));
        let runtimes = "[plugins.'io.containerd.grpc.v1.cri'.containerd]\n";
        let inline = format!("version = 2\n{runtimes}runtimes = {{ runc = {{ runtime_type = 'r' }} }}\n");
        assert!(refused(&inline).contains("not valid TOML"), "{}", refused(&inline));
        let other =
            format!("version = 2\n{runtimes}runtimes.bulkhead.runtime_type = 'io.containerd.runc.v2'\n");
        assert!(refused(&other).contains("but for the runtime io.containerd.runc.v2"));
        let ours = format!("version = 2\n{runtimes}runtimes.bulkhead.runtime_type = '{RUNTIME}'\n");
        assert_eq!(added(&ours), Change::None);
        assert!(refused(&format!("version = 2\n{BEGIN}\n")).contains("without its counterpart"));
        assert!(refused(&format!("version = 2\n{END}\n{BEGIN}\n")).contains("without its counterpart"));
    }

    #[test]
    fn the_files_to_copy_have_the_same_handlers() {
        for (version, text) in [
            (Version::V2, include_str!("../../../contrib/containerd/config-2.toml")),
            (Version::V3, include_str!("../../../contrib/containerd/config-3.toml")),
        ] {
            let copied: Table = toml::from_str(text).unwrap();
            assert_eq!(copied, toml::from_str(&version.handlers(false)).unwrap());
            // The file is merged into a configuration. What else it said would replace what that says.
            assert_eq!(copied.keys().collect::<Vec<_>>(), ["plugins"]);
            let plugins = copied["plugins"].as_table().unwrap();
            let keys = |table: &Table| table.keys().cloned().collect::<Vec<_>>();
            for (plugin, said) in plugins {
                assert_eq!(keys(said.as_table().unwrap()), ["containerd"], "{plugin}");
                assert_eq!(keys(said["containerd"].as_table().unwrap()), ["runtimes"], "{plugin}");
            }
        }
    }

    #[test]
    fn what_k3s_generates_gets_the_handlers_by_a_template_or_by_a_file_that_it_imports() {
        let path = Path::new("/var/lib/rancher/k3s/agent/etc/containerd/config.toml");
        let imported = Path::new("/var/lib/rancher/k3s/agent/etc/containerd/config-v3.toml.d");
        let add = |generated: &str, template: Option<&str>| {
            let template = template.map(str::to_owned);
            add_to_generated(path, generated, imported, |_| Ok(("config.toml.tmpl".into(), template)))
        };
        let v2 = "version = 2\n";
        let (version, Change::Text(new)) = add(v2, None).unwrap() else { panic!("nothing is added") };
        assert_eq!(version, Version::V2);
        assert!(new.contains(BASE) && !new.contains("runc") && removed(&new).is_empty(), "{new}");
        assert_eq!(add(v2, Some(&new)).unwrap().1, Change::None, "a second time");
        let own = "{{ template \"base\" . }}\n[debug]\n";
        let (_, Change::Text(new)) = add(v2, Some(own)).unwrap() else { panic!("nothing is added") };
        assert_eq!((new.matches(BASE).count(), removed(&new).as_str()), (1, own));
        let by_hand = "[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.'bulkhead']\n";
        assert_eq!(add(v2, Some(by_hand)).unwrap().1, Change::None);
        let v3 = format!("version = 3\nimports = ['{}/*.toml']\n", imported.display());
        let (_, Change::DropIn(file)) = add(&v3, Some(own)).unwrap() else { panic!("no file") };
        assert!(is_ours(&file) && !file.contains("runc"), "{file}");
        let other = format!("{v2}[plugins.'io.containerd.grpc.v1.cri'.containerd.runtimes.bulkhead]\n");
        assert!(add(&other, None).unwrap_err().to_string().contains("for the runtime "));
    }
}
