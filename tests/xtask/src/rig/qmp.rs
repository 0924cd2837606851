//! QEMU's control protocol, as far as the rig needs it.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

/// How long the saving of a state may take.
const SAVE_LIMIT: Duration = Duration::from_secs(300);

/// The control channel of a QEMU that serves it on its standard input and output.
#[derive(Debug)]
pub(super) struct Qmp {
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Qmp {
    /// Greets QEMU.
    pub(super) fn new(child: &mut Child) -> Result<Qmp> {
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            bail!("QEMU was started without pipes for QMP");
        };
        let mut qmp = Qmp { input, output: BufReader::new(output) };
        qmp.execute("qmp_capabilities", &json!({}))?;
        Ok(qmp)
    }

    /// Executes a command and returns what it returns.
    pub(super) fn execute(&mut self, command: &str, arguments: &Value) -> Result<Value> {
        let context = || format!("QEMU does not answer to {command}");
        let request = json!({"execute": command, "arguments": arguments});
        writeln!(self.input, "{request}").with_context(context)?;
        loop {
            let mut line = String::new();
            if self.output.read_line(&mut line).with_context(context)? == 0 {
                bail!("QEMU has ended before it answered to {command}");
            }
            // The greeting and the events come between; they are of no interest.
            let mut answer: Value = serde_json::from_str(&line).with_context(context)?;
            if let Some(error) = answer.get("error") {
                bail!("QEMU refuses {command}: {error}");
            }
            if let Some(value) = answer.get_mut("return") {
                return Ok(value.take());
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
        let mut words = String::new();
        match self.output.read_to_string(&mut words) {
            Ok(0) => "nothing".to_owned(),
            Ok(_) => words.trim_end().replace(['\r', '\n'], " "),
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
