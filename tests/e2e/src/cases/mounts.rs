//! The container's file system: its root, the spec's mounts, what is hidden, and what the user mounts.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::mount::{MntFlags, MsFlags, mount, umount2};

mod kernel_files;
mod many_known;
mod synced;

use super::Case;
use super::crash::kill_process;
use super::programs::on_disk;
use crate::command::{Finished, wait_until};
use crate::ctr::{Attached, Container, Host, Runtime};
use crate::fixtures::{Root, Spec, scratch};
use crate::image_root::ImageRoot;

pub(super) const CASES: &[Case] = &[
    Case::both("the_mounts_are_the_specs", spec_mounts),
    Case::both("the_root_has_devices_programs_and_their_set_user_id_bits", root_options),
    Case::both("secrets_of_the_kernel_are_masked", masked_paths),
    Case::both("knobs_of_the_kernel_are_read_only", read_only_paths),
    Case::both("what_a_container_writes_does_not_survive_it", writes_do_not_survive),
    Case::both("a_read_only_root_cannot_be_written", read_only_root),
    Case::both("a_directory_of_the_host_is_seen_and_written", bind_directory),
    Case::both("a_read_only_directory_of_the_host_is_only_read", bind_read_only),
    Case::both("mounts_below_a_recursively_read_only_directory_are_only_read", bind_recursively_read_only),
    Case::both("a_single_file_of_the_host_is_seen", bind_file),
    Case::both("a_change_on_the_host_is_seen_within_a_second", bind_change_on_host),
    Case::both("what_the_host_changes_in_a_volume_is_seen_at_once_by_who_opens_it", bind_opened),
    Case::both("a_file_that_the_host_moves_or_removes_is_used_by_who_has_it_open", bind_moved),
    Case::both("what_the_host_changes_in_a_root_is_seen_by_who_opens_it", root_opened),
    Case::both("what_a_container_has_written_survives_its_crash", written_survives),
    Case::both("what_is_synced_is_on_the_disk", synced::on_disk),
    Case::both("what_the_host_mounts_later_is_seen_if_asked_for", bind_later_mount),
    Case::both("each_file_system_of_the_host_has_its_own_device_number", device_numbers),
    Case::bulkhead("mounts_of_the_container_are_not_for_the_host", bind_shared),
    Case::both("a_big_file_of_the_host_is_read_whole", bind_big_file),
    Case::both("files_that_the_hosts_kernel_makes_are_as_on_the_host", kernel_files::as_on_the_host),
    Case::both("owners_modes_and_links_are_kept", bind_metadata),
    Case::both("many_files_are_made_and_removed", many_files),
    Case::both("a_tree_of_many_directories_is_removed_whole", tree_removed),
    Case::both("what_is_mounted_stays_where_very_many_files_are_read", many_known::mounts_stay),
    Case::both("many_open_files_are_used_after_the_host_has_renamed_them", many_known::open_renamed),
    Case::both("a_tmpfs_has_its_size", tmpfs),
    // runc 1.1 leaves the root private.
    Case::bulkhead("the_propagation_of_the_root_is_the_specs", root_propagation),
    Case::both("an_option_that_the_file_system_lacks_is_refused", unknown_option),
    Case::both("a_directory_serves_as_the_root", directory_as_root),
    Case::both("files_behave_as_files_do", file_semantics),
    Case::both("a_working_directory_and_a_mount_stay_when_the_host_drops_its_caches", caches_dropped),
    Case::both("the_last_write_counts_for_contents_of_files_and_capabilities_of_programs", last_write),
];

/// How long a container may go on with a size and a date that it has seen of a file of the host.
const ATTRIBUTES_LAST: Duration = Duration::from_millis(1100);

