//! Whether a containerd that runs has read its present configuration. It reads it only when it starts.

use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use crate::containerd::{CONFIG, Containerd, at_root, changed};

/// The name of its process.
const NAME: &str = "containerd";

/// The process of systemd.
const SYSTEMD: u64 = 1;

/// The times of processes are in hundredths of a second on x86_64.
const TICK_MS: u64 = 10;

/// How much later than its true start the start of a process may seem to be, or a change than its true time: the start
/// and the uptime of the host are in ticks.
const INEXACT: Duration = Duration::from_millis(20);

/// What a containerd has read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Reading {
    /// It does not run.
    Down,
    /// Its present configuration.
    Current,
    /// This file, or the list of files in this directory, was changed after it had started.
    Unread(PathBuf),
}

impl Containerd {
    /// Compares the start of its process with the changes of its configuration. `root` is `/`, but for tests.
    pub(crate) fn unread(&self, root: &Path) -> Reading {
        let Some((started, _)) = self.process(root) else { return Reading::Down };
        let mut places = self.kept_files(root).chain(self.directories(root));
        match places.find(|path| changed(path).is_some_and(|changed| changed > started + INEXACT)) {
            Some(path) => Reading::Unread(path),
            None => Reading::Current,
        }
    }

    /// The units of systemd of which one restarts it: the unit of its process, or the usual units if it does not run or
    /// k3s or RKE2 starts it. Empty: its process belongs to no unit.
    pub(crate) fn restarters(&self, root: &Path) -> Vec<String> {
        match self.process(root).filter(|_| self.generator().is_none()) {
            Some((_, process)) => unit(&process).into_iter().collect(),
            None => self.units().iter().map(|unit| (*unit).to_owned()).collect(),
        }
    }

    /// Its process, and when that has started. If there are several with this configuration, it is the first one.
    fn process(&self, root: &Path) -> Option<(SystemTime, PathBuf)> {
        let processes = fs::read_dir(root.join("proc")).ok()?.flatten().map(|entry| entry.path());
        let processes = processes.filter(|process| self.is(process, root));
        processes.filter_map(|it| Some((started(&it, root).ok()?, it))).min()
    }

    /// Whether a process is this containerd. One in a container has another root directory.
    fn is(&self, process: &Path, root: &Path) -> bool {
        let is_named = fs::read_to_string(process.join("comm")).is_ok_and(|name| name.trim_end() == NAME);
        is_named
            && is_same(&process.join("root"), root)
            && fs::read(process.join("cmdline")).is_ok_and(|line| {
                let read = configuration_of(&line);
                read == self.config || is_same(&at_root(root, &read), &at_root(root, &self.config))
            })
    }
}

/// The configuration that is named in the command line of a containerd, or the one that it reads by default.
fn configuration_of(line: &[u8]) -> PathBuf {
    let mut words = line.split(|byte| *byte == 0).map(String::from_utf8_lossy);
    while let Some(word) = words.next() {
        match word.trim_start_matches('-').split_once('=') {
            Some(("config" | "c", path)) if word.starts_with('-') => return path.into(),
            None if ["--config", "-config", "-c"].contains(&&*word) => {
                return words.next().map_or_else(|| CONFIG.into(), |path| path.into_owned().into());
            }
            _ => {}
        }
    }
    CONFIG.into()
}

/// Whether both are the same file or directory.
fn is_same(one: &Path, other: &Path) -> bool {
    let id = |path: &Path| fs::metadata(path).map(|it| (it.dev(), it.ino())).ok();
    id(one).is_some_and(|one| id(other) == Some(one))
}

/// The service of systemd that systemd itself has started this process for. None: there is none, or another process of
/// the service has started this one, such as docker, and a restart would end containers.
fn unit(process: &Path) -> Option<String> {
    // The fourth field is the parent.
    if field(process, 4).ok()? != SYSTEMD {
        return None;
    }
    let text = fs::read_to_string(process.join("cgroup")).ok()?;
    // With version 1 there is a line for each hierarchy, and not each has a cgroup for each unit.
    let innermost =
        |line: &str| line.rsplit('/').find_map(|part| part.strip_suffix(".service").map(str::to_owned));
    let mut units: Vec<_> = text.lines().filter_map(innermost).collect();
    units.dedup();
    match units.len() {
        1 => units.pop(),
        _ => None,
    }
}

