//! What a guest has of the host's memory, and gives back.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::Case;
use super::jail::Vmm;
use super::templates::{template_of, template_of_pod};
use crate::command::{Finished, wait_until};
use crate::cri::messages::LinuxContainerResources;
use crate::ctr::{Container, Host, Runtime, Task};
use crate::fixtures::{CONFIGURATION, HugePages, Replaced};
use crate::pods::Pod;

pub(super) const CASES: &[Case] = &[
    Case::bulkhead("512_mib_that_a_container_frees_go_back_to_the_host", half_a_gibibyte),
    Case::bulkhead("a_clone_gives_back_what_a_container_frees", clone),
    Case::both("a_container_can_use_its_limit_of_a_gibibyte_and_no_more", gibibyte),
    Case::both("a_container_without_a_limit_takes_a_gibibyte_at_once", unlimited),
    Case::both("a_container_without_a_limit_sees_two_gibibytes_or_a_quarter_of_the_host", sees_memory),
    Case::both("processes_without_a_limit_take_a_gibibyte_together", unlimited_together),
    Case::bulkhead("a_vm_that_has_grown_gives_back_what_a_container_frees", grown_gives_back),
    Case::bulkhead("a_vm_grows_to_what_is_configured_and_then_kills", grows_to_the_configured),
    Case::both("a_container_without_a_limit_grows_beside_one_that_reaches_its_own", beside_limited),
    // On runc the kernel chooses a process among all pods of the slice.
    Case::bulkhead("a_container_without_a_limit_ends_where_its_slice_is_full_and_the_pod_lives", full_slice),
    Case::bulkhead("a_limit_beyond_the_host_is_what_the_host_has", beyond_the_host),
    Case::bulkhead("a_vm_in_huge_pages_has_them_of_the_hosts_pool_and_grows_there", huge_pages),
    Case::bulkhead("a_pool_without_huge_pages_is_one_line_that_says_how_many", no_huge_pages),
    Case::bulkhead("a_cgroup_that_allows_no_huge_pages_is_an_error_at_the_start", no_huge_pages_allowed),
    Case::bulkhead("a_pod_gets_what_its_containers_limits_come_to", pod),
];

const MIB: u64 = 1 << 20;
/// How long a process may take to fill some hundred MiB.
const FILLS: Duration = Duration::from_secs(20);

/// How soon memory that a container has freed is the host's again on an ordinary machine.
const BACK: Duration = Duration::from_secs(10);
/// What may be missing of it: pieces that are too small for the guest to report, and what its kernel keeps at hand.
const KEPT_MIB: u64 = 32;

fn half_a_gibibyte(host: &Host) -> Result<()> {
    gives_back(host, &with_held(host.container().flags(["--memory-limit", "629145600"]))?, 512, KEPT_MIB)
}

fn clone(host: &Host) -> Result<()> {
    let task = with_held(host.container())?;
    template_of(&task)?;
    gives_back(host, &task, 128, KEPT_MIB)
}

/// Fills one buffer.
fn fills(task: &Task<'_>, mib: u64) -> Result<Finished> {
    task.exec(&["dd", "if=/dev/zero", "of=/dev/null", &format!("bs={mib}M"), "count=1"])
}

fn gibibyte(host: &Host) -> Result<()> {
    let task = host.container().flags(["--memory-limit", "1073741824"]).detach(&["sleep", "1000"])?;
    if host.runtime() == Runtime::Bulkhead {
        template_of(&task)?;
    }
    fills(&task, 960)?.succeeds()?;
    fills(&task, 1100)?.exits(137)?;
    fills(&task, 960)?.succeeds()?;
    // What a kernel allows by its memory: a task for each 128 KiB, watches of epoll in a twenty-fifth of it, and TCP's
    // largest buffers.
    let files = [
        "kernel/threads-max",
        "fs/inotify/max_user_watches",
        "fs/epoll/max_user_watches",
        "net/ipv4/tcp_rmem",
    ];
    let script = format!("cd /proc/sys && cat {}", files.join(" "));
    let finished = task.exec(&["sh", "-c", &script])?;
    let text = finished.succeeds()?.text();
    let numbers: Vec<u64> = text.split_whitespace().map_while(|word| word.parse().ok()).collect();
    let least = [8192, 8192, 200_000, 4096, 131_072, 6 << 20];
    let is_enough = numbers.len() == least.len() && numbers.iter().zip(least).all(|(it, least)| *it >= least);
    finished.check(&format!("{least:?} or more"), is_enough)?;
    // On runc it is the host's, which may not track connections.
    if host.runtime() == Runtime::Bulkhead {
        let tracked = number(&task, "/proc/sys/net/netfilter/nf_conntrack_max")?;
        ensure!(tracked >= 32_768, "expected  32,768 tracked connections or more\ncame      {tracked}");
    }
    task.dies()
}

