//! The quick start with Kubernetes. The tests have no Kubernetes. When the trial executes the page, a program
//! (`tests/kubectl`) replaces `kubectl`. What the page shows must be what the package has: each manifest is that of a
//! file, and each file or subcommand that a command names exists.

use std::fs;

use anyhow::{Context, Result, bail, ensure};

use super::commands::hidden;
use super::{DOCUMENTS, VERSION};
use crate::dist::{Dist, TESTS, kubectl, source_dir};
use crate::rig::{Put, Session};

/// Its name, as the trial follows it.
pub(super) const NAME: &str = "quickstart-kubernetes.md";
const PAGE: &str = "docs/quickstart-kubernetes.md";
const MANIFESTS: &str = "contrib/kubernetes";

/// Where the package has the documents.
const INSTALLED: &str = "/usr/share/doc/bulkhead/";

/// Where the configuration is.
const CONFIGURATION: &str = "/etc/bulkhead/";

/// The sources of the command `bulkhead` that say which subcommands, options and files it has.
const SUBCOMMANDS: &str = "cli/src/args.rs";
const INSTALLATION: &str = "cli/src/install/options.rs";

/// Programs that the page may use, of which nothing is checked but the files that they name.
const OTHERS: [&str; 6] = ["docker", "dpkg", "kubectl", "mkdir", "sed", "tar"];

/// Where `cargo xtask dist` puts what it has built, in a clone.
const BUILT: &str = "target/package/";

/// Where the image of pause is put.
const PAUSE: &str = "/root/pause-oci.tar";

/// What a node of a cluster could pull: the image of the page, and that of pause as containerd's configuration has it.
const IMPORT: &str = "set -e; ctr() { command ctr --namespace k8s.io \"$@\"; }
    ctr image import /root/busybox-oci.tar; ctr image import /root/pause-oci.tar
    pause=$(containerd config dump | sed -n 's/^ *sandbox_image = \"\\(.*\\)\"$/\\1/p')
    ctr image tag --force registry.k8s.io/pause:3.10 \"$pause\"";

/// The program that stands in for kubectl, and the image of pause.
pub(super) fn puts(dist: &Dist) -> Result<[Put; 2]> {
    let put = |local, remote: &str| Put { local, remote: remote.into() };
    let pause = dist.root().join(TESTS).join("pause-oci.tar");
    Ok([put(kubectl()?, "/usr/local/bin/kubectl"), put(pause, PAUSE)])
}

/// Gives containerd what a node could pull.
pub(super) fn prepare(session: &mut Session) -> Result<()> {
    hidden(session, IMPORT).map(drop)
}

/// Checks the page.
pub(super) fn check() -> Result<()> {
    check_text(&text()?).context(PAGE)
}

pub(super) fn text() -> Result<String> {
    source(PAGE)
}

fn source(path: &str) -> Result<String> {
    fs::read_to_string(source_dir().join(path)).with_context(|| format!("cannot read {path}"))
}

fn check_text(page: &str) -> Result<()> {
    check_manifests(page)?;
    for command in commands(page) {
        check_command(&command).with_context(|| format!("`{command}`"))?;
    }
    // In sentences too.
    for path in page.split(|c: char| c.is_whitespace() || "`()".contains(c)) {
        check_path(path.trim_end_matches(['.', ',', ':']))?;
    }
    Ok(())
}

/// Each block of YAML shows the file that was named last before it, without its comments.
fn check_manifests(page: &str) -> Result<()> {
    let mut named = None;
    let mut lines = page.lines();
    while let Some(line) = lines.next() {
        let mut words =
            line.split('`').filter(|word| word.starts_with("contrib/") && word.ends_with(".yaml"));
        named = words.next_back().or(named);
        if line == "```yaml" {
            let block: Vec<_> = lines.by_ref().take_while(|line| *line != "```").collect();
            let path = named.context("a manifest without the name of a file in contrib/")?;
            let file = source(path)?;
            let expected: Vec<_> = file.lines().filter(|line| !line.starts_with('#')).collect();
            ensure!(block == expected, "the manifest is not {path}:\n{}", block.join("\n"));
        }
    }
    Ok(())
}

/// The commands of the page: lines of blocks `sh`, and lines with four spaces before them.
pub(super) fn commands(page: &str) -> Vec<String> {
    let mut commands = Vec::new();
    let mut block = None;
    for line in page.lines() {
        match (line.strip_prefix("```"), block) {
            (Some(kind), None) => block = Some(kind),
            (Some(_), Some(_)) => block = None,
            (None, Some("sh")) => commands.push(line.to_owned()),
            (None, None) => commands.extend(line.strip_prefix("    ").map(str::to_owned)),
            (None, Some(_)) => {}
        }
    }
    commands.retain(|line| !line.trim().is_empty() && !line.starts_with(' '));
    commands
}

