//! A guest that stops answering: it is told from one that works, holds up nobody but who asks it, and goes when it is
//! killed. So does a VM whose files are on a file system that stops answering.

use std::fs::{self, File};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use containerd_shim_protos::types::task::Status;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

mod disk;
mod files;
mod slow_syncs;

use super::Case;
use super::jail::{Vmm, stop_vmm};
use super::templates::state_dir;
use crate::command::{Cmd, Size, wait_until};
use crate::ctr::{Host, NAMESPACE, Runtime};
use crate::fixtures::scratch;
use crate::shim::{Shim, granted, refused};
use crate::stuck::{Frozen, Hung};

pub(super) const CASES: &[Case] = &[
    Case::bulkhead("state_is_answered_at_once_while_another_request_is_stuck", state_at_once),
    Case::bulkhead("state_is_answered_at_once_while_the_vm_boots", state_while_booting),
    Case::bulkhead("a_guest_that_does_not_answer_is_reported_killed_and_deleted", killed_and_deleted),
    Case::bulkhead("one_that_has_ended_is_deleted", ended_is_deleted),
    Case::bulkhead("one_that_answers_again_goes_on", goes_on),
    Case::bulkhead("one_outlives_containerd", outlives_containerd),
    Case::bulkhead("a_vmm_ends_while_a_file_system_that_it_serves_hangs", vmm_with_hung_files),
    Case::bulkhead("a_pod_whose_disk_hangs_is_killed_and_deleted", disk::pod_ends),
    Case::bulkhead("a_disk_that_hangs_keeps_others_from_coming_but_no_pod_from_ending", disk::another_comes)
        .since(1, 7)
        .by_whole_name_only(),
    Case::both("a_file_system_that_hangs_does_not_stop_the_others", others_go_on),
    Case::both("syncs_that_wait_for_the_disk_do_not_stop_a_read", slow_syncs::reads_go_on),
    Case::both("a_client_that_reads_no_more_keeps_no_killed_container_alive", deaf_client),
    Case::both("output_that_was_not_read_at_the_end_of_a_process_still_arrives", late_reader),
];

/// How soon State must be answered, whatever the guest does.
const AT_ONCE: Duration = Duration::from_millis(50);
/// How long the shim waits for the guest before it gives up, and some more.
const GIVES_UP: Duration = Duration::from_secs(20);
const SIGKILL: u32 = 9;

/// What containerd and its shims wrote since then.
pub(super) fn journal(since: SystemTime) -> Result<String> {
    let since = format!("--since=@{}", since.duration_since(UNIX_EPOCH)?.as_secs());
    let finished = Cmd::new("journalctl").args(["--unit=containerd", "--no-pager", &since]).run()?;
    Ok(finished.succeeds()?.text())
}

/// Asks for the state a number of times, of which each answer must come at once.
fn ask_at_once(host: &Host, shim: &Shim) -> Result<()> {
    let limit = host.patience(AT_ONCE);
    for _ in 0..20 {
        let asked = Instant::now();
        let state = granted(shim.state(""))?.status.enum_value_or_default();
        let took = asked.elapsed();
        ensure!(state == Status::RUNNING, "expected  the task to be running\ncame      {state:?}");
        ensure!(took <= limit, "expected  State within {limit:?}\ncame      it after {took:?}");
    }
    Ok(())
}

fn state_at_once(host: &Host) -> Result<()> {
    let task = host.container().detach(&["sleep", "1000"])?;
    let (stuck, shim) = (Shim::of(host, task.id())?, Shim::of(host, task.id())?);
    let frozen = Frozen::vm_of(&task)?;
    let stuck = thread::spawn(move || stuck.stats());
    ask_at_once(host, &shim)?;
    ensure!(
        !stuck.is_finished(),
        "expected  the other request to be stuck all the while\ncame      its answer"
    );
    drop(frozen);
    match stuck.join() {
        Ok(answer) => granted(answer).map(drop),
        Err(_) => bail!("the thread of the other request panicked"),
    }
}

fn state_while_booting(host: &Host) -> Result<()> {
    let container = host.container();
    let (id, limit) = (container.id().to_owned(), host.patience(AT_ONCE));
    thread::scope(|scope| {
        let booting = scope.spawn(|| container.detach(&["sleep", "1000"]));
        let mut shim = None;
        wait_until("a shim to connect to", host.patience(Duration::from_secs(20)), || {
            shim = Shim::of(host, &id).ok();
            Ok(shim.is_some())
        })?;
        let shim = shim.context("no shim")?;
        let mut while_booting = 0;
        while !booting.is_finished() {
            let asked = Instant::now();
            let state = shim.state("");
            let took = asked.elapsed();
            ensure!(
                took <= limit,
                "expected  State within {limit:?}\ncame      it after {took:?}: {state:?}"
            );
            while_booting += u32::from(state.is_err());
            thread::sleep(Duration::from_millis(10));
        }
        ensure!(while_booting > 0, "expected  an answer from before the task was there\ncame      none");
        match booting.join() {
            Ok(task) => task.map(drop),
            Err(_) => bail!("the thread of ctr run panicked"),
        }
    })
}

