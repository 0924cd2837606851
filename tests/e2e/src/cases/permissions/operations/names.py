
begin("open")
write("f")
os.mkdir("d")
os.symlink("f", "l")
os.symlink("none", "dangling")
os.symlink("d", "ld")
os.symlink("loop", "loop")
os.mkfifo("fifo")
show("missing", lambda: opened("none"))
show("create", lambda: opened("new", WR | CREAT, 0o640), "new")
show("create, read-only mode", lambda: opened("ro", RW | CREAT, 0o400), "ro")
show("create, mode 0", lambda: opened("zero", RW | CREAT, 0), "zero")
show("create, set-id and sticky", lambda: opened("sid", WR | CREAT, 0o7777), "sid")
show("create exclusively", lambda: opened("excl", WR | CREAT | EXCL), "excl")
show("create exclusively, exists", lambda: opened("f", WR | CREAT | EXCL))
show("create exclusively, link", lambda: opened("dangling", WR | CREAT | EXCL))
show("create, exists", lambda: opened("f", WR | CREAT), "f")
show("create, directory", lambda: opened("d", RD | CREAT))
show("create, a directory wanted", lambda: opened("x", RD | CREAT | os.O_DIRECTORY))
show("create, trailing slash", lambda: opened("x/", WR | CREAT))
show("create, not below a file", lambda: opened("f/x", WR | CREAT))
show("create, missing directory", lambda: opened("none/x", WR | CREAT))
show("create where a link leads", lambda: opened("dangling", WR | CREAT), "none")
os.unlink("none")
show("directory to write", lambda: opened("d", WR))
show("directory", lambda: opened("d", RD | os.O_DIRECTORY))
show("file, a directory wanted", lambda: opened("f", RD | os.O_DIRECTORY))
show("file, trailing slash", lambda: opened("f/"))
show("directory, trailing slashes", lambda: opened("d//"))
show("directory by a link, trailing slash", lambda: opened("ld/"))
show("link, not followed", lambda: opened("l", RD | os.O_NOFOLLOW))
show("link to a directory, not followed", lambda: opened("ld", RD | os.O_NOFOLLOW | os.O_DIRECTORY))
show("link without target", lambda: opened("dangling"))
show("loop", lambda: opened("loop"))
show("loop, stat", lambda: os.stat("loop"))
show("truncate", lambda: opened("f", WR | TRUNC), "f")
write("f")
show("truncate, read-only", lambda: opened("f", RD | TRUNC), "f")
write("f")
show("truncate, exists and exclusive", lambda: opened("f", WR | TRUNC | CREAT | EXCL), "f")
show("truncate, directory", lambda: opened("d", WR | TRUNC))
show("empty name", lambda: opened(""))
show("fifo to write, no reader", lambda: opened("fifo", WR | os.O_NONBLOCK))
show("fifo to read", lambda: opened("fifo", RD | os.O_NONBLOCK))
show("fifo to create", lambda: opened("fifo", RD | CREAT | os.O_NONBLOCK))
with socket.socket(socket.AF_UNIX) as server:
    server.bind("s")
    show("socket", lambda: opened("s"), "s")
    server.listen()
    with socket.socket(socket.AF_UNIX) as client:
        show("socket, connect", lambda: client.connect("s"))
with socket.socket(socket.AF_UNIX) as client:
    show("socket, connect to a closed one", lambda: client.connect("s"))
    show("socket, bind again", lambda: client.bind("s"))
for kind, device, what in ((stat.S_IFREG, 0, "file"), (stat.S_IFIFO, 0, "fifo"), (stat.S_IFSOCK, 0, "socket"),
                           (stat.S_IFCHR, os.makedev(1, 3), "char"), (stat.S_IFBLK, os.makedev(7, 300), "block"),
                           (stat.S_IFCHR, os.makedev(500, 70000), "char, large number"),
                           (stat.S_IFDIR, 0, "dir"), (stat.S_IFLNK, 0, "link"), (0, 0, "nothing")):
    show(f"mknod {what}", lambda: os.mknod(f"n {what}", kind | 0o664, device), f"n {what}")
    show(f"mknod {what}, as a user", as_user(lambda: os.mknod("u", kind | 0o664, device)))
