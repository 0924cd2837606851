//! Why a spec is refused.

use crate::device_filter::RuleError;

/// Why a spec is refused.
#[derive(Debug, thiserror::Error)]
pub enum SpecError {
    /// The JSON does not describe an OCI spec.
    #[error("the OCI spec cannot be read: {0}")]
    Json(#[from] serde_json::Error),
    /// A field has a value that cannot be right.
    #[error("{field}: {reason}")]
    Invalid {
        /// Where in the spec.
        field: String,
        /// What is wrong.
        reason: String,
    },
    /// A rule about devices that cannot be right.
    #[error(transparent)]
    DeviceRule(#[from] RuleError),
    /// A field asks for what the agent cannot do yet.
    #[error("{field}: not implemented{hint}")]
    Unimplemented {
        /// Where in the spec.
        field: String,
        /// What to do, after a semicolon. Empty: nothing can be done.
        hint: &'static str,
    },
}

impl SpecError {
    pub(super) fn invalid(field: &str, reason: String) -> Self {
        Self::Invalid { field: field.to_owned(), reason }
    }

    pub(super) fn unimplemented(field: impl Into<String>) -> Self {
        Self::Unimplemented { field: field.into(), hint: "" }
    }
}
