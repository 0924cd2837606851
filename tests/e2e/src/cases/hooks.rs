//! Programs of the host that are run along a container's life (OCI hooks).

use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::statvfs::statvfs;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::Case;
use crate::command::{Cmd, Finished, Size, wait_until};
use crate::ctr::{Container, Host};
use crate::fixtures::{Spec, scratch};

pub(super) const CASES: &[Case] = &[
    Case::both("each_is_told_the_containers_state", state),
    Case::both("they_run_in_the_order_of_the_containers_life", order),
    Case::both("arguments_and_environment_are_the_specs", arguments),
    Case::both("one_that_fails_before_the_start_ends_the_creation", failing_creation),
    Case::both("one_that_fails_after_the_start_ends_the_container", failing_start),
    Case::both("one_that_does_not_end_is_killed", endless),
    Case::both("one_that_is_missing_is_named", missing),
    Case::both("those_after_the_end_run_although_the_shim_was_killed", after_killed_shim),
    Case::bulkhead("those_after_the_end_of_a_killed_shim_run_where_run_has_no_inodes", without_inodes),
    Case::bulkhead("those_inside_the_container_are_not_built_yet", inside),
];

const RUN: &str = "/run";

/// Where the hooks of a case write.
struct Notes {
    directory: TempDir,
}

impl Notes {
    fn new() -> Result<Self> {
        Ok(Self { directory: scratch()? })
    }

    /// A hook that runs this script, in which `$NOTES` is the directory.
    fn hook(&self, script: &str) -> Value {
        let notes = format!("NOTES={}", self.directory.path().display());
        json!({ "path": "/bin/sh", "args": ["sh", "-c", script], "env": [notes, "PATH=/usr/bin:/bin"] })
    }

    /// What was written in this file.
    fn read(&self, file: &str) -> Result<String> {
        let path = self.directory.path().join(file);
        fs::read_to_string(&path).with_context(|| format!("no hook has written {}", path.display()))
    }
}

/// Runs `command` with these hooks.
fn run(host: &Host, container: Container<'_>, hooks: Value, command: &[&str]) -> Result<Finished> {
    Spec::of(host, command)?.with("", "hooks", hooks)?.run(container)
}

fn state(host: &Host) -> Result<()> {
    let notes = Notes::new()?;
    // The process that the state names is there until the container is gone.
    let save = |name: &str| {
        let script = format!(
            "cat > $NOTES/{name}; pid=$(sed -n 's/.*\"pid\":\\([0-9]*\\).*/\\1/p' $NOTES/{name}); \
             test -n \"$pid\" && test -d /proc/$pid && echo alive > $NOTES/{name}.process; true"
        );
        json!([notes.hook(&script)])
    };
    let phases = ["prestart", "createRuntime", "poststart", "poststop"];
    let hooks: Value = phases.iter().map(|phase| ((*phase).to_owned(), save(phase))).collect();
    let container = host.container();
    let id = container.id().to_owned();
    run(host, container, hooks, &["true"])?.succeeds()?;
    for phase in phases {
        let text = notes.read(phase)?;
        let state: Value =
            serde_json::from_str(&text).with_context(|| format!("{phase} was told {text:?}"))?;
        ensure!(state["id"] == id.as_str(), "expected  the id {id}\n came      {state}");
        ensure!(state["ociVersion"].is_string(), "expected  a version\ncame      {state}");
        let bundle = state["bundle"].as_str().unwrap_or_default();
        ensure!(Path::new(bundle).ends_with(&id), "expected  the bundle of {id}\ncame      {state}");
    }
    for (phase, status) in [("prestart", "creating"), ("createRuntime", "creating"), ("poststop", "stopped")]
    {
        let state: Value = serde_json::from_str(&notes.read(phase)?)?;
        ensure!(state["status"] == status, "expected  {status} for {phase}\ncame      {state}");
    }
    for phase in ["prestart", "createRuntime", "poststart"] {
        notes.read(&format!("{phase}.process"))?;
    }
    Ok(())
}

/// Also if what the shim has left takes longer to undo than containerd waits.
fn after_killed_shim(host: &Host) -> Result<()> {
    let notes = Notes::new()?;
    let hooks = json!({ "poststop": [notes.hook("cat > $NOTES/state; sleep 6; echo > $NOTES/ended")] });
    let spec = Spec::of(host, &["sleep", "1000"])?.with("", "hooks", hooks)?;
    let spec = spec.with("/process", "terminal", true.into())?;
    let rooted = spec.detach_in_terminal(host.container(), Size { width: 80, height: 24 })?;
    let id = rooted.task.id().to_owned();
    super::crash::kill_process(host.runtime().shim(), &id)?;
    wait_until("the end of the hook", host.patience(Duration::from_secs(20)), || {
        Ok(notes.read("ended").is_ok())
    })?;
    let state: Value = serde_json::from_str(&notes.read("state")?)?;
    ensure!(state["id"] == id.as_str() && state["status"] == "stopped", "a state of {id}, not {state}");
    rooted.task.remove_container()
}

/// /run, in which no file can be made until another one is removed. It is as before when this is dropped.
struct NoInodes {
    before: u64,
    filler: TempDir,
}

