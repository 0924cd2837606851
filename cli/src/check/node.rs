//! What is installed on the host: containerd, its configuration, and the parts of Bulkhead.

use std::{
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use bulkhead_host_shim::operator::{COMMIT, Config, VERSION, chain, one_line};

use crate::{
    check::{distribution::Family, finding::Finding, http2},
    command_output,
    config_file::ConfigFile,
    containerd::{self, Containerd, RUNTIME},
    containerd_process::Reading,
    run::nat::Pasta,
};

/// Where containerd, as systemd starts it, looks for shims.
const SHIM_DIRECTORIES: [&str; 6] = ["usr/local/sbin", "usr/local/bin", "usr/sbin", "usr/bin", "sbin", "bin"];
const SHIM: &str = "containerd-shim-bulkhead-v2";

/// How long containerd may take to answer.
const ANSWER: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 5 });

/// The oldest containerd.
const OLDEST: (u32, u32) = (1, 6);

/// The versions of containerd that the tests have.
const TESTED: [(u32, u32); 3] = [(1, 6), (1, 7), (2, 1)];

/// Whether containerd is there, and has a version that Bulkhead was tested with. `generator`: it is a part of k3s or
/// RKE2, which generates its configuration.
pub(super) fn version(version: io::Result<String>, generator: Option<&str>, family: Family) -> Finding {
    let check = "containerd";
    let text = match version {
        Ok(text) => one_line(&text),
        Err(error) => {
            let found = format!("its version is not known: {}", chain(&error));
            let remedy = match error.kind() {
                io::ErrorKind::NotFound => format!("{}, with containerd in PATH", install(family)),
                _ => "run `containerd --version` as root, and fix what it complains about".into(),
            };
            return Finding::fail(check, found, remedy);
        }
    };
    const TRY: &str = "try a container before you rely on it";
    let found = match generator {
        None => format!("version {text}"),
        Some(generator) => format!("version {text}, of {generator}"),
    };
    match containerd::major_and_minor(&text) {
        Some(numbers) if numbers < OLDEST => Finding::fail(check, found, install(family)),
        Some(numbers) if TESTED.contains(&numbers) => match generator {
            None => Finding::ok(check, found),
            Some(generator) => {
                Finding::warn(check, found, format!("Bulkhead was not tested with {generator}; {TRY}"))
            }
        },
        _ => Finding::warn(
            check,
            found,
            format!("Bulkhead was tested with containerd 1.6.20, 1.7.24 and 2.1.9; {TRY}"),
        ),
    }
}

fn install(family: Family) -> String {
    format!("install containerd 1.6, 1.7 or 2.1: {}", family.install_containerd())
}

/// Whether a program of `bulkhead run` can have a network. Pods do not need pasta.
pub(super) fn pasta(pasta: io::Result<Pasta>, family: Family) -> Finding {
    const FOR: &str = "only `bulkhead run --network nat` needs it";
    let check = "pasta";
    match pasta {
        Ok(Pasta::Fit) => Finding::ok(check, "for `bulkhead run --network nat`"),
        Ok(Pasta::Missing) => {
            Finding::ok(check, format!("not installed ({}); {FOR}", family.install_pasta()))
        }
        Ok(Pasta::Old) => {
            let found = format!("older than 2025, and is not used; {FOR}");
            let remedy = match family {
                Family::Debian => "install a newer passt, as Debian 13 has it, or remove it",
                _ => "install a newer passt, or remove it",
            };
            Finding::warn(check, found, remedy)
        }
        Err(error) => Finding::warn(
            check,
            format!("`pasta --help` fails: {}; {FOR}", chain(&error)),
            format!("install it again ({}), or remove it", family.install_pasta()),
        ),
    }
}

