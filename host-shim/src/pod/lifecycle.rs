//! One sandbox: a VM, and the containers in it. The container that has the sandbox's own id comes first, and the VM
//! with it; the VM ends when that one is deleted.

mod owner;
mod requests;

use std::{
    collections::{HashMap, hash_map::Entry},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use bulkhead_agent_api::agent::JoinedNamespace;

use self::owner::Deleted;
pub(crate) use self::owner::Handle;
use crate::{
    guest::agent::SIGKILL,
    host::state_dir,
    io::events::Publisher,
    pod::{
        container::{Container, Phase},
        machine::Guest,
        request::Creation,
        role::Joined,
    },
    process::{
        error::TaskError,
        state::{Action, Refusal, Status},
    },
    types::{error::chain, request_error::RequestError},
};

/// What a sandbox is told about itself and its host.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    pub(crate) namespace: String,
    pub(crate) id: String,
    /// [`state_dir::STATE_ROOT`].
    pub(crate) state_root: PathBuf,
    /// [`crate::types::config::CONFIG_PATH`].
    pub(crate) config: PathBuf,
    /// This program.
    pub(crate) shim: PathBuf,
}

/// A handle to a sandbox. Clones are the same sandbox.
#[derive(Debug, Clone)]
pub(crate) struct Sandbox(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    settings: Settings,
    events: Publisher,
    /// While it runs.
    guest: Mutex<Option<Guest>>,
    containers: Mutex<HashMap<String, Handle>>,
    /// Bytes that those containers may use that have a limit, from when they are made on.
    memory_limits: Mutex<HashMap<String, u64>>,
}

impl Sandbox {
    /// A sandbox that has nothing yet.
    pub(crate) fn new(settings: Settings, events: Publisher) -> Self {
        Self(Arc::new(Shared {
            settings,
            events,
            guest: Mutex::default(),
            containers: Mutex::default(),
            memory_limits: Mutex::default(),
        }))
    }

    /// The container of this id.
    pub(crate) fn container(&self, id: &str) -> Result<Handle, Refusal> {
        self.containers().get(id).cloned().ok_or(Refusal::NotFound)
    }

    /// Creates a container.
    pub(crate) async fn create(&self, creation: Creation) -> Result<Arc<Container>, TaskError> {
        let id = creation.request.id.clone();
        let handle = match self.containers().entry(id.clone()) {
            Entry::Occupied(entry) => entry.get().clone(),
            Entry::Vacant(entry) => entry.insert(Handle::start(self.clone(), &id)).clone(),
        };
        let created = handle.create(creation).await;
        self.forget(&id, Status::Absent);
        created
    }

    /// Deletes a container that does not run.
    pub(crate) async fn delete(&self, id: &str) -> Result<Deleted, TaskError> {
        let deleted = self.container(id)?.delete().await;
        self.forget(id, Status::Deleted);
        deleted
    }

    /// Whether there is nothing that a client could ask for.
    pub(crate) fn is_idle(&self) -> bool {
        let is_nothing = |handle: &Handle| {
            matches!(handle.phase().status(), Status::Absent | Status::Creating | Status::Deleted)
        };
        self.containers().values().all(is_nothing)
    }

    /// Ends whatever there is, also creations under way, and leaves nothing on the host.
    pub(crate) async fn stop(&self) {
        // It takes the VM along, and so all others.
        if let Ok(own) = self.container(self.id()) {
            own.stop().await;
        }
        for member in self.members() {
            member.stop().await;
        }
    }

    /// The container's processes are killed, of all containers but the sandbox's own.
    pub(crate) async fn kill_members(self) {
        for member in self.members() {
            let Ok(container) = member.phase().container_for(Action::Kill) else { continue };
            match container.agent.signal(&container.id, SIGKILL, true).await {
                Ok(()) => container.killed.is_told(),
                Err(e) => tracing::warn!("container {} of an ended pod: {}", container.id, chain(&e)),
            }
        }
    }

