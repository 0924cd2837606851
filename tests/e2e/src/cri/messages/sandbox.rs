//! What containerd's own service for sandboxes is asked (containerd, api/services/sandbox/v1), for what the CRI has no
//! words for.

use prost::Message;

#[derive(Clone, PartialEq, Message)]
pub(crate) struct SandboxMetricsRequest {
    #[prost(string, tag = "1")]
    pub(crate) sandbox_id: String,
    #[prost(string, tag = "10")]
    pub(crate) sandboxer: String,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct SandboxMetricsResponse {
    #[prost(message, optional, tag = "1")]
    pub(crate) metrics: Option<Metric>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Metric {
    #[prost(string, tag = "2")]
    pub(crate) id: String,
    #[prost(message, optional, tag = "3")]
    pub(crate) data: Option<Any>,
}

/// A message with the name of its type.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Any {
    #[prost(string, tag = "1")]
    pub(crate) type_url: String,
    #[prost(bytes = "vec", tag = "2")]
    pub(crate) value: Vec<u8>,
}