/// Whether containerd runs, with the configuration that the files have now.
pub(super) fn socket(root: &Path, containerd: &Containerd) -> Finding {
    let (check, socket) = ("containerd's socket", containerd.socket());
    let path = root.join(socket.trim_start_matches('/'));
    let restart = match &containerd.restarters(root)[..] {
        [] => "restart it as it was started".into(),
        units => format!("run `systemctl restart` for {}", units.join(" or ")),
    };
    let does_not_run = |found: String| {
        let units = containerd.units().join(" or ");
        let remedy = format!("run `systemctl start` for {units}, unless containerd has another socket");
        Finding::warn(check, found, remedy)
    };
    let late = || {
        let found = format!("it does not answer at {socket} within {ANSWER:?}: it hangs, or is very busy");
        Finding::warn(check, found, format!("look at its log (`journalctl --unit`), and {restart}"))
    };
    // A containerd that was killed leaves its socket, and one that hangs may accept nobody. If it hangs, the kernel
    // accepts connections for it.
    let asked = path.clone();
    match command_output::within(ANSWER, move || http2::greet(&asked, ANSWER)) {
        Ok(Some(Ok(true))) => {}
        Ok(Some(Ok(false))) => {
            return Finding::warn(
                check,
                format!("what answers at {socket} does not speak gRPC, so it is not containerd"),
                format!("end it (`ss -xlp` shows it), and {restart}"),
            );
        }
        Ok(None) => return late(),
        Ok(Some(Err(error))) | Err(error) => {
            return match error.kind() {
                io::ErrorKind::NotFound => does_not_run(format!("there is no {socket}")),
                io::ErrorKind::PermissionDenied => Finding::ok(check, socket),
                io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => late(),
                _ => does_not_run(format!("nobody answers at {socket}: {}", chain(&error))),
            };
        }
    }
    // What answers may be another containerd than the one that reads this configuration.
    let found = match containerd.unread(root) {
        Reading::Current => return Finding::ok(check, socket),
        Reading::Unread(directory) if directory.is_dir() => {
            format!("containerd has not read what has changed in {} after its start", directory.display())
        }
        Reading::Unread(file) => {
            format!("containerd has not read {}, which is newer than its start", file.display())
        }
        Reading::Down => {
            let config = containerd.config.display();
            return Finding::warn(
                check,
                format!("a containerd answers at {socket}, but no running containerd reads {config}"),
                "name the file that it reads with --containerd-config; `ps -C containerd -o args` shows it",
            );
        }
    };
    Finding::warn(check, found, format!("{restart}; running containers are not interrupted"))
}

/// Whether the CRI plugin has a handler for Bulkhead.
pub(super) fn handler(configuration: io::Result<toml::Table>) -> Finding {
    let check = "runtime handler";
    let configuration = match configuration {
        Ok(configuration) => configuration,
        Err(error) => {
            let found = format!("containerd's configuration is not known: {}", chain(&error));
            return Finding::fail(
                check,
                found,
                "run `containerd config dump` and fix what it complains about",
            );
        }
    };
    let ours = containerd::handlers(&configuration).into_iter().filter(|(_, runtime)| runtime == RUNTIME);
    let names: Vec<_> = ours.map(|(handler, _)| one_line(&handler)).collect();
    match names.is_empty() {
        false => Finding::ok(check, names.join(", ")),
        true => Finding::warn(
            check,
            "containerd's CRI plugin has no handler for Bulkhead",
            "run `bulkhead install` for Kubernetes; ctr and docker need none",
        ),
    }
}

/// Whether containerd will find the shim, and that of this version.
pub(super) fn shim(root: &Path) -> Finding {
    let check = "shim";
    // A directory may be a link to another.
    let mut there: Vec<PathBuf> = Vec::new();
    for directory in SHIM_DIRECTORIES {
        if let Ok(path) = root.join(directory).join(SHIM).canonicalize()
            && path.is_file()
            && !there.contains(&path)
        {
            there.push(path);
        }
    }
    let Some(first) = there.first() else {
        return Finding::fail(
            check,
            format!("there is no {SHIM} in {}", SHIM_DIRECTORIES.map(|it| format!("/{it}")).join(", ")),
            "install Bulkhead again; or copy the shim to a directory of containerd's PATH",
        );
    };
    let version = version_of(first, "-v");
    match (version, &there[1..]) {
        (Err(found), _) => Finding::fail(check, found, ONE_VERSION),
        (Ok(Some(found)), _) => Finding::warn(check, found, ONE_VERSION),
        (Ok(None), [second, ..]) => Finding::warn(
            check,
            format!("containerd takes {}, and not {}", first.display(), second.display()),
            "remove the one of another installation",
        ),
        (Ok(None), []) => Finding::ok(check, first.display().to_string()),
    }
}

