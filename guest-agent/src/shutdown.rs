//! The end of the guest.

use std::{
    convert::Infallible,
    fs::{self, File, OpenOptions},
    io::{self, ErrorKind, Write},
    process,
    time::Duration,
};

use nix::{
    mount::{MsFlags, mount},
    sys::{
        reboot::{RebootMode, reboot},
        signal::{Signal, kill},
    },
    unistd::Pid,
};

use crate::syscall;

/// How long killed processes get to end, and how often it is looked.
const KILL_ATTEMPTS: u32 = 500;
const KILL_PAUSE: Duration = Duration::from_millis(1);

/// Says why as an emergency of the kernel, which the VMM passes on even if the guest has no console, and ends the
/// guest.
pub fn die(reason: &str) -> ! {
    say(&format!("fatal: {reason}"));
    restart()
}

/// Writes one record of the kernel's log, of level 0 (Documentation/ABI/testing/dev-kmsg). If /dev/kmsg cannot be
/// opened or written, the line goes to the console, if there is one.
fn say(what: &str) {
    let line = format!("bulkhead-agent: {}", what.replace(char::is_control, " "));
    if open_log().and_then(|mut log| log.write_all(record(&line).as_bytes())).is_err() {
        eprintln!("{line}");
    }
}

/// Opens /dev/kmsg. An agent that fails in its first steps has not mounted /dev yet: this mounts it then.
fn open_log() -> io::Result<File> {
    let open = || OpenOptions::new().write(true).open("/dev/kmsg");
    match open() {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            // An initramfs may have the directory; if there is none, mount(2) says so.
            let _ = fs::create_dir("/dev");
            mount(Some("devtmpfs"), "/dev", Some("devtmpfs"), MsFlags::empty(), None::<&str>)?;
            open()
        }
        opened => opened,
    }
}

/// The longest line that is written, in bytes. The kernel refuses a record of more than 1 KiB with its prefix.
const LINE: usize = 900;

fn record(line: &str) -> String {
    format!("<0>{}\n", line.get(..line.floor_char_boundary(LINE)).unwrap_or_default())
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
    say(&format!("restart: {error}"));
    process::exit(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_reason_is_cut_to_one_record_of_the_kernel() {
        assert_eq!(record("short"), "<0>short\n");
        let record = record(&"\u{20ac}".repeat(1000));
        assert!(record.len() <= 904 && record.ends_with("\u{20ac}\n"), "{}", record.len());
    }
}
