//! The fields of the CRI's messages about a pod and its containers on Linux (k8s.io/cri-api, api.proto). A field that
//! is one of these messages itself is one row.

use super::{Row, client, different, honoured, refused};

/// The messages.
pub(crate) const MESSAGES: [&str; 4] = [
    "PodSandboxConfig",
    "LinuxSandboxSecurityContext",
    "LinuxContainerSecurityContext",
    "LinuxContainerResources",
];

const METADATA: &str = "pod_fields/a_pods_names_and_notes_are_kept";
const FILES: &str = "pod_files/the_pods_hosts_hostname_and_resolver_files_are_there";
const HOST_PORT: &str = "pod_network/a_port_of_the_host_is_the_pods";
const LIMITS: &str = "pod_settings/limits_are_the_containers_cgroups";
const PAGES: &str = "limits/a_limit_of_huge_pages_is_visible";
const MORE_LIMITS: &str = "pod_fields/sets_and_files_of_the_cgroup_are_the_limits";
const PAUSE: &str = "pod_fields/pause_is_what_the_pods_context_says";
const FILTER: &str = "pod_settings/the_default_system_call_filter_is_applied";
const OWN_FILTER: &str = "pod_fields/a_system_call_filter_of_the_users_own_is_applied";
const LABELS: &str = "agent:what_is_not_built_is_refused_by_name";
const SHARED: &str = "shim:a_namespace_of_the_host_is_refused_in_the_words_of_who_asks";
const USERS: &str = "nested/the_containers_of_a_pod_share_its_user_namespace";
const NO_SELINUX: &str = "the guest's kernel has no SELinux; containerd drops it on a host without SELinux";
const NO_USERS: &str = "refused with `sandboxer = \"shim\"`";
const NODE: &str = "`NODE` is refused: a microVM shares no namespace with its host";
const DEVICES_OF_GUEST: &str = "it has the devices of the guest, and of those of the host the block devices that it \
                                is given by name";
const NO_FILES: &str = "the sandbox container has no files and no program but pause, which is the agent's";
const BY_SHIM: &str = "with `sandboxer = \"shim\"`, pause is the user nobody, without a filter";
const APPARMOR: &str = "apparmor/a_container_of_a_pod_has_the_profile_that_it_names";

