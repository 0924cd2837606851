"""Sets a trusted attribute of a directory as root, and attacks it as another user, to whom the directory belongs.

Arguments: the directory, and the name that the attribute has on the host.
"""

import errno
import os
import sys

DIRECTORY, ON_HOST = sys.argv[1:]
NAME = "trusted.overlay.opaque"
USER = 1000


def attempt(what, act):
    try:
        result = act()
        print(f"{what}: {'done' if result is None else result}", flush=True)
    except OSError as error:
        print(f"{what}: {errno.errorcode[error.errno]}", flush=True)


os.mkdir(DIRECTORY)
os.chown(DIRECTORY, USER, USER)
attempt("root set", lambda: os.setxattr(DIRECTORY, NAME, b"y"))
attempt("root get", lambda: os.getxattr(DIRECTORY, NAME))
attempt("root list", lambda: os.listxattr(DIRECTORY))
child = os.fork()
if child == 0:
    os.setgid(USER)
    os.setuid(USER)
    for name, suffix in ((NAME, ""), (ON_HOST, " by the host's name")):
        attempt(f"user set{suffix}", lambda: os.setxattr(DIRECTORY, name, b"x"))
        attempt(f"user get{suffix}", lambda: os.getxattr(DIRECTORY, name))
        attempt(f"user remove{suffix}", lambda: os.removexattr(DIRECTORY, name))
    os._exit(0)
os.waitpid(child, 0)
attempt("root get", lambda: os.getxattr(DIRECTORY, NAME))
