//! Containers with terminals.

use bulkhead_agent::{
    stage::launcher::{Child, CreatedInit},
    stage_config::WindowSize,
    streams::forward_output,
    syscall,
};
use serde_json::{Value, json};

use crate::bench::{Bench, null};

const SIZE: WindowSize = WindowSize { width: 99, height: 33 };

fn with_terminal(mut process: Value) -> Value {
    process["terminal"] = json!(true);
    process["consoleSize"] = json!(SIZE);
    process
}

/// What the process shows until its end, which is its exit status.
fn shown(bench: &Bench, child: Child) -> (String, u32) {
    let mut bytes = Vec::new();
    let master = child.terminal.as_ref().unwrap().master().clone();
    let connection = tokio::io::join(tokio::io::empty(), &mut bytes);
    bench.runtime.block_on(forward_output(master, connection, child.exit.clone())).unwrap();
    (String::from_utf8(bytes).unwrap(), bench.status(child))
}

/// Shows the terminal's name and size, and opens it by each of its names.
const SCRIPT: &str = "test -t 0 && test -t 1 && test -t 2 && tty && stty size; \
                      for name in /dev/tty /dev/stdout $(tty); do echo $name > $name; done";
const SHOWN: &str = "33 99\r\n/dev/tty\r\n/dev/stdout\r\n";

#[test]
fn the_terminal_of_an_init_is_its_console_too() {
    let bench = Bench::new();
    let mut spec = bench.spec(&["sh", "-c", &format!("{SCRIPT}; echo console > /dev/console; exit 3")]);
    spec["process"] = with_terminal(spec["process"].clone());
    let CreatedInit { child, control, .. } = bench.create(&spec, null()).unwrap();
    bench.runtime.block_on(control.start()).unwrap();
    let (text, status) = shown(&bench, child);
    assert_eq!((text, status), (format!("/dev/pts/0\r\n{SHOWN}/dev/pts/0\r\nconsole\r\n"), 3));
}

#[test]
fn a_size_that_is_set_before_the_start_is_the_first() {
    let bench = Bench::new();
    let mut spec = bench.spec(&["stty", "size"]);
    spec["process"]["terminal"] = json!(true);
    let CreatedInit { child, control, .. } = bench.create(&spec, null()).unwrap();
    child.terminal.as_ref().unwrap().resize(SIZE).unwrap();
    bench.runtime.block_on(control.start()).unwrap();
    assert_eq!(shown(&bench, child), ("33 99\r\n".to_owned(), 0));
}

#[test]
fn a_process_that_joins_has_a_terminal_of_its_own_whoever_its_user_is() {
    let bench = Bench::new();
    let mut spec = bench.spec(&["sleep", "1000"]);
    spec["process"] = with_terminal(spec["process"].clone());
    let CreatedInit { child: init, pidfd, control, .. } = bench.create(&spec, null()).unwrap();
    bench.runtime.block_on(control.start()).unwrap();
    for user in [0, 1234] {
        let mut process = spec["process"].clone();
        process["args"] = json!(["sh", "-c", SCRIPT]);
        process["user"] = json!({"uid": user, "gid": user});
        let child = bench.exec(&pidfd, &process, null()).unwrap();
        assert_eq!(shown(&bench, child), (format!("/dev/pts/1\r\n{SHOWN}/dev/pts/1\r\n"), 0));
    }
    syscall::kill(init.pid, libc::SIGKILL as u32).unwrap();
    assert_eq!(bench.status(init), 137);
}

#[test]
fn without_a_devpts_there_is_no_terminal() {
    let bench = Bench::new();
    let mut spec = bench.spec(&["true"]);
    spec["process"] = with_terminal(spec["process"].clone());
    spec["mounts"].as_array_mut().unwrap().retain(|mount| mount["destination"] != "/dev/pts");
    let error = bench.create(&spec, null()).err().unwrap().to_string();
    assert_eq!(error, "process.terminal: /dev/pts/ptmx: no such file or directory");
    // Nor with anything else in its place.
    let tmpfs = json!({"destination": "/dev/pts", "type": "tmpfs", "source": "tmpfs"});
    spec["mounts"].as_array_mut().unwrap().push(tmpfs);
    let error = bench.create(&spec, null()).err().unwrap().to_string();
    assert_eq!(error, "process.terminal: /dev/pts/ptmx: /dev/pts is not a devpts file system");
}
