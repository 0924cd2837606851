//! A client of containerd's own services, as docker and kubelet are. It makes containers without starting a `ctr` for
//! each step, which takes much longer than the step.

pub(crate) mod messages;

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use messages::*;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tonic::{Code, Status as Refusal};

use crate::command::wait_until;
use crate::cri::Client;
use crate::cri::messages::{Any, Request};
use crate::ctr::{Host, NAMESPACE};

/// The type of an OCI process in a request for an exec.
const PROCESS: &str = "types.containerd.io/opencontainers/runtime-spec/1/Process";

/// Where the host's containerd listens.
const SOCKET: &str = "/run/containerd/containerd.sock";

/// A connection to the host's containerd, for the tests' namespace. It connects again to one that was restarted.
pub(crate) struct Api {
    client: Client,
    limit: Duration,
}

/// What containers are made of: an image's snapshot and a spec.
pub(crate) struct ContainerSource {
    container: Container,
    spec: Value,
    parent: String,
}

impl ContainerSource {
    /// Adds a bind mount.
    pub(crate) fn with_bind(mut self, source: &Path, destination: &str) -> Result<Self> {
        let mounts = self.spec.pointer_mut("/mounts").and_then(Value::as_array_mut);
        let mount = json!({
            "destination": destination, "type": "bind", "source": source, "options": ["rbind", "rw"],
        });
        mounts.context("the spec has no mounts")?.push(mount);
        Ok(self)
    }
}

impl Api {
    /// Connects. A call may take as long as `limit`.
    pub(crate) fn connect(limit: Duration) -> Result<Self> {
        Ok(Self { client: Client::connect(Path::new(SOCKET), limit)?.in_namespace(NAMESPACE), limit })
    }

    /// The answer to a request, or containerd's reason for none. An error if containerd does not answer in time.
    pub(crate) fn ask<R: Request>(&self, request: R) -> Result<Result<R::Answer, Refusal>> {
        self.ask_within(self.limit, request)
    }

    /// The answer to a request within `limit`, or containerd's reason for none. An error if containerd does not answer
    /// in time.
    pub(crate) fn ask_within<R: Request>(
        &self,
        limit: Duration,
        request: R,
    ) -> Result<Result<R::Answer, Refusal>> {
        self.client.attempt_within(limit, request)
    }

    /// The answer to a request that must succeed.
    pub(crate) fn call<R: Request>(&self, request: R) -> Result<R::Answer> {
        self.client.call(request)
    }

    /// Waits until containerd answers.
    pub(crate) fn wait_until_served(&self, limit: Duration) -> Result<()> {
        wait_until("an answer of containerd", limit, || Ok(self.ask(ListLeases {})?.is_ok()))
    }

    /// What `ctr` makes a container of that runs this command.
    pub(crate) fn source(&self, host: &Host, command: &[&str]) -> Result<ContainerSource> {
        let made = host.container().create(command)?;
        let id = made.id().to_owned();
        let container = self.call(GetContainer { id })?.container.context("no container")?;
        let (snapshotter, key) = (container.snapshotter.clone(), container.snapshot_key.clone());
        let info = self.call(StatSnapshot { snapshotter, key })?.info.context("no snapshot")?;
        let spec = container.spec.as_ref().context("the container has no spec")?;
        let spec = serde_json::from_slice(&spec.value).context("the container's spec is not JSON")?;
        Ok(ContainerSource { container, spec, parent: info.parent })
    }

    /// Makes a container, without a task. Returns the mounts of its root.
    pub(crate) fn create(&self, source: &ContainerSource, id: &str) -> Result<Vec<Mount>> {
        let mut spec = source.spec.clone();
        if let Some(path) = spec.pointer_mut("/linux/cgroupsPath") {
            *path = format!("/{NAMESPACE}/{id}").into();
        }
        let mut container = source.container.clone();
        let type_url = container.spec.take().unwrap_or_default().type_url;
        container.spec = Some(Any { type_url, value: spec.to_string().into_bytes() });
        (container.id, container.snapshot_key) = (id.to_owned(), id.to_owned());
        let snapshot = PrepareSnapshot {
            snapshotter: container.snapshotter.clone(),
            key: id.to_owned(),
            parent: source.parent.clone(),
            // Otherwise containerd may remove the snapshot before the container refers to it.
            labels: HashMap::from([("containerd.io/gc.root".to_owned(), "e2e".to_owned())]),
        };
        let mounts = self.call(snapshot)?.mounts;
        self.call(CreateContainer { container: Some(container) })?;
        Ok(mounts)
    }

