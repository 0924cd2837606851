//! `bulkhead check`: whether this host can run pods.

mod cni;
mod distribution;
mod finding;
mod http2;
mod kernel;
mod node;
mod resources;

use std::{
    io::{self, Write},
    path::Path,
    time::Duration,
};

use bulkhead_host_shim::operator::{Config, chain};
use rustix::process::geteuid;
use toml::Table;

pub(crate) use cni::disabled;
pub(crate) use finding::{Finding, Status};

use crate::{
    check::distribution::Family,
    command_output,
    config_file::ConfigFile,
    containerd::{self, Containerd},
    output,
    run::nat::pasta,
};

/// Checks this host, with this configuration of Bulkhead and this containerd.
pub(crate) fn check(config: &ConfigFile, containerd: &Containerd) -> Vec<Finding> {
    let version = containerd.version();
    let mut findings = user(geteuid().is_root());
    findings.extend(check_with(config, containerd, version, || containerd.configuration()));
    findings
}

/// What others than root may not see here.
fn user(is_root: bool) -> Vec<Finding> {
    match is_root {
        true => Vec::new(),
        false => {
            vec![Finding::warn("not root", "some of the lines below may be wrong", "run it as root")]
        }
    }
}

/// Checks this host, with what this containerd says of its version and, if it has one, of its configuration.
fn check_with(
    config: &ConfigFile,
    containerd: &Containerd,
    version: io::Result<String>,
    configuration: impl FnOnce() -> io::Result<Table>,
) -> Vec<Finding> {
    let root = Path::new("/");
    let mut findings = vec![
        kernel::release(root),
        kernel::processor(root),
        kernel::kvm(root),
        kernel::modules(root),
        kernel::cgroups(root),
        kernel::landlock(),
        kernel::apparmor(root),
    ];
    let is_there = version.is_ok();
    let configuration = is_there.then(configuration);
    let labels = matches!(&configuration, Some(Ok(configuration)) if containerd::labels(configuration));
    findings.extend(kernel::selinux(root, labels));
    let family = Family::of(root);
    findings.push(node::version(version, containerd.generator(), family));
    if let Some(configuration) = configuration {
        let cni = configuration.as_ref().ok().map(|it| cni::cni(root, it, containerd.generator()));
        findings.extend([node::socket(root, containerd), node::handler(configuration)]);
        findings.extend(cni);
    }
    findings.push(node::shim(root));
    let (finding, config) = configuration_within(PARTS, config);
    findings.push(finding);
    // With a configuration that cannot be read, no VM starts. The defaults show what else is wrong.
    let config = config.unwrap_or_default();
    findings.push(resources::memory(root, &config));
    findings.push(resources::run(Path::new("/run"), &config));
    findings.push(node::pasta(pasta(), family));
    findings
}

/// How long the configuration and the parts that it names may take. One of them is a program, which has a limit itself.
const PARTS: Duration = Duration::from_secs(if cfg!(test) { 2 } else { 30 });

/// [`node::configuration`], but a disk or a file server that hangs does not keep the other findings back.
fn configuration_within(limit: Duration, file: &ConfigFile) -> (Finding, Option<Config>) {
    let asked = file.clone();
    let found = match command_output::within(limit, move || node::configuration(&asked)) {
        Ok(Some(found)) => return found,
        Ok(None) => {
            let path = file.path();
            format!("{}, or a part that it names, cannot be looked at within {limit:?}", path.display())
        }
        Err(error) => format!("it cannot be looked at: {}", chain(&error)),
    };
    const REMEDY: &str = "look at the disks and file servers that they are on: one of them hangs";
    (Finding::fail("configuration", found, REMEDY), None)
}

/// Whether pods of Kubernetes will have a network, by the configuration of a containerd that has a handler for them, or
/// gets it when it starts next.
pub(crate) fn network(root: &Path, configuration: io::Result<Table>, generator: Option<&str>) -> Finding {
    match configuration {
        Ok(configuration) => cni::network(root, &configuration, generator),
        unknown => node::handler(unknown),
    }
}

