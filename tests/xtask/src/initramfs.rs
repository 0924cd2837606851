//! The guest's initramfs: a cpio archive in the format that the kernel's
//! Documentation/driver-api/early-userspace/buffer-format.rst calls "newc".

use anyhow::{Context, Result};

const DIRECTORY: u32 = 0o040_000;
const REGULAR: u32 = 0o100_000;
const CHARACTER_DEVICE: u32 = 0o020_000;

/// Where the agent looks for the modules.
const MODULES: &str = "lib/modules";

/// An archive of `/init`, which is `agent`, and of the devices that are used before it can mount any: the kernel opens
/// `/dev/console` as its standard streams, and where there is no console, Rust's start-up opens `/dev/null`.
pub(crate) fn archive(agent: &[u8]) -> Result<Vec<u8>> {
    let mut archive = Archive { bytes: Vec::with_capacity(agent.len() + 4096), inode: 0 };
    archive.add("dev", DIRECTORY | 0o755, (0, 0), &[])?;
    archive.add("dev/console", CHARACTER_DEVICE | 0o600, (5, 1), &[])?;
    archive.add("dev/null", CHARACTER_DEVICE | 0o666, (1, 3), &[])?;
    archive.add("init", REGULAR | 0o755, (0, 0), agent)?;
    archive.add("TRAILER!!!", 0, (0, 0), &[])?;
    Ok(archive.bytes)
}

/// An archive of the kernel's modules, in /lib/modules. The kernel unpacks one archive after another.
pub(crate) fn modules(files: &[(String, Vec<u8>)]) -> Result<Vec<u8>> {
    let mut archive = Archive { bytes: Vec::new(), inode: 0 };
    archive.add("lib", DIRECTORY | 0o755, (0, 0), &[])?;
    archive.add(MODULES, DIRECTORY | 0o755, (0, 0), &[])?;
    for (name, data) in files {
        archive.add(&format!("{MODULES}/{name}"), REGULAR | 0o644, (0, 0), data)?;
    }
    archive.add("TRAILER!!!", 0, (0, 0), &[])?;
    Ok(archive.bytes)
}

struct Archive {
    bytes: Vec<u8>,
    inode: u32,
}

impl Archive {
    /// Adds an entry owned by root, dated 1970. `device` is the major and minor number of a device node.
    fn add(&mut self, name: &str, mode: u32, device: (u32, u32), data: &[u8]) -> Result<()> {
        self.inode += 1;
        let size =
            u32::try_from(data.len()).with_context(|| format!("{name} is too large for a cpio archive"))?;
        let name_size = u32::try_from(name.len() + 1).context("a name is too long for a cpio archive")?;
        // Inode, mode, uid, gid, links, mtime, size, device (major, minor), device of a node, length of the name
        // with its NUL, checksum (unused).
        let fields = [self.inode, mode, 0, 0, 1, 0, size, 0, 0, device.0, device.1, name_size, 0];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(data);
        self.pad();
        Ok(())
    }

    /// Header with name, and data, each end at a multiple of 4 bytes.
    fn pad(&mut self) {
        let end = self.bytes.len().next_multiple_of(4);
        self.bytes.resize(end, 0);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::process::{Command, Stdio};

    #[test]
    fn cpio_reads_the_archive() {
        let archive = archive(b"hello").unwrap();
        assert_eq!(archive.len() % 4, 0);
        assert_eq!(modules(&[("a.ko.xz".into(), b"module".into())]).unwrap().len() % 4, 0);
        // Without the tool there is nothing to compare with; the kernel's own unpacking is tested in the rig.
        let listing =
            Command::new("cpio").args(["-itv"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let Ok(mut cpio) = listing else { return };
        cpio.stdin.take().unwrap().write_all(&archive).unwrap();
        let listing = String::from_utf8(cpio.wait_with_output().unwrap().stdout).unwrap();
        let lines: Vec<&str> = listing.lines().collect();
        assert!(lines[0].starts_with("drwxr-xr-x") && lines[0].ends_with(" dev"), "{listing}");
        assert!(lines[1].starts_with("crw-------") && lines[1].contains("5,   1"), "{listing}");
        assert!(lines[2].starts_with("crw-rw-rw-") && lines[2].contains("1,   3"), "{listing}");
        assert!(lines[3].starts_with("-rwxr-xr-x") && lines[3].ends_with(" init"), "{listing}");
    }
}
