//! A VM in two files of a directory: its memory, and the state of all else.
//!
//! It is saved when it has done all that any VM of its shape does first, and restored as often as one is needed. It is
//! restored only as what it was: by the same VMM, of the same kernel and initramfs, on a processor that looks the same,
//! with the same devices. Anything else is refused with the reason.

use std::{
    fs::{File, OpenOptions},
    io::{self, BufWriter, Read, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use bulkhead_vmm_api::{MEMORY_FILE, PartError, STATE_FILE, Shape, VmConfig};
use kvm_bindings::kvm_cpuid_entry2;
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use serde::{Deserialize, Serialize};

use self::{machine::MachineState, vcpu::VcpuState};
use crate::{
    GuestMemory,
    arch::cpuid,
    memory::{self, Extent, MemoryError, Size},
    virtio::mmio::{MmioTransport, TransportState},
};

mod machine;
mod vcpu;

/// Changes with the meaning of what is written.
pub const FORMAT: u32 = 2;
/// Bytes of the longest [`STATE_FILE`] that is read: a few times what 255 vCPUs take, and some million extents.
const LONGEST_STATE: u64 = 64 << 20;
/// The VMM's own program.
const PROGRAM: &str = "/proc/self/exe";

/// What KVM did not give or take.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    #[error("KVM does not give or take a VM's {what}")]
    Kvm { what: &'static str, source: kvm_ioctls::Error },
    #[error("KVM does not take a vCPU's MSR {index:#x}")]
    Msr { index: u32 },
    #[error("a vCPU has more {what} than KVM takes at once")]
    Many { what: &'static str },
}

fn refused(what: &'static str) -> impl Fn(kvm_ioctls::Error) -> StateError {
    move |source| StateError::Kvm { what, source }
}

/// Why a VM could not be saved.
#[derive(Debug, thiserror::Error)]
pub enum SaveError {
    #[error("save_to: cannot make {path}")]
    Create { path: PathBuf, source: io::Error },
    #[error("save_to: cannot tell which {path} the VM is made of")]
    Part { path: PathBuf, source: io::Error },
    #[error("save_to: the virtio device {index} does not stop")]
    Device { index: usize, source: io::Error },
    #[error("save_to: cannot write the VM's {what}")]
    Write { what: &'static str, source: io::Error },
    #[error("save_to")]
    State(#[from] StateError),
}

/// Why a VM could not be restored.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    #[error("restore_from: cannot read {path}")]
    Read { path: PathBuf, source: io::Error },
    #[error("restore_from: {path} is damaged")]
    Damaged { path: PathBuf, source: serde_json::Error },
    #[error("restore_from: the VM was saved in format {found}, this VMM knows {FORMAT}")]
    Format { found: u32 },
    #[error("restore_from: the VM was saved with another {path} than there is now")]
    Part { path: PathBuf },
    #[error("restore_from: the VM was saved with {saved} {what}, and is to have {wanted}")]
    Shape { what: &'static str, saved: usize, wanted: usize },
    #[error("restore_from: the VM was saved with other kernel_args")]
    KernelArgs,
    #[error("restore_from: the VM was saved on a host whose KVM or processor has other features")]
    Processor,
    #[error(
        "restore_from: the VM was saved on a host whose time stamp counter runs at {saved} kHz, here at {here}"
    )]
    Frequency { saved: u32, here: u32 },
    #[error("restore_from: the virtio device {index} is not the one that was saved")]
    Device { index: usize, source: io::Error },
    #[error("restore_from")]
    Memory(#[from] MemoryError),
    #[error("restore_from")]
    State(#[from] StateError),
}

/// Why a VM that was saved as `saved` cannot become `wanted`.
fn check(saved: &Shape, wanted: &Shape) -> Result<(), RestoreError> {
    if let Some((_, other)) = saved.parts.iter().zip(&wanted.parts).find(|(saved, now)| saved != now) {
        return Err(RestoreError::Part { path: other.path.clone() });
    }
    let max_mib = |shape: &Shape| Size::new(shape.memory_mib, shape.max_memory_mib).max_mib as usize;
    let numbers = [
        ("vCPUs", usize::from(saved.vcpus), usize::from(wanted.vcpus)),
        ("MiB of memory", saved.memory_mib as usize, wanted.memory_mib as usize),
        ("MiB of memory at most", max_mib(saved), max_mib(wanted)),
    ];
    if let Some((what, saved, wanted)) = numbers.into_iter().find(|(_, saved, wanted)| saved != wanted) {
        return Err(RestoreError::Shape { what, saved, wanted });
    }
    if saved.kernel_args == wanted.kernel_args { Ok(()) } else { Err(RestoreError::KernelArgs) }
}

/// What is in [`STATE_FILE`].
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct State {
    format: u32,
    shape: Shape,
    machine: MachineState,
    vcpus: Vec<VcpuState>,
    /// In the order of their places.
    devices: Vec<TransportState>,
    memory: Vec<Extent>,
}

/// Only this of it is looked at to tell whether the rest can be understood.
#[derive(Deserialize)]
struct Header {
    format: u32,
}

/// Where a VM is to be saved: made before the VMM is in its jail, where it makes no file.
pub struct Saver {
    memory: File,
    state: File,
    shape: Shape,
    /// What KVM may tell of a vCPU.
    msrs: Vec<u32>,
    /// Of each vCPU.
    cpuid: Vec<Vec<kvm_cpuid_entry2>>,
}

/// A VM whose vCPUs have stopped.
pub struct Stopped<'v> {
    pub vcpus: &'v [VcpuFd],
    pub fd: &'v VmFd,
    pub memory: &'v GuestMemory,
    /// In the order of their places.
    pub devices: &'v [Arc<MmioTransport>],
}

impl Saver {
    /// Makes the files in `dir`.
    pub fn new(dir: &Path, config: &VmConfig, kvm: &Kvm) -> Result<Self, SaveError> {
        let shape = Shape::of(config, Path::new(PROGRAM))
            .map_err(|PartError { path, source }| SaveError::Part { path, source })?;
        Ok(Self {
            memory: create(dir.join(MEMORY_FILE))?,
            state: create(dir.join(STATE_FILE))?,
            shape,
            msrs: vcpu::msr_indices(kvm).map_err(refused("list of MSRs"))?,
            cpuid: Vec::new(),
        })
    }

    /// Notes what the next vCPU answers to CPUID.
    pub fn add_cpuid(&mut self, table: &[kvm_cpuid_entry2]) {
        self.cpuid.push(table.to_vec());
    }

    /// Saves the VM, whose devices stop for good. The state comes last: without it there is no saved VM.
    pub fn save(mut self, vm: &Stopped) -> Result<(), SaveError> {
        let devices = vm
            .devices
            .iter()
            .enumerate()
            .map(|(index, device)| device.save().map_err(|source| SaveError::Device { index, source }));
        let devices = devices.collect::<Result<_, _>>()?;
        let vcpus = vm.vcpus.iter().zip(self.cpuid);
        let vcpus = vcpus.map(|(vcpu, cpuid)| VcpuState::save(vcpu, cpuid, &self.msrs));
        let mut vcpus = vcpus.collect::<Result<Vec<_>, _>>()?;
        if let Some((first, others)) = vcpus.split_first_mut() {
            others.iter_mut().for_each(|other| other.take_time_of(first));
        }
        let written = |what| move |source| SaveError::Write { what, source };
        let state = State {
            format: FORMAT,
            shape: self.shape,
            machine: MachineState::save(vm.fd)?,
            vcpus,
            devices,
            memory: memory::save(vm.memory, &mut self.memory).map_err(written("memory"))?,
        };
        let mut file = BufWriter::new(self.state);
        serde_json::to_writer(&mut file, &state)
            .map_err(io::Error::from)
            .and_then(|()| file.flush())
            .map_err(written("state"))
    }
}

fn read_state(path: &Path) -> io::Result<String> {
    let file = File::open(path)?;
    if file.metadata()?.len() > LONGEST_STATE {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    let mut text = String::new();
    file.take(LONGEST_STATE).read_to_string(&mut text)?;
    Ok(text)
}

fn create(path: PathBuf) -> Result<File, SaveError> {
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
    file.map_err(|source| SaveError::Create { path, source })
}

/// A saved VM of the right shape.
pub struct Saved {
    state: State,
    memory: File,
}

impl Saved {
    /// Opens what was saved in `dir`, for a VM of `config`.
    pub fn open(dir: &Path, config: &VmConfig) -> Result<Self, RestoreError> {
        let read = |path: &Path| {
            let path = path.to_owned();
            move |source| RestoreError::Read { path, source }
        };
        let path = dir.join(STATE_FILE);
        let text = read_state(&path).map_err(read(&path))?;
        let damaged = |source| RestoreError::Damaged { path: path.clone(), source };
        let state = serde_json::from_str::<State>(&text);
        let found = match &state {
            Ok(state) => state.format,
            // Of another format it may be as it should be.
            Err(_) => serde_json::from_str::<Header>(&text).map_err(damaged)?.format,
        };
        if found != FORMAT {
            return Err(RestoreError::Format { found });
        }
        let state = state.map_err(damaged)?;
        let shape = Shape::of(config, Path::new(PROGRAM))
            .map_err(|PartError { path, source }| RestoreError::Read { path, source })?;
        check(&state.shape, &shape)?;
        let path = dir.join(MEMORY_FILE);
        Ok(Self { state, memory: File::open(&path).map_err(read(&path))? })
    }

    /// The guest's memory.
    pub fn memory(&self) -> Result<GuestMemory, RestoreError> {
        let size = Size::new(self.state.shape.memory_mib, self.state.shape.max_memory_mib);
        Ok(memory::restore(size, &self.memory, &self.state.memory)?)
    }

    /// Makes a new vCPU what the saved one was that would otherwise answer `cpuid`.
    pub fn restore_vcpu(
        &self,
        id: u8,
        vcpu: &VcpuFd,
        cpuid: &[kvm_cpuid_entry2],
    ) -> Result<(), RestoreError> {
        let (id, count) = (usize::from(id), self.state.vcpus.len());
        let missing = RestoreError::Shape { what: "states of vCPUs", saved: count, wanted: id + 1 };
        let saved = self.state.vcpus.get(id).ok_or(missing)?;
        if cpuid::features(&saved.cpuid) != cpuid::features(cpuid) {
            return Err(RestoreError::Processor);
        }
        let here = vcpu.get_tsc_khz().map_err(refused("TSC frequency"))?;
        if saved.tsc_khz != here {
            return Err(RestoreError::Frequency { saved: saved.tsc_khz, here });
        }
        Ok(saved.restore(vcpu)?)
    }

    /// Makes what the vCPUs share in KVM what it was: after them.
    pub fn restore_machine(&self, vm: &VmFd) -> Result<(), RestoreError> {
        Ok(self.state.machine.restore(vm)?)
    }

    /// Makes the devices what they were: last, for they may interrupt the guest at once, and before it runs.
    pub fn restore_devices(&self, devices: &[Arc<MmioTransport>]) -> Result<(), RestoreError> {
        let (saved, wanted) = (self.state.devices.len(), devices.len());
        if saved != wanted {
            return Err(RestoreError::Shape { what: "devices", saved, wanted });
        }
        for (index, (device, state)) in devices.iter().zip(&self.state.devices).enumerate() {
            device.restore(state).map_err(|source| RestoreError::Device { index, source })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::{error::Error, fs};

    use bulkhead_vmm_api::API_VERSION;

    use super::*;

    /// A directory with the parts of a VM, and one in which it was saved.
    struct Host {
        dir: tempfile::TempDir,
        config: VmConfig,
    }

    impl Host {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let [kernel, initramfs] = ["kernel", "initramfs"].map(|name| {
                fs::write(dir.path().join(name), name).unwrap();
                dir.path().join(name)
            });
            let config = serde_json::json!({
                "api_version": API_VERSION, "kernel": kernel, "initramfs": initramfs, "vcpus": 1, "memory_mib": 64,
                "control": "c", "vsock": "v",
            });
            let config: VmConfig = serde_json::from_value(config).unwrap();
            let host = Self { dir, config };
            let memory = memory::allocate(Size::new(64, None), None).unwrap();
            vm_memory::Bytes::write_obj(&memory, 7u64, vm_memory::GuestAddress(0x1000)).unwrap();
            let state = State {
                format: FORMAT,
                shape: Shape::of(&host.config, Path::new(PROGRAM)).unwrap(),
                machine: MachineState::default(),
                vcpus: Vec::new(),
                devices: Vec::new(),
                memory: memory::save(&memory, &mut create(host.path(MEMORY_FILE)).unwrap()).unwrap(),
            };
            fs::write(host.path(STATE_FILE), serde_json::to_vec(&state).unwrap()).unwrap();
            host
        }

        fn path(&self, name: &str) -> PathBuf {
            self.dir.path().join(name)
        }

        fn open(&self) -> Result<Saved, RestoreError> {
            Saved::open(self.dir.path(), &self.config)
        }

        /// Why it is refused after its state was changed so.
        fn refusal(&self, change: impl FnOnce(String) -> String) -> String {
            let text = fs::read_to_string(self.path(STATE_FILE)).unwrap();
            fs::write(self.path(STATE_FILE), change(text)).unwrap();
            reason(self.open())
        }
    }

    fn reason(opened: Result<Saved, RestoreError>) -> String {
        let error = opened.err().expect("it is refused");
        match error.source() {
            Some(source) => format!("{error}: {source}"),
            None => error.to_string(),
        }
    }

    #[test]
    fn memory_is_found_again() {
        let memory = Host::new().open().unwrap().memory().unwrap();
        let word: u64 = vm_memory::Bytes::read_obj(&memory, vm_memory::GuestAddress(0x1000)).unwrap();
        assert_eq!(word, 7);
    }

    #[test]
    fn what_is_damaged_is_refused() {
        let cut = Host::new().refusal(|text| text[..text.len() / 2].to_owned());
        assert!(cut.contains("state.json is damaged: EOF"), "{cut}");
        let empty = Host::new().refusal(|_| String::new());
        assert!(empty.contains("state.json is damaged"), "{empty}");
        let of_another_time = Host::new().refusal(|text| text.replace("\"format\":2", "\"format\":9"));
        assert_eq!(of_another_time, "restore_from: the VM was saved in format 9, this VMM knows 2");
        let host = Host::new();
        fs::remove_file(host.path(STATE_FILE)).unwrap();
        assert!(reason(host.open()).contains("cannot read"));
        let host = Host::new();
        File::create(host.path(STATE_FILE)).unwrap().set_len(LONGEST_STATE + 1).unwrap();
        assert!(reason(host.open()).contains("state.json: file too large"), "{}", reason(host.open()));
        let host = Host::new();
        fs::write(host.path(MEMORY_FILE), "short").unwrap();
        let error = host.open().unwrap().memory().unwrap_err();
        assert_eq!(error.source().unwrap().to_string(), "the saved memory has 5 bytes and not 4096");
    }

    #[test]
    fn what_is_of_other_parts_or_another_shape_is_refused() {
        let host = Host::new();
        fs::write(host.path("kernel"), "a newer one").unwrap();
        assert!(reason(host.open()).contains("was saved with another /"), "{}", reason(host.open()));
        let changed = |change: fn(&mut VmConfig)| {
            let mut host = Host::new();
            change(&mut host.config);
            reason(host.open())
        };
        let expected = "restore_from: the VM was saved with 1 vCPUs, and is to have 2";
        assert_eq!(changed(|config| config.vcpus = 2), expected);
        let expected = "restore_from: the VM was saved with 64 MiB of memory, and is to have 128";
        assert_eq!(changed(|config| config.memory_mib = 128), expected);
        let expected = "restore_from: the VM was saved with other kernel_args";
        assert_eq!(changed(|config| config.kernel_args.push("debug".into())), expected);
    }

    #[test]
    fn nothing_that_was_saved_is_written_over() {
        let host = Host::new();
        let error = create(host.path(MEMORY_FILE)).unwrap_err();
        assert!(matches!(error, SaveError::Create { .. }));
    }
}
