//! The Debian package (deb(5)): an ar(1) archive of its format's version, of what dpkg must know, and of the files.
//!
//! It is written here and not by cargo-deb, because its files are not those of one cargo package, but the list that the
//! archive has too: programs of several packages, the guest kernel, the initramfs, man pages and licenses; and the same
//! files must give the same bytes.

use anyhow::{Context, Result};
use md5::{Digest, Md5};

use super::archive::{File, gzipped_with_directories};

/// After dpkg has installed or upgraded the package, systemd knows its unit. One that runs is that of this version.
const AFTER_INSTALLATION: &str = "#!/bin/sh
set -e
if [ \"$1\" = configure ] && [ -d /run/systemd/system ]; then
    systemctl daemon-reload || :
    systemctl try-restart bulkhead-metrics.service || :
fi
";

/// Before dpkg removes the package, its unit ends, and containerd's configuration becomes what it was. An upgrade
/// leaves both.
const BEFORE_REMOVAL: &str = "#!/bin/sh
set -e
if [ \"$1\" = remove ]; then
    if [ -d /run/systemd/system ]; then
        systemctl --no-reload disable --now bulkhead-metrics.service || :
    fi
    # A package whose program is gone, or cannot do it, can be removed all the same.
    # One that hangs is ended, because dpkg would wait for it.
    [ -x /usr/bin/bulkhead ] && timeout --kill-after 10 120 /usr/bin/bulkhead uninstall ||
        echo 'bulkhead: not all was undone. Remove its handlers from the configuration of containerd.' >&2
fi
";

/// After dpkg has removed the unit, systemd forgets it. What it keeps is removed by a purge only: the operator's files.
const AFTER_REMOVAL: &str = "#!/bin/sh
set -e
if [ \"$1\" = remove ] && [ -d /run/systemd/system ]; then
    systemctl daemon-reload || :
fi
if [ \"$1\" = purge ]; then
    rm -rf /etc/bulkhead
fi
";

/// The package of the archive's files. A Debian package has its own in /usr, and leaves /usr/local to the
/// administrator.
pub(super) fn package(version: &str, files: Vec<File>) -> Result<Vec<u8>> {
    let place =
        |path: String| path.strip_prefix("usr/local/").map_or(path.clone(), |rest| format!("usr/{rest}"));
    let mut files: Vec<_> = files.into_iter().map(|file| File { path: place(file.path), ..file }).collect();
    let license = files.iter().find(|file| file.path == "usr/share/doc/bulkhead/LICENSE");
    let license = license.context("there is no license to pack")?.data.clone();
    files.push(File { path: "usr/share/doc/bulkhead/copyright".into(), mode: 0o644, data: license });
    let size: usize = files.iter().map(|file| file.data.len().div_ceil(1024)).sum();
    let control = [
        // With it, `dpkg --verify` finds a file that was changed.
        File { path: "md5sums".into(), mode: 0o644, data: md5sums(&files).into_bytes() },
        File { path: "control".into(), mode: 0o644, data: control(version, size).into_bytes() },
        File { path: "postinst".into(), mode: 0o755, data: AFTER_INSTALLATION.into() },
        File { path: "prerm".into(), mode: 0o755, data: BEFORE_REMOVAL.into() },
        File { path: "postrm".into(), mode: 0o755, data: AFTER_REMOVAL.into() },
    ];
    let mut package = b"!<arch>\n".to_vec();
    member(&mut package, "debian-binary", b"2.0\n");
    member(&mut package, "control.tar.gz", &gzipped_with_directories(&control)?);
    member(&mut package, "data.tar.gz", &gzipped_with_directories(&files)?);
    Ok(package)
}

/// The digest of each file, in the form of md5sum(1), by which deb-md5sums(5) wants them.
fn md5sums(files: &[File]) -> String {
    let mut lines: Vec<_> = files.iter().map(|file| (&file.path, Md5::digest(&file.data))).collect();
    lines.sort_by_key(|(path, _)| *path);
    lines.iter().map(|(path, digest)| format!("{digest:x}  {path}\n")).collect()
}

fn control(version: &str, kibibytes: usize) -> String {
    format!(
        "Package: bulkhead\nVersion: {version}\nArchitecture: amd64\nMaintainer: The Bulkhead authors\n\
         Installed-Size: {kibibytes}\nRecommends: containerd\nSection: admin\nPriority: optional\n\
         Description: containerd runtime that puts every pod in a microVM\n \
         Each pod has a virtual machine of its own, with a small kernel. It needs KVM, and\n \
         containerd 1.6, 1.7 or 2.1. `bulkhead check` says whether this host can run it, and\n \
         `bulkhead install` configures containerd for Kubernetes.\n"
    )
}

/// Adds a file: a header of 60 characters, and the data, to an even length.
fn member(archive: &mut Vec<u8>, name: &str, data: &[u8]) {
    // Name, time, owner, group, mode, length.
    let header = format!("{name:<16}{:<12}{:<6}{:<6}{:<8}{:<10}`\n", 0, 0, 0, "100644", data.len());
    archive.extend_from_slice(header.as_bytes());
    archive.extend_from_slice(data);
    if !data.len().is_multiple_of(2) {
        archive.push(b'\n');
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::process::Command;
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn a_command_that_hangs_keeps_no_package() {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("bulkhead");
        let removed = |text: &str| {
            fs::write(&program, text).unwrap();
            fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
            // Not on the host of this test.
            let script = BEFORE_REMOVAL.replace("/usr/bin/bulkhead", &program.to_string_lossy());
            let script =
                script.replace("/run/systemd/system", "/no/such/directory").replace(" 10 120 ", " 1 1 ");
            let ended = Command::new("sh").args(["-c", &script, "prerm", "remove"]).output().unwrap();
            assert!(ended.status.success());
            String::from_utf8(ended.stderr).unwrap()
        };
        assert_eq!(removed("#!/bin/sh\n[ \"$*\" = uninstall ]\n"), "");
        for hangs in ["#!/bin/sh\nexec sleep 60\n", "#!/bin/sh\ntrap '' TERM\nsleep 60\nsleep 60\n"] {
            let begun = Instant::now();
            let said = removed(hangs);
            assert!(said.contains("bulkhead: not all was undone."), "{said}");
            assert!(begun.elapsed() < Duration::from_secs(50), "{hangs}");
        }
    }

    #[test]
    fn dpkg_reads_the_package() {
        let file = |path: &str| File { path: path.into(), mode: 0o755, data: b"text".to_vec() };
        let files = vec![file("usr/local/bin/bulkhead"), file("usr/local/share/doc/bulkhead/LICENSE")];
        let bytes = package("1.2.3", files.clone()).unwrap();
        assert_eq!(bytes, package("1.2.3", files).unwrap());
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("bulkhead.deb");
        fs::write(&path, bytes).unwrap();
        let dpkg = |argument: &str| {
            let output = Command::new("dpkg-deb").arg(argument).arg(&path).output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            String::from_utf8(output.stdout).unwrap()
        };
        let contents = dpkg("--contents");
        assert!(
            contents.contains("-rwxr-xr-x root/root") && contents.contains(" usr/bin/bulkhead"),
            "{contents}"
        );
        assert!(
            contents.contains(" usr/share/doc/bulkhead/copyright") && !contents.contains("local"),
            "{contents}"
        );
        let digests = Command::new("dpkg-deb").arg("--info").arg(&path).arg("md5sums").output().unwrap();
        // That of `text`, as md5sum prints it.
        let line = |name: &str| format!("1cb251ec0d568de6a929b520c4aed8d1  usr/{name}\n");
        let all =
            ["bin/bulkhead", "share/doc/bulkhead/LICENSE", "share/doc/bulkhead/copyright"].map(line).concat();
        assert_eq!(String::from_utf8(digests.stdout).unwrap(), all);
        let field = |name: &str| {
            let output = Command::new("dpkg-deb").arg("--field").arg(&path).arg(name).output().unwrap();
            String::from_utf8(output.stdout).unwrap()
        };
        assert_eq!([field("Version"), field("Installed-Size")], ["1.2.3\n", "3\n"]);
        // No address of the machine that has built it.
        assert_eq!(field("Maintainer"), "The Bulkhead authors\n");
    }
}
