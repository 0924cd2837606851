//! The capabilities that the threads of the VMM keep.
//!
//! The VMM starts as root with all capabilities, because it makes a tap device and enters namespaces. Afterwards the
//! threads that serve files keep the capabilities for acting on files as the guest's root. All other threads keep
//! none.

use std::io;

use rustix::{
    io::Errno,
    thread::{
        CapabilitiesSecureBits, CapabilitySet, CapabilitySets, capabilities, clear_ambient_capability_set,
        remove_capability_from_bounding_set, set_capabilities, set_capabilities_secure_bits,
    },
};

use super::{JailError, ThreadRole};

/// The capabilities of the threads that serve files. Through them the guest's root acts on the files of its containers,
/// as the root of an ordinary container does on its host. They also create files for the other users of the guest.
const FILE_SERVER: CapabilitySet = CapabilitySet::empty()
    // chown(2) to any user.
    .union(CapabilitySet::CHOWN)
    // The guest's kernel has checked the permissions before it sends a request. Only the guest's kernel knows all
    // groups of the calling process: a request names one group.
    .union(CapabilitySet::DAC_OVERRIDE)
    // chmod(2), utimensat(2), extended attributes and sticky directories of files that belong to other users.
    .union(CapabilitySet::FOWNER)
    // The set-user-ID and set-group-ID bits survive chmod and chown by root. The server drops this capability for a
    // write by any other user.
    .union(CapabilitySet::FSETID)
    // New files belong to the group of the calling process, and what root may not do on a file system that maps root
    // to nobody (NFS) is done as this process, with its groups,
    .union(CapabilitySet::SETGID)
    // and its user.
    .union(CapabilitySet::SETUID)
    // mknod(2), which overlayfs uses for whiteouts too. The server never opens a device node.
    .union(CapabilitySet::MKNOD)
    // File capabilities of the programs in an image.
    .union(CapabilitySet::SETFCAP);

/// With it, the thread that connects to sockets of the host changes its root, before it serves anything.
const CHANGE_ROOT: CapabilitySet = CapabilitySet::SYS_CHROOT;

/// NO_SETUID_FIXUP: the server creates a file with the user and the group of the calling process, so that the file
/// belongs to them. It keeps its capabilities meanwhile, for the reason given at DAC_OVERRIDE. NO_ROOT: being root
/// gives no capabilities. The bits are locked, so that a thread cannot clear them again.
const SECURE_BITS: CapabilitiesSecureBits = CapabilitiesSecureBits::NO_SETUID_FIXUP
    .union(CapabilitiesSecureBits::NO_SETUID_FIXUP_LOCKED)
    .union(CapabilitiesSecureBits::NO_ROOT)
    .union(CapabilitiesSecureBits::NO_ROOT_LOCKED)
    .union(CapabilitiesSecureBits::NO_CAP_AMBIENT_RAISE)
    .union(CapabilitiesSecureBits::NO_CAP_AMBIENT_RAISE_LOCKED);

/// Reduces the capabilities of this thread, and of the threads that it starts, to those of the file server and to what
/// a thread needs to enter its jail. There is no way to get more.
pub(crate) fn keep_those_for_files() -> Result<(), JailError> {
    set_capabilities_secure_bits(SECURE_BITS).map_err(failed("the secure bits"))?;
    clear_ambient_capability_set().map_err(failed("the ambient capabilities"))?;
    clear_bounding_set().map_err(failed("the bounding set of capabilities"))?;
    set(FILE_SERVER | CHANGE_ROOT)
}

/// Runs `change`. If `kills` is set, the kernel removes the set-user-ID and set-group-ID bits of the file whose
/// contents `change` modifies. The kernel does so for every process that lacks CAP_FSETID.
pub(crate) fn without_set_id_bits<T>(kills: bool, change: impl FnOnce() -> T) -> Result<T, Errno> {
    if !kills {
        return Ok(change());
    }
    let all = capabilities(None)?;
    set_capabilities(None, CapabilitySets { effective: all.effective - CapabilitySet::FSETID, ..all })?;
    let changed = change();
    set_capabilities(None, all)?;
    Ok(changed)
}

/// Reduces the capabilities of this thread to those that its role needs.
pub(super) fn keep_those_for(role: ThreadRole) -> Result<(), JailError> {
    set(if role.serves_files() { FILE_SERVER } else { CapabilitySet::empty() })
}

fn set(capabilities: CapabilitySet) -> Result<(), JailError> {
    let sets = CapabilitySets {
        effective: capabilities,
        permitted: capabilities,
        inheritable: CapabilitySet::empty(),
    };
    set_capabilities(None, sets).map_err(failed("the capabilities"))
}

/// Clears every capability that the running kernel has, which may be more than this program knows.
fn clear_bounding_set() -> Result<(), Errno> {
    for bit in 0..u64::BITS {
        match remove_capability_from_bounding_set(CapabilitySet::from_bits_retain(1 << bit)) {
            Ok(()) => {}
            // The kernel has no capability with this number.
            Err(Errno::INVAL) => break,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn failed(what: &'static str) -> impl Fn(Errno) -> JailError {
    move |errno| JailError::Set { what, source: io::Error::from(errno) }
}

#[cfg(test)]
mod tests {
    use std::{fs, io::ErrorKind, os::unix::fs::chown, thread};

    use super::*;
    use crate::jail::testing::{End, drill};

    /// Operations that need capabilities: changing the owner of a file, and leaving a namespace.
    fn chown_and_unshare() -> [Result<(), ErrorKind>; 2] {
        let file = tempfile::NamedTempFile::new().unwrap();
        let owner = chown(file.path(), Some(1), None).map_err(|error| error.kind());
        [
            owner,
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWIPC)
                .map_err(|error| io::Error::from(error).kind()),
        ]
    }

    #[test]
    fn only_the_file_server_acts_as_root_and_only_on_files() {
        let body = || {
            assert_eq!(chown_and_unshare(), [Ok(()), Ok(())], "run this test as root");
            keep_those_for_files().unwrap();
            let denied = Err(ErrorKind::PermissionDenied);
            let of = |role| {
                let body = move || {
                    keep_those_for(role).unwrap();
                    chown_and_unshare()
                };
                thread::spawn(body).join().unwrap()
            };
            for role in ThreadRole::ALL {
                let given = if role == ThreadRole::Fs { Ok(()) } else { denied };
                assert_eq!(of(role), [given, denied], "{role:?}");
            }
        };
        drill(body, End::succeeds);
    }

    #[test]
    fn what_is_gone_does_not_come_back() {
        let body = || {
            keep_those_for_files().unwrap();
            assert!(set(FILE_SERVER | CapabilitySet::SYS_ADMIN).is_err());
            assert!(set_capabilities_secure_bits(CapabilitiesSecureBits::empty()).is_err());
            keep_those_for(ThreadRole::Net).unwrap();
            assert!(set(CapabilitySet::CHOWN).is_err());
            let status = fs::read_to_string("/proc/thread-self/status").unwrap();
            for empty in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
                assert!(status.contains(&format!("{empty}:\t{:016x}\n", 0)), "{status}");
            }
        };
        drill(body, End::succeeds);
    }
}
