//! A guest that has more memory than it booted with: the kernel makes some limits by the memory that it finds then, and
//! leaves them at that.

use std::{
    fs, io,
    sync::atomic::{AtomicU64, Ordering},
};

use nix::sys::sysinfo::sysinfo;

/// So many bytes of memory for each task: eight times a task's stack (Linux, kernel/fork.c, set_max_threads).
const PER_TASK: u64 = 8 * 16 * 1024;
/// And for each open file (fs/file_table.c, files_maxfiles_init).
const PER_FILE: u64 = 10 * 1024;

/// What memory the limits were made by, bytes.
pub struct Growth(AtomicU64);

impl Growth {
    /// The limits are those of the kernel's.
    pub fn at_boot() -> io::Result<Self> {
        Ok(Self(AtomicU64::new(sysinfo()?.ram_total())))
    }

    /// Makes the limits those that the kernel would have made by the memory that there is now, if that is more.
    pub fn follow(&self) -> io::Result<()> {
        let bytes = sysinfo()?.ram_total();
        if self.0.fetch_max(bytes, Ordering::Relaxed) >= bytes {
            return Ok(());
        }
        fs::write("/proc/sys/kernel/threads-max", (bytes / PER_TASK).to_string())?;
        fs::write("/proc/sys/fs/file-max", (bytes / PER_FILE).to_string())
    }
}
