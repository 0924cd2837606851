//! System call filters: containerd's default profile, and profiles of the user's own.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::Case;
use crate::command::Finished;
use crate::ctr::{Container, Host};
use crate::fixtures::scratch;
use crate::probe::{self, Bits};

pub(super) const CASES: &[Case] = &[
    Case::both("without_a_profile_there_is_no_filter", no_profile),
    Case::both("the_default_profile_lets_a_shell_work", default_lets_work),
    Case::both("the_default_profile_refuses_what_it_should", default_refuses),
    Case::both("the_default_profile_holds_for_32_bit_programs", default_refuses_32_bit),
    Case::both("a_rule_has_an_error_of_its_own", own_error),
    Case::both("a_rule_holds_for_certain_arguments_only", arguments),
    Case::both("an_exception_stands_above_a_rule_for_certain_arguments", exception),
    Case::both("a_call_newer_than_the_profile_does_not_exist", newer_call),
    Case::both("a_forbidden_call_kills_the_process", kills),
    Case::both("a_call_that_no_kernel_knows_is_ignored", unknown_call),
    Case::both("an_added_process_is_filtered_too", added_process),
    Case::both("a_user_is_filtered_too", user),
    Case::both("a_user_who_may_gain_privileges_is_filtered_too", user_with_new_privileges),
];

const EPERM: i32 = 1;
const EINVAL: i32 = 22;
const ENOSYS: i32 = 38;
/// Of no call that the cases make.
const EOPNOTSUPP: i32 = 95;
/// 128 and SIGSYS.
const KILLED: i32 = 159;

const CLONE_NEWUSER: u32 = 0x1000_0000;
const AF_UNIX: u32 = 1;
const SOCK_STREAM: u32 = 1;
const AF_VSOCK: u32 = 40;

/// Numbers of system calls, x86_64.
const SOCKET: u32 = 41;
const PERSONALITY: u32 = 135;
const GETPID: u32 = 39;
const UNSHARE: u32 = 272;
const CLONE3: u32 = 435;
/// Added to the number of a call of x32.
const X32: u32 = 0x4000_0000;

/// Numbers of system calls, i386.
const SOCKET_32: u32 = 359;
const SOCKETCALL_32: u32 = 102;
const UNSHARE_32: u32 = 310;
const GETPID_32: u32 = 20;

const DEFAULT: [&str; 1] = ["--seccomp"];

/// A directory of probes that containers have at /probes.
struct Probes {
    directory: TempDir,
    script: String,
}

impl Probes {
    fn new() -> Result<Self> {
        Ok(Self { directory: scratch()?, script: String::new() })
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Adds one; its name is also what it answers under.
    fn with(mut self, name: &str, bits: Bits, number: u32, arguments: [u32; 3]) -> Result<Self> {
        probe::write(&self.path().join(name), bits, number, arguments)?;
        self.script += &format!("/probes/{name}; echo {name}=$?\n");
        Ok(self)
    }

    /// Makes all calls in a container with these flags.
    fn run(&self, host: &Host, flags: &[&str]) -> Result<Finished> {
        let container =
            host.container().flags(flags.iter().copied()).bind(self.path(), "/probes", "rbind:ro");
        container.run(&["sh", "-c", &self.script])
    }
}

/// A profile of the user's own, in a file.
struct Profile {
    directory: TempDir,
}

impl Profile {
    fn new(json: &Value) -> Result<Self> {
        let profile = Self { directory: scratch()? };
        fs::write(profile.file(), json.to_string()).context("cannot write the profile")?;
        Ok(profile)
    }

    /// One that allows everything but what these rules say.
    fn allowing_but(rules: &[Value]) -> Result<Self> {
        Self::new(&json!({ "defaultAction": "SCMP_ACT_ALLOW", "syscalls": rules }))
    }

    fn file(&self) -> String {
        self.directory.path().join("profile.json").display().to_string()
    }

    fn container<'h>(&self, host: &'h Host) -> Container<'h> {
        host.container().flags(["--seccomp", "--seccomp-profile", &self.file()])
    }
}

/// A rule that makes a call fail.
fn failing(name: &str) -> Value {
    json!({ "names": [name], "action": "SCMP_ACT_ERRNO", "errnoRet": EOPNOTSUPP })
}

/// Expects this error of each of these probes; 0: it succeeded.
fn expect(finished: &Finished, errors: &[(&str, i32)]) -> Result<()> {
    for (probe, error) in errors {
        finished.says(probe, &error.to_string())?;
    }
    Ok(())
}

fn no_profile(host: &Host) -> Result<()> {
    host.sh("grep Seccomp: /proc/self/status")?.succeeds()?.prints("Seccomp:\t0\n")?;
    // So that these are known to be the filter's doing in the other cases.
    let probes = Probes::new()?
        .with("user_namespace", Bits::B64, UNSHARE, [CLONE_NEWUSER, 0, 0])?
        .with("clone3", Bits::B64, CLONE3, [0; 3])?
        .with("unshare_32", Bits::B32, UNSHARE_32, [CLONE_NEWUSER, 0, 0])?;
    let finished = probes.run(host, &[])?;
    expect(&finished, &[("user_namespace", 0), ("clone3", EINVAL), ("unshare_32", 0)])
}

