//! Processes added to a running container: `ctr tasks exec`.

use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::{
    Case,
    limits::{CGROUP_MOUNT, in_cgroup},
};
use crate::command::wait_until;
use crate::ctr::Host;
use crate::events::Events;
use crate::fixtures::scratch;

pub(super) const CASES: &[Case] = &[
    Case::both("its_output_and_status_are_its_own", output_and_status),
    Case::both("its_input_arrives_whole", input),
    Case::both("it_sees_the_containers_processes_files_and_host_name", same_world),
    Case::both("it_has_the_containers_environment_and_working_directory", environment),
    Case::both("its_user_and_working_directory_can_be_others", other_user),
    Case::both("it_is_limited_as_the_container_is", limits),
    Case::both("it_runs_beside_the_init_of_a_container_that_divides_its_cgroup", divided_cgroup),
    Case::both("its_capabilities_are_the_containers", capabilities),
    Case::both("it_shares_nothing_of_the_hosts", nothing_of_the_host),
    Case::both("it_is_killed_alone", killed_alone),
    Case::both("it_ends_with_the_container", ends_with_container),
    Case::both("a_detached_one_runs_by_itself", detached),
    Case::both("a_command_that_the_image_lacks", missing_command),
    Case::both("a_working_directory_that_does_not_exist", missing_directory),
    Case::both("an_id_is_taken_once", id_taken),
    Case::both("a_stopped_container_takes_none", stopped),
    Case::both("twenty_at_once", twenty_at_once),
    Case::both("events_tell_of_each", events_in_order),
    Case::both("nothing_is_left_of_it", leaves_nothing),
];

/// How soon a container gets to what it is told to do first.
const SOON: Duration = Duration::from_secs(10);

/// A container that does nothing until it is removed.
const IDLE: [&str; 2] = ["sleep", "1000"];

fn output_and_status(host: &Host) -> Result<()> {
    let task = host.idle()?;
    task.exec(&["sh", "-c", "echo out; echo err >&2; exit 7"])?.exits(7)?.prints("out\n")?;
    task.exec(&["sh", "-c", "echo err >&2"])?.succeeds()?.complains("err\n")?;
    task.exec(&["true"])?.succeeds()?.prints("")?.complains("")?;
    Ok(())
}

fn input(host: &Host) -> Result<()> {
    let task = host.idle()?;
    let bytes = vec![b'x'; 1 << 20];
    let counted = task.exec_with_input(&["wc", "-c"], bytes)?;
    let count = counted.succeeds()?.text();
    counted.check("1048576 bytes", count.trim() == "1048576")?;
    Ok(())
}

fn same_world(host: &Host) -> Result<()> {
    let container = host.container().flags(["--hostname", "inside"]);
    let task = container.detach(&["sh", "-c", "echo mine > /tmp/file; exec sleep 1000"])?;
    task.exec(&["sh", "-c", "until test -s /tmp/file; do sleep 0.1; done; cat /tmp/file; hostname"])?
        .succeeds()?
        .prints("mine\ninside\n")?;
    let init = task.exec(&["cat", "/proc/1/cmdline"])?;
    init.check("the container's init as process 1", init.succeeds()?.text() == "sleep\x001000\x00")?;
    for namespace in ["pid", "mnt", "ipc", "uts", "net", "cgroup"] {
        let path = |process: &str| format!("/proc/{process}/ns/{namespace}");
        task.exec(&["sh", "-c", &format!("test $(readlink {}) = $(readlink {})", path("1"), path("self"))])?
            .succeeds()
            .context(namespace)?;
    }
    Ok(())
}

fn environment(host: &Host) -> Result<()> {
    let container = host.container().flags(["--env", "COLOUR=red", "--cwd", "/usr"]);
    let task = container.detach(&IDLE)?;
    task.exec(&["sh", "-c", "echo $COLOUR; pwd"])?.succeeds()?.prints("red\n/usr\n")?;
    Ok(())
}

fn other_user(host: &Host) -> Result<()> {
    let task = host.idle()?;
    let flags = ["--user", "1234:2345", "--cwd", "/tmp"];
    task.exec_flags(&flags, &["sh", "-c", "id -u; id -g; pwd"])?.succeeds()?.prints("1234\n2345\n/tmp\n")?;
    Ok(())
}

fn limits(host: &Host) -> Result<()> {
    let container = host.container().flags(["--memory-limit", "67108864"]).flags(CGROUP_MOUNT);
    let task = container.detach(&IDLE)?;
    task.exec(&["sh", "-c", &in_cgroup("memory.max")])?.succeeds()?.prints("67108864\n")?;
    task.exec(&["cmp", "/proc/1/cgroup", "/proc/self/cgroup"])?.succeeds()?;
    task.exec(&["sh", "-c", "ulimit -n"])?.succeeds()?.prints("1024\n")?;
    Ok(())
}

fn capabilities(host: &Host) -> Result<()> {
    let task = host.idle()?;
    let sets = |process: &str| -> Result<String> {
        let text = task.exec(&["grep", "-E", "^(Cap|NoNewPrivs)", &format!("/proc/{process}/status")])?;
        Ok(text.succeeds()?.text())
    };
    let (init, own) = (sets("1")?, sets("self")?);
    ensure!(init == own, "expected  the capabilities of init:\n{init}\ncame      {own}");
    Ok(())
}

fn nothing_of_the_host(host: &Host) -> Result<()> {
    let task = host.idle()?;
    // Only the standard streams, and what ls opens to look.
    let listed = task.exec(&["ls", "/proc/self/fd"])?;
    listed.check("four descriptors", listed.succeeds()?.text().split_whitespace().count() == 4)?;
    task.exec(&["sh", "-c", "ls /run/bulkhead /usr/lib/bulkhead 2>/dev/null | wc -l"])?
        .succeeds()?
        .prints("0\n")?;
    Ok(())
}

