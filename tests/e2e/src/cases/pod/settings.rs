//! What a pod's manifest sets of its containers: the process, its privileges and its limits.

use std::path::Path;

use anyhow::{Result, ensure};
use tonic::Code;

use super::super::Case;
use crate::command::wait_until;
use crate::cri::messages::*;
use crate::ctr::{Host, Runtime};
use crate::fixtures::Replaced;
use crate::pods::{Pod, words};

pub(in crate::cases) const CASES: &[Case] = &[
    Case::both("environment_and_working_directory_are_set", environment),
    Case::both("arguments_alone_replace_the_images_command", arguments),
    Case::both("a_user_and_groups_are_set_by_number", user_by_number),
    Case::both("a_user_is_found_by_name_in_the_image", user_by_name),
    Case::both("capabilities_are_the_defaults_added_to_and_dropped", capabilities),
    Case::both("a_privileged_container_has_all_capabilities", privileged),
    Case::bulkhead("a_privileged_container_keeps_the_options_of_the_cgroup_mounts", cgroup_options),
    Case::both("a_root_can_be_read_only", read_only_root),
    Case::both("no_new_privileges_is_set", no_new_privileges),
    Case::both("the_default_system_call_filter_is_applied", system_call_filter),
    Case::both("paths_are_masked_and_read_only", hidden_paths),
    Case::both("sysctls_of_the_pod_are_its_containers", sysctls),
    // The CRI plugin's default since then.
    Case::both("low_ports_and_pings_need_no_privilege", unprivileged_network).since(2, 0),
    Case::both("sysctls_of_the_pods_interface_are_set", interface_sysctls),
    Case::both("sysctls_of_the_pod_win_over_what_the_host_has_set", winning_sysctls),
    Case::both("limits_are_the_containers_cgroups", limits),
    Case::both("limits_of_a_running_container_are_changed", limits_changed),
    Case::both("a_container_over_its_memory_limit_is_killed_and_that_is_told", out_of_memory),
    Case::bulkhead("annotations_that_are_allowed_have_effect_and_others_are_refused", annotations),
];

const MEBIBYTE: i64 = 1 << 20;

fn annotations(host: &Host) -> Result<()> {
    let allowed = Path::new("/etc/bulkhead/config.d/50-e2e.toml");
    let _replaced = Replaced::file(allowed, "templates = false\nallowed_annotations = [\"memory_mib\"]\n")?;
    let annotated = |key: &str, value: &str| {
        let (key, value) = (format!("bulkhead.dev/{key}"), value.to_owned());
        Pod::plan(host).config(|config| drop(config.annotations.insert(key, value)))
    };
    let pod = annotated("memory_mib", "384").start()?;
    let total = pod.container().run(&["grep", "MemTotal", "/proc/meminfo"])?.succeeds()?.text();
    let kib = total.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok());
    ensure!(kib.is_some_and(|kib| kib > 300 << 10), "expected  a VM of 384 MiB\ncame      {total}");
    pod.remove()?;
    let message = annotated("console", "true").refused(Code::InvalidArgument)?;
    let words = "annotations[bulkhead.dev/console]: it is not allowed; add \"console\" to";
    ensure!(message.contains(words), "expected  {words}\ncame      {message}");
    Ok(())
}

fn environment(host: &Host) -> Result<()> {
    let pod = Pod::start(host)?;
    let container = pod.container().env("COLOR", "dark blue").env("HOME", "/tmp").cwd("/etc");
    container
        .sh("echo $COLOR; echo $HOME; pwd; test -n \"$PATH\"")?
        .succeeds()?
        .prints("dark blue\n/tmp\n/etc\n")?;
    // A working directory that the image does not have is made.
    let container = pod.container().cwd("/made/for/it").start(&["sleep", "1000"])?;
    container.exec(&["pwd"])?.prints("/made/for/it\n")?;
    Ok(())
}

