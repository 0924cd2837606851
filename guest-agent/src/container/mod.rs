//! A container of the pod: create, start, exec, signal, pause, update, delete.

mod create;
mod delete;
mod error;
mod exec;
mod exec_table;
mod freeze;
mod host_sockets;
mod id;
mod instance;
mod network;
mod oom;
mod proc_mount;
mod process;
mod signal;
mod start;
mod stats;
mod stdio;
mod update;
mod update_record;

pub use self::{
    create::{Environment, Joined, Request},
    error::ContainerError,
    exec::ExecRequest,
    instance::Container,
    oom::OomCounts,
    process::Process,
    stdio::StreamIds,
};
