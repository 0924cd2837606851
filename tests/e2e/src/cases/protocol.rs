//! What containerd's clients tell errors apart by: the code of each, of every request that cannot be granted.

use anyhow::{Result, ensure};
use containerd_shim_protos::api;
use containerd_shim_protos::bootstrap_api::{BootstrapParams, BootstrapResult};
use containerd_shim_protos::types::task::Status;
use protobuf::Message;
use protobuf::well_known_types::empty::Empty;
use serde_json::json;
use ttrpc::Code;

use super::Case;
use crate::command::Cmd;
use crate::ctr::{Host, NAMESPACE, Runtime, Task};
use crate::fixtures::scratch;
use crate::shim::{Refused, Shim, granted, invalid, precondition, refused};

pub(super) const CASES: &[Case] = &[
    Case::both("an_unknown_task_is_not_found", unknown_task),
    Case::both("an_unknown_exec_is_not_found", unknown_exec),
    Case::both("a_running_task_is_neither_started_nor_deleted", running),
    Case::both("a_stopped_task_takes_neither_process_nor_signal", stopped),
    Case::both("a_task_is_deleted_once", deleted_once),
    Case::both("pause_and_resume_take_turns", turns),
    Case::both("a_paused_task_is_neither_deleted_nor_added_to", paused),
    Case::both("an_execs_id_is_taken_once", exec_id_taken),
    Case::both("an_exec_that_is_not_started_takes_no_signal", exec_not_started),
    Case::both("an_exec_is_started_once", exec_started_once),
    Case::both("an_exec_is_deleted_when_it_has_ended_and_once", exec_deleted_once),
    Case::both("an_exec_of_a_missing_command_names_it", exec_of_missing_command),
    Case::both("an_exec_of_a_malformed_process_is_refused", malformed_process),
    Case::both("a_signal_that_does_not_exist_is_refused", no_such_signal),
    Case::both("everybody_who_waits_hears_of_the_end", many_wait),
    Case::both("a_task_that_exists_is_not_created_again", created_twice),
    Case::bulkhead("a_create_of_a_task_that_exists_says_so", create_again),
    Case::bulkhead("a_checkpoint_is_not_implemented", checkpoint),
    Case::bulkhead("a_start_that_is_asked_for_by_message_is_answered_by_one", started_by_message),
];

/// Where the host's containerd listens.
const CONTAINERD: &str = "/run/containerd/containerd.sock";

const SIGTERM: u32 = 15;
const SIGKILL: u32 = 9;

fn idle(host: &Host) -> Result<(Task<'_>, Shim)> {
    let task = host.container().detach(&["sleep", "1000"])?;
    let shim = Shim::of(host, task.id())?;
    Ok((task, shim))
}

fn ended(host: &Host) -> Result<(Task<'_>, Shim)> {
    let (task, shim) = idle(host)?;
    granted(shim.kill("", SIGKILL))?;
    granted(shim.wait(""))?;
    Ok((task, shim))
}

fn is_running(shim: &Shim) -> Result<()> {
    let state = granted(shim.state(""))?.status.enum_value_or_default();
    ensure!(state == Status::RUNNING, "expected  the task to run on\ncame      {state:?}");
    Ok(())
}

fn unknown_task(host: &Host) -> Result<()> {
    let (task, _) = idle(host)?;
    let nobody = Shim::of(host, task.id())?.about("nobody");
    refused(nobody.state(""))?.with(Code::NOT_FOUND)?;
    refused(nobody.start(""))?.with(Code::NOT_FOUND)?;
    refused(nobody.kill("", SIGKILL))?.with(Code::NOT_FOUND)?;
    refused(nobody.wait(""))?.with(Code::NOT_FOUND)?;
    refused(nobody.delete(""))?.with(Code::NOT_FOUND)?;
    refused(nobody.pids())?.with(Code::NOT_FOUND)?;
    refused(nobody.pause())?.with(Code::NOT_FOUND)?;
    refused(nobody.resume())?.with(Code::NOT_FOUND)?;
    refused(nobody.stats())?.with(Code::NOT_FOUND)?;
    refused(nobody.update(&json!({})))?.with(Code::NOT_FOUND)?;
    refused(nobody.exec("more", &["true"]))?.with(Code::NOT_FOUND)?;
    refused(close_io(&nobody, "nobody", ""))?.with(Code::NOT_FOUND)?;
    is_running(&Shim::of(host, task.id())?)
}

fn close_io(shim: &Shim, id: &str, exec_id: &str) -> Result<Empty, Refused> {
    let mut request = api::CloseIORequest::new();
    (request.id, request.exec_id, request.stdin) = (id.into(), exec_id.into(), true);
    shim.call("CloseIO", &request)
}

