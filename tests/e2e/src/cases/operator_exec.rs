//! A program that an operator runs in a container by `bulkhead exec`, which asks the shim of the pod itself.

use std::fs;
use std::path::Path;

use anyhow::{Result, ensure};

use super::Case;
use super::run::has_a_terminal;
use crate::command::{Cmd, Finished};
use crate::cri::messages::ContainerState;
use crate::ctr::{COMMAND, Host};
use crate::fixtures::noise;
use crate::pods::Pod;

pub(super) const CASES: &[Case] = &[
    Case::bulkhead("exec_adds_a_program_that_is_like_the_containers_own", program),
    Case::bulkhead("exec_leaves_nothing_also_if_it_is_killed", nothing_is_left),
    Case::bulkhead("exec_chooses_a_container_also_while_containerd_is_down", choice),
];

/// `bulkhead exec` with these words.
fn exec(host: &Host, words: &[&str]) -> Cmd {
    Cmd::new("bulkhead").args(["exec"]).args(words).limit(host.patience(COMMAND))
}

fn run(host: &Host, words: &[&str]) -> Result<Finished> {
    exec(host, words).run()
}

fn program(host: &Host) -> Result<()> {
    let task = host.idle()?;
    let id = task.id();
    let script = "echo out; echo err >&2; cat; exit 7";
    run(host, &[id, "--", "sh", "-c", script])?.exits(7)?.prints("out\n")?.complains("err\n")?;
    // What a client of containerd gets.
    let script = "pwd; id; umask; env | sort; grep -e Cap -e NoNew /proc/self/status; cat /proc/1/comm; tty";
    let expected = task.exec(&["sh", "-c", script])?.text();
    run(host, &[id, "--", "sh", "-c", script])?.exits(1)?.prints(&expected)?;
    let script = "echo dir=$PWD; echo ids=$(id -u):$(id -g); echo one=$ONE";
    let words = ["--user", "7:8", "--workdir", "/tmp", "--env", "ONE=1 =1", id, "--", "sh", "-c", script];
    run(host, &words)?.succeeds()?.says("dir", "/tmp")?.says("ids", "7:8")?.says("one", "1 =1")?;
    let input = noise(1 << 20);
    let both = exec(host, &["-i", id, "--", "sh", "-c", "tee /dev/stderr"]).input(input.clone()).run()?;
    both.succeeds()?.prints_bytes(&input)?.complains_bytes(&input)?;

    has_a_terminal(|script| exec(host, &["-it", id, "--", "sh", "-c", script]))
}

/// The directories of all execs.
fn directories() -> Vec<String> {
    let entries = fs::read_dir("/run/bulkhead-exec").into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

fn nothing_is_left(host: &Host) -> Result<()> {
    let task = host.idle()?;
    let id = task.id();
    host.leaves_nothing(|| {
        for (words, status, message) in [
            (&[id, "--", "no-such-command"][..], 127, "executable file not found in $PATH"),
            (&["--user", "nobody-here", id, "--", "true"], 125, "--user nobody-here: nobody-here is not in"),
            (&["-it", id, "--", "true"], 125, "--tty: standard input is no terminal"),
            (&["--container", "web", id, "--", "true"], 125, "has no container web; it has"),
            (&["no-such-pod", "--", "true"], 125, "there is no pod with the id no-such-pod"),
        ] {
            run(host, words)?.exits(status)?.fails_with(message)?.says_one_line()?;
        }
        let ready = "echo ready; while :; do sleep 0.1; done";
        let passed_on = format!("trap 'echo got it; exit 42' TERM; {ready}");
        let mut running = exec(host, &[id, "--", "sh", "-c", &passed_on]).start()?;
        running.wait_for("ready\n")?;
        Cmd::new("kill").args(["-TERM", &running.pid().to_string()]).run()?.succeeds()?;
        running.finish()?.exits(42)?.prints("ready\ngot it\n")?;

        let mark = "bulkhead-e2e-exec";
        let script = format!("echo ready; read x; echo {mark}");
        let running = exec(host, &["-i", id, "--", "sh", "-c", &script]).start()?;
        running.wait_for("ready\n")?;
        // Dropping it kills it.
        drop(running);
        let left = directories();
        ensure!(left.len() == 1, "expected  one directory\ncame      {left:?}");
        let shown = Cmd::new("bulkhead").args(["gc", "--dry-run"]).run()?.succeeds()?.text();
        ensure!(shown.contains(&left[0]), "expected  {} is listed\ncame      {shown}", left[0]);
        Cmd::new("bulkhead").args(["gc"]).run()?.succeeds()?;
        // This looks at the processes by itself, so it must not name the mark.
        let lines = task.exec(&["sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' '\\n'"])?.succeeds()?.text();
        ensure!(!lines.contains(mark), "expected  the program has ended\ncame      {lines}");
        Ok(())
    })?;
    let root = Path::new("/run/bulkhead-exec");
    ensure!(!root.exists(), "expected  {} is gone\ncame      {:?}", root.display(), directories());
    Ok(())
}

fn choice(host: &Host) -> Result<()> {
    let pods = host.pods()?;
    let pod = Pod::start(host)?;
    let alone = run(host, &[pod.id(), "--", "true"])?;
    alone.exits(125)?.fails_with("has no container: none was created in it yet")?.says_one_line()?;
    let web = pod.container().named("web", 0).env("WHO", "web").start(&["sleep", "1000"])?;
    let who = ["--", "sh", "-c", "echo $WHO"];
    run(host, &[&[pod.id()], &who[..]].concat())?.succeeds()?.prints("web\n")?;
    let log = pod.container().named("log", 0).env("WHO", "log").start(&["sleep", "1000"])?;
    let several = run(host, &[pod.id(), "--", "true"])?;
    several.exits(125)?.fails_with("name one with --container")?.says_one_line()?;
    several.exits(125)?.fails_with(&format!("web ({})", web.id()))?;
    pods.while_containerd_is_down(|| {
        run(host, &[&["-c", "log", pod.id()], &who[..]].concat())?.succeeds()?.prints("log\n")?;
        run(host, &[&["-c", web.id(), pod.id()], &who[..]].concat())?.succeeds()?.prints("web\n")?;
        Ok(())
    })?;
    // The ends of these programs were events for containerd, and are not the ends of the containers.
    web.is(ContainerState::Running)?;
    log.is(ContainerState::Running)?;
    web.exec(&["true"])?.succeeds()?;
    pod.remove()
}
