//! Tries the archive and the Debian package on a bare host: what a user does, from the installation to the removal.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::cache::Cache;
use crate::dist::{Dist, TESTS};
use crate::oci::IMAGE;
use crate::progress::step;
use crate::rig::{Io, Limit, Payload, Put, Rig, Session};
use crate::tools::Tools;

/// How long one command may take.
const LIMIT: Duration = Duration::from_secs(180);

/// Where the files are put.
const ARCHIVE: &str = "/root/bulkhead.tar.gz";
const PACKAGE: &str = "/root/bulkhead.deb";
const IMAGES: &str = "/root/busybox-oci.tar";

/// All that an installation could leave, and the contents of all configuration.
const STATE: &str = "find /etc -type f -exec sha256sum {} + | sort -k 2; \
    find /usr/bin /usr/local /usr/lib/bulkhead /usr/lib/tmpfiles.d /usr/share/man/man1 /usr/share/doc \
    /usr/share/bash-completion /usr/share/zsh /usr/share/fish /run/bulkhead ! -type d 2>/dev/null | sort";

/// As docs/operations.md says it.
const REMOVE_ARCHIVE: &str = "tar -tzf /root/bulkhead.tar.gz | sed 's,^,/,' | xargs rm";

/// Installs, uses, upgrades and removes both.
pub(super) fn run(cache: &Cache, tools: &Tools, dist: &Dist, archive: &Path, package: &Path) -> Result<()> {
    let put = |local: &Path, remote: &str| Put { local: local.into(), remote: remote.into() };
    let images = dist.root().join(TESTS).join("busybox-oci.tar");
    let files = [put(archive, ARCHIVE), put(package, PACKAGE), put(&images, IMAGES)];
    let payload = Payload::new(cache, &files)?;
    let rig = Rig::ensure(cache, tools)?;
    let mut session = step("starting a bare host", || rig.start(&payload))?;
    show(&mut session, &format!("ctr image import {IMAGES}"))?;
    let before = hidden(&mut session, STATE)?;
    for (install, remove) in [
        (format!("dpkg --install {PACKAGE}"), "dpkg --remove bulkhead".to_owned()),
        (format!("tar -C / -xzf {ARCHIVE}"), format!("bulkhead uninstall && {REMOVE_ARCHIVE}")),
    ] {
        show(&mut session, &install)?;
        show(&mut session, "bulkhead check")?;
        show(&mut session, "bulkhead install --restart")?;
        let check = show(&mut session, "bulkhead check")?;
        ensure!(!check.contains("warn  runtime handler"), "containerd has no handler after the installation");
        let host = show(&mut session, "uname -r")?;
        let guest = show(&mut session, &ctr_run("--rm", "first", "uname -r"))?;
        ensure!(guest != host, "the container has the host's kernel: it is not in a microVM");
        // An upgrade while a pod runs: it goes on, and the next one begins.
        show(&mut session, &ctr_run("--detach", "running", "sleep 1000"))?;
        show(&mut session, &install)?;
        show(&mut session, "ctr task exec --exec-id one running true")?;
        show(&mut session, &ctr_run("--rm", "second", "true"))?;
        let pods = show(&mut session, "bulkhead ps")?;
        ensure!(pods.contains("running"), "bulkhead ps does not list the pod");
        show(&mut session, "ctr task rm --force running; ctr container rm running")?;
        show(&mut session, &remove)?;
        let after = hidden(&mut session, STATE)?;
        let changed = difference(&before, &after);
        ensure!(changed.is_empty(), "`{install}` and `{remove}` left:\n{changed}");
        println!("Nothing is left.");
    }
    session.finish();
    Ok(())
}

fn ctr_run(flag: &str, id: &str, command: &str) -> String {
    format!("ctr run {flag} --runtime io.containerd.bulkhead.v2 {IMAGE} {id} {command}")
}

/// Runs a command, shows it with its output, and returns that.
fn show(session: &mut Session, command: &str) -> Result<String> {
    println!("\n$ {command}");
    let output = hidden(session, command)?;
    println!("{}", output.trim_end());
    Ok(output)
}

fn hidden(session: &mut Session, command: &str) -> Result<String> {
    let mut output = Vec::new();
    let argv = ["sh", "-c", command].map(str::to_owned);
    let status =
        session.run(&argv, Io::Captured(&mut output), Limit::Whole(LIMIT)).context(command.to_owned())?;
    let output = String::from_utf8_lossy(&output).into_owned();
    ensure!(status == 0, "`{command}` exits with status {status}:\n{output}");
    Ok(output)
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
mod tests {
    use super::*;

    #[test]
    fn what_is_left_is_named() {
        assert_eq!(difference("a\nb\n", "b\nc\n"), "- a\n+ c\n");
        assert_eq!(difference("a\nb\n", "b\na\n"), "");
    }
}
