//! Pods, as kubelet makes them by containerd's CRI service.

pub(super) mod at_once;
pub(super) mod bad_input;
pub(super) mod disks;
pub(super) mod fields;
pub(super) mod files;
pub(super) mod life;
pub(super) mod memory;
pub(super) mod network;
pub(super) mod sandboxer;
pub(super) mod settings;
pub(super) mod sharing;
pub(super) mod streams;
pub(super) mod volumes;

use std::time::Duration;

/// How long something on the host may take to be seen in a container: what a guest has cached lasts a second.
const SEEN: Duration = Duration::from_secs(5);