/// What to do if a part is of another version, or damaged.
const ONE_VERSION: &str = "install all parts of one version and one build";

/// Asks a program for its version, by the option that it has for that. Returns what is wrong, or else that it is of
/// another commit.
fn version_of(program: &Path, option: &str) -> Result<Option<String>, String> {
    match command_output::output(&program.to_string_lossy(), &[option]) {
        Ok(said) => judged(program, &said, COMMIT),
        Err(error) => Err(format!("{} cannot be executed: {}", program.display(), chain(&error))),
    }
}

/// [`version_of`] for what the program says, if this command is of this commit.
fn judged(program: &Path, said: &str, commit: &str) -> Result<Option<String>, String> {
    let is = format!("{} is `{}`, and this command is {VERSION}", program.display(), one_line(said.trim()));
    if !said.split_whitespace().any(|word| word == VERSION) {
        return Err(is);
    }
    // An older build does not say its commit, and one from an archive does not know it.
    let other = said.split_once("(commit ").map(|(_, rest)| rest.trim_end().trim_end_matches(')'));
    let is_same = other == Some(commit) || [Some(commit), other].contains(&Some("unknown"));
    Ok((!is_same).then(|| format!("{is} (commit {commit})")))
}

/// What to do if it cannot be said that a VM boots from a file.
const DOUBTFUL: &str = "install Bulkhead again, if the file is not your own; if it is, decompress it (the kernel of \
                        Bulkhead takes no compressed initramfs), or start a pod to see whether it boots";

