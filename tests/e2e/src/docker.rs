//! docker as its user sees it: a dockerd of the tests' own, with the configuration that users get (contrib/docker), on
//! the host's containerd. It is in a network namespace of its own, so that its bridges and its firewall are not the
//! host's.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process;
use std::thread;

use anyhow::{Context, Result, anyhow};
use nix::sched::{CloneFlags, setns};
use serde_json::Value;
use tempfile::TempDir;

use crate::command::{Cmd, Finished, Running, Size, wait_until};
use crate::containerd::{PREFIX, directories, in_unit, stop};
use crate::ctr::{COMMAND, Host, IMAGE, SETTLES};
use crate::network::ip;

/// The configuration for users of docker.
const CONFIGURATION: &str = include_str!("../../../contrib/docker/daemon.json");
/// The address of the host's end of docker's own bridge, the same on any host.
pub(crate) const BRIDGE: &str = "10.81.0.1";

/// The systemd unit of this process's dockerd.
pub(crate) fn unit() -> String {
    format!("{PREFIX}{}-docker.service", process::id())
}

/// A running dockerd. Dropping it stops it and removes what it has written.
pub(crate) struct Docker {
    /// Its configuration and socket; below /run, since a socket's path must be short.
    state: TempDir,
    /// Its images, containers and their state.
    root: TempDir,
    /// Its network namespace, below /run/netns.
    network: String,
}

impl Docker {
    /// Starts it, with the image of the tests.
    pub(crate) fn start(host: &Host) -> Result<Self> {
        for (program, package) in [("dockerd", "docker.io"), ("docker", "docker-cli")] {
            let version = Cmd::new(program).args(["--version"]).run();
            version.with_context(|| format!("the docker cases need {program} (Debian's {package})"))?;
        }
        let (state, root) = directories()?;
        let docker = Self { state, root, network: format!("{PREFIX}{}", process::id()) };
        ip(&format!("netns add {}", docker.network))?;
        ip(&format!("-n {} link set lo up", docker.network))?;
        fs::write(docker.path("daemon.json"), CONFIGURATION)
            .context("cannot write docker's configuration")?;
        docker.launch()?;
        docker.load(host)?;
        Ok(docker)
    }

    /// Runs it in a unit of systemd's, as an installed one, and waits until it serves.
    fn launch(&self) -> Result<()> {
        in_unit(&unit())
            // Of its namespaces the network's alone: containerd must see what it mounts.
            .args(["nsenter", &format!("--net={}", self.netns().display()), "dockerd"])
            .args([Path::new("--config-file"), &self.path("daemon.json")])
            .args([Path::new("--data-root"), &self.root.path().join("data")])
            // Not below /run, which the cases look at: docker removes the files of its network namespaces there when
            // it finds the time, once a minute.
            .args([Path::new("--exec-root"), &self.root.path().join("exec")])
            .args([Path::new("--pidfile"), &self.path("pid")])
            .args(["--host", &self.address(), "--bip", &format!("{BRIDGE}/24")])
            .args(["--containerd", "/run/containerd/containerd.sock"])
            .run()?
            .succeeds()
            .context("the tests' own dockerd does not start")?;
        Ok(())
    }

    /// The image, which containerd has, in the form that docker loads.
    fn load(&self, host: &Host) -> Result<()> {
        let archive = self.path("image.tar");
        host.ctr(["images", "export"]).args([&archive]).args([IMAGE]).run()?.succeeds()?;
        let load = self.command(host).args(["load", "--quiet", "--input"]).args([&archive]).run()?;
        load.succeeds().context("docker does not load the image")?;
        fs::remove_file(&archive).context("cannot remove the image's archive")
    }

    fn command(&self, host: &Host) -> Cmd {
        Cmd::new("docker").limit(host.patience(COMMAND)).args(["--host", &self.address()])
    }

    fn address(&self) -> String {
        format!("unix://{}", self.path("docker.sock").display())
    }

    fn netns(&self) -> PathBuf {
        PathBuf::from("/run/netns").join(&self.network)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.state.path().join(name)
    }
}

impl Drop for Docker {
    fn drop(&mut self) {
        // What cannot be undone is no reason to fail: all cases have been told.
        let _ = stop(&unit());
        let _ = ip(&format!("netns del {}", self.network));
    }
}

/// `docker` on this host, with this dockerd.
#[derive(Clone, Copy)]
pub(crate) struct Client<'h> {
    host: &'h Host,
    docker: &'h Docker,
}

impl<'h> Client<'h> {
    /// Starts dockerd when the first case asks for it.
    pub(crate) fn of(host: &'h Host) -> Result<Self> {
        Ok(Self { host, docker: host.docker()? })
    }

