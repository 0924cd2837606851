//! File system device (virtio 1.3, section 5.11): a directory of the host, shared with the guest by virtio-fs.
//!
//! The file server acts on the directory as root, with the capabilities that the jail leaves to its threads. It acts
//! with the user and group of the calling process in two cases only: when it creates a file, so that the file belongs
//! to them (`caller`), and when the file system maps root to nobody (`root_squash`). It opens only regular files and
//! directories, so a device node that the guest creates is never opened. The guest's kernel checks the permissions: it
//! knows all credentials of the calling process, and the owner, the mode and the access control list of the file.
//!
//! The number of file descriptors and the memory that a guest can take are limited, however many files it looks up,
//! opens or removes: see `nodes` and `handles`. Several threads serve requests: see `requests`.
//!
//! A share is *exclusive* if nobody but the guest changes the files that it uses there, which are the roots of
//! containers. Linux then sends neither OPEN nor OPENDIR (FUSE_NO_OPEN_SUPPORT and FUSE_NO_OPENDIR_SUPPORT in
//! linux/fuse.h), and nothing when a file is closed. Requests about open files name their nodes instead of handles: see
//! `open_files` and `listings`.

use std::{
    collections::BTreeMap,
    io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
};

use bulkhead_vmm_api::ShareConfig;
use rustix::fs::{CWD, Mode, OFlags, openat};
use virtio_bindings::{
    virtio_ids::VIRTIO_ID_FS,
    virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC},
};
use virtio_queue::QueueT;

use self::{
    counts::Counts,
    file_server::{Limits, Server, Shared},
    file_stat::stat_at,
    requests::{RequestQueues, ServeError, Unmounted},
};
use super::{Activation, VirtioDevice, config_space::read_config, device, device_threads::Job};
use crate::jail::ThreadRole;

mod abi;
mod attributes;
mod caller;
mod counts;
mod descriptors;
mod directory_entries;
mod extended_attributes;
mod file_locks;
mod file_server;
mod file_stat;
mod file_system_kind;
mod handles;
mod identity;
mod inode_flags;
#[allow(unsafe_code)]
mod inode_ioctls;
mod listings;
mod lock_owners;
mod nodes;
mod open_files;
mod paths;
mod read_directory;
mod read_write;
mod requests;
mod root_squash;
mod sync;
mod table;
#[cfg(test)]
mod tests;

/// The number of threads. One waits for requests, so that seven requests are handled at once.
pub const THREADS: usize = 8;
/// The number of threads of an exclusive share. It is the smallest number of which one file system may use three. The
/// roots of containers are on local file systems.
pub const EXCLUSIVE_THREADS: usize = 6;
/// The number of idle nodes of an exclusive share. A file that the guest has opened and not used yet counts as idle, so
/// there are more of these than in another share.
const EXCLUSIVE_IDLE: usize = 3 << 16;
/// hiprio, and one request queue (virtio 1.3, 5.11.2). A request of 1 MiB takes 256 descriptors for its pages and a
/// few more.
const QUEUE_SIZES: [u16; 2] = [128, 1024];
/// Bytes of the tag in the device configuration (virtio 1.3, 5.11.4).
const TAG_LEN: usize = 36;

