//! Logs, executed commands, attached streams and statistics.

use std::fs;
use std::time::Duration;

use anyhow::{Result, ensure};
use tonic::Code;

use super::super::{Case, busy};
use crate::command::wait_until;
use crate::cri::messages::*;
use crate::ctr::Host;
use crate::fixtures::at_once;
use crate::pods::{Container, Pod};

pub(in crate::cases) const CASES: &[Case] = &[
    Case::both("a_log_keeps_streams_and_order", log_order),
    Case::both("a_log_has_long_lines_whole", log_long_lines),
    Case::both("a_log_goes_on_in_a_new_file_when_reopened", log_reopened),
    Case::both("an_exec_has_output_errors_and_an_exit_code", exec),
    Case::both("an_exec_is_as_its_container", exec_as_container),
    Case::both("an_exec_of_a_missing_command_says_so", exec_missing),
    Case::both("an_exec_that_takes_too_long_is_killed", exec_too_long),
    Case::both("execs_in_two_containers_at_once_are_kept_apart", execs_at_once),
    // Minutes on an emulated host.
    Case::both("a_hundred_execs_at_once", hundred_execs).by_whole_name_only(),
    Case::both("an_exec_with_streams_reads_its_input", exec_stream),
    Case::both("an_exec_with_a_terminal_has_its_size", exec_terminal),
    Case::both("an_attached_client_speaks_with_the_container", attach),
    Case::both("a_container_with_a_terminal_is_attached_to", attach_terminal),
    Case::both("statistics_of_a_container_and_its_pod", statistics),
];

/// What a log file holds of one line at most.
const LOG_LINE: usize = 16 * 1024;

/// More than a container that sleeps uses in a few seconds.
const IDLE: Duration = Duration::from_millis(500);

fn log_order(host: &Host) -> Result<()> {
    let pod = Pod::start(host)?;
    let script = "for i in $(seq 1 200); do echo out $i; echo err $i >&2; done";
    let finished = pod.container().sh(script)?;
    let expected = |stream: &str| (1..=200).map(|i| format!("{stream} {i}\n")).collect::<String>();
    finished.succeeds()?.prints(&expected("out"))?.complains_bytes(expected("err").as_bytes())?;
    Ok(())
}

fn log_long_lines(host: &Host) -> Result<()> {
    let pod = Pod::start(host)?;
    let script = "head -c 40000 /dev/zero | tr '\\0' x; echo; printf 'no newline'";
    let container = pod.container().start(&["sh", "-c", script])?;
    let expected = format!("{}\nno newline", "x".repeat(40_000));
    container.finish()?.succeeds()?.prints_bytes(expected.as_bytes())?;
    let partial = fs::read(container.log_file())?
        .split(|&byte| byte == b'\n')
        .filter(|line| line.len() > LOG_LINE)
        .count();
    ensure!(partial == 2, "expected  two lines of {LOG_LINE} bytes and their ends\ncame      {partial}");
    Ok(())
}

fn log_reopened(host: &Host) -> Result<()> {
    let pod = Pod::start(host)?;
    // It runs on: its end would kill the exec that lets it go on.
    let script = "echo before; while [ ! -e /go ]; do sleep 0.1; done; echo after; exec sleep 1000";
    let container = pod.container().start(&["sh", "-c", script])?;
    container.wait_for("before\n")?;
    let rotated = container.log_file().with_extension("log.1");
    fs::rename(container.log_file(), &rotated)?;
    host.pods()?.client().call(ReopenContainerLogRequest::from(container.id()))?;
    container.exec(&["touch", "/go"])?.succeeds()?;
    container.wait_for("after\n")?;
    let after = container.log()?.stdout;
    ensure!(after == b"after\n", "expected  the later line alone\ncame      {}", after.escape_ascii());
    let before = fs::read_to_string(&rotated)?;
    ensure!(before.ends_with(" before\n"), "expected  the earlier line\ncame      {before:?}");
    Ok(())
}

/// A pod's container that does nothing.
fn idle<'p>(pod: &'p Pod<'p>) -> Result<Container<'p>> {
    pod.container().start(&["sleep", "1000"])
}

fn exec(host: &Host) -> Result<()> {
    let pod = Pod::start(host)?;
    let container = idle(&pod)?;
    container.sh("echo out; echo err >&2; exit 7")?.exits(7)?.prints("out\n")?.complains("err\n")?;
    container.exec(&["true"])?.exits(0)?.prints("")?.complains("")?;
    container.sh("kill -9 $$")?.exits(137)?;
    container.is(ContainerState::Running)
}