show("null device", lambda: os.write(os.open("n char", WR), b"text"))
show("device without driver", lambda: opened("n char, large number"))
show("mknod, exists", lambda: os.mknod("f", stat.S_IFREG | 0o600))
show("mknod, trailing slash", lambda: os.mknod("x/", stat.S_IFREG | 0o600))
with File("l", O_PATH | os.O_NOFOLLOW) as fd:
    show("path of a link, stat", lambda: attributes(os.fstat(fd)))
    show("path of a link, readlink", lambda: os.readlink("", dir_fd=fd))
with File("f", O_PATH) as fd:
    show("path, read", lambda: os.read(fd, 1))
    show("path, fchmod", lambda: os.fchmod(fd, 0o600))
    show("path, chmod by /proc", lambda: os.chmod(f"/proc/self/fd/{fd}", 0o604), "f")
    show("path, open by /proc", lambda: opened(f"/proc/self/fd/{fd}", RW))
    os.unlink("f")
    show("path, open a removed file", lambda: opened(f"/proc/self/fd/{fd}", RW))
    show("path, stat a removed file", lambda: attributes(os.fstat(fd)))
    show("path, name of a removed file", lambda: os.readlink(f"/proc/self/fd/{fd}").replace(TOP, ""))
with File("d", O_PATH) as fd:
    show("path of a directory, create in it", lambda: os.close(os.open("in", WR | CREAT, 0o600, dir_fd=fd)), "d/in")
    show("path of a directory, list", lambda: os.listdir(fd))
how = struct.pack("QQQ", RD, 0, 0x08)
show("openat2 beneath, ..", lambda: call(437, AT_FDCWD, b"..", how, 24))
show("openat2 beneath", lambda: call(437, AT_FDCWD, b"d/in", how, 24) > 0)
show("openat2 without links", lambda: call(437, AT_FDCWD, b"l", struct.pack("QQQ", RD, 0, 0x04), 24))
show("openat2 without other mounts", lambda: call(437, AT_FDCWD, b"d/in", struct.pack("QQQ", RD, 0, 0x01), 24) > 0)

begin("tmpfile")
with File(".", O_TMPFILE | RW, 0o640) as fd:
    os.write(fd, b"text")
    show("stat", lambda: attributes(os.fstat(fd)), lambda: listing())
    show("open by /proc", lambda: many(lambda: os.read(os.open(f"/proc/self/fd/{fd}", RD), 9)))
    show("link", lambda: linkat(AT_FDCWD, f"/proc/self/fd/{fd}", "linked", AT_FOLLOW), "linked", content("linked"), fd)
    show("link again", lambda: linkat(fd, "", "again", AT_EMPTY_PATH), "again", fd)
    show("link, exists", lambda: linkat(fd, "", "again", AT_EMPTY_PATH))
    os.write(fd, b" more")
    show("write after link", content("again"))
    os.unlink("linked")
    os.unlink("again")
    show("link after its removal", lambda: linkat(fd, "", "third", AT_EMPTY_PATH), fd)
with File(".", O_TMPFILE | WR | EXCL, 0o640) as fd:
    show("link an exclusive one", lambda: linkat(fd, "", "x", AT_EMPTY_PATH))
with File(".", O_TMPFILE | RW, 0o600) as fd:
    show("link by its descriptor", lambda: linkat(fd, "", "direct", AT_EMPTY_PATH), "direct")
show("read-only", lambda: opened(".", O_TMPFILE | RD))
show("not in a file", lambda: opened("direct", O_TMPFILE | RW))
os.chmod(".", 0o777)
show("as a user", as_user(lambda: attributes(os.fstat(os.open(".", O_TMPFILE | RW, 0o666)))))
os.chmod(".", 0o755)
show("as a user, closed directory", as_user(lambda: opened(".", O_TMPFILE | RW)))

