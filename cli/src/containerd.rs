//! What containerd says of itself: its version, and its configuration with all that it imports.

use std::{collections::BTreeMap, io};

use toml::Table;

use crate::program;

/// The configuration that containerd reads if it is not told another one.
pub(crate) const CONFIG: &str = "/etc/containerd/config.toml";

/// The runtime that a handler of Bulkhead names.
pub(crate) const RUNTIME: &str = "io.containerd.bulkhead.v2";

/// The CRI plugin with the handlers, in the second and in the third version of containerd's configuration.
pub(crate) const CRI_V2: &str = "io.containerd.grpc.v1.cri";
pub(crate) const CRI_V3: &str = "io.containerd.cri.v1.runtime";

/// The version of the containerd in PATH.
pub(crate) fn version() -> io::Result<String> {
    let text = program::output("containerd", &["--version"])?;
    version_in(&text)
        .ok_or_else(|| io::Error::other(format!("`containerd --version` says no version: {text}")))
}

/// The first word that looks like 1.7.24 or v2.1.9.
fn version_in(text: &str) -> Option<String> {
    let words = text.split_whitespace().map(|word| word.trim_start_matches('v'));
    let is_version = |word: &&str| word.starts_with(|c: char| c.is_ascii_digit()) && word.contains('.');
    words.filter(is_version).map(str::to_owned).next()
}

/// The first two numbers of a version.
pub(crate) fn major_and_minor(version: &str) -> Option<(u32, u32)> {
    let mut numbers = version.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// The configuration that containerd uses when it starts next.
pub(crate) fn configuration() -> io::Result<Table> {
    let text = program::output("containerd", &["config", "dump"])?;
    toml::from_str(&text).map_err(|error| io::Error::other(error.message().to_owned()))
}

/// The runtime of each handler in a configuration.
pub(crate) fn handlers(configuration: &Table) -> BTreeMap<String, String> {
    let runtimes = [CRI_V2, CRI_V3].into_iter().filter_map(|plugin| {
        let plugin = configuration.get("plugins")?.get(plugin)?;
        plugin.get("containerd")?.get("runtimes")?.as_table()
    });
    let runtime = |(handler, value): (&String, &toml::Value)| {
        let runtime = value.get("runtime_type").and_then(toml::Value::as_str).unwrap_or_default();
        (handler.clone(), runtime.to_owned())
    };
    runtimes.flatten().map(runtime).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_is_found_in_what_each_containerd_prints() {
        let debian_12 = "containerd github.com/containerd/containerd 1.6.20~ds1 1.6.20~ds1-1+deb12u1\n";
        let upstream = "containerd github.com/containerd/containerd/v2 v2.1.9 0123abcd\n";
        assert_eq!(version_in(debian_12).as_deref(), Some("1.6.20~ds1"));
        assert_eq!(version_in(upstream).as_deref(), Some("2.1.9"));
        assert_eq!(version_in("containerd\n"), None);
        assert_eq!(
            ["1.6.20~ds1", "2.1.9", "x", "2"].map(major_and_minor),
            [Some((1, 6)), Some((2, 1)), None, None]
        );
    }

    #[test]
    fn handlers_are_found_in_both_versions_of_the_configuration() {
        let v2 = include_str!("../../contrib/containerd/config-2.toml");
        let v3 = include_str!("../../contrib/containerd/config-3.toml");
        let handlers = |text: &str| handlers(&toml::from_str(text).unwrap());
        assert_eq!(handlers(v2).get("bulkhead").map(String::as_str), Some(RUNTIME));
        assert_eq!(handlers(v3).get("bulkhead-sandbox").map(String::as_str), Some(RUNTIME));
        assert_eq!(handlers(v3).get("runc").map(String::as_str), Some("io.containerd.runc.v2"));
        for other in ["", "plugins = 1", "[plugins.'io.containerd.grpc.v1.cri']\ncontainerd = []"] {
            assert!(handlers(other).is_empty());
        }
    }
}