fn killed_and_deleted(host: &Host) -> Result<()> {
    host.leaves_nothing(|| {
        let since = SystemTime::now();
        let task = host.container().detach(&["sleep", "1000"])?;
        let shim = Shim::of(host, task.id())?;
        let _frozen = Frozen::vm_of(&task)?;
        let limit = host.patience(GIVES_UP);
        refused(shim.stats())?.saying("the guest's agent does not answer Stats")?.within(limit)?;
        ask_at_once(host, &shim)?;
        let asked = Instant::now();
        granted(shim.kill("", SIGKILL))?;
        let took = asked.elapsed();
        ensure!(took <= limit, "expected  the kill within {limit:?}\ncame      it after {took:?}");
        task.wait_for_state("STOPPED")?;
        let log = journal(since)?;
        for words in ["the VM is killed", "the guest's agent does not answer SignalProcess"] {
            ensure!(log.contains(words), "expected  {words:?} in containerd's journal\ncame      not that");
        }
        task.ends(137)
    })
}

fn ended_is_deleted(host: &Host) -> Result<()> {
    host.leaves_nothing(|| {
        let task = host.container().detach(&["sh", "-c", "exit 5"])?;
        task.wait_for_state("STOPPED")?;
        let _frozen = Frozen::vm_of(&task)?;
        task.ends(5)
    })
}

fn goes_on(host: &Host) -> Result<()> {
    let task = host.container().detach(&["sleep", "1000"])?;
    let shim = Shim::of(host, task.id())?;
    let frozen = Frozen::vm_of(&task)?;
    refused(shim.pause())?.saying("the guest's agent does not answer PauseContainer")?;
    drop(frozen);
    // What was asked for too late to be answered is not done half: the task runs, and so does its process.
    task.wait_for_state("RUNNING")?;
    task.exec(&["echo", "alive"])?.succeeds()?.prints("alive\n")?;
    Ok(())
}

fn outlives_containerd(host: &Host) -> Result<()> {
    let task = host.container().detach(&["sleep", "1000"])?;
    let frozen = Frozen::vm_of(&task)?;
    Cmd::new("systemctl").args(["restart", "containerd"]).run()?.succeeds()?;
    task.wait_for_state("RUNNING")?;
    drop(frozen);
    task.exec(&["echo", "alive"])?.succeeds()?.prints("alive\n")?;
    Ok(())
}

fn vmm_with_hung_files(host: &Host) -> Result<()> {
    let volume = scratch()?;
    let place = volume.path().join("hung");
    fs::create_dir(&place)?;
    let _hung = Hung::mount(&place)?;
    let task = host.container().bind(volume.path(), "/vol", "rbind:rw").detach(&["sleep", "1000"])?;
    let vmm = Vmm::of(&task)?;
    let _stuck = task.start_exec("stuck", &["ls", "/vol/hung"])?;
    let limit = host.patience(Duration::from_secs(5));
    // proc_pid_stat(5): it waits for the file system.
    let is_stuck = || Ok(vmm.threads()?.iter().any(|thread| thread.name == "fs" && thread.is_stuck()));
    wait_until("the thread that serves files to be stuck", limit, is_stuck)?;
    // It would kill a VMM that has lost its agent, and shall see how this one ends by itself.
    let shim = Frozen::of(Runtime::Bulkhead.shim(), &task)?;
    stop_vmm(&state_dir(NAMESPACE, task.id())?.join("control.sock"))?;
    wait_until("the VMM to end", limit, || Ok(vmm.has_ended()))?;
    drop(shim);
    task.ends(137)
}

