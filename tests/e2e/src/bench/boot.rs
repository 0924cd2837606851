//! The cold boot of a VM, by our VMM and by QEMU's microvm machine: the same kernel, initramfs, command line, devices
//! and size, up to the connection by which the agent in the guest says that it is ready.

use std::fs::{self, File};
use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use bulkhead_vmm_api::{API_VERSION, VmConfig};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use tempfile::TempDir;
use vsock::{VMADDR_CID_ANY, VsockListener};

use crate::fixtures::scratch;

/// Shape of the VMs: the shim's default.
pub(super) const VCPUS: u8 = 1;
pub(super) const MEMORY_MIB: u32 = 256;

pub(super) const QEMU: &str = "qemu-system-x86_64";
const VMM: &str = "/usr/lib/bulkhead/bulkhead-vmm";
const KERNEL: &str = "/usr/lib/bulkhead/vmlinux";
const INITRAMFS: &str = "/usr/lib/bulkhead/initramfs.cpio";

/// The agent's port of the host: READY_PORT of the agent's interface, whose crate needs a code generator.
const READY_PORT: u32 = 1026;

/// The words that our VMM gives a guest without a console, apart from those that name devices.
const KERNEL_ARGS: &str = "reboot=k panic=-1 tsc=reliable quiet 8250.nr_uarts=0";

/// A VM that is not ready after this time does not come up.
const LIMIT_MS: u16 = 60_000;

/// A VM whose agent is ready. Dropping it ends it.
pub(super) struct Vm {
    child: Child,
    took: Duration,
    _directory: TempDir,
}

impl Vm {
    /// Boots with our VMM.
    pub(super) fn bulkhead() -> Result<Vm> {
        let directory = scratch()?;
        let config = VmConfig {
            api_version: API_VERSION,
            kernel: KERNEL.into(),
            initramfs: INITRAMFS.into(),
            kernel_args: Vec::new(),
            vcpus: VCPUS,
            memory_mib: MEMORY_MIB,
            console: None,
            control: "control.sock".into(),
            vsock: "vsock.sock".into(),
            shares: Vec::new(),
            netns: None,
            nics: Vec::new(),
            cgroup_procs: Vec::new(),
            save_to: None,
            restore_from: None,
        };
        let file = directory.path().join("vmm.json");
        fs::write(&file, serde_json::to_vec(&config)?)
            .with_context(|| format!("cannot write {}", file.display()))?;
        let ready = directory.path().join(format!("vsock.sock_{READY_PORT}"));
        let listener = UnixListener::bind(&ready).context("cannot listen for the guest")?;
        let mut command = Command::new(VMM);
        command.args(["--config", "vmm.json"]);
        Vm::start(command, directory, &listener, || Ok(listener.accept()?.0))
    }

    /// Boots with QEMU's microvm machine, with everything left out of it that our kernel does without.
    pub(super) fn qemu() -> Result<Vm> {
        let listener = VsockListener::bind_with_cid_port(VMADDR_CID_ANY, READY_PORT)
            .context("cannot listen on vsock")?;
        // Unlike our VMM's, the address of this guest is the host's only one of the kind.
        let cid = 0x4000_0000 | std::process::id();
        let mut command = Command::new(QEMU);
        command
            .args(["-M", "microvm,acpi=off,pit=off,pic=off,rtc=off,isa-serial=off,x-option-roms=off"])
            .args(["-accel", "kvm", "-cpu", "host", "-nodefaults", "-no-user-config", "-display", "none"])
            .args(["-no-reboot", "-smp", &VCPUS.to_string(), "-m", &format!("{MEMORY_MIB}M")])
            .args(["-kernel", KERNEL, "-initrd", INITRAMFS, "-append", KERNEL_ARGS])
            .args([
                "-device",
                &format!("vhost-vsock-device,guest-cid={cid}"),
                "-device",
                "virtio-rng-device",
            ]);
        Vm::start(command, scratch()?, &listener, || Ok(listener.accept()?.0))
    }

    /// Spawns a VMM and waits for its guest to connect and to say its 4 bytes.
    fn start<S: Read>(
        mut command: Command,
        directory: TempDir,
        listener: &impl AsFd,
        accept: impl FnOnce() -> Result<S>,
    ) -> Result<Vm> {
        let log = directory.path().join("stderr");
        let errors = File::create(&log).context("cannot make a log")?;
        command.current_dir(&directory).stdin(Stdio::null()).stdout(Stdio::null()).stderr(errors);
        let started = Instant::now();
        let child = command.spawn().with_context(|| format!("cannot start {command:?}"))?;
        // From here on an error ends the VM.
        let mut vm = Vm { child, took: Duration::ZERO, _directory: directory };
        let mut events = [PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
        if poll(&mut events, PollTimeout::from(LIMIT_MS)).context("cannot wait for the guest")? == 0 {
            bail!("no word from the guest of {command:?}: {}", vm.evidence(&log));
        }
        let mut word = [0; 4];
        accept()?.read_exact(&mut word).context("the guest says too little")?;
        vm.took = started.elapsed();
        ensure!(u32::from_le_bytes(word) != 0, "the guest's agent has no version");
        Ok(vm)
    }

    /// From the spawn of the VMM to the agent's word.
    pub(super) fn took(&self) -> Duration {
        self.took
    }

    /// The VMM's process.
    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    fn evidence(&mut self, log: &Path) -> String {
        let state = match self.child.try_wait() {
            Ok(Some(status)) => format!("it ended, {status}"),
            _ => "it still runs".to_owned(),
        };
        format!("{state}: {}", fs::read_to_string(log).unwrap_or_default().trim())
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        // Fails only if it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
