//! The driver of a device, legal or not.

use std::{
    backtrace::Backtrace,
    fs,
    io::{self, Write},
    panic,
    path::{Path, PathBuf},
    process,
    sync::{Arc, Once},
    thread,
    time::{Duration, Instant},
};

use bulkhead_vmm::{
    GuestMemory,
    layout::{FIRST_VIRTIO_GSI, Resources, VIRTIO_MMIO_START},
    memory,
    virtio::{VirtioDevice, mmio::MmioTransport, slot::Transport},
};
use nix::sys::signal::{SigHandler, Signal, signal};
use vm_memory::{Bytes, GuestAddress};

use crate::{input::Input, meddle};

/// Two ranges of memory with a hole between them, so that a buffer may end outside of memory.
pub const PIECES: [(u64, u64); 2] = [(0, 0x8_0000), (0x10_0000, 0x8_0000)];
/// The address of the buffers. The rings are below it.
pub const BUFFERS: u64 = 0x10_0000;
/// Bytes from there to the end of the memory.
pub const BUFFERS_LEN: u64 = 0x8_0000;
/// The rings of queue N start at N + 1 times this.
const RINGS: u64 = 0x1_0000;
const AVAIL: u64 = 0x8000;
const USED: u64 = 0xa000;

/// A request that takes longer counts as a hang.
const PATIENCE: Duration = Duration::from_secs(20);

/// The system calls in which the thread of a device is idle: epoll_wait while the device is active, and futex while
/// it is not.
const EPOLL_WAIT: &str = "232 ";
const FUTEX: &str = "202 ";

/// Registers (virtio 1.3, 4.2.2) that are written more often than other addresses.
const REGISTERS: [u64; 17] = [
    0x014, 0x020, 0x024, 0x030, 0x038, 0x044, 0x050, 0x064, 0x070, 0x080, 0x084, 0x090, 0x094, 0x0a0, 0x0a4,
    0x0fc, 0x100,
];
const STATUS: u64 = 0x070;
const DRIVER_OK: u32 = 15;

/// Flags of a descriptor (virtio 1.3, 2.7.5).
const NEXT: u16 = 1;
const WRITE: u16 = 2;

/// A buffer of a chain.
#[derive(Debug, Clone, Copy)]
pub struct Buffer {
    pub address: u64,
    pub len: u32,
    /// Whether the device writes to it.
    pub write: bool,
}

/// A device, its transport and the memory of its guest.
pub struct Guest {
    transport: Arc<dyn Transport>,
    memory: GuestMemory,
    /// The name of the device's threads, by which they are found. There is one guest at a time.
    worker: &'static str,
    /// The directories in /proc of the threads, after the first start.
    threads: Vec<PathBuf>,
    sizes: Vec<u16>,
    next_avail: Vec<u16>,
    next_descriptor: Vec<u16>,
}

impl Guest {
    /// Connects the device to a guest. Its driver has not done anything yet.
    pub fn new(device: Box<dyn VirtioDevice>, worker: &'static str) -> io::Result<Self> {
        Self::with_memory(memory::lay_out(&PIECES, 0).map_err(io::Error::other)?, device, worker)
    }

    /// Does the same for a guest whose memory has [`PIECES`], and may have more above them.
    pub fn with_memory(
        memory: GuestMemory,
        device: Box<dyn VirtioDevice>,
        worker: &'static str,
    ) -> io::Result<Self> {
        behave_as_the_vmm();
        let sizes = device.queue_sizes().to_vec();
        let resources = Resources { address: VIRTIO_MMIO_START, gsi: FIRST_VIRTIO_GSI };
        let transport = MmioTransport::new(device, memory.clone(), resources).map_err(io::Error::other)?;
        let transport = Arc::new(transport);
        let next_avail = vec![0; sizes.len()];
        meddle::begin(&memory);
        Ok(Self {
            transport,
            memory,
            worker,
            threads: Vec::new(),
            next_descriptor: next_avail.clone(),
            sizes,
            next_avail,
        })
    }

    /// The transport of the device.
    pub fn transport(&self) -> &Arc<dyn Transport> {
        &self.transport
    }

    /// Writes a register.
    pub fn write_register(&self, offset: u64, value: u32) {
        self.transport.write(offset, &value.to_le_bytes());
    }

    fn read_register(&self, offset: u64) -> u32 {
        let mut data = [0xff; 4];
        self.transport.read(offset, &mut data);
        u32::from_le_bytes(data)
    }

