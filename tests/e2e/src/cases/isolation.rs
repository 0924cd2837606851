//! What a process in a container is and sees: itself, its own namespaces, and what the spec gives it.

use std::fs;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};

use super::Case;
use crate::ctr::Host;
use crate::fixtures::Spec;

pub(super) const CASES: &[Case] = &[
    Case::both("init_is_process_1_and_sees_only_its_own", pid_namespace),
    Case::both("the_environment_is_the_specs", environment),
    Case::both("a_missing_working_directory_is_made", working_directory),
    Case::both("a_user_is_who_the_spec_says", user),
    Case::both("additional_groups_are_the_specs", groups),
    Case::both("the_host_name_is_the_specs", host_name),
    Case::both("a_container_without_a_host_name_has_the_hosts", host_name_by_default),
    Case::both("the_host_name_is_the_containers_own_to_change", host_name_changes),
    Case::both("a_user_is_protected_from_links_of_others_as_on_the_host", protected_links),
    Case::both("capabilities_are_the_fourteen_of_the_default", capabilities),
    Case::both("capabilities_are_added_and_dropped", capabilities_changed),
    Case::both("a_user_has_no_effective_capabilities", capabilities_of_a_user),
    Case::both("a_process_cannot_gain_privileges", no_new_privileges),
    Case::both("a_process_may_gain_privileges_when_the_spec_allows_it", new_privileges),
    Case::both("each_set_of_capabilities_is_the_specs", capability_sets),
    Case::both("the_file_mode_mask_is_022", file_mode_mask),
    Case::both("the_file_mode_mask_is_the_specs", given_file_mode_mask),
    Case::both("the_network_is_a_loopback", loopback),
    Case::both("device_nodes_are_the_usual_ones", device_nodes),
    Case::both("devices_of_the_machine_cannot_be_opened", device_access),
    Case::both("a_usual_device_made_anew_works", device_made_anew),
    Case::both("the_clock_is_the_hosts", clock),
    Case::both("random_numbers_are_not_the_same_twice", random_numbers),
    Case::both("signals_are_not_blocked", signal_masks),
    Case::both("there_is_no_shared_memory_of_others", ipc_namespace),
    // runc before 1.2 ignores these four.
    Case::bulkhead("a_32_bit_personality_shows_a_32_bit_machine", personality),
    Case::bulkhead("the_scheduler_is_the_specs", scheduler),
    Case::bulkhead("the_priority_of_io_is_the_specs", io_priority),
    Case::bulkhead("the_domain_name_is_the_specs", domain_name),
    Case::both("annotations_of_the_cri_make_no_pod", uninvited),
];

/// CAP_CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID, SETPCAP, NET_BIND_SERVICE, NET_RAW, SYS_CHROOT,
/// MKNOD, AUDIT_WRITE and SETFCAP: containerd's default.
const DEFAULT_CAPABILITIES: u64 = 0xa804_25fb;
const CAP_CHOWN: u64 = 1 << 0;
const CAP_SYS_TIME: u64 = 1 << 25;

fn mask(bits: u64) -> String {
    format!("{bits:016x}")
}

fn pid_namespace(host: &Host) -> Result<()> {
    let finished =
        host.sh("echo pid=$$; echo name=$(cat /proc/1/comm); echo processes=$(ls /proc | grep -c '^[0-9]')")?;
    finished.succeeds()?.says("pid", "1")?.says("name", "sh")?;
    // sh, and the shell, ls and grep of the substitution: none of the host's or guest's many.
    let few = finished.value("processes")?.parse().is_ok_and(|count: u32| (1..=4).contains(&count));
    finished.check("only the container's own processes in /proc", few)?;
    Ok(())
}

fn environment(host: &Host) -> Result<()> {
    let container = host.container().flags(["--env", "FOO=bar", "--env", "SPACED=a b  c", "--env", "EMPTY="]);
    let finished = container.run(&["env"])?;
    finished.succeeds()?.says("FOO", "bar")?.says("SPACED", "a b  c")?.says("EMPTY", "")?;
    finished.says("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")?;
    Ok(())
}

fn working_directory(host: &Host) -> Result<()> {
    host.run(&["pwd"])?.succeeds()?.prints("/\n")?;
    host.container().flags(["--cwd", "/etc"]).run(&["pwd"])?.succeeds()?.prints("/etc\n")?;
    host.container()
        .flags(["--cwd", "/not/there/yet"])
        .run(&["pwd"])?
        .succeeds()?
        .prints("/not/there/yet\n")?;
    Ok(())
}

