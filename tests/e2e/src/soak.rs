//! Many containers, some of which meet a fault. What lives on must not use more and more meanwhile:
//! containerd, a container that runs all the while, and the host's table of mounts.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;

use crate::ctr::Host;
use crate::faults::calls::{CallFault, FaultyShim, KINDS};
use crate::faults::lifecycle::{FaultInjector, NoFault};
use crate::faults::processes::{MOMENTS, SignalInjector, VMM};
use crate::faults::resources::{Lack, Shortage};
use crate::faults::{Fault, TestBed};
use crate::fixtures::{at_once, noise};
use crate::survivors::{Usage, mounts};

/// One container in so many meets a fault.
const ONE_IN: u8 = 5;
/// So many containers live at a time. When they are gone, a sample is taken.
const AT_ONCE: usize = 2;
/// The host is compared with what it was before after so many containers.
const COMPARED: u32 = 24;
/// Random bytes that one container takes.
const DICE: usize = 4;

/// How much more descriptors, and how much more memory, the last quarter of a run may have than the second one. Go's
/// runtime gives memory back late, and a guest at rest still writes to a page now and then.
const MORE_DESCRIPTORS: u64 = 2;
const MORE_MEMORY_KIB: [(&str, u64); 3] = [("containerd", 8 << 10), ("shim", 512), ("VMM", 2 << 10)];

/// What lives on uses, after some containers.
struct Sample {
    mounts: u64,
    usage: Vec<Usage>,
}

/// Runs so many containers, a few at a time, or fewer if the time is up before. Tells `report` a line about each fault
/// and each sample. Returns how many there were. An error if a fault ended other than expected, or if something has
/// grown.
pub(crate) fn run(host: &Host, cycles: u32, limit: Duration, report: &mut dyn FnMut(&str)) -> Result<u32> {
    let deadline = Instant::now() + limit;
    let bed = TestBed::prepare(host)?;
    let shim = FaultyShim::install(host)?;
    let dice = noise(usize::try_from(cycles)? * DICE);
    let all: Vec<_> = (1..=cycles).zip(dice.chunks_exact(DICE)).collect();
    let mut samples = Vec::new();
    let mut failures = 0;
    let mut done = 0;
    for some in all.chunks(AT_ONCE) {
        let last = some.last().map_or(0, |(cycle, _)| *cycle);
        let outcomes = at_once(some.iter().copied(), |(cycle, dice)| Ok(one(&bed, &shim, cycle, dice)))?;
        let is_last = last == cycles || Instant::now() >= deadline;
        let compared = if last % COMPARED == 0 || is_last { bed.expect_as_before() } else { Ok(()) };
        let compared = compared.map_err(|error| format!("cycle {last} | failure | {}", in_one_line(&error)));
        for line in outcomes.into_iter().chain([compared.map(|()| None)]) {
            failures += u32::from(line.is_err());
            if let Some(line) = line.unwrap_or_else(Some) {
                report(&line);
            }
        }
        let sample = Sample { mounts: mounts()?, usage: bed.usage()? };
        report(&sample.line(last)?);
        samples.push(sample);
        done = last;
        if is_last {
            break;
        }
    }
    ensure!(failures == 0, "expected  all containers as they should be\ncame      {failures} failures");
    expect_flat(&samples)?;
    Ok(done)
}

/// Runs one container. What there is to say about it: nothing, if it met no fault. An error is a line, too.
fn one(
    bed: &TestBed<'_>,
    shim: &FaultyShim,
    cycle: u32,
    dice: &[u8],
) -> std::result::Result<Option<String>, String> {
    let (fault, mut injector) = roll(dice, bed.host(), shim);
    let shown = fault.as_ref().map_or("no fault".to_owned(), Fault::to_string);
    let lived = bed.live(injector.as_mut()).and_then(|messages| Ok((messages, injector.was_injected()?)));
    match lived {
        Ok((messages, true)) => {
            Ok(Some(format!("cycle {cycle} | {shown} | {}", messages.join("; ").replace('\n', " "))))
        }
        Ok((messages, false)) if messages.is_empty() => Ok(None),
        Ok((messages, false)) => Err(format!("cycle {cycle} | failure | {shown}: {messages:?}")),
        Err(error) => Err(format!("cycle {cycle} | failure | {shown}: {}", in_one_line(&error))),
    }
}

fn in_one_line(error: &anyhow::Error) -> String {
    format!("{error:#}").replace('\n', " ")
}

