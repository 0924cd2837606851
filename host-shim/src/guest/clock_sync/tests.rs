//! An agent whose clock is not the host's.

use std::{
    sync::{Arc, Mutex},
    time::SystemTime,
};

use async_trait::async_trait;
use bulkhead_agent_api::{
    agent::*,
    agent_ttrpc::{Agent as AgentService, create_agent},
};
use tokio::net::{UnixListener, UnixStream};
use ttrpc::r#async::{Server, TtrpcContext, transport::Listener};

use super::*;
use crate::testing::logged;

const HOUR_NS: i64 = 3_600_000_000_000;

#[derive(Clone, Default)]
struct Guest(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    ahead_ns: i64,
    told: Vec<AdjustClockRequest>,
    refuses: bool,
    /// Says at once that the deadline is over.
    claims_a_timeout: bool,
    asked: u32,
    stands_still: bool,
}

#[async_trait]
impl AgentService for Guest {
    async fn read_clock(&self, _: &TtrpcContext, _: Empty) -> ttrpc::Result<ReadClockResponse> {
        self.until(|state| !state.stands_still).await;
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
        let unix_ns = i64::try_from(now.as_nanos()).unwrap() + self.0.lock().unwrap().ahead_ns;
        Ok(ReadClockResponse { unix_ns, ..Default::default() })
    }

    async fn adjust_clock(&self, _: &TtrpcContext, request: AdjustClockRequest) -> ttrpc::Result<Empty> {
        let mut state = self.0.lock().unwrap();
        state.asked += 1;
        if state.claims_a_timeout {
            let status = ttrpc::get_status(ttrpc::Code::DEADLINE_EXCEEDED, "late");
            return Err(ttrpc::Error::RpcStatus(status));
        }
        if state.refuses {
            let status = ttrpc::get_status(ttrpc::Code::INTERNAL, "no");
            return Err(ttrpc::Error::RpcStatus(status));
        }
        state.ahead_ns += request.step_ns;
        state.told.push(request);
        Ok(Empty::new())
    }
}

impl Guest {
    /// Serves one client.
    async fn serve(&self) -> (Server, Agent) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("agent");
        let listener = UnixListener::bind(&path).unwrap();
        let service = create_agent(Arc::new(self.clone()));
        let mut server = Server::new().add_listener(Listener::from(listener)).register_service(service);
        server.start().await.unwrap();
        (server, Agent::over(UnixStream::connect(path).await.unwrap()))
    }

    async fn until(&self, is_it: impl Fn(&State) -> bool) {
        let look = async {
            while !is_it(&self.0.lock().unwrap()) {
                sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), look).await.unwrap();
    }
}

