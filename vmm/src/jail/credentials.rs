//! The users that the threads of the VMM run as.
//!
//! The VMM starts as root. Even without capabilities root owns most files of the host, and the kernel objects of other
//! processes of root. So each thread that does not need root's files changes to a user that owns nothing.

use std::io;

use rustix::{
    fs::{Gid, Uid},
    rand::{GetRandomFlags, getrandom},
    thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid},
};

use super::{JailError, ThreadRole};

/// Unused user numbers. They are above the ranges that systemd's list of users and groups (UIDS-GIDS) assigns, and
/// below 2^31, because some programs treat larger numbers as negative.
const FIRST: u32 = 0x7800_0000;
const COUNT: u32 = 0x0800_0000;

/// Changes the user and the group of this thread to a random unused number, unless its role needs root.
pub(super) fn leave_root(role: ThreadRole) -> Result<(), JailError> {
    if role.runs_as_root() {
        return Ok(());
    }
    let failed = |errno| JailError::Set { what: "the user", source: io::Error::from(errno) };
    let mut random = [0; 4];
    getrandom(&mut random, GetRandomFlags::empty()).map_err(failed)?;
    let id = FIRST + u32::from_le_bytes(random) % COUNT;
    let (user, group) = (Uid::from_raw(id), Gid::from_raw(id));
    set_thread_groups(&[]).map_err(failed)?;
    set_thread_res_gid(group, group, group).map_err(failed)?;
    set_thread_res_uid(user, user, user).map_err(failed)
}

#[cfg(test)]
mod tests {
    use std::{collections::HashSet, fs, io::ErrorKind, os::unix::fs::PermissionsExt, thread};

    use super::*;
    use crate::jail::{
        capabilities,
        testing::{End, drill},
    };

    /// The four user IDs and the four group IDs of this thread, and its supplementary groups.
    fn ids() -> [Vec<u32>; 3] {
        let status = fs::read_to_string("/proc/thread-self/status").unwrap();
        ["Uid:", "Gid:", "Groups:"].map(|field| {
            let line = status.lines().find_map(|line| line.strip_prefix(field)).unwrap();
            line.split_whitespace().map(|id| id.parse().unwrap()).collect()
        })
    }

    #[test]
    fn roots_files_are_for_who_serves_files_and_connects_to_sockets() {
        let body = || {
            let secret = tempfile::NamedTempFile::new().unwrap();
            fs::set_permissions(secret.path(), fs::Permissions::from_mode(0o600)).unwrap();
            capabilities::keep_those_for_files().unwrap();
            let mut users = HashSet::new();
            for role in ThreadRole::ALL {
                let path = secret.path().to_owned();
                let body = move || {
                    leave_root(role).unwrap();
                    capabilities::keep_those_for(role).unwrap();
                    (ids(), fs::read(path).map_err(|error| error.kind()))
                };
                let ([user, group, groups], read) = thread::spawn(body).join().unwrap();
                if [ThreadRole::Fs, ThreadRole::Vsock].contains(&role) {
                    assert_eq!((user, read), (vec![0; 4], Ok(Vec::new())), "{role:?}");
                    continue;
                }
                assert_eq!(read, Err(ErrorKind::PermissionDenied), "{role:?}");
                assert_eq!((&user, groups), (&group, Vec::new()), "{role:?}");
                assert!(user.iter().all(|id| *id == user[0]) && user[0] >= FIRST, "{role:?}: {user:?}");
                users.insert(user[0]);
            }
            assert_eq!(users.len(), ThreadRole::ALL.len() - 2, "{users:?}");
            // Each thread has a user of its own.
            assert_eq!(ids()[0], [0; 4]);
        };
        drill(body, End::succeeds);
    }
}
