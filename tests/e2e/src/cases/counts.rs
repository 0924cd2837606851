//! What a unit of work costs in requests, exits, interrupts, packets and copied bytes.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};

use super::Case;
use super::templates::state_dir;
use crate::counts;
use crate::ctr::{Host, NAMESPACE};

/// How often something is done again.
const TIMES: usize = 50;

pub(super) const CASES: &[Case] = &[
    Case::bulkhead("no_row_costs_a_fifth_more_than_before", counts::compare),
    Case::bulkhead("a_program_of_an_image_starts_again_without_a_request_to_open_a_file", start_again),
    Case::bulkhead("a_directory_of_an_image_is_listed_again_without_a_request", list_again),
];

/// The root is a snapshot of the image, which nobody but the container changes.
fn start_again(host: &Host) -> Result<()> {
    let again = cost_of_repeating(host, "/bin/true; cat /etc/passwd > /dev/null")?;
    let all: f64 = again.values().sum();
    // Linux asks for the capabilities of each file that is executed, and caches no answer.
    let programs = (2 * TIMES) as f64;
    ensure!(
        of(&again, "OPEN") == 0.0 && of(&again, "RELEASE") == 0.0 && all <= programs + 20.0,
        "expected  no OPEN, no RELEASE, and about {programs} requests\ncame      {again:?}"
    );
    Ok(())
}

/// A directory in which one layer has files, and another one in which two layers have some.
fn list_again(host: &Host) -> Result<()> {
    let again = cost_of_repeating(host, "echo /etc/* /bin/* > /dev/null")?;
    let all: f64 = again.values().sum();
    ensure!(all <= 20.0, "expected  about no requests\ncame      {again:?}");
    Ok(())
}

/// Has a container do something many times, after it was done once. Returns the requests.
fn cost_of_repeating(host: &Host, work: &str) -> Result<BTreeMap<String, f64>> {
    let task = host.container().detach(&["sleep", "1000"])?;
    task.exec(&["touch", "/bin/new"])?.succeeds()?;
    let control = state_dir(NAMESPACE, task.id())?.join("control.sock");
    let costs = |times: usize| {
        let before = counts::requests(&control)?;
        let script = format!("for it in $(seq {times}); do {work}; done");
        task.exec(&["sh", "-c", &script])?.succeeds()?;
        let since = |(name, count): (String, f64)| {
            let added = count - before.get(&name).unwrap_or(&0.0);
            (name, added)
        };
        Ok::<_, anyhow::Error>(counts::requests(&control)?.into_iter().map(since).collect())
    };
    costs(1)?;
    costs(TIMES)
}

fn of(requests: &BTreeMap<String, f64>, opcode: &str) -> f64 {
    requests.get(opcode).copied().unwrap_or_default()
}