fn user(host: &Host) -> Result<()> {
    let script = "echo uid=$(id -u); echo gid=$(id -g); echo > /tmp/mine && echo owner=$(stat -c %u:%g /tmp/mine); touch /mine";
    let finished = host.container().flags(["--user", "1000:1000"]).run(&["sh", "-c", script])?;
    finished.says("uid", "1000")?.says("gid", "1000")?.says("owner", "1000:1000")?;
    finished.fails_with("Permission denied")?;
    Ok(())
}

fn protected_links(host: &Host) -> Result<()> {
    let names =
        ["fifos", "hardlinks", "regular", "symlinks"].map(|name| format!("/proc/sys/fs/protected_{name}"));
    let values = names.iter().map(fs::read_to_string).collect::<Result<String, _>>()?;
    // systemd sets it (sysctl.d/50-default.conf).
    let hard_links = values.lines().nth(1);
    ensure!(hard_links == Some("1"), "expected  a host that protects hard links\ncame      {hard_links:?}");
    let script = format!("cat {}; ln /etc/passwd /tmp/mine 2>&1 | grep -o 'not permitted'", names.join(" "));
    let finished = host.container().flags(["--user", "1000:1000"]).run(&["sh", "-c", &script])?;
    finished.succeeds()?.prints(&format!("{values}not permitted\n"))?;
    Ok(())
}

fn groups(host: &Host) -> Result<()> {
    let spec = Spec::of(host, &["grep", "^Groups:", "/proc/self/status"])?;
    let user = serde_json::json!({ "uid": 1000, "gid": 1000, "additionalGids": [7, 1000, 4711] });
    let finished = spec.with("/process", "user", user)?.run(host.container())?;
    finished.succeeds()?.says("Groups", "7 1000 4711")?;
    Ok(())
}

fn host_name(host: &Host) -> Result<()> {
    host.container().flags(["--hostname", "bulwark"]).run(&["hostname"])?.succeeds()?.prints("bulwark\n")?;
    Ok(())
}

fn host_name_by_default(host: &Host) -> Result<()> {
    let hosts = fs::read_to_string("/proc/sys/kernel/hostname")?;
    host.run(&["hostname"])?.succeeds()?.prints(&hosts)?;
    Ok(())
}

fn host_name_changes(host: &Host) -> Result<()> {
    let before = fs::read_to_string("/proc/sys/kernel/hostname")?;
    let container = host.container().flags(["--cap-add", "CAP_SYS_ADMIN"]);
    container.run(&["sh", "-c", "hostname renamed && hostname"])?.succeeds()?.prints("renamed\n")?;
    let after = fs::read_to_string("/proc/sys/kernel/hostname")?;
    ensure!(before == after, "expected  the host still called {before:?}\ncame      {after:?}");
    Ok(())
}

fn capabilities(host: &Host) -> Result<()> {
    let finished = host.run(&["grep", "^Cap", "/proc/self/status"])?;
    for set in ["CapPrm", "CapEff", "CapBnd"] {
        finished.succeeds()?.says(set, &mask(DEFAULT_CAPABILITIES))?;
    }
    finished.says("CapInh", &mask(0))?.says("CapAmb", &mask(0))?;
    Ok(())
}

fn capabilities_changed(host: &Host) -> Result<()> {
    let container = host.container().flags(["--cap-add", "CAP_SYS_TIME", "--cap-drop", "CAP_CHOWN"]);
    let finished = container.run(&["grep", "^Cap", "/proc/self/status"])?;
    let expected = mask((DEFAULT_CAPABILITIES | CAP_SYS_TIME) & !CAP_CHOWN);
    finished.succeeds()?.says("CapEff", &expected)?.says("CapBnd", &expected)?;
    Ok(())
}

fn capabilities_of_a_user(host: &Host) -> Result<()> {
    let container = host.container().flags(["--user", "1000:1000"]);
    let finished = container.run(&["grep", "^Cap", "/proc/self/status"])?;
    finished.succeeds()?.says("CapEff", &mask(0))?.says("CapPrm", &mask(0))?;
    finished.says("CapBnd", &mask(DEFAULT_CAPABILITIES))?;
    Ok(())
}

