//! A privileged container mounts the pod's share, as its agent does, and attacks what the shim does with it on the
//! host.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, ensure};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::statvfs::statvfs;

use super::Case;
use super::jail::Vmm;
use super::pod::files::{DETACHED, Disk};
use super::programs::HostCopy;
use super::templates::state_dir;
use crate::bench::memory::Footprint;
use crate::command::wait_until;
use crate::ctr::{Host, NAMESPACE, Task};
use crate::fixtures::scratch;
use crate::pods::Pod;

pub(super) const CASES: &[Case] = &[
    Case::bulkhead("a_link_in_place_of_the_mounts_leads_delete_to_no_host_directory", swapped_for_a_link),
    Case::bulkhead("a_link_in_place_of_a_new_container_leads_create_to_no_host_directory", swapped_at_create),
    Case::bulkhead("the_scaffolding_of_the_share_cannot_be_changed", scaffolding),
    Case::bulkhead("a_guest_takes_no_room_in_the_hosts_run", room),
    Case::bulkhead("a_guest_keeps_no_file_system_of_a_removed_container_busy", kept_open),
    Case::bulkhead("files_that_are_known_and_open_take_few_descriptors", |host| many(host, None, 6000, 3)),
    Case::bulkhead("a_million_known_and_200000_open_files_are_bounded", |host| {
        many(host, Some(&HostCopy::mount()?), 1_000_000, 4)
    })
    .by_whole_name_only(),
];

/// The tags of the two devices that serve the share.
const TAGS: [&str; 2] = ["share", "roots"];

/// A command that mounts the share at /m.
fn mount_of(tag: &str) -> String {
    format!("mkdir -p /m && mount -t virtiofs {tag} /m")
}

/// More than the mounts of any container here: the shim names each bind mount by its place in the spec.
const NAMES: usize = 32;

/// Directories of the host that nobody may touch, with the names that the shim gives to mounts, and a mount on each.
struct Victim {
    directory: tempfile::TempDir,
}

impl Victim {
    fn make() -> Result<Self> {
        let directory = scratch()?;
        for name in 0..NAMES {
            fs::create_dir(directory.path().join(name.to_string()))?;
        }
        let victim = Self { directory };
        for name in 0..NAMES {
            mount(Some("victim"), &victim.path(name), Some("tmpfs"), MsFlags::empty(), Some("size=4k"))?;
            fs::write(victim.path(name).join("kept"), "")?;
        }
        Ok(victim)
    }

    fn path(&self, name: usize) -> PathBuf {
        self.directory.path().join(name.to_string())
    }

    fn is_unharmed(&self) -> Result<()> {
        for name in 0..NAMES {
            let path = self.path(name);
            let names: Vec<_> =
                fs::read_dir(&path)?.map(|entry| entry.map(|it| it.file_name())).collect::<Result<_, _>>()?;
            ensure!(names == ["kept"], "expected  only `kept` in {}\ncame      {names:?}", path.display());
        }
        let others = fs::read_dir(self.directory.path())?.count();
        ensure!(others == NAMES, "expected  {NAMES} directories\ncame      {others}");
        Ok(())
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        for name in 0..NAMES {
            // One that was unmounted by the attack has failed the case already.
            let _ = umount2(&self.path(name), MntFlags::MNT_DETACH);
        }
    }
}

fn privileged<'h>(host: &'h Host, volume: &Path) -> Result<Task<'h>> {
    host.container().flags(["--privileged"]).bind(volume, "/volume", "rbind:rw").detach(&["sleep", "1000"])
}

fn swapped_for_a_link(host: &Host) -> Result<()> {
    TAGS.iter().try_for_each(|tag| swapped_for_a_link_by(host, tag))
}

fn swapped_for_a_link_by(host: &Host, tag: &str) -> Result<()> {
    let (volume, victim) = (scratch()?, Victim::make()?);
    host.leaves_nothing(|| {
        let task = privileged(host, volume.path())?;
        task.exec(&["sh", "-c", &mount_of(tag)])?.succeeds()?;
        let attack = format!(
            "cd /m/{} && mv mounts m2; ln -s {} mounts",
            task.id(),
            victim.directory.path().display()
        );
        // Whether it can be done matters less than what the host does then.
        task.exec(&["sh", "-c", &attack])?;
        task.kill("SIGKILL")?;
        task.wait_for_state("STOPPED")?;
        task.delete()?;
        Ok(())
    })?;
    victim.is_unharmed()
}

fn swapped_at_create(host: &Host) -> Result<()> {
    TAGS.iter().try_for_each(|tag| swapped_at_create_by(host, tag))
}