    /// Resets and initializes the device with all of its features and queues, as a legal driver does.
    pub fn start(&mut self) {
        meddle::begin(&self.memory);
        meddle::not_during(|| self.initialize());
    }

    fn initialize(&mut self) {
        self.write_register(STATUS, 0);
        self.settle();
        let zeros = [0; 0x1000];
        for page in (0..RINGS * (self.sizes.len() as u64 + 1)).step_by(zeros.len()) {
            self.write(page, &zeros);
        }
        self.next_avail.fill(0);
        self.next_descriptor.fill(0);
        self.write_register(STATUS, 1);
        self.write_register(STATUS, 3);
        for word in [0, 1] {
            self.write_register(0x014, word);
            let offered = self.read_register(0x010);
            self.write_register(0x024, word);
            self.write_register(0x020, offered);
        }
        self.write_register(STATUS, 11);
        for (index, size) in (0u32..).zip(self.sizes.clone()) {
            let base = RINGS as u32 * (index + 1);
            let places = [(0x080, base), (0x090, base + AVAIL as u32), (0x0a0, base + USED as u32)];
            self.write_register(0x030, index);
            self.write_register(0x038, size.into());
            places.iter().for_each(|(register, address)| self.write_register(*register, *address));
            self.write_register(0x044, 1);
        }
        self.write_register(STATUS, DRIVER_OK);
        assert_eq!(
            self.read_register(STATUS),
            DRIVER_OK,
            "a driver that keeps to the rules is taken for broken"
        );
        self.threads = self.find_threads();
    }

    /// From now on the driver is legal.
    pub fn behave(&self) {
        self.settle();
        meddle::end();
    }

    /// The directories of the device's threads. Waits until the threads are idle, because they have no name before they
    /// run.
    fn find_threads(&self) -> Vec<PathBuf> {
        let deadline = Instant::now() + PATIENCE;
        // A thread of an ordinary test has the name of the test, which may be that of the device too. It has no filter
        // of system calls.
        let has = |task: &Path, file: &str, line: &str| {
            fs::read_to_string(task.join(file)).is_ok_and(|text| text.lines().any(|it| it == line))
        };
        let is_worker = |task: &PathBuf| has(task, "comm", self.worker) && has(task, "status", "Seccomp:\t2");
        loop {
            let tasks = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
            let workers: Vec<_> = tasks.map(|task| task.path()).filter(is_worker).collect();
            if !workers.is_empty() && workers.iter().all(|task| sleeps_in(task, &[EPOLL_WAIT])) {
                return workers;
            }
            assert!(Instant::now() < deadline, "there is no thread {} that waits", self.worker);
            thread::yield_now();
        }
    }

    /// Writes to guest memory. Addresses that are not memory are ignored.
    pub fn write(&self, address: u64, bytes: &[u8]) {
        // An address that is not memory cannot be written, not even by a guest.
        let _ = self.memory.write(bytes, GuestAddress(address));
    }

    /// Reads from guest memory. Addresses that are not memory read as zeros.
    pub fn read(&self, address: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let _ = self.memory.read(&mut bytes, GuestAddress(address));
        bytes
    }

    /// Makes a chain of buffers available. Descriptors are used in turn, even if the device has not used them yet.
    pub fn offer(&mut self, queue: usize, buffers: &[Buffer]) {
        let size = self.sizes[queue];
        let head = self.next_descriptor[queue];
        let mut place = head;
        for (index, buffer) in buffers.iter().enumerate() {
            let next = (place + 1) % size;
            let more = if index + 1 < buffers.len() { NEXT } else { 0 };
            let flags = more | if buffer.write { WRITE } else { 0 };
            self.describe(queue, place, (buffer.address, buffer.len, flags, next));
            place = next;
        }
        self.next_descriptor[queue] = place;
        self.publish(queue, head);
    }

    /// Writes a descriptor: its address, length, flags and next.
    fn describe(&self, queue: usize, place: u16, (address, len, flags, next): (u64, u32, u16, u16)) {
        let mut descriptor = [0; 16];
        descriptor[..8].copy_from_slice(&address.to_le_bytes());
        descriptor[8..12].copy_from_slice(&len.to_le_bytes());
        descriptor[12..14].copy_from_slice(&flags.to_le_bytes());
        descriptor[14..].copy_from_slice(&next.to_le_bytes());
        self.write(self.rings(queue) + 16 * u64::from(place), &descriptor);
    }

