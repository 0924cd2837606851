//! The root of the program: a directory of the host below an overlay, so that it is never changed.

use std::{
    fs::{self, File},
    os::unix::fs::{MetadataExt, PermissionsExt, chown},
    path::{Path, PathBuf},
};

use containerd_shim_protos::api::Mount;

use crate::run::{directory::RunDirectory, error::RunError};

/// A root.
#[derive(Debug)]
pub(super) struct Root {
    path: PathBuf,
    pub(super) directory: File,
}

impl Root {
    /// A directory of the host.
    pub(super) fn directory(path: &Path) -> Result<Self, RunError> {
        let failed = |reason: String| RunError::Rootfs { path: path.into(), reason };
        let path = fs::canonicalize(path).map_err(|error| failed(error.to_string()))?;
        let directory = File::open(&path).map_err(|error| failed(error.to_string()))?;
        let metadata = directory.metadata().map_err(|error| failed(error.to_string()))?;
        if !metadata.is_dir() {
            return Err(failed("it is not a directory".into()));
        }
        // They have a meaning in the options of an overlay.
        let text = path.to_str().filter(|text| !text.contains([',', ':', '\\']));
        text.ok_or_else(|| failed("a path with a comma, a colon or a backslash is not supported".into()))?;
        Ok(Self { path, directory })
    }

    /// Whether it is the host's own root.
    pub(super) fn is_hosts(&self) -> bool {
        self.path == Path::new("/")
    }

    /// The overlay that the shim is to mount: this root below a layer in memory.
    pub(super) fn overlay(&self, directory: &RunDirectory, bytes: u64) -> Result<Mount, RunError> {
        let layer = directory.mount_layer(bytes)?;
        let (upper, work) = (layer.join("upper"), layer.join("work"));
        let failed = |source| RunError::Prepare { path: layer.clone(), source };
        fs::create_dir(&work).and_then(|()| fs::create_dir(&upper)).map_err(failed)?;
        // The root's owner and mode are those of the upper layer.
        let below = self.directory.metadata().map_err(failed)?;
        chown(&upper, Some(below.uid()), Some(below.gid()))
            .and_then(|()| fs::set_permissions(&upper, fs::Permissions::from_mode(below.mode() & 0o7777)))
            .map_err(failed)?;
        let mut mount = Mount::new();
        (mount.type_, mount.source) = ("overlay".into(), "overlay".into());
        mount.options = [("lowerdir", &self.path), ("upperdir", &upper), ("workdir", &work)]
            .map(|(name, path)| format!("{name}={}", path.display()))
            .into();
        Ok(mount)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_root_is_a_directory_that_an_overlay_can_name() {
        let dir = tempfile::tempdir().unwrap();
        let error = |path: &Path| Root::directory(path).unwrap_err().to_string();
        assert!(error(&dir.path().join("none")).contains("/none: no such file") || error(&dir.path().join("none")).contains("No such file"));
        assert!(error(Path::new("/etc/passwd")).ends_with("it is not a directory"));
        let comma = dir.path().join("a,b");
        fs::create_dir(&comma).unwrap();
        assert!(error(&comma).contains("comma"));
        assert!(Root::directory(Path::new("/usr/..")).unwrap().is_hosts());
        assert!(!Root::directory(dir.path()).unwrap().is_hosts());
    }
}
