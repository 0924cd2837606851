use std::{fs::File, os::unix::fs::FileExt};

use bulkhead_vmm_api::BlockCounts;
use virtio_bindings::virtio_blk::*;
use virtio_queue::desc::split::Descriptor;

use super::{limits::MAX_DATA, *};
use crate::virtio::testing::{BUFFERS, Driver, NEXT, WRITE};

const SECTORS: u64 = 64;
const FLUSH: u64 = 1 << VIRTIO_BLK_F_FLUSH;
const QUEUES: u64 = FLUSH | 1 << VIRTIO_BLK_F_MQ;
const HEADER: u64 = BUFFERS;
const DATA: u64 = BUFFERS + 0x1000;
const STATUS: u64 = BUFFERS + 0x80_0000;
/// The status before the device writes one.
const NONE: u8 = 0xff;
const OK: u8 = VIRTIO_BLK_S_OK as u8;
const IOERR: u8 = VIRTIO_BLK_S_IOERR as u8;
const UNSUPP: u8 = VIRTIO_BLK_S_UNSUPP as u8;

/// A file whose sectors each consist of their number.
fn file() -> File {
    let file = tempfile::tempfile().unwrap();
    for sector in 0..SECTORS {
        file.write_all_at(&[sector as u8; SECTOR as usize], sector * SECTOR).unwrap();
    }
    file
}

fn bytes(file: &File, sector: u64, count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count];
    file.read_exact_at(&mut bytes, sector * SECTOR).unwrap();
    bytes
}

/// A guest with one disk.
struct Guest {
    driver: Driver,
    device: Block,
    file: File,
    /// That of the next request.
    queue: usize,
}

impl Guest {
    fn new() -> Self {
        Self::with(file(), false, FLUSH)
    }

    fn with(file: File, read_only: bool, features: u64) -> Self {
        let thread = BlockThreads::start(1).unwrap();
        let mut device = Block::open(file.try_clone().unwrap(), "8:16", read_only, true, &thread).unwrap();
        Self { driver: Driver::new(&mut device, features), device, file, queue: 0 }
    }

    /// A guest whose driver uses several queues.
    fn with_queues(count: usize) -> Self {
        let (threads, file) = (BlockThreads::start(count).unwrap(), file());
        let mut device = Block::open(file.try_clone().unwrap(), "", false, true, &threads).unwrap();
        Self { driver: Driver::new(&mut device, QUEUES), device, file, queue: 0 }
    }

    /// Sends a request with these buffers for data. Returns its status, and the number of bytes that were written.
    fn request(&mut self, kind: u32, sector: u64, data: &[(u64, u32, u16)]) -> (u8, u32) {
        self.header(kind, sector);
        let buffers = [&[(HEADER, 16, 0)], data, &[(STATUS, 1, WRITE)]].concat();
        self.driver.offer(self.queue, 0, &buffers);
        let (_, len) = self.driver.wait_used(self.queue);
        (self.driver.read(STATUS, 1)[0], len)
    }

    fn header(&self, kind: u32, sector: u64) {
        self.driver.write(HEADER, &[&kind.to_le_bytes(), &[0; 4], &sector.to_le_bytes()[..]].concat());
        self.driver.write(STATUS, &[NONE]);
    }

    /// A request with one segment of a discard or of zeroes.
    fn segment(&mut self, kind: u32, sector: u64, count: u32, flags: u32) -> u8 {
        let segment = [&sector.to_le_bytes()[..], &count.to_le_bytes(), &flags.to_le_bytes()].concat();
        self.driver.write(DATA, &segment);
        self.request(kind, 0, &[(DATA, 16, 0)]).0
    }

    fn expect_that_it_serves(&mut self) {
        assert_eq!(self.request(VIRTIO_BLK_T_IN, 7, &[(DATA, 512, WRITE)]), (OK, 513));
        assert_eq!(self.driver.read(DATA, 512), [7; 512]);
    }
}

