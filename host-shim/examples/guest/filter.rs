//! The connection between the shim and the agent, and what cannot be real in these tests: an agent that does not
//! answer, and the memory limits of a kernel whose memory controller belongs to cgroup v1.
//!
//! A test changes the rules at any time. They are lines of a file:
//!
//! ```text
//! lose ID          requests to signal or delete this container never arrive; the agent itself answers them always;
//!                  the file `lost` beside the rules gets a line with ID for each
//! lose-queries ID  the same for requests for statistics or processes of this container
//! accept-limits    UpdateContainer succeeds, and the agent does not get it; a container is created without its limits;
//!                  the file `limits` beside the rules gets a line of JSON for each
//! fail-update      UpdateContainer fails, and the agent does not get it
//! fail-processors  SetProcessors fails, and the agent does not get it
//! fail-follow      FollowMemory fails, and the agent does not get it
//! need-memory      the containers need more memory whenever the guest can have some; the file `demands` beside the
//!                  rules gets a line for each WaitMemoryDemand: whether the guest can grow
//! oom STATUS       a process that ends with this status was killed because memory was short
//! ```

use std::{
    collections::HashSet,
    fmt::Display,
    fs,
    io::{self, Write},
    path::PathBuf,
    sync::{Mutex, PoisonError},
};

use bulkhead_agent_api::agent::{
    CreateContainerRequest, DeleteContainerRequest, UpdateContainerRequest, WaitMemoryDemandRequest,
    WaitProcessResponse,
};
use protobuf::Message;
use serde_json::Value;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        UnixStream,
        unix::{OwnedReadHalf, OwnedWriteHalf},
    },
};
use ttrpc::proto::{MESSAGE_HEADER_LENGTH, MESSAGE_TYPE_RESPONSE, MessageHeader, Request, Response};

use crate::share;

/// The rules, for one connection.
pub(crate) struct Filter {
    rules: PathBuf,
    /// The streams on which WaitProcess is to be answered.
    waits: Mutex<HashSet<u32>>,
}

/// A header and the message after it.
struct Frame {
    header: MessageHeader,
    body: Vec<u8>,
}

impl Frame {
    async fn read(stream: &mut OwnedReadHalf) -> io::Result<Self> {
        let mut header = vec![0; MESSAGE_HEADER_LENGTH];
        stream.read_exact(&mut header).await?;
        let header = MessageHeader::from(&header);
        let mut body = vec![0; header.length as usize];
        stream.read_exact(&mut body).await?;
        Ok(Self { header, body })
    }

    /// An answer to the request on a stream.
    fn answer(stream_id: u32, response: &Response) -> io::Result<Self> {
        let body = response.write_to_bytes()?;
        let header =
            MessageHeader { length: body.len() as u32, stream_id, type_: MESSAGE_TYPE_RESPONSE, flags: 0 };
        Ok(Self { header, body })
    }

    /// This request, a CreateContainer, for a container without limits, and the limits.
    fn without_limits(mut self, mut request: Request) -> io::Result<(Self, Value)> {
        let mut create = CreateContainerRequest::parse_from_bytes(&request.payload)?;
        let mut spec: Value = serde_json::from_slice(&create.spec_json)?;
        let linux = spec.get_mut("linux").and_then(Value::as_object_mut);
        let limits = linux.and_then(|linux| linux.remove("resources")).unwrap_or_default();
        create.spec_json = serde_json::to_vec(&spec)?;
        request.payload = create.write_to_bytes()?;
        self.body = request.write_to_bytes()?;
        self.header.length = self.body.len() as u32;
        Ok((self, limits))
    }

    async fn write(self, stream: &tokio::sync::Mutex<OwnedWriteHalf>) -> io::Result<()> {
        let header: Vec<u8> = self.header.into();
        stream.lock().await.write_all(&[header, self.body].concat()).await
    }
}

/// The answer that a request fails.
fn refusal(stream_id: u32, rule: &str) -> io::Result<Frame> {
    let mut response = Response::new();
    response.set_status(ttrpc::get_status(ttrpc::Code::UNAVAILABLE, rule));
    Frame::answer(stream_id, &response)
}

impl Filter {
    pub(crate) fn new(rules: PathBuf) -> Self {
        Self { rules, waits: Mutex::default() }
    }

