//! What kubelet mounts in containers: volumes, projected files, and the files of the pod itself.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::mount::{MntFlags, umount2};

use super::super::Case;
use crate::command::{Cmd, wait_until};
use crate::cri::messages::Int64Value;
use crate::ctr::Host;
use crate::fixtures::scratch;
use crate::pods::{Container, Pod};

pub(in crate::cases) const CASES: &[Case] = &[
    Case::both("the_pods_hosts_hostname_and_resolver_files_are_there", pod_files),
    Case::both("a_hosts_file_of_kubelets_is_the_containers", hosts_file),
    Case::both("a_directory_of_the_host_is_seen_and_written", host_directory),
    Case::both("a_read_only_directory_of_the_host_is_only_read", read_only_directory),
    Case::both("a_directory_of_the_host_that_is_missing_is_made", missing_directory),
    Case::both("two_containers_write_and_read_one_directory", shared_directory),
    Case::both("a_swapped_symlink_of_a_projected_volume_is_seen", swapped_symlink),
    Case::both("a_single_secret_file_is_only_read", secret_file),
    Case::both("the_termination_log_is_read_on_the_host", termination_log),
    Case::both("a_volumes_group_may_write_to_it", group_volume),
    Case::both("a_mount_within_a_mount_is_seen", nested_mounts),
    Case::both("a_volume_of_a_removed_container_is_not_in_use_any_more", volume_is_free),
    Case::both("the_removal_of_a_container_leaves_what_another_has_cached", cache_stays),
];

pub(super) fn pod_files(host: &Host) -> Result<()> {
    let pod =
        Pod::plan(host).hostname("db-1").dns(&["10.0.0.10", "fd00::10"], &["e2e.svc", "svc"], &["ndots:5"]);
    let pod = pod.start()?;
    let script = "cat /etc/hostname /etc/resolv.conf; test -s /etc/hosts; for file in hosts hostname resolv.conf; do \
                  grep -c \" /etc/$file \" /proc/self/mounts; done";
    let expected =
        "db-1\nsearch e2e.svc svc\nnameserver 10.0.0.10\nnameserver fd00::10\noptions ndots:5\n1\n1\n1\n";
    pod.container().sh(script)?.succeeds()?.prints(expected)?;
    Ok(())
}

pub(super) fn hosts_file(host: &Host) -> Result<()> {
    let directory = scratch()?;
    let file = directory.path().join("etc-hosts");
    fs::write(&file, "127.0.0.1 localhost\n10.1.2.3 db\n")?;
    let pod = Pod::start(host)?;
    let container = pod.container().mount(&file, "/etc/hosts").start(&["sleep", "1000"])?;
    container.exec(&["cat", "/etc/hosts"])?.prints("127.0.0.1 localhost\n10.1.2.3 db\n")?;
    // Kubelet writes to it in place.
    fs::write(&file, "127.0.0.1 localhost\n10.4.5.6 db\n")?;
    wait_until("the new address", host.patience(super::SEEN), || {
        Ok(container.exec(&["grep", "-q", "10.4.5.6", "/etc/hosts"])?.status == Some(0))
    })
}

fn host_directory(host: &Host) -> Result<()> {
    let directory = scratch()?;
    fs::write(directory.path().join("from-host"), "host\n")?;
    let pod = Pod::start(host)?;
    let container = pod.container().mount(directory.path(), "/data");
    container
        .sh("cat /data/from-host; echo container > /data/from-container")?
        .succeeds()?
        .prints("host\n")?;
    let written = fs::read_to_string(directory.path().join("from-container"))?;
    ensure!(written == "container\n", "expected  what the container wrote\ncame      {written:?}");
    Ok(())
}

fn read_only_directory(host: &Host) -> Result<()> {
    let directory = scratch()?;
    fs::write(directory.path().join("file"), "text\n")?;
    let pod = Pod::start(host)?;
    let container = pod.container().mount_read_only(directory.path(), "/data");
    let script = "cat /data/file; touch /data/other 2>&1; rm /data/file 2>&1; true";
    let expected = "text\ntouch: /data/other: Read-only file system\nrm: can't remove '/data/file': Read-only file system\n";
    container.sh(script)?.succeeds()?.prints(expected)?;
    Ok(())
}

