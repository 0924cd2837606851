//! Directories of the host that containers of a pod mount. Those that mount the same one in the same way have one mount
//! in the share. So a file is the same inode for all of them: its locks, shared mappings and watches (inotify(7)) reach
//! from one container to the other, as on the host.
//!
//! Each is in a directory of its own in the share, `_NUMBER`, which is not the id of a container: containerd's begin
//! with a letter or a digit. Its journal is undone when the last container is gone that mounts it.

use std::{
    collections::BTreeSet,
    fs, io,
    os::{fd::OwnedFd, unix::fs::MetadataExt},
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};

use rustix::fs::{AtFlags, StatVfsMountFlags, StatxFlags, fstatvfs, statx};

use crate::{
    host::{
        journal::UndoError,
        mountinfo, no_symlinks,
        rootfs::{BindMount, Propagation, ReadOnly, RootfsError, bind_opened},
        share, state_dir,
    },
    types::error::chain,
};

/// What a volume is mounted as in its directory of the share.
const MOUNT: &str = "volume";

/// The directories that the containers of a pod have in common, or may have.
#[derive(Debug, Default)]
pub(crate) struct PodVolumes(Mutex<Table>);

/// It has at most one volume for each mount of the containers that exist.
#[derive(Debug, Default)]
struct Table {
    volumes: Vec<Volume>,
    /// The number of the next one. None is used twice.
    next: u64,
}

#[derive(Debug)]
struct Volume {
    name: String,
    source: Source,
    state: State,
    /// The ids of the containers that mount it.
    containers: BTreeSet<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// It is being mounted for its first container. That may take any time, and no other container waits for it: who
    /// comes meanwhile begins another one.
    Begun,
    Mounted,
    /// It is being unmounted, and can be used no more.
    Ending,
    /// It could not be unmounted.
    Left,
}

/// What is mounted, and how.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Source {
    device: u64,
    inode: u64,
    mount: u64,
    /// Flags of the mount. Other mounts of the same directory, and this one at another time, may have other ones.
    flags: StatVfsMountFlags,
    /// The mounts below it that are bound too. Those that come later do not come to a private mount.
    below: Vec<Below>,
    recursive: bool,
    propagation: Propagation,
    read_only: ReadOnly,
}

/// A mount below. Its id alone does not tell it: the kernel uses the id of a mount that has gone for the next one. The
/// file system of the first one still exists, because it is bound in the share, so no other file system has its device
/// number. A mount of the same file system is told by its root, unless that is another directory of the same name.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Below {
    id: u64,
    device: (u32, u32),
    root: PathBuf,
    /// Relative to the directory.
    place: PathBuf,
    options: Vec<u8>,
}

impl Source {
    fn of(bind: &BindMount, directory: &OwnedFd) -> io::Result<Self> {
        let place = no_symlinks::proc_path(directory);
        let (metadata, path) = (fs::metadata(&place)?, fs::read_link(&place)?);
        let below = match (bind.recursive, bind.propagation) {
            (true, Propagation::Private) => mounts_below(&path)?,
            _ => Vec::new(),
        };
        let mount = statx(directory, c"", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID)?.stx_mnt_id;
        Ok(Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            mount,
            flags: fstatvfs(directory)?.f_flag,
            below,
            recursive: bind.recursive,
            propagation: bind.propagation,
            // Which of the pod's containers comes first need not decide whether its own volume can be written.
            read_only: if bind.is_of_pod { ReadOnly::None } else { bind.read_only },
        })
    }

    /// Whether it serves a container that asks for `other`. The guest makes a container's own mount read-only.
    fn serves(&self, other: &Self) -> bool {
        let wanted = Self { read_only: self.read_only, ..other.clone() };
        *self == wanted && (self.read_only == ReadOnly::None || self.read_only == other.read_only)
    }
}

/// The mounts below a path.
fn mounts_below(path: &Path) -> io::Result<Vec<Below>> {
    let table = mountinfo::read()?;
    let below = mountinfo::mounts(&table).filter_map(|mount| {
        let place = mount.place.strip_prefix(path).ok().filter(|place| !place.as_os_str().is_empty())?;
        let (place, options) = (place.to_owned(), mount.options.to_owned());
        Some(Below { id: mount.id, device: mount.device, root: mount.root, place, options })
    });
    Ok(below.collect())
}

