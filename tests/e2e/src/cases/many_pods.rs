//! Pods with volumes of every kind, devices and several interfaces, one after the other and two at a time. Each ends in
//! another way. They leave nothing on the host, and what lives on does not grow.
//!
//! Each pod has three containers. The third one is made by `ctr` in the namespaces of the pod, because the CRI has no
//! recursive read-only mounts before containerd 2.

mod host_state;
mod volumes;

use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use self::host_state::{HostState, Survivors, Usage, of_the_kernel};
use self::volumes::{Image, Volumes};
use super::Case;
use crate::command::{Cmd, Finished, wait_until};
use crate::cri::messages as cri;
use crate::ctr::{Host, IMAGE, Runtime};
use crate::fixtures::{HugePages, in_threads, page_at};
use crate::pods::{Container, Pod};
use crate::snapshot::processes_of;

pub(super) const CASES: &[Case] = &[
    Case::both("one_of_each_end_with_every_kind_of_volume_leaves_nothing", one_of_each_end)
        .since(1, 7)
        .by_whole_name_only(),
    Case::both("twenty_with_every_kind_of_volume_leave_nothing", |host| many(host, 20))
        .since(1, 7)
        .by_whole_name_only(),
    Case::both("a_hundred_with_every_kind_of_volume_leave_nothing", |host| many(host, 100))
        .since(1, 7)
        .by_whole_name_only(),
];

/// So many pods live at the same time.
const AT_ONCE: usize = 2;
/// A line is printed after so many.
const REPORTED: usize = 10;
/// Huge pages that a pod may use, and those that the host sets aside for runc.
const PAGES: u64 = 1;
/// How long what the host changes may take to be seen.
const SEEN: Duration = Duration::from_secs(10);
/// The first port of the host that is a pod's.
const PORT: u16 = 28200;
const GATEWAY: &str = "10.88.0.1";

/// How much more a survivor may use in the end than after the first pods: containerd is Go, whose runtime gives memory
/// back late, and a guest at rest writes to a page now and then.
const MORE_DESCRIPTORS: u64 = 2;
const MORE_MEMORY_KIB: u64 = 8 << 10;

/// How a pod ends.
#[derive(Debug, Clone, Copy, PartialEq)]
enum End {
    /// The containers are stopped and removed one by one, then the pod.
    InOrder,
    /// The process that containerd takes for the pod's is killed: the VMM, or pause.
    PodKilled,
    /// The pod is removed while its containers run.
    Removed,
    /// The shim is killed. Only of Bulkhead: runc's leaves its socket behind.
    ShimKilled,
}

impl End {
    fn all(runtime: Runtime) -> &'static [Self] {
        match runtime {
            Runtime::Runc => &[Self::InOrder, Self::PodKilled, Self::Removed],
            Runtime::Bulkhead => &[Self::InOrder, Self::PodKilled, Self::Removed, Self::ShimKilled],
        }
    }

    /// That of the pod of this number.
    fn of(number: usize, runtime: Runtime) -> Self {
        let all = Self::all(runtime);
        all.get(number % all.len()).copied().unwrap_or(Self::InOrder)
    }
}

/// With the one before the first look at the host, which ends in order.
fn one_of_each_end(host: &Host) -> Result<()> {
    many(host, End::all(host.runtime()).len() - 1)
}

fn many(host: &Host, number: usize) -> Result<()> {
    // On Bulkhead they are the guest's.
    let needs_pages = host.runtime() == Runtime::Runc;
    let _pool = if needs_pages { Some(HugePages::set_aside(PAGES * AT_ONCE as u64)?) } else { None };
    let image = Image::make(host)?;
    let pods = host.pods()?;
    let neighbour = Pod::start(host)?;
    let idle = neighbour.container().start(&["sleep", "100000"])?;
    // What is made for the first of them stays, such as CNI's chains of rules.
    one(host, &image, 0).context("the pod before the first look at the host")?;
    let survivors = Survivors::find(host, &neighbour)?;
    let samples = Mutex::new(Vec::new());
    pods.leave_nothing(host, || {
        let before = HostState::take(pods)?;
        let sample = |done: usize| -> Result<()> {
            let usage = survivors.usage()?;
            let shown = usage.iter().map(Usage::to_string).collect::<Vec<_>>().join(" | ");
            println!("sample | {done} | {shown}{}", of_the_kernel());
            if let Ok(mut samples) = samples.lock() {
                samples.push(usage);
            }
            Ok(())
        };
        sample(0)?;
        let numbers: Vec<_> = (1..=number).collect();
        for some in numbers.chunks(REPORTED) {
            in_threads(AT_ONCE, some.to_vec(), |number| {
                let end = End::of(number, host.runtime());
                one(host, &image, number).with_context(|| format!("pod {number}, whose end is {end:?}"))
            })?;
            sample(some.last().copied().unwrap_or_default())?;
        }
        before.expect_same(host, pods)
    })?;
    idle.exec(&["true"])?.succeeds()?;
    neighbour.remove()?;
    let samples = samples.into_inner().map_err(|_| anyhow::anyhow!("a thread has panicked"))?;
    expect_flat(&samples)
}

