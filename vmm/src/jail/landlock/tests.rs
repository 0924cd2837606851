//! Each test runs on several kernels: on that of this machine, and on older ones that the tests play.

use std::{
    collections::BTreeMap,
    ffi::{c_int, c_void},
    fs::{self, File},
    io::{Error, ErrorKind},
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
    ptr,
    sync::{
        atomic::{AtomicI32, Ordering},
        mpsc::channel,
    },
    thread,
};

use nix::{
    sys::{
        pthread::pthread_kill,
        signal::{Signal, kill},
        stat::{Mode, SFlag, makedev, mknod},
    },
    unistd::{getppid, mkfifo, truncate},
};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch, apply_filter,
};
use vmm_sys_util::signal::register_signal_handler;

use super::*;
use crate::jail::testing::{End, drill_for_each};

const DENIED: Option<ErrorKind> = Some(ErrorKind::PermissionDenied);

/// What landlock_create_ruleset(2) is to answer who asks for the version of the ABI.
static ANSWER: AtomicI32 = AtomicI32::new(0);

/// A kernel, by what it says of its Landlock: the version of the ABI, or a negative error number.
#[derive(Debug, Clone, Copy)]
struct Kernel(c_int);

impl Kernel {
    /// Those without Landlock, and those with each version of the ABI up to that of this machine.
    #[allow(unsafe_code)]
    fn all() -> impl Iterator<Item = c_int> {
        // The kernel answers so if there is no ruleset (LANDLOCK_CREATE_RULESET_VERSION).
        let (none, version) = (ptr::null::<c_void>(), 1);
        // SAFETY: This system call reads no memory if there is no ruleset.
        let of_host = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, none, 0, version) };
        [-libc::ENOSYS, -libc::EOPNOTSUPP].into_iter().chain(1..=c_int::try_from(of_host).unwrap())
    }

    /// Makes this process believe that it runs on this kernel. A thread that asks for the version gets a signal in
    /// place of the answer, and its handler answers.
    fn play(self) {
        ANSWER.store(self.0, Ordering::Relaxed);
        register_signal_handler(libc::SIGSYS, answer).unwrap();
        let no_ruleset = SeccompCondition::new(0, SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, 0).unwrap();
        let rules = vec![SeccompRule::new(vec![no_ruleset]).unwrap()];
        let rules = BTreeMap::from([(libc::SYS_landlock_create_ruleset, rules)]);
        let (otherwise, matched) = (SeccompAction::Allow, SeccompAction::Trap);
        let filter = SeccompFilter::new(rules, otherwise, matched, TargetArch::x86_64).unwrap();
        apply_filter(&BpfProgram::try_from(filter).unwrap()).unwrap();
    }

    /// Restricts this process as the VMM does, which must warn of exactly what this kernel lacks.
    fn stand(self, shares: &[&Path]) {
        self.play();
        let (state, kernel) = match self.0 {
            version @ 2..6 => ("only partly restricts the VMM", format!("has version {version} of its ABI")),
            1 => (
                "restricts only the threads of the VMM that serve no files",
                "has version 1 of its ABI".to_owned(),
            ),
            answer if answer == -libc::ENOSYS => ("does not restrict the VMM", "has no Landlock".to_owned()),
            answer if answer < 0 => ("does not restrict the VMM", "has Landlock disabled".to_owned()),
            _ => return assert_eq!(restrict_process(shares).unwrap(), None),
        };
        let warning = format!("Landlock {state}: the kernel {kernel}, and version 6 (Linux 6.12) is needed");
        assert_eq!(restrict_process(shares).unwrap(), Some(warning));
    }

    /// How something ends that is denied from this version of the ABI on.
    fn denies_from(self, version: c_int) -> Option<ErrorKind> {
        if self.0 >= version { DENIED } else { None }
    }
}

/// Answers a system call that a seccomp filter has kept from the kernel.
#[allow(unsafe_code)]
extern "C" fn answer(_: c_int, _: *mut libc::siginfo_t, context: *mut c_void) {
    let register = libc::REG_RAX as usize;
    // SAFETY: The kernel passes the registers of the thread, which has them back when this function returns.
    let registers = unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs };
    registers[register] = ANSWER.load(Ordering::Relaxed).into();
}

/// Runs `body` in a process of its own on each kernel.
fn on_each_kernel(body: impl FnOnce(Kernel)) {
    drill_for_each(Kernel::all(), |answer| body(Kernel(answer)), End::succeeds);
}

/// A directory with a share, which contains a file in a directory, and with secrets outside of the share.
fn host() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir_all(dir.path().join("share/dir")).unwrap();
    fs::write(dir.path().join("share/dir/file"), "shared").unwrap();
    for secret in ["secret", "moved", "removed"] {
        fs::write(dir.path().join(secret), "secret").unwrap();
    }
    dir
}

fn kind<T>(done: std::io::Result<T>) -> Option<ErrorKind> {
    done.err().map(|error| error.kind())
}

