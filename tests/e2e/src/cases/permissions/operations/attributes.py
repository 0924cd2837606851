
begin("mode")
write("f")
os.mkdir("d")
show("chmod", lambda: os.chmod("f", 0o6751), "f")
show("chmod of a directory", lambda: os.chmod("d", 0o3771), "d")
show("chmod, as a user", as_user(lambda: os.chmod("f", 0o777)), "f")
os.chown("f", USER, GROUP)
show("chown clears set-id", "f")
os.chmod("f", 0o2755)
show("chmod of one's file, foreign group", as_user(lambda: os.chmod("f", 0o2755)), "f")
show("chmod of one's file, own group", as_user(lambda: os.chmod("f", 0o2755), groups=[GROUP]), "f")
show("chown, as its owner", as_user(lambda: os.chown("f", OTHER, -1)), "f")
show("chgrp to a foreign group", as_user(lambda: os.chown("f", -1, OTHER)), "f")
os.chmod("f", 0o6755)
show("chgrp to an own group", as_user(lambda: os.chown("f", -1, USER)), "f")
os.chmod("f", 0o6755)
show("chgrp to the same", as_user(lambda: os.chown("f", -1, USER)), "f")
os.chmod("f", 0o6755)
show("chown to nobody", lambda: os.chown("f", -1, -1), "f")
os.chmod("f", 0o6755)
show("chown by root clears set-id", lambda: os.chown("f", USER, USER), "f")
os.chmod("f", 0o2644)
show("chown by root, group may not execute", lambda: os.chown("f", USER, USER), "f")
os.chown("f", USER, GROUP)
os.chmod("f", 0o2644)
show("chgrp, group may not execute", as_user(lambda: os.chown("f", -1, USER)), "f")
os.chmod("d", 0o6755)
show("chown of a directory keeps set-id", lambda: os.chown("d", USER, GROUP), "d")
show("largest ids", lambda: os.chown("d", 2**32 - 2, 2**32 - 2), "d")
show("as a user in a directory of root", as_user(lambda: many(
    lambda: opened("u", WR | CREAT), lambda: os.mkdir("u"), lambda: os.unlink("f"), lambda: os.rename("f", "u"),
    lambda: os.symlink("x", "u"), lambda: os.link("f", "u"))))
CAPABILITY = struct.pack("<IIIII", 0x02000001, 0x400, 0, 0, 0)
os.chmod(".", 0o777)
for what, act in (("write", lambda: os.write(os.open("s", WR), b"x")),
                  ("write nothing", lambda: os.write(os.open("s", WR), b"")),
                  ("truncate", lambda: os.truncate("s", 3)), ("truncate to the same", lambda: os.truncate("s", 5)),
                  ("open and truncate", lambda: opened("s", WR | TRUNC)),
                  ("allocate", lambda: fallocate(os.open("s", WR), 0, 0, 9)),
                  ("punch", lambda: fallocate(os.open("s", WR), 3, 0, 2)),
                  ("copy a range", lambda: os.copy_file_range(os.open("from", RD), os.open("s", WR), 3)),
                  ("splice", lambda: os.sendfile(os.open("s", WR), os.open("from", RD), 0, 3)),
                  ("store in a page", lambda: mmap.mmap(os.open("s", RW), 3).__setitem__(0, 1)),
                  ("utime", lambda: os.utime("s")), ("link", lambda: os.link("s", "s2")),
                  ("open to write", lambda: opened("s", RW))):
    def again(mode, has_capability):
        for name in ("s", "s2"):
            if os.path.exists(name):
                os.unlink(name)
        write("s")
        write("from")
        os.chmod("s", mode)
        if has_capability:
            os.setxattr("s", "security.capability", CAPABILITY)

    def kept():
        return "capability" if "security.capability" in os.listxattr("s") else "no capability"
    again(0o6777, False)
    show(f"set-id, {what} as root", act, mode_of("s"))
    again(0o6777, False)
    show(f"set-id, {what} as a user", as_user(act), mode_of("s"))
    again(0o777, True)
    show(f"capability, {what} as root", act, kept)
    again(0o777, True)
    show(f"capability, {what} as a user", as_user(act), kept)
    if what == "write":
        again(0o6777, True)
        show("set-id and capability, write as root", act, mode_of("s"), kept)
        again(0o6777, True)
        show("set-id and capability, write as a user", as_user(act), mode_of("s"), kept)
        again(0o2666, False)
        show("set-group-id without execution, write as a user", as_user(act), mode_of("s"))
