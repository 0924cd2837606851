//! A container's cgroup while it runs: the kernel's word of changes, the freezer, and limits that change.

use std::{
    fs,
    io::Read,
    process::{Child, Command, Stdio},
    time::Duration,
};

use bulkhead_agent::{
    cgroup::{Cgroup, Setting},
    device_filter,
};
use tokio::time::timeout;

use crate::bench::Bench;

const WAIT: Duration = Duration::from_secs(10);

/// A cgroup with a process in it.
struct Inhabited {
    bench: Bench,
    cgroup: Cgroup,
    process: Child,
}

impl Inhabited {
    fn new() -> Self {
        let bench = Bench::new();
        let cgroup = Cgroup::create(bench.cgroup.join("inhabited")).unwrap();
        let process = Command::new("sleep").arg("1000").spawn().unwrap();
        fs::write(cgroup.path().join("cgroup.procs"), process.id().to_string()).unwrap();
        Self { bench, cgroup, process }
    }
}

impl Drop for Inhabited {
    fn drop(&mut self) {
        // Kills the process, too, which the reaper of all tests waits for unless this does.
        self.bench.runtime.block_on(self.cgroup.remove()).unwrap();
        drop(self.process.wait());
    }
}

#[test]
fn the_kernels_word_of_a_change_ends_the_wait() {
    let inhabited = Inhabited::new();
    let cgroup = &inhabited.cgroup;
    let emptied = async {
        let is = |populated| {
            cgroup.watch("cgroup.events", move |events| (events["populated"] == populated).then_some(()))
        };
        is(1).await.unwrap();
        let (waited, ()) = tokio::join!(timeout(WAIT, is(0)), async { cgroup.kill().unwrap() });
        waited.unwrap().unwrap();
    };
    inhabited.bench.runtime.block_on(emptied);
}

#[test]
fn a_frozen_process_stands_still_and_can_be_killed() {
    let inhabited = Inhabited::new();
    let cgroup = &inhabited.cgroup;
    let frozen = || cgroup.numbers("cgroup.events").unwrap()["frozen"];
    inhabited.bench.runtime.block_on(async {
        timeout(WAIT, cgroup.freeze()).await.unwrap().unwrap();
        assert_eq!(frozen(), 1);
        cgroup.thaw().unwrap();
        timeout(WAIT, cgroup.watch("cgroup.events", |events| (events["frozen"] == 0).then_some(())))
            .await
            .unwrap()
            .unwrap();
        timeout(WAIT, cgroup.freeze()).await.unwrap().unwrap();
        cgroup.kill().unwrap();
        let empty = cgroup.watch("cgroup.events", |events| (events["populated"] == 0).then_some(()));
        timeout(WAIT, empty).await.unwrap().unwrap();
    });
}

#[test]
fn after_an_error_everything_is_as_it_was() {
    let inhabited = Inhabited::new();
    let setting = |file: &str, value: &str| Setting {
        field: format!("unified[{file}]"),
        file: file.into(),
        value: value.into(),
        optional: false,
    };
    let settings = [setting("cgroup.max.depth", "7"), setting("cgroup.max.descendants", "none")];
    let error = inhabited.cgroup.update(&settings, None).unwrap_err().to_string();
    assert!(error.starts_with("unified[cgroup.max.descendants]: writing \"none\""), "{error}");
    assert_eq!(inhabited.cgroup.number("cgroup.max.depth").unwrap(), u64::MAX);
    let replaced = inhabited.cgroup.update(&settings[..1], None).unwrap();
    assert_eq!(inhabited.cgroup.number("cgroup.max.depth").unwrap(), 7);
    inhabited.cgroup.put_back(replaced).unwrap();
    assert_eq!(inhabited.cgroup.number("cgroup.max.depth").unwrap(), u64::MAX);
    assert_eq!(inhabited.cgroup.read("no.such.file").unwrap(), None);
}

/// The device program of these rules, an OCI `linux.resources.devices`.
fn devices(rules: &str) -> Vec<bulkhead_agent::syscall::BpfInstruction> {
    device_filter::generate(&serde_json::from_str::<Vec<_>>(rules).unwrap(), None).unwrap()
}

/// Opens a device as a process of this cgroup. The reaper of all tests may wait for the process, so its word counts.
fn can_read(cgroup: &Cgroup, device: &str) -> bool {
    let procs = cgroup.path().join("cgroup.procs");
    let script = format!("echo $$ > {} && head -c 0 {device} && echo opened", procs.display());
    let mut process = Command::new("sh").args(["-c", &script]).stdout(Stdio::piped()).spawn().unwrap();
    let mut printed = String::new();
    process.stdout.take().unwrap().read_to_string(&mut printed).unwrap();
    drop(process.wait());
    printed == "opened\n"
}

#[test]
fn a_container_attaches_device_programs_to_cgroups_of_its_own_and_cannot_allow_more() {
    let all = devices(r#"[{"allow": true}]"#);
    let few = devices(r#"[{"allow": false}]"#);
    let bench = Bench::new();
    let outer = Cgroup::create(bench.cgroup.join("outer")).unwrap();
    let inner = Cgroup::create(outer.path().join("inner")).unwrap();
    outer.configure(&[], &few).unwrap();
    // As runc, docker and systemd do inside a container.
    inner.configure(&[], &all).unwrap();
    assert!(can_read(&inner, "/dev/null") && !can_read(&inner, "/dev/kmsg"));
    // An update replaces the program, rather than adding one that must allow as well.
    let replaced = outer.update(&[], Some(&all)).unwrap();
    assert!(can_read(&inner, "/dev/kmsg"));
    outer.put_back(replaced).unwrap();
    assert!(!can_read(&inner, "/dev/kmsg"));
    inner.update(&[], Some(&few)).unwrap();
    outer.update(&[], Some(&all)).unwrap();
    assert!(!can_read(&inner, "/dev/kmsg"));
    bench.runtime.block_on(outer.remove()).unwrap();
}
