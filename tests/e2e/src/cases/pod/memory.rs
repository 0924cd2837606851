//! A pod's memory on the host: kubelet limits its cgroup to the limits of its containers and the overhead of its
//! RuntimeClass.

mod numbers;
mod pressure;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use tempfile::TempDir;
use tonic::Code;

use super::super::Case;
use super::super::jail::Vmm;
use crate::command::{Finished, wait_until};
use crate::containerd::Version;
use crate::cri::messages::LinuxContainerResources;
use crate::ctr::{Host, Runtime};
use crate::fixtures::{HugePages, scratch};
use crate::pods::{Container, Pod};
use crate::probe::{self, Mapped};
use numbers::HostCgroup;

pub(in crate::cases) const CASES: &[Case] = &[
    Case::both("a_container_beyond_its_limit_is_killed_alone", killed_alone),
    Case::both("hogs_one_after_another_are_killed_and_the_pod_lives", many_hogs),
    Case::both("a_container_that_fills_its_page_cache_survives", page_cache),
    Case::both("a_pod_whose_limit_is_lowered_returns_its_memory", lowered),
    Case::both("a_pod_whose_containers_limits_are_all_lowered_returns_their_memory", lowered_together),
    Case::both("a_volume_in_memory_is_charged_to_the_container_that_fills_it", memory_volume),
    Case::both("a_volume_in_memory_of_another_pod_is_the_hosts", volume_of_another),
    Case::both("containers_share_a_volume_of_huge_pages", volume_of_huge_pages),
    // On runc the pages are the host's.
    Case::bulkhead(
        "huge_pages_for_which_a_vm_has_no_memory_are_refused_with_their_number",
        too_many_huge_pages,
    ),
    Case::both("a_pod_whose_cgroup_has_no_room_for_the_overhead_runs", without_overhead),
    Case::both("a_pod_is_chosen_by_the_host_as_its_containers_would_be", oom_scores),
    // A minute and more, for the numbers of docs/memory-pressure.md.
    Case::both("a_pod_under_pressure_in_numbers", pressure::measure).by_whole_name_only(),
];

const MIB: u64 = 1 << 20;
/// What users get, for a pod's memory beside its containers' limits.
const RUNTIME_CLASS: &str = include_str!("../../../../../contrib/kubernetes/runtimeclass.yaml");

/// A number of the RuntimeClass that we ship.
fn shipped(name: &str, unit: &str) -> Result<u64> {
    let value = RUNTIME_CLASS.lines().find_map(|line| line.trim().strip_prefix(name)?.strip_suffix(unit));
    let number = value.and_then(|value| value.parse().ok());
    number.with_context(|| format!("the RuntimeClass has no {name:?} in {unit}"))
}

/// The overhead that we ship, MiB.
fn overhead() -> Result<u64> {
    shipped("memory: ", "Mi")
}

/// The overhead that we ship, thousandths of a processor.
pub(super) fn cpu_overhead() -> Result<u64> {
    shipped("cpu: ", "m")
}

/// A pod as kubelet makes it, whose containers have limits of so many MiB together.
fn pod_for(host: &Host, limits: u64) -> Result<Pod<'_>> {
    Pod::plan(host).memory_max((limits + overhead()?) * MIB).start()
}

/// Fills one buffer.
fn fills(container: &Container<'_>, mib: u64) -> Result<Finished> {
    container.exec(&["dd", "if=/dev/zero", "of=/dev/null", &format!("bs={mib}M"), "count=1"])
}

impl HostCgroup {
    fn of(pod: &Pod<'_>) -> Result<Self> {
        let read = |name: &str| fs::read_to_string(pod.cgroup()?.join(name)).context("the pod's cgroup");
        let mib = |name: &str| Ok::<_, anyhow::Error>(read(name)?.trim().parse::<u64>()? / MIB);
        let events = read("memory.events")?;
        let kills = events.lines().find_map(|line| line.strip_prefix("oom_kill ")).context("no oom_kill")?;
        Ok(Self { max_mib: mib("memory.max")?, peak_mib: mib("memory.peak")?, kills: kills.parse()? })
    }
}

