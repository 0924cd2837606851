//! Lets Debian's Prometheus scrape a host as docs/observability.md says it, and asks it all that the dashboard asks.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use serde_json::Value;

use super::commands::{hidden, run, show};
use super::quickstart;
use crate::cache::Cache;
use crate::debian;
use crate::dist::source_dir;
use crate::rig::{Put, Session};

const PACKAGE: &str = "prometheus";
/// Its program, where Debian has it and where the trial puts it.
const PROGRAM: &str = "usr/bin/prometheus";
const PUT: &str = "/root/prometheus";

/// What a user runs who has no curl. The inner host has none.
const CLIENT: &str = "curl ";

/// What the scrape configuration of the page leaves to the user. Prometheus waits for an answer as long as this.
const GLOBAL: &str = "global: {scrape_interval: 5s}\n";

/// Runs Prometheus as a unit, which ends with the trial.
const START: &str = "systemd-run --quiet --collect --unit=trial-prometheus /root/prometheus \
    --config.file=/root/prometheus.yml --storage.tsdb.path=/root/prometheus-data --web.listen-address=127.0.0.1:9090";
const STOP: &str = "systemctl stop trial-prometheus && rm -r /root/prometheus.yml /root/prometheus-data";

/// docker connects its containers to a network, and limits their memory on the host too.
const START_POD: &str = "docker run --detach --name watched --runtime io.containerd.bulkhead.v2 --memory 256m busybox \
    sleep 1000";
const REMOVE_POD: &str = "docker rm --force watched";

/// Asks Prometheus's HTTP API each query of its command line. Prints an answer in each line, errors too. Until its
/// database is ready, Prometheus answers with status 503 and no JSON.
const ASK: &str = r#"
import sys, urllib.error, urllib.parse, urllib.request
for query in sys.argv[1:]:
    url = "http://127.0.0.1:9090/api/v1/query?" + urllib.parse.urlencode({"query": query})
    try:
        answer = urllib.request.urlopen(url, timeout=30).read().decode()
    except OSError as error:
        answer = '{"status": "error", "errorType": "unavailable"}'
        if isinstance(error, urllib.error.HTTPError) and error.code < 500:
            answer = error.read().decode()
    print(" ".join(answer.split("\n")))
"#;

/// How long Prometheus may take until it has an answer to each query: it needs two scrapes for a rate.
const LIMIT: Duration = Duration::from_secs(300);
/// Pause after a round of queries of which some had no data yet.
const PAUSE: Duration = Duration::from_secs(2);

/// A query of the dashboard.
#[derive(Debug, PartialEq)]
struct Query {
    /// What it is for.
    what: String,
    expression: String,
}

/// An answer of Prometheus's HTTP API.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Answer {
    status: String,
    error_type: Option<String>,
    error: Option<String>,
    data: Option<Data>,
}

#[derive(Debug, Deserialize)]
struct Data {
    result: Vec<Value>,
}

impl Answer {
    /// Whether there is data. Fails if Prometheus does not understand the query.
    fn has_data(&self) -> Result<bool> {
        match (self.status.as_str(), &self.error_type) {
            ("success", _) => Ok(self.data.as_ref().is_some_and(|data| !data.result.is_empty())),
            (_, Some(kind)) if kind == "unavailable" => Ok(false),
            _ => bail!("Prometheus says {}", self.error.as_deref().unwrap_or("nothing")),
        }
    }
}

/// What puts Prometheus's program in the rig.
pub(super) fn put(cache: &Cache) -> Result<Put> {
    Ok(Put { local: debian::files(cache, PACKAGE, &[PROGRAM])?.join(PROGRAM), remote: PUT.into() })
}

/// Has a pod watched on a host on which the package is installed, and docker runs.
pub(super) fn watch(session: &mut Session) -> Result<()> {
    println!("\n# Prometheus");
    let path = source_dir().join("docs/observability.md");
    let page = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let section = section(&page)?;
    for step in quickstart::steps(section) {
        for line in step.script.lines().filter(|line| !line.starts_with(CLIENT)) {
            show(session, line)?;
        }
    }
    let scrape = quickstart::block(section, "yaml").context("the page has no scrape configuration")?;
    show(session, START_POD)?;
    show(session, &format!("cat > /root/prometheus.yml <<'END'\n{GLOBAL}{scrape}END"))?;
    show(session, START)?;
    let answered = ask_all(session, queries(&dashboard()?)?);
    if answered.is_err() {
        println!("{}", hidden(session, "journalctl --no-pager --unit trial-prometheus --lines 30")?);
    }
    answered?;
    show(session, STOP)?;
    show(session, REMOVE_POD)?;
    Ok(())
}

