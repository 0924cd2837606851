//! Limits of what a pod's cgroup reads from block devices of the host and writes to them.
//!
//! The kernel counts a request for the cgroup of the thread that makes it, and on cgroup v2 what is written back later
//! for the cgroup that has changed the file (kernel, admin-guide/cgroup-v2.rst, "Writeback"). These are the VMM's.

use std::{fs, sync::Mutex};

use rustix::io::Errno;

use crate::{
    host::{
        cgroup::{Cgroup, CgroupError, Directory},
        cgroup_limits::{enable, write_enabled},
    },
    types::lock::lock,
};

/// The controller, as cgroup v1 and v2 call it.
const V1: &str = "blkio";
const V2: &str = "io";

/// Files of cgroup v2.
const IO_MAX: &str = "io.max";
const IO_WEIGHT: &str = "io.weight";
const IO_BFQ_WEIGHT: &str = "io.bfq.weight";
const IO_LATENCY: &str = "io.latency";

/// The files of cgroup v2's controller that limit something, and what is written for a device to end its limits.
const FILES: [(&str, &str); 4] = [
    (IO_MAX, "rbps=max wbps=max riops=max wiops=max"),
    (IO_WEIGHT, "default"),
    (IO_BFQ_WEIGHT, "default"),
    (IO_LATENCY, "target=0"),
];

/// What ends the limits of a device in a file of cgroup v1.
const NONE_V1: &str = "0";

/// Of these [`Limit::Weight`] has one.
pub(crate) const LEAST_WEIGHT: u16 = 10;
pub(crate) const MOST_WEIGHT: u16 = 1000;

/// Major and minor of a block device of the host.
pub(crate) type Numbers = (i64, i64);

/// A limit, and the field of the spec that asks for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct IoLimit {
    pub(crate) field: String,
    pub(crate) limit: Limit,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Limit {
    /// The share of a device, or of all others, while several cgroups use it.
    Weight { device: Option<Numbers>, weight: u16 },
    /// The most in a second.
    Rate { device: Numbers, of: Rate, most: u64 },
    /// What is written to a file of cgroup v2.
    File { name: &'static str, text: String },
}

/// What a rate counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rate {
    BytesRead,
    BytesWritten,
    Reads,
    Writes,
}

impl Rate {
    /// The key in `io.max`.
    fn key(self) -> &'static str {
        match self {
            Self::BytesRead => "rbps",
            Self::BytesWritten => "wbps",
            Self::Reads => "riops",
            Self::Writes => "wiops",
        }
    }

    fn file_of_v1(self) -> &'static str {
        match self {
            Self::BytesRead => "blkio.throttle.read_bps_device",
            Self::BytesWritten => "blkio.throttle.write_bps_device",
            Self::Reads => "blkio.throttle.read_iops_device",
            Self::Writes => "blkio.throttle.write_iops_device",
        }
    }
}

/// The name of a file of cgroup v2 that limits something.
pub(crate) fn file(name: &str) -> Option<&'static str> {
    FILES.iter().map(|(file, _)| *file).find(|file| *file == name)
}

/// The default weight of cgroup v2's io controller for a weight of the spec, as runc converts it.
fn weight_of_v2(weight: u16) -> u64 {
    1 + u64::from(weight.saturating_sub(LEAST_WEIGHT)) * 9999 / u64::from(MOST_WEIGHT - LEAST_WEIGHT)
}

/// A line for a file of the cgroup.
#[derive(Debug, PartialEq, Eq)]
struct Line {
    file: &'static str,
    text: String,
}

impl Line {
    /// The device that it is about. None: it is about all others.
    fn device(&self) -> Option<&str> {
        self.text.split_whitespace().next().filter(|word| word.contains(':'))
    }
}

/// What limits have replaced: files and lines, the latest last.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Former(Vec<(&'static str, String)>);

/// Sets the limits. `former` gets what they replace, even if it fails after some of them.
pub(crate) fn set(cgroup: &Cgroup, limits: &[IoLimit], former: &Mutex<Former>) -> Result<(), CgroupError> {
    let Some(first) = limits.first() else { return Ok(()) };
    let of_field = |source| CgroupError::Field { field: first.field.clone(), source: Box::new(source) };
    let directory = directory(cgroup).map_err(of_field)?;
    if directory.is_unified {
        // Before, the cgroup has none of the files.
        enable(directory, V2).map_err(of_field)?;
    }
    for limit in limits {
        let line = line(directory, limit)?;
        let present = present(directory, &line);
        write(directory, limit, &line)?;
        lock(former).0.extend(present);
    }
    Ok(())
}

