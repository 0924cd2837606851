//! A guest whose agent does what it is asked up to some request. Then it answers no more, or ends, or answers nonsense.

use std::path::Path;

use anyhow::Result;

use super::lifecycle::{FaultInjector, Step};
use super::{Fault, TestBed};
use crate::fixtures::{CONFIGURATION, Replaced, installed};
use crate::hostile_agent::{ANSWERS, DIES, FREEZES, INITRAMFS};

/// The agent's requests in the life of a container.
const REQUESTS: [&str; 6] =
    ["StartSandbox", "CreateContainer", "StartContainer", "ExecProcess", "SignalProcess", "Shutdown"];

pub(super) fn try_all(bed: &mut TestBed<'_>) -> Result<()> {
    for (answer, _) in ANSWERS {
        try_fault(bed, &Fault::new("agent", &format!("{answer} answers"), "StartSandbox"), answer)?;
    }
    for (effect, word) in [("ends", DIES), ("no more answers", FREEZES)] {
        for request in REQUESTS {
            try_fault(bed, &Fault::new("agent", effect, request), &format!("{word}{request}"))?;
        }
    }
    Ok(())
}

fn try_fault(bed: &mut TestBed<'_>, fault: &Fault, role: &str) -> Result<()> {
    let initramfs = installed(INITRAMFS)?;
    let configuration = format!("initramfs = {initramfs:?}\ntemplates = false\n");
    let mut agent = FakeAgent { role: role.to_owned(), replaced: None, configuration };
    bed.try_fault(fault, &mut agent)?;
    Ok(())
}

/// The agent in the initramfs plays the role that is in the container's id.
struct FakeAgent {
    role: String,
    configuration: String,
    replaced: Option<Replaced>,
}

impl FaultInjector for FakeAgent {
    fn role(&self) -> Option<&str> {
        Some(&self.role)
    }

    fn before(&mut self, _: &str, step: Step) -> Result<()> {
        self.replaced = match step {
            Step::Create => Some(Replaced::file(Path::new(CONFIGURATION), &self.configuration)?),
            _ => None,
        };
        Ok(())
    }

    fn end(&mut self) -> Result<()> {
        self.replaced = None;
        Ok(())
    }

    fn was_injected(&self) -> Result<bool> {
        Ok(true)
    }
}