fn capability_sets(host: &Host) -> Result<()> {
    // CAP_CHOWN is bit 0, CAP_KILL bit 5, CAP_NET_RAW bit 13.
    let sets = serde_json::json!({
        "bounding": ["CAP_CHOWN", "CAP_KILL", "CAP_NET_RAW"],
        "permitted": ["CAP_CHOWN", "CAP_KILL"],
        "effective": ["CAP_KILL"],
        "inheritable": ["CAP_CHOWN"],
        "ambient": ["CAP_CHOWN"],
    });
    let spec = Spec::of(host, &["grep", "^Cap", "/proc/self/status"])?
        .with("/process", "capabilities", sets)?
        .with("/process", "user", serde_json::json!({ "uid": 1000, "gid": 1000 }))?;
    let finished = spec.run(host.container())?;
    // A user's program keeps those of its ambient set.
    finished.succeeds()?.says("CapBnd", &mask(0x2021))?.says("CapInh", &mask(1))?.says("CapAmb", &mask(1))?;
    finished.says("CapPrm", &mask(1))?.says("CapEff", &mask(1))?;
    Ok(())
}

fn no_new_privileges(host: &Host) -> Result<()> {
    host.run(&["grep", "NoNewPrivs", "/proc/self/status"])?.succeeds()?.says("NoNewPrivs", "1")?;
    Ok(())
}

fn new_privileges(host: &Host) -> Result<()> {
    let container = host.container().flags(["--allow-new-privs"]);
    container.run(&["grep", "NoNewPrivs", "/proc/self/status"])?.succeeds()?.says("NoNewPrivs", "0")?;
    Ok(())
}

fn file_mode_mask(host: &Host) -> Result<()> {
    host.sh("umask; touch /tmp/new; stat -c %a /tmp/new")?.succeeds()?.prints("0022\n644\n")?;
    Ok(())
}

fn given_file_mode_mask(host: &Host) -> Result<()> {
    let user = serde_json::json!({ "uid": 0, "gid": 0, "umask": 0o27 });
    let spec = Spec::of(host, &["sh", "-c", "umask"])?.with("/process", "user", user)?;
    spec.run(host.container())?.succeeds()?.prints("0027\n")?;
    Ok(())
}

fn loopback(host: &Host) -> Result<()> {
    let script = "ls /sys/class/net | grep -v -e '^lo$' | while read name; do echo up=$(cat /sys/class/net/$name/flags); done; \
                  ip addr show dev lo; ping -c 1 -W 5 127.0.0.1";
    let finished = host.sh(script)?;
    let text = finished.succeeds()?.text();
    finished.check("lo is up", text.contains("LOOPBACK,UP"))?;
    finished.check("lo has 127.0.0.1/8", text.contains("inet 127.0.0.1/8"))?;
    // Drivers such as ipip put a device of theirs in every namespace, which is down (IFF_UP is bit 0).
    let up = text.lines().filter_map(|line| line.strip_prefix("up=0x"));
    let others = up.filter(|flags| u32::from_str_radix(flags, 16).is_ok_and(|flags| flags & 1 == 1)).count();
    finished.check("no other card is up", others == 0)?;
    finished.check("an answer to the ping", text.contains("1 packets received"))?;
    Ok(())
}

fn device_nodes(host: &Host) -> Result<()> {
    let script = "for name in null zero full random urandom tty; do echo $name=$(stat -c '%F %a %t:%T' /dev/$name); done; \
                  for name in fd stdin stdout stderr ptmx; do echo $name=$(readlink /dev/$name); done; \
                  echo zeros=$(head -c 3 /dev/zero | wc -c); echo discarded > /dev/null; echo noise=$(head -c 5 /dev/urandom | wc -c)";
    let finished = host.sh(script)?;
    finished.succeeds()?;
    for (name, number) in [
        ("null", "1:3"),
        ("zero", "1:5"),
        ("full", "1:7"),
        ("random", "1:8"),
        ("urandom", "1:9"),
        ("tty", "5:0"),
    ] {
        finished.says(name, &format!("character special file 666 {number}"))?;
    }
    for (name, target) in
        [("fd", "/proc/self/fd"), ("stdin", "/proc/self/fd/0"), ("stdout", "/proc/self/fd/1")]
    {
        finished.says(name, target)?;
    }
    finished
        .says("stderr", "/proc/self/fd/2")?
        .says("ptmx", "pts/ptmx")?
        .says("zeros", "3")?
        .says("noise", "5")?;
    Ok(())
}

fn device_access(host: &Host) -> Result<()> {
    // Root with CAP_MKNOD may make nodes, but the cgroup's device rules do not let it open them.
    let script = "mknod /tmp/mem c 1 1 && mknod /tmp/kmsg c 1 11 && echo made; \
                  head -c 1 /tmp/kmsg; echo kmsg=$?; head -c 1 /tmp/mem; echo mem=$?";
    let finished = host.sh(script)?;
    finished.check("made nodes", finished.text().contains("made\n"))?.says("kmsg", "1")?.says("mem", "1")?;
    let refused = String::from_utf8_lossy(&finished.stderr).matches("Operation not permitted").count();
    finished.check("both refused with `Operation not permitted`", refused == 2)?;
    Ok(())
}

