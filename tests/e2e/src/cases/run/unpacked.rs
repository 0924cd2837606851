//! The root of an archive.

use anyhow::Result;

use crate::command::Cmd;
use crate::ctr::{COMMAND, Host};
use crate::fixtures::{Root, scratch};

/// Whatever the umask of whoever starts the run is. The archive has neither an entry for its root nor /etc.
pub(super) fn serves_each_user(host: &Host) -> Result<()> {
    let root = Root::mount(host)?;
    let directory = scratch()?;
    let packed = directory.path().join("root.tar").display().to_string();
    Cmd::new("tar").args(["-cf", &packed, "-C"]).args([root.path()]).args(["bin"]).run()?.succeeds()?;
    let script = "echo root=$(stat -c %a /); echo hosts=$(stat -c %a /etc/hosts); \
                  echo local=$(grep -c '^127.0.0.1 localhost$' /etc/hosts); \
                  echo own=$(grep -c \"^127.0.0.1 $(hostname)$\" /etc/hosts)";
    let words = ["-c", "umask 077; exec bulkhead run --user 7 --archive \"$@\"", "sh"];
    let cmd = Cmd::new("sh").args(words).args([&packed, "sh", "-c", script]);
    let finished = cmd.limit(host.patience(COMMAND)).run()?;
    finished.succeeds()?.says("root", "755")?.says("hosts", "644")?;
    finished.says("local", "1")?.says("own", "1")?;
    Ok(())
}
