//! Tries the archive and the Debian package on bare hosts: what a user does, from the installation to the removal, and
//! the commands of the quick starts. Prometheus watches a pod.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use tempfile::TempDir;

use super::commands::{hidden, show};
use super::{kubernetes_page, prometheus, quickstart, test_runners, upgrade};
use crate::cache::Cache;
use crate::containerd::Containerd;
use crate::dist::{Dist, TESTS, source_dir};
use crate::oci::IMAGE;
use crate::progress::step;
use crate::rig::{Payload, Put, Rig, Session};
use crate::tools::Tools;

/// Where the files are put.
const ARCHIVE: &str = "/root/bulkhead-0.1.0-x86_64.tar.gz";
const LATER_ARCHIVE: &str = "/root/bulkhead-later.tar.gz";
const LATER_PACKAGE: &str = "/root/bulkhead-later.deb";
const IMAGES: &str = "/root/busybox-oci.tar";

/// A configuration of CNI, as a network add-on of Kubernetes writes one. Its plugins are those of Debian's package.
const CNI: &str = "/etc/cni/net.d/10-pods.conflist";
const WRITE_CNI: &str = r#"mkdir -p /etc/cni/net.d && cat > /etc/cni/net.d/10-pods.conflist <<'END'
{"cniVersion": "0.4.0", "name": "pods", "plugins": [
  {"type": "bridge", "bridge": "trial-cni", "ipam": {"type": "host-local", "subnet": "10.88.0.0/24"}},
  {"type": "portmap", "capabilities": {"portMappings": true}}
]}
END"#;

/// A bare host has no registry to pull from. The image is there already.
const PULL: &str = "ctr image pull";

/// docker is kept from starting by the rig, and has no image.
pub(super) const START_DOCKER: &str = "systemctl unmask --quiet docker.service docker.socket && systemctl start docker && \
    ctr image export /root/busybox.tar docker.io/library/busybox:latest && \
    docker load --quiet --input /root/busybox.tar && rm /root/busybox.tar";

/// All that an installation and its pods could leave: files with the contents of all configuration, links and
/// directories, units, mounts, processes and cgroups. A part of it that is missing is no error. docker makes the mount
/// that is left out for the host's own network namespace.
pub(super) const STATE: &str = r"{
    find /etc -type f -exec sha256sum {} + | sort -k 2
    find /etc ! -type f -printf '%y %p %l\n' | sort
    find /usr/bin /usr/local /usr/lib/bulkhead /usr/lib/tmpfiles.d /usr/share/man/man1 /usr/share/doc \
        /usr/lib/systemd/system/bulkhead-metrics.service \
        /usr/share/bash-completion /usr/share/zsh /usr/share/fish /run/bulkhead* | sort
    systemctl list-unit-files --all --no-legend 'bulkhead*'
    systemctl list-units --all --no-legend 'bulkhead*'
    cut --delimiter ' ' --fields 5 /proc/self/mountinfo | grep --extended-regexp 'bulkhead|/containerd/|/netns/' | \
        grep --invert-match --line-regexp /run/docker/netns/default | sort
    find /proc -maxdepth 2 -path '/proc/[0-9]*/exe' -printf '%l\n' | grep bulkhead | sort
    find /sys/fs/cgroup -type d '(' -path '*bulkhead*' -o -path '/sys/fs/cgroup/default/*' -o -name 'docker-*' ')'
} 2>/dev/null || :";

/// How long what ends may take: a shim and a VMM end after the command that has removed their pod.
const END: Duration = Duration::from_secs(60);

/// Directories of an administrator that the archive shares with other programs. Its removal leaves them, so they are
/// there before.
pub(super) const SHARED: &str = "cd /usr/local/share && mkdir -p doc man/man1 bash-completion/completions zsh/site-functions \
    fish/vendor_completions.d";

/// What removes the files of the archive, as these pages say it.
const REMOVE_ARCHIVE: [&str; 3] = [
    "tar -tzf bulkhead-0.1.0-x86_64.tar.gz | sed 's,^,/,' | xargs rm",
    "find /usr/lib/bulkhead /usr/local/share/doc/bulkhead -type d -empty -delete",
    "systemctl daemon-reload",
];

