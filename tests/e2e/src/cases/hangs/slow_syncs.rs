//! A volume whose disk takes long to write: what was written does not get to it, and everything else is served.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::Result;

use super::files::{Files, opcode};
use crate::command::wait_until;
use crate::ctr::Host;
use crate::fixtures::scratch;

/// What each file contains.
const TEXT: &[u8] = b"text\n";
/// As many as the file server handles at once for one file system, if they sync.
const SYNCED: usize = 3;

pub(super) fn reads_go_on(host: &Host) -> Result<()> {
    let volume = scratch()?;
    let place = volume.path().join("slow");
    fs::create_dir(&place)?;
    let disk = SlowSyncs::mount(&place)?;
    let task = host.container().bind(volume.path(), "/vol", "rbind:rw").detach(&["sleep", "1000"])?;
    let script = "for it in 1 2 3 4 5 6; do sync /vol/slow/$it & done; wait";
    let _syncing = task.start_exec("syncing", &["sh", "-c", script])?;
    let read =
        wait_until("several syncs to wait for the disk", host.patience(Duration::from_secs(10)), || {
            Ok(disk.syncs() >= SYNCED)
        })
        .and_then(|()| task.exec(&["cat", "/vol/slow/0"])?.succeeds()?.prints("text\n").map(drop));
    // The processes that sync end now, and the container can be killed.
    drop(disk);
    read
}

/// A file system that has each file whose name is a digit, and hangs at FSYNC alone.
struct SlowSyncs {
    syncs: Arc<AtomicUsize>,
    _files: Files,
}

impl SlowSyncs {
    fn mount(place: &Path) -> Result<Self> {
        let syncs = Arc::new(AtomicUsize::new(0));
        let counted = syncs.clone();
        let handler = move |code, args: &[u8]| match code {
            // fuse_read_in: the handle, and the offset.
            opcode::READ if args.get(8..16) == Some(&[0; 8]) => Some(Ok(TEXT.to_vec())),
            opcode::FSYNC => {
                counted.fetch_add(1, Ordering::Relaxed);
                None
            }
            _ => Some(Ok(Vec::new())),
        };
        let files = Files::mount(place, TEXT.len() as u64, Box::new(handler))?;
        Ok(Self { syncs, _files: files })
    }

    /// How many FSYNC requests wait for an answer.
    fn syncs(&self) -> usize {
        self.syncs.load(Ordering::Relaxed)
    }
}
