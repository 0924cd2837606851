//! The user of the program: its numbers, by the files of the program's root.

use std::{io::Read, os::fd::AsFd};

use rustix::fs::ResolveFlags;

use crate::process::{error::ProcessError, regular_file::open_below};

/// The most that is read of /etc/passwd and of /etc/group.
const MOST: u64 = 1 << 20;

/// The numbers of a user.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct User {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) groups: Vec<u32>,
}

impl User {
    /// Finds `USER[:GROUP]`, names or numbers, in a root. A number need not be in its files.
    pub(crate) fn find(text: &str, root: impl AsFd) -> Result<Self, ProcessError> {
        // A root without these files has no names.
        let read = |path| read_in(root.as_fd(), path).unwrap_or_default();
        Self::find_in(text, &read("etc/passwd"), &read("etc/group"))
    }

    /// `USER[:GROUP]` if both are numbers, without any file.
    pub(crate) fn of_numbers(text: &str) -> Option<Self> {
        Self::find_in(text, "", "").ok()
    }

    fn find_in(text: &str, passwd: &str, group: &str) -> Result<Self, ProcessError> {
        let unknown = |what: &str, file: &str| ProcessError::User {
            user: text.into(),
            reason: format!("{what} is not in {file} of the program's root; give a number"),
        };
        let (user, group_name) =
            text.split_once(':').map_or((text, None), |(user, group)| (user, Some(group)));
        let entry = passwd.lines().map(|line| line.split(':').collect::<Vec<_>>()).find(|fields| {
            let number = user.parse::<u32>().ok();
            fields.first() == Some(&user) || (number.is_some() && number_at(fields, 2) == number)
        });
        let number = user.parse().ok().or_else(|| number_at(entry.as_deref()?, 2));
        let uid = number.ok_or_else(|| unknown(user, "/etc/passwd"))?;
        let groups = || group.lines().map(|line| line.split(':').collect::<Vec<_>>());
        if let Some(name) = group_name {
            let found = groups().find(|fields| fields.first() == Some(&name));
            let gid = name.parse().ok().or_else(|| number_at(&found?, 2));
            let gid = gid.ok_or_else(|| unknown(name, "/etc/group"))?;
            return Ok(Self { uid, gid, groups: Vec::new() });
        }
        let gid = entry.as_deref().and_then(|fields| number_at(fields, 3)).unwrap_or(0);
        let name = entry.and_then(|fields| fields.first().copied()).unwrap_or_default();
        let is_member = |fields: &Vec<&str>| {
            !name.is_empty() && fields.get(3).is_some_and(|members| members.split(',').any(|one| one == name))
        };
        let others = groups().filter(is_member).filter_map(|fields| number_at(&fields, 2));
        Ok(Self { uid, gid, groups: others.filter(|other| *other != gid).collect() })
    }
}

fn number_at(fields: &[&str], index: usize) -> Option<u32> {
    fields.get(index)?.parse().ok()
}

/// Reads a file of a root, in which symlinks do not lead out of it.
fn read_in(root: impl AsFd, path: &str) -> Option<String> {
    let file = open_below(root, path, ResolveFlags::IN_ROOT).ok()?;
    let mut text = Vec::new();
    file.take(MOST).read_to_end(&mut text).ok()?;
    Some(String::from_utf8_lossy(&text).into_owned())
}

#[cfg(test)]
mod tests {
    use std::{
        fs::{self, File},
        os::unix::fs::symlink,
    };

    use super::*;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/sh\nbuild:x:1000:100::/home/build:/bin/sh\nbroken\n";
    const GROUP: &str = "root:x:0:\nusers:x:100:build\nkvm:x:105:other,build\n";

    fn find(text: &str) -> Result<User, String> {
        User::find_in(text, PASSWD, GROUP).map_err(|error| error.to_string())
    }

    #[test]
    fn a_user_has_the_groups_of_the_root() {
        let build = User { uid: 1000, gid: 100, groups: vec![105] };
        assert_eq!((find("build"), find("1000")), (Ok(build.clone()), Ok(build)));
        assert_eq!(find("root"), Ok(User::default()));
        assert_eq!(find("build:kvm"), Ok(User { uid: 1000, gid: 105, groups: vec![] }));
        assert_eq!(find("7:8"), Ok(User { uid: 7, gid: 8, groups: vec![] }));
        assert_eq!(find("7"), Ok(User { uid: 7, gid: 0, groups: vec![] }));
    }

    #[test]
    fn a_name_that_is_not_there_is_named() {
        let error = "--user nobody: nobody is not in /etc/passwd of the program's root; give a number";
        assert_eq!(find("nobody"), Err(error.into()));
        assert!(find("root:nogroup").unwrap_err().contains("nogroup is not in /etc/group"));
        for wrong in ["", ":", "-1", "4294967296", "broken"] {
            assert!(find(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_symlink_of_the_root_does_not_lead_to_the_hosts_file() {
        let dir = tempfile::tempdir().unwrap();
        let outside = dir.path().join("passwd");
        fs::write(&outside, "evil:x:0:0::/:\n").unwrap();
        let root = dir.path().join("root");
        fs::create_dir_all(root.join("etc")).unwrap();
        symlink(&outside, root.join("etc/passwd")).unwrap();
        let opened = File::open(&root).unwrap();
        assert_eq!(read_in(&opened, "etc/passwd"), None);
        fs::remove_file(root.join("etc/passwd")).unwrap();
        symlink("../../../passwd.in", root.join("etc/passwd")).unwrap();
        fs::write(root.join("passwd.in"), PASSWD).unwrap();
        assert_eq!(read_in(&opened, "etc/passwd").as_deref(), Some(PASSWD));
        assert_eq!(User::find("build", &opened).unwrap().uid, 1000);
    }
}
