//! Volumes that kubelet keeps up to date: ConfigMap, Secret, downward API and projected volumes. kubelet's AtomicWriter
//! writes each version to a new directory, and replaces the link `..data` to it.
//!
//! virtio-fs has no inotify events for what the host changes. So the guest has a copy of such a volume, and the shim
//! watches the original.

mod contents;

pub(crate) use contents::{Contents, Entry, Kind};

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    io,
    os::fd::OwnedFd,
    path::{Component, Path, PathBuf},
    sync::{Arc, Mutex},
};

use rustix::{
    fs::{CWD, FileType, fstat, inotify::WatchFlags, major, minor},
    io::Errno,
    mount::{OpenTreeFlags, open_tree},
};

use crate::{
    host::directory_watch::{self, Changes, Watch},
    types::lock::lock,
};

/// The directories of these volumes in kubelet's directory of a pod.
const KINDS: [&str; 4] = [
    "kubernetes.io~configmap",
    "kubernetes.io~secret",
    "kubernetes.io~downward-api",
    "kubernetes.io~projected",
];

/// Memory that one version of a volume may take in its copy, bytes. kubelet allows 1 MiB for each ConfigMap and Secret.
/// A request to the agent takes 4 MiB.
pub(crate) const MOST_VOLUME_BYTES: u64 = 3 << 20;
/// The same for all of a pod.
const MOST_OF_POD: u64 = 16 << 20;
/// How many volumes of a pod can have a copy.
const MOST_VOLUMES: usize = 64;

/// Why a volume cannot be copied.
#[derive(Debug, thiserror::Error)]
pub(crate) enum VolumeError {
    #[error("cannot read {name:?}")]
    Read { name: PathBuf, source: io::Error },
    #[error("cannot keep a mount of {name:?} apart from the host's")]
    Private { name: PathBuf, source: io::Error },
    #[error("cannot watch it")]
    Watch(#[source] io::Error),
    #[error("..data is not a link to a directory beside it, as kubelet makes it")]
    Layout,
    #[error("kubelet puts nothing like {name:?} there")]
    Foreign { name: PathBuf },
    #[error("{name:?} has the extended attribute {attribute}")]
    Attribute { name: PathBuf, attribute: String },
    #[error("its files take more than {} MiB, each rounded up to pages", MOST_VOLUME_BYTES >> 20)]
    TooLarge,
    #[error("the pod has {MOST_VOLUMES} other volumes of this kind")]
    TooMany,
    #[error("the pod's volumes of this kind take more than {} MiB", MOST_OF_POD >> 20)]
    TooLargeTogether,
    #[error("it changes all the time")]
    Unsteady,
}

/// A volume of kubelet that is watched.
#[derive(Debug)]
pub(crate) struct KubeletVolume {
    /// Its name among the volumes of the guest: the numbers of the host's directory.
    pub(crate) name: String,
    /// Where it is, for messages.
    pub(crate) path: PathBuf,
    /// A mount of the directory that is attached nowhere: it does not keep kubelet from unmounting its own.
    directory: OwnedFd,
    watch: Watch,
}

/// The volume of kubelet that this source of a bind mount is, and what its copy would take. None: it is something else.
/// `pod_uid` is kubelet's name for the pod. A volume of another pod is something else.
pub(crate) fn find(
    source: &Path,
    pod_uid: Option<&str>,
) -> Result<Option<(KubeletVolume, u64)>, VolumeError> {
    if !is_volume(source, pod_uid) {
        return Ok(None);
    }
    let failed = |errno: Errno| VolumeError::Read { name: source.into(), source: errno.into() };
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let directory = open_tree(CWD, source, flags).map_err(failed)?;
    directory_watch::keep_apart(&directory)
        .map_err(|errno| VolumeError::Private { name: source.into(), source: errno.into() })?;
    let stat = fstat(&directory).map_err(failed)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
        return Ok(None);
    }
    let name = format!("kubelet-{}-{}-{}", major(stat.st_dev), minor(stat.st_dev), stat.st_ino);
    // A change of the owner or the mode may come after that of the link.
    let events = WatchFlags::MOVED_TO | WatchFlags::CREATE | WatchFlags::DELETE | WatchFlags::ATTRIB;
    let watch = Watch::new(&directory, events).map_err(VolumeError::Watch)?;
    let volume = KubeletVolume { name, path: source.into(), directory, watch };
    let size = volume.read()?.size;
    Ok(Some((volume, size)))
}

/// Whether this is where kubelet has a whole volume of the pod: `pods/UID/volumes/KIND/NAME`. Parts of volumes
/// (`subPath`) are elsewhere, and are never updated, as on runc.
fn is_volume(path: &Path, pod_uid: Option<&str>) -> bool {
    let name_of = |nth: usize| path.ancestors().nth(nth).and_then(Path::file_name);
    path.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)))
        && name_of(1).is_some_and(|kind| KINDS.map(OsStr::new).contains(&kind))
        && name_of(2) == Some(OsStr::new("volumes"))
        && pod_uid.is_none_or(|uid| name_of(3) == Some(OsStr::new(uid)))
}

impl KubeletVolume {
    /// Reads what is in it. Blocks.
    pub(crate) fn read(&self) -> Result<Contents, VolumeError> {
        contents::read(&self.directory)
    }

    /// Its changes from now on, and those since it was found.
    pub(crate) fn changes(&self) -> io::Result<Changes> {
        self.watch.changes()
    }
}

/// What the latest versions in the copies of a pod take. The guest keeps each until it ends.
#[derive(Debug, Clone, Default)]
pub(crate) struct Budget(Arc<Mutex<BTreeMap<String, u64>>>);

impl Budget {
    /// Takes this many bytes for the volume of this name, instead of what it had before.
    pub(crate) fn take(&self, name: &str, bytes: u64) -> Result<(), VolumeError> {
        let mut taken = lock(&self.0);
        let others = || taken.iter().filter(|(other, _)| *other != name);
        if others().count() >= MOST_VOLUMES {
            return Err(VolumeError::TooMany);
        }
        if others().map(|(_, bytes)| bytes).sum::<u64>() + bytes > MOST_OF_POD {
            return Err(VolumeError::TooLargeTogether);
        }
        taken.insert(name.to_owned(), bytes);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