    /// Removes a container that has no task, and its snapshot. What does not exist is no error.
    pub(crate) fn remove(&self, source: &ContainerSource, id: &str) -> Result<()> {
        self.remove_parts(id, &source.container.snapshotter, id)
    }

    /// Removes a container that has no task, and the snapshot `key`, if that is not empty.
    fn remove_parts(&self, id: &str, snapshotter: &str, key: &str) -> Result<()> {
        let container = self.ask(DeleteContainer { id: id.to_owned() })?.map(drop);
        let snapshot = if key.is_empty() {
            Ok(())
        } else {
            self.ask(RemoveSnapshot { snapshotter: snapshotter.to_owned(), key: key.to_owned() })?.map(drop)
        };
        for removed in [container, snapshot] {
            match removed {
                Err(refusal) if refusal.code() != Code::NotFound => {
                    return Err(anyhow!("expected  {id} removed\ncame      {}", shown(&refusal)));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// The state of a task's process. None: there is no such process.
    pub(crate) fn state(&self, id: &str) -> Result<Result<Option<Process>, Refusal>> {
        let request = GetProcess { container_id: id.to_owned(), exec_id: String::new() };
        Ok(match self.ask(request)? {
            Ok(answer) => Ok(answer.process),
            Err(refusal) if refusal.code() == Code::NotFound => Ok(None),
            Err(refusal) => Err(refusal),
        })
    }

    /// Deletes a task that has ended, and removes its container. Returns the exit status. An error if there is no such
    /// task.
    pub(crate) fn delete(&self, id: &str) -> Result<u32> {
        let process = self.call(GetProcess { container_id: id.to_owned(), exec_id: String::new() })?.process;
        let status = self.call(DeleteTask { container_id: id.to_owned() })?.exit_status;
        if let Some(process) = process {
            remove_fifos(&[process.stdin, process.stdout, process.stderr]);
        }
        self.remove_container(id)?;
        Ok(status)
    }

    /// Kills what runs in a container, and removes the container. What does not exist is no error.
    pub(crate) fn discard(&self, id: &str) -> Result<()> {
        match self.state(id)?.map_err(|refusal| anyhow!("{}", shown(&refusal)))? {
            Some(process) => {
                if process.status != i32::from(Status::Stopped) {
                    self.call(KillProcess { all: true, ..kill_request(id) })?;
                    self.call(WaitProcess { container_id: id.to_owned(), exec_id: String::new() })?;
                }
                self.delete(id).map(drop)
            }
            None => self.remove_container(id),
        }
    }

    /// Removes a container and its snapshot. What does not exist is no error.
    fn remove_container(&self, id: &str) -> Result<()> {
        let container = match self.ask(GetContainer { id: id.to_owned() })? {
            Ok(answer) => answer.container.context("no container")?,
            Err(refusal) if refusal.code() == Code::NotFound => return Ok(()),
            Err(refusal) => return Err(anyhow!("{}", shown(&refusal))),
        };
        self.remove_parts(id, &container.snapshotter, &container.snapshot_key)
    }

    /// The ids of all leases.
    pub(crate) fn leases(&self) -> Result<Vec<String>> {
        Ok(self.call(ListLeases {})?.leases.into_iter().map(|lease| lease.id).collect())
    }
}

/// Sends SIGKILL to the first process of a task.
pub(crate) fn kill_request(id: &str) -> KillProcess {
    let signal = Signal::SIGKILL as u32;
    KillProcess { container_id: id.to_owned(), exec_id: String::new(), signal, all: false }
}

/// Removes the FIFOs of a task's streams, and their directory, as the client does that deletes the task.
fn remove_fifos(streams: &[String]) {
    for path in streams.iter().map(Path::new) {
        if fs::symlink_metadata(path).is_ok_and(|metadata| metadata.file_type().is_fifo()) {
            // If it stays, the next snapshot of the host reports it.
            let _ = fs::remove_file(path);
            if let Some(directory) = path.parent() {
                let _ = fs::remove_dir(directory);
            }
        }
    }
}

/// An OCI process with the environment of the others.
pub(crate) fn process(command: &[&str]) -> Any {
    let process = json!({
        "args": command, "cwd": "/", "user": {"uid": 0, "gid": 0}, "env": ["PATH=/usr/bin:/bin"],
    });
    Any { type_url: PROCESS.to_owned(), value: process.to_string().into_bytes() }
}

/// A refusal, for people.
pub(crate) fn shown(refusal: &Refusal) -> String {
    format!("{:?}: {}", refusal.code(), refusal.message())
}
