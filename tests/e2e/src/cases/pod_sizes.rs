//! Volumes with a limit of their size (`sizeLimit` of an `emptyDir`). kubelet mounts a tmpfs of this size for a volume
//! in memory. For a volume on a disk it passes nothing on: it looks at the directory, and evicts the pod.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Result;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use tempfile::TempDir;

use super::Case;
use crate::ctr::Host;
use crate::pods::Pod;

pub(super) const CASES: &[Case] = &[Case::both("a_volume_is_full_at_the_size_of_its_tmpfs", is_full)];

/// The size of the tmpfs, and what fits into it: whole pages.
const SIZE: &str = "size=1000000,mode=1777";
const FITS: u32 = 245 * 4096;

/// A tmpfs of this size, until it is dropped.
struct Sized {
    path: PathBuf,
    _root: TempDir,
}

impl Sized {
    /// Mounts it below a directory of its own.
    fn mount(place: &str) -> Result<Self> {
        let root = TempDir::new()?;
        let path = root.path().join(place);
        fs::create_dir_all(&path)?;
        mount(Some("tmpfs"), &path, Some("tmpfs"), MsFlags::empty(), Some(SIZE))?;
        Ok(Self { path, _root: root })
    }

    fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Sized {
    fn drop(&mut self) {
        let _ = umount2(&self.path, MntFlags::MNT_DETACH);
    }
}

fn is_full(host: &Host) -> Result<()> {
    let pod = Pod::start(host)?;
    let kubelets = Sized::mount(&format!("pods/{}/volumes/kubernetes.io~empty-dir/cache", pod.uid()?))?;
    // Of somebody else: the guest writes to the host's.
    let another = Sized::mount("volume")?;
    let container = pod.container().mount(kubelets.path(), "/cache").mount(another.path(), "/other");
    let container = container.start(&["sleep", "1000"])?;
    for volume in ["/cache", "/other"] {
        for block in ["10000", "64k"] {
            let script = format!(
                "cd {volume} && dd if=/dev/zero of=fill bs={block} 2>&1 | grep -o 'No space left on device'; \
                 stat -c %s fill; rm fill; echo text > other && cat other && rm other"
            );
            let expected = format!("No space left on device\n{FITS}\ntext\n");
            container.sh(&script)?.succeeds()?.prints(&expected)?;
        }
    }
    pod.remove()
}
