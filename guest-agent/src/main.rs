//! `/init` of the guest, the stage that makes a container's processes, pause, and what loads modules of the kernel.

use std::{env, panic, process::ExitCode};

use bulkhead_agent::{
    kernel_modules::{self, MODPROBE},
    shutdown,
    stage::stage_process,
    stage_config::{PAUSE, STAGE},
};

fn main() -> ExitCode {
    let mut arguments = env::args_os().map_while(|argument| argument.into_string().ok());
    match arguments.next().as_deref() {
        Some(STAGE | PAUSE) => return stage_process::main(),
        Some(MODPROBE) => return kernel_modules::main(arguments),
        _ => {}
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
