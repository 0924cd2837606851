//! The agent's service, by a guest that answers anything at any time: frames, messages in them, and what the shim
//! makes of those.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use bulkhead_agent_api::{MAX_PIDS, agent as messages, synchronization::Synchronization};
use bulkhead_fuzz::input::Input;
use bulkhead_vmm_api::SharedSocket;
use protobuf::{EnumOrUnknown, Message};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, DuplexStream, WriteHalf, duplex, split},
    task::{JoinSet, yield_now},
    time::{sleep, timeout},
};
use ttrpc::proto::{MESSAGE_TYPE_DATA, MESSAGE_TYPE_RESPONSE, MessageHeader, Response, Status};

use super::check_text;
use crate::{
    guest::{
        agent::{Agent, AgentError, HostSettings, NewContainer},
        clock_discipline::Correction,
        stats,
    },
    host::memory_volumes::MemoryVolume,
    io::events::Publisher,
    process::{error::TaskError, oom::OomReports},
    types::{error::chain, terminal::WindowSize},
};

/// Longer than any deadline of a call. The runtime's clock does not tick, it jumps.
const LATER: Duration = Duration::from_secs(3600);

/// Size of the connection's buffer for each direction: small, so that a few writes fill it.
const BUFFER: usize = 1 << 10;

/// More than the numbers of 64 devices and page sizes take.
const LARGEST_METRICS: usize = 64 << 10;

const ID: &str = "demo";

/// Performs the acts.
pub fn answers(bytes: &[u8]) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build()?;
    runtime.block_on(perform(&mut Input::new(bytes)))
}

async fn perform(input: &mut Input<'_>) -> Result<()> {
    let (shim, guest) = duplex(BUFFER);
    let agent = Agent::over(shim);
    let (mut requests, mut answers) = split(guest);
    // One that is deaf lets the shim's requests pile up.
    let is_deaf = input.below(8) == 0;
    let hearing = tokio::spawn(async move {
        if is_deaf {
            std::future::pending::<()>().await;
        }
        while requests.read(&mut [0; 4096]).await.is_ok_and(|count| count > 0) {}
    });
    let mut calls = JoinSet::new();
    while !input.is_over() {
        match input.below(8) {
            0..=2 => drop(calls.spawn(call(agent.clone(), input.u8()))),
            3 => say(&mut answers, input.bytes(16)).await,
            4 => {
                drop(timeout(Duration::from_secs(u64::from(input.u8())), std::future::pending::<()>()).await)
            }
            _ => say(&mut answers, &frame(input)).await,
        }
        // The shim's turn, in which it reads what was said.
        for _ in 0..4 {
            yield_now().await;
        }
    }
    // Those that have a deadline end by it.
    sleep(LATER).await;
    // The others with the guest.
    hearing.abort();
    drop(answers);
    let ended = async {
        while let Some(call) = calls.join_next().await {
            call??;
        }
        Ok(())
    };
    timeout(LATER, ended).await.context("a call outlives its guest")?
}

/// As much as the shim takes: one whose connection is closed hears no more.
async fn say(answers: &mut WriteHalf<DuplexStream>, bytes: &[u8]) {
    drop(timeout(Duration::from_secs(1), answers.write_all(bytes)).await);
}

/// A frame, most often of an answer.
fn frame(input: &mut Input<'_>) -> Vec<u8> {
    let type_ = match input.u8() {
        ..240 => MESSAGE_TYPE_RESPONSE,
        240..248 => MESSAGE_TYPE_DATA,
        other => other,
    };
    let stream_id = if input.u8() < 240 { 1 + 2 * u32::from(input.u8() % 16) } else { input.u32() };
    let payload = if input.u8() < 220 { response(input) } else { input.bytes(32).to_vec() };
    let length = if input.u8() < 240 { payload.len() as u32 } else { input.u32() };
    let header: Vec<u8> = MessageHeader { length, stream_id, type_, flags: input.u8() }.into();
    [header, payload].concat()
}

fn response(input: &mut Input<'_>) -> Vec<u8> {
    let mut response = Response::new();
    if input.u8() < 64 {
        let mut status = Status::new();
        status.code = EnumOrUnknown::from_i32(input.u32() as i32 % 20);
        status.message = text(input);
        response.status = Some(status).into();
    }
    response.payload = match input.below(6) {
        0 => encoded(&stats(input)),
        1 => {
            let mut pids = messages::ListPidsResponse::new();
            pids.pids = vec![input.u32(); usize::from(input.u16())];
            encoded(&pids)
        }
        2 => {
            let mut exit = messages::WaitProcessResponse::new();
            exit.exit_status = input.u32();
            encoded(&exit)
        }
        3 => encoded(&messages::OomCounts {
            kills: input.u64(),
            limit_hits: input.u64(),
            ..Default::default()
        }),
        4 => {
            let mut started = messages::StartSandboxResponse::new();
            started.kernel_release = text(input);
            encoded(&started)
        }
        _ => input.bytes(64).to_vec(),
    };
    encoded(&response)
}

