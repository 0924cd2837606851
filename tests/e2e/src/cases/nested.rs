//! What containers in containers are made of: an init system, programs that change their user, and namespaces of users
//! and clocks.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::fs::{XattrFlags, getxattr, setxattr};
use serde_json::json;

use super::Case;
use super::programs::{HostCopy, on_disk};
use crate::command::wait_until;
use crate::cri::messages::Device;
use crate::ctr::{Host, Runtime};
use crate::docker::Client;
use crate::fixtures::{Spec, scratch};
use crate::pods::Pod;

pub(super) const CASES: &[Case] = &[
    Case::both("systemd_is_the_init_of_a_container", systemd),
    Case::both("programs_change_their_user_unless_that_is_forbidden", set_user_id),
    Case::both("the_root_of_a_user_namespace_is_another_user_outside", user_namespace),
    Case::both("an_overlay_has_its_upper_layer_in_a_volume", overlay),
    Case::both("runc_in_a_container_runs_one_whose_root_is_in_a_volume", runc_in_a_container),
    // Minutes in a VM of an emulated host.
    Case::both("docker_in_a_container_runs_one", docker_in_a_container).by_whole_name_only(),
    Case::both("trusted_attributes_in_a_volume_are_those_of_who_may_set_them", trusted_attributes),
    Case::bulkhead("the_containers_of_a_pod_share_its_user_namespace", users_of_pod).since(1, 7),
    // runc can do this from 1.2 on.
    Case::bulkhead("the_ids_of_a_volume_are_mapped", id_mapped_volume),
    Case::bulkhead("the_clocks_of_a_time_namespace_are_the_specs", time_namespace),
];

/// How long a system may take to start and to halt.
const STARTS: Duration = Duration::from_secs(120);

/// Keeps systemd from starting these units.
fn mask(copy: &HostCopy, units: &[&str]) -> Result<()> {
    for unit in units {
        let place = copy.root().join("etc/systemd/system").join(unit);
        if place.symlink_metadata().is_ok() {
            fs::remove_file(&place).with_context(|| format!("cannot remove {unit}"))?;
        }
        symlink("/dev/null", &place).with_context(|| format!("cannot mask {unit}"))?;
    }
    Ok(())
}

fn systemd(host: &Host) -> Result<()> {
    let copy = HostCopy::mount()?;
    // What is about the host, and not about a container that has a copy of its root.
    mask(&copy, &["rig-runner.service", "containerd.service", "systemd-modules-load.service"])?;
    let script = "echo hello; cat /sys/fs/cgroup$(sed -n s/^0:://p /proc/self/cgroup)/memory.max\n";
    copy.write("srv/probe", script)?;
    let service =
        "[Service]\nType=oneshot\nMemoryMax=64M\nSyslogIdentifier=probe\nExecStart=/bin/sh /srv/probe\n";
    copy.write("etc/systemd/system/probe.service", service)?;
    // On an emulated host, a service may take longer to start than systemd waits.
    fs::create_dir_all(copy.root().join("etc/systemd/system.conf.d")).context("cannot make a directory")?;
    copy.write("etc/systemd/system.conf.d/slow.conf", "[Manager]\nDefaultTimeoutStartSec=600\n")?;
    let container = copy.as_root_of(host.container()).flags(["--privileged", "--env", "container=other"]);
    let task = container.detach(&["/sbin/init"])?;
    let state = || Ok::<_, anyhow::Error>(task.exec(&["systemctl", "is-system-running"])?.text());
    wait_until("the system to run", host.patience(STARTS), || {
        Ok(["running\n", "degraded\n"].contains(&state()?.as_str()))
    })?;
    let failed = task.exec(&["systemctl", "--failed", "--no-legend", "--plain"])?;
    failed.succeeds()?.prints("")?;
    // A service with a limit, and its log.
    let log = "systemctl start probe; journalctl --sync; journalctl --quiet --output=cat --identifier=probe";
    task.exec(&["sh", "-c", log])?.succeeds()?.prints("hello\n67108864\n")?;
    // "Halt", as container managers ask an init of systemd for it.
    task.kill("SIGRTMIN+3")?;
    let ended = || Ok(host.task_state(task.id())?.as_deref() == Some("STOPPED"));
    wait_until("the system to halt", host.patience(STARTS), ended)?;
    task.delete()?;
    Ok(())
}

