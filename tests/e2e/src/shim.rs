//! A task's shim, spoken to directly on its socket as containerd does it: what no command of ctr asks for, and the
//! codes of errors, which ctr does not show.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use containerd_shim_protos::api;
use protobuf::well_known_types::any::Any;
use protobuf::well_known_types::empty::Empty;
use protobuf::{Message, MessageFull};
use serde_json::Value;
use ttrpc::{Client, Code};

use crate::ctr::{Host, NAMESPACE, Runtime};

/// The service's name in containerd 2, and before it. The messages are the same.
const SERVICES: [&str; 2] = ["containerd.task.v3.Task", "containerd.task.v2.Task"];
/// Where containerd keeps the bundles of tasks.
const BUNDLES: &str = "/run/containerd/io.containerd.runtime.v2.task";
/// How long an answer may take.
const ANSWER: Duration = Duration::from_secs(60);

/// A connection to the shim of one task.
pub(crate) struct Shim {
    client: Client,
    service: &'static str,
    id: String,
    limit: Duration,
}

/// The answer to a request that was refused.
#[derive(Debug)]
pub(crate) struct Refused {
    /// What went wrong, for programs.
    pub(crate) code: Code,
    /// What went wrong, for people.
    pub(crate) message: String,
    /// From the request to the answer.
    pub(crate) took: Duration,
}

impl Refused {
    /// Expects this code.
    pub(crate) fn with(self, code: Code) -> Result<Self> {
        ensure!(
            self.code == code,
            "expected  the code {code:?}\ncame      {:?}: {:?}",
            self.code,
            self.message
        );
        Ok(self)
    }

    /// Expects this text in the message.
    pub(crate) fn saying(self, text: &str) -> Result<Self> {
        ensure!(
            self.message.contains(text),
            "expected  {text:?} in the message\ncame      {:?}",
            self.message
        );
        Ok(self)
    }

    /// Expects that the answer took no longer.
    pub(crate) fn within(self, limit: Duration) -> Result<Self> {
        ensure!(
            self.took <= limit,
            "expected  an answer within {limit:?}\ncame      it after {:?}",
            self.took
        );
        Ok(self)
    }
}

/// Expects that a request was refused.
pub(crate) fn refused<T>(answer: Result<T, Refused>) -> Result<Refused> {
    match answer {
        Ok(_) => bail!("expected  a refusal\ncame      an answer"),
        Err(refused) => Ok(refused),
    }
}

/// Expects that a request was granted.
pub(crate) fn granted<T>(answer: Result<T, Refused>) -> Result<T> {
    answer.map_err(|refused| {
        anyhow!("expected  an answer\ncame      {:?}: {:?}", refused.code, refused.message)
    })
}

/// The code for what is not possible in a task's state. runc has none for it.
pub(crate) fn precondition(host: &Host) -> Code {
    match host.runtime() {
        Runtime::Runc => Code::UNKNOWN,
        Runtime::Bulkhead => Code::FAILED_PRECONDITION,
    }
}

/// The code for what could never be right. runc has none for it.
pub(crate) fn invalid(host: &Host) -> Code {
    match host.runtime() {
        Runtime::Runc => Code::UNKNOWN,
        Runtime::Bulkhead => Code::INVALID_ARGUMENT,
    }
}

/// The directory of a task's spec and state in containerd.
pub(crate) fn bundle(id: &str) -> PathBuf {
    Path::new(BUNDLES).join(NAMESPACE).join(id)
}

impl Shim {
    /// Connects to the shim of this task.
    pub(crate) fn of(host: &Host, id: &str) -> Result<Self> {
        Self::at(host, &address(id)?, id)
    }

    /// Connects to a shim on its socket.
    pub(crate) fn at(host: &Host, address: &str, id: &str) -> Result<Self> {
        let client = Client::connect(address).map_err(|error| anyhow!("the shim of {id}: {error}"))?;
        let mut shim = Self { client, service: SERVICES[0], id: id.to_owned(), limit: host.patience(ANSWER) };
        if shim.state("").is_err_and(|refused| refused.code == Code::UNIMPLEMENTED) {
            shim.service = SERVICES[1];
        }
        Ok(shim)
    }

    /// Asks for something by the method's name.
    pub(crate) fn call<A: Message>(&self, method: &str, request: &impl MessageFull) -> Result<A, Refused> {
        let started = Instant::now();
        let failed = |code, message: String| Refused { code, message, took: started.elapsed() };
        let payload = request.write_to_bytes().map_err(|error| failed(Code::INTERNAL, error.to_string()))?;
        let request = ttrpc::Request {
            service: self.service.into(),
            method: method.into(),
            payload,
            timeout_nano: i64::try_from(self.limit.as_nanos()).unwrap_or(i64::MAX),
            ..Default::default()
        };
        match self.client.request(request) {
            Ok(answer) => A::parse_from_bytes(&answer.payload)
                .map_err(|error| failed(Code::INTERNAL, format!("an answer that is none: {error}"))),
            Err(ttrpc::Error::RpcStatus(status)) => Err(failed(status.code(), status.message)),
            // The test's own words: no code of a shim's stands for no answer at all.
            Err(error) => Err(failed(Code::DEADLINE_EXCEEDED, format!("no answer: {error}"))),
        }
    }