pub(crate) const FIELDS: &[Row] = &[
    client("PodSandboxConfig.metadata.name", METADATA),
    client("PodSandboxConfig.metadata.uid", METADATA),
    client("PodSandboxConfig.metadata.namespace", METADATA),
    client("PodSandboxConfig.metadata.attempt", METADATA),
    honoured("PodSandboxConfig.hostname", FILES),
    client("PodSandboxConfig.log_directory", "pod_streams/a_log_keeps_streams_and_order"),
    honoured("PodSandboxConfig.dns_config.servers", FILES),
    honoured("PodSandboxConfig.dns_config.searches", FILES),
    honoured("PodSandboxConfig.dns_config.options", FILES),
    client("PodSandboxConfig.port_mappings.protocol", HOST_PORT),
    client("PodSandboxConfig.port_mappings.container_port", HOST_PORT),
    client("PodSandboxConfig.port_mappings.host_port", HOST_PORT),
    client(
        "PodSandboxConfig.port_mappings.host_ip",
        "pod_fields/a_port_of_one_address_of_the_host_is_the_pods",
    ),
    client("PodSandboxConfig.labels", METADATA),
    client("PodSandboxConfig.annotations", METADATA),
    honoured(
        "PodSandboxConfig.linux.cgroup_parent",
        "pod_memory/a_container_beyond_its_limit_is_killed_alone",
    ),
    different("PodSandboxConfig.linux.security_context", PAUSE, "see `LinuxSandboxSecurityContext`"),
    honoured("PodSandboxConfig.linux.sysctls", "pod_settings/sysctls_of_the_pod_are_its_containers"),
    client("PodSandboxConfig.linux.overhead", PAUSE),
    honoured(
        "PodSandboxConfig.linux.resources",
        "shim:the_limit_of_the_pod_counts_until_a_container_gets_another_limit",
    ),
    client("PodSandboxConfig.windows", PAUSE),
    different("LinuxSandboxSecurityContext.namespace_options.network", SHARED, NODE),
    different("LinuxSandboxSecurityContext.namespace_options.pid", SHARED, NODE),
    different("LinuxSandboxSecurityContext.namespace_options.ipc", SHARED, NODE),
    client("LinuxSandboxSecurityContext.namespace_options.target_id", PAUSE),
    different("LinuxSandboxSecurityContext.namespace_options.userns_options.mode", USERS, NO_USERS),
    different("LinuxSandboxSecurityContext.namespace_options.userns_options.uids", USERS, NO_USERS),
    different("LinuxSandboxSecurityContext.namespace_options.userns_options.gids", USERS, NO_USERS),
    refused("LinuxSandboxSecurityContext.selinux_options.user", LABELS, NO_SELINUX),
    refused("LinuxSandboxSecurityContext.selinux_options.role", LABELS, NO_SELINUX),
    refused("LinuxSandboxSecurityContext.selinux_options.type", LABELS, NO_SELINUX),
    refused("LinuxSandboxSecurityContext.selinux_options.level", LABELS, NO_SELINUX),
    different("LinuxSandboxSecurityContext.run_as_user", PAUSE, BY_SHIM),
    different("LinuxSandboxSecurityContext.run_as_group", PAUSE, BY_SHIM),
    different("LinuxSandboxSecurityContext.readonly_rootfs", PAUSE, NO_FILES),
    client("LinuxSandboxSecurityContext.supplemental_groups", PAUSE),
    client("LinuxSandboxSecurityContext.supplemental_groups_policy", PAUSE),
    different(
        "LinuxSandboxSecurityContext.privileged",
        "pod_settings/a_privileged_container_has_all_capabilities",
        DEVICES_OF_GUEST,
    ),
    different("LinuxSandboxSecurityContext.seccomp.profile_type", PAUSE, BY_SHIM),
    different("LinuxSandboxSecurityContext.seccomp.localhost_ref", PAUSE, BY_SHIM),
    client("LinuxSandboxSecurityContext.apparmor.profile_type", APPARMOR),
    client("LinuxSandboxSecurityContext.apparmor.localhost_ref", APPARMOR),
    client("LinuxSandboxSecurityContext.seccomp_profile_path", PAUSE),
    honoured(
        "LinuxContainerSecurityContext.capabilities.add_capabilities",
        "pod_settings/capabilities_are_the_defaults_added_to_and_dropped",
    ),
    honoured(
        "LinuxContainerSecurityContext.capabilities.drop_capabilities",
        "pod_settings/capabilities_are_the_defaults_added_to_and_dropped",
    ),
    honoured(
        "LinuxContainerSecurityContext.capabilities.add_ambient_capabilities",
        "isolation/each_set_of_capabilities_is_the_specs",
    ),
    different(
        "LinuxContainerSecurityContext.privileged",
        "pod_settings/a_privileged_container_has_all_capabilities",
        DEVICES_OF_GUEST,
    ),
    different("LinuxContainerSecurityContext.namespace_options.network", SHARED, NODE),
    different(
        "LinuxContainerSecurityContext.namespace_options.pid",
        "pod_sharing/containers_that_share_processes_see_each_other",
        NODE,
    ),
    different("LinuxContainerSecurityContext.namespace_options.ipc", SHARED, NODE),
    honoured(
        "LinuxContainerSecurityContext.namespace_options.target_id",
        "pod_sharing/an_ephemeral_container_sees_the_processes_of_its_target",
    ),
    different("LinuxContainerSecurityContext.namespace_options.userns_options.mode", USERS, NO_USERS),
    different("LinuxContainerSecurityContext.namespace_options.userns_options.uids", USERS, NO_USERS),
    different("LinuxContainerSecurityContext.namespace_options.userns_options.gids", USERS, NO_USERS),
    refused("LinuxContainerSecurityContext.selinux_options.user", LABELS, NO_SELINUX),
    refused("LinuxContainerSecurityContext.selinux_options.role", LABELS, NO_SELINUX),
    refused("LinuxContainerSecurityContext.selinux_options.type", LABELS, NO_SELINUX),
    refused("LinuxContainerSecurityContext.selinux_options.level", LABELS, NO_SELINUX),
    honoured("LinuxContainerSecurityContext.run_as_user", "pod_settings/a_user_and_groups_are_set_by_number"),
    honoured(
        "LinuxContainerSecurityContext.run_as_group",
        "pod_settings/a_user_and_groups_are_set_by_number",
    ),
    honoured(
        "LinuxContainerSecurityContext.run_as_username",
        "pod_settings/a_user_is_found_by_name_in_the_image",
    ),
    honoured("LinuxContainerSecurityContext.readonly_rootfs", "pod_settings/a_root_can_be_read_only"),
    honoured(
        "LinuxContainerSecurityContext.supplemental_groups",
        "pod_settings/a_user_and_groups_are_set_by_number",
    ),
    client(
        "LinuxContainerSecurityContext.supplemental_groups_policy",
        "pod_fields/groups_of_the_image_are_left_out_if_asked_for",
    ),
    honoured("LinuxContainerSecurityContext.no_new_privs", "pod_settings/no_new_privileges_is_set"),
    honoured("LinuxContainerSecurityContext.masked_paths", "pod_settings/paths_are_masked_and_read_only"),
    honoured("LinuxContainerSecurityContext.readonly_paths", "pod_settings/paths_are_masked_and_read_only"),
    honoured("LinuxContainerSecurityContext.seccomp.profile_type", FILTER),
    honoured("LinuxContainerSecurityContext.seccomp.localhost_ref", OWN_FILTER),
    honoured("LinuxContainerSecurityContext.apparmor.profile_type", APPARMOR),
    honoured("LinuxContainerSecurityContext.apparmor.localhost_ref", APPARMOR),
    honoured("LinuxContainerSecurityContext.apparmor_profile", APPARMOR),
    client("LinuxContainerSecurityContext.seccomp_profile_path", OWN_FILTER),
    different(
        "LinuxContainerResources.cpu_period",
        LIMITS,
        "the quota, in periods, is also the number of processors that the containers see, rounded up",
    ),
    different(
        "LinuxContainerResources.cpu_quota",
        "cpus/processors_come_and_go_with_the_limits_of_a_pods_containers",
        "it is also the number of processors that the containers see, rounded up; a VM has 32 at most",
    ),
    honoured("LinuxContainerResources.cpu_shares", LIMITS),
    different(
        "LinuxContainerResources.memory_limit_in_bytes",
        LIMITS,
        "pages of files that are mapped privately, such as programs, do not count",
    ),
    honoured("LinuxContainerResources.oom_score_adj", LIMITS),
    different(
        "LinuxContainerResources.cpuset_cpus",
        MORE_LIMITS,
        "processors with numbers from 32 on, or from `max_vcpus` on, are shown with other numbers",
    ),
    different(
        "LinuxContainerResources.cpuset_mems",
        MORE_LIMITS,
        "the VM's memory comes from these nodes of the host; the container sees node 0",
    ),
    honoured("LinuxContainerResources.hugepage_limits.page_size", PAGES),
    different(
        "LinuxContainerResources.hugepage_limits.limit",
        "pod_memory/containers_share_a_volume_of_huge_pages",
        "as in the OCI spec; by default, containerd passes on none, and the limit of the pod's cgroup counts alone; \
         kubelet leaves no room for the pages in `memory.max`, so the RuntimeClass needs a larger overhead \
         (docs/resources.md, Huge pages of containers)",
    ),
    different(
        "LinuxContainerResources.unified",
        MORE_LIMITS,
        "as in the OCI spec: what kubelet sends is honoured, and `memory.swap.max` holds because the guest has no swap",
    ),
    different(
        "LinuxContainerResources.memory_swap_limit_in_bytes",
        MORE_LIMITS,
        "the guest has no swap: what may be swapped on runc stays in memory",
    ),
];
