//! The files of a cgroup as the kernel writes them (kernel, admin-guide/cgroup-v2.rst, "Interface Files").

use std::{
    collections::HashMap,
    fs::{self, File},
    io::{self, ErrorKind, Read, Seek},
    path::Path,
};

use tokio::io::Interest;

use super::{Cgroup, CgroupError, io_error};
use crate::syscall;

/// The keys and numbers of a flat-keyed file.
pub type Numbers = HashMap<String, u64>;

impl Cgroup {
    /// What a file says, without the line's end; None if the kernel has no such file.
    pub fn read(&self, file: &str) -> Result<Option<String>, CgroupError> {
        let path = self.path().join(file);
        match fs::read_to_string(&path) {
            Ok(text) => Ok(Some(text.trim_end().to_owned())),
            // A cgroup that is gone has no files either, and is an error.
            Err(error) if error.kind() == ErrorKind::NotFound && self.path().exists() => Ok(None),
            Err(error) => Err(io_error("reading", &path)(error)),
        }
    }

    /// A file of one number or "max", which is [`u64::MAX`]; 0 if the kernel has no such file.
    pub fn number(&self, file: &str) -> Result<u64, CgroupError> {
        Ok(self.read(file)?.map_or(0, |text| parse_number(&text)))
    }

    /// A flat-keyed file; empty if the kernel has no such file.
    pub fn numbers(&self, file: &str) -> Result<Numbers, CgroupError> {
        Ok(self.read(file)?.map_or_else(Numbers::new, |text| flat_keyed(&text)))
    }

    /// The sizes of huge pages that the kernel limits, as they are in the names of the files: `hugetlb.2MB.max`.
    pub fn hugepage_sizes(&self) -> Result<Vec<String>, CgroupError> {
        let entries = fs::read_dir(self.path()).map_err(io_error("reading", self.path()))?;
        let size = |entry: io::Result<fs::DirEntry>| {
            let name = entry.ok()?.file_name().into_string().ok()?;
            let size = name.strip_prefix("hugetlb.")?.strip_suffix(".max")?;
            (!size.contains('.')).then(|| size.to_owned())
        };
        let mut sizes: Vec<_> = entries.filter_map(size).collect();
        sizes.sort();
        Ok(sizes)
    }

    /// Waits until a flat-keyed file that the kernel tells of changes of (`*.events`) has numbers that `found` accepts.
    pub async fn watch<T>(
        &self,
        file: &str,
        found: impl Fn(&Numbers) -> Option<T>,
    ) -> Result<T, CgroupError> {
        let path = self.path().join(file);
        watch(&path, found).await.map_err(io_error("watching", &path))
    }
}

pub(super) async fn watch<T>(path: &Path, found: impl Fn(&Numbers) -> Option<T>) -> io::Result<T> {
    // A change is told as urgent data: "poll and [id]notify events are triggered when the value changes".
    let file = syscall::watch_urgent(File::open(path)?)?;
    loop {
        // What changes after this read is told.
        let mut text = String::new();
        let mut reader = file.get_ref();
        reader.rewind()?;
        reader.read_to_string(&mut text)?;
        if let Some(value) = found(&flat_keyed(&text)) {
            return Ok(value);
        }
        file.ready(Interest::PRIORITY).await?.clear_ready();
    }
}

/// "max" is no limit.
pub(super) fn parse_number(text: &str) -> u64 {
    if text == "max" { u64::MAX } else { text.parse().unwrap_or(0) }
}

pub(super) fn flat_keyed(text: &str) -> Numbers {
    let pair = |line: &str| {
        let (key, value) = line.split_once(' ')?;
        Some((key.to_owned(), value.parse().ok()?))
    };
    text.lines().filter_map(pair).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flat_keyed_file_is_read() {
        let numbers = flat_keyed("low 0\noom_kill 7\nodd\nbad x\n");
        assert_eq!((numbers["low"], numbers["oom_kill"], numbers.len()), (0, 7, 2));
    }

    #[test]
    fn no_limit_is_the_largest_number() {
        assert_eq!((parse_number("max"), parse_number("4096")), (u64::MAX, 4096));
    }
}