fn device_made_anew(host: &Host) -> Result<()> {
    let script = "mknod /tmp/null c 1 3 && mknod /tmp/zero c 1 5 && echo gone > /tmp/null && head -c 7 /tmp/zero | wc -c";
    host.sh(script)?.succeeds()?.prints("7\n")?;
    Ok(())
}

fn clock(host: &Host) -> Result<()> {
    let before = unix_seconds()?;
    let finished = host.run(&["date", "+%s"])?;
    let after = unix_seconds()?;
    let during = finished.succeeds()?.text().trim().parse().is_ok_and(|now| (before..=after).contains(&now));
    finished.check(&format!("a time from {before} to {after}"), during)?;
    Ok(())
}

fn unix_seconds() -> Result<u64> {
    Ok(SystemTime::now().duration_since(UNIX_EPOCH).context("the clock is before 1970")?.as_secs())
}

fn random_numbers(host: &Host) -> Result<()> {
    let read = ["sh", "-c", "head -c 16 /dev/urandom | sha256sum"];
    let first = host.run(&read)?.succeeds()?.text();
    let second = host.run(&read)?;
    second
        .succeeds()?
        .check(&format!("other bytes than in the first container: {first:?}"), second.text() != first)?;
    Ok(())
}

fn signal_masks(host: &Host) -> Result<()> {
    let finished = host.run(&["grep", "^Sig", "/proc/self/status"])?;
    finished.succeeds()?.says("SigBlk", &mask(0))?.says("SigIgn", &mask(0))?;
    Ok(())
}

fn ipc_namespace(host: &Host) -> Result<()> {
    let finished = host.sh("grep -c . /proc/sysvipc/shm; ls -A /dev/mqueue")?;
    // The heading only, and no queue.
    finished.succeeds()?.prints("1\n")?;
    Ok(())
}

fn personality(host: &Host) -> Result<()> {
    let personality = serde_json::json!({ "domain": "LINUX32" });
    let spec = Spec::of(host, &["uname", "-m"])?.with("/linux", "personality", personality)?;
    spec.run(host.container())?.succeeds()?.prints("i686\n")?;
    Ok(())
}

fn scheduler(host: &Host) -> Result<()> {
    let scheduler = serde_json::json!({ "policy": "SCHED_BATCH", "nice": 5 });
    // The nice value and the policy (proc(5)); 3 is SCHED_BATCH.
    let spec = Spec::of(host, &["cut", "-d ", "-f19,41", "/proc/self/stat"])?;
    spec.with("/process", "scheduler", scheduler)?.run(host.container())?.succeeds()?.prints("5 3\n")?;
    Ok(())
}

fn io_priority(host: &Host) -> Result<()> {
    let priority = serde_json::json!({ "class": "IOPRIO_CLASS_BE", "priority": 3 });
    let spec = Spec::of(host, &["sh", "-c", "ionice -p $$"])?.with("/process", "ioPriority", priority)?;
    spec.run(host.container())?.succeeds()?.prints("best-effort: prio 3\n")?;
    Ok(())
}

fn domain_name(host: &Host) -> Result<()> {
    let spec = Spec::of(host, &["cat", "/proc/sys/kernel/domainname"])?;
    spec.with("", "domainname", "example".into())?.run(host.container())?.succeeds()?.prints("example\n")?;
    Ok(())
}

/// containerd's CRI plugin says by annotations what a container is in its pod. Anybody may write such annotations.
fn uninvited(host: &Host) -> Result<()> {
    let victim = host.container().detach(&["sleep", "1000"])?;
    let sandbox = format!("io.kubernetes.cri.sandbox-id={}", victim.id());
    for kind in ["container", "sandbox"] {
        let kind = format!("io.kubernetes.cri.container-type={kind}");
        let container = host.container().flags(["--annotation", &kind, "--annotation", &sandbox]);
        let finished = container.run(&["sh", "-c", "echo its own program; ls /proc | grep -c '^[0-9]'"])?;
        let text = finished.succeeds()?.text();
        finished.check("its own program alone", text.starts_with("its own program\n"))?;
    }
    victim.exec(&["echo", "alone"])?.succeeds()?.prints("alone\n")?;
    Ok(())
}
