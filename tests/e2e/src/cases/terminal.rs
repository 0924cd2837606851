//! Terminals: `ctr run --tty` and `ctr tasks exec --tty`, typed to and looked at as a person does.

use std::time::Duration;

use anyhow::Result;
use sha2::{Digest, Sha256};

use super::Case;
use crate::command::{Finished, Running, Size};
use crate::ctr::{Attached, Host};
use crate::fixtures::{Spec, in_threads};

pub(super) const CASES: &[Case] = &[
    Case::both("the_standard_streams_are_the_terminal", streams),
    Case::both("output_and_errors_share_it_in_order", shared),
    Case::both("what_is_typed_is_echoed_and_read", echo),
    Case::both("control_c_interrupts_what_is_in_the_foreground", interrupt),
    Case::both("a_shell_outlives_a_command_that_is_interrupted", shell_interrupt),
    Case::both("control_d_ends_a_shell", shell_end),
    Case::both("a_shells_status_is_the_containers", shell_status),
    Case::both("its_first_size_is_the_specs", first_size),
    Case::both("its_size_is_that_of_the_users_window", size),
    Case::both("a_change_of_the_window_is_signalled", resize),
    Case::both("one_mib_of_output_arrives_whole", big_output),
    Case::both("what_is_typed_arrives_whole", big_input),
    Case::both("it_is_the_console", console),
    Case::both("a_read_only_root_has_a_console", read_only_root),
    Case::both("any_user_can_open_it_by_its_names", other_user),
    Case::both("without_one_there_is_none", none),
    Case::both("a_container_that_is_left_is_attached_to_again", attach_again),
    Case::both("a_container_that_began_detached_is_attached_to", attach_first),
    Case::both("an_added_process_has_its_own", exec_streams),
    Case::both("an_added_shell_is_talked_to", exec_shell),
    Case::both("an_added_process_sees_changes_of_the_window", exec_resize),
    Case::both("an_added_process_of_any_user_can_open_it", exec_other_user),
    Case::both("terminals_of_one_container_are_apart", apart),
    Case::both("ten_added_shells_at_once", ten_at_once),
    Case::both("the_output_of_ten_added_processes_arrives_whole", |host| much_of_many(host, 10, 40_000)),
    // 7 MB each. Takes many minutes where the host is emulated.
    Case::both("seven_mb_of_each_of_a_hundred_added_processes_arrive_whole", |host| {
        much_of_many(host, 100, 412_000)
    })
    .by_whole_name_only(),
    Case::both("a_process_left_behind_holds_nothing_up", left_behind),
    Case::both("a_container_without_devpts_has_none", no_devpts),
    Case::both("a_false_devpts_is_not_fallen_for", false_devpts),
    Case::both("a_command_that_the_image_lacks", missing_command),
    Case::both("nothing_is_left_of_it", leaves_nothing),
];

const WINDOW: Size = Size { width: 80, height: 24 };
const ANOTHER: Size = Size { width: 123, height: 45 };

/// Keys that terminals give a meaning.
const CONTROL_C: &[u8] = b"\x03";
const CONTROL_D: &[u8] = b"\x04";

/// Says when it is ready, and then its size at every change.
const WATCH_SIZE: &str = "trap 'stty size' WINCH; echo ready; while :; do sleep 0.1; done";

/// Has a shell make a prompt that is not in what is typed, once ctr has told it the size of [`WINDOW`]: busybox's shell
/// can lose a key that comes together with that news.
const PROMPT: &str = "until test \"$(stty size 2>&-)\" = '24 80'; do sleep 0.1; done; PS1='[re''ady] '\n";
const PROMPTED: &str = "\n[ready] ";

/// Starts a shell script in a terminal.
fn start<'h>(host: &'h Host, script: &str) -> Result<Attached<'h>> {
    host.container().start_in_terminal(WINDOW, &["sh", "-c", script])
}

/// Runs a shell script in a terminal to its end.
fn run(host: &Host, script: &str) -> Result<Finished> {
    start(host, script)?.finish()
}

