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
            let before = self.read(&setting.file)?;
            self.set(setting)?;
            made.extend(before.map(|before| (setting.file.clone(), before)));
        }
        devices.map_or(Ok(()), |program| self.allow_devices(program))
    }
}
