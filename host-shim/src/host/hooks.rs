//! OCI hooks (runtime-spec, config.md, "POSIX-platform Hooks"): programs of the host that are run along a
//! container's life, each with the container's state (runtime.md, "State") on its standard input.
//!
//! The pid in the state is the container's on the host: that of the VMM or of the placeholder process. createContainer
//! and startContainer hooks run in the container's namespaces, which are in the guest, and are refused.

use std::{
    collections::HashMap,
    error::Error,
    fs::{self, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    process::{ExitStatus, Stdio},
    time::Duration,
};

use oci_spec::runtime::Hook;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::{
    io::AsyncWriteExt,
    process::{Child, Command},
    runtime,
    time::timeout,
};

use crate::{
    host::{
        blocking,
        child_log::read_lines,
        journal::{Effect, Journal},
    },
    types::{
        error::chain,
        request_error::{RequestError, invalid, unimplemented},
        spec::Spec,
    },
};

/// How long after a hook's end its standard error is read. Processes that it left running may hold it open.
const STDERR_AFTER_END: Duration = Duration::from_secs(1);

/// How long the `poststop` hooks of a container may take together.
pub(crate) const POSTSTOP: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 30 });

/// A container's hooks that are run on the host.
#[derive(Debug, Default)]
pub(crate) struct Hooks {
    creating: Vec<NamedHook>,
    started: Vec<NamedHook>,
    stopped: Vec<NamedHook>,
    state: State,
}

#[derive(Debug)]
struct NamedHook {
    /// Where it is in the spec, and its path.
    name: String,
    hook: Hook,
}

/// The state of the container, as its hooks read it (runtime.md, "State").
#[derive(Debug, Clone, Default, Serialize)]
#[serde(rename_all = "camelCase")]
struct State {
    oci_version: String,
    id: String,
    status: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pid: Option<u32>,
    bundle: PathBuf,
    annotations: HashMap<String, String>,
}

/// Why a hook failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HookError {
    #[error("cannot run {hook}")]
    Run { hook: String, source: io::Error },
    #[error("{hook} failed ({}): {reason}", shown(status))]
    Failed { hook: String, status: ExitStatus, reason: String },
    #[error("{hook} did not end within {seconds} s")]
    Timeout { hook: String, seconds: u64 },
}

impl Hooks {
    /// Checks the hooks of the container `id`.
    pub(crate) fn read(spec: &Spec, id: &str, bundle: &Path) -> Result<Self, RequestError> {
        let state = State {
            oci_version: spec.oci_version.clone(),
            id: id.to_owned(),
            bundle: bundle.to_owned(),
            annotations: spec.annotations.clone(),
            ..State::default()
        };
        let Some(hooks) = &spec.hooks else { return Ok(Self { state, ..Self::default() }) };
        let inside =
            [("createContainer", hooks.create_container()), ("startContainer", hooks.start_container())];
        for (name, list) in inside {
            if list.as_ref().is_some_and(|hooks| !hooks.is_empty()) {
                return Err(unimplemented(format!("hooks.{name}"), ": the container is in a microVM"));
            }
        }
        // `prestart` is deprecated, but docker uses it.
        #[allow(deprecated)]
        let prestart = named("prestart", hooks.prestart())?;
        let mut creating = prestart;
        creating.extend(named("createRuntime", hooks.create_runtime())?);
        let (started, stopped) =
            (named("poststart", hooks.poststart())?, named("poststop", hooks.poststop())?);
        Ok(Self { creating, started, stopped, state })
    }

    /// Runs `prestart` and `createRuntime`, after the VM was started and before the container is created.
    pub(crate) async fn creating(&self, pid: u32) -> Result<(), HookError> {
        self.run_all(&self.creating, "creating", Some(pid)).await
    }

    /// Runs `poststart`, after the container's program was executed.
    pub(crate) async fn started(&self, pid: u32) -> Result<(), HookError> {
        self.run_all(&self.started, "running", Some(pid)).await
    }

    /// Runs `poststop`, after the container was deleted. A failure is logged, and the next hook is run (runtime.md,
    /// "Lifecycle").
    pub(crate) async fn stopped(&self) {
        for hook in &self.stopped {
            if let Err(e) = self.run(hook, "stopped", None).await {
                tracing::warn!(container = self.state.id, error = chain(&e), "a poststop hook failed");
            }
        }
    }

