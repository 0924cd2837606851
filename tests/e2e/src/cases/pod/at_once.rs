//! Many pods that live at the same time, as those of a node that was rebooted.

use anyhow::{Result, ensure};

use super::super::Case;
use crate::ctr::Host;
use crate::fixtures::in_threads;
use crate::pods::{Container, Pod};

pub(in crate::cases) const CASES: &[Case] = &[
    Case::both("ten_of_two_containers_leave_nothing", |host| many(host, 10)),
    // Takes minutes where the host is emulated.
    Case::both("thirty_of_two_containers_leave_nothing", |host| many(host, 30)).by_whole_name_only(),
];

/// As many requests are under way at the same time.
const THREADS: usize = 5;

fn many(host: &Host, number: usize) -> Result<()> {
    host.pods()?.leave_nothing(host, || {
        let start = |number| Ok((number, Pod::plan(host).hostname(&format!("pod-{number}")).start()?));
        let pods = in_threads(THREADS, 0..number, start)?;
        let containers = in_threads(THREADS, &pods, |(number, pod)| {
            let start = |word| pod.container().env("WORD", word).start(&["sleep", "1000"]);
            Ok((number, [start("one")?, start("two")?]))
        })?;
        // All of them live at this moment.
        in_threads(THREADS, &containers, |(number, [one, two])| {
            let ask = |container: &Container<'_>, word| -> Result<()> {
                let said = container.sh("hostname; echo $WORD")?;
                said.succeeds()?.prints(&format!("pod-{number}\n{word}\n"))?;
                Ok(())
            };
            ask(one, "one")?;
            ask(two, "two")
        })?;
        let mut addresses = pods.iter().map(|(_, pod)| pod.ip()).collect::<Result<Vec<_>>>()?;
        addresses.sort();
        addresses.dedup();
        ensure!(addresses.len() == number, "expected  {number} addresses\ncame      {addresses:?}");
        in_threads(THREADS, pods, |(_, pod)| pod.remove())?;
        Ok(())
    })
}
