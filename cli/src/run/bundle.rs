//! The bundle of a run: config.json (OCI runtime-spec), with the defaults of `runc spec` and docker's capabilities.

use std::{env, ffi::OsString, fs, path::Path};

use serde_json::{Value, json};

use crate::{
    process::{
        ProcessError, environment,
        terminal::{self, Size},
        user::User,
    },
    run::{
        error::RunError,
        nat,
        options::{Network, Options},
    },
};

/// The environment of a program whose image gives none.
const PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The period of a processor quota, microseconds.
const PERIOD: f64 = 100_000.0;

/// The capabilities that docker gives a container.
const CAPABILITIES: [&str; 14] = [
    "CAP_AUDIT_WRITE",
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_MKNOD",
    "CAP_NET_BIND_SERVICE",
    "CAP_NET_RAW",
    "CAP_SETFCAP",
    "CAP_SETGID",
    "CAP_SETPCAP",
    "CAP_SETUID",
    "CAP_SYS_CHROOT",
];

/// What the program is, after the root and the options were looked at.
#[derive(Debug)]
pub(super) struct Program {
    pub(super) arguments: Vec<String>,
    pub(super) environment: Vec<String>,
    pub(super) workdir: String,
    pub(super) user: User,
    pub(super) hostname: String,
}

/// Writes config.json.
pub(super) fn write(bundle: &Path, options: &Options, program: &Program) -> Result<(), RunError> {
    let path = bundle.join("config.json");
    let mut spec = spec(options, program);
    if options.network == Network::Nat {
        let resolv_conf = nat::write_resolv_conf(bundle)?;
        add_resolv_conf(&mut spec, &resolv_conf);
    }
    let text = spec.to_string();
    fs::write(&path, text).map_err(|source| RunError::Prepare { path: path.clone(), source })
}

/// The environment: the default, that of the image, that of this command if it is asked for, and the variables that are
/// given one by one. The last value of a name counts.
pub(super) fn environment(options: &Options, of_image: &[String]) -> Result<Vec<String>, ProcessError> {
    let mut all = vec![PATH.to_owned()];
    all.extend_from_slice(of_image);
    if options.tty {
        all.push(environment::term());
    }
    if options.env_all {
        all.extend(in_utf8(env::vars_os()));
    }
    environment::add(&mut all, &options.env)?;
    Ok(environment::last_of_each(all))
}

/// The variables that the program can have: config.json is UTF-8.
fn in_utf8(all: impl Iterator<Item = (OsString, OsString)>) -> impl Iterator<Item = String> {
    all.filter_map(|(name, value)| match (name.to_str(), value.to_str()) {
        (Some(name), Some(value)) => Some(format!("{name}={value}")),
        _ => {
            tracing::warn!(variable = %name.display(), "--env-all: the program does not have it, it is not UTF-8");
            None
        }
    })
}

fn spec(options: &Options, program: &Program) -> Value {
    let User { uid, gid, groups } = &program.user;
    let mut resources = json!({ "devices": [{ "allow": false, "access": "rwm" }] });
    if let Some(bytes) = options.memory {
        resources["memory"] = json!({ "limit": bytes });
    }
    if let Some(processors) = options.cpus {
        resources["cpu"] = json!({ "period": PERIOD as u64, "quota": (processors * PERIOD).round() as i64 });
    }
    let window = if options.tty { terminal::size() } else { None };
    json!({
        "ociVersion": "1.1.0",
        "process": {
            "terminal": options.tty,
            "consoleSize": window.map(|Size { width, height }| json!({ "width": width, "height": height })),
            "user": { "uid": uid, "gid": gid, "additionalGids": groups },
            "args": program.arguments,
            "env": program.environment,
            "cwd": program.workdir,
            "capabilities": {
                "bounding": CAPABILITIES, "effective": CAPABILITIES, "permitted": CAPABILITIES,
            },
            "rlimits": [{ "type": "RLIMIT_NOFILE", "soft": 1024, "hard": 524_288 }],
        },
        "root": { "path": "rootfs" },
        "hostname": program.hostname,
        "mounts": mounts(options),
        "linux": {
            "resources": resources,
            "namespaces": [
                // The network has nothing but a loopback interface, until pasta adds another one.
                { "type": "pid" }, { "type": "network" }, { "type": "ipc" }, { "type": "uts" }, { "type": "mount" },
                { "type": "cgroup" },
            ],
            "maskedPaths": [
                "/proc/acpi", "/proc/asound", "/proc/kcore", "/proc/keys", "/proc/latency_stats",
                "/proc/timer_list", "/proc/timer_stats", "/proc/sched_debug", "/sys/firmware", "/proc/scsi",
            ],
            "readonlyPaths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"],
        },
    })
}

/// Mounts `file` at /etc/resolv.conf, where programs look for it, unless a volume is mounted there.
fn add_resolv_conf(spec: &mut Value, file: &Path) {
    const PLACE: &str = "/etc/resolv.conf";
    let Some(mounts) = spec["mounts"].as_array_mut() else { return };
    if mounts.iter().all(|mount| mount["destination"] != PLACE) {
        let mount =
            json!({ "destination": PLACE, "type": "bind", "source": file, "options": ["bind", "ro"] });
        mounts.push(mount);
    }
}

