//! Lets containerd read its configuration.

use std::{
    io::Write,
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use crate::{
    command_output,
    containerd::Containerd,
    containerd_process::Reading,
    error::CommandError,
    install::{options::Options, steps::say},
    progress::{Count, during},
};

/// How long a restart may take: RKE2 takes a minute and more until it is ready, and systemd limits how long it waits.
const RESTART: Duration = Duration::from_secs(600);

/// Why a containerd is restarted.
pub(super) struct Restart {
    /// Its configuration was changed now.
    pub(super) is_changed: bool,
    /// It is started if it does not run.
    pub(super) also_if_down: bool,
}

impl Restart {
    /// Whether this containerd has to be restarted. A restart may have failed before, or may not have been asked for.
    fn is_needed(&self, reading: &Reading) -> bool {
        match reading {
            Reading::Unread(_) => true,
            Reading::Down => self.is_changed || self.also_if_down,
            Reading::Current => self.is_changed,
        }
    }
}

/// Restarts a containerd that has not read its configuration, or says that it is necessary.
pub(super) fn finish(
    out: &mut impl Write,
    options: &Options,
    containerd: &Containerd,
    restart: &Restart,
) -> Result<(), CommandError> {
    let reading = match options.root {
        // Its containerd does not run here.
        Some(_) => Reading::Current,
        None => containerd.unread(Path::new("/")),
    };
    // A restart that has failed before is tried again.
    let also_if_down = restart.also_if_down || (options.restart && has_failed(containerd.units()));
    let restart = Restart { also_if_down, ..*restart };
    if !options.restart {
        let is_down = matches!(reading, Reading::Down) && !restart.is_changed;
        return match restart.is_needed(&reading) && !is_down {
            true => say(out, &remedy(containerd)),
            false => Ok(()),
        };
    }
    if !restart.is_needed(&reading) {
        return match restart.also_if_down {
            true => say(out, "containerd has read its configuration, so it is not restarted"),
            false => Ok(()),
        };
    }
    let unit = unit_of(containerd.units());
    let act = |_: &Count| {
        let mut command = Command::new("systemctl");
        command.args(["restart", unit]).stderr(Stdio::null());
        command_output::answer(command, &[], RESTART)
    };
    during(&format!("restarting {unit}"), false, act).map_err(CommandError::Restart)?;
    say(out, &format!("restarted {unit}"))
}

/// How a containerd reads its configuration.
fn remedy(containerd: &Containerd) -> String {
    let reader = containerd.generator().unwrap_or("containerd");
    let commands: Vec<_> =
        containerd.units().iter().map(|unit| format!("systemctl restart {unit}")).collect();
    format!("{reader} reads its configuration when it starts: {}", commands.join(" or "))
}

/// Whether one of these units has failed.
fn has_failed(units: &[&str]) -> bool {
    units.iter().any(|unit| command_output::output("systemctl", &["is-failed", "--quiet", unit]).is_ok())
}

/// Which of these units is restarted: the one that runs. While none runs, the one that is there: it may be about to
/// start.
fn unit_of(units: &[&'static str]) -> &'static str {
    let first = units.first().copied().unwrap_or("containerd");
    let [_, _, ..] = units else { return first };
    let ask = |arguments: &[&str]| command_output::output("systemctl", arguments);
    let is_active = |unit: &&&str| ask(&["is-active", "--quiet", unit]).is_ok();
    let is_there = |unit: &&&str| {
        ask(&["show", "--property", "LoadState", "--value", unit]).is_ok_and(|state| state.trim() == "loaded")
    };
    units.iter().find(is_active).or_else(|| units.iter().find(is_there)).copied().unwrap_or(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_one_that_has_not_read_its_configuration_is_restarted() {
        let unread = || Reading::Unread("/etc/containerd/config.toml".into());
        let needed = |is_changed, also_if_down| {
            let restart = Restart { is_changed, also_if_down };
            [unread(), Reading::Down, Reading::Current].map(|reading| restart.is_needed(&reading))
        };
        assert_eq!(needed(false, true), [true, true, false], "by install");
        assert_eq!(needed(true, true), [true; 3]);
        assert_eq!(needed(false, false), [true, false, false], "by uninstall");
        assert_eq!(needed(true, false), [true; 3]);
    }
}
