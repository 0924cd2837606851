//! An exec request: what containerd asks for, checked before anything is done.

use containerd_shim_protos::api;
use serde_json::{Map, Value};

use crate::types::{request_error::RequestError, stdio_endpoint::StdioPlan, terminal::WindowSize};

/// An exec request that can be carried out.
#[derive(Debug)]
pub(crate) struct ExecPlan {
    pub(crate) stdio: StdioPlan,
    /// `process` of the OCI runtime-spec.
    process: Map<String, Value>,
}

impl ExecPlan {
    /// Reads what the shim takes care of; the rest of the process is for the agent to honour or to refuse. Whether
    /// there is a terminal is what the request says, as in runc's shim.
    pub(crate) fn read(request: &api::ExecProcessRequest) -> Result<Self, RequestError> {
        let mut process: Map<String, Value> =
            serde_json::from_slice(&request.spec.get_or_default().value).map_err(RequestError::Process)?;
        process.insert("terminal".into(), request.terminal.into());
        let stdio = StdioPlan::parse(request.terminal, &request.stdin, &request.stdout, &request.stderr)?;
        Ok(Self { stdio, process })
    }

    /// The AppArmor profile that the process names.
    pub(crate) fn apparmor_profile(&self) -> Option<String> {
        self.process.get("apparmorProfile").and_then(Value::as_str).map(Into::into)
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
        let plan = ExecPlan::read(&request).unwrap();
        let given: Value = serde_json::from_slice(&plan.process_json(None).unwrap()).unwrap();
        assert_eq!(given["terminal"], json!(false), "the request counts");
        for malformed in ["", "[]", "{"] {
            request.spec.mut_or_insert_default().value = malformed.into();
            assert!(matches!(ExecPlan::read(&request), Err(RequestError::Process(_))), "{malformed:?}");
        }
    }
}
