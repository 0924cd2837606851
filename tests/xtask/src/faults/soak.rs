//! The section about many containers, and its pictures.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use anyhow::{Context, Result, ensure};

use super::picture::{Curve, draw};

/// The processes that live on, in the order of the pictures.
const PROCESSES: [&str; 3] = ["containerd", "shim", "VMM"];

/// What a soak has printed.
#[derive(Debug, Default)]
pub(super) struct Soak {
    /// How many containers there were.
    cycles: u32,
    mounts: Vec<f64>,
    /// Of each process, by its name.
    descriptors: BTreeMap<String, Vec<f64>>,
    /// MiB.
    memory: BTreeMap<String, Vec<f64>>,
    faults: usize,
    failures: Vec<String>,
}

impl Soak {
    /// Reads the lines `sample | CYCLE | mounts N | PROCESS N descriptors N KiB | ...` and `cycle N | ...`.
    pub(super) fn read(output: &str) -> Result<Self> {
        let mut soak = Self::default();
        for line in output.lines() {
            let fields: Vec<_> = line.split(" | ").collect();
            match fields.as_slice() {
                ["sample", cycle, mounts, processes @ ..] => {
                    let context = || format!("cannot understand {line:?}");
                    soak.cycles = cycle.parse().with_context(context)?;
                    soak.sample(mounts, processes).with_context(context)?;
                }
                [cycle, "failure", ..] if cycle.starts_with("cycle ") => soak.failures.push(line.to_owned()),
                [cycle, ..] if cycle.starts_with("cycle ") => soak.faults += 1,
                _ => {}
            }
        }
        ensure!(!soak.mounts.is_empty(), "no container was run");
        Ok(soak)
    }

    fn sample(&mut self, mounts: &str, processes: &[&str]) -> Result<()> {
        self.mounts.push(mounts.strip_prefix("mounts ").context("no mounts")?.parse()?);
        for process in processes {
            let [name, descriptors, "descriptors", kib, "KiB"] = process.split(' ').collect::<Vec<_>>()[..]
            else {
                anyhow::bail!("no usage of a process: {process:?}");
            };
            self.descriptors.entry(name.to_owned()).or_default().push(descriptors.parse()?);
            self.memory.entry(name.to_owned()).or_default().push(kib.parse::<f64>()? / 1024.0);
        }
        Ok(())
    }

    /// The pictures, by the names of their files.
    pub(super) fn pictures(&self) -> [(&'static str, String); 3] {
        let below = format!("after {} containers", self.cycles);
        let curves = |values: &BTreeMap<String, Vec<f64>>, what: &str| -> String {
            let curve = |name: &&str| {
                let values = values.get(*name)?.clone();
                Some(Curve { title: format!("{name}: {what}"), values })
            };
            draw(&PROCESSES.iter().filter_map(curve).collect::<Vec<_>>(), &below)
        };
        let mounts = Curve { title: "mounts of the host".into(), values: self.mounts.clone() };
        [
            ("soak-descriptors.svg", curves(&self.descriptors, "open descriptors")),
            ("soak-memory.svg", curves(&self.memory, "anonymous memory, MiB")),
            ("soak-mounts.svg", draw(&[mounts], &below)),
        ]
    }

    /// What the page says of it. `run`: of which commit, and when.
    pub(super) fn section(&self, run: &str) -> Result<String> {
        let mut text = format!(
            "{run}: {} containers, two at a time, of which {} met a fault at random; {} not as expected.\n\
             The samples were taken when both were gone.\n\
             The table has the median of the second quarter of the run and that of its last quarter; the first\n\
             quarter warms up. containerd is the one process of all containers. The shim and the VMM are those of\n\
             a container that runs all the while. The memory of the VMM includes that of its guest.\n\n\
             | what | second quarter | last quarter |\n|---|---|---|\n",
            self.cycles,
            self.faults,
            self.failures.len()
        );
        let mut row = |what: &str, values: &[f64]| -> Result<()> {
            let quarter = values.len() / 4;
            let (Some(second), Some(last)) = (values.get(quarter..2 * quarter), values.get(3 * quarter..))
            else {
                return Ok(());
            };
            let (second, last) = (median(second), median(last));
            writeln!(text, "| {what} | {second:.1} | {last:.1} |")?;
            Ok(())
        };
        row("mounts of the host", &self.mounts)?;
        for name in PROCESSES {
            row(&format!("descriptors of {name}"), self.descriptors.get(name).map_or(&[], Vec::as_slice))?;
            row(&format!("memory of {name}, MiB"), self.memory.get(name).map_or(&[], Vec::as_slice))?;
        }
        for (name, alt) in [("descriptors", "descriptors"), ("memory", "memory"), ("mounts", "mounts")] {
            write!(text, "\n![{alt} after each container](pictures/soak-{name}.svg)\n")?;
        }
        for failure in &self.failures {
            write!(text, "\nNot as expected: {failure}\n")?;
        }
        Ok(text)
    }
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn output(cycles: u32) -> String {
        let mut output = String::from("cycle 1 | VMM | SIGKILL | Start | \n");
        for cycle in 1..=cycles {
            let _ = writeln!(
                output,
                "sample | {cycle} | mounts 40 | containerd 12 descriptors 20480 KiB | shim 9 descriptors 1024 KiB"
            );
        }
        output
    }

    #[test]
    fn samples_become_medians_and_pictures() {
        let soak = Soak::read(&output(8)).unwrap();
        let text = soak.section("Commit abc").unwrap();
        assert!(text.contains("8 containers, two at a time, of which 1 met a fault"), "{text}");
        assert!(text.contains("| memory of containerd, MiB | 20.0 | 20.0 |"), "{text}");
        assert!(soak.pictures().iter().all(|(_, picture)| picture.contains("<polyline")));
    }

    #[test]
    fn a_failure_is_named() {
        let soak = Soak::read(&format!("{}cycle 3 | failure | no fault: hung\n", output(4))).unwrap();
        assert!(soak.section("x").unwrap().contains("Not as expected: cycle 3 | failure | no fault: hung"));
        assert!(Soak::read("nothing").is_err());
    }
}
