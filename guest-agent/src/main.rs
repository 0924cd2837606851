//! `/init` of the guest, and the stage that makes a container's processes.

use std::{env, panic, process::ExitCode};

use bulkhead_agent::{
    power,
    process::{STAGE_ARGUMENT, child},
};

fn main() -> ExitCode {
    let mut arguments = env::args().skip(1);
    if arguments.next().as_deref() == Some(STAGE_ARGUMENT) {
        return child::main(arguments);
    }
    if std::process::id() != 1 {
        eprintln!("bulkhead-agent: this is the init of a Bulkhead guest: it only runs as process 1");
        return ExitCode::FAILURE;
    }
    panic::set_hook(Box::new(|panic| power::die(&panic.to_string())));
    match bulkhead_agent::run() {
        Err(error) => power::die(&error.to_string()),
    }
}
