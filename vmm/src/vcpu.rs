//! vCPUs: a thread each, which runs the guest and answers its exits.

use std::{
    cell::Cell,
    io, mem,
    ptr::{self, NonNull},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU8, Ordering},
        mpsc::channel,
    },
    thread::JoinHandle,
};

use kvm_ioctls::{VcpuExit, VcpuFd};
use vmm_sys_util::{
    eventfd::{EFD_NONBLOCK, EventFd},
    signal::{Killable, SIGRTMIN, register_signal_handler},
};

use crate::{
    bus::Bus,
    jail::{self, Duty, JailError, ThreadError},
    lock,
};

/// How the guest ended.
#[derive(Debug, thiserror::Error)]
pub enum GuestExit {
    /// As it wanted to.
    #[error("the guest powered off")]
    PowerOff,
    #[error("the guest crashed: triple fault on vCPU {vcpu} (turn its console on to see why)")]
    TripleFault { vcpu: u8 },
    #[error("KVM could not run the guest: internal error {code} on vCPU {vcpu}")]
    KvmInternalError { vcpu: u8, code: u32 },
    #[error("KVM could not run the guest: the processor refused to enter vCPU {vcpu}, reason {reason:#x}")]
    EntryRefused { vcpu: u8, reason: u64 },
    #[error(
        "KVM could not run the guest: vCPU {vcpu} left with an exit that the VMM never asked for: {exit}"
    )]
    UnexpectedExit { vcpu: u8, exit: String },
    #[error("KVM could not run the guest: vCPU {vcpu} failed")]
    RunFailed { vcpu: u8, source: kvm_ioctls::Error },
}

/// Tells the VM's owner that, and how, the guest ended.
pub struct ExitEvent {
    event: EventFd,
    first: Mutex<Option<GuestExit>>,
}

impl ExitEvent {
    /// Nothing has happened yet.
    pub fn new() -> io::Result<Self> {
        Ok(Self { event: EventFd::new(EFD_NONBLOCK | libc::EFD_CLOEXEC)?, first: Mutex::new(None) })
    }

    /// The guest has ended. Only the first time counts: one cause may show in several vCPUs.
    pub fn set(&self, exit: GuestExit) {
        lock(&self.first).get_or_insert(exit);
        // Fails only when the counter is full: it is readable then.
        let _ = self.event.write(1);
    }

    /// What happened, once.
    pub fn take(&self) -> Option<GuestExit> {
        lock(&self.first).take()
    }

    /// Readable from the first [`ExitEvent::set`] on.
    pub fn event(&self) -> &EventFd {
        &self.event
    }
}

/// What a vCPU talks to.
#[derive(Clone)]
pub struct Machine {
    /// Memory-mapped devices.
    pub mmio: Arc<Bus>,
    /// Devices at I/O ports.
    pub ports: Arc<Bus>,
    /// Hears of the guest's end.
    pub exit: Arc<ExitEvent>,
}

