//! A guest that does not answer queries, and those who ask it again.

use super::*;

/// Shorter than any deadline.
const AT_ONCE: Duration = Duration::from_millis(500);

fn is_silent<T: std::fmt::Debug>(answer: Result<T, AgentError>) -> Option<u64> {
    match answer {
        Err(AgentError::Silent { seconds, .. }) => Some(seconds),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn only_the_first_query_waits_for_a_guest_that_does_not_answer() {
    let booted = started().await;
    let agent = &booted.agent;
    booted.run("demo", &["sleep", "1000"]).await;
    booted.guest.stop();
    let begun = Instant::now();
    let late = agent.stats("demo").await;
    assert!(matches!(late, Err(AgentError::Timeout { call: "Stats" })), "{late:?}");
    assert!((STATS..STATS + AT_ONCE).contains(&begun.elapsed()), "{:?}", begun.elapsed());
    let begun = Instant::now();
    for _ in 0..20 {
        assert!(is_silent(agent.stats("demo").await) >= Some(STATS.as_secs()));
        assert!(is_silent(agent.clone().list_pids("demo").await) >= Some(STATS.as_secs()));
    }
    assert!(begun.elapsed() < AT_ONCE, "{:?}", begun.elapsed());
    assert_eq!(
        agent.stats("demo").await.unwrap_err().to_string(),
        "the guest's agent has not answered for 2 s, so it is not asked: Stats"
    );
    booted.guest.go_on();
    // Nobody makes a call that would tell.
    let answered = async {
        while agent.stats("demo").await.is_err() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(WAIT, answered).await.unwrap();
    assert_eq!(agent.list_pids("demo").await.unwrap().len(), 1);
}

#[tokio::test]
async fn a_shim_that_stood_still_together_with_its_guest_does_not_take_the_guest_for_gone() {
    let booted = started().await;
    booted.guest.stop();
    let stand_still = async {
        tokio::time::sleep(AT_ONCE).await;
        std::thread::sleep(QUICK + AGENT_DEADLINE + AT_ONCE);
    };
    let (late, ()) = tokio::join!(booted.agent.resume("demo"), stand_still);
    assert!(matches!(late, Err(AgentError::Timeout { .. })), "{late:?}");
    booted.guest.go_on();
}

#[tokio::test]
async fn a_guest_that_does_not_answer_has_one_open_question_and_any_answer_ends_the_silence() {
    let booted = started().await;
    let agent = &booted.agent;
    booted.run("demo", &["sleep", "1000"]).await;
    booted.guest.follow("lose-queries demo");
    let late = tokio::join!(agent.list_pids("demo"), agent.list_pids("demo"), agent.stats("demo"));
    assert!(matches!(late.0, Err(AgentError::Timeout { .. })), "{late:?}");
    // One of them stays open, and none is asked again.
    let lost = async |count| {
        while booted.guest.lost("demo") < count {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert_eq!(booted.guest.lost("demo"), count);
    };
    timeout(WAIT, lost(3)).await.unwrap();
    for _ in 0..20 {
        is_silent(agent.list_pids("demo").await);
        is_silent(agent.stats("nobody").await);
    }
    // What ends something is asked in any case, and an answer about another container is one.
    assert_eq!(code(agent.signal("nobody", 9, false).await), Code::NOT_FOUND);
    assert_eq!(code(agent.stats("nobody").await), Code::NOT_FOUND);
    // The question of before is still open, and there is no second one.
    let late = agent.list_pids("demo").await;
    assert!(matches!(late, Err(AgentError::Timeout { .. })), "{late:?}");
    is_silent(agent.stats("nobody").await);
    tokio::time::sleep(AT_ONCE).await;
    timeout(WAIT, lost(4)).await.unwrap();
    agent.ping().await.unwrap();
    assert_eq!(code(agent.stats("nobody").await), Code::NOT_FOUND);
}

#[tokio::test]
async fn a_guest_that_has_ended_is_not_said_to_be_silent() {
    let booted = started().await;
    let agent = &booted.agent;
    booted.guest.stop();
    assert!(matches!(agent.list_pids("demo").await, Err(AgentError::Timeout { .. })));
    booted.vm.kill().await;
    let ended = async {
        while !matches!(agent.stats("demo").await, Err(AgentError::Disconnected { .. })) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(WAIT, ended).await.unwrap();
}