fn default_lets_work(host: &Host) -> Result<()> {
    let script = "grep Seccomp: /proc/self/status
        mkdir -p /tmp/a/b && echo text > /tmp/a/b/file && mv /tmp/a/b/file /tmp/a/moved && ln -s moved /tmp/a/link
        sort /tmp/a/link | tr a-z A-Z; chmod 600 /tmp/a/moved; chown 12:34 /tmp/a/moved; stat -c %a:%u:%g /tmp/a/moved
        tar -C /tmp -cf - a | tar -tf - | wc -l; rm -r /tmp/a; sleep 0.01 & wait; date +%s > /dev/null; df / > /dev/null";
    let finished = host.container().flags(DEFAULT).run(&["sh", "-c", script])?;
    finished.succeeds()?.prints("Seccomp:\t2\nTEXT\n600:12:34\n4\n")?;
    Ok(())
}

fn default_refuses(host: &Host) -> Result<()> {
    let probes = Probes::new()?
        .with("user_namespace", Bits::B64, UNSHARE, [CLONE_NEWUSER, 0, 0])?
        .with("clone3", Bits::B64, CLONE3, [0; 3])?
        .with("socket_unix", Bits::B64, SOCKET, [AF_UNIX, SOCK_STREAM, 0])?
        .with("socket_vsock", Bits::B64, SOCKET, [AF_VSOCK, SOCK_STREAM, 0])?
        .with("personality_known", Bits::B64, PERSONALITY, [8, 0, 0])?
        .with("personality_other", Bits::B64, PERSONALITY, [9, 0, 0])?
        .with("x32", Bits::B64, X32 + GETPID, [0; 3])?;
    let finished = probes.run(host, &DEFAULT)?;
    expect(
        &finished,
        &[
            ("user_namespace", EPERM),
            ("clone3", ENOSYS),
            ("socket_unix", 0),
            ("socket_vsock", EPERM),
            ("personality_known", 0),
            ("personality_other", EPERM),
            ("x32", ENOSYS),
        ],
    )
}

fn default_refuses_32_bit(host: &Host) -> Result<()> {
    let probes = Probes::new()?
        .with("getpid", Bits::B32, GETPID_32, [0; 3])?
        .with("user_namespace", Bits::B32, UNSHARE_32, [CLONE_NEWUSER, 0, 0])?
        .with("clone3", Bits::B32, CLONE3, [0; 3])?
        .with("socket_unix", Bits::B32, SOCKET_32, [AF_UNIX, SOCK_STREAM, 0])?
        .with("socket_vsock", Bits::B32, SOCKET_32, [AF_VSOCK, SOCK_STREAM, 0])?
        // No call of socketcall(2).
        .with("socketcall", Bits::B32, SOCKETCALL_32, [999, 0, 0])?;
    let finished = probes.run(host, &DEFAULT)?;
    expect(
        &finished,
        &[
            ("getpid", 0),
            ("user_namespace", EPERM),
            ("clone3", ENOSYS),
            ("socket_unix", 0),
            ("socket_vsock", EPERM),
            ("socketcall", EINVAL),
        ],
    )
}

fn own_error(host: &Host) -> Result<()> {
    let profile = Profile::allowing_but(&[failing("mkdir")])?;
    let finished = profile.container(host).run(&["mkdir", "/tmp/directory"])?;
    finished.exits(1)?.fails_with("Operation not supported")?;
    profile.container(host).run(&["touch", "/tmp/file"])?.succeeds()?;
    Ok(())
}

/// A rule that makes personality(2) fail for these arguments.
fn personality(args: Value) -> Value {
    let mut rule = failing("personality");
    rule["args"] = args;
    rule
}

/// personality(0) to personality(9), under this profile: the arguments for which it fails.
fn personalities(host: &Host, profile: &Profile) -> Result<Vec<u32>> {
    let mut probes = Probes::new()?;
    for argument in 0..10 {
        probes = probes.with(&format!("p{argument}"), Bits::B64, PERSONALITY, [argument, argument, 0])?;
    }
    let finished = probes.run(host, &["--seccomp", "--seccomp-profile", &profile.file()])?;
    let mut failed = Vec::new();
    for argument in 0..10 {
        match finished.value(&format!("p{argument}"))?.parse() {
            Ok(0) => {}
            Ok(EOPNOTSUPP) => failed.push(argument),
            other => {
                finished.check(&format!("0 or {EOPNOTSUPP} of argument {argument}, not {other:?}"), false)?;
            }
        }
    }
    Ok(failed)
}

