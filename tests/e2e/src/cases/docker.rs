//! What users of docker do with containers, by `docker run --runtime`.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::lifecycle::is_promised_kernel;
use super::{Case, busy};
use crate::command::{Cmd, Size, wait_until};
use crate::ctr::Host;
use crate::docker::{BRIDGE, Client, Made};
use crate::fixtures::{digest, noise, page_at, scratch};

pub(super) const CASES: &[Case] = &[
    Case::both("a_command_runs_to_its_end", command),
    Case::both("its_exit_status_is_dockers", exit_status),
    Case::bulkhead("it_runs_on_the_guests_kernel", guest_kernel),
    Case::bulkhead("the_name_in_contribs_daemon_json_works", configured_name),
    Case::both("what_is_piped_in_arrives_whole", input),
    Case::both("a_terminal_is_typed_to", terminal),
    Case::both("a_detached_container_has_logs_a_status_and_a_state", detached),
    Case::both("an_added_process_has_streams_and_a_status", exec),
    Case::both("an_added_shell_is_typed_to", exec_terminal),
    Case::both("stop_asks_before_it_kills", stop),
    Case::both("kill_kills", kill),
    Case::both("a_restarted_container_keeps_its_files", restart),
    Case::both("a_paused_container_goes_on_where_it_was", pause),
    Case::both("stats_has_numbers", stats),
    Case::bulkhead("top_shows_the_vm", top),
    Case::both("a_container_outlives_containerd", outlives_containerd),
    Case::both("cgroups_of_the_host_at_their_usual_place_are_a_cgroup_file_system", cgroups),
    Case::both("a_tmpfs_has_the_mode_of_the_directory_that_it_covers", tmpfs_modes),
    Case::both("update_changes_the_limits", update),
    Case::both("files_are_copied_in_and_out", copy),
    Case::both("an_init_is_pid_1", init),
    Case::both("the_bridge_network_has_the_host", bridge_network),
    Case::both("containers_of_the_bridge_network_talk", neighbours),
    Case::both("a_published_port_answers_on_the_host", published_port),
    Case::both("without_a_network_there_is_a_loopback", no_network),
    Case::both("containers_of_a_network_of_the_users_own_talk", own_network),
    Case::both("a_resolv_conf_of_the_users_own_is_used", own_resolv_conf),
    Case::bulkhead("the_hosts_network_is_refused", host_network),
    Case::both("volumes_are_shared_with_the_host_and_kept", volumes),
    Case::both("environment_directory_and_user_are_the_flags", process_flags),
    Case::both("limits_are_those_of_the_cgroup", limits),
    Case::both("a_read_only_root_and_no_capabilities", restricted),
    Case::both("a_command_that_the_image_lacks_is_127", command_missing),
    Case::both("a_command_that_is_not_executable_is_126", command_not_executable),
    Case::both("nothing_is_left_of_a_container", nothing_left),
];

const MIB: usize = 1 << 20;
const WINDOW: Size = Size { width: 80, height: 24 };

/// How long dockerd may take to answer.
const API: Duration = Duration::from_secs(60);

/// Runs for as long as nobody ends it, and does not mind SIGTERM.
const STUBBORN: &[&str] = &["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.1; done"];

fn command(host: &Host) -> Result<()> {
    Client::of(host)?.container().run(&["echo", "a word"])?.succeeds()?.prints("a word\n")?.complains("")?;
    Ok(())
}

fn exit_status(host: &Host) -> Result<()> {
    let finished = Client::of(host)?.container().sh("echo out; echo err >&2; exit 7")?;
    finished.exits(7)?.prints("out\n")?.complains("err\n")?;
    Ok(())
}

fn guest_kernel(host: &Host) -> Result<()> {
    is_promised_kernel(host, &Client::of(host)?.container().run(&["uname", "-r"])?)
}

fn configured_name(host: &Host) -> Result<()> {
    is_promised_kernel(host, &Client::of(host)?.container_of("bulkhead").run(&["uname", "-r"])?)
}

fn input(host: &Host) -> Result<()> {
    let bytes = noise(4 * MIB);
    let expected = format!("{}  -\n", digest(&bytes));
    let finished = Client::of(host)?.container().run_with_input(&["sha256sum"], bytes)?;
    finished.succeeds()?.prints(&expected)?;
    Ok(())
}

fn terminal(host: &Host) -> Result<()> {
    let script = "tty; read word; echo got $word; exit 3";
    let container = Client::of(host)?.container();
    let (mut running, _made) = container.start_in_terminal(WINDOW, &["sh", "-c", script])?;
    running.wait_for("/dev/pts/0\r\n")?;
    running.write(b"it\n")?;
    running.wait_for("got it\r\n")?;
    running.finish()?.exits(3)?;
    Ok(())
}

