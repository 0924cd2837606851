//! What the flags of `docker run` do. fields/docker.rs lists them all.

use std::collections::BTreeSet;
use std::fs;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::Case;
use super::limits::weight_of_512_shares;
use crate::command::{Size, wait_until};
use crate::ctr::{Host, SETTLES};
use crate::docker::{Client, Made};
use crate::fields::docker::FLAGS;
use crate::fixtures::scratch;

pub(super) const CASES: &[Case] = &[
    Case::both("every_flag_is_listed", listed),
    Case::both("annotations_of_the_cri_make_no_pod", annotations),
    Case::both("names_labels_and_files_are_dockers_own", labels),
    Case::both("health_is_asked_by_added_processes", health),
    Case::both("restarts_logs_and_stops_are_as_asked", restarts),
    Case::both("streams_are_attached_and_left_as_asked", streams),
    Case::both("addresses_and_ports_are_the_flags", addresses),
    Case::both("names_and_name_servers_are_the_flags", names),
    Case::both("the_program_and_its_variables_are_the_flags", program),
    Case::both("parameters_and_devices_are_the_flags", kernel),
    Case::both("parameters_of_the_network_are_the_hosts_and_then_the_flags", network_parameters),
    Case::both("the_cgroup_on_the_host_is_the_flags", cgroup_parent),
    Case::both("shares_sets_and_scores_are_the_flags", limits),
    Case::both("every_kind_of_mount_is_there", mounts),
    Case::both("some_are_refused_or_left_out_by_docker", by_docker),
    Case::bulkhead("what_is_the_hosts_is_refused_by_name", refused),
];

const SLEEP: [&str; 2] = ["sleep", "1000"];
const WINDOW: Size = Size { width: 80, height: 24 };

fn is(what: &str, came: &Value, expected: &Value) -> Result<()> {
    ensure!(came == expected, "expected  {what} to be {expected}\ncame      {came}");
    Ok(())
}

fn listed(host: &Host) -> Result<()> {
    let help = Client::of(host)?.run(["run", "--help"])?;
    let text = help.succeeds()?.text();
    // `  -a, --attach list    Attach to ...`
    let flags = text.lines().filter_map(|line| {
        let line = line.trim_start();
        let line = line.split_once(", ").filter(|(short, _)| short.len() == 2).map_or(line, |(_, long)| long);
        line.starts_with("--").then(|| line.split_whitespace().next()).flatten()
    });
    let flags: BTreeSet<&str> = flags.collect();
    ensure!(flags.len() > 80, "expected  the flags of docker run\ncame      {text}");
    let listed: BTreeSet<&str> = FLAGS.iter().map(|row| row.name).collect();
    let missing: Vec<_> = flags.difference(&listed).collect();
    ensure!(missing.is_empty(), "expected  every flag in fields/docker.rs\ncame      others: {missing:?}");
    Ok(())
}

fn annotations(host: &Host) -> Result<()> {
    let client = Client::of(host)?;
    let of = |annotations: [&str; 2]| {
        let flags = annotations.into_iter().flat_map(|it| ["--annotation", it]);
        client.container().flags(flags).run(&["echo", "its own program"])
    };
    for annotations in [
        ["io.kubernetes.cri.container-type=sandbox", "io.kubernetes.cri.sandbox-id=x"],
        ["io.kubernetes.cri.container-type=container", "io.kubernetes.cri.sandbox-id=x"],
    ] {
        of(annotations)?.succeeds()?.prints("its own program\n")?;
    }
    Ok(())
}

fn labels(host: &Host) -> Result<()> {
    let directory = scratch()?;
    let path = |name: &str| directory.path().join(name).display().to_string();
    let (file, id) = (path("labels"), path("id"));
    fs::write(&file, "second=two\n")?;
    let flags = ["--label", "first=one", "--label-file", &file, "--cidfile", &id, "--expose", "81"];
    let flags = flags.into_iter().chain(["--platform", "linux/amd64", "--pull", "never", "--quiet"]);
    let flags = flags.chain(["--disable-content-trust=true"]);
    let made = Client::of(host)?.container().flags(flags).detach(&SLEEP)?;
    let labels = made.inspect("/Config/Labels")?;
    is("the labels", &labels, &json!({ "first": "one", "second": "two" }))?;
    is("the id", &made.inspect("/Id")?, &json!(fs::read_to_string(&id)?))?;
    is("the ports", &made.inspect("/Config/ExposedPorts")?, &json!({ "81/tcp": {} }))?;
    is("the name", &made.inspect("/Name")?, &json!(format!("/{}", made.name())))
}

