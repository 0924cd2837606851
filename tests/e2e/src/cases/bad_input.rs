//! What cannot work is refused soon, in one line that says what and why, and leaves nothing.

use std::fs;
use std::path::Path;

use anyhow::Result;
use serde_json::json;

use super::Case;
use crate::command::Finished;
use crate::ctr::{Container, Host};
use crate::fixtures::{CONFIGURATION, Covered, MovedAway, Replaced, Spec, scratch};

pub(super) const CASES: &[Case] = &[
    Case::both("a_command_that_the_image_lacks", command_missing),
    Case::both("a_path_that_the_image_lacks", path_missing),
    Case::both("a_command_that_is_not_executable", command_not_executable),
    Case::both("a_working_directory_that_is_a_file", working_directory_is_a_file),
    Case::both("a_root_that_does_not_exist", root_missing),
    Case::both("a_root_that_is_a_file", root_is_a_file),
    Case::both("a_root_that_is_empty", root_empty),
    Case::both("a_mount_whose_source_does_not_exist", mount_source_missing),
    Case::both("a_mount_of_an_unknown_type", mount_type_unknown),
    Case::bulkhead("the_kernel_is_missing", kernel_missing),
    Case::bulkhead("the_kernel_is_not_a_kernel", kernel_broken),
    Case::bulkhead("the_initramfs_is_missing", initramfs_missing),
    Case::bulkhead("an_agent_that_cannot_begin_says_why_without_a_console", agent_cannot_begin),
    Case::bulkhead("the_vmm_is_missing", vmm_missing),
    Case::bulkhead("the_configuration_is_broken", configuration_broken),
    Case::bulkhead("the_configuration_has_an_unknown_key", configuration_unknown_key),
    Case::bulkhead("kvm_is_missing", kvm_missing),
    Case::bulkhead("kvm_is_one_that_runs_no_stock_kernel", kvm_unusable),
    Case::bulkhead("a_listener_for_system_calls_is_not_built_yet", system_call_listener),
    Case::bulkhead("the_hosts_network", host_network),
    Case::bulkhead("the_hosts_network_namespace_by_its_path", host_network_by_path),
    Case::both("a_network_namespace_that_does_not_exist", netns_missing),
];

/// Expects one line with all these words, soon. The same words of an errno are written with a capital or without.
fn refused<'f>(host: &Host, finished: &'f Finished, words: &[&str]) -> Result<&'f Finished> {
    for word in words {
        finished.fails_with(word)?;
    }
    finished.says_one_line()?.within(host.error_limit())
}

/// Expects that `ctr run` of this container is refused with these words and leaves nothing.
fn run_is_refused(host: &Host, container: Container<'_>, command: &[&str], words: &[&str]) -> Result<()> {
    host.leaves_nothing(|| {
        refused(host, &container.run(command)?, words)?;
        Ok(())
    })
}

fn command_missing(host: &Host) -> Result<()> {
    let words = ["exec: \"no-such-command\": executable file not found in $PATH"];
    run_is_refused(host, host.container(), &["no-such-command", "argument"], &words)
}

fn path_missing(host: &Host) -> Result<()> {
    run_is_refused(
        host,
        host.container(),
        &["/no/such/command"],
        &["/no/such/command", "no such file or directory"],
    )
}

fn command_not_executable(host: &Host) -> Result<()> {
    run_is_refused(host, host.container(), &["/etc/passwd"], &["/etc/passwd", "permission denied"])
}

fn working_directory_is_a_file(host: &Host) -> Result<()> {
    let container = host.container().flags(["--cwd", "/etc/passwd"]);
    run_is_refused(host, container, &["true"], &["/etc/passwd", "not a directory"])
}

fn root_missing(host: &Host) -> Result<()> {
    let container = host.container().rootfs("/no/such/root");
    run_is_refused(host, container, &["true"], &["/no/such/root", "no such file or directory"])
}

fn root_is_a_file(host: &Host) -> Result<()> {
    run_is_refused(host, host.container().rootfs("/etc/passwd"), &["true"], &["not a directory"])
}

fn root_empty(host: &Host) -> Result<()> {
    let empty = scratch()?;
    let container = host.container().rootfs(&empty.path().display().to_string());
    run_is_refused(host, container, &["true"], &["exec: \"true\": executable file not found in $PATH"])
}

fn mount_source_missing(host: &Host) -> Result<()> {
    let container = host.container().bind(Path::new("/no/such/source"), "/data", "rbind:ro");
    run_is_refused(host, container, &["true"], &["/no/such/source", "no such file or directory"])
}

fn mount_type_unknown(host: &Host) -> Result<()> {
    let container = host.container().flags(["--mount", "type=nofs,src=none,dst=/data"]);
    run_is_refused(host, container, &["true"], &["/data", "no such device"])
}