/// A field of a process's stat(5), which is counted from 1. It must be a number after the name.
fn field(process: &Path, number: usize) -> io::Result<u64> {
    let odd = || io::Error::from(io::ErrorKind::InvalidData);
    let stat = fs::read_to_string(process.join("stat"))?;
    // The name, which is the second field, is in brackets, and may contain some.
    let (_, rest) = stat.rsplit_once(')').ok_or_else(odd)?;
    rest.split_whitespace().nth(number - 3).and_then(|it| it.parse().ok()).ok_or_else(odd)
}

/// When a process has started.
fn started(process: &Path, root: &Path) -> io::Result<SystemTime> {
    let odd = || io::Error::from(io::ErrorKind::InvalidData);
    // Since the start of the host.
    let ticks = field(process, 22)?;
    let uptime = fs::read_to_string(root.join("proc/uptime"))?;
    let uptime: f64 = uptime.split_whitespace().next().and_then(|it| it.parse().ok()).ok_or_else(odd)?;
    let uptime = Duration::try_from_secs_f64(uptime).map_err(io::Error::other)?;
    let age = uptime.saturating_sub(Duration::from_millis(ticks.saturating_mul(TICK_MS)));
    SystemTime::now().checked_sub(age).ok_or_else(odd)
}

#[cfg(test)]
pub(crate) mod tests {
    use std::{os::unix::fs::symlink, thread::sleep};

    use super::*;

    /// A host with one containerd, which has started now.
    pub(crate) struct Host(pub(crate) tempfile::TempDir);

    impl Host {
        pub(crate) fn at(&self, path: &str) -> PathBuf {
            self.0.path().join(path.trim_start_matches('/'))
        }

        pub(crate) fn write(&self, path: &str, text: &str) {
            fs::create_dir_all(self.at(path).parent().unwrap()).unwrap();
            fs::write(self.at(path), text).unwrap();
        }

        pub(crate) fn start(&self, arguments: &str, root: &Path) {
            let uptime = fs::read_to_string("/proc/uptime").unwrap();
            let ticks = uptime.split_whitespace().next().unwrap().replace('.', "");
            self.write("proc/uptime", &uptime);
            self.write("proc/7/comm", "containerd\n");
            self.write("proc/7/cmdline", &format!("containerd\0{arguments}"));
            let fields = "0 ".repeat(17);
            self.write("proc/7/stat", &format!("7 (a) b) S 1 {fields}{ticks} 0\n"));
            self.write("proc/7/cgroup", "0::/system.slice/containerd.service\n");
            _ = fs::remove_file(self.at("proc/7/root"));
            symlink(root, self.at("proc/7/root")).unwrap();
        }

        /// Lets time pass, until a change now is not at the same time as the start.
        pub(crate) fn later(&self) {
            sleep(Duration::from_millis(5 * TICK_MS));
            self.go_on();
        }

        /// The uptime goes on.
        fn go_on(&self) {
            self.write("proc/uptime", &fs::read_to_string("/proc/uptime").unwrap());
        }

        fn unread(&self, config: &str) -> Reading {
            self.go_on();
            Containerd::of(config.into()).unread(self.0.path())
        }
    }

    #[test]
    fn what_was_changed_after_the_start_is_unread() {
        let host = Host(tempfile::tempdir().unwrap());
        host.write(CONFIG, "version = 3\n");
        host.write("etc/containerd/conf.d/a.toml", "");
        host.later();
        assert_eq!(host.unread(CONFIG), Reading::Down);
        host.start("", host.0.path());
        host.later();
        assert_eq!(host.unread(CONFIG), Reading::Current);
        host.write(CONFIG, "version = 2\n");
        assert_eq!(host.unread(CONFIG), Reading::Unread(host.at(CONFIG)));
        host.later();
        host.start("", host.0.path());
        host.later();
        assert_eq!(host.unread(CONFIG), Reading::Current);
        fs::remove_file(host.at("etc/containerd/conf.d/a.toml")).unwrap();
        assert_eq!(host.unread(CONFIG), Reading::Unread(host.at("etc/containerd/conf.d")));
    }

    #[test]
    fn a_template_of_k3s_counts_also_when_it_is_removed() {
        let host = Host(tempfile::tempdir().unwrap());
        let directory = "/var/lib/rancher/k3s/agent/etc/containerd";
        let (config, template) =
            (format!("{directory}/config.toml"), format!("{directory}/config.toml.tmpl"));
        host.write(&config, "version = 2\n");
        host.write(&template, "{{ template \"base\" . }}\n");
        host.later();
        let start = || {
            host.start(&format!("-c\0{config}\0-a\0/run/k3s"), host.0.path());
            host.later();
        };
        start();
        assert_eq!(host.unread(&config), Reading::Current);
        assert_eq!(host.unread(CONFIG), Reading::Down, "that is another one");
        host.write(&template, "");
        assert_eq!(host.unread(&config), Reading::Unread(host.at(&template)));
        host.later();
        start();
        fs::remove_file(host.at(&template)).unwrap();
        assert_eq!(host.unread(&config), Reading::Unread(host.at(directory)));
    }

