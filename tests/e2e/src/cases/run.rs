//! A program in a microVM without containerd: `bulkhead run`.

mod ends;
mod exec;
mod nat;
mod report;
mod unpacked;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use self::report::Report;
use super::Case;
use crate::command::{Cmd, Finished, Size};
use crate::ctr::{COMMAND, Host, IMAGE, Runtime};
use crate::docker::Client;
use crate::fixtures::{Root, at_once, digest, installed, noise, scratch};
use crate::snapshot::processes_of;

pub(super) const CASES: &[Case] = &[
    Case::bulkhead("output_and_status_are_those_of_runc", as_runc),
    Case::bulkhead("input_and_output_arrive_whole", streams),
    Case::bulkhead("the_options_say_what_the_program_has", options),
    Case::bulkhead("nat_reaches_what_the_host_reaches_and_not_its_loopback", nat::nat),
    Case::bulkhead("a_volume_is_shared_and_the_root_is_not_changed", volume),
    Case::bulkhead("what_is_written_to_the_root_has_a_limit", scratch_limit),
    Case::bulkhead("a_limit_of_memory_is_kept_and_named", memory),
    Case::bulkhead("a_timeout_kills_the_program_and_no_reader_of_its_output_delays_it", ends::timeout),
    Case::bulkhead("keys_of_a_terminal_end_a_run_in_order_whose_shim_hangs", ends::keys),
    Case::bulkhead("a_killed_command_keeps_no_lock_that_it_inherited", ends::lock),
    Case::bulkhead("a_signal_is_passed_on_and_a_second_one_kills", signals),
    Case::bulkhead("a_reader_that_goes_away_ends_the_program", reader_goes_away),
    Case::bulkhead("a_terminal_is_the_programs", terminal),
    Case::bulkhead("a_program_is_added_to_a_run", exec::added),
    Case::bulkhead("what_is_wrong_is_named", errors),
    Case::bulkhead("another_kernel_is_booted", kernel),
    Case::bulkhead("a_killed_run_is_removed_by_gc_and_by_the_next_run", killed),
    Case::bulkhead("a_vm_that_is_killed_is_no_result_of_the_program", vm_killed),
    Case::bulkhead("tests_of_a_rust_project_run_as_on_the_host", rust_tests),
    Case::bulkhead("junit_has_the_result", junit),
    Case::bulkhead("an_image_runs_as_it_says_in_each_form", images),
    Case::bulkhead("an_unpacked_root_serves_each_user_and_names_its_host", unpacked::serves_each_user),
    Case::bulkhead("a_bad_image_is_refused_by_name", bad_images),
    Case::bulkhead("twenty_at_once_leave_nothing", twenty_at_once),
    Case::bulkhead("the_commands_of_the_page_work", page),
];

/// `bulkhead run` with these words.
fn bulkhead_run(host: &Host, words: &[&str]) -> Cmd {
    Cmd::new("bulkhead").args(["run"]).args(words).limit(host.patience(COMMAND))
}

/// `bulkhead run` in this root.
fn run_in(host: &Host, root: &Root<'_>, words: &[&str]) -> Result<Finished> {
    start_in(host, root, words).run()
}

fn start_in(host: &Host, root: &Root<'_>, words: &[&str]) -> Cmd {
    let root = root.path().display().to_string();
    bulkhead_run(host, &[&["--rootfs", &root], words].concat())
}

/// Scripts whose output, errors and status do not depend on the runtime.
/// `/dev/core` is left out: runc makes it for /proc/kcore, which the guest's kernel does not have.
const SCRIPTS: [&str; 5] = [
    "echo out; echo err >&2; exit 7",
    "pwd; id -u; id -g; umask; echo $PATH; echo $HOME",
    "kill -KILL $$",
    "ls /; ls /dev | grep -v core; stat -c '%a %u %g %n' / /tmp /run",
    "grep Cap /proc/self/status; cat /proc/1/comm; ls /sys/class/net",
];

fn as_runc(host: &Host) -> Result<()> {
    let root = Root::mount(host)?;
    let runc = host.with(Runtime::Runc);
    for script in SCRIPTS {
        // A container of the image that is mounted there.
        let expected = runc.sh(script)?;
        let finished = run_in(host, &root, &["sh", "-c", script])?;
        let status = expected.status.context("ctr was killed")?;
        let stderr = String::from_utf8_lossy(&expected.stderr).into_owned();
        finished.exits(status)?.prints(&expected.text())?.complains(&stderr)?;
    }
    Ok(())
}

