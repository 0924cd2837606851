//! The guest's block devices. The VMM attaches them while the guest runs.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Mutex,
};

use crate::attached_devices;

/// Where the kernel lists block devices (kernel, Documentation/ABI/stable/sysfs-block).
const DIRECTORY: &str = "/sys/block";

/// The block devices.
pub struct Disks {
    directory: PathBuf,
    /// Held by whoever looks for one, which takes as long as the disk does to answer.
    searching: Mutex<()>,
}

impl Default for Disks {
    fn default() -> Self {
        Self::below(Path::new(DIRECTORY))
    }
}

impl Disks {
    fn below(directory: &Path) -> Self {
        Self { directory: directory.to_owned(), searching: Mutex::default() }
    }

    /// The major and the minor number of the virtio disk with this serial number.
    pub fn find(&self, serial: &str) -> io::Result<(u32, u32)> {
        // A search may hang with its disk. Those that come later do not wait for it.
        let _searching = self.searching.try_lock().map_err(|_| {
            io::Error::new(io::ErrorKind::ResourceBusy, "an earlier search for a disk has not ended")
        })?;
        if let Some(found) = self.find_present(serial)? {
            return Ok(found);
        }
        attached_devices::probe()?;
        self.find_present(serial)?.ok_or_else(|| {
            io::Error::new(io::ErrorKind::NotFound, format!("no disk has the serial number {serial:?}"))
        })
    }

    fn find_present(&self, serial: &str) -> io::Result<Option<(u32, u32)>> {
        for entry in fs::read_dir(&self.directory)? {
            let disk = entry?.path();
            // Others than virtio disks have no such file.
            if fs::read_to_string(disk.join("serial")).is_ok_and(|own| own.trim_end() == serial) {
                let numbers = fs::read_to_string(disk.join("dev"))?;
                return numbers.trim_end().split_once(':').and_then(parse).map(Some).ok_or_else(|| {
                    io::Error::new(io::ErrorKind::InvalidData, format!("{numbers:?} are no numbers"))
                });
            }
        }
        Ok(None)
    }
}

fn parse((major, minor): (&str, &str)) -> Option<(u32, u32)> {
    Some((major.parse().ok()?, minor.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_is_found_by_its_serial_number() {
        let dir = std::env::temp_dir().join(format!("bulkhead-disks-{}", std::process::id()));
        for (name, serial, dev) in
            [("vda", Some("8:16"), "254:0\n"), ("vdb", Some("7:0"), "254:16\n"), ("loop0", None, "7:0\n")]
        {
            fs::create_dir_all(dir.join(name)).unwrap();
            fs::write(dir.join(name).join("dev"), dev).unwrap();
            if let Some(serial) = serial {
                fs::write(dir.join(name).join("serial"), serial).unwrap();
            }
        }
        let disks = Disks::below(&dir);
        assert_eq!(disks.find("7:0").unwrap(), (254, 16));
        assert_eq!(disks.find_present("8:1").unwrap(), None);
        fs::write(dir.join("vda/dev"), "254\n").unwrap();
        assert_eq!(disks.find("8:16").unwrap_err().kind(), io::ErrorKind::InvalidData);
        let _searching = disks.searching.lock();
        assert_eq!(disks.find("7:0").unwrap_err().kind(), io::ErrorKind::ResourceBusy);
        fs::remove_dir_all(&dir).unwrap();
    }
}