fn missing_directory(host: &Host) -> Result<()> {
    let directory = scratch()?;
    let missing = directory.path().join("not/there/yet");
    let pod = Pod::start(host)?;
    pod.container().mount(&missing, "/data").run(&["touch", "/data/file"])?.succeeds()?;
    ensure!(missing.join("file").exists(), "expected  the directory made\ncame      none");
    Ok(())
}

fn shared_directory(host: &Host) -> Result<()> {
    let directory = scratch()?;
    let pod = Pod::start(host)?;
    let reader = pod.container().mount(directory.path(), "/in");
    let reader = reader.start(&["sh", "-c", "until [ -e /in/done ]; do sleep 0.1; done; cat /in/part*"])?;
    let script = "echo one > /out/part1; echo two > /out/part2; touch /out/done";
    pod.container().mount(directory.path(), "/out").sh(script)?.succeeds()?;
    reader.finish()?.succeeds()?.prints("one\ntwo\n")?;
    Ok(())
}

fn swapped_symlink(host: &Host) -> Result<()> {
    // Kubelet's AtomicWriter: key -> ..data/key, and ..data is renamed over.
    let volume = scratch()?;
    let path = |name: &str| volume.path().join(name);
    for (version, text) in [("..v1", "first\n"), ("..v2", "second\n")] {
        fs::create_dir(path(version))?;
        fs::write(path(version).join("key"), text)?;
    }
    symlink("..v1", path("..data"))?;
    symlink("..data/key", path("key"))?;
    let pod = Pod::start(host)?;
    let container = pod.container().mount_read_only(volume.path(), "/config").start(&["sleep", "1000"])?;
    container.exec(&["cat", "/config/key"])?.prints("first\n")?;
    symlink("..v2", path("..data_tmp"))?;
    fs::rename(path("..data_tmp"), path("..data"))?;
    fs::remove_dir_all(path("..v1"))?;
    wait_until("the second version", host.patience(super::SEEN), || {
        Ok(container.exec(&["cat", "/config/key"])?.text() == "second\n")
    })
}

fn secret_file(host: &Host) -> Result<()> {
    let directory = scratch()?;
    let file = directory.path().join("token");
    fs::write(&file, "secret\n")?;
    fs::set_permissions(&file, fs::Permissions::from_mode(0o400))?;
    let pod = Pod::start(host)?;
    let container = pod.container().mount_read_only(&file, "/run/secrets/token");
    let script =
        "cd /run/secrets; cat token; stat -c %a token; echo x 2>/dev/null > token || echo read-only; ls";
    container.sh(script)?.succeeds()?.prints("secret\n400\nread-only\ntoken\n")?;
    Ok(())
}

fn termination_log(host: &Host) -> Result<()> {
    let directory = scratch()?;
    let file = directory.path().join("7c0ffee");
    fs::write(&file, "")?;
    fs::set_permissions(&file, fs::Permissions::from_mode(0o666))?;
    let pod = Pod::start(host)?;
    let container = pod.container().mount(&file, "/dev/termination-log");
    container.sh("echo out of luck > /dev/termination-log; exit 1")?.exits(1)?;
    let message = fs::read_to_string(&file)?;
    ensure!(message == "out of luck\n", "expected  the container's last words\ncame      {message:?}");
    Ok(())
}

fn group_volume(host: &Host) -> Result<()> {
    let volume = scratch()?;
    chown(volume.path(), Some(0), Some(2000)).context("cannot give the volume to a group")?;
    fs::set_permissions(volume.path(), fs::Permissions::from_mode(0o2775))?;
    let pod = Pod::start(host)?;
    let container = pod.container().mount(volume.path(), "/data").security(|security| {
        security.run_as_user = Some(Int64Value { value: 1000 });
        security.supplemental_groups = vec![2000];
    });
    container
        .sh("echo mine > /data/file && stat -c '%u %g' /data/file")?
        .succeeds()?
        .prints("1000 2000\n")?;
    let data = fs::metadata(volume.path().join("file"))?;
    let owner = (data.uid(), data.gid());
    ensure!(owner == (1000, 2000), "expected  the file's owner 1000:2000 on the host\ncame      {owner:?}");
    Ok(())
}

fn nested_mounts(host: &Host) -> Result<()> {
    let (outer, inner) = (scratch()?, scratch()?);
    fs::write(outer.path().join("outer"), "outer\n")?;
    fs::write(inner.path().join("inner"), "inner\n")?;
    let pod = Pod::start(host)?;
    let container =
        pod.container().mount(outer.path(), "/data").mount_read_only(inner.path(), "/data/deep/within");
    let script =
        "cat /data/outer /data/deep/within/inner; touch /data/deep/within/file 2>/dev/null || echo read-only";
    container.sh(script)?.succeeds()?.prints("outer\ninner\nread-only\n")?;
    Ok(())
}

