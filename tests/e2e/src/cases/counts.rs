//! What a unit of work costs in requests, exits, interrupts, packets and copied bytes.

use anyhow::{Result, ensure};

use super::Case;
use super::templates::state_dir;
use crate::counts;
use crate::ctr::{Host, NAMESPACE};

pub(super) const CASES: &[Case] = &[
    Case::bulkhead("no_row_costs_a_fifth_more_than_before", counts::compare),
    Case::bulkhead("a_program_of_an_image_starts_again_without_a_request_to_open_a_file", start_again),
];

/// The root is a snapshot of the image, which nobody but the container changes.
fn start_again(host: &Host) -> Result<()> {
    const TIMES: usize = 50;
    let task = host.container().detach(&["sleep", "1000"])?;
    let control = state_dir(NAMESPACE, task.id())?.join("control.sock");
    let costs = |times: usize| {
        let before = counts::requests(&control)?;
        let script = format!("for it in $(seq {times}); do /bin/true; cat /etc/passwd > /dev/null; done");
        task.exec(&["sh", "-c", &script])?.succeeds()?;
        let since = |(name, count): (&String, &f64)| (name.clone(), count - before.get(name).unwrap_or(&0.0));
        Ok::<_, anyhow::Error>(counts::requests(&control)?.iter().map(since).collect::<Vec<_>>())
    };
    costs(1)?;
    let again = costs(TIMES)?;
    let all: f64 = again.iter().map(|(_, count)| count).sum();
    let of = |opcode: &str| again.iter().find(|(name, _)| name == opcode).map_or(0.0, |(_, count)| *count);
    // Linux asks for the capabilities of each file that is executed, and caches no answer.
    let programs = (2 * TIMES) as f64;
    ensure!(
        of("OPEN") == 0.0 && of("RELEASE") == 0.0 && all <= programs + 20.0,
        "expected  no OPEN, no RELEASE, and about {programs} requests\ncame      {again:?}"
    );
    Ok(())
}
