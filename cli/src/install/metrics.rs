//! The server of metrics, which an operator may have enabled. Without its program it would fail again and again.

use std::{
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
};

use crate::{check::Finding, command_output, error::CommandError};

const UNIT: &str = "bulkhead-metrics.service";

/// Where systemd has the links to the units that start with the host.
const WANTS: &str = "etc/systemd/system/multi-user.target.wants";

/// The directory of the link below the root directory `root`.
pub(super) fn directory(root: Option<&Path>) -> PathBuf {
    root.unwrap_or(Path::new("/")).join(WANTS)
}

/// Disables and stops the server, if it is enabled or runs. Of another host than this one, only the link is removed.
pub(super) fn end(out: &mut impl Write, root: Option<&Path>) -> Result<(), CommandError> {
    let systemctl = |arguments: &[&str]| command_output::output("systemctl", &[arguments, &[UNIT]].concat());
    let link = directory(root).join(UNIT);
    let is_enabled = link.symlink_metadata().is_ok();
    if root.is_none() && (is_enabled || systemctl(&["is-active", "--quiet"]).is_ok()) {
        match systemctl(&["--no-reload", "disable", "--now"]) {
            Ok(_) => writeln!(out, "disabled and stopped {UNIT}").map_err(CommandError::Output)?,
            Err(error) => {
                Finding::warn(UNIT, error.to_string(), format!("run `systemctl disable --now {UNIT}`"))
                    .print(out)
                    .map_err(CommandError::Output)?
            }
        }
    }
    match fs::remove_file(&link) {
        Ok(()) => writeln!(out, "removed {}", link.display()).map_err(CommandError::Output),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Ok(())
        }
        Err(source) => Err(CommandError::Remove { path: link, source }),
    }
}