fn streams(host: &Host) -> Result<()> {
    let root = Root::mount(host)?;
    let input = noise(3 << 20);
    let command = ["sh", "-c", "tee /dev/stderr"];
    let finished = start_in(host, &root, &command).input(input.clone()).run()?;
    finished.succeeds()?.prints_bytes(&input)?.complains_bytes(&input)?;
    let sum = start_in(host, &root, &["sha256sum"]).input(input.clone()).run()?;
    sum.succeeds()?.prints(&format!("{}  -\n", digest(&input)))?;
    // A program that does not read its input.
    start_in(host, &root, &["echo", "done"]).input(input).run()?.succeeds()?.prints("done\n")?;
    Ok(())
}

fn options(host: &Host) -> Result<()> {
    let root = Root::mount(host)?;
    let script = "echo one=$ONE; echo two=$TWO; echo dir=$PWD; echo uid=$(id -u); echo gid=$(id -g); \
                  echo cpu=$(cat /sys/fs/cgroup/cpu.max); echo memory=$(cat /sys/fs/cgroup/memory.max); \
                  echo net=$(ls /sys/class/net)";
    let words = [
        "--env",
        "ONE=1 =1",
        "-e",
        "TWO",
        "--workdir",
        "/tmp",
        "--user",
        "7:8",
        "--cpus",
        "0.5",
        "--memory",
        "200M",
        "--network",
        "none",
        "sh",
        "-c",
        script,
    ];
    let root = root.path().display().to_string();
    let words = [&["TWO=from here", "bulkhead", "run", "--rootfs", &root], &words[..]].concat();
    let finished = Cmd::new("env").args(words).limit(host.patience(COMMAND)).run()?;
    finished.succeeds()?.says("one", "1 =1")?.says("two", "from here")?.says("dir", "/tmp")?;
    finished.says("uid", "7")?.says("gid", "8")?.says("cpu", "50000 100000")?;
    finished.says("memory", &(200 << 20).to_string())?.says("net", "lo")?;
    Ok(())
}

fn volume(host: &Host) -> Result<()> {
    let root = Root::mount(host)?;
    let (shared, kept) = (scratch()?, scratch()?);
    fs::write(kept.path().join("file"), "kept\n")?;
    let writable = format!("{}:/shared", shared.path().display());
    let read_only = format!("{}:/kept:ro", kept.path().display());
    let script =
        "echo new > /shared/file; echo x > /new; echo x > /kept/file || cat /kept/file; rm /bin/busybox";
    let finished = run_in(host, &root, &["--volume", &writable, "-v", &read_only, "sh", "-c", script])?;
    finished.succeeds()?.prints("kept\n")?;
    let written = fs::read_to_string(shared.path().join("file"))?;
    ensure!(written == "new\n", "expected  the file in the volume\ncame      {written:?}");
    let changed = root.path().join("new").exists() || !root.path().join("bin/busybox").exists();
    ensure!(
        !changed && !root.path().join("shared").exists(),
        "expected  the root as it was\ncame      changes"
    );
    Ok(())
}

fn scratch_limit(host: &Host) -> Result<()> {
    let root = Root::mount(host)?;
    let script = "dd if=/dev/zero of=/big bs=1M count=64 2>/dev/null && echo fits || echo full";
    run_in(host, &root, &["--scratch", "8M", "sh", "-c", script])?.succeeds()?.prints("full\n")?;
    run_in(host, &root, &["sh", "-c", script])?.succeeds()?.prints("fits\n")?;
    Ok(())
}

fn memory(host: &Host) -> Result<()> {
    let root = Root::mount(host)?;
    let script = "dd if=/dev/zero of=/dev/null bs=200M count=1";
    let finished = run_in(host, &root, &["--memory", "64M", "sh", "-c", script])?;
    finished.fails_with("a process was killed because the memory was full (--memory)")?;
    Ok(())
}

