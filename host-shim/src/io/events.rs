//! Events to containerd: queued in order, and sent again while containerd is away. Those of containers are recorded for
//! the operator too.

use std::time::{Duration, SystemTime};

use containerd_shim_protos::{
    api,
    events::task::{
        TaskCreate, TaskDelete, TaskExecAdded, TaskExecStarted, TaskExit, TaskIO, TaskOOM, TaskPaused,
        TaskResumed, TaskStart,
    },
    shim::{event::Envelope, events::ForwardRequest},
    shim_async::EventsClient,
    topics,
};
use protobuf::{Message, well_known_types::any::Any};
use tokio::{
    net::UnixStream,
    sync::{mpsc, watch},
    time::Instant,
};
use ttrpc::{
    r#async::{Client, transport::Socket},
    context::with_duration,
};

use crate::{
    host::event_log::EventLog,
    types::{
        error::chain,
        event::PodEvent,
        exit::{Exit, timestamp},
    },
};

/// A container has four events in its life, and three more for each process that exec adds.
const QUEUE: usize = 256;

/// Places of the queue that are kept for the lives of containers. Of some events there can be any number, because a
/// guest causes them or a client adds processes. These are lost when fewer places are free.
const KEPT: usize = QUEUE / 2;

/// The same for the end of an added process. It is kept longer than its beginning: docker waits for it.
const KEPT_AT_AN_END: usize = QUEUE / 4;

/// How long containerd may take to answer.
const FORWARD: Duration = Duration::from_secs(10);

/// How long an event is sent again that containerd answers with an error. The events after it wait.
const REFUSED: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 30 });

const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Queues events. Clones share one queue.
#[derive(Debug, Clone)]
pub(crate) struct Publisher {
    namespace: String,
    queue: mpsc::Sender<Envelope>,
    log: EventLog,
    /// How many events containerd has not got yet.
    waiting: watch::Sender<usize>,
}

/// An event that was not accepted.
#[derive(Debug, thiserror::Error)]
enum ForwardError {
    #[error("containerd is away: {0}")]
    Away(String),
    #[error("containerd refuses the event: {0}")]
    Refused(String),
}

impl Publisher {
    /// Begins to send to containerd's ttrpc socket. Without an address (the shim was started by hand) events go
    /// nowhere.
    pub(crate) fn start(address: Option<&str>, namespace: &str) -> Self {
        let (queue, events) = mpsc::channel(QUEUE);
        let (waiting, _) = watch::channel(0);
        if let Some(address) = address {
            let address = address.strip_prefix("unix://").unwrap_or(address).to_owned();
            tokio::spawn(send_all(address, events, waiting.clone()));
        }
        Self { namespace: namespace.into(), queue, log: EventLog::default(), waiting }
    }

    /// containerd's namespace.
    pub(crate) fn namespace(&self) -> &str {
        &self.namespace
    }

    /// What is recorded for the operator.
    pub(crate) fn log(&self) -> &EventLog {
        &self.log
    }

    /// Waits until containerd has every event, at most `within`.
    pub(crate) async fn flush(&self, within: Duration) {
        let mut waiting = self.waiting.subscribe();
        let sent = waiting.wait_for(|count| *count == 0);
        if tokio::time::timeout(within, sent).await.is_err() {
            tracing::warn!(events = *self.waiting.borrow(), "containerd did not take all events");
        }
    }

    /// The container exists.
    pub(crate) fn created(&self, request: &api::CreateTaskRequest, pid: u32) {
        let mut event = TaskCreate::new();
        event.container_id = request.id.clone();
        event.bundle = request.bundle.clone();
        event.rootfs = request.rootfs.clone();
        event.io = Some(task_io(request)).into();
        event.pid = pid;
        self.log.record(PodEvent::ContainerCreated { container: request.id.clone() });
        self.publish(topics::TASK_CREATE_EVENT_TOPIC, "containerd.events.TaskCreate", &event);
    }

    /// Its process runs.
    pub(crate) fn started(&self, container_id: &str, pid: u32) {
        let mut event = TaskStart::new();
        event.container_id = container_id.into();
        event.pid = pid;
        self.log.record(PodEvent::ContainerStarted { container: container_id.into() });
        self.publish(topics::TASK_START_EVENT_TOPIC, "containerd.events.TaskStart", &event);
    }

    /// Its processes are stopped.
    pub(crate) fn paused(&self, container_id: &str) {
        let mut event = TaskPaused::new();
        event.container_id = container_id.into();
        self.log.record(PodEvent::ContainerPaused { container: container_id.into() });
        self.publish(topics::TASK_PAUSED_EVENT_TOPIC, "containerd.events.TaskPaused", &event);
    }

    /// They go on.
    pub(crate) fn resumed(&self, container_id: &str) {
        let mut event = TaskResumed::new();
        event.container_id = container_id.into();
        self.log.record(PodEvent::ContainerResumed { container: container_id.into() });
        self.publish(topics::TASK_RESUMED_EVENT_TOPIC, "containerd.events.TaskResumed", &event);
    }

