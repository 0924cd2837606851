//! A client of containerd's CRI service: what kubelet is in a cluster.

pub(crate) mod messages;
pub(crate) mod stream;

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use messages::{ListContainersRequest, Request};
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::metadata::MetadataValue;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};
use tonic_prost::ProstCodec;

use crate::command::wait_until;

/// containerd's namespace of all pods.
pub(crate) const NAMESPACE: &str = "k8s.io";

/// The connection to a CRI service.
pub(crate) struct Client {
    runtime: tokio::runtime::Runtime,
    channel: Channel,
    limit: Duration,
    /// containerd's namespace, of which services other than the CRI's are told.
    namespace: &'static str,
}

impl Client {
    /// Connects to the service on a Unix socket. Each call may take as long as `limit`.
    pub(crate) fn connect(socket: &Path, limit: Duration) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .context("cannot make an async runtime")?;
        let endpoint = Endpoint::from_shared(format!("unix://{}", socket.display()))
            .with_context(|| format!("{} is no address", socket.display()))?;
        let channel = runtime
            .block_on(endpoint.connect())
            .with_context(|| format!("no CRI service answers on {}", socket.display()))?;
        Ok(Self { runtime, channel, limit, namespace: NAMESPACE })
    }

    /// A client for what is in another namespace of containerd.
    pub(crate) fn in_namespace(self, namespace: &'static str) -> Self {
        Self { namespace, ..self }
    }

    /// Makes a call. The answer, or the service's own reason for none.
    fn attempt<R: Request>(&self, request: R) -> Result<Result<R::Answer, Status>> {
        self.attempt_within(self.limit, request)
    }

    /// Makes a call that must be answered within `limit`. The answer, or the service's own reason for none.
    pub(crate) fn attempt_within<R: Request>(
        &self,
        limit: Duration,
        request: R,
    ) -> Result<Result<R::Answer, Status>> {
        self.send(limit, tonic::Request::new(request))
    }

    fn send<R: Request>(
        &self,
        limit: Duration,
        mut request: tonic::Request<R>,
    ) -> Result<Result<R::Answer, Status>> {
        let path = PathAndQuery::from_maybe_shared(format!("/{}/{}", R::SERVICE, R::METHOD))
            .with_context(|| format!("{} is no name of a method", R::METHOD))?;
        let mut grpc = Grpc::new(self.channel.clone());
        let call = async {
            grpc.ready().await.map_err(|error| Status::unavailable(format!("{error:#}")))?;
            let codec = ProstCodec::<R, R::Answer>::default();
            // The CRI service knows where its pods are; those of containerd are told.
            request.metadata_mut().insert("containerd-namespace", MetadataValue::from_static(self.namespace));
            Ok(grpc.unary(request, path, codec).await?.into_inner())
        };
        let limited = async { tokio::time::timeout(limit, call).await };
        self.runtime.block_on(limited).map_err(|_| {
            anyhow!("expected  an answer to {} within {} s\ncame      none", R::METHOD, limit.as_secs())
        })
    }

    /// Waits until the service answers: containerd 1.6 says that it is ready before its CRI service is.
    pub(crate) fn wait_until_served(&self, limit: Duration) -> Result<()> {
        wait_until("an answer of the CRI service", limit, || {
            Ok(self.attempt(ListContainersRequest::default())?.is_ok())
        })
    }

    /// Makes a call that must succeed.
    pub(crate) fn call<R: Request>(&self, request: R) -> Result<R::Answer> {
        self.call_in(None, request)
    }

    /// Makes a call that must succeed, as a part of a span of the client: `traceparent` of W3C Trace Context.
    pub(crate) fn call_in<R: Request>(&self, span: Option<&str>, request: R) -> Result<R::Answer> {
        let mut request = tonic::Request::new(request);
        if let Some(span) = span {
            request.metadata_mut().insert("traceparent", span.parse().context("no traceparent")?);
        }
        self.send(self.limit, request)?.map_err(|status| {
            anyhow!("expected  {} to succeed\ncame      {:?}: {}", R::METHOD, status.code(), status.message())
        })
    }

    /// Makes a call that must be refused with this code, and returns the message.
    pub(crate) fn refused<R: Request>(&self, request: R, code: Code) -> Result<String> {
        match self.attempt(request)? {
            Err(status) if status.code() == code => Ok(status.message().to_owned()),
            Err(status) => bail!(
                "expected  {} to be refused with {code:?}\ncame      {:?}: {}",
                R::METHOD,
                status.code(),
                status.message()
            ),
            Ok(answer) => {
                bail!("expected  {} to be refused with {code:?}\ncame      {answer:?}", R::METHOD)
            }
        }
    }
}
