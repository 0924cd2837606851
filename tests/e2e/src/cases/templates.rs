//! A VM that is a clone of one that was saved: nobody can tell, but for how soon it is there, and whatever is wrong
//! with what was saved, the container runs.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::Case;
use super::crash::kill_process;
use super::jail::Vmm;
use crate::command::wait_until;
use crate::counts;
use crate::cri::NAMESPACE as POD_NAMESPACE;
use crate::ctr::{Container, Host, NAMESPACE, Task};
use crate::fixtures::{CONFIGURATION, Covered, Replaced, in_threads, scratch};
use crate::pods::Pod;
use crate::snapshot::{TEMPLATES, processes_of};

pub(super) const CASES: &[Case] = &[
    Case::bulkhead("a_container_and_a_pod_are_clones_of_one", of_one),
    Case::bulkhead("clones_have_nothing_in_common", |host| unlike(host, 8)),
    // Takes minutes where the host is emulated.
    Case::bulkhead("a_hundred_clones_have_nothing_in_common", |host| unlike(host, 100)).by_whole_name_only(),
    Case::bulkhead("a_clone_knows_the_time", time),
    Case::bulkhead("a_clones_interrupts_are_as_cheap_as_those_of_a_vm_that_booted", interrupts),
    Case::bulkhead("a_clone_reports_as_free_only_what_it_has_freed_itself", reports),
    Case::bulkhead("a_clone_begins_with_the_pages_that_the_first_has_touched", working_set),
    Case::bulkhead("sandboxes_that_start_at_once_make_one", made_once),
    Case::bulkhead("one_that_was_damaged_is_made_anew", damaged),
    Case::bulkhead("one_of_a_kernel_that_was_replaced_is_made_anew", replaced),
    Case::bulkhead("a_host_without_room_for_one_boots", without_room),
    Case::bulkhead("without_them_a_vm_boots", turned_off),
    Case::bulkhead("a_runtime_with_a_configuration_of_its_own_does_without_them", configured_apart),
    Case::bulkhead("clones_with_two_processors_have_a_template_of_their_own_and_one_time", two_processors),
    Case::bulkhead("eight_are_kept_that_were_used_last", least_used),
    Case::bulkhead("a_shim_that_is_killed_while_it_makes_one_leaves_nothing", killed),
];

const SLEEP: [&str; 2] = ["sleep", "1000"];
/// As many requests are under way at the same time.
const THREADS: usize = 5;
/// How soon the kernel reports memory that is free.
const REPORTED: Duration = Duration::from_secs(10);
/// The list of these pages, in the directory of a template.
const WORKING_SET: &str = "working_set.json";
/// The list of what a template was made from, in its directory. Its time says when the template was used last.
const PARTS: &str = "parts.json";
/// How far the clocks of a host and a clone that was asked may be apart, a slow answer among it.
const CLOCKS: u64 = 5;

/// The state directory of a pod, of whichever containerd.
pub(crate) fn state_dir(namespace: &str, id: &str) -> Result<PathBuf> {
    for containerd in fs::read_dir("/run/bulkhead").context("no pod runs")? {
        let path = containerd?.path().join(namespace).join(id);
        if path.exists() {
            return Ok(path);
        }
    }
    bail!("expected  a state directory of {id} in /run/bulkhead\ncame      none")
}

/// What the VM of a sandbox began with: the template, or None if it booted.
fn origin(namespace: &str, id: &str) -> Result<Option<PathBuf>> {
    let path = state_dir(namespace, id)?.join("vmm.json");
    let text = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let config: Value =
        serde_json::from_slice(&text).with_context(|| format!("cannot parse {}", path.display()))?;
    Ok(config.get("restore_from").and_then(Value::as_str).map(PathBuf::from))
}

/// What the VM of a container is a clone of. An error: it booted.
pub(super) fn template_of(task: &Task<'_>) -> Result<PathBuf> {
    origin(NAMESPACE, task.id())?.with_context(|| format!("{} booted, and is no clone", task.id()))
}

