//! A containerd of the tests' own, for the pods: with the handlers that users get (contrib/containerd), and nothing of
//! what the host's own containerd has.

use std::fmt::{self, Write as _};
use std::fs;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process;
use std::str::FromStr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use tempfile::TempDir;

use crate::command::{Cmd, Finished};
use crate::fixtures::page_at;

/// The handlers that users of containerd 1.6 and 1.7 add.
const HANDLERS_1: &str = include_str!("../../../contrib/containerd/config-2.toml");
/// Those that users of containerd 2 add.
const HANDLERS_2: &str = include_str!("../../../contrib/containerd/config-3.toml");
/// To what they are added: the image of pause, CNI with Debian's plugins and the tests' own networks, and runc.
const CONFIGURATION_1: &str = r#"version = 2
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "registry.k8s.io/pause:3.10"
[plugins."io.containerd.grpc.v1.cri".cni]
  bin_dir = "/usr/lib/cni"
  conf_dir = "NETWORKS"
[plugins."io.containerd.grpc.v1.cri".containerd]
  default_runtime_name = "runc"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
"#;
const CONFIGURATION_2: &str = r#"version = 3
[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = "registry.k8s.io/pause:3.10"
[plugins."io.containerd.cri.v1.runtime".cni]
  bin_dirs = ["/usr/lib/cni"]
  conf_dir = "NETWORKS"
[plugins."io.containerd.cri.v1.runtime".containerd]
  default_runtime_name = "runc"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
"#;
/// The pods' network: a bridge, addresses of both families from its host-local ranges, and host ports.
const NETWORK: &str = include_str!("../files/10-bulkhead-e2e.conflist");
/// The bridge of that network, which CNI makes for the first pod and leaves.
const BRIDGE: &str = "e2e0";
/// Where the network's host-local plugin keeps the addresses that are taken.
const ADDRESSES: &str = "/var/lib/cni/networks/bulkhead-e2e";

/// The first containerd that tells shims which span a request belongs to.
pub(crate) const TELLS_OF_SPANS: Version = Version::new(2, 0);
/// What makes it do so. It records a span if its client does, and drops it, because nothing listens at this address.
const SPANS: [&str; 2] =
    ["OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:1", "OTEL_TRACES_SAMPLER=parentbased_always_off"];

/// Deadline of its answer to a request for its metrics.
const ANSWERS: Duration = Duration::from_secs(20);

/// Name prefix of what belongs to a containerd of the tests' own.
pub(crate) const PREFIX: &str = "bulkhead-e2e-";
/// Where its persistent directory is.
pub(crate) const ROOTS: &str = "/var/lib";

/// The systemd units of this process's containerd, each but the first a restart's: while the shims live that it left, a
/// unit cannot be started again.
pub(crate) fn units() -> String {
    format!("{PREFIX}{}-*.service", process::id())
}

/// Directories of the tests' own: one below /run, since a socket's path must be short, and one that is persistent.
pub(crate) fn directories() -> Result<(TempDir, TempDir)> {
    let directory = |place: &str| {
        let made = tempfile::Builder::new().prefix(PREFIX).tempdir_in(place);
        made.with_context(|| format!("cannot make a directory in {place}"))
    };
    Ok((directory("/run")?, directory(ROOTS)?))
}

/// Runs what is added to it in a unit of systemd's, as an installed daemon, and waits until it serves.
pub(crate) fn in_unit(unit: &str) -> Cmd {
    Cmd::new("systemd-run")
        .args(["--quiet", "--collect", "--unit", unit])
        .args(["Type=notify", "Delegate=yes", "KillMode=process"].map(|it| format!("--property={it}")))
        .args(["--"])
}

/// Ends units of systemd's.
pub(crate) fn stop(units: &str) -> Result<Finished> {
    Cmd::new("systemctl").args(["stop", units]).run()
}

/// Version of the installed containerd.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Version {
    major: u32,
    minor: u32,
}

impl Version {
    /// The oldest that is tested.
    pub(crate) const OLDEST: Self = Self::new(1, 6);

    pub(crate) const fn new(major: u32, minor: u32) -> Self {
        Self { major, minor }
    }

    /// Asks the program.
    pub(crate) fn of_containerd() -> Result<Self> {
        let answer = Cmd::new("containerd").args(["--version"]).run()?;
        let text = answer.succeeds()?.text();
        // `containerd github.com/containerd/containerd 1.7.24~ds1 1.7.24~ds1-6`
        let number = text.split_whitespace().nth(2);
        number.with_context(|| format!("no version of containerd in {text:?}"))?.parse()
    }
}

impl FromStr for Version {
    type Err = anyhow::Error;

    /// Reads `1.7` or `v1.7.24~ds1`: what follows the second number does not matter.
    fn from_str(text: &str) -> Result<Self> {
        let mut parts = text.trim_start_matches('v').split('.').map(|part| part.parse().ok());
        let mut next = || parts.next().flatten().with_context(|| format!("{text:?} is no version"));
        Ok(Self { major: next()?, minor: next()? })
    }
}

impl fmt::Display for Version {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}.{}", self.major, self.minor)
    }
}

