//! Locks of files in volumes: they hold between containers of different pods, and between those and the host.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, ensure};
use tempfile::TempDir;

use super::Case;
use super::programs::{HostCopy, on_disk};
use crate::command::{Cmd, Running};
use crate::ctr::{Host, Task};

pub(super) const CASES: &[Case] = &[
    Case::both("a_lock_excludes_other_pods_and_the_host", excludes),
    Case::both("who_waits_for_a_lock_gets_it_or_can_be_killed", waits),
    Case::both("a_lock_ends_with_its_file_its_process_and_its_container", ends),
    Case::both("what_cannot_be_changed_and_what_threads_close_leaves_no_lock", leaves_none),
    Case::both("who_has_a_lock_sees_what_others_did_before", counters),
    Case::both("two_pods_and_the_host_write_to_one_sqlite_database", sqlite),
];

const LOCKER: &str = include_str!("file_locker.py");
/// The ways to lock a file or a directory, as the program names them.
const KINDS: [&str; 4] = ["process", "open-file", "flock", "directory"];
const LIMIT: Duration = Duration::from_secs(60);
/// Who has not answered after this time waits.
const NO_ANSWER: Duration = Duration::from_millis(300);

/// A directory of the host that two containers have as a volume, at /v. For a container of ctr each has a VM.
struct Places<'h> {
    host: &'h Host,
    containers: Vec<Task<'h>>,
    volume: TempDir,
    _copy: HostCopy,
}

impl<'h> Places<'h> {
    fn make(host: &'h Host) -> Result<Self> {
        let (copy, volume) = (HostCopy::mount()?, on_disk()?);
        copy.write("srv/locker.py", LOCKER)?;
        fs::write(volume.path().join("file"), "text")?;
        let start = || {
            let container = copy.as_root_of(host.container()).bind(volume.path(), "/v", "rbind:rw");
            container.detach(&["sleep", "1000"])
        };
        Ok(Self { host, containers: vec![start()?, start()?], volume, _copy: copy })
    }

    fn at(&self, name: &str) -> PathBuf {
        self.volume.path().join(name)
    }

    /// The program in a container.
    fn locker(&self, container: usize, name: &str) -> Result<Locker> {
        let command = ["python3", "/srv/locker.py", "/v/file"];
        Locker::of(self.containers[container].start_exec(name, &command)?)
    }

    fn on_host(&self) -> Result<Locker> {
        let file = self.at("file").display().to_string();
        let limit = self.host.patience(LIMIT);
        Locker::of(Cmd::new("python3").args(["-c", LOCKER, &file]).limit(limit).start()?)
    }

    /// Runs a program in both containers and on the host at the same time. Its arguments are a path below the volume
    /// and a number.
    fn all_run(&self, program: &str, below: &str, number: u32) -> Result<()> {
        let (number, on_host) = (number.to_string(), format!("{}{below}", self.volume.path().display()));
        let limit = self.host.patience(LIMIT);
        let mut all =
            vec![Cmd::new("python3").args(["-c", program, &on_host, &number]).limit(limit).start()?];
        for (task, name) in self.containers.iter().zip(["one", "other"]) {
            all.push(task.start_exec(name, &["python3", "-c", program, &format!("/v{below}"), &number])?);
        }
        all.iter_mut().try_for_each(|running| running.finish()?.succeeds().map(drop))
    }

    fn remove(self) -> Result<()> {
        self.containers.into_iter().try_for_each(Task::dies)
    }
}

/// The program that locks, which answers each line.
struct Locker {
    running: Running,
    asked: u32,
}

impl Locker {
    fn of(running: Running) -> Result<Self> {
        running.wait_for("ready\n")?;
        Ok(Self { running, asked: 0 })
    }

    fn begin(&mut self, kind: &str, what: &str) -> Result<()> {
        self.asked += 1;
        self.running.write(format!("{} {kind} {what}\n", self.asked).as_bytes())
    }

    fn answers(&self, answer: &str) -> Result<()> {
        self.running.wait_for(&format!("\n{} {answer}\n", self.asked))
    }

    /// Has it do something for which it has to wait.
    fn waits_for(&mut self, kind: &str, what: &str) -> Result<()> {
        self.begin(kind, what)?;
        let answered = self.running.says_within(&format!("\n{} ", self.asked), NO_ANSWER);
        ensure!(!answered, "expected  no answer to {what} of {kind}\ncame      one");
        Ok(())
    }

