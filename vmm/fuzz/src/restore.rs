//! A saved VM with either transport, whose files are damaged. Either it is rejected with an error of one line, or its
//! restored device serves its driver. State that goes to KVM is checked by KVM.

use std::{
    error::Error,
    fs::{self, File},
    io,
    path::Path,
    slice,
    sync::OnceLock,
};

use anyhow::{Result, ensure};
use bulkhead_vmm::{
    GuestMemory,
    memory::{Size, allocate},
    one_line,
    snapshot::{DeviceState, FORMAT, Saved, open_page_map, save_memory},
    virtio::{pci::PciTransport, rng::Rng},
};
use bulkhead_vmm_api::{API_VERSION, MEMORY_FILE, STATE_FILE, Shape, Transport, VmConfig};
use kvm_bindings::{
    kvm_debugregs, kvm_irqchip, kvm_lapic_state, kvm_mp_state, kvm_regs, kvm_sregs, kvm_vcpu_events,
    kvm_xcrs, kvm_xsave,
};
use serde_json::{Value, json};

use crate::{
    guest::{BUFFERS, Buffer, Guest},
    input::Input,
    pci,
};

/// The VMM, kernel and initramfs of the VM: a file that does not change.
const PART: &str = "/proc/self/exe";
const MEMORY_MIB: u32 = 2;
/// A longer state is cut off: the target `fs` limits the files of its process.
const LONGEST_TEXT: usize = 1 << 19;
/// Fields of the state that are changed more often than others.
const PARTS: [&str; 5] = ["devices", "memory", "devices", "shape", "vcpus"];
/// Values for a changed number.
const NUMBERS: [u64; 12] =
    [0, 1, 4, 15, 64, 0x1000, 0xffff, 0x1_0000, 1 << 31, u32::MAX as u64, 1 << 40, u64::MAX];

/// The files of a saved VM.
struct Files {
    state: Value,
    memory: Vec<u8>,
}

/// Damages the files of a VM with each transport, and restores it.
pub fn run(bytes: &[u8]) -> Result<()> {
    static FILES: OnceLock<[(Transport, Files); 2]> = OnceLock::new();
    let files = match FILES.get() {
        Some(files) => files,
        None => {
            let saved = [(Transport::Mmio, save_mmio()?), (Transport::Pci, save_pci()?)];
            FILES.get_or_init(|| saved)
        }
    };
    files.iter().try_for_each(|(transport, files)| damage_and_restore(bytes, *transport, files))
}

fn damage_and_restore(bytes: &[u8], transport: Transport, files: &Files) -> Result<()> {
    let mut input = Input::new(bytes);
    let is_damaged = !input.is_over();
    let dir = tempfile::tempdir()?;
    damage(files, &mut input, dir.path())?;
    match restore(dir.path(), transport) {
        Ok(serves) => serves(),
        Err(error) => {
            let line = one_line(error.as_ref());
            ensure!(is_damaged, "a VM that is as it was saved is refused: {line}");
            ensure!(line.starts_with("restore_from") && line.len() < 1024, "refused with {line:?}");
            Ok(())
        }
    }
}

fn config(transport: Transport) -> Result<VmConfig> {
    let config = json!({
        "api_version": API_VERSION, "kernel": PART, "initramfs": PART, "vcpus": 1, "memory_mib": MEMORY_MIB,
        "control": "control.sock", "vsock": "vsock.sock", "transport": transport,
    });
    Ok(serde_json::from_value(config)?)
}

/// Saves a VM whose only device has served a request, and has another request in its queue.
fn save_mmio() -> Result<Files> {
    let memory = allocate(Size::new(MEMORY_MIB, None), None)?;
    let mut guest = Guest::with_memory(memory.clone(), Box::new(Rng::new()?), "rng")?;
    serves(&mut guest)?;
    let device = DeviceState::save(&**guest.transport())?;
    guest.offer(0, &[Buffer { address: BUFFERS, len: 16, write: true }]);
    save(Transport::Mmio, &memory, &device, None)
}

/// Saves a VM whose device is on a bus, and has served a request and interrupted the guest by a message.
fn save_pci() -> Result<Files> {
    let memory = allocate(Size::new(MEMORY_MIB, None), None)?;
    let guest = pci::Guest::new(memory.clone())?;
    guest.serves()?;
    let device = DeviceState::save(&*guest.device)?;
    save(Transport::Pci, &memory, &device, Some(guest.pci.address()))
}

