# Mounts a FUSE file system that has one file, "there", and whose server creates a file whatever there is, as many
# servers do: the kernel has asked for the name before. Says whether "there" can be created once more.
import ctypes
import os
import struct
import threading

LOOKUP, FORGET, GETATTR, INIT, CREATE, BATCH_FORGET = 1, 2, 3, 26, 35, 42
IN_HEADER = struct.Struct("<IIQQIIII")
ROOT, THERE = 1, 2
created = []


def attributes(node):
    mode = 0o40755 if node == ROOT else 0o100644
    return struct.pack("<6Q10I", node, 0, 0, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


def entry():
    return struct.pack("<QQQQII", THERE, 0, 0, 0, 0, 0) + attributes(THERE)


def answer(opcode, node, body):
    """The error and the bytes of the answer."""
    if opcode == INIT:
        return 0, struct.pack("<IIIIHHIIHHI7I", 7, 31, 0, 0, 0, 0, 4096, 1, 0, 0, 0, *[0] * 7)
    if opcode == GETATTR:
        return 0, struct.pack("<QII", 0, 0, 0) + attributes(node)
    if opcode == LOOKUP:
        return (0, entry()) if body.rstrip(b"\0") == b"there" else (2, b"")
    if opcode == CREATE:
        created.append(body[16:].rstrip(b"\0").decode())
        return 0, entry() + struct.pack("<QII", 0, 0, 0)
    return 38, b""


def serve(device):
    while True:
        request = os.read(device, 1 << 17)
        _, opcode, unique, node, *_ = IN_HEADER.unpack_from(request)
        if opcode in (FORGET, BATCH_FORGET):
            continue
        error, data = answer(opcode, node, request[IN_HEADER.size:])
        os.write(device, struct.pack("<IiQ", 16 + len(data), -error, unique) + data)


device = os.open("/dev/fuse", os.O_RDWR)
libc = ctypes.CDLL(None, use_errno=True)
options = b"fd=%d,rootmode=40000,user_id=0,group_id=0" % device
if libc.mount(b"test", b"/mnt", b"fuse.test", 0, options):
    raise OSError(ctypes.get_errno(), "mount")
threading.Thread(target=serve, args=(device,), daemon=True).start()
results = []
for name in ("there", "new"):
    try:
        os.close(os.open("/mnt/" + name, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        results.append(name + " is new")
    except FileExistsError:
        results.append(name + " exists")
print("results=" + ", ".join(results))
print("created=" + ", ".join(created), flush=True)
os._exit(0)
