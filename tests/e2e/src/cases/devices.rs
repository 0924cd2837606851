//! The devices of the host that a spec gives to a container: those that the guest has too, and the others.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Result, ensure};
use serde_json::json;
use tempfile::TempDir;

use super::Case;
use super::programs::HostCopy;
use crate::command::Cmd;
use crate::cri::messages as cri;
use crate::ctr::{Host, Runtime};
use crate::docker::Client;
use crate::fixtures::{Spec, scratch};
use crate::guest_devices::{DEVICES, Device, Kind};
use crate::pods::Pod;

pub(super) const CASES: &[Case] = &[
    Case::both("fuse_and_tun_are_opened", opened),
    Case::both("the_server_of_a_fuse_file_system_is_asked_for_a_name_before_it_creates_a_file", fuse_create),
    Case::both("a_node_has_the_specs_owner_and_mode", node),
    Case::both("a_privileged_container_starts_whatever_devices_its_host_has", privileged),
    Case::bulkhead("a_device_that_the_guest_lacks_is_refused_by_name", refused),
    Case::both("a_block_device_is_the_hosts", block_device),
    Case::both("a_block_device_without_write_permission_is_not_written", block_read_only),
    Case::both("containers_of_a_pod_share_a_block_device", block_shared),
    Case::bulkhead("what_was_flushed_to_a_block_device_survives_the_vmm", block_flushed),
    Case::both("a_block_device_that_does_not_exist_is_refused", block_missing),
    Case::bulkhead("a_privileged_container_has_the_devices_of_the_guest", privileged_has_the_guests),
    Case::bulkhead("the_list_of_devices_is_that_of_the_guests_kernel", list),
];

/// Devices of the guest's kernel that no container is given, by their names in sysfs. On the host these numbers mean
/// another device, or none.
const KEPT: &[&str] = &[
    // The kernel's console and the serial port behind it, which end in the VMM's log.
    "console",
    "ttyS0",
    // Their numbers are assigned at boot.
    "userfaultfd",
    "vsock",
];

/// A script that opens both.
const OPEN: &str = "exec 3<>/dev/fuse && exec 4<>/dev/net/tun && echo open";

fn opened(host: &Host) -> Result<()> {
    let flags = ["--device", "/dev/fuse", "--device", "/dev/net/tun"];
    host.container().flags(flags).run(&["sh", "-c", OPEN])?.succeeds()?.prints("open\n")?;
    Client::of(host)?.container().flags(flags).sh(OPEN)?.succeeds()?.prints("open\n")?;
    Ok(())
}

/// Our guest's kernel leaves that question out for virtiofs.
fn fuse_create(host: &Host) -> Result<()> {
    let copy = HostCopy::mount()?;
    let flags = ["--cap-add", "CAP_SYS_ADMIN", "--device", "/dev/fuse"];
    let container = copy.as_root_of(host.container().flags(flags));
    let finished = container.run(&["python3", "-c", include_str!("fuse_server.py")])?;
    finished.succeeds()?.says("results", "there exists, new is new")?.says("created", "new")?;
    Ok(())
}

fn node(host: &Host) -> Result<()> {
    let node = json!({
        "path": "/dev/inner/fuse", "type": "c", "major": 10, "minor": 229, "fileMode": 0o640, "uid": 5, "gid": 6,
    });
    let script = ["stat", "-c", "%F %a %u:%g %t:%T", "/dev/inner/fuse"];
    let finished =
        Spec::of(host, &script)?.with("/linux", "devices", json!([node]))?.run(host.container())?;
    finished.succeeds()?.prints("character special file 640 5:6 a:e5\n")?;
    Ok(())
}