    /// A command of docker's.
    pub(crate) fn run<'a>(&self, args: impl IntoIterator<Item = &'a str>) -> Result<Finished> {
        self.docker.command(self.host).args(args).run()
    }

    /// The socket on which dockerd serves.
    pub(crate) fn socket(&self) -> PathBuf {
        self.docker.path("docker.sock")
    }

    /// A container of the runtime that the cases are told of, not yet created.
    pub(crate) fn container(&self) -> Container<'h> {
        self.container_of(self.host.runtime().in_containerd())
    }

    /// A container of a runtime that docker calls so.
    pub(crate) fn container_of(&self, runtime: &str) -> Container<'h> {
        let name = self.host.new_id();
        let flags = ["run", "--runtime", runtime, "--name", &name].map(str::to_owned).to_vec();
        Container { client: *self, name, flags }
    }

    /// A network of the user's own.
    pub(crate) fn network(&self) -> Result<Network<'h>> {
        let network = Network { client: *self, name: self.host.new_id() };
        self.run(["network", "create", &network.name])?.succeeds()?;
        Ok(network)
    }

    /// Does something in the network that is the host's for docker.
    pub(crate) fn in_network<T: Send>(&self, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        let netns = File::open(self.docker.netns()).context("dockerd has no network namespace")?;
        let visit = || {
            setns(netns, CloneFlags::CLONE_NEWNET).context("cannot enter dockerd's network namespace")?;
            work()
        };
        // In a thread of its own, which is nowhere else afterwards.
        thread::scope(|scope| scope.spawn(visit).join().unwrap_or_else(|_| Err(anyhow!("a thread panicked"))))
    }
}

/// A network of the user's own. Dropping it removes it.
pub(crate) struct Network<'h> {
    client: Client<'h>,
    name: String,
}

impl Network<'_> {
    pub(crate) fn name(&self) -> &str {
        &self.name
    }
}

impl Drop for Network<'_> {
    fn drop(&mut self) {
        let _ = self.client.run(["network", "rm", &self.name]);
    }
}

/// A container that is not yet created.
pub(crate) struct Container<'h> {
    client: Client<'h>,
    name: String,
    flags: Vec<String>,
}

impl<'h> Container<'h> {
    /// What docker will call it.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Adds flags of `docker run`.
    pub(crate) fn flags<'a>(mut self, flags: impl IntoIterator<Item = &'a str>) -> Self {
        self.flags.extend(flags.into_iter().map(str::to_owned));
        self
    }

    /// Runs it to its end, attached, with an empty input; it is removed.
    pub(crate) fn run(self, command: &[&str]) -> Result<Finished> {
        let (cmd, _made) = self.flags(["--rm"]).begin(command);
        cmd.run()
    }

    /// Like [`Container::run`], of a shell script.
    pub(crate) fn sh(self, script: &str) -> Result<Finished> {
        self.run(&["sh", "-c", script])
    }

    /// Like [`Container::run`], with this input.
    pub(crate) fn run_with_input(self, command: &[&str], input: Vec<u8>) -> Result<Finished> {
        let (cmd, _made) = self.flags(["--rm", "--interactive"]).begin(command);
        cmd.input(input).run()
    }

    /// Starts it in a terminal of this size, attached.
    pub(crate) fn start_in_terminal(self, size: Size, command: &[&str]) -> Result<(Running, Made<'h>)> {
        let (cmd, made) = self.flags(["--rm", "--interactive", "--tty"]).begin(command);
        Ok((cmd.start_in_terminal(size)?, made))
    }

    /// Starts it detached.
    pub(crate) fn detach(self, command: &[&str]) -> Result<Made<'h>> {
        let (cmd, made) = self.flags(["--detach"]).begin(command);
        cmd.run()?.succeeds()?;
        Ok(made)
    }

    fn begin(self, command: &[&str]) -> (Cmd, Made<'h>) {
        let Self { client, name, flags } = self;
        let cmd = client.docker.command(client.host).args(flags).args([IMAGE]).args(command);
        (cmd, Made { client, name })
    }
}

/// A container that docker has. Dropping it removes it, whatever its state.
pub(crate) struct Made<'h> {
    client: Client<'h>,
    name: String,
}

impl Made<'_> {
    /// What docker calls it.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// A command of docker's about it: these words, and its name.
    pub(crate) fn docker(&self, words: &[&str]) -> Result<Finished> {
        self.client.run(words.iter().copied().chain([self.name()]))
    }

    /// Runs one more process in it to its end.
    pub(crate) fn exec(&self, command: &[&str]) -> Result<Finished> {
        self.client.run(["exec", &self.name].into_iter().chain(command.iter().copied()))
    }

    /// Starts one more process in it, in a terminal of this size.
    pub(crate) fn exec_in_terminal(&self, size: Size, command: &[&str]) -> Result<Running> {
        let cmd = self.client.docker.command(self.client.host).args(["exec", "--interactive", "--tty"]);
        cmd.args([&self.name]).args(command).start_in_terminal(size)
    }

    /// What `docker inspect` says at this place (a JSON pointer) of it.
    pub(crate) fn inspect(&self, place: &str) -> Result<Value> {
        let inspected = self.docker(&["inspect"])?;
        let value: Value = serde_json::from_slice(&inspected.succeeds()?.stdout)?;
        let place = format!("/0{place}");
        value.pointer(&place).cloned().with_context(|| format!("docker inspect says nothing at {place}"))
    }

    /// Its address in the network of this name.
    pub(crate) fn address(&self, network: &str) -> Result<String> {
        let address = self.inspect(&format!("/NetworkSettings/Networks/{network}/IPAddress"))?;
        address.as_str().map(str::to_owned).context("docker inspect says no address")
    }

    /// Waits until its output has this text.
    pub(crate) fn wait_for_output(&self, text: &str) -> Result<()> {
        let limit = self.client.host.patience(SETTLES);
        wait_until(&format!("{text:?} in the output of {}", self.name), limit, || {
            Ok(self.docker(&["logs"])?.text().contains(text))
        })
    }
}

impl Drop for Made<'_> {
    fn drop(&mut self) {
        // Of those that ran with --rm there is none any more.
        let _ = self.client.run(["rm", "--force", "--volumes", &self.name]);
    }
}