/// Waits until docker says this of a container.
fn comes_to(host: &Host, made: &Made<'_>, place: &str, expected: &Value) -> Result<()> {
    wait_until(&format!("{expected} at {place}"), host.patience(SETTLES), || {
        Ok(made.inspect(place)? == *expected)
    })
}

fn health(host: &Host) -> Result<()> {
    let times = ["--health-interval", "1s", "--health-timeout", "60s", "--health-retries", "1"];
    let start = ["--health-start-period", "1s", "--health-start-interval", "1s"];
    let flags = ["--health-cmd", "test -e /well"].into_iter().chain(times).chain(start);
    let client = Client::of(host)?;
    let made = client.container().flags(flags).detach(&["sh", "-c", "touch /well; exec sleep 1000"])?;
    comes_to(host, &made, "/State/Health/Status", &json!("healthy"))?;
    made.exec(&["rm", "/well"])?.succeeds()?;
    comes_to(host, &made, "/State/Health/Status", &json!("unhealthy"))?;
    let unasked = client.container().flags(["--no-healthcheck"]).detach(&SLEEP)?;
    is("its check", &unasked.inspect("/Config/Healthcheck/Test")?, &json!(["NONE"]))
}

fn restarts(host: &Host) -> Result<()> {
    let client = Client::of(host)?;
    let flags = ["--restart", "on-failure:1", "--log-driver", "local", "--log-opt", "max-size=1m"];
    let failing = client.container().flags(flags).detach(&["sh", "-c", "echo run; exit 3"])?;
    comes_to(host, &failing, "/RestartCount", &json!(1))?;
    comes_to(host, &failing, "/State/Status", &json!("exited"))?;
    failing.docker(&["logs"])?.succeeds()?.prints("run\nrun\n")?;
    is("the options", &failing.inspect("/HostConfig/LogConfig/Config")?, &json!({ "max-size": "1m" }))?;

    let script = "trap 'exit 5' USR1; echo ready; while :; do sleep 0.1; done";
    let flags = ["--stop-signal", "USR1", "--stop-timeout", "60"];
    let polite = client.container().flags(flags).detach(&["sh", "-c", script])?;
    polite.wait_for_output("ready")?;
    polite.docker(&["stop"])?.succeeds()?;
    is("its status", &polite.inspect("/State/ExitCode")?, &json!(5))
}

fn streams(host: &Host) -> Result<()> {
    let client = Client::of(host)?;
    let both = "echo out; echo err >&2";
    let finished = client.container().flags(["--attach", "stdout", "--sig-proxy=false"]).sh(both)?;
    finished.succeeds()?.prints("out\n")?.complains("")?;
    let flags = ["--detach-keys", "ctrl-x"];
    let script = "echo ready; exec sleep 1000";
    let (mut running, made) =
        client.container().flags(flags).start_in_terminal(WINDOW, &["sh", "-c", script])?;
    running.wait_for("ready")?;
    running.write(b"\x18")?;
    running.finish()?.succeeds()?;
    is("its state", &made.inspect("/State/Status")?, &json!("running"))
}

/// A network with addresses of the cases' own. Dropping it removes it.
struct Network<'h> {
    client: Client<'h>,
    name: String,
}

impl<'h> Network<'h> {
    fn create(host: &'h Host) -> Result<Self> {
        let network = Self { client: Client::of(host)?, name: host.new_id() };
        let subnets = ["--subnet", "10.82.7.0/24", "--ipv6", "--subnet", "fd82:7::/64"];
        let words = ["network", "create"].into_iter().chain(subnets).chain([network.name.as_str()]);
        network.client.run(words)?.succeeds()?;
        Ok(network)
    }
}

impl Drop for Network<'_> {
    fn drop(&mut self) {
        let _ = self.client.run(["network", "rm", &self.name]);
    }
}

