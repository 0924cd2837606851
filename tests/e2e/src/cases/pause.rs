//! Pause and resume: the container stands still, and is still there.

use std::fs;
use std::thread;
use std::time::Duration;

use anyhow::{Result, ensure};
use containerd_shim_protos::types::task::Status;
use tempfile::TempDir;

use super::Case;
use crate::command::{Cmd, wait_until};
use crate::ctr::{Host, Task};
use crate::events::Events;
use crate::fixtures::scratch;
use crate::image_root::ImageRoot;
use crate::shim::{Shim, granted};

pub(super) const CASES: &[Case] = &[
    Case::both("a_paused_container_stands_still_until_it_is_resumed", stands_still),
    Case::both("its_processes_stand_still_together", execs_stand_still),
    Case::both("a_paused_container_takes_no_process", takes_no_process),
    Case::both("a_paused_container_is_not_deleted", not_deleted),
    Case::both("a_paused_container_is_killed", killed),
    Case::both("a_signal_waits_for_the_resume", signal_waits),
    Case::both("a_paused_container_is_listed_and_measured", listed_and_measured),
    Case::both("events_tell_of_pause_and_resume", events_in_order),
    Case::both("what_a_mapping_has_changed_is_with_the_host_when_the_container_is_paused", written_back),
    Case::both("a_pause_outlives_containerd", outlives_containerd),
    Case::both("nothing_is_left_of_a_container_that_was_paused", leaves_nothing),
];

/// Time for what is wrong to show up, where the right thing is that nothing happens: a process that runs counts ten
/// times. No event tells that it does not, and a paused container takes no process that could look.
const NOTHING_HAPPENS: Duration = Duration::from_millis(500);
/// How long a container may take to count on.
const COUNTS: Duration = Duration::from_secs(10);

/// Counts in a file of this name, for ever.
fn counting(name: &str) -> String {
    format!("i=0; while :; do i=$((i + 1)); echo $i > /data/{name}; sleep 0.05; done")
}

/// A container that counts in a file of the host.
struct Counter<'h> {
    host: &'h Host,
    task: Task<'h>,
    directory: TempDir,
}

impl<'h> Counter<'h> {
    fn start(host: &'h Host) -> Result<Self> {
        let directory = scratch()?;
        let container = host.container().bind(directory.path(), "/data", "rbind:rw");
        let task = container.detach(&["sh", "-c", &counting("init")])?;
        let counter = Self { host, task, directory };
        counter.counts("init")?;
        Ok(counter)
    }

    fn count(&self, name: &str) -> String {
        fs::read_to_string(self.directory.path().join(name)).unwrap_or_default()
    }

    fn counts(&self, name: &str) -> Result<()> {
        let before = self.count(name);
        let went_on = || {
            let now = self.count(name);
            Ok(!now.is_empty() && now != before)
        };
        wait_until(
            &format!("the {name} process to count on from {before:?}"),
            self.host.patience(COUNTS),
            went_on,
        )
    }

    fn stands_still(&self, name: &str) -> Result<()> {
        let before = self.count(name);
        thread::sleep(NOTHING_HAPPENS);
        let now = self.count(name);
        ensure!(
            now == before,
            "expected  {name} to stand still at {before:?}\ncame      it went on to {now:?}"
        );
        Ok(())
    }

    fn pause(&self) -> Result<()> {
        command(self.host, "pause", &self.task)?;
        self.task.wait_for_state("PAUSED")
    }

    fn resume(&self) -> Result<()> {
        command(self.host, "resume", &self.task)?;
        self.task.wait_for_state("RUNNING")
    }
}

fn command(host: &Host, name: &str, task: &Task<'_>) -> Result<()> {
    host.ctr(["tasks", name, task.id()]).run()?.succeeds()?;
    Ok(())
}

fn stands_still(host: &Host) -> Result<()> {
    let counter = Counter::start(host)?;
    for _ in 0..2 {
        counter.pause()?;
        counter.stands_still("init")?;
        counter.resume()?;
        counter.counts("init")?;
    }
    Ok(())
}

/// Changes a file by a shared mapping that stays.
const MAP: &str = "\
import mmap, os, time
file = os.open('/data/file', os.O_RDWR | os.O_CREAT)
os.write(file, bytes(4096))
mapped = mmap.mmap(file, 4096)
mapped[:7] = b'changed'
os.mkdir('/data/ready')
time.sleep(1000)
";

