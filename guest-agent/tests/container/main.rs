//! Containers as their users see them, built by the stage and the init on the machine that runs the tests: root and
//! a cgroup v2 hierarchy are all that they need. The container's root is empty; /usr of this machine is bound into
//! it.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod bench;
mod control;
mod deadline;
mod exec;
mod pod;
mod seccomp;
mod terminal;
mod user;

use std::{
    fs,
    io::{Read, Write},
    sync::mpsc::{RecvTimeoutError, channel},
    thread,
    time::Duration,
};

use bulkhead_agent::{
    device_filter,
    stage::launcher::{ChildStdio, CreatedInit, ProcessError},
    syscall,
};
use nix::mount::{MsFlags, mount};
use nix::sys::{
    pthread::{pthread_kill, pthread_self},
    signal::Signal,
};
use serde_json::json;

use crate::bench::{Bench, null};

#[test]
fn a_container_has_a_world_of_its_own() {
    let bench = Bench::new();
    let printed = bench.shell(
        "echo $$; hostname; ls /; cat /proc/self/cgroup; cat /sys/class/net/lo/flags; echo $HOME; umask",
        |_| {},
    );
    let lines: Vec<&str> = printed.lines().collect();
    assert_eq!(lines[..2], ["1", "inside"]);
    assert_eq!(lines[2..8], ["bin", "dev", "lib", "lib64", "proc", "sys"]);
    assert!(lines.contains(&"0::/"), "{printed}");
    // Up, loopback, running.
    assert!(lines.contains(&"0x9") && lines.contains(&"/") && lines.contains(&"0022"), "{printed}");
}

#[test]
fn a_program_for_devices_is_loaded_although_children_end_meanwhile() {
    // From its end on SIGCHLD is handled: without a handler it would never be pending.
    let bench = Bench::new();
    assert_eq!(bench.run(&bench.spec(&["true"])).unwrap().status, 0);
    let devices = device_filter::generate(&[], None).unwrap();
    let loading = pthread_self();
    let (ended, is_ended) = channel::<()>();
    thread::scope(|scope| {
        scope.spawn(move || {
            // Often enough to interrupt some of the loads, and with time in between for others.
            while is_ended.recv_timeout(Duration::from_micros(200)) == Err(RecvTimeoutError::Timeout) {
                pthread_kill(loading, Signal::SIGCHLD).unwrap();
            }
        });
        for _ in 0..1000 {
            syscall::load_device_program(&devices).unwrap();
        }
        drop(ended);
    });
}

#[test]
fn exit_statuses_and_signals_come_back() {
    let bench = Bench::new();
    assert_eq!(bench.run(&bench.spec(&["sh", "-c", "exit 7"])).unwrap().status, 7);
    let CreatedInit { child, control, .. } = bench.create(&bench.spec(&["sleep", "1000"]), null()).unwrap();
    bench.runtime.block_on(control.start()).unwrap();
    syscall::kill(child.pid, libc::SIGKILL as u32).unwrap();
    assert_eq!(bench.status(child), 137);
}