impl PodVolumes {
    /// Mounts a directory in the share of the pod whose state directory is `state`, for a container that will be
    /// [released](Self::release) even after an error. Returns the path below the share. Blocks.
    pub(crate) fn mount(
        &self,
        state: &Path,
        container: &str,
        bind: &BindMount,
        directory: &OwnedFd,
    ) -> Result<String, RootfsError> {
        let source = Source::of(bind, directory).map_err(|source| bind.failed(source))?;
        let (name, is_mounted) = self.begin(&source, container);
        let place = format!("{name}/{MOUNT}");
        if is_mounted {
            return Ok(place);
        }
        let bind = BindMount { read_only: source.read_only, ..bind.clone() };
        let fill = |own: &Path| bind_opened(&bind, directory, &own.join(MOUNT));
        let made = match state_dir::volume_journal(state, &name) {
            Ok(mut journal) => share::add(&mut journal, &state_dir::share_path(state), &name, 1, fill),
            Err(error) => Err(bind.failed(io::Error::other(error))),
        };
        self.set(&name, if made.is_ok() { State::Mounted } else { State::Left });
        made.map(|()| place)
    }

    /// The name of the volume for a container, and whether it is mounted. If not, the caller mounts it.
    fn begin(&self, source: &Source, container: &str) -> (String, bool) {
        let mut table = self.table();
        let serves = |volume: &&mut Volume| volume.state == State::Mounted && volume.source.serves(source);
        // One that can be written is that of the containers that write.
        let found = table.volumes.iter_mut().filter(serves);
        if let Some(volume) = found.min_by_key(|volume| volume.source.read_only != ReadOnly::None) {
            volume.containers.insert(container.into());
            return (volume.name.clone(), true);
        }
        let name = format!("_{}", table.next);
        table.next += 1;
        table.volumes.push(Volume {
            name: name.clone(),
            source: source.clone(),
            state: State::Begun,
            containers: BTreeSet::from([container.into()]),
        });
        (name, false)
    }

    /// Undoes what a container has on the host, and unmounts the volumes that only this one had. Blocks.
    pub(crate) fn undo_container(&self, state: &Path, container: &str) -> Result<(), UndoError> {
        state_dir::undo_container(state, container).and(self.release(state, container))
    }

    /// Unmounts the volumes that only this container had. What fails is an error of this container, and is tried again
    /// when another one is released, and when the pod ends. Blocks.
    pub(crate) fn release(&self, state: &Path, container: &str) -> Result<(), UndoError> {
        let mut unused = Vec::new();
        for volume in &mut self.table().volumes {
            let is_own = volume.containers.remove(container);
            // One that is being mounted is released once more, by whoever mounts it.
            let ends = matches!(volume.state, State::Mounted | State::Left) && volume.containers.is_empty();
            if ends {
                volume.state = State::Ending;
                unused.push((volume.name.clone(), is_own));
            }
        }
        let mut result = Ok(());
        for (name, is_own) in unused {
            let undone = state_dir::undo_volume(state, &name);
            match &undone {
                Ok(()) => self.table().volumes.retain(|volume| volume.name != name),
                Err(_) => self.set(&name, State::Left),
            }
            match undone {
                Err(error) if !is_own => {
                    tracing::warn!(
                        volume = name,
                        error = chain(&error),
                        "a volume of the pod is left mounted"
                    );
                }
                undone => result = result.and(undone),
            }
        }
        result
    }

    /// The pod has ended, and all its volumes are unmounted.
    pub(crate) fn forget(&self) {
        self.table().volumes.clear();
    }

