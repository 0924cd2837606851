//! vCPUs. Each has a thread that runs the guest and handles its exits.

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
    jail::{self, JailError, ThreadError, ThreadRole},
    lock,
};

/// Why the guest ended.
#[derive(Debug, thiserror::Error)]
pub enum GuestExit {
    /// It reset, which it also does after a panic and instead of a power-off.
    #[error("the guest reset")]
    Reset,
    #[error("the guest crashed: triple fault on vCPU {vcpu}")]
    TripleFault { vcpu: u8 },
    #[error("KVM could not run the guest: internal error {code} on vCPU {vcpu}")]
    KvmInternalError { vcpu: u8, code: u32 },
    #[error("KVM could not run the guest: the processor refused to enter vCPU {vcpu}, reason {reason:#x}")]
    EntryRefused { vcpu: u8, reason: u64 },
    #[error("KVM could not run the guest: vCPU {vcpu} had an unexpected exit: {exit}")]
    UnexpectedExit { vcpu: u8, exit: String },
    #[error("KVM could not run the guest: vCPU {vcpu} failed")]
    RunFailed { vcpu: u8, source: kvm_ioctls::Error },
}

/// Tells the main thread that the guest has ended, and why.
pub struct ExitEvent {
    event: EventFd,
    first: Mutex<Option<GuestExit>>,
}

impl ExitEvent {
    /// The guest has not ended yet.
    pub fn new() -> io::Result<Self> {
        Ok(Self { event: EventFd::new(EFD_NONBLOCK | libc::EFD_CLOEXEC)?, first: Mutex::new(None) })
    }

    /// The guest has ended. Only the first call counts, because several vCPUs may report the same cause.
    pub fn set(&self, exit: GuestExit) {
        lock(&self.first).get_or_insert(exit);
        // Fails only if the counter is full, and then the event is readable already.
        let _ = self.event.write(1);
    }

    /// Takes the reason. Returns it once.
    pub fn take(&self) -> Option<GuestExit> {
        lock(&self.first).take()
    }

    /// Readable after [`ExitEvent::set`].
    pub fn event(&self) -> &EventFd {
        &self.event
    }
}

/// What a vCPU accesses by its exits.
#[derive(Clone)]
pub struct GuestIo {
    /// Memory-mapped devices.
    pub mmio: Arc<Bus>,
    /// Devices at I/O ports.
    pub ports: Arc<Bus>,
    /// Set when the guest ends.
    pub exit: Arc<ExitEvent>,
}

/// Why the vCPUs did not start.
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
    /// The vCPUs that have stopped, with their ids.
    stopped: Arc<Mutex<Vec<(u8, VcpuFd)>>>,
}

impl VcpuThreads {
    /// Starts a thread for each of `vcpus`, which have the ids from 0 on. They run the guest when all of them and the
    /// calling thread, which has the role `own`, have entered their jails. The threads of the vCPUs have the role
    /// `role`.
    pub fn start(
        vcpus: Vec<VcpuFd>,
        io: &GuestIo,
        role: ThreadRole,
        own: ThreadRole,
    ) -> Result<Self, StartError> {
        register_signal_handler(kick_signal(), on_kick)
            .map_err(|error| StartError::Signal(io::Error::from_raw_os_error(error.errno())))?;
        let mut running = Self { stop: Arc::default(), threads: Vec::new(), stopped: Arc::default() };
        // The guest must not run while a thread is still outside of its jail. So each thread waits until its gate
        // opens.
        let mut gates = Vec::new();
        for (id, fd) in (0..).zip(vcpus) {
            let mut vcpu = Vcpu { id, fd, io: io.clone(), stop: running.stop.clone() };
            let stopped = running.stopped.clone();
            let (gate, opened) = channel::<()>();
            // An error means that the VM does not start.
            let body = move || {
                if opened.recv().is_ok() {
                    vcpu.run();
                }
                lock(&stopped).push((id, vcpu.fd));
            };
            running.threads.push(jail::spawn(format!("{}{id}", role.name()), role, body)?);
            gates.push(gate);
        }
        jail::enter_thread(own)?;
        for (id, gate) in (0..).zip(gates) {
            gate.send(()).map_err(|_| StartError::Ended { id })?;
        }
        Ok(running)
    }

    /// Stops the vCPUs, and returns them in the order of their ids.
    pub fn stop(mut self) -> Vec<VcpuFd> {
        self.join();
        let mut stopped = std::mem::take(&mut *lock(&self.stopped));
        stopped.sort_by_key(|(id, _)| *id);
        stopped.into_iter().map(|(_, fd)| fd).collect()
    }

