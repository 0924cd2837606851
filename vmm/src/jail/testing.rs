//! Drills: a test tries something forbidden in a process of its own, because the kernel may kill that process.

use std::{
    env,
    os::unix::process::ExitStatusExt,
    process::{Command, Output},
    thread,
};

/// The environment variable that is set in the process of a drill.
const DRILL: &str = "BULKHEAD_DRILL";

/// How a drill ended.
pub(crate) struct End {
    drill: String,
    output: Output,
}

/// Executes the running test again in a process of its own, which runs `body`, and judges how that process ended.
pub(crate) fn drill(body: impl FnOnce(), judge: impl FnOnce(End)) {
    match env::var_os(DRILL) {
        Some(_) => body(),
        None => judge(in_process("1")),
    }
}

/// The same for each of the numbers, in a process of its own.
pub(crate) fn drill_for_each(
    numbers: impl IntoIterator<Item = i32>,
    body: impl FnOnce(i32),
    judge: impl Fn(End),
) {
    match env::var(DRILL) {
        Ok(number) => body(number.parse().unwrap()),
        Err(_) => numbers.into_iter().for_each(|number| judge(in_process(&number.to_string()))),
    }
}

/// Executes the running test again, as a drill.
fn in_process(drill: &str) -> End {
    let test = thread::current().name().expect("a test's thread has the test's name").to_owned();
    let output = Command::new(env::current_exe().unwrap())
        .args(["--exact", &test, "--nocapture", "--test-threads=1"])
        .env(DRILL, drill)
        .output()
        .unwrap();
    assert!(String::from_utf8_lossy(&output.stdout).contains("running 1 test"), "{test} runs no drill");
    End { drill: drill.to_owned(), output }
}

impl End {
    /// `body` returned.
    pub(crate) fn succeeds(self) {
        assert!(self.output.status.success(), "{}", self.described());
    }

    /// The kernel killed the process for a forbidden system call.
    pub(crate) fn was_killed(self) {
        assert_eq!(self.output.status.signal(), Some(libc::SIGSYS), "{}", self.described());
    }

    /// The process ended with status 1, and has written `text` to its standard error.
    pub(crate) fn fails_with(self, text: &str) {
        assert_eq!(self.output.status.code(), Some(1), "{}", self.described());
        assert!(String::from_utf8_lossy(&self.output.stderr).contains(text), "{}", self.described());
    }

    fn described(&self) -> String {
        let Output { status, stdout, stderr } = &self.output;
        let drill = &self.drill;
        format!(
            "drill {drill}: {status}\n{}{}",
            String::from_utf8_lossy(stdout),
            String::from_utf8_lossy(stderr)
        )
    }
}
