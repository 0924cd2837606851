//! Memory and tasks that containers cannot use: a reserve for the guest's kernel and agent, and a part that each
//! container of a pod leaves to the others.
//!
//! All containers are in one cgroup. Its limits are the guest's memory and tasks, less the reserve. In it, each
//! container of a pod has a cgroup that is limited to seven eighths of that. So a fork bomb or a memory leak reaches
//! its own limit first. An eighth is left for the others, which is enough to continue and to start one more process.
//! The container does not see these limits. Its own cgroup, with the limits of its spec, is below.
//!
//! Added memory comes online a little later than the shim is told. Until it is online and the limits have followed, the
//! kernel would kill a process that needs it. So the shim waits for that before it goes on
//! ([`Reserve::wait_online`]).

mod demand;
pub mod huge_pages;
mod pool;

use std::{
    collections::HashMap,
    fs,
    io::{self, ErrorKind},
    path::Path,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use bulkhead_agent_api::{HOST_PARAMETERS, HUGE_PAGE};
use nix::sys::sysinfo::sysinfo;
use tokio::{
    sync::watch,
    task::spawn_blocking,
    time::{sleep, timeout},
};

pub use self::pool::{HugePagesError, Owner as HugePagesOwner};
use self::pool::{Pool, available_memory};
use crate::cgroup::containers::{self, Ceiling, Change};

/// The guest allows one task for this many bytes of memory. The kernel's own rule is 128 KiB, eight times the stack of
/// a task (kernel/fork.c, set_max_threads). It protects machines that do not charge tasks to a cgroup. Tasks of a
/// container are charged, with their stacks. A task takes more than this, so that memory runs short before tasks do: a
/// guest can get more memory then.
const MEMORY_PER_TASK: u64 = 32 << 10;
/// The inotify watches and fanotify marks that each user may have. The kernel computes the numbers from a hundredth of
/// the memory at boot. This is the most that it ever allows by itself (fs/notify/inotify/inotify_user.c).
const MAX_WATCHES: u64 = 1 << 20;
/// The limits of these. A watch or a mark is charged to its container.
const WATCHES: [&str; 2] = ["fs/inotify/max_user_watches", "fs/fanotify/max_user_marks"];
/// These the kernel computes from the memory at boot too: watches of epoll (fs/eventpoll.c, eventpoll_init), and TCP
/// sockets that no process has any more (net/ipv4/tcp.c, tcp_init). They grow with the memory.
const IN_PROPORTION: [&str; 2] = ["fs/epoll/max_user_watches", "net/ipv4/tcp_max_orphans"];
/// The connections that the kernel tracks in each network namespace. Entries are charged to no container.
const CONNECTIONS: &str = "net/netfilter/nf_conntrack_max";
/// Bytes of memory for each of them. An entry takes 320 bytes when it is used, so all together take 0.5 % of the
/// memory. A host with more than 4 GiB has 262,144 (net/netfilter/nf_conntrack_core.c, nf_conntrack_init_start).
const MEMORY_PER_CONNECTION: u64 = 64 << 10;
/// By the memory at boot the kernel tracks far fewer in a small guest, and drops what comes beyond: 1,900 with 236 MiB,
/// where a closed connection counts for two minutes. That is too few for a proxy, or for docker's name server. These
/// take 10 MiB when all are used: less than what containers cannot use (`slack`).
const LEAST_CONNECTIONS: u64 = 1 << 15;
/// The kernel computes no more by itself.
const MOST_CONNECTIONS: u64 = 1 << 18;
/// The largest buffers that TCP gives a socket by itself, as the kernel has them with 768 MiB or more at boot
/// (net/ipv4/tcp.c, tcp_init). What a socket has in its buffers is charged to its container, and limited by tcp_mem. A
/// new network namespace has the values of the guest's own.
const SOCKET_BUFFERS: [(&str, &str); 2] =
    [("net/ipv4/tcp_rmem", "4096 131072 6291456"), ("net/ipv4/tcp_wmem", "4096 16384 4194304")];
/// A container may reserve more addresses than the guest has memory (proc_sys_vm(5), overcommit_memory). By default the
/// kernel refuses one mapping that is larger than all of its memory. On a host that is seldom too little, but a guest
/// is small.
const OVERCOMMIT: &str = "1";
/// The kernel does not look every half second whether free memory is in pieces (admin-guide/sysctl/vm.rst,
/// compaction_proactiveness): an idle guest would never sleep longer. It still compacts memory when it needs a large
/// page.
const COMPACTION_PROACTIVENESS: &str = "0";
/// The parts of the memory that TCP's and UDP's buffers may take before the kernel is sparing with them, as the kernel
/// has them at boot (net/ipv4/tcp.c, tcp_init_mem; net/ipv4/udp.c, udp_init).
const TCP_PART: u64 = 16;
const UDP_PART: u64 = 8;
const PAGE: u64 = 4096;

/// One byte of descriptions for this many bytes of added memory: the kernel has 64 for each page of 4096.
const DESCRIBED: u64 = 64;
/// The highest process id, as on 64-bit hosts with systemd.
const PID_MAX: u64 = 1 << 22;

/// Tasks for the agent, its threads and its stages.
const AGENT_TASKS: u64 = 128;
/// Tasks that the kernel adds for each processor that comes online later.
const TASKS_PER_CPU: u64 = 8;
/// A container of a pod leaves one of this many parts to the others.
const PARTS: u64 = 8;

/// The mark above which containers are slowed down is below the limit by the limit divided by this number. The
/// kernel's delay grows with the square of the excess (mm/memcontrol.c, calculate_high_delay), up to two seconds for
/// each 256 KiB that a process takes.
const MARGIN: u64 = 5;

/// How long the kernel may take until added memory is online. A block of 128 MiB takes milliseconds, and some tens of
/// them in the rig.
const ONLINE: Duration = Duration::from_secs(30);
/// How much longer the agent waits for late memory, to set the limits then.
const ONLINE_LATE: Duration = Duration::from_mins(10);
/// The pause between two checks whether the memory is online.
const ONLINE_REST: Duration = Duration::from_millis(2);

/// The mark of containers that may use `limit` bytes together.
fn mark_below(limit: u64) -> u64 {
    limit - limit / MARGIN
}

/// Keeps the reserve. The default keeps nothing: for a kernel that is not a guest's.
#[derive(Debug, Default)]
pub struct Reserve {
    boot: Option<Boot>,
    /// Locked by who sets limits.
    memory: Mutex<Memory>,
    /// Locked before `memory`.
    pool: Mutex<Pool>,
    /// How often [`Reserve::wait_demand`] was called.
    demand_calls: watch::Sender<u64>,
    /// How often [`Reserve::wait_online`] was called.
    online_calls: AtomicU64,
}

/// What the limits depend on.
#[derive(Debug, Default)]
struct Memory {
    /// Memory of the guest for which the limits were set last, bytes.
    scaled_to: u64,
    /// The most that the limits of all containers and the room for pages of programs have been together, bytes.
    promised: u64,
    /// The processes and threads that the host allows the pod. None: it has no limit.
    tasks_of_host: Option<u64>,
    /// Whether the guest gets more memory when the containers need it.
    can_grow: bool,
    /// Where the kernel begins to slow down containers that take memory.
    mark: Option<u64>,
    /// What volumes take whose files the agent has written, bytes.
    written: u64,
    /// What the pool of huge pages takes, bytes.
    huge_pages: u64,
}

impl Memory {
    /// Sets what the kernel derives from the size of the guest's memory, if the size is another than before.
    fn scale_to_present(&mut self, boot: &Boot) -> io::Result<()> {
        let now = sysinfo()?.ram_total();
        if self.scaled_to == now {
            return Ok(());
        }
        fs::write("/proc/sys/kernel/threads-max", (now / MEMORY_PER_TASK).to_string())?;
        fs::write("/proc/sys/net/ipv4/tcp_mem", socket_memory(now / TCP_PART))?;
        fs::write("/proc/sys/net/ipv4/udp_mem", socket_memory(now / UDP_PART))?;
        for (file, at_boot) in IN_PROPORTION.iter().zip(boot.in_proportion) {
            set_if_there(file, in_proportion(at_boot, now, boot.memory))?;
        }
        set_if_there(CONNECTIONS, connections(now))?;
        self.scaled_to = now;
        Ok(())
    }

    /// Follows a pool that has become smaller by itself: files have given back pages that no longer belonged to the
    /// pool.
    fn follow_pool(&mut self, present: impl FnOnce() -> io::Result<u64>) -> io::Result<()> {
        if self.huge_pages > 0 {
            self.huge_pages = self.huge_pages.min(present()?.saturating_mul(HUGE_PAGE));
        }
        Ok(())
    }

    /// No more than the host allows.
    fn tasks_on_host(&self, tasks: u64) -> u64 {
        self.tasks_of_host.map_or(tasks, |most| tasks.min(most))
    }

    /// What the agent holds for the containers, bytes.
    fn held(&self) -> u64 {
        self.written.saturating_add(self.huge_pages)
    }
}

/// The guest before it had a container.
#[derive(Debug, Clone, Copy)]
struct Boot {
    /// All memory, bytes.
    memory: u64,
    /// Memory that processes could use, bytes.
    available: u64,
    /// Tasks of the kernel and of the agent.
    tasks: u64,
    /// Processors, including those that are not online.
    cpus: u64,
    /// What the kernel has computed for each file of [`IN_PROPORTION`].
    in_proportion: [u64; IN_PROPORTION.len()],
}

impl Reserve {
    /// Takes the reserve. There is no container yet.
    pub fn at_boot() -> io::Result<Self> {
        let info = sysinfo()?;
        let boot = Boot {
            memory: info.ram_total(),
            available: available_memory()?,
            tasks: u64::from(info.process_count()),
            cpus: possible_cpus()?,
            in_proportion: IN_PROPORTION.map(present),
        };
        let reserve = Self { boot: Some(boot), ..Self::default() };
        fs::write("/proc/sys/kernel/pid_max", PID_MAX.to_string())?;
        for file in WATCHES {
            set_if_there(file, MAX_WATCHES)?;
        }
        for (file, value) in SOCKET_BUFFERS {
            set_if_there(file, value)?;
        }
        fs::write("/proc/sys/vm/overcommit_memory", OVERCOMMIT)?;
        fs::write("/proc/sys/vm/compaction_proactiveness", COMPACTION_PROACTIVENESS)?;
        let mut memory = reserve.lock();
        memory.scale_to_present(&boot)?;
        boot.limit(&mut memory)?;
        drop(memory);
        Ok(reserve)
    }

    /// Waits until the guest's kernel has the memory online that was added to what it had at boot, or until a later
    /// call: the memory may have another size then. If it comes late, the limits follow without another call.
    pub async fn wait_online(self: &Arc<Self>, added_mib: u32) -> io::Result<()> {
        let call = self.online_calls.fetch_add(1, Ordering::Relaxed) + 1;
        let Some(boot) = self.boot.filter(|_| added_mib > 0) else { return Ok(()) };
        let wanted = boot.memory + (u64::from(added_mib) << 20);
        if let Ok(online) = timeout(ONLINE, self.online(call, wanted)).await {
            return online;
        }
        let reserve = Arc::clone(self);
        tokio::spawn(async move {
            if let Ok(Ok(())) = timeout(ONLINE_LATE, reserve.online(call, wanted)).await {
                let scaled = spawn_blocking(move || reserve.scale_to_memory()).await;
                if let Err(error) = scaled.map_err(io::Error::other).and_then(|scaled| scaled) {
                    eprintln!("bulkhead-agent: limits do not follow memory that came late: {error}");
                }
            }
        });
        Err(not_online(sysinfo()?.ram_total(), wanted))
    }

    /// Waits without a deadline, see [`Reserve::wait_online`].
    async fn online(&self, call: u64, wanted: u64) -> io::Result<()> {
        while sysinfo()?.ram_total() < wanted && self.online_calls.load(Ordering::Relaxed) == call {
            sleep(ONLINE_REST).await;
        }
        Ok(())
    }

    /// Follows the memory of the guest. It may have got more for a container that is to be created or may use more. It
    /// may have less because the host allows the pod no more.
    pub fn scale_to_memory(&self) -> io::Result<()> {
        self.follow_memory(|_| {})
    }

    /// Follows the memory of the guest, and what `change` changes of it.
    fn follow_memory(&self, change: impl FnOnce(&mut Memory)) -> io::Result<()> {
        let Some(boot) = self.boot else { return Ok(()) };
        let mut memory = self.lock();
        let (before, held) = (memory.scaled_to, memory.held());
        memory.scale_to_present(&boot)?;
        memory.follow_pool(pool::present)?;
        change(&mut memory);
        let (now, now_held) = (memory.scaled_to, memory.held());
        if now < before || now_held > held {
            boot.limit(&mut memory)
        } else if now > before || now_held != held {
            boot.set(&mut memory)
        } else {
            Ok(())
        }
    }

    /// Takes over what the pod has of its host: kernel parameters of [`HOST_PARAMETERS`], and the processes and threads
    /// that it may have.
    pub fn follow_host(&self, parameters: &HashMap<String, String>, tasks: Option<u64>) -> io::Result<()> {
        let Some(boot) = self.boot else { return Ok(()) };
        for name in HOST_PARAMETERS {
            let Some(value) = parameters.get(name) else { continue };
            let value = &no_more_than_fits(name, value, boot.memory);
            // The guest's kernel may be of another version, and know other limits of a value.
            if let Err(error) = set_if_there(name, value) {
                eprintln!("bulkhead-agent: {name} is not {value:.32?} as on the host: {error}");
            }
        }
        let mut memory = self.lock();
        memory.tasks_of_host = tasks;
        boot.set(&mut memory)
    }

    /// Takes the huge pages of the pool from what the containers may use. The guest may have got memory for them. It is
    /// not what containers may use for a moment: the kernel would kill some if it were taken again.
    fn hold_huge_pages(&self, boot: Boot, pages: u64) -> io::Result<()> {
        let mut memory = self.lock();
        memory.scale_to_present(&boot)?;
        memory.huge_pages = pages.saturating_mul(HUGE_PAGE);
        boot.limit(&mut memory)?;
        boot.set(&mut memory)
    }

    /// Takes this many bytes from what the containers may use: the agent holds them for the containers. Replaces what
    /// was held before.
    pub fn hold(&self, bytes: u64) -> io::Result<()> {
        self.follow_memory(|memory| memory.written = bytes)
    }

    /// Sets the limits of all containers. Again when the own limit of one has changed.
    pub fn set(&self) -> io::Result<()> {
        self.boot.map_or(Ok(()), |boot| boot.set(&mut self.lock()))
    }

    /// Sets the mark above which containers are slowed down, for this call of [`Reserve::wait_demand`]. None: there is
    /// none, because the guest cannot grow, or a later call has been made.
    fn mark(&self, call: u64, can_grow: bool) -> io::Result<Option<u64>> {
        let Some(boot) = self.boot else { return Ok(None) };
        self.scale_to_memory()?;
        let Some(mut memory) = self.follow(call, can_grow) else { return Ok(None) };
        boot.set_mark(&mut memory)?;
        Ok(memory.mark)
    }

    /// Records what the latest call of [`Reserve::wait_demand`] says. None: a later call has been made. That one may
    /// have set its mark already, which stays the last one.
    fn follow(&self, call: u64, can_grow: bool) -> Option<MutexGuard<'_, Memory>> {
        let mut memory = self.lock();
        if *self.demand_calls.borrow() != call {
            return None;
        }
        memory.can_grow = can_grow;
        Some(memory)
    }

    /// What a container of a pod may use; None: no less than all containers together.
    pub fn of_member(&self) -> Option<Ceiling> {
        self.boot.map(|boot| boot.of_member(&self.lock()))
    }

    fn lock(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Boot {
    fn set(self, memory: &mut Memory) -> io::Result<()> {
        memory.promised = memory.promised.max(containers::promised_memory()?);
        containers::set_ceilings(self.of_all_by_limits(memory), self.of_member(memory), Change::OnlyMore)?;
        self.set_mark(memory)
    }

    /// Sets the limits to what they are now. The containers may be allowed less than before.
    fn limit(self, memory: &mut Memory) -> io::Result<()> {
        containers::set_ceilings(self.of_all_by_limits(memory), self.of_member(memory), Change::Exactly)?;
        self.set_mark(memory)
    }

    /// Sets the mark below the limit of all containers, or removes it.
    fn set_mark(self, memory: &mut Memory) -> io::Result<()> {
        let mark = memory.can_grow.then(|| mark_below(self.of_all_by_limits(memory).memory));
        if mark != memory.mark {
            containers::set_mark(mark.unwrap_or(u64::MAX))?;
            memory.mark = mark;
        }
        Ok(())
    }

    /// What all containers may use together. The guest has been given the memory for the limits that containers have by
    /// their specs, and each is to be killed for its own limit only. It stays with the guest, and nobody is killed
    /// because another container is gone. If the host allows the pod less, the containers have what there is.
    fn of_all_by_limits(self, memory: &Memory) -> Ceiling {
        let of_all = self.of_all(memory.scaled_to);
        let promised = memory.promised.min(self.available(memory.scaled_to).saturating_sub(memory.held()));
        Ceiling {
            memory: of_all.memory.saturating_sub(memory.held()).max(promised),
            tasks: memory.tasks_on_host(of_all.tasks),
        }
    }

    /// Memory that processes could use in a guest of this much memory.
    fn available(self, memory: u64) -> u64 {
        let added = memory.saturating_sub(self.memory);
        let taken = self.memory.saturating_sub(memory);
        (self.available + added - added / DESCRIBED).saturating_sub(taken)
    }

    /// What all containers may use together in a guest of this much memory.
    fn of_all(self, memory: u64) -> Ceiling {
        // The kernel needs more than at boot when it has much to do.
        let slack = (self.memory / 16).clamp(2 << 20, 16 << 20);
        let tasks = memory / MEMORY_PER_TASK;
        let reserved = self.tasks + AGENT_TASKS + TASKS_PER_CPU * self.cpus;
        Ceiling {
            memory: self.available(memory).saturating_sub(slack),
            tasks: tasks.min(PID_MAX).saturating_sub(reserved),
        }
    }

    fn of_member(self, memory: &Memory) -> Ceiling {
        let Ceiling { memory: of_all, tasks } = self.of_all(memory.scaled_to);
        let of_all = of_all.saturating_sub(memory.held());
        Ceiling { memory: of_all - of_all / PARTS, tasks: memory.tasks_on_host(tasks - tasks / PARTS) }
    }
}

fn not_online(present: u64, wanted: u64) -> io::Error {
    let (present, wanted) = (present >> 20, wanted >> 20);
    let text = format!("{present} MiB are online after {ONLINE:?}, and not {wanted}");
    io::Error::new(ErrorKind::TimedOut, text)
}

/// The three thresholds of tcp_mem or udp_mem, in pages, where `pressure` bytes are the middle one (tcp(7)).
fn socket_memory(pressure: u64) -> String {
    let pressure = (pressure / PAGE).max(128);
    let low = pressure / 4 * 3;
    format!("{low} {pressure} {}", 2 * low)
}

/// The connections that are tracked in a guest of this much memory.
fn connections(memory: u64) -> u64 {
    (memory / MEMORY_PER_CONNECTION).clamp(LEAST_CONNECTIONS, MOST_CONNECTIONS)
}

/// A pending AIO request is charged to no container. So a guest has no more than one for each page of its memory, which
/// take a sixteenth of it.
fn no_more_than_fits(name: &str, value: &str, memory: u64) -> String {
    match value.parse::<u64>() {
        Ok(number) if name == "fs/aio-max-nr" => number.min(memory / PAGE).to_string(),
        _ => value.to_owned(),
    }
}

/// What the kernel would have computed, if it had had as much memory at boot as it has `now`.
fn in_proportion(at_boot: u64, now: u64, memory_at_boot: u64) -> u64 {
    let scaled = u128::from(at_boot) * u128::from(now) / u128::from(memory_at_boot.max(1));
    u64::try_from(scaled).unwrap_or(u64::MAX)
}

/// What a file below /proc/sys says. 0: a kernel without it, or no number.
fn present(file: &str) -> u64 {
    let text = fs::read_to_string(Path::new("/proc/sys").join(file));
    text.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

/// Writes to a file below /proc/sys. The kernel of the configuration may be one that does not have this part.
fn set_if_there(file: &str, value: impl ToString) -> io::Result<()> {
    match fs::write(Path::new("/proc/sys").join(file), value.to_string()) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        written => written,
    }
}

/// The file has a list such as `0-31`.
fn possible_cpus() -> io::Result<u64> {
    let text = fs::read_to_string(Path::new("/sys/devices/system/cpu/possible"))?;
    let last = text.trim().rsplit(['-', ',']).next().and_then(|last| last.parse::<u64>().ok());
    last.map(|last| last + 1)
        .ok_or_else(|| io::Error::new(ErrorKind::InvalidData, "the list of processors is empty"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    const BOOT: Boot =
        Boot { memory: 224 * MIB, available: 190 * MIB, tasks: 70, cpus: 4, in_proportion: [48_000, 1024] };

    #[test]
    fn the_kernel_and_the_agent_keep_their_part() {
        let all = BOOT.of_all(224 * MIB);
        assert_eq!(all, Ceiling { memory: 176 * MIB, tasks: 7168 - 70 - 128 - 32 });
        // What is added later is the containers', except for its descriptions.
        assert_eq!(BOOT.of_all(480 * MIB).memory, all.memory + 252 * MIB);
        // What the host has taken away is missing.
        assert_eq!(BOOT.of_all(200 * MIB).memory, all.memory - 24 * MIB);
        assert_eq!(BOOT.of_all(10 * MIB).memory, 0);
        assert_eq!(BOOT.of_all(1 << 44).tasks, PID_MAX - 230);
    }

    #[test]
    fn what_the_agent_holds_for_the_containers_is_missing() {
        let with = |promised, written, huge_pages| {
            let memory = Memory { scaled_to: 224 * MIB, promised, written, huge_pages, ..Memory::default() };
            let of_all = BOOT.of_all_by_limits(&memory).memory;
            assert!(BOOT.of_member(&memory).memory <= of_all);
            of_all
        };
        let of_all = |promised, held| {
            let of_all = with(promised, held, 0);
            assert_eq!(of_all, with(promised, 0, held));
            of_all
        };
        assert_eq!((of_all(0, 0), of_all(0, 16 * MIB)), (176 * MIB, 160 * MIB));
        // The kernel's slack comes first.
        assert_eq!((of_all(176 * MIB, 4 * MIB), of_all(176 * MIB, 20 * MIB)), (176 * MIB, 170 * MIB));
    }

    #[test]
    fn the_host_may_allow_fewer_tasks() {
        let tasks = |tasks_of_host| {
            let memory = Memory { scaled_to: 224 * MIB, tasks_of_host, ..Memory::default() };
            (BOOT.of_all_by_limits(&memory).tasks, BOOT.of_member(&memory).tasks)
        };
        let (all, member) = tasks(None);
        assert!(member < all && tasks(Some(1 << 40)) == (all, member));
        // A container may have all of them, as on runc.
        assert_eq!(tasks(Some(1024)), (1024, 1024));
        assert_eq!(tasks(Some(all - 1)), (all - 1, member));
    }

    #[test]
    fn pages_that_files_give_back_are_the_containers_again() {
        let mut memory = Memory { huge_pages: 8 * HUGE_PAGE, ..Memory::default() };
        // More pages are not counted here: whoever makes the pool grow counts them.
        for (present, held) in [(9, 8), (3, 3), (5, 3), (0, 0)] {
            memory.follow_pool(|| Ok(present)).unwrap();
            assert_eq!(memory.held(), held * HUGE_PAGE);
        }
        memory.follow_pool(|| panic!("a guest without huge pages is not asked")).unwrap();
    }

    #[test]
    fn a_container_of_a_pod_leaves_an_eighth_to_the_others() {
        let memory = Memory { scaled_to: 224 * MIB, ..Memory::default() };
        assert_eq!(BOOT.of_member(&memory), Ceiling { memory: 154 * MIB, tasks: 6071 });
        let memory = Memory { huge_pages: 96 * MIB, ..memory };
        assert_eq!(BOOT.of_member(&memory).memory, 70 * MIB);
    }

    #[test]
    fn buffers_of_sockets_get_what_the_kernel_gives_them_at_boot() {
        assert_eq!(socket_memory((1 << 30) / TCP_PART), "12288 16384 24576");
        assert_eq!(socket_memory(0), "96 128 192");
    }

    #[test]
    fn connections_are_tracked_in_the_memory_that_containers_leave() {
        assert_eq!(
            [236 * MIB, 1 << 30, 4 << 30, 16 << 30, 1 << 40].map(connections),
            [32_768, 32_768, 65_536, 262_144, 262_144]
        );
    }

    #[test]
    fn limits_grow_with_the_memory() {
        let now = |at_boot, mib| in_proportion(at_boot, mib * MIB, BOOT.memory);
        assert_eq!([224, 448, 2240, 112].map(|mib| now(48_000, mib)), [48_000, 96_000, 480_000, 24_000]);
        assert_eq!(now(0, 448), 0);
        assert_eq!((in_proportion(5, 7, 0), in_proportion(u64::MAX, 9, 1)), (35, u64::MAX));
    }

    #[test]
    fn what_a_kernel_does_not_have_is_not_set() {
        set_if_there("net/netfilter/no-such-file", 1).unwrap();
        assert_eq!(present("net/netfilter/no-such-file"), 0);
        // Not a file that takes numbers.
        assert!(set_if_there("net", 1).is_err());
        assert!(present("fs/file-max") > 0);
    }

    #[test]
    fn there_is_room_above_the_mark() {
        assert_eq!(mark_below(200), 160);
        assert_eq!(mark_below(0), 0);
    }

    #[test]
    fn a_small_guest_has_room_for_a_container() {
        let boot = Boot { memory: 40 * MIB, available: 20 * MIB, ..BOOT };
        assert_eq!(boot.of_all(40 * MIB).memory, 20 * MIB - 40 * MIB / 16);
        assert_eq!(boot.of_all(40 * MIB).tasks, 1280 - 230);
        // Too small for anything: no limit is below zero.
        let boot = Boot { memory: MIB, available: 0, ..BOOT };
        let memory = Memory { scaled_to: MIB, ..Memory::default() };
        assert_eq!(boot.of_member(&memory), Ceiling { memory: 0, tasks: 0 });
    }
}