begin("mkdir")
show("new", lambda: os.mkdir("d", 0o775), "d", ".")
show("exists", lambda: os.mkdir("d"))
show("trailing slash", lambda: os.mkdir("s/"), "s", ".")
show("set-id and sticky", lambda: os.mkdir("sid", 0o7777), "sid")
show("missing parent", lambda: os.mkdir("none/x"))
write("f")
show("below a file", lambda: os.mkdir("f/x"))
show("file exists", lambda: os.mkdir("f"))
os.symlink("gone", "l")
show("link exists", lambda: os.mkdir("l"))
show("link exists, trailing slash", lambda: os.mkdir("l/"))
show("dot", lambda: os.mkdir("."))
show("dot dot", lambda: os.mkdir("d/.."))
show("root", lambda: os.mkdir("/"))
show("below", lambda: os.mkdir("d/e"), "d", "d/e")
show("rmdir not empty", lambda: os.rmdir("d"), "d")
show("rmdir dot", lambda: os.rmdir("d/e/."))
show("rmdir dot dot", lambda: os.rmdir("d/e/.."))
show("rmdir file", lambda: os.rmdir("f"))
show("rmdir link", lambda: os.rmdir("l"))
show("rmdir missing", lambda: os.rmdir("none"))
show("rmdir trailing slash", lambda: os.rmdir("d/e/"), "d", "d/e")
show("rmdir", lambda: os.rmdir("d"), "d", ".")
show("unlink directory", lambda: os.unlink("s"))
show("unlink directory, trailing slash", lambda: os.unlink("s/"))
show("unlink dot", lambda: os.unlink("s/."))
show("unlink file, trailing slash", lambda: os.unlink("f/"))
show("unlink missing", lambda: os.unlink("none"))
show("unlink link", lambda: os.unlink("l"), "l")
show("unlinkat, unknown flags", lambda: call(263, AT_FDCWD, b"f", 0x4000))

begin("removed")
os.mkdir("cwd")
write("cwd/f")
os.chdir("cwd")
write("g")
os.unlink("f")
os.unlink("g")
with File(".") as here:
    os.rmdir("../cwd")
    show("stat", lambda: os.stat(".").st_nlink, lambda: os.fstat(here).st_nlink)
    show("getcwd", os.getcwd)
    show("create", lambda: opened("x", WR | CREAT))
    show("mkdir", lambda: os.mkdir("x"))
    show("mknod", lambda: os.mknod("x"))
    show("symlink", lambda: os.symlink("x", "y"))
    show("list", lambda: os.listdir("."))
    show("list by the descriptor", lambda: os.listdir(here))
    show("open", lambda: opened("."))
    show("parent", lambda: os.path.samefile("..", TOP + "/removed"))
    show("chmod", lambda: os.chmod(".", 0o700), mode_of("."))
    show("utime", lambda: os.utime("."))
    show("set an attribute", lambda: os.setxattr(".", "user.x", b"1"))
    show("fsync", lambda: os.fsync(here))
    show("chdir", lambda: os.chdir("."))
    show("chdir to its parent", lambda: os.chdir(".."))