fn swapped_at_create_by(host: &Host, tag: &str) -> Result<()> {
    let victim = Victim::make()?;
    let attack = format!(
        "{} && cd /m && known=$(echo *) && touch /tmp/ready && while :; do for it in *; do case \"$known\" in \
         *$it*) ;; *) mv $it moved && touch /tmp/done; ln -s {} $it && touch /tmp/done ;; esac; done; done",
        mount_of(tag),
        victim.path(0).display()
    );
    let pod = Pod::plan(host).privileged().start()?;
    let attacker = pod.container().named("attacker", 0).security(|security| security.privileged = true);
    let attacker = attacker.start(&["sh", "-c", &attack])?;
    attacker.exec(&["sh", "-c", "until test -e /tmp/ready; do sleep 0.1; done"])?.succeeds()?;
    for number in 0..2 {
        let container = pod.container().named("late", number).start(&["sleep", "1000"])?;
        container.exec(&["echo", "here"])?.succeeds()?.prints("here\n")?;
        container.remove()?;
    }
    attacker
        .exec(&["sh", "-c", "ln -s / /m/planted; test ! -e /m/planted && test ! -e /tmp/done"])?
        .succeeds()?;
    attacker.remove()?;
    pod.remove()?;
    victim.is_unharmed()
}

fn scaffolding(host: &Host) -> Result<()> {
    TAGS.iter().try_for_each(|tag| scaffolding_by(host, tag))
}

fn scaffolding_by(host: &Host, tag: &str) -> Result<()> {
    let volume = scratch()?;
    let task = privileged(host, volume.path())?;
    let id = task.id();
    let own = format!("/m/{id}");
    task.exec(&["sh", "-c", &format!("{}; mount -o remount,rw /m", mount_of(tag))])?.succeeds()?;
    for command in [
        "touch /m/new".to_owned(),
        "mkdir /m/new".into(),
        "ln -s / /m/new".into(),
        "chmod 777 /m".into(),
        "chown 1 /m".into(),
        format!("mv {own} /m/moved"),
        format!("touch {own}/new"),
        format!("chmod 777 {own}"),
        format!("mv {own}/mounts {own}/moved"),
        format!("ln -s / {own}/new"),
        format!("mkdir {own}/mounts/new"),
        format!("touch {own}/mounts/new"),
        format!("rmdir {own}/mounts/*"),
        format!("rmdir {own}/rootfs"),
        format!("mv {own}/rootfs {own}/moved"),
        format!("chmod 777 {own}/mounts"),
    ] {
        let finished = task.exec(&["sh", "-c", &command])?;
        let refused = String::from_utf8_lossy(&finished.stderr).into_owned();
        let expected = ["Read-only file system", "Resource busy", "Device or resource busy"];
        finished.check(
            &format!("`{command}` is refused"),
            finished.succeeds().is_err() && expected.iter().any(|text| refused.contains(text)),
        )?;
    }
    // What is the container's stays its own.
    let script = format!(
        "touch {own}/rootfs/new && test -e /new && cd {own}/mounts/[0-9]* && touch new && test -e /volume/new"
    );
    task.exec(&["sh", "-c", &script])?.succeeds()?;
    Ok(())
}

fn room(host: &Host) -> Result<()> {
    TAGS.iter().try_for_each(|tag| room_by(host, tag))
}

fn room_by(host: &Host, tag: &str) -> Result<()> {
    let volume = scratch()?;
    let task = privileged(host, volume.path())?;
    let state = state_dir(NAMESPACE, task.id())?;
    let free = |path: &Path| -> Result<(u64, u64)> {
        let found = statvfs(path)?;
        Ok((found.files_free(), found.blocks_free()))
    };
    let before = free(&state)?;
    task.exec(&["sh", "-c", &mount_of(tag)])?.succeeds()?;
    let script = format!(
        "for dir in /m /m/{id} /m/{id}/mounts; do cd $dir; for it in $(seq 100); do mkdir d$it; echo text > f$it; done; \
         dd if=/dev/zero of=big bs=1M count=8; done 2>/dev/null; true",
        id = task.id()
    );
    task.exec(&["sh", "-c", &script])?.succeeds()?;
    let after = free(&state)?;
    // Other services of the host use /run too, though not much.
    ensure!(
        before.0 - after.0.min(before.0) < 50 && before.1 - after.1.min(before.1) < 256,
        "expected  no room taken in /run by the guest\ncame      {before:?} inodes and blocks free before, {after:?} after"
    );
    Ok(())
}

/// What the VMM of a container has open, and the memory that it has for itself, MiB.
fn taken(vmm: &Vmm) -> Result<(usize, f64)> {
    let descriptors = fs::read_dir(format!("/proc/{}/fd", vmm.pid))?.count();
    Ok((descriptors, Footprint::of(vmm.pid)?.own_mib))
}

