//! Programs that many people run: databases, servers, a compiler, interpreters.
//!
//! They are Debian's packages on the host of the tests. The root of each container is a writable copy of the host's
//! root.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use tempfile::TempDir;

use super::Case;
use super::crash::kill_process;
use super::nested::PROGRAMS;
use crate::command::{Cmd, Finished, Running};
use crate::ctr::{Container, Host, Runtime, Task};
use crate::docker::Client;
use crate::network::{Bridge, address};

pub(super) const CASES: &[Case] = &[
    Case::both("gcc_builds_a_program_with_parallel_jobs", gcc),
    Case::both("postgresql_has_what_it_acknowledged_before_it_was_killed", postgresql),
    Case::both("redis_has_what_it_acknowledged_before_it_was_killed", redis),
    Case::both("nginx_serves_files_to_many_clients_at_once", nginx),
    Case::both("node_serves_http_and_watches_files", node),
    Case::both("programs_without_a_limit_take_hundreds_of_megabytes", large),
    Case::both("git_makes_clones_packs_and_checks_a_repository", git),
    Case::both("sshd_lets_a_user_in_by_key", sshd),
    // Minutes in a VM of an emulated host.
    Case::both("initdb_makes_a_database", initdb_makes_a_database).by_whole_name_only(),
    Case::both("docker_runs_gcc_node_and_postgresql_without_limits", in_docker).by_whole_name_only(),
    Case::bulkhead("cpythons_tests_of_posix_and_mmap_end_as_on_runc", cpython_posix),
    Case::bulkhead("cpythons_tests_of_os_end_as_on_runc", cpython_os).by_whole_name_only(),
    Case::bulkhead("cpythons_tests_of_sockets_processes_and_asyncio_end_as_on_runc", cpython_long)
        .by_whole_name_only(),
    Case::bulkhead("cpythons_tests_of_files_end_as_on_runc", cpython_files).by_whole_name_only(),
    Case::bulkhead("stress_ngs_stressors_end_as_on_runc", stress).by_whole_name_only(),
    Case::bulkhead("every_stressor_of_file_systems_ends_as_on_runc", stress_file_systems)
        .by_whole_name_only(),
];

/// A directory of the host on a disk: /tmp may be in memory.
const ON_DISK: &str = "/var/tmp";

/// Where the programs are in a copy of the host.
pub(crate) const PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// A directory of the host's disk that is removed at the end.
pub(crate) fn on_disk() -> Result<TempDir> {
    tempfile::Builder::new().prefix("bulkhead-e2e-").tempdir_in(ON_DISK).context("cannot make a directory")
}

/// A writable copy of the host's root file system: an overlay, as the snapshotter of containerd makes it.
pub(crate) struct HostCopy {
    directory: TempDir,
}

impl HostCopy {
    /// Mounts it. The upper layer is in memory, because overlayfs takes none that is below the lower layer.
    pub(crate) fn mount() -> Result<Self> {
        let copy = Self { directory: on_disk()? };
        let [layers, upper, work] = ["layers", "layers/upper", "layers/work"].map(|name| copy.at(name));
        fs::create_dir(&layers).context("cannot make a mount point")?;
        mount(Some("tmpfs"), &layers, Some("tmpfs"), MsFlags::empty(), Some("mode=755"))
            .context("cannot mount a file system for what a container writes")?;
        for directory in [&upper, &work, &copy.root()] {
            fs::create_dir(directory).with_context(|| format!("cannot make {}", directory.display()))?;
        }
        let options = format!("lowerdir=/,upperdir={},workdir={}", upper.display(), work.display());
        mount(Some("overlay"), &copy.root(), Some("overlay"), MsFlags::empty(), Some(options.as_str()))
            .context("cannot mount a copy of the host's root")?;
        copy.write("etc/hosts", "127.0.0.1 localhost\n::1 localhost\n")?;
        Ok(copy)
    }

    fn at(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(crate) fn root(&self) -> PathBuf {
        self.at("root")
    }

    /// Writes a file in the container's root.
    pub(crate) fn write(&self, name: &str, content: impl AsRef<[u8]>) -> Result<()> {
        fs::write(self.root().join(name), content).with_context(|| format!("cannot write {name}"))
    }

    /// Has a container take it as its root.
    pub(crate) fn as_root_of<'h>(&self, container: Container<'h>) -> Container<'h> {
        container.flags(["--env", PATH]).rootfs(&self.root().display().to_string())
    }

    /// Runs a script of the shell in a container to its end.
    fn sh(&self, host: &Host, script: &str) -> Result<Finished> {
        self.as_root_of(host.container()).run(&["sh", "-e", "-c", script])
    }
}