os.chdir(TOP + "/removed")
os.mkdir("cwd")
show("its name again", lambda: os.listdir("cwd"))
write("f", b"first")
with File("f", RW) as fd:
    os.unlink("f")
    show("file", fd)
    show("file, read", lambda: os.pread(fd, 9, 0))
    show("file, write", lambda: os.pwrite(fd, b"SECOND", 0), lambda: os.pread(fd, 9, 0), fd)
    show("file, truncate", lambda: os.ftruncate(fd, 3), fd)
    show("file, chmod", lambda: os.fchmod(fd, 0o600), fd)
    show("file, chown", lambda: os.fchown(fd, 7, 8), fd)
    show("file, utime", lambda: os.utime(fd, ns=(PAST, PAST)), lambda: os.fstat(fd).st_mtime_ns)
    show("file, set an attribute", lambda: os.setxattr(fd, "user.x", b"1"), lambda: os.getxattr(fd, "user.x"))
    show("file, allocate", lambda: os.posix_fallocate(fd, 0, 10), fd)
    show("file, fsync", lambda: os.fsync(fd))
    show("file, open by /proc", lambda: os.pread(os.open(f"/proc/self/fd/{fd}", RW), 9, 0))
    show("file, truncate by /proc", lambda: os.truncate(f"/proc/self/fd/{fd}", 1), fd)
    show("file, link", lambda: linkat(AT_FDCWD, f"/proc/self/fd/{fd}", "back", AT_FOLLOW))
    write("f", b"other")
    show("file, its name again", lambda: os.stat("f").st_ino != os.fstat(fd).st_ino, content("f"), fd)
    show("file, map", lambda: mmap.mmap(fd, 1)[0])
write("one", b"one")
write("two", b"two")
with File("two") as fd:
    os.rename("one", "two")
    show("replaced file", lambda: os.read(fd, 9), fd, content("two"), "two")
write("one", b"one")
os.link("one", "link")
with File("one") as fd:
    os.unlink("one")
    show("one of two names", fd, "link")
    os.rename("link", "renamed")
    show("renamed by another name", fd, "renamed")
    os.unlink("renamed")
    show("both names", fd, lambda: os.pread(fd, 9, 0))
os.mkdir("open")
with File("open") as fd:
    os.rename("open", "renamed")
    show("renamed directory, create in it", lambda: os.close(os.open("x", WR | CREAT, 0o600, dir_fd=fd)), "renamed/x")
    os.unlink("renamed/x")
    os.rmdir("renamed")
    show("removed directory, create in it", lambda: os.open("x", WR | CREAT, 0o600, dir_fd=fd),
         lambda: os.fstat(fd).st_nlink)
os.mkdir("a")
os.mkdir("a/b")
with File("a/b") as fd:
    os.rmdir("a/b")
    os.rmdir("a")
    show("removed with its parent", lambda: os.stat("..", dir_fd=fd).st_nlink)

begin("link")
write("f")
os.mkdir("d")
show("file", lambda: os.link("f", "g"), "f", "g", lambda: os.path.samefile("f", "g"))
show("chmod by the other name", lambda: os.chmod("g", 0o600), "f")
show("write by the other name", lambda: write("g", b"longer text"), "f", content("f"))
show("unlink", lambda: os.unlink("f"), "g")
show("exists", lambda: os.link("g", "d"))
show("itself", lambda: os.link("g", "g"))
show("directory", lambda: os.link("d", "e"))
show("missing", lambda: os.link("none", "e"))
show("missing directory", lambda: os.link("g", "none/e"))
show("trailing slash", lambda: os.link("g", "e/"))
show("from a trailing slash", lambda: os.link("g/", "e"))
show("other file system", lambda: os.link("g", "/dev/shm/bulkhead-link"))
os.symlink("g", "s")
show("symbolic link", lambda: linkat(AT_FDCWD, "s", "t", 0), "t", "s", lambda: os.readlink("t"))
show("where a symbolic link leads", lambda: linkat(AT_FDCWD, "s", "u", AT_FOLLOW), "u")
show("fifo", lambda: (os.mkfifo("p"), os.link("p", "q"))[1], "q")
for number in range(20):
    os.link("g", f"more{number}")
show("many", "ok", "g")
for number in range(20):
    os.unlink(f"more{number}")
show("many removed", "ok", "g", "u")
show("symlink", lambda: os.symlink("target", "new"), "new", lambda: os.readlink("new"))
show("symlink exists", lambda: os.symlink("target", "new"))
show("symlink, empty target", lambda: os.symlink("", "empty"))
show("symlink, trailing slash", lambda: os.symlink("x", "y/"))
for length in (255, 1000, 4095, 4096):
    show(f"symlink, target of {length}", lambda: os.symlink("x" * length, f"long{length}"), f"long{length}",
         lambda: len(os.readlink(f"long{length}")))