/// The row of /proc/self/mounts for this place: type and options.
fn mounted(finished: &Finished, place: &str) -> Result<(String, Vec<String>)> {
    let text = finished.text();
    // The last one counts: it covers those before it.
    let row = text.lines().rev().find(|row| row.split(' ').nth(1) == Some(place));
    let row = row.with_context(|| format!("expected  a mount at {place}\ncame      none in\n{text}"))?;
    let mut fields = row.split(' ').skip(2);
    let kind = fields.next().unwrap_or_default().to_owned();
    Ok((kind, fields.next().unwrap_or_default().split(',').map(str::to_owned).collect()))
}

fn spec_mounts(host: &Host) -> Result<()> {
    let finished = host.run(&["cat", "/proc/self/mounts"])?;
    finished.succeeds()?;
    let expected = [
        ("/proc", "proc", ["rw", "nosuid", "nodev", "noexec"].as_slice()),
        ("/dev", "tmpfs", &["rw", "nosuid", "size=65536k", "mode=755"]),
        ("/dev/pts", "devpts", &["rw", "nosuid", "noexec", "gid=5", "mode=620", "ptmxmode=666"]),
        ("/dev/shm", "tmpfs", &["rw", "nosuid", "nodev", "noexec", "size=65536k"]),
        ("/dev/mqueue", "mqueue", &["rw", "nosuid", "nodev", "noexec"]),
        ("/sys", "sysfs", &["ro", "nosuid", "nodev", "noexec"]),
        ("/run", "tmpfs", &["rw", "nosuid", "size=65536k", "mode=755"]),
    ];
    for (place, kind, options) in expected {
        let (came_kind, came) = mounted(&finished, place)?;
        finished.check(&format!("{kind} at {place}"), kind == came_kind)?;
        for option in options {
            finished.check(&format!("{option} at {place}"), came.iter().any(|it| it == option))?;
        }
    }
    Ok(())
}

fn root_options(host: &Host) -> Result<()> {
    let finished = host.run(&["cat", "/proc/self/mounts"])?;
    let (_, options) = mounted(finished.succeeds()?, "/")?;
    for refused in ["nodev", "noexec", "nosuid"] {
        finished
            .check(&format!("no {refused} on the root"), !options.iter().any(|option| option == refused))?;
    }
    finished.check("rw on the root", options.iter().any(|option| option == "rw"))?;
    Ok(())
}

fn masked_paths(host: &Host) -> Result<()> {
    // Which of them exist depends on the kernel. Those that do must show nothing.
    let script = "for path in /proc/acpi /proc/asound /proc/kcore /proc/keys /proc/latency_stats /proc/timer_list \
                  /proc/timer_stats /proc/sched_debug /sys/firmware /sys/devices/virtual/powercap /proc/scsi; do \
                  if test -d $path; then test -z \"$(ls -A $path)\" || echo shown $path; \
                  elif test -e $path; then test -z \"$(head -c 10 $path)\" || echo shown $path; fi; done";
    host.sh(script)?.succeeds()?.prints("")?.complains("")?;
    Ok(())
}

fn read_only_paths(host: &Host) -> Result<()> {
    let finished = host.run(&["cat", "/proc/self/mounts"])?;
    for place in ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"] {
        // Kernels without SysRq or PCI lack some of them.
        if finished.text().contains(&format!(" {place} ")) || place == "/proc/sys" {
            let (_, options) = mounted(&finished, place)?;
            finished.check(&format!("{place} read-only"), options.iter().any(|option| option == "ro"))?;
        }
    }
    host.sh("echo 1 > /proc/sys/vm/overcommit_memory")?.fails_with("Read-only file system")?;
    host.sh("echo x > /sys/kernel/uevent_helper || mkdir /sys/x")?.fails_with("Read-only file system")?;
    Ok(())
}

fn writes_do_not_survive(host: &Host) -> Result<()> {
    let script =
        "test ! -e /was-here && echo me > /was-here && cat /was-here && rm /bin/yes && test ! -e /bin/yes";
    // The second one starts from the image, as the first one did.
    for _ in 0..2 {
        host.sh(script)?.succeeds()?.prints("me\n")?;
    }
    Ok(())
}

