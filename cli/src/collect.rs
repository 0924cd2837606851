//! `bulkhead collect`: writes an archive with what somebody needs who helps the operator. It contains no secrets.

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    os::{
        fd::AsRawFd,
        unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt},
    },
    path::Path,
    time::{Duration, SystemTime},
};

use bulkhead_host_shim::operator::{
    STATE_ROOT, chain, garbage, one_line, pods, templates, version_and_commit,
};
use rustix::{
    fs::{AtFlags, CWD, Mode, OFlags, linkat, open},
    io::Errno,
};
use serde::Serialize;
use tar::{Builder, Header};

use crate::{
    check, command_output,
    config_file::ConfigFile,
    containerd::{Containerd, handlers},
    containerd_log::{Log, is_for_support, without_words_of_specs},
    error::CommandError,
    output,
    progress::{Count, during},
};

/// The directory in the archive.
const NAME: &str = "bulkhead-support";

/// The most lines of a log.
const MOST_LINES: usize = 2_000;

/// The most bytes that are taken of a file of a pod.
const MOST_OF_A_FILE: u64 = 1 << 20;

/// Files of a state directory that are taken. They have paths, sizes and pids. The specs of containers, with their
/// environment, are in the bundles of containerd, which are not taken.
const TAKEN: [&str; 6] =
    ["journal", "vmm.json", "start.json", "container-starts.json", "events.json", "parts.json"];

/// Directories of a state directory that are not looked into: they have the files of containers, also while those are
/// mounted, or hooks with their environment.
const PRIVATE: [&str; 6] =
    ["share", "share.staging", "template-share", "template-share.staging", "poststop", "poststop-kept"];

/// Words of kernel messages that may have to do with VMs, their jail, their network or their memory.
const KERNEL_WORDS: [&str; 9] =
    ["kvm", "bulkhead", "type=1326", "oom", "out of memory", "landlock", "hung", "blocked for", "tap-"];

/// The records of audit that are taken: a system call that a filter has refused, a denial of AppArmor or SELinux, and a
/// program that has crashed (linux/audit.h).
const RECORDS: [&str; 3] = ["type=1326 ", "type=1400 ", "type=1701 "];

/// The most lines of containerd's log that are looked through.
const MOST_LOOKED_AT: u32 = 20_000;

/// Writes the archive to `path`, which must not exist.
pub(crate) fn collect(
    out: &mut impl Write,
    path: &Path,
    config: &ConfigFile,
    containerd: (&Containerd, &Log),
) -> Result<(), CommandError> {
    let write = |source| CommandError::not_written(path, source);
    let target = Target::create(path, OFlags::TMPFILE).map_err(write)?;
    let mut archive = Archive::new(&target.file, now());
    let root = Path::new(STATE_ROOT);
    let filled = during("collecting", false, |count| fill(&mut archive, (config, containerd), root, count))
        .and_then(|()| archive.builder.into_inner().map(drop));
    let size = target.end(filled).map_err(write)?;
    let mut say = || {
        archive.missing.iter().try_for_each(|missing| writeln!(out, "missing: {missing}"))?;
        writeln!(out, "wrote {} ({}): read it before you send it", path.display(), output::mib(size))
    };
    say().map_err(CommandError::Output)
}

/// The file of the archive. It has no name before it is complete: if this command is ended meanwhile, nothing is left
/// that the next one would refuse to replace.
struct Target<'a> {
    path: &'a Path,
    file: File,
    /// The file system has files with names only.
    has_name: bool,
}

