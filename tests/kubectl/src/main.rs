//! Replaces `kubectl` and a cluster of one node when `cargo xtask dist --try` follows the quick start with Kubernetes.
//! It calls containerd's CRI as kubelet does, with the handler of the RuntimeClass. It knows the commands of the page
//! that the trial executes, and refuses all others. It prints what kubectl prints.

mod node;
mod store;

use std::io::Write;
use std::process::ExitCode;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use store::{Class, Pod, Store};

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    match run(&arguments.iter().map(String::as_str).collect::<Vec<_>>()) {
        Ok(status) => ExitCode::from(status),
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Does what a command of the page says. Returns the exit status.
fn run(words: &[&str]) -> Result<u8> {
    let mut store = Store::open()?;
    match words {
        ["apply", "-f", file] => {
            let text = std::fs::read_to_string(file).with_context(|| format!("cannot read {file}"))?;
            let class = Class::read(&text).with_context(|| format!("{file} is no RuntimeClass"))?;
            let name = class.metadata.name.clone();
            let is_new = store.classes.insert(name.clone(), class).is_none();
            println!("runtimeclass.node.k8s.io/{name} {}", if is_new { "created" } else { "configured" });
        }
        ["run", name, options @ ..] => {
            // Before the pod is made: nobody would remove a second one.
            ensure!(!store.pods.contains_key(*name), "pods \"{name}\" already exists");
            let pod = run_pod(&store, name, options)?;
            store.pods.insert((*name).to_owned(), pod);
            println!("pod/{name} created");
        }
        ["wait", "--for=condition=Ready", timeout, pod] => {
            let seconds = timeout.strip_prefix("--timeout=").and_then(|text| text.strip_suffix('s'));
            let seconds = seconds.context("no --timeout in seconds")?.parse()?;
            let name = pod.strip_prefix("pod/").context("no pod/NAME")?;
            node::wait(store.pod(name)?, seconds)?;
            println!("pod/{name} condition met");
        }
        ["exec", name, "--", command @ ..] => {
            let executed = node::exec(store.pod(name)?, command)?;
            std::io::stdout().write_all(&executed.stdout)?;
            std::io::stderr().write_all(&executed.stderr)?;
            return Ok(u8::try_from(executed.exit_code).unwrap_or(1));
        }
        ["get", "pod", name, "--output", "jsonpath={.spec.overhead}"] => {
            // The API server has put it there, as the class says.
            let class = store.class(&store.pod(name)?.class)?;
            print!("{}", serde_json::to_string(&class.overhead.pod_fixed)?);
        }
        ["delete", "pod", name, grace] => {
            let seconds = grace.strip_prefix("--grace-period=").context("no --grace-period")?.parse()?;
            node::remove(store.pod(name)?, seconds)?;
            store.pods.remove(*name);
            println!("pod \"{name}\" deleted");
        }
        ["delete", "runtimeclass", name] => {
            store.class(name)?;
            store.classes.remove(*name);
            println!("runtimeclass.node.k8s.io \"{name}\" deleted");
        }
        _ => bail!("the quick start has no `kubectl {}`", words.join(" ")),
    }
    store.save()?;
    Ok(0)
}

/// Runs the pod of `kubectl run`.
fn run_pod(store: &Store, name: &str, options: &[&str]) -> Result<Pod> {
    let [image, overrides, "--", command @ ..] = options else {
        bail!("options that the page does not have")
    };
    let image = image.strip_prefix("--image=").context("no --image")?;
    let overrides = overrides.strip_prefix("--overrides=").context("no --overrides")?;
    let overrides: Value = serde_json::from_str(overrides).context("--overrides is not JSON")?;
    let class = overrides.pointer("/spec/runtimeClassName").and_then(Value::as_str);
    let class = class.context("the pod names no RuntimeClass")?;
    node::run(name, image, class, store.class(class)?, command)
}
