//! What becomes of a pod under memory pressure, in numbers, for docs/memory-pressure.md.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::numbers::{HostCgroup, LINE, Leak, Numbers, PageCache, Resized};
use super::{MIB, fills, limit_pod, limited, overhead, unharmed};
use crate::command::wait_until;
use crate::cri::messages::{Capability, ContainerState, PodSandboxState};
use crate::ctr::{Host, Runtime};
use crate::fixtures::{page_at, scratch};
use crate::pods::{Container, Pod};
use crate::probe::{Bits, elf};

/// The limits of the leaks, MiB.
const LEAKS: [u64; 3] = [64, 128, 512];
/// Of the sidecar, and what one of its processes holds.
const SIDECAR_MIB: u64 = 64;
const HELD_MIB: u64 = 32;
/// Of the container that fills its page cache, and its file.
const CACHE_MIB: u64 = 128;
const FILE_MIB: u64 = 256;
/// The limits of the container that is resized, and the sizes of a process within each and of one beyond it.
const SIZES: [(u64, u64, u64); 3] = [(512, 400, 600), (128, 100, 200), (512, 400, 600)];
/// A file that the container with the first of these limits writes and reads.
const LEFT_MIB: u64 = 300;

/// The name of the program that leaks.
const LEAK: &str = "leak";
/// Its instructions. It takes 1 MiB more with each line that it prints, and fits into one page: a larger program would
/// read its own pages again and again when it is at its limit, before it is killed.
const CODE: &[u8] = &[
    0x31, 0xff, // xor edi, edi
    0xbe, 0x00, 0x00, 0x00, 0xc0, // mov esi, 3 GiB
    0xba, 0x03, 0x00, 0x00, 0x00, // mov edx, PROT_READ | PROT_WRITE
    0x41, 0xba, 0x22, 0x40, 0x00, 0x00, // mov r10d, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE
    0x49, 0xc7, 0xc0, 0xff, 0xff, 0xff, 0xff, // mov r8, -1
    0x45, 0x31, 0xc9, // xor r9d, r9d
    0xb8, 0x09, 0x00, 0x00, 0x00, // mov eax, SYS_mmap
    0x0f, 0x05, // syscall
    0x48, 0x89, 0xc3, // mov rbx, rax
    0x6a, 0x0a, // push '\n'
    0x41, 0xbc, 0x00, 0x01, 0x00, 0x00, // each MiB: mov r12d, 256
    0xc6, 0x03, 0x01, // each page: mov byte [rbx], 1
    0x48, 0x81, 0xc3, 0x00, 0x10, 0x00, 0x00, // add rbx, 4096
    0x41, 0xff, 0xcc, // dec r12d
    0x75, 0xf1, // jnz each page
    0xbf, 0x01, 0x00, 0x00, 0x00, // mov edi, 1
    0x48, 0x89, 0xe6, // mov rsi, rsp
    0xba, 0x01, 0x00, 0x00, 0x00, // mov edx, 1
    0xb8, 0x01, 0x00, 0x00, 0x00, // mov eax, SYS_write
    0x0f, 0x05, // syscall
    0xeb, 0xd5, // jmp each MiB
];
/// Killed by SIGKILL.
const KILLED: i32 = 137;

/// How long a leak may take on an ordinary machine.
const LEAKS_FOR: Duration = Duration::from_secs(60);
/// How long the sidecar may take for an answer.
const ANSWERS: Duration = Duration::from_secs(10);
/// How soon the reason of a kill is known.
const REASON: Duration = Duration::from_secs(3);

/// Prints the numbers, and then expects what a user of kubelet expects of any runtime.
pub(super) fn measure(host: &Host) -> Result<()> {
    let processors = thread::available_parallelism().context("the host's processors")?.get();
    let leaks = LEAKS.iter().map(|&limit| leak(host, limit)).collect::<Result<_>>()?;
    let numbers = Numbers { processors, leaks, cache: page_cache(host)?, resized: resized(host)? };
    println!("{LINE}{}", serde_json::to_string(&numbers)?);
    expect(host.runtime(), &numbers)
}

/// A pod as kubelet makes it: with the overhead of its RuntimeClass, which runc's pods do not have.
fn pod_for(host: &Host, limits: u64) -> Result<Pod<'_>> {
    Pod::plan(host).memory_max((limits + overhead_on(host.runtime())?) * MIB).start()
}