/// A running containerd. Dropping it stops it and removes what it has written.
pub(crate) struct Containerd {
    /// Its configuration, sockets and state; below /run, since a socket's path must be short.
    state: TempDir,
    /// Its images and snapshots.
    root: TempDir,
    version: Version,
    launches: AtomicU32,
    /// Where it serves its metrics.
    metrics: SocketAddr,
}

impl Containerd {
    /// Writes its configuration and starts it.
    pub(crate) fn start(version: Version) -> Result<Self> {
        let (state, root) = directories()?;
        let metrics = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|port| port.local_addr());
        let metrics = metrics.context("no port for containerd's metrics")?;
        let containerd = Self { state, root, version, launches: AtomicU32::new(0), metrics };
        let networks = containerd.path("networks");
        let (configuration, handlers) = match version < Version::new(2, 0) {
            true => (CONFIGURATION_1, HANDLERS_1),
            false => (CONFIGURATION_2, HANDLERS_2),
        };
        let mut configuration = configuration.replace("NETWORKS", &networks.display().to_string());
        configuration.push_str(handlers);
        write!(configuration, "\n[metrics]\n  address = \"{metrics}\"\n").context("cannot happen")?;
        fs::create_dir(&networks).context("cannot make the networks' directory")?;
        fs::write(networks.join("10-bulkhead-e2e.conflist"), NETWORK).context("cannot write the network")?;
        fs::write(containerd.path("config.toml"), configuration)
            .context("cannot write containerd's configuration")?;
        containerd.launch()?;
        Ok(containerd)
    }

    /// Runs it in a unit of systemd's, as an installed one, and waits until it serves.
    fn launch(&self) -> Result<()> {
        let launch = self.launches.fetch_add(1, Ordering::Relaxed) + 1;
        let unit = units().replace('*', &launch.to_string());
        let spans = if self.version < TELLS_OF_SPANS { &[][..] } else { &SPANS };
        in_unit(&unit)
            .args(["env"])
            .args(spans)
            .args(["containerd", "--config"])
            .args([&self.path("config.toml")])
            .args([Path::new("--root"), self.root.path()])
            .args([Path::new("--state"), &self.path("state")])
            .args([Path::new("--address"), &self.socket()])
            .run()?
            .succeeds()
            .context("the tests' own containerd does not start")?;
        Ok(())
    }

    /// Its images and snapshots.
    pub(crate) fn root(&self) -> &Path {
        self.root.path()
    }

    /// Adds this to its configuration, which it reads when it starts.
    pub(crate) fn configure(&self, added: &str) -> Result<()> {
        let file = fs::File::options().append(true).open(self.path("config.toml"));
        let written = file.and_then(|mut file| io::Write::write_all(&mut file, added.as_bytes()));
        written.context("cannot change containerd's configuration")
    }

    /// Where it listens.
    pub(crate) fn socket(&self) -> PathBuf {
        self.path("containerd.sock")
    }

    /// Ends it, does something and starts it again, while what it runs goes on.
    pub(crate) fn while_down(&self, act: impl FnOnce() -> Result<()>) -> Result<()> {
        stop(&units())?.succeeds()?;
        let result = act();
        self.launch()?;
        result
    }

    /// `ctr` that speaks to it, in the CRI's namespace.
    pub(crate) fn ctr(&self) -> Cmd {
        Cmd::new("ctr")
            .args([Path::new("--address"), &self.socket()])
            .args(["--namespace", crate::cri::NAMESPACE])
    }

    /// Imports an image for the pods.
    pub(crate) fn import(&self, archive: &Path) -> Result<()> {
        let import = self.ctr().args(["images", "import"]).args([archive]).run()?;
        import.succeeds().with_context(|| format!("cannot import {}", archive.display()))?;
        Ok(())
    }

    /// How long CNI has taken in all to set up pods, as containerd counts it.
    pub(crate) fn time_for_networks(&self) -> Result<Duration> {
        let page = page_at(&self.metrics.to_string(), "/v1/metrics", ANSWERS).context("no metrics")?;
        let is_it = |line: &&str| {
            line.contains("network_plugin_operations_duration_seconds")
                && line.contains("_sum{")
                && line.contains("\"set_up_pod\"")
        };
        // A counter that has counted nothing yet is not there.
        let Some(line) = page.lines().find(is_it) else { return Ok(Duration::ZERO) };
        let seconds = line.rsplit(' ').next().and_then(|number| number.parse().ok());
        seconds.map(Duration::from_secs_f64).with_context(|| format!("no number in {line:?}"))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.state.path().join(name)
    }
}

impl Drop for Containerd {
    fn drop(&mut self) {
        // What cannot be undone is no reason to fail: all cases have been told.
        let _ = stop(&units());
        let _ = Cmd::new("ip").args(["link", "delete", BRIDGE]).run();
        let _ = fs::remove_dir_all(ADDRESSES);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_and_compared() {
        let [old, new] = ["1.6.20~ds1", "v2.1.9"].map(|text| text.parse::<Version>().unwrap());
        assert_eq!((old.to_string(), new.to_string()), ("1.6".into(), "2.1".into()));
        assert!(old < new);
        assert!("unknown".parse::<Version>().is_err());
    }
}
