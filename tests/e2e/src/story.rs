//! What `cargo xtask demo pod` shows: a pod of three containers, told on one screen. And how a pod starts.

pub(crate) mod otlp;

use std::time::Instant;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::command::{Cmd, Finished};
use crate::containerd::TELLS_OF_SPANS;
use crate::ctr::{Host, SETTLES};
use crate::fixtures::scratch;
use crate::pods::Pod;
use otlp::{Collector, Span};

/// Where the containers have the volume that they share.
const VOLUME: &str = "/www";

/// What is typed at the shell, one line after the other, and what shows that it was answered.
const TYPED: [(&str, &str); 3] =
    [("tty", "/dev/pts/"), ("stty size", "30 100"), ("echo $((6 * 7)) $(hostname)", "42 web-0")];

/// By which a shell asks its terminal for the cursor's place.
const CURSOR: &str = "\u{1b}[6n";

/// The span of a client that the traced pod is a part of, and its trace.
const SPAN: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
/// Spans of containerd that are shorter than this part of RunPodSandbox are left out.
const SHORT: u64 = 50;

/// Runs a pod, and then another one. Returns what `bulkhead trace` says of that, whose template is there already. Spans
/// of containerd are added to the phases, if it has any. What was before the request Create has a negative beginning.
pub(crate) fn trace(host: &Host) -> Result<String> {
    let has_spans = host.version() >= TELLS_OF_SPANS;
    let collector = has_spans.then(|| Collector::start(otlp::ADDRESS)).transpose()?;
    Pod::start(host)?.remove()?;
    let pod = Pod::plan(host).span(SPAN).start()?;
    let text = Cmd::new("bulkhead").args(["trace", pod.id(), "--json"]).run()?.succeeds()?.text();
    let mut trace: Value = serde_json::from_str(&text).with_context(|| format!("not JSON: {text}"))?;
    if let Some(collector) = collector {
        let what = "RunPodSandbox of containerd";
        let spans = collector.find(what, host.patience(SETTLES), around_the_shim)?;
        let began = trace["began_unix_us"].as_i64().context("no beginning")?;
        let phases = trace["phases"].as_array_mut().context("no phases")?;
        phases.extend(spans.iter().map(|span| span_as_phase(span, began)));
    }
    pod.remove()?;
    Ok(serde_json::to_string_pretty(&trace)?)
}

/// The spans of containerd in the client's trace, once the last of them has come: RunPodSandbox ends last.
fn around_the_shim(spans: &[Span]) -> Option<Vec<Span>> {
    let of_trace: Vec<_> = spans.iter().filter(|span| span.trace == TRACE).collect();
    let duration = |span: &Span| span.end_ns.saturating_sub(span.begin_ns);
    let whole = of_trace.iter().find(|span| span.name.ends_with("/RunPodSandbox"))?;
    let shortest = duration(whole) / SHORT;
    Some(of_trace.into_iter().filter(|span| duration(span) >= shortest).cloned().collect())
}

fn span_as_phase(span: &Span, began_unix_us: i64) -> Value {
    let [begin, end] = [span.begin_ns, span.end_ns].map(|nanos| (nanos / 1000).cast_signed());
    json!({
        "step": span.name,
        "place": span.service,
        "begin_us": begin.saturating_sub(began_unix_us),
        "duration_us": end.saturating_sub(begin),
    })
}

/// Runs the pod and prints what it does.
pub(crate) fn tell(host: &Host) -> Result<()> {
    let clock = Clock(Instant::now());
    let volume = scratch()?;
    let volume = volume.path();
    let pod = Pod::plan(host).hostname("web-0").share_processes().start()?;
    clock.says(&format!("pod web-0 runs at {}", pod.ip()?));

    let init = pod.container().named("init", 0).mount(volume, VOLUME);
    let script = "echo \"a page that init made on $(uname -r)\" > /www/index.html";
    clock.ran("init", script, &init.sh(script)?)?;

    let server = pod.container().named("server", 0).mount_read_only(volume, VOLUME);
    let server = server.start(&["httpd", "-f", "-p", "127.0.0.1:80", "-h", VOLUME])?;
    clock.says("server   $ httpd -f -p 127.0.0.1:80 -h /www");

    let script = "until wget -q -O - http://localhost/ 2>/dev/null; do sleep 0.1; done";
    let client = pod.container().named("client", 0);
    clock.ran("client", "wget -q -O - http://localhost/", &client.sh(script)?)?;

    let _sidecar = pod.container().named("sidecar", 0).start(&["sleep", "1000"])?;
    clock.says("sidecar  $ sleep 1000");
    let script = "ps -o pid,args";
    clock.ran("server", script, &server.sh(script)?)?;

    clock.says("server   $ sh, executed with a terminal of 100 x 30");
    let mut shell = server.exec_stream(&["sh"], true)?;
    shell.wait_for("# ")?;
    shell.resize(100, 30)?;
    for (typed, answer) in TYPED {
        shell.write(format!("{typed}\n").as_bytes())?;
        shell.wait_for(answer)?;
    }
    shell.write(b"exit 3\n")?;
    let shell = shell.finish()?;
    print!("{}", indented(&shell.text().replace(CURSOR, "")));
    shell.exits(3)?;

    pod.remove()?;
    clock.says("the pod is removed");
    Ok(())
}

/// Says how far the story is, and when.
struct Clock(Instant);

impl Clock {
    fn says(&self, text: &str) {
        println!("{:5.1} s  {text}", self.0.elapsed().as_secs_f64());
    }

    fn ran(&self, container: &str, command: &str, finished: &Finished) -> Result<()> {
        self.says(&format!("{container:8} $ {command}"));
        print!("{}", indented(&finished.text()));
        finished.succeeds()?;
        Ok(())
    }
}

fn indented(text: &str) -> String {
    text.lines().map(|line| format!("             {}\n", line.trim_end())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_around_the_shim_are_phases_that_may_begin_before_it() {
        let span = |trace: &str, name: &str, begin_us: u64, end_us: u64| Span {
            trace: trace.into(),
            id: "1".into(),
            parent: "2".into(),
            name: name.into(),
            service: "containerd".into(),
            begin_ns: begin_us * 1000,
            end_ns: end_us * 1000 + 1,
        };
        let mut spans = vec![
            span(TRACE, "containerd.task.v2.Task/Create", 2_000, 3_000),
            span(TRACE, "metadata.sandbox.Create", 1_100, 1_110),
            span("another", "runtime.v1.RuntimeService/RunPodSandbox", 0, 9_000),
        ];
        assert_eq!(around_the_shim(&spans), None);
        spans.push(span(TRACE, "runtime.v1.RuntimeService/RunPodSandbox", 1_000, 4_000));
        let found = around_the_shim(&spans).unwrap();
        assert_eq!(found, [&spans[0], &spans[3]].map(Span::clone));
        assert_eq!(
            span_as_phase(&found[1], 2_100),
            json!({"step": "runtime.v1.RuntimeService/RunPodSandbox", "place": "containerd", "begin_us": -1_100,
                "duration_us": 3_000})
        );
    }
}