    /// Processes of the container were killed by the out-of-memory killer.
    pub(crate) fn oom(&self, container_id: &str, kills: u64) {
        self.log.record(PodEvent::OomKill { container: container_id.into(), kills });
        let mut event = TaskOOM::new();
        event.container_id = container_id.into();
        let (topic, type_url) = (topics::TASK_OOM_EVENT_TOPIC, "containerd.events.TaskOOM");
        self.publish_if_free(KEPT, container_id, topic, type_url, &event);
    }

    /// A process of the container ended: its init, whose id is the container's, or one that exec added.
    pub(crate) fn exited(&self, container_id: &str, id: &str, pid: u32, exit: Exit) {
        let mut event = TaskExit::new();
        event.container_id = container_id.into();
        event.id = id.into();
        event.pid = pid;
        event.exit_status = exit.status;
        event.exited_at = Some(timestamp(exit.at)).into();
        let (topic, type_url) = (topics::TASK_EXIT_EVENT_TOPIC, "containerd.events.TaskExit");
        // Probes are processes that are added, and would soon fill the record.
        if id == container_id {
            let (container, status) = (container_id.into(), exit.status);
            self.log.record(PodEvent::ContainerExited { container, status });
            self.publish(topic, type_url, &event);
        } else {
            self.publish_if_free(KEPT_AT_AN_END, container_id, topic, type_url, &event);
        }
    }

    /// A process is to be added to the container.
    pub(crate) fn exec_added(&self, container_id: &str, exec_id: &str) {
        let mut event = TaskExecAdded::new();
        event.container_id = container_id.into();
        event.exec_id = exec_id.into();
        let (topic, type_url) = (topics::TASK_EXEC_ADDED_EVENT_TOPIC, "containerd.events.TaskExecAdded");
        self.publish_if_free(KEPT, container_id, topic, type_url, &event);
    }

    /// It runs.
    pub(crate) fn exec_started(&self, container_id: &str, exec_id: &str, pid: u32) {
        let mut event = TaskExecStarted::new();
        event.container_id = container_id.into();
        event.exec_id = exec_id.into();
        event.pid = pid;
        let (topic, type_url) = (topics::TASK_EXEC_STARTED_EVENT_TOPIC, "containerd.events.TaskExecStarted");
        self.publish_if_free(KEPT, container_id, topic, type_url, &event);
    }

    /// Nothing is left of it.
    pub(crate) fn deleted(&self, container_id: &str, pid: u32, exit: Exit) {
        let mut event = TaskDelete::new();
        event.container_id = container_id.into();
        event.pid = pid;
        event.exit_status = exit.status;
        event.exited_at = Some(timestamp(exit.at)).into();
        self.publish(topics::TASK_DELETE_EVENT_TOPIC, "containerd.events.TaskDelete", &event);
    }

    /// Publishes an event if the queue has at least this many free places.
    fn publish_if_free(
        &self,
        places: usize,
        container: &str,
        topic: &str,
        type_url: &str,
        event: &impl Message,
    ) {
        if self.queue.capacity() < places {
            return tracing::warn!(container, topic, "an event is lost: containerd takes none");
        }
        self.publish(topic, type_url, event);
    }

    fn publish(&self, topic: &str, type_url: &str, event: &impl Message) {
        let mut any = Any::new();
        any.type_url = type_url.into();
        match event.write_to_bytes() {
            Ok(bytes) => any.value = bytes,
            Err(e) => return tracing::error!(type_url, error = chain(&e), "the event cannot be encoded"),
        }
        let mut envelope = Envelope::new();
        envelope.timestamp = Some(timestamp(SystemTime::now())).into();
        envelope.namespace = self.namespace.clone();
        envelope.topic = topic.into();
        envelope.event = Some(any).into();
        // It is counted before it is queued, because it may be sent at once.
        self.waiting.send_modify(|count| *count += 1);
        if let Err(e) = self.queue.try_send(envelope) {
            self.waiting.send_modify(|count| *count -= 1);
            tracing::error!(topic, error = chain(&e), "the event is lost");
        }
    }
}

fn task_io(request: &api::CreateTaskRequest) -> TaskIO {
    let mut io = TaskIO::new();
    io.stdin = request.stdin.clone();
    io.stdout = request.stdout.clone();
    io.stderr = request.stderr.clone();
    io.terminal = request.terminal;
    io
}