/// Installs, uses, upgrades and removes both, and follows the quick starts, with Debian 13's containerd and with
/// Debian 12's.
pub(super) fn run(cache: &Cache, tools: &Tools, dist: &Dist, archive: &Path, package: &Path) -> Result<()> {
    let rig = Rig::ensure(cache, tools)?;
    // As the quick starts have it.
    let name = package.file_name().and_then(|name| name.to_str()).context("the package has no name")?;
    let package_there = format!("/root/{name}");
    let later = TempDir::new().context("no directory for the later version")?;
    let [later_archive, later_package] =
        step("packing a later version", || upgrade::pack(dist, later.path()))?;
    for containerd in [Containerd::V1_7, Containerd::V1_6] {
        let put = |local: &Path, remote: &str| Put { local: local.into(), remote: remote.into() };
        let images = dist.root().join(TESTS).join("busybox-oci.tar");
        let files = [
            put(archive, ARCHIVE),
            put(package, &package_there),
            put(&later_archive, LATER_ARCHIVE),
            put(&later_package, LATER_PACKAGE),
            put(&images, IMAGES),
        ];
        // Metrics do not depend on the version of containerd.
        let is_watched = containerd == Containerd::V1_7;
        let prometheus = is_watched.then(|| prometheus::put(cache)).transpose()?;
        let kubernetes = is_watched.then(|| kubernetes_page::puts(dist)).transpose()?.into_iter().flatten();
        let files = files.into_iter().chain(containerd.put(cache)?).chain(prometheus).chain(kubernetes);
        let files: Vec<_> = files.collect();
        let payload = Payload::new(cache, &files)?;
        let what = format!("starting a bare host with containerd {}", containerd.name());
        let mut session = step(&what, || rig.start(&payload))?;
        if containerd.is_brought() {
            // It still runs the one that was there before the payload came.
            show(&mut session, "systemctl restart containerd")?;
        }
        show(&mut session, &format!("ctr image import {IMAGES}"))?;
        hidden(&mut session, WRITE_CNI)?;
        hidden(&mut session, SHARED)?;
        let before = hidden(&mut session, STATE)?;
        let unpack = |archive: &str| format!("tar -C / -xzf {archive}");
        for (install, upgrade, remove) in [
            (
                format!("dpkg --install {package_there}"),
                format!("dpkg --install {LATER_PACKAGE}"),
                "dpkg --remove bulkhead".to_owned(),
            ),
            (
                unpack(ARCHIVE),
                unpack(LATER_ARCHIVE),
                format!("set -e; cd /root; bulkhead uninstall; {}", REMOVE_ARCHIVE.join("; ")),
            ),
        ] {
            install_and_use(&mut session, &install)?;
            upgrade::try_out(&mut session, &upgrade)?;
            let said = show(&mut session, &remove)?;
            ensure!(!said.contains("warn  "), "`{remove}` warns of what it has written itself");
            nothing_is_left(&mut session, &before, &format!("`{install}` and `{remove}`"))?;
        }
        // containerd remembers where it found the shim, also when that is gone.
        show(&mut session, "systemctl restart containerd")?;
        show(&mut session, START_DOCKER)?;
        let before = hidden(&mut session, STATE)?;
        for page in ["quickstart-containerd.md", "quickstart-docker.md"] {
            follow(&mut session, page)?;
            nothing_is_left(&mut session, &before, page)?;
        }
        if is_watched {
            // Nothing of this depends on the version of containerd.
            test_runners::start(&mut session)?;
            let said = follow(&mut session, test_runners::PAGE)?;
            ensure!(said.contains(test_runners::ANSWERED), "the program in the microVM was not answered");
            test_runners::stop(&mut session)?;
            nothing_is_left(&mut session, &before, test_runners::PAGE)?;
            kubernetes_page::prepare(&mut session)?;
            follow(&mut session, kubernetes_page::NAME)?;
            nothing_is_left(&mut session, &before, kubernetes_page::NAME)?;
            show(&mut session, &format!("dpkg --install {package_there}"))?;
            prometheus::watch(&mut session)?;
            show(&mut session, "dpkg --remove bulkhead")?;
            nothing_is_left(&mut session, &before, "Prometheus's pod, the unit and the package")?;
            show(&mut session, &format!("dpkg --install {package_there}"))?;
            show(
                &mut session,
                "bulkhead install && echo '[vm]' > /etc/bulkhead/own.toml && bulkhead uninstall",
            )?;
            show(&mut session, "rm /usr/bin/bulkhead && dpkg --purge bulkhead")?;
            nothing_is_left(&mut session, &before, "a package without its program")?;
        }
        session.finish();
    }
    Ok(())
}

