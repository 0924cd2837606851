//! The fields of the OCI runtime spec. A row about an object that is refused stands for all fields in it,
//! and each of them has a row on the page.

use super::{Row, different, honoured, refused};

const NOT_BUILT: &str = "agent:what_is_not_built_is_refused_by_name";
const HOOKS: &str = "hooks/each_is_told_the_containers_state";
const HOOK_ARGUMENTS: &str = "hooks/arguments_and_environment_are_the_specs";
const HOOK_TIMEOUT: &str = "hooks/one_that_does_not_end_is_killed";
const HOOKS_INSIDE: &str = "hooks/those_inside_the_container_are_not_built_yet";
const NODE: &str = "devices/a_node_has_the_specs_owner_and_mode";
const BLOCK_DEVICE: &str = "devices/a_block_device_is_the_hosts";
const NO_DEVICE: &str = "devices/a_device_that_the_guest_lacks_is_refused_by_name";
const SCHEDULER: &str = "agent:the_attributes_of_the_scheduler_are_the_specs";
/// A hook may look at the process that it is told of.
const HOOK_PID: &str =
    "of the namespaces of the pid that it is told of, only the network namespace is the pod's";
const IN_THE_GUEST: &str =
    "it orders the processes of the pod among themselves, and not among those of the host";
const NO_IO_ORDER: &str = "ioprio_get(2) shows it, but it has no effect: the guest has no I/O scheduler";
const PROGRAM_PAGES: &str = "pages of files that are mapped privately, such as programs, do not count";
const AMONG_CONTAINERS: &str = "it protects the memory from other containers of the pod only";
const MOST_PROCESSORS: &str =
    "it is also the number of processors that a container sees, rounded up; a VM has 32 at most";
const CAPABILITIES: &str = "agent:effective_and_permitted_capabilities_hold_until_the_program_is_executed";
const FOREIGN_RULES: &str = "shim:a_rule_about_devices_that_the_container_cannot_have_is_refused";
const NO_SUCH_DEVICE: &str = "a rule that allows devices of which the container can have none is refused; of a block \
                              device of the host, the guest has other numbers; a privileged container may use those \
                              alone of the host's disks that it has a node of";
const DEVICE_RULES: &str = "agent:the_last_match_decides_and_access_counts";
const SECCOMP_RULES: &str = "seccomp/a_rule_holds_for_certain_arguments_only";
const V1_ONLY: &str = "agent:what_cgroup_v2_lacks_is_refused";
const OF_V1: &str = "cgroup v1 has it, and the guest has cgroup v2";
const BLOCK_IO: &str = "block_io/limits_are_those_of_the_cgroup_on_the_host";
const DEVICE_WEIGHTS: &str = "shim:limits_on_block_devices_are_lines_of_either_version";
const NO_LEAVES: &str = "shim:wrong_limits_on_block_devices_are_named";
const CFQ: &str = "it is of the I/O scheduler CFQ, which Linux no longer has; runc ignores it on cgroup v2";
const BLOCK_LIMITS: &str = "the limit is that of the VMM's cgroup on the host, which the container does not see; in a \
                            Kubernetes pod it is refused";
const BLOCK_WEIGHTS: &str = "the weight is that of the VMM's cgroup on the host, which the container does not see; \
                             in a Kubernetes pod it is refused, and so it is for a disk that has no weights, where \
                             runc ignores it";
const MOUNT_IDS: &str = "nested/the_ids_of_a_volume_are_mapped";
const USER_NAMESPACE: &str = "nested/the_root_of_a_user_namespace_is_another_user_outside";

const LOGGED: &str = "kernel/a_system_call_that_is_to_be_logged_is_in_the_kernels_log";

/// What differs about the actions of system call filters.
const SECCOMP_ACTIONS: &str = "`SCMP_ACT_NOTIFY` is refused: its listener is a process of the host; `SCMP_ACT_LOG` \
                               logs the call in the log of the guest's kernel, and not in the host's audit log";