async fn send_all(address: String, mut events: mpsc::Receiver<Envelope>, waiting: watch::Sender<usize>) {
    let mut client = None;
    while let Some(envelope) = events.recv().await {
        let mut request = ForwardRequest::new();
        let topic = envelope.topic.clone();
        request.envelope = Some(envelope).into();
        let (mut pause, mut refused_since) = (FIRST_PAUSE, None);
        while let Err(error) = forward(&mut client, &address, &request).await {
            tracing::debug!(topic, error = chain(&error), "the event waits");
            match error {
                ForwardError::Refused(_) => {
                    if refused_since.get_or_insert_with(Instant::now).elapsed() > REFUSED {
                        tracing::error!(topic, error = chain(&error), "the event is lost");
                        break;
                    }
                }
                ForwardError::Away(_) => {
                    client = None;
                    refused_since = None;
                }
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
        waiting.send_modify(|count| *count -= 1);
    }
}

async fn forward(
    client: &mut Option<EventsClient>,
    address: &str,
    request: &ForwardRequest,
) -> Result<(), ForwardError> {
    let client = match client {
        Some(client) => client,
        None => {
            let connecting = tokio::time::timeout(FORWARD, UnixStream::connect(address)).await;
            let stream = connecting
                .map_err(|e| ForwardError::Away(e.to_string()))?
                .map_err(|e| ForwardError::Away(format!("{address}: {e}")))?;
            client.insert(EventsClient::new(Client::new(Socket::from(stream))))
        }
    };
    match client.forward(with_duration(FORWARD), request).await {
        Ok(_) => Ok(()),
        Err(ttrpc::Error::RpcStatus(status)) => Err(ForwardError::Refused(status.message)),
        Err(e) => Err(ForwardError::Away(e.to_string())),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::{
        path::Path,
        sync::{
            Arc, Mutex,
            atomic::{AtomicUsize, Ordering},
        },
    };

    use async_trait::async_trait;
    use containerd_shim_protos::shim_async::{Events, create_events};
    use protobuf::well_known_types::empty::Empty;
    use ttrpc::r#async::{Server, TtrpcContext};

    use super::*;

    /// containerd's side: the topics it was told, in order. The first `refusals` are answered with an error.
    #[derive(Default, Clone)]
    pub(crate) struct Heard {
        topics: Arc<Mutex<Vec<String>>>,
        refusals: Arc<AtomicUsize>,
    }

    #[async_trait]
    impl Events for Heard {
        async fn forward(&self, _: &TtrpcContext, request: ForwardRequest) -> ttrpc::Result<Empty> {
            let refuse = |left: usize| left.checked_sub(1);
            if self.refusals.fetch_update(Ordering::Relaxed, Ordering::Relaxed, refuse).is_ok() {
                let status = ttrpc::get_status(ttrpc::Code::INTERNAL, "try again");
                return Err(ttrpc::Error::RpcStatus(status));
            }
            self.topics.lock().unwrap().push(request.envelope.topic.clone());
            Ok(Empty::new())
        }
    }

    impl Heard {
        pub(crate) async fn serve(&self, path: &Path) -> Server {
            let mut server = Server::new()
                .bind(&format!("unix://{}", path.display()))
                .unwrap()
                .register_service(create_events(Arc::new(self.clone())));
            server.start().await.unwrap();
            server
        }

        pub(crate) fn topics(&self) -> Vec<String> {
            self.topics.lock().unwrap().clone()
        }
    }

    #[tokio::test]
    async fn events_wait_for_containerd_and_keep_their_order() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("containerd.sock.ttrpc");
        let publisher = Publisher::start(Some(path.to_str().unwrap()), "default");
        for topic in ["/one", "/two", "/three"] {
            publisher.publish(topic, "containerd.events.TaskStart", &TaskStart::new());
        }
        publisher.flush(Duration::from_millis(20)).await;
        let heard = Heard::default();
        let _server = heard.serve(&path).await;
        publisher.flush(Duration::from_secs(5)).await;
        assert_eq!(heard.topics(), ["/one", "/two", "/three"]);
    }

    #[tokio::test]
    async fn an_event_that_is_answered_with_an_error_is_sent_again_within_a_bound() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("containerd.sock.ttrpc");
        let heard = Heard::default();
        heard.refusals.store(2, Ordering::Relaxed);
        let _server = heard.serve(&path).await;
        let publisher = Publisher::start(Some(path.to_str().unwrap()), "default");
        for topic in ["/one", "/two"] {
            publisher.publish(topic, "containerd.events.TaskStart", &TaskStart::new());
        }
        publisher.flush(Duration::from_secs(5)).await;
        assert_eq!(heard.topics(), ["/one", "/two"]);
        heard.refusals.store(usize::MAX, Ordering::Relaxed);
        publisher.publish("/three", "containerd.events.TaskStart", &TaskStart::new());
        publisher.flush(Duration::from_secs(10)).await;
        assert_eq!(*publisher.waiting.borrow(), 0, "it keeps the others for ever");
    }

    #[tokio::test]
    async fn the_queue_is_bounded() {
        let publisher = Publisher::start(Some("/nonexistent/socket"), "default");
        for _ in 0..2 * QUEUE {
            publisher.publish("/many", "containerd.events.TaskStart", &TaskStart::new());
        }
        assert!(*publisher.waiting.borrow() <= QUEUE + 1);
    }

    #[tokio::test]
    async fn a_guest_out_of_memory_takes_half_of_the_queue_at_most() {
        let publisher = Publisher::start(Some("/nonexistent/socket"), "default");
        for _ in 0..2 * QUEUE {
            publisher.oom("c", 1);
        }
        assert!(publisher.queue.capacity() >= QUEUE / 2 - 1, "{}", publisher.queue.capacity());
    }
}