fn number(task: &Task<'_>, file: &str) -> Result<u64> {
    Ok(task.exec(&["cat", file])?.succeeds()?.text().trim().parse()?)
}

/// Has VMs begin with so little that they have to grow.
fn small_at_first(host: &Host, more: &str) -> Result<Option<Replaced>> {
    let text = format!("unlimited_memory_mib = 256\n{more}");
    let replaces = host.runtime() == Runtime::Bulkhead;
    replaces.then(|| Replaced::file(Path::new(CONFIGURATION), &text)).transpose()
}

fn unlimited(host: &Host) -> Result<()> {
    let _small = small_at_first(host, "")?;
    let mount = ["--mount", "type=tmpfs,src=tmpfs,dst=/held,options=size=1100m"];
    let task = host.container().flags(mount).detach(&["sleep", "1000"])?;
    if host.runtime() == Runtime::Bulkhead {
        template_of(&task)?;
    }
    // One system call fills the memory.
    fills(&task, 1024)?.succeeds()?;
    // Many do, and the memory is that of files.
    let held = "dd if=/dev/zero of=/held/file bs=1M count=1024 2>/dev/null && cat /held/file | md5sum";
    task.exec(&["sh", "-c", held])?.succeeds()?.prints("cd573cfaace07e7949bc0c46028904ff  -\n")?;
    let tasks = number(&task, "/proc/sys/kernel/threads-max")?;
    ensure!(tasks >= 8192, "expected  threads-max as of a GiB, 8192 or more\ncame      {tasks}");
    task.dies()
}

/// MiB of memory, as /proc/meminfo says it.
fn total_mib(text: &str) -> Result<u64> {
    let kib = text.lines().find_map(|line| line.strip_prefix("MemTotal:")?.trim().strip_suffix(" kB"));
    Ok(kib.context("no MemTotal")?.parse::<u64>()? / 1024)
}

/// Programs choose the size of heaps and buffers by this.
fn sees_memory(host: &Host) -> Result<()> {
    let task = host.container().detach(&["sleep", "1000"])?;
    let sees = total_mib(&task.exec(&["cat", "/proc/meminfo"])?.succeeds()?.text())?;
    // Without the kernel's own part, and in whole blocks of memory.
    let expected = (total_mib(&fs::read_to_string("/proc/meminfo")?)? / 4).min(2048) - 256;
    ensure!(sees >= expected, "expected  {expected} MiB or more\ncame      {sees}");
    task.dies()
}

/// Each holds its buffer until its output is read, which nobody does.
fn holders(count: u32, mib: u32) -> String {
    format!(
        "for i in $(seq {count}); do dd if=/dev/zero bs={mib}M count=1 2>/dev/null | sleep 1000 & done; wait"
    )
}

fn unlimited_together(host: &Host) -> Result<()> {
    let _small = small_at_first(host, "")?;
    let task = host.container().detach(&["sh", "-c", &holders(16, 64)])?;
    let script = "cat /proc/[0-9]*/status | awk '/^VmRSS/ { kib += $2 } END { print kib }'";
    wait_until("16 processes to hold a GiB", host.patience(3 * FILLS), || {
        let kib: u64 = task.exec(&["sh", "-c", script])?.succeeds()?.text().trim().parse()?;
        // None was killed.
        Ok(kib >= 1 << 20)
    })?;
    unharmed(&task)?;
    task.dies()
}

fn grown_gives_back(host: &Host) -> Result<()> {
    let _small = small_at_first(host, "")?;
    // The guest describes the memory that it has grown by in a 64th of it: 12 MiB if it grows from 256 MiB to 1 GiB.
    gives_back(host, &with_held(host.container())?, 512, KEPT_MIB + 12)
}

