//! Files whose contents the host's kernel makes when they are read, as monitoring mounts them.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use crate::cases::limits::Above;
use crate::ctr::Host;

/// A hierarchy of the host's cgroups, a file in it that no controller is needed for, and what can be written to one of
/// a new cgroup. It is of cgroups v2, or of v1.
const CGROUPS: [(&str, &str, &str, &str); 2] = [
    ("/sys/fs/cgroup", "cgroup.controllers", "cgroup.max.depth", "7"),
    ("/sys/fs/cgroup/pids", "cgroup.clone_children", "cgroup.clone_children", "1"),
];

/// BusyBox reads them by read(2) and, in cat, by sendfile(2).
pub(super) fn as_on_the_host(host: &Host) -> Result<()> {
    let of_host = CGROUPS.into_iter().find(|(root, file, ..)| Path::new(root).join(file).exists());
    let (root, read, written, value) = of_host.context("the host has no cgroups")?;
    let made = tempfile::Builder::new().prefix("e2e-made-").tempdir_in(root)?.keep();
    let _removed = Above(made.clone());
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    // A file that knows no positions.
    let bytes = fs::read_to_string("/sys/kernel/debug/fault_around_bytes")?;
    let cgroups = fs::read_to_string(Path::new(root).join(read))?;

    let container = host.container().bind(Path::new("/proc"), "/host/proc", "rbind:ro");
    let container =
        container.bind(Path::new(root), "/host/cgroup", "rbind:ro").bind(&made, "/made", "rbind:rw");
    let container = container.bind(Path::new("/sys/kernel/debug"), "/host/debug", "rbind:ro");
    let script = format!(
        "cd /host/proc; cat sys/kernel/ostype; head -n 1 sys/kernel/random/boot_id; \
         head -n 1 stat | cut -c 1-4; ls self/net/stat > /dev/null && echo listed; \
         stat -c %s loadavg; grep -cE '^([0-9.]+ ){{3}}[0-9]+/[0-9]+ [0-9]+$' loadavg; \
         before=$(head -n 1 uptime); sleep 1; test \"$before\" != \"$(head -n 1 uptime)\" && echo later; \
         cat /host/cgroup/{read} /host/debug/fault_around_bytes; \
         dd if=/host/debug/fault_around_bytes bs=1 skip=3 2>/dev/null; \
         cd /made; echo {value} > {written} && head -n 1 {written} && stat -c %s {written}; \
         echo 0 > /host/proc/sys/vm/overcommit_memory"
    );
    let rest = bytes.get(3..).unwrap_or_default();
    let expected = format!("Linux\n{boot}cpu \nlisted\n0\n1\nlater\n{cgroups}{bytes}{rest}{value}\n0\n");
    container.run(&["sh", "-c", &script])?.prints(&expected)?.fails_with("Read-only file system")?;
    let came = fs::read_to_string(made.join(written))?;
    ensure!(came.trim() == value, "expected  {value} in {written} on the host\ncame      {came:?}");
    Ok(())
}
