//! The start of a VM. A cold boot, by our VMM and by QEMU's microvm machine: the same kernel, initramfs, command line,
//! devices, transport and size, up to the connection by which the agent in the guest says that it is ready. And a clone
//! of one that was saved then, up to the agent's answer to a request.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, IntoRawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use bulkhead_vmm_api::{API_VERSION, ControlRequest, RUNNING, Transport, VmConfig};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use tempfile::TempDir;
use vsock::{VMADDR_CID_ANY, VsockListener};

use crate::agent::{READY_PORT, RPC_PORT, SERVICE};
use crate::fixtures::scratch;
use crate::probe::{Bits, elf};

/// Shape of the VMs: the shim's default.
pub(super) const VCPUS: u8 = 1;
pub(super) const MEMORY_MIB: u32 = 256;

pub(crate) const QEMU: &str = "qemu-system-x86_64";
const VMM: &str = "/usr/lib/bulkhead/bulkhead-vmm";
pub(crate) const KERNEL: &str = "/usr/lib/bulkhead/vmlinux";
/// The one that ours is compared with: `cargo xtask bench` brings it along.
pub(super) const ORDINARY_KERNEL: &str = "/usr/lib/bulkhead/tests/vmlinux-ordinary";
const INITRAMFS: &str = "/usr/lib/bulkhead/initramfs.cpio";

/// The words that our VMM gives a guest without a console, apart from those that name devices, plug memory or track
/// connections, and with `quiet` where ours keeps the guest's last words: these machines have no port for them.
const KERNEL_ARGS: &str = "reboot=k panic=-1 tsc=reliable swiotlb=noforce percpu_alloc=page noreplace-smp quiet \
                           8250.nr_uarts=0 pci=off";

/// A VM that is not ready after this time does not come up.
const LIMIT_MS: u16 = 60_000;

/// Where a VM's VMM complains, in its directory.
const LOG: &str = "stderr";

/// A directory, which cannot be executed.
const NO_INIT: &str = "rdinit=/dev";
/// A kernel that resets its VM: mov al, 0xfe; out 0x64, al; hlt.
const RESETS: &[u8] = &[0xb0, 0xfe, 0xe6, 0x64, 0xf4];

/// A VM that was saved when its agent was ready, in this directory.
pub(super) struct Saved(TempDir);

impl Saved {
    /// Boots one and saves it.
    pub(super) fn make() -> Result<Self> {
        let saved = Self(scratch()?);
        let save_to = Some(saved.0.path().to_owned());
        Vm::boot(VmConfig { save_to, transport: Transport::default(), ..config() })?.save()?;
        Ok(saved)
    }
}

/// Of our VMs. Relative paths are in a directory of each. They have the transport that microvm's devices have, so that
/// a boot differs from QEMU's by the VMM alone. Nothing else is compared with a clone, which has what a pod has.
fn config() -> VmConfig {
    VmConfig {
        api_version: API_VERSION,
        kernel: KERNEL.into(),
        initramfs: INITRAMFS.into(),
        kernel_args: Vec::new(),
        vcpus: VCPUS,
        memory_mib: MEMORY_MIB,
        max_memory_mib: None,
        hugepages: false,
        console: None,
        control: "control.sock".into(),
        vsock: "vsock.sock".into(),
        shares: Vec::new(),
        netns: None,
        nics: Vec::new(),
        cgroup_procs: Vec::new(),
        transport: Transport::Mmio,
        save_to: None,
        restore_from: None,
    }
}

/// Our VMM, to be started in this directory.
fn vmm(directory: &TempDir, config: &VmConfig) -> Result<Command> {
    let file = directory.path().join("vmm.json");
    fs::write(&file, serde_json::to_vec(config)?)
        .with_context(|| format!("cannot write {}", file.display()))?;
    let mut command = Command::new(VMM);
    command.args(["--config", "vmm.json"]);
    Ok(command)
}

/// A VM whose agent is ready. Dropping it ends it.
pub(super) struct Vm {
    child: Child,
    took: Duration,
    directory: TempDir,
}

impl Vm {
    /// Boots with our VMM.
    pub(super) fn bulkhead() -> Result<Vm> {
        Self::boot(config())
    }

    /// Boots an ordinary kernel with our VMM.
    pub(super) fn of_ordinary_kernel() -> Result<Vm> {
        Self::boot(VmConfig { kernel: ORDINARY_KERNEL.into(), ..config() })
    }

    /// How long a kernel takes for itself: to be loaded, and to come to where it would execute its init. It finds none
    /// that can be, panics and so ends the VM. What the VMM takes for any kernel is left out.
    pub(super) fn kernel_alone(kernel: &str) -> Result<Duration> {
        let whole = Self::end_of(kernel.into())?;
        let directory = scratch()?;
        let none = directory.path().join("none");
        fs::write(&none, elf(Bits::B64, RESETS)).context("cannot write a kernel that ends at once")?;
        Ok(whole.saturating_sub(Self::end_of(none)?))
    }

