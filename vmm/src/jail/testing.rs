//! Drills: what is forbidden is tried by a process of its own, for whoever tries it may not live on.

use std::{
    env,
    os::unix::process::ExitStatusExt,
    process::{Command, Output},
    thread,
};

use super::Duty;

/// What a drill tries of every thread.
pub(crate) const ALL: [Duty; 9] = [
    Duty::Control,
    Duty::Saver,
    Duty::Vcpu,
    Duty::Rng,
    Duty::Vsock,
    Duty::Net,
    Duty::Fs,
    Duty::Balloon,
    Duty::Mem,
];

/// Set in the process of a drill.
const DRILL: &str = "BULKHEAD_DRILL";

/// How a drill ended.
pub(crate) struct End(Output);

/// Runs `body` in a process of its own, which is this very test, executed again, and judges its end.
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
    /// What was tried went as `body` expected.
    pub(crate) fn succeeds(self) {
        assert!(self.0.status.success(), "{}", self.told());
    }

    /// It was killed for a system call.
    pub(crate) fn was_killed(self) {
        assert_eq!(self.0.status.signal(), Some(libc::SIGSYS), "{}", self.told());
    }

    fn told(&self) -> String {
        let Output { status, stdout, stderr } = &self.0;
        format!("{status}\n{}{}", String::from_utf8_lossy(stdout), String::from_utf8_lossy(stderr))
    }
}
