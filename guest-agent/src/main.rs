//! `/init` of the guest, the stage that makes a container's processes, and pause.

use std::{env, panic, process::ExitCode};

use bulkhead_agent::{
    shutdown,
    stage::stage_process,
    stage_config::{PAUSE, STAGE},
};

fn main() -> ExitCode {
    if let Some(STAGE | PAUSE) = env::args().next().as_deref() {
        return stage_process::main();
    }
    if std::process::id() != 1 {
        eprintln!("bulkhead-agent: this is the init of a Bulkhead guest: it only runs as process 1");
        return ExitCode::FAILURE;
    }
    panic::set_hook(Box::new(|panic| shutdown::die(&panic.to_string())));
    match bulkhead_agent::run() {
        Err(error) => shutdown::die(&error.to_string()),
    }
}
