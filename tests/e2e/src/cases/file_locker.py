# Locks the file that is its argument, and the directory of the file, as the lines of its standard input say:
# NUMBER KIND WHAT. KIND: a process, an open file or flock(2), of the file or of its directory. WHAT: "write" or "read",
# with "-wait" behind it or not, "end", or "who". "close" opens the file once more, and closes that.
import errno
import fcntl
import os
import struct
import sys

KINDS = {"write": fcntl.F_WRLCK, "read": fcntl.F_RDLCK, "end": fcntl.F_UNLCK}
FLOCK = struct.Struct("hhqqi4x")
path = sys.argv[1]
file = os.open(path, os.O_RDWR)
directory = os.open(os.path.dirname(path), os.O_RDONLY)


def flock(on, what, waits):
    operation = {"write": fcntl.LOCK_EX, "read": fcntl.LOCK_SH, "end": fcntl.LOCK_UN}[what]
    fcntl.flock(on, operation | (0 if waits else fcntl.LOCK_NB))
    return "done"


def of_range(commands, what, waits):
    command = commands["who" if what == "who" else "wait" if waits else "now"]
    wanted = FLOCK.pack(KINDS.get(what, fcntl.F_WRLCK), os.SEEK_SET, 10, 20, 0)
    kind, _, start, length, pid = FLOCK.unpack(fcntl.fcntl(file, command, wanted))
    if what != "who":
        return "done"
    return "nobody" if kind == fcntl.F_UNLCK else f"{kind} from {start} for {length} by {pid}"


ACTS = {
    "process": lambda *what: of_range({"who": 5, "now": 6, "wait": 7}, *what),
    "open-file": lambda *what: of_range({"who": 36, "now": 37, "wait": 38}, *what),
    "flock": lambda *what: flock(file, *what),
    "directory": lambda *what: flock(directory, *what),
}
print("ready", flush=True)
for line in sys.stdin:
    number, kind, what = line.split()
    try:
        if what == "close":
            os.close(os.open(path, os.O_RDONLY))
            answer = "done"
        else:
            answer = ACTS[kind](what.removesuffix("-wait"), what.endswith("-wait"))
    except OSError as error:
        answer = "busy" if error.errno in (errno.EAGAIN, errno.EACCES) else str(error)
    print(number, answer, flush=True)