/// A process that uses a hung volume waits. All other processes and files of the container work.
fn others_go_on(host: &Host) -> Result<()> {
    let (volume, other) = (scratch()?, scratch()?);
    let place = volume.path().join("hung");
    fs::create_dir(&place)?;
    fs::write(volume.path().join("file"), "in the same volume\n")?;
    fs::write(other.path().join("file"), "in another volume\n")?;
    let hung = Hung::mount(&place)?;
    let container =
        host.container().bind(volume.path(), "/vol", "rbind:rw").bind(other.path(), "/other", "rbind:rw");
    let task = container.detach(&["sleep", "1000"])?;
    let _stuck = task.start_exec("stuck", &["ls", "/vol/hung"])?;
    let limit = host.patience(Duration::from_secs(10));
    wait_until("a process to wait for the hung file system", limit, || {
        let found = task.exec(&["sh", "-c", "cat /proc/[0-9]*/stat | grep -c '(ls) ' || true"])?.text();
        Ok(found.trim() == "1")
    })?;
    task.exec(&["cat", "/other/file"])?.succeeds()?.prints("in another volume\n")?;
    task.exec(&["cat", "/vol/file"])?.succeeds()?.prints("in the same volume\n")?;
    task.exec(&["sh", "-c", "echo new >/other/new && ls /bin >/dev/null"])?.succeeds()?;
    drop(hung);
    Ok(())
}

fn deaf_client(host: &Host) -> Result<()> {
    let script = "until test -e /tmp/go; do sleep 0.1; done; exec yes";
    let attached = host.container().start(&["sh", "-c", script])?;
    attached.task.wait_for_state("RUNNING")?;
    let frozen = Frozen::of("ctr", &attached.task)?;
    attached.task.exec(&["touch", "/tmp/go"])?.succeeds()?;
    let limit = host.patience(Duration::from_secs(10));
    wait_until("the container to wait for its reader", limit, || {
        let status = attached.task.exec(&["sh", "-c", "grep -E '^(Name|State)' /proc/1/status"])?.text();
        Ok(status.contains("yes") && status.contains("S (sleeping)"))
    })?;
    let killed = Instant::now();
    attached.task.kill("SIGKILL")?;
    attached.task.wait_for_state("STOPPED")?;
    let (took, limit) = (killed.elapsed(), host.patience(Duration::from_secs(3)));
    ensure!(took <= limit, "expected  the end within {limit:?}\ncame      it after {took:?}");
    drop(frozen);
    attached.finish()?.exits(137)?;
    Ok(())
}

/// Whether a FIFO takes no more. Somebody else has both of its ends open.
fn is_full(path: &str) -> Result<bool> {
    let writer = File::options().write(true).custom_flags(nix::libc::O_NONBLOCK).open(path)?;
    let mut ready = [PollFd::new(writer.as_fd(), PollFlags::POLLOUT)];
    Ok(poll(&mut ready, PollTimeout::ZERO)? == 0)
}

/// Processes of several amounts of output, so that at the end of some of them the rest is in each buffer on the way.
/// Their clients have gone, because `ctr` itself drops what it has not read at the end of a process.
fn late_reader(host: &Host) -> Result<()> {
    const LINES: [usize; 3] = [6_000, 20_000, 60_000];
    const SIZE: Size = Size { width: 80, height: 24 };
    let task = host.container().detach(&["sleep", "1000"])?;
    let mut execs = Vec::new();
    for (lines, in_terminal) in LINES.iter().flat_map(|lines| [(*lines, false), (*lines, true)]) {
        let dir = scratch()?;
        let dir_name = dir.path().display().to_string();
        let flags = ["--detach", "--fifo-dir", &dir_name];
        let script =
            format!("until test -e /tmp/go; do sleep 0.1; done; yes 0123456789abcde | head -n {lines}");
        let command = ["sh", "-c", &script];
        if in_terminal {
            task.exec_in_terminal(&flags, SIZE, &command)?.finish()?.succeeds()?;
        } else {
            task.exec_flags(&flags, &command)?.succeeds()?;
        }
        let line = if in_terminal { "0123456789abcde\r\n" } else { "0123456789abcde\n" };
        execs.push((dir, line.repeat(lines)));
    }
    let mut outputs = Vec::new();
    for (dir, expected) in &execs {
        let path =
            Cmd::new("find").args([dir.path()]).args(["-name", "*-stdout"]).run()?.text().trim().to_owned();
        // This does not wait, because the shim has the other end open.
        let output = File::open(&path).with_context(|| format!("cannot open the output {path:?}"))?;
        outputs.push((path, output, expected));
    }
    task.exec(&["touch", "/tmp/go"])?.succeeds()?;
    for (path, ..) in &outputs {
        wait_until(&format!("{path} to fill up"), host.patience(Duration::from_secs(20)), || is_full(path))?;
    }
    for (path, output, expected) in outputs {
        drop(output);
        Cmd::new("cat").args([path]).run()?.succeeds()?.prints(expected)?;
    }
    Ok(())
}