fn read_only_root(host: &Host) -> Result<()> {
    let container = host.container().flags(["--read-only"]);
    let finished = container.run(&["sh", "-c", "echo tmpfs > /run/x && cat /run/x; touch /x"])?;
    finished.prints("tmpfs\n")?.fails_with("Read-only file system")?;
    Ok(())
}

fn bind_directory(host: &Host) -> Result<()> {
    let shared = scratch()?;
    fs::write(shared.path().join("from-host"), "hello\n")?;
    let container = host.container().bind(shared.path(), "/shared", "rbind:rw");
    let script = "cat /shared/from-host && echo back > /shared/from-container && mkdir /shared/made && rm /shared/from-host";
    container.run(&["sh", "-c", script])?.succeeds()?.prints("hello\n")?;
    let back = fs::read_to_string(shared.path().join("from-container"))?;
    ensure!(back == "back\n", "expected  \"back\\n\" in the host's file\ncame      {back:?}");
    ensure!(
        shared.path().join("made").is_dir(),
        "expected  the directory the container made\ncame      none"
    );
    ensure!(!shared.path().join("from-host").exists(), "expected  the file removed\ncame      it is there");
    Ok(())
}

fn bind_read_only(host: &Host) -> Result<()> {
    let shared = scratch()?;
    fs::write(shared.path().join("file"), "hello\n")?;
    let container = host.container().bind(shared.path(), "/shared", "rbind:ro");
    let finished = container.run(&["sh", "-c", "cat /shared/file; echo changed > /shared/file"])?;
    finished.prints("hello\n")?.fails_with("Read-only file system")?;
    let kept = fs::read_to_string(shared.path().join("file"))?;
    ensure!(kept == "hello\n", "expected  the host's file unchanged\ncame      {kept:?}");
    Ok(())
}

fn bind_recursively_read_only(host: &Host) -> Result<()> {
    let shared = scratch()?;
    let below = shared.path().join("below");
    fs::create_dir(&below)?;
    let _mounted = Tmpfs::mount(&below)?;
    fs::write(below.join("file"), "hello\n")?;
    let container = host.container().bind(shared.path(), "/shared", "rbind:rro");
    let finished =
        container.run(&["sh", "-c", "cat /shared/below/file; echo changed > /shared/below/file"])?;
    finished.prints("hello\n")?.fails_with("Read-only file system")?;
    fs::write(below.join("file"), "the host's own\n").context("the host's mount has changed")?;
    Ok(())
}

fn bind_file(host: &Host) -> Result<()> {
    let shared = scratch()?;
    let (config, log) = (shared.path().join("config"), shared.path().join("log"));
    fs::write(&config, "key = value\n")?;
    fs::write(&log, "")?;
    let container =
        host.container().bind(&config, "/etc/app/config", "rbind:ro").bind(&log, "/log", "rbind:rw");
    let script = "cat /etc/app/config; ls /etc/app; echo line > /log; echo changed > /etc/app/config";
    container
        .run(&["sh", "-c", script])?
        .prints("key = value\nconfig\n")?
        .fails_with("Read-only file system")?;
    let written = fs::read_to_string(&log)?;
    ensure!(written == "line\n", "expected  \"line\\n\" in the host's file\ncame      {written:?}");
    Ok(())
}