/// Begins to talk to a shell.
fn greet(shell: &mut Running) -> Result<()> {
    shell.write(PROMPT.as_bytes())?;
    shell.wait_for(PROMPTED)
}

fn streams(host: &Host) -> Result<()> {
    run(host, "test -t 0 && test -t 1 && test -t 2 && tty")?.succeeds()?.prints("/dev/pts/0\r\n")?;
    Ok(())
}

fn shared(host: &Host) -> Result<()> {
    let script = "for n in 1 2 3; do echo out $n; echo err $n >&2; done; exit 3";
    let expected = "out 1\r\nerr 1\r\nout 2\r\nerr 2\r\nout 3\r\nerr 3\r\n";
    run(host, script)?.exits(3)?.prints(expected)?;
    Ok(())
}

fn echo(host: &Host) -> Result<()> {
    let mut attached = start(host, "echo ready; exec cat")?;
    attached.running.wait_for("ready\r\n")?;
    attached.running.write(b"a word\n")?;
    attached.running.wait_for("a word\r\na word\r\n")?;
    attached.running.write(CONTROL_D)?;
    attached.finish()?.succeeds()?.prints("ready\r\na word\r\na word\r\n")?;
    Ok(())
}

fn interrupt(host: &Host) -> Result<()> {
    let script = "trap 'echo caught; exit 5' INT; echo ready; while :; do sleep 0.1; done";
    let mut attached = start(host, script)?;
    attached.running.wait_for("ready\r\n")?;
    attached.running.write(CONTROL_C)?;
    attached.finish()?.exits(5)?.prints("ready\r\n^Ccaught\r\n")?;
    Ok(())
}

/// Says that it begins when it is in the foreground: if the shell said so, a key could come before the shell has put
/// the command there.
const SLEEPS: &[u8] = b"sh -c \"echo be''gun; exec sleep 1000\"\n";

fn shell_interrupt(host: &Host) -> Result<()> {
    let mut attached = host.container().start_in_terminal(WINDOW, &["sh"])?;
    greet(&mut attached.running)?;
    attached.running.write(SLEEPS)?;
    attached.running.wait_for("\nbegun\r\n")?;
    attached.running.write(CONTROL_C)?;
    attached.running.wait_for("^C")?;
    attached.running.write(b"echo sta''tus $?; exit\n")?;
    let finished = attached.finish()?;
    finished.check("the interrupted command's status", finished.text().contains("\nstatus 130\r\n"))?;
    finished.check("no complaint about the terminal", !finished.text().contains("job control"))?;
    Ok(())
}

fn shell_end(host: &Host) -> Result<()> {
    let mut attached = host.container().start_in_terminal(WINDOW, &["sh"])?;
    greet(&mut attached.running)?;
    attached.running.write(CONTROL_D)?;
    attached.finish()?.succeeds()?;
    Ok(())
}

fn shell_status(host: &Host) -> Result<()> {
    let mut attached = host.container().start_in_terminal(WINDOW, &["sh"])?;
    greet(&mut attached.running)?;
    attached.running.write(b"exit 7\n")?;
    attached.finish()?.exits(7)?;
    Ok(())
}

fn first_size(host: &Host) -> Result<()> {
    let script = "stty size > /tmp/size.new; mv /tmp/size.new /tmp/size; exec sleep 1000";
    let spec = Spec::of(host, &["sh", "-c", script])?.with("/process", "terminal", true.into())?;
    let size = serde_json::json!({ "width": ANOTHER.width, "height": ANOTHER.height });
    // A client that detaches tells nobody of its own window.
    let rooted = spec.with("/process", "consoleSize", size)?.detach_in_terminal(host.container(), WINDOW)?;
    let seen =
        rooted.task.exec(&["sh", "-c", "until test -e /tmp/size; do sleep 0.1; done; cat /tmp/size"])?;
    seen.succeeds()?.prints("45 123\n")?;
    Ok(())
}

