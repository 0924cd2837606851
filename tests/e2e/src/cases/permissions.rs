//! Who may do what with the files of a volume: by owner, group, mode, access control list, capability and directory.

mod operations;

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use rustix::fs::{XattrFlags, getxattr, setxattr};
use rustix::io::Errno;
use serde_json::json;
use tempfile::TempDir;

use super::Case;
use crate::ctr::{Host, Task};
use crate::fixtures::scratch;
use crate::shim::{Shim, granted};

pub(super) const CASES: &[Case] = &[
    Case::both("modes_and_access_control_lists_say_who_reads_and_writes", matrix),
    Case::both("directories_say_who_makes_and_removes_and_whose_it_is", directories),
    Case::both("capabilities_do_what_they_are_for", capabilities),
    operations::IN_A_SNAPSHOT,
    operations::IN_A_DIRECTORY,
    operations::IN_A_VOLUME,
];

/// Of an access control list (POSIX.1e, as linux/posix_acl_xattr.h has it): tag, permissions, user or group.
type Entry = (u16, u16, u32);
const OWNER: u16 = 0x01;
const USER: u16 = 0x02;
const GROUP_OWNER: u16 = 0x04;
const GROUP: u16 = 0x08;
const MASK: u16 = 0x10;
const OTHER: u16 = 0x20;
const NOBODY: u32 = u32::MAX;

const R: u16 = 4;
const RW: u16 = 6;
const RWX: u16 = 7;

fn set_list(path: &Path, name: &str, entries: &[Entry]) -> Result<()> {
    let mut value = 2_u32.to_le_bytes().to_vec();
    for (tag, bits, id) in entries {
        value.extend(tag.to_le_bytes());
        value.extend(bits.to_le_bytes());
        value.extend(id.to_le_bytes());
    }
    setxattr(path, name, &value, XattrFlags::empty())
        .with_context(|| format!("cannot set {name} of {}", path.display()))
}

const CAPABILITY: &str = "security.capability";

/// Gives a program CAP_DAC_OVERRIDE.
fn set_capability(path: &Path) -> Result<()> {
    // Permitted and effective (linux/capability.h, struct vfs_cap_data, version 2).
    let words = [0x0200_0001_u32, 1 << 1, 0, 0, 0];
    let value: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    setxattr(path, CAPABILITY, &value, XattrFlags::empty())
        .with_context(|| format!("cannot set a capability of {}", path.display()))
}

/// Somebody in a container.
struct Who {
    name: &'static str,
    uid: u32,
    gid: u32,
    groups: &'static [u32],
    capabilities: &'static [&'static str],
}

impl Who {
    const fn user(name: &'static str, uid: u32, gid: u32, groups: &'static [u32]) -> Self {
        Self { name, uid, gid, groups, capabilities: &[] }
    }

    const fn with(name: &'static str, uid: u32, capabilities: &'static [&'static str]) -> Self {
        Self { name, uid, gid: uid, groups: &[], capabilities }
    }
}

/// A volume, and a container that has it at /volume.
struct Scene<'h> {
    volume: TempDir,
    shim: Shim,
    _task: Task<'h>,
}

impl<'h> Scene<'h> {
    fn set(host: &'h Host, furnish: impl FnOnce(&Path) -> Result<()>) -> Result<Self> {
        let volume = scratch()?;
        fs::set_permissions(volume.path(), fs::Permissions::from_mode(0o755))?;
        fs::create_dir(volume.path().join("said"))?;
        fs::set_permissions(volume.path().join("said"), fs::Permissions::from_mode(0o1777))?;
        furnish(volume.path())?;
        let task = host.container().bind(volume.path(), "/volume", "rbind:rw").detach(&["sleep", "1000"])?;
        let shim = Shim::of(host, task.id())?;
        Ok(Self { volume, shim, _task: task })
    }

    /// What this script says in `/volume` when somebody runs it.
    fn ask(&self, who: &Who, script: &str) -> Result<String> {
        let Who { name, uid, gid, groups, capabilities } = who;
        let script = format!("exec >/volume/said/{name} 2>/dev/null; cd /volume; umask 022; {script}");
        let process = json!({
            "args": ["sh", "-c", script], "cwd": "/", "env": ["PATH=/bin:/usr/bin:/sbin:/usr/sbin"],
            "user": { "uid": uid, "gid": gid, "additionalGids": groups },
            // Those of a user that are not ambient are gone when a program is executed (capabilities(7)).
            "capabilities": {
                "bounding": capabilities, "permitted": capabilities, "effective": capabilities,
                "inheritable": capabilities, "ambient": capabilities,
            },
        });
        granted(self.shim.exec_of(name, process.to_string().into_bytes()))?;
        granted(self.shim.start(name))?;
        granted(self.shim.wait(name))?;
        granted(self.shim.delete(name))?;
        let said = self.volume.path().join("said").join(name);
        fs::read_to_string(&said).with_context(|| format!("{name} said nothing"))
    }

