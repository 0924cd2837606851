//! The root of the program: an overlay over a directory of the host, which stays as it is, or an image or an archive
//! that is unpacked for this run.

use std::{
    cell::Cell,
    fs::{self, File},
    io,
    os::unix::fs::{MetadataExt, PermissionsExt, chown},
    path::{Path, PathBuf},
    rc::Rc,
};

use containerd_shim_protos::api::Mount;
use rustix::process::{getegid, geteuid};
use tar::{Builder, Header};

use crate::progress::{Count, CountedReader};
use crate::run::{
    error::RunError,
    image::{Image, Settings},
    options::Options,
    unpack::{self, Kind, UnpackError},
};

/// Where programs look for names before they ask a resolver.
const HOSTS: &str = "etc/hosts";

/// How much longer an archive may be than the files in it: their headers.
const HEADERS: u64 = 64 << 20;

/// A root that the shim can mount.
#[derive(Debug)]
pub(super) struct Root {
    pub(super) directory: File,
    pub(super) mount: Mount,
    /// How an image wants its program to run.
    pub(super) settings: Settings,
    /// Whether it is the host's own root.
    pub(super) is_hosts: bool,
}

/// What the options name, which is looked at before anything is done.
#[derive(Debug)]
pub(super) enum Source {
    Directory { path: PathBuf, directory: File },
    Archive { path: PathBuf, file: File },
    Image { path: PathBuf, image: Box<Image> },
}

impl Source {
    pub(super) fn find(options: &Options) -> Result<Self, RunError> {
        if let Some(path) = &options.archive {
            let failed = |error| RunError::Archive { path: path.clone(), source: UnpackError::Read(error) };
            return Ok(Self::Archive { path: path.clone(), file: File::open(path).map_err(failed)? });
        }
        if let Some(path) = &options.image {
            let image = Image::open(path).map_err(|source| RunError::Image { path: path.clone(), source })?;
            return Ok(Self::Image { path: path.clone(), image: Box::new(image) });
        }
        Self::directory(options.rootfs.as_deref().ok_or(RunError::NoRoot)?)
    }

    fn directory(path: &Path) -> Result<Self, RunError> {
        let failed = |reason: String| RunError::Rootfs { path: path.into(), reason };
        let path = fs::canonicalize(path).map_err(|error| failed(error.to_string()))?;
        let directory = File::open(&path).map_err(|error| failed(error.to_string()))?;
        if !directory.metadata().is_ok_and(|metadata| metadata.is_dir()) {
            return Err(failed("it is not a directory".into()));
        }
        // They have a meaning in the options of an overlay.
        let text = path.to_str().filter(|text| !text.contains([',', ':', '\\']));
        text.ok_or_else(|| failed("a path with a comma, a colon or a backslash is not supported".into()))?;
        Ok(Self::Directory { path, directory })
    }

    /// What takes long in [`Self::prepare`].
    pub(super) fn work(&self) -> String {
        match self {
            Self::Directory { path, .. } => format!("preparing {}", path.display()),
            Self::Archive { path, .. } | Self::Image { path, .. } => format!("unpacking {}", path.display()),
        }
    }

    /// Makes the root of the program on `hostname`, of this size at most, in the directory of the run. Counts the bytes
    /// that it has read of an archive or of an image. Blocks.
    pub(super) fn prepare(
        self,
        layer: &Path,
        hostname: &str,
        bytes: u64,
        count: &Count,
    ) -> Result<Root, RunError> {
        let upper = layer.join("upper");
        let failed = |source| RunError::Prepare { path: layer.into(), source };
        fs::create_dir(&upper).map_err(failed)?;
        let unpacked = |directory, settings| {
            // A root without it has not even `localhost`. Many images have none: docker mounts one.
            if let Err(error) = write_hosts(&directory, hostname) {
                tracing::warn!(%error, "cannot write /etc/hosts; the program sees that of the image, if there is one");
            }
            // What is unpacked is the upper layer above nothing. The shim takes an overlay for a root that nobody else
            // changes, and its files then cost the guest fewer requests than those of a directory.
            let lower = layer.join("lower");
            fs::create_dir(&lower).map_err(failed)?;
            let mount = overlay(&lower, layer).map_err(failed)?;
            Ok(Root { directory, mount, settings, is_hosts: false })
        };
        // Layers replace files of one another.
        let most = bytes.saturating_mul(4).saturating_add(HEADERS);
        match self {
            Self::Directory { path, directory } => {
                // The root's owner and mode are those of the upper layer.
                let below = directory.metadata().map_err(failed)?;
                chown(&upper, Some(below.uid()), Some(below.gid())).map_err(failed)?;
                let mode = fs::Permissions::from_mode(below.mode() & 0o7777);
                fs::set_permissions(&upper, mode).map_err(failed)?;
                let mount = overlay(&path, layer).map_err(failed)?;
                let is_hosts = path == Path::new("/");
                Ok(Root { directory, mount, settings: Settings::default(), is_hosts })
            }
            Self::Archive { path, file } => {
                let directory = File::open(&upper).map_err(failed)?;
                // 0 if it is a pipe.
                count.set(0, file.metadata().map_or(0, |metadata| metadata.len()));
                let file = CountedReader { inner: file, count: count.clone() };
                unpack::decompressed(file, Rc::new(Cell::new(most)))
                    .and_then(|archive| unpack::unpack(archive, &directory, Kind::Root))
                    .map_err(|source| RunError::Archive { path, source })?;
                unpacked(directory, Settings::default())
            }
            Self::Image { path, image } => {
                let directory = File::open(&upper).map_err(failed)?;
                image.unpack(&directory, most, count).map_err(|source| RunError::Image { path, source })?;
                unpacked(directory, image.settings)
            }
        }
    }
}