/// Writes back what limits have replaced. An error, such as that of a device that has gone, does not keep the others
/// from it. The first one is returned.
pub(crate) fn write_back(cgroup: &Cgroup, former: &Former) -> Result<(), CgroupError> {
    let directory = directory(cgroup)?;
    let lines = former.0.iter().rev();
    lines.map(|(file, text)| write_line(directory, file, text)).fold(Ok(()), Result::and)
}

fn directory(cgroup: &Cgroup) -> Result<&Directory, CgroupError> {
    cgroup.with_controller(V1).ok_or(CgroupError::NoController { controller: V2 })
}

/// The line by which the kernel sets a limit.
fn line(directory: &Directory, IoLimit { field, limit }: &IoLimit) -> Result<Line, CgroupError> {
    let has = |file: &str| directory.path.join(file).exists();
    let line = |file, device: Option<Numbers>, value: String| {
        let text = match device {
            Some((major, minor)) => format!("{major}:{minor} {value}"),
            None => value,
        };
        Ok(Line { file, text })
    };
    match (limit, directory.is_unified) {
        (Limit::Rate { device, of, most }, true) => {
            line(IO_MAX, Some(*device), format!("{}={most}", of.key()))
        }
        (Limit::Rate { device, of, most }, false) => line(of.file_of_v1(), Some(*device), most.to_string()),
        // The I/O scheduler BFQ has weights of its own, in the unit of the spec.
        (Limit::Weight { device, weight }, true) if has(IO_BFQ_WEIGHT) => {
            line(IO_BFQ_WEIGHT, *device, weight.to_string())
        }
        (Limit::Weight { device, weight }, true) => {
            line(IO_WEIGHT, *device, weight_of_v2(*weight).to_string())
        }
        (Limit::Weight { device, weight }, false) => {
            let file = match (device, has("blkio.weight")) {
                (None, true) => "blkio.weight",
                (None, false) => "blkio.bfq.weight",
                (Some(_), true) => "blkio.weight_device",
                (Some(_), false) => "blkio.bfq.weight_device",
            };
            line(file, *device, weight.to_string())
        }
        (Limit::File { name, text }, true) => line(name, None, text.clone()),
        (Limit::File { .. }, false) => Err(CgroupError::OfV2 { field: field.clone() }),
    }
}

/// What is in the place of a line. None: nothing can be written back there.
fn present(directory: &Directory, line: &Line) -> Option<(&'static str, String)> {
    // Without the file the line cannot be written either.
    let text = fs::read_to_string(directory.path.join(line.file)).ok()?;
    let first = |line: &str| line.split_whitespace().next().map(str::to_owned);
    let present = match line.device() {
        Some(device) => match text.lines().find(|line| first(line).as_deref() == Some(device)) {
            Some(present) => present.to_owned(),
            None => {
                let end = FILES.iter().find(|(file, _)| *file == line.file).map_or(NONE_V1, |(_, end)| *end);
                format!("{device} {end}")
            }
        },
        // `default 100`, or the number alone.
        None => text.lines().find(|line| first(line).is_some_and(|word| !word.contains(':')))?.to_owned(),
    };
    Some((line.file, present))
}

fn write(directory: &Directory, limit: &IoLimit, line: &Line) -> Result<(), CgroupError> {
    let Line { file, text } = line;
    write_line(directory, file, text).map_err(|error| match error {
        CgroupError::Limit { path, .. } if !path.exists() => {
            CgroupError::NoFile { field: limit.field.clone(), path }
        }
        CgroupError::Limit { path, source } => {
            let hint = hint(limit, Errno::from_io_error(&source));
            CgroupError::Line { field: limit.field.clone(), text: text.clone(), path, hint, source }
        }
        other => CgroupError::Field { field: limit.field.clone(), source: Box::new(other) },
    })
}

/// What the kernel does not say.
fn hint(limit: &IoLimit, errno: Option<Errno>) -> &'static str {
    match (&limit.limit, errno) {
        (_, Some(Errno::NODEV)) => "; the kernel limits whole disks of the host, no partitions",
        (Limit::Weight { .. }, Some(Errno::OPNOTSUPP)) => {
            "; this disk has weights with the I/O scheduler bfq, or with io.cost.qos"
        }
        _ => "",
    }
}

