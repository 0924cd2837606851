//! What a run brings into the inner host: a tar on a disk.

use std::fs::File;
use std::io::{self, Seek};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, Result, bail};

use crate::cache::Cache;

/// Size of the disk, the same in every run, since the saved state knows it. The file is sparse.
const DISK_SIZE: u64 = 4 << 30;

/// A file or directory and its absolute path in the inner host: `LOCAL:REMOTE`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Put {
    pub(crate) local: PathBuf,
    pub(crate) remote: PathBuf,
}

impl FromStr for Put {
    type Err = String;

    fn from_str(text: &str) -> Result<Put, String> {
        match text.rsplit_once(':') {
            Some((local, remote)) if !local.is_empty() && remote.starts_with('/') && remote.len() > 1 => {
                Ok(Put { local: local.into(), remote: remote.into() })
            }
            _ => Err(format!("`{text}` is not LOCAL:REMOTE with an absolute REMOTE")),
        }
    }
}

/// A disk file without a name, so that nothing is left of it however the run ends.
#[derive(Debug)]
pub(crate) struct Payload {
    disk: File,
    bytes: u64,
}

impl Payload {
    /// Packs the files, with their modes, owned by root. Directories on the way to them are not packed: those of
    /// the inner host stay what they are, such as the symlink /bin.
    pub(crate) fn new(cache: &Cache, puts: &[Put]) -> Result<Payload> {
        let disk = tempfile::tempfile_in(cache.dir()).context("cannot make a payload disk in the cache")?;
        let mut bytes = 0;
        if !puts.is_empty() {
            let mut tar = tar::Builder::new(io::BufWriter::with_capacity(1 << 20, &disk));
            tar.follow_symlinks(false);
            for put in puts {
                pack(&mut tar, put).with_context(|| {
                    format!("cannot pack {} as {}", put.local.display(), put.remote.display())
                })?;
            }
            tar.into_inner()
                .and_then(|writer| writer.into_inner().map_err(|error| error.into_error()).map(drop))
                .context("cannot write the payload disk")?;
            bytes = (&disk).stream_position().context("cannot measure the payload")?;
        }
        if bytes > DISK_SIZE {
            bail!("the payload of {bytes} bytes is larger than its disk of {DISK_SIZE}");
        }
        disk.set_len(DISK_SIZE).context("cannot size the payload disk")?;
        Ok(Payload { disk, bytes })
    }

    /// Opens the disk for reading.
    pub(super) fn open(&self) -> Result<File> {
        let path = format!("/proc/self/fd/{}", self.disk.as_raw_fd());
        File::open(path).context("cannot open the payload disk again")
    }

    /// Length of the tar on the disk; 0: there is none.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }
}

fn pack(tar: &mut tar::Builder<impl io::Write>, put: &Put) -> Result<()> {
    let local = put.local.canonicalize()?;
    pack_tree(tar, &local, put.remote.strip_prefix("/")?)
}

fn pack_tree(tar: &mut tar::Builder<impl io::Write>, local: &Path, remote: &Path) -> Result<()> {
    let data = local.symlink_metadata()?;
    if data.is_dir() {
        let mut names =
            local.read_dir()?.map(|entry| Ok(entry?.file_name())).collect::<io::Result<Vec<_>>>()?;
        names.sort();
        return names.iter().try_for_each(|name| pack_tree(tar, &local.join(name), &remote.join(name)));
    }
    let mut header = tar::Header::new_gnu();
    header.set_metadata(&data);
    header.set_uid(0);
    header.set_gid(0);
    if data.is_symlink() {
        tar.append_link(&mut header, remote, local.read_link()?)?;
    } else if data.is_file() {
        tar.append_data(&mut header, remote, File::open(local)?)?;
    } else {
        bail!("{} is neither a file, a directory nor a symlink", local.display());
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn puts_are_local_and_absolute_remote() {
        let put: Put = "a:b:/c".parse().unwrap();
        assert_eq!(put, Put { local: "a:b".into(), remote: "/c".into() });
        for text in ["", "a", "a:", "a:b", ":/b", "a:/"] {
            assert!(text.parse::<Put>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_tree_is_packed_with_its_modes() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path()).unwrap();
        let tree = dir.path().join("tree");
        fs::create_dir(&tree).unwrap();
        fs::write(tree.join("run"), "#!").unwrap();
        fs::set_permissions(tree.join("run"), fs::Permissions::from_mode(0o755)).unwrap();
        std::os::unix::fs::symlink("run", tree.join("also")).unwrap();
        let payload = Payload::new(&cache, &[Put { local: tree, remote: "/opt/x".into() }]).unwrap();
        let mut archive = tar::Archive::new(payload.open().unwrap());
        let names: Vec<(String, u32)> = archive
            .entries()
            .unwrap()
            .map(|entry| entry.unwrap())
            .map(|entry| {
                (entry.path().unwrap().display().to_string(), entry.header().mode().unwrap() & 0o777)
            })
            .collect();
        assert_eq!(names, [("opt/x/also".into(), 0o777), ("opt/x/run".into(), 0o755)]);
        assert!(payload.bytes() >= 2048);
    }
}