    /// Makes the chain that starts at `head` available.
    fn publish(&mut self, queue: usize, head: u16) {
        let avail = self.rings(queue) + AVAIL;
        let slot = u64::from(self.next_avail[queue] % self.sizes[queue]);
        self.write(avail + 4 + 2 * slot, &head.to_le_bytes());
        self.next_avail[queue] = self.next_avail[queue].wrapping_add(1);
        self.write(avail + 2, &self.next_avail[queue].to_le_bytes());
    }

    fn rings(&self, queue: usize) -> u64 {
        RINGS * (queue as u64 + 1)
    }

    /// How many chains the device has used so far, modulo 2^16.
    pub fn used(&self, queue: usize) -> u16 {
        let index = self.read(self.rings(queue) + USED + 2, 2);
        u16::from_le_bytes([index[0], index[1]])
    }

    /// How many bytes the device has written to the chain that it used last.
    pub fn written(&self, queue: usize) -> u32 {
        let slot = u64::from(self.used(queue).wrapping_sub(1) % self.sizes[queue]);
        let len = self.read(self.rings(queue) + USED + 4 + 8 * slot + 4, 4);
        u32::from_le_bytes([len[0], len[1], len[2], len[3]])
    }

    /// Notifies the device, and waits until it is idle.
    pub fn kick(&self, queue: usize) {
        // KVM signals the eventfd like this. It does not write to the register.
        if let Some(kick) = self.transport.core().kicks().get(queue) {
            let _ = kick.write(1);
        }
        self.settle();
    }

    /// Waits until the device's threads are idle or have ended. This makes each run of a program the same. One that the
    /// first of them wakes comes after it.
    pub fn settle(&self) {
        let deadline = Instant::now() + PATIENCE;
        let is_busy = |thread: &PathBuf| thread.exists() && !sleeps_in(thread, &[EPOLL_WAIT, FUTEX]);
        while self.threads.iter().any(is_busy) {
            assert!(Instant::now() < deadline, "the thread {} does not come to rest", self.worker);
            thread::yield_now();
        }
    }

    /// Does something that no driver does.
    pub fn misbehave(&mut self, input: &mut Input) {
        let queue = input.below(self.sizes.len() + 1);
        let known = queue.min(self.sizes.len() - 1);
        match input.below(8) {
            0 => self.write_register(input.choose(&REGISTERS), input.u32()),
            1 => self.transport.write(u64::from(input.u16() % 0x200), input.bytes(8)),
            2 => self.transport.read(u64::from(input.u16() % 0x200), &mut vec![0xff; input.below(9)]),
            3 => self.write(u64::from(input.u32()) % (BUFFERS + BUFFERS_LEN), input.bytes(16)),
            4 => {
                let place = input.u16() % self.sizes[known];
                let address = BUFFERS + u64::from(input.u32()) % (2 * BUFFERS_LEN);
                self.describe(known, place, (address, input.u32(), input.u16(), input.u16()));
            }
            5 => self.publish(known, input.u16()),
            6 => self.write(self.rings(known) + AVAIL + 2, &input.u16().to_le_bytes()),
            _ => self.kick(queue),
        }
        self.settle();
    }
}

/// Whether a thread sleeps in one of these system calls (proc_pid_stat(5), proc_pid_syscall(5)). The state is read
/// first, because a thread that is being woken is still in its system call but not asleep.
fn sleeps_in(thread: &Path, calls: &[&str]) -> bool {
    let asleep = fs::read_to_string(thread.join("stat"))
        .is_ok_and(|stat| stat.rsplit_once(')').is_some_and(|(_, fields)| fields.starts_with(" S")));
    let is_one = |call: String| calls.iter().any(|number| call.starts_with(number));
    asleep && fs::read_to_string(thread.join("syscall")).is_ok_and(is_one)
}

/// Makes the process behave like the VMM: a panic of any thread ends it, and a write to a pipe without a reader is an
/// error. A test would continue after a panic of another thread, and libFuzzer does not ignore SIGPIPE.
pub(crate) fn behave_as_the_vmm() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        #[allow(unsafe_code)]
        // SAFETY: no signal handler is installed.
        let ignored = unsafe { signal(Signal::SIGPIPE, SigHandler::SigIgn) };
        assert!(ignored.is_ok(), "cannot ignore SIGPIPE");
        panic::set_hook(Box::new(|info| {
            // This writes directly to stderr. The output of a test is captured until the test ends, and this one does
            // not end.
            let _ = writeln!(io::stderr(), "{info}\n{}", Backtrace::force_capture());
            process::abort();
        }));
    });
}
