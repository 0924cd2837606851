//! Volumes that kubelet writes: ConfigMap, Secret, downward API and projected volumes.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use tempfile::TempDir;

use super::super::Case;
use crate::command::wait_until;
use crate::ctr::Host;
use crate::fixtures::scratch;
use crate::pods::{NewContainer, Pod};

pub(in crate::cases) const CASES: &[Case] = &[
    Case::both("an_update_comes_as_a_whole_and_raises_events", update),
    Case::both("a_volume_too_large_for_a_copy_is_read_from_the_host", too_large),
    Case::both("containers_meet_at_sockets_and_pipes_in_a_volume", meeting_places),
    Case::both("files_of_a_volume_are_the_same_ones_for_all_containers", same_files),
];

/// The files of a volume, by their names.
type Files<'f> = [(&'f str, &'f [u8])];

/// A volume as kubelet's AtomicWriter writes it.
struct Volume {
    path: PathBuf,
    _kubelet: TempDir,
}

impl Volume {
    /// The first version. kubelet gives all files to the group of the pod.
    fn of_config_map(pod: &Pod<'_>, files: &Files<'_>) -> Result<Self> {
        let kubelet = scratch()?;
        let path =
            kubelet.path().join("pods").join(pod.uid()?).join("volumes/kubernetes.io~configmap/config");
        fs::create_dir_all(&path)?;
        own(&path, 0o2777)?;
        let volume = Self { path, _kubelet: kubelet };
        volume.write("..2026_11_25_10_00_00.1", files)?;
        Ok(volume)
    }