fn size(host: &Host) -> Result<()> {
    // ctr tells the size of its window after the start; until then stty complains that there is none.
    let script = "until test \"$(stty size 2>&-)\" = '45 123'; do sleep 0.1; done; echo as wide";
    let attached = host.container().start_in_terminal(ANOTHER, &["sh", "-c", script])?;
    attached.finish()?.succeeds()?.prints("as wide\r\n")?;
    Ok(())
}

fn resize(host: &Host) -> Result<()> {
    let attached = start(host, WATCH_SIZE)?;
    attached.running.wait_for("ready\r\n")?;
    drag(&attached.running, ANOTHER)?;
    attached.running.resize(Size { width: 40, height: 10 })?;
    attached.running.wait_for("\n10 40\r\n")
}

/// Makes the window another size until what runs in it says so. ctr asks for the size once, and only then begins to
/// listen: of a change between the two it never hears.
fn drag(running: &Running, size: Size) -> Result<()> {
    let said = format!("\n{} {}\r\n", size.height, size.width);
    let between = Size { height: size.height + 1, ..size };
    for _ in 0..30 {
        running.resize(between)?;
        running.resize(size)?;
        if running.says_within(&said, Duration::from_secs(2)) {
            return Ok(());
        }
    }
    running.wait_for(&said)
}

/// Each of these processes writes so much in its terminal. All of it arrives, in order.
fn much_of_many(host: &Host, processes: usize, lines: usize) -> Result<()> {
    const LINE: &str = "0123456789abcde\r\n";
    /// Clients at the same time.
    const CLIENTS: usize = 4;
    let task = host.container().detach(&["sleep", "100000"])?;
    let script = format!("yes 0123456789abcde | head -n {lines}");
    let expected: Vec<u8> = LINE.bytes().cycle().take(LINE.len() * lines).collect();
    in_threads(CLIENTS, 0..processes, |_| {
        let mut client = task.exec_in_terminal(&[], WINDOW, &["sh", "-c", &script])?;
        client.finish()?.succeeds()?.prints_bytes(&expected).map(drop)
    })?;
    task.dies()
}

fn big_output(host: &Host) -> Result<()> {
    let line = "0123456789abcdef\r\n";
    let expected: Vec<u8> = line.bytes().cycle().take(line.len() << 16).collect();
    let finished = run(host, "yes 0123456789abcdef | head -n 65536")?;
    finished.succeeds()?.prints_bytes(&expected)?;
    Ok(())
}

fn big_input(host: &Host) -> Result<()> {
    let typed: String = (0..2000).map(|number| format!("line {number} of what is typed\n")).collect();
    let digest: String = Sha256::digest(&typed).iter().map(|byte| format!("{byte:02x}")).collect();
    let mut attached = start(host, "stty -echo; echo ready; head -n 2000 | sha256sum")?;
    attached.running.wait_for("ready\r\n")?;
    attached.running.write(typed.as_bytes())?;
    attached.finish()?.succeeds()?.prints(&format!("ready\r\n{digest}  -\r\n"))?;
    Ok(())
}

fn console(host: &Host) -> Result<()> {
    let script = "test -c /dev/console && echo through it > /dev/console";
    run(host, script)?.succeeds()?.prints("through it\r\n")?;
    Ok(())
}

fn read_only_root(host: &Host) -> Result<()> {
    let script = "touch /file 2>/dev/null || echo read-only > /dev/console";
    let container = host.container().flags(["--read-only"]);
    let attached = container.start_in_terminal(WINDOW, &["sh", "-c", script])?;
    attached.finish()?.succeeds()?.prints("read-only\r\n")?;
    Ok(())
}

/// Opens the terminal anew by each of its names.
const BY_ITS_NAMES: &str =
    "id -u; for name in /dev/tty /dev/stdout /dev/stderr $(tty); do echo $name > $name; done";

fn other_user(host: &Host) -> Result<()> {
    let container = host.container().flags(["--user", "1234:2345"]);
    let attached = container.start_in_terminal(WINDOW, &["sh", "-c", BY_ITS_NAMES])?;
    let expected = "1234\r\n/dev/tty\r\n/dev/stdout\r\n/dev/stderr\r\n/dev/pts/0\r\n";
    attached.finish()?.succeeds()?.prints(expected)?;
    Ok(())
}