    /// Has it do something, and expects this answer.
    fn does(&mut self, kind: &str, what: &str, answer: &str) -> Result<()> {
        self.begin(kind, what)?;
        self.answers(answer)
    }
}

fn excludes(host: &Host) -> Result<()> {
    let places = Places::make(host)?;
    let (mut one, mut other) = (places.locker(0, "one")?, places.locker(1, "other")?);
    let mut outside = places.on_host()?;
    for kind in KINDS {
        one.does(kind, "write", "done")?;
        other.does(kind, "write", "busy")?;
        other.does(kind, "read", "busy")?;
        outside.does(kind, "read", "busy")?;
        one.does(kind, "end", "done")?;
        outside.does(kind, "write", "done")?;
        one.does(kind, "write", "busy")?;
        other.does(kind, "read", "busy")?;
        outside.does(kind, "end", "done")?;
        // Readers share it. One of them cannot write as long as others read.
        one.does(kind, "read", "done")?;
        other.does(kind, "read", "done")?;
        outside.does(kind, "write", "busy")?;
        if ["process", "open-file"].contains(&kind) {
            one.does(kind, "write", "busy")?;
            other.does(kind, "end", "done")?;
            // It reads as before, although it could not write.
            outside.does(kind, "write", "busy")?;
            one.does(kind, "write", "done")?;
            other.does(kind, "read", "busy")?;
            let pid = if kind == "process" { 0 } else { -1 };
            other.does(kind, "who", &format!("1 from 10 for 20 by {pid}"))?;
            one.does(kind, "who", "nobody")?;
            one.does(kind, "read", "done")?;
            other.does(kind, "read", "done")?;
        }
        one.does(kind, "end", "done")?;
        other.does(kind, "end", "done")?;
    }
    places.remove()
}

fn waits(host: &Host) -> Result<()> {
    let places = Places::make(host)?;
    let (mut one, mut other) = (places.locker(0, "one")?, places.locker(1, "other")?);
    let mut outside = places.on_host()?;
    for kind in KINDS {
        outside.does(kind, "write", "done")?;
        one.waits_for(kind, "write-wait")?;
        outside.does(kind, "end", "done")?;
        one.answers("done")?;
        other.waits_for(kind, "read-wait")?;
        one.does(kind, "end", "done")?;
        other.answers("done")?;
        outside.waits_for(kind, "write-wait")?;
        other.does(kind, "end", "done")?;
        outside.answers("done")?;
        outside.does(kind, "end", "done")?;
    }
    outside.does("flock", "write", "done")?;
    one.waits_for("flock", "write-wait")?;
    places.containers[0].exec(&["pkill", "-9", "python3"])?.succeeds()?;
    one.running.finish()?.exits(137)?;
    places.remove()
}

fn ends(host: &Host) -> Result<()> {
    let mut places = Places::make(host)?;
    let mut outside = places.on_host()?;
    let mut other = places.locker(1, "other")?;
    for kind in KINDS {
        other.does(kind, "write", "done")?;
        other.does(kind, "close", "done")?;
        // A process loses its locks of a file as soon as it closes that file anywhere.
        let answer = if kind == "process" { "done" } else { "busy" };
        outside.does(kind, "write", answer)?;
        outside.does(kind, "end", "done")?;
    }
    places.containers[1].exec(&["pkill", "-9", "python3"])?.succeeds()?;
    other.running.finish()?.exits(137)?;
    for kind in KINDS {
        outside.does(kind, "write", "done")?;
        outside.does(kind, "end", "done")?;
    }
    // A lock of an open file and one of a process exclude each other.
    let all = ["open-file", "flock", "directory"];
    let mut one = places.locker(0, "one")?;
    for kind in all {
        one.does(kind, "write", "done")?;
        outside.does(kind, "write", "busy")?;
    }
    places.containers.remove(0).dies()?;
    for kind in all {
        outside.does(kind, "write", "done")?;
    }
    places.remove()
}

/// In each of many processes one thread locks, and another one closes the file, which ends the locks of the process.
const THREADS: &str = r#"
import fcntl, os, threading
threading.excepthook = lambda failed: os._exit(1)
def lock():
    fcntl.lockf(os.open("/v/file", os.O_RDWR), fcntl.LOCK_EX)
def close():
    os.close(os.open("/v/file", os.O_RDONLY))
