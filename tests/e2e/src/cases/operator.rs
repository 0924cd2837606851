//! What an operator does with the command `bulkhead`.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tonic::Code;

use super::templates::{state_dir, template_of};
use super::{Case, operator_spans};
use crate::command::{Cmd, Finished};
use crate::cri::messages::{PodSandboxConfig, PodSandboxMetadata, RunPodSandboxRequest};
use crate::ctr::{Host, NAMESPACE};
use crate::fixtures::{CONFIGURATION, Covered, MovedAway, Replaced, Spec, scratch};
use crate::snapshot::the_process_of;

pub(super) const CASES: &[Case] = &[
    Case::bulkhead("check_finds_that_pods_can_run_here", check),
    Case::bulkhead("check_fails_and_says_what_to_do_without_a_kernel", check_without_kernel),
    Case::bulkhead("ps_lists_a_pod_until_it_ends", ps),
    Case::bulkhead("gc_removes_what_a_crash_left_and_no_living_pod", gc),
    Case::bulkhead("a_template_is_listed_and_removed_under_its_clone", template),
    Case::bulkhead("a_drop_in_is_in_force", drop_in),
    Case::bulkhead("an_unknown_key_of_a_drop_in_is_answered_with_the_right_one", drop_in_unknown_key),
    Case::bulkhead("collect_has_the_pod_and_no_environment", collect),
    Case::bulkhead("each_message_of_the_troubleshooting_page_is_what_is_said", messages),
];

/// Those that tell versions of containerd apart.
pub(super) const BY_VERSION: &[Case] = &[
    Case::bulkhead("the_start_of_a_pod_is_exported_as_spans_of_its_client", operator_spans::spans),
    Case::bulkhead("install_adds_the_handlers_and_uninstall_leaves_nothing", install),
    Case::bulkhead("install_adds_the_handlers_to_a_configuration_of_containerd_2", install_v3).since(2, 0),
];

/// containerd's configuration on the host.
const CONTAINERD: &str = "/etc/containerd/config.toml";
const DROP_IN: &str = "/etc/bulkhead/config.d/50-e2e.toml";

/// A command that asks other programs, which take their time where the host is emulated.
pub(super) fn bulkhead(arguments: &[&str]) -> Result<Finished> {
    Cmd::new("bulkhead").args(arguments).limit(Duration::from_secs(120)).run()
}

fn answer(arguments: &[&str]) -> Result<Value> {
    let finished = bulkhead(arguments)?;
    let text = finished.succeeds()?.text();
    serde_json::from_str(&text).with_context(|| format!("not JSON: {text}"))
}

fn list(arguments: &[&str]) -> Result<Vec<Value>> {
    match answer(arguments)? {
        Value::Array(list) => Ok(list),
        other => anyhow::bail!("expected  a list\ncame      {other}"),
    }
}

/// The entry of the pod in `bulkhead ps`.
fn pod(id: &str) -> Result<Option<Value>> {
    Ok(list(&["ps", "--json"])?.into_iter().find(|pod| pod["id"] == id))
}

fn check(_: &Host) -> Result<()> {
    let findings = list(&["check", "--json"])?;
    ensure!(findings.len() == 16, "expected  16 findings\ncame      {findings:#?}");
    let bad: Vec<_> = findings.iter().filter(|finding| finding["status"] == "fail").collect();
    ensure!(bad.is_empty(), "expected  nothing that keeps pods from running\ncame      {bad:#?}");
    let kvm = findings.iter().find(|finding| finding["check"] == "KVM").context("KVM is not checked")?;
    ensure!(kvm["status"] == "ok", "expected  KVM that can run a VM\ncame      {kvm}");
    Ok(())
}

fn check_without_kernel(_: &Host) -> Result<()> {
    let directory = scratch()?;
    let file = directory.path().join("config.toml");
    fs::write(&file, "kernel = \"/no/such/vmlinux\"\n")?;
    let finished = bulkhead(&["check", "--config", &file.display().to_string()])?;
    finished.exits(1)?;
    let text = finished.text();
    let remedy = format!("      -> install it or set `kernel` in {}", file.display());
    ensure!(
        text.contains("fail  configuration: kernel /no/such/vmlinux") && text.contains(&remedy),
        "expected  the missing kernel and a remedy\ncame      {text}"
    );
    Ok(())
}

