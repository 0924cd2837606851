//! What happens to a pod, as its shim records it for the operator.

use serde::{Deserialize, Serialize};

use crate::types::{failure::Cause, timeline::Origin};

/// What happened. It contains ids, numbers, and the words of the VMM about its end, and no argument or environment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum PodEvent {
    /// The shim has begun to make the pod.
    PodBegan,
    /// The VM runs, and the agent in it has answered.
    VmUp {
        /// How it came to run.
        vm: Origin,
    },
    /// A container was created.
    ContainerCreated {
        /// Its id.
        container: String,
    },
    /// The program of a container was started.
    ContainerStarted {
        /// Its id.
        container: String,
    },
    /// A container could not be created or started.
    ContainerFailed {
        /// Its id.
        container: String,
        /// Why.
        cause: Cause,
    },
    /// The processes of a container were stopped.
    ContainerPaused {
        /// Its id.
        container: String,
    },
    /// The processes of a container go on.
    ContainerResumed {
        /// Its id.
        container: String,
    },
    /// The guest's kernel has killed processes of a container, because memory was short.
    OomKill {
        /// The id of the container.
        container: String,
        /// How many processes, since the last such event of the container.
        kills: u64,
    },
    /// The program of a container has ended.
    ContainerExited {
        /// Its id.
        container: String,
        /// The exit status: 128 + N after signal N.
        status: u32,
    },
    /// The VM has ended, although the pod was not to end.
    VmEnded {
        /// Why, by the VMM's last words or its exit status.
        reason: String,
    },
    /// The shim kills the VM.
    VmKilled {
        /// Why.
        reason: String,
    },
}

/// A line of the record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct EventRecord {
    /// The number of the event in its pod, from 0 on. Whoever finds a number missing has missed an event.
    pub(crate) number: u64,
    /// When it happened: microseconds since 1970.
    pub(crate) at_unix_us: u64,
    /// How many processes of the pod's containers the guest's kernel has killed until then, because memory was short.
    /// None: the shim has an older version, which does not say.
    #[serde(default)]
    pub(crate) oom_kills: Option<u64>,
    /// What happened.
    #[serde(flatten)]
    pub(crate) happening: PodEvent,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_one_line_with_the_name_of_the_event() {
        let happening = PodEvent::ContainerExited { container: "demo\n".into(), status: 137 };
        let record = EventRecord { number: 3, at_unix_us: 5, oom_kills: Some(2), happening };
        let line = serde_json::to_string(&record).unwrap();
        assert_eq!(
            line,
            r#"{"number":3,"at_unix_us":5,"oom_kills":2,"event":"container_exited","container":"demo\n","status":137}"#
        );
        assert_eq!(serde_json::from_str::<EventRecord>(&line).unwrap(), record);
        let older = line.replace("\"oom_kills\":2,", "");
        assert_eq!(serde_json::from_str::<EventRecord>(&older).unwrap().oom_kills, None);
    }
}