    fn expect(&self, who: &Who, script: &str, expected: &str) -> Result<()> {
        let said = self.ask(who, script)?;
        ensure!(said.trim_end() == expected, "for {}\nexpected  {expected}\ncame      {said}", who.name);
        Ok(())
    }
}

fn file(path: &Path, owner: u32, group: u32, mode: u32) -> Result<()> {
    fs::write(path, "text\n")?;
    give(path, owner, group, mode)
}

fn directory(path: &Path, owner: u32, group: u32, mode: u32) -> Result<()> {
    fs::create_dir(path)?;
    give(path, owner, group, mode)
}

fn give(path: &Path, owner: u32, group: u32, mode: u32) -> Result<()> {
    chown(path, Some(owner), Some(group))?;
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).context("cannot set a mode")
}

fn matrix(host: &Host) -> Result<()> {
    const ACCESS: &str = "system.posix_acl_access";
    let scene = Scene::set(host, |volume| {
        for (name, mode) in
            [("a600", 0o600), ("b640", 0o640), ("c060", 0o060), ("d604", 0o604), ("e066", 0o066)]
        {
            file(&volume.join(name), 1000, 1000, mode)?;
        }
        // setfacl -m u:2000:r; setfacl -m g:5000:rw,m:r; setfacl -m u:2000:-,g:5000:rw,o:rw.
        for (name, list) in [
            (
                "f",
                &[
                    (OWNER, RW, NOBODY),
                    (USER, R, 2000),
                    (GROUP_OWNER, 0, NOBODY),
                    (MASK, R, NOBODY),
                    (OTHER, 0, NOBODY),
                ][..],
            ),
            (
                "g",
                &[
                    (OWNER, RW, NOBODY),
                    (GROUP_OWNER, 0, NOBODY),
                    (GROUP, RW, 5000),
                    (MASK, R, NOBODY),
                    (OTHER, 0, NOBODY),
                ],
            ),
            (
                "h",
                &[
                    (OWNER, RW, NOBODY),
                    (USER, 0, 2000),
                    (GROUP_OWNER, 0, NOBODY),
                    (GROUP, RW, 5000),
                    (MASK, RW, NOBODY),
                    (OTHER, RW, NOBODY),
                ],
            ),
        ] {
            file(&volume.join(name), 1000, 1000, 0o600)?;
            set_list(&volume.join(name), ACCESS, list)?;
        }
        Ok(())
    })?;
    let try_all = "for it in a* b* c* d* e* f g h; do can=; \
                   (: < $it) && can=r; (: >> $it) && can=${can}w; echo -n \"$it=$can \"; done";
    for (who, expected) in [
        (Who::user("owner", 1000, 1000, &[]), "a600=rw b640=rw c060= d604=rw e066= f=rw g=rw h=rw"),
        (Who::user("group", 3000, 1000, &[]), "a600= b640=r c060=rw d604= e066=rw f= g= h="),
        (Who::user("member", 3000, 3000, &[7, 1000]), "a600= b640=r c060=rw d604= e066=rw f= g= h="),
        (Who::user("named", 2000, 2000, &[]), "a600= b640= c060= d604=r e066=rw f=r g= h="),
        (Who::user("named-group", 4000, 5000, &[]), "a600= b640= c060= d604=r e066=rw f= g=r h=rw"),
        (Who::user("named-member", 4000, 4000, &[5000]), "a600= b640= c060= d604=r e066=rw f= g=r h=rw"),
        (Who::user("other", 4000, 4000, &[]), "a600= b640= c060= d604=r e066=rw f= g= h=rw"),
        (Who::user("root-without", 0, 0, &[]), "a600= b640= c060= d604=r e066=rw f= g= h=rw"),
        (
            Who::with("root", 0, &["CAP_DAC_OVERRIDE"]),
            "a600=rw b640=rw c060=rw d604=rw e066=rw f=rw g=rw h=rw",
        ),
        (
            Who::with("reader", 4000, &["CAP_DAC_READ_SEARCH"]),
            "a600=r b640=r c060=r d604=r e066=rw f=r g=r h=rw",
        ),
    ] {
        scene.expect(&who, try_all, expected)?;
    }
    Ok(())
}