/// Writes /etc/hosts to an unpacked root, in the place of what that has there, as docker shows its own. Nobody vouches
/// for that root: the file comes as one more archive.
fn write_hosts(root: &File, hostname: &str) -> Result<(), UnpackError> {
    let text = hosts(hostname);
    let mut header = Header::new_ustar();
    header.set_size(text.len() as u64);
    header.set_mode(0o644);
    header.set_uid(geteuid().as_raw().into());
    header.set_gid(getegid().as_raw().into());
    header.set_mtime(0);
    let mut archive = Builder::new(Vec::new());
    archive.append_data(&mut header, HOSTS, text.as_bytes()).map_err(UnpackError::Read)?;
    unpack::unpack(archive.into_inner().map_err(UnpackError::Read)?.as_slice(), root, Kind::Root)
}

/// The hosts(5) of a program whose network may be a loopback interface only.
fn hosts(hostname: &str) -> String {
    format!("127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n127.0.0.1 {hostname}\n")
}

/// The upper layer, which is in memory, over a directory.
fn overlay(lower: &Path, layer: &Path) -> io::Result<Mount> {
    let (upper, work) = (layer.join("upper"), layer.join("work"));
    fs::create_dir(&work)?;
    let mut mount = Mount::new();
    (mount.type_, mount.source) = ("overlay".into(), "overlay".into());
    mount.options = [("lowerdir", lower), ("upperdir", &upper), ("workdir", &work)]
        .map(|(name, path)| format!("{name}={}", path.display()))
        .into();
    Ok(mount)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unpacked_root_has_the_names_of_its_own_host() {
        use std::os::unix::fs::symlink;
        let dir = tempfile::tempdir().unwrap();
        let (root, outside) = (dir.path().join("root"), dir.path().join("outside"));
        fs::create_dir(&root).unwrap();
        let opened = File::open(&root).unwrap();
        let written = |at: &str| {
            write_hosts(&opened, "0123").unwrap();
            let file = root.join(at);
            let mode = fs::symlink_metadata(&file).unwrap().mode();
            (fs::read_to_string(file).unwrap(), mode)
        };
        let expected = (hosts("0123"), 0o100_644);
        assert!(expected.0.lines().any(|line| line == "127.0.0.1 0123"), "{expected:?}");
        assert_eq!(written("etc/hosts"), expected);
        assert_eq!(fs::metadata(root.join("etc")).unwrap().mode() & 0o7777, 0o755);
        // Instead of that of the image, and never outside of the root.
        fs::write(&outside, "not ours").unwrap();
        fs::remove_file(root.join("etc/hosts")).unwrap();
        symlink(&outside, root.join("etc/hosts")).unwrap();
        assert_eq!(written("etc/hosts"), expected);
        assert_eq!(fs::read_to_string(&outside).unwrap(), "not ours");
        fs::rename(root.join("etc"), root.join("moved")).unwrap();
        symlink("/moved", root.join("etc")).unwrap();
        assert_eq!(written("moved/hosts"), expected);
        // A root that has no place for it is used all the same.
        fs::remove_file(root.join("etc")).unwrap();
        fs::write(root.join("etc"), "").unwrap();
        assert!(write_hosts(&opened, "0123").is_err());
    }

    #[test]
    fn a_root_is_a_directory_that_an_overlay_can_name() {
        let dir = tempfile::tempdir().unwrap();
        let error = |path: &Path| Source::directory(path).unwrap_err().to_string();
        assert!(error(&dir.path().join("none")).ends_with("/none: No such file or directory (os error 2)"));
        assert!(error(Path::new("/etc/passwd")).ends_with("it is not a directory"));
        let comma = dir.path().join("a,b");
        fs::create_dir(&comma).unwrap();
        assert!(error(&comma).contains("comma"));
        let Source::Directory { path, .. } = Source::directory(Path::new("/usr/..")).unwrap() else {
            panic!()
        };
        assert_eq!(path, Path::new("/"));
    }
}
