
begin("write")
write("f", b"0123456789")
with File("f", RW) as one, File("f", RW) as two:
    show("at an offset", lambda: os.pwrite(one, b"ab", 3), lambda: os.pread(two, 99, 0))
    show("beyond the end", lambda: os.pwrite(two, b"z", 20), lambda: os.pread(one, 99, 8), "f")
    show("read at the end", lambda: os.pread(one, 9, 21))
    show("read beyond the end", lambda: os.pread(one, 9, 1 << 40))
    show("negative offset", lambda: many(lambda: os.pread(one, 1, -1), lambda: os.pwrite(one, b"x", -1)))
    show("huge offset", lambda: os.pwrite(one, b"x", (1 << 63) - 1), "f")
    show("nothing", lambda: os.pwrite(one, b"", 100), "f")
    show("offset moves", lambda: (os.write(one, b"xy"), os.read(one, 3), os.lseek(one, 0, os.SEEK_CUR)))
    show("read into pieces", lambda: os.preadv(one, [bytearray(2), bytearray(30)], 10))
with File("f") as fd:
    show("read-only", lambda: os.write(fd, b"x"))
    show("read-only, truncate", lambda: os.ftruncate(fd, 0))
    show("read-only, allocate", lambda: fallocate(fd, 0, 0, 1))
with File("f", WR) as fd:
    show("write-only, read", lambda: os.read(fd, 1))
    show("write-only, write a part of a page", lambda: os.pwrite(fd, b"-", 1), content("f"))
    show("write-only, map", lambda: mmap.mmap(fd, 1))
write("f", b"one")
with File("f", WR | APPEND) as fd:
    os.write(fd, b" two")
    show("append at an offset", lambda: os.pwrite(fd, b" end", 0), content("f"))
    fcntl.fcntl(fd, fcntl.F_SETFL, 0)
    show("append cleared", lambda: os.pwrite(fd, b"ONE", 0), content("f"))
    fcntl.fcntl(fd, fcntl.F_SETFL, APPEND)
    show("append set", lambda: os.pwrite(fd, b".", 0), content("f"),
         lambda: fcntl.fcntl(fd, fcntl.F_GETFL) & APPEND > 0)
    show("RWF_NOAPPEND", lambda: os.pwritev(fd, [b"one"], 0, 0x20), content("f"), lambda: os.stat("f").st_size)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    show("RWF_NOAPPEND, read again", content("f"))
write("f", b"")
with File("f", WR | APPEND) as one, File("f", WR | APPEND) as two:
    for number in range(3):
        os.write(one, b"a%d" % number)
        os.write(two, b"b%d" % number)
    show("two append", content("f"))
write("f", b"text")
with File("f", RW) as fd:
    show("RWF_APPEND", lambda: os.pwritev(fd, [b"!"], 0, 0x10), content("f"))
    show("RWF_DSYNC", lambda: os.pwritev(fd, [b"T"], 0, os.RWF_DSYNC), content("f"))
    show("RWF_SYNC", lambda: os.pwritev(fd, [b"E"], 1, os.RWF_SYNC), content("f"))
    show("RWF_HIPRI", lambda: os.preadv(fd, [bytearray(3)], 0, os.RWF_HIPRI))
    show("unknown flag", lambda: os.preadv(fd, [bytearray(3)], 0, 1 << 30))
    os.pread(fd, 9, 0)
    show("RWF_NOWAIT, cached", lambda: os.preadv(fd, [bytearray(3)], 0, os.RWF_NOWAIT))
for flag, what in ((os.O_SYNC, "O_SYNC"), (os.O_DSYNC, "O_DSYNC"), (os.O_NONBLOCK, "O_NONBLOCK"),
                   (os.O_NOATIME, "O_NOATIME")):
    with File("f", RW | flag) as fd:
        show(what, lambda: os.write(fd, b"sync"), content("f"))
