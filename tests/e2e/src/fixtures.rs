//! What cases need around a container: a root directory, a spec, and changes to the host that are taken back
//! whatever happens.

use std::fs;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::signal::{SigSet, SigmaskHow, Signal};
use serde_json::Value;
use sha2::{Digest, Sha256};
use tempfile::TempDir;

use crate::command::{Finished, Size};
use crate::ctr::{Container, Host, IMAGE, NAMESPACE, Task};

/// Bulkhead's configuration on the host.
pub(crate) const CONFIGURATION: &str = "/etc/bulkhead/config.toml";

/// A directory of the host that is removed at the end.
pub(crate) fn scratch() -> Result<TempDir> {
    tempfile::Builder::new().prefix("bulkhead-e2e-").tempdir().context("cannot make a directory")
}

/// The answer of an HTTP server to a request for this path, head and all.
pub(crate) fn page_at(address: &str, path: &str, limit: Duration) -> io::Result<String> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(limit))?;
    stream.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

/// Does this for all items at once, a thread for each. All are waited for before the first failure is reported.
pub(crate) fn at_once<T: Send, R: Send>(
    items: impl IntoIterator<Item = T>,
    work: impl Fn(T) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    let items: Vec<_> = items.into_iter().collect();
    in_threads(items.len(), items, work)
}

/// Does this for all items in so many threads, which take one after the other. The results are in no order.
pub(crate) fn in_threads<T: Send, R: Send>(
    threads: usize,
    items: impl IntoIterator<Item = T, IntoIter: Send>,
    work: impl Fn(T) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    let queue = Mutex::new(items.into_iter());
    let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).next();
    let work_off = || {
        let mut results = Vec::new();
        while let Some(item) = next() {
            results.push(work(item)?);
        }
        Ok(results)
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work_off)).collect();
        let results: Vec<Result<Vec<R>>> = threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|_| Err(anyhow!("a thread panicked"))))
            .collect();
        Ok(results.into_iter().collect::<Result<Vec<_>>>()?.into_iter().flatten().collect())
    })
}

/// The path of a file that is installed beside this program.
pub(crate) fn installed(name: &str) -> Result<PathBuf> {
    let binary = std::env::current_exe().context("cannot find this binary's own path")?;
    Ok(binary.with_file_name(name))
}

/// Bytes without a pattern, the same in every run: splitmix64's.
pub(crate) fn noise(length: usize) -> Vec<u8> {
    let mut state = 0_u64;
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = state;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bytes.extend_from_slice(&(word ^ (word >> 31)).to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

/// As sha256sum(1) writes it.
pub(crate) fn digest(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The image, mounted writable in a directory of the host.
pub(crate) struct Root<'h> {
    host: &'h Host,
    directory: TempDir,
}

impl<'h> Root<'h> {
    /// Mounts it.
    pub(crate) fn mount(host: &'h Host) -> Result<Self> {
        let root = Self { host, directory: scratch()? };
        host.ctr(["images", "mount", "--rw", IMAGE]).args([root.path()]).run()?.succeeds()?;
        Ok(root)
    }

    /// Where it is mounted.
    pub(crate) fn path(&self) -> &Path {
        self.directory.path()
    }
}

impl Drop for Root<'_> {
    fn drop(&mut self) {
        let _ = self.host.ctr(["images", "unmount", "--rm"]).args([self.path()]).run();
    }
}

/// An OCI spec for `ctr run --config`, for what ctr has no flag for.
pub(crate) struct Spec<'h> {
    root: Root<'h>,
    json: Value,
}

impl<'h> Spec<'h> {
    /// ctr's default spec with this command, in a root of its own.
    pub(crate) fn of(host: &'h Host, command: &[&str]) -> Result<Self> {
        let root = Root::mount(host)?;
        let default = host.ctr(["oci", "spec"]).run()?;
        let json =
            serde_json::from_slice(&default.succeeds()?.stdout).context("ctr's default spec is not JSON")?;
        let path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
        let spec = Self { root, json };
        spec.with("/process", "args", command.into())?.with("/process", "env", [path].as_slice().into())
    }

    /// Sets the field `key` of the object at `place`, a JSON pointer.
    pub(crate) fn with(mut self, place: &str, key: &str, value: Value) -> Result<Self> {
        let object = self.json.pointer_mut(place).and_then(Value::as_object_mut);
        object.ok_or_else(|| anyhow!("the spec has no object {place}"))?.insert(key.to_owned(), value);
        Ok(self)
    }

