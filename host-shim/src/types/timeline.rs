//! How long each step of the start of a container takes.

use std::{
    sync::{Arc, Mutex, MutexGuard},
    time::{Instant, SystemTime},
};

use serde::{Deserialize, Serialize};

use super::{lock::lock, traceparent::Traceparent};

/// The version of [`StartRecord`]. A record of a newer version is not read.
pub(crate) const VERSION: u32 = 2;
/// The oldest version that is read. Version 1 had no callers.
pub(crate) const OLDEST_VERSION: u32 = 1;

/// A step of the start of a container, in the order of their beginnings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Step {
    /// The whole request Create.
    Create,
    /// The configuration and the container's spec are read.
    ReadRequest,
    /// The state directory, the share and the cgroup are made.
    PrepareHost,
    /// The container's root and its volumes are mounted in the share.
    MountFiles,
    /// The template is found or made.
    FindTemplate,
    /// The VMM restores the VM from the template.
    RestoreVm,
    /// The VM boots.
    BootVm,
    /// The agent learns whose guest it is.
    StartSandbox,
    /// The VM gets the memory that the limits of its containers need. In the start of a pod's first container, this
    /// runs at the same time as `StartSandbox`.
    FitMemory,
    /// The guest gets its processors.
    FitProcessors,
    /// Hooks run, streams are connected, and the agent makes the container.
    CreateContainer,
    /// The whole request Start.
    Start,
    /// The guest gets the network of the pod.
    ConnectNetwork,
    /// The agent lets the container's program run.
    StartContainer,
}

impl Step {
    /// Its name in records and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::ReadRequest => "read_request",
            Self::PrepareHost => "prepare_host",
            Self::MountFiles => "mount_files",
            Self::FindTemplate => "find_template",
            Self::RestoreVm => "restore_vm",
            Self::BootVm => "boot_vm",
            Self::StartSandbox => "start_sandbox",
            Self::FitMemory => "fit_memory",
            Self::FitProcessors => "fit_processors",
            Self::CreateContainer => "create_container",
            Self::Start => "start",
            Self::ConnectNetwork => "connect_network",
            Self::StartContainer => "start_container",
        }
    }

    /// The request that it is a part of. None: it is a request.
    pub fn request(self) -> Option<Self> {
        match self {
            Self::Create | Self::Start => None,
            Self::ConnectNetwork | Self::StartContainer => Some(Self::Start),
            _ => Some(Self::Create),
        }
    }

    /// Where most of it happens.
    pub fn place(self) -> &'static str {
        match self {
            Self::RestoreVm | Self::BootVm | Self::FitMemory => "vmm",
            Self::StartSandbox | Self::FitProcessors | Self::StartContainer | Self::CreateContainer => {
                "agent"
            }
            _ => "shim",
        }
    }
}

/// A step that has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Phase {
    /// What it was.
    pub step: Step,
    /// Microseconds from the arrival of the request Create to its beginning.
    pub begin_us: u64,
    /// How long it took, in microseconds.
    pub duration_us: u64,
    /// Of a request: the span of containerd that it belongs to, if containerd records one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub caller: Option<Traceparent>,
}

/// How a VM came to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// It continues from a template.
    Clone,
    /// It has booted.
    Boot,
}

impl Origin {
    /// Its name in records and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Clone => "clone",
            Self::Boot => "boot",
        }
    }
}

/// What the shim records of the start of the pod's first container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StartRecord {
    /// Of this structure.
    pub version: u32,
    /// When the request Create arrived: microseconds since 1970.
    pub began_unix_us: u64,
    /// How the VM came to run.
    pub vm: Origin,
    /// The steps that have ended, in the order of their beginnings.
    pub phases: Vec<Phase>,
}

/// The version of [`ContainerStart`]. A record of another version is not read.
pub(crate) const CONTAINER_VERSION: u32 = 1;

/// How many records of containers are kept, without that of the pod's first one: those that began last. Kubernetes
/// makes a new container for each restart.
pub const MOST_CONTAINERS: usize = 16;

/// What the shim records of the start of a container after the first one of its pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ContainerStart {
    /// Of this structure.
    pub version: u32,
    /// Its id.
    pub container: String,
    /// When the request Create arrived: microseconds since 1970.
    pub began_unix_us: u64,
    /// The steps that have ended, in the order of their beginnings.
    pub phases: Vec<Phase>,
}

/// The steps so far. Clones are the same.
#[derive(Debug, Clone)]
pub(crate) struct Timeline(Arc<Mutex<Begun>>);

#[derive(Debug)]
struct Begun {
    at: Instant,
    at_unix_us: u64,
    /// At most one for each step.
    phases: Vec<Phase>,
}

impl Default for Timeline {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(Begun::now())))
    }
}

impl Begun {
    fn now() -> Self {
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Self { at: Instant::now(), at_unix_us: since.as_micros() as u64, phases: Vec::new() }
    }
}