for _ in range(50):
    child = os.fork()
    if not child:
        threads = [threading.Thread(target=target) for target in (lock, close, close)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"#;

fn leaves_none(host: &Host) -> Result<()> {
    let places = Places::make(host)?;
    let (mut one, mut twin) = (places.locker(0, "one")?, places.locker(0, "twin")?);
    let mut outside = places.on_host()?;
    for kind in KINDS {
        one.does(kind, "read", "done")?;
        twin.does(kind, "read", "done")?;
        one.does(kind, "write", "busy")?;
        twin.does(kind, "end", "done")?;
        // flock(2) has given up what it could not change.
        let is_range = ["process", "open-file"].contains(&kind);
        outside.does(kind, "write", if is_range { "busy" } else { "done" })?;
        outside.does(kind, "end", "done")?;
        one.does(kind, "end", "done")?;
        outside.does(kind, "write", "done")?;
        outside.does(kind, "end", "done")?;
    }
    places.containers[0].exec(&["python3", "-c", THREADS])?.succeeds()?;
    outside.does("process", "write", "done")?;
    places.remove()
}

/// Adds one to numbers in files, with a lock: in place, by the length of a file, and in a new file of the same name.
const COUNT: &str = r#"
import fcntl, os, sys
directory, rounds = sys.argv[1], int(sys.argv[2])
lock = os.open(directory + "/file", os.O_RDWR)
for _ in range(rounds):
    fcntl.flock(lock, fcntl.LOCK_EX)
    with open(directory + "/in-place", "r+") as file:
        number = int(file.read())
        file.seek(0)
        file.write(f"{number + 1:08}")
    grown = os.open(directory + "/grown", os.O_RDWR)
    os.pwrite(grown, os.read(grown, 1 << 16) + b"x", 0)
    os.close(grown)
    number = int(open(directory + "/renamed").read())
    new = directory + "/new"
    assert not os.path.exists(new)
    with open(new, "x") as file:
        file.write(f"{number + 1:08}")
    os.rename(new, directory + "/renamed")
    fcntl.flock(lock, fcntl.LOCK_UN)
    os.pread(lock, 8, 0)
    fcntl.lockf(lock, fcntl.LOCK_EX)
    os.pwrite(lock, b"%08d" % (int(os.pread(lock, 8, 0)) + 1), 0)
    fcntl.lockf(lock, fcntl.LOCK_UN)
"#;

fn counters(host: &Host) -> Result<()> {
    const ROUNDS: u32 = 40;
    const NAMES: [&str; 3] = ["file", "in-place", "renamed"];
    let places = Places::make(host)?;
    NAMES.iter().try_for_each(|name| fs::write(places.at(name), "00000000"))?;
    fs::write(places.at("grown"), "")?;
    places.all_run(COUNT, "", ROUNDS)?;
    let grown = fs::metadata(places.at("grown"))?.len();
    ensure!(grown == u64::from(3 * ROUNDS), "expected  {} bytes\ncame      {grown}", 3 * ROUNDS);
    for name in NAMES {
        let (expected, came) = (format!("{:08}", 3 * ROUNDS), fs::read_to_string(places.at(name))?);
        ensure!(came == expected, "expected  {expected} in {name}\ncame      {came}");
    }
    places.remove()
}

const MAKE: &str =
    "import sqlite3, sys; sqlite3.connect(sys.argv[1]).execute('CREATE TABLE rows (number INTEGER)')";
/// Adds rows, each in a transaction of its own, to which the number of rows before belongs.
const ADD: &str = r#"
import sqlite3, sys
database = sqlite3.connect(sys.argv[1], timeout=1000, isolation_level=None)
for _ in range(int(sys.argv[2])):
    database.execute("BEGIN IMMEDIATE")
    (count,) = database.execute("SELECT count(*) FROM rows").fetchone()
    database.execute("INSERT INTO rows VALUES (?)", (count,))
    database.execute("COMMIT")
"#;
const SUM: &str = r#"
import sqlite3, sys
database = sqlite3.connect(sys.argv[1])
print(*database.execute("PRAGMA integrity_check").fetchone(), end=" ")
print(*database.execute("SELECT count(*), count(DISTINCT number), max(number) FROM rows").fetchone())
"#;

fn sqlite(host: &Host) -> Result<()> {
    const ROWS: u32 = 15;
    let places = Places::make(host)?;
    let database = places.at("database").display().to_string();
    let on_host = |script: &str| Cmd::new("python3").args(["-c", script, &database]).run();
    on_host(MAKE)?.succeeds()?;
    places.all_run(ADD, "/database", ROWS)?;
    let all = 3 * ROWS;
    on_host(SUM)?.succeeds()?.prints(&format!("ok {all} {all} {}\n", all - 1))?;
    places.remove()
}