os.unlink("s")
os.chmod(".", 0o755)
os.mkdir("group")
os.chown("group", 0, GROUP)
os.chmod("group", 0o2777)
show("set-group-id directory", lambda: (opened("group/f", WR | CREAT), os.mkdir("group/d"),
                                        os.symlink("x", "group/l"))[2],
     "group/f", "group/d", "group/l")
show("set-group-id directory, as a user", as_user(lambda: (opened("group/u", WR | CREAT), os.mkdir("group/v"))[1]),
     "group/u", "group/v")
show("set-group-id directory, set-id file of a stranger", as_user(lambda: opened("group/w", WR | CREAT, 0o2755)),
     "group/w")
show("set-group-id directory, set-id file of a member",
     as_user(lambda: opened("group/x", WR | CREAT, 0o2755), groups=[GROUP]), "group/x")
show("set-group-id directory, set-id node of a member",
     as_user(lambda: os.mknod("group/y", stat.S_IFREG | 0o2755), groups=[GROUP]), "group/y")
show("set-group-id directory, file without a name", lambda: attributes(os.fstat(os.open("group", O_TMPFILE | RW))))
os.mkdir("sticky")
os.chmod("sticky", 0o1777)
write("sticky/root", b"x", 0o666)
write("sticky/secret", b"x", 0o600)
write("sticky/other", b"x", 0o666)
os.chown("sticky/other", OTHER, OTHER)
os.symlink("other", "sticky/link")
os.lchown("sticky/link", OTHER, OTHER)
show("sticky, unlink", as_user(lambda: os.unlink("sticky/root")))
show("sticky, rename", as_user(lambda: os.rename("sticky/root", "sticky/n")))
show("sticky, replace", as_user(lambda: (write("sticky/own"), os.rename("sticky/own", "sticky/root"))[1]))
show("sticky, write", as_user(lambda: opened("sticky/root", WR)))
show("sticky, unlink by the owner of the directory", lambda: os.unlink("sticky/own"))
show("protected hard links", as_user(lambda: os.link("sticky/secret", "sticky/n")))
show("protected hard links, writable", as_user(lambda: os.link("sticky/other", "sticky/n2")))
show("protected symlinks", as_user(lambda: opened("sticky/link")), lambda: opened("sticky/link"))
write("owned", b"x", 0o400)
os.chown("owned", USER, USER)
show("owner without permission", as_user(lambda: many(lambda: opened("owned", WR), lambda: opened("owned"))))
show("root without permission", lambda: opened("owned", WR))
show("access", lambda: many(*(lambda it=it: os.access("owned", it) for it in (os.R_OK, os.W_OK, os.X_OK))))
show("faccessat2, effective ids", as_user(lambda: many(
    *(lambda it=it: call(439, AT_FDCWD, b"owned", it, 0x200) for it in (4, 2, 1)))))
show("access, real ids", as_user(lambda: os.access("owned", os.W_OK)))
os.chmod("owned", 0)
show("mode 0", as_user(lambda: many(lambda: opened("owned"), lambda: os.chmod("owned", 0o600),
                                    lambda: opened("owned", RW))))
os.umask(0o077)
show("umask", lambda: (opened("mask", WR | CREAT), os.mkdir("maskd", 0o777), os.mkfifo("maskp"))[1], "mask", "maskd",
     "maskp")
os.umask(0)
show("no umask", lambda: (opened("nomask", WR | CREAT), os.mkdir("nomaskd"), os.symlink("x", "nomaskl"))[1], "nomask",
     "nomaskd",
     "nomaskl")