fn exec_as_container(host: &Host) -> Result<()> {
    let pod = Pod::plan(host).hostname("same").start()?;
    let container = pod.container().env("COLOR", "blue").cwd("/tmp").security(|security| {
        security.run_as_user = Some(Int64Value { value: 1000 });
        security.capabilities =
            Some(Capability { drop_capabilities: vec!["ALL".to_owned()], ..Default::default() });
        security.no_new_privs = true;
    });
    let script = "echo $COLOR; pwd; id -u; hostname; grep -e CapBnd -e NoNewPrivs /proc/self/status; ls -l /proc/self/ns/ | awk '{ print $9, $11 }' | grep -v for_children";
    let container = container.start(&["sh", "-c", &format!("{script}; exec sleep 1000")])?;
    container.wait_for("uts")?;
    let own = String::from_utf8_lossy(&container.log()?.stdout).into_owned();
    ensure!(
        own.starts_with("blue\n/tmp\n1000\nsame\n"),
        "expected  the container as asked for\ncame      {own:?}"
    );
    container.sh(script)?.succeeds()?.prints(&own)?;
    Ok(())
}

fn exec_missing(host: &Host) -> Result<()> {
    let pod = Pod::start(host)?;
    let container = idle(&pod)?;
    let request = container.exec_request(&["no-such-command"], 0);
    let message = host.pods()?.client().refused(request, Code::Unknown)?;
    let words = "exec: \"no-such-command\": executable file not found in $PATH";
    ensure!(message.contains(words), "expected  {words}\ncame      {message}");
    container.is(ContainerState::Running)
}

fn exec_too_long(host: &Host) -> Result<()> {
    let pod = Pod::start(host)?;
    let container = idle(&pod)?;
    let request = container.exec_request(&["sleep", "1006"], 1);
    let message = host.pods()?.client().refused(request, Code::DeadlineExceeded)?;
    ensure!(message.contains("timeout"), "expected  a word about the time\ncame      {message}");
    container
        .sh("while ps -o args | grep -q '[s]leep 1006'; do sleep 0.1; done; echo killed")?
        .prints("killed\n")?;
    Ok(())
}

fn execs_at_once(host: &Host) -> Result<()> {
    let pod = Pod::start(host)?;
    let containers = [idle(&pod)?, idle(&pod)?];
    at_once(0..8, |number| {
        let container = &containers[number % 2];
        let script = format!("for i in 1 2 3; do echo {number}; sleep 0.1; done; exit {number}");
        let expected = format!("{number}\n").repeat(3);
        container.sh(&script)?.exits(number.try_into()?)?.prints(&expected)?;
        Ok(())
    })?;
    Ok(())
}

fn hundred_execs(host: &Host) -> Result<()> {
    const ALL: usize = 100;
    let pod = Pod::start(host)?;
    let container = idle(&pod)?;
    container.sh("mkfifo /tmp/gate; mkdir /tmp/came")?.succeeds()?;
    at_once(0..=ALL, |number| {
        if number == ALL {
            // Each takes one byte and is through, once all of them are there.
            let all_there = format!("until test $(ls /tmp/came | wc -l) = {ALL}; do sleep 1; done");
            let open = format!("{all_there}; yes '' | head -n {ALL} > /tmp/gate");
            container.sh(&open)?.succeeds()?;
            return Ok(());
        }
        let wait = "read line <&3";
        let script =
            format!("exec 3<>/tmp/gate; touch /tmp/came/{number}; {wait}; echo {number}; exit {number}");
        container.sh(&script)?.exits(number.try_into()?)?.prints(&format!("{number}\n"))?;
        Ok(())
    })?;
    Ok(())
}

pub(super) fn exec_stream(host: &Host) -> Result<()> {
    let pod = Pod::start(host)?;
    let container = idle(&pod)?;
    let script = "echo name?; read name; echo hello $name; echo oops >&2; exit 4";
    let mut stream = container.exec_stream(&["sh", "-c", script], false)?;
    stream.wait_for("name?\n")?;
    stream.write(b"world\n")?;
    stream.finish()?.exits(4)?.prints("name?\nhello world\n")?.complains("oops\n")?;
    Ok(())
}

/// A shell command that waits for the terminal to have this size, rows first, and prints it.
fn until_size(size: &str) -> String {
    format!("until stty size 2>/dev/null | grep '^{size}$'; do sleep 0.1; done")
}

fn exec_terminal(host: &Host) -> Result<()> {
    let pod = Pod::start(host)?;
    let container = idle(&pod)?;
    let script = format!("tty -s && echo a terminal; {}; exit 5", until_size("43 132"));
    let mut stream = container.exec_stream(&["sh", "-c", &script], true)?;
    // containerd drops a size that comes before the process.
    stream.wait_for("a terminal\r\n")?;
    stream.resize(132, 43)?;
    stream.finish()?.exits(5)?.prints("a terminal\r\n43 132\r\n")?;
    Ok(())
}