fn unknown_exec(host: &Host) -> Result<()> {
    let (task, shim) = idle(host)?;
    refused(shim.state("nobody"))?.with(Code::NOT_FOUND)?;
    refused(shim.start("nobody"))?.with(Code::NOT_FOUND)?;
    refused(shim.kill("nobody", SIGKILL))?.with(Code::NOT_FOUND)?;
    refused(shim.wait("nobody"))?.with(Code::NOT_FOUND)?;
    refused(shim.delete("nobody"))?.with(Code::NOT_FOUND)?;
    // runc says so in words alone here.
    let not_found = match host.runtime() {
        Runtime::Runc => Code::UNKNOWN,
        Runtime::Bulkhead => Code::NOT_FOUND,
    };
    refused(close_io(&shim, task.id(), "nobody"))?.with(not_found)?;
    is_running(&shim)
}

fn running(host: &Host) -> Result<()> {
    let (_task, shim) = idle(host)?;
    refused(shim.start(""))?.with(precondition(host))?;
    refused(shim.delete(""))?.with(precondition(host))?;
    is_running(&shim)
}

fn stopped(host: &Host) -> Result<()> {
    let (_task, shim) = ended(host)?;
    refused(shim.exec("more", &["true"]))?.with(precondition(host))?;
    refused(shim.kill("", SIGTERM))?.with(Code::NOT_FOUND)?;
    refused(shim.start(""))?.with(precondition(host))?;
    refused(shim.pause())?.with(precondition(host))?;
    refused(shim.resume())?.with(precondition(host))?;
    let status = granted(shim.wait(""))?.exit_status;
    ensure!(status == 137, "expected  exit status 137 still\ncame      {status}");
    Ok(())
}

fn deleted_once(host: &Host) -> Result<()> {
    let (task, shim) = ended(host)?;
    let status = granted(shim.delete(""))?.exit_status;
    ensure!(status == 137, "expected  exit status 137\ncame      {status}");
    refused(shim.delete(""))?.with(Code::NOT_FOUND)?;
    refused(shim.state(""))?.with(Code::NOT_FOUND)?;
    refused(shim.kill("", SIGKILL))?.with(Code::NOT_FOUND)?;
    drop(task);
    Ok(())
}

fn turns(host: &Host) -> Result<()> {
    let (_task, shim) = idle(host)?;
    refused(shim.resume())?.with(precondition(host))?;
    granted(shim.pause())?;
    refused(shim.pause())?.with(precondition(host))?;
    granted(shim.resume())?;
    refused(shim.resume())?.with(precondition(host))?;
    is_running(&shim)
}

fn paused(host: &Host) -> Result<()> {
    let (_task, shim) = idle(host)?;
    granted(shim.exec("added", &["true"]))?;
    granted(shim.pause())?;
    refused(shim.delete(""))?.with(precondition(host))?;
    refused(shim.exec("more", &["true"]))?.with(precondition(host))?;
    // Added before, and not to be started now.
    refused(shim.start("added"))?;
    granted(shim.resume())?;
    is_running(&shim)
}

fn exec_id_taken(host: &Host) -> Result<()> {
    let (_task, shim) = idle(host)?;
    granted(shim.exec("one", &["sleep", "1000"]))?;
    refused(shim.exec("one", &["true"]))?.with(Code::ALREADY_EXISTS)?;
    granted(shim.start("one"))?;
    refused(shim.exec("one", &["true"]))?.with(Code::ALREADY_EXISTS)?;
    Ok(())
}

fn exec_not_started(host: &Host) -> Result<()> {
    let (_task, shim) = idle(host)?;
    granted(shim.exec("one", &["sleep", "1000"]))?;
    refused(shim.kill("one", SIGKILL))?.with(Code::FAILED_PRECONDITION)?;
    let state = granted(shim.state("one"))?.status.enum_value_or_default();
    ensure!(state == Status::CREATED, "expected  a process that is only added\ncame      {state:?}");
    granted(shim.delete("one"))?;
    refused(shim.state("one"))?.with(Code::NOT_FOUND)?;
    Ok(())
}

fn exec_started_once(host: &Host) -> Result<()> {
    let (_task, shim) = idle(host)?;
    granted(shim.exec("one", &["sleep", "1000"]))?;
    granted(shim.start("one"))?;
    refused(shim.start("one"))?.with(precondition(host))?;
    let state = granted(shim.state("one"))?.status.enum_value_or_default();
    ensure!(state == Status::RUNNING, "expected  the process to run\ncame      {state:?}");
    Ok(())
}