impl Drop for HostCopy {
    fn drop(&mut self) {
        for mounted in [self.root(), self.at("layers")] {
            // It is not mounted if it could not be made.
            let _ = umount2(&mounted, MntFlags::MNT_DETACH);
        }
    }
}

/// Ends a container as a crash does: on Bulkhead its VMM is killed, on runc all of its processes.
fn crash(host: &Host, task: &Task<'_>) -> Result<()> {
    match host.runtime() {
        Runtime::Runc => task.kill("SIGKILL")?,
        Runtime::Bulkhead => drop(kill_process("bulkhead-vmm", task.id())?),
    }
    task.wait_for_state("STOPPED")
}

/// Has a client write the numbers from 1 to a database, and crashes its container after so many were acknowledged.
/// Returns the last number whose acknowledgement came.
fn crash_at(host: &Host, task: &Task<'_>, mut client: Running, number: u32) -> Result<u32> {
    client.wait_for(&format!("\n{number}\n"))?;
    crash(host, task)?;
    let text = client.finish()?.text();
    let (whole_lines, _) = text.rsplit_once('\n').context("no acknowledgement")?;
    let last = whole_lines.lines().filter_map(|line| line.parse().ok()).max();
    last.with_context(|| format!("no number in {whole_lines:?}"))
}

/// A Makefile, and a program of five files, four of which have a function that calls the next one's.
const SOURCES: &str = r#"
cd /srv
for i in 1 2 3 4; do
    n=$((i % 4 + 1))
    printf '#include <stdlib.h>\nlong f%d(long x);\n' $n > f$i.c
    printf 'long f%d(long x) { return x <= 0 ? %d : f%d(x - 1) + %d; }\n' $i $i $n $i >> f$i.c
done
printf '#include <stdio.h>\nlong f1(long);\nint main(void) { printf("%%ld\\n", f1(100)); return 0; }\n' > main.c
printf 'objects = $(patsubst %%.c,%%.o,$(wildcard *.c))\nprogram: libf.a main.o\n' > Makefile
printf '\t$(CC) -o $@ main.o libf.a\n' >> Makefile
printf 'libf.a: $(filter-out main.o,$(objects))\n\tar rcs $@ $^\n' >> Makefile
"#;

fn gcc(host: &Host) -> Result<()> {
    let copy = HostCopy::mount()?;
    let build = "make -s -j4 CFLAGS=-O2; ./program; make -q && echo up to date; touch f3.c; \
                 make -q || echo f3.c is newer; make -s -j4; ./program";
    let expected = "251\nup to date\nf3.c is newer\n251\n";
    copy.sh(host, &format!("{SOURCES}{build}"))?.succeeds()?.prints(expected)?;
    Ok(())
}

/// The first part of a script: the programs of the database server, and `$as` to run one as its user.
const AS_POSTGRES: &str = "cd /; PATH=$(echo /usr/lib/postgresql/*/bin):$PATH; \
                           as='setpriv --reuid=postgres --regid=postgres --clear-groups'; ";
const SERVE: &str = "exec $as postgres -D /data -c listen_addresses= -c unix_socket_directories=/tmp";
const SQL: &str = "psql -X -v ON_ERROR_STOP=1 -q -A -t -h /tmp -U postgres";

/// Waits until the server takes connections.
fn postgresql_is_ready(task: &Task<'_>) -> Result<()> {
    let script = format!("{AS_POSTGRES} until pg_isready -q -h /tmp -U postgres; do sleep 0.5; done");
    task.exec(&["sh", "-c", &script])?.succeeds()?;
    Ok(())
}

/// Makes a database in a directory of the host.
fn initdb(host: &Host, copy: &HostCopy, data: &Path) -> Result<()> {
    let script = format!(
        "{AS_POSTGRES} chown postgres /data; chmod 700 /data; $as initdb -D /data -A trust --locale=C.UTF-8"
    );
    let container = copy.as_root_of(host.container()).bind(data, "/data", "rbind:rw");
    let limit = host.patience(Duration::from_secs(10 * 60));
    container.run_within(limit, &["sh", "-e", "-c", &script])?.succeeds()?;
    Ok(())
}

