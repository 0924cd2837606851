//! Which AppArmor profiles the guest's kernel has.
//!
//! A policy has several parts. A part may have profiles of which the host's kernel has got another version since. So
//! the guest's kernel gets the parts in the order in which the host's kernel got them, and has the same versions then.
//! If an older part is needed later, the newer ones that are in use follow it once more. No lock is held meanwhile: two
//! requests may send the same part, which has no effect the second time.

use std::{
    collections::{BTreeMap, HashMap},
    fmt::Display,
    ops::ControlFlow,
    sync::{Arc, Mutex},
};

use ttrpc::Code;

use crate::{
    guest::agent::{Agent, AgentError},
    host::apparmor::{self, Policy},
    types::{error::chain, lock::lock},
};

/// Profiles of one guest at most. Each takes memory of its kernel until the guest ends.
const MAX_PROFILES: usize = 64;
/// What the policies of one guest have at most, bytes. The shim keeps them, to send them once more.
const MAX_BYTES: usize = 16 << 20;

/// The profiles of a guest.
#[derive(Debug, Default)]
pub(crate) struct Profiles(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    /// By their names, with the revisions of the parts of their policies.
    profiles: HashMap<String, Vec<u64>>,
    /// Those of all profiles, by their revisions.
    parts: BTreeMap<u64, Part>,
}

/// A part of the policy of one profile or more.
#[derive(Debug, Clone)]
struct Part {
    policy: Arc<[u8]>,
    /// The profile that named it first.
    profile: String,
    /// The guest's kernel has it.
    is_loaded: bool,
}

impl Profiles {
    /// Has the guest's kernel load a policy, unless the profile has it already. A profile that the host has replaced is
    /// replaced in the guest too, for all processes that it confines.
    pub(crate) async fn load(&self, agent: &Agent, policy: &Policy) -> Result<(), AgentError> {
        let Some(mut next) = lock(&self.0).add(policy)? else { return Ok(()) };
        loop {
            // Also those that other requests have added meanwhile.
            let Some((revision, part)) = lock(&self.0).part_from(next) else { return Ok(()) };
            let answer = agent.load_apparmor_policy(&part.profile, &part.policy).await;
            if let ControlFlow::Break(error) = lock(&self.0).note(policy, revision, &part, answer) {
                return Err(error);
            }
            next = revision.saturating_add(1);
        }
    }
}

impl Known {
    /// Adds a policy. Returns the revision of the first of its parts that the guest's kernel lacks, if there is one.
    fn add(&mut self, policy: &Policy) -> Result<Option<u64>, AgentError> {
        let Policy { profile, parts } = policy;
        if !self.profiles.contains_key(profile) && self.profiles.len() >= MAX_PROFILES {
            return Err(too_much(profile, format_args!("{MAX_PROFILES} other profiles")));
        }
        let is_own = |revision: &u64| parts.iter().any(|part| part.revision == *revision);
        let others =
            self.parts.iter().filter(|(revision, _)| !is_own(revision) && self.has_user(**revision, profile));
        let others: usize = others.map(|(_, part)| part.policy.len()).sum();
        let own: usize = parts.iter().map(|part| part.policy.len()).sum();
        if others + own > MAX_BYTES {
            return Err(too_much(profile, format_args!("other policies of {others} bytes")));
        }
        for apparmor::Part { revision, policy } in parts {
            if self.parts.get(revision).is_none_or(|known| *known.policy != **policy) {
                let part =
                    Part { policy: policy.as_slice().into(), profile: profile.clone(), is_loaded: false };
                self.parts.insert(*revision, part);
            }
        }
        self.profiles.insert(profile.clone(), parts.iter().map(|part| part.revision).collect());
        self.drop_unused();
        let is_missing = |revision: &u64| self.parts.get(revision).is_some_and(|part| !part.is_loaded);
        Ok(parts.iter().map(|part| part.revision).filter(is_missing).min())
    }

    /// Whether another profile than this one has a part.
    fn has_user(&self, revision: u64, but: &str) -> bool {
        self.profiles.iter().any(|(name, revisions)| name != but && revisions.contains(&revision))
    }

    fn drop_unused(&mut self) {
        let profiles = &self.profiles;
        self.parts.retain(|revision, _| profiles.values().any(|revisions| revisions.contains(revision)));
    }

    /// The first part of at least this revision.
    fn part_from(&self, revision: u64) -> Option<(u64, Part)> {
        self.parts.range(revision..).next().map(|(revision, part)| (*revision, part.clone()))
    }