fn bind_change_on_host(host: &Host) -> Result<()> {
    let shared = scratch()?;
    let file = shared.path().join("file");
    fs::write(&file, "before\n")?;
    let container = host.container().bind(shared.path(), "/shared", "rbind:ro");
    let script = "cat /shared/file; while read word; do cat /shared/$word; done";
    let mut attached = container.start(&["sh", "-c", script])?;
    attached.running.wait_for("before\n")?;
    fs::write(&file, "after, and longer\n")?;
    wait_until("the changed file in the container", ATTRIBUTES_LAST * 10, || {
        attached.running.write(b"file\n")?;
        Ok(attached.running.says_within("after, and longer\n", ATTRIBUTES_LAST))
    })?;
    fs::write(shared.path().join("new"), "a new file\n")?;
    attached.running.write(b"new\n")?;
    attached.running.wait_for("a new file\n")?;
    attached.running.close_input();
    attached.finish()?.succeeds()?.complains("")?;
    Ok(())
}

/// A shell in a container that executes each line of its input, and the directory of the host that it looks at.
struct Observer<'h> {
    shell: Attached<'h>,
    directory: &'h Path,
    /// How often something was expected.
    expected: u32,
}

impl<'h> Observer<'h> {
    fn start(container: Container<'h>, directory: &'h Path) -> Result<Self> {
        let shell = container.start(&["/bin/sh", "-c", "while read -r line; do eval \"$line\"; done"])?;
        Ok(Self { shell, directory, expected: 0 })
    }

    fn at(&self, name: &str) -> std::path::PathBuf {
        self.directory.join(name)
    }

    /// Replaces a file in one step.
    fn replace(&self, name: &str, make: impl FnOnce(&Path) -> std::io::Result<()>) -> Result<()> {
        let new = self.at("new");
        make(&new)?;
        Ok(fs::rename(&new, self.at(name))?)
    }

    /// Expects that the command prints this line.
    fn sees(&mut self, command: &str, line: &str) -> Result<()> {
        self.expected += 1;
        let number = self.expected;
        self.shell.running.write(format!("echo \"{number} $({command})\"\n").as_bytes())?;
        self.shell.running.wait_for(&format!("{number} {line}\n"))
    }
}

fn bind_opened(host: &Host) -> Result<()> {
    let shared = scratch()?;
    fs::write(shared.path().join("file"), "one\n")?;
    symlink("file", shared.path().join("link"))?;
    let container = host.container().bind(shared.path(), "/shared", "rbind:ro");
    let mut observer = Observer::start(container, shared.path())?;
    observer.sees("cat /shared/file", "one")?;
    observer.sees("cat /shared/link", "one")?;
    observer.replace("file", |new| fs::write(new, "two and more\n"))?;
    observer.sees("cat /shared/file", "two and more")?;
    fs::write(observer.at("other"), "other\n")?;
    observer.replace("link", |new| symlink("other", new))?;
    observer.sees("cat /shared/link", "other")?;
    // A new link may get the inode number of the old one.
    fs::remove_file(observer.at("link"))?;
    symlink("file", observer.at("link"))?;
    observer.sees("readlink /shared/link", "file")?;
    observer.sees("cat /shared/link", "two and more")?;
    fs::remove_file(observer.at("file"))?;
    observer.sees("cat /shared/file 2> /dev/null || echo gone", "gone")?;
    observer.sees("cat /shared/link 2> /dev/null || echo gone", "gone")?;
    Ok(())
}