fn arguments(host: &Host) -> Result<()> {
    let pod = Pod::start(host)?;
    let container =
        pod.container().config(|config| config.args = words(&["sh", "-c", "echo from arguments"]));
    container.run(&[])?.succeeds()?.prints("from arguments\n")?;
    let container = pod.container().config(|config| config.args = words(&["second", "third word"]));
    container.run(&["echo", "first"])?.succeeds()?.prints("first second third word\n")?;
    Ok(())
}

fn user_by_number(host: &Host) -> Result<()> {
    let pod = Pod::start(host)?;
    let container = pod.container().security(|security| {
        security.run_as_user = Some(Int64Value { value: 1234 });
        security.run_as_group = Some(Int64Value { value: 2345 });
        security.supplemental_groups = vec![3456, 4567];
    });
    let container = container.start(&["sleep", "1000"])?;
    // An exec'ed process is the same user.
    let seen =
        container.sh("id -u; id -g; id -G; touch /file 2>/dev/null || echo may not write to the root")?;
    seen.succeeds()?.prints("1234\n2345\n2345 3456 4567\nmay not write to the root\n")?;
    Ok(())
}

fn user_by_name(host: &Host) -> Result<()> {
    let pod = Pod::start(host)?;
    let container = pod.container().security(|security| security.run_as_username = "user".to_owned());
    // /etc/group of the image has the user in one more group.
    container.sh("id -un; id -u; id -g; id -G")?.succeeds()?.prints("user\n1000\n1000\n1000 2000\n")?;
    Ok(())
}

/// The effective capabilities as a container's /proc/self/status says them.
fn effective(pod: &Pod<'_>, add: &[&str], drop: &[&str]) -> Result<String> {
    let container = pod.container().security(|security| {
        let (add_capabilities, drop_capabilities) = (words(add), words(drop));
        security.capabilities = Some(Capability { add_capabilities, drop_capabilities });
    });
    let seen = container.run(&["grep", "CapEff", "/proc/self/status"])?;
    seen.succeeds()?.value("CapEff")
}

fn capabilities(host: &Host) -> Result<()> {
    let pod = Pod::start(host)?;
    let expected = [
        // containerd's default: 14 capabilities.
        (effective(&pod, &[], &[])?, "00000000a80425fb"),
        // CAP_NET_ADMIN is bit 12.
        (effective(&pod, &["NET_ADMIN"], &[])?, "00000000a80435fb"),
        (effective(&pod, &[], &["ALL"])?, "0000000000000000"),
        // CAP_CHOWN is bit 0.
        (effective(&pod, &["CHOWN"], &["ALL"])?, "0000000000000001"),
    ];
    for (came, expected) in expected {
        ensure!(came == expected, "expected  the capabilities {expected}\ncame      {came}");
    }
    Ok(())
}

fn privileged(host: &Host) -> Result<()> {
    let pod = Pod::plan(host).privileged().start()?;
    let container = pod.container().security(|security| security.privileged = true);
    let script = "mount -t tmpfs none /tmp && echo mounted; grep CapEff /proc/self/status; touch /proc/sys/kernel/domainname && echo writable";
    let seen = container.sh(script)?;
    seen.succeeds()?.check("a file system mounted by the container", seen.text().starts_with("mounted\n"))?;
    let missing = !u64::from_str_radix(&seen.value("CapEff")?, 16)?;
    // Linux 6.12 has 41 capabilities.
    seen.check("every capability", missing & ((1 << 41) - 1) == 0)?;
    seen.check("a writable /proc/sys", seen.text().ends_with("writable\n"))?;
    Ok(())
}

/// The options belong to the one cgroup2 file system of a kernel, and a mount or a remount from the kernel's first
/// cgroup namespace sets them. On a host with runc a privileged container lives in that namespace, and clears them.
fn cgroup_options(host: &Host) -> Result<()> {
    let pod = Pod::plan(host).privileged().start()?;
    let container = pod.container().security(|security| security.privileged = true);
    let script = "mount -t cgroup2 none /tmp && mount -o remount,rw /tmp && mount -o remount,rw /sys/fs/cgroup; \
                  grep cgroup2 /proc/mounts";
    let seen = container.sh(script)?;
    seen.succeeds()?;
    let text = seen.text();
    let mounts: Vec<&str> = text.lines().collect();
    let all_keep = mounts.iter().all(|line| line.contains("nsdelegate,memory_recursiveprot"));
    ensure!(
        mounts.len() == 2 && all_keep,
        "expected  nsdelegate,memory_recursiveprot in two lines\ncame      {text}"
    );
    Ok(())
}

