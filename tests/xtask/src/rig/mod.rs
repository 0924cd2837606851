//! The rig: a Debian 13 host with KVM and containerd in a QEMU process. The tests and the demo run in it.
//!
//! `image` makes its disk, and `qemu` runs it. `state` saves it after its boot, so that a run need not wait for the
//! boot. `payload` has the files of a run, and `session` runs commands in it.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Error, Result, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::cache::{Cache, Key};
use crate::dist;
use crate::progress;
use crate::tools::Tools;

mod image;
mod payload;
mod qemu;
mod qmp;
mod session;
mod state;

use image::Image;
pub(crate) use payload::{Payload, Put};
pub(crate) use qemu::{Accelerator, has_usual_processors};
use qemu::{Machine, Origin};
pub(crate) use session::{Io, Limit, Session};
use state::State;

/// How long the inner host may take to answer after its start from the saved state. It takes seconds, on a busy machine
/// perhaps a minute.
const RESTORE_LIMIT: Duration = Duration::from_secs(180);

/// A rig whose parts are all in the cache.
pub(crate) struct Rig {
    cache: Cache,
    tools: Tools,
    image: Image,
    runner: PathBuf,
    key: Key,
    current: Mutex<Current>,
}

/// What the next inner host is started from.
struct Current {
    state: State,
    /// Whether this process has made it in the place of another one. It does so once: if the new state is no better,
    /// the machine is to blame, and not the state.
    renewed: bool,
}

impl Rig {
    /// Makes what is missing of the rig: some minutes the first time.
    pub(crate) fn ensure(cache: &Cache, tools: &Tools) -> Result<Rig> {
        let image = Image::ensure(cache, tools)?;
        let runner = dist::rig_runner()?;
        let key = state::rig_key(tools, &image, &runner)?;
        let state = State::ensure(cache, tools, &image, &runner, &key)?;
        let (cache, tools) = (cache.clone(), tools.clone());
        Ok(Rig { cache, tools, image, runner, key, current: Mutex::new(Current { state, renewed: false }) })
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
        let state = self.current.lock().unwrap_or_else(PoisonError::into_inner).state.clone();
        let start = |state: &State| {
            let origin = Origin::Saved(state);
            let machine = Machine::start(&self.cache, &self.tools, &self.image, payload, origin)?;
            Session::begin(machine, payload.bytes(), RESTORE_LIMIT)
        };
        start_or_renew(&state, start, |reason| self.renew(&state, reason))
    }

    /// Makes another state in the place of one from which no inner host comes up.
    fn renew(&self, bad: &State, reason: &Error) -> Result<State> {
        // Held until the new state is there: a thread that found out the same in the meantime gets it too.
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if current.state.memory == bad.memory {
            ensure!(!current.renewed, "the inner host does not come up from a new state either");
            let log = bad.discard(&self.cache, reason)?;
            progress::say(&format!(
                "The inner host does not come up from its saved state, so another is made; {} says why.",
                log.display()
            ));
            let state = State::ensure(&self.cache, &self.tools, &self.image, &self.runner, &self.key)?;
            *current = Current { state, renewed: true };
        }
        Ok(current.state.clone())
    }
}

/// Why there is no inner host that takes commands.
#[derive(Debug)]
enum Failure {
    /// QEMU refuses to load it, ends or hangs, or the inner host does not answer. What it was started from may be bad.
    NotUp(Error),
    /// Anything else.
    Other(Error),
}

impl Failure {
    fn into_error(self) -> Error {
        match self {
            Failure::NotUp(error) | Failure::Other(error) => error,
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Other(error)
    }
}

/// Starts an inner host from a saved state. If it does not come up, starts it once more, from a new state.
fn start_or_renew<S, T>(
    state: &S,
    mut start: impl FnMut(&S) -> Result<T, Failure>,
    renew: impl FnOnce(&Error) -> Result<S>,
) -> Result<T> {
    match start(state) {
        Err(Failure::NotUp(reason)) => {
            let state = renew(&reason).with_context(|| format!("cannot renew a saved state: {reason:#}"))?;
            start(&state).map_err(Failure::into_error)
        }
        started => started.map_err(Failure::into_error),
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

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::anyhow;

    /// Starts from the state 0, with those outcomes in turn. Returns the states that were tried, and the outcome.
    fn tries<const N: usize>(outcomes: [Result<(), Failure>; N]) -> (Vec<u32>, Result<()>) {
        let mut outcomes = outcomes.into_iter();
        let mut tried = Vec::new();
        let start = |state: &u32| {
            tried.push(*state);
            outcomes.next().unwrap()
        };
        let result = start_or_renew(&0, start, |_| Ok(1));
        assert!(outcomes.next().is_none());
        (tried, result)
    }

    fn not_up(reason: &'static str) -> Result<(), Failure> {
        Err(Failure::NotUp(anyhow!(reason)))
    }

    #[test]
    fn a_state_that_comes_up_is_kept() {
        let (tried, result) = tries([Ok(())]);
        result.unwrap();
        assert_eq!(tried, [0]);
    }

    #[test]
    fn a_state_that_does_not_come_up_is_renewed_once() {
        let (tried, result) = tries([not_up("truncated"), Ok(())]);
        result.unwrap();
        assert_eq!(tried, [0, 1]);
        let (tried, result) = tries([not_up("truncated"), not_up("again")]);
        assert_eq!(tried, [0, 1]);
        assert_eq!(result.unwrap_err().to_string(), "again");
    }

    #[test]
    fn a_state_is_not_renewed_for_what_is_not_its_fault() {
        let (tried, result) = tries([Err(anyhow!("no payload").into())]);
        assert_eq!(tried, [0]);
        assert_eq!(result.unwrap_err().to_string(), "no payload");
    }

    #[test]
    fn a_state_that_cannot_be_renewed_says_why_it_had_to_be() {
        let start = |_: &u32| -> Result<(), Failure> { Err(Failure::NotUp(anyhow!("truncated"))) };
        let error = start_or_renew(&0, start, |_| Err(anyhow!("no space"))).unwrap_err();
        let text = format!("{error:#}");
        assert!(text.contains("truncated") && text.contains("no space"), "{text}");
    }
}
