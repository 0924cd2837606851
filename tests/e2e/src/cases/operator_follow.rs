//! What an operator follows with the command `bulkhead`: events and consoles.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::Case;
use super::jail::Vmm;
use crate::command::{Cmd, Running, contains};
use crate::ctr::{Host, NAMESPACE};
use crate::fixtures::{CONFIGURATION, Replaced};

pub(super) const CASES: &[Case] = &[Case::bulkhead("events_and_console_follow_a_pod_to_its_end", follow)];

/// A line for the guest's kernel log, which is shown on its console. It would clear a terminal.
const TO_CONSOLE: &str = r"printf '<1>bulkhead-e2e \033[2J says hello\n' > /dev/kmsg";

fn start(host: &Host, arguments: &[&str]) -> Result<Running> {
    Cmd::new("bulkhead").args(arguments).limit(host.patience(Duration::from_secs(60))).start()
}

/// The events of the pod with this name.
fn events(text: &str, id: &str) -> Result<Vec<Value>> {
    let parse = |line: &str| serde_json::from_str(line).with_context(|| format!("not JSON: {line}"));
    let all = text.lines().map(parse).collect::<Result<Vec<Value>>>()?;
    Ok(all.into_iter().filter(|event| event["id"] == id).collect())
}

fn follow(host: &Host) -> Result<()> {
    let mut following = start(host, &["events", "--json", "--namespace", NAMESPACE])?;
    let without = host.container().detach(&["sleep", "1000"])?;
    let refused = Cmd::new("bulkhead").args(["console", without.id()]).run()?;
    refused.exits(1)?.fails_with("has no console: set `console = true`")?.says_one_line()?;
    without.dies()?;

    let replaced = Replaced::file(Path::new(CONFIGURATION), "console = true\n")?;
    let task = host.container().flags(["--privileged"]).detach(&["sleep", "1000"])?;
    drop(replaced);
    let id = task.id().to_owned();
    let mut console = start(host, &["console", &id])?;
    task.exec(&["sh", "-c", TO_CONSOLE])?.succeeds()?;
    console.wait_for("bulkhead-e2e  [2J says hello")?;
    let vmm = Vmm::of(&task)?.pid.to_string();
    Cmd::new("kill").args(["-KILL", &vmm]).run()?.succeeds()?;
    task.ends(137)?;
    let shown = console.finish()?;
    let is_clean = !contains(&shown.succeeds()?.stdout, "\u{1b}");
    ensure!(is_clean, "expected  no escape sequence\ncame      {:?}", shown.text());

    following.wait_for(&format!("\"id\":\"{id}\",\"event\":\"pod_removed\""))?;
    Cmd::new("kill").args(["-TERM", &following.pid().to_string()]).run()?.succeeds()?;
    let text = following.finish()?.text();
    let names = |id: &str| -> Result<Vec<String>> {
        let events = events(&text, id)?;
        Ok(events.iter().map(|event| event["event"].as_str().unwrap_or_default().to_owned()).collect())
    };
    let expected = [
        "pod_began",
        "vm_up",
        "container_created",
        "container_started",
        "vm_ended",
        "container_exited",
        "pod_removed",
    ];
    let came = names(&id)?;
    ensure!(came == expected, "expected  {expected:?}\ncame      {came:?} in {text}");
    let ended = events(&text, &id)?.into_iter().find(|event| event["event"] == "vm_ended");
    let reason = ended.and_then(|event| event["reason"].as_str().map(str::to_owned)).unwrap_or_default();
    ensure!(reason.contains("signal: 9"), "expected  SIGKILL as the reason\ncame      {reason:?}");
    let first = text.lines().find(|line| line.contains("\"vm_up\"")).unwrap_or_default();
    ensure!(first.contains("\"vm\":\"clone\""), "expected  the first pod is a clone\ncame      {first}");
    Ok(())
}