#[test]
fn what_is_written_is_in_the_file_and_is_read_again() {
    for features in [0, FLUSH] {
        let mut guest = Guest::with(file(), false, features);
        guest.driver.write(DATA, &[0xaa; 1024]);
        // The pieces of the data need not be sectors.
        let pieces = [(DATA, 100, 0), (DATA + 100, 700, 0), (DATA + 800, 224, 0)];
        assert_eq!(guest.request(VIRTIO_BLK_T_OUT, 10, &pieces), (OK, 1));
        assert_eq!(guest.request(VIRTIO_BLK_T_FLUSH, 0, &[]), (OK, 1));
        assert_eq!(bytes(&guest.file, 9, 2048), [vec![9; 512], vec![0xaa; 1024], vec![12; 512]].concat());
        let room = [(DATA + 0x1000, 600, WRITE), (DATA + 0x2000, 936, WRITE)];
        assert_eq!(guest.request(VIRTIO_BLK_T_IN, 9, &room), (OK, 1537));
        assert_eq!(guest.driver.read(DATA + 0x1000, 600), [vec![9; 512], vec![0xaa; 88]].concat());
        assert_eq!(guest.driver.read(DATA + 0x2000, 936), vec![0xaa; 936]);
        // The last sector.
        let last = (DATA, 512, WRITE);
        assert_eq!(guest.request(VIRTIO_BLK_T_IN, SECTORS - 1, &[last]), (OK, 513));
        assert_eq!(guest.request(VIRTIO_BLK_T_IN, SECTORS, &[]), (OK, 1));
        let counts = BlockCounts { requests: 5, read_bytes: 1536 + 512, written_bytes: 1024 };
        assert_eq!(guest.device.disk().counts(), counts);
    }
}

#[test]
fn what_is_not_on_the_disk_is_neither_read_nor_written() {
    let mut guest = Guest::new();
    for sector in [SECTORS - 1, SECTORS, u64::MAX / 512 + 1, 1 << 55, u64::MAX] {
        assert_eq!(guest.request(VIRTIO_BLK_T_IN, sector, &[(DATA, 1024, WRITE)]), (IOERR, 1), "{sector}");
        assert_eq!(guest.request(VIRTIO_BLK_T_OUT, sector, &[(DATA, 1024, 0)]), (IOERR, 1), "{sector}");
        for kind in [VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_WRITE_ZEROES] {
            assert_eq!(guest.segment(kind, sector, 2, 0), IOERR, "{sector}");
        }
    }
    for len in [1, 511, 513] {
        assert_eq!(guest.request(VIRTIO_BLK_T_IN, 0, &[(DATA, len, WRITE)]).0, IOERR);
        assert_eq!(guest.request(VIRTIO_BLK_T_OUT, 0, &[(DATA, len, 0)]).0, IOERR);
    }
    assert_eq!(guest.file.metadata().unwrap().len(), SECTORS * SECTOR);
    assert_eq!(bytes(&guest.file, SECTORS - 1, 512), [SECTORS as u8 - 1; 512]);
    guest.expect_that_it_serves();
}

#[test]
fn a_request_is_no_longer_than_the_device_says() {
    let file = tempfile::tempfile().unwrap();
    file.set_len(1 << 30).unwrap();
    let mut guest = Guest::with(file, false, FLUSH);
    // All of them are the same memory.
    let segments = |count: usize| vec![(DATA, SIZE_MAX, WRITE); count];
    assert_eq!(guest.request(VIRTIO_BLK_T_IN, 0, &segments(254)), (OK, MAX_DATA as u32 + 1));
    let huge = vec![(DATA, 0x10_0000, WRITE); 100];
    assert_eq!(guest.request(VIRTIO_BLK_T_IN, 0, &huge), (IOERR, 1));
    assert_eq!(guest.segment(VIRTIO_BLK_T_WRITE_ZEROES, 0, MAX_WRITE_ZEROES, 0), OK);
    assert_eq!(guest.segment(VIRTIO_BLK_T_WRITE_ZEROES, 0, MAX_WRITE_ZEROES + 1, 0), IOERR);
    assert_eq!(guest.segment(VIRTIO_BLK_T_DISCARD, 0, MAX_DISCARD, 0), OK);
    assert_eq!(guest.segment(VIRTIO_BLK_T_DISCARD, 0, u32::MAX, 0), IOERR);
}