fn save(
    transport: Transport,
    memory: &GuestMemory,
    device: &DeviceState,
    pci_address: Option<u32>,
) -> Result<Files> {
    let mut file = tempfile::NamedTempFile::new()?;
    let extents = save_memory(memory, file.as_file_mut(), open_page_map()?.as_ref())?;
    let vcpu = json!({
        "cpuid": [], "tsc_khz": 1, "mp_state": kvm_mp_state::default(), "regs": kvm_regs::default(),
        "sregs": kvm_sregs::default(), "xsave": kvm_xsave::default(), "xcrs": kvm_xcrs::default(),
        "debug_regs": kvm_debugregs::default(), "lapic": kvm_lapic_state::default(),
        "events": kvm_vcpu_events::default(), "msrs": [],
    });
    let irqchips = vec![kvm_irqchip::default(); 3];
    let state = json!({
        "format": FORMAT,
        "shape": Shape::of(&config(transport)?, Path::new(PART)).map_err(|error| error.source)?,
        "machine": { "irqchips": irqchips, "clock_ns": 1 },
        "vcpus": [vcpu], "devices": [device], "pci_address": pci_address, "memory": extents,
    });
    Ok(Files { state, memory: fs::read(file.path())? })
}

/// Writes the files to `dir`, with the damage that the input describes.
fn damage(files: &Files, input: &mut Input, dir: &Path) -> Result<()> {
    let mut state = files.state.clone();
    let mut text = None;
    let memory = File::create_new(dir.join(MEMORY_FILE))?;
    io::copy(&mut files.memory.as_slice(), &mut &memory)?;
    while !input.is_over() {
        match input.below(8) {
            0 => {
                let len = input.u16().into();
                text = Some(input.bytes(len).to_vec());
            }
            1 => {
                let text = text.get_or_insert(serde_json::to_vec(&state)?);
                text.truncate(usize::from(input.u16()));
            }
            2 => {
                let text = text.get_or_insert(serde_json::to_vec(&state)?);
                let place = usize::from(input.u16()).min(text.len());
                let end = (place + usize::from(input.u8())).min(text.len());
                let added = input.u8().into();
                text.splice(place..end, input.bytes(added).iter().copied());
            }
            3 => {
                let len = if input.u8() < 200 { input.u16().into() } else { input.u64() % (1 << 40) };
                // The host limits the size of a file.
                let _ = memory.set_len(len);
            }
            _ => {
                let part = input.choose(&PARTS);
                let value = if input.u8() < 240 { &mut state[part] } else { &mut state };
                change(input, value);
            }
        }
    }
    let mut text = text.map_or_else(|| serde_json::to_vec(&state), Ok)?;
    text.truncate(LONGEST_TEXT);
    Ok(fs::write(dir.join(STATE_FILE), text)?)
}

/// Changes a part of `value`.
fn change(input: &mut Input, value: &mut Value) {
    match value {
        Value::Array(items) if !items.is_empty() => {
            let place = usize::from(input.u16()) % items.len();
            match input.below(8) {
                0 => drop(items.remove(place)),
                1 => items.resize(items.len() + input.below(256), items[place].clone()),
                _ => change(input, &mut items[place]),
            }
        }
        Value::Object(fields) if !fields.is_empty() => {
            let place = input.below(fields.len().min(256));
            let name = fields.keys().nth(place).cloned().unwrap_or_default();
            match input.below(16) {
                0 => drop(fields.remove(&name)),
                1 => drop(fields.insert(format!("{name}2"), Value::Null)),
                _ => change(input, &mut fields[&name]),
            }
        }
        other => {
            *other = match input.below(8) {
                0 => json!([]),
                1 => json!("\u{1b}[31m\n"),
                2 => json!(-1),
                3 => json!(true),
                4 => json!(input.u64()),
                _ => json!(input.choose(&NUMBERS)),
            }
        }
    }
}

/// What the next driver of a restored device does.
type Serves = Box<dyn FnOnce() -> Result<()>>;

/// Restores the VM in `dir`.
fn restore(dir: &Path, transport: Transport) -> Result<Serves, Box<dyn Error>> {
    let saved = Saved::open(dir, &config(transport)?)?;
    match transport {
        Transport::Mmio => {
            let mut guest = Guest::with_memory(saved.memory()?, Box::new(Rng::new()?), "rng")?;
            let devices = slice::from_ref(guest.transport());
            saved.prepare_devices(devices, None)?;
            saved.restore_devices(devices)?;
            Ok(Box::new(move || serves(&mut guest)))
        }
        Transport::Pci => {
            let guest = pci::Guest::new(saved.memory()?)?;
            let devices = slice::from_ref(&guest.device);
            saved.prepare_devices(devices, Some(&guest.pci))?;
            guest.device.pci().into_iter().for_each(PciTransport::route);
            saved.restore_devices(devices)?;
            Ok(Box::new(move || guest.serves()))
        }
    }
}

/// Whatever state was restored, the device serves its next driver.
fn serves(guest: &mut Guest) -> Result<()> {
    guest.start();
    guest.offer(0, &[Buffer { address: BUFFERS, len: 16, write: true }]);
    guest.kick(0);
    ensure!(guest.used(0) == 1, "the device does not serve its driver");
    Ok(())
}
