//! `docs/conformance.md`: what the end-to-end tests found on runc and on Bulkhead, written by a whole run when it is
//! asked to.

mod by_name;
mod tables;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::process::Command;
use std::time::SystemTime;

use anyhow::{Context, Result, ensure};

use crate::dist::source_dir;
use crate::e2e::Run;
use crate::named::{Known, Named};
use crate::page::{day, filled};
use crate::test::Tally;

/// What a user of runc may miss, and why it is so. A request for it fails with an error that names it, unless the text
/// says "not refused" or names an errno.
const DIFFERENCES: &[(&str, &str)] = &[
    (
        "`hostNetwork`, `hostPID`, `hostIPC`, `docker run --uts host`, a namespace of the host by its path",
        "a microVM shares no namespace with its host",
    ),
    (
        "`hostUsers: false` with the handler `bulkhead-sandbox`; with the handler `bulkhead` it is honoured",
        "not built yet: the agent makes the namespaces of such a pod, and none of users among them",
    ),
    (
        "huge pages of a container (`hugepages-2Mi`): not refused, but they are the guest's, and the host's pool \
         stays unused; a mount of a hugetlbfs of the host has other files than on the host, and is refused if neither \
         a limit nor a size says how many pages there are",
        "the VM gets ordinary memory for them ([huge pages of containers](resources.md#huge-pages-of-containers))",
    ),
    ("huge pages of 1 GiB", "the guest has none"),
    (
        "errors of the host's file system when a file of the image is opened to be written (a full disk): not refused, \
         but they come with the first write",
        "the guest opens files of its root without a request ([files](architecture.md#files))",
    ),
    ("checkpoint and restore", "not built yet"),
    (
        "huge pages of a container count for `memory.max` of its pod's cgroup: not refused, but a pod of kubelet needs a \
         larger overhead for them",
        "they are ordinary memory of the VM ([huge pages of containers](resources.md#huge-pages-of-containers))",
    ),
    (
        "more than eight network interfaces in a pod, interfaces that are no Ethernet or have no Ethernet address \
         (netkit of layer 3), routes through an interface that have several next hops, are encapsulated or are not \
         unicast, rules of policy routing by `suppress_ifgroup`, `l3mdev`, `tun_id`, realms or a selector that is \
         newer than Linux 6.12, more than 1,024 rules or 4,096 routes, more than 1,024 addresses of the \
         loopback interface",
        "not built yet",
    ),
    (
        "an interface on top of another one of the pod's network namespace (bond, team, bridge with ports, VLAN, \
         macvlan, ipvlan), and an ipvlan in mode l3s",
        "the packets go to the VM at the lower interface (tc), and those of l3s arrive at none",
    ),
    (
        "an interface of the pod where a program of the host has an ingress or clsact qdisc (`tc`)",
        "the packets go to the VM by a qdisc in its place",
    ),
    (
        "`createContainer` and `startContainer` hooks",
        "they are programs of the host for namespaces that are the guest's",
    ),
    ("SELinux labels", "the guest's kernel has no SELinux ([security](security.md))"),
    ("stacks of AppArmor profiles, and profiles of namespaces of AppArmor", "not built yet"),
    ("`SCMP_ACT_NOTIFY` and `listenerPath` of a system call filter", "the listener is a process of the host"),
    (
        "several rules of a system call filter with conditions that match one call: not refused, the first one decides",
        "libseccomp has an order of its own, which the profile does not show",
    ),
    (
        "limits on block devices (`blockIO`, `io.max` and other files of `unified`) of a container in a Kubernetes pod. \
         Those of other containers hold for all that their VM reads and writes, and are not seen in the container's \
         cgroup",
        "the VM's process on the host, the VMM, reads and writes for all containers of a pod",
    ),
    (
        "weights of single disks (`blockIO.weightDevice`, `docker run --blkio-weight-device`) that have no weights on \
         this host",
        "they would have no effect; runc ignores them",
    ),
    (
        "files of `linux.resources.unified` that have a field of their own (`memory.max`, `cpu.max`, `cpuset.cpus` and \
         others)",
        "the VM gets its size by these fields, and the numbers of processors are the host's",
    ),
    (
        "swap (`memory.swap`, `memory.swap.max`): not refused, but what may be swapped stays in memory",
        "the guest has no swap",
    ),
    (
        "nodes of character devices (`docker run --device` and `--volume`, device plugins) other than those that \
         docs/resources.md lists. A privileged container, which gets all nodes of its host unasked, has these alone, \
         not refused, and the block devices that it asks for",
        "the guest's kernel has no such device, and the host's are not passed through",
    ),
    (
        "device rules (`docker run --device-cgroup-rule`) about devices of which the container can have none",
        "a block device needs a node, and the guest's kernel lacks most character devices",
    ),
    (
        "directories of the host's /dev with nodes in them as volumes. /dev itself is not refused: the container sees a \
         file system with the nodes of the guest's devices, without the host's sockets and links",
        "the numbers of the host's nodes mean other devices in the guest",
    ),
    (
        "nodes of block devices in other directories of the host, also for a privileged container: not refused, but \
         they cannot be opened (EPERM). In a container that has block devices of the host, no node in a directory of \
         the host can be opened (EACCES)",
        "the number may be that of a disk of another container",
    ),
    (
        "a block device of the host (`volumeDevices`, `docker run --device`): not refused, but it has other numbers in \
         the container, stays open until the pod ends, and keeps the size that it had",
        "it is a virtio disk of the VM",
    ),
    (
        "a container that may set the clock (CAP_SYS_TIME) sets that of its pod, not refused; within a minute it \
         is the host's again",
        "the guest's clock follows the host's",
    ),
    (
        "port-forward of the CRI to a port without a listener: the connection is reset, not refused",
        "the shim has accepted it before the guest can refuse it",
    ),
    (
        "bind mounts with `shared` or `rshared` propagation (`Bidirectional` of Kubernetes)",
        "what a container mounts stays in its VM; `rslave` is honoured",
    ),
    (
        "sockets of the host's services (`-v /var/run/docker.sock:...`): not refused, but SCM_RIGHTS and \
         SCM_CREDENTIALS do not pass, the service sees the shim's pid, and a connection to a service that has ended is \
         accepted and ends at once. To those of datagrams (`/dev/log`) a container can only send: there are no \
         answers, and the service sees the VMM's pid",
        "the shim forwards bytes and datagrams ([sockets of the host's services](resources.md#sockets-of-the-hosts-services))",
    ),
    (
        "sockets in a directory of the host that a container mounts: the mount is not refused. A container connects to \
         stream and datagram sockets directly in the directory, also after the service has restarted. Other \
         connections fail with ECONNREFUSED: to sockets in directories below, and from the host or another pod to a \
         container's socket (each container of docker is a pod)",
        "virtio-fs carries no connections; the shim looks for sockets in the directory that is mounted \
         ([sockets of the host's services](resources.md#sockets-of-the-hosts-services))",
    ),
    (
        "inotify events of what the host changes in a volume: not refused, but there are none; ConfigMap, Secret, \
         downward API and projected volumes have them, if they take at most 3 MiB each and 16 MiB together",
        "virtio-fs has no notifications in Linux: who opens a file sees the change; the guest has copies of those \
         volumes ([volumes that kubelet keeps up to date](resources.md#volumes-that-kubelet-keeps-up-to-date))",
    ),
    (
        "groups of a process on NFS whose server maps root to nobody (`root_squash`): not refused, but a process that \
         is not root has its own group, and those of the file and of the directories above it, whether it is a \
         member or not. So it cannot give a file to another one of its groups (EPERM), and one with CAP_DAC_OVERRIDE \
         can do what a member of these groups can. A process that is root has none: `supplementalGroups` have no \
         effect for it there",
        "the VMM acts there as the process, and a request names only one of its groups \
         ([files](architecture.md#files))",
    ),
    (
        "file systems that the host mounts when somebody enters them (autofs, NFS exports below an export) below a \
         volume: not refused, but they are not entered (ENOTDIR, ENOENT) unless the host has mounted them",
        "not built yet: the file server does not cause such mounts",
    ),
    (
        "a full disk under a page that a shared mapping (`mmap`) writes to: not refused, but msync(2), fsync(2) or \
         close(2) reports it, and no SIGBUS",
        "the page reaches the host later",
    ),
    (
        "clones of files on XFS and Btrfs (FICLONE, `cp --reflink=always`): EOPNOTSUPP. copy_file_range(2) makes clones \
         there",
        "FUSE has no such request",
    ),
    (
        "a file system that the host has mounted below a directory that a container mounts: not refused, but \
         /proc/self/mountinfo does not list it, as it does on runc with `rbind`. Its files have a device number \
         (`st_dev`) of their own. So `find -xdev`, `du -x` and `tar --one-file-system` stop there, and \
         `os.path.ismount` of Python is true. But programs that look up the mount of such a file fail, such as df(1) \
         of BusyBox and `Files.getFileStore` of JDK 8",
        "the guest has one mount for each mount of the container ([files](architecture.md#files))",
    ),
    (
        "changes of a file by a descriptor (fchmod(2), fchown(2), futimens(2), fsetxattr(2)) within 2 seconds after the \
         guest has looked its name up, if the host or another pod has renamed or removed it meanwhile: ESTALE. Reads, \
         writes and fstat(2) work for the 4,096 files that were used last. Other open files give ESTALE",
        "the request names the file and not the descriptor ([files](architecture.md#files))",
    ),
    (
        "lists of directories for 32-bit programs that were built without support for large files: not refused, but \
         EOVERFLOW",
        "positions in directories are numbers of 64 bits; on a host Linux makes smaller ones for such a program",
    ),
    (
        "parameters of a pod's network namespace on the host (`net.*`), which a CNI plugin such as `tuning` sets, or \
         which the namespace copies from the host: not refused, but the guest has only those that are usually \
         changed, such as `net.ipv4.ip_forward`, as they were when the pod started or the interface came. Changes \
         after that have no effect. Others are those of the guest's kernel, such as `net.ipv4.tcp_rmem`, `neigh`, and \
         `disable_ipv6` of `all` and `default`",
        "the guest has a kernel of its own ([the list](architecture.md#the-pods-network)). What follows from the host's \
         memory does not fit it, and the host's kernel does not tell of most changes",
    ),
    (
        "locks of files in volumes (flock(2), fcntl(2)): not refused, but a process that waits for a lock of the host \
         or of another pod looks for it again after 1 to 64 ms, and no deadlock with those is found (EDEADLK). All \
         processes of a pod together can lock 8,192 ranges, for 1,024 pairs of a process and a file, and one lock can \
         change 16 others of its process: what is more fails with ENOLCK",
        "the guest's kernel asks the host for each lock, and a request cannot wait ([files](architecture.md#files))",
    ),
    (
        "shared mappings of a file in a volume by several pods, or by a pod and the host: not refused, but they are not the \
         same memory. So several pods cannot use a database that relies on it, such as SQLite with \
         `journal_mode=WAL` or LMDB. Those that rely on locks, such as SQLite without WAL, can be shared",
        "each kernel has pages of its own",
    ),
    (
        "one file of the host by two mounts that are kept apart: not refused, but shared mappings and inotify do not \
         reach from one to the other, and a process that locks it by both excludes itself. They are: a directory, and \
         a file or a `subPath` in it; a directory that one container of a pod mounts to read it before another mounts \
         it to write it (not `emptyDir`); two places of one container of docker or ctr; a directory that two \
         containers of a pod mount at the same moment",
        "these are several mounts of the share ([the share](architecture.md#the-share))",
    ),
    (
        "pages of files that are mapped privately, such as programs and libraries: not refused, but they are not in \
         `memory.current` and `memory.stat` of the container, and not limited by its `memory.max`",
        "they are charged to the cgroup above it, which has a limit of its own ([memory](architecture.md#memory))",
    ),
    (
        "a FIFO between a container and the host: not refused, but what one end writes does not come to the other",
        "each kernel has a pipe of its own; containers of a pod share theirs",
    ),
    (
        "syncfs(2) on files of the host: not refused, but it syncs all file systems of volumes, or of roots, that the pod \
         has used, waits for the slowest, and returns the error of any. sync(2) syncs these, not all of the host's",
        "the request does not say which file system is meant ([files](architecture.md#files))",
    ),
    (
        "name_to_handle_at(2), open_by_handle_at(2) and FIGETBSZ on files of a root: not refused; overlayfs on runc \
         refuses them. All files of an exclusive root have one `st_dev`; overlayfs has several if its layers are on \
         several file systems",
        "the guest sees one FUSE file system ([exclusive roots](architecture.md#files))",
    ),
    (
        "open_by_handle_at(2) of a file that nobody has used for some time, or by a handle from before a restart of the \
         pod (NFS servers in user space, such as NFS-Ganesha): ESTALE",
        "not built yet: a handle names a file only as long as the guest knows it",
    ),
    (
        "leases (F_SETLEASE of fcntl(2), `kernel oplocks` of Samba) of files in volumes, and in roots that are \
         directories of the host: EINVAL",
        "the host and other pods could open the file without breaking the lease",
    ),
    (
        "`chattr` on files of the host: refused (EPERM), also for a privileged container, are immutable, append-only and \
         journalled files (`i`, `a`, `j`), another project (`p`), and whether new files get that of their directory \
         (`P`). Refused (EOPNOTSUPP) are DAX, directories that ignore case (`F`) and the sizes of the extents of XFS. \
         How a file is stored (`e`) stays",
        "the VMM has no CAP_LINUX_IMMUTABLE and no CAP_SYS_RESOURCE; a file that leaves its project leaves its quota; the \
         server relies on the rest ([files](architecture.md#files))",
    ),
    (
        "the time of the last change (ctime) after `chattr` on files of the host: not refused, but the guest may show the \
         one from before until it asks again",
        "a client of FUSE in Linux keeps its attributes when it sends these ioctls",
    ),
    (
        "FS_IOC_FIEMAP (`filefrag`) and reads with RWF_NOWAIT (EOPNOTSUPP) on files of the host",
        "a client of FUSE in Linux does not send them",
    ),
    (
        "access times of files of the host: not refused, but a read that the guest answers from its caches does not \
         update them. The first read of a file that was just written to an exclusive root is such a read. Following a \
         symbolic link may update its access time",
        "the host's kernel moves them when the file server reads ([files](architecture.md#files))",
    ),
    (
        "epoll_ctl(2) of a regular file of the host: not refused, and the file is always ready; runc refuses it (EPERM)",
        "a client of FUSE in Linux can poll files",
    ),
    (
        "set-group-ID without permission for the group to execute: not refused, but a write or a chown(2) by a user who is \
         no member of the group does not clear it. A write by root to a file with set-user-ID and capabilities clears both",
        "the request does not say enough (FUSE_HANDLE_KILLPRIV_V2)",
    ),
    (
        "a page that a shared mapping has changed: not refused, but when it is written, the `security.capability` of the \
         file goes",
        "the server writes the page by pwritev(2)",
    ),
    (
        "the inode number of a file in its directory (readdir(3)): not refused, but if the layers of a root that docker or \
         the user has mounted are on several file systems, it may be another one than that of stat(2)",
        "the host's directory does not say on which file system a file is",
    ),
    (
        "extended attributes `security.*` of a container's files: those other than `security.capability` are refused \
         (EPERM), also for a privileged container",
        "the VMM has no CAP_SYS_ADMIN, which the host's kernel asks for",
    ),
    (
        "fallocate(2) with FALLOC_FL_COLLAPSE_RANGE or FALLOC_FL_INSERT_RANGE (EOPNOTSUPP) on files of the host",
        "a client of FUSE in Linux does not send them",
    ),
    (
        "O_DIRECT on files of the host: not refused, but the host's page cache is used",
        "a request need not be aligned as the file system of the host asks for",
    ),
    (
        "rules of iptables or nftables that a program of the host puts into the network namespace of a pod, such as \
         istio-cni or a chained CNI plugin: not refused, but they do not apply to the containers (those of `ip rule` do)",
        "the packets go from the interface to the VM (tc); rules that a container sets in the guest apply",
    ),
    (
        "sockets that a program of the host has in the network namespace of a pod, such as ztunnel of Istio's ambient \
         mode: not refused, but they receive nothing from outside but answers of DHCP servers (by packet sockets), \
         and what docker's name server has asked for",
        "the packets go from the interface to the VM (tc)",
    ),
    (
        "addresses that a container adds itself to an ipvlan, and another address on the Ethernet that it gives to a \
         macvlan: not refused, but nothing arrives for them",
        "the host's kernel knows what its own interface has, and passes on no other packets",
    ),
    (
        "a CPU limit is also the number of processors that a container sees, rounded up: not refused",
        "the VM gets the vCPUs that it can use ([processors](architecture.md#processors))",
    ),
    (
        "more than 32 processors for a pod: not refused, but a container without a limit, with a higher limit or with a \
         larger cpuset sees and uses 32, or `max_vcpus`",
        "a VM has at most 32 vCPUs",
    ),
    (
        "processors of a cpuset with numbers from 32 on, or from `max_vcpus` on: not refused, but shown with other numbers",
        "the numbers in a guest begin at 0",
    ),
    (
        "parameters of the host's kernel without a namespace (`/proc/sys`): not refused, but a container sees those of \
         its guest. It has the host's `vm.max_map_count`, `fs.file-max`, `fs.nr_open`, `fs.aio-max-nr` (no more \
         than its memory allows), `fs.pipe-max-size`, `fs.inotify.max_user_instances`, `fs.protected_*`, \
         `net.core.rmem_max` and `net.core.wmem_max` as they were when the pod started",
        "the guest has a kernel of its own ([limits that go by the memory](architecture.md#limits-that-go-by-the-memory))",
    ),
    (
        "core dumps: not refused, but the soft limit (`ulimit -c`) is 0, whatever the engine's is, and a core is written to \
         the working directory, whatever `kernel.core_pattern` of the host says",
        "the guest has no program that takes cores",
    ),
    (
        "priorities against processes of other pods (`nice`, real-time policies, `memory.reservation`): not refused, but \
         they hold within the pod; `ioPriority` has no effect",
        "on the host a pod is one VM, which has the CPU shares of its containers",
    ),
    (
        "the pid of which `prestart`, `createRuntime` and `poststart` hooks are told: not refused, but of its namespaces \
         only the network namespace is the pod's",
        "it is a process of the host that stands for the container ([pods](architecture.md#pods))",
    ),
    ("NUMA nodes of a cpuset: not refused, but the container sees node 0", "a guest has one NUMA node"),
    (
        "the files of one root directory that several containers use at the same time, which no engine does: not \
         refused, but one sees a new name of another after 10 s, and what only stat(2) shows after 60 s",
        "a guest caches its containers' roots for so long; volumes are cached for 1 s ([files](architecture.md#files))",
    ),
    (
        "extended attributes `trusted.*` of a container's files: not refused, but not those of the host, which stay \
         hidden; a process without CAP_SYS_ADMIN can list their names; symbolic links and device nodes have none; a \
         name has at most 241 bytes",
        "the VMM has no CAP_SYS_ADMIN, and keeps them as `user.bulkhead.trusted.*` ([files](architecture.md#files))",
    ),
    (
        "`/proc/meminfo`, `free` and `sysinfo(2)` show the size that the pod's VM has now, not the host's memory: not \
         refused",
        "they are of the guest's kernel; a VM without a memory limit grows when its containers need more \
         ([containers without a memory limit](resources.md#containers-without-a-memory-limit))",
    ),
    (
        "`vm.overcommit_memory` is 1, not 0: not refused, but a mapping may be larger than all memory",
        "0 would refuse what a host with more memory than the guest has allows",
    ),
    (
        "`docker top`, `nerdctl top` and `ctr task ps`: not refused, but show one process of the host that stands for the \
         container, such as the VMM. `ctr` shows it once for each process of the container. An exec of `ps` in the \
         container shows those",
        "the processes are the guest's, and their numbers are those of other processes on the host",
    ),
    (
        "the host's /sys/fs/cgroup mounted at the same place: not refused, but the container sees the cgroups of its VM",
        "its processes are in those; systemd does not start with others",
    ),
    (
        "an `emptyDir` volume with the medium `Memory` when kubelet makes a new sandbox for the pod, for example after the \
         VM has crashed: not kept, so it is empty",
        "its files were in the memory of the VM",
    ),
    (
        "a container that has more than about 100,000 files open, mapped or watched at once, in roots or in volumes: not \
         refused, but one of them can be forgotten if many others were looked up since. Reads fail with ESTALE, a page \
         that is not in memory with SIGBUS, and a watch by inotify is silent",
        "the file server keeps a limited number of files. The guest drops those that nobody uses \
         ([files](architecture.md#files))",
    ),
    (
        "an XDP program in native mode (`ip link set dev eth0 xdp ...`): EOPNOTSUPP. The generic mode works (`xdpgeneric`)",
        "the guest's driver attaches none while it has offloads on receive (VIRTIO_NET_F_GUEST_TSO4), and cannot turn them \
         off",
    ),
    (
        "the blocks of an ext4 volume that are reserved for root (5 % by default): not refused, but every user of a \
         container can fill them; on runc ENOSPC",
        "the file server writes as root of the host",
    ),
    (
        "programs that still run when the host shuts down, without kubelet's graceful node shutdown: they have 20 s \
         from SIGTERM on; on runc as long as systemd waits, mostly 90 s",
        "the guest may take another minute to write back its disks before systemd kills everything",
    ),
    (
        "a split lock (an atomic operation across two cache lines) on an Intel host with `split_lock_detect=fatal`: the \
         whole pod ends. On runc only the program gets SIGBUS",
        "the host's kernel kills the VMM for it",
    ),
    (
        "images of another architecture (`docker run --platform linux/arm64`) on a host that has registered an emulator \
         (`binfmt_misc`, such as qemu-user): not refused, but their programs do not start (ENOEXEC)",
        "not built yet: the guest's kernel has registrations of its own. A privileged container can add some for its pod",
    ),
    (
        "a program that execve(2) refuses (a missing interpreter, another architecture): the start fails and names the \
         error; on runc the container starts, writes it to its log and ends",
        "the agent waits until the program was executed",
    ),
    (
        "the limit of open files (RLIMIT_NOFILE) of a container whose spec names none, as those of docker: not refused, \
         but it is 1,048,576; on runc it is that of containerd",
        "the agent sets it in the guest",
    ),
    (
        "`docker run --ipc shareable`: not refused, but /dev/shm is a directory of the host. Each changed page is copied \
         there, and there is no SIGBUS beyond its size",
        "docker mounts it for other containers, which are refused to join it",
    ),
    (
        "bytes read and written (BLOCK I/O of `docker stats`, `io` of the statistics): not refused, but 0 for files of \
         roots and volumes; those of disks in the guest are counted",
        "the guest sees requests for files there, and not for blocks",
    ),
    (
        "`docker cp` out of a container that runs, and `docker export` of one: not refused, but what a shared mapping \
         (`mmap`) has changed may be missing for about 30 s. `docker commit` and `pause` write it first, for 3 s at \
         most",
        "it is in pages of the guest until then",
    ),
    (
        "names that docker's name server asks of other servers, if the host's kernel lacks `cls_flower` or `act_ct`: \
         not refused, but they do not resolve",
        "the answers would go to the guest instead of the host (docs/operations.md says what to do)",
    ),
];