fn arguments(host: &Host) -> Result<()> {
    let arg = |index: u32, op: &str, value: u64, two: u64| json!({ "index": index, "op": op, "value": value, "valueTwo": two });
    for (args, expected) in [
        (json!([arg(0, "SCMP_CMP_EQ", 3, 0)]), vec![3]),
        (json!([arg(0, "SCMP_CMP_LT", 2, 0)]), vec![0, 1]),
        (json!([arg(0, "SCMP_CMP_MASKED_EQ", 6, 4)]), vec![4, 5]),
        // Both, of different arguments.
        (json!([arg(0, "SCMP_CMP_GE", 5, 0), arg(1, "SCMP_CMP_LE", 6, 0)]), vec![5, 6]),
        // Either, of the same.
        (json!([arg(0, "SCMP_CMP_GT", 8, 0), arg(0, "SCMP_CMP_EQ", 1, 0)]), vec![1, 9]),
    ] {
        let failed = personalities(host, &Profile::allowing_but(&[personality(args.clone())])?)?;
        anyhow::ensure!(
            failed == expected,
            "expected  {args} to hold for {expected:?}\ncame      {failed:?}"
        );
    }
    Ok(())
}

fn exception(host: &Host) -> Result<()> {
    let one = personality(json!([{ "index": 0, "op": "SCMP_CMP_EQ", "value": 1 }]));
    let failed = personalities(host, &Profile::allowing_but(&[one, failing("personality")])?)?;
    anyhow::ensure!(failed.len() == 10, "expected  all to fail\ncame      {failed:?}");
    Ok(())
}

/// What containerd's shim, runc and the probe need.
const NEEDED: &str = "\
    brk capget capset chdir clock_gettime clone close dup3 epoll_create1 epoll_ctl epoll_pwait eventfd2 \
    execve exit exit_group faccessat fcntl fstat fstatfs futex getcwd getdents64 getegid geteuid getgid \
    getpid getppid getrandom gettid getuid kill lseek madvise mmap mprotect munmap nanosleep newfstatat \
    openat pipe2 prctl prlimit64 read readlink readlinkat restart_syscall rt_sigaction rt_sigprocmask \
    rt_sigreturn sched_getaffinity sched_yield setgid setgroups setuid sigaltstack statfs statx tgkill write";

fn newer_call(host: &Host) -> Result<()> {
    let allowed =
        json!({ "names": NEEDED.split_whitespace().collect::<Vec<_>>(), "action": "SCMP_ACT_ALLOW" });
    let profile = Profile::new(&json!({
        "defaultAction": "SCMP_ACT_ERRNO", "defaultErrnoRet": EOPNOTSUPP, "syscalls": [allowed]
    }))?;
    let probes =
        Probes::new()?.with("older", Bits::B64, UNSHARE, [0; 3])?.with("newer", Bits::B64, CLONE3, [0; 3])?;
    for (probe, error) in [("older", EOPNOTSUPP), ("newer", ENOSYS)] {
        let container = profile.container(host).bind(probes.path(), "/probes", "rbind:ro");
        container.run(&[&format!("/probes/{probe}")])?.exits(error).context(probe)?;
    }
    Ok(())
}

fn kills(host: &Host) -> Result<()> {
    for action in ["SCMP_ACT_KILL", "SCMP_ACT_KILL_PROCESS", "SCMP_ACT_TRAP"] {
        let profile = Profile::allowing_but(&[json!({ "names": ["mkdir"], "action": action })])?;
        profile.container(host).run(&["mkdir", "/tmp/directory"])?.exits(KILLED).context(action)?;
    }
    Ok(())
}

fn unknown_call(host: &Host) -> Result<()> {
    let profile = Profile::allowing_but(&[failing("no_such_system_call"), failing("mkdir")])?;
    profile.container(host).run(&["mkdir", "/tmp/directory"])?.exits(1)?;
    Ok(())
}

fn added_process(host: &Host) -> Result<()> {
    let profile = Profile::allowing_but(&[failing("mkdir")])?;
    let task = profile.container(host).detach(&["sleep", "1000"])?;
    let status = task.exec(&["grep", "Seccomp:", "/proc/self/status"])?;
    status.succeeds()?.prints("Seccomp:\t2\n")?;
    let finished = task.exec(&["mkdir", "/tmp/directory"])?;
    finished.exits(1)?.fails_with("Operation not supported")?;
    Ok(())
}

/// What a user with this profile and these flags is.
fn status_of_user(host: &Host, flags: &[&str], expected: &str) -> Result<()> {
    let script = "id -u; grep -E '^(CapEff|NoNewPrivs|Seccomp):' /proc/self/status";
    let container = host.container().flags(DEFAULT).flags(["--user", "1234"]).flags(flags.iter().copied());
    container.run(&["sh", "-c", script])?.succeeds()?.prints(expected)?;
    Ok(())
}

fn user(host: &Host) -> Result<()> {
    status_of_user(host, &[], "1234\nCapEff:\t0000000000000000\nNoNewPrivs:\t1\nSeccomp:\t2\n")
}

fn user_with_new_privileges(host: &Host) -> Result<()> {
    let expected = "1234\nCapEff:\t0000000000000000\nNoNewPrivs:\t0\nSeccomp:\t2\n";
    status_of_user(host, &["--allow-new-privs"], expected)
}
