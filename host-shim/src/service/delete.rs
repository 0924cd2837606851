//! `delete`: cleans up after a shim that is dead, or that containerd has lost.

use std::{fs, path::Path, time::SystemTime};

use containerd_shim_protos::api;

use crate::{
    host::{
        hooks,
        journal::UndoError,
        state_dir::{self, STATE_ROOT},
    },
    service::{args::Args, bootstrap::socket_path},
    types::exit::{Exit, timestamp},
};

/// Removes everything of the task from the host. It is no error if nothing is left. Returns what containerd reports as
/// the end of the task.
pub(crate) fn delete(args: &Args) -> Result<api::DeleteResponse, UndoError> {
    let path = state_dir::path_of(Path::new(STATE_ROOT), &args.address, &args.namespace, &args.id);
    let state_dir::Cleaned { vmm, containers, .. } = state_dir::clean(&path)?;
    for (id, bundle) in containers {
        hooks::run_poststop(&id, &bundle);
    }
    // The shim that would have removed it is dead by now.
    drop(fs::remove_file(socket_path(args)));
    let mut response = api::DeleteResponse::new();
    response.pid = vmm.unwrap_or_default();
    response.exit_status = Exit::killed().status;
    response.exited_at = Some(timestamp(SystemTime::now())).into();
    Ok(response)
}
