//! Faults: something goes wrong at a chosen moment in the life of a container. Each request then ends in time and says
//! what went wrong, each process has the right status, and nothing is left on the host. `bulkhead-e2e faults` tries
//! them all and prints a line for each; `cargo xtask faults` makes docs/reliability.md of the lines.

mod agent;
pub(crate) mod calls;
mod daemon;
pub(crate) mod lifecycle;
pub(crate) mod processes;
pub(crate) mod resources;

use std::collections::BTreeSet;
use std::fmt;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;

use crate::api::messages::Status;
use crate::api::{Api, ContainerSource};
use crate::ctr::{Host, Task};
use crate::faults::lifecycle::{BOUND, COMMAND, FaultInjector, Lifecycle};
use crate::snapshot::Snapshot;
use crate::survivors::{CONTAINERD, Survivors, Usage};

/// How long the survivors may take to close the descriptors of what has ended.
const CLOSES: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(100);

/// Faults of one sort.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Part {
    /// A system call of the shim fails, or kills it.
    Calls,
    /// The shim or the VMM is killed or stopped.
    Processes,
    /// containerd is restarted or killed.
    Containerd,
    /// The agent in the guest ends, stops to answer, or answers nonsense.
    Agent,
    /// The host lacks something: room in /run, descriptors, memory, an answer of a file system.
    Resources,
}

impl Part {
    fn try_all(self, bed: &mut TestBed<'_>, names: &[String]) -> Result<()> {
        match self {
            Self::Calls => calls::try_all(bed, names),
            Self::Processes => processes::try_all(bed),
            Self::Containerd => daemon::try_all(bed),
            Self::Agent => agent::try_all(bed),
            Self::Resources => resources::try_all(bed),
        }
    }
}

/// What goes wrong, in words.
#[derive(Clone, Debug)]
pub(crate) struct Fault {
    /// Whom it strikes, such as a system call or a process.
    pub(crate) what: String,
    /// How, such as an error or a signal.
    pub(crate) effect: String,
    /// When: before which request, or at which call.
    pub(crate) moment: String,
}

impl Fault {
    pub(crate) fn new(what: &str, effect: &str, moment: impl fmt::Display) -> Self {
        Self { what: what.to_owned(), effect: effect.to_owned(), moment: moment.to_string() }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Fault { what, effect, moment } = self;
        write!(f, "{what} | {effect} | {moment}")
    }
}

/// A host on which a container lives beside those that meet faults, and what the host looked like at first.
pub(crate) struct TestBed<'h> {
    host: &'h Host,
    api: Api,
    source: ContainerSource,
    neighbour: Task<'h>,
    before: Before,
    failures: usize,
}

/// What the host looked like.
struct Before {
    snapshot: Snapshot,
    leases: BTreeSet<String>,
    survivors: Survivors,
    usage: Vec<Usage>,
}

impl Before {
    fn look(host: &Host, api: &Api, neighbour: &Task<'_>) -> Result<Self> {
        let snapshot = Snapshot::settled(host)?;
        let leases = api.leases()?.into_iter().collect();
        let survivors = Survivors::find(host, neighbour)?;
        let usage = survivors.usage()?;
        Ok(Self { snapshot, leases, survivors, usage })
    }
}

impl<'h> TestBed<'h> {
    /// Starts the neighbour, and looks at the host when a first container has come and gone: its template and its
    /// directories stay.
    pub(crate) fn prepare(host: &'h Host) -> Result<Self> {
        let api = Api::connect(host.patience(BOUND))?;
        let source = api.source(host, COMMAND)?;
        let neighbour = host.container().flags(["--null-io"]).detach(COMMAND)?;
        Lifecycle::new(host, &api, &source).run(&mut lifecycle::NoFault)?;
        let before = Before::look(host, &api, &neighbour)?;
        Ok(Self { host, api, source, neighbour, before, failures: 0 })
    }