os.umask(0o022)
os.chmod(".", 0o777)
libc.setfsgid(GROUP)
libc.setfsuid(USER)
show("fsuid", lambda: opened("fsuid", WR | CREAT), "fsuid", lambda: opened("owned"))
libc.setfsuid(0)
libc.setfsgid(0)
show("as a user, whose it is", as_user(lambda: (opened("whose", WR | CREAT), os.mkdir("whosed"),
                                                os.symlink("x", "whosel"),
                                              os.mkfifo("whosep"), os.link("whose", "whose2"))[1]),
     "whose", "whosed", "whosel", "whosep")

begin("time")
write("f")
write("g")
write("run", b"#!/bin/true\n", 0o755)
os.mkdir("d")
os.mkdir("e")
os.symlink("f", "l")
for what, act, paths in (
        ("read", lambda: read("f"), "f"), ("read again", lambda: read("f"), "f"),
        ("read nothing", lambda: os.read(os.open("f", RD), 0), "f"), ("open", lambda: opened("f", RW), "f"),
        ("write", lambda: write("f"), "f ."), ("write nothing", lambda: os.write(os.open("f", WR), b""), "f"),
        ("append", lambda: os.write(os.open("f", WR | APPEND), b"x"), "f"),
        ("truncate", lambda: os.truncate("f", 2), "f"), ("truncate to the same", lambda: os.truncate("f", 2), "f"),
        ("ftruncate to the same", lambda: os.ftruncate(os.open("f", WR), 2), "f"),
        ("open to truncate", lambda: opened("f", WR | TRUNC), "f"),
        ("open the empty to truncate", lambda: opened("f", WR | TRUNC), "f"),
        ("allocate", lambda: fallocate(os.open("f", WR), 0, 0, 10), "f"),
        ("allocate, keep the size", lambda: fallocate(os.open("f", WR), 1, 0, 8192), "f"),
        ("punch", lambda: fallocate(os.open("f", WR), 3, 0, 4096), "f"),
        ("chmod", lambda: os.chmod("f", 0o600), "f ."), ("chmod to the same", lambda: os.chmod("f", 0o600), "f"),
        ("chown", lambda: os.chown("f", 1, 1), "f ."), ("chown to nobody", lambda: os.chown("f", -1, -1), "f"),
        ("set an attribute", lambda: os.setxattr("f", "user.x", b"1"), "f"),
        ("get an attribute", lambda: os.getxattr("f", "user.x"), "f"),
        ("remove an attribute", lambda: os.removexattr("f", "user.x"), "f"),
        ("link", lambda: os.link("f", "hard"), "f ."), ("unlink of one name", lambda: os.unlink("hard"), "f ."),
        ("rename", lambda: os.rename("f", "n"), "f=n ."),
        ("rename to another", lambda: os.rename("n", "d/n"), "n=d/n . d"),
        ("rename over", lambda: os.rename("d/n", "g"), "d/n=g . d"),
        ("rename to itself", lambda: os.rename("g", "g"), "g ."),
        ("rename a directory", lambda: os.rename("e", "d/e"), "e=d/e . d"),
        ("exchange", lambda: renameat2("g", "l", 2), "g=l l=g ."),
        ("exchange back", lambda: renameat2("g", "l", 2), "g=l l=g ."),
        ("mkdir", lambda: os.mkdir("d/s"), "d"), ("rmdir", lambda: os.rmdir("d/s"), "d"),
        ("create", lambda: opened("d/c", WR | CREAT), "d"),
        ("create, exists", lambda: opened("d/c", WR | CREAT), "d d/c"),
        ("symlink", lambda: os.symlink("x", "d/l"), "d"), ("mkfifo", lambda: os.mkfifo("d/p"), "d"),
        ("unlink", lambda: os.unlink("d/c"), "d"), ("list", lambda: listing("d"), "d"),
        ("look up", lambda: os.path.exists("d/none"), "d"), ("readlink", lambda: os.readlink("l"), "l"),
        ("follow a link", lambda: os.stat("l").st_nlink, "l"),
        ("run", lambda: child(lambda: os.execv("run", ["run"])), "run"),
        ("copy a range", lambda: os.copy_file_range(os.open("big", RD), os.open("to", WR), 10), "big to"),
        ("sendfile", lambda: os.sendfile(os.open("to", WR), os.open("big", RD), 0, 10), "big to"),
        ("map and read", lambda: mmap.mmap(os.open("big", RD), 9, mmap.MAP_SHARED, mmap.PROT_READ)[0], "big"),
        ("no noatime", lambda: os.read(os.open("big", RD | os.O_NOATIME), 10), "big"),
        ("default list", lambda: os.setxattr("d", "system.posix_acl_default", LIST), "d"),
        ("utime of a link", lambda: os.utime("l", ns=(1, 2), follow_symlinks=False), "l g"),
        ("failed rename", lambda: os.rename("g", "d"), "g d ."), ("failed rmdir", lambda: os.rmdir("d"), "d ."),
        ("inode flags", lambda: set_inode_flags(os.open("big", RD), 0x40), "big")):
    for name in ("big", "to"):
        if name in paths and not os.path.exists(name):
            write(name, b"0" * 100)
    LIST = struct.pack("<I" + "HHI" * 3, 2, 1, 7, 2**32 - 1, 4, 5, 2**32 - 1, 32, 5, 2**32 - 1)
    show(what, lambda: moved(act, *paths.split()))