show("readlink of a file", lambda: os.readlink("g"))
buffer = ctypes.create_string_buffer(10)
show("readlink, short buffer", lambda: call(89, b"new", buffer, 3), lambda: buffer.value)
show("chmod of a symlink", lambda: call(452, AT_FDCWD, b"new", 0o600, AT_NOFOLLOW))
show("chown of a symlink", lambda: os.lchown("new", 5, 6), "new")
show("utime of a symlink", lambda: os.utime("new", ns=(PAST, PAST), follow_symlinks=False),
     lambda: os.lstat("new").st_mtime_ns)
show("mode of a symlink's target", lambda: os.chmod("s", 0o640), "g")

begin("rename")
NOREPLACE, EXCHANGE, WHITEOUT = 1, 2, 4


def scene():
    for entry in os.listdir("."):
        shutil.rmtree(entry) if os.path.isdir(entry) and not os.path.islink(entry) else os.unlink(entry)
    write("f", b"f")
    write("g", b"gg")
    os.link("f", "hard")
    os.symlink("f", "l")
    for name in ("d", "d/sub", "d/sub/deep", "e", "full", "full/x"):
        os.mkdir(name)


for what, one, other in (
        ("file", "f", "n"), ("file over file", "f", "g"), ("file over directory", "f", "e"),
        ("file over its link", "f", "hard"), ("file over itself", "f", "f"), ("file over symlink", "g", "l"),
        ("file, trailing slash", "f/", "n"), ("file to a trailing slash", "f", "n/"), ("missing", "none", "n"),
        ("missing directory", "f", "none/n"), ("below a file", "f", "g/n"), ("symlink", "l", "n"),
        ("directory", "d", "n"), ("directory, trailing slashes", "d/", "n/"), ("directory over file", "d", "f"),
        ("directory over empty", "d", "e"), ("directory over full", "d", "full"), ("directory into itself", "d", "d/n"),
        ("directory into its sub", "d", "d/sub/deep/n"), ("directory over its parent", "d/sub", "d"),
        ("directory up", "d/sub", "n"), ("directory to another", "d/sub", "e/n"), ("dot", ".", "n"),
        ("dot dot", "d/..", "n"), ("over dot", "d", "e/."), ("other file system", "f", "/dev/shm/bulkhead-rename")):
    scene()
    show(what, lambda: os.rename(one, other), *[it.rstrip("/") for it in (one, other) if "shm" not in it], ".")
for what, one, other, flags in (
        ("noreplace", "f", "n", NOREPLACE), ("noreplace, exists", "f", "g", NOREPLACE),
        ("noreplace, symlink exists", "f", "l", NOREPLACE), ("noreplace, itself", "f", "f", NOREPLACE),
        ("noreplace, directory", "d", "n", NOREPLACE), ("exchange files", "f", "g", EXCHANGE),
        ("exchange file and directory", "f", "d", EXCHANGE), ("exchange directories", "d/sub", "e", EXCHANGE),
        ("exchange with missing", "f", "n", EXCHANGE), ("exchange with its sub", "d", "d/sub", EXCHANGE),
        ("exchange with its parent", "d/sub", "d", EXCHANGE), ("exchange links of one file", "f", "hard", EXCHANGE),
        ("exchange symlink", "l", "d", EXCHANGE), ("exchange and noreplace", "f", "g", EXCHANGE | NOREPLACE),
        ("whiteout", "f", "n", WHITEOUT), ("whiteout over file", "f", "g", WHITEOUT),
        ("whiteout directory", "d", "n", WHITEOUT), ("whiteout and exchange", "f", "g", WHITEOUT | EXCHANGE),
        ("unknown flag", "f", "n", 8)):
    scene()
    show(what, lambda: renameat2(one, other, flags), one, other, ".")
