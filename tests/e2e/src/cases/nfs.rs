//! Volumes on NFS. The server is the host itself, and maps root to the user `nobody` (`root_squash`), as servers do
//! unless they are told not to. So what a user may do does not follow from what root may do.

use std::fs::{self, File, Permissions};
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

use super::Case;
use super::programs::{HostCopy, on_disk};
use crate::command::Cmd;
use crate::ctr::{Host, Task};

pub(super) const CASES: &[Case] = &[
    Case::both("a_user_works_in_a_directory_that_root_may_not_enter", own_directory),
    Case::both("a_group_shares_a_directory_that_root_may_not_enter", directory_of_a_group),
    Case::both("root_has_the_permissions_of_the_user_nobody", as_root),
];

const PROGRAM: &str = include_str!("nfs/user.py");
const USER: u32 = 1000;
const GROUP: u32 = 2000;

/// An export of this host, and its mount. There is one at a time: cases run one after the other.
struct Export {
    /// Where its files are.
    files: TempDir,
    mount: TempDir,
}

impl Export {
    fn make() -> Result<Self> {
        let export = Self { files: on_disk()?, mount: on_disk()? };
        Cmd::new("modprobe").args(["-a", "nfsd", "nfsv4"]).run()?.succeeds()?;
        let files = export.files.path().display().to_string();
        mount(&["-t", "tmpfs", "-o", "mode=755", "tmpfs", &files])?;
        mount(&["-t", "nfsd", "nfsd", NFSD])?;
        // Where the kernel notes its clients. Otherwise they wait for 90 seconds.
        fs::create_dir_all("/var/lib/nfs/v4recovery")?;
        // What mountd(8) and exportfs(8) tell the kernel: who the client is, and what it may have. 9238 is
        // NFSEXP_ROOTSQUASH, INSECURE_PORT, NOSUBTREECHECK, FSID and ASYNC of uapi/linux/nfsd/export.h, 65534 is
        // nobody, and the file system has the number 0.
        let end = u32::MAX / 2;
        tell("/proc/net/rpc/auth.unix.ip/channel", &format!("nfsd 127.0.0.1 {end} client\n"))?;
        tell("/proc/net/rpc/nfsd.export/channel", &format!("client {files} {end} 9238 65534 65534 0\n"))?;
        tell("/proc/net/rpc/nfsd.fh/channel", &format!("client 1 \\x00000000 {end} {files}\n"))?;
        tell(&format!("{NFSD}/versions"), "-2 -3 +4 +4.1 +4.2\n")?;
        tell(&format!("{NFSD}/portlist"), "tcp 2049\n")?;
        tell(&format!("{NFSD}/threads"), "4\n")?;
        tell(&format!("{NFSD}/v4_end_grace"), "Y\n")?;
        let options = "vers=4.2,addr=127.0.0.1,clientaddr=127.0.0.1,proto=tcp,sec=sys";
        let place = export.mount.path().display().to_string();
        mount(&["-i", "-t", "nfs4", "-o", options, "127.0.0.1:/", &place])?;
        Ok(export)
    }

    /// Adds a directory, past the server.
    fn directory(&self, name: &str, user: u32, group: u32, mode: u32) -> Result<()> {
        let path = self.files.path().join(name);
        fs::create_dir(&path).with_context(|| format!("cannot make {}", path.display()))?;
        chown(&path, Some(user), Some(group))?;
        Ok(fs::set_permissions(&path, Permissions::from_mode(mode))?)
    }
}

const NFSD: &str = "/proc/fs/nfsd";

impl Drop for Export {
    fn drop(&mut self) {
        let unmount = |path: &Path| Cmd::new("umount").args(["-l", &path.display().to_string()]).run();
        let _ = unmount(self.mount.path());
        let _ = tell(&format!("{NFSD}/threads"), "0\n");
        for cache in ["auth.unix.ip", "nfsd.export", "nfsd.fh"] {
            let _ = tell(&format!("/proc/net/rpc/{cache}/flush"), "4294967295\n");
        }
        let _ = unmount(Path::new(NFSD));
        let _ = unmount(self.files.path());
    }
}

fn mount(words: &[&str]) -> Result<()> {
    Cmd::new("mount").args(words.iter().copied()).run()?.succeeds()?;
    Ok(())
}

/// Writes to a file of the kernel with one write(2).
fn tell(path: &str, text: &str) -> Result<()> {
    let open = || File::options().write(true).open(path);
    open()
        .and_then(|mut file| file.write_all(text.as_bytes()))
        .with_context(|| format!("cannot write {text:?} to {path}"))
}

