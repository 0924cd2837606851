//! The stories, by theme. Each runs on runc first: a case that runc fails is a wrong case.

mod apparmor;
mod bad_input;
mod block_io;
mod busy;
mod case;
mod clock;
mod counts;
mod cpuid;
mod cpus;
mod crash;
mod datagrams;
pub(crate) mod devices;
mod docker;
mod docker_flags;
mod docker_names;
mod exec;
mod faults;
mod file_locks;
mod hangs;
mod hooks;
mod host_sockets;
mod hostile;
mod isolation;
mod jail;
mod kernel;
mod leaks;
mod lifecycle;
mod limits;
mod loggers;
mod many_pods;
mod memory;
mod metrics;
mod mounts;
mod nested;
mod network;
mod nfs;
mod oom;
mod operator;
mod operator_exec;
mod operator_follow;
mod operator_metrics;
mod operator_spans;
mod pause;
mod permissions;
mod pod;
mod pod_ipv6;
mod pod_sizes;
pub(crate) mod programs;
mod protocol;
mod queues;
mod run;
mod seccomp;
mod share;
mod stdio;
pub(crate) mod templates;
mod terminal;
mod transport;
mod update;
mod upgrade;

pub(crate) use case::{Case, Group};

/// All of them, in the order in which they run: what is basic comes first.
pub(crate) const GROUPS: &[Group] = &[
    Group::brief("lifecycle", lifecycle::CASES),
    Group::new("stdio", stdio::CASES),
    Group::new("loggers", loggers::CASES),
    Group::new("exec", exec::CASES),
    Group::new("terminal", terminal::CASES),
    Group::new("isolation", isolation::CASES),
    Group::new("clock", clock::CASES),
    Group::new("block_io", block_io::CASES),
    Group::new("mounts", mounts::CASES),
    Group::new("permissions", permissions::CASES),
    Group::new("nfs", nfs::CASES),
    Group::new("network", network::CASES),
    Group::new("datagrams", datagrams::CASES),
    Group::new("limits", limits::CASES),
    Group::new("cpus", cpus::CASES),
    Group::new("queues", queues::CASES),
    Group::new("pause", pause::CASES),
    Group::brief("metrics", metrics::CASES),
    Group::new("update", update::CASES),
    Group::brief("oom", oom::CASES),
    Group::new("memory", memory::CASES),
    Group::new("protocol", protocol::CASES),
    Group::brief("pod_life", pod::life::CASES),
    Group::new("pod_sharing", pod::sharing::CASES),
    Group::new("pod_settings", pod::settings::CASES),
    Group::brief("pod_fields", pod::fields::CASES),
    Group::new("pod_memory", pod::memory::CASES),
    Group::new("pod_files", pod::files::CASES),
    Group::new("pod_volumes", pod::volumes::CASES),
    Group::new("pod_disks", pod::disks::CASES),
    Group::brief("pod_network", pod::network::CASES),
    Group::new("pod_sizes", pod_sizes::CASES),
    Group::brief("pod_streams", pod::streams::CASES),
    Group::new("pods_at_once", pod::at_once::CASES),
    Group::new("many_pods", many_pods::CASES),
    Group::new("pod_bad_input", pod::bad_input::CASES),
    Group::brief("sandboxer", pod::sandboxer::CASES),
    Group::new("transport", transport::CASES),
    // No group that uses docker comes before those above that stop the tests' containerd, or after those below: they
    // stop the tests' dockerd, too.
    Group::new("devices", devices::CASES),
    Group::new("docker", docker::CASES),
    Group::new("docker_flags", docker_flags::CASES),
    Group::new("docker_names", docker_names::CASES),
    Group::new("programs", programs::CASES),
    Group::new("file_locks", file_locks::CASES),
    Group::new("host_sockets", host_sockets::CASES),
    Group::new("nested", nested::CASES),
    Group::new("seccomp", seccomp::CASES),
    Group::new("apparmor", apparmor::CASES),
    Group::new("hooks", hooks::CASES),
    Group::new("kernel", kernel::CASES),
    Group::new("cpuid", cpuid::CASES),
    Group::new("jail", jail::CASES),
    Group::new("share", share::CASES),
    Group::new("templates", templates::CASES),
    Group::new("hostile", hostile::CASES),
    Group::new("counts", counts::CASES),
    Group::new("leaks", leaks::CASES),
    Group::brief("crash", crash::CASES),
    Group::new("operator", operator::CASES),
    Group::brief("operator", operator::BY_VERSION),
    Group::new("operator", operator_metrics::CASES),
    Group::new("operator", operator_follow::CASES),
    Group::new("run", run::CASES),
    // These stop the tests' containerd, and with it the tests' dockerd.
    Group::new("operator", operator_exec::CASES),
    Group::new("pod_ipv6", pod_ipv6::CASES),
    Group::new("upgrade", upgrade::CASES),
    Group::new("hangs", hangs::CASES),
    Group::new("faults", faults::CASES),
    Group::new("bad_input", bad_input::CASES),
];

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::{Path, PathBuf};

    /// The group's file, and those of its modules.
    fn sources(file: &Path) -> String {
        let modules = fs::read_dir(file.with_extension("")).into_iter().flatten();
        let modules: Vec<PathBuf> = modules.map(|entry| entry.unwrap().path()).collect();
        let sources = modules.iter().filter(|path| path.extension().is_some_and(|it| it == "rs"));
        sources.fold(fs::read_to_string(file).unwrap(), |all, path| all + &fs::read_to_string(path).unwrap())
    }

    /// A run is cut into slices anywhere, so any two groups may share a containerd and a dockerd.
    #[test]
    fn nothing_stops_dockerd_between_the_first_group_that_uses_it_and_the_last() {
        let cases = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/cases");
        let lines = include_str!("mod.rs").lines().filter_map(|line| line.trim().strip_prefix("Group::"));
        let modules = lines.filter_map(|line| line.split_once(", ")?.1.strip_suffix("::CASES),"));
        let texts: Vec<_> =
            modules.map(|module| sources(&cases.join(module.replace("::", "/") + ".rs"))).collect();
        let with =
            |words: &str| (0..texts.len()).filter(|index| texts[*index].contains(words)).collect::<Vec<_>>();
        let (docker, stops) =
            (with("docker::Client"), [with("_containerd_is_down("), with(".with_disks(")].concat());
        let uses = docker[0]..=docker[docker.len() - 1];
        assert!(docker.len() > 5 && stops.len() > 5, "{docker:?} {stops:?}");
        assert!(!stops.iter().any(|index| uses.contains(index)), "{docker:?} {stops:?}");
    }
}