fn signals(host: &Host) -> Result<()> {
    let root = Root::mount(host)?;
    let ready = "echo ready; while :; do sleep 0.1; done";
    let passed_on = format!("trap 'echo got it; exit 42' TERM; {ready}");
    // As nohup starts it. A second signal would kill the program.
    let ignores = ["-c", "trap '' HUP; exec bulkhead run --rootfs \"$@\"", "sh"];
    let words = [&root.path().display().to_string(), "sh", "-c", &passed_on];
    let mut running = Cmd::new("sh").args(ignores).args(words).limit(host.patience(COMMAND)).start()?;
    running.wait_for("ready\n")?;
    Cmd::new("kill").args(["-HUP", &running.pid().to_string()]).run()?.succeeds()?;
    Cmd::new("kill").args(["-TERM", &running.pid().to_string()]).run()?.succeeds()?;
    running.finish()?.exits(42)?.prints("ready\ngot it\n")?;
    host.leaves_nothing(|| {
        let ignored = format!("trap 'echo no' INT; {ready}");
        let mut running = start_in(host, &root, &["sh", "-c", &ignored]).start()?;
        running.wait_for("ready\n")?;
        let interrupt = || Cmd::new("kill").args(["-INT", &running.pid().to_string()]).run();
        interrupt()?.succeeds()?;
        running.wait_for("no\n")?;
        // One that may come from the same event does not count.
        interrupt()?.succeeds()?;
        std::thread::sleep(Duration::from_millis(1500));
        interrupt()?.succeeds()?;
        running.finish()?.exits(137)?;
        Ok(())
    })
}

fn reader_goes_away(host: &Host) -> Result<()> {
    let root = Root::mount(host)?;
    let line = format!("bulkhead run --rootfs {} yes | head -n 1", root.path().display());
    let finished =
        Cmd::new("bash").args(["-o", "pipefail", "-c", &line]).limit(host.patience(COMMAND)).run()?;
    finished.exits(137)?.prints("y\n")?;
    // A full disk is another matter: it is no end of the program's own.
    let line =
        format!("bulkhead run --rootfs {} sh -c 'echo x; sleep 1000' > /dev/full", root.path().display());
    let full = Cmd::new("bash").args(["-c", &line]).limit(host.patience(COMMAND)).run()?;
    full.exits(125)?.fails_with("cannot write the output of the program")?.says_one_line()?;
    Ok(())
}

/// Runs a script by a command that has a terminal: the program has it too, with its size, its input and its signals.
pub(super) fn has_a_terminal(start: impl FnOnce(&str) -> Cmd) -> Result<()> {
    let script = "stty size; read word; echo got $word; trap 'stty size; exit 3' WINCH; echo ready; \
                  while :; do sleep 0.1; done";
    let size = Size { width: 91, height: 23 };
    let mut running = start(script).start_in_terminal(size)?;
    running.wait_for("23 91\r\n")?;
    running.write(b"it\r")?;
    running.wait_for("got it\r\n")?;
    running.wait_for("ready\r\n")?;
    running.resize(Size { width: 100, height: 40 })?;
    running.wait_for("40 100\r\n")?;
    running.finish()?.exits(3)?;
    Ok(())
}

fn terminal(host: &Host) -> Result<()> {
    let root = Root::mount(host)?;
    has_a_terminal(|script| start_in(host, &root, &["--tty", "sh", "-c", script]))?;
    let refused = run_in(host, &root, &["--tty", "true"])?;
    refused.exits(125)?.fails_with("--tty: standard input is no terminal")?.says_one_line()?;
    Ok(())
}

/// Words of a command line, its status, and a part of the message.
const ERRORS: [(&[&str], i32, &str); 9] = [
    (&["no-such-command"], 127, "executable file not found in $PATH"),
    (&["/no/such"], 127, "no such file or directory"),
    (&["/etc/passwd"], 126, "permission denied"),
    (&["--workdir", "tmp", "true"], 125, "the working directory \"tmp\" is not absolute (--workdir)"),
    (&["--user", "nobody-here", "true"], 125, "--user nobody-here: nobody-here is not in /etc/passwd"),
    (
        &["--env", "NO_SUCH_VARIABLE", "true"],
        125,
        "--env NO_SUCH_VARIABLE: this command has no such variable",
    ),
    (&["--kernel", "/no/such/kernel", "true"], 125, "--kernel /no/such/kernel: No such file"),
    (&["--kernel", "/etc/passwd", "true"], 125, "kernel: /etc/passwd is not"),
    (&["--junit", "/no/such/file.xml", "true"], 125, "--junit /no/such/file.xml: cannot write it"),
];