fn detached(host: &Host) -> Result<()> {
    let container = Client::of(host)?.container();
    let made = container.detach(&["sh", "-c", "echo out; echo err >&2; sleep 1; exit 5"])?;
    made.docker(&["wait"])?.succeeds()?.prints("5\n")?;
    made.docker(&["logs"])?.succeeds()?.prints("out\n")?.complains("err\n")?;
    same("its state", made.inspect("/State/Status")?, json!("exited"))?;
    same("its status", made.inspect("/State/ExitCode")?, json!(5))
}

fn same(what: &str, came: serde_json::Value, expected: serde_json::Value) -> Result<()> {
    anyhow::ensure!(came == expected, "expected  {what} to be {expected}\ncame      {came}");
    Ok(())
}

fn sleeping<'h>(host: &'h Host) -> Result<Made<'h>> {
    Client::of(host)?.container().detach(&["sleep", "1000"])
}

fn exec(host: &Host) -> Result<()> {
    let made = sleeping(host)?;
    let finished = made.exec(&["sh", "-c", "echo out; echo err >&2; exit 9"])?;
    finished.exits(9)?.prints("out\n")?.complains("err\n")?;
    let missing = made.exec(&["no-such-command"])?;
    let says = missing.text().contains("exec: \"no-such-command\": executable file not found in $PATH");
    missing.exits(126)?.check("why", says)?;
    Ok(())
}

fn exec_terminal(host: &Host) -> Result<()> {
    let made = sleeping(host)?;
    let mut shell = made.exec_in_terminal(WINDOW, &["sh", "-c", "tty; read word; echo got $word; exit 3"])?;
    shell.wait_for("/dev/pts/")?;
    shell.write(b"it\n")?;
    shell.wait_for("got it\r\n")?;
    shell.finish()?.exits(3)?;
    Ok(())
}

fn stop(host: &Host) -> Result<()> {
    let client = Client::of(host)?;
    let script = "trap 'exit 5' TERM; echo ready; while :; do sleep 0.1; done";
    let polite = client.container().detach(&["sh", "-c", script])?;
    polite.wait_for_output("ready")?;
    polite.docker(&["stop", "--time", "60"])?.succeeds()?;
    same("its status", polite.inspect("/State/ExitCode")?, json!(5))?;
    let stubborn = client.container().detach(STUBBORN)?;
    stubborn.wait_for_output("ready")?;
    stubborn.docker(&["stop", "--time", "1"])?.succeeds()?;
    same("its status", stubborn.inspect("/State/ExitCode")?, json!(137))
}

fn kill(host: &Host) -> Result<()> {
    let made = Client::of(host)?.container().detach(STUBBORN)?;
    made.docker(&["kill"])?.succeeds()?;
    made.docker(&["wait"])?.succeeds()?.prints("137\n")?;
    Ok(())
}

fn restart(host: &Host) -> Result<()> {
    let script = "echo run >> /runs; wc -l < /runs; exec sleep 1000";
    let made = Client::of(host)?.container().detach(&["sh", "-c", script])?;
    made.wait_for_output("1\n")?;
    made.docker(&["restart", "--time", "0"])?.succeeds()?;
    made.wait_for_output("1\n2\n")?;
    made.exec(&["true"])?.succeeds()?;
    Ok(())
}

fn pause(host: &Host) -> Result<()> {
    let made = sleeping(host)?;
    made.docker(&["pause"])?.succeeds()?;
    same("its state", made.inspect("/State/Status")?, json!("paused"))?;
    made.exec(&["true"])?.fails_with("is paused")?;
    made.docker(&["unpause"])?.succeeds()?;
    made.exec(&["echo", "awake"])?.succeeds()?.prints("awake\n")?;
    Ok(())
}

