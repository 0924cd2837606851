//! Which AppArmor profiles the guest's kernel has.
//!
//! A policy has several parts. A part may have profiles of which the host's kernel has got another version since. So
//! the guest's kernel gets the parts in the order in which the host's kernel got them, and has the same versions then.
//! If an older part is needed later, the newer ones that are in use follow it once more. A request that has read its
//! policy before another one has read a newer policy of the same profile gets the newer one. No lock is held meanwhile:
//! two requests may send the same part, which has no effect the second time.
//!
//! The guest may load a part after the request that needs it was given up. So each request sends its parts in a task
//! that does not end before the guest has answered, however long that takes, and then sends the newer parts.

use std::{
    collections::{BTreeMap, HashMap},
    fmt::Display,
    ops::ControlFlow,
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::{sync::Semaphore, time::timeout};
use tracing::Instrument;
use ttrpc::Code;

use crate::{
    guest::agent::{Agent, AgentError},
    host::apparmor::{self, Policy},
    types::{error::chain, lock::lock},
};

/// How long a request waits for its policy to be loaded.
const LOAD: Duration = Duration::from_secs(60);

/// How many requests may send policy at the same time. More come only if the guest does not answer.
const MOST_SENDING: usize = 64;

/// Profiles of one guest at most. Each takes memory of its kernel until the guest ends.
const MAX_PROFILES: usize = 64;
/// What the policies of one guest have at most, bytes. The shim keeps them, to send them once more.
const MAX_BYTES: usize = 16 << 20;

/// How often a request begins anew, because others have failed to load what it needs.
const TRIES: usize = 4;

/// The profiles of a guest.
#[derive(Debug)]
pub(crate) struct Profiles {
    known: Mutex<Known>,
    sending: Arc<Semaphore>,
}

impl Default for Profiles {
    fn default() -> Self {
        Self { known: Mutex::default(), sending: Arc::new(Semaphore::new(MOST_SENDING)) }
    }
}

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

/// What a request needs.
#[derive(Debug)]
struct Needed {
    profile: String,
    /// The parts of its policy, or of a newer one.
    revisions: Vec<u64>,
    /// The first of them that the guest's kernel lacks, if there is one.
    missing: Option<u64>,
}

impl Profiles {
    /// Has the guest's kernel load a policy, unless the profile has it already, or a newer one. A profile that the host
    /// has replaced is replaced in the guest too, for all processes that it confines.
    pub(crate) async fn load(self: &Arc<Self>, agent: &Agent, policy: &Policy) -> Result<(), AgentError> {
        let agent = agent.clone();
        let send = move |part: Part| {
            let agent = agent.clone();
            async move { agent.load_apparmor_policy(&part.profile, &part.policy).await }
        };
        self.load_in_task(policy, send).await
    }

    async fn load_in_task<F>(
        self: &Arc<Self>,
        policy: &Policy,
        send: impl Fn(Part) -> F + Send + Sync + 'static,
    ) -> Result<(), AgentError>
    where
        F: Future<Output = Result<(), AgentError>> + Send,
    {
        const CALL: &str = "LoadAppArmorPolicy";
        if lock(&self.known).add(policy)?.missing.is_none() {
            return Ok(());
        }
        let late = || AgentError::Timeout { call: CALL };
        let permit = Arc::clone(&self.sending).try_acquire_owned().map_err(|_| late())?;
        let (profiles, policy) = (Arc::clone(self), policy.clone());
        let sending = async move {
            let _permit = permit;
            profiles.load_with(&policy, send).await
        };
        match timeout(LOAD, tokio::spawn(sending.in_current_span())).await {
            Ok(Ok(loaded)) => loaded,
            Ok(Err(error)) => Err(AgentError::Disconnected { call: CALL, reason: error.to_string() }),
            Err(_) => Err(late()),
        }
    }

    async fn load_with<F>(&self, policy: &Policy, send: impl Fn(Part) -> F) -> Result<(), AgentError>
    where
        F: Future<Output = Result<(), AgentError>>,
    {
        for _ in 0..TRIES {
            let needed = lock(&self.known).add(policy)?;
            let Some(mut next) = needed.missing else { return Ok(()) };
            // Also those that other requests have added meanwhile. Others may have removed what is needed, because they
            // have failed: this is found out by the next try.
            let mut failed = None;
            while let Some((revision, part)) = self.part_from(next) {
                next = revision.saturating_add(1);
                // Those of others follow nevertheless: an earlier part may have had older versions of their profiles.
                if failed.is_some() && needed.revisions.contains(&revision) {
                    continue;
                }
                let answer = send(part.clone()).await;
                if let ControlFlow::Break(error) = lock(&self.known).note(&needed, revision, &part, answer) {
                    failed = Some(error);
                }
            }
            if let Some(error) = failed {
                return Err(error);
            }
        }
        match lock(&self.known).add(policy)?.missing {
            None => Ok(()),
            Some(_) => Err(AgentError::Refused {
                code: Code::ABORTED,
                message: format!(
                    "process.apparmorProfile {:?}: other requests have failed to load it meanwhile; try again",
                    policy.profile
                ),
            }),
        }
    }

    fn part_from(&self, revision: u64) -> Option<(u64, Part)> {
        lock(&self.known).part_from(revision)
    }
}

impl Known {
    /// Adds a policy, unless there is a newer one of its profile.
    fn add(&mut self, policy: &Policy) -> Result<Needed, AgentError> {
        let Policy { profile, parts } = policy;
        let newest = parts.iter().map(|part| part.revision).max();
        let known = self.profiles.get(profile);
        if known.is_some_and(|revisions| revisions.iter().copied().max() > newest) {
            return Ok(self.needed(profile));
        }
        if known.is_none() && self.profiles.len() >= MAX_PROFILES {
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
            if self.parts.get(revision).is_none_or(|known| known.policy != *policy) {
                let part = Part { policy: policy.clone(), profile: profile.clone(), is_loaded: false };
                self.parts.insert(*revision, part);
            }
        }
        self.profiles.insert(profile.clone(), parts.iter().map(|part| part.revision).collect());
        self.drop_unused();
        Ok(self.needed(profile))
    }

    fn needed(&self, profile: &str) -> Needed {
        let revisions = self.profiles.get(profile).cloned().unwrap_or_default();
        let is_missing = |revision: &u64| self.parts.get(revision).is_some_and(|part| !part.is_loaded);
        let missing = revisions.iter().copied().filter(is_missing).min();
        Needed { profile: profile.into(), revisions, missing }
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

    /// Notes how the guest has answered that it was to load a part, for a request that needs `needed`. Returns the
    /// error if that request fails.
    fn note(
        &mut self,
        needed: &Needed,
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
        if !needed.revisions.contains(&revision) {
            // Its profile gets it when it is named again.
            tracing::error!(
                profile = sent.profile,
                error = chain(&error),
                "the guest may have an older profile"
            );
            return ControlFlow::Continue(());
        }
        let is_loaded = |revision: &u64| self.parts.get(revision).is_some_and(|part| part.is_loaded);
        if !self.profiles.get(&needed.profile).is_some_and(|revisions| revisions.iter().any(is_loaded)) {
            self.profiles.remove(&needed.profile);
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
            let needed = self.add(policy).unwrap();
            let Some(mut next) = needed.missing else { return sent };
            while let Some((revision, part)) = self.part_from(next) {
                sent += std::str::from_utf8(&part.policy).unwrap();
                assert!(self.note(&needed, revision, &part, Ok(())).is_continue());
                next = revision + 1;
            }
            sent
        }
    }

    fn refused() -> Result<(), AgentError> {
        Err(AgentError::Refused { code: Code::INVALID_ARGUMENT, message: "no".into() })
    }

    #[test]
    fn a_policy_that_was_read_earlier_does_not_replace_a_newer_one() {
        let mut known = Known::default();
        let (old, new) = (policy("p", &[(1, "p1,")]), policy("p", &[(5, "p5,"), (6, "p6,")]));
        assert_eq!(known.load(&new), "p5,p6,");
        assert_eq!(known.load(&old), "");
        // What is missing of the newer one is loaded, and it is that request's own.
        let mut known = Known::default();
        let first = known.add(&new).unwrap();
        let (_, part) = known.part_from(5).unwrap();
        assert!(known.note(&first, 5, &part, Ok(())).is_continue());
        let needed = known.add(&old).unwrap();
        assert_eq!(needed.missing, Some(6));
        let (revision, part) = known.part_from(6).unwrap();
        assert!(known.note(&needed, revision, &part, refused()).is_break());
        assert_eq!(known.load(&old), "p6,");
        assert_eq!(known.parts.keys().copied().collect::<Vec<_>>(), [5, 6]);
    }

    #[tokio::test]
    async fn a_request_whose_parts_another_one_has_removed_loads_them_all() {
        let profiles = Profiles::default();
        let p = policy("p", &[(1, "p1,"), (2, "p2,")]);
        let other = profiles.known.lock().unwrap().add(&p).unwrap();
        let (_, first) = profiles.part_from(1).unwrap();
        let sent = Mutex::new(Vec::new());
        let guest = |part: Part| {
            let mut sent = sent.lock().unwrap();
            sent.push(String::from_utf8(part.policy.to_vec()).unwrap());
            if sent.len() == 1 {
                // The other request has sent the same, and its call takes too long.
                let failed = profiles.known.lock().unwrap().note(&other, 1, &first, refused());
                assert!(failed.is_break());
            }
            async { Ok(()) }
        };
        profiles.load_with(&p, guest).await.unwrap();
        assert_eq!(sent.into_inner().unwrap(), ["p1,", "p1,", "p2,"]);
        assert_eq!(profiles.known.lock().unwrap().add(&p).unwrap().missing, None);
    }

    #[tokio::test(start_paused = true)]
    async fn newer_policy_follows_a_part_that_the_guest_loads_late() {
        let profiles = Arc::new(Profiles::default());
        let (sent, answers) = (Arc::new(Mutex::new(String::new())), Arc::new(Semaphore::new(1)));
        let guest = || {
            let (sent, answers) = (Arc::clone(&sent), Arc::clone(&answers));
            move |part: Part| {
                let (sent, answers) = (Arc::clone(&sent), Arc::clone(&answers));
                async move {
                    answers.acquire().await.unwrap().forget();
                    sent.lock().unwrap().push_str(std::str::from_utf8(&part.policy).unwrap());
                    Ok(())
                }
            }
        };
        let (old, new) = (policy("a", &[(1, "a1,b1,")]), policy("b", &[(3, "b3,")]));
        profiles.load_in_task(&new, guest()).await.unwrap();
        for _ in 0..=MOST_SENDING {
            let late = profiles.load_in_task(&old, guest()).await;
            assert!(matches!(late, Err(AgentError::Timeout { .. })), "{late:?}");
        }
        assert_eq!(profiles.sending.available_permits(), 0);
        // What the guest has is not waited for.
        profiles.load_in_task(&new, guest()).await.unwrap();
        answers.add_permits(1000);
        while profiles.sending.available_permits() < MOST_SENDING {
            tokio::task::yield_now().await;
        }
        let sent = sent.lock().unwrap();
        assert!(sent.starts_with("b3,a1,b1,") && sent.ends_with("b3,"), "{sent}");
    }

    #[tokio::test]
    async fn newer_policy_follows_a_part_although_the_next_one_is_refused() {
        let profiles = Profiles::default();
        let sent = Mutex::new(String::new());
        let guest = |part: Part| {
            let text = std::str::from_utf8(&part.policy).unwrap().to_owned();
            let answer = if text == "a2," { refused() } else { Ok(()) };
            sent.lock().unwrap().push_str(&text);
            async { answer }
        };
        profiles.load_with(&policy("b", &[(4, "b4,")]), guest).await.unwrap();
        let a = policy("a", &[(1, "a1,b1,"), (2, "a2,"), (3, "a3,")]);
        assert!(matches!(profiles.load_with(&a, guest).await, Err(AgentError::Refused { .. })));
        assert_eq!(sent.into_inner().unwrap(), "b4,a1,b1,a2,b4,");
    }

    #[tokio::test]
    async fn a_request_does_not_succeed_if_others_always_fail() {
        let profiles = Profiles::default();
        let p = policy("p", &[(1, "p1,")]);
        let guest = |part: Part| {
            let mut known = profiles.known.lock().unwrap();
            let other = known.add(&p).unwrap();
            assert!(known.note(&other, 1, &part, refused()).is_break());
            async { Ok(()) }
        };
        let error = profiles.load_with(&p, guest).await.unwrap_err();
        assert!(matches!(error, AgentError::Refused { code: Code::ABORTED, .. }), "{error}");
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
        let needed = known.add(&old).unwrap();
        let (revision, part) = known.part_from(needed.missing.unwrap()).unwrap();
        assert_eq!(known.load(&new), "b2,");
        assert!(known.note(&needed, revision, &part, Ok(())).is_continue());
        assert_eq!(known.part_from(revision + 1).unwrap().0, 2);
    }

    #[test]
    fn what_the_guest_refuses_is_sent_again_and_takes_no_place() {
        let mut known = Known::default();
        let (a, b) = (policy("a", &[(1, "a1,")]), policy("b", &[(2, "b2,")]));
        let needed = known.add(&a).unwrap();
        let (revision, part) = known.part_from(needed.missing.unwrap()).unwrap();
        assert!(known.note(&needed, revision, &part, refused()).is_break());
        assert!(known.profiles.is_empty() && known.parts.is_empty());
        known.load(&b);
        // That of another profile fails: only that one is sent again.
        let needed = known.add(&a).unwrap();
        let (_, part) = known.part_from(2).unwrap();
        assert!(known.note(&needed, 2, &part, refused()).is_continue());
        assert_eq!(known.load(&b), "b2,");
        assert_eq!(known.add(&a).unwrap().missing, Some(1));
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