fn initdb_makes_a_database(host: &Host) -> Result<()> {
    let copy = HostCopy::mount()?;
    let data = on_disk()?;
    initdb(host, &copy, data.path())?;
    let script = format!("{AS_POSTGRES} echo 'SELECT 6 * 7' | $as postgres --single -D /data postgres");
    let container = copy.as_root_of(host.container()).bind(data.path(), "/data", "rbind:rw");
    let finished = container.run(&["sh", "-e", "-c", &script])?;
    finished.succeeds()?.check("the answer 42", finished.text().contains("\"42\""))?;
    Ok(())
}

fn postgresql(host: &Host) -> Result<()> {
    let copy = HostCopy::mount()?;
    let data = on_disk()?;
    // It takes minutes in a VM of an emulated host.
    initdb(&host.with(Runtime::Runc), &copy, data.path())?;
    let container = || copy.as_root_of(host.container()).bind(data.path(), "/data", "rbind:rw");
    let task = container().detach(&["sh", "-e", "-c", &format!("{AS_POSTGRES} {SERVE}")])?;
    postgresql_is_ready(&task)?;
    let fill = format!(
        "pgbench -i -q -h /tmp -U postgres postgres && {SQL} -c 'CREATE TABLE acknowledged (n int PRIMARY KEY)'"
    );
    task.exec(&["sh", "-c", &fill])?.succeeds()?;
    // Other clients write at the same time, until they are killed.
    let _load = task.start_exec(
        "load",
        &["pgbench", "-n", "-c", "2", "-T", "600", "-h", "/tmp", "-U", "postgres", "postgres"],
    )?;
    let script = format!(
        r"seq 100000 | sed 's/.*/INSERT INTO acknowledged VALUES (&);\n\\echo &/' | stdbuf -oL {SQL}"
    );
    let last = crash_at(host, &task, task.start_exec("client", &["sh", "-c", &script])?, 100)?;
    drop(task);

    let task = container().detach(&["sh", "-e", "-c", &format!("{AS_POSTGRES} {SERVE} 2> /tmp/log")])?;
    postgresql_is_ready(&task)?;
    task.exec(&["grep", "-c", "database system was not properly shut down", "/tmp/log"])?.prints("1\n")?;
    let sql = format!(
        "SELECT count(*) FROM acknowledged WHERE n <= {last};
         SELECT count(*) - max(n) FROM acknowledged;
         SELECT count(*) FROM pgbench_accounts;
         SELECT count(*) > 0 FROM pgbench_history;
         SELECT (SELECT sum(abalance) FROM pgbench_accounts) - (SELECT sum(delta) FROM pgbench_history);
         SELECT (SELECT sum(tbalance) FROM pgbench_tellers) - (SELECT sum(delta) FROM pgbench_history);
         SELECT (SELECT sum(bbalance) FROM pgbench_branches) - (SELECT sum(delta) FROM pgbench_history);
         VACUUM; INSERT INTO acknowledged VALUES (0); CHECKPOINT; SELECT min(n) FROM acknowledged;"
    );
    let expected = format!("{last}\n0\n100000\nt\n0\n0\n0\n0\n");
    task.exec_with_input(&["sh", "-c", SQL], sql.into_bytes())?.succeeds()?.prints(&expected)?;
    task.kill("SIGINT")?;
    task.ends(0)
}