impl Timeline {
    /// Forgets all steps: a start begins, maybe after one that has failed.
    pub(crate) fn restart(&self) {
        *self.lock() = Begun::now();
    }

    /// Begins a step, which ends when the returned value is dropped. Only the first time counts. There is no future
    /// around the step's work, because each would make the futures around it larger.
    #[must_use]
    pub(crate) fn begin(&self, step: Step) -> Ongoing {
        Ongoing { timeline: self.clone(), step, begun: Instant::now(), caller: None }
    }

    /// What is known now.
    pub(crate) fn record(&self) -> StartRecord {
        let (began_unix_us, phases) = self.so_far();
        let has_booted = phases.iter().any(|phase| phase.step == Step::BootVm);
        let vm = if has_booted { Origin::Boot } else { Origin::Clone };
        StartRecord { version: VERSION, began_unix_us, vm, phases }
    }

    /// The same of a container that is not the first one of its pod.
    pub(crate) fn record_of(&self, container: &str) -> ContainerStart {
        let (began_unix_us, phases) = self.so_far();
        ContainerStart { version: CONTAINER_VERSION, container: container.into(), began_unix_us, phases }
    }

    /// When the request Create arrived, and the steps in the order of their beginnings.
    fn so_far(&self) -> (u64, Vec<Phase>) {
        let all = self.lock();
        let mut phases = all.phases.clone();
        phases.sort_by_key(|phase| (phase.begin_us, phase.step as u8));
        (all.at_unix_us, phases)
    }

    fn lock(&self) -> MutexGuard<'_, Begun> {
        lock(&self.0)
    }
}

/// A step that has begun.
#[derive(Debug)]
pub(crate) struct Ongoing {
    timeline: Timeline,
    step: Step,
    begun: Instant,
    caller: Option<Traceparent>,
}

impl Ongoing {
    /// The same, and it belongs to this span of containerd.
    pub(crate) fn called_by(mut self, caller: Option<Traceparent>) -> Self {
        self.caller = caller;
        self
    }
}

impl Drop for Ongoing {
    fn drop(&mut self) {
        let (step, duration) = (self.step, self.begun.elapsed());
        let mut all = self.timeline.lock();
        if !all.phases.iter().any(|phase| phase.step == step) {
            let begin_us = self.begun.saturating_duration_since(all.at).as_micros() as u64;
            let duration_us = duration.as_micros() as u64;
            all.phases.push(Phase { step, begin_us, duration_us, caller: self.caller });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{thread::sleep, time::Duration};

    use super::*;

    const ALL: [Step; 14] = [
        Step::Create,
        Step::ReadRequest,
        Step::PrepareHost,
        Step::MountFiles,
        Step::FindTemplate,
        Step::RestoreVm,
        Step::BootVm,
        Step::StartSandbox,
        Step::FitMemory,
        Step::FitProcessors,
        Step::CreateContainer,
        Step::Start,
        Step::ConnectNetwork,
        Step::StartContainer,
    ];

    #[test]
    fn a_step_has_one_name() {
        for step in ALL {
            assert_eq!(serde_json::to_value(step).unwrap(), step.name());
        }
        for origin in [Origin::Clone, Origin::Boot] {
            assert_eq!(serde_json::to_value(origin).unwrap(), origin.name());
        }
    }

    #[test]
    fn steps_are_noted_once_and_in_the_order_of_their_beginnings() {
        let timeline = Timeline::default();
        let caller = Traceparent::try_from("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01").ok();
        let create = timeline.begin(Step::Create).called_by(caller);
        let read = timeline.begin(Step::ReadRequest);
        sleep(Duration::from_millis(2));
        drop(read);
        drop(timeline.begin(Step::RestoreVm));
        drop(create);
        let again = timeline.begin(Step::RestoreVm);
        sleep(Duration::from_millis(2));
        drop(again);
        let record = timeline.record();
        let steps: Vec<_> = record.phases.iter().map(|phase| phase.step).collect();
        assert_eq!(steps, [Step::Create, Step::ReadRequest, Step::RestoreVm]);
        let [create, read, restore] = record.phases.as_slice() else { panic!("{record:?}") };
        assert_eq!([create, read, restore].map(|phase| phase.caller), [caller, None, None]);
        assert!(read.duration_us >= 2_000 && create.duration_us >= read.duration_us + restore.duration_us);
        assert!(restore.begin_us >= read.begin_us + read.duration_us && restore.duration_us < 2_000);
        assert_eq!(record.vm, Origin::Clone);
        let text = serde_json::to_string(&record).unwrap();
        assert_eq!(serde_json::from_str::<StartRecord>(&text).unwrap(), record);
        drop(timeline.begin(Step::BootVm));
        assert_eq!(timeline.record().vm, Origin::Boot);
        timeline.restart();
        assert_eq!(timeline.record().phases, []);
    }
}