/// Why a virtio-fs device could not be made.
#[derive(Debug, thiserror::Error)]
pub enum FsError {
    #[error("the tag {tag:?} of a share does not have 1 to 36 bytes, or contains a NUL")]
    Tag { tag: String },
    #[error("cannot serve {dir} as share {tag:?}")]
    Serve {
        tag: String,
        dir: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// What the rest of the VMM can ask of the device. Clones are the same.
#[derive(Clone)]
pub struct ShareControl {
    tag: String,
    unmounted: Arc<Unmounted>,
    counts: Arc<Counts>,
}

impl ShareControl {
    /// Closes all files of directories that the host has unmounted. Does not wait for that.
    pub fn close_unmounted(&self) {
        self.unmounted.set();
    }

    /// The tag of the share.
    pub fn tag(&self) -> &str {
        &self.tag
    }

    /// How many FUSE requests the share was sent, by the name of the opcode.
    pub fn requests(&self) -> BTreeMap<String, u64> {
        self.counts.by_name()
    }
}

/// The device.
pub struct Fs {
    tag: String,
    counts: Arc<Counts>,
    unmounted: Arc<Unmounted>,
    config: [u8; TAG_LEN + 4],
    root: Arc<OwnedFd>,
    limits: Limits,
    threads: usize,
    is_exclusive: bool,
}

impl Fs {
    /// Shares `dir`, and everything that is mounted below it now or later, as `share` says. `dir` is its directory as
    /// this process sees it. The process has `shares` shares.
    pub fn new(share: &ShareConfig, dir: &Path, shares: usize) -> Result<Self, FsError> {
        let threads = if share.exclusive { EXCLUSIVE_THREADS } else { THREADS };
        Self::with_threads(share, dir, shares, threads)
    }

    /// Shares `dir` as [`Self::new`] does, with this number of threads. One thread handles one request after the other.
    pub fn with_threads(
        share: &ShareConfig,
        dir: &Path,
        shares: usize,
        threads: usize,
    ) -> Result<Self, FsError> {
        let mut limits = Limits::of_this_process(shares);
        if share.exclusive {
            limits.nodes.idle = EXCLUSIVE_IDLE;
        }
        Ok(Self { is_exclusive: share.exclusive, ..Self::with_limits(&share.tag, dir, threads, limits)? })
    }

    fn with_limits(tag: &str, dir: &Path, threads: usize, limits: Limits) -> Result<Self, FsError> {
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
        let failed = |source| FsError::Serve { tag: tag.to_owned(), dir: dir.to_owned(), source };
        let unmounted = Unmounted::new().map_err(failed)?;
        Ok(Self {
            tag: tag.to_owned(),
            counts: Arc::new(Counts::new()),
            unmounted: Arc::new(unmounted),
            config,
            root: Arc::new(root),
            limits,
            threads,
            is_exclusive: false,
        })
    }

    /// What can be asked of the device.
    pub fn control(&self) -> ShareControl {
        let (unmounted, counts) = (self.unmounted.clone(), self.counts.clone());
        ShareControl { tag: self.tag.clone(), unmounted, counts }
    }
}

impl VirtioDevice for Fs {
    fn thread_role(&self) -> ThreadRole {
        ThreadRole::Fs
    }

    fn threads(&self) -> usize {
        self.threads
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

    fn activate(&mut self, activation: Activation) -> io::Result<Vec<Job>> {
        let Activation { memory, queues, interrupt, log, .. } = activation;
        if queues.len() != QUEUE_SIZES.len() || !queues.iter().all(|queue| queue.queue.ready()) {
            return Err(io::Error::other("the driver did not set up the queues of virtio-fs"));
        }
        let (root, limits, is_exclusive) = (self.root.clone(), self.limits, self.is_exclusive);
        let unmounted = self.unmounted.clone();
        let queues = Arc::new(RequestQueues::new(memory, queues, self.threads, unmounted));
        // A driver starts with FUSE_INIT, and has looked up no file yet. The first thread makes the tables: the
        // thread of the vCPU must not make a system call on a file.
        let tables = Arc::new(OnceLock::new());
        let job = || {
            let (root, queues, tables) = (root.clone(), queues.clone(), tables.clone());
            let counts = self.counts.clone();
            device::job("virtio-fs", interrupt.clone(), log.clone(), move |interrupt, stop| {
                let make = || {
                    stat_at(&root, c"")
                        .and_then(|stat| Shared::new(root.clone(), &stat, limits, is_exclusive))
                        .map(Arc::new)
                };
                let shared: &Arc<Shared> =
                    tables.get_or_init(make).as_ref().map_err(|error| ServeError::Root(*error))?;
                queues.run(shared, &mut Server::new(shared.clone(), counts), interrupt, stop)
            })
        };
        Ok((0..self.threads).map(|_| job()).collect())
    }
}
