//! virtio-fs: a directory of the host, served to the guest by this process (virtio 1.3, section 5.11).
//!
//! The FUSE server is that of fuse-backend-rs; this is what lies between it and the queues. The guest's root acts on the
//! directory as the host's root would, with the uid and gid that each request names and the capabilities that the jail
//! leaves to the worker, but only regular files and directories are ever opened, so that a device node which the guest
//! makes stays a name.

use std::{io, path::Path, sync::Arc, time::Duration};

use fuse_backend_rs::{
    abi::fuse_abi::FsOptions,
    api::{Vfs, VfsOptions, filesystem::FileSystem, server::Server},
    passthrough::{CachePolicy, Config, PassthroughFs},
};
use virtio_bindings::{
    virtio_ids::VIRTIO_ID_FS,
    virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC},
};
use virtio_queue::QueueT;

use self::{known::Known, serve::Service};
use super::{Activation, VirtioDevice, common, worker::Job};
use crate::jail::Duty;

mod known;
mod serve;
#[cfg(test)]
mod tests;

/// hiprio, and one request queue (virtio 1.3, 5.11.2). A request of 1 MiB takes 256 pages and a few descriptors more.
const QUEUE_SIZES: [u16; 2] = [128, 1024];
/// Bytes of the tag in configuration space (virtio 1.3, 5.11.4).
const TAG_LEN: usize = 36;
/// How long the guest may believe what it knows of a name or of a file's attributes. The host changes what it shares
/// while the guest runs (a bind mount that is set up, a configuration that is replaced), and cannot tell: the guest
/// sees it after this time at most. So it is with names that are not there. File contents are checked whenever a file is
/// opened, and when its attributes are looked at.
const CACHED_FOR: Duration = Duration::from_secs(1);

/// Why there is no virtio-fs device.
#[derive(Debug, thiserror::Error)]
pub enum FsError {
    #[error("the tag {tag:?} of a share is not 1 to 36 bytes long, or has a NUL in it")]
    Tag { tag: String },
    #[error("the path {dir:?} of share {tag:?} is not UTF-8")]
    Path { tag: String, dir: std::path::PathBuf },
    #[error("cannot serve {dir:?} as share {tag:?}")]
    Serve {
        tag: String,
        dir: String,
        #[source]
        source: io::Error,
    },
}

/// The device.
pub struct Fs {
    config: [u8; TAG_LEN + 4],
    vfs: Arc<Vfs>,
}

impl Fs {
    /// Serves `dir`, and what is or comes to be mounted under it, as `tag`. Clears the process's umask, since the guest
    /// has its own.
    pub fn new(tag: &str, dir: &Path) -> Result<Self, FsError> {
        if tag.is_empty() || tag.len() > TAG_LEN || tag.contains('\0') {
            return Err(FsError::Tag { tag: tag.to_owned() });
        }
        let Some(dir) = dir.to_str() else {
            return Err(FsError::Path { tag: tag.to_owned(), dir: dir.to_owned() });
        };
        let failed = |source| FsError::Serve { tag: tag.to_owned(), dir: dir.to_owned(), source };
        let files = passthrough(dir).map_err(failed)?;
        let vfs = Vfs::new(options());
        vfs.mount(Box::new(files), "/").map_err(|error| failed(io::Error::other(error)))?;

        let mut config = [0; TAG_LEN + 4];
        config[..tag.len()].copy_from_slice(tag.as_bytes());
        config[TAG_LEN] = 1; // num_request_queues, little-endian
        Ok(Self { config, vfs: Arc::new(vfs) })
    }
}

/// The files of `dir`.
fn passthrough(dir: &str) -> io::Result<PassthroughFs> {
    if !std::fs::metadata(dir)?.is_dir() {
        return Err(io::ErrorKind::NotADirectory.into());
    }
    let files = PassthroughFs::new(Config {
        root_dir: dir.to_owned(),
        // Close-to-open: unlike with `Never`, files can be mapped and run, and unlike with `Always`, the host may
        // change them.
        cache_policy: CachePolicy::Auto,
        entry_timeout: CACHED_FOR,
        attr_timeout: CACHED_FOR,
        // Written pages would linger in the guest, where the host does not see them.
        writeback: false,
        xattr: true,
        killpriv_v2: true,
        // The Vfs above checks names and negotiates, and wants its file systems to be ready.
        do_import: false,
        ..Config::default()
    })?;
    files.import()?;
    Ok(files)
}

fn options() -> VfsOptions {
    let defaults = VfsOptions::default();
    VfsOptions {
        no_open: false,
        no_opendir: false,
        no_writeback: true,
        killpriv_v2: true,
        // There is no DAX window.
        out_opts: defaults.out_opts - FsOptions::PERFILE_DAX,
        ..defaults
    }
}

impl VirtioDevice for Fs {
    fn duty(&self) -> Duty {
        Duty::Fs
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
        common::read_config(&self.config, offset, data);
    }

    fn activate(&mut self, activation: Activation) -> io::Result<Job> {
        let Activation { memory, queues, interrupt, log, .. } = activation;
        if queues.len() != QUEUE_SIZES.len() || !queues.iter().all(|queue| queue.queue.ready()) {
            return Err(io::Error::other("the driver did not set up the queues of virtio-fs"));
        }
        let vfs = self.vfs.clone();
        Ok(Box::new(move |stop| {
            let (server, known) = (Server::new(vfs.clone()), Known::new(vfs.clone()));
            let served = Service { memory: &memory, server, known, interrupt: &interrupt }.run(queues, stop);
            common::conclude("virtio-fs", served, &interrupt, &log);
            // The next driver starts with FUSE_INIT, and knows no file.
            vfs.destroy();
        }))
    }
}