/// Why there is no thread for a vCPU.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("cannot start the vCPUs")]
    Signal(#[source] io::Error),
    #[error("cannot start the vCPUs")]
    Thread(#[from] ThreadError),
    #[error(transparent)]
    Jail(#[from] JailError),
    #[error("vCPU {id} ended before it ran")]
    Ended { id: u8 },
}

/// Running vCPUs. Dropping it stops and joins them.
pub struct VcpuThreads {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
    /// Those that have stopped, with their ids.
    stopped: Arc<Mutex<Vec<(u8, VcpuFd)>>>,
}

impl VcpuThreads {
    /// Closes this thread in, which has the duty `own`, and a thread for each of `vcpus`, in the order of their ids from 0.
    /// Then lets them run.
    pub fn start(vcpus: Vec<VcpuFd>, machine: &Machine, own: Duty) -> Result<Self, StartError> {
        register_signal_handler(kick_signal(), on_kick)
            .map_err(|error| StartError::Signal(io::Error::from_raw_os_error(error.errno())))?;
        let mut running = Self { stop: Arc::default(), threads: Vec::new(), stopped: Arc::default() };
        // Each thread waits for its gate: a guest that runs shall find no door that is still open.
        let mut gates = Vec::new();
        for (id, fd) in (0..).zip(vcpus) {
            let mut vcpu = Vcpu { id, fd, machine: machine.clone(), stop: running.stop.clone() };
            let stopped = running.stopped.clone();
            let (gate, opened) = channel::<()>();
            // A gate that nobody opens: the VM does not start.
            let body = move || {
                if opened.recv().is_ok() {
                    vcpu.run();
                }
                lock(&stopped).push((id, vcpu.fd));
            };
            running.threads.push(jail::spawn(format!("{}{id}", Duty::Vcpu.name()), Duty::Vcpu, body)?);
            gates.push(gate);
        }
        jail::enter_thread(own)?;
        for (id, gate) in (0..).zip(gates) {
            gate.send(()).map_err(|_| StartError::Ended { id })?;
        }
        Ok(running)
    }

    /// Stops the vCPUs where they are, and returns them in the order of their ids.
    pub fn stop(mut self) -> Vec<VcpuFd> {
        self.join();
        let mut stopped = std::mem::take(&mut *lock(&self.stopped));
        stopped.sort_by_key(|(id, _)| *id);
        stopped.into_iter().map(|(_, fd)| fd).collect()
    }

    fn join(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        for thread in self.threads.drain(..) {
            // The thread lives until it is joined, so there is somebody to signal.
            let _ = thread.kill(kick_signal());
            let _ = thread.join();
        }
    }
}

impl Drop for VcpuThreads {
    fn drop(&mut self) {
        self.join();
    }
}

/// Why a vCPU left the guest.
enum Left {
    /// It needed an answer, and got it.
    Answered,
    /// A signal, which perhaps means that it shall stop.
    Interrupted,
    /// It cannot go on.
    Ended(GuestExit),
}

struct Vcpu {
    id: u8,
    fd: VcpuFd,
    machine: Machine,
    stop: Arc<AtomicBool>,
}

impl Vcpu {
    fn run(&mut self) {
        let _kickable = Kickable::new(&mut self.fd);
        loop {
            let stopping = self.stop.load(Ordering::SeqCst);
            if stopping {
                // Once more, for KVM to take the last answer: an instruction that made the vCPU leave the guest is not over
                // before that, and its state would be half of one and half of the next (Linux,
                // Documentation/virt/kvm/api.rst, KVM_RUN).
                self.fd.set_kvm_immediate_exit(1);
            }
            match self.run_once() {
                Left::Ended(exit) => return self.machine.exit.set(exit),
                Left::Interrupted if stopping => return,
                Left::Interrupted | Left::Answered => {}
            }
        }
    }

    /// Runs the guest until it needs an answer, and gives it.
    fn run_once(&mut self) -> Left {
        let vcpu = self.id;
        let ended = match self.fd.run() {
            Ok(VcpuExit::MmioRead(address, data)) => {
                self.machine.mmio.read(address, data);
                return Left::Answered;
            }
            Ok(VcpuExit::MmioWrite(address, data)) => {
                self.machine.mmio.write(address, data);
                return Left::Answered;
            }
            Ok(VcpuExit::IoIn(port, data)) => {
                self.machine.ports.read(port.into(), data);
                return Left::Answered;
            }
            Ok(VcpuExit::IoOut(port, data)) => {
                self.machine.ports.write(port.into(), data);
                return Left::Answered;
            }
            Ok(VcpuExit::Intr) => return Left::Interrupted,
            Err(error) if matches!(error.errno(), libc::EINTR | libc::EAGAIN) => return Left::Interrupted,
            Ok(VcpuExit::Shutdown) => GuestExit::TripleFault { vcpu },
            Ok(VcpuExit::FailEntry(reason, _)) => GuestExit::EntryRefused { vcpu, reason },
            Ok(VcpuExit::InternalError) => GuestExit::KvmInternalError { vcpu, code: self.internal_error() },
            Ok(exit) => GuestExit::UnexpectedExit { vcpu, exit: format!("{exit:?}") },
            Err(source) => GuestExit::RunFailed { vcpu, source },
        };
        Left::Ended(ended)
    }

    /// KVM_INTERNAL_ERROR_*: 1 is an instruction that KVM cannot emulate.
    #[allow(unsafe_code)]
    fn internal_error(&mut self) -> u32 {
        // SAFETY: KVM_RUN has just returned KVM_EXIT_INTERNAL_ERROR, for which this member of the union is
        // the one that is filled in; it consists of integers, so any content is valid. kvm-ioctls does not
        // expose it.
        unsafe { self.fd.get_kvm_run().__bindgen_anon_1.internal.suberror }
    }
}

/// The signal that takes a vCPU out of the guest. Above those that the C library uses.
fn kick_signal() -> libc::c_int {
    SIGRTMIN()
}

thread_local! {
    /// `immediate_exit` of this thread's vCPU, null in all other threads.
    static IMMEDIATE_EXIT: Cell<*const AtomicU8> = const { Cell::new(ptr::null()) };
}

/// While it lives, the kick signal takes this thread's vCPU out of KVM_RUN, or out of the next one if it
/// comes just before: a signal alone would be lost then.
struct Kickable;

impl Kickable {
    fn new(fd: &mut VcpuFd) -> Self {
        const { assert!(mem::size_of::<AtomicU8>() == mem::size_of::<u8>()) };
        let flag = NonNull::from(&mut fd.get_kvm_run().immediate_exit).cast::<AtomicU8>();
        IMMEDIATE_EXIT.set(flag.as_ptr());
        Self
    }
}

impl Drop for Kickable {
    fn drop(&mut self) {
        IMMEDIATE_EXIT.set(ptr::null());
    }
}

/// Runs in the thread that is kicked, and does nothing but one store.
#[allow(unsafe_code)]
extern "C" fn on_kick(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
    let flag = IMMEDIATE_EXIT.get();
    // SAFETY: the pointer is null or points into the kvm_run mapping of this thread's vCPU, which lives
    // longer than the `Kickable` that set it and clears it. The flag is a byte that KVM reads at any time,
    // hence atomic. The thread-local has a constant initial value and no destructor, so that reading it is
    // safe in a signal handler. Safe code has no way to reach a vCPU that its thread has lent to KVM_RUN.
    if let Some(flag) = unsafe { flag.as_ref() } {
        flag.store(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_end_is_the_one_that_counts() {
        let exit = ExitEvent::new().unwrap();
        assert!(exit.event().read().is_err());
        exit.set(GuestExit::TripleFault { vcpu: 1 });
        exit.set(GuestExit::PowerOff);
        assert!(exit.event().read().is_ok());
        assert!(matches!(exit.take(), Some(GuestExit::TripleFault { vcpu: 1 })));
    }
}