write("f")
os.chown("f", OTHER, OTHER)
os.chmod("f", 0o664)


def times(path="f"):
    found = os.stat(path)
    return [f"{'now' if it > 1_500_000_000_000_000_000 else it}" for it in (found.st_atime_ns, found.st_mtime_ns)]


def utimensat(one, other, path="f"):
    """(seconds, nanoseconds) each."""
    call(280, AT_FDCWD, os.fsencode(path), struct.pack("qqqq", *one, *other), 0)


NOW, OMIT = (0, (1 << 30) - 1), (0, (1 << 30) - 2)
for what, one, other in (("set", (5, 6), (7, 8)), ("omit", OMIT, (9, 1)), ("omit both", OMIT, OMIT), ("now", NOW, OMIT),
                         ("now, and omit", OMIT, NOW), ("both now", NOW, NOW), ("nanoseconds", (1, 999999999), (1, 1)),
                         ("before 1970", (-5, 3), (-1, 999999999)), ("2038", (1 << 31, 0), (1 << 31, 0)),
                         ("2500", (16725225600, 0), (16725225600, 0)), ("not valid", (1, 1000000000), (1, 1)),
                         ("not valid, negative", (1, 1), (1, -1))):
    show(f"utimensat, {what}", lambda: utimensat(one, other), times)
    if what not in ("before 1970", "2038", "2500"):
        show(f"utimensat, {what}, as a user", as_user(lambda: utimensat(one, other)))
        show(f"utimensat, {what}, as a writer", as_user(lambda: utimensat(one, other), groups=[OTHER]))
show("utimensat of a descriptor", lambda: os.utime(os.open("f", RD), ns=(1, 2)), times)
show("utimensat by a path", lambda: call(280, os.open("f", O_PATH), b"", struct.pack("qqqq", 3, 4, 5, 6),
                                         AT_EMPTY_PATH), times)

begin("attribute")
write("f")
os.mkdir("d")
os.symlink("f", "l")
os.mkfifo("p")
for space in ("user", "trusted", "security", "system", "none"):
    name = f"{space}.name"
    show(f"{space}, set", lambda: os.setxattr("f", name, b"value"))
    show(f"{space}, get", lambda: os.getxattr("f", name))
    show(f"{space}, as a user", as_user(lambda: many(lambda: os.getxattr("f", name),
                                                     lambda: os.setxattr("f", name, b"x"))))
    show(f"{space}, list", lambda: sorted(os.listxattr("f")))
    show(f"{space}, remove", lambda: os.removexattr("f", name))
    show(f"{space}, get nothing", lambda: os.getxattr("f", name))
    show(f"{space}, remove nothing", lambda: os.removexattr("f", name))
    show(f"{space}, list nothing", lambda: os.listxattr("f"))
    for path in "dlp":
        show(f"{space}, of {path}", lambda: os.setxattr(path, name, b"1", follow_symlinks=False),
             lambda: os.getxattr(path, name, follow_symlinks=False))