fn directories(host: &Host) -> Result<()> {
    let scene = Scene::set(host, |volume| {
        directory(&volume.join("sticky"), 0, 0, 0o1777)?;
        file(&volume.join("sticky/theirs"), 2000, 2000, 0o666)?;
        directory(&volume.join("shared"), 0, 5000, 0o2775)?;
        directory(&volume.join("closed"), 2000, 2000, 0o711)?;
        file(&volume.join("closed/known"), 2000, 2000, 0o644)?;
        directory(&volume.join("listed"), 0, 0, 0o777)?;
        let list = [
            (OWNER, RWX, NOBODY),
            (USER, RW, 2000),
            (GROUP_OWNER, R, NOBODY),
            (MASK, RWX, NOBODY),
            (OTHER, 0, NOBODY),
        ];
        set_list(&volume.join("listed"), "system.posix_acl_default", &list)
    })?;
    let script = "touch sticky/mine && echo made; rm -f sticky/theirs || echo kept; mv sticky/theirs sticky/moved || echo stays; \
                  rm sticky/mine && echo removed";
    scene.expect(&Who::user("other", 1000, 1000, &[]), script, "made\nkept\nstays\nremoved")?;
    scene.expect(&Who::user("owner", 2000, 2000, &[]), "rm sticky/theirs && echo removed", "removed")?;
    let script = "mkdir shared/dir shared/dir/sub && touch shared/dir/sub/file && stat -c %a:%g shared/dir shared/dir/sub/file";
    scene.expect(&Who::user("member", 1000, 1000, &[5000]), script, "2755:5000\n644:5000")?;
    scene.expect(&Who::user("stranger", 1000, 1000, &[]), "mkdir shared/other || echo refused", "refused")?;
    // A file is not given to a group of which its owner is no member.
    let script = "touch mine listed/mine; chgrp 7 shared/dir/sub/file || echo refused; ls closed || echo hidden; cat closed/known";
    scene.expect(&Who::user("passer", 1000, 1000, &[]), script, "refused\nhidden\ntext")?;
    // The default list, and not the umask, says what the rest may do.
    let script = "touch listed/file; mkdir listed/dir; touch listed/dir/file; umask 077; touch listed/private; \
                  stat -c %a listed/file listed/dir listed/dir/file listed/private";
    scene.expect(&Who::user("maker", 1000, 1000, &[]), script, "660\n770\n660\n660")?;
    let script =
        "for it in listed/file listed/dir/file listed/private; do echo more >> $it && echo written; done";
    scene.expect(&Who::user("named", 2000, 2000, &[]), script, "written\nwritten")
}

fn capabilities(host: &Host) -> Result<()> {
    let scene = Scene::set(host, |volume| {
        file(&volume.join("file"), 1000, 1000, 0o644)?;
        file(&volume.join("program"), 1000, 1000, 0o6777)?;
        file(&volume.join("guarded"), 1000, 1000, 0o6777)?;
        directory(&volume.join("new"), 1000, 1000, 0o755)
    })?;
    let script = "chmod 600 file || echo no-chmod; chown 4000 file || echo no-chown; touch -d 2020-01-01 file || echo no-touch";
    scene.expect(&Who::user("nobody", 4000, 4000, &[]), script, "no-chmod\nno-chown\nno-touch")?;
    let script = "chmod 640 file && touch -d '2020-01-01 00:00:00' file && stat -c %a:%Y file; chown 4000 file || echo no-chown";
    scene.expect(&Who::with("fowner", 4000, &["CAP_FOWNER"]), script, "640:1577836800\nno-chown")?;
    let script = "chown 4000:4001 file && stat -c %u:%g file; mknod disk b 8 0 || echo no-mknod";
    scene.expect(&Who::with("chown", 5000, &["CAP_CHOWN"]), script, "4000:4001\nno-mknod")?;
    // A write takes the set-ID bits away, unless the writer may set them.
    scene.expect(&Who::user("writer", 4000, 4000, &[]), "echo more >> program; stat -c %a program", "777")?;
    let script = "echo more >> guarded; stat -c %a guarded";
    scene.expect(&Who::with("fsetid", 4000, &["CAP_FSETID"]), script, "6777")?;
    // A write, a truncation and a chown also take the capabilities of a file away. The container has made the files,
    // and somebody on the host gives them capabilities.
    let names = ["written", "emptied", "given"].map(|name| format!("new/{name}"));
    let script = format!("for it in {}; do echo text > $it; done; echo made", names.join(" "));
    scene.expect(&Who::user("maker", 1000, 1000, &[]), &script, "made")?;
    for name in &names {
        set_capability(&scene.volume.path().join(name))?;
    }
    let script = "echo more >> new/written; : > new/emptied; chown 1000:1000 new/given; cat new/*";
    scene.expect(&Who::with("changer", 1000, &["CAP_CHOWN"]), script, "text\ntext\nmore")?;
    for name in &names {
        let left = getxattr(scene.volume.path().join(name), CAPABILITY, &mut [0_u8; 64][..]);
        ensure!(left == Err(Errno::NODATA), "expected  no capability of {name}\ncame      {left:?}");
    }
    let metadata = fs::metadata(scene.volume.path().join("file"))?;
    ensure!((metadata.uid(), metadata.gid()) == (4000, 4001), "came      {metadata:?}");
    Ok(())
}
