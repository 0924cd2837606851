//! Processes that are not made in time.

use std::{
    fs::{self, File, Permissions},
    os::{fd::AsRawFd, unix::fs::PermissionsExt},
    path::Path,
    thread,
    time::{Duration, Instant},
};

use bulkhead_agent::{
    stage::launcher::{CreatedInit, Launcher, ProcessError},
    stage_config::CommonConfig,
    syscall,
};
use nix::mount::{MsFlags, mount};
use serde_json::json;

use crate::bench::{Bench, launcher, null};

fn in_a_hurry() -> Launcher {
    Launcher { deadline: Duration::from_secs(1), ..launcher() }
}

fn wait_until(mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < Duration::from_secs(10), "it takes too long");
        thread::sleep(Duration::from_millis(5));
    }
}

fn members(cgroup: &Path) -> Vec<i32> {
    let text = fs::read_to_string(cgroup.join("cgroup.procs")).unwrap();
    text.lines().map(|line| line.parse().unwrap()).collect()
}

#[test]
fn a_stage_that_says_nothing_is_killed() {
    let bench = Bench::new();
    let stage = bench.directory.path().join("stage");
    let its_id = bench.directory.path().join("id");
    fs::write(&stage, format!("#!/bin/sh\necho $$ > {}\nexec sleep 1000\n", its_id.display())).unwrap();
    fs::set_permissions(&stage, Permissions::from_mode(0o755)).unwrap();
    let launcher = Launcher { program: stage, ..in_a_hurry() };
    let begun = Instant::now();
    let error = bench.create_by(&launcher, &bench.spec(&["true"]), null()).err().unwrap();
    assert!(matches!(error, ProcessError::Deadline { .. }), "{error}");
    assert_eq!(error.to_string(), "the container's process did not complete its setup within 1 s");
    assert!(begun.elapsed() < Duration::from_secs(5));
    let id = fs::read_to_string(its_id).unwrap();
    wait_until(|| !Path::new("/proc").join(id.trim()).exists());
}

#[test]
fn a_process_whose_directory_does_not_answer_is_killed() {
    let bench = Bench::new();
    let hung = bench.volume().join("hung");
    fs::create_dir(&hung).unwrap();
    // A file system of which nobody reads the requests.
    let requests = File::options().read(true).write(true).open("/dev/fuse").unwrap();
    let options = format!("fd={},rootmode=40000,user_id=0,group_id=0,allow_other", requests.as_raw_fd());
    mount(Some("hung"), &hung, Some("fuse"), MsFlags::empty(), Some(options.as_str())).unwrap();
    let mut spec = bench.spec(&["sleep", "1000"]);
    let volume = json!({"destination": "/volume", "source": bench.volume(), "options": ["rbind"]});
    spec["mounts"].as_array_mut().unwrap().push(volume);
    let CreatedInit { child, pidfd, control, .. } = bench.create(&spec, null()).unwrap();
    bench.runtime.block_on(control.start()).unwrap();

    let mut process = spec["process"].clone();
    process["cwd"] = json!("/volume/hung");
    let error = bench.join(&in_a_hurry(), &pidfd, &process, CommonConfig::default(), null()).err().unwrap();
    assert!(matches!(error, ProcessError::Deadline { .. }), "{error}");
    wait_until(|| members(&bench.cgroup) == [child.pid]);
    drop(requests);
    syscall::kill(child.pid, libc::SIGKILL as u32).unwrap();
    assert_eq!(bench.status(child), 137);
}
