//! What the spec limits, in the container's cgroup and its processes.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::Case;
use crate::command::{Cmd, Finished, wait_until};
use crate::ctr::{Host, Runtime};
use crate::fixtures::{HugePages, Spec, scratch};
use crate::probe::{self, Mapped};
use crate::shim::{Shim, granted};

pub(super) const CASES: &[Case] = &[
    Case::both("a_memory_limit_is_visible", memory_visible),
    Case::both("a_process_beyond_the_memory_limit_is_killed", memory_enforced),
    Case::both("a_cpu_quota_is_visible", cpu_visible),
    Case::both("a_limit_of_processes_is_enforced", pids_enforced),
    Case::both("open_files_are_limited_to_1024", open_files),
    Case::both("resource_limits_are_the_specs", resource_limits),
    Case::both("the_out_of_memory_score_is_the_specs", oom_score),
    Case::both("a_limit_of_huge_pages_is_visible", huge_pages),
    Case::both("a_container_has_huge_pages_up_to_its_limit", huge_pages_up_to_the_limit),
    // runc ignores this limit in an update.
    Case::bulkhead("an_update_changes_the_number_of_huge_pages", update_huge_pages),
    Case::both("a_cgroup_of_the_systemd_driver_is_a_scope_in_its_slice", systemd_scope),
    Case::bulkhead("the_hosts_cgroup_is_limited_a_little_above_the_container", hosts_cgroup),
    // runc's scope is a unit of systemd's.
    Case::bulkhead("limits_that_systemd_takes_away_from_the_hosts_cgroup_come_back", limits_come_back),
    Case::both("parameters_of_the_hosts_kernel_and_its_limit_of_processes_hold", of_host),
    Case::bulkhead("the_guest_keeps_processes_from_containers", kept),
    // On runc it is an error on hosts without such pages.
    Case::both("a_limit_of_huge_pages_that_are_not_there_is_named", no_huge_pages),
    // runc refuses a weight on a host whose kernel has none, and ignores the others.
    Case::bulkhead("what_the_guest_has_not_is_refused_by_name", refused),
];

/// How soon limits that were lost are set again: the shim looks every 10 seconds.
const COME_BACK: Duration = Duration::from_secs(15);

/// How soon a cgroup goes when its last process has.
const GOES: Duration = Duration::from_secs(5);

/// Shows the container the cgroups, which the default spec does not.
pub(super) const CGROUP_MOUNT: [&str; 2] =
    ["--mount", "type=cgroup,src=cgroup,dst=/sys/fs/cgroup,options=ro"];

/// What a file of the container's own cgroup says. The default spec has no cgroup namespace, so that the cgroup
/// need not be the root of what is mounted.
pub(super) fn in_cgroup(file: &str) -> String {
    format!("cat /sys/fs/cgroup$(sed -n s/^0:://p /proc/self/cgroup)/{file}")
}

fn memory_visible(host: &Host) -> Result<()> {
    let container = host.container().flags(["--memory-limit", "50331648"]).flags(CGROUP_MOUNT);
    container.run(&["sh", "-c", &in_cgroup("memory.max")])?.succeeds()?.prints("50331648\n")?;
    Ok(())
}

fn memory_enforced(host: &Host) -> Result<()> {
    // One buffer of 100 MiB, filled.
    let hog = ["dd", "if=/dev/zero", "of=/dev/null", "bs=100M", "count=1"];
    host.container().flags(["--memory-limit", "33554432"]).run(&hog)?.exits(137)?;
    let script = "dd if=/dev/zero of=/dev/null bs=100M count=1 2>/dev/null; echo survived $?";
    let container = host.container().flags(["--memory-limit", "33554432"]);
    let finished = container.run(&["sh", "-c", script])?;
    finished.check("the shell to survive and say 137", finished.text().ends_with("survived 137\n"))?;
    Ok(())
}

fn cpu_visible(host: &Host) -> Result<()> {
    let container = host.container().flags(["--cpus", "0.5"]).flags(CGROUP_MOUNT);
    container.run(&["sh", "-c", &in_cgroup("cpu.max")])?.succeeds()?.prints("50000 100000\n")?;
    Ok(())
}

/// The weight of cgroup v2 for 512 of v1's shares. The formula of runc changed with 1.3.2; Debian 12 and 13 have an
/// older one.
pub(in crate::cases) fn weight_of_512_shares(host: &Host) -> &'static str {
    match host.runtime() {
        Runtime::Runc => "20",
        Runtime::Bulkhead => "59",
    }
}

