//! Why a request of containerd's cannot be carried out.

use std::{io, path::PathBuf};

use crate::types::{options::OptionsError, stdio_endpoint::EndpointError, terminal::TerminalError};

/// Why a request cannot be carried out.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RequestError {
    #[error("{what} is not implemented{hint}")]
    Unimplemented { what: String, hint: &'static str },
    #[error("{field}: {reason}")]
    Invalid { field: String, reason: String },
    #[error(
        "linux.namespaces: process {pid} is of no container of this pod, so its {kind} namespace cannot be joined"
    )]
    ForeignNamespace { kind: &'static str, pid: u32 },
    #[error("cannot read {path}")]
    Read { path: PathBuf, source: io::Error },
    #[error("mounts[{index}].source: cannot look at {path}")]
    Volume { index: usize, path: PathBuf, source: io::Error },
    #[error("cannot parse {path}")]
    Parse { path: PathBuf, source: serde_json::Error },
    #[error("cannot parse the process")]
    Process(#[source] serde_json::Error),
    #[error(transparent)]
    Endpoint(#[from] EndpointError),
    #[error(transparent)]
    Terminal(#[from] TerminalError),
    #[error(transparent)]
    Options(#[from] OptionsError),
}

pub(crate) fn unimplemented(what: impl Into<String>, hint: &'static str) -> RequestError {
    RequestError::Unimplemented { what: what.into(), hint }
}

pub(crate) fn invalid(field: impl Into<String>, reason: impl Into<String>) -> RequestError {
    RequestError::Invalid { field: field.into(), reason: reason.into() }
}