fn bind_moved(host: &Host) -> Result<()> {
    let shared = scratch()?;
    for name in ["moved", "removed", "replaced"] {
        fs::write(shared.path().join(name), name)?;
    }
    // The link of a descriptor in /proc leads to the open file, whatever its name. A change is possible as soon as the
    // guest does not know the old name any more.
    let script = "cd /shared; exec 3< moved 4< removed 5< replaced; echo ready; read it
        for file in 3 4 5; do
            stat -L -c %s /proc/self/fd/$file; cat <&$file; echo
        done
        for file in 3 4 5; do
            for attempt in $(seq 100); do chmod 640 /proc/self/fd/$file 2> /dev/null && break; sleep 0.1; done
            stat -L -c %a /proc/self/fd/$file
            cat /proc/self/fd/$file > /dev/null
        done";
    let container = host.container().bind(shared.path(), "/shared", "rbind:rw");
    let task = container.detach(&["sleep", "1000"])?;
    let mut inside = task.start_exec("inside", &["sh", "-c", script])?;
    inside.wait_for("ready\n")?;
    fs::rename(shared.path().join("moved"), shared.path().join("moved.1"))?;
    fs::remove_file(shared.path().join("removed"))?;
    fs::write(shared.path().join("new"), "the new file")?;
    fs::set_permissions(shared.path().join("new"), fs::Permissions::from_mode(0o600))?;
    fs::rename(shared.path().join("new"), shared.path().join("replaced"))?;
    inside.write(b"\n")?;
    let expected = "ready\n5\nmoved\n7\nremoved\n8\nreplaced\n640\n640\n640\n";
    inside.finish()?.succeeds()?.prints(expected)?;
    let mode = |name: &str| Ok::<_, std::io::Error>(fs::metadata(shared.path().join(name))?.mode() & 0o777);
    ensure!(mode("moved.1")? == 0o640 && mode("replaced")? != 0o640, "another file was changed");
    Ok(())
}

fn root_opened(host: &Host) -> Result<()> {
    let root = Root::mount(host)?;
    fs::write(root.path().join("file"), "one\n")?;
    let container = host.container().rootfs(&root.path().display().to_string());
    let mut observer = Observer::start(container, root.path())?;
    observer.sees("cat /file", "one")?;
    observer.replace("file", |new| fs::write(new, "two\n"))?;
    observer.sees("cat /file", "two")?;
    // The container knows the size of the file for longer than that of a file in a volume.
    std::thread::sleep(ATTRIBUTES_LAST);
    fs::write(observer.at("file"), "three and more\n")?;
    observer.sees("cat /file", "three and more")?;
    fs::remove_file(observer.at("file"))?;
    observer.sees("cat /file 2> /dev/null || echo gone", "gone")?;
    Ok(())
}

fn written_survives(host: &Host) -> Result<()> {
    let shared = scratch()?;
    let container = host.container().bind(shared.path(), "/shared", "rbind:rw");
    let script = "cd /shared; echo closed > closed; exec 3> open; echo open >&3; \
                  dd if=closed of=synced conv=fsync 2> /dev/null; echo more >> closed; echo written; \
                  sleep 1000";
    let attached = container.start(&["sh", "-c", script])?;
    attached.running.wait_for("written\n")?;
    match host.runtime() {
        Runtime::Runc => attached.task.kill("SIGKILL")?,
        Runtime::Bulkhead => drop(kill_process("bulkhead-vmm", attached.task.id())?),
    }
    attached.finish()?.exits(137)?;
    for (name, expected) in [("closed", "closed\nmore\n"), ("open", "open\n"), ("synced", "closed\n")] {
        let came = fs::read_to_string(shared.path().join(name))?;
        ensure!(came == expected, "expected  {expected:?} in {name}\ncame      {came:?}");
    }
    Ok(())
}

fn bind_later_mount(host: &Host) -> Result<()> {
    let shared = scratch()?;
    let (place, file) = (shared.path().join("volume"), shared.path().join("volume/file"));
    fs::create_dir(&place)?;
    let hearing = host.container().bind(shared.path(), "/shared", "rbind:rslave:rw");
    let hearing = hearing.detach(&["sleep", "1000"])?;
    let deaf = host.container().bind(shared.path(), "/shared", "rbind:rprivate:rw");
    let deaf = deaf.detach(&["sleep", "1000"])?;
    let _volume = Tmpfs::mount(&place)?;
    fs::write(&file, "mounted later\n")?;
    let cat = ["cat", "/shared/volume/file"];
    wait_until("the volume in the container", ATTRIBUTES_LAST * 10, || {
        Ok(hearing.exec(&cat)?.text() == "mounted later\n")
    })?;
    deaf.exec(&cat)?.exits(1)?;
    Ok(())
}

