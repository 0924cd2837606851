//! The seccomp filters of the threads. If a thread makes a system call that its filter does not allow, the kernel
//! kills the whole process and logs the call.

use std::{
    collections::{BTreeMap, BTreeSet},
    process,
    sync::Mutex,
};

use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch, apply_filter,
};

use super::{
    syscalls::{Allowed, Argument, EVERY_THREAD, Value, for_role},
    thread_role::ThreadRole,
};
use crate::lock;

/// Why a thread has no seccomp filter.
#[derive(Debug, thiserror::Error)]
pub enum FilterError {
    #[error("cannot compile the rules to a BPF program")]
    Compile(#[from] BackendError),
    #[error("the kernel rejects the BPF program")]
    Install(#[from] seccompiler::Error),
}

/// Limits this thread to the system calls of its role. This cannot be undone.
pub(super) fn install_filter(role: ThreadRole) -> Result<(), FilterError> {
    // Several threads may have the same role. Compiling takes longer than installing.
    static COMPILED: Mutex<Vec<(ThreadRole, BpfProgram)>> = Mutex::new(Vec::new());
    let mut compiled = lock(&COMPILED);
    let program = match compiled.iter().find(|(compiled, _)| *compiled == role) {
        Some((_, program)) => program.clone(),
        None => {
            let program = program(role)?;
            compiled.push((role, program.clone()));
            program
        }
    };
    drop(compiled);
    Ok(apply_filter(&program)?)
}

fn program(role: ThreadRole) -> Result<BpfProgram, BackendError> {
    let allowed = || for_role(role).iter().copied().chain([EVERY_THREAD]).flatten();
    // A call that has an entry without arguments is allowed with any arguments.
    let unconditional: BTreeSet<i64> =
        allowed().filter(|allowed| allowed.arguments.is_empty()).map(|allowed| allowed.call).collect();
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    for allowed in allowed() {
        let alternatives = rules.entry(allowed.call).or_default();
        if !unconditional.contains(&allowed.call) {
            alternatives.push(rule(allowed)?);
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
        io,
        net::UdpSocket,
        os::{fd::AsRawFd, unix::net::UnixDatagram},
        process::Command,
        ptr,
        sync::{Arc, atomic::AtomicBool},
        thread,
    };

    use nix::{
        sched::{CloneFlags, unshare},
        sys::signal::{Signal, kill},
        unistd::{Pid, chroot},
    };
    use vmm_sys_util::eventfd::EventFd;

    use super::*;
    use crate::{
        jail::testing::{End, drill},
        layout::Resources,
        memory,
        virtio::{
            block::{Block, BlockThreads},
            mmio::MmioTransport,
            msix::{Message, Router},
            pci::PciTransport,
        },
    };

    /// A thread with this role is killed when it does `act`.
    fn forbidden<T>(role: ThreadRole, act: impl FnOnce() -> T) {
        let body = || {
            install_filter(role).unwrap();
            act();
        };
        drill(body, End::was_killed);
    }

    #[test]
    fn a_thread_lives_on_with_its_filter() {
        let body = || {
            for role in ThreadRole::ALL {
                let alive = move || {
                    install_filter(role).unwrap();
                    vec![1_u8; 8 << 20].iter().map(|byte| usize::from(*byte)).sum::<usize>()
                };
                assert_eq!(thread::spawn(alive).join().unwrap(), 8 << 20, "{role:?}");
            }
        };
        drill(body, End::succeeds);
    }

    #[test]
    fn no_program_is_executed() {
        forbidden(ThreadRole::Fs, || Command::new("/bin/true").status());
    }

    #[test]
    fn no_thread_is_started() {
        forbidden(ThreadRole::Vcpu, || thread::spawn(|| ()).join());
    }

    #[test]
    fn no_file_is_opened_but_by_the_file_server() {
        forbidden(ThreadRole::Vcpu, || File::open("/dev/null"));
    }

    #[test]
    fn no_network_is_reached() {
        forbidden(ThreadRole::Vsock, || UdpSocket::bind("127.0.0.1:0"));
    }

    #[test]
    fn no_socket_is_made_but_for_the_guests_connections() {
        forbidden(ThreadRole::Net, UnixDatagram::unbound);
    }

    #[test]
    fn no_other_process_gets_a_signal() {
        forbidden(ThreadRole::Control, || kill(Pid::from_raw(1), None::<Signal>));
    }

    #[test]
    #[allow(unsafe_code)]
    fn no_thread_of_another_process_gets_a_signal() {
        // SAFETY: signal 0 only checks whether the thread exists.
        forbidden(ThreadRole::Control, || unsafe { libc::syscall(libc::SYS_tgkill, 1, 1, 0) });
    }

    #[test]
    fn no_namespace_is_left() {
        forbidden(ThreadRole::Fs, || unshare(CloneFlags::CLONE_NEWNS));
    }

    #[test]
    fn no_root_is_changed() {
        forbidden(ThreadRole::Fs, || chroot("/"));
    }

    #[test]
    #[allow(unsafe_code)]
    fn no_memory_becomes_executable() {
        let length = 4096;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: the kernel chooses the address, so the mapping replaces nothing. Nothing uses it.
        let page = unsafe { libc::mmap(ptr::null_mut(), length, libc::PROT_READ, flags, -1, 0) };
        let access = libc::PROT_READ | libc::PROT_EXEC;
        // SAFETY: nothing uses the page above.
        forbidden(ThreadRole::Vcpu, || unsafe { libc::mprotect(page, length, access) });
    }

    #[test]
    #[allow(unsafe_code)]
    fn nothing_is_asked_of_kvm_but_to_run_the_guest() {
        const KVM_GET_API_VERSION: libc::c_ulong = 0xae00;
        let event = EventFd::new(0).unwrap();
        // SAFETY: this request has no argument and changes nothing.
        forbidden(ThreadRole::Vcpu, || unsafe { libc::ioctl(event.as_raw_fd(), KVM_GET_API_VERSION) });
    }

    /// Asks an event, which knows no request of KVM, for KVM_SET_GSI_ROUTING. Returns the error.
    #[allow(unsafe_code)]
    fn route(event: &EventFd) -> io::Error {
        const KVM_SET_GSI_ROUTING: libc::c_ulong = 0x4008_ae6a;
        let table = [0u64];
        // SAFETY: the table is one without entries, and nobody reads it.
        let result = unsafe { libc::ioctl(event.as_raw_fd(), KVM_SET_GSI_ROUTING, table.as_ptr()) };
        assert_eq!(result, -1);
        io::Error::last_os_error()
    }

    #[test]
    fn a_vcpu_routes_no_message_where_there_is_no_bus() {
        let event = EventFd::new(0).unwrap();
        forbidden(ThreadRole::Vcpu, || route(&event));
    }

    #[test]
    fn a_vcpu_routes_the_messages_of_functions() {
        let event = EventFd::new(0).unwrap();
        let body = || {
            let routed = thread::spawn(move || {
                install_filter(ThreadRole::PciVcpu).unwrap();
                route(&event).raw_os_error()
            });
            assert_eq!(routed.join().unwrap(), Some(libc::ENOTTY));
        };
        drill(body, End::succeeds);
    }

    #[test]
    fn the_main_thread_makes_a_device_with_either_transport() {
        struct NoRouter;
        impl Router for NoRouter {
            fn route(&self, _: &[(u32, Message)], _: &AtomicBool) -> io::Result<()> {
                Ok(())
            }
        }
        let body = || {
            let thread = BlockThreads::start(1).unwrap();
            let memory = memory::lay_out(&[(0, 0x10000)], 0).unwrap();
            let made = thread::spawn(move || {
                let files = [(); 2].map(|()| tempfile::tempfile().unwrap());
                files.iter().for_each(|file| file.set_len(4096).unwrap());
                install_filter(ThreadRole::Control).unwrap();
                let [one, other] = files.map(|file| Block::open(file, "a", true, false, &thread).unwrap());
                let resources = Resources { address: 0xd000_0000, gsi: 24 };
                let mmio = MmioTransport::new(Box::new(one), memory.clone(), resources).is_ok();
                let pci = PciTransport::new(Box::new(other), memory, resources, Arc::new(NoRouter));
                mmio && pci.is_ok()
            });
            assert!(made.join().unwrap());
        };
        drill(body, End::succeeds);
    }

    #[test]
    #[allow(unsafe_code)]
    fn nothing_is_asked_of_a_file_but_its_inode_flags() {
        const FS_IOC_SETVERSION: libc::c_ulong = 0x4008_7602;
        let number: libc::c_long = 0;
        // SAFETY: this request reads a number of at most this size, and changes no file: it is killed.
        forbidden(ThreadRole::Fs, || unsafe {
            libc::ioctl(libc::STDOUT_FILENO, FS_IOC_SETVERSION, &raw const number)
        });
    }
}