fn errors(host: &Host) -> Result<()> {
    let root = Root::mount(host)?;
    fs::create_dir_all(root.path().join("etc"))?;
    fs::write(root.path().join("etc/passwd"), "root:x:0:0::/:/bin/sh\n")?;
    host.leaves_nothing(|| {
        for (words, status, message) in ERRORS {
            run_in(host, &root, words)?.exits(status)?.fails_with(message)?.says_one_line()?;
        }
        let rootless = bulkhead_run(host, &["--rootfs", "/no/such", "true"]).run()?;
        rootless.exits(125)?.fails_with("--rootfs /no/such: No such file")?.says_one_line()?;
        // The command line itself.
        for words in [&["true"][..], &["--rootfs", "/"], &["--rootfs", "/", "--memory", "much", "true"]] {
            bulkhead_run(host, words).run()?.exits(125)?;
        }
        Ok(())
    })
}

fn kernel(host: &Host) -> Result<()> {
    let root = Root::mount(host)?;
    let directory = scratch()?;
    let copy = directory.path().join("vmlinux");
    fs::copy("/usr/lib/bulkhead/vmlinux", &copy)?;
    let script = "uname -r; cat /proc/sys/kernel/hostname | wc -c";
    let expected = run_in(host, &root, &["sh", "-c", script])?.succeeds()?.text();
    let copy = copy.display().to_string();
    let mut running =
        start_in(host, &root, &["--kernel", &copy, "sh", "-c", "echo ready; read x"]).start()?;
    running.wait_for("ready\n")?;
    // The VMM's own words.
    let configurations =
        Cmd::new("sh").args(["-c", "cat /run/bulkhead/bulkhead-run/bulkhead-run/*/vmm.json"]).run()?;
    let is_booted = configurations.succeeds()?.text().contains(&copy);
    running.close_input();
    running.finish()?;
    ensure!(is_booted, "expected  a VM with {copy}\ncame      {}", configurations.text());
    run_in(host, &root, &["--kernel", &copy, "sh", "-c", script])?.succeeds()?.prints(&expected)?;
    Ok(())
}

/// Begins a run and kills it. Its program goes on.
fn leave_one(host: &Host, root: &Root<'_>) -> Result<PathBuf> {
    let running = start_in(host, root, &["sh", "-c", "echo ready; sleep 1000"]).start()?;
    running.wait_for("ready\n")?;
    // Dropping it kills it.
    drop(running);
    directory_of_the_run()
}

/// The directory of the only run.
fn directory_of_the_run() -> Result<PathBuf> {
    let mut found = fs::read_dir("/run/bulkhead-run").context("no directory of a run")?;
    Ok(found.next().context("no directory of the run")??.path())
}

fn killed(host: &Host) -> Result<()> {
    let root = Root::mount(host)?;
    // Its template is made by a run that counts for nothing.
    run_in(host, &root, &["true"])?.succeeds()?;
    host.leaves_nothing(|| {
        let left = leave_one(host, &root)?;
        let id = left.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let shown = Cmd::new("bulkhead").args(["gc", "--dry-run"]).run()?.succeeds()?.text();
        ensure!(shown.contains(&id), "expected  {id} is listed\ncame      {shown}");
        ensure!(left.exists(), "expected  it is kept\ncame      it is gone");
        Cmd::new("bulkhead").args(["gc"]).run()?.succeeds()?;
        ensure!(processes_of("bulkhead-vmm", &id)?.is_empty(), "expected  no VM\ncame      one");
        Ok(())
    })?;
    host.leaves_nothing(|| {
        let left = leave_one(host, &root)?;
        run_in(host, &root, &["true"])?.succeeds()?;
        ensure!(!left.exists(), "expected  {} is gone\ncame      it is there", left.display());
        Ok(())
    })
}

