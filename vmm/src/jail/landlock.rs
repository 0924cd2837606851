//! A second wall around files, of which the kernel knows the place of each: Landlock. It trusts neither the
//! [root](super::root) nor the capabilities, and stands as far as the host's kernel has it: entirely from Linux 6.12 on.
//! It alone may be missing.

use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, LandlockStatus, PathBeneath, PathFd,
    PathFdError, Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetError, RulesetStatus, Scope,
};

use super::Duty;

/// The version of Landlock's interface whose rights and scopes are taken away. What a later one adds is tested before it
/// comes in here.
const KNOWN: ABI = ABI::V6;

/// Why Landlock's rules do not hold.
#[derive(Debug, thiserror::Error)]
pub enum LandlockError {
    #[error("{path} cannot be in a rule")]
    Path { path: PathBuf, source: PathFdError },
    #[error("the kernel does not take the rules")]
    Rules(#[from] RulesetError),
}

/// Leaves to this thread, and to those that it starts, no files but those below `shares`, whatever is mounted there, and of
/// these none to be executed; no TCP; and no way to other processes by signals or by abstract sockets.
///
/// Answers what is missing of that on this host, if anything is.
pub(crate) fn keep_to(shares: &[impl AsRef<Path>]) -> Result<Option<String>, LandlockError> {
    // Nor are devices opened, whose ioctls would be a right of their own.
    let served = AccessFs::from_all(KNOWN) & !(AccessFs::Execute | AccessFs::IoctlDev);
    let mut rules = Ruleset::default()
        // The first version lets no file go to another directory, and cannot be told to: better none.
        .set_compatibility(CompatLevel::SoftRequirement)
        .handle_access(AccessFs::Refer)?
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(KNOWN))?
        .handle_access(AccessNet::from_all(KNOWN))?
        // Not in the rules of a single thread: some kernels keep its signals from the others of its process.
        .scope(Scope::from_all(KNOWN))?
        .create()?;
    for share in shares {
        rules = rules.add_rule(PathBeneath::new(open(share.as_ref())?, served))?;
    }
    let done = rules.restrict_self()?;
    Ok(missing(&done.ruleset, done.landlock))
}

/// Takes all files from this thread, unless to serve them is its duty. What is open stays so.
pub(super) fn keep_for(duty: Duty) -> Result<(), LandlockError> {
    if !duty.serves_files() {
        Ruleset::default().handle_access(AccessFs::from_all(KNOWN))?.create()?.restrict_self()?;
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
        LandlockStatus::NotImplemented => "has none".to_owned(),
        LandlockStatus::NotEnabled => "has it turned off".to_owned(),
        LandlockStatus::Available { effective_abi, .. } => format!("has its version {effective_abi}"),
    };
    let stands = if *rules == RulesetStatus::NotEnforced { "does not stand" } else { "stands in part" };
    Some(format!(
        "the wall of Landlock {stands}: this kernel {kernel}, and it takes version {KNOWN}, of Linux 6.12"
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
    use crate::jail::testing::{ALL, End, drill};

    const DENIED: Option<ErrorKind> = Some(ErrorKind::PermissionDenied);

    /// A drill takes the whole wall: on a kernel that has less of it, it fails.
    fn stand(shares: &[&Path]) {
        assert_eq!(keep_to(shares).unwrap(), None);
    }

    /// A directory with a share that holds a file in a directory, and a secret.
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
            // Nothing goes out, nothing comes in.
            for (from, to) in [(&file, dir.path().join("stolen")), (&secret, share.join("stolen"))] {
                assert!(fs::rename(from, &to).is_err() && fs::hard_link(from, &to).is_err(), "{from:?}");
            }
            // By the name that a descriptor has, as the server does.
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
            // Nobody has a name for it any more.
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
            let of = |duty| {
                let file = file.clone();
                let body = move || {
                    keep_for(duty).unwrap();
                    kind(File::open(&file)).or(kind(fs::remove_file(&file)))
                };
                thread::spawn(body).join().unwrap()
            };
            // The file is gone when it has been that of who may.
            for duty in ALL.into_iter().filter(|duty| *duty != Duty::Fs) {
                assert_eq!(of(duty), DENIED, "{duty:?}");
            }
            assert_eq!(of(Duty::Fs), None);
        };
        drill(body, End::succeeds);
    }

    #[test]
    fn no_network_and_no_process_is_reached() {
        let body = || {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let name = SocketAddr::from_abstract_name(format!("drill-{}", std::process::id())).unwrap();
            // Whoever was there before is outside.
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
                keep_for(Duty::Vcpu).unwrap();
                ended.recv().unwrap_err();
            });
            keep_for(Duty::Control).unwrap();
            pthread_kill(vcpu.as_pthread_t(), None::<Signal>).unwrap();
            drop(end);
            vcpu.join().unwrap();
        };
        drill(body, End::succeeds);
    }

    #[test]
    fn what_a_kernel_lacks_is_said() {
        let whole = LandlockStatus::Available { effective_abi: KNOWN, kernel_abi: None };
        assert_eq!(missing(&RulesetStatus::FullyEnforced, whole), None);
        let older = LandlockStatus::Available { effective_abi: ABI::V4, kernel_abi: None };
        for (rules, kernel, said) in [
            (RulesetStatus::PartiallyEnforced, older, "stands in part: this kernel has its version 4,"),
            (
                RulesetStatus::NotEnforced,
                LandlockStatus::NotEnabled,
                "does not stand: this kernel has it turned off,",
            ),
            (
                RulesetStatus::NotEnforced,
                LandlockStatus::NotImplemented,
                "does not stand: this kernel has none,",
            ),
        ] {
            let line = missing(&rules, kernel).unwrap();
            assert!(line.contains(said) && line.contains("version 6, of Linux 6.12"), "{line}");
        }
    }
}
