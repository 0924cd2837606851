//! AppArmor: loads policy into the guest's kernel. The stage applies a profile (`stage/process_attributes.rs`).

use std::{
    fs::File,
    io::{self, ErrorKind, Write},
    os::fd::{AsFd, OwnedFd},
};

use nix::{
    fcntl::{OFlag, openat},
    sys::stat::Mode,
};

use crate::syscall::{self, attr};

/// Takes policy, and replaces the profiles that have the same names. Relative to the root of securityfs.
const REPLACE: &str = "apparmor/.replace";

/// Loads a binary policy as apparmor_parser(8) makes it.
///
/// securityfs is attached nowhere, so that no container can have it.
pub fn load(policy: &[u8]) -> io::Result<()> {
    let mut file = File::from(open().map_err(explain)?);
    // The kernel takes a policy with one write(2), or not at all (security/apparmor/apparmorfs.c, policy_update).
    match file.write(policy) {
        Ok(written) if written == policy.len() => Ok(()),
        Ok(_) => Err(ErrorKind::WriteZero.into()),
        Err(error) => Err(explain(error)),
    }
}

fn open() -> io::Result<OwnedFd> {
    let context = syscall::fsopen(c"securityfs")?;
    syscall::fsconfig_create(context.as_fd())?;
    let mount = syscall::fsmount(context.as_fd(), attr::NOSUID | attr::NODEV | attr::NOEXEC)?;
    Ok(openat(&mount, REPLACE, OFlag::O_WRONLY | OFlag::O_CLOEXEC, Mode::empty())?)
}

/// Says what the kernel's answers mean here.
fn explain(error: io::Error) -> io::Error {
    let meaning = match error.raw_os_error() {
        Some(libc::ENODEV | libc::ENOENT) => "the guest's kernel has no AppArmor",
        Some(libc::EPROTONOSUPPORT) => "the guest's kernel knows policy of the versions 5 to 9 only",
        Some(libc::EPROTO) => "the guest's kernel does not understand the policy",
        _ => return error,
    };
    io::Error::new(error.kind(), format!("{meaning} ({error})"))
}