/// What the VM of a pod is a clone of. An error: it booted.
pub(super) fn template_of_pod(pod: &Pod<'_>) -> Result<PathBuf> {
    origin(POD_NAMESPACE, pod.id())?.with_context(|| format!("{} booted, and is no clone", pod.id()))
}

/// Runs a container and returns what its VM began with.
fn origin_of_one_more(host: &Host) -> Result<Option<PathBuf>> {
    origin_of(host.container())
}

fn origin_of(container: Container<'_>) -> Result<Option<PathBuf>> {
    let task = container.detach(&SLEEP)?;
    task.exec(&["true"])?.succeeds()?;
    let origin = origin(NAMESPACE, task.id())?;
    task.dies()?;
    Ok(origin)
}

/// Those that are complete.
fn templates() -> Result<BTreeSet<PathBuf>> {
    let entries = match fs::read_dir(TEMPLATES) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeSet::new()),
        other => other.context("cannot list the templates")?,
    };
    let paths = entries.map(|entry| Ok(entry.context("cannot list the templates")?.path()));
    let paths: Vec<_> = paths.collect::<Result<_>>()?;
    let is_complete =
        |path: &Path| path.file_name().is_some_and(|name| !name.to_string_lossy().starts_with('.'));
    Ok(paths.into_iter().filter(|path| is_complete(path)).collect())
}

fn of_one(host: &Host) -> Result<()> {
    let task = host.container().detach(&SLEEP)?;
    let template = template_of(&task)?;
    let pod = Pod::start(host)?;
    let of_pod = template_of_pod(&pod)?;
    ensure!(
        of_pod == template,
        "expected  the pod of the container's template, {template:?}\ncame      {of_pod:?}"
    );
    pod.remove()?;
    task.dies()
}

/// What must be of one guest alone, a line each.
const OWN: &str = "cat /proc/sys/kernel/random/boot_id; cat /proc/sys/kernel/random/uuid; \
                   head -c 16 /dev/urandom | md5sum; test -c /dev/hwrng && head -c 16 /dev/hwrng | md5sum";

fn unlike(host: &Host, number: usize) -> Result<()> {
    let said = in_threads(THREADS, 0..number, |_| {
        let container = host.container().flags(["--privileged"]);
        Ok(container.run(&["sh", "-c", OWN])?.succeeds()?.text())
    })?;
    let mut seen: BTreeMap<&str, usize> = BTreeMap::new();
    for line in said.iter().flat_map(|text| text.lines()) {
        *seen.entry(line).or_default() += 1;
    }
    let twice: Vec<_> = seen.iter().filter(|(_, count)| **count > 1).collect();
    ensure!(
        twice.is_empty() && seen.len() == 4 * number,
        "expected  4 x {number} lines that differ\ncame      {}, of which these more than once: {twice:?}",
        seen.len()
    );
    Ok(())
}

/// The template's kernel has reported its free memory before the template was saved, so its clones need not. Otherwise
/// each would report hundreds of MiB, and have pages of its own for their descriptions.
fn reports(host: &Host) -> Result<()> {
    const USED: u64 = 64 << 20;
    /// Not all of it is in blocks that are reported. An idle clone frees some memory too.
    const EXPECTED: std::ops::Range<u64> = USED / 2..3 * USED;
    let task = host.container().detach(&SLEEP)?;
    template_of(&task)?;
    // A process that has so much memory until it ends.
    task.exec(&["sh", "-c", &format!("head -c {USED} /dev/zero | tail -c {USED} | wc -c")])?.succeeds()?;
    let control = state_dir(NAMESPACE, task.id())?.join("control.sock");
    let reported = || counts::devices(&control)?.reported_bytes.context("the VM has no balloon");
    let what = format!("{USED} bytes that the container has freed to be reported");
    wait_until(&what, host.patience(REPORTED), || Ok(reported()? >= EXPECTED.start))?;
    let reported = reported()?;
    ensure!(EXPECTED.contains(&reported), "expected  {EXPECTED:?} bytes reported\ncame      {reported}");
    task.dies()
}

