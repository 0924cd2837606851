//! System call filters on processes.

use bulkhead_agent::{stage::launcher::CreatedInit, syscall};
use serde_json::{Value, json};

use crate::bench::{Bench, Outcome, null};

/// Everything is allowed but this, for which mkdir(2) is asked.
fn but_for_mkdir(action: Value) -> Value {
    let mut rule = action;
    rule["names"] = json!(["mkdir"]);
    json!({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [rule]})
}

fn run(args: &[&str], seccomp: Value, no_new_privileges: bool) -> Outcome {
    let bench = Bench::new();
    let mut spec = bench.spec(args);
    spec["process"]["noNewPrivileges"] = json!(no_new_privileges);
    spec["process"]["user"]["uid"] = json!(1234);
    spec["linux"]["seccomp"] = seccomp;
    bench.run(&spec).unwrap()
}

#[test]
fn the_filter_is_there_whatever_the_process_may_gain() {
    let filter = but_for_mkdir(json!({"action": "SCMP_ACT_ERRNO", "errnoRet": 95}));
    let script = "grep -E '^(CapEff|NoNewPrivs|Seccomp):' /proc/self/status; mkdir /dev/shm";
    for (no_new_privileges, shown) in [(false, 0), (true, 1)] {
        let outcome = run(&["sh", "-c", script], filter.clone(), no_new_privileges);
        let expected = format!("CapEff:\t0000000000000000\nNoNewPrivs:\t{shown}\nSeccomp:\t2\n");
        assert_eq!((outcome.status, outcome.stdout), (1, expected));
        assert!(outcome.stderr.contains("Operation not supported"), "{}", outcome.stderr);
    }
}

#[test]
fn a_forbidden_call_ends_the_process() {
    let filter = but_for_mkdir(json!({"action": "SCMP_ACT_KILL_PROCESS"}));
    assert_eq!(run(&["mkdir", "/dev/shm"], filter, true).status, 128 + libc::SIGSYS as u32);
}

#[test]
fn with_no_new_privileges_a_filter_need_not_allow_the_setup() {
    let setup = ["setuid", "setgid", "setgroups", "capset", "prctl", "close_range", "rt_sigaction"];
    let filter = json!({
        "defaultAction": "SCMP_ACT_ALLOW",
        "syscalls": [{"names": setup, "action": "SCMP_ACT_KILL_PROCESS"}],
    });
    assert_eq!(run(&["true"], filter, true).status, 0);
}

#[test]
fn a_filter_without_execve_is_named() {
    let bench = Bench::new();
    let mut spec = bench.spec(&["true"]);
    spec["process"]["noNewPrivileges"] = json!(true);
    spec["linux"]["seccomp"] = json!({
        "defaultAction": "SCMP_ACT_ALLOW",
        "syscalls": [{"names": ["execve"], "action": "SCMP_ACT_ERRNO", "errnoRet": 13}],
    });
    let CreatedInit { control, .. } = bench.create(&spec, null()).unwrap();
    let error = bench.runtime.block_on(control.start()).unwrap_err().to_string();
    assert_eq!(error, "exec /usr/bin/true: permission denied");
}

#[test]
fn a_process_joins_under_a_filter_that_lets_nobody_clone() {
    for (no_new_privileges, action) in
        [(false, "SCMP_ACT_ERRNO"), (false, "SCMP_ACT_KILL_PROCESS"), (true, "SCMP_ACT_ERRNO")]
    {
        let bench = Bench::new();
        let mut spec = bench.spec(&["sleep", "1000"]);
        spec["process"]["noNewPrivileges"] = json!(no_new_privileges);
        let names = ["clone", "clone3", "fork", "vfork"];
        spec["linux"]["seccomp"] =
            json!({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"names": names, "action": action}]});
        let CreatedInit { child, pidfd, control, .. } = bench.create(&spec, null()).unwrap();
        bench.runtime.block_on(control.start()).unwrap();
        let mut process = spec["process"].clone();
        process["args"] = json!(["sed", "-n", "/^Seccomp:/p", "/proc/self/status"]);
        let outcome = bench.exec_with(&pidfd, &process, &spec).unwrap();
        assert_eq!((outcome.status, outcome.stdout.as_str()), (0, "Seccomp:\t2\n"), "{}", outcome.stderr);
        syscall::kill(child.pid, libc::SIGKILL as u32).unwrap();
        bench.status(child);
    }
}