fn ps(host: &Host) -> Result<()> {
    let task = host.container().detach(&["sleep", "1000"])?;
    let shown = pod(task.id())?.with_context(|| format!("{} is not listed", task.id()))?;
    let vmm = the_process_of("bulkhead-vmm", task.id())?;
    let shim = the_process_of(host.runtime().shim(), task.id())?;
    ensure!(
        shown["state"] == "running" && shown["vmm_pid"] == vmm && shown["shim_pid"] == shim,
        "expected  it runs, with VMM {vmm} and shim {shim}\ncame      {shown:#}"
    );
    ensure!(
        shown["namespace"] == NAMESPACE && shown["containers"] == json!([task.id()]),
        "expected  the one container {} of {NAMESPACE}\ncame      {shown:#}",
        task.id()
    );
    let memory = shown["memory_bytes"].as_u64().unwrap_or(0);
    ensure!(
        (1 << 20..1 << 30).contains(&memory) && shown["vcpus"].as_u64().is_some_and(|vcpus| vcpus > 0),
        "expected  1 MiB to 1 GiB of memory, and vCPUs\ncame      {shown:#}"
    );
    ensure!(shown["problems"] == json!([]), "expected  no problem\ncame      {shown:#}");
    let id = task.id().to_owned();
    let table = bulkhead(&["ps"])?.text();
    ensure!(table.lines().any(|line| line.contains(&id)), "expected  a line of {id}\ncame      {table}");
    task.dies()?;
    let after = pod(&id)?;
    ensure!(after.is_none(), "expected  it is gone\ncame      {after:?}");
    Ok(())
}

/// The state directory of a shim that was killed, whose containerd has removed the bundle before it could clean up.
fn gc(host: &Host) -> Result<()> {
    let task = host.container().detach(&["sleep", "1000"])?;
    let state = state_dir(NAMESPACE, task.id())?;
    let leftover = state.with_file_name("bulkhead-e2e-leftover");
    fs::create_dir(&leftover)?;
    let journal = "{\"effect\":\"shim\",\"pid\":4194304,\"start_time\":1}\n\
                   {\"effect\":\"bundle\",\"path\":\"/run/bulkhead-e2e/no/such/bundle\"}\n";
    fs::write(leftover.join("journal"), journal)?;
    let shown = list(&["gc", "--dry-run", "--json"])?;
    let paths = |shown: &[Value]| -> BTreeSet<String> {
        shown.iter().filter_map(|entry| entry["path"].as_str().map(str::to_owned)).collect()
    };
    let (left, living) = (leftover.display().to_string(), state.display().to_string());
    ensure!(
        paths(&shown).contains(&left) && !paths(&shown).contains(&living) && leftover.exists(),
        "expected  {left} is listed and kept, and {living} is not listed\ncame      {shown:#?}"
    );
    let removed = list(&["gc", "--json"])?;
    ensure!(
        paths(&removed).contains(&left) && !leftover.exists() && state.exists(),
        "expected  {left} removed and {living} kept\ncame      {removed:#?}"
    );
    task.exec(&["true"])?.succeeds()?;
    task.dies()
}

