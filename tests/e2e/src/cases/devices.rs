//! The devices of the host that a spec gives to a container: those that the guest has too, and the others.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::Case;
use crate::ctr::Host;
use crate::docker::Client;
use crate::fixtures::Spec;
use crate::guest_devices::{DEVICES, Device, Kind};
use crate::pods::Pod;

pub(super) const CASES: &[Case] = &[
    Case::both("fuse_and_tun_are_opened", opened),
    Case::both("a_node_has_the_specs_owner_and_mode", node),
    Case::both("a_privileged_container_starts_whatever_devices_its_host_has", privileged),
    Case::bulkhead("a_device_that_the_guest_lacks_is_refused_by_name", refused),
    Case::bulkhead("a_block_device_is_refused_by_name", block_refused),
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
    Client::of(host)?.container().flags(["--privileged"]).sh(OPEN)?.succeeds()?.prints("open\n")?;
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
    Client::of(host)?.container().flags(flags).run(&["true"])?.exits(125)?.fails_with(expected)?;
    Ok(())
}

fn block_refused(host: &Host) -> Result<()> {
    let disks = fs::read_dir("/sys/block").context("cannot list the disks")?;
    let names = disks.flatten().map(|disk| disk.file_name().display().to_string());
    let paths = names.filter(|name| !name.starts_with("loop")).map(|name| format!("/dev/{name}"));
    let path = paths.into_iter().find(|path| Path::new(path).exists()).context("this host has no disk")?;
    let finished = host.container().flags(["--device", &path]).run(&["true"])?;
    finished
        .fails_with(&format!("linux.devices[{path}] (block device "))?
        .fails_with("give the container a volume")?;
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
