//! Runs the targets as plain tests, on the saved programs and on generated ones. The target `net` needs root, for a
//! network namespace and a tap device in it. No target needs KVM.

use std::io;

/// Runs the saved programs of a target, and some generated ones.
fn run(name: &str) -> io::Result<()> {
    bulkhead_fuzz::run_plain(env!("CARGO_MANIFEST_DIR"), bulkhead_vmm_fuzz::TARGETS, name)
}

#[test]
fn queue() -> io::Result<()> {
    run("queue")
}

#[test]
fn registers() -> io::Result<()> {
    run("registers")
}

#[test]
fn pci() -> io::Result<()> {
    run("pci")
}

#[test]
fn vsock() -> io::Result<()> {
    run("vsock")
}

#[test]
fn file_server() -> io::Result<()> {
    run("fs")
}

#[test]
fn net() -> io::Result<()> {
    run("net")
}

#[test]
fn control_socket() -> io::Result<()> {
    run("control_socket")
}

#[test]
fn balloon() -> io::Result<()> {
    run("balloon")
}

#[test]
fn mem() -> io::Result<()> {
    run("mem")
}

#[test]
fn block() -> io::Result<()> {
    run("block")
}

#[test]
fn fetch() -> io::Result<()> {
    run("fetch")
}

#[test]
fn restore() -> io::Result<()> {
    run("restore")
}