fn template(host: &Host) -> Result<()> {
    let task = host.container().detach(&["sleep", "1000"])?;
    let path = template_of(&task)?;
    let name = path.file_name().and_then(|name| name.to_str()).context("a template without a name")?;
    let shown = list(&["template", "ls", "--json"])?;
    let shown = shown.iter().find(|template| template["name"] == name);
    let shown = shown.with_context(|| format!("{name} is not listed"))?;
    ensure!(
        shown["state"] == "complete" && shown["clones"].as_u64().is_some_and(|clones| clones > 0),
        "expected  it is complete and has a clone\ncame      {shown:#}"
    );
    let size = shown["bytes"].as_u64().unwrap_or(0);
    ensure!((1 << 20..1 << 28).contains(&size), "expected  1 to 256 MiB\ncame      {size} bytes");
    bulkhead(&["template", "rm", name])?.prints(&format!("removed {name}\n"))?;
    ensure!(!path.exists(), "expected  {} is gone\ncame      it is there", path.display());
    task.exec(&["true"])?.succeeds()?;
    bulkhead(&["template", "rm", name])?.exits(1)?.fails_with("there is no complete template")?;
    task.dies()?;
    let built = Cmd::new("bulkhead").args(["template", "build"]).limit(Duration::from_secs(600)).run()?;
    let built = built.succeeds()?.text();
    ensure!(built.contains(&format!("made {name} ")), "expected  {name} is made\ncame      {built}");
    let left = pods_of_builds()?;
    ensure!(left.is_empty(), "expected  nothing is left of the builds\ncame      {left:?}");
    let next = host.container().detach(&["sleep", "1000"])?;
    let of_next = template_of(&next)?;
    ensure!(of_next == path, "expected  a clone of {name}\ncame      one of {}", of_next.display());
    next.dies()
}

/// The VMs that become templates.
fn pods_of_builds() -> Result<Vec<Value>> {
    let is_build = |pod: &Value| pod["namespace"] == "template-build";
    Ok(list(&["ps", "--json"])?.into_iter().filter(is_build).collect())
}

fn drop_in(host: &Host) -> Result<()> {
    let text = "vcpus = 1\ntemplates = false\nallowed_annotations = [\"memory_mib\"]\n";
    let _replaced = Replaced::file(Path::new(DROP_IN), text)?;
    let shown = list(&["config", "show", "--json"])?;
    let vcpus = shown.iter().find(|setting| setting["key"] == "vcpus").context("vcpus is not shown")?;
    ensure!(
        vcpus["value"] == "1" && vcpus["origin"] == DROP_IN,
        "expected  vcpus = 1 from {DROP_IN}\ncame      {vcpus}"
    );
    let annotated = |annotation| host.container().flags(["--annotation", annotation]);
    let task = annotated("bulkhead.dev/memory_mib=384").detach(&["sleep", "1000"])?;
    let booted = template_of(&task).is_err();
    ensure!(booted, "expected  a VM that booted\ncame      a clone");
    let total = task.exec(&["grep", "MemTotal", "/proc/meminfo"])?.succeeds()?.text();
    let kib = total.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok());
    ensure!(kib.is_some_and(|kib| kib > 300 << 10), "expected  a VM of 384 MiB\ncame      {total}");
    task.dies()?;
    let refused = annotated("bulkhead.dev/console=true").run(&["true"])?;
    refused.fails_with("annotations[bulkhead.dev/console]: it is not allowed; add \"console\" to")?;
    Ok(())
}

fn drop_in_unknown_key(host: &Host) -> Result<()> {
    host.leaves_nothing(|| {
        let _replaced = Replaced::file(Path::new(DROP_IN), "# a comment\nmemory_mb = 512\n")?;
        let words = format!("{DROP_IN}: line 2: there is no key `memory_mb`; did you mean `memory_mib`?");
        host.run(&["true"])?.fails_with(&words)?.says_one_line()?;
        Ok(())
    })
}

fn collect(host: &Host) -> Result<()> {
    let container = host.container().flags(["--env", "PASSWORD=bulkhead-e2e-secret"]);
    let task = container.detach(&["sleep", "1000"])?;
    task.exec(&["sh", "-c", "test bulkhead-e2e-secret"])?.succeeds()?;
    // A whole command line as the name of a program, which the errors quote.
    task.exec(&["app --password=bulkhead-e2e-secret"])?.fails_with("executable file not found in $PATH")?;
    let directory = scratch()?;
    let archive = directory.path().join("support.tar").display().to_string();
    bulkhead(&["collect", "--output", &archive])?.succeeds()?;
    let names = Cmd::new("tar").args(["-tf", &archive]).run()?.succeeds()?.text();
    let journal = format!("/{}/journal\n", task.id());
    ensure!(names.contains(&journal), "expected  the journal of the pod\ncame      {names}");
    let bytes = fs::read(&archive)?;
    let secret = crate::command::contains(&bytes, "bulkhead-e2e-secret");
    ensure!(!secret, "expected  no environment and no argument\ncame      one is in the archive");
    for word in ["containerd ", "pod{namespace=", "[left out] executable file not found in $PATH"] {
        let has = crate::command::contains(&bytes, word);
        ensure!(has, "expected  {word:?} in the archive\ncame      none");
    }
    task.dies()
}

