//! A line of the log: the text of `tracing-subscriber`, or an object of JSON.

use std::fmt::{self, Debug};

use serde::Serialize;
use serde_json::{Map, Value};
use tracing::{
    Event, Subscriber,
    field::{Field, Visit},
    span::{Attributes, Id},
};
use tracing_subscriber::{
    Layer,
    fmt::{
        FmtContext, FormatEvent, FormatFields,
        format::{Format, Full, Writer},
        time::{FormatTime, SystemTime},
    },
    layer::Context,
    registry::LookupSpan,
};

use crate::types::config::LogFormat;

/// How events become lines.
pub(super) struct Lines {
    format: LogFormat,
    text: Format<Full, ()>,
}

impl Lines {
    pub(super) fn new(format: LogFormat) -> Self {
        Self { format, text: Format::default().with_ansi(false).with_target(false).without_time() }
    }
}

impl<S, N> FormatEvent<S, N> for Lines
where
    S: Subscriber + for<'l> LookupSpan<'l>,
    N: for<'w> FormatFields<'w> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        if self.format == LogFormat::Text {
            return self.text.format_event(context, writer, event);
        }
        let mut fields = Fields::default();
        event.record(&mut fields);
        let mut timestamp = String::new();
        SystemTime.format_time(&mut Writer::new(&mut timestamp))?;
        // There is one kind of span: that of the pod.
        let pod = context.lookup_current().and_then(|span| span.extensions().get::<Fields>().cloned());
        let line = Line {
            timestamp,
            level: event.metadata().level().as_str(),
            pod: pod.map(|pod| pod.0),
            message: fields.0.remove(MESSAGE),
            fields: fields.0,
        };
        writeln!(writer, "{}", serde_json::to_string(&line).map_err(|_| fmt::Error)?)
    }
}

/// The field that has the text of an event.
const MESSAGE: &str = "message";

#[derive(Serialize)]
struct Line {
    /// RFC 3339, UTC.
    timestamp: String,
    level: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pod: Option<Map<String, Value>>,
    message: Option<Value>,
    #[serde(skip_serializing_if = "Map::is_empty")]
    fields: Map<String, Value>,
}

/// Keeps the fields of each span, which the text has only as text.
pub(super) struct Spans;

impl<S: Subscriber + for<'l> LookupSpan<'l>> Layer<S> for Spans {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        if let Some(span) = context.span(id) {
            let mut fields = Fields::default();
            attributes.record(&mut fields);
            span.extensions_mut().insert(fields);
        }
    }
}

/// Values by the names of their fields.
#[derive(Debug, Clone, Default)]
struct Fields(Map<String, Value>);

impl Fields {
    fn add(&mut self, field: &Field, value: impl Into<Value>) {
        self.0.insert(field.name().to_owned(), value.into());
    }
}

impl Visit for Fields {
    fn record_bool(&mut self, field: &Field, value: bool) {
        self.add(field, value);
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.add(field, value);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.add(field, value);
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.add(field, value);
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field, value);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.add(field, format!("{value:?}"));
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::json;
    use tracing::subscriber::with_default;
    use tracing_subscriber::{fmt, layer::SubscriberExt, registry};

    use super::*;
    use crate::testing::Written;

    fn logged(format: LogFormat, work: impl FnOnce()) -> Vec<String> {
        let written = Written::default();
        let writer = written.clone();
        let layer = fmt::layer().event_format(Lines::new(format)).with_ansi(false);
        let subscriber = registry().with(Spans).with(layer.with_writer(move || writer.clone()));
        with_default(subscriber, work);
        written.lines()
    }

    fn work() {
        tracing::warn!("before");
        let _span = tracing::error_span!("pod", namespace = "k8s.io", id = "demo").entered();
        let path = Path::new("/x\n\"y");
        tracing::info!(vmm = 566, path = %path.display(), is_late = true, "of {}", "a\u{1b}b");
    }

    #[test]
    fn a_line_of_json_has_the_pod_and_each_field() {
        let lines = logged(LogFormat::Json, work);
        let lines: Vec<Value> = lines.iter().map(|line| serde_json::from_str(line).unwrap()).collect();
        let [before, of_pod] = &lines[..] else { panic!("{lines:?}") };
        let time = of_pod["timestamp"].as_str().unwrap();
        assert!(time.len() == "2026-11-25T16:40:01.120000Z".len() && time.ends_with('Z'), "{time}");
        let expected = json!({
            "timestamp": time,
            "level": "INFO",
            "pod": { "namespace": "k8s.io", "id": "demo" },
            "message": "of a\u{1b}b",
            "fields": { "vmm": 566, "path": "/x\n\"y", "is_late": true },
        });
        assert_eq!(of_pod, &expected);
        assert_eq!(
            (&before["message"], before.get("pod"), before.get("fields")),
            (&json!("before"), None, None)
        );
    }

    #[test]
    fn a_line_of_text_has_the_same() {
        let lines = logged(LogFormat::Text, work);
        assert_eq!(lines[0], " WARN before");
        assert!(lines[1].starts_with(" INFO pod{namespace=\"k8s.io\" id=\"demo\"}: of "), "{lines:?}");
    }
}
