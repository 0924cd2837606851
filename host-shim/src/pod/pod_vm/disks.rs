//! Disks of the host that the VM has got.
//!
//! A block device that a spec names stays until the VM ends, so that later containers of the pod use it too: a guest
//! that has mounted it could not let go of it. A disk that is the root of a container is taken away when that is
//! deleted.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use bulkhead_agent_api::DISKS_DIR;
use nix::mount::MsFlags;
use tokio::time::timeout;
use tracing::Instrument;
use ttrpc::Code;

use crate::{
    guest::agent::AgentError,
    host::{
        block_device::{self, BlockDevice},
        rootfs::DiskRoot,
    },
    pod::{
        devices::{Disk, Numbers},
        pod_vm::{PodVm, ask_again},
    },
    process::{
        error::{DiskError, TaskError},
        running_guest::Guest,
    },
    types::{error::chain, lock::lock},
    vm::control_socket::AttachError,
};

/// How long a container waits while another one gets the same device.
const TURN: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 60 });

/// A device of the host that a spec has named.
#[derive(Debug)]
struct Named {
    major: u32,
    minor: u32,
    /// Held by whoever attaches it. That takes as long as the device does to answer, but nobody who wants another
    /// device waits for it.
    state: tokio::sync::Mutex<State>,
}

#[derive(Debug, Clone, Copy)]
enum State {
    Absent,
    /// The VMM has it, or may have it.
    Attached {
        writable: bool,
    },
    /// The guest has it too.
    Found {
        writable: bool,
        numbers: Numbers,
    },
}

/// The disks of a VM.
#[derive(Debug, Default)]
pub(crate) struct Disks {
    named: Mutex<Vec<Arc<Named>>>,
    roots: Mutex<Roots>,
}

/// The disks that are roots of containers.
#[derive(Debug, Default)]
struct Roots {
    /// By the ids of the containers, with their serial numbers.
    of: Vec<(String, String)>,
    /// How many there have been.
    count: u32,
}

impl Disks {
    fn roots(&self) -> std::sync::MutexGuard<'_, Roots> {
        lock(&self.roots)
    }

    /// Whether the guest may have data that it has not written to a disk yet.
    pub(crate) fn may_be_dirty(&self) -> bool {
        lock(&self.named).iter().any(|device| device.may_be_attached()) || !self.roots().of.is_empty()
    }

    /// A device that is there, or is to be. Forgets those that nobody has got.
    fn named(&self, major: u32, minor: u32) -> Arc<Named> {
        let mut named = lock(&self.named);
        named.retain(|device| Arc::strong_count(device) > 1 || device.may_be_attached());
        if let Some(device) = named.iter().find(|device| (device.major, device.minor) == (major, minor)) {
            return Arc::clone(device);
        }
        let device = Arc::new(Named { major, minor, state: tokio::sync::Mutex::new(State::Absent) });
        named.push(Arc::clone(&device));
        device
    }
}

impl Named {
    fn may_be_attached(&self) -> bool {
        // Who attaches it holds the lock.
        self.state.try_lock().map_or(true, |state| !matches!(*state, State::Absent))
    }
}

impl PodVm {
    /// Gives the guest the block devices for a container, unless it has them.
    pub(crate) async fn attach_disks(
        &self,
        guest: &Guest,
        wanted: &[Disk],
    ) -> Result<Vec<(Disk, Numbers)>, TaskError> {
        let mut translated = Vec::new();
        for disk in wanted {
            let BlockDevice { major, minor, .. } = disk.device;
            let device = self.disks.named(major, minor);
            let attached = async {
                let waits = DiskError::Waits { major, minor, seconds: TURN.as_secs() };
                let mut state = timeout(TURN, device.state.lock()).await.map_err(|_| waits)?;
                attach(guest, &mut state, disk).await
            };
            let numbers =
                attached.await.map_err(|source| TaskError::Disk { field: disk.field.clone(), source })?;
            translated.push((disk.clone(), numbers));
        }
        Ok(translated)
    }

    /// Has the guest mount the root of the container `id`. Returns where. [`PodVm::release_root`] undoes it, even if
    /// this fails or nobody waits for it any more.
    pub(crate) async fn mount_root(
        &self,
        guest: &Guest,
        id: &str,
        root: &DiskRoot,
    ) -> Result<String, TaskError> {
        let serial = {
            let mut roots = self.disks.roots();
            roots.count += 1;
            let serial = format!("root-{}", roots.count);
            roots.of.push((id.to_owned(), serial.clone()));
            serial
        };
        let mounted = async {
            let writable = !root.flags.contains(MsFlags::MS_RDONLY);
            let (file, discards) = block_device::open_disk(&root.source, writable).await?;
            let attached = guest.vm.control().attach_block(serial.clone(), !writable, discards, &file).await;
            file.close().await;
            attached?;
            guest.agent.mount_disk(&serial, root).await?;
            Ok(format!("{DISKS_DIR}/{serial}"))
        };
        mounted.await.map_err(|source| TaskError::Disk { field: "rootfs[0]".into(), source })
    }

