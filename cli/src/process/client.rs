//! A process of a container, for a client of its shim. This is the Task service that containerd uses.

use std::{path::Path, time::Duration};

use containerd_shim_protos::{api, shim_async::Client, shim_async::TaskClient, types::task::Status};
use tokio::{net::UnixStream, time::timeout};
use ttrpc::{
    asynchronous::transport::Socket,
    context::{Context, with_duration},
};

use crate::process::{error::ProcessError, signals::SIGKILL, streams::Fifos, terminal::Size};

/// How long the connection to the shim may take.
const CONNECT: Duration = Duration::from_secs(10);

/// How long a program may take to start. A shim that starts a VM takes longest.
pub(crate) const START: Duration = Duration::from_secs(600);

/// How long another answer may take. The shim itself gives up sooner.
pub(crate) const ANSWER: Duration = Duration::from_secs(60);

/// How long a process that was killed may take to end.
const REMOVE_WAIT: Duration = Duration::from_secs(10);

/// A process that a shim has, or is to have.
#[derive(Clone)]
pub(crate) struct Process {
    client: TaskClient,
    container: String,
    /// Empty: the container's own process.
    exec_id: String,
}

impl Process {
    /// Connects to the shim at `address`, `unix://PATH`.
    pub(crate) async fn connect(address: &str, container: &str, exec_id: &str) -> Result<Self, ProcessError> {
        let failed =
            |why: String| ProcessError::Lost { reason: format!("no connection to {address}: {why}") };
        // ttrpc's own way to connect blocks this thread while the shim takes no connection.
        let path = address.trim_start_matches("unix://");
        let stream = timeout(CONNECT, UnixStream::connect(path))
            .await
            .map_err(|_| failed(format!("none within {CONNECT:?}")))?
            .map_err(|error| failed(error.to_string()))?;
        let client = Client::new(Socket::new(stream));
        Ok(Self { client: TaskClient::new(client), container: container.into(), exec_id: exec_id.into() })
    }

    /// For requests about the whole container.
    pub(crate) fn client(&self) -> &TaskClient {
        &self.client
    }

    /// The pid of the shim, as it says itself.
    pub(crate) async fn shim_pid(&self) -> Result<u32, ProcessError> {
        let mut request = api::ConnectRequest::new();
        request.id = self.container.clone();
        Ok(self.client.connect(with_duration(ANSWER), &request).await.map_err(refused)?.shim_pid)
    }

    /// The state of the container's own process.
    pub(crate) async fn container_status(&self) -> Result<Status, ProcessError> {
        let mut request = api::StateRequest::new();
        request.id = self.container.clone();
        let answer = self.client.state(with_duration(ANSWER), &request).await.map_err(refused)?;
        Ok(answer.status.enum_value_or_default())
    }

    /// Adds this process to its container. `process` is that of the OCI runtime-spec.
    pub(crate) async fn add(&self, process: Vec<u8>, fifos: &Fifos) -> Result<(), ProcessError> {
        let uri = |path: &Path| path.display().to_string();
        let mut request = api::ExecProcessRequest::new();
        (request.id, request.exec_id) = (self.container.clone(), self.exec_id.clone());
        request.stdin = fifos.stdin.as_deref().map(uri).unwrap_or_default();
        request.stdout = uri(&fifos.stdout.path);
        match &fifos.stderr {
            Some(stderr) => request.stderr = uri(&stderr.path),
            None => request.terminal = true,
        }
        let spec = request.spec.mut_or_insert_default();
        spec.type_url = "types.containerd.io/opencontainers/runtime-spec/1/Process".into();
        spec.value = process;
        self.client.exec(with_duration(ANSWER), &request).await.map(drop).map_err(refused)
    }

    pub(crate) async fn start(&self) -> Result<(), ProcessError> {
        let mut request = api::StartRequest::new();
        (request.id, request.exec_id) = (self.container.clone(), self.exec_id.clone());
        self.client.start(with_duration(START), &request).await.map(drop).map_err(refused)
    }

