//! containerd's events, as `ctr events` prints them.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, anyhow, bail, ensure};

use crate::ctr::{Host, IMAGE, NAMESPACE, Runtime};

/// How long an event may take to come.
const LIMIT: Duration = Duration::from_secs(20);
/// How long one probe is waited for, before another is sent.
const PROBE: Duration = Duration::from_millis(500);

/// One event of the tests' namespace.
#[derive(Debug, Clone)]
pub(crate) struct Event {
    /// When this process read it.
    pub(crate) read: Instant,
    /// `/tasks/exit`.
    pub(crate) topic: String,
    /// Its fields.
    pub(crate) fields: serde_json::Value,
}

impl Event {
    /// Id of the container that a task's event is about.
    pub(crate) fn container(&self) -> Option<&str> {
        self.fields.get("container_id")?.as_str()
    }

    /// Exit status of an exit or delete event; JSON leaves a zero out.
    pub(crate) fn exit_status(&self) -> u64 {
        self.fields.get("exit_status").and_then(serde_json::Value::as_u64).unwrap_or(0)
    }

    /// When the process ended, by the clock of the shim's host.
    pub(crate) fn exited_at(&self) -> Result<SystemTime> {
        // containerd 1.6 prints it as RFC 3339 has it, later ones as protobuf's Timestamp.
        if let Some(text) = self.fields.get("exited_at").and_then(serde_json::Value::as_str) {
            return humantime::parse_rfc3339(text).with_context(|| format!("exited_at {text:?} is no time"));
        }
        let part = |name: &str| {
            self.fields.pointer(&format!("/exited_at/{name}")).and_then(serde_json::Value::as_u64)
        };
        let seconds =
            part("seconds").ok_or_else(|| anyhow!("no exited_at in {}: {}", self.topic, self.fields))?;
        Ok(UNIX_EPOCH + Duration::from_secs(seconds) + Duration::from_nanos(part("nanos").unwrap_or(0)))
    }
}

/// A subscription to the events.
pub(crate) struct Events {
    child: Child,
    lines: Receiver<Event>,
    limit: Duration,
}

impl Events {
    /// Subscribes; everything that happens after this returns is seen.
    pub(crate) fn subscribe(host: &Host) -> Result<Self> {
        let mut child = Command::new("ctr")
            .args(["--namespace", NAMESPACE, "events"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start ctr events")?;
        let stdout = child.stdout.take().ok_or_else(|| anyhow!("ctr events has no standard output"))?;
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if let Some(event) = parse(&line)
                    && sender.send(event).is_err()
                {
                    return;
                }
            }
        });
        let events = Self { child, lines, limit: host.patience(LIMIT) };
        events.wait_for_the_first(host)?;
        Ok(events)
    }

    /// ctr does not say when it has subscribed. So events are caused, until one is seen.
    fn wait_for_the_first(&self, host: &Host) -> Result<()> {
        let deadline = Instant::now() + self.limit;
        while Instant::now() < deadline {
            host.ctr(["images", "label", IMAGE, "bulkhead-e2e=events"]).run()?.succeeds()?;
            match self.lines.recv_timeout(PROBE) {
                Ok(_) => return Ok(()),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => bail!("ctr events ended by itself"),
            }
        }
        bail!("ctr events showed no event within {} s", self.limit.as_secs())
    }

    /// Expects these events of a container's life in this order, and that of its deletion after them. Answers them.
    ///
    /// runc's shim may end before it has sent its last event: the deletion's answer is followed by containerd's
    /// Shutdown, upon which it waits for nothing. So of runc's containers the life is told up to the deletion.
    pub(crate) fn expect_life(&self, host: &Host, container: &str, topics: &[&str]) -> Result<Vec<Event>> {
        let deletion = (host.runtime() == Runtime::Bulkhead).then_some("/tasks/delete");
        let expected: Vec<_> = topics.iter().copied().chain(deletion).collect();
        let seen = self.of_task(container, |seen| seen.len() == expected.len());
        let seen = seen.with_context(|| format!("expected  the events {expected:?} of {container}"))?;
        let came: Vec<_> = seen.iter().map(|event| event.topic.as_str()).collect();
        ensure!(came == expected, "expected  the events {expected:?}\ncame      {came:?}");
        Ok(seen)
    }

    /// The events of this container's task, up to and with the one of this topic.
    pub(crate) fn of_task_until(&self, container: &str, topic: &str) -> Result<Vec<Event>> {
        let seen = self.of_task(container, |seen| seen.last().is_some_and(|event| event.topic == topic));
        seen.with_context(|| format!("expected  the event {topic} of {container}"))
    }

    /// The events of this container's task until they are enough.
    fn of_task(&self, container: &str, is_enough: impl Fn(&[Event]) -> bool) -> Result<Vec<Event>> {
        let deadline = Instant::now() + self.limit;
        let mut seen: Vec<Event> = Vec::new();
        while !is_enough(&seen) {
            let left = deadline.saturating_duration_since(Instant::now());
            let Ok(event) = self.lines.recv_timeout(left) else {
                let topics: Vec<_> = seen.iter().map(|event| event.topic.as_str()).collect();
                bail!("came      {topics:?} within {} s", self.limit.as_secs());
            };
            if event.container() == Some(container) {
                seen.push(event);
            }
        }
        Ok(seen)
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// `DATE TIME ZONE ZONE NAMESPACE TOPIC JSON`; None for another namespace's.
fn parse(line: &str) -> Option<Event> {
    let (_, rest) = line.split_once(&format!(" {NAMESPACE} "))?;
    let (topic, fields) = rest.split_once(' ')?;
    Some(Event { read: Instant::now(), topic: topic.to_owned(), fields: serde_json::from_str(fields).ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exit_is_read_from_a_line_of_ctr() {
        let line = r#"2026-11-21 10:13:19.688967824 +0000 UTC bulkhead-e2e /tasks/exit {"container_id":"a7","exit_status":5}"#;
        let event = parse(line).unwrap();
        assert_eq!(
            (event.topic.as_str(), event.container(), event.exit_status()),
            ("/tasks/exit", Some("a7"), 5)
        );
    }

    #[test]
    fn events_of_other_namespaces_are_not_ours() {
        assert!(parse("2026-11-21 10:13:19.6 +0000 UTC k8s.io /tasks/exit {}").is_none());
    }
}
