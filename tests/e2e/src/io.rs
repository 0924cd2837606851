//! Compares the files and the network of a container with those of a container of runc, and with those of a guest of
//! QEMU that has the same kernel.
//!
//! All three run all the time, each with a root, a volume, a block volume and a network of its own. They take turns,
//! and each round begins with another one, so that what disturbs the host for a while disturbs all. Whoever does the
//! work measures its time, unless it is a server: then its client does, which is on the host.

mod guest;
mod side;
mod work;

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde::Serialize;

use crate::bench::facts;
use crate::containerd::Version;
use crate::ctr::{Host, Runtime};
use crate::network::Bridge;
use guest::Guest;
use side::{Place, Side, make_database};
use work::{WORKS, Work};

/// The sides, in their order here.
const SIDES: [&str; 3] = ["runc", "QEMU", "Bulkhead"];

/// What was measured. `cargo xtask bench io` reads it.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    facts: BTreeMap<&'static str, String>,
    rows: Vec<Row>,
}

/// A kind of work.
#[derive(Debug, Serialize)]
struct Row {
    what: &'static str,
    runc: Samples,
    qemu: Samples,
    bulkhead: Samples,
}

/// What was measured of one side, in the order of the rounds.
#[derive(Debug, Default, Serialize)]
struct Samples {
    ms: Vec<f64>,
    /// Exits of the vCPUs meanwhile. Empty if there is no VM.
    exits: Vec<f64>,
}

/// Takes `rounds` samples of all work of all sides, after a round that does not count: it fills the caches.
pub(crate) fn compare(archive: &Path, rounds: u32) -> Result<Report> {
    ensure!(rounds > 0, "no round, no numbers");
    let runc = Host::prepare(Runtime::Runc, Version::of_containerd()?, archive)?;
    let bulkhead = runc.with(Runtime::Bulkhead);
    eprintln!("making a database and the files");
    let database = make_database(&runc)?;
    let place = |number| Place::make(number, &database);
    let places = [place(2)?, place(3)?, place(4)?];
    let bridge = Bridge::new()?;
    let namespaces = [bridge.namespace(places[0].number)?, bridge.namespace(places[1].number)?];
    eprintln!("starting runc's container");
    let runc_side = Side::of_container(&runc, &places[0], &namespaces[0]).context(SIDES[0])?;
    eprintln!("starting Bulkhead's container");
    let bulkhead_side = Side::of_container(&bulkhead, &places[1], &namespaces[1]).context(SIDES[2])?;
    let memory_mib = bulkhead_side.memory_mib()?;
    eprintln!("booting QEMU's guest");
    let qemu_side = Side::of_guest(&runc, &places[2], &bridge, memory_mib).context(SIDES[1])?;
    let sides = [runc_side, qemu_side, bulkhead_side];
    let mut rows: Vec<Row> = WORKS.iter().map(Row::of).collect();
    for round in 0..=rounds {
        eprintln!("round {round} of {rounds}{}", if round == 0 { ", which does not count" } else { "" });
        for (work, row) in WORKS.iter().zip(&mut rows) {
            let mut turns = [0, 1, 2];
            turns.rotate_left(round as usize % sides.len());
            let mut shown = [0.0; 3];
            for turn in turns {
                let ms = sample(work, &sides[turn], round, row.samples(turn))
                    .with_context(|| format!("{}, of {}", work.what, SIDES[turn]))?;
                shown[turn] = ms;
            }
            eprintln!("  {}: {} ms", work.what, shown.map(|ms| format!("{ms:.1}")).join(", "));
        }
    }
    let mut facts = facts()?;
    // These are of VMs that this does not boot.
    facts.remove("booted VMs");
    facts.insert("QEMU's guest", Guest::shape(memory_mib)?);
    facts.insert("virtiofsd", Guest::virtiofsd_version()?);
    Ok(Report { facts, rows })
}

/// Has one side do the work. Returns the milliseconds that it took.
fn sample(work: &Work, side: &Side<'_>, round: u32, samples: &mut Samples) -> Result<f64> {
    (work.prepare)(side, round).context("what comes before it")?;
    let before = side.exits()?;
    let ms = (work.run)(side)?.as_secs_f64() * 1e3;
    let after = side.exits()?;
    if round > 0 {
        samples.ms.push(ms);
        samples.exits.extend(before.zip(after).map(|(before, after)| after - before));
    }
    Ok(ms)
}

impl Row {
    fn of(work: &Work) -> Self {
        let [runc, qemu, bulkhead] = [(); 3].map(|()| Samples::default());
        Self { what: work.what, runc, qemu, bulkhead }
    }

    /// Those of a side, in the order of the sides.
    fn samples(&mut self, side: usize) -> &mut Samples {
        match side {
            0 => &mut self.runc,
            1 => &mut self.qemu,
            _ => &mut self.bulkhead,
        }
    }
}