impl NoInodes {
    fn begin() -> Result<Self> {
        /// Others may make files until the limit holds.
        const SPARE: u64 = 20;
        let filler = tempfile::tempdir_in(RUN).context("cannot make a directory in /run")?;
        let now = statvfs(RUN).context("cannot look at /run")?;
        Self::limit(now.files() - now.files_free() + SPARE)?;
        let full = Self { before: now.files(), filler };
        let make = |number: u64| File::create(full.filler.path().join(number.to_string())).err();
        let error = (0..2 * SPARE).find_map(make).context("/run has more inodes than its limit")?;
        ensure!(error.kind() == ErrorKind::StorageFull, "expected  a full /run\ncame      {error}");
        Ok(full)
    }

    fn limit(inodes: u64) -> Result<()> {
        let options = format!("remount,nr_inodes={inodes}");
        Cmd::new("mount").args(["-o", &options, RUN]).run()?.succeeds().map(drop)
    }
}

impl Drop for NoInodes {
    fn drop(&mut self) {
        if let Err(error) = Self::limit(self.before) {
            eprintln!("/run keeps a limit of inodes: {error:#}");
        }
    }
}

/// What the pod has in /run becomes free by its end only.
fn without_inodes(host: &Host) -> Result<()> {
    let notes = Notes::new()?;
    let hooks = json!({ "poststop": [notes.hook("echo > $NOTES/ended")] });
    let spec = Spec::of(host, &["sleep", "1000"])?.with("", "hooks", hooks)?;
    let spec = spec.with("/process", "terminal", true.into())?;
    let rooted = spec.detach_in_terminal(host.container(), Size { width: 80, height: 24 })?;
    let id = rooted.task.id().to_owned();
    let full = NoInodes::begin()?;
    super::crash::kill_process(host.runtime().shim(), &id)?;
    wait_until("the end of the hook", host.patience(Duration::from_secs(20)), || {
        Ok(notes.read("ended").is_ok())
    })?;
    drop(full);
    rooted.task.remove_container()
}

fn order(host: &Host) -> Result<()> {
    let notes = Notes::new()?;
    let note = |text: &str| notes.hook(&format!("echo {text} >> $NOTES/order"));
    let hooks = json!({
        "poststop": [note("poststop-1"), note("poststop-2")],
        "poststart": [note("poststart")],
        "createRuntime": [note("createRuntime-1"), note("createRuntime-2")],
        "prestart": [note("prestart")],
    });
    run(host, host.container(), hooks, &["true"])?.succeeds()?;
    let order = notes.read("order")?;
    let expected = "prestart\ncreateRuntime-1\ncreateRuntime-2\npoststart\npoststop-1\npoststop-2\n";
    ensure!(order == expected, "expected  {expected:?}\ncame      {order:?}");
    Ok(())
}

fn arguments(host: &Host) -> Result<()> {
    let notes = Notes::new()?;
    let mut hook = notes.hook("echo \"$0|$1|$2|$COLOUR|$HOME\" > $NOTES/arguments");
    hook["args"] = json!(["sh", "-c", hook["args"][2], "zero", "a b", ""]);
    hook["env"] = json!([hook["env"][0], "COLOUR=red=green"]);
    run(host, host.container(), json!({ "createRuntime": [hook] }), &["true"])?.succeeds()?;
    let came = notes.read("arguments")?;
    ensure!(
        came == "zero|a b||red=green|\n",
        "expected  the spec's arguments and variables\ncame      {came:?}"
    );
    Ok(())
}

fn failing_creation(host: &Host) -> Result<()> {
    host.leaves_nothing(|| {
        let notes = Notes::new()?;
        let hooks = json!({
            "createRuntime": [
                notes.hook("echo the reason >&2; exit 3"), notes.hook("echo > $NOTES/second"),
            ],
            "poststop": [notes.hook("echo > $NOTES/poststop")],
        });
        let finished = run(host, host.container(), hooks, &["echo", "started"])?;
        finished.prints("")?.fails_with("the reason")?.fails_with("exit status 3")?;
        ensure!(notes.read("second").is_err(), "expected  no hook after the one that failed");
        notes.read("poststop")?;
        Ok(())
    })
}

fn failing_start(host: &Host) -> Result<()> {
    host.leaves_nothing(|| {
        let notes = Notes::new()?;
        let hooks = json!({ "poststart": [notes.hook("echo the reason >&2; exit 3")] });
        run(host, host.container(), hooks, &["sleep", "1000"])?.fails_with("the reason")?;
        Ok(())
    })
}

fn endless(host: &Host) -> Result<()> {
    host.leaves_nothing(|| {
        let notes = Notes::new()?;
        let mut hook = notes.hook("echo $$ > $NOTES/pid; exec sleep 1000");
        hook["timeout"] = json!(2);
        run(host, host.container(), json!({ "createRuntime": [hook] }), &["true"])?.fails_with("hook")?;
        let process = format!("/proc/{}", notes.read("pid")?.trim());
        ensure!(!Path::new(&process).exists(), "expected  the hook killed\ncame      {process} is there");
        Ok(())
    })
}

fn missing(host: &Host) -> Result<()> {
    host.leaves_nothing(|| {
        let hooks = json!({ "createRuntime": [{ "path": "/no/such/hook" }] });
        let finished = run(host, host.container(), hooks, &["true"])?;
        finished.fails_with("/no/such/hook")?.fails_with("no such file or directory")?;
        Ok(())
    })
}

fn inside(host: &Host) -> Result<()> {
    host.leaves_nothing(|| {
        for kind in ["createContainer", "startContainer"] {
            let hooks = json!({ kind: [{ "path": "/bin/true" }] });
            let finished = run(host, host.container(), hooks, &["true"])?;
            finished.fails_with(&format!("hooks.{kind} is not implemented"))?.says_one_line()?;
        }
        Ok(())
    })
}
