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
pub(crate) struct End(Output);

/// Executes the running test again in a process of its own, which runs `body`, and judges how that process ended.
pub(crate) fn drill(body: impl FnOnce(), judge: impl FnOnce(End)) {
    if env::var_os(DRILL).is_some() {
        return body();
    }
    let test = thread::current().name().expect("a test's thread has the test's name").to_owned();
    let output = Command::new(env::current_exe().unwrap())
        .args(["--exact", &test, "--nocapture", "--test-threads=1"])
        .env(DRILL, "1")
        .output()
        .unwrap();
    assert!(String::from_utf8_lossy(&output.stdout).contains("running 1 test"), "{test} runs no drill");
    judge(End(output));
}

impl End {
    /// `body` returned.
    pub(crate) fn succeeds(self) {
        assert!(self.0.status.success(), "{}", self.output());
    }

    /// The kernel killed the process for a forbidden system call.
    pub(crate) fn was_killed(self) {
        assert_eq!(self.0.status.signal(), Some(libc::SIGSYS), "{}", self.output());
    }

    fn output(&self) -> String {
        let Output { status, stdout, stderr } = &self.0;
        format!("{status}\n{}{}", String::from_utf8_lossy(stdout), String::from_utf8_lossy(stderr))
    }
}
