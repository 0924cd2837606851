"""Writes to files in pieces and by mappings, gives capabilities to programs and takes them, and looks each time.

Usage: last_write.py DIRECTORY [PROGRAM...]. Each program does what cat(1) does. The kernel of a guest remembers much of
these files.
"""

import ctypes
import mmap
import os
import random
import shutil
import struct
import subprocess
import sys

PAGE = 4096
LONGEST = 40 << 10
MOST = 12 << 10
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
os.chdir(sys.argv[1])
os.chmod(".", 0o755)
choose = random.Random(1)


def piece():
    return choose.randbytes(choose.choice([1, 100, 511, 512, PAGE - 1, PAGE, PAGE + 1, choose.randrange(1, MOST)]))


def change(file, content):
    """Changes the file in one way, and returns what it contains then."""
    what = choose.choice(["append", "append", "append", "write", "truncate", "both", "map"])
    at = choose.choice([0, len(content), choose.randrange(len(content) + MOST)])
    data = piece()
    if what == "truncate":
        os.truncate(file, at)
        return content[:at].ljust(at, b"\0")
    if what == "map" and content:
        at %= len(content)
        with mmap.mmap(file, len(content)) as mapped:
            mapped[at:at + 1] = b"m"
        return content[:at] + b"m" + content[at + 1:]
    at = len(content) if what == "append" else at
    if what == "both":
        # One call with several buffers, of which none ends at a page.
        assert os.pwritev(file, [data, data], at) == 2 * len(data)
        data *= 2
    else:
        assert os.pwrite(file, data, at) == len(data)
    return content[:at].ljust(at, b"\0") + data + content[at + len(data):]


def mapped(file, length):
    """The whole pages of a file of this length. What is past its end is zeros."""
    length = -length % PAGE + length
    address = libc.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, file, 0)
    assert address != ctypes.c_void_p(-1).value, os.strerror(ctypes.get_errno())
    content = ctypes.string_at(address, length)
    libc.munmap(address, length)
    return content


def expect(file, content):
    if choose.random() < 0.5:
        assert os.fstat(file).st_size == len(content)
    assert os.lseek(file, 0, os.SEEK_END) == len(content)
    assert os.pread(file, LONGEST + 3 * MOST, 0) == content
    if content:
        assert mapped(file, len(content)).rstrip(b"\0") == content.rstrip(b"\0")


def forget(file):
    """Has the next read of the file ask the host."""
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def in_pieces():
    for number in range(6):
        file = os.open(f"pieces-{number}", os.O_RDWR | os.O_CREAT | os.O_EXCL)
        content = b""
        for _ in range(60):
            content = change(file, content)
            # Not each time, so that there are pages that were written to and not read.
            if choose.random() < 0.3:
                forget(file)
            if choose.random() < 0.5:
                expect(file, content)
            if len(content) > LONGEST:
                os.truncate(file, 100)
                content = content[:100]
        expect(file, content)
        forget(file)
        expect(file, content)
        os.close(file)
        with open(f"pieces-{number}", "rb") as again:
            assert again.read() == content


def holes():
    """What a mapping has written is no hole, whoever looks while it is mapped. cp(1) leaves holes out."""
    file = os.open("holes", os.O_RDWR | os.O_CREAT | os.O_EXCL)
    os.truncate(file, 16 * PAGE)
    with mmap.mmap(file, 16 * PAGE) as mapping:
        mapping[4 * PAGE:8 * PAGE] = b"d" * (4 * PAGE)
        assert os.lseek(file, 0, os.SEEK_DATA) <= 4 * PAGE
        mapping[10 * PAGE] = 1
        subprocess.run(["cp", "--sparse=auto", "holes", "copy"], check=True)
        with open("copy", "rb") as copy:
            assert copy.read() == mapping[:]
    # A program of 32 bits may know no larger numbers.
    assert os.fstat(file).st_ino < 1 << 32
    os.close(file)


def capabilities(program):
    """The program, which is not in use elsewhere, gets and loses a capability."""
    # Permitted and effective: CAP_DAC_OVERRIDE (linux/capability.h, struct vfs_cap_data, version 2).
    capability = struct.pack("<5I", 0x02000001, 1 << 1, 0, 0, 0)

    def reads():
        command = [os.path.abspath(program), os.path.abspath("secret")]
        return subprocess.run(command, user=1000, capture_output=True).returncode == 0

    seen = [reads(), reads()]
    os.setxattr(program, "security.capability", capability)
    seen += [reads(), reads()]
    os.removexattr(program, "security.capability")
    seen += [reads(), reads()]
    os.setxattr(program, "security.capability", capability)
    other = f"{program}-other"
    os.link(program, other)
    os.unlink(program)
    os.rename(other, program)
    seen += [reads(), reads()]
    with open(program, "ab") as written:
        written.write(b"\0")
    seen += [reads(), reads()]
    assert seen == [False] * 2 + [True] * 2 + [False] * 2 + [True] * 2 + [False] * 2, (program, seen)


in_pieces()
holes()
shutil.copy("/bin/cat", "cat")
with open("secret", "w") as secret:
    secret.write("secret")
os.chmod("secret", 0o600)
capabilities("cat")
# The same with programs of the image.
for program in sys.argv[2:]:
    capabilities(program)
print("as it must be")
