//! The files of a container on the host, which the guest sees through the pod's share.

use std::{fs, path::Path, sync::Arc};

use bulkhead_agent_api::MAX_HOST_SOCKETS;

use crate::{
    host::{
        host_socket::HostSocket,
        journal::{Effect, Journal},
        rootfs::{RootfsError, bind_source, give_to_root, mount_rootfs},
        sandbox_files::SandboxFiles,
        share, state_dir,
    },
    pod::create_request::{CreatePlan, CreateRequest},
    process::error::TaskError,
    types::{error::chain, id_mappings::IdMappings},
};

/// Puts the container's files into the share of the pod whose state directory is `state`. Each step is in the
/// container's journal, and is undone after an error. Returns the sockets of services that the container mounts, which
/// the guest does not see. Blocks.
pub(crate) fn prepare(
    state: &Path,
    plan: &CreatePlan,
    creation: &CreateRequest,
) -> Result<Vec<Arc<HostSocket>>, TaskError> {
    let mut journal = state_dir::container_journal(state, &plan.id)?;
    let bundle = Effect::Bundle { path: creation.bundle().to_owned() };
    journal.record(bundle).map_err(|source| RootfsError::Share { path: state.to_owned(), source })?;
    let made = match creation {
        CreateRequest::Sandbox { config, .. } => {
            let files = SandboxFiles { hostname: &plan.hostname, resolv_conf: config.resolv_conf.as_deref() };
            files.make(&mut journal, state).map(|()| Vec::new()).map_err(TaskError::from)
        }
        CreateRequest::Task(_) => mount_files(&mut journal, &state_dir::share_path(state), plan),
    };
    if made.is_err()
        && let Err(error) = journal.undo()
    {
        tracing::error!(error = chain(&error), "the container left something on the host");
    }
    made
}

fn mount_files(
    journal: &mut Journal,
    share: &Path,
    plan: &CreatePlan,
) -> Result<Vec<Arc<HostSocket>>, TaskError> {
    let Some(rootfs) = &plan.rootfs else { return Ok(Vec::new()) };
    let mut sockets = Vec::new();
    let fill = |own: &Path| {
        let root = own.join(bulkhead_vmm_api::ROOTFS);
        mount_rootfs(rootfs, &root)?;
        if let Some(seen) = plan.root_ids.as_ref().and_then(IdMappings::root) {
            give_to_root(&root, seen)?;
        }
        let mounts = own.join("mounts");
        fs::create_dir(&mounts).map_err(|source| RootfsError::Share { path: mounts.clone(), source })?;
        let profile = plan.apparmor.as_ref().map(|policy| policy.profile.as_str());
        for bind in &plan.binds {
            let socket = bind_source(bind, &mounts.join(bind.index.to_string()))?;
            sockets.extend(socket.map(|socket| Arc::new(socket.confined_by(profile))));
        }
        match sockets.len() {
            count if count > MAX_HOST_SOCKETS => Err(RootfsError::Sockets { count }),
            _ => Ok(()),
        }
    };
    share::add(journal, share, &plan.id, plan.binds.len(), fill)?;
    Ok(sockets)
}
