//! Why a program did not run.

use std::{io, path::PathBuf, time::Duration};

use bulkhead_host_shim::operator::ConfigError;

use crate::{
    process::{FAILED, ProcessError},
    run::{
        end::{End, TIMED_OUT},
        image::ImageError,
        unpack::UnpackError,
    },
};

/// Why `bulkhead run` has failed before, or instead of, the program.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RunError {
    #[error(transparent)]
    Process(#[from] ProcessError),
    #[error("no root is named; add --rootfs, --archive or --image")]
    NoRoot,
    #[error("--rootfs {path}: {reason}")]
    Rootfs { path: PathBuf, reason: String },
    #[error("--archive {path}")]
    Archive { path: PathBuf, source: UnpackError },
    #[error("--image {path}")]
    Image { path: PathBuf, source: ImageError },
    #[error("the image has no entrypoint and no command; name a program")]
    NoCommand,
    #[error("--kernel {path}: {reason}")]
    Kernel { path: PathBuf, reason: String },
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("--junit {path}: cannot write it")]
    Junit { path: PathBuf, source: io::Error },
    #[error(
        "--network nat: there is no pasta in PATH; install it (on Debian 13 or later `apt-get install passt`), or use \
         --network none"
    )]
    NoPasta,
    #[error(
        "--network nat: the pasta of this host is older than 2025, and would let the program reach services that \
         listen on the host's loopback interface only; install a newer passt, or use --network none"
    )]
    OldPasta,
    #[error("--network nat: pasta fails: {reason}")]
    Nat { reason: String },
    #[error("{path}: cannot make it; `bulkhead run` needs root")]
    Denied { path: PathBuf },
    #[error("{path}: cannot prepare it")]
    Prepare { path: PathBuf, source: io::Error },
    #[error("{path}: cannot remove it; `bulkhead gc` tries again")]
    Remove { path: PathBuf, source: io::Error },
    #[error(
        "cannot start containerd-shim-bulkhead-v2, which must be beside this program or in PATH; install the package \
         of Bulkhead"
    )]
    NoShim(#[source] io::Error),
    #[error("containerd-shim-bulkhead-v2 has failed, and did not say why")]
    Shim(#[source] io::Error),
    #[error("the shim has answered {answer:?}, which is no address")]
    Address { answer: String },
    #[error(
        "the VM ended while the program was running; `dmesg` says whether the host's kernel killed its VMM for want of \
         memory"
    )]
    VmEnded,
    #[error("the program did not run: --timeout ({after:?}) was over before it could start")]
    Late { after: Duration },
}

impl RunError {
    /// How the program has ended if this error came after the request to start it, which may have been fulfilled.
    pub(super) fn as_end(&self) -> Option<End> {
        let after = match self {
            Self::Late { after } => Some(*after),
            Self::Process(ProcessError::Interrupted { .. }) => None,
            _ => return None,
        };
        Some(End::Unknown { status: self.status(), after })
    }

    /// The exit status: 126 or 127 if there is no such program, as of a shell, and 124 if it was too late for it.
    pub(super) fn status(&self) -> u8 {
        match self {
            Self::Process(error) => error.status(),
            Self::Late { .. } => TIMED_OUT,
            _ => FAILED,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_killed_while_it_starts_may_have_run() {
        let after = Duration::from_secs(2);
        for (error, status, part) in [
            (RunError::Late { after }, 124, "after 2s (--timeout)"),
            (ProcessError::Interrupted { status: 130 }.into(), 130, "after a signal"),
        ] {
            let end = error.as_end().unwrap();
            let message = end.message();
            assert_eq!((end.status(), error.status()), (status, status));
            assert!(message.contains(part) && message.ends_with("it may have run"), "{message}");
        }
        let missing = ProcessError::NoProgram { message: String::new(), status: 127 };
        assert_eq!(RunError::from(missing).as_end(), None);
    }
}