    /// The same, at most `within`. Then the hook that runs is killed.
    pub(crate) async fn stopped_within(&self, within: Duration) {
        if timeout(within, self.stopped()).await.is_err() {
            tracing::warn!(container = self.state.id, "the poststop hooks are killed: they take too long");
        }
    }

    /// Writes the `poststop` hooks to the file `path`, if there are any, for whoever cleans up after a crash of the
    /// shim ([`SavedHooks`]). containerd may have removed the bundle by then.
    pub(crate) fn save_stopped(&self, journal: &mut Journal, path: &Path) -> io::Result<()> {
        if self.stopped.is_empty() {
            return Ok(());
        }
        let State { oci_version, id, bundle, annotations, .. } = &self.state;
        let stopped: Vec<_> = self.stopped.iter().map(|named| &named.hook).collect();
        let spec =
            json!({"ociVersion": oci_version, "annotations": annotations, "hooks": {"poststop": stopped}});
        let saved = SavedHooks { id: id.clone(), bundle: bundle.clone(), spec };
        journal.record(Effect::File { path: path.into() })?;
        // Their environment may have a secret.
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?;
        file.write_all(&serde_json::to_vec(&saved)?)
    }

    /// Runs hooks until one fails.
    async fn run_all(
        &self,
        hooks: &[NamedHook],
        status: &'static str,
        pid: Option<u32>,
    ) -> Result<(), HookError> {
        for hook in hooks {
            self.run(hook, status, pid).await?;
        }
        Ok(())
    }

    async fn run(
        &self,
        NamedHook { name, hook }: &NamedHook,
        status: &'static str,
        pid: Option<u32>,
    ) -> Result<(), HookError> {
        let failed = |source| HookError::Run { hook: name.clone(), source };
        let state = State { status, pid, ..self.state.clone() };
        let state = serde_json::to_vec(&state).map_err(|e| failed(e.into()))?;
        let child = blocking::spawn(command(hook, &self.state.bundle)).await.map_err(failed)?;
        let ended = attend(name, child, &state);
        let ended = match hook.timeout().and_then(|seconds| u64::try_from(seconds).ok()) {
            // The hook is killed as it is dropped.
            Some(seconds) => timeout(Duration::from_secs(seconds), ended)
                .await
                .map_err(|_| HookError::Timeout { hook: name.clone(), seconds })?,
            None => ended.await,
        };
        let (status, said_last) = ended.map_err(failed)?;
        if status.success() {
            tracing::info!(container = self.state.id, hook = name, "the hook is done");
            return Ok(());
        }
        let reason = if said_last.is_empty() { "it does not say why".into() } else { said_last };
        Err(HookError::Failed { hook: name.clone(), status, reason })
    }
}

/// The `poststop` hooks of a container, as a file in the state directory of its pod.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct SavedHooks {
    id: String,
    bundle: PathBuf,
    /// What of its OCI spec the hooks are read from.
    spec: Value,
}

impl SavedHooks {
    /// Runs all in a directory, after their containers were removed, and removes each file when its hooks have run. If
    /// this process is killed, the next one runs the rest, and once more those that ran. Blocks.
    pub(crate) fn run_all(directory: &Path) {
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            let saved =
                fs::read(entry.path()).ok().and_then(|text| serde_json::from_slice::<Self>(&text).ok());
            // One that was not written completely belongs to a container that was never created.
            if let Some(saved) = saved {
                saved.run();
            }
            if let Err(e) = fs::remove_file(entry.path()) {
                tracing::warn!(path = %entry.path().display(), error = chain(&e), "these hooks may run again");
            }
        }
    }

    fn run(self) {
        let Self { id, bundle, spec } = self;
        let run = || -> Result<(), Box<dyn Error>> {
            let spec: Spec = serde_json::from_value(spec)?;
            let hooks = Hooks::read(&spec, &id, &bundle)?;
            let runtime = runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(hooks.stopped_within(POSTSTOP));
            Ok(())
        };
        if let Err(e) = run() {
            tracing::warn!(container = id, bundle = %bundle.display(), error = chain(e.as_ref()), "no hooks are run");
        }
    }
}

/// As runc words it.
fn shown(status: &ExitStatus) -> String {
    status.code().map_or_else(|| status.to_string(), |code| format!("exit status {code}"))
}