    /// Notes how the guest has answered that it was to load a part, for a request that needs `policy`. Returns the
    /// error if that request fails.
    fn note(
        &mut self,
        policy: &Policy,
        revision: u64,
        sent: &Part,
        answer: Result<(), AgentError>,
    ) -> ControlFlow<AgentError> {
        // Perhaps another one has taken its place.
        if let Some(part) =
            self.parts.get_mut(&revision).filter(|part| Arc::ptr_eq(&part.policy, &sent.policy))
        {
            part.is_loaded = answer.is_ok();
        }
        let Err(error) = answer else { return ControlFlow::Continue(()) };
        if !policy.parts.iter().any(|part| part.revision == revision) {
            // Its profile gets it when it is named again.
            tracing::error!(
                profile = sent.profile,
                error = chain(&error),
                "the guest may have an older profile"
            );
            return ControlFlow::Continue(());
        }
        let is_loaded = |revision: &u64| self.parts.get(revision).is_some_and(|part| part.is_loaded);
        if !self.profiles.get(&policy.profile).is_some_and(|revisions| revisions.iter().any(is_loaded)) {
            self.profiles.remove(&policy.profile);
            self.drop_unused();
        }
        ControlFlow::Break(error)
    }
}

fn too_much(profile: &str, what: impl Display) -> AgentError {
    let message =
        format!("process.apparmorProfile {profile:?}: the pod has {what}, and there is no room for more");
    AgentError::Refused { code: Code::RESOURCE_EXHAUSTED, message }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(profile: &str, parts: &[(u64, &str)]) -> Policy {
        let part = |(revision, policy): &(u64, &str)| apparmor::Part {
            revision: *revision,
            policy: policy.as_bytes().into(),
        };
        Policy { profile: profile.into(), parts: parts.iter().map(part).collect() }
    }

    impl Known {
        /// Loads a policy in a guest that answers. Returns what is sent.
        fn load(&mut self, policy: &Policy) -> String {
            let mut sent = String::new();
            let Some(mut next) = self.add(policy).unwrap() else { return sent };
            while let Some((revision, part)) = self.part_from(next) {
                sent += std::str::from_utf8(&part.policy).unwrap();
                assert!(self.note(policy, revision, &part, Ok(())).is_continue());
                next = revision + 1;
            }
            sent
        }
    }

    #[test]
    fn newer_versions_that_are_in_use_follow_an_older_part() {
        let mut known = Known::default();
        let (a, b) = (policy("a", &[(1, "a1,b1,"), (4, "a4,")]), policy("b", &[(3, "b3,")]));
        assert_eq!(known.load(&b), "b3,");
        // The second version of b is in use, and the first part of a's policy has the first version.
        assert_eq!(known.load(&a), "a1,b1,b3,a4,");
        assert_eq!((known.load(&a), known.load(&b), known.load(&a)), Default::default());
        // What nobody uses any more is forgotten.
        assert_eq!(known.load(&policy("a", &[(5, "a5,")])), "a5,");
        assert_eq!(known.parts.keys().copied().collect::<Vec<_>>(), [3, 5]);
    }

    #[test]
    fn a_part_that_another_request_adds_meanwhile_comes_after_an_older_one() {
        let mut known = Known::default();
        let (old, new) = (policy("a", &[(1, "a1,b1,")]), policy("b", &[(2, "b2,")]));
        let next = known.add(&old).unwrap().unwrap();
        let (revision, part) = known.part_from(next).unwrap();
        assert_eq!(known.load(&new), "b2,");
        assert!(known.note(&old, revision, &part, Ok(())).is_continue());
        assert_eq!(known.part_from(revision + 1).unwrap().0, 2);
    }

    #[test]
    fn what_the_guest_refuses_is_sent_again_and_takes_no_place() {
        let mut known = Known::default();
        let (a, b) = (policy("a", &[(1, "a1,")]), policy("b", &[(2, "b2,")]));
        let refused = || Err(AgentError::Refused { code: Code::INVALID_ARGUMENT, message: "no".into() });
        let next = known.add(&a).unwrap().unwrap();
        let (revision, part) = known.part_from(next).unwrap();
        assert!(known.note(&a, revision, &part, refused()).is_break());
        assert!(known.profiles.is_empty() && known.parts.is_empty());
        known.load(&b);
        // That of another profile fails: only that one is sent again.
        known.add(&a).unwrap().unwrap();
        let (_, part) = known.part_from(2).unwrap();
        assert!(known.note(&a, 2, &part, refused()).is_continue());
        assert_eq!(known.load(&b), "b2,");
        assert_eq!(known.add(&a).unwrap(), Some(1));
    }

    #[test]
    fn profiles_and_their_bytes_are_limited() {
        let mut known = Known::default();
        let long = "x".repeat(bulkhead_agent_api::MAX_APPARMOR_POLICY);
        for number in 0..8 {
            known.add(&policy(&number.to_string(), &[(number, &long)])).unwrap();
        }
        let error = known.add(&policy("long", &[(9, "x")])).unwrap_err().to_string();
        assert!(
            error.starts_with("process.apparmorProfile \"long\": the pod has other policies of 16777216"),
            "{error}"
        );
        // The same part, and another one instead of an earlier one.
        known.add(&policy("same", &[(7, &long)])).unwrap();
        known.add(&policy("0", &[(10, "short")])).unwrap();
    }
}
