//! Processes that join a container.

use std::{
    fs,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use bulkhead_agent::{
    container::{Container, ContainerError, Environment, ExecRequest, Joined, Request, StreamIds},
    stage::launcher::CreatedInit,
    syscall,
};
use serde_json::{Value, json};

use crate::bench::{Bench, Outcome, launcher, null};

const NO_STREAMS: StreamIds = StreamIds { stdin: 0, stdout: 0, stderr: 0 };

/// The `process` object of a program.
fn process(args: &[&str]) -> Value {
    json!({"user": {"uid": 0, "gid": 0}, "args": args, "env": ["PATH=/usr/bin:/bin"], "cwd": "/"})
}

fn shell(script: &str) -> Value {
    process(&["sh", "-c", script])
}

/// A container that only waits, and whose init's process id, 1, everything in it can see.
fn waiting(bench: &Bench) -> CreatedInit {
    bench.create(&bench.spec(&["sleep", "1000"]), null()).unwrap()
}

/// Runs a process in a started container; the container has ended when this returns.
fn run_next_to_init(process: &Value) -> Outcome {
    let bench = Bench::new();
    let CreatedInit { child, pidfd, control, .. } = waiting(&bench);
    bench.runtime.block_on(control.start()).unwrap();
    let outcome = bench.exec_to_end(&pidfd, process);
    syscall::kill(child.pid, libc::SIGKILL as u32).unwrap();
    assert_eq!(bench.status(child), 137);
    outcome.unwrap()
}

#[test]
fn output_and_exit_status_come_back() {
    let outcome = run_next_to_init(&shell("echo out; echo err >&2; exit 7"));
    assert_eq!((outcome.status, outcome.stdout.as_str(), outcome.stderr.as_str()), (7, "out\n", "err\n"));
}

#[test]
fn the_process_is_what_its_json_says() {
    let mut process = shell(
        "id -u; id -g; id -G; pwd; umask; ulimit -n; cat /proc/self/oom_score_adj; echo $COLOUR $HOME; \
         grep -E 'CapEff|CapBnd|NoNewPrivs' /proc/self/status; echo out > /dev/stdout",
    );
    process["user"] = json!({"uid": 1234, "gid": 2345, "additionalGids": [3456], "umask": 0o027});
    process["env"] = json!(["PATH=/usr/bin:/bin", "COLOUR=red"]);
    process["cwd"] = json!("/usr/bin");
    process["rlimits"] = json!([{"type": "RLIMIT_NOFILE", "soft": 77, "hard": 99}]);
    process["oomScoreAdj"] = json!(500);
    process["noNewPrivileges"] = json!(true);
    let sets = json!(["CAP_KILL"]);
    process["capabilities"] =
        json!({"bounding": sets, "effective": sets, "permitted": sets, "inheritable": sets, "ambient": sets});
    let outcome = run_next_to_init(&process);
    let expected = "1234\n2345\n2345 3456\n/usr/bin\n0027\n77\n500\nred /\n\
                    CapEff:\t0000000000000020\nCapBnd:\t0000000000000020\nNoNewPrivs:\t1\nout\n";
    assert_eq!((outcome.stdout.as_str(), outcome.stderr.as_str()), (expected, ""));
}

#[test]
fn it_is_in_the_containers_namespaces_and_cgroup() {
    let bench = Bench::new();
    let CreatedInit { child, pidfd, control, .. } = waiting(&bench);
    bench.runtime.block_on(control.start()).unwrap();
    let script = "for name in pid mnt ipc uts net cgroup; do \
                      test $(readlink /proc/1/ns/$name) = $(readlink /proc/self/ns/$name) || echo not in $name; \
                  done; hostname; cat /proc/self/cgroup; tr '\\0' ' ' < /proc/1/cmdline; ls /";
    let outcome = bench.exec_to_end(&pidfd, &shell(script)).unwrap();
    let lines: Vec<&str> = outcome.stdout.lines().collect();
    assert_eq!(lines[0], "inside", "{}{}", outcome.stdout, outcome.stderr);
    assert!(lines.contains(&"0::/"), "{}", outcome.stdout);
    assert!(
        outcome.stdout.ends_with("sleep 1000 bin\ndev\nlib\nlib64\nproc\nsys\nusr\n"),
        "{}",
        outcome.stdout
    );

    let sleeping = bench.exec(&pidfd, &process(&["sleep", "1000"]), null()).unwrap();
    let members = fs::read_to_string(bench.cgroup.join("cgroup.procs")).unwrap();
    let is_member = |pid: i32| members.lines().any(|line| line == pid.to_string());
    assert!(is_member(child.pid) && is_member(sleeping.pid), "{members}");
    // The kernel ends what is in the pid namespace with its init.
    syscall::kill(child.pid, libc::SIGKILL as u32).unwrap();
    assert_eq!((bench.status(child), bench.status(sleeping)), (137, 137));
}

#[test]
fn nothing_of_the_agent_leaks_in() {
    let outcome =
        run_next_to_init(&shell("ls /proc/self/fd; grep -E 'Sig(Blk|Ign)' /proc/self/status; env | sort"));
    let expected = "0\n1\n2\n3\nSigBlk:\t0000000000000000\nSigIgn:\t0000000000000000\n\
                    HOME=/\nPATH=/usr/bin:/bin\nPWD=/\n";
    // The fourth descriptor is ls's own, of the directory.
    assert_eq!(outcome.stdout, expected);
}

#[test]
fn a_process_joins_a_container_that_is_not_started_and_sees_nothing_of_the_agent() {
    let bench = Bench::new();
    let CreatedInit { child, pidfd, control, .. } = waiting(&bench);
    let look =
        shell("for link in exe root cwd fd/0; do readlink /proc/1/$link; done; head -c 1 /proc/1/maps");
    // Process 1 is still the agent's program, which is not dumpable: of the same user and yet closed.
    assert_eq!(bench.exec_to_end(&pidfd, &look).unwrap().stdout, "");
    bench.runtime.block_on(control.start()).unwrap();
    let printed = bench.exec_to_end(&pidfd, &look).unwrap().stdout;
    assert!(printed.starts_with("/usr/") && printed.lines().count() == 5, "{printed}");
    syscall::kill(child.pid, libc::SIGKILL as u32).unwrap();
    bench.status(child);
}

#[test]
fn what_cannot_be_executed_is_named() {
    let bench = Bench::new();
    let CreatedInit { child, pidfd, control: _waits, .. } = waiting(&bench);
    let script = bench.root().join("text");
    fs::write(&script, "no program").unwrap();
    fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let mut nowhere = process(&["true"]);
    nowhere["cwd"] = json!("/x");
    let cases = [
        (process(&["nope"]), r#"exec: "nope": executable file not found in $PATH"#),
        (process(&["/nope"]), r#"exec: "/nope": stat /nope: no such file or directory"#),
        (process(&["/dev/null"]), r#"exec: "/dev/null": permission denied"#),
        (process(&["/text"]), "exec /text: exec format error"),
        (nowhere, r#"chdir to cwd ("/x") set in config.json failed: no such file or directory"#),
    ];
    for (process, expected) in cases {
        let error = bench.exec(&pidfd, &process, null()).err().unwrap().to_string();
        assert_eq!(error, expected);
    }
    assert!(!bench.root().join("x").exists());
    syscall::kill(child.pid, libc::SIGKILL as u32).unwrap();
    bench.status(child);
}

/// A started container as the agent's sandbox holds it.
pub(crate) struct Running<'a> {
    bench: &'a Bench,
    environment: Environment,
    pub(crate) container: Arc<Container>,
}

impl<'a> Running<'a> {
    /// A container whose init waits.
    fn new(bench: &'a Bench, change: impl FnOnce(&mut Value)) -> Self {
        let mut spec = bench.spec(&["sleep", "1000"]);
        let mounts = spec["mounts"].as_array_mut().unwrap();
        mounts.push(json!({"destination": "/volume", "source": bench.volume(), "options": ["bind"]}));
        change(&mut spec);
        Self::start(bench, &spec, Vec::new(), false)
    }

    /// A container of a pod.
    pub(crate) fn start(bench: &'a Bench, spec: &Value, joined: Vec<Joined>, is_pause: bool) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::SeqCst);
        let request = Request {
            id: format!("bulkhead-test-exec-{}-{number}", std::process::id()),
            spec_json: spec.to_string().into_bytes(),
            stdio: NO_STREAMS,
            joined,
            is_pause,
            no_new_keyring: false,
            host_sockets: Vec::new(),
        };
        let environment =
            Environment { launcher: launcher(), streams: Arc::default(), reserve: Arc::default() };
        let container = bench.runtime.block_on(async {
            let container = Arc::new(Container::create(&environment, request).await.unwrap());
            Arc::clone(&container).start().await.unwrap();
            container
        });
        Self { bench, environment, container }
    }

    pub(crate) async fn exec(&self, id: &str, process: &Value) -> Result<i32, ContainerError> {
        let process_json = process.to_string().into_bytes();
        let request = ExecRequest { id: id.to_owned(), process_json, stdio: NO_STREAMS };
        self.container.exec(&self.environment, request).await
    }

    /// How a process ended; the container's init has no id.
    pub(crate) async fn status(&self, id: &str) -> u32 {
        self.container.process(id).unwrap().wait().await.unwrap().status
    }

    pub(crate) fn block_on<F: Future>(&self, future: F) -> F::Output {
        self.bench.runtime.block_on(future)
    }

    /// Kills the container, and waits for its end.
    async fn stop(&self) -> u32 {
        self.container.signal("", libc::SIGKILL as u32, false).unwrap();
        self.status("").await
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        // Also after a test that failed half-way.
        let _ = self.container.signal("", libc::SIGKILL as u32, true);
        let deleted = self.block_on(async {
            let _ = self.container.process("").unwrap().wait().await;
            self.container.delete().await
        });
        if !std::thread::panicking() {
            deleted.unwrap();
        }
    }
}

#[test]
fn signals_reach_the_process_that_is_meant() {
    let bench = Bench::new();
    let running = Running::new(&bench, |_| {});
    let container = &running.container;
    running.block_on(async {
        let pid = running.exec("one", &process(&["sleep", "1000"])).await.unwrap();
        assert!(container.pids().unwrap().contains(&(pid as u32)));
        running.exec("two", &process(&["sleep", "1000"])).await.unwrap();
        container.signal("one", libc::SIGTERM as u32, false).unwrap();
        assert_eq!(running.status("one").await, 143);
        let again = container.signal("one", libc::SIGTERM as u32, false);
        assert!(matches!(again, Err(ContainerError::Finished)));
        let unknown = container.signal("three", 0, false).unwrap_err().to_string();
        assert_eq!(unknown, "exec three not found");
        // Still there; and an id means nothing where all are meant.
        container.signal("two", 0, false).unwrap();
        container.signal("three", libc::SIGKILL as u32, true).unwrap();
        assert_eq!((running.status("two").await, running.status("").await), (137, 137));
    });
}

#[test]
fn ids_are_taken_until_the_process_is_forgotten() {
    let bench = Bench::new();
    let running = Running::new(&bench, |_| {});
    let container = &running.container;
    running.block_on(async {
        running.exec("id", &process(&["sleep", "1000"])).await.unwrap();
        let again = running.exec("id", &process(&["true"])).await;
        assert!(matches!(again, Err(ContainerError::ExecExists(id)) if id == "id"));
        assert!(matches!(running.exec("../id", &process(&["true"])).await, Err(ContainerError::Id(_))));
        container.signal("id", libc::SIGKILL as u32, false).unwrap();
        running.status("id").await;
        container.forget_exec("id");
        assert_eq!(container.process("id").err().unwrap().to_string(), "exec id not found");
        // An id that failed is free, too.
        assert!(running.exec("id", &process(&["nope"])).await.is_err());
        running.exec("id", &process(&["true"])).await.unwrap();
        assert_eq!(running.status("id").await, 0);
    });
}

#[test]
fn a_stopped_container_is_closed() {
    let bench = Bench::new();
    let running = Running::new(&bench, |_| {});
    running.block_on(async {
        // Nothing is told yet: a container on its way out is closed as well.
        running.container.signal("", libc::SIGKILL as u32, false).unwrap();
        for attempt in 0.. {
            match running.exec(&format!("early-{attempt}"), &process(&["true"])).await {
                Err(ContainerError::Stopped) if running.container.pids().unwrap().is_empty() => break,
                Err(ContainerError::Stopped) => {}
                other => drop(other.unwrap()),
            }
        }
        assert_eq!(running.status("").await, 137);
        let error = running.exec("late", &process(&["true"])).await.unwrap_err().to_string();
        assert_eq!(error, "cannot exec in a stopped container");
    });
}

#[test]
fn many_join_at_once() {
    const COUNT: u32 = 20;
    let bench = Bench::new();
    let running = Running::new(&bench, |_| {});
    running.block_on(async {
        let statuses = futures::future::join_all((0..COUNT).map(|number| {
            let running = &running;
            async move {
                let id = format!("exec-{number}");
                let script = format!("echo {number} > /volume/{id}; exit {number}");
                running.exec(&id, &shell(&script)).await.unwrap();
                running.status(&id).await
            }
        }));
        assert_eq!(statuses.await, (0..COUNT).collect::<Vec<_>>());
    });
    for number in 0..COUNT {
        let written = fs::read_to_string(bench.volume().join(format!("exec-{number}"))).unwrap();
        assert_eq!(written, format!("{number}\n"));
    }
}

#[test]
fn processes_end_with_the_init_and_are_heard_of_before_it() {
    let own = |_: &mut Value| {};
    // The guest's pid namespace.
    let shared = |spec: &mut Value| {
        let namespaces = spec["linux"]["namespaces"].as_array_mut().unwrap();
        namespaces.retain(|namespace| namespace["type"] != "pid");
    };
    for change in [&own as &dyn Fn(&mut Value), &shared] {
        let bench = Bench::new();
        let running = Running::new(&bench, change);
        running.block_on(async {
            for id in ["one", "two"] {
                running.exec(id, &process(&["sleep", "1000"])).await.unwrap();
            }
            assert_eq!(running.stop().await, 137);
            for id in ["one", "two"] {
                let process = running.container.process(id).unwrap();
                let told = futures::FutureExt::now_or_never(process.wait());
                assert_eq!(told.unwrap().unwrap().status, 137);
            }
            assert!(running.container.pids().unwrap().is_empty());
        });
    }
}

#[test]
fn a_container_is_deleted_with_its_processes() {
    let bench = Bench::new();
    let running = Running::new(&bench, |_| {});
    running.block_on(async {
        running.exec("one", &process(&["sleep", "1000"])).await.unwrap();
        assert!(matches!(running.container.delete().await, Err(ContainerError::Running(_))));
        running.stop().await;
        running.container.delete().await.unwrap();
        assert!(matches!(running.container.process("one"), Err(ContainerError::NoExec(_))));
    });
}

/// Prints the id of the session keyring: keyctl(KEYCTL_GET_KEYRING_ID, KEY_SPEC_SESSION_KEYRING, 0).
const SESSION_KEYRING: &str = "perl -e 'print syscall(250, 0, -3, 0)'";

#[test]
fn each_container_has_a_session_keyring_of_its_own() {
    let bench = Bench::new();
    let keys = |running: &Running<'_>| {
        // The init of the first one has written its own by then.
        let script =
            format!("until [ -s /volume/init ]; do sleep 0.01; done; {SESSION_KEYRING} > /volume/keys");
        running.block_on(async {
            running.exec("keys", &shell(&script)).await.unwrap();
            assert_eq!(running.status("keys").await, 0);
            running.container.forget_exec("keys");
        });
        fs::read_to_string(bench.volume().join("keys")).unwrap()
    };
    let first = Running::new(&bench, |spec| {
        spec["process"]["args"] =
            json!(["sh", "-c", format!("{SESSION_KEYRING} > /volume/init; exec sleep 1000")]);
    });
    let second = Running::new(&bench, |_| {});
    let (in_first, in_second) = (keys(&first), keys(&second));
    assert!(in_first.parse::<i32>().unwrap() > 0, "{in_first}");
    assert_ne!(in_first, in_second);
    assert_eq!(in_first, fs::read_to_string(bench.volume().join("init")).unwrap());
}

/// Looks at every process of its pid namespace that is not its own, and prints those that may do more than the programs
/// that are executed here: they have a capability, or are in another mount namespace.
pub(crate) const OBSERVER: &str = r#"
    my $own = readlink "/proc/self/ns/mnt";
    my %told;
    open my $out, ">", "/volume/seen"; select $out; $| = 1;
    while (!-e "/volume/stop") {
        opendir my $proc, "/proc";
        for my $pid (grep { /^\d+$/ && $_ != $$ } readdir $proc) {
            my $mnt = readlink "/proc/$pid/ns/mnt";
            open my $status, "<", "/proc/$pid/status" or next;
            # Nothing is read of a process that has ended meanwhile.
            my ($caps) = join("", <$status>) =~ /CapPrm:\s*(\S+)/ or next;
            my $line = "capabilities $caps";
            $line .= ", another mount namespace" if $mnt && $mnt ne $own;
            print "$line\n" if $line ne "capabilities 0000000000000000" && !$told{$line}++;
        }
    }
"#;

#[test]
fn a_process_that_joins_is_never_seen_with_rights_that_its_program_does_not_have() {
    let filters = [
        json!(null),
        json!({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"names": ["reboot"], "action": "SCMP_ACT_ERRNO"}]}),
    ];
    for filter in filters {
        let bench = Bench::new();
        let running = Running::new(&bench, |spec| {
            spec["process"]["args"] = json!(["perl", "-e", OBSERVER]);
            let sets = json!(["CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH"]);
            spec["process"]["capabilities"] = json!({"bounding": sets, "effective": sets, "permitted": sets});
            spec["linux"]["seccomp"] = filter.clone();
        });
        running.block_on(async {
            for number in 0..100 {
                let id = format!("exec-{number}");
                let mut process = process(&["true"]);
                process["user"] = json!({"uid": 1234, "gid": 1234});
                running.exec(&id, &process).await.unwrap();
                assert_eq!(running.status(&id).await, 0);
                running.container.forget_exec(&id);
            }
            fs::write(bench.volume().join("stop"), "").unwrap();
            assert_eq!(running.status("").await, 0);
        });
        assert_eq!(fs::read_to_string(bench.volume().join("seen")).unwrap(), "");
    }
}

#[test]
fn the_one_process_that_a_user_may_have_can_join() {
    let mut process = process(&["grep", "processes", "/proc/self/limits"]);
    process["user"] = json!({"uid": 41_234, "gid": 41_234});
    process["rlimits"] = json!([{"type": "RLIMIT_NPROC", "soft": 1, "hard": 1}]);
    let outcome = run_next_to_init(&process);
    let shown: Vec<&str> = outcome.stdout.split_whitespace().collect();
    assert_eq!(shown, ["Max", "processes", "1", "1", "processes"], "{}", outcome.stderr);
}

#[test]
fn a_scheduler_that_is_reset_by_a_clone_is_the_programs() {
    // The nice value and the policy (proc(5)); 3 is SCHED_BATCH.
    let mut process = process(&["cut", "-d", " ", "-f", "19,41", "/proc/self/stat"]);
    process["scheduler"] = json!({"policy": "SCHED_BATCH", "nice": 5});
    assert_eq!(run_next_to_init(&process).stdout, "5 3\n");
    process["scheduler"] =
        json!({"policy": "SCHED_BATCH", "nice": -5, "flags": ["SCHED_FLAG_RESET_ON_FORK"]});
    assert_eq!(run_next_to_init(&process).stdout, "-5 3\n");
}