/// The first clone exits for each page of the template that it touches first. What it had touched before its container
/// ran is noted, and the next one has these pages from the start.
fn working_set(host: &Host) -> Result<()> {
    let faults =
        |task: &Task<'_>| counts::kvm_counter(&counts::kvm_directory(Vmm::of(task)?.pid)?, "pf_taken");
    let maker = host.container().detach(&SLEEP)?;
    let noted = template_of(&maker)?.join(WORKING_SET);
    maker.dies()?;
    fs::remove_file(&noted).with_context(|| format!("cannot remove {}", noted.display()))?;

    let first = host.container().detach(&SLEEP)?;
    let of_first = faults(&first)?;
    ensure!(noted.exists(), "expected  {}\ncame      nothing", noted.display());
    let text = fs::read(&noted)?;
    let next = host.container().detach(&SLEEP)?;
    let of_next = faults(&next)?;
    ensure!(
        of_next < of_first / 3.0,
        "expected  less than a third of the {of_first} page faults of the first clone\ncame      {of_next}"
    );
    ensure!(fs::read(&noted)? == text, "the list is not that of the first clone");
    [first, next].into_iter().try_for_each(Task::dies)
}

/// Linux has KVM take note of an interrupt's end in its memory (KVM_FEATURE_PV_EOI), where a vCPU would exit for it
/// else.
fn interrupts(host: &Host) -> Result<()> {
    const PV_EOI: [u8; 4] = 0x4b56_4d04_u32.to_le_bytes();
    let task = host.container().detach(&SLEEP)?;
    let path = template_of(&task)?.join("state.json");
    let text = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let state: Value = serde_json::from_slice(&text).context("cannot understand a template's state")?;
    let msrs = state["vcpus"][0]["msrs"].clone();
    // As kvm.h has them: the index, four bytes of nothing, the value.
    let msrs: Vec<[u8; 16]> = serde_json::from_value(msrs).context("cannot understand a template's MSRs")?;
    let value = msrs.iter().find(|msr| msr.starts_with(&PV_EOI)).map(|msr| msr[8] & 1);
    ensure!(value == Some(1), "expected  MSR_KVM_PV_EOI_EN with its lowest bit set\ncame      {value:?}");
    task.dies()
}

fn time(host: &Host) -> Result<()> {
    let now = || -> Result<u64> { Ok(SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs()) };
    let before = now()?;
    let said = host.run(&["date", "+%s"])?;
    let after = now()?;
    let seen: u64 = said.succeeds()?.text().trim().parse().context("the guest's time")?;
    ensure!(
        (before - CLOCKS..=after + CLOCKS).contains(&seen),
        "expected  a time of {before} to {after}\ncame      {seen}"
    );
    Ok(())
}

/// Has the next sandbox find none. Clones of those that there were keep what they have of it.
fn remove_all() -> Result<()> {
    templates()?.iter().try_for_each(|path| {
        fs::remove_dir_all(path).with_context(|| format!("cannot remove {}", path.display()))
    })
}

fn made_once(host: &Host) -> Result<()> {
    remove_all()?;
    let origins = in_threads(THREADS, 0..THREADS, |_| origin_of_one_more(host))?;
    let made = templates()?;
    let all: BTreeSet<_> = origins.into_iter().flatten().collect();
    ensure!(
        made.len() == 1 && all == made,
        "expected  clones of one template\ncame      {made:?}, clones of {all:?}"
    );
    Ok(())
}