fn stats(host: &Host) -> Result<()> {
    let script = format!("head -c 20000000 /dev/zero > /dev/shm/x; sleep 1000 & {}", busy::PROGRAM);
    let client = Client::of(host)?;
    let container = client.container().flags(["--memory", "64m"]);
    let (mut running, made) = container.start_in_terminal(WINDOW, &["sh", "-c", &script])?;
    running.wait_for("ready")?;
    let shown = || made.docker(&["stats", "--no-stream", "--format", "{{.CPUPerc}} {{.MemUsage}} {{.PIDs}}"]);
    let percent = |text: &str| text.split('%').next().and_then(|number| number.parse::<f64>().ok());
    let finished = shown()?;
    let text = finished.succeeds()?.text();
    let used = text.split(['%', 'M']).nth(1).and_then(|number| number.trim().parse::<f64>().ok());
    finished.check("from 19 to 64 MiB", used.is_some_and(|used| (19.0..64.0).contains(&used)))?;
    finished.check("a limit of 64 MiB and two processes", text.ends_with("/ 64MiB 2\n"))?;
    finished.check("less than 10 % of a processor", percent(&text).is_some_and(|it| it < 10.0))?;

    let before = processor_time(&client, made.name())?;
    running.write(busy::TWO_SECONDS)?;
    let used = busy::used(host, || Ok(made.docker(&["logs"])?.text()))?;
    let grown = processor_time(&client, made.name())?.saturating_sub(before);
    busy::agree("docker's statistics", grown, used)?;
    running.write(busy::FOR_EVER)?;
    let finished = shown()?;
    let text = finished.succeeds()?.text();
    // dockerd and the client need some of the one processor of an emulated host.
    finished.check("more than 20 % of a processor", percent(&text).is_some_and(|it| it > 20.0))?;
    Ok(())
}

/// The processor time of a container, as docker's API has it. The command has per cent only.
fn processor_time(client: &Client<'_>, name: &str) -> Result<Duration> {
    let mut stream = UnixStream::connect(client.socket()).context("cannot connect to dockerd")?;
    stream.set_read_timeout(Some(API))?;
    let path = format!("/containers/{name}/stats?stream=false&one-shot=true");
    stream.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).context("dockerd does not answer")?;
    let body = answer.split_once("\r\n\r\n").context("an answer without a body")?.1;
    let stats: Value = serde_json::from_str(body).with_context(|| format!("not JSON: {answer}"))?;
    let nanoseconds = stats.pointer("/cpu_stats/cpu_usage/total_usage").and_then(Value::as_u64);
    Ok(Duration::from_nanos(nanoseconds.with_context(|| format!("no processor time: {stats:#}"))?))
}

fn top(host: &Host) -> Result<()> {
    let made = sleeping(host)?;
    // A table with one row. None of the host's processes is the container's.
    let finished = made.docker(&["top"])?;
    let text = finished.succeeds()?.text();
    finished.check("the VM", text.lines().count() == 2 && text.contains("bulkhead-vmm"))?;
    let finished = made.exec(&["ps"])?;
    let shown = finished.succeeds()?.text().contains("1 root     sleep 1000\n");
    finished.check("what runs in the container", shown)?;
    Ok(())
}

fn outlives_containerd(host: &Host) -> Result<()> {
    let script = "trap 'exit 8' TERM; while :; do sleep 0.1; done";
    let made = Client::of(host)?.container().detach(&["sh", "-c", script])?;
    Cmd::new("systemctl").args(["restart", "containerd"]).run()?.succeeds()?;
    // dockerd connects again.
    wait_until("an added process", host.patience(Duration::from_secs(20)), || {
        Ok(made.exec(&["echo", "on"])?.text() == "on\n")
    })?;
    made.docker(&["stop"])?.succeeds()?;
    same("its status", made.inspect("/State/ExitCode")?, json!(8))
}

/// As the images of systemd are started.
fn cgroups(host: &Host) -> Result<()> {
    let flags = ["--privileged", "--cgroupns", "host", "--volume", "/sys/fs/cgroup:/sys/fs/cgroup:rw"];
    let script = "awk '$2 == \"/sys/fs/cgroup\" { print $3 }' /proc/mounts; \
                  mkdir /sys/fs/cgroup/made && test -e /sys/fs/cgroup/made/cgroup.procs && rmdir /sys/fs/cgroup/made";
    Client::of(host)?.container().flags(flags).sh(script)?.succeeds()?.prints("cgroup2\n")?;
    Ok(())
}

fn tmpfs_modes(host: &Host) -> Result<()> {
    let flags = ["--tmpfs", "/root", "--tmpfs", "/tmp:mode=0750", "--tmpfs", "/new"];
    let script = "stat -c '%a %n' /root /tmp /new";
    Client::of(host)?
        .container()
        .flags(flags)
        .sh(script)?
        .succeeds()?
        .prints("700 /root\n750 /tmp\n1777 /new\n")?;
    Ok(())
}