/// A container that has the export at /v.
struct Place<'h> {
    task: Task<'h>,
    export: Export,
    copy: HostCopy,
}

impl<'h> Place<'h> {
    fn make(host: &'h Host) -> Result<Self> {
        let (copy, export) = (HostCopy::mount()?, Export::make()?);
        copy.write("srv/user.py", PROGRAM)?;
        let container = copy.as_root_of(host.container()).bind(export.mount.path(), "/v", "rbind:rw");
        Ok(Self { task: container.detach(&["sleep", "1000"])?, export, copy })
    }

    /// What fails when a user works in a directory.
    fn fails(&self, user: u32, groups: &str, directory: &str) -> Result<Vec<String>> {
        let (user, path) = (user.to_string(), format!("/v/{directory}"));
        let finished = self.task.exec(&["python3", "/srv/user.py", &user, groups, &path])?;
        let text = finished.succeeds()?.text();
        let mut lines: Vec<_> = text.lines().map(str::to_owned).collect();
        ensure!(lines.pop().as_deref() == Some("end"), "the program has not come to its end: {text}");
        Ok(lines)
    }
}

/// What a user may not do anywhere.
const FOR_NO_USER: [&str; 3] =
    ["create again: EEXIST", "owner of another: EPERM", "remove what is not empty: ENOTEMPTY"];

fn expect(came: &[String], expected: &[&str]) -> Result<()> {
    ensure!(came == expected, "expected  {expected:#?}\ncame      {came:#?}");
    Ok(())
}

fn own_directory(host: &Host) -> Result<()> {
    let place = Place::make(host)?;
    place.export.directory("own", USER, USER, 0o700)?;
    place.export.directory("own/deep", USER, USER, 0o700)?;
    place.export.directory("own/deep/deeper", USER, USER, 0o700)?;
    for directory in ["own", "own/deep/deeper"] {
        expect(&place.fails(USER, "1000", directory)?, &FOR_NO_USER)?;
    }
    expect(&place.fails(USER + 1, "1000", "own")?[..1], &["enter: EACCES"])?;
    // As the working directory, from the start.
    let as_user = ["--user", "1000:1000", "--cwd", "/v/own/deep"];
    place.task.exec_flags(&as_user, &["pwd"])?.succeeds()?.prints("/v/own/deep\n")?;
    let container = place.copy.as_root_of(host.container()).bind(place.export.mount.path(), "/v", "rbind:ro");
    let as_user = ["--user", "1000:1000", "--cwd", "/v/own"];
    container.flags(as_user).run(&["pwd"])?.succeeds()?.prints("/v/own\n")?;
    let as_other = ["--user", "1001:1001", "--cwd", "/v/own/deep"];
    place.task.exec_flags(&as_other, &["pwd"])?.fails_with("permission denied")?;
    Ok(())
}

fn directory_of_a_group(host: &Host) -> Result<()> {
    let place = Place::make(host)?;
    place.export.directory("shared", 0, GROUP, 0o2770)?;
    expect(&place.fails(USER, "1000,2000", "shared")?, &FOR_NO_USER)?;
    // From one of the user's own to the one of the group, and by a name of each.
    place.export.directory("own", USER, USER, 0o700)?;
    let script =
        "cd /v/own && echo text > a && ln a ../shared/b && mv a ../shared/c && cat ../shared/b ../shared/c";
    let command = ["setpriv", "--reuid=1000", "--regid=1000", "--groups=1000,2000", "sh", "-c", script];
    place.task.exec(&command)?.succeeds()?.prints("text\ntext\n")?;
    expect(&place.fails(USER, "1000", "shared")?[..1], &["enter: EACCES"])
}

fn as_root(host: &Host) -> Result<()> {
    let place = Place::make(host)?;
    place.export.directory("own", USER, USER, 0o700)?;
    place.export.directory("everybodys", 0, 0, 0o777)?;
    let sh = |script: &str| place.task.exec(&["sh", "-c", script]);
    sh("ls /v/own")?.fails_with("Permission denied")?;
    sh("echo text > /v/own/file")?.fails_with("Permission denied")?;
    sh("cd /v/everybodys && echo text > file && stat -c %u file && chmod 600 file && cat file")?
        .succeeds()?
        .prints("65534\ntext\n")?;
    sh("chown 1000 /v/everybodys")?.fails_with("Operation not permitted")?;
    Ok(())
}
