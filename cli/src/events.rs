//! `bulkhead events`: what happens to the pods of this host.

use std::{
    io::{self, Write},
    path::Path,
};

use bulkhead_host_shim::operator::{Event, EventKind, Follower, Observed, PodEvent, pod_paths};

use crate::{
    error::CommandError,
    output::time,
    pod,
    watch::{Watch, of_pods},
};

/// How often new directories are looked for before a look at their pods. Each finds what the one before has missed.
const TRIES: u32 = 3;

/// Which events are shown, and how.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EventOptions<'a> {
    /// None: those of all pods.
    pub(crate) pod: Option<&'a str>,
    pub(crate) namespace: Option<&'a str>,
    /// Those that were recorded before, too.
    pub(crate) all: bool,
    /// Only those.
    pub(crate) once: bool,
    pub(crate) json: bool,
}

/// Shows events until this command is ended, or once.
pub(crate) fn events(
    out: &mut impl Write,
    root: &Path,
    options: EventOptions<'_>,
) -> Result<(), CommandError> {
    if let (Some(pod), true) = (options.pod, options.once) {
        check_exists(root, pod, options.namespace)?;
    }
    let mut follower = Follower::new(root, options.all || options.once);
    let mut watch = Watch::new();
    loop {
        for _ in 0..TRIES {
            let is_new = !options.once && watch.set(of_pods(root, &pod_paths(root).unwrap_or_default()));
            look(out, &mut follower, options, root)?;
            if !is_new {
                break;
            }
        }
        out.flush().map_err(CommandError::Output)?;
        if options.once {
            return Ok(());
        }
        let has_dropped = watch.wait().map_err(|source| CommandError::Wait { path: root.into(), source })?;
        if has_dropped {
            let lost = Event::lost("too much happened at once: a pod that came and went is not shown");
            print(out, &lost, options).map_err(CommandError::Output)?;
        }
    }
}

/// Says what is waited for, if nothing may be seen for long.
pub(crate) fn say_what_is_awaited(
    errors: &mut impl Write,
    root: &Path,
    options: EventOptions<'_>,
    is_terminal: bool,
) -> io::Result<()> {
    match options.pod {
        _ if options.once => Ok(()),
        Some(pod) => match check_exists(root, pod, options.namespace) {
            Err(CommandError::NoPod { pod }) => {
                writeln!(errors, "there is no pod with the id {pod} yet; waiting for it (Ctrl-C ends this)")
            }
            _ => Ok(()),
        },
        None if is_terminal => writeln!(errors, "waiting for events of all pods (Ctrl-C ends this)"),
        None => Ok(()),
    }
}

/// Fails if there is no such pod. Only for `once`: otherwise the pod may be created later.
fn check_exists(root: &Path, pod: &str, namespace: Option<&str>) -> Result<(), CommandError> {
    match pod::find(&pod::names(root)?, pod, namespace) {
        // Several namespaces have one of this id. The events of all of them are wanted.
        Ok(_) | Err(CommandError::SeveralPods { .. }) => Ok(()),
        Err(error) => Err(error),
    }
}

fn look(
    out: &mut impl Write,
    follower: &mut Follower,
    options: EventOptions<'_>,
    root: &Path,
) -> Result<(), CommandError> {
    let mut printed = Ok(());
    let mut tell = |event: Event| {
        if printed.is_ok() && is_wanted(&event, options) {
            printed = print(out, &event, options);
        }
    };
    follower.look(&mut tell).map_err(|source| CommandError::List { path: root.into(), source })?;
    printed.map_err(CommandError::Output)
}

/// What concerns more than one pod is always wanted.
fn is_wanted(event: &Event, options: EventOptions<'_>) -> bool {
    event.pod.as_ref().is_none_or(|pod| {
        options.pod.is_none_or(|id| pod.id == id)
            && options.namespace.is_none_or(|namespace| pod.namespace == namespace)
    })
}

fn print(out: &mut impl Write, event: &Event, options: EventOptions<'_>) -> io::Result<()> {
    if options.json {
        serde_json::to_writer(&mut *out, event)?;
        return writeln!(out);
    }
    let pod = event.pod.as_ref().map_or_else(|| "-".into(), |pod| format!("{}/{}", pod.namespace, pod.id));
    let (name, more) = words(&event.what);
    writeln!(out, "{}  {pod}  {name}{more}", time(event.at_unix_us))
}

