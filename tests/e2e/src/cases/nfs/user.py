"""Works with files as a user, and prints what fails.

Usage: user.py USER GROUPS DIRECTORY, where GROUPS are numbers with commas between them.
"""

import errno
import fcntl
import mmap
import os
import sys

user, groups, directory = int(sys.argv[1]), sys.argv[2], sys.argv[3]
os.setgroups([int(group) for group in groups.split(",")])
os.setgid(user)
os.setuid(user)
os.umask(0o077)


def write(name, text, flags=os.O_CREAT | os.O_EXCL):
    file = os.open(name, os.O_WRONLY | flags, 0o600)
    try:
        assert os.write(file, text) == len(text)
        os.fsync(file)
    finally:
        os.close(file)


def read(name):
    file = os.open(name, os.O_RDONLY)
    try:
        return os.read(file, 100)
    finally:
        os.close(file)


def is_text(name, text):
    came = read(name)
    assert came == text, came


def write_through_mapping(name):
    file = os.open(name, os.O_RDWR)
    with mmap.mmap(file, 4) as memory:
        memory[0:4] = b"MORE"
        memory.flush()
    os.close(file)
    is_text(name, b"MORE")


def lock(name):
    file = os.open(name, os.O_RDWR)
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(file)


def belongs_to_user(name):
    stat = os.stat(name)
    assert stat.st_uid == user, stat
    assert stat.st_mode & 0o777 == 0o600, stat


def make_many():
    os.mkdir("many")
    for index in range(100):
        os.mkdir(f"many/{index}")
        write(f"many/{index}/file", b"x")
    assert sorted(os.listdir("many")) == sorted(map(str, range(100)))
    for index in range(100):
        is_text(f"many/{index}/file", b"x")
        os.unlink(f"many/{index}/file")
        os.rmdir(f"many/{index}")
    os.rmdir("many")


STEPS = [
    ("enter", lambda: os.chdir(directory)),
    ("list", lambda: os.listdir(".")),
    ("create", lambda: write("a", b"text")),
    ("owner", lambda: belongs_to_user("a")),
    ("create again", lambda: write("a", b"text")),
    ("read", lambda: is_text("a", b"text")),
    ("append", lambda: write("a", b"more", os.O_APPEND)),
    ("read what was appended", lambda: is_text("a", b"textmore")),
    ("truncate as it is opened", lambda: write("a", b"new", os.O_TRUNC)),
    ("truncate", lambda: os.truncate("a", 4)),
    ("read what was truncated", lambda: is_text("a", b"new\0")),
    ("map", lambda: write_through_mapping("a")),
    ("lock", lambda: lock("a")),
    ("mode", lambda: os.chmod("a", 0o640)),
    ("times", lambda: os.utime("a", (1, 2))),
    ("group", lambda: os.chown("a", -1, user)),
    ("owner of another", lambda: os.chown("a", 0, -1)),
    ("rename", lambda: os.rename("a", "b")),
    ("link", lambda: os.link("b", "c")),
    ("symbolic link", lambda: os.symlink("b", "s")),
    ("read a link", lambda: is_text("s", b"MORE")),
    ("fifo", lambda: os.mkfifo("fifo")),
    ("directory", lambda: os.mkdir("d")),
    ("rename into a directory", lambda: os.rename("c", "d/c")),
    ("rename to what is the same file", lambda: os.rename("d/c", "b")),
    ("remove a name", lambda: os.unlink("d/c")),
    ("rename over a file", lambda: (write("new", b"new"), write("d/c", b""), os.rename("new", "d/c"))),
    ("fill a directory", lambda: write("d/e", b"")),
    ("remove what is not empty", lambda: os.rmdir("d")),
    ("remove files", lambda: [os.unlink(f"d/{name}") for name in ("c", "e")]),
    ("remove a directory", lambda: os.rmdir("d")),
    ("remove all", lambda: [os.unlink(name) for name in os.listdir(".") if not os.path.isdir(name)]),
    ("many", make_many),
]

for name, step in STEPS:
    try:
        step()
    except OSError as error:
        print(f"{name}: {errno.errorcode[error.errno]}")
    except AssertionError as error:
        print(f"{name}: {error}")
print("end")
