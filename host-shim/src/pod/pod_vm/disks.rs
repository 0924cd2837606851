//! Block devices of the host that the VM has got. A device stays until the VM ends, so that later containers of the pod
//! use it too: a guest that has mounted it could not let go of it.

use crate::{
    host::block_device::BlockDevice,
    pod::{
        devices::{Disk, Numbers},
        pod_vm::PodVm,
    },
    process::{
        error::{DiskError, TaskError},
        running_guest::Guest,
    },
    vm::control_socket::AttachError,
};

/// A device that the VMM has, or may have.
#[derive(Debug)]
struct Attached {
    /// Of the host.
    major: u32,
    minor: u32,
    writable: bool,
    /// None: the guest has not found it yet.
    numbers: Option<Numbers>,
}

/// The devices of a VM. Held by whoever adds one.
#[derive(Debug, Default)]
pub(crate) struct Disks(tokio::sync::Mutex<Vec<Attached>>);

impl PodVm {
    /// Gives the guest the block devices for a container, unless it has them.
    pub(crate) async fn attach_disks(
        &self,
        guest: &Guest,
        wanted: &[Disk],
    ) -> Result<Vec<(Disk, Numbers)>, TaskError> {
        let mut translated = Vec::new();
        if wanted.is_empty() {
            return Ok(translated);
        }
        let mut attached = self.disks.0.lock().await;
        for disk in wanted {
            translated.push((disk.clone(), attach(guest, &mut attached, disk).await?));
        }
        Ok(translated)
    }
}

async fn attach(guest: &Guest, attached: &mut Vec<Attached>, disk: &Disk) -> Result<Numbers, TaskError> {
    let failed = |source: DiskError| TaskError::Disk { field: disk.field.clone(), source };
    let BlockDevice { major, minor, discards, .. } = disk.device;
    let writable = disk.is_writable();
    // One that is writable does for a container that only reads. Its device rules keep it from writing.
    let is_it = |one: &Attached| (one.major, one.minor) == (major, minor) && (one.writable || !writable);
    let index = match attached.iter().position(is_it) {
        Some(index) => index,
        None => {
            let file = disk.device.open(writable).await.map_err(|error| failed(error.into()))?;
            // If nobody waits for this any more, the VMM may have it.
            attached.push(Attached { major, minor, writable, numbers: None });
            let serial = serial(major, minor, writable);
            match guest.vm.control().attach_block(serial, !writable, discards, &file).await {
                Ok(()) => {}
                Err(error) => {
                    if matches!(error, AttachError::Refused(_)) {
                        attached.pop();
                    }
                    return Err(failed(error.into()));
                }
            }
            attached.len() - 1
        }
    };
    let Some(found) = attached.get_mut(index) else {
        return Err(TaskError::Internal("a disk is lost".into()));
    };
    if let Some(numbers) = found.numbers {
        return Ok(numbers);
    }
    let serial = serial(major, minor, found.writable);
    let (major, minor) = guest.agent.find_disk(&serial).await.map_err(|error| failed(error.into()))?;
    let numbers = Numbers { major, minor };
    found.numbers = Some(numbers);
    tracing::info!(disk = serial, major, minor, "the guest has a block device of the host");
    Ok(numbers)
}

/// By which the guest finds the device.
fn serial(major: u32, minor: u32, writable: bool) -> String {
    format!("{major}:{minor}{}", if writable { "" } else { " ro" })
}