/// The page: a column for each run, named by it. `commit` is what was tested. `by_name` are the sections about the
/// cases that a whole run leaves out.
pub(crate) fn page(
    columns: &[(String, &Run)],
    commit: &str,
    now: SystemTime,
    by_name: &str,
) -> Result<String> {
    let date = day(now);
    let mut page = format!(
        "# Conformance\n\nWritten by `cargo xtask test --write-conformance`, which ran the end-to-end tests in the rig on \
         {date}, of commit {commit}. It ran all but the [long cases](#long-cases).\n\n{}\n",
        of_sources()?
    );
    page.push_str(
        "## Runs\n\nOf the cases that passed on runc, those in the third column passed in an earlier run with the \
         same tests.\n\n| run | passed | of these, before | failed | host |\n|---|---|---|---|---|\n",
    );
    for (name, run) in columns {
        let Tally { passed, failed } = run.tally();
        let host = run.versions.lines().collect::<Vec<_>>().join(", ");
        let _ = writeln!(page, "| {name} | {passed} | {} | {failed} | {host} |", run.remembered.len());
    }
    page.push_str(
        "\n## Groups of cases\n\nEach cell says how many cases passed, of how many that ran. `cargo xtask test GROUP/` \
         runs those of a group. A dash: the group is not part of that run. Some cases are about what only Bulkhead \
         has; the shorter runs have the groups that tell versions of containerd apart.\n\n| group |",
    );
    columns.iter().for_each(|(name, _)| page.push_str(&format!(" {name} |")));
    page.push_str(&format!("\n|---|{}\n", "---|".repeat(columns.len())));
    let counts: Vec<_> = columns.iter().map(|(_, run)| groups(run)).collect();
    let names: BTreeSet<&str> = counts.iter().flat_map(|groups| groups.keys().copied()).collect();
    for name in names {
        let cell = |groups: &BTreeMap<&str, Tally>| groups.get(name).map_or(" - |".to_owned(), shown);
        let _ = writeln!(page, "| {name} |{}", counts.iter().map(cell).collect::<String>());
    }
    let _ = write!(page, "\n{by_name}");
    Ok(filled(&page))
}

