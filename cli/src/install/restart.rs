//! Lets containerd read its configuration.

use std::{
    io::{self, Write},
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

/// How long systemd may take to answer.
const ANSWER: Duration = Duration::from_secs(20);

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

/// What is asked of a host, and done to it.
trait Host {
    fn reading(&self, containerd: &Containerd) -> Reading;

    /// Fails if containerd cannot read its configuration.
    fn check(&self, containerd: &Containerd) -> io::Result<()>;

    /// Runs systemctl(1), and returns its standard output.
    fn systemctl(&self, arguments: &[&str], limit: Duration) -> io::Result<String>;
}

struct ThisHost;

impl Host for ThisHost {
    fn reading(&self, containerd: &Containerd) -> Reading {
        containerd.unread(Path::new("/"))
    }

    fn check(&self, containerd: &Containerd) -> io::Result<()> {
        match containerd.configuration() {
            // There is no containerd to ask.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            asked => asked.map(drop),
        }
    }

    fn systemctl(&self, arguments: &[&str], limit: Duration) -> io::Result<String> {
        let mut command = Command::new("systemctl");
        command.args(arguments).stderr(Stdio::null());
        command_output::answer(command, &[], limit)
    }
}

/// Restarts a containerd that has not read its configuration, or says that it is necessary.
pub(super) fn finish(
    out: &mut impl Write,
    options: &Options,
    containerd: &Containerd,
    restart: &Restart,
) -> Result<(), CommandError> {
    match options.root {
        // Its containerd does not run here.
        Some(_) if restart.is_changed => say(out, &remedy(containerd)),
        Some(_) => Ok(()),
        None => finish_on(out, &ThisHost, options.restart, containerd, restart),
    }
}

fn finish_on(
    out: &mut impl Write,
    host: &impl Host,
    restarts: bool,
    containerd: &Containerd,
    restart: &Restart,
) -> Result<(), CommandError> {
    let reading = host.reading(containerd);
    if !restarts {
        let is_down = matches!(reading, Reading::Down) && !restart.is_changed;
        return match restart.is_needed(&reading) && !is_down {
            true => say(out, &remedy(containerd)),
            false => Ok(()),
        };
    }
    // A restart that has failed before is tried again.
    let has_failed = containerd.units().iter().any(|unit| has_failed(host, unit));
    let restart = Restart { also_if_down: restart.also_if_down || has_failed, ..*restart };
    if !restart.is_needed(&reading) {
        return match restart.also_if_down {
            true => say(out, "containerd has read its configuration, so it is not restarted"),
            false => Ok(()),
        };
    }
    // Somebody else may have changed a part of it. What k3s and RKE2 generate can be checked only when they start.
    if containerd.generator().is_none() {
        let path = &containerd.config;
        host.check(containerd).map_err(|source| CommandError::Asked { path: path.clone(), source })?;
    }
    let unit = unit_of(host, containerd.units());
    let act = |_: &Count| host.systemctl(&["restart", unit], RESTART);
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

fn has_failed(host: &impl Host, unit: &str) -> bool {
    host.systemctl(&["is-failed", "--quiet", unit], ANSWER).is_ok()
}

/// Which of these units is restarted: the one that runs. While none runs, the one that has failed to start, or else the
/// one that is there: it may be about to start.
fn unit_of(host: &impl Host, units: &[&'static str]) -> &'static str {
    let first = units.first().copied().unwrap_or("containerd");
    let [_, _, ..] = units else { return first };
    let is_active = |unit: &&&str| host.systemctl(&["is-active", "--quiet", unit], ANSWER).is_ok();
    let has_failed = |unit: &&&str| has_failed(host, unit);
    let is_there = |unit: &&&str| {
        let state = host.systemctl(&["show", "--property", "LoadState", "--value", unit], ANSWER);
        state.is_ok_and(|state| state.trim() == "loaded")
    };
    let found = units.iter().find(is_active).or_else(|| units.iter().find(has_failed));
    found.or_else(|| units.iter().find(is_there)).copied().unwrap_or(first)
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

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

    /// A host whose containerds have this reading, and which notes what was restarted.
    struct TestHost {
        reading: Reading,
        is_valid: bool,
        /// The states of units. One that is not named is not there.
        units: &'static [(&'static str, &'static str)],
        restarted: RefCell<Vec<String>>,
    }

    impl Host for TestHost {
        fn reading(&self, _: &Containerd) -> Reading {
            self.reading.clone()
        }

        fn check(&self, _: &Containerd) -> io::Result<()> {
            if self.is_valid { Ok(()) } else { Err(io::Error::other("not valid")) }
        }

        fn systemctl(&self, arguments: &[&str], _: Duration) -> io::Result<String> {
            let unit = arguments.last().copied().unwrap();
            let state = self.units.iter().find(|(name, _)| *name == unit).map(|(_, state)| *state);
            let answers = match arguments[0] {
                "is-active" => state == Some("active"),
                "is-failed" => state == Some("failed"),
                "show" => return Ok(if state.is_some() { "loaded\n" } else { "not-found\n" }.into()),
                _ => {
                    self.restarted.borrow_mut().push(unit.into());
                    true
                }
            };
            if answers { Ok(String::new()) } else { Err(io::Error::other("no")) }
        }
    }

    fn host(reading: Reading, units: &'static [(&'static str, &'static str)]) -> TestHost {
        TestHost { reading, is_valid: true, units, restarted: RefCell::default() }
    }

    const BY_UNINSTALL: Restart = Restart { is_changed: false, also_if_down: false };

    #[test]
    fn the_unit_that_runs_or_has_failed_is_restarted() {
        let k3s = Containerd::of("/var/lib/rancher/k3s/agent/etc/containerd/config.toml".into());
        for (units, restarted) in [
            (&[("k3s", "inactive"), ("k3s-agent", "failed")][..], &["k3s-agent"][..]),
            (&[("k3s", "failed"), ("k3s-agent", "inactive")], &["k3s"]),
            // Nobody has asked for one that the operator has stopped.
            (&[("k3s", "inactive")], &[]),
        ] {
            let host = host(Reading::Down, units);
            finish_on(&mut Vec::new(), &host, true, &k3s, &BY_UNINSTALL).unwrap();
            assert_eq!(*host.restarted.borrow(), restarted, "{units:?}");
        }
        let host = host(Reading::Unread("x".into()), &[("k3s", "failed"), ("k3s-agent", "active")]);
        finish_on(&mut Vec::new(), &host, true, &k3s, &BY_UNINSTALL).unwrap();
        assert_eq!(*host.restarted.borrow(), ["k3s-agent"]);
    }

    #[test]
    fn none_is_restarted_with_a_configuration_that_it_cannot_read() {
        let containerd = Containerd::of("/etc/containerd/config.toml".into());
        let mut host = host(Reading::Unread("conf.d".into()), &[("containerd", "active")]);
        host.is_valid = false;
        let error = finish_on(&mut Vec::new(), &host, true, &containerd, &BY_UNINSTALL).unwrap_err();
        assert!(matches!(error, CommandError::Asked { .. }), "{error}");
        assert!(host.restarted.borrow().is_empty());
        host.is_valid = true;
        let mut out = Vec::new();
        finish_on(&mut out, &host, false, &containerd, &BY_UNINSTALL).unwrap();
        assert!(String::from_utf8(out).unwrap().contains("systemctl restart containerd"));
        assert!(host.restarted.borrow().is_empty());
        finish_on(&mut Vec::new(), &host, true, &containerd, &BY_UNINSTALL).unwrap();
        assert_eq!(*host.restarted.borrow(), ["containerd"]);
    }
}