    /// Adds a mount, after those that are there.
    pub(crate) fn with_mount(mut self, mount: Value) -> Result<Self> {
        let list = self.json.pointer_mut("/mounts").and_then(Value::as_array_mut);
        list.ok_or_else(|| anyhow!("the spec has no mounts"))?.push(mount);
        Ok(self)
    }

    /// Leaves out what is mounted at this place.
    pub(crate) fn without_mount(mut self, destination: &str) -> Result<Self> {
        let list = self.json.pointer_mut("/mounts").and_then(Value::as_array_mut);
        let list = list.ok_or_else(|| anyhow!("the spec has no mounts"))?;
        list.retain(|mount| mount.get("destination").and_then(Value::as_str) != Some(destination));
        Ok(self)
    }

    /// Runs a container with it, attached.
    pub(crate) fn run(self, container: Container<'_>) -> Result<Finished> {
        let Written { file, root: _root } = self.write(&container)?;
        container.spec(file.path()).run(&[])
    }

    /// Like [`Spec::run`], in a terminal of this size.
    pub(crate) fn run_in_terminal(self, container: Container<'_>, size: Size) -> Result<Finished> {
        let Written { file, root: _root } = self.write(&container)?;
        container.spec(file.path()).start_in_terminal(size, &[])?.finish()
    }

    /// Starts a container with it, detached, with a terminal that nobody looks at yet.
    pub(crate) fn detach_in_terminal(self, container: Container<'h>, size: Size) -> Result<Rooted<'h>> {
        let Written { file, root } = self.write(&container)?;
        Ok(Rooted { task: container.spec(file.path()).detach_in_terminal(size, &[])?, _root: root })
    }

    fn write(self, container: &Container<'_>) -> Result<Written<'h>> {
        let cgroup = format!("/{NAMESPACE}/{}", container.id());
        let root = self.root.path().display().to_string();
        let Self { root, json } =
            self.with("/linux", "cgroupsPath", cgroup.into())?.with("/root", "path", root.into())?;
        let file = tempfile::NamedTempFile::new().context("cannot make a file for the spec")?;
        serde_json::to_writer(file.as_file(), &json).context("cannot write the spec")?;
        Ok(Written { file, root })
    }
}

/// A spec in a file, and the root that it names.
struct Written<'h> {
    file: tempfile::NamedTempFile,
    root: Root<'h>,
}

/// A container and its root, which goes after it.
pub(crate) struct Rooted<'h> {
    pub(crate) task: Task<'h>,
    _root: Root<'h>,
}

/// Holds back the signals that would end this process while the host is altered: they are delivered after it is
/// as it was.
struct Undisturbed {
    before: SigSet,
}

impl Undisturbed {
    fn begin() -> Result<Self> {
        let mut held = SigSet::empty();
        [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP].into_iter().for_each(|signal| held.add(signal));
        let before = held.thread_swap_mask(SigmaskHow::SIG_BLOCK).context("cannot hold back signals")?;
        Ok(Self { before })
    }
}

impl Drop for Undisturbed {
    fn drop(&mut self) {
        let _ = self.before.thread_set_mask();
    }
}

/// A file of the host that is out of its place for a while.
pub(crate) struct MovedAway {
    place: PathBuf,
    meanwhile: PathBuf,
    // Dropped after the file is back.
    _undisturbed: Undisturbed,
}

impl MovedAway {
    /// Renames it.
    pub(crate) fn file(place: &Path) -> Result<Self> {
        let undisturbed = Undisturbed::begin()?;
        let mut name = place.file_name().unwrap_or_default().to_owned();
        name.push(format!(".bulkhead-e2e-{}", std::process::id()));
        let meanwhile = place.with_file_name(name);
        fs::rename(place, &meanwhile).with_context(|| format!("cannot move {} away", place.display()))?;
        Ok(Self { place: place.to_owned(), meanwhile, _undisturbed: undisturbed })
    }
}

impl Drop for MovedAway {
    fn drop(&mut self) {
        if let Err(error) = fs::rename(&self.meanwhile, &self.place) {
            eprintln!("cannot move {} back to {}: {error}", self.meanwhile.display(), self.place.display());
        }
    }
}

/// A file of the host that has another content for a while.
pub(crate) struct Replaced {
    place: PathBuf,
    // None: there was no file.
    _before: Option<MovedAway>,
    _undisturbed: Undisturbed,
}