/// Expects that the host's kernel has killed nothing in the pod's cgroup. On runc it kills what the container's limit
/// asks for.
fn host_has_killed_nothing(host: &Host, pod: &Pod<'_>) -> Result<()> {
    let HostCgroup { max_mib, peak_mib, kills } = HostCgroup::of(pod)?;
    println!("the pod's cgroup had at most {peak_mib} MiB, of {max_mib}");
    // In a cgroup without processes, nothing is killed either.
    ensure!(peak_mib > 32, "expected  the pod's memory in its cgroup\ncame      {peak_mib} MiB at most");
    ensure!(
        host.runtime() == Runtime::Runc || kills == 0,
        "expected  no kill by the host\ncame      {kills} in the pod's cgroup"
    );
    Ok(())
}

fn unharmed(container: &Container<'_>) -> Result<()> {
    container.exec(&["echo", "unharmed"])?.succeeds()?.prints("unharmed\n").map(drop)
}

fn killed_alone(host: &Host) -> Result<()> {
    let pod = pod_for(host, 64 + 128)?;
    let neighbour = pod.container().memory_limit(64).start(&["sleep", "1000"])?;
    // tail keeps a line whole, and this one does not end.
    let hog = pod.container().memory_limit(128).start(&["tail", "/dev/zero"])?;
    let status = hog.wait()?;
    ensure!(status.exit_code == 137, "expected  137\ncame      {}", status.exit_code);
    // The reason travels by an event of its own, which runc's shim loses when it finds the container empty first.
    if host.runtime() == Runtime::Bulkhead {
        wait_until("the reason OOMKilled", host.patience(super::SEEN), || {
            Ok(hog.status()?.reason == "OOMKilled")
        })?;
    }
    unharmed(&neighbour)?;
    host_has_killed_nothing(host, &pod)?;
    // The pod has room for another one.
    let next = pod.container().memory_limit(128).start(&["sleep", "1000"])?;
    fills(&next, 100)?.succeeds()?;
    unharmed(&neighbour)?;
    pod.remove()
}

fn many_hogs(host: &Host) -> Result<()> {
    let pod = pod_for(host, 128)?;
    let container = pod.container().memory_limit(128).start(&["sleep", "1000"])?;
    // Memory that one has freed may not be back at the host when the next takes some.
    let script = "i=0; while [ $i -lt 8 ]; do dd if=/dev/zero of=/dev/null bs=110M count=1 2>/dev/null || exit 1; \
                  dd if=/dev/zero of=/dev/null bs=200M count=1 2>/dev/null; [ $? = 137 ] || exit 2; i=$((i+1)); done";
    container.sh(script)?.succeeds()?;
    unharmed(&container)?;
    host_has_killed_nothing(host, &pod)?;
    let guest = container.sh("grep -e MemTotal -e MemAvailable /proc/meminfo")?.text();
    println!("the container sees {}", guest.split_whitespace().collect::<Vec<_>>().join(" "));
    pod.remove()
}

fn page_cache(host: &Host) -> Result<()> {
    let pod = pod_for(host, 128)?;
    let container = pod.container().memory_limit(128).start(&["sleep", "1000"])?;
    let script = "set -e; dd if=/dev/zero of=/dev/shm/held bs=1M count=48 2>/dev/null; \
                  dd if=/dev/zero of=/big bs=1M count=300 2>/dev/null; \
                  for i in 1 2 3; do cat /big >/dev/null; done; dd if=/dev/zero of=/big bs=1M count=300 2>/dev/null; \
                  cat /big | md5sum; md5sum </dev/shm/held; rm /big";
    let seen = container.sh(script)?;
    // 300 MiB of zeros, and 48.
    seen.succeeds()?.prints("0d97a9cd8bbd7ce75a2a76bb06258915  -\nf6a7b2f72130b8e4033094cb3b4ab80c  -\n")?;
    unharmed(&container)?;
    host_has_killed_nothing(host, &pod)?;
    pod.remove()
}

