//! Changes of limits while the container runs.

use std::os::fd::OwnedFd;

use super::{Cgroup, CgroupError, Setting, io_error, is_gone};
use crate::syscall::BpfInstruction;

/// What an update has replaced.
#[derive(Debug, Default)]
pub struct Replaced {
    /// Files and what they said, in the order in which they were written.
    files: Vec<(String, String)>,
    /// None: it is still attached.
    device_program: Option<OwnedFd>,
}

impl Cgroup {
    /// Makes all settings, and replaces the device program if there is one; after an error all limits are what they
    /// were.
    pub fn update(
        &self,
        settings: &[Setting],
        devices: Option<&[BpfInstruction]>,
    ) -> Result<Replaced, CgroupError> {
        let mut replaced = Replaced::default();
        match self.update_noting(settings, devices, &mut replaced) {
            Ok(()) => Ok(replaced),
            Err(error) => {
                if let Err(error) = self.put_back(replaced) {
                    eprintln!("bulkhead-agent: after an update that has failed: {error}");
                }
                Err(error)
            }
        }
    }

    /// Undoes an update after which there was no other one. Puts back all that it can, and returns the first error. In
    /// a cgroup that is gone, there is nothing to put back.
    pub fn put_back(&self, replaced: Replaced) -> Result<(), CgroupError> {
        let Replaced { files, device_program } = replaced;
        let program = device_program.map_or(Ok(()), |program| self.attach_program(program).map(drop));
        files.iter().rev().fold(program, |first, (file, before)| {
            // The line's end, since cpuset.cpus is cleared by an empty line.
            let written = self.write(file, &format!("{before}\n"));
            let failed = |error| io_error("putting the limit back into", &self.path().join(file))(error);
            first.and(written.or_else(|error| if is_gone(&error) { Ok(()) } else { Err(failed(error)) }))
        })
    }

    /// Notes in `replaced` what each file said before.
    fn update_noting(
        &self,
        settings: &[Setting],
        devices: Option<&[BpfInstruction]>,
        replaced: &mut Replaced,
    ) -> Result<(), CgroupError> {
        for setting in settings {
            let before = self.read(&setting.file)?;
            self.set(setting)?;
            replaced.files.extend(before.map(|before| (setting.file.clone(), before)));
        }
        if let Some(program) = devices {
            replaced.device_program = self.allow_devices(program)?;
        }
        Ok(())
    }
}