/// How soon the file system of a volume must be free.
pub(in crate::cases) const DETACHED: Duration = Duration::from_secs(10);

/// A file system of which it can be told whether anybody uses it: an overlay with an index has its upper directory for
/// itself, and cannot be mounted again before the last user is gone.
pub(in crate::cases) struct Disk {
    directory: tempfile::TempDir,
}

impl Disk {
    pub(in crate::cases) fn mount() -> Result<Self> {
        let disk = Self { directory: scratch()? };
        for name in ["lower", "upper", "work", "mounted"] {
            fs::create_dir(disk.directory.path().join(name))?;
        }
        disk.mount_again().run()?.succeeds()?;
        let again = disk.mount_again().run()?;
        again.check("the file system to be in use", again.status != Some(0))?;
        Ok(disk)
    }

    fn mount_again(&self) -> Cmd {
        let at = |name: &str| self.directory.path().join(name).display().to_string();
        let options =
            format!("index=on,lowerdir={},upperdir={},workdir={}", at("lower"), at("upper"), at("work"));
        Cmd::new("mount").args(["-t", "overlay", "-o", &options, "overlay", &at("mounted")])
    }

    pub(in crate::cases) fn place(&self) -> PathBuf {
        self.directory.path().join("mounted")
    }

    fn unmount(&self) -> Result<()> {
        Cmd::new("umount").args([self.place()]).run()?.succeeds().map(drop)
    }

    /// Unmounts it, and waits until nobody uses it.
    pub(in crate::cases) fn detach(&self, within: Duration) -> Result<()> {
        self.unmount()?;
        wait_until("the file system of the volume to be free", within, || {
            Ok(self.mount_again().run()?.status == Some(0))
        })?;
        self.unmount()
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // The case has failed if it is mounted still.
        let _ = umount2(&self.place(), MntFlags::MNT_DETACH);
    }
}

/// As a storage driver detaches a disk while the pod goes on.
fn volume_is_free(host: &Host) -> Result<()> {
    let disk = Disk::mount()?;
    let pod = Pod::start(host)?;
    let stays = pod.container().start(&["sleep", "1000"])?;
    let script = "mkdir -p /data/a/b; cd /data/a/b; echo text > file; exec 3< file; rm file; cat /data/a/b/* ../*; \
                  ls -lR /data > list; echo ready; exec sleep 1000";
    let user = pod.container().mount(&disk.place(), "/data").start(&["sh", "-c", script])?;
    user.wait_for("ready")?;
    user.stop(0)?;
    user.remove()?;
    disk.detach(host.patience(DETACHED))?;
    stays.exec(&["true"])?.succeeds()?;
    pod.remove()
}

/// Bytes of files in the caches that are charged to a container.
fn cached(container: &Container<'_>) -> Result<u64> {
    let text = container.sh("grep '^file ' /sys/fs/cgroup/memory.stat")?.succeeds()?.text();
    let bytes = text.split_whitespace().nth(1).context("no number of bytes")?;
    bytes.parse().with_context(|| format!("{bytes:?} is no number of bytes"))
}

fn cache_stays(host: &Host) -> Result<()> {
    const SIZE: u64 = 24 << 20;
    let directory = scratch()?;
    let pod = Pod::start(host)?;
    let write = "dd if=/dev/zero of=/data/$0 bs=1M count=24 2> /dev/null; sync; cat /data/$0 > /dev/null; echo ready; \
                 exec sleep 1000";
    let start = |name| {
        let container = pod.container().mount(directory.path(), "/data").start(&["sh", "-c", write, name])?;
        container.wait_for("ready")?;
        Ok::<_, anyhow::Error>(container)
    };
    let (stays, goes) = (start("one")?, start("two")?);
    let before = cached(&stays)?;
    ensure!(before >= SIZE, "expected  a cache of {SIZE} bytes or more\ncame      {before}");
    goes.stop(0)?;
    goes.remove()?;
    let after = cached(&stays)?;
    ensure!(after >= SIZE, "expected  as much in the cache as before, {before} bytes\ncame      {after}");
    pod.remove()
}
