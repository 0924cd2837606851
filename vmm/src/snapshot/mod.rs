//! A saved VM: a directory with two files, one for the guest's memory and one for all other state.
//!
//! A VM is saved after it has done what every VM of its configuration does first, and restored many times. It is
//! restored only in the same environment: by the same VMM, from the same kernel and initramfs, on a processor with
//! the same features, and with the same devices. Otherwise the error says what differs.

use std::{
    fs::{File, OpenOptions},
    io::{self, BufWriter, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use bulkhead_vmm_api::{MEMORY_FILE, PartError, STATE_FILE, Shape, VmConfig, WORKING_SET_FILE};
use kvm_bindings::kvm_cpuid_entry2;
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use serde::{Deserialize, Serialize};

use self::{
    error::refused, text_file::read_text, vcpu_state::VcpuState, vm_state::VmState, working_set::Pieces,
};
use crate::{
    GuestMemory,
    arch::cpuid,
    memory::Size,
    virtio::{pci_bus::PciBus, slot::Transport},
};

mod device_state;
mod error;
mod memory_file;
mod text_file;
mod vcpu_state;
mod vm_state;
mod working_set;

pub use device_state::DeviceState;
pub use error::StateError;
pub use memory_file::{Extent, SavedMemoryError, open_page_map, restore_memory, save_memory};

/// The version of the format. It changes when the meaning of the files changes.
pub const FORMAT: u32 = 4;
/// The most bytes of a [`STATE_FILE`] that are read: a few times what 255 vCPUs and some million extents take.
const LONGEST_STATE: u64 = 64 << 20;
/// The program of the VMM.
const PROGRAM: &str = "/proc/self/exe";

/// Why a VM could not be saved.
#[derive(Debug, thiserror::Error)]
pub enum SaveError {
    #[error("save_to: cannot create {path}")]
    Create { path: PathBuf, source: io::Error },
    #[error("save_to: cannot open /proc/self/pagemap")]
    PageMap(#[source] io::Error),
    #[error("save_to: cannot identify {path}, from which the VM is started")]
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
    #[error("restore_from: the VM was saved in format {found}, this VMM supports {FORMAT}")]
    Format { found: u32 },
    #[error("restore_from: {path} has changed since the VM was saved")]
    Part { path: PathBuf },
    #[error("restore_from: the VM was saved with {saved} {what}, the configuration has {wanted}")]
    Shape { what: &'static str, saved: usize, wanted: usize },
    #[error("restore_from: the VM was saved with other kernel_args")]
    KernelArgs,
    #[error("restore_from: the VM was saved with another transport")]
    Transport,
    #[error("restore_from: the saved state of the PCI bus does not fit the configuration")]
    Bus,
    #[error("restore_from: KVM does not take the interrupt messages of the saved devices")]
    Messages(#[source] io::Error),
    #[error("restore_from: the VM was saved on a host whose KVM or processor has other features")]
    Processor,
    #[error(
        "restore_from: the VM was saved on a host whose time stamp counter runs at {saved} kHz; here it runs at {here}"
    )]
    Frequency { saved: u32, here: u32 },
    #[error("restore_from: the virtio device {index} differs from the saved one")]
    Device { index: usize, source: io::Error },
    #[error("restore_from")]
    Memory(#[from] SavedMemoryError),
    #[error("restore_from")]
    State(#[from] StateError),
}

/// Checks that a VM of the shape `saved` can be restored as a VM of the shape `wanted`.
fn check_shape(saved: &Shape, wanted: &Shape) -> Result<(), RestoreError> {
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
    if saved.transport != wanted.transport {
        return Err(RestoreError::Transport);
    }
    if saved.kernel_args == wanted.kernel_args { Ok(()) } else { Err(RestoreError::KernelArgs) }
}

/// The contents of [`STATE_FILE`].
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct State {
    format: u32,
    shape: Shape,
    machine: VmState,
    vcpus: Vec<VcpuState>,
    /// In the order of their addresses.
    devices: Vec<DeviceState>,
    /// The address that the guest has written to the PCI bus last, if there is one.
    pci_address: Option<u32>,
    memory: Vec<Extent>,
}

/// The field of [`State`] that says whether the others can be read.
#[derive(Deserialize)]
struct Header {
    format: u32,
}

/// The files to which a VM will be saved. They are created before the VMM enters its jail, where it cannot create
/// files.
pub struct Saver {
    memory: File,
    /// See [`open_page_map`].
    page_map: Option<File>,
    state: File,
    shape: Shape,
    /// The MSRs that KVM can read.
    msrs: Vec<u32>,
    /// The CPUID table of each vCPU.
    cpuid: Vec<Vec<kvm_cpuid_entry2>>,
}

/// A VM whose vCPUs have stopped.
pub struct StoppedVm<'v> {
    pub vcpus: &'v [VcpuFd],
    pub fd: &'v VmFd,
    pub memory: &'v GuestMemory,
    /// In the order of their addresses.
    pub devices: &'v [Arc<dyn Transport>],
    /// The PCI bus, if the devices are on one.
    pub pci: Option<&'v PciBus>,
}

impl Saver {
    /// Creates the files in `dir`.
    pub fn new(dir: &Path, config: &VmConfig, kvm: &Kvm) -> Result<Self, SaveError> {
        let shape = Shape::of(config, Path::new(PROGRAM))
            .map_err(|PartError { path, source }| SaveError::Part { path, source })?;
        Ok(Self {
            memory: create(dir.join(MEMORY_FILE))?,
            page_map: open_page_map().map_err(SaveError::PageMap)?,
            state: create(dir.join(STATE_FILE))?,
            shape,
            msrs: vcpu_state::msr_indices(kvm).map_err(refused("list of MSRs"))?,
            cpuid: Vec::new(),
        })
    }

    /// Adds the CPUID table of the next vCPU.
    pub fn add_cpuid(&mut self, table: &[kvm_cpuid_entry2]) {
        self.cpuid.push(table.to_vec());
    }

    /// Saves the VM and stops its devices for good. The state is written last, so an incomplete save has no state.
    pub fn save(mut self, vm: &StoppedVm) -> Result<(), SaveError> {
        let devices = vm.devices.iter().enumerate().map(|(index, device)| {
            DeviceState::save(&**device).map_err(|source| SaveError::Device { index, source })
        });
        let devices = devices.collect::<Result<_, _>>()?;
        let vcpus = vm.vcpus.iter().zip(self.cpuid);
        let vcpus = vcpus.map(|(vcpu, cpuid)| VcpuState::save(vcpu, cpuid, &self.msrs));
        let mut vcpus = vcpus.collect::<Result<Vec<_>, _>>()?;
        if let Some((first, others)) = vcpus.split_first_mut() {
            others.iter_mut().for_each(|other| other.copy_tsc_of(first));
        }
        let written = |what| move |source| SaveError::Write { what, source };
        let state = State {
            format: FORMAT,
            shape: self.shape,
            machine: VmState::save(vm.fd)?,
            vcpus,
            devices,
            pci_address: vm.pci.map(PciBus::address),
            memory: save_memory(vm.memory, &mut self.memory, self.page_map.as_ref())
                .map_err(written("memory"))?,
        };
        let mut file = BufWriter::new(self.state);
        serde_json::to_writer(&mut file, &state)
            .map_err(io::Error::from)
            .and_then(|()| file.flush())
            .map_err(written("state"))
    }
}

fn create(path: PathBuf) -> Result<File, SaveError> {
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
    file.map_err(|source| SaveError::Create { path, source })
}

/// A saved VM that fits the configuration.
pub struct Saved {
    state: State,
    memory: File,
    working_set: Pieces,
}

impl Saved {
    /// Opens the VM that was saved in `dir`, for a VM with the configuration `config`.
    pub fn open(dir: &Path, config: &VmConfig) -> Result<Self, RestoreError> {
        let read = |path: &Path| {
            let path = path.to_owned();
            move |source| RestoreError::Read { path, source }
        };
        let path = dir.join(STATE_FILE);
        let text = read_text(&path, LONGEST_STATE).map_err(read(&path))?;
        let damaged = |source| RestoreError::Damaged { path: path.clone(), source };
        let state = serde_json::from_str::<State>(&text);
        let found = match &state {
            Ok(state) => state.format,
            // A file of another format is not damaged because its fields differ.
            Err(_) => serde_json::from_str::<Header>(&text).map_err(damaged)?.format,
        };
        if found != FORMAT {
            return Err(RestoreError::Format { found });
        }
        let state = state.map_err(damaged)?;
        let shape = Shape::of(config, Path::new(PROGRAM))
            .map_err(|PartError { path, source }| RestoreError::Read { path, source })?;
        check_shape(&state.shape, &shape)?;
        let path = dir.join(WORKING_SET_FILE);
        let working_set = Pieces::read(dir, &state.memory).map_err(read(&path))?;
        let path = dir.join(MEMORY_FILE);
        Ok(Self { state, memory: File::open(&path).map_err(read(&path))?, working_set })
    }

    /// Maps the guest's memory.
    pub fn memory(&self) -> Result<GuestMemory, RestoreError> {
        let size = Size::new(self.state.shape.memory_mib, self.state.shape.max_memory_mib);
        Ok(restore_memory(size, &self.memory, &self.state.memory)?)
    }

    /// Maps what a clone touches first. Call this last, with a vCPU that was restored.
    pub fn map_working_set(&self, memory: &GuestMemory, vcpu: &VcpuFd) {
        self.working_set.map(memory, vcpu);
    }

    /// Restores the state of a new vCPU. `cpuid` is the table that a vCPU of a VM that boots would get on this host.
    /// Its features must be those of the saved table.
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
        Ok(saved.restore(vcpu, id == 0)?)
    }

    /// Restores the interrupt controllers and the clock. Call this after all vCPUs were restored.
    pub fn restore_vm(&self, vm: &VmFd) -> Result<(), RestoreError> {
        Ok(self.state.machine.restore(vm)?)
    }

    /// Restores the PCI bus, and what is to be known of devices before one of them is activated: their interrupt
    /// messages, which go to KVM next.
    pub fn prepare_devices(
        &self,
        devices: &[Arc<dyn Transport>],
        pci: Option<&PciBus>,
    ) -> Result<(), RestoreError> {
        let (saved, wanted) = (self.state.devices.len(), devices.len());
        if saved != wanted {
            return Err(RestoreError::Shape { what: "devices", saved, wanted });
        }
        if let (Some(bus), Some(address)) = (pci, self.state.pci_address) {
            bus.set_address(address);
        }
        if pci.map(PciBus::address) != self.state.pci_address {
            return Err(RestoreError::Bus);
        }
        self.for_each_device(devices, DeviceState::prepare)
    }

    /// Restores the devices. Call this last, because a device may interrupt the guest at once, and before the guest
    /// runs.
    pub fn restore_devices(&self, devices: &[Arc<dyn Transport>]) -> Result<(), RestoreError> {
        self.for_each_device(devices, DeviceState::restore)
    }

    fn for_each_device(
        &self,
        devices: &[Arc<dyn Transport>],
        restore: fn(&DeviceState, &dyn Transport) -> io::Result<()>,
    ) -> Result<(), RestoreError> {
        devices.iter().zip(&self.state.devices).enumerate().try_for_each(|(index, (device, state))| {
            restore(state, &**device).map_err(|source| RestoreError::Device { index, source })
        })
    }
}

#[cfg(test)]
mod tests {
    use std::{error::Error, fs};

    use bulkhead_vmm_api::API_VERSION;

    use super::*;

    /// A directory with the kernel and the initramfs of a VM, and with the saved VM.
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
            let memory = crate::memory::allocate(Size::new(64, None), None).unwrap();
            vm_memory::Bytes::write_obj(&memory, 7u64, vm_memory::GuestAddress(0x1000)).unwrap();
            let state = State {
                format: FORMAT,
                shape: Shape::of(&host.config, Path::new(PROGRAM)).unwrap(),
                machine: VmState::default(),
                vcpus: Vec::new(),
                devices: Vec::new(),
                pci_address: None,
                memory: save_memory(
                    &memory,
                    &mut create(host.path(MEMORY_FILE)).unwrap(),
                    open_page_map().unwrap().as_ref(),
                )
                .unwrap(),
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

        /// The error after `change` was applied to the state.
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
        let of_another_time = Host::new().refusal(|text| text.replace("\"format\":4", "\"format\":9"));
        assert_eq!(of_another_time, "restore_from: the VM was saved in format 9, this VMM supports 4");
        let host = Host::new();
        fs::remove_file(host.path(STATE_FILE)).unwrap();
        assert!(reason(host.open()).contains("cannot read"));
        let host = Host::new();
        File::create(host.path(STATE_FILE)).unwrap().set_len(LONGEST_STATE + 1).unwrap();
        assert!(reason(host.open()).contains("state.json: file too large"), "{}", reason(host.open()));
        let host = Host::new();
        fs::write(host.path(MEMORY_FILE), "short").unwrap();
        let error = host.open().unwrap().memory().unwrap_err();
        assert_eq!(
            error.source().unwrap().to_string(),
            "the file of the saved memory has 5 bytes instead of 4096"
        );
    }

    #[test]
    fn what_is_of_other_parts_or_another_shape_is_refused() {
        let host = Host::new();
        fs::write(host.path("kernel"), "a newer one").unwrap();
        assert!(reason(host.open()).contains("/kernel has changed since"), "{}", reason(host.open()));
        let changed = |change: fn(&mut VmConfig)| {
            let mut host = Host::new();
            change(&mut host.config);
            reason(host.open())
        };
        let expected = "restore_from: the VM was saved with 1 vCPUs, the configuration has 2";
        assert_eq!(changed(|config| config.vcpus = 2), expected);
        let expected = "restore_from: the VM was saved with 64 MiB of memory, the configuration has 128";
        assert_eq!(changed(|config| config.memory_mib = 128), expected);
        let expected = "restore_from: the VM was saved with another transport";
        assert_eq!(changed(|config| config.transport = bulkhead_vmm_api::Transport::Mmio), expected);
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