fn vm_killed(host: &Host) -> Result<()> {
    let root = Root::mount(host)?;
    // Its template is made by a run that counts for nothing. A program can also end as one that is killed.
    run_in(host, &root, &["sh", "-c", "exit 137"])?.exits(137)?;
    host.leaves_nothing(|| {
        let mut running = start_in(host, &root, &["sh", "-c", "echo ready; sleep 1000"]).start()?;
        running.wait_for("ready\n")?;
        let directory = directory_of_the_run()?;
        let id = directory.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let vmm = processes_of("bulkhead-vmm", &id)?;
        ensure!(vmm.len() == 1, "expected  one VMM\ncame      {vmm:?}");
        kill(Pid::from_raw(vmm[0].cast_signed()), Signal::SIGKILL)?;
        running
            .finish()?
            .exits(125)?
            .fails_with("the VM ended while the program was running")?
            .says_one_line()?;
        Ok(())
    })
}

/// What the tests print, without what differs in each run.
fn comparable(text: &str) -> String {
    let lines = text.lines().map(|line| match line.split_once("; finished in ") {
        Some((line, _)) => line.to_owned(),
        // A thread has a number.
        None => match (line.find("' ("), line.find(") panicked")) {
            (Some(begin), Some(end)) if begin < end => format!("{}{}", &line[..begin + 1], &line[end + 1..]),
            _ => line.to_owned(),
        },
    });
    lines.map(|line| line + "\n").collect()
}

fn rust_tests(host: &Host) -> Result<()> {
    let sample = installed("sample-test")?.display().to_string();
    let runner = ["--rootfs", "/", "--env-all"];
    let common = ["--test-threads=1", "--show-output"];
    for (variables, words) in [
        (&["CARGO_MANIFEST_DIR=/x"][..], &[][..]),
        (&["SAMPLE_FAILS=1", "RUST_BACKTRACE=0"], &[]),
        (&["SAMPLE_FAILS=1"], &["--exact", "panics"]),
        (&[], &["--list"]),
        (&[], &["--include-ignored", "is_"]),
        (&[], &["--no-such-flag"]),
    ] {
        let command = [&[sample.as_str()][..], &common, words].concat();
        let expected = Cmd::new("env").args(variables).args(&command).run()?;
        let cmd = Cmd::new("env").args(variables).args(["bulkhead", "run"]).args(runner).args(&command);
        let finished = cmd.limit(host.patience(COMMAND)).run()?;
        finished.exits(expected.status.context("the tests were killed")?)?;
        let (expected, came) = (comparable(&expected.text()), comparable(&finished.text()));
        ensure!(came == expected, "expected  {expected}\ncame      {came}");
    }
    Ok(())
}

fn junit(host: &Host) -> Result<()> {
    let root = Root::mount(host)?;
    let busybox = root.path().display().to_string();
    let sample = installed("sample-test")?.display().to_string();
    let directory = scratch()?;
    let file = directory.path().join("result.xml");
    let path = file.display().to_string();
    for (root, words, status, expected) in [
        ("/", &[sample.as_str()][..], 0, "failures=\"0\" errors=\"0\" skipped=\"0\""),
        (
            &busybox,
            &["sh", "-c", "echo '1 < 2'; exit 3"],
            3,
            "<failure message=\"exit status 3\">1 &lt; 2\n</failure>",
        ),
        (&busybox, &["no-such-command"], 127, "executable file not found in $PATH\"/>"),
    ] {
        bulkhead_run(host, &[&["--rootfs", root, "--junit", &path], words].concat()).run()?.exits(status)?;
        let xml = fs::read_to_string(&file)?;
        ensure!(xml.contains(expected), "expected  {expected}\ncame      {xml}");
        let one = xml.matches("<testcase ").count() == 1
            && xml.contains("<testsuite name=\"bulkhead run\" tests=\"1\"");
        ensure!(one && xml.trim_end().ends_with("</testsuites>"), "expected  one test case\ncame      {xml}");
    }
    Ok(())
}

/// The image of the tests as an OCI image layout.
fn layout(directory: &Path) -> Result<PathBuf> {
    let layout = directory.join("layout");
    fs::create_dir(&layout)?;
    unpacked(&installed("busybox-oci.tar")?, &layout)?;
    Ok(layout)
}

fn unpacked(archive: &Path, directory: &Path) -> Result<()> {
    Cmd::new("tar").args(["-xf"]).args([archive]).args(["-C"]).args([directory]).run()?.succeeds()?;
    Ok(())
}