fn pids_enforced(host: &Host) -> Result<()> {
    let script = "for i in $(seq 1 30); do sleep 1000 & done; echo all started";
    let spec =
        Spec::of(host, &["sh", "-c", script])?.with("/linux/resources", "pids", json!({ "limit": 10 }))?;
    let finished = spec.run(host.container())?;
    finished.prints("")?.fails_with("can't fork")?;
    Ok(())
}

fn open_files(host: &Host) -> Result<()> {
    host.sh("ulimit -Sn; ulimit -Hn")?.succeeds()?.prints("1024\n1024\n")?;
    Ok(())
}

fn resource_limits(host: &Host) -> Result<()> {
    let limits = json!([
        { "type": "RLIMIT_NOFILE", "soft": 100, "hard": 200 },
        { "type": "RLIMIT_CORE", "soft": 0, "hard": 4096 },
        { "type": "RLIMIT_STACK", "soft": 1_048_576, "hard": 2_097_152 },
    ]);
    let script = "ulimit -Sn; ulimit -Hn; ulimit -Sc; ulimit -Ss; ulimit -Hs";
    let finished =
        Spec::of(host, &["sh", "-c", script])?.with("/process", "rlimits", limits)?.run(host.container())?;
    finished.succeeds()?.prints("100\n200\n0\n1024\n2048\n")?;
    Ok(())
}

fn oom_score(host: &Host) -> Result<()> {
    let spec =
        Spec::of(host, &["cat", "/proc/self/oom_score_adj"])?.with("/process", "oomScoreAdj", json!(321))?;
    spec.run(host.container())?.succeeds()?.prints("321\n")?;
    Ok(())
}

/// What this file of the cgroup says under these resources.
fn cgroup_file(host: &Host, key: &str, resources: Value, file: &str) -> Result<Finished> {
    let mount =
        json!({ "destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup", "options": ["ro"] });
    let spec = Spec::of(host, &["sh", "-c", &in_cgroup(file)])?.with("/linux/resources", key, resources)?;
    spec.with_mount(mount)?.run(host.container())
}

fn huge_pages(host: &Host) -> Result<()> {
    let limits = json!([{ "pageSize": "2MB", "limit": 0 }]);
    cgroup_file(host, "hugepageLimits", limits, "hugetlb.2MB.max")?.succeeds()?.prints("0\n")?;
    Ok(())
}

/// Programs that map four and five huge pages.
fn mappers() -> Result<TempDir> {
    let probes = scratch()?;
    for (name, pages) in [("four", 4), ("five", 5)] {
        probe::write_mapper(&probes.path().join(name), Mapped::HugePages, pages)?;
    }
    Ok(probes)
}

/// On runc the pages are the host's, which needs none for Bulkhead.
fn huge_pages_up_to_the_limit(host: &Host) -> Result<()> {
    let _pool = match host.runtime() {
        Runtime::Runc => Some(HugePages::set_aside(8)?),
        Runtime::Bulkhead => None,
    };
    let probes = mappers()?;
    let limits = json!([{ "pageSize": "2MB", "limit": 8 << 20 }]);
    let mount = json!({
        "destination": "/probes", "type": "bind", "source": probes.path(), "options": ["rbind", "ro"],
    });
    // The limit counts for what the spec mounts itself too.
    let pages = json!({
        "destination": "/pages", "type": "hugetlbfs", "source": "none", "options": ["pagesize=2M", "size=4M"],
    });
    // 12 is ENOMEM.
    let script = "awk '$2 == \"/pages\" { print $3 }' /proc/mounts; \
                  for pages in four five four; do /probes/$pages; echo $pages=$?; done";
    let spec = Spec::of(host, &["sh", "-c", script])?.with("/linux/resources", "hugepageLimits", limits)?;
    let finished = spec.with_mount(mount)?.with_mount(pages)?.run(host.container())?;
    finished.succeeds()?.prints("hugetlbfs\nfour=0\nfive=12\nfour=0\n")?;
    Ok(())
}