    /// From the spawn of the VMM to its end, of a VM without an init.
    fn end_of(kernel: PathBuf) -> Result<Duration> {
        let directory = scratch()?;
        let config = VmConfig { kernel, kernel_args: vec![NO_INIT.into()], ..config() };
        let (mut vm, started) = Self::spawn(vmm(&directory, &config)?, directory)?;
        let status = vm.child.wait().context("cannot wait for the VMM")?;
        vm.took = started.elapsed();
        ensure!(status.success(), "expected  a kernel that ends\ncame      {}", vm.evidence());
        Ok(vm.took)
    }

    fn boot(config: VmConfig) -> Result<Vm> {
        let directory = scratch()?;
        let command = vmm(&directory, &config)?;
        let ready = directory.path().join(format!("vsock.sock_{READY_PORT}"));
        let listener = UnixListener::bind(&ready).context("cannot listen for the guest")?;
        Vm::start(command, directory, &listener, || Ok(listener.accept()?.0))
    }

    /// Starts a clone.
    pub(super) fn clone_of(saved: &Saved) -> Result<Vm> {
        let directory = scratch()?;
        let restore_from = Some(saved.0.path().to_owned());
        let config = VmConfig { restore_from, transport: Transport::default(), ..config() };
        let (mut vm, started) = Self::spawn(vmm(&directory, &config)?, directory)?;
        let stdout = vm.child.stdout.take().context("the VMM's output")?;
        let mut word = String::new();
        BufReader::new(stdout).read_line(&mut word).context("the VMM says nothing")?;
        ensure!(word.trim() == RUNNING, "the VMM says {word:?}: {}", vm.evidence());
        vm.ask()?;
        vm.took = started.elapsed();
        Ok(vm)
    }

    /// Has the agent answer: nothing has told it yet that there is a pod, and so it says.
    fn ask(&self) -> Result<()> {
        let mut stream = UnixStream::connect(self.directory.path().join("vsock.sock"))
            .context("cannot reach the guest")?;
        writeln!(stream, "CONNECT {RPC_PORT}").context("cannot reach the agent")?;
        let mut byte = [0];
        while byte != *b"\n" {
            stream.read_exact(&mut byte).context("the agent's port refuses")?;
        }
        let client = ttrpc::Client::new(stream.into_raw_fd()).context("no client for the agent")?;
        let request = ttrpc::Request {
            service: SERVICE.into(),
            method: "ListPids".into(),
            timeout_nano: i64::from(LIMIT_MS) * 1_000_000,
            ..Default::default()
        };
        match client.request(request) {
            Err(ttrpc::Error::RpcStatus(status)) if status.code() == ttrpc::Code::FAILED_PRECONDITION => {
                Ok(())
            }
            other => bail!("expected  an agent that waits for its pod\ncame      {other:?}"),
        }
    }

    /// Saves the VM, which ends.
    fn save(mut self) -> Result<()> {
        let mut control = UnixStream::connect(self.directory.path().join("control.sock"))
            .context("the VMM has no control socket")?;
        writeln!(control, "{}", serde_json::to_string(&ControlRequest::Save)?)
            .context("cannot ask for a save")?;
        let status = self.child.wait().context("cannot wait for the VMM")?;
        ensure!(status.success(), "the VM was not saved: {}", self.evidence());
        Ok(())
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
            // Without swap space for it, as with our VMM: `Footprint` knows a guest's memory by that.
            .args(["-object", &format!("memory-backend-ram,id=ram,size={MEMORY_MIB}M,reserve=off")])
            .args(["-machine", "memory-backend=ram"])
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

    /// Spawns a VMM in `directory`, where its errors go too: the VM, which an error ends from here on, and when it was
    /// started.
    fn spawn(mut command: Command, directory: TempDir) -> Result<(Vm, Instant)> {
        let errors = File::create(directory.path().join(LOG)).context("cannot make a log")?;
        command.current_dir(&directory).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(errors);
        let started = Instant::now();
        let child = command.spawn().with_context(|| format!("cannot start {command:?}"))?;
        Ok((Vm { child, took: Duration::ZERO, directory }, started))
    }

    /// Spawns a VMM and waits for its guest to connect and to say its 4 bytes.
    fn start<S: Read>(
        command: Command,
        directory: TempDir,
        listener: &impl AsFd,
        accept: impl FnOnce() -> Result<S>,
    ) -> Result<Vm> {
        let program = command.get_program().to_owned();
        let (mut vm, started) = Self::spawn(command, directory)?;
        let mut events = [PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
        if poll(&mut events, PollTimeout::from(LIMIT_MS)).context("cannot wait for the guest")? == 0 {
            bail!("no word from the guest of {program:?}: {}", vm.evidence());
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

    fn evidence(&mut self) -> String {
        let state = match self.child.try_wait() {
            Ok(Some(status)) => format!("it ended, {status}"),
            _ => "it still runs".to_owned(),
        };
        let log = fs::read_to_string(self.directory.path().join(LOG)).unwrap_or_default();
        format!("{state}: {}", log.trim())
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        // Fails only if it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