fn images(host: &Host) -> Result<()> {
    let root = Root::mount(host)?;
    let directory = scratch()?;
    let path = |name: &str| directory.path().join(name).display().to_string();
    let layout = layout(directory.path())?.display().to_string();
    let packed = path("root.tar.gz");
    Cmd::new("tar").args(["-czf", &packed, "-C"]).args([root.path()]).args(["."]).run()?.succeeds()?;
    let saved = path("saved.tar");
    Client::of(host)?.run(["save", "--output", &saved, IMAGE])?.succeeds()?;
    let archive = installed("busybox-oci.tar")?.display().to_string();
    let script =
        "pwd; id; echo $PATH; sha256sum /bin/busybox; ls -l /bin | tail -n +2 | awk '{print $1, $3, $NF}'";
    let expected = run_in(host, &root, &["sh", "-c", script])?.succeeds()?.text();
    ensure!(expected.lines().count() > 100, "expected  many programs\ncame      {expected}");
    for (flag, file) in
        [("--image", &layout), ("--image", &archive), ("--image", &saved), ("--archive", &packed)]
    {
        bulkhead_run(host, &[flag, file, "sh", "-c", script]).run()?.succeeds()?.prints(&expected)?;
    }
    // Without a program, that of the image.
    let input = b"echo from a shell\n".to_vec();
    let finished = bulkhead_run(host, &["--image", &archive]).input(input).run()?;
    finished.succeeds()?.prints("from a shell\n")?;
    Ok(())
}

fn bad_images(host: &Host) -> Result<()> {
    let root = Root::mount(host)?;
    let directory = scratch()?;
    let path = |name: &str| directory.path().join(name).display().to_string();
    let changed = layout(directory.path())?;
    let blobs = fs::read_dir(changed.join("blobs/sha256"))?.flatten().map(|entry| entry.path());
    let layer = blobs.max_by_key(|blob| fs::metadata(blob).map_or(0, |it| it.len())).context("no layer")?;
    let mut bytes = fs::read(&layer)?;
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&layer, bytes)?;
    let (evil, device, text) = (path("evil.tar"), path("device.tar"), path("text"));
    fs::write(&text, "this is no archive of any kind, but a text\n".repeat(100))?;
    let tar = |words: &[&str]| Cmd::new("tar").args(words).run();
    tar(&["-P", "--transform", "s,^,../../,", "-cf", &evil, "/etc/passwd"])?.succeeds()?;
    tar(&["-cf", &device, "-C", "/dev", "null"])?.succeeds()?;
    let archive = installed("busybox-oci.tar")?.display().to_string();
    host.leaves_nothing(|| {
        for (words, message) in [
            (
                &["--image", &changed.display().to_string()][..],
                "layer 1: its content does not have the digest",
            ),
            (&["--image", "/no/such.tar"], "--image /no/such.tar: there is no such file; --image takes"),
            (&["--image", &text], "--image "),
            (&["--archive", &text], "it is no tar archive; use .tar or .tar.gz"),
            (&["--archive", &evil], "the name has `..` in it"),
            (&["--archive", &device], "entry \"null\": device nodes are not supported"),
            (&["--scratch", "1M", "--image", &archive], "it is larger than --scratch allows"),
        ] {
            let finished = bulkhead_run(host, &[words, &["true"]].concat()).run()?;
            finished.exits(125)?.fails_with(message)?.says_one_line()?;
        }
        Ok(())
    })?;
    run_in(host, &root, &["true"])?.succeeds()?;
    Ok(())
}