/// The runtime handlers of containerd, by its own word.
fn handlers() -> Result<String> {
    let dump = Cmd::new("containerd").args(["config", "dump"]).run()?;
    let text = dump.succeeds()?.text();
    let is_handler = |line: &&str| line.contains(".containerd.runtimes.");
    Ok(text.lines().filter(is_handler).map(|line| format!("{}\n", line.trim())).collect())
}

fn install(_: &Host) -> Result<()> {
    let read = || fs::read_to_string(CONTAINERD).with_context(|| format!("cannot read {CONTAINERD}"));
    let (before, handlers_before) = (read()?, handlers()?);
    let own = Path::new("/etc/bulkhead/runtimeclass.yaml");
    bulkhead(&["install"])?.succeeds()?;
    let installed = handlers()?;
    let again = bulkhead(&["install"])?.succeeds()?.text();
    let has_manifest = own.exists();
    let checked = list(&["check", "--json"]);
    let uninstalled = bulkhead(&["uninstall"])?;
    uninstalled.succeeds()?;
    let lost = handlers_before.lines().find(|line| !installed.contains(line));
    ensure!(
        installed.contains("runtimes.bulkhead]") && lost.is_none(),
        "expected  the handler bulkhead beside the others\ncame      {installed}"
    );
    ensure!(has_manifest, "expected  a manifest of the RuntimeClass\ncame      none");
    ensure!(!again.contains("wrote"), "expected  nothing to do a second time\ncame      {again}");
    let handler = checked?.into_iter().find(|finding| finding["check"] == "runtime handler");
    let handler = handler.context("the handler is not checked")?;
    ensure!(handler["status"] == "ok", "expected  check sees the handler\ncame      {handler}");
    ensure!(read()? == before, "expected  the configuration as it was\ncame      {}", read()?);
    ensure!(handlers()? == handlers_before, "expected  the handlers as they were\ncame      {}", handlers()?);
    ensure!(!own.exists(), "expected  no manifest\ncame      {}", uninstalled.text());
    Ok(())
}

/// Configurations of the third version: one that imports a directory, and one that does not.
fn install_v3(_: &Host) -> Result<()> {
    let directory = scratch()?;
    let file = directory.path().join("config.toml").display().to_string();
    let drop_in = Path::new("/etc/containerd/conf.d/bulkhead.toml");
    for (text, is_imported) in
        [("version = 3\nimports = [\"/etc/containerd/conf.d/*.toml\"]\n", true), ("version = 3\n", false)]
    {
        fs::write(&file, text)?;
        bulkhead(&["install", "--containerd-config", &file])?.succeeds()?;
        let dump = Cmd::new("containerd").args(["--config", &file, "config", "dump"]).run()?;
        let is_there = drop_in.exists();
        // The installation has recorded the file.
        let uninstalled = bulkhead(&["uninstall"])?;
        uninstalled.succeeds()?;
        let dumped = dump.succeeds()?.text();
        for handler in ["bulkhead", "bulkhead-sandbox", "runc"] {
            let has = dumped.contains(&format!(".runtimes.{handler}]"));
            ensure!(has, "expected  the handler {handler} in\n{text}\ncame      {dumped}");
        }
        ensure!(
            is_there == is_imported,
            "expected  {}: {is_imported}\ncame      {is_there}",
            drop_in.display()
        );
        let left = drop_in.exists() || fs::read_to_string(&file)? != text;
        ensure!(!left, "expected  all as it was\ncame      {}", uninstalled.text());
    }
    Ok(())
}