fn none(host: &Host) -> Result<()> {
    let script = "test -t 0 || test -t 1 || test -t 2 || echo no stream; test -e /dev/console || echo no console; \
                  (: > /dev/tty) 2>/dev/null || echo no terminal";
    host.sh(script)?.succeeds()?.prints("no stream\nno console\nno terminal\n")?;
    Ok(())
}

fn attach_again(host: &Host) -> Result<()> {
    let Attached { mut running, task } =
        start(host, "echo ready; while read word; do echo heard $word; done; exit 6")?;
    running.wait_for("ready\r\n")?;
    running.write(b"one\n")?;
    running.wait_for("heard one\r\n")?;
    // ctr is killed: the user's own terminal is gone.
    drop(running);
    let mut again = task.attach_in_terminal(WINDOW)?;
    again.write(b"two\n")?;
    again.wait_for("heard two\r\n")?;
    drop(again);
    let mut third = task.attach_in_terminal(WINDOW)?;
    third.write(b"three\n")?;
    third.wait_for("heard three\r\n")?;
    third.write(CONTROL_D)?;
    third.finish()?.exits(6)?;
    Ok(())
}

fn attach_first(host: &Host) -> Result<()> {
    let script = "read word; echo heard $word; exit 4";
    let task = host.container().detach_in_terminal(WINDOW, &["sh", "-c", script])?;
    let mut attached = task.attach_in_terminal(WINDOW)?;
    attached.write(b"it\n")?;
    attached.wait_for("heard it\r\n")?;
    attached.finish()?.exits(4)?;
    Ok(())
}

/// A container that does nothing until it is removed.
const IDLE: [&str; 2] = ["sleep", "1000"];

fn exec_streams(host: &Host) -> Result<()> {
    let task = host.container().detach(&IDLE)?;
    let script = "test -t 0 && test -t 1 && test -t 2 && tty; exit 3";
    let mut exec = task.exec_in_terminal(&[], WINDOW, &["sh", "-c", script])?;
    exec.finish()?.exits(3)?.prints("/dev/pts/0\r\n")?;
    Ok(())
}

fn exec_shell(host: &Host) -> Result<()> {
    let task = host.idle()?;
    let mut shell = task.exec_in_terminal(&[], WINDOW, &["sh"])?;
    greet(&mut shell)?;
    shell.write(SLEEPS)?;
    shell.wait_for("\nbegun\r\n")?;
    shell.write(CONTROL_C)?;
    shell.wait_for("^C")?;
    shell.write(b"echo sta''tus $?\n")?;
    // Before it asks again, the key would not be the shell's.
    shell.wait_for("\nstatus 130\r\n[ready] ")?;
    shell.write(CONTROL_D)?;
    let finished = shell.finish()?;
    finished.exits(0)?.check("no complaint about the terminal", !finished.text().contains("job control"))?;
    Ok(())
}

fn exec_resize(host: &Host) -> Result<()> {
    let task = host.container().detach(&IDLE)?;
    let exec = task.exec_in_terminal(&[], WINDOW, &["sh", "-c", WATCH_SIZE])?;
    exec.wait_for("ready\r\n")?;
    drag(&exec, ANOTHER)
}

fn exec_other_user(host: &Host) -> Result<()> {
    let task = host.container().detach(&IDLE)?;
    let mut exec = task.exec_in_terminal(&["--user", "1234"], WINDOW, &["sh", "-c", BY_ITS_NAMES])?;
    let expected = "1234\r\n/dev/tty\r\n/dev/stdout\r\n/dev/stderr\r\n/dev/pts/0\r\n";
    exec.finish()?.succeeds()?.prints(expected)?;
    Ok(())
}