fn update_huge_pages(host: &Host) -> Result<()> {
    let probes = mappers()?;
    let container = host.container().flags(["--memory-limit", "67108864"]);
    let task = container.bind(probes.path(), "/probes", "rbind:ro").detach(&["sleep", "1000"])?;
    let shim = Shim::of(host, task.id())?;
    let limit = |pages: u64| json!({ "hugepageLimits": [{ "pageSize": "2MB", "limit": pages << 21 }] });
    let expect = |pages: u64, four: u32, five: u32| -> Result<()> {
        let script = "awk '/HugePages_Total/ { print $2 }' /proc/meminfo; \
                      for pages in four five; do /probes/$pages; echo $?; done";
        task.exec(&["sh", "-c", script])?.succeeds()?.prints(&format!("{pages}\n{four}\n{five}\n"))?;
        Ok(())
    };
    expect(0, 12, 12)?;
    // The VM has room for these only after it has grown.
    granted(shim.update(&limit(200)))?;
    expect(200, 0, 0)?;
    granted(shim.update(&limit(4)))?;
    expect(4, 0, 12)?;
    let error = shim.update(&limit(1 << 30));
    let words = "linux.resources.hugepageLimits[2MB]: huge pages of 2147483648 MiB do not fit into a VM";
    match error {
        Err(refused) if refused.message.contains(words) => {}
        other => bail!("expected  an error with {words:?}\ncame      {other:?}"),
    }
    expect(4, 0, 12)?;
    granted(shim.update(&limit(0)))?;
    expect(0, 12, 12)?;
    task.dies()
}

fn systemd_scope(host: &Host) -> Result<()> {
    let container = host.container();
    let scope = format!("system.slice/e2e-{}.scope", container.id());
    let cgroup = format!("system.slice:e2e:{}", container.id());
    // runc has to be told; the form of the path says as much.
    let driver: &[&str] = match host.runtime() {
        Runtime::Runc => &["--runc-systemd-cgroup"],
        Runtime::Bulkhead => &[],
    };
    let container = container.flags(driver.iter().copied()).flags(["--cgroup", &cgroup]);
    let task = container.detach(&["sleep", "1000"])?;
    let pid = granted(Shim::of(host, task.id())?.state(""))?.pid;
    let place = fs::read_to_string(format!("/proc/{pid}/cgroup")).context("the task's process is gone")?;
    ensure!(place.contains(&scope), "expected  a process in {scope}\ncame      one in {place}");
    task.dies()?;
    let hierarchies = ["/sys/fs/cgroup", "/sys/fs/cgroup/memory"].map(|root| Path::new(root).join(&scope));
    wait_until("the scope to be gone", host.patience(GOES), || {
        Ok(hierarchies.iter().all(|directory| !directory.exists()))
    })
}

/// A slice with an active unit of systemd's, which is stopped when this is dropped.
struct Slice(String);

impl Slice {
    fn start(name: &str) -> Result<Self> {
        systemctl(&["start", name])?;
        Ok(Self(name.to_owned()))
    }
}

impl Drop for Slice {
    fn drop(&mut self) {
        // The case has failed or passed by now.
        _ = systemctl(&["stop", &self.0]);
    }
}

fn systemctl(words: &[&str]) -> Result<()> {
    Cmd::new("systemctl").args(words.iter().copied()).run()?.succeeds()?;
    Ok(())
}

/// As when kubelet resizes a pod.
fn limits_come_back(host: &Host) -> Result<()> {
    let slice = Slice::start("bulkheade2e.slice")?;
    let container = host.container();
    let cgroup = format!("{}:e2e:{}", slice.0, container.id());
    let limits = ["--memory-limit", "50331648", "--cpus", "0.5", "--cgroup", &cgroup];
    let task = container.flags(limits).detach(&["sleep", "1000"])?;
    let pid = granted(Shim::of(host, task.id())?.state(""))?.pid;
    let limits = hosts_limits(pid)?;
    systemctl(&["set-property", "--runtime", &slice.0, "MemoryMax=2G"])?;
    ensure!(hosts_limits(pid).is_err(), "expected  limits that systemd has taken away\ncame      {limits:?}");
    wait_until("the limits to come back", host.patience(COME_BACK), || {
        Ok(hosts_limits(pid).is_ok_and(|found| found == limits))
    })?;
    task.dies()
}

/// The limits of the cgroup of the task's process on the host: memory.max and cpu.max.
fn hosts_limits(pid: u32) -> Result<(String, String)> {
    let place = fs::read_to_string(format!("/proc/{pid}/cgroup")).context("the task's process is gone")?;
    let path = place.lines().find_map(|line| line.strip_prefix("0::/")).context("no cgroup of version 2")?;
    let read = |file: &str| -> Result<String> {
        let path = Path::new("/sys/fs/cgroup").join(path).join(file);
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        Ok(text.trim().to_owned())
    };
    Ok((read("memory.max")?, read("cpu.max")?))
}

