//! A container that knows very many files of the host, or has many open.

use std::fs::{self, File};

use anyhow::Result;

use crate::ctr::Host;
use crate::fixtures::scratch;
use crate::image_root::ImageRoot;

/// More than the file server of a VM has room for.
const DIRECTORIES: u32 = 140;
const FILES: u32 = 1000;

pub(super) fn mounts_stay(host: &Host) -> Result<()> {
    let (volume, other) = (scratch()?, scratch()?);
    for name in ["covered", "open"] {
        fs::write(volume.path().join(name), format!("{name}\n"))?;
    }
    fs::write(other.path().join("file"), "mounted\n")?;
    for directory in 0..DIRECTORIES {
        let directory = volume.path().join(format!("many-{directory}"));
        fs::create_dir(&directory)?;
        (0..FILES).try_for_each(|file| File::create(directory.join(file.to_string())).map(drop))?;
    }
    // The names of a volume are valid for a second.
    let script = "cd /data; exec 3< open; cat covered; find . -size +100k; sleep 2; cat covered; cat <&3
        grep -c ' /data/covered ' /proc/self/mounts";
    let container = host.container().bind(volume.path(), "/data", "rbind:rw").bind(
        &other.path().join("file"),
        "/data/covered",
        "rbind:rw",
    );
    let task = container.detach(&["sleep", "1000"])?;
    task.exec(&["sh", "-c", script])?.succeeds()?.prints("mounted\nmounted\nopen\n1\n")?;
    Ok(())
}

/// A program that follows many logs, which the host rotates.
pub(super) fn open_renamed(host: &Host) -> Result<()> {
    const LOGS: u32 = 1500;
    let (image, volume) = (ImageRoot::make()?, scratch()?);
    image.write("srv/open_renamed.py", include_bytes!("open_renamed.py"))?;
    let log = |number: u32| volume.path().join(number.to_string());
    (0..LOGS).try_for_each(|number| fs::write(log(number), format!("{number}\n")))?;
    let container = host.container().bind(volume.path(), "/data", "rbind:rw");
    let task = image.detach(host, container, &["sleep", "1000"])?;
    let command = ["python3", "/srv/open_renamed.py", "/data", &LOGS.to_string()];
    let mut inside = task.start_exec("inside", &command)?;
    inside.wait_for("ready\n")?;
    for number in 0..LOGS {
        fs::rename(log(number), volume.path().join(format!("{number}.1")))?;
        fs::write(log(number), "the next\n")?;
    }
    inside.write(b"\n")?;
    inside
        .finish()?
        .succeeds()?
        .prints(&format!("ready\n{}", "0 of 500 are not as they were\n".repeat(3)))?;
    Ok(())
}
