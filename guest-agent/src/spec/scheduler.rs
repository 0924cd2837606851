//! `process.scheduler` to what sched_setattr(2) takes.

use serde::Deserialize;

use super::error::SpecError;
use crate::syscall::SchedulerAttributes;

/// `process.scheduler`. oci-spec has a type for it, too, which knows some of the flags by other names than the
/// runtime-spec.
#[derive(Clone, Deserialize)]
pub(super) struct Scheduler {
    policy: String,
    nice: Option<i32>,
    priority: Option<i32>,
    flags: Option<Vec<String>>,
    runtime: Option<u64>,
    deadline: Option<u64>,
    period: Option<u64>,
}

/// By their numbers (linux/sched.h). The kernel has no SCHED_ISO.
const POLICIES: [(&str, u32); 6] = [
    ("SCHED_OTHER", 0),
    ("SCHED_FIFO", 1),
    ("SCHED_RR", 2),
    ("SCHED_BATCH", 3),
    ("SCHED_IDLE", 5),
    ("SCHED_DEADLINE", 6),
];

/// By their bits (linux/sched.h). Clamping of utilization lacks its values in the spec.
const FLAGS: [(&str, u64); 5] = [
    ("SCHED_FLAG_RESET_ON_FORK", 0x01),
    ("SCHED_FLAG_RECLAIM", 0x02),
    ("SCHED_FLAG_DL_OVERRUN", 0x04),
    ("SCHED_FLAG_KEEP_POLICY", 0x08),
    ("SCHED_FLAG_KEEP_PARAMS", 0x10),
];

/// Ranges are the kernel's to check: they depend on the policy.
pub(super) fn resolve(scheduler: &Scheduler) -> Result<SchedulerAttributes, SpecError> {
    let Scheduler { policy, nice, priority, flags, runtime, deadline, period } = scheduler;
    let Some((_, policy)) = POLICIES.iter().find(|(name, _)| name == policy) else {
        return Err(SpecError::unimplemented(format!("process.scheduler.policy {policy:?}")));
    };
    let priority = priority.unwrap_or(0);
    let priority = u32::try_from(priority)
        .map_err(|_| SpecError::invalid("process.scheduler.priority", format!("{priority} is negative")))?;
    let flags = flags.iter().flatten().try_fold(0, |bits, flag| {
        let known = FLAGS.iter().find(|(name, _)| name == flag);
        let unknown = || SpecError::unimplemented(format!("process.scheduler.flags {flag:?}"));
        known.map(|(_, bit)| bits | bit).ok_or_else(unknown)
    })?;
    Ok(SchedulerAttributes {
        policy: *policy,
        flags,
        nice: nice.unwrap_or(0),
        priority,
        runtime: runtime.unwrap_or(0),
        deadline: deadline.unwrap_or(0),
        period: period.unwrap_or(0),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn of(json: Value) -> Result<SchedulerAttributes, SpecError> {
        resolve(&serde_json::from_value(json).unwrap())
    }

    #[test]
    fn policies_and_flags_are_those_of_the_kernel() {
        let attributes = of(json!({"policy": "SCHED_DEADLINE", "runtime": 1, "deadline": 2, "period": 3,
            "flags": ["SCHED_FLAG_RESET_ON_FORK", "SCHED_FLAG_DL_OVERRUN"]}));
        let expected = SchedulerAttributes {
            policy: 6,
            flags: 5,
            nice: 0,
            priority: 0,
            runtime: 1,
            deadline: 2,
            period: 3,
        };
        assert_eq!(attributes.unwrap(), expected);
        let attributes = of(json!({"policy": "SCHED_RR", "priority": 9, "nice": -3})).unwrap();
        assert_eq!((attributes.policy, attributes.priority, attributes.nice), (2, 9, -3));
    }

    #[test]
    fn what_cannot_be_honoured_is_refused_by_name() {
        for (json, expected) in [
            (json!({"policy": "SCHED_ISO"}), "process.scheduler.policy \"SCHED_ISO\": not implemented"),
            (
                json!({"policy": "SCHED_OTHER", "flags": ["SCHED_FLAG_UTIL_CLAMP_MIN"]}),
                "process.scheduler.flags \"SCHED_FLAG_UTIL_CLAMP_MIN\": not implemented",
            ),
            (json!({"policy": "SCHED_FIFO", "priority": -1}), "process.scheduler.priority: -1 is negative"),
        ] {
            assert_eq!(of(json).unwrap_err().to_string(), expected);
        }
    }
}
