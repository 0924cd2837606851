//! The host's processors, and on which of them the threads of a VMM run.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use bulkhead_agent_api::cpu_list::{self, CpuNumbers};
use rustix::{
    io::Errno,
    process::Pid,
    thread::{CpuSet, sched_setaffinity},
};

use crate::host::process_id::ProcessId;

const ONLINE: &str = "/sys/devices/system/cpu/online";
const POSSIBLE: &str = "/sys/devices/system/cpu/possible";
const NODES_WITH_MEMORY: &str = "/sys/devices/system/node/has_memory";
const POSSIBLE_NODES: &str = "/sys/devices/system/node/possible";

/// The names of the VMM's threads that run a vCPU have this before the number.
const VCPU: &str = "vcpu";

/// The threads that KVM has in the process of a VMM. They never leave the host's kernel, which may refuse to pin them.
const KVM: &str = "kvm-";

/// Why the host's processors cannot be used as asked.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ProcessorError {
    #[error("cannot read {path}")]
    Read { path: PathBuf, source: io::Error },
    #[error("{path}: {text:?} is not a list of processors")]
    List { path: PathBuf, text: String },
    #[error("cannot run the thread {name} of the VMM on the host's processors {cpus}")]
    Pin { name: String, cpus: String, source: io::Error },
    #[error("the VMM has ended")]
    Ended,
}

/// On which processors of the host the threads of a VMM are to run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Affinities {
    /// Those of each vCPU, from vCPU 0 on.
    pub(crate) vcpus: Vec<CpuNumbers>,
    /// Those of the other threads.
    pub(crate) others: CpuNumbers,
}

impl Affinities {
    fn of(&self, thread: &str) -> &CpuNumbers {
        let vcpu = thread.strip_prefix(VCPU).and_then(|number| number.parse::<usize>().ok());
        vcpu.and_then(|vcpu| self.vcpus.get(vcpu)).unwrap_or(&self.others)
    }
}

/// The processors or the NUMA nodes of the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Present {
    /// Those that the kernel can have.
    pub(crate) possible: CpuNumbers,
    /// Those that can be used now: processors that are online, nodes with memory.
    pub(crate) usable: CpuNumbers,
}

/// The processors.
pub(crate) fn processors() -> Result<Present, ProcessorError> {
    Ok(Present { possible: read(POSSIBLE)?, usable: online()? })
}

/// The NUMA nodes.
pub(crate) fn numa_nodes() -> Result<Present, ProcessorError> {
    // A kernel without NUMA has no such files, and one node.
    let one_without = |read: Result<CpuNumbers, ProcessorError>| match read {
        Err(ProcessorError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            Ok([0].into())
        }
        other => other,
    };
    Ok(Present {
        possible: one_without(read(POSSIBLE_NODES))?,
        usable: one_without(read(NODES_WITH_MEMORY))?,
    })
}

/// The processors that are online.
pub(crate) fn online() -> Result<CpuNumbers, ProcessorError> {
    read(ONLINE)
}

/// Those that are online and that a cgroup may use, by its file with the effective ones. None: it may use all.
pub(crate) fn usable(effective: Option<&Path>) -> Result<CpuNumbers, ProcessorError> {
    let online = online()?;
    let Some(file) = effective else { return Ok(online) };
    let allowed = match read(file) {
        // Its controller was disabled meanwhile.
        Err(ProcessorError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            return Ok(online);
        }
        other => other?,
    };
    // A processor that has just gone offline may still be in the file.
    let usable: CpuNumbers = online.intersection(&allowed).copied().collect();
    Ok(if usable.is_empty() { online } else { usable })
}

fn read(path: impl AsRef<Path>) -> Result<CpuNumbers, ProcessorError> {
    let path = path.as_ref();
    let text =
        fs::read_to_string(path).map_err(|source| ProcessorError::Read { path: path.into(), source })?;
    cpu_list::parse(&text).ok_or_else(|| ProcessorError::List { path: path.into(), text })
}

/// Has the threads of a VMM run on these processors, within what their cgroup allows. Once its guest runs, the VMM
/// cannot start or name threads, because its jail forbids the calls. The id of a thread that ends meanwhile stays
/// unused until the kernel has gone through all other ids.
pub(crate) fn pin(vmm: ProcessId, affinities: &Affinities) -> Result<(), ProcessorError> {
    let tasks = PathBuf::from(format!("/proc/{}/task", vmm.pid));
    let entries = fs::read_dir(&tasks).map_err(|source| ProcessorError::Read { path: tasks, source })?;
    let threads: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    // These were the threads of the VMM, and not of a process that has its pid by now.
    if ProcessId::of(vmm.pid).ok() != Some(vmm) {
        return Err(ProcessorError::Ended);
    }
    threads.iter().try_for_each(|thread| pin_thread(thread, affinities))
}