fn mounts(options: &Options) -> Vec<Value> {
    let mount = |destination: &str, kind: &str, options: &[&str]| json!({ "destination": destination, "type": kind, "source": kind, "options": options });
    let mut mounts = vec![
        mount("/proc", "proc", &[]),
        mount("/dev", "tmpfs", &["nosuid", "strictatime", "mode=755", "size=65536k"]),
        mount(
            "/dev/pts",
            "devpts",
            &["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"],
        ),
        mount("/dev/shm", "tmpfs", &["nosuid", "noexec", "nodev", "mode=1777", "size=65536k"]),
        mount("/dev/mqueue", "mqueue", &["nosuid", "noexec", "nodev"]),
        mount("/sys", "sysfs", &["nosuid", "noexec", "nodev", "ro"]),
        mount("/sys/fs/cgroup", "cgroup", &["nosuid", "noexec", "nodev", "relatime", "ro"]),
        // As containerd has it. Programs write there, and a host's own is another file system.
        mount("/run", "tmpfs", &["nosuid", "strictatime", "mode=755", "size=65536k"]),
    ];
    mounts.extend(options.volume.iter().map(|volume| {
        json!({
            "destination": volume.destination,
            "type": "bind",
            "source": volume.source,
            "options": ["rbind", if volume.read_only { "ro" } else { "rw" }],
        })
    }));
    mounts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process;

    fn options(words: &[&str]) -> Options {
        process::options(&[&["--rootfs", "/srv"], words].concat()).unwrap()
    }

    fn program() -> Program {
        Program {
            arguments: vec!["true".into()],
            environment: vec![PATH.into()],
            workdir: "/".into(),
            user: User { uid: 7, gid: 8, groups: vec![9] },
            hostname: "demo".into(),
        }
    }

    #[test]
    fn the_spec_has_what_the_options_say() {
        let options = options(&["--memory", "512M", "--cpus", "1.5", "-v", "/usr:/data:ro", "true"]);
        let spec = spec(&options, &program());
        assert_eq!(spec["linux"]["resources"]["memory"]["limit"], 512 << 20);
        assert_eq!(spec["linux"]["resources"]["cpu"], json!({ "period": 100_000, "quota": 150_000 }));
        assert_eq!(spec["process"]["user"], json!({ "uid": 7, "gid": 8, "additionalGids": [9] }));
        let volume = spec["mounts"].as_array().unwrap().last().unwrap().clone();
        let options = json!(["rbind", "ro"]);
        assert_eq!(
            volume,
            json!({ "destination": "/data", "type": "bind", "source": "/usr", "options": options })
        );
    }

    #[test]
    fn without_options_there_is_no_limit() {
        let spec = spec(&options(&["true"]), &program());
        assert_eq!(spec["linux"]["resources"].get("memory"), None);
        assert_eq!(spec["linux"]["resources"].get("cpu"), None);
    }

    #[test]
    fn a_resolver_of_the_network_is_shown_unless_a_volume_is_there() {
        let places = |words: &[&str]| {
            let mut spec = spec(&options(words), &program());
            let before = spec["mounts"].as_array().unwrap().len();
            add_resolv_conf(&mut spec, Path::new("/run/x/resolv.conf"));
            spec["mounts"].as_array().unwrap()[before..].to_vec()
        };
        let mount = json!({ "destination": "/etc/resolv.conf", "type": "bind", "source": "/run/x/resolv.conf",
            "options": ["bind", "ro"] });
        assert_eq!(places(&["--network", "nat", "true"]), [mount]);
        let own = ["--network", "nat", "-v", "/etc/hostname:/etc/resolv.conf", "true"];
        assert_eq!(places(&own), [Value::Null; 0]);
    }

    #[test]
    fn the_last_value_of_a_variable_counts() {
        let given = environment(&options(&["-e", "A=1", "-e", "B=x=y", "-e", "A=", "true"]), &[]).unwrap();
        assert_eq!(given, [PATH, "B=x=y", "A="]);
        let of_image = ["A=0".to_owned(), "PATH=/i".into()];
        let given = environment(&options(&["-e", "A=1", "true"]), &of_image).unwrap();
        assert_eq!(given, ["PATH=/i", "A=1"]);
        let own = environment(&options(&["--env-all", "-e", "PATH=/x", "true"]), &[]).unwrap();
        assert_eq!(own.last().unwrap(), "PATH=/x");
        assert_eq!(own.iter().filter(|variable| variable.starts_with("PATH=")).count(), 1);
        assert!(own.len() > 1);
        let error = environment(&options(&["-e", "BULKHEAD_NO_SUCH", "true"]), &[]).unwrap_err().to_string();
        assert!(error.starts_with("--env BULKHEAD_NO_SUCH: this command has no such variable"), "{error}");
    }

    #[test]
    fn a_variable_that_is_not_utf8_is_left_out() {
        use std::os::unix::ffi::OsStringExt;
        let odd = || OsString::from_vec(vec![b'x', 0xff]);
        let all = [("A".into(), odd()), (odd(), "1".into()), ("B".into(), "2".into())];
        assert_eq!(in_utf8(all.into_iter()).collect::<Vec<_>>(), ["B=2"]);
    }

    #[test]
    fn what_follows_the_program_is_its_own() {
        let options = options(&["cargo", "--memory", "--", "-x"]);
        assert_eq!(options.command, ["cargo", "--memory", "--", "-x"]);
        assert_eq!(options.memory, None);
    }
}
