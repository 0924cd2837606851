//! The rig: a Debian 13 host with KVM and containerd, emulated by QEMU, in which what is under test runs.
//!
//! `image` makes its disk, `qemu` runs it, `state` saves it booted and settled so that a run need not wait for its
//! boot, `payload` is what a run brings along, and `session` is the run of commands in it.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::cache::{Cache, Key};
use crate::dist;
use crate::tools::Tools;

mod image;
mod payload;
mod qemu;
mod qmp;
mod session;
mod state;

use image::Image;
pub(crate) use payload::{Payload, Put};
pub(crate) use qemu::Accelerator;
use qemu::{Machine, Origin};
pub(crate) use session::{Io, Session};
use state::State;

/// How long the inner host may take to answer after its start from the saved state.
const RESTORE_LIMIT: Duration = Duration::from_secs(60);

/// A rig whose parts are all in the cache.
pub(crate) struct Rig {
    cache: Cache,
    tools: Tools,
    image: Image,
    key: Key,
    state: State,
}

impl Rig {
    /// Makes what is missing of the rig: some three minutes the first time.
    pub(crate) fn ensure(cache: &Cache, tools: &Tools) -> Result<Rig> {
        let image = Image::ensure(cache, tools)?;
        let runner = dist::rig_runner()?;
        let key = state::rig_key(tools, &image, &runner)?;
        let state = State::ensure(cache, tools, &image, &runner, &key)?;
        Ok(Rig { cache: cache.clone(), tools: tools.clone(), image, key, state })
    }

    /// The digest of all that the rig has before a payload comes: each package of the inner host and of the tool root
    /// in its version, the configuration, the machine's shape, and the runner. The same on two machines that have the
    /// same of all these.
    pub(crate) fn key(&self) -> &Key {
        &self.key
    }

    /// Lists the packages of the inner host.
    pub(crate) fn packages(&self) -> &str {
        &self.image.packages
    }

    /// Starts a fresh inner host, with the files of the payload in place. It is gone when the session is dropped.
    pub(crate) fn start(&self, payload: &Payload) -> Result<Session> {
        let origin = Origin::Saved(&self.state);
        let machine = Machine::start(&self.cache, &self.tools, &self.image, payload, origin)?;
        Session::begin(machine, payload.bytes(), RESTORE_LIMIT)
    }
}

/// Whether a channel can be read or written after so long at most.
fn is_ready(channel: impl AsFd, to: PollFlags, limit: Duration) -> Result<bool> {
    let limit = Timespec::try_from(limit).context("too long a time")?;
    match poll(&mut [PollFd::new(&channel, to)], Some(&limit)) {
        Ok(ready) => Ok(ready > 0),
        Err(Errno::INTR) => Ok(false),
        Err(error) => Err(error).context("cannot wait for a channel"),
    }
}

/// The path at which the tool root has a path of the cache, when the cache is its /work.
fn in_work(cache: &Cache, path: &Path) -> PathBuf {
    path.strip_prefix(cache.dir())
        .map_or_else(|_| path.to_path_buf(), |inside| Path::new("/work").join(inside))
}
