//! Tries what the init containers of contrib/kubernetes/daemonset.yaml and daemonset-remove.yaml do to a node. There is
//! no Kubernetes: `ctr` runs the scripts of the manifests on runc, in containers with the same rights and mounts. Their
//! image is made by the commands of the quick start.

use std::fs;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::commands::{hidden, show};
use super::kubernetes_page;
use super::trial::{SHARED, START_DOCKER, STATE, ctr_run, nothing_is_left};
use crate::cache::Cache;
use crate::dist::{Dist, TESTS, source_dir};
use crate::progress::step;
use crate::rig::{Payload, Put, Rig, Session};
use crate::tools::Tools;

/// What is of a clone here: the manifests, the Dockerfile and the archive, where the quick start takes them from.
const CLONE: &str = "/root/clone";
/// The directory in it that the quick start makes.
const DIRECTORY: &str = "/root/clone/install";
const IMAGES: &str = "/root/busybox-oci.tar";

/// The registry that the quick start names. It does not exist.
const REGISTRY: &str = "registry.example.com/team";

/// What ends each script.
const INSTALLED: &str = "Bulkhead is installed on this node.";
const REMOVED: &str = "Bulkhead is removed from this node.";

/// Installs, again, uses, and removes.
pub(super) fn run(cache: &Cache, tools: &Tools, dist: &Dist, archive: &Path) -> Result<()> {
    println!("\n# contrib/kubernetes/daemonset.yaml");
    let put = |local: &Path, remote: &str| Put { local: local.into(), remote: remote.into() };
    let images = dist.root().join(TESTS).join("busybox-oci.tar");
    let name = archive.file_name().and_then(|name| name.to_str()).context("the archive has no name")?;
    let manifests = source_dir().join("contrib/kubernetes");
    let files = [
        put(archive, &format!("{CLONE}/target/package/{name}")),
        put(&images, IMAGES),
        put(&manifests, &format!("{CLONE}/contrib/kubernetes")),
    ];
    let payload = Payload::new(cache, &files)?;
    let rig = Rig::ensure(cache, tools)?;
    let mut session = step("starting a bare host", || rig.start(&payload))?;
    let (install, remove) = (script("daemonset.yaml")?, script("daemonset-remove.yaml")?);
    show(&mut session, &format!("ctr image import {IMAGES}"))?;
    show(&mut session, START_DOCKER)?;
    let image = build_image(&mut session)?;
    let image = image.as_str();
    hidden(&mut session, SHARED)?;
    let before = hidden(&mut session, STATE)?;

    let said = container(&mut session, image, &install, INSTALLED)?;
    ensure!(said.contains("wrote /etc/containerd/config.toml"), "containerd was not configured:\n{said}");
    ensure!(said.contains("\nmade "), "no template was made:\n{said}");
    let check = show(&mut session, "bulkhead check")?;
    ensure!(check.contains("ok    runtime handler"), "containerd has no handler");
    let of_containerd = "systemctl show --property MainPID containerd";
    let running = show(&mut session, of_containerd)?;
    let again = container(&mut session, image, &install, INSTALLED)?;
    ensure!(again.contains("configuration is as it was"), "the second time is not as the first:\n{again}");
    ensure!(again.contains("\nkept ") && !again.contains("\nmade "), "templates were made again:\n{again}");
    let still = show(&mut session, of_containerd)?;
    ensure!(running == still, "containerd was restarted although nothing has changed");

    show(&mut session, &ctr_run("--detach", "running", "sleep 1000"))?;
    let refused = container(&mut session, image, &remove, "Pods of Bulkhead run on this node")?;
    ensure!(!refused.contains("removed"), "it has removed something under a pod:\n{refused}");
    show(&mut session, "ctr task exec --exec-id one running true")?;
    show(&mut session, "ctr task rm --force running; ctr container rm running")?;
    let said = container(&mut session, image, &remove, REMOVED)?;
    ensure!(!said.contains("warn  "), "the removal warns of what the installation has written:\n{said}");
    nothing_is_left(&mut session, &before, "the DaemonSets")?;
    container(&mut session, image, &remove, REMOVED)?;
    session.finish();
    Ok(())
}

