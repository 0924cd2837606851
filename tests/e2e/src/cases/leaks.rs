//! What containers leave behind on the host: nothing.

use std::thread;

use anyhow::{Result, anyhow};

use super::Case;
use crate::ctr::Host;

pub(super) const CASES: &[Case] = &[
    Case::both("twenty_runs_in_a_row_leave_nothing", twenty_in_a_row),
    Case::both("five_runs_at_once_leave_nothing", five_at_once),
    Case::both("a_failing_command_leaves_nothing", failing),
    Case::both("a_killed_container_leaves_nothing", killed),
    Case::both("a_container_with_mounts_leaves_nothing", with_mounts),
];

fn twenty_in_a_row(host: &Host) -> Result<()> {
    host.leaves_nothing(|| {
        for round in 1..=20 {
            let word = format!("round {round}");
            host.run(&["echo", &word])?.succeeds()?.prints(&format!("{word}\n"))?;
        }
        Ok(())
    })
}

fn five_at_once(host: &Host) -> Result<()> {
    host.leaves_nothing(|| {
        thread::scope(|scope| {
            let one = |number: i32| {
                let word = format!("number {number}");
                host.run(&["echo", &word])?.succeeds()?.prints(&format!("{word}\n"))?;
                Ok(())
            };
            let threads: Vec<_> = (1..=5).map(|number| scope.spawn(move || one(number))).collect();
            // All are waited for before the first failure is reported.
            let results: Vec<Result<()>> = threads
                .into_iter()
                .map(|it| it.join().unwrap_or_else(|_| Err(anyhow!("a thread panicked"))))
                .collect();
            results.into_iter().collect()
        })
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
        task.kill("SIGKILL")?;
        task.wait_for_state("STOPPED")?;
        task.delete()?;
        Ok(())
    })
}

fn with_mounts(host: &Host) -> Result<()> {
    let shared = crate::fixtures::scratch()?;
    std::fs::write(shared.path().join("file"), "")?;
    host.leaves_nothing(|| {
        let container = host.container().bind(shared.path(), "/one", "rbind:ro");
        let container = container.bind(&shared.path().join("file"), "/two", "rbind:rw");
        container.run(&["ls", "/one", "/two"])?.succeeds()?;
        Ok(())
    })
}