os.setxattr("f", "user.a", b"one")
show("create, exists", lambda: os.setxattr("f", "user.a", b"two", os.XATTR_CREATE))
show("replace, missing", lambda: os.setxattr("f", "user.b", b"two", os.XATTR_REPLACE))
show("create", lambda: os.setxattr("f", "user.b", b"two", os.XATTR_CREATE))
show("replace", lambda: os.setxattr("f", "user.a", b"longer", os.XATTR_REPLACE), lambda: os.getxattr("f", "user.a"))
show("unknown flag", lambda: os.setxattr("f", "user.a", b"x", 4))
show("empty value", lambda: os.setxattr("f", "user.empty", b""), lambda: os.getxattr("f", "user.empty"))
show("binary value", lambda: os.setxattr("f", "user.bin", b"\0\xff\0"), lambda: os.getxattr("f", "user.bin"))
buffer = ctypes.create_string_buffer(100)
show("length", lambda: call(191, b"f", b"user.a", None, 0))
show("short buffer", lambda: call(191, b"f", b"user.a", buffer, 3))
show("length of the list", lambda: call(194, b"f", None, 0))
show("short buffer of the list", lambda: call(194, b"f", buffer, 5))
show("empty name", lambda: os.setxattr("f", "user.", b"x"))
show("no name", lambda: os.setxattr("f", "", b"x"))
show("name of 255", lambda: os.setxattr("f", "user." + "n" * 250, b"x"), lambda: os.getxattr("f", "user." + "n" * 250))
show("name of 256", lambda: os.setxattr("f", "user." + "n" * 251, b"x"))
show("trusted name of 241", lambda: os.setxattr("f", "trusted." + "n" * 233, b"x"))
show("trusted name of 255", lambda: os.setxattr("f", "trusted." + "n" * 247, b"x"))
show("value of 2000", lambda: os.setxattr("f", "user.big", b"x" * 2000), lambda: len(os.getxattr("f", "user.big")))
show("value of 65537", lambda: os.setxattr("f", "user.huge", b"x" * 65537))
os.chmod("d", 0o1777)
show("sticky directory, as a user", as_user(lambda: os.setxattr("d", "user.x", b"1")))
os.chmod("f", 0o444)
os.chown("f", USER, USER)
show("read-only file, as its owner",
     as_user(lambda: many(lambda: os.setxattr("f", "user.x", b"1"), lambda: os.getxattr("f", "user.a"))))
show("kept by a rename", lambda: (os.rename("f", "g"), os.getxattr("g", "user.a"))[1])
show("capability", lambda: os.setxattr("g", "security.capability", CAPABILITY),
     lambda: os.getxattr("g", "security.capability").hex())
show("capability, as a user", as_user(lambda: os.setxattr("g", "security.capability", CAPABILITY)))
show("capability, not valid", lambda: os.setxattr("g", "security.capability", b"x"))
show("capability, chown", lambda: os.chown("g", 0, 0), lambda: "security.capability" in os.listxattr("g"))

begin("acl")
ANY = 2**32 - 1


def acl(*entries):
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


ACCESS, DEFAULT = "system.posix_acl_access", "system.posix_acl_default"
NAMED = acl((1, 7, ANY), (2, 6, USER), (4, 4, ANY), (8, 6, GROUP), (16, 6, ANY), (32, 0, ANY))
write("f", b"text", 0o640)
os.mkdir("d")
show("none", lambda: os.getxattr("f", ACCESS), lambda: os.getxattr("d", DEFAULT))
show("set", lambda: os.setxattr("f", ACCESS, NAMED), "f", lambda: os.getxattr("f", ACCESS) == NAMED)
show("named user", as_user(lambda: many(lambda: opened("f", RW), lambda: os.access("f", os.W_OK))))
show("named group", as_user(lambda: opened("f", RW), OTHER, [GROUP]))
show("others", as_user(lambda: opened("f"), OTHER))
show("mask by chmod", lambda: os.chmod("f", 0o640), "f", lambda: os.getxattr("f", ACCESS).hex())
show("masked user", as_user(lambda: many(lambda: opened("f", RW), lambda: opened("f"))))
show("listed", lambda: os.listxattr("f"))
show("like a mode", lambda: os.setxattr("f", ACCESS, acl((1, 6, ANY), (4, 0, ANY), (32, 4, ANY))), "f",
     lambda: os.getxattr("f", ACCESS))