#[tokio::test]
async fn a_guests_clock_becomes_the_hosts() {
    for ahead_ns in [HOUR_NS, -HOUR_NS] {
        let guest = Guest::default();
        guest.0.lock().unwrap().ahead_ns = ahead_ns;
        let (_server, agent) = guest.serve().await;
        let _followed = HostClock::watch().follow(agent);
        guest.until(|state| !state.told.is_empty()).await;
        let ahead_ns = guest.0.lock().unwrap().ahead_ns;
        assert!(ahead_ns.abs() < 100_000_000, "{ahead_ns}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_host_whose_clock_is_set_every_second_does_not_fill_the_log() {
    let sample = Sample { offset_ns: -HOUR_NS, round_trip_ns: 0 };
    let correction = Correction { step_ns: HOUR_NS, rate_ppb: 0 };
    let mut log = Log::default();
    let hour = |log: &mut Log| logged(|| (0..3000).for_each(|_| log.step(&sample, &correction, true)));
    let lines = hour(&mut log);
    assert_eq!(lines.len(), LOGGED_STEPS as usize, "{lines:?}");
    assert!(lines.last().unwrap().contains("for a time this is not logged again"), "{lines:?}");
    tokio::time::advance(LOG_AGAIN).await;
    assert_eq!(hour(&mut log).len(), LOGGED_STEPS as usize);
}

#[tokio::test]
async fn a_guest_that_refuses_is_told_again() {
    let guest = Guest::default();
    *guest.0.lock().unwrap() = State { ahead_ns: HOUR_NS, refuses: true, ..State::default() };
    let (_server, agent) = guest.serve().await;
    let _followed = HostClock::watch().follow(agent);
    sleep(Duration::from_millis(50)).await;
    guest.0.lock().unwrap().refuses = false;
    guest.until(|state| !state.told.is_empty()).await;
}

#[tokio::test]
async fn a_guest_that_claims_a_timeout_is_not_asked_without_a_pause() {
    let guest = Guest::default();
    guest.0.lock().unwrap().claims_a_timeout = true;
    let (_server, agent) = guest.serve().await;
    let _followed = HostClock::watch().follow(agent);
    guest.until(|state| state.asked > 0).await;
    sleep(Duration::from_millis(500)).await;
    assert!(guest.0.lock().unwrap().asked <= 2);
}

#[tokio::test]
async fn a_guest_that_goes_on_is_right_at_once() {
    let guest = Guest::default();
    *guest.0.lock().unwrap() = State { ahead_ns: HOUR_NS, stands_still: true, ..State::default() };
    let (_server, agent) = guest.serve().await;
    let _followed = HostClock::watch().follow(agent);
    // Until the question has timed out.
    sleep(Duration::from_millis(2500)).await;
    guest.0.lock().unwrap().stands_still = false;
    let told = guest.until(|state| !state.told.is_empty());
    tokio::time::timeout(Duration::from_secs(1), told).await.unwrap();
}

#[tokio::test]
async fn it_ends_with_the_guest_and_with_the_pod() {
    let guest = Guest::default();
    let (mut server, agent) = guest.serve().await;
    let mut followed = HostClock::watch().follow(agent);
    guest.until(|state| !state.told.is_empty()).await;
    server.shutdown().await.unwrap();
    drop(server);
    tokio::time::timeout(Duration::from_secs(20), &mut followed.0).await.unwrap().unwrap();

    let (_server, agent) = guest.serve().await;
    let followed = HostClock::watch().follow(agent);
    let task = followed.0.abort_handle();
    drop(followed);
    while !task.is_finished() {
        sleep(Duration::from_millis(5)).await;
    }
}

const GOOD: Synchronization =
    Synchronization { is_synchronized: true, max_error_us: 3000, estimated_error_us: 20 };

#[tokio::test]
async fn a_guest_is_told_how_good_the_hosts_clock_is() {
    for quality in [|| GOOD, || Synchronization::NONE] {
        let guest = Guest::default();
        let (_server, agent) = guest.serve().await;
        let _followed = HostClock { synchronization: quality, ..HostClock::watch() }.follow(agent);
        guest.until(|state| !state.told.is_empty()).await;
        let told = guest.0.lock().unwrap().told[0].clone();
        let host = quality();
        assert_eq!(told.is_synchronized, host.is_synchronized);
        // By the time that the answer took the guest's clock may be further off.
        let more = told.max_error_us - host.max_error_us;
        assert!((1..1_000_000).contains(&more), "{told:?}");
        assert_eq!(told.estimated_error_us - host.estimated_error_us, more);
    }
}

#[tokio::test(start_paused = true)]
async fn a_host_that_becomes_synchronized_is_noticed_before_the_next_comparison() {
    let (own, _guests) = UnixStream::pair().unwrap();
    let (now, sample) = (Reading::now(), Sample { offset_ns: 0, round_trip_ns: 0 });
    let mut discipline = Discipline::new(&now);
    discipline.correct(&sample, false, &now);
    (0..10).for_each(|_| discipline.failed());
    let interval = discipline.interval();
    assert!(interval > LOOK * 2);
    let mut follower = Follower {
        agent: Agent::over(own),
        steps: None,
        discipline,
        synchronization: || GOOD,
        told_synchronized: Some(true),
        log: Log::default(),
    };
    for (told, expected) in [(true, interval), (false, LOOK)] {
        follower.told_synchronized = Some(told);
        let begun = Instant::now();
        assert!(!follower.wait().await);
        assert_eq!(begun.elapsed().as_secs(), expected.as_secs());
    }
}