#[test]
fn no_file_is_touched_but_below_the_shares() {
    on_each_kernel(|kernel| {
        let dir = host();
        let at = |name: &str| dir.path().join(name);
        let file = at("share/dir/file");
        let opened = File::open(&file).unwrap();
        symlink(at("secret"), at("share/out")).unwrap();
        kernel.stand(&[&at("share")]);
        let tried = [
            kind(File::open(at("secret"))),
            kind(File::open(at("share/out"))),
            kind(File::open("/proc/self/fd/../status")),
            kind(fs::read_dir(dir.path())),
            kind(File::create(at("new"))),
            kind(fs::remove_file(at("removed"))),
            kind(fs::create_dir(at("new-dir"))),
        ];
        assert_eq!(tried, [kernel.denies_from(2); 7], "{kernel:?}");
        // The right to do this without opening the file came later.
        let truncated = truncate(&at("secret"), 1).map_err(Error::from);
        assert_eq!(kind(truncated), kernel.denies_from(3), "{kernel:?}");
        // No file can be moved or linked out of the share, or into it.
        for (from, to) in [(&file, at("linked")), (&at("secret"), at("share/linked"))] {
            assert_eq!(fs::hard_link(from, &to).is_err(), kernel.0 >= 2, "{kernel:?} {from:?}");
            let moved = to.with_extension("moved");
            assert_eq!(fs::rename(from, &moved).is_err(), kernel.0 >= 2, "{kernel:?} {from:?}");
        }
        // By the path of a descriptor, as the server does it.
        let again = format!("/proc/self/fd/{}", opened.as_raw_fd());
        assert_eq!(fs::read_to_string(again).unwrap(), "shared");
    });
}

#[test]
fn what_is_shared_is_served_as_before() {
    on_each_kernel(|kernel| {
        let dir = host();
        let share = dir.path().join("share");
        let file = share.join("dir/file");
        kernel.stand(&[&share]);
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
        truncate(&file, 1).unwrap();
        fs::remove_file(share.join("moved")).unwrap();
        fs::remove_file(&file).unwrap();
        // The file has no name any more.
        fs::write(format!("/proc/self/fd/{}", opened.as_raw_fd()), "new").unwrap();
        assert_eq!(opened.metadata().unwrap().len(), 3);
        fs::remove_dir(share.join("dir")).unwrap();
    });
}

#[test]
fn no_program_of_a_share_is_executed() {
    on_each_kernel(|kernel| {
        let dir = host();
        let program = dir.path().join("share/true");
        fs::copy("/bin/true", &program).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        Command::new(&program).status().unwrap();
        kernel.stand(&[&dir.path().join("share")]);
        assert_eq!(kind(Command::new(&program).status()), kernel.denies_from(2), "{kernel:?}");
    });
}

#[test]
fn who_does_not_serve_files_has_none() {
    on_each_kernel(|kernel| {
        let dir = host();
        let share = dir.path().join("share");
        kernel.stand(&[&share]);
        let of = |role: ThreadRole| {
            let (file, made) = (share.join("dir/file"), share.join(format!("{role:?}")));
            let body = move || {
                restrict_thread(role).unwrap();
                [kind(File::open(file)), kind(fs::create_dir(made))]
            };
            thread::spawn(body).join().unwrap()
        };
        // The first version restricts what needs no file to be moved.
        for role in ThreadRole::ALL.into_iter().filter(|role| *role != ThreadRole::Fs) {
            assert_eq!(of(role), [kernel.denies_from(1); 2], "{kernel:?} {role:?}");
        }
        assert_eq!(of(ThreadRole::Fs), [None; 2], "{kernel:?}");
    });
}

#[test]
fn no_network_and_no_process_is_reached() {
    on_each_kernel(|kernel| {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let name = SocketAddr::from_abstract_name(format!("drill-{}", std::process::id())).unwrap();
        // Processes that were started before are outside of the domain.
        let _abstract = UnixListener::bind_addr(&name).unwrap();
        kernel.stand(&[]);
        let of_tcp = [
            kind(TcpListener::bind("127.0.0.1:0")),
            kind(TcpStream::connect(listener.local_addr().unwrap())),
        ];
        assert_eq!(of_tcp, [kernel.denies_from(4); 2], "{kernel:?}");
        let of_processes = [
            kind(UnixStream::connect_addr(&name)),
            kind(kill(getppid(), None::<Signal>).map_err(Into::into)),
        ];
        assert_eq!(of_processes, [kernel.denies_from(6); 2], "{kernel:?}");
    });
}

#[test]
fn threads_of_the_process_still_reach_each_other() {
    on_each_kernel(|kernel| {
        kernel.stand(&[]);
        let (end, ended) = channel::<()>();
        let vcpu = thread::spawn(move || {
            restrict_thread(ThreadRole::Vcpu).unwrap();
            ended.recv().unwrap_err();
        });
        restrict_thread(ThreadRole::Control).unwrap();
        pthread_kill(vcpu.as_pthread_t(), None::<Signal>).unwrap();
        drop(end);
        vcpu.join().unwrap();
    });
}

#[test]
fn the_kernel_of_this_machine_is_one_of_those() {
    drill_for_each(
        Kernel::all().last(),
        |version| {
            // Without playing another one.
            let warning = landlock_warning().unwrap();
            assert_eq!(warning.is_none(), version >= 6, "{version}: {warning:?}");
        },
        End::succeeds,
    );
}