impl Replaced {
    /// Writes the content in a file at this place.
    pub(crate) fn file(place: &Path, content: &str) -> Result<Self> {
        let undisturbed = Undisturbed::begin()?;
        if let Some(directory) = place.parent() {
            fs::create_dir_all(directory).with_context(|| format!("cannot make {}", directory.display()))?;
        }
        let before = if place.exists() { Some(MovedAway::file(place)?) } else { None };
        fs::write(place, content).with_context(|| format!("cannot write {}", place.display()))?;
        Ok(Self { place: place.to_owned(), _before: before, _undisturbed: undisturbed })
    }
}

impl Drop for Replaced {
    fn drop(&mut self) {
        // What was there before comes back over it afterwards, when the fields are dropped.
        match fs::remove_file(&self.place) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => eprintln!("cannot remove {}: {error}", self.place.display()),
        }
    }
}

/// A directory of the host over which an empty file system is mounted for a while.
pub(crate) struct Covered {
    place: PathBuf,
    _undisturbed: Undisturbed,
}

impl Covered {
    /// Mounts it, with these empty directories in it.
    pub(crate) fn directory(place: &Path, with: &[&str]) -> Result<Self> {
        let covered = Self::mount(place, None)?;
        for name in with {
            fs::create_dir(place.join(name)).with_context(|| format!("cannot make {name}"))?;
        }
        Ok(covered)
    }

    /// Mounts one that is full after a few bytes.
    pub(crate) fn without_room(place: &Path) -> Result<Self> {
        Self::mount(place, Some("size=64k"))
    }

    fn mount(place: &Path, options: Option<&str>) -> Result<Self> {
        let undisturbed = Undisturbed::begin()?;
        mount(Some("bulkhead-e2e"), place, Some("tmpfs"), MsFlags::empty(), options)
            .with_context(|| format!("cannot cover {}", place.display()))?;
        Ok(Self { place: place.to_owned(), _undisturbed: undisturbed })
    }
}

impl Drop for Covered {
    fn drop(&mut self) {
        if let Err(error) = umount2(&self.place, MntFlags::MNT_DETACH) {
            eprintln!("cannot uncover {}: {error}", self.place.display());
        }
    }
}

/// The host's pool of 2 MiB pages, which has as many as a case needs for a while.
pub(crate) struct HugePages {
    before: String,
    _undisturbed: Undisturbed,
}

impl HugePages {
    const STATE: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB";

    /// Has it have so many, all of them free.
    pub(crate) fn set_aside(pages: u64) -> Result<Self> {
        let undisturbed = Undisturbed::begin()?;
        let before = fs::read_to_string(Self::file("nr_hugepages")).context("the host has no huge pages")?;
        let pool = Self { before, _undisturbed: undisturbed };
        // The host finds them where its free memory is in pieces that are large enough.
        for (file, value) in [("drop_caches", "3"), ("compact_memory", "1")] {
            fs::write(Path::new("/proc/sys/vm").join(file), value)
                .with_context(|| format!("cannot write to {file}"))?;
        }
        fs::write(Self::file("nr_hugepages"), pages.to_string()).context("cannot set huge pages aside")?;
        let free = pool.free()?;
        anyhow::ensure!(free == pages, "expected  {pages} huge pages in the host's pool\ncame      {free}");
        Ok(pool)
    }

    /// As many are free.
    pub(crate) fn free(&self) -> Result<u64> {
        let text = fs::read_to_string(Self::file("free_hugepages")).context("cannot count huge pages")?;
        text.trim().parse().with_context(|| format!("{text:?} is no count of huge pages"))
    }

    fn file(name: &str) -> PathBuf {
        Path::new(Self::STATE).join(name)
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        if let Err(error) = fs::write(Self::file("nr_hugepages"), self.before.trim()) {
            eprintln!("cannot have {} huge pages again: {error}", self.before.trim());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_replaced_file_comes_back() {
        let directory = scratch().unwrap();
        let file = directory.path().join("file");
        fs::write(&file, "before").unwrap();
        let replaced = Replaced::file(&file, "meanwhile").unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "meanwhile");
        drop(replaced);
        assert_eq!(fs::read_to_string(&file).unwrap(), "before");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_file_that_was_not_there_is_gone_again() {
        let directory = scratch().unwrap();
        let file = directory.path().join("file");
        drop(Replaced::file(&file, "meanwhile").unwrap());
        assert!(!file.exists());
    }

    #[test]
    fn a_file_moved_away_comes_back() {
        let directory = scratch().unwrap();
        let file = directory.path().join("file");
        fs::write(&file, "content").unwrap();
        let away = MovedAway::file(&file).unwrap();
        assert!(!file.exists());
        drop(away);
        assert_eq!(fs::read_to_string(&file).unwrap(), "content");
    }
}