#[test]
fn what_is_zeroed_or_discarded_of_a_file_is_zeros() {
    let mut guest = Guest::new();
    for (kind, sector, flags) in [
        (VIRTIO_BLK_T_DISCARD, 8, 0),
        (VIRTIO_BLK_T_WRITE_ZEROES, 24, 0),
        (VIRTIO_BLK_T_WRITE_ZEROES, 40, VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP),
    ] {
        assert_eq!(guest.segment(kind, sector, 2, flags), OK);
        assert_eq!(bytes(&guest.file, sector - 1, 512), [sector as u8 - 1; 512]);
        assert_eq!(bytes(&guest.file, sector, 1024), [0; 1024]);
        assert_eq!(bytes(&guest.file, sector + 2, 512), [sector as u8 + 2; 512]);
    }
    assert_eq!(guest.segment(VIRTIO_BLK_T_DISCARD, 0, 2, VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP), UNSUPP);
    assert_eq!(guest.segment(VIRTIO_BLK_T_WRITE_ZEROES, 0, 2, 2), UNSUPP);
    assert_eq!(guest.segment(VIRTIO_BLK_T_DISCARD, 0, 0, 0), IOERR);
    for len in [0, 15, 32] {
        assert_eq!(guest.request(VIRTIO_BLK_T_DISCARD, 0, &[(DATA, len, 0)]).0, IOERR, "{len}");
    }
    assert_eq!(bytes(&guest.file, 1, 512), [1; 512]);
}

#[test]
fn a_disk_that_is_read_only_is_not_changed() {
    let mut guest = Guest::with(file(), true, FLUSH);
    let features = guest.device.features();
    assert_ne!(features & 1 << VIRTIO_BLK_F_RO, 0);
    assert_eq!(features & (1 << VIRTIO_BLK_F_DISCARD | 1 << VIRTIO_BLK_F_WRITE_ZEROES), 0);
    assert_eq!(guest.request(VIRTIO_BLK_T_OUT, 0, &[(DATA, 512, 0)]), (IOERR, 1));
    assert_eq!(guest.segment(VIRTIO_BLK_T_DISCARD, 0, 2, 0), UNSUPP);
    assert_eq!(guest.segment(VIRTIO_BLK_T_WRITE_ZEROES, 0, 2, 0), UNSUPP);
    guest.expect_that_it_serves();
    assert_eq!(bytes(&guest.file, 0, 512), [0; 512]);

    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk");
    std::fs::write(&path, [1; 1024]).unwrap();
    let disk = Disk::new(File::open(&path).unwrap(), false, true).unwrap();
    assert!(disk.read_only && !disk.discards);
    let write_only = File::options().write(true).open(&path).unwrap();
    assert!(matches!(Disk::new(write_only, false, true), Err(DiskError::WriteOnly)));
    assert!(matches!(Disk::new(File::open("/dev/null").unwrap(), false, true), Err(DiskError::Kind)));
}

#[test]
fn a_request_of_another_type_is_unsupported() {
    let mut guest = Guest::new();
    for kind in [VIRTIO_BLK_T_SCSI_CMD, VIRTIO_BLK_T_SECURE_ERASE, VIRTIO_BLK_T_ZONE_REPORT, u32::MAX] {
        assert_eq!(guest.request(kind, 0, &[(DATA, 512, WRITE)]), (UNSUPP, 1));
    }
    guest.expect_that_it_serves();
}

#[test]
fn the_guest_finds_the_disk_by_its_serial_number() {
    let mut guest = Guest::new();
    guest.driver.write(DATA, &[0xaa; 32]);
    assert_eq!(guest.request(VIRTIO_BLK_T_GET_ID, 0, &[(DATA, 20, WRITE)]), (OK, 21));
    assert_eq!(guest.driver.read(DATA, 21), [&b"8:16"[..], &[0; 16], &[0xaa]].concat());
    // The guest has less room, or more.
    assert_eq!(guest.request(VIRTIO_BLK_T_GET_ID, 0, &[(DATA, 2, WRITE)]), (OK, 3));
    assert_eq!(guest.request(VIRTIO_BLK_T_GET_ID, 0, &[(DATA, 4096, WRITE)]), (OK, 21));
    let thread = BlockThreads::start(1).unwrap();
    let long = Block::open(file(), "a serial number of 28", false, true, &thread);
    assert!(matches!(long.err(), Some(DiskError::Serial)));
}