show("set, as a user", as_user(lambda: os.setxattr("f", ACCESS, NAMED)))
show("not valid", lambda: many(lambda: os.setxattr("f", ACCESS, b"x"), lambda: os.setxattr("f", ACCESS, NAMED[:-8]),
                               lambda: os.setxattr("f", ACCESS, acl((2, 6, 1)))))
show("remove", lambda: (os.setxattr("f", ACCESS, NAMED), os.removexattr("f", ACCESS))[1], "f",
     lambda: os.getxattr("f", ACCESS))
show("default of a file", lambda: os.setxattr("f", DEFAULT, NAMED))
show("default", lambda: os.setxattr("d", DEFAULT, NAMED), "d", lambda: os.getxattr("d", DEFAULT) == NAMED)
show("inherited", lambda: (opened("d/f", WR | CREAT), os.mkdir("d/d"), os.mkfifo("d/p"), os.symlink("x", "d/l"))[1],
     "d/f", "d/d", "d/p", "d/l", lambda: os.getxattr("d/f", ACCESS).hex(), lambda: os.getxattr("d/d", DEFAULT) == NAMED)
os.umask(0o077)
show("inherited, not the umask", lambda: (opened("d/g", WR | CREAT), os.mkdir("d/e"))[1], "d/g", "d/e")
os.umask(0o022)
show("inherited, smaller mode", lambda: opened("d/h", WR | CREAT, 0o600), "d/h",
     lambda: os.getxattr("d/h", ACCESS).hex())
show("inherited without a name", lambda: attributes(os.fstat(os.open("d", O_TMPFILE | RW))))
show("link keeps it", lambda: (os.setxattr("f", ACCESS, NAMED), os.link("f", "g"))[1],
     lambda: os.getxattr("g", ACCESS) == NAMED)
show("default removed", lambda: os.removexattr("d", DEFAULT), lambda: os.getxattr("d", DEFAULT))
os.chown("f", USER, GROUP)
os.chmod("f", 0o2755)
show("set-group-id cleared", as_user(lambda: os.setxattr("f", ACCESS, NAMED)), "f")

begin("events")
os.mkdir("d")
write("d/f")
notify = libc.inotify_init1(os.O_NONBLOCK)
EVENTS = ("access modify attrib close_write close open from to create delete delete_self move_self - unmount overflow "
          "ignored").split()


def events(act):
    """The events in the directory, and of the file in it, that `act` causes."""
    def drain():
        try:
            return os.read(notify, 1 << 16)
        except BlockingIOError:
            return b""
    drain()
    said, found, at, line = result(act), drain(), 0, []
    while at < len(found):
        watch, mask, _, length = struct.unpack_from("iIII", found, at)
        name = found[at + 16:at + 16 + length].rstrip(b"\0").decode()
        which = "+".join(it for bit, it in enumerate(EVENTS) if mask >> bit & 1)
        line.append(f"{'dir' if watch == OF_DIRECTORY else 'file'} {which} {name}".strip())
        at += 16 + length
    return f"{said}: {', '.join(line)}"


