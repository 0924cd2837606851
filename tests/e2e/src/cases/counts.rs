//! What a unit of work costs in requests, exits, interrupts, packets and copied bytes.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use super::Case;
use super::programs::PATH;
use super::templates::state_dir;
use crate::command::Finished;
use crate::counts;
use crate::ctr::{Host, NAMESPACE};
use crate::docker::Client;
use crate::fixtures::{CONFIGURATION, Replaced, Root, scratch};

/// How often something is done again.
const TIMES: usize = 50;

pub(super) const CASES: &[Case] = &[
    Case::bulkhead("no_row_costs_a_fifth_more_than_before", counts::compare),
    Case::bulkhead("a_program_of_an_image_starts_again_without_a_request", start_again),
    Case::bulkhead("a_directory_of_an_image_is_listed_again_without_a_request", list_again),
    Case::bulkhead("what_a_program_has_written_in_pieces_is_read_without_a_request", read_back),
    Case::bulkhead(
        "a_program_of_a_directory_that_only_the_container_changes_starts_again_without_a_request",
        start_of_directory,
    ),
    Case::bulkhead(
        "a_program_of_a_read_only_root_of_docker_starts_again_without_a_request",
        start_of_dockers,
    ),
];

/// What starts a program, and opens a file.
const START: &str = "/bin/true; cat /etc/passwd > /dev/null";

/// The root is a snapshot of the image, which nobody but the container changes.
fn start_again(host: &Host) -> Result<()> {
    opens_nothing(&cost_of_repeating(host, START)?)
}

/// The root is a directory of the host, as docker gives it. The configuration says that nobody else writes there.
fn start_of_directory(host: &Host) -> Result<()> {
    let root = Root::mount(host)?;
    let _configured = Replaced::file(Path::new(CONFIGURATION), "exclusive_roots = true\n")?;
    let container = host.container().rootfs(&root.path().display().to_string()).flags(["--env", PATH]);
    let task = container.detach(&["sleep", "1000"])?;
    opens_nothing(&costs(NAMESPACE, task.id(), START, |command| task.exec(command))?)?;
    // What the container writes, everybody sees.
    task.exec(&["sh", "-c", "echo new > /etc/new"])?.succeeds()?;
    let text = fs::read_to_string(root.path().join("etc/new"))?;
    ensure!(text == "new\n", "expected  \"new\\n\" on the host\ncame      {text:?}");
    Ok(())
}

/// Nothing is configured: docker itself refuses to write into the root.
fn start_of_dockers(host: &Host) -> Result<()> {
    let client = Client::of(host)?;
    let made = client.container().flags(["--read-only"]).detach(&["sleep", "1000"])?;
    let id = made.inspect("/Id")?;
    let id = id.as_str().context("the id is no text")?;
    opens_nothing(&costs("moby", id, START, |command| made.exec(command))?)?;
    let directory = scratch()?;
    let file = directory.path().join("file");
    fs::write(&file, "")?;
    let copied = client.run(["cp", &file.display().to_string(), &format!("{}:/etc/new", made.name())])?;
    copied.fails_with("rootfs is marked read-only")?;
    Ok(())
}

fn opens_nothing(again: &BTreeMap<String, f64>) -> Result<()> {
    let all: f64 = again.values().sum();
    ensure!(all <= 20.0, "expected  about no requests\ncame      {again:?}");
    Ok(())
}

/// A directory in which one layer has files, and another one in which two layers have some.
fn list_again(host: &Host) -> Result<()> {
    let again = cost_of_repeating(host, "echo /etc/* /bin/* > /dev/null")?;
    let all: f64 = again.values().sum();
    ensure!(all <= 20.0, "expected  about no requests\ncame      {again:?}");
    Ok(())
}

/// Each piece of 1,500 bytes is one request, also if it crosses the end of a page. The cache has all of them.
fn read_back(host: &Host) -> Result<()> {
    let pieces = "head -c 30000 /dev/zero | dd of=/tmp/pieces bs=1500 2> /dev/null";
    let again = cost_of_repeating(host, &format!("{pieces}; cat /tmp/pieces > /dev/null"))?;
    let each = |name: &str| again.get(name).copied().unwrap_or_default() / TIMES as f64;
    let (writes, reads) = (each("WRITE"), each("READ"));
    ensure!(
        (19.0..=21.0).contains(&writes) && reads < 0.5,
        "expected  20 requests to write and none to read\ncame      {writes} and {reads} of {again:?}"
    );
    Ok(())
}

/// Has a container do something many times, after it was done once. Returns the requests.
fn cost_of_repeating(host: &Host, work: &str) -> Result<BTreeMap<String, f64>> {
    let task = host.container().detach(&["sleep", "1000"])?;
    task.exec(&["touch", "/bin/new"])?.succeeds()?;
    costs(NAMESPACE, task.id(), work, |command| task.exec(command))
}

/// Does the same with a container of this namespace of containerd, in which `exec` executes a command.
fn costs(
    namespace: &str,
    id: &str,
    work: &str,
    exec: impl Fn(&[&str]) -> Result<Finished>,
) -> Result<BTreeMap<String, f64>> {
    let control = state_dir(namespace, id)?.join("control.sock");
    let costs = |times: usize| {
        let before = counts::requests(&control)?;
        let script = format!("for it in $(seq {times}); do {work}; done");
        exec(&["sh", "-c", &script])?.succeeds()?;
        let since = |(name, count): (String, f64)| {
            let added = count - before.get(&name).unwrap_or(&0.0);
            (name, added)
        };
        Ok::<_, anyhow::Error>(counts::requests(&control)?.into_iter().map(since).collect())
    };
    costs(1)?;
    costs(TIMES)
}