    /// The VM is gone: all containers but the sandbox's own give back what they have on the host.
    pub(crate) async fn release_members(&self) {
        for member in self.members() {
            member.release().await;
        }
    }

    /// The guest, while there is one.
    pub(crate) fn guest(&self) -> Result<Guest, TaskError> {
        let guest = self.0.guest.lock().unwrap_or_else(PoisonError::into_inner).clone();
        guest.ok_or_else(|| TaskError::NoSandbox { sandbox_id: self.id().into() })
    }

    pub(crate) fn set_guest(&self, guest: Option<Guest>) {
        *self.0.guest.lock().unwrap_or_else(PoisonError::into_inner) = guest;
    }

    /// Notes what a container may use, and answers what it might before.
    pub(crate) fn set_memory_limit(&self, id: &str, bytes: Option<u64>) -> Option<u64> {
        let mut limits = self.0.memory_limits.lock().unwrap_or_else(PoisonError::into_inner);
        match bytes {
            Some(bytes) => limits.insert(id.into(), bytes),
            None => limits.remove(id),
        }
    }

    /// Bytes that its containers may use together. What a pod's sandbox may use is for them all.
    pub(crate) fn memory_limits(&self) -> u64 {
        let limits = self.0.memory_limits.lock().unwrap_or_else(PoisonError::into_inner);
        let members = limits.iter().filter(|(id, _)| *id != self.id());
        let members = members.fold(0u64, |sum, (_, bytes)| sum.saturating_add(*bytes));
        members.max(limits.get(self.id()).copied().unwrap_or(0))
    }

    /// Finds the containers whose namespaces are to be joined: the spec names each by the pid that containerd was
    /// told.
    pub(crate) fn resolve(&self, joined: &[Joined]) -> Result<Vec<JoinedNamespace>, TaskError> {
        joined.iter().map(|joined| self.resolve_one(joined)).collect()
    }

    fn resolve_one(&self, joined: &Joined) -> Result<JoinedNamespace, TaskError> {
        let containers = self.containers();
        let owner = containers.values().find_map(|handle| match handle.phase() {
            Phase::Created(container) | Phase::Running(container) | Phase::Paused(container)
                if container.pid == joined.pid =>
            {
                Some(container)
            }
            _ => None,
        });
        let owner = owner.ok_or(RequestError::ForeignNamespace { kind: joined.kind, pid: joined.pid })?;
        let mut namespace = JoinedNamespace::new();
        namespace.kind = joined.kind.into();
        namespace.container_id = owner.id.clone();
        Ok(namespace)
    }

    pub(crate) fn id(&self) -> &str {
        &self.0.settings.id
    }

    pub(crate) fn events(&self) -> &Publisher {
        &self.0.events
    }

    pub(crate) fn config_path(&self) -> &Path {
        &self.0.settings.config
    }

    pub(crate) fn shim(&self) -> &Path {
        &self.0.settings.shim
    }

    /// The sandbox's directory.
    pub(crate) fn state_path(&self) -> PathBuf {
        self.0.settings.state_path()
    }

    pub(crate) fn members(&self) -> Vec<Handle> {
        let containers = self.containers();
        containers.iter().filter(|(id, _)| *id != self.id()).map(|(_, handle)| handle.clone()).collect()
    }

    /// Drops a container that ended in this state.
    fn forget(&self, id: &str, status: Status) {
        let mut containers = self.containers();
        if containers.get(id).is_some_and(|handle| handle.phase().status() == status) {
            containers.remove(id);
            self.set_memory_limit(id, None);
        }
    }

    fn containers(&self) -> MutexGuard<'_, HashMap<String, Handle>> {
        self.0.containers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Settings {
    /// The sandbox's directory.
    pub(crate) fn state_path(&self) -> PathBuf {
        state_dir::path_of(&self.state_root, &self.namespace, &self.id)
    }
}

#[cfg(test)]
mod tests;
