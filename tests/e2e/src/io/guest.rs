//! A guest of QEMU with the kernel of Bulkhead's guests, without containerd. Debian's virtiofsd serves its root and its
//! volume. Whatever is not named here is what QEMU and virtiofsd do by default.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::thread::available_parallelism;
use std::time::Duration;

use anyhow::{Context, Result};
use tempfile::TempDir;

use super::side::Place;
use crate::bench::boot::{KERNEL, QEMU};
use crate::cases::programs::PATH;
use crate::command::{Cmd, Running, wait_until};
use crate::fixtures::scratch;
use crate::network::{Bridge, GATEWAY, MTU, Namespace, Tap, address, ip, mac};

/// `cargo xtask bench io` brings it along: the host has QEMU, and not this.
const VIRTIOFSD: &str = "/usr/lib/bulkhead/tests/virtiofsd";
/// The init of the guest, below two lines that this module writes.
const INIT: &str = include_str!("guest.sh");
/// What it says last.
const READY: &str = "the worker starts";

/// A panic ends the VM. The words after that are those of Bulkhead's VMM that do not name devices.
const KERNEL_ARGS: &str = "console=ttyS0 quiet root=root rootfstype=virtiofs rw init=/srv/guest reboot=t panic=-1 \
                           tsc=reliable swiotlb=noforce percpu_alloc=page noreplace-smp";

/// A guest that runs. Fields are dropped in this order.
pub(super) struct Guest {
    qemu: Running,
    _servers: [Running; 2],
    _network: (Namespace, Tap),
    _sockets: TempDir,
}

impl Guest {
    /// The block volume, as its programs name it.
    pub(super) const DISK: &str = "/dev/vda";

    /// Boots it. Its worker will connect to this port of the host.
    pub(super) fn boot(
        place: &Place,
        bridge: &Bridge,
        memory_mib: u64,
        port: u16,
        limit: Duration,
    ) -> Result<Self> {
        let init = format!(
            "#!/bin/sh\nexport {PATH}\nGATEWAY={GATEWAY} PORT={port} MTU={MTU} ADDRESS={}\n{INIT}\necho {READY}\n\
             exec python3 /srv/worker.py $GATEWAY $PORT\n",
            address(place.number)
        );
        place.image.write("srv/guest", init.as_bytes())?;
        fs::set_permissions(place.image.layer().join("srv/guest"), Permissions::from_mode(0o755))?;
        fs::create_dir(place.image.layer().join("data")).context("cannot make a place for the volume")?;
        let root = place.image.mount()?;
        let sockets = scratch()?;
        let at = |name: &str| sockets.path().join(name);
        let servers = [virtiofsd(&at("root"), &root)?, virtiofsd(&at("data"), place.volume.path())?];
        let (namespace, tap) = pod_network(bridge, place.number)?;
        let vcpus = available_parallelism()?;
        let qemu = Cmd::new("ip")
            .args(["netns", "exec", namespace.name(), QEMU])
            .args(["-M", "microvm,acpi=off,pit=off,pic=off,rtc=off,x-option-roms=off,memory-backend=memory"])
            .args(["-accel", "kvm", "-cpu", "host", "-nodefaults", "-no-user-config", "-display", "none"])
            .args(["-no-reboot", "-smp", &vcpus.to_string(), "-m", &format!("{memory_mib}M")])
            // Servers of vhost-user map the memory too.
            .args(["-object", &format!("memory-backend-memfd,id=memory,size={memory_mib}M,share=on")])
            // The driver of virtio-fs takes no legacy device.
            .args(["-global", "virtio-mmio.force-legacy=false", "-serial", "stdio"])
            .args(["-kernel", KERNEL, "-append", KERNEL_ARGS, "-device", "virtio-rng-device"])
            .args(share("root", &at("root")))
            .args(share("data", &at("data")))
            .args(["-netdev", &format!("tap,id=net,ifname={},script=no,downscript=no", tap.name())])
            .args(["-device", &format!("virtio-net-device,netdev=net,mac={}", mac(place.number))])
            .args(["-drive", &format!("if=none,id=disk,format=raw,file={}", place.disk.path())])
            .args(["-device", "virtio-blk-device,drive=disk"])
            .limit(limit)
            .start()?;
        let guest = Self { qemu, _servers: servers, _network: (namespace, tap), _sockets: sockets };
        guest.qemu.wait_for(READY)?;
        Ok(guest)
    }

    /// QEMU's process.
    pub(super) fn pid(&self) -> u32 {
        self.qemu.pid()
    }

    /// A fact for the page.
    pub(super) fn shape(memory_mib: u64) -> Result<String> {
        Ok(format!("{} vCPU, {memory_mib} MiB", available_parallelism()?))
    }

    /// A fact for the page.
    pub(super) fn virtiofsd_version() -> Result<String> {
        Ok(Cmd::new(VIRTIOFSD).args(["--version"]).run()?.succeeds()?.text().trim().to_owned())
    }
}

/// A network namespace as a CNI plugin makes it, with an interface on the bridge and QEMU's tap device. Packets go from
/// one to the other as they do for Bulkhead.
fn pod_network(bridge: &Bridge, number: u8) -> Result<(Namespace, Tap)> {
    let (namespace, tap) = (bridge.namespace(number)?, bridge.tap()?);
    let (netns, name) = (namespace.name(), tap.name());
    ip(&format!("link set {name} nomaster netns {netns}"))?;
    ip(&format!("-n {netns} link set {name} up"))?;
    for (from, to) in [(name, "eth0"), ("eth0", name)] {
        let tc = |words: &str| {
            Cmd::new("tc").args(["-n", netns]).args(words.split_whitespace()).run()?.succeeds().map(drop)
        };
        tc(&format!("qdisc add dev {from} ingress"))?;
        let all = "protocol all u32 match u8 0 0";
        tc(&format!("filter add dev {from} parent ffff: {all} action mirred egress redirect dev {to}"))?;
    }
    Ok((namespace, tap))
}

/// Serves a directory, for one connection to this socket.
fn virtiofsd(socket: &Path, directory: &Path) -> Result<Running> {
    let argument = |name: &str, path: &Path| format!("--{name}={}", path.display());
    let server = Cmd::new(VIRTIOFSD)
        .args([argument("socket-path", socket), argument("shared-dir", directory)])
        .start()?;
    wait_until("virtiofsd listens", Duration::from_secs(30), || Ok(socket.exists()))?;
    Ok(server)
}

/// The arguments for a directory that is served at this socket.
fn share(tag: &str, socket: &Path) -> [String; 4] {
    [
        "-chardev".into(),
        format!("socket,id={tag},path={}", socket.display()),
        "-device".into(),
        format!("vhost-user-fs-device,chardev={tag},tag={tag}"),
    ]
}