/// Expects that the last sample is like the first one of a host that has warmed up.
fn expect_flat(samples: &[Vec<Usage>]) -> Result<()> {
    let warm = samples.get(samples.len() / 4).context("no sample")?;
    let last = samples.last().context("no sample")?;
    for (before, after) in warm.iter().zip(last) {
        let descriptors = after.descriptors <= before.descriptors + MORE_DESCRIPTORS;
        let memory = after.memory_kib <= before.memory_kib + MORE_MEMORY_KIB;
        ensure!(descriptors && memory, "expected  no more than {before}\ncame      {after}");
    }
    Ok(())
}

/// The life of one pod.
fn one(host: &Host, image: &Image, number: usize) -> Result<()> {
    let end = End::of(number, host.runtime());
    let port = PORT + u16::try_from(number)?;
    let plan = Pod::plan(host).huge_pages(PAGES).host_port(port.into(), 80);
    // Declared first, so that after a failure they are removed when the pod is gone.
    let mut volumes;
    let pod = plan.start()?;
    volumes = Volumes::make(&pod, image)?;
    let pid = process_of(host, &pod)?;
    for (name, third) in [("net1", 1), ("net2", 2)] {
        add_interface(&pid, name, number, third)?;
    }
    let lives = Living::start(host, &pod, &volumes, &pid)?;
    lives.meet(host, port)?;
    add_interface(&pid, "net3", number, 3)?;
    lives.sees(host, "ls /sys/class/net | tr '\\n' ' '", "eth0 lo net1 net2 net3 ")?;
    in_namespace(&pid, "link del net3")?;
    volumes.mount_late()?;
    lives.sees(host, "ls /sys/class/net | tr '\\n' ' '", "eth0 lo net1 net2 ")?;
    lives.third_sees(host)?;
    volumes.expect_written()?;
    lives.end(host, &pod, end, &pid)?;
    if end == End::Removed {
        host.pods()?.client().call(cri::RemovePodSandboxRequest::from(pod.id()))?;
        // This removes its cgroup, which kubelet has made.
        drop(pod);
    } else {
        pod.remove()?;
    }
    volumes.remove(host)
}

/// The pid of the pod's process on the host, which is in the pod's network namespace there.
fn process_of(host: &Host, pod: &Pod<'_>) -> Result<String> {
    let listed = host.pods()?.ctr().args(["tasks", "ls"]).run()?;
    let text = listed.succeeds()?.text();
    let row = text.lines().find(|line| line.starts_with(pod.id())).context("no task of the pod")?;
    Ok(row.split_whitespace().nth(1).context("no pid of the pod's task")?.to_owned())
}

/// `ip` with these words in a pod's network namespace.
fn in_namespace(pid: &str, words: &str) -> Result<()> {
    let args = ["--target", pid, "--net", "ip"].into_iter().chain(words.split_whitespace());
    Cmd::new("nsenter").args(args).run()?.succeeds().map(drop)
}

/// Adds an interface to a pod, as Multus does.
fn add_interface(pid: &str, name: &str, number: usize, third: usize) -> Result<()> {
    let link = format!("link add many{number}-{third} type veth peer name {name} netns {pid}");
    Cmd::new("ip").args(link.split_whitespace()).run()?.succeeds()?;
    in_namespace(pid, &format!("addr add 10.66.{third}.2/24 dev {name}"))?;
    in_namespace(pid, &format!("link set {name} up"))
}

/// What the first container does with what it has.
const FIRST: &str = "cat /config/key /secret/key /host/file; touch /host/x 2>/dev/null || echo read-only; \
    mkfifo /scratch/pipe; echo memory > /memory/file; echo file > /host-file; echo part > /part/file; \
    echo disk > /disk/file; printf raw | dd of=/dev/raw conv=notrunc,fsync 2>/dev/null; \
    awk '$2 == \"/pages\" { print $3 }' /proc/mounts; httpd -p 80 -h /config; echo ready; \
    (echo through > /scratch/pipe) & exec sleep 1000";

