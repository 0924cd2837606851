//! The end of the guest.

use std::{convert::Infallible, process, time::Duration};

use nix::sys::{
    reboot::{RebootMode, reboot},
    signal::{Signal, kill},
};
use nix::unistd::Pid;

use crate::syscall;

/// How long killed processes get to end, and how often it is looked.
const KILL_ATTEMPTS: u32 = 500;
const KILL_PAUSE: Duration = Duration::from_millis(1);

/// Says why on the console, and ends the guest.
pub fn die(reason: &str) -> ! {
    eprintln!("bulkhead-agent: fatal: {reason}");
    restart()
}

/// Kills every process but this one, and waits for the ends of its children.
pub async fn kill_all() {
    // ESRCH: there is none.
    let _ = kill(Pid::from_raw(-1), Signal::SIGKILL);
    // Meanwhile the reaper takes them away.
    for _ in 0..KILL_ATTEMPTS {
        if !syscall::has_children() {
            break;
        }
        tokio::time::sleep(KILL_PAUSE).await;
    }
}

/// Stops the guest by a reset, at which the VMM exits.
fn restart() -> ! {
    let refused: nix::Result<Infallible> = reboot(RebootMode::RB_AUTOBOOT);
    let Err(error) = refused;
    eprintln!("bulkhead-agent: restart: {error}");
    process::exit(1)
}