impl<'a> Target<'a> {
    /// `nameless` is the flag for a file without a name.
    fn create(path: &'a Path, nameless: OFlags) -> io::Result<Self> {
        if path.symlink_metadata().is_ok() {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let directory = path.parent().filter(|directory| !directory.as_os_str().is_empty());
        let flags = OFlags::WRONLY | OFlags::CLOEXEC | nameless;
        // The names of files and of programs are not for everybody.
        let mode = Mode::RUSR | Mode::WUSR;
        match open(directory.unwrap_or(Path::new(".")), flags, mode) {
            Ok(file) => Ok(Self { path, file: file.into(), has_name: false }),
            // As NFS (open(2)).
            Err(Errno::OPNOTSUPP | Errno::ISDIR) => {
                let file =
                    File::options().write(true).create_new(true).mode(mode.as_raw_mode()).open(path)?;
                Ok(Self { path, file, has_name: true })
            }
            Err(errno) => Err(errno.into()),
        }
    }

    /// Returns the size of the file, which has its name now. If it was not filled, there is no file.
    fn end(&self, filled: io::Result<()>) -> io::Result<u64> {
        let named = filled.and_then(|()| match self.has_name {
            true => Ok(()),
            false => {
                let file = format!("/proc/self/fd/{}", self.file.as_raw_fd());
                Ok(linkat(CWD, file, CWD, self.path, AtFlags::SYMLINK_FOLLOW)?)
            }
        });
        if named.is_err() && self.has_name {
            // Half an archive helps nobody. The error says what is wrong.
            let _ = fs::remove_file(self.path);
        }
        named.and_then(|()| Ok(self.file.metadata()?.len()))
    }
}

fn fill<W: Write>(
    archive: &mut Archive<W>,
    (config, (containerd, log)): (&ConfigFile, (&Containerd, &Log)),
    root: &Path,
    count: &Count,
) -> io::Result<()> {
    count.set_detail("versions");
    let (of, by) = (config.clone(), containerd.clone());
    archive.add_if_known("versions.txt", within(PROGRAMS, move || Ok(versions(&of, &by))))?;
    count.set_detail("checks");
    let (of, by) = (config.clone(), containerd.clone());
    archive.add_if_known("check.txt", within(PROGRAMS, move || checks(&of, &by)))?;
    let of = config.clone();
    let settings =
        within(FILES, move || of.load().map(|config| config.settings()).map_err(|error| chain(&error)));
    archive.add_json_if_known("config.json", settings)?;
    count.set_detail("handlers of containerd");
    // The rest of containerd's configuration may have the passwords of registries.
    let all_handlers = containerd.configuration().map(|table| handlers(&table));
    archive.add_json_if_known("containerd-handlers.json", all_handlers.map_err(|error| chain(&error)))?;
    count.set_detail("pods and templates");
    archive.add_json_if_known("pods.json", of_files(root, pods))?;
    // Whether a template is outdated is seen by the parts that it was made of.
    archive.add_json_if_known("templates.json", of_files(root, templates))?;
    archive.add_json_if_known("garbage.json", of_files(root, garbage))?;
    count.set_detail("messages of the kernel");
    archive.add_if_known("kernel.txt", kernel_messages())?;
    count.set_detail("messages of the shims");
    archive.add_if_known("containerd.txt", shim_messages(log))?;
    count.set_detail("state of the pods");
    let mut listing = String::new();
    state(archive, root, root, &mut listing)?;
    archive.add("state.txt", &listing)
}

/// How long files may take, and a part for which several programs are asked, each of which has a limit itself.
const FILES: Duration = Duration::from_secs(if cfg!(test) { 2 } else { 20 });
const PROGRAMS: Duration = Duration::from_secs(240);

/// The result of a part, or why there is none. A disk or a file server that hangs costs the archive that part only.
fn within<T: Send + 'static>(
    limit: Duration,
    work: impl FnOnce() -> Result<T, String> + Send + 'static,
) -> Result<T, String> {
    match command_output::within(limit, work) {
        Ok(done) => done.unwrap_or_else(|| Err(format!("it has not come within {limit:?}: a disk may hang"))),
        Err(error) => Err(chain(&error)),
    }
}

/// [`within`] for what the files below `root` say, and those that they name.
fn of_files<T: Send + 'static>(
    root: &Path,
    look: impl FnOnce(&Path) -> io::Result<T> + Send + 'static,
) -> Result<T, String> {
    let root = root.to_owned();
    within(FILES, move || look(&root).map_err(|error| chain(&error)))
}