fn pin_thread(thread: &Path, affinities: &Affinities) -> Result<(), ProcessorError> {
    // A thread of a VMM that ends has no name any more.
    let Ok(name) = fs::read_to_string(thread.join("comm")) else { return Ok(()) };
    let id = thread.file_name().and_then(|id| id.to_str()?.parse().ok()).and_then(Pid::from_raw);
    let name = name.trim_end();
    if name.starts_with(KVM) {
        return Ok(());
    }
    let cpus = affinities.of(name);
    match sched_setaffinity(id, &set_of(cpus)) {
        Ok(()) | Err(Errno::SRCH) => Ok(()),
        Err(error) => Err(ProcessorError::Pin {
            name: name.to_owned(),
            cpus: cpu_list::format(cpus),
            source: error.into(),
        }),
    }
}

/// Leaves out what the kernel's interface has no room for.
fn set_of(cpus: &CpuNumbers) -> CpuSet {
    let mut set = CpuSet::new();
    cpus.iter().map(|cpu| *cpu as usize).filter(|cpu| *cpu < CpuSet::MAX_CPU).for_each(|cpu| set.set(cpu));
    set
}

#[cfg(test)]
mod tests {
    use std::{
        sync::mpsc::channel,
        thread::{Builder, sleep},
        time::Duration,
    };

    use super::*;

    #[test]
    fn each_vcpu_has_its_processors_and_every_other_thread_the_rest() {
        let affinities = Affinities { vcpus: vec![[4].into(), [5, 6].into()], others: [0].into() };
        assert_eq!(affinities.of("vcpu1"), &[5, 6].into());
        for other in ["vcpu2", "vcpu", "vcpux", "net", ""] {
            assert_eq!(affinities.of(other), &[0].into(), "{other}");
        }
    }

    #[test]
    fn what_can_be_used_is_possible() {
        for Present { possible, usable } in [processors().unwrap(), numa_nodes().unwrap()] {
            assert!(!usable.is_empty() && usable.is_subset(&possible), "{usable:?} {possible:?}");
        }
    }

    #[test]
    fn a_cgroup_above_leaves_some_of_the_processors() {
        let dir = tempfile::tempdir().unwrap();
        let (file, online) = (dir.path().join("cpuset.cpus.effective"), online().unwrap());
        let last: CpuNumbers = [*online.last().unwrap()].into();
        assert_eq!((usable(None).unwrap(), usable(Some(&file)).unwrap()), (online.clone(), online.clone()));
        fs::write(&file, format!("{},4000\n", cpu_list::format(&last))).unwrap();
        assert_eq!(usable(Some(&file)).unwrap(), last);
        fs::write(&file, "4000\n").unwrap();
        assert_eq!(usable(Some(&file)).unwrap(), online);
        fs::write(&file, "x\n").unwrap();
        assert!(matches!(usable(Some(&file)), Err(ProcessorError::List { .. })));
    }

    fn allowed(thread: &Path) -> CpuNumbers {
        let status = fs::read_to_string(thread.join("status")).unwrap();
        let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap();
        cpu_list::parse(list).unwrap()
    }

    #[test]
    fn a_thread_runs_where_it_is_pinned() {
        let all = online().unwrap();
        let last: CpuNumbers = [*all.last().unwrap()].into();
        let (end, ended) = channel::<()>();
        let vcpu = Builder::new().name("vcpu0".into()).spawn(move || ended.recv()).unwrap();
        let process = ProcessId::of(std::process::id()).unwrap();
        let named = || {
            let tasks = fs::read_dir("/proc/self/task").unwrap().flatten().map(|entry| entry.path());
            tasks
                .into_iter()
                .find(|task| fs::read_to_string(task.join("comm")).unwrap_or_default() == "vcpu0\n")
        };
        while named().is_none() {
            sleep(Duration::from_millis(1));
        }
        pin(process, &Affinities { vcpus: vec![last.clone()], others: all.clone() }).unwrap();
        assert_eq!(allowed(&named().unwrap()), last);
        pin(process, &Affinities { vcpus: vec![all.clone()], others: all.clone() }).unwrap();
        assert_eq!(allowed(&named().unwrap()), all);
        end.send(()).unwrap();
        vcpu.join().unwrap().unwrap();
        let another = ProcessId { start_time: process.start_time + 1, ..process };
        assert!(matches!(
            pin(another, &Affinities { vcpus: Vec::new(), others: all }),
            Err(ProcessorError::Ended)
        ));
    }
}
