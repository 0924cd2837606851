//! What containers leave behind on the host: nothing.

use anyhow::Result;

use super::Case;
use crate::ctr::Host;
use crate::fixtures::{at_once, scratch};

pub(super) const CASES: &[Case] = &[
    Case::both("ten_runs_in_a_row_leave_nothing", ten_in_a_row),
    Case::both("five_runs_at_once_leave_nothing", five_at_once),
    Case::both("a_failing_command_leaves_nothing", failing),
    Case::both("a_killed_container_leaves_nothing", killed),
    Case::both("a_container_with_mounts_leaves_nothing", with_mounts),
];

fn ten_in_a_row(host: &Host) -> Result<()> {
    host.leaves_nothing(|| {
        for round in 1..=10 {
            let word = format!("round {round}");
            host.run(&["echo", &word])?.succeeds()?.prints(&format!("{word}\n"))?;
        }
        Ok(())
    })
}

fn five_at_once(host: &Host) -> Result<()> {
    host.leaves_nothing(|| {
        at_once(1..=5, |number| {
            let word = format!("number {number}");
            host.run(&["echo", &word])?.succeeds()?.prints(&format!("{word}\n"))?;
            Ok(())
        })?;
        Ok(())
    })
}

fn failing(host: &Host) -> Result<()> {
    host.leaves_nothing(|| {
        host.sh("exit 7")?.exits(7)?;
        Ok(())
    })
}

fn killed(host: &Host) -> Result<()> {
    host.leaves_nothing(|| {
        let task = host.container().detach(&["sh", "-c", "sleep 1000 & sleep 1000"])?;
        task.dies()
    })
}

fn with_mounts(host: &Host) -> Result<()> {
    let shared = scratch()?;
    std::fs::write(shared.path().join("file"), "")?;
    host.leaves_nothing(|| {
        let container = host.container().bind(shared.path(), "/one", "rbind:ro");
        let container = container.bind(&shared.path().join("file"), "/two", "rbind:rw");
        container.run(&["ls", "/one", "/two"])?.succeeds()?;
        Ok(())
    })
}