/// The sections of the page about the cases that a whole run leaves out.
pub(crate) fn by_name(cases: &[Known], named: &Named) -> Result<String> {
    by_name::sections(cases, named)
}

/// The page with other sections about the cases that a whole run leaves out. They are its end.
pub(crate) fn with_by_name(page: &str, by_name: &str) -> Result<String> {
    let first = by_name.lines().next().context("there are no sections")?;
    let (before, _) =
        page.split_once(&format!("\n{first}\n")).with_context(|| format!("the page has no {first:?}"))?;
    Ok(format!("{before}\n{}", filled(by_name)))
}

/// The sections of the page that no run decides: what differs from runc, and what other pages say. An error if one of
/// these lacks its table.
pub(crate) fn of_sources() -> Result<String> {
    Ok(format!("{}\n{}", differences(), tables::sections(&source_dir().join("docs"))?))
}

/// The section of the page about them.
fn differences() -> String {
    let mut section = "\
        ## What differs from runc\n\nA request for one of these fails with an error that names it. Rows that say \
        \"not refused\" are exceptions: the request succeeds, but the effect differs. Where a row names an errno, a \
        program in the container gets that error. \
        [fields.md](fields.md) lists each field of the OCI spec and of the CRI, and each flag of `docker run`. \
        [processors.md](processors.md) has what containers see and use under limits of processors. \
        [memory-pressure.md](memory-pressure.md) has what becomes of a pod with overhead whose memory is short.\n\n\
        | what | why |\n|---|---|\n"
        .to_owned();
    for (what, why) in DIFFERENCES {
        let _ = writeln!(section, "| {what} | {why} |");
    }
    section
}

