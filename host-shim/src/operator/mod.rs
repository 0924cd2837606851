//! What the command `bulkhead` shows of this host's pods and templates, and removes. The rest of the shim's code is
//! private to it.
//!
//! The files below /run/bulkhead may be those of a shim of another version, or of one that crashed. What cannot be
//! read is reported with the pod that it belongs to.

mod address;
mod build;
mod events;
mod failures;
mod garbage;
mod pods;
mod process;
mod sample;
mod start;
mod templates;
mod usage;

pub use address::{ContainerPlace, PodAddress, PodAddressError, pod_address};
pub use build::{BuildError, Built, build_templates};
pub use bulkhead_vmm_api::{BlockCounts, DeviceCounts};
pub use events::{Event, EventKind, Follower, Observed, PodName};
pub use failures::{failures, forget_failures};
pub use garbage::{Garbage, Removed, garbage, remove_garbage};
pub use pods::{Pod, PodState, named as pod_named, paths as pod_paths};
pub use sample::{Node, Sample, Sampler, pods, templates};
pub use start::{container_starts, start_record};
pub use templates::{
    Template, TemplateState, largest_template_mib, remove_all_templates, remove_template,
    remove_unused_templates, template_names,
};
pub use usage::{CgroupUsage, CpuUsage, NetworkUsage, Pressure, Usage};

pub use crate::{
    host::{
        bare::is_bare,
        state_dir::{CONSOLE, STATE_ROOT},
    },
    pod::container_role::{CONTAINER_NAME, CONTAINER_TYPE, CRI_NAMESPACE, SANDBOX_TYPE},
    types::{
        build::{COMMIT, VERSION, version_and_commit},
        config::{CONFIG_PATH, Config, ConfigError, Setting},
        error::chain,
        event::PodEvent,
        failure::Cause,
        text::one_line,
        timeline::{ContainerStart, MOST_CONTAINERS, Origin, Phase, StartRecord, Step},
        traceparent::{NotATraceparent, Traceparent},
    },
};