    /// The host.
    pub(crate) fn host(&self) -> &'h Host {
        self.host
    }

    /// What the containers are made of.
    pub(crate) fn source(&self) -> Result<ContainerSource> {
        self.api.source(self.host, COMMAND)
    }

    /// Injects a fault into the life of a container, and prints a line about it. False if the fault did not happen.
    pub(crate) fn try_fault(&mut self, fault: &Fault, injector: &mut dyn FaultInjector) -> Result<bool> {
        let outcome = self.try_or_fail(None, injector);
        self.report(fault, outcome)
    }

    /// Injects a fault into the life of a container that is made of `source`, and prints a line about it. False if the
    /// fault did not happen.
    pub(crate) fn try_fault_with(
        &mut self,
        source: &ContainerSource,
        fault: &Fault,
        injector: &mut dyn FaultInjector,
    ) -> Result<bool> {
        let outcome = self.try_or_fail(Some(source), injector);
        self.report(fault, outcome)
    }

    /// Restarts containerd during the life of a container, and prints a line about it. Its own descriptors are not
    /// compared then. False if the restart did not happen.
    pub(crate) fn try_restart(&mut self, fault: &Fault, injector: &mut dyn FaultInjector) -> Result<bool> {
        let lived = self.live(injector);
        self.before.survivors = Survivors::find(self.host, &self.neighbour)?;
        for before in &mut self.before.usage {
            // It is another process now, which opens some things late.
            if before.name == CONTAINERD {
                before.descriptors = u64::MAX;
            }
        }
        let outcome = lived.and_then(|messages| {
            self.expect_as_before()?;
            Ok(Some(messages))
        });
        self.report(fault, outcome)
    }

    /// Prints a line about a fault. What a failure has left is not held against the faults after it.
    fn report(&mut self, fault: &Fault, outcome: Result<Option<Vec<String>>>) -> Result<bool> {
        match outcome {
            Ok(Some(messages)) => println!("fault | {fault} | {}", messages.join("; ").replace('\n', " ")),
            Ok(None) => return Ok(false),
            Err(error) => {
                self.failures += 1;
                println!("failure | {fault} | {}", format!("{error:#}").replace('\n', " "));
                self.before = Before::look(self.host, &self.api, &self.neighbour)?;
            }
        }
        Ok(true)
    }

    /// What a client was told of a fault. None: it did not happen.
    pub(crate) fn try_or_fail(
        &self,
        source: Option<&ContainerSource>,
        injector: &mut dyn FaultInjector,
    ) -> Result<Option<Vec<String>>> {
        let lifecycle = Lifecycle::new(self.host, &self.api, source.unwrap_or(&self.source));
        let messages = lifecycle.run(injector)?;
        self.expect_as_before()?;
        Ok(injector.was_injected()?.then_some(messages))
    }

    /// Injects a fault into the life of a container, without a look at the host. Returns the requests that were
    /// refused.
    pub(crate) fn live(&self, injector: &mut dyn FaultInjector) -> Result<Vec<String>> {
        Lifecycle::new(self.host, &self.api, &self.source).run(injector)
    }

    /// What the survivors use now.
    pub(crate) fn usage(&self) -> Result<Vec<Usage>> {
        self.before.survivors.usage()
    }

    /// Expects that the host is as before, and that the survivors are.
    pub(crate) fn expect_as_before(&self) -> Result<()> {
        self.before.snapshot.expect_same(self.host)?;
        let leases: BTreeSet<_> = self.api.leases()?.into_iter().collect();
        let left: Vec<_> = leases.difference(&self.before.leases).collect();
        ensure!(left.is_empty(), "expected  no lease left\ncame      {left:?}");
        let neighbour = self.api.state(self.neighbour.id())?.ok().flatten().map(|process| process.status);
        ensure!(
            neighbour == Some(Status::Running.into()),
            "expected  the container beside it to run\ncame      {neighbour:?}"
        );
        self.expect_descriptors()
    }

    /// Expects that no survivor has more descriptors than before, after a while.
    fn expect_descriptors(&self) -> Result<()> {
        let deadline = Instant::now() + self.host.patience(CLOSES);
        loop {
            let now = self.usage()?;
            let mut more = now.iter().zip(&self.before.usage);
            let Some((now, before)) = more.find(|(now, before)| now.descriptors > before.descriptors) else {
                return Ok(());
            };
            ensure!(
                Instant::now() < deadline,
                "expected  {} descriptors of {}\ncame      {}",
                before.descriptors,
                before.name,
                now.descriptors
            );
            thread::sleep(PAUSE);
        }
    }
}

/// Tries the faults of a part. True if all ended as expected.
pub(crate) fn try_all(host: &Host, part: Part, names: &[String]) -> Result<bool> {
    let mut bed = TestBed::prepare(host)?;
    let before = bed.usage()?;
    part.try_all(&mut bed, names).with_context(|| format!("{part:?}"))?;
    let after = bed.usage()?;
    bed.neighbour.exec(&["echo", "unharmed"])?.succeeds()?.prints("unharmed\n")?;
    for (before, now) in before.iter().zip(after) {
        let Usage { name, descriptors, memory_kib } = before;
        println!(
            "survivor | {name} | {descriptors} -> {} descriptors | {memory_kib} -> {} KiB",
            now.descriptors, now.memory_kib
        );
    }
    Ok(bed.failures == 0)
}