/// How long a script may take until it has printed its last line. The installation boots two VMs and saves them.
const END: Duration = Duration::from_secs(600);
/// Between two looks at what it has said.
const PAUSE: Duration = Duration::from_secs(1);

const REMOVE: &str =
    "(ctr task kill --signal SIGKILL daemon; ctr task rm --force daemon; ctr container rm daemon) 2>&1";

/// Makes the image by the commands of the quick start, and gives it to containerd, as a pull would. Returns its name,
/// which both manifests must have.
fn build_image(session: &mut Session) -> Result<String> {
    let script = commands_of_image(&kubernetes_page::text()?)?;
    show(session, &format!("set -e; cd {CLONE}\n{script}"))?;
    let names =
        hidden(session, &format!("cd {DIRECTORY} && sed -n 's/^ *image: //p' *.yaml | sort --unique"))?;
    let name = names.trim_end();
    ensure!(
        name.starts_with(REGISTRY) && name.lines().count() == 1,
        "the manifests have the images\n{names}"
    );
    hidden(session, &format!("docker image save {name} | ctr image import -"))?;
    Ok(name.to_owned())
}

/// The commands of the page that make the image. There is no registry to push it to.
fn commands_of_image(page: &str) -> Result<String> {
    let commands = kubernetes_page::commands(page);
    let first = commands.iter().position(|command| command.starts_with("mkdir "));
    let last = commands.iter().position(|command| command.starts_with("docker build "));
    match (first, last) {
        (Some(first), Some(last)) if first < last => Ok(commands[first..=last].join("\n")),
        _ => bail!("the quick start does not make the image"),
    }
}

/// Runs the script as the init container of the DaemonSet, until it has said `end`. Returns all that it has said.
fn container(session: &mut Session, image: &str, script: &str, end: &str) -> Result<String> {
    let run = format!(
        "rm -f /root/said; ctr run --detach --log-uri file:///root/said --privileged --with-ns pid:/proc/1/ns/pid \
         --mount type=bind,src=/,dst=/host,options=rbind:rslave:rw {image} daemon sh -ec {}",
        quoted(script)
    );
    println!("\n$ ctr run ... sh -ec '...'");
    hidden(session, &run)?;
    let until = Instant::now() + END;
    let said = loop {
        let said = hidden(session, "cat /root/said")?;
        if said.contains(end) {
            break said;
        }
        ensure!(Instant::now() < until, "the container has not said `{end}` within {END:?}:\n{said}");
        thread::sleep(PAUSE);
    };
    println!("{}", said.trim_end());
    hidden(session, REMOVE)?;
    Ok(said)
}

fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// The script in a manifest.
fn script(name: &str) -> Result<String> {
    let path = source_dir().join("contrib/kubernetes").join(name);
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    block(&text).with_context(|| format!("{}: there is no block of text", path.display()))
}

/// The first block of text, which begins after `- |` and has a larger indentation.
fn block(yaml: &str) -> Option<String> {
    let mut lines = yaml.lines().skip_while(|line| line.trim() != "- |");
    let first = lines.next()?;
    let indentation = first.len() - first.trim_start().len() + 2;
    let is_inside =
        |line: &&str| line.trim().is_empty() || line.len() - line.trim_start().len() >= indentation;
    let line = |line: &str| format!("{}\n", line.get(indentation..).unwrap_or_default());
    Some(lines.take_while(is_inside).map(line).collect()).filter(|text: &String| !text.is_empty())
}

#[cfg(test)]
mod tests {
    use std::env;
    use std::os::unix::fs::PermissionsExt;
    use std::path::PathBuf;
    use std::process::Command;