scene()
os.rename("d", "moved")
show("files below a renamed directory", lambda: os.mkdir("moved/sub/deep/new"), "moved/sub/deep", "d/sub")
os.chdir("moved/sub")
os.rename("../../moved", "../../again")
show("cwd below a renamed directory", lambda: os.getcwd().replace(TOP, ""), "deep")
show("parent after a rename", lambda: os.path.samefile("..", TOP + "/rename/again"))
os.rename(TOP + "/rename/again/sub", TOP + "/rename/e/sub")
show("parent after a move", lambda: os.path.samefile("..", TOP + "/rename/e"))

begin("length")
for length in (255, 256):
    name = "n" * length
    show(f"create {length}", lambda: opened(name, WR | CREAT), lambda: len(os.listdir(".")))
    show(f"stat {length}", lambda: os.stat("m" * length))
    show(f"mkdir {length}", lambda: os.mkdir("d" * length))
    show(f"rename {length}", lambda: os.rename("n" * 255, "r" * length))
    show(f"link {length}", lambda: os.link("r" * 255, "l" * length))
    show(f"symlink {length}", lambda: os.symlink("x", "s" * length))
    show(f"unlink {length}", lambda: os.unlink("l" * length))
    show(f"utf-8 of {length} bytes", lambda: opened("\u00e4" * (length // 2) + "x" * (length % 2), WR | CREAT))
show("path of 4095", lambda: os.stat("./" * 2047 + ".").st_nlink)
show("path of 4096", lambda: os.stat("./" * 2048).st_nlink)
os.chdir(TOP + "/length")
for _ in range(20):
    os.mkdir("deep" * 60)
    os.chdir("deep" * 60)
show("deep, create", lambda: opened("f", WR | CREAT), "f")
show("deep, getcwd", lambda: len(os.getcwd()) > 4096)
os.chdir(TOP + "/length")
previous = "f"
write("f")
for number in range(41):
    os.symlink(previous, f"l{number}")
    previous = f"l{number}"
show("40 links", lambda: opened("l39"))
show("41 links", lambda: opened("l40"))
for what, name in (("not utf-8", b"\xff\xfe\x80"), ("newline", b"a\nb"), ("control", b"\x01\x1f\x7f"),
                   ("spaces", b" x "), ("backslash", b"a\\b"), ("dots", b"..."), ("dash", b"-"),
                   ("composed", "\u00e9".encode()), ("decomposed", "e\u0301".encode()), ("emoji", b"\xf0\x9f\x8e\x89")):
    show(f"name, {what}", lambda: opened(name, WR | CREAT), name, lambda: name in os.listdir(b"."))
show("name, case", lambda: opened("CASE", WR | CREAT), "case")

begin("list")
COUNT = 130
for number in range(COUNT):
    os.mknod(f"f{number}")
for kind in ("dir", "link", "fifo", "socket", "char"):
    os.mkdir("a dir") if kind == "dir" else os.symlink("x", "a link") if kind == "link" else os.mknod(
        f"a {kind}", {"fifo": stat.S_IFIFO, "socket": stat.S_IFSOCK, "char": stat.S_IFCHR}[kind], os.makedev(1, 3))
TYPES = {1: "fifo", 2: "char", 4: "dir", 8: "file", 10: "link", 12: "socket"}


class Entry(ctypes.Structure):
    _fields_ = [("ino", ctypes.c_uint64), ("off", ctypes.c_int64), ("len", ctypes.c_uint16), ("type", ctypes.c_uint8),
                ("name", ctypes.c_char * 256)]


class Directory:
    def __init__(self, path="."):
        self.dir = ctypes.c_void_p(libc.opendir(os.fsencode(path)))

    def next(self):
        found = libc.readdir(self.dir)
        return Entry.from_address(found) if found else None

    def rest(self):
        entries = []
        while (entry := self.next()) is not None:
            entries.append((entry.name.decode(), entry.ino, entry.type))
        return entries

    def tell(self):
        return libc.telldir(self.dir)

    def seek(self, position):
        libc.seekdir(self.dir, ctypes.c_long(position))

    def __del__(self):
        libc.closedir(self.dir)


found = Directory().rest()
show("entries", lambda: (len(found), len({name for name, _, _ in found})))
show("types", lambda: " ".join(sorted(f"{name[2:]}:{TYPES.get(kind, kind)}" for name, _,
                                      kind in found if name[0] == "a")))
show("types of files", lambda: {TYPES.get(kind, kind) for name, _, kind in found if name[0] == "f"})
show("inodes of files are those of stat", lambda: all(os.lstat(n).st_ino == ino for n, ino, kind in found if kind == 8))
show("inodes differ", lambda: len({ino for name, ino, _ in found if name[0] in "af"}) == COUNT + 5)
directory = Directory()
places = []
for _ in range(100):
    directory.next()
    places.append(directory.tell())
following = directory.next().name
directory.seek(places[99])
show("seek", lambda: directory.next().name == following)
directory.seek(places[49])
show("seek back", lambda: len(directory.rest()) == len(found) - 50)
directory.seek(places[10])
show("seek from the end", lambda: len(directory.rest()) == len(found) - 11)
libc.rewinddir(directory.dir)
show("rewind", lambda: len(directory.rest()) == len(found))
os.mknod("new")
show("new file, at the end", lambda: directory.next() is None)
libc.rewinddir(directory.dir)
show("new file, rewound", lambda: "new" in [name for name, _, _ in directory.rest()])
show("new file, opened", lambda: "new" in os.listdir("."))
os.rename("new", "newer")
show("renamed file", lambda: [name for name in os.listdir(".") if name.startswith("new")])
os.unlink("newer")
show("removed file", lambda: [name for name in os.listdir(".") if name.startswith("new")])
one, other = Directory(), Directory()
show("two readers", lambda: [one.next().name == other.next().name for _ in range(5)] == [True] * 5)
gone = Directory()
seen = 0
while (entry := gone.next()) is not None:
    name = entry.name.decode()
    if name[0] == "f":
        os.unlink(name)
        seen += 1
show("removed while it is read", lambda: seen, lambda: len(os.listdir(".")))
for number in range(40):
    os.mknod(f"b{number}")
made = Directory()
seen, renamed = set(), 0
while (entry := made.next()) is not None:
    name = entry.name.decode()
    if name[0] == "b":
        seen.add(name)
        if renamed < 20:
            os.rename(name, f"c{name}")
            renamed += 1
show("renamed while it is read", lambda: len(seen))
with File(".") as fd:
    buffer = ctypes.create_string_buffer(8)
    show("read", lambda: os.read(fd, 10))
    show("write", lambda: os.write(fd, b"x"))
    show("getdents, short buffer", lambda: call(217, fd, buffer, 8))
    buffer = ctypes.create_string_buffer(1 << 16)
    show("getdents", lambda: call(217, fd, buffer, 1 << 16) > 0)
    show("getdents, end", lambda: [call(217, fd, buffer, 1 << 16) for _ in range(3)][2])
    show("lseek to the begin", lambda: os.lseek(fd, 0, 0), lambda: call(217, fd, buffer, 1 << 16) > 0)
with File("a link", O_PATH | os.O_NOFOLLOW) as fd:
    show("getdents of a path", lambda: call(217, fd, buffer, 1 << 16))
write("file")
with File("file") as fd:
    show("getdents of a file", lambda: call(217, fd, buffer, 1 << 16))
os.mkdir("closed", 0o711)
write("closed/known")
show("closed directory, as a user", as_user(lambda: many(lambda: os.listdir("closed"), lambda: opened("closed/known"))))
os.chmod("closed", 0o744)
show("directory without search, as a user",
     as_user(lambda: many(lambda: os.listdir("closed"), lambda: opened("closed/known"), lambda: os.chdir("closed"))))