/// The name of what happened, and what else is known of it.
fn words(what: &EventKind) -> (&'static str, String) {
    let of = |container: &str| format!("  {container}");
    match what {
        EventKind::Recorded(happening) => match happening {
            PodEvent::PodBegan => ("pod_began", String::new()),
            PodEvent::VmUp { vm } => ("vm_up", format!("  {}", vm.name())),
            PodEvent::ContainerCreated { container } => ("container_created", of(container)),
            PodEvent::ContainerStarted { container } => ("container_started", of(container)),
            PodEvent::ContainerFailed { container, cause } => {
                ("container_failed", format!("  {container}  {}", cause.name()))
            }
            PodEvent::ContainerPaused { container } => ("container_paused", of(container)),
            PodEvent::ContainerResumed { container } => ("container_resumed", of(container)),
            PodEvent::OomKill { container, kills } => ("oom_kill", format!("  {container}  kills {kills}")),
            PodEvent::ContainerExited { container, status } => {
                ("container_exited", format!("  {container}  status {status}"))
            }
            PodEvent::VmEnded { reason } => ("vm_ended", of(reason)),
            PodEvent::VmKilled { reason } => ("vm_killed", of(reason)),
        },
        EventKind::Observed(seen) => match seen {
            Observed::PodRemoved => ("pod_removed", String::new()),
            Observed::ShimDied => ("shim_died", String::new()),
            Observed::Lost { events: Some(events), reason } => {
                ("lost", format!("  {events} events: {reason}"))
            }
            Observed::Lost { events: None, reason } => ("lost", format!("  {reason}")),
        },
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const RECORD: &str = r#"{"number":0,"at_unix_us":1700000000123456,"event":"pod_began"}
{"number":1,"at_unix_us":1700000001000000,"event":"vm_up","vm":"clone"}
{"number":4,"at_unix_us":1700000002000000,"event":"container_exited","container":"demo","status":137}
"#;

    fn shown(options: EventOptions<'_>) -> String {
        tried(options).unwrap()
    }

    fn tried(options: EventOptions<'_>) -> Result<String, CommandError> {
        let dir = tempfile::tempdir().unwrap();
        for pod in ["ns/demo", "ns/other"] {
            fs::create_dir_all(dir.path().join("c").join(pod)).unwrap();
        }
        fs::write(dir.path().join("c/ns/demo/events.json"), RECORD).unwrap();
        let mut out = Vec::new();
        events(&mut out, dir.path(), options)?;
        Ok(String::from_utf8(out).unwrap())
    }

    #[test]
    fn a_pod_that_does_not_exist_is_an_error() {
        for options in [
            EventOptions { pod: Some("typo"), ..ONCE },
            EventOptions { pod: Some("demo"), namespace: Some("typo"), ..ONCE },
        ] {
            let error = tried(options).unwrap_err().to_string();
            assert!(error.starts_with("there is no pod with the id"), "{error}");
        }
    }

    #[test]
    fn who_waits_is_told_for_what() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("c/ns/demo")).unwrap();
        let said = |options, is_terminal| {
            let mut errors = Vec::new();
            say_what_is_awaited(&mut errors, dir.path(), options, is_terminal).unwrap();
            String::from_utf8(errors).unwrap()
        };
        let follow = EventOptions { once: false, ..ONCE };
        let typo = said(EventOptions { pod: Some("nope"), ..follow }, false);
        assert_eq!(typo, "there is no pod with the id nope yet; waiting for it (Ctrl-C ends this)\n");
        assert_eq!(said(EventOptions { pod: Some("demo"), ..follow }, true), "");
        assert_eq!(said(follow, true), "waiting for events of all pods (Ctrl-C ends this)\n");
        assert_eq!((said(follow, false), said(ONCE, true)), (String::new(), String::new()));
    }

    const ONCE: EventOptions<'_> =
        EventOptions { pod: None, namespace: None, all: false, once: true, json: false };

    #[test]
    fn each_event_is_a_line() {
        let text = shown(ONCE);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[0], "2023-11-14T22:13:20.123Z  ns/demo  pod_began");
        assert_eq!(lines[1], "2023-11-14T22:13:21.000Z  ns/demo  vm_up  clone");
        assert!(
            lines[2].ends_with("ns/demo  lost  2 events: its record was full, or could not be written"),
            "{text}"
        );
        assert_eq!(lines[3], "2023-11-14T22:13:22.000Z  ns/demo  container_exited  demo  status 137");
        assert_eq!(lines.len(), 4);
        assert_eq!(shown(EventOptions { pod: Some("other"), ..ONCE }), "");
        assert_eq!(shown(EventOptions { namespace: Some("no"), ..ONCE }), "");
    }

    #[test]
    fn json_has_one_object_in_each_line() {
        let text = shown(EventOptions { pod: Some("demo"), json: true, ..ONCE });
        let last: serde_json::Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
        let expected = serde_json::json!({"at_unix_us": 1700000002000000u64, "containerd": "c", "namespace": "ns",
            "id": "demo", "event": "container_exited", "container": "demo", "status": 137});
        assert_eq!(last, expected);
    }
}
