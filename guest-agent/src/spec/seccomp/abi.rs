//! The two sets of system calls of the guest's kernel: that of 64-bit programs, and that of 32-bit ones.

use syscalls::{x86, x86_64};

use crate::seccomp_filter::{Condition, Relation};

/// A set of system calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Abi {
    X86_64,
    X86,
}

/// Where in a set a call is found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Target {
    pub(super) number: u32,
    /// The call shares its number with others, and is chosen by this condition.
    pub(super) selector: Option<Condition>,
}

/// What socketcall(2) takes as its first argument (linux/net.h).
const SOCKET_CALLS: [&str; 20] = [
    "socket",
    "bind",
    "connect",
    "listen",
    "accept",
    "getsockname",
    "getpeername",
    "socketpair",
    "send",
    "recv",
    "sendto",
    "recvfrom",
    "shutdown",
    "setsockopt",
    "getsockopt",
    "sendmsg",
    "recvmsg",
    "accept4",
    "recvmmsg",
    "sendmmsg",
];

/// What ipc(2) takes as its first argument (linux/ipc.h).
const IPC_CALLS: [(&str, u64); 12] = [
    ("semop", 1),
    ("semget", 2),
    ("semctl", 3),
    ("semtimedop", 4),
    ("msgsnd", 11),
    ("msgrcv", 12),
    ("msgget", 13),
    ("msgctl", 14),
    ("shmat", 21),
    ("shmdt", 22),
    ("shmget", 23),
    ("shmctl", 24),
];

impl Abi {
    /// AUDIT_ARCH_* (linux/audit.h).
    pub(super) fn architecture(self) -> u32 {
        match self {
            Self::X86_64 => 0xc000_003e,
            Self::X86 => 0x4000_0003,
        }
    }

    /// Where this call is found; nowhere, if the set does not have it.
    pub(super) fn targets(self, name: &str) -> Vec<Target> {
        let plain = |number: i32| Target { number: number as u32, selector: None };
        match self {
            Self::X86_64 => name.parse::<x86_64::Sysno>().map(|call| plain(call.id())).into_iter().collect(),
            Self::X86 => {
                let direct = name.parse::<x86::Sysno>().map(|call| plain(call.id()));
                direct.into_iter().chain(shared(name)).collect()
            }
        }
    }

    /// The condition, for arguments as wide as those of the set.
    pub(super) fn narrow(self, condition: Condition) -> Condition {
        match self {
            Self::X86_64 => condition,
            Self::X86 => Condition { value: condition.value & u64::from(u32::MAX), ..condition },
        }
    }
}

/// The way to a call through socketcall(2) or ipc(2), which a filter cannot follow any further: the arguments of
/// the call are in memory. So a rule with conditions on them speaks of all such calls, as with libseccomp.
fn shared(name: &str) -> Option<Target> {
    let through = |call: x86::Sysno, mask: u64, value: u64| {
        let relation = Relation::Equal { mask };
        let selector = Condition { argument: 0, relation, value, negated: false };
        Target { number: call.id() as u32, selector: Some(selector) }
    };
    if let Some(index) = SOCKET_CALLS.iter().position(|call| *call == name) {
        return Some(through(x86::Sysno::socketcall, 0xffff_ffff, index as u64 + 1));
    }
    let (_, value) = IPC_CALLS.iter().find(|(call, _)| *call == name)?;
    // Above the call is a version.
    Some(through(x86::Sysno::ipc, 0xffff, *value))
}
