//! Which AppArmor profiles the guest's kernel has.

use std::{
    collections::HashMap,
    hash::{DefaultHasher, Hash, Hasher},
};

use tokio::sync::Mutex;
use ttrpc::Code;

use crate::{
    guest::agent::{Agent, AgentError},
    host::apparmor::Policy,
};

/// Profiles of one guest at most. Each takes memory of its kernel until the guest ends.
const MAX_PROFILES: usize = 64;

/// The profiles by their names, each with the digest of the policy that it certainly has.
#[derive(Debug, Default)]
pub(crate) struct Profiles(Mutex<HashMap<String, Option<u64>>>);

impl Profiles {
    /// Has the guest's kernel load a policy, unless the profile has it already. A profile that the host has replaced is
    /// replaced in the guest too, for all processes that it confines.
    pub(crate) async fn load(&self, agent: &Agent, policy: &Policy) -> Result<(), AgentError> {
        let mut profiles = self.0.lock().await;
        let digest = digest(&policy.parts);
        match profiles.get(&policy.profile) {
            Some(loaded) if *loaded == Some(digest) => return Ok(()),
            Some(_) => {}
            None if profiles.len() < MAX_PROFILES => {}
            None => {
                let message = format!(
                    "process.apparmorProfile {:?}: the pod has {MAX_PROFILES} other profiles, which is the most",
                    policy.profile
                );
                return Err(AgentError::Refused { code: Code::RESOURCE_EXHAUSTED, message });
            }
        }
        // The policy may have others of these profiles too, in another version.
        profiles.values_mut().for_each(|digest| *digest = None);
        profiles.insert(policy.profile.clone(), None);
        for part in &policy.parts {
            agent.load_apparmor_policy(&policy.profile, part).await?;
        }
        profiles.insert(policy.profile.clone(), Some(digest));
        Ok(())
    }
}

fn digest(policy: &[Vec<u8>]) -> u64 {
    let mut hasher = DefaultHasher::new();
    policy.hash(&mut hasher);
    hasher.finish()
}
