//! The containers of a pod: pause, and those that live in its namespaces.

use std::{fs, os::unix::fs::PermissionsExt, sync::Arc, thread, time::Duration};

use bulkhead_agent::container::Joined;
use serde_json::{Value, json};

use crate::{
    bench::Bench,
    exec::{OBSERVER, Running},
    user::{FIRST, give_root, with_ids},
};

/// A spec with new namespaces of these kinds only.
fn spec(bench: &Bench, args: &[&str], new: &[&str]) -> Value {
    let mut spec = bench.spec(args);
    spec["linux"]["namespaces"] = new.iter().map(|kind| json!({ "type": kind })).collect();
    let mounts = spec["mounts"].as_array_mut().unwrap();
    mounts.push(json!({"destination": "/volume", "source": bench.volume(), "options": ["bind"]}));
    spec
}

fn pause(bench: &Bench) -> Running<'_> {
    changed_pause(bench, |_| {})
}

fn changed_pause(bench: &Bench, change: impl FnOnce(&mut Value)) -> Running<'_> {
    let mut spec = spec(bench, &["/pause-of-the-image"], &["pid", "mount", "uts", "ipc", "network"]);
    change(&mut spec);
    spec["hostname"] = json!("pod");
    spec["process"]["user"] = json!({"uid": 65535, "gid": 65535});
    Running::start(bench, &spec, Vec::new(), true)
}

fn member<'a>(bench: &'a Bench, pause: &Running<'a>, script: &str) -> Running<'a> {
    changed_member(bench, pause, &["sh", "-c", script], |_| {})
}

fn changed_member<'a>(
    bench: &'a Bench,
    pause: &Running<'a>,
    args: &[&str],
    change: impl FnOnce(&mut Value),
) -> Running<'a> {
    let kinds = [libc::CLONE_NEWPID, libc::CLONE_NEWUTS, libc::CLONE_NEWIPC, libc::CLONE_NEWNET];
    member_of(bench, pause, args, &kinds, change)
}

/// A member that joins namespaces of these kinds.
fn member_of<'a>(
    bench: &'a Bench,
    pause: &Running<'a>,
    args: &[&str],
    kinds: &[i32],
    change: impl FnOnce(&mut Value),
) -> Running<'a> {
    let mut spec = spec(bench, args, &["mount", "cgroup"]);
    spec.as_object_mut().unwrap().remove("hostname");
    change(&mut spec);
    // One by one, as the shim names them.
    let joined = kinds
        .iter()
        .map(|kind| Joined { container: Arc::clone(&pause.container), namespaces: *kind as u64 })
        .collect();
    Running::start(bench, &spec, joined, false)
}

fn printed(bench: &Bench, pause: &Running<'_>, script: &str) -> String {
    let member = member(bench, pause, &format!("({script}) > /volume/printed 2>&1"));
    assert_eq!(member.block_on(member.status("")), 0);
    fs::read_to_string(bench.volume().join("printed")).unwrap()
}

#[test]
fn members_live_in_the_user_namespace_of_the_pod() {
    let bench = Bench::new();
    give_root(&bench);
    fs::set_permissions(bench.volume(), PermissionsExt::from_mode(0o777)).unwrap();
    let pause = changed_pause(&bench, |spec| {
        spec["linux"]["namespaces"].as_array_mut().unwrap().push(json!({"type": "user"}));
        with_ids(spec);
    });
    let script = "exec > /volume/printed 2>&1; id -u; cat /proc/self/uid_map; hostname other; hostname; \
                  cat /proc/1/comm; mount -t tmpfs tmpfs /volume; echo mounted; \
                  mkdir /sys/fs/cgroup/below && echo divided";
    let kinds =
        [libc::CLONE_NEWUSER, libc::CLONE_NEWPID, libc::CLONE_NEWUTS, libc::CLONE_NEWIPC, libc::CLONE_NEWNET];
    let member = member_of(&bench, &pause, &["sh", "-c", script], &kinds, |spec| {
        with_ids(spec);
        let mounts = spec["mounts"].as_array_mut().unwrap();
        mounts.iter_mut().for_each(|mount| {
            if mount["type"] == "cgroup" {
                mount["options"] = json!([]);
            }
        });
    });
    assert_eq!(member.block_on(member.status("")), 0);
    let printed = fs::read_to_string(bench.volume().join("printed")).unwrap();
    let words: Vec<&str> = printed.split_whitespace().collect();
    let first = FIRST.to_string();
    assert_eq!(words, ["0", "0", &first, "65536", "other", "pause", "mounted", "divided"]);
}