    /// Takes the disk away that is the root of the container `id`, if it has one, after the guest has written back its
    /// data. The container is no more.
    pub(crate) async fn release_root(&self, guest: &Guest, id: &str) {
        let serial = {
            let mut roots = self.disks.roots();
            let index = roots.of.iter().position(|(container, _)| container == id);
            index.map(|index| roots.of.swap_remove(index).1)
        };
        let Some(serial) = serial else { return };
        if guest.vm.has_exited() {
            return;
        }
        let failed = |what: &str, error: &(dyn std::error::Error + 'static)| {
            tracing::error!(container = id, disk = serial, error = chain(error), "{what}");
        };
        if let Err(error) = guest.agent.unmount_disk(&serial).await {
            failed("the guest has not unmounted the root of the container: data may be lost", &error);
        }
        // Its VM ends now.
        if self.is_first(id) {
            return;
        }
        let detached = guest.vm.control().detach_block(serial.clone()).await;
        if let Err(error) = &detached {
            failed("the VMM may keep the root of the container open", error);
        }
        let removed = guest.agent.remove_disk(&serial).await;
        if let Err(error) = &removed {
            failed("the guest keeps the device of a root that is gone", error);
        }
        if detached.is_err() || removed.is_err() {
            tokio::spawn(free_place(guest.clone(), serial).in_current_span());
        }
    }
}

/// Tries again to free the place of a disk. Otherwise the place would be lost until the pod ends. It helps if the disk
/// hangs: the driver in the guest releases it when the disk answers again.
async fn free_place(guest: Guest, serial: String) {
    for pause in ask_again() {
        tokio::time::sleep(pause).await;
        if guest.vm.has_exited() {
            return;
        }
        // If the VMM or the guest does not have the disk any more, that is no error.
        let detached = guest.vm.control().detach_block(serial.clone()).await;
        match guest.agent.remove_disk(&serial).await {
            Ok(()) if detached.is_ok() => return,
            Ok(()) => {}
            Err(error) => {
                tracing::warn!(disk = serial, error = chain(&error), "the guest keeps a disk that is gone")
            }
        }
    }
}

/// Has the VMM attach a device, and the guest find it, unless they have done so.
async fn attach(guest: &Guest, state: &mut State, disk: &Disk) -> Result<Numbers, DiskError> {
    let BlockDevice { major, minor, discards, .. } = disk.device;
    let writable = match *state {
        State::Found { writable: false, .. } | State::Attached { writable: false } if disk.is_writable() => {
            // A second device for it would have a cache of its own in the guest, which does not see what is written by
            // the other one.
            return Err(DiskError::ReadOnlyBefore { major, minor });
        }
        // One that is writable does for a container that only reads. Its device rules keep it from writing.
        State::Found { numbers, .. } => return Ok(numbers),
        State::Attached { writable } => writable,
        State::Absent => {
            let writable = disk.is_writable();
            let file = disk.device.open(writable).await?;
            // If nobody waits for this any more, the VMM may have it.
            *state = State::Attached { writable };
            let serial = serial(major, minor, writable);
            let answer = guest.vm.control().attach_block(serial, !writable, discards, &file).await;
            file.close().await;
            if let Err(error) = answer {
                if matches!(error, AttachError::Refused(_)) {
                    *state = State::Absent;
                }
                return Err(error.into());
            }
            writable
        }
    };
    let serial = serial(major, minor, writable);
    let (major, minor) = match guest.agent.find_disk(&serial).await {
        Ok(numbers) => numbers,
        Err(error) => {
            // Perhaps the VMM does not have it, because its answer was lost. The next container tries anew then.
            if matches!(error, AgentError::Refused { code: Code::NOT_FOUND, .. })
                && guest.vm.control().detach_block(serial).await.is_ok()
            {
                *state = State::Absent;
            }
            return Err(error.into());
        }
    };
    let numbers = Numbers { major, minor };
    *state = State::Found { writable, numbers };
    tracing::info!(disk = serial, major, minor, "the guest has a block device of the host");
    Ok(numbers)
}

/// By which the guest finds the device.
fn serial(major: u32, minor: u32, writable: bool) -> String {
    format!("{major}:{minor}{}", if writable { "" } else { " ro" })
}