fn in_docker(host: &Host) -> Result<()> {
    let data = on_disk()?;
    initdb(&host.with(Runtime::Runc), &HostCopy::mount()?, data.path())?;
    let program = on_disk()?;
    fs::write(program.path().join("program.js"), NODE).context("cannot write the program")?;
    let volumes = PROGRAMS.map(|(source, place)| format!("--volume={source}:{place}:ro"));
    let [data, program] = [(&data, "data"), (&program, "program")]
        .map(|(directory, name)| format!("--volume={}:/{name}", directory.path().display()));
    let users = ["--volume=/etc/passwd:/etc/passwd:ro", "--volume=/etc/group:/etc/group:ro"];
    let client = Client::of(host)?;
    let container = || {
        let flags = ["--env", PATH, &data, &program].into_iter().chain(users);
        client.container().flags(flags.chain(volumes.iter().map(String::as_str)))
    };
    let build = "make -s -j4 CC=gcc CFLAGS=-O2; ./program";
    container().sh(&format!("set -e; mkdir -p /srv /tmp; {SOURCES}{build}"))?.succeeds()?.prints("251\n")?;
    let finished = container().sh("mkdir -p /tmp; exec node /program/program.js")?;
    finished.succeeds()?.prints("served true\nwatched rename\nworker 499500\nchild text\n")?;

    let script = format!("mkdir -p /tmp; chmod 1777 /tmp; {AS_POSTGRES} {SERVE}");
    let server = container().detach(&["sh", "-e", "-c", &script])?;
    let sql = "CREATE TABLE t AS SELECT n FROM generate_series(1, 1000) n; SELECT sum(n) FROM t;";
    let script = format!(
        "{AS_POSTGRES} until pg_isready -q -h /tmp -U postgres; do sleep 0.5; done; {SQL} -c '{sql}'"
    );
    server.exec(&["sh", "-c", &script])?.succeeds()?.prints("500500\n")?;
    server.docker(&["stop", "--signal", "INT", "--time", "60"])?.succeeds()?;
    server.docker(&["wait"])?.succeeds()?.prints("0\n")?;
    Ok(())
}

fn redis(host: &Host) -> Result<()> {
    let copy = HostCopy::mount()?;
    let data = on_disk()?;
    let server =
        "redis-server --dir /data --appendonly yes --appendfsync always --save '' --logfile /data/log";
    let start = || -> Result<Task<'_>> {
        let container = copy.as_root_of(host.container()).bind(data.path(), "/data", "rbind:rw");
        let task = container.detach(&["sh", "-c", &format!("exec {server}")])?;
        let ready = "until redis-cli ping 2>&1 | grep -q PONG; do sleep 0.5; done";
        task.exec(&["sh", "-c", ready])?.succeeds()?;
        Ok(task)
    };
    let task = start()?;
    let benchmark = "redis-benchmark -q --csv -c 10 -n 300 -r 1000 -t set,get,incr,lpush";
    let finished = task.exec(&["sh", "-c", benchmark])?;
    finished.succeeds()?.check("four results", finished.text().matches("\",\"").count() >= 4)?;
    // The answer to INCR is the number.
    let writes = "seq 100000 | sed 's/.*/INCR acknowledged/' | stdbuf -oL redis-cli";
    let last = crash_at(host, &task, task.start_exec("client", &["sh", "-c", writes])?, 200)?;
    drop(task);

    let task = start()?;
    let finished = task.exec(&["redis-cli", "get", "acknowledged"])?;
    let count: u32 = finished.succeeds()?.text().trim().parse().context("no number")?;
    finished.check(&format!("{last} or more"), count >= last)?;
    task.exec(&["redis-cli", "--raw", "llen", "mylist"])?.succeeds()?.prints("300\n")?;
    task.kill("SIGTERM")?;
    task.ends(0)
}

fn nginx(host: &Host) -> Result<()> {
    const LARGE: usize = 1 << 20;
    let copy = HostCopy::mount()?;
    copy.write("var/www/html/small", "small\n")?;
    copy.write("var/www/html/large", crate::fixtures::noise(LARGE))?;
    let bridge = Bridge::new()?;
    let namespace = bridge.namespace(2)?;
    let task = copy.as_root_of(namespace.container(host)).detach(&["nginx", "-g", "daemon off;"])?;
    let url = |page: &str| format!("http://{}/{page}", address(2));
    let ready = "until echo > /dev/tcp/127.0.0.1/80; do sleep 0.2; done 2> /dev/null";
    task.exec(&["bash", "-c", ready])?.succeeds()?;
    for (page, length, requests, flags) in [
        ("small", 6, 300, ["-c", "10"].as_slice()),
        ("small", 6, 300, &["-c", "10", "-k"]),
        ("large", LARGE, 20, &["-c", "4"]),
    ] {
        let finished = Cmd::new("ab")
            .limit(host.patience(Duration::from_secs(60)))
            .args(["-q", "-n", &requests.to_string()])
            .args(flags)
            .args([url(page)])
            .run()?;
        finished
            .succeeds()?
            .says("Complete requests", &requests.to_string())?
            .says("Failed requests", "0")?;
        finished.says("HTML transferred", &format!("{} bytes", length * requests))?;
        finished.check("no other answer than 200", !finished.text().contains("Non-2xx"))?;
    }
    task.kill("SIGQUIT")?;
    task.ends(0)
}

