//! Landlock: a second restriction of file access, which relies neither on the [root](super::root) nor on capabilities.
//!
//! How much it enforces depends on the host's kernel: everything from Linux 6.12 on. It is the one part of the jail
//! that may be missing.

use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, LandlockStatus, PathBeneath, PathFd,
    PathFdError, Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetError, RulesetStatus, Scope,
};

use super::thread_role::ThreadRole;

/// The version of the Landlock ABI whose access rights and scopes are denied. A later version is tested before it is
/// used here.
const TESTED_ABI: ABI = ABI::V6;

/// Why the Landlock rules are not in force.
#[derive(Debug, thiserror::Error)]
pub enum LandlockError {
    #[error("cannot open {path} for a Landlock rule")]
    Path { path: PathBuf, source: PathFdError },
    #[error("the kernel rejects the Landlock rules")]
    Rules(#[from] RulesetError),
}

/// Restricts this thread, and the threads that it starts, to the files below `shares`, whatever is mounted there.
/// Denies executing any file, TCP, signals to other processes and abstract Unix sockets.
///
/// Returns a warning if the host's kernel cannot enforce all of this.
pub(crate) fn restrict_process(shares: &[impl AsRef<Path>]) -> Result<Option<String>, LandlockError> {
    // IoctlDev is the right to call ioctl(2) on device files. The server opens none.
    let served = AccessFs::from_all(TESTED_ABI) & !(AccessFs::Execute | AccessFs::IoctlDev);
    let mut rules = Ruleset::default()
        // The first version of the ABI always denies moving a file to another directory. If the kernel has only that
        // version, no rules are set.
        .set_compatibility(CompatLevel::SoftRequirement)
        .handle_access(AccessFs::Refer)?
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(TESTED_ABI))?
        .handle_access(AccessNet::from_all(TESTED_ABI))?
        // Scopes are set for the whole process. In the rules of a single thread some kernels would block its signals to
        // the other threads of the process.
        .scope(Scope::from_all(TESTED_ABI))?
        .create()?;
    for share in shares {
        rules = rules.add_rule(PathBeneath::new(open(share.as_ref())?, served))?;
    }
    let done = rules.restrict_self()?;
    Ok(missing(&done.ruleset, done.landlock))
}

/// What the host's kernel lacks to enforce the rules, as the VMM would log it. Finding out restricts the calling thread
/// for good: call this in a thread that ends.
pub fn landlock_warning() -> Result<Option<String>, LandlockError> {
    restrict_process(&[] as &[&Path])
}

/// Denies all access to files to this thread, unless its role is to serve files. Files that are open stay usable.
pub(super) fn restrict_thread(role: ThreadRole) -> Result<(), LandlockError> {
    if !role.serves_files() {
        Ruleset::default().handle_access(AccessFs::from_all(TESTED_ABI))?.create()?.restrict_self()?;
    }
    Ok(())
}

fn open(path: &Path) -> Result<PathFd, LandlockError> {
    PathFd::new(path).map_err(|source| LandlockError::Path { path: path.to_owned(), source })
}

fn missing(rules: &RulesetStatus, kernel: LandlockStatus) -> Option<String> {
    if *rules == RulesetStatus::FullyEnforced {
        return None;
    }
    let kernel = match kernel {
        LandlockStatus::NotImplemented => "has no Landlock".to_owned(),
        LandlockStatus::NotEnabled => "has Landlock disabled".to_owned(),
        LandlockStatus::Available { effective_abi, .. } => format!("has version {effective_abi} of its ABI"),
    };
    let state =
        if *rules == RulesetStatus::NotEnforced { "does not restrict" } else { "only partly restricts" };
    Some(format!(
        "Landlock {state} the VMM: the kernel {kernel}, and version {TESTED_ABI} (Linux 6.12) is needed"
    ))
}

#[cfg(test)]
mod tests {
    use std::{
        fs::{self, File},
        io::ErrorKind,
        net::{TcpListener, TcpStream},
        os::{
            fd::AsRawFd,
            linux::net::SocketAddrExt,
            unix::{
                fs::{PermissionsExt, symlink},
                net::{SocketAddr, UnixListener, UnixStream},
                thread::JoinHandleExt,
            },
        },
        process::Command,
        sync::mpsc::channel,
        thread,
    };

    use nix::{
        sys::{
            pthread::pthread_kill,
            signal::{Signal, kill},
            stat::{Mode, SFlag, makedev, mknod},
        },
        unistd::{getppid, mkfifo},
    };

    use super::*;
    use crate::jail::testing::{End, drill};

    const DENIED: Option<ErrorKind> = Some(ErrorKind::PermissionDenied);

    /// These tests fail on a kernel that does not support all rules.
    fn stand(shares: &[&Path]) {
        assert_eq!(restrict_process(shares).unwrap(), None);
    }