OF_DIRECTORY = libc.inotify_add_watch(notify, b"d", 0xFFF)
libc.inotify_add_watch(notify, b"d/f", 0xFFF)
for what, act in (("create", lambda: opened("d/n", WR | CREAT)), ("read", lambda: read("d/f")),
                  ("write", lambda: os.write(os.open("d/f", WR), b"x")), ("truncate", lambda: os.truncate("d/f", 1)),
                  ("chmod", lambda: os.chmod("d/f", 0o600)), ("chmod to the same", lambda: os.chmod("d/f", 0o600)),
                  ("utime", lambda: os.utime("d/f")), ("set an attribute", lambda: os.setxattr("d/f", "user.x", b"1")),
                  ("link", lambda: os.link("d/f", "d/h")), ("unlink of one name", lambda: os.unlink("d/h")),
                  ("rename", lambda: os.rename("d/f", "d/g")), ("rename over", lambda: os.rename("d/n", "d/g")),
                  ("exchange", lambda: (write("d/o"), renameat2("d/o", "d/g", 2))[1]),
                  ("move away", lambda: os.rename("d/o", "o")), ("move back", lambda: os.rename("o", "d/o")),
                  ("mkdir", lambda: os.mkdir("d/s")), ("rmdir", lambda: os.rmdir("d/s")),
                  ("symlink", lambda: os.symlink("x", "d/l")), ("list", lambda: listing("d")),
                  ("allocate", lambda: fallocate(os.open("d/o", WR), 0, 0, 10)), ("unlink", lambda: os.unlink("d/o")),
                  # One name is left then: which of two is removed first depends on the hashes of the file system.
                  ("unlink of a link", lambda: os.unlink("d/l")), ("remove the directory", lambda: shutil.rmtree("d"))):
    show(what, lambda: events(act))

begin("identity")
write("f")
os.mkdir("d")
os.symlink("f", "l")
os.mkfifo("p")
inode = os.stat("f").st_ino
for what, act in (("chmod", lambda: os.chmod("f", 0o600)), ("write", lambda: write("f", b"more")),
                  ("link", lambda: os.link("f", "h")),
                  ("rename", lambda: (os.rename("f", "d/f"), os.rename("d/f", "f"))[1]),
                  ("fsync", lambda: os.fsync(os.open("f", RD)))):
    show(f"inode after {what}", act, lambda: os.stat("f").st_ino == inode)
show("inodes differ", lambda: len({os.lstat(it).st_ino for it in "fdlp."}))
show("one device", lambda: len({os.lstat(it).st_dev for it in "fdlp."}))
show("descriptor and path", lambda: os.fstat(os.open("f", RD)).st_ino == os.stat("f").st_ino)
DEV = os.stat(".").st_dev
MOUNT = TOP
while not os.path.ismount(MOUNT):
    MOUNT = os.path.dirname(MOUNT)
with open("/proc/self/mountinfo") as mounts:
    numbers = [line.split()[2] for line in mounts if line.split()[4] == MOUNT]
show("device of /proc/self/mountinfo", lambda: numbers[-1] == f"{os.major(DEV)}:{os.minor(DEV)}")
buffer = ctypes.create_string_buffer(256)


def statx(path, flags=AT_NOFOLLOW, mask=0xFFF | 0x1000):
    call(332, AT_FDCWD, os.fsencode(path), flags, mask, buffer)
    mask, block, _, links, user, group, mode = struct.unpack_from("IIQIIIH", buffer)
    return mask, struct.unpack_from("q", buffer, 80)[0], mode


for path in ("f", "d", "l", "p"):
    show(f"statx {path}", lambda: (hex(statx(path)[0] & 0xFFF), statx(path)[1] > 1_500_000_000))
show("statx, basic", lambda: hex(statx("f", AT_NOFOLLOW, 0x7FF)[0] & 0x7FF))
show("statx, reserved bit", lambda: statx("f", AT_NOFOLLOW, 1 << 31))
show("statx, missing", lambda: statx("none"))
show("statx, do not sync", lambda: hex(statx("f", AT_NOFOLLOW | 0x4000)[0] & 0x7FF))
show("birth time stays", lambda: (lambda one: (write("f"), statx("f")[1] == one)[1])(statx("f")[1]))


def known(act, path):
    """Whether stat(2) after `act` says what the file system says that is asked anew (AT_STATX_FORCE_SYNC)."""
    def values(flags):
        statx(path, flags, 0x7FF)
        _, _, _, links, user, group, mode, inode, size, blocks = struct.unpack_from("IIQIIIHxxQQQ", buffer)
        return links, user, group, oct(mode), inode, size, blocks, buffer[64:76], buffer[96:108], buffer[112:124]
    values(0)
    act()
    cached, asked = values(0), values(0x2000)
    return "the same" if cached == asked else f"{cached}, and not {asked}"