fn privileged(host: &Host) -> Result<()> {
    host.container().flags(["--privileged"]).run(&["sh", "-c", OPEN])?.succeeds()?.prints("open\n")?;
    let flags = ["--privileged", "--volume", "/dev:/dev", "--volume", "/dev/null:/etc/masked"];
    let script = format!("cat /etc/masked && test -c /etc/masked && {OPEN}");
    Client::of(host)?.container().flags(flags).sh(&script)?.succeeds()?.prints("open\n")?;
    let pod = Pod::plan(host).privileged().start()?;
    let container = pod.container().security(|security| security.privileged = true);
    container.sh(OPEN)?.succeeds()?.prints("open\n")?;
    pod.remove()
}

fn refused(host: &Host) -> Result<()> {
    let flags = ["--device", "/dev/kvm"];
    let expected = "linux.devices[/dev/kvm] (character device 10:232) is not implemented";
    let finished = host.container().flags(flags).run(&["true"])?;
    finished.fails_with(expected)?.fails_with("the guest cannot run VMs")?.says_one_line()?;
    let client = Client::of(host)?;
    let docker = |flags: &[&str]| client.container().flags(flags.iter().copied()).run(&["true"]);
    docker(&flags)?.exits(125)?.fails_with(expected)?;
    docker(&["--privileged", "--device", "/dev/kvm:/dev/vms"])?
        .exits(125)?
        .fails_with("linux.devices[/dev/vms]")?;
    docker(&["--volume", "/dev/kvm:/dev/vms"])?
        .exits(125)?
        .fails_with("/dev/kvm (character device 10:232) is not")?;
    docker(&["--privileged", "--volume", "/dev/net:/net"])?
        .exits(125)?
        .fails_with("/dev/net, a directory of the host's")?;
    docker(&["--device-cgroup-rule", "c 188:* rwm"])?
        .exits(125)?
        .fails_with("access to the character device 188:*")?;
    Ok(())
}

/// A loop device of the host, of 16 MiB. It is let go of when this is dropped.
pub(crate) struct Loop {
    directory: TempDir,
    path: String,
}

/// What the host has at the start of a [`Loop`], and what containers write behind it.
const HOSTS: &str = "of the host";
const CONTAINERS: &str = "of a container";
const MIB: u64 = 16;
/// Sector and byte.
const PLACE: u64 = 100;
const OFFSET: u64 = PLACE * 512;

/// Attaches the file to a loop device of the host. Returns the path of its node.
pub(crate) fn attach(file: &Path) -> Result<String> {
    let found = Cmd::new("losetup").args(["--find", "--show"]).args([file]).run()?;
    Ok(found.succeeds()?.text().trim().to_owned())
}

impl Loop {
    pub(crate) fn new() -> Result<Self> {
        let directory = scratch()?;
        let file = File::create(directory.path().join("disk"))?;
        file.set_len(MIB << 20)?;
        file.write_all_at(HOSTS.as_bytes(), 0)?;
        let path = attach(&directory.path().join("disk"))?;
        Ok(Self { directory, path })
    }

    /// Its node.
    pub(crate) fn path(&self) -> &str {
        &self.path
    }

    /// Expects that the file has what a container has written.
    fn expect_written(&self) -> Result<()> {
        let mut written = vec![0; CONTAINERS.len()];
        File::open(self.directory.path().join("disk"))?.read_exact_at(&mut written, OFFSET)?;
        ensure!(
            written == CONTAINERS.as_bytes(),
            "expected  {CONTAINERS:?} in the file of the loop device\ncame      {written:?}"
        );
        Ok(())
    }

    /// Expects that nobody has the device open.
    fn free(self) -> Result<()> {
        Cmd::new("losetup").args(["--detach", &self.path]).run()?.succeeds()?;
        // A device that somebody has open keeps its file until then.
        let listed = Cmd::new("losetup").args(["--list", "--noheadings", "--output", "NAME"]).run()?;
        listed
            .succeeds()?
            .check("no such device", !listed.text().lines().any(|it| it.trim() == self.path))?;
        Ok(())
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        // It may be let go of already.
        _ = Cmd::new("losetup").args(["--detach", &self.path]).run();
    }
}

