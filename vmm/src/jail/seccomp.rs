//! The system calls that a thread may make. For any other the kernel ends the whole process, and says so in its log.

use std::{
    collections::{BTreeMap, BTreeSet},
    process,
};

use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch, apply_filter,
};

use super::{
    Duty, JailError,
    syscalls::{Allowed, Argument, EVERY_THREAD, Value, of_duty},
};

/// Why a thread has no filter.
#[derive(Debug, thiserror::Error)]
pub enum FilterError {
    #[error("the rules make no program")]
    Compile(#[from] BackendError),
    #[error("the kernel does not take the program")]
    Install(#[from] seccompiler::Error),
}

/// Leaves to this thread, for ever, the system calls of its duty.
pub(super) fn confine(duty: Duty) -> Result<(), JailError> {
    let done = program(duty).map_err(FilterError::from).and_then(|program| Ok(apply_filter(&program)?));
    done.map_err(|source| JailError::Filter { thread: duty.name(), source })
}

fn program(duty: Duty) -> Result<BpfProgram, BackendError> {
    let allowed = || of_duty(duty).iter().copied().chain([EVERY_THREAD]).flatten();
    // A call without rules of its arguments may be made in any way.
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    let unconditional: BTreeSet<i64> =
        allowed().filter(|allowed| allowed.arguments.is_empty()).map(|allowed| allowed.call).collect();
    for allowed in allowed() {
        let ways = rules.entry(allowed.call).or_default();
        if !unconditional.contains(&allowed.call) {
            ways.push(rule(allowed)?);
        }
    }
    let (otherwise, matched) = (SeccompAction::KillProcess, SeccompAction::Allow);
    SeccompFilter::new(rules, otherwise, matched, TargetArch::x86_64)?.try_into()
}

fn rule(allowed: &Allowed) -> Result<SeccompRule, BackendError> {
    let condition = |argument: &Argument| {
        let value = match argument.value {
            Value::Is(value) => value,
            Value::ThisProcess => process::id().into(),
        };
        let compare = SeccompCmpOp::MaskedEq(argument.mask);
        SeccompCondition::new(argument.index, SeccompCmpArgLen::Dword, compare, value)
    };
    SeccompRule::new(allowed.arguments.iter().map(condition).collect::<Result<_, _>>()?)
}

#[cfg(test)]
mod tests {
    use std::{
        fs::File,
        net::UdpSocket,
        os::{fd::AsRawFd, unix::net::UnixDatagram},
        process::Command,
        ptr, thread,
    };

    use nix::{
        sched::{CloneFlags, unshare},
        sys::signal::{Signal, kill},
        unistd::{Pid, chroot},
    };
    use vmm_sys_util::eventfd::EventFd;

    use super::*;
    use crate::jail::testing::{ALL, End, drill};

    /// Nobody with this duty does `act` and lives.
    fn forbidden<T>(duty: Duty, act: impl FnOnce() -> T) {
        let body = || {
            confine(duty).unwrap();
            act();
        };
        drill(body, End::was_killed);
    }

    #[test]
    fn a_thread_lives_on_with_its_filter() {
        let body = || {
            for duty in ALL {
                let alive = move || {
                    confine(duty).unwrap();
                    vec![1_u8; 8 << 20].iter().map(|byte| usize::from(*byte)).sum::<usize>()
                };
                assert_eq!(thread::spawn(alive).join().unwrap(), 8 << 20, "{duty:?}");
            }
        };
        drill(body, End::succeeds);
    }

    #[test]
    fn no_program_is_executed() {
        forbidden(Duty::Fs, || Command::new("/bin/true").status());
    }

    #[test]
    fn no_thread_is_started() {
        forbidden(Duty::Vcpu, || thread::spawn(|| ()).join());
    }

    #[test]
    fn no_file_is_opened_but_by_the_file_server() {
        forbidden(Duty::Vcpu, || File::open("/dev/null"));
    }

    #[test]
    fn no_network_is_reached() {
        forbidden(Duty::Vsock, || UdpSocket::bind("127.0.0.1:0"));
    }

    #[test]
    fn no_socket_is_made_but_for_the_guests_connections() {
        forbidden(Duty::Net, UnixDatagram::unbound);
    }

    #[test]
    fn no_other_process_gets_a_signal() {
        forbidden(Duty::Control, || kill(Pid::from_raw(1), None::<Signal>));
    }

    #[test]
    #[allow(unsafe_code)]
    fn no_thread_of_another_process_gets_a_signal() {
        // SAFETY: signal 0 is none.
        forbidden(Duty::Control, || unsafe { libc::syscall(libc::SYS_tgkill, 1, 1, 0) });
    }

    #[test]
    fn no_namespace_is_left() {
        forbidden(Duty::Fs, || unshare(CloneFlags::CLONE_NEWNS));
    }

    #[test]
    fn no_root_is_changed() {
        forbidden(Duty::Fs, || chroot("/"));
    }

    #[test]
    #[allow(unsafe_code)]
    fn no_memory_becomes_executable() {
        let length = 4096;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping, which replaces nothing and which nobody uses.
        let page = unsafe { libc::mmap(ptr::null_mut(), length, libc::PROT_READ, flags, -1, 0) };
        let access = libc::PROT_READ | libc::PROT_EXEC;
        // SAFETY: the page above, which nobody uses.
        forbidden(Duty::Vcpu, || unsafe { libc::mprotect(page, length, access) });
    }

    #[test]
    #[allow(unsafe_code)]
    fn nothing_is_asked_of_kvm_but_to_run_the_guest() {
        const KVM_GET_API_VERSION: libc::c_ulong = 0xae00;
        let event = EventFd::new(0).unwrap();
        // SAFETY: this request has no argument and changes nothing.
        forbidden(Duty::Vcpu, || unsafe { libc::ioctl(event.as_raw_fd(), KVM_GET_API_VERSION) });
    }
}
