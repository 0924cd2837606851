//! The files of a container on the host, which the guest sees through the pod's share.

use std::{fs, path::Path, sync::Arc};

use bulkhead_agent_api::MAX_HOST_SOCKETS;

use crate::{
    host::{
        journal::{Effect, Journal},
        pod_volumes::PodVolumes,
        rootfs::{BindMount, Opened, RootfsError, bind_opened, give_to_root, mount_rootfs, open_source},
        sandbox_files::SandboxFiles,
        share,
        socket_directory::{self, SocketDirectory},
        state_dir,
    },
    pod::{
        container_role::Role,
        create_request::{CreatePlan, CreateRequest},
        guest_spec::MovedSources,
    },
    process::error::TaskError,
    types::{error::chain, id_mappings::IdMappings},
};

/// The directory of a container's bind mounts in the share.
const MOUNTS: &str = "mounts";

/// Puts the container's files into the share of the pod whose state directory is `state`. Each step is in the
/// container's journal, or is one of the pod's volumes, and is undone after an error. Blocks.
pub(crate) fn prepare(
    state: &Path,
    volumes: &PodVolumes,
    plan: &CreatePlan,
    creation: &CreateRequest,
) -> Result<MovedSources, TaskError> {
    let mut journal = state_dir::container_journal(state, &plan.id)?;
    let bundle = Effect::Bundle { path: creation.bundle().to_owned() };
    let failed = |source| RootfsError::Share { path: state.to_owned(), source };
    journal.record(bundle).map_err(failed)?;
    let hooks = plan.hooks.save_stopped(&mut journal, &state_dir::poststop_path(state, &plan.id));
    let made = match creation {
        _ if hooks.is_err() => {
            hooks.map(|()| MovedSources::default()).map_err(|source| failed(source).into())
        }
        CreateRequest::Sandbox { config, .. } => {
            let files = SandboxFiles { hostname: &plan.hostname, resolv_conf: config.resolv_conf.as_deref() };
            files.make(&mut journal, state).map(|()| MovedSources::default()).map_err(TaskError::from)
        }
        CreateRequest::Task(_) => mount_files(&mut journal, state, volumes, plan),
    };
    if made.is_err()
        && let Err(error) = journal.undo().and(volumes.release(state, &plan.id))
    {
        tracing::error!(error = chain(&error), "the container left something on the host");
    }
    made
}

/// A directory that is at `place` in the share, if services of the host may have sockets in it.
fn with_sockets(bind: &BindMount, state: &Path, place: &Path) -> Option<Arc<SocketDirectory>> {
    if bind.is_of_pod || !socket_directory::may_have_sockets(&bind.source) {
        return None;
    }
    let (path, share) = (bind.source.clone(), state_dir::share_path(state));
    Some(Arc::new(SocketDirectory { path, share, place: place.into() }))
}

fn mount_files(
    journal: &mut Journal,
    state: &Path,
    volumes: &PodVolumes,
    plan: &CreatePlan,
) -> Result<MovedSources, TaskError> {
    let mut moved = MovedSources::default();
    let Some(rootfs) = &plan.rootfs else { return Ok(moved) };
    let is_member = matches!(plan.role, Role::Member { .. });
    let fill = |own: &Path| {
        let root = own.join(bulkhead_vmm_api::ROOTFS);
        mount_rootfs(rootfs, &root)?;
        if let Some(seen) = plan.root_ids.as_ref().and_then(IdMappings::root) {
            give_to_root(&root, seen)?;
        }
        let mounts = own.join(MOUNTS);
        fs::create_dir(&mounts).map_err(|source| RootfsError::Share { path: mounts.clone(), source })?;
        for bind in &plan.binds {
            // Whoever gave this up has undone it meanwhile.
            fs::metadata(&mounts).map_err(|source| RootfsError::Share { path: mounts.clone(), source })?;
            let opened = match open_source(bind)? {
                Opened::Socket(socket) => {
                    moved.sockets.push(Arc::new(socket));
                    continue;
                }
                Opened::Directory(directory) if is_member => {
                    let place = volumes.mount(state, &plan.id, bind, &directory)?;
                    moved.directories.extend(with_sockets(bind, state, Path::new(&place)));
                    moved.volumes.push((bind.index, place));
                    continue;
                }
                Opened::Directory(opened) => {
                    let place = Path::new(&plan.id).join(MOUNTS).join(bind.index.to_string());
                    moved.directories.extend(with_sockets(bind, state, &place));
                    opened
                }
                Opened::File(opened) => opened,
            };
            bind_opened(bind, &opened, &mounts.join(bind.index.to_string()))?;
        }
        match moved.sockets.len() {
            count if count > MAX_HOST_SOCKETS => Err(RootfsError::Sockets { count }),
            _ => Ok(()),
        }
    };
    share::add(journal, &state_dir::share_path(state), &plan.id, plan.binds.len(), fill)?;
    Ok(moved)
}