/// Resources with a memory limit of so many MiB.
fn limited(mib: u64) -> LinuxContainerResources {
    LinuxContainerResources { memory_limit_in_bytes: (mib * MIB) as i64, ..Default::default() }
}

/// Changes the limit of the pod's cgroup, as kubelet does when that of a container changes.
fn limit_pod(pod: &Pod<'_>, mib: u64) -> Result<()> {
    fs::write(pod.cgroup()?.join("memory.max"), (mib * MIB).to_string()).context("cannot limit the pod")
}

fn lowered(host: &Host) -> Result<()> {
    let pod = pod_for(host, 1024)?;
    let container = pod.container().memory_limit(1024).start(&["sleep", "1000"])?;
    // Memory that is freed at once, and a cache.
    fills(&container, 900)?.succeeds()?;
    container.sh("dd if=/dev/zero of=/big bs=1M count=300 2>/dev/null; cat /big >/dev/null")?.succeeds()?;
    container.update(limited(128))?;
    // kubelet does this after the update of the container.
    limit_pod(&pod, 128 + overhead()?)?;
    for _ in 0..3 {
        fills(&container, 100)?.succeeds()?;
        fills(&container, 200)?.exits(137)?;
    }
    // It has its memory again when the limit is raised. kubelet does this before the update.
    limit_pod(&pod, 512 + overhead()?)?;
    container.update(limited(512))?;
    fills(&container, 400)?.succeeds()?;
    fills(&container, 600)?.exits(137)?;
    unharmed(&container)?;
    host_has_killed_nothing(host, &pod)?;
    pod.remove()
}

/// kubelet updates all containers, and lowers the pod's limit by the sum after that.
fn lowered_together(host: &Host) -> Result<()> {
    let pod = pod_for(host, 3 * 384)?;
    let start = |_| pod.container().memory_limit(384).start(&["sleep", "1000"]);
    let containers = (0..3).map(start).collect::<Result<Vec<_>>>()?;
    for container in &containers {
        fills(container, 350)?.succeeds()?;
    }
    for container in &containers {
        container.update(limited(128))?;
    }
    limit_pod(&pod, 3 * 128 + overhead()?)?;
    for container in &containers {
        fills(container, 100)?.succeeds()?;
        unharmed(container)?;
    }
    host_has_killed_nothing(host, &pod)?;
    pod.remove()
}

/// kubelet's directory of a pod with a volume in memory.
struct MemoryVolume {
    kubelet: PathBuf,
    mounted: Vec<PathBuf>,
    _root: TempDir,
}

impl MemoryVolume {
    fn mount(pod: &Pod<'_>, options: &str) -> Result<Self> {
        Self::mount_of(pod, "tmpfs", options)
    }

    fn mount_of(pod: &Pod<'_>, kind: &str, options: &str) -> Result<Self> {
        let root = TempDir::new()?;
        let mut volume =
            Self { kubelet: root.path().join("pods").join(pod.uid()?), _root: root, mounted: Vec::new() };
        let path = volume.kubelet.join("volumes/kubernetes.io~empty-dir/cache");
        fs::create_dir_all(&path)?;
        mount(Some(kind), &path, Some(kind), MsFlags::empty(), Some(options))?;
        volume.mounted.push(path);
        Ok(volume)
    }

    fn path(&self) -> &Path {
        &self.mounted[0]
    }

    /// Does what kubelet does for a `subPath`.
    fn part(&mut self, name: &str) -> Result<PathBuf> {
        let (part, bound) = (self.path().join(name), self.kubelet.join("volume-subpaths/cache").join(name));
        fs::create_dir_all(&part)?;
        fs::set_permissions(&part, fs::metadata(self.path())?.permissions())?;
        fs::create_dir_all(&bound)?;
        mount(Some(&part), &bound, None::<&str>, MsFlags::MS_BIND, None::<&str>)?;
        self.mounted.push(bound.clone());
        Ok(bound)
    }
}

