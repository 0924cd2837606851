//! Changes of limits while the container runs.

use super::{Cgroup, CgroupError, Setting};
use crate::syscall::BpfInstruction;

impl Cgroup {
    /// Makes all settings, and replaces the device program if there is one; after an error all limits are what they
    /// were.
    pub fn update(
        &self,
        settings: &[Setting],
        devices: Option<&[BpfInstruction]>,
    ) -> Result<(), CgroupError> {
        let mut made = Vec::new();
        let result = self.update_noting(settings, devices, &mut made);
        if result.is_err() {
            for (file, before) in made.iter().rev() {
                // The line's end, since cpuset.cpus is cleared by an empty line.
                if let Err(error) = self.write(file, &format!("{before}\n")) {
                    eprintln!("bulkhead-agent: putting {before:?} back into {file}: {error}");
                }
            }
        }
        result
    }

    /// Notes in `made` what each file said before.
    fn update_noting(
        &self,
        settings: &[Setting],
        devices: Option<&[BpfInstruction]>,
        made: &mut Vec<(String, String)>,
    ) -> Result<(), CgroupError> {
        for setting in settings {
            let before = self.read(&setting.file)?.map(|text| writable(setting, &text));
            self.set(setting)?;
            made.extend(before.map(|before| (setting.file.clone(), before)));
        }
        devices.map_or(Ok(()), |program| self.allow_devices(program))
    }
}

/// What is written to a file to have again what it says: io.max takes one device at a time, and does not list those
/// without limits.
fn writable(setting: &Setting, text: &str) -> String {
    let device = setting.value.split(' ').next().unwrap_or_default();
    if setting.file != "io.max" {
        return text.to_owned();
    }
    let line = text.lines().find(|line| line.split(' ').next() == Some(device));
    line.map_or_else(|| format!("{device} rbps=max wbps=max riops=max wiops=max"), str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_devices_limits_are_put_back_one_by_one() {
        let setting = |file: &str, value: &str| Setting {
            field: "blockIO".into(),
            file: file.into(),
            value: value.into(),
            optional: false,
        };
        let before = "8:0 rbps=1 wbps=max riops=max wiops=max\n8:16 rbps=2 wbps=max riops=max wiops=max";
        let of = |value| writable(&setting("io.max", value), before);
        assert_eq!(of("8:16 wbps=9"), "8:16 rbps=2 wbps=max riops=max wiops=max");
        assert_eq!(of("9:0 wbps=9"), "9:0 rbps=max wbps=max riops=max wiops=max");
        assert_eq!(writable(&setting("cpu.max", "1000 2000"), "max 100000"), "max 100000");
    }
}