fn read_only_root(host: &Host) -> Result<()> {
    let pod = Pod::start(host)?;
    let container = pod.container().security(|security| security.readonly_rootfs = true);
    let script = "touch /file 2>&1; touch /dev/shm/file && echo memory is writable";
    let seen = container.sh(script)?;
    seen.succeeds()?.prints("touch: /file: Read-only file system\nmemory is writable\n")?;
    Ok(())
}

fn no_new_privileges(host: &Host) -> Result<()> {
    let pod = Pod::start(host)?;
    let status = ["grep", "NoNewPrivs", "/proc/self/status"];
    pod.container().run(&status)?.says("NoNewPrivs", "0")?;
    let container = pod.container().security(|security| security.no_new_privs = true);
    container.run(&status)?.says("NoNewPrivs", "1")?;
    Ok(())
}

fn system_call_filter(host: &Host) -> Result<()> {
    let pod = Pod::start(host)?;
    let profile = |profile_type: ProfileType| {
        let of = |it: ProfileType| Some(SecurityProfile { profile_type: it.into(), ..Default::default() });
        pod.container().security(|security| {
            security.seccomp = of(profile_type);
            // containerd's default profile forbids new user namespaces too.
            security.apparmor = of(ProfileType::Unconfined);
        })
    };
    // 0: none, 2: a filter. The default profile forbids unshare to those who may not mount.
    let script = "grep Seccomp: /proc/self/status; unshare -U true 2>/dev/null; echo unshare=$?";
    profile(ProfileType::Unconfined).sh(script)?.says("Seccomp", "0")?.says("unshare", "0")?;
    profile(ProfileType::RuntimeDefault).sh(script)?.says("Seccomp", "2")?.says("unshare", "1")?;
    Ok(())
}

fn hidden_paths(host: &Host) -> Result<()> {
    let pod = Pod::start(host)?;
    let container = pod.container().security(|security| {
        security.masked_paths = words(&["/proc/keys", "/proc/scsi", "/sys/firmware", "/no/such/path"]);
        security.readonly_paths = words(&["/proc/sys", "/proc/irq"]);
    });
    let script = "cat /proc/keys; ls /proc/scsi /sys/firmware | grep -v -e : -e '^$'; echo x 2>/dev/null > /proc/sys/kernel/domainname || echo read-only";
    container.sh(script)?.succeeds()?.prints("read-only\n")?;
    Ok(())
}

pub(super) fn sysctls(host: &Host) -> Result<()> {
    let pod =
        Pod::plan(host).sysctl("net.ipv4.ip_unprivileged_port_start", "80").sysctl("kernel.msgmax", "16384");
    let pod = pod.start()?;
    let script = "cd /proc/sys && cat net/ipv4/ip_unprivileged_port_start kernel/msgmax";
    pod.container().sh(script)?.succeeds()?.prints("80\n16384\n")?;
    Ok(())
}

pub(super) fn unprivileged_network(host: &Host) -> Result<()> {
    let pod = Pod::start(host)?;
    let container = pod.container().security(|security| {
        security.run_as_user = Some(Int64Value { value: 1000 });
        security.capabilities =
            Some(Capability { drop_capabilities: vec!["ALL".to_owned()], ..Default::default() });
    });
    let script = "cat /proc/sys/net/ipv4/ping_group_range; httpd -f -p 80 -h /etc & \
                  until wget -q -O /dev/null http://127.0.0.1/hostname 2>/dev/null; do sleep 0.1; done; echo served";
    container.sh(script)?.succeeds()?.prints("0\t2147483647\nserved\n")?;
    Ok(())
}