fn device_numbers(host: &Host) -> Result<()> {
    let (one, other) = (scratch()?, scratch()?);
    let place = one.path().join("mounted");
    fs::create_dir(&place)?;
    let _mounted = Tmpfs::mount(&place)?;
    fs::write(place.join("file"), "")?;
    fs::write(one.path().join("file"), "")?;
    let container =
        host.container().bind(one.path(), "/one", "rbind:rw").bind(other.path(), "/other", "rbind:rw");
    let script = "number() { stat -c %d $1; }; \
                  compare() { test $(number $1) = $(number $2) && echo $1 = $2 || echo $1 is not $2; }; \
                  compare / /one; compare /one /other; compare /one/file /other; compare /one/mounted /one; \
                  compare /one/mounted/file /one/mounted; \
                  find / -xdev -name file -path '/one*'; find /one -xdev -name file; \
                  for place in / /one /other; do it=$(number $place); \
                  shown=$((it >> 8 & 0xfff)):$((it & 0xff | it >> 12 & 0xfff00)); \
                  grep -q \"^[0-9]* [0-9]* $shown [^ ]* $place \" /proc/self/mountinfo || echo $place $shown; done";
    let expected = "/ is not /one\n/one = /other\n/one/file = /other\n/one/mounted is not /one\n\
                    /one/mounted/file = /one/mounted\n/one/file\n";
    container.run(&["sh", "-c", script])?.succeeds()?.prints(expected)?;
    Ok(())
}

/// A tmpfs on the host. Dropping it unmounts it.
struct Tmpfs<'a>(&'a Path);

impl<'a> Tmpfs<'a> {
    fn mount(place: &'a Path) -> Result<Self> {
        mount(None::<&str>, place, Some("tmpfs"), MsFlags::empty(), None::<&str>)?;
        Ok(Self(place))
    }
}

impl Drop for Tmpfs<'_> {
    fn drop(&mut self) {
        // If it stays, the removal of the directory says so.
        let _ = umount2(self.0, MntFlags::MNT_DETACH);
    }
}

fn bind_shared(host: &Host) -> Result<()> {
    let shared = scratch()?;
    let container = host.container().bind(shared.path(), "/shared", "rbind:rshared:rw");
    container.run(&["true"])?.fails_with("option \"rshared\" is not implemented")?;
    Ok(())
}

fn bind_big_file(host: &Host) -> Result<()> {
    let shared = scratch()?;
    let content: Vec<u8> = (0..4_u32 * 1024 * 1024).flat_map(u32::to_le_bytes).collect();
    fs::write(shared.path().join("big"), &content)?;
    let container = host.container().bind(shared.path(), "/shared", "rbind:rw");
    container.run(&["cp", "/shared/big", "/shared/copy"])?.succeeds()?;
    let same = fs::read(shared.path().join("copy"))? == content;
    ensure!(same, "expected  a copy equal to the 16 MiB of the original\ncame      a different one");
    Ok(())
}

fn bind_metadata(host: &Host) -> Result<()> {
    let shared = scratch()?;
    let file = shared.path().join("file");
    fs::write(&file, "x")?;
    // In this order: a change of owner takes the set-user-id bit away.
    std::os::unix::fs::chown(&file, Some(1234), Some(5678))?;
    fs::set_permissions(&file, fs::Permissions::from_mode(0o4750))?;
    std::os::unix::fs::symlink("file", shared.path().join("link"))?;
    fs::hard_link(&file, shared.path().join("twin"))?;
    let container = host.container().bind(shared.path(), "/shared", "rbind:rw");
    let script = "echo file=$(stat -c '%a %u:%g %h %s' /shared/file); echo link=$(readlink /shared/link); \
                  chown 42:43 /shared/twin && chmod 600 /shared/twin && touch -d @86400 /shared/twin; \
                  ln -s /x /shared/new; \
                  echo after=$(stat -c '%a %u:%g %Y' /shared/file)";
    let finished = container.run(&["sh", "-c", script])?;
    finished
        .succeeds()?
        .says("file", "4750 1234:5678 2 1")?
        .says("link", "file")?
        .says("after", "600 42:43 86400")?;
    let target = fs::read_link(shared.path().join("new"))?;
    ensure!(target.as_os_str() == "/x", "expected  a link to /x on the host\ncame      {}", target.display());
    Ok(())
}