fn killed_alone(host: &Host) -> Result<()> {
    let task = host.idle()?;
    let mut exec = task.start_exec("victim", &["sh", "-c", "echo ready; exec sleep 1000"])?;
    exec.wait_for("ready\n")?;
    host.ctr(["tasks", "kill", "--exec-id", "victim", "--signal", "SIGKILL", task.id()]).run()?.succeeds()?;
    exec.close_input();
    exec.finish()?.exits(137)?;
    task.wait_for_state("RUNNING")?;
    task.exec(&["echo", "alive"])?.succeeds()?.prints("alive\n")?;
    Ok(())
}

fn ends_with_container(host: &Host) -> Result<()> {
    let task = host.container().detach(&IDLE)?;
    let mut exec = task.start_exec("guest", &["sh", "-c", "echo ready; exec sleep 1000"])?;
    exec.wait_for("ready\n")?;
    task.kill("SIGKILL")?;
    exec.close_input();
    exec.finish()?.exits(137)?;
    task.ends(137)
}

fn detached(host: &Host) -> Result<()> {
    let task = host.container().detach(&IDLE)?;
    task.exec_flags(&["--detach"], &["sh", "-c", "echo done > /tmp/done"])?.succeeds()?;
    task.exec(&["sh", "-c", "until test -s /tmp/done; do sleep 0.1; done"])?.succeeds()?;
    Ok(())
}

fn missing_command(host: &Host) -> Result<()> {
    let task = host.idle()?;
    let failed = task.exec(&["no-such-command"])?;
    failed.fails_with("no-such-command")?.within(host.error_limit())?;
    failed.fails_with("executable file not found in $PATH")?;
    task.exec(&["echo", "alive"])?.succeeds()?.prints("alive\n")?;
    Ok(())
}

fn missing_directory(host: &Host) -> Result<()> {
    let task = host.idle()?;
    task.exec_flags(&["--cwd", "/no/such/place"], &["true"])?.fails_with("no such file or directory")?;
    Ok(())
}

fn id_taken(host: &Host) -> Result<()> {
    let task = host.idle()?;
    let mut exec = task.start_exec("twin", &["sh", "-c", "echo ready; cat"])?;
    exec.wait_for("ready\n")?;
    task.start_exec("twin", &["true"])?.finish()?.fails_with("already exists")?;
    exec.close_input();
    exec.finish()?.exits(0)?;
    // It is free again.
    let mut again = task.start_exec("twin", &["echo", "again"])?;
    again.finish()?.succeeds()?.prints("again\n")?;
    Ok(())
}

fn stopped(host: &Host) -> Result<()> {
    let task = host.container().detach(&["true"])?;
    task.wait_for_state("STOPPED")?;
    let refused = task.exec(&["true"])?;
    refused.check("a refusal", refused.succeeds().is_err())?;
    task.ends(0)
}

fn divided_cgroup(host: &Host) -> Result<()> {
    // As an engine or an init does that runs in a container: a cgroup that has handed its controllers on takes no
    // process.
    let script = "cd /sys/fs/cgroup$(sed -n s/^0:://p /proc/self/cgroup) && mkdir inner && \
                  echo 1 > inner/cgroup.procs && echo +memory > cgroup.subtree_control && \
                  touch /shared/divided && exec sleep 1000";
    let shared = scratch()?;
    let mount = ["--mount", "type=cgroup,src=cgroup,dst=/sys/fs/cgroup,options=rw"];
    let container = host.container().flags(mount).bind(shared.path(), "/shared", "rbind:rw");
    let task = container.detach(&["sh", "-c", script])?;
    let divided = shared.path().join("divided");
    wait_until("the cgroup to be divided", host.patience(SOON), || Ok(divided.exists()))?;
    let seen = task.exec(&["sed", "-n", "s/^0:://p", "/proc/self/cgroup"])?;
    seen.succeeds()?.check("the cgroup that init is in", seen.text().ends_with("/inner\n"))?;
    Ok(())
}

fn twenty_at_once(host: &Host) -> Result<()> {
    let task = host.idle()?;
    let mut execs = Vec::new();
    for n in 0..20 {
        let script = format!("echo {n}; cat; exit {n}");
        execs.push(task.start_exec(&format!("one-{n}"), &["sh", "-c", &script])?);
    }
    for (n, exec) in execs.iter_mut().enumerate() {
        exec.wait_for(&format!("{n}\n"))?;
        exec.close_input();
        exec.finish()?.exits(n as i32)?.prints(&format!("{n}\n"))?;
    }
    Ok(())
}

fn events_in_order(host: &Host) -> Result<()> {
    let events = Events::subscribe(host)?;
    let task = host.container().detach(&IDLE)?;
    let id = task.id().to_owned();
    task.exec(&["sh", "-c", "exit 3"])?.exits(3)?;
    task.dies()?;
    let topics = [
        "/tasks/create",
        "/tasks/start",
        "/tasks/exec-added",
        "/tasks/exec-started",
        "/tasks/exit",
        "/tasks/exit",
    ];
    let seen = events.expect_life(host, &id, &topics)?;
    let statuses = (seen[4].exit_status(), seen[5].exit_status());
    ensure!(statuses == (3, 137), "expected  exit statuses 3 and 137\ncame      {statuses:?}");
    Ok(())
}

fn leaves_nothing(host: &Host) -> Result<()> {
    host.leaves_nothing(|| {
        let task = host.container().detach(&IDLE)?;
        for _ in 0..5 {
            task.exec(&["sh", "-c", "sleep 1000 & echo hello"])?.succeeds()?.prints("hello\n")?;
        }
        task.dies()
    })
}