fn addresses(host: &Host) -> Result<()> {
    let network = Network::create(host)?;
    let flags = ["--network", &network.name, "--network-alias", "another", "--ip", "10.82.7.9"];
    let flags = flags.into_iter().chain(["--ip6", "fd82:7::9", "--link-local-ip", "169.254.82.9"]);
    let flags = flags.chain(["--mac-address", "02:42:0a:52:07:09", "--expose", "80", "--publish-all"]);
    let made = network.client.container().flags(flags).detach(&SLEEP)?;
    let shown = made.exec(&["ip", "addr", "show", "eth0"])?;
    let text = shown.succeeds()?.text();
    for expected in ["inet 10.82.7.9/24", "inet6 fd82:7::9/64", "inet 169.254.82.9", "02:42:0a:52:07:09"] {
        shown.check(expected, text.contains(expected))?;
    }
    let port = made.inspect("/NetworkSettings/Ports/80~1tcp/0/HostPort")?;
    ensure!(port.is_string(), "expected  a port of the host\ncame      {port}");
    let aliases = made.inspect(&format!("/NetworkSettings/Networks/{}/Aliases", network.name))?;
    let has_alias = aliases.as_array().is_some_and(|list| list.contains(&json!("another")));
    ensure!(has_alias, "expected  another name\ncame      {aliases}");
    Ok(())
}

fn names(host: &Host) -> Result<()> {
    let client = Client::of(host)?;
    let linked = client.container().detach(&SLEEP)?;
    let link = format!("{}:neighbour", linked.name());
    let flags =
        ["--dns", "192.0.2.53", "--dns-search", "example.com", "--dns-option", "ndots:3", "--link", &link];
    let finished = client.container().flags(flags).sh("cat /etc/resolv.conf; grep neighbour /etc/hosts")?;
    let text = finished.succeeds()?.text();
    for expected in ["nameserver 192.0.2.53", "search example.com", "options ndots:3"] {
        finished.check(expected, text.contains(expected))?;
    }
    let address = linked.address("bridge")?;
    finished.check("the neighbour's address", text.contains(&format!("{address}\tneighbour")))?;
    Ok(())
}

fn program(host: &Host) -> Result<()> {
    let directory = scratch()?;
    let file = directory.path().join("variables").display().to_string();
    fs::write(&file, "FIRST=one\nSECOND=a b\n")?;
    let flags = ["--env-file", &file, "--entrypoint", "env"];
    let finished = Client::of(host)?.container().flags(flags).run(&["THIRD=three"])?;
    finished.succeeds()?.says("FIRST", "one")?.says("SECOND", "a b")?.says("THIRD", "three")?;
    Ok(())
}

fn kernel(host: &Host) -> Result<()> {
    let client = Client::of(host)?;
    let flags = ["--sysctl", "net.core.somaxconn=77", "--domainname", "example", "--cap-add", "NET_ADMIN"];
    let flags = flags.into_iter().chain(["--device-cgroup-rule", "c 10:229 rwm", "--cgroupns", "private"]);
    let script = "cd /proc/sys; cat net/core/somaxconn kernel/domainname; cat /proc/self/cgroup; \
                  grep CapEff /proc/self/status; mknod /node c 10 229 && exec 3<>/node && echo open";
    let finished = client.container().flags(flags).sh(script)?;
    // docker's default capabilities and CAP_NET_ADMIN, bit 12.
    finished.succeeds()?.prints("77\nexample\n0::/\nCapEff:\t00000000a80435fb\nopen\n")?;
    let finished = client.container().flags(["--cgroupns", "host"]).run(&["cat", "/proc/self/cgroup"])?;
    let is_below = finished.succeeds()?.text().starts_with("0::/") && finished.text() != "0::/\n";
    finished.check("a cgroup below the root", is_below)?;
    Ok(())
}

/// `ip_forward` of the host, until this is dropped.
struct Forwarding {
    before: String,
}

impl Forwarding {
    const FILE: &str = "/proc/sys/net/ipv4/ip_forward";

    fn enable() -> Result<Self> {
        let before = fs::read_to_string(Self::FILE)?;
        fs::write(Self::FILE, "1")?;
        Ok(Self { before })
    }
}

impl Drop for Forwarding {
    fn drop(&mut self) {
        let _ = fs::write(Self::FILE, &self.before);
    }
}

/// A new network namespace has those of IPv4 from the host, where docker by itself enables `ip_forward`.
fn network_parameters(host: &Host) -> Result<()> {
    let client = Client::of(host)?;
    let _forwarding = Forwarding::enable()?;
    let script = "cd /proc/sys/net/ipv4 && cat ip_forward conf/default/forwarding conf/eth0/forwarding";
    client.container().sh(script)?.succeeds()?.prints("1\n1\n1\n")?;
    let flags = ["--sysctl", "net.ipv4.ip_forward=0"];
    client.container().flags(flags).sh(script)?.succeeds()?.prints("0\n0\n0\n")?;
    Ok(())
}