fn many_files(host: &Host) -> Result<()> {
    let script = "mkdir /many && cd /many && for i in $(seq 1 300); do echo $i > file-$i; done; ls | wc -l; \
                  cat file-1 file-300; rm file-1??; ls | wc -l; cd / && rm -r /many && test ! -e /many";
    // The image has files in this directory, too.
    let merged = "before=$(ls /bin); for i in $(seq 1 300); do : > /bin/new-$i; done; ls /bin | grep -c new-; \
                  find /bin -name 'new-*' -exec echo {} + -exec rm {} + | tr ' ' '\\n' | sort -u | wc -l; \
                  test \"$before\" = \"$(ls /bin)\"";
    let counts = "300\n1\n300\n200\n300\n300\n";
    host.sh(&format!("{script}; {merged}"))?.succeeds()?.prints(counts)?.complains("")?;
    Ok(())
}

/// BusyBox removes the tree while it reads it. The names are so long that it gets about twelve at a time, and below
/// those it reads more directories than the file server keeps listings.
fn tree_removed(host: &Host) -> Result<()> {
    let script = "mkdir /tree && cd /tree && long=$(printf %0150d 0) && \
                  for i in $(seq 10 24); do for j in $(seq 90); do echo $long$i/$j; done; done | \
                  xargs mkdir -p && test -d ${long}24/90 && cd / && rm -r /tree && test ! -e /tree";
    host.sh(script)?.succeeds()?.prints("")?.complains("")?;
    Ok(())
}

fn tmpfs(host: &Host) -> Result<()> {
    let mount = "type=tmpfs,src=tmpfs,dst=/scratch,options=nosuid:size=1m:mode=700";
    let script = "stat -c %a /scratch; dd if=/dev/zero of=/scratch/file bs=64k count=64";
    let finished = host.container().flags(["--mount", mount]).run(&["sh", "-c", script])?;
    finished.prints("700\n")?.fails_with("No space left on device")?;
    // By default half of the host's memory: as many pages, and as many files.
    let meminfo = fs::read_to_string("/proc/meminfo")?;
    let kib = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:")?.trim().strip_suffix(" kB"));
    let half = kib.context("no MemTotal")?.parse::<u64>()? / 4 / 2;
    let mount = "type=tmpfs,src=tmpfs,dst=/scratch,options=nosuid";
    let finished =
        host.container().flags(["--mount", mount]).run(&["stat", "-f", "-c", "%b %S %c", "/scratch"])?;
    finished.succeeds()?.prints(&format!("{half} 4096 {half}\n"))?;
    Ok(())
}

fn directory_as_root(host: &Host) -> Result<()> {
    let root = Root::mount(host)?;
    fs::write(root.path().join("here"), "the host's directory\n")?;
    let container = host.container().rootfs(&root.path().display().to_string());
    let script = "cat /here; echo written > /there";
    container.run(&["/bin/sh", "-c", script])?.succeeds()?.prints("the host's directory\n")?;
    let written = fs::read_to_string(root.path().join("there"))?;
    ensure!(
        written == "written\n",
        "expected  \"written\\n\" in the host's directory\ncame      {written:?}"
    );
    Ok(())
}