    /// The exit status of the program, however long it runs.
    pub(crate) async fn wait(&self) -> Result<u8, ProcessError> {
        let mut request = api::WaitRequest::new();
        (request.id, request.exec_id) = (self.container.clone(), self.exec_id.clone());
        let answer = self.client.wait(Context::default(), &request).await.map_err(refused)?;
        Ok(u8::try_from(answer.exit_status).unwrap_or(u8::MAX))
    }

    pub(crate) async fn kill(&self, signal: i32) -> Result<(), ProcessError> {
        let mut request = api::KillRequest::new();
        (request.id, request.exec_id) = (self.container.clone(), self.exec_id.clone());
        request.signal = signal.unsigned_abs();
        self.client.kill(with_duration(ANSWER), &request).await.map(drop).map_err(refused)
    }

    /// Standard input has ended.
    pub(crate) async fn close_stdin(&self) -> Result<(), ProcessError> {
        let mut request = api::CloseIORequest::new();
        (request.id, request.exec_id) = (self.container.clone(), self.exec_id.clone());
        request.stdin = true;
        self.client.close_io(with_duration(ANSWER), &request).await.map(drop).map_err(refused)
    }

    pub(crate) async fn resize(&self, size: Size) -> Result<(), ProcessError> {
        let mut request = api::ResizePtyRequest::new();
        (request.id, request.exec_id) = (self.container.clone(), self.exec_id.clone());
        (request.width, request.height) = (size.width.into(), size.height.into());
        self.client.resize_pty(with_duration(ANSWER), &request).await.map(drop).map_err(refused)
    }

    /// Tells the shim to forget this process, which has ended or was never started.
    pub(crate) async fn delete(&self) -> Result<(), ProcessError> {
        let mut request = api::DeleteRequest::new();
        (request.id, request.exec_id) = (self.container.clone(), self.exec_id.clone());
        match self.client.delete(with_duration(ANSWER), &request).await {
            // It, or its container, is gone already.
            Err(ttrpc::Error::RpcStatus(status)) if status.code() == ttrpc::Code::NOT_FOUND => Ok(()),
            other => other.map(drop).map_err(refused),
        }
    }

    /// [`delete`](Self::delete) for a process that may still run. It is killed.
    pub(crate) async fn remove(&self) -> Result<(), ProcessError> {
        match self.delete().await {
            Err(ProcessError::Refused(_)) => {}
            other => return other,
        }
        // An error: it has ended meanwhile. Delete says whether it is gone.
        _ = self.kill(SIGKILL).await;
        _ = timeout(REMOVE_WAIT, self.wait()).await;
        self.delete().await
    }
}

pub(crate) fn lost(error: ttrpc::Error) -> ProcessError {
    ProcessError::Lost { reason: error.to_string() }
}

/// The answer to a request that the shim does not fulfil.
pub(crate) fn refused(error: ttrpc::Error) -> ProcessError {
    match error {
        ttrpc::Error::RpcStatus(status) => {
            let message = status.message;
            // The shim uses the words of runc, because they are all that tells docker of a program that is not there.
            let at_exec = |words: &str| message.contains("exec: ") && message.ends_with(words);
            let is_missing = ["executable file not found in $PATH", "no such file or directory"];
            if is_missing.into_iter().any(at_exec) {
                return ProcessError::NoProgram { message, status: 127 };
            }
            if ["permission denied", "is a directory", "exec format error"].into_iter().any(at_exec) {
                return ProcessError::NoProgram { message, status: 126 };
            }
            ProcessError::Refused(message)
        }
        other => lost(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status_of(message: &str) -> u8 {
        refused(ttrpc::Error::RpcStatus(ttrpc::get_status(ttrpc::Code::UNKNOWN, message))).status()
    }

    #[test]
    fn a_program_that_is_not_there_has_a_status_of_its_own() {
        assert_eq!(status_of("container a: exec: \"nope\": executable file not found in $PATH"), 127);
        assert_eq!(status_of("container a: exec: \"/x\": stat /x: no such file or directory"), 127);
        assert_eq!(status_of("container a: exec: \"/etc/passwd\": permission denied"), 126);
        assert_eq!(status_of("container a: mounts[7]: source /x: no such file or directory"), 125);
    }
}