fn set_user_id(host: &Host) -> Result<()> {
    let copy = HostCopy::mount()?;
    let program = |name: &str, mode: u32| -> Result<()> {
        let place = copy.root().join("srv").join(name);
        fs::copy(copy.root().join("usr/bin").join(name), &place).with_context(|| format!("no {name}"))?;
        fs::set_permissions(&place, fs::Permissions::from_mode(mode)).context("cannot set a mode")
    };
    program("id", 0o4755)?;
    program("cat", 0o755)?;
    // CAP_DAC_OVERRIDE, permitted and effective (linux/capability.h, struct vfs_cap_data, version 2).
    let words: [u32; 5] = [0x0200_0001, 1 << 1, 0, 0, 0];
    let capability: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    setxattr(copy.root().join("srv/cat"), "security.capability", &capability, XattrFlags::empty())
        .context("cannot set a file's capability")?;
    copy.write("srv/secret", "secret\n")?;
    fs::set_permissions(copy.root().join("srv/secret"), fs::Permissions::from_mode(0o600))?;
    // setpriv keeps its capabilities until it executes a program, and a program that asks for them would have them.
    let script = "echo root:word | chpasswd; as='setpriv --reuid=65534 --regid=65534 --clear-groups'; \
                  $as /srv/id -u; $as sh -c '/srv/cat /srv/secret' || echo forbidden; \
                  echo word | $as su -c 'id -un' 2>/dev/null || echo forbidden";
    let container = || copy.as_root_of(host.container());
    let run = |container: crate::ctr::Container<'_>| container.run(&["sh", "-c", script]);
    run(container().flags(["--allow-new-privs"]))?.succeeds()?.prints("0\nsecret\nroot\n")?;
    run(container())?.succeeds()?.prints("65534\nforbidden\nforbidden\n")?;
    Ok(())
}

/// The first id outside of the user namespaces of these cases.
const FIRST: u32 = 100_000;

fn user_namespace(host: &Host) -> Result<()> {
    let volume = scratch()?;
    fs::set_permissions(volume.path(), fs::Permissions::from_mode(0o777))?;
    fs::write(volume.path().join("secret"), "")?;
    fs::set_permissions(volume.path().join("secret"), fs::Permissions::from_mode(0o600))?;
    let ids = format!("0:{FIRST}:65536");
    // A little smaller, to be told from the users.
    let groups = format!("0:{FIRST}:60000");
    let script = "id -u; tr -s ' ' < /proc/self/uid_map; tr -s ' ' < /proc/self/gid_map; \
                  touch /volume/mine /mine; stat -c %u:%g / /mine; \
                  cat /volume/secret 2>/dev/null || echo hidden; hostname inside && hostname; \
                  mkdir -p /mnt && mount -t tmpfs tmpfs /mnt && echo mounted; echo > /dev/null; \
                  ip link set lo mtu 1000; cat /sys/class/net/lo/mtu";
    let task = host
        .container()
        .flags([
            "--uidmap",
            &ids,
            "--gidmap",
            &groups,
            "--cap-add",
            "CAP_SYS_ADMIN",
            "--cap-add",
            "CAP_NET_ADMIN",
        ])
        .bind(volume.path(), "/volume", "rbind:rw")
        .detach(&["sleep", "1000"])?;
    let finished = task.exec(&["sh", "-c", script])?;
    let expected = format!(" 0 {FIRST} 65536\n 0 {FIRST} 60000");
    finished.succeeds()?.prints(&format!("0\n{expected}\n0:0\n0:0\nhidden\ninside\nmounted\n1000\n"))?;
    let owner = fs::metadata(volume.path().join("mine"))?;
    ensure!((owner.uid(), owner.gid()) == (FIRST, FIRST), "came      {owner:?}");
    task.dies()
}

/// A device that every user may open who has its node.
fn fuse() -> Device {
    let path = "/dev/fuse".to_owned();
    Device { container_path: path.clone(), host_path: path, permissions: "rwm".into() }
}