show("O_NOATIME of another's file", as_user(lambda: opened("f", RD | os.O_NOATIME)))
page = mmap.mmap(-1, 8192)
page.write(b"d" * 8192)
page.seek(0)
show("O_DIRECT", lambda: os.write(os.open("direct", WR | CREAT | os.O_DIRECT), page), "direct")
with File("direct", RW | os.O_DIRECT) as fd:
    show("O_DIRECT, read", lambda: os.preadv(fd, [memoryview(page)[:4096]], 0))
    show("O_DIRECT, read at the end", lambda: os.preadv(fd, [memoryview(page)[:4096]], 8192))
    show("O_DIRECT, offset not aligned", lambda: os.preadv(fd, [memoryview(page)[:4096]], 7))
    show("O_DIRECT, length not aligned", lambda: os.preadv(fd, [memoryview(page)[:100]], 0))
    show("O_DIRECT, seen by others", content("direct"))
big = bytes(range(256)) * 8192
write("big", big)
show("2 MiB", "big", lambda: read("big") == big[:1 << 20])
with File("big", RW) as fd:
    os.pwrite(fd, b"seam", (1 << 20) - 2)
    show("over a boundary", lambda: os.pread(fd, 8, (1 << 20) - 4))


def pieces(*steps):
    """Each step is (offset, length): writes a piece there. If the length is None, moves the end of the file to the
    offset. Returns whether the cache has what is expected, and whether the file has it after the cache was dropped."""
    expected = bytearray()
    with File("pieces", RW | CREAT | TRUNC) as fd:
        for number, (offset, length) in enumerate(steps):
            if length is None:
                os.ftruncate(fd, offset)
                expected = expected[:offset] + bytes(max(0, offset - len(expected)))
                continue
            piece = bytes([65 + number % 26]) * length
            os.pwrite(fd, piece, offset)
            expected += bytes(max(0, offset + length - len(expected)))
            expected[offset:offset + length] = piece
        cached = os.pread(fd, len(expected) + 1, 0)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return cached == expected, os.pread(fd, len(expected) + 1, 0) == expected


show("pieces of 1,500 bytes", lambda: pieces(*((number * 1500, 1500) for number in range(20))))
show("pieces of any length", lambda: pieces((0, 1), (1, 4095), (4096, 10000), (14096, 3), (14099, 4097)))
show("pieces with gaps", lambda: pieces((5000, 100), (20000, 4096), (8191, 2), (100, 1)))
show("pieces behind an end that moves", lambda: pieces((0, 3000), (1000, None), (2000, 9), (9000, None), (8500, 9)))