fn shown(Tally { passed, failed }: &Tally) -> String {
    let all = passed + failed;
    if *failed == 0 { format!(" {passed} of {all} |") } else { format!(" **{passed} of {all}** |") }
}

/// The run's cases, counted by their group.
fn groups(run: &Run) -> BTreeMap<&str, Tally> {
    let ran = run.outcomes.iter().map(|outcome| (outcome.case.as_str(), outcome.failure.is_none()));
    let remembered = run.remembered.iter().map(|case| (case.as_str(), true));
    let mut groups = BTreeMap::<&str, Tally>::new();
    for (case, has_passed) in ran.chain(remembered) {
        let group = groups.entry(case.split('/').next().unwrap_or(case)).or_default();
        *group += Tally { passed: u32::from(has_passed), failed: u32::from(!has_passed) };
    }
    groups
}

/// The commit of the source tree, and whether it has changed since.
pub(crate) fn commit() -> Result<String> {
    let git = |args: &[&str]| -> Result<String> {
        let mut git = Command::new("git");
        let output = git.current_dir(source_dir()).args(args).output().context("cannot run git")?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "git does not know the commit: {}", said.trim());
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let commit = git(&["rev-parse", "--short=10", "HEAD"])?;
    let changes = git(&["status", "--porcelain"])?;
    Ok(if changes.is_empty() { commit } else { format!("{commit} with changes") })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::fs;
    use std::time::UNIX_EPOCH;

    use super::*;
    use crate::outcomes::Outcome;

    #[test]
    fn the_sections_of_cases_run_by_name_are_replaced() {
        let page = "# Conformance\n\n## Long cases\n\nold\n\n## Groups\n\nold\n";
        let new = with_by_name(page, "## Long cases\n\nnew\n").unwrap();
        assert_eq!(new, "# Conformance\n\n## Long cases\n\nnew\n");
        assert!(with_by_name("# Conformance\n", "## Long cases\n").is_err());
    }

    fn passed(case: &str) -> Outcome {
        Outcome { case: case.to_owned(), seconds: 1.0, failure: None }
    }

    #[test]
    fn the_page_counts_by_group_and_sets_the_runs_side_by_side() {
        let runc = Run {
            outcomes: vec![passed("exec/one"), Outcome::failed("exec/two", "why")],
            remembered: vec!["exec/three".to_owned()],
            versions: "containerd 1.7\nrunc 1.1\n".to_owned(),
            ..Run::default()
        };
        let bulkhead = Run { outcomes: vec![passed("exec/one"), passed("jail/four")], ..Run::default() };
        let columns = [("bulkhead on 1.7".to_owned(), &bulkhead), ("runc on 1.7".to_owned(), &runc)];
        let page = page(&columns, "0123456789", UNIX_EPOCH, "## Long cases\n").unwrap();
        for part in [
            "1970-01-01, of",
            "0123456789. It ran all but the [long cases]",
            "| runc on 1.7 | 2 | 1 | 1 | containerd 1.7, runc 1.1 |",
            "| group | bulkhead on 1.7 | runc on 1.7 |\n|---|---|---|",
            "| exec | 1 of 1 | **2 of 3** |",
            "| jail | 1 of 1 | - |\n\n## Long cases\n",
            // What other pages say.
            "\n## Fields\n",
            "\n| The CRI | ",
            "\n## Processors under a limit\n",
            "\n| limit | nproc, runc | nproc, Bulkhead | ",
        ] {
            assert!(page.contains(part), "no {part:?} in {page}");
        }
    }

    /// The page with the sections of this source tree in the place of its own.
    fn with_differences(page: &str) -> Option<String> {
        let (before, rest) = page.split_once("## What differs from runc\n")?;
        let (_, after) = rest.split_once("\n## Runs\n")?;
        Some(filled(&format!("{before}{}\n## Runs\n{after}", of_sources().unwrap())))
    }

    #[test]
    fn the_page_lists_the_differences_of_this_source() {
        let path = source_dir().join("docs/conformance.md");
        let page = fs::read_to_string(&path).unwrap();
        let renewed = with_differences(&page).unwrap();
        if std::env::var_os("WRITE_DIFFERENCES").is_some() {
            fs::write(&path, renewed).unwrap();
            return;
        }
        assert!(
            page == renewed,
            "docs/conformance.md has another list than tests/xtask/src/conformance.rs, other tables than the pages that \
             it shows, or lines that are too long: run `WRITE_DIFFERENCES=1 cargo test -p xtask differences`"
        );
    }
}