fn grows_to_the_configured(host: &Host) -> Result<()> {
    let _small = small_at_first(host, "max_memory_mib = 512\n")?;
    let task = host.container().flags(["--privileged"]).detach(&["sleep", "1000"])?;
    fills(&task, 350)?.succeeds()?;
    fills(&task, 600)?.exits(137)?;
    // The guest's kernel and agent keep their reserve: the containers had reached a limit, and not the end of memory.
    let kills = task.exec(&["sh", "-c", "dmesg | grep -i 'out of memory: killed'"])?.succeeds()?.text();
    let is_of_cgroup = |line: &str| line.contains("Memory cgroup out of memory");
    ensure!(kills.lines().all(is_of_cgroup), "expected  kills for the limit of a cgroup\ncame      {kills}");
    fills(&task, 350)?.succeeds()?;
    let limited = host.container().flags(["--memory-limit", "1073741824"]).detach(&["sleep", "1000"])?;
    fills(&limited, 350)?.succeeds()?;
    fills(&limited, 600)?.exits(137)?;
    unharmed(&task)?;
    limited.dies()?;
    task.dies()
}

fn beside_limited(host: &Host) -> Result<()> {
    let _small = small_at_first(host, "")?;
    let pod = Pod::start(host)?;
    let unlimited = pod.container().start(&["sh", "-c", &holders(6, 100)])?;
    let limited = pod.container().memory_limit(64).start(&["sleep", "1000"])?;
    let fill =
        |mib: u64| limited.exec(&["dd", "if=/dev/zero", "of=/dev/null", &format!("bs={mib}M"), "count=1"]);
    wait_until("6 processes to hold 600 MiB", host.patience(3 * FILLS), || {
        // What a limited container may use does not grow.
        fill(100)?.exits(137)?;
        let held = unlimited.exec(&["cat", "/sys/fs/cgroup/memory.current"])?;
        Ok(held.succeeds()?.text().trim().parse::<u64>()? >= 600 * MIB)
    })?;
    fill(48)?.succeeds()?;
    let events = unlimited.exec(&["cat", "/sys/fs/cgroup/memory.events"])?.succeeds()?.text();
    ensure!(events.contains("\noom_kill 0\n"), "expected  no kill\ncame      {events}");
    pod.remove()
}

/// A slice of many pods, as kubepods.slice is, of which another pod has taken much.
fn full_slice(host: &Host) -> Result<()> {
    let _small = small_at_first(host, "")?;
    let slice = Cgroup::make(&host.new_id(), "memory")?;
    fs::write(slice.path().join("memory.max"), (800 * MIB).to_string()).context("cannot limit a slice")?;
    let _other = Holder::start(slice.path().join("other"), 300)?;
    let held =
        || Ok(fs::read_to_string(slice.path().join("memory.current"))?.trim().parse::<u64>()? >= 300 * MIB);
    wait_until("another pod to hold 300 MiB", host.patience(FILLS), held)?;

    let of_pod = format!("/{}/pod", slice.0);
    let task = host.container().flags(["--cgroup", &of_pod]).detach(&["sleep", "1000"])?;
    fills(&task, 150)?.succeeds()?;
    fills(&task, 600)?.exits(137)?;
    fills(&task, 150)?.succeeds()?;
    let events = fs::read_to_string(slice.path().join("memory.events"))?;
    ensure!(events.contains("\noom_kill 0\n"), "expected  no kill by the host\ncame      {events}");
    task.dies()
}

/// A process that holds memory in a cgroup of its own, until it is dropped.
struct Holder {
    cgroup: PathBuf,
    process: std::process::Child,
}

impl Holder {
    fn start(cgroup: PathBuf, mib: u64) -> Result<Self> {
        fs::create_dir(&cgroup).context("cannot make a cgroup")?;
        // The buffer is full as long as nobody reads from the pipe.
        let holds = format!(
            "echo $$ > {}/cgroup.procs && dd if=/dev/zero bs={mib}M count=1 2>/dev/null | sleep 1000",
            cgroup.display()
        );
        let process =
            std::process::Command::new("sh").args(["-c", &holds]).spawn().context("cannot start sh")?;
        Ok(Self { cgroup, process })
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        // What is left of it is for the next look at the host to report.
        let _ = fs::write(self.cgroup.join("cgroup.kill"), "1");
        let _ = self.process.wait();
        let removed = || Ok(fs::remove_dir(&self.cgroup).is_ok());
        let _ = wait_until("an empty cgroup", Duration::from_secs(5), removed);
    }
}

