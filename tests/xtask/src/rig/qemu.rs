//! The emulated machine that the inner host runs on.

use std::env;
use std::fs::{self, File};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use rig_runner::{PAYLOAD_DISK, PORT};
use serde_json::json;

use super::image::Image;
use super::payload::Payload;
use super::qmp::{ANSWER_LIMIT, Qmp};
use super::state::State;
use super::{Failure, in_work};
use crate::cache::Cache;
use crate::progress::tail;
use crate::tools::Tools;

const MEMORY_MIB: &str = "8192";
/// How long QEMU may take to end after it has closed the inner host's channel.
const ENDS: Duration = Duration::from_secs(5);
/// How long QEMU may take to end after it was told to, when it has yet to write out the disk.
const QUITS: Duration = Duration::from_secs(120);
const KERNEL_ARGUMENTS: &str = "root=/dev/vda rw quiet console=ttyS0 net.ifnames=0 mitigations=off nowatchdog \
                                unknown_nmi_panic panic=-1";

/// Has glibc ask for huge pages for large allocations. Whenever the inner host changes the address space, QEMU has to
/// find translated code again, in a hash table of 16 MiB. With pages of 4 KiB, a fifth of the processor time of a rig
/// was the wait for one load from this table. QEMU itself asks for huge pages for the rest that is large.
const HUGE_PAGES: &str = "glibc.malloc.hugetlb=1";

/// The variable that sets the number of processors of the inner host.
const PROCESSORS: &str = "BULKHEAD_RIG_PROCESSORS";
/// The variable that sets the model of the inner host's processor, in QEMU's words. An emulated one needs `+svm,+npt`
/// and AMD's vendor name, also if the model is Intel's: QEMU emulates SVM, and not VMX.
const MODEL: &str = "BULKHEAD_RIG_CPU";

/// What runs the inner host's instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Accelerator {
    /// This machine's KVM, which can run a stock kernel and nest.
    Kvm,
    /// Emulation, with AMD's SVM: slow, but a real KVM host to what is inside.
    Tcg,
}

impl Accelerator {
    /// What this machine can do.
    pub(crate) fn detect() -> Accelerator {
        if Accelerator::detect_kvm().is_ok() && nests() { Accelerator::Kvm } else { Accelerator::Tcg }
    }

    /// One clause about it for a person.
    pub(crate) fn describe() -> String {
        match Accelerator::detect_kvm() {
            Ok(()) if nests() => "a virtual machine under this machine's KVM".to_owned(),
            Ok(()) => "emulated, since this machine's KVM does not nest".to_owned(),
            Err(error) => format!("emulated, since {error}"),
        }
    }

    /// Fails, and says why, if this machine has no KVM that runs a stock kernel.
    pub(crate) fn detect_kvm() -> Result<()> {
        if Path::new("/sys/module/kvm_pvm").exists() {
            bail!("/dev/kvm of this machine is kvm_pvm, which does not boot a stock kernel");
        }
        File::options().read(true).write(true).open("/dev/kvm").context("cannot open /dev/kvm")?;
        Ok(())
    }

    /// QEMU's arguments for it.
    ///
    /// One emulated processor, not two. With two, each a thread of QEMU, the inner host or a guest in it crashed once
    /// in about a hundred VMs, under load far more often. Part of the cause is known: QEMU drops what it has translated
    /// of old code before it writes the new bytes, so what another processor translates in between stays in use. Linux
    /// patches `__schedule` so when its first VM is made and when its last one ends; a program that only makes and
    /// closes VMs on one processor, with two that yield on the other, brings the inner host down in a minute
    /// (`Oops: int3` in `__schedule`). Holding a VM open all the time cured that, but not the crashes of busy guests.
    ///
    /// Two processors that take turns in one thread (`thread=single`) are no better: a guest of the inner host spins
    /// for ever on a spinlock that its only vCPU has taken before, in about one of three VMs.
    ///
    /// What needs two processors can have them with [`PROCESSORS`], for a few short cases.
    pub(crate) fn arguments(self) -> Vec<String> {
        let (accelerator, model, processors) = match self {
            Accelerator::Kvm => ("kvm", "host", "2"),
            Accelerator::Tcg => ("tcg", "EPYC,+svm,+npt", "1"),
        };
        let set = |variable, default: &str| env::var(variable).unwrap_or_else(|_| default.to_owned());
        let (model, processors) = (set(MODEL, model), set(PROCESSORS, processors));
        ["-accel", accelerator, "-cpu", &model, "-smp", &processors].map(str::to_owned).into()
    }
}