def map_and_write():
    with File("k", RW) as fd, mmap.mmap(fd, 4096) as pages:
        pages[5:6] = b"m"
        os.pwrite(fd, b"w", 2)
        pages.flush()


write("k", b"x" * 10000)
with File("k", RW) as fd, File("k", RW | APPEND) as end_of_k:
    for what, act in (
        ("a write", lambda: os.pwrite(fd, b"abc", 5000)),
        ("an append", lambda: os.write(end_of_k, b"abc")),
        ("two appends", lambda: (os.write(end_of_k, b"abc"), os.write(end_of_k, b"def"))),
        ("a large write", lambda: os.pwrite(fd, b"x" * (3 << 20), 100)),
        ("a write beyond the end", lambda: os.pwrite(fd, b"x", 5 << 20)),
        ("a read and a write", lambda: (os.pread(fd, 10, 0), os.pwrite(fd, b"x", 0))),
        ("a write and a read", lambda: (os.pwrite(fd, b"x", 0), os.pread(fd, 10, 0))),
        ("a write and a mapped one", map_and_write),
        ("a write and a time", lambda: (os.pwrite(fd, b"x", 0), os.utime(fd, ns=(PAST, PAST)))),
        ("a time and a write", lambda: (os.utime(fd, ns=(PAST, PAST)), os.pwrite(fd, b"x", 0))),
        ("truncate and a write", lambda: (os.ftruncate(fd, 10), os.pwrite(fd, b"x", 100))),
        ("a write and a hole", lambda: (os.pwrite(fd, b"x" * 9999, 0), fallocate(fd, 3, 0, 8192))),
        ("a write, and another name", lambda: (os.pwrite(fd, b"x", 0), os.link("k", "k2"))),
        ("a write by another name", lambda: (opened("k2", WR), os.pwrite(fd, b"y", 0))),
    ):
        show(f"known after {what}", lambda: known(act, "k"))
    show("a write is known by the other name", lambda: known(lambda: os.pwrite(fd, b"z", 1), "k2"))
    os.chmod("k", 0o6777)
    plain_write = as_user(lambda: os.pwrite(fd, b"x", 0))
    show("known after set-id, a write as a user", lambda: known(plain_write, "k"), mode_of("k"))
fs = os.statvfs(".")
show("statfs", lambda: (fs.f_namemax, fs.f_bsize, fs.f_frsize, fs.f_blocks > 0, fs.f_bavail <= fs.f_bfree,
                        fs.f_files > 0))
show("statfs of a file", lambda: os.statvfs("f").f_blocks == fs.f_blocks)
show("statfs, flags", lambda: [name for name in ("ST_RDONLY", "ST_NOSUID", "ST_NODEV", "ST_NOEXEC", "ST_SYNCHRONOUS",
                                                "ST_MANDLOCK") if fs.f_flag & getattr(os, name)])
show("block size", lambda: os.stat("f").st_blksize)
show("blocks", lambda: (write("b", b"x" * 100000), os.stat("b").st_blocks * 512 // 100000)[1])


def handle(path, flags=0):
    place = ctypes.create_string_buffer(struct.pack("Ii", 128, 0) + bytes(128))
    call(303, AT_FDCWD, os.fsencode(path), place, ctypes.byref(ctypes.c_int()), flags)
    return place


show("name_to_handle_at", lambda: handle("f") and None)
show("open_by_handle_at", lambda: os.read(call(304, os.open(".", RD), handle("f"), RD), 99))
show("working directory by /proc", lambda: os.path.samefile("/proc/self/cwd", "."))
show("name of a descriptor", lambda: os.readlink(f"/proc/self/fd/{os.open('f', RD)}") == os.path.abspath("f"))
show("directories, names", lambda: (os.mkdir("d/1"), os.mkdir("d/2"), write("d/f"))[0], "d")
show("directory removed", lambda: os.rmdir("d/1"), "d")
show("directory moved out", lambda: os.rename("d/2", "2"), "d", ".")
os.chdir(TOP)
for entry in os.listdir("."):
    shutil.rmtree(entry)
show("all is removed", lambda: os.listdir("."))
