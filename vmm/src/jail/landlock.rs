//! Landlock: a second restriction of file access, which relies neither on the [root](super::root) nor on capabilities.
//!
//! How much it enforces depends on the host's kernel: everything from Linux 6.12 on. It is the one part of the jail
//! that may be missing.

use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, LandlockStatus, PathBeneath, PathFd,
    PathFdError, Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetError, RulesetStatus, Scope,
};

use super::thread_role::ThreadRole;

/// The version of the Landlock ABI whose access rights and scopes are denied. A later version is tested before it is
/// used here.
const TESTED_ABI: ABI = ABI::V6;

/// Why the Landlock rules are not in force.
#[derive(Debug, thiserror::Error)]
pub enum LandlockError {
    #[error("cannot open {path} for a Landlock rule")]
    Path { path: PathBuf, source: PathFdError },
    #[error("the kernel rejects the Landlock rules")]
    Rules(#[from] RulesetError),
}

/// Restricts this thread, and the threads that it starts, to the files below `shares`, whatever is mounted there.
/// Denies executing any file, TCP, signals to other processes and abstract Unix sockets.
///
/// Returns a warning if the host's kernel cannot enforce all of this.
pub(crate) fn restrict_process(shares: &[impl AsRef<Path>]) -> Result<Option<String>, LandlockError> {
    // IoctlDev is the right to call ioctl(2) on device files. The server opens none.
    let served = AccessFs::from_all(TESTED_ABI) & !(AccessFs::Execute | AccessFs::IoctlDev);
    let mut rules = Ruleset::default()
        // The first version of the ABI always denies moving a file to another directory. If the kernel has only that
        // version, no rules are set.
        .set_compatibility(CompatLevel::SoftRequirement)
        .handle_access(AccessFs::Refer)?
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(TESTED_ABI))?
        .handle_access(AccessNet::from_all(TESTED_ABI))?
        // Scopes are set for the whole process. In the rules of a single thread some kernels would block its signals to
        // the other threads of the process.
        .scope(Scope::from_all(TESTED_ABI))?
        .create()?;
    for share in shares {
        rules = rules.add_rule(PathBeneath::new(open(share.as_ref())?, served))?;
    }
    let done = rules.restrict_self()?;
    Ok(missing(&done.ruleset, done.landlock))
}

/// What the host's kernel lacks to enforce the rules, as the VMM would log it. Finding out restricts the calling thread
/// for good: call this in a thread that ends.
pub fn landlock_warning() -> Result<Option<String>, LandlockError> {
    restrict_process(&[] as &[&Path])
}

/// Denies all access to files to this thread, unless its role is to serve files. Files that are open stay usable.
pub(super) fn restrict_thread(role: ThreadRole) -> Result<(), LandlockError> {
    if !role.serves_files() {
        Ruleset::default().handle_access(AccessFs::from_all(TESTED_ABI))?.create()?.restrict_self()?;
    }
    Ok(())
}

fn open(path: &Path) -> Result<PathFd, LandlockError> {
    PathFd::new(path).map_err(|source| LandlockError::Path { path: path.to_owned(), source })
}

fn missing(rules: &RulesetStatus, kernel: LandlockStatus) -> Option<String> {
    if *rules == RulesetStatus::FullyEnforced {
        return None;
    }
    let state = match (rules, &kernel) {
        // The kernel has the first version of the ABI, which is not used for the whole process.
        (RulesetStatus::NotEnforced, LandlockStatus::Available { .. }) => {
            "restricts only the threads of the VMM that serve no files"
        }
        (RulesetStatus::NotEnforced, _) => "does not restrict the VMM",
        _ => "only partly restricts the VMM",
    };
    let kernel = match kernel {
        LandlockStatus::NotImplemented => "has no Landlock".to_owned(),
        LandlockStatus::NotEnabled => "has Landlock disabled".to_owned(),
        LandlockStatus::Available { effective_abi, .. } => format!("has version {effective_abi} of its ABI"),
    };
    Some(format!("Landlock {state}: the kernel {kernel}, and version {TESTED_ABI} (Linux 6.12) is needed"))
}

#[cfg(test)]
mod tests;