fn encoded(message: &impl Message) -> Vec<u8> {
    message.write_to_bytes().unwrap_or_default()
}

fn text(input: &mut Input<'_>) -> String {
    let word = String::from_utf8_lossy(input.bytes(8)).into_owned();
    word.repeat(usize::from(input.u16() % 8192))
}

fn stats(input: &mut Input<'_>) -> messages::StatsResponse {
    let mut stats = messages::StatsResponse::parse_from_bytes(input.bytes(24)).unwrap_or_default();
    let memory = stats.memory.mut_or_insert_default();
    (memory.current, memory.max, memory.swap_max) = (input.u64(), input.u64(), input.u64());
    for _ in 0..input.u8() {
        memory.stat.insert(text(input), input.u64());
        let device = messages::IoStats { major: input.u8().into(), reads: input.u64(), ..Default::default() };
        stats.io.push(device);
        let pages = messages::HugepagesStats { page_size: text(input), ..Default::default() };
        stats.hugepages.push(pages);
    }
    stats
}

/// One of the shim's calls, and what must hold of what comes back.
async fn call(agent: Agent, which: u8) -> Result<()> {
    let result = match which % 33 {
        0 => {
            agent.start_sandbox(ID, "host", HostSettings::default()).await.map(|release| check_text(&release))
        }
        1 => agent.list_pids(ID).await.map(|pids| {
            ensure!(pids.len() <= MAX_PIDS, "{} processes", pids.len());
            Ok(())
        }),
        2 => agent.stats(ID).await.map(|stats| check_stats(&stats)),
        3 => agent.wait(ID).await.map(|end| {
            ensure!(end.exit.status <= 255, "an exit status of {}", end.exit.status);
            Ok(())
        }),
        4 => {
            OomReports::watch(ID, agent, Publisher::start(None, "default"));
            return Ok(());
        }
        other => rest(agent, other).await.map(Ok),
    };
    match result {
        Ok(checked) => checked,
        Err(error) => check_text(&chain(&TaskError::from(error))),
    }
}

/// The calls whose answers are empty, or a number of any size.
async fn rest(agent: Agent, which: u8) -> Result<(), AgentError> {
    match which {
        5 => {
            let container = NewContainer {
                id: ID,
                spec_json: b"{}",
                joined: &[],
                pause: false,
                no_new_keyring: false,
                host_sockets: &[],
            };
            agent.create_container(container, messages::Stdio::new()).await
        }
        6 => agent.configure_network(ID, messages::ConfigureNetworkRequest::new()).await,
        7 => agent.start_container(ID).await,
        8 => agent.exec_process(ID, "exec", b"{}".to_vec(), messages::Stdio::new()).await,
        9 => agent.signal(ID, 9, true).await,
        10 => agent.signal_exec(ID, "exec", 9).await,
        11 => agent.resize(ID, "", WindowSize { width: 80, height: 24 }).await,
        12 => agent.load_apparmor_policy("profile", b"policy").await,
        13 => agent.delete_container(ID).await,
        14 => agent.pause(ID).await,
        15 => agent.resume_at_last(ID).await,
        16 => agent.update(ID, 1, b"{}".to_vec()).await,
        17 => agent.write_volume("0-1", Vec::new()).await,
        18 => agent.read_clock().await.map(drop),
        19 => {
            let correction = Correction { step_ns: 1, rate_ppb: 1 };
            agent.adjust_clock(&correction, 37, Synchronization::NONE).await
        }
        20 => agent.follow_memory(128).await,
        21 => agent.wait_memory_demand(true).await,
        22 => {
            let (name, part) = (String::from("0-1"), PathBuf::new());
            let huge_pages = false;
            let volume = MemoryVolume { name, huge_pages, part, bytes: 1, mode: 0o777, uid: 0, gid: 0 };
            agent.make_volume(&volume).await
        }
        23 => agent.accept_host_socket(ID, 1, 7).await.map(drop),
        24 => agent.change_network(ID, messages::ChangeNetworkRequest::new()).await,
        25 => agent.remove_network(ID, [0; 6]).await,
        26 => agent.find_disk("8:16").await.map(drop),
        27 => agent.unmount_disk("root-1").await,
        28 => agent.undo_update_without_deadline(ID, 1).await,
        29 => agent.change_routing(ID, messages::ChangeRoutingRequest::new()).await,
        30 => {
            let socket = SharedSocket { major: 8, minor: 1, inode: 2 };
            agent.listen_host_socket(1, Path::new("volume/socket"), &socket, true).await
        }
        31 => agent.close_host_socket(1).await,
        _ => agent.shutdown(LATER / 2).await,
    }
}

fn check_stats(stats: &messages::StatsResponse) -> Result<()> {
    let pod = stats::sum(&[stats.clone(), stats.clone()]);
    for (stats, is_unified) in [(stats, true), (stats, false), (&pod, true), (&pod, false)] {
        let size = stats::encode(stats, is_unified)?.value.len();
        ensure!(size <= LARGEST_METRICS, "metrics of {size} bytes");
    }
    Ok(())
}