fn damaged(host: &Host) -> Result<()> {
    for file in ["memory", "state.json", WORKING_SET] {
        let template = origin_of_one_more(host)?.context("it booted")?;
        let path = template.join(file);
        let damaged = File::options().write(true).open(&path).and_then(|file| file.set_len(5000));
        damaged.with_context(|| format!("cannot cut {}", path.display()))?;
        let origin = origin_of_one_more(host)?;
        ensure!(
            origin.is_none(),
            "expected  a VM that booted, {file} being cut\ncame      a clone of {origin:?}"
        );
        let origin = origin_of_one_more(host)?;
        ensure!(
            origin.is_some(),
            "expected  a clone of a new template after {file} was cut\ncame      a VM that booted"
        );
    }
    Ok(())
}

fn replaced(host: &Host) -> Result<()> {
    // Otherwise one of them may make room for the two.
    remove_all()?;
    origin_of_one_more(host)?;
    let before = templates()?;
    let directory = scratch()?;
    let kernel = directory.path().join("vmlinux");
    let configuration = format!("kernel = {:?}\n", kernel.display().to_string());
    let put = || {
        let newer = directory.path().join("newer");
        let put = fs::copy("/usr/lib/bulkhead/vmlinux", &newer).and_then(|_| fs::rename(&newer, &kernel));
        put.context("cannot put a kernel there")
    };
    put()?;
    let _configured = Replaced::file(Path::new(CONFIGURATION), &configuration)?;
    let first = origin_of_one_more(host)?.context("it booted")?;
    put()?;
    let second = origin_of_one_more(host)?.context("it booted")?;
    let now = templates()?;
    ensure!(first != second, "expected  another template for another kernel\ncame      {first:?} twice");
    ensure!(
        now.contains(&second) && !now.contains(&first) && now.is_superset(&before),
        "expected  {second:?} in the place of {first:?}, beside {before:?}\ncame      {now:?}"
    );
    Ok(())
}

fn without_room(host: &Host) -> Result<()> {
    origin_of_one_more(host)?;
    let _covered = Covered::without_room(Path::new(TEMPLATES))?;
    host.leaves_nothing(|| {
        let origin = origin_of_one_more(host)?;
        ensure!(origin.is_none(), "expected  a VM that booted\ncame      a clone of {origin:?}");
        Ok(())
    })
}

fn turned_off(host: &Host) -> Result<()> {
    let _configured = Replaced::file(Path::new(CONFIGURATION), "templates = false\n")?;
    let origin = origin_of_one_more(host)?;
    ensure!(origin.is_none(), "expected  a VM that booted\ncame      a clone of {origin:?}");
    Ok(())
}

/// As that of a runtime class: it is what containerd makes of `ConfigPath` in the options of a runtime, too.
fn configured_apart(host: &Host) -> Result<()> {
    let directory = scratch()?;
    let file = directory.path().join("cold.toml");
    fs::write(&file, "templates = false\n").context("cannot write a configuration")?;
    let file = file.display().to_string();
    let origin = origin_of(host.container().flags(["--runtime-config-path", &file]))?;
    ensure!(origin.is_none(), "expected  a VM that booted\ncame      a clone of {origin:?}");
    let origin = origin_of_one_more(host)?;
    ensure!(origin.is_some(), "expected  a clone, as of any other runtime\ncame      a VM that booted");
    fs::write(directory.path().join("cold.toml"), "tempelates = false\n")?;
    let refused = host.container().flags(["--runtime-config-path", &file]).run(&["true"])?;
    refused.fails_with(&file)?.fails_with("tempelates")?.says_one_line().map(drop)
}