    #[test]
    fn what_was_written_just_before_the_start_is_read() {
        let host = Host(tempfile::tempdir().unwrap());
        for _ in 0..30 {
            host.write(CONFIG, "version = 3\n");
            host.start("", host.0.path());
            assert_eq!(host.unread(CONFIG), Reading::Current);
        }
        // What is generated is never newer than what containerd has read.
        let config = "/var/lib/rancher/k3s/agent/etc/containerd/config.toml";
        host.write(config, "version = 2\n");
        host.start(&format!("-c\0{config}"), host.0.path());
        host.later();
        host.write(config, "version = 2\n");
        assert_eq!(host.unread(config), Reading::Current);
    }

    #[test]
    fn a_containerd_in_a_container_is_another() {
        let host = Host(tempfile::tempdir().unwrap());
        host.write(CONFIG, "version = 3\n");
        host.start("", Path::new("/"));
        assert_eq!(host.unread(CONFIG), Reading::Down);
    }

    #[test]
    fn the_unit_that_restarts_it_is_that_of_its_process() {
        let host = Host(tempfile::tempdir().unwrap());
        let other = "/etc/containerd/other.toml";
        let units = |config: &str| Containerd::of(config.into()).restarters(host.0.path());
        assert_eq!(units(other), ["containerd"], "nobody knows what will start it");
        host.start(&format!("--config\0{other}"), host.0.path());
        assert_eq!(units(CONFIG), ["containerd"], "this one does not run");
        let stat = fs::read_to_string(host.at("proc/7/stat")).unwrap();
        let no: [&str; 0] = [];
        for (cgroup, parent, unit) in [
            ("0::/system.slice/second.service\n", "1", &["second"][..]),
            // As a process in a cgroup namespace sees it, and of a unit with cgroups below its own.
            ("0::/../../system.slice/containerd@x.service/main\n", "1", &["containerd@x"]),
            (
                "12:pids:/system.slice/c.service\n2:cpu:/\n1:name=systemd:/system.slice/c.service\n0::/\n",
                "1",
                &["c"],
            ),
            ("2:cpu:/system.slice/a.service\n1:name=systemd:/system.slice/b.service\n", "1", &no),
            // docker has started it, or somebody in a session.
            ("0::/system.slice/docker.service\n", "812", &no),
            ("0::/user.slice/user-0.slice/session-3.scope\n", "1", &no),
        ] {
            host.write("proc/7/cgroup", cgroup);
            host.write("proc/7/stat", &stat.replace(" S 1 ", &format!(" S {parent} ")));
            assert_eq!(units(other), unit, "{cgroup}");
        }
        // k3s starts its own containerd.
        let config = "/var/lib/rancher/k3s/agent/etc/containerd/config.toml";
        host.start(&format!("-c\0{config}"), host.0.path());
        assert_eq!(units(config), ["k3s", "k3s-agent"]);
    }

    #[test]
    fn the_configuration_is_named_by_each_form_of_the_option() {
        for line in [
            "/usr/bin/containerd\0--config\0/x.toml\0",
            "containerd\0-c=/x.toml",
            "c\0-a\0s\0--config=/x.toml",
        ] {
            assert_eq!(configuration_of(line.as_bytes()), Path::new("/x.toml"), "{line}");
        }
        for line in ["/usr/bin/containerd\0", "", "containerd\0--config"] {
            assert_eq!(configuration_of(line.as_bytes()), Path::new(CONFIG), "{line}");
        }
    }

    /// The start of a process is found for one that runs on this host, too.
    #[test]
    fn a_process_that_has_just_started_is_young() {
        let begun = SystemTime::now();
        let mut sleeps = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let found = started(&Path::new("/proc").join(sleeps.id().to_string()), Path::new("/"));
        sleeps.kill().unwrap();
        sleeps.wait().unwrap();
        let found = found.unwrap();
        let distance = found.duration_since(begun).unwrap_or_else(|error| error.duration());
        assert!(distance < Duration::from_secs(10), "{distance:?}");
    }
}
