//! The inner host saved when it has booted and settled, so that a run starts in a second.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::image::Image;
use super::payload::{Payload, Put};
use super::qemu::{Accelerator, Machine, Origin, shape};
use super::session::{Io, Limit, Session};
use super::{Failure, in_work};
use crate::cache::{Cache, Key};
use crate::progress::{run_logged, step};
use crate::tools::Tools;

/// How long the inner host may take to boot. Some 20 s on an idle machine; 110 s was seen on a busy one.
const BOOT_LIMIT: Duration = Duration::from_secs(300);

/// Ends when the inner host has nothing more to do. What a run will use is in the page cache then.
const SETTLE: &str = "\
set -e
systemctl is-system-running --wait || { systemctl --failed --no-legend; exit 1; }
modprobe kvm_amd || modprobe kvm_intel
ctr version
runc --version
sync
";

/// Name of the states in the cache.
const NAME: &str = "inner-state";

/// A saved state.
#[derive(Debug, Clone)]
pub(super) struct State {
    /// qcow2 file on top of the image's disk.
    pub(super) disk: PathBuf,
    /// Memory and devices, written by QEMU.
    pub(super) memory: PathBuf,
    /// The key of its entry in the cache.
    pub(super) key: Key,
}

impl State {
    /// Boots the inner host and saves it, if there is no state of it in the cache: about half a minute.
    ///
    /// `rig` is the key of what is saved.
    pub(super) fn ensure(
        cache: &Cache,
        tools: &Tools,
        image: &Image,
        runner: &Path,
        rig: &Key,
    ) -> Result<State> {
        let key = next_key(cache, &rig.clone().bytes(image.uuid))?;
        let dir = cache.entry(NAME, &key, |dir| {
            step("booting the inner host, to save its state", || make(cache, tools, image, runner, dir))
        })?;
        Ok(State { disk: dir.join("disk.qcow2"), memory: dir.join("memory"), key })
    }

    /// Removes it for all who share the cache, since no inner host comes up from it. Returns the file with the reason.
    pub(super) fn discard(&self, cache: &Cache, reason: &anyhow::Error) -> Result<PathBuf> {
        cache.discard(NAME, &self.key, &format!("{reason:#}\n"))?;
        Ok(cache.discarded(NAME, &self.key))
    }
}

/// The digest of the inner host and of the machine that runs it.
pub(super) fn rig_key(tools: &Tools, image: &Image, runner: &Path) -> Result<Key> {
    let key = Key::new()
        .key(&image.key)
        .bytes(SETTLE)
        .bytes(shape().join(" "))
        .file(runner)?
        // Says the version of QEMU, and of all it depends on.
        .bytes(tools.packages()?);
    match Accelerator::detect() {
        Accelerator::Kvm => key.bytes(this_processor()?).file(Path::new("/proc/sys/kernel/osrelease")),
        Accelerator::Tcg => Ok(key),
    }
}

/// The key of the first state that was not discarded.
fn next_key(cache: &Cache, key: &Key) -> Result<Key> {
    let mut keys = (0..=u8::MAX).map(|attempt| key.clone().bytes([attempt]));
    keys.find(|key| !cache.is_discarded(NAME, key)).context("each of many saved states was discarded")
}

fn make(cache: &Cache, tools: &Tools, image: &Image, runner: &Path, dir: &Path) -> Result<()> {
    fs::create_dir(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    let disk = dir.join("disk.qcow2");
    let mut create = tools.command(cache.dir(), "qemu-img");
    create.args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"]);
    create.arg(in_work(cache, &image.disk)).arg(in_work(cache, &disk));
    run_logged(&mut create, &cache.log("qemu-img"))?;

    let put = Put { local: runner.into(), remote: "/usr/local/lib/rig-runner".into() };
    let payload = Payload::new(cache, &[put])?;
    let machine =
        Machine::start(cache, tools, image, &payload, Origin::Boot(&disk)).map_err(Failure::into_error)?;
    let mut session = Session::begin(machine, 0, BOOT_LIMIT).map_err(Failure::into_error)?;
    let mut output = Vec::new();
    let argv = ["sh", "-c", SETTLE].map(String::from);
    let status = session.run(&argv, Io::Captured(&mut output), Limit::Whole(BOOT_LIMIT))?;
    if status != 0 {
        bail!("the inner host does not settle: {}", String::from_utf8_lossy(&output));
    }
    session.save(&in_work(cache, &dir.join("memory")))
}

/// The model of this machine's processor, which a state saved under KVM depends on.
fn this_processor() -> Result<String> {
    let info = fs::read_to_string("/proc/cpuinfo").context("cannot read /proc/cpuinfo")?;
    let lines = info.lines().take_while(|line| !line.is_empty());
    Ok(lines.filter(|line| line.starts_with("model") || line.starts_with("flags")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_takes_the_place_of_a_discarded_state_has_another_key() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path()).unwrap();
        let key = || next_key(&cache, &Key::new()).unwrap();
        let first = State { disk: PathBuf::new(), memory: PathBuf::new(), key: key() };
        assert_eq!(first.key.hex(), key().hex());
        // Two runs find out the same.
        for _ in 0..2 {
            let reason = first.discard(&cache, &anyhow::anyhow!("it hangs").context("no answer")).unwrap();
            assert_eq!(fs::read_to_string(reason).unwrap(), "no answer: it hangs\n");
        }
        let second = State { key: key(), ..first.clone() };
        assert_ne!(first.key.hex(), second.key.hex());
        first.discard(&cache, &anyhow::anyhow!("late")).unwrap();
        assert_eq!(second.key.hex(), key().hex());
        second.discard(&cache, &anyhow::anyhow!("also bad")).unwrap();
        assert!(![&first, &second].map(|state| state.key.hex()).contains(&key().hex()));
    }
}