#[test]
fn a_program_that_cannot_run_is_named() {
    let bench = Bench::new();
    let cases = [
        ("nope", r#"exec: "nope": executable file not found in $PATH"#),
        ("/nope", r#"exec: "/nope": stat /nope: no such file or directory"#),
        ("/dev/null", r#"exec: "/dev/null": permission denied"#),
    ];
    for (program, expected) in cases {
        let error = bench.create(&bench.spec(&[program]), null()).err().unwrap().to_string();
        assert_eq!(error, expected);
    }
    let script = bench.root().join("text");
    fs::write(&script, "no program").unwrap();
    fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let init = bench.create(&bench.spec(&["/text"]), null()).unwrap();
    let error = bench.runtime.block_on(init.control.start()).unwrap_err().to_string();
    assert_eq!(error, "exec /text: exec format error");
}

#[test]
fn the_process_is_what_the_spec_says() {
    let bench = Bench::new();
    let script = "id -u; id -g; id -G; pwd; umask; ulimit -n; cat /proc/self/oom_score_adj; \
                  grep -E 'Cap|NoNewPrivs' /proc/self/status; echo out > /dev/stdout";
    let printed = bench.shell(script, |spec| {
        let process = &mut spec["process"];
        process["user"] = json!({"uid": 1234, "gid": 2345, "additionalGids": [3456], "umask": 0o027});
        process["cwd"] = json!("/made/for/it");
        process["rlimits"] = json!([{"type": "RLIMIT_NOFILE", "soft": 77, "hard": 99}]);
        process["oomScoreAdj"] = json!(500);
        process["noNewPrivileges"] = json!(true);
        let sets = json!(["CAP_KILL", "CAP_NET_RAW"]);
        process["capabilities"] = json!({
            "bounding": sets, "effective": ["CAP_KILL"], "permitted": sets, "inheritable": ["CAP_KILL"],
            "ambient": ["CAP_KILL"]
        });
    });
    let lines: Vec<&str> = printed.lines().map(|line| line.trim()).collect();
    assert_eq!(lines[..7], ["1234", "2345", "2345 3456", "/made/for/it", "0027", "77", "500"]);
    assert_eq!(
        lines[7..12].iter().map(|l| l.split_whitespace().last().unwrap()).collect::<Vec<_>>(),
        ["0000000000000020", "0000000000000020", "0000000000000020", "0000000000002020", "0000000000000020"]
    );
    assert_eq!(lines[12..], ["NoNewPrivs:\t1", "out"]);
}

#[test]
fn the_personality_and_the_scheduler_are_the_specs() {
    let bench = Bench::new();
    // The nice value and the policy (proc(5)); 3 is SCHED_BATCH.
    let printed = bench.shell("uname -m; cut -d ' ' -f 19,41 /proc/self/stat", |spec| {
        spec["linux"]["personality"] = json!({"domain": "LINUX32"});
        spec["process"]["scheduler"] = json!({"policy": "SCHED_BATCH", "nice": 5});
    });
    assert_eq!(printed, "i686\n5 3\n");
}

#[test]
fn the_attributes_of_the_scheduler_are_the_specs() {
    let bench = Bench::new();
    // chrt(1) names the process, which is the container's init.
    let shown = |scheduler: serde_json::Value| {
        let mut spec = bench.spec(&["chrt", "--pid", "1"]);
        spec["process"]["scheduler"] = scheduler;
        let outcome = bench.run(&spec).unwrap();
        assert_eq!(outcome.status, 0, "{}", outcome.stderr);
        let values = outcome.stdout.lines().map(|line| line.rsplit(' ').next().unwrap().to_owned());
        values.collect::<Vec<_>>()
    };
    assert_eq!(shown(json!({"policy": "SCHED_RR", "priority": 7})), ["SCHED_RR", "7"]);
    let deadline = json!({
        "policy": "SCHED_DEADLINE", "runtime": 10_000_000, "deadline": 20_000_000, "period": 30_000_000,
        "flags": ["SCHED_FLAG_RESET_ON_FORK"]
    });
    let expected = ["SCHED_DEADLINE|SCHED_RESET_ON_FORK", "0", "10000000/20000000/30000000"];
    assert_eq!(shown(deadline), expected);
}

#[test]
fn effective_and_permitted_capabilities_hold_until_the_program_is_executed() {
    let bench = Bench::new();
    let closed = bench.root().join("closed");
    fs::create_dir(&closed).unwrap();
    fs::copy("/usr/bin/true", closed.join("true")).unwrap();
    fs::set_permissions(&closed, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    let run = |effective: &[&str], permitted: &[&str]| {
        let mut spec = bench.spec(&["/closed/true"]);
        spec["process"]["user"] = json!({"uid": 1234, "gid": 1234});
        spec["process"]["capabilities"] =
            json!({"bounding": permitted, "effective": effective, "permitted": permitted});
        bench.run(&spec).map(|outcome| outcome.status).map_err(|error| error.to_string())
    };
    let search = ["CAP_DAC_READ_SEARCH"];
    assert_eq!(run(&search, &search), Ok(0));
    let forbidden = r#"exec: "/closed/true": stat /closed/true: permission denied"#;
    assert_eq!(run(&[], &search), Err(forbidden.to_owned()));
    // More than is permitted.
    assert_eq!(
        run(&search, &[]),
        Err("process.capabilities: Operation not permitted (os error 1)".to_owned())
    );
}

#[test]
fn without_capabilities_in_the_spec_there_are_none() {
    let bench = Bench::new();
    let printed = bench.shell("grep Cap /proc/self/status", |_| {});
    for line in printed.lines() {
        assert!(line.ends_with("0000000000000000"), "{line}");
    }
}

#[test]
fn nothing_of_the_agent_leaks_in() {
    let bench = Bench::new();
    let printed = bench.shell("ls /proc/self/fd; grep -E 'Sig(Blk|Ign)' /proc/self/status; env", |_| {});
    let lines: Vec<&str> = printed.lines().collect();
    // The fourth is ls's own, of the directory.
    assert_eq!(lines[..4], ["0", "1", "2", "3"]);
    assert_eq!(lines[4], "SigBlk:\t0000000000000000");
    assert_eq!(lines[5], "SigIgn:\t0000000000000000");
    let mut variables: Vec<&str> = lines[6..].iter().map(|line| line.split('=').next().unwrap()).collect();
    variables.sort_unstable();
    assert_eq!(variables, ["HOME", "PATH", "PWD"]);
}

#[test]
fn devices_and_links_are_there() {
    let bench = Bench::new();
    let printed = bench.shell(
        "stat -c '%n %t:%T %a %u' /dev/null /dev/zero /dev/full /dev/random /dev/urandom /dev/tty /dev/extra; \
         readlink /dev/fd /dev/stdin /dev/stdout /dev/stderr /dev/ptmx; test -c /dev/pts/ptmx",
        |spec| {
            spec["linux"]["devices"] = json!([
                {"path": "/dev/extra", "type": "c", "major": 1, "minor": 3, "fileMode": 384, "uid": 5, "gid": 5}
            ]);
        },
    );
    let expected = "/dev/null 1:3 666 0\n/dev/zero 1:5 666 0\n/dev/full 1:7 666 0\n/dev/random 1:8 666 0\n\
                    /dev/urandom 1:9 666 0\n/dev/tty 5:0 666 0\n/dev/extra 1:3 600 5\n\
                    /proc/self/fd\n/proc/self/fd/0\n/proc/self/fd/1\n/proc/self/fd/2\npts/ptmx\n";
    assert_eq!(printed, expected);
}

#[test]
fn masked_and_read_only_paths_hold() {
    let bench = Bench::new();
    fs::create_dir_all(bench.root().join("secret/deep")).unwrap();
    fs::create_dir_all(bench.root().join("hidden")).unwrap();
    fs::write(bench.root().join("secret/file"), "secret").unwrap();
    fs::create_dir(bench.root().join("kept")).unwrap();
    let printed = bench.shell(
        "cat /secret/file /proc/timer_list; ls -A /secret/deep /hidden; \
         for path in /secret/deep/x /hidden/x /kept/x /proc/sys/kernel/hostname /x /sys/x /low/x; do \
            (echo text > $path) 2>/dev/null && echo wrote $path; done; \
         echo text > /volume/x && echo wrote the volume",
        |spec| {
            spec["root"]["readonly"] = json!(true);
            spec["linux"]["maskedPaths"] =
                json!(["/secret/file", "/secret/deep", "/hidden", "/proc/timer_list", "/not/there"]);
            spec["linux"]["readonlyPaths"] = json!(["/proc/sys", "/kept", "/not/there"]);
            let mounts = spec["mounts"].as_array_mut().unwrap();
            mounts.push(json!({"destination": "/volume", "source": bench.volume(), "options": ["bind"]}));
            mounts.push(json!({"destination": "/low", "type": "tmpfs", "options": ["ro"]}));
            mounts.push(json!({"destination": "/low/point", "type": "tmpfs"}));
        },
    );
    assert_eq!(printed, "/hidden:\n\n/secret/deep:\nwrote the volume\n");
    assert!(bench.volume().join("x").exists());
}

#[test]
fn a_bind_mount_is_read_only_alone_or_with_what_is_mounted_below_it() {
    let bench = Bench::new();
    let below = bench.volume().join("below");
    fs::create_dir(&below).unwrap();
    mount(Some("tmpfs"), &below, Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
    // What is written to: the mount itself, and what is mounted below it.
    let written = |options: &[&str]| {
        let script =
            "for place in /volume/x /volume/below/x; do (echo > $place) 2>&- && echo $place; done; true";
        bench.shell(script, |spec| {
            let mounts = spec["mounts"].as_array_mut().unwrap();
            mounts.push(json!({"destination": "/volume", "source": bench.volume(), "options": options}));
        })
    };
    assert_eq!(written(&["rbind", "rw"]), "/volume/x\n/volume/below/x\n");
    assert_eq!(written(&["rbind", "ro"]), "/volume/below/x\n");
    assert_eq!(written(&["rbind", "rro"]), "");
    assert_eq!(written(&["rbind", "ro", "rro"]), "");
    // What is mounted below is not there.
    assert_eq!(written(&["bind", "ro"]), "");
}

#[test]
fn links_of_an_image_do_not_lead_out_of_it() {
    let bench = Bench::new();
    let outside = bench.directory.path().join("outside");
    fs::create_dir(&outside).unwrap();
    std::os::unix::fs::symlink(&outside, bench.root().join("data")).unwrap();
    fs::write(bench.volume().join("file"), "from the volume").unwrap();
    let printed = bench.shell("cat /data/deep/file", |spec| {
        let mounts = spec["mounts"].as_array_mut().unwrap();
        mounts.push(
            json!({"destination": "/data/deep", "source": bench.volume(), "options": ["rbind", "rro"]}),
        );
        mounts.push(
            json!({"destination": "/data/file", "source": bench.volume().join("file"), "options": ["bind"]}),
        );
    });
    assert_eq!(printed, "from the volume");
    assert_eq!(fs::read_dir(&outside).unwrap().count(), 0);
}

#[test]
fn a_mount_that_fails_is_named_with_the_kernels_reason() {
    let bench = Bench::new();
    let cases = [
        (json!({"destination": "/a", "source": "/not/there", "options": ["bind"]}), "source /not/there"),
        (json!({"destination": "/a", "type": "tmpfs", "options": ["colour=red"]}), "option \"colour\""),
        (json!({"destination": "/a", "type": "nofs"}), "type \"nofs\""),
    ];
    for (mount, expected) in cases {
        let mut spec = bench.spec(&["true"]);
        spec["mounts"] = json!([mount]);
        let error = bench.create(&spec, null()).err().unwrap().to_string();
        assert!(error.starts_with("mounts[0] (/a): ") && error.contains(expected), "{error}");
    }
    let mut spec = bench.spec(&["true"]);
    spec["root"]["path"] = json!("/not/there");
    let error = bench.create(&spec, null()).err().unwrap().to_string();
    assert!(error.starts_with("root /not/there: "), "{error}");
}

#[test]
fn sysctls_are_set_in_the_containers_namespaces() {
    let bench = Bench::new();
    let printed = bench.shell("cat /proc/sys/net/core/somaxconn /proc/sys/kernel/shm_rmid_forced", |spec| {
        spec["linux"]["sysctl"] = json!({"net.core.somaxconn": "77", "kernel.shm_rmid_forced": "1"});
        spec["domainname"] = json!("domain");
    });
    assert_eq!(printed, "77\n1\n");
}

#[test]
fn a_container_that_is_never_started_can_be_killed() {
    let bench = Bench::new();
    let CreatedInit { child, control, .. } = bench.create(&bench.spec(&["true"]), null()).unwrap();
    syscall::kill(child.pid, libc::SIGKILL as u32).unwrap();
    assert_eq!(bench.status(child), 137);
    assert!(matches!(bench.runtime.block_on(control.start()), Err(ProcessError::Ended(_))));
}

#[test]
fn input_reaches_the_container() {
    let bench = Bench::new();
    let (stdin, mut stdin_writer) = std::io::pipe().unwrap();
    let (mut stdout, stdout_writer) = std::io::pipe().unwrap();
    let stdio = ChildStdio { stdin: stdin.into(), stdout: stdout_writer.into(), stderr: null().stderr };
    let init = bench.create(&bench.spec(&["cat"]), stdio).unwrap();
    bench.runtime.block_on(init.control.start()).unwrap();
    stdin_writer.write_all(b"hello").unwrap();
    drop(stdin_writer);
    let mut echoed = String::new();
    stdout.read_to_string(&mut echoed).unwrap();
    assert_eq!(echoed, "hello");
}

#[test]
fn clocks_of_a_time_namespace_differ_for_all_processes() {
    const DAYS: u64 = 100 * 24 * 3600;
    let bench = Bench::new();
    let mut spec = bench.spec(&["sleep", "1000"]);
    spec["linux"]["namespaces"].as_array_mut().unwrap().push(json!({"type": "time"}));
    spec["linux"]["timeOffsets"] =
        json!({"boottime": {"secs": DAYS, "nanosecs": 7}, "monotonic": {"secs": DAYS, "nanosecs": 9}});
    let CreatedInit { child, pidfd, control, .. } = bench.create(&spec, null()).unwrap();
    bench.runtime.block_on(control.start()).unwrap();
    let script = "cut -d. -f1 /proc/uptime; cat /proc/self/timens_offsets; \
                  test $(readlink /proc/1/ns/time) = $(readlink /proc/self/ns/time) && echo same";
    let process = json!({
        "user": {"uid": 0, "gid": 0}, "args": ["sh", "-c", script], "env": ["PATH=/usr/bin:/bin"], "cwd": "/"
    });
    let printed = bench.exec_to_end(&pidfd, &process).unwrap().stdout;
    syscall::kill(child.pid, libc::SIGKILL as u32).unwrap();
    assert_eq!(bench.status(child), 137);
    let mut lines = printed.lines();
    let uptime: u64 = lines.next().unwrap().parse().unwrap();
    assert!((DAYS..2 * DAYS).contains(&uptime), "{printed}");
    let offsets: Vec<_> = lines.map(|line| line.split_whitespace().collect::<Vec<_>>()).collect();
    let days = DAYS.to_string();
    assert_eq!(offsets, [vec!["monotonic", &days, "9"], vec!["boottime", &days, "7"], vec!["same"]]);
}