    /// State.
    pub(crate) fn state(&self, exec_id: &str) -> Result<api::StateResponse, Refused> {
        let mut request = api::StateRequest::new();
        (request.id, request.exec_id) = (self.id.clone(), exec_id.into());
        self.call("State", &request)
    }

    /// Create, with these changes to what containerd would ask for.
    pub(crate) fn create(
        &self,
        change: impl FnOnce(&mut api::CreateTaskRequest),
    ) -> Result<api::CreateTaskResponse, Refused> {
        let mut request = api::CreateTaskRequest::new();
        request.id = self.id.clone();
        request.bundle = bundle(&self.id).display().to_string();
        change(&mut request);
        self.call("Create", &request)
    }

    /// Start.
    pub(crate) fn start(&self, exec_id: &str) -> Result<api::StartResponse, Refused> {
        let mut request = api::StartRequest::new();
        (request.id, request.exec_id) = (self.id.clone(), exec_id.into());
        self.call("Start", &request)
    }

    /// Exec, of the command.
    pub(crate) fn exec(&self, exec_id: &str, command: &[&str]) -> Result<Empty, Refused> {
        let process = serde_json::json!({
            "args": command, "cwd": "/", "user": {"uid": 0, "gid": 0}, "env": ["PATH=/usr/bin:/bin"],
        });
        self.exec_of(exec_id, process.to_string().into_bytes())
    }

    /// Exec, of these bytes for an OCI process.
    pub(crate) fn exec_of(&self, exec_id: &str, process: Vec<u8>) -> Result<Empty, Refused> {
        let mut request = api::ExecProcessRequest::new();
        (request.id, request.exec_id) = (self.id.clone(), exec_id.into());
        request.spec = Some(oci("Process", process)).into();
        self.call("Exec", &request)
    }

    /// Kill.
    pub(crate) fn kill(&self, exec_id: &str, signal: u32) -> Result<Empty, Refused> {
        let mut request = api::KillRequest::new();
        (request.id, request.exec_id, request.signal) = (self.id.clone(), exec_id.into(), signal);
        self.call("Kill", &request)
    }

    /// Wait.
    pub(crate) fn wait(&self, exec_id: &str) -> Result<api::WaitResponse, Refused> {
        let mut request = api::WaitRequest::new();
        (request.id, request.exec_id) = (self.id.clone(), exec_id.into());
        self.call("Wait", &request)
    }

    /// Delete.
    pub(crate) fn delete(&self, exec_id: &str) -> Result<api::DeleteResponse, Refused> {
        let mut request = api::DeleteRequest::new();
        (request.id, request.exec_id) = (self.id.clone(), exec_id.into());
        self.call("Delete", &request)
    }

    /// Pause.
    pub(crate) fn pause(&self) -> Result<Empty, Refused> {
        let mut request = api::PauseRequest::new();
        request.id = self.id.clone();
        self.call("Pause", &request)
    }

    /// Resume.
    pub(crate) fn resume(&self) -> Result<Empty, Refused> {
        let mut request = api::ResumeRequest::new();
        request.id = self.id.clone();
        self.call("Resume", &request)
    }

    /// Pids: how many there are.
    pub(crate) fn pids(&self) -> Result<usize, Refused> {
        let mut request = api::PidsRequest::new();
        request.id = self.id.clone();
        Ok(self.call::<api::PidsResponse>("Pids", &request)?.processes.len())
    }

    /// Stats.
    pub(crate) fn stats(&self) -> Result<Any, Refused> {
        let mut request = api::StatsRequest::new();
        request.id = self.id.clone();
        Ok(self.call::<api::StatsResponse>("Stats", &request)?.stats.unwrap_or_default())
    }

    /// Update, of these OCI resources.
    pub(crate) fn update(&self, resources: &Value) -> Result<Empty, Refused> {
        self.update_of(resources.to_string().into_bytes())
    }

    /// Update, of these bytes for OCI resources.
    pub(crate) fn update_of(&self, resources: Vec<u8>) -> Result<Empty, Refused> {
        let mut request = api::UpdateTaskRequest::new();
        request.id = self.id.clone();
        request.resources = Some(oci("LinuxResources", resources)).into();
        self.call("Update", &request)
    }

    /// This connection, for requests about another task, which the shim may not have.
    pub(crate) fn about(mut self, id: &str) -> Self {
        self.id = id.to_owned();
        self
    }
}

/// As containerd packs what the OCI specifies: JSON.
fn oci(kind: &str, json: Vec<u8>) -> Any {
    let mut any = Any::new();
    any.type_url = format!("types.containerd.io/opencontainers/runtime-spec/1/{kind}");
    any.value = json;
    any
}

/// The address of the socket, which the shim leaves in the bundle, or containerd 2 for it.
fn address(id: &str) -> Result<String> {
    let bundle = bundle(id);
    if let Ok(address) = fs::read_to_string(bundle.join("address")) {
        return Ok(address.trim().to_owned());
    }
    let file = bundle.join("bootstrap.json");
    let json = fs::read(&file).with_context(|| format!("{} has no address either", file.display()))?;
    let json: Value = serde_json::from_slice(&json).with_context(|| format!("{}", file.display()))?;
    let address = json.get("address").and_then(Value::as_str);
    address.map(str::to_owned).ok_or_else(|| anyhow!("no address in {}", file.display()))
}