/// Serves and asks for pages, watches a directory, and has a worker and a child.
const NODE: &str = r#"
const fs = require('fs'), http = require('http'), os = require('os'), path = require('path');
const { execFile } = require('child_process'), { Worker } = require('worker_threads');
const dir = fs.mkdtempSync(path.join(os.tmpdir(), 'node-'));
const get = (port, at) => new Promise((resolve, reject) => http.get({ port, path: at, host: 'localhost' }, (answer) => {
    let text = '';
    answer.on('data', (data) => text += data).on('end', () => resolve(text));
}).on('error', reject));
const served = () => new Promise((resolve, reject) => {
    const server = http.createServer((request, answer) => answer.end(request.url + '!'));
    server.on('error', reject).listen(0, async () => {
        const { port } = server.address();
        const pages = await Promise.all([...Array(50).keys()].map((n) => get(port, '/' + n)));
        server.close(() => resolve(pages.every((page, n) => page === `/${n}!`)));
    });
});
const watched = () => new Promise((resolve, reject) => {
    const watcher = fs.watch(dir, (event, name) => {
        if (name === 'file') { watcher.close(); resolve(event); }
    }).on('error', reject);
    fs.writeFile(path.join(dir, 'file'), 'text', (error) => error && reject(error));
});
const worked = () => new Promise((resolve, reject) => {
    const code = "require('worker_threads').parentPort.postMessage([...Array(1000).keys()].reduce((a, b) => a + b))";
    new Worker(code, { eval: true }).on('message', resolve).on('error', reject);
});
const child = () => new Promise((resolve, reject) => execFile('cat', [path.join(dir, 'file')],
    (error, text) => error ? reject(error) : resolve(text)));
(async () => {
    console.log('served', await served());
    console.log('watched', await watched());
    console.log('worker', await worked());
    console.log('child', await child());
})().catch((error) => { console.error(error); process.exit(1); });
"#;

fn node(host: &Host) -> Result<()> {
    let copy = HostCopy::mount()?;
    copy.write("srv/program.js", NODE)?;
    let expected = "served true\nwatched rename\nworker 499500\nchild text\n";
    copy.sh(host, "node /srv/program.js")?.succeeds()?.prints(expected)?;
    Ok(())
}

fn large(host: &Host) -> Result<()> {
    let copy = HostCopy::mount()?;
    let script = r#"
cd /srv
node -e 'const all = []; for (let i = 0; i < 60; i++) all.push(new Array(1e6).fill(i + 0.5));
    console.log(all.length, process.memoryUsage().heapUsed > 4e8)'
python3 -c 'print(len(bytearray(600 << 20)))'
awk 'BEGIN { print "const int numbers[] = {"; for (i = 0; i < 800000; i++) print i "+" i ","; print "};" }' > large.c
python3 -c 'import resource, subprocess
subprocess.run(["gcc", "-c", "large.c"], check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss > 250000)'
"#;
    copy.sh(host, script)?.succeeds()?.prints("60 true\n629145600\nTrue\n")?;
    Ok(())
}

fn git(host: &Host) -> Result<()> {
    let copy = HostCopy::mount()?;
    let script = r#"
export HOME=/root GIT_CONFIG_COUNT=0
git config --global user.name user; git config --global user.email user@localhost
git init -q -b main /srv/one; cd /srv/one
for i in 1 2 3 4 5; do
    mkdir d$i; seq 1000 > d$i/numbers; echo $i > d$i/link-to; ln -s link-to d$i/link
    git add .; git commit -q -m "commit $i"
done
git checkout -q -b other HEAD~2; echo text > other; git add other; git commit -q -m other; git checkout -q main
git merge -q -m merge other; git gc -q --prune=now; git fsck --strict --no-progress
git clone -q /srv/one /srv/two; git clone -q --no-local --depth 2 /srv/one /srv/three
cd /srv/two; git fsck --strict --no-progress; git status --porcelain; git rev-list --count HEAD; cat d5/link
git diff --stat HEAD~1; echo more >> d1/numbers; git stash -q; git stash pop -q
git commit -q -a -m more; git push -q origin HEAD:pushed
cd /srv/one; git log --format=%s -1 pushed; git worktree add -q /srv/four pushed; tail -n 1 /srv/four/d1/numbers
"#;
    let expected = "7\n5\n other | 1 +\n 1 file changed, 1 insertion(+)\nmore\nmore\n";
    copy.sh(host, script)?.succeeds()?.prints(expected)?;
    Ok(())
}