    fn join(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        for thread in self.threads.drain(..) {
            // A thread that has ended can still be signalled, because it was not joined yet.
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

/// How the VMM has handled an exit of a vCPU.
enum ExitHandling {
    /// The access was performed. The guest continues.
    Done,
    /// A signal interrupted the vCPU. The vCPU may have to stop.
    Interrupted,
    /// The guest cannot continue.
    GuestEnded(GuestExit),
}

struct Vcpu {
    id: u8,
    fd: VcpuFd,
    io: GuestIo,
    stop: Arc<AtomicBool>,
}

impl Vcpu {
    fn run(&mut self) {
        let _kickable = Kickable::new(&mut self.fd);
        loop {
            let stopping = self.stop.load(Ordering::SeqCst);
            if stopping {
                // KVM completes the instruction that caused the last exit only in the next KVM_RUN. Without this the
                // state of the vCPU would be that in the middle of an instruction (Linux,
                // Documentation/virt/kvm/api.rst, KVM_RUN).
                self.fd.set_kvm_immediate_exit(1);
            }
            match self.run_once() {
                ExitHandling::GuestEnded(exit) => return self.io.exit.set(exit),
                ExitHandling::Interrupted if stopping => return,
                ExitHandling::Interrupted | ExitHandling::Done => {}
            }
        }
    }

    /// Runs the guest until its next exit, and handles that.
    fn run_once(&mut self) -> ExitHandling {
        let vcpu = self.id;
        let ended = match self.fd.run() {
            Ok(VcpuExit::MmioRead(address, data)) => {
                self.io.mmio.read(address, data);
                return ExitHandling::Done;
            }
            Ok(VcpuExit::MmioWrite(address, data)) => {
                self.io.mmio.write(address, data);
                return ExitHandling::Done;
            }
            Ok(VcpuExit::IoIn(port, data)) => {
                self.io.ports.read(port.into(), data);
                return ExitHandling::Done;
            }
            Ok(VcpuExit::IoOut(port, data)) => {
                self.io.ports.write(port.into(), data);
                return ExitHandling::Done;
            }
            Ok(VcpuExit::Intr) => return ExitHandling::Interrupted,
            Err(error) if matches!(error.errno(), libc::EINTR | libc::EAGAIN) => {
                return ExitHandling::Interrupted;
            }
            Ok(VcpuExit::Shutdown) => GuestExit::TripleFault { vcpu },
            Ok(VcpuExit::FailEntry(reason, _)) => GuestExit::EntryRefused { vcpu, reason },
            Ok(VcpuExit::InternalError) => GuestExit::KvmInternalError { vcpu, code: self.internal_error() },
            Ok(exit) => GuestExit::UnexpectedExit { vcpu, exit: format!("{exit:?}") },
            Err(source) => GuestExit::RunFailed { vcpu, source },
        };
        ExitHandling::GuestEnded(ended)
    }

    /// The code of an internal error (KVM_INTERNAL_ERROR_*). 1 means that KVM cannot emulate an instruction.
    #[allow(unsafe_code)]
    fn internal_error(&mut self) -> u32 {
        // SAFETY: KVM_RUN has just returned KVM_EXIT_INTERNAL_ERROR, so KVM has filled this member of the union. It
        // consists of integers, so any content is valid. kvm-ioctls has no safe function for it.
        unsafe { self.fd.get_kvm_run().__bindgen_anon_1.internal.suberror }
    }
}

/// The signal that makes a vCPU leave the guest. The C library does not use it.
fn kick_signal() -> libc::c_int {
    SIGRTMIN()
}

thread_local! {
    /// The `immediate_exit` flag of this thread's vCPU. Null in all other threads.
    static IMMEDIATE_EXIT: Cell<*const AtomicU8> = const { Cell::new(ptr::null()) };
}

/// While this exists, the kick signal makes this thread's vCPU leave KVM_RUN. If the signal arrives just before
/// KVM_RUN, it makes KVM_RUN return at once: a signal without the flag would be lost then.
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

/// The signal handler. It makes a single store.
#[allow(unsafe_code)]
extern "C" fn on_kick(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
    let flag = IMMEDIATE_EXIT.get();
    // SAFETY: the pointer is null or points into the kvm_run mapping of this thread's vCPU. The mapping lives longer
    // than the `Kickable` that sets and clears the pointer. KVM may read the flag at any time, so the store is
    // atomic. The thread-local has a constant initial value and no destructor, so a signal handler may read it. Safe
    // code cannot access a vCPU that its thread has borrowed for KVM_RUN.
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
        exit.set(GuestExit::Reset);
        assert!(exit.event().read().is_ok());
        assert!(matches!(exit.take(), Some(GuestExit::TripleFault { vcpu: 1 })));
    }
}