fn overhead_on(runtime: Runtime) -> Result<u64> {
    match runtime {
        Runtime::Runc => Ok(0),
        Runtime::Bulkhead => overhead(),
    }
}

fn leak(host: &Host, limit_mib: u64) -> Result<Leak> {
    let pod = pod_for(host, SIDECAR_MIB + limit_mib)?;
    let sidecar = sidecar(&pod)?;
    let address = format!("{}:80", pod.ip()?);
    let answers = || {
        let page = page_at(&address, "/index.html", host.patience(ANSWERS));
        page.is_ok_and(|page| page.ends_with("a page\n"))
    };
    wait_until("a page of the sidecar", host.patience(ANSWERS), || Ok(answers()))?;

    // kubelet sets this for each container, unless it is told otherwise (singleProcessOOMKill).
    let mut resources = limited(limit_mib);
    resources.unified.insert("memory.oom.group".to_owned(), "1".to_owned());
    let programs = scratch()?;
    write_leak(programs.path())?;
    let leak = pod.container().resources(resources).mount_read_only(programs.path(), "/programs");
    let leak = leak.start(&[&format!("/programs/{LEAK}")])?;
    let (mut asked, mut answered) = (0, 0);
    // The last time after the end.
    wait_until("the end of the leak", host.patience(LEAKS_FOR), || {
        let has_ended = leak.status()?.state() == ContainerState::Exited;
        asked += 1;
        answered += u32::from(answers());
        Ok(has_ended)
    })?;
    let written = leak.finish()?.stdout.len();
    // It travels by an event of its own, which runc's shim loses when it finds the container empty first.
    let has_reason = || Ok(leak.status()?.reason == "OOMKilled");
    let _ = wait_until("the reason OOMKilled", host.patience(REASON), has_reason);
    let status = leak.status()?;
    let whole = unharmed(&sidecar).and_then(|()| sidecar.sh("pidof dd")?.succeeds().map(drop));
    let numbers = Leak {
        limit_mib,
        killed: killed(&sidecar, leak.id())?,
        exit_status: status.exit_code,
        reason: status.reason,
        written_mib: written as u64,
        asked,
        answered,
        sidecar_whole: whole.is_ok(),
        pod_ready: pod.status()?.state() == PodSandboxState::Ready,
        host: HostCgroup::of(&pod)?,
    };
    pod.remove()?;
    Ok(numbers)
}

fn write_leak(directory: &Path) -> Result<()> {
    let program = directory.join(LEAK);
    fs::write(&program, elf(Bits::B64, CODE))
        .and_then(|()| fs::set_permissions(&program, fs::Permissions::from_mode(0o755)))
        .with_context(|| format!("cannot write {}", program.display()))
}

/// A container that serves a page, while another process of it holds memory.
fn sidecar<'p>(pod: &'p Pod<'_>) -> Result<Container<'p>> {
    // dd keeps its buffer until somebody reads what it writes.
    let script = format!(
        "dd if=/dev/zero bs={HELD_MIB}M count=1 2>/dev/null | sleep 100000 & \
         mkdir /www && echo a page > /www/index.html && exec httpd -f -p 80 -h /www"
    );
    let reads_kernel_log = Capability { add_capabilities: vec!["SYSLOG".to_owned()], ..Default::default() };
    let container = pod.container().memory_limit(SIDECAR_MIB as i64);
    let container = container.security(|security| security.capabilities = Some(reads_kernel_log));
    container.start(&["sh", "-c", &script])
}

/// The processes of a container that were killed because memory was short. Its neighbour reads the log of their kernel:
/// on runc the host's, on Bulkhead the guest's.
fn killed(neighbour: &Container<'_>, id: &str) -> Result<Vec<String>> {
    let log = neighbour.exec(&["dmesg"])?;
    log.succeeds()?;
    let text = log.text();
    let lines = text.lines().filter(|line| line.contains("oom-kill:") && line.contains(id));
    Ok(lines.filter_map(|line| Some(line.split_once(",task=")?.1.split(',').next()?.to_owned())).collect())
}

