"""Makes operations on files in a directory, and prints a line for each: its name, its result, and what is there.

Argument: an empty directory, which is made if it is missing. The process is root. The parts of this program are one
file after the other.
"""

import array
import atexit
import ctypes
import errno
import fcntl
import mmap
import os
import re
import resource
import select
import shutil
import signal
import socket
import stat
import struct
import sys
import time

O_PATH, O_TMPFILE, AT_EMPTY_PATH, AT_FDCWD, AT_NOFOLLOW, AT_FOLLOW = 0o10000000, 0o20200000, 0x1000, -100, 0x100, 0x400
RD, WR, RW, CREAT, EXCL, TRUNC, APPEND = (
    os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_CREAT, os.O_EXCL, os.O_TRUNC, os.O_APPEND)
USER, OTHER, GROUP = 1000, 2000, 5000
PAST = 10**18
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
for name in ("opendir", "readdir", "fdopendir"):
    getattr(libc, name).restype = ctypes.c_void_p
libc.telldir.restype = ctypes.c_long
names = set()
lines = []
section = ""


def text(value):
    if isinstance(value, bytes):
        short = value if len(value) < 60 else value[:20] + b"..."
        return f"{short!r}" + (f"[{len(value)}]" if short is not value else "")
    return str(value)


def result(act):
    """What `act` returns, or the name of its error."""
    try:
        value = act() if callable(act) else act
    except OSError as error:
        return errno.errorcode.get(error.errno, str(error.errno))
    except Exception as error:
        return f"{type(error).__name__} {error}"
    return "ok" if value is None else text(value)


def show(what, act, *after):
    """Prints the result of `act`, and then the states of these paths, or of what these functions return."""
    parts = [result(act)] + [result(it) if callable(it) else state(it) for it in after]
    name = f"{section}: {what}"
    assert name not in names, name
    names.add(name)
    lines.append(f"{name} = {'; '.join(parts)}")


KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "dir", stat.S_IFLNK: "link", stat.S_IFIFO: "fifo",
         stat.S_IFSOCK: "socket", stat.S_IFCHR: "char", stat.S_IFBLK: "block"}


def attributes(found):
    mode = found.st_mode
    line = f"{KINDS[stat.S_IFMT(mode)]} {stat.S_IMODE(mode):o} {found.st_uid}:{found.st_gid} {found.st_nlink}"
    if stat.S_ISREG(mode) or stat.S_ISLNK(mode):
        line += f" {found.st_size}"
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        line += f" {os.major(found.st_rdev)},{os.minor(found.st_rdev)}"
    return line


def state(path):
    """The attributes of a path or a descriptor."""
    def act():
        return attributes(os.fstat(path) if isinstance(path, int) else os.lstat(path))
    name = "" if isinstance(path, int) else f"{path} " if isinstance(path, str) else f"{path[-8:]!r} "
    return name + result(act)


def mode_of(path):
    return lambda: f"{stat.S_IMODE(os.lstat(path).st_mode):o}"


def call(number, *args):
    """A system call that Python lacks."""
    def given(arg):
        return ctypes.c_long(arg) if isinstance(arg, int) else arg
    value = libc.syscall(ctypes.c_long(number), *map(given, args))
    if value < 0:
        raise OSError(ctypes.get_errno(), "")
    return value


def renameat2(one, other, flags):
    call(316, AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), flags)


def linkat(directory, one, other, flags):
    call(265, directory, os.fsencode(one), AT_FDCWD, os.fsencode(other), flags)


def fallocate(fd, mode, offset, length):
    call(285, fd, mode, offset, length)


def opened(path, flags=RD, mode=0o666):
    """Opens and closes."""
    os.close(os.open(path, flags, mode))
    return "opened"


def inode_flags(fd):
    """The inode flags (FS_IOC_GETFLAGS)."""
    return struct.unpack("q", fcntl.ioctl(fd, 0x80086601, bytes(8)))[0]


def set_inode_flags(fd, new):
    """Sets the inode flags (FS_IOC_SETFLAGS)."""
    fcntl.ioctl(fd, 0x40086602, struct.pack("q", new))


class File:
    """A descriptor."""

    def __init__(self, path, flags=RD, mode=0o666):
        self.fd = os.open(path, flags, mode)

    def __enter__(self):
        return self.fd

    def __exit__(self, *_):
        os.close(self.fd)


class As:
    """Acts as a plain user."""

    def __init__(self, user=USER, groups=()):
        self.user, self.groups = user, groups

    def __enter__(self):
        os.setgroups(self.groups)
        os.setegid(self.user)
        os.seteuid(self.user)

    def __exit__(self, *_):
        os.seteuid(0)
        os.setegid(0)
        os.setgroups([])


def as_user(act, user=USER, groups=()):
    """A function that acts as a plain user."""
    def inner():
        with As(user, groups):
            return act()
    return inner


def write(path, content=b"text\n", mode=None):
    with File(path, WR | CREAT | TRUNC) as fd:
        os.write(fd, content)
    if mode is not None:
        os.chmod(path, mode)


def read(path):
    with File(path) as fd:
        return os.read(fd, 1 << 20)


def content(path):
    return lambda: read(path)


def listing(path="."):
    return " ".join(sorted(os.listdir(path)))


def many(*acts):
    """Runs these, and returns the results."""
    return ", ".join(result(act) for act in acts)


def child(act):
    """Runs `act` in another process, and returns what it wrote or which signal ended it."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writes, result(act).encode())
        finally:
            os._exit(0)
    os.close(writes)
    said = b""
    while part := os.read(reads, 4096):
        said += part
    os.close(reads)
    status = os.waitpid(pid, 0)[1]
    return signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else said.decode()


def moved(act, *paths):
    """Which times of the paths move: access, modification, change. `old=new` is a file that is renamed."""
    paths, now = [path.split("=")[0] for path in paths], [path.split("=")[-1] for path in paths]
    for path in paths:
        os.utime(path, ns=(PAST, PAST + 1), follow_symlinks=False)
    time.sleep(0.02)
    before = [os.lstat(path) for path in paths]
    said = result(act)
    line = []
    for path, old in zip(now, before):
        try:
            new = os.lstat(path)
        except OSError:
            line.append(f"{path} gone")
            continue
        which = "".join(letter for letter, one, other in (
            ("a", old.st_atime_ns, new.st_atime_ns), ("m", old.st_mtime_ns, new.st_mtime_ns),
            ("c", old.st_ctime_ns, new.st_ctime_ns)) if one != other)
        line.append(f"{path} {which or '-'}")
    return f"{said}, {', '.join(line)}"


def end():
    """Prints a section. Not earlier, because a limit of the size of files may be that of the output too."""
    print("".join(f"{line}\n" for line in lines), end="", flush=True)
    lines.clear()


def begin(name):
    """Ends a section, and begins another one in a new directory."""
    end()
    global section
    section = name
    os.chdir(TOP)
    for entry in os.listdir("."):
        # Some directories are closed or were removed by name only.
        shutil.rmtree(entry, ignore_errors=True)
    os.mkdir(name)
    os.chmod(name, 0o755)
    os.chdir(name)


atexit.register(end)
TOP = os.path.abspath(sys.argv[1])
os.makedirs(TOP, exist_ok=True)
os.chmod(TOP, 0o755)
os.umask(0o022)
# A lease that is broken sends it.
signal.signal(signal.SIGIO, signal.SIG_IGN)
os.setgroups([])