fn cgroup_parent(host: &Host) -> Result<()> {
    let flags = ["--cgroup-parent", "bulkhead-e2e.slice"];
    let made = Client::of(host)?.container().flags(flags).detach(&SLEEP)?;
    let pid = made.inspect("/State/Pid")?;
    let place = fs::read_to_string(format!("/proc/{pid}/cgroup")).context("the container has no process")?;
    ensure!(
        place.contains("/bulkhead-e2e.slice/") || place.contains("-e2e.slice/"),
        "expected  a process in bulkhead-e2e.slice\ncame      one in {place}"
    );
    Ok(())
}

fn limits(host: &Host) -> Result<()> {
    let cpu = ["--cpu-shares", "512", "--cpu-period", "50000", "--cpu-quota", "25000"];
    let sets = ["--cpuset-cpus", "0", "--cpuset-mems", "0", "--oom-score-adj", "321"];
    let memory = ["--memory", "64m", "--memory-reservation", "32m"];
    let script = "cd /sys/fs/cgroup; cat cpu.weight cpu.max cpuset.cpus.effective memory.low; \
                  grep Mems_allowed_list: /proc/self/status | cut -f2; cat /proc/self/oom_score_adj";
    let flags = cpu.into_iter().chain(sets).chain(memory);
    let finished = Client::of(host)?.container().flags(flags).sh(script)?;
    let weight = weight_of_512_shares(host);
    finished.succeeds()?.prints(&format!("{weight}\n25000 50000\n0\n33554432\n0\n321\n"))?;
    Ok(())
}

fn mounts(host: &Host) -> Result<()> {
    let client = Client::of(host)?;
    let directory = scratch()?;
    fs::write(directory.path().join("given"), "by the host\n")?;
    let bound = format!("type=bind,source={},target=/bound,readonly", directory.path().display());
    let flags = ["--mount", &bound, "--mount", "type=volume,target=/kept", "--tmpfs", "/quick:size=1m"];
    let flags = flags.into_iter().chain(["--volume-driver", "local", "--volume", "/more"]);
    let first = client.container().flags(flags).detach(&SLEEP)?;
    let script = "cat /bound/given; echo kept > /kept/file; echo more > /more/file; df -k /quick | tail -n 1; \
                  echo no > /bound/file";
    let finished = first.exec(&["sh", "-c", script])?;
    finished.fails_with("Read-only file system")?;
    let text = finished.text();
    finished.check(
        "the host's file and a tmpfs of 1 MiB",
        text.starts_with("by the host\n") && text.contains(" 1024 "),
    )?;
    let second = client.container().flags(["--volumes-from", first.name()]);
    second.sh("cat /kept/file /more/file /bound/given")?.succeeds()?.prints("kept\nmore\nby the host\n")?;
    Ok(())
}

fn by_docker(host: &Host) -> Result<()> {
    let client = Client::of(host)?;
    let of = |flags: &[&str]| client.container().flags(flags.iter().copied()).run(&["echo", "ran"]);
    of(&["--gpus", "all"])?.exits(125)?.fails_with("could not select device driver")?;
    of(&["--isolation", "process"])?.exits(125)?.fails_with("isolation")?;
    of(&["--storage-opt", "size=1G"])?.exits(125)?.fails_with("storage-opt")?;
    of(&["--userns", "mine"])?.exits(125)?.fails_with("user")?;
    of(&["--isolation", "default", "--userns", "host"])?.succeeds()?.prints("ran\n")?;
    // On cgroup v2 docker warns of these, and does not pass them on.
    for flag in ["--memory-swappiness=10", "--oom-kill-disable"] {
        let finished = of(&[flag, "--memory", "64m"])?;
        let warns = String::from_utf8_lossy(&finished.stderr).contains("iscarded");
        finished.prints("ran\n")?.check("a warning", warns)?;
    }
    // docker has not passed this one on since its version 23.
    of(&["--kernel-memory=32m", "--memory", "64m"])?.succeeds()?.prints("ran\n")?;
    Ok(())
}

fn refused(host: &Host) -> Result<()> {
    let client = Client::of(host)?;
    let other = client.container().flags(["--ipc", "shareable"]).detach(&SLEEP)?;
    let of_other = format!("container:{}", other.name());
    for (flag, value, words) in [
        ("--ipc", "host", "the host's ipc namespace"),
        ("--pid", "host", "the host's pid namespace"),
        ("--uts", "host", "the host's uts namespace"),
        ("--ipc", &of_other, "joining the ipc namespace"),
        ("--pid", &of_other, "joining the pid namespace"),
    ] {
        client.container().flags([flag, value]).run(&["true"])?.exits(125)?.fails_with(words)?;
    }
    Ok(())
}