fn file_semantics(host: &Host) -> Result<()> {
    let script = "cd /tmp && echo one > a && ln a b && mv a c && echo two >> b && cat c && \
                  exec 3< c && rm b c && cat <&3 && mkfifo pipe && (echo piped > pipe &) && cat pipe && \
                  echo abcdef > t && truncate -s 3 t && cat t && echo && \
                  mkdir -p d/e && ! rmdir d 2>/dev/null && mv d/e d/f && ls d";
    host.sh(script)?.succeeds()?.prints("one\ntwo\none\ntwo\npiped\nabc\nf\n")?;
    Ok(())
}

fn root_propagation(host: &Host) -> Result<()> {
    // The seventh field on are those of the propagation, up to a dash (proc_pid_mountinfo(5)).
    let script = "awk '$5 == \"/\" { print $7 }' /proc/self/mountinfo | cut -d: -f1";
    for (propagation, expected) in
        [("private", "-"), ("rprivate", "-"), ("rshared", "shared"), ("unbindable", "unbindable")]
    {
        let spec = Spec::of(host, &["sh", "-c", script])?;
        let spec = spec.with("/linux", "rootfsPropagation", propagation.into())?;
        spec.run(host.container())?.succeeds()?.prints(&format!("{expected}\n"))?;
    }
    Ok(())
}

fn unknown_option(host: &Host) -> Result<()> {
    for kind in ["tmpfs", "proc", "devpts"] {
        let mount = format!("type={kind},src={kind},dst=/data,options=nonsense");
        host.container().flags(["--mount", &mount]).run(&["true"])?.fails_with("/data")?.says_one_line()?;
    }
    Ok(())
}

/// In a root that nobody else changes, with programs of two layers of its image, and in a volume.
fn last_write(host: &Host) -> Result<()> {
    let (image, volume) = (ImageRoot::make()?, on_disk()?);
    image.write("srv/last_write.py", include_bytes!("mounts/last_write.py"))?;
    image.write("srv/layer-cat", &fs::read("/bin/cat")?)?;
    fs::set_permissions(image.layer().join("srv/layer-cat"), fs::Permissions::from_mode(0o755))?;
    let container = host.container().bind(volume.path(), "/volume", "rbind:rw").flags(["--allow-new-privs"]);
    let task = image.detach(host, container, &["sleep", "1000"])?;
    for arguments in [&["/srv", "/srv/layer-cat", "/bin/tac"][..], &["/volume"]] {
        let command: Vec<_> = ["python3", "/srv/last_write.py"].iter().chain(arguments).copied().collect();
        let written = task.exec(&command)?;
        written.succeeds()?.prints("as it must be\n").with_context(|| format!("{command:?}"))?;
    }
    Ok(())
}

/// The layers of the root are on different file systems. The directories that are listed are more than the VMM has
/// descriptors for.
fn caches_dropped(host: &Host) -> Result<()> {
    let (image, volume) = (ImageRoot::make()?, on_disk()?);
    fs::create_dir(image.layer().join("srv/place"))?;
    image.write("srv/place/file", b"file\n")?;
    image.write("srv/place/covered", b"covered\n")?;
    fs::write(volume.path().join("mounted"), "mounted\n")?;
    let container = host.container().bind(&volume.path().join("mounted"), "/srv/place/covered", "rbind:rw");
    let task = image.detach(host, container, &["sleep", "1000"])?;
    let script = "cd /srv/place; find /usr -xdev -type d > /dev/null; echo ready; read it; \
                  cat file covered; cat /srv/place/file; echo new > new; cat /srv/place/covered new";
    let mut inside = task.start_exec("inside", &["sh", "-c", script])?;
    inside.wait_for("ready\n")?;
    // Of directories and their names (Documentation/admin-guide/sysctl/vm.rst).
    fs::write("/proc/sys/vm/drop_caches", "2").context("cannot drop the host's caches")?;
    inside.write(b"\n")?;
    inside.finish()?.succeeds()?.prints("ready\nfile\nmounted\nfile\nmounted\nnew\n")?;
    Ok(())
}
