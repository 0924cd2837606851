//! The guest's processors. All vCPUs of the VM are there from the boot on. Those that the pod does not need are
//! offline: the kernel runs nothing on them, and programs do not count them.

use std::{
    fs,
    io::{self, ErrorKind},
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use bulkhead_agent_api::cpu_list::{self, CpuNumbers};

/// Where the kernel lists them (kernel, Documentation/core-api/cpu_hotplug.rst).
const DIRECTORY: &str = "/sys/devices/system/cpu";

/// The processors, of which a part is online.
pub struct Processors {
    directory: PathBuf,
    /// Held by whoever changes which are online.
    changing: Mutex<()>,
}

impl Default for Processors {
    fn default() -> Self {
        Self::below(Path::new(DIRECTORY))
    }
}

impl Processors {
    fn below(directory: &Path) -> Self {
        Self { directory: directory.to_owned(), changing: Mutex::default() }
    }

    /// Brings the first `count` processors online and the others offline. The first is always online. Returns how many
    /// are online then. That may be more: the kernel keeps a processor online that a SCHED_DEADLINE task needs.
    pub fn set_online(&self, count: u32) -> io::Result<u32> {
        let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let present = self.list("present")?;
        let (online, offline): (Vec<_>, Vec<_>) = present.into_iter().partition(|cpu| *cpu < count);
        for cpu in online {
            self.switch(cpu, true)?;
        }
        for cpu in offline.into_iter().rev() {
            if let Err(error) = self.switch(cpu, false) {
                eprintln!("bulkhead-agent: processor {cpu} stays online: {error}");
            }
        }
        self.online()
    }

    /// How many are online.
    pub fn online(&self) -> io::Result<u32> {
        Ok(self.list("online")?.len() as u32)
    }

    fn switch(&self, cpu: u32, online: bool) -> io::Result<()> {
        let file = self.directory.join(format!("cpu{cpu}/online"));
        let wanted = if online { "1" } else { "0" };
        match fs::read_to_string(&file) {
            Ok(present) if present.trim_end() == wanted => Ok(()),
            Ok(_) => fs::write(&file, wanted),
            // The boot processor cannot go offline, and has no such file.
            Err(error) if error.kind() == ErrorKind::NotFound && cpu == 0 => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn list(&self, file: &str) -> io::Result<CpuNumbers> {
        let text = fs::read_to_string(self.directory.join(file))?;
        cpu_list::parse(&text).ok_or_else(|| {
            let reason = format!("{file} is not a list of processors: {:?}", text.trim_end());
            io::Error::new(ErrorKind::InvalidData, reason)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Four processors, by files that take whatever is written.
    fn four(online: [&str; 3]) -> (tempfile::TempDir, Processors) {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("present"), "0-3\n").unwrap();
        fs::write(dir.path().join("online"), "0,2-3\n").unwrap();
        fs::create_dir(dir.path().join("cpu0")).unwrap();
        for (cpu, online) in (1..).zip(online) {
            fs::create_dir(dir.path().join(format!("cpu{cpu}"))).unwrap();
            fs::write(dir.path().join(format!("cpu{cpu}/online")), online).unwrap();
        }
        let processors = Processors::below(dir.path());
        (dir, processors)
    }

    fn states(dir: &tempfile::TempDir) -> [String; 3] {
        [1, 2, 3].map(|cpu| fs::read_to_string(dir.path().join(format!("cpu{cpu}/online"))).unwrap())
    }

    #[test]
    fn the_first_are_online_and_the_others_offline() {
        let (dir, processors) = four(["0\n", "1\n", "1\n"]);
        assert_eq!(processors.set_online(2).unwrap(), 3, "as the kernel's list says");
        assert_eq!(processors.online().unwrap(), 3);
        assert_eq!(states(&dir), ["1", "0", "0"]);
        processors.set_online(u32::MAX).unwrap();
        assert_eq!(states(&dir), ["1", "1", "1"]);
        processors.set_online(0).unwrap();
        assert_eq!(states(&dir), ["0", "0", "0"], "and the boot processor stays");
    }

    #[test]
    fn a_processor_that_stays_online_is_no_error_and_one_that_stays_offline_is() {
        let (dir, processors) = four(["1\n", "1\n", "1\n"]);
        fs::remove_dir_all(dir.path().join("cpu2")).unwrap();
        processors.set_online(1).unwrap();
        assert_eq!(fs::read_to_string(dir.path().join("cpu1/online")).unwrap(), "0");
        assert_eq!(processors.set_online(3).unwrap_err().kind(), ErrorKind::NotFound);
    }
}