fn hosts_cgroup(host: &Host) -> Result<()> {
    const LIMIT: u64 = 50_331_648;
    let container = host.container().flags(["--memory-limit", &LIMIT.to_string(), "--cpus", "0.5"]);
    let task = container.detach(&["sleep", "1000"])?;
    let pid = granted(Shim::of(host, task.id())?.state(""))?.pid;
    let (memory, cpu) = hosts_limits(pid)?;
    let memory: u64 = memory.parse().with_context(|| format!("memory.max is {memory}"))?;
    // A VM has 256 MiB at least, and its VMM some more.
    ensure!(
        (LIMIT..1 << 30).contains(&memory),
        "expected  memory.max above the container's and below a GiB\ncame      {memory}"
    );
    ensure!(
        cpu == "60000 100000",
        "expected  a tenth of a processor beside the container's half\ncame      {cpu}"
    );
    task.dies()?;
    Ok(())
}

fn of_host(host: &Host) -> Result<()> {
    let mappings = Parameter::increase("vm/max_map_count")?;
    // As kubelet's podPidsLimit: in the cgroup above the container's. A VMM has fewer threads.
    let above = tempfile::Builder::new().prefix("e2e-few-").tempdir_in("/sys/fs/cgroup")?.keep();
    let few = Above(above.clone());
    fs::write(above.join("pids.max"), "100").context("the host's cgroups do not limit processes")?;
    let name = above.file_name().context("no name")?.to_string_lossy();
    let cgroup = format!("/{name}/{}", host.container().id());
    let script =
        "cat /proc/sys/vm/max_map_count; for i in $(seq 1 120); do sleep 1000 & done; echo all started";
    let finished = host.container().flags(["--cgroup", &cgroup]).run(&["sh", "-c", script])?;
    let expected = format!("{}\n", mappings.now);
    drop((mappings, few));
    finished.prints(&expected)?.fails_with("can't fork")?;
    Ok(())
}

/// A parameter of the host's kernel that is one more until the end.
struct Parameter {
    file: PathBuf,
    now: u64,
}

impl Parameter {
    fn increase(name: &str) -> Result<Self> {
        let file = Path::new("/proc/sys").join(name);
        let before = fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        let now = before.trim().parse::<u64>()? + 1;
        fs::write(&file, now.to_string()).with_context(|| format!("cannot write {}", file.display()))?;
        Ok(Self { file, now })
    }
}

impl Drop for Parameter {
    fn drop(&mut self) {
        if let Err(error) = fs::write(&self.file, (self.now - 1).to_string()) {
            println!("{} stays as the test has it: {error}", self.file.display());
        }
    }
}

/// A cgroup that is removed at the end.
pub(super) struct Above(pub(super) PathBuf);

impl Drop for Above {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir(&self.0) {
            println!("{} stays: {error}", self.0.display());
        }
    }
}

/// What is left to the guest's kernel and to the agent when containers start all that they can.
fn kept(host: &Host) -> Result<()> {
    let script = "mkdir /tmp/all && mount -t cgroup2 cgroup /tmp/all && \
        cat /tmp/all/containers/pids.max /proc/sys/kernel/threads-max";
    let finished = host.container().flags(["--privileged"]).run(&["sh", "-c", script])?;
    let text = finished.succeeds()?.text();
    let numbers = text.lines().map(str::parse).collect::<Result<Vec<u64>, _>>();
    let numbers = numbers.with_context(|| format!("not limited: {text}"))?;
    let [tasks, all] = numbers[..] else { bail!("expected two numbers, came {text}") };
    ensure!(
        tasks < all && tasks > all / 2,
        "expected  a limit below the guest's {all} processes\ncame      {tasks}"
    );
    Ok(())
}

fn no_huge_pages(host: &Host) -> Result<()> {
    let limits = json!([{ "pageSize": "64KB", "limit": 65536 }]);
    let finished = cgroup_file(host, "hugepageLimits", limits, "cgroup.procs")?;
    finished.fails_with("hugetlb.64KB")?;
    Ok(())
}

fn refused(host: &Host) -> Result<()> {
    for (key, resources, expected) in [
        ("blockIO", json!({ "leafWeight": 505 }), "linux.resources.blockIO.leafWeight"),
        (
            "hugepageLimits",
            json!([{ "pageSize": "1GB", "limit": 1 << 30 }]),
            "linux.resources.hugepageLimits[1GB] (the guest has no pages for hugetlb.1GB, only for hugetlb.2MB)",
        ),
        ("rdma", json!({ "mlx5_1": { "hcaHandles": 3 } }), "linux.resources.rdma"),
        ("memory", json!({ "kernel": 100_000_000 }), "linux.resources.memory.kernel (cgroup v1 only)"),
    ] {
        let finished = cgroup_file(host, key, resources, "cgroup.procs")?;
        finished.fails_with(expected)?.fails_with("not implemented")?.says_one_line()?;
    }
    Ok(())
}