/// `docker commit` pauses a container and copies its root.
fn written_back(host: &Host) -> Result<()> {
    let (image, volume) = (ImageRoot::make()?, scratch()?);
    let container = host.container().bind(volume.path(), "/data", "rbind:rw");
    let task = image.detach(host, container, &["python3", "-c", MAP])?;
    wait_until("the change", host.patience(COUNTS), || Ok(volume.path().join("ready").exists()))?;
    command(host, "pause", &task)?;
    let text = fs::read(volume.path().join("file"))?;
    ensure!(
        text.starts_with(b"changed"),
        "expected  \"changed\"\ncame      {:?}",
        &text[..7.min(text.len())]
    );
    command(host, "resume", &task)
}

fn execs_stand_still(host: &Host) -> Result<()> {
    let counter = Counter::start(host)?;
    let running = counter.task.start_exec("beside", &["sh", "-c", &counting("beside")])?;
    counter.counts("beside")?;
    counter.pause()?;
    let shim = Shim::of(host, counter.task.id())?;
    let state = granted(shim.state("beside"))?.status.enum_value_or_default();
    ensure!(state == Status::PAUSED, "expected  the process to be paused\ncame      {state:?}");
    counter.stands_still("beside")?;
    counter.resume()?;
    counter.counts("beside")?;
    let state = granted(shim.state("beside"))?.status.enum_value_or_default();
    ensure!(state == Status::RUNNING, "expected  the process to run again\ncame      {state:?}");
    drop(running);
    Ok(())
}

fn takes_no_process(host: &Host) -> Result<()> {
    let counter = Counter::start(host)?;
    counter.pause()?;
    counter.task.exec(&["true"])?.fails_with("paused")?;
    counter.resume()?;
    counter.task.exec(&["true"])?.succeeds()?;
    Ok(())
}

fn not_deleted(host: &Host) -> Result<()> {
    let counter = Counter::start(host)?;
    counter.pause()?;
    host.ctr(["tasks", "delete", counter.task.id()]).run()?.fails_with("must be stopped")?;
    counter.resume()?;
    counter.counts("init")
}

fn killed(host: &Host) -> Result<()> {
    let counter = Counter::start(host)?;
    counter.pause()?;
    counter.task.dies()
}

fn signal_waits(host: &Host) -> Result<()> {
    let script = "trap 'exit 3' TERM; echo ready; while :; do sleep 0.1; done";
    let mut attached = host.container().start(&["sh", "-c", script])?;
    attached.running.wait_for("ready\n")?;
    command(host, "pause", &attached.task)?;
    attached.task.kill("SIGTERM")?;
    thread::sleep(NOTHING_HAPPENS);
    attached.task.wait_for_state("PAUSED")?;
    command(host, "resume", &attached.task)?;
    attached.running.close_input();
    attached.finish()?.exits(3)?;
    Ok(())
}

fn listed_and_measured(host: &Host) -> Result<()> {
    let counter = Counter::start(host)?;
    counter.pause()?;
    let list = host.ctr(["tasks", "ps", counter.task.id()]).run()?;
    list.check("a process of the container", list.succeeds()?.text().lines().count() > 1)?;
    let metrics = host.ctr(["tasks", "metrics", counter.task.id()]).run()?;
    metrics.check("numbers of the container", metrics.succeeds()?.text().contains("pids.current"))?;
    Ok(())
}

fn events_in_order(host: &Host) -> Result<()> {
    let events = Events::subscribe(host)?;
    let counter = Counter::start(host)?;
    let id = counter.task.id().to_owned();
    counter.pause()?;
    counter.resume()?;
    counter.pause()?;
    counter.task.dies()?;
    let topics =
        ["/tasks/create", "/tasks/start", "/tasks/paused", "/tasks/resumed", "/tasks/paused", "/tasks/exit"];
    events.expect_life(host, &id, &topics).map(drop)
}

fn outlives_containerd(host: &Host) -> Result<()> {
    let counter = Counter::start(host)?;
    counter.pause()?;
    Cmd::new("systemctl").args(["restart", "containerd"]).run()?.succeeds()?;
    counter.task.wait_for_state("PAUSED")?;
    counter.stands_still("init")?;
    counter.resume()?;
    counter.counts("init")
}

fn leaves_nothing(host: &Host) -> Result<()> {
    host.leaves_nothing(|| killed(host))
}