fn beyond_the_host(host: &Host) -> Result<()> {
    let limit = (1u64 << 42).to_string();
    let task = host.container().flags(["--memory-limit", &limit]).detach(&["sleep", "1000"])?;
    template_of(&task)?;
    let guest = total_mib(&task.exec(&["cat", "/proc/meminfo"])?.succeeds()?.text())?;
    let host_mib = total_mib(&fs::read_to_string("/proc/meminfo")?)?;
    ensure!(
        (host_mib / 10 * 9..=host_mib).contains(&guest),
        "expected  most of the host's {host_mib} MiB\ncame      {guest}"
    );
    task.dies()
}

fn pod(host: &Host) -> Result<()> {
    let limit = 400 * MIB as i64;
    let limited = || LinuxContainerResources { memory_limit_in_bytes: limit, ..Default::default() };
    let pod = Pod::start(host)?;
    template_of_pod(&pod)?;
    // Its buffer is full as long as nobody reads from the pipe.
    let holds = ["sh", "-c", "dd if=/dev/zero bs=340M count=1 2>/dev/null | sleep 1000"];
    let one = pod.container().named("one", 0).resources(limited()).start(&holds)?;
    let other = pod.container().named("other", 0).resources(limited()).start(&["sleep", "1000"])?;
    wait_until("the first container to hold 340 MiB", host.patience(FILLS), || {
        let held = one.exec(&["cat", "/sys/fs/cgroup/memory.current"])?;
        Ok(held.succeeds()?.text().trim().parse::<u64>()? >= 340 * MIB)
    })?;
    other.exec(&["dd", "if=/dev/zero", "of=/dev/null", "bs=340M", "count=1"])?.succeeds()?;
    pod.remove()
}

const IN_HUGE_PAGES: &str = "hugepages = true\n";

fn huge_pages(host: &Host) -> Result<()> {
    let limited = |mib: u64| host.container().flags(["--memory-limit", &(mib * MIB).to_string()]);
    host.leaves_nothing(|| {
        const POOL: u64 = 256;
        let pool = HugePages::set_aside(POOL)?;
        let _configured = Replaced::file(Path::new(CONFIGURATION), IN_HUGE_PAGES)?;
        // The VM begins with 256 MiB, and the limit makes it grow by 128.
        let task = limited(280).detach(&["sleep", "1000"])?;
        ensure!(template_of(&task).is_err(), "expected  a VM that booted\ncame      a clone");
        let expect_free = |pages: u64| -> Result<()> {
            let free = pool.free()?;
            ensure!(free == pages, "expected  {pages} of {POOL} pages free\ncame      {free}");
            Ok(())
        };
        expect_free(POOL - 192)?;
        fills(&task, 260)?.succeeds()?;
        fills(&task, 300)?.exits(137)?;
        // What it has freed stays its own.
        expect_free(POOL - 192)?;

        let lacks = "the host's pool of huge pages lacks 128 MiB; raise vm.nr_hugepages by 64,";
        limited(280).run(&["true"])?.fails_with(lacks)?.says_one_line()?;
        unharmed(&task)?;
        task.dies()?;
        expect_free(POOL)?;

        // It boots, and cannot grow by 896 MiB.
        let finished = limited(1024).run(&["true"])?;
        finished.fails_with("cannot grow the VM to the 1152 MiB")?;
        finished.fails_with("lacks 640 MiB; raise vm.nr_hugepages by 320,")?.says_one_line()?;
        expect_free(POOL)
    })
}

fn no_huge_pages(host: &Host) -> Result<()> {
    host.leaves_nothing(|| {
        let _pool = HugePages::set_aside(0)?;
        let _configured = Replaced::file(Path::new(CONFIGURATION), IN_HUGE_PAGES)?;
        let finished = host.run(&["true"])?;
        let lacks = "the host's pool of huge pages lacks 256 MiB; raise vm.nr_hugepages by 128,";
        finished.fails_with(lacks)?.says_one_line().map(drop)
    })
}

