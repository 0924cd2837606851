//! What each operation on files does, in the manner of pjdfstest: a program makes hundreds of them in a directory, and
//! prints what each returns and leaves. On runc this is what the host's file system does.

use std::collections::BTreeMap;
use std::fmt::Write;

use anyhow::{Context, Result, ensure};

use super::super::programs::{HostCopy, on_disk};
use super::Case;
use crate::ctr::{Host, Runtime, Task};
use crate::image_root::ImageRoot;

pub(super) const IN_A_SNAPSHOT: Case =
    Case::both("operations_on_files_of_a_snapshot_do_what_they_do_on_the_host", in_a_snapshot);
pub(super) const IN_A_DIRECTORY: Case =
    Case::both("operations_on_files_of_a_directory_and_a_volume_do_what_they_do_on_the_host", in_a_directory);

/// The program. Its argument is the directory.
const PROGRAM: &str = concat!(
    include_str!("operations/base.py"),
    include_str!("operations/names.py"),
    include_str!("operations/contents.py"),
    include_str!("operations/attributes.py"),
);

/// What it prints in a volume on ext4, where the other file systems of the container are in memory.
const ON_EXT4: &str = include_str!("operations/ext4.txt");
/// The lines that differ on an overlay whose upper layer is a tmpfs.
const ON_OVERLAY: &str = include_str!("operations/overlay.txt");

/// The lines that differ on Bulkhead in each place.
const ANYWHERE: &[&str] = &[];
/// Those in a volume.
const IN_VOLUME: &[&str] = &[];
/// Those in the root of a container.
const IN_ROOT: &[&str] = &[];

/// The results of the operations, by their names.
#[derive(Default)]
struct Results<'t>(BTreeMap<&'t str, &'t str>);

impl<'t> Results<'t> {
    fn parse(lines: impl IntoIterator<Item = &'t str>) -> Result<Self> {
        let split = |line: &'t str| line.split_once(" = ").with_context(|| format!("no result in {line:?}"));
        Ok(Self(lines.into_iter().map(split).collect::<Result<_>>()?))
    }

    /// Replaces some results, each by another one.
    fn replace(&mut self, lines: impl IntoIterator<Item = &'t str>) -> Result<()> {
        for (name, result) in Self::parse(lines)?.0 {
            let before = self.0.insert(name, result);
            ensure!(before.is_some_and(|before| before != result), "{name} = {result} is no difference");
        }
        Ok(())
    }

    /// The lines in which the other results differ.
    fn differences(&self, other: &Self) -> String {
        let mut differences = String::new();
        let names = self.0.keys().chain(other.0.keys().filter(|name| !self.0.contains_key(*name)));
        for name in names {
            let [expected, came] = [self, other].map(|results| results.0.get(name).copied().unwrap_or("-"));
            if expected != came {
                let _ = write!(differences, "\n{name}\n    expected  {expected}\n    came      {came}");
            }
        }
        differences
    }
}

/// Runs the program in a directory of a container, and compares what it prints.
fn expect(
    host: &Host,
    task: &Task<'_>,
    directory: &str,
    own: &[&str],
    of_bulkhead: &[&[&str]],
) -> Result<()> {
    let mut expected = Results::parse(ON_EXT4.lines())?;
    expected.replace(own.iter().copied())?;
    if host.runtime() == Runtime::Bulkhead {
        for lines in of_bulkhead {
            expected.replace(lines.iter().copied())?;
        }
    }
    let finished = task.exec_with_input(&["python3", "-", directory], PROGRAM.into())?;
    let text = finished.succeeds()?.text();
    let differences = expected.differences(&Results::parse(text.lines())?);
    ensure!(differences.is_empty(), "in {directory}, which took {:?}:{differences}", finished.took);
    Ok(())
}

fn in_a_snapshot(host: &Host) -> Result<()> {
    let image = ImageRoot::make()?;
    let container = host.container().flags(["--privileged"]);
    let task = image.detach(host, container, &["sleep", "1000"])?;
    let overlay: Vec<_> = ON_OVERLAY.lines().collect();
    expect(host, &task, "/srv/operations", &overlay, &[ANYWHERE, IN_ROOT])
}

fn in_a_directory(host: &Host) -> Result<()> {
    let (copy, volume) = (HostCopy::mount()?, on_disk()?);
    let container = copy.as_root_of(host.container()).flags(["--privileged"]);
    let task = container.bind(volume.path(), "/volume", "rbind:rw").detach(&["sleep", "1000"])?;
    let overlay: Vec<_> = ON_OVERLAY.lines().collect();
    let in_root = expect(host, &task, "/srv/operations", &overlay, &[ANYWHERE, IN_ROOT]);
    let in_volume = expect(host, &task, "/volume", &[], &[ANYWHERE, IN_VOLUME]);
    in_root.and(in_volume)
}
