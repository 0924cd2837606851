//! The flags of `docker run`.

use super::{Row, client, different, honoured, refused};

const OWN: &str = "docker_flags/names_labels_and_files_are_dockers_own";
const HEALTH: &str = "docker_flags/health_is_asked_by_added_processes";
const STREAMS: &str = "docker_flags/streams_are_attached_and_left_as_asked";
const ADDRESSES: &str = "docker_flags/addresses_and_ports_are_the_flags";
const RESOLVER: &str = "docker_flags/names_and_name_servers_are_the_flags";
const RESTARTS: &str = "docker_flags/restarts_logs_and_stops_are_as_asked";
const PROGRAM: &str = "docker_flags/the_program_and_its_variables_are_the_flags";
const PROCESS: &str = "docker/environment_directory_and_user_are_the_flags";
const KERNEL: &str = "docker_flags/parameters_and_devices_are_the_flags";
const LIMITS: &str = "docker/limits_are_those_of_the_cgroup";
const MORE_LIMITS: &str = "docker_flags/shares_sets_and_scores_are_the_flags";
const FILES: &str = "docker/volumes_are_shared_with_the_host_and_kept";
const MORE_FILES: &str = "docker_flags/every_kind_of_mount_is_there";
const REFUSED: &str = "docker_flags/what_is_the_hosts_is_refused_by_name";
const BY_DOCKER: &str = "docker_flags/some_are_refused_or_left_out_by_docker";
const V1_ONLY: &str = "agent:what_cgroup_v2_lacks_is_refused";
const BLOCK_IO: &str = "block_io/limits_are_those_of_the_cgroup_on_the_host";
const BLOCK_LIMITS: &str =
    "the limit is that of the VMM's cgroup on the host, which the container does not see";
const BLOCK_RATES: &str = "the limit is that of the VMM's cgroup on the host, which the container does not see; some \
                           versions of docker's client do not pass it on (docs/resources.md)";
const PROCESSORS: &str =
    "the quota, in periods, is also the number of processors that the container sees, rounded up";
const MOUNTS: &str = "`shared` and `rshared`, the node of a character device that the guest's kernel lacks, and a \
                      directory of the host's /dev are refused; /dev itself is the guest's";