    fn set(&self, name: &str, state: State) {
        if let Some(volume) = self.table().volumes.iter_mut().find(|volume| volume.name == name) {
            volume.state = state;
        }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use nix::mount::{MntFlags, MsFlags, mount, umount2};
    use tempfile::TempDir;

    use super::*;
    use crate::{
        host::{
            rootfs::{Opened, open_source},
            state_dir::StateDir,
        },
        testing::private_mounts,
    };

    /// A pod with a share, in a mount namespace of its own.
    struct Pod {
        dir: TempDir,
        state: PathBuf,
        volumes: PodVolumes,
    }

    impl Pod {
        fn new() -> Self {
            private_mounts();
            let dir = tempfile::tempdir().unwrap();
            let state = dir.path().join("containerd/namespace/pod");
            let (_, mut journal) = StateDir::create(&state, &[]).unwrap();
            share::make(&mut journal, &state_dir::share_path(&state)).unwrap();
            Self { dir, state, volumes: PodVolumes::default() }
        }

        fn bind(&self, name: &str, read_only: ReadOnly) -> BindMount {
            let source = self.dir.path().join(name);
            fs::create_dir_all(&source).unwrap();
            let propagation = Propagation::Private;
            BindMount { index: 3, source, recursive: true, read_only, propagation, is_of_pod: false }
        }

        /// Mounts it for the container, and returns where.
        fn mount(&self, container: &str, bind: &BindMount) -> PathBuf {
            let Opened::Directory(directory) = open_source(bind).unwrap() else { panic!("{bind:?}") };
            let place = self.volumes.mount(&self.state, container, bind, &directory).unwrap();
            self.share().join(place)
        }

        fn release(&self, container: &str) {
            self.volumes.undo_container(&self.state, container).unwrap();
        }

        fn share(&self) -> PathBuf {
            state_dir::share_path(&self.state)
        }

        /// What is in the share, and how many journals of volumes there are.
        fn left(&self) -> (usize, usize) {
            let count = |path: PathBuf| fs::read_dir(path).unwrap().count();
            (count(self.share()), count(self.state.join("volumes")))
        }
    }

    fn can_write(place: &Path) -> bool {
        fs::write(place.join("new"), "").is_ok()
    }

    #[test]
    fn containers_have_one_mount_of_a_directory_until_the_last_is_gone() {
        let pod = Pod::new();
        let (data, other) = (pod.bind("data", ReadOnly::None), pod.bind("other", ReadOnly::None));
        let first = pod.mount("a", &data);
        assert_eq!(pod.mount("b", &data), first);
        assert_ne!(pod.mount("b", &other), first);
        fs::write(data.source.join("file"), "text").unwrap();
        assert_eq!(fs::read_to_string(first.join("file")).unwrap(), "text");
        pod.release("a");
        pod.release("a");
        assert!(first.join("file").exists());
        assert_eq!(pod.left(), (2, 2));
        pod.release("b");
        assert_eq!(pod.left(), (0, 0));
        assert_ne!(pod.mount("c", &data), first, "no name is used twice");
        state_dir::clean(&pod.state).unwrap();
        assert!(!pod.state.exists() && data.source.join("file").exists());
    }

    #[test]
    fn one_that_can_be_written_serves_all_and_one_that_cannot_serves_readers() {
        let pod = Pod::new();
        let (read, write) = (pod.bind("data", ReadOnly::Top), pod.bind("data", ReadOnly::None));
        let reader = pod.mount("reader", &read);
        assert!(!can_write(&reader));
        assert_eq!(pod.mount("reader too", &read), reader);
        let writer = pod.mount("writer", &write);
        assert!(writer != reader && can_write(&writer));
        assert_eq!(pod.mount("a later reader", &read), writer);
        // Whichever container of the pod is the first: nobody else has the volume.
        let empty = BindMount { is_of_pod: true, ..pod.bind("cache", ReadOnly::Top) };
        let first = pod.mount("reader", &empty);
        assert_eq!(pod.mount("writer", &BindMount { read_only: ReadOnly::None, ..empty }), first);
        assert!(can_write(&first));
    }

    #[test]
    fn another_mount_of_a_directory_is_another_volume() {
        let pod = Pod::new();
        let data = pod.bind("data", ReadOnly::None);
        let elsewhere = pod.bind("elsewhere", ReadOnly::None);
        let flags = MsFlags::MS_BIND;
        mount(Some(&data.source), &elsewhere.source, None::<&str>, flags, None::<&str>).unwrap();
        let first = pod.mount("a", &data);
        assert_ne!(pod.mount("b", &elsewhere), first);
        let later = BindMount { propagation: Propagation::Slave, ..data.clone() };
        assert_ne!(pod.mount("b", &later), first);
        // What is at the path now is another directory.
        fs::rename(&data.source, pod.dir.path().join("away")).unwrap();
        assert_ne!(pod.mount("c", &pod.bind("data", ReadOnly::None)), first);
    }

    #[test]
    fn what_has_changed_on_the_host_is_another_volume() {
        let pod = Pod::new();
        let data = pod.bind("data", ReadOnly::None);
        mount(Some("t"), &data.source, Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
        let first = pod.mount("a", &data);
        let below = data.source.join("below");
        fs::create_dir(&below).unwrap();
        mount(Some("t"), &below, Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
        fs::write(below.join("file"), "").unwrap();
        let second = pod.mount("b", &data);
        assert!(second != first && second.join("below/file").exists() && !first.join("below/file").exists());
        // The kernel gives the next mount the lowest id that is free, so often that of the last one that has gone.
        umount2(&below, MntFlags::empty()).unwrap();
        mount(Some("t"), &below, Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
        let third = pod.mount("c", &data);
        assert!(third != second && !third.join("below/file").exists());
        let read_only = MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY;
        mount(None::<&str>, &below, None::<&str>, read_only, None::<&str>).unwrap();
        let fourth = pod.mount("d", &data);
        assert!(fourth != third && !can_write(&fourth.join("below")) && can_write(&third.join("below")));
        let moved = data.source.join("moved");
        fs::create_dir(&moved).unwrap();
        mount(Some(&below), &moved, None::<&str>, MsFlags::MS_MOVE, None::<&str>).unwrap();
        let fifth = pod.mount("e", &data);
        assert!(fifth != fourth && can_write(&fifth.join("below")) && !can_write(&fifth.join("moved")));
        mount(None::<&str>, &data.source, None::<&str>, read_only, None::<&str>).unwrap();
        let sixth = pod.mount("f", &data);
        assert!(sixth != fifth && !can_write(&sixth) && can_write(&fifth));
    }

    #[test]
    fn what_the_host_mounts_later_comes_to_who_asks_for_it() {
        let pod = Pod::new();
        let data = pod.bind("data", ReadOnly::None);
        let below = data.source.join("below");
        fs::create_dir(&below).unwrap();
        mount(Some(&data.source), &data.source, None::<&str>, MsFlags::MS_BIND, None::<&str>).unwrap();
        mount(None::<&str>, &data.source, None::<&str>, MsFlags::MS_SHARED, None::<&str>).unwrap();
        let slave = BindMount { propagation: Propagation::Slave, ..data.clone() };
        let (slave, private) = (pod.mount("a", &slave), pod.mount("b", &data));
        mount(Some("t"), &below, Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
        fs::write(below.join("file"), "").unwrap();
        assert!(slave.join("below/file").exists() && !private.join("below/file").exists());
    }

    #[test]
    fn one_that_is_being_mounted_keeps_nobody_waiting() {
        let pod = Pod::new();
        let bind = pod.bind("data", ReadOnly::None);
        let Opened::Directory(directory) = open_source(&bind).unwrap() else { panic!("{bind:?}") };
        let source = Source::of(&bind, &directory).unwrap();
        let (name, is_mounted) = pod.volumes.begin(&source, "a");
        assert!(!is_mounted);
        let second = pod.mount("b", &bind);
        assert_eq!(pod.mount("c", &bind), second);
        // The first container has given up. Whoever mounts it releases it once more.
        pod.release("a");
        assert_eq!(pod.volumes.table().volumes.len(), 2);
        pod.volumes.set(&name, State::Mounted);
        pod.release("a");
        assert_eq!(pod.volumes.table().volumes.len(), 1);
    }

    #[test]
    fn what_cannot_be_mounted_is_an_error_and_leaves_nothing() {
        let pod = Pod::new();
        let bind = pod.bind("data", ReadOnly::None);
        let Opened::Directory(directory) = open_source(&bind).unwrap() else { panic!("{bind:?}") };
        // Nothing can be mounted where the directory of the share is missing.
        let nowhere = pod.dir.path().join("nowhere");
        fs::create_dir_all(nowhere.join("volumes")).unwrap();
        let error = pod.volumes.mount(&nowhere, "a", &bind, &directory).unwrap_err();
        assert!(error.to_string().contains("share"), "{error}");
        pod.volumes.release(&nowhere, "a").unwrap();
        assert_eq!(fs::read_dir(nowhere.join("volumes")).unwrap().count(), 0);
        assert!(pod.volumes.table().volumes.is_empty());
    }
}