/// What the second one finds of it, by a service of the host among others.
const SECOND: &str = r#"
    use IO::Socket::UNIX;
    $| = 1;
    for my $file ("/scratch/pipe", "/memory/file", "/disk/file") {
        open(my $read, "<", $file) or die "$file: $!";
        print <$read>;
    }
    my $service = IO::Socket::UNIX->new(Peer => "/service.sock") or die "the service: $!";
    print <$service>;
    print "ready\n";
    sleep 1000;
"#;

/// The containers of a pod.
struct Living<'p> {
    first: Container<'p>,
    second: Container<'p>,
    third: Third<'p>,
}

/// The container that ctr has made. Dropping it removes it, if the case has failed.
struct Third<'h> {
    host: &'h Host,
    id: String,
    is_removed: bool,
}

impl Third<'_> {
    /// Expects that it can be removed, and that its task can be ended if it still lives.
    fn remove(mut self, lives: bool) -> Result<()> {
        let gone = self.end()?;
        if lives {
            gone.succeeds()?;
        }
        self.forget()?;
        self.is_removed = true;
        Ok(())
    }

    fn end(&self) -> Result<Finished> {
        self.host.pods()?.ctr().args(["tasks", "rm", "--force", &self.id]).run()
    }

    /// containerd may have noticed the end of its task, and may be about to remove that.
    fn forget(&self) -> Result<()> {
        wait_until("the removal of the third container", self.host.patience(SEEN), || {
            let removed = self.host.pods()?.ctr().args(["containers", "rm", &self.id]).run()?;
            Ok(removed.status == Some(0))
        })
    }
}

impl Drop for Third<'_> {
    fn drop(&mut self) {
        if !self.is_removed {
            _ = self.end();
            _ = self.forget();
        }
    }
}

impl<'p> Living<'p> {
    fn start(host: &'p Host, pod: &'p Pod<'p>, volumes: &Volumes, pid: &str) -> Result<Self> {
        let at = |name: &str| volumes.at(name);
        let device = cri::Device {
            host_path: volumes.raw().to_owned(),
            container_path: "/dev/raw".into(),
            permissions: "rwm".into(),
        };
        let first = pod
            .container()
            .mount_read_only(&at("config"), "/config")
            .mount_read_only(&at("secret"), "/secret")
            .mount_read_only(&at("host"), "/host")
            .mount(&at("host-file"), "/host-file")
            .mount(&at("scratch"), "/scratch")
            .mount(&at("part"), "/part")
            .mount(&at("memory"), "/memory")
            .mount(&at("pages"), "/pages")
            .mount(&at("disk"), "/disk")
            .config(|config| config.devices = vec![device])
            .start(&["sh", "-c", FIRST])?;
        first.wait_for("ready\n")?;
        let hosts = [("/usr", "/usr"), ("/usr/lib", "/lib"), ("/usr/lib64", "/lib64")];
        let second = hosts
            .iter()
            .fold(pod.container(), |it, (source, place)| it.mount_read_only(Path::new(source), place))
            .mount(&at("scratch"), "/scratch")
            .mount(&at("memory"), "/memory")
            .mount_read_only(&at("disk"), "/disk")
            .mount(&volumes.service(), "/service.sock")
            .start(&["/usr/bin/perl", "-e", SECOND])?;
        second.wait_for("ready\n")?;
        let third = Third { host, id: host.new_id(), is_removed: false };
        run_by_ctr(host, pod, volumes, pid, &third.id)?.succeeds()?;
        Ok(Self { first, second, third })
    }

    /// Expects what they have said to one another, and to the host.
    fn meet(&self, host: &Host, port: u16) -> Result<()> {
        let said = String::from_utf8_lossy(&self.first.log()?.stdout).into_owned();
        ensure!(said == "public\nhidden\nhost\nread-only\nhugetlbfs\nready\n", "the first one said {said:?}");
        let said = String::from_utf8_lossy(&self.second.log()?.stdout).into_owned();
        ensure!(said == "through\nmemory\ndisk\nserved\nready\n", "the second one said {said:?}");
        let page = page_at(&format!("{GATEWAY}:{port}"), "/key", host.patience(SEEN))?;
        ensure!(page.ends_with("public\n"), "at the pod's port of the host there was {page:?}");
        Ok(())
    }

    /// Waits until a script in the first one prints this.
    fn sees(&self, host: &Host, script: &str, expected: &str) -> Result<()> {
        let mut said = String::new();
        let seen = wait_until(&format!("{expected:?}"), host.patience(SEEN), || {
            said = self.first.sh(script)?.text();
            Ok(said == expected)
        });
        seen.with_context(|| format!("the first container said {said:?}"))
    }