/// As a kubelet has it for a pod that asks for none.
fn no_huge_pages_allowed(host: &Host) -> Result<()> {
    host.leaves_nothing(|| {
        const POOL: u64 = 128;
        let pool = HugePages::set_aside(POOL)?;
        let _configured = Replaced::file(Path::new(CONFIGURATION), IN_HUGE_PAGES)?;
        let cgroup = Cgroup::make(&host.new_id(), "hugetlb")?;
        fs::write(cgroup.path().join("hugetlb.2MB.max"), "0").context("cannot set a limit of huge pages")?;
        let of_pod = format!("/{}/pod", cgroup.0);
        let finished = host.container().flags(["--cgroup", &of_pod]).run(&["true"])?;
        finished.fails_with("check hugetlb.2MB.max of the pod's cgroup")?.says_one_line()?;
        let free = pool.free()?;
        ensure!(free == POOL, "expected  {POOL} pages free\ncame      {free}");
        Ok(())
    })
}

/// A cgroup of the host's with one controller, by its name.
struct Cgroup(String);

impl Cgroup {
    const ROOT: &str = "/sys/fs/cgroup";

    fn make(name: &str, controller: &str) -> Result<Self> {
        let switched_on = Path::new(Self::ROOT).join("cgroup.subtree_control");
        fs::write(switched_on, format!("+{controller}")).with_context(|| format!("no {controller}"))?;
        let cgroup = Self(name.to_owned());
        fs::create_dir(cgroup.path()).context("cannot make a cgroup")?;
        Ok(cgroup)
    }

    fn path(&self) -> PathBuf {
        Path::new(Self::ROOT).join(&self.0)
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // What a runtime has left in it is for the next look at the host to report.
        let _ = fs::remove_dir(self.path());
    }
}

fn unharmed(task: &Task<'_>) -> Result<()> {
    task.exec(&["echo", "unharmed"])?.succeeds()?.prints("unharmed\n").map(drop)
}

/// A container that can hold memory: what is in files of /held.
fn with_held(container: Container<'_>) -> Result<Task<'_>> {
    let mount = ["--mount", "type=tmpfs,src=tmpfs,dst=/held,options=size=560m"];
    container.flags(mount).detach(&["sleep", "1000"])
}

/// Expects that `mib` that were in use are the host's soon after the container has freed them, but for `kept_mib`, and
/// that what is in use stays.
fn gives_back(host: &Host, task: &Task<'_>, mib: u64, kept_mib: u64) -> Result<()> {
    let sh = |script: &str| task.exec(&["sh", "-c", script])?.succeeds().map(drop);
    sh("dd if=/dev/urandom of=/held/used bs=1M count=16 && md5sum /held/used > /held/sum")?;
    let before = vmm_mib(task)?;

    sh(&format!("dd if=/dev/zero of=/held/freed bs=1M count={mib}"))?;
    let held = vmm_mib(task)?;
    // Some of it fits into what the VM had already.
    let expected = before + mib - kept_mib;
    ensure!(held >= expected, "expected  {expected} MiB or more in use\ncame      {held}");
    sh("rm /held/freed")?;
    let what = format!("{held} MiB in use to become {before} again, or {kept_mib} more");
    let back = wait_until(&what, host.patience(BACK), || Ok(vmm_mib(task)? <= before + kept_mib));
    if let Err(error) = back {
        // The guest's kernel reports free blocks of 2 MiB. Free memory in smaller blocks is not reported.
        let blocks = task.exec(&["cat", "/proc/buddyinfo", "/proc/meminfo"])?.succeeds()?.text();
        return Err(error.context(format!("{} MiB are in use; free blocks:\n{blocks}", vmm_mib(task)?)));
    }

    sh("md5sum -c /held/sum")
}

/// What the VMM of a container takes of the host's memory, its guest included: its proportional set of memory that is
/// of no file (proc_pid_smaps(5)). Pages of the template are not its own, and its share of them grows when
/// other clones end.
fn vmm_mib(task: &Task<'_>) -> Result<u64> {
    let text = Vmm::of(task)?.read("smaps_rollup")?;
    let kib = text
        .lines()
        .find_map(|line| line.strip_prefix("Pss_Anon:")?.trim().strip_suffix(" kB")?.parse().ok());
    let kib: u64 = kib.with_context(|| format!("no Pss_Anon in {text:?}"))?;
    Ok(kib / 1024)
}