/// Expects that a run under this configuration is refused with these words and leaves nothing.
fn refused_under(host: &Host, configuration: &str, words: &[&str]) -> Result<()> {
    host.leaves_nothing(|| {
        let _replaced = Replaced::file(Path::new(CONFIGURATION), configuration)?;
        refused(host, &host.run(&["true"])?, words)?;
        Ok(())
    })
}

fn kernel_missing(host: &Host) -> Result<()> {
    let words = ["kernel", "/no/such/vmlinux", "No such file or directory"];
    refused_under(host, "kernel = \"/no/such/vmlinux\"\n", &words)
}

fn kernel_broken(host: &Host) -> Result<()> {
    let directory = scratch()?;
    let file = directory.path().join("vmlinux");
    fs::write(&file, "this is text\n")?;
    let file = file.display().to_string();
    refused_under(host, &format!("kernel = {file:?}\n"), &["kernel", &file, "ELF"])
}

fn initramfs_missing(host: &Host) -> Result<()> {
    let words = ["initramfs", "/no/such/initramfs", "No such file or directory"];
    refused_under(host, "initramfs = \"/no/such/initramfs\"\n", &words)
}

/// The agent makes `/newroot` first of all. Here the initramfs has it already.
fn agent_cannot_begin(host: &Host) -> Result<()> {
    let directory = scratch()?;
    let initramfs = directory.path().join("initramfs.cpio");
    let mut archive = fs::read("/usr/lib/bulkhead/initramfs.cpio")?;
    archive.resize(archive.len().next_multiple_of(4), 0);
    archive.extend(one_directory("newroot"));
    fs::write(&initramfs, archive)?;
    let configuration = format!("initramfs = {initramfs:?}\ntemplates = false\n");
    refused_under(host, &configuration, &["fatal: moving the root to a tmpfs: File exists"])
}

/// A cpio archive with one directory, as the kernel unpacks it after another archive (kernel,
/// Documentation/driver-api/early-userspace/buffer-format.rst).
fn one_directory(name: &str) -> Vec<u8> {
    let entry = |mode: u32, name: &str| {
        let (size, links) = (name.len() + 1, 2);
        let mut fields = [0; 13];
        (fields[1], fields[4], fields[11]) = (mode, links, size as u32);
        let fields: String = fields.iter().map(|field| format!("{field:08x}")).collect();
        let mut entry = format!("070701{fields}{name}\0").into_bytes();
        entry.resize(entry.len().next_multiple_of(4), 0);
        entry
    };
    [entry(0o040_755, name), entry(0, "TRAILER!!!")].concat()
}

fn vmm_missing(host: &Host) -> Result<()> {
    refused_under(host, "vmm = \"/no/such/vmm\"\n", &["/no/such/vmm", "No such file or directory"])
}

fn configuration_broken(host: &Host) -> Result<()> {
    refused_under(host, "kernel = [this is not toml\n", &[CONFIGURATION, "line 1"])
}

fn configuration_unknown_key(host: &Host) -> Result<()> {
    refused_under(host, "kernal = \"/boot/vmlinux\"\n", &[CONFIGURATION, "kernal"])
}

fn kvm_missing(host: &Host) -> Result<()> {
    host.leaves_nothing(|| {
        let _away = MovedAway::file(Path::new("/dev/kvm"))?;
        refused(host, &host.run(&["true"])?, &["/dev/kvm"])?;
        Ok(())
    })
}

fn kvm_unusable(host: &Host) -> Result<()> {
    host.leaves_nothing(|| {
        let _covered = Covered::directory(Path::new("/sys/module"), &["kvm", "kvm_pvm"])?;
        refused(host, &host.run(&["true"])?, &["kvm_pvm"])?;
        Ok(())
    })
}

/// What containerd makes of a ttrpc answer Unimplemented.
const UNIMPLEMENTED: &str = "not implemented";

fn host_network(host: &Host) -> Result<()> {
    run_is_refused(host, host.container().flags(["--net-host"]), &["true"], &["network", UNIMPLEMENTED])
}

fn system_call_listener(host: &Host) -> Result<()> {
    let profile = json!({ "defaultAction": "SCMP_ACT_ALLOW", "listenerPath": "/run/listener.sock" });
    host.leaves_nothing(|| {
        let spec = Spec::of(host, &["true"])?.with("/linux", "seccomp", profile)?;
        refused(host, &spec.run(host.container())?, &["linux.seccomp.listenerPath", UNIMPLEMENTED])?;
        Ok(())
    })
}

fn host_network_by_path(host: &Host) -> Result<()> {
    let container = host.container().flags(["--with-ns", "network:/proc/1/ns/net"]);
    run_is_refused(
        host,
        container,
        &["true"],
        &["/proc/1/ns/net", "host's own network namespace", UNIMPLEMENTED],
    )
}

fn netns_missing(host: &Host) -> Result<()> {
    let container = host.container().flags(["--with-ns", "network:/run/netns/missing"]);
    run_is_refused(host, container, &["true"], &["/run/netns/missing", "no such file or directory"])
}