fn named(kind: &str, hooks: &Option<Vec<Hook>>) -> Result<Vec<NamedHook>, RequestError> {
    let hooks = hooks.iter().flatten().enumerate().map(|(index, hook)| {
        let place = format!("hooks.{kind}[{index}]");
        if !hook.path().is_absolute() {
            let reason = format!("must be an absolute path, not {:?}", hook.path().display());
            return Err(invalid(format!("{place}.path"), reason));
        }
        if hook.timeout().is_some_and(|seconds| seconds <= 0) {
            return Err(invalid(format!("{place}.timeout"), "must be greater than zero"));
        }
        Ok(NamedHook { name: format!("{place} ({})", hook.path().display()), hook: hook.clone() })
    });
    hooks.collect()
}

fn command(hook: &Hook, bundle: &Path) -> Command {
    let mut command = Command::new(hook.path());
    if let Some((name, arguments)) = hook.args().as_deref().and_then(<[String]>::split_first) {
        command.arg0(name).args(arguments);
    }
    // Without `env` it has the shim's, as with runc.
    if let Some(env) = hook.env() {
        command.env_clear().envs(env.iter().map(|entry| entry.split_once('=').unwrap_or((entry, ""))));
    }
    // containerd may have removed the bundle of a container whose shim has died.
    command
        .current_dir(if bundle.is_dir() { bundle } else { Path::new("/") })
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    command
}

