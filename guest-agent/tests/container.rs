//! Containers as their users see them, built by the stage and the init on the machine that runs the tests: root and
//! a cgroup v2 hierarchy are all that they need. The container's root is empty; /usr of this machine is bound into
//! it.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::{
    fs::{self, File},
    io::{Read, Write},
    path::{Path, PathBuf},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU32, Ordering},
    },
    thread,
};

use bulkhead_agent::{
    process::parent::{self, ChildStdio, CreatedInit, InitError},
    reaper::Reaper,
    spec, syscall,
};
use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
};
use serde_json::{Value, json};

/// One reaper for all tests: it waits for any child of the process.
fn reaper() -> Arc<Reaper> {
    static REAPER: OnceLock<Arc<Reaper>> = OnceLock::new();
    let reaper = REAPER.get_or_init(|| {
        let reaper = Arc::new(Reaper::default());
        let running = Arc::clone(&reaper);
        thread::spawn(move || runtime().block_on(running.run()));
        reaper
    });
    Arc::clone(reaper)
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

/// A place for one container, on this machine's kernel.
struct Bench {
    directory: tempfile::TempDir,
    cgroup: PathBuf,
    runtime: tokio::runtime::Runtime,
}

struct Outcome {
    status: u32,
    stdout: String,
    stderr: String,
}

impl Bench {
    /// The calling thread gets a mount namespace of its own.
    fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        unshare(CloneFlags::CLONE_NEWNS).expect("these tests need root");
        mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>).unwrap();
        let directory = tempfile::tempdir().unwrap();
        for name in ["root", "cgroup", "volume"] {
            fs::create_dir(directory.path().join(name)).unwrap();
        }
        let hierarchy = directory.path().join("cgroup");
        mount(Some("cgroup2"), &hierarchy, Some("cgroup2"), MsFlags::empty(), None::<&str>).unwrap();
        let number = NUMBER.fetch_add(1, Ordering::SeqCst);
        let cgroup = hierarchy.join(format!("bulkhead-test-{}-{number}", std::process::id()));
        fs::create_dir(&cgroup).unwrap();
        Self { directory, cgroup, runtime: runtime() }
    }

    fn root(&self) -> PathBuf {
        self.directory.path().join("root")
    }

    fn volume(&self) -> PathBuf {
        self.directory.path().join("volume")
    }

    fn spec(&self, args: &[&str]) -> Value {
        let system = |name: &str| json!({"destination": name, "type": "bind", "source": name, "options": ["rbind", "ro"]});
        json!({
            "ociVersion": "1.1.0",
            "root": {"path": self.root()},
            "hostname": "inside",
            "process": {
                "user": {"uid": 0, "gid": 0},
                "args": args,
                "env": ["PATH=/usr/bin:/bin"],
                "cwd": "/",
            },
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc", "options": ["nosuid", "noexec", "nodev"]},
                {"destination": "/dev", "type": "tmpfs", "source": "tmpfs",
                    "options": ["nosuid", "strictatime", "mode=755", "size=65536k"]},
                {"destination": "/dev/pts", "type": "devpts", "source": "devpts",
                    "options": ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"]},
                {"destination": "/dev/mqueue", "type": "mqueue", "source": "mqueue", "options": ["nosuid"]},
                {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["nosuid", "ro"]},
                {"destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup", "options": ["ro"]},
                system("/usr"), system("/bin"), system("/lib"), system("/lib64"),
            ],
            "linux": {
                "namespaces": [
                    {"type": "pid"}, {"type": "mount"}, {"type": "uts"}, {"type": "ipc"}, {"type": "network"},
                    {"type": "cgroup"}
                ]
            }
        })
    }

    fn create(&self, spec: &Value, stdio: ChildStdio) -> Result<CreatedInit, InitError> {
        let resolved = spec::resolve(spec.to_string().as_bytes(), &self.cgroup).unwrap();
        let program = Path::new(env!("CARGO_BIN_EXE_bulkhead-agent"));
        self.runtime.block_on(parent::create(program, &resolved.init, stdio, &reaper()))
    }

    /// Runs a container to its end.
    fn run(&self, spec: &Value) -> Result<Outcome, InitError> {
        let (mut stdout, stdout_writer) = std::io::pipe().unwrap();
        let (mut stderr, stderr_writer) = std::io::pipe().unwrap();
        let stdin = File::open("/dev/null").unwrap().into();
        let stdio = ChildStdio { stdin, stdout: stdout_writer.into(), stderr: stderr_writer.into() };
        let CreatedInit { mut exit, control, .. } = self.create(spec, stdio)?;
        self.runtime.block_on(control.start())?;
        let mut outcome = Outcome { status: 0, stdout: String::new(), stderr: String::new() };
        stdout.read_to_string(&mut outcome.stdout).unwrap();
        stderr.read_to_string(&mut outcome.stderr).unwrap();
        let ended = self.runtime.block_on(exit.wait_for(Option::is_some)).map(|exit| *exit).unwrap();
        outcome.status = ended.unwrap().status;
        Ok(outcome)
    }

    /// What a shell in a container with this spec prints.
    fn shell(&self, script: &str, change: impl FnOnce(&mut Value)) -> String {
        let mut spec = self.spec(&["sh", "-c", script]);
        change(&mut spec);
        let outcome = self.run(&spec).unwrap();
        assert_eq!(outcome.status, 0, "{}", outcome.stderr);
        outcome.stdout
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        // The init may still be on its way out of the cgroup.
        for _ in 0..500 {
            if fs::remove_dir(&self.cgroup).is_ok() {
                return;
            }
            thread::sleep(std::time::Duration::from_millis(10));
        }
    }
}

fn null() -> ChildStdio {
    let null = || File::options().read(true).write(true).open("/dev/null").unwrap().into();
    ChildStdio { stdin: null(), stdout: null(), stderr: null() }
}

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
fn exit_statuses_and_signals_come_back() {
    let bench = Bench::new();
    assert_eq!(bench.run(&bench.spec(&["sh", "-c", "exit 7"])).unwrap().status, 7);
    let CreatedInit { pid, mut exit, control } =
        bench.create(&bench.spec(&["sleep", "1000"]), null()).unwrap();
    bench.runtime.block_on(control.start()).unwrap();
    syscall::kill(pid, libc::SIGKILL as u32).unwrap();
    let ended = bench.runtime.block_on(exit.wait_for(Option::is_some)).map(|exit| *exit).unwrap();
    assert_eq!(ended.unwrap().status, 137);
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
    let printed = bench.shell("cat /proc/sys/net/ipv4/ip_forward /proc/sys/kernel/shm_rmid_forced", |spec| {
        spec["linux"]["sysctl"] = json!({"net.ipv4.ip_forward": "1", "kernel.shm_rmid_forced": "1"});
        spec["domainname"] = json!("domain");
    });
    assert_eq!(printed, "1\n1\n");
}

#[test]
fn a_container_that_is_never_started_can_be_killed() {
    let bench = Bench::new();
    let CreatedInit { pid, mut exit, control } = bench.create(&bench.spec(&["true"]), null()).unwrap();
    syscall::kill(pid, libc::SIGKILL as u32).unwrap();
    let ended = bench.runtime.block_on(exit.wait_for(Option::is_some)).map(|exit| *exit).unwrap();
    assert_eq!(ended.unwrap().status, 137);
    assert!(matches!(bench.runtime.block_on(control.start()), Err(InitError::Ended(_))));
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