impl Drop for MemoryVolume {
    fn drop(&mut self) {
        for mounted in self.mounted.iter().rev() {
            let _ = umount2(mounted, MntFlags::MNT_DETACH);
        }
    }
}

fn memory_volume(host: &Host) -> Result<()> {
    let pod = pod_for(host, 128 + 64)?;
    let mut volume = MemoryVolume::mount(&pod, "size=300m,mode=1777,gid=5")?;
    let one = pod.container().mount(volume.path(), "/cache").memory_limit(128).start(&["sleep", "1000"])?;
    let script = "df -k /cache | awk 'NR == 2 { print $2 }'; stat -c '%a %g' /cache; \
                  mkdir /cache/part; echo text > /cache/part/file";
    one.sh(script)?.succeeds()?.prints("307200\n1777 5\n")?;
    let other = pod.container().mount(volume.path(), "/whole").mount(&volume.part("part")?, "/part");
    let other = other.mount(&volume.part("new")?, "/new").memory_limit(64).start(&["sleep", "1000"])?;
    let script =
        "cat /whole/part/file /part/file; stat -c %a /new; echo new > /new/file; cat /whole/new/file";
    other.sh(script)?.succeeds()?.prints("text\ntext\n1777\nnew\n")?;

    let write =
        |mib: u64| one.exec(&["dd", "if=/dev/zero", "of=/cache/big", "bs=1M", &format!("count={mib}")]);
    for _ in 0..3 {
        write(100)?.succeeds()?;
        write(250)?.exits(137)?;
        other.sh("rm /whole/big; cat /whole/part/file")?.succeeds()?.prints("text\n")?;
    }
    fills(&one, 100)?.succeeds()?;
    unharmed(&other)?;
    host_has_killed_nothing(host, &pod)?;
    // A container that is made anew finds what the old one has left.
    one.remove()?;
    let again = pod.container().mount(volume.path(), "/cache").memory_limit(128).start(&["sleep", "1000"])?;
    again.sh("cat /cache/part/file")?.succeeds()?.prints("text\n")?;
    pod.remove()
}

/// A `hostPath` leads to a volume of a pod that Bulkhead does not run, which has its files on the host.
fn volume_of_another(host: &Host) -> Result<()> {
    let (pod, other) = (Pod::start(host)?, Pod::start(host)?);
    let volume = MemoryVolume::mount(&other, "size=16m")?;
    fs::write(volume.path().join("file"), "text")?;
    let container = pod.container().mount(volume.path(), "/cache").start(&["sleep", "1000"])?;
    container.sh("cat /cache/file; echo new > /cache/file")?.succeeds()?.prints("text")?;
    let came = fs::read_to_string(volume.path().join("file"))?;
    ensure!(came == "new\n", "expected  what the container has written\ncame      {came:?}");
    other.remove()?;
    pod.remove()
}

/// Expects that the kernel of this container has set so many huge pages aside.
fn expect_pool(container: &Container<'_>, pages: u64) -> Result<()> {
    let pool = container.sh("awk '/HugePages_Total/ { print $2 }' /proc/meminfo")?;
    pool.succeeds()?.prints(&format!("{pages}\n")).map(drop)
}