/// Looks `known` files up, and keeps up to 200,000 of them open, in this many processes. With the programs of the
/// host's `copy` this takes fewer requests, because Python does nothing but open(2).
fn many(host: &Host, copy: Option<&HostCopy>, known: usize, processes: usize) -> Result<()> {
    /// The file server keeps 4,096 open files and 512 directories.
    const MOST_DESCRIPTORS: usize = 4800;
    const MOST_MIB: f64 = 100.0;
    const IN_A_DIRECTORY: usize = 1000;
    let volume = scratch()?;
    for number in 0..known {
        let directory = volume.path().join((number / IN_A_DIRECTORY).to_string());
        if number % IN_A_DIRECTORY == 0 {
            fs::create_dir(&directory)?;
        }
        fs::write(directory.join((number % IN_A_DIRECTORY).to_string()), "")?;
    }
    let container = copy.map_or_else(|| host.container(), |copy| copy.as_root_of(host.container()));
    let container = container.flags(["--privileged"]).bind(volume.path(), "/volume", "rbind:rw");
    let task = container.detach(&["sleep", "86400"])?;
    let vmm = Vmm::of(&task)?;
    let say = |when: &str, (descriptors, mib): (usize, f64)| {
        println!("{when}: {descriptors} descriptors, {mib:.1} MiB")
    };
    say("before", taken(&vmm)?);
    let patience = host.patience(Duration::from_secs(20 + known as u64 / 500));
    let says = |script: &str| -> Result<usize> {
        Ok(task.exec(&["sh", "-c", script])?.text().trim().parse().unwrap_or(0))
    };
    let _search = task.start_exec("search", &["sh", "-c", "find /volume -type f | wc -l > /tmp/found"])?;
    wait_until("all files to be found", patience, || Ok(says("cat /tmp/found")? == known))?;
    say("after the search", taken(&vmm)?);

    let each = known.min(200_000) / processes;
    let mut openers = Vec::new();
    for process in 0..processes {
        let (first, last, limit) = (process * each, (process + 1) * each - 1, each + 100);
        let program = match copy {
            Some(_) => format!(
                "exec python3 -c 'import os, time\nkept = [os.open(\"%d/%d\" % divmod(it, {IN_A_DIRECTORY}), os.O_RDONLY) \
                 for it in range({first}, {last} + 1)]\ntime.sleep(86400)'"
            ),
            // It opens all of its files, and looks at them again after a day.
            None => format!(
                "exec tail -q -s 86400 -f $(for it in $(seq {first} {last}); \
                 do echo $((it / {IN_A_DIRECTORY}))/$((it % {IN_A_DIRECTORY})); done)"
            ),
        };
        let script = format!("ulimit -n {limit}; cd /volume; {program}");
        openers.push(task.start_exec(&format!("opener-{process}"), &["sh", "-c", &script])?);
    }
    let count = "for it in /proc/[0-9]*; do grep -qE '^(tail|python3)' $it/comm && ls $it/fd; done | wc -l";
    wait_until("all files to be open", patience, || Ok(says(count)? >= each * processes))?;
    let now = taken(&vmm)?;
    say("with all open", now);
    ensure!(
        now.0 <= MOST_DESCRIPTORS && now.1 <= MOST_MIB,
        "expected  at most {MOST_DESCRIPTORS} descriptors and {MOST_MIB} MiB\ncame      {now:?}"
    );
    task.exec(&["echo", "here"])?.succeeds()?.prints("here\n")?;
    Ok(())
}

/// A container of the pod keeps files of another one's volume open, by way of the share, and one that it has removed.
fn kept_open(host: &Host) -> Result<()> {
    TAGS.iter().try_for_each(|tag| kept_open_by(host, tag))
}

fn kept_open_by(host: &Host, tag: &str) -> Result<()> {
    let disk = Disk::mount()?;
    let pod = Pod::plan(host).privileged().start()?;
    let user = pod.container().mount(&disk.place(), "/data").start(&["sleep", "1000"])?;
    user.sh("for name in kept removed; do echo $name > /data/$name; done")?.succeeds()?;
    let script = format!(
        "{}; for mount in /m/_*/volume; do test -e $mount/kept && cd $mount; done; exec 3< kept 4< removed; \
         read one <&3; read two <&4; rm removed && echo ready; while :; do sleep 1; done",
        mount_of(tag)
    );
    let keeper = pod.container().security(|security| security.privileged = true);
    let keeper = keeper.start(&["sh", "-c", &script])?;
    keeper.wait_for("ready")?;
    user.stop(0)?;
    user.remove()?;
    disk.detach(host.patience(DETACHED))?;
    keeper.exec(&["true"])?.succeeds()?;
    pod.remove()
}