fn interface_sysctls(host: &Host) -> Result<()> {
    // Whatever interfaces begin with from now on is nothing to the one that is there: it keeps its addresses.
    let pod = Pod::plan(host)
        .sysctl("net.ipv4.conf.eth0.rp_filter", "2")
        .sysctl("net.ipv4.neigh.eth0.gc_stale_time", "77")
        .sysctl("net.ipv6.conf.default.disable_ipv6", "1")
        .start()?;
    let script = "cd /proc/sys/net && cat ipv4/conf/eth0/rp_filter ipv4/neigh/eth0/gc_stale_time \
                  ipv6/conf/default/disable_ipv6 ipv6/conf/eth0/disable_ipv6";
    pod.container().sh(script)?.succeeds()?.prints("2\n77\n1\n0\n")?;
    let addresses = pod.container().sh("ip -6 addr show dev eth0 scope global")?;
    addresses.check("an IPv6 address of the pod's network", addresses.text().contains("fd88:"))?;
    Ok(())
}

/// A new network namespace has those of IPv4 from the host, where the CNI plugin has set `ip_forward` (`isGateway`).
fn winning_sysctls(host: &Host) -> Result<()> {
    let script = "cd /proc/sys/net/ipv4 && cat ip_forward conf/all/accept_redirects conf/eth0/forwarding";
    // The plugin sets it when it makes the first pod's network.
    let first = Pod::start(host)?;
    let inherited = Pod::start(host)?;
    inherited.container().sh(script)?.succeeds()?.prints("1\n0\n1\n")?;
    let pod = Pod::plan(host)
        .sysctl("net.ipv4.ip_forward", "0")
        .sysctl("net.ipv4.conf.all.accept_redirects", "1")
        .start()?;
    pod.container().sh(script)?.succeeds()?.prints("0\n1\n0\n")?;
    drop((first, inherited));
    Ok(())
}

fn limits(host: &Host) -> Result<()> {
    let pod = Pod::start(host)?;
    let container = pod.container().resources(LinuxContainerResources {
        cpu_period: 100_000,
        cpu_quota: 50_000,
        cpu_shares: 512,
        memory_limit_in_bytes: 64 * MEBIBYTE,
        oom_score_adj: 500,
        ..Default::default()
    });
    let script = "cd /sys/fs/cgroup && cat cpu.max cpu.weight memory.max && cat /proc/self/oom_score_adj";
    let weight = super::super::limits::weight_of_512_shares(host);
    container.sh(script)?.succeeds()?.prints(&format!("50000 100000\n{weight}\n67108864\n500\n"))?;
    Ok(())
}

fn limits_changed(host: &Host) -> Result<()> {
    let pod = Pod::start(host)?;
    let memory = |mebibytes: i64| LinuxContainerResources {
        memory_limit_in_bytes: mebibytes * MEBIBYTE,
        ..Default::default()
    };
    let container = pod.container().resources(memory(64)).start(&["sleep", "1000"])?;
    container.exec(&["cat", "/sys/fs/cgroup/memory.max"])?.prints("67108864\n")?;
    let more = LinuxContainerResources { cpu_period: 100_000, cpu_quota: 20_000, ..memory(96) };
    container.update(more)?;
    container.sh("cd /sys/fs/cgroup && cat memory.max cpu.max")?.prints("100663296\n20000 100000\n")?;
    Ok(())
}

fn out_of_memory(host: &Host) -> Result<()> {
    let pod = Pod::start(host)?;
    let neighbour = pod.container().start(&["sleep", "1000"])?;
    let limit = LinuxContainerResources { memory_limit_in_bytes: 32 * MEBIBYTE, ..Default::default() };
    // tail keeps a line whole, and this one does not end.
    let container = pod.container().resources(limit).start(&["tail", "/dev/zero"])?;
    let status = container.wait()?;
    ensure!(status.exit_code == 137, "expected  137\ncame      {}", status.exit_code);
    // The reason travels by an event of its own, which runc's shim loses when it finds the container empty first.
    if host.runtime() == Runtime::Bulkhead {
        wait_until("the reason OOMKilled", host.patience(super::SEEN), || {
            Ok(container.status()?.reason == "OOMKilled")
        })?;
    }
    neighbour.exec(&["true"])?.succeeds()?;
    Ok(())
}