fn volume_of_huge_pages(host: &Host) -> Result<()> {
    let is_runc = host.runtime() == Runtime::Runc;
    let _pool = if is_runc { Some(HugePages::set_aside(8)?) } else { None };
    let probes = scratch()?;
    for (name, mapped, pages) in
        [("file", Mapped::File, 2), ("two", Mapped::HugePages, 2), ("three", Mapped::HugePages, 3)]
    {
        probe::write_mapper(&probes.path().join(name), mapped, pages)?;
    }
    let pod = Pod::plan(host).huge_pages(4).start()?;
    let volume = MemoryVolume::mount_of(&pod, "hugetlbfs", "pagesize=2M,mode=777,gid=5")?;
    let start = || {
        let container = pod.container().mount(volume.path(), "/pages");
        container.mount_read_only(probes.path(), "/probes").start(&["sleep", "1000"])
    };
    let (one, other) = (start()?, start()?);
    // Of the pod's four pages, those of the file are used. 12 is ENOMEM.
    let map = "/probes/file 3<>/pages/file; echo $?; /probes/two; echo $?; /probes/three; echo $?";
    one.sh(map)?.succeeds()?.prints("0\n0\n12\n")?;
    let sees = "stat -c '%a %g' /pages; stat -c %s /pages/file; /probes/three; echo $?; rm /pages/file; \
                /probes/three; echo $?";
    other.sh(sees)?.succeeds()?.prints("777 5\n4194304\n12\n0\n")?;
    if !is_runc {
        expect_pool(&other, 4)?;
    }
    pod.remove()
}

fn too_many_huge_pages(host: &Host) -> Result<()> {
    // The shim says ResourceExhausted, which the CRI of containerd 2 passes on.
    let code = if host.version() < Version::new(2, 0) { Code::Unknown } else { Code::ResourceExhausted };
    // The cgroup allows a VM of about 240 MiB.
    let message = Pod::plan(host).memory_max(256 * MIB).huge_pages(128).refused(code)?;
    let words = " of 128 huge pages; lower the limit, or give the pod more memory";
    ensure!(message.contains(words), "expected  {words:?} in the error\ncame      {message}");

    let pod = Pod::start(host)?;
    let volume = MemoryVolume::mount_of(&pod, "hugetlbfs", "pagesize=2M")?;
    let container = pod.container().mount(volume.path(), "/pages").create(&["true"])?;
    let words =
        "is in a hugetlbfs, but neither the container (linux.resources.hugepageLimits[2MB]) nor the pod's";
    match container.start() {
        Err(error) if format!("{error:#}").contains(words) => {}
        other => bail!("expected  {words:?} in an error of StartContainer\ncame      {other:?}"),
    }
    pod.remove()
}

fn without_overhead(host: &Host) -> Result<()> {
    let pod = Pod::plan(host).memory_max(128 * MIB).start()?;
    let container = pod.container().memory_limit(128).start(&["sleep", "1000"])?;
    for _ in 0..3 {
        fills(&container, 16)?.succeeds()?;
        fills(&container, 200)?.exits(137)?;
    }
    unharmed(&container)?;
    host_has_killed_nothing(host, &pod)?;
    pod.remove()
}

/// The class of a pod is in the scores of its containers: kubelet gives 2 to 999 to those of a Burstable pod.
fn oom_scores(host: &Host) -> Result<()> {
    let pod = Pod::plan(host).start()?;
    let is = |score: &str| -> Result<()> {
        if host.runtime() == Runtime::Runc {
            return Ok(());
        }
        let came = Vmm::of_sandbox(pod.id())?.read("oom_score_adj")?;
        ensure!(came.trim() == score, "expected  a VMM with the score {score}\ncame      {came}");
        Ok(())
    };
    // containerd's, for each pause container.
    is("-998")?;
    let scored = |oom_score_adj: i64| {
        let resources = LinuxContainerResources { oom_score_adj, ..Default::default() };
        let container = pod.container().resources(resources).start(&["sleep", "1000"])?;
        container
            .exec(&["cat", "/proc/1/oom_score_adj"])?
            .succeeds()?
            .prints(&format!("{oom_score_adj}\n"))?;
        Ok::<_, anyhow::Error>(container)
    };
    let first = scored(900)?;
    is("900")?;
    let second = scored(950)?;
    is("900")?;
    first.remove()?;
    is("950")?;
    second.remove()?;
    is("950")?;
    pod.remove()
}
