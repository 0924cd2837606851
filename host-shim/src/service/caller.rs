//! The span of containerd that a request belongs to. containerd 2 names it in the request's metadata if it exports
//! spans of OpenTelemetry.

use std::collections::HashMap;

use crate::types::traceparent::Traceparent;

/// The key in the metadata of ttrpc.
const KEY: &str = "traceparent";

/// The span, if containerd records it. What is no `traceparent` is ignored, as W3C Trace Context demands: a request
/// does not fail because of it.
pub(super) fn of(metadata: &HashMap<String, Vec<String>>) -> Option<Traceparent> {
    let parent = match metadata.get(KEY)?.as_slice() {
        [text] => Traceparent::try_from(text.as_str()),
        _ => {
            tracing::warn!("a request has several traceparents: its spans are not containerd's");
            return None;
        }
    };
    match parent {
        Ok(parent) => parent.is_sampled().then_some(parent),
        Err(error) => {
            tracing::warn!(%error, "the traceparent of a request is ignored");
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_span_that_containerd_records_is_a_parent() {
        let of = |key: &str, values: &[&str]| {
            let values = values.iter().map(|value| (*value).to_owned()).collect();
            of(&HashMap::from([(key.to_owned(), values)])).map(|parent| parent.to_string())
        };
        let recorded = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        let other = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00";
        assert_eq!(of("traceparent", &[recorded]).as_deref(), Some(recorded));
        for (key, values) in [
            ("traceparent", vec![other]),
            ("traceparent", vec!["00-1-2-01"]),
            ("traceparent", vec![]),
            ("traceparent", vec![recorded, recorded]),
            ("tracestate", vec![recorded]),
        ] {
            assert_eq!(of(key, &values), None, "{key} {values:?}");
        }
    }
}