#[test]
fn what_the_host_fails_in_fails_in_the_guest() {
    let mut guest = Guest::new();
    // The file is now smaller than the disk.
    guest.file.set_len(8 * SECTOR).unwrap();
    assert_eq!(guest.request(VIRTIO_BLK_T_IN, 7, &[(DATA, 1024, WRITE)]), (IOERR, 1));
    assert_eq!(guest.request(VIRTIO_BLK_T_IN, 20, &[(DATA, 512, WRITE)]), (IOERR, 1));
    guest.expect_that_it_serves();
    // Another descriptor of the same file, which cannot be written to.
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&guest.file));
    let mut disk = Disk::new(File::open(path).unwrap(), false, true).unwrap();
    disk.read_only = false;
    let mut device = Block::new(disk, "", &BlockThreads::start(1).unwrap()).unwrap();
    guest.driver = Driver::new(&mut device, FLUSH);
    guest.device = device;
    assert_eq!(guest.request(VIRTIO_BLK_T_OUT, 0, &[(DATA, 512, 0)]), (IOERR, 1));
    guest.expect_that_it_serves();
}

#[test]
fn an_illegal_chain_ends_the_service_until_the_next_reset() {
    let chains: [&[(u64, u32, u16)]; 6] = [
        // No room for a status.
        &[(HEADER, 16, 0)],
        &[(HEADER, 16, 0), (DATA, 512, 0)],
        // Half a header.
        &[(HEADER, 15, 0), (STATUS, 1, WRITE)],
        &[(STATUS, 1, WRITE)],
        // Data outside of memory, and in the wrong order.
        &[(HEADER, 16, 0), (0xffff_0000, 512, WRITE), (STATUS, 1, WRITE)],
        &[(HEADER, 16, 0), (STATUS, 1, WRITE), (DATA, 512, 0)],
    ];
    let mut guest = Guest::new();
    let restart = |guest: &mut Guest| {
        guest.driver.wait_needs_reset();
        guest.driver.reset();
        guest.driver = Driver::new(&mut guest.device, FLUSH);
        guest.expect_that_it_serves();
    };
    for chain in chains {
        guest.header(VIRTIO_BLK_T_OUT, 0);
        guest.driver.offer(0, 0, chain);
        restart(&mut guest);
    }
    guest.driver.describe(0, 0, Descriptor::new(HEADER, 16, NEXT, 0));
    guest.driver.publish(0, 0);
    restart(&mut guest);
    guest.driver.break_avail_index(0);
    restart(&mut guest);
    assert_eq!(bytes(&guest.file, 0, 512), [0; 512]);
}

#[test]
fn the_status_has_the_last_byte_and_a_header_may_be_in_pieces() {
    let mut guest = Guest::new();
    guest.header(VIRTIO_BLK_T_IN, 3);
    let chain = [(HEADER, 5, 0), (HEADER + 5, 11, 0), (DATA, 100, WRITE), (DATA + 100, 413, WRITE)];
    guest.driver.offer(0, 0, &chain);
    assert_eq!(guest.driver.wait_used(0), (0, 513));
    assert_eq!(guest.driver.read(DATA, 513), [vec![3; 512], vec![OK]].concat());
}

#[test]
fn one_thread_serves_several_disks() {
    let thread = BlockThreads::start(1).unwrap();
    let make = || Block::open(file(), "", false, true, &thread).unwrap();
    let (mut device, mut other) = (make(), make());
    let driver = Driver::new(&mut device, FLUSH);
    let mut guest = Guest { driver, device, file: file(), queue: 0 };
    guest.expect_that_it_serves();
    let mut broken = Driver::new(&mut other, FLUSH);
    guest.expect_that_it_serves();
    broken.break_avail_index(0);
    broken.wait_needs_reset();
    guest.expect_that_it_serves();
    other.deactivate().unwrap();
    guest.expect_that_it_serves();
    drop((broken, other));
    guest.expect_that_it_serves();
}

#[test]
fn the_configuration_is_that_of_the_disk() {
    let guest = Guest::new();
    let mut config = [0xff; 64];
    guest.device.read_config(0, &mut config);
    let word = |at: usize| u32::from_le_bytes([config[at], config[at + 1], config[at + 2], config[at + 3]]);
    assert_eq!((word(0), word(4), word(8), word(12)), (SECTORS as u32, 0, SIZE_MAX, SEG_MAX));
    assert_eq!((word(16), word(20), config[24], word(28)), (0, 512, 3, 0));
    assert_eq!([36, 40, 44, 48, 52].map(word), [MAX_DISCARD, 1, 1, MAX_WRITE_ZEROES, 1]);
    assert_eq!(config[56..], [1, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]);
    // A part of a sector is not on the disk.
    let file = file();
    file.set_len(1000).unwrap();
    let disk = Disk::new(file, true, true).unwrap();
    assert_eq!(disk.capacity, 1);
    assert_eq!(super::config(&disk, 1)[36..], [0; 24]);
}