fn checks(config: &ConfigFile, containerd: &Containerd) -> Result<String, String> {
    let mut text = Vec::new();
    check::print(&mut text, &check::check(config, containerd), false).map_err(|error| chain(&error))?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// An archive of texts.
struct Archive<W: Write> {
    builder: Builder<W>,
    time: u64,
    /// What could not be found out, one line each.
    missing: Vec<String>,
}

impl<W: Write> Archive<W> {
    fn new(to: W, time: u64) -> Self {
        Self { builder: Builder::new(to), time, missing: Vec::new() }
    }

    /// Adds a text, or why there is none.
    fn add_if_known(&mut self, name: &str, text: Result<String, String>) -> io::Result<()> {
        let text = text.unwrap_or_else(|reason| {
            self.missing.push(one_line(&format!("{name}: {reason}")));
            format!("{reason}\n")
        });
        self.add(name, &text)
    }

    fn add_json_if_known(&mut self, name: &str, value: Result<impl Serialize, String>) -> io::Result<()> {
        let text = value.map(|value| serde_json::to_string_pretty(&value)).map(Result::unwrap_or_default);
        self.add_if_known(name, text)
    }

    fn add(&mut self, name: &str, text: &str) -> io::Result<()> {
        let mut header = Header::new_gnu();
        header.set_size(text.len() as u64);
        header.set_mode(0o600);
        header.set_mtime(self.time);
        self.builder.append_data(&mut header, format!("{NAME}/{name}"), text.as_bytes())
    }
}

fn now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

fn versions(config: &ConfigFile, containerd: &Containerd) -> String {
    let shown = |result: io::Result<String>| result.unwrap_or_else(|error| format!("unknown: {error}"));
    let vmm = config.load().unwrap_or_default().vmm;
    let uname = rustix::system::uname();
    let kernel = [uname.release(), uname.version(), uname.machine()].map(|text| text.to_string_lossy());
    let system = fs::read_to_string("/etc/os-release").unwrap_or_default();
    let system = system.lines().find_map(|line| line.strip_prefix("PRETTY_NAME=")).unwrap_or("unknown");
    format!(
        "bulkhead {}\nVMM {}\ncontainerd {}\nkernel {}\nsystem {system}\n",
        version_and_commit(),
        shown(command_output::output(&vmm.to_string_lossy(), &["--version"])).trim_end(),
        shown(containerd.version()),
        kernel.join(" "),
    )
}

fn kernel_messages() -> Result<String, String> {
    // With the number of the facility and the level before each line.
    let text = command_output::output("dmesg", &["-r"]).map_err(|error| chain(&error))?;
    Ok(last_lines(&text, is_of_kernel))
}

/// Whether a message is of the kernel, and taken. Where no journal is, the lines of services are among the kernel's,
/// with the arguments of programs. Without a daemon for audit, its records are there too: those of programs that were
/// executed have their arguments. So only the records that have none are taken.
fn is_of_kernel(line: &str) -> bool {
    let number = line.strip_prefix('<').and_then(|line| line.split_once('>')?.0.parse::<u32>().ok());
    // The kernel's facility is 0, and it lets no program use that. The level is in the last three bits.
    if number.is_none_or(|number| number >> 3 != 0) {
        return false;
    }
    let line = line.to_lowercase();
    let is_record = line.contains("type=") && line.contains("audit");
    let is_private = is_record && !RECORDS.iter().any(|record| line.contains(record));
    !is_private && KERNEL_WORDS.iter().any(|word| line.contains(word))
}

/// The shims' lines in containerd's log, and containerd's own about the runtime.
fn shim_messages(log: &Log) -> Result<String, String> {
    let lines = log.last_lines(MOST_LOOKED_AT, MOST_LINES, is_for_support);
    let lines = lines.map_err(|error| format!("cannot read {log}: {}", chain(&error)))?;
    // A user who is not root sees no lines of others, and docker may have a containerd of its own.
    if lines.is_empty() {
        let why = "containerd may have another one (`--unit docker`, if docker has its own containerd), no pod may \
                   have run, or this was not run as root";
        return Err(format!("{} has no line of a shim; {why}", log.looked_at(MOST_LOOKED_AT)));
    }
    Ok(lines.iter().map(|line| format!("{}\n", one_line(&without_words_of_specs(line)))).collect())
}

fn last_lines(text: &str, is_wanted: impl Fn(&str) -> bool) -> String {
    let lines: Vec<_> = text.lines().filter(|line| is_wanted(line)).collect();
    let first = lines.len().saturating_sub(MOST_LINES);
    lines.get(first..).unwrap_or_default().iter().map(|line| format!("{}\n", one_line(line))).collect()
}

/// Whether a directory is on another file system than the one above it. That may be a volume, which may hang.
fn is_mount(below: &fs::Metadata, directory: &Path) -> bool {
    fs::symlink_metadata(directory).is_ok_and(|above| above.dev() != below.dev())
}

/// Lists what is below `directory`, and takes the files that are known to have no secret.
fn state<W: Write>(
    archive: &mut Archive<W>,
    root: &Path,
    directory: &Path,
    listing: &mut String,
) -> io::Result<()> {
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        // A pod may end meanwhile.
        Err(error) => {
            listing.push_str(&format!("{}: {error}\n", one_line(&directory.to_string_lossy())));
            return Ok(());
        }
    };
    let mut paths: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    for path in paths {
        let Ok(metadata) = fs::symlink_metadata(&path) else { continue };
        let (mode, size) = (metadata.permissions().mode(), metadata.size());
        listing.push_str(&format!("{mode:07o} {size:>12} {}\n", one_line(&path.to_string_lossy())));
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let is_journal = directory.file_name().is_some_and(|name| name == "containers");
        if metadata.is_dir() && !PRIVATE.contains(&name.as_ref()) && !is_mount(&metadata, directory) {
            state(archive, root, &path, listing)?;
        } else if metadata.is_file() && (TAKEN.contains(&name.as_ref()) || is_journal) {
            let mut text = Vec::new();
            let read = File::open(&path).and_then(|file| file.take(MOST_OF_A_FILE).read_to_end(&mut text));
            // A pod may end meanwhile.
            if read.is_ok() {
                let below = path.strip_prefix(root).unwrap_or(&path).to_string_lossy().into_owned();
                archive.add(&format!("state/{}", one_line(&below)), &String::from_utf8_lossy(&text))?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use bulkhead_host_shim::operator::{COMMIT, VERSION};
    use rustix::fs::{FileType, mknodat};

    use super::*;

    fn collected(root: &Path) -> BTreeMap<String, String> {
        let mut archive = Archive::new(Vec::new(), 0);
        let log = Log::File(root.join("containerd.log"));
        let containerd = Containerd::of("/etc/containerd/config.toml".into());
        let of = (&ConfigFile { config: None }, (&containerd, &log));
        fill(&mut archive, of, root, &Count::default()).unwrap();
        let bytes = archive.builder.into_inner().unwrap();
        let mut archive = tar::Archive::new(bytes.as_slice());
        let read = |entry: io::Result<tar::Entry<'_, _>>| {
            let mut entry = entry.unwrap();
            let mut text = String::new();
            entry.read_to_string(&mut text).unwrap();
            (entry.path().unwrap().strip_prefix(NAME).unwrap().to_str().unwrap().to_owned(), text)
        };
        archive.entries().unwrap().map(read).collect()
    }

    #[test]
    fn the_state_is_there_and_no_file_of_a_container() {
        let dir = tempfile::tempdir().unwrap();
        let pod = dir.path().join("c/ns/pod");
        for directory in ["containers", "share/one/rootfs"] {
            fs::create_dir_all(pod.join(directory)).unwrap();
        }
        fs::write(pod.join("journal"), "damaged\u{1b}[2J").unwrap();
        fs::write(pod.join("containers/one"), "{}\n").unwrap();
        for private in ["share/one/rootfs/journal", "share/one/secret", "config.json"] {
            fs::write(pod.join(private), "PASSWORD=secret").unwrap();
        }
        let line = "DEBUG pod{namespace=\"a\" id=\"b\"}: the guest is ready\n";
        fs::write(dir.path().join("containerd.log"), line).unwrap();
        let files = collected(dir.path());
        assert_eq!(files["containerd.txt"], line);
        assert!(files["state.txt"].contains("c/ns/pod/config.json"), "{}", files["state.txt"]);
        assert!(
            files.contains_key("state/c/ns/pod/journal")
                && files.contains_key("state/c/ns/pod/containers/one")
        );
        assert!(files["pods.json"].contains("\"unknown\"") && files["check.txt"].contains("KVM"));
        assert!(files["versions.txt"].starts_with(&format!("bulkhead {VERSION} (commit {COMMIT})\n")));
        assert!(files["config.json"].contains("memory_mib"));
        for (name, text) in &files {
            assert!(!text.contains("PASSWORD") && !text.contains("share/one"), "{name}: {text}");
        }
    }

    #[test]
    fn a_disk_that_hangs_costs_the_archive_what_is_on_it_only() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.toml");
        // Whoever opens it waits for somebody who writes.
        mknodat(CWD, &path, FileType::Fifo, Mode::RUSR, 0).unwrap();
        let late = || within(FILES, move || fs::read_to_string(path).map_err(|error| chain(&error)));
        let mut archive = Archive::new(Vec::new(), 0);
        archive.add_if_known("config.json", late()).unwrap();
        archive.add_if_known("pods.json", Ok("[]".into())).unwrap();
        assert_eq!(archive.missing, ["config.json: it has not come within 2s: a disk may hang"]);
    }

    #[test]
    fn an_archive_that_exists_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("support.tar");
        fs::write(&path, "mine").unwrap();
        let containerd = Containerd::of("/etc/containerd/config.toml".into());
        let of = (&containerd, &Log::Journal(vec!["docker".into()]));
        let error = collect(&mut Vec::new(), &path, &ConfigFile { config: None }, of).unwrap_err();
        assert!(
            chain(&error).ends_with("it exists already; remove it, or name another file"),
            "{}",
            chain(&error)
        );
        assert_eq!(fs::read_to_string(path).unwrap(), "mine");
    }

    #[test]
    fn an_archive_has_its_name_when_it_is_complete_or_none() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("support.tar");
        let full = || Err(io::ErrorKind::StorageFull.into());
        // A file system without files that have no name answers as if it was asked to write a directory.
        for (nameless, has_name) in [(OFlags::TMPFILE, false), (OFlags::empty(), true)] {
            let target = Target::create(&path, nameless).unwrap();
            assert_eq!(path.exists(), has_name);
            assert_eq!(target.end(full()).unwrap_err().kind(), io::ErrorKind::StorageFull);
            assert!(!path.exists());
            let target = Target::create(&path, nameless).unwrap();
            (&target.file).write_all(b"text").unwrap();
            assert_eq!(target.end(Ok(())).unwrap(), 4);
            assert_eq!(fs::read_to_string(&path).unwrap(), "text");
            assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o600);
            fs::remove_file(&path).unwrap();
        }
        // Somebody else has made it meanwhile.
        let target = Target::create(&path, OFlags::TMPFILE).unwrap();
        fs::write(&path, "mine").unwrap();
        assert_eq!(target.end(Ok(())).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(fs::read_to_string(&path).unwrap(), "mine");
    }

    #[test]
    fn records_of_programs_are_no_messages_of_the_kernel() {
        for taken in [
            "kvm: guest NMI",
            "audit: type=1326 audit(1:2): comm=\"vcpu0\" sig=31",
            "audit: type=1400 audit(1:2): apparmor=\"DENIED\" operation=\"mount\" comm=\"bulkhead-vmm\"",
            "audit: type=1400 audit(1:2): avc:  denied  { open } for  pid=7 comm=\"bulkhead-vmm\"",
            "audit: type=1701 audit(1:2): comm=\"bulkhead-vmm\" sig=11 res=1",
            "bulkhead-vmm[7]: segfault at 0 ip 0 sp 0 error 4",
            "Out of memory: Killed",
        ] {
            assert!(is_of_kernel(&format!("<6>[    1.000002] {taken}")), "{taken}");
        }
        for private in [
            "<5>[    1.2] audit: type=1309 audit(1:2): argc=4 a0=\"bulkhead\" a1=\"exec\" a2=\"pod\" a3=\"secret\"",
            "<5>[    1.2] audit: type=1327 audit(1:2): proctitle=62756C6B68656164",
            "<5>[    1.2] audit: type=1123 audit(1:2): cmd=\"bulkhead exec secret\"",
            // Of a service manager that has no journal: of the facility daemon.
            "<30>[    1.2] systemd[1]: Started run-u7.service - bulkhead exec pod app --password=secret.",
            "bulkhead exec pod app --password=secret",
            "<6>[    1.2] usb 1-1: new device",
        ] {
            assert!(!is_of_kernel(private), "{private}");
        }
    }

    #[test]
    fn only_the_last_lines_are_taken() {
        let text: String = (0..MOST_LINES + 5).map(|line| format!("kvm {line}\nother\n")).collect();
        let taken = last_lines(&text, |line| line.starts_with("kvm"));
        assert_eq!((taken.lines().count(), taken.lines().next()), (MOST_LINES, Some("kvm 5")));
    }
}
