//! Containers in a user namespace of their own.

use std::{
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt, chown},
};

use bulkhead_agent::{
    spec::{self, PodSharing},
    stage::launcher::CreatedInit,
    syscall,
};
use serde_json::{Value, json};

use crate::bench::{Bench, null};

pub(crate) const FIRST: u32 = 200_000;

/// Gives the container's root to the user that is its root in the guest.
pub(crate) fn give_root(bench: &Bench) {
    fs::set_permissions(bench.directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
    chown(bench.root(), Some(FIRST), Some(FIRST)).unwrap();
}

fn with_user_namespace(spec: &mut Value) {
    spec["linux"]["namespaces"].as_array_mut().unwrap().push(json!({"type": "user"}));
    with_ids(spec);
}

pub(crate) fn with_ids(spec: &mut Value) {
    let ids = json!([{"containerID": 0, "hostID": FIRST, "size": 65536}]);
    spec["linux"]["uidMappings"] = ids.clone();
    spec["linux"]["gidMappings"] = ids;
    let all: Vec<String> = ["CHOWN", "DAC_OVERRIDE", "FOWNER", "NET_ADMIN", "SYS_ADMIN", "SETUID", "SETGID"]
        .map(|name| format!("CAP_{name}"))
        .into();
    spec["process"]["capabilities"] = json!({"bounding": all, "effective": all, "permitted": all});
}

#[test]
fn its_root_is_another_user_outside() {
    let bench = Bench::new();
    give_root(&bench);
    let script = "id -u; id -g; cat /proc/self/uid_map; hostname other && hostname; \
                  echo text > /file; chown 5:6 /file; stat -c %u:%g /file; echo out > /dev/stdout; \
                  stat -c %t:%T /dev/null /dev/tty; echo > /dev/null; mount -t tmpfs tmpfs /sys && echo mounted; \
                  mkdir /sys/fs 2>/dev/null; cat /proc/self/oom_score_adj; ulimit -Hn; \
                  (echo 1 > /proc/sys/vm/drop_caches) 2>/dev/null || echo not root";
    let printed = bench.shell(script, |spec| {
        with_user_namespace(spec);
        spec["process"]["oomScoreAdj"] = json!(500);
        spec["process"]["rlimits"] = json!([{"type": "RLIMIT_NOFILE", "soft": 77, "hard": 99}]);
        spec["domainname"] = json!("domain");
    });
    let lines: Vec<Vec<&str>> = printed.lines().map(|line| line.split_whitespace().collect()).collect();
    let expected = format!("0\n0\n0 {FIRST} 65536\nother\n5:6\nout\n1:3\n5:0\nmounted\n500\n99\nnot root\n");
    let expected: Vec<Vec<&str>> = expected.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines, expected);
    let file = fs::metadata(bench.root().join("file")).unwrap();
    assert_eq!((file.uid(), file.gid()), (FIRST + 5, FIRST + 6));
}

#[test]
fn a_process_that_joins_is_in_it() {
    let bench = Bench::new();
    give_root(&bench);
    let mut spec = bench.spec(&["sleep", "1000"]);
    with_user_namespace(&mut spec);
    let CreatedInit { child, pidfd, control, .. } = bench.create(&spec, null()).unwrap();
    bench.runtime.block_on(control.start()).unwrap();
    let script = "id -u; id -G; cat /proc/self/uid_map; echo out > /dev/stdout; cat /proc/1/comm";
    let mut process = json!({"args": ["sh", "-c", script], "env": ["PATH=/usr/bin:/bin"], "cwd": "/"});
    process["user"] = json!({"uid": 1000, "gid": 1001, "additionalGids": [7]});
    let outcome = bench.exec_with(&pidfd, &process, &spec);
    // An id that the namespace does not have.
    process["user"] = json!({"uid": 70000, "gid": 0});
    let refused = bench.exec_with(&pidfd, &process, &spec).err().unwrap().to_string();
    syscall::kill(child.pid, libc::SIGKILL as u32).unwrap();
    assert_eq!(bench.status(child), 137);
    let outcome = outcome.unwrap();
    assert_eq!(outcome.stderr, "");
    let words: Vec<&str> = outcome.stdout.split_whitespace().collect();
    assert_eq!(words, ["1000", "1001", "7", "0", &FIRST.to_string(), "65536", "out", "sleep"]);
    assert!(refused.starts_with("process.user.uid 70000: the user namespace"), "{refused}");
}

#[test]
fn ids_that_the_kernel_refuses_are_named() {
    let bench = Bench::new();
    let mut spec = bench.spec(&["true"]);
    with_user_namespace(&mut spec);
    spec["linux"]["gidMappings"] = json!([
        {"containerID": 0, "hostID": 1, "size": 10}, {"containerID": 5, "hostID": 100, "size": 10}
    ]);
    spec::resolve(spec.to_string().as_bytes(), "/sys/fs/cgroup/c".as_ref(), PodSharing::default()).unwrap();
    let error = bench.create(&spec, null()).err().unwrap().to_string();
    assert!(error.starts_with("linux.gidMappings: "), "{error}");
}

#[test]
fn ids_of_a_mount_are_mapped() {
    let bench = Bench::new();
    fs::set_permissions(bench.directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
    fs::write(bench.volume().join("theirs"), "").unwrap();
    chown(bench.volume().join("theirs"), Some(1000), Some(1001)).unwrap();
    let script = "stat -c %u:%g / /volume /volume/theirs; echo text > /volume/file; chown 5:6 /volume/file; \
                  mkdir /directory; stat -c %u:%g /volume/file /directory";
    let printed = bench.shell(script, |spec| {
        with_user_namespace(spec);
        let ids = spec["linux"]["uidMappings"].clone();
        for key in ["uidMappings", "gidMappings"] {
            spec["root"][key] = ids.clone();
        }
        spec["mounts"].as_array_mut().unwrap().push(json!({
            "destination": "/volume", "source": bench.volume(), "options": ["rbind", "ridmap"],
            "uidMappings": ids, "gidMappings": ids
        }));
    });
    assert_eq!(printed, "0:0\n0:0\n1000:1001\n5:6\n0:0\n");
    let file = fs::metadata(bench.volume().join("file")).unwrap();
    assert_eq!((file.uid(), file.gid()), (5, 6));
    assert_eq!(fs::metadata(bench.root().join("directory")).unwrap().uid(), 0);
}