def limited():
    """Writes beyond the size that a file may have, and then the rest. Returns how much was written each time, and
    whether it is there."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with File("limited", RW | CREAT) as fd:
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, before[1]))
        try:
            first = os.write(fd, b"a" * 10000)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        rest = os.write(fd, b"b" * 4000)
        return first, rest, os.pread(fd, 20000, 0) == b"a" * 6000 + b"b" * 4000


show("pieces within a limit", limited)
os.mkdir("d")
with File("d") as fd:
    show("fsync of a directory", lambda: os.fsync(fd))
    show("fdatasync of a directory", lambda: os.fdatasync(fd))
    show("syncfs", lambda: call(306, fd))
    show("truncate a directory", lambda: os.truncate("d", 0))
    show("allocate in a directory", lambda: fallocate(fd, 0, 0, 1))
    show("map a directory", lambda: mmap.mmap(fd, 1, prot=mmap.PROT_READ))
with File("f") as fd:
    show("fsync, read-only", lambda: os.fsync(fd))
    show("sync_file_range", lambda: call(277, fd, 0, 0, 7))
    show("fadvise", lambda: [os.posix_fadvise(fd, 0, 0, advice) for advice in range(6)])
    show("readahead", lambda: call(187, fd, 0, 100))

begin("size")
write("f", b"0123456789")
show("shorter", lambda: os.truncate("f", 4), "f", content("f"))
show("longer", lambda: os.truncate("f", 8), "f", content("f"))
show("negative", lambda: os.truncate("f", -1))
show("largest", lambda: os.truncate("f", (1 << 63) - 1), "f")
show("16 TiB", lambda: os.truncate("f", 1 << 44), "f")
show("1 TiB", lambda: os.truncate("f", 1 << 40), "f")
show("again", lambda: os.truncate("f", 8), "f", content("f"))
show("missing", lambda: os.truncate("none", 0))
os.symlink("f", "l")
show("by a link", lambda: os.truncate("l", 5), "f")
os.mkfifo("p")
show("fifo", lambda: os.truncate("p", 0))
show("as a user", as_user(lambda: os.truncate("f", 0)), "f")
with File("f", RW) as one, File("f", RW) as two:
    os.ftruncate(one, 100)
    show("end, by the other", lambda: os.lseek(two, 0, os.SEEK_END))
    os.ftruncate(two, 3)
    show("read, by the other", lambda: os.pread(one, 99, 0))
limit = resource.getrlimit(resource.RLIMIT_FSIZE)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
write("f", b"")
resource.setrlimit(resource.RLIMIT_FSIZE, (10, limit[1]))
with File("f", RW) as fd:
    show("limit, write a part", lambda: os.write(fd, b"x" * 20), fd)
    show("limit, write more", lambda: os.write(fd, b"x"), fd)
    show("limit, truncate", lambda: os.ftruncate(fd, 11), fd)
    show("limit, allocate", lambda: fallocate(fd, 0, 0, 11), fd)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    show("limit, signal", lambda: child(lambda: os.pwrite(fd, b"x", 10)))
resource.setrlimit(resource.RLIMIT_FSIZE, limit)
KEEP, PUNCH, COLLAPSE, ZERO, INSERT = 1, 2, 8, 16, 32
write("f", b"a" * 12288)
with File("f", RW) as fd:
    show("allocate", lambda: fallocate(fd, 0, 12288, 4096), fd)
    show("allocate, keep the size", lambda: fallocate(fd, KEEP, 16384, 8192), fd, lambda: os.fstat(fd).st_blocks >= 48)
    show("allocate, within", lambda: fallocate(fd, 0, 0, 100), fd, lambda: os.pread(fd, 3, 0))
    show("allocate nothing", lambda: fallocate(fd, 0, 0, 0))
    show("allocate at a negative offset", lambda: fallocate(fd, 0, -1, 1))
    show("allocate too much", lambda: fallocate(fd, 0, 1, (1 << 63) - 1))
    show("punch", lambda: fallocate(fd, PUNCH | KEEP, 4096, 4096), fd, lambda: os.pread(fd, 4, 4094))
    show("punch a part of a page", lambda: fallocate(fd, PUNCH | KEEP, 1, 2), lambda: os.pread(fd, 4, 0))
    show("punch, change the size", lambda: fallocate(fd, PUNCH, 0, 1))
    show("punch beyond the end", lambda: fallocate(fd, PUNCH | KEEP, 1 << 20, 4096), fd)
    show("data", lambda: many(lambda: os.lseek(fd, 0, os.SEEK_DATA), lambda: os.lseek(fd, 4096, os.SEEK_DATA)))
    show("hole", lambda: many(lambda: os.lseek(fd, 0, os.SEEK_HOLE), lambda: os.lseek(fd, 4096, os.SEEK_HOLE)))
    show("data at the end", lambda: os.lseek(fd, 16384, os.SEEK_DATA))
    show("hole at the end", lambda: os.lseek(fd, 16384, os.SEEK_HOLE))
    show("hole, negative", lambda: os.lseek(fd, -1, os.SEEK_HOLE))
    show("seek before the begin", lambda: os.lseek(fd, -1, os.SEEK_SET))
    show("seek beyond the end", lambda: os.lseek(fd, 1 << 40, os.SEEK_SET))
    show("seek, unknown", lambda: os.lseek(fd, 0, 9))
    show("zero", lambda: fallocate(fd, ZERO, 8192, 100), fd, lambda: os.pread(fd, 4, 8290))
    show("zero, keep the size", lambda: fallocate(fd, ZERO | KEEP, 16384, 4096), fd)
    show("collapse", lambda: fallocate(fd, COLLAPSE, 0, 4096), fd)
    show("insert", lambda: fallocate(fd, INSERT, 0, 4096), fd)
    show("unknown mode", lambda: fallocate(fd, 1 << 20, 0, 4096))
write("sparse", b"")
with File("sparse", RW) as fd:
    os.pwrite(fd, b"x" * 4096, 1 << 20)
    show("sparse", lambda: os.lseek(fd, 0, os.SEEK_DATA), lambda: os.lseek(fd, 0, os.SEEK_HOLE),
         lambda: os.fstat(fd).st_blocks < 100, fd)
with File("p", RW) as fd:
    show("allocate in a fifo", lambda: fallocate(fd, 0, 0, 1))
    show("seek in a fifo", lambda: os.lseek(fd, 0, os.SEEK_SET))

begin("copy")
write("f", b"0123456789" * 1000)
with File("f", RW) as source, File("g", RW | CREAT) as target, File("g", WR | APPEND) as appends:
    show("range", lambda: os.copy_file_range(source, target, 100, 5, 0), target, content("g"))
    show("range, at the end", lambda: os.copy_file_range(source, target, 100, 9999), target)
    show("range, beyond the end", lambda: os.copy_file_range(source, target, 100, 20000))
    show("range, whole", lambda: os.copy_file_range(source, target, 20000, 0, 0), lambda: read("f") == read("g"))
    show("range, within one file", lambda: os.copy_file_range(source, source, 10, 0, 20000), source)
    show("range, overlapping", lambda: os.copy_file_range(source, source, 10, 0, 5))
    show("range, appending", lambda: os.copy_file_range(source, appends, 10))
    show("range, target read-only", lambda: os.copy_file_range(source, os.open("g", RD), 10))
    show("range, offsets move", lambda: (os.copy_file_range(source, target, 7), os.lseek(source, 0, 1),
                                         os.lseek(target, 0, 1)))
    show("range, flags", lambda: call(326, source, 0, target, 0, 1, 1))
    show("clone", lambda: fcntl.ioctl(target, 0x40049409, source))
    os.ftruncate(target, 0)
    os.lseek(target, 0, 0)
    show("sendfile", lambda: os.sendfile(target, source, 3, 15), content("g"))
    show("sendfile to the appending", lambda: os.sendfile(appends, source, 15, 15))
    reads, writes = os.pipe()
    show("splice from a file", lambda: os.splice(source, writes, 10, 3), lambda: os.read(reads, 99))
    os.write(writes, b"piped")
    show("splice to a file", lambda: os.splice(reads, target, 99, None, 1), content("g"))
    os.write(writes, b"piped")
    show("splice to the appending", lambda: os.splice(reads, appends, 5))
    shared = os.open("/dev/shm", O_TMPFILE | RW)
    show("range to another file system",
         lambda: os.copy_file_range(source, shared, 10, 0, 0) and os.pread(shared, 99, 0))
    show("sendfile to another file system", lambda: os.sendfile(shared, source, 0, 10),
         lambda: os.fstat(shared).st_size)

begin("map")
write("f", b"a" * 8192)
with File("f", RW) as fd:
    shared = mmap.mmap(fd, 8192)
    private = mmap.mmap(fd, 8192, mmap.MAP_PRIVATE)
    shared[0:3] = b"map"
    show("shared, read", lambda: os.pread(fd, 4, 0), lambda: private[0:4])
    shared.flush()
    show("shared, flushed", content("f"))
    private[0:3] = b"own"
    show("private", lambda: os.pread(fd, 4, 0), lambda: private[0:4])
    os.pwrite(fd, b"write", 4096)
    show("written", lambda: shared[4096:4102], lambda: private[4096:4102])
    os.ftruncate(fd, 100)
    show("truncated, within", lambda: shared[99:102])
    show("truncated, beyond", lambda: child(lambda: shared[5000]))
    show("truncated, private beyond", lambda: child(lambda: private[5000]))
    os.ftruncate(fd, 8192)
    show("longer", lambda: shared[98:102], lambda: shared[5000])
    shared[200:203] = b"end"
    show("stored beyond the old end", lambda: os.pread(fd, 3, 200))
    os.unlink("f")
    shared[0:3] = b"rem"
    show("removed", lambda: os.pread(fd, 3, 0), lambda: shared.flush())
write("g", b"a" * 100)
with File("g") as fd:
    show("read-only, shared writable", lambda: mmap.mmap(fd, 100))
    show("read-only, private", lambda: mmap.mmap(fd, 100, mmap.MAP_PRIVATE)[0])
    show("executable", lambda: mmap.mmap(fd, 100, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC)[0])
    show("after the end", lambda: child(lambda: mmap.mmap(fd, 0, prot=mmap.PROT_READ)[0]))
with File("g", RW) as fd:
    def stores():
        with mmap.mmap(fd, 100) as place:
            place[0:1] = b"z"
            place.flush()
    show("times of a stored page", lambda: moved(stores, "g"))

begin("lock")
write("f")
with File("f", RW) as fd, File("f", RW) as same:
    def locks(kind, wanted):
        def act():
            with File("f", RW) as own:
                return kind(own, wanted | fcntl.LOCK_NB)
        return lambda: child(act)
    show("flock", lambda: fcntl.flock(fd, fcntl.LOCK_EX))
    show("flock, another process", locks(fcntl.flock, fcntl.LOCK_SH))
    show("flock, another descriptor", lambda: fcntl.flock(same, fcntl.LOCK_SH | fcntl.LOCK_NB))
    show("flock, inherited", lambda: child(lambda: fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)))
    show("flock, shared", lambda: fcntl.flock(fd, fcntl.LOCK_SH), locks(fcntl.flock, fcntl.LOCK_SH))
    show("flock, unlocked", lambda: fcntl.flock(fd, fcntl.LOCK_UN), locks(fcntl.flock, fcntl.LOCK_EX))
    show("fcntl", lambda: fcntl.lockf(fd, fcntl.LOCK_EX, 10, 5))
    show("fcntl, another process", locks(fcntl.lockf, fcntl.LOCK_EX))
    show("fcntl, same process", lambda: fcntl.lockf(same, fcntl.LOCK_EX | fcntl.LOCK_NB))

    def query(command, kind, start, length):
        lock = struct.pack("hhqqi", kind, 0, start, length, 0)
        kind, _, start, length, pid = struct.unpack("hhqqi", fcntl.fcntl(fd, command, lock)[:28])
        who = {0: "none", -1: "open file", PARENT: "parent"}.get(pid)
        return {0: "read", 1: "write", 2: "free"}[kind], start, length, who
    PARENT = os.getpid()
    show("fcntl, who", lambda: child(lambda: query(fcntl.F_GETLK, 0, 0, 0)))
    show("fcntl, other range", lambda: child(lambda: fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 5, 100)))
    opened("f")
    show("fcntl, another descriptor closed", locks(fcntl.lockf, fcntl.LOCK_EX))
    GETLK, SETLK = 36, 37
    whole = struct.pack("hhqqi", 1, 0, 0, 0, 0)
    show("open file lock", lambda: fcntl.fcntl(fd, SETLK, whole) and None)
    show("open file lock, another descriptor", lambda: fcntl.fcntl(same, SETLK, whole))
    show("open file lock, who", lambda: child(lambda: query(fcntl.F_GETLK, 0, 0, 0)))
with File("f") as fd:
    show("fcntl, read-only to write", lambda: fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB))
    show("lease to read", lambda: fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK),
         lambda: fcntl.fcntl(fd, fcntl.F_GETLEASE))
    show("lease, broken", lambda: child(lambda: opened("f", WR | os.O_NONBLOCK)))
with File(".") as fd:
    show("flock of a directory", lambda: fcntl.flock(fd, fcntl.LOCK_EX))

begin("run")
write("script", b"#!/bin/sh\necho said $0\n", 0o755)
write("plain", b"echo plain\n", 0o644)
write("rubbish", b"\x00\x01\x02", 0o755)
shutil.copy("/bin/true", "program")


def run(path, *args, user=0):
    def act():
        if user:
            os.setgid(user)
            os.setuid(user)
        os.dup2(2, 2)
        os.execve(path, [str(path), *args], os.environ)

    def run_in_child():
        reads, writes = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.dup2(writes, 1)
            try:
                act()
            except OSError as error:
                os.write(1, errno.errorcode[error.errno].encode())
            finally:
                os._exit(99)
        os.close(writes)
        said = b""
        while part := os.read(reads, 4096):
            said += part
        os.close(reads)
        return f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])} {said.decode().strip()}"
    return run_in_child


show("script", run("./script"))
show("script, as a user", run("./script", user=USER))
show("not executable", run("./plain"))
show("rubbish", run("./rubbish"))
show("directory", run("."))
show("missing", run("./none"))
show("program", run("./program"))
with File("program") as fd:
    show("program by its descriptor", run(fd))
with File("program", WR):
    show("open to be written", run("./program"))
with File("script", WR):
    show("script open to be written", run("./script"))
show("replaced", lambda: os.rename("program", "program2"), run("./program2"))
os.chmod("program2", 0o700)
show("mode 700, as a user", run("./program2", user=USER))
shutil.copy("/usr/bin/id", "id")
os.chown("id", OTHER, GROUP)
os.chmod("id", 0o6755)
show("set-id program", run("./id", "-u", user=USER), run("./id", "-g", user=USER))
shutil.copy("/bin/sleep", "sleeping")
pid = os.spawnv(os.P_NOWAIT, "./sleeping", ["sleeping", "100"])
for _ in range(500):
    if os.readlink(f"/proc/{pid}/exe").endswith("/sleeping"):
        break
    time.sleep(0.01)
show("running, open to write", lambda: opened("sleeping", WR))
show("running, truncate", lambda: os.truncate("sleeping", 0))
show("running, unlink", lambda: os.unlink("sleeping"),
     lambda: os.readlink(f"/proc/{pid}/exe").endswith("sleeping (deleted)"))
os.kill(pid, 9)
os.waitpid(pid, 0)

begin("ioctl")
write("f", b"0123456789")
with File("f", RW) as fd, File(".") as here:
    os.lseek(fd, 3, 0)
    number = array.array("i", [0])
    show("FIONREAD", lambda: fcntl.ioctl(fd, 0x541B, number), lambda: number[0])
    show("TCGETS", lambda: os.isatty(fd))
    show("FIGETBSZ", lambda: fcntl.ioctl(fd, 2, number), lambda: number[0])
    show("FS_IOC_GETFLAGS", lambda: fcntl.ioctl(fd, 0x80086601, bytes(8))[:0])
    show("FS_IOC_GETFLAGS of a directory", lambda: fcntl.ioctl(here, 0x80086601, bytes(8))[:0])
    show("FS_IOC_SETFLAGS, no dump", lambda: fcntl.ioctl(fd, 0x40086602, struct.pack("q", 0x40))[:0],
         lambda: hex(struct.unpack("q", fcntl.ioctl(fd, 0x80086601, bytes(8)))[0] & 0x40))
    show("FS_IOC_SETFLAGS, no access times", lambda: set_inode_flags(fd, 0xC0), lambda: hex(inode_flags(fd) & 0xF0))
    show("FS_IOC_SETFLAGS of a directory", lambda: set_inode_flags(here, 0x40), lambda: set_inode_flags(here, 0))
    show("FS_IOC_SETFLAGS, as a user", as_user(lambda: set_inode_flags(fd, 0)), lambda: hex(inode_flags(fd) & 0xF0))
    show("FS_IOC_SETFLAGS, immutable", lambda: set_inode_flags(fd, 0x10), lambda: opened("f", WR),
         lambda: set_inode_flags(fd, 0), lambda: hex(inode_flags(fd) & 0xF0))
    show("FS_IOC_FSSETXATTR, no dump", lambda: fcntl.ioctl(fd, 0x401C5820, struct.pack("I24x", 0x80))[:0],
         lambda: hex(inode_flags(fd) & 0xF0))
    show("FS_IOC_FSGETXATTR", lambda: fcntl.ioctl(fd, 0x801C581F, bytes(28))[:0])
    show("FS_IOC_FIEMAP", lambda: fcntl.ioctl(fd, 0xC020660B, bytearray(struct.pack("QQIIII", 0, 1 << 62, 0, 0, 0, 0))))
    show("FS_IOC_GETVERSION", lambda: fcntl.ioctl(fd, 0x80087601, bytes(8))[:0])
    show("unknown", lambda: fcntl.ioctl(fd, 0x12345678, bytes(8)))
    show("poll", lambda: [event for _, event in (lambda p: (p.register(fd, 5), p.poll(0))[1])(select.poll())])
    show("select", lambda: [len(it) for it in select.select([fd], [fd], [], 0)])
    show("epoll", lambda: select.epoll().register(fd))
    show("epoll, directory", lambda: select.epoll().register(here))