/// A script that writes to the device `node`.
fn write_to(node: &str) -> String {
    format!("printf '{CONTAINERS}' | dd of={node} bs=512 seek={PLACE} conv=notrunc,fsync 2>&1")
}

fn block_device(host: &Host) -> Result<()> {
    let disk = Loop::new()?;
    let node = &disk.path;
    let length = HOSTS.len();
    let script = format!(
        "test -b {node} && head -c {length} {node} && echo && wc -c <{node} && ({}) >/dev/null",
        write_to(node)
    );
    let expected = format!("{HOSTS}\n{}\n", MIB << 20);
    let flags = ["--device", node];
    host.container().flags(flags).run(&["sh", "-c", &script])?.succeeds()?.prints(&expected)?;
    disk.expect_written()?;
    Client::of(host)?.container().flags(flags).sh(&script)?.succeeds()?.prints(&expected)?;
    // The same disk by two ways, beside all nodes of the host.
    let (device, volume) = (format!("{node}:/dev/xvda"), format!("{node}:/dev/mounted"));
    let flags = ["--privileged", "--device", &device, "--volume", &volume];
    let script = format!("for it in xvda mounted; do head -c {length} /dev/$it && echo; done");
    let expected = format!("{HOSTS}\n{HOSTS}\n");
    Client::of(host)?.container().flags(flags).sh(&script)?.succeeds()?.prints(&expected)?;
    disk.free()
}

fn block_read_only(host: &Host) -> Result<()> {
    let disk = Loop::new()?;
    let flag = format!("{}:/dev/data:r", disk.path);
    let script = format!("head -c {} /dev/data && echo; {}; echo $?", HOSTS.len(), write_to("/dev/data"));
    let finished = Client::of(host)?.container().flags(["--device", &flag]).sh(&script)?;
    finished.succeeds()?.check("what is on the disk", finished.text().starts_with(&format!("{HOSTS}\n")))?;
    finished.check("a refusal", finished.text().contains("Operation not permitted"))?;
    disk.free()
}

fn block_shared(host: &Host) -> Result<()> {
    let disk = Loop::new()?;
    let pod = Pod::plan(host).privileged().start()?;
    let device = cri::Device {
        host_path: disk.path.clone(),
        container_path: "/dev/data".into(),
        permissions: "rwm".into(),
    };
    let container = || pod.container().config(|config| config.devices = vec![device.clone()]);
    container().named("first", 0).sh(&write_to("/dev/data"))?.succeeds()?;
    let script =
        format!("dd if=/dev/data bs=512 skip={PLACE} count=1 2>/dev/null | head -c {}", CONTAINERS.len());
    container().named("second", 0).sh(&script)?.succeeds()?.prints(CONTAINERS)?;
    // A container that was not given the device cannot open it.
    let script = "cd /sys/class/block; for it in *; do mknod /$it b $(tr : ' ' <$it/dev); cat /$it; done";
    let mut others = vec![pod.container().named("third", 0).sh(script)?];
    // On runc a privileged container can open all of them.
    if host.runtime() == Runtime::Bulkhead {
        let third = pod.container().named("third", 1).security(|security| security.privileged = true);
        others.push(third.sh(script)?);
    }
    for finished in others {
        finished.check("no block device that opens", !finished.text().contains(HOSTS))?;
        let errors = String::from_utf8_lossy(&finished.stderr).into_owned();
        finished.check("refusals", errors.contains("Operation not permitted"))?;
    }
    pod.remove()?;
    disk.expect_written()?;
    disk.free()
}

fn block_flushed(host: &Host) -> Result<()> {
    let disk = Loop::new()?;
    let script = format!("{}; echo written; sleep 1000", write_to("/dev/data"));
    let flag = format!("{}:/dev/data", disk.path);
    let made = Client::of(host)?.container().flags(["--device", &flag]).detach(&["sh", "-c", &script])?;
    made.wait_for_output("written")?;
    let pid = made.inspect("/State/Pid")?.to_string();
    Cmd::new("kill").args(["-KILL", &pid]).run()?.succeeds()?;
    made.docker(&["wait"])?.succeeds()?.prints("137\n")?;
    disk.expect_written()?;
    disk.free()
}

