//! What the containers of a pod share, and what each has of its own.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::super::Case;
use crate::cri::messages::ContainerState;
use crate::ctr::Host;
use crate::fixtures::{CONFIGURATION, Replaced};
use crate::pods::Pod;

pub(in crate::cases) const CASES: &[Case] = &[
    Case::both("containers_reach_each_other_on_localhost", localhost),
    Case::both("containers_have_the_pods_host_name", host_name),
    Case::both("containers_share_memory_files", shared_memory),
    Case::both("containers_share_message_queues", message_queues),
    Case::both("containers_have_roots_of_their_own", own_roots),
    Case::both("containers_have_processes_of_their_own", own_processes),
    Case::both("containers_that_share_processes_see_each_other", shared_processes),
    Case::both("pause_reaps_the_orphans_of_shared_processes", orphans),
    Case::both("what_a_container_leaves_running_ends_with_it", left_running),
    Case::both("an_ephemeral_container_sees_the_processes_of_its_target", ephemeral),
    Case::both("signals_reach_processes_of_other_containers", signals),
    Case::both("a_containers_pid_leads_to_no_namespace_of_the_host", namespaces),
    Case::bulkhead("a_fork_bomb_in_one_container_leaves_the_others_alone", fork_bomb),
    Case::bulkhead("a_leak_in_one_container_leaves_the_others_alone", leak),
];

/// How long an offender rages while the others of its pod are looked at. It reaches its limit within seconds. What it
/// does to the others adds up from then on, and only time shows it: guests without a reserve were lost after 45 s.
const RAGE: Duration = Duration::from_secs(45);

/// The others of a pod go on beside a container that takes all that it can get, new processes come into them, and the
/// offender is removed like any other.
fn others_go_on(host: &Host, offence: &str) -> Result<()> {
    // A VM that can grow would do so for the offender first.
    let _configured = Replaced::file(Path::new(CONFIGURATION), "max_memory_mib = 256\n")?;
    let pod = Pod::start(host)?;
    let others = [pod.container().start(&["sleep", "1000"])?, pod.container().start(&["sleep", "1000"])?];
    let offender = pod.container().start(&["sh", "-c", offence])?;
    let begun = Instant::now();
    while begun.elapsed() < RAGE {
        for other in &others {
            other.exec(&["echo", "alive"])?.succeeds()?.prints("alive\n")?;
        }
    }
    offender.stop(0)?;
    offender.remove()?;
    for other in &others {
        other.exec(&["echo", "still alive"])?.succeeds()?.prints("still alive\n")?;
        other.is(ContainerState::Running)?;
    }
    Ok(())
}

fn fork_bomb(host: &Host) -> Result<()> {
    // A shell ends when it cannot fork. What it has begun stays, and takes its container's last process with it.
    others_go_on(host, "for n in 1 2 3; do (while :; do sleep 600 & done) & done; exec sleep 1000")
}

fn leak(host: &Host) -> Result<()> {
    others_go_on(host, "while :; do tail /dev/zero; done")
}

fn localhost(host: &Host) -> Result<()> {
    let pod = Pod::start(host)?;
    let script = "mkdir /www && echo hello > /www/index.html && exec httpd -f -p 127.0.0.1:8080 -h /www";
    let _server = pod.container().start(&["sh", "-c", script])?;
    let script = "until wget -q -O - http://127.0.0.1:8080/ 2>/dev/null; do sleep 0.1; done";
    pod.container().sh(script)?.succeeds()?.prints("hello\n")?;
    Ok(())
}

pub(super) fn host_name(host: &Host) -> Result<()> {
    let pod = Pod::plan(host).hostname("web-0").start()?;
    for _ in 0..2 {
        pod.container()
            .sh("hostname; uname -n; cat /etc/hostname; echo $HOSTNAME")?
            .prints("web-0\nweb-0\nweb-0\nweb-0\n")?;
    }
    Ok(())
}

pub(super) fn shared_memory(host: &Host) -> Result<()> {
    let pod = Pod::start(host)?;
    pod.container().sh("echo shared > /dev/shm/file")?.succeeds()?;
    let script = "cat /dev/shm/file && df -k /dev/shm | awk 'NR == 2 { print $2 }' && stat -c %a /dev/shm";
    pod.container().sh(script)?.succeeds()?.prints("shared\n65536\n1777\n")?;
    Ok(())
}

fn message_queues(host: &Host) -> Result<()> {
    let pod = Pod::start(host)?;
    pod.container().sh("touch /dev/mqueue/queue")?.succeeds()?;
    pod.container().run(&["ls", "/dev/mqueue"])?.succeeds()?.prints("queue\n")?;
    Pod::start(host)?.container().run(&["ls", "/dev/mqueue"])?.succeeds()?.prints("")?;
    Ok(())
}