/// Whether the inner host has the processors that it has unless a variable says otherwise.
pub(crate) fn has_usual_processors() -> bool {
    [PROCESSORS, MODEL].iter().all(|variable| env::var_os(variable).is_none())
}

/// Whether a guest of this machine's KVM has KVM.
fn nests() -> bool {
    ["kvm_amd", "kvm_intel"].iter().any(|module| {
        let nested = fs::read_to_string(format!("/sys/module/{module}/parameters/nested"));
        nested.is_ok_and(|nested| matches!(nested.trim(), "1" | "Y"))
    })
}

/// What a machine starts from.
#[derive(Debug, Clone, Copy)]
pub(super) enum Origin<'a> {
    /// The boot of the inner host; its disk is this qcow2 file, which is written to.
    Boot(&'a Path),
    /// The saved state; what is written to its disk goes when the machine goes.
    Saved(&'a State),
}

/// The machine's shape, which a saved state depends on: all but the files behind its devices.
pub(super) fn shape() -> Vec<String> {
    let payload = format!("virtio-blk-pci,drive=payload,serial={PAYLOAD_DISK}");
    let port = format!("virtserialport,chardev=port,name={PORT}");
    let accelerator = Accelerator::detect().arguments();
    let mut shape = vec!["-machine", "q35", "-m", MEMORY_MIB];
    shape.extend(accelerator.iter().map(String::as_str));
    shape.extend([
        "-nodefaults",
        "-no-user-config",
        "-display",
        "none",
        "-no-reboot",
        "-append",
        KERNEL_ARGUMENTS,
    ]);
    // The kernel resets the chipset's watchdog. If it stops doing so, an NMI makes it print its state and panic.
    shape.extend(["-action", "watchdog=inject-nmi"]);
    // Of 31 ports, which are the default, QEMU's main loop would look at each queue whenever it wakes up.
    shape.extend(["-device", "virtio-rng-pci", "-device", "virtio-serial-pci,max_ports=2"]);
    shape.extend(["-device", "virtio-blk-pci,drive=root", "-serial", "chardev:console", "-qmp", "stdio"]);
    shape.extend(["-device", &payload, "-device", &port]);
    shape.into_iter().map(str::to_owned).collect()
}

/// A running QEMU. It is killed when this is dropped, and when this process dies.
#[derive(Debug)]
pub(crate) struct Machine {
    child: Child,
    qmp: Qmp,
    /// The other end of the inner host's virtio-serial port.
    pub(super) channel: UnixStream,
    console_log: PathBuf,
    error_log: PathBuf,
}

/// Held while descriptors are inheritable.
static STARTING: Mutex<()> = Mutex::new(());

/// Machines that this process has started: their logs are named by it.
static NUMBER: AtomicU32 = AtomicU32::new(0);

impl Machine {
    /// Starts QEMU. The inner host is not up yet when this returns.
    pub(super) fn start(
        cache: &Cache,
        tools: &Tools,
        image: &Image,
        payload: &Payload,
        origin: Origin<'_>,
    ) -> Result<Machine, Failure> {
        // What one QEMU inherits must not be inheritable while another thread starts its own: that one would keep the
        // channel open when the first has ended.
        let starting = STARTING.lock().unwrap_or_else(PoisonError::into_inner);
        let (channel, port) = UnixStream::pair().context("cannot make a socket pair")?;
        let port = OwnedFd::from(port);
        let disk = OwnedFd::from(payload.open()?);
        inherit(&port)?;
        inherit(&disk)?;
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("rig-{}-{number}", std::process::id());
        let console_log = cache.log(&format!("{name}-console"));
        let error_log = cache.log(&name);

        let mut command = tools.command(cache.dir(), "qemu-system-x86_64");
        command.args(shape()).env("TMPDIR", "/work");
        command.env("GLIBC_TUNABLES", HUGE_PAGES);
        command.arg("-kernel").arg(in_work(cache, &image.kernel));
        command.arg("-initrd").arg(in_work(cache, &image.initramfs));
        command
            .arg("-chardev")
            .arg(format!("file,id=console,path={}", in_work(cache, &console_log).display()));
        add_root_disk(&mut command, cache, origin);
        command.arg("-add-fd").arg(format!("fd={},set=1", disk.as_raw_fd()));
        command.args(["-drive", "file=/dev/fdset/1,format=raw,if=none,id=payload,readonly=on"]);
        command.arg("-chardev").arg(format!("socket,id=port,fd={}", port.as_raw_fd()));

        let errors =
            File::create(&error_log).with_context(|| format!("cannot make {}", error_log.display()))?;
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(errors)
            .spawn()
            .context("cannot start QEMU")?;
        drop((port, disk));
        drop(starting);
        let greeted = Qmp::new(&mut child, ANSWER_LIMIT).and_then(|mut qmp| {
            if let Origin::Saved(state) = origin {
                qmp.load(&in_work(cache, &state.memory))?;
            }
            Ok(qmp)
        });
        match greeted {
            Ok(qmp) => Ok(Machine { child, qmp, channel, console_log, error_log }),
            Err(error) => {
                end(&mut child);
                Err(Failure::NotUp(error.context(format!("QEMU failed: {}", tail(&error_log)))))
            }
        }
    }

    /// Saves the machine's memory and devices in the file `memory` of the tool root, and ends it.
    pub(super) fn save(mut self, memory: &Path) -> Result<()> {
        self.qmp.save(memory)?;
        self.qmp.execute("quit", &json!({}))?;
        let status = self.end(QUITS).context("QEMU does not end")?;
        ensure!(status.success(), "QEMU ended, {status}, when it was to write out the disk");
        Ok(())
    }

    /// Where to look when the inner host fails, and how QEMU ended if it has.
    pub(super) fn evidence(&mut self) -> String {
        let ended = match self.end(ENDS) {
            Some(status) => {
                let (said, events) = (tail(&self.error_log), self.qmp.last_words());
                format!("QEMU ended, {status}: {said}; its last events: {events}; ")
            }
            None => String::new(),
        };
        let (console, errors) = (self.console_log.display(), self.error_log.display());
        format!("{ended}the inner host's console is in {console}, what QEMU said in {errors}")
    }

    /// How QEMU ended, if it has or does so within the limit: its channels close before it is gone.
    fn end(&mut self, limit: Duration) -> Option<ExitStatus> {
        let deadline = Instant::now() + limit;
        loop {
            match self.child.try_wait() {
                Ok(None) if Instant::now() < deadline => thread::sleep(Duration::from_millis(50)),
                ended => return ended.ok().flatten(),
            }
        }
    }

    /// Forgets the logs: the run went well.
    pub(super) fn discard_logs(&self) {
        for log in [&self.console_log, &self.error_log] {
            // A log that stays is no harm.
            let _ = fs::remove_file(log);
        }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        end(&mut self.child);
    }
}

fn end(child: &mut Child) {
    // Fails only if the child has ended already.
    let _ = child.kill();
    let _ = child.wait();
}

fn add_root_disk(command: &mut Command, cache: &Cache, origin: Origin<'_>) {
    let (disk, snapshot) = match origin {
        Origin::Boot(disk) => (disk, "off"),
        Origin::Saved(state) => (state.disk.as_path(), "on"),
    };
    let disk = in_work(cache, disk);
    // The disk need not survive a crash of this machine: `unsafe` leaves out the flushes.
    let options = format!("format=qcow2,if=none,id=root,cache=unsafe,snapshot={snapshot}");
    command.arg("-drive").arg(format!("file={},{options}", disk.display()));
    if matches!(origin, Origin::Saved(_)) {
        command.args(["-incoming", "defer"]);
    }
}

/// Lets the next child process have the descriptor.
fn inherit(fd: &OwnedFd) -> Result<()> {
    fcntl(fd, FcntlArg::F_SETFD(FdFlag::empty())).context("cannot make a descriptor inheritable")?;
    Ok(())
}