fn two_processors(host: &Host) -> Result<()> {
    remove_all()?;
    let ordinary = origin_of_one_more(host)?.context("it booted")?;
    let directory = scratch()?;
    let file = directory.path().join("two.toml");
    fs::write(&file, "vcpus = 2\n").context("cannot write a configuration")?;
    let file = file.display().to_string();
    let program = std::env::current_exe().context("cannot find this binary's own path")?;
    let mut origins = BTreeSet::new();
    for _ in 0..2 {
        let container = host.container().flags(["--runtime-config-path", &file]);
        let task = container.bind(&program, "/clocks", "rbind:ro").detach(&SLEEP)?;
        origins.insert(template_of(&task)?);
        task.exec(&["nproc"])?.succeeds()?.prints("2\n")?;
        task.exec(&["/clocks", "clocks"])?.succeeds()?.prints("2 processors agree\n")?;
        task.dies()?;
    }
    let made = templates()?;
    ensure!(
        origins.len() == 1 && !origins.contains(&ordinary),
        "expected  clones of one template that is not {ordinary:?}\ncame      clones of {origins:?}"
    );
    origins.insert(ordinary);
    // Other cases may have left theirs.
    ensure!(made.is_superset(&origins), "expected  templates {origins:?}\ncame      {made:?}");
    Ok(())
}

/// Templates that no pod is a clone of, as those of a host that had other sizes before. They are removed when this is
/// dropped.
struct Unused(Vec<PathBuf>);

impl Unused {
    /// This many, made of the same parts as `template`. The first one was used an hour ago, the next one two hours ago,
    /// and so on.
    fn beside(template: &Path, number: u64) -> Result<Self> {
        let mut unused = Self(Vec::new());
        for hours in 1..=number {
            let path = Path::new(TEMPLATES).join(format!("{hours:016x}"));
            fs::create_dir(&path).with_context(|| format!("cannot create {}", path.display()))?;
            unused.0.push(path.clone());
            fs::copy(template.join(PARTS), path.join(PARTS)).context("cannot copy a list of parts")?;
            set_last_use(&path, hours)?;
        }
        Ok(unused)
    }
}

impl Drop for Unused {
    fn drop(&mut self) {
        for path in &self.0 {
            // Gone already if it was removed for a new one.
            let _ = fs::remove_dir_all(path);
        }
    }
}

fn set_last_use(template: &Path, hours_ago: u64) -> Result<()> {
    let time = SystemTime::now() - Duration::from_secs(3600 * hours_ago);
    let set = File::open(template.join(PARTS)).and_then(|file| file.set_modified(time));
    set.with_context(|| format!("cannot set the time of {}", template.display()))
}

fn least_used(host: &Host) -> Result<()> {
    remove_all()?;
    let used = origin_of_one_more(host)?.context("it booted")?;
    let unused = Unused::beside(&used, 8)?;
    set_last_use(&used, 100)?;
    let again = origin_of_one_more(host)?.context("it booted")?;
    ensure!(again == used, "expected  a clone of {used:?}\ncame      one of {again:?}");
    let directory = scratch()?;
    let file = directory.path().join("two.toml");
    fs::write(&file, "vcpus = 2\n").context("cannot write a configuration")?;
    let container = host.container().flags(["--runtime-config-path", &file.display().to_string()]);
    let new = origin_of(container)?.context("it booted")?;
    let mut expected: BTreeSet<_> = unused.0.iter().take(6).cloned().collect();
    expected.extend([used, new]);
    let left = templates()?;
    ensure!(left == expected, "expected  the templates {expected:?}\ncame      {left:?}");
    Ok(())
}

fn killed(host: &Host) -> Result<()> {
    host.leaves_nothing(|| {
        // One may have been made to warm the host up.
        remove_all()?;
        let container = host.container();
        let id = container.id().to_owned();
        let run = thread::scope(|scope| {
            let run = scope.spawn(|| container.run(&["true"]));
            let begins = || Ok(!processes_of("bulkhead-vmm", &id)?.is_empty());
            wait_until("the VM that becomes a template", host.patience(Duration::from_secs(10)), begins)?;
            kill_process(host.runtime().shim(), &id)?;
            run.join().map_err(|_| anyhow::anyhow!("the thread that runs the container panicked"))?
        })?;
        ensure!(
            run.succeeds().is_err(),
            "expected  a run that fails with its shim\ncame      one that succeeds"
        );
        let made = templates()?;
        ensure!(made.is_empty(), "expected  no template\ncame      {made:?}");
        Ok(())
    })
}