/// Whether pods can run.
pub(crate) fn is_fit(findings: &[Finding]) -> bool {
    findings.iter().all(|finding| finding.status != Status::Fail)
}

/// Prints the findings, one line each, and a line for each remedy.
pub(crate) fn print(out: &mut impl Write, findings: &[Finding], is_json: bool) -> io::Result<()> {
    if is_json {
        return output::json(out, &findings);
    }
    findings.iter().try_for_each(|finding| finding.print(out))
}

#[cfg(test)]
mod tests {
    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    #[test]
    fn only_a_failure_keeps_pods_from_running() {
        let mut findings = vec![Finding::ok("a", "good"), Finding::warn("b", "less good", "do this")];
        assert!(is_fit(&findings));
        findings.push(Finding::fail("c", "bad", "do that"));
        assert!(!is_fit(&findings));
        let mut out = Vec::new();
        print(&mut out, &findings, false).unwrap();
        let expected =
            "ok    a: good\nwarn  b: less good\n      -> do this\nfail  c: bad\n      -> do that\n";
        assert_eq!(String::from_utf8(out).unwrap(), expected);
        let mut out = Vec::new();
        print(&mut out, &findings, true).unwrap();
        let json: serde_json::Value = serde_json::from_slice(&out).unwrap();
        assert_eq!(
            json[2],
            serde_json::json!({"check": "c", "status": "fail", "found": "bad", "remedy": "do that"})
        );
    }

    #[test]
    fn a_user_who_is_not_root_is_warned_first() {
        assert_eq!(user(true), []);
        let mut out = Vec::new();
        print(&mut out, &user(false), false).unwrap();
        let expected = "warn  not root: some of the lines below may be wrong\n      -> run it as root\n";
        assert_eq!(String::from_utf8(out).unwrap(), expected);
    }

    /// What the findings on a page are about, in its first block of them.
    fn names_on(page: &str) -> Vec<&str> {
        let block = page.split("```text\n").find(|block| block.contains("KVM: ")).unwrap();
        let lines = block.lines().take_while(|line| *line != "```").filter(|line| !line.starts_with(' '));
        lines.map(|line| line.split_once(' ').unwrap().1.split_once(':').unwrap().0.trim()).collect()
    }

    #[test]
    fn the_quick_start_shows_each_finding() {
        let configuration = || Ok(Table::new());
        let containerd = Containerd::of("/etc/containerd/config.toml".into());
        let findings =
            check_with(&ConfigFile { config: None }, &containerd, Ok("1.7.24".into()), configuration);
        let names: Vec<_> = findings.iter().map(|finding| finding.check.as_str()).collect();
        assert_eq!(names_on(include_str!("../../../docs/quickstart-containerd.md")), names);
    }

    #[test]
    fn parts_on_a_disk_that_hangs_keep_no_finding_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.toml");
        // Whoever opens it waits for somebody who writes.
        mknodat(CWD, &path, FileType::Fifo, Mode::RUSR, 0).unwrap();
        let containerd = Containerd::of("/etc/containerd/config.toml".into());
        let missing = Err(io::ErrorKind::NotFound.into());
        let findings =
            check_with(&ConfigFile { config: Some(path) }, &containerd, missing, || Ok(Table::new()));
        let configuration = findings.iter().find(|finding| finding.check == "configuration").unwrap();
        assert_eq!(configuration.status, Status::Fail);
        assert!(configuration.found.ends_with("cannot be looked at within 2s"), "{configuration:?}");
        assert!(findings.iter().any(|finding| finding.check == "pasta"), "{findings:?}");
    }

    #[test]
    fn this_machine_is_checked_without_a_panic() {
        let containerd = Containerd::of("/etc/containerd/config.toml".into());
        let findings = check(&ConfigFile { config: None }, &containerd);
        // Nothing is asked of a containerd that is not there.
        let sometimes = ["SELinux", "not root"];
        let always = findings.iter().filter(|finding| !sometimes.contains(&finding.check.as_str())).count();
        assert!([13, 16].contains(&always), "{findings:#?}");
        assert!(findings.iter().all(|it| it.status == Status::Ok || it.remedy.is_some()), "{findings:#?}");
    }
}