fn apart(host: &Host) -> Result<()> {
    let mut attached = start(host, "tty; exec cat")?;
    attached.running.wait_for("/dev/pts/0\r\n")?;
    let mut exec = attached.task.exec_in_terminal(&[], WINDOW, &["sh", "-c", "tty; exec cat"])?;
    exec.wait_for("/dev/pts/1\r\n")?;
    exec.write(b"to the second\n")?;
    exec.wait_for("to the second\r\nto the second\r\n")?;
    attached.running.write(b"to the first\n")?;
    attached.running.wait_for("to the first\r\nto the first\r\n")?;
    exec.write(CONTROL_D)?;
    exec.finish()?.succeeds()?.prints("/dev/pts/1\r\nto the second\r\nto the second\r\n")?;
    attached.running.write(CONTROL_D)?;
    attached.finish()?.succeeds()?.prints("/dev/pts/0\r\nto the first\r\nto the first\r\n")?;
    Ok(())
}

fn ten_at_once(host: &Host) -> Result<()> {
    let task = host.idle()?;
    let mut execs = Vec::new();
    for n in 0..10 {
        let script = format!("echo ready; read word; echo {n} heard $word; exit {n}");
        execs.push(task.exec_in_terminal(&[], WINDOW, &["sh", "-c", &script])?);
    }
    for (n, exec) in execs.iter_mut().enumerate() {
        exec.wait_for("ready\r\n")?;
        exec.write(b"it\n")?;
        exec.finish()?.exits(n as i32)?.prints(&format!("ready\r\nit\r\n{n} heard it\r\n"))?;
    }
    Ok(())
}

fn left_behind(host: &Host) -> Result<()> {
    let task = host.container().detach(&IDLE)?;
    let script = "(trap '' HUP; exec sleep 1000) & echo bye";
    let mut exec = task.exec_in_terminal(&[], WINDOW, &["sh", "-c", script])?;
    exec.finish()?.succeeds()?.prints("bye\r\n")?;
    Ok(())
}

fn no_devpts(host: &Host) -> Result<()> {
    host.leaves_nothing(|| {
        let spec = Spec::of(host, &["true"])?.with("/process", "terminal", true.into())?;
        let failed = spec.without_mount("/dev/pts")?.run_in_terminal(host.container(), WINDOW)?;
        failed.fails_with("ptmx")?.fails_with("no such file or directory")?.within(host.error_limit())?;
        Ok(())
    })
}

fn false_devpts(host: &Host) -> Result<()> {
    // Whoever opens the FIFO waits for its other end.
    let script = "mount -t tmpfs none /dev/pts && mkfifo /dev/pts/ptmx && rm /dev/ptmx && \
                  ln -s pts/ptmx /dev/ptmx && touch /tmp/ready; exec sleep 1000";
    let task = host.container().flags(["--privileged"]).detach(&["sh", "-c", script])?;
    task.exec(&["sh", "-c", "until test -e /tmp/ready; do sleep 0.1; done"])?.succeeds()?;
    let refused = task.exec_in_terminal(&[], WINDOW, &["true"])?.finish()?;
    refused.check("a refusal", refused.succeeds().is_err())?.within(host.error_limit())?;
    task.exec(&["echo", "alive"])?.succeeds()?.prints("alive\n")?;
    Ok(())
}

fn missing_command(host: &Host) -> Result<()> {
    host.leaves_nothing(|| {
        let failed = host.container().start_in_terminal(WINDOW, &["no-such-command"])?.finish()?;
        failed.fails_with("exec: \"no-such-command\": executable file not found in $PATH")?;
        failed.within(host.error_limit())?;
        Ok(())
    })
}

fn leaves_nothing(host: &Host) -> Result<()> {
    host.leaves_nothing(|| {
        let mut attached = start(host, "echo ready; exec cat")?;
        attached.running.wait_for("ready\r\n")?;
        for _ in 0..3 {
            let command = ["sh", "-c", "sleep 1000 & echo hello"];
            let mut exec = attached.task.exec_in_terminal(&[], WINDOW, &command)?;
            exec.finish()?.succeeds()?.prints("hello\r\n")?;
        }
        attached.running.write(CONTROL_D)?;
        attached.finish()?.succeeds()?;
        Ok(())
    })
}