    fn at(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Writes a version in kubelet's order, and removes the one before.
    fn write(&self, version: &str, files: &Files<'_>) -> Result<()> {
        let old = fs::read_link(self.at("..data"));
        fs::create_dir(self.at(version))?;
        for (name, contents) in files {
            let file = self.at(version).join(name);
            fs::write(&file, contents)?;
            own(&file, 0o440)?;
        }
        own(&self.at(version), 0o2755)?;
        symlink(version, self.at("..data_tmp"))?;
        fs::rename(self.at("..data_tmp"), self.at("..data"))?;
        for (name, _) in files {
            if fs::symlink_metadata(self.at(name)).is_err() {
                symlink(Path::new("..data").join(name), self.at(name))?;
            }
        }
        for entry in fs::read_dir(&self.path)? {
            let name = entry?.file_name();
            let is_wanted = files.iter().any(|(wanted, _)| name.to_str() == Some(wanted));
            if !is_wanted && !name.as_encoded_bytes().starts_with(b"..") {
                fs::remove_file(self.path.join(name))?;
            }
        }
        if let Ok(old) = old {
            fs::remove_dir_all(self.path.join(old))?;
        }
        Ok(())
    }
}

fn own(path: &Path, mode: u32) -> Result<()> {
    chown(path, Some(0), Some(2000))?;
    Ok(fs::set_permissions(path, Permissions::from_mode(mode))?)
}

/// With the host's perl.
fn with_perl(container: NewContainer<'_>) -> NewContainer<'_> {
    let directories = [("/usr", "/usr"), ("/usr/lib", "/lib"), ("/usr/lib64", "/lib64")];
    directories.iter().fold(container, |container, (source, destination)| {
        container.mount_read_only(Path::new(source), destination)
    })
}

/// Prints the names in /config that are made or moved there. It watches the directory, as fsnotify does for programs.
const WATCH: &str = r#"
    $| = 1;
    my $directory = "/config";
    my $watch = syscall(294, 0);
    syscall(254, $watch, $directory, 0x180) >= 0 or die "inotify_add_watch: $!";
    open(my $events, "<&=", $watch) or die $!;
    print "ready\n";
    while (sysread($events, my $read, 4096)) {
        while (length $read) {
            my (undef, $mask, undef, $length) = unpack "iIII", $read;
            print $mask & 0x80 ? "moved " : "made ", unpack("Z*", substr($read, 16, $length)), "\n";
            $read = substr $read, 16 + $length;
        }
    }
"#;

fn update(host: &Host) -> Result<()> {
    let pod = Pod::start(host)?;
    let [old, new] = [b"1\n", b"2\n"].map(|line| line.repeat(20_000));
    let volume = Volume::of_config_map(&pod, &[("big", &old), ("old", b"")])?;
    let container = || pod.container().mount_read_only(&volume.path, "/config");
    let watcher = with_perl(container()).start(&["/usr/bin/perl", "-e", WATCH])?;
    let script =
        "show() { sort -u /config/big | tr -d '\\n'; echo; }; until [ -e /config/new ]; do show; done; show";
    let reader = container().start(&["sh", "-c", script])?;
    let listed = "cd /config; stat -c '%a %u %g %n' . ..data/ ..data/*; ls; readlink ..data big; \
                  touch file 2>/dev/null || echo read-only";
    let seen = |version: &str, file: &str| {
        format!(
            "2777 0 2000 .\n2755 0 2000 ..data/\n440 0 2000 ..data/big\n440 0 2000 ..data/{file}\nbig\n{file}\n\
             {version}\n..data/big\nread-only\n"
        )
    };
    watcher.wait_for("ready")?;
    reader.wait_for("1\n")?;
    watcher.sh(listed)?.succeeds()?.prints(&seen("..2026_11_25_10_00_00.1", "old"))?;

    volume.write("..2026_11_25_10_01_00.2", &[("big", &new), ("new", b"")])?;
    watcher.wait_for("moved ..data\n")?;
    watcher.wait_for("made new\n")?;
    let finished = reader.finish()?;
    finished.succeeds()?;
    let text = finished.text();
    let versions: Vec<_> = text.split_whitespace().collect();
    let is_whole = versions.is_sorted() && versions.iter().all(|version| ["1", "2"].contains(version));
    ensure!(is_whole && versions.last() == Some(&"2"), "expected  1 and then 2\ncame      {text}");
    wait_until("the second version in the other container", host.patience(super::SEEN), || {
        Ok(watcher.sh(listed)?.text() == seen("..2026_11_25_10_01_00.2", "new"))
    })?;
    pod.remove()
}

/// Locks /v/lock, and holds the lock.
const LOCK: &str = r#"
    open(my $file, ">", "/v/lock") or die $!;
    flock($file, 2) or die $!;
    mkdir "/v/sub" or die $!;
    $| = 1;
    print "locked\n";
    sleep 1000;
"#;

/// Says whether it could lock the file now.
const TRY_LOCK: &str =
    r#"open(my $file, "<", "/v/lock") or die $!; print flock($file, 6) ? "free\n" : "locked\n""#;

/// So one container sees what another one locks and makes. The first may write, and goes before the second, which only
/// reads.
fn same_files(host: &Host) -> Result<()> {
    let directory = scratch()?;
    let pod = Pod::start(host)?;
    let writer = with_perl(pod.container()).mount(directory.path(), "/v");
    let writer = writer.start(&["/usr/bin/perl", "-e", LOCK])?;
    writer.wait_for("locked\n")?;
    let watch = WATCH.replace("/config", "/v");
    let reader = with_perl(pod.container()).mount_read_only(directory.path(), "/v");
    let reader = reader.start(&["/usr/bin/perl", "-e", &watch])?;
    reader.wait_for("ready\n")?;
    let inodes = "stat -c %d:%i /v /v/sub /v/lock; touch /v/new 2>/dev/null || echo read-only";
    let seen = writer.sh(inodes)?.text();
    reader.wait_for("made new\n")?;
    reader.sh(inodes)?.succeeds()?.prints(&format!("{seen}read-only\n"))?;
    let lock = || reader.exec(&["/usr/bin/perl", "-e", TRY_LOCK]);
    lock()?.prints("locked\n")?;
    // The volume stays when the container ends that was the first to have it.
    writer.stop(0)?;
    writer.remove()?;
    lock()?.prints("free\n")?;
    pod.remove()
}

fn too_large(host: &Host) -> Result<()> {
    let pod = Pod::start(host)?;
    let [old, new] = [b"1\n", b"2\n"].map(|line| line.repeat(2 << 20));
    let volume = Volume::of_config_map(&pod, &[("big", &old)])?;
    let container = pod.container().mount_read_only(&volume.path, "/config").start(&["sleep", "1000"])?;
    let shown = "head -n 1 /config/big; stat -Lc %s /config/big";
    container.sh(shown)?.succeeds()?.prints("1\n4194304\n")?;
    volume.write("..2026_11_25_10_01_00.2", &[("big", &new)])?;
    wait_until("the second version", host.patience(super::SEEN), || {
        Ok(container.sh(shown)?.text() == "2\n4194304\n")
    })?;
    pod.remove()
}

/// Answers each client at /data/socket with what it has sent.
const SERVE: &str = r#"
    use IO::Socket::UNIX;
    my $listener = IO::Socket::UNIX->new(Local => "/data/socket", Listen => 5) or die $!;
    chmod 0600, "/data/socket" or die $!;
    $| = 1;
    print "ready\n";
    while (my $client = $listener->accept) {
        $client->print(scalar <$client>);
    }
"#;
const ASK: &str = r#"
    use IO::Socket::UNIX;
    my $server = IO::Socket::UNIX->new(Peer => "/volume/socket") or die $!;
    $server->print("question\n");
    print <$server>;
"#;

/// As of an `emptyDir` on a disk, by which the containers of a pod reach one another.
fn meeting_places(host: &Host) -> Result<()> {
    let volume = scratch()?;
    let pod = Pod::start(host)?;
    let server = with_perl(pod.container().mount(volume.path(), "/data"));
    let server = server.start(&["/usr/bin/perl", "-e", SERVE])?;
    server.wait_for("ready\n")?;
    let client = with_perl(pod.container().mount_read_only(volume.path(), "/volume"));
    let client = client.start(&["sleep", "1000"])?;
    client.exec(&["/usr/bin/perl", "-e", ASK])?.succeeds()?.prints("question\n")?;
    // The server may change what the client has looked up, which may only read.
    let script = "mkfifo /data/pipe; (echo text > /data/pipe) > /dev/null 2>&1 & \
                  chmod 660 /data/socket && stat -c %a /data/socket";
    server.sh(script)?.succeeds()?.prints("660\n")?;
    client.exec(&["cat", "/volume/pipe"])?.succeeds()?.prints("text\n")?;
    pod.remove()
}