pub(crate) const FLAGS: &[Row] = &[
    honoured("--add-host", "docker/a_resolv_conf_of_the_users_own_is_used"),
    different(
        "--annotation",
        "docker_flags/annotations_of_the_cri_make_no_pod",
        "see `annotations` of the OCI spec",
    ),
    client("--attach", STREAMS),
    different("--blkio-weight", BLOCK_IO, BLOCK_LIMITS),
    different(
        "--blkio-weight-device",
        "shim:limits_on_block_devices_are_lines_of_either_version",
        "the weight is that of the VMM's cgroup on the host, which the container does not see; for a disk that has no \
         weights it is refused, where runc ignores it",
    ),
    honoured("--cap-add", KERNEL),
    honoured("--cap-drop", "docker/a_read_only_root_and_no_capabilities"),
    honoured("--cgroup-parent", "docker_flags/the_cgroup_on_the_host_is_the_flags"),
    different("--cgroupns", KERNEL, "with `host` the container sees the cgroups of its guest"),
    client("--cidfile", OWN),
    different("--cpu-period", MORE_LIMITS, PROCESSORS),
    different("--cpu-quota", MORE_LIMITS, PROCESSORS),
    refused("--cpu-rt-period", V1_ONLY, "cgroup v1 has it; docker refuses it on most hosts"),
    refused("--cpu-rt-runtime", V1_ONLY, "cgroup v1 has it; docker refuses it on most hosts"),
    honoured("--cpu-shares", MORE_LIMITS),
    different(
        "--cpus",
        LIMITS,
        "it is also the number of processors that the container sees, rounded up; a VM has 32 at most",
    ),
    different(
        "--cpuset-cpus",
        MORE_LIMITS,
        "processors with numbers from 32 on, or from `max_vcpus` on, are shown with other numbers",
    ),
    different(
        "--cpuset-mems",
        MORE_LIMITS,
        "the VM's memory comes from these nodes; the container sees node 0",
    ),
    client("--detach", "docker/a_detached_container_has_logs_a_status_and_a_state"),
    client("--detach-keys", STREAMS),
    different(
        "--device",
        "devices/a_block_device_is_the_hosts",
        "character devices that the guest's kernel lacks are refused; a block device has other numbers in the guest",
    ),
    different(
        "--device-cgroup-rule",
        KERNEL,
        "a rule about devices of which the container can have none is refused: block devices without a node \
         (`--device`), character devices that the guest's kernel lacks",
    ),
    different("--device-read-bps", BLOCK_IO, BLOCK_RATES),
    different("--device-read-iops", BLOCK_IO, BLOCK_RATES),
    different("--device-write-bps", BLOCK_IO, BLOCK_RATES),
    different("--device-write-iops", BLOCK_IO, BLOCK_RATES),
    client("--disable-content-trust", OWN),
    honoured("--dns", RESOLVER),
    honoured("--dns-option", RESOLVER),
    honoured("--dns-search", RESOLVER),
    honoured("--domainname", KERNEL),
    honoured("--entrypoint", PROGRAM),
    honoured("--env", PROCESS),
    honoured("--env-file", PROGRAM),
    client("--expose", OWN),
    client("--gpus", BY_DOCKER),
    honoured("--group-add", PROCESS),
    honoured("--health-cmd", HEALTH),
    client("--health-interval", HEALTH),
    client("--health-retries", HEALTH),
    client("--health-start-interval", HEALTH),
    client("--health-start-period", HEALTH),
    client("--health-timeout", HEALTH),
    client("--help", "docker_flags/every_flag_is_listed"),
    honoured("--hostname", "docker/the_bridge_network_has_the_host"),
    honoured("--init", "docker/an_init_is_pid_1"),
    honoured("--interactive", "docker/what_is_piped_in_arrives_whole"),
    honoured("--ip", ADDRESSES),
    honoured("--ip6", ADDRESSES),
    different("--ipc", REFUSED, "`host` and `container:` are refused: a microVM shares no namespace"),
    client("--isolation", BY_DOCKER),
    client("--kernel-memory", BY_DOCKER),
    client("--label", OWN),
    client("--label-file", OWN),
    honoured("--link", RESOLVER),
    honoured("--link-local-ip", ADDRESSES),
    client("--log-driver", RESTARTS),
    client("--log-opt", RESTARTS),
    honoured("--mac-address", ADDRESSES),
    different("--memory", LIMITS, "pages of files that are mapped privately, such as programs, do not count"),
    different("--memory-reservation", MORE_LIMITS, "it protects no memory: the pod has no other container"),
    different("--memory-swap", LIMITS, "the guest has no swap: what may be swapped on runc stays in memory"),
    client("--memory-swappiness", BY_DOCKER),
    different("--mount", MORE_FILES, MOUNTS),
    client("--name", OWN),
    different("--network", "docker/the_hosts_network_is_refused", "`host` and `container:` are refused"),
    honoured("--network-alias", "docker_names/services_find_each_other_by_name_and_alias"),
    client("--no-healthcheck", HEALTH),
    client("--oom-kill-disable", BY_DOCKER),
    honoured("--oom-score-adj", MORE_LIMITS),
    different("--pid", REFUSED, "`host` and `container:` are refused: a microVM shares no namespace"),
    honoured("--pids-limit", LIMITS),
    client("--platform", OWN),
    different(
        "--privileged",
        "devices/a_privileged_container_has_the_devices_of_the_guest",
        "it has the devices of the guest, and of those of the host the block devices that it is given by name \
         (`--device /dev/sdb:/dev/xvda`)",
    ),
    honoured("--publish", "docker/a_published_port_answers_on_the_host"),
    honoured("--publish-all", ADDRESSES),
    client("--pull", OWN),
    client("--quiet", OWN),
    honoured("--read-only", "docker/a_read_only_root_and_no_capabilities"),
    client("--restart", RESTARTS),
    client("--rm", "docker/nothing_is_left_of_a_container"),
    client("--runtime", "docker/the_name_in_contribs_daemon_json_works"),
    different(
        "--security-opt",
        "apparmor/docker_applies_the_profile_of_an_option",
        "SELinux labels are refused",
    ),
    honoured("--shm-size", LIMITS),
    client("--sig-proxy", STREAMS),
    client("--stop-signal", RESTARTS),
    client("--stop-timeout", RESTARTS),
    client("--storage-opt", BY_DOCKER),
    honoured("--sysctl", KERNEL),
    honoured("--tmpfs", MORE_FILES),
    honoured("--tty", "docker/a_terminal_is_typed_to"),
    honoured("--ulimit", LIMITS),
    honoured("--user", PROCESS),
    different(
        "--userns",
        BY_DOCKER,
        "`host` is its only value; with `userns-remap` of the daemon, which no test has, users are mapped as on runc (tried by hand)",
    ),
    different("--uts", REFUSED, "`host` is refused: a microVM shares no namespace"),
    different("--volume", FILES, MOUNTS),
    client("--volume-driver", MORE_FILES),
    honoured("--volumes-from", MORE_FILES),
    honoured("--workdir", PROCESS),
];