    /// Expects that the third one has what was mounted on the host meanwhile, and a tree that it only reads.
    fn third_sees(&self, host: &Host) -> Result<()> {
        let script = "cat /slave/later/file; touch /tree/below/x 2>&1 | grep -o Read-only";
        let mut said = String::new();
        let seen = wait_until("what was mounted later", host.patience(SEEN), || {
            let exec = host.new_id();
            let exec = ["tasks", "exec", "--exec-id", &exec, &self.third.id, "sh", "-c", script];
            let finished = host.pods()?.ctr().args(exec).run()?;
            said = format!("{}{}", finished.text(), String::from_utf8_lossy(&finished.stderr));
            Ok(finished.text() == "later\nRead-only\n")
        });
        seen.with_context(|| format!("the third container said {said:?}"))
    }

    /// Ends them, and the pod, as far as that is not the same for all.
    fn end(self, host: &Host, pod: &Pod<'_>, end: End, pid: &str) -> Result<()> {
        let mut third_lives = true;
        match end {
            End::InOrder => {
                self.second.stop(0)?;
                self.second.remove()?;
                self.first.stop(0)?;
                self.first.remove()?;
            }
            End::PodKilled => {
                die(pid.parse()?)?;
                third_lives = host.runtime() == Runtime::Runc;
            }
            End::ShimKilled => {
                let shims = processes_of(host.runtime().shim(), pod.id())?;
                ensure!(shims.len() == 1, "expected  one shim of the pod\ncame      {shims:?}");
                shims.into_iter().try_for_each(die)?;
                third_lives = false;
            }
            End::Removed => {}
        }
        self.third.remove(third_lives)
    }
}

fn die(pid: u32) -> Result<()> {
    let pid = Pid::from_raw(i32::try_from(pid)?);
    kill(pid, Signal::SIGKILL).with_context(|| format!("cannot kill process {pid}"))
}

/// Runs a container in a pod that the CRI does not know.
fn run_by_ctr(host: &Host, pod: &Pod<'_>, volumes: &Volumes, pid: &str, id: &str) -> Result<Finished> {
    let cgroup = pod.cgroup()?;
    let cgroup = Path::new("/").join(cgroup.strip_prefix("/sys/fs/cgroup")?).join(id);
    let bind = |name: &str, options: &str| {
        format!("type=bind,src={},dst=/{name},options={options}", volumes.at(name).display())
    };
    let mut flags = vec![
        "--annotation=io.kubernetes.cri.container-type=container".to_owned(),
        format!("--annotation=io.kubernetes.cri.sandbox-id={}", pod.id()),
        format!("--cgroup={}", cgroup.display()),
        format!("--device={}", volumes.raw()),
    ];
    flags
        .extend([bind("tree", "rbind:rro"), bind("slave", "rbind:rslave")].map(|it| format!("--mount={it}")));
    let namespaces = [("network", "net"), ("ipc", "ipc"), ("uts", "uts")];
    flags.extend(namespaces.map(|(kind, file)| format!("--with-ns={kind}:/proc/{pid}/ns/{file}")));
    let runtime = host.runtime().in_containerd();
    let ctr = host.pods()?.ctr().args(["run", "--detach", "--null-io", "--runtime", runtime]).args(&flags);
    ctr.args([IMAGE, id, "sleep", "1000"]).run()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usage(descriptors: u64, memory_kib: u64) -> Vec<Usage> {
        vec![Usage { name: "shim", descriptors, threads: 4, memory_kib }]
    }

    #[test]
    fn what_warms_up_is_flat_and_what_grows_is_not() {
        let samples: Vec<_> = (0..10).map(|number: u64| usage(10 + number.min(2), 500)).collect();
        expect_flat(&samples).unwrap();
        let samples: Vec<_> = (0..10).map(|number: u64| usage(10 + number, 500)).collect();
        assert!(expect_flat(&samples).unwrap_err().to_string().contains("19 descriptors"));
        let samples: Vec<_> = (0..10).map(|number: u64| usage(10, 2000 * number)).collect();
        assert!(expect_flat(&samples).is_err());
    }

    #[test]
    fn each_end_is_tried_where_it_can_be() {
        let ends = |runtime| (1..=4).map(|number| End::of(number, runtime)).collect::<Vec<_>>();
        assert!(ends(Runtime::Bulkhead).contains(&End::ShimKilled));
        assert!(!ends(Runtime::Runc).contains(&End::ShimKilled));
    }
}
