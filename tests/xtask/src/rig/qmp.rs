//! QEMU's control protocol, as far as the rig needs it.

use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::event::PollFlags;
use serde_json::{Value, json};

use super::is_ready;

/// How long QEMU may take to answer, if it is starting on a busy machine.
pub(super) const ANSWER_LIMIT: Duration = Duration::from_secs(60);

/// How long the saving of a state may take.
const SAVE_LIMIT: Duration = Duration::from_secs(300);

/// The control channel of a QEMU that serves it on its standard input and output.
#[derive(Debug)]
pub(super) struct Qmp {
    input: ChildStdin,
    output: ChildStdout,
    /// What has come of the next lines.
    received: Vec<u8>,
    /// How long it may take to answer.
    limit: Duration,
}

impl Qmp {
    /// Greets QEMU.
    pub(super) fn new(child: &mut Child, limit: Duration) -> Result<Qmp> {
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            bail!("QEMU was started without pipes for QMP");
        };
        let mut qmp = Qmp { input, output, received: Vec::new(), limit };
        qmp.execute("qmp_capabilities", &json!({}))?;
        Ok(qmp)
    }

    /// Executes a command and returns what it returns.
    pub(super) fn execute(&mut self, command: &str, arguments: &Value) -> Result<Value> {
        let context = || format!("QEMU does not answer to {command}");
        let deadline = Instant::now() + self.limit;
        let request = json!({"execute": command, "arguments": arguments});
        writeln!(self.input, "{request}").with_context(context)?;
        loop {
            let line = self.line(deadline).with_context(context)?;
            // The greeting and the events come between; they are of no interest.
            let mut answer: Value = serde_json::from_slice(&line).with_context(context)?;
            if let Some(error) = answer.get("error") {
                bail!("QEMU refuses {command}: {error}");
            }
            if let Some(value) = answer.get_mut("return") {
                return Ok(value.take());
            }
        }
    }

    /// Receives a line.
    fn line(&mut self, deadline: Instant) -> Result<Vec<u8>> {
        loop {
            // Checked for each line, so that a QEMU that never stops sending events is given up too.
            let left = deadline.saturating_duration_since(Instant::now());
            ensure!(!left.is_zero(), "{} s have passed", self.limit.as_secs_f64());
            if let Some(newline) = self.received.iter().position(|byte| *byte == b'\n') {
                return Ok(self.received.drain(..=newline).collect());
            }
            if is_ready(&self.output, PollFlags::IN, left)? {
                let mut buffer = [0; 4096];
                let read = self.output.read(&mut buffer).context("cannot read")?;
                ensure!(read > 0, "it has ended");
                self.received.extend_from_slice(&buffer[..read]);
            }
        }
    }

    /// Loads the state in the file `path` into a QEMU started with `-incoming defer`. Returns when the load has
    /// begun; QEMU ends if it fails.
    pub(super) fn load(&mut self, path: &Path) -> Result<()> {
        self.use_mapped_ram()?;
        self.execute("migrate-incoming", &json!({"uri": format!("file:{}", path.display())}))?;
        Ok(())
    }

    /// Saves the state in the file `path`. The machine stands still afterwards.
    pub(super) fn save(&mut self, path: &Path) -> Result<()> {
        self.use_mapped_ram()?;
        // The default limit of 128 MiB/s is for networks.
        self.execute("migrate-set-parameters", &json!({"max-bandwidth": 0}))?;
        self.execute("migrate", &json!({"uri": format!("file:{}", path.display())}))?;
        let start = Instant::now();
        while start.elapsed() < SAVE_LIMIT {
            let info = self.execute("query-migrate", &json!({}))?;
            match info.get("status").and_then(Value::as_str) {
                Some("completed") => return Ok(()),
                Some("failed" | "cancelled") => bail!("QEMU cannot save its state: {info}"),
                _ => std::thread::sleep(Duration::from_millis(50)),
            }
        }
        bail!("QEMU has not saved its state within {} s", SAVE_LIMIT.as_secs());
    }

    /// The events that nobody has read, of a QEMU that has ended: the last ones say why.
    pub(super) fn last_words(&mut self) -> String {
        let mut words = std::mem::take(&mut self.received);
        match self.output.read_to_end(&mut words) {
            Ok(_) if words.is_empty() => "nothing".to_owned(),
            Ok(_) => String::from_utf8_lossy(&words).trim_end().replace(['\r', '\n'], " "),
            Err(error) => format!("what cannot be read: {error}"),
        }
    }

    /// Has each page at a fixed place of the file, so that a load reads only those in use.
    fn use_mapped_ram(&mut self) -> Result<()> {
        let capabilities = json!({"capabilities": [{"capability": "mapped-ram", "state": true}]});
        self.execute("migrate-set-capabilities", &capabilities)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    /// A shell script in the place of QEMU.
    fn greet(script: &str, limit: Duration) -> (Child, Result<Qmp>) {
        let mut command = Command::new("sh");
        let mut child =
            command.args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let qmp = Qmp::new(&mut child, limit);
        (child, qmp)
    }

    #[test]
    fn an_answer_is_found_among_the_events() {
        let script = "echo '{\"QMP\": 1}'; read line; echo '{\"return\": {}}'; read line
                      printf '{\"event\": 1}\n{\"ret'; sleep 0.1; printf 'urn\": 7}\n{\"event\": 2}\n'";
        let (mut child, qmp) = greet(script, ANSWER_LIMIT);
        let mut qmp = qmp.unwrap();
        assert_eq!(qmp.execute("query", &json!({})).unwrap(), 7);
        child.wait().unwrap();
        assert_eq!(qmp.last_words(), "{\"event\": 2}");
        assert_eq!(qmp.last_words(), "nothing");
    }

    #[test]
    fn who_ends_refuses_or_never_answers_is_given_up() {
        const SHORT: Duration = Duration::from_millis(200);
        for (script, limit, why) in [
            ("read line", ANSWER_LIMIT, "it has ended"),
            ("read line; echo '{\"error\": \"no\"}'", ANSWER_LIMIT, "refuses qmp_capabilities: \"no\""),
            ("exec sleep 60", SHORT, "0.2 s have passed"),
            ("while echo '{\"event\": 1}'; do :; done", SHORT, "0.2 s have passed"),
        ] {
            let start = Instant::now();
            let (mut child, qmp) = greet(script, limit);
            let error = format!("{:#}", qmp.err().unwrap());
            assert!(error.contains(why), "{script}: {error}");
            assert!(start.elapsed() < Duration::from_secs(30), "{script}");
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }
}