fn twenty_at_once(host: &Host) -> Result<()> {
    let sample = installed("sample-test")?.display().to_string();
    bulkhead_run(host, &["--rootfs", "/", "true"]).run()?.succeeds()?;
    let directory = scratch()?;
    host.leaves_nothing(|| {
        at_once(0..20, |number| {
            // Each prints its number, and every second one fails.
            let manifest = format!("CARGO_MANIFEST_DIR=/number/{number}");
            let fails = if number % 2 == 1 { "SAMPLE_FAILS=1" } else { "SAMPLE_PASSES=1" };
            let command =
                [&sample, "--exact", "--test-threads=1", "--show-output", "may_fail", "prints_where_it_is"];
            let tests = |runner: &[&str]| {
                let words = [&[manifest.as_str(), fails, "RUST_BACKTRACE=0"], runner, &command].concat();
                Cmd::new("env").args(words).limit(host.patience(COMMAND * 4)).run()
            };
            let on_host = tests(&[])?;
            let status = on_host.status.context("the tests were killed")?;
            ensure!(status == if number % 2 == 1 { 101 } else { 0 }, "came      {}", on_host.text());
            let file = directory.path().join(format!("{number}.xml"));
            let path = file.display().to_string();
            let came = tests(&["bulkhead", "run", "--rootfs", "/", "--env-all", "--junit", &path])?;
            let expected = comparable(&on_host.text());
            let printed = comparable(&came.exits(status)?.text());
            let is_its_own = printed.contains(&format!("/number/{number}\""));
            ensure!(printed == expected && is_its_own, "expected  {expected}\ncame      {printed}");
            let xml = fs::read_to_string(&file).with_context(|| format!("no report of run {number}"))?;
            let (came, expected) = (report::read(&xml)?, Report::of_tests(&command, status, &expected));
            ensure!(came == expected, "expected  {expected:?}\ncame      {came:?} in {xml}");
            Ok(())
        })?;
        let written = fs::read_dir(directory.path())?.count();
        ensure!(written == 20, "expected  20 reports and nothing else\ncame      {written} files");
        Ok(())
    })
}

/// The page whose commands are run.
const PAGE: &str = include_str!("../../../../docs/test-runners.md");

/// The indented blocks of the page, each a script.
fn scripts_of_the_page() -> Vec<String> {
    let mut scripts = Vec::new();
    let mut script = String::new();
    for line in PAGE.lines().chain([""; 1]).chain(["the end"]) {
        match line.strip_prefix("    ") {
            Some(command) => script.push_str(&format!("{command}\n")),
            None if line.is_empty() && !script.is_empty() => script.push('\n'),
            None if !script.is_empty() => scripts.push(std::mem::take(&mut script)),
            None => {}
        }
    }
    scripts
}

/// Stands in for docker, whose daemon is not where the page's docker looks for it: it writes the image of the tests.
const DOCKER: &str = "#!/bin/sh\nexec cp /usr/lib/bulkhead/tests/busybox-oci.tar \"$3\"\n";

/// Stands in for cargo, which the host of the tests does not have: it runs a test as `cargo test` does, with the
/// runner that is configured.
const CARGO: &str = "#!/bin/sh\ncd /usr/lib && CARGO_MANIFEST_DIR=/usr/lib \
                     exec $CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER /usr/lib/bulkhead/tests/sample-test\n";

fn page(host: &Host) -> Result<()> {
    let directory = scratch()?;
    let programs = directory.path().join("bin");
    fs::create_dir(&programs)?;
    write_program(&programs.join("cargo"), CARGO)?;
    write_program(&programs.join("docker"), DOCKER)?;
    write_program(&directory.path().join("run-tests.sh"), "#!/bin/sh\necho all is well\n")?;
    let scripts = scripts_of_the_page();
    ensure!(scripts.len() >= 3, "expected  three scripts at least\ncame      {scripts:?}");
    for script in scripts {
        let path = format!(
            "PATH={}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            programs.display()
        );
        let line = format!("cd {} && set -e\n{script}", directory.path().display());
        let cmd = Cmd::new("env").args([path.as_str(), "bash", "-c", &line]);
        cmd.limit(host.patience(COMMAND)).run()?.succeeds().with_context(|| script.clone())?;
    }
    let results =
        fs::read_to_string(directory.path().join("results.xml")).context("the page has written no report")?;
    ensure!(results.contains("failures=\"0\""), "expected  a success\ncame      {results}");
    Ok(())
}

fn write_program(path: &Path, text: &str) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    fs::write(path, text)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).context("cannot make it executable")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_has_a_script_for_cargo_and_one_for_ci() {
        let scripts = scripts_of_the_page();
        assert!(scripts.iter().any(|script| script.contains("cargo test")), "{scripts:?}");
        assert!(scripts.iter().any(|script| script.contains("--junit results.xml")), "{scripts:?}");
    }

    #[test]
    fn what_differs_in_each_run_is_left_out() {
        let text = "thread 'may_fail' (123) panicked at x\ntest result: ok. 1 passed; finished in 0.01s\n";
        assert_eq!(comparable(text), "thread 'may_fail' panicked at x\ntest result: ok. 1 passed\n");
    }
}
