//! Programs that the kernel runs for a container: its filter of system calls (seccomp(2)), and which devices its cgroup
//! may use (bpf(2)).

use std::{
    io,
    mem::size_of,
    os::fd::{AsRawFd, BorrowedFd, OwnedFd},
};

use nix::sys::signal::{SigSet, SigmaskHow};
use serde::{Deserialize, Serialize};

use super::result::{check, owned};

/// One instruction of a system call filter, `struct sock_filter`. On its way to the stage it is one number.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "u64", into = "u64")]
pub struct FilterInstruction {
    /// Operation code.
    pub code: u16,
    /// How many instructions a jump skips if its comparison holds.
    pub jump_true: u8,
    /// How many it skips otherwise.
    pub jump_false: u8,
    /// Operand.
    pub constant: u32,
}

impl From<u64> for FilterInstruction {
    fn from(packed: u64) -> Self {
        let code = (packed >> 48) as u16;
        Self {
            code,
            jump_true: (packed >> 40) as u8,
            jump_false: (packed >> 32) as u8,
            constant: packed as u32,
        }
    }
}

impl From<FilterInstruction> for u64 {
    fn from(from: FilterInstruction) -> Self {
        let jumps = u64::from(from.jump_true) << 40 | u64::from(from.jump_false) << 32;
        u64::from(from.code) << 48 | jumps | u64::from(from.constant)
    }
}

/// Puts a system call filter on the calling thread and what becomes of it, with `SECCOMP_FILTER_FLAG_*`. Takes
/// CAP_SYS_ADMIN, or no_new_privs.
pub fn install_filter(program: &[FilterInstruction], flags: u64) -> io::Result<()> {
    const SECCOMP_SET_MODE_FILTER: libc::c_uint = 1;
    #[repr(C)]
    struct Program {
        length: u16,
        instructions: *const FilterInstruction,
    }
    let Ok(length) = u16::try_from(program.len()) else {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    };
    let program = Program { length, instructions: program.as_ptr() };
    // SAFETY: struct sock_fprog, whose pointer is to `length` instructions that live through the call. The kernel
    // copies them and checks the program itself. No wrapper exists in std, nix or libc.
    check(unsafe { libc::syscall(libc::SYS_seccomp, SECCOMP_SET_MODE_FILTER, flags, &raw const program) })
        .map(drop)
}

/// One BPF instruction, `struct bpf_insn`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BpfInstruction {
    /// Operation code.
    pub code: u8,
    /// Destination register in the low four bits, source register in the high four.
    pub registers: u8,
    /// Offset of a jump or a load.
    pub offset: i16,
    /// Constant.
    pub immediate: i32,
}

/// Loads a program that decides on device access. It lives as long as the descriptor, and as what it is attached to.
pub fn load_device_program(program: &[BpfInstruction]) -> io::Result<OwnedFd> {
    const BPF_PROG_LOAD: libc::c_int = 5;
    const BPF_PROG_TYPE_CGROUP_DEVICE: u32 = 15;
    #[repr(C)]
    struct Load {
        program_type: u32,
        instruction_count: u32,
        instructions: u64,
        license: u64,
        log_level: u32,
        log_size: u32,
        log: u64,
        kernel_version: u32,
        flags: u32,
    }
    let load = Load {
        program_type: BPF_PROG_TYPE_CGROUP_DEVICE,
        instruction_count: program.len() as u32,
        instructions: program.as_ptr() as u64,
        license: c"Apache-2.0".as_ptr() as u64,
        log_level: 0,
        log_size: 0,
        log: 0,
        kernel_version: 0,
        flags: 0,
    };
    // The verifier gives up with EAGAIN when a signal is pending, as that of a child's end may be: it waits until
    // after.
    let before = SigSet::all().thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
    // SAFETY: the leading fields of union bpf_attr for BPF_PROG_LOAD; the instructions and the license, which it
    // points to, live through the call. The kernel's verifier decides on the program itself.
    let loaded = unsafe { libc::syscall(libc::SYS_bpf, BPF_PROG_LOAD, &raw const load, size_of::<Load>()) };
    let loaded = owned(loaded);
    before.thread_set_mask()?;
    loaded
}

/// Attaches a program of [`load_device_program`] to the cgroup v2 directory `cgroup`, in place of `replaced` if there
/// is one. Cgroups below can have programs of their own; all of them must allow an access.
pub fn attach_device_program(
    program: BorrowedFd<'_>,
    cgroup: BorrowedFd<'_>,
    replaced: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    const BPF_PROG_ATTACH: libc::c_int = 8;
    const BPF_CGROUP_DEVICE: u32 = 6;
    const BPF_F_ALLOW_MULTI: u32 = 1 << 1;
    const BPF_F_REPLACE: u32 = 1 << 2;
    #[repr(C)]
    struct Attach {
        target: u32,
        program: u32,
        attach_type: u32,
        flags: u32,
        replaced: u32,
    }
    let attach = Attach {
        target: cgroup.as_raw_fd() as u32,
        program: program.as_raw_fd() as u32,
        attach_type: BPF_CGROUP_DEVICE,
        flags: BPF_F_ALLOW_MULTI | if replaced.is_some() { BPF_F_REPLACE } else { 0 },
        replaced: replaced.map_or(0, |program| program.as_raw_fd() as u32),
    };
    // SAFETY: the leading fields of union bpf_attr for BPF_PROG_ATTACH, integers only.
    check(unsafe { libc::syscall(libc::SYS_bpf, BPF_PROG_ATTACH, &raw const attach, size_of::<Attach>()) })
        .map(drop)
}