#[test]
fn a_flush_by_one_queue_is_about_what_was_written_by_another() {
    let mut guest = Guest::with_queues(4);
    for queue in 0..4 {
        guest.queue = queue;
        guest.driver.write(DATA, &[0xa0 + queue as u8; 512]);
        assert_eq!(guest.request(VIRTIO_BLK_T_OUT, queue as u64, &[(DATA, 512, 0)]), (OK, 1));
        // What a driver was told is done comes before what it asks for next, by whatever queue.
        guest.queue = 3 - queue;
        assert_eq!(guest.request(VIRTIO_BLK_T_FLUSH, 0, &[]), (OK, 1));
        assert_eq!(bytes(&guest.file, queue as u64, 512), [0xa0 + queue as u8; 512]);
        assert_eq!(guest.request(VIRTIO_BLK_T_IN, queue as u64, &[(DATA + 0x1000, 512, WRITE)]), (OK, 513));
        assert_eq!(guest.driver.read(DATA + 0x1000, 512), [0xa0 + queue as u8; 512]);
    }
    assert_eq!(guest.device.disk().counts().requests, 12, "of all queues");
    // A disk that was taken away is gone for each.
    assert!(guest.device.disk().close());
    for queue in 0..4 {
        guest.queue = queue;
        assert_eq!(guest.request(VIRTIO_BLK_T_IN, 0, &[(DATA, 512, WRITE)]), (IOERR, 1));
    }
}

#[test]
fn a_queue_that_the_driver_has_broken_does_not_stop_the_others() {
    let mut guest = Guest::with_queues(3);
    guest.driver.break_avail_index(1);
    guest.driver.wait_needs_reset();
    for queue in [0, 2] {
        guest.queue = queue;
        guest.expect_that_it_serves();
    }
    guest.device.deactivate().unwrap();
    guest.driver = Driver::new(&mut guest.device, QUEUES);
    guest.queue = 1;
    guest.expect_that_it_serves();
}

#[test]
fn a_driver_uses_the_queues_that_it_has_set_up() {
    let memory = || crate::memory::lay_out(&[(0, crate::virtio::testing::MEMORY)], 0).unwrap();
    let mut guest = Guest::with_queues(3);
    guest.device.deactivate().unwrap();
    guest.driver = Driver::with_queues(memory(), &mut guest.device, QUEUES, |queue| queue != 1);
    for queue in [0, 2] {
        guest.queue = queue;
        guest.expect_that_it_serves();
    }
    // One that does not know of several has the first.
    guest.device.deactivate().unwrap();
    guest.driver = Driver::new(&mut guest.device, FLUSH);
    guest.header(VIRTIO_BLK_T_IN, 0);
    guest.driver.offer(1, 0, &[(HEADER, 16, 0), (STATUS, 1, WRITE)]);
    guest.queue = 0;
    for _ in 0..10 {
        guest.expect_that_it_serves();
    }
    assert_eq!(guest.driver.used(1), None);
}

#[test]
fn several_queues_are_offered_if_there_are_as_many_threads() {
    let feature = |guest: &Guest| guest.device.features() & 1 << VIRTIO_BLK_F_MQ;
    let queues = |guest: &Guest| {
        let mut config = [0xff; 36];
        guest.device.read_config(0, &mut config);
        u16::from_le_bytes([config[34], config[35]])
    };
    for (count, number) in [(2, 2), (4, 4)] {
        let guest = Guest::with_queues(count);
        assert_eq!((feature(&guest), queues(&guest)), (1 << VIRTIO_BLK_F_MQ, number));
        assert_eq!(guest.device.queue_sizes(), vec![256; count]);
    }
    let guest = Guest::new();
    assert_eq!((feature(&guest), queues(&guest), guest.device.queue_sizes()), (0, 0, &[256][..]));
}