/// Writes the state to a hook and waits for its end. Returns its status and the last line of its standard error.
async fn attend(name: &str, mut child: Child, state: &[u8]) -> io::Result<(ExitStatus, String)> {
    let stdin = child.stdin.take();
    let stderr = tokio::spawn(read_lines(name.to_owned(), child.stderr.take()));
    let tell = async {
        if let Some(mut stdin) = stdin {
            // A hook need not read it.
            drop(stdin.write_all(state).await);
        }
    };
    let (_, status) = tokio::join!(tell, child.wait());
    let said_last = timeout(STDERR_AFTER_END, stderr).await.ok().and_then(Result::ok).unwrap_or_default();
    Ok((status?, said_last))
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Bundle(tempfile::TempDir);

    impl Bundle {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn hooks(&self, hooks: Value) -> Result<Hooks, RequestError> {
            let spec = json!({"ociVersion": "1.1.0", "annotations": {"a": "b"}, "hooks": hooks});
            Hooks::read(&serde_json::from_value(spec).unwrap(), "demo", self.0.path())
        }

        fn read(&self, name: &str) -> String {
            fs::read_to_string(self.0.path().join(name)).unwrap()
        }
    }

    fn shell(script: &str) -> Value {
        json!({"path": "/bin/sh", "args": ["sh", "-c", script], "env": ["PATH=/usr/bin:/bin", "COLOUR=red"]})
    }

    #[tokio::test]
    async fn a_hook_is_told_the_state_in_its_phase() {
        let bundle = Bundle::new();
        let into = |file: &str| shell(&format!("echo $COLOUR $0 $# >> order; cat > {file}"));
        let hooks = bundle
            .hooks(json!({
                "prestart": [into("prestart")],
                "createRuntime": [into("createRuntime")],
                "poststart": [into("poststart")],
                "poststop": [into("poststop")],
            }))
            .unwrap();
        hooks.creating(7).await.unwrap();
        assert_eq!(bundle.read("order"), "red sh 0\nred sh 0\n");
        hooks.started(7).await.unwrap();
        hooks.stopped().await;
        let base = json!({"ociVersion": "1.1.0", "id": "demo", "bundle": bundle.0.path(), "annotations": {"a": "b"}});
        for (file, status, pid) in [
            ("prestart", "creating", Some(7)),
            ("createRuntime", "creating", Some(7)),
            ("poststart", "running", Some(7)),
            ("poststop", "stopped", None),
        ] {
            let mut expected = base.clone();
            expected["status"] = status.into();
            if let Some(pid) = pid {
                expected["pid"] = pid.into();
            }
            assert_eq!(serde_json::from_str::<Value>(&bundle.read(file)).unwrap(), expected);
        }
    }

    #[tokio::test]
    async fn the_first_failure_ends_a_phase_and_says_why() {
        let bundle = Bundle::new();
        let hooks = json!([
            shell("echo one >> order; echo first >&2; echo why >&2; exit 3"),
            shell("echo two >> order")
        ]);
        let hooks = bundle.hooks(json!({"createRuntime": hooks, "poststop": hooks})).unwrap();
        let error = hooks.creating(7).await.unwrap_err().to_string();
        assert_eq!(error, "hooks.createRuntime[0] (/bin/sh) failed (exit status 3): why");
        assert_eq!(bundle.read("order"), "one\n");
        // But for those that clean up.
        hooks.stopped().await;
        assert_eq!(bundle.read("order"), "one\none\ntwo\n");
    }

    #[test]
    fn those_of_a_container_whose_shim_has_died_run_without_its_bundle() {
        let bundle = Bundle::new();
        let dir = tempfile::tempdir().unwrap();
        let script = format!("cat > {}/said; pwd >> {0}/said", dir.path().display());
        let poststop = json!({"prestart": [shell("exit 1")], "poststop": [shell(&script)]});
        let mut journal = Journal::open(&dir.path().join("journal")).unwrap();
        let saved = dir.path().join("saved");
        fs::create_dir(&saved).unwrap();
        let path = bundle.0.path().to_owned();
        bundle
            .hooks(json!({"prestart": [shell("true")]}))
            .unwrap()
            .save_stopped(&mut journal, &saved.join("none"))
            .unwrap();
        bundle.hooks(poststop).unwrap().save_stopped(&mut journal, &saved.join("demo")).unwrap();
        fs::write(saved.join("torn"), "{\"id\": ").unwrap();
        drop(bundle);
        assert!(saved.join("demo").exists() && !saved.join("none").exists());
        SavedHooks::run_all(&saved);
        assert_eq!(fs::read_dir(&saved).unwrap().count(), 0);
        journal.undo().unwrap();
        let said = fs::read_to_string(dir.path().join("said")).unwrap();
        let state = json!({"ociVersion": "1.1.0", "id": "demo", "status": "stopped", "bundle": path, "annotations": {"a": "b"}});
        let said = said.strip_suffix("/\n").unwrap();
        assert_eq!(serde_json::from_str::<Value>(said).unwrap(), state);
        SavedHooks::run_all(&dir.path().join("nowhere"));
    }

    #[tokio::test]
    async fn a_hook_that_does_not_end_is_killed() {
        let bundle = Bundle::new();
        let mut hook = shell("echo $$ > pid; exec sleep 1000");
        hook["timeout"] = json!(1);
        let hooks = bundle.hooks(json!({"poststart": [hook]})).unwrap();
        let error = hooks.started(7).await.unwrap_err().to_string();
        assert_eq!(error, "hooks.poststart[0] (/bin/sh) did not end within 1 s");
        let status = format!("/proc/{}/stat", bundle.read("pid").trim());
        // Gone, or dead and not yet reaped.
        let running = || fs::read_to_string(&status).is_ok_and(|stat| !stat.contains(") Z "));
        while running() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    #[tokio::test]
    async fn a_hook_that_cannot_be_run_is_named() {
        let bundle = Bundle::new();
        let hooks = bundle.hooks(json!({"prestart": [{"path": "/no/such/hook"}]})).unwrap();
        let error = chain(&hooks.creating(7).await.unwrap_err());
        assert_eq!(error, "cannot run hooks.prestart[0] (/no/such/hook): no such file or directory");
    }

    #[tokio::test]
    async fn a_hook_need_neither_read_nor_close() {
        let bundle = Bundle::new();
        let hooks = bundle.hooks(json!({"prestart": [shell("exec <&-; sleep 5 & exit 0")]})).unwrap();
        timeout(Duration::from_secs(4), hooks.creating(7)).await.unwrap().unwrap();
    }

    #[test]
    fn what_cannot_be_honoured_is_refused_by_name() {
        let cases = [
            (json!({"createContainer": [shell("true")]}), "hooks.createContainer is not implemented"),
            (json!({"startContainer": [shell("true")]}), "hooks.startContainer is not implemented"),
            (json!({"poststop": [{"path": "hook"}]}), "hooks.poststop[0].path: must be an absolute path"),
            (
                json!({"poststop": [{"path": "/h", "timeout": 0}]}),
                "hooks.poststop[0].timeout: must be greater",
            ),
        ];
        for (hooks, expected) in cases {
            let error = Bundle::new().hooks(hooks).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}");
        }
        Bundle::new().hooks(json!({"startContainer": []})).unwrap();
    }
}