    use super::*;

    #[test]
    fn the_image_is_made_by_the_commands_of_the_quick_start() {
        let script = commands_of_image(&kubernetes_page::text().unwrap()).unwrap();
        let begins = ["mkdir install && ", &format!("REGISTRY={REGISTRY}"), "sed -i ", "docker build "];
        assert_eq!(script.lines().count(), begins.len(), "{script}");
        assert!(script.lines().zip(begins).all(|(line, begin)| line.starts_with(begin)), "{script}");
        assert!(commands_of_image("    docker build .\n    mkdir install\n").is_err());
    }

    /// The files of the archive here. The package has the second one too.
    const OF_ARCHIVE: [&str; 2] = ["usr/local/bin/bulkhead", "usr/lib/bulkhead/bulkhead-vmm"];

    /// A node that is a directory, and what its programs have said and done there.
    struct Node(tempfile::TempDir);

    impl Node {
        /// `programs` is a part of a script: what `bulkhead` and `systemctl` of the node do, by the words of the line.
        fn with(programs: &str) -> Self {
            let node = Self(tempfile::tempdir().unwrap());
            for directory in ["bin", "host/run"] {
                fs::create_dir_all(node.at(directory)).unwrap();
            }
            let text = format!(
                "#!/bin/sh\nshift 4\ncd {}\necho \"$*\" >> called\ncase \"$*\" in\n{programs}\nesac\n",
                node.0.path().display()
            );
            node.write("bin/nsenter", &text);
            for file in OF_ARCHIVE {
                node.write(&format!("host/{file}"), "old");
                node.write(&format!("new/{file}"), "new");
            }
            let status = Command::new("tar")
                .args(["-czf", "bulkhead.tar.gz", "-C", "new"])
                .args(OF_ARCHIVE)
                .current_dir(&node.0)
                .status();
            assert!(status.unwrap().success());
            node
        }

        fn at(&self, path: &str) -> PathBuf {
            self.0.path().join(path)
        }

        /// Writes a program.
        fn write(&self, path: &str, text: &str) {
            fs::create_dir_all(self.at(path).parent().unwrap()).unwrap();
            fs::write(self.at(path), text).unwrap();
            fs::set_permissions(self.at(path), fs::Permissions::from_mode(0o755)).unwrap();
        }

        /// Runs the script of the manifest. Returns whether it has succeeded, and what it has said.
        fn run(&self, manifest: &str) -> (bool, String) {
            // The container's own root directory is that of the node here.
            let place = |file: &str| self.at(file).display().to_string();
            let mut text = script(manifest).unwrap();
            for file in ["host/", "bulkhead.tar.gz", "pods", "left", "said"] {
                text = text.replace(&format!("/{file}"), &place(file));
            }
            let path = format!("{}:{}", place("bin"), env::var("PATH").unwrap());
            let ended =
                Command::new("sh").args(["-ec", &text]).env("PATH", path).current_dir("/").output().unwrap();
            let said = [ended.stdout, ended.stderr].map(|bytes| String::from_utf8(bytes).unwrap()).concat();
            (ended.status.success(), said)
        }

        fn called(&self) -> String {
            fs::read_to_string(self.at("called")).unwrap()
        }
    }

    /// `bulkhead ps --json` of a node with one pod.
    fn one_pod(state: &str) -> String {
        format!(
            "*' ps --json') printf '[\\n  {{\\n    \"id\": \"demo\",\\n    \"state\": \"{state}\"\\n  }}\\n]\\n' ;;"
        )
    }