#[test]
fn members_live_in_the_namespaces_of_pause() {
    let bench = Bench::new();
    let pause = pause(&bench);
    let script =
        "hostname; tr '\\0' ' ' < /proc/1/cmdline; echo; cat /proc/1/comm; cat /sys/class/net/lo/flags";
    assert_eq!(printed(&bench, &pause, script), "pod\n/pause \npause\n0x9\n");
    // One after the other, in the same world.
    printed(&bench, &pause, "touch /dev/mqueue/letters");
    assert_eq!(printed(&bench, &pause, "ls /dev/mqueue"), "letters\n");
}

#[test]
fn nothing_of_a_pid_namespace_is_left_when_its_container_is_deleted() {
    let bench = Bench::new();
    let pause = pause(&bench);
    printed(&bench, &pause, "true");
    // Of this thread, which has mounts of its own.
    let is_mounted =
        || fs::read_to_string("/proc/thread-self/mountinfo").unwrap().contains("/run/bulkhead/proc/");
    assert!(is_mounted());
    // Somebody holds the container, as a request does that waits for something.
    let held = Arc::clone(&pause.container);
    drop(pause);
    assert!(!is_mounted());
    drop(held);
}

#[test]
fn pause_shows_nothing_of_the_guest() {
    let bench = Bench::new();
    let pause = pause(&bench);
    let root = fs::read_dir(format!("/proc/{}/root", pause.container.pid())).unwrap();
    assert_eq!(root.count(), 0);
    // Without CAP_SYS_PTRACE, as containers are.
    let script = "ls /proc/1/root; readlink /proc/1/exe; readlink /proc/1/cwd; true";
    let printed = printed(&bench, &pause, script);
    assert!(!printed.contains("bulkhead"), "{printed}");
    assert_eq!(printed.matches("ermission denied").count(), 1, "{printed}");
}

#[test]
fn pause_reaps_what_members_leave_behind() {
    let bench = Bench::new();
    let pause = pause(&bench);
    let script = "(sh -c 'echo $$ > /volume/orphan' &); until [ -s /volume/orphan ]; do sleep 0.01; done; \
                  orphan=$(cat /volume/orphan); for i in $(seq 1000); do kill -0 $orphan || exit 0; sleep 0.01; done; exit 1";
    let member = member(&bench, &pause, script);
    assert_eq!(member.block_on(member.status("")), 0);
}

#[test]
fn the_processes_of_a_member_end_with_it_and_pause_lives_on() {
    let bench = Bench::new();
    let pause = pause(&bench);
    let member = member(&bench, &pause, "sleep 1000 & true");
    assert_eq!(member.block_on(member.status("")), 0);
    // Killed, and gone when they get to run.
    while !member.container.pids().unwrap().is_empty() {
        thread::sleep(Duration::from_millis(5));
    }
    pause.container.signal("", 0, false).unwrap();
}

#[test]
fn a_polite_signal_ends_pause() {
    let bench = Bench::new();
    let pause = pause(&bench);
    pause.container.signal("", libc::SIGTERM as u32, false).unwrap();
    assert_eq!(pause.block_on(pause.status("")), 0);
}

#[test]
fn a_member_is_never_seen_with_rights_that_its_program_does_not_have() {
    let bench = Bench::new();
    let pause = pause(&bench);
    let observer = changed_member(&bench, &pause, &["perl", "-e", OBSERVER], |spec| {
        let sets = json!(["CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH"]);
        spec["process"]["capabilities"] = json!({"bounding": sets, "effective": sets, "permitted": sets});
    });
    while !bench.volume().join("seen").exists() {
        thread::sleep(Duration::from_millis(5));
    }
    for number in 0..30 {
        // Each has a proc of the pod's processes, with a terminal and without.
        let script =
            format!("test $$ -ne 1 && test $(cat /proc/1/comm) = pause && echo {number} > /volume/said");
        let member = changed_member(&bench, &pause, &["sh", "-c", &script], |spec| {
            spec["process"]["user"] = json!({"uid": 0, "gid": 0});
            spec["process"]["terminal"] = json!(number % 2 == 1);
        });
        assert_eq!(member.block_on(member.status("")), 0);
        assert_eq!(fs::read_to_string(bench.volume().join("said")).unwrap(), format!("{number}\n"));
    }
    fs::write(bench.volume().join("stop"), "").unwrap();
    assert_eq!(observer.block_on(observer.status("")), 0);
    let seen = fs::read_to_string(bench.volume().join("seen")).unwrap();
    // Members are in mount namespaces of their own.
    assert_eq!(seen.replace("capabilities 0000000000000000, another mount namespace\n", ""), "");
}