/// The configuration of Bulkhead, and whether the files that it names are there, are whole and belong together.
pub(super) fn configuration(file: &ConfigFile) -> (Finding, Option<Config>) {
    let loaded = file.load().and_then(|config| {
        config.check_files()?;
        Ok(config)
    });
    let config = match loaded {
        Ok(config) => config,
        Err(error) => {
            let remedy = error.remedy();
            return (Finding::error("configuration", &error, remedy.as_deref(), "fix this file"), None);
        }
    };
    let path = file.path();
    let origin = match (file.exists(), config.origins.is_empty()) {
        (true, _) => path.display().to_string(),
        (false, true) => format!("there is no {}, so the defaults hold", path.display()),
        (false, false) => format!("there is no {}, only drop-ins", path.display()),
    };
    let doubts = match config.check_boot_files() {
        Ok(doubts) => doubts,
        Err(error) => {
            let remedy = error.remedy();
            let finding = Finding::error("configuration", &error, remedy.as_deref(), "look at its storage");
            return (finding, Some(config));
        }
    };
    let finding = match version_of(&config.vmm, "--version") {
        Ok(None) if doubts.is_empty() => {
            Finding::ok("configuration", format!("{origin}; the parts are there, version {VERSION}"))
        }
        Ok(None) => Finding::warn("configuration", one_line(&doubts.join("; ")), DOUBTFUL),
        Ok(Some(found)) => Finding::warn("configuration", found, ONE_VERSION),
        Err(found) => Finding::fail("configuration", found, ONE_VERSION),
    };
    (finding, Some(config))
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        io::{Read, Write},
        os::unix::{
            fs::{PermissionsExt, symlink},
            net::{UnixListener, UnixStream},
        },
        sync::{
            Arc,
            atomic::{AtomicBool, Ordering},
        },
        thread,
        time::{Instant, SystemTime},
    };

    use bulkhead_host_shim::operator::version_and_commit;

    use super::*;
    use crate::{check::finding::Status, containerd::CONFIG, containerd_process::tests::Host};

    #[test]
    fn versions_are_judged() {
        let status = |text: &str| version(Ok(text.into()), None, Family::Suse).status;
        assert_eq!(["1.6.20~ds1", "1.7.24", "2.1.9"].map(status), [Status::Ok; 3]);
        assert_eq!(["1.8.0", "2.0.5", "2.2.0", "3.0.0", "new"].map(status), [Status::Warn; 5]);
        assert_eq!(status("1.5.9"), Status::Fail);
        let k3s = version(Ok("2.1.9-k3s1".into()), Some("k3s"), Family::Suse);
        assert!(k3s.status == Status::Warn && k3s.found == "version 2.1.9-k3s1, of k3s", "{k3s:?}");
        let missing = version(Err(io::ErrorKind::NotFound.into()), None, Family::Suse);
        let remedy =
            "install containerd 1.6, 1.7 or 2.1: `zypper install containerd`, with containerd in PATH";
        assert_eq!((missing.status, missing.remedy.as_deref()), (Status::Fail, Some(remedy)));
        let denied = version(Err(io::ErrorKind::PermissionDenied.into()), None, Family::Suse);
        assert!(denied.status == Status::Fail && !denied.remedy.unwrap().contains("install"));
    }

    #[test]
    fn a_missing_pasta_keeps_no_pod_from_running() {
        let found = |pasta| self::pasta(pasta, Family::Arch);
        assert_eq!(found(Ok(Pasta::Fit)).status, Status::Ok);
        let missing = found(Ok(Pasta::Missing));
        assert!(missing.status == Status::Ok && missing.found.contains("`pacman -S passt`"), "{missing:?}");
        let broken = found(Err(io::ErrorKind::PermissionDenied.into()));
        for other in [found(Ok(Pasta::Old)), broken] {
            assert!(other.status == Status::Warn && other.remedy.is_some(), "{other:?}");
        }
    }

    #[test]
    fn a_handler_of_another_runtime_is_none() {
        let handler = |text: &str| handler(Ok(toml::from_str(text).unwrap()));
        let with = |runtime: &str| {
            format!(
                "[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.bulkhead]\nruntime_type = \"{runtime}\""
            )
        };
        assert_eq!(handler(&with(RUNTIME)), Finding::ok("runtime handler", "bulkhead"));
        assert_eq!(handler(&with("io.containerd.runc.v2")).status, Status::Warn);
    }

    /// An ELF file with one segment of one byte (elf(5)).
    fn kernel() -> Vec<u8> {
        let mut elf = vec![0; 64 + 56 + 1];
        elf[..6].copy_from_slice(b"\x7fELF\x02\x01");
        (elf[18], elf[32], elf[56]) = (62, 64, 1);
        (elf[64], elf[64 + 8], elf[64 + 32]) = (1, 64 + 56, 1);
        elf
    }

    /// An archive of cpio with an empty /init.
    fn initramfs() -> String {
        let entry = |name: &str| {
            let name_size = name.len() + 1;
            let header = format!("070701{:088x}{name_size:08x}{:08x}{name}\0", 0, 0);
            let padding = header.len().next_multiple_of(4) - header.len();
            header + &"\0".repeat(padding)
        };
        entry("init") + &entry("TRAILER!!!")
    }

    #[test]
    fn the_parts_must_be_there_and_of_this_version() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let write = |config: &str| fs::write(at("config.toml"), config).unwrap();
        let (vmm, parts) = (
            at("vmm"),
            format!(
                "kernel = {:?}\ninitramfs = {:?}\nvmm = {:?}\n",
                at("kernel"),
                at("initramfs"),
                at("vmm")
            ),
        );
        write(&parts);
        fs::write(at("kernel"), kernel()).unwrap();
        fs::write(at("initramfs"), initramfs()).unwrap();
        let file = ConfigFile { config: Some(at("config.toml")) };
        let check = || configuration(&file).0;
        assert_eq!(
            (check().status, check().remedy.unwrap().starts_with("install it or set")),
            (Status::Fail, true)
        );
        let vmm_says = |text: &str| {
            let script = format!("#!/bin/sh\n[ \"$*\" = --version ] && echo '{text}'\n");
            fs::write(&vmm, script).unwrap();
            fs::set_permissions(&vmm, fs::Permissions::from_mode(0o755)).unwrap();
        };
        vmm_says(&format!("bulkhead-vmm {}", version_and_commit()));
        assert_eq!(check().status, Status::Ok, "{:?}", check());
        for (part, remedy) in [
            ("kernel", "install Bulkhead again, or set `kernel` in "),
            ("initramfs", "install Bulkhead again, or set `initramfs` in "),
        ] {
            let whole = fs::read(at(part)).unwrap();
            fs::write(at(part), &whole[..whole.len() - 5]).unwrap();
            let damaged = check();
            let is_named = damaged.found.starts_with(&format!("{part} {}: ", at(part).display()));
            assert!(damaged.status == Status::Fail && is_named, "{damaged:?}");
            assert!(damaged.remedy.as_deref().unwrap().starts_with(remedy), "{damaged:?}");
            fs::write(at(part), whole).unwrap();
        }
        // Linux takes a compressed one, but the guest's kernel was not built for that.
        let whole = fs::read(at("initramfs")).unwrap();
        fs::write(at("initramfs"), b"\x28\xb5\x2f\xfd...").unwrap();
        let compressed = check();
        assert!(
            compressed.status == Status::Warn && compressed.found.ends_with("compressed by zstd"),
            "{compressed:?}"
        );
        assert!(compressed.remedy.unwrap().contains("decompress it"));
        fs::write(at("initramfs"), whole).unwrap();
        vmm_says("bulkhead-vmm 0.0.1");
        assert!(check().found.contains("is `bulkhead-vmm 0.0.1`"), "{:?}", check());
        write("kernle = '/k'\n");
        let finding = check();
        assert_eq!(
            (finding.status, finding.remedy.as_deref()),
            (Status::Fail, Some("did you mean `kernel`?"))
        );
        assert!(finding.found.ends_with("there is no key `kernle`"), "{}", finding.found);
        // A file that was named is not replaced by the defaults.
        fs::remove_file(at("config.toml")).unwrap();
        let missing = check();
        let remedy = "name another one with --config, or none for /etc/bulkhead/config.toml";
        assert_eq!((missing.status, missing.remedy.as_deref()), (Status::Fail, Some(remedy)));
        assert!(missing.found.ends_with("config.toml: there is no such file"), "{}", missing.found);
    }

    #[test]
    fn parts_of_two_builds_of_one_version_are_known() {
        let judge = |said: &str, commit: &str| judged(Path::new("/vmm"), &format!("vmm {said}\n"), commit);
        let (of_a, of_b) = (format!("{VERSION} (commit a1)"), format!("{VERSION} (commit b2-dirty)"));
        assert_eq!(judge(&of_a, "a1"), Ok(None));
        let found = format!("/vmm is `vmm {of_b}`, and this command is {of_a}");
        assert_eq!(judge(&of_b, "a1"), Ok(Some(found)));
        let without = judge(VERSION, "a1").unwrap().unwrap();
        assert!(without.starts_with(&format!("/vmm is `vmm {VERSION}`, and")), "{without}");
        assert_eq!([judge(&of_a, "unknown"), judge(VERSION, "unknown")], [Ok(None), Ok(None)]);
        assert_eq!(judge(&format!("{VERSION} (commit unknown)"), "a1"), Ok(None));
        assert!(judge("0.0.1 (commit a1)", "a1").is_err());
    }

    fn program(path: &Path, says: &str) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, format!("#!/bin/sh\necho '{says}'\n")).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    #[test]
    fn the_shim_is_where_containerd_looks_and_of_this_version() {
        let dir = tempfile::tempdir().unwrap();
        let at = |directory: &str| dir.path().canonicalize().unwrap().join(directory).join(SHIM);
        assert_eq!(shim(dir.path()).status, Status::Fail);
        program(&at("usr/bin"), &format!("{SHIM} {}", version_and_commit()));
        assert_eq!(shim(dir.path()).status, Status::Ok);
        symlink("usr/bin", dir.path().join("bin")).unwrap();
        assert_eq!(shim(dir.path()).status, Status::Ok, "it is the same file");
        // The archive's comes before the package's.
        program(&at("usr/local/bin"), &format!("{SHIM} {}", version_and_commit()));
        let two = shim(dir.path());
        let takes = format!("takes {}, and not {}", at("usr/local/bin").display(), at("usr/bin").display());
        assert!(two.status == Status::Warn && two.found.contains(&takes), "{two:?}");
        program(&at("usr/local/bin"), &format!("{SHIM} 0.0.1"));
        let old = shim(dir.path());
        assert!(old.status == Status::Fail && old.found.contains("0.0.1`"), "{old:?}");
    }

    #[test]
    fn containerd_must_run_with_the_files_that_there_are() {
        let host = Host(tempfile::tempdir().unwrap());
        let root = host.0.path();
        let containerd = Containerd::find(root);
        let finding = || super::socket(root, &containerd);
        assert!(finding().found.starts_with("there is no /run/"), "{:?}", finding());
        let (main, drop_in) = (CONFIG, "etc/containerd/conf.d/bulkhead.toml");
        host.write(main, "");
        host.write(drop_in, "");
        host.write("run/containerd/x", "");
        let socket = host.at("run/containerd/containerd.sock");
        let served = served(&socket, SETTINGS);
        let start = || {
            host.later();
            host.start("", root);
            host.later();
            assert_eq!(finding().status, Status::Ok, "{:?}", finding());
        };
        let late = || {
            host.later();
            let late = finding();
            let remedy = late.remedy.unwrap();
            assert!(
                late.status == Status::Warn && remedy.contains("`systemctl restart` for containerd;"),
                "{remedy}"
            );
            late.found
        };
        start();
        let file = fs::File::create(host.at(drop_in)).unwrap();
        // As of a file that was copied with its date.
        file.set_modified(SystemTime::UNIX_EPOCH).unwrap();
        assert!(late().contains("has not read") && late().contains("bulkhead.toml, which"), "{}", late());
        start();
        fs::remove_file(host.at(drop_in)).unwrap();
        assert!(late().ends_with("etc/containerd/conf.d after its start"), "{}", late());
        start();
        fs::remove_file(host.at(main)).unwrap();
        assert!(late().ends_with("etc/containerd after its start"), "{}", late());
        start();
        served.end(&socket);
        assert!(finding().found.starts_with("nobody answers at"), "{:?}", finding());
    }

    #[test]
    fn the_containerd_that_answers_may_be_another() {
        let host = Host(tempfile::tempdir().unwrap());
        let root = host.0.path();
        host.write("run/containerd/x", "");
        let socket = host.at("run/containerd/containerd.sock");
        let first = served(&socket, SETTINGS);
        let second = "/etc/containerd/second.toml";
        host.write(second, "version = 2\n");
        let finding = || super::socket(root, &Containerd::of(second.into()));
        host.later();
        host.start(&format!("--config\0{second}"), root);
        host.write("proc/7/cgroup", "0::/system.slice/second.service\n");
        host.later();
        assert_eq!(finding().status, Status::Ok);
        host.write(second, "version = 3\n");
        host.later();
        // Only the other one is restarted.
        first.end(&socket);
        fs::remove_file(&socket).unwrap();
        let served = served(&socket, SETTINGS);
        let unread = finding();
        assert!(unread.found.contains("has not read") && unread.found.contains("second.toml"), "{unread:?}");
        assert!(unread.remedy.unwrap().starts_with("run `systemctl restart` for second;"));
        host.start("", root);
        let unknown = finding();
        assert!(
            unknown.status == Status::Warn && unknown.found.ends_with("reads /etc/containerd/second.toml")
        );
        assert!(unknown.remedy.unwrap().contains("--containerd-config"));
        served.end(&socket);
    }

    /// What a server of HTTP/2 says first: an empty frame SETTINGS.
    const SETTINGS: &[u8] = &[0, 0, 0, 4, 0, 0, 0, 0, 0];

    /// A server that has read the greeting of a client, and answers with these bytes.
    struct Served {
        thread: thread::JoinHandle<()>,
        ends: Arc<AtomicBool>,
    }

    fn served(socket: &Path, answer: &'static [u8]) -> Served {
        let listener = UnixListener::bind(socket).unwrap();
        let ends = Arc::<AtomicBool>::default();
        let is_end = Arc::clone(&ends);
        let thread = thread::spawn(move || {
            for client in listener.incoming() {
                let mut client = client.unwrap();
                if is_end.load(Ordering::Relaxed) {
                    return;
                }
                let mut greeting = [0; 24 + 9];
                client.read_exact(&mut greeting).unwrap();
                assert_eq!(&greeting[..24], b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
                assert_eq!(&greeting[24..], SETTINGS);
                client.write_all(answer).unwrap();
            }
        });
        Served { thread, ends }
    }

    impl Served {
        /// Ends the server, whose socket stays.
        fn end(self, socket: &Path) {
            self.ends.store(true, Ordering::Relaxed);
            drop(UnixStream::connect(socket).unwrap());
            self.thread.join().unwrap();
        }
    }

    #[test]
    fn who_takes_connections_but_is_no_containerd_that_answers_is_told_apart() {
        for (answer, is_containerd) in [
            (SETTINGS, true),
            (&[0, 0, 6, 4, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 100], true),
            // Another frame, an acknowledgement, a frame of a stream, half a setting, and half a frame.
            (&[0, 0, 0, 6, 0, 0, 0, 0, 0], false),
            (&[0, 0, 0, 4, 1, 0, 0, 0, 0], false),
            (&[0, 0, 0, 4, 0, 0, 0, 0, 1], false),
            (&[0, 0, 5, 4, 0, 0, 0, 0, 0], false),
            (&[0, 0, 0, 4], false),
            (b"", false),
            (b"HTTP/1.1 400 Bad Request\r\n\r\n", false),
        ] {
            let host = Host(tempfile::tempdir().unwrap());
            host.start("", host.0.path());
            let socket = host.at("run/containerd/containerd.sock");
            fs::create_dir_all(socket.parent().unwrap()).unwrap();
            let served = served(&socket, answer);
            let finding = super::socket(host.0.path(), &Containerd::of(CONFIG.into()));
            served.end(&socket);
            if is_containerd {
                assert_eq!(finding.status, Status::Ok, "{answer:?}: {finding:?}");
            } else {
                let is_foreign = finding.found.contains("does not speak gRPC, so it is not containerd");
                assert!(finding.status == Status::Warn && is_foreign, "{answer:?}: {finding:?}");
            }
        }
    }

    #[test]
    fn a_containerd_that_takes_connections_and_never_answers_hangs() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("run/containerd/containerd.sock");
        fs::create_dir_all(socket.parent().unwrap()).unwrap();
        let _hangs = UnixListener::bind(&socket).unwrap();
        let begun = Instant::now();
        let finding = super::socket(dir.path(), &Containerd::of("/etc/containerd/config.toml".into()));
        assert!(begun.elapsed() < Duration::from_secs(60));
        let is_late =
            finding.found.starts_with("it does not answer at /run/containerd/containerd.sock within");
        assert!(finding.status == Status::Warn && is_late, "{finding:?}");
        assert!(finding.remedy.unwrap().ends_with("run `systemctl restart` for containerd"));
    }
}
