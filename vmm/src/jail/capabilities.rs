//! What root may do, and threads of the VMM may not.
//!
//! The VMM starts as root: it makes a tap and enters namespaces. What is left afterwards is what it takes to act on files
//! as the guest's root, and only the thread that does has it.

use std::io;

use rustix::{
    io::Errno,
    thread::{
        CapabilitiesSecureBits, CapabilitySet, CapabilitySets, capabilities, clear_ambient_capability_set,
        remove_capability_from_bounding_set, set_capabilities, set_capabilities_secure_bits,
    },
};

use super::{Duty, JailError};

/// Of the thread that serves files. The guest's root acts through it on the files of its containers, as a container's
/// root does on its host, and makes what other users of the guest are allowed to make.
const FILE_SERVER: CapabilitySet = CapabilitySet::empty()
    // chown to anybody.
    .union(CapabilitySet::CHOWN)
    // Whether a caller may read, write or search is for the guest's kernel to say, which has said so before it asks: it
    // knows all groups of the caller, of which a request names one.
    .union(CapabilitySet::DAC_OVERRIDE)
    // chmod, utimes, xattrs and sticky directories of files of others.
    .union(CapabilitySet::FOWNER)
    // A set-user-ID or set-group-ID bit survives chmod and chown by root. The server gives it up for a write by others.
    .union(CapabilitySet::FSETID)
    // What is made belongs to the caller's group,
    .union(CapabilitySet::SETGID)
    // and to the caller.
    .union(CapabilitySet::SETUID)
    // mknod, also for overlayfs's whiteouts; the server opens no device.
    .union(CapabilitySet::MKNOD)
    // File capabilities of the programs in an image.
    .union(CapabilitySet::SETFCAP);

/// What is created is created with the caller's user and group, so that it belongs to them. The capabilities are kept
/// then, for the reason given at DAC_OVERRIDE. And nobody gets any by being root. Neither can be changed any more.
const SECURE_BITS: CapabilitiesSecureBits = CapabilitiesSecureBits::NO_SETUID_FIXUP
    .union(CapabilitiesSecureBits::NO_SETUID_FIXUP_LOCKED)
    .union(CapabilitiesSecureBits::NO_ROOT)
    .union(CapabilitiesSecureBits::NO_ROOT_LOCKED)
    .union(CapabilitiesSecureBits::NO_CAP_AMBIENT_RAISE)
    .union(CapabilitiesSecureBits::NO_CAP_AMBIENT_RAISE_LOCKED);

/// Leaves to this thread, and to those that it starts, what serving files takes, and no way to get more.
pub(crate) fn keep_those_for_files() -> Result<(), JailError> {
    set_capabilities_secure_bits(SECURE_BITS).map_err(failed("the secure bits"))?;
    clear_ambient_capability_set().map_err(failed("the ambient capabilities"))?;
    clear_bounding_set().map_err(failed("the bounding set of capabilities"))?;
    set(FILE_SERVER)
}

/// Does what takes the set-user-ID and the set-group-ID bit from a file whose contents it changes, if `kills`: the kernel
/// does so unless it is told otherwise by CAP_FSETID.
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

/// Leaves to this thread what its duty takes.
pub(super) fn keep_those_for(duty: Duty) -> Result<(), JailError> {
    set(if duty.serves_files() { FILE_SERVER } else { CapabilitySet::empty() })
}

fn set(capabilities: CapabilitySet) -> Result<(), JailError> {
    let sets = CapabilitySets {
        effective: capabilities,
        permitted: capabilities,
        inheritable: CapabilitySet::empty(),
    };
    set_capabilities(None, sets).map_err(failed("the capabilities"))
}

/// Of all that the kernel knows, which may be more than this program does.
fn clear_bounding_set() -> Result<(), Errno> {
    for bit in 0..u64::BITS {
        match remove_capability_from_bounding_set(CapabilitySet::from_bits_retain(1 << bit)) {
            Ok(()) => {}
            // There is none of this number.
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
    use crate::jail::testing::{ALL, End, drill};

    /// What only root may do: give a file away, and leave a namespace.
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
            let of = |duty| {
                let body = move || {
                    keep_those_for(duty).unwrap();
                    chown_and_unshare()
                };
                thread::spawn(body).join().unwrap()
            };
            for duty in ALL {
                let given = if duty == Duty::Fs { Ok(()) } else { denied };
                assert_eq!(of(duty), [given, denied], "{duty:?}");
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
            keep_those_for(Duty::Net).unwrap();
            assert!(set(CapabilitySet::CHOWN).is_err());
            let status = fs::read_to_string("/proc/thread-self/status").unwrap();
            for empty in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
                assert!(status.contains(&format!("{empty}:\t{:016x}\n", 0)), "{status}");
            }
        };
        drill(body, End::succeeds);
    }
}
