//! What `cargo xtask demo hostile` shows: a container that is root and privileged attacks its host, and what the host
//! saw of each attempt. Drills of docs/security.md follow.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use nix::sys::statvfs::statvfs;

use crate::command::{Cmd, Finished, wait_until};
use crate::ctr::{Host, NAMESPACE, SETTLES, Task};
use crate::fixtures::scratch;
use crate::runner::{self, Wanted};

/// The memory limit of the attacker. Its last attack needs one that is reached soon.
const MEMORY: &str = "134217728";

/// Where the shims keep their state.
const RUN: &str = "/run/bulkhead";

/// How much less may be free in the host's /run after an attack on it: other parts of the host write there too.
const LESS: u64 = 8 << 20;

/// The program that the host's kernel would execute, if the attack on it succeeded.
const CORE_PATTERN: &str = "/proc/sys/kernel/core_pattern";

/// Drills that are cases too. What they check is in docs/security.md.
const DRILLS: [&str; 2] = [
    "share/a_link_in_place_of_the_mounts_leads_delete_to_no_host_directory",
    "hostile/garbage_in_every_register_and_ring_hurts_nobody_else",
];

/// Attacks the host, and tells what came of it. An attack that succeeds is an error.
pub(crate) fn tell(host: &Host) -> Result<()> {
    let clock = Clock(Instant::now());
    let neighbour = host.container().detach(&["sleep", "1000"])?;
    clock.says(&format!("another pod runs beside the attacker's: {}", neighbour.id()));
    let victim = scratch()?;
    fs::write(victim.path().join("secret"), "of the host")?;
    host.leaves_nothing(|| attack(host, &clock, victim.path()))?;
    let kept = fs::read_to_string(victim.path().join("secret"))?;
    ensure!(kept == "of the host", "the host's file was changed: {kept:?}");
    neighbour.exec(&["echo", "unharmed"])?.prints("unharmed\n")?;
    clock.saw("the attacker's pod is deleted, and nothing is left of it; the host's files are as before");
    clock.saw("the other pod answers");
    drills(host, &clock)?;
    neighbour.dies()?;
    clock.says("no attack has succeeded");
    Ok(())
}

fn attack(host: &Host, clock: &Clock, victim: &Path) -> Result<()> {
    let flags = ["--privileged", "--memory-limit", MEMORY];
    let attacker = host.container().flags(flags).detach(&["sleep", "1000"])?;
    clock.says(&format!("the attacker is root in a privileged container: {}", attacker.id()));
    another_kernel(&attacker, clock)?;
    core_pattern(&attacker, clock)?;
    disk(&attacker, clock)?;
    share(&attacker, clock, victim)?;
    room(&attacker, clock)?;
    panic(host, attacker, clock)
}

fn another_kernel(attacker: &Task<'_>, clock: &Clock) -> Result<()> {
    let script = "uname -r; ls -d /dev/kvm /dev/mem";
    let tried = clock.tries(attacker, "which kernel is this, and has it the host's devices?", script)?;
    let release = fs::read_to_string("/proc/sys/kernel/osrelease")?;
    ensure!(!tried.text().contains(release.trim()), "the attacker is on the host's kernel");
    ensure!(!tried.text().contains("/dev/"), "the attacker has devices of the host");
    clock.saw(&format!("its own kernel is {}", release.trim()));
    Ok(())
}

/// On runc this changes the host's setting, and the host's kernel executes the program as root.
fn core_pattern(attacker: &Task<'_>, clock: &Clock) -> Result<()> {
    let before = fs::read_to_string(CORE_PATTERN)?;
    let script = format!("echo '|/tmp/evil' > {CORE_PATTERN}; cat {CORE_PATTERN}");
    clock.tries(attacker, "have the kernel execute my program as root, outside of the container", &script)?;
    let after = fs::read_to_string(CORE_PATTERN)?;
    ensure!(before == after, "the host's core_pattern was changed to {after:?}");
    clock.saw(&format!("its {CORE_PATTERN} is {:?} as before", after.trim()));
    Ok(())
}

/// A node with the numbers of the host's disk is no disk in the guest.
fn disk(attacker: &Task<'_>, clock: &Clock) -> Result<()> {
    let device = fs::metadata("/")?.dev();
    let (major, minor) = (nix::sys::stat::major(device), nix::sys::stat::minor(device));
    let script = format!(
        "mknod /tmp/disk b {major} {minor} && head -c 4096 /tmp/disk | wc -c; head -c 1 /tmp/disk > /dev/null"
    );
    let tried = clock.tries(attacker, "read the disk that the host's root is on", &script)?;
    ensure!(tried.status != Some(0), "the attacker has read from the host's disk");
    clock.saw(&format!("nothing: its disk {major}:{minor} is not in the VM"));
    Ok(())
}

