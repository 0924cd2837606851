//! A guest that does to its devices what no driver does: it can hurt only itself.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};
use bulkhead_vmm_api::Transport;

use super::Case;
use super::hangs::journal;
use super::jail::{Vmm, stop_vmm};
use super::templates::state_dir;
use crate::command::{contains, wait_until};
use crate::ctr::{Host, NAMESPACE, SETTLES, Task};
use crate::fixtures::{CONFIGURATION, Replaced, installed, scratch};
use crate::{hostile, hostile_agent};

pub(super) const CASES: &[Case] = &[
    Case::bulkhead("garbage_in_every_register_and_ring_hurts_nobody_else", garbage),
    Case::bulkhead("garbage_in_the_registers_of_mmio_hurts_nobody_else", garbage_by_mmio),
    Case::bulkhead("an_agent_that_answers_anything_ends_its_pod_alone", agent),
    Case::bulkhead("a_guest_that_never_tells_of_an_end_is_killed_all_the_same", immortal),
];

/// Of the hostile guest, the least that a VM can have.
const MEMORY_MIB: u64 = 64;
/// As much more as its VMM may take.
const VMM_MIB: u64 = 32;
/// The VMM keeps 4 MiB of a console, and a line that says so.
const LARGEST_CONSOLE: u64 = (4 << 20) + 100;
/// Lines about one VM in the host's log: five of each device, and what the shim says of its steps.
const MOST_LINES: usize = 60;
/// How long it may take to play all.
const PLAYS: Duration = Duration::from_secs(30);

fn garbage(host: &Host) -> Result<()> {
    garbage_by(host, Transport::default(), "")
}

fn garbage_by_mmio(host: &Host) -> Result<()> {
    garbage_by(host, Transport::Mmio, "transport = \"mmio\"\n")
}

fn garbage_by(host: &Host, transport: Transport, configuration: &str) -> Result<()> {
    let neighbour = host.container().detach(&["sleep", "1000"])?;
    let directory = scratch()?;
    let kernel = directory.path().join("hostile");
    hostile::write(&kernel, transport)?;
    let configuration =
        format!("kernel = {kernel:?}\nmemory_mib = {MEMORY_MIB}\nconsole = true\n{configuration}");
    host.leaves_nothing(|| play(host, &configuration, &neighbour))?;
    unharmed(&neighbour)
}

/// The pod ends with a line that says whose fault it was, whatever it is that no agent answers.
fn agent(host: &Host) -> Result<()> {
    let neighbour = host.container().detach(&["sleep", "1000"])?;
    let initramfs = installed(hostile_agent::INITRAMFS)?;
    let configuration = format!("initramfs = {initramfs:?}\ntemplates = false\n");
    host.leaves_nothing(|| {
        let _replaced = Replaced::file(Path::new(CONFIGURATION), &configuration)?;
        for (name, _) in hostile_agent::ANSWERS {
            let finished = host.container().named(name).run(&["true"])?;
            finished.fails_with("the guest's agent does not answer ")?.says_one_line()?;
            unharmed(&neighbour)?;
        }
        Ok(())
    })?;
    unharmed(&neighbour)
}

/// The guest takes SIGKILL, and goes on.
fn immortal(host: &Host) -> Result<()> {
    /// The shim gives it 20 s.
    const ENDS: Duration = Duration::from_secs(25);
    let neighbour = host.container().detach(&["sleep", "1000"])?;
    let initramfs = installed(hostile_agent::INITRAMFS)?;
    let configuration = format!("initramfs = {initramfs:?}\ntemplates = false\n");
    host.leaves_nothing(|| {
        let replaced = Replaced::file(Path::new(CONFIGURATION), &configuration)?;
        let task = host.container().named(hostile_agent::OBEDIENT).detach(&["true"])?;
        drop(replaced);
        task.kill("SIGKILL")?;
        wait_until("the task to end", host.patience(ENDS), || {
            Ok(host.task_state(task.id())?.as_deref() == Some("STOPPED"))
        })?;
        let status = task.delete()?;
        ensure!(status == 137, "expected  exit status 137\ncame      {status}");
        Ok(())
    })?;
    unharmed(&neighbour)
}

fn unharmed(task: &Task<'_>) -> Result<()> {
    task.exec(&["echo", "unharmed"])?.succeeds()?.prints("unharmed\n")?;
    Ok(())
}

fn play(host: &Host, configuration: &str, neighbour: &Task<'_>) -> Result<()> {
    let since = SystemTime::now();
    let replaced = Replaced::file(Path::new(CONFIGURATION), configuration)?;
    let attached = host.container().start(&["true"])?;
    wait_until("the state directory of the pod", host.patience(SETTLES), || {
        Ok(state_dir(NAMESPACE, attached.task.id()).is_ok())
    })?;
    let vm = HostileVm::of(&attached.task)?;
    wait_until("the hostile guest to have played all", host.patience(PLAYS), || {
        Ok(fs::read(vm.file("console/console.log")).is_ok_and(|text| contains(&text, hostile::DONE)))
    })?;
    drop(replaced);
    unharmed(neighbour)?;
    vm.rests(host)?;
    let most = vm.most_memory()?;
    ensure!(
        most <= (MEMORY_MIB + VMM_MIB) << 10,
        "expected  {MEMORY_MIB} + {VMM_MIB} MiB at most\ncame      {most} KiB"
    );
    let console = fs::metadata(vm.file("console/console.log"))?.len();
    ensure!(console <= LARGEST_CONSOLE, "expected  a console of 4 MiB at most\ncame      {console} bytes");
    stop_vmm(&vm.file("control.sock"))?;
    let finished = attached.finish()?;
    finished.fails_with("the VM ended: ")?.says_one_line()?;
    let log = journal(since)?;
    let lines = log.lines().filter(|line| line.contains(&vm.id)).count();
    ensure!(lines <= MOST_LINES, "expected  {MOST_LINES} lines of log at most\ncame      {lines}");
    ensure!(
        log.contains("stopped until its driver resets it"),
        "expected  a device that was abused\ncame      {log}"
    );
    Ok(())
}

/// The VMM of the hostile guest, seen from outside.
struct HostileVm {
    id: String,
    state: PathBuf,
}

impl HostileVm {
    fn of(task: &Task<'_>) -> Result<Self> {
        let id = task.id().to_owned();
        Ok(Self { state: state_dir(NAMESPACE, &id)?, id })
    }

    fn file(&self, name: &str) -> PathBuf {
        self.state.join(name)
    }

    /// Processor time that the VMM has used, in clock ticks: fields 14 and 15 of proc_pid_stat(5).
    fn ticks(&self) -> Result<u64> {
        let stat = Vmm::of_sandbox(&self.id)?.read("stat")?;
        let (_, fields) = stat.rsplit_once(')').context("no name in stat")?;
        let times = fields.split_whitespace().skip(11).take(2);
        times.map(|field| Ok(field.parse::<u64>()?)).sum()
    }

    /// With its guest at rest it does nothing either.
    fn rests(&self, host: &Host) -> Result<()> {
        wait_until("the VMM to come to rest", host.patience(SETTLES), || {
            let before = self.ticks()?;
            // Rest is the use of no processor time in a time: a hundred ticks of a thread that spins.
            thread::sleep(Duration::from_secs(1));
            Ok(self.ticks()? == before)
        })
    }

    /// The most that it ever had in memory, KiB, with its guest's.
    fn most_memory(&self) -> Result<u64> {
        let status = Vmm::of_sandbox(&self.id)?.read("status")?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let number = line.and_then(|line| line.split_whitespace().next()).context("no VmHWM")?;
        Ok(number.parse()?)
    }
}
