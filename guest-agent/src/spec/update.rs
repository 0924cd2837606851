//! New limits of a container that exists: `linux.resources`, of which only a part may be given.

use oci_spec::runtime::LinuxResources;

use super::{error::SpecError, resources};
use crate::{cgroup::Setting, device_filter, syscall::BpfInstruction};

/// What the container's cgroup says before the update.
pub struct Present {
    /// cpu.max: quota and period.
    pub cpu_max: String,
    /// memory.max; [`u64::MAX`] for none.
    pub memory_max: u64,
    /// memory.current
    pub memory_current: u64,
}

/// A checked update.
pub struct Update {
    /// For the container's cgroup, in this order.
    pub settings: Vec<Setting>,
    /// The huge pages that are to be set aside for the container. None: as many as before.
    pub huge_pages: Option<u64>,
    /// Which devices the container may use, if that is to change.
    pub device_program: Option<Vec<BpfInstruction>>,
}

/// Checks and resolves an update.
pub fn resolve_update(json: &[u8], present: &Present) -> Result<Update, SpecError> {
    let mut resources: LinuxResources = serde_json::from_slice(json)?;
    complete_cpu(&mut resources, present);
    complete_memory(&mut resources, present);
    check_usage(&resources, present)?;
    let devices = resources.devices().as_deref().filter(|rules| !rules.is_empty());
    Ok(Update {
        settings: resources::settings(&resources)?,
        huge_pages: resources::huge_pages(&resources),
        device_program: devices
            .map(|rules| device_filter::generate(rules, device_filter::disks()))
            .transpose()?,
    })
}

/// cpu.max takes quota and period together; one that is not given stays.
fn complete_cpu(resources: &mut LinuxResources, present: &Present) {
    let Some(cpu) = resources.cpu_mut() else { return };
    let Some((quota, period)) = present.cpu_max.split_once(' ') else { return };
    match (cpu.quota().unwrap_or(0), cpu.period().unwrap_or(0)) {
        (0, 0) => {}
        // "max" is no number, and -1 no limit.
        (0, _) => drop(cpu.set_quota(Some(quota.parse().unwrap_or(-1)))),
        (_, 0) => drop(cpu.set_period(period.parse().ok())),
        (..) => {}
    }
}

/// The limit of swap counts memory in; a limit of memory that is not given stays.
fn complete_memory(resources: &mut LinuxResources, present: &Present) {
    if let Some(memory) = resources.memory_mut()
        && memory.swap().is_some_and(|swap| swap > 0)
        && memory.limit().unwrap_or(0) == 0
    {
        memory.set_limit(i64::try_from(present.memory_max).ok());
    }
}

/// Without this check the kernel kills processes until the container is within a limit below its usage.
fn check_usage(resources: &LinuxResources, present: &Present) -> Result<(), SpecError> {
    let Some(memory) = resources.memory().as_ref().filter(|m| m.check_before_update() == Some(true)) else {
        return Ok(());
    };
    for (name, limit) in [("limit", memory.limit()), ("swap", memory.swap())] {
        let limit = limit.and_then(|limit| u64::try_from(limit).ok()).filter(|limit| *limit > 0);
        if let Some(limit) = limit.filter(|limit| *limit < present.memory_current) {
            let reason = format!("{limit} is below the {} bytes in use", present.memory_current);
            return Err(SpecError::invalid(&format!("linux.resources.memory.{name}"), reason));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn update(json: Value) -> Result<Vec<(String, String)>, SpecError> {
        let present = Present { cpu_max: "50000 100000".into(), memory_max: 1000, memory_current: 500 };
        let update = resolve_update(json.to_string().as_bytes(), &present)?;
        Ok(update.settings.into_iter().map(|setting| (setting.file, setting.value)).collect())
    }

    fn one(file: &str, value: &str) -> Vec<(String, String)> {
        vec![(file.into(), value.into())]
    }

    #[test]
    fn the_half_that_is_not_given_stays() {
        assert_eq!(update(json!({"cpu": {"quota": 20000}})).unwrap(), one("cpu.max", "20000 100000"));
        assert_eq!(update(json!({"cpu": {"period": 200_000}})).unwrap(), one("cpu.max", "50000 200000"));
        assert_eq!(update(json!({"cpu": {"quota": -1}})).unwrap(), one("cpu.max", "max 100000"));
        let swap = update(json!({"memory": {"swap": 1500}})).unwrap();
        assert_eq!(swap, [one("memory.swap.max", "500"), one("memory.max", "1000")].concat());
        assert_eq!(update(json!({"cpu": {}, "memory": {}})).unwrap(), []);
        let burst = update(json!({"cpu": {"burst": 60_000, "quota": 80_000}})).unwrap();
        let expected = [("cpu.max.burst", "0"), ("cpu.max", "80000 100000"), ("cpu.max.burst", "60000")];
        assert_eq!(burst, expected.map(|(file, value)| (file.to_owned(), value.to_owned())));
    }

    #[test]
    fn a_limit_below_the_usage_is_refused_if_that_is_asked_for() {
        let refused = update(json!({"memory": {"limit": 499, "checkBeforeUpdate": true}})).unwrap_err();
        assert_eq!(refused.to_string(), "linux.resources.memory.limit: 499 is below the 500 bytes in use");
        assert_eq!(
            update(json!({"memory": {"limit": 500, "checkBeforeUpdate": true}})).unwrap(),
            one("memory.max", "500")
        );
        assert_eq!(update(json!({"memory": {"limit": 499}})).unwrap(), one("memory.max", "499"));
    }

    #[test]
    fn devices_change_only_where_they_are_given() {
        let program = |json: Value| {
            let present = Present { cpu_max: String::new(), memory_max: 0, memory_current: 0 };
            resolve_update(json.to_string().as_bytes(), &present).unwrap().device_program
        };
        assert!(program(json!({})).is_none() && program(json!({"devices": []})).is_none());
        assert!(program(json!({"devices": [{"allow": false, "access": "rwm"}]})).is_some());
    }
}
