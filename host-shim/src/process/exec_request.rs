//! An exec request: what containerd asks for, checked before anything is done.

use containerd_shim_protos::api;
use serde_json::{Map, Value};

use crate::types::{
    endpoint::StdioPlan,
    request_error::RequestError,
    terminal::{self, WindowSize},
};

/// An exec request that can be carried out.
#[derive(Debug)]
pub(crate) struct ExecPlan {
    pub(crate) stdio: StdioPlan,
    /// `process` of the OCI runtime-spec.
    process: Map<String, Value>,
}

impl ExecPlan {
    /// Checks what the shim sees to; what is in the process is for the agent to honour or to refuse.
    pub(crate) fn read(request: &api::ExecProcessRequest) -> Result<Self, RequestError> {
        let process: Map<String, Value> =
            serde_json::from_slice(&request.spec.get_or_default().value).map_err(RequestError::Process)?;
        let has_terminal = process.get("terminal").and_then(Value::as_bool).unwrap_or(false);
        terminal::check(has_terminal, request.terminal)?;
        let stdio = StdioPlan::parse(request.terminal, &request.stdin, &request.stdout, &request.stderr)?;
        Ok(Self { stdio, process })
    }

    /// The process as the agent gets it, with this window if one is known.
    pub(crate) fn process_json(&self, window: Option<WindowSize>) -> Result<Vec<u8>, RequestError> {
        let mut process = self.process.clone();
        if let Some(size) = window {
            size.set_in(&mut process);
        }
        serde_json::to_vec(&process).map_err(RequestError::Process)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_added_process_begins_with_its_window() {
        let mut request = api::ExecProcessRequest::new();
        request.terminal = true;
        request.spec.mut_or_insert_default().value = br#"{"terminal": true, "args": ["sh"]}"#.to_vec();
        let plan = ExecPlan::read(&request).unwrap();
        let given =
            |window| -> Value { serde_json::from_slice(&plan.process_json(window).unwrap()).unwrap() };
        assert_eq!(given(None), json!({"terminal": true, "args": ["sh"]}));
        let window = WindowSize { width: 80, height: 24 };
        assert_eq!(given(Some(window))["consoleSize"], json!({"width": 80, "height": 24}));
        request.terminal = false;
        let error = ExecPlan::read(&request).unwrap_err().to_string();
        assert_eq!(error, "process.terminal is true, but the request says false");
        for malformed in ["", "[]", "{"] {
            request.spec.mut_or_insert_default().value = malformed.into();
            assert!(matches!(ExecPlan::read(&request), Err(RequestError::Process(_))), "{malformed:?}");
        }
    }
}