pub(super) const FIELDS: &[Row] = &[
    honoured("ociVersion", "agent:versions"),
    honoured("root.path", "mounts/a_directory_serves_as_the_root"),
    honoured("root.readonly", "mounts/a_read_only_root_cannot_be_written"),
    honoured("mounts[].destination", "mounts/the_mounts_are_the_specs"),
    honoured("mounts[].type", "mounts/a_tmpfs_has_its_size"),
    different(
        "mounts[].source",
        "pod_memory/a_volume_in_memory_is_charged_to_the_container_that_fills_it",
        "instead of a tmpfs that kubelet has made for an `emptyDir` volume, of a volume that kubelet keeps up to date \
         (ConfigMap), of a socket, of the node of a block device, or of the host's /dev, the guest has one of its own; \
         the node of a character device that the guest's kernel lacks, and a directory of the host's /dev are refused",
    ),
    different(
        "mounts[].options",
        "agent:mount_options",
        "refused: `shared` and `rshared` of a bind mount, `remount`, `tmpcopyup`, `idmap` without ids, a hugetlbfs of \
         which neither `size` nor a limit says how many pages it needs, and what says nothing of a bind mount \
         (`sync`), which runc ignores",
    ),
    honoured("mounts[].uidMappings[].containerID", MOUNT_IDS),
    honoured("mounts[].uidMappings[].hostID", MOUNT_IDS),
    honoured("mounts[].uidMappings[].size", MOUNT_IDS),
    honoured("mounts[].gidMappings[].containerID", MOUNT_IDS),
    honoured("mounts[].gidMappings[].hostID", MOUNT_IDS),
    honoured("mounts[].gidMappings[].size", MOUNT_IDS),
    honoured("process.terminal", "terminal/the_standard_streams_are_the_terminal"),
    honoured("process.consoleSize.height", "terminal/its_first_size_is_the_specs"),
    honoured("process.consoleSize.width", "terminal/its_first_size_is_the_specs"),
    honoured("process.user.uid", "isolation/a_user_is_who_the_spec_says"),
    honoured("process.user.gid", "isolation/a_user_is_who_the_spec_says"),
    honoured("process.user.umask", "isolation/the_file_mode_mask_is_the_specs"),
    honoured("process.user.additionalGids", "isolation/additional_groups_are_the_specs"),
    refused("process.user.username", NOT_BUILT, "Windows has it"),
    honoured("process.args", "lifecycle/the_exit_status_is_the_commands"),
    refused("process.commandLine", NOT_BUILT, "Windows has it"),
    honoured("process.env", "isolation/the_environment_is_the_specs"),
    honoured("process.cwd", "isolation/a_missing_working_directory_is_made"),
    honoured("process.capabilities.bounding", "isolation/capabilities_are_added_and_dropped"),
    honoured("process.capabilities.effective", CAPABILITIES),
    honoured("process.capabilities.inheritable", "isolation/each_set_of_capabilities_is_the_specs"),
    honoured("process.capabilities.permitted", CAPABILITIES),
    honoured("process.capabilities.ambient", "isolation/each_set_of_capabilities_is_the_specs"),
    honoured("process.rlimits[].type", "limits/resource_limits_are_the_specs"),
    honoured("process.rlimits[].hard", "limits/resource_limits_are_the_specs"),
    honoured("process.rlimits[].soft", "limits/resource_limits_are_the_specs"),
    honoured("process.noNewPrivileges", "isolation/a_process_cannot_gain_privileges"),
    different(
        "process.apparmorProfile",
        "apparmor/a_profile_of_the_users_own_is_applied",
        "stacks, and profiles of namespaces, are refused; a transition to a profile of another file finds none",
    ),
    honoured("process.oomScoreAdj", "limits/the_out_of_memory_score_is_the_specs"),
    refused("process.selinuxLabel", NOT_BUILT, "the guest's kernel has no SELinux"),
    different("process.ioPriority.class", "isolation/the_priority_of_io_is_the_specs", NO_IO_ORDER),
    different("process.ioPriority.priority", "isolation/the_priority_of_io_is_the_specs", NO_IO_ORDER),
    different("process.scheduler.policy", "isolation/the_scheduler_is_the_specs", IN_THE_GUEST),
    different("process.scheduler.nice", "isolation/the_scheduler_is_the_specs", IN_THE_GUEST),
    different("process.scheduler.priority", SCHEDULER, IN_THE_GUEST),
    different("process.scheduler.flags", SCHEDULER, IN_THE_GUEST),
    different("process.scheduler.runtime", SCHEDULER, IN_THE_GUEST),
    different("process.scheduler.deadline", SCHEDULER, IN_THE_GUEST),
    different("process.scheduler.period", SCHEDULER, IN_THE_GUEST),
    refused(
        "process.execCPUAffinity",
        NOT_BUILT,
        "its numbers are those of the host's processors; a container and an exec with it are refused",
    ),
    honoured("hostname", "isolation/the_host_name_is_the_specs"),
    honoured("domainname", "isolation/the_domain_name_is_the_specs"),
    different("hooks.prestart[].path", HOOKS, HOOK_PID),
    honoured("hooks.prestart[].args", HOOKS),
    honoured("hooks.prestart[].env", HOOKS),
    honoured("hooks.prestart[].timeout", HOOK_TIMEOUT),
    different("hooks.createRuntime[].path", HOOKS, HOOK_PID),
    honoured("hooks.createRuntime[].args", HOOK_ARGUMENTS),
    honoured("hooks.createRuntime[].env", HOOK_ARGUMENTS),
    honoured("hooks.createRuntime[].timeout", HOOK_TIMEOUT),
    refused("hooks.createContainer", HOOKS_INSIDE, "its programs are the host's, its namespaces the guest's"),
    refused("hooks.startContainer", HOOKS_INSIDE, "its programs are the host's, its namespaces the guest's"),
    different("hooks.poststart[].path", HOOKS, HOOK_PID),
    honoured("hooks.poststart[].args", HOOKS),
    honoured("hooks.poststart[].env", HOOKS),
    honoured("hooks.poststart[].timeout", "shim:a_hook_that_does_not_end_is_killed"),
    honoured("hooks.poststop[].path", HOOKS),
    honoured("hooks.poststop[].args", HOOKS),
    honoured("hooks.poststop[].env", HOOKS),
    honoured("hooks.poststop[].timeout", "shim:a_hook_that_does_not_end_is_killed"),
    different(
        "annotations",
        "shim:annotations_that_ask_runc_for_something_are_refused_by_name",
        "hooks read them, and those of containerd's CRI plugin say what a container is in its pod; \
         `bulkhead.dev/KEY` sets a value of the configuration that allows it; \
         `org.systemd.property.*` and `org.opencontainers.runc.*` are refused",
    ),
    refused("linux.netDevices", NOT_BUILT, "a network card of the host cannot be moved into the guest"),
    honoured("linux.uidMappings[].containerID", USER_NAMESPACE),
    honoured("linux.uidMappings[].hostID", USER_NAMESPACE),
    honoured("linux.uidMappings[].size", USER_NAMESPACE),
    honoured("linux.gidMappings[].containerID", USER_NAMESPACE),
    honoured("linux.gidMappings[].hostID", USER_NAMESPACE),
    honoured("linux.gidMappings[].size", USER_NAMESPACE),
    honoured("linux.sysctl", "pod_settings/sysctls_of_the_pod_are_its_containers"),
    honoured("linux.resources.devices[].allow", DEVICE_RULES),
    honoured("linux.resources.devices[].type", DEVICE_RULES),
    different("linux.resources.devices[].major", FOREIGN_RULES, NO_SUCH_DEVICE),
    different("linux.resources.devices[].minor", FOREIGN_RULES, NO_SUCH_DEVICE),
    honoured("linux.resources.devices[].access", DEVICE_RULES),
    different(
        "linux.resources.memory.limit",
        "limits/a_process_beyond_the_memory_limit_is_killed",
        PROGRAM_PAGES,
    ),
    different(
        "linux.resources.memory.reservation",
        "update/limits_change_in_a_running_container",
        AMONG_CONTAINERS,
    ),
    different(
        "linux.resources.memory.swap",
        "docker/limits_are_those_of_the_cgroup",
        "the guest has no swap: what may be swapped on runc stays in memory",
    ),
    refused("linux.resources.memory.kernel", V1_ONLY, OF_V1),
    refused("linux.resources.memory.kernelTCP", V1_ONLY, OF_V1),
    refused("linux.resources.memory.swappiness", V1_ONLY, OF_V1),
    refused("linux.resources.memory.disableOOMKiller", V1_ONLY, OF_V1),
    different(
        "linux.resources.memory.useHierarchy",
        V1_ONLY,
        "cgroup v2 always accounts for what is below; `false` is refused",
    ),
    honoured(
        "linux.resources.memory.checkBeforeUpdate",
        "update/a_limit_below_the_usage_is_refused_if_that_is_asked_for",
    ),
    honoured("linux.resources.cpu.shares", "update/limits_change_in_a_running_container"),
    different(
        "linux.resources.cpu.quota",
        "cpus/processors_come_and_go_with_the_limit_of_a_container",
        MOST_PROCESSORS,
    ),
    honoured("linux.resources.cpu.idle", "cpus/burst_idle_and_weight_change_in_any_order"),
    honoured("linux.resources.cpu.burst", "cpus/burst_idle_and_weight_change_in_any_order"),
    different(
        "linux.resources.cpu.period",
        "limits/a_cpu_quota_is_visible",
        "the quota, in periods, is also the number of processors that a container sees, rounded up",
    ),
    refused("linux.resources.cpu.realtimeRuntime", V1_ONLY, OF_V1),
    refused("linux.resources.cpu.realtimePeriod", V1_ONLY, OF_V1),
    different(
        "linux.resources.cpu.cpus",
        "cpus/a_set_of_processors_is_shown_by_its_numbers",
        "processors with numbers from 32 on, or from `max_vcpus` on, are shown with other numbers",
    ),
    different(
        "linux.resources.cpu.mems",
        "cpus/a_set_of_processors_is_shown_by_its_numbers",
        "the VM's memory comes from these nodes of the host; the container sees node 0",
    ),
    honoured("linux.resources.pids.limit", "limits/a_limit_of_processes_is_enforced"),
    different("linux.resources.blockIO.weight", BLOCK_IO, BLOCK_LIMITS),
    refused("linux.resources.blockIO.leafWeight", NO_LEAVES, CFQ),
    different("linux.resources.blockIO.weightDevice[].major", DEVICE_WEIGHTS, BLOCK_WEIGHTS),
    different("linux.resources.blockIO.weightDevice[].minor", DEVICE_WEIGHTS, BLOCK_WEIGHTS),
    different("linux.resources.blockIO.weightDevice[].weight", DEVICE_WEIGHTS, BLOCK_WEIGHTS),
    refused("linux.resources.blockIO.weightDevice[].leafWeight", NO_LEAVES, CFQ),
    different("linux.resources.blockIO.throttleReadBpsDevice[].major", BLOCK_IO, BLOCK_LIMITS),
    different("linux.resources.blockIO.throttleReadBpsDevice[].minor", BLOCK_IO, BLOCK_LIMITS),
    different("linux.resources.blockIO.throttleReadBpsDevice[].rate", BLOCK_IO, BLOCK_LIMITS),
    different("linux.resources.blockIO.throttleWriteBpsDevice[].major", BLOCK_IO, BLOCK_LIMITS),
    different("linux.resources.blockIO.throttleWriteBpsDevice[].minor", BLOCK_IO, BLOCK_LIMITS),
    different("linux.resources.blockIO.throttleWriteBpsDevice[].rate", BLOCK_IO, BLOCK_LIMITS),
    different("linux.resources.blockIO.throttleReadIOPSDevice[].major", BLOCK_IO, BLOCK_LIMITS),
    different("linux.resources.blockIO.throttleReadIOPSDevice[].minor", BLOCK_IO, BLOCK_LIMITS),
    different("linux.resources.blockIO.throttleReadIOPSDevice[].rate", BLOCK_IO, BLOCK_LIMITS),
    different("linux.resources.blockIO.throttleWriteIOPSDevice[].major", BLOCK_IO, BLOCK_LIMITS),
    different("linux.resources.blockIO.throttleWriteIOPSDevice[].minor", BLOCK_IO, BLOCK_LIMITS),
    different("linux.resources.blockIO.throttleWriteIOPSDevice[].rate", BLOCK_IO, BLOCK_LIMITS),
    honoured("linux.resources.hugepageLimits[].pageSize", "limits/a_limit_of_huge_pages_is_visible"),
    different(
        "linux.resources.hugepageLimits[].limit",
        "limits/a_container_has_huge_pages_up_to_its_limit",
        "the pages are the guest's, not of the host's pool; they count for `memory.max` of the pod's cgroup; more than 0 \
         of another size than 2 MiB is refused",
    ),
    refused("linux.resources.network", V1_ONLY, OF_V1),
    refused("linux.resources.rdma", V1_ONLY, "the guest has no RDMA devices"),
    different(
        "linux.resources.unified",
        "update/limits_change_in_a_running_container",
        "`io.max`, `io.weight`, `io.bfq.weight` and `io.latency` are those of the VMM's cgroup on the host. Refused: \
         these in a Kubernetes pod, other files of the io controller, and those with a field of their own \
         (`memory.max`, `cpu.max`, `cpu.max.burst`, `cpu.weight`, `cpu.weight.nice`, `cpu.idle`, `cpuset.cpus`, \
         `cpuset.mems`), by which the host is limited and the VM gets its size. Limits of swap \
         (`memory.swap.max`) hold, as the guest has none: what may be swapped on runc stays in memory",
    ),
    honoured("linux.cgroupsPath", "limits/a_cgroup_of_the_systemd_driver_is_a_scope_in_its_slice"),
    different(
        "linux.namespaces[].type",
        "agent:namespaces",
        "a spec is refused that lacks one of them other than `cgroup`, `user` and `time`, and would use the host's",
    ),
    different(
        "linux.namespaces[].path",
        "shim:what_is_no_namespace_of_the_pod_is_refused",
        "a network namespace of the host, or namespaces of the same pod; others are refused, since a microVM shares \
         none with its host",
    ),
    honoured("linux.devices[].path", NODE),
    different(
        "linux.devices[].type",
        NO_DEVICE,
        "character devices that the guest's kernel lacks are refused",
    ),
    different(
        "linux.devices[].major",
        BLOCK_DEVICE,
        "a block device of the host has other numbers in the guest",
    ),
    different(
        "linux.devices[].minor",
        BLOCK_DEVICE,
        "a block device of the host has other numbers in the guest",
    ),
    honoured("linux.devices[].fileMode", NODE),
    honoured("linux.devices[].uid", NODE),
    honoured("linux.devices[].gid", NODE),
    different("linux.seccomp.defaultAction", LOGGED, SECCOMP_ACTIONS),
    honoured("linux.seccomp.defaultErrnoRet", "agent:the_filter_says_what_the_profile_says"),
    honoured("linux.seccomp.architectures", "agent:each_architecture_has_its_own_numbers"),
    different(
        "linux.seccomp.flags",
        "agent:system_call_filters",
        "`SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV` is refused: it is about the listener; `SECCOMP_FILTER_FLAG_LOG` logs \
         in the log of the guest's kernel",
    ),
    refused(
        "linux.seccomp.listenerPath",
        "bad_input/a_listener_for_system_calls_is_not_built_yet",
        "the listener is a process of the host",
    ),
    refused(
        "linux.seccomp.listenerMetadata",
        "agent:what_is_for_a_listener_is_refused_by_name",
        "it is for the listener",
    ),
    honoured("linux.seccomp.syscalls[].names", "seccomp/a_rule_has_an_error_of_its_own"),
    different(
        "linux.seccomp.syscalls[].action",
        "agent:the_filter_says_what_the_profile_says",
        "as `defaultAction`; of several rules with conditions that match a call, the first in the profile decides, \
         while libseccomp has an order of its own",
    ),
    honoured("linux.seccomp.syscalls[].errnoRet", "seccomp/a_rule_has_an_error_of_its_own"),
    honoured("linux.seccomp.syscalls[].args[].index", SECCOMP_RULES),
    honoured("linux.seccomp.syscalls[].args[].value", SECCOMP_RULES),
    honoured("linux.seccomp.syscalls[].args[].valueTwo", "agent:system_call_filters"),
    honoured("linux.seccomp.syscalls[].args[].op", "agent:system_call_filters"),
    honoured("linux.rootfsPropagation", "mounts/the_propagation_of_the_root_is_the_specs"),
    honoured("linux.maskedPaths", "mounts/secrets_of_the_kernel_are_masked"),
    honoured("linux.readonlyPaths", "mounts/knobs_of_the_kernel_are_read_only"),
    refused("linux.mountLabel", NOT_BUILT, "the guest's kernel has no SELinux"),
    refused("linux.intelRdt", NOT_BUILT, "the guest has no resctrl file system"),
    refused("linux.memoryPolicy", NOT_BUILT, "the guest has one NUMA node"),
    honoured("linux.personality.domain", "isolation/a_32_bit_personality_shows_a_32_bit_machine"),
    refused("linux.personality.flags", NOT_BUILT, "runtime-spec defines no flag"),
    honoured("linux.timeOffsets.*.secs", "nested/the_clocks_of_a_time_namespace_are_the_specs"),
    honoured("linux.timeOffsets.*.nanosecs", "agent:clocks_of_a_time_namespace_differ_for_all_processes"),
    refused("solaris", NOT_BUILT, "another operating system"),
    refused("windows", NOT_BUILT, "another operating system"),
    refused("vm", NOT_BUILT, "the VM is configured in the runtime's configuration"),
    refused("zos", NOT_BUILT, "another operating system"),
];