fn sshd(host: &Host) -> Result<()> {
    let copy = HostCopy::mount()?;
    let script = r#"
useradd -m -s /bin/bash visitor
mkdir -p -m 755 /run/sshd; mkdir -m 700 /home/visitor/.ssh
ssh-keygen -q -t ed25519 -N '' -f /root/key
cp /root/key.pub /home/visitor/.ssh/authorized_keys; chown -R visitor: /home/visitor/.ssh
/usr/sbin/sshd -E /tmp/log
options='-i /root/key -o BatchMode=yes -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null'
options="$options -o LogLevel=ERROR"
ssh $options visitor@localhost 'id -un; cat > text; wc -c < text; exit 7' < /etc/services || echo status $?
command='tty | cut -d / -f 1-3; stty size > /dev/null && echo a terminal'
ssh -tt $options visitor@localhost "$command" < /dev/null | tr -d '\r'
echo 'get text /tmp/text' | sftp -q $options visitor@localhost > /dev/null; cmp /tmp/text /etc/services && echo same
"#;
    let length = fs::metadata("/etc/services").context("no /etc/services")?.len();
    let expected = format!("visitor\n{length}\nstatus 7\n/dev/pts\na terminal\nsame\n");
    copy.sh(host, script)?.succeeds()?.prints(&expected)?;
    Ok(())
}

/// Runs CPython's own tests of some modules. Prints a line for each test, subtest and module that cannot be loaded:
/// its name, a tab, and how it ended. What went wrong goes to the standard error.
const CPYTHON: &str = r#"
import sys, unittest
from test import support
support.use_resources = []
class Result(unittest.TestResult):
    def say(self, test, outcome, error=None):
        print(test.id().replace('\n', ' '), outcome.replace('\n', ' '), sep='\t', flush=True)
        if error:
            print(test.id(), self._exc_info_to_string(error, test), sep='\n', file=sys.stderr, flush=True)
    def addSuccess(self, test): self.say(test, 'passed')
    def addSkip(self, test, why): self.say(test, 'skipped: ' + why)
    def addFailure(self, test, error): self.say(test, 'failed', error)
    def addError(self, test, error): self.say(test, 'failed', error)
    def addExpectedFailure(self, test, error): self.say(test, 'failed as expected')
    def addUnexpectedSuccess(self, test): self.say(test, 'passed, which was not expected')
    def addSubTest(self, test, subtest, error):
        if error: self.say(subtest, 'failed', error)
unittest.defaultTestLoader.loadTestsFromNames(sys.argv[1:]).run(Result())
"#;

/// How each test of a suite ended, by its name.
struct Outcomes {
    of_tests: BTreeMap<String, String>,
    complaints: String,
}

impl Outcomes {
    /// Runs a suite in a container. Its script prints a line for each test: the name, a tab, and how it ended.
    fn on(host: &Host, copy: &HostCopy, suite: &str) -> Result<Self> {
        const ALL: Duration = Duration::from_secs(15 * 60);
        let container = copy.as_root_of(host.container());
        let finished = container.run_within(host.patience(ALL), &["sh", "-e", "-c", suite])?;
        finished.succeeds()?;
        let text = finished.text();
        let of_tests: BTreeMap<_, _> = text
            .lines()
            .filter_map(|line| line.split_once('\t'))
            .map(|(name, outcome)| (name.to_owned(), outcome.to_owned()))
            .collect();
        finished.check("outcomes of tests", !of_tests.is_empty())?;
        Ok(Self { of_tests, complaints: String::from_utf8_lossy(&finished.stderr).into_owned() })
    }
}

/// Tests that measure time to a millisecond, and fail now and then on any runtime of an emulated host.
const MEASURE_TIME: &str = "test.test_os.TimerfdTests.";

