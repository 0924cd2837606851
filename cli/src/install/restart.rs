//! Lets containerd read its configuration.

use std::{
    io::{self, Write},
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
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

/// How long after a restart containerd may take to read its configuration: systemd may not wait for that of k3s. It is
/// asked again after each pause.
const READS: Duration = Duration::from_millis(if cfg!(test) { 50 } else { 60_000 });
const PAUSE: Duration = Duration::from_millis(if cfg!(test) { 10 } else { 200 });

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

    /// [`Containerd::restarters`].
    fn restarters(&self, containerd: &Containerd) -> Vec<String>;

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

    fn restarters(&self, containerd: &Containerd) -> Vec<String> {
        containerd.restarters(Path::new("/"))
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
        Some(_) if restart.is_changed => say(out, &remedy(containerd, containerd.units())),
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
    let units = host.restarters(containerd);
    if !restarts {
        let is_down = matches!(reading, Reading::Down) && !restart.is_changed;
        return match restart.is_needed(&reading) && !is_down {
            true => say(out, &remedy(containerd, &units)),
            false => Ok(()),
        };
    }
    // A restart that has failed before is tried again.
    let has_failed = units.iter().any(|unit| has_failed(host, unit));
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
    let unit = unit_of(host, &units).ok_or_else(|| {
        let config = containerd.config.display();
        let reason = format!("no unit of systemd runs the containerd that reads {config}");
        CommandError::Restart(io::Error::other(reason))
    })?;
    let act = |_: &Count| {
        host.systemctl(&["restart", unit], RESTART)?;
        has_read(host, unit, containerd, restart.also_if_down)
    };
    during(&format!("restarting {unit}"), false, act).map_err(CommandError::Restart)?;
    say(out, &format!("restarted {unit}"))
}

/// Waits until containerd has read its configuration. Fails if it does not, such as if the unit starts another one.
fn has_read(host: &impl Host, unit: &str, containerd: &Containerd, must_run: bool) -> io::Result<()> {
    let (end, config) = (Instant::now() + READS, containerd.config.display());
    loop {
        let reason = match host.reading(containerd) {
            Reading::Current => return Ok(()),
            // It reads its configuration when it starts.
            Reading::Down if !must_run => return Ok(()),
            Reading::Down => format!(
                "{unit} was restarted, but no process containerd reads {config}; name the file that it reads with \
                 --containerd-config"
            ),
            Reading::Unread(path) => format!(
                "{unit} was restarted, but the containerd that reads {config} has not read {}",
                path.display()
            ),
        };
        if Instant::now() >= end {
            return Err(io::Error::other(reason));
        }
        thread::sleep(PAUSE);
    }
}

/// How a containerd reads its configuration.
fn remedy(containerd: &Containerd, units: &[impl AsRef<str>]) -> String {
    let reader = containerd.generator().unwrap_or("containerd");
    let commands: Vec<_> = units.iter().map(|unit| format!("systemctl restart {}", unit.as_ref())).collect();
    let commands = match commands.is_empty() {
        true => format!(
            "restart the containerd that reads {} in the way it was started",
            containerd.config.display()
        ),
        false => commands.join(" or "),
    };
    format!("{reader} reads its configuration when it starts: {commands}")
}

fn has_failed(host: &impl Host, unit: &str) -> bool {
    host.systemctl(&["is-failed", "--quiet", unit], ANSWER).is_ok()
}

/// Which of these units is restarted: the one that runs. While none runs, the one that has failed to start, or else the
/// one that is there: it may be about to start.
fn unit_of<'a>(host: &impl Host, units: &'a [String]) -> Option<&'a str> {
    let [_, _, ..] = units else { return units.first().map(String::as_str) };
    let is_active = |unit: &&String| host.systemctl(&["is-active", "--quiet", unit], ANSWER).is_ok();
    let has_failed = |unit: &&String| has_failed(host, unit);
    let is_there = |unit: &&String| {
        let state = host.systemctl(&["show", "--property", "LoadState", "--value", unit], ANSWER);
        state.is_ok_and(|state| state.trim() == "loaded")
    };
    let found = units.iter().find(is_active).or_else(|| units.iter().find(has_failed));
    found.or_else(|| units.iter().find(is_there)).or(units.first()).map(String::as_str)
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use bulkhead_host_shim::operator::chain;

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

    /// A host whose containerds have this reading, and another one after a restart of their unit. It notes what was
    /// restarted.
    struct TestHost {
        reading: Reading,
        after: Reading,
        /// None: those that containerd has by default.
        restarters: Option<&'static [&'static str]>,
        is_valid: bool,
        /// The states of units. One that is not named is not there.
        units: &'static [(&'static str, &'static str)],
        restarted: RefCell<Vec<String>>,
    }

    impl Host for TestHost {
        fn reading(&self, _: &Containerd) -> Reading {
            if self.restarted.borrow().is_empty() { self.reading.clone() } else { self.after.clone() }
        }

        fn restarters(&self, containerd: &Containerd) -> Vec<String> {
            let units = self.restarters.unwrap_or(containerd.units());
            units.iter().map(|unit| (*unit).to_owned()).collect()
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
        let (after, restarted) = (Reading::Current, RefCell::default());
        TestHost { reading, after, restarters: None, is_valid: true, units, restarted }
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

    #[test]
    fn the_containerd_that_reads_the_file_is_restarted_and_no_other() {
        let containerd = Containerd::of("/etc/containerd/second.toml".into());
        let units = &[("containerd", "active"), ("second", "active")];
        let mut host = host(Reading::Unread("/etc/containerd/second.toml".into()), units);
        host.restarters = Some(&["second"]);
        let by_hand = said(|out| finish_on(out, &host, false, &containerd, &BY_UNINSTALL).unwrap());
        assert!(by_hand.ends_with("when it starts: systemctl restart second\n"), "{by_hand}");
        let restarted = said(|out| finish_on(out, &host, true, &containerd, &BY_UNINSTALL).unwrap());
        assert_eq!(
            (restarted.as_str(), &*host.restarted.take()),
            ("restarted second\n", &["second".to_owned()][..])
        );
        // Nobody knows who has started it.
        host.restarters = Some(&[]);
        let error = finish_on(&mut Vec::new(), &host, true, &containerd, &BY_UNINSTALL).unwrap_err();
        let text = chain(&error);
        assert!(text.contains("restart it by other means") && text.contains("second.toml"), "{text}");
        assert!(host.restarted.borrow().is_empty());
        let by_hand = said(|out| finish_on(out, &host, false, &containerd, &BY_UNINSTALL).unwrap());
        assert!(
            by_hand.contains("restart the containerd that reads /etc/containerd/second.toml"),
            "{by_hand}"
        );
    }

    #[test]
    fn a_restart_after_which_the_configuration_is_not_read_is_no_success() {
        let containerd = Containerd::of("/etc/containerd/config.toml".into());
        let by_install = Restart { is_changed: true, also_if_down: true };
        let unread = Reading::Unread("/etc/containerd/conf.d".into());
        for (restart, after, reason) in [
            (&by_install, unread.clone(), Some("has not read /etc/containerd/conf.d")),
            (&by_install, Reading::Down, Some("no process containerd reads /etc/containerd/config.toml")),
            (&BY_UNINSTALL, unread.clone(), Some("has not read /etc/containerd/conf.d")),
            // It reads the configuration without the handlers when it starts.
            (&BY_UNINSTALL, Reading::Down, None),
        ] {
            let host = TestHost { after, ..host(unread.clone(), &[("containerd", "active")]) };
            let mut out = Vec::new();
            let finished = finish_on(&mut out, &host, true, &containerd, restart);
            assert_eq!(*host.restarted.borrow(), ["containerd"]);
            let Some(reason) = reason else {
                finished.unwrap();
                continue;
            };
            let text = chain(&finished.unwrap_err());
            assert!(text.contains("restart it by other means") && text.contains(reason), "{text}");
            assert!(out.is_empty(), "{out:?}");
        }
    }

    fn said(act: impl FnOnce(&mut Vec<u8>)) -> String {
        let mut out = Vec::new();
        act(&mut out);
        String::from_utf8(out).unwrap()
    }
}