    #[test]
    fn what_no_shim_owns_is_no_pod() {
        // A template build that was killed: `gc` removes what it has left.
        let ps = one_pod("leftover").replace("') printf", "') [ -e clean ] && echo '[]' || printf");
        let node = Node::with(&format!("*' gc') touch clean ;;\n{ps}"));
        let (is_done, said) = node.run("daemonset-remove.yaml");
        assert!(is_done && said.ends_with(&format!("{REMOVED}\n")), "{said}");
        assert!(!node.at("host/usr/local/bin/bulkhead").exists(), "{}", node.called());
        for (state, reason) in [
            ("running", "Pods of Bulkhead run on this node: delete them."),
            ("unknown", "Pods of Bulkhead run on this node: delete them."),
            ("leftover", "`bulkhead gc` cannot remove what pods have left on this node."),
        ] {
            let node =
                Node::with(&format!("*' gc') echo 'PATH failed: busy'; exit 1 ;;\n{}", one_pod(state)));
            let (is_done, said) = node.run("daemonset-remove.yaml");
            assert!(!is_done && said.contains(reason) && said.contains("failed: busy"), "{said}");
            assert!(node.at("host/usr/local/bin/bulkhead").exists() && !node.called().contains("uninstall"));
        }
    }

    #[test]
    fn a_node_with_the_package_is_left_alone() {
        for manifest in ["daemonset.yaml", "daemonset-remove.yaml"] {
            // Once without the archive, and once over the package, as an older manifest has unpacked it.
            for has_archive in [false, true] {
                let node = Node::with("*' ps --json') echo '[]' ;;");
                node.write("host/usr/bin/bulkhead", "of the package");
                if !has_archive {
                    fs::remove_file(node.at("host/usr/local/bin/bulkhead")).unwrap();
                }
                let (is_done, said) = node.run(manifest);
                assert!(!is_done, "{said}");
                for part in
                    ["/usr/bin/bulkhead", "dpkg --remove bulkhead", "kubectl label node NODE bulkhead-"]
                {
                    assert!(said.contains(part), "{said}");
                }
                assert!(!node.at("called").exists(), "{}", node.called());
                let read = |path: &str| fs::read_to_string(node.at(path)).ok();
                assert_eq!(read("host/usr/bin/bulkhead").as_deref(), Some("of the package"));
                assert_eq!(read("host/usr/lib/bulkhead/bulkhead-vmm").as_deref(), Some("old"));
                assert_eq!(read("host/usr/local/bin/bulkhead").is_some(), has_archive);
                assert!(!node.at("host/usr/local/.bulkhead-new").exists());
            }
        }
    }

    #[test]
    fn an_upgrade_restarts_the_server_of_metrics() {
        let node = Node::with(
            "*' install --restart') echo \"containerd's configuration is as it was\" ;;\n*metrics*) exit 5 ;;",
        );
        let (is_done, said) = node.run("daemonset.yaml");
        assert!(is_done && said.ends_with(&format!("{INSTALLED}\n")), "{said}");
        assert_eq!(fs::read_to_string(node.at("host/usr/local/bin/bulkhead")).unwrap(), "new");
        let called = node.called();
        assert!(
            called.contains("systemctl daemon-reload\nsystemctl try-restart bulkhead-metrics.service\n"),
            "{called}"
        );
        // It restarts containerd only if that has not read its configuration.
        let installs: Vec<_> = called.lines().filter(|line| line.contains("bulkhead install")).collect();
        assert_eq!(installs, ["/usr/local/bin/bulkhead install --restart"], "{called}");
    }

    #[test]
    fn the_script_of_a_manifest_is_found_and_quoted() {
        let yaml = "args:\n  # why\n  - |\n    if true; then\n      echo 'it'\n    fi\nother: 1\n";
        assert_eq!(block(yaml).as_deref(), Some("if true; then\n  echo 'it'\nfi\n"));
        assert_eq!(block("args: []\n"), None);
        assert_eq!(quoted("echo 'it'"), r"'echo '\''it'\'''");
        for (name, end) in [("daemonset.yaml", INSTALLED), ("daemonset-remove.yaml", REMOVED)] {
            let script = script(name).unwrap();
            assert!(script.contains(end), "{script}");
        }
    }
}
