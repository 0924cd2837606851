//! A saved VM whose files are damaged. Either it is rejected with an error of one line, or its restored device serves
//! its driver. State that goes to KVM is checked by KVM.

use std::{
    error::Error,
    fs::{self, File},
    io,
    path::Path,
    sync::OnceLock,
};

use anyhow::{Result, ensure};
use bulkhead_vmm::{
    memory::{Size, allocate},
    one_line,
    snapshot::{DeviceState, FORMAT, Saved, save_memory},
    virtio::rng::Rng,
};
use bulkhead_vmm_api::{API_VERSION, MEMORY_FILE, STATE_FILE, Shape, VmConfig};
use kvm_bindings::{
    kvm_debugregs, kvm_irqchip, kvm_lapic_state, kvm_mp_state, kvm_regs, kvm_sregs, kvm_vcpu_events,
    kvm_xcrs, kvm_xsave,
};
use serde_json::{Value, json};

use crate::{
    guest::{BUFFERS, Buffer, Guest},
    input::Input,
};

/// The VMM, kernel and initramfs of the VM: a file that does not change.
const PART: &str = "/proc/self/exe";
const MEMORY_MIB: u32 = 2;
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

/// Damages the files and restores the VM.
pub fn run(bytes: &[u8]) -> Result<()> {
    static FILES: OnceLock<Files> = OnceLock::new();
    let files = match FILES.get() {
        Some(files) => files,
        None => {
            let saved = save()?;
            FILES.get_or_init(|| saved)
        }
    };
    let mut input = Input::new(bytes);
    let is_damaged = !input.is_over();
    let dir = tempfile::tempdir()?;
    damage(files, &mut input, dir.path())?;
    let restored = restore(dir.path());
    if let Err(error) = &restored {
        let line = one_line(error.as_ref());
        ensure!(is_damaged, "a VM that is as it was saved is refused: {line}");
        ensure!(line.starts_with("restore_from") && line.len() < 1024, "refused with {line:?}");
    }
    match restored {
        Ok(mut guest) => serves(&mut guest),
        Err(_) => Ok(()),
    }
}

fn config() -> Result<VmConfig> {
    let config = json!({
        "api_version": API_VERSION, "kernel": PART, "initramfs": PART, "vcpus": 1, "memory_mib": MEMORY_MIB,
        "control": "control.sock", "vsock": "vsock.sock",
    });
    Ok(serde_json::from_value(config)?)
}

/// Saves a VM whose only device has served a request, and has another request in its queue.
fn save() -> Result<Files> {
    let memory = allocate(Size::new(MEMORY_MIB, None), None)?;
    let mut guest = Guest::with_memory(memory.clone(), Box::new(Rng::new()?), "rng")?;
    serves(&mut guest)?;
    let device = DeviceState::save(guest.transport())?;
    guest.offer(0, &[Buffer { address: BUFFERS, len: 16, write: true }]);
    let mut file = tempfile::NamedTempFile::new()?;
    let extents = save_memory(&memory, file.as_file_mut())?;
    let vcpu = json!({
        "cpuid": [], "tsc_khz": 1, "mp_state": kvm_mp_state::default(), "regs": kvm_regs::default(),
        "sregs": kvm_sregs::default(), "xsave": kvm_xsave::default(), "xcrs": kvm_xcrs::default(),
        "debug_regs": kvm_debugregs::default(), "lapic": kvm_lapic_state::default(),
        "events": kvm_vcpu_events::default(), "msrs": [],
    });
    let irqchips = vec![kvm_irqchip::default(); 3];
    let state = json!({
        "format": FORMAT,
        "shape": Shape::of(&config()?, Path::new(PART)).map_err(|error| error.source)?,
        "machine": { "irqchips": irqchips, "clock_ns": 1 },
        "vcpus": [vcpu], "devices": [device], "memory": extents,
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
    Ok(fs::write(dir.join(STATE_FILE), text.map_or_else(|| serde_json::to_vec(&state), Ok)?)?)
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

/// Restores the VM in `dir`.
fn restore(dir: &Path) -> Result<Guest, Box<dyn Error>> {
    let saved = Saved::open(dir, &config()?)?;
    let guest = Guest::with_memory(saved.memory()?, Box::new(Rng::new()?), "rng")?;
    saved.restore_devices(std::slice::from_ref(guest.transport()), None)?;
    Ok(guest)
}

/// Whatever state was restored, the device serves its next driver.
fn serves(guest: &mut Guest) -> Result<()> {
    guest.start();
    guest.offer(0, &[Buffer { address: BUFFERS, len: 16, write: true }]);
    guest.kick(0);
    ensure!(guest.used(0) == 1, "the device does not serve its driver");
    Ok(())
}