fn exec_deleted_once(host: &Host) -> Result<()> {
    let (_task, shim) = idle(host)?;
    granted(shim.exec("one", &["sh", "-c", "exec sleep 1000"]))?;
    granted(shim.start("one"))?;
    refused(shim.delete("one"))?.with(precondition(host))?;
    granted(shim.kill("one", SIGKILL))?;
    let status = granted(shim.wait("one"))?.exit_status;
    ensure!(status == 137, "expected  exit status 137\ncame      {status}");
    refused(shim.kill("one", SIGKILL))?.with(Code::NOT_FOUND)?;
    refused(shim.start("one"))?.with(precondition(host))?;
    granted(shim.delete("one"))?;
    refused(shim.delete("one"))?.with(Code::NOT_FOUND)?;
    is_running(&shim)
}

fn exec_of_missing_command(host: &Host) -> Result<()> {
    let (_task, shim) = idle(host)?;
    granted(shim.exec("one", &["no-such-command"]))?;
    let words = "exec: \"no-such-command\": executable file not found in $PATH";
    refused(shim.start("one"))?.saying(words)?.within(host.error_limit())?;
    granted(shim.delete("one"))?;
    is_running(&shim)
}

fn malformed_process(host: &Host) -> Result<()> {
    let (_task, shim) = idle(host)?;
    let malformed = [
        ("cut", "{\"args\": [\"true\"], \"cwd\":"),
        ("typed", "{\"args\": \"true\", \"cwd\": \"/\", \"user\": {\"uid\": 0, \"gid\": 0}}"),
        ("empty", "{\"args\": [], \"cwd\": \"/\", \"user\": {\"uid\": 0, \"gid\": 0}}"),
    ];
    for (id, process) in malformed {
        // By Exec already, or when it is started.
        let refusal = match shim.exec_of(id, process.as_bytes().to_vec()) {
            Err(refusal) => refusal,
            Ok(_) => refused(shim.start(id))?,
        };
        refusal.with(invalid(host))?;
    }
    is_running(&shim)
}

fn no_such_signal(host: &Host) -> Result<()> {
    let (_task, shim) = idle(host)?;
    refused(shim.kill("", 999))?.with(invalid(host))?;
    is_running(&shim)
}

fn many_wait(host: &Host) -> Result<()> {
    let (task, shim) = idle(host)?;
    let waiting = (0..5).map(|_| Shim::of(host, task.id())).collect::<Result<Vec<_>>>()?;
    std::thread::scope(|scope| {
        let threads: Vec<_> = waiting.iter().map(|shim| scope.spawn(|| shim.wait(""))).collect();
        granted(shim.kill("", SIGKILL))?;
        for thread in threads {
            let answer = thread.join().map_err(|_| anyhow::anyhow!("a thread panicked"))?;
            let status = granted(answer)?.exit_status;
            ensure!(status == 137, "expected  exit status 137\ncame      {status}");
        }
        Ok(())
    })
}

fn created_twice(host: &Host) -> Result<()> {
    let (task, shim) = idle(host)?;
    host.ctr(["tasks", "start", "--detach", task.id()]).run()?.fails_with("already exists")?;
    is_running(&shim)
}

fn create_again(host: &Host) -> Result<()> {
    let (_task, shim) = idle(host)?;
    refused(shim.create(|_| ()))?.with(Code::ALREADY_EXISTS)?;
    refused(shim.create(|request| request.stdout = "/elsewhere".into()))?.with(Code::ALREADY_EXISTS)?;
    is_running(&shim)
}

fn checkpoint(host: &Host) -> Result<()> {
    let (task, shim) = idle(host)?;
    let mut request = api::CheckpointTaskRequest::new();
    (request.id, request.path) = (task.id().into(), "/tmp/checkpoint".into());
    let answer = shim.call::<Empty>("Checkpoint", &request);
    refused(answer)?.with(Code::UNIMPLEMENTED)?.saying("checkpoint is not implemented")?;
    is_running(&shim)
}

/// As containerd 2.3 and later start a shim.
fn started_by_message(host: &Host) -> Result<()> {
    host.leaves_nothing(|| {
        let (bundle, id) = (scratch()?, host.new_id());
        let mut params = BootstrapParams::new();
        (params.instance_id, params.namespace) = (id.clone(), NAMESPACE.into());
        let shim = Cmd::new("env")
            .args(["--chdir"])
            .args([bundle.path()])
            .args([
                host.runtime().shim(),
                "-namespace",
                NAMESPACE,
                "-address",
                CONTAINERD,
                "-id",
                &id,
                "start",
            ])
            .input(params.write_to_bytes()?)
            .run()?;
        let result = BootstrapResult::parse_from_bytes(&shim.succeeds()?.stdout)?;
        let form = (result.version, result.protocol.as_str());
        ensure!(form == (3, "ttrpc"), "expected  version 3 by ttrpc\ncame      {form:?}");
        let mut shutdown = api::ShutdownRequest::new();
        shutdown.id = id.clone();
        granted(Shim::at(host, &result.address, &id)?.call::<Empty>("Shutdown", &shutdown))?;
        Ok(())
    })
}