fn block_missing(host: &Host) -> Result<()> {
    let node = json!({"path": "/dev/data", "type": "b", "major": 8, "minor": 999_999});
    let rule = json!({"allow": true, "type": "b", "major": 8, "minor": 999_999, "access": "rwm"});
    let spec = Spec::of(host, &["head", "-c", "1", "/dev/data"])?.with("/linux", "devices", json!([node]))?;
    let finished = spec.with("/linux/resources", "devices", json!([rule]))?.run(host.container())?;
    // runc makes the node, which nobody can open.
    match host.runtime() {
        Runtime::Runc => finished.fails_with("No such device or address")?,
        Runtime::Bulkhead => finished
            .fails_with("linux.devices[/dev/data]: the host's block device 8:999999 does not exist")?
            .says_one_line()?,
    };
    Ok(())
}

fn privileged_has_the_guests(host: &Host) -> Result<()> {
    let script = "for node in $(find /dev -type c -o -type b); do echo $node; done; ls /dev/kvm";
    let finished = host.container().flags(["--privileged"]).run(&["sh", "-c", script])?;
    finished.fails_with("/dev/kvm: No such file or directory")?;
    let text = finished.text();
    let others: Vec<_> = text
        .lines()
        .filter(|path| !DEVICES.iter().any(|device| device.path == *path) && !path.starts_with("/dev/pts/"))
        .collect();
    ensure!(others.is_empty(), "expected  only devices of the guest in /dev\ncame      {others:?}");
    Ok(())
}

fn list(host: &Host) -> Result<()> {
    // The kernel loads a driver that is a module when a node of it is opened.
    let script = "for it in autofs btrfs-control loop-control loop0 mapper/control; do exec 3</dev/$it || exit 1; done
                  cd /sys/dev/char && for it in *; do echo $it $(sed -n s/^DEVNAME=//p $it/uevent); done; \
                  cd /sys/dev/block && for it in *; do echo $it block $(sed -n s/^DEVNAME=//p $it/uevent); done";
    let modules =
        ["/dev/autofs", "/dev/btrfs-control", "/dev/loop-control", "/dev/loop0", "/dev/mapper/control"];
    let nodes = DEVICES.iter().filter(|device| modules.contains(&device.path));
    let nodes: Vec<_> = nodes
        .map(|Device { path, kind, major, minor }| {
            let kind = if *kind == Kind::Block { "b" } else { "c" };
            json!({"path": path, "type": kind, "major": major, "minor": minor})
        })
        .collect();
    ensure!(nodes.len() == modules.len(), "the list of devices lacks one of {modules:?}");
    let spec = Spec::of(host, &["sh", "-c", script])?.with("/linux", "devices", json!(nodes))?;
    let spec = spec.with("/linux/resources", "devices", json!([{"allow": true, "access": "rwm"}]))?;
    let finished = spec.run(host.container())?;
    let text = finished.succeeds()?.text();
    for device in DEVICES {
        let kind = if device.kind == Kind::Block { "block " } else { "" };
        let line =
            format!("{}:{} {kind}{}", device.major, device.minor, device.path.trim_start_matches("/dev/"));
        finished.check(&format!("the device {line}"), text.lines().any(|it| it == line))?;
    }
    let is_known = |line: &str| {
        let name = line.split(' ').next_back().unwrap_or_default();
        KEPT.contains(&name) || DEVICES.iter().any(|device| device.path == format!("/dev/{name}"))
    };
    let others: Vec<_> = text.lines().filter(|line| !is_known(line)).collect();
    ensure!(others.is_empty(), "expected  no other device of the guest's kernel\ncame      {others:?}");
    Ok(())
}