fn users_of_pod(host: &Host) -> Result<()> {
    let volume = scratch()?;
    fs::set_permissions(volume.path(), fs::Permissions::from_mode(0o777))?;
    let pod = Pod::plan(host).users_from(FIRST).start()?;
    let containers: Vec<_> = (0..2)
        .map(|_| {
            let container = pod.container().mount(volume.path(), "/volume");
            container.config(|config| config.devices.push(fuse())).start(&["sleep", "1000"])
        })
        .collect::<Result<_>>()?;
    let namespace = "readlink /proc/self/ns/user";
    for (number, container) in containers.iter().enumerate() {
        let script = format!(
            "id -u; tr -s ' ' < /proc/self/uid_map; echo text > /volume/{number} && echo text > /{number}; \
             stat -c %u:%g / /{number} /volume/{number}; hostname > /dev/null && echo one > /dev/shm/{number}; \
             ls /dev/shm; : <> /dev/fuse && echo fuse"
        );
        let shared = if number == 0 { "0" } else { "0\n1" };
        let expected = format!("0\n 0 {FIRST} 65536\n0:0\n0:0\n0:0\n{shared}\nfuse\n");
        container.exec(&["sh", "-c", &script])?.succeeds()?.prints(&expected)?;
        let owner = fs::metadata(volume.path().join(number.to_string()))?;
        ensure!((owner.uid(), owner.gid()) == (FIRST, FIRST), "came      {owner:?}");
    }
    let first = containers[0].exec(&["sh", "-c", namespace])?.text();
    containers[1].exec(&["sh", "-c", namespace])?.prints(&first)?;
    drop(containers);
    pod.remove()
}

fn overlay(host: &Host) -> Result<()> {
    let volume = on_disk()?;
    let script = |commands: &str| format!("set -e\n{}\n{commands}", include_str!("nested/overlay.sh"));
    let container = || host.container().flags(["--privileged"]).bind(volume.path(), "/volume", "rbind:rw");
    let listing = include_str!("nested/overlay.txt");
    let commands = "make_lower; mount_overlay; change; list; umount /m; mount_overlay; list";
    let finished = container().run(&["sh", "-c", &script(commands)])?;
    finished.succeeds()?.prints(&listing.repeat(2))?;
    // Another container, and so another VM, finds the same in the volume.
    container().run(&["sh", "-c", &script("mount_overlay; list")])?.succeeds()?.prints(listing)?;
    let whiteout = fs::symlink_metadata(volume.path().join("upper/removed"))?;
    ensure!(whiteout.file_type().is_char_device() && whiteout.rdev() == 0, "came      {whiteout:?}");
    Ok(())
}

/// The programs of the host, and what they need, as bind mounts for a container of the tests' image.
pub(super) const PROGRAMS: [(&str, &str); 5] = [
    ("/usr", "/usr"),
    ("/usr/sbin", "/sbin"),
    ("/usr/lib", "/lib"),
    ("/usr/lib64", "/lib64"),
    // iptables is a link there.
    ("/etc/alternatives", "/etc/alternatives"),
];

fn runc_in_a_container(host: &Host) -> Result<()> {
    let volume = on_disk()?;
    let container = host.container().flags(["--privileged"]).bind(volume.path(), "/volume", "rbind:rw");
    let container = PROGRAMS
        .iter()
        .fold(container, |container, (source, place)| container.bind(Path::new(source), place, "rbind:ro"));
    let script = include_str!("nested/runc.sh");
    let finished = container.run(&["/usr/bin/unshare", "--cgroup", "--mount", "/bin/sh", "-c", script])?;
    let output = "hello\n/bin/busybox /bin/cat /bin/echo /bin/rm /bin/sh\n0::/\n";
    finished.succeeds()?.prints(output)?;
    Ok(())
}

