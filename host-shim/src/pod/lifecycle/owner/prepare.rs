//! What a container takes of its host before it is made: all of it, or nothing.

use std::{fs, path::Path};

use crate::{
    host::{
        journal::Journal,
        pod_files::{self, PodFiles},
        rootfs::{RootfsError, bind_source, mount_rootfs},
        share, state_dir,
    },
    pod::{
        machine::{Machine, Unbooted, share_of},
        request::{Creation, Plan},
        role::Role,
    },
    process::error::TaskError,
    types::{config::Config, error::chain},
};

/// A host, prepared for one container.
#[derive(Debug)]
pub(super) struct Prepared {
    pub(super) plan: Plan,
    pub(super) files: Journal,
    /// For the sandbox's own container.
    pub(super) own: Option<Unbooted>,
}

/// Reads and checks the request for the sandbox's own container, and does to the host what it and the VM take, or
/// nothing. Blocks.
pub(super) fn prepare_own(config: &Path, state: &Path, creation: &Creation) -> Result<Prepared, TaskError> {
    let config = Config::load(config)?;
    config.check_files()?;
    let plan = Plan::read(creation, None)?;
    if let Role::Member { sandbox_id } = &plan.role {
        return Err(TaskError::NoSandbox { sandbox_id: sandbox_id.clone() });
    }
    let own = Machine::prepare(state, &config, &plan)?;
    match prepare_files(state, &plan, creation) {
        Ok(files) => Ok(Prepared { plan, files, own: Some(own) }),
        Err(e) => {
            own.machine.remove_logged();
            Err(e)
        }
    }
}

/// The same for one more container of the sandbox.
pub(super) fn prepare_member(
    sandbox_id: &str,
    state: &Path,
    creation: &Creation,
) -> Result<Prepared, TaskError> {
    let plan = Plan::read(creation, pod_files::are_made(state).then_some(state))?;
    match &plan.role {
        Role::Member { sandbox_id: wanted } if wanted == sandbox_id => {}
        Role::Member { .. } | Role::Single | Role::Pause => {
            return Err(TaskError::Pod { own: sandbox_id.into() });
        }
    }
    let files = prepare_files(state, &plan, creation)?;
    Ok(Prepared { plan, files, own: None })
}

/// The container's files in the share. Blocks.
fn prepare_files(state: &Path, plan: &Plan, creation: &Creation) -> Result<Journal, TaskError> {
    let mut journal = state_dir::container_journal(state, &plan.id)?;
    let made = match &creation.pod {
        Some(pod) => {
            let files = PodFiles { hostname: &plan.hostname, resolv_conf: pod.resolv_conf.as_deref() };
            files.make(&mut journal, state).map_err(TaskError::from)
        }
        None => mount_files(&mut journal, &share_of(state), plan),
    };
    match made {
        Ok(()) => Ok(journal),
        Err(e) => {
            if let Err(e) = journal.undo() {
                tracing::error!("{}", chain(&e));
            }
            Err(e)
        }
    }
}

fn mount_files(journal: &mut Journal, share: &Path, plan: &Plan) -> Result<(), TaskError> {
    let Some(rootfs) = &plan.rootfs else { return Ok(()) };
    let fill = |own: &Path| {
        mount_rootfs(rootfs, &own.join("rootfs"))?;
        let mounts = own.join("mounts");
        fs::create_dir(&mounts).map_err(|source| RootfsError::Share { path: mounts.clone(), source })?;
        plan.binds.iter().try_for_each(|bind| bind_source(bind, &mounts.join(bind.index.to_string())))
    };
    Ok(share::add(journal, share, &plan.id, plan.binds.len(), fill)?)
}