/// The page whose messages are provoked.
const PAGE: &str = include_str!("../../../../docs/troubleshooting.md");

/// The messages of the page, in its order.
fn messages_of_the_page() -> Vec<&'static str> {
    let rows = PAGE.lines().filter_map(|line| line.strip_prefix("| `"));
    rows.filter_map(|row| row.split_once("` | ")).map(|(message, _)| message).collect()
}

/// Whether the text has the parts of the message, which are separated by `...`, in their order.
fn has_message(text: &str, message: &str) -> bool {
    let mut rest = text;
    message.split("...").all(|part| match rest.split_once(part) {
        Some((_, after)) => {
            rest = after;
            true
        }
        None => false,
    })
}

/// What makes Bulkhead say the message.
type Provocation = (&'static str, fn(&Host) -> Result<Finished>);

/// The beginning of each message, and how it is provoked.
const PROVOCATIONS: [Provocation; 19] = [
    // containerd remembers where it has found the shim of a runtime. So this is one that it has not looked for yet.
    ("binary not installed", |host| {
        host.container().flags(["--runtime", "io.containerd.bulkhead-missing.v2"]).run(&["true"])
    }),
    ("KVM is missing", |host| {
        let _away = MovedAway::file(Path::new("/dev/kvm"))?;
        host.run(&["true"])
    }),
    ("KVM cannot be used", |host| {
        let _covered = Covered::directory(Path::new("/sys/module"), &["kvm", "kvm_pvm"])?;
        host.run(&["true"])
    }),
    ("kernel ...: No such", |host| configured(host, "kernel = \"/no/such/vmlinux\"\n")),
    ("kernel: ... is not", |host| configured(host, "kernel = \"/etc/passwd\"\n")),
    ("/etc/bulkhead/config.toml: line 1 (", |host| configured(host, "kernel = [this is not toml\n")),
    ("/etc/bulkhead/config.toml: line 1: there", |host| configured(host, "kernal = \"/boot/vmlinux\"\n")),
    ("/etc/bulkhead/config.toml: memory_mib", |host| configured(host, "memory_mib = 8\n")),
    ("hugepages", |host| configured(host, "hugepages = true\n")),
    ("the host's network namespace", |host| host.container().flags(["--net-host"]).run(&["true"])),
    ("/proc/1/ns/net", |host| with_netns(host, "/proc/1/ns/net")),
    ("cannot open the network namespace", |host| with_netns(host, "/run/netns/missing")),
    ("exec: ", |host| host.run(&["no-such-command"])),
    ("source /no/such/source", |host| {
        host.container().bind(Path::new("/no/such/source"), "/data", "rbind:ro").run(&["true"])
    }),
    ("linux.devices", |host| host.container().flags(["--device", "/dev/kvm"]).run(&["true"])),
    ("linux.seccomp.listenerPath", |host| {
        let profile = json!({ "defaultAction": "SCMP_ACT_ALLOW", "listenerPath": "/run/listener.sock" });
        Spec::of(host, &["true"])?.with("/linux", "seccomp", profile)?.run(host.container())
    }),
    ("process.apparmorProfile", |host| {
        host.container().flags(["--apparmor-profile", "no-such-profile"]).run(&["true"])
    }),
    ("process.selinuxLabel", |host| {
        let label = json!("system_u:system_r:container_t:s0:c1,c2");
        Spec::of(host, &["true"])?.with("/process", "selinuxLabel", label)?.run(host.container())
    }),
    ("...: it has no version", |_| {
        let directory = scratch()?;
        let file = directory.path().join("config.toml");
        // A plugin's table has another name in each version.
        fs::write(&file, "[plugins.cri]\n")?;
        bulkhead(&["install", "--containerd-config", &file.to_string_lossy()])
    }),
];

fn configured(host: &Host, configuration: &str) -> Result<Finished> {
    let _replaced = Replaced::file(Path::new(CONFIGURATION), configuration)?;
    host.run(&["true"])
}

fn with_netns(host: &Host, path: &str) -> Result<Finished> {
    host.container().flags(["--with-ns", &format!("network:{path}")]).run(&["true"])
}

fn messages(host: &Host) -> Result<()> {
    let messages = messages_of_the_page();
    ensure!(messages.len() == PROVOCATIONS.len(), "the page has {} messages", messages.len());
    for (message, (begin, provoke)) in messages.into_iter().zip(PROVOCATIONS) {
        ensure!(message.starts_with(begin), "the page has {message:?} where {begin:?} is provoked");
        let finished = provoke(host).with_context(|| format!("cannot provoke {message:?}"))?;
        finished.fails_with("")?.says_one_line()?;
        let text = String::from_utf8_lossy(&finished.stderr);
        ensure!(has_message(&text, message), "expected  {message:?}\ncame      {text}");
    }
    // Each of them was counted.
    let metrics = bulkhead(&["metrics"])?.succeeds()?.text();
    for cause in ["no_kvm", "configuration", "network", "rootfs", "refused_field", "program"] {
        let number = metrics
            .lines()
            .find_map(|line| line.strip_prefix(&format!("bulkhead_failures_total{{cause=\"{cause}\"}} ")));
        ensure!(
            number.is_some_and(|number| number != "0"),
            "expected  {cause} is counted\ncame      {number:?}"
        );
    }
    missing_handler(host)
}

/// What containerd says of a handler that it does not have, with this name.
fn no_runtime(handler: &str) -> String {
    format!("no runtime for \"{handler}\" is configured")
}

fn missing_handler(host: &Host) -> Result<()> {
    const HANDLER: &str = "bulkhead-missing";
    let metadata = PodSandboxMetadata {
        name: HANDLER.into(),
        uid: HANDLER.into(),
        namespace: "e2e".into(),
        ..Default::default()
    };
    let config = Some(PodSandboxConfig { metadata: Some(metadata), ..Default::default() });
    let request = RunPodSandboxRequest { config, runtime_handler: HANDLER.into() };
    let message = host.pods()?.client().refused(request, Code::Unknown)?;
    let expected = no_runtime(HANDLER);
    ensure!(message.contains(&expected), "expected  {expected}\ncame      {message}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the page quotes beside the first column of its table, and the test that provokes it: the file and a part
    /// of the test that makes the text or compares it.
    const QUOTED: [(&str, &str, &str); 15] = [
        (
            "no runtime for \"bulkhead\" is configured",
            "tests/e2e/src/cases/operator.rs",
            "fn missing_handler",
        ),
        (
            "the VMM needs Linux 5.12 or later",
            "cli/src/check/kernel.rs",
            "fn a_kernel_on_which_no_vm_starts_is_a_failure",
        ),
        ("v1", "cli/src/check/kernel.rs", "fn cgroups_of_both_versions_are_known"),
        (
            "it was cut off",
            "host-shim/src/types/boot_files.rs",
            "fn an_initramfs_that_was_cut_off_or_whose_end_was_lost_is_damaged",
        ),
        (
            "there is no template, so the VM boots",
            "host-shim/src/vm/template.rs",
            "fn a_vm_that_cannot_be_saved_is_no_template_and_the_next_one_boots",
        ),
        (
            "the pod's cgroup allows less than",
            "host-shim/src/vm/vmm.rs",
            "fn a_cgroup_that_allows_less_than_the_limits_is_named",
        ),
        ("guest:", "tests/e2e/src/cases/operator_metrics.rs", "format!(\"guest: {panic}\")"),
        (
            "leftover",
            "cli/src/listings.rs",
            "fn a_pod_that_containerd_has_forgotten_is_named_as_on_the_troubleshooting_page",
        ),
        (
            "initramfs ...: No such file or directory (os error 2); install it or set",
            "host-shim/src/types/config.rs",
            "fn each_missing_part_is_named_as_the_troubleshooting_page_says",
        ),
        (
            "vmm ...: No such file or directory (os error 2); install it or set",
            "host-shim/src/types/config.rs",
            "fn each_missing_part_is_named_as_the_troubleshooting_page_says",
        ),
        (
            "hostNetwork: true is not implemented in a microVM; use a Service or hostPort, or runc for this pod",
            "host-shim/src/pod/container_role.rs",
            "fn a_namespace_of_the_host_is_refused_in_the_words_of_who_asks",
        ),
        (
            "hostPID: true is not implemented in a microVM; use shareProcessNamespace: true, or runc for this pod",
            "host-shim/src/pod/container_role.rs",
            "fn a_namespace_of_the_host_is_refused_in_the_words_of_who_asks",
        ),
        (
            "hostIPC: true is not implemented in a microVM; use the pod's own ipc namespace, or runc for this pod",
            "host-shim/src/pod/container_role.rs",
            "fn a_namespace_of_the_host_is_refused_in_the_words_of_who_asks",
        ),
        // What a user writes is an error of clap otherwise.
        ("bulkhead metrics | grep failures", "cli/src/main.rs", "fn the_commands_of_the_pages_exist"),
        ("dmesg | grep type=1326", "tests/e2e/src/cases/kernel.rs", "dmesg | grep 'type=1326"),
    ];

    /// Words of the page that nobody says: commands of others, options, files, and keys with a value.
    const NO_MESSAGES: [&str; 37] = [
        "->",
        "warn",
        "docker inspect --format '{{.Id}}' NAME",
        "crictl pods --no-trunc --quiet --name NAME",
        "kubectl describe pod",
        "docker run",
        "docker",
        "journalctl --unit containerd",
        "ctr run",
        "ctr",
        "nodeSelector",
        "/run",
        "console = true",
        "hugepages = true",
        "hugepages = false",
        "kubectl exec",
        "docker exec",
        "docker top",
        "kill -9",
        "--privileged",
        "--net-host",
        "hostNetwork: true",
        "...",
        "operator/",
        "kvm_intel",
        "kvm_amd",
        "/usr/share/doc/bulkhead/contrib/bulkhead/config.toml",
        "vm.nr_hugepages",
        "ip netns",
        "aa-status",
        "apparmor_parser --replace FILE",
        "containerd config default > /etc/containerd/config.toml",
        "cri",
        "disabled_plugins",
        "/etc/docker/daemon.json",
        "k3s",
        "rke2",
    ];

    #[test]
    fn each_text_that_the_page_quotes_is_provoked_by_a_test() {
        let page = PAGE.replace('\n', " ");
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let messages = messages_of_the_page();
        let mut quoted = BTreeSet::new();
        for text in page.split('`').skip(1).step_by(2) {
            // Those of `bulkhead` are parsed by a test of the command.
            let is_command = text.starts_with("bulkhead ") && !text.contains('|');
            if messages.contains(&text) || is_command || NO_MESSAGES.contains(&text) {
                continue;
            }
            let test = QUOTED.iter().find(|(message, ..)| *message == text);
            let (_, file, part) = test.unwrap_or_else(|| panic!("no test provokes `{text}`"));
            let source = fs::read_to_string(root.join(file)).unwrap();
            assert!(source.contains(part), "{file} has no {part}, which provokes `{text}`");
            quoted.insert(text);
        }
        assert_eq!(quoted.len(), QUOTED.len(), "the page does not quote all of QUOTED: {quoted:?}");
        assert!(quoted.contains(no_runtime("bulkhead").as_str()));
    }

    #[test]
    fn each_message_of_the_page_is_provoked() {
        let messages = messages_of_the_page();
        assert_eq!(messages.len(), PROVOCATIONS.len());
        for (message, (begin, _)) in messages.iter().zip(PROVOCATIONS) {
            assert!(message.starts_with(begin), "{message:?} where {begin:?} is provoked");
        }
    }

    #[test]
    fn parts_of_a_message_have_an_order() {
        assert!(has_message("ctr: kernel /k: No such file; install", "kernel ...: No such ...; install"));
        assert!(!has_message("No such kernel", "kernel ...: No such"));
    }
}
