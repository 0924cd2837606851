//! Terminals: what requests say of them, and their sizes.

use containerd_shim_protos::api;
use serde_json::{Map, Value, json};

/// Size of a terminal's window, characters; 0: not known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WindowSize {
    /// Columns.
    pub(crate) width: u16,
    /// Rows.
    pub(crate) height: u16,
}

/// Why a terminal cannot be as it was asked for.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TerminalError {
    #[error("a window of {width} x {height} is more than a terminal can have")]
    Size { width: u32, height: u32 },
    #[error("process.terminal is {spec}, but the request says {request}")]
    Mismatch { spec: bool, request: bool },
}

impl WindowSize {
    /// Reads what the request says.
    pub(crate) fn read(request: &api::ResizePtyRequest) -> Result<Self, TerminalError> {
        let (width, height) = (request.width, request.height);
        match (u16::try_from(width), u16::try_from(height)) {
            (Ok(width), Ok(height)) => Ok(Self { width, height }),
            _ => Err(TerminalError::Size { width, height }),
        }
    }

    /// Makes it the one that a terminal begins with: `consoleSize` of a `process` (OCI runtime-spec).
    pub(crate) fn set_in(self, process: &mut Map<String, Value>) {
        process.insert("consoleSize".into(), json!({ "width": self.width, "height": self.height }));
    }
}

/// The spec tells the guest whether there is a terminal, the request tells us how its streams come: they must agree.
pub(crate) fn check(spec: bool, request: bool) -> Result<(), TerminalError> {
    if spec == request { Ok(()) } else { Err(TerminalError::Mismatch { spec, request }) }
}