fn own_roots(host: &Host) -> Result<()> {
    let pod = Pod::start(host)?;
    let writer = pod.container().start(&["sh", "-c", "touch /tmp/mine; sleep 1000"])?;
    pod.container().run(&["ls", "/tmp"])?.succeeds()?.prints("")?;
    writer.exec(&["ls", "/tmp"])?.prints("mine\n")?;
    Ok(())
}

fn own_processes(host: &Host) -> Result<()> {
    let pod = Pod::start(host)?;
    let _other = pod.container().start(&["sleep", "1000"])?;
    pod.container().sh("echo $$; ps -o args | grep -c '[s]leep 1000'")?.prints("1\n0\n")?;
    Ok(())
}

pub(super) fn shared_processes(host: &Host) -> Result<()> {
    let pod = Pod::plan(host).share_processes().start()?;
    let other = pod.container().start(&["sleep", "1001"])?;
    let script = "test $$ -ne 1; echo not-first=$?; ps -o pid,args | grep -c '[s]leep 1001'; test -e /proc/1/stat && echo pause";
    pod.container().sh(script)?.succeeds()?.prints("not-first=0\n1\npause\n")?;
    // The other way about: a process that began later is seen in a container that began earlier.
    let _later = pod.container().start(&["sleep", "1002"])?;
    other.sh("ps -o args | grep -c '[s]leep 1002'")?.prints("1\n")?;
    Ok(())
}

fn orphans(host: &Host) -> Result<()> {
    let pod = Pod::plan(host).share_processes().start()?;
    let script = "sh -c 'sleep 1000 & echo $! > /orphan'; orphan=$(cat /orphan); \
                  awk '{ print \"parent\", $4 }' /proc/$orphan/stat; kill -9 $orphan; \
                  while [ -e /proc/$orphan ]; do sleep 0.1; done; echo reaped";
    pod.container().sh(script)?.succeeds()?.prints("parent 1\nreaped\n")?;
    Ok(())
}

fn left_running(host: &Host) -> Result<()> {
    let pod = Pod::plan(host).share_processes().start()?;
    let watcher = pod.container().start(&["sleep", "1000"])?;
    let leaves = pod.container().start(&["sh", "-c", "sleep 1003 & echo ready; exit 4"])?;
    leaves.finish()?.exits(4)?.prints("ready\n")?;
    watcher
        .sh("while ps -o args | grep -q '[s]leep 1003'; do sleep 0.1; done; echo gone")?
        .prints("gone\n")?;
    watcher.is(ContainerState::Running)
}

fn ephemeral(host: &Host) -> Result<()> {
    let pod = Pod::start(host)?;
    let target = pod.container().start(&["sleep", "1004"])?;
    target.sh("echo in the target > /file")?.succeeds()?;
    let other = pod.container().start(&["sleep", "1005"])?;
    let script = "ps -o args | grep -c '[s]leep 1004'; ps -o args | grep -c '[s]leep 1005'; cat /proc/1/root/file; test $$ -ne 1";
    let debugger = pod.container().into_processes_of(&target).start(&["sh", "-c", script])?;
    debugger.finish()?.exits(0)?.prints("1\n0\nin the target\n")?;
    target.is(ContainerState::Running)?;
    other.is(ContainerState::Running)
}

fn signals(host: &Host) -> Result<()> {
    let pod = Pod::plan(host).share_processes().start()?;
    let script = "trap 'exit 6' USR1; echo ready; while :; do sleep 0.1; done";
    let target = pod.container().start(&["sh", "-c", script])?;
    target.wait_for("ready\n")?;
    pod.container().sh("kill -USR1 $(ps -o pid,args | awk '/[e]xit 6/ { print $1; exit }')")?.succeeds()?;
    target.finish()?.exits(6)?;
    Ok(())
}

/// Hooks and tools enter the namespaces of a container by its pid on the host, and change what they find.
fn namespaces(host: &Host) -> Result<()> {
    let pod = Pod::start(host)?;
    let container = pod.container().start(&["sleep", "1000"])?;
    let tasks = host.pods()?.ctr().args(["tasks", "ls"]).run()?.succeeds()?.text();
    let row = tasks.lines().find(|row| row.starts_with(container.id())).context("no such task")?;
    let pid = row.split_whitespace().nth(1).context("no pid")?;
    for kind in ["net", "ipc", "uts", "mnt", "cgroup"] {
        let of = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/{kind}"));
        let (own, hosts) = (of(pid)?, of("1")?);
        ensure!(own != hosts, "expected  another {kind} namespace than the host's\ncame      {own:?}");
    }
    Ok(())
}