fn write_line(directory: &Directory, file: &'static str, text: &str) -> Result<(), CgroupError> {
    if directory.is_unified {
        return write_enabled(directory, V2, file, text);
    }
    let path = directory.path.join(file);
    fs::write(&path, text).map_err(|source| CgroupError::Limit { path, source })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::{
        host::{cgroup, journal::Journal},
        types::error::chain,
    };

    const DEVICE: Numbers = (8, 0);

    fn limit(limit: Limit) -> IoLimit {
        IoLimit { field: "linux.resources.blockIO.test".into(), limit }
    }

    fn rate(device: Numbers, of: Rate, most: u64) -> IoLimit {
        limit(Limit::Rate { device, of, most })
    }

    fn weight(device: Option<Numbers>, weight: u16) -> IoLimit {
        limit(Limit::Weight { device, weight })
    }

    /// A cgroup by files that take whatever is written.
    fn of_files(root: &Path, is_unified: bool) -> Cgroup {
        let path = root.join("a");
        fs::create_dir_all(&path).unwrap();
        fs::write(root.join("cgroup.subtree_control"), "cpu\n").unwrap();
        let controllers = if is_unified { Vec::new() } else { vec![V1.into()] };
        Cgroup { directories: vec![Directory { root: root.into(), path, is_unified, controllers }] }
    }

    fn lines(cgroup: &Cgroup, limits: &[IoLimit]) -> Vec<(&'static str, String)> {
        let lines = limits.iter().map(|limit| line(&cgroup.directories[0], limit).unwrap());
        lines.map(|Line { file, text }| (file, text)).collect()
    }

    #[test]
    fn weights_are_converted_as_runc_does() {
        assert_eq!([10, 100, 300, 500, 1000].map(weight_of_v2), [1, 910, 2930, 4950, 10_000]);
    }

    #[test]
    fn limits_on_block_devices_are_lines_of_either_version() {
        let root = tempfile::tempdir().unwrap();
        let limits = [
            weight(None, 300),
            weight(Some(DEVICE), 10),
            rate(DEVICE, Rate::BytesRead, 1),
            rate(DEVICE, Rate::BytesWritten, 2),
            rate(DEVICE, Rate::Reads, 3),
            rate(DEVICE, Rate::Writes, u64::MAX),
        ];
        let expected = |lines: [(&'static str, &str); 6]| lines.map(|(file, text)| (file, text.to_owned()));
        let v2 = of_files(root.path(), true);
        let rates = ["8:0 rbps=1", "8:0 wbps=2", "8:0 riops=3", "8:0 wiops=18446744073709551615"];
        let with_weights = |file, weights: [&'static str; 2]| {
            let [all, one] = weights.map(|text| (file, text));
            let [read, written, reads, writes] = rates.map(|text| (IO_MAX, text));
            expected([all, one, read, written, reads, writes])
        };
        assert_eq!(lines(&v2, &limits), with_weights(IO_WEIGHT, ["2930", "8:0 1"]));
        fs::write(root.path().join("a/io.bfq.weight"), "default 100\n").unwrap();
        assert_eq!(lines(&v2, &limits), with_weights(IO_BFQ_WEIGHT, ["300", "8:0 10"]));
        let v1 = of_files(root.path(), false);
        let of_v1 = |all, one| {
            expected([
                (all, "300"),
                (one, "8:0 10"),
                ("blkio.throttle.read_bps_device", "8:0 1"),
                ("blkio.throttle.write_bps_device", "8:0 2"),
                ("blkio.throttle.read_iops_device", "8:0 3"),
                ("blkio.throttle.write_iops_device", "8:0 18446744073709551615"),
            ])
        };
        assert_eq!(lines(&v1, &limits), of_v1("blkio.bfq.weight", "blkio.bfq.weight_device"));
        fs::write(root.path().join("a/blkio.weight"), "500\n").unwrap();
        assert_eq!(lines(&v1, &limits), of_v1("blkio.weight", "blkio.weight_device"));
    }

    #[test]
    fn files_of_v2_are_written_as_they_are_named_and_are_not_of_v1() {
        let root = tempfile::tempdir().unwrap();
        let text = "8:0 rbps=5".to_owned();
        let of_file = limit(Limit::File { name: IO_MAX, text: text.clone() });
        set(&of_files(root.path(), true), std::slice::from_ref(&of_file), &Mutex::default()).unwrap();
        assert_eq!(fs::read_to_string(root.path().join("a/io.max")).unwrap(), text);
        assert_eq!(fs::read_to_string(root.path().join("cgroup.subtree_control")).unwrap(), "+io");
        let error = set(&of_files(root.path(), false), &[of_file], &Mutex::default()).unwrap_err();
        let expected = "linux.resources.blockIO.test is of cgroup v2, and this host has the controller blkio";
        assert!(error.to_string().starts_with(expected), "{error}");
        let error = set(&Cgroup { directories: vec![] }, &[weight(None, 10)], &Mutex::default()).unwrap_err();
        assert_eq!(
            chain(&error),
            "linux.resources.blockIO.test cannot be set: this host has no cgroup controller \"io\""
        );
    }

    #[test]
    fn what_limits_have_replaced_is_written_back() {
        let present = |cgroup: &Cgroup, file: &'static str, text: &str| {
            let line = Line { file, text: text.into() };
            present(&cgroup.directories[0], &line).map(|(_, text)| text)
        };
        let root = tempfile::tempdir().unwrap();
        let v2 = of_files(root.path(), true);
        let write = |file: &str, text: &str| fs::write(root.path().join("a").join(file), text).unwrap();
        write(IO_MAX, "8:1 rbps=9 wbps=9 riops=9 wiops=9\n8:0 rbps=5 wbps=max riops=max wiops=max\n");
        write(IO_WEIGHT, "default 100\n8:0 7\n");
        write(IO_BFQ_WEIGHT, "100\n");
        write(IO_LATENCY, "");
        let of_v2 = |file, text| present(&v2, file, text);
        assert_eq!(of_v2(IO_MAX, "8:0 wbps=1").unwrap(), "8:0 rbps=5 wbps=max riops=max wiops=max");
        assert_eq!(of_v2(IO_MAX, "8:16 wbps=1").unwrap(), "8:16 rbps=max wbps=max riops=max wiops=max");
        assert_eq!((of_v2(IO_WEIGHT, "50"), of_v2(IO_WEIGHT, "default 50")), {
            let default = Some("default 100".to_owned());
            (default.clone(), default)
        });
        assert_eq!(of_v2(IO_WEIGHT, "8:0 50").unwrap(), "8:0 7");
        assert_eq!(of_v2(IO_WEIGHT, "8:16 50").unwrap(), "8:16 default");
        assert_eq!(of_v2(IO_BFQ_WEIGHT, "50").unwrap(), "100");
        assert_eq!(of_v2(IO_LATENCY, "8:0 target=5").unwrap(), "8:0 target=0");
        assert_eq!(of_v2(IO_MAX, "nonsense"), None);
        let v1 = of_files(root.path(), false);
        let file = "blkio.throttle.read_bps_device";
        write(file, "8:0 5\n");
        assert_eq!(present(&v1, file, "8:0 1").unwrap(), "8:0 5");
        assert_eq!(present(&v1, file, "8:16 1").unwrap(), "8:16 0");
    }

    #[test]
    fn a_file_that_the_kernel_lacks_is_named() {
        let root = tempfile::tempdir().unwrap();
        let cgroup = of_files(root.path(), true);
        // cgroup2 refuses to create a file.
        std::os::unix::fs::symlink(root.path().join("none/x"), root.path().join("a/io.weight")).unwrap();
        fs::write(root.path().join("a/io.max"), "").unwrap();
        let former = Mutex::default();
        let error = set(&cgroup, &[rate(DEVICE, Rate::Reads, 1), weight(None, 10)], &former).unwrap_err();
        assert!(matches!(&error, CgroupError::NoFile { .. }), "{error}");
        // What came before it can be put back.
        assert_eq!(lock(&former).0.len(), 1);
    }

    /// On this host's own cgroups, of whichever version, and any disk of it.
    #[test]
    fn the_kernel_takes_rates_and_takes_them_back() {
        let disks = fs::read_dir("/sys/dev/block").unwrap().map(|entry| entry.unwrap());
        let mut disks = disks.filter(|entry| !entry.path().join("partition").exists());
        let name = disks.next().unwrap().file_name().into_string().unwrap();
        let (major, minor) = name.split_once(':').unwrap();
        let device = (major.parse().unwrap(), minor.parse().unwrap());
        let dir = tempfile::tempdir().unwrap();
        let mut journal = Journal::open(&dir.path().join("journal")).unwrap();
        let path = format!("/bulkhead-test-io-{}/x", std::process::id());
        let owner = cgroup::Owner { state: dir.path(), root: dir.path() };
        let cgroup = cgroup::create(&mut journal, Path::new(&path), owner).unwrap();
        let directory = directory(&cgroup).unwrap();
        let read = || {
            let files = [IO_MAX, Rate::BytesRead.file_of_v1(), Rate::Reads.file_of_v1()];
            let texts = files.iter().filter_map(|file| fs::read_to_string(directory.path.join(file)).ok());
            texts.filter(|text| text.contains(&name)).collect::<String>()
        };
        let former = Mutex::default();
        let [bytes, reads] = [rate(device, Rate::BytesRead, 1 << 20), rate(device, Rate::Reads, 77)];
        set(&cgroup, &[bytes, reads], &former).unwrap();
        assert!(read().contains("1048576") && read().contains("77"), "{}", read());
        let none = set(&cgroup, &[rate((8, 999_999), Rate::Reads, 1)], &former).unwrap_err().to_string();
        assert!(none.starts_with("linux.resources.blockIO.test: cannot write \"8:999999 "), "{none}");
        assert!(none.ends_with("; the kernel limits whole disks of the host, no partitions"), "{none}");
        write_back(&cgroup, &lock(&former)).unwrap();
        assert_eq!(read(), "");
        journal.undo().unwrap();
    }
}