fn update(host: &Host) -> Result<()> {
    let made = Client::of(host)?.container().flags(["--memory", "96m"]).detach(&["sleep", "1000"])?;
    let limits = ["--memory", "64m", "--memory-swap", "64m", "--pids-limit", "50", "--cpus", "0.5"];
    made.docker(&[&["update"], &limits[..]].concat())?.succeeds()?;
    let show = "cd /sys/fs/cgroup; cat memory.max pids.max cpu.max";
    made.exec(&["sh", "-c", show])?.succeeds()?.prints("67108864\n50\n50000 100000\n")?;
    Ok(())
}

fn copy(host: &Host) -> Result<()> {
    let client = Client::of(host)?;
    let made = sleeping(host)?;
    let directory = scratch()?;
    let (sent, got) = (directory.path().join("sent"), directory.path().join("got"));
    fs::write(&sent, "from the host\n")?;
    let inside = |name: &str| format!("{}:/tmp/{name}", made.name());
    client.run(["cp", &sent.display().to_string(), &inside("sent")])?.succeeds()?;
    made.exec(&["cat", "/tmp/sent"])?.succeeds()?.prints("from the host\n")?;
    made.exec(&["sh", "-c", "echo from the container > /tmp/made"])?.succeeds()?;
    client.run(["cp", &inside("made"), &got.display().to_string()])?.succeeds()?;
    let text = fs::read_to_string(&got)?;
    same("the copy", json!(text), json!("from the container\n"))
}

fn init(host: &Host) -> Result<()> {
    let finished = Client::of(host)?.container().flags(["--init"]).sh("cat /proc/1/comm; echo $$")?;
    let text = finished.succeeds()?.text();
    finished
        .check("docker's init as pid 1", text.starts_with("docker-init\n") && text != "docker-init\n1\n")?;
    Ok(())
}

fn bridge_network(host: &Host) -> Result<()> {
    let script =
        format!("ip -4 -o addr show eth0; ip route; cat /etc/hosts; hostname; ping -c 1 -W 10 {BRIDGE}");
    let finished = Client::of(host)?.container().flags(["--hostname", "box"]).sh(&script)?;
    let text = finished.succeeds()?.text();
    finished.check("an address of the bridge's", text.contains("inet 10.81.0."))?;
    finished.check("a default route", text.contains(&format!("default via {BRIDGE} dev eth0")))?;
    finished.check("its name with its address", text.contains("\tbox\n") && text.contains("\nbox\n"))?;
    Ok(())
}

/// Starts a server of one page.
const SERVER: &[&str] = &["sh", "-c", "echo a page > /tmp/index.html; exec httpd -f -p 80 -h /tmp"];

/// Asks for the page until it comes.
fn asking(url: &str) -> String {
    format!("until wget -q -O - {url} 2> /dev/null; do sleep 0.2; done")
}

fn neighbours(host: &Host) -> Result<()> {
    let client = Client::of(host)?;
    let server = client.container().detach(SERVER)?;
    let url = format!("http://{}/", server.address("bridge")?);
    client.container().sh(&asking(&url))?.succeeds()?.prints("a page\n")?;
    Ok(())
}

fn published_port(host: &Host) -> Result<()> {
    let client = Client::of(host)?;
    let _server = client.container().flags(["--publish", "8080:80"]).detach(SERVER)?;
    let limit = host.patience(Duration::from_secs(20));
    client.in_network(|| {
        // docker's own proxy takes the connection before the server listens.
        wait_until("the page at port 8080 of the host", limit, || {
            Ok(page_at("127.0.0.1:8080", "/", limit).is_ok_and(|page| page.ends_with("\r\n\r\na page\n")))
        })
    })
}

fn no_network(host: &Host) -> Result<()> {
    let script = "ls /sys/class/net; ping -c 1 -W 10 127.0.0.1 > /dev/null && echo up";
    let finished = Client::of(host)?.container().flags(["--network", "none"]).sh(script)?;
    finished.succeeds()?.prints("lo\nup\n")?;
    Ok(())
}

fn own_network(host: &Host) -> Result<()> {
    let client = Client::of(host)?;
    let network = client.network()?;
    let within = ["--network", network.name()];
    let server = client.container().flags(within).detach(SERVER)?;
    let url = format!("http://{}/", server.address(network.name())?);
    client.container().flags(within).sh(&asking(&url))?.succeeds()?.prints("a page\n")?;
    Ok(())
}

fn own_resolv_conf(host: &Host) -> Result<()> {
    let client = Client::of(host)?;
    let network = client.network()?;
    let directory = scratch()?;
    let file = directory.path().join("resolv.conf");
    fs::write(&file, "nameserver 192.0.2.1\n")?;
    let volume = format!("{}:/etc/resolv.conf:ro", file.display());
    let flags = ["--network", network.name(), "--add-host", "name:192.0.2.2", "--volume", &volume];
    let finished = client.container().flags(flags).sh("cat /etc/resolv.conf; grep name$ /etc/hosts")?;
    finished.succeeds()?.prints("nameserver 192.0.2.1\n192.0.2.2\tname\n")?;
    Ok(())
}