/// Which fault the next container meets, if any.
fn roll<'s>(dice: &[u8], host: &Host, shim: &'s FaultyShim) -> (Option<Fault>, Box<dyn FaultInjector + 's>) {
    let [first, second, third, fourth] = *dice else { return (None, Box::new(NoFault)) };
    if first % ONE_IN != 0 {
        return (None, Box::new(NoFault));
    }
    let moment = MOMENTS[usize::from(third) % MOMENTS.len()];
    let program = host.runtime().shim();
    let killed = |program: &'static str| -> (Option<Fault>, Box<dyn FaultInjector + 's>) {
        let injector = SignalInjector::new(program, Signal::SIGKILL, None, moment);
        (Some(Fault::new(program, "SIGKILL", moment)), Box::new(injector))
    };
    match second % 5 {
        0 => killed(VMM),
        1 => killed(program),
        2 => {
            let lack = Lack::Descriptors { shim: program, more: u64::from(fourth % 4) };
            (Some(Fault::new(program, "EMFILE", moment)), Box::new(Shortage::of(lack, moment)))
        }
        3 => {
            let lack = Lack::OfCgroup { file: "memory.max", value: "1M" };
            (Some(Fault::new("cgroup", "memory.max = 1M", moment)), Box::new(Shortage::of(lack, moment)))
        }
        _ => {
            let (call, effect) = KINDS[usize::from(third) % KINDS.len()];
            let fault = CallFault { call, effect, number: 1 + u32::from(fourth % 8) };
            (Some(fault.fault()), Box::new(shim.injector(fault)))
        }
    }
}

impl Sample {
    /// `sample | CYCLE | mounts N | PROCESS N descriptors N KiB | ...`
    fn line(&self, cycle: u32) -> Result<String> {
        let mut line = format!("sample | {cycle} | mounts {}", self.mounts);
        for Usage { name, descriptors, memory_kib } in &self.usage {
            write!(line, " | {name} {descriptors} descriptors {memory_kib} KiB").context("cannot happen")?;
        }
        Ok(line)
    }
}

/// Expects that the last quarter of the samples is like the second one. The first quarter warms up.
fn expect_flat(samples: &[Sample]) -> Result<()> {
    let quarter = samples.len() / 4;
    let (Some(second), Some(last)) = (samples.get(quarter..2 * quarter), samples.get(3 * quarter..)) else {
        return Ok(());
    };
    let grows = |what: &str, more: u64, value: &dyn Fn(&Sample) -> Option<u64>| {
        let middle = |samples: &[Sample]| {
            let mut values: Vec<_> = samples.iter().filter_map(value).collect();
            values.sort_unstable();
            values.get(values.len() / 2).copied()
        };
        let (before, after) = middle(second).zip(middle(last)).with_context(|| format!("no {what}"))?;
        ensure!(
            after <= before + more,
            "expected  no more than {before} + {more} {what} at the end\ncame      {after}"
        );
        Ok(())
    };
    grows("mounts", 0, &|sample| Some(sample.mounts))?;
    for (index, (name, more)) in MORE_MEMORY_KIB.iter().enumerate() {
        let descriptors = |sample: &Sample| sample.usage.get(index).map(|usage| usage.descriptors);
        grows(&format!("descriptors of {name}"), MORE_DESCRIPTORS, &descriptors)?;
        let memory = |sample: &Sample| sample.usage.get(index).map(|usage| usage.memory_kib);
        grows(&format!("KiB of {name}"), *more, &memory)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(memory_kib: impl Fn(u64) -> u64, mounts: impl Fn(u64) -> u64) -> Vec<Sample> {
        let usage = |cycle| {
            MORE_MEMORY_KIB.map(|(name, _)| Usage { name, descriptors: 10, memory_kib: memory_kib(cycle) })
        };
        (0..100).map(|cycle| Sample { mounts: mounts(cycle), usage: usage(cycle).to_vec() }).collect()
    }

    #[test]
    fn what_warms_up_is_flat_and_what_grows_is_not() {
        expect_flat(&samples(|cycle| 1000 * cycle.min(20), |_| 7)).unwrap();
        let error = expect_flat(&samples(|cycle| 20 * cycle, |_| 7)).unwrap_err().to_string();
        assert!(error.contains("KiB of shim"), "{error}");
        let error = expect_flat(&samples(|_| 5, |cycle| 7 + cycle / 60)).unwrap_err().to_string();
        assert!(error.contains("mounts"), "{error}");
    }

    #[test]
    fn a_sample_is_a_line() {
        let sample = &samples(|_| 5, |_| 7)[0];
        assert!(
            sample.line(3).unwrap().starts_with("sample | 3 | mounts 7 | containerd 10 descriptors 5 KiB |")
        );
    }
}