/// Says again and again that it is here. containerd 1.7 passes a client's input on before it begins to pass output
/// to the client, so a client that writes too soon misses the answer: it first waits for these words.
const SAY_HERE: &str = "while sleep 0.2; do echo here; done &";

pub(super) fn attach(host: &Host) -> Result<()> {
    let pod = Pod::start(host)?;
    let container = pod.container().config(|config| config.stdin = true);
    let script = format!("{SAY_HERE} while read line; do echo got $line; [ $line != end ] || exit 6; done");
    let container = container.start(&["sh", "-c", &script])?;
    let mut stream = container.attach(false)?;
    stream.wait_for("here\n")?;
    stream.write(b"one\n")?;
    stream.wait_for("got one\n")?;
    drop(stream);
    // Who left may come back.
    let mut stream = container.attach(false)?;
    stream.wait_for("here\n")?;
    stream.write(b"two\nend\n")?;
    stream.wait_for("got end\n")?;
    let finished = container.finish()?;
    let answers = String::from_utf8_lossy(&finished.exits(6)?.stdout).replace("here\n", "");
    ensure!(
        answers == "got one\ngot two\ngot end\n",
        "expected  each line that was written, answered once\ncame      {answers:?}"
    );
    Ok(())
}

fn attach_terminal(host: &Host) -> Result<()> {
    let pod = Pod::start(host)?;
    let container = pod.container().config(|config| {
        config.stdin = true;
        config.tty = true;
    });
    let script = format!(
        "stty -echo; {SAY_HERE} read line; echo got $line; {}; read line; exit 7",
        until_size("30 100")
    );
    let container = container.start(&["sh", "-c", &script])?;
    let mut stream = container.attach(true)?;
    stream.wait_for("here\r\n")?;
    stream.write(b"hello\n")?;
    stream.wait_for("got hello\r\n")?;
    stream.resize(100, 30)?;
    stream.wait_for("30 100\r\n")?;
    stream.write(b"end\n")?;
    container.finish()?.exits(7)?;
    Ok(())
}

pub(super) fn statistics(host: &Host) -> Result<()> {
    let pod = Pod::start(host)?;
    let container = pod.container().config(|config| config.stdin = true);
    let container = container.start(&["sh", "-c", busy::PROGRAM])?;
    let idle = pod.container().named("idle", 0).start(&["sleep", "1000"])?;
    let client = host.pods()?.client();
    let stats = |id: &str| -> Result<(Duration, u64)> {
        let stats = client.call(ContainerStatsRequest::from(id))?.stats;
        let cpu = stats.as_ref().and_then(|it| it.cpu.as_ref()?.usage_core_nano_seconds.as_ref());
        let memory = stats.as_ref().and_then(|it| it.memory.as_ref()?.working_set_bytes.as_ref());
        Ok((Duration::from_nanos(cpu.map_or(0, |it| it.value)), memory.map_or(0, |it| it.value)))
    };
    let of_pod = || -> Result<(Duration, u64, usize)> {
        let stats = client.call(PodSandboxStatsRequest::from(pod.id()))?.stats;
        let linux = stats.and_then(|it| it.linux).unwrap_or_default();
        let cpu = linux.cpu.and_then(|it| it.usage_core_nano_seconds).map_or(0, |it| it.value);
        let memory = linux.memory.and_then(|it| it.working_set_bytes).map_or(0, |it| it.value);
        Ok((Duration::from_nanos(cpu), memory, linux.containers.len()))
    };
    // The working set is all memory less inactive page cache. A new container may have nothing else.
    wait_until("the container's memory", host.patience(super::SEEN), || Ok(stats(container.id())?.1 > 0))?;
    wait_until("statistics of the pod", host.patience(super::SEEN), || {
        let (_, memory, containers) = of_pod()?;
        Ok(memory > 0 && containers == 2)
    })?;

    container.wait_for("ready")?;
    let mut input = container.attach(false)?;
    let look = || -> Result<_> { Ok([stats(container.id())?.0, stats(idle.id())?.0, of_pod()?.0]) };
    let before = look()?;
    input.write(busy::TWO_SECONDS)?;
    let used = busy::used(host, || Ok(String::from_utf8_lossy(&container.log()?.stdout).into_owned()))?;
    let after = look()?;
    let grown = |index: usize| after[index].saturating_sub(before[index]);
    busy::agree("the statistics of the container", grown(0), used)?;
    ensure!(
        grown(1) < IDLE,
        "expected  a container that sleeps to use less than {IDLE:?}\ncame      {:?}",
        grown(1)
    );
    ensure!(
        grown(2) + busy::ROUNDING >= used,
        "expected  the pod to use {used:?} or more, as its container does\ncame      {:?}",
        grown(2)
    );
    Ok(())
}