fn host_network(host: &Host) -> Result<()> {
    let finished = Client::of(host)?.container().flags(["--network", "host"]).run(&["true"])?;
    finished.exits(125)?.fails_with("the host's network namespace")?.fails_with("is not implemented")?;
    Ok(())
}

fn volumes(host: &Host) -> Result<()> {
    let client = Client::of(host)?;
    let directory = scratch()?;
    fs::write(directory.path().join("given"), "by the host\n")?;
    let bind = format!("{}:/shared", directory.path().display());
    // `find -xdev`, `du -x` and others know a volume by its device number.
    let script = "cat /shared/given; echo by the container > /shared/made; \
                  test $(stat -c %d /) != $(stat -c %d /shared)";
    client.container().flags(["--volume", &bind]).sh(script)?.succeeds()?.prints("by the host\n")?;
    same("the file", json!(fs::read_to_string(directory.path().join("made"))?), json!("by the container\n"))?;

    let volume = Volume { client, name: host.new_id() };
    let kept = format!("{}:/kept", volume.name);
    client.container().flags(["--volume", &kept]).sh("echo kept > /kept/file")?.succeeds()?;
    let read_only = format!("{kept}:ro");
    let finished =
        client.container().flags(["--volume", &read_only]).sh("cat /kept/file; echo no > /kept/file")?;
    finished.prints("kept\n")?.fails_with("Read-only file system")?;
    Ok(())
}

/// A volume. Dropping it removes it.
struct Volume<'h> {
    client: Client<'h>,
    name: String,
}

impl Drop for Volume<'_> {
    fn drop(&mut self) {
        let _ = self.client.run(["volume", "rm", &self.name]);
    }
}

fn process_flags(host: &Host) -> Result<()> {
    let flags = ["--env", "WORD=it", "--workdir", "/var", "--user", "5:6", "--group-add", "7"];
    let finished = Client::of(host)?.container().flags(flags).sh("echo $WORD; pwd; id -u; id -G")?;
    finished.succeeds()?.prints("it\n/var\n5\n6 7\n")?;
    Ok(())
}

fn limits(host: &Host) -> Result<()> {
    let flags = ["--memory", "64m", "--memory-swap", "64m", "--cpus", "0.5", "--pids-limit", "50"];
    let flags = flags.into_iter().chain(["--ulimit", "nofile=100:200", "--shm-size", "8m"]);
    let script = "cd /sys/fs/cgroup; cat memory.max cpu.max pids.max; ulimit -n; df -k /dev/shm | tail -n 1";
    let finished = Client::of(host)?.container().flags(flags).sh(script)?;
    let text = finished.succeeds()?.text();
    finished.check("the limits", text.starts_with("67108864\n50000 100000\n50\n100\n"))?;
    finished.check("8 MiB of shared memory", text.contains(" 8192 "))?;
    Ok(())
}

fn restricted(host: &Host) -> Result<()> {
    let flags = ["--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"];
    let script = "grep -E '^(CapEff|NoNewPrivs|Seccomp):' /proc/self/status; echo no > /file";
    let finished = Client::of(host)?.container().flags(flags).sh(script)?;
    finished.prints("CapEff:\t0000000000000000\nNoNewPrivs:\t1\nSeccomp:\t2\n")?;
    finished.fails_with("Read-only file system")?;
    Ok(())
}

fn command_missing(host: &Host) -> Result<()> {
    let finished = Client::of(host)?.container().run(&["no-such-command"])?;
    finished.exits(127)?.fails_with("exec: \"no-such-command\": executable file not found in $PATH")?;
    Ok(())
}

fn command_not_executable(host: &Host) -> Result<()> {
    let finished = Client::of(host)?.container().run(&["/etc/passwd"])?;
    finished.exits(126)?.fails_with("permission denied")?;
    Ok(())
}

fn nothing_left(host: &Host) -> Result<()> {
    let client = Client::of(host)?;
    let run = || -> Result<()> {
        let flags = ["--publish", "8081:80", "--memory", "64m"];
        client.container().flags(flags).run(&["true"])?.succeeds()?;
        let made = client.container().detach(&["sleep", "1000"])?;
        made.docker(&["rm", "--force"])?.succeeds()?;
        Ok(())
    };
    // The first container of the namespace makes directories that stay.
    run()?;
    host.leaves_nothing(run)
}