/// The section of the page about metrics.
fn section(page: &str) -> Result<&str> {
    let after =
        page.split_once("\n## Metrics\n").context("docs/observability.md has no section of metrics")?.1;
    Ok(after.split("\n## ").next().unwrap_or(after))
}

fn dashboard() -> Result<Value> {
    let path = source_dir().join("contrib/grafana/bulkhead.json");
    let text = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
    serde_json::from_slice(&text).with_context(|| format!("cannot understand {}", path.display()))
}

/// All queries of a dashboard, as Grafana sends them if everything is selected.
fn queries(dashboard: &Value) -> Result<Vec<Query>> {
    let list = |value: &'_ Value| value.as_array().cloned().unwrap_or_default();
    let mut queries = vec![Query { what: "the target answers".into(), expression: "up == 1".into() }];
    for variable in list(&dashboard["templating"]["list"]) {
        // `label_values(METRIC, LABEL)`
        let query = variable["query"].as_str().context("a variable without a query")?;
        let Some(arguments) = query.strip_prefix("label_values(") else { continue };
        let (metric, label) =
            arguments.strip_suffix(')').and_then(|both| both.split_once(", ")).context("a strange query")?;
        let what = format!("the variable {}", variable["name"]);
        queries.push(Query { what, expression: format!("count by ({label}) ({metric})") });
    }
    for panel in list(&dashboard["panels"]) {
        for target in list(&panel["targets"]) {
            let expression = target["expr"].as_str().context("a panel without a query")?;
            let expression = [("$instance", ".*"), ("$namespace", ".*"), ("$__rate_interval", "1m")]
                .iter()
                .fold(expression.to_owned(), |text, (variable, value)| text.replace(variable, value));
            ensure!(!expression.contains('$'), "an unknown variable in {expression}");
            queries.push(Query { what: panel["title"].to_string(), expression });
        }
    }
    Ok(queries)
}

/// Waits until each query has an answer with data.
fn ask_all(session: &mut Session, mut open: Vec<Query>) -> Result<()> {
    let deadline = Instant::now() + LIMIT;
    loop {
        let words =
            ["python3", "-c", ASK].into_iter().chain(open.iter().map(|query| query.expression.as_str()));
        let output = run(session, &words.map(str::to_owned).collect::<Vec<_>>())?;
        let answers: Vec<_> = output.lines().collect();
        ensure!(answers.len() == open.len(), "{} queries have these answers:\n{output}", open.len());
        let mut left = Vec::new();
        for (query, answer) in open.into_iter().zip(answers) {
            let answered = serde_json::from_str::<Answer>(answer).context("no answer of Prometheus");
            let answered = answered.and_then(|answer| answer.has_data());
            match answered.with_context(|| format!("{}: {}: {answer}", query.what, query.expression))? {
                true => println!("{}: {}\n    {answer}", query.what, query.expression),
                false => left.push(query),
            }
        }
        if left.is_empty() {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "these queries have no data after {LIMIT:?}: {left:#?}");
        open = left;
        thread::sleep(PAUSE);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_page_says_how_to_enable_the_unit_and_what_to_scrape() {
        let page = fs::read_to_string(source_dir().join("docs/observability.md")).unwrap();
        let section = section(&page).unwrap();
        let steps = quickstart::steps(section);
        assert!(steps.iter().any(|step| step.script.contains("enable --now bulkhead-metrics")), "{steps:?}");
        let scrape = quickstart::block(section, "yaml").unwrap();
        assert!(scrape.starts_with("scrape_configs:\n") && scrape.contains("127.0.0.1:9659"), "{scrape}");
    }

    #[test]
    fn the_queries_of_the_dashboard_have_no_variables() {
        let queries = queries(&dashboard().unwrap()).unwrap();
        let expressions: Vec<_> = queries.iter().map(|query| query.expression.as_str()).collect();
        assert!(expressions.contains(&"count by (namespace) (bulkhead_pod_problems)"), "{expressions:?}");
        assert!(
            expressions.contains(&"sum by (state) (bulkhead_pods{instance=~\".*\"})")
                && expressions.len() > 15,
            "{expressions:?}"
        );
    }

    #[test]
    fn an_answer_has_data_or_none_or_is_an_error() {
        let has_data = |text: &str| serde_json::from_str::<Answer>(text).unwrap().has_data();
        let full =
            r#"{"status":"success","data":{"resultType":"vector","result":[{"metric":{},"value":[1,"0"]}]}}"#;
        assert!(has_data(full).unwrap());
        assert!(!has_data(r#"{"status":"success","data":{"resultType":"vector","result":[]}}"#).unwrap());
        assert!(!has_data(r#"{"status":"error","errorType":"unavailable"}"#).unwrap());
        let error =
            has_data(r#"{"status":"error","errorType":"bad_data","error":"parse error"}"#).unwrap_err();
        assert!(error.to_string().contains("parse error"), "{error}");
    }
}
