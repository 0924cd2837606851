//! The score by which the host's kernel chooses a process to kill when its memory is short.
//!
//! The VMM inherits the shim's oom_score_adj, which protects it more than any container. It gets the lowest
//! `process.oomScoreAdj` of the pod's containers, which kubelet derives from the pod's QoS class.

use std::fs;

use super::{PodVm, Registered, lock};
use crate::{host::process_id::ProcessId, types::error::chain};

/// The lowest score of a VMM. With -1000 the kernel could not end a pod that is beyond the limit of its cgroup.
const LOWEST: i32 = -999;

impl PodVm {
    /// Gives the VMM the lowest score of the pod's members that have not ended. Without one the score stays. That of
    /// the pod's first container counts until there is a member: kubelet protects the sandbox in each class.
    pub(super) fn follow_oom_scores(&self) {
        let Ok(guest) = self.guest() else { return };
        let containers = lock(&self.containers);
        let members = containers.iter().filter(|(id, _)| !self.is_first(id));
        if let Some(score) = members.filter_map(|(_, Registered { oom_score_adj, .. })| *oom_score_adj).min()
        {
            set(guest.vm.process(), score);
        }
    }
}

/// Sets the score of a VMM. If that fails, the pod runs as well, but the kernel may choose another process.
pub(super) fn set(vmm: ProcessId, score: i32) {
    let score = score.max(LOWEST);
    // It may have ended, and its pid may be another's by now.
    if ProcessId::of(vmm.pid).ok() != Some(vmm) {
        return;
    }
    if let Err(error) = fs::write(format!("/proc/{}/oom_score_adj", vmm.pid), score.to_string()) {
        tracing::warn!(
            vmm = vmm.pid,
            score,
            error = chain(&error),
            "cannot set the VMM's out-of-memory score"
        );
    }
}