fn docker_in_a_container(host: &Host) -> Result<()> {
    let programs = PROGRAMS.map(|(source, place)| format!("--volume={source}:{place}:ro"));
    let outer = Client::of(host)?
        .container()
        .flags([
            "--privileged",
            "--volume",
            "/var/lib/docker",
            "--env",
            "DOCKER_HOST=unix:///run/docker.sock",
        ])
        .flags(programs.iter().map(String::as_str))
        .detach(&["sh", "-c", include_str!("nested/docker.sh")])?;
    let sh = |script: &str| outer.exec(&["sh", "-c", script]);
    let started =
        sh("until [ -S /run/docker.sock ]; do sleep 0.1; done; docker info --format '{{.Driver}}'")?;
    started.succeeds()?.prints("overlay2\n")?;
    sh("tar -c -C / bin/busybox | docker import - small")?.succeeds()?;
    let inner = "docker run --rm small /bin/busybox sh -c 'busybox echo hello > /file; busybox cat /file; \
                 busybox ping -c 1 -W 20 172.17.0.1 > /dev/null && busybox echo reached'";
    sh(inner)?.succeeds()?.prints("hello\nreached\n")?;
    sh(include_str!("nested/build.sh"))?.succeeds()?.prints("hello\nbuilt\n")?;
    Ok(())
}

fn trusted_attributes(host: &Host) -> Result<()> {
    let (copy, volume) = (HostCopy::mount()?, on_disk()?);
    // The name on the host, where Bulkhead may not set attributes that are trusted there. runc has no such name.
    let on_host = match host.runtime() {
        Runtime::Runc => "trusted.overlay.opaque",
        Runtime::Bulkhead => "user.bulkhead.trusted.overlay.opaque",
    };
    copy.write("srv/try.py", include_str!("nested/trusted.py"))?;
    let container = copy.as_root_of(host.container()).flags(["--privileged"]);
    let container = container.bind(volume.path(), "/volume", "rbind:rw");
    let finished = container.run(&["python3", "/srv/try.py", "/volume/dir", on_host])?;
    let expected = "root set: done\nroot get: b'y'\nroot list: ['trusted.overlay.opaque']\n\
                    user set: EPERM\nuser get: ENODATA\nuser remove: EPERM\n\
                    user set by the host's name: EPERM\nuser get by the host's name: ENODATA\n\
                    user remove by the host's name: EPERM\n\
                    root get: b'y'\n";
    finished.succeeds()?.prints(expected)?;
    let mut value = [0; 8];
    let len = getxattr(volume.path().join("dir"), on_host, &mut value[..])?;
    ensure!(value[..len] == *b"y", "came      {:?}", &value[..len]);
    Ok(())
}

fn id_mapped_volume(host: &Host) -> Result<()> {
    let volume = scratch()?;
    let ids = json!([{ "containerID": 0, "hostID": FIRST, "size": 65536 }]);
    fs::write(volume.path().join("theirs"), "")?;
    std::os::unix::fs::chown(volume.path().join("theirs"), Some(1000), Some(1001))?;
    let mount = json!({
        "destination": "/volume", "type": "bind", "source": volume.path(), "options": ["rbind", "rw"],
        "uidMappings": ids, "gidMappings": ids,
    });
    // Not in a user namespace: it sees the ids that they are mapped to.
    let script = "stat -c %u:%g /volume /volume/theirs; chown 105000:105001 /volume/theirs; \
                  touch /volume/mine 2>/dev/null || echo no such user";
    let spec = Spec::of(host, &["sh", "-c", script])?.with_mount(mount)?;
    let expected = format!("{FIRST}:{FIRST}\n101000:101001\nno such user\n");
    spec.run(host.container())?.succeeds()?.prints(&expected)?;
    let owner = fs::metadata(volume.path().join("theirs"))?;
    ensure!((owner.uid(), owner.gid()) == (5000, 5001), "came      {owner:?}");
    Ok(())
}

fn time_namespace(host: &Host) -> Result<()> {
    const DAYS: u64 = 100 * 24 * 3600;
    let namespaces = ["pid", "ipc", "uts", "mount", "network", "time"].map(|kind| json!({ "type": kind }));
    let spec = Spec::of(host, &["cut", "-d.", "-f1", "/proc/uptime"])?
        .with("/linux", "namespaces", json!(namespaces))?
        .with(
            "/linux",
            "timeOffsets",
            json!({ "boottime": { "secs": DAYS }, "monotonic": { "secs": DAYS } }),
        )?;
    let finished = spec.run(host.container())?;
    let uptime: u64 = finished.succeeds()?.text().trim().parse().context("no number")?;
    finished.check("a hundred days and a little", (DAYS..DAYS + 24 * 3600).contains(&uptime))?;
    Ok(())
}