    /// Connects the shim and the agent until one of them ends.
    pub(crate) async fn connect(self, shim: UnixStream, agent: UnixStream) {
        let (mut from_shim, to_shim) = shim.into_split();
        let (mut from_agent, to_agent) = agent.into_split();
        let (to_shim, to_agent) = (tokio::sync::Mutex::new(to_shim), tokio::sync::Mutex::new(to_agent));
        let requests = async {
            loop {
                self.request(Frame::read(&mut from_shim).await?, &to_shim, &to_agent).await?;
            }
        };
        let answers = async {
            loop {
                self.answer(Frame::read(&mut from_agent).await?)?.write(&to_shim).await?;
            }
        };
        // An error is the end of one of them.
        let _: io::Result<()> = tokio::select! {
            ended = requests => ended,
            ended = answers => ended,
        };
    }

    async fn request(
        &self,
        frame: Frame,
        shim: &tokio::sync::Mutex<OwnedWriteHalf>,
        agent: &tokio::sync::Mutex<OwnedWriteHalf>,
    ) -> io::Result<()> {
        let request = Request::parse_from_bytes(&frame.body)?;
        let rules = self.rules()?;
        let has = |rule: &str| rules.lines().any(|line| line == rule);
        match request.method.as_str() {
            method @ ("SignalProcess" | "DeleteContainer" | "ListPids" | "Stats") => {
                // All these requests begin with the container's id.
                let id = DeleteContainerRequest::parse_from_bytes(&request.payload)?.container_id;
                let rule = match method {
                    "ListPids" | "Stats" => "lose-queries",
                    _ => "lose",
                };
                if has(&format!("{rule} {id}")) {
                    return self.note("lost", id);
                }
            }
            "UpdateContainer" if has("fail-update") => {
                return refusal(frame.header.stream_id, "fail-update")?.write(shim).await;
            }
            "UpdateContainer" if has("accept-limits") => {
                let update = UpdateContainerRequest::parse_from_bytes(&request.payload)?;
                self.note("limits", serde_json::from_slice::<Value>(&update.resources_json)?)?;
                return Frame::answer(frame.header.stream_id, &Response::new())?.write(shim).await;
            }
            "SetProcessors" if has("fail-processors") => {
                return refusal(frame.header.stream_id, "fail-processors")?.write(shim).await;
            }
            "FollowMemory" if has("fail-follow") => {
                self.note("followed", "fails")?;
                return refusal(frame.header.stream_id, "fail-follow")?.write(shim).await;
            }
            "WaitMemoryDemand" if has("need-memory") => {
                let can_grow = WaitMemoryDemandRequest::parse_from_bytes(&request.payload)?.can_grow;
                self.note("demands", can_grow)?;
                if can_grow {
                    return Frame::answer(frame.header.stream_id, &Response::new())?.write(shim).await;
                }
            }
            // New mounts are in the share.
            "CreateContainer" => {
                share::lift_restrictions()?;
                if has("accept-limits") {
                    let (frame, limits) = frame.without_limits(request)?;
                    self.note("limits", limits)?;
                    return frame.write(agent).await;
                }
            }
            "WaitProcess" => {
                self.waits.lock().unwrap_or_else(PoisonError::into_inner).insert(frame.header.stream_id);
            }
            _ => {}
        }
        frame.write(agent).await
    }

    fn answer(&self, frame: Frame) -> io::Result<Frame> {
        let stream_id = frame.header.stream_id;
        let is_end = self.waits.lock().unwrap_or_else(PoisonError::into_inner).remove(&stream_id);
        let rules = self.rules()?;
        let statuses: Vec<&str> = rules.lines().filter_map(|line| line.strip_prefix("oom ")).collect();
        if !is_end || statuses.is_empty() {
            return Ok(frame);
        }
        let mut response = Response::parse_from_bytes(&frame.body)?;
        let mut end = WaitProcessResponse::parse_from_bytes(&response.payload)?;
        if statuses.contains(&end.exit_status.to_string().as_str()) {
            let oom = end.oom.mut_or_insert_default();
            (oom.kills, oom.limit_hits) = (1, 1);
        }
        response.payload = end.write_to_bytes()?;
        Frame::answer(stream_id, &response)
    }

    /// Adds a line to a file beside the rules.
    fn note(&self, file: &str, line: impl Display) -> io::Result<()> {
        let path = self.rules.with_file_name(file);
        writeln!(fs::File::options().create(true).append(true).open(path)?, "{line}")
    }

    fn rules(&self) -> io::Result<String> {
        match fs::read_to_string(&self.rules) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
            other => other,
        }
    }
}