/// Expects that each test of a suite ends in the same way on runc and on Bulkhead.
fn same_as_on_runc(host: &Host, files: &[(&str, &str)], suite: &str) -> Result<()> {
    let run = |host: &Host| {
        let copy = HostCopy::mount()?;
        files.iter().try_for_each(|(name, content)| copy.write(name, content))?;
        Outcomes::on(host, &copy, suite)
    };
    let expected = run(&host.with(Runtime::Runc))?;
    let came = run(host)?;
    let names: BTreeSet<_> = expected.of_tests.keys().chain(came.of_tests.keys()).collect();
    let mut different = Vec::new();
    for name in names {
        let [on_runc, here] = [&expected, &came].map(|outcomes| outcomes.of_tests.get(name));
        if on_runc != here && !name.starts_with(MEASURE_TIME) {
            let [on_runc, here] =
                [on_runc, here].map(|outcome| outcome.map_or("did not run", String::as_str));
            different.push(format!("{name}\n    on runc: {on_runc}\n    here:    {here}"));
        }
    }
    ensure!(
        different.is_empty(),
        "expected  the outcomes of {} tests on runc\ncame      others:\n{}\nstderr    {}",
        expected.of_tests.len(),
        different.join("\n"),
        came.complaints
    );
    Ok(())
}

/// Runs CPython's own tests of these modules.
fn cpython_as_on_runc(host: &Host, modules: &str) -> Result<()> {
    let suite = format!("cd /tmp; python3 /srv/tests.py {modules}");
    same_as_on_runc(host, &[("srv/tests.py", CPYTHON)], &suite)
}

fn cpython_posix(host: &Host) -> Result<()> {
    cpython_as_on_runc(host, "test.test_posix test.test_mmap")
}

fn cpython_os(host: &Host) -> Result<()> {
    cpython_as_on_runc(host, "test.test_os")
}

fn cpython_long(host: &Host) -> Result<()> {
    cpython_as_on_runc(host, "test.test_signal test.test_subprocess test.test_socket test.test_asyncio")
}

fn cpython_files(host: &Host) -> Result<()> {
    cpython_as_on_runc(
        host,
        "test.test_fileio test.test_file test.test_largefile test.test_shutil test.test_pathlib test.test_glob \
         test.test_genericpath test.test_posixpath test.test_tempfile test.test_tarfile test.test_zipfile \
         test.test_fcntl test.test_stat test.test_dbm_dumb test.test_mailbox",
    )
}

/// Stressors of each class of stress-ng, and how many operations of them are enough to see that they work.
const STRESSORS: &str = "\
    cpu:5 matrix:5 qsort:1 \
    vm:20 mmap:1 mremap:2 memfd:1 madvise:1 brk:100 stack:2 mlock:1 userfaultfd:2 \
    hdd:20 aio:20 io-uring:20 readahead:20 seek:20 \
    dentry:50 rename:50 xattr:2 chmod:50 flock:50 lockf:50 inotify:2 getdent:20 dir:50 filename:20 utime:50 \
    copy-file:5 fcntl:50 fanotify:2 \
    sock:10 sockpair:20 udp:20 epoll:10 netlink-proc:10 rawsock:5 \
    switch:50 affinity:20 fork:10 vfork:10 clone:2 exec:2 futex:20 membarrier:2 cgroup:1 \
    timer:10 timerfd:10 itimer:10 sigfd:20 signal:20 sigq:20 \
    sem-sysv:20 msg:20 mq:20 shm:1 shm-sysv:1 poll:10 eventfd:20 pipe:20 splice:10 sendfile:10 tee:10 vm-splice:10 \
    pidfd:10 procfs:2 sysinfo:20 getrandom:20 prctl:2 seccomp:2 landlock:1 ptrace:10 unshare:1 key:2 kcmp:2";

fn stress(host: &Host) -> Result<()> {
    stress_as_on_runc(host, STRESSORS)
}

/// All of the class of file systems, each for a few operations.
fn stress_file_systems(host: &Host) -> Result<()> {
    stress_as_on_runc(host, "$(stress-ng --class 'filesystem?' 2>&1 | sed 's/.*: //; s/[^ ][^ ]*/&:2/g')")
}

/// Runs stressors, each with its number of operations (`hdd:20 aio:20`), one after the other.
fn stress_as_on_runc(host: &Host, stressors: &str) -> Result<()> {
    // The exit status says whether a stressor passed, failed, found no resources or is not implemented.
    let suite = format!(
        "cd /tmp; for stressor in {stressors}; do name=${{stressor%:*}}; \
         stress-ng --$name 1 --$name-ops ${{stressor#*:}} --timeout 120 --verify --oomable \
         --vm-bytes 16M --hdd-bytes 4M > log 2>&1 && status=0 || status=$?; \
         printf '%s\\texit status %s\\n' $name $status; \
         test $status = 0 || grep -v ' info: ' log >&2 || true; done"
    );
    same_as_on_runc(host, &[], &suite)
}