fn check_command(command: &str) -> Result<()> {
    let mut words = command.split_whitespace();
    let program = words.next().unwrap_or_default();
    let words: Vec<_> = words.collect();
    if program == "bulkhead" {
        return check_subcommand(&words);
    }
    if program.contains('=') {
        // It sets a variable.
        return Ok(());
    }
    ensure!(OTHERS.contains(&program), "{program} is not known here: add it to OTHERS");
    for word in words {
        let is_file = [".deb", ".gz", ".yaml"].iter().any(|end| word.ends_with(end));
        if is_file && !word.starts_with('/') {
            check_file(word)?;
        }
        check_path(word)?;
    }
    Ok(())
}

fn check_subcommand(words: &[&str]) -> Result<()> {
    let [subcommand, options @ ..] = words else { bail!("there is no subcommand") };
    let (arguments, installation) = (source(SUBCOMMANDS)?, source(INSTALLATION)?);
    let commands = arguments.split_once("enum Command {").and_then(|(_, rest)| rest.split_once("\n}\n"));
    let commands = commands.context("the subcommands are not found")?.0;
    let is_of = |line: &str| {
        let name = line.strip_prefix("    ").unwrap_or_default().split(['(', ' ', ',']).next();
        name.is_some_and(|name| !name.is_empty() && name.to_lowercase() == *subcommand)
    };
    ensure!(commands.lines().any(is_of), "there is no `bulkhead {subcommand}`");
    for option in options.iter().filter_map(|word| word.strip_prefix("--")) {
        let name = option.replace('-', "_");
        // The fields of the subcommands, of what several have, and of `install`.
        let is_there = commands.contains(&format!("        {name}:"))
            || arguments.contains(&format!("    pub(crate) {name}:"))
            || installation.contains(&format!("    pub(super) {name}:"));
        ensure!(is_there, "there is no option --{option}");
    }
    Ok(())
}

/// Checks a file in the current directory: what is built, or a manifest. In a clone, what is built has its own place.
fn check_file(name: &str) -> Result<()> {
    let name = name.strip_prefix(BUILT).unwrap_or(name);
    let built = [format!("bulkhead_{VERSION}_amd64.deb"), format!("bulkhead-{VERSION}-x86_64.tar.gz")];
    let is_manifest = source_dir().join(MANIFESTS).join(name).is_file();
    ensure!(built.iter().any(|built| built == name) || is_manifest, "there is no {name}");
    Ok(())
}

/// Checks a path of the host, if it is in a directory of Bulkhead.
fn check_path(path: &str) -> Result<()> {
    let document = path.strip_prefix(INSTALLED).unwrap_or_default().trim_end_matches('/');
    let is_packed = |(_, to): &(&str, &str)| *to == document || to.starts_with(&format!("{document}/"));
    ensure!(document.is_empty() || DOCUMENTS.iter().any(is_packed), "the package has no {path}");
    let is_made = !path.starts_with(CONFIGURATION) || source(INSTALLATION)?.contains(&format!("\"{path}\""));
    ensure!(is_made, "`bulkhead install` makes no {path}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_shows_what_there_is() {
        check().unwrap();
        let page = source(PAGE).unwrap();
        assert!(commands(&page).len() > 15 && page.contains("```yaml\n"), "{:?}", commands(&page));
    }

    #[test]
    fn what_is_not_there_is_named() {
        let sh = |command: &str| format!("```sh\n{command}\n```\n");
        for (page, reason) in [
            (sh("bulkhead instal --restart"), "there is no `bulkhead instal`"),
            (sh("bulkhead install --restrat"), "there is no option --restrat"),
            (sh("dpkg --install bulkhead_0.0.9_amd64.deb"), "there is no bulkhead_0.0.9_amd64.deb"),
            (sh("mkdir x && cp target/package/bulkhead.tar.gz x/"), "there is no bulkhead.tar.gz"),
            (sh("kubectl apply -f daemonsets.yaml"), "there is no daemonsets.yaml"),
            (sh("kubectl apply -f /etc/bulkhead/class.yaml"), "makes no /etc/bulkhead/class.yaml"),
            (sh("kubectx"), "kubectx is not known"),
            ("See `/usr/share/doc/bulkhead/contrib/k8s/`.".to_owned(), "the package has no"),
            ("```yaml\nkind: Pod\n```\n".to_owned(), "a manifest without the name"),
            (
                "`contrib/kubernetes/runtimeclass.yaml`:\n\n```yaml\nkind: Pod\n```\n".to_owned(),
                "the manifest is not contrib/kubernetes/runtimeclass.yaml",
            ),
        ] {
            let error = format!("{:#}", check_text(&page).unwrap_err());
            assert!(error.contains(reason), "{page}: {error}");
        }
        check_text(&sh("bulkhead check --json\nkubectl get pod demo --output jsonpath='{.spec}'")).unwrap();
    }
}