fn install_and_use(session: &mut Session, install: &str) -> Result<()> {
    show(session, install)?;
    show(session, "bulkhead check")?;
    // Without a network for pods, the installation says so at its end.
    hidden(session, &format!("mv {CNI} /root/"))?;
    let said = show(session, "bulkhead install")?;
    let no_network = "warn  CNI: there is no configuration in /etc/cni/net.d";
    ensure!(said.contains(no_network), "bulkhead install does not say that pods get no network");
    hidden(session, &format!("mv /root/10-pods.conflist {CNI}"))?;
    let said = show(session, "bulkhead install --restart")?;
    ensure!(!said.contains("CNI"), "bulkhead install misses a part of the network");
    everything_is_ok(&show(session, "bulkhead check --json")?)?;
    let host = show(session, "uname -r")?;
    let guest = show(session, &ctr_run("--rm", "first", "uname -r"))?;
    ensure!(guest != host, "the container has the host's kernel: it is not in a microVM");
    Ok(())
}

/// A line of `bulkhead check`.
#[derive(Debug, Deserialize)]
struct Finding {
    check: String,
    status: String,
}

/// Fails if one of the findings is not ok. In the rig all of them can be.
fn everything_is_ok(findings: &str) -> Result<()> {
    let findings: Vec<Finding> = serde_json::from_str(findings).context("bulkhead check --json")?;
    let bad: Vec<_> = findings.iter().filter(|it| it.status != "ok").map(|it| it.check.as_str()).collect();
    ensure!(!findings.is_empty() && bad.is_empty(), "bulkhead check is not all ok: {}", bad.join(", "));
    Ok(())
}

/// Executes the commands of a page, and compares what they print with what it says. Returns all that they print.
fn follow(session: &mut Session, page: &str) -> Result<String> {
    println!("\n# {page}");
    let path = source_dir().join("docs").join(page);
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let mut all = String::new();
    for step in quickstart::steps(&text).iter().filter(|step| !step.script.starts_with(PULL)) {
        println!("\n$ {}", step.script.trim_end());
        // The page has the output only. Warnings go to the other stream.
        let script = test_runners::adapted(step.script.trim_end());
        let script =
            format!("cd /root; ({script}) 2>errors || {{ status=$?; cat errors; exit $status; }}; rm errors");
        let output = hidden(session, &script)?;
        println!("{}", output.trim_end());
        step.check(&output)?;
        all += &output;
    }
    Ok(all)
}

pub(super) fn nothing_is_left(session: &mut Session, before: &str, by: &str) -> Result<()> {
    let end = Instant::now() + END;
    loop {
        let changed = difference(before, &hidden(session, STATE)?);
        if changed.is_empty() {
            println!("Nothing is left.");
            return Ok(());
        }
        ensure!(Instant::now() < end, "{by} left:\n{changed}");
    }
}

pub(super) fn ctr_run(flag: &str, id: &str, command: &str) -> String {
    format!("ctr run {flag} --runtime io.containerd.bulkhead.v2 {IMAGE} {id} {command}")
}

/// The lines that only one of the texts has.
fn difference(before: &str, after: &str) -> String {
    let only = |one: &str, other: &str, sign: char| -> String {
        let other: std::collections::BTreeSet<_> = other.lines().collect();
        one.lines().filter(|line| !other.contains(line)).map(|line| format!("{sign} {line}\n")).collect()
    };
    only(before, after, '-') + &only(after, before, '+')
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_pages_remove_the_archive_by_the_commands_that_are_tried() {
        for page in
            ["README.md", "docs/operations.md", "docs/quickstart-containerd.md", "docs/quickstart-docker.md"]
        {
            let text = fs::read_to_string(source_dir().join(page)).unwrap();
            let commands = REMOVE_ARCHIVE.map(|command| format!("    {command}\n")).concat();
            assert!(text.contains(&commands), "{page} has others than\n{commands}");
        }
        assert!(REMOVE_ARCHIVE[0].contains(ARCHIVE.trim_start_matches("/root/")));
    }

    #[test]
    fn what_is_left_is_named() {
        assert_eq!(difference("a\nb\n", "b\nc\n"), "- a\n+ c\n");
        assert_eq!(difference("a\nb\n", "b\na\n"), "");
    }

    #[test]
    fn one_finding_that_is_not_ok_is_too_many() {
        let finding = |check: &str, status: &str| format!(r#"{{"check": "{check}", "status": "{status}"}}"#);
        let all = |findings: &[String]| everything_is_ok(&format!("[{}]", findings.join(",")));
        assert!(all(&[finding("KVM", "ok"), finding("CNI", "ok")]).is_ok());
        let error = all(&[finding("KVM", "ok"), finding("CNI", "warn")]).map_err(|error| error.to_string());
        assert!(error.is_err_and(|error| error.contains("CNI")));
        assert!(all(&[]).is_err());
    }
}
