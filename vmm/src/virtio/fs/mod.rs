//! virtio-fs: a directory of the host, served to the guest by this process (virtio 1.3, section 5.11).
//!
//! The guest's root acts on the directory as the host's root would, with the uid and gid that each request names and
//! the capabilities that the jail leaves to the worker, but only regular files and directories are ever opened, so that
//! a device node which the guest makes stays a name. Who may use which file is for the guest's kernel to say: it knows
//! all about its callers, and the owner, the mode and the access control list of the file.
//!
//! Whatever the guest looks up, keeps open or removes costs the host a bounded number of descriptors and a bounded amount
//! of memory: see `nodes` and `handles`.

use std::{
    io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::Arc,
};

use rustix::fs::{CWD, Mode, OFlags, openat};
use virtio_bindings::{
    virtio_ids::VIRTIO_ID_FS,
    virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC},
};
use virtio_queue::QueueT;

use self::{
    file_server::{Limits, Server},
    requests::{ServeError, Service},
};
use super::{Activation, VirtioDevice, config_space::read_config, device, device_thread::Job};
use crate::jail::ThreadRole;

mod abi;
mod attributes;
mod caller;
mod contents;
mod descriptors;
mod file_server;
mod handles;
mod names;
mod nodes;
mod requests;
mod table;
#[cfg(test)]
mod tests;

/// hiprio, and one request queue (virtio 1.3, 5.11.2). A request of 1 MiB takes 256 pages and a few descriptors more.
const QUEUE_SIZES: [u16; 2] = [128, 1024];
/// Bytes of the tag in configuration space (virtio 1.3, 5.11.4).
const TAG_LEN: usize = 36;
/// Why there is no virtio-fs device.
#[derive(Debug, thiserror::Error)]
pub enum FsError {
    #[error("the tag {tag:?} of a share is not 1 to 36 bytes long, or has a NUL in it")]
    Tag { tag: String },
    #[error("cannot serve {dir} as share {tag:?}")]
    Serve {
        tag: String,
        dir: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// The device.
pub struct Fs {
    config: [u8; TAG_LEN + 4],
    root: Arc<OwnedFd>,
    limits: Limits,
}

impl Fs {
    /// Serves `dir`, and what is or comes to be mounted under it, as `tag`.
    pub fn new(tag: &str, dir: &Path) -> Result<Self, FsError> {
        Self::with_limits(tag, dir, Limits::of_this_process())
    }

    fn with_limits(tag: &str, dir: &Path, limits: Limits) -> Result<Self, FsError> {
        if tag.is_empty() || tag.len() > TAG_LEN || tag.contains('\0') {
            return Err(FsError::Tag { tag: tag.to_owned() });
        }
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = openat(CWD, dir, flags, Mode::empty()).map_err(|error| FsError::Serve {
            tag: tag.to_owned(),
            dir: dir.to_owned(),
            source: error.into(),
        })?;
        let mut config = [0; TAG_LEN + 4];
        config[..tag.len()].copy_from_slice(tag.as_bytes());
        config[TAG_LEN] = 1; // num_request_queues, little-endian
        Ok(Self { config, root: Arc::new(root), limits })
    }
}

impl VirtioDevice for Fs {
    fn thread_role(&self) -> ThreadRole {
        ThreadRole::Fs
    }

    fn device_type(&self) -> u32 {
        VIRTIO_ID_FS
    }

    fn features(&self) -> u64 {
        1 << VIRTIO_RING_F_EVENT_IDX | 1 << VIRTIO_RING_F_INDIRECT_DESC
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    /// `tag` and `num_request_queues` (virtio 1.3, 5.11.4).
    fn read_config(&self, offset: u64, data: &mut [u8]) {
        read_config(&self.config, offset, data);
    }

    fn activate(&mut self, activation: Activation) -> io::Result<Job> {
        let Activation { memory, queues, interrupt, log, .. } = activation;
        if queues.len() != QUEUE_SIZES.len() || !queues.iter().all(|queue| queue.queue.ready()) {
            return Err(io::Error::other("the driver did not set up the queues of virtio-fs"));
        }
        let (root, limits) = (self.root.clone(), self.limits);
        Ok(device::job("virtio-fs", interrupt, log, move |interrupt, stop| {
            // A driver starts with FUSE_INIT, and has looked up no file yet.
            let server = Server::new(&root, limits).map_err(ServeError::Root)?;
            Service { memory: &memory, server, interrupt, queues }.run(stop)
        }))
    }
}
