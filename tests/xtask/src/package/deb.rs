//! The Debian package (deb(5)): an ar(1) archive of its format's version, of what dpkg must know, and of the files.
//!
//! It is written here and not by cargo-deb, because its files are not those of one cargo package, but the list that the
//! archive has too: programs of several packages, the guest kernel, the initramfs, man pages and licenses; and the same
//! files must give the same bytes.

use anyhow::{Context, Result};
use md5::{Digest, Md5};

use super::archive::{File, gzipped_with_directories};

/// After dpkg has installed or upgraded the package, systemd knows its unit. One that runs is that of this version.
/// What a removal has kept is not needed: the program is there again.
const AFTER_INSTALLATION: &str = "#!/bin/sh
set -e
if [ \"$1\" = configure ]; then
    rm -rf /var/lib/bulkhead-uninstall
    if [ -d /run/systemd/system ]; then
        systemctl daemon-reload || :
        systemctl try-restart bulkhead-metrics.service || :
    fi
fi
";

/// Before dpkg removes the package, its unit ends, and containerd's configuration becomes what it was. An upgrade
/// leaves both. dpkg ignores the signal of Ctrl-C while this runs, and leaves the package installed if this fails.
const BEFORE_REMOVAL: &str = "#!/bin/sh
set -e
program=/usr/bin/bulkhead
kept=/var/lib/bulkhead-uninstall
say() { echo \"bulkhead: $*\" >&2; }
if [ \"$1\" = remove ]; then
    pods=$(timeout --kill-after 5 20 $program ps --json 2>/dev/null) || pods='\"state\": \"unknown\"'
    case \"$pods\" in
        *'\"state\": \"running\"'*) found='Pods of Bulkhead run on this host.' ;;
        *'\"state\": \"unknown\"'*) found='It is not known whether pods of Bulkhead run on this host.' ;;
        *) found= ;;
    esac
    if [ -n \"$found\" ]; then
        say \"$found They go on until they end, but no new\"
        say 'pod starts, and what a pod leaves whose shim crashes stays, until Bulkhead is installed again.'
        if [ -t 2 ]; then
            say 'To stop the removal, press Ctrl-C within 15 seconds.'
            trap 'say \"the removal was stopped; nothing was changed\"; exit 1' INT
            sleep 15
            trap - INT
        else
            say 'If you did not want this, install the package again now.'
        fi
    fi
    if [ -d /run/systemd/system ]; then
        systemctl --no-reload disable --now bulkhead-metrics.service || :
    fi
    # A package whose program is gone, or cannot do it, can be removed all the same.
    # One that hangs is ended, because dpkg would wait for it.
    if ! [ -x $program ]; then
        say 'not all was undone, because there is no /usr/bin/bulkhead.'
        say 'Remove its handlers from the configuration of containerd, or install the package again,'
        say 'run `bulkhead uninstall`, and then remove it.'
    elif ! timeout --kill-after 10 120 $program uninstall; then
        # The purge needs a program that can undo the rest. A link needs no space on a full disk.
        rm -rf $kept
        if mkdir -p -m 700 $kept && { ln $program $kept/bulkhead 2>/dev/null ||
            { cp $program $kept/bulkhead.new && mv $kept/bulkhead.new $kept/bulkhead; }; }; then
            say 'not all was undone, for the reason above. The program is kept for that. When the reason is gone,'
            say \"run \\`$kept/bulkhead uninstall\\`, or \\`dpkg --purge bulkhead\\`.\"
        else
            # The purge says it again if the directory is there.
            rm -f $kept/bulkhead.new
            say 'not all was undone, for the reason above.'
            say 'Remove its handlers from the configuration of containerd.'
        fi
    fi
fi
";

/// After dpkg has removed the unit, systemd forgets it. What it keeps is removed by a purge only: the operator's files.
/// A purge completes what the removal could not undo. If it cannot either, dpkg takes the package for not purged. The
/// record of a configuration that may still have the handlers is never removed here: `bulkhead uninstall` does that.
const AFTER_REMOVAL: &str = "#!/bin/sh
set -e
kept=/var/lib/bulkhead-uninstall
record=/etc/bulkhead/containerd-config
say() { echo \"bulkhead: $*\" >&2; }
if [ \"$1\" = remove ] && [ -d /run/systemd/system ]; then
    systemctl daemon-reload || :
fi
if [ \"$1\" = purge ]; then
    # Its handlers, its templates and /etc/bulkhead are those of another installation by now.
    if [ -e /usr/local/bin/bulkhead ]; then
        rm -rf $kept
        say 'kept /etc/bulkhead, and what it configures, for the installation of /usr/local/bin/bulkhead.'
        exit 0
    fi
    if [ -e $kept/bulkhead ] && ! timeout --kill-after 10 120 $kept/bulkhead uninstall >&2; then
        say 'not all was undone, for the reason above. When it is gone, run `dpkg --purge bulkhead` again.'
        say \"To purge the package without that, remove $kept first.\"
        exit 1
    fi
    if [ -d $kept ] && ! [ -e $kept/bulkhead ]; then
        say 'not all was undone when the package was removed, and its program could not be kept.'
        say 'Remove its handlers from the configuration of containerd.'
    fi
    rm -rf $kept
    if [ -e $record ]; then
        find /etc/bulkhead -mindepth 1 ! -path $record -delete
        say \"kept $record: the handlers may still be in the configuration that it names.\"
        say 'Install the package again and run `bulkhead uninstall`, or remove both by hand.'
    else
        rm -rf /etc/bulkhead
    fi
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

    /// A host that is a directory, without systemd.
    struct Host(tempfile::TempDir);

    impl Host {
        fn new() -> Self {
            let host = Self(tempfile::tempdir().unwrap());
            fs::create_dir_all(host.at("/etc/bulkhead")).unwrap();
            fs::create_dir_all(host.at("/usr/bin")).unwrap();
            host
        }

        fn at(&self, path: &str) -> std::path::PathBuf {
            self.0.path().join(path.trim_start_matches('/'))
        }

        fn write(&self, path: &str, text: &str) {
            fs::write(self.at(path), text).unwrap();
            fs::set_permissions(self.at(path), fs::Permissions::from_mode(0o755)).unwrap();
        }

        /// What a script is on this host.
        fn script(&self, script: &str) -> String {
            let mut script = script.replace("/run/systemd/system", "/no/such/directory");
            for directory in ["/usr/bin/", "/usr/local/bin/", "/etc/bulkhead", "/var/lib/"] {
                script = script.replace(directory, &format!("{}{directory}", self.0.path().display()));
            }
            script.replace(" 10 120 ", " 1 1 ")
        }

        /// Runs a script as dpkg does. Returns whether it has succeeded, and its standard error.
        fn run(&self, script: &str, what: &str) -> (bool, String) {
            fs::create_dir_all(self.at("/var/lib")).unwrap();
            let ended =
                Command::new("sh").args(["-c", &self.script(script), "script", what]).output().unwrap();
            (ended.status.success(), String::from_utf8(ended.stderr).unwrap())
        }
    }

    /// A program that says which pods there are, and undoes with the status of the file `status` beside it.
    const PROGRAM: &str = "#!/bin/sh
[ \"$1\" != ps ] || exec cat \"$0.pods\"
echo \"$*\" >> \"$0.called\"
[ ! -e \"$0.fails\" ]
";

    #[test]
    fn a_command_that_hangs_keeps_no_package() {
        let host = Host::new();
        for hangs in ["#!/bin/sh\nexec sleep 60\n", "#!/bin/sh\ntrap '' TERM\nsleep 60\nsleep 60\n"] {
            let only_uninstall = hangs.replace("#!/bin/sh\n", "#!/bin/sh\n[ \"$1\" != ps ] || exit 1\n");
            host.write("/usr/bin/bulkhead", &only_uninstall);
            let begun = Instant::now();
            let (is_removed, said) = host.run(BEFORE_REMOVAL, "remove");
            assert!(is_removed && said.contains("bulkhead: not all was undone"), "{said}");
            assert!(begun.elapsed() < Duration::from_secs(50), "{hangs}");
            assert!(host.at("/var/lib/bulkhead-uninstall/bulkhead").exists(), "{said}");
        }
    }

    #[test]
    fn a_removal_says_what_becomes_of_pods_that_run() {
        let host = Host::new();
        host.write("/usr/bin/bulkhead", PROGRAM);
        let pods =
            |state: &str| format!("[\n  {{\n    \"id\": \"a\",\n    \"state\": \"{state}\"\n  }}\n]\n");
        for none in ["[]\n", &pods("leftover")] {
            host.write("/usr/bin/bulkhead.pods", none);
            assert_eq!(host.run(BEFORE_REMOVAL, "remove"), (true, String::new()));
        }
        let not_known = "not known whether pods of Bulkhead run";
        for state in ["unknown", "leftover"] {
            host.write("/usr/bin/bulkhead.pods", &pods(state));
            let program =
                if state == "unknown" { PROGRAM } else { &PROGRAM.replace("exec cat", "exec false") };
            host.write("/usr/bin/bulkhead", program);
            let (is_removed, said) = host.run(BEFORE_REMOVAL, "remove");
            assert!(is_removed && said.contains(not_known) && said.contains("install the package"), "{said}");
        }
        host.write("/usr/bin/bulkhead", PROGRAM);
        host.write("/usr/bin/bulkhead.pods", &pods("running"));
        let (is_removed, said) = host.run(BEFORE_REMOVAL, "remove");
        assert!(is_removed && !said.contains(not_known), "{said}");
        for part in ["They go on until they end", "no new\nbulkhead: pod starts", "install the package again"]
        {
            assert!(said.contains(part), "{said}");
        }
        assert_eq!(host.run(BEFORE_REMOVAL, "upgrade"), (true, String::new()));
        // On a terminal the removal can be stopped, before anything is undone.
        fs::remove_file(host.at("/usr/bin/bulkhead.called")).unwrap();
        let script = host.script(BEFORE_REMOVAL).replace("[ -t 2 ]", "true");
        let command = ["--signal", "INT", "2", "sh", "-c", &script, "script", "remove"];
        let begun = Instant::now();
        let ended = Command::new("timeout").args(command).output().unwrap();
        let said = String::from_utf8(ended.stderr).unwrap();
        assert!(said.contains("Ctrl-C") && said.contains("the removal was stopped"), "{said}");
        assert!(begun.elapsed() < Duration::from_secs(12), "{said}");
        assert!(!host.at("/usr/bin/bulkhead.called").exists());
        // Whoever does nothing goes on.
        let script = script.replace("sleep 15", "sleep 0");
        let ended = Command::new("sh").args(["-c", &script, "script", "remove"]).output().unwrap();
        assert!(ended.status.success() && host.at("/usr/bin/bulkhead.called").exists());
    }

    #[test]
    fn what_a_removal_could_not_undo_is_undone_by_a_purge() {
        let host = Host::new();
        let kept = "/var/lib/bulkhead-uninstall/bulkhead";
        let record = "/etc/bulkhead/containerd-config";
        host.write("/usr/bin/bulkhead", PROGRAM);
        host.write("/usr/bin/bulkhead.pods", "[]\n");
        host.write("/usr/bin/bulkhead.fails", "");
        host.write(record, "/elsewhere/config.toml\n");
        let (is_removed, said) = host.run(BEFORE_REMOVAL, "remove");
        assert!(is_removed && said.contains("dpkg --purge bulkhead"), "{said}");
        fs::remove_file(host.at("/usr/bin/bulkhead")).unwrap();
        assert_eq!(host.run(AFTER_REMOVAL, "remove"), (true, String::new()));
        // It fails as long as the reason is there, and keeps all that is needed.
        host.write(&format!("{kept}.fails"), "");
        let (is_purged, said) = host.run(AFTER_REMOVAL, "purge");
        assert!(!is_purged && said.contains("not all was undone"), "{said}");
        assert!(host.at(record).exists() && host.at(kept).exists());
        fs::remove_file(host.at(&format!("{kept}.fails"))).unwrap();
        // The program removes its record.
        host.write(kept, &format!("#!/bin/sh\nrm {}\n", host.at(record).display()));
        assert_eq!(host.run(AFTER_REMOVAL, "purge"), (true, String::new()));
        assert!(!host.at("/etc/bulkhead").exists() && !host.at("/var/lib/bulkhead-uninstall").exists());
    }

    #[test]
    fn a_full_disk_loses_neither_the_program_nor_what_is_to_be_done() {
        let host = Host::new();
        let kept = "/var/lib/bulkhead-uninstall/bulkhead";
        host.write("/usr/bin/bulkhead", PROGRAM);
        host.write("/usr/bin/bulkhead.pods", "[]\n");
        host.write("/usr/bin/bulkhead.fails", "");
        let full = BEFORE_REMOVAL.replace("cp $program", "false");
        let (is_removed, said) = host.run(&full, "remove");
        assert!(is_removed && said.contains("dpkg --purge bulkhead") && host.at(kept).exists(), "{said}");
        // Neither can it be linked.
        let full = full.replace("ln $program", "false");
        let (is_removed, said) = host.run(&full, "remove");
        assert!(is_removed && said.contains("Remove its handlers") && !host.at(kept).exists(), "{said}");
        let (is_purged, said) = host.run(AFTER_REMOVAL, "purge");
        assert!(is_purged && said.contains("Remove its handlers"), "{said}");
        assert_eq!(host.run(AFTER_REMOVAL, "purge"), (true, String::new()));
        // A program that may not be executed there is not taken for one that has done it.
        fs::create_dir(host.at("/var/lib/bulkhead-uninstall")).unwrap();
        host.write(kept, "");
        fs::set_permissions(host.at(kept), fs::Permissions::from_mode(0o600)).unwrap();
        let (is_purged, said) = host.run(AFTER_REMOVAL, "purge");
        assert!(!is_purged && said.contains("not all was undone") && host.at(kept).exists(), "{said}");
    }

    #[test]
    fn a_purge_leaves_an_installation_of_the_archive_alone() {
        let host = Host::new();
        let kept = "/var/lib/bulkhead-uninstall/bulkhead";
        for directory in ["/var/lib/bulkhead-uninstall", "/usr/local/bin"] {
            fs::create_dir_all(host.at(directory)).unwrap();
        }
        host.write("/usr/local/bin/bulkhead", "");
        host.write("/etc/bulkhead/config.toml", "");
        host.write(kept, &format!("#!/bin/sh\ntouch {}\n", host.at("/called").display()));
        let (is_purged, said) = host.run(AFTER_REMOVAL, "purge");
        assert!(is_purged && said.contains("for the installation of "), "{said}");
        assert!(host.at("/etc/bulkhead/config.toml").exists() && !host.at("/called").exists());
        assert!(!host.at("/var/lib/bulkhead-uninstall").exists());
    }

    #[test]
    fn a_purge_without_a_program_keeps_the_record_and_nothing_else() {
        let host = Host::new();
        let record = "/etc/bulkhead/containerd-config";
        host.write("/etc/bulkhead/config.toml", "");
        fs::create_dir(host.at("/etc/bulkhead/config.d")).unwrap();
        host.write("/etc/bulkhead/config.d/own.toml", "");
        host.write(record, "/elsewhere/config.toml\n");
        let (is_removed, said) = host.run(BEFORE_REMOVAL, "remove");
        assert!(is_removed && said.contains("not all was undone"), "{said}");
        let (is_purged, said) = host.run(AFTER_REMOVAL, "purge");
        assert!(is_purged && said.contains("/etc/bulkhead/containerd-config"), "{said}");
        let left: Vec<_> =
            fs::read_dir(host.at("/etc/bulkhead")).unwrap().map(|it| it.unwrap().path()).collect();
        assert_eq!(left, [host.at(record)]);
        fs::remove_file(host.at(record)).unwrap();
        assert_eq!(host.run(AFTER_REMOVAL, "purge"), (true, String::new()));
        assert!(!host.at("/etc/bulkhead").exists());
    }

    #[test]
    fn an_installation_needs_the_kept_program_no_more() {
        let host = Host::new();
        fs::create_dir_all(host.at("/var/lib/bulkhead-uninstall")).unwrap();
        assert_eq!(host.run(AFTER_INSTALLATION, "configure"), (true, String::new()));
        assert!(!host.at("/var/lib/bulkhead-uninstall").exists());
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