/// A name of the share that the shim uses becomes a link, which the shim would follow when it deletes the container.
fn share(attacker: &Task<'_>, clock: &Clock, victim: &Path) -> Result<()> {
    let script = format!(
        "mkdir -p /m && mount -t virtiofs share /m && cd /m/{} && {{ mv mounts moved; ln -s {} mounts; touch new; ls; }}",
        attacker.id(),
        victim.display()
    );
    let what = "put a link to a directory of the host in place of one that the shim is going to remove";
    let tried = clock.tries(attacker, what, &script)?;
    ensure!(tried.text().contains("rootfs"), "the attacker has not seen the share");
    let mut states =
        fs::read_dir(RUN)?.flatten().map(|entry| entry.path().join(NAMESPACE).join(attacker.id()));
    let state = states.find(|path| path.exists()).context("the attacker has no state directory")?;
    let is_link = |name: &str| {
        let path = state.join("share").join(attacker.id()).join(name);
        path.symlink_metadata().is_ok_and(|it| it.is_symlink())
    };
    ensure!(!is_link("mounts") && !is_link("new"), "the attacker has put a link in the share");
    clock.saw("no link: the directories of the share are read-only");
    Ok(())
}

fn room(attacker: &Task<'_>, clock: &Clock) -> Result<()> {
    let free = || -> Result<u64> {
        let run = statvfs("/run")?;
        Ok(run.blocks_available() * run.fragment_size())
    };
    let before = free()?;
    let script = "dd if=/dev/zero of=/m/fill bs=1M count=64; for it in $(seq 100); do mkdir /m/$it; done";
    clock.tries(attacker, "fill the host's /run, through the share", script)?;
    let after = free()?;
    ensure!(before < after + LESS, "the attacker has taken {} bytes of /run", before - after);
    clock.saw(&format!("{} MiB of /run are free, and {} MiB were before", after >> 20, before >> 20));
    Ok(())
}

/// The kernel that panics is the guest's.
fn panic(host: &Host, attacker: Task<'_>, clock: &Clock) -> Result<()> {
    let id = attacker.id().to_owned();
    let script = "echo 2 > /proc/sys/vm/panic_on_oom; tail /dev/zero";
    let tried = clock.tries(&attacker, "let the kernel panic", script)?;
    ensure!(tried.status != Some(0), "the attacker has survived the panic of its kernel");
    let mut events = String::new();
    wait_until("the end of the attacker's VM", host.patience(SETTLES), || {
        events = Cmd::new("bulkhead").args(["events", "--once", &id]).run()?.succeeds()?.text();
        Ok(events.contains("  vm_ended  "))
    })?;
    clock.saw("`bulkhead events --once` of the attacker's pod:");
    print!("{}", indented(&events));
    let panic = "Kernel panic - not syncing: Out of memory";
    ensure!(events.contains(panic), "the end of the VM is told without the panic of its kernel");
    let logs = Cmd::new("bulkhead").args(["logs", &id]).run()?.succeeds()?.text();
    ensure!(logs.contains(&format!("guest: {panic}")), "`bulkhead logs` lacks the panic");
    attacker.ends(137)
}

/// Runs some cases, which print a line each.
fn drills(host: &Host, clock: &Clock) -> Result<()> {
    clock.says("drills of docs/security.md:");
    let wanted = Wanted::Named(DRILLS.map(str::to_owned).to_vec());
    let selected = runner::select(host.runtime(), host.version(), false, &wanted)?;
    ensure!(runner::run(host, &selected), "a drill has failed");
    Ok(())
}

/// Says what happens, and when.
struct Clock(Instant);

impl Clock {
    fn says(&self, text: &str) {
        println!("{:5.1} s  {text}", self.0.elapsed().as_secs_f64());
    }

    /// Lets the attacker try something, and shows what it got to see.
    fn tries(&self, attacker: &Task<'_>, what: &str, script: &str) -> Result<Finished> {
        println!();
        self.says(&format!("ATTACK   {what}"));
        println!("{:18}$ {script}", "");
        let tried = attacker.exec(&["sh", "-c", script])?;
        print!("{}", indented(&tried.text()));
        print!("{}", indented(&String::from_utf8_lossy(&tried.stderr)));
        Ok(tried)
    }

    fn saw(&self, text: &str) {
        self.says(&format!("THE HOST {text}"));
    }
}

/// The first lines. An attacker may have caused many.
fn indented(text: &str) -> String {
    const MOST: usize = 8;
    let lines = text.lines().map(|line| format!("{:18}{}\n", "", line.trim_end()));
    let more = text.lines().count().saturating_sub(MOST);
    let rest = if more > 0 { format!("{:18}and {more} more lines\n", "") } else { String::new() };
    lines.take(MOST).collect::<String>() + &rest
}