fn page_cache(host: &Host) -> Result<PageCache> {
    let pod = pod_for(host, CACHE_MIB)?;
    let container = pod.container().memory_limit(CACHE_MIB as i64).start(&["sleep", "1000"])?;
    let script = format!(
        "set -e; dd if=/dev/zero of=/big bs=1M count={FILE_MIB} 2>/dev/null; cat /big > /dev/null; \
         cat /big > /dev/null; test $(wc -c < /big) = {}",
        FILE_MIB * MIB
    );
    let done = container.sh(&script)?;
    let numbers = PageCache {
        limit_mib: CACHE_MIB,
        file_mib: FILE_MIB,
        exit_status: done.status.context("no exit status")?,
        seconds: done.took.as_secs_f64(),
        host: HostCgroup::of(&pod)?,
    };
    unharmed(&container)?;
    pod.remove()?;
    Ok(numbers)
}

fn resized(host: &Host) -> Result<Vec<Resized>> {
    let overhead = overhead_on(host.runtime())?;
    let mut limit = SIZES[0].0;
    let pod = pod_for(host, limit)?;
    let container = pod.container().memory_limit(limit as i64).start(&["sleep", "1000"])?;
    let mut all = Vec::new();
    for (limit_mib, within_mib, beyond_mib) in SIZES {
        // kubelet raises the pod's limit before the container's, and lowers it after the container's.
        if limit_mib > limit {
            limit_pod(&pod, limit_mib + overhead)?;
        }
        if limit_mib != limit {
            container.update(limited(limit_mib))?;
        }
        if limit_mib < limit {
            limit_pod(&pod, limit_mib + overhead)?;
        }
        limit = limit_mib;
        let begins_with_mib = current(&pod)?;
        let status = |mib| fills(&container, mib)?.status.context("no exit status");
        let (within_status, beyond_status) = (status(within_mib)?, status(beyond_mib)?);
        if all.is_empty() {
            // After the processes, which leave no room for a page cache.
            let script =
                format!("dd if=/dev/zero of=/big bs=1M count={LEFT_MIB} 2>/dev/null; cat /big >/dev/null");
            container.sh(&script)?.succeeds()?;
        }
        let HostCgroup { max_mib, kills, .. } = HostCgroup::of(&pod)?;
        all.push(Resized {
            limit_mib,
            max_mib,
            begins_with_mib,
            ends_with_mib: current(&pod)?,
            within_mib,
            within_status,
            beyond_mib,
            beyond_status,
            kills,
        });
    }
    unharmed(&container)?;
    pod.remove()?;
    Ok(all)
}

/// What the pod's cgroup has now, MiB.
fn current(pod: &Pod<'_>) -> Result<u64> {
    let text = fs::read_to_string(pod.cgroup()?.join("memory.current")).context("the pod's cgroup")?;
    Ok(text.trim().parse::<u64>()? / MIB)
}

fn expect(runtime: Runtime, numbers: &Numbers) -> Result<()> {
    for leak in &numbers.leaks {
        let ended_alone = leak.exit_status == KILLED && leak.sidecar_whole && leak.pod_ready;
        ensure!(
            ended_alone && leak.answered == leak.asked && leak.killed == [LEAK],
            "expected  that the leak is killed alone, with 137\ncame      {leak:?}"
        );
        // runc's shim may lose it.
        ensure!(
            runtime == Runtime::Runc || leak.reason == "OOMKilled",
            "expected  the reason OOMKilled\ncame      {leak:?}"
        );
    }
    ensure!(
        numbers.cache.exit_status == 0,
        "expected  that a file may be larger than the limit\ncame      {:?}",
        numbers.cache
    );
    for resized in &numbers.resized {
        ensure!(
            (resized.within_status, resized.beyond_status) == (0, KILLED),
            "expected  that a process within the limit ends by itself, and one beyond it is killed\n\
             came      {resized:?}"
        );
    }
    let leaks = numbers.leaks.iter().map(|leak| leak.host.kills);
    let others = numbers.resized.iter().map(|resized| resized.kills).chain([numbers.cache.host.kills]);
    let kills: u64 = leaks.chain(others).sum();
    ensure!(
        runtime == Runtime::Runc || kills == 0,
        "expected  no kill by the host\ncame      {kills}: {numbers:?}"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_leak_holds_a_mib_for_each_line() {
        let directory = scratch().unwrap();
        write_leak(directory.path()).unwrap();
        let mut leak = Command::new(directory.path().join(LEAK)).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = [0; 3];
        leak.stdout.take().unwrap().read_exact(&mut lines).unwrap();
        // It ends when nobody reads its lines.
        let status = leak.wait().unwrap();
        assert_eq!((lines, status.code()), ([b'\n'; 3], None));
    }
}