    /// A directory with a share, which contains a file in a directory, and with a secret outside of the share.
    fn host() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("share/dir")).unwrap();
        fs::write(dir.path().join("share/dir/file"), "shared").unwrap();
        fs::write(dir.path().join("secret"), "").unwrap();
        dir
    }

    fn kind<T>(done: std::io::Result<T>) -> Option<ErrorKind> {
        done.err().map(|error| error.kind())
    }

    #[test]
    fn no_file_is_touched_but_below_the_shares() {
        let body = || {
            let dir = host();
            let (share, secret) = (dir.path().join("share"), dir.path().join("secret"));
            let file = share.join("dir/file");
            let opened = File::open(&file).unwrap();
            symlink(&secret, share.join("out")).unwrap();
            stand(&[&share]);
            let tried = [
                kind(File::open(&secret)),
                kind(File::open(share.join("out"))),
                kind(File::open("/proc/self/fd/../status")),
                kind(fs::read_dir(dir.path())),
                kind(File::create(dir.path().join("new"))),
                kind(fs::remove_file(&secret)),
                kind(fs::create_dir(dir.path().join("new"))),
            ];
            assert_eq!(tried, [DENIED; 7]);
            // No file can be moved or linked out of the share, or into it.
            for (from, to) in [(&file, dir.path().join("stolen")), (&secret, share.join("stolen"))] {
                assert!(fs::rename(from, &to).is_err() && fs::hard_link(from, &to).is_err(), "{from:?}");
            }
            // By the path of a descriptor, as the server does it.
            let again = format!("/proc/self/fd/{}", opened.as_raw_fd());
            assert_eq!(fs::read_to_string(again).unwrap(), "shared");
        };
        drill(body, End::succeeds);
    }

    #[test]
    fn what_is_shared_is_served_as_before() {
        let body = || {
            let dir = host();
            let share = dir.path().join("share");
            let file = share.join("dir/file");
            stand(&[&share]);
            fs::rename(&file, share.join("moved")).unwrap();
            fs::hard_link(share.join("moved"), &file).unwrap();
            symlink("moved", share.join("link")).unwrap();
            mkfifo(&share.join("fifo"), Mode::S_IRWXU).unwrap();
            UnixListener::bind(share.join("socket")).unwrap();
            for kind in [SFlag::S_IFCHR, SFlag::S_IFBLK] {
                let name = format!("device-{}", kind.bits());
                mknod(&share.join(name), kind, Mode::S_IRUSR, makedev(0, 0)).unwrap();
            }
            let opened = File::options().read(true).write(true).open(share.join("link")).unwrap();
            fs::remove_file(share.join("moved")).unwrap();
            fs::remove_file(&file).unwrap();
            // The file has no name any more.
            fs::write(format!("/proc/self/fd/{}", opened.as_raw_fd()), "new").unwrap();
            assert_eq!(opened.metadata().unwrap().len(), 3);
            fs::remove_dir(share.join("dir")).unwrap();
        };
        drill(body, End::succeeds);
    }

    #[test]
    fn no_program_of_a_share_is_executed() {
        let body = || {
            let dir = host();
            let program = dir.path().join("share/true");
            fs::copy("/bin/true", &program).unwrap();
            fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
            Command::new(&program).status().unwrap();
            stand(&[&dir.path().join("share")]);
            assert_eq!(kind(Command::new(&program).status()), DENIED);
        };
        drill(body, End::succeeds);
    }

    #[test]
    fn who_does_not_serve_files_has_none() {
        let body = || {
            let dir = host();
            let file = dir.path().join("share/dir/file");
            stand(&[&dir.path().join("share")]);
            let of = |role| {
                let file = file.clone();
                let body = move || {
                    restrict_thread(role).unwrap();
                    kind(File::open(&file)).or(kind(fs::remove_file(&file)))
                };
                thread::spawn(body).join().unwrap()
            };
            // The file is removed by the thread that may do so.
            for role in ThreadRole::ALL.into_iter().filter(|role| *role != ThreadRole::Fs) {
                assert_eq!(of(role), DENIED, "{role:?}");
            }
            assert_eq!(of(ThreadRole::Fs), None);
        };
        drill(body, End::succeeds);
    }

    #[test]
    fn no_network_and_no_process_is_reached() {
        let body = || {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let name = SocketAddr::from_abstract_name(format!("drill-{}", std::process::id())).unwrap();
            // Processes that were started before are outside of the domain.
            let _abstract = UnixListener::bind_addr(&name).unwrap();
            stand(&[]);
            let tried = [
                kind(TcpListener::bind("127.0.0.1:0")),
                kind(TcpStream::connect(listener.local_addr().unwrap())),
                kind(UnixStream::connect_addr(&name)),
                kind(kill(getppid(), None::<Signal>).map_err(Into::into)),
            ];
            assert_eq!(tried, [DENIED; 4]);
        };
        drill(body, End::succeeds);
    }

    #[test]
    fn threads_of_the_process_still_reach_each_other() {
        let body = || {
            stand(&[]);
            let (end, ended) = channel::<()>();
            let vcpu = thread::spawn(move || {
                restrict_thread(ThreadRole::Vcpu).unwrap();
                ended.recv().unwrap_err();
            });
            restrict_thread(ThreadRole::Control).unwrap();
            pthread_kill(vcpu.as_pthread_t(), None::<Signal>).unwrap();
            drop(end);
            vcpu.join().unwrap();
        };
        drill(body, End::succeeds);
    }

    #[test]
    fn a_warning_names_what_the_kernel_lacks() {
        let whole = LandlockStatus::Available { effective_abi: TESTED_ABI, kernel_abi: None };
        assert_eq!(missing(&RulesetStatus::FullyEnforced, whole), None);
        let older = LandlockStatus::Available { effective_abi: ABI::V4, kernel_abi: None };
        for (rules, kernel, said) in [
            (
                RulesetStatus::PartiallyEnforced,
                older,
                "only partly restricts the VMM: the kernel has version 4 of its ABI,",
            ),
            (
                RulesetStatus::NotEnforced,
                LandlockStatus::NotEnabled,
                "does not restrict the VMM: the kernel has Landlock disabled,",
            ),
            (
                RulesetStatus::NotEnforced,
                LandlockStatus::NotImplemented,
                "does not restrict the VMM: the kernel has no Landlock,",
            ),
        ] {
            let line = missing(&rules, kernel).unwrap();
            assert!(line.contains(said) && line.ends_with("version 6 (Linux 6.12) is needed"), "{line}");
        }
    }
}
